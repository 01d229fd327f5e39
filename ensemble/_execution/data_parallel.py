"""Raise for a step whose result would change if the axis `data` of a mesh splits the batch.

Each device computes the loss of its part of the batch, and the results are averaged. This equals the result without a
mesh only if the loss is a mean over the examples and all parts leave the same state in the model. The second condition
is derived from the traced step (`differs`). The first is tested once, for one member and the first batch
(`_check_mean`), but not for a loss that draws random numbers: the user has to ensure that it is a mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...transforms._core.arguments import describe
from ...transforms._core.compat import Jaxpr, JaxprEqn
from ...transforms._core.jaxpr import CALLS, called, interpret, with_inner
from ...transforms._core.prng import is_key
from ...transforms._models.hashable import HashablePytree
from ...transforms._models.split_model import dotted
from ...transforms._models.split_model import split as split_model
from .._members.sharding import DATA, Layout, everywhere
from .._members.shared import with_shared
from .._members.strategy import take_member
from .._step.member_step import MemberStep, metrics_of
from .._step.state import Arrays
from .executor import StepInputs
from .forms import stacked

# After these collectives all devices of an axis have the same value.
_AGREED = frozenset({"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"})
# The operations that draw random numbers.
_DRAWS = frozenset({"random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32"})


def check_split(step: MemberStep, layout: Layout, inputs: StepInputs) -> bool:
    """Raise if splitting the batch changes the result of a step.

    Returns:
      Whether the check was complete: a traced step has no values to compare.
    """
    state, arguments, axes = inputs.state, inputs.arguments, inputs.axes
    layout.check_batch("Trainer.step", arguments, axes)
    split = [DATA in spec for spec in jax.tree.leaves(layout.batch_specs(arguments, axes))]
    arrays, _, shared, *batch = inputs.of_member()

    def left_and_reported(arrays: Any, shared: Any, batch: Any) -> Any:
        metrics, _, _, after = step.loss_and_gradients(state._structure, arrays, shared, batch, True)
        return after[1], metrics

    trace = jax.make_jaxpr(left_and_reported, axis_env=[(DATA, layout.shards)], return_shape=True)
    closed, out = trace(arrays, shared, batch)
    may_differ = differs(closed.jaxpr, [False] * len(jax.tree.leaves((arrays, shared))) + split)
    of_part = f"on each part of a batch that the mesh splits over {DATA!r}, the loss"
    for (path, x), differ in zip(jax.tree.leaves_with_path(out), may_differ, strict=True):
        name = dotted(path[1:])
        if differ and path[0].idx == 0:  # the state of the model; the metrics come second
            remedy = f'let the parts agree, as nnx.BatchNorm does with axis_name="{DATA}"'
            raise ValueError(f"Trainer.step: {of_part} leaves another `{name}` in the model; {remedy}.")
        if differ and (x.shape or not jnp.issubdtype(x.dtype, jnp.inexact)):
            remedy = "only floating-point scalars can be averaged; return a mean"
            raise ValueError(f"Trainer.step: {of_part} reports `{name}`, {describe(x)}; {remedy}.")
    if inputs.is_traced:
        return False
    # The parts draw other random numbers than the whole batch, so a comparison would be meaningless.
    if not any(eqn.primitive.name in _DRAWS for eqn in with_inner(closed.jaxpr.eqns)):
        _check_mean(step, layout, inputs, split)
    return True


def _check_mean(step: MemberStep, layout: Layout, inputs: StepInputs, split: list[bool]) -> None:
    """Raise if the mean of the loss over the parts of the batch differs from the loss of the whole, for member 0.

    Args:
      step: the step of one member.
      layout: the devices of the members and of the parts of the batch.
      inputs: the inputs of a step, not traced.
      split: for each array of the batch, whether it is split.
    """
    state, arguments, axes = inputs.state, inputs.arguments, inputs.axes
    first = jax.jit(lambda args, axes: take_member(args, axes.value, 0), static_argnums=1)
    with layout.context():
        of_first = (
            first((stacked(state)._arrays(),), HashablePytree.of((0,))),
            first(arguments, HashablePytree.of(axes)),
        )
        shared = None if state._shared is None else state._shared.arrays
        # One member has no axis of members, as if all shared it.
        arrays, shared = layout.place_shared((of_first[0][0], shared))
        batch = jax.tree.map(layout.copy, everywhere(of_first[1]))
    leaves, treedef = jax.tree.flatten(batch)

    def of_part(arrays: Arrays, *leaves: Any) -> Any:
        """Return the state of the model after the loss of a part of the batch, and the metrics."""
        trainable, rest, _, standing = arrays
        model = state._structure.merge(*with_shared(trainable, rest, shared))
        metrics = metrics_of(step.loss.of(standing.hyperparams)(model, *jax.tree.unflatten(treedef, leaves)))
        return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, (split_model(model).rest, metrics))

    def over(parts: int) -> Any:
        """Return the same for each of `parts` parts of the batch."""
        in_axes = (None, *(0 if s else None for s in split))
        # `vmap` with the name of the mesh axis simulates the devices, so that a loss with its own collectives over
        # `data` finds that axis.
        of_parts = jax.vmap(of_part, in_axes, axis_name=DATA, axis_size=parts)
        with layout.context():
            cut = [x.reshape(parts, -1, *x.shape[1:]) if s else x for x, s in zip(leaves, split, strict=True)]
            return jax.jit(of_parts, out_shardings=layout.copies)(arrays, *cut)

    both = zip(jax.tree.leaves_with_path(over(1)), jax.tree.leaves(over(layout.shards)), strict=True)
    for (path, of_whole), of_parts in both:
        inexact = jnp.issubdtype(of_whole.dtype, jnp.inexact)
        # Two orders of summation differ by a few rounding errors per level; 1e-4 is far above that in float32, and far
        # below the error of a sum instead of a mean, a factor of `shards`.
        tolerance = max(1e-4, 16 * float(jnp.finfo(of_whole.dtype).eps)) if inexact else 0.0
        wide = complex if jnp.iscomplexobj(of_whole) else float
        # The state after the loss is the same for all parts, so it equals its own mean.
        whole, mean = (np.asarray(x).astype(wide).mean(0) for x in (of_whole, of_parts))
        if not np.allclose(mean, whole, tolerance, 1e-9, equal_nan=True):
            name = dotted(path[1:])
            what = f"leaves `{name}` in the model" if path[0].idx == 0 else f"reports `{name}`"
            say = f"{_shortly(whole)} for the batch, but {_shortly(mean)} as the mean over its {layout.shards} parts"
            remedy = f'take means over the examples, or use a mesh without the axis "{DATA}"'
            raise ValueError(f"Trainer.step: the loss {what}, {say}; {remedy}.")


def differs(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Return for each output of a program whether it may differ between the devices of the axis `data`.

    Args:
      jaxpr: the program.
      inputs: for each input, whether it may differ.
    """

    def visit(eqn: JaxprEqn, does: list[bool]) -> list[bool]:
        """Return for each result of an operation whether it may differ between the devices."""
        if eqn.primitive.name in _AGREED and DATA in _names(eqn) and eqn.params.get("axis_index_groups") is None:
            return [False] * len(eqn.outvars)
        if eqn.primitive.name in CALLS:
            return differs(called(eqn)[0], does)
        # In a loop or a branch, any result may depend on any operand: safe, but it may raise unnecessarily.
        asks = (x.primitive.name == "axis_index" and DATA in _names(x) for x in with_inner([eqn]))
        return [any(does) or any(asks)] * len(eqn.outvars)

    return interpret(jaxpr, jaxpr.constvars, inputs, visit, lambda _: False)


def _names(eqn: JaxprEqn) -> list[Any]:
    return jax.tree.leaves((eqn.params.get("axes", ()), eqn.params.get("axis_name", ())))


def _shortly(x: np.ndarray) -> str:
    return f"{x:.6g}" if x.ndim == 0 else describe(x)
