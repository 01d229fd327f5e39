"""Scores of probabilities against labels, each a few lines with its source.

Every function is pure `jax.numpy`: it works under `jit` and `vmap`, and on probabilities of one model or of the mean of
an ensemble (batch, classes) as on those of all members (members, batch, classes), for which it gives one score each.
Labels are integers (batch,). All but `accuracy` are better when they are smaller.

Scores are computed and returned in the dtype of the probabilities, but in float32 for those of half precision. An
example whose probabilities hold a NaN makes the score NaN, of that member alone; so does a batch without examples.
Wrong values (a label that is no class, a logit where a probability should be) are refused where they are known, which
waits for them to be computed; where they are traced, as under `jit`, they make the score NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import entr
from jax.typing import ArrayLike

from ..transforms._arguments import describe
from ..transforms._compat import Tracer

__all__ = ["accuracy", "brier", "ece", "entropy", "nll"]


def accuracy(probabilities: ArrayLike, labels: ArrayLike) -> jax.Array:
    """Share of examples whose most probable class is the label, in 0 to 1.

    Args:
      probabilities: floating (..., batch, classes), at least 2 classes; logits give the same. Of equally probable
        classes the first counts.
      labels: classes as integers (batch,), from 0 to classes - 1.

    Returns:
      Shape (...), NaN where the probabilities of an example hold a NaN, where a traced label is no class and where the
      batch is empty; float32, or float64 for such probabilities.

    Raises:
      TypeError: labels are not integers, or probabilities not floating.
      ValueError: the shapes do not fit, there are fewer than 2 classes, or a label that is not traced is no class.

    Example:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import accuracy
      >>> accuracy(jnp.array([[0.9, 0.1], [0.6, 0.4]]), jnp.array([0, 1]))
      Array(0.5, dtype=float32)
    """
    return _mean(_right, *_check("accuracy", probabilities, labels, bounded=False), False)


def nll(probabilities: ArrayLike, labels: ArrayLike) -> jax.Array:
    """Mean negative log-likelihood of the labels, in nats.

    Args:
      probabilities: as for `accuracy`, but no logits. One of exactly zero counts as the smallest normal number of the
        dtype of the result, so that a single example cannot make the score infinite.
      labels: as for `accuracy`.

    Returns:
      As for `accuracy`; NaN also where a traced probability is outside 0 to 1 by more than 0.01.

    Raises:
      TypeError, ValueError: as for `accuracy`; a probability that is not traced is outside 0 to 1 by more than 0.01.

    Source:
      Good 1952, "Rational Decisions" (the logarithmic score).

    Example:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import nll
      >>> nll(jnp.array([[0.5, 0.5], [0.25, 0.75]]), jnp.array([0, 0]))
      Array(1.0397208, dtype=float32)
    """
    return _mean(_surprise, *_check("nll", probabilities, labels), True)


def brier(probabilities: ArrayLike, labels: ArrayLike) -> jax.Array:
    """Mean squared distance of the probabilities from the label's one-hot vector, summed over classes: 0 to 2.

    Args:
      probabilities: as for `nll`.
      labels: as for `accuracy`.

    Returns:
      As for `nll`.

    Raises:
      TypeError, ValueError: as for `nll`.

    Source:
      Brier 1950, "Verification of Forecasts Expressed in Terms of Probability", in its form for many classes.

    Example:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import brier
      >>> brier(jnp.array([[0.5, 0.5], [1.0, 0.0]]), jnp.array([0, 0]))
      Array(0.25, dtype=float32)
    """
    return _mean(_squared_distance, *_check("brier", probabilities, labels), True)


def ece(probabilities: ArrayLike, labels: ArrayLike, *, bins: int = 15) -> jax.Array:
    """Expected calibration error: how far confidence is from accuracy, in 0 to 1.

    Examples are put into `bins` intervals of equal width by the probability of their most probable class; the error is
    the mean over examples of the distance between their bin's mean confidence and its accuracy.

    Args:
      probabilities: as for `nll`.
      labels: as for `accuracy`.
      bins: number of intervals. Each holds its upper end, not its lower one.

    Returns:
      As for `nll`.

    Raises:
      TypeError, ValueError: as for `nll`; `bins` is no positive int.

    Cost:
      One pass over the examples for each bin, in memory that does not grow with the bins.

    Source:
      Guo et al. 2017, "On Calibration of Modern Neural Networks", equation 3.

    Example:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import ece
      >>> ece(jnp.array([[0.8, 0.2], [0.8, 0.2]]), jnp.array([0, 1]))
      Array(0.3, dtype=float32)
    """
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ValueError(f"ece: bins must be a positive int, but got {bins!r}.")
    return _ece(*_check("ece", probabilities, labels), bins)


def entropy(probabilities: ArrayLike) -> jax.Array:
    """Shannon entropy of each distribution, in nats.

    Args:
      probabilities: floating (..., classes), at least 2 classes.

    Returns:
      Shape (...), NaN where a probability is NaN, or traced and outside 0 to 1 by more than 0.01; float32, or float64
      for such probabilities.

    Raises:
      TypeError: probabilities are not floating.
      ValueError: there are fewer than 2 classes, or a probability that is not traced is outside 0 to 1 by more than
        0.01.

    Example:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import entropy
      >>> entropy(jnp.array([[0.5, 0.5], [1.0, 0.0]]))
      Array([0.6931472, 0.       ], dtype=float32)
    """
    return _entropies(_check_probabilities("entropy", probabilities, "(..., classes)", 1))


# What follows the checks is compiled as one program for each score: quicker than one for each operation, and without
# copies of the probabilities.


@partial(jax.jit, static_argnums=(0, 3))
def _mean(term: Callable[[jax.Array, jax.Array], jax.Array], p: jax.Array, labels: jax.Array, bounded: bool) -> Any:
    """The mean over the examples of a `term` of probabilities and labels."""
    p, labels, valid = _prepare(p, labels, bounded)
    return jnp.where(valid, term(p, labels), jnp.nan).mean(axis=-1)


def _right(p: jax.Array, labels: jax.Array) -> jax.Array:
    return (p.argmax(axis=-1) == labels).astype(p.dtype)


def _surprise(p: jax.Array, labels: jax.Array) -> jax.Array:
    index = jnp.broadcast_to(labels, p.shape[:-1])[..., None]
    of_label = jnp.take_along_axis(p, index, axis=-1)[..., 0]
    return -jnp.log(jnp.maximum(of_label, jnp.finfo(p.dtype).tiny))


def _squared_distance(p: jax.Array, labels: jax.Array) -> jax.Array:
    return ((p - jax.nn.one_hot(labels, p.shape[-1], dtype=p.dtype)) ** 2).sum(axis=-1)


@partial(jax.jit, static_argnums=2)
def _ece(p: jax.Array, labels: jax.Array, bins: int) -> jax.Array:
    p, labels, valid = _prepare(p, labels, True)
    confidence = p.max(axis=-1)
    gap = jnp.where(valid, confidence - _right(p, labels), jnp.nan)
    # Against the ends themselves: `confidence * bins` can round to beyond one.
    ends = np.arange(1, bins) / bins
    bin_of = jnp.searchsorted(jnp.asarray(ends, confidence.dtype), confidence)
    # Bin by bin, and not as a product with a one-hot matrix, which loses digits over millions of examples.
    per_bin = jax.lax.map(lambda k: jnp.where(bin_of == k, gap, 0).sum(axis=-1), jnp.arange(bins))
    # |mean confidence - accuracy| times the bin's share of the examples is |sum of gaps| / batch.
    return jnp.abs(per_bin).sum(axis=0) / labels.shape[0]


@jax.jit
def _entropies(p: jax.Array) -> jax.Array:
    p = _at_least_float32(p)
    return jnp.where(_outside(p).any(axis=-1), jnp.nan, _entropy(p))


def _entropy(p: jax.Array) -> jax.Array:
    return entr(p).sum(axis=-1)


def _prepare(p: jax.Array, labels: jax.Array, bounded: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The probabilities and labels as they are computed with, and which examples (..., batch) can be scored."""
    p = _at_least_float32(p)
    # In a narrow dtype the number of classes could overflow; no other label becomes a class by the cast.
    labels = labels.astype(int)
    valid = (labels >= 0) & (labels < p.shape[-1]) & ~jnp.isnan(p).any(axis=-1)
    return p, labels, valid & ~_outside(p).any(axis=-1) if bounded else valid


