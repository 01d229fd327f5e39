"""The time of a call by operation, scope and line: `profile`."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, Literal, get_args

import jax
import numpy as np

from ..._core.arguments import check_choice, check_count
from .._ir.cost import memory
from .._ir.traced_program import Compiled, TracedProgram
from .display import bars, check_groups, count, seconds, table
from .eager import Costs, evaluate_timed
from .timeline import timelines

Mode = Literal["compiled", "eager"]
Sort = Literal["time", "mean", "count", "flops", "bytes", "op", "scope", "source"]
Group = Literal["op", "scope", "source"]
_GROUPS: tuple[Group, ...] = get_args(Group)
# A run under the profiler that takes this many times as long as without it is mentioned.
_TOO_LONG = 1.5


@dataclass(frozen=True)
class Operation:
    """A row of a profile.

    Attributes:
      op: the operation of JAX, such as `dot_general`; for an instruction that XLA has added its own name, such as
        `copy`. An operation that JAX writes out as others, such as random numbers, is named after these.
      scope: the scopes it is in, such as `layers/0/attention`; empty where there are none.
      source: the line of the user's code, as `file:line`; empty where it is not known.
      count: the number of instructions that do it in a call, each as often as it runs; XLA may merge several operations
        of one name and line into one instruction. In eager mode: how often it runs.
      mean: seconds of one of these, the mean over the quicker half of the calls that were watched.
      share: its part of the time of a call, from 0 to 1.
      flops: floating point operations in a call, two for each multiplication of a product and one for each number of
        other arithmetic, integers and functions such as `tanh` included; none for sorting, Fourier transforms and
        decompositions. Over several devices, those of one.
      bytes: bytes read and written in a call, likewise; of a fusion in proportion to the time.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms.program import profile
      >>> (row,) = profile(jnp.sin, jnp.ones(3)).operations
      >>> row.op, row.count, row.flops, row.bytes
      ('sin', 1, 3, 24)
    """

    op: str
    scope: str
    source: str
    count: int
    mean: float
    share: float
    flops: int
    bytes: int


@dataclass(frozen=True)
class Profile:
    """The time of a call, by operation, scope and line.

    Attributes:
      operations: one row for each operation, scope and line; most time first.
      mode: `compiled` or `eager`.
      name: the name of the function.
      jitted: seconds of a call of the compiled function, the median of calls that were not watched.
      watched: seconds of a call as it was watched, of which `share` is a part: of the compiled program from the first
        operation to the last, over several devices on the slowest; in eager mode of all operations together. The mean
        over the quicker half of the calls.
      attributed: the part of it, from 0 to 1, that operations with a scope or a line account for.
      estimated: the part of it that several operations share, which XLA has fused; it is divided by their flops.
      apart: whether XLA's CPU backend would pass several operations at once to a library, or compile a small loop into
        one function, and was kept from it. The calls that were watched are then of a program of other instructions than
        those of `jitted`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms.program import profile
      >>> found = profile(lambda x: jnp.sin(x @ x), jnp.ones((64, 64)))
      >>> [line.split()[0] for line in found.table(by="op", sort="flops").splitlines()[-2:]]
      ['dot_general', 'sin']
    """

    operations: tuple[Operation, ...]
    mode: str
    name: str
    jitted: float
    watched: float
    attributed: float
    estimated: float
    apart: bool

    def table(self, *, sort: Sort = "time", top: int | None = 20, by: Group | Sequence[Group] = _GROUPS) -> str:
        """Return the profile as a table for a terminal.

        Args:
          sort: `time`, `mean`, `count`, `flops` or `bytes`, largest first; `op`, `scope` or `source` by the alphabet.
          top: how many rows to show; None shows all.
          by: what the rows are added up by: `op`, `scope`, `source` or several of these.

        Returns:
          The table, with a heading that describes what was measured.

        Raises:
          ValueError: `sort` or `by` is none of these; `top` is less than one.
          TypeError: `top` is not a whole number.
        """
        check_count("Profile.table", "top", top, optional=True)
        check_choice("Profile.table", "sort", sort, get_args(Sort))
        groups = check_groups("Profile.table", by, _GROUPS)
        rows = _grouped(self.operations, groups)
        rows.sort(key=attrgetter("share" if sort == "time" else sort), reverse=sort not in _GROUPS)
        head = [*groups, "count", "mean", "share", "flops", "bytes"]
        cells = [
            [_label(row, name) for name in groups]
            + [str(row.count), seconds(row.mean), f"{row.share:.1%}", count(row.flops), count(row.bytes)]
            for row in rows[:top]
        ]
        lines = [self.heading(), table(head, cells, len(groups))]
        if hidden := rows[len(cells) :]:
            lines.append(f"and {len(hidden)} more rows, {sum(row.share for row in hidden):.1%} of the time")
        return "\n".join(lines)

    def heading(self) -> str:
        """Return a description of what was measured."""
        if self.mode == "eager":
            return (
                f"{self.name}, operation by operation: {seconds(self.watched)} in all. This sum is not the time of the "
                f"compiled function, which takes {seconds(self.jitted)}."
            )
        text = (
            f"{self.name}, compiled: {seconds(self.jitted)} a call; {seconds(self.watched)} in the program while it is "
            f"watched, {self.attributed:.1%} of that attributed"
        )
        if self.estimated >= 0.0005:  # less would be printed as 0.0%
            text += f", {self.estimated:.1%} in fused operations, divided among them by their flops"
        if self.apart:
            text += (
                ".\nXLA puts several operations into one instruction here; these figures are of the program with each "
                "matrix product, convolution and loop kept apart"
            )
        if self.watched > _TOO_LONG * self.jitted:
            text += (
                ".\nWatching takes much of the time here, some tenths of a microsecond for each instruction that is "
                "run: trust the shares of longer ones only"
            )
        return text + "."

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain numbers, strings, lists and dicts, for `json` and pandas."""
        return {**asdict(self), "operations": [asdict(row) for row in self.operations]}

    def plot(self, *, by: Group = "scope", top: int = 15, ax: Any = None) -> Any:
        """Draw the largest shares of the time as bars; needs the extra `plot`.

        Args:
          by: `op`, `scope` or `source`.
          top: how many bars.
          ax: matplotlib axes, or None for new ones.

        Returns:
          The axes.

        Raises:
          ModuleNotFoundError: matplotlib is missing.
          ValueError: `by` is none of these; `top` is less than one.
          TypeError: `top` is not a whole number.
        """
        check_count("Profile.plot", "top", top)
        check_choice("Profile.plot", "by", by, _GROUPS)
        rows = sorted(_grouped(self.operations, (by,)), key=lambda row: -row.share)[:top]
        names = [_label(row, by) if getattr(row, by) else f"no {by}" for row in rows]
        label = f"% of the {seconds(self.watched)} of {self.name}, {self.mode}"
        return bars(names, [("", [row.share * 100 for row in rows])], label, ax)

    def __str__(self) -> str:
        """Return the table."""
        return self.table()


