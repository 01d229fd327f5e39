"""Audit private training: a lower bound on ε from thousands of runs that train at once, beside the accountant's.

    python examples/dp_audit_digits.py --runs 2000 --out demo

A softmax regression learns handwritten digits with ε = 10. Each run has one canary, put in or left out at random, and
an adversary tells which. The script prints the bounds for an adversary who sees every noisy gradient, for one who sees
only the trained model, and for training with half of the noise by mistake; and it draws `dp_audit_digits.png`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl

mpl.use("Agg")  # draws to a file; needs no window

import matplotlib.pyplot as plt
import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

from plurax.transforms.privacy import DPSGD

DELTA = 1e-5


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"] + params["b"], y).mean()


def mechanism(examples: int, steps: int, **noise: float) -> DPSGD:
    """Return the training with this `target_epsilon` or `noise_multiplier`; each example takes part in each step."""
    settings: dict[str, Any] = {"l2_clip_norm": 1.0, "target_delta": DELTA, "num_examples": examples}
    return DPSGD(loss, optax.sgd(4.0), expected_batch_size=examples, num_steps=steps, **settings, **noise)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2000, help="runs of each kind (default 2000)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a run (default 10)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory for the picture")
    parser.add_argument("--seed", type=int, default=0, help="seed of canaries, batches and noise (default 0)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console()

    pixels, labels = load_digits(return_X_y=True)
    data = (pixels / 8 - 1).astype(np.float32), labels.astype(np.int32)
    params = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}
    right = mechanism(len(labels), options.steps, target_epsilon=10.0)
    console.print(right)
    # Whoever trains draws half of the noise that the accountant was told.
    wrong = mechanism(len(labels), options.steps, noise_multiplier=right.noise_multiplier / 2)
    pattern = np.random.default_rng(options.seed).choice([-3.0, 3.0], size=(1, 64)).astype(np.float32)
    how: dict[str, Any] = {
        "runs": options.runs,
        "key": jax.random.key(options.seed),
        "chunk_size": min(options.runs, 250),
    }
    found = {
        "every noisy gradient": right.audit(params, data, **how),
        "the trained model": right.audit(params, data, canaries=(pattern, np.array([3], np.int32)), **how),
        "every noisy gradient, with half of the noise": wrong.audit(params, data, **how),
    }
    accounted = right.epsilon(options.steps)
    found = {name: replace(one, upper=accounted) for name, one in found.items()}

    table = Table(title=f"{options.runs:,} runs of {options.steps} steps each, δ = {DELTA:g}, 95 % confidence")
    for head in ("the adversary sees", "ε at least", "at least, if Gaussian", "accounted, at most", ""):
        table.add_column(head, justify="left" if head in ("the adversary sees", "") else "right")
    for name, one in found.items():
        bounds = (one.lower, one.lower_gdp or 0.0)
        verdict = "consistent" if max(bounds) <= one.upper else "a mistake"
        table.add_row(name, *(f"{bound:.2f}" for bound in (*bounds, one.upper)), verdict)
    console.print(table)

    figure = plt.figure(figsize=(10, 8), layout="constrained")
    axes = figure.subplots(3, 2, width_ratios=(2, 1))
    for row, (name, one) in zip(axes, found.items(), strict=True):
        one.plot(row)
        row[0].set_title(f"The adversary sees {name}", loc="left")
    picture = options.out / "dp_audit_digits.png"
    figure.savefig(picture, dpi=120)
    console.print(f"Picture: {picture}")


if __name__ == "__main__":
    main()
