"""How ensembles scale: over members, over devices, and in one row with MindSpore. Part of `ensemble.py`.

A process has the devices that it has started with, so this file is also the script that `ensemble.py` starts with more:
python _scaling.py two 15      LeNet-5 side by side on two devices of the CPU
python _scaling.py weak        cost for each device over 1, 2, 4 and 8
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import HERE, interleaved, ratio
from _models import LEARNING_RATE, MLP, ByHand, LeNet5, chained, cross_entropy, torch_candidates
from flax import nnx

from plurax.ensemble import Ensemble, Trainer


def ours(
    ensemble: Ensemble, x: Any, y: Any, *, donate: bool = False, **options: Any
) -> tuple[Trainer, Callable[[], Any]]:
    """A trainer and its next step, perhaps one that takes over the memory, as in `fit`; "auto" has measured."""
    trainer = Trainer(cross_entropy, optax.adam(LEARNING_RATE), **options)
    call = chained(lambda state: trainer.advance(state, (x, y), donate=donate)[:2], trainer.init(ensemble))
    if options.get("strategy", "auto") == "auto":
        jax.block_until_ready(call())
    return trainer, call


def loop_by_hand(ensemble: Ensemble, x: Any, y: Any, *, each: bool = False) -> Callable[[], Any]:
    """A loop of the jitted step of one member in raw JAX."""
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
) -> list[dict[str, Any]]:
    """Time for each member against how many there are: a step, one as in `fit`, and a loop by hand."""
    x, y = data(shape, batch)
    candidates, chosen = {}, {}
    for size in sizes:
        ensemble = Ensemble.create(kind, size, seed=0)
        for name, donate in (("ours", False), ("fit", True)):
            trainer, candidates[f"{name} {size}"] = ours(ensemble, x, y, donate=donate, **options)
            chosen[name, size] = str(trainer.explain().chosen)
        candidates[f"loop {size}"] = loop_by_hand(ensemble, x, y)
    times = interleaved(candidates, rounds=rounds, seconds=0.05)
    return [
        {
            "members": size,
            "step, ms for each member": f"{times[f'ours {size}']['median_ms'] / size:.3f}",
            "in fit, ms for each": f"{times[f'fit {size}']['median_ms'] / size:.3f}",
            "loop by hand, ms for each": f"{times[f'loop {size}']['median_ms'] / size:.3f}",
            "step against the loop": f"{ratio(times, f'ours {size}', f'loop {size}'):.2f}",
            "in fit against the loop": f"{ratio(times, f'fit {size}', f'loop {size}'):.2f}",
            "chosen": f"{chosen['ours', size]}; in fit {chosen['fit', size]}",
        }
        for size in sizes
    ]


class Small(nnx.Module):
    """16-16-10."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.second = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.tanh(self.first(x)))


def many(size: int, budgets: tuple[str | None, ...], rounds: int, **options: Any) -> list[dict[str, Any]]:
    """Very many small members, in chunks that fit into a budget."""
    x, y = data((16,), 64)
    ensemble = Ensemble.create(Small, size, seed=0)
    trainers, candidates = {}, {}
    for budget in budgets:
        trainers[budget], candidates[str(budget)] = ours(ensemble, x, y, memory_budget=budget, **options)
    candidates["loop"] = loop_by_hand(ensemble, x, y)
    times = interleaved(candidates, rounds=rounds, seconds=0.05)
    rows = []
    for budget, trainer in trainers.items():
        tuning = trainer.explain()
        (chosen,) = [one for one in tuning.candidates if one.execution == tuning.chosen]
        rows.append(
            {
                "memory_budget": budget or "none",
                "chosen": str(chosen.execution),
                "temporaries (MiB)": f"{chosen.temporaries / 2**20:.2f}",
                "ms": f"{times[str(budget)]['median_ms']:.1f}",
                "against the loop by hand": f"{ratio(times, str(budget), 'loop'):.2f}",
            }
        )
    return rows


