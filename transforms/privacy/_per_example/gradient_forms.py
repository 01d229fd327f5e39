"""Each example's gradient at a use, in the smallest form that gives its norm and the weighted sum over examples.

`OuterProduct` keeps the gradient of a matrix as the two factors that it is a product of, for each example: activations
A and cotangents G, with T positions, whose gradient is AᵀG. Its squared norm is ⟨AAᵀ, GGᵀ⟩, which costs T² (p + d)
instead of T p d and holds T² numbers instead of p d (arXiv 2110.05679). `RowSparse` keeps the cotangents of the rows
that were read from a table. `Dense` keeps the gradient of each example.

Each form has its squared norm; the sum of the squared norms of the terms that it is a sum of, which may be far larger
where they cancel each other; the rounding of a term that is summed; and the weighted sum over examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .parameter_uses import ParameterUse


class OuterProduct(NamedTuple):
    """Each example's gradient of a matrix as a product of two factors.

    Attributes:
      left: shape (batch, stack, positions, p).
      right: shape (batch, stack, positions, d).
      restore: from a gradient of shape (stack, p, d) to one of the operand.
      axes: those axes of the operand that are in the stack, in p and in d; None where they are not whole axes.
    """

    left: jax.Array
    right: jax.Array
    restore: Callable[[jax.Array], jax.Array]
    axes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None

    def smaller(self) -> bool:
        """Return whether both factors have fewer numbers than the gradients."""
        positions, p, d = self.left.shape[2], self.left.shape[3], self.right.shape[3]
        return positions * (p + d) < p * d

    def squared_norm(self) -> jax.Array:
        """Return the squared norm of each example's gradient, in float32 or wider: shape (batch,)."""
        left, right = widened(self.left), widened(self.right)
        return (_gram(left, left) * _gram(right, right)).sum((1, 2, 3))  # ‖AᵀG‖² = ⟨AAᵀ, GGᵀ⟩

    def terms(self) -> jax.Array:
        """Sum the squared norms of the positions' parts of each example's gradient: shape (batch,)."""
        left, right = (_magnitudes(widened(x)).sum(3) for x in (self.left, self.right))
        # A bound on rounding must not vanish where one factor underflows to zero, however large the other is.
        least = float(jnp.finfo(left.dtype).tiny) ** 0.8
        return ((left + least) * (right + least)).sum((1, 2))

    def eps(self) -> float:
        """Return the rounding of a term that is summed."""
        return float(jnp.finfo(self._summed_as()).eps)

    def _summed_as(self) -> Any:
        """Return the dtype of the factors of the sum."""
        dtype = jnp.result_type(self.left, self.right)
        # bfloat16 has the range of float32, so that weighted factors fit; float16 has not.
        return dtype if dtype == jnp.bfloat16 else wide(dtype)

    def weighted(self, weights: jax.Array, dtype: Any = None) -> jax.Array:
        """Sum `weights` times the gradient over examples: like the operand, in `dtype` or wider."""
        summed_as = self._summed_as()
        # Σᵢ Aᵢᵀ(cᵢGᵢ): one product over examples and positions, as in an ordinary backward pass.
        left = widened(kept(self.left, weights)).astype(summed_as)
        right = (widened(kept(self.right, weights)) * weights[:, None, None, None]).astype(summed_as)
        dtype = wide(summed_as, dtype)
        (batch, _, positions, p), d = left.shape, right.shape[3]
        if batch * positions * (p - d) > p * d:  # XLA on CPU transposes the first of the two: the result is smaller
            return self.restore(_product(right, left, dtype).swapaxes(1, 2))
        return self.restore(_product(left, right, dtype))

    def each(self) -> jax.Array:
        """Return the gradient of each example: shape (batch, *operand)."""
        return jax.vmap(self.restore)(jnp.einsum("bstp,bstd->bspd", self.left, self.right))


