"""The history of a run, recorded in arrays and returned as rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

History = list[dict[str, Any]]

# The entry of a record that marks the members with values; no metric has this name.
_MEMBERS = "members"
# The kinds of NumPy's own dtypes for booleans and numbers.
_NATIVE = "biufc"


class Recorder:
    """A recorder of metrics with one number for each member; some members may have none.

    Args:
      every: steps between two records.
      arrays: the records of an earlier run, as returned by `arrays`.
    """

    def __init__(self, every: int, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        self._every = every
        self._steps: list[int] = []
        # One dict of metrics for each record, since metrics may differ from step to step.
        self._metrics: list[dict[str, np.ndarray]] = []
        if arrays:
            self._steps = arrays["step"].tolist()
            self._metrics = [{} for _ in self._steps]
            for name in [key.removeprefix("values of ") for key in arrays if key.startswith("values of ")]:
                for record, values in zip(arrays[f"records of {name}"], arrays[f"values of {name}"], strict=True):
                    self._metrics[record][name] = values

    def add(
        self, step: int, metrics: Mapping[str, np.ndarray], members: np.ndarray | None = None, *, always: bool = False
    ) -> bool:
        """Record the metrics of a step if `every` divides it; return whether it was recorded.

        Args:
          step: the number of the step.
          metrics: the metrics of the step, as returned by `recorded`.
          members: for each member whether it has metrics, or None if all have.
          always: whether to record the step in any case.
        """
        if step % self._every and not always:
            return False
        self._steps.append(step)
        record = dict(metrics)
        if members is not None and not members.all():
            record[_MEMBERS] = members
        self._metrics.append(record)
        return True

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the records as arrays: "step", and for each metric the records that have it and their values."""
        arrays = {"step": np.asarray(self._steps, np.int64)}
        for name in dict.fromkeys(name for metrics in self._metrics for name in metrics):
            having = [record for record, metrics in enumerate(self._metrics) if name in metrics]
            arrays[f"records of {name}"] = np.asarray(having, np.int64)
            arrays[f"values of {name}"] = np.stack([self._metrics[record][name] for record in having])
        return arrays

    def rows(self, about: Mapping[str, Sequence[Any]] | None = None) -> History:
        """Return one dict for each record and member, with the entries of `about` for the member."""
        columns = {name: list(values) for name, values in (about or {}).items()}
        rows: History = []
        for step, metrics in zip(self._steps, self._metrics, strict=True):
            # `tolist` converts all members at once, several times faster than `item` for each.
            named = {name: x.tolist() for name, x in metrics.items() if name != _MEMBERS}
            if not named:
                continue
            size = len(next(iter(named.values())))
            of_step = [{"step": step, "member": i} for i in range(size)]
            # Column by column, three times faster than a dict from the names and values of each row.
            for name, values in (columns | named).items():
                for row, value in zip(of_step, values, strict=True):
                    row[name] = value
            members = metrics.get(_MEMBERS)
            rows += of_step if members is None else [of_step[i] for i in np.flatnonzero(members)]
        return rows


def check_columns(arrays: Mapping[str, np.ndarray], size: int) -> None:
    """Raise if arrays are not what `Recorder.arrays` returns for so many members."""
    steps = arrays.get("step", np.zeros((0, 0)))
    if steps.ndim != 1 or steps.dtype != np.int64:
        raise ValueError("the steps are no integers")
    names = {name.removeprefix("values of ") for name in arrays if name.startswith("values of ")}
    if len(arrays) != 1 + 2 * len(names) or not {f"records of {name}" for name in names} <= arrays.keys():
        raise ValueError("a metric has no records, or no values")
    for name in names:
        records, values = arrays[f"records of {name}"], arrays[f"values of {name}"]
        if records.ndim != 1 or records.dtype != np.int64 or not ((records >= 0) & (records < len(steps))).all():
            raise ValueError(f"the records of {name!r} are no indices of steps")
        if values.shape != (len(records), size):
            raise ValueError(f"the values of {name!r} have shape {values.shape}")


def recorded(metrics: Mapping[str, Any], ndim: int = 1) -> dict[str, np.ndarray]:
    """Return the metrics with one number for each member, as arrays in native NumPy dtypes, for files.

    bfloat16 and the like become float32, without loss. `ndim` is 2 for metrics of several steps.
    """
    found = {}
    for name, value in metrics.items():
        if getattr(value, "ndim", None) == ndim:
            if getattr(value.dtype, "kind", "?") in _NATIVE:
                found[name] = np.asarray(value)
            elif jnp.issubdtype(value.dtype, jnp.number):
                found[name] = np.asarray(value).astype(np.float32)
    return found
