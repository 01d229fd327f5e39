"""The training loop: a step for each batch, with progress, checkpoints and a clean end on Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from types import FrameType
from typing import Any, TypeVar

import jax
from tqdm import tqdm

from .._core.arguments import check_count, describe

State = TypeVar("State")
Metrics = TypeVar("Metrics")

# Steps that may be waiting on the device: enough to hide the host's work, few enough to bound memory.
_AHEAD = 2


def run(
    state: State,
    source: Iterator[Any],
    advance: Callable[[State, Any], tuple[State, Metrics]],
    *,
    step: int,
    target: int | None,
    record: Callable[[int, Metrics], Any],
    say: Callable[[int, Metrics], str],
    save: Callable[[State], None] | None,
    checkpoint_every: int | None,
    progress: bool,
    interruptible: bool = True,
    done: int,
    total: int | None,
    finished: Callable[[], bool] = lambda: False,
) -> tuple[State, int, bool]:
    """Take steps until the target, the end of the batches or Ctrl-C.

    Args:
      state: where to start; anything that `advance` takes.
      source: the batches. None is taken that is not used.
      advance: one step: the next state and the metrics, for the state and a batch. The state it is given is not
        used again.
      step: how many steps `state` has taken.
      target: how many steps the last state shall have taken; None for as many as there are batches.
      record: takes the number of each step and its metrics, once they are computed and before its state is saved.
      say: what the bar shows behind a step, for its number and metrics.
      save: writes a checkpoint of a state; None where there are none.
      checkpoint_every: steps between checkpoints; None for one at the end only. One at the end there is always.
      progress: whether to show the bar.
      interruptible: whether Ctrl-C ends the loop after the step; else it interrupts it.
      done: how many steps of the bar were taken before.
      total: how many steps the bar has, if known.
      finished: says before each step whether there is no more to do.

    Returns:
      The last state, how many steps it has taken, and whether Ctrl-C ended the loop.
    """
    saved = step
    waiting: deque[tuple[int, Metrics]] = deque()
    with (
        Interrupt(interruptible) as interrupt,
        tqdm(total=total, initial=done, unit="step", disable=not progress, dynamic_ncols=True) as bar,
    ):

        def settle(leave: int) -> None:
            while len(waiting) > leave:
                settled, metrics = waiting.popleft()
                jax.block_until_ready(metrics)
                record(settled, metrics)
                bar.set_postfix_str(say(settled, metrics), refresh=False)
                bar.update()

        while step != target and not interrupt.requested and not finished():
            try:
                batch = next(source)
            except StopIteration:
                break
            except KeyboardInterrupt:
                if interrupt.requested or not interruptible:
                    raise
                interrupt.requested = True
                break
            state, metrics = advance(state, batch)
            step += 1
            waiting.append((step, metrics))
            settle(_AHEAD)
            if save is not None and checkpoint_every is not None and step % checkpoint_every == 0:
                settle(0)
                save(state)
                saved = step
        settle(0)
        if save is not None and saved != step:
            save(state)
        if interrupt.requested and progress:
            tqdm.write(f"Stopped by Ctrl-C after step {step}.")
    return state, step, interrupt.requested


class Interrupt:
    """While it is entered, and wanted, Ctrl-C sets `requested`; a second one raises `KeyboardInterrupt`.

    Signals reach the main thread only, and a program's own handler stays in place.
    """

    def __init__(self, wanted: bool = True) -> None:
        self.requested = False
        self._wanted = wanted
        self._installed = False

    def __enter__(self) -> Interrupt:
        main = threading.current_thread() is threading.main_thread()
        if self._wanted and main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            signal.default_int_handler(number, frame)
        self.requested = True


def iterate(api: str, batches: Iterable[Any]) -> Iterator[Any]:
    """An iterator over the batches; refuses what has none."""
    try:
        return iter(batches)
    except TypeError:
        raise TypeError(f"{api}: batches must be an iterable of batches, but got {describe(batches)}.") from None


def skip(api: str, source: Iterator[Any], count: int) -> None:
    """Take the batches that a checkpoint has used; refuses to go on where there are fewer."""
    # Some need not make what is passed over.
    skipped = source.skip(count) if hasattr(source, "skip") else sum(1 for _ in islice(source, count))
    if skipped < count:
        raise ValueError(
            f"{api}: the checkpoint has used {count} batches, but there are only {skipped}; pass the same batches "
            "again from their start."
        )


def total_steps(batches: Any, steps: int | None) -> int | None:
    """How many steps there will be, if known."""
    try:
        length = len(batches)
    except TypeError:  # an iterator, or batches without end
        length = None
    known = [count for count in (steps, length) if count is not None]
    return min(known) if known else None


def check_options(
    api: str, steps: Any, checkpoint_dir: Any, checkpoint_every: Any, checkpoint_keep: Any, history_every: Any
) -> None:
    """Refuse options of a `fit` that say nothing."""
    check_count(api, "steps", steps, 0, optional=True)
    check_count(api, "checkpoint_every", checkpoint_every, 1, optional=True)
    check_count(api, "checkpoint_keep", checkpoint_keep, 1)
    check_count(api, "history_every", history_every, 1)
    if checkpoint_every is not None and checkpoint_dir is None:
        raise ValueError(f"{api}: checkpoint_every needs a checkpoint_dir to write to.")
