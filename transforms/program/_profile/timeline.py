"""The time that each instruction of a compiled program takes, from a trace of its runs by JAX's profiler."""

from __future__ import annotations

import bisect
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from .._ir.hlo import CONTAINERS, HloProgram
from .._ir.traced_program import Compiled

# An annotation around each call in the trace, followed by the number of the program.
_MARK = "plurax program "
# Reading a trace takes a second for about 20,000 instructions that were run. So a program of more than this many in all
# runs less often, but three times at least.
_EVENTS, _LEAST_RUNS = 100_000, 3


@dataclass(frozen=True)
class Timeline:
    """One run.

    Attributes:
      seconds: the time of each instruction. Instructions that run at once share it; the time of a loop's body does not
        count for the loop.
      counts: how often each was run.
      span: the time from the first beginning to the last end.
    """

    seconds: dict[str, float]
    counts: dict[str, int]
    span: float


def timelines(programs: Sequence[Compiled], runs: int) -> list[list[Timeline]]:
    """Run some programs alternately under the profiler, each so many times, or fewer if they have many instructions.

    Each runs once before that, since a first call is slower.

    Returns:
      For each program its runs; over several devices, those on the device that took longest.
    """
    # Alternately, so that a change in the load of the machine meets all of them.
    events = sum(times for compiled in programs for _, times in compiled.program.runs())
    runs = min(runs, max(_EVENTS // max(events, 1), _LEAST_RUNS))
    calls = [compiled.calls(runs + 1) for compiled in programs]
    jax.block_until_ready([calls_of_program.pop()() for calls_of_program in calls])
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # no calls of Python, whose recording takes time
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            for i in range(runs):
                for j, calls_of_program in enumerate(calls):
                    with jax.profiler.TraceAnnotation(f"{_MARK}{j}"):
                        jax.block_until_ready(calls_of_program[i]())
        (path,) = Path(directory).rglob("*.xplane.pb")
        with warnings.catch_warnings():
            # From Python 3.12 on, its types warn when they are first used; as an error that would end the process.
            warnings.filterwarnings("ignore", ".*has no __module__ attribute", DeprecationWarning)
            found = _events(jax.profiler.ProfileData.from_file(str(path)), {compiled.module for compiled in programs})
    runs_of: list[list[Timeline]] = [[] for _ in programs]
    for which, devices in found:
        runs_of[which].append(max((_timeline(programs[which].program, x) for x in devices), key=lambda run: run.span))
    return runs_of


@dataclass
class _Event:
    name: str
    start: float
    end: float


def _events(profile: Any, modules: set[str]) -> list[tuple[int, list[list[_Event]]]]:
    """Return for each run the number of its program, and its instructions on each device."""
    # A trace has planes, of the host and of each device; a plane has lines, such as threads; a line has events.
    planes = [(plane.name, [event for line in plane.lines for event in line.events]) for plane in profile.planes]
    marks = sorted(
        (event.start_ns, int(event.name.removeprefix(_MARK)))
        for _, events in planes
        for event in events
        if event.name.startswith(_MARK)
    )
    # An instruction that is divided among threads returns at once; when it is done there is an event "end: ...", whose
    # consumer id (`_c`) is the producer id (`_p`) of the first.
    ends = {
        dict(event.stats).get("_c"): (event.start_ns + event.duration_ns) * 1e-9
        for _, events in planes
        for event in events
        if event.name.startswith("end: ")
    }
    # On a GPU both the host, which enqueues, and the device, which computes, have events of instructions.
    on_device = any(name.startswith("/device:") for name, _ in planes)
    runs: dict[Any, list[_Event]] = defaultdict(list)
    for name, events in planes:
        for event in events if name.startswith("/device:") or not on_device else ():
            stats = dict(event.stats)
            if stats.get("hlo_module") in modules and "hlo_op" in stats:
                end = (event.start_ns + event.duration_ns) * 1e-9
                end = max(end, ends.get(stats.get("_p", ""), end))
                # A call has ended before the next one begins, so the last mark before an event is that of its call.
                call = max(bisect.bisect(marks, (event.start_ns, len(marks))) - 1, 0)
                found = _Event(stats["hlo_op"], event.start_ns * 1e-9, end)
                runs[call, name, stats.get("device_ordinal")].append(found)
    calls: dict[int, list[list[_Event]]] = defaultdict(list)
    for (call, *_), events in runs.items():
        calls[call].append(events)
    return [(marks[call][1], calls[call]) for call in sorted(calls)]


def _timeline(program: HloProgram, events: list[_Event]) -> Timeline:
    """Compute the time of each instruction from the events of one run on one device."""
    events.sort(key=lambda event: event.start)
    # No event ends later than those that need its result begin: its own end may be recorded after they have run.
    starts: dict[str, float] = {}
    for event in reversed(events):
        later = [starts[name] for name in (event.name, *program.waiting(event.name)) if name in starts]
        event.end = max(event.start, min([event.end, *later]))
        starts[event.name] = event.start
    seconds: dict[str, float] = defaultdict(float)
    changes = [(time, i) for i, x in enumerate(events) if x.end > x.start for time in (x.start, x.end)]
    changes.sort()
    # A sweep over beginnings and ends: the time between two of them belongs to the instructions that are running, in
    # equal parts, and to loops only while nothing in them is.
    active: set[int] = set()
    loops: set[int] = set()
    before = 0.0
    for time, i in changes:
        running = active or loops
        for j in running:
            seconds[events[j].name] += (time - before) / len(running)
        before = time
        instruction = program.instructions.get(events[i].name)
        # Each event comes twice, and is added when it begins and removed when it ends.
        (loops if instruction and instruction.opcode in CONTAINERS else active).symmetric_difference_update([i])
    span = max(x.end for x in events) - events[0].start
    return Timeline(dict(seconds), dict(Counter(x.name for x in events)), span)
