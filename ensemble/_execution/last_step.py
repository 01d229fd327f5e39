"""`LastStep`: the last step of a trainer, to take the next one of the same kind without choosing and checking again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax

from .._step.state import SharedState, TrainState

Program = Callable[..., Any]


class LastStep:
    """A step that was taken with a compiled program of all members, on one device.

    A step is of the same kind if its state is the state from before or after the last one, and its batch has the same
    structure and shapes. Its checks would take longer than the step of a small ensemble.

    Args:
      program: the compiled program: from the arrays of a state, the shared ones that train and those that do not, the
        step and the arguments of the loss to the new arrays, shared ones, step and the metrics.
      before: the state before the step.
      after: the state after it.
      arguments: the arguments of the loss after the model.
    """

    def __init__(self, program: Program, before: TrainState, after: TrainState, arguments: tuple[Any, ...]) -> None:
        self._program, self._kind = program, _kind_of(arguments)
        # Weak, so that the arrays of a state can be freed.
        self._states = weakref.ref(before), weakref.ref(after)

    def again(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]] | None:
        """Take a step of the same kind; return the new state and the metrics, or None for a step of another kind."""
        before, after = self._states
        if state is not after() and state is not before():
            return None
        arguments = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        if _kind_of(arguments) != self._kind:
            return None
        shared = state._shared
        inputs = (None, None) if shared is None else (shared.trained, shared.constant)
        arrays, trained, step, metrics = self._program(state._arrays(), *inputs, state.step, arguments)
        new = state._with(arrays, step, None if shared is None else SharedState.of(trained, shared.constant))
        self._states = weakref.ref(state), weakref.ref(new)
        return new, metrics


def _kind_of(arguments: tuple[Any, ...]) -> Any:
    """Return the structure of the arguments, and the types, shapes and dtypes of their leaves, to compare."""
    leaves, treedef = jax.tree.flatten(arguments)
    return treedef, [(type(x), getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves]
