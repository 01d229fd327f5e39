"""Raises for a step whose result would change where the axis `data` of a mesh splits the batch.

Each device computes the loss of its part, and what it gives is averaged. That is the same as without a mesh only if the
loss is a mean over the examples, and if the parts leave the same state in the model. The latter is followed through the
traced step (`differs`); the former is computed, once, for one member and the first batch (`_check_mean`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ...transforms._core.arguments import describe
from ...transforms._core.compat import Tracer
from ...transforms._core.jaxpr import CALLS, aval, called, evaluate, interpret, with_inner
from ...transforms._core.prng import is_key
from ...transforms._models.hashable import HashablePytree
from ...transforms._models.split_model import dotted
from ...transforms._models.split_model import split as split_model
from .._members.sharding import DATA, Layout, everywhere
from .._members.strategy import take_member
from .._step.member_step import MemberStep, metrics_of
from .executor import Executor, StepInputs
from .forms import stacked

# After these collectives all devices of an axis have the same.
_AGREED = frozenset({"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"})


def check_split(step: MemberStep, executor: Executor, inputs: StepInputs) -> bool:
    """Raise for a step that would not be the same if the batch were not split.

    Returns:
      Whether all was checked: where a step is traced there are no values to compare.
    """
    layout, (state, arguments, axes) = executor.layout, inputs
    structure = state._structure
    assert layout is not None
    layout.check_batch("Trainer.step", arguments, axes)
    specs = layout.batch_specs(arguments, axes)
    arrays, *batch = executor.member_shapes(inputs)

    def left_and_reported(arrays: Any, batch: Any) -> Any:
        metrics, _, after = step.loss_and_gradients(structure, arrays, batch, True)
        return after.rest, metrics

    trace = jax.make_jaxpr(left_and_reported, axis_env=[(DATA, layout.shards)], return_shape=True)
    closed, out = trace(arrays, batch)
    split = [DATA in spec for spec in specs]
    may_differ = differs(closed.jaxpr, [False] * len(jax.tree.leaves(arrays)) + split)
    for (path, x), differ in zip(jax.tree.leaves_with_path(out), may_differ, strict=True):
        if differ and path[0].idx == 0:  # of what is left in the model; the metrics come second
            raise ValueError(
                f"Trainer.step: on each part of a batch that the mesh splits over {DATA!r}, the loss leaves "
                f"another `{dotted(path[1:])}` in the model; let the parts agree, as nnx.BatchNorm does with "
                f'axis_name="{DATA}".'
            )
        if differ and (x.shape or not jnp.issubdtype(x.dtype, jnp.inexact)):
            raise ValueError(
                f"Trainer.step: the loss reports `{dotted(path[1:])}`, {describe(x)}, of a part of the batch that "
                f"the mesh splits over {DATA!r}; only scalars of floating point are averaged over the parts: "
                "report a mean."
            )
    # Within a transform of the user's, constants are traced too, even where the state and the batch are not.
    if inputs.is_traced or isinstance(jnp.zeros(()), Tracer):
        return False
    _check_mean(step, layout, inputs, split)
    return True


def _check_mean(step: MemberStep, layout: Layout, inputs: StepInputs, split: list[bool]) -> None:
    """Raise if the mean of the loss over the parts of the batch is not that of the whole, for the first member.

    Random numbers are all the same here, so that those of a part are those of the whole.

    Args:
      step: the step of one member.
      layout: how the members and the batch are spread.
      inputs: of a step; not traced.
      split: for each array of the batch, whether it is split.
    """
    state, arguments, axes = inputs
    structure = state._structure
    with layout.context():
        first = _first(
            (layout.place(stacked(state)._arrays()), *layout.place_batch(arguments, axes)),
            HashablePytree.of((0, *axes)),
        )
        (trainable, rest, _, standing), *batch = jax.tree.map(layout.place_shared, everywhere(first))
    leaves, treedef = jax.tree.flatten(batch)

    def over(parts: int) -> Any:
        """Return what the loss gives and leaves for each part; None where it draws numbers that cannot be fixed."""

        def of_part(trainable: Any, rest: Any, *leaves: Any) -> Any:
            model = structure.merge(trainable, rest)
            loss = step.loss.of(standing.hyperparams)
            metrics = metrics_of(loss(model, *jax.tree.unflatten(treedef, leaves)))
            return metrics, split_model(model).rest

        cut = [x.reshape(parts, -1, *x.shape[1:]) if s else x for x, s in zip(leaves, split, strict=True)]
        in_axes = (None, None, *(0 if s else None for s in split))
        # `vmap` with the name of the mesh axis stands for the devices, so that a loss that averages over `data` by
        # itself finds that axis.
        of_parts = jax.vmap(of_part, in_axes, axis_name=DATA, axis_size=parts)
        return _with_fixed_numbers(of_parts, (trainable, rest, *cut))

    with layout.context():
        given = over(1), over(layout.shards)
        if None in given:
            return
        found = jax.tree.map(_numbers, given)
    for (path, of_whole), of_parts in zip(jax.tree.leaves_with_path(found[0]), jax.tree.leaves(found[1]), strict=True):
        is_metric = path[0].idx == 0
        inexact = jnp.issubdtype(of_whole.dtype, jnp.inexact)
        # Two orders of one sum differ by a few roundings for each level of adding; 1e-4 is far above that in float32,
        # and far below what a sum in place of a mean gives, which is a factor of `shards`.
        tolerance = max(1e-4, 16 * float(jnp.finfo(of_whole.dtype).eps)) if inexact else 0.0
        wide = [x.astype(complex) if np.iscomplexobj(x) else x.astype(np.float64) for x in (of_whole[0], of_parts)]
        whole, mean = wide[0], wide[1].mean(0) if is_metric and inexact else wide[1][0]
        if not np.allclose(mean, whole, tolerance, 1e-9, equal_nan=True):
            name = dotted(path[1:])
            what = f"reports `{name}`" if is_metric else f"leaves `{name}` in the model"
            raise ValueError(
                f"Trainer.step: the loss {what}, {_shortly(whole)} of a whole batch, but {_shortly(mean)} as the "
                f'mean over its {layout.shards} parts; with a mesh axis "{DATA}" what it gives must be means over the '
                "examples."
            )


def differs(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Return for each output of a program whether it may differ between the devices of the axis `data`.

    Args:
      jaxpr: the program.
      inputs: for each input, whether it does.
    """
    found = {x for x, does in zip(jaxpr.invars, inputs, strict=True) if does}
    for eqn in jaxpr.eqns:
        does = [not isinstance(x, Literal) and x in found for x in eqn.invars]
        if eqn.primitive.name in _AGREED and DATA in _names(eqn) and eqn.params.get("axis_index_groups") is None:
            continue
        if eqn.primitive.name in CALLS:
            results = differs(called(eqn)[0], does)
        else:
            # For a loop or a branch, any result may come from any operand: safe, though it may raise for too much.
            results = [any(does) or _reads_device_number(eqn)] * len(eqn.outvars)
        found |= {x for x, result in zip(eqn.outvars, results, strict=True) if result}
    return [not isinstance(x, Literal) and x in found for x in jaxpr.outvars]


