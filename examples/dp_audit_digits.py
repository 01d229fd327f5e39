"""Audit private training: a lower bound on ε from thousands of runs that train at once, beside the accountant's.

    python examples/dp_audit_digits.py --runs 4000 --out demo

A softmax regression learns handwritten digits with ε = 10. Each run has one canary, put in or left out at random; the
adversary sees every noisy gradient, and tells which. The script prints the bounds, also for training with half of the
noise by mistake, and draws `dp_audit_digits.png`.
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
    """Return the training with this `target_epsilon` or `noise_multiplier`."""
    settings: dict[str, Any] = {"l2_clip_norm": 1.0, "target_delta": DELTA, "num_examples": examples}
    return DPSGD(loss, optax.sgd(0.5), expected_batch_size=examples / 2, num_steps=steps, **settings, **noise)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=4000, help="runs of each kind (default 4000)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a run (default 20)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory for the picture")
    parser.add_argument("--seed", type=int, default=0, help="seed of canaries, batches and noise (default 0)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    pixels, labels = load_digits(return_X_y=True)
    data = (pixels / 8 - 1).astype(np.float32), labels.astype(np.int32)
    params = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}
    dp = mechanism(len(labels), options.steps, target_epsilon=10.0)
    console = Console()
    console.print(dp)
    # The mistake: whoever trains draws half of the noise that the accountant was told.
    wrong = mechanism(len(labels), options.steps, noise_multiplier=dp.noise_multiplier / 2)
    how = {"runs": options.runs, "key": jax.random.key(options.seed), "chunk_size": min(options.runs, 250)}
    found = {"as it is": dp.audit(params, data, **how)}
    found["half, by mistake"] = replace(wrong.audit(params, data, **how), upper=found["as it is"].upper)
    table = Table(title=f"{options.runs:,} runs of {options.steps} steps each, δ = {DELTA:g}")
    for head in ("noise", "audited: ε at least", "accounted: ε at most", ""):
        table.add_column(head, justify="right" if "ε" in head else "left")
    for name, one in found.items():
        verdict = "consistent" if one.lower <= one.upper else "a mistake in the mechanism"
        table.add_row(name, f"{one.lower:.2f}", f"{one.upper:.2f}", verdict)
    console.print(table)
    console.print(f"The adversary: {found['as it is'].threat_model}.")

    figure = plt.figure(figsize=(10, 5.6), layout="constrained")
    axes = figure.subplots(2, 2, width_ratios=(2, 1))
    for row, (name, one) in zip(axes, found.items(), strict=True):
        one.plot(row)
        row[0].set_title(f"Noise: {name}", loc="left")
    picture = options.out / "dp_audit_digits.png"
    figure.savefig(picture, dpi=120)
    console.print(f"Picture: {picture}")


if __name__ == "__main__":
    main()
