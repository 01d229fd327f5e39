"""The run of `DPSGD.fit`: resume from a checkpoint of the same run, take the steps, record and save them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.arguments import check_number
from ..._runs.checkpoint import Checkpoint
from ..._runs.checkpoint_clock import CheckpointClock
from ..._runs.history import History, Recorder, recorded
from ..._runs.identity import Identity, digest, in_a_run, program_digest
from ..._runs.loop import run
from ..._runs.processes import Group
from ..._runs.run_directory import RunDirectory
from .coupling import check_coupling
from .model_loss import with_frozen, without_frozen
from .sampling import Batch
from .state import DPState, as_member, begin_writing, read_state
from .step import PrivateStep

# The part of a state that a secret key determines, which a program need not have when it is started again.
_KEYS = "random keys"


def train(
    store: RunDirectory | None,
    state: DPState,
    data: Any,
    batches: Callable[[DPState], Iterator[Batch]],
    private: PrivateStep,
    step: Any,
    example: Callable[[], Batch],
    say: Callable[[int, Any], str],
    *,
    target: int,
    checkpoint_every: int | timedelta | None,
    history_every: int,
    progress: bool,
    limited: bool,
) -> tuple[DPState, History, bool]:
    """Train until a step; return the last state, the history, and whether Ctrl-C ended the training.

    Args:
      store: the checkpoints; None for a run without.
      state: the state that was passed to `fit`.
      data: the examples.
      batches: returns the batches of the steps after a state.
      private: the step.
      step: its `changing`, compiled, which reuses the memory of its state.
      example: returns a batch of any size, by which the program of a step is compared with that of a checkpoint.
      say: returns the text of the progress bar after a step.
      target: the last step.
      checkpoint_every: steps or time between checkpoints; None writes only the final one.
      history_every: steps between rows of the history.
      progress: whether to show a bar.
      limited: whether an ε budget determines the last step.
    """
    start, history, save = int(state.step), None, None
    if store is not None:
        settings = {"data": digest([*data])}
        identity = Identity(store.group, start, _parts(state), 1, settings, store.resume is True, _KEYS)
        given = state
        state, history = _resumed(store, identity, given)
        begin = int(state.step)
        if begin > target:
            newest = f"the newest checkpoint in {store.directory} is at step {begin}"
            more = "a larger epsilon_budget" if limited else "more steps"
            raise ValueError(f"DPSGD.fit: {newest}, after step {target}; pass {more} or another directory.")
        identity.check_program([], lambda _: program_digest(jax.jit(private).trace(given, example()).jaxpr))
        if begin > start or identity.takes_over:
            key = "the key of its checkpoint instead of that of `state`" if identity.takes_over else ""
            store.going_on(begin, identity.differences, key)
        if begin < target:
            store.check_room(begin, state)
    if private.check_loss and private.keep_batch_dim and int(state.step) == 0:
        check_coupling(private, state, batches(state), progress)
    recorder, alone = Recorder(history_every, history), state.members is None
    changing, frozen = without_frozen(state.tree, private.random_state)

    def whole(state: DPState) -> DPState:
        return replace(state, tree=with_frozen(state.tree, frozen))

    group = Group.of(state)
    clock = CheckpointClock(checkpoint_every, group)
    if store is not None:
        save = partial(_save, store, identity, recorder, clock, whole)

    def record(step: int, metrics: dict[str, Any]) -> None:
        # A single model is recorded as an ensemble of one.
        recorder.add(step, recorded(jax.tree.map(lambda x: x[None], metrics) if alone else metrics))

    begin = int(state.step)
    after, _, interrupted = run(
        jax.tree.map(jnp.copy, replace(state, tree=changing)),  # each step reuses the memory of the previous state
        batches(state),
        lambda state, batch: step(state, frozen, batch),
        step=begin,
        target=target,
        record=record,
        say=say,
        save=save,
        clock=clock,
        progress=progress,
        group=group,
        done=begin - start,
        total=target - start,
        written=(lambda: None) if store is None else store.written,
    )
    rows = recorder.rows()
    if alone:
        rows = [{name: x for name, x in row.items() if name != "member"} for row in rows]
    return whole(after), rows, interrupted


def last_step(
    start: int, steps: int | None, num_steps: int, epsilon_budget: Any, within: Callable[[float, int], int]
) -> tuple[int, int]:
    """Return the last step without and with the budget.

    Args:
      start: the number of steps taken.
      steps: the number of further steps, or None for all that remain.
      num_steps: the number of steps of the run.
      epsilon_budget: the budget; None for none.
      within: returns the number of steps that a budget allows, up to a given number.

    Raises:
      TypeError, ValueError: more steps than `num_steps`; a budget that is not positive, or that is spent already.
    """
    wanted = max(start, num_steps) if steps is None else start + steps
    if steps and start >= num_steps:
        what = f"the state has taken {start} steps, which are all of {num_steps=}"
        raise ValueError(f"DPSGD.fit: {what}; use a DPSGD with more, and with this noise_multiplier.")
    if steps is not None and wanted > num_steps:
        raise ValueError(f"DPSGD.fit: step {wanted} is beyond num_steps={num_steps}; pass fewer steps.")
    if epsilon_budget is None:
        return wanted, wanted
    # The number of steps that a budget allows depends on public settings alone, so compute it in advance.
    budget = check_number("DPSGD.fit", "epsilon_budget", epsilon_budget, lambda x: x > 0, "positive")
    target = within(budget, wanted)
    if target < start:
        raise ValueError(f"DPSGD.fit: {start} steps already spent more than {epsilon_budget=}; pass a larger one.")
    return wanted, target


def report_end(
    start: int, step: int, wanted: int, target: int, steps: int | None, epsilon_budget: Any, progress: bool
) -> None:
    """Warn if a run that was not interrupted took no step; print that the budget ended it.

    Args:
      start: the number of steps before the run, or before the checkpoint from which it resumed.
      step: the number of steps after it.
      wanted: the last step without the budget.
      target: the last step within it.
      steps: as for `fit`.
      epsilon_budget: as for `fit`.
      progress: as for `fit`.
    """
    from tqdm import tqdm

    if step == start:
        taken = "steps=0" if steps == 0 else f"the state has taken all {start} steps of the run already"
        why = taken if target == wanted else f"one would exceed {epsilon_budget=}"
        warnings.warn(f"DPSGD.fit: no step was taken, since {why}.", stacklevel=3)  # where `fit` was called
    elif progress and target < wanted:
        tqdm.write(f"Stopped after step {step}: one more would exceed ε = {epsilon_budget}.")


def _parts(state: DPState) -> dict[str, Any]:
    """Return the arrays of a state that identify a run, by the names that errors use."""
    (arrays,) = as_member(state)[0].values()
    keys = {name: arrays[name] for name in ("noise_state", "mask_key", "seed")}
    return {"weights": arrays["tree"], "optimizer states": arrays["opt_state"], _KEYS: keys}


def _resumed(store: RunDirectory, identity: Identity, state: DPState) -> tuple[DPState, dict[str, np.ndarray] | None]:
    """Return the state to resume from, and its history: the newest checkpoint, unless it is older than `state`."""

    def read(checkpoint: Checkpoint) -> tuple[DPState, dict[str, np.ndarray], Checkpoint]:
        with in_a_run():
            after = read_state(checkpoint, state)
        return after, checkpoint.history(state.members or 1), checkpoint

    if (found := store.newest(read)) is None:
        return state, None
    after, history, checkpoint = found
    identity.check(checkpoint, int(after.step), _parts(after))
    if after.step < state.step:
        return state, None
    # At the step of a checkpoint the state that was passed takes precedence, unless only its key differs.
    return after if after.step > state.step or identity.takes_over else state, history


def _save(
    store: RunDirectory,
    identity: Identity,
    recorder: Recorder,
    clock: CheckpointClock,
    whole: Callable[[DPState], DPState],
    state: DPState,
) -> None:
    """Write a checkpoint of a run with its history; `whole` adds the frozen arrays to a state."""
    clock.begin()
    parts = whole(state), recorder.arrays(), identity.record()
    store.write(int(state.step), lambda path: begin_writing("DPSGD.fit", path, *parts, copies=True), clock.end)
