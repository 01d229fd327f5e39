"""Measures of how well an uncertainty score separates good examples from bad ones."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .validation import at_least_float32, check_numbers, check_shape


def auroc(scores_in: ArrayLike, scores_out: ArrayLike) -> jax.Array:
    """Return the area under the ROC curve of an uncertainty score that detects out-of-distribution examples.

    Args:
      scores_in: scores of in-distribution examples, such as `mutual_information`: real numbers (..., count).
      scores_out: scores of out-of-distribution examples: (..., other count).

    Returns:
      Shape (...), floating point: the fraction of pairs in which the out-of-distribution example has the higher score;
      a tie counts half. 0.5 is chance, 1 is perfect separation. NaN if a score is NaN.

    Raises:
      TypeError: an argument is not an array of real numbers.
      ValueError: the leading axes differ, or there are no scores.

    Cost:
      A sort of `scores_in`, and two binary searches for each score in `scores_out`.

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
        shapes = f"{jnp.shape(scores_in)} and {jnp.shape(scores_out)}"
        raise ValueError(f"auroc: both scores must have the same axes before the last, but got shapes {shapes}.")
    return _auroc(scores_in, scores_out)


class RiskCoverage(NamedTuple):
    """The error of the predictions that are kept if the most uncertain ones are rejected.

    Attributes:
      coverage: the fraction of examples that are kept, (batch,): 1 / batch, 2 / batch, ..., 1.
      risk: the mean error of the kept examples, (..., batch).
      area: the mean of the risks, (...): the area under the curve; smaller is better.

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
    """Return the mean error of the kept predictions as a function of the fraction kept, the least uncertain first.

    Args:
      doubts: an uncertainty score for each example, such as `predictive_entropy`: real numbers (..., batch). Examples
        with equal scores are kept in their order.
      errors: the error of each example, such as whether the prediction is wrong: real or bool, of the same shape.

    Returns:
      A `RiskCoverage`. Risks and areas are NaN if a score is NaN.

    Raises:
      TypeError: an argument is not an array of real numbers.
      ValueError: the shapes differ, or there are no examples.

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
    check_shape("risk_coverage", "errors", errors, jnp.shape(doubts), "doubts")
    return _risk_coverage(doubts, errors)


@jax.jit
def _auroc(scores_in: jax.Array, scores_out: jax.Array) -> jax.Array:
    """Return the area for each of the leading axes."""
    scores_in, scores_out = at_least_float32(scores_in), at_least_float32(scores_out)

    # The area is P(in < out) + P(in = out) / 2 (the Mann-Whitney statistic). For each out-of-distribution score, two
    # binary searches count the in-distribution scores that are below it, and those that are not above it.
    def of_one(inner: jax.Array, outer: jax.Array) -> jax.Array:
        """Return the area for scores without leading axes."""
        ordered = jnp.sort(inner)
        below = jnp.searchsorted(ordered, outer, side="left")
        not_above = jnp.searchsorted(ordered, outer, side="right")
        # Fractions of the scores, since a count of pairs may overflow an int32.
        share = (below.astype(inner.dtype) + not_above.astype(inner.dtype)) / (2 * inner.shape[0])
        return jnp.where(jnp.isnan(inner).any() | jnp.isnan(outer).any(), jnp.nan, share.mean())

    for _ in range(scores_in.ndim - 1):
        of_one = jax.vmap(of_one)
    return of_one(scores_in, scores_out)


@jax.jit
def _risk_coverage(doubts: jax.Array, errors: jax.Array) -> RiskCoverage:
    """Return the mean error of the first 1, 2, ... examples in the order of their uncertainty."""
    errors = at_least_float32(errors)
    doubts = at_least_float32(doubts)
    batch = doubts.shape[-1]
    kept = jnp.take_along_axis(errors, jnp.argsort(doubts, axis=-1, stable=True), axis=-1)
    counts = jnp.arange(1, batch + 1, dtype=errors.dtype)
    risk = jnp.cumsum(kept, axis=-1) / counts
    # Sorting puts NaN last, where it would go unnoticed.
    risk = jnp.where(jnp.isnan(doubts).any(axis=-1, keepdims=True), jnp.nan, risk)
    return RiskCoverage(counts / batch, risk, risk.mean(axis=-1))
