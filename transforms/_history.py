"""The history of a run: recorded in arrays, returned as rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

History = list[dict[str, Any]]


class Recorder:
    """Records the metrics that are one number for each member.

    Args:
      every: steps between two records.
      arrays: what an earlier run recorded, as `arrays` gives it.
    """

    def __init__(self, every: int, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        self._every = every
        self._steps: list[int] = []
        # For each record a dict of metrics: they may differ from step to step.
        self._metrics: list[dict[str, np.ndarray]] = []
        if arrays:
            self._steps = arrays["step"].tolist()
            self._metrics = [{} for _ in self._steps]
            for name in [key.removeprefix("values of ") for key in arrays if key.startswith("values of ")]:
                for record, values in zip(arrays[f"records of {name}"], arrays[f"values of {name}"], strict=True):
                    self._metrics[record][name] = values

    def add(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Record the metrics of a step, where it is one to be recorded."""
        if step % self._every:
            return
        self._steps.append(step)
        self._metrics.append({name: _numbers(value) for name, value in metrics.items() if _is_recorded(value)})

    def arrays(self) -> dict[str, np.ndarray]:
        """What was recorded: "step", and for each metric the records that have it and their values by member."""
        arrays = {"step": np.asarray(self._steps, np.int64)}
        for name in dict.fromkeys(name for metrics in self._metrics for name in metrics):
            having = [record for record, metrics in enumerate(self._metrics) if name in metrics]
            arrays[f"records of {name}"] = np.asarray(having, np.int64)
            arrays[f"values of {name}"] = np.stack([self._metrics[record][name] for record in having])
        return arrays

    def rows(self) -> History:
        """One dict for each record and member."""
        return [
            {"step": step, "member": i, **{name: values[i].item() for name, values in metrics.items()}}
            for step, metrics in zip(self._steps, self._metrics, strict=True)
            for i in range(len(next(iter(metrics.values()), ())))
        ]


def _is_recorded(value: jax.Array) -> bool:
    return value.ndim == 1 and (jnp.issubdtype(value.dtype, jnp.number) or value.dtype == bool)


def _numbers(value: jax.Array) -> np.ndarray:
    """As NumPy's own dtypes, which files have: bfloat16 and its like become float32, which holds their values."""
    array = np.asarray(value)
    return array if array.dtype.kind in "biufc" else array.astype(np.float32)
