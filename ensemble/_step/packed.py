"""`Packed`: the arrays of a training state as a flat list, which programs on one device take and return.

A call of a compiled program takes about a microsecond for each array in and out, and a tree of them takes longer than a
list. Steps of small networks are that short, and a loop of them reads nothing of a state but its arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef

from ...transforms._models.split_model import Structure
from .member_status import MemberStatus


class Packing(NamedTuple):
    """What a packed state has besides its arrays.

    Attributes:
      structure: the static part of the model.
      changing: the structure of what a step changes: parameters, other arrays, optimizer state and shared part.
      constant: the structure of what it does not: hyperparameters, schedules and shared part.
    """

    structure: Structure
    changing: PyTreeDef
    constant: PyTreeDef


class Packed(NamedTuple):
    """A packed state.

    Attributes:
      packing: its other contents.
      arrays: what a step changes; the last one has the integers: the number of steps, and of each member the last step,
        the reason why it stopped and the number of its restarts; int32 of shape (4, members).
      constant: what a step does not change.
    """

    packing: Packing
    arrays: list[Any]
    constant: list[Any]

    @property
    def size(self) -> int:
        """Return the number of members."""
        return self.arrays[-1].shape[1]


def packed(
    structure: Structure, changing: Any, standing: MemberStatus, step: jax.Array, constant: Any, integers: Any = None
) -> Packed:
    """Pack a state; `integers` are those of an earlier call with the same `standing` and `step`, if known."""
    arrays, of_changing = jax.tree.flatten(changing)
    others, of_constant = jax.tree.flatten((standing.hyperparams, standing.schedules, constant))
    if integers is None:
        integers = _together(step, standing.step, standing.stopped, standing.restarts)
    return Packed(Packing(structure, of_changing, of_constant), [*arrays, integers], others)


def unpacked(state: Packed, *, shapes: bool = False) -> tuple[Any, MemberStatus, jax.Array, Any]:
    """Return what a step changes, the status of the members, the number of steps, and what is constant.

    With `shapes`, the integers are only shapes and dtypes, which takes no call of a program.
    """
    packing, (*arrays, integers), others = state
    hyperparams, schedules, constant = jax.tree.unflatten(packing.constant, others)
    step, last, stopped, restarts = _shapes_apart(integers) if shapes else _apart(integers)
    standing = MemberStatus(last, stopped, restarts, hyperparams, schedules)
    return jax.tree.unflatten(packing.changing, arrays), standing, step, constant


@jax.jit
def _together(step: jax.Array, *of_members: jax.Array) -> jax.Array:
    # Not broadcast, since on a mesh with explicit axes all rows must be sharded like the arrays of the members.
    dtype = of_members[0].dtype
    return jnp.stack([0 * of_members[0] + step.astype(dtype), *(x.astype(dtype) for x in of_members)])


@jax.jit
def _apart(integers: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    # The steps of all members are equal; on such a mesh no single one of them can be taken.
    return integers[0].max(), integers[1], integers[2], integers[3]


def _shapes_apart(integers: jax.Array) -> tuple[Any, Any, Any, Any]:
    of_members = jax.ShapeDtypeStruct(integers.shape[1:], integers.dtype)
    return jax.ShapeDtypeStruct((), integers.dtype), of_members, of_members, of_members
