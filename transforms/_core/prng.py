"""Recognize and check random keys."""

from __future__ import annotations

from typing import Any

import jax

from .arguments import describe


def is_key(x: Any) -> bool:
    """Return whether `x` is a key, or an array of keys."""
    return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def check_key(api: str, key: Any, name: str = "key") -> None:
    """Raise if `key` is not one typed key: legacy uint32 words and arrays of keys are refused."""
    if not isinstance(key, jax.Array) or not is_key(key) or key.shape != ():
        raise TypeError(f"{api}: {name} must be one key, such as jax.random.key(0), but got {describe(key)}.")
