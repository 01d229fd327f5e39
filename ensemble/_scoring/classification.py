"""Scores of predicted probabilities against labels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ...transforms._core.arguments import check_count
from .validation import check_scored, prepared


def accuracy(probabilities: ArrayLike, labels: ArrayLike) -> jax.Array:
    """Return the fraction of examples whose most probable class is the label, in 0 to 1.

    Args:
      probabilities: floating point (..., batch, classes), at least 2 classes; logits give the same result. Among
        equally probable classes, the first one is predicted.
      labels: integer classes (batch,), from 0 to classes - 1; or several for each example, such as (batch, height,
        width) with probabilities (..., batch, height, width, classes). All labels count equally.

    Returns:
      Shape (...), float32, or float64 for float64 probabilities. NaN if the probabilities of an example contain a NaN,
      a traced label is out of range, or the batch is empty.

    Raises:
      TypeError: `labels` are not integers, or `probabilities` are not floating point.
      ValueError: the shapes do not match; there are fewer than 2 classes; a label that is not traced is out of range.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import accuracy
      >>> accuracy(jnp.array([[0.9, 0.1], [0.6, 0.4]]), jnp.array([0, 1]))
      Array(0.5, dtype=float32)
    """
    return _mean(_right, *check_scored("accuracy", probabilities, labels, bounded=False), False)


def nll(probabilities: ArrayLike, labels: ArrayLike) -> jax.Array:
    """Return the mean negative log-likelihood of the labels, in nats.

    Args:
      probabilities: as for `accuracy`, but not logits. A probability of zero counts as the smallest normal number of
        the dtype of the result, so that a single example cannot make the score infinite.
      labels: as for `accuracy`.

    Returns:
      As for `accuracy`; NaN also if a traced probability is outside 0 to 1 by more than 0.01.

    Raises:
      TypeError: as for `accuracy`.
      ValueError: as for `accuracy`; a probability that is not traced is outside 0 to 1 by more than 0.01.

    Source:
      Good 1952, "Rational Decisions" (the logarithmic score).

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import nll
      >>> nll(jnp.array([[0.5, 0.5], [0.25, 0.75]]), jnp.array([0, 0]))
      Array(1.0397208, dtype=float32)
    """
    return _mean(_surprise, *check_scored("nll", probabilities, labels), True)


def brier(probabilities: ArrayLike, labels: ArrayLike) -> jax.Array:
    """Return the mean squared distance of the probabilities from the one-hot label, summed over classes, in 0 to 2.

    Args:
      probabilities: as for `nll`.
      labels: as for `accuracy`.

    Returns:
      As for `nll`.

    Raises:
      TypeError, ValueError: as for `nll`.

    Source:
      Brier 1950, "Verification of Forecasts Expressed in Terms of Probability", in its multi-class form.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import brier
      >>> brier(jnp.array([[0.5, 0.5], [1.0, 0.0]]), jnp.array([0, 0]))
      Array(0.25, dtype=float32)
    """
    return _mean(_squared_distance, *check_scored("brier", probabilities, labels), True)


def ece(probabilities: ArrayLike, labels: ArrayLike, *, bins: int = 15) -> jax.Array:
    """Return the expected calibration error: the mean gap between confidence and accuracy, in 0 to 1.

    Examples are grouped into `bins` intervals of equal width by their confidence, the probability of the predicted
    class. The error is the mean over examples of |mean confidence - accuracy| of their bin.

    Args:
      probabilities: as for `nll`.
      labels: as for `accuracy`.
      bins: the number of intervals. Each includes its upper end, but not its lower one.

    Returns:
      As for `nll`.

    Raises:
      TypeError, ValueError: as for `nll`; `bins` is not a positive int.

    Cost:
      One pass over the examples for each bin; the memory does not grow with the number of bins.

    Source:
      Guo et al. 2017, "On Calibration of Modern Neural Networks", equation 3.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import ece
      >>> ece(jnp.array([[0.8, 0.2], [0.8, 0.2]]), jnp.array([0, 1]))
      Array(0.3, dtype=float32)
    """
    check_count("ece", "bins", bins)
    return _ece(*check_scored("ece", probabilities, labels), int(bins), False)


def adaptive_ece(probabilities: ArrayLike, labels: ArrayLike, *, bins: int = 15) -> jax.Array:
    """Return the expected calibration error with bins of equally many examples, in 0 to 1.

    As `ece`, but the examples are sorted by confidence and split into `bins` parts of (nearly) equal size: part k
    begins with example floor(k * batch / bins). So no bin contains almost all examples, as with intervals of equal
    width.

    Args:
      probabilities: as for `nll`.
      labels: as for `accuracy`.
      bins: the number of parts. Examples of equal confidence keep their order.

    Returns:
      As for `nll`.

    Raises:
      TypeError, ValueError: as for `nll`; `bins` is not a positive int.

    Cost:
      A sort, and one pass over the examples for each bin.

    Source:
      Nguyen and O'Connor 2015, "Posterior calibration and exploratory analysis for natural language processing models";
      Nixon et al. 2019, "Measuring Calibration in Deep Learning".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import adaptive_ece
      >>> adaptive_ece(jnp.array([[0.8, 0.2], [0.7, 0.3]]), jnp.array([0, 1]), bins=2)
      Array(0.45, dtype=float32)
    """
    check_count("adaptive_ece", "bins", bins)
    return _ece(*check_scored("adaptive_ece", probabilities, labels), int(bins), True)


# After the checks, each score is one compiled program: faster than one program per operation, and without copies of the
# probabilities.


@partial(jax.jit, static_argnums=(0, 3))
def _mean(term: Callable[[jax.Array, jax.Array], jax.Array], p: jax.Array, labels: jax.Array, bounded: bool) -> Any:
    """Return the mean over the examples of a `term` of probabilities and labels."""
    p, labels, valid = prepared(p, labels, bounded)
    # Traced values cannot raise, so an invalid label or probability makes the score NaN instead of a plausible number.
    return jnp.where(valid, term(p, labels), jnp.nan).mean(axis=-1)


def _right(p: jax.Array, labels: jax.Array) -> jax.Array:
    return (p.argmax(axis=-1) == labels).astype(p.dtype)


def at_labels(values: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the value of the label of each example, (..., batch), from values (..., batch, classes)."""
    index = jnp.broadcast_to(labels, values.shape[:-1])[..., None]
    return jnp.take_along_axis(values, index, axis=-1)[..., 0]


