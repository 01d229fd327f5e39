"""Train an ensemble of small convolutional networks on handwritten digits, and measure its uncertainty.

    python examples/ensemble_digits.py --members 8 --steps 600 --out demo

Eight networks, each with its own initial weights and learning rate, are trained on the same batches as one ensemble.
The script prints the scores of each network and of the ensemble, draws `ensemble_digits.png`, saves a checkpoint, and
loads a single network from it.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

from plurax.ensemble import Ensemble, Prediction, Trainer, load_member, metrics, save

BATCH = 64


class LeNet(nnx.Module):
    """A LeNet for images of 8 by 8 pixels: two convolutions with pooling, two dense layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.dense1 = nnx.Linear(64, 32, rngs=rngs)
        self.dense2 = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits (batch, 10) for images (batch, 8, 8, 1)."""
        x = nnx.max_pool(nnx.relu(self.conv1(x)), (2, 2), (2, 2))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
        return self.dense2(nnx.relu(self.dense1(x.reshape(len(x), -1))))


class Digits(NamedTuple):
    """Images (n, 8, 8, 1) in 0 to 1 and labels (n,)."""

    images: np.ndarray
    labels: np.ndarray


def split_digits() -> tuple[Digits, Digits, Digits]:
    """Split the digits of scikit-learn into training (1,077), validation (360) and test (360) images."""
    # Importing scikit-learn would take longer than everything else before the first step; the digits are a file in it.
    folder = Path(importlib.util.find_spec("sklearn").origin).parent
    table = np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=",", dtype=np.float32)
    table = np.random.default_rng(0).permutation(table)
    digits = Digits((table[:, :64] / 16).reshape(-1, 8, 8, 1), table[:, 64].astype(np.int32))
    parts = np.split(np.arange(len(table)), [1077, 1437])
    train, valid, tests = (Digits(digits.images[part], digits.labels[part]) for part in parts)
    return train, valid, tests


def batches(data: Digits, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield batches forever, with the images in a new order in each epoch."""
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(len(data.labels))
        for i in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[i : i + BATCH]
            yield data.images[chosen], data.labels[chosen]


