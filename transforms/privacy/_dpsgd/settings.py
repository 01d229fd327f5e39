"""The settings of `DPSGD` that decide what a run spends: their checks, and the ledger that they make."""

from __future__ import annotations

import math
import warnings
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..._core.arguments import check_count, check_number, describe
from .accounting import ACCOUNTANTS, Ledger, calibrate


def checked_ledger(
    l2_clip_norm: Any,
    noise_multiplier: Any,
    target_epsilon: Any,
    target_delta: float,
    num_examples: Any,
    expected_batch_size: Any,
    num_steps: Any,
    accountant: Any,
    noise_strategy: Any,
) -> Ledger:
    """Return the ledger of a run, with the noise that a target asks for; raise for settings that make no sense."""
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"DPSGD: accountant must be one of {', '.join(ACCOUNTANTS)}, but got {accountant!r}.")
    if (noise_multiplier is None) == (target_epsilon is None):
        given = "none of them" if noise_multiplier is None else "both"
        raise ValueError(f"DPSGD: give noise_multiplier or target_epsilon, one of the two, but got {given}.")
    number = partial(check_number, "DPSGD")
    l2_clip_norm = number("l2_clip_norm", l2_clip_norm, lambda x: 0 < x < math.inf, "positive and finite")
    check_count("DPSGD", "num_examples", num_examples)
    check_count("DPSGD", "num_steps", num_steps)
    in_range = f"positive, and at most num_examples={num_examples}"
    expected_batch_size = number("expected_batch_size", expected_batch_size, lambda x: 0 < x <= num_examples, in_range)
    strategy = _checked_strategy(noise_strategy)
    bands = len(strategy)
    # With bands an example may take part in every `bands`-th step only, so it does with as many times the probability.
    probability = expected_batch_size * bands / num_examples
    if probability > 1 + 1e-9:
        raise ValueError(
            f"DPSGD: with {bands} bands a batch has up to num_examples / {bands} = {num_examples / bands:g} examples, "
            f"but expected_batch_size={expected_batch_size}; take fewer bands, or smaller batches."
        )
    probability = min(1.0, probability)  # beyond 1 by a rounding
    # Publishing one example at random is (0, 1 / n)-differentially private, so δ should be well below that.
    if target_delta * num_examples > 1:
        warnings.warn(
            f"DPSGD: target_delta={target_delta} is more than 1 / num_examples = {1 / num_examples:.1e}, with "
            "which publishing an example at random is allowed; take a smaller one.",
            stacklevel=3,
        )
    if target_epsilon is None:
        sigma = number("noise_multiplier", noise_multiplier, lambda x: 0 <= x < math.inf, "finite and at least 0")
    else:
        target = number("target_epsilon", target_epsilon, lambda x: 0 < x < math.inf, "positive and finite")
        # The steps of one cycle through the groups together are one Poisson-sampled sum: see `Ledger.event`.
        sigma = calibrate(target, probability, math.ceil(num_steps / bands), target_delta, accountant)
    return Ledger(sigma, probability, l2_clip_norm, expected_batch_size, strategy)


def check_extra() -> None:
    """Raise if what `pip install 'plurax[privacy]'` installs is missing."""
    for name in ("jax_privacy", "dp_accounting"):
        if find_spec(name) is None:
            missing = name.replace("_", "-")
            raise ModuleNotFoundError(f"DPSGD needs {missing}; install it with pip install 'plurax[privacy]'.")


def check_optimizer(optimizer: Any) -> None:
    """Raise if `optimizer` is not one of optax."""
    import optax

    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            "DPSGD: optimizer must be an optax GradientTransformation, such as optax.adam(1e-3), or "
            f"optax.MultiSteps(...).gradient_transformation(), but got {describe(optimizer)}."
        )


def _checked_strategy(strategy: Any) -> tuple[float, ...]:
    """Return the coefficients of a noise strategy; raise if they are not finite, or the first is not positive."""
    if strategy is None:
        return (1.0,)
    try:
        array = np.asarray(strategy, float)
    except (TypeError, ValueError):
        array = np.asarray(np.nan)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all() or not array[0] > 0:
        raise ValueError(
            "DPSGD: noise_strategy must be the finite coefficients of a banded Toeplitz matrix, shape (bands,), the "
            f"first of them positive, but got {describe(strategy)}."
        )
    return tuple(array.tolist())
