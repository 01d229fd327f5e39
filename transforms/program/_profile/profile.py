"""`profile`: measure the time of a call by operation, scope and source line."""

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
# The heading mentions if a run under the profiler takes more than this many times as long as without it.
_TOO_LONG = 1.5


@dataclass(frozen=True)
class Operation:
    """A row of a profile: an operation at one scope and source line.

    Attributes:
      op: the JAX operation, such as `dot_general`; for an instruction that XLA has added, its opcode, such as `copy`.
        An operation that JAX lowers to others, such as random numbers, appears under the names of these.
      scope: its named scopes, such as `layers/0/attention`; empty if there are none.
      source: the line of user code, as `file:line`; empty if unknown.
      count: the number of instruction runs in a call; XLA may merge several operations of one name and line into one
        instruction. In eager mode, the number of runs of the operation.
      mean: seconds of one run, the mean over the faster half of the profiled calls.
      share: its fraction of the time of a call, from 0 to 1.
      flops: floating point operations in a call: two for each multiplication of a product, and one per element of
        other arithmetic, including integers and functions such as `tanh`; zero for sorting, Fourier transforms and
        decompositions. On several devices, those of one device.
      bytes: bytes read and written in a call, on one device; for a fusion, divided in proportion to the time.

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
    """The time of a call, by operation, scope and source line.

    Attributes:
      operations: one row for each operation, scope and source line, in order of decreasing time.
      mode: `compiled` or `eager`.
      name: the name of the function.
      jitted: seconds of a call of the compiled function without the profiler, the median over calls.
      watched: seconds of a profiled call, the total to which `share` refers: from the first operation of the compiled
        program to the last, on the slowest of several devices; in eager mode, the sum over all operations. The mean
        over the faster half of the calls.
      attributed: the fraction of `watched`, from 0 to 1, of operations with a scope or a source line.
      estimated: the fraction of `watched` in fusions of several operations, which is divided by their flops.
      apart: whether the profiled program was compiled with other options, because XLA's CPU backend would pass several
        operations to a library at once, or compile a small loop into one function. `watched` and `jitted` are then
        times of different programs.

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
          sort: the column to sort by: `time`, `mean`, `count`, `flops` or `bytes`, largest first; or `op`, `scope` or
            `source`, alphabetically.
          top: the number of rows to show; None shows all.
          by: the columns to group rows by: `op`, `scope`, `source`, or several of these.

        Returns:
          The table, below a heading that describes the measurement.

        Raises:
          ValueError: an unknown `sort` or `by`; `top` is less than one.
          TypeError: `top` is not an int.
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
        """Return a description of the measurement."""
        if self.mode == "eager":
            return (
                f"{self.name}, operation by operation: {seconds(self.watched)} in all. This sum is not the time of the "
                f"compiled function, which takes {seconds(self.jitted)}."
            )
        text = (
            f"{self.name}, compiled: {seconds(self.jitted)} a call; {seconds(self.watched)} under the profiler, "
            f"{self.attributed:.1%} of it attributed"
        )
        if self.estimated >= 0.0005:  # less would be printed as 0.0%
            text += f", {self.estimated:.1%} estimated (fused operations, in proportion to their flops)"
        if self.apart:
            text += (
                ".\nXLA combines several operations into one instruction here; these figures are from a program that "
                "keeps each matrix product, convolution and loop separate"
            )
        if self.watched > _TOO_LONG * self.jitted:
            text += (
                ".\nThe profiler itself takes much of the time here, some tenths of a microsecond for each executed "
                "instruction: trust only the shares of longer ones"
            )
        return text + "."

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as a dict of plain numbers, strings and lists, for `json` and pandas."""
        return {**asdict(self), "operations": [asdict(row) for row in self.operations]}

    def plot(self, *, by: Group = "scope", top: int = 15, ax: Any = None) -> Any:
        """Plot the largest shares of the time as a bar chart; needs the extra `plot`.

        Args:
          by: the column to group rows by: `op`, `scope` or `source`.
          top: the number of bars.
          ax: matplotlib axes, or None for new ones.

        Returns:
          The matplotlib axes.

        Raises:
          ModuleNotFoundError: matplotlib is missing.
          ValueError: an unknown `by`; `top` is less than one.
          TypeError: `top` is not an int.
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
    """Measure the time of `fun(*args)` by operation, scope and source line.

    In compiled mode, the program runs under JAX's profiler, and the times of its instructions are attributed by the
    names and source lines in the compiled program: to each `jax.named_scope`, to the parts of NNX modules by their
    attribute paths (`layers/0/conv`), to Linen modules, and to lines of user code. In eager mode, each operation runs
    separately, like the interpreter of the FX tutorial: this measures its cost in isolation, not its cost in the
    compiled program.

    Args:
      fun: a function, a bound method or a module. NNX modules in its arguments, and those that it closes over, are not
        changed.
      *args: its arguments; numbers become arrays as under `jax.jit`.
      mode: `compiled` or `eager`.
      repeats: the number of profiled calls, at least one. A program that runs very many instructions is profiled fewer
        times, but at least three.

    Returns:
      A `Profile`: `print` it, or use `table`, `to_dict` and `plot`.

    Raises:
      TypeError: `fun` is not callable, `repeats` is not an int, or the arguments have no values, as inside `jax.jit`.
      ValueError: `mode` is neither `compiled` nor `eager`, or `repeats` is less than one.
      RuntimeError: the program runs no operation; JAX's profiler is already running.

    Cost:
      Compiling `fun` (twice if XLA's CPU backend combines several operations into one instruction), and about twice
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
    # Time the program with its own settings and without the profiler, for comparison.
    jitted = _clock(prepared.compiled, repeats)
    measure = _compiled if mode == "compiled" else _eager
    watched, costs, fused = measure(prepared, repeats)
    if not costs:
        raise RuntimeError(f"profile: `{prepared.name}` runs no operation, so there is nothing to measure.")
    rows = [
        Operation(x.op, x.scope, x.source, int(number), time / number, time / watched, int(flops), round(moved))
        for x, (time, number, flops, moved) in ((place, cost.tolist()) for place, cost in costs.items())
    ]
    rows.sort(key=lambda row: -row.share)
    attributed = sum(row.share for row in rows if row.scope or row.source)
    apart = mode == "compiled" and prepared.separated is not prepared.compiled
    return Profile(tuple(rows), mode, prepared.name, jitted, watched, attributed, fused / watched, apart)


def _clock(compiled: Compiled, repeats: int) -> float:
    """Return the median time of a call, after one warm-up call."""
    times = []
    for call in compiled.calls(repeats + 1):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _compiled(prepared: TracedProgram, repeats: int) -> tuple[float, Costs, float]:
    """Return the seconds of the compiled program, its costs, and the seconds in fusions of several operations."""
    compiled = prepared.separated
    runs = _quickest(timelines([compiled], repeats)[0], lambda run: run.span)
    costs: Costs = defaultdict(lambda: np.zeros(4))
    fused = 0.0
    for name, times in runs[0].counts.items() if runs else ():
        instruction = compiled.program.instructions[name]
        took = sum(run.seconds.get(name, 0.0) for run in runs) / len(runs)
        moved = memory(compiled.program, instruction)  # of a whole fusion: its intermediate values stay in registers
        parts = compiled.shares(instruction)
        for share in parts:
            costs[share.place] += (took * share.part, times, times * share.flops, times * moved * share.part)
        # If all parts are one operation in one scope, the division of the time is not an estimate.
        fused += took if len({(share.place.op, share.place.scope) for share in parts}) > 1 else 0.0
    return sum(run.span for run in runs) / max(len(runs), 1), costs, fused


def _eager(prepared: TracedProgram, repeats: int) -> tuple[float, Costs, float]:
    """Return the same for the program evaluated operation by operation, which has no fusions."""
    # Flops and bytes need a lowering of each operation, so compute them once for all runs.
    known: dict[int, tuple[int, int]] = {}
    closed, arrays = prepared.traced.jaxpr, jax.tree.leaves(prepared.args)
    runs = [evaluate_timed(closed, arrays, known)[1] for _ in range(repeats + 1)]
    # Drop the first run, which compiles every operation.
    quick = _quickest(runs[1:], _total)
    costs = {place: np.mean([run[place] for run in quick], axis=0) for place in quick[0]}
    return _total(costs), costs, 0.0


def _total(costs: Costs) -> float:
    """Return the total seconds of all operations."""
    return float(sum(cost[0] for cost in costs.values()))


def _quickest(runs: Sequence[Any], time: Callable[[Any], float]) -> list[Any]:
    """Return the faster half of the runs, which were disturbed least."""
    # Select whole runs: minima or medians of single operations would not add up to the time of a call.
    return sorted(runs, key=time)[: (len(runs) + 1) // 2]


def _grouped(rows: Iterable[Operation], groups: Sequence[str]) -> list[Operation]:
    """Add up the rows with equal names in the columns `groups`."""
    together = defaultdict(list)
    for row in rows:
        together[tuple(getattr(row, name) if name in groups else "" for name in _GROUPS)].append(row)
    found = []
    for (op, scope, source), members in together.items():
        number, share, flops, moved = (
            sum(getattr(row, name) for row in members) for name in ("count", "share", "flops", "bytes")
        )
        # The mean is per run of an instruction, so weight it by counts.
        mean = sum(row.mean * row.count for row in members) / number
        found.append(Operation(op, scope, source, number, mean, share, flops, moved))
    return found


def _label(row: Operation, name: str) -> str:
    value: str = getattr(row, name)
    return (os.path.basename(value) if name == "source" else value) or "-"
