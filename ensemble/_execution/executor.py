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
from .step_inputs import StepInputs


class Executor:
    """Steps of all members.

    Args:
      step: the step of one member.
      layout: how the members are spread over devices; None for one device, or for as many as an execution names.
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
        self, execution: Execution, inputs: StepInputs, donate: bool
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Take a step that is executed in a given way; return the new state and the metrics."""
        state, arguments, axes = inputs
        structure, size = state._structure_and_size()
        static = HashablePytree.of(axes)
        if execution.strategy != "loop":
            layout = self._layout_of(execution)
            with self._context(execution):
                placed = self._placed(execution, inputs)
                arrays, step, metrics = self._programs[donate](structure, execution, size, static, *placed)
                # The new state keeps the rows that pad it, since the next step would add them again; metrics are read.
                metrics = metrics if layout is None or layout.padded(size) == size else cut(metrics, size)
            return TrainState._of_padded(structure, arrays, size, step), metrics
        arguments = _on_device(arguments)
        # An array as the index, so that one program serves all members; none where there is nothing to take by it.
        shared = not jax.tree.leaves(axes)
        results = [
            self._member_programs[donate](
                structure, execution, static, arrays, None if shared else np.uint32(i), arguments
            )
            for i, arrays in enumerate(state._members())
        ]
        members, metrics = zip(*results, strict=True)
        step, metrics = _next_step_and_stacked(state.step, metrics)
        return TrainState._of_members(structure, members, step), metrics

    def _placed(self, execution: Execution, inputs: StepInputs) -> tuple[Arrays, jax.Array, tuple[Any, ...]]:
        """Return the arrays, the step and the batch, on the devices from which a program takes them."""
        state, arguments, axes = inputs
        layout = self._layout_of(execution)
        if layout is None:
            return state._arrays(), state.step, arguments
        return state._spread(layout), layout.place_shared(state.step), layout.place_batch(arguments, axes)

    def _held_for(self, execution: Execution, state: TrainState) -> TrainState:
        """Return the state with its arrays as steps that are executed so leave them."""
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

    def member_program(self, inputs: StepInputs) -> Jaxpr:
        """Trace the step of one member on one device."""
        structure, _ = inputs.state._structure_and_size()
        shape = {} if self.layout is None else dict(self.layout.mesh.shape)
        step = partial(self._step, structure, split=shape.get(DATA, 1) > 1)
        # The step averages over the axis `data`, which exists inside `shard_map` alone: here its size is declared.
        return jax.make_jaxpr(step, axis_env=list(shape.items()))(*self.member_shapes(inputs)).jaxpr

    def trial(self, inputs: StepInputs, donate: bool, execution: Execution) -> Trial:
        """Return what compiles and measures a step that is executed in a given way."""
        structure, size = inputs.state._structure_and_size()
        inputs = inputs._replace(arguments=_on_device(inputs.arguments))
        state, arguments, axes = inputs
        static = HashablePytree.of(axes)

        def compile_step() -> int:
            """Compile the step, and return the bytes of its temporaries."""
            if execution.strategy == "loop":
                i = np.uint32(0) if jax.tree.leaves(axes) else None
                program = self._member_programs[donate]
                lowered = program.lower(structure, execution, static, state._members()[0], i, arguments)
            else:
                with self._context(execution):
                    placed = jax.tree.map(_shape_if_traced, self._placed(execution, inputs))
                    lowered = self._programs[donate].lower(structure, execution, size, static, *placed)
            analysis: Any = lowered.compile().memory_analysis()
            return analysis.temp_size_in_bytes

        def run(times: int, together: int) -> list[float]:
            """Return the seconds of a step: of the first, then the means of `times` groups of `together` steps."""
            after = self._held_for(execution, state)
            if donate:  # the steps take over its memory, and the user's state stays usable
                after = after._copy()
            # JAX computes asynchronously: the clock starts when all before is done, and stops when all results are.
            jax.block_until_ready((after._contents(), arguments))
            found = list[float]()
            for steps in (1, *[together] * times):
                start = time.perf_counter()
                for _ in range(steps):
                    after, metrics = self.execute(execution, inputs._replace(state=after), donate)
                jax.block_until_ready((after._contents(), metrics))
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
        """Return the new arrays of all members, the number of the next step, and the metrics; to be compiled."""
        layout = self._layout_of(execution)
        of_member = partial(self._step, structure, split=layout is not None and layout.shards > 1)

        def mapped(size: int) -> Callable[..., Any]:
            return over_members(of_member, execution, (0, *axes.value), size, in_place=in_place)

        # `shard_map` goes around the strategy, so that the compiler sees one device's program for its own members.
        over_all = mapped(size) if layout is None else layout.over_devices(mapped, axes.value, size)
        arrays, metrics = over_all(arrays, *batch)
        return arrays, step + 1, metrics

    def _step_of_member(
        self, structure: Structure, execution: Execution, axes: HashablePytree, arrays: Arrays, i: jax.Array, batch: Any
    ) -> Any:
        """Return the new arrays and the metrics of member `i`; to be compiled, once for all members."""
        step = partial(self._step, structure)
        return (convolutions_as_products(step) if execution.products else step)(
            arrays, *take_member(batch, axes.value, i)
        )

    def member_shapes(self, inputs: StepInputs) -> tuple[Any, ...]:
        """Return the shapes of what one member's step takes on one device."""
        state, arguments, axes = inputs
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
    """Return the arguments as arrays on the device, transferred once and not once for each member."""
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), arguments)


# Compiled, so that it is a single dispatch, however many members and metrics there are.
@jax.jit
def _next_step_and_stacked(step: jax.Array, metrics: list[dict[str, Any]]) -> tuple[jax.Array, dict[str, Any]]:
    """Return the number of the next step, and the metrics of all members, stacked."""
    return step + 1, stack(metrics)
