"""`trace_diff`: compare the operations and times of two programs."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from ..._core.arguments import check_callable, check_choice, check_count
from .._ir.traced_program import TracedProgram
from .capture import Capture, captures, read_capture
from .display import bars, check_groups, seconds, table

Sort = Literal["change", "duration", "count", "op", "scope"]
Group = Literal["op", "scope"]
Groups = Group | Sequence[Group]
_GROUPS: tuple[Group, ...] = get_args(Group)
_MICRO = 1e6
# Thresholds for a change of duration, relative to the larger of both durations and to the time of a call.
_LEAST, _LEAST_OF_ALL = 0.1, 0.01
# The fraction of runs at each end that the spread of durations excludes.
_TAIL = 0.1

_SORTS: dict[Sort, Callable[[Difference], Any]] = {
    "change": lambda row: -abs(row.diff_duration),
    "duration": lambda row: -max(row.control_total_duration, row.test_total_duration),
    "count": lambda row: -abs(row.diff_counts),
    "op": lambda row: (row.op, row.scope),
    "scope": lambda row: (row.scope, row.op),
}

Category = Literal["added", "deleted", "increased", "decreased", "unchanged"]


@dataclass(frozen=True)
class Difference:
    """An operation in two programs. Durations are medians over the runs, in microseconds per call.

    Attributes:
      op: the operation, such as `dot_general`; empty in rows that are grouped by scope.
      scope: its named scopes; empty in rows that are grouped by operation.
      control_counts: the number of runs in a call of the control, see `trace_diff`.
      test_counts: the number of runs in a call of the test.
      control_total_duration: the total duration of the runs in the control.
      test_total_duration: the total duration of the runs in the test.
      diff_counts: `test_counts - control_counts`.
      diff_duration: `test_total_duration - control_total_duration`.
      counts_change_categories: `+` if it runs more often in the test, `-` if less often, `=` if equally often.
      noise: the variation of both durations from run to run, added up.
      category: `added` and `deleted` if it runs in only one of the two; `increased` and `decreased` if it runs more or
        less often, or equally often but longer or shorter by more than the noise; otherwise `unchanged`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms.program import trace_diff
      >>> (row,) = trace_diff(jnp.sin, jnp.sin, jnp.ones(3)).differences()
      >>> row.op, row.control_counts, row.test_counts, row.category
      ('sin', 1, 1, 'unchanged')
    """

    op: str
    scope: str
    control_counts: int
    test_counts: int
    control_total_duration: float
    test_total_duration: float
    diff_counts: int
    diff_duration: float
    counts_change_categories: Literal["+", "-", "="]
    noise: float
    category: Category


@dataclass(frozen=True)
class TraceDiff:
    """The differences between two programs.

    Attributes:
      control: the `Capture` of the first program, with its operations and times.
      test: the `Capture` of the second.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms.program import trace_diff
      >>> found = trace_diff(jnp.sin, jnp.cos, jnp.ones(3))
      >>> [row.op for row in found.added], [row.op for row in found.deleted]
      (['cos'], ['sin'])
    """

    control: Capture
    test: Capture

    @property
    def same_program(self) -> bool:
        """Return whether instructions and machine are the same for both; then no duration counts as changed."""
        return (self.control.program, self.control.machine) == (self.test.program, self.test.machine)

    @property
    def added(self) -> tuple[Difference, ...]:
        """Return the operations that only the test runs."""
        return self._of("added")

    @property
    def deleted(self) -> tuple[Difference, ...]:
        """Return the operations that only the control runs."""
        return self._of("deleted")

    @property
    def increased(self) -> tuple[Difference, ...]:
        """Return the operations that run more often in the test, or longer by more than the noise."""
        return self._of("increased")

    @property
    def decreased(self) -> tuple[Difference, ...]:
        """Return the operations that run less often in the test, or shorter by more than the noise."""
        return self._of("decreased")

    @property
    def unchanged(self) -> tuple[Difference, ...]:
        """Return all other operations."""
        return self._of("unchanged")

    def _of(self, category: Category) -> tuple[Difference, ...]:
        return tuple(row for row in self.differences() if row.category == category)

    def differences(self, by: Groups = _GROUPS) -> tuple[Difference, ...]:
        """Return a row for each operation of either program.

        Args:
          by: the columns to group rows by: `op`, `scope`, or both.

        Returns:
          The rows, sorted by operation and scope.

        Raises:
          ValueError: an unknown `by`.
        """
        groups = check_groups("TraceDiff", by, _GROUPS)
        runs = [_added_up(x, groups) for x in (self.control, self.test)]
        least = _LEAST_OF_ALL * max(map(_call, (self.control, self.test)))
        # Durations are comparable only for different programs on equal machines; for the same program they are noise.
        comparable = self.control.machine == self.test.machine and not self.same_program
        rows = []
        for op, scope in sorted(runs[0].keys() | runs[1].keys()):
            # An operation that a program does not run has count 0 and duration 0.
            control, test = (x.get((op, scope), (0, [0.0])) for x in runs)
            before, after = statistics.median(control[1]), statistics.median(test[1])
            # The noise of a difference is the sum of both spreads.
            more, longer, noise = test[0] - control[0], after - before, _spread(control[1]) + _spread(test[1])
            category: Category = "unchanged"
            if not control[0] or not test[0]:
                category = "deleted" if control[0] else "added"
            elif more or (comparable and abs(longer) > max(least, noise, _LEAST * max(before, after))):
                category = "increased" if (more or longer) > 0 else "decreased"
            sign: Literal["+", "-", "="] = "+" if more > 0 else "-" if more < 0 else "="
            rows.append(Difference(op, scope, control[0], test[0], before, after, more, longer, sign, noise, category))
        return tuple(rows)

    def table(
        self, *, sort: Sort = "change", top: int | None = 20, by: Groups = _GROUPS, unchanged: bool = False
    ) -> str:
        """Return the differences as a table for a terminal.

        Args:
          sort: the order of rows: `change` (of duration), `duration` (the longer of both) or `count` (its change),
            largest first; or `op` or `scope`, alphabetically.
          top: the number of rows to show of each category; None shows all.
          by: the columns to group rows by: `op`, `scope`, or both.
          unchanged: whether to show unchanged operations too.

        Returns:
          A heading, and a row for each operation that differs, grouped by category.

        Raises:
          ValueError: an unknown `sort` or `by`; `top` is less than one.
          TypeError: `top` is not an int.
        """
        check_count("TraceDiff.table", "top", top, optional=True)
        check_choice("TraceDiff.table", "sort", sort, get_args(Sort))
        groups = check_groups("TraceDiff.table", by, _GROUPS)
        rows = sorted(self.differences(groups), key=_SORTS[sort])
        head = ["", *groups, "count", "", "duration", "", "change", "noise"]
        counts, cells = [], []
        for category in get_args(Category):
            members = [row for row in rows if row.category == category]
            counts.append(f"{category}: {len(members)}")
            if category != "unchanged" or unchanged:
                cells += [_cells(row, groups) for row in members[:top]]
        return "\n".join([self.heading(), ", ".join(counts), *([table(head, cells, 1 + len(groups))] if cells else [])])

    def heading(self) -> str:
        """Return a description of the comparison."""
        names = [f"{x.name} ({seconds(_call(x) / _MICRO)})" for x in (self.control, self.test)]
        calls = [max(map(len, x.seconds.values()), default=0) for x in (self.control, self.test)]
        text = f"control {names[0]}, test {names[1]}: medians of {calls[0]} and {calls[1]} calls"
        if self.same_program:
            return f"{text}; the compiled programs are the same"
        if self.control.machine != self.test.machine:
            return f"{text}; durations are not compared, on {self.control.machine}, and on {self.test.machine}"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return the differences as a dict of plain values, with the column names of Holistic Trace Analysis."""
        rows = [{"name": _name(row), **asdict(row)} for row in self.differences()]
        names = {"control": self.control.name, "test": self.test.name}
        return {**names, "same_program": self.same_program, "operations": rows}

    def plot_counts(self, *, top: int = 15, by: Groups = _GROUPS, ax: Any = None) -> Any:
        """Plot the counts of the operations whose counts differ most; needs the extra `plot`.

        Args:
          top: the number of operations to show.
          by: the columns to group rows by: `op`, `scope`, or both.
          ax: matplotlib axes, or None for new ones.

        Returns:
          The matplotlib axes.

        Raises:
          ModuleNotFoundError: matplotlib is missing.
          ValueError: an unknown `by`; `top` is less than one.
          TypeError: `top` is not an int.
        """
        return self._plot("counts", "count", top, by, "runs per call", 1, ax)

    def plot_durations(self, *, top: int = 15, by: Groups = _GROUPS, ax: Any = None) -> Any:
        """Plot the durations of the operations whose durations differ most; needs the extra `plot`.

        Args:
          top: as for `plot_counts`.
          by: as for `plot_counts`.
          ax: as for `plot_counts`.

        Returns:
          The matplotlib axes.

        Raises:
          ModuleNotFoundError, TypeError, ValueError: as for `plot_counts`.
        """
        return self._plot("total_duration", "change", top, by, "ms per call", 1e3, ax)

    def _plot(self, column: str, sort: Sort, top: int, by: Groups, label: str, unit: float, ax: Any) -> Any:
        """Plot one column of control and test, divided by `unit`."""
        check_count("TraceDiff", "top", top)
        rows = sorted(self.differences(by), key=_SORTS[sort])[:top]
        series = [
            (f"{kind}: {side.name}", [getattr(row, f"{kind}_{column}") / unit for row in rows])
            for kind, side in (("control", self.control), ("test", self.test))
        ]
        return bars([_name(row) for row in rows], series, label, ax)

    def __str__(self) -> str:
        """Return the table."""
        return self.table()


