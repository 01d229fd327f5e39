"""Timing that can be compared on a shared machine: candidates take turns, medians and quartiles are quoted."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
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
Tables = tuple[list[dict[str, Any]], list[dict[str, Any]]]  # rows, and ours against the quickest of others
OF_TORCH = ("torch", "opacus")  # whose rows compute on the CPU, so they are measured where ours do too


def peer(name: str) -> Any:
    """A library to compare with, or None where it is not installed."""
    if name in OF_TORCH and PLATFORM != "cpu":
        return None
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


def spread(values: Iterable[float]) -> dict[str, Any]:
    """A cell of a table: the median, the first and the third quartile, and of how many values."""
    values = list(values)
    quartiles = statistics.quantiles(values, n=4, method="inclusive")[::2] if len(values) > 1 else []
    return {"median": statistics.median(values), "quartiles": quartiles, "turns": len(values)}


def interleaved(candidates: dict[Any, Callable[[], Any]], *, rounds: int, seconds: float) -> dict[Any, dict[str, Any]]:
    """Time each candidate in turn, `rounds` times.

    A candidate is a function that returns what is to be waited for: JAX arrays, or anything that is ready at once. Its
    first call, which compiles, is timed apart. Each turn repeats the call for about `seconds`, and counts its mean.

    Returns:
      For each candidate its turns in ms, their spread, and the first call in s.
    """
    first, turns = {}, {}
    for name, call in candidates.items():
        first[name] = _time(call, 1)
        once = _time(call, 1)
        if once < seconds:
            once = min(once, _time(call, 1), _time(call, 1))
        turns[name] = max(1, int(seconds / once))
    times: dict[Any, list[float]] = {name: [] for name in candidates}
    for _ in tqdm(range(rounds), unit="round", leave=False):
        for name, call in candidates.items():
            times[name].append(_time(call, turns[name]) * 1e3)
    return {name: {"turns": found, "ms": spread(found), "first_s": first[name]} for name, found in times.items()}


def ratio(times: dict[Any, dict[str, Any]], name: Any, other: Any) -> dict[str, Any]:
    """How much longer `name` takes than `other`: a spread over the rounds, since a round's two share its noise."""
    pairs = zip(times[name]["turns"], times[other]["turns"], strict=True)
    return spread(mine / theirs for mine, theirs in pairs)


def quickest(times: dict[Any, dict[str, Any]], names: Iterable[Any]) -> Any:
    return min(names, key=lambda name: times[name]["ms"]["median"])


def claim(times: dict[Any, dict[str, Any]], ours: Any, others: Iterable[Any], what: str = "") -> dict[str, Any]:
    """Ours against the quickest of others: a row of the page's first table, whoever is quicker."""
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
    """What a process calls itself, and a candidate that has it take a step.

    It says "name" once it is ready, and "done" for each line that it reads, when it has taken a step. Between its steps
    it is stopped, since the threads of a library may go round and round while they wait.
    """
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def until(word: str) -> str:
            for said in process.stdout:
                first, _, rest = said.strip().partition(" ")
                if first == word:
                    process.send_signal(signal.SIGSTOP)
                    return rest
            raise RuntimeError(f"{command[0]}: the process ended where it should have said {word!r}")

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
    """How many instructions an optimized program has, all its computations counted."""
    return sum(" = " in line for line in compiled.as_text().splitlines())


def arguments(doc: str) -> argparse.ArgumentParser:
    """What every script takes."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="run everything small and once, write nothing")
    parser.add_argument("--only", default="", metavar="NAME", help="the tables with NAME in their titles; others stay")
    return parser


class Report:
    """The tables of a script, shown as they are measured and published at the end.

    Args:
      name: of the script and of its file.
      options: what the command line said.
      libraries: the distributions whose versions matter; those that are not there are named too.
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
        """Measure the tables that are wanted, each by a function that returns its rows and its claims; publish them."""
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

    def publish(self) -> None:
        """Write the file and render the page and its pictures, unless all was small."""
        if not self.tables:
            raise SystemExit(f"no table has {self.options.only!r} in its title")
        if self.options.smoke:
            return
        if self.options.only and self.path.exists():
            before = json.loads(self.path.read_text())
            if {key: before[key] for key in self.about} != self.about:
                raise SystemExit(f"{self.path.name} is of other versions or of another device: measure all its tables")
            self.tables = before["tables"] | self.tables
        self.path.write_text(json.dumps(self.about | {"tables": self.tables}, indent=1, ensure_ascii=False) + "\n")
        render.main(self.path.parent)


def _kind() -> str:
    """The accelerator, or of a CPU, which JAX just calls so, the processor."""
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
