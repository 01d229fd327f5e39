"""Compare ensembles that share with one network, with copies and with JAX by hand: a training step, and a prediction.

python benchmarks/sharing.py              measure, and render the pages
python benchmarks/sharing.py --only MLP   measure the tables with MLP in their titles; keep the others
python benchmarks/sharing.py --smoke      run small cases once; write nothing
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Report, Tables, arguments, claim, interleaved, quickest, ratio
from _models import LEARNING_RATE, LeNet5, chained
from _scaling import ours
from flax import nnx

from plurax.ensemble import Ensemble, Execution, export, load_exported
from plurax.transforms import vmap
from plurax.transforms.modules import Base, batch_ensemble, tabm

ONE, COPIES, HAND = "one network", "copies", "BatchEnsemble, JAX by hand"
OURS, TABM, MEAN = "BatchEnsemble", "TabM", "BatchEnsemble, JAX, mean of each gradient"


class MLP(nnx.Module):
    """A multilayer perceptron."""

    def __init__(self, sizes: tuple[int, ...], rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(sizes)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


class Block(nnx.Module):
    """A residual block with group norms."""

    def __init__(self, before: int, channels: int, stride: int, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(before, channels, (3, 3), stride, rngs=rngs)
        self.conv2 = nnx.Conv(channels, channels, (3, 3), rngs=rngs)
        self.norm1, self.norm2 = (nnx.GroupNorm(channels, num_groups=4, rngs=rngs) for _ in range(2))
        self.skip = nnx.data(None if before == channels else nnx.Conv(before, channels, (1, 1), stride, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm2(self.conv2(nnx.relu(self.norm1(self.conv1(x)))))
        return nnx.relu(y + (x if self.skip is None else self.skip(x)))


class ResNet8(nnx.Module):
    """A ResNet with three blocks for small images."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(3, width, (3, 3), rngs=rngs)
        sizes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
        self.blocks = nnx.List([Block(*each, rngs) for each in sizes])
        self.last = nnx.Linear(4 * width, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x.mean((1, 2)))


def step_of(ensemble: Ensemble, x: Any, y: Any, deep: bool, smoke: bool) -> tuple[Callable[[], Any], int]:
    """Return a training step as `fit` takes it, by the quickest strategy, and the bytes of its temporaries.

    "auto" finds it, but for one network, where it has nothing to try, and for `deep` ones, which would take minutes to
    compile one after another in one program.
    """
    if smoke:
        chosen: Any = "vmap"
    elif len(ensemble) > 1 and not deep:
        chosen = ours(ensemble, x, y, donate=True, in_axes=0)[0].explain().chosen
    else:
        several = [Execution("vmap"), Execution("map", products=True)]
        one = [Execution("unroll"), Execution("unroll", products=True)]
        ways = one if len(ensemble) == 1 else several
        calls = {way: ours(ensemble, x, y, donate=True, in_axes=0, strategy=way)[1] for way in ways}
        chosen = quickest(interleaved(calls, rounds=2, seconds=0.1), ways)
        print(f"{len(ensemble)} x {ensemble.structure!r}: {chosen}")
    trainer, call = ours(ensemble, x, y, donate=True, in_axes=0, strategy=chosen)
    memory: Any = jax.jit(trainer.step).lower(trainer.init(ensemble), (x, y)).compile().memory_analysis()
    return call, memory.temp_size_in_bytes


def by_hand(ensemble: Ensemble, x: Any, y: Any, *, joint: bool) -> Callable[[], Any]:
    """Return a training step of a BatchEnsemble of an MLP, written in JAX.

    With `joint` it differentiates the mean of all losses at once, else it takes the mean of the members' gradients.
    """
    own = [ensemble.trainable["layers"][i] for i in sorted(ensemble.trainable["layers"])]
    shared = [ensemble.shared.trainable["layers"][i]["layer"]["kernel"] for i in sorted(ensemble.trainable["layers"])]
    transform = optax.adam(LEARNING_RATE)

    def loss(own: Any, shared: Any, x: Any, y: Any) -> Any:
        for i, (mine, kernel) in enumerate(zip(own, shared, strict=True)):
            x = (x * mine["inputs"]) @ kernel * mine["outputs"] + mine["bias"]
            x = x if i == len(shared) - 1 else jax.nn.relu(x)
        return optax.softmax_cross_entropy_with_integer_labels(x, y).mean()

    def all_losses(own: Any, shared: Any, x: Any, y: Any) -> Any:
        losses = jax.vmap(loss, (0, None, 0, 0))(own, shared, x, y)
        return losses.sum(), losses

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, batch: Any) -> Any:
        (own, shared), opt_state = state
        if joint:
            gradients, losses = jax.grad(all_losses, (0, 1), has_aux=True)(own, shared, *batch)
            of_own, of_shared = gradients
            of_shared = jax.tree.map(lambda g: g / len(batch[0]), of_shared)
        else:
            both = jax.vmap(jax.value_and_grad(loss, (0, 1)), (0, None, 0, 0))
            losses, (of_own, of_shared) = both(own, shared, *batch)
            of_shared = jax.tree.map(lambda g: g.mean(0), of_shared)
        updates, opt_state = transform.update((of_own, of_shared), opt_state)
        return (optax.apply_updates((own, shared), updates), opt_state), losses

    params = jax.tree.map(jnp.array, (own, shared))
    return chained(lambda state: step(state, (x, y)), (params, transform.init(params)))


