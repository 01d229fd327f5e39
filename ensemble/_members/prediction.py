"""The `Prediction` of an ensemble from the outputs of its members."""

from __future__ import annotations

from typing import Any, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ...transforms._core.arguments import check_choice, describe
from ...transforms._core.prediction import (
    Kind,
    Prediction,
    assumed_kind,
    at_least_float32,
    mean_of,
    of_probabilities,
    variance_of,
)
from .._scoring.validation import check_probabilities, check_variances, first, unwrapped
from .rows import by_row


class Teller(Protocol):
    """What may have been told the kind of its outputs: an ensemble or a committee."""

    @property
    def kind(self) -> Kind | None: ...


def kind_for(api: str, model: Teller, kind: Kind | None) -> Kind:
    """Return the kind of a prediction: as passed, or as the model was told; otherwise warn, once for each model."""
    if kind is not None:
        check_choice(api, "kind", kind, get_args(Kind))
        return kind
    if model.kind is not None:
        return model.kind
    if "_assumed" not in vars(model):
        whole = type(model).__name__.lower()
        vars(model)["_assumed"] = assumed_kind(api, f", or tell the {whole} once: {whole}.with_kind('regression')")
    return vars(model)["_assumed"]


def check_temperature(temperature: Any, kind: str, size: int) -> None:
    """Raise if `temperature` is neither None nor one or `size` positive numbers, or has no meaning for `kind`."""
    if temperature is None:
        return
    if kind == "regression":
        raise ValueError("Ensemble.predict: temperature divides logits, but kind='regression' has none; leave it out.")
    number = unwrapped(temperature)
    number = number if hasattr(number, "dtype") else np.asarray(number)
    if not any(jnp.issubdtype(number.dtype, real) for real in (jnp.floating, jnp.integer)):
        raise TypeError(f"Ensemble.predict: temperature must be a real number, but got {describe(temperature)}.")
    if number.shape not in ((), (size,)):
        expected = f"one number, or one for each of the {size} members"
        raise ValueError(f"Ensemble.predict: temperature must be {expected}, but got shape {number.shape}.")
    if found := first(_no_temperature, number):
        raise ValueError(f"Ensemble.predict: temperature must be positive and finite, but got {found[1]}.")


def _no_temperature(x: Any) -> Any:
    return ~((x > 0) & (x < jnp.inf))


def classify(logits: Any, kind: str, temperature: Any, weights: jax.Array | None = None) -> Prediction:
    """Return the prediction for logits (members, batch, ..., classes), or (members, batch, ...) if `kind` is "binary".

    Raise for anything else. `weights` are as for `of_probabilities`.
    """
    least, expected = (2, "(batch, ...)") if kind == "binary" else (3, "(batch, ..., classes)")
    is_array, remedy = isinstance(logits, jax.Array), "for values use kind='regression'"
    if kind != "binary":
        remedy = f"for logits of yes-or-no labels use kind='binary', {remedy}"
    if not is_array or logits.ndim < least:
        remedy = f"for a single example pass x[None], {remedy}" if is_array else remedy
        found = f"all together returned {_say(logits)}; {remedy}"
        raise ValueError(f"Ensemble.predict: each member must return logits of shape {expected}, but {found}.")
    if kind != "binary" and logits.shape[-1] < 2:
        found = f"got shape {logits.shape}; {remedy}"
        raise ValueError(f"Ensemble.predict: logits must have at least 2 classes, but {found}.")
    if kind == "binary" and jnp.issubdtype(logits.dtype, jnp.floating):
        # The sigmoid of z is the softmax of 0 and z.
        logits = jnp.stack([jnp.zeros_like(logits), logits], axis=-1)
    check_probabilities("Ensemble.predict", logits, f"(members, {expected[1:]}", least, bounded=False, what="logits")
    return _of_logits(logits, None if temperature is None else jnp.asarray(unwrapped(temperature)), weights)


@jax.jit
def _of_logits(logits: jax.Array, temperature: Any, weights: jax.Array | None) -> Prediction:
    logits = at_least_float32(logits)
    if temperature is not None:
        # Traced values cannot raise, so an invalid temperature makes the result NaN.
        positive = jnp.where(_no_temperature(temperature), jnp.nan, temperature).astype(logits.dtype)
        # Shifted to at most 0 first, so that a small temperature does not make the largest logit infinite.
        logits = (logits - logits.max(axis=-1, keepdims=True)) / by_row(positive, logits)
    # The ensemble is the mixture of its members, so probabilities are averaged, not logits.
    return of_probabilities(jax.nn.softmax(logits, axis=-1), weights)


def regress(outputs: Any, weights: jax.Array | None = None) -> Prediction:
    """Return the prediction for values, or for means and variances; raise for anything else."""
    is_pair = isinstance(outputs, (tuple, list)) and len(outputs) == 2
    if not all(isinstance(x, jax.Array) for x in (outputs if is_pair else [outputs])):
        expected = "for regression each member must return values or a pair (mean, variance)"
        raise ValueError(f"Ensemble.predict: {expected}, but all together returned {_say(outputs)}.")
    if not is_pair:
        return _of_values(outputs, None, weights)
    members, variances = outputs
    if members.shape != variances.shape:
        shapes = f"means have shape {members.shape[1:]}, but their variances {variances.shape[1:]}"
        raise ValueError(f"Ensemble.predict: the members' {shapes}; return one variance for each mean.")
    # The usual cause is a model that returns log-variances. Without this check they would be averaged as variances,
    # and a positive result would look plausible.
    check_variances("Ensemble.predict", variances)
    return _of_values(members, variances, weights)


@jax.jit
def _of_values(members: jax.Array, variances: jax.Array | None, weights: jax.Array | None) -> Prediction:
    """Return the prediction for values, or for means and the variances that the members predict."""
    members = at_least_float32(members)
    mean = mean_of(members, weights)
    variance = variance_of(members, mean, weights)
    if variances is not None:
        variances = at_least_float32(variances)
        # The law of total variance for a mixture: Var(y) = Var(means) + E(variances).
        variance += mean_of(jnp.where(variances < 0, jnp.nan, variances), weights)
    return Prediction(mean, variance, None, None, members)


def _say(outputs: Any) -> str:
    return str(jax.tree.map(jnp.shape, outputs))
