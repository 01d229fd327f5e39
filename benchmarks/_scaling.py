"""Measure how ensembles scale over members and devices, and compare with MindSpore. Part of `ensemble.py`.

The number of devices is fixed when a process starts, so `ensemble.py` also runs this file as a script:
python _scaling.py two 15      LeNet-5 on two CPU devices in parallel
python _scaling.py weak        cost per device on 1, 2, 4 and 8 devices
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Tables, another_process, claim, interleaved, ratio, spread
from _models import LEARNING_RATE, MLP, ByHand, LeNet5, chained, cross_entropy, torch, torch_candidates
from flax import nnx

from plurax.ensemble import Ensemble, Trainer
from plurax.ensemble._execution import search
from plurax.ensemble._execution.executor import StepInputs


def ours(
    ensemble: Ensemble, x: Any, y: Any, *, donate: bool = False, **options: Any
) -> tuple[Trainer, Callable[[], Any]]:
    """Return a trainer and its step, after "auto" has tried all; `donate` reuses the state's memory, as in `fit`."""
    trainer = Trainer(cross_entropy, optax.adam(LEARNING_RATE), **options)

    def step_of_fit(state: Any) -> Any:
        stepper = trainer._stepper
        return stepper.advance(state, (x, y), donate=True, search=stepper.search)[:2]

    call = chained(step_of_fit if donate else lambda state: trainer.step(state, (x, y)), trainer.init(ensemble))
    if options.get("strategy", "auto") == "auto":
        try_all(trainer, call)
    return trainer, call


def try_all(trainer: Trainer, call: Callable[[], Any]) -> None:
    """Take steps until "auto" has tried all candidates, as at the end of a run of hours."""
    limits = {"_SHARE": float("inf"), "_PAYS": 0.0}
    before = {name: getattr(search, name) for name in limits}
    for name, value in limits.items():
        setattr(search, name, value)
    while trainer._stepper.search is None or trainer._stepper.search.is_open:
        jax.block_until_ready(call())
    for name, value in before.items():
        setattr(search, name, value)


def loop_by_hand(ensemble: Ensemble, x: Any, y: Any, *, each: bool = False) -> Callable[[], Any]:
    """Return a loop over the jitted step of single members in raw JAX."""
    hand = ByHand(ensemble)

    def loop(members: Any) -> Any:
        results = [hand.train_jit(*member, *((x[i], y[i]) if each else (x, y))) for i, member in enumerate(members)]
        return [member for *member, _ in results], [loss for *_, loss in results]

    return chained(loop, hand.members)


