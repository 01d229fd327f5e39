"""How well a score of doubt tells the good examples from the bad."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .validation import at_least_float32, check_numbers


def auroc(scores_in: ArrayLike, scores_out: ArrayLike) -> jax.Array:
    """Area under the curve of the receiver: how often what lies out of the distribution has the higher score.

    Args:
      scores_in: doubt about examples of the distribution, such as `mutual_information`: real (..., count).
      scores_out: doubt about examples out of it: (..., other count).

    Returns:
      Shape (...): the share of the pairs in which the second is higher, a tie counting half: 0.5 tells nothing, 1
      everything. NaN where a score is NaN. Floating point.

    Raises:
      TypeError: no real numbers.
      ValueError: leading axes that differ, or no scores.

    Cost:
      A sort of each.

    Source:
      Hanley and McNeil 1982, "The meaning and use of the area under a receiver operating characteristic (ROC) curve".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import auroc
      >>> auroc(jnp.array([0.1, 0.2, 0.4]), jnp.array([0.3, 0.4]))
      Array(0.75, dtype=float32)
    """
    scores_in = check_numbers("auroc", "scores_in", scores_in, "(..., count)")
    scores_out = check_numbers("auroc", "scores_out", scores_out, "(..., count)")
    if jnp.shape(scores_in)[:-1] != jnp.shape(scores_out)[:-1]:
        raise ValueError(
            "auroc: both scores must have the same axes before the last, but got shapes "
            f"{jnp.shape(scores_in)} and {jnp.shape(scores_out)}."
        )
    return _auroc(scores_in, scores_out)


class RiskCoverage(NamedTuple):
    """What is wrong of the predictions that are kept, when those with the most doubt are left out.

    Attributes:
      coverage: share of the examples that are kept, (batch,): 1 / batch, 2 / batch and so on to 1.
      risk: mean error of those, (..., batch).
      area: mean of the risks, (...): the area under the curve, of which less is better.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import risk_coverage
      >>> curve = risk_coverage(jnp.array([0.1, 0.9]), jnp.array([0.0, 1.0]))
      >>> curve.coverage, curve.area
      (Array([0.5, 1. ], dtype=float32), Array(0.25, dtype=float32))
    """

    coverage: jax.Array
    risk: jax.Array
    area: jax.Array


def risk_coverage(doubts: ArrayLike, errors: ArrayLike) -> RiskCoverage:
    """The risk of predictions against how many of them are kept, the least doubtful first.

    Args:
      doubts: of each example, such as `predictive_entropy`: real (..., batch). Of equal doubts what stands first is
        kept first.
      errors: of each example, such as whether the label was missed: real or bool (..., batch), of the same shape.

    Returns:
      A `RiskCoverage`. NaN where a doubt is NaN.

    Raises:
      TypeError: no real numbers.
      ValueError: shapes that differ, or no examples.

    Source:
      El-Yaniv and Wiener 2010, "On the Foundations of Noise-free Selective Classification"; Geifman et al. 2019,
      "Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers" (the area).

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import risk_coverage
      >>> risk_coverage(jnp.array([0.3, 0.1, 0.2, 0.9]), jnp.array([1.0, 0.0, 0.0, 1.0])).risk
      Array([0.        , 0.        , 0.33333334, 0.5       ], dtype=float32)
    """
    doubts = check_numbers("risk_coverage", "doubts", doubts, "(..., batch)")
    errors = check_numbers("risk_coverage", "errors", errors, "(..., batch)", flags=True)
    if jnp.shape(doubts) != jnp.shape(errors):
        raise ValueError(
            f"risk_coverage: doubts and errors must have the same shape, but got {jnp.shape(doubts)} and "
            f"{jnp.shape(errors)}."
        )
    return _risk_coverage(doubts, errors)


@jax.jit
def _auroc(scores_in: jax.Array, scores_out: jax.Array) -> jax.Array:
    scores_in, scores_out = at_least_float32(scores_in), at_least_float32(scores_out)

    def of_one(inner: jax.Array, outer: jax.Array) -> jax.Array:
        ordered = jnp.sort(inner)
        below = jnp.searchsorted(ordered, outer, side="left")
        not_above = jnp.searchsorted(ordered, outer, side="right")
        # Counts of pairs may pass what integers hold: shares first.
        share = (below.astype(inner.dtype) + not_above.astype(inner.dtype)) / (2 * inner.shape[0])
        return jnp.where(jnp.isnan(inner).any() | jnp.isnan(outer).any(), jnp.nan, share.mean())

    for _ in range(scores_in.ndim - 1):
        of_one = jax.vmap(of_one)
    return of_one(scores_in, scores_out)


@jax.jit
def _risk_coverage(doubts: jax.Array, errors: jax.Array) -> RiskCoverage:
    errors = at_least_float32(errors)
    doubts = at_least_float32(doubts)
    batch = doubts.shape[-1]
    kept = jnp.take_along_axis(errors, jnp.argsort(doubts, axis=-1, stable=True), axis=-1)
    counts = jnp.arange(1, batch + 1, dtype=errors.dtype)
    risk = jnp.cumsum(kept, axis=-1) / counts
    risk = jnp.where(jnp.isnan(doubts).any(axis=-1, keepdims=True), jnp.nan, risk)
    return RiskCoverage(counts / batch, risk, risk.mean(axis=-1))
