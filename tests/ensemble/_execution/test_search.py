"""`Search`: which executions are tried, when, and which is used in the end; with a clock of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from plurax.ensemble._execution import search as module
from plurax.ensemble._execution.autotune import CandidateExecution, Tuning
from plurax.ensemble._execution.search import Search, chunk_of
from plurax.ensemble._members.strategy import Execution

VMAP, MAP, UNROLL, LOOP = (Execution(name) for name in ("vmap", "map", "unroll", "loop"))


class Run:
    """A run whose steps and compilations take made-up times, on a made-up clock.

    Args:
      monkeypatch: replaces the clock and the threads.
      seconds: the time of a step with an execution; an error is raised.
      compiling: the time of compiling an execution; an error is raised.
      known: the results of an earlier run.
      options: further arguments of `Search`.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        seconds: Callable[[Execution], Any],
        compiling: Callable[[Execution], Any] = lambda _: 1.0,
        *,
        known: Tuning | None = None,
        waiting: tuple[Execution, ...] = (LOOP, MAP, UNROLL),
        size: int = 8,
        most: float = math.inf,
        budget: int | None = None,
        temporaries: int = 100,
    ) -> None:
        self.now, self.seconds = 1.0, seconds
        self.used: list[Execution] = []
        self.remembered: list[Tuning] = []
        self.plans: list[tuple[int, list[tuple[int, Execution]]]] = []
        run = self

        class Compilation:  # beside the run, at the cost of its whole time
            def __init__(self, execution: Execution, lower: Any) -> None:
                self.execution, self.temporaries, self.error, self.done = execution, temporaries, None, True
                self.seconds = 0.0
                took = compiling(execution)
                if isinstance(took, Exception):
                    self.error = took
                else:
                    self.seconds = took
                    run.now += took

        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(module, "_Compilation", Compilation)
        monkeypatch.setattr(module, "_free_memory", lambda: None)
        known = known or Tuning(VMAP, (), "here", 0.0)
        self.search = Search(known, waiting, (size, size), most, budget, self.remembered.append)
        self.search.listener = lambda plan: self.plans.append((len(self.used), plan))
        self.compiling = compiling

    def take(self, steps: int, *, known: bool = False, count: int = 1) -> Run:
        """Take steps, `count` in each call; the search knows how many are left if `known`."""
        if self.search.is_new:
            self.now += self.compiling(self.search.best) + self.seconds(self.search.best)
            self.search.first(self.search.best, self.compiling(self.search.best))
            self.used.append(self.search.best)
            steps -= 1
        for done in range(0, steps, count):
            execution = self.search.next(count, steps - done if known else None, lambda _: None)
            if self.search.block is not None and self.search.starts_block():
                self.search.begin()
            took = self.seconds(execution)
            if isinstance(took, Exception):
                self.search.failed(took)
                execution = self.search.best
                took = self.seconds(execution)
            self.now += took * count
            self.search.took(count)
            self.used += [execution] * count
        return self

    @property
    def notes(self) -> dict[str, str]:
        return {str(one.execution): one.note for one in self.search.known.candidates}


@pytest.mark.parametrize("best", [VMAP, MAP, UNROLL, LOOP], ids=str)
@pytest.mark.parametrize("step", [0.0002, 0.01, 0.5])
def test_a_long_run_ends_with_the_fastest(monkeypatch, best, step) -> None:
    run = Run(monkeypatch, lambda one: step if one == best else 2 * step, size=3)
    run.take(int(1000 / step) if step > 0.001 else 500_000)
    assert run.search.best == best
    assert run.used[-1] == best
    assert {one.execution: round(one.ms / step) for one in run.search.known.candidates if one.ms} == {
        one: 1000 if one == best else 2000 for one in (VMAP, MAP, UNROLL, LOOP)
    }


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("steps", [10, 300, 10_000])
@pytest.mark.parametrize("step", [0.001, 0.02, 0.3])
@pytest.mark.parametrize("slower", [0.6, 1.1, 40.0])
@pytest.mark.parametrize("compiling", [0.3, 8.0])
@pytest.mark.parametrize("longer", [0.5, 3.0])
def test_trials_cost_at_most_a_tenth_of_the_run(monkeypatch, known, steps, step, slower, compiling, longer) -> None:
    run = Run(
        monkeypatch,
        lambda one: step if one == VMAP else slower * step,
        lambda one: compiling if one == VMAP else longer * compiling,
    )
    run.take(steps, known=known)
    by_rule = compiling + steps * step
    # One step of a hopeless candidate cannot be foreseen.
    assert run.now - 1 <= 1.1 * by_rule + (3 * slower * step if slower > 3 else 0)


def test_a_hopeless_candidate_is_left_after_one_step(monkeypatch) -> None:
    run = Run(monkeypatch, lambda one: 1.13 if one == LOOP else 0.0032, waiting=(LOOP, MAP))
    run.take(100_000)
    assert run.used.count(LOOP) == 1
    assert run.notes["loop"].endswith(" times slower")
    assert run.search.known.chosen == VMAP