class RowSparse(NamedTuple):
    """Each example's gradient of a table from which rows were taken.

    Attributes:
      rows: which rows, shape (batch, stack, positions).
      right: the cotangents of the rows, shape (batch, stack, positions, d).
      height: how many rows there are.
      restore: from a gradient of shape (stack, count, d) to one of the operand.
    """

    rows: jax.Array
    right: jax.Array
    height: int
    restore: Callable[[jax.Array], jax.Array]

    def squared_norm(self) -> jax.Array:
        """Return the squared norm of each example's gradient, in float32 or wider: shape (batch,)."""
        right = widened(self.right)
        # Cotangents of the same row add up, so ‖Σₜ gₜ‖² = Σₜᵤ ⟨gₜ, gᵤ⟩ over positions of one row.
        same = self.rows[..., :, None] == self.rows[..., None, :]
        return jnp.where(same, _gram(right, right), 0).sum((1, 2, 3))

    def terms(self) -> jax.Array:
        """Sum the squared norms of the rows taken: shape (batch,)."""
        return _magnitudes(widened(self.right)).sum((1, 2, 3))

    def eps(self) -> float:
        """Return the rounding of a term that is summed."""
        return float(jnp.finfo(wide(self.right.dtype)).eps)

    def cross(self, factors: OuterProduct) -> jax.Array:
        """Return twice the inner product with the gradient that `factors` has of the same table: p or d are its rows.

        It is 2 Σₜᵤ A[t, rowᵤ] ⟨gₜ, gᵤ⟩, with t over the positions of the factors and u over those of the rows.
        """
        along_rows, along = factors.left, factors.right
        if factors.axes is not None and factors.axes[2] == (0,):
            along_rows, along = along, along_rows
        at_rows = jnp.take_along_axis(widened(along_rows), self.rows[:, :, None, :], axis=3)
        return 2 * (at_rows * _gram(widened(along), widened(self.right))).sum((1, 2, 3))

    def weighted(self, weights: jax.Array, dtype: Any = None) -> jax.Array:
        """Sum `weights` times the gradient over examples: like the operand, in `dtype` or wider."""
        right = widened(kept(self.right, weights)).astype(wide(self.right.dtype, dtype))
        return self._table(self.rows, right * weights[:, None, None, None].astype(right.dtype))

    def _table(self, rows: jax.Array, right: jax.Array) -> jax.Array:
        """Add up cotangents of rows, over the examples, as an array like the operand."""
        stack = jnp.broadcast_to(jnp.arange(right.shape[1])[None, :, None], rows.shape)
        table = jnp.zeros((right.shape[1], self.height, right.shape[3]), right.dtype)
        return self.restore(table.at[stack, rows].add(right))

    def each(self) -> jax.Array:
        """Return the gradient of each example: shape (batch, *operand)."""
        return jax.vmap(lambda rows, right: self._table(rows[None], right[None]))(self.rows, self.right)


class Dense(NamedTuple):
    """Each example's gradient of an operand.

    Attributes:
      gradients: shape (batch, *operand).
    """

    gradients: jax.Array

    def squared_norm(self) -> jax.Array:
        """Return the squared norm of each example's gradient, in float32 or wider: shape (batch,)."""
        return _magnitudes(widened(self.gradients)).sum(tuple(range(1, self.gradients.ndim)))

    def terms(self) -> jax.Array:
        """Return the squared norm: the gradient is one term."""
        return self.squared_norm()

    def eps(self) -> float:
        """Return the rounding of a term that is summed."""
        return float(jnp.finfo(self.gradients.dtype).eps)

    def weighted(self, weights: jax.Array, dtype: Any = None) -> jax.Array:
        """Sum `weights` times the gradient over examples: like the operand, in `dtype` or wider."""
        gradients = widened(kept(self.gradients, weights)).astype(wide(self.gradients.dtype, dtype))
        weights = weights.astype(gradients.dtype)
        if len(weights) == 1:  # else XLA would compute a matrix product
            return gradients[0] * weights[0]
        return jnp.tensordot(weights, gradients, 1)

    def each(self) -> jax.Array:
        """Return the gradient of each example: shape (batch, *operand)."""
        return self.gradients


GradientForm = OuterProduct | RowSparse | Dense


def dtype_of(form: GradientForm) -> Any:
    """Return the dtype in which the gradients of a form were computed."""
    return (form.gradients if isinstance(form, Dense) else form.right).dtype


def merged(forms: list[tuple[int, ParameterUse, GradientForm]]) -> dict[int, GradientForm] | None:
    """Merge the forms of one parameter to one of each kind, at one of their uses; None where they cannot be.

    Two products over positions are one over the positions of both: AᵀG + BᵀH is [A; B]ᵀ[G; H]. Where an operand is
    transposed, the axes of its form are counted in the array before that.
    """
    n, use, form = forms[0]
    base = _without_transposes(use)[0]
    if base is None:
        return None
    if len(forms) == 1:
        return {n: _smallest(form)}
    axes: Any = None
    factors: dict[int, OuterProduct] = {}
    tables: dict[int, RowSparse] = {}
    for n, use, form in forms:
        layout, order = _without_transposes(use)
        if layout != base or len(use.value.leaves) != 1:
            return None
        if isinstance(form, OuterProduct) and form.axes is not None:
            stack, p, d = (tuple(order[axis] for axis in some) for some in form.axes)
            axes = axes or (stack, p, d)
            if (stack, d, p) == axes:  # the operand is the transpose of the first one
                form = form._replace(left=form.right, right=form.left)
            elif (stack, p, d) != axes:
                return None
            factors[n] = form
        elif isinstance(form, RowSparse) and order == tuple(range(len(order))):
            tables[n] = form
        else:
            return None
    result: dict[int, GradientForm] = {}
    if factors:
        product = _concatenated([*factors.values()], "left", "right")._replace(axes=axes)
        result[next(iter(factors))] = product if tables else _smallest(product)
    if tables:
        result[next(iter(tables))] = _concatenated([*tables.values()], "rows", "right")
    if factors and tables:  # `RowSparse.cross` wants the rows on one side, and all other axes in order on the other
        sides = (0,), tuple(range(1, len(use.aval.shape)))
        if axes not in (((), *sides), ((), *reversed(sides))):
            return None
    return result


