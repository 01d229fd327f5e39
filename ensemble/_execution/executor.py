"""`Executor`: compile and run the step of all members."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from ...transforms._convolutions.as_products import convolutions_as_products, has_convolution
from ...transforms._core.axes import Axes
from ...transforms._core.compat import ClosedJaxpr, Jaxpr, Tracer, memory_of
from ...transforms._core.target import device, platform
from ...transforms._models.hashable import HashablePytree
from ...transforms._models.stacking import stack
from ...transforms._runs.source import first_of
from .._members.sharding import ENSEMBLE, Layout, constrain, constrain_shared, within
from .._members.shared import SharedArrays
from .._members.strategy import Execution, over_members, take_member
from .._step.joint_step import joint_step
from .._step.member_step import MemberStep
from .._step.packed import Packed, Packing, packed, unpacked
from .._step.shared_step import SharedStep
from .._step.state import Arrays, SharedState, Trained, TrainState
from .forms import Padded, State, Unstacked, arrays_of, padded, put, stacked, take, unstacked, without_padding


class StepInputs(NamedTuple):
    """The inputs of one step of all members.

    Attributes:
      state: the training state before the step.
      arguments: the arguments of the loss after the model.
      axes: the axes of each argument along which the members are mapped.
      steps: the number of steps, if one program takes several; `arguments` then have them along a new axis 0, which
        `axes` do not count.
    """

    state: State
    arguments: tuple[Any, ...]
    axes: tuple[Axes, ...]
    steps: int | None = None

    @property
    def first(self) -> StepInputs:
        """Return the inputs of the first step."""
        return self if self.steps is None else self._replace(arguments=first_of(self.arguments), steps=None)

    @property
    def size(self) -> int:
        """Return the number of members."""
        return self.state._size

    @property
    def kind(self) -> Any:
        """Return a hashable value that identifies the compiled program: structures, shapes, dtypes and axes."""
        leaves, treedef = jax.tree.flatten((self.state._member(), self.state._shared, self.arguments))
        shapes = tuple((x.shape, x.dtype) if hasattr(x, "dtype") else type(x) for x in leaves)
        return self.state._structure, self.size, treedef, shapes, HashablePytree.of(self.axes), self.steps

    @property
    def is_traced(self) -> bool:
        """Return whether a step is part of a trace, so that nothing can be measured or compared."""
        # Inside a trace constants are traced too, even if the state and the batch are not.
        leaves = [*arrays_of(self.state), *jax.tree.leaves(self.arguments)]
        return any(isinstance(x, Tracer) for x in leaves) or isinstance(jnp.zeros(()), Tracer)

    @property
    def trains_shared(self) -> bool:
        """Return whether the members share parameters that train."""
        return self.state._shared is not None and self.state._shared.trains

    def of_member(self) -> tuple[Any, ...]:
        """Return the shapes and dtypes of the inputs of one member's step."""
        one = self.arguments if self.steps is None else jax.eval_shape(first_of, self.arguments)
        batch = jax.eval_shape(lambda *args: take_member(args, self.axes, 0), *one)
        shared = jax.eval_shape(lambda: self.state._shared)
        return self.state._member(), None, None if shared is None else shared.arrays, *batch


