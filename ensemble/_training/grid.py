"""`grid`: every combination of hyperparameters, one for each member."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

from ...transforms._core.arguments import check_count, describe


def grid(*, repeats: int = 1, **values: Iterable[Any]) -> dict[str, list[Any]]:
    """Return every combination of hyperparameters, in the form that `Trainer` takes: one value per member.

    Args:
      repeats: the number of members for each combination; they are neighbors, and differ only in their seeds.
      **values: for each hyperparameter, the values to try: numbers or schedules.

    Returns:
      A dict from each name to a list with one value per member. All lists have the same length, the size of the
      ensemble: the product of the numbers of values, times `repeats`. The last hyperparameter varies fastest.

    Raises:
      TypeError: `repeats` is not an int, or the values of a hyperparameter are not a list or another iterable.
      ValueError: `repeats` is below 1; there are no hyperparameters, or one has no values.

    Examples:
      >>> from plurax.ensemble import grid
      >>> grid(learning_rate=[0.1, 0.01], weight_decay=[0.0, 0.001], repeats=2)["learning_rate"]
      [0.1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01]
    """
    check_count("grid", "repeats", repeats)
    if not values:
        raise ValueError("grid: there are no hyperparameters; give some, such as learning_rate=[0.1, 0.01].")
    lists: dict[str, list[Any]] = {}
    for name, tried in values.items():
        if isinstance(tried, str) or not isinstance(tried, Iterable):
            raise TypeError(f"grid: {name} must be a list of values, but got {describe(tried)}.")
        lists[name] = list(tried)  # an iterator gives its values once
        if not lists[name]:
            raise ValueError(f"grid: {name} has no values; give it at least one.")
    members = [combination for combination in product(*lists.values()) for _ in range(repeats)]
    return {name: [member[i] for member in members] for i, name in enumerate(lists)}
