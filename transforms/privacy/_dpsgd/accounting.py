"""What steps of DP-SGD spend: from a ledger to ε, and from ε to the noise it takes. dp-accounting does the counting."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

Accountant = Literal["pld", "rdp"]
# How finely privacy losses are counted, in nats. The first is what dp-accounting takes; the second is about seven times
# quicker, and errs on the safe side.
_FINE, _COARSE = 1e-4, 1e-3


@dataclass(frozen=True)
class Ledger:
    """What an accountant has to know of each step of a run; the number of steps is counted elsewhere.

    The examples are in `bands` groups, of which each step uses one, in cyclic order. In a step of its group an example
    takes part with `sampling_probability`, independently of all others.

    Attributes:
      noise_multiplier: standard deviation of the noise, in units of the norm that one example contributes at most.
      sampling_probability: as above.
      l2_clip_norm: that norm.
      expected_batch_size: what the noisy sum is divided by.
      strategy: the coefficients of a banded strategy matrix; one coefficient for independent noise.
    """

    noise_multiplier: float
    sampling_probability: float
    l2_clip_norm: float
    expected_batch_size: float
    strategy: tuple[float, ...] = (1.0,)

    @property
    def bands(self) -> int:
        """Return the number of steps from one in which an example may take part to the next."""
        return len(self.strategy)

    def event(self, steps: int, models: int = 1) -> Any:
        """Return the first `steps` steps of `models` models as a `dp_accounting.DpEvent`."""
        return _event(*self._rounds(steps, models))

    def epsilon(self, steps: int, delta: float, accountant: str, models: int = 1) -> float:
        """Return the ε of the first `steps` steps of `models` models together, one example added or removed."""
        return _epsilon(*self._rounds(steps, models), delta, accountant, _FINE)

    def progress(self, step: int, last: int, delta: float, accountant: str, models: int) -> str:
        """Return a bound of the ε of `step` of `last` steps, as text."""
        # An ε takes some 50 ms, so it is counted for twenty numbers of steps, each time as far ahead as it is shown.
        every = math.ceil(last / 20)
        shown = min(last, math.ceil(step / every) * every)
        spent = _epsilon(*self._rounds(shown, models), delta, accountant, _FINE if step == last else _COARSE)
        return f"ε ≤ {math.ceil(1000 * spent) / 1000:.3f}" if math.isfinite(spent) else "ε = ∞"

    def steps_within(self, budget: float, delta: float, accountant: str, models: int, most: int) -> int:
        """Return the largest number of steps, `most` at most, whose ε does not pass `budget`."""

        def spent(steps: int) -> float:
            return self.epsilon(steps, delta, accountant, models)

        # ε grows with the number of steps, so it is bisected; not for `most`, which budgets often allow.
        return most if spent(most) <= budget else bisect_right(range(most), budget, key=spent) - 1

    def _rounds(self, steps: int, models: int) -> tuple[float, float, int]:
        """Return the noise, the sampling probability and the number of the sampled sums that steps amount to."""
        # Models that learn from the same batches with noise of their own are one sum, in which an example has a norm
        # of at most sqrt(models) clip norms, with noise of one standard deviation.
        # With a banded strategy matrix, whose noise is scaled by the norm of its columns, a cycle of `bands` steps is
        # one sampled Gaussian sum (Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization").
        return self.noise_multiplier / math.sqrt(models), self.sampling_probability, math.ceil(steps / self.bands)


def calibrate(target_epsilon: float, sampling_probability: float, rounds: int, delta: float, accountant: str) -> float:
    """Return the least noise multiplier, to 1e-5 of it, with which `rounds` sampled sums spend `target_epsilon`."""
    from scipy.optimize import brentq

    def spent(sigma: float) -> float:
        return _epsilon(sigma, sampling_probability, rounds, delta, accountant, _FINE)

    high = 1.0
    if accountant == "pld":
        # Little noise takes long to account for, so the search begins above the root: by "rdp" it takes more noise.
        high = calibrate(target_epsilon, sampling_probability, rounds, delta, "rdp")
        if spent(1e3 * high) == math.inf:
            raise ValueError(f"DPSGD: by pld ε is infinite for target_delta={delta}; take a larger one, or rdp.")
    while spent(high) > target_epsilon:
        high *= 1.5
    low = 0.9 * high
    while spent(low) <= target_epsilon:
        high, low = low, 0.9 * low

    # log ε over log σ is nearly a line, so the root is found in few steps. 1e-300 is for an ε of zero.
    def excess(log_sigma: float) -> float:
        return math.log(max(spent(math.exp(log_sigma)), 1e-300) / target_epsilon)

    found = math.exp(brentq(excess, math.log(low), math.log(high), xtol=1e-5))
    # The root may lie on the side that spends too much: it goes up until it does not.
    while spent(found) > target_epsilon:
        found *= 1 + 1e-6
    # Rounded up, so that machines whose last bits differ find the same.
    return math.ceil(found * 1e6) / 1e6


def _event(noise_multiplier: float, sampling_probability: float, rounds: int) -> Any:
    """Return `rounds` Poisson-sampled Gaussian sums as a `dp_accounting.DpEvent`."""
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    return dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(sampling_probability, gaussian), rounds
    )


@lru_cache(maxsize=4096)
def _epsilon(
    noise_multiplier: float, sampling_probability: float, rounds: int, delta: float, accountant: str, interval: float
) -> float:
    """Return the ε of `rounds` sampled sums; remembered, since the bar and budgets ask for the same ones repeatedly."""
    import dp_accounting
    from absl import logging

    if rounds == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    if accountant == "rdp":
        event = _event(noise_multiplier, sampling_probability, rounds)
        # Without a line for each order of Rényi divergence that does not converge: ε is the least over the others.
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
    """Return the privacy losses of one sum: an accountant would compute them again for every number of steps."""
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=sampling_probability, value_discretization_interval=interval
    )
