"""`Stepper`: take the training steps of all members, and choose the execution of each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr

from ...transforms._convolutions.as_products import has_convolution
from ...transforms._core.axes import Axes, axes_per_argument, mapped_size
from ...transforms._core.memory import largest_chunk
from .._members.sharding import Layout
from .._members.strategy import Execution, in_turn
from .._step.member_step import MemberStep
from .autotune import Tuning, fingerprint, recall, remember, tune
from .data_parallel import check_split
from .executor import Executor, StepInputs
from .forms import State

# Where "loop" is not possible, "auto" replaces it with "unroll" for at most this many members, and with "map" for more.
_MOST_COPIES = 16


class Stepper:
    """Take training steps of all members with the execution that is requested, used earlier, or fastest.

    Args:
      step: the step of one member.
      layout: the layout of the members on a mesh; None without a mesh.
      in_axes: the axes of a batch, as for `Trainer`.
      asked: the strategy and the chunk size that were passed to the trainer.
      budget: the maximum bytes of the temporaries of a step, or None.
      seconds: how long "auto" may measure.
      cache: the directory in which "auto" stores its results, or None.

    Attributes:
      executor: runs and times the steps.
      tuning: the latest measurements; None if there are none.
      digests: the digests of the programs that checkpoints have stored, by the kind of their inputs.
    """

    def __init__(
        self,
        step: MemberStep,
        layout: Layout | None,
        in_axes: Axes,
        asked: Execution,
        budget: int | None,
        seconds: float,
        cache: Path | None,
    ) -> None:
        self._step, self._in_axes, self._asked = step, in_axes, asked
        self._budget, self._seconds, self._cache = budget, seconds, cache
        self.executor = Executor(step, layout)
        self.tuning: Tuning | None = None
        self.digests: dict[Any, str] = {}
        # The axes of the arguments, by the number of members, structure and shapes, for which they were checked.
        self._axes: dict[Any, tuple[Axes, ...]] = {}
        self._checked_splits: set[Any] = set()
        self._chosen: dict[Any, Execution] = {}
        self._temporaries: dict[Any, int] = {}

    @property
    def freezes(self) -> bool:
        """Return whether a member stops when its loss or gradients are not finite."""
        return self._step.freeze

    @property
    def columns(self) -> list[str]:
        """Return the names of the hyperparameters with a number for each member, the columns of the history."""
        return [name for name, values in self._numbers.items() if isinstance(values, list)]

    @property
    def _numbers(self) -> dict[str, Any]:
        return {**self._step.optimizer.numbers, **self._step.loss.numbers}

    def settings(self, execution: Execution | None = None) -> dict[str, Any]:
        """Return the settings that a checkpoint stores in its manifest, as plain values for JSON.

        Args:
          execution: the execution of the steps; None for the requested one.

        Returns:
          The name of the optax factory as "optimizer" (None for a ready transformation), the numeric hyperparameters as
          "hyperparams", and the fields of `Execution`.
        """
        execution = execution or self._asked
        return {"optimizer": self._step.optimizer.name, "hyperparams": self._numbers, **execution._asdict()}

    def arguments(self, batch: Any, size: int) -> tuple[tuple[Any, ...], tuple[Axes, ...]]:
        """Return the arguments of the loss after the model, and the axes of each; check them for `size` members.

        Raises:
          ValueError: the batch does not match `in_axes`.
        """
        arguments = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        leaves, treedef = jax.tree.flatten(arguments)
        kind = size, treedef, tuple([getattr(x, "shape", ()) for x in leaves])
        axes = self._axes.get(kind)
        if axes is None:
            axes = axes_per_argument("Trainer.step", self._in_axes, arguments)
            # With None for the model, so that errors use the argument names of the loss.
            what = "the number of members"
            mapped_size("Trainer.step", self._step.loss.fun, (None, *arguments), {}, (None, *axes), None, size, what)
            self._axes[kind] = axes
        return arguments, axes

    def advance(
        self,
        state: State,
        batches: Sequence[Any],
        execution: Execution | None = None,
        *,
        donate: bool = False,
        aloud: bool = False,
    ) -> tuple[State, dict[str, jax.Array], Execution]:
        """Take a step for each batch, and return the new state, the metrics, and the execution.

        Args:
          state: the state before the step.
          batches: as for `Trainer.step`; several need to be `alike`.
          execution: the execution of an earlier step, used again if the settings of the trainer allow it.
          donate: whether the step reuses the memory of `state`.
          aloud: whether to print what is being measured.
        """
        inputs = StepInputs(state, *self.arguments(batches[0], state._size))
        layout = self.executor.layout
        if layout is not None and layout.shards > 1:
            # Checked once for each kind of inputs, but again after a traced step, which has no values to compare.
            kind = inputs.kind
            if kind not in self._checked_splits and check_split(self._step, layout, inputs):
                self._checked_splits.add(kind)
        # After the checks, since choosing compiles and may measure for seconds.
        execution = self.choose(inputs, execution, donate, aloud)
        if donate:
            inputs = inputs._replace(arguments=copied(inputs.arguments))
        if len(batches) > 1:
            inputs = inputs._replace(more=tuple(self.arguments(batch, state._size)[0] for batch in batches[1:]))
        after, metrics = self.executor.execute(execution, inputs, donate)
        return after, metrics, execution

    def alike(self, batches: Sequence[Any]) -> bool:
        """Return whether several batches have one structure, shapes and dtypes, and can be part of one program."""
        kinds = [
            (treedef, [(getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in leaves])
            for leaves, treedef in map(jax.tree.flatten, batches)
        ]
        return all(kind == kinds[0] for kind in kinds[1:])

    def choose(self, inputs: StepInputs, earlier: Execution | None, donate: bool, aloud: bool) -> Execution:
        """Return the execution of a step: as requested, else as in an earlier step, else the fastest."""
        asked = self._asked.strategy
        if self._asked.chunk_size is not None:
            chosen = self._asked._replace(strategy="vmap")
        elif asked not in ("auto", "vmap"):
            chosen = self._asked
        elif earlier and asked in ("auto", earlier.strategy) and self._fits(inputs, donate, earlier):
            # A resumed run keeps its execution, since another one rounds differently.
            chosen = earlier
        elif asked == "auto":
            chosen = self._quickest(inputs, donate, aloud)
        else:
            chosen = Execution("vmap") if self._budget is None else self._largest_chunk(inputs, donate)
        chosen = self._possible(inputs, chosen)
        return chosen if self._fits(inputs, donate, chosen) else self._largest_chunk(inputs, donate)

    def _possible(self, inputs: StepInputs, chosen: Execution) -> Execution:
        """Return an execution, or its replacement in a trace, on a mesh, or on a machine with fewer devices."""
        if chosen == Execution("vmap", chosen.chunk_size):
            return chosen  # the common case, handled early because `is_traced` visits all arrays of the state
        on_mesh = self.executor.layout is not None
        if traced := inputs.is_traced:  # part of one program on one device
            chosen = chosen._replace(products=False, devices=1)
        if chosen.strategy == "loop" and (traced or on_mesh):
            # Unrolled, with a copy of the step for each member; "auto" uses a compiled loop for many members.
            many = self._asked.strategy == "auto" and self._members_per_device(inputs) > _MOST_COPIES
            chosen = chosen._replace(strategy="map" if many else "unroll")
        if chosen.devices > len(jax.local_devices()):  # from a checkpoint that was written on another machine
            chosen = chosen._replace(devices=1)
        return chosen

    def _quickest(self, inputs: StepInputs, donate: bool, aloud: bool) -> Execution:
        """Return the execution that "auto" chooses, determined once for each kind of model and batch."""
        kind = donate, inputs.kind
        if kind in self._chosen:
            return self._chosen[kind]
        layout, jaxpr, traced = self.executor.layout, self.executor.member_program(inputs), inputs.is_traced
        # Nothing can be timed inside a trace. Several processes would measure different times and choose differently.
        # A measurement would repeat side effects; naming a mesh axis counts as an effect in JAX, but is harmless.
        alone = layout is None or layout.in_one_process
        effects = [effect for effect in jaxpr.effects if type(effect).__name__ != "NamedAxisEffect"]
        tuning = None
        if not traced and alone and self._seconds and not effects:
            tuning = self._tuned(jaxpr, inputs, donate, aloud)
        if tuning is None:
            chosen = Execution("loop" if in_turn(jaxpr, jax.default_backend()) else "vmap")
        else:
            self.tuning, chosen = tuning, tuning.chosen
        if not traced:  # not stored for a traced step, so that a later untraced step measures
            self._chosen[kind] = chosen
        return chosen

    def _tuned(self, jaxpr: Jaxpr, inputs: StepInputs, donate: bool, aloud: bool) -> Tuning | None:
        """Return the measurements of a program, new or cached; None if every candidate fails at run time."""
        layout, size = self.executor.layout, inputs.size
        on_mesh = None if layout is None else tuple(layout.mesh.shape.items())
        devices = len(jax.local_devices()) if on_mesh is None and jax.default_backend() == "cpu" else 1
        # The key includes the seconds: a search with less time must not answer for one with more.
        key = fingerprint(jaxpr, size, inputs.axes, self._budget, self._seconds, on_mesh, devices, donate)
        tuning = recall(key, self._cache)
        if tuning is None:
            tuning = tune(
                partial(self.executor.temporaries, inputs, donate),
                partial(self.executor.seconds, inputs, donate),
                size=self._members_per_device(inputs),
                looped=layout is None,
                devices=min(devices, size),
                convolutions=has_convolution(jaxpr),
                seconds=self._seconds,
                budget=self._budget,
                where=f"{size} × {inputs.state._structure!r} on {jax.devices()[0].device_kind}",
                aloud=aloud,
            )
            if tuning is not None:
                remember(key, tuning, self._cache)
        return tuning

    def _members_per_device(self, inputs: StepInputs) -> int:
        layout, size = self.executor.layout, inputs.size
        return size if layout is None else layout.padded(size) // layout.devices

    def _fits(self, inputs: StepInputs, donate: bool, execution: Execution) -> bool:
        """Return whether a step with this execution fits into the budget; compiles it to find out."""
        return self._budget is None or self._need(inputs, donate, execution) <= self._budget

    def _need(self, inputs: StepInputs, donate: bool, execution: Execution) -> int:
        """Return the bytes of a step's temporaries, determined once for each kind of model and batch."""
        kind = execution, donate, inputs.kind
        if kind not in self._temporaries:
            self._temporaries[kind] = self.executor.temporaries(inputs, donate, execution)
        return self._temporaries[kind]

    def _largest_chunk(self, inputs: StepInputs, donate: bool) -> Execution:
        """Return the largest chunk for "vmap" whose temporaries fit into the budget."""
        kind, members = ("chunk", donate, inputs.kind), self._members_per_device(inputs)
        if kind not in self._chosen:
            assert self._budget is not None  # otherwise everything fits

            def of_chunk(chunk: int) -> Execution:
                return Execution("vmap", None if chunk == members else chunk)

            found = largest_chunk("Trainer", lambda n: self._need(inputs, donate, of_chunk(n)), members, self._budget)
            self._chosen[kind] = of_chunk(found)
        return self._chosen[kind]


def copied(batch: Any) -> Any:
    """Return a batch with copies of its NumPy arrays: a data loader may reuse their memory before they are read."""
    if not any(isinstance(x, np.ndarray) for x in jax.tree.leaves(batch)):
        return batch
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, batch)
