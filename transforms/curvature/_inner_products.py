"""Inner products gᵀ (D + damping I)⁻¹ h of an example's gradients, by Kronecker factors D."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._statistics.statistic import Chunks, in_chunks
from .._statistics.use_gradients import OutputGradients, UseGradients
from ..privacy._per_example.gradient_forms import Dense, wide, widened
from ..privacy._per_example.loss import PerExample
from ..privacy._per_example.methods import MethodChoice
from ._blocks import Block, EigenBlock, Sides
from ._ekfac import in_basis
from ._outputs import for_each_vector
from ._sides import parameter_gradients
from ._squares import weighted_products


def damped_products(
    blocks: Mapping[int, Block], columns: Sequence[OutputGradients], groups: Sequence[UseGradients], damping: Any
) -> jax.Array:
    """Return the inner products for all pairs of columns: shape (examples, columns, columns).

    Args:
      blocks: the block of each parameter.
      columns: the gradients of each column, for each of `groups`, as `parameter_gradients` returns them.
      groups: the same for one column.
      damping: a positive number.
    """
    parts: dict[int, list[tuple[OutputGradients, Any]]] = {}
    for part, group in zip(columns, groups, strict=True):
        (leaf,) = group.leaves
        parts.setdefault(leaf, []).append((part, group.axes))
    found = [_of_parameter(blocks[leaf].eigen(), own, damping) for leaf, own in parts.items()]
    return sum(found, jnp.zeros((1, 1, 1)))


def products_of_outputs(
    api: str, of: PerExample, blocks: Mapping[int, Block], damping: Any
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs of each example, and J (D + damping I)⁻¹ Jᵀ with their Jacobian J by the parameters.

    Args:
      api: the name for errors.
      of: the outputs of an example.
      blocks: as for `damped_products`.
      damping: a positive number.

    Returns:
      Shapes (examples, *outputs) and (examples, number of outputs, number of outputs).
    """
    out = of.program.closed.out_avals[0]
    count = math.prod(out.shape)

    def compute(route: MethodChoice) -> tuple[jax.Array, jax.Array]:
        def of_some(examples: Sequence[Any]) -> tuple[tuple[()], tuple[jax.Array, jax.Array]]:
            size = len(examples[0])

            def gradients(vector: jax.Array) -> list[UseGradients]:
                seeds = jnp.broadcast_to(vector.reshape(out.shape).astype(out.dtype), (size, *out.shape))
                return parameter_gradients(of, examples, route, seeds)

            values = jax.vmap(lambda example: of.loss(of.parameters, example)[0])(list(examples))
            found = for_each_vector(gradients, count, wide(out.dtype), mapped=route.method != "vmap")
            products = damped_products(blocks, *found, damping)
            return (), (values, jnp.broadcast_to(products, (size, count, count)))

        return in_chunks(of_some, of.examples, route)[1]

    return Chunks(api, None, None).with_columns(count).results(of, compute)


def _of_parameter(basis: EigenBlock, parts: Sequence[tuple[OutputGradients, Any]], damping: Any) -> jax.Array:
    """Return the inner products of the gradients of one parameter: shape (examples, columns, columns)."""
    (form, arrays, mapped), axes = parts[0]
    if isinstance(form, Dense):
        each = widened(arrays[0] if mapped[0] else arrays[0][:, None])
        inside = jax.vmap(jax.vmap(lambda g: basis.rotated(basis.split(g))))(each)
        flat = (inside / jnp.sqrt(basis.values + damping)).reshape(*each.shape[:2], -1)
        return jnp.einsum("icp,iep->ice", flat, flat, precision="highest")
    if basis.left.ndim == basis.right.ndim == 2:  # a diagonal, whose sides may be any axes
        sides = Sides(axes, basis.shape)
        values = sides.split(basis.joined(basis.values))
        ones = (jnp.ones(values.shape[:2]), jnp.ones(values.shape[::2]))
        basis = EigenBlock(sides.axes, sides.shape, *ones, values)
    return weighted_products([in_basis(basis, *part) for part in parts], 1 / (basis.values + damping))
