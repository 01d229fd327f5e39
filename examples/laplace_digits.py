"""Compare one network, its Laplace approximation, a deep ensemble, and an ensemble of Laplace approximations.

    python examples/laplace_digits.py --members 8 --out demo

All networks are trained as one program. Laplace approximations of all of them are one program too, and so are their
predictions. The prior precision is the one with the highest likelihood of validation images. The script prints scores
of test images, and how well the entropy of a prediction separates them from images with shuffled pixels, and draws
`laplace_digits.png`.
"""

from __future__ import annotations

import argparse
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
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from plurax.ensemble import metrics
from plurax.transforms.curvature import laplace

HIDDEN, PRIORS = 32, (1.0, 10.0, 100.0, 1000.0)


def model(p: Any, x: jax.Array) -> jax.Array:
    """Return logits (batch, 10) for images (batch, 64)."""
    return jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] + p["c"]


def loss(outputs: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()


def trained(key: jax.Array, x: jax.Array, y: jax.Array, steps: int) -> Any:
    """Train a network on all images at a time."""
    one, other = jax.random.split(key)
    p = {"w": jax.random.normal(one, (64, HIDDEN)) / 8, "b": jnp.zeros(HIDDEN)}
    p |= {"v": jax.random.normal(other, (HIDDEN, 10)) / HIDDEN**0.5, "c": jnp.zeros(10)}
    adam = optax.adam(1e-2)

    def step(carry: Any, _: Any) -> Any:
        p, state = carry
        updates, state = adam.update(jax.grad(lambda p: loss(model(p, x), y))(p), state)
        return (optax.apply_updates(p, updates), state), None

    return jax.lax.scan(step, (p, adam.init(p)), None, steps)[0][0]


@jax.jit
def posterior_members(members: Any, x: jax.Array, y: jax.Array, inputs: jax.Array, prior: jax.Array) -> jax.Array:
    """Return probabilities by draws from the posterior of each member, shape (members, draws, batch, classes)."""

    def of_member(p: Any, key: jax.Array) -> jax.Array:
        of = laplace(model, loss, p, (x, y), prior_precision=prior)
        return of.predict(inputs, kind="classification", samples=50, key=key).members

    size = len(jax.tree.leaves(members)[0])
    return jax.vmap(of_member)(members, jax.random.split(jax.random.key(5), size))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare Laplace approximations and deep ensembles on digits")
    parser.add_argument("--members", type=int, default=8, help="number of networks (default 8)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default 300)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory for the picture")
    options = parser.parse_args()
    if options.members < 2:
        parser.error(f"--members must be at least 2, but got {options.members}")
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, but got {options.steps}")
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console()

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    rest, x_test, y_rest, y_test = train_test_split(images, labels, test_size=800, stratify=labels, random_state=0)
    x, x_valid, y, y_valid = train_test_split(rest, y_rest, test_size=300, stratify=y_rest, random_state=0)
    x, y, x_valid, x_test = jnp.asarray(x), jnp.asarray(y), jnp.asarray(x_valid), jnp.asarray(x_test)
    shuffled = jnp.asarray(np.random.default_rng(0).permuted(np.asarray(x_test), axis=1))

    members = jax.jit(jax.vmap(partial(trained, x=x, y=y, steps=options.steps)))(
        jax.random.split(jax.random.key(0), options.members)
    )
    one = jax.tree.map(lambda leaf: leaf[:1], members)
    fitted = laplace(model, loss, jax.tree.map(lambda leaf: leaf[0], members), (x, y))
    valid = {prior: posterior_members(one, x, y, x_valid, prior).mean((0, 1)) for prior in PRIORS}
    prior = min(PRIORS, key=lambda prior: float(metrics.nll(valid[prior], y_valid)))
    console.print(
        f"{options.members} networks and their posteriors, from {len(x)} images. Prior precision {prior:g} by "
        f"validation; {float(fitted.prior_precision):.2f} has the largest evidence."
    )

    def probabilities(inputs: jax.Array) -> dict[str, np.ndarray]:
        """Return the mean probabilities of each method."""
        plain = jax.nn.softmax(jax.vmap(lambda p: model(p, inputs))(members))
        draws = posterior_members(members, x, y, inputs, prior)
        evidence = posterior_members(one, x, y, inputs, float(fitted.prior_precision))
        found = {
            "one network": plain[0],
            "its Laplace approximation": draws[0].mean(0),
            "the same, prior by evidence": evidence[0].mean(0),
            f"ensemble of {options.members}": plain.mean(0),
            f"ensemble of {options.members} Laplace": draws.mean((0, 1)),
        }
        return {name: np.asarray(p) for name, p in found.items()}

    known, unknown = probabilities(x_test), probabilities(shuffled)
    console.print(report(known, unknown, y_test))
    picture = options.out / "laplace_digits.png"
    draw(picture, known, unknown, y_test)
    console.print(f"Picture: {picture}")


def entropy(p: np.ndarray) -> np.ndarray:
    """Return the entropy of each prediction in nats."""
    return np.asarray(metrics.entropy(p))


def report(known: dict[str, np.ndarray], unknown: dict[str, np.ndarray], labels: np.ndarray) -> Table:
    """Return a table with a row for each method; AUROC: entropies of shuffled images against those of test images."""
    table = Table(title=f"{len(labels)} test images; AUROC for shuffled pixels")
    for head in ("", "accuracy", "NLL", "ECE", "AUROC"):
        table.add_column(head, justify="left" if not head else "right", no_wrap=True)
    for name, p in known.items():
        scores = [f"{float(metrics.accuracy(p, labels)):.1%}"]
        scores += [f"{float(score(p, labels)):.3f}" for score in (metrics.nll, metrics.ece)]
        table.add_row(name, *scores, f"{float(metrics.auroc(entropy(p), entropy(unknown[name]))):.3f}")
    return table


def draw(path: Path, known: dict[str, np.ndarray], unknown: dict[str, np.ndarray], labels: np.ndarray) -> None:
    """Draw the entropies of test images and of shuffled ones, for each method."""
    figure, axes = plt.subplots(1, len(known), figsize=(3 * len(known), 3.2), sharey=True, layout="constrained")
    bins = np.linspace(0, np.log(10), 25)
    for axis, (name, p) in zip(axes, known.items(), strict=True):
        axis.hist(entropy(p), bins, alpha=0.7, label="digits")
        axis.hist(entropy(unknown[name]), bins, alpha=0.7, label="shuffled pixels")
        axis.set_title(f"{name}\nNLL {float(metrics.nll(p, labels)):.3f}", fontsize=10)
        axis.set_xlabel("entropy (nats)")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("images")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
