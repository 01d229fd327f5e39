"""`tune`: compiles and measures the candidates of `strategy="auto"`, and chooses the quickest; what is found is kept.

What wins depends on the program, its shapes and the machine, and we know of no rule for it: batched operations win for
small perceptrons, one member after another for convolutions, and by how much changes with the size.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import Jaxpr

from ...transforms._core.machine import cores, processor
from ...transforms._core.memory import in_words
from ...transforms._runs.atomic_write import write_atomically
from .._members.strategy import Execution

# A program with a copy of the operations for each member is not compiled if that is likely to take longer: seconds.
_LONGEST_COMPILE = 20.0
# What takes this many times as long as the best is not measured again.
_OUT_OF_REACH = 1.3
_ROUNDS = 15
# A block of steps takes so many seconds, one step after another as in training, and times so many of them at most;
# steps shorter than the last of these are timed several at a time, since the wait for a result would be much of a
# single one.
_BLOCK, _MOST_TIMES, _SHORT = 0.05, 10, 0.001
# What takes at most so many times as long as the quickest is as quick.
_EQUAL = 1.03
# How many blocks each candidate has at first, as long as they take no more than this share of the time: 1 / 16.
_FIRST, _SHARES = 4, 16

_NO_TIME = "no time was left"
# Part of the fingerprint, so that results in files of another form are not found.
_FORMAT = 2
# For the other trainers of this process; `tune_cache` is for other processes.
_remembered: dict[str, Tuning] = {}


@dataclass(frozen=True)
class CandidateExecution:
    """An execution that was considered.

    Attributes:
      execution: how the members are executed.
      ms: the lower quartile of the times of a step; None if it was not measured.
      temporaries: bytes of the compiled program besides its arguments and results; of one member for a loop.
      compile_s: how long tracing and compiling took.
      note: why it was not measured, or not again.
    """

    execution: Execution
    ms: float | None = None
    temporaries: int | None = None
    compile_s: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Tuning:
    """The measurements, and the choice they led to; as text a table.

    Attributes:
      chosen: the execution.
      candidates: all that were considered.
      where: the device and the number of members.
      seconds: how long measuring took, compiling not counted.
      allowed: how long it might have taken.
    """

    chosen: Execution
    candidates: tuple[CandidateExecution, ...]
    where: str
    seconds: float
    allowed: float

    def is_cut_short_of(self, seconds: float) -> bool:
        """Return whether candidates were left out for want of time, of which there is more now."""
        return self.allowed < seconds and any(one.note == _NO_TIME for one in self.candidates)

    def __str__(self) -> str:
        """Return a table of the candidates, the quickest first."""
        rows = [["", "ms", "temporaries", "compile (s)", ""]]
        for one in sorted(self.candidates, key=lambda one: float("inf") if one.ms is None else one.ms):
            chosen = one.execution == self.chosen
            rows.append(
                [
                    str(one.execution),
                    "" if one.ms is None else f"{one.ms:.3g}",
                    "" if one.temporaries is None else in_words(one.temporaries),
                    "" if one.compile_s is None else f"{one.compile_s:.2f}",
                    "chosen" if chosen else one.note,
                ]
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for name, *numbers, note in rows:
            columns = (x.rjust(width) for x, width in zip(numbers, widths[1:-1], strict=True))
            lines.append("  ".join([name.ljust(widths[0]), *columns, note]))
        return "\n".join([f"{self.where}, measured in {self.seconds:.1f} s", *(line.rstrip() for line in lines)])


@dataclass(frozen=True)
class Trial:
    """A candidate that is ready to be measured.

    Attributes:
      compile: compiles it, and returns the bytes of its temporaries.
      run: takes steps from a fresh copy of the state: a single one, then `times` groups of `together` steps. Returns
        the seconds of a step in each group.
    """

    compile: Callable[[], int]
    run: Callable[[int, int], list[float]]


def tune(
    trial: Callable[[Execution], Trial],
    *,
    size: int,
    convolutions: bool,
    looped: bool = True,
    devices: int = 1,
    seconds: float,
    budget: int | None,
    where: str,
    tell: Callable[[str], None] = lambda _: None,
) -> Tuning | None:
    """Measure the candidates, and choose the quickest.

    Args:
      trial: from an execution to what measures it.
      size: how many members there are on one device.
      convolutions: whether the program has some, which may be rewritten.
      looped: whether a Python loop over the members is possible.
      devices: over how many devices the members may be spread.
      seconds: for all measuring; compiling is not counted.
      budget: bytes of temporaries, or None.
      where: the device and the members, for the table.
      tell: called with what is about to be measured.

    Returns:
      The measurements; None where all fail when they run, such as for want of memory for a copy of the state.

    Raises:
      ValueError: none of the candidates fits into the budget.
    """
    search = _Search(trial, seconds, budget, tell)

    def measure(execution: Execution) -> None:
        here = -(-size // execution.devices)
        if execution.strategy == "unroll" and compile_one * here > _LONGEST_COMPILE:
            search.skip(execution, f"about {compile_one * here:.0f} s to compile")
        elif execution not in search.found:
            search.measure(execution)

    # One member at a time tells how long a step takes to compile, and whether products pay, for all that follow.
    first = "loop" if looped else "map"
    for products in (False, True) if convolutions else (False,):
        search.measure(Execution(first, products=products))
    products = search.best(first).execution.products if search.measured() else False
    compile_one = max((one.compile_s or 0.0 for one in search.found.values()), default=0.0)

    for strategy in ("vmap", "map", "unroll"):
        measure(Execution(strategy, products=products))
    # Smaller chunks as long as they are quicker, or the larger ones do not fit.
    chunk, quickest = size // 4, search.time(Execution("vmap", products=products))
    while chunk >= 2:
        # As many chunks as `chunk` makes, but of equal size: for 9 members and 4 at a time, 3 chunks of 3.
        execution = Execution("vmap", -(-size // -(-size // chunk)), products)
        search.measure(execution)
        if search.time(execution) > quickest and quickest < float("inf"):
            break
        chunk, quickest = chunk // 4, search.time(execution)
    for strategy in ("map", "vmap", "unroll") if devices > 1 else ():
        measure(Execution(strategy, None, products, devices))
    search.repeat()
    if not search.measured() and isinstance(search.error, jax.errors.JaxRuntimeError):
        return None
    best = search.best()
    # Of those that are as quick, the one that needs the least memory: it suffers least from what else the machine does.
    equal = [one for one in search.measured() if (one.ms or 0.0) <= _EQUAL * (best.ms or 0.0)]
    chosen = min(equal, key=lambda one: one.temporaries or 0)
    return Tuning(chosen.execution, tuple(search.found.values()), where, search.spent, seconds)


class _Search:
    """The candidates that were considered so far, and the time that was spent."""

    def __init__(
        self, trial: Callable[[Execution], Trial], seconds: float, budget: int | None, tell: Callable[[str], None]
    ) -> None:
        self.found: dict[Execution, CandidateExecution] = {}
        self.spent = 0.0
        self._trial, self._seconds, self._budget, self._tell = trial, seconds, budget, tell
        self._runs: dict[Execution, Callable[[int, int], list[float]]] = {}
        self._times: dict[Execution, list[float]] = {}
        self.error: Exception | None = None

    def measure(self, execution: Execution) -> None:
        """Compile an execution and take some steps; one that fails is noted, and is no candidate."""
        if self.spent > self._seconds and self.measured():
            self.skip(execution, _NO_TIME)
            return
        self._tell(str(execution))
        start = time.perf_counter()
        try:
            trial = self._trial(execution)
            temporaries = trial.compile()
            compile_s = time.perf_counter() - start
            one = CandidateExecution(execution, None, temporaries, compile_s)
            if self._budget is not None and temporaries > self._budget:
                self.found[execution] = replace(one, note="over the memory budget")
                return
            # The first allocates, loads and compiles small things; it counts only where there is no time for others.
            first, times = self._timed(trial.run, 0, 0), list[float]()
            before = self.spent
            for _ in range(_FIRST):
                if self.spent >= self._seconds or self.spent - before >= self._seconds / _SHARES:
                    break
                times += self._block(trial.run, min([*first, *times]))
            times = times or first
        except Exception as error:  # such as an operation that cannot be batched, or too little memory
            self.error = self.error or error
            self.skip(execution, f"fails: {type(error).__name__}")
            return
        self._runs[execution], self._times[execution] = trial.run, times
        self.found[execution] = replace(one, ms=_typical(times) * 1e3)

    def skip(self, execution: Execution, why: str) -> None:
        """Note why an execution is not measured."""
        self.found[execution] = CandidateExecution(execution, note=why)

    def repeat(self) -> None:
        """Measure those within reach of the best again, a block of each in every round.

        In rounds, so that what else the machine does for a while slows all of them and not one.
        """
        for _ in range(_ROUNDS):
            limit = _OUT_OF_REACH * min(min(times) for times in self._times.values()) if self._times else 0.0
            for execution, times in self._times.items():
                if self.spent + min(times) > self._seconds:
                    return
                if min(times) <= limit:
                    times += self._block(self._runs[execution], min(times))
                    self.found[execution] = replace(self.found[execution], ms=_typical(times) * 1e3)

    def measured(self) -> list[CandidateExecution]:
        return [one for one in self.found.values() if one.ms is not None]

    def time(self, execution: Execution) -> float:
        """Return the milliseconds of a step, infinite where it was not measured."""
        one = self.found.get(execution)
        return float("inf") if one is None or one.ms is None else one.ms

    def best(self, strategy: str | None = None) -> CandidateExecution:
        """Return the quickest, of one strategy where some of it were measured; raise the first error if none was."""
        found = [one for one in self.measured() if strategy in (None, one.execution.strategy)] or self.measured()
        over = [one for one in self.found.values() if one.ms is None and one.temporaries is not None]
        if not found and self._budget is not None and over:
            least = min(over, key=lambda one: one.temporaries or 0)
            raise ValueError(
                f"Trainer: no execution fits into memory_budget={in_words(self._budget)}: the least found is "
                f"{in_words(least.temporaries or 0)}, for {least.execution}; raise the budget, or make "
                "the batch smaller."
            )
        if not found and self.error is not None:
            raise self.error
        return min(found, key=lambda one: one.ms or 0.0)

    def _block(self, run: Callable[[int, int], list[float]], once: float) -> list[float]:
        """Return the times of as many steps as fit into a block and into the time that is left.

        Args:
          run: as in `Trial`.
          once: the seconds that a step is known to take.
        """
        together = max(1, int(_SHORT / once))
        # Less the first step of `run`, which is not counted.
        left = min(_BLOCK, self._seconds - self.spent) - once
        # A step that is longer than a block is alone, and counts.
        return self._timed(run, max(0, min(_MOST_TIMES, int(left / (together * once)))), together)

    def _timed(self, run: Callable[[int, int], list[float]], times: int, together: int) -> list[float]:
        """Run, add up what was spent, and return the times without the first, unless it is the only one."""
        found = run(times, together)
        self.spent += found[0] + together * sum(found[1:])
        return found[1:] or found


def _typical(times: list[float]) -> float:
    """Return the lower quartile: other work on the machine makes a step slower, and never quicker.

    So does the system, where steps keep the state that they are given: it takes freed memory away and gives it back.
    That comes and goes, and takes half of a short step.
    """
    return sorted(times)[(len(times) - 1) // 4]


def fingerprint(jaxpr: Jaxpr, *about: Any) -> str:
    """Return a hash of a program and of the machine, and of what else a measurement depends on."""
    device = jax.devices()[0]
    # A jaxpr prints the functions that it calls with their addresses, which each process has anew.
    program = re.sub(r"0x[0-9a-f]+", "", str(jaxpr))
    machine = (
        *(jax.__version__, version("jaxlib"), device.platform, device.device_kind, processor(), cores()),
        *(os.environ.get("XLA_FLAGS", ""), jax.config.values["jax_enable_x64"]),
    )
    return hashlib.sha256(repr((_FORMAT, program, machine, about)).encode()).hexdigest()


def recall(key: str, directory: Path | None) -> Tuning | None:
    """Return what was found for a program before, in this process or in the directory; else None."""
    if key not in _remembered and directory is not None:
        found = _read(directory / f"{key}.json")
        if found is not None:
            _remembered[key] = found
    return _remembered.get(key)


def remember(key: str, tuning: Tuning, directory: Path | None) -> None:
    """Keep what was found, in this process and in the directory."""
    _remembered[key] = tuning
    if directory is None:
        return
    try:
        write_atomically(directory / f"{key}.json", [json.dumps(asdict(tuning)).encode()])
    except OSError as error:
        warnings.warn(f"Trainer: tune_cache={str(directory)!r} cannot be written: {error}.", stacklevel=2)


def _read(path: Path) -> Tuning | None:
    """Return what a file holds; None where it is missing or cannot be read, so that it is measured again."""
    try:
        found = json.loads(path.read_text())
        candidates = tuple(
            CandidateExecution(**{**one, "execution": Execution(*one["execution"])}) for one in found["candidates"]
        )
        return Tuning(Execution(*found["chosen"]), candidates, found["where"], found["seconds"], found["allowed"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
