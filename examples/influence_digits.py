"""Find mislabelled digits, and predict what a network would do without some of its training examples.

    python examples/influence_digits.py --models 50 --subsets 50 --out demo

Some digits get wrong labels; self-influence, the norm of an example's gradient and chance rank the examples. Then
networks are retrained on random halves of the data, all as one program, and three estimates predict their losses: inner
products of gradients, inner products of random projections after TRAK (Park et al. 2023), and EK-FAC influence, each
averaged over 1, 10 and 50 models. The linear datamodeling score is the rank correlation of predicted and true losses
over the halves, averaged over test images. Draws `influence_digits.png`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
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
from scipy.stats import spearmanr
from sklearn.datasets import load_digits

from plurax.ensemble import metrics
from plurax.transforms import per_sample_gram, per_sample_norm, per_sample_projection
from plurax.transforms.curvature import influence, self_influence

HIDDEN, DAMPING, PROJECTIONS = 32, 1e-3, 512


def model(p: Any, x: jax.Array) -> jax.Array:
    """Return logits (batch, 10) for images (batch, 64)."""
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] + p["c"]


def loss(outputs: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()


def of_batch(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return loss(model(p, x), y)


def trained(key: jax.Array, weights: jax.Array, x: jax.Array, y: jax.Array, steps: int) -> Any:
    """Train a network with a weight for each example."""
    one, other = jax.random.split(key)
    p = {"w": jax.random.normal(one, (64, HIDDEN)) / 8, "b": jnp.zeros(HIDDEN)}
    p |= {"v": jax.random.normal(other, (HIDDEN, 10)) / HIDDEN**0.5, "c": jnp.zeros(10)}
    adam = optax.adamw(1e-2, weight_decay=1e-3)

    def weighted(p: Any) -> jax.Array:
        each = optax.softmax_cross_entropy_with_integer_labels(model(p, x), y)
        return (each * weights).sum() / weights.sum()

    def step(carry: Any, _: Any) -> Any:
        p, state = carry
        updates, state = adam.update(jax.grad(weighted)(p), state, p)
        return (optax.apply_updates(p, updates), state), None

    return jax.lax.scan(step, (p, adam.init(p)), None, steps)[0][0]


def mislabelled(console: Console, steps: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return which examples have wrong labels, and the score of each example by each method."""
    digits, rng = load_digits(), np.random.default_rng(0)
    x, y = jnp.asarray(digits.data[:1000] / 16, jnp.float32), digits.target[:1000].copy()
    wrong = np.zeros(1000, bool)
    wrong[rng.choice(1000, 100, replace=False)] = True
    y[wrong] = (y[wrong] + rng.integers(1, 10, wrong.sum())) % 10
    y = jnp.asarray(y)
    p = jax.jit(partial(trained, steps=steps))(jax.random.key(0), jnp.ones(len(x)), x, y)
    scores = {
        "self-influence": self_influence(model, loss, p, (x, y), damping=DAMPING),
        "gradient norm": per_sample_norm(of_batch, batch_argnums=(1, 2))(p, x, y),
        "chance": rng.random(1000),
    }
    table = Table(title="100 of 1,000 digits have wrong labels")
    for head in ("ranked by", "AUROC", "wrong among the first 100"):
        table.add_column(head, justify="left" if head == "ranked by" else "right")
    for name, score in scores.items():
        value, first = np.asarray(score), np.argsort(-np.asarray(score))[:100]
        area = float(metrics.auroc(value[~wrong], value[wrong]))
        table.add_row(name, f"{area:.3f}", str(int(wrong[first].sum())))
    console.print(table)
    return wrong, {name: np.asarray(score) for name, score in scores.items()}


def of_gradients(p: Any, x: Any, y: Any, x_test: Any, y_test: Any) -> jax.Array:
    """Return the inner products of gradients, shape (test, training)."""
    return per_sample_gram(of_batch, batch_argnums=(1, 2))(p, x_test, y_test, other=(x, y))


def of_projections(p: Any, x: Any, y: Any, x_test: Any, y_test: Any, key: jax.Array) -> jax.Array:
    """Return the inner products of projected gradients, with the inverse of their second moment between them."""
    project = per_sample_projection(of_batch, PROJECTIONS, batch_argnums=(1, 2))
    train, test = project(key, p, x, y), project(key, p, x_test, y_test)
    moment = train.T @ train / len(train)
    return (
        jnp.linalg.solve(moment + DAMPING * jnp.trace(moment) / PROJECTIONS * jnp.eye(PROJECTIONS), test.T).T @ train.T
    )


def of_influence(p: Any, x: Any, y: Any, x_test: Any, y_test: Any) -> jax.Array:
    """Return the EK-FAC influence."""
    return influence(model, loss, p, (x, y), damping=DAMPING)(x_test, y_test)