def loss(model: LeNet, images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


def report(rates: np.ndarray, validation: Prediction, test: Prediction, valid: Digits, tests: Digits) -> Table:
    """Return a table with a row for each member, their mean, and the ensemble."""
    table = Table(title=f"Handwritten digits, {len(tests.labels)} test images")
    for head in ("", "rate", "valid acc", "test acc", "NLL", "Brier", "ECE"):
        table.add_column(head, justify="left" if not head else "right")
    scores = [
        metrics.accuracy(validation.members, valid.labels),
        *(score(test.members, tests.labels) for score in (metrics.accuracy, metrics.nll, metrics.brier, metrics.ece)),
    ]
    columns = [np.asarray(score) for score in scores]
    for i, rate in enumerate(rates):
        table.add_row(f"member {i}", f"{rate:.4f}", *_row(column[i] for column in columns))
    table.add_section()
    table.add_row("members' mean", "", *_row(column.mean() for column in columns))
    together = [
        metrics.accuracy(validation.mean, valid.labels),
        *(score(test.mean, tests.labels) for score in (metrics.accuracy, metrics.nll, metrics.brier, metrics.ece)),
    ]
    table.add_row("[bold]ensemble", "", *(f"[bold]{text}" for text in _row(together)))
    return table


def _row(values: object) -> list[str]:
    accuracy, test_accuracy, *rest = (float(value) for value in values)
    return [f"{accuracy:.1%}", f"{test_accuracy:.1%}", *(f"{value:.3f}" for value in rest)]


def draw(path: Path, rates: np.ndarray, test: Prediction, shuffled: Prediction, labels: np.ndarray) -> None:
    """Plot the accuracy of the members and the ensemble, and the entropy for three groups of images."""
    import matplotlib as mpl

    mpl.use("Agg")  # draws to a file; needs no window
    import matplotlib.pyplot as plt

    right = np.asarray(test.mean.argmax(axis=-1) == labels)
    entropy = np.asarray(test.entropy)
    figure, (left_panel, right_panel) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")

    alone = 100 * np.asarray(metrics.accuracy(test.members, labels))
    together = 100 * float(metrics.accuracy(test.mean, labels))
    left_panel.semilogx(rates, alone, "o", color="tab:blue", markersize=8, label="single members")
    left_panel.axhline(
        alone.mean(), color="tab:blue", linestyle=":", label=f"mean of the members, {alone.mean():.1f} %"
    )
    left_panel.axhline(together, color="tab:orange", linewidth=2.5, label=f"ensemble, {together:.1f} %")
    left_panel.set(xlabel="learning rate of the member", ylabel="test accuracy (%)", title="Test accuracy")
    left_panel.xaxis.set_major_formatter(mpl.ticker.StrMethodFormatter("{x:g}"))
    left_panel.xaxis.set_minor_formatter(mpl.ticker.NullFormatter())
    left_panel.legend(loc="lower right")

    groups = {
        "correct": (entropy[right], "tab:blue"),
        "wrong": (entropy[~right], "tab:red"),
        "shuffled pixels": (np.asarray(shuffled.entropy), "tab:gray"),
    }
    generator = np.random.default_rng(0)
    for place, (values, color) in enumerate(groups.values()):
        x = place + generator.uniform(-0.28, 0.28, len(values))
        right_panel.plot(x, values, ".", color=color, alpha=0.45, markersize=7)
        if len(values):
            right_panel.hlines(np.median(values), place - 0.36, place + 0.36, color="black", linewidth=2.5)
    right_panel.axhline(np.log(10), color="black", linestyle=":", linewidth=1)
    right_panel.text(-0.45, np.log(10) - 0.03, "maximum: ln 10", va="top")
    right_panel.plot([], [], color="black", linewidth=2.5, label="median")
    right_panel.legend(loc="lower center")
    right_panel.set_xticks(range(3), [f"{name}\n({len(values)} images)" for name, (values, _) in groups.items()])
    right_panel.set(xlim=(-0.5, 2.5), ylabel="predictive entropy (nats)", title="Predictive entropy of test images")
    for panel in (left_panel, right_panel):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=8, help="number of networks (default 8)")
    parser.add_argument("--steps", type=int, default=600, help="training steps (default 600)")
    parser.add_argument("--strategy", default="auto", choices=("auto", "vmap", "map", "unroll", "loop"))
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory for picture and checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and the order of the images")
    options = parser.parse_args()
    if options.members < 1:
        parser.error(f"--members must be at least 1, but got {options.members}")
    if options.steps < 0:
        parser.error(f"--steps must not be negative, but got {options.steps}")
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console()

    train, valid, tests = split_digits()
    rates = np.geomspace(1e-3, 1e-2, options.members)
    ensemble = Ensemble.create(LeNet, options.members, seed=options.seed).with_kind("classification")
    console.print(f"{ensemble}, {len(train.labels)} training images")
    trainer = Trainer(loss, optax.adam, hyperparams={"learning_rate": rates}, strategy=options.strategy)
    state, _ = trainer.fit(trainer.init(ensemble), batches(train, options.seed), steps=options.steps)
    ensemble = state.ensemble

    test = ensemble.predict(tests.images)
    pixels = np.random.default_rng(options.seed).permuted(tests.images.reshape(len(tests.images), -1), axis=1)
    shuffled = ensemble.predict(pixels.reshape(tests.images.shape))
    console.print(report(rates, ensemble.predict(valid.images), test, valid, tests))

    picture = options.out / "ensemble_digits.png"
    draw(picture, rates, test, shuffled, tests.labels)
    checkpoint = options.out / "ensemble_digits"
    save(checkpoint, state)
    console.print(f"Picture: {picture}\nCheckpoint: {checkpoint}")

    i = min(3, options.members - 1)
    alone = load_member(checkpoint, i, ensemble)
    logits = alone(tests.images)
    exact = bool((logits == ensemble[i](tests.images)).all())
    inside = test.members[i].argmax(axis=-1)
    same = int((logits.argmax(axis=-1) == inside).sum())
    console.print(
        f"Member {i}, loaded alone: {same} of {len(inside)} predictions equal those of ensemble[{i}], logits "
        f"{'bitwise equal' if exact else 'DIFFERENT'}."
    )


if __name__ == "__main__":
    main()
