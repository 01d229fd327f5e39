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

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import instructions, interleaved, publish, ratio, table
from flax import nnx

from plurax.ensemble import Ensemble, Trainer
from plurax.transforms import vmap

try:
    import torch
except ModuleNotFoundError:
    torch = None

STRATEGIES = ("vmap", "map", "unroll", "loop")
LEARNING_RATE = 1e-3


class MLP(nnx.Module):
    """784-128-128-10, the model of PyTorch's tutorial on ensembling."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense1 = nnx.Linear(784, 128, rngs=rngs)
        self.dense2 = nnx.Linear(128, 128, rngs=rngs)
        self.dense3 = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense3(nnx.relu(self.dense2(nnx.relu(self.dense1(x.reshape(len(x), -1))))))


class LeNet5(nnx.Module):
    """LeNet-5 on 32x32 images of one channel."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 6, (5, 5), padding="VALID", rngs=rngs)
        self.conv2 = nnx.Conv(6, 16, (5, 5), padding="VALID", rngs=rngs)
        self.dense1 = nnx.Linear(400, 120, rngs=rngs)
        self.dense2 = nnx.Linear(120, 84, rngs=rngs)
        self.dense3 = nnx.Linear(84, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.conv1(x)), (2, 2), (2, 2))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        return self.dense3(nnx.relu(self.dense2(nnx.relu(self.dense1(x)))))