def training(
    make: Callable[[nnx.Rngs], Any], shape: tuple[int, ...], members: int, batch: int, rounds: int, smoke: bool
) -> Tables:
    """Compare steps on the same number of examples in all: each member sees its own part of them."""
    generator = np.random.default_rng(0)
    x = jnp.asarray(generator.normal(size=(members, batch // members, *shape)), jnp.float32)
    y = jnp.asarray(generator.integers(0, 10, (members, batch // members)))
    whole = x.reshape(1, batch, *shape), y.reshape(1, batch)
    scaled = Ensemble.create(lambda rngs: batch_ensemble(make(rngs), rngs=rngs), members, seed=0, shared=Base)
    ensembles = {
        ONE: (Ensemble.create(make, 1, seed=0), *whole),
        OURS: (scaled, x, y),
        COPIES: (Ensemble.create(make, members, seed=0), x, y),
    }
    if isinstance(make(nnx.Rngs(0)), MLP):
        last = f"layers.{len(make(nnx.Rngs(0)).layers) - 1}"
        signed = partial(tabm, first="layers.0", head=last)
        shares = Ensemble.create(lambda rngs: signed(make(rngs), rngs=rngs), members, seed=0, shared=Base)
        ensembles[TABM] = (shares, x, y)
    deep = x.shape[-1] == 3
    steps = {name: step_of(*each, deep, smoke) for name, each in ensembles.items()}
    candidates = {name: call for name, (call, _) in steps.items()}
    if TABM in ensembles:
        candidates[HAND] = by_hand(scaled, x, y, joint=True)
        candidates[MEAN] = by_hand(scaled, x, y, joint=False)
    times = interleaved(candidates, rounds=3 if deep else rounds, seconds=0.3)
    numbers = {name: sum(leaf.size for leaf in _numbers(each[0])) for name, each in ensembles.items()}
    rows = [
        {
            "": name,
            "parameters": numbers.get(name, numbers[OURS]),
            "ms": times[name]["ms"],
            "time / one network": ratio(times, name, ONE),
            "temporaries (MiB)": steps[name][1] / 2**20 if name in steps else None,
        }
        for name in candidates
    ]
    return rows, [claim(times, OURS, [HAND, MEAN], OURS)] if HAND in candidates else []


def _numbers(ensemble: Ensemble) -> list[Any]:
    return jax.tree.leaves((ensemble.trainable, ensemble.shared))


def latency(members: int, sizes: tuple[int, ...], batches: tuple[int, ...], rounds: int) -> Tables:
    """Compare predictions: of each strategy, of members that share, from an exported file, and of one student."""
    make = partial(MLP, sizes)
    copies = Ensemble.create(make, members, seed=0).with_kind("classification")
    shares = Ensemble.create(lambda rngs: batch_ensemble(make(rngs), rngs=rngs), members, seed=0, shared=Base)
    path = Path(tempfile.mkdtemp()) / "copies"
    export(copies, path, jnp.ones((2, sizes[0])), platforms=("cpu",))
    served = load_exported(path)
    of_strategy = {
        "vmap": jax.jit(lambda ens, x: vmap(ens, None)(x)),
        "map": jax.jit(lambda ens, x: vmap(ens, None, chunk_size=1)(x)),
        "unroll": jax.jit(lambda ens, x: jnp.stack([member(x) for member in ens])),
    }
    ways: dict[str, Callable[[Any], Any]] = {
        "one student, predict": lambda x, one=copies[:1]: one.predict(x, kind="classification").mean,
        "copies, predict": lambda x: copies.predict(x).mean,
        "copies, exported file": lambda x: served(x)["mean"],
        "BatchEnsemble, predict": lambda x: shares.predict(x, kind="classification").mean,
        **{f"copies, logits, {name}": partial(call, copies) for name, call in of_strategy.items()},
    }
    rows = []
    for batch in batches:
        x = jnp.asarray(np.random.default_rng(0).normal(size=(batch, sizes[0])), jnp.float32)
        times = interleaved({name: partial(way, x) for name, way in ways.items()}, rounds=rounds, seconds=0.1)
        for name, found in times.items():
            rows.append({"batch": batch, "": name, "ms": found["ms"], "first call (s)": found["first_s"]})
    return rows, []


def main() -> None:
    options = arguments(__doc__).parse_args()
    report, smoke = Report("sharing", options), options.smoke
    if smoke:
        jax.config.update("jax_disable_most_optimizations", True)  # halves the compile time
    rounds = 2 if smoke else 7
    mlp = (6, 5, 10) if smoke else (784, 512, 256, 10)
    small, width, batch = (8, 4, 8) if smoke else (32, 16, 64)
    cases = {
        f"MLP {'-'.join(map(str, mlp))}": (partial(MLP, mlp), (mlp[0],), batch * 4),
        "LeNet-5": (LeNet5, (32, 32, 1), batch * 2),
        f"ResNet-8 of width {width}": (partial(ResNet8, width), (small, small, 3), batch // 2),
    }
    parts: dict[str, Callable[[], Tables]] = {
        f"{title}: a step of 4 members on {count} examples in all": partial(
            training, make, shape, 4, count, rounds, smoke
        )
        for title, (make, shape, count) in cases.items()
    }
    parts["Latency of a prediction"] = partial(latency, 8, mlp, (1, 2) if smoke else (1, 16, 256), rounds)
    report.measure(parts)


if __name__ == "__main__":
    main()
