"""The time of each instruction of a compiled program, from a trace of its runs by JAX's profiler."""

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

# The annotation of each call in the trace, followed by the index of the program.
_MARK = "plurax program "
# Reading a trace takes one second for about 20,000 executed instructions. If all runs would execute more than this many
# in total, programs run less often, but at least three times.
_EVENTS, _LEAST_RUNS = 100_000, 3


@dataclass(frozen=True)
class Timeline:
    """The times of one run of a program.

    Attributes:
      seconds: the time of each instruction. Concurrent instructions share their time equally; the time of a loop
        excludes its body.
      counts: the number of runs of each instruction.
      span: the time from the first start to the last end, in seconds.
    """

    seconds: dict[str, float]
    counts: dict[str, int]
    span: float


def timelines(programs: Sequence[Compiled], runs: int) -> list[list[Timeline]]:
    """Run several programs alternately under the profiler, `runs` times each, or fewer if they have many instructions.

    Each program runs once before that, since a first call is slower.

    Returns:
      For each program, its runs; on several devices, each on the device that took longest.
    """
    # Alternate, so that a change in the load of the machine affects all programs.
    events = sum(times for compiled in programs for _, times in compiled.program.runs())
    runs = min(runs, max(_EVENTS // max(events, 1), _LEAST_RUNS))
    calls = [compiled.calls(runs + 1) for compiled in programs]
    jax.block_until_ready([calls_of_program.pop()() for calls_of_program in calls])
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # do not record Python calls, which takes time
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            for i in range(runs):
                for j, calls_of_program in enumerate(calls):
                    with jax.profiler.TraceAnnotation(f"{_MARK}{j}"):
                        jax.block_until_ready(calls_of_program[i]())
        (path,) = Path(directory).rglob("*.xplane.pb")
        with warnings.catch_warnings():
            # Since Python 3.12, its types warn on first use; turned into an error, this would end the process.
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
    """Return, for each run, the index of its program and its instructions on each device."""
    # A trace has planes for the host and each device; a plane has lines, such as threads; a line has events.
    planes = [(plane.name, [event for line in plane.lines for event in line.events]) for plane in profile.planes]
    marks = sorted(
        (event.start_ns, int(event.name.removeprefix(_MARK)))
        for _, events in planes
        for event in events
        if event.name.startswith(_MARK)
    )
    # An instruction that is divided among threads returns at once. An event "end: ..." marks its actual end; the
    # consumer id (`_c`) of that event is the producer id (`_p`) of the instruction.
    ends = {
        dict(event.stats).get("_c"): (event.start_ns + event.duration_ns) * 1e-9
        for _, events in planes
        for event in events
        if event.name.startswith("end: ")
    }
    # On a GPU, both the host, which enqueues, and the device, which computes, record events of instructions.
    on_device = any(name.startswith("/device:") for name, _ in planes)
    runs: dict[Any, list[_Event]] = defaultdict(list)
    for name, events in planes:
        for event in events if name.startswith("/device:") or not on_device else ():
            stats = dict(event.stats)
            if stats.get("hlo_module") in modules and "hlo_op" in stats:
                end = (event.start_ns + event.duration_ns) * 1e-9
                end = max(end, ends.get(stats.get("_p", ""), end))
                # A call ends before the next one starts, so the last mark before an event belongs to its call.
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
    # An event ends no later than its dependents start, but its end may be recorded after they have run: correct it.
    starts: dict[str, float] = {}
    for event in reversed(events):
        later = [starts[name] for name in (event.name, *program.waiting(event.name)) if name in starts]
        event.end = max(event.start, min([event.end, *later]))
        starts[event.name] = event.start
    seconds: dict[str, float] = defaultdict(float)
    changes = [(time, i) for i, x in enumerate(events) if x.end > x.start for time in (x.start, x.end)]
    changes.sort()
    # Sweep over starts and ends: the time between two of them is divided equally among the running instructions. A loop
    # receives time only while no instruction in it is running.
    active: set[int] = set()
    loops: set[int] = set()
    before = 0.0
    for time, i in changes:
        running = active or loops
        for j in running:
            seconds[events[j].name] += (time - before) / len(running)
        before = time
        instruction = program.instructions.get(events[i].name)
        # Each event occurs twice: it is added at its start and removed at its end.
        (loops if instruction and instruction.opcode in CONTAINERS else active).symmetric_difference_update([i])
    span = max(x.end for x in events) - events[0].start
    return Timeline(dict(seconds), dict(Counter(x.name for x in events)), span)
