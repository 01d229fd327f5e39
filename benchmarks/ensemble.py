"""What an ensemble costs: ours with each strategy, against raw JAX written by hand and against PyTorch.

python benchmarks/ensemble.py            measures, and rewrites the tables of benchmarks/README.md
python benchmarks/ensemble.py --smoke    runs everything small and once, and writes nothing
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import _scaling
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import instructions, interleaved, publish, ratio, table
from _models import LEARNING_RATE, MLP, ByHand, LeNet5, Transformer, chained, cross_entropy, torch, torch_candidates
from flax import nnx

from plurax.ensemble import Ensemble, Trainer
from plurax.transforms import vmap

STRATEGIES = ("vmap", "map", "unroll", "loop")


def forward_candidates(ensemble: Ensemble, x: jax.Array, strategies: tuple[str, ...]) -> dict[str, Callable[[], Any]]:
    """The forward pass; `ens(x)` picks its own way, and the others are written with what the library has."""
    hand = ByHand(ensemble)
    members = [ensemble[i : i + 1] for i in range(len(ensemble))]
    ours = {
        "vmap": jax.jit(lambda ens, x: vmap(ens, None)(x)),
        "map": jax.jit(lambda ens, x: vmap(ens, None, chunk_size=1)(x)),
        "unroll": jax.jit(lambda ens, x: jnp.stack([member(x) for member in ens])),
    }
    candidates: dict[str, Callable[[], Any]] = {"ours auto": lambda: ensemble(x)}
    for strategy in (name for name in strategies if name != "loop"):
        run = hand.stacked(hand.apply, strategy)
        candidates[f"ours {strategy}"] = lambda strategy=strategy: ours[strategy](ensemble, x)
        candidates[f"JAX {strategy}"] = lambda run=run: run((hand.params,), (x,))
    candidates["ours loop"] = lambda: [member(x) for member in members]
    candidates["JAX loop"] = lambda: [hand.apply_jit(params, x) for params, _ in hand.members]
    return candidates


def train_candidates(
    title: str, ensemble: Ensemble, x: jax.Array, y: jax.Array, strategies: tuple[str, ...], tunings: dict[str, Any]
) -> dict[str, Callable[[], Any]]:
    """Each takes a step from where its last one ended, as a training loop does, and returns the losses."""
    hand = ByHand(ensemble)
    candidates: dict[str, Callable[[], Any]] = {}

    def loop(members: Any) -> Any:
        results = [hand.train_jit(*member, x, y) for member in members]
        return [member for *member, _ in results], [loss for *_, loss in results]

    for strategy in ("auto", *strategies):
        trainer, candidates[f"ours {strategy}"] = _scaling.ours(ensemble, x, y, strategy=strategy)
        if strategy == "auto":
            tunings[title] = trainer.explain()
        if strategy == "loop":
            candidates["JAX loop"] = chained(loop, hand.members)
        elif strategy != "auto":
            run = hand.stacked(hand.train, strategy)

            def step(state: Any, run: Callable[..., Any] = run) -> Any:
                *state, losses = run(state, (x, y))
                return tuple(state), losses

            candidates[f"JAX {strategy}"] = chained(step, (hand.params, hand.opt_state))
    return candidates


def programs(ensemble: Ensemble, x: jax.Array, y: jax.Array, strategies: tuple[str, ...]) -> list[dict[str, Any]]:
    """Instructions of the optimised training step, ours against the one by hand."""
    hand = ByHand(ensemble)
    rows = []
    for strategy in (name for name in strategies if name != "loop"):
        trainer = Trainer(cross_entropy, optax.adam(LEARNING_RATE), strategy=strategy)
        state = trainer.init(ensemble)
        ours = jax.jit(trainer.step).lower(state, (x, y)).compile()
        theirs = hand.stacked(hand.train, strategy).lower((hand.params, hand.opt_state), (x, y)).compile()
        rows.append({"strategy": strategy, "ours": instructions(ours), "by hand": instructions(theirs)})
    return rows


def eager_overhead(rounds: int) -> list[dict[str, Any]]:
    """A call of ours outside `jit`, against the compiled program by hand: members too small to hide anything."""
    ensemble = Ensemble.create(lambda rngs: nnx.Linear(2, 2, rngs=rngs), 2, seed=0)
    x, y = jnp.ones((1, 2)), jnp.zeros(1, int)
    hand = ByHand(ensemble)
    trainer = Trainer(cross_entropy, optax.adam(LEARNING_RATE), strategy="vmap")
    state = trainer.init(ensemble)
    apply, train = hand.stacked(hand.apply, "vmap"), hand.stacked(hand.train, "vmap")
    times = interleaved(
        {
            "ours forward": lambda: ensemble(x),
            "JAX forward": lambda: apply((hand.params,), (x,)),
            "ours step": lambda: trainer.step(state, (x, y)),
            "JAX step": lambda: train((hand.params, hand.opt_state), (x, y)),
        },
        rounds=rounds,
        seconds=0.02,
    )
    rows = []
    for job in ("forward", "step"):
        ours, theirs = (times[f"{who} {job}"]["median_ms"] * 1e3 for who in ("ours", "JAX"))
        rows.append(
            {"call": job, "ours (µs)": round(ours), "JAX (µs)": round(theirs), "added (µs)": round(ours - theirs)}
        )
    return rows


def chunks(cases: tuple[tuple[int, int], ...], sizes: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """`vmap` in chunks against all at once: time and temporaries, and the time of two other ways to write it."""
    found = []
    for rows, width in cases:
        x = jax.random.normal(jax.random.key(0), (rows, width))
        weights = jax.random.normal(jax.random.key(1), (2, width, width)) / width**0.5

        def fun(row: jax.Array, weights: jax.Array = weights) -> jax.Array:
            return jnp.outer(jnp.tanh(weights[1] @ jnp.tanh(weights[0] @ row)), row).sum(axis=0)

        def mapped(x: jax.Array, k: int, fun: Callable[..., Any] = fun) -> jax.Array:
            return jax.lax.map(fun, x, batch_size=k)

        def unrolled(x: jax.Array, k: int, fun: Callable[..., Any] = fun) -> jax.Array:
            return jnp.concatenate([jax.vmap(fun)(x[i : i + k]) for i in range(0, len(x), k)])

        functions: dict[str, Callable[..., Any]] = {"whole": jax.vmap(fun)}
        for k in sizes:
            functions[f"ours {k}"] = vmap(fun, chunk_size=k)
            functions[f"map {k}"] = partial(mapped, k=k)
            if rows // k <= 32:
                functions[f"unrolled {k}"] = partial(unrolled, k=k)
        compiled = {name: jax.jit(fun).lower(x).compile() for name, fun in functions.items()}
        candidates = {name: (lambda run=run, x=x: run(x)) for name, run in compiled.items()}
        times = interleaved(candidates, rounds=rounds, seconds=0.1)

        def against(name: str, times: dict[str, dict[str, Any]] = times) -> str:
            return f"{ratio(times, name, 'whole'):.2f}" if name in times else ""

        for k, name in ((rows, "whole"), *((k, f"ours {k}") for k in sizes)):
            found.append(
                {
                    "rows": f"{rows} of {width}",
                    "chunk_size": "all" if name == "whole" else k,
                    "ms": f"{times[name]['median_ms']:.2f}",
                    "times all at once": against(name),
                    "lax.map by hand": against(f"map {k}"),
                    "unrolled by hand": against(f"unrolled {k}"),
                    "temporaries (MiB)": f"{compiled[name].memory_analysis().temp_size_in_bytes / 2**20:.2f}",
                }
            )
    return found


def compare(times: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a table of times, quickest first, with ours against the same strategy by hand."""
    rows = []
    for name, result in sorted(times.items(), key=lambda item: item[1]["median_ms"]):
        peer = name.replace("ours", "JAX")
        low, high = result["quartiles_ms"]
        rows.append(
            {
                "": name,
                "ms": f"{result['median_ms']:.2f}",
                "quartiles": f"{low:.2f} to {high:.2f}",
                "against the same by hand": f"{ratio(times, name, peer):.2f}" if peer != name and peer in times else "",
                "first call (s)": f"{result['first_call_ms'] / 1e3:.2f}",
            }
        )
    return rows


