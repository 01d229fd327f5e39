"""Calibration: temperatures, and conformal sets and intervals that hold the truth as often as promised."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..transforms._core.arguments import check_choice, check_number
from ._scoring.classification import at_labels
from ._scoring.validation import (
    at_least_float32,
    check_numbers,
    check_probabilities,
    check_scored,
    check_shape,
    prepared,
    with_nans,
)

__all__ = ["conformal_intervals", "conformal_radius", "conformal_sets", "conformal_threshold", "fit_temperature"]

Score = Literal["probability", "cumulative"]
# The logarithm of a temperature, in units of the size of the logits, lies between minus and plus this.
_WIDEST = 10.0


def fit_temperature(logits: ArrayLike, labels: ArrayLike, *, pooled: bool = False) -> jax.Array:
    """Return the temperature by which to divide logits, so that their probabilities are calibrated.

    It minimises the mean negative log-likelihood on these data, which should not be those trained on.

    Args:
      logits: floating (..., batch, classes), at least 2 classes.
      labels: classes as integers (batch,).
      pooled: False fits one temperature for each member, as it predicts alone. True fits one for all members together,
        (members, batch, classes), as their mean probability predicts.

    Returns:
      Shape (...), or () where pooled, above 0; float32 or float64. NaN where logits are not finite, or a traced label
      is not a class. Where every example is predicted right, smaller is always better: then it is so small that a
      smaller one makes no difference. Where all logits are equal, it has no effect, and is 1.

    Raises:
      TypeError: labels are not integers, or logits not floating.
      ValueError: shapes that do not fit, or a label that is not traced is not a class.

    Cost:
      A bisection on the logarithm of the temperature: a gradient for each bit of the dtype, in one compiled program.
      (The loss of one model is convex in 1 / temperature, so its slope changes sign once.)

    Source:
      Guo et al. 2017, "On Calibration of Modern Neural Networks"; pooled: Rahaman and Thiery 2021, "Uncertainty
      Quantification and Deep Ensembles".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.calibration import fit_temperature
      >>> logits = jnp.array([[4.0, 0.0]] * 4)  # sure by 55 to 1, but right in three of four
      >>> print(f"{fit_temperature(logits, jnp.array([0, 0, 0, 1])):.3f}")  # 4 / log 3
      3.641
    """
    logits, labels = check_scored("fit_temperature", logits, labels, bounded=False, what="logits")
    if pooled and jnp.ndim(logits) != 3:
        shape = jnp.shape(logits)
        raise ValueError(f"fit_temperature: pooled logits must be (members, batch, classes), but have shape {shape}.")
    return _temperature(logits, labels, pooled)


def conformal_threshold(
    probabilities: ArrayLike, labels: ArrayLike, *, error: float, score: Score = "probability"
) -> jax.Array:
    """Return the threshold with which `conformal_sets` hold a new label with a probability of at least 1 - `error`.

    The probability is over the calibration data and new examples, if all of them are exchangeable: it holds for any
    model, right or wrong, and any number of data. It does not hold for each class, nor on shifted data.

    Args:
      probabilities: floating (..., batch, classes), of data that were not trained on.
      labels: classes as integers (batch,).
      error: above 0 and below 1.
      score: "probability": one less the probability of the label, which gives the smallest sets on average; or
        "cumulative": the probabilities of all classes that are not less probable, which gives larger sets where the
        model is in doubt.

    Returns:
      Shape (...): the k-th smallest score of the data, k = ceil((batch + 1) (1 - error)); infinite where that
      exceeds the batch, so that sets hold all classes. NaN where the scores of `metrics` are.

    Raises:
      TypeError, ValueError: as for `plurax.ensemble.metrics.nll`; `error` is not between 0 and 1, or an unknown score.

    Source:
      Sadinle et al. 2019, "Least Ambiguous Set-Valued Classifiers with Bounded Error Levels"; Romano et al. 2020,
      "Classification with Valid and Adaptive Coverage" (cumulative, without its random part).

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.calibration import conformal_sets, conformal_threshold
      >>> p = jnp.array([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6], [0.2, 0.8]])
      >>> threshold = conformal_threshold(p, jnp.array([0, 0, 1, 1]), error=0.25)
      >>> conformal_sets(jnp.array([[0.95, 0.05], [0.55, 0.45]]), threshold)
      Array([[ True, False],
             [False, False]], dtype=bool)
    """
    error = _checked_error("conformal_threshold", error)
    check_choice("conformal_threshold", "score", score, get_args(Score))
    return _threshold(*check_scored("conformal_threshold", probabilities, labels), error, score)


def conformal_sets(probabilities: ArrayLike, threshold: ArrayLike, *, score: Score = "probability") -> jax.Array:
    """Return the set of classes that each example may have.

    Args:
      probabilities: floating (..., batch, classes).
      threshold: from `conformal_threshold`, of shape (...).
      score: as there.

    Returns:
      bool (..., batch, classes). A set may be empty under "probability". Where a probability is NaN, or traced and
      outside 0 to 1, and where the threshold is NaN, it has all classes.

    Raises:
      TypeError, ValueError: as for `plurax.ensemble.metrics.entropy`; thresholds that do not fit, or an unknown score.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.calibration import conformal_sets
      >>> conformal_sets(jnp.array([[0.7, 0.25, 0.05]]), 0.8)
      Array([[ True,  True, False]], dtype=bool)
    """
    check_choice("conformal_sets", "score", score, get_args(Score))
    probabilities = check_probabilities("conformal_sets", probabilities, "(..., batch, classes)", 2)
    check_shape("conformal_sets", "threshold", threshold, jnp.shape(probabilities)[:-2], "probabilities")
    return _sets(probabilities, jnp.asarray(threshold), score)


def conformal_radius(
    predictions: ArrayLike, targets: ArrayLike, *, error: float, scales: ArrayLike | None = None
) -> jax.Array:
    """Return the radius of `conformal_intervals` that hold a new target with a probability of at least 1 - `error`.

    Args:
      predictions: real (..., batch), of data that were not trained on.
      targets: real (batch,).
      error: above 0 and below 1.
      scales: of each prediction, such as its standard deviation, above 0: (..., batch). Intervals are as wide as these.

    Returns:
      Shape (...): the k-th smallest distance (in scales) of prediction and target, as for `conformal_threshold`.

    Raises:
      TypeError: an argument does not hold real numbers.
      ValueError: shapes that do not fit, a scale that is not traced and not above 0, or `error` out of range.

    Source:
      Lei et al. 2018, "Distribution-Free Predictive Inference for Regression".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.calibration import conformal_radius
      >>> conformal_radius(jnp.zeros(4), jnp.array([1.0, -2.0, 3.0, 4.0]), error=0.25)
      Array(4., dtype=float32)
    """
    error = _checked_error("conformal_radius", error)
    predictions = check_numbers("conformal_radius", "predictions", predictions, "(..., batch)")
    targets = check_numbers("conformal_radius", "targets", targets, "(batch,)")
    scales = _check_scales("conformal_radius", scales, predictions)
    check_shape("conformal_radius", "targets", targets, jnp.shape(predictions)[-1:], "predictions")
    target, centre, scale = map(at_least_float32, (targets, predictions, scales))
    return _kth(jnp.abs(target - centre) / jnp.where(scale > 0, scale, jnp.nan), error)


def conformal_intervals(
    predictions: ArrayLike, radius: ArrayLike, *, scales: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the lower and the upper ends of intervals around predictions.

    Args:
      predictions: real (..., batch).
      radius: from `conformal_radius`, of shape (...).
      scales: as there, of these predictions.

    Returns:
      Two arrays (..., batch).

    Raises:
      TypeError, ValueError: as for `conformal_radius`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.calibration import conformal_intervals
      >>> conformal_intervals(jnp.array([1.0, 2.0]), 0.5)
      (Array([0.5, 1.5], dtype=float32), Array([1.5, 2.5], dtype=float32))
    """
    predictions = check_numbers("conformal_intervals", "predictions", predictions, "(..., batch)")
    scales = _check_scales("conformal_intervals", scales, predictions)
    check_shape("conformal_intervals", "radius", radius, jnp.shape(predictions)[:-1], "predictions")
    centre, scale = map(at_least_float32, (predictions, scales))
    reach = jnp.asarray(radius)[..., None] * jnp.where(scale > 0, scale, jnp.nan)
    return centre - reach, centre + reach


