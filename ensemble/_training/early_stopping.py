"""`EarlyStopping` and `Restarts`, and `Watch`, which stops and restarts members between the steps of a run.

A member that has stopped early has its best parameters. Once a quarter of the members in a run have stopped, they are
removed from it, so that its steps become faster, and inserted again when the run ends or is saved.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from ...transforms._core.arguments import check_callable, check_choice, check_count, check_number, describe
from .._execution.forms import State, stacked
from .._members.ensemble import Ensemble
from .._members.rows import match_sharding, put, take, where_rows
from .._members.sharding import everywhere
from .._members.strategy import Execution
from .._step.member_status import Stop, still_finite, with_other_keys
from .._step.state import LastStep, TrainState
from .population import Mode
from .validation import Validation

# Stopped members are removed once at most this share of the active ones remains: each removal compiles a new program.
_FEW = 0.75


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stop each member separately when it no longer improves; an option of `Trainer.fit`.

    Args:
      evaluate: a function of an `Ensemble` that returns one number for each of its members, such as a loss on
        validation data. Members that have left the run are not passed to it. Or the name of a value of the validation
        of `Trainer.fit`: "loss", or a name that its `metrics` returns. If that is a value of the whole ensemble, all
        members stop together.
      every: steps between two evaluations; 100 for a function. For a name, a multiple of `validate_every`, or None for
        each validation.
      patience: the number of consecutive evaluations without an improvement after which a member stops.
      min_delta: a value improves on the best one only if it is better by more than this.
      mode: "min" if smaller values are better, "max" if larger ones are. A non-finite value never counts as better.
      restore_best: whether each member has the parameters and other state of its best evaluation in the `ensemble` of
        the state that `fit` returns, however the run ends. Its optimizer state is not restored: `fit` goes on with
        that state from the last step, as its checkpoints do, and takes the best values and the evaluations since then
        over. A run that is cut in two thus equals the whole one. For another criterion, or with the full patience, go
        on from the best parameters, with `dataclasses.replace(state, last=None)`. False: the parameters of the last
        step, and a new call of `fit` has the full patience.

    Raises:
      TypeError: `evaluate` is neither callable nor a string; a count is not an int; `min_delta` is not a number.
      ValueError: a count is below 1; `min_delta` is below 0; `mode` is unknown.

    Source:
      Prechelt 1998, "Early Stopping - But When?".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble import EarlyStopping, metrics
      >>> x, y = jnp.ones((8, 4)), jnp.zeros(8, int)
      >>> stopping = EarlyStopping(evaluate=lambda ens: metrics.nll(ens.predict(x).members, y), every=50)
    """

    evaluate: Callable[[Ensemble], Any] | str
    every: int | None = None
    patience: int = 5
    min_delta: float = 0.0
    mode: Mode = "min"
    restore_best: bool = True

    def __post_init__(self) -> None:
        check_count("EarlyStopping", "every", self.every, optional=True)
        if not isinstance(self.evaluate, str):
            check_callable("EarlyStopping", self.evaluate, "evaluate")
            object.__setattr__(self, "every", 100 if self.every is None else self.every)
        check_count("EarlyStopping", "patience", self.patience)
        check_number("EarlyStopping", "min_delta", self.min_delta, lambda x: x >= 0, "at least 0")
        check_choice("EarlyStopping", "mode", self.mode, get_args(Mode))


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """Restart members that were frozen because a value was not finite; an option of `Trainer.fit`.

    At each step divisible by `every`, each frozen member gets back its state from the previous check (or from the start
    of the run), with new random keys if it holds any, and trains again. Then the state of every member whose numbers
    are finite is saved for the next check.

    Args:
      every: steps between two checks.
      times: the maximum number of restarts of one member.

    Raises:
      TypeError: a count is not an int.
      ValueError: a count is below 1.

    Cost:
      A second copy of the training state in memory.

    Examples:
      >>> from plurax.ensemble import Restarts
      >>> Restarts(every=200, times=2)
      Restarts(every=200, times=2)
    """

    every: int = 100
    times: int = 3

    def __post_init__(self) -> None:
        check_count("Restarts", "every", self.every)
        check_count("Restarts", "times", self.times)


