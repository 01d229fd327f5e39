"""Scores of predicted means and variances against targets."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp, ndtri
from jax.scipy.stats import norm
from jax.typing import ArrayLike

from ...transforms._core.arguments import check_number
from .validation import at_least_float32, check_numbers, check_shape


def gaussian_nll(mean: ArrayLike, variance: ArrayLike, targets: ArrayLike) -> jax.Array:
    """Return the mean negative log-density of the targets under normal distributions, in nats.

    Args:
      mean: real numbers (..., batch).
      variance: positive numbers of the same shape.
      targets: real numbers (batch,).

    Returns:
      Shape (...), floating point; NaN if a traced variance is not above 0.

    Raises:
      TypeError: an argument is not an array of real numbers.
      ValueError: the shapes do not match, an array is empty, or a variance that is not traced is not above 0.

    Source:
      Lakshminarayanan et al. 2017, equation 1, with its constant.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import gaussian_nll
      >>> gaussian_nll(jnp.zeros(2), jnp.ones(2), jnp.zeros(2))
      Array(0.9189385, dtype=float32)
    """
    return _gaussian(*_check("gaussian_nll", mean, variance, targets))


def mixture_nll(mean: ArrayLike, variance: ArrayLike, targets: ArrayLike) -> jax.Array:
    """Return the mean negative log-density of the targets under the mixture of the members, in nats.

    Args:
      mean: the means of each member, real numbers (members, batch).
      variance: positive numbers of the same shape.
      targets: real numbers (batch,).

    Returns:
      A scalar; dtype and NaN as for `gaussian_nll`.

    Raises:
      TypeError, ValueError: as for `gaussian_nll`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import mixture_nll
      >>> mixture_nll(jnp.array([[-1.0], [1.0]]), jnp.ones((2, 1)), jnp.zeros(1))
      Array(1.4189385, dtype=float32)
    """
    mean, variance, targets = _check("mixture_nll", mean, variance, targets)
    if jnp.ndim(mean) != 2:
        raise ValueError(f"mixture_nll: mean must have shape (members, batch), but got {jnp.shape(mean)}.")
    return _mixture(mean, variance, targets)


def gaussian_crps(mean: ArrayLike, variance: ArrayLike, targets: ArrayLike) -> jax.Array:
    """Return the mean continuous ranked probability score of normal distributions, in units of the targets.

    Args:
      mean: real numbers (..., batch).
      variance: positive numbers of the same shape.
      targets: real numbers (batch,).

    Returns:
      Shape (...); dtype and NaN as for `gaussian_nll`.

    Raises:
      TypeError, ValueError: as for `gaussian_nll`.

    Source:
      Gneiting and Raftery 2007, "Strictly Proper Scoring Rules, Prediction, and Estimation", equation 21.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import gaussian_crps
      >>> gaussian_crps(jnp.zeros(2), jnp.ones(2), jnp.zeros(2))
      Array(0.23369497, dtype=float32)
    """
    return _crps(*_check("gaussian_crps", mean, variance, targets))


def interval_coverage(mean: ArrayLike, variance: ArrayLike, targets: ArrayLike, *, level: float = 0.95) -> jax.Array:
    """Return the fraction of the targets that lie in the central interval of their normal distributions.

    Args:
      mean: real numbers (..., batch).
      variance: positive numbers of the same shape.
      targets: real numbers (batch,).
      level: the probability of the interval, above 0 and below 1: the fraction expected of calibrated predictions.

    Returns:
      Shape (...), in 0 to 1; dtype and NaN as for `gaussian_nll`.

    Raises:
      TypeError, ValueError: as for `gaussian_nll`; `level` is out of range.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble.metrics import interval_coverage
      >>> interval_coverage(jnp.zeros(4), jnp.ones(4), jnp.array([-1.9, 0.0, 1.9, 2.1]))
      Array(0.75, dtype=float32)
    """
    level = check_number("interval_coverage", "level", level, lambda x: 0 < x < 1, "above 0 and below 1")
    return _coverage(*_check("interval_coverage", mean, variance, targets), level)


@jax.jit
def _gaussian(mean: jax.Array, variance: jax.Array, targets: jax.Array) -> jax.Array:
    return -_log_density(mean, variance, targets).mean(axis=-1)


@jax.jit
def _mixture(mean: jax.Array, variance: jax.Array, targets: jax.Array) -> jax.Array:
    # log(1/M sum_m exp(log p_m)) = logsumexp(log p) - log M, which neither overflows nor underflows.
    densities = _log_density(mean, variance, targets)
    return -(logsumexp(densities, axis=0) - np.log(mean.shape[0])).mean(axis=-1)


@jax.jit
def _crps(mean: jax.Array, variance: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean score, by its closed form for normal distributions."""
    mean, variance, targets = _wide(mean, variance, targets)
    deviation = jnp.sqrt(variance)
    # Equation 21 of Gneiting and Raftery, negated: s (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)), z = (y - m) / s.
    z = (targets - mean) / deviation
    score = deviation * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))
    return score.mean(axis=-1)


@partial(jax.jit, static_argnums=3)
def _coverage(mean: jax.Array, variance: jax.Array, targets: jax.Array, level: float) -> jax.Array:
    """Return the fraction of targets between the quantiles (1 - level) / 2 and (1 + level) / 2."""
    mean, variance, targets = _wide(mean, variance, targets)
    reach = ndtri(jnp.asarray((1 + level) / 2, mean.dtype)) * jnp.sqrt(variance)
    error = jnp.abs(targets - mean)
    inside = (error <= reach).astype(mean.dtype)
    # A comparison with NaN is false, and would count as outside the interval.
    return jnp.where(jnp.isnan(error) | jnp.isnan(reach), jnp.nan, inside).mean(axis=-1)


def _log_density(mean: jax.Array, variance: jax.Array, targets: jax.Array) -> jax.Array:
    mean, variance, targets = _wide(mean, variance, targets)
    return -0.5 * (jnp.log(2 * np.pi * variance) + (targets - mean) ** 2 / variance)


def _wide(*arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return mean, variance and targets in one dtype of at least float32; variances not above 0 are NaN."""
    # At least float32: in half precision the square of an error of 300 is infinite.
    dtype = jnp.result_type(*map(at_least_float32, arrays), jnp.float32)
    mean, variance, targets = (x.astype(dtype) for x in arrays)
    return mean, jnp.where(variance > 0, variance, jnp.nan), targets


def _check(name: str, mean: Any, variance: Any, targets: Any) -> tuple[Any, Any, Any]:
    """Return mean, variance and targets as floating-point arrays; raise if their shapes or values do not fit."""
    mean = check_numbers(name, "mean", mean, "(..., batch)")
    variance = check_numbers(name, "variance", variance, "(..., batch)", positive=True)
    targets = check_numbers(name, "targets", targets, "(batch,)")
    check_shape(name, "variance", variance, jnp.shape(mean), "mean")
    check_shape(name, "targets", targets, jnp.shape(mean)[-1:], "mean")
    return mean, variance, targets
