"""`LastStep`: the last step of a trainer, to take the next one of the same kind without choosing and checking again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax

from ...transforms._core.compat import Tracer
from .._step.state import TrainState

Program = Callable[..., Any]


class LastStep:
    """A step that was taken with a compiled program of all members, on one device.

    A step is of the same kind if its state is the state from before or after the last one, and its batch has the same
    structure and shapes. Its checks would take longer than the step of a small ensemble.

    Args:
      program: the compiled program: from the arrays of a packed state, its constant ones and the arguments of the loss
        to the new arrays and the metrics.
      before: the state before the step.
      after: the state after it, packed.
      arguments: the arguments of the loss after the model.
    """

    def __init__(self, program: Program, before: TrainState, after: TrainState, arguments: tuple[Any, ...]) -> None:
        self._program, self._kind = program, _kind_of(arguments)
        held = after._pack()
        self._packing = held.packing
        # The states with their integers. Weak, so that the arrays of a state can be freed.
        self._before: tuple[Any, Any] = (weakref.ref(before), None)
        self._after = weakref.ref(after), held.arrays[-1]

    def again(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]] | None:
        """Take a step of the same kind; return the new state and the metrics, or None for a step of another kind."""
        (after, of_after), (before, of_before) = self._after, self._before  # once, since other threads replace them
        if state is after():
            integers = of_after
        elif state is before():
            integers = of_before
        else:
            return None
        arguments = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        if _kind_of(arguments) != self._kind:
            return None
        packing, arrays, constant = held = state._pack(integers)
        if packing is not self._packing and packing != self._packing:
            return None  # the caller has put something else into the state
        results, metrics = self._program(arrays, constant, arguments)
        new: TrainState[Any] = TrainState._of_packed(held._replace(arrays=results))
        if not isinstance(results[-1], Tracer):
            self._before, self._after = (weakref.ref(state), arrays[-1]), (weakref.ref(new), results[-1])
        return new, metrics


def _kind_of(arguments: tuple[Any, ...]) -> Any:
    """Return the structure of the arguments, and the types, shapes and dtypes of their leaves, to compare."""
    leaves, treedef = jax.tree.flatten(arguments)
    return treedef, [(type(x), getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves]
