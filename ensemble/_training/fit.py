"""`Run`: the steps of `Trainer.fit`, with the history, checkpoints, early stopping and restarts."""

from __future__ import annotations

import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from ...transforms._core.arguments import describe
from ...transforms._core.axes import broadcast_axes
from ...transforms._runs.checkpoint import Checkpoint
from ...transforms._runs.checkpoint_clock import CheckpointClock
from ...transforms._runs.data import as_arrays
from ...transforms._runs.history import History, Recorder, recorded
from ...transforms._runs.identity import Identity, check_same_run, in_a_run
from ...transforms._runs.loop import run
from ...transforms._runs.manifest import About, TrainerSettings
from ...transforms._runs.processes import Group
from ...transforms._runs.run_directory import RunDirectory
from ...transforms._runs.source import Source, Stacked, first_batch, go_to, position
from .._execution.autotune import Tuning
from .._execution.forms import State
from .._execution.search import Search
from .._execution.stepper import Stepper
from .._members.ensemble import M
from .._members.rows import copied_rows
from .._members.sharding import everywhere
from .._members.strategy import Execution, check_execution
from .._step.member_status import Stop
from .._step.state import TrainState
from .callbacks import Callback, StateAt, takes_state
from .checkpoint import begin_writing, read_run
from .early_stopping import EarlyStopping, Restarts, Watch, members_in_words
from .identity import check_program, parts_of
from .progress import range_of, range_of_loss, told_of
from .schedule import Schedule
from .validation import Validation, check_name

Resumed = tuple[TrainState, dict[str, np.ndarray] | None, Execution | None, dict[str, Any], list[Any] | None]


def resumed(
    store: RunDirectory | None, identity: Identity | None, state: TrainState, stepper: Stepper, watch: Watch
) -> Resumed:
    """Return the state from which a run goes on, its history, execution, data of its `Watch`, place in the batches."""
    found, given = None, (state._going_on(), None, None, watch.carried(state), None)
    if store is not None and identity is not None:
        read = store.newest(partial(_read, state, stepper.settings(), watch, store.resume is True))
        if read is not None:
            found, checkpoint, differences = read
            identity.check(checkpoint, int(found[0].step), parts_of(found[0]), differences)
            if differences:
                # The values of the trainer, since that is what the caller has changed.
                found = (_with_hyperparams(found[0], state), *found[1:])
    # A checkpoint before the given state is ignored: a later state means that training has continued elsewhere.
    if found is None or int(found[0].step) < watch.start:
        return given
    # At the step of a checkpoint the given state is used, with what it has of an earlier run: without early stopping
    # that restored the best parameters, the patience begins anew.
    return found if int(found[0].step) > watch.start else (given[0], *found[1:3], *given[3:])


class Report(NamedTuple):
    """The report of one step or of several that were taken as one program.

    Attributes:
      metrics: the metrics, which may not be computed yet; those of several steps have these along the last axis.
      evaluated: the values of all members, or of the ensemble, from evaluations after the last step, by column.
      active: the indices of the members that the metrics belong to.
      steps: the number of steps.
    """

    metrics: dict[str, Any]
    evaluated: dict[str, Any]
    active: np.ndarray
    steps: int


