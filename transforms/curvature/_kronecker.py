"""`KroneckerFactors`: a block-diagonal matrix over parameters, with a block for each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.linalg import block_diag
from jax.tree_util import register_dataclass

from .._core.arguments import describe
from .._core.compat import Tracer
from ._blocks import Block


@register_dataclass
@dataclass(frozen=True)
class KroneckerFactors:
    """A symmetric, positive semi-definite matrix D over parameters, block by block: a pytree.

    `kfac` returns it. Vectors are pytrees like the parameters. Sums and multiples average the factors of several
    batches: `0.5 * one + 0.5 * other` has the mean of the A and of the G of both.

    Attributes:
      blocks: the block of each parameter, in the order of `jax.flatten_util.ravel_pytree`.
      structure: the tree structure of the parameters.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from plurax.transforms.curvature import kfac
      >>> factors = kfac(lambda w, x: x @ w, lambda o, y: 0.5 * jnp.mean((o - y) ** 2), fisher="exact")
      >>> d = factors(jnp.ones((2, 1)), jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.zeros((2, 1)))
      >>> print(d.dense())
      [[5. 1.]
       [1. 2.]]
      >>> print(d.trace(), d.matvec(d.solve(jnp.ones((2, 1)), 1e-6)).ravel().round(3))
      7.0 [1. 1.]
    """

    blocks: tuple[Block, ...]
    structure: Any = field(metadata={"static": True})

    def matvec(self, v: Any) -> Any:
        """Return D v."""
        return self._mapped("matvec", v, lambda block, x: block.multiply(x))

    def solve(self, v: Any, damping: Any) -> Any:
        """Return (D + damping I)⁻¹ v, by the eigenvalues of each block."""
        return self._mapped("solve", v, lambda block, x: block.eigen().spectral(lambda e: 1 / (e + damping), x))

    def sqrt_solve(self, v: Any, damping: Any) -> Any:
        """Return (D + damping I)^(-1/2) v with the symmetric root: normal v become samples of covariance `solve`."""
        return self._mapped(
            "sqrt_solve", v, lambda block, x: block.eigen().spectral(lambda e: jax.lax.rsqrt(e + damping), x)
        )

    def diagonal(self) -> Any:
        """Return the diagonal of D, like the parameters."""
        return jax.tree.unflatten(self.structure, [block.diagonal() for block in self.blocks])

    def eigenvalues(self) -> jax.Array:
        """Return all eigenvalues of D, block by block, shape (numbers,)."""
        return jnp.concatenate([block.eigen().values.ravel() for block in self.blocks])

    def eigen(self) -> KroneckerFactors:
        """Return D with the eigenvectors of each block, so that no other method has to compute them."""
        return replace(self, blocks=tuple(block.eigen() for block in self.blocks))

    def logdet(self, damping: Any) -> jax.Array:
        """Return log det(D + damping I)."""
        return jnp.log(self.eigenvalues() + damping).sum()

    def trace(self) -> jax.Array:
        """Return the trace of D."""
        return sum((block.diagonal().sum() for block in self.blocks), jnp.zeros(()))

    def dense(self) -> jax.Array:
        """Return D as a matrix, in the order of `jax.flatten_util.ravel_pytree`."""
        return block_diag(*(block.dense() for block in self.blocks))

    def __add__(self, other: KroneckerFactors) -> KroneckerFactors:
        """Return the sum, in which factors are added to factors."""
        if not isinstance(other, KroneckerFactors):
            return NotImplemented
        mine: Any = jax.tree.structure(self)
        if mine != jax.tree.structure(other):
            raise ValueError("KroneckerFactors: factors can be added if they have the same parameters and blocks.")
        pairs: Any = zip(self.blocks, other.blocks, strict=True)
        return replace(self, blocks=tuple(one.plus(two) for one, two in pairs))

    def __mul__(self, scale: Any) -> KroneckerFactors:
        """Return D times a number, which must not be negative."""
        if jnp.ndim(scale):
            return NotImplemented
        if not isinstance(scale, Tracer) and scale < 0:
            raise ValueError(f"KroneckerFactors: the matrix is positive semi-definite; {scale} times it is not.")
        return replace(self, blocks=tuple(block.scaled(scale) for block in self.blocks))

    __rmul__ = __mul__

    def _mapped(self, name: str, v: Any, fun: Callable[[Any, jax.Array], jax.Array]) -> Any:
        """Return the results of `fun` for each block and its part of a vector."""
        leaves = jax.tree.leaves(v)
        structure: Any = jax.tree.structure(v)
        if structure != self.structure:
            given = f"v has the structure {structure}, but the parameters {self.structure}"
            raise ValueError(f"KroneckerFactors.{name}: {given}; pass a pytree like them.")
        for block, x in zip(self.blocks, leaves, strict=True):
            if jnp.shape(x) != block.shape:
                given = f"v has {describe(x)} where a parameter has the shape {block.shape}"
                raise ValueError(f"KroneckerFactors.{name}: {given}; pass a pytree like the parameters.")
        return jax.tree.unflatten(structure, [fun(block, x) for block, x in zip(self.blocks, leaves, strict=True)])
