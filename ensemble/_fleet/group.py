"""`train_group`: train one group of members in a worker process, from its newest checkpoint on."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...transforms._files.document import read_document, write_document
from ...transforms._files.schema import decode
from ...transforms._runs.source import skip
from .._members.ensemble import Ensemble
from .._training.checkpoint import load, save
from .._training.trainer import Trainer

_REPORT, _FORMAT = "report.json", "plurax report"
_EVERY = 1.0  # seconds between reports
# Seconds to wait for a worker of a driver that died, which may still train this group.
_PATIENCE = 60.0


@dataclass(frozen=True)
class Report:
    """What a group last told about its training; a file in its directory.

    Attributes:
      step: the number of steps taken.
      steps_per_second: since the report before.
      loss: the smallest and the largest loss of its members.
      training: how many members still train.
      where: the host and the process.
    """

    step: int
    steps_per_second: float
    loss: tuple[float, float]
    training: int
    where: str

    @staticmethod
    def read(directory: Path) -> Report | None:
        """Return the last report of a group, or None if there is none."""
        try:
            found = read_document("fit_fleet", directory / _REPORT, _FORMAT, 1, within=directory, of_json=True)
            return decode(Report, found.entries, "report")
        except (OSError, ValueError):  # not there yet, or on a file system that shows an old name
            return None


@dataclass(frozen=True)
class Job:
    """What all groups have in common.

    Attributes:
      make_trainer: a function from the indices of the members of a group to their `Trainer`.
      members: an `Ensemble`, or a function from the indices of the members of a group to their ensemble.
      batches: an iterable, or a function from the indices of the members of a group to theirs.
      options: further arguments of `Trainer.fit`.
      settings: settings of JAX in the driver, on which results depend.
    """

    make_trainer: Callable[[list[int]], Trainer]
    members: Any
    batches: Any
    options: Mapping[str, Any]
    settings: Mapping[str, Any]

    def ensemble(self, which: list[int]) -> Any:
        """Return the members of a group as they begin."""
        return self.members(which) if _is_function(self.members) else self.members[which]


@dataclass(frozen=True)
class Done:
    """What a group gives back.

    Attributes:
      step: the number of steps it has taken.
      history: the rows of its history, with the indices of the members among all.
      warnings: the texts of the warnings.
    """

    step: int
    history: list[dict[str, Any]]
    warnings: list[str]


def train_group(job: Job, which: list[int], directory: str, start: int, until: int | None) -> Done:
    """Train a group up to a step, from its newest checkpoint or from its beginning.

    Args:
      job: what all groups have in common.
      which: the indices of the members.
      directory: the directory of the group.
      start: the step at which this round begins; from 1 on, `directory` holds the state there.
      until: the step at which it ends; None if the batches end it.
    """
    place, deadline = Path(directory), time.monotonic() + _PATIENCE
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not (place.parents[1] / "fleet.json").exists():
            raise FileNotFoundError(f"fit_fleet: {socket.gethostname()} does not see {place.parents[1]}; share it.")
        for name, value in job.settings.items():
            jax.config.update(name, value)
        trainer, ensemble = job.make_trainer(which), job.ensemble(which)
        if len(ensemble) != len(which):
            raise ValueError(f"fit_fleet: members must return {len(which)} of them, but returned {len(ensemble)}.")
        state = trainer.init(ensemble)
        batches = job.batches(which) if _is_function(job.batches) else job.batches
        if start:
            state, batches = load(place / "start", state), iter(batches)
            skip(batches, start)  # where they have ended before, the group takes no step, and `fit` warns of it
        options = {**job.options, "callbacks": [*job.options.get("callbacks", ()), _Reporter(place)]}
        options |= {"steps": None if until is None else until - start, "checkpoint_dir": place, "progress": False}
        while True:
            try:
                state, history = trainer.fit(state, batches, **options)
                break
            except BlockingIOError as error:
                # The lock is taken before any batch is.
                if time.monotonic() > deadline or "is writing to" not in f"{error}":
                    raise
                time.sleep(1)
    if not (place / f"step_{int(state.step):08d}").exists():  # a run that takes no step writes none
        save(place / "end", state)
    for row in history:
        row["member"] = which[row["member"]]
    return Done(int(state.step), history, [str(x.message) for x in caught])


class _Reporter:
    """A callback of `fit` that writes a `Report`, at most once in a second."""

    def __init__(self, directory: Path) -> None:
        self._path, self._where = directory / _REPORT, f"{socket.gethostname()}:{os.getpid()}"
        self._step, self._time = 0, time.monotonic()

    def __call__(self, step: int, metrics: Mapping[str, np.ndarray]) -> None:
        """Write a report, unless the last one is recent."""
        now = time.monotonic()
        if not self._step:  # compilation is not counted
            self._step, self._time = step, now
        elif now - self._time >= _EVERY:
            loss = metrics["loss"]
            finite = loss[np.isfinite(loss)]
            ends = (float(finite.min()), float(finite.max())) if finite.size else (float("nan"),) * 2
            rate = (step - self._step) / (now - self._time)
            report = Report(step, rate, ends, int(finite.size), self._where)
            with suppress(OSError):  # the next one may succeed; training does not depend on it
                write_document(self._path, _FORMAT, 1, asdict(report))
            self._step, self._time = step, now


def _is_function(x: Any) -> bool:
    return callable(x) and not isinstance(x, Ensemble) and not hasattr(x, "__iter__")
