"""Privacy accounting with dp-accounting: ε from a ledger of steps, and the noise multiplier from a target ε."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

from .adaptive import AdaptiveClipping, gradient_multiplier
from .monte_carlo import monte_carlo_epsilon

Accountant = Literal["pld", "rdp"]
Sampling = Literal["poisson", "balls_in_bins", "b_min_sep"]
# Least discretization intervals of privacy losses, in nats. The first is dp-accounting's default; the second is about
# seven times faster and errs on the safe side (a larger ε). `_interval` enlarges both for a large ε.
_FINE, _COARSE = 1e-4, 1e-3
# By how much, relatively, the finer discretization may increase ε; and the least interval for it, which bounds memory.
_TOLERANCE, _LEAST = 2e-5, 2e-6
# Privacy losses of this size overflow in dp-accounting; an ε as large says nothing.
_LARGEST = 1e6


@dataclass(frozen=True)
class Ledger:
    """The settings of a step that a privacy accountant needs; the number of steps is counted elsewhere.

    With Poisson sampling the examples are divided into `bands` groups. Each step samples from one group, in cyclic
    order: every example of that group takes part with `sampling_probability`, independently of all others.

    Attributes:
      noise_multiplier: standard deviation of the noise in units of `l2_clip_norm` times the column norm of `strategy`.
      sampling_probability: the probability that an example takes part in a step: one of the step's group, or with
        "b_min_sep" one that took part in none of the last `separation - 1` steps. It is one with "balls_in_bins".
      l2_clip_norm: the largest norm that one example contributes to the sum of a step; with `adaptive`, of the first.
      expected_batch_size: the divisor of the noisy sum.
      strategy: the coefficients of a banded strategy matrix; one coefficient for independent noise.
      clip_groups: the number of clip norms.
      adaptive: how the clip norms adapt; None if they do not.
      sampling: how batches are sampled.
      separation: the least number of steps from one participation of an example to its next; None for `bands`.
      truncation: the largest batch, and the number of examples of a group; None if batches are never truncated.
    """

    noise_multiplier: float
    sampling_probability: float
    l2_clip_norm: float
    expected_batch_size: float
    strategy: tuple[float, ...] = (1.0,)
    clip_groups: int = 1
    adaptive: AdaptiveClipping | None = None
    sampling: Sampling = "poisson"
    separation: int | None = None
    truncation: tuple[int, int] | None = None

    @property
    def sampled(self) -> tuple[Any, ...]:
        """Return what determines the batches: the sampling, its probability, the separation, and the truncation."""
        return self.sampling, self.sampling_probability, self.separation or self.bands, self.truncation

    @property
    def gradient_multiplier(self) -> float:
        """Return the noise multiplier of the gradients alone, without the counts of adaptive clipping."""
        return gradient_multiplier(self.noise_multiplier, self.adaptive, self.clip_groups)

    @property
    def bands(self) -> int:
        """Return the number of bands of the strategy; with Poisson sampling, that of the groups of examples."""
        return len(self.strategy)

    def event(self, steps: int, models: int = 1) -> Any:
        """Return the `dp_accounting.DpEvent` of the first `steps` steps of `models` models together."""
        if self.sampling != "poisson":
            raise ValueError(f'DPSGD.event: dp-accounting has no event for sampling="{self.sampling}"; use epsilon.')
        return _event(*self._rounds(steps, models), self.truncation)

    def epsilon(self, steps: int, delta: float, accountant: str, models: int = 1) -> float:
        """Return the ε of the first `steps` steps of `models` models together, for adding or removing one example.

        If batches are truncated, it is for zeroing out an example.
        """
        return self._spent(steps, delta, accountant, models, _FINE)

    def _spent(self, steps: int, delta: float, accountant: str, models: int, least: float) -> float:
        """Return the ε with the finer or the coarser discretization: `least` is `_FINE` or `_COARSE`."""
        if self.sampling == "poisson":
            return _epsilon(*self._rounds(steps, models), delta, accountant, least, self.truncation)
        if steps == 0 or self.noise_multiplier == 0:
            return 0.0 if steps == 0 else math.inf
        _, probability, separation, _ = self.sampled
        sigma = self.noise_multiplier / math.sqrt(models)
        return monte_carlo_epsilon(sigma, probability, separation, self.strategy, steps, delta)

    def progress(self, step: int, last: int, delta: float, accountant: str, models: int) -> str:
        """Return an upper bound on the ε of `step` of `last` steps, as text for the progress bar."""
        # An ε takes about 50 ms, so it is computed for only twenty step counts; the next of these bounds the current ε.
        if self.sampling != "poisson":
            return "ε: see DPSGD.epsilon"  # which takes minutes
        every = math.ceil(last / 20)
        shown = min(last, math.ceil(step / every) * every)
        spent = self._spent(shown, delta, accountant, models, _FINE if step == last else _COARSE)
        return f"ε ≤ {math.ceil(1000 * spent) / 1000:.3f}" if math.isfinite(spent) else "ε = ∞"

    def summary(self) -> str:
        """Return σ, q, and what differs from plain DP-SGD, as text."""
        found = f"noise_multiplier={self.noise_multiplier:g}, sampling_probability={self.sampling_probability:g}"
        if self.bands > 1:
            found += f", bands={self.bands}"
        if self.sampling != "poisson":
            found += f", sampling={self.sampling!r}"
        if self.truncation is not None:
            found += f", truncated_batch_size={self.truncation[0]}"
        return found if self.adaptive is None else f"{found}, adaptive={self.adaptive}"

    def steps_within(self, budget: float, delta: float, accountant: str, models: int, most: int) -> int:
        """Return the largest number of steps, up to `most`, whose ε is within `budget`."""
        if self.sampling != "poisson":
            raise ValueError("DPSGD.fit: epsilon_budget needs Poisson sampling; pass steps instead.")

        def spent(steps: int) -> float:
            return self.epsilon(steps, delta, accountant, models)

        # ε grows with the number of steps, so bisect; `most` comes first, because the budget often allows all steps.
        return most if spent(most) <= budget else bisect_right(range(most), budget, key=spent) - 1

    def _rounds(self, steps: int, models: int) -> tuple[float, float, int]:
        """Return noise multiplier, sampling probability and number of the sampled sums equivalent to `steps` steps."""
        # Models that train on the same batches with independent noise are one sum: an example contributes a norm of at
        # most sqrt(models) clip norms, and the noise has the standard deviation of a single model.
        # With a banded strategy matrix, whose noise is scaled by the norm of its columns, a cycle of `bands` steps is
        # one sampled Gaussian sum (Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization").
        return self.noise_multiplier / math.sqrt(models), self.sampling_probability, math.ceil(steps / self.bands)


def calibrate(
    target_epsilon: float,
    sampling_probability: float,
    rounds: int,
    delta: float,
    accountant: str,
    truncation: tuple[int, int] | None = None,
) -> float:
    """Return the least noise multiplier for `target_epsilon` over `rounds` sampled sums, to a relative 1e-5.

    A search of more than a second shows how many values it has tried.
    """
    from tqdm import tqdm

    with tqdm(desc=f"DPSGD: noise_multiplier for {target_epsilon=:g}", unit=" tried", delay=1, leave=False) as bar:

        def spent(accountant: str, least: float, sigma: float) -> float:
            bar.update()
            most = None if accountant == "rdp" else truncation
            return _epsilon(sigma, sampling_probability, rounds, delta, accountant, least, most)

        start = 1.0
        if accountant == "pld":
            # Accounting is slow for little noise, so start above the root: "rdp" is looser and needs more noise.
            start = _root(partial(spent, "rdp", _FINE), target_epsilon, start, 2.0, 0.1)
            if truncation is not None and spent("pld", _FINE, 1e3 * start) == math.inf:
                what = f"truncated batches have an infinite ε for target_delta={delta}"
                raise ValueError(f"DPSGD: {what}; pass a larger δ, or omit truncated_batch_size.")
            start = _root(partial(spent, "pld", _COARSE), target_epsilon, start, 1.1, 1e-3)
        found = _root(partial(spent, accountant, _FINE), target_epsilon, start, 1.002, 1e-5)
        # The root may spend slightly too much: increase it until it does not. Round up, so that machines whose last
        # bits differ return the same value.
        while spent(accountant, _FINE, rounded := math.ceil(found * 1e6) / 1e6) > target_epsilon:
            found = rounded * (1 + 5e-6)
    return rounded


def _root(spent: Callable[[float], float], target: float, start: float, factor: float, tolerance: float) -> float:
    """Return a noise multiplier that spends about `target`.

    Args:
      spent: the ε of a noise multiplier, which it decreases with.
      target: the ε to spend.
      start: where to look first.
      factor: the first factor by which to go on from there, which grows.
      tolerance: the relative error of the noise multiplier.
    """
    from scipy.optimize import brentq

    low = high = start
    while spent(high) > target:
        low, high, factor = high, high * factor, factor**2
    while spent(low) <= target:
        low, high, factor = low / factor, low, factor**2

    # log ε is nearly linear in log σ, so few iterations find the root. 1e-300 avoids the logarithm of an ε of zero.
    def excess(log_sigma: float) -> float:
        return math.log(max(spent(math.exp(log_sigma)), 1e-300) / target)

    return math.exp(brentq(excess, math.log(low), math.log(high), xtol=tolerance))


def _event(
    noise_multiplier: float, sampling_probability: float, rounds: int, truncation: tuple[int, int] | None = None
) -> Any:
    """Return the `dp_accounting.DpEvent` of `rounds` Poisson-sampled Gaussian sums."""
    import dp_accounting

    if truncation is None:
        gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
        sampled = dp_accounting.PoissonSampledDpEvent(sampling_probability, gaussian)
    else:
        most, examples = truncation
        sampled = dp_accounting.TruncatedSubsampledGaussianDpEvent(
            examples, sampling_probability, most, noise_multiplier
        )
    return dp_accounting.SelfComposedDpEvent(sampled, rounds)


@lru_cache(maxsize=4096)
def _epsilon(
    noise_multiplier: float,
    sampling_probability: float,
    rounds: int,
    delta: float,
    accountant: str,
    least: float,
    truncation: tuple[int, int] | None = None,
) -> float:
    """Return the ε of `rounds` sampled sums; cached, because the progress bar and budgets request the same values.

    `least` is `_FINE` or `_COARSE`, for "pld" only.
    """
    if rounds == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    if accountant == "rdp" and truncation is not None:
        raise ValueError('DPSGD.epsilon: accountant="rdp" does not know truncated batches; use "pld".')
    bound = _renyi(noise_multiplier, sampling_probability, rounds, delta)
    # Every value that follows is an upper bound, so the least of them is one. `bound` ignores truncation.
    spent = bound if truncation is None else math.inf
    if accountant == "rdp" or bound > _LARGEST:
        return spent
    interval = _interval(bound, rounds, delta)
    while True:
        scaled = interval * least / _FINE
        losses = _losses(noise_multiplier, sampling_probability, scaled, truncation).self_compose(rounds)
        before, spent = spent, min(spent, float(losses.get_epsilon_for_delta(delta)))
        # `bound` may be ten times too large, and its interval too. Refine by steps: the first often changes nothing.
        finer = max(_interval(min(spent, bound), rounds, delta), interval / 4)
        if finer >= interval or before <= (1 + _TOLERANCE / 2) * spent:
            return spent
        interval = finer


def _interval(epsilon: float, rounds: int, delta: float) -> float:
    """Return the finer discretization interval for an ε of about `epsilon`: `_FINE` times a power of two.

    Powers of two, so that a run has few intervals, and the losses of one step are computed once for each.
    """
    # Rounding up to a grid of interval h, with the mean of exp(-loss) kept, increases the mean of a loss by h²/12 and
    # its variance by h²/6, averaged over its place in the grid. For losses like those of the Gaussian mechanism, whose
    # sum has a variance of twice its mean, and z² = 2 log(1/δ), ε increases by about rounds · h²/12 · (1 + z²/ε).
    increase = rounds / 12 * (epsilon + 2 * math.log(1 / delta))
    wanted = epsilon * max(math.sqrt(_TOLERANCE / increase), _LEAST)
    return _FINE * 2 ** max(0, math.floor(math.log2(wanted / _FINE))) if wanted > _FINE else _FINE


def _renyi(noise_multiplier: float, sampling_probability: float, rounds: int, delta: float) -> float:
    """Return the ε of `rounds` sampled sums by Rényi divergences."""
    import dp_accounting
    from absl import logging

    event = _event(noise_multiplier, sampling_probability, rounds)
    # Silence the warning for each Rényi order that does not converge: ε is the minimum over the other orders.
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        return float(dp_accounting.rdp.RdpAccountant().compose(event).get_epsilon(delta))
    finally:
        logging.set_verbosity(verbosity)


@lru_cache(maxsize=4)
def _losses(
    noise_multiplier: float, sampling_probability: float, interval: float, truncation: tuple[int, int] | None
) -> Any:
    """Return the privacy loss distribution of one sum; cached, because an accountant recomputes it on each call."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution

    if truncation is not None:
        most, examples = truncation
        return privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
            examples,
            sampling_probability,
            most,
            noise_multiplier,
            value_discretization_interval=interval,
            neighboring_relation=NeighboringRelation.REPLACE_SPECIAL,
        )
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=sampling_probability, value_discretization_interval=interval
    )
