"""Compute per-sample gradients and their norms, and detect wrong labels by the norms.

    python examples/per_sample_gradients.py --steps 150 --out demo

The first half follows PyTorch's tutorial "Per-sample gradients", with its network; every gradient is compared with that
of a loop. In the second half a network is trained on digits, some of which have a wrong label. Their gradients have the
largest norms: the script draws the norms for right and wrong labels in `per_sample_gradients.png`.
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
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from tqdm import tqdm

from plurax.transforms import clipped_grad, per_sample_grad, per_sample_norm, value_and_grad


class Net(nnx.Module):
    """Two convolutions, pooling, two dense layers: 9216-128-10 in the tutorial, for images of 28 by 28 pixels."""

    def __init__(self, side: int, channels: tuple[int, int], hidden: int, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, channels[0], (3, 3), padding="VALID", rngs=rngs)
        self.conv2 = nnx.Conv(channels[0], channels[1], (3, 3), padding="VALID", rngs=rngs)
        self.dense1 = nnx.Linear(channels[1] * ((side - 4) // 2) ** 2, hidden, rngs=rngs)
        self.dense2 = nnx.Linear(hidden, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits (batch, 10) for images (batch, side, side, 1)."""
        x = nnx.max_pool(nnx.relu(self.conv2(nnx.relu(self.conv1(x)))), (2, 2), (2, 2))
        return self.dense2(nnx.relu(self.dense1(x.reshape(len(x), -1))))


def loss(model: Net, images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


def compare(batch: int) -> None:
    """Compute all gradients of a batch at once, and compare them with a loop over the samples."""
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.normal(size=(batch, 28, 28, 1)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 10, batch))
    model = Net(28, (32, 64), 128, nnx.Rngs(0))
    one = nnx.jit(nnx.grad(loss))
    by_loop = [one(model, images[i : i + 1], labels[i : i + 1]) for i in range(batch)]
    every = nnx.jit(per_sample_grad(loss, batch_argnums=(1, 2)))(model, images, labels)
    for i, gradient in enumerate(by_loop):
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-3, atol=1e-5), every, gradient)
    print(
        f"per_sample_grad: {batch} gradients of {sum(leaf.size for leaf in jax.tree.leaves(by_loop[0])):,} numbers each"
    )
    norms = nnx.jit(per_sample_norm(loss, batch_argnums=(1, 2)))(model, images, labels)
    expected = [optax.tree.norm(gradient) for gradient in by_loop]
    np.testing.assert_allclose(norms, expected, rtol=1e-3)
    print(f"per_sample_norm: their norms, {norms.min():.2f} to {norms.max():.2f}, without materializing them")
    clipped = clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2))
    weights = [min(1.0, 1.0 / float(norm)) for norm in expected]
    total = jax.tree.map(lambda *leaves: sum(w * leaf for w, leaf in zip(weights, leaves, strict=True)), *by_loop)
    found = nnx.jit(lambda *args: clipped(*args))(model, images, labels)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, total)
    print("clipped_grad: the sum of the gradients, each clipped to norm 1; the rule for each parameter:\n")
    for use in clipped.explain(model, images, labels).uses:
        print(f"  {use.parameter.removeprefix('model'):22} {use.rule:14} {use.why}")


def find_wrong_labels(steps: int, out: Path) -> None:
    """Train on digits, one in ten of which has a wrong label, and draw the norms of all gradients."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8, 1).astype(np.float32)
    rng = np.random.default_rng(0)
    wrong = rng.random(len(labels)) < 0.1
    given = np.where(wrong, (labels + rng.integers(1, 10, len(labels))) % 10, labels)
    model = Net(8, (8, 16), 32, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Net, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> jax.Array:
        value, gradient = value_and_grad(loss)(model, images, labels)
        optimizer.update(model, gradient)
        return value

    with tqdm(range(steps), unit="step") as bar:
        for _ in bar:
            batch = rng.choice(len(images), 64, replace=False)
            bar.set_postfix(loss=f"{float(step(model, optimizer, images[batch], given[batch])):.3f}", refresh=False)
    norms = np.asarray(nnx.jit(per_sample_norm(loss, batch_argnums=(1, 2)))(model, images, given))
    area = roc_auc_score(wrong, norms)
    correct, incorrect = np.median(norms[~wrong]), np.median(norms[wrong])
    print(f"\nmedian gradient norm: {correct:.3f} with the correct label, {incorrect:.3f} with a wrong label")
    print(f"AUC of the norm as a detector of wrong labels: {area:.3f}")
    figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
    bins = np.geomspace(max(norms.min(), 1e-4), norms.max(), 40)
    for kind, name, color in ((~wrong, "correct label", "tab:blue"), (wrong, "wrong label", "tab:red")):
        axes.hist(norms[kind], bins, color=color, alpha=0.6, label=f"{name} ({kind.sum()} images)")
    axes.set(xscale="log", xlabel="gradient norm", ylabel="images", title="Per-sample gradient norms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "per_sample_gradients.png", dpi=120)
    plt.close(figure)
    print(f"Picture: {out / 'per_sample_gradients.png'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64, help="number of samples to compare with a loop")
    parser.add_argument("--steps", type=int, default=150, help="training steps with wrong labels")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory for the picture")
    options = parser.parse_args()
    compare(options.batch)
    find_wrong_labels(options.steps, options.out)


if __name__ == "__main__":
    main()
