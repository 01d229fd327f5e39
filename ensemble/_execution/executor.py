"""`Executor`: steps of all members, executed in one way or another."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from ...transforms._convolutions.as_products import convolutions_as_products
from ...transforms._core.axes import Axes
from ...transforms._core.compat import Tracer
from ...transforms._models.hashable import HashablePytree
from ...transforms._models.split_model import Structure
from ...transforms._models.stacking import stack
from .._members.rows import cut
from .._members.sharding import DATA, Layout
from .._members.strategy import Execution, over_members, take_member
from .._step.member_step import MemberStep
from .._step.state import Arrays, TrainState
from .autotune import Trial


class Executor:
    """Steps of all members.

    Args:
      step: that of one member.
      layout: where the members are; None for one device, or where an execution says.
    """

    def __init__(self, step: MemberStep, layout: Layout | None) -> None:
        self._step = step
        self.layout = layout
        # One program for a step that leaves its state usable, one for a step that takes over its memory.
        self._programs = [
            jax.jit(partial(self._step_of_all, in_place), static_argnums=(0, 1, 2, 3), donate_argnums=(4,) * in_place)
            for in_place in (False, True)
        ]
        self._member_programs = [
            jax.jit(self._step_of_member, static_argnums=(0, 1, 2), donate_argnums=donated) for donated in ((), (3,))
        ]

    def execute(
        self, execution: Execution, state: TrainState, arguments: tuple[Any, ...], axes: tuple[Axes, ...], donate: bool
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """A step, executed in a given way."""
        structure, size = state._structure_and_size()
        if execution.strategy != "loop":
            layout = self._layout_of(execution)
            with self._context(execution):
                inputs = self._inputs(execution, state, arguments, axes)
                arrays, step, metrics = self._programs[donate](
                    structure, execution, size, HashablePytree.of(axes), *inputs
                )
                metrics = metrics if layout is None or layout.padded(size) == size else cut(metrics, size)
            return TrainState._of_padded(structure, arrays, size, step), metrics
        arguments = _on_device(arguments)
        # No index where there is nothing to take by it.
        shared = not jax.tree.leaves(axes)
        program, static = self._member_programs[donate], HashablePytree.of(axes)
        results = [
            program(structure, execution, static, arrays, None if shared else np.uint32(i), arguments)
            for i, arrays in enumerate(state._members())
        ]
        members, metrics = zip(*results, strict=True)
        step, metrics = _together(state.step, metrics)
        return TrainState._of_members(structure, members, step), metrics

    def _inputs(
        self, execution: Execution, state: TrainState, arguments: tuple[Any, ...], axes: tuple[Axes, ...]
    ) -> tuple[Arrays, jax.Array, tuple[Any, ...]]:
        """The arrays, the step and the batch, where a program takes them from."""
        layout = self._layout_of(execution)
        if layout is None:
            return state._arrays(), state.step, arguments
        return state._spread(layout), layout.place_shared(state.step), layout.place_batch(arguments, axes)

    def _held_for(self, execution: Execution, state: TrainState) -> TrainState:
        """The state with its arrays as steps that are executed so leave them."""
        structure, size = state._structure_and_size()
        layout = self._layout_of(execution)
        if execution.strategy == "loop":
            return TrainState._of_members(structure, state._members(), state.step)
        if layout is None:
            return state
        return TrainState._of_padded(structure, state._spread(layout), size, layout.place_shared(state.step))

    def _context(self, execution: Execution) -> Any:
        layout = self._layout_of(execution)
        return nullcontext() if layout is None else layout.context()

    def _layout_of(self, execution: Execution) -> Layout | None:
        if self.layout is None and execution.devices > 1:
            return Layout.local(execution.devices)
        return self.layout

    def member_program(self, state: TrainState, arguments: tuple[Any, ...], axes: tuple[Axes, ...]) -> Jaxpr:
        """One member's step on one device, traced."""
        structure, _ = state._structure_and_size()
        shape = {} if self.layout is None else dict(self.layout.mesh.shape)
        step = partial(self._step, structure, split=shape.get(DATA, 1) > 1)
        return jax.make_jaxpr(step, axis_env=list(shape.items()))(*self.member_shapes(state, arguments, axes)).jaxpr

    def trial(
        self,
        state: TrainState,
        arguments: tuple[Any, ...],
        axes: tuple[Axes, ...],
        donate: bool,
        execution: Execution,
    ) -> Trial:
        """What measures a step that is executed in a given way."""
        structure, size = state._structure_and_size()
        static, batch = HashablePytree.of(axes), _on_device(arguments)
        shared = not jax.tree.leaves(axes)

        def compile_step() -> int:
            if execution.strategy == "loop":
                program, i = self._member_programs[donate], None if shared else np.uint32(0)
                lowered = program.lower(structure, execution, static, state._members()[0], i, batch)
            else:
                with self._context(execution):
                    inputs = jax.tree.map(_shape_if_traced, self._inputs(execution, state, batch, axes))
                    lowered = self._programs[donate].lower(structure, execution, size, static, *inputs)
            analysis: Any = lowered.compile().memory_analysis()
            return analysis.temp_size_in_bytes

        def run(times: int, together: int) -> list[float]:
            mine = self._held_for(execution, state)
            if donate:
                mine = mine._copy()
            jax.block_until_ready((mine._contents(), batch))
            found = list[float]()
            for steps in (1, *[together] * times):
                start = time.perf_counter()
                for _ in range(steps):
                    mine, metrics = self.execute(execution, mine, batch, axes, donate)
                jax.block_until_ready((mine._contents(), metrics))
                found.append((time.perf_counter() - start) / steps)
            return found

        return Trial(compile_step, run)

    def _step_of_all(
        self,
        in_place: bool,
        structure: Structure,
        execution: Execution,
        size: int,
        axes: HashablePytree,
        arrays: Arrays,
        step: jax.Array,
        batch: Any,
    ) -> tuple[Arrays, jax.Array, dict[str, Any]]:
        layout = self._layout_of(execution)
        of_member = partial(self._step, structure, split=layout is not None and layout.shards > 1)

        def mapped(size: int) -> Callable[..., Any]:
            return over_members(of_member, execution, (0, *axes.value), size, in_place=in_place)

        over_all = mapped(size) if layout is None else layout.over_devices(mapped, axes.value, size)
        arrays, metrics = over_all(arrays, *batch)
        return arrays, step + 1, metrics

    def _step_of_member(
        self, structure: Structure, execution: Execution, axes: HashablePytree, arrays: Arrays, i: jax.Array, batch: Any
    ) -> Any:
        step = partial(self._step, structure)
        return (convolutions_as_products(step) if execution.products else step)(
            arrays, *take_member(batch, axes.value, i)
        )

    def member_shapes(self, state: TrainState, arguments: tuple[Any, ...], axes: tuple[Axes, ...]) -> tuple[Any, ...]:
        """The shapes of what one member's step takes on one device."""
        layout, taken = self.layout, jax.eval_shape(lambda *args: take_member(args, axes, 0), *arguments)
        if layout is not None and layout.shards > 1:
            leaves, treedef = jax.tree.flatten(taken)
            specs = layout.batch_specs(arguments, axes)
            parts = [jax.ShapeDtypeStruct(layout.part(x, spec), x.dtype) for x, spec in zip(leaves, specs, strict=True)]
            taken = jax.tree.unflatten(treedef, parts)
        return state._one(), *taken


def _shape_if_traced(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, Tracer) else x


def _on_device(arguments: Any) -> Any:
    """Arrays on the device, once and not once for each member."""
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), arguments)


@jax.jit
def _together(step: jax.Array, metrics: list[dict[str, Any]]) -> tuple[jax.Array, dict[str, Any]]:
    """The number of the next step, and the metrics of all members."""
    return step + 1, stack(metrics)
