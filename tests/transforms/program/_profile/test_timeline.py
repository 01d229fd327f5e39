"""Instruction times from trace events, on synthetic traces."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from plurax.transforms.program._ir.hlo import HloProgram
from plurax.transforms.program._profile.timeline import _MARK, _events, _timeline

pytestmark = pytest.mark.smoke

PROGRAM = HloProgram("""HloModule jit_f

%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %inner = f32[8]{0} sine(%p)
}

%condition (p.1: f32[8]) -> pred[] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %test = pred[] constant(false)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %first = f32[8]{0} cosine(%x)
  %view = f32[2,4]{1,0} bitcast(%first)
  %second = f32[2,4]{1,0} negate(%view)
  %other = f32[8]{0} exponential(%x)
  ROOT %loop = f32[8]{0} while(%other), condition=%condition, body=%body
}
""")


@dataclass
class Event:
    name: str
    start_ns: int
    duration_ns: int
    stats: list[tuple[str, Any]] = field(default_factory=list)


@dataclass
class Line:
    events: list[Event]


@dataclass
class Plane:
    name: str
    lines: list[Line]


@dataclass
class Trace:
    planes: list[Plane]


def op(name: str, start: int, duration: int, key: int | None = None, module: str = "jit_f") -> Event:
    stats: list[tuple[str, Any]] = [("hlo_op", name), ("hlo_module", module)]
    return Event(name, start, duration, stats if key is None else [*stats, ("_p", key)])


def end(start: int, key: int) -> Event:
    return Event("end: something", start, 0, [("_c", key)])


def mark(start: int, program: int = 0) -> Event:
    return Event(f"{_MARK}{program}", start, 1)


def seconds(*events: Event) -> dict[str, float]:
    """Return the times for the events of one run on a CPU, in clock units."""
    trace = Trace([Plane("/host:CPU", [Line([mark(0)]), *(Line([event]) for event in events)])])
    ((_, (found,)),) = _events(trace, {"jit_f"})
    return {name: pytest.approx(time * 1e9) for name, time in _timeline(PROGRAM, found).seconds.items()}


def test_one_after_another() -> None:
    assert seconds(op("first", 10, 5), op("second", 20, 7)) == {"first": 5, "second": 7}


def test_an_instruction_without_duration() -> None:
    assert seconds(op("first", 10, 0), op("second", 20, 7)) == {"second": 7}


def test_concurrent_instructions_share_the_time() -> None:
    assert seconds(op("first", 10, 10), op("other", 15, 10)) == {"first": 7.5, "other": 7.5}


def test_the_body_is_not_counted_as_part_of_the_loop() -> None:
    assert seconds(op("loop", 10, 20), op("inner", 12, 5), op("inner", 20, 5)) == {"loop": 10, "inner": 10}


def test_an_instruction_on_several_threads_lasts_until_its_end() -> None:
    assert seconds(op("first", 10, 1, key=3), end(18, 3), op("other", 30, 2)) == {"first": 8, "other": 2}


def test_a_late_end_event_is_bounded_by_dependent_instructions() -> None:
    assert seconds(op("first", 10, 1, key=3), op("second", 15, 7), end(40, 3)) == {"first": 5, "second": 7}
    # `other` does not wait for `first`.
    assert seconds(op("first", 10, 1, key=3), op("other", 15, 5), end(20, 3)) == {"first": 7.5, "other": 2.5}


def test_each_iteration_waits_for_the_previous_one() -> None:
    assert seconds(op("inner", 10, 1, key=3), op("inner", 16, 4), end(40, 3)) == {"inner": 10}


def test_events_of_other_programs_are_excluded() -> None:
    assert seconds(op("first", 10, 5), op("first", 30, 5, module="jit_g")) == {"first": 5}


def test_with_a_device_host_events_are_excluded() -> None:
    trace = Trace(
        [
            Plane("/host:CPU", [Line([mark(0), op("first", 5, 100)])]),
            Plane("/device:GPU:0", [Line([op("first", 10, 5)]), Line([op("second", 20, 5)])]),
            Plane("/device:GPU:1", [Line([op("first", 11, 5)])]),
        ]
    )
    ((_, devices),) = _events(trace, {"jit_f"})
    assert [sorted(event.name for event in events) for events in devices] == [["first", "second"], ["first"]]


def test_runs_are_separated_by_their_calls() -> None:
    calls = [mark(0, 0), op("first", 5, 1), mark(10, 1), op("other", 15, 1), mark(20, 0), op("first", 25, 1)]
    found = _events(Trace([Plane("/host:CPU", [Line(calls)])]), {"jit_f"})
    assert [(program, [event.name for event in events]) for program, (events,) in found] == [
        (0, ["first"]),
        (1, ["other"]),
        (0, ["first"]),
    ]
