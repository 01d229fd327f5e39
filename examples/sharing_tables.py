"""Compare ensembles that share parameters with an ensemble of copies, on five sets of data.

    python examples/sharing_tables.py --members 8 --steps 600 --seeds 5 --out demo

Each way trains as many members on the same splits of scikit-learn's digits, wine, breast cancer and diabetes data, and
of a synthetic regression with a known truth. The script prints accuracy or error, negative log-likelihood, parameters
and the time of a step, and draws `sharing_tables.png`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib as mpl

mpl.use("Agg")  # draws to a file; needs no window

import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm

from plurax.ensemble import Batches, Ensemble, Trainer, metrics
from plurax.transforms.modules import Base, batch_ensemble, tabm

NOISE, EVERY = 0.3, 25


class Data(NamedTuple):
    """Features and targets; `classes` is None for regression, whose targets are standardized."""

    x: np.ndarray
    y: np.ndarray
    classes: int | None


class MLP(nnx.Module):
    """A multilayer perceptron with two hidden layers, for logits or for a mean and a variance."""

    def __init__(self, features: int, width: int, classes: int | None, rngs: nnx.Rngs) -> None:
        sizes = (features, width, width, 2 if classes is None else classes)
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(sizes)])
        self.gaussian = classes is None

    def __call__(self, x: jax.Array) -> Any:
        """Return logits (batch, classes), or means and variances (batch,)."""
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        x = self.layers[-1](x)
        return (x[..., 0], nnx.softplus(x[..., 1]) + 1e-3) if self.gaussian else x


def loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    out = model(x)
    if isinstance(out, tuple):
        mean, variance = out
        return (jnp.log(variance) + jnp.square(y - mean) / variance).mean() / 2
    return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()


def sets() -> dict[str, Data]:
    """Return the data by name."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (800, 6))
    truth = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * np.abs(x[:, 3])
    found = {
        "digits": Data(*load_digits(return_X_y=True), 10),
        "wine": Data(*load_wine(return_X_y=True), 3),
        "breast cancer": Data(*load_breast_cancer(return_X_y=True), 2),
        "diabetes": Data(*load_diabetes(return_X_y=True), None),
        "synthetic": Data(x, truth + NOISE * rng.normal(size=len(x)), None),
    }
    return {name: each._replace(y=each.y if each.classes else standardized(each.y)) for name, each in found.items()}


def standardized(y: np.ndarray) -> np.ndarray:
    return (y - y.mean()) / y.std()


def ways(data: Data, members: int) -> dict[str, Callable[[int], Ensemble]]:
    """Return functions of a seed that create an ensemble, by name."""

    def network(rngs: nnx.Rngs, width: int = 64) -> MLP:
        return MLP(data.x.shape[1], width, data.classes, rngs)

    def signed(mini: bool) -> Callable[[nnx.Rngs], Any]:
        return lambda rngs: tabm(network(rngs), first="layers.0", head="layers.2", rngs=rngs, mini=mini)

    def of(make: Callable[[nnx.Rngs], Any], count: int = members, shared: Any = None) -> Callable[[int], Ensemble]:
        return lambda seed: Ensemble.create(make, count, seed=seed, shared=shared)

    return {
        "one network": of(network, 1),
        "copies": of(network),
        "narrow copies": of(lambda rngs: network(rngs, 20)),
        "heads": of(network, shared=lambda path, _: "layers" in path and 2 not in path),
        "BatchEnsemble": of(lambda rngs: batch_ensemble(network(rngs), rngs=rngs), shared=Base),
        "TabM": of(signed(False), shared=Base),
        "TabM mini": of(signed(True), shared=Base),
    }


def scores(ensemble: Ensemble, x: np.ndarray, y: np.ndarray, classes: int | None) -> tuple[float, float]:
    """Return accuracy and negative log-likelihood; for regression the root mean squared error first."""
    if classes is not None:
        p = ensemble.predict(x, kind="classification").mean
        return float(metrics.accuracy(p, y)), float(metrics.nll(p, y))
    found = ensemble.predict(x, kind="regression")
    rmse = jnp.sqrt(jnp.square(found.mean - y).mean())
    return float(rmse), float(metrics.gaussian_nll(found.mean, found.variance, y))


