"""`tune`: compile and measure the candidates of `strategy="auto"`, choose the fastest, and cache the result.

The fastest strategy depends on the program, its shapes and the machine, and we know no general rule: batched operations
win for small perceptrons, one member after another for convolutions, and the margin changes with the size.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from math import inf
from pathlib import Path

import jax
from jax.extend.core import Jaxpr
from tqdm import tqdm

from ...transforms._core.machine import cores, processor
from ...transforms._core.memory import in_words
from ...transforms._runs.atomic_write import write_atomically
from .._members.strategy import Execution

# "unroll", a copy of the operations for each member, is skipped if its compilation is likely to take longer: seconds.
_LONGEST_COMPILE = 20.0
# A candidate slower than the best by the first factor is not measured again; one within the second counts as equal.
_OUT_OF_REACH, _EQUAL = 1.3, 1.03
# A measurement is a block of consecutive steps, as in training, of this many seconds.
_BLOCK = 0.05
# Each candidate gets `_FIRST` blocks at first, as long as they take no more than 1 / `_SHARES` of the time, and then
# one in each round.
_FIRST, _SHARES, _ROUNDS = 4, 16, 15

# The version of the file format, part of the fingerprint, so that files of other versions are not found.
_FORMAT = 3
# The results of this process, shared by all trainers; `tune_cache` is for other processes.
_remembered: dict[str, Tuning] = {}


@dataclass(frozen=True)
class CandidateExecution:
    """An execution that was considered.

    Attributes:
      execution: how the members are executed.
      ms: the lower quartile of the times of a step, in milliseconds; None if it was not measured.
      temporaries: bytes of the compiled program besides its arguments and results; for "loop", those of one member.
      compile_s: seconds for tracing and compiling.
      note: the reason why it was not measured.
    """

    execution: Execution
    ms: float | None = None
    temporaries: int | None = None
    compile_s: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Tuning:
    """The measurements and the resulting choice; `str` formats them as a table.

    Attributes:
      chosen: the chosen execution.
      candidates: all candidates that were considered.
      where: the device and the number of members.
      seconds: the duration of the measurements, without compilation.
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
            note = "chosen" if one.execution == self.chosen else one.note
            rows.append((str(one.execution), ms, temporaries, compile_s, note))
        width = max(len(name) for name, *_ in rows)
        lines = [f"{a:{width}}  {b:>6}  {c:>11}  {d:>11}  {e}".rstrip() for a, b, c, d, e in rows]
        return "\n".join([f"{self.where}, measured in {self.seconds:.1f} s", *lines])


