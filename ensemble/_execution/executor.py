"""`Executor`: steps of all members, executed in one way or another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

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
from .._members.sharding import DATA, Layout
from .._members.strategy import Execution, over_members, take_member
from .._step.member_step import MemberStep
from .._step.state import Arrays
from .autotune import Trial
from .forms import Padded, State, Unstacked, padded, stacked, unstacked, without_padding


class StepInputs(NamedTuple):
    """What one step of all members takes.

    Attributes:
      state: the training state before the step.
      arguments: those of the loss after the model.
      axes: for each of them, how it is mapped over the members.
    """

    state: State
    arguments: tuple[Any, ...]
    axes: tuple[Axes, ...]

    @property
    def size(self) -> int:
        """Return the number of members."""
        return self.state._size

    @property
    def kind(self) -> Any:
        """Return a hashable value that differs where another program is compiled."""
        leaves, treedef = jax.tree.flatten((self.state._member(), self.arguments))
        shapes = tuple((x.shape, x.dtype) if hasattr(x, "dtype") else type(x) for x in leaves)
        return self.state._structure, self.size, treedef, shapes, HashablePytree.of(self.axes)

    @property
    def is_traced(self) -> bool:
        """Return whether any of its arrays belong to a trace, so that nothing can be measured or compared."""
        return any(isinstance(x, Tracer) for x in jax.tree.leaves((self.state, self.arguments)))


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
        # It always takes over the memory of the member: unstacked arrays are copies, or what the last step has made,
        # and nobody else has either.
        self._member_program = jax.jit(self._step_of_member, static_argnums=(0, 1, 2), donate_argnums=3)

    def execute(self, execution: Execution, inputs: StepInputs, donate: bool) -> tuple[State, dict[str, jax.Array]]:
        """Take a step that is executed in a given way; return the new state and the metrics.

        Where it takes over the memory of the state, the new one has the form in which the next step takes it.
        """
        structure, size, static = inputs.state._structure, inputs.size, HashablePytree.of(inputs.axes)
        after: State
        if execution.strategy != "loop":
            with self._context(execution):
                placed = self._placed(execution, inputs)
                arrays, step, metrics = self._programs[donate](structure, execution, size, static, *placed)
            after = Padded(structure, size, arrays, step)
            return after if donate else stacked(after), without_padding(metrics, size)
        before, arguments = unstacked(inputs.state), _on_device(inputs.arguments)
        # An array as the index, so that one program serves all members.
        results = [
            self._member_program(structure, execution, static, member, np.uint32(i), arguments)
            for i, member in enumerate(before.members)
        ]
        members, metrics = zip(*results, strict=True)
        step, metrics = _next_step_and_stacked(before.step, metrics)
        after = Unstacked(structure, members, step)
        return after if donate else stacked(after), metrics

    def _placed(self, execution: Execution, inputs: StepInputs) -> tuple[Arrays, jax.Array, tuple[Any, ...]]:
        """Return the arrays, the step and the batch, on the devices from which a program takes them."""
        state, arguments, axes = inputs
        layout = self._layout_of(execution)
        if layout is None:
            state = stacked(state)
            return state._arrays(), state.step, arguments
        state = padded(state, layout)
        return state.arrays, state.step, layout.place_batch(arguments, axes)

    def _context(self, execution: Execution) -> Any:
        layout = self._layout_of(execution)
        return nullcontext() if layout is None else layout.context()

    def _layout_of(self, execution: Execution) -> Layout | None:
        if self.layout is None and execution.devices > 1:
            return Layout.local(execution.devices)
        return self.layout

    def member_program(self, inputs: StepInputs) -> Jaxpr:
        """Trace the step of one member on one device."""
        # The program of one device, without padding: this is what is measured, hashed and searched for convolutions.
        shape = {} if self.layout is None else dict(self.layout.mesh.shape)
        step = partial(self._step, inputs.state._structure, split=shape.get(DATA, 1) > 1)
        # The step averages over the axis `data`, which exists inside `shard_map` alone: here its size is declared.
        return jax.make_jaxpr(step, axis_env=list(shape.items()))(*self.member_shapes(inputs)).jaxpr

    def trial(self, inputs: StepInputs, donate: bool, execution: Execution) -> Trial:
        """Return what compiles and measures a step that is executed in a given way."""
        inputs = inputs._replace(arguments=_on_device(inputs.arguments))
        state, arguments, axes = inputs
        static = HashablePytree.of(axes)

        def compile_step() -> int:
            """Compile the step, and return the bytes of its temporaries."""
            if execution.strategy == "loop":
                member = state._member()
                lowered = self._member_program.lower(
                    state._structure, execution, static, member, np.uint32(0), arguments
                )
            else:
                with self._context(execution):
                    placed = jax.tree.map(_shape_if_traced, self._placed(execution, inputs))
                    lowered = self._programs[donate].lower(state._structure, execution, inputs.size, static, *placed)
            analysis: Any = lowered.compile().memory_analysis()
            return analysis.temp_size_in_bytes

        def run(times: int, together: int) -> list[float]:
            """Return the seconds of a step: of the first, then the means of `times` groups of `together` steps."""
            # Steps that take over the memory of their state begin with a copy: the user's stays usable.
            after = jax.tree.map(jnp.copy, state) if donate else state
            # JAX computes asynchronously: the clock starts when all before is done, and stops when all results are.
            jax.block_until_ready((after, arguments))
            found = list[float]()
            for steps in (1, *[together] * times):
                start = time.perf_counter()
                for _ in range(steps):
                    after, metrics = self.execute(execution, inputs._replace(state=after), donate)
                jax.block_until_ready((after, metrics))
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
        """Return the new arrays of a member, and its metrics; to be compiled once for all members."""
        step: Callable[..., Any] = partial(self._step, structure)
        step = convolutions_as_products(step) if execution.products else step
        return step(arrays, *take_member(batch, axes.value, i))

    def member_shapes(self, inputs: StepInputs) -> tuple[Any, ...]:
        """Return the shapes of what one member's step takes on one device."""
        state, arguments, axes = inputs
        layout, taken = self.layout, jax.eval_shape(lambda *args: take_member(args, axes, 0), *arguments)
        if layout is not None and layout.shards > 1:
            leaves, treedef = jax.tree.flatten(taken)
            specs = layout.batch_specs(arguments, axes)
            parts = [jax.ShapeDtypeStruct(layout.part(x, spec), x.dtype) for x, spec in zip(leaves, specs, strict=True)]
            taken = jax.tree.unflatten(treedef, parts)
        return state._member(), *taken


def _shape_if_traced(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, Tracer) else x


def _on_device(arguments: Any) -> Any:
    """Return the arguments as arrays on the device, transferred once and not once for each member."""
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), arguments)


# Compiled, so that it is a single dispatch, however many members and metrics there are.
@jax.jit
def _next_step_and_stacked(step: jax.Array, metrics: Sequence[Any]) -> tuple[jax.Array, dict[str, Any]]:
    """Return the number of the next step, and the metrics of all members, stacked."""
    return step + 1, stack(metrics)
