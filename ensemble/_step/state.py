"""`TrainState`: the state of training, as a pytree of arrays with the members along axis 0."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

import jax

from ...transforms._models.split_model import M, Structure
from .._members.ensemble import Ensemble
from .member_status import MemberStatus

# The arrays of one member, or of all members stacked: trainable, rest, optimizer state, member status.
Arrays = tuple[Any, Any, Any, MemberStatus]


@partial(jax.tree_util.register_dataclass, data_fields=["ensemble", "opt_state", "step", "standing"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class TrainState(Generic[M]):
    """The state of training, as a pytree; create it with `Trainer.init`.

    Attributes:
      ensemble: the `Ensemble` in training.
      opt_state: the optax state, with the members along axis 0 of every array.
      step: the number of steps taken, an int32 scalar.
      standing: the `MemberStatus`: the members that train, and those that have stopped.

    Examples:
      >>> import optax
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, Trainer
      >>> trainer = Trainer(lambda model, x: model(x).sum(), optax.sgd(0.1))
      >>> state = trainer.init(Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 2, seed=0))
      >>> int(state.step), len(state.ensemble)
      (0, 2)
    """

    ensemble: Ensemble[M]
    opt_state: Any
    step: jax.Array
    standing: MemberStatus

    @classmethod
    def _of_arrays(cls, structure: Structure[M], arrays: Arrays, step: jax.Array) -> TrainState[M]:
        trainable, rest, opt_state, standing = arrays
        return cls(Ensemble(structure, trainable, rest), opt_state, step, standing)

    def _with(self, arrays: Arrays, step: jax.Array) -> TrainState[M]:
        """Return the state with other arrays of the same structure and shapes."""
        trainable, rest, opt_state, standing = arrays
        return TrainState(self.ensemble._with(trainable, rest), opt_state, step, standing)

    def _arrays(self) -> Arrays:
        return self.ensemble.trainable, self.ensemble.rest, self.opt_state, self.standing

    def _member(self) -> Arrays:
        """Return the shapes and dtypes of one member's arrays."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self._arrays())

    @property
    def _structure(self) -> Structure[M]:
        return self.ensemble.structure

    @property
    def _size(self) -> int:
        """Return the number of members."""
        return self.standing.step.shape[0]


def check_state(api: str, state: Any) -> None:
    """Raise if `state` is not a training state."""
    if not isinstance(state, TrainState):
        raise TypeError(f"{api}: state must be a TrainState from Trainer.init, but got {type(state).__name__}.")