def source_case(rounds: int, mindspore: str | None, strategy: str) -> list[dict[str, Any]]:
    """Four LeNet-5, amsgrad, a batch of three for each: the case that MindSpore's tutorial trains."""
    x, y = data((32, 32, 1), 3, 4)
    rates = [1e-2, 1e-3, 2e-3, 3e-3]
    ensemble = Ensemble.create(LeNet5, 4, seed=0)
    trainer = Trainer(cross_entropy, optax.amsgrad, hyperparams={"learning_rate": rates}, in_axes=0, strategy=strategy)
    candidates = {"ours auto": chained(lambda state: trainer.step(state, (x, y)), trainer.init(ensemble))}
    candidates["JAX loop"] = loop_by_hand(ensemble, x, y, each=True)
    times = interleaved(candidates, rounds=2 * rounds, seconds=0.05)
    rows = [
        {"": name, "ms": f"{times[name]['median_ms']:.2f}", "against ours": f"{ratio(times, name, 'ours auto'):.2f}"}
        for name in candidates
    ]
    if mindspore:
        command = [mindspore, str(HERE / "_mindspore.py"), "4", "3", str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        theirs = statistics.median(json.loads(done.stdout.splitlines()[-1]))
        name = "MindSpore vmap(CellList), its own process"
        rows.append(
            {"": name, "ms": f"{theirs:.1f}", "against ours": f"{theirs / times['ours auto']['median_ms']:.1f}"}
        )
    tuning = trainer.explain()
    return [*rows, {"": f"auto took: {tuning.chosen}" if tuning else strategy, "ms": "", "against ours": ""}]


def elsewhere(devices: int, *arguments: str) -> Any:
    """What this file prints, started with so many devices."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(Path(__file__)), *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def on_two_devices(rounds: int, size: int = 10, batch: int = 64) -> list[dict[str, Any]]:
    """LeNet-5 side by side."""
    x, y = data((32, 32, 1), batch)
    ensemble = Ensemble.create(LeNet5, size, seed=0)
    trainer, auto = ours(ensemble, x, y)
    chosen = trainer.explain().chosen
    candidates = {f"ours auto: {chosen}": auto, "loop by hand, one device": loop_by_hand(ensemble, x, y)}
    if torch_candidates is not None:
        candidates |= torch_candidates(LeNet5, size, np.asarray(x), np.asarray(y))[1]
    times = interleaved(candidates, rounds=rounds, seconds=0.1)
    loop = "loop by hand, one device"
    return [
        {"": name, "ms": f"{times[name]['median_ms']:.1f}", "loop against it": f"{ratio(times, loop, name):.2f}"}
        for name in sorted(times, key=lambda name: times[name]["median_ms"])
    ]


def weak() -> list[dict[str, Any]]:
    """Two members for each device: what XLA counts for each device, and what devices exchange."""
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
            exchanges = re.findall(r" (?:all-|reduce-scatter|collective-)[a-z-]*\(", compiled.as_text())
            rows.append(
                {
                    "model": kind.__name__,
                    "devices": devices,
                    "members": 2 * devices,
                    "MFLOP for each device": f"{cost['flops'] / 1e6:.1f}",
                    "MB for each device": f"{cost['bytes accessed'] / 1e6:.1f}",
                    "FLOP against one device": f"{cost['flops'] / first['flops']:.3f}",
                    "bytes against one device": f"{cost['bytes accessed'] / first['bytes accessed']:.3f}",
                    "exchanges": len(exchanges),
                }
            )
    return rows


def draw(name: str, over: dict[str, list[dict[str, Any]]], tunings: dict[str, Any]) -> None:
    """Time for each member against their number, and the candidates of auto."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 1 + len(tunings), figsize=(4.6 * (1 + len(tunings)), 4), layout="constrained")
    axes = np.atleast_1d(axes)
    for (kind, rows), colour in zip(over.items(), ("C0", "C1"), strict=False):
        sizes = [row["members"] for row in rows]
        for key, style in (
            ("step, ms for each member", "o-"),
            ("in fit, ms for each", "^:"),
            ("loop by hand, ms for each", "s--"),
        ):
            axes[0].plot(
                sizes, [float(row[key]) for row in rows], style, color=colour, label=f"{kind}, {key.split(',')[0]}"
            )
    axes[0].set(xscale="log", yscale="log", xlabel="members", ylabel="ms for each member", title="One training step")
    axes[0].set_xticks(sizes, [str(size) for size in sizes])
    axes[0].minorticks_off()
    axes[0].legend(fontsize=7, ncols=2, loc="center", bbox_to_anchor=(0.5, 0.4))
    for axis, (title, tuning) in zip(axes[1:], tunings.items(), strict=True):
        measured = sorted((one for one in tuning.candidates if one.ms is not None), key=lambda one: -one.ms)
        names = [str(one.execution).replace("convolutions as products", "products") for one in measured]
        colours = ["C2" if one.execution == tuning.chosen else "C7" for one in measured]
        bars = axis.barh(names, [one.ms for one in measured], color=colours)
        axis.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
        axis.set(xlabel="ms for a step", title=title)
        axis.margins(x=0.15)
        axis.tick_params(axis="y", labelsize=8)
    figure.savefig(HERE / f"{name}.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    start = time.time()
    found = on_two_devices(int(sys.argv[2])) if sys.argv[1] == "two" else weak()
    print(f"{time.time() - start:.0f} s", file=sys.stderr)
    print(json.dumps(found))
