"""Sweep eight learning rates with eight seeds each, trained on handwritten digits as one program.

    python examples/sweep_digits.py --rates 8 --seeds 8 --steps 300 --out demo

The 64 networks are one ensemble. Seed k has the same initial weights for every rate, and all networks see the same
batches. The script prints a table, and draws `sweep_digits.png`: the learning curves of each rate, and the validation
error against the rate, with a band over the seeds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax
import matplotlib as mpl

mpl.use("Agg")  # draws to a file; needs no window

import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from plurax.ensemble import Batches, Ensemble, Trainer, grid, k_best, metrics, plots, select


class Network(nnx.Module):
    """64-48-10, for images of 8 by 8 pixels."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 48, rngs=rngs)
        self.out = nnx.Linear(48, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits (batch, 10) for images (batch, 64)."""
        return self.out(nnx.relu(self.hidden(x)))


def loss(model: Network, images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=int, default=8, help="number of learning rates, from 0.0001 to 1 (default 8)")
    parser.add_argument("--seeds", type=int, default=8, help="networks for each rate (default 8)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default 300)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory for the picture")
    options = parser.parse_args()
    for name in ("rates", "seeds", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, but got {getattr(options, name)}")
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console()

    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    x, x_valid, y, y_valid = train_test_split(images, labels, test_size=360, stratify=labels, random_state=0)
    rates = np.geomspace(1e-4, 1, options.rates).tolist()
    hyperparams = grid(learning_rate=rates, repeats=options.seeds)
    size = len(hyperparams["learning_rate"])
    # Use the same keys for every rate.
    seeds = jax.numpy.tile(jax.random.split(jax.random.key(0), options.seeds), options.rates)
    ensemble = Ensemble.create(Network, size, seed=seeds).with_kind("classification")
    console.print(f"{ensemble}: {options.rates} rates × {options.seeds} seeds")

    trainer = Trainer(loss, optax.adam, hyperparams=hyperparams, strategy="vmap")
    batches = Batches((x, y), 64, key=jax.random.key(1))
    state = trainer.init(ensemble)
    trainer.step(state, next(iter(batches)))  # compiles
    start = time.perf_counter()
    state, history = trainer.fit(state, batches, steps=options.steps)
    seconds = time.perf_counter() - start
    console.print(f"{size} networks, {options.steps} steps each: {seconds:.1f} s.")

    prediction = state.ensemble.predict(x_valid)
    scores = {
        "accuracy": np.asarray(metrics.accuracy(prediction.members, y_valid)).reshape(options.rates, options.seeds),
        "NLL": np.asarray(metrics.nll(prediction.members, y_valid)).reshape(options.rates, options.seeds),
    }
    table = Table(title=f"{len(y_valid)} validation images, {options.seeds} seeds: median (lowest to highest)")
    for head in ("learning rate", *scores):
        table.add_column(head, justify="right")
    best = int(np.median(scores["NLL"], axis=1).argmin())
    for i, rate in enumerate(rates):
        cells = [f"{np.median(v[i]):.3f} ({v[i].min():.3f} to {v[i].max():.3f})" for v in scores.values()]
        table.add_row(f"{rate:.2g}", *cells, style="bold" if i == best else None)
    console.print(table)
    five = select(state.ensemble, k_best(metrics.nll(prediction.members, y_valid), min(5, size)))
    together = metrics.nll(five.predict(x_valid).mean, y_valid)
    console.print(f"Ensemble of the best {len(five)} networks: NLL {float(together):.3f}.")

    picture = options.out / "sweep_digits.png"
    draw(picture, rates, scores["NLL"], history)
    console.print(f"Picture: {picture}")


def draw(path: Path, rates: list[float], nll: np.ndarray, history: list[dict[str, float]]) -> None:
    """Draw the learning curves of each rate, and the error against the rate."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    plots.learning_curves(history, by="learning_rate", ax=left)
    left.set(yscale="log", title="Learning curves, with bands over the seeds", ylabel="training loss")
    left.legend(title="learning rate", fontsize=8, title_fontsize=8, loc="upper right", ncols=2)
    right.fill_between(rates, nll.min(axis=1), nll.max(axis=1), alpha=0.2, linewidth=0, label="lowest to highest")
    right.plot(rates, np.median(nll, axis=1), "o-", label="median of the seeds")
    right.plot(np.repeat(rates, nll.shape[1]), nll.ravel(), ".", color="0.4", markersize=3)
    right.set(
        xscale="log",
        yscale="log",
        xlabel="learning rate",
        ylabel="validation NLL",
        title="Validation NLL against learning rate",
    )
    right.legend(fontsize=8)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
