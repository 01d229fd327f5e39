"""Compare the cost of ensembles, with each strategy, with hand-written JAX and with PyTorch.

python benchmarks/ensemble.py                          measure, and render the pages
python benchmarks/ensemble.py --mindspore PYTHON       measure the table with MindSpore; keep the other tables
python benchmarks/ensemble.py --smoke                  run small cases once; write nothing
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import _scaling
import _short_steps
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import PLATFORM, Report, Tables, arguments, claim, instructions, interleaved, ratio, spread
from _models import LEARNING_RATE, MLP, ByHand, LeNet5, Transformer, chained, cross_entropy, torch, torch_candidates
from flax import nnx

from plurax.ensemble import Ensemble, Trainer
from plurax.transforms import vmap

STRATEGIES = ("vmap", "map", "unroll", "loop")
MINDSPORE = "Four LeNet-5 with a batch of three each, amsgrad"


def forward_candidates(ensemble: Ensemble, x: jax.Array, strategies: tuple[str, ...]) -> dict[str, Callable[[], Any]]:
    """Return forward passes: `ens(x)`, which chooses a strategy, and each strategy in our library and in raw JAX."""
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
    ensemble: Ensemble, x: jax.Array, y: jax.Array, strategies: tuple[str, ...]
) -> tuple[Any, dict[str, Callable[[], Any]]]:
    """Return the measurements of "auto", and chained training steps, which return losses."""
    hand = ByHand(ensemble)
    candidates: dict[str, Callable[[], Any]] = {}

    for strategy in ("auto", *strategies):
        trainer, candidates[f"ours {strategy}"] = _scaling.ours(ensemble, x, y, strategy=strategy)
        if strategy == "auto":
            tuning = trainer.explain()
        if strategy == "loop":
            candidates["JAX loop"] = _scaling.loop_by_hand(ensemble, x, y)
        elif strategy != "auto":
            run = hand.stacked(hand.train, strategy)

            def step(state: Any, run: Callable[..., Any] = run) -> Any:
                *state, losses = run(state, (x, y))
                return tuple(state), losses

            candidates[f"JAX {strategy}"] = chained(step, (hand.params, hand.opt_state))
    return tuning, candidates


def programs(ensemble: Ensemble, x: jax.Array, y: jax.Array, strategies: tuple[str, ...]) -> list[dict[str, Any]]:
    """Count the instructions of the optimized training step, ours and the one by hand."""
    hand = ByHand(ensemble)
    rows = []
    for strategy in (name for name in strategies if name != "loop"):
        trainer = Trainer(cross_entropy, optax.adam(LEARNING_RATE), strategy=strategy)
        state = trainer.init(ensemble)
        ours = jax.jit(trainer.step).lower(state, (x, y)).compile()
        theirs = hand.stacked(hand.train, strategy).lower((hand.params, hand.opt_state), (x, y)).compile()
        rows.append({"strategy": strategy, "ours": instructions(ours), "by hand": instructions(theirs)})
    return rows


def eager_overhead(rounds: int) -> Tables:
    """Measure the overhead of our calls outside `jit` over compiled programs by hand, with tiny members."""
    ensemble = Ensemble.create(lambda rngs: nnx.Linear(2, 2, rngs=rngs), 2, seed=0)
    x, y = jnp.ones((1, 2)), jnp.zeros(1, int)
    hand = ByHand(ensemble)
    trainer = Trainer(cross_entropy, optax.adam(LEARNING_RATE), strategy="vmap")
    state = trainer.init(ensemble)
    apply, train = hand.stacked(hand.apply, "vmap"), hand.stacked(hand.train, "vmap")

    def step_by_hand(state: Any) -> Any:
        *state, losses = train(state, (x, y))
        return tuple(state), losses

    times = interleaved(
        {
            "ours forward": lambda: ensemble(x),
            "JAX forward": lambda: apply((hand.params,), (x,)),
            "ours step": chained(lambda state: trainer.step(state, (x, y)), state),
            "JAX step": chained(step_by_hand, (hand.params, hand.opt_state)),
        },
        rounds=rounds,
        seconds=0.02,
    )
    rows = []
    for job in ("forward", "step"):
        ours, theirs = ([turn * 1e3 for turn in times[f"{who} {job}"]["turns"]] for who in ("ours", "JAX"))
        added = [mine - other for mine, other in zip(ours, theirs, strict=True)]
        rows.append({"call": job, "ours (µs)": spread(ours), "JAX (µs)": spread(theirs), "added (µs)": spread(added)})
    return rows, [claim(times, f"ours {job}", [f"JAX {job}"]) for job in ("forward", "step")]


def chunks(cases: tuple[tuple[int, int], ...], sizes: tuple[int, ...], rounds: int) -> Tables:
    """Compare `vmap` in chunks with all at once and with two implementations by hand: time and temporaries."""
    found, claims = [], []
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
            functions[f"lax.map {k}"] = partial(mapped, k=k)
            if rows // k <= 32:
                functions[f"unrolled {k}"] = partial(unrolled, k=k)
        compiled = {name: jax.jit(fun).lower(x).compile() for name, fun in functions.items()}
        candidates = {name: (lambda run=run, x=x: run(x)) for name, run in compiled.items()}
        times = interleaved(candidates, rounds=rounds, seconds=0.1)

        for k, name in ((rows, "whole"), *((k, f"ours {k}") for k in sizes)):
            others = [other for other in (f"lax.map {k}", f"unrolled {k}") if other in times]
            found.append(
                {
                    "rows": f"{rows} of {width}",
                    "chunk_size": "all" if name == "whole" else k,
                    "ms": times[name]["ms"],
                    "time / all at once": ratio(times, name, "whole"),
                    **{f"{other.split()[0]} by hand": ratio(times, other, "whole") for other in others},
                    "temporaries (MiB)": compiled[name].memory_analysis().temp_size_in_bytes / 2**20,
                }
            )
            if name != "whole":
                claims.append(claim(times, name, others, f"{rows} rows of {width}"))
    return found, claims


def compare(times: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return table rows, fastest first, with the ratio of ours to the same strategy by hand."""
    rows = []
    for name, result in sorted(times.items(), key=lambda item: item[1]["ms"]["median"]):
        peer = name.replace("ours", "JAX")
        rows.append(
            {
                "": name,
                "ms": result["ms"],
                "time / the same by hand": ratio(times, name, peer) if peer != name and peer in times else None,
                "first call (s)": result["first_s"],
            }
        )
    return rows


