"""`update_where`: an update of arrays under a condition, in the form that XLA computes in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...transforms._core.compat import JaxprEqn, Var
from ...transforms._core.jaxpr import aval, evaluate, interpret
from ...transforms._core.prng import is_key
from ...transforms._core.target import platform

# The number of small arrays that one copy of the condition selects, and the numbers in a small array.
_TOGETHER, _SMALL = 4, 4096


def update_where(takes: jax.Array, update: Callable[[], Any], old: Any) -> Any:
    """Return `update()` if `takes` is true, else `old`.

    The result is that of `jnp.where` on each array, but an array is selected where `update` computes it, and what
    `update` computes from it afterwards uses the selected array. If `takes` is true, both are equal; if it is false,
    everything computed from it is discarded too. Otherwise XLA would compute the moments of Adam twice, once to select
    them and once for the parameters, and copy the old ones before it overwrites them: the step of an MLP of 512 units
    took 2.5 times as long on a CPU, and the temporaries were 2.7 times as large.

    Args:
      takes: a boolean scalar.
      update: returns a pytree with the structure and shapes of `old`.
      old: a pytree of arrays.

    Returns:
      A pytree with the structure of `old` and the dtypes of `update()`, since an optimizer may change the dtype of its
      state in its first update.
    """
    closed, new = jax.make_jaxpr(update, return_shape=True)()
    outputs, olds = closed.jaxpr.outvars, jax.tree.leaves(jax.tree.map(lambda _, x: x, new, old))
    # An array that is returned twice has two old values: it is selected at the end, as are arrays that `update` returns
    # without computing them.
    times = Counter(x for x in outputs if isinstance(x, Var))
    before = {x: y for x, y in zip(outputs, olds, strict=True) if isinstance(x, Var) and times[x] == 1}
    select, selected = _Selection(takes), set[Any]()

    def visit(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        """Return the results of an operation, selected if they are outputs."""
        results = evaluate(eqn, *values)
        for i, x in enumerate(eqn.outvars):
            if x in before:
                results[i] = select(results[i], before[x])
                selected.add(x)
        return results

    found = interpret(closed.jaxpr, closed.consts, [], visit)
    done = [isinstance(x, Var) and x in selected for x in outputs]
    # A constant that `update` returns, such as a flag that is off after the first step, is a Python number here.
    found = [jnp.asarray(x, aval(of).dtype) for x, of in zip(found, outputs, strict=True)]
    kept = [x if d else select(x, y) for x, y, d in zip(found, olds, done, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(new), kept)


class _Selection:
    """A condition that selects arrays, each small one after some of those before it.

    XLA's runtime for CPUs hands operations to a second thread when more than eight are ready at a time, even if they
    are short. The operations that wait for the condition would all become ready with it, and the step of ten small MLPs
    took 1.7 times as long on two cores as on one. So the condition of a small array depends on small arrays selected
    before it. A large one has the plain condition: XLA computes a condition again for each number that it selects, and
    in a loop over members, MLPs of 118,000 parameters took 2.5 times as long.
    """

    def __init__(self, takes: jax.Array) -> None:
        self._plain = self._takes = takes
        self._count = 0

    def __call__(self, new: Any, old: Any) -> jax.Array:
        """Return the new array if the condition is true, else the old one, in the dtype of the new one."""
        is_small = 0 < new.size <= _SMALL and not is_key(new) and platform() == "cpu"
        takes = self._takes if is_small else self._plain
        kept = jnp.where(takes, new, old if new.dtype == old.dtype else old.astype(new.dtype))
        self._count += is_small
        if is_small and self._count % _TOGETHER == 0:
            # Always true, but neither JAX nor XLA knows that.
            first = kept[(0,) * kept.ndim]
            self._takes = self._takes & ((first == first) | (first != first))
        return kept
