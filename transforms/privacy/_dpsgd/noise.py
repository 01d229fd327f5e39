"""The noise of DP-SGD: jax-privacy draws it; on a CPU its random bits are computed faster than by JAX."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._core.compat import key_implementation
from ..._core.prng import is_key
from .accounting import Ledger

_THREEFRY = "threefry2x32"
_threefry = partial(jax.random.wrap_key_data, impl=_THREEFRY)


def privatizer(ledger: Ledger, key: jax.Array) -> Any:
    """Return jax-privacy's optax transformation that adds the noise of a ledger to sums of clipped gradients.

    Each leaf gets independent noise with standard deviation `noise_multiplier * l2_clip_norm`. A strategy matrix
    correlates the noise of different steps; the standard deviation is then multiplied by the norm of its columns,
    which is the sensitivity of a whole cycle to one example. With adaptive clipping the standard deviation is the noise
    multiplier of the gradients: for sums divided by the clip norm of the step.
    """
    from jax_privacy import noise_addition
    from jax_privacy.matrix_factorization import toeplitz

    stddev = ledger.gradient_multiplier * (ledger.l2_clip_norm if ledger.adaptive is None else 1.0)
    if ledger.bands == 1:
        return noise_addition.gaussian_privatizer(stddev=stddev, prng_key=key)
    inverse = toeplitz.inverse_as_streaming_matrix(np.asarray(ledger.strategy))
    stddev *= math.hypot(*ledger.strategy)
    return noise_addition.matrix_factorization_privatizer(inverse, stddev=stddev, prng_key=key)


def add_noise(ledger: Ledger, sums: Any, state: Any) -> tuple[Any, Any]:
    """Add noise to sums of clipped gradients; return them and the noise state of the next step."""
    if ledger.noise_multiplier == 0:
        return sums, state
    # The key is a placeholder: only `init` uses it, and the state holds the key from which noise is drawn.
    noise = privatizer(ledger, jax.random.key(0))
    # On two cores, the step of a network of 500,000 parameters with 256 examples and Adam takes 13 to 15 % longer with
    # either JAX's bits or no loop around the noise, and 14 to 21 % with both.
    quick = _with_impl(state, _THREEFRY, _unrolled())
    noisy, quick = lax.platform_dependent(sums, quick, cpu=partial(_in_one_go, noise.update), default=noise.update)
    return noisy, _with_impl(quick, "unrolled", _THREEFRY)


def add_noise_and_count(
    ledger: Ledger, sums: Any, counts: jax.Array, clip_norms: jax.Array, state: Any
) -> tuple[Any, jax.Array, Any]:
    """Add noise to sums of clipped gradients and to the counts of adaptive clipping.

    Args:
      ledger: has the settings of adaptive clipping.
      sums: the sums of gradients, clipped by `clip_norms`.
      counts: the counts, shape () or (groups,).
      clip_norms: the clip norms of the step, shape () or (groups,).
      state: the noise state.

    Returns:
      The noisy sums, the noisy counts, and the noise state of the next step.
    """
    if ledger.noise_multiplier == 0:
        return sums, counts, state
    assert ledger.adaptive is not None
    assert ledger.adaptive.count_stddev is not None
    # All leaves get noise of one standard deviation, so scale sums and counts to it, and back.
    bound, per_count = jnp.linalg.norm(clip_norms), ledger.gradient_multiplier / ledger.adaptive.count_stddev
    scaled = jax.tree.map(lambda x: x / bound.astype(x.dtype), sums), counts * per_count
    (noisy, counts), state = add_noise(ledger, scaled, state)
    return jax.tree.map(lambda x: x * bound.astype(x.dtype), noisy), counts / per_count, state


def _in_one_go(update: Callable[..., Any], sums: Any, state: Any) -> Any:
    """Return `update(sums, state)`, computed only once.

    XLA on a CPU fuses elementwise operations into each of their consumers and so recomputes them; Adam has three. It
    does not recompute the results of a loop. This loop always has a single iteration, but XLA cannot infer that.
    """
    # A number of iterations that is 1 but not a constant: the upper bit of a word is 0 or 1.
    word = jax.random.key_data(jax.tree.leaves(state)[0]).reshape(-1)[0]
    iterations = jnp.maximum(1, (word >> 31).astype(jnp.int32))

    def iteration(carry: Any) -> Any:
        return carry[0] + 1, update(sums, state)

    return lax.while_loop(lambda carry: carry[0] < iterations, iteration, (jnp.int32(0), (sums, state)))[1]


def _with_impl(tree: Any, one: str, other: Any) -> Any:
    """Return a tree with its keys of implementation `one` rewrapped as `other`; other leaves are unchanged."""

    def of_leaf(x: Any) -> Any:
        changes = is_key(x) and str(jax.random.key_impl(x)) == one
        return jax.random.wrap_key_data(jax.random.key_data(x), impl=other) if changes else x

    return jax.tree.map(of_leaf, tree)


# On a CPU, JAX's threefry is a loop over its rounds, and each iteration reads and writes memory. Unrolled, it is a
# single pass: the same bits, five times as fast.


def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    """Return the same bits as `jax.random.bits` with a threefry key."""
    size = math.prod(shape)
    partitionable = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]  # made when JAX is imported
    if bit_width != 32 or size >= 2**32 or not partitionable:
        return jax.random.bits(_threefry(key), shape, f"uint{bit_width}")
    # The bits of element i are the two words of block i, combined by exclusive or.
    low, high = _block(key[0], key[1], jnp.zeros(size, jnp.uint32), lax.iota(jnp.uint32, size))
    return (low ^ high).reshape(shape)


def _block(k0: Any, k1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    """Compute threefry-2x32 with 20 rounds: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"."""
    # The parity constant is Skein's; rotations as in the paper, with a key injection after every four rounds.
    keys = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(5):
        for left in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << np.uint32(left)) | (x1 >> np.uint32(32 - left)))
        x0, x1 = x0 + keys[(i + 1) % 3], x1 + keys[(i + 2) % 3] + np.uint32(i + 1)
    return x0, x1


@cache
def _unrolled() -> Any:
    """Return a threefry key implementation whose bits come from `_random_bits`; defined on first use."""
    return key_implementation(
        key_shape=(2,),
        seed=lambda seed: jax.random.key_data(jax.random.key(seed, impl=_THREEFRY)),
        split=lambda key, shape: jax.random.key_data(jax.random.split(_threefry(key), shape)),
        random_bits=_random_bits,
        fold_in=lambda key, data: jax.random.key_data(jax.random.fold_in(_threefry(key), data)),
        name="unrolled",
        tag="unrolled",
    )