def profile(fun: Callable[..., Any], *args: Any, mode: Mode = "compiled", repeats: int = 10) -> Profile:
    """Measure where the time of `fun(*args)` goes.

    Compiled, the program runs under JAX's profiler, and the times of instructions in the trace are joined with the
    names and lines that the compiled program carries: time lands on `jax.named_scope`s, on the parts of NNX modules by
    their attributes (`layers/0/conv`), on Linen's modules, and on lines of source. Eager, each operation is run by
    itself as it is written, like the interpreter of the FX tutorial: its cost alone, not its cost in the compiled
    program.

    Args:
      fun: a function, a bound method or a module. NNX modules among its arguments, and those that it refers to, are not
        changed.
      *args: its arguments, of which numbers become arrays as under `jax.jit`.
      mode: `compiled` or `eager`.
      repeats: the number of calls that are watched, at least one; fewer, but three or more, of a program that runs very
        many instructions.

    Returns:
      A `Profile`: `print` it, or see `table`, `to_dict` and `plot`.

    Raises:
      TypeError: `fun` cannot be called, `repeats` is not a whole number, or the arguments have no values, as under
        `jax.jit`.
      ValueError: `mode` is neither, `repeats` is less than one.
      RuntimeError: the program runs nothing, so there is nothing to measure; JAX's profiler is running already.

    Cost:
      Compiling `fun` (twice where XLA's CPU backend keeps several operations in one instruction), and about twice
      `repeats` calls. A trace takes memory for each instruction that is run.

    Source:
      PyTorch's tutorial "Building a Simple CPU Performance Profiler with FX".

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from plurax.transforms.program import profile
      >>> def two(x):
      ...     with jax.named_scope("product"):
      ...         y = x @ x
      ...     with jax.named_scope("sine"):
      ...         return jnp.sin(y)
      >>> found = profile(two, jnp.ones((64, 64)))
      >>> sorted(row.scope for row in found.operations if row.flops)
      ['product', 'sine']
      >>> max(row.flops for row in found.operations) == 2 * 64**3
      True
    """
    check_choice("profile", "mode", mode, get_args(Mode))
    check_count("profile", "repeats", repeats)
    prepared = TracedProgram("profile", fun, args)
    # The program as it is, without the profiler: what the watched times are compared with.
    jitted = _clock(prepared.compiled, repeats)
    measure = _compiled if mode == "compiled" else _eager
    watched, costs, fused = measure(prepared, repeats)
    if not costs:
        raise RuntimeError(f"profile: `{prepared.name}` has nothing to measure; does it compute anything?")
    rows = [
        Operation(x.op, x.scope, x.source, int(number), time / number, time / watched, int(flops), round(moved))
        for x, (time, number, flops, moved) in ((place, cost.tolist()) for place, cost in costs.items())
    ]
    rows.sort(key=lambda row: -row.share)
    attributed = sum(row.share for row in rows if row.scope or row.source)
    apart = mode == "compiled" and prepared.separated is not prepared.compiled
    return Profile(tuple(rows), mode, prepared.name, jitted, watched, attributed, fused / watched, apart)


