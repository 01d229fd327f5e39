"""Scores of predicted probabilities against labels, each a few lines with its source."""

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
    """Return the share of examples whose most probable class is the label, in 0 to 1.

    Args:
      probabilities: floating (..., batch, classes), at least 2 classes; logits give the same. The first of
        equally probable classes counts.
      labels: classes as integers (batch,), from 0 to classes - 1.

    Returns:
      Shape (...), NaN where the probabilities of an example hold a NaN, where a traced label is not a class and where
      the batch is empty; float32, or float64 for such probabilities.

    Raises:
      TypeError: labels are not integers, or probabilities not floating.
      ValueError: the shapes do not fit, there are fewer than 2 classes, or a label that is not traced is not a class.

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
      As for `accuracy`; NaN also where a traced probability is outside 0 to 1 by more than 0.01.

    Raises:
      TypeError, ValueError: as for `accuracy`; a probability that is not traced is outside 0 to 1 by more than 0.01.

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
    """Return the mean squared distance of the probabilities from the one-hot label, summed over classes: 0 to 2.

    Args:
      probabilities: as for `nll`.
      labels: as for `accuracy`.

    Returns:
      As for `nll`.

    Raises:
      TypeError, ValueError: as for `nll`.

    Source:
      Brier 1950, "Verification of Forecasts Expressed in Terms of Probability", in its form for many classes.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import brier
      >>> brier(jnp.array([[0.5, 0.5], [1.0, 0.0]]), jnp.array([0, 0]))
      Array(0.25, dtype=float32)
    """
    return _mean(_squared_distance, *check_scored("brier", probabilities, labels), True)


def ece(probabilities: ArrayLike, labels: ArrayLike, *, bins: int = 15) -> jax.Array:
    """Return the expected calibration error: the distance of confidence from accuracy, in 0 to 1.

    Examples are put into `bins` intervals of equal width by the probability of their most probable class; the error is
    the mean over examples of the distance between their bin's mean confidence and its accuracy.

    Args:
      probabilities: as for `nll`.
      labels: as for `accuracy`.
      bins: number of intervals. Each contains its upper end, not its lower one.

    Returns:
      As for `nll`.

    Raises:
      TypeError, ValueError: as for `nll`; `bins` is not a positive int.

    Cost:
      One pass over the examples for each bin, in memory that does not grow with the bins.

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
    """Return the expected calibration error with bins that hold equally many examples, in 0 to 1.

    As `ece`, but the examples are sorted by their confidence and split into `bins` parts of equal number, or
    nearly: part k begins with example floor(k * batch / bins). So no bin is empty, and none holds almost all examples.

    Args:
      probabilities: as for `nll`.
      labels: as for `accuracy`.
      bins: number of parts. Equally confident examples stay in their order.

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


# The computation after the checks is one compiled program for each score: quicker than one for each operation, and
# without copies of the probabilities.


@partial(jax.jit, static_argnums=(0, 3))
def _mean(term: Callable[[jax.Array, jax.Array], jax.Array], p: jax.Array, labels: jax.Array, bounded: bool) -> Any:
    """Return the mean over the examples of a `term` of probabilities and labels."""
    p, labels, valid = prepared(p, labels, bounded)
    # NaN, not an error: labels and probabilities may be traced, and a score of a wrong label must not look like one.
    return jnp.where(valid, term(p, labels), jnp.nan).mean(axis=-1)


def _right(p: jax.Array, labels: jax.Array) -> jax.Array:
    return (p.argmax(axis=-1) == labels).astype(p.dtype)


def at_labels(values: jax.Array, labels: jax.Array) -> jax.Array:
    """Return for each example the value (..., batch, classes) of its label."""
    index = jnp.broadcast_to(labels, values.shape[:-1])[..., None]
    return jnp.take_along_axis(values, index, axis=-1)[..., 0]


def _surprise(p: jax.Array, labels: jax.Array) -> jax.Array:
    # Not the smallest number above 0, which XLA may flush to 0 as it does with all that are not normal.
    return -jnp.log(jnp.maximum(at_labels(p, labels), jnp.finfo(p.dtype).tiny))


def _squared_distance(p: jax.Array, labels: jax.Array) -> jax.Array:
    return ((p - jax.nn.one_hot(labels, p.shape[-1], dtype=p.dtype)) ** 2).sum(axis=-1)


@partial(jax.jit, static_argnums=(2, 3))
def _ece(p: jax.Array, labels: jax.Array, bins: int, equally_many: bool) -> jax.Array:
    """Return the calibration error over bins of equal width, or of equally many examples."""
    p, labels, valid = prepared(p, labels, True)
    # The confidence is that of the predicted class, whether it is right or not.
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
        # By comparison with the ends of the bins: `confidence * bins` may be rounded across one.
        ends = np.arange(1, bins) / bins
        bin_of = jnp.searchsorted(jnp.asarray(ends, confidence.dtype), confidence)
    # Each bin by a sum: a product with a one-hot matrix loses digits over millions of examples.
    per_bin = jax.lax.map(lambda k: jnp.where(bin_of == k, gap, 0).sum(axis=-1), jnp.arange(bins))
    # sum_k n_k / batch * |mean confidence_k - accuracy_k| = sum_k |sum of gaps in bin k| / batch, as n_k cancels.
    return jnp.abs(per_bin).sum(axis=0) / labels.shape[0]
