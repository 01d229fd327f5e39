"""`Prediction`: the mean prediction of several models, or of one with uncertain parameters, and its uncertainty."""

from __future__ import annotations

import warnings
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import entr

from .memory import level_of_the_user

Kind = Literal["classification", "binary", "regression"]


class Prediction(NamedTuple):
    """The combined prediction of the members, with its uncertainty.

    Arrays have the dtype of the members' outputs, or float32 if that is half precision (float16, bfloat16). Integer
    outputs, which only regression accepts, give a floating-point mean and variance.

    Attributes:
      mean: classification: mean probability of each class, (batch, ..., classes); binary: of no and of yes, (batch,
        ..., 2); regression: mean value, (batch, ...).
      variance: classification and binary: variance of each probability over the members, shaped like `mean`.
        Regression: variance of the value over the members, (batch, ...); if the members predict variances too, their
        mean is added, which gives the variance of the mixture. A negative predicted variance raises, or under `jit`
        gives NaN.
      entropy: entropy of `mean` in nats, (batch, ...): the total uncertainty. None for regression.
      mutual_information: `entropy` minus the mean entropy of the members, in nats, (batch, ...): the uncertainty that
        is due to disagreement. None for regression.
      members: the probabilities or values of each member, with the members along axis 0 in front of the axes of `mean`.

    Source:
      Depeweg et al. 2018, "Decomposition of Uncertainty in Bayesian Deep Learning".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble import Ensemble
      >>> sure = [jnp.array([[9.0, 0.0]]), jnp.array([[0.0, 9.0]])]  # confident, but in different classes
      >>> prediction = Ensemble.from_apply(lambda logits, x: logits, sure).predict(None, kind="classification")
      >>> prediction.mean
      Array([[0.5, 0.5]], dtype=float32)
    """

    mean: jax.Array
    variance: jax.Array
    entropy: jax.Array | None
    mutual_information: jax.Array | None
    members: jax.Array


def assumed_kind(api: str, remedy: str = "") -> Kind:
    """Return "classification", and warn that nothing says so."""
    assumed = f"{api}: nothing says what the outputs mean, so they are taken for logits of classes"
    cure = f"pass kind='classification', kind='binary' or kind='regression'{remedy}"
    warnings.warn(f"{assumed}; {cure}.", stacklevel=level_of_the_user())
    return "classification"


def of_probabilities(members: jax.Array, weights: jax.Array | None = None) -> Prediction:
    """Return the prediction for the probabilities of members, shape (members, batch, ..., classes).

    Args:
      members: the probabilities.
      weights: a weight for each member, whose sum is 1; None for equal ones.
    """
    mean = mean_of(members, weights)
    total = entropy_of(mean)
    return Prediction(
        mean, variance_of(members, mean, weights), total, information_of(members, total, weights), members
    )


def mean_of(members: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Return the mean over axis 0, possibly weighted; members without weight may hold any numbers."""
    if weights is None:
        return members.mean(axis=0)
    weights = weights.reshape(-1, *[1] * (members.ndim - 1)).astype(members.dtype)
    return (jnp.where(weights > 0, members, 0) * weights).sum(axis=0)


def variance_of(members: jax.Array, mean: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Return the variance over axis 0, possibly weighted, given the mean."""
    return members.var(axis=0) if weights is None else mean_of(jnp.square(members - mean), weights)


def entropy_of(p: jax.Array) -> jax.Array:
    """Return the entropy of distributions along the last axis."""
    # entr(p) = -p log p, and 0 at p = 0.
    return entr(p).sum(axis=-1)


def information_of(p: jax.Array, total: Any, weights: jax.Array | None = None) -> jax.Array:
    """Return the mutual information of the members' distributions, whose mean has the entropy `total`."""
    # Not negative by Jensen's inequality, but rounding may make it so where all members agree.
    return jnp.maximum(total - mean_of(entropy_of(p), weights), 0)


def at_least_float32(x: Any) -> Any:
    """Return `x` in float32 if it has half precision, else unchanged."""
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return x.astype(jnp.float32) if narrow else x
