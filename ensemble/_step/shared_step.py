"""`SharedStep`: one training step of the parameters that all members share, by the mean of the members' gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ...transforms._core.arguments import describe
from ...transforms._runs.optimizer import as_transform
from .._members.shared import SharedArrays
from .optimizer import MemberOptimizer
from .state import SharedState, Trained
from .update_where import update_where


class Contribution(NamedTuple):
    """What one member, or several, give to the step of the shared parameters.

    Attributes:
      number: how many members count: those that train and whose loss and gradients are finite.
      gradients: the sum of their gradients by the shared parameters, those in float16 as float32.
    """

    number: jax.Array
    gradients: Any

    @classmethod
    def of(cls, counts: jax.Array, gradients: Any) -> Contribution:
        """Return the contribution of one member."""
        gradients = jax.tree.map(lambda g: jnp.where(counts, g, 0), gradients)
        return cls(counts.astype(jnp.float32), summable(gradients))


def summable(gradients: Any) -> Any:
    """Return gradients in a dtype in which a sum of finite ones is finite: float16 ends at 65,504."""
    return jax.tree.map(lambda g: g.astype(jnp.float32) if g.dtype == jnp.float16 else g, gradients)


class SharedStep:
    """One training step of the parameters that all members share.

    Args:
      given: the optax transformation that was passed as `shared_optimizer`, or None.
      optimizer: the optimizer of the members, which is used without `given`.
    """

    def __init__(self, given: Any, optimizer: MemberOptimizer) -> None:
        transform = None if given is None else as_transform(given)
        if given is not None and transform is None:
            expected = "a GradientTransformation, such as optax.adam(1e-3)"
            raise TypeError(f"Trainer: shared_optimizer must be {expected}, but got {describe(given)}.")
        self._given, self._optimizer = transform, optimizer

    def init(self, shared: SharedArrays | None) -> SharedState | None:
        """Return the shared arrays with the optimizer state of those that train.

        Raises:
          ValueError: there are none, but an optimizer for them; the members' optimizer has hyperparameters per member.
        """
        if shared is None or not jax.tree.leaves(shared.trainable):
            if self._given is not None:
                raise ValueError("Trainer.init: shared_optimizer has nothing to train, since no parameter is shared.")
            return None if shared is None else SharedState(shared, None)
        if self._given is None and (names := sorted(self._optimizer.per_member)):
            cure = "pass shared_optimizer=, such as optax.adam(1e-3)"
            raise ValueError(f"Trainer.init: the members share parameters, but not the optimizer's {names}; {cure}.")
        return SharedState(shared, self._transform.init(shared.trainable))

    @property
    def _transform(self) -> Any:
        return self._optimizer.transform if self._given is None else self._given

    def update(self, trained: Trained, given: Contribution) -> Trained:
        """Return the shared parameters and their optimizer state after a step, from what all members contribute."""
        trainable, opt_state = trained

        def updated() -> Trained:
            mean = jax.tree.map(
                lambda g, x: (g / jnp.maximum(given.number, 1).astype(g.dtype)).astype(x.dtype),
                given.gradients,
                trainable,
            )
            updates, state = self._transform.update(mean, opt_state, trainable)
            return optax.apply_updates(trainable, updates), state

        return update_where(given.number > 0, updated, (trainable, opt_state))
