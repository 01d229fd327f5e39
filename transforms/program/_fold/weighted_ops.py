"""Convolutions and dense products of data with static weights, into which chains can be folded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._core.jaxpr import evaluate
from .._ir.flat_program import Node, Value
from .affine_chains import number_kind

PRODUCTS = ("conv_general_dilated", "dot_general")


@dataclass(frozen=True)
class WeightedOp:
    """A convolution or dense product of data with static weights.

    Attributes:
      node: the operation.
      kernel: the index of the operand that holds the weights.
      outputs: a map from the axes of the result along which the weights vary to axes of the weights.
      inputs: a map from the axes of the data along which the weights vary to axes of the weights.
    """

    node: Node
    kernel: int
    outputs: Mapping[int, int]
    inputs: Mapping[int, int]

    @property
    def weights(self) -> Value:
        """Return the weights."""
        return self.node.inputs[self.kernel]

    @property
    def data(self) -> Value:
        """Return the data."""
        return self.node.inputs[1 - self.kernel]

    @property
    def out(self) -> Value:
        """Return the result."""
        return self.node.outputs[0]

    @property
    def dilutes(self) -> bool:
        """Return whether the operation inserts zeros around or between the elements of the data."""
        params = self.node.eqn.params
        return self._convolves and (
            any(side > 0 for pair in params["padding"] for side in pair) or any(n > 1 for n in params["lhs_dilation"])
        )

    @property
    def _convolves(self) -> bool:
        return self.node.name == "conv_general_dilated"

    def factor_before(self, x: np.ndarray) -> np.ndarray:
        """Convert a factor of the data to a factor of the weights."""
        if not self._convolves:
            return _along(x, self.inputs, len(self.weights.aval.shape))
        # The input axis of the weights has the channels of one group, and the output axis the features of all groups.
        # So repeat each group's factors for each of its features.
        ((channels, inputs),) = self.inputs.items()
        ((_, features),) = self.outputs.items()
        groups = self.node.eqn.params["feature_group_count"]
        x = np.broadcast_to(x.reshape(-1), self.data.aval.shape[channels]).reshape(groups, -1)
        x = np.repeat(x, self.weights.aval.shape[features] // groups, axis=0)
        return _along(x, {0: features, 1: inputs}, len(self.weights.aval.shape))

    def factor_after(self, x: np.ndarray) -> np.ndarray:
        """Convert a factor of the result to a factor of the weights."""
        return _along(x, self.outputs, len(self.weights.aval.shape))

    def of_shift(self, x: np.ndarray, weights: Any) -> np.ndarray:
        """Return the shift of the result for a shift t of unpadded data: the product of t and W."""
        shape = [size if i in self.inputs else 1 for i, size in enumerate(self.data.aval.shape)]
        params = dict(self.node.eqn.params)
        if self._convolves:
            # The shift is constant along spatial axes, so one window determines it at all positions.
            _, _, *places = params["dimension_numbers"].lhs_spec
            _, _, *window = params["dimension_numbers"].rhs_spec
            for i, axis, dilation in zip(places, window, params["rhs_dilation"], strict=True):
                shape[i] = (weights.shape[axis] - 1) * dilation + 1
            ones = (1,) * len(places)
            params |= {"padding": ((0, 0),) * len(places), "window_strides": ones, "lhs_dilation": ones}
        # Compute in float32 or wider, without the faster, less precise algorithms for products.
        params |= {"precision": (lax.Precision.HIGHEST,) * 2, "preferred_element_type": None}
        dtype = jnp.result_type(weights, jnp.float32)
        with jax.ensure_compile_time_eval():
            operands = [jnp.asarray(np.broadcast_to(x, shape).astype(dtype)), jnp.asarray(weights, dtype)]
            (found,) = evaluate(self.node.eqn.replace(params=params), *operands[:: 1 if self.kernel else -1])
        return np.asarray(found, np.float64)


def weighted_op(node: Node) -> WeightedOp | None:
    """Return an operation as a product of data with static weights; None if it is not one."""
    params = node.eqn.params
    # Batch groups, as in the gradient of a convolution, use different weights for parts of the batch: not supported.
    if node.name not in PRODUCTS or params.get("batch_group_count", 1) > 1:
        return None
    avals = [x.aval for x in (*node.inputs, *node.outputs)]
    if any(number_kind(x.dtype) != "real" or 0 in x.shape for x in avals):
        return None
    static = [i for i, x in enumerate(node.inputs) if x.static]
    if node.name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        features, inputs, *_ = numbers.rhs_spec
        _, channels, *_ = numbers.lhs_spec
        return WeightedOp(node, 1, {numbers.out_spec[1]: features}, {channels: inputs}) if static == [1] else None
    if len(static) != 1:
        return None
    kernel = static[0]
    summed, batch = params["dimension_numbers"]
    free = [i for i in range(len(avals[kernel].shape)) if i not in (*summed[kernel], *batch[kernel])]
    # The axes of the result: batch axes, then free axes of the first operand, then free axes of the second.
    first = len(batch[0]) if kernel == 0 else len(avals[2].shape) - len(free)
    outputs = {i: int(axis) for i, axis in enumerate(batch[kernel])} | {first + i: axis for i, axis in enumerate(free)}
    inputs = {
        int(axis): int(other)
        for pair in (summed, batch)
        for axis, other in zip(pair[1 - kernel], pair[kernel], strict=True)
    }
    return WeightedOp(node, kernel, outputs, inputs)


def _along(x: np.ndarray, axes: Mapping[int, int], ndim: int) -> np.ndarray:
    """Move the axes of `x` in the keys of `axes` to their values, in `ndim` axes; `x` has size 1 along all others."""
    order = sorted(axes, key=lambda i: axes[i])
    shape = [1] * ndim
    for i in order:
        shape[axes[i]] = x.shape[i]
    return x.transpose([*order, *(i for i in range(x.ndim) if i not in axes)]).reshape(shape)
