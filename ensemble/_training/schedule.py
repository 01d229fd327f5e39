"""`Schedule`: which execution each step of a run used, kept in its directory, so that a resumed run repeats them.

`strategy="auto"` changes the execution while a run goes on, at steps that depend on measured times, and executions
round differently. So every change is written to the directory before the steps that follow it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ...transforms._files.document import read_document, write_document
from ...transforms._files.schema import decode
from .._execution.autotune import Tuning
from .._members.strategy import Execution, check_execution

_NAME, _FORMAT = "executions.json", "plurax executions"


@dataclass(frozen=True)
class _Written:
    """What the file holds: as `Schedule` has it."""

    changes: list[tuple[int, Execution]]
    known: Tuning

    def __post_init__(self) -> None:
        if not self.changes:
            raise ValueError("there are no executions")


class Schedule:
    """The executions of the steps of a run.

    Args:
      directory: the directory of the run; None keeps the schedule in memory.
      last: the execution of the checkpoint from which the run goes on; None for a new run.

    Attributes:
      known: the results of the search of the run so far; None if it has none, or may not go on with it.
    """

    def __init__(self, directory: Path | None, last: Execution | None) -> None:
        self._path = None if directory is None else directory / _NAME
        self._changes: list[tuple[int, Execution]] = []
        self._repeated: list[tuple[int, Execution]] = []
        self._last, self.known = last, None
        if self._path is not None and last is not None:
            # Without the file, or with a damaged one, the run keeps the execution of the checkpoint.
            with suppress(FileNotFoundError, ValueError):
                found = read_document("schedule", self._path, _FORMAT, 1, within=directory, of_json=True)
                written = decode(_Written, found.entries, "schedule")
                for _, execution in written.changes:
                    check_execution("schedule", execution)
                self._changes = self._repeated = written.changes
                self._last, self.known = None, replace(written.known, chosen=written.changes[-1][1])

    def at(self, step: int) -> Execution | None:
        """Return the execution with which a run that is repeated took the step after `step`; None for a new step."""
        if not self._repeated or step >= self._repeated[-1][0]:
            return self._last
        return next((execution for start, execution in reversed(self._repeated) if start <= step), None)

    @property
    def first(self) -> Execution | None:
        """Return the execution of the first step, if known: one that stays the same, also when the run resumes."""
        return self._changes[0][1] if self._changes else self._last

    def change(self, step: int, plan: list[tuple[int, Execution]], known: Tuning) -> None:
        """Write what follows from a step on.

        Args:
          step: the number of steps that were taken.
          plan: pairs of a number of steps from there and the execution that follows.
          known: the results of the search so far.
        """
        planned = [(step + ahead, execution) for ahead, execution in plan]
        self._changes = [one for one in self._changes if one[0] < step] + planned
        if self._path is None:
            return
        # On a full disk the run goes on, as without the checkpoint that cannot be written either.
        with suppress(OSError):
            write_document(self._path, _FORMAT, 1, asdict(_Written(self._changes, known)))
