"""`TrainState`: what training changes; its arrays may be held for each member, or padded, until they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...transforms._core.compat import Tracer
from ...transforms._models.split_model import Structure
from .._members.ensemble import Ensemble
from .._members.rows import cut
from .._members.sharding import Layout
from .member_status import MemberStatus

# The arrays of one member, or of all of them stacked: trainable, rest, optimiser state, standing.
Arrays = tuple[Any, Any, Any, MemberStatus]


@partial(jax.tree_util.register_dataclass, data_fields=["ensemble", "opt_state", "step", "standing"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class TrainState:
    """What training changes, as a pytree; `Trainer.init` makes it.

    Attributes:
      ensemble: the `Ensemble`.
      opt_state: the optax state, with the members along axis 0 of every array.
      step: how many steps were taken, an int32 scalar.
      standing: which members train, and which have stopped: a `MemberStatus`.

    Examples:
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
    standing: MemberStatus
    # Its arrays in another form, where they are not attributes yet: padded, or of each member.
    _held: ClassVar[Apart | Padded | None] = None

    @classmethod
    def _of_arrays(cls, structure: Structure, arrays: Arrays, step: jax.Array) -> TrainState:
        """Return a state of stacked arrays."""
        trainable, rest, opt_state, standing = arrays
        return cls(Ensemble(structure, trainable, rest), opt_state, step, standing)

    @classmethod
    def _of_members(cls, structure: Structure, members: Sequence[Arrays], step: jax.Array) -> TrainState:
        """Return a state of members that are stacked when it is read: a loop over them would do so in vain."""
        return cls._of_held(Apart(structure, members), step)

    @classmethod
    def _of_padded(cls, structure: Structure, arrays: Arrays, size: int, step: jax.Array) -> TrainState:
        """Return a state of stacked arrays with rows that pad them, which are cut off when it is read."""
        if jax.tree.leaves(arrays)[0].shape[0] == size:
            return cls._of_arrays(structure, arrays, step)
        return cls._of_held(Padded(structure, arrays, size), step)

    @classmethod
    def _of_held(cls, held: Apart | Padded, step: jax.Array) -> TrainState:
        # Without `__init__`: the other attributes are missing until `__getattr__` fills them in, which a frozen
        # dataclass allows only by way of `vars`.
        state = object.__new__(cls)
        vars(state).update(step=step, _held=held)
        return state

    def _arrays(self) -> Arrays:
        """Return its arrays, stacked."""
        return self.ensemble.trainable, self.ensemble.rest, self.opt_state, self.standing

    def _rows(self) -> Arrays:
        """Return its arrays, stacked, perhaps with rows that pad them after those of the ensemble."""
        return self._held.arrays if isinstance(self._held, Padded) else self._arrays()

    def _members(self) -> Sequence[Arrays]:
        """Return the arrays of each member."""
        return self._held.members if isinstance(self._held, Apart) else _unstack(self._arrays(), len(self.ensemble))

    def _spread(self, layout: Layout) -> Arrays:
        """Return its arrays, stacked and padded, on the devices of a layout."""
        _, size = self._structure_and_size()
        rows = self._rows()
        if len(jax.tree.leaves(rows)[0]) not in (size, layout.padded(size)):  # of another layout
            rows = self._arrays()
        return layout.place(rows, len(jax.tree.leaves(rows)[0]))

    def _structure_and_size(self) -> tuple[Structure, int]:
        """Return the static part that the members share, and their number."""
        if self._held is not None:
            return self._held.structure, self._held.size
        return self.ensemble.structure, len(self.ensemble)

    def _one(self) -> Arrays:
        """Return the shapes and dtypes of one member's arrays."""
        if isinstance(self._held, Apart):
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._held.members[0])
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self._rows())

    @cached_property
    def _kind(self) -> Any:
        """Return a hashable value that differs between states for which other programs are compiled."""
        return self._structure_and_size(), kind_of(self._one())

    def _after(self, state: TrainState) -> TrainState:
        """Return this state, which a step made from another, with the kind of that one: a step does not change it."""
        if "_kind" in vars(state):
            vars(self)["_kind"] = vars(state)["_kind"]
        return self

    def _contents(self) -> Any:
        """Return its arrays in the form in which they are held, as a pytree."""
        return self._held or self._arrays(), self.step

    def _copy(self) -> TrainState:
        """Return a copy that is held in the same form."""
        if self._held is None:
            return jax.tree.map(jnp.copy, self)
        return TrainState._of_held(*jax.tree.map(jnp.copy, (self._held, self.step)))

    def _is_traced(self) -> bool:
        """Return whether its arrays belong to a trace."""
        # Those of a loop never do, and are many: N times as many arrays as a stacked state has.
        return not isinstance(self._held, Apart) and any(
            isinstance(x, Tracer) for x in jax.tree.leaves(self._contents())
        )

    def __getattr__(self, name: str) -> Any:
        """Return the stacked arrays of a state that holds them in another form: Python calls this for missing ones."""
        held = vars(self).get("_held")
        if name not in ("ensemble", "opt_state", "standing") or held is None:
            raise AttributeError(f"TrainState has no attribute {name!r}.")
        # The value of the state does not change: only the form in which it is held.
        vars(self).update(vars(TrainState._of_arrays(held.structure, held.stacked(), self.step)))
        if isinstance(held, Apart):  # a step on a mesh goes on from padded arrays, so those are kept
            vars(self).pop("_held", None)
        return vars(self)[name]


