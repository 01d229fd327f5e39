"""`TrainState`: the state of training, as a pytree of arrays with the members along axis 0."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

import jax

from ...transforms._core.compat import Tracer
from ...transforms._models.split_model import M, Structure
from .._members.ensemble import Ensemble
from .._members.shared import SharedArrays
from .member_status import MemberStatus
from .packed import Packed, packed, unpacked

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


# Held while a state is unpacked, so that all threads get the same objects.
_reading = threading.RLock()
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

    @classmethod
    def _of_packed(cls, packed: Packed) -> TrainState[M]:
        """Return a state whose attributes are made when one of them is first read, which a loop of steps never does.

        Where the integers are traced they are made at once: if they were first read inside a loop, they would belong to
        the trace of that.
        """
        if isinstance(packed.arrays[-1], Tracer):
            return cls._of_unpacked(packed)
        state = object.__new__(cls)
        state.__dict__["_packed"] = packed
        return state

    if not TYPE_CHECKING:  # which knows the attributes, and would take any other for one of them

        def __getattr__(self, name: str) -> Any:
            """Return an attribute that a packed state does not have yet."""
            if name not in _FIELDS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            with _reading:
                held = self._held
                if held is not None:  # else another thread has made it in the meantime
                    with jax.ensure_compile_time_eval():  # it may outlive the trace in which it is first read
                        made = TrainState._of_unpacked(held)
                    # No longer packed, since the caller may change what it reads, such as a dict of hyperparameters.
                    self.__dict__.update(made.__dict__)
                    self.__dict__.pop("_packed", None)
            if name not in self.__dict__:  # of an object that is being copied
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return self.__dict__[name]

    @classmethod
    def _of_unpacked(cls, packed: Packed) -> TrainState[M]:
        (*arrays, trained), standing, step, constant = unpacked(packed)
        shared = None if constant is None else SharedState.of(trained, constant)
        return cls._of_arrays(packed.packing.structure, (*arrays, standing), step, shared)

    @property
    def _held(self) -> Packed | None:
        """Return the packed state, as long as no attribute was read."""
        return self.__dict__.get("_packed")

    def _pack(self, integers: Any = None) -> Packed:
        """Return the packed state; `integers` are those that it had when it was packed before, if known."""
        if (held := self._held) is not None:
            return held
        ensemble, shared = self.ensemble, self._shared
        trained, constant = (None, None) if shared is None else (shared.trained, shared.constant)
        changing = ensemble.trainable, ensemble.rest, self.opt_state, trained
        return packed(ensemble.structure, changing, self.standing, self.step, constant, integers)

    def _with_rows(self, arrays: Arrays) -> TrainState[M]:
        """Return the state with the arrays of other members."""
        return TrainState._of_arrays(self._structure, arrays, self.step, self._shared)

    def _arrays(self) -> Arrays:
        return self.ensemble.trainable, self.ensemble.rest, self.opt_state, self.standing

    def _member(self) -> Arrays:
        """Return the shapes and dtypes of one member's arrays."""
        if (held := self._held) is None:
            arrays = self._arrays()
        else:
            (*own, _), standing, _, _ = unpacked(held, shapes=True)
            arrays = (*own, standing)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), arrays)

    @property
    def _shared(self) -> SharedState | None:
        if (held := self._held) is not None:
            (*_, trained), _, _, constant = unpacked(held, shapes=True)
            return None if constant is None else SharedState.of(trained, constant)
        shared = self.ensemble.shared
        return None if shared is None else SharedState(shared, self.shared_opt_state)

    @property
    def _structure(self) -> Structure[M]:
        held = self._held
        return self.ensemble.structure if held is None else held.packing.structure

    @property
    def _size(self) -> int:
        """Return the number of members."""
        held = self._held
        return self.standing.step.shape[0] if held is None else held.size


# The class has the default as an attribute, which would hide that a packed state does not have its own yet.
del TrainState.shared_opt_state


def check_state(api: str, state: Any) -> None:
    """Raise if `state` is not a training state."""
    if not isinstance(state, TrainState):
        raise TypeError(f"{api}: state must be a TrainState from Trainer.init, but got {type(state).__name__}.")
