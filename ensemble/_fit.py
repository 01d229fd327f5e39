"""`Trainer.fit`: a step for each batch, with progress, history, checkpoints and a clean end on Ctrl-C."""

from __future__ import annotations

import signal
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from ..transforms._arguments import describe
from ._history import History, Recorder
from ._state import TrainState
from ._store import Store

if TYPE_CHECKING:
    from ._trainer import Trainer

# Steps that may be waiting on the device: enough to hide the host's work, few enough to bound memory.
_AHEAD = 2


def fit(
    trainer: Trainer,
    state: TrainState,
    batches: Iterable[Any],
    *,
    steps: int | None,
    progress: bool,
    checkpoint_dir: Any,
    checkpoint_every: int | None,
    checkpoint_keep: int,
    history_every: int,
) -> tuple[TrainState, History]:
    """See `Trainer.fit`."""
    if not isinstance(state, TrainState):
        raise TypeError(f"Trainer.fit: state must be a TrainState from Trainer.init, but got {type(state).__name__}.")
    _check_count("steps", steps, 0)
    _check_count("checkpoint_every", checkpoint_every, 1)
    _check_count("checkpoint_keep", checkpoint_keep, 1)
    _check_count("history_every", history_every, 1)
    if checkpoint_every is not None and checkpoint_dir is None:
        raise ValueError("Trainer.fit: checkpoint_every needs a checkpoint_dir to write to.")
    source = _iterate(batches)
    start = int(state.step)
    target = None if steps is None else start + steps
    store = None if checkpoint_dir is None else Store.open(checkpoint_dir, checkpoint_keep)
    resumed = None if store is None else store.resume(state, trainer.settings())
    if resumed is not None and int(resumed.state.step) < start:
        resumed = None
    if resumed is not None and int(resumed.state.step) > start:
        state = resumed.state
        if target is not None and int(state.step) > target:
            raise ValueError(
                f"Trainer.fit: the newest checkpoint in {checkpoint_dir} is at step {int(state.step)}, later than "
                f"step {target} that was asked for; ask for more steps or use another directory."
            )
        _skip(source, int(state.step) - start)

    state = jax.tree.map(jnp.copy, state)
    execution = None if resumed is None else resumed.execution
    recorder = Recorder(history_every, None if resumed is None else resumed.history)
    step = saved = int(state.step)
    waiting: deque[tuple[int, dict[str, Any]]] = deque()
    total = _total(batches, steps)
    with (
        _Interrupt() as interrupt,
        tqdm(total=total, initial=step - start, unit="step", disable=not progress, dynamic_ncols=True) as bar,
    ):

        def settle(leave: int) -> None:
            while len(waiting) > leave:
                done, metrics = waiting.popleft()
                recorder.add(done, metrics)
                bar.set_postfix_str(_loss_range(metrics["loss"]), refresh=False)
                bar.update()

        while step != target and not interrupt.requested:
            try:
                batch = next(source)
            except StopIteration:
                break
            except KeyboardInterrupt:
                if interrupt.requested:
                    raise
                interrupt.requested = True
                break
            state, metrics, execution = trainer.advance(state, batch, execution, donate=True)
            step += 1
            waiting.append((step, metrics))
            settle(_AHEAD)
            if store is not None and checkpoint_every is not None and step % checkpoint_every == 0:
                settle(0)
                store.write(state, recorder.arrays(), trainer.settings(execution))
                saved = step
        settle(0)
        if store is not None and saved != step:
            store.write(state, recorder.arrays(), trainer.settings(execution))
        if interrupt.requested and progress:
            tqdm.write(f"Stopped by Ctrl-C after step {step}.")
    if target is not None and step < target and not interrupt.requested:
        warnings.warn(
            f"Trainer.fit: the batches ended after step {step}, {target - step} steps before the {steps} asked for.",
            stacklevel=3,
        )
    return state, recorder.rows()


class _Interrupt:
    """While it is entered, Ctrl-C sets `requested`; a second one raises `KeyboardInterrupt`.

    Signals reach the main thread only, and a program's own handler stays in place.
    """

    def __init__(self) -> None:
        self.requested = False
        self._installed = False

    def __enter__(self) -> _Interrupt:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
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


def _iterate(batches: Iterable[Any]) -> Iterator[Any]:
    try:
        return iter(batches)
    except TypeError:
        raise TypeError(f"Trainer.fit: batches must be an iterable of batches, but got {describe(batches)}.") from None


def _skip(source: Iterator[Any], count: int) -> None:
    for skipped in range(count):
        try:
            next(source)
        except StopIteration:
            raise ValueError(
                f"Trainer.fit: the checkpoint has used {count} batches, but there are only {skipped}; pass the same "
                "batches again from their start."
            ) from None


def _total(batches: Any, steps: int | None) -> int | None:
    length = len(batches) if hasattr(batches, "__len__") else None
    known = [count for count in (steps, length) if count is not None]
    return min(known) if known else None


def _loss_range(loss: Any) -> str:
    loss = np.asarray(loss)
    finite = loss[np.isfinite(loss)]
    lost = loss.size - finite.size
    spread = f"loss {finite.min():.4f} to {finite.max():.4f}" if finite.size else "loss"
    return spread + (f", {lost} not finite" if lost else "")


def _check_count(name: str, value: Any, least: int) -> None:
    if value is None and name in ("steps", "checkpoint_every"):
        return
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise TypeError(f"Trainer.fit: {name} must be an int, but got {describe(value)}.")
    if value < least:
        raise ValueError(f"Trainer.fit: {name} must be at least {least}, but got {value}.")
