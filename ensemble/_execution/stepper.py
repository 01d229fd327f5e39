"""`Stepper`: takes the training steps of all members, and has all that a loop must know of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ...transforms._core.axes import Axes, axes_per_argument, mapped_size
from .._members.strategy import Execution
from .._step.member_step import MemberStep
from .choose_strategy import StrategyChoice
from .data_parallel import check_split
from .executor import Executor, StepInputs
from .forms import State


class Stepper:
    """Training steps of all members.

    Args:
      step: the step of one member.
      executor: executes it for all members.
      choice: decides how it executes them.
      in_axes: how a batch is mapped over members, as for `Trainer`.
    """

    def __init__(self, step: MemberStep, executor: Executor, choice: StrategyChoice, in_axes: Axes) -> None:
        self._step, self.executor, self.choice, self._in_axes = step, executor, choice, in_axes
        self._checked_splits: set[Any] = set()

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
        execution = execution or self.choice.asked
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
        tell: Callable[[str], None] = lambda _: None,
    ) -> tuple[State, dict[str, jax.Array], Execution]:
        """Take a step, and return the new state, the metrics, and how it was executed.

        Args:
          state: where to start.
          batch: as for `Trainer.step`.
          execution: how an earlier step was executed, which decides what the trainer leaves open.
          donate: whether the step takes over the memory of `state`.
          tell: called with a line about what is measured, which may take a while.
        """
        inputs = StepInputs(state, *self.arguments(batch, state._size))
        layout = self.executor.layout
        if layout is not None and layout.shards > 1:
            # Once for each kind; a traced step has no values to compare, so the next one of its kind is checked again.
            kind = inputs.kind
            if kind not in self._checked_splits and check_split(self._step, layout, inputs):
                self._checked_splits.add(kind)
        # After the checks, since to choose may take seconds of measuring, and compiles.
        execution = self.choice.choose(inputs, execution, donate, tell)
        if donate:
            # A loader may fill the same buffer again, while the step still reads it.
            arguments = jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, inputs.arguments)
            inputs = inputs._replace(arguments=arguments)
        after, metrics = self.executor.execute(execution, inputs, donate)
        return after, metrics, execution