def _smallest(form: GradientForm) -> GradientForm:
    """Return a product as the gradients themselves where these have fewer numbers than the factors."""
    return Dense(form.each()) if isinstance(form, OuterProduct) and not form.smaller() else form


def _concatenated(forms: Sequence[Any], *names: str) -> Any:
    """Return forms of one kind as one, over the positions of all."""
    return forms[0]._replace(**{name: jnp.concatenate([getattr(x, name) for x in forms], axis=2) for name in names})


def _without_transposes(use: ParameterUse) -> tuple[Any, tuple[int, ...]]:
    """Return the layout of an operand before its last transposes, and which axis of that each of its axes is."""
    layout = use.value.layout
    order = tuple(range(len(use.aval.shape)))
    while layout and layout[-1][0] == "transpose":
        order = tuple(layout[-1][1][axis] for axis in order)
        layout = layout[:-1]
    return layout, order


def _product(left: jax.Array, right: jax.Array, dtype: Any) -> jax.Array:
    """Return the product of both over examples and positions: shape (stack, p, d)."""
    if left.shape[1] > 1:
        return jnp.einsum("bstp,bstd->spd", left, right, preferred_element_type=dtype)
    left, right = (x.reshape(-1, x.shape[3]) for x in (left, right))
    return lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=dtype)[None]


def _gram(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return inner products of the positions of `x` with those of `y`: shape (batch, stack, positions, positions).

    XLA on CPU copies what has axes of size 1, and takes twice as long for large products that it fuses with a sum.
    """
    flat = (z.reshape(-1, *z.shape[2:]) for z in (x, y))
    # By default an accelerator rounds float32 factors to fewer digits (TF32), which a norm to clip by must not lose.
    found = lax.optimization_barrier(jnp.einsum("btd,bud->btu", *flat, precision="highest"))
    return found.reshape(*x.shape[:2], *found.shape[1:])


def kept(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Return `x` with zeros for the examples of weight zero, which may hold NaN: 0 * NaN is NaN."""
    return jnp.where((weights != 0).reshape(-1, *[1] * (x.ndim - 1)), x, 0)


def widened(x: jax.Array) -> jax.Array:
    """Return `x` in float32 or wider, with the roundings to half precision that it has had.

    XLA may leave out a rounding to bfloat16 and back (`xla_allow_excess_precision`): the norm of a gradient and its
    part of a sum could then be computed from different numbers. It does not leave out `reduce_precision`.
    """
    if x.dtype.itemsize != 2:  # `reduce_precision` cannot round to the float8 formats that have no infinities
        return x.astype(wide(x.dtype))
    digits, found = jnp.finfo(x.dtype), x.astype(jnp.float32)
    rounded = lax.reduce_precision(found, digits.nexp, digits.nmant)
    if x.dtype != jnp.float16:
        return rounded
    # `reduce_precision` makes zeros of the subnormal numbers of float16, which are multiples of 2⁻²⁴.
    return jnp.where(jnp.abs(found) < digits.smallest_normal, jnp.round(found * 2.0**24) * 2.0**-24, rounded)


def wide(dtype: Any, asked: Any = None) -> Any:
    """Return the dtype to sum numbers of `dtype` in: itself, float32 if it has fewer digits, or a wider one asked."""
    found = jnp.dtype(dtype) if jnp.dtype(dtype).itemsize >= 4 else jnp.dtype(jnp.float32)
    return found if asked is None or jnp.dtype(asked).itemsize < 4 else jnp.promote_types(found, asked)


def _magnitudes(x: jax.Array) -> jax.Array:
    """Return the squared magnitudes, real also for complex `x`."""
    return jnp.square(x.real) + jnp.square(x.imag) if jnp.iscomplexobj(x) else jnp.square(x)
