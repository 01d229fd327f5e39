"""Checks of predictions, labels and targets, and their conversion to at least float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ...transforms._core.arguments import describe
from ...transforms._core.compat import Tracer
from ...transforms._core.prediction import Prediction, at_least_float32


def prepared(p: jax.Array, labels: jax.Array, bounded: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return probabilities and labels in the dtypes of the computation, and a mask (..., batch) of valid examples."""
    p = with_nans(p) if bounded else at_least_float32(p)
    # In a narrow dtype the number of classes could overflow. The cast does not make an invalid label valid.
    labels = labels.astype(int)
    return p, labels, (labels >= 0) & (labels < p.shape[-1]) & ~jnp.isnan(p).any(axis=-1)


@jax.jit
def outside(probabilities: jax.Array) -> jax.Array:
    """Return a mask of the numbers that are not probabilities."""
    # In half precision a probability may round to slightly above 1: in bfloat16 by up to 2**-8 = 0.004.
    return (probabilities < -0.01) | (probabilities > 1.01)


def with_nans(p: Any) -> Any:
    """Return probabilities in float32 or wider, with NaN for those outside 0 to 1."""
    p = at_least_float32(p)
    return jnp.where(outside(p), jnp.nan, p)


def first(wrong: Callable[[Any], Any], x: Any) -> tuple[tuple[int, ...], Any] | None:
    """Return the first index of `x` at which `wrong(x)` is true, and the value there.

    None if there is no such index, or if it cannot be determined: `x` is traced, or other processes hold parts of it.
    """
    if isinstance(x, Tracer) or not getattr(x, "is_fully_addressable", True):
        return None
    with jax.ensure_compile_time_eval():  # `x` may be a constant inside a trace
        found = wrong(x)
        if not found.any():
            return None
        index = tuple(map(int, np.argwhere(np.asarray(found))[0]))
        return index, x[index]


def unwrapped(x: Any) -> Any:
    """Return the array that an `nnx.Variable` holds, or anything else unchanged."""
    convert = getattr(x, "__jax_array__", None)
    return convert() if convert else x


# The remedies for an argument that is not floating point, and for one with a single class; for one without classes, the
# expression that has them.
_REMEDIES = {
    "probabilities": (
        "pass the output of jax.nn.softmax, or one-hot predictions with .astype(float)",
        "if p is the probability of the second of two classes, pass jnp.concatenate([1 - p, p], axis=-1)",
        "jnp.stack([1 - p, p], axis=-1)",
    ),
    "logits": (
        "cast them with .astype(float)",
        "if z is the single logit of a sigmoid, pass jnp.concatenate([jnp.zeros_like(z), z], axis=-1)",
        "jnp.stack([jnp.zeros_like(z), z], axis=-1)",
    ),
}


