"""`CheckpointClock`: when a checkpoint of a run is due, by the number of steps or by time."""

from __future__ import annotations

import time
from datetime import timedelta

from .processes import ALONE, Group

# By default so much work may be lost.
CHECKPOINT_EVERY = timedelta(minutes=5)
# The checkpoints of a run that are due by time take at most this share of its time.
_SHARE = 0.05
# Several processes look at the clock together, which waits for all of them: so often between two checkpoints, and more
# often only when one is nearly due.
_LOOKS = 16

now = time.monotonic  # tests replace it by a quicker one


class CheckpointClock:
    """Tell when a checkpoint is due.

    By time, one is due when `every` has passed since the last one was begun, and when all of them, with one more that
    takes as long as the last, have taken at most 5 % of the time of the run. Their time is counted until they are on
    the disk, although the run goes on meanwhile, since it shares processors and memory with the thread that writes.

    Args:
      every: a number of steps or a time; None for never.
      group: the processes of the run. The clock of the first one decides, and all ask after the same steps.
    """

    def __init__(self, every: int | timedelta | None, group: Group = ALONE) -> None:
        self._every, self._group = every, group
        self._started = self._last = now()
        self._spent = self._cost = 0.0
        self._writes = False
        # For several processes: the step from which on they look again, and where and when they have looked.
        self._next, self._ahead = 0, 1
        self._looked: tuple[int, float] | None = None

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step; the same in all processes."""
        if self._every is None:
            return False
        if not isinstance(self._every, timedelta):
            return step % self._every == 0
        if self._group.is_alone:
            return self._left(self._every) <= 0
        if step < self._next:
            return False
        left = self._left(self._every)
        due, self._ahead = self._group.gather([left <= 0, self._steps_to_next_look(step, left, self._every)])[0]
        self._next = step + self._ahead
        return bool(due)

    def begin(self) -> None:
        """Note that a checkpoint is begun."""
        self._last, self._writes = now(), True

    def end(self) -> None:
        """Note that it is on the disk, or cannot be written; called in the thread that writes."""
        self._cost = now() - self._last
        self._spent += self._cost
        self._writes = False

    def _left(self, every: timedelta) -> float:
        """Return the seconds until a checkpoint is due; more than 0 while one is being written."""
        at = now()
        since = at - self._last
        if self._writes:  # at least as long again as it has taken
            return max(since, every.total_seconds() - since)
        affordable = (self._spent + self._cost) / _SHARE - (at - self._started)
        return max(every.total_seconds() - since, affordable)

    def _steps_to_next_look(self, step: int, left: float, every: timedelta) -> int:
        """Return after how many steps to look again: half of the way to the next checkpoint, by the last steps."""
        at, before = now(), self._looked
        self._looked = step, at
        if before is None or left <= 0:
            return 1
        each = (at - before[1]) / (step - before[0])
        ahead = int(min(left / 2, every.total_seconds() / _LOOKS) / max(each, 1e-9))
        return max(1, min(2 * self._ahead, ahead))  # the first steps are compiled, and tell little