@partial(jax.jit, static_argnums=2)
def _temperature(logits: jax.Array, labels: jax.Array, pooled: bool) -> jax.Array:
    """Return the temperatures of models, or the one of their mean probability; NaN where the data are not valid."""
    logits, labels, valid = prepared(logits, labels, False)

    def of_one(logits: jax.Array) -> jax.Array:
        """Return the temperature of one model, or of all members pooled."""
        # A softmax does not change with a constant in all logits, so the largest becomes 0 and nothing overflows. In
        # units of their mean distance from it, 1 is a good first guess of the temperature.
        below = logits - logits.max(axis=-1, keepdims=True)
        unit = jnp.where(below.mean() < 0, -below.mean(), 1)

        def loss(log_temperature: jax.Array) -> jax.Array:
            log_p = jax.nn.log_softmax(below / unit * jnp.exp(-log_temperature), axis=-1)
            if pooled:
                log_p = jax.nn.logsumexp(log_p, axis=0) - math.log(logits.shape[0])
            return -at_labels(log_p, labels).mean(axis=-1)

        # Over the logarithm: a temperature is positive, and its scale is unknown.
        return unit * jnp.exp(_minimum(loss, jnp.zeros((), logits.dtype)))

    for _ in range(0 if pooled else logits.ndim - 2):
        of_one = jax.vmap(of_one)
    known = valid & jnp.isfinite(logits).all(axis=-1)
    can_fit = known.all(axis=None if pooled else -1) & (labels.shape[0] > 0)
    return jnp.where(can_fit, of_one(jnp.where(jnp.isfinite(logits), logits, 0)), jnp.nan)


