"""First derivatives along many directions, stored compactly while each direction moves one position of an axis.

The derivatives of the coordinates themselves are an identity matrix. As long as a program treats the positions of an
axis separately (elementwise functions, one layer applied to each particle), a direction that moves one position changes
nothing at the others. Then the directions of all positions share one array (k, *shape), whose part at position j holds
those that move j: direction (j, r), number j * k + r, is row r there, and zero elsewhere. An operation that mixes the
positions needs them separately. If it is a product that sums over the axis, each direction has only one term of the
sum, so that the first layer of a network costs no product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.compat import JaxprEqn
from .._core.jaxpr import CALLS, ELEMENTWISE, aval, with_inner


class Slopes(NamedTuple):
    """Derivatives of a value along many directions.

    Attributes:
      array: shape (directions, *shape); or (k, *shape), with directions for each position of an axis.
      axis: the axis of the value whose positions the directions move; None if each direction has a row of its own.
    """

    array: jax.Array
    axis: int | None = None

    def expanded(self) -> Slopes:
        """Return the derivatives with a row for each direction."""
        if self.axis is None:
            return self
        size = self.array.shape[self.axis + 1]
        same = jnp.eye(size, dtype=bool).reshape(
            size, 1, *(size if i == self.axis else 1 for i in range(self.array.ndim - 1))
        )
        found = jnp.where(same, self.array, jnp.zeros((), self.array.dtype))
        return Slopes(found.reshape(size * len(self.array), *self.array.shape[1:]))

    def grouped(self, count: int) -> Slopes:
        """Return the derivatives with as many groups of positions of axis 0 as positions; each moves with its group."""
        k, size, *rest = self.array.shape
        group = size // count
        same = jnp.eye(group, dtype=bool).reshape(group, 1, 1, group, *[1] * len(rest))
        found = jnp.where(same, self.array.reshape(k, count, group, *rest), jnp.zeros((), self.array.dtype))
        return Slopes(found.reshape(group * k, size, *rest), 0)


def of_coordinates(leaf: jax.Array) -> Slopes:
    """Return the derivatives of an array along its own elements."""
    if leaf.ndim == 0 or leaf.size == 0:
        return Slopes(jnp.eye(leaf.size, dtype=leaf.dtype).reshape(leaf.size, *leaf.shape))
    k = leaf.size // leaf.shape[0]
    own = jnp.eye(k, dtype=leaf.dtype).reshape(k, 1, *leaf.shape[1:])
    return Slopes(jnp.broadcast_to(own, (k, *leaf.shape)), 0)


def aligned(eqn: JaxprEqn, slopes: list[Slopes | None]) -> tuple[list[Slopes | None], int | None]:
    """Return the derivatives of an operation's operands in one form, and the axis of its results in that form.

    Args:
      eqn: the operation.
      slopes: the derivatives of each operand; None for a constant.
    """
    moving = [x for x in slopes if x is not None]
    kept = {(x.axis, len(x.array)) for x in moving}
    if len(kept) == 1 and moving[0].axis is not None:
        given = slopes
        if eqn.primitive.name == "reshape" and moving[0].axis == 0:
            given = [_before_reshape(eqn, moving[0])]
        axis = _axis_of_results(eqn, [None if x is None else x.axis for x in given])
        if axis is not None:
            return given, axis
    return [None if x is None else x.expanded() for x in slopes], None


def _before_reshape(eqn: JaxprEqn, slopes: Slopes) -> Slopes:
    """Return the derivatives with the positions grouped as the result's axis 0 has them, if it has."""
    size, sizes = aval(eqn.invars[0]).shape[0], aval(eqn.outvars[0]).shape
    return slopes.grouped(sizes[0]) if sizes and sizes[0] < size and size % max(1, sizes[0]) == 0 else slopes


