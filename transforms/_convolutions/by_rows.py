"""A convolution with channels last as products of whole rows: `gathered` and `scattered`, whose transposes are fast.

Both are sums of products, one for each position of the window along all spatial axes but the last. `gathered` copies
the input once for each position along the last axis, and contracts these copies with all their weights: its transpose,
the gradient of the weights, contracts the same copies with the cotangents. `scattered` multiplies the input by the
weights of these positions, and adds up the shifted results: its transpose, the gradient of the input, copies the
cotangents as `gathered` copies the input. So each is written such that JAX's transpose of it is the other kind.

In loops on a CPU both gradients take 0.9 to 1.6 times as long as XLA's gradients outside loops, and a quarter to three
quarters of the time of products with patches, for 4 to 128 channels.
"""

from __future__ import annotations

import itertools
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .convolution import Convolution


def gathered(of: Convolution, x: Any, w: Any) -> jax.Array:
    """Return the convolution of an input (batch, *places, channels) and weights (*window, channels, features)."""
    *others, last = w.shape[:-2]
    x = of.padded(x)
    x = jnp.concatenate([_taken(of, x, len(others), j) for j in range(last)], axis=-1)
    out = []
    for position in itertools.product(*map(range, others)):
        rows = x
        for i, k in enumerate(position):
            rows = _taken(of, rows, i, k)
        out.append(of.product(rows, w[position].reshape(-1, w.shape[-1]), ((rows.ndim - 1,), (0,))))
    return reduce(jnp.add, out)


def _taken(of: Convolution, x: jax.Array, i: int, k: int) -> jax.Array:
    """Return the input at position `k` of the window along spatial axis `i`, for all places of the result."""
    begin, stride = k * of.dilation[i], of.strides[i]
    return lax.slice_in_dim(x, begin, begin + (of.sizes[i] - 1) * stride + 1, stride, axis=i + 1)


def scattered(of: Convolution, x: Any, w: Any) -> jax.Array:
    """Return the same as `gathered`, for a convolution without strides and dilation of its input."""
    *others, last = w.shape[:-2]
    out = []
    for position in itertools.product(*map(range, others)):
        weights = jnp.moveaxis(w[position], 0, 1)  # (channels, positions along the last axis, features)
        products = of.product(x, weights.reshape(len(weights), -1), ((x.ndim - 1,), (0,)))
        parts = lax.split(products, [w.shape[-1]] * last, axis=x.ndim - 1)
        rows = reduce(jnp.add, [_shifted(of, part, len(others), j) for j, part in enumerate(parts)])
        for i, k in enumerate(position):
            rows = _shifted(of, rows, i, k)
        out.append(rows)
    return reduce(jnp.add, out)


def _shifted(of: Convolution, x: jax.Array, i: int, k: int) -> jax.Array:
    """Return the terms of position `k` of the window along spatial axis `i` at their places in the result."""
    begin = of.padding[i][0] - k * of.dilation[i]
    config = [(0, 0, 0)] * x.ndim
    config[i + 1] = (begin, of.sizes[i] - x.shape[i + 1] - begin, 0)  # negative padding crops
    return lax.pad(x, jnp.zeros((), x.dtype), config)
