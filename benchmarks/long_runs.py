"""Measure the cost of long runs: stopped members, the check for non-finite values, and batches per member.

python benchmarks/long_runs.py            measure, and render the pages
python benchmarks/long_runs.py --smoke    run small cases once; write nothing
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Report, Tables, arguments, claim, interleaved, ratio, spread
from _models import LEARNING_RATE, MLP, LeNet5, Transformer, chained, cross_entropy

from plurax.ensemble import Batches, EarlyStopping, Ensemble, Trainer


class Timed:
    """An iterator over one repeated batch that records the time of each request."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.asked: list[float] = []

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.asked.append(time.perf_counter())
            yield self.batch


def waiting(step: int, metrics: Any, state: Any) -> None:
    """Do nothing; since this may ask for the state, `fit` waits for each step before it requests the next batch."""


def example(kind: type, batch: int) -> tuple[jax.Array, jax.Array]:
    """Return a batch for a kind of model."""
    generator = np.random.default_rng(0)
    if kind is Transformer:
        x = generator.integers(0, 128, (batch, 32)).astype(np.int32)
    else:
        side = 28 if kind is MLP else 32
        x = generator.normal(size=(batch, side, side, 1)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(generator.integers(0, 10, batch).astype(np.int32))


def leaving(kind: type, size: int, every: int, batch: int, strategy: str) -> Tables:
    """Time steps while half of the members stop at each evaluation but the first, and steps of smaller ensembles."""
    given = example(kind, batch)
    trainer = Trainer(cross_entropy, optax.adam(LEARNING_RATE), strategy=strategy)
    sizes: list[int] = []

    def evaluate(members: Ensemble) -> np.ndarray:
        sizes.append(len(members))
        better = np.arange(len(members)) < max(1, len(members) // 2)
        return np.where(better, -float(len(sizes)), 1.0)

    counts = [size // 2**k for k in range(size.bit_length())]
    steps = every * (len(counts) + 1)
    for_all, alone = {}, {}
    ways = {"leave": EarlyStopping(evaluate=evaluate, every=every, patience=1), "stay": None}
    for way, stopping in ways.items():
        timed = Timed(given)
        state = trainer.init(Ensemble.create(kind, size, seed=0))
        trainer.fit(state, timed, steps=steps, progress=False, early_stopping=stopping, callbacks=[waiting])
        gaps = np.diff(timed.asked)
        # Use the second half of each stretch, since programs are compiled in the first.
        for k in range(len(counts)):
            part = gaps[every * k + every // 2 + (every if k else 0) : every * (k + 2) - 1]
            for_all[way, k] = spread(part * 1e3)
    for k, count in enumerate(counts):
        timed = Timed(given)
        state = trainer.init(Ensemble.create(kind, count, seed=0))
        trainer.fit(state, timed, steps=2 * every, progress=False, callbacks=[waiting])
        alone[k] = spread(np.diff(timed.asked)[every:] * 1e3)
    rows = [
        {
            "active members": count,
            "ms per step": for_all["leave", k],
            "relative to the first row": for_all["leave", k]["median"] / for_all["leave", 0]["median"],
            "all members kept (ms)": for_all["stay", k],
            "an ensemble of that size (ms)": alone[k],
        }
        for k, count in enumerate(counts)
    ]
    return rows, []


def freezing(cases: list[tuple[type, int, tuple[str, ...]]], batch: int, rounds: int, seconds: float) -> Tables:
    """Time steps with and without the check of loss and gradients, with the same execution, alternately."""
    rows = []
    for kind, size, strategies in cases:
        given = example(kind, batch)
        candidates: dict[Any, Callable[[], Any]] = {}
        found = {}
        for strategy in strategies:
            for way in ("ignore", "freeze"):
                trainer = Trainer(cross_entropy, optax.adam(LEARNING_RATE), strategy=strategy, nonfinite=way)
                state = trainer.init(Ensemble.create(kind, size, seed=0))
                # "auto" chooses once, without the check.
                found[strategy] = execution = trainer._stepper.advance(state, given, found.get(strategy))[2]

                def step(state: Any, trainer: Trainer = trainer, execution: Any = execution, given: Any = given) -> Any:
                    return trainer._stepper.advance(state, given, execution)[:2]

                candidates[strategy, way] = chained(step, state)
        times = interleaved(candidates, rounds=rounds, seconds=seconds)
        for strategy in strategies:
            rows.append(
                {
                    "": f"{kind.__name__}, {size} members",
                    "executed as": str(found[strategy]),
                    "freeze (ms)": times[strategy, "freeze"]["ms"],
                    "ignore (ms)": times[strategy, "ignore"]["ms"],
                    "ratio": ratio(times, (strategy, "freeze"), (strategy, "ignore")),
                }
            )
    return rows, []


def sampling(count: int, members: int, rounds: int) -> Tables:
    """Time drawing a batch of 64 for each member from shared data, and from a copy of the data for each member."""
    data = jnp.zeros((count, 784)), jnp.zeros(count, jnp.int32)
    key = jax.random.key(0)
    shared, own = (
        iter(Batches(data, 64, key=key, **options)) for options in ({}, {"members": members, "draw": "bootstrap"})
    )
    copies = jax.tree.map(lambda x: jnp.array(np.repeat(x[None], members, 0)), data)
    take = jax.jit(jax.vmap(lambda data, index: jax.tree.map(lambda x: x[index], data)))
    # New rows each time, as in training, since the previous rows are in the processor's caches.
    rows = cycle(list(jax.random.randint(key, (64, members, 64), 0, count)))
    names = (
        "one batch for all members",
        f"a bootstrap sample for each of {members} members",
        "the same, with a copy of the data per member",
    )
    ways = (lambda: next(shared), lambda: next(own), lambda: take(copies, next(rows)))
    times = interleaved(dict(zip(names, ways, strict=True)), rounds=rounds, seconds=0.05)
    held = sum(x.nbytes for x in data)
    memory = (held, held + members * count * 4, members * held)
    table = [
        {"batches": name, "ms": times[name]["ms"], "memory (MiB)": size / 2**20}
        for name, size in zip(names, memory, strict=True)
    ]
    return table, [claim(times, names[1], [names[2]])]


def main() -> None:
    options = arguments(__doc__).parse_args()
    smoke = options.smoke
    rounds, batch, strategy = (2, 4, "vmap") if smoke else (15, 64, "auto")
    cases = [(MLP, 10, ("vmap", "map", "unroll", "loop")), (MLP, 100, ("vmap", "map"))]
    cases += [(LeNet5, 10, ("auto",)), (Transformer, 8, ("auto",))]
    cases = [(MLP, 2, ("vmap",))] if smoke else cases
    Report("long_runs", options, "flax", "optax").measure(
        {
            "Steps as members stop: 64 MLPs": lambda: leaving(MLP, *((2, 4) if smoke else (64, 40)), batch, strategy),
            "Cost of the check for non-finite gradients": lambda: freezing(
                cases, batch, rounds, 0.001 if smoke else 0.2
            ),
            "Batches": lambda: sampling(100 if smoke else 6000, 2 if smoke else 16, rounds),
        }
    )


if __name__ == "__main__":
    main()
