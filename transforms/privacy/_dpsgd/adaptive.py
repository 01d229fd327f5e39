"""`AdaptiveClipping`: a clip norm that follows a private quantile of the norms of the examples' gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.arguments import check_number

# An adapted clip norm stays within these multiples of the first one, so that it can neither vanish nor overflow.
_LEAST, _MOST = 1e-6, 1e6


@dataclass(frozen=True)
class AdaptiveClipping:
    """Let the clip norm of `DPSGD` follow a quantile of the norms of the examples' gradients.

    Each step counts the examples of its batch whose gradient is not clipped, minus half of all its examples, and adds
    noise. It multiplies the clip norm by exp(-learning_rate (fraction - quantile)), where the fraction is the noisy
    count divided by the expected batch size, plus one half. `l2_clip_norm` is the clip norm of the first step; a pytree
    of them adapts each one by the norms of its own part.

    Attributes:
      quantile: the fraction of examples that should not be clipped, between 0 and 1.
      learning_rate: the step size of the logarithm of the clip norm, positive.
      count_stddev: standard deviation of the noise of the count, in examples; None for a twentieth of the expected
        batch size, or z √k (see below) if that is larger, which leaves 75 % of the precision to the gradients.

    Raises:
      TypeError, ValueError: an attribute that is not a number, or out of range.

    Privacy:
      The count is released in addition to the gradients, and both together spend what `noise_multiplier` z says: the
      gradients get the larger multiplier z_g with 1/z_g² = 1/z² - k / (2 count_stddev)² for k clip norms. An example
      changes a count, centered by one half for each example of the batch, by at most 1/2. The clip norm itself may be
      published, because it is computed from noisy counts.

    Source:
      Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping" (theorem 1 and algorithm 1).

    Examples:
      >>> from plurax.transforms.privacy import AdaptiveClipping
      >>> AdaptiveClipping(quantile=0.9)
      AdaptiveClipping(quantile=0.9, learning_rate=0.2, count_stddev=None)
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    count_stddev: float | None = None

    def __post_init__(self) -> None:
        def check(name: str, most: float, what: str) -> None:
            value = getattr(self, name)
            number = check_number("AdaptiveClipping", name, value, lambda x: 0 < x < most, what)
            object.__setattr__(self, name, number)

        check("quantile", 1, "between 0 and 1")
        check("learning_rate", math.inf, "positive and finite")
        if self.count_stddev is not None:
            check("count_stddev", math.inf, "positive and finite")


def adapted(
    adaptive: AdaptiveClipping, clip_norms: jax.Array, counts: jax.Array, expected: float, first: Any
) -> jax.Array:
    """Return the clip norms of the next step.

    Args:
      adaptive: how they adapt.
      clip_norms: those of this step, shape () or (groups,).
      counts: the noisy counts of examples that were not clipped, minus half of the number of examples.
      expected: the expected batch size.
      first: the clip norms of the first step.
    """
    first = jnp.reshape(jnp.asarray(first, clip_norms.dtype), clip_norms.shape)
    fraction = counts / expected + 0.5
    moved = clip_norms * jnp.exp(-adaptive.learning_rate * (fraction - adaptive.quantile))
    return jnp.clip(moved, _LEAST * first, _MOST * first).astype(clip_norms.dtype)


def gradient_multiplier(noise_multiplier: float, adaptive: AdaptiveClipping | None, groups: int) -> float:
    """Return the noise multiplier of the gradients, which with that of the counts is `noise_multiplier`; NaN if none.

    Args:
      noise_multiplier: that of the whole step.
      adaptive: how clip norms adapt, with a standard deviation of the counts; None if they do not.
      groups: the number of clip norms.
    """
    if adaptive is None or noise_multiplier == 0:
        return noise_multiplier
    assert adaptive.count_stddev is not None
    precision = noise_multiplier**-2 - groups / (2 * adaptive.count_stddev) ** 2
    return precision**-0.5 if precision > 0 else math.nan