def check_scored(
    name: str, probabilities: Any, labels: Any, *, bounded: bool = True, what: str = "probabilities"
) -> tuple[Any, Any]:
    """Return probabilities (..., examples, classes) and labels (examples,) as arrays; raise if they are invalid.

    Each label counts as an example: labels (batch, height, width) become (batch * height * width,). If `what` is
    "logits", these take the place of probabilities.
    """
    # The cast to integers would truncate floating-point labels; booleans are not classes either.
    labels = unwrapped(labels)
    if not hasattr(labels, "dtype") or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{name}: labels must be an array of integers, but got {say(labels)}.")
    if getattr(unwrapped(probabilities), "shape", None) == (shape := labels.shape):
        remedy = f"for yes-or-no labels pass {_REMEDIES[what][2]}"
        raise ValueError(f"{name}: {what} need an axis of classes, but have the shape {shape} of labels; {remedy}.")
    probabilities = check_probabilities(name, probabilities, "(..., batch, classes)", 2, bounded=bounded, what=what)
    shape, ndim = jnp.shape(probabilities), max(jnp.ndim(labels), 1)
    check_shape(name, "labels", labels, shape[-1 - ndim : -1], what)
    classes = shape[-1]
    if found := first(lambda x: (np.asarray(x) < 0) | (np.asarray(x) >= classes), labels):
        wrong = f"labels{list(found[0])} is {found[1]}"
        raise ValueError(f"{name}: labels must be in 0 to {classes - 1}, but {wrong}; leave such examples out.")
    if ndim > 1:
        probabilities = probabilities.reshape(*shape[: -1 - ndim], labels.size, classes)
        labels = labels.reshape(-1)
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
        got = say(probabilities)
        remedy = _of_prediction(probabilities, expected, what) or _REMEDIES[what][0]
        if not hasattr(probabilities, "dtype") and not isinstance(probabilities, Prediction):
            remedy = "pass an array, such as jnp.asarray of a list"
        raise TypeError(f"{name}: {what} must be a floating-point array, but got {got}; {remedy}.")
    shape = jnp.shape(probabilities)
    if len(shape) < least_ndim:
        raise ValueError(f"{name}: {what} must have shape {expected}, but got {shape}.")
    # A single column is almost always the probability of the second of two classes, but argmax would predict class 0.
    if shape[-1] < 2:
        raise ValueError(f"{name}: {what} must have at least 2 classes, but got shape {shape}; {_REMEDIES[what][1]}.")
    if bounded and (found := first(outside, probabilities)):
        wrong = f"probabilities{list(found[0])} is {found[1]}"
        raise ValueError(f"{name}: probabilities must be in 0 to 1, but {wrong}; apply jax.nn.softmax to logits.")
    return probabilities


def _of_prediction(x: Any, expected: str, what: str) -> str | None:
    """Return the remedy if an argument is a `Prediction`, whose arrays were meant; None for anything else."""
    if not isinstance(x, Prediction):
        return None
    if what == "logits":
        return "pass the outputs of the ensemble, ensemble(x), since a prediction has no logits"
    if "members" in expected:
        return "pass its .members"
    if what in ("mean", "variance"):
        return f"pass its .{what}"
    if what in ("probabilities", "predictions"):
        return "pass its .mean, or its .members for a result for each member"
    return "pass one of its arrays"


def say(x: Any) -> str:
    return describe(x) if hasattr(x, "dtype") else f"a {type(x).__name__}"


def check_shape(name: str, what: str, x: Any, expected: tuple[int, ...], other: str) -> None:
    """Raise if the shape of an argument does not match that of the `other` argument."""
    if jnp.shape(x) != expected:
        raise ValueError(f"{name}: {what} must have shape {expected} to match {other}, but got {jnp.shape(x)}.")


def check_variances(name: str, variances: Any) -> None:
    """Raise for a negative variance, unless it is traced."""
    if found := first(lambda x: x < 0, variances):
        wrong = f"variances{list(found[0])} is {found[1]}"
        raise ValueError(f"{name}: variances must not be negative, but {wrong}; apply jnp.exp to log-variances.")


def check_numbers(name: str, what: str, x: Any, expected: str, *, positive: bool = False, flags: bool = False) -> Any:
    """Return real numbers as a floating-point array with at least one axis; raise for anything else.

    Args:
      name: the name of the function, for errors.
      what: the name of the argument, for errors.
      x: the argument.
      expected: the expected shape, for errors.
      positive: whether the numbers, unless they are traced, must be above 0.
      flags: whether bool is allowed too.
    """
    x = unwrapped(x)
    kinds = (jnp.floating, jnp.integer, jnp.bool_) if flags else (jnp.floating, jnp.integer)
    if not hasattr(x, "dtype") or not any(jnp.issubdtype(x.dtype, kind) for kind in kinds):
        remedy = _of_prediction(x, expected, what)
        cure = f"; {remedy}" if remedy else ""
        raise TypeError(f"{name}: {what} must be an array of real numbers, but got {say(x)}{cure}.")
    if not jnp.ndim(x) or 0 in jnp.shape(x)[:1] or 0 in jnp.shape(x)[-1:]:
        raise ValueError(f"{name}: {what} must have shape {expected} and not be empty, but got {jnp.shape(x)}.")
    if positive and (found := first(lambda x: x <= 0, x)):
        raise ValueError(f"{name}: {what} must be above 0, but {what}{list(found[0])} is {found[1]}.")
    return x if jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(x, float)
