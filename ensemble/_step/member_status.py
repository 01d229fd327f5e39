"""`MemberStatus`: the members that train, those that have stopped, and the reasons; the checks for finite values."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...transforms._core.prng import is_key


class Stop(IntEnum):
    """The reasons why a member no longer trains, as stored in `MemberStatus.stopped`."""

    TRAINS = 0
    NOT_FINITE = 1
    EARLY = 2


class MemberStatus(NamedTuple):
    """The status of each member, as arrays with the members along axis 0.

    Attributes:
      step: the last step in which the member trained, int32; for a member that has stopped, the step that stopped it.
      stopped: 0 if the member trains, 1 if its loss or gradients were not finite, 2 if it was stopped early; int32.
      restarts: how often the member was restarted from an earlier state, int32.
      hyperparams: the hyperparameters of the loss by name, one number for each member.
      schedules: for each hyperparameter of the optimizer that has schedules, by name, the index of the schedule of each
        member, int32.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, Trainer
      >>> trainer = Trainer(lambda model, x: jnp.log(x).mean() + model(x).sum(), optax.sgd(0.1), in_axes=0)
      >>> state = trainer.init(Ensemble.create(lambda rngs: nnx.Linear(1, 1, rngs=rngs), 2, seed=0))
      >>> state, metrics = trainer.step(state, jnp.array([[[1.0]], [[-1.0]]]))
      >>> state.standing.stopped, state.standing.trains
      (Array([0, 1], dtype=int32), Array([ True, False], dtype=bool))
    """

    step: jax.Array
    stopped: jax.Array
    restarts: jax.Array
    hyperparams: dict[str, jax.Array]
    schedules: dict[str, jax.Array]

    @classmethod
    def _first(cls, size: int, hyperparams: Mapping[str, Any], schedules: Mapping[str, Any]) -> MemberStatus:
        """Return the status of members before their first step."""
        # `jnp.asarray` converts NumPy's float64 to the default dtype of JAX: float32, unless x64 is enabled.
        given = [{name: jnp.asarray(x) for name, x in values.items()} for values in (hyperparams, schedules)]
        step, stopped, restarts = (jnp.zeros(size, jnp.int32) for _ in range(3))
        return cls(step, stopped, restarts, *given)

    @property
    def trains(self) -> jax.Array:
        """Return whether each member trains."""
        return self.stopped == Stop.TRAINS


def finite(tree: Any) -> jax.Array:
    """Return whether all numbers in `tree` are finite, and the sum of no array overflows."""
    # On a CPU a sum is four times as fast as checking each number, and a NaN or infinity among the terms always makes
    # it non-finite (inf - inf is NaN). Finite terms overflow only if their squared norm is far beyond the range.
    # Half-precision numbers are summed in float32.
    numbers = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    flags = [jnp.isfinite(x.sum(dtype=jnp.float32 if x.dtype.itemsize < 4 else x.dtype)) for x in numbers]
    # A reduction, which XLA computes once; it would repeat a chain of `&` in the update of every array.
    return jnp.stack(flags).all() if flags else jnp.array(True)


def still_finite(new: Any, old: Any) -> jax.Array:
    """Return whether all numbers of `new` are finite that were finite in `old`; a mask of -inf may stay."""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    flags = [(jnp.isfinite(x) | ~jnp.isfinite(y)).all() for x, y in pairs if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack(flags).all() if flags else jnp.array(True)


def with_other_keys(tree: Any, numbers: jax.Array) -> Any:
    """Return `tree`, stacked arrays of members, with one number per member folded into the keys of the member."""

    def of_leaf(x: Any) -> Any:
        """Return new keys for keys, and anything else unchanged."""
        if not is_key(x):
            return x
        # `fold_in` takes one key, so it is mapped over the other axes of an array of keys, then over the members.
        fold: Any = jax.random.fold_in
        for _ in range(x.ndim - 1):
            fold = jax.vmap(fold, (0, None))
        return jax.vmap(fold)(x, numbers)

    return jax.tree.map(of_leaf, tree)
