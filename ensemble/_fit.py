"""`Trainer.fit`: a step for each batch, with a history and checkpoints to go on from."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from tqdm import tqdm

from ..transforms._checkpoint import Checkpoint
from ..transforms._history import History, Recorder
from ..transforms._loop import check_options, iterate, run, skip, total_steps
from ..transforms._processes import Group
from ..transforms._store import Store
from ._checkpoint import read_state, write_state
from ._mesh import everywhere
from ._state import TrainState
from ._strategy import Execution

if TYPE_CHECKING:
    from ._trainer import Trainer

# A state, and how the steps to it were executed.
Reached = tuple[TrainState, Execution | None]


@dataclass(frozen=True)
class Settings:
    """What a run computes with, as far as it is known; plain values, for JSON.

    Attributes:
      optimizer: the name of the optax factory, or None for a ready transformation.
      hyperparams: the hyperparameters that are numbers.
      strategy: how the members are executed; "auto" before the first step.
      chunk_size: how many members at a time.
      products: whether convolutions are rewritten as matrix products.
      devices: over how many devices the members are spread.
    """

    optimizer: str | None
    hyperparams: Mapping[str, Any]
    strategy: str
    chunk_size: int | None
    products: bool
    devices: int


@dataclass(frozen=True)
class Resumed:
    """What a run goes on from."""

    state: TrainState
    history: dict[str, np.ndarray]
    execution: Execution


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
    check_options("Trainer.fit", steps, checkpoint_dir, checkpoint_every, checkpoint_keep, history_every)
    source = iterate("Trainer.fit", batches)
    start = int(state.step)
    target = None if steps is None else start + steps
    group = Group.of(state.contents())
    store = None if checkpoint_dir is None else Store.open("Trainer.fit", checkpoint_dir, checkpoint_keep, group)
    resumed = None if store is None else store.newest(partial(_resume, state, trainer.settings()))
    if resumed is not None and int(resumed.state.step) < start:
        resumed = None
    if resumed is not None and int(resumed.state.step) > start:
        state = resumed.state
        if target is not None and int(state.step) > target:
            raise ValueError(
                f"Trainer.fit: the newest checkpoint in {checkpoint_dir} is at step {int(state.step)}, later than "
                f"step {target} that was asked for; ask for more steps or use another directory."
            )
        skip("Trainer.fit", source, int(state.step) - start)

    execution = None if resumed is None else resumed.execution
    recorder = Recorder(history_every, None if resumed is None else resumed.history)
    (state, _), step, interrupted = run(
        (state.copy(), execution),
        source,
        partial(_advance, trainer, _tell if progress and group.is_first else _be_silent),
        step=int(state.step),
        target=target,
        record=recorder.add,
        say=lambda _, metrics: _loss_range(metrics["loss"]),
        save=None if store is None else partial(_save, trainer, store, recorder),
        checkpoint_every=checkpoint_every,
        # One bar, and no process stops where others go on.
        progress=progress and group.is_first,
        interruptible=group.is_alone,
        done=int(state.step) - start,
        total=total_steps(batches, steps),
    )
    if target is not None and step < target and not interrupted:
        warnings.warn(
            f"Trainer.fit: the batches ended after step {step}, {target - step} steps before the {steps} asked for.",
            stacklevel=3,
        )
    return state, recorder.rows()


def _tell(what: str) -> None:
    tqdm.write(f"Measuring, for once: {what}", file=sys.stderr)


def _be_silent(_: str) -> None:
    """Say nothing."""


def _advance(
    trainer: Trainer, tell: Callable[[str], None], before: Reached, batch: Any
) -> tuple[Reached, dict[str, jax.Array]]:
    state, metrics, execution = trainer.advance(before[0], batch, before[1], donate=True, tell=tell)
    return (state, execution), everywhere(metrics)


def _save(trainer: Trainer, store: Store, recorder: Recorder, reached: Reached) -> None:
    state, execution = reached
    about = vars(trainer.settings(execution))
    store.write(int(state.step), lambda path: write_state("Trainer.fit", path, state, about, recorder.arrays()))


def _resume(like: TrainState, settings: Settings, checkpoint: Checkpoint) -> Resumed:
    """What a checkpoint has to go on from; refuses one of another run."""
    about = checkpoint.manifest
    _check_settings(checkpoint, settings)
    state, history = read_state(checkpoint, like), checkpoint.history()
    return Resumed(state, history, Execution(*(about[x] for x in Execution._fields if x in about)))


def _check_settings(checkpoint: Checkpoint, settings: Settings) -> None:
    """Refuse a checkpoint of another optimiser or other hyperparameters."""
    if "optimizer" not in checkpoint.manifest:
        raise ValueError(
            f"Trainer.fit: the checkpoint {checkpoint.path} is of a run of something else; use another checkpoint_dir."
        )
    values = [{"optimizer": x["optimizer"], **x["hyperparams"]} for x in (checkpoint.manifest, vars(settings))]
    before, now = values
    for name in [*before, *now]:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"Trainer.fit: the checkpoint {checkpoint.path} was written with {name}={before.get(name)}, but the "
                f"trainer has {name}={now.get(name)}; use another checkpoint_dir, or the same optimiser and "
                "hyperparameters."
            )


def _loss_range(loss: Any) -> str:
    loss = np.asarray(loss)
    finite = loss[np.isfinite(loss)]
    lost = loss.size - finite.size
    spread = f"loss {finite.min():.4f} to {finite.max():.4f}" if finite.size else "loss"
    return spread + (f", {lost} not finite" if lost else "")