def _minimum(loss: Callable[[jax.Array], jax.Array], start: jax.Array) -> jax.Array:
    """Return the number at which the slope of a smooth function changes its sign; `start` where it has none there."""
    slope = jax.grad(loss)

    def halve(_: Any, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = (low + high) / 2
        rises = slope(middle) > 0
        return jnp.where(rises, low, middle), jnp.where(rises, middle, high)

    # Each iteration gives one bit, and a few more those of the width.
    low, high = lax.fori_loop(0, jnp.finfo(start.dtype).nmant + 6, halve, (start - _WIDEST, start + _WIDEST))
    return jnp.where(slope(start) == 0, start, (low + high) / 2)


@partial(jax.jit, static_argnums=(2, 3))
def _threshold(p: jax.Array, labels: jax.Array, error: float, score: str) -> jax.Array:
    p, labels, valid = prepared(p, labels, True)
    return _kth(jnp.where(valid, at_labels(_scores(p, score), labels), jnp.nan), error)


@partial(jax.jit, static_argnums=2)
def _sets(p: jax.Array, threshold: jax.Array, score: str) -> jax.Array:
    p = with_nans(p)
    # All classes where nothing is known: a set may be too large, but must not lack the label.
    unknown = jnp.isnan(p).any(axis=-1, keepdims=True)
    threshold = threshold[..., None, None]
    return (_scores(p, score) <= threshold) | unknown | jnp.isnan(threshold)


def _scores(p: jax.Array, score: str) -> jax.Array:
    """Return the score that each class would have as the label: (..., batch, classes)."""
    if score == "probability":
        return 1 - p
    # Summed from the most probable class on, and put back: the permutation that sorts `order` is its inverse.
    order = jnp.argsort(-p, axis=-1, stable=True)
    summed = jnp.cumsum(jnp.take_along_axis(p, order, axis=-1), axis=-1)
    return jnp.take_along_axis(summed, jnp.argsort(order, axis=-1), axis=-1)


@partial(jax.jit, static_argnums=1)
def _kth(scores: jax.Array, error: float) -> jax.Array:
    """Return the k-th smallest along the last axis, k = ceil((batch + 1) (1 - error)); NaN where a score is NaN."""
    batch = scores.shape[-1]
    # Rounded, 10 * (1 - 0.7) is 3.0000000000000004, of which the ceiling is not 3.
    k = math.ceil((batch + 1) * (1 - error) - 1e-9)
    found = jnp.sort(scores, axis=-1)[..., k - 1] if k <= batch else jnp.inf
    return jnp.where(jnp.isnan(scores).any(axis=-1), jnp.nan, found)


def _checked_error(name: str, error: Any) -> float:
    return check_number(name, "error", error, lambda x: 0 < x < 1, "above 0 and below 1")


def _check_scales(name: str, scales: Any, predictions: Any) -> Any:
    """Return scales of the shape of the predictions, ones by default; raise if they do not fit."""
    if scales is None:
        return jnp.ones_like(predictions)
    scales = check_numbers(name, "scales", scales, "(..., batch)", positive=True)
    check_shape(name, "scales", scales, jnp.shape(predictions), "predictions")
    return scales