def data(shape: tuple[int, ...], batch: int, *leading: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(*leading, batch, *shape)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(generator.integers(0, 10, (*leading, batch)).astype(np.int32))


def over_members(
    kind: type, shape: tuple[int, ...], sizes: tuple[int, ...], batch: int, rounds: int, **options: Any
) -> Tables:
    """Measure the time per member against the number of members: a step, a step as in `fit`, and a loop by hand."""
    x, y = data(shape, batch)
    candidates, chosen = {}, {}
    for size in sizes:
        ensemble = Ensemble.create(kind, size, seed=0)
        for name, donate in (("a step", False), ("in fit", True)):
            trainer, candidates[f"{name}, {size}"] = ours(ensemble, x, y, donate=donate, **options)
            chosen[name, size] = str(trainer.explain().chosen)
        candidates[f"JAX loop, {size}"] = loop_by_hand(ensemble, x, y)
    times = interleaved(candidates, rounds=rounds, seconds=0.05)

    def each(name: str, size: int) -> dict[str, Any]:
        return spread(turn / size for turn in times[f"{name}, {size}"]["turns"])

    rows = [
        {
            "members": size,
            "a step (ms per member)": each("a step", size),
            "in fit (ms per member)": each("in fit", size),
            "loop by hand (ms per member)": each("JAX loop", size),
            "a step / the loop": ratio(times, f"a step, {size}", f"JAX loop, {size}"),
            "in fit / the loop": ratio(times, f"in fit, {size}", f"JAX loop, {size}"),
            "chosen": f"{chosen['a step', size]}; in fit {chosen['in fit', size]}",
        }
        for size in sizes
    ]
    claims = [claim(times, f"{way}, {n}", [f"JAX loop, {n}"]) for n in sizes for way in ("a step", "in fit")]
    return rows, claims


class Small(nnx.Module):
    """16-16-10."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.second = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.tanh(self.first(x)))


def many(size: int, budgets: tuple[str | None, ...], rounds: int, **options: Any) -> Tables:
    """Measure many small members, in chunks that fit into a budget."""
    x, y = data((16,), 64)
    ensemble = Ensemble.create(Small, size, seed=0)
    trainers, candidates = {}, {}
    for budget in budgets:
        name = f"memory_budget={budget}"
        trainers[name], candidates[name] = ours(ensemble, x, y, memory_budget=budget, **options)
    candidates["JAX loop"] = loop_by_hand(ensemble, x, y)
    times = interleaved(candidates, rounds=rounds, seconds=0.05)
    rows = []
    for name, trainer in trainers.items():
        tuning = trainer.explain()
        inputs = StepInputs(trainer.init(ensemble), (x, y), (None, None))
        (chosen,) = [one for one in tuning.candidates if one.execution == tuning.chosen]
        rows.append(
            {
                "": name,
                "chosen": str(chosen.execution),
                "temporaries (MiB)": trainer._stepper.executor.temporaries(inputs, False, chosen.execution) / 2**20,
                "ms": times[name]["ms"],
                "time / loop by hand": ratio(times, name, "JAX loop"),
            }
        )
    return rows, [claim(times, name, ["JAX loop"]) for name in trainers]


def source_case(rounds: int, mindspore: str | None, strategy: str) -> Tables:
    """Measure four LeNet-5 with AMSGrad and a batch of three each, as in MindSpore's tutorial."""
    x, y = data((32, 32, 1), 3, 4)
    rates = [1e-2, 1e-3, 2e-3, 3e-3]
    ensemble = Ensemble.create(LeNet5, 4, seed=0)
    trainer = Trainer(cross_entropy, optax.amsgrad, hyperparams={"learning_rate": rates}, in_axes=0, strategy=strategy)
    candidates = {"ours auto": chained(lambda state: trainer.step(state, (x, y)), trainer.init(ensemble))}
    if strategy == "auto":
        try_all(trainer, candidates["ours auto"])
    candidates["JAX loop"] = loop_by_hand(ensemble, x, y, each=True)
    command = (str(mindspore), str(Path(__file__).with_name("_mindspore.py")), "4", "3")
    with another_process(*command) if mindspore else nullcontext() as theirs:
        if theirs:
            candidates[f"{theirs[0]} vmap(CellList), in a separate process"] = theirs[1]
        times = interleaved(candidates, rounds=2 * rounds, seconds=0.05)
    tuning = trainer.explain()
    rows = [
        {"": name, "ms": found["ms"], "time / ours": ratio(times, name, "ours auto")} for name, found in times.items()
    ]
    rows[0]["executed as"] = str(tuning.chosen) if tuning else strategy
    return rows, [claim(times, "ours auto", list(times)[1:])]


def elsewhere(devices: int, *arguments: str) -> Any:
    """Return the output of this script, run with a number of devices."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(Path(__file__)), *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def on_two_devices(rounds: int, size: int = 10, batch: int = 64) -> Tables:
    """Measure LeNet-5 members on two devices in parallel."""
    x, y = data((32, 32, 1), batch)
    ensemble = Ensemble.create(LeNet5, size, seed=0)
    trainer, auto = ours(ensemble, x, y)
    name, loop = f"ours auto: {trainer.explain().chosen}", "JAX loop, one device"
    candidates = {name: auto, loop: loop_by_hand(ensemble, x, y)}
    if torch is not None:
        candidates |= torch_candidates(LeNet5, size, np.asarray(x), np.asarray(y))[1]
    times = interleaved(candidates, rounds=rounds, seconds=0.1)
    ranked = sorted(times, key=lambda name: times[name]["ms"]["median"])
    rows = [{"": name, "ms": times[name]["ms"], "loop / this": ratio(times, loop, name)} for name in ranked]
    return rows, [claim(times, name, list(times)[1:])]


def weak() -> Tables:
    """Return XLA's cost per device, and the number of collectives, with two members for each device."""
    rows = []
    for kind, shape in ((MLP, (28, 28, 1)), (LeNet5, (32, 32, 1))):
        x, y = data(shape, 64)
        first: dict[str, float] = {}
        for devices in (1, 2, 4, 8):
            mesh = jax.make_mesh((devices,), ("ensemble",), devices=jax.devices()[:devices])
            trainer = Trainer(cross_entropy, optax.adam(LEARNING_RATE), strategy="vmap", mesh=mesh)
            state = trainer.init(Ensemble.create(kind, 2 * devices, seed=0, mesh=mesh))
            compiled = jax.jit(trainer.step).lower(state, (x, y)).compile()
            cost: Any = compiled.cost_analysis()
            cost = cost[0] if isinstance(cost, list) else cost
            first = first or cost
            collectives = re.findall(r" (?:all-|reduce-scatter|collective-)[a-z-]*\(", compiled.as_text())
            rows.append(
                {
                    "model": kind.__name__,
                    "devices": devices,
                    "members": 2 * devices,
                    "MFLOP per device": cost["flops"] / 1e6,
                    "MB per device": cost["bytes accessed"] / 1e6,
                    "FLOP / one device": cost["flops"] / first["flops"],
                    "bytes / one device": cost["bytes accessed"] / first["bytes accessed"],
                    "collectives": len(collectives),
                }
            )
    return rows, []


if __name__ == "__main__":
    start = time.time()
    found = on_two_devices(int(sys.argv[2])) if sys.argv[1] == "two" else weak()
    print(f"{time.time() - start:.0f} s", file=sys.stderr)
    print(json.dumps(found))
