"""`Table`: a live table of the groups of a fleet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from .cluster import Task
from .group import Report

_ROWS = 20  # groups that are shown at once


class Table:
    """A table of groups, redrawn in place in a terminal; elsewhere it is printed when it is closed.

    Args:
      visible: whether to show it.
    """

    def __init__(self, visible: bool) -> None:
        self._live: Any = None
        if visible:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), auto_refresh=False)

    def __enter__(self) -> Table:
        """Begin to draw."""
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last table on the screen."""
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def show(self, tasks: Sequence[Task], until: int | None) -> None:
        """Draw the groups: those that train first, then those that wait."""
        if self._live is None:
            return
        from rich.table import Table as RichTable

        running, waiting = ([x for x in tasks if x.done is None and (x.ref is None) == idle] for idle in (False, True))
        done = [x for x in tasks if x.done is not None]
        title = f"{len(running)} groups train, {len(waiting)} wait, {len(done)} have ended"
        table = RichTable(title=title, title_justify="left")
        for name in ("members", "step", "steps/s", "loss", "train", "where"):
            table.add_column(name, justify="left" if name == "where" else "right")
        for task in [*running, *waiting, *done][:_ROWS]:
            table.add_row(f"{task.which[0]} to {task.which[-1]}", *self._cells(task, until))
        self._live.update(table, refresh=True)

    @staticmethod
    def _cells(task: Task, until: int | None) -> list[str]:
        report = Report.read(task.directory)
        if task.done is not None:
            return [f"{task.done.step}", "", "", "", "ended"]
        if report is None or task.ref is None:
            return ["", "", "", "", "waits" if task.ref is None else "starts"]
        low, high = report.loss
        loss = "" if math.isnan(low) else f"{low:.3g} to {high:.3g}"
        step = f"{report.step}" if until is None else f"{report.step} of {until}"
        return [step, f"{report.steps_per_second:.1f}", loss, f"{report.training}", report.where]
