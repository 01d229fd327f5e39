"""When checkpoints are due by time: not too late, and never too often."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from plurax.transforms._runs import checkpoint_clock
from plurax.transforms._runs.checkpoint_clock import CHECKPOINT_EVERY, CheckpointClock
from plurax.transforms._runs.loop import check_options
from plurax.transforms._runs.processes import Group

MINUTE = 60.0


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    moved = Time()
    monkeypatch.setattr(checkpoint_clock, "now", moved)
    return moved


def written(
    clock: CheckpointClock, time: Time, step: Callable[[float], float], cost: Callable[[int], float], hours: float
) -> list[tuple[float, float]]:
    """Take steps of so many seconds, and return when the checkpoints were begun and ended, in seconds from the start.

    The steps wait while a checkpoint is written, as on a machine that can do only one of both.
    """
    found: list[tuple[float, float]] = []
    start, count = time.seconds, 0
    while time.seconds < start + 3600 * hours:
        time.seconds += step(time.seconds - start)
        count += 1
        if clock.due(count):
            began = time.seconds - start
            clock.begin()
            time.seconds += cost(len(found))
            clock.end()
            found.append((began, time.seconds - start))
    return found


def test_a_quick_checkpoint_is_written_every_five_minutes(time: Time) -> None:
    found = written(CheckpointClock(CHECKPOINT_EVERY), time, lambda _: 2.0, lambda _: 1.0, 2)
    begun = [0.0, *(began for began, _ in found)]
    assert np.all(np.diff(begun) >= 5 * MINUTE)
    assert np.all(np.diff(begun) <= 5 * MINUTE + 3)  # a step and a checkpoint late at most
    assert len(found) == 23


@pytest.mark.parametrize("cost", [lambda _: 40.0, lambda i: 5.0 + 10 * i, lambda i: 300.0 if i == 1 else 2.0])
def test_slow_checkpoints_take_five_percent_of_the_time(time: Time, cost: Callable[[int], float]) -> None:
    found = written(CheckpointClock(CHECKPOINT_EVERY), time, lambda _: 2.0, cost, 50)
    spent = 0.0
    for i, (began, ended) in enumerate(found):
        spent += ended - began
        if i and cost(i) <= cost(i - 1):  # how long the first one and a slower one take is not known before
            assert spent <= 0.05 * ended
    assert spent > 0.04 * 50 * 3600 or len(found) > 500  # nor are there fewer than that


def test_a_checkpoint_that_is_still_written_is_waited_for(time: Time) -> None:
    clock = CheckpointClock(timedelta(seconds=10))
    time.seconds += 10
    assert clock.due(1)
    clock.begin()
    for step in range(2, 40):
        time.seconds += 1
        assert not clock.due(step)
    clock.end()  # 38 of 48 seconds
    assert not clock.due(40)
    time.seconds += 20 * 2 * 38 - 48 - 1
    assert not clock.due(41)
    time.seconds += 1
    assert clock.due(42)


def test_steps_and_never(time: Time) -> None:
    by_steps, never = CheckpointClock(3), CheckpointClock(None)
    time.seconds += 1e6
    assert [step for step in range(1, 10) if by_steps.due(step)] == [3, 6, 9]
    assert not any(never.due(step) for step in range(1, 10))


def test_all_processes_follow_the_first_clock_at_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clocks that differ, and steps that get slower."""
    times = [Time(), Time()]
    values: list[Any] = []

    class Both(Group):
        """What a process says goes to the other, which asks later at the same step."""

        def gather(self, value: Any) -> list[Any]:
            values.append(value)
            return [values[len(values) - 1 - (len(values) - 1) % 2], value]

    clocks = []
    for one in times:
        monkeypatch.setattr(checkpoint_clock, "now", one)
        clocks.append(CheckpointClock(CHECKPOINT_EVERY, Both((0, 1))))
    due: list[int] = []
    when: list[float] = [times[0].seconds]
    step = 0
    while len(due) < 6:
        step += 1
        times[0].seconds += 60.0 if step == 1 else 0.02 if len(due) < 3 else 0.3
        times[1].seconds += 17.0
        said = []
        for one, clock in zip(times, clocks, strict=True):
            monkeypatch.setattr(checkpoint_clock, "now", one)
            said.append(clock.due(step))
        assert said[0] == said[1]
        if said[0]:
            due.append(step)
            when.append(times[0].seconds)
            for one, clock in zip(times, clocks, strict=True):
                monkeypatch.setattr(checkpoint_clock, "now", one)
                clock.begin()
                one.seconds += 0.5
                clock.end()
    assert np.all(np.diff(when) >= 5 * MINUTE)
    assert np.all(np.diff(when) <= 5 * MINUTE + 20)
    assert len(values) // 2 <= 60 * len(due) < step / 50


@pytest.mark.parametrize(
    ("every", "error", "message"),
    [
        (timedelta(0), ValueError, r"^fit: checkpoint_every must be a positive time, but got datetime.timedelta\(0\)"),
        (timedelta(-1), ValueError, "^fit: checkpoint_every must be a positive time, but got"),
        (0, ValueError, "^fit: checkpoint_every must be at least 1, but got 0"),
        (2.0, TypeError, "^fit: checkpoint_every must be an int, a datetime.timedelta or None, but got 2.0 of type fl"),
        (True, TypeError, "^fit: checkpoint_every must be an int, a datetime.timedelta or None, but got True of type"),
    ],
)
def test_invalid_intervals_are_refused(every: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        check_options("fit", 3, "here", every, 2, 1, "auto")


def test_an_interval_needs_a_directory() -> None:
    check_options("fit", 3, None, CHECKPOINT_EVERY, 2, 1, "auto")
    check_options("fit", 3, None, None, 2, 1, "auto")
    with pytest.raises(ValueError, match="^fit: checkpoint_every needs a checkpoint_dir to write to; pass one"):
        check_options("fit", 3, None, timedelta(minutes=1), 2, 1, "auto")
