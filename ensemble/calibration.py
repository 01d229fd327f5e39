"""Calibration: temperature scaling, and conformal sets and intervals with guaranteed coverage."""

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
    first,
    prepared,
    unwrapped,
    with_nans,
)

__all__ = ["conformal_intervals", "conformal_radius", "conformal_sets", "conformal_threshold", "fit_temperature"]

Score = Literal["probability", "cumulative"]
# The logarithm of a temperature, in units of the scale of the logits, is searched between minus and plus this.
_WIDEST = 10.0


def fit_temperature(logits: ArrayLike, labels: ArrayLike, *, pooled: bool = False) -> jax.Array:
    """Fit the temperature by which to divide logits, so that their probabilities are calibrated.

    The temperature minimizes the mean negative log-likelihood on the given data, which should be held out from
    training.

    Args:
      logits: floating point (..., batch, classes), at least 2 classes: what a model returns before its softmax. For the
        single logit of a sigmoid, `jnp.stack([jnp.zeros_like(z), z], axis=-1)`; a probability in its place cannot be
        told from a logit.
      labels: integer classes (batch,), or several for each example, as for `plurax.ensemble.metrics.accuracy`.
      pooled: False fits one temperature for the predictions of each member. True fits one temperature for all members
        together, (members, batch, classes), so that their mean probability is calibrated.

    Returns:
      Positive temperatures of shape (...), or () if pooled; float32, or float64 for float64 logits. NaN if logits are
      not finite, a traced label is out of range, or the batch is empty. If every example is predicted correctly, the
      optimum is zero: the result is then so small that a smaller one makes no difference. If all logits are equal, the
      temperature has no effect and is 1.

    Raises:
      TypeError: `labels` are not integers, or `logits` are not floating point.
      ValueError: the shapes do not match; there are fewer than 2 classes; a label that is not traced is out of range;
        the logits of a model, unless traced, are probabilities: all lie in 0 to 1, and each row sums to 1 within 1e-3.

    Cost:
      A bisection on the logarithm of the temperature: about one gradient for each bit of precision, in one compiled
      program. (The loss of one model is convex in 1 / temperature, so its slope changes sign only once.)

    Source:
      Guo et al. 2017, "On Calibration of Modern Neural Networks"; pooled: Rahaman and Thiery 2021, "Uncertainty
      Quantification and Deep Ensembles".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.calibration import fit_temperature
      >>> logits = jnp.array([[4.0, 0.0]] * 4)  # odds of 55 to 1, but correct in three of four
      >>> print(f"{fit_temperature(logits, jnp.array([0, 0, 0, 1])):.3f}")  # 4 / log 3
      3.641
    """
    logits, labels = check_scored("fit_temperature", logits, labels, bounded=False, what="logits")
    if pooled and jnp.ndim(logits) != 3:
        shape = jnp.shape(logits)
        raise ValueError(f"fit_temperature: pooled logits must have shape (members, batch, classes), but got {shape}.")
    if jnp.size(logits) and (found := first(_are_probabilities, logits)):
        which = f"logits{list(found[0])}" if found[0] else "logits"
        wrong = f"{which} has probabilities, since every row lies in 0 to 1 and sums to 1"
        remedy = "pass what the model returns before its softmax, or jnp.log of the probabilities"
        raise ValueError(f"fit_temperature: {wrong}; {remedy}.")
    return _temperature(logits, labels, pooled)


