"""Profile a ResNet-18 layer by layer, and fold its batch norms into the convolutions.

    python examples/profile_resnet.py --images 5 --side 224 --out demo

PyTorch's tutorials profile a ResNet-18 with an FX interpreter, operation by operation, and compare traces of two
programs. This script profiles the same network in Flax, with random weights, in both modes: operation by operation, and
compiled, where XLA fuses operations and the time is still attributed to layers. Then it folds the batch norms into the
convolutions, and compares the two programs. It draws `profile_resnet.png`.
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl

mpl.use("Agg")  # draws to a file; needs no window

import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

from plurax.transforms.program import fold_bn, profile, trace_diff


class Block(nnx.Module):
    """A residual block: two 3 x 3 convolutions with a skip connection."""

    def __init__(self, channels_in: int, channels: int, stride: int, rngs: nnx.Rngs) -> None:
        self.conv1 = convolution(channels_in, channels, 3, stride, rngs)
        self.bn1 = nnx.BatchNorm(channels, rngs=rngs)
        self.conv2 = convolution(channels, channels, 3, 1, rngs)
        self.bn2 = nnx.BatchNorm(channels, rngs=rngs)
        self.downsample = nnx.data(None)
        if stride != 1 or channels_in != channels:
            self.downsample = nnx.Sequential(
                convolution(channels_in, channels, 1, stride, rngs), nnx.BatchNorm(channels, rngs=rngs)
            )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (batch, height, width, channels_in) to `channels` channels; the stride divides height and width."""
        y = self.bn2(self.conv2(nnx.relu(self.bn1(self.conv1(x)))))
        return nnx.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nnx.Module):
    """The ResNet-18 of torchvision (He et al. 2016, "Deep Residual Learning for Image Recognition")."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.conv1 = convolution(3, width, 7, 2, rngs)
        self.bn1 = nnx.BatchNorm(width, rngs=rngs)
        stages = []
        for i in range(4):
            before, channels, stride = width * 2 ** max(i - 1, 0), width * 2**i, 1 if i == 0 else 2
            stages.append(nnx.List([Block(before, channels, stride, rngs), Block(channels, channels, 1, rngs)]))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nnx.Linear(width * 8, 1000, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits (batch, 1000) for images (batch, height, width, 3)."""
        x = nnx.relu(self.bn1(self.conv1(x)))
        x = nnx.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in stage:
                x = block(x)
        return self.fc(x.mean((1, 2)))


def convolution(channels_in: int, channels: int, window: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    """Return a convolution without a bias, since a batch norm follows."""
    edge = window // 2
    return nnx.Conv(
        channels_in, channels, (window, window), stride, padding=[(edge, edge)] * 2, use_bias=False, rngs=rngs
    )


def resnet18(width: int = 64, seed: int = 0) -> ResNet18:
    """Return a ResNet-18 in evaluation mode, with random weights and random running statistics."""
    model = ResNet18(width, nnx.Rngs(seed))
    generator = np.random.default_rng(seed)
    for _, part in nnx.iter_modules(model):
        if isinstance(part, nnx.BatchNorm):
            part.mean[...] = jnp.asarray(0.1 * generator.normal(size=part.mean.shape), jnp.float32)
            part.var[...] = jnp.asarray(generator.uniform(0.5, 1.5, part.var.shape), jnp.float32)
            part.scale[...] = jnp.asarray(generator.uniform(0.5, 1.5, part.scale.shape), jnp.float32)
            part.bias[...] = jnp.asarray(0.1 * generator.normal(size=part.bias.shape), jnp.float32)
    model.eval()
    return model


def show(table: str) -> None:
    """Print a table, with long lines wrapped."""
    for line in table.split("\n"):
        print(textwrap.fill(line, 100))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=5)
    parser.add_argument("--side", type=int, default=224, help="pixels")
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--top", type=int, default=10, help="rows of each table")
    parser.add_argument("--out", type=Path, default=Path("demo"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    model = resnet18(options.width)
    images = np.random.default_rng(1).normal(size=(options.images, options.side, options.side, 3))
    images = jnp.asarray(images, jnp.float32)

    show(profile(model, images, mode="eager", repeats=options.repeats).table(by=("op", "scope"), top=options.top))
    compiled = profile(model, images, repeats=options.repeats)
    show("\n" + compiled.table(by=("op", "scope"), top=options.top))
    show("\n" + compiled.table(by="op", top=options.top))

    folded, params, report = fold_bn(lambda model, x: model(x), model, images)
    error = float(jnp.abs(folded(params, images) - model(images)).max())
    print(f"\n{len(report.folded)} batch norms folded, {len(report.kept)} kept; outputs differ by at most {error:.1e}.")

    def as_written(images: jax.Array) -> jax.Array:
        return model(images)

    def with_norms_folded(images: jax.Array) -> jax.Array:
        return folded(params, images)

    difference = trace_diff(as_written, with_norms_folded, images, repeats=2 * options.repeats)
    show(difference.table(by="op", top=options.top))

    picture = options.out / "profile_resnet.png"
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5), layout="constrained")
    compiled.plot(top=options.top, ax=left)
    difference.plot_durations(by="op", top=8, ax=right)
    figure.savefig(picture, dpi=110)
    plt.close(figure)
    print(f"Picture: {picture}")


if __name__ == "__main__":
    main()
