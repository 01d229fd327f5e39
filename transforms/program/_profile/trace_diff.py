"""The differences between two programs when they run: `trace_diff`."""

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
# A smaller change, relative to the larger of two durations and to the time of a call, does not count as one.
_LEAST, _LEAST_OF_ALL = 0.1, 0.01
# The part of the runs at each end that the spread of durations leaves out.
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
    """An operation of two programs; durations are in microseconds a call, the medians over the runs.

    Attributes:
      op: the operation, such as `dot_general`; empty in rows that are added up by scope.
      scope: the scopes it is in; empty in rows that are added up by operation.
      control_counts, test_counts: how often it runs in a call: see `trace_diff`.
      control_total_duration, test_total_duration: how long that takes.
      diff_counts: how much more often it runs in the test.
      diff_duration: how much longer it takes in the test.
      counts_change_categories: `+` where it runs more often, `-` less often, `=` as often.
      noise: how far the durations of both vary from run to run.
      category: `added` and `deleted` where it runs in one of the two alone; `increased` and `decreased` where it runs
        more or less often, or as often but longer or shorter by more than the noise; else `unchanged`.

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
      control, test: the operations of each, with their times.

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
        """Return whether both are the same instructions on the same kind of machine: then no duration is a change."""
        return (self.control.program, self.control.machine) == (self.test.program, self.test.machine)

    @property
    def added(self) -> tuple[Difference, ...]:
        """Return the operations that the test alone runs."""
        return self._of("added")

    @property
    def deleted(self) -> tuple[Difference, ...]:
        """Return the operations that the control alone runs."""
        return self._of("deleted")

    @property
    def increased(self) -> tuple[Difference, ...]:
        """Return the operations that the test runs more often, or longer by more than the noise."""
        return self._of("increased")

    @property
    def decreased(self) -> tuple[Difference, ...]:
        """Return the operations that the test runs less often, or shorter by more than the noise."""
        return self._of("decreased")

    @property
    def unchanged(self) -> tuple[Difference, ...]:
        """Return the other operations."""
        return self._of("unchanged")

    def _of(self, category: Category) -> tuple[Difference, ...]:
        return tuple(row for row in self.differences() if row.category == category)

    def differences(self, by: Groups = _GROUPS) -> tuple[Difference, ...]:
        """Return all operations of the two.

        Args:
          by: what they are added up by: `op`, `scope`, or both.

        Raises:
          ValueError: `by` is none of these.
        """
        groups = check_groups("TraceDiff", by, _GROUPS)
        runs = [_added_up(x, groups) for x in (self.control, self.test)]
        least = _LEAST_OF_ALL * max(map(_call, (self.control, self.test)))
        # Only another program on the same kind of machine can take longer; what else differs is noise.
        comparable = self.control.machine == self.test.machine and not self.same_program
        rows = []
        for op, scope in sorted(runs[0].keys() | runs[1].keys()):
            # What one of the two does not run, it runs no times, in no time.
            control, test = (x.get((op, scope), (0, [0.0])) for x in runs)
            before, after = statistics.median(control[1]), statistics.median(test[1])
            # A difference varies by as much as both together.
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
          sort: `change` (in duration), `duration` (the longer of the two) or `count` (the change in it), largest first;
            `op` or `scope` by the alphabet.
          top: how many rows to show of each category; None shows all.
          by: what is added up: `op`, `scope`, or both.
          unchanged: whether to show operations that do not differ as well.

        Returns:
          A heading, and a row for each operation that differs, category by category.

        Raises:
          ValueError: `sort` or `by` is none of these; `top` is less than one.
          TypeError: `top` is not a whole number.
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
        """Return a description of what was compared."""
        names = [f"{x.name} ({seconds(_call(x) / _MICRO)})" for x in (self.control, self.test)]
        calls = [max(map(len, x.seconds.values()), default=0) for x in (self.control, self.test)]
        text = f"control {names[0]}, test {names[1]}: medians of {calls[0]} and {calls[1]} calls"
        if self.same_program:
            return f"{text}; the compiled programs are the same"
        if self.control.machine != self.test.machine:
            return f"{text}; durations are not compared, on {self.control.machine}, and on {self.test.machine}"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return the differences as plain numbers and strings, with the columns of Holistic Trace Analysis."""
        rows = [{"name": _name(row), **asdict(row)} for row in self.differences()]
        names = {"control": self.control.name, "test": self.test.name}
        return {**names, "same_program": self.same_program, "operations": rows}

    def plot_counts(self, *, top: int = 15, by: Groups = _GROUPS, ax: Any = None) -> Any:
        """Draw how often the operations run whose counts differ most; needs the extra `plot`.

        Args:
          top: how many operations.
          by: what is added up: `op`, `scope`, or both.
          ax: matplotlib axes, or None for new ones.

        Returns:
          The axes.

        Raises:
          ModuleNotFoundError: matplotlib is missing.
          ValueError: `by` is none of these; `top` is less than one.
          TypeError: `top` is not a whole number.
        """
        return self._plot("counts", "count", top, by, "times a call", 1, ax)

    def plot_durations(self, *, top: int = 15, by: Groups = _GROUPS, ax: Any = None) -> Any:
        """Draw how long the operations take whose durations differ most; needs the extra `plot`.

        Args:
          top: as for `plot_counts`.
          by: as for `plot_counts`.
          ax: as for `plot_counts`.

        Returns:
          The axes.

        Raises:
          ModuleNotFoundError, TypeError, ValueError: as for `plot_counts`.
        """
        return self._plot("total_duration", "change", top, by, "ms a call", 1e3, ax)

    def _plot(self, column: str, sort: Sort, top: int, by: Groups, label: str, unit: float, ax: Any) -> Any:
        """Draw one column of the control and of the test, divided by the `unit`."""
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
    """Compare the operations that two functions run for the same arguments, and how long they take.

    Operations are those of the program as JAX wrote it (and those that XLA has added, such as copies), by scope, each
    with how often it runs and how long it takes. How often follows from the program: the body of a scan counts once for
    each iteration, the body of a `while` and each branch of a `cond` once, since these depend on data. How long is
    measured, the two alternately. A duration counts as changed only if the change is larger than the variation from run
    to run in both together, than a tenth of the duration and than a hundredth of the call. Programs that are the same
    instructions, and captures of different machines, have no change of duration. An operation that JAX writes out as
    others, such as random numbers, has its time there.

    Args:
      control: a function, a bound method or a module, or the path of a capture: see `capture`.
      test: the other one to compare; both are functions or both are captures.
      *args: the arguments for both functions; none for captures.
      repeats: the number of calls of each that are watched, as for `profile`; at least two.

    Returns:
      A `TraceDiff`: `print` it; its categories are `added`, `deleted`, `increased`, `decreased` and `unchanged`.

    Raises:
      TypeError: `control` or `test` is neither a function nor a path, or they are one of each; arguments for captures;
        `repeats` is not a whole number.
      ValueError: a file is not a capture; `repeats` is less than two.
      OSError: a file cannot be read.

    Cost:
      For functions, compiling both, at most twice, and one call more than `repeats` of each.

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
            raise TypeError("trace_diff: captures take no arguments; they were made with some.")
        return TraceDiff(*(read_capture("trace_diff", cast(Any, x)) for x in (control, test)))
    for name, fun in (("control", control), ("test", test)):
        check_callable("trace_diff", fun, name)
    programs = [TracedProgram("trace_diff", cast(Any, fun), args) for fun in (control, test)]
    return TraceDiff(*captures(programs, repeats))


def _spread(durations: list[float]) -> float:
    """Return how far durations vary, without a few at each end."""
    # A run that the system interrupts may take many times as long, so the extremes tell nothing.
    ordered = sorted(durations)
    tail = int(_TAIL * len(ordered))
    return ordered[-1 - tail] - ordered[tail]


def _added_up(capture: Capture, groups: Sequence[str]) -> dict[tuple[str, str], tuple[int, list[float]]]:
    """Return how often operations run in a call, and their microseconds in each, added up by `op`, `scope` or both."""
    together = defaultdict(list)
    for op, scope in capture.counts:
        together[op if "op" in groups else "", scope if "scope" in groups else ""].append((op, scope))
    totals = {}
    for group, keys in together.items():
        runs = [capture.seconds[key] for key in keys if key in capture.seconds]
        # The sums of each run, and not of medians, which do not add up.
        durations = [sum(run) * _MICRO for run in zip(*runs, strict=True)] or [0.0]
        totals[group] = sum(capture.counts[key] for key in keys), durations
    return totals


def _call(capture: Capture) -> float:
    """Return the microseconds of a call, the median."""
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
