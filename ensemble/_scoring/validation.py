"""Checks of what is scored, and its conversion to a dtype that is wide enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ...transforms._core.arguments import describe
from ...transforms._core.compat import Tracer


def prepared(p: jax.Array, labels: jax.Array, bounded: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return probabilities and labels in the dtypes of the computation, and a mask (..., batch) of valid examples."""
    p = with_nans(p) if bounded else at_least_float32(p)
    # In a narrow dtype the number of classes could overflow. The cast makes no other label a class.
    labels = labels.astype(int)
    return p, labels, (labels >= 0) & (labels < p.shape[-1]) & ~jnp.isnan(p).any(axis=-1)


def at_least_float32(x: Any) -> Any:
    """Return `x` in float32 if it is of half precision, else as it is."""
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return x.astype(jnp.float32) if narrow else x


@jax.jit
def outside(probabilities: jax.Array) -> jax.Array:
    """Return where numbers are not probabilities."""
    # Half precision may round to a little beyond 1: bfloat16 does so by up to 2**-8 = 0.004.
    return (probabilities < -0.01) | (probabilities > 1.01)


def with_nans(p: Any) -> Any:
    """Return probabilities in float32 or wider, with NaN for those outside 0 to 1, which may be traced."""
    p = at_least_float32(p)
    return jnp.where(outside(p), jnp.nan, p)


def first(wrong: Callable[[Any], Any], x: Any) -> tuple[tuple[int, ...], Any] | None:
    """Return the first index of `x` at which `wrong(x)` is true, and the value there.

    None if it is nowhere true, or if that cannot be known: `x` is traced, or other processes hold a part of it.
    """
    if isinstance(x, Tracer) or not getattr(x, "is_fully_addressable", True):
        return None
    with jax.ensure_compile_time_eval():  # `x` may be a constant of something that is traced
        found = wrong(x)
        if not found.any():
            return None
        index = tuple(map(int, np.argwhere(np.asarray(found))[0]))
        return index, x[index]


def unwrapped(x: Any) -> Any:
    """Return the array that an `nnx.Variable` holds, or anything else as it is."""
    convert = getattr(x, "__jax_array__", None)
    return convert() if convert else x


# The remedies for an argument that is not of floating point, and for one with a single class.
_REMEDIES = {
    "probabilities": (
        "pass the output of jax.nn.softmax, or one-hot predictions with .astype(float)",
        "where p is the probability of the second of two, pass jnp.concatenate([1 - p, p], axis=-1)",
    ),
    "logits": (
        "cast them with .astype(float)",
        "where z is the one logit of a sigmoid, pass jnp.concatenate([jnp.zeros_like(z), z], axis=-1)",
    ),
}


def check_scored(
    name: str, probabilities: ArrayLike, labels: ArrayLike, *, bounded: bool = True, what: str = "probabilities"
) -> tuple[Any, Any]:
    """Return probabilities (or logits, as `what` says) and labels as arrays; raise if they cannot be scored."""
    # Floating labels would be truncated by the cast to classes; booleans are no numbers of classes either.
    labels = unwrapped(labels)
    if not hasattr(labels, "dtype") or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{name}: labels must be an array of integers, but got {say(labels)}.")
    probabilities = check_probabilities(name, probabilities, "(..., batch, classes)", 2, bounded=bounded, what=what)
    *_, batch, classes = jnp.shape(probabilities)
    check_shape(name, "labels", labels, (batch,), what)
    if found := first(lambda x: (np.asarray(x) < 0) | (np.asarray(x) >= classes), labels):
        wrong = f"labels{list(found[0])} is {found[1]}"
        raise ValueError(f"{name}: labels must be in 0 to {classes - 1}, but {wrong}; leave such examples out.")
    return probabilities, labels


def check_probabilities(
    name: str,
    probabilities: ArrayLike,
    expected: str,
    least_ndim: int,
    *,
    bounded: bool = True,
    what: str = "probabilities",
) -> Any:
    """Return probabilities or logits as an array of at least `least_ndim` axes; raise if they are not."""
    probabilities = unwrapped(probabilities)
    if not hasattr(probabilities, "dtype") or not jnp.issubdtype(probabilities.dtype, jnp.floating):
        got, remedy = say(probabilities), _REMEDIES[what][0]
        raise TypeError(f"{name}: {what} must be an array of floating point, but got {got}; {remedy}.")
    shape = jnp.shape(probabilities)
    if len(shape) < least_ndim:
        raise ValueError(f"{name}: {what} must have shape {expected}, but got {shape}.")
    # One column is nearly always the probability of the second of two classes, of which argmax would give the first.
    if shape[-1] < 2:
        raise ValueError(f"{name}: {what} must be of at least 2 classes, but have shape {shape}; {_REMEDIES[what][1]}.")
    if bounded and (found := first(outside, probabilities)):
        wrong = f"probabilities{list(found[0])} is {found[1]}"
        raise ValueError(f"{name}: probabilities must be in 0 to 1, but {wrong}; apply jax.nn.softmax to logits.")
    return probabilities


def say(x: Any) -> str:
    return describe(x) if hasattr(x, "dtype") else f"a {type(x).__name__}"


def check_shape(name: str, what: str, x: Any, expected: tuple[int, ...], other: str) -> None:
    """Raise if an argument has another shape than the `other` argument requires."""
    if jnp.shape(x) != expected:
        raise ValueError(f"{name}: {what} must have shape {expected} to match {other}, but got {jnp.shape(x)}.")


def check_variances(name: str, variances: Any) -> None:
    """Raise for a negative variance, as far as that is known."""
    if found := first(lambda x: x < 0, variances):
        wrong = f"variances{list(found[0])} is {found[1]}"
        raise ValueError(f"{name}: variances must not be negative, but {wrong}; of logarithms give jnp.exp.")


def check_numbers(name: str, what: str, x: Any, expected: str, *, positive: bool = False, flags: bool = False) -> Any:
    """Return real numbers as an array of floating point with at least one axis; raise if they are not.

    Args:
      name: the function, for errors.
      what: the name of its argument.
      x: the argument.
      expected: the shape, in words.
      positive: whether numbers that are known must be above 0.
      flags: whether bool is allowed too.
    """
    x = unwrapped(x)
    kinds = (jnp.floating, jnp.integer, jnp.bool_) if flags else (jnp.floating, jnp.integer)
    if not hasattr(x, "dtype") or not any(jnp.issubdtype(x.dtype, kind) for kind in kinds):
        raise TypeError(f"{name}: {what} must be an array of real numbers, but got {say(x)}.")
    if not jnp.ndim(x) or 0 in jnp.shape(x)[:1] or 0 in jnp.shape(x)[-1:]:
        raise ValueError(f"{name}: {what} must have shape {expected} and not be empty, but got {jnp.shape(x)}.")
    if positive and (found := first(lambda x: x <= 0, x)):
        raise ValueError(f"{name}: {what} must be above 0, but {what}{list(found[0])} is {found[1]}.")
    return x if jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(x, float)
