"""`fit`: the loop of `Trainer.fit`, with its history, its checkpoints, and members that stop and restart."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from ...transforms._core.arguments import describe
from ...transforms._core.axes import broadcast_axes
from ...transforms._runs.checkpoint import Checkpoint
from ...transforms._runs.history import History, Recorder, is_recorded, numbers
from ...transforms._runs.loop import check_options, iterate, run, skip, total_steps
from ...transforms._runs.processes import Group
from ...transforms._runs.run_directory import RunDirectory
from .._execution.forms import State
from .._execution.stepper import Stepper
from .._members.sharding import everywhere
from .._members.strategy import Execution
from .._step.member_status import Stop
from .._step.state import TrainState, check_state
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


@dataclass(frozen=True)
class RunStart:
    """The values with which a run begins: those of a checkpoint, or those of one that has no history."""

    state: TrainState
    history: dict[str, np.ndarray] | None = None
    execution: Execution | None = None
    watched: dict[str, Any] = field(default_factory=dict)


def fit(
    stepper: Stepper,
    state: TrainState,
    batches: Iterable[Any],
    *,
    steps: int | None,
    progress: bool,
    checkpoint_dir: Any,
    checkpoint_every: int | None,
    checkpoint_keep: int,
    history_every: int,
    early_stopping: EarlyStopping | None,
    restarts: Restarts | None,
    callbacks: Sequence[Callback],
) -> tuple[TrainState, History]:
    """Take a step for each batch; see `Trainer.fit`."""
    check_state("Trainer.fit", state)
    check_options("Trainer.fit", steps, checkpoint_dir, checkpoint_every, checkpoint_keep, history_every)
    _check_watched(stepper, early_stopping, restarts, callbacks)
    source = iterate("Trainer.fit", batches)
    start = int(state.step)
    target = None if steps is None else start + steps
    group = Group.of(state)
    watch = Watch(early_stopping, restarts, state._size, start)
    store = None if checkpoint_dir is None else RunDirectory.open("Trainer.fit", checkpoint_dir, checkpoint_keep, group)
    found = None if store is None else store.newest(partial(_resume, state, stepper.settings(), watch))
    # A checkpoint from before the state is passed over: whoever passes a later state has gone on from elsewhere.
    begin = found if found is not None and int(found.state.step) >= start else RunStart(state)
    done = int(begin.state.step) - start
    if target is not None and start + done > target:
        newest = f"the newest checkpoint in {checkpoint_dir} is at step {start + done}"
        raise ValueError(f"Trainer.fit: {newest}, after step {target}; ask for more steps or use another directory.")
    if done:
        skip("Trainer.fit", source, done)
    else:
        # A checkpoint at the step of the state may be of another run: the state that was passed counts, without what
        # was known of the members.
        begin = replace(begin, state=state, watched={})

    columns = _columns(stepper, begin.state)
    recorder = Recorder(history_every, begin.history)
    aloud = progress and group.is_first
    steps_of_run = _Run(stepper, watch, recorder, store, callbacks, begin.execution, aloud, start + done)
    first: State = watch.begin(jax.tree.map(jnp.copy, begin.state), begin.watched)
    ended, step, interrupted = run(
        first,
        source,
        steps_of_run.advance,
        step=start + done,
        target=target,
        record=steps_of_run.record,
        say=lambda _, reported: _loss_range(reported.metrics),
        save=None if store is None else steps_of_run.save,
        checkpoint_every=checkpoint_every,
        # One bar for all processes; and Ctrl-C in one of several would leave the others waiting in a collective.
        progress=aloud,
        interruptible=group.is_alone,
        done=done,
        total=total_steps(batches, steps),
        finished=lambda: watch.finished,
    )
    last = watch.all_members(ended)
    if watch.finished:  # steps after the last member had stopped do not count
        step = int(last.step)
    if stepper.freezes and step > start and (nonfinite := watch.nonfinite(state, last)).size:
        warnings.warn(
            f"Trainer.fit: the parameters of {members_in_words(nonfinite)} are no longer finite, though the gradients "
            "that made them were; the learning rate may be too large, or not finite.",
            stacklevel=3,  # where `Trainer.fit` was called
        )
    if target is not None and step < target and not interrupted:
        why = "all members have stopped" if watch.finished else "the batches ended"
        ends = f"{why} after step {step}, {target - step} steps before the {steps} asked for."
        stopped_early = (np.asarray(everywhere(last.standing.stopped)) == Stop.EARLY).any()
        if not (watch.finished and stopped_early):
            warnings.warn(f"Trainer.fit: {ends}", stacklevel=3)
        elif aloud:  # which is what it was asked for
            tqdm.write(ends.capitalize(), file=sys.stderr)
    return last, recorder.rows(columns)


@dataclass(frozen=True)
class Reported:
    """The metrics of a step, for the members that were active in it; perhaps not computed yet."""

    metrics: dict[str, Any]
    active: np.ndarray
    evaluated: bool


@dataclass
class _Run:
    """The steps of one run of a trainer."""

    stepper: Stepper
    watch: Watch
    recorder: Recorder
    store: RunDirectory | None
    callbacks: Sequence[Callback]
    execution: Execution | None
    aloud: bool
    taken: int
    saved: int = -1

    def advance(self, state: State, batch: Any) -> tuple[State, Reported]:
        """Return the state after a step, with members stopped or put back that are due, and what it reports."""
        watch = self.watch
        if len(watch.active) < watch.size:
            # Batches are made for all members; those that have left the run have no rows in the state.
            arguments, axes = self.stepper.arguments(batch, watch.size)
            batch = watch.batch(arguments, broadcast_axes(axes, arguments))
        tell = _tell if self.aloud else lambda _: None
        after, metrics, self.execution = self.stepper.advance(state, batch, self.execution, donate=True, tell=tell)
        self.taken += 1
        active = watch.active
        after, found, lines = watch.after(self.taken, after)
        for line in lines if self.aloud else ():
            tqdm.write(line, file=sys.stderr)
        return after, Reported({**everywhere(metrics), **found}, active, bool(found))

    def record(self, step: int, reported: Reported) -> None:
        """Record a step whose metrics are computed, warn of members that failed in it, and call the callbacks."""
        active, size = reported.active, self.watch.size
        metrics = {name: x for name, x in reported.metrics.items() if is_recorded(x)}
        stopped = np.asarray(metrics.pop("stopped"))
        self.watch.notice(stopped)
        if (stopped > 0).all():  # no member has trained: the step was taken before that was noticed
            return
        if (stopped < 0).any():
            named = members_in_words(active[stopped < 0])
            warnings.warn(
                f"Trainer.fit: {named} stopped at step {step}, since the loss or the gradients were not finite; "
                "everything of it stays as it was before.",
                stacklevel=6,  # where fit was called: this is in it, in the loop, in what waits for a step
            )
        # A member that fails in this step has a row for it, with the loss that is not finite.
        trained = np.zeros(size, bool)
        trained[active] = stopped <= 0
        if len(active) < size:
            metrics = {name: _spread(numbers(x), active, size) for name, x in metrics.items()}
        if self.recorder.add(step, metrics, trained, always=reported.evaluated) and self.callbacks:
            known = {name: _or_nan(numbers(x), trained) for name, x in metrics.items()}
            for callback in self.callbacks:
                callback(step, known)

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


def _columns(stepper: Stepper, state: TrainState) -> dict[str, list[float]]:
    """Return the hyperparameters with a number for each member, as the state has them."""
    held = {**getattr(state.opt_state, "hyperparams", {}), **state.standing.hyperparams}
    # By way of text: `str` of a float32 is the shortest that is that number, 0.1, where `float` of it is 0.10000000149.
    return {name: [float(str(x)) for x in np.asarray(everywhere(held[name]))] for name in stepper.columns}


def _tell(what: str) -> None:
    tqdm.write(f"Measuring, for once: {what}", file=sys.stderr)


def _spread(values: np.ndarray, places: np.ndarray, size: int) -> np.ndarray:
    """Return values of some members as those of all, zero for the others."""
    spread = np.zeros(size, values.dtype)
    spread[places] = values
    return spread


def _or_nan(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return values with NaN where they are not known."""
    if known.all():
        return values
    wide = values if values.dtype.kind in "fc" else values.astype(np.float32)
    return np.where(known, wide, np.nan).astype(wide.dtype)