def trace_diff(
    control: Callable[..., Any] | str | os.PathLike[str],
    test: Callable[..., Any] | str | os.PathLike[str],
    *args: Any,
    repeats: int = 20,
) -> TraceDiff:
    """Compare the operations that two functions run for the same arguments, and their durations.

    Operations are those of the jaxpr (and those that XLA has added, such as copies), by scope, each with its count and
    its duration. Counts follow from the program: the body of a scan counts once for each iteration; the body of a
    `while` and each branch of a `cond` count once, since their number of runs depends on data. Durations are measured,
    alternating between both functions. A duration counts as changed only if the change exceeds the run-to-run variation
    of both, a tenth of the duration, and a hundredth of the call. If both programs have the same instructions, or
    captures come from different machines, no duration counts as changed. If JAX lowers an operation to others, such as
    random numbers, its time is attributed to these.

    Args:
      control: a function, a bound method or a module, or the path of a capture: see `capture`.
      test: the same, to compare with `control`; both must be functions, or both paths of captures.
      *args: the arguments of both functions; none for captures.
      repeats: the number of profiled calls of each function, as for `profile`; at least two.

    Returns:
      A `TraceDiff`: `print` it; its categories are `added`, `deleted`, `increased`, `decreased` and `unchanged`.

    Raises:
      TypeError: `control` or `test` is neither a function nor a path, or one is a function and the other a path;
        arguments are passed with captures, or have no values, as inside `jax.jit`; `repeats` is not an int.
      ValueError: a file is not a capture; `repeats` is less than two.
      OSError: a file cannot be read.

    Cost:
      For functions, compiling both, at most twice, and `repeats` + 1 calls of each.

    Source:
      PyTorch's tutorial "Trace Diff using Holistic Trace Analysis".

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from plurax.transforms.program import trace_diff
      >>> def once(x):
      ...     with jax.named_scope("mix"):
      ...         return x @ x
      >>> def twice(x):
      ...     with jax.named_scope("mix"):
      ...         return x @ x @ x
      >>> [(row.op, row.scope, row.diff_counts) for row in trace_diff(once, twice, jnp.ones((8, 8))).increased]
      [('dot_general', 'mix', 1)]
    """
    check_count("trace_diff", "repeats", repeats, least=2)
    paths = [isinstance(x, (str, os.PathLike)) for x in (control, test)]
    if paths[0] != paths[1]:
        raise TypeError("trace_diff: control and test must both be functions, or both be paths of captures.")
    if paths[0]:
        if args:
            raise TypeError("trace_diff: captures take no arguments; pass only the two paths.")
        return TraceDiff(*(read_capture("trace_diff", cast(Any, x)) for x in (control, test)))
    for name, fun in (("control", control), ("test", test)):
        check_callable("trace_diff", fun, name)
    programs = [TracedProgram("trace_diff", cast(Any, fun), args) for fun in (control, test)]
    return TraceDiff(*captures(programs, repeats))


