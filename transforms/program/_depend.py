"""`depend`: an order between two computations that share no data."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

_Value = TypeVar("_Value")
_Other = TypeVar("_Other")


def depend(y: _Value, a: _Other) -> tuple[_Value, _Other]:
    """Return `y` and `a` such that both are computed before either result is used.

    As `jax.lax.optimization_barrier` for two values, or MindSpore's `Depend(y, a)`. XLA neither moves computations
    across the barrier nor merges computations before it with computations after it. XLA drops unused values, so use
    both results: if only `depend(y, a)[0]` is used, `a` is not computed at all.

    `depend` does not order side effects. For the order of prints, writes and the like use ordered callbacks,
    `jax.debug.callback(..., ordered=True)` and `jax.experimental.io_callback(..., ordered=True)`, which run in program
    order regardless of data dependencies.

    Args:
      y: a pytree of arrays or numbers.
      a: a pytree of arrays or numbers.

    Returns:
      `y` and `a`, unchanged, as arrays.

    Cost:
      Nothing is computed or copied, but XLA cannot fuse operations across the barrier.

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
