"""Rewrite only those convolutions of a forward pass that XLA's CPU backend is slow at: with few channels, or groups.

With 16 channels or more, XLA's kernels reach 50 to 90 GFLOP/s on two cores, which products with copied patches do not.
With less than 8 channels and at most 16 features, with 3 channels and at most 32 features, and with groups, they reach
1 to 30, and products take 0.1 to 0.8 of their time (single convolutions of windows of 3 and 5, with stride 1 and 2, on
images of 14 to 28 pixels; benchmarks/ensemble.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from .._core.jaxpr import at_source, aval, bodies, called, evaluate, interpret, with_inner
from .as_products import INTO_CALLS, WITH_BODIES, is_permuted, plain, visit, with_bodies


def has_few_channels(jaxpr: Jaxpr) -> bool:
    """Return whether a program contains a convolution that this file rewrites, at any depth."""
    return any(map(_is_slow, with_inner(jaxpr.eqns)))


def run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate a program with these convolutions as products, and the pooling after them as slices."""
    return [plain(x) for x in interpret(jaxpr, consts, args, _visit)]


def _visit(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
    name = eqn.primitive.name
    if name in INTO_CALLS:
        with at_source(eqn):
            return interpret(*called(eqn), values, _visit)
    if name in WITH_BODIES:
        slow = any(map(has_few_channels, bodies(eqn)))
        return evaluate(with_bodies(eqn, run) if slow else eqn, *map(plain, values))
    if _is_slow(eqn) or (any(map(is_permuted, values)) and name != "conv_general_dilated"):
        return visit(eqn, values)
    return evaluate(eqn, *map(plain, values))


def _is_slow(eqn: JaxprEqn) -> bool:
    """Return whether an operation is a convolution that XLA computes slowly."""
    if eqn.primitive.name != "conv_general_dilated":
        return False
    kernel, (features, channels, *window) = aval(eqn.invars[1]), eqn.params["dimension_numbers"].rhs_spec
    groups = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
    # XLA computes a window of one position as a product already.
    has_window = any(kernel.shape[i] > 1 for i in window)
    few = kernel.shape[channels] < 8 and kernel.shape[features] <= (32 if kernel.shape[channels] == 3 else 16)
    return has_window and (groups > 1 or few)