def _spread(durations: list[float]) -> float:
    """Return the range of durations, excluding a few at each end."""
    # A run that the system interrupts may take many times as long, so ignore the extremes.
    ordered = sorted(durations)
    tail = int(_TAIL * len(ordered))
    return ordered[-1 - tail] - ordered[tail]


def _added_up(capture: Capture, groups: Sequence[str]) -> dict[tuple[str, str], tuple[int, list[float]]]:
    """Return the counts of operations in a call and their microseconds in each run, grouped by `groups`."""
    together = defaultdict(list)
    for op, scope in capture.counts:
        together[op if "op" in groups else "", scope if "scope" in groups else ""].append((op, scope))
    totals = {}
    for group, keys in together.items():
        runs = [capture.seconds[key] for key in keys if key in capture.seconds]
        # Add up within each run, since medians do not add up.
        durations = [sum(run) * _MICRO for run in zip(*runs, strict=True)] or [0.0]
        totals[group] = sum(capture.counts[key] for key in keys), durations
    return totals


def _call(capture: Capture) -> float:
    """Return the median microseconds of a call."""
    times = [sum(run) for run in zip(*capture.seconds.values(), strict=True)]
    return statistics.median(times or [0.0]) * _MICRO


def _name(row: Difference) -> str:
    return "/".join(filter(None, [row.scope, row.op])) or "-"


def _cells(row: Difference, groups: Sequence[str]) -> list[str]:
    """Return the cells of a row of the table."""
    control, test, change, noise = (
        seconds(abs(x) / _MICRO)
        for x in (row.control_total_duration, row.test_total_duration, row.diff_duration, row.noise)
    )
    sign = "-" if row.diff_duration < 0 else "+"
    counts = [str(row.control_counts), f"-> {row.test_counts}"]
    names = [getattr(row, name) or "-" for name in groups]
    return [row.category, *names, *counts, control, f"-> {test}", sign + change, noise]