def scores_of_halves(
    console: Console, models: int, subsets: int, repeats: int, steps: int
) -> dict[str, dict[int, float]]:
    """Return the linear datamodeling score of each estimate, by the number of models."""
    digits, rng = load_digits(), np.random.default_rng(1)
    order = rng.permutation(len(digits.target))
    images, labels = jnp.asarray(digits.data[order] / 16, jnp.float32), jnp.asarray(digits.target[order])
    x, y, x_test, y_test = images[:500], labels[:500], images[500:600], labels[500:600]
    halves = np.stack([rng.permutation(500) < 250 for _ in range(subsets)])

    train = jax.jit(jax.vmap(partial(trained, steps=steps), (0, 0, None, None)))
    keys = jax.random.split(jax.random.key(1), subsets * repeats)
    retrained = train(keys, jnp.asarray(np.repeat(halves, repeats, 0), jnp.float32), x, y)
    each = jax.vmap(lambda p: optax.softmax_cross_entropy_with_integer_labels(model(p, x_test), y_test))(retrained)
    true = np.asarray(each).reshape(subsets, repeats, -1).mean(1)
    whole = train(jax.random.split(jax.random.key(2), models), jnp.ones((models, 500)), x, y)
    console.print(f"Retrained {subsets * repeats} networks on {subsets} halves of 500 digits, and {models} on all.")

    estimates: dict[str, Callable[..., jax.Array]] = {
        "gradient dot products": of_gradients,
        "projections (TRAK)": partial(of_projections, key=jax.random.key(3)),
        "EK-FAC influence": of_influence,
    }
    found: dict[str, dict[int, float]] = {}
    for name, estimate in estimates.items():
        of_members = jax.jit(jax.vmap(lambda p, estimate=estimate: estimate(p, x, y, x_test, y_test)))
        every = np.asarray(of_members(whole))
        found[name] = {}
        for count in sorted({1, 10, models} & set(range(1, models + 1))):
            # The loss is lower, the more influence the examples of the half have.
            groups = [every[i : i + count].mean(0) for i in range(0, models - count + 1, count)]
            lds = [_rank_correlation(-(halves @ group.T), true) for group in groups]
            found[name][count] = float(np.mean(lds))
    table = Table(title="Linear datamodeling score, by the number of models")
    table.add_column("estimate")
    for count in next(iter(found.values())):
        table.add_column(str(count), justify="right")
    for name, row in found.items():
        table.add_row(name, *(f"{value:.3f}" for value in row.values()))
    console.print(table)
    return found


def _rank_correlation(predicted: np.ndarray, true: np.ndarray) -> float:
    """Return the rank correlation over the halves, averaged over the test images: both have shape (halves, test)."""
    return float(np.mean([spearmanr(a, b).statistic for a, b in zip(predicted.T, true.T, strict=True)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=50, help="networks that are averaged (default 50)")
    parser.add_argument("--subsets", type=int, default=50, help="halves of the data (default 50)")
    parser.add_argument("--repeats", type=int, default=4, help="networks for each half (default 4)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default 300)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory for the picture")
    options = parser.parse_args()
    for name in ("models", "subsets", "repeats", "steps"):
        if getattr(options, name) < (2 if name == "subsets" else 1):
            parser.error(f"--{name} must be at least {2 if name == 'subsets' else 1}, but got {getattr(options, name)}")
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    wrong, scores = mislabelled(console, options.steps)
    found = scores_of_halves(console, options.models, options.subsets, options.repeats, options.steps)
    picture = options.out / "influence_digits.png"
    draw(picture, wrong, scores, found)
    console.print(f"Picture: {picture}")


def draw(path: Path, wrong: np.ndarray, scores: dict[str, np.ndarray], found: dict[str, dict[int, float]]) -> None:
    """Draw how many wrong labels are found after some inspections, and the scores of the estimates."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for (name, score), style in zip(scores.items(), ("-", "--", ":"), strict=True):
        left.plot(np.arange(1, len(wrong) + 1), wrong[np.argsort(-score)].cumsum(), style, label=name)
    left.set(xlabel="digits inspected", ylabel="wrong labels found", title="Finding 100 wrong labels among 1,000")
    left.legend(frameon=False)
    for (name, row), marker in zip(found.items(), "os^", strict=True):
        right.plot(list(row), list(row.values()), marker=marker, label=name)
    right.set(
        xscale="log",
        xlabel="models averaged",
        ylabel="linear datamodeling score",
        title="Predicting retrained networks",
    )
    right.set_xticks(list(row), [str(count) for count in row])
    right.legend(frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