class Watch:
    """Track the members of a run: which are active, their best evaluations, and their snapshots.

    "All members" means the whole ensemble; "active" members are in the run, and only their arrays are passed to steps.

    Args:
      early: the early stopping; None if there is none.
      restarts: the restarts; None if there are none.
      state: the state that was passed to `fit`.
      validation: the validation; None if there is none.
      aloud: whether to print which members stop and restart.

    Attributes:
      size: the number of all members.
      start: the step of the state that was passed to `fit`.
      active: the indices of the active members, in order.
      full_state: once members have left the run, the state of all: final for those that left, outdated for the active.
      best: the trainable and the other arrays of each active member at its best evaluation; None if these are not
        restored.
      snapshot: the arrays from which active members restart.
      stale: whether some rows of the snapshot are older than the last check, because newer ones were not finite.
      values: the best value of each member (all members), NaN if it has none yet.
      waits: the number of consecutive evaluations without an improvement, for each member (all members).
      finished: whether no member continues.
    """

    def __init__(
        self,
        early: EarlyStopping | None,
        restarts: Restarts | None,
        state: TrainState,
        validation: Validation | None = None,
        aloud: bool = False,
    ) -> None:
        if early is not None and early.restore_best and state._shared is not None and state._shared.trains:
            found = "its best state had other values of the parameters that all members share, which train on"
            raise ValueError(f"Trainer.fit: a member cannot be restored, since {found}; pass restore_best=False.")
        self.early, self.restarts, self.validation, self.aloud = early, restarts, validation, aloud
        self.size, self.start = state._size, int(state.step)
        self.active = np.arange(self.size)
        self.full_state: TrainState | None = None
        self.best: Any = state._arrays()[:2] if self._restores else None
        self.snapshot: Any = None if restarts is None else state._arrays()
        self.values = np.full(self.size, np.nan, np.float32)
        self.waits = np.zeros(self.size, np.int32)
        self.stale, self.finished = True, False

    @property
    def _restores(self) -> bool:
        """Return whether members get their best parameters back."""
        return self.early is not None and self.early.restore_best

    @property
    def criterion(self) -> str:
        """Return in words what is best, as far as that can be told; "" without early stopping."""
        if self.early is None:
            return ""
        watched = repr(self.early.evaluate) if isinstance(self.early.evaluate, str) else "a function"
        return f"{self.early.mode} of {watched}"

    def carried(self, state: TrainState) -> dict[str, Any]:
        """Return what a checkpoint would hold besides the state that an earlier run has returned."""
        if not self._restores or state.last is None:
            return {}
        if state.last.criterion not in ("", self.criterion):
            what = f"`state` has the best parameters by the {state.last.criterion}, not by the {self.criterion}"
            remedy = "pass dataclasses.replace(state, last=None) to go on from these, with the full patience"
            raise ValueError(f"Trainer.fit: {what}; {remedy}.")
        best = state.ensemble.trainable, state.ensemble.rest
        return {"best": best, "watch": {name: np.asarray(everywhere(x)) for name, x in state.last.watched.items()}}

    def begin(self, state: TrainState, saved: Mapping[str, Any]) -> TrainState:
        """Return the state with which a run begins, given the state of all members and the parts of a checkpoint."""
        if self._restores:
            self.best = saved.get("best", state._arrays()[:2])
        # A run that did not keep the best parameters has no value that these belong to.
        if self.early is not None and "watch" in saved and ("best" in saved or not self._restores):
            self.values, self.waits = (np.array(saved["watch"][name]) for name in ("values", "waits"))
        if self.restarts is not None:
            self.snapshot, self.stale = saved.get("snapshot", state._arrays()), "snapshot" in saved
        if "watch" in saved:
            going = np.flatnonzero(saved["watch"]["in_the_run"])
            if 0 < len(going) < self.size:
                state = self._leave(state, going)
        # Copies: these are still arrays of the state, whose memory the next step donates.
        self.best, self.snapshot = jax.tree.map(jnp.copy, (self.best, self.snapshot))
        self.finished = not self._going(*_known(state)).any()
        return state

    def parts(self, step: int, state: TrainState) -> dict[str, Any]:
        """Return the parts of a checkpoint besides `state`, the state of all members."""
        parts: dict[str, Any] = {}
        if self.early is not None:
            in_the_run = np.isin(np.arange(self.size), self.active)
            parts["watch"] = {"values": self.values, "waits": self.waits, "in_the_run": in_the_run}
        if self._restores:
            last = state._arrays()[:2]
            best = self._of_all(last, match_sharding(self.best, last))
            # Members without a finite value have no best arrays yet.
            parts["best"] = where_rows(~np.isnan(self.values), best, last)
        if self.restarts is not None and (self.stale or step % self.restarts.every):  # else it equals the state
            parts["snapshot"] = self._of_all(state._arrays(), match_sharding(self.snapshot, state._arrays()))
        return parts

    def restored(self, state: TrainState) -> TrainState:
        """Return the state of all members with their best arrays, and those of the last step beside them."""
        if not self._restores:
            return state
        parts, (trainable, rest, *_) = self.parts(int(state.step), state), state._arrays()
        return state._with_best(parts["best"], LastStep(trainable, rest, **parts["watch"], criterion=self.criterion))

    def after(self, step: int, state: State, execution: Execution) -> tuple[State, dict[str, Any]]:
        """Restart members after a step, evaluate, and stop members; return the new state, and the values by column.

        The values are of all members, (size,), or of the ensemble, ().
        """
        early = self.early if self.early is not None and self._judges(self.early, step) else None
        restarts = self.restarts if self.restarts is not None and step % self.restarts.every == 0 else None
        validated: dict[str, Any] = {}
        if early is not None or restarts is not None:
            # Steps may have moved the members to other devices.
            state = stacked(state)
            if self.best is not None:
                self.best = match_sharding(self.best, state._arrays()[:2])
            if self.snapshot is not None:
                self.snapshot = match_sharding(self.snapshot, state._arrays())
            if restarts is not None:
                state = self._put_back(restarts, step, state)
        if self.validation is not None and self.validation.due(step):
            validated = self.validation.values(self.full(state, optimizer=False), execution)
        columns = {f"validation_{name}": values for name, values in validated.items()}
        if early is None:
            return state, columns
        assert isinstance(state, TrainState)
        if isinstance(early.evaluate, str):
            assert self.validation is not None
            values = self.validation.watched(early.evaluate, validated)
            together, values = not values.ndim, np.broadcast_to(values, self.size)[self.active]
            return self._judge(early, step, state, values, together), columns
        values = np.full(self.size, np.nan, np.float32)
        values[self.active] = found = _checked(early.evaluate(state.ensemble), len(self.active))
        return self._judge(early, step, state, found), {**columns, "validation": values}

    def notice(self, stopped: np.ndarray) -> None:
        """Take the stop codes of the active members (0 for those that train); finish the run if all have stopped."""
        if self.restarts is None and stopped.all():
            self.finished = True

    def all_members(self, state: State) -> TrainState:
        """Return the state of all members, given the state of the active ones; at its last step if none continues."""
        state = self.full(state)
        # `notice` is called once a step is computed, when later steps may have been dispatched, and checks are rare.
        # The current state is always up to date.
        self.finished = self.finished or not self._going(*_known(state)).any()
        # Steps after the last member had stopped changed only the step number. It is reset, so that the final state
        # does not depend on how late the stop was noticed.
        if self.finished and (late := int(state.step) - self.last_step(state)):
            state = replace(state, step=state.step - np.int32(late))
        return state

    def full(self, state: State, *, optimizer: bool = True) -> TrainState:
        """Return the state of all members, given that of the active ones; without optimizer states if not wanted."""
        state = stacked(state)
        if self.full_state is None:
            return state
        rows, mine = (x if optimizer else (*x[:2], (), x[3]) for x in (self.full_state._arrays(), state._arrays()))
        arrays = self._of_all(rows, match_sharding(mine, rows))
        return state._with_rows(arrays)

    def last_step(self, state: TrainState) -> int:
        """Return the last step in which a member trained."""
        steps = np.asarray(everywhere(state.standing.step))
        return max(int(steps.max()), self.start)

    def nonfinite(self, given: TrainState, last: TrainState) -> np.ndarray:
        """Return the members with a non-finite parameter that was finite in the given state."""
        now = last.ensemble.trainable
        finite = _still_finite(now, match_sharding(given._arrays()[0], now))
        return np.flatnonzero(~np.asarray(everywhere(finite)))

    def batch(self, arguments: Any, axes: Sequence[int | None], stacked: bool) -> Any:
        """Return a batch with only the slices of active members, in arrays that have one slice per member.

        With `stacked`, these are several batches along a new axis 0, which `axes` do not count.
        """
        leaves, treedef = jax.tree.flatten(arguments)
        before = 1 if stacked else 0
        taken = [
            x
            if axis is None
            else (jnp if isinstance(x, jax.Array) else np).take(x, self.active, axis + before if axis >= 0 else axis)
            for x, axis in zip(leaves, axes, strict=True)
        ]
        return jax.tree.unflatten(treedef, taken)

    def _put_back(self, restarts: Restarts, step: int, state: TrainState) -> TrainState:
        """Restart frozen members, take the next snapshot, and return the new state."""
        stopped, before = _known(state)
        back = (stopped == Stop.NOT_FINITE) & (before < restarts.times)
        if back.any():
            arrays = _restarted(back, state._arrays(), self.snapshot, np.int32(step))
            state = state._with_rows(arrays)
            self._say(step, back, "restarted from an earlier state, with new keys")
        self.finished = not self._going(*_known(state)).any()
        # A member whose numbers are not finite keeps its earlier snapshot; a restart from this one would fail again.
        finite = _still_finite(state._arrays()[:3], self.snapshot[:3])
        self.stale = not np.asarray(everywhere(finite)).all()
        self.snapshot = where_rows(finite, state._arrays(), self.snapshot)
        return state

    def _judges(self, early: EarlyStopping, step: int) -> bool:
        """Return whether early stopping looks at a value after a step."""
        if not isinstance(early.evaluate, str):
            assert early.every is not None
            return step % early.every == 0
        return self.validation is not None and self.validation.due(step) and self.validation.due(step, early.every)

    def _judge(
        self, early: EarlyStopping, step: int, state: TrainState, values: np.ndarray, together: bool = False
    ) -> TrainState:
        """Stop members after an evaluation; return the new state, without the stopped once these are a quarter.

        With `together`, the values are that of the whole ensemble, and all members stop at once.
        """
        stopped, restarts = _known(state)
        # Stopped members are evaluated too, since one program evaluates all of them; their values are ignored. A member
        # that waits for its restart stops with the others if all stop together.
        trains = self._going(stopped, restarts) if together else stopped == Stop.TRAINS
        best, sign = self.values[self.active], 1 if early.mode == "min" else -1
        # Not "<": the best is NaN at first, and a comparison with NaN is false. With "not >=" the first finite value
        # is better.
        better = trains & np.isfinite(values) & ~(sign * values >= sign * best - early.min_delta)
        waits = np.where(better, 0, self.waits[self.active] + trains)
        self.values[self.active], self.waits[self.active] = np.where(better, values, best), waits
        if better.any():
            self.best = where_rows(better, state._arrays()[:2], self.best) if self._restores else None
        stops = trains & (waits >= early.patience)
        if stops.any():
            # A member without a finite value has no best arrays.
            back = stops & ~np.isnan(self.values[self.active]) & early.restore_best
            arrays = _ended(stops, back, state._arrays(), self.best if self._restores else state._arrays()[:2])
            state = state._with_rows(arrays)
            self._say(step, stops, f"stopped, not better for {early.patience} evaluations")
        going = self._going(np.where(stops, Stop.EARLY, stopped), restarts)
        self.finished = not going.any()
        if 0 < going.sum() <= _FEW * len(going):
            state = self._leave(self.all_members(state), self.active[going])
        return state

    def _going(self, stopped: np.ndarray, restarts: np.ndarray) -> np.ndarray:
        """Return which members train now or will train again after a restart."""
        times = 0 if self.restarts is None else self.restarts.times
        return (stopped == Stop.TRAINS) | ((stopped == Stop.NOT_FINITE) & (restarts < times))

    def _leave(self, state: TrainState, going: np.ndarray) -> TrainState:
        """Remove all members but `going` from the run; return their state, and keep the state of all for the end."""
        # `best` and `snapshot` have rows of the active members, but `going` indexes all members.
        places = np.flatnonzero(np.isin(self.active, going))
        self.full_state, self.active = state, going
        self.best, self.snapshot = (None if x is None else take(x, places) for x in (self.best, self.snapshot))
        # Copies, since the next step donates the memory of the state.
        step, shared = jax.tree.map(jnp.copy, (state.step, state._shared))
        return TrainState._of_arrays(state._structure, take(state._arrays(), going), step, shared)

    def _say(self, step: int, members: np.ndarray, what: str) -> None:
        if self.aloud:
            tqdm.write(f"Step {step}: {members_in_words(self.active[members])} {what}.", file=sys.stderr)

    def _of_all(self, full_state: Any, mine: Any) -> Any:
        """Return the arrays of all members, with those of the active ones replaced by `mine`."""
        return mine if len(self.active) == self.size else put(full_state, self.active, mine)