def _axis_of_results(eqn: JaxprEqn, axes: list[int | None]) -> int | None:
    """Return the axis of the results along which they depend on one position each; None if positions are mixed."""
    name, params = eqn.primitive.name, eqn.params
    shape, out = aval(eqn.invars[0]).shape, aval(eqn.outvars[0]).shape
    (axis, *_) = (x for x in axes if x is not None)
    if _is_elementwise(eqn):
        shapes = {aval(x).shape for x, axis in zip(eqn.invars, axes, strict=True) if axis is not None}
        return axis if shapes == {out} else None
    if name == "reshape":
        return 0 if axis == 0 and out and shape[0] % max(1, out[0]) == 0 and out[0] <= shape[0] else None
    if name == "transpose":
        return list(params["permutation"]).index(axis)
    if name == "broadcast_in_dim":
        found = params["broadcast_dimensions"][axis]
        return found if out[found] == shape[axis] else None
    if name == "squeeze":
        removed = [i % len(shape) for i in params["dimensions"]]
        return None if axis in removed else axis - sum(i < axis for i in removed)
    if name == "reduce_sum":
        return None if axis in params["axes"] else axis - sum(i < axis for i in params["axes"])
    if name == "dot_general":
        return _axis_of_product(eqn, axes)
    return None


def _is_elementwise(eqn: JaxprEqn) -> bool:
    """Return whether each element of the results depends on the same element of the operands."""
    shapes = {aval(x).shape for x in eqn.outvars}
    inner = [x for x in with_inner([eqn]) if x.primitive.name not in CALLS]
    return len(shapes) == 1 and all(
        x.primitive.name in ELEMENTWISE and {aval(y).shape for y in x.outvars} == shapes for x in inner
    )


def _axis_of_product(eqn: JaxprEqn, axes: list[int | None]) -> int | None:
    """Return the axis of a product's result that is that axis of its operand; None if it is summed over."""
    contracted, batch = eqn.params["dimension_numbers"]
    sides = [i for i, axis in enumerate(axes) if axis is not None]
    if len(sides) == 2:  # the positions of both must be the same
        places: list[dict[Any, int]] = [{axis: k for k, axis in enumerate(batch[i])} for i in sides]
        left, right = (place.get(axes[i]) for place, i in zip(places, sides, strict=True))
        return left if left == right else None
    (side,) = sides
    axis, shape = axes[side], aval(eqn.invars[side]).shape
    if axis is None or axis in contracted[side]:
        return None
    if axis in batch[side]:
        return list(batch[side]).index(axis)
    free = [i for i in range(len(shape)) if i not in (*contracted[side], *batch[side])]
    before = len(aval(eqn.invars[0]).shape) - len(contracted[0]) if side == 1 else len(batch[0])
    return before + free.index(axis)


def product_over_positions(eqn: JaxprEqn, values: list[Any], slopes: list[Slopes | None]) -> Slopes | None:
    """Return the derivatives of a product that sums over the positions of its only moving operand; None for any other.

    Direction (j, r) moves position j alone, so that its derivative is the term of the sum at j.
    """
    moving = [i for i, x in enumerate(slopes) if x is not None]
    if eqn.primitive.name != "dot_general" or len(moving) != 1:
        return None
    (side,) = moving
    moved = slopes[side]
    contracted, batch = eqn.params["dimension_numbers"]
    if moved is None or moved.axis is None or moved.axis not in contracted[side]:
        return None
    place = list(contracted[side]).index(moved.axis)
    operands = list(values)
    # The positions become an axis that both sides share, in front, and the rows of a position a free axis of one side.
    operands[side] = jnp.moveaxis(moved.array, moved.axis + 1, 0)
    operands[1 - side] = jnp.moveaxis(values[1 - side], contracted[1 - side][place], 0)

    def shifted(axes: Any, i: int, first: int) -> list[int]:
        """Return axes of side i after its summed axis has moved to the front, with `first` axes in front."""
        gone = contracted[i][place]
        return [axis - (axis > gone) + first for axis in axes if axis != gone]

    first = [2 if i == side else 1 for i in range(2)]
    summed = [shifted(contracted[i], i, first[i]) for i in range(2)]
    shared = [[0, *shifted(batch[i], i, first[i])] for i in range(2)]
    numbers = (summed[0], summed[1]), (shared[0], shared[1])
    options = {name: eqn.params[name] for name in ("precision", "preferred_element_type")}
    found = lax.dot_general(operands[0], operands[1], numbers, **options)
    # Its axes: positions, batch, the free axes of the left side, those of the right side; rows are the first free axis.
    rows = 1 + len(batch[0])
    if side == 1:
        rows += len(aval(eqn.invars[0]).shape) - len(contracted[0]) - len(batch[0])
    found = jnp.moveaxis(found, rows, 1)
    return Slopes(found.reshape(-1, *found.shape[2:]))
