"""Checks of the `DPSGD` settings that determine ε, and the noise multiplier for a target ε."""

from __future__ import annotations

import math
import warnings
from functools import partial
from importlib.util import find_spec
from typing import Any, get_args

import numpy as np

from ..._core.arguments import check_choice, check_number, describe
from ..._runs.optimizer import as_transform
from .._per_example.clip_norms import ClipNorms, clip_norms
from .accounting import Accountant, calibrate


def checked_delta(target_delta: Any, num_examples: int) -> float:
    """Return δ as a Python float; raise if it is out of range, and warn if it is too large to be meaningful."""
    delta = check_number("DPSGD", "target_delta", target_delta, lambda x: 0 < x < 1, "between 0 and 1")
    # Publishing one random example is (0, 1 / n)-differentially private, so δ should be well below 1 / n.
    if delta * num_examples > 1:
        warnings.warn(
            f"DPSGD: target_delta={delta} is more than 1 / num_examples = {1 / num_examples:.1e}, a δ that even "
            "publishing a random example satisfies; pass a smaller one.",
            stacklevel=3,
        )
    return delta


def checked_clipping(l2_clip_norm: Any, automatic: Any) -> ClipNorms:
    """Return the clip norms; raise unless all are positive and finite."""
    found = clip_norms("DPSGD", l2_clip_norm, automatic)
    for norm in found.norms:
        check_number("DPSGD", "l2_clip_norm", norm, lambda x: 0 < x < math.inf, "positive and finite")
    return found


def checked_sampling(num_examples: int, expected_batch_size: Any, bands: int) -> tuple[float, float]:
    """Return the expected size of a batch, and the probability that an example of the step's group takes part."""
    in_range = f"positive, and at most num_examples={num_examples}"
    size = check_number("DPSGD", "expected_batch_size", expected_batch_size, lambda x: 0 < x <= num_examples, in_range)
    # With bands an example may take part only in every `bands`-th step, so its probability is `bands` times as large.
    probability = size * bands / num_examples
    if probability > 1 + 1e-9:
        most = f"{num_examples / bands:g} examples"
        raise ValueError(f"DPSGD: {bands} bands allow batches of {most}, but {expected_batch_size=}; use fewer bands.")
    return size, min(1.0, probability)  # rounding may exceed 1


def checked_noise(
    noise_multiplier: Any, target_epsilon: Any, probability: float, rounds: int, delta: float, accountant: Any
) -> float:
    """Return the noise multiplier, as given or calibrated so that `rounds` sampled sums spend `target_epsilon`."""
    check_choice("DPSGD", "accountant", accountant, get_args(Accountant))
    if (noise_multiplier is None) == (target_epsilon is None):
        given = "neither" if noise_multiplier is None else "both"
        raise ValueError(f"DPSGD: pass either noise_multiplier or target_epsilon, but got {given}.")
    number = partial(check_number, "DPSGD")
    if target_epsilon is None:
        return number("noise_multiplier", noise_multiplier, lambda x: 0 <= x < math.inf, "finite and at least 0")
    target = number("target_epsilon", target_epsilon, lambda x: 0 < x < math.inf, "positive and finite")
    return calibrate(target, probability, rounds, delta, accountant)


def checked_strategy(strategy: Any) -> tuple[float, ...]:
    """Return the coefficients of a noise strategy; raise unless all are finite and the first is positive."""
    array = np.asarray([1.0] if strategy is None else strategy)
    if array.dtype.kind not in "iuf" or array.ndim != 1 or not np.isfinite(array).all() or not (array[:1] > 0).any():
        needed = f"an array of finite numbers, shape (bands,), the first positive, but got {describe(strategy)}"
        raise ValueError(f"DPSGD: noise_strategy must be {needed}.")
    return tuple(array.astype(float).tolist())


def check_extra() -> None:
    """Raise if a package of the `privacy` extra is missing."""
    for name in ("jax_privacy", "dp_accounting"):
        if find_spec(name) is None:
            missing = name.replace("_", "-")
            raise ModuleNotFoundError(f"DPSGD needs {missing}; install it with pip install 'plurax[privacy]'.")


def checked_optimizer(optimizer: Any) -> Any:
    """Return an optax optimizer as by `as_transform`; raise if it is not one."""
    if (transform := as_transform(optimizer)) is None:
        got = describe(optimizer)
        raise TypeError(f"DPSGD: optimizer must be an optax GradientTransformation, such as adam(1e-3), but got {got}.")
    return transform