def tune(
    temporaries: Callable[[Execution], int],
    seconds_of: Callable[[Execution, int], float],
    *,
    size: int,
    convolutions: bool,
    looped: bool = True,
    devices: int = 1,
    seconds: float,
    budget: int | None,
    where: str,
    aloud: bool = False,
) -> Tuning | None:
    """Measure the candidates, and choose the fastest.

    Args:
      temporaries: compiles a step for an execution, and returns the bytes of its temporaries.
      seconds_of: takes a number of steps with an execution, and returns the seconds of one.
      size: the number of members on one device.
      convolutions: whether the program has convolutions, which may be rewritten as products.
      looped: whether a Python loop over the members is possible.
      devices: the number of devices over which the members may be distributed.
      seconds: the time for all measurements, without compilation.
      budget: the maximum bytes of temporaries, or None.
      where: the device and the members, for the table.
      aloud: whether to print what is being measured.

    Returns:
      The measurements; None if every candidate fails at run time, for example for lack of memory.

    Raises:
      ValueError: none of the candidates fits into the budget.
    """
    search = _Search(temporaries, seconds_of, seconds, budget, aloud)
    # One member at a time comes first: it shows the compile time of a step, and whether products are worthwhile.
    first = "loop" if looped else "map"
    plain = search.measure(Execution(first))
    products = convolutions and search.measure(Execution(first, products=True)) < plain
    compile_one = max(one.compile_s or 0.0 for one in search.found.values())

    for spread in sorted({1, devices}):
        for strategy in ("vmap", "map", "unroll"):
            execution, to_compile = Execution(strategy, None, products, spread), compile_one * -(-size // spread)
            if strategy == "unroll" and to_compile > _LONGEST_COMPILE:
                search.skip(execution, f"about {to_compile:.0f} s to compile")
            else:
                search.measure(execution)
    # Smaller chunks are tried as long as they are faster, or the larger ones do not fit.
    chunk, larger = size // 4, search.measure(Execution("vmap", None, products))
    while chunk >= 2:
        # The same number of chunks, but of equal size: for 9 members and 4 at a time, 3 chunks of 3.
        smaller = search.measure(Execution("vmap", -(-size // -(-size // chunk)), products))
        if smaller > larger:
            break
        chunk, larger = chunk // 4, smaller
    search.repeat()
    if not search.times and isinstance(search.error, jax.errors.JaxRuntimeError):
        return None
    for execution in search.times:
        search.found[execution] = replace(search.found[execution], ms=search.time(execution) * 1e3)
    return Tuning(search.best(), tuple(search.found.values()), where, search.spent)


@dataclass
class _Search:
    """The candidates considered so far, their times, and the seconds spent."""

    temporaries: Callable[[Execution], int]
    seconds_of: Callable[[Execution, int], float]
    seconds: float
    budget: int | None
    aloud: bool
    spent: float = 0.0
    found: dict[Execution, CandidateExecution] = field(default_factory=dict)
    times: dict[Execution, list[float]] = field(default_factory=dict)
    error: Exception | None = None

    def measure(self, execution: Execution) -> float:
        """Compile an execution and take some steps; return the seconds of one, or infinity if it was not measured."""
        if execution in self.found:
            return self.time(execution)
        if self.spent > self.seconds and self.times:
            return self.skip(execution, "no time was left")
        if self.aloud:
            tqdm.write(f"Measuring once: {execution}", file=sys.stderr)
        start = time.perf_counter()
        try:
            temporaries = self.temporaries(execution)
            one = CandidateExecution(execution, None, temporaries, time.perf_counter() - start)
            if self.budget is not None and temporaries > self.budget:
                self.found[execution] = replace(one, note="over the memory budget")
                return inf
            # The first block includes allocations and one-time work, so it counts only if there is no time for others.
            times = [self._block(execution, inf)]
            before = self.spent
            while len(times) <= _FIRST and self.spent < min(self.seconds, before + self.seconds / _SHARES):
                times.append(self._block(execution, min(times)))
        except Exception as error:  # such as an operation that cannot be batched, or too little memory
            self.error = self.error or error
            return self.skip(execution, f"fails: {type(error).__name__}")
        self.found[execution], self.times[execution] = one, times[1:] or times
        return self.time(execution)

    def time(self, execution: Execution) -> float:
        """Return the seconds of a step, or infinity if it was not measured."""
        return _typical(self.times.get(execution, [inf]))

    def skip(self, execution: Execution, why: str) -> float:
        """Record why an execution is not measured; return infinity as its time."""
        self.found[execution] = CandidateExecution(execution, note=why)
        return inf

    def repeat(self) -> None:
        """Measure the candidates near the best again, one block of each in every round.

        With rounds, other work on the machine slows all candidates alike, not just one.
        """
        for _ in range(_ROUNDS):
            limit = _OUT_OF_REACH * min(map(min, self.times.values()), default=0.0)
            for execution, times in self.times.items():
                if self.spent + min(times) > self.seconds:
                    return
                if min(times) <= limit:
                    times.append(self._block(execution, min(times)))

    def best(self) -> Execution:
        """Return the fastest execution; raise if none fits into the budget, or raise the first error if all failed."""
        if not self.times:
            over = [one for one in self.found.values() if one.temporaries is not None]
            if self.budget is None or not over:
                assert self.error is not None
                raise self.error
            least = min(over, key=lambda one: one.temporaries or 0)
            budget, need = in_words(self.budget), f"{in_words(least.temporaries or 0)}, for {least.execution}"
            found = f"no execution fits into memory_budget={budget}: the smallest found is {need}"
            raise ValueError(f"Trainer: {found}; raise it, or make the batch smaller.")
        limit = _EQUAL * min(map(self.time, self.times))
        # Among equally fast executions, the one with the least memory is least affected by other work on the machine.
        equal = [execution for execution in self.times if self.time(execution) <= limit]
        return min(equal, key=lambda execution: self.found[execution].temporaries or 0)

    def _block(self, execution: Execution, once: float) -> float:
        """Time one block of steps, given that a step takes about `once` seconds; return the seconds of one."""
        steps = max(1, int(min(_BLOCK, self.seconds - self.spent) / once))
        found = self.seconds_of(execution, steps)
        self.spent += found * steps
        return found


def _typical(times: list[float]) -> float:
    """Return the lower quartile: other work on the machine makes a step slower, never faster.

    Without donation, so does the operating system, which reclaims freed memory and hands it out again. The effect comes
    and goes, and can be half of the time of a short step.
    """
    return sorted(times)[(len(times) - 1) // 4]


def fingerprint(jaxpr: Jaxpr, *about: object) -> str:
    """Return a hash of a program, the machine, and everything else that a measurement depends on."""
    device = jax.devices()[0]
    # A jaxpr prints functions with their addresses, which differ between processes.
    program = re.sub(r"0x[0-9a-f]+", "", str(jaxpr))
    machine = (
        *(jax.__version__, version("jaxlib"), device.platform, device.device_kind, processor(), cores()),
        *(os.environ.get("XLA_FLAGS", ""), jax.config.values["jax_enable_x64"]),
    )
    return hashlib.sha256(repr((_FORMAT, program, machine, about)).encode()).hexdigest()


def recall(key: str, directory: Path | None) -> Tuning | None:
    """Return an earlier result for a program, from this process or the directory; None if there is none."""
    if key not in _remembered and directory is not None:
        try:
            read = json.loads((directory / f"{key}.json").read_text())
            candidates = (CandidateExecution(Execution(*one.pop("execution")), **one) for one in read["candidates"])
            read |= {"chosen": Execution(*read["chosen"]), "candidates": tuple(candidates)}
            _remembered[key] = Tuning(**read)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass  # missing or damaged: measured again
    return _remembered.get(key)


def remember(key: str, tuning: Tuning, directory: Path | None) -> None:
    """Store a result in this process and in the directory."""
    _remembered[key] = tuning
    if directory is None:
        return
    try:
        write_atomically(directory / f"{key}.json", [json.dumps(asdict(tuning)).encode()])
    except OSError as error:
        warnings.warn(f"Trainer: tune_cache={str(directory)!r} cannot be written: {error}.", stacklevel=2)
