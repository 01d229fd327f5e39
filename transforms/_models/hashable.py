"""Any value as its arrays and the rest of it: hashable, for static arguments of `jax.jit`, or of any kind."""

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

# What is an array rather than configuration.
_ARRAYS = (jax.Array, np.ndarray, np.generic)


class Placeholder(Enum):
    """Marks in place of arrays: members of an Enum, since those stay themselves when they are copied or pickled."""

    ARRAY = "array"
    TRAINABLE = "trainable"
    REST = "rest"


class HashablePytree:
    """A pytree without its arrays: hashable, and equal only for leaves of one type and value."""

    __slots__ = ("_key", "_leaves", "_treedef")

    def __init__(self, leaves: tuple[Any, ...], treedef: Any) -> None:
        self._leaves = leaves
        self._treedef = treedef
        # 1, 1.0 and True are equal, but a function may do something else with each.
        self._key = treedef, by_value(leaves), tuple(map(type, leaves))

    @classmethod
    def separate(cls, tree: Any, kinds: tuple[type, ...] = _ARRAYS) -> tuple[list[Any], HashablePytree]:
        """Return the leaves of `tree` that are of these types, and the rest of it."""
        leaves, treedef = jax.tree.flatten(tree)
        arrays = [leaf for leaf in leaves if isinstance(leaf, kinds)]
        return arrays, cls(tuple(Placeholder.ARRAY if isinstance(leaf, kinds) else leaf for leaf in leaves), treedef)

    @classmethod
    def of(cls, tree: Any) -> HashablePytree:
        """Return `tree` as a hashable value."""
        return cls.separate(tree, ())[1]

    @staticmethod
    def is_array(x: Any) -> bool:
        """Return whether `x` is an array rather than configuration."""
        return isinstance(x, _ARRAYS)

    def join(self, arrays: Iterable[Any]) -> Any:
        """Return the tree that `separate` was given, with these arrays."""
        rest = iter(arrays)
        return self.map(lambda leaf: next(rest) if leaf is Placeholder.ARRAY else leaf)

    def map(self, fun: Callable[[Any], Any]) -> Any:
        """Return the tree with `fun` applied to each leaf."""
        return jax.tree.unflatten(self._treedef, map(fun, self._leaves))

    @property
    def value(self) -> Any:
        """Return the tree that `of` was given."""
        return self.join([])

    def __reduce__(self) -> Any:
        return HashablePytree, (self._leaves, self._treedef)  # the types in the key may have no name to be pickled by

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, HashablePytree) and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)


@partial(register_dataclass, data_fields=["arrays"], meta_fields=["join"])
@dataclass(frozen=True, eq=False)
class Opaque:
    """Any value as a pytree of its JAX arrays, so that it passes through a transform of JAX as an output.

    Attributes:
      arrays: the arrays; others after a transform.
      join: the function from arrays to the value. It is a bound method, which Python compares by identity: what is not
        an array may be anything, and need not have `==` or a hash.
    """

    arrays: list[Any]
    join: Callable[[Iterable[Any]], Any]

    @classmethod
    def of(cls, value: Any) -> Opaque:
        """Return a value as such a pytree."""
        arrays, rest = HashablePytree.separate(value, (jax.Array,))
        return cls(arrays, rest.join)

    @property
    def value(self) -> Any:
        """Return the value, with the arrays of this pytree."""
        return self.join(self.arrays)