def _at_least_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32 else x


@jax.jit
def _outside(probabilities: jax.Array) -> jax.Array:
    # Rounding, such as that of half precision, may lead a little beyond 0 and 1.
    return (probabilities < -0.01) | (probabilities > 1.01)


def _first(wrong: Callable[[Any], Any], x: Any) -> tuple[tuple[int, ...], Any] | None:
    """The first index of `x` at which `wrong(x)` is true, and the value there.

    None where it is nowhere true, and where that cannot be known yet.
    """
    if isinstance(x, Tracer) or not getattr(x, "is_fully_addressable", True):
        return None
    with jax.ensure_compile_time_eval():  # `x` may be a constant of something that is traced
        found = wrong(x)
        if not found.any():
            return None
        index = tuple(map(int, np.argwhere(np.asarray(found))[0]))
        return index, x[index]


def _unwrap(x: Any) -> Any:
    """The array that an `nnx.Variable` holds; anything else as it is."""
    convert = getattr(x, "__jax_array__", None)
    return convert() if convert else x


def _check(name: str, probabilities: ArrayLike, labels: ArrayLike, *, bounded: bool = True) -> tuple[Any, Any]:
    labels = _unwrap(labels)
    if not hasattr(labels, "dtype") or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{name}: labels must be an array of integers, but got {_say(labels)}.")
    probabilities = _check_probabilities(name, probabilities, "(..., batch, classes)", 2, bounded=bounded)
    *_, batch, classes = jnp.shape(probabilities)
    if jnp.shape(labels) != (batch,):
        raise ValueError(
            f"{name}: probabilities must have shape (..., batch, classes) and labels (batch,), but got "
            f"{jnp.shape(probabilities)} and {jnp.shape(labels)}."
        )
    if found := _first(lambda x: (np.asarray(x) < 0) | (np.asarray(x) >= classes), labels):
        (i,), label = found
        raise ValueError(
            f"{name}: labels must be classes from 0 to {classes - 1}, but labels[{i}] is {label}; leave such examples "
            "out."
        )
    return probabilities, labels


