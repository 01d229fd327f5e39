"""`Tuning`: the executions that `strategy="auto"` considered, their times, and its choice; and a cache of them."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any

import jax

from ...transforms._core.compat import Jaxpr, setting
from ...transforms._core.machine import cores, processor
from ...transforms._core.memory import in_words
from ...transforms._files.document import read_document, write_document
from ...transforms._files.schema import decode
from .._members.strategy import Execution, check_execution

# The version of the file format is part of the fingerprint, so that files of other versions are not found.
_FORMAT, _VERSION = "plurax tuning", 5
# The notes of candidates that were not tried begin with this.
NOT_TRIED = "not tried: "
# The results of this process, shared by all trainers; `tune_cache` is for other processes.
_remembered: dict[str, Tuning] = {}


@dataclass(frozen=True)
class CandidateExecution:
    """An execution that was considered.

    Attributes:
      execution: how the members are executed.
      ms: the lower quartile of the times of a step in milliseconds, as it would have been in the first trial: the `ms`
        of the best execution, times the ratio of the two in the same trial. None if it was not measured.
      temporaries: bytes of the compiled program besides its arguments and results; for "loop", those of one member.
        None if they are not known.
      compile_s: seconds for tracing and compiling. For the first program, with the first step.
      note: the reason why it was not measured, or not to the end.
    """

    execution: Execution
    ms: float | None = None
    temporaries: int | None = None
    compile_s: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Tuning:
    """The executions that were tried, and the fastest of them; `str` formats them as a table.

    Attributes:
      chosen: the fastest execution so far, or that of the rule if no other was measured. `Trainer(strategy=chosen)`
        uses it from the first step on.
      candidates: all candidates that were considered.
      where: the device and the number of members.
      seconds: how long compiling and slower steps have taken.
    """

    chosen: Execution
    candidates: tuple[CandidateExecution, ...]
    where: str
    seconds: float

    def __str__(self) -> str:
        """Return a table of the candidates, the fastest first."""
        rows = [("", "ms", "temporaries", "compile (s)", "")]
        for one in sorted(self.candidates, key=lambda one: inf if one.ms is None else one.ms):
            ms = "" if one.ms is None else f"{one.ms:.3g}"
            temporaries = "" if one.temporaries is None else in_words(one.temporaries)
            compile_s = "" if one.compile_s is None else f"{one.compile_s:.2f}"
            rows.append((str(one.execution), ms, temporaries, compile_s, self._note(one)))
        width = max(len(name) for name, *_ in rows)
        if not any(any(row[1:4]) for row in rows[1:]):  # nothing was compiled besides the program of the rule
            return "\n".join([self.where, *(f"{name:{width}}  {note}" for name, *_, note in rows[1:])])
        lines = [f"{a:{width}}  {b:>6}  {c:>11}  {d:>11}  {e}".rstrip() for a, b, c, d, e in rows]
        return "\n".join([f"{self.where}, {self.seconds:.1f} s for trials", *lines])

    def summary(self) -> str:
        """Return one sentence: what is used, what it was compared with, and what was not tried, and why."""
        mine = next(one for one in self.candidates if one.execution == self.chosen)
        notes: dict[str, list[str]] = {}
        for one in self.candidates:
            if one is not mine:
                notes.setdefault(one.note or f"{one.ms:.3g} ms", []).append(f'"{one.execution}"')
        if all(note.startswith(NOT_TRIED) for note in notes):
            why = " or ".join(note.removeprefix(NOT_TRIED) for note in notes)
            return f"{self.chosen}, {self._note(mine)}" + (f"; no other was tried: {why}" if notes else "")
        used = f"{self.chosen} ({self._note(mine) if mine.ms is None else f'{mine.ms:.3g} ms a step'})"
        return "; ".join([used, *(f"{', '.join(names)}: {note}" for note, names in notes.items())])

    def _note(self, one: CandidateExecution) -> str:
        """Return the note of a candidate; nothing that was not compared is called chosen."""
        if one.execution != self.chosen:
            return one.note
        return "by the rule, not compared" if one.ms is None else "chosen"


def fingerprint(jaxpr: Jaxpr, *about: object) -> str:
    """Return a hash of a program, the machine, and everything else that a measurement depends on."""
    device = jax.devices()[0]
    # A jaxpr prints functions with their addresses, which differ between processes.
    program = re.sub(r"0x[0-9a-f]+", "", str(jaxpr))
    machine = (
        *(jax.__version__, version("jaxlib"), device.platform, device.device_kind, processor(), cores()),
        *(os.environ.get("XLA_FLAGS", ""), setting("jax_enable_x64")),
    )
    return hashlib.sha256(repr((_VERSION, program, machine, about)).encode()).hexdigest()


def read_tuning(entries: dict[str, Any]) -> Tuning:
    """Return the results in a file; raise `ValueError` if they are none."""
    tuning = decode(Tuning, entries, "tuning")
    for execution in (tuning.chosen, *(one.execution for one in tuning.candidates)):
        check_execution("tuning", execution)
    return tuning


def recall(key: str, directory: Path | None) -> Tuning | None:
    """Return an earlier result for a program, from this process or the directory; None if there is none."""
    if key not in _remembered and directory is not None:
        # A file that is missing or damaged is ignored, and written anew.
        with suppress(FileNotFoundError, ValueError):
            path = directory / f"{key}.json"
            found = read_document("tune_cache", path, _FORMAT, _VERSION, within=directory, of_json=True)
            _remembered[key] = read_tuning(found.entries)
    return _remembered.get(key)


def remember(key: str, tuning: Tuning, directory: Path | None) -> None:
    """Store a result in this process and in the directory."""
    _remembered[key] = tuning
    if directory is None:
        return
    try:
        write_document(directory / f"{key}.json", _FORMAT, _VERSION, asdict(tuning))
    except OSError as error:
        warnings.warn(f"Trainer: tune_cache={str(directory)!r} cannot be written: {error}.", stacklevel=2)