def conformal_threshold(
    probabilities: ArrayLike, labels: ArrayLike, *, error: float, score: Score = "probability"
) -> jax.Array:
    """Return the threshold for `conformal_sets` that contain a new label with probability at least 1 - `error`.

    The probability is over the calibration data and new examples, which must be exchangeable. The guarantee holds for
    any model and any number of examples, but not separately for each class, nor under distribution shift. If an example
    has several labels (pixels, or yes-or-no labels), each label has its own set, and the guarantee is that on average
    at most the fraction `error` of the labels of a new example is missed; labels of one example may depend on each
    other.

    Args:
      probabilities: floating point (..., batch, classes), on held-out data.
      labels: integer classes (batch,), or several for each example, as for `plurax.ensemble.metrics.accuracy`.
      error: the allowed probability of a miss, above 0 and below 1.
      score: "probability": 1 minus the probability of the label, which gives the smallest sets on average; or
        "cumulative": the total probability of the label and all classes that are at least as probable, which gives
        larger sets for uncertain examples.

    Returns:
      Shape (...), the k-th smallest score of the data, k = ceil((batch + 1) (1 - error) labels), with the number of
      labels of an example; infinity if k exceeds the number of scores, so that sets contain all classes. NaN under the
      same conditions as `plurax.ensemble.metrics.nll`.

    Raises:
      TypeError: as for `plurax.ensemble.metrics.nll`; `error` is not a number.
      ValueError: as for `plurax.ensemble.metrics.nll`; `error` is out of range; `score` is unknown.

    Source:
      Sadinle et al. 2019, "Least Ambiguous Set-Valued Classifiers with Bounded Error Levels"; Romano et al. 2020,
      "Classification with Valid and Adaptive Coverage" (cumulative, without its random part); Angelopoulos et al. 2022,
      "Conformal Risk Control" (several labels).

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
    each = math.prod(jnp.shape(unwrapped(labels))[1:])
    return _threshold(*check_scored("conformal_threshold", probabilities, labels), error, score, each)


def conformal_sets(probabilities: ArrayLike, threshold: ArrayLike, *, score: Score = "probability") -> jax.Array:
    """Return the conformal prediction set of each example or label, as a mask over the classes.

    Args:
      probabilities: floating point (..., batch, classes), or (..., batch, height, width, classes) and the like.
      threshold: from `conformal_threshold`, shape (...).
      score: the score that was passed to `conformal_threshold`.

    Returns:
      bool, shaped like `probabilities`. With "probability" a set may be empty. A set contains all classes if the
      threshold or a probability is NaN, or a traced probability is outside 0 to 1 by more than 0.01.

    Raises:
      TypeError: as for `plurax.ensemble.metrics.entropy`.
      ValueError: as for `plurax.ensemble.metrics.entropy`; `threshold` has another shape; `score` is unknown.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.calibration import conformal_sets
      >>> conformal_sets(jnp.array([[0.7, 0.25, 0.05]]), 0.8)
      Array([[ True,  True, False]], dtype=bool)
    """
    check_choice("conformal_sets", "score", score, get_args(Score))
    probabilities = check_probabilities("conformal_sets", probabilities, "(..., batch, classes)", 2)
    shape = jnp.shape(probabilities)
    check_shape(
        "conformal_sets", "threshold", threshold, shape[: min(jnp.ndim(threshold), len(shape) - 2)], "probabilities"
    )
    return _sets(probabilities, jnp.asarray(threshold), score)


def conformal_radius(
    predictions: ArrayLike, targets: ArrayLike, *, error: float, scales: ArrayLike | None = None
) -> jax.Array:
    """Return the radius of `conformal_intervals` that contain a new target with probability at least 1 - `error`.

    Args:
      predictions: real numbers (..., batch), on held-out data.
      targets: real numbers (batch,).
      error: the allowed probability of a miss, above 0 and below 1.
      scales: a positive scale for each prediction, such as its standard deviation: (..., batch). The width of each
        interval is proportional to its scale. None uses 1.

    Returns:
      Shape (...), the k-th smallest distance between prediction and target, divided by the scale; k as for
      `conformal_threshold`.

    Raises:
      TypeError: an argument is not an array of real numbers, or `error` is not a number.
      ValueError: the shapes do not match; a scale that is not traced is not above 0; `error` is out of range.

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
    """Return the lower and upper ends of conformal prediction intervals.

    Args:
      predictions: real numbers (..., batch).
      radius: from `conformal_radius`, shape (...).
      scales: the scales of these predictions, if scales were passed to `conformal_radius`.

    Returns:
      Two arrays (..., batch): predictions minus and plus radius times scale.

    Raises:
      TypeError, ValueError: as for `conformal_radius`; `radius` has another shape.

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
    """Return one temperature per model, or one for their mean probability; NaN for invalid data."""
    logits, labels, valid = prepared(logits, labels, False)

    def of_one(logits: jax.Array) -> jax.Array:
        """Return the temperature of one model, or of all members pooled."""
        # A softmax is invariant to a constant added to all logits, so the largest is shifted to 0 to avoid overflow. In
        # units of the mean distance of the logits from it, 1 is a good first guess of the temperature.
        below = logits - logits.max(axis=-1, keepdims=True)
        unit = jnp.where(below.mean() < 0, -below.mean(), 1)

        def loss(log_temperature: jax.Array) -> jax.Array:
            log_p = jax.nn.log_softmax(below / unit * jnp.exp(-log_temperature), axis=-1)
            if pooled:
                log_p = jax.nn.logsumexp(log_p, axis=0) - math.log(logits.shape[0])
            return -at_labels(log_p, labels).mean(axis=-1)

        # Minimized over the logarithm, since a temperature is positive and its scale is unknown.
        return unit * jnp.exp(_minimum(loss, jnp.zeros((), logits.dtype)))

    for _ in range(0 if pooled else logits.ndim - 2):
        of_one = jax.vmap(of_one)
    known = valid & jnp.isfinite(logits).all(axis=-1)
    can_fit = known.all(axis=None if pooled else -1) & (labels.shape[0] > 0)
    return jnp.where(can_fit, of_one(jnp.where(jnp.isfinite(logits), logits, 0)), jnp.nan)


def _minimum(loss: Callable[[jax.Array], jax.Array], start: jax.Array) -> jax.Array:
    """Return the point where the slope of a smooth function changes sign, or `start` if the slope there is zero."""
    slope = jax.grad(loss)

    def halve(_: Any, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = (low + high) / 2
        rises = slope(middle) > 0
        return jnp.where(rises, low, middle), jnp.where(rises, middle, high)

    # Each iteration gives one bit; a few more are needed for the width of the interval.
    low, high = lax.fori_loop(0, jnp.finfo(start.dtype).nmant + 6, halve, (start - _WIDEST, start + _WIDEST))
    return jnp.where(slope(start) == 0, start, (low + high) / 2)


@partial(jax.jit, static_argnums=(2, 3, 4))
def _threshold(p: jax.Array, labels: jax.Array, error: float, score: str, each: int) -> jax.Array:
    p, labels, valid = prepared(p, labels, True)
    return _kth(jnp.where(valid, at_labels(_scores(p, score), labels), jnp.nan), error, each)


@partial(jax.jit, static_argnums=2)
def _sets(p: jax.Array, threshold: jax.Array, score: str) -> jax.Array:
    p = with_nans(p)
    # All classes if a value is NaN: a set may be too large, but must not miss the label.
    unknown = jnp.isnan(p).any(axis=-1, keepdims=True)
    threshold = threshold.reshape(threshold.shape + (1,) * (p.ndim - threshold.ndim))
    return (_scores(p, score) <= threshold) | unknown | jnp.isnan(threshold)


def _scores(p: jax.Array, score: str) -> jax.Array:
    """Return the score that each class would have as the label: (..., batch, classes)."""
    if score == "probability":
        return 1 - p
    # Cumulative sum from the most probable class on, then back in the order of the classes: `argsort(order)` is the
    # inverse permutation of `order`.
    order = jnp.argsort(-p, axis=-1, stable=True)
    ordered = jnp.take_along_axis(p, order, axis=-1)
    # Equally probable classes have the sum up to the last of them: the next place where the probability changes.
    places = jnp.arange(p.shape[-1])
    changes = jnp.concatenate([ordered[..., :-1] != ordered[..., 1:], jnp.ones_like(ordered[..., :1], bool)], axis=-1)
    last = lax.cummin(jnp.where(changes, places, p.shape[-1]), axis=p.ndim - 1, reverse=True)
    summed = jnp.take_along_axis(jnp.cumsum(ordered, axis=-1), last, axis=-1)
    return jnp.take_along_axis(summed, jnp.argsort(order, axis=-1), axis=-1)


@partial(jax.jit, static_argnums=(1, 2))
def _kth(scores: jax.Array, error: float, each: int = 1) -> jax.Array:
    """Return the k-th smallest of `each` scores per example along the last axis; NaN where a score is NaN."""
    count = scores.shape[-1]
    # With the fraction of labels of an example above the threshold as its loss, which is at most 1, risk control needs
    # (sum of the losses of the data + 1) / (batch + 1) <= error. The sum is (count - k) / each.
    # In floating point 10 * (1 - 0.7) is 3.0000000000000004, whose ceiling is 4 instead of 3.
    k = math.ceil((count + each) * (1 - error) - 1e-9)
    found = jnp.sort(scores, axis=-1)[..., k - 1] if 0 < k <= count else jnp.inf
    return jnp.where(jnp.isnan(scores).any(axis=-1), jnp.nan, found)


@jax.jit
def _are_probabilities(logits: jax.Array) -> jax.Array:
    """Return for each model whether all its rows lie in 0 to 1 and sum to 1."""
    # In bfloat16, rounding changes the sum of a softmax by up to half an ulp of 1.
    tolerance = max(1e-3, float(jnp.finfo(logits.dtype).eps) / 2)
    wide = at_least_float32(logits)
    within = ((wide >= 0) & (wide <= 1)).all(axis=-1)
    return (within & (jnp.abs(wide.sum(axis=-1) - 1) <= tolerance)).all(axis=-1)


def _checked_error(name: str, error: Any) -> float:
    return check_number(name, "error", error, lambda x: 0 < x < 1, "above 0 and below 1")


def _check_scales(name: str, scales: Any, predictions: Any) -> Any:
    """Return scales of the same shape as the predictions, ones by default; raise if they do not fit."""
    if scales is None:
        return jnp.ones_like(predictions)
    scales = check_numbers(name, "scales", scales, "(..., batch)", positive=True)
    check_shape(name, "scales", scales, jnp.shape(predictions), "predictions")
    return scales
