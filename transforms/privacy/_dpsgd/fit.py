"""`DPSGD.fit`: private steps until a budget is spent, with progress, history and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from ..._runs.history import History, Recorder
from ..._runs.loop import check_options, run
from ..._runs.processes import Group
from ..._runs.run_directory import RunDirectory
from .checkpoint import read_state, write_state
from .settings import Run
from .state import DPState

# The least seconds from one ε in the bar to the next, and how many times the seconds that it takes to compute one: so
# the bar takes at most about 1 / 20 of the time.
_OFTEN, _RARELY = 0.5, 20


def fit(
    settings: Run,
    state: DPState,
    batches_for: Callable[[DPState], Iterator[Any]],
    advance: Callable[[DPState, Any], tuple[DPState, dict[str, Any]]],
    *,
    steps: int | None,
    epsilon_budget: float | None,
    together: bool,
    progress: bool,
    checkpoint_dir: Any,
    checkpoint_every: int | None,
    checkpoint_keep: int,
    history_every: int,
) -> tuple[DPState, History]:
    """Take private steps, on the batches of `batches_for`, each by `advance`; see `DPSGD.fit`."""
    check_options("DPSGD.fit", steps, checkpoint_dir, checkpoint_every, checkpoint_keep, history_every)
    start = int(state.step)
    wanted = max(start, settings.num_steps) if steps is None else start + steps
    if steps is not None and wanted > settings.num_steps:
        raise ValueError(
            f"DPSGD.fit: {steps} steps after step {start} are more than num_steps={settings.num_steps}, for which this "
            "DPSGD was made; ask for fewer, or make one with more."
        )
    models = (state.members or 1) if together else 1
    # How many steps the budget allows is known before the first: it depends on public settings alone.
    target = wanted
    if epsilon_budget is not None:
        ledger, delta = settings.ledger, settings.target_delta
        target = ledger.steps_within(epsilon_budget, delta, settings.accountant, models, wanted)
        if target < start:
            raise ValueError(
                f"DPSGD.fit: {start} steps have spent more than epsilon_budget={epsilon_budget} already; give a larger "
                "one."
            )
    store = resumed = history = None
    if checkpoint_dir is not None:
        store = RunDirectory.open("DPSGD.fit", checkpoint_dir, checkpoint_keep, Group.of(state))
        resumed = store.newest(lambda checkpoint: (read_state(checkpoint, state), checkpoint.history()))
    if resumed is not None and int(resumed[0].step) >= start:
        found, history = resumed
        # A checkpoint at the step of the state may be of another run: the state that was passed counts.
        state = found if int(found.step) > start else state
        if int(state.step) > target:
            raise ValueError(
                f"DPSGD.fit: the newest checkpoint in {checkpoint_dir} is at step {int(state.step)}, later than step "
                f"{target} that was asked for; ask for more steps, a larger budget, or use another directory."
            )
    recorder = Recorder(history_every, history)
    after, step, interrupted = run(
        jax.tree.map(jnp.copy, state),  # each step takes over the memory of the state before
        batches_for(state),
        advance,
        step=int(state.step),
        target=target,
        record=lambda step, metrics: recorder.add(step, _numbers(metrics, state.members is not None)),
        say=_Spent(settings, models, target),
        save=None if store is None else partial(_save, store, recorder),
        checkpoint_every=checkpoint_every,
        progress=progress,
        done=int(state.step) - start,
        total=target - start,
    )
    if progress and not interrupted and target < wanted:
        tqdm.write(f"Stopped after step {step}: one more would pass ε = {epsilon_budget}.")
    rows = recorder.rows()
    if state.members is None:
        rows = [{name: value for name, value in row.items() if name != "member"} for row in rows]
    return after, rows


def _numbers(metrics: dict[str, Any], of_members: bool) -> dict[str, Any]:
    """Return the metrics that are one number (for each member, if there are members), as arrays over members."""
    single = {name: x for name, x in metrics.items() if getattr(x, "ndim", None) == int(of_members)}
    return {name: jnp.atleast_1d(x) for name, x in single.items()}


class _Spent:
    """The text of the bar: a bound of ε that holds until the text changes.

    Args:
      settings: what a step spends.
      models: how many are published together.
      target: the last step.
    """

    def __init__(self, settings: Run, models: int, target: int) -> None:
        self._settings, self._models, self._target = settings, models, target
        self._last, self._then, self._wait = 0, time.monotonic(), _OFTEN
        self._bound, self._text = -1, ""

    def __call__(self, step: int, _: Any) -> str:
        """Return the text of the bar behind a step."""
        now = time.monotonic()
        if now >= self._then + self._wait or step > self._bound or step == self._target:
            # Counted as far ahead as the run is likely to get before the text changes, so that it is never below what
            # was spent.
            ahead = math.ceil((step - self._last) / max(now - self._then, 1e-9) * self._wait)
            self._bound = min(self._target, step + ahead)
            ledger, delta, accountant = self._settings.ledger, self._settings.target_delta, self._settings.accountant
            count = ledger.epsilon if step == self._target else ledger.epsilon_at_most
            spent = count(self._bound, delta, accountant, self._models)
            self._text = f"ε ≤ {math.ceil(1000 * spent) / 1000:.3f}" if math.isfinite(spent) else "ε = ∞"
            self._last, self._then = step, time.monotonic()
            self._wait = max(_OFTEN, _RARELY * (self._then - now))
        return self._text


def _save(store: RunDirectory, recorder: Recorder, state: DPState) -> None:
    store.write(int(state.step), lambda path: write_state("DPSGD.fit", path, state, recorder.arrays()))