@dataclass
class Run:
    """The steps of one run of a trainer."""

    stepper: Stepper
    watch: Watch
    recorder: Recorder
    store: RunDirectory | None
    source: Source
    callbacks: Sequence[Callback]
    schedule: Schedule
    taken: int
    length: int | None = None
    history_every: int = 1
    identity: Identity | None = None
    saved: int = -1
    execution: Execution | None = None
    clock: CheckpointClock = field(default_factory=partial(CheckpointClock, None))

    def __post_init__(self) -> None:
        self.search: Search | Tuning | None = self.schedule.known
        self._takes_state = [takes_state(callback) for callback in self.callbacks]
        # The state after the last step, for callbacks; the latest values of evaluations, for the progress bar.
        self._state: State | None = None
        self._latest: dict[str, np.ndarray] = {}

    def advance(self, state: State, batch: Any) -> tuple[State, Report]:
        """Take the step of a batch, or those of `Stacked` ones; return the new state and the report."""
        watch, steps = self.watch, batch.steps if isinstance(batch, Stacked) else None
        if len(watch.active) < watch.size:
            # Batches have slices for all members, but the state has no rows for those that have left the run.
            arguments, axes = self.stepper.arguments(batch, watch.size)
            batch = watch.batch(arguments, broadcast_axes(axes, arguments), stacked=steps is not None)
            batch = batch if steps is None else Stacked(batch, steps)
        if self.identity is not None and not self.identity.program_is_known:
            check_program(self.identity, self.stepper, state, first_batch(batch))
        if watch.validation is not None and watch.validation.like is None:
            arguments, axes = self.stepper.arguments(first_batch(batch), state._size)
            watch.validation.begin(watch.full(state, optimizer=False), arguments, axes)
        after, metrics = self._step(state, batch)
        self.taken += steps or 1
        active = watch.active
        first = self.schedule.first or self.execution
        assert first is not None
        after, found = watch.after(self.taken, after, first)
        for name in found:
            if name in metrics or name in self.stepper.columns:
                raise ValueError(f"Trainer.fit: the history would have two values named {name!r}; rename one.")
        if self.stepper.executor.layout is not None:
            metrics = everywhere(metrics)
        if any(self._takes_state):
            self._state = after
        return after, Report(metrics, found, active, steps or 1)

    def _step(self, state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        """Take the steps with the execution of an earlier run, or else with that which the search wants."""
        # Where nothing is tried, the execution of the last step stays, also for batches of another kind.
        earlier = self.schedule.at(self.taken) or (self.execution if self.search is None else None)
        left = None if self.length is None else self.length - self.taken
        options: dict[str, Any] = {"donate": True, "search": self.search, "left": left}
        if self.execution is not None:
            after, metrics, self.execution = self.stepper.advance(state, batch, earlier, **options)
        else:
            with told_of("Trainer.fit: compiling the first step ..."):
                after, metrics, self.execution = self.stepper.advance(state, batch, earlier, **options)
        if earlier is None and not isinstance(self.search, Search) and (search := self.stepper.search) is not None:
            self.search, search.listener = search, self._change
            self._change([(0, search.best)])
        return after, metrics

    def _change(self, plan: list[tuple[int, Execution]]) -> None:
        assert isinstance(self.search, Search)
        self.schedule.change(self.taken, plan, self.search.known)

    def needs_state(self, step: int, report: Report) -> bool:
        """Return whether a callback may ask for the state after a step."""
        return any(self._takes_state) and (step % self.history_every == 0 or bool(report.evaluated))

    def text(self, report: Report) -> str:
        """Return the text of the progress bar: the range of the loss, and of the latest evaluations."""
        return ", ".join(
            [range_of_loss(report.metrics, report.steps), *(range_of(name, x) for name, x in self._latest.items())]
        )

    def record(self, last: int, report: Report) -> None:
        """Record steps up to the `last`, whose metrics are computed."""
        count = report.steps
        if count == 1:
            self._record(last, recorded(report.metrics), report.evaluated, report.active)
            return
        of_all = recorded(report.metrics, ndim=2)
        for i in range(count):
            metrics = {name: x[:, i] for name, x in of_all.items()}
            self._record(last - count + 1 + i, metrics, report.evaluated if i == count - 1 else {}, report.active)

    def _record(self, step: int, metrics: dict[str, np.ndarray], evaluated: dict[str, Any], active: np.ndarray) -> None:
        """Record a step, warn of members that failed, and call the callbacks."""
        stopped, trained = metrics.pop("stopped"), None
        if evaluated:
            of_all = recorded({name: np.broadcast_to(np.asarray(x), self.watch.size) for name, x in evaluated.items()})
            metrics |= {name: x[active] for name, x in of_all.items()}
            shown = {name: x[active][stopped <= 0] if np.ndim(evaluated[name]) else x[:1] for name, x in of_all.items()}
            self._latest = shown or self._latest
        if np.count_nonzero(stopped) or len(active) < self.watch.size:
            self.watch.notice(stopped)
            if (stopped > 0).all():  # no member trained: the step was dispatched before that was noticed
                return
            metrics, trained = self._of_all_members(step, metrics, stopped, active)
        if self.recorder.add(step, metrics, trained, always=bool(evaluated)) and self.callbacks:
            if trained is not None and not trained.all():
                wide = {name: x if x.dtype.kind in "fc" else x.astype(np.float32) for name, x in metrics.items()}
                metrics = {name: np.where(trained, x, np.nan).astype(x.dtype) for name, x in wide.items()}
            for callback, with_state in zip(self.callbacks, self._takes_state, strict=True):
                if not with_state:
                    callback(step, metrics)
                    continue
                state = StateAt(step, self._copy)
                try:
                    callback(step, metrics, state=state)
                finally:
                    state.close()

    def _copy(self) -> TrainState:
        """Return a copy of the state of all members after the last step."""
        assert self._state is not None
        return jax.tree.map(jnp.copy, self.watch.full(self._state))

    def _of_all_members(
        self, step: int, metrics: dict[str, np.ndarray], stopped: np.ndarray, active: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the metrics with a row for each member, and the members that trained; warn of those that failed."""
        if (stopped < 0).any():
            named = members_in_words(active[stopped < 0])
            warnings.warn(
                f"Trainer.fit: {named} stopped at step {step}, since the loss or the gradients were not finite; "
                "the state before the step is kept.",
                stacklevel=8,  # the caller of `fit`: above three methods here, two functions of the loop, and `_fit`
            )
        # A member that fails in this step still gets a row for it, with its non-finite loss.
        trained = np.zeros(self.watch.size, bool)
        trained[active] = stopped <= 0
        # Members that have left the run get arbitrary values, which `trained` masks.
        places = np.searchsorted(active[:-1], np.arange(self.watch.size))
        return {name: x[places] for name, x in metrics.items()}, trained

    def save(self, state: State) -> None:
        """Write a checkpoint."""
        assert self.store is not None
        full = self.watch.all_members(state)
        step = int(full.step)
        if step == self.saved:  # already saved: the final checkpoint, or no member has trained since
            return
        self.saved = step
        self.clock.begin()
        assert self.identity is not None
        execution = self.search.best if isinstance(self.search, Search) else self.execution
        place = position("Trainer.fit", self.source, self.store.group)
        about = About(
            best_by=self.watch.criterion,
            run=self.identity.record(),
            settings=self.stepper.settings(execution),
            position=place,
        )
        parts = full, about, self.recorder.arrays(), self.watch.parts(step, full)
        self.store.write(step, lambda path: begin_writing("Trainer.fit", path, *parts, copies=True), self.clock.end)

    def finish(self, given: TrainState, ended: State, target: int | None, interrupted: bool) -> TrainState:
        """Return the final state of all members; warn of non-finite parameters, and of a run that ended early."""
        watch, aloud = self.watch, self.watch.aloud
        last = watch.all_members(ended)
        if isinstance(self.search, Search):
            self.search.pause()
            if aloud:
                text = f'strategy="auto" used {self.search.known.summary()}.'
                tqdm.write(textwrap.fill(text, 99, break_on_hyphens=False), file=sys.stderr)
        # Steps after the last member had stopped are not counted.
        step = int(last.step)
        if self.stepper.freezes and step > watch.start and (nonfinite := watch.nonfinite(given, last)).size:
            warnings.warn(
                f"Trainer.fit: the parameters of {members_in_words(nonfinite)} are no longer finite, though the "
                "gradients were; the learning rate may be too large, or not finite.",
                stacklevel=4,  # where `Trainer.fit` was called
            )
        if step == watch.start and target in (None, step) and not interrupted:
            finished = "all members have stopped" if watch.finished else "there are no batches"
            why = finished if target is None else "steps=0"
            warnings.warn(f"Trainer.fit: no step was taken, since {why}.", stacklevel=4)
        if target is not None and step < target and not interrupted:
            why = "all members have stopped" if watch.finished else "the batches ended"
            ends = f"{why} after step {step}, {target - step} steps before the {target - watch.start} requested."
            stopped_early = (np.asarray(everywhere(last.standing.stopped)) == Stop.EARLY).any()
            if not (watch.finished and stopped_early):
                warnings.warn(f"Trainer.fit: {ends}", stacklevel=4)
            elif aloud:  # expected with early stopping, so it is printed, not a warning
                tqdm.write(ends.capitalize(), file=sys.stderr)
        return watch.restored(last)


def train(
    stepper: Stepper,
    state: TrainState[M],
    source: Iterator[Any],
    total: int | None,
    target: int | None,
    watch: Watch,
    store: RunDirectory | None,
    identity: Identity | None,
    checkpoint_every: int | timedelta | None,
    history_every: int,
    callbacks: Sequence[Callback],
    together: int,
) -> tuple[TrainState[M], History]:
    """Resume or begin a run, and train to its end; the rest of `Trainer.fit`, once its options are checked."""
    start, group = watch.start, Group.of(state)
    begin, recorded, execution, watched, place = resumed(store, identity, state, stepper, watch)
    step, taken = int(begin.step), Source(source, partial(as_arrays, "Trainer.fit", "batch"))
    if store is not None and identity is not None:
        if target is not None and step > target:
            newest = f"the newest checkpoint in {store.directory} is at step {step}, after step {target}"
            raise ValueError(f"Trainer.fit: {newest}; take more steps or use another directory.")
        if step > start:
            # Compared before any step: if there is none left, the result is that of the checkpoint.
            check_program(identity, stepper, begin, go_to("Trainer.fit", source, step - start, place, group))
            store.going_on(step, identity.differences)
        if step != target:
            store.check_room(step, (begin, watch.best, watch.snapshot))
            position("Trainer.fit", taken, group)  # raises before the first step
    recorder = Recorder(history_every, recorded)
    schedule = Schedule(None if store is None else store.directory, execution)
    length = None if total is None else start + total
    clock = CheckpointClock(checkpoint_every, group)
    rest: dict[str, Any] = {"identity": identity, "clock": clock}
    run_of = Run(stepper, watch, recorder, store, taken, callbacks, schedule, step, length, history_every, **rest)
    first: State = watch.begin(copied_rows(begin), watched)
    ended, _, interrupted = run(
        first,
        taken,
        run_of.advance,
        step=step,
        target=target,
        record=run_of.record,
        say=lambda _, report: run_of.text(report),
        save=None if store is None else run_of.save,
        clock=clock,
        progress=watch.aloud,  # only the first process shows a bar
        group=group,
        done=step - start,
        total=total,
        finished=lambda: watch.finished,
        together=together,
        at_once=run_of.needs_state,
        written=(lambda: None) if store is None else store.written,
    )
    last = run_of.finish(state, ended, target, interrupted)
    return last, recorder.rows(columns(stepper, begin))


def columns(stepper: Stepper, state: TrainState) -> dict[str, list[float]]:
    """Return the hyperparameters that have one number for each member, with their values in the state."""
    held = {**getattr(state.opt_state, "hyperparams", {}), **state.standing.hyperparams}
    # Converted through text: `str` of a float32 is the shortest decimal that identifies it, 0.1, while `float` of it is
    # 0.10000000149.
    return {name: [float(str(x)) for x in np.asarray(everywhere(held[name]))] for name in stepper.columns}


def _read(
    like: TrainState, settings: TrainerSettings, watch: Watch, resume: bool, checkpoint: Checkpoint
) -> tuple[Resumed, Checkpoint, list[str]]:
    """Read a checkpoint, and return what its settings differ in; raise if they do, unless `resume` allows it."""
    about = checkpoint.about
    if about.settings is None:
        raise ValueError(f"Trainer.fit: another kind of run wrote {checkpoint.path}; use another checkpoint_dir.")
    differences = _different_settings(about.settings, settings)
    # Before settings are compared: from a state of another structure, `resume=True` could not go on.
    with in_a_run(differences):
        state, watched = read_run(checkpoint, like, watch.parts(0, like))
    check_same_run(f"{checkpoint}", differences, resume)
    written = about.settings
    execution = Execution(written.strategy, written.chunk_size, written.products, written.devices)
    try:
        check_execution("execution", execution)
    except (TypeError, ValueError) as error:
        raise checkpoint.damaged(error) from error
    return (state, checkpoint.history(like._size), execution, watched, about.position), checkpoint, differences


def _with_hyperparams(state: TrainState, given: TrainState) -> TrainState:
    """Return a state with the hyperparameters of another one."""
    opt_state, standing = state.opt_state, state.standing
    if hasattr(opt_state, "hyperparams"):
        opt_state = opt_state._replace(hyperparams=given.opt_state.hyperparams)
    of_loss, schedules = given.standing.hyperparams, given.standing.schedules
    return replace(state, opt_state=opt_state, standing=standing._replace(hyperparams=of_loss, schedules=schedules))


def intervals(
    watch: Watch, checkpoint_every: int | timedelta | None, history_every: int, callbacks: Sequence[Callback]
) -> list[int]:
    """Return the numbers of steps that a program of several steps must divide; 0 is divisible by any."""
    options = [x.every or 0 for x in (watch.early, watch.restarts) if x is not None]
    validated = [] if watch.validation is None else [watch.validation.every, watch.validation.offset]
    saved = checkpoint_every if isinstance(checkpoint_every, int | np.integer) else 0
    return [int(saved), *options, *validated, *[history_every for x in callbacks if takes_state(x)]]


def check_watched(stepper: Stepper, early: Any, restarts: Any, validation: Validation | None, callbacks: Any) -> None:
    """Raise if an option of `fit` has the wrong type, or is incompatible with the trainer."""
    for name, value, kind in (("early_stopping", early, EarlyStopping), ("restarts", restarts, Restarts)):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"Trainer.fit: {name} must be of type {kind.__name__}, but got {describe(value)}.")
    if early is not None and isinstance(early.evaluate, str):
        check_name(validation, early.evaluate, early.every)
    if restarts is not None and not stepper.freezes:
        raise ValueError('Trainer.fit: restarts need nonfinite="freeze", since only frozen members are restarted.')
    if not isinstance(callbacks, (list, tuple)) or not all(map(callable, callbacks)):
        raise TypeError(f"Trainer.fit: callbacks must be a list of functions, but got {describe(callbacks)}.")


def _different_settings(written: TrainerSettings, settings: TrainerSettings) -> list[str]:
    """Return in which settings a trainer differs from the one that wrote a checkpoint."""
    before, now = ({"optimizer": x.optimizer, **x.hyperparams} for x in (written, settings))
    # Compared by names and numbers, since the manifest is JSON.
    return [
        f"it has {name}={before.get(name)}, but the trainer has {name}={now.get(name)}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name) and repr(before.get(name)) != repr(now.get(name))  # NaN equals nothing
    ]