def test_a_slow_first_call_is_not_held_against_a_candidate(monkeypatch) -> None:
    calls = []

    def seconds(one: Execution) -> float:
        if one != LOOP:
            return 0.001
        calls.append(one)
        return 0.04 if len(calls) == 1 else 0.0005

    run = Run(monkeypatch, seconds, waiting=(LOOP,)).take(100_000)
    assert run.search.best == LOOP


def test_occasional_slow_steps_do_not_decide(monkeypatch) -> None:
    count = {VMAP: 0, LOOP: 0}

    def seconds(one: Execution) -> float:
        count[one] += 1
        return 3.0 if count[one] % 700 == 0 else 0.01 if one == VMAP else 0.0095

    assert Run(monkeypatch, seconds, waiting=(LOOP,)).take(100_000).search.best == LOOP


def test_a_gain_within_the_noise_changes_nothing(monkeypatch) -> None:
    run = Run(monkeypatch, lambda one: 0.01 if one == VMAP else 0.0098).take(100_000)
    assert run.search.best == VMAP


def test_a_machine_that_becomes_slower_between_trials_changes_no_ranking(monkeypatch) -> None:
    times = {VMAP: 0.01, LOOP: 0.0105, MAP: 0.008, UNROLL: 0.0082}
    run = Run(monkeypatch, lambda one: times[one] * (1 + len(run.remembered)))
    run.take(100_000)
    found = {one.execution: one.ms for one in run.search.known.candidates}
    assert run.search.best == MAP
    assert found == pytest.approx({one: 1e3 * seconds for one, seconds in times.items()})


def test_what_was_not_compared_is_not_called_chosen(monkeypatch) -> None:
    run = Run(monkeypatch, lambda _: 0.01).take(300, known=True)
    assert set(run.used) == {VMAP}
    text = str(run.search.known)
    assert "chosen" not in text
    assert "by the rule, not compared" in text
    why = "not tried: the rest of the run is too short to pay for its trial"
    assert {run.notes[name] for name in ("loop", "map", "unroll")} <= {
        why,
        "not tried: its trial would take more than a tenth of the run",
    }
    assert run.search.known.summary().startswith("vmap, by the rule, not compared; no other was tried: ")
    long = Run(monkeypatch, lambda _: 0.01).take(100_000)
    assert str(long.search.known).count("chosen") == 1


@pytest.mark.slow
def test_long_compilations_are_avoided(monkeypatch) -> None:
    run = Run(monkeypatch, lambda _: 0.01, lambda one: 500.0 if one == UNROLL else 1.0, size=100).take(1_000_000)
    assert run.notes["unroll"] == "not tried: it takes about 100 s to compile"


def test_candidates_that_fail_or_do_not_fit_are_dropped(monkeypatch) -> None:
    broken = NotImplementedError("no batching rule")
    run = Run(monkeypatch, lambda _: 0.01, lambda one: broken if one == MAP else 1.0).take(100_000)
    assert run.notes["map"] == "fails: NotImplementedError"
    run = Run(monkeypatch, lambda one: RuntimeError("no memory") if one == MAP else 0.01).take(100_000)
    assert run.notes["map"] == "fails: RuntimeError"
    assert MAP not in run.used
    run = Run(monkeypatch, lambda _: 0.01, budget=99).take(100_000)
    assert {run.notes[name] for name in ("loop", "map", "unroll")} == {"over the memory budget"}
    assert set(run.used) == {VMAP}
    run = Run(monkeypatch, lambda _: 0.01)
    monkeypatch.setattr(module, "_free_memory", lambda: 99)
    assert "free memory" in run.take(100_000).notes["map"]


def test_a_first_step_that_fails_is_replaced(monkeypatch) -> None:
    run = Run(monkeypatch, lambda _: 0.01)
    others = run.search.others()
    run.search.instead(next(others), NotImplementedError())
    run.take(100_000)
    assert VMAP not in run.used
    assert run.notes["vmap"] == "fails: NotImplementedError"


@pytest.mark.slow
def test_chunks_become_smaller_while_that_is_faster(monkeypatch) -> None:
    of = lambda chunk: chunk_of(1000, chunk, VMAP)
    seconds = lambda one: 0.01 + abs(math.log((one.chunk_size or 1000) / 16)) / 100
    run = Run(monkeypatch, seconds, waiting=(of(250), LOOP), size=1000).take(1_000_000)
    assert run.search.best == Execution("vmap", 14)
    sizes = [one.chunk_size for one in dict.fromkeys(run.used) if one.strategy == "vmap"]
    assert sizes == [None, 250, 59, 14, 3]
    assert chunk_of(9, 4, VMAP) == Execution("vmap", 3)
    assert chunk_of(9, 1, VMAP) is None


