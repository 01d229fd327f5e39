"""Timing for a shared machine: candidates run alternately, and results are medians with quartiles."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import render
from tqdm import tqdm

PLATFORM = jax.default_backend()
Tables = tuple[list[dict[str, Any]], list[dict[str, Any]]]  # rows, and comparisons with the fastest alternative
OF_TORCH = ("torch", "opacus")  # compute on the CPU, so they are measured only if JAX does too


def peer(name: str) -> Any:
    """Import a library to compare with; return None if it is not installed."""
    if name in OF_TORCH and PLATFORM != "cpu":
        return None
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


def spread(values: Iterable[float]) -> dict[str, Any]:
    """Return a table cell: the median, the first and third quartiles, and the number of values."""
    values = list(values)
    quartiles = statistics.quantiles(values, n=4, method="inclusive")[::2] if len(values) > 1 else []
    return {"median": statistics.median(values), "quartiles": quartiles, "turns": len(values)}


def interleaved(candidates: dict[Any, Callable[[], Any]], *, rounds: int, seconds: float) -> dict[Any, dict[str, Any]]:
    """Time candidates alternately, `rounds` times, each time in another order.

    A candidate returns the JAX arrays to wait for, or other objects, which count as ready. Its first call, which
    compiles, is timed separately. Each round repeats the call for about `seconds`, and takes the mean.

    Returns:
      For each candidate the times of its rounds in ms, their spread, and the time of the first call in s.
    """
    # Python's garbage collector would visit the objects of earlier tables, which costs short calls up to a third.
    gc.unfreeze()  # what was frozen for the table before and is no longer used can be freed
    gc.collect()
    gc.freeze()
    first, repeats = {}, {}
    for name, call in candidates.items():
        first[name] = _time(call, 1)
        once = _time(call, 1)
        if once < seconds:
            once = min(once, _time(call, 1), _time(call, 1))
        repeats[name] = max(1, int(seconds / once))
    times: dict[Any, list[float]] = {name: [] for name in candidates}
    # In a random order, since some leave the next one a slower machine, such as PyTorch, whose threads wait busily.
    order = random.Random(0)
    for _ in tqdm(range(rounds), unit="round", leave=False):
        for name in order.sample(list(candidates), len(candidates)):
            times[name].append(_time(candidates[name], repeats[name]) * 1e3)
    return {name: {"turns": found, "ms": spread(found), "first_s": first[name]} for name, found in times.items()}


def ratio(times: dict[Any, dict[str, Any]], name: Any, other: Any) -> dict[str, Any]:
    """Return the time of `name` over that of `other`, as a spread of ratios within a round, where noise cancels."""
    pairs = zip(times[name]["turns"], times[other]["turns"], strict=True)
    return spread(mine / theirs for mine, theirs in pairs)


def quickest(times: dict[Any, dict[str, Any]], names: Iterable[Any]) -> Any:
    return min(names, key=lambda name: times[name]["ms"]["median"])


def claim(times: dict[Any, dict[str, Any]], ours: Any, others: Iterable[Any], what: str = "") -> dict[str, Any]:
    """Compare ours with the fastest alternative: a row of the table of comparisons, whichever is faster."""
    best = quickest(times, others)
    return {
        "what": what,
        "ours": ours,
        "ours (ms)": times[ours]["ms"],
        "fastest other": best,
        "other (ms)": times[best]["ms"],
        "ours / other": ratio(times, ours, best),
    }


def _time(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats


@contextmanager
def another_process(*command: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Start a process; yield its name, and a candidate that makes it take a step.

    The process prints "name" and its name when it is ready, and "done" after the step for each line that it reads. It
    is stopped between steps, since the threads of a library may spin while they wait.
    """
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def until(word: str) -> str:
            for line in process.stdout:
                first, _, rest = line.strip().partition(" ")
                if first == word:
                    process.send_signal(signal.SIGSTOP)
                    return rest
            raise RuntimeError(f"{command[0]}: the process ended before it printed {word!r}")

        def call() -> None:
            process.send_signal(signal.SIGCONT)
            print("step", file=process.stdin, flush=True)
            until("done")

        try:
            yield until("name"), call
        finally:
            process.send_signal(signal.SIGCONT)
            process.stdin.close()


def instructions(compiled: Any) -> int:
    """Count the instructions of an optimized program, in all its computations."""
    return sum(" = " in line for line in compiled.as_text().splitlines())


def arguments(doc: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every script."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="run small cases once, and write nothing")
    parser.add_argument("--only", default="", metavar="NAME", help="measure only tables with NAME in their titles")
    return parser


class Report:
    """The tables of a script, printed as they are measured, and written at the end.

    Args:
      name: name of the script and of its JSON file.
      options: parsed command line.
      libraries: distributions whose versions to record; missing ones are recorded as such.
    """

    def __init__(self, name: str, options: argparse.Namespace, *libraries: str) -> None:
        self.path = render.HERE / (f"{name}.json" if PLATFORM == "cpu" else f"{name}.{PLATFORM}.json")
        self.options = options
        self.about = {
            "versions": {"Python": platform.python_version()} | {name: _version(name) for name in ("jax", *libraries)},
            "device": {"platform": PLATFORM, "kind": _kind(), "cores": os.cpu_count()},
        }
        self.tables: dict[str, Any] = {}

    def measure(self, parts: dict[str, Callable[[], Tables]]) -> None:
        """Measure and publish the selected tables, each by a function that returns its rows and its claims."""
        for title, part in parts.items():
            if self.wants(title):
                rows, claims = part()
                self.add(title, rows, *claims)
        self.publish()

    def wants(self, title: str) -> bool:
        return self.options.only.lower() in title.lower()

    def add(self, title: str, rows: list[dict[str, Any]], *claims: dict[str, Any]) -> None:
        self.tables[title] = {"rows": rows, "claims": list(claims)}
        print(f"### {title}", *map(render.table, filter(None, (rows, list(claims)))), sep="\n\n", flush=True)
        # Compiled programs hold memory maps, of which a process may have 65,530: all tables of a script need more.
        jax.clear_caches()
        gc.collect()

    def publish(self) -> None:
        """Write the file and render the pages and pictures, except after a smoke run."""
        if not self.tables:
            raise SystemExit(f"no table has {self.options.only!r} in its title")
        if self.options.smoke:
            return
        if self.options.only and self.path.exists():
            before = json.loads(self.path.read_text())
            if {key: before[key] for key in self.about} != self.about:
                raise SystemExit(f"{self.path.name} has other versions or another device; measure all its tables")
            self.tables = before["tables"] | self.tables
        self.path.write_text(json.dumps(self.about | {"tables": self.tables}, indent=1, ensure_ascii=False) + "\n")
        render.main(self.path.parent)


def _kind() -> str:
    """Return the kind of the accelerator, or the model of the processor, which JAX does not report."""
    if PLATFORM != "cpu":
        return jax.devices()[0].device_kind
    about = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", about.read_text(), re.MULTILINE) if about.exists() else []
    return names[0] if names else platform.machine()


def _version(name: str) -> str | None:
    try:
        return None if name in OF_TORCH and PLATFORM != "cpu" else metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