def cross_entropy(model: Callable[..., jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


class ByHand:
    """The same ensemble in raw JAX: parameters as stacked pytrees, `jax` and `optax` only."""

    def __init__(self, ensemble: Ensemble) -> None:
        self.size = len(ensemble)
        self.graphdef, _ = nnx.split(ensemble[0])
        self.params = ensemble.trainable
        self.optimizer = optax.adam(LEARNING_RATE)
        self.opt_state = jax.vmap(self.optimizer.init)(self.params)
        self.members = [jax.tree.map(lambda a, i=i: a[i], (self.params, self.opt_state)) for i in range(self.size)]
        self.apply_jit = jax.jit(self.apply)
        self.train_jit = jax.jit(self.train)

    def apply(self, params: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(self.graphdef, params)(x)

    def train(self, params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(lambda x: self.apply(p, x), x, y))(params)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def stacked(self, fun: Callable[..., Any], strategy: str) -> Callable[..., Any]:
        """`fun(state, batch)` over members whose state is stacked."""

        def mapped(state: Any, batch: Any) -> Any:
            if strategy == "vmap":
                return jax.vmap(lambda s: fun(*s, *batch))(state)
            if strategy == "map":
                return jax.lax.map(lambda s: fun(*s, *batch), state)
            outs = [fun(*jax.tree.map(lambda a, i=i: a[i], state), *batch) for i in range(self.size)]
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)

        return jax.jit(mapped)


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
    ensemble: Ensemble, x: jax.Array, y: jax.Array, strategies: tuple[str, ...]
) -> dict[str, Callable[[], Any]]:
    """Each takes a step from where its last one ended, as a training loop does, and returns the losses."""
    hand = ByHand(ensemble)
    candidates: dict[str, Callable[[], Any]] = {}

    def loop(members: Any) -> Any:
        results = [hand.train_jit(*member, x, y) for member in members]
        return [member for *member, _ in results], [loss for *_, loss in results]

    for strategy in ("auto", *strategies):
        trainer = Trainer(cross_entropy, optax.adam(LEARNING_RATE), strategy=strategy)
        candidates[f"ours {strategy}"] = chained(lambda state, t=trainer: t.step(state, (x, y)), trainer.init(ensemble))
        if strategy == "loop":
            candidates["JAX loop"] = chained(loop, hand.members)
        elif strategy != "auto":
            run = hand.stacked(hand.train, strategy)

            def step(state: Any, run: Callable[..., Any] = run) -> Any:
                *state, losses = run(state, (x, y))
                return tuple(state), losses

            candidates[f"JAX {strategy}"] = chained(step, (hand.params, hand.opt_state))
    return candidates


def chained(step: Callable[[Any], tuple[Any, Any]], state: Any) -> Callable[[], Any]:
    """A call of `step` from the state of the call before; it returns the rest of its result."""

    def call() -> Any:
        nonlocal state
        state, rest = step(state)
        return rest

    return call


def torch_candidates(kind: type, size: int, x: np.ndarray, y: np.ndarray) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same two jobs in PyTorch: the forward pass and the step, each by a loop and by `torch.func.vmap`."""
    nn, func = torch.nn, torch.func

    def layers() -> Any:
        if kind is MLP:
            return nn.Sequential(
                nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
            )
        return nn.Sequential(
            *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
        )

    models = [layers() for _ in range(size)]
    params, buffers = func.stack_module_state(models)
    base = layers().to("meta")
    images = torch.tensor(np.moveaxis(x, -1, 1) if x.ndim == 4 else x)
    labels = torch.tensor(y, dtype=torch.long)

    def apply(params: Any, buffers: Any) -> Any:
        return func.functional_call(base, (params, buffers), (images,))

    def loss(params: Any, buffers: Any) -> Any:
        return nn.functional.cross_entropy(apply(params, buffers), labels)

    optimizers = [torch.optim.Adam(model.parameters(), lr=LEARNING_RATE) for model in models]
    stacked = torch.optim.Adam(params.values(), lr=LEARNING_RATE)

    def train_loop() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

    def train_vmap() -> None:
        grads = func.vmap(func.grad(loss), randomness="error")({k: v.detach() for k, v in params.items()}, buffers)
        for name, param in params.items():
            param.grad = grads[name]
        stacked.step()

    def forward_loop() -> Any:
        with torch.no_grad():
            return [model(images) for model in models]

    def forward_vmap() -> Any:
        with torch.no_grad():
            return func.vmap(apply)(params, buffers)

    return (
        {"torch loop": forward_loop, "torch.func.vmap": forward_vmap},
        {"torch loop": train_loop, "torch.func.vmap": train_vmap},
    )


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="run everything small and once, write nothing")
    smoke = parser.parse_args().smoke
    rounds, seconds, batch = (2, 0.001, 4) if smoke else (15, 0.15, 64)
    strategies = ("vmap", "loop") if smoke else STRATEGIES
    chunk_cases = (((16, 8),), (4,)) if smoke else (((1024, 256), (4096, 512)), (8, 32, 128, 512))
    device = jax.devices()[0]
    about = (
        f"jax {jax.__version__}, flax {flax.__version__}, optax {optax.__version__}, "
        f"{'torch ' + torch.__version__ if torch else 'without torch'}, Python {platform.python_version()}, "
        f"{device.platform} ({device.device_kind})."
    )
    sections, results = [about], {"about": about}
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 10, batch).astype(np.int32)
    kinds = ((MLP, (28, 28, 1), (10,)), (LeNet5, (32, 32, 1), (4, 10)))
    for kind, shape, sizes in kinds[:1] if smoke else kinds:
        for size in (2,) if smoke else sizes:
            images = generator.normal(size=(batch, *shape)).astype(np.float32)
            x, y = jnp.asarray(images), jnp.asarray(labels)
            ensemble = Ensemble.create(kind, size, seed=0)
            jobs = {
                "forward": forward_candidates(ensemble, x, strategies),
                "training step": train_candidates(ensemble, x, y, strategies),
            }
            if torch is not None:
                forward, train = torch_candidates(kind, size, images, labels)
                jobs["forward"] |= forward
                jobs["training step"] |= train
            for job, candidates in jobs.items():
                title = f"{kind.__name__}, {size} members, batch {batch}, {job}"
                print(title, flush=True)
                times = interleaved(candidates, rounds=2 * rounds if kind is MLP else rounds, seconds=seconds)
                results[title] = times
                text = table(compare(times))
                print(text, flush=True)
                sections.append(f"### {title}\n\n{text}")
            counts = programs(ensemble, x, y, strategies)
            title = f"{kind.__name__}, {size} members: instructions of the optimised training step"
            results[title] = counts
            sections.append(f"### {title}\n\n{table(counts)}")
            print(title, table(counts), sep="\n", flush=True)
    for title, rows in (
        ("What an eager call adds", eager_overhead(2 if smoke else 101)),
        ("`vmap` in chunks", chunks(*chunk_cases, 2 if smoke else 21)),
    ):
        results[title] = rows
        sections.append(f"### {title}\n\n{table(rows)}")
        print(title, table(rows), sep="\n", flush=True)
    if not smoke:
        publish("ensemble", "\n\n".join(sections), results)


if __name__ == "__main__":
    main()
