"""Privacy accounting with dp-accounting: ε from a ledger of steps, and the noise multiplier from a target ε."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from .adaptive import AdaptiveClipping, gradient_multiplier
from .monte_carlo import monte_carlo_epsilon

Accountant = Literal["pld", "rdp"]
Sampling = Literal["poisson", "balls_in_bins", "b_min_sep"]
# Discretization intervals of privacy losses, in nats. The first is dp-accounting's default; the second is about seven
# times faster and errs on the safe side (a larger ε).
_FINE, _COARSE = 1e-4, 1e-3


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

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Ledger:
        """Return a ledger from the entries of `dataclasses.asdict`, after a round trip through JSON."""
        adaptive = written.get("adaptive")
        adaptive = None if adaptive is None else AdaptiveClipping(**adaptive)
        truncation = written.get("truncation")
        tuples = {"strategy": tuple(written["strategy"]), "truncation": truncation and tuple(truncation)}
        return cls(**{**written, **tuples, "adaptive": adaptive})

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

    def _spent(self, steps: int, delta: float, accountant: str, models: int, interval: float) -> float:
        """Return the ε with an interval of privacy losses."""
        if self.sampling == "poisson":
            return _epsilon(*self._rounds(steps, models), delta, accountant, interval, self.truncation)
        if steps == 0 or self.noise_multiplier == 0:
            return 0.0 if steps == 0 else math.inf
        _, probability, separation, _ = self.sampled
        sigma = self.noise_multiplier / math.sqrt(models)
        return monte_carlo_epsilon(sigma, probability, separation, self.strategy, steps, delta)

    def progress(self, step: int, last: int, delta: float, accountant: str, models: int) -> str:
        """Return an upper bound on the ε of `step` of `last` steps, as text for the progress bar."""
        # An ε takes about 50 ms, so it is computed for only twenty step counts; the next of these bounds the current ε.
        every = math.ceil(last / 20)
        shown = min(last, math.ceil(step / every) * every)
        return self.bound(shown, delta, accountant, models, _FINE if step == last else _COARSE)

    def bound(self, steps: int, delta: float, accountant: str, models: int = 1, interval: float = _COARSE) -> str:
        """Return an upper bound on the ε of `steps` steps as text."""
        if self.sampling != "poisson":
            return "ε: see DPSGD.epsilon"  # which takes minutes
        spent = self._spent(steps, delta, accountant, models, interval)
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
    """Return the least noise multiplier for `target_epsilon` over `rounds` sampled sums, to a relative 1e-5."""
    from scipy.optimize import brentq

    def spent(sigma: float) -> float:
        return _epsilon(sigma, sampling_probability, rounds, delta, accountant, _FINE, truncation)

    high = 1.0
    if accountant == "pld":
        # Accounting is slow for little noise, so start the search above the root: "rdp" is looser and needs more noise.
        high = calibrate(target_epsilon, sampling_probability, rounds, delta, "rdp")
        if spent(1e3 * high) == math.inf:
            raise ValueError(f'DPSGD: "pld" finds an infinite ε for target_delta={delta}; pass a larger δ, or "rdp".')
    while spent(high) > target_epsilon:
        high *= 1.5
    low = 0.9 * high
    while spent(low) <= target_epsilon:
        high, low = low, 0.9 * low

    # log ε is nearly linear in log σ, so few iterations find the root. 1e-300 avoids the logarithm of an ε of zero.
    def excess(log_sigma: float) -> float:
        return math.log(max(spent(math.exp(log_sigma)), 1e-300) / target_epsilon)

    found = math.exp(brentq(excess, math.log(low), math.log(high), xtol=1e-5))
    # The root found may spend slightly too much: increase it until it does not.
    while spent(found) > target_epsilon:
        found *= 1 + 1e-6
    # Round up, so that machines whose last bits differ return the same value.
    return math.ceil(found * 1e6) / 1e6


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
    interval: float,
    truncation: tuple[int, int] | None = None,
) -> float:
    """Return the ε of `rounds` sampled sums; cached, because the progress bar and budgets request the same values."""
    import dp_accounting
    from absl import logging

    if rounds == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    if accountant == "rdp":
        if truncation is not None:
            raise ValueError('DPSGD.epsilon: accountant="rdp" does not know truncated batches; use "pld".')
        event = _event(noise_multiplier, sampling_probability, rounds)
        # Silence the warning for each Rényi order that does not converge: ε is the minimum over the other orders.
        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.ERROR)
        try:
            return float(dp_accounting.rdp.RdpAccountant().compose(event).get_epsilon(delta))
        finally:
            logging.set_verbosity(verbosity)
    losses = _losses(noise_multiplier, sampling_probability, interval, truncation).self_compose(rounds)
    return float(losses.get_epsilon_for_delta(delta))


@lru_cache(maxsize=8)
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
