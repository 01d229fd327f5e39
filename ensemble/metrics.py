"""Scores of probabilities against labels, each a few lines with its source.

Every function is pure `jax.numpy`: it works under `jit` and `vmap`, and on probabilities of one model or of the mean of
an ensemble (batch, classes) as on those of all members (members, batch, classes), for which it gives one score each.
Labels are integers (batch,). All but `accuracy` are better when they are smaller.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.special import entr
from jax.typing import ArrayLike

from ..transforms._arguments import describe

__all__ = ["accuracy", "brier", "ece", "entropy", "nll"]


def accuracy(probabilities: ArrayLike, labels: ArrayLike) -> jax.Array:
    """Share of examples whose most probable class is the label, in 0 to 1.

    Args:
      probabilities: (..., batch, classes); logits give the same.
      labels: classes as integers (batch,).

    Returns:
      Shape (...).

    Raises:
      TypeError: labels are not integers.
      ValueError: the shapes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import accuracy
      >>> accuracy(jnp.array([[0.9, 0.1], [0.6, 0.4]]), jnp.array([0, 1]))
      Array(0.5, dtype=float32)
    """
    probabilities, labels = _check("accuracy", probabilities, labels)
    return (probabilities.argmax(axis=-1) == labels).mean(axis=-1)


def nll(probabilities: ArrayLike, labels: ArrayLike) -> jax.Array:
    """Mean negative log-likelihood of the labels, in nats.

    Args:
      probabilities: (..., batch, classes). One of exactly zero counts as the smallest normal number of its dtype, so
        that a single example cannot make the score infinite.
      labels: classes as integers (batch,).

    Returns:
      Shape (...).

    Raises:
      TypeError, ValueError: as for `accuracy`.

    Source:
      Good 1952, "Rational Decisions" (the logarithmic score).

    Example:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import nll
      >>> nll(jnp.array([[0.5, 0.5], [0.25, 0.75]]), jnp.array([0, 0]))
      Array(1.0397208, dtype=float32)
    """
    probabilities, labels = _check("nll", probabilities, labels)
    of_label = _of_label(probabilities, labels)
    return -jnp.log(jnp.maximum(of_label, jnp.finfo(of_label.dtype).tiny)).mean(axis=-1)


def brier(probabilities: ArrayLike, labels: ArrayLike) -> jax.Array:
    """Mean squared distance of the probabilities from the label's one-hot vector, summed over classes: 0 to 2.

    Args:
      probabilities: (..., batch, classes).
      labels: classes as integers (batch,).

    Returns:
      Shape (...).

    Raises:
      TypeError, ValueError: as for `accuracy`.

    Source:
      Brier 1950, "Verification of Forecasts Expressed in Terms of Probability", in its form for many classes.

    Example:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import brier
      >>> brier(jnp.array([[0.5, 0.5], [1.0, 0.0]]), jnp.array([0, 0]))
      Array(0.25, dtype=float32)
    """
    probabilities, labels = _check("brier", probabilities, labels)
    one_hot = jax.nn.one_hot(labels, probabilities.shape[-1], dtype=probabilities.dtype)
    return ((probabilities - one_hot) ** 2).sum(axis=-1).mean(axis=-1)


def ece(probabilities: ArrayLike, labels: ArrayLike, *, bins: int = 15) -> jax.Array:
    """Expected calibration error: how far confidence is from accuracy, in 0 to 1.

    Examples are put into `bins` intervals of equal width by the probability of their most probable class; the error is
    the mean over examples of the distance between their bin's mean confidence and its accuracy.

    Args:
      probabilities: (..., batch, classes).
      labels: classes as integers (batch,).
      bins: number of intervals. Each holds its upper end, not its lower one.

    Returns:
      Shape (...).

    Raises:
      TypeError, ValueError: as for `accuracy`; `bins` is no positive int.

    Source:
      Guo et al. 2017, "On Calibration of Modern Neural Networks", equation 3.

    Example:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import ece
      >>> ece(jnp.array([[0.8, 0.2], [0.8, 0.2]]), jnp.array([0, 1]))
      Array(0.3, dtype=float32)
    """
    probabilities, labels = _check("ece", probabilities, labels)
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ValueError(f"ece: bins must be a positive int, but got {bins!r}.")
    confidence = probabilities.max(axis=-1)
    gap = confidence - (probabilities.argmax(axis=-1) == labels)
    bin_of = jnp.clip(jnp.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    # |mean confidence - accuracy| times the bin's share of the examples is |sum of gaps| / batch.
    per_bin = jnp.einsum("...b,...bk->...k", gap, jax.nn.one_hot(bin_of, bins, dtype=gap.dtype))
    return jnp.abs(per_bin).sum(axis=-1) / labels.shape[0]


def entropy(probabilities: ArrayLike) -> jax.Array:
    """Shannon entropy of each distribution, in nats.

    Args:
      probabilities: (..., classes).

    Returns:
      Shape (...).

    Example:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import entropy
      >>> entropy(jnp.array([[0.5, 0.5], [1.0, 0.0]]))
      Array([0.6931472, 0.       ], dtype=float32)
    """
    return entr(probabilities).sum(axis=-1)


def _of_label(probabilities: jax.Array, labels: jax.Array) -> jax.Array:
    index = jnp.broadcast_to(labels, probabilities.shape[:-1])[..., None]
    return jnp.take_along_axis(probabilities, index, axis=-1)[..., 0]


def _check(name: str, probabilities: ArrayLike, labels: ArrayLike) -> tuple[jax.Array, jax.Array]:
    if not jnp.issubdtype(jnp.result_type(labels), jnp.integer):
        raise TypeError(f"{name}: labels must be integers, but got {describe(labels)}.")
    if jnp.ndim(probabilities) < 2 or jnp.ndim(labels) != 1 or jnp.shape(probabilities)[-2] != jnp.shape(labels)[0]:
        raise ValueError(
            f"{name}: probabilities must have shape (..., batch, classes) and labels (batch,), but got "
            f"{jnp.shape(probabilities)} and {jnp.shape(labels)}."
        )
    return jnp.asarray(probabilities), jnp.asarray(labels)
