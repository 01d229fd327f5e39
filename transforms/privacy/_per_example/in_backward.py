"""Each example's squared gradient norm at a parameter use, computed inside the backward pass.

If the gradient at a use shares no element with that at any other use, its squared norm adds to the total. Such a use
gets a backward rule of its own: besides the cotangents of its data, the rule returns the squared norm of each example's
gradient, as the cotangent of a dummy argument. Neither activations nor cotangents leave the loop or the checkpoint that
contains the use.

A table that is read by lookups and multiplied with (a tied vocabulary) adds ‖A‖² + ‖B‖² + 2⟨A, B⟩. The rule of the
product then also returns its gradient at the rows of the lookups: ⟨A, B⟩ is its inner product with their cotangents.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._core.compat import varying, varying_axes
from ..._core.jaxpr import aval, evaluate, with_inner
from .clip_norms import ClipGroups, of_group
from .gradient_forms import GradientForm, OuterProduct, rounding, wide, without_transposes
from .parameter_uses import ParameterUse, UsePlan, has_nonlinear_backward, is_real, sharing
from .rules import forms_at, reads_values, sides_of_product, takes_rows

# A materialized gradient hardly raises the peak if it has this many times fewer numbers than the largest array.
_PART_OF_LARGEST = 8


class InBackward(NamedTuple):
    """The uses that have a backward rule of their own, and what these rules compute.

    Attributes:
      uses: the numbers of these uses.
      lookups: for each of them that is a product with a table, the numbers of the lookups in the same table.
      largest: the most numbers in one array of the program, for one example.
      spmd_axis_name: as for `jax.vmap`.
      clip_groups: as for `ExampleGradients`.
      weight: the weight of the example that is evaluated (with clip groups, one for each), to sum weighted gradients,
        all of which are finite; None to compute norms.
    """

    uses: frozenset[int]
    lookups: dict[int, list[int]]
    largest: int
    spmd_axis_name: str | None
    clip_groups: ClipGroups | None = None
    weight: Any = None

    def entries(self, plan: UsePlan, n: int, batch: int) -> list[jax.Array]:
        """Return the dummy arguments of a use for norms: zeros with axes for the examples and for each enclosing loop.

        Their cotangents are the squared norm and two bounds on rounding errors, as from `rounding`; for a product with
        a table also the gradient at the rows that each lookup reads.
        """
        use = plan.uses[n]
        shapes: list[tuple[int, ...]] = [(batch, *(loop.length for loop in use.loops), 3)]
        shapes += [(batch, *_rows_read(plan.uses[lookup])) for lookup in self.lookups.get(n, [])]
        return [varying(jnp.zeros(shape, _dtype(use)), varying_axes(aval(use.eqn.outvars[0]))) for shape in shapes]

    def summed(self, use: ParameterUse, form: GradientForm) -> GradientForm:
        """Return the form of the norms at a use, from the form of its gradients, with or without axes for its loops."""
        if not isinstance(form, OuterProduct):
            return form
        groups = prod(use.aval.shape[axis] for axis in sides_of_product(use)[0]) if form.axes is not None else 1
        return form.smallest(self.largest // _PART_OF_LARGEST // groups)

    def run(self, use: ParameterUse, values: list[Any], dummies: list[Any], rows: list[Any]) -> list[Any]:
        """Return the results of an operation for one example, with a backward rule of its own.

        Args:
          use: the only use of the operation.
          values: its operands.
          dummies: for norms, as from `entries`, without the axes for examples and loops. For weighted sums, an array
            like the operand, in the dtype of the sum.
          rows: the indices that each lookup in the same table reads.
        """

        def outputs(values: list[Any]) -> list[Any]:
            return evaluate(use.eqn, *values)

        # Under `jax.vmap`, `custom_vmap` receives all examples at once, before anything is differentiated.
        @jax.custom_batching.custom_vmap
        def one(values: list[Any], *_: Any) -> list[Any]:
            return outputs(values)

        @one.def_vmap
        def mapped(size: int, of: Any, values: list[Any], dummies: list[Any], rows: list[Any], weight: Any) -> Any:
            for k, is_mapped in enumerate(of[0]):
                if k != use.operand and not is_mapped:
                    values[k] = jnp.broadcast_to(values[k], (size, *values[k].shape))
            results = batch(values, dummies, rows, weight)
            return results, [True] * len(results)

        axes = [None if k == use.operand else 0 for k in range(len(values))]
        all_outputs = jax.vmap(outputs, (axes,), spmd_axis_name=self.spmd_axis_name)
        batch = jax.custom_vjp(lambda values, *_: all_outputs(values))
        floating = [k for k, x in enumerate(values) if k != use.operand and jnp.issubdtype(x.dtype, jnp.inexact)]

        def forward(values: list[Any], _: Any, rows: list[Any], weight: Any) -> tuple[list[Any], Any]:
            def of_floating(chosen: list[Any]) -> list[Any]:
                changed = dict(zip(floating, chosen, strict=True))
                return all_outputs([changed.get(k, x) for k, x in enumerate(values)])

            results, pull = jax.vjp(of_floating, [values[k] for k in floating])
            read = [x if k == use.operand or reads_values(use) else None for k, x in enumerate(values)]
            return results, (pull, read, rows, weight)

        def backward(residuals: Any, cotangents: list[Any]) -> tuple[Any, ...]:
            pull, read, rows, weights = residuals
            pulled = dict(zip(floating, pull(cotangents)[0], strict=True))
            known = [x for x in cotangents if jnp.issubdtype(x.dtype, jnp.inexact)]
            others = [None if k == use.operand else x for k, x in enumerate(read)]
            in_body = [use._replace(loops=())]
            (form,) = forms_at(in_body, [read[use.operand]], others, known, self.spmd_axis_name)
            if weights is None:
                sums = _norms(form, self.summed(use, form), rows, use)
            else:
                group = None if self.clip_groups is None else self.clip_groups.common(use.value.leaves)
                own = of_group(weights, group)
                sums = [form.weighted(own, dummies[0].dtype, finite=True).astype(dummies[0].dtype)]
            return [pulled.get(k) for k in range(len(read))], sums, [None] * len(rows), None

        batch.defvjp(forward, backward)
        return one(values, dummies, rows, self.weight)


def in_backward(
    plan: UsePlan, spmd_axis_name: str | None, first: int = 0, clip_groups: ClipGroups | None = None
) -> InBackward:
    """Find the uses of a program, from number `first` on, that get a backward rule of their own."""
    found: list[int] = []
    lookups: dict[int, list[int]] = {}
    for group in sharing(plan.uses):
        product = _product_with_table(plan.uses, group)
        leaves = frozenset[int]().union(*(plan.uses[n].value.leaves for n in group))
        if clip_groups is not None and clip_groups.common(leaves) is None:
            continue
        if len(group) == 1 and group[0] >= first and _adds_alone(plan.uses, group[0]):
            found += group
        elif product is not None and product >= first:
            found.append(product)
            lookups[product] = [n for n in group if n != product]
    largest = max((aval(out).size for eqn in with_inner(plan.closed.jaxpr.eqns) for out in eqn.outvars), default=0)
    return InBackward(frozenset(found), lookups, largest, spmd_axis_name, clip_groups)


def has_linear_backward(plan: UsePlan) -> bool:
    """Return whether the backward pass of a program scales with its cotangent, but for rounding errors of float32.

    If so, the gradient of a weighted loss is the weighted gradient.
    """
    eqns = list(with_inner(plan.closed.jaxpr.eqns))
    results = [aval(out).dtype for eqn in eqns for out in eqn.outvars]
    narrow = any(jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize < 4 for dtype in results)
    return not narrow and not any(map(has_nonlinear_backward, eqns))


def _adds_alone(uses: Sequence[ParameterUse], n: int) -> bool:
    """Return whether the squared norms at a use add up over its loops, and its operation has no other use."""
    use = uses[n]
    outputs = [out for out in use.eqn.outvars if jnp.issubdtype(aval(out).dtype, jnp.inexact)]
    return (
        use.value.layout is not None
        and all(loop.number in use.value.stacked for loop in use.loops)
        and sum(other.first == use.first for other in uses) == 1
        and all(map(is_real, outputs))
    )


def _product_with_table(uses: Sequence[ParameterUse], group: Sequence[int]) -> int | None:
    """Return the only product in a group of uses of one table, all others of which are lookups before it; or None."""
    products = [n for n in group if not takes_rows(uses[n])]
    if len(products) != 1 or products[0] != max(group) or any(uses[n].loops or not uses[n].aval.size for n in group):
        return None
    (product,) = products
    if uses[product].eqn.primitive.name != "dot_general" or not _adds_alone(uses, product):
        return None
    layouts = [without_transposes(uses[n]) for n in group]
    same = all(layout == layouts[0][0] and layout is not None for layout, _ in layouts)
    upright = all(order == tuple(sorted(order)) for n, (_, order) in zip(group, layouts, strict=True) if n != product)
    if not same or not upright or any(len(uses[n].value.leaves) != 1 for n in group):
        return None
    order = dict(zip(group, layouts, strict=True))[product][1]
    sides = tuple(tuple(order[axis] for axis in axes) for axes in sides_of_product(uses[product]))
    rest = tuple(range(1, len(order)))
    return product if sides in (((), (0,), rest), ((), rest, (0,))) else None


def _rows_read(lookup: ParameterUse) -> tuple[int, int]:
    """Return the number of rows that a lookup reads for one example, and the size of a row."""
    table = lookup.aval.shape
    size = lookup.aval.size // table[0]
    return aval(lookup.eqn.outvars[0]).size // size, size


def _dtype(use: ParameterUse) -> Any:
    """Return the dtype of the squared norms at a use."""
    return wide(max(use.dtypes(), key=lambda dtype: dtype.itemsize))


def _norms(form: GradientForm, summed: GradientForm, rows: Sequence[jax.Array], use: ParameterUse) -> list[jax.Array]:
    """Return the arrays that `InBackward.entries` describes, from the forms of each example's gradient and norm."""
    dtype = _dtype(use)
    squares = summed.squared_norm()
    entries = [squares, *rounding([form], summed, float(jnp.finfo(dtype).eps), twice=True)]
    found = [jnp.stack([jnp.broadcast_to(x, squares.shape).astype(dtype) for x in entries], axis=-1)]
    if rows and isinstance(form, OuterProduct):
        form = form.with_axes(without_transposes(use)[1])
        found += [form.at_rows(index[:, None])[:, 0].astype(dtype) for index in rows]
    return found
