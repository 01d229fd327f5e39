"""The history of a run: recorded in arrays, returned as rows."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

History = list[dict[str, Any]]


class Recorder:
    """Records the metrics that are one number for each member.

    Args:
      every: steps between two records.
      columns: what an earlier run recorded, as `columns` gives it.
    """

    def __init__(self, every: int, columns: dict[str, np.ndarray] | None = None) -> None:
        self._every = every
        columns = columns or {}
        self._steps: list[int] = columns.get("step", np.zeros(0, int)).tolist()
        self._values: dict[str, list[np.ndarray]] = {
            name: list(values) for name, values in columns.items() if name != "step"
        }

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Record the metrics of a step, where it is one to be recorded."""
        if step % self._every:
            return
        self._steps.append(step)
        for name, value in metrics.items():
            if np.ndim(value) == 1:
                self._values.setdefault(name, []).append(np.asarray(value))

    def columns(self) -> dict[str, np.ndarray]:
        """What was recorded: "step" (records,), and each metric (records, members)."""
        return {"step": np.asarray(self._steps, int), **{name: np.stack(v) for name, v in self._values.items()}}

    def rows(self) -> History:
        """One dict for each record and member."""
        members = len(next(iter(self._values.values()))[0]) if self._values else 0
        return [
            {"step": step, "member": i, **{name: values[row][i].item() for name, values in self._values.items()}}
            for row, step in enumerate(self._steps)
            for i in range(members)
        ]