def _clock(compiled: Compiled, repeats: int) -> float:
    """Return the median time of a call, after one that does not count."""
    times = []
    for call in compiled.calls(repeats + 1):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _compiled(prepared: TracedProgram, repeats: int) -> tuple[float, Costs, float]:
    """Return the seconds of the compiled program, its costs, and the seconds in instructions that places share."""
    compiled = prepared.separated
    runs = _quickest(timelines([compiled], repeats)[0], lambda run: run.span)
    costs: Costs = defaultdict(lambda: np.zeros(4))
    fused = 0.0
    for name, times in runs[0].counts.items() if runs else ():
        instruction = compiled.program.instructions[name]
        took = sum(run.seconds.get(name, 0.0) for run in runs) / len(runs)
        moved = memory(compiled.program, instruction)  # of a fusion as one: it keeps intermediate results in registers
        parts = compiled.shares(instruction)
        for share in parts:
            costs[share.place] += (took * share.part, times, times * share.flops, times * moved * share.part)
        # Nothing is estimated where all parts are one operation in one scope, however the time is divided.
        fused += took if len({(share.place.op, share.place.scope) for share in parts}) > 1 else 0.0
    return sum(run.span for run in runs) / max(len(runs), 1), costs, fused


def _eager(prepared: TracedProgram, repeats: int) -> tuple[float, Costs, float]:
    """Return the same of the program evaluated operation by operation, where no places share anything."""
    # Flops and bytes need a lowering of each operation, so they are shared by all runs.
    known: dict[int, tuple[int, int]] = {}
    closed, arrays = prepared.traced.jaxpr, jax.tree.leaves(prepared.args)
    runs = [evaluate_timed(closed, arrays, known)[1] for _ in range(repeats + 1)]
    # The first has compiled every operation.
    quick = _quickest(runs[1:], _total)
    costs = {place: np.mean([run[place] for run in quick], axis=0) for place in quick[0]}
    return _total(costs), costs, 0.0


def _total(costs: Costs) -> float:
    """Return the seconds of all places together."""
    return float(sum(cost[0] for cost in costs.values()))


def _quickest(runs: Sequence[Any], time: Callable[[Any], float]) -> list[Any]:
    """Return the half of the runs that was disturbed least."""
    # Whole runs: a minimum or median for each operation would not add up to the time of a call.
    return sorted(runs, key=time)[: (len(runs) + 1) // 2]


def _grouped(rows: Iterable[Operation], groups: Sequence[str]) -> list[Operation]:
    """Add up the rows by some of their names."""
    together = defaultdict(list)
    for row in rows:
        together[tuple(getattr(row, name) if name in groups else "" for name in _GROUPS)].append(row)
    found = []
    for (op, scope, source), members in together.items():
        number, share, flops, moved = (
            sum(getattr(row, name) for row in members) for name in ("count", "share", "flops", "bytes")
        )
        # The mean is that of one instruction, so it is weighted by counts.
        mean = sum(row.mean * row.count for row in members) / number
        found.append(Operation(op, scope, source, number, mean, share, flops, moved))
    return found


def _label(row: Operation, name: str) -> str:
    value: str = getattr(row, name)
    return (os.path.basename(value) if name == "source" else value) or "-"
