"""Each example's gradient at a parameter use, in the smallest form that determines its norm and the weighted sum.

`OuterProduct` stores each example's gradient of a matrix as two factors: activations A and cotangents G at T positions,
whose gradient is AᵀG. Its squared norm is ⟨AAᵀ, GGᵀ⟩, which costs T² (p + d) instead of T p d and materializes T²
numbers instead of p d (arXiv 2110.05679). `RowSparse` stores the cotangents of the rows that were read from a table.
`Dense` stores the gradient of each example.

Each form computes its squared norm; the sum of the squared norms of its terms, which may be far larger where terms
cancel; the rounding error of a term in the sum; and the weighted sum over examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.compat import varying, varying_axes
from .parameter_uses import ParameterUse


class OuterProduct(NamedTuple):
    """Each example's gradient of a matrix as a product of two factors, summed over positions.

    Attributes:
      left: the activations, shape (batch, stack, positions, p).
      right: the cotangents, shape (batch, stack, positions, d).
      restore: reshapes a gradient of shape (stack, p, d) to the shape of the operand.
      axes: the axes of the operand that form the stack, p and d; None if these are not whole axes.
    """

    left: jax.Array
    right: jax.Array
    restore: Callable[[jax.Array], jax.Array]
    axes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None

    def smaller(self) -> bool:
        """Return whether both factors together have fewer numbers than the gradients."""
        positions, p, d = self.left.shape[2], self.left.shape[3], self.right.shape[3]
        return positions * (p + d) < p * d

    def smallest(self, room: int = 0) -> GradientForm:
        """Materialize the gradients if this takes fewer operations and numbers than the factors' inner products.

        Args:
          room: the most numbers of a gradient to materialize although inner products take fewer.
        """
        (*_, positions, p), d = self.left.shape, self.right.shape[3]
        fits = p * d <= max(2 * positions**2, room)
        return Dense(self.each()) if not self.smaller() and fits else self

    def with_axes(self, order: Sequence[int]) -> OuterProduct:
        """Return the form with axes of the array that a transpose with this permutation turned into the operand."""
        if self.axes is None:
            return self
        stack, p, d = (tuple(order[axis] for axis in some) for some in self.axes)
        return self._replace(axes=(stack, p, d))

    def at_rows(self, rows: jax.Array) -> jax.Array:
        """Return rows of each example's gradient, in float32 or wider: shape (batch, stack, rows, row).

        Args:
          rows: their indices along axis 0 of the operand, which must be the only axis of p or of d.
        """
        along_rows, along = widened(self.left), widened(self.right)
        if self.axes is not None and self.axes[2] == (0,):
            along_rows, along = along, along_rows
        found = jnp.take_along_axis(along_rows, rows[:, :, None, :], axis=3)
        return jnp.einsum("bstr,bstc->bsrc", found, along, precision="highest")

    def squared_norm(self) -> jax.Array:
        """Return the squared norm of each example's gradient, in float32 or wider: shape (batch,)."""
        left, right = widened(self.left), widened(self.right)
        return (_gram(left, left) * _gram(right, right)).sum((1, 2, 3))  # ‖AᵀG‖² = ⟨AAᵀ, GGᵀ⟩

    def terms(self) -> jax.Array:
        """Sum the squared norms of the terms of each example's gradient, one for each position: shape (batch,)."""
        left, right = (magnitudes(widened(x)).sum(3) for x in (self.left, self.right))
        # A bound on rounding errors must stay positive if one factor underflows to zero, however large the other is.
        least = float(jnp.finfo(left.dtype).tiny) ** 0.8
        return ((left + least) * (right + least)).sum((1, 2))

    def eps(self) -> float:
        """Return the relative rounding error of a term of the weighted sum."""
        return float(jnp.finfo(self._summed_as()).eps)

    def _summed_as(self) -> Any:
        """Return the dtype of the factors of the weighted sum."""
        dtype = jnp.result_type(self.left, self.right)
        # bfloat16 has the exponent range of float32, so weighted factors do not overflow; in float16 they could.
        return dtype if dtype == jnp.bfloat16 else wide(dtype)

    def weighted(self, weights: jax.Array, dtype: Any = None, finite: bool = False) -> jax.Array:
        """Sum `weights` times the gradient over examples: like the operand, in `dtype` or wider.

        With `finite`, gradients of weight zero are finite too, and need no mask, which would copy the factors.
        """
        summed_as = self._summed_as()
        left, right = (self.left, self.right) if finite else (kept(x, weights) for x in (self.left, self.right))
        # Σᵢ Aᵢᵀ(cᵢGᵢ): one product over examples and positions, as in an ordinary backward pass.
        left = widened(left).astype(summed_as)
        right = (widened(right) * weights[:, None, None, None]).astype(summed_as)
        dtype = wide(summed_as, dtype)
        (batch, _, positions, p), d = left.shape, right.shape[3]
        if batch * positions * (p - d) > p * d:  # XLA on CPU transposes the first operand: the result is smaller
            return self.restore(_product(right, left, dtype).swapaxes(1, 2))
        return self.restore(_product(left, right, dtype))

    def fold(self, add: Callable[[Any, jax.Array], Any], start: Callable[[jax.Array], Any]) -> Any:
        """Materialize the gradient of one example at a time, in float32 or wider: fold `add` over the examples.

        Args:
          add: a function of what was found before and of the next gradient, shape (stack, p, d).
          start: returns what to start with from zeros like a gradient.
        """
        left, right = self.left, self.right
        dtype = jnp.promote_types(wide(left.dtype), wide(right.dtype))

        def step(found: Any, factors: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            one, other = (widened(x).astype(dtype) for x in factors)
            if len(one) == 1:
                return add(found, jnp.matmul(one[0].T, other[0], precision="highest")[None]), None
            return add(found, jnp.einsum("stp,std->spd", one, other, precision="highest")), None

        zeros = varying(jnp.zeros((*left.shape[1::2], right.shape[3]), dtype), varying_axes(left) | varying_axes(right))
        return lax.scan(step, start(zeros), (left, right))[0]

    def each(self) -> jax.Array:
        """Return the gradient of each example: shape (batch, *operand)."""
        return jax.vmap(self.restore)(jnp.einsum("bstp,bstd->bspd", self.left, self.right))


class RowSparse(NamedTuple):
    """Each example's gradient of a table from which rows were taken.

    Attributes:
      rows: the indices of the rows, shape (batch, stack, positions).
      right: the cotangents of the rows, shape (batch, stack, positions, d).
      height: the number of rows of the table.
      restore: reshapes a gradient of shape (stack, height, d) to the shape of the operand.
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
        return magnitudes(widened(self.right)).sum((1, 2, 3))

    def eps(self) -> float:
        """Return the relative rounding error of a term of the weighted sum."""
        return float(jnp.finfo(wide(self.right.dtype)).eps)

    def cross(self, factors: OuterProduct) -> jax.Array:
        """Return twice the inner product with the outer-product gradient of the same table, whose rows are p or d."""
        return 2 * (factors.at_rows(self.rows) * widened(self.right)).sum((1, 2, 3))

    def weighted(self, weights: jax.Array, dtype: Any = None, finite: bool = False) -> jax.Array:
        """Sum `weights` times the gradient over examples: like the operand, in `dtype` or wider."""
        right = self.right if finite else kept(self.right, weights)
        right = widened(right).astype(wide(self.right.dtype, dtype))
        return self._table(self.rows, right * weights[:, None, None, None].astype(right.dtype))

    def _table(self, rows: jax.Array, right: jax.Array) -> jax.Array:
        """Scatter-add the cotangents of rows over the examples into an array like the operand."""
        stack = jnp.broadcast_to(jnp.arange(right.shape[1])[None, :, None], rows.shape)
        table = jnp.zeros((right.shape[1], self.height, right.shape[3]), right.dtype)
        return self.restore(table.at[stack, rows].add(right))

    def each(self) -> jax.Array:
        """Return the gradient of each example: shape (batch, *operand)."""
        return jax.vmap(lambda rows, right: self._table(rows[None], right[None]))(self.rows, self.right)


class Dense(NamedTuple):
    """Each example's gradient of an operand, materialized.

    Attributes:
      gradients: shape (batch, *operand).
    """

    gradients: jax.Array

    def squared_norm(self) -> jax.Array:
        """Return the squared norm of each example's gradient, in float32 or wider: shape (batch,)."""
        return magnitudes(widened(self.gradients)).sum(tuple(range(1, self.gradients.ndim)))

    def terms(self) -> jax.Array:
        """Return the squared norm: the gradient is one term."""
        return self.squared_norm()

    def eps(self) -> float:
        """Return the relative rounding error of a term of the weighted sum."""
        return float(jnp.finfo(self.gradients.dtype).eps)

    def weighted(self, weights: jax.Array, dtype: Any = None, finite: bool = False) -> jax.Array:
        """Sum `weights` times the gradient over examples: like the operand, in `dtype` or wider."""
        gradients = self.gradients if finite else kept(self.gradients, weights)
        gradients = widened(gradients).astype(wide(self.gradients.dtype, dtype))
        weights = weights.astype(gradients.dtype)
        if len(weights) == 1:  # otherwise XLA would compute a matrix product
            return gradients[0] * weights[0]
        return jnp.tensordot(weights, gradients, 1)

    def each(self) -> jax.Array:
        """Return the gradient of each example: shape (batch, *operand)."""
        return self.gradients


GradientForm = OuterProduct | RowSparse | Dense


# A bound on the rounding error of a sum, in units of the rounding error of its largest terms.
_ROUNDINGS = 8
# Terms that cancel are rounded otherwise if another example joins the sum. So that the error stays far below the clip
# norm, weighted terms of one example are at most 1 / √(_ROUNDINGS _CANCELLING ε) clip norms: 128 in float32.
_CANCELLING = 64


def rounding(at_uses: Sequence[GradientForm], summed: GradientForm, eps: float, twice: bool) -> tuple[Any, Any]:
    """Return two bounds on rounding errors in a squared norm; each may be 0.

    Args:
      at_uses: the forms at the uses of a parameter.
      summed: the form that they were merged into.
      eps: the relative rounding error of the norms' dtype.
      twice: whether the weighted sum uses the forms of a second backward pass instead of these.

    Returns:
      A number to add to the squared norm, for rounding errors of the norm, and a lower bound on the result, for those
      of the weighted sum, whose terms may cancel and whose dtype may be narrower.
    """

    def least(form: GradientForm) -> jax.Array:
        return _ROUNDINGS * max(form.eps(), _CANCELLING * eps) * form.terms()

    if isinstance(summed, (OuterProduct, RowSparse)):
        return _ROUNDINGS * eps * summed.terms(), least(summed)
    # Materialized gradients of the only pass are summed as they are.
    return 0, sum(map(least, at_uses)) if twice else 0


def dtype_of(form: GradientForm) -> Any:
    """Return the dtype in which the gradients of a form were computed."""
    return (form.gradients if isinstance(form, Dense) else form.right).dtype


def merged(forms: list[tuple[int, ParameterUse, GradientForm]]) -> dict[int, GradientForm] | None:
    """Merge the forms of one parameter into one of each kind, keyed by one of their uses; None if they do not merge.

    Two outer products are one product over the positions of both: AᵀG + BᵀH = [A; B]ᵀ[G; H]. If an operand is a
    transpose, the axes of its form refer to the array before the transpose.
    """
    n, use, form = forms[0]
    base = without_transposes(use)[0]
    if base is None:
        return None
    if len(forms) == 1:
        return {n: _smallest(form)}
    axes: Any = None
    products: dict[int, OuterProduct] = {}
    tables: dict[int, RowSparse] = {}
    for n, use, form in forms:
        layout, order = without_transposes(use)
        if layout != base or len(use.value.leaves) != 1:
            return None
        if isinstance(form, OuterProduct) and form.axes is not None:
            stack, p, d = (tuple(order[axis] for axis in some) for some in form.axes)
            axes = axes or (stack, p, d)
            if (stack, d, p) == axes:  # this operand is the transpose of the first
                form = form._replace(left=form.right, right=form.left)
            elif (stack, p, d) != axes:
                return None
            products[n] = form
        elif isinstance(form, RowSparse) and order == tuple(range(len(order))):
            tables[n] = form
        else:
            return None
    result: dict[int, GradientForm] = {}
    if products:
        product = concatenated([*products.values()])._replace(axes=axes)
        result[next(iter(products))] = product if tables else _smallest(product)
    if tables:
        result[next(iter(tables))] = concatenated([*tables.values()])
    if products and tables:  # `RowSparse.cross` needs the rows in one factor and all other axes, in order, in the other
        sides = (0,), tuple(range(1, len(use.aval.shape)))
        if axes not in (((), *sides), ((), *reversed(sides))):
            return None
    return result


def _smallest(form: GradientForm) -> GradientForm:
    """Materialize the gradients of an outer product if they have fewer numbers than its factors."""
    return Dense(form.each()) if isinstance(form, OuterProduct) and not form.smaller() else form


def concatenated(forms: Sequence[Any]) -> Any:
    """Concatenate outer products, or rows of a table, along their positions."""
    first, second = (jnp.concatenate([form[i] for form in forms], axis=2) for i in (0, 1))
    return type(forms[0])(first, second, *forms[0][2:])


def without_transposes(use: ParameterUse) -> tuple[Any, tuple[int, ...]]:
    """Return the layout of an operand without its last transposes, and the permutation that these make up."""
    layout = use.value.layout
    order = tuple(range(len(use.aval.shape)))
    while layout and layout[-1][0] == "transpose":
        order = tuple(layout[-1][1][axis] for axis in order)
        layout = layout[:-1]
    return layout, order


def _product(left: jax.Array, right: jax.Array, dtype: Any) -> jax.Array:
    """Contract both factors over examples and positions: shape (stack, p, d)."""
    if left.shape[1] > 1:
        return jnp.einsum("bstp,bstd->spd", left, right, preferred_element_type=dtype)
    left, right = (x.reshape(math.prod(x.shape[:3]), x.shape[3]) for x in (left, right))
    return lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=dtype)[None]


