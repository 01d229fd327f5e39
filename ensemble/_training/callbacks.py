"""`Callback`, the functions that `Trainer.fit` calls, and the state that it hands to those that want it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from .._step.state import TrainState


class Callback(Protocol):
    """A function that `Trainer.fit` calls with the metrics of each recorded step.

    One with a parameter `state` is called with a function as `state`, which returns the training state after this step.

    Examples:
      >>> from plurax.ensemble import Callback, save
      >>> def worst(step, metrics):
      ...     print(f"step {step}: {metrics['loss'].max():.3f}")
      >>> def snapshot(step, metrics, state):
      ...     if step % 1000 == 0:
      ...         save(f"snapshots/{step}", state())
      >>> callbacks: list[Callback] = [worst, snapshot]  # for Trainer.fit
    """

    # To type checkers, `*args: Any, **kwargs: Any` allows any other parameters, required ones too.
    def __call__(self, step: int, metrics: Mapping[str, np.ndarray], /, *args: Any, **kwargs: Any) -> Any:
        """Receive the metrics of a recorded step.

        Args:
          step: the number of the step, from 1.
          metrics: arrays of shape (size,) by name. Members that had stopped before this step have NaN; if there are
            any, integer and boolean metrics are float32. After a validation there are also its values, with the prefix
            "validation_"; one of the whole ensemble is repeated for each member.
          *args: nothing else is passed by position.
          **kwargs: `state`, if the function has a parameter of this name: a function without arguments that returns the
            `TrainState` of all members after exactly this step, with the parameters of this step. It is a copy, which
            stays usable, and is made only if it is asked for. After the callback has returned, `state` raises a
            `RuntimeError`. If the members spread over several processes, call it in all of them.
        """


def takes_state(callback: Any) -> bool:
    """Return whether a callback has a parameter `state` that it wants filled in."""
    if "state" in getattr(callback, "keywords", ()):  # bound by functools.partial
        return False
    try:
        found = inspect.signature(callback).parameters.get("state")
    except (TypeError, ValueError):  # functions that are not written in Python may have no signature
        return False
    return found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)


class StateAt:
    """The function that a callback receives as `state`: it returns the state after a step, until it is closed."""

    def __init__(self, step: int, make: Callable[[], TrainState]) -> None:
        self._step, self._make = step, make
        self._is_open = True

    def __call__(self) -> TrainState:
        """Return the state; raise once the callback has returned."""
        if not self._is_open:
            late = f"the state of step {self._step} is asked for after the callback has returned"
            raise RuntimeError(f"Trainer.fit: {late}; call state() in the callback, and keep what it returns.")
        return self._make()

    def close(self) -> None:
        """Refuse further calls, since the next step reuses the memory of the state."""
        self._is_open = False
