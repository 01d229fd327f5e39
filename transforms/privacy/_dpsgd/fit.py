"""The run of `DPSGD.fit`: resume from a checkpoint of the same run, take the steps, record and save them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._runs.checkpoint import Checkpoint
from ..._runs.history import History, Recorder
from ..._runs.identity import Identity, digest, in_a_run, program_digest
from ..._runs.loop import run
from ..._runs.run_directory import RunDirectory
from .sampling import Batch
from .state import DPState, as_member, read_state, write_state


def train(
    store: RunDirectory | None,
    state: DPState,
    data: Any,
    batches: Callable[[DPState], Iterator[Batch]],
    step: Any,
    example: Callable[[], Batch],
    say: Callable[[int, Any], str],
    *,
    target: int,
    checkpoint_every: int | None,
    history_every: int,
    progress: bool,
) -> tuple[DPState, History, bool]:
    """Train until a step; return the last state, the history, and whether Ctrl-C ended the training.

    Args:
      store: the checkpoints; None for a run without.
      state: the state that was passed to `fit`.
      data: the examples.
      batches: returns the batches of the steps after a state.
      step: the compiled step, which reuses the memory of its state.
      example: returns a batch of any size, by which the program of a step is compared with that of a checkpoint.
      say: returns the text of the progress bar after a step.
      target: the last step.
      checkpoint_every: steps between checkpoints.
      history_every: steps between rows of the history.
      progress: whether to show a bar.
    """
    start, history, save = int(state.step), None, None
    if store is not None:
        identity = Identity(store.group, start, _parts(state), 1, {"data": digest([*data])}, store.resume is True)
        given = state
        state, history = _resumed(store, identity, given)
        begin = int(state.step)
        if begin > target:
            newest = f"the newest checkpoint in {store.directory} is at step {begin}"
            raise ValueError(f"DPSGD.fit: {newest}, after step {target}; pass more steps or another directory.")
        identity.check_program([], lambda _: program_digest(step.trace(given, example()).jaxpr))
        if begin > start:
            store.going_on(begin, identity.differences)
        if begin < target:
            store.check_room(begin, state)
    recorder, alone = Recorder(history_every, history), state.members is None
    if store is not None:
        save = partial(_save, store, identity, recorder)

    def record(step: int, metrics: dict[str, Any]) -> None:
        # A single model is recorded as an ensemble of one.
        recorder.add(step, jax.tree.map(lambda x: x[None], metrics) if alone else metrics)

    begin = int(state.step)
    after, _, interrupted = run(
        jax.tree.map(jnp.copy, state),  # each step reuses the memory of the previous state
        batches(state),
        step,
        step=begin,
        target=target,
        record=record,
        say=say,
        save=save,
        checkpoint_every=checkpoint_every,
        progress=progress,
        done=begin - start,
        total=target - start,
    )
    rows = recorder.rows()
    if alone:
        rows = [{name: x for name, x in row.items() if name != "member"} for row in rows]
    return after, rows, interrupted


def _parts(state: DPState) -> dict[str, Any]:
    """Return the arrays of a state that identify a run, by the names that errors use."""
    (arrays,) = as_member(state)[0].values()
    keys = {name: arrays[name] for name in ("noise_state", "mask_key", "seed")}
    return {"weights": arrays["tree"], "optimizer states": arrays["opt_state"], "random keys": keys}


def _resumed(store: RunDirectory, identity: Identity, state: DPState) -> tuple[DPState, dict[str, np.ndarray] | None]:
    """Return the state to resume from, and its history: the newest checkpoint, unless it is older than `state`."""

    def read(checkpoint: Checkpoint) -> tuple[DPState, dict[str, np.ndarray], Checkpoint]:
        with in_a_run():
            after = read_state(checkpoint, state)
        return after, checkpoint.history(), checkpoint

    if (found := store.newest(read)) is None:
        return state, None
    after, history, checkpoint = found
    identity.check(checkpoint, int(after.step), _parts(after))
    if after.step < state.step:
        return state, None
    # At the step of a checkpoint the state that was passed takes precedence.
    return after if after.step > state.step else state, history


def _save(store: RunDirectory, identity: Identity, recorder: Recorder, state: DPState) -> None:
    """Write a checkpoint of a run with its history."""

    def write(path: Any) -> None:
        write_state("DPSGD.fit", path, state, recorder.arrays(), identity.manifest())

    store.write(int(state.step), write)