def _names(eqn: JaxprEqn) -> list[Any]:
    return jax.tree.leaves((eqn.params.get("axes", ()), eqn.params.get("axis_name", ())))


def _reads_device_number(eqn: JaxprEqn) -> bool:
    """Return whether an operation, or one inside of it, asks for the number of the device."""
    return any(x.primitive.name == "axis_index" and DATA in _names(x) for x in with_inner([eqn]))


@partial(jax.jit, static_argnums=(1,))
def _first(args: Any, axes: HashablePytree) -> Any:
    return take_member(args, axes.value, 0)


def _numbers(x: jax.Array) -> np.ndarray:
    """Return the numbers of an array that every device has, also where other processes hold most of them."""
    x = x if len(x.sharding.device_set) == 1 else x.addressable_shards[0].data
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


def _shortly(x: np.ndarray) -> str:
    return f"{x:.6g}" if x.ndim == 0 else describe(x)


def _with_fixed_numbers(fun: Any, args: tuple[Any, ...]) -> Any:
    """Return `fun(*args)` with every random number the same; None where they are drawn inside of loops or branches."""
    closed, out = jax.make_jaxpr(fun, return_shape=True)(*args)

    def visit(eqn: JaxprEqn, values: list[Any]) -> Any:
        """Return the results of an operation, with the same number in place of each random one."""
        name = eqn.primitive.name
        if name in CALLS:
            return interpret(*called(eqn), values, visit)
        if name == "random_bits":
            kind = aval(eqn.outvars[0])
            # A third of the range: no value at an edge, where a distribution's inverse may be infinite.
            return [jnp.full(kind.shape, jnp.iinfo(kind.dtype).max // 3, kind.dtype)]
        if any(x.primitive.name in _DRAWING for x in with_inner([eqn])):
            raise _CannotBeFixed
        return evaluate(eqn, *values)

    try:
        values = jax.jit(lambda *args: interpret(closed.jaxpr, closed.consts, args, visit))(*jax.tree.leaves(args))
    except _CannotBeFixed:
        return None
    return jax.tree.unflatten(jax.tree.structure(out), values)


_DRAWING = frozenset({"random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32"})


class _CannotBeFixed(Exception):
    """Numbers are drawn where they are not replaced."""