@pytest.mark.slow
def test_a_limit_on_the_seconds_of_slower_steps(monkeypatch) -> None:
    run = Run(monkeypatch, lambda one: 0.01 if one == VMAP else 0.02, most=0.1).take(1_000_000)
    assert run.used.count(MAP) == 0
    assert run.notes["map"] == "not tried: the trials before it have used up tune_seconds"


@pytest.mark.parametrize("count", [1, 4])
def test_plans_say_in_advance_what_every_step_does(monkeypatch, count) -> None:
    """Also where a candidate is left in the middle, so that a killed run can be repeated."""
    run = Run(monkeypatch, lambda one: {LOOP: 0.5, MAP: 0.02}.get(one, 0.03)).take(100_001, count=count)
    changes: list[tuple[int, Execution]] = [(0, VMAP)]
    for step, plan in run.plans:
        changes = [one for one in changes if one[0] < step] + [(step + ahead, one) for ahead, one in plan]
    starts = iter([*changes[1:], (len(run.used), VMAP)])
    expected: list[Execution] = []
    for (start, execution), (end, _) in zip(changes, starts, strict=True):
        assert start == len(expected)
        expected += [execution] * (end - start)
    assert expected == run.used
    assert {VMAP, LOOP, MAP} <= set(run.used)


def test_a_search_goes_on_from_earlier_results(monkeypatch) -> None:
    first = Run(monkeypatch, lambda one: 0.005 if one == LOOP else 0.01).take(4000)
    known = first.remembered[-1]
    assert known.chosen == LOOP
    assert any(one.note.startswith("not tried") for one in known.candidates)
    second = Run(monkeypatch, lambda one: 0.005 if one == LOOP else 0.01, known=known).take(100_000)
    assert second.used[0] == LOOP
    assert VMAP not in second.used
    assert {one.execution for one in second.search.known.candidates if one.ms} == {VMAP, LOOP, MAP, UNROLL}


def test_members_that_leave_end_the_search(monkeypatch) -> None:
    run = Run(monkeypatch, lambda _: 0.01, waiting=(LOOP,)).take(100)
    while run.search.block is None:
        run.take(2)
    run.search.stop("members left the run")
    assert set(run.take(100_000).used[-100_000:]) == {VMAP}
    assert run.plans[-1][1] == [(0, VMAP)]


@pytest.mark.parametrize("told", [True, False])
def test_a_pause_is_not_time_of_the_run(monkeypatch, told) -> None:
    run = Run(monkeypatch, lambda _: 0.01).take(100)
    if told:
        run.search.pause()
    run.now += 1e6
    assert set(run.take(100).used) == {VMAP}


@pytest.mark.parametrize("pause", [True, False])
def test_a_trial_that_has_not_ended_is_said_and_repeated(monkeypatch, pause) -> None:
    run = Run(monkeypatch, lambda one: 0.005 if one == LOOP else 0.01, waiting=(LOOP,)).take(100)
    while run.search.block is None or run.search.block.execution == VMAP:
        run.take(2)
    if pause:
        run.search.pause()
        assert run.search.block is None
    assert run.notes["loop"] == "not tried: its trial has not ended"
    assert "its trial has not ended" in run.search.known.summary()
    assert "its trial has not ended" in str(run.search.known)
    known = run.search.known
    assert run.take(10_000).search.best == LOOP
    assert Run(monkeypatch, run.seconds, waiting=(LOOP,), known=known).take(10_000).search.best == LOOP


def test_a_compilation_that_took_too_long_is_paid_for_before_its_trial(monkeypatch) -> None:
    run = Run(monkeypatch, lambda _: 0.01, lambda one: 1.0 if one == VMAP else 30.0, waiting=(LOOP,))
    while len(run.used) < 300_000 and run.search.block is None:
        run.take(2)
        if run.now > 100 and run.search.block is None:
            assert run.notes["loop"] == "not tried: its trial has not begun"
    assert run.search.block is not None
    assert 30 / run.now < 0.1


def test_the_table() -> None:
    candidates = (
        CandidateExecution(VMAP, 20.0, 3 * 2**20, 0.5),
        CandidateExecution(MAP, 10.0, None, 0.25),
        CandidateExecution(LOOP, note="not tried: there were too few steps"),
    )
    found = Tuning(MAP, candidates, "here", 1.25)
    lines = str(found).splitlines()
    assert lines[0] == "here, 1.2 s for trials"
    assert lines[1].split() == ["ms", "temporaries", "compile", "(s)"]
    assert lines[2].split() == ["map", "10", "0.25", "chosen"]
    assert lines[3].split() == ["vmap", "20", "3", "MiB", "0.50"]
    assert lines[4].split(maxsplit=1) == ["loop", "not tried: there were too few steps"]
    unknown = Tuning(VMAP, (CandidateExecution(VMAP), CandidateExecution(LOOP, note="not tried: too few")), "here", 0.0)
    assert str(unknown) == "here\nvmap  by the rule, not compared\nloop  not tried: too few"
    summary = 'map (10 ms a step); "vmap": 20 ms; "loop": not tried: there were too few steps'
    assert found.summary() == summary
