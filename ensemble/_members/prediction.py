"""`Prediction`: the mean prediction of an ensemble and its uncertainty."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._scoring.uncertainty import entropy_of, information_of
from .._scoring.validation import at_least_float32, check_probabilities, check_variances

Kind = Literal["classification", "regression"]


class Prediction(NamedTuple):
    """The combined prediction of the members, with its uncertainty.

    Arrays have the dtype of the members' outputs, or float32 if that is half precision (float16, bfloat16). Integer
    outputs, which only regression accepts, give a floating-point mean and variance.

    Attributes:
      mean: classification: mean probability of each class, (batch, classes); regression: mean value, (batch, ...).
      variance: classification: variance of each class probability over the members, (batch, classes). Regression:
        variance of the value over the members, (batch, ...); if the members predict variances too, their mean is added,
        which gives the variance of the mixture. A negative predicted variance raises, or under `jit` gives NaN.
      entropy: entropy of `mean` in nats, (batch,): the total uncertainty. None for regression.
      mutual_information: `entropy` minus the mean entropy of the members, in nats, (batch,): the uncertainty that is
        due to disagreement. None for regression.
      members: the probabilities (size, batch, classes) or values (size, batch, ...) of each member.

    Source:
      Depeweg et al. 2018, "Decomposition of Uncertainty in Bayesian Deep Learning".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble import Ensemble
      >>> sure = [jnp.array([[9.0, 0.0]]), jnp.array([[0.0, 9.0]])]  # confident, but in different classes
      >>> prediction = Ensemble.from_apply(lambda logits, x: logits, sure).predict(None)
      >>> prediction.mean
      Array([[0.5, 0.5]], dtype=float32)
    """

    mean: jax.Array
    variance: jax.Array
    entropy: jax.Array | None
    mutual_information: jax.Array | None
    members: jax.Array


def classify(logits: Any) -> Prediction:
    """Return the prediction for logits (members, batch, classes); raise for anything else."""
    if not isinstance(logits, jax.Array) or logits.ndim != 3:
        found = f"all together returned {_say(logits)}; for values use kind='regression'"
        raise ValueError(f"Ensemble.predict: each member must return logits of shape (batch, classes), but {found}.")
    expected = "(members, batch, classes)"
    return _of_logits(check_probabilities("Ensemble.predict", logits, expected, 3, bounded=False, what="logits"))


@jax.jit
def _of_logits(logits: jax.Array) -> Prediction:
    # The ensemble is the mixture of its members, so probabilities are averaged, not logits.
    members = jax.nn.softmax(at_least_float32(logits), axis=-1)
    mean = members.mean(axis=0)
    total = entropy_of(mean)
    return Prediction(mean, members.var(axis=0), total, information_of(members, total), members)


def regress(outputs: Any) -> Prediction:
    """Return the prediction for values, or for means and variances; raise for anything else."""
    is_pair = isinstance(outputs, (tuple, list)) and len(outputs) == 2
    if not all(isinstance(x, jax.Array) for x in (outputs if is_pair else [outputs])):
        expected = "for regression each member must return values or a pair (mean, variance)"
        raise ValueError(f"Ensemble.predict: {expected}, but all together returned {_say(outputs)}.")
    if not is_pair:
        return _of_values(outputs, None)
    members, variances = outputs
    if members.shape != variances.shape:
        shapes = f"means have shape {members.shape[1:]}, but their variances {variances.shape[1:]}"
        raise ValueError(f"Ensemble.predict: the members' {shapes}; return one variance for each mean.")
    # The usual cause is a model that returns log-variances. Without this check they would be averaged as variances,
    # and a positive result would look plausible.
    check_variances("Ensemble.predict", variances)
    return _of_values(members, variances)


@jax.jit
def _of_values(members: jax.Array, variances: jax.Array | None) -> Prediction:
    """Return the prediction for values, or for means and the variances that the members predict."""
    members = at_least_float32(members)
    variance = members.var(axis=0)
    if variances is not None:
        variances = at_least_float32(variances)
        # The law of total variance for a mixture with equal weights: Var(y) = Var(means) + E(variances).
        variance += jnp.where(variances < 0, jnp.nan, variances).mean(axis=0)
    return Prediction(members.mean(axis=0), variance, None, None, members)


def _say(outputs: Any) -> str:
    return str(jax.tree.map(jnp.shape, outputs))