def best_by_hand(times: dict[str, dict[str, Any]]) -> str:
    """Auto against the quickest strategy in raw JAX, in words."""
    best = min((name for name in times if name.startswith("JAX")), key=lambda name: times[name]["median_ms"])
    return f"auto takes {ratio(times, 'ours auto', best):.2f} times as long as the quickest by hand ({best})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="run everything small and once, write nothing")
    parser.add_argument("--mindspore", help="a Python with MindSpore 2.10, to run its case of four LeNet-5")
    options = parser.parse_args()
    smoke = options.smoke
    rounds, seconds, batch = (2, 0.001, 4) if smoke else (15, 0.15, 64)
    strategies = ("vmap", "loop") if smoke else STRATEGIES
    quick = {"tune_seconds": 0.001} if smoke else {}  # of the first table, "auto" tries all that it can
    chunk_cases = (((16, 8),), (4,)) if smoke else (((1024, 256), (4096, 512)), (8, 32, 128, 512))
    device = jax.devices()[0]
    about = (
        f"jax {jax.__version__}, flax {flax.__version__}, optax {optax.__version__}, "
        f"{'torch ' + torch.__version__ if torch else 'without torch'}, Python {platform.python_version()}, "
        f"{device.platform} ({device.device_kind})."
    )
    sections, results = [about], {"about": about}

    def show(title: str, rows: list[dict[str, Any]], *words: str) -> None:
        results[title] = rows
        sections.append("\n\n".join([f"### {title}", *words, table(rows)]))
        print(title, *words, table(rows), sep="\n", flush=True)

    generator = np.random.default_rng(0)
    labels = generator.integers(0, 10, batch).astype(np.int32)
    tunings: dict[str, Any] = {}
    kinds = ((MLP, (28, 28, 1), (10, 100)), (LeNet5, (32, 32, 1), (4, 10)), (Transformer, (32,), (8,)))
    for kind, shape, sizes in kinds[:1] if smoke else kinds:
        for size in (2,) if smoke else sizes:
            images = generator.normal(size=(batch, *shape)).astype(np.float32)
            if kind is Transformer:
                images = generator.integers(0, 128, (batch, *shape)).astype(np.int32)
            # A copy of the operations for each of 100 members takes minutes to compile.
            ways = tuple(name for name in strategies if name != "unroll" or size <= 10)
            x, y = jnp.asarray(images), jnp.asarray(labels)
            ensemble = Ensemble.create(kind, size, seed=0)
            title = f"{kind.__name__}, {size} members, batch {batch}"
            jobs = {"training step": train_candidates(title, ensemble, x, y, ways, tunings)}
            if size <= 10 and kind is not Transformer:
                jobs["forward"] = forward_candidates(ensemble, x, ways)
                if torch is not None:
                    forward, train = torch_candidates(kind, size, images, labels)
                    jobs["forward"] |= forward
                    jobs["training step"] |= train
            for job, candidates in jobs.items():
                times = interleaved(candidates, rounds=2 * rounds if kind is MLP else rounds, seconds=seconds)
                words = [best_by_hand(times)]
                if job == "training step":
                    words.append(f"```\n{tunings[title]}\n```")
                show(f"{title}, {job}", compare(times), *words)
                results[f"{title}, {job}"] = times
            if size <= 10:
                show(f"{title}: instructions of the optimised training step", programs(ensemble, x, y, ways))
    sizes = (2,) if smoke else (4, 8, 16, 32, 64)
    over = {}
    for kind, shape in ((MLP, (28, 28, 1)),) if smoke else ((MLP, (28, 28, 1)), (LeNet5, (32, 32, 1))):
        over[kind.__name__] = _scaling.over_members(kind, shape, sizes, batch, rounds, **quick)
        show(f"{kind.__name__}: a training step for each member", over[kind.__name__])
    show(
        "Very many small members",
        _scaling.many(*((8, ("1MiB",)) if smoke else (1000, (None, "16MiB", "4MiB", "1MiB"))), rounds, **quick),
    )
    show(
        "Four LeNet-5 with a batch of three each, amsgrad",
        _scaling.source_case(rounds, options.mindspore, "loop" if smoke else "auto"),
    )
    if not smoke:
        show("LeNet-5, 10 members, batch 64, on two devices of the CPU", _scaling.elsewhere(2, "two", str(rounds)))
        show("Weak scaling: two members for each device", _scaling.elsewhere(8, "weak"))
    show("What an eager call adds", eager_overhead(2 if smoke else 101))
    show("`vmap` in chunks", chunks(*chunk_cases, 2 if smoke else 21))
    if not smoke:
        _scaling.draw("ensemble", over, {k: v for k, v in tunings.items() if k.startswith(("LeNet5, 10", "MLP, 10 "))})
        sections.append("![Time for each member, and the candidates of auto](ensemble.png)")
        publish("ensemble", "\n\n".join(sections), results)


if __name__ == "__main__":
    main()
