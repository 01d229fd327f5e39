"""Weak types: as in JAX, a result of Python numbers alone takes the dtype of the array that it is combined with."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_ZEROS: dict[str, complex] = {"i": 0, "f": 0.0, "c": 0j}


def weak_like(x: Any, *like: Any) -> Any:
    """Return `x`, made weakly typed if all of `like` are and have its dtype: arrays, numbers, and in `like` shapes."""
    dtype = jnp.result_type(x)
    zero = all(map(is_weak, like)) and weak_zero(dtype)
    if zero is False or zero is None or is_weak(x) or any(jnp.result_type(one) != dtype for one in like):
        return x
    # JAX has no public function that sets a weak type. `full_like(zero, value)` gives a scalar the weak type of `zero`;
    # mapped over every axis it is one operation.
    convert = partial(lax.full_like, zero)
    for _ in jnp.shape(x):
        convert = jax.vmap(convert)
    return convert(x)


def weak_zero(dtype: Any) -> Any:
    """Return a weakly typed zero of this dtype, or None if Python numbers and comparisons do not have this dtype."""
    kind = jnp.dtype(dtype).kind
    zero = jnp.asarray(0) > 0 if kind == "b" else jnp.asarray(_ZEROS[kind]) if kind in _ZEROS else None
    return None if zero is None or zero.dtype != dtype else zero


def is_weak(x: Any) -> bool:
    """Return whether an array, a shape (as of `jax.typeof`) or a number is weakly typed."""
    return (x if hasattr(x, "weak_type") else jax.typeof(x)).weak_type
