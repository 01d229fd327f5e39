"""Small convolutional networks of several kinds, for `convolutions.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

RNGS = nnx.Rngs(0)
Layer = Callable[[jax.Array], jax.Array]


class Chain(nnx.Module):
    """Layers one after another; the result has one row for each example."""

    def __init__(self, *layers: Layer) -> None:
        self.layers = nnx.List(layers)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x.reshape(len(x), -1)


class Residual(nnx.Module):
    """Two convolutions beside a shortcut, with group norms."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        self.first, self.second = conv(inputs, outputs, strides=stride), conv(outputs, outputs)
        self.norms = nnx.List([nnx.GroupNorm(outputs, num_groups=8, rngs=RNGS) for _ in range(2)])
        self.shortcut = conv(inputs, outputs, 1, strides=stride) if (inputs, stride) != (outputs, 1) else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norms[1](self.second(nnx.relu(self.norms[0](self.first(x)))))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class UNet(nnx.Module):
    """An encoder and a decoder of two levels, joined by a concatenation."""

    def __init__(self) -> None:
        self.down, self.below, self.bottom = conv(3, 16), conv(16, 32), conv(32, 32)
        self.up = nnx.ConvTranspose(32, 16, (2, 2), strides=(2, 2), rngs=RNGS)
        self.joined, self.last = conv(32, 16), conv(16, 1, 1)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.down(x))
        below = self.up(nnx.relu(self.bottom(nnx.relu(self.below(pooled(nnx.max_pool)(x))))))
        return self.last(nnx.relu(self.joined(jnp.concatenate([below, x], -1)))).reshape(len(x), -1)


class Dense(nnx.Module):
    """Convolutions that each see the results of all before."""

    def __init__(self, inputs: int, growth: int, count: int) -> None:
        self.layers = nnx.List([conv(inputs + i * growth, growth) for i in range(count)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.concatenate([x, nnx.relu(layer(x))], -1)
        return x


def conv(inputs: int, outputs: int, window: int = 3, axes: int = 2, **options: Any) -> nnx.Conv:
    return nnx.Conv(inputs, outputs, (window,) * axes, rngs=RNGS, **options)


def pooled(pool: Callable[..., jax.Array], size: int = 2, axes: int = 2, **options: Any) -> Layer:
    return lambda x: pool(x, (size,) * axes, (2,) * axes, **options)


def mean(x: jax.Array) -> jax.Array:
    return x.mean(tuple(range(1, x.ndim - 1)))


def flat(x: jax.Array) -> jax.Array:
    return x.reshape(len(x), -1)


def dense(inputs: int, outputs: int = 10) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, rngs=RNGS)


def two_convolutions(pool: Layer) -> nnx.Module:
    return Chain(conv(3, 32), nnx.relu, pool, conv(32, 64), nnx.relu, pool, flat, dense(1024))


def lenet() -> nnx.Module:
    half, relu = pooled(nnx.max_pool), nnx.relu
    first, second = conv(1, 6, 5), conv(6, 16, 5, padding="VALID")
    return Chain(first, relu, half, second, relu, half, flat, dense(400, 120), relu, dense(120, 84), relu, dense(84))


def overlapping() -> nnx.Module:
    average = pooled(nnx.avg_pool, 3, padding="SAME")
    largest = pooled(nnx.max_pool, 3, padding="SAME")
    return Chain(conv(3, 16), nnx.relu, average, conv(16, 32), nnx.relu, largest, flat, dense(2048))


def strided() -> nnx.Module:
    layers = [conv(n, m, strides=2) for n, m in ((3, 16), (16, 32), (32, 64))]
    return Chain(*(x for layer in layers for x in (layer, nnx.relu)), flat, dense(1024))


def depthwise() -> nnx.Module:
    of_each = partial(conv, feature_group_count=16), partial(conv, feature_group_count=32)
    first = (conv(3, 16, strides=2), nnx.relu, of_each[0](16, 16), conv(16, 32, 1), nnx.relu)
    return Chain(*first, of_each[1](32, 32, strides=2), conv(32, 64, 1), nnx.relu, mean, dense(64))


def one_dimensional() -> nnx.Module:
    first = (conv(4, 32, 5, 1), nnx.relu, conv(32, 64, 5, 1, strides=2), nnx.relu, pooled(nnx.avg_pool, axes=1))
    return Chain(*first, conv(64, 64, 5, 1), nnx.relu, mean, dense(64))


def resnet() -> nnx.Module:
    return Chain(conv(3, 16), nnx.relu, Residual(16, 16), Residual(16, 32, 2), Residual(32, 64, 2), mean, dense(64))


def vgg() -> nnx.Module:
    half, relu = pooled(nnx.max_pool), nnx.relu
    blocks = [(conv(n, m), relu, conv(m, m), relu, half) for n, m in ((3, 16), (16, 32), (32, 64))]
    return Chain(*(x for block in blocks for x in block), flat, dense(1024, 128), relu, dense(128))


def densenet() -> nnx.Module:
    return Chain(Dense(3, 12, 4), pooled(nnx.avg_pool), conv(51, 24, 1), Dense(24, 12, 4), mean, dense(72))


def three_dimensional() -> nnx.Module:
    half = pooled(nnx.max_pool, axes=3)
    return Chain(conv(1, 8, 3, 3), nnx.relu, half, conv(8, 16, 3, 3), nnx.relu, half, flat, dense(512))


# The last three were added when the rule of which convolutions become products was final.
NETWORKS: dict[str, tuple[Callable[[], nnx.Module], tuple[int, ...]]] = {
    "two convolutions, max pooling": (lambda: two_convolutions(pooled(nnx.max_pool)), (64, 16, 16, 3)),
    "two convolutions, average pooling": (lambda: two_convolutions(pooled(nnx.avg_pool)), (64, 16, 16, 3)),
    "LeNet-5": (lenet, (64, 28, 28, 1)),
    "overlapping pooling": (overlapping, (64, 32, 32, 3)),
    "strides": (strided, (64, 32, 32, 3)),
    "depthwise": (depthwise, (64, 32, 32, 3)),
    "one-dimensional": (one_dimensional, (64, 128, 4)),
    "U-Net": (UNet, (16, 32, 32, 3)),
    "ResNet": (resnet, (32, 32, 32, 3)),
    "VGG": (vgg, (32, 32, 32, 3)),
    "DenseNet": (densenet, (32, 16, 16, 3)),
    "three-dimensional": (three_dimensional, (16, 16, 16, 8, 1)),
}


def network(name: str, batch: int | None = None) -> tuple[Callable[..., jax.Array], Any, jax.Array, jax.Array]:
    """Return a loss of parameters, inputs and labels, with these arguments; for a U-Net the labels are images."""
    make, shape = NETWORKS[name]
    structure, params = nnx.split(make())
    generator = np.random.default_rng(0)
    x = jnp.asarray(generator.normal(size=(batch or shape[0], *shape[1:])), jnp.float32)
    outputs = jax.eval_shape(lambda x: nnx.merge(structure, params)(x), x)
    of_classes = outputs.shape[-1] == 10
    y = generator.integers(0, 10, len(x)) if of_classes else generator.normal(size=outputs.shape)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        found = nnx.merge(structure, params)(x)
        if of_classes:
            return optax.softmax_cross_entropy_with_integer_labels(found, y).mean()
        return jnp.mean((found - y) ** 2)

    return loss, params, x, jnp.asarray(y, None if of_classes else jnp.float32)
