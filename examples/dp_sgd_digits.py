"""Train on handwritten digits with differential privacy, and measure what it costs in accuracy.

    python examples/dp_sgd_digits.py --seeds 5 --steps 200 --out demo

Networks with different seeds are trained as one ensemble: without privacy, with ε = 8 and with ε = 2. The script prints
their accuracies and the ε of one network and of all together, and draws `dp_sgd_digits.png`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

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
from tqdm import tqdm

from plurax.ensemble import Ensemble, Trainer, metrics
from plurax.transforms.privacy import DPSGD

TARGETS = (8.0, 2.0)
DELTA = 1e-5
BATCH = 256
RATE = 1e-2


class Network(nnx.Module):
    """Two dense layers, without batch normalization, whose statistics would mix the examples."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense1 = nnx.Linear(64, 64, rngs=rngs)
        self.dense2 = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits (batch, 10) for pixels (batch, 64) in -1 to 1."""
        return self.dense2(nnx.tanh(self.dense1(x)))


class Digits(NamedTuple):
    """Pixels (n, 64) in -1 to 1 and labels (n,)."""

    pixels: np.ndarray
    labels: np.ndarray


class Private(NamedTuple):
    """Results of a private run: ε and accuracies (evaluations, seeds) at each evaluation, noise multiplier, final ε."""

    spent: list[float]
    accuracy: np.ndarray
    noise_multiplier: float
    alone: float
    together: float


def split_digits() -> tuple[Digits, Digits]:
    """Split the digits of scikit-learn into training (1,437) and test (360) images, with a fixed seed."""
    pixels, labels = load_digits(return_X_y=True)
    pixels = (pixels / 8 - 1).astype(np.float32)
    x_train, x_test, y_train, y_test = train_test_split(
        pixels, labels.astype(np.int32), test_size=360, stratify=labels, random_state=0
    )
    return Digits(x_train, y_train), Digits(x_test, y_test)


def loss(model: Network, pixels: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(pixels), labels).mean()


def accuracy(ensemble: Ensemble, tests: Digits) -> np.ndarray:
    return np.asarray(metrics.accuracy(ensemble(tests.pixels), tests.labels))


def learn_openly(ensemble: Ensemble, train: Digits, tests: Digits, steps: int, seed: int) -> np.ndarray:
    """Train without privacy, with the same networks, optimizer and number of steps; return the accuracies."""
    generator = np.random.default_rng(seed)
    chosen = (generator.choice(len(train.labels), BATCH, replace=False) for _ in range(steps))
    batches = ((train.pixels[i], train.labels[i]) for i in chosen)
    trainer = Trainer(loss, optax.adam(RATE), strategy="vmap")
    state, _ = trainer.fit(trainer.init(ensemble), batches, steps=steps)
    return accuracy(state.ensemble, tests)


def learn_privately(
    ensemble: Ensemble, train: Digits, tests: Digits, steps: int, seed: int, target: float, accountant: str, looks: int
) -> Private:
    """Train with DP-SGD, and evaluate `looks` times during training."""
    dp = DPSGD(
        loss,
        optax.adam(RATE),
        l2_clip_norm=1.0,
        target_epsilon=target,
        target_delta=DELTA,
        num_examples=len(train.labels),
        expected_batch_size=BATCH,
        num_steps=steps,
        accountant=accountant,
    )
    state = dp.init(ensemble, key=jax.random.key(seed))
    stops = sorted({round(part * steps / looks) for part in range(1, looks + 1)} - {0})
    spent, found = [], []
    with tqdm(total=steps, unit="step", dynamic_ncols=True) as bar:
        for stop in stops:
            # Pad all batches to one size, since this small program takes longer to compile than to run.
            steps_now = stop - int(state.step)
            state, _ = dp.fit(state, tuple(train), steps=steps_now, sizes=(BATCH * 5 // 4,), progress=False)
            spent.append(dp.epsilon(stop))
            found.append(accuracy(state.model, tests))
            bar.update(stop - bar.n)
            bar.set_postfix_str(f"ε = {spent[-1]:.2f} of {target:g}")
    each, together = dp.epsilon(state), dp.epsilon(state, together=True)
    return Private(spent, np.stack(found), dp.noise_multiplier, float(each[0]), together)


def report(openly: np.ndarray, private: dict[float, Private]) -> Table:
    """Return a table with a row for each kind of training, over the seeds."""
    seeds = len(openly)
    table = Table(title=f"Test accuracy of {seeds} networks each, δ = {DELTA:g}")
    for head in ("", "noise multiplier", "ε of one", f"ε of all {seeds}", "mean", "worst", "best"):
        table.add_column(head, justify="left" if not head else "right")
    table.add_row("without privacy", "", "∞", "∞", *_over_seeds(openly))
    for target, run in private.items():
        numbers = (f"{run.noise_multiplier:.2f}", f"{run.alone:.2f}", f"{run.together:.2f}")
        table.add_row(f"ε = {target:g}", *numbers, *_over_seeds(run.accuracy[-1]))
    return table


def _over_seeds(accuracy: np.ndarray) -> list[str]:
    return [f"{value:.1%}" for value in (accuracy.mean(), accuracy.min(), accuracy.max())]


def draw(path: Path, openly: np.ndarray, private: dict[float, Private]) -> None:
    """Draw two panels: accuracy against the ε spent, and the final accuracy of every network."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    colors = dict(zip(private, ("tab:blue", "tab:orange"), strict=True))
    left.axhline(100 * openly.mean(), color="black", linestyle=":", label=f"without privacy, {openly.mean():.1%}")
    for target, run in private.items():
        percent = 100 * run.accuracy
        name = f"ε = {target:g}, noise multiplier {run.noise_multiplier:.1f}"
        left.plot(run.spent, percent.mean(axis=1), "o-", color=colors[target], markersize=4, label=name)
        left.fill_between(run.spent, percent.min(axis=1), percent.max(axis=1), color=colors[target], alpha=0.2, lw=0)
    left.set(
        xlabel=f"ε spent (δ = {DELTA:g})", ylabel="test accuracy (%)", title="Accuracy against spent privacy budget"
    )
    left.set_xlim(left=0)
    left.legend(loc="lower right")

    ends = {"without\nprivacy": (openly, "black")}
    ends |= {f"ε = {target:g}": (run.accuracy[-1], colors[target]) for target, run in private.items()}
    generator = np.random.default_rng(0)
    for place, (values, color) in enumerate(ends.values()):
        right.plot(place + generator.uniform(-0.12, 0.12, len(values)), 100 * values, "o", color=color, alpha=0.6)
        right.hlines(100 * values.mean(), place - 0.3, place + 0.3, color=color, linewidth=2.5)
        right.text(place + 0.33, 100 * values.mean(), f"{values.mean():.1%}", va="center", color=color)
    right.set_xticks(range(len(ends)), list(ends))
    right.set(xlim=(-0.5, len(ends) - 0.2), ylabel="test accuracy (%)")
    right.set(title=f"Final accuracy of {len(openly)} seeds, and their mean")
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="number of networks for each kind of training (default 5)")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default 200)")
    parser.add_argument("--looks", type=int, default=10, help="evaluations of ε and accuracy (default 10)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory for the picture")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of weights, batches and noise (default 0; a published model needs a secret key)",
    )
    parser.add_argument("--accountant", default="pld", choices=("pld", "rdp"), help="accountant for ε (default pld)")
    options = parser.parse_args()
    for name in ("seeds", "steps", "looks"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, but got {getattr(options, name)}")
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console()

    train, tests = split_digits()
    ensemble = Ensemble.create(Network, options.seeds, seed=options.seed)
    console.print(f"{ensemble}, {len(train.labels)} training images")
    openly = learn_openly(ensemble, train, tests, options.steps, options.seed)
    private = {
        target: learn_privately(
            ensemble, train, tests, options.steps, options.seed, target, options.accountant, options.looks
        )
        for target in TARGETS
    }
    console.print(report(openly, private))
    console.print(
        "The ε of one network holds if a single network is published, and the data did not affect which one. "
        "Publishing all networks, or the mean of their predictions, costs the ε of all."
    )
    picture = options.out / "dp_sgd_digits.png"
    draw(picture, openly, private)
    console.print(f"Picture: {picture}")


if __name__ == "__main__":
    main()
