"""A batch that the axis `data` of a mesh splits: what would then be something else is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..transforms._arguments import describe
from ..transforms._axes import Axes
from ..transforms._compat import Tracer
from ..transforms._model import dotted
from ._executor import Executor
from ._mesh import DATA, Layout, differs
from ._state import TrainState
from ._step import MemberStep, metrics_of
from ._strategy import take_member


def check_split(
    step: MemberStep, executor: Executor, state: TrainState, arguments: tuple[Any, ...], axes: tuple[Axes, ...]
) -> None:
    """Refuse what would not be the same if the batch were not split."""
    layout, (structure, _) = executor.layout, state.structure_and_size()
    assert layout is not None
    layout.check_batch("Trainer.step", arguments, axes)
    specs = layout.batch_specs(arguments, axes)
    (trainable, rest, _), *batch = executor.member_shapes(state, arguments, axes)

    def left(trainable: Any, rest: Any, batch: Any) -> Any:
        metrics, _, after = step.loss_and_gradients(structure, trainable, rest, batch, True)
        return after.rest, metrics

    trace = jax.make_jaxpr(left, axis_env=[(DATA, layout.shards)], return_shape=True)
    closed, out = trace(trainable, rest, batch)
    inputs = [False] * len(jax.tree.leaves((trainable, rest))) + [DATA in spec for spec in specs]
    for (path, x), differ in zip(jax.tree.leaves_with_path(out), differs(closed.jaxpr, inputs), strict=True):
        if differ and path[0].idx == 0:
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
    _check_mean(step, layout, state, arguments, axes, specs)


def _check_mean(
    step: MemberStep,
    layout: Layout,
    state: TrainState,
    arguments: tuple[Any, ...],
    axes: tuple[Axes, ...],
    specs: list[Any],
) -> None:
    """Refuse a loss that is not the mean over the parts of its batch, by that of the first member."""
    structure, _ = state.structure_and_size()
    arrays = jax.tree.leaves((state.rows(), arguments))
    if any(isinstance(x, Tracer) or jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) for x in arrays):
        return  # no values yet; or numbers are drawn, which differ
    if not all(getattr(x, "is_fully_addressable", True) for x in arrays):
        return
    with layout.context():
        (trainable, rest, _), *batch = jax.tree.map(np.asarray, take_member((state.rows(), *arguments), (0, *axes), 0))

    def mean_over(parts: int) -> float:
        leaves, treedef = jax.tree.flatten(batch)
        split = [DATA in spec for spec in specs]
        leaves = [x.reshape(parts, -1, *x.shape[1:]) if s else x for x, s in zip(leaves, split, strict=True)]

        def of_part(*leaves: Any) -> jax.Array:
            model = structure.merge(trainable, rest)
            return metrics_of(step.loss(model, *jax.tree.unflatten(treedef, leaves)))["loss"]

        of_parts = jax.vmap(of_part, [0 if s else None for s in split], axis_name=DATA, axis_size=parts)
        return float(jnp.mean(jax.jit(of_parts)(*leaves)))

    whole, parts = mean_over(1), mean_over(layout.shards)
    if not np.isclose(whole, parts, rtol=1e-2, atol=1e-6, equal_nan=True):
        raise ValueError(
            f"Trainer.step: the loss is {whole:.6g} on a whole batch, but {parts:.6g} as the mean over its "
            f'{layout.shards} parts; with a mesh axis "{DATA}" it must be a mean over the examples.'
        )
