"""Arguments with their arrays taken out, so that the remainder can be a static argument of `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import jax
import numpy as np

from .split_model import by_value


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
    def separate(cls, tree: Any) -> tuple[list[Any], HashablePytree]:
        """Return the arrays of `tree`, and the rest of it."""
        leaves, treedef = jax.tree.flatten(tree)
        arrays = [leaf for leaf in leaves if cls.is_array(leaf)]
        return arrays, cls(tuple(Placeholder.ARRAY if cls.is_array(leaf) else leaf for leaf in leaves), treedef)

    @classmethod
    def of(cls, tree: Any) -> HashablePytree:
        """Return `tree` as a hashable value, with None as a leaf."""
        leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
        return cls(tuple(leaves), treedef)

    @staticmethod
    def is_array(x: Any) -> bool:
        """Return whether `x` is an array rather than configuration."""
        return isinstance(x, (jax.Array, np.ndarray, np.generic))

    def join(self, arrays: list[Any]) -> Any:
        """Return the tree that `separate` was given, with these arrays."""
        rest = iter(arrays)
        return self.map(lambda leaf: next(rest) if leaf is Placeholder.ARRAY else leaf)

    def map(self, fun: Callable[[Any], Any]) -> Any:
        """Return the tree with `fun` applied to each leaf."""
        return jax.tree.unflatten(self._treedef, map(fun, self._leaves))

    @property
    def value(self) -> Any:
        """Return the tree that `of` was given."""
        return self.map(lambda leaf: leaf)

    def __reduce__(self) -> Any:
        return HashablePytree, (self._leaves, self._treedef)  # the types in the key may have no name to be pickled by

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, HashablePytree) and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)
