"""Measures of uncertainty, and of the part of it that is disagreement of the members."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import entr
from jax.typing import ArrayLike

from .validation import at_least_float32, check_numbers, check_probabilities, check_variances, with_nans


def entropy(probabilities: ArrayLike) -> jax.Array:
    """Return the Shannon entropy of each distribution, in nats.

    Args:
      probabilities: floating (..., classes), at least 2 classes.

    Returns:
      Shape (...), NaN where a probability is NaN, or traced and outside 0 to 1 by more than 0.01; float32, or float64
      for such probabilities.

    Raises:
      TypeError: probabilities are not floating.
      ValueError: there are fewer than 2 classes, or a probability that is not traced is outside 0 to 1 by more than
        0.01.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import entropy
      >>> entropy(jnp.array([[0.5, 0.5], [1.0, 0.0]]))
      Array([0.6931472, 0.       ], dtype=float32)
    """
    return _entropies(check_probabilities("entropy", probabilities, "(..., classes)", 1))


def predictive_entropy(probabilities: ArrayLike) -> jax.Array:
    """Return the entropy of the members' mean distribution, in nats: the total uncertainty.

    Args:
      probabilities: floating (members, ..., classes), at least 2 classes.

    Returns:
      Shape (...), NaN and dtype as for `entropy`.

    Raises:
      TypeError, ValueError: as for `entropy`.

    Source:
      Lakshminarayanan et al. 2017, "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import predictive_entropy
      >>> predictive_entropy(jnp.array([[[1.0, 0.0]], [[0.0, 1.0]]]))
      Array([0.6931472], dtype=float32)
    """
    return _of_mean(check_probabilities("predictive_entropy", probabilities, "(members, ..., classes)", 2))


def mutual_information(probabilities: ArrayLike) -> jax.Array:
    """Return the entropy of the members' mean less their mean entropy, in nats: the doubt that is disagreement.

    Args:
      probabilities: floating (members, ..., classes), at least 2 classes.

    Returns:
      Shape (...), at least 0; NaN and dtype as for `entropy`.

    Raises:
      TypeError, ValueError: as for `entropy`.

    Source:
      Houlsby et al. 2011, "Bayesian Active Learning for Classification and Preference Learning"; Depeweg et al. 2018.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import mutual_information
      >>> mutual_information(jnp.array([[[0.5, 0.5]], [[0.5, 0.5]]]))  # both in doubt, and agreed on it
      Array([0.], dtype=float32)
    """
    return _information(check_probabilities("mutual_information", probabilities, "(members, ..., classes)", 2))


def epistemic_variance(values: ArrayLike) -> jax.Array:
    """Return the variance of the members' predictions: the part of the uncertainty that more data would reduce.

    Args:
      values: real (members, ...): values or means, or probabilities (members, batch, classes).

    Returns:
      Shape (...), the variance over axis 0, divided by the number of members; floating point.

    Raises:
      TypeError: the values are not real numbers.
      ValueError: there are no members.

    Source:
      Kendall and Gal 2017, "What Uncertainties Do We Need in Bayesian Deep Learning for Computer Vision?".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import epistemic_variance
      >>> epistemic_variance(jnp.array([[1.0, 5.0], [3.0, 5.0]]))
      Array([1., 0.], dtype=float32)
    """
    return at_least_float32(check_numbers("epistemic_variance", "values", values, "(members, ...)")).var(axis=0)


def aleatoric_variance(variances: ArrayLike) -> jax.Array:
    """Return the mean of the variances that the members predict: the part of the uncertainty that is in the data.

    With `epistemic_variance` of their means it adds up to the variance of the mixture of the members. For
    classification, pass `p * (1 - p)`, the variance of the one-hot label.

    Args:
      variances: real (members, ...), not negative.

    Returns:
      Shape (...), NaN where a traced variance is negative; floating point.

    Raises:
      TypeError: the variances are not real numbers.
      ValueError: there are no members, or a variance that is not traced is negative.

    Source:
      Kendall and Gal 2017; Kwon et al. 2020, "Uncertainty quantification using Bayesian neural networks in
      classification".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import aleatoric_variance
      >>> aleatoric_variance(jnp.array([[1.0, 4.0], [3.0, 4.0]]))
      Array([2., 4.], dtype=float32)
    """
    variances = check_numbers("aleatoric_variance", "variances", variances, "(members, ...)")
    check_variances("aleatoric_variance", variances)
    wide = at_least_float32(variances)
    return jnp.where(wide < 0, jnp.nan, wide).mean(axis=0)


def disagreement(probabilities: ArrayLike) -> jax.Array:
    """Return the share of the pairs of members that predict different classes, in 0 to 1.

    Args:
      probabilities: floating (members, ..., classes), at least 2 members and 2 classes; logits give the same.

    Returns:
      Shape (...), NaN where one is NaN; its mean over the examples is the disagreement of the ensemble.

    Raises:
      TypeError, ValueError: as for `accuracy`; there are fewer than 2 members.

    Source:
      Kuncheva and Whitaker 2003, "Measures of Diversity in Classifier Ensembles" (the disagreement measure).

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import disagreement
      >>> disagreement(jnp.array([[[0.9, 0.1]], [[0.8, 0.2]], [[0.3, 0.7]], [[0.4, 0.6]], [[0.2, 0.8]]]))
      Array([0.6], dtype=float32)
    """
    probabilities = check_probabilities("disagreement", probabilities, "(members, ..., classes)", 2, bounded=False)
    if jnp.shape(probabilities)[0] < 2:
        raise ValueError("disagreement: a single member cannot disagree; pass the predictions of at least 2.")
    return _disagreement(probabilities)


@jax.jit
def _entropies(p: jax.Array) -> jax.Array:
    return entropy_of(with_nans(p))


@jax.jit
def _of_mean(p: jax.Array) -> jax.Array:
    return entropy_of(with_nans(p).mean(axis=0))


@jax.jit
def _information(p: jax.Array) -> jax.Array:
    p = with_nans(p)
    return information_of(p, entropy_of(p.mean(axis=0)))


@jax.jit
def _disagreement(p: jax.Array) -> jax.Array:
    """Return for each example the share of the pairs of members with different classes."""
    p = at_least_float32(p)
    members = p.shape[0]
    # Of v votes for a class v (v - 1) ordered pairs agree: time and memory do not grow with the pairs.
    votes = jax.nn.one_hot(p.argmax(axis=-1), p.shape[-1], dtype=p.dtype).sum(axis=0)
    agree = (votes * (votes - 1)).sum(axis=-1) / (members * (members - 1))
    return jnp.where(jnp.isnan(p).any(axis=(0, -1)), jnp.nan, 1 - agree)


def entropy_of(p: jax.Array) -> jax.Array:
    """Return the entropy of distributions along the last axis."""
    # entr(p) = -p log p, and 0 at p = 0.
    return entr(p).sum(axis=-1)


def information_of(p: jax.Array, total: Any) -> jax.Array:
    """Return the mutual information of the members' distributions, whose mean has the entropy `total`."""
    # Never negative by Jensen's inequality, but where all members agree rounding may make it so.
    return jnp.maximum(total - entropy_of(p).mean(axis=0), 0)
