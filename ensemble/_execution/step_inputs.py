"""`StepInputs`: what one step of all members takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from ...transforms._core.axes import Axes
from ...transforms._core.compat import Tracer
from ...transforms._models.hashable import HashablePytree
from .._step.state import TrainState, kind_of


class StepInputs(NamedTuple):
    """What one step of all members takes.

    Attributes:
      state: the training state before the step.
      arguments: those of the loss after the model.
      axes: for each of them, how it is mapped over the members.
    """

    state: TrainState
    arguments: tuple[Any, ...]
    axes: tuple[Axes, ...]

    @property
    def kind(self) -> Any:
        """Return a hashable value that differs where another program is compiled."""
        # The structures, shapes and dtypes of the arrays, and the axes; never their values.
        return self.state._kind, HashablePytree.of(self.axes), kind_of(self.arguments)

    @property
    def is_traced(self) -> bool:
        """Return whether any of its arrays belong to a trace, so that nothing can be measured or compared."""
        return self.state._is_traced() or any(isinstance(x, Tracer) for x in jax.tree.leaves(self.arguments))
