"""The forms in which a run holds its state between steps, and `stacked`, which converts them to a `TrainState`.

A loop over members produces separate arrays for each member, and a mesh that does not divide the number of members
needs padding. Stacking, or removing the padding, after each step would copy the state or send it to every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...transforms._models.split_model import Structure
from .._members.sharding import Layout, constrain, pad, within
from .._step.state import Arrays, SharedState, TrainState


@partial(jax.tree_util.register_dataclass, data_fields=["members", "step", "_shared"], meta_fields=["_structure"])
@dataclass(frozen=True)
class Unstacked:
    """A state with separate arrays for each member."""

    _structure: Structure
    members: Sequence[Arrays]
    step: jax.Array
    _shared: SharedState | None

    @property
    def _size(self) -> int:
        return len(self.members)

    def _member(self) -> Arrays:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.members[0])


_STATIC = ["_structure", "_size"]


@partial(jax.tree_util.register_dataclass, data_fields=["arrays", "step", "_shared"], meta_fields=_STATIC)
@dataclass(frozen=True)
class Padded:
    """A state of `_size` members, padded with copies of the last one, so that each device has the same number."""

    _structure: Structure
    _size: int
    arrays: Arrays
    step: jax.Array
    _shared: SharedState | None

    def _member(self) -> Arrays:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.arrays)


State = TrainState | Unstacked | Padded


def stacked(state: State) -> TrainState:
    """Convert a state to a `TrainState`."""
    if isinstance(state, TrainState):
        return state
    if isinstance(state, Padded):
        arrays = without_padding(state.arrays, state._size)
        return TrainState._of_arrays(state._structure, arrays, state.step, state._shared)
    # One member at a time into donated arrays: one compiled program for any number of members, and no second copy.
    arrays = _room(state.members[0], state._size)
    for i, member in enumerate(state.members):
        arrays = put(arrays, member, np.uint32(i))
    return TrainState._of_arrays(state._structure, arrays, state.step, state._shared)


def arrays_of(state: State) -> list[Any]:
    """Return the arrays that a state consists of; does not unpack it, which is a call of a program."""
    held = state._held if isinstance(state, TrainState) else None
    return jax.tree.leaves(state) if held is None else [*held.arrays, *held.constant]


def unstacked(state: State) -> Unstacked:
    """Convert a state to separate arrays for each member; copies, unless it has that form already."""
    if isinstance(state, Unstacked):
        return state
    # One program for any number of members; splitting all arrays at once would compile one for each number.
    arrays = stacked(state)._arrays()
    members = [take(arrays, np.uint32(i)) for i in range(state._size)]
    return Unstacked(state._structure, members, state.step, state._shared)


def padded(state: State, layout: Layout) -> Padded:
    """Return a state with its members on the devices of a layout, padded if necessary."""
    if isinstance(state, Padded) and Layout.around(state.arrays) == layout:
        return state
    arrays, size = layout.place(stacked(state)._arrays()), state._size
    if size % layout.devices:
        # Copies of a member instead of zeros: the loss of zeros may not be finite, and `jax_debug_nans` would raise for
        # a member that does not exist.
        arrays = _pad(arrays, layout, layout.padded(size) - size)
    return Padded(state._structure, size, arrays, layout.copy(state.step), layout.place_shared(state._shared))


def without_padding(rows: Any, size: int) -> Any:
    """Return the rows of the first `size` members, without padding."""
    if len(jax.tree.leaves(rows)[0]) == size:
        return rows
    layout = Layout.around(rows)
    with within(layout):
        return _cut(rows, size, layout)


@partial(jax.jit, static_argnums=1)
def _room(member: Any, size: int) -> Any:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *x.shape)), member)


@partial(jax.jit, donate_argnums=0)
def put(arrays: Any, member: Any, i: jax.Array) -> Any:
    """Return stacked arrays with the arrays of member `i` replaced."""
    return jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, i, 0), arrays, member)


@jax.jit
def take(arrays: Any, i: jax.Array) -> Any:
    """Return the arrays of member `i` of stacked arrays."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), arrays)


@partial(jax.jit, static_argnums=(1, 2))
def _pad(arrays: Any, layout: Layout, more: int) -> Any:
    return constrain(jax.tree.map(lambda x: pad(x, 0, more), arrays), layout)


@partial(jax.jit, static_argnums=(1, 2))
def _cut(arrays: Any, size: int, layout: Layout | None) -> Any:
    return constrain(jax.tree.map(lambda x: x[:size], arrays), layout)
