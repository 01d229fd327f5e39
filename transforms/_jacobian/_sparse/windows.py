"""Rules for operations over sliding windows: convolutions and pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._core.compat import JaxprEqn
from ..._core.jaxpr import aval
from .index_sets import is_set, known, matrix_at, mixed, places_of, united


def convolved(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Return the sets of a convolution: the input under each window, and the kernel of each output channel."""
    numbers = eqn.params["dimension_numbers"]
    kernel = mixed(eqn, [None, values[1]], [None, numbers[1][:1]], [numbers[2][1:2]])
    return united([*kernel, _of_input(eqn, values) if is_set(values[0]) else None])


def _of_input(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Return the sets that come from a convolution's input: each window in all channels, without known zeros."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    places, out = (
        places_of(x).transpose(spec) for x, spec in zip((eqn.invars[0], eqn.outvars[0]), numbers[::2], strict=True)
    )
    kernel = [aval(eqn.invars[1]).shape[i] for i in numbers[1]]
    options = [params[key] for key in ("window_strides", "padding", "lhs_dilation", "rhs_dilation")]
    axes = list(map(_windows_along, places.shape[2:], kernel[2:], *options))
    # All pairs of a window and an element in it, over all spatial axes, as indices of output, input and weight.
    to, source, within = _over_all_axes(axes, (out.shape[2:], places.shape[2:], tuple(kernel[2:])))
    weights, outputs, batch = known(values[1]), kernel[0], out.shape[0]
    # With zeros in the kernel, output channels have different sets; without, all channels of a group have the same.
    if weights is None or weights.all():
        kernel[0] = max(params["feature_group_count"], params["batch_group_count"])
        weights = np.ones(kernel)
    else:
        weights = weights.transpose(numbers[1])
    # For each term of the sums: the output channel (or group), the input channel within its group, and the pair.
    channel, part, pair = np.nonzero(weights.reshape(*kernel[:2], -1)[:, :, within])
    # The slices of the input's channels and of its batch that an output channel reads.
    part += channel * params["feature_group_count"] // kernel[0] * kernel[1]
    example = np.arange(batch)[:, None]
    read = example + channel * params["batch_group_count"] // kernel[0] * batch
    sums = np.arange(batch * kernel[0] * math.prod(out.shape[2:])).reshape(batch, kernel[0], -1)
    cols = places.reshape(*places.shape[:2], -1)[read, part, source[pair]]
    found = matrix_at(sums[example, channel, to[pair]], cols, (sums.size, places.size)) @ values[0]
    order = np.empty(out.size, int)
    order[out.reshape(batch, outputs, -1)] = sums[:, np.arange(outputs) * kernel[0] // outputs]
    return found[order]


def _windows_along(
    size: int, window: int, stride: int, padding: tuple[int, int], base: int, dilation: int
) -> tuple[Any, ...]:
    """Return along one axis, for all pairs of a window and an element in it, both and the position; and the count."""
    reach = (window - 1) * dilation + 1
    count = max(0, (((size - 1) * base + 1 if size else 0) + sum(padding) - reach) // stride + 1)
    # Position p of window w is at w * stride - padding + p * dilation, and element i of the input at i * base.
    at = np.arange(count)[:, None] * stride - padding[0] + np.arange(window) * dilation
    inside = (at >= 0) & (at <= (size - 1) * base) & (at % base == 0)
    to, within = np.nonzero(inside)
    return to, at[inside] // base, within, count


def _over_all_axes(axes: Sequence[tuple[Any, ...]], shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Return the same pairs for all axes together, as flat indices into arrays of these shapes."""
    found = []
    for which, shape in enumerate(shapes):
        grid = np.meshgrid(*(axis[which] for axis in axes), indexing="ij")
        found.append((np.ravel_multi_index(grid, shape) if grid else np.zeros(1, int)).ravel())
    return found


def _windows(shape: tuple[int, ...], params: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, int]:
    """Return pairs of a window and an element in it, as flat indices, and the number of windows."""
    ones, size = [1] * len(shape), params["window_dimensions"]
    dilations = [params.get(key) or ones for key in ("base_dilation", "window_dilation")]
    axes = list(map(_windows_along, shape, size, params["window_strides"], params["padding"], *dilations))
    counts = tuple(axis[3] for axis in axes)
    window, number = _over_all_axes(axes, (counts, shape))
    return window, number, math.prod(counts)


def windowed(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Return the sets of a reduction over windows, or of a selection from each window by another operand."""
    if any(map(is_set, values[1:])):
        return None
    shape = aval(eqn.invars[0]).shape
    window, number, count = _windows(shape, eqn.params)
    return matrix_at(window, number, (count, math.prod(shape))) @ values[0]


def scattered_from_windows(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Return the sets of the gradient of max pooling: each element has the sets of the windows that contain it."""
    if not is_set(values[0]) or is_set(values[1]):
        return None
    shape = aval(eqn.invars[1]).shape
    window, number, count = _windows(shape, eqn.params)
    return matrix_at(number, window, (math.prod(shape), count)) @ values[0]