def _check_probabilities(
    name: str, probabilities: ArrayLike, expected: str, least_ndim: int, *, bounded: bool = True
) -> Any:
    probabilities = _unwrap(probabilities)
    if not hasattr(probabilities, "dtype") or not jnp.issubdtype(probabilities.dtype, jnp.floating):
        raise TypeError(
            f"{name}: probabilities must be an array of floating point, but got {_say(probabilities)}; hand what "
            "jax.nn.softmax gives, or one-hot predictions with .astype(float)."
        )
    shape = jnp.shape(probabilities)
    if len(shape) < least_ndim:
        raise ValueError(f"{name}: probabilities must have shape {expected}, but got {shape}.")
    if shape[-1] < 2:
        raise ValueError(
            f"{name}: probabilities must be those of at least 2 classes, but got shape {shape}; where p is the "
            "probability of the second of two, hand jnp.concatenate([1 - p, p], axis=-1)."
        )
    if bounded and (found := _first(_outside, probabilities)):
        index, value = found
        raise ValueError(
            f"{name}: probabilities must be in 0 to 1, but probabilities[{', '.join(map(str, index))}] is {value}; "
            "make probabilities of logits with jax.nn.softmax."
        )
    return probabilities


def _say(x: Any) -> str:
    return describe(x) if hasattr(x, "dtype") else f"a {type(x).__name__}"
