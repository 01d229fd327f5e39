"""`TrainState`: the state of training, as a pytree of arrays with the members along axis 0."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic

import jax

from ...transforms._models.split_model import M, Structure
from .._members.ensemble import Ensemble
from .._members.shared import SharedArrays
from .member_status import MemberStatus

# The arrays of one member, or of all members stacked: trainable, rest, optimizer state, member status.
Arrays = tuple[Any, Any, Any, MemberStatus]


# The shared arrays that train, and their optimizer state.
Trained = tuple[Any, Any]


@partial(jax.tree_util.register_dataclass, data_fields=["arrays", "opt_state"], meta_fields=[])
@dataclass(frozen=True)
class SharedState:
    """The arrays that all members share, and the optimizer state of those that train; None if none of them does."""

    arrays: SharedArrays
    opt_state: Any

    @property
    def trained(self) -> Trained:
        """Return what a step changes."""
        return self.arrays.trainable, self.opt_state

    @property
    def constant(self) -> SharedArrays:
        """Return what a step does not change."""
        return replace(self.arrays, trainable={})

    @property
    def trains(self) -> bool:
        """Return whether any of the arrays trains."""
        return bool(jax.tree.leaves(self.arrays.trainable))

    @staticmethod
    def of(trained: Trained, constant: SharedArrays) -> SharedState:
        """Return the state with both parts."""
        return SharedState(replace(constant, trainable=trained[0]), trained[1])


_FIELDS = ["ensemble", "opt_state", "step", "standing", "shared_opt_state"]


@partial(jax.tree_util.register_dataclass, data_fields=_FIELDS, meta_fields=[])
@dataclass(frozen=True, eq=False)
class TrainState(Generic[M]):
    """The state of training, as a pytree; create it with `Trainer.init`.

    Attributes:
      ensemble: the `Ensemble` in training.
      opt_state: the optax state, with the members along axis 0 of every array.
      step: the number of steps taken, an int32 scalar.
      standing: the `MemberStatus`: the members that train, and those that have stopped.
      shared_opt_state: the optax state of the parameters that all members share; None if none of these trains.

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
    shared_opt_state: Any = None

    @classmethod
    def _of_arrays(
        cls, structure: Structure[M], arrays: Arrays, step: jax.Array, shared: SharedState | None
    ) -> TrainState[M]:
        trainable, rest, opt_state, standing = arrays
        if shared is None:
            return cls(Ensemble(structure, trainable, rest), opt_state, step, standing)
        ensemble = Ensemble(structure, trainable, rest, shared.arrays)
        return cls(ensemble, opt_state, step, standing, shared.opt_state)

    def _with(self, arrays: Arrays, step: jax.Array, shared: SharedState | None) -> TrainState[M]:
        """Return the state with other arrays of the same structure and shapes."""
        trainable, rest, opt_state, standing = arrays
        ensemble = self.ensemble._with(trainable, rest, None if shared is None else shared.arrays)
        return TrainState(ensemble, opt_state, step, standing, None if shared is None else shared.opt_state)

    def _with_rows(self, arrays: Arrays) -> TrainState[M]:
        """Return the state with the arrays of other members."""
        return TrainState._of_arrays(self._structure, arrays, self.step, self._shared)

    def _arrays(self) -> Arrays:
        return self.ensemble.trainable, self.ensemble.rest, self.opt_state, self.standing

    def _member(self) -> Arrays:
        """Return the shapes and dtypes of one member's arrays."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self._arrays())

    @property
    def _shared(self) -> SharedState | None:
        shared = self.ensemble.shared
        return None if shared is None else SharedState(shared, self.shared_opt_state)

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