def _gram(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the inner products between positions of `x` and of `y`: shape (batch, stack, positions, positions).

    Batch and stack are flattened, since XLA on CPU copies arrays with axes of size 1. The barrier keeps XLA from fusing
    the product with a sum, which takes twice as long if the product is large.
    """
    flat = (z.reshape(-1, *z.shape[2:]) for z in (x, y))
    # By default accelerators round float32 factors to fewer digits (TF32); norms for clipping need all digits.
    found = lax.optimization_barrier(jnp.einsum("btd,bud->btu", *flat, precision="highest"))
    return found.reshape(*x.shape[:2], *found.shape[1:])


def kept(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Return `x` with zeros for the examples of weight zero: they may be NaN, and 0 * NaN is NaN."""
    return jnp.where((weights != 0).reshape(-1, *[1] * (x.ndim - 1)), x, 0)


def widened(x: jax.Array) -> jax.Array:
    """Return `x` in float32 or wider, still rounded to the half precision that it had.

    XLA may omit a rounding to bfloat16 and back (`xla_allow_excess_precision`): the norm of a gradient and its
    contribution to a sum could then be computed from different numbers. XLA does not omit `reduce_precision`.
    """
    if x.dtype.itemsize != 2:  # `reduce_precision` cannot round to float8 formats without infinities
        return x.astype(wide(x.dtype))
    digits, found = jnp.finfo(x.dtype), x.astype(jnp.float32)
    rounded = lax.reduce_precision(found, digits.nexp, digits.nmant)
    if x.dtype != jnp.float16:
        return rounded
    # `reduce_precision` flushes the subnormal numbers of float16 to zero; they are multiples of 2⁻²⁴.
    return jnp.where(jnp.abs(found) < digits.smallest_normal, jnp.round(found * 2.0**24) * 2.0**-24, rounded)


def wide(dtype: Any, asked: Any = None) -> Any:
    """Return the dtype in which to sum `dtype`: itself, float32 if it is narrower, or `asked` if that is wider."""
    found = jnp.dtype(dtype) if jnp.dtype(dtype).itemsize >= 4 else jnp.dtype(jnp.float32)
    return found if asked is None or jnp.dtype(asked).itemsize < 4 else jnp.promote_types(found, asked)


def magnitudes(x: jax.Array) -> jax.Array:
    """Return the squared magnitudes; they are real for complex `x` too."""
    return jnp.square(x.real) + jnp.square(x.imag) if jnp.iscomplexobj(x) else jnp.square(x)
