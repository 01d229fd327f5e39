"""The settings of `DPSGD`, refused where they say nothing."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np

from ..._core.arguments import describe


def check_extra() -> None:
    missing = [name for name in ("jax_privacy", "dp_accounting") if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"DPSGD needs {missing[0].replace('_', '-')}; install it with pip install 'plurax[privacy]'."
        )


def check_optimizer(optimizer: Any) -> None:
    import optax

    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"DPSGD: optimizer must be an optax GradientTransformation, such as optax.adam(1e-3) or what "
            f"optax.MultiSteps(...).gradient_transformation() gives, but got {describe(optimizer)}."
        )


def checked_strategy(strategy: Any) -> tuple[float, ...]:
    if strategy is None:
        return (1.0,)
    try:
        array = np.asarray(strategy, float)
    except (TypeError, ValueError):
        array = np.asarray(np.nan)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all() or not array[0] > 0:
        raise ValueError(
            f"DPSGD: noise_strategy must be the finite coefficients of a banded Toeplitz matrix, shape (bands,), the "
            f"first of them positive, but got {describe(strategy)}."
        )
    return tuple(array.tolist())