class Executor:
    """Compile and run the step of all members.

    Args:
      step: the step of one member.
      shared_step: the step of the parameters that all members share.
      layout: the layout of the members on a mesh; None without a mesh, when the `Execution` sets the number of devices.
    """

    def __init__(self, step: MemberStep, shared_step: SharedStep, layout: Layout | None) -> None:
        self._step, self._shared_step = step, shared_step
        self.layout = layout
        self._convolved: dict[Any, bool] = {}  # by the kind of the inputs
        self._latest: tuple[tuple[Any, ...], tuple[Any, ...]] | None = None
        self._latest_program: tuple[tuple[Any, ...], Any] | None = None
        # One program for a step that leaves its state usable, and one for a step that donates the memory of its state.
        # A function for each static part, since `jax.jit` would compare static arguments at every call.
        self._program = lru_cache(maxsize=256)(self._compiled)
        # Always donates the memory of the member: unstacked arrays are copies or results of the previous step, to which
        # there are no other references.
        self._member_program = jax.jit(self._step_of_member, static_argnums=0, donate_argnums=1)
        # For a step that leaves its state usable: reads stacked arrays and writes new ones, so no member is copied.
        self._row_program = jax.jit(self._step_of_row, static_argnums=0, donate_argnums=2)

    def execute(self, execution: Execution, inputs: StepInputs, donate: bool) -> tuple[State, dict[str, jax.Array]]:
        """Take the steps with an execution; return the new state and the metrics.

        The metrics have the members along axis 0 and, if there are several steps, these along axis 1.
        With `donate`, the new state has the form that the next step needs, which may not be a `TrainState`.
        """
        if self.takes_turns(inputs):
            return self._one_by_one(execution, inputs, donate)
        structure, size = inputs.state._structure, inputs.size
        layout = self._layout_of(execution)
        after: State
        if execution.strategy == "loop":
            static, last = self._static(execution, inputs), self._last_of_member(inputs)
            of_members, shared = [], inputs.state._shared
            # The index is an array, so that one program serves all members.
            if donate:
                before, members = unstacked(inputs.state), []
                for i, member in enumerate(before.members):
                    new, metrics = self._member_program(static, member, np.uint32(i), *last)
                    members.append(new)
                    of_members.append(metrics)
            else:
                arrays = stacked(inputs.state)._arrays()
                new = _room_for(arrays)
                for i in range(size):
                    new, metrics = self._row_program(static, arrays, new, np.uint32(i), *last)
                    of_members.append(metrics)
            step, metrics = _next_step_and_stacked(inputs.state.step, of_members, inputs.steps or 1)
            after = (
                Unstacked(structure, members, step, shared)
                if donate
                else TrainState._of_arrays(structure, new, step, shared)
            )
        elif layout is None:
            given = stacked(inputs.state)._pack()
            program = self.program(execution, inputs, donate, given.packing)
            arrays, metrics = program(given.arrays, given.constant, inputs.arguments)
            after = TrainState._of_packed(given._replace(arrays=arrays))
        else:
            with within(layout):
                program, arguments = self.program(execution, inputs, donate), self._arguments(layout, inputs)
                arrays, trained, step, metrics = program(*arguments)
            shared = None if arguments[2] is None else SharedState.of(trained, arguments[2])
            after = Padded(structure, size, arrays, step, shared)
            metrics = without_padding(metrics, size)
        return after if donate else stacked(after), metrics

    def takes_turns(self, inputs: StepInputs) -> bool:
        """Return whether several steps are as many programs: XLA's CPU backend is slow at convolutions in a loop."""
        if inputs.steps is None or platform() != "cpu" or inputs.is_traced:
            return False
        kind = inputs.kind
        if kind not in self._convolved:
            self._convolved[kind] = has_convolution(self.member_program(inputs))
        return self._convolved[kind]

    def _one_by_one(self, execution: Execution, inputs: StepInputs, donate: bool) -> tuple[State, dict[str, jax.Array]]:
        """Return the same as `execute`, with a program for each step."""
        state, of_steps = inputs.state, []
        assert inputs.steps is not None
        for i in range(inputs.steps):
            arguments = jax.tree.map(lambda x, i=i: x[i], inputs.arguments)
            one = inputs._replace(state=state, arguments=arguments, steps=None)
            state, metrics = self.execute(execution, one, donate or i > 0)  # states between steps are ours
            of_steps.append(metrics)
        return state if donate else stacked(state), _along_steps(of_steps)

    def temporaries(self, inputs: StepInputs, donate: bool, execution: Execution) -> int:
        """Compile a step for an execution, and return the bytes of its temporaries."""
        return memory_of(self.lower(inputs, donate, execution).compile()).temp_size_in_bytes

    def lower(self, inputs: StepInputs, donate: bool, execution: Execution) -> Any:
        """Return the lowered program of a step; for "loop", that of one member."""
        inputs = inputs.first if self.takes_turns(inputs) else inputs
        if execution.strategy == "loop":
            static, member = self._static(execution, inputs), inputs.state._member()
            last = np.uint32(0), *self._last_of_member(inputs)
            if donate:
                return self._member_program.lower(static, member, *last)
            rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((inputs.size, *x.shape), x.dtype), member)
            return self._row_program.lower(static, rows, rows, *last)
        layout = self._layout_of(execution)
        if layout is None:
            given = stacked(inputs.state)._pack()
            # `compile_for` may compile for another device.
            place = None if device() is None else jax.sharding.SingleDeviceSharding(device())
            arguments = jax.tree.map(
                partial(_shape_if_traced, place=place), (given.arrays, given.constant, inputs.arguments)
            )
            return self.program(execution, inputs, donate, given.packing).lower(*arguments)
        with within(layout):
            arguments = jax.tree.map(partial(_shape_if_traced, place=None), self._arguments(layout, inputs))
            return self.program(execution, inputs, donate).lower(*arguments)

    def program(self, execution: Execution, inputs: StepInputs, donate: bool, packing: Packing | None = None) -> Any:
        """Return the compiled program of a step.

        On one device it is a function of the arrays of a `Packed` state, its constant ones and the batch, to the new
        arrays and the metrics. Without `packing`, it is a function of the arrays of all members, the shared ones that
        train and those that do not, the step and the batch.
        """
        key = self._static(execution, inputs), donate, packing
        latest = self._latest_program  # another thread may replace it
        if latest is None or key != latest[0]:
            latest = self._latest_program = key, self._program(*key)
        return latest[1]

    def _compiled(self, static: tuple[Any, ...], donate: bool, packing: Packing | None) -> Any:
        if packing is not None:
            return jax.jit(partial(self._packed_step, donate, static, packing), donate_argnums=0 if donate else ())
        return jax.jit(partial(self._step_of_all, donate, static), donate_argnums=(0, 1) if donate else ())

    def _static(self, execution: Execution, inputs: StepInputs) -> tuple[Any, ...]:
        """Return the static argument of the programs; the same object for equal steps in a row, which is quicker."""
        parts = inputs.state._structure, execution, inputs.size, inputs.steps, inputs.axes
        latest = self._latest
        if latest is None or parts != latest[0]:
            latest = self._latest = parts, (*parts[:4], HashablePytree.of(inputs.axes))
        return latest[1]

    def _arguments(self, layout: Layout, inputs: StepInputs) -> tuple[Any, ...]:
        """Return the arguments of a program of all members, with the arrays on the devices of a layout."""
        state = padded(inputs.state, layout)
        placed = layout.place_batch(inputs.arguments, inputs.axes, inputs.size, stacked=inputs.steps is not None)
        return state.arrays, *_in_parts(state._shared), state.step, placed

    def _last_of_member(self, inputs: StepInputs) -> tuple[Any, Any]:
        """Return the last arguments of a program of one member: the arrays that all share, and the batch."""
        shared = inputs.state._shared
        return None if shared is None else shared.arrays, _on_device(inputs.arguments)

    def _layout_of(self, execution: Execution) -> Layout | None:
        if self.layout is None and execution.devices > 1:
            return Layout.local(execution.devices)
        return self.layout

    def member_program(self, inputs: StepInputs) -> Jaxpr:
        """Return the program of one member's step, with its whole batch."""
        return self.trace_member(inputs).jaxpr

    def trace_member(self, inputs: StepInputs) -> ClosedJaxpr:
        """Return the program of one member's step, with the values of its constants."""
        # The program that "auto" hashes and searches for convolutions. A loss may name an axis of the mesh, which
        # exists only inside `shard_map`, so its size is declared here.
        axis_env = [] if self.layout is None else list(self.layout.named.items())
        step = partial(self._step, inputs.state._structure)
        return jax.make_jaxpr(step, axis_env=axis_env)(*inputs.of_member())

    def _step_of_all(
        self,
        in_place: bool,
        static: tuple[Any, ...],
        arrays: Arrays,
        trained: Trained | None,
        constant: SharedArrays | None,
        step: jax.Array,
        batches: Any,
    ) -> tuple[Arrays, Trained | None, jax.Array, dict[str, Any]]:
        """Return the new arrays of all members, the shared ones, the next step number, and the metrics; compiled."""
        one, steps = partial(self._one_step_of_all, in_place, static, constant), static[3]
        (arrays, trained), metrics = _in_sequence(one, (arrays, trained), batches, steps)
        return arrays, trained, step + (steps or 1), metrics

    def _packed_step(
        self,
        in_place: bool,
        static: tuple[Any, ...],
        packing: Packing,
        arrays: list[jax.Array],
        constant: list[jax.Array],
        batches: Any,
    ) -> tuple[list[jax.Array], dict[str, Any]]:
        """Return the new arrays of a packed state, and the metrics; compiled."""
        (*own, trained), standing, step, shared = unpacked(Packed(packing, arrays, constant))
        of_all = self._step_of_all(in_place, static, (*own, standing), trained, shared, step, batches)
        (*own, standing), trained, step, metrics = of_all
        if not in_place:
            del metrics["stopped"]  # for `fit`; users read `state.standing`
        after = packed(packing.structure, (*own, trained), standing, step, shared)
        assert after.packing == packing
        return after.arrays, metrics

    def _one_step_of_all(
        self,
        in_place: bool,
        static: tuple[Any, ...],
        constant: SharedArrays | None,
        before: tuple[Arrays, Trained | None],
        batch: Any,
    ) -> Any:
        """Return the new arrays of all members and the shared ones, and the metrics."""
        (structure, execution, size, _, axes), (arrays, trained) = static, before
        state = None if constant is None or trained is None else SharedState.of(trained, constant)
        shared = None if state is None else state.arrays
        layout = self._layout_of(execution)
        split = layout is not None and layout.shards > 1
        of_member = partial(self._step, structure, split=split)
        adds = state is not None and state.trains
        counts = jnp.arange(size if layout is None else layout.padded(size)) < size if adds else None
        in_axes = (0, 0, None, *axes.value)

        def mapped(size: int) -> Callable[..., Any]:
            together = partial(joint_step, self._step, structure, in_axes, split) if adds else None
            return over_members(of_member, execution, in_axes, size, in_place=in_place, together=together)

        if layout is None:
            arrays, metrics, *given = mapped(size)(arrays, counts, shared, *batch)
        else:
            # `shard_map` wraps the strategy, so that the compiler sees the program of one device for its own members.
            of_device = mapped(layout.padded(size) // layout.devices)

            def on_device(*args: Any) -> Any:
                arrays, metrics, *given = of_device(*args)
                return arrays, metrics, *jax.tree.map(lambda x: x[None], given)  # with an axis of devices

            specs = P(ENSEMBLE), P(ENSEMBLE), P(), *layout.batch_specs(batch, axes.value)
            arrays, metrics, *given = layout.on_each(on_device, *specs)(arrays, counts, shared, *batch)
            given = constrain_shared(jax.tree.map(lambda x: x.sum(0), given), layout)
        if given and trained is not None:
            trained = self._shared_step.update(trained, *given)
        if layout is not None and layout.splits_models:
            arrays, trained = constrain(arrays, layout), constrain_shared(trained, layout)
        return (arrays, trained), metrics

    def _step_of_member(self, static: tuple[Any, ...], arrays: Arrays, i: jax.Array, shared: Any, batches: Any) -> Any:
        """Return the new arrays and the metrics of a member; compiled once for all members."""
        structure, execution, _, steps, axes = static
        step: Callable[..., Any] = partial(self._step, structure)
        step = convolutions_as_products(step, everywhere=steps is not None) if execution.products else step

        def one(own: Arrays, batch: Any) -> tuple[Arrays, dict[str, Any]]:
            return step(own, None, shared, *take_member(batch, axes.value, i))

        return _in_sequence(one, arrays, batches, steps)

    def _step_of_row(
        self, static: tuple[Any, ...], arrays: Arrays, new: Arrays, i: jax.Array, shared: Any, batches: Any
    ) -> Any:
        """Take the step of member `i` of `arrays`, write its arrays into `new`; return `new` and the metrics."""
        of_member, metrics = self._step_of_member(static, take(arrays, i), i, shared, batches)
        return put(new, of_member, i), metrics


def _in_parts(shared: SharedState | None) -> tuple[Any, Any]:
    """Return the shared arrays that train, with their optimizer state, and those that do not."""
    return (None, None) if shared is None else (shared.trained, shared.constant)


def _in_sequence(
    step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batches: Any, steps: int | None
) -> tuple[Any, Any]:
    """Take one step, or several; return the last state and the metrics, with several steps along the last axis."""
    if steps is None:
        return step(state, batches)
    state, metrics = lax.scan(step, state, batches, steps)
    return state, jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), metrics)


def _shape_if_traced(x: Any, place: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) if isinstance(x, Tracer) else x


def _on_device(arguments: Any) -> Any:
    """Return the arguments as arrays on the device, transferred once instead of once for each member."""
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), arguments)


@jax.jit
def _room_for(arrays: Any) -> Any:
    """Return arrays of the same shapes for the results of a step; not zeros, which do not exist for keys."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), arrays)


@jax.jit
def _along_steps(metrics: Sequence[Any]) -> Any:
    """Return the metrics of several steps, with these along axis 1."""
    return jax.tree.map(lambda *x: jnp.stack(x, 1), *metrics)


# Compiled, so that it is a single dispatch for any number of members and metrics.
@partial(jax.jit, static_argnums=2)
def _next_step_and_stacked(step: jax.Array, metrics: Sequence[Any], count: int) -> tuple[jax.Array, dict[str, Any]]:
    """Return the step number after `count` steps, and the metrics of all members, stacked."""
    return step + count, stack(metrics)
