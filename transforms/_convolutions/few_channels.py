"""Rewrite only those convolutions of a forward pass that XLA's CPU backend is slow at: with few channels, or groups.

With 16 channels or more, XLA's kernels reach 50 to 90 GFLOP/s on two cores, which products with copied patches do not.
With less than 8 channels and at most 16 features, with 3 channels and at most 32 features, and with groups, they reach
1 to 30, and products take 0.1 to 0.8 of their time (single convolutions of windows of 3 and 5, with stride 1 and 2, on
images of 14 to 28 pixels; benchmarks/ensemble.md).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from .._core.compat import JaxprEqn
from .._core.jaxpr import aval
from .as_products import is_permuted, run_chosen


def _is_chosen(eqn: JaxprEqn, values: list[Any]) -> bool:
    """Return whether to rewrite a convolution, or the pooling after one that was rewritten."""
    return _is_slow(eqn) if eqn.primitive.name == "conv_general_dilated" else any(map(is_permuted, values))


def _is_slow(eqn: JaxprEqn) -> bool:
    """Return whether XLA computes a convolution slowly."""
    kernel, (features, channels, *window) = aval(eqn.invars[1]), eqn.params["dimension_numbers"].rhs_spec
    groups = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
    # XLA computes a window of one position as a product already.
    has_window = any(kernel.shape[i] > 1 for i in window)
    few = kernel.shape[channels] < 8 and kernel.shape[features] <= (32 if kernel.shape[channels] == 3 else 16)
    return has_window and (groups > 1 or few)


# Evaluates a program (jaxpr, consts, args) with these convolutions as products.
run = partial(run_chosen, _is_chosen)