def _resume(like: TrainState, settings: dict[str, Any], watch: Watch, checkpoint: Checkpoint) -> RunStart:
    """Return what a checkpoint holds; raise if another run wrote it."""
    about = checkpoint.manifest
    _check_settings(checkpoint, settings)
    (state, watched), history = read_run(checkpoint, like, watch.likes(like)), checkpoint.history()
    return RunStart(state, history, Execution(*(about[x] for x in Execution._fields if x in about)), watched)


def _check_watched(stepper: Stepper, early: Any, restarts: Any, callbacks: Any) -> None:
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
            raise ValueError(
                f"Trainer.fit: the checkpoint {checkpoint.path} has {name}={before.get(name)}, but the trainer has "
                f"{name}={now.get(name)}; use another checkpoint_dir, or the same optimiser and hyperparameters."
            )


def _loss_range(metrics: Mapping[str, Any]) -> str:
    """Return the range of the loss over the members that train, for the bar."""
    # Of those that train: a member that stopped with a large loss would keep the range wide to the end.
    loss = np.asarray(metrics["loss"])[np.asarray(metrics["stopped"]) <= 0]
    finite = loss[np.isfinite(loss)]
    others = loss.size - finite.size
    spread = f"loss {finite.min():.4f} to {finite.max():.4f}" if finite.size else "loss"
    return spread + (f", {others} not finite" if others else "")
