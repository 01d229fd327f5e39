"""The training loop: a step for each batch, with progress, checkpoints, and a clean stop on Ctrl-C and SIGTERM."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from types import FrameType, SimpleNamespace
from typing import Any, TypeVar

import jax

from .._core.arguments import check_count, describe, is_int
from .._core.compat import is_preempted, setting
from .checkpoint_clock import CHECKPOINT_EVERY, CheckpointClock
from .processes import ALONE, Group
from .source import Source

State = TypeVar("State")

# The number of steps that may be queued on the device: enough to hide the host's work between steps, but few, since
# each keeps its batch and metrics in memory until it is done.
_AHEAD = 2
# Waiting for a step takes some 30 us, and so is done for several short steps at once: for at most this many, which take
# about this many seconds.
_TOGETHER, _SECONDS = 64, 4e-3


# What a shell reports for a process that SIGTERM has ended. Schedulers start such a process again: Kubeflow restarts
# codes above 127, and a Kubernetes job and Ray any code that is not 0.
_CODE = 128 + signal.SIGTERM
# Numbers for the calls of JAX's sync point. It waits for the call with one number, the largest of any process plus one,
# so that no number may be left out, by one run after another.
_calls = count()


class Preempted(SystemExit):
    """Raised after SIGTERM, when the step is done; it ends the process with code 143.

    Clusters send SIGTERM before they take a machine away. If `fit` has a `checkpoint_dir`, a checkpoint is written
    before, and the same program goes on from it when it is started again; a checkpoint that cannot be written is warned
    of.

    Attributes:
      step: the last step that was taken.

    Examples:
      >>> from plurax.ensemble import Preempted
      >>> try:
      ...     raise Preempted(300)  # by `fit`
      ... except Preempted as left:
      ...     left.step, left.code
      (300, 143)
    """

    def __init__(self, step: int) -> None:
        super().__init__(_CODE)
        self.step = step


def run(
    state: State,
    source: Iterator[Any],
    advance: Callable[[State, Any], tuple[State, Any]],
    *,
    step: int,
    target: int | None,
    record: Callable[[int, Any], Any],
    say: Callable[[int, Any], str],
    save: Callable[[State], None] | None,
    clock: CheckpointClock,
    progress: bool,
    group: Group = ALONE,
    done: int,
    total: int | None,
    finished: Callable[[], bool] = lambda: False,
    together: int = 1,
    at_once: Callable[[int, Any], bool] = lambda *_: False,
    written: Callable[[], None] = lambda: None,
) -> tuple[State, int, bool]:
    """Take steps until the target, the end of the batches, Ctrl-C or SIGTERM.

    Args:
      state: the initial state; anything that `advance` accepts.
      source: the batches; a `Source` if several may be taken `together`. A batch is taken only when it is used.
      advance: takes a step, or one for each of several batches that are `Stacked`: a function from a state and what
        `source` returned to the next state and the metrics. The state passed to it is not used again.
      step: the number of steps that `state` has taken.
      target: the number of steps of the last state; None to use all batches.
      record: receives the number of the last step and the metrics of each call of `advance`, before its state is
        saved. It is called after the next steps were dispatched, and waits for the metrics that it reads.
      say: returns the text that the bar shows after a step, from its number and metrics.
      save: writes a checkpoint of a state; None for no checkpoints.
      clock: tells when a checkpoint is due. There is always one at the end.
      progress: whether to show the bar.
      group: the processes that take the steps. With several, Ctrl-C interrupts the step: if only one of them ended
        the loop, the others would wait for it in a collective.
      done: the number of steps of the bar that were taken before.
      total: the total number of steps of the bar, if known.
      finished: called before each step; returns whether to stop.
      together: the number of batches for a call of `advance`; it divides the steps between checkpoints, if these are
        counted. Only calls from a multiple of this many steps on get as many, if `source` can stack them, all others a
        single one, so that a resumed run repeats the calls.
      at_once: returns whether `record` needs the state after a step, from its number and metrics. Then the loop waits
        for the step before it takes the next one, which would reuse the memory of that state.
      written: waits until the last checkpoint is written; called at the end.

    Returns:
      The last state, its number of steps, and whether Ctrl-C ended the loop.

    Raises:
      Preempted: SIGTERM came, and all processes have stopped before the same step; the last state is saved.
    """
    from tqdm import tqdm  # imported here, since importing the library should load only JAX

    saved, shown = step, -math.inf
    waiting: deque[tuple[int, Any, int]] = deque()
    last: tuple[int, Any, int] | None = None
    with (
        _on_interrupt(group.is_alone) as interrupt,
        _on_preemption(group, save is not None) as preempted,
        tqdm(total=total, initial=done, unit="step", disable=not progress, dynamic_ncols=True) as bar,
    ):
        # JAX returns before a step is computed. Waiting for the oldest of several, not for the newest, keeps the device
        # busy while the host records and prepares the next batch.
        def settle(leave: int) -> None:
            """Record the oldest steps, which waits for them, until only `leave` are queued."""
            nonlocal last, shown
            while len(waiting) > leave:
                last = waiting.popleft()
                record(*last[:2])
                # The bar is not drawn more often than this, and its text may take longer than a step.
                if progress and time.monotonic() - shown >= bar.mininterval:
                    shown = time.monotonic()
                    bar.set_postfix_str(say(*last[:2]), refresh=False)
                bar.update(last[2])

        ahead, now = _AHEAD, time.monotonic()
        while step != target and not interrupt.requested and not finished():
            if preempted():
                break
            number = 1 if step % together or (target is not None and step + together > target) else together
            try:
                several = source.stacked(number) if number > 1 and isinstance(source, Source) else None
                batch, number = (next(source), 1) if several is None else (several, number)
            except StopIteration:
                break
            except KeyboardInterrupt:  # raised while a batch was made, if our handler is not installed
                if interrupt.requested or not group.is_alone:
                    raise
                interrupt.requested = True
                break
            state, metrics = advance(state, batch)
            step += number
            waiting.append((step, metrics, number))
            if len(waiting) > ahead:
                calls = len(waiting) - _AHEAD
                settle(_AHEAD)
                before, now = now, time.monotonic()
                if group.is_alone:  # several processes dispatch equally many, also before an error in `record`
                    # At most twice as many as just now: steps that are done while `record` is slow look short.
                    ahead = _AHEAD + min(2 * calls, _TOGETHER, int(_SECONDS * calls / max(now - before, 1e-9)))
            if at_once(step, metrics):
                settle(0)
            if save is not None and clock.due(step):
                settle(0)
                save(state)
                saved = step
        settle(0)
        if progress and last is not None:
            bar.set_postfix_str(say(*last[:2]), refresh=False)
        if save is not None and saved != step:
            save(state)
        # Within the handlers: a signal must not end the process while the last checkpoint is written.
        written()
        leaving = preempted()
        if interrupt.requested and progress:
            tqdm.write(f"Stopped by Ctrl-C after step {step}.")
        if leaving:
            if progress:
                tqdm.write(f"Stopped by SIGTERM after step {step}; start the same program again to go on.")
            raise Preempted(step)
    return state, step, interrupt.requested


@contextmanager
def _on_interrupt(wanted: bool) -> Iterator[SimpleNamespace]:
    """Yield an object whose `requested` Ctrl-C sets, if `wanted`; a second Ctrl-C raises `KeyboardInterrupt`."""
    # Not a `threading.Event`: setting one takes a lock, so a second signal inside the handler would deadlock.
    interrupt = SimpleNamespace(requested=False)

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupt.requested:
            signal.default_int_handler(number, frame)
        interrupt.requested = True

    # Only the main thread may set a handler, and a handler of the user's program stays in place.
    main = threading.current_thread() is threading.main_thread()
    ours = wanted and main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _on_preemption(group: Group, saves: bool) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGTERM asks the run to stop now.

    Args:
      group: the processes of the run. Several call the function equally often; it returns True in all of them at the
        same call, and from then on.
      saves: whether the run writes checkpoints. A single process that does not is left to the default, which ends it.
    """
    notice, home = SimpleNamespace(seen=False), os.getpid()

    def handle(*_: Any) -> None:
        if os.getpid() != home:  # a process that was forked in between, such as a worker of a data loader
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        notice.seen = True

    def agreed() -> bool:
        notice.seen = notice.seen or is_preempted(next(_calls))
        return notice.seen

    # After `jax.distributed.initialize`, JAX has the signal, which Python does not see. Only the main thread may set a
    # handler, and one of the user's program stays in place.
    of_jax = jax.distributed.is_initialized()
    together = of_jax and len(group.processes) == jax.process_count() and setting("jax_enable_preemption_service")
    main = threading.current_thread() is threading.main_thread()
    ours = saves and main and not of_jax and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, handle)
    try:
        yield agreed if together else lambda: notice.seen
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def iterate(api: str, batches: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator over the batches; raise if they cannot be iterated."""
    try:
        return iter(batches)
    except TypeError:
        raise TypeError(f"{api}: batches must be an iterable of batches, but got {describe(batches)}.") from None


def total_steps(batches: Any, steps: int | None) -> int | None:
    """Return the total number of steps, if known."""
    known = [] if steps is None else [steps]
    with suppress(TypeError):  # an iterator, or endless batches
        known.append(len(batches))
    return min(known, default=None)


def check_options(
    api: str,
    steps: Any,
    checkpoint_dir: Any,
    checkpoint_every: Any,
    checkpoint_keep: Any,
    history_every: Any,
    resume: Any,
) -> None:
    """Raise if an option of `fit` has a wrong type, is too small, or needs another option."""
    check_count(api, "steps", steps, 0, optional=True)
    _check_interval(api, checkpoint_every)
    check_count(api, "checkpoint_keep", checkpoint_keep, 1)
    check_count(api, "history_every", history_every, 1)
    if checkpoint_every not in (None, CHECKPOINT_EVERY) and checkpoint_dir is None:
        raise ValueError(f"{api}: checkpoint_every needs a checkpoint_dir to write to; pass one.")
    if not isinstance(resume, bool) and resume != "auto":
        raise ValueError(f'{api}: resume must be "auto", True or False, but got {resume!r}.')
    if resume != "auto" and checkpoint_dir is None:
        raise ValueError(f"{api}: resume={resume} needs a checkpoint_dir; pass one.")


def _check_interval(api: str, every: Any) -> None:
    """Raise if the steps or the time between checkpoints have another type, or are not positive."""
    if isinstance(every, timedelta):
        if every <= timedelta(0):
            raise ValueError(f"{api}: checkpoint_every must be a positive time, but got {every!r}.")
    elif every is not None and not is_int(every):
        kinds = "an int, a datetime.timedelta or None"
        raise TypeError(f"{api}: checkpoint_every must be {kinds}, but got {describe(every)}.")
    check_count(api, "checkpoint_every", None if isinstance(every, timedelta) else every, 1, optional=True)