def _surprise(p: jax.Array, labels: jax.Array) -> jax.Array:
    # The smallest normal number, since XLA may flush subnormal numbers to 0.
    return -jnp.log(jnp.maximum(at_labels(p, labels), jnp.finfo(p.dtype).tiny))


def _squared_distance(p: jax.Array, labels: jax.Array) -> jax.Array:
    return ((p - jax.nn.one_hot(labels, p.shape[-1], dtype=p.dtype)) ** 2).sum(axis=-1)


@partial(jax.jit, static_argnums=(2, 3))
def _ece(p: jax.Array, labels: jax.Array, bins: int, equally_many: bool) -> jax.Array:
    """Return the calibration error over bins of equal width, or of equally many examples."""
    p, labels, valid = prepared(p, labels, True)
    # The confidence is the probability of the predicted class, whether or not it is correct.
    confidence = p.max(axis=-1)
    gap = jnp.where(valid, confidence - _right(p, labels), jnp.nan)
    if equally_many:
        batch = labels.shape[0]
        # Bin k begins with example floor(k * batch / bins), in the order of confidence. The inverse of the permutation
        # that sorts is the rank of each example.
        bin_of_rank = np.searchsorted(np.arange(1, bins) * batch // bins, np.arange(batch), side="right")
        rank = jnp.argsort(jnp.argsort(confidence, axis=-1, stable=True), axis=-1)
        bin_of = jnp.asarray(bin_of_rank)[rank]
    else:
        # Compared with the ends of the bins, since `confidence * bins` may round across an end.
        ends = np.arange(1, bins) / bins
        bin_of = jnp.searchsorted(jnp.asarray(ends, confidence.dtype), confidence)
    # One sum for each bin: a product with a one-hot matrix loses digits over millions of examples.
    per_bin = jax.lax.map(lambda k: jnp.where(bin_of == k, gap, 0).sum(axis=-1), jnp.arange(bins))
    # sum_k n_k / batch * |mean confidence_k - accuracy_k| = sum_k |sum of gaps in bin k| / batch, as n_k cancels.
    return jnp.abs(per_bin).sum(axis=0) / labels.shape[0]
