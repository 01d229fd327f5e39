"""Measure the uncertainty of an ensemble on digits, on rotated digits, and on digits with shuffled pixels.

    python examples/uncertainty_digits.py --members 8 --steps 2000 --out demo

Each network is trained on its own bootstrap sample of the digits, and stops early by its loss on validation images. The
script prints scores, calibrates the ensemble with a temperature, forms sets that contain the correct digit in nine of
ten cases, and draws `uncertainty_digits.png`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

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
from scipy.ndimage import rotate
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from plurax.ensemble import Batches, EarlyStopping, Ensemble, Trainer, metrics, plots
from plurax.ensemble.calibration import conformal_sets, conformal_threshold, fit_temperature

ANGLES = (0, 15, 30, 45, 60, 90)


class Network(nnx.Module):
    """64-64-10 with dropout, for images of 8 by 8 pixels."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits (batch, 10) for images (batch, 64)."""
        return self.out(self.dropout(nnx.relu(self.hidden(x))))


def loss(model: Network, images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


def rotated(images: np.ndarray, angle: float) -> np.ndarray:
    """Rotate the images by an angle in degrees."""
    square = images.reshape(-1, 8, 8)
    return rotate(square, angle, axes=(1, 2), reshape=False, order=1).reshape(images.shape).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=8, help="number of networks (default 8)")
    parser.add_argument("--steps", type=int, default=2000, help="maximum training steps (default 2000)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory for the picture")
    options = parser.parse_args()
    if options.members < 2:
        parser.error(f"--members must be at least 2, but got {options.members}")
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, but got {options.steps}")
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console()

    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    rest, x_test, y_rest, y_test = train_test_split(images, labels, test_size=400, stratify=labels, random_state=0)
    x, x_valid, y, y_valid = train_test_split(rest, y_rest, test_size=300, stratify=y_rest, random_state=0)

    ensemble = Ensemble.create(Network, options.members, seed=0).with_kind("classification")
    batches = Batches((x, y), 64, key=jax.random.key(1), members=options.members, draw="bootstrap")
    trainer = Trainer(loss, optax.adam(3e-3), in_axes=0)
    stopping = EarlyStopping(
        evaluate=lambda members: metrics.nll(members.predict(x_valid).members, y_valid), every=20, patience=4
    )
    state, _ = trainer.fit(trainer.init(ensemble), batches, steps=options.steps, early_stopping=stopping)
    ensemble = state.ensemble
    stops = np.asarray(state.standing.step)
    spread = f"{stops.min()} to {stops.max()}" if stops.min() < stops.max() else f"{stops.max()}"
    console.print(f"{ensemble}, trained for {spread} steps each")

    logits = ensemble.view(deterministic=True)(x_valid)
    temperature = fit_temperature(logits, y_valid, pooled=True)

    def predicted(inputs: np.ndarray) -> jax.Array:
        """Return the calibrated probabilities of the members."""
        return jax.nn.softmax(ensemble.view(deterministic=True)(inputs) / temperature, axis=-1)

    shuffled = np.random.default_rng(0).permuted(x_test, axis=1)
    shifted = {f"rotated by {angle}°" if angle else "unchanged": rotated(x_test, angle) for angle in ANGLES}
    found = {name: predicted(inputs) for name, inputs in (shifted | {"shuffled pixels": shuffled}).items()}
    console.print(report(found, y_test))

    members = predicted(x_valid)
    threshold = conformal_threshold(members.mean(axis=0), y_valid, error=0.1)
    for name in ("unchanged", "rotated by 30°"):
        sets = conformal_sets(found[name].mean(axis=0), threshold)
        covered = jnp.take_along_axis(sets, y_test[:, None], axis=1).mean()
        console.print(
            f"Conformal sets, {name}: {float(sets.sum(axis=1).mean()):.2f} digits on average; {float(covered):.1%} "
            "contain the correct digit (90 % are guaranteed for unchanged images)."
        )
    console.print(f"Temperature of the ensemble: {float(temperature):.2f}")

    picture = options.out / "uncertainty_digits.png"
    draw(picture, found, y_test)
    console.print(f"Picture: {picture}")


def report(found: dict[str, jax.Array], labels: np.ndarray) -> Table:
    """Return a table with a row for each kind of images; AUROC: mutual information, compared with "unchanged"."""
    table = Table(title=f"{len(labels)} test images")
    for head in ("", "accuracy", "NLL", "ECE", "entropy", "mutual info", "AUROC"):
        table.add_column(head, justify="left" if not head else "right", no_wrap=True)
    known = metrics.mutual_information(found["unchanged"])
    for name, p in found.items():
        mean, labeled = p.mean(axis=0), name != "shuffled pixels"
        scores = [f"{float(metrics.accuracy(mean, labels)):.1%}"]
        scores += [f"{float(score(mean, labels)):.3f}" for score in (metrics.nll, metrics.ece)]
        entropy, information = metrics.predictive_entropy(p).mean(), metrics.mutual_information(p)
        separated = f"{float(metrics.auroc(known, information)):.3f}" if name != "unchanged" else ""
        scores = scores if labeled else ["", "", ""]
        table.add_row(name, *scores, f"{float(entropy):.2f}", f"{float(information.mean()):.2f}", separated)
    return table


def draw(path: Path, found: dict[str, jax.Array], labels: np.ndarray) -> None:
    """Draw entropies in and out of distribution, risk against coverage, calibration, and disagreement of members."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 8.4), layout="constrained")
    shown = {name: found[name] for name in ("unchanged", "rotated by 45°", "shuffled pixels")}
    plots.entropies({name: metrics.predictive_entropy(p) for name, p in shown.items()}, ax=axes[0, 0])
    axes[0, 0].axvline(np.log(10), color="black", linestyle=":", linewidth=1)
    axes[0, 0].set_title("Predictive entropy (dotted line: maximum, ln 10)")

    for name in ("unchanged", "rotated by 15°", "rotated by 30°", "rotated by 45°"):
        p = found[name]
        wrong = p.mean(axis=0).argmax(axis=-1) != labels
        curve = metrics.risk_coverage(metrics.predictive_entropy(p), wrong)
        axes[0, 1].plot(100 * curve.coverage, 100 * curve.risk, label=name)
    axes[0, 1].set(
        xlabel="coverage (%)",
        ylabel="error rate of the covered images (%)",
        title="Risk-coverage curves",
    )
    axes[0, 1].legend(fontsize=8)

    all_angles = jnp.concatenate([found[name].mean(axis=0) for name in found if name != "shuffled pixels"])
    repeated = np.tile(labels, len(all_angles) // len(labels))
    plots.reliability(all_angles, repeated, bins=12, ax=axes[1, 0])
    axes[1, 0].set_title(f"Reliability, all angles: {axes[1, 0].get_title()}")
    plots.disagreement(found["rotated by 45°"], ax=axes[1, 1])
    axes[1, 1].set_title(f"Rotated 45°: {axes[1, 1].get_title().replace('they', 'members')}")
    for panel in axes.flat[:3]:
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