def measured(tuning: Any) -> list[dict[str, Any]]:
    """Return what "auto" has tried as table rows."""
    return [
        {
            "": str(one.execution),
            "ms": one.ms,
            "temporaries (KiB)": None if one.temporaries is None else one.temporaries / 2**10,
            "compile (s)": one.compile_s,
            "note": "chosen" if one.execution == tuning.chosen else one.note,
        }
        for one in sorted(tuning.candidates, key=lambda one: float("inf") if one.ms is None else one.ms)
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mindspore", help="Python with MindSpore 2.10; measures only the table that includes it")
    options = parser.parse_args()
    options.only = MINDSPORE if options.mindspore else options.only
    report = Report("ensemble", options, "flax", "optax", "torch")
    smoke = options.smoke
    rounds, seconds, batch = (2, 0.001, 4) if smoke else (15, 0.15, 64)
    strategies = ("vmap", "loop") if smoke else STRATEGIES
    quick = {"tune_seconds": 0.001} if smoke else {}  # the tables of "auto" keep the default
    chunk_cases = (((16, 8),), (4,)) if smoke else (((1024, 256), (4096, 512)), (8, 32, 128, 512))
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 10, batch).astype(np.int32)
    kinds = ((MLP, (28, 28, 1), (10, 100)), (LeNet5, (32, 32, 1), (4, 10)), (Transformer, (32,), (8,)))
    for kind, shape, sizes in kinds[:1] if smoke else kinds:
        for size in (2,) if smoke else sizes:
            title = f"{kind.__name__}, {size} members, batch {batch}"
            if not report.wants(title):
                continue
            images = generator.normal(size=(batch, *shape)).astype(np.float32)
            if kind is Transformer:
                images = generator.integers(0, 128, (batch, *shape)).astype(np.int32)
            # Unrolling 100 members takes minutes to compile.
            ways = tuple(name for name in strategies if name != "unroll" or size <= 10)
            x, y = jnp.asarray(images), jnp.asarray(labels)
            ensemble = Ensemble.create(kind, size, seed=0)
            tuning, train = train_candidates(ensemble, x, y, ways)
            jobs = {"training step": train}
            if size <= 10 and kind is not Transformer:
                jobs["forward"] = forward_candidates(ensemble, x, ways)
                if torch is not None:
                    forward, train = torch_candidates(kind, size, images, labels)
                    jobs["forward"] |= forward
                    jobs["training step"] |= train
            report.add(f"{title}: candidates of auto for a training step", measured(tuning))
            for job, candidates in jobs.items():
                times = interleaved(candidates, rounds=2 * rounds if kind is MLP else rounds, seconds=seconds)
                others = [name for name in times if not name.startswith("ours")]
                report.add(f"{title}: {job}", compare(times), claim(times, "ours auto", others))
            if size <= 10:
                report.add(f"{title}: instructions of the optimized training step", programs(ensemble, x, y, ways))
    sizes = (2,) if smoke else (4, 8, 16, 32, 64)
    small = (8, ("1MiB",)) if smoke else (1000, (None, "16MiB", "4MiB", "1MiB"))
    parts: dict[str, Callable[[], Any]] = {
        f"{kind.__name__}: time of a training step per member": partial(
            _scaling.over_members, kind, shape, sizes, batch, rounds, **quick
        )
        for kind, shape, _ in kinds[: 1 if smoke else 2]
    }
    parts |= {
        "Many small members": lambda: _scaling.many(*small, rounds, **quick),
        MINDSPORE: lambda: _scaling.source_case(rounds, options.mindspore, "loop" if smoke else "auto"),
        "Ten small MLPs, 1,000 steps": lambda: _short_steps.short_steps(*((2, 4, 2) if smoke else (10, 1000, rounds))),
        "Overhead of an eager call": lambda: eager_overhead(2 if smoke else 101),
        "`vmap` in chunks": lambda: chunks(*chunk_cases, 2 if smoke else 21),
    }
    if not smoke and PLATFORM == "cpu":
        parts |= {
            "LeNet-5, 10 members, batch 64, on two CPU devices": lambda: _scaling.elsewhere(2, "two", str(rounds)),
            "Weak scaling: two members for each device": lambda: _scaling.elsewhere(8, "weak"),
        }
    report.measure(parts)


if __name__ == "__main__":
    main()
