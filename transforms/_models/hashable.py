"""Separate any value into arrays and the rest, as a hashable value (`HashablePytree`) or as any pytree (`Opaque`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.tree_util import register_dataclass

from .split_model import by_value

# The types that count as arrays rather than configuration.
_ARRAYS = (jax.Array, np.ndarray, np.generic)


class Placeholder(Enum):
    """Markers in place of arrays: members of an Enum, since these keep their identity if copied or pickled."""

    ARRAY = "array"
    TRAINABLE = "trainable"
    REST = "rest"


class HashablePytree:
    """A pytree without its arrays: hashable, and equal only if all leaves have the same types and values."""

    __slots__ = ("_key", "_leaves", "_treedef")

    def __init__(self, leaves: tuple[Any, ...], treedef: Any) -> None:
        self._leaves = leaves
        self._treedef = treedef
        # 1, 1.0 and True are equal, but a function may treat them differently.
        self._key = treedef, by_value(leaves), tuple(map(type, leaves))

    @classmethod
    def separate(cls, tree: Any, kinds: tuple[type, ...] = _ARRAYS) -> tuple[list[Any], HashablePytree]:
        """Return the leaves of `tree` of these types, and everything else."""
        leaves, treedef = jax.tree.flatten(tree)
        arrays = [leaf for leaf in leaves if isinstance(leaf, kinds)]
        return arrays, cls(tuple(Placeholder.ARRAY if isinstance(leaf, kinds) else leaf for leaf in leaves), treedef)

    @classmethod
    def of(cls, tree: Any) -> HashablePytree:
        """Return the whole `tree`, arrays included, as a hashable value."""
        return cls.separate(tree, ())[1]

    @staticmethod
    def is_array(x: Any) -> bool:
        """Return whether `x` is an array rather than configuration."""
        return isinstance(x, _ARRAYS)

    def join(self, arrays: Iterable[Any]) -> Any:
        """Return the tree that was passed to `separate`, with these arrays."""
        rest = iter(arrays)
        return self.map(lambda leaf: next(rest) if leaf is Placeholder.ARRAY else leaf)

    def map(self, fun: Callable[[Any], Any]) -> Any:
        """Return the tree with `fun` applied to each leaf."""
        return jax.tree.unflatten(self._treedef, map(fun, self._leaves))

    @property
    def value(self) -> Any:
        """Return the tree that was passed to `of`."""
        return self.join([])

    def __reduce__(self) -> Any:
        return HashablePytree, (self._leaves, self._treedef)  # without the key, since types in it may not be picklable

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, HashablePytree) and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)


@partial(register_dataclass, data_fields=["arrays"], meta_fields=["join"])
@dataclass(frozen=True, eq=False)
class Opaque:
    """Any value as a pytree of its JAX arrays, so that a function transformed by JAX can return it.

    Attributes:
      arrays: the arrays; after a transform, its results for them.
      join: a function from arrays to the value. It is a bound method of an object that is compared by identity, so the
        rest of the value may be anything, without `==` or a hash.
    """

    arrays: list[Any]
    join: Callable[[Iterable[Any]], Any]

    @classmethod
    def of(cls, value: Any) -> Opaque:
        """Return `value` as an `Opaque`."""
        arrays, rest = HashablePytree.separate(value, (jax.Array,))
        return cls(arrays, rest.join)

    @property
    def value(self) -> Any:
        """Return the value with the current arrays."""
        return self.join(self.arrays)
