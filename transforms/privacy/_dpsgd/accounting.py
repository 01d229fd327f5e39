"""Privacy accounting with dp-accounting: ε from a ledger of steps, and the noise multiplier from a target ε."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

Accountant = Literal["pld", "rdp"]
# Discretization intervals of privacy losses, in nats. The first is dp-accounting's default; the second is about seven
# times faster and errs on the safe side (a larger ε).
_FINE, _COARSE = 1e-4, 1e-3


@dataclass(frozen=True)
class Ledger:
    """The settings of a step that a privacy accountant needs; the number of steps is counted elsewhere.

    The examples are divided into `bands` groups. Each step samples from one group, in cyclic order: every example of
    that group takes part with `sampling_probability`, independently of all others.

    Attributes:
      noise_multiplier: standard deviation of the noise in units of `l2_clip_norm` times the column norm of `strategy`.
      sampling_probability: the probability that an example of the step's group takes part.
      l2_clip_norm: the largest norm that one example contributes to the sum of a step.
      expected_batch_size: the divisor of the noisy sum.
      strategy: the coefficients of a banded strategy matrix; one coefficient for independent noise.
    """

    noise_multiplier: float
    sampling_probability: float
    l2_clip_norm: float
    expected_batch_size: float
    strategy: tuple[float, ...] = (1.0,)

    @property
    def bands(self) -> int:
        """Return the number of groups: an example may take part in every `bands`-th step."""
        return len(self.strategy)

    def event(self, steps: int, models: int = 1) -> Any:
        """Return the `dp_accounting.DpEvent` of the first `steps` steps of `models` models together."""
        return _event(*self._rounds(steps, models))

    def epsilon(self, steps: int, delta: float, accountant: str, models: int = 1) -> float:
        """Return the ε of the first `steps` steps of `models` models together, for adding or removing one example."""
        return _epsilon(*self._rounds(steps, models), delta, accountant, _FINE)

    def progress(self, step: int, last: int, delta: float, accountant: str, models: int) -> str:
        """Return an upper bound on the ε of `step` of `last` steps, as text for the progress bar."""
        # An ε takes about 50 ms, so it is computed for only twenty step counts; the next of these bounds the current ε.
        every = math.ceil(last / 20)
        shown = min(last, math.ceil(step / every) * every)
        spent = _epsilon(*self._rounds(shown, models), delta, accountant, _FINE if step == last else _COARSE)
        return f"ε ≤ {math.ceil(1000 * spent) / 1000:.3f}" if math.isfinite(spent) else "ε = ∞"

    def steps_within(self, budget: float, delta: float, accountant: str, models: int, most: int) -> int:
        """Return the largest number of steps, up to `most`, whose ε is within `budget`."""

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


def calibrate(target_epsilon: float, sampling_probability: float, rounds: int, delta: float, accountant: str) -> float:
    """Return the least noise multiplier for `target_epsilon` over `rounds` sampled sums, to a relative 1e-5."""
    from scipy.optimize import brentq

    def spent(sigma: float) -> float:
        return _epsilon(sigma, sampling_probability, rounds, delta, accountant, _FINE)

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


def _event(noise_multiplier: float, sampling_probability: float, rounds: int) -> Any:
    """Return the `dp_accounting.DpEvent` of `rounds` Poisson-sampled Gaussian sums."""
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    return dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(sampling_probability, gaussian), rounds
    )


@lru_cache(maxsize=4096)
def _epsilon(
    noise_multiplier: float, sampling_probability: float, rounds: int, delta: float, accountant: str, interval: float
) -> float:
    """Return the ε of `rounds` sampled sums; cached, because the progress bar and budgets request the same values."""
    import dp_accounting
    from absl import logging

    if rounds == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    if accountant == "rdp":
        event = _event(noise_multiplier, sampling_probability, rounds)
        # Silence the warning for each Rényi order that does not converge: ε is the minimum over the other orders.
        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.ERROR)
        try:
            return float(dp_accounting.rdp.RdpAccountant().compose(event).get_epsilon(delta))
        finally:
            logging.set_verbosity(verbosity)
    losses = _losses(noise_multiplier, sampling_probability, interval).self_compose(rounds)
    return float(losses.get_epsilon_for_delta(delta))


@lru_cache(maxsize=8)
def _losses(noise_multiplier: float, sampling_probability: float, interval: float) -> Any:
    """Return the privacy loss distribution of one sum; cached, because an accountant recomputes it on each call."""
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=sampling_probability, value_discretization_interval=interval
    )
