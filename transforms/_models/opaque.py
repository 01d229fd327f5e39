"""`Opaque`: any value as a pytree of its JAX arrays, so that it passes through a transform of JAX as an output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from .hashable import Placeholder


# Compared by identity: what is not an array may be anything, which need not have `==` or a hash.
@dataclass(frozen=True, eq=False)
class _Static:
    leaves: list[Any]
    treedef: Any


@dataclass(frozen=True, eq=False)
class Opaque:
    """Any value as a pytree of its JAX arrays: all else in it is static.

    Attributes:
      arrays: the arrays; others after a transform.
    """

    arrays: list[Any]
    _static: _Static

    @classmethod
    def of(cls, value: Any) -> Opaque:
        """Return a value as such a pytree."""
        leaves, treedef = jax.tree.flatten(value)
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        marked = [Placeholder.ARRAY if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        return cls(arrays, _Static(marked, treedef))

    @property
    def value(self) -> Any:
        """Return the value, with the arrays of this pytree."""
        arrays = iter(self.arrays)
        leaves = (next(arrays) if leaf is Placeholder.ARRAY else leaf for leaf in self._static.leaves)
        return jax.tree.unflatten(self._static.treedef, leaves)

    def filled(self, arrays: list[Any]) -> Opaque:
        """Return the same with other arrays."""
        return replace(self, arrays=arrays)


jax.tree_util.register_pytree_node(
    Opaque, lambda x: (x.arrays, x._static), lambda static, arrays: Opaque(list(arrays), static)
)
