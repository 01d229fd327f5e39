"""The block of one parameter in a matrix over all parameters: a Kronecker product, or its corrected eigenvalues.

An exact block is one with the matrix as one side, and one number as the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from .._core.eigh import eigh

_STATIC: Any = {"static": True}


@dataclass(frozen=True)
class Sides:
    """Which axes of a parameter are the two sides of a Kronecker product.

    Attributes:
      axes: the axes of the parameter that are the stack, with a product for each index, and the sides p and d.
      shape: the shape of the parameter.
    """

    axes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] = field(metadata=_STATIC)
    shape: tuple[int, ...] = field(metadata=_STATIC)

    def sizes(self) -> tuple[int, int, int]:
        """Return the sizes of the stack, p and d."""
        stack, p, d = (math.prod(self.shape[axis] for axis in some) for some in self.axes)
        return stack, p, d

    def split(self, x: jax.Array) -> jax.Array:
        """Return an array like the parameter in the shape (stack, p, d)."""
        return x.transpose([axis for axes in self.axes for axis in axes]).reshape(self.sizes())

    def joined(self, x: jax.Array) -> jax.Array:
        """Return an array of shape (stack, p, d) in the shape of the parameter."""
        order = [axis for axes in self.axes for axis in axes]
        back = [order.index(axis) for axis in range(len(order))]
        return x.reshape([self.shape[axis] for axis in order]).transpose(back)

    def matrix(self, blocks: jax.Array) -> jax.Array:
        """Return the matrix of blocks of shape (stack, p, d, p, d), in the order of the flattened parameter."""
        s, p, d = self.sizes()
        full = jnp.zeros((s, p, d, s, p, d), blocks.dtype).at[jnp.arange(s), :, :, jnp.arange(s)].set(blocks)
        columns = jax.vmap(self.joined, -1, -1)(full.reshape(s, p, d, -1)).reshape(-1, s, p, d)
        return jax.vmap(self.joined)(columns).reshape(2 * [math.prod(self.shape)])


@register_dataclass
@dataclass(frozen=True)
class KroneckerBlock(Sides):
    """The block A ⊗ G / mass of a parameter, for each index of its stack.

    Attributes:
      left: A, shape (stack, p, p); or its diagonal, shape (stack, p).
      right: G, shape (stack, d, d); or its diagonal, shape (stack, d).
      mass: the sum of the weights of what was added to A and to G.
      exact: whether A is the block, or its diagonal.
    """

    left: jax.Array
    right: jax.Array
    mass: jax.Array
    exact: bool = field(default=False, metadata=_STATIC)

    @classmethod
    def of_matrix(cls, matrix: jax.Array, shape: tuple[int, ...]) -> KroneckerBlock:
        """Return the exact block of a matrix, shape (numbers, numbers), or of its diagonal, shape (numbers,)."""
        one = jnp.ones((1, 1), matrix.dtype)
        return cls(((), tuple(range(len(shape))), ()), shape, matrix[None], one, one[0, 0], exact=True)

    @property
    def form(self) -> str:
        """Return what the block is, in words."""
        if self.exact:
            size = self.left.shape[1]
            return f"exact, a matrix of {size} rows" if self.left.ndim == 3 else f"diagonal, {size} numbers"
        return _in_words("Kronecker product", self.left, self.right)

    @property
    def _divisor(self) -> jax.Array:
        return jnp.where(self.mass == 0, 1, self.mass)  # zero times a block has factors of zero

    def multiply(self, x: jax.Array) -> jax.Array:
        """Return the product of the block with an array like the parameter."""
        within = _times(self.left, self.split(x), 1, False) / self._divisor
        return self.joined(_times(self.right, within, 2, False))

    def eigen(self) -> EigenBlock:
        """Return the block by its eigenvectors and eigenvalues."""
        (left, of_left), (right, of_right) = _eigen(self.left), _eigen(self.right)
        values = left[:, :, None] * right[:, None, :] / self._divisor
        return EigenBlock(self.axes, self.shape, of_left, of_right, values)

    def diagonal(self) -> jax.Array:
        """Return the diagonal, like the parameter."""
        left, right = _diagonal(self.left), _diagonal(self.right)
        return self.joined(left[:, :, None] * right[:, None, :] / self._divisor)

    def dense(self) -> jax.Array:
        """Return the block as a matrix, in the order of the flattened parameter."""
        left, right = map(_full, (self.left, self.right))
        return self.matrix(jnp.einsum("spq,sde->spdqe", left, right, precision="highest") / self._divisor)

    def averaged(self, count: int) -> KroneckerBlock:
        """Return the block of the means of both factors, from their sums over so many examples."""
        right = jnp.ones_like(self.right) if self.exact else self.right / count
        return replace(self, left=self.left / count, right=right, mass=jnp.ones_like(self.mass))

    def plus(self, other: KroneckerBlock) -> KroneckerBlock:
        """Return the block of the sums of both factors."""
        left, right, mass = (getattr(self, x) + getattr(other, x) for x in ("left", "right", "mass"))
        return replace(self, left=left, right=right, mass=mass)

    def scaled(self, scale: Any) -> KroneckerBlock:
        """Return the block times a number."""
        return replace(self, left=self.left * scale, right=self.right * scale, mass=self.mass * scale)


@register_dataclass
@dataclass(frozen=True)
class EigenBlock(Sides):
    """The block of a parameter by its eigenvalues, for eigenvectors that are products of those of two sides.

    Attributes:
      left: the eigenvectors of the side p as columns, shape (stack, p, p); or ones, shape (stack, p), for unit vectors.
      right: those of the side d.
      values: the eigenvalues, shape (stack, p, d).
    """

    left: jax.Array
    right: jax.Array
    values: jax.Array

    @property
    def form(self) -> str:
        """Return what the block is, in words."""
        return _in_words("eigenvalues of a Kronecker product", self.left, self.right)

    def multiply(self, x: jax.Array) -> jax.Array:
        """Return the product of the block with an array like the parameter."""
        return self.spectral(lambda values: values, x)

    def spectral(self, fun: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """Return the product with a function of the block, which acts on its eigenvalues."""
        within = self.rotated(self.split(x)) * fun(self.values)
        return self.joined(_times(self.right, _times(self.left, within, 1, False), 2, False))

    def rotated(self, x: jax.Array) -> jax.Array:
        """Return the coordinates of an array of shape (stack, p, d) by the eigenvectors."""
        return _times(self.right, _times(self.left, x, 1, True), 2, True)

    def eigen(self) -> EigenBlock:
        """Return the block itself."""
        return self

    def diagonal(self) -> jax.Array:
        """Return the diagonal, like the parameter."""
        within = _times(jnp.square(self.left), self.values, 1, False)
        return self.joined(_times(jnp.square(self.right), within, 2, False))

    def dense(self) -> jax.Array:
        """Return the block as a matrix, in the order of the flattened parameter."""
        left, right = map(_full, (self.left, self.right))
        products = jnp.einsum("spa,sdb->spdab", left, right, precision="highest")
        scaled = products * self.values[:, None, None]
        return self.matrix(jnp.einsum("spdab,sqeab->spdqe", scaled, products, precision="highest"))

    def plus(self, other: EigenBlock) -> EigenBlock:
        """Return the sum, by the eigenvectors of its sides, without the entries between these eigenvectors."""
        left, right = (_eigen(mine + theirs)[1] for mine, theirs in zip(self._sides(), other._sides(), strict=True))
        total = replace(self, left=left, right=right, values=jnp.zeros(()))
        return replace(total, values=total._values_of(self) + total._values_of(other))

    def scaled(self, scale: Any) -> EigenBlock:
        """Return the block times a number."""
        return replace(self, values=self.values * scale)

    def _sides(self) -> tuple[jax.Array, jax.Array]:
        """Return the sum over the indices of the other side, for both sides: matrices, or their diagonals."""
        return _with_values(self.left, self.values.sum(2)), _with_values(self.right, self.values.sum(1))

    def _values_of(self, other: EigenBlock) -> jax.Array:
        """Return what another block has on its diagonal by these eigenvectors."""
        left, right = (_overlaps(*pair) for pair in ((self.left, other.left), (self.right, other.right)))
        return _times(right, _times(left, other.values, 1, False), 2, False)


Block = KroneckerBlock | EigenBlock


def folded(blocks: Sequence[KroneckerBlock]) -> KroneckerBlock:
    """Return one block for the roles of a parameter, with the trace of their sum.

    The sides of the result are in proportion to those of the sum: each role's side, times the trace of its other side.

    Args:
      blocks: a block for each role, some with p and d swapped.
    """
    if len(blocks) == 1:
        return blocks[0]
    first = min(blocks, key=lambda block: block.left.ndim)  # rows of a table have a diagonal side p
    pairs = [(x.left, x.right) if x.axes == first.axes else (x.right, x.left) for x in blocks]
    traces = [tuple(_diagonal(side).sum(1) for side in pair) for pair in pairs]
    root = jnp.sqrt(sum((one * other for one, other in traces), jnp.zeros(())))
    root = jnp.where(root == 0, 1, root)
    sides = []
    for at in (0, 1):
        every = [pair[at] for pair in pairs]
        if any(side.ndim == 3 for side in every):
            every = [_full(side) for side in every]
        weights = [trace[1 - at] / root for trace in traces]
        total = sum(
            (x * w.reshape(-1, *[1] * (x.ndim - 1)) for x, w in zip(every, weights, strict=True)), jnp.zeros(())
        )
        sides.append(total)
    return replace(first, left=sides[0], right=sides[1])


def _in_words(what: str, left: jax.Array, right: jax.Array) -> str:
    sides = [f"{x.shape[1]}{'' if x.ndim == 3 else ' (diagonal)'}" for x in (left, right)]
    stack = f"{len(left)} times " if len(left) != 1 else ""
    return f"{what}, {stack}{sides[0]} x {sides[1]}"


def _eigen(side: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the eigenvalues of one side, shape (stack, size), and its eigenvectors; ones if it is diagonal."""
    if side.ndim == 2:
        return side, jnp.ones_like(side)
    values, vectors = jax.vmap(eigh)(side)
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


def _full(side: jax.Array) -> jax.Array:
    """Return one side as a matrix, shape (stack, size, size)."""
    return jax.vmap(jnp.diag)(side) if side.ndim == 2 else side


def _with_values(vectors: jax.Array, values: jax.Array) -> jax.Array:
    """Return the side with these eigenvectors and eigenvalues, or its diagonal."""
    if vectors.ndim == 2:
        return values
    return jnp.matmul(vectors * values[:, None, :], vectors.swapaxes(1, 2), precision="highest")


def _overlaps(one: jax.Array, other: jax.Array) -> jax.Array:
    """Return the squared inner products of all pairs of eigenvectors of a side; ones if these are unit vectors."""
    if one.ndim == 2:
        return one
    return jnp.square(jnp.matmul(one.swapaxes(1, 2), other, precision="highest"))
