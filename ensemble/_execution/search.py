"""`Search`: try executions on the steps of a run, as far as the time that they may save can pay for it.

A strategy changes no result, so every step of a trial is a step of the run, and a trial costs only its compilation and
the steps that are slower than the best. A candidate is compiled in a thread while the run goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from ...transforms._core.compat import memory_of
from .._members.strategy import Execution
from .autotune import NOT_TRIED, CandidateExecution, Tuning

# The share of the time of a run so far that compiling and measuring may take together, and of its expected time.
_SHARE, _EARLY = 0.1, 0.07
# The rest of a run must take this many times as long as a trial.
_PAYS = 2
# A compilation is expected to take this many times as long as the first one; _MARGIN times as long as the slowest of
# the others, relative to the first, but no less than _LEAST, once there are others.
_FACTOR, _MARGIN, _LEAST = 3.0, 1.25, 1.5
# A candidate must save at least this share of a step to replace the best one, and is left if it is this much slower.
_GAIN, _HOPELESS = 0.03, 3.0
# A trial alternates between the best execution and the candidate: in each round, each takes some blocks of steps of
# this many seconds, after two calls that are not counted. The first of these prepares the program, so that it may take
# some more seconds, and the second may be delayed by other work on the machine.
_ROUNDS, _BLOCKS, _SECONDS = 2, 2, 0.05
_SLACK = 0.3, 0.001
# The first reason for a candidate that was not tried.
_TOO_FEW = "there were too few steps"
# Longer compilations, in seconds, are not attempted.
_LONGEST_COMPILE = 60.0


class Block(NamedTuple):
    """Consecutive steps of a trial with one execution.

    Attributes:
      start: the first step, counted from the begin of the trial.
      end: the step after the last one.
      execution: the execution of the steps.
      slack: by how many more seconds a step may take longer before its execution is left; 0 for a block that counts.
    """

    start: int
    end: int
    execution: Execution
    slack: float = 0.0


class Search:
    """The best execution so far, and the trials of the others.

    Args:
      known: the results so far; `chosen` is the execution of the first steps.
      waiting: the candidates that are not measured yet, the most promising first.
      size: the number of members, and how many of them a device has.
      seconds: how long steps with candidates may take in total, beyond the time of the same steps with the best.
      budget: the maximum bytes of temporaries, or None.
      remember: receives the results after each trial.

    Attributes:
      best: the fastest execution so far.
      listener: receives the plan of the next steps whenever it changes, before they are taken: pairs of a number of
        steps from now and the execution from there on.
    """

    def __init__(
        self,
        known: Tuning,
        waiting: Sequence[Execution],
        size: tuple[int, int],
        seconds: float,
        budget: int | None,
        remember: Callable[[Tuning], None],
    ) -> None:
        self.best, self.size = known.chosen, size[0]
        self.listener: Callable[[list[tuple[int, Execution]]], None] | None = None
        self._per_device, self._most, self._budget, self._remember = size[1], seconds, budget, remember
        tried = [x for x in known.candidates if x.ms is not None or (x.note and not x.note.startswith(NOT_TRIED))]
        self._where, self._found = known.where, {one.execution: one for one in tried}
        self._waiting = [one for one in waiting if one not in self._found and one != self.best]
        self._why = dict.fromkeys(self._waiting, _TOO_FEW)
        self._compile_s, self._slowest = 0.0, 0.0  # of the first program; of the others, as a multiple of it
        # The time of the run, its steps, and the time that trials have cost; without the first step, which compiles.
        self._elapsed = self._spent = self._slower = 0.0
        self._steps, self._latest, self._check = 0, 0.0, 0.0
        self._compiling: _Compilation | None = None
        self._blocks: list[Block] = []
        self._at, self._begun, self._changed = 0, 0.0, False  # a clock of 0 is not running
        self._times: dict[Execution, list[float]] = {}

    @property
    def known(self) -> Tuning:
        """Return the results, with the reason for each candidate that was not measured."""
        others = [CandidateExecution(one, note=f"{NOT_TRIED}{self._why[one]}") for one in self._waiting]
        if self._compiling is not None:
            others.insert(0, CandidateExecution(self._compiling.execution, note=f"{NOT_TRIED}its trial has not begun"))
        mine = self._found.get(self.best, CandidateExecution(self.best))
        found = {self.best: mine, **self._found}
        for one in found.values():
            if one.ms is None and not one.note and one.execution != self.best:
                found[one.execution] = replace(one, note=f"{NOT_TRIED}its trial has not ended")
        return Tuning(self.best, (*found.values(), *others), self._where, self._spent)

    @property
    def is_new(self) -> bool:
        """Return whether no step was taken yet."""
        return not self._compile_s

    @property
    def is_open(self) -> bool:
        """Return whether a candidate is on trial or waits for one."""
        return bool(self._blocks or self._compiling or self._waiting) and self._check < float("inf")

    def others(self) -> Iterator[Execution]:
        """Return the executions with which the first step can be tried if the best one fails."""
        return iter([one for one in self._waiting if one.strategy in ("loop", "map")])

    def instead(self, execution: Execution, error: Exception) -> None:
        """Replace the best execution, which failed before its first step."""
        self._found[self.best] = CandidateExecution(self.best, note=f"fails: {type(error).__name__}")
        self._waiting.remove(execution)
        self.best = execution

    def first(self, execution: Execution, seconds: float) -> None:
        """Take the execution of the first step, and its seconds, most of which went into compiling it."""
        self.best = execution
        self._waiting = [one for one in self._waiting if one != execution]
        self._compile_s, self._latest = seconds, time.perf_counter()
        self._elapsed = seconds

    def pause(self) -> None:
        """Exclude the time until the next step, between two runs, and begin a trial that has not ended anew."""
        self._latest = self._check = self._begun = 0.0
        if self._blocks:
            candidate = self._blocks[-1].execution
            self._blocks = []
            self._found.pop(candidate)
            self._waiting.insert(0, candidate)
            self._why[candidate] = "its trial has not ended"

    def next(self, steps: int, left: int | None, lower: Callable[[Execution], Any]) -> Execution:
        """Return the execution of the next call, which takes `steps` steps.

        Args:
          steps: the number of steps.
          left: the number of steps of the run from here on; None if unknown.
          lower: returns the lowered program of the call for an execution.
        """
        now = time.perf_counter()
        if self._latest:
            # A longer pause, as between two cells of a notebook, is not time of the run.
            each = (self._elapsed - self._compile_s) / max(1, self._steps)
            self._elapsed += min(now - self._latest, max(1.0, 10 * steps * each))
        self._latest = now
        if not self._blocks and now >= self._check:
            self._consider(steps, left, lower)
        if self._changed:
            self._changed = False
            if self.listener is not None:
                self.listener(self._plan())
        return self.best if (block := self.block) is None else block.execution

    @property
    def block(self) -> Block | None:
        """Return the block of the next step; None outside a trial."""
        return next((block for block in self._blocks if self._at < block.end), None)

    def starts_block(self) -> bool:
        """Return whether the next call is the first of a block."""
        return self._begun == 0.0

    def begin(self) -> None:
        """Start the clock of a block, when everything before it is computed."""
        self._begun = time.perf_counter()

    def ends_block(self, steps: int) -> bool:
        """Return whether a call of this many steps is the last of a block."""
        return self.block is None or self._at + steps >= self.block.end

    def took(self, steps: int) -> None:
        """Note that a call has ended, and at the end of a block its results are computed."""
        self._steps += steps
        if (block := self.block) is None:
            return
        self._at += steps
        if self._at < block.end:
            return
        taken, count = time.perf_counter() - self._begun, self._at - block.start
        self._begun = 0.0
        if not block.slack:
            self._times.setdefault(block.execution, []).append(taken / count)
        if block.execution != self.best:
            best = _typical(self._times[self.best])
            self._cost(max(0.0, taken - best * count))
            if taken / count > _HOPELESS * best + block.slack:
                self._settle(block.execution, f"{taken / count / best:.1f} times slower")
                return
        if self.block is None:
            self._settle(block.execution)

    def _cost(self, seconds: float) -> None:
        self._spent, self._slower = self._spent + seconds, self._slower + seconds

    def failed(self, error: Exception) -> None:
        """Note that the call of a candidate failed, with its state unchanged."""
        assert self.block is not None
        self._settle(self.block.execution, f"fails: {type(error).__name__}")

    def stop(self, why: str) -> None:
        """Try no more candidates."""
        self._why = dict.fromkeys(self._waiting, why)
        if self._blocks:
            self._blocks, self._changed = [], True
        self._check = float("inf")

    def _plan(self) -> list[tuple[int, Execution]]:
        """Return what follows: after how many steps from now, and with which execution."""
        ahead = [block for block in self._blocks if block.end > self._at]
        plan = [(max(0, block.start - self._at), block.execution) for block in ahead]
        return [*plan, (ahead[-1].end - self._at if ahead else 0, self.best)]

    def _consider(self, steps: int, left: int | None, lower: Callable[[Execution], Any]) -> None:
        """Begin to compile the next candidate that can pay for its trial, or begin the trial of a compiled one."""
        each = (self._elapsed - self._compile_s) / max(1, self._steps)
        measuring = (1 + _ROUNDS * _BLOCKS) * max(_SECONDS, steps * each)
        if self._compiling is not None:
            if not self._compiling.done:
                return
            # If it took longer than expected, its trial waits until the run can pay for both.
            if self._spent + self._compiling.seconds + measuring <= self._allowed(left, each):
                self._end_of_compilation(steps, left, each)
            return
        if self._steps < 2 * steps:  # the time of a step is not known yet
            return
        # A run of unknown length is expected to last as long again as it has.
        ahead = self._elapsed if left is None else left * each
        most = self._allowed(left, each) - self._spent
        factor = max(_LEAST, _MARGIN * self._slowest) if self._slowest else _FACTOR
        if self._slower >= self._most:
            self.stop("the trials before it have used up tune_seconds")
            return
        for execution in list(self._waiting):
            compiling = self._compile_s * (self.size if execution.strategy == "unroll" else factor)
            cost = compiling + measuring
            if compiling > _LONGEST_COMPILE:
                self._waiting.remove(execution)
                note = f"{NOT_TRIED}it takes about {compiling:.0f} s to compile"
                self._found[execution] = CandidateExecution(execution, note=note)
            elif cost > most:
                self._why[execution] = "its trial would take more than a tenth of the run"
            elif _PAYS * cost > ahead:
                self._why[execution] = "the rest of the run is too short to pay for its trial"
            else:
                self._waiting.remove(execution)
                self._compiling = _Compilation(execution, lower)
                return
        self._check = time.perf_counter() + 0.05 * self._elapsed

    def _allowed(self, left: int | None, each: float) -> float:
        """Return how many seconds all trials may take up to now."""
        # Where the length of the run is known, a trial may begin earlier, but only once the steps have taken twice as
        # long, since the first steps predict the rest badly.
        total = self._elapsed + (left or 0) * each
        early = 0.0 if left is None else min(_EARLY * total, (self._elapsed - self._compile_s) / 2)
        return max(_SHARE * self._elapsed, early)

    def _end_of_compilation(self, steps: int, left: int | None, each: float) -> None:
        """Begin the trial of a compiled candidate, unless its program is of no use."""
        assert self._compiling is not None
        one, self._compiling = self._compiling, None
        self._spent += one.seconds
        if one.execution.strategy != "unroll":
            self._slowest = max(self._slowest, one.seconds / self._compile_s)
        if one.error is not None:
            found = CandidateExecution(one.execution, note=f"fails: {type(one.error).__name__}")
        else:
            found = CandidateExecution(one.execution, None, one.temporaries, one.seconds)
            free = _free_memory()
            if self._budget is not None and one.temporaries > self._budget:
                found = replace(found, note="over the memory budget")
            elif free is not None and one.temporaries > free:
                found = replace(found, note="more temporaries than the device has free memory")
        self._found[one.execution] = found
        if found.note:
            self._remember(self.known)
            return
        length = steps * max(1, round(_SECONDS / max(steps * each, 1e-9)))
        if left is not None:  # a short rest of a run still gets whole blocks
            length = max(steps, min(length, left // (4 * _ROUNDS * _BLOCKS) // steps * steps))
        self._at, self._begun, self._times, self._changed = 0, 0.0, {}, True
        start = 0
        for execution in (self.best, one.execution) * _ROUNDS:
            for size, slack in (*((steps, slack) for slack in _SLACK), *[(length, 0.0)] * _BLOCKS):
                self._blocks.append(Block(start, start + size, execution, slack))
                start += size

    def _settle(self, candidate: Execution, note: str = "") -> None:
        """End the trial of a candidate."""
        times, rival = self._times.get(candidate, []), _typical(self._times[self.best])
        mine = self._found.get(self.best, CandidateExecution(self.best, compile_s=self._compile_s))
        # The machine may be slower in one trial than in another, so only times of one trial are compared.
        best = rival * 1e3 if mine.ms is None else mine.ms
        ms = _typical(times) / rival * best if times else None
        self._found[self.best] = replace(mine, ms=best)
        self._found[candidate] = replace(self._found[candidate], ms=ms, note=note)
        if not note and ms is not None and ms < (1 - _GAIN) * best:
            self.best = candidate
        self._blocks, self._begun, self._changed = [], 0.0, True
        self._add_smaller_chunk(candidate, ms)
        self._remember(self.known)

    def _add_smaller_chunk(self, one: Execution, ms: float | None) -> None:
        """Try a smaller chunk next if this one is faster than the next larger one."""
        if one.strategy != "vmap" or one.chunk_size is None or ms is None:
            return
        larger = [x for x in self._found.values() if _is_chunk_of(x.execution, one) and x.ms is not None]
        if any(x.ms is not None and x.ms < ms for x in larger):
            return
        smaller = chunk_of(self._per_device, one.chunk_size // 4, one)
        if smaller is not None and smaller not in self._found and smaller not in self._waiting:
            self._waiting.insert(0, smaller)
            self._why[smaller] = _TOO_FEW


def chunk_of(members: int, chunk: int, like: Execution) -> Execution | None:
    """Return "vmap" in chunks of about this size, of equal size: for 9 members and 4 at a time, 3 chunks of 3."""
    return None if chunk < 2 else like._replace(strategy="vmap", chunk_size=-(-members // -(-members // chunk)))


def _is_chunk_of(one: Execution, smaller: Execution) -> bool:
    assert smaller.chunk_size is not None
    return one == smaller._replace(chunk_size=one.chunk_size) and (one.chunk_size or 1 << 62) > smaller.chunk_size


def _typical(times: list[float]) -> float:
    """Return the lower quartile: other work on the machine makes a step slower, never faster."""
    return sorted(times)[(len(times) - 1) // 4]


def _free_memory() -> int | None:
    """Return the free bytes of the device; None if it does not tell."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if {"bytes_limit", "bytes_in_use"} <= set(stats) else None


class _Compilation:
    """The compilation of a candidate in a thread; it is traced before, since a thread has other settings of JAX."""

    def __init__(self, execution: Execution, lower: Callable[[Execution], Any]) -> None:
        self.execution, self.temporaries = execution, 0
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None
        start = time.perf_counter()
        try:
            lowered = lower(execution)
        except Exception as error:  # such as an operation that cannot be batched
            self.error = error
        self.seconds = time.perf_counter() - start
        if self.error is None:
            # Not a daemon: a process that ends in the middle of a compilation would crash.
            self._thread = threading.Thread(target=self._compile, args=(lowered,))
            self._thread.start()

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def _compile(self, lowered: Any) -> None:
        start = time.perf_counter()
        try:
            self.temporaries = memory_of(lowered.compile()).temp_size_in_bytes
        except Exception as error:  # such as too little memory
            self.error = error
        self.seconds += time.perf_counter() - start