@partial(jax.tree_util.register_dataclass, data_fields=["members"], meta_fields=["structure"])
@dataclass(frozen=True)
class Apart:
    """The arrays of each member, not stacked."""

    structure: Structure
    members: Sequence[Arrays]

    @property
    def size(self) -> int:
        return len(self.members)

    def stacked(self) -> Arrays:
        return _stack(self.members)


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["structure", "size"])
@dataclass(frozen=True)
class Padded:
    """Stacked arrays of `size` members, padded so that each of many devices has the same number."""

    structure: Structure
    arrays: Arrays
    size: int

    def stacked(self) -> Arrays:
        with jax.ensure_compile_time_eval():
            return cut(self.arrays, self.size)


def check_state(api: str, state: Any) -> None:
    """Raise if `state` is not a training state."""
    if not isinstance(state, TrainState):
        raise TypeError(f"{api}: state must be a TrainState from Trainer.init, but got {type(state).__name__}.")


def kind_of(tree: Any) -> Any:
    """Return the structure of a pytree, and the shapes and dtypes of its arrays; hashable."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((x.shape, x.dtype) if hasattr(x, "dtype") else type(x) for x in leaves)


def _stack(members: Sequence[Arrays]) -> Arrays:
    """Return the members' arrays as one."""
    # One at a time into an array that is donated: one compiled program for any number of members, and no second copy.
    with jax.ensure_compile_time_eval():  # read within a trace, the state would else be filled with that trace's arrays
        stacked = _room(members[0], len(members))
        for i, member in enumerate(members):
            stacked = _put(stacked, member, np.uint32(i))
    return stacked


def _unstack(arrays: Arrays, size: int) -> Sequence[Arrays]:
    """Return the arrays of each member, likewise by one program for all of them."""
    return [_take(arrays, np.uint32(i)) for i in range(size)]


@partial(jax.jit, static_argnums=(1,))
def _room(member: Arrays, size: int) -> Arrays:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *x.shape)), member)


@partial(jax.jit, donate_argnums=(0,))
def _put(stacked: Arrays, member: Arrays, i: jax.Array) -> Arrays:
    return jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, i, 0), stacked, member)


@jax.jit
def _take(arrays: Arrays, i: jax.Array) -> Arrays:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), arrays)
