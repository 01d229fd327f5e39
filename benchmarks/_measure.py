"""Timing that can be compared on a shared machine: candidates take turns, medians are quoted."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

HERE = Path(__file__).parent


def interleaved(candidates: dict[str, Callable[[], Any]], *, rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Time each candidate in turn, `rounds` times.

    A candidate is a function that returns what is to be waited for: JAX arrays, or anything that is ready at once. Its
    first call, which compiles, is timed apart. Each turn repeats the call for about `seconds`, and counts its mean.

    Returns:
      For each candidate its turns in ms, their median, the spread from the first to the third quartile, and the first
      call in ms.
    """
    first, turns = {}, {}
    for name, call in candidates.items():
        first[name] = _time(call, 1)
        once = _time(call, 1)
        if once < seconds:
            once = min(once, _time(call, 1), _time(call, 1))
        turns[name] = max(1, int(seconds / once))
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in tqdm(range(rounds), unit="round", leave=False):
        for name, call in candidates.items():
            times[name].append(_time(call, turns[name]))
    return {
        name: {
            "median_ms": statistics.median(values) * 1e3,
            "quartiles_ms": [q * 1e3 for q in statistics.quantiles(values, n=4)[::2]],
            "first_call_ms": first[name] * 1e3,
            "turns_ms": [value * 1e3 for value in values],
        }
        for name, values in times.items()
    }


def ratio(times: dict[str, dict[str, Any]], name: str, peer: str) -> float:
    """How much longer `name` takes than `peer`: the median over the rounds, since a round's two share its noise."""
    pairs = zip(times[name]["turns_ms"], times[peer]["turns_ms"], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def _time(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats


def instructions(compiled: Any) -> int:
    """How many instructions an optimised program has, all its computations counted."""
    return sum(" = " in line for line in compiled.as_text().splitlines())


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table, with the keys of the first as its head."""
    head = list(rows[0])
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(str(row.get(key, "")) for key in head) + " |" for row in rows]
    return "\n".join(lines)


def publish(name: str, text: str, results: Any) -> None:
    """Write `results` as JSON, and put `text` between the marks `<!-- name -->` of the page of benchmarks."""
    (HERE / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    page = HERE / "README.md"
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    content = page.read_text()
    before, rest = content.split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")
