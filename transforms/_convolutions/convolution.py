"""A convolution as it stands in a program: `Convolution`."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core.compat import JaxprEqn
from .._core.jaxpr import aval


class Convolution:
    """A convolution, with named axes and settings; "places" are spatial axes.

    Attributes:
      batch, channels, places: axes of the input.
      features, inputs, window: axes of the weights.
      out_batch, out_features, out_places: axes of the result.
      sizes: the spatial shape of the result.
      shape: the shape of the result.
      number: its batch size.
      positions: the number of positions of the window.
      results: the number of places of the result.
      patches: the elements of the input that one window position takes from one example, for all places of the result.
      parts: the elements of one example's result for one window position, for all places of the input.
      groups: `feature_group_count`, the number of groups of channels, each with its own features.
      batches: `batch_group_count`, the number of groups of the batch, each with its own features.
      is_slow: whether XLA's CPU backend takes longer than a product with copied patches, outside of loops.
    """

    def __init__(self, eqn: JaxprEqn) -> None:
        params = eqn.params
        numbers = params["dimension_numbers"]
        self.batch, self.channels, *self.places = numbers.lhs_spec
        self.features, self.inputs, *self.window = numbers.rhs_spec
        self.out_batch, self.out_features, *self.out_places = numbers.out_spec
        self.shape, dtype = aval(eqn.outvars[0]).shape, aval(eqn.outvars[0]).dtype
        self.sizes, self.number = [self.shape[i] for i in self.out_places], self.shape[self.out_batch]
        lhs_shape, rhs_shape = (aval(x).shape for x in eqn.invars)
        self.positions, self.results = math.prod(rhs_shape[i] for i in self.window), math.prod(self.sizes)
        self.patches = self.results * lhs_shape[self.channels]
        self.parts = math.prod(lhs_shape[i] for i in self.places) * rhs_shape[self.features]
        self.groups: int = params["feature_group_count"]
        self.batches: int = params["batch_group_count"]
        self.strides, self.padding = params["window_strides"], params["padding"]
        self.spread, self.dilation = params["lhs_dilation"], params["rhs_dilation"]
        # In the gradient of weights, the axes of the batch are the channels, and the window is an image.
        of_weights = self.positions > self.results
        channels = self.number if of_weights else rhs_shape[self.inputs]
        self.is_slow = self._is_slow(of_weights, channels, rhs_shape[self.features])
        # Partial results are added in at least 32 bits, as in XLA.
        wide = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
        self._settings = {"precision": params["precision"], "preferred_element_type": wide}

    def _is_slow(self, of_weights: bool, channels: int, features: int) -> bool:
        """Return whether XLA is slow: with few channels, groups or three spatial axes, and for weights of one position.

        With 16 channels or more, XLA's kernels reach 50 to 110 GFLOP/s on two cores, which products with copied patches
        do not; with fewer they reach 1 to 30. Gradients of weights of one position reach 3 to 16, as products twice to
        four times as much. Within networks the transposes around a product count too (benchmarks/convolutions.md).
        """
        if self.groups > 1 or self.batches > 1 or len(self.places) > 2:
            return True
        if min(self.positions, self.results) == 1:  # XLA computes the forward pass as a product already
            return of_weights
        return (min(channels, features) < 8 and max(channels, features) <= 16) or (channels == 3 and features <= 32)

    def product(self, left: jax.Array, right: jax.Array, over: Any, along: Any = ((), ())) -> jax.Array:
        """Return the product of two arrays, contracted over the axes `over` and batched along the axes `along`."""
        return lax.dot_general(left, right, (over, along), **self._settings)

    def padded(self, x: jax.Array) -> jax.Array:
        """Return the input, with spatial axes from axis 1 on, padded and dilated with zeros."""
        spread = zip(self.padding, self.spread, strict=True)
        config = [(0, 0, 0), *((low, high, step - 1) for (low, high), step in spread)]
        config += [(0, 0, 0)] * (x.ndim - len(config))
        return lax.pad(x, jnp.zeros((), x.dtype), config) if any(map(any, config)) else x
