"""`Prediction`: what an ensemble says, and how sure it is."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .metrics import entropy


class Prediction(NamedTuple):
    """What the members predict together.

    Attributes:
      mean: classification: mean probability of each class (batch, classes); regression: mean value (batch, ...).
      variance: over the members, of each class's probability (batch, classes); for regression of the value, and where
        the members give variances themselves, with the mean of those added: the variance of the mixture.
      entropy: of `mean`, in nats (batch,): the total uncertainty. None for regression.
      mutual_information: `entropy` less the mean entropy of the members, in nats (batch,): the part of the uncertainty
        that is disagreement. None for regression.
      members: each member's probabilities (size, batch, classes) or values (size, batch, ...).

    Source:
      Depeweg et al. 2018, "Decomposition of Uncertainty in Bayesian Deep Learning".

    Example:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble import Ensemble
      >>> sure = [jnp.array([[9.0, 0.0]]), jnp.array([[0.0, 9.0]])]  # but of different things
      >>> prediction = Ensemble.from_apply(lambda logits, x: logits, sure).predict(None)
      >>> prediction.mean
      Array([[0.5, 0.5]], dtype=float32)
    """

    mean: jax.Array
    variance: jax.Array
    entropy: jax.Array | None
    mutual_information: jax.Array | None
    members: jax.Array


def predict(outputs: Any, kind: str) -> Prediction:
    """The prediction of an ensemble whose members' outputs are `outputs`, with the members along axis 0."""
    if kind == "classification":
        return _classify(outputs)
    if kind == "regression":
        return _regress(outputs)
    raise ValueError(f'Ensemble.predict: kind must be "classification" or "regression", but got {kind!r}.')


def _classify(logits: Any) -> Prediction:
    if not isinstance(logits, jax.Array) or logits.ndim != 3:
        raise ValueError(
            "Ensemble.predict: for classification each member must return logits of shape (batch, classes), but all "
            f"together returned {_say(logits)}; for values use kind='regression'."
        )
    members = jax.nn.softmax(logits, axis=-1)
    mean = members.mean(axis=0)
    total = entropy(mean)
    # Rounding can leave it a little below zero where all members agree.
    disagreement = jnp.maximum(total - entropy(members).mean(axis=0), 0)
    return Prediction(mean, members.var(axis=0), total, disagreement, members)


def _regress(outputs: Any) -> Prediction:
    if isinstance(outputs, (tuple, list)):
        if len(outputs) != 2 or any(not isinstance(x, jax.Array) for x in outputs):
            raise ValueError(
                "Ensemble.predict: for regression each member must return values or a pair (mean, variance), but "
                f"all together returned {_say(outputs)}."
            )
        members, variances = outputs
        if members.shape != variances.shape:
            raise ValueError(
                f"Ensemble.predict: the members' means have shape {members.shape[1:]}, but their variances "
                f"{variances.shape[1:]}; return one variance for each mean."
            )
        return Prediction(members.mean(axis=0), members.var(axis=0) + variances.mean(axis=0), None, None, members)
    if not isinstance(outputs, jax.Array):
        raise ValueError(
            "Ensemble.predict: for regression each member must return values or a pair (mean, variance), but all "
            f"together returned {_say(outputs)}."
        )
    return Prediction(outputs.mean(axis=0), outputs.var(axis=0), None, None, outputs)


def _say(outputs: Any) -> str:
    return str(jax.tree.map(jnp.shape, outputs))