def _checked(values: Any, size: int) -> np.ndarray:
    """Return the values of an evaluation as float32; raise if they are not one number for each member."""
    found = np.asarray(everywhere(values))
    if found.shape != (size,) or (found.dtype.kind not in "fiu" and not jnp.issubdtype(found.dtype, jnp.floating)):
        expected = f"one number for each of the {size} members in the run"
        raise ValueError(f"EarlyStopping: evaluate must return {expected}, but it returned {describe(found)}.")
    return found.astype(np.float32)


def _known(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
    """Return the stop code and the number of restarts of each active member."""
    standing = everywhere(state.standing)
    return np.asarray(standing.stopped), np.asarray(standing.restarts)


def members_in_words(places: np.ndarray) -> str:
    """Return the indices of members as words for a sentence, such as "members 1, 3"."""
    names = ", ".join(map(str, places))
    return f"member {names}" if len(places) == 1 else f"members {names}"


@jax.jit
def _still_finite(new: Any, old: Any) -> jax.Array:
    """Return for each member whether all its numbers are finite that were finite before."""
    return jax.vmap(still_finite)(new, old)


@jax.jit
def _ended(stops: jax.Array, back: jax.Array, rows: Any, best: Any) -> Any:
    """Return the arrays with some members stopped, and the best arrays of some of those restored."""
    trainable, rest = where_rows(back, best, rows[:2])
    standing = rows[3]._replace(stopped=jnp.where(stops, jnp.int32(Stop.EARLY), rows[3].stopped))
    return trainable, rest, rows[2], standing


@jax.jit
def _restarted(back: jax.Array, rows: Any, snapshot: Any, step: jax.Array) -> Any:
    """Return the arrays with some members restarted from their snapshot."""
    times = rows[3].restarts + back
    standing = rows[3]._replace(
        step=jnp.where(back, step, rows[3].step), stopped=jnp.where(back, 0, rows[3].stopped), restarts=times
    )
    # With the same keys a member would draw the same numbers and fail again, so the number of restarts is folded into
    # its keys.
    before = snapshot[0], with_other_keys(snapshot[1], times), with_other_keys(snapshot[2], times)
    return *where_rows(back, before, rows[:3]), standing
