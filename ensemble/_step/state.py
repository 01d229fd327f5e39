"""`TrainState`: the state of training, as a pytree of arrays with the members along axis 0."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import numpy as np

from ...transforms._core.compat import Tracer, eval_context
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


T = TypeVar("T")
# Held while a state gets its attributes, so that all threads read the same objects.
_reading = threading.Lock()
_FIELDS = ["ensemble", "opt_state", "step", "standing", "shared_opt_state", "last"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["trainable", "rest", "values", "waits", "in_the_run"],
    meta_fields=["criterion"],
)
@dataclass(frozen=True, eq=False)
class LastStep:
    """What a run goes on from, where the ensemble of its state has the best parameters: those of its last step.

    Attributes:
      trainable, rest: the arrays of the members, as those of an `Ensemble`.
      values: the value of each member at its best evaluation, float32 (size,), NaN if it has none.
      waits: the number of evaluations since then, int32 (size,).
      in_the_run: whether a member is still computed, bool (size,).
      criterion: what is best, such as "min of 'loss'"; "" if that is not known.
    """

    trainable: Any
    rest: Any
    values: np.ndarray
    waits: np.ndarray
    in_the_run: np.ndarray
    criterion: str = ""

    @classmethod
    def like(cls, trainable: Any, rest: Any, size: int) -> LastStep:
        """Return one with these arrays, for its shapes."""
        return cls(trainable, rest, np.zeros(size, np.float32), np.zeros(size, np.int32), np.zeros(size, bool))

    @property
    def watched(self) -> dict[str, np.ndarray]:
        """Return what is known of each member besides its arrays, by name."""
        return {"values": self.values, "waits": self.waits, "in_the_run": self.in_the_run}


@partial(jax.tree_util.register_dataclass, data_fields=_FIELDS, meta_fields=[])
@dataclass(frozen=True, eq=False)
class TrainState(Generic[M]):
    """The state of training, as a pytree; create it with `Trainer.init`.

    Attributes:
      ensemble: the `Ensemble` in training; after `fit` with `early_stopping`, each member with its best parameters.
      opt_state: the optax state, with the members along axis 0 of every array.
      step: the number of steps taken, an int32 scalar.
      standing: the `MemberStatus`: the members that train, and those that have stopped.
      shared_opt_state: the optax state of the parameters that all members share; None if none of these trains.
      last: the `LastStep` that `step` and `fit` go on from, if that is not `ensemble`; else None. To go on from
        `ensemble`, use `dataclasses.replace(state, last=None)`.

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
    last: LastStep | None = None

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
    def _of_packed(cls, held: Packed) -> TrainState[M]:
        """Return a state whose attributes are made when one of them is first read, which a loop of steps never does.

        They are made at once where the integers are traced, since inside a loop they would belong to the trace of that,
        and where other processes hold a part, since a single process may read them.
        """
        integers = held.arrays[-1]
        if isinstance(integers, Tracer) or not integers.is_fully_addressable:
            return cls._of_unpacked(held)
        state = object.__new__(cls)
        state.__dict__["_packed"] = held
        return state

    if not TYPE_CHECKING:  # which knows the attributes, and would take any other for one of them

        def __getattr__(self, name: str) -> Any:
            """Return an attribute that a packed state does not have yet."""
            held = self._held if name in _FIELDS else None
            if held is not None:  # else another thread has made them in the meantime
                made = _without_context(partial(TrainState._of_unpacked, held))
                with _reading:
                    if self._held is held:
                        # No longer packed, since the caller may change what it reads, such as hyperparameters.
                        object.__setattr__(self, "__dict__", made.__dict__)
            if name not in self.__dict__:  # also of an object that is being copied
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, for copies and pickles."""
        return {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def _of_unpacked(cls, held: Packed) -> TrainState[M]:
        (*arrays, trained), standing, step, constant = unpacked(held)
        shared = None if constant is None else SharedState.of(trained, constant)
        return cls._of_arrays(held.packing.structure, (*arrays, standing), step, shared)

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
        trainable, rest, opt_state, _ = self._arrays()
        changing = trainable, rest, opt_state, trained
        return packed(ensemble.structure, changing, self.standing, self.step, constant, integers)

    def _with_rows(self, arrays: Arrays) -> TrainState[M]:
        """Return the state with the arrays of other members."""
        return TrainState._of_arrays(self._structure, arrays, self.step, self._shared)

    def _arrays(self) -> Arrays:
        """Return the arrays that a step takes."""
        own = self.ensemble if self.last is None else self.last
        return own.trainable, own.rest, self.opt_state, self.standing

    def _going_on(self) -> TrainState[M]:
        """Return the state with the arrays that a step takes as its ensemble."""
        return self if self._held is not None or self.last is None else self._with_rows(self._arrays())

    def _like_with_best(self) -> TrainState[M]:
        """Return a state with the shapes of one that has best arrays and a last step."""
        own = self._arrays()[:2]
        return self._with_best(own, LastStep.like(*own, self._size))

    def _with_best(self, best: tuple[Any, Any], last: LastStep) -> TrainState[M]:
        """Return the state with the best arrays as its ensemble, and what to go on from beside it."""
        return replace(self, ensemble=self.ensemble._with(*best, self.ensemble.shared), last=last)

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


# The class has defaults as attributes, which would hide that a packed state does not have its own yet.
del TrainState.shared_opt_state, TrainState.last


def _without_context(make: Callable[[], T]) -> T:
    """Return what a function returns outside of the traces and the mesh in which this is called."""
    if jax.sharding.get_abstract_mesh().empty:
        with eval_context():
            return make()
    with ThreadPoolExecutor(1) as other:  # a mesh in context belongs to a thread
        return other.submit(make).result()


def check_state(api: str, state: Any) -> None:
    """Raise if `state` is not a training state."""
    if not isinstance(state, TrainState):
        raise TypeError(f"{api}: state must be a TrainState from Trainer.init, but got {type(state).__name__}.")
