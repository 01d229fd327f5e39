"""`joint_step`: one training step of several members at once, with the sum of their gradients by what they share.

The gradient of the sum of all losses by a shared kernel is one product over the inputs of all members, and as large as
the kernel. Gradients member by member, which a mean of those that are finite needs, are as many products and as many
kernels. So the sum is used if it is finite, and else the members are taken one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...transforms._core.axes import Axes
from ...transforms._models.split_model import Structure
from .._members.shared import SharedArrays
from .._members.strategy import take_member
from .member_status import finite
from .member_step import MemberStep, averaged
from .shared_step import Contribution, summable
from .state import Arrays


def joint_step(
    step: MemberStep, structure: Structure, in_axes: Sequence[Axes], split: bool, size: int
) -> Callable[..., Any]:
    """Return the function that takes a step of `size` members, which are stacked along axis 0.

    Args:
      step: the step of one member.
      structure: the static part of the model.
      in_axes: an axis specification for each argument of `step` after `structure`.
      split: as for a call of `step`.
      size: the number of members.

    Returns:
      A function of the arguments of `step`, stacked. It returns the new arrays and the metrics of the members, and what
      they contribute together.
    """

    def vmapped(fun: Callable[..., Any], *more: Any) -> Callable[..., Any]:
        """Return `fun` of the arguments of the members, preceded by others with the members along axis 0 or None."""
        return jax.vmap(fun, (*more, *in_axes), axis_size=size)

    def of_all(*args: Any) -> Any:
        arrays, counts, *_ = args
        found = _gradients(step, structure, vmapped, split, args)
        if found is None:
            *result, contributions = vmapped(partial(step, structure, split=split))(*args)
            return *result, jax.tree.map(lambda x: x.sum(0), contributions)
        metrics, gradients, total, after = found
        if split:
            metrics, gradients, total = averaged((metrics, gradients, total))
        are_finite = jax.vmap(finite)((metrics["loss"], gradients))
        trains = arrays[3].trains & counts
        total, also = lax.cond(
            finite(total) & (are_finite | ~trains).all(),
            lambda: (summable(total), jnp.ones(size, bool)),
            lambda: _one_by_one(step, structure, in_axes, split, args, trains & are_finite),
        )
        are_finite = are_finite & also

        def updated(mine: Any, arrays: Arrays, _: Any, shared: SharedArrays, *batch: Any) -> Any:
            return step.updated(structure, arrays, shared, batch, split, *mine)

        result = vmapped(updated, 0)((metrics, gradients, after, are_finite), *args)
        return *result, Contribution((trains & are_finite).sum(dtype=jnp.float32), total)

    return of_all


def _gradients(
    step: MemberStep, structure: Structure, vmapped: Callable[..., Any], split: bool, args: Any
) -> tuple[Any, ...] | None:
    """Return the metrics and own gradients of each member, the sum of the shared ones, and the arrays after the loss.

    Returns None if only gradients of each member exist: those of a `grad_fn`, or of a loss that will be refused.
    """
    arrays, counts, shared, *_ = args
    if step.has_grad_fn:
        return None

    def losses(own: Any, common: Any) -> Any:
        def of_member(own: Any, arrays: Arrays, _: Any, shared: SharedArrays, *batch: Any) -> Any:
            return step.value(structure, own, replace(shared, trainable=common), arrays, batch, split)

        return vmapped(of_member, 0)(own, *args)

    found, transposed, (metrics, after) = jax.vjp(losses, arrays[0], shared.trainable, has_aux=True)
    if not jnp.issubdtype(found.dtype, jnp.floating):
        return None
    # A member that does not train has the cotangent 0 instead of 1.
    gradients, total = transposed((arrays[3].trains & counts).astype(found.dtype))
    return metrics, gradients, total, after


def _one_by_one(
    step: MemberStep, structure: Structure, in_axes: Sequence[Axes], split: bool, args: Any, counts: jax.Array
) -> tuple[Any, jax.Array]:
    """Return the sum of the shared gradients of the members that count and whose gradients are finite, and which are.

    One member after another, in the memory of one.
    """

    def added(total: Any, i: jax.Array) -> Any:
        arrays, _, shared, *batch = take_member(args, in_axes, i)
        gradients = step.loss_and_gradients(structure, arrays, shared, batch, split)[2]
        gradients = averaged(gradients) if split else gradients
        is_finite = finite(gradients)
        _, mine = Contribution.of(counts[i] & is_finite, gradients)
        return jax.tree.map(jnp.add, total, mine), is_finite

    return lax.scan(added, summable(jax.tree.map(jnp.zeros_like, args[2].trainable)), jnp.arange(len(counts)))
