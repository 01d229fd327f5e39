"""`KroneckerFactors`: a block-diagonal matrix over parameters, with a block for each of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.linalg import block_diag
from jax.tree_util import register_dataclass

from .._core.arguments import describe
from .._core.compat import Tracer

_STATIC: Any = {"static": True}


@register_dataclass
@dataclass(frozen=True)
class KroneckerBlock:
    """The block A ⊗ G / mass of a parameter, for each index of its stack axes.

    Attributes:
      left: A, shape (stack, p, p); or its diagonal, shape (stack, p).
      right: G, shape (stack, d, d); or its diagonal, shape (stack, d).
      mass: the sum of the weights of what was added to A and to G.
      axes: the axes of the parameter that are the stack, p and d.
      shape: the shape of the parameter.
    """

    left: jax.Array
    right: jax.Array
    mass: jax.Array
    axes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] = field(metadata=_STATIC)
    shape: tuple[int, ...] = field(metadata=_STATIC)

    @property
    def form(self) -> str:
        """Return what the block is, in words."""
        sides = [f"{x.shape[1]}{'' if x.ndim == 3 else ' (diagonal)'}" for x in (self.left, self.right)]
        stack = f"{len(self.left)} times " if len(self.left) != 1 else ""
        return f"Kronecker product, {stack}{sides[0]} x {sides[1]}"

    @property
    def _divisor(self) -> jax.Array:
        return jnp.where(self.mass == 0, 1, self.mass)  # zero times a block has factors of zero

    def multiply(self, x: jax.Array) -> jax.Array:
        """Return the product of the block with an array like the parameter."""
        within = _times(self.left, self._split(x), 1, False) / self._divisor
        return self._merged(_times(self.right, within, 2, False))

    def spectral(self, fun: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """Return the product with a function of the block, which acts on its eigenvalues."""
        (left, of_left), (right, of_right) = _eigen(self.left), _eigen(self.right)
        scale = fun(left[:, :, None] * right[:, None, :] / self._divisor)
        within = _times(of_right, _times(of_left, self._split(x), 1, True), 2, True)
        return self._merged(_times(of_right, _times(of_left, within * scale, 1, False), 2, False))

    def eigenvalues(self) -> jax.Array:
        """Return the eigenvalues."""
        left, right = _eigen(self.left)[0], _eigen(self.right)[0]
        return left[:, :, None] * right[:, None, :] / self._divisor

    def diagonal(self) -> jax.Array:
        """Return the diagonal, like the parameter."""
        left, right = _diagonal(self.left), _diagonal(self.right)
        return self._merged(left[:, :, None] * right[:, None, :] / self._divisor)

    def dense(self) -> jax.Array:
        """Return the block as a matrix, in the order of the flattened parameter."""
        left, right = (jax.vmap(jnp.diag)(x) if x.ndim == 2 else x for x in (self.left, self.right))
        s, p, d = len(left), left.shape[1], right.shape[1]
        blocks = jnp.einsum("spq,sde->spdqe", left, right, precision="highest") / self._divisor
        full = jnp.zeros((s, p, d, s, p, d), blocks.dtype).at[jnp.arange(s), :, :, jnp.arange(s)].set(blocks)
        columns = jax.vmap(self._merged, -1, -1)(full.reshape(s, p, d, -1))
        columns = columns.reshape(-1, s, p, d)
        return jax.vmap(self._merged)(columns).reshape(2 * [math.prod(self.shape)])

    def plus(self, other: KroneckerBlock) -> KroneckerBlock:
        """Return the block of the sums of both factors."""
        left, right, mass = (getattr(self, x) + getattr(other, x) for x in ("left", "right", "mass"))
        return replace(self, left=left, right=right, mass=mass)

    def scaled(self, scale: Any) -> KroneckerBlock:
        """Return the block times a number."""
        return replace(self, left=self.left * scale, right=self.right * scale, mass=self.mass * scale)

    def _split(self, x: jax.Array) -> jax.Array:
        """Return an array like the parameter in the shape (stack, p, d)."""
        order = [axis for axes in self.axes for axis in axes]
        return x.transpose(order).reshape(len(self.left), self.left.shape[1], self.right.shape[1])

    def _merged(self, x: jax.Array) -> jax.Array:
        """Return an array of shape (stack, p, d) in the shape of the parameter."""
        order = [axis for axes in self.axes for axis in axes]
        back = [order.index(axis) for axis in range(len(order))]
        return x.reshape([self.shape[axis] for axis in order]).transpose(back)


@register_dataclass
@dataclass(frozen=True)
class FullBlock:
    """The block of a parameter as a matrix.

    Attributes:
      matrix: the block, in the order of the flattened parameter.
      shape: the shape of the parameter.
    """

    matrix: jax.Array
    shape: tuple[int, ...] = field(metadata=_STATIC)

    @property
    def form(self) -> str:
        """Return what the block is, in words."""
        return f"exact, a matrix of {len(self.matrix)} rows"

    def multiply(self, x: jax.Array) -> jax.Array:
        """Return the product of the block with an array like the parameter."""
        return jnp.matmul(self.matrix, x.ravel(), precision="highest").reshape(self.shape)

    def spectral(self, fun: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """Return the product with a function of the block, which acts on its eigenvalues."""
        values, vectors = jnp.linalg.eigh(self.matrix)
        within = jnp.matmul(vectors.T, x.ravel(), precision="highest") * fun(jnp.maximum(values, 0))
        return jnp.matmul(vectors, within, precision="highest").reshape(self.shape)

    def eigenvalues(self) -> jax.Array:
        """Return the eigenvalues."""
        return jnp.maximum(jnp.linalg.eigvalsh(self.matrix), 0)

    def diagonal(self) -> jax.Array:
        """Return the diagonal, like the parameter."""
        return jnp.diagonal(self.matrix).reshape(self.shape)

    def dense(self) -> jax.Array:
        """Return the block as a matrix."""
        return self.matrix

    def plus(self, other: FullBlock) -> FullBlock:
        """Return the sum of both blocks."""
        return replace(self, matrix=self.matrix + other.matrix)

    def scaled(self, scale: Any) -> FullBlock:
        """Return the block times a number."""
        return replace(self, matrix=self.matrix * scale)


@register_dataclass
@dataclass(frozen=True)
class DiagonalBlock:
    """The diagonal of the block of a parameter; all other entries count as zero.

    Attributes:
      values: the diagonal, like the parameter.
    """

    values: jax.Array

    @property
    def form(self) -> str:
        """Return what the block is, in words."""
        return f"diagonal, {self.values.size} numbers"

    def multiply(self, x: jax.Array) -> jax.Array:
        """Return the product of the block with an array like the parameter."""
        return self.values * x

    def spectral(self, fun: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """Return the product with a function of the block, which acts on its eigenvalues."""
        return fun(self.values) * x

    def eigenvalues(self) -> jax.Array:
        """Return the eigenvalues."""
        return self.values

    def diagonal(self) -> jax.Array:
        """Return the diagonal, like the parameter."""
        return self.values

    def dense(self) -> jax.Array:
        """Return the block as a matrix."""
        return jnp.diag(self.values.ravel())

    def plus(self, other: DiagonalBlock) -> DiagonalBlock:
        """Return the sum of both blocks."""
        return replace(self, values=self.values + other.values)

    def scaled(self, scale: Any) -> DiagonalBlock:
        """Return the block times a number."""
        return replace(self, values=self.values * scale)


Block = KroneckerBlock | FullBlock | DiagonalBlock


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
    structure: Any = field(metadata=_STATIC)

    def matvec(self, v: Any) -> Any:
        """Return D v."""
        return self._mapped("matvec", v, lambda block, x: block.multiply(x))

    def solve(self, v: Any, damping: Any) -> Any:
        """Return (D + damping I)⁻¹ v, by the eigenvalues of each block."""
        return self._mapped("solve", v, lambda block, x: block.spectral(lambda each: 1 / (each + damping), x))

    def sqrt_solve(self, v: Any, damping: Any) -> Any:
        """Return (D + damping I)^(-1/2) v with the symmetric root: normal v become samples of covariance `solve`."""
        return self._mapped("sqrt_solve", v, lambda block, x: block.spectral(lambda e: jax.lax.rsqrt(e + damping), x))

    def diagonal(self) -> Any:
        """Return the diagonal of D, like the parameters."""
        return jax.tree.unflatten(self.structure, [block.diagonal() for block in self.blocks])

    def logdet(self, damping: Any) -> jax.Array:
        """Return log det(D + damping I)."""
        return sum((jnp.log(block.eigenvalues() + damping).sum() for block in self.blocks), jnp.zeros(()))

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
            if jnp.shape(x) != jnp.shape(like := jax.eval_shape(block.diagonal)):
                given = f"v has {describe(x)} where a parameter is {describe(like)}"
                raise ValueError(f"KroneckerFactors.{name}: {given}; pass a pytree like the parameters.")
        return jax.tree.unflatten(structure, [fun(block, x) for block, x in zip(self.blocks, leaves, strict=True)])


def _eigen(side: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the eigenvalues of one side, shape (stack, size), and its eigenvectors; ones if it is diagonal."""
    if side.ndim == 2:
        return side, jnp.ones_like(side)
    values, vectors = jnp.linalg.eigh(side)
    return jnp.maximum(values, 0), vectors


def _times(side: jax.Array, x: jax.Array, axis: int, transposed: bool) -> jax.Array:
    """Multiply an array of shape (stack, p, d) by a matrix, or its transpose, along axis 1 or 2."""
    if side.ndim == 2:
        return x * jnp.expand_dims(side, 3 - axis)
    names = (
        ("spq,sqd->spd" if axis == 1 else "sde,spe->spd")
        if not transposed
        else ("sqp,sqd->spd" if axis == 1 else "sed,spe->spd")
    )
    return jnp.einsum(names, side, x, precision="highest")


def _diagonal(side: jax.Array) -> jax.Array:
    """Return the diagonal of one side, shape (stack, size)."""
    return side if side.ndim == 2 else jnp.diagonal(side, axis1=1, axis2=2)
