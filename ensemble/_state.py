"""`TrainState`: what training changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..transforms._compat import Tracer
from ..transforms._model import Structure
from ._ensemble import Ensemble
from ._strategy import stack, unstack

# The arrays of one member, or of all of them stacked: trainable, rest, optimiser state.
Arrays = tuple[Any, Any, Any]


@partial(jax.tree_util.register_dataclass, data_fields=["ensemble", "opt_state", "step"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class TrainState:
    """What training changes, as a pytree; `Trainer.init` makes it.

    Attributes:
      ensemble: the `Ensemble`.
      opt_state: the optax state, with the members along axis 0 of every array.
      step: how many steps were taken, an int32 scalar.

    Example:
      >>> import optax
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, Trainer
      >>> trainer = Trainer(lambda model, x: model(x).sum(), optax.sgd(0.1))
      >>> state = trainer.init(Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 2, seed=0))
      >>> int(state.step), len(state.ensemble)
      (0, 2)
    """

    ensemble: Ensemble
    opt_state: Any
    step: jax.Array

    @classmethod
    def of_members(cls, structure: Structure, members: Sequence[Arrays], step: jax.Array) -> TrainState:
        """A state of members that are not stacked until somebody looks: a loop over them would stack them in vain."""
        state = object.__new__(cls)
        vars(state).update(step=step, _members=(structure, members))
        return state

    @classmethod
    def of_arrays(cls, structure: Structure, arrays: Arrays, step: jax.Array) -> TrainState:
        """A state of stacked arrays."""
        trainable, rest, opt_state = arrays
        return cls(Ensemble(structure, trainable, rest), opt_state, step)

    def arrays(self) -> Arrays:
        """Its arrays, stacked."""
        return self.ensemble.trainable, self.ensemble.rest, self.opt_state

    def members(self) -> Sequence[Arrays]:
        """The arrays of each member."""
        if "_members" in vars(self):
            return vars(self)["_members"][1]
        return _unstack(self.arrays(), len(self.ensemble))

    def structure_and_size(self) -> tuple[Structure, int]:
        """The static part that the members share, and how many there are."""
        if "_members" in vars(self):
            structure, members = vars(self)["_members"]
            return structure, len(members)
        return self.ensemble.structure, len(self.ensemble)

    def one(self) -> Arrays:
        """The shapes and dtypes of one member's arrays."""
        if "_members" in vars(self):
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), vars(self)["_members"][1][0])
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.arrays())

    def contents(self) -> Any:
        """Its arrays as they are, stacked or not."""
        return vars(self)["_members"][1] if "_members" in vars(self) else (self.arrays(), self.step)

    def unstacked(self) -> TrainState:
        """The same state of members that are not stacked."""
        if "_members" in vars(self):
            return self
        return TrainState.of_members(self.ensemble.structure, self.members(), self.step)

    def copy(self) -> TrainState:
        """A copy that is stored in the same way."""
        if "_members" in vars(self):
            structure, members = vars(self)["_members"]
            return TrainState.of_members(structure, jax.tree.map(jnp.copy, members), jnp.copy(self.step))
        return jax.tree.map(jnp.copy, self)

    def is_traced(self) -> bool:
        """Whether its arrays belong to a trace; those of a loop never do."""
        return "_members" not in vars(self) and any(isinstance(x, Tracer) for x in jax.tree.leaves(self))

    def __getattr__(self, name: str) -> Any:
        # Python asks here for what it did not find: the stacked arrays of a state made `of_members`.
        if name not in ("ensemble", "opt_state") or "_members" not in vars(self):
            raise AttributeError(f"TrainState has no attribute {name!r}.")
        structure, members = vars(self)["_members"]
        stacked = TrainState.of_arrays(structure, _stack(members), self.step)
        vars(self).update(vars(stacked))
        vars(self).pop("_members", None)
        return vars(self)[name]


_stack = jax.jit(stack)
_unstack = jax.jit(unstack, static_argnums=(1,))
