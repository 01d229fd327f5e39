"""Measure the steps of ten small MLPs, and the time to the first of them. Part of `ensemble.py`.

A process compiles only once, so `ensemble.py` also runs this file as a script:
python _short_steps.py hand 10      time to the first step of ten members, by hand or with "ours"
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _measure import Tables, claim, interleaved, ratio, spread
from _models import LEARNING_RATE, ByHand, cross_entropy
from _scaling import Small, data
from flax import nnx

from plurax.ensemble import Batches, Ensemble, Trainer

BATCH = 32


def trainer(**options: Any) -> Trainer:
    return Trainer(cross_entropy, optax.adam(LEARNING_RATE), strategy="vmap", **options)


def by_hand(train: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step of all members, which reuses the memory of its state, as `fit` does."""
    return jax.jit(jax.vmap(train, (0, 0, None, None)), donate_argnums=(0, 1))


def short_steps(size: int, steps: int, rounds: int) -> Tables:
    """Compare `step` and `fit` with a loop by hand, which is given one batch that lies on the device."""
    batch, examples = data((16,), BATCH), data((16,), 1024)
    ensemble, shared, own = Ensemble.create(Small, size, seed=0), trainer(), trainer(in_axes=0)
    state = shared.init(ensemble)
    hand = ByHand(ensemble)
    step_by_hand, together = by_hand(hand.train), min(50, steps)
    several = jax.tree.map(lambda x: jnp.stack([x] * together), batch)

    @partial(jax.jit, donate_argnums=0)
    def steps_by_hand(state: Any, several: Any) -> Any:
        def step(state: Any, batch: Any) -> Any:
            *after, losses = jax.vmap(hand.train, (0, 0, None, None))(*state, *batch)
            return tuple(after), losses

        return jax.lax.scan(step, state, several)

    def loop_by_hand() -> Any:
        params, opt_state = jax.tree.map(jnp.copy, (hand.params, hand.opt_state))
        for _ in range(steps):
            params, opt_state, losses = step_by_hand(params, opt_state, *batch)
        return params, losses

    def scans_by_hand() -> Any:
        state = jax.tree.map(jnp.copy, (hand.params, hand.opt_state))
        for _ in range(steps // together):
            state, losses = steps_by_hand(state, several)
        return state, losses

    def loop_of_steps() -> Any:
        last = state
        for _ in range(steps):
            last, metrics = shared.step(last, batch)
        return last, metrics

    def fitted(trainer: Trainer, make: Callable[[], Any], **options: Any) -> Callable[[], Any]:
        return lambda: trainer.fit(state, make(), steps=steps, progress=False, **options)[0]

    def batches(**options: Any) -> Callable[[], Any]:
        return lambda: Batches(examples, BATCH, key=jax.random.key(0), **options)

    candidates = {
        "loop by hand": loop_by_hand,
        "scan by hand, 50 steps a call": scans_by_hand,
        "Trainer.step": loop_of_steps,
        "fit": fitted(shared, lambda: (batch for _ in range(steps))),
        "fit, Batches": fitted(shared, batches()),
        "fit, Batches, a bootstrap sample for each member": fitted(own, batches(members=size, draw="bootstrap")),
        "fit, Batches, steps_per_call=50": fitted(shared, batches(), steps_per_call=together),
    }
    times = interleaved(candidates, rounds=rounds, seconds=0)
    rows: list[dict[str, Any]] = [
        {
            "": name,
            "µs per step": spread(turn * 1e3 / steps for turn in found["turns"]),
            "time / loop by hand": ratio(times, name, "loop by hand"),
        }
        for name, found in times.items()
    ]
    first: dict[str, list[float]] = {"hand": [], "ours": []}
    for _ in range(min(rounds, 5)):
        for way, seconds in first.items():
            seconds.append(in_new_process(way, size))
    for row, way in zip((rows[0], rows[2]), first, strict=True):
        row["first step in a new process (s)"] = spread(first[way])
    names = list(times)
    return rows, [claim(times, name, names[: 2 if "call" in name else 1]) for name in names[2:]]


def in_new_process(way: str, size: int) -> float:
    """Return the seconds from the definition of the model to the result of the first step, in a new process."""
    command = [sys.executable, str(Path(__file__)), way, str(size)]
    done = subprocess.run(command, env=dict(os.environ), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def first_step(way: str, size: int) -> float:
    """Create members, optimizer state and step, take the first step, and return the seconds."""
    batch = jax.block_until_ready(data((16,), BATCH))
    start = time.perf_counter()
    if way == "ours":
        ours = trainer()
        jax.block_until_ready(ours.step(ours.init(Ensemble.create(Small, size, seed=0)), batch))
        return time.perf_counter() - start
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Small(nnx.Rngs(0))))
    optimizer = optax.adam(LEARNING_RATE)

    def create(i: jax.Array) -> Any:
        return nnx.state(Small(nnx.Rngs(jax.random.fold_in(jax.random.key(0), i))))

    def train(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(nnx.merge(graphdef, p), x, y))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jax.jit(jax.vmap(create))(jnp.arange(size))
    jax.block_until_ready(by_hand(train)(params, jax.jit(jax.vmap(optimizer.init))(params), *batch))
    return time.perf_counter() - start


if __name__ == "__main__":
    print(json.dumps(first_step(sys.argv[1], int(sys.argv[2]))))
