"""The last step of `DPSGD.fit`, and its message if it ends early."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from ..._core.arguments import check_number


def last_step(
    start: int, steps: int | None, num_steps: int, epsilon_budget: Any, within: Callable[[float, int], int]
) -> tuple[int, int]:
    """Return the last step without and with the budget.

    Args:
      start: the number of steps taken.
      steps: the number of further steps, or None for all that remain.
      num_steps: the number of steps of the run.
      epsilon_budget: the budget; None for none.
      within: returns the number of steps that a budget allows, up to a given number.

    Raises:
      TypeError, ValueError: more steps than `num_steps`; a budget that is not positive, or that is spent already.
    """
    wanted = max(start, num_steps) if steps is None else start + steps
    if steps is not None and wanted > num_steps:
        raise ValueError(f"DPSGD.fit: step {wanted} is beyond num_steps={num_steps}; pass fewer steps.")
    if epsilon_budget is None:
        return wanted, wanted
    # The number of steps that a budget allows depends on public settings alone, so compute it in advance.
    budget = check_number("DPSGD.fit", "epsilon_budget", epsilon_budget, lambda x: x > 0, "positive")
    target = within(budget, wanted)
    if target < start:
        raise ValueError(f"DPSGD.fit: {start} steps already spent more than {epsilon_budget=}; pass a larger one.")
    return wanted, target


def report_end(
    start: int, step: int, wanted: int, target: int, steps: int | None, epsilon_budget: Any, progress: bool
) -> None:
    """Warn if a run that was not interrupted took no step; print that the budget ended it.

    Args:
      start: the number of steps before the run, or before the checkpoint from which it resumed.
      step: the number of steps after it.
      wanted: the last step without the budget.
      target: the last step within it.
      steps: as for `fit`.
      epsilon_budget: as for `fit`.
      progress: as for `fit`.
    """
    from tqdm import tqdm

    if step == start:
        taken = "steps=0" if steps == 0 else f"the state has taken all {start} steps of the run already"
        why = taken if target == wanted else f"one would exceed {epsilon_budget=}"
        warnings.warn(f"DPSGD.fit: no step was taken, since {why}.", stacklevel=3)  # where `fit` was called
    elif progress and target < wanted:
        tqdm.write(f"Stopped after step {step}: one more would exceed ε = {epsilon_budget}.")
