"""`Run`: the steps of `Trainer.fit`, with their history, their checkpoints, and members that stop and restart."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from ...transforms._core.arguments import describe
from ...transforms._core.axes import broadcast_axes
from ...transforms._runs.checkpoint import Checkpoint
from ...transforms._runs.history import Recorder, is_recorded, numbers
from ...transforms._runs.run_directory import RunDirectory
from .._execution.forms import State
from .._execution.stepper import Stepper
from .._members.sharding import everywhere
from .._members.strategy import Execution
from .._step.member_status import Stop
from .._step.state import TrainState
from .checkpoint import read_run, write_state
from .early_stopping import EarlyStopping, Restarts, Watch, members_in_words


class Callback(Protocol):
    """A function that `Trainer.fit` calls with the metrics of each recorded step.

    Examples:
      >>> from plurax.ensemble import Callback
      >>> def worst(step, metrics):
      ...     print(f"step {step}: {metrics['loss'].max():.3f}")
      >>> callbacks: list[Callback] = [worst]  # for Trainer.fit
    """

    def __call__(self, step: int, metrics: Mapping[str, np.ndarray]) -> Any:
        """Take the metrics of a recorded step.

        Args:
          step: its number, from 1.
          metrics: by name, for each member: shape (size,). NaN for a member that had stopped before; where one had,
            integers are float32.
        """


Resumed = tuple[TrainState, dict[str, np.ndarray] | None, Execution | None, dict[str, Any]]


def resumed(store: RunDirectory | None, state: TrainState, stepper: Stepper, watch: Watch) -> Resumed:
    """Return the state from which a run goes on, with its history, its execution, and what it knew of its members."""
    found = None if store is None else store.newest(partial(_read, state, stepper.settings(), watch))
    # A checkpoint from before the state is passed over: whoever passes a later state has gone on from elsewhere.
    if found is None or int(found[0].step) < watch.start:
        return state, None, None, {}
    # A checkpoint at the step of the state may be of another run: the state that was passed counts, without what was
    # known of the members.
    return found if int(found[0].step) > watch.start else (state, *found[1:3], {})


@dataclass
class Run:
    """The steps of one run of a trainer."""

    stepper: Stepper
    watch: Watch
    recorder: Recorder
    store: RunDirectory | None
    callbacks: Sequence[Callback]
    execution: Execution | None
    taken: int
    saved: int = -1

    def advance(self, state: State, batch: Any) -> tuple[State, tuple[dict[str, Any], np.ndarray]]:
        """Return the state after a step, with members stopped or put back that are due, and what it reports.

        That is its metrics, which may not be computed yet, and the members that they are of.
        """
        watch = self.watch
        if len(watch.active) < watch.size:
            # Batches are made for all members; those that have left the run have no rows in the state.
            arguments, axes = self.stepper.arguments(batch, watch.size)
            batch = watch.batch(arguments, broadcast_axes(axes, arguments))
        after, metrics, self.execution = self.stepper.advance(
            state, batch, self.execution, donate=True, aloud=watch.aloud
        )
        self.taken += 1
        active = watch.active
        after, found = watch.after(self.taken, after)
        return after, ({**everywhere(metrics), **found}, active)

    def record(self, step: int, reported: tuple[dict[str, Any], np.ndarray]) -> None:
        """Record a step whose metrics are computed, warn of members that failed in it, and call the callbacks."""
        metrics, active = reported
        size, evaluated = self.watch.size, "validation" in metrics
        metrics = {name: x for name, x in metrics.items() if is_recorded(x)}
        stopped = np.asarray(metrics.pop("stopped"))
        self.watch.notice(stopped)
        if (stopped > 0).all():  # no member has trained: the step was taken before that was noticed
            return
        if (stopped < 0).any():
            named = members_in_words(active[stopped < 0])
            warnings.warn(
                f"Trainer.fit: {named} stopped at step {step}, since the loss or the gradients were not finite; "
                "everything of it stays as it was before.",
                stacklevel=5,  # where fit was called: this is in it, in the loop, in what waits for a step
            )
        # A member that fails in this step has a row for it, with the loss that is not finite.
        trained = np.zeros(size, bool)
        trained[active] = stopped <= 0
        # Any value will do for members that have left the run: `trained` says that they have none.
        places = np.searchsorted(active[:-1], np.arange(size))
        metrics = {name: numbers(x)[places] for name, x in metrics.items()}
        if self.recorder.add(step, metrics, trained, always=evaluated) and self.callbacks:
            if not trained.all():
                wide = {name: x if x.dtype.kind in "fc" else x.astype(np.float32) for name, x in metrics.items()}
                metrics = {name: np.where(trained, x, np.nan).astype(x.dtype) for name, x in wide.items()}
            for callback in self.callbacks:
                callback(step, metrics)

    def save(self, state: State) -> None:
        """Write a checkpoint."""
        assert self.store is not None
        full = self.watch.all_members(state)
        step = int(full.step)
        if step == self.saved:  # the final checkpoint, or after steps in which no member trained
            return
        self.saved = step
        about, more = self.stepper.settings(self.execution), self.watch.parts(step, full)
        self.store.write(step, lambda path: write_state("Trainer.fit", path, full, about, self.recorder.arrays(), more))

    def finish(self, given: TrainState, ended: State, target: int | None, interrupted: bool) -> TrainState:
        """Return the state of all members at the end, and warn of what the user would not expect."""
        watch, aloud = self.watch, self.watch.aloud
        last = watch.all_members(ended)
        # Steps after the last member had stopped do not count.
        step = int(last.step)
        if self.stepper.freezes and step > watch.start and (nonfinite := watch.nonfinite(given, last)).size:
            warnings.warn(
                f"Trainer.fit: the parameters of {members_in_words(nonfinite)} are no longer finite, though the "
                "gradients that made them were; the learning rate may be too large, or not finite.",
                stacklevel=3,  # where `Trainer.fit` was called
            )
        if target is not None and step < target and not interrupted:
            why = "all members have stopped" if watch.finished else "the batches ended"
            ends = f"{why} after step {step}, {target - step} steps before the {target - watch.start} asked for."
            stopped_early = (np.asarray(everywhere(last.standing.stopped)) == Stop.EARLY).any()
            if not (watch.finished and stopped_early):
                warnings.warn(f"Trainer.fit: {ends}", stacklevel=3)
            elif aloud:  # which is what it was asked for
                tqdm.write(ends.capitalize(), file=sys.stderr)
        return last


def columns(stepper: Stepper, state: TrainState) -> dict[str, list[float]]:
    """Return the hyperparameters with a number for each member, as the state has them."""
    held = {**getattr(state.opt_state, "hyperparams", {}), **state.standing.hyperparams}
    # By way of text: `str` of a float32 is the shortest that is that number, 0.1, where `float` of it is 0.10000000149.
    return {name: [float(str(x)) for x in np.asarray(everywhere(held[name]))] for name in stepper.columns}


def _read(like: TrainState, settings: dict[str, Any], watch: Watch, checkpoint: Checkpoint) -> Resumed:
    """Return what a checkpoint holds; raise if another run wrote it."""
    about = checkpoint.manifest
    _check_settings(checkpoint, settings)
    (state, watched), history = read_run(checkpoint, like, watch.parts(0, like)), checkpoint.history()
    return state, history, Execution(*(about[x] for x in Execution._fields if x in about)), watched


def check_watched(stepper: Stepper, early: Any, restarts: Any, callbacks: Any) -> None:
    """Raise for options of `fit` that are not of their types, or do not go with the trainer."""
    for name, value, kind in (("early_stopping", early, EarlyStopping), ("restarts", restarts, Restarts)):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"Trainer.fit: {name} must be of type {kind.__name__}, but got {describe(value)}.")
    if restarts is not None and not stepper.freezes:
        raise ValueError('Trainer.fit: restarts need nonfinite="freeze": no other member is ever put back.')
    if not isinstance(callbacks, (list, tuple)) or not all(map(callable, callbacks)):
        raise TypeError(f"Trainer.fit: callbacks must be a list of functions, but got {describe(callbacks)}.")


def _check_settings(checkpoint: Checkpoint, settings: dict[str, Any]) -> None:
    """Raise for a checkpoint of another optimiser or other hyperparameters."""
    if "optimizer" not in checkpoint.manifest:
        raise ValueError(f"Trainer.fit: another kind of run wrote {checkpoint.path}; use another checkpoint_dir.")
    before, now = ({"optimizer": x["optimizer"], **x["hyperparams"]} for x in (checkpoint.manifest, settings))
    # By name and numbers, all that JSON can hold; a ready optimiser is known by the structure of its state alone.
    for name in [*before, *now]:
        if before.get(name) != now.get(name):
            found = f"has {name}={before.get(name)}, but the trainer has {name}={now.get(name)}"
            remedy = "use another checkpoint_dir, or the same optimiser and hyperparameters"
            raise ValueError(f"{checkpoint} {found}; {remedy}.")


def loss_range(metrics: Mapping[str, Any]) -> str:
    """Return the range of the loss over the members that train, for the bar."""
    # Of those that train: a member that stopped with a large loss would keep the range wide to the end.
    loss = np.asarray(metrics["loss"])[np.asarray(metrics["stopped"]) <= 0]
    finite = loss[np.isfinite(loss)]
    others = loss.size - finite.size
    spread = f"loss {finite.min():.4f} to {finite.max():.4f}" if finite.size else "loss"
    return spread + (f", {others} not finite" if others else "")
