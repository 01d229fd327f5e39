"""`Stepper`: takes the training steps of all members, and decides how each is executed."""

from __future__ import annotations

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

# A loop over at most so many members is written out where it is no Python loop; one over more is compiled as a loop.
_MOST_COPIES = 16


class Stepper:
    """Training steps of all members, executed as the trainer asks, as an earlier step was, or as is quickest.

    Args:
      step: the step of one member.
      layout: how the members are spread over devices; None for one device.
      in_axes: how a batch is mapped over members, as for `Trainer`.
      asked: the strategy and the chunk size that the trainer was given.
      budget: the most bytes that the temporaries of a step may take, or None.
      seconds: how long "auto" may measure.
      cache: the directory in which it keeps what it has found, or None.

    Attributes:
      executor: executes the steps, and measures them.
      tuning: what was measured last; None where nothing was.
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
        self._checked_splits: set[Any] = set()
        self._chosen: dict[Any, Execution] = {}
        self._temporaries: dict[Any, int] = {}

    @property
    def freezes(self) -> bool:
        """Return whether a member stops where its loss or gradients are not finite."""
        return self._step.freeze

    @property
    def columns(self) -> list[str]:
        """Return the names of the hyperparameters with a number for each member, which are columns of the history."""
        return [name for name, values in self._numbers.items() if isinstance(values, list)]

    @property
    def _numbers(self) -> dict[str, Any]:
        return {**self._step.optimizer.numbers, **self._step.loss.numbers}

    def settings(self, execution: Execution | None = None) -> dict[str, Any]:
        """Return the settings that a checkpoint names, as far as they are known: plain values, for JSON.

        Args:
          execution: how steps were executed; None for the execution that was asked for.

        Returns:
          The name of the optax factory as "optimizer" (None for a ready transformation), the hyperparameters that are
          numbers as "hyperparams", and the fields of `Execution`.
        """
        execution = execution or self._asked
        return {"optimizer": self._step.optimizer.name, "hyperparams": self._numbers, **execution._asdict()}

    def arguments(self, batch: Any, size: int) -> tuple[tuple[Any, ...], tuple[Axes, ...]]:
        """Return the arguments of the loss after the model, and how each is mapped over `size` members.

        Raises:
          ValueError: the batch does not fit `in_axes`.
        """
        arguments = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        axes = axes_per_argument("Trainer.step", self._in_axes, arguments)
        # The model comes first, so that the loss's own names are those of the errors.
        what = "the number of members"
        mapped_size("Trainer.step", self._step.loss.fun, (None, *arguments), {}, (None, *axes), None, size, what)
        return arguments, tuple(axes)

    def advance(
        self,
        state: State,
        batch: Any,
        execution: Execution | None = None,
        *,
        donate: bool = False,
        aloud: bool = False,
    ) -> tuple[State, dict[str, jax.Array], Execution]:
        """Take a step, and return the new state, the metrics, and how it was executed.

        Args:
          state: where to start.
          batch: as for `Trainer.step`.
          execution: how an earlier step was executed, which decides what the trainer leaves open.
          donate: whether the step takes over the memory of `state`.
          aloud: whether to print what is measured, which may take a while.
        """
        inputs = StepInputs(state, *self.arguments(batch, state._size))
        layout = self.executor.layout
        if layout is not None and layout.shards > 1:
            # Once for each kind; a traced step has no values to compare, so the next one of its kind is checked again.
            kind = inputs.kind
            if kind not in self._checked_splits and check_split(self._step, layout, inputs):
                self._checked_splits.add(kind)
        # After the checks, since to choose may take seconds of measuring, and compiles.
        execution = self.choose(inputs, execution, donate, aloud)
        if donate:
            # A loader may fill the same buffer again, while the step still reads it.
            arguments = jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, inputs.arguments)
            inputs = inputs._replace(arguments=arguments)
        after, metrics = self.executor.execute(execution, inputs, donate)
        return after, metrics, execution

    def choose(self, inputs: StepInputs, earlier: Execution | None, donate: bool, aloud: bool) -> Execution:
        """Return how a step is executed: as the trainer asks, else as an earlier one was, else the quickest way."""
        asked = self._asked.strategy
        if self._asked.chunk_size is not None:
            chosen = self._asked._replace(strategy="vmap")
        elif asked not in ("auto", "vmap"):
            chosen = self._asked
        elif earlier and asked in ("auto", earlier.strategy) and self._fits(inputs, donate, earlier):
            # A resumed run goes on as it began: another execution rounds otherwise.
            chosen = earlier
        elif asked == "auto":
            chosen = self._quickest(inputs, donate, aloud)
        else:
            chosen = Execution("vmap") if self._budget is None else self._largest_chunk(inputs, donate)
        chosen = self._possible(inputs, chosen)
        return chosen if self._fits(inputs, donate, chosen) else self._largest_chunk(inputs, donate)

    def _possible(self, inputs: StepInputs, chosen: Execution) -> Execution:
        """Return an execution, or what replaces it in a trace, on a mesh, or on a machine with fewer devices."""
        if chosen == Execution("vmap", chosen.chunk_size):
            return chosen  # the usual case of a training loop, in which the arrays of the state are not visited
        on_mesh = self.executor.layout is not None
        if traced := inputs.is_traced:  # part of one program on one device
            chosen = chosen._replace(products=False, devices=1)
        if chosen.strategy == "loop" and (traced or on_mesh):
            # Written out, with a copy of the step for each member; "auto" has a compiled loop for many.
            many = self._asked.strategy == "auto" and self._members_per_device(inputs) > _MOST_COPIES
            chosen = chosen._replace(strategy="map" if many else "unroll")
        if chosen.devices > len(jax.local_devices()):  # of a checkpoint that another machine has written
            chosen = chosen._replace(devices=1)
        return chosen

    def _quickest(self, inputs: StepInputs, donate: bool, aloud: bool) -> Execution:
        """Return the execution that "auto" chooses, found once for each kind of model and batch."""
        kind = donate, inputs.kind
        if kind in self._chosen:
            return self._chosen[kind]
        layout, jaxpr, traced = self.executor.layout, self.executor.member_program(inputs), inputs.is_traced
        # In a trace there is no time. Processes would each measure other times, and choose differently. Side effects
        # would happen; naming an axis of the mesh is one to JAX, but does nothing.
        alone = layout is None or layout.in_one_process
        effects = [effect for effect in jaxpr.effects if type(effect).__name__ != "NamedAxisEffect"]
        tuning = None
        if not traced and alone and self._seconds and not effects:
            tuning = self._tuned(jaxpr, inputs, donate, aloud)
        if tuning is None:
            chosen = Execution("loop" if in_turn(jaxpr, jax.default_backend()) else "vmap")
        else:
            self.tuning, chosen = tuning, tuning.chosen
        if not traced:  # so that a later step that is not traced measures
            self._chosen[kind] = chosen
        return chosen

    def _tuned(self, jaxpr: Jaxpr, inputs: StepInputs, donate: bool, aloud: bool) -> Tuning | None:
        """Return what was measured for a program, now or before; None where there is no memory to measure."""
        layout, size = self.executor.layout, inputs.size
        on_mesh = None if layout is None else tuple(layout.mesh.shape.items())
        devices = len(jax.local_devices()) if on_mesh is None and jax.default_backend() == "cpu" else 1
        # With the seconds: a search that was short of time is not the answer for one that has more.
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
        """Return whether a step that is executed so stays within the budget; compiles it to find out."""
        return self._budget is None or self._need(inputs, donate, execution) <= self._budget

    def _need(self, inputs: StepInputs, donate: bool, execution: Execution) -> int:
        """Return the bytes of a step's temporaries, found once for each kind of model and batch."""
        kind = execution, donate, inputs.kind
        if kind not in self._temporaries:
            self._temporaries[kind] = self.executor.temporaries(inputs, donate, execution)
        return self._temporaries[kind]

    def _largest_chunk(self, inputs: StepInputs, donate: bool) -> Execution:
        """Return the largest chunk for "vmap" whose temporaries fit into the budget."""
        kind, members = ("chunk", donate, inputs.kind), self._members_per_device(inputs)
        if kind not in self._chosen:
            assert self._budget is not None  # else everything fits

            def of_chunk(chunk: int) -> Execution:
                return Execution("vmap", None if chunk == members else chunk)

            found = largest_chunk("Trainer", lambda n: self._need(inputs, donate, of_chunk(n)), members, self._budget)
            self._chosen[kind] = of_chunk(found)
        return self._chosen[kind]
