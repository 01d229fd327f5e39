"""Calibration: temperatures, and conformal sets and intervals that hold the truth as often as promised."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from ..transforms._core.arguments import is_real
from ._scoring.classification import at_labels
from ._scoring.validation import at_least_float32, check_numbers, check_probabilities, check_scored, prepared, with_nans

__all__ = ["conformal_intervals", "conformal_radius", "conformal_sets", "conformal_threshold", "fit_temperature"]

# The logarithm of a temperature, in units of the size of the logits, lies between minus and plus this.
_WIDEST = 10.0
_STEPS = 100


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
      At most 100 steps of L-BFGS (optax's) on the logarithm of the temperature, in one compiled program.

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
        raise ValueError(
            f"fit_temperature: pooled logits must have shape (members, batch, classes), but got {jnp.shape(logits)}."
        )
    return _temperature(logits, labels, pooled)


def conformal_threshold(
    probabilities: ArrayLike, labels: ArrayLike, *, error: float, score: str = "probability"
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
      TypeError, ValueError: as for `plurax.ensemble.metrics.nll`; `error` is out of range, or an unknown score.

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
    _check_error("conformal_threshold", error)
    _check_score("conformal_threshold", score)
    return _threshold(*check_scored("conformal_threshold", probabilities, labels), error, score)


def conformal_sets(probabilities: ArrayLike, threshold: ArrayLike, *, score: str = "probability") -> jax.Array:
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
    _check_score("conformal_sets", score)
    probabilities = check_probabilities("conformal_sets", probabilities, "(..., batch, classes)", 2)
    if jnp.shape(threshold) != jnp.shape(probabilities)[:-2]:
        raise ValueError(
            f"conformal_sets: threshold must have shape {jnp.shape(probabilities)[:-2]}, as probabilities before their "
            f"last two axes, but got {jnp.shape(threshold)}."
        )
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
    _check_error("conformal_radius", error)
    predictions = check_numbers("conformal_radius", "predictions", predictions, "(..., batch)")
    targets = check_numbers("conformal_radius", "targets", targets, "(batch,)")
    scales = _check_scales("conformal_radius", scales, predictions)
    if jnp.shape(targets) != jnp.shape(predictions)[-1:]:
        raise ValueError(
            f"conformal_radius: predictions must have shape (..., batch) and targets (batch,), but got "
            f"{jnp.shape(predictions)} and {jnp.shape(targets)}."
        )
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
    if jnp.shape(radius) != jnp.shape(predictions)[:-1]:
        raise ValueError(
            f"conformal_intervals: radius must have shape {jnp.shape(predictions)[:-1]}, as predictions before their "
            f"last axis, but got {jnp.shape(radius)}."
        )
    centre, scale = map(at_least_float32, (predictions, scales))
    reach = jnp.asarray(radius)[..., None] * jnp.where(scale > 0, scale, jnp.nan)
    return centre - reach, centre + reach


@partial(jax.jit, static_argnums=2)
def _temperature(logits: jax.Array, labels: jax.Array, pooled: bool) -> jax.Array:
    """Return the temperatures of models, or the one of their mean probability; NaN where the data are not valid."""
    logits, labels, valid = prepared(logits, labels, False)

    def of_one(logits: jax.Array) -> jax.Array:
        # A softmax does not change with a constant in all logits, so the largest becomes 0 and nothing overflows. In
        # units of their mean distance from it, 1 is a good first guess of the temperature.
        below = logits - logits.max(axis=-1, keepdims=True)
        unit = jnp.where(below.mean() < 0, -below.mean(), 1)

        def loss(log_temperature: jax.Array) -> jax.Array:
            log_p = jax.nn.log_softmax(below / unit * jnp.exp(-log_temperature), axis=-1)
            if pooled:
                log_p = jax.nn.logsumexp(log_p, axis=0) - math.log(logits.shape[0])
            return -at_labels(log_p, labels).mean(axis=-1)

        # The minimum over the logarithm: a temperature is positive, and its scale is unknown.
        return unit * jnp.exp(_minimum(loss, jnp.zeros((), logits.dtype)))

    for _ in range(0 if pooled else logits.ndim - 2):
        of_one = jax.vmap(of_one)
    known = valid & jnp.isfinite(logits).all(axis=-1)
    can_fit = known.all(axis=None if pooled else -1) & (labels.shape[0] > 0)
    return jnp.where(can_fit, of_one(jnp.where(jnp.isfinite(logits), logits, 0)), jnp.nan)


def _minimum(loss: Any, start: jax.Array) -> jax.Array:
    """Return the number at which a smooth function of one number has its minimum, within bounds."""
    optimizer = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        x, state, _, i = carry
        value, gradient = value_and_grad(x, state=state)
        update, state = optimizer.update(gradient, state, x, value=value, grad=gradient, value_fn=loss)
        new = jnp.clip(optax.apply_updates(x, update), -_WIDEST, _WIDEST)
        moved = jnp.abs(new - x)
        return new, state, moved, i + 1

    def goes_on(carry: tuple[Any, ...]) -> jax.Array:
        x, _, moved, i = carry
        # Until a step is a few roundings.
        return (moved > 4 * jnp.finfo(x.dtype).eps * (1 + jnp.abs(x))) & (i < _STEPS)

    first = (start, optimizer.init(start), jnp.array(jnp.inf, start.dtype), jnp.int32(0))
    return lax.while_loop(goes_on, step, first)[0]


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
    k = math.ceil((batch + 1) * (1 - float(error)) - 1e-9)
    found = jnp.sort(scores, axis=-1)[..., k - 1] if k <= batch else jnp.inf
    return jnp.where(jnp.isnan(scores).any(axis=-1), jnp.nan, found)


def _check_error(name: str, error: Any) -> None:
    if not is_real(error) or not 0 < error < 1:
        raise ValueError(f"{name}: error must be above 0 and below 1, but got {error!r}.")


def _check_score(name: str, score: Any) -> None:
    if score not in ("probability", "cumulative"):
        raise ValueError(f'{name}: score must be "probability" or "cumulative", but got {score!r}.')


def _check_scales(name: str, scales: Any, predictions: Any) -> Any:
    """Return scales of the shape of the predictions, ones by default; raise if they do not fit."""
    if scales is None:
        return jnp.ones_like(predictions)
    scales = check_numbers(name, "scales", scales, "(..., batch)", above=0.0)
    if jnp.shape(scales) != jnp.shape(predictions):
        raise ValueError(
            f"{name}: scales must have the shape of the predictions, {jnp.shape(predictions)}, but got "
            f"{jnp.shape(scales)}."
        )
    return scales
