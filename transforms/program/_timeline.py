"""How long each instruction of a compiled program takes, from a trace of its runs."""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ._hlo import CONTAINERS, Program
from ._prepared import Compiled


@dataclass(frozen=True)
class Timeline:
    """One run.

    Attributes:
      seconds: for each instruction how long it was at work. Where several are at once, they share the time; what a
        loop runs is not counted to the loop.
      counts: how often each was run.
      span: from the first beginning to the last end.
    """

    seconds: dict[str, float]
    counts: dict[str, int]
    span: float


def timelines(compiled: Compiled, runs: int) -> list[Timeline]:
    """Run a program some times under the profiler."""
    calls = compiled.calls(runs)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            for call in calls:
                jax.block_until_ready(call())
        (path,) = Path(directory).rglob("*.xplane.pb")
        found = _events(jax.profiler.ProfileData.from_file(str(path)), compiled.module)
    return [_timeline(compiled.program, events) for events in found.values()]


@dataclass
class _Event:
    name: str
    start: float
    end: float


def _events(profile: Any, module: str) -> dict[Any, list[_Event]]:
    """The instructions that were run, by the run and the device."""
    planes = [(plane.name, list(plane.lines)) for plane in profile.planes]
    # On a GPU both the host, which enqueues, and the device, which computes, speak of instructions.
    on_device = [lines for name, lines in planes if name.startswith("/device:")]
    runs: dict[Any, list[_Event]] = defaultdict(list)
    begun: dict[int, _Event] = {}
    ends: dict[int, float] = {}
    for lines in on_device or [lines for _, lines in planes]:
        for line in lines:
            for event in line.events:
                stats = dict(event.stats)
                if stats.get("hlo_module") == module and "hlo_op" in stats:
                    found = _Event(stats["hlo_op"], event.start_ns * 1e-9, event.end_ns * 1e-9)
                    runs[stats.get("run_id"), stats.get("device_ordinal")].append(found)
                    if "_p" in stats:
                        begun[stats["_p"]] = found
                elif event.name.startswith("end: ") and "_c" in stats:
                    ends[stats["_c"]] = event.end_ns * 1e-9
    for key, event in begun.items():
        # One that is divided among threads returns at once, and says so when it is done.
        event.end = max(event.end, ends.get(key, event.end))
    return runs


def _timeline(program: Program, events: list[_Event]) -> Timeline:
    events.sort(key=lambda event: event.start)
    _bound(program, events)
    seconds: dict[str, float] = defaultdict(float)
    changes = sorted([(x.start, True, i) for i, x in enumerate(events)] + [(x.end, False, i) for i, x in enumerate(events)])
    active: set[int] = set()
    loops: set[int] = set()
    before = 0.0
    for time, begins, i in changes:
        at_work = active or loops
        for j in at_work:
            seconds[events[j].name] += (time - before) / len(at_work)
        before = time
        instruction = program.instructions.get(events[i].name)
        group = loops if instruction and instruction.opcode in CONTAINERS else active
        (group.add if begins else group.discard)(i)
    span = max(x.end for x in events) - events[0].start
    return Timeline(dict(seconds), dict(Counter(x.name for x in events)), span)


def _bound(program: Program, events: list[_Event]) -> None:
    """Let none end later than what needs its result begins: its own word may come after the next ones have run."""
    starts: dict[str, list[float]] = defaultdict(list)
    for event in reversed(events):
        later = [starts[name][-1] for name in (event.name, *program.waiting(event.name)) if starts[name]]
        event.end = max(event.start, min([event.end, *later]))
        starts[event.name].append(event.start)
