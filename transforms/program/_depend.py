"""An order between two computations that share nothing: `depend`."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

_Value = TypeVar("_Value")
_Other = TypeVar("_Other")


def depend(y: _Value, a: _Other) -> tuple[_Value, _Other]:
    """Return `y` and `a` such that both are computed before either is used.

    As `jax.lax.optimization_barrier`, for two values: MindSpore's `Depend(y, a)`. XLA neither moves a
    computation across nor merges what is before with what is behind. It drops unused values, so use both results:
    with `depend(y, a)[0]` alone `a` is not computed at all.

    A side effect is no value: for the order of prints, writes and the like JAX has ordered callbacks,
    `jax.debug.callback(..., ordered=True)` and `jax.experimental.io_callback(..., ordered=True)`, which run in the
    order in which they are written, whatever depends on them.

    Args:
      y: arrays or numbers, any pytree.
      a: the same.

    Returns:
      `y` and `a`, unchanged, as arrays.

    Cost:
      Nothing is computed or copied; what would have been fused across is not.

    Source:
      MindSpore, `mindspore.ops.Depend`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from plurax.transforms.program import depend
      >>> def step(x, log):
      ...     y, log = depend(jnp.exp(x), log + x.sum())
      ...     return y, log
      >>> y, log = jax.jit(step)(jnp.zeros(2), 1.0)
      >>> float(log)
      1.0
    """
    pair: Any = jax.lax.optimization_barrier((y, a))
    return pair
