"""Measures of uncertainty, and of the part that is due to disagreement of the members."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ...transforms._core.prediction import at_least_float32, entropy_of, information_of
from .validation import check_numbers, check_probabilities, check_variances, with_nans


def entropy(probabilities: ArrayLike) -> jax.Array:
    """Return the Shannon entropy of each distribution, in nats.

    Args:
      probabilities: floating point (..., classes), at least 2 classes.

    Returns:
      Shape (...), float32, or float64 for float64 probabilities. NaN where a probability is NaN, or where a traced
      probability is outside 0 to 1 by more than 0.01.

    Raises:
      TypeError: `probabilities` are not floating point.
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
      probabilities: floating point (members, ..., classes), at least 2 classes.

    Returns:
      Shape (...); dtype and NaN as for `entropy`.

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
    """Return the entropy of the members' mean minus their mean entropy, in nats: uncertainty due to disagreement.

    Args:
      probabilities: floating point (members, ..., classes), at least 2 classes.

    Returns:
      Shape (...), at least 0; dtype and NaN as for `entropy`.

    Raises:
      TypeError, ValueError: as for `entropy`.

    Source:
      Houlsby et al. 2011, "Bayesian Active Learning for Classification and Preference Learning"; Depeweg et al. 2018.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import mutual_information
      >>> mutual_information(jnp.array([[[0.5, 0.5]], [[0.5, 0.5]]]))  # both uncertain, but in agreement
      Array([0.], dtype=float32)
    """
    return _information(check_probabilities("mutual_information", probabilities, "(members, ..., classes)", 2))


def epistemic_variance(values: ArrayLike) -> jax.Array:
    """Return the variance of the members' predictions: the part of the uncertainty that more data would reduce.

    Args:
      values: real numbers (members, ...): values, means, or probabilities (members, batch, classes).

    Returns:
      Shape (...), floating point: the variance over axis 0, with the number of members as divisor (`ddof=0`).

    Raises:
      TypeError: `values` is not an array of real numbers.
      ValueError: `values` is a scalar or empty.

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
    """Return the mean of the members' predicted variances: the part of the uncertainty that is noise in the data.

    Together with the `epistemic_variance` of their means it gives the variance of the mixture of the members. For
    classification, pass `p * (1 - p)`, the variance of the one-hot label.

    Args:
      variances: non-negative numbers (members, ...).

    Returns:
      Shape (...), floating point; NaN where a traced variance is negative.

    Raises:
      TypeError: `variances` is not an array of real numbers.
      ValueError: `variances` is a scalar or empty, or a variance that is not traced is negative.

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
    """Return the fraction of pairs of members that predict different classes, in 0 to 1.

    Args:
      probabilities: floating point (members, ..., classes), at least 2 members and 2 classes; logits give the same
        result.

    Returns:
      Shape (...), one value per example, whose mean is the disagreement of the ensemble; NaN where a probability is
      NaN.

    Raises:
      TypeError: `probabilities` are not floating point.
      ValueError: there are fewer than 2 members or fewer than 2 classes.

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
    """Return for each example the fraction of pairs of members that predict different classes."""
    p = at_least_float32(p)
    members = p.shape[0]
    # v votes for a class give v (v - 1) ordered pairs that agree, so no loop over pairs is needed.
    votes = jax.nn.one_hot(p.argmax(axis=-1), p.shape[-1], dtype=p.dtype).sum(axis=0)
    agree = (votes * (votes - 1)).sum(axis=-1) / (members * (members - 1))
    return jnp.where(jnp.isnan(p).any(axis=(0, -1)), jnp.nan, 1 - agree)
