"""`masked_topk_mean`: the mean of the largest values that a mask selects."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.arguments import check_number, describe


def masked_topk_mean(x: jax.Array, mask: jax.Array, fraction: float) -> jax.Array:
    """Average the largest `fraction` of the values that a mask selects.

    Of n selected values, exactly the max(floor(fraction * n), 1) largest are averaged, even if some values are equal.
    (A threshold would include either all values equal to it or none.)

    Args:
      x: values of any shape, real floating point.
      mask: booleans of the same shape.
      fraction: a Python number in (0, 1], interpreted as its decimal text: 0.29 of 100 values are 29.

    Returns:
      The mean, a scalar of the dtype of `x`; 0, with a gradient of 0, if nothing is selected. Values that are not
      selected may be NaN; a selected NaN makes the mean NaN. Among equal values at the cutoff, the first ones receive
      the gradient.

    Raises:
      TypeError: `x` is not a real floating point array, `mask` not an array of booleans, or `fraction` not a number.
      ValueError: the shapes differ; `fraction` is outside (0, 1].

    Cost:
      One sort. A fraction of many digits, such as 1 / 3, adds a table of `x.size` ints to the program, which takes
      0.1 s for a million values.

    Source:
      The dynamic shapes of MindSpore's guide to cells: a loss of the hardest 70 %.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms.program import masked_topk_mean
      >>> x, mask = jnp.array([1.0, 5.0, 3.0, 9.0]), jnp.array([True, True, True, False])
      >>> float(masked_topk_mean(x, mask, 0.7))
      4.0
    """
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"masked_topk_mean: x must be an array of real floating point, but got {describe(x)}.")
    if not hasattr(mask, "dtype") or mask.dtype != bool:
        raise TypeError(f"masked_topk_mean: mask must be an array of booleans, but got {describe(mask)}.")
    if x.shape != mask.shape:
        raise ValueError(f"masked_topk_mean: x has shape {x.shape}, but mask has {mask.shape}; pass equal shapes.")
    check_number("masked_topk_mean", "fraction", fraction, lambda x: 0 < x <= 1, "above 0 and at most 1")
    x, mask = jnp.asarray(x), jnp.asarray(mask)
    if not x.size:
        return jnp.zeros((), x.dtype)
    selected = mask.reshape(-1)
    # Sum half precision in float32, so that small numbers are not lost to rounding.
    values = x.reshape(-1).astype(x.dtype if jnp.finfo(x.dtype).bits >= 32 else jnp.float32)
    # Put zeros where the mask is False: a NaN there would make the gradient NaN, since 0 * NaN is NaN.
    values = jnp.where(selected, values, 0)
    # Sort selected values first, in decreasing order, with NaN as the largest. The last key is the primary one.
    rank = jnp.lexsort((-lax.stop_gradient(values), ~jnp.isnan(values), ~selected))
    number = selected.sum(dtype=jnp.int32)
    count = jnp.maximum(_floor_of(Fraction(str(fraction)), number, x.size), jnp.minimum(number, 1))
    taken = jnp.where(jnp.arange(x.size) < count, values[rank], 0)
    return (taken.sum() / jnp.maximum(count, 1)).astype(x.dtype)


def _floor_of(fraction: Fraction, number: jax.Array, most: int) -> jax.Array:
    """Return floor(fraction * number), exactly, for a number up to `most`."""
    # In floating point, 0.29 * 100 is 28.999999999999996. In integers, with fraction = p / q and number = a * q + b,
    # the result is a * p + floor(b * p / q), where b * p <= min(q, most) * p must fit into 32 bits.
    p, q = fraction.numerator, fraction.denominator
    if min(q, most) * p < 2**31 and q < 2**31:
        return number // q * p + number % q * p // q
    # Otherwise, tabulate all results with Python's integers, and look up the result.
    return jnp.asarray(np.array([n * p // q for n in range(most + 1)], np.int32))[number]
