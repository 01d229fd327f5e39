"""ε of samplings that no accountant of dp-accounting knows, from Monte Carlo samples of jax-privacy."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

# ε is computed for this share of δ. The rest of δ covers the probability that the samples mislead.
_SHARE = 0.5
# The most numbers of samples, steps times samples, to hold at a time.
_NUMBERS = 2**24


@lru_cache(maxsize=256)
def monte_carlo_epsilon(
    noise_multiplier: float,
    sampling_probability: float,
    separation: int,
    strategy: tuple[float, ...],
    steps: int,
    delta: float,
) -> float:
    """Return an ε that holds with δ, where δ includes the probability that the samples mislead.

    Args:
      noise_multiplier: standard deviation of the noise in units of the clip norm times the column norm of `strategy`.
      sampling_probability: the probability that an example takes part in a step, if it did not in the last
        `separation - 1` steps. One is sampling by balls in bins.
      separation: the least number of steps from one participation of an example to its next.
      strategy: the coefficients of the strategy matrix, none negative, at most `separation`.
      steps: the number of steps.
      delta: δ.

    Source:
      Choquette-Choo et al. 2024, "Near-Exact Privacy Amplification for Matrix Mechanisms" (balls in bins); arXiv
      2602.09338 (b-min-sep, and appendix A for the number of samples).
    """
    from scipy.optimize import brentq

    delta_calculation, _, batch_selection = modules()
    count = delta_calculation.minimum_samples_to_calibrate(_SHARE * delta, delta)
    most = delta_calculation.get_base_delta(count, delta)
    sampling = batch_selection.BMinSepSampling(sampling_probability, steps, separation)
    column = np.asarray(strategy)[:steps]
    stddev = noise_multiplier * float(np.linalg.norm(strategy))
    losses = [_losses(sampling, stddev, column, count, positive) for positive in (True, False)]

    def excess(epsilon: float) -> float:
        return max(delta_calculation.delta_from_epsilon_and_samples(epsilon, x) for x in losses) - most

    if excess(0.0) <= 0:
        return 0.0
    found = float(brentq(excess, 0.0, max(x.max() for x in losses), xtol=1e-9))
    while excess(found) > 0:  # the root found may be slightly too small
        found *= 1 + 1e-9
    return found


def modules() -> tuple[Any, Any, Any]:
    """Return jax-privacy's modules `delta_calculation`, `sample_generation` and `batch_selection`; raise without."""
    try:
        from jax_privacy import batch_selection
        from jax_privacy.experimental.monte_carlo import delta_calculation, sample_generation
    except ImportError:
        needs = "its module experimental.monte_carlo, as of jax-privacy 2.0 to 2.2"
        raise ModuleNotFoundError(
            f"DPSGD: sampling needs {needs}; install such a version, or use Poisson sampling."
        ) from None
    return delta_calculation, sample_generation, batch_selection


def _losses(sampling: Any, stddev: float, column: np.ndarray, count: int, positive: bool) -> np.ndarray:
    """Return samples of the privacy loss with an example (`positive`) or without it, shape (count,)."""
    _, sample_generation, _ = modules()
    rng = np.random.default_rng(0)  # a fixed seed, so that ε is a function of the settings
    size = max(1, _NUMBERS // sampling.iterations)
    found = []
    for start in range(0, count, size):
        number = min(size, count - start)
        drawn = sample_generation.generate_sample(sampling, stddev, column, rng, positive, number)
        ratios = log_ratios_apart(participation_ratios(drawn, column, stddev), sampling.sampling_prob, sampling.min_sep)
        found.append(ratios if positive else -ratios)
    return np.concatenate(found)


def participation_ratios(seen: np.ndarray, column: np.ndarray, stddev: float) -> np.ndarray:
    """Return the log-likelihood ratio of a participation in each step alone, to none.

    Args:
      seen: C x + z with the strategy matrix C, the participations x and noise z, shape (steps, samples).
      column: the coefficients of C, at most as many as steps.
      stddev: the standard deviation of the noise.
    """
    # Column t of C is `column` from row t on, cut at the end.
    padded = np.concatenate([seen, np.zeros((len(column) - 1, seen.shape[1]))])
    dots = sum(c * padded[k : k + len(seen)] for k, c in enumerate(column))
    squares = np.array([np.sum(column[: len(seen) - t] ** 2) for t in range(len(seen))])[:, None]
    return (dots - squares / 2) / stddev**2


def log_ratios_apart(ratios: np.ndarray, probability: float, separation: int) -> np.ndarray:
    """Return the log-likelihood ratio of an example with b-min-sep sampling to none, shape (samples,).

    Args:
      ratios: those of a participation in each step alone, shape (steps, samples).
      probability: the probability to take part in a step, if not in the last `separation - 1`. One is balls in bins.
      separation: the least number of steps from one participation to the next.

    Source:
      arXiv 2602.09338, equation 2. (jax-privacy 2.0 to 2.2 reverse the squared norms of the last columns of C, which
      is wrong with three bands or more.)
    """
    with np.errstate(divide="ignore"):  # log(1 - 1)
        stays, takes_part = np.log1p(-probability), np.log(probability)
    # For the last `separation` steps, the ratio of all later steps if the example may take part from then on.
    later = np.zeros((separation, ratios.shape[1]))
    for step in range(len(ratios) - 1, -1, -1):
        without = stays + later[(step + 1) % separation]
        later[step % separation] = np.logaddexp(without, takes_part + ratios[step] + later[step % separation])
    later[1:] += takes_part  # it may have taken part shortly before the first step
    return np.logaddexp.reduce(later, axis=0) - np.log1p((separation - 1) * probability)