def measured(data: Data, create: Callable[[int], Ensemble], steps: int, seeds: int) -> dict[str, float]:
    """Train on each split; return the mean scores, the number of parameters and the time of a step.

    A quarter of the training data decides after how many steps the ensemble is best, by its likelihood.
    """
    trainer = Trainer(loss, optax.adamw(3e-3, weight_decay=1e-3), strategy="vmap")
    found, seconds = [], []
    for seed in range(seeds):
        parts = train_test_split(data.x, data.y, test_size=0.3, random_state=seed)
        x, x_test, y, y_test = parts
        x, x_valid, y, y_valid = train_test_split(x, y, test_size=0.25, random_state=seed)
        scaler = StandardScaler().fit(x)
        x, x_valid, x_test = (scaler.transform(part).astype(np.float32) for part in (x, x_valid, x_test))
        y, y_valid, y_test = (part.astype(np.int32 if data.classes else np.float32) for part in (y, y_valid, y_test))
        state, best, least = trainer.init(create(seed)), None, np.inf
        batches = iter(Batches((x, y), 64, key=jax.random.key(seed)))
        state, _ = trainer.fit(state, batches, steps=5, progress=False)  # compiles
        for _ in range(0, steps, EVERY):
            start = time.perf_counter()
            state, _ = trainer.fit(state, batches, steps=EVERY, progress=False)
            jax.block_until_ready(state)
            seconds.append((time.perf_counter() - start) / EVERY)
            _, nll = scores(state.ensemble, x_valid, y_valid, data.classes)
            if nll < least:
                best, least = state.ensemble, nll
        assert best is not None
        found.append(scores(best, x_test, y_test, data.classes))
    score, nll = np.mean(found, axis=0)
    count = sum(leaf.size for leaf in jax.tree.leaves((state.ensemble.trainable, state.ensemble.shared)))
    return {"score": score, "nll": nll, "parameters": count, "ms": 1e3 * float(np.median(seconds))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=8, help="number of members (default 8)")
    parser.add_argument("--steps", type=int, default=600, help="most training steps (default 600)")
    parser.add_argument("--seeds", type=int, default=5, help="number of splits and seeds (default 5)")
    parser.add_argument("--only", nargs="*", default=None, help="names of the data (default all)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory for the picture")
    options = parser.parse_args()
    for name in ("members", "steps", "seeds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, but got {getattr(options, name)}")
    every = sets()
    if unknown := {*(options.only or ())} - {*every}:
        parser.error(f"--only knows {', '.join(every)}, but got {', '.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    jobs = [
        (name, way, data, create)
        for name, data in every.items()
        if options.only is None or name in options.only
        for way, create in ways(data, options.members).items()
    ]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, way, data, create in tqdm(jobs, unit="ensemble"):
        found.setdefault(name, {})[way] = measured(data, create, options.steps, options.seeds)
    console = Console()
    for name, rows in found.items():
        console.print(report(name, rows, every[name].classes is None, options))
    picture = options.out / "sharing_tables.png"
    draw(picture, found)
    console.print(f"Picture: {picture}")


def report(name: str, rows: dict[str, dict[str, float]], regression: bool, options: Any) -> Table:
    table = Table(title=f"{name}: {options.members} members, means of {options.seeds} splits")
    for column in ("", "RMSE" if regression else "accuracy", "NLL", "parameters", "ms a step"):
        table.add_column(column, justify="right" if column else "left")
    for way, row in rows.items():
        table.add_row(way, f"{row['score']:.3f}", f"{row['nll']:.3f}", f"{row['parameters']:,}", f"{row['ms']:.2f}")
    return table


def draw(picture: Path, found: dict[str, dict[str, dict[str, float]]]) -> None:
    """Draw the likelihood, compared with one network, against the parameters, compared with one network."""
    rows = -(-(len(found) + 1) // 3)  # one more for the legend
    figure, axes = plt.subplots(rows, 3, figsize=(9, 2.9 * rows), squeeze=False)
    colors = ("#777777", "#000000", "#999999", "#E69F00", "#0072B2", "#009E73", "#D55E00")
    for ax, (name, ways) in zip(axes.flat, found.items(), strict=False):
        one = ways["one network"]
        for (way, row), color in zip(ways.items(), colors, strict=True):
            ax.plot(row["parameters"] / one["parameters"], one["nll"] - row["nll"], "o", color=color, label=way)
        ax.axhline(0, color="#bbbbbb", linewidth=1, zorder=0)
        ax.set_title(name, fontsize=10)
        ax.set_xscale("log")
        ax.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        ax.minorticks_off()
        ax.set_xlabel("parameters / one network")
        ax.set_ylabel("gain in log-likelihood")
        ax.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    for ax in axes.flat[len(found) :]:
        ax.axis("off")
    axes.flat[len(found)].legend(handles, labels, loc="center", frameon=False)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
