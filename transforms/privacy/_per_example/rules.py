"""Compute each example's gradient form at a use, by a rule for the operation or by the operation's own derivative.

A rule takes a use, its operand, the values of the other operands and the cotangents of the results. It returns a
gradient form, or None if it does not support the options of the operation. All arrays except the operand have leading
axes for the examples and the loops, which `_loops_in_order` combines to three: (batch, stack, iterations, ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._core.jaxpr import aval, evaluate
from .gradient_forms import Dense, GradientForm, OuterProduct, RowSparse
from .parameter_uses import ParameterUse

# The input is copied at most so often, or more often for few channels, up to so many numbers for each position.
_MOST_COPIES, _MOST_COPIES_OF_FEW, _FEW = 8, 32, 128


def forms_at(
    uses: list[ParameterUse],
    operands: list[jax.Array],
    values: list[Any],
    cotangents: list[jax.Array],
    spmd_axis_name: str | None = None,
    *,
    factors: bool = False,
) -> list[GradientForm]:
    """Return each example's gradients of the parameter operands of one operation.

    Args:
      uses: all uses of the operation.
      operands: their parameter operands, with leading axes for stacked loops.
      values: the other operands, with leading axes for the examples and for all loops; None for parameter operands.
      cotangents: the cotangents of its outputs, with the same leading axes.
      spmd_axis_name: as for `jax.vmap`.
      factors: whether outer products are returned as factors, even if these have more numbers than the gradients, and
        rows that are out of range as a row behind the last one.
    """
    if len(uses) == 1:
        rule = _RULES.get((uses[0].eqn.primitive.name, uses[0].operand))
        if factors and rule in (_convolution, _gather):
            rule = partial(rule, factors=True)
        found = rule(uses[0], operands[0], values, cotangents) if rule else None
        if found is not None:
            return [found]
    return _by_derivative(uses, operands, values, cotangents, spmd_axis_name)


def _by_derivative(
    uses: list[ParameterUse],
    operands: list[jax.Array],
    values: list[Any],
    cotangents: list[jax.Array],
    spmd_axis_name: str | None,
) -> list[GradientForm]:
    """Return each example's gradients by the operation's own derivative, which works for any operation."""

    def outputs(operands: list[Any], values: list[Any]) -> list[Any]:
        filled = list(values)
        for use, operand in zip(uses, operands, strict=True):
            filled[use.operand] = operand
        return [out for out in evaluate(uses[0].eqn, *filled) if jnp.issubdtype(out.dtype, jnp.inexact)]

    mapped: Callable[..., Any] = outputs
    for loop in reversed(uses[0].loops):
        mapped = jax.vmap(mapped, ([0 if loop.number in use.value.stacked else None for use in uses], 0))

    def of_example(values: list[Any], cotangents: list[Any]) -> Any:
        """Return one example's gradients of the operands."""
        return jax.vjp(lambda operands: mapped(operands, values), operands)[1](cotangents)[0]

    return [Dense(x) for x in jax.vmap(of_example, spmd_axis_name=spmd_axis_name)(values, cotangents)]


def _product(use: ParameterUse, operand: jax.Array, values: list[Any], cotangents: list[jax.Array]) -> OuterProduct:
    """Handle a `dot_general`: the gradient is a product over positions, the free axes of the other operand."""
    (contract, batch), (other_contract, other_batch) = _dimensions(use)
    shape = use.aval.shape
    (value,) = (x for x in values if x is not None)
    (cotangent,) = cotangents
    if jnp.dtype(value.dtype).itemsize == 1 or not jnp.issubdtype(value.dtype, jnp.inexact):
        value = value.astype(cotangent.dtype)  # JAX multiplies integers by floats, for example
    value, cotangent = _loops_in_order(use, value), _loops_in_order(use, cotangent)
    free, positions = sides_of_product(use)[2], _rest(value.ndim - 3, other_contract, other_batch)
    # The axes of the output: batch axes, free axes of the left operand, free axes of the right operand.
    output = range(len(batch), cotangent.ndim - 3)
    split = len(positions) if use.operand == 1 else len(free)
    rows, columns = (output[:split], output[split:]) if use.operand == 1 else (output[split:], output[:split])
    left = _as_matrices(value, other_batch, positions, other_contract)
    right = _as_matrices(cotangent, range(len(batch)), rows, columns)
    order = (*batch, *contract, *free)

    def restore(gradient: jax.Array) -> jax.Array:
        arranged = gradient.reshape(value.shape[1], *(shape[axis] for axis in order))
        return arranged.transpose(0, *(order.index(axis) + 1 for axis in range(len(shape)))).reshape(operand.shape)

    return OuterProduct(left, right, restore, sides_of_product(use))


def sides_of_product(use: ParameterUse) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the axes of the parameter operand of a `dot_general` that are mapped, contracted and free."""
    (contract, batch), _ = _dimensions(use)
    return tuple(batch), tuple(contract), tuple(_rest(len(use.aval.shape), contract, batch))


def _dimensions(use: ParameterUse) -> list[tuple[Any, Any]]:
    """Return the contracted and the mapped axes of the parameter operand of a `dot_general`, then of the other one."""
    sides = list(zip(*use.eqn.params["dimension_numbers"], strict=True))
    return [sides[use.operand], sides[1 - use.operand]]


def _convolution(
    use: ParameterUse, operand: jax.Array, values: list[Any], cotangents: list[jax.Array], *, factors: bool = False
) -> GradientForm | None:
    """Handle the kernel of a `conv_general_dilated`: products over output positions.

    The inputs that are multiplied by one kernel element are a strided slice of the input. The slices along the last
    axes of the window are stacked, which gives one product for each place along the others. If there are few positions,
    all slices are one factor instead.
    """
    params = use.eqn.params
    if params["batch_group_count"] != 1:
        return None
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    shape = use.aval.shape
    places = [shape[axis] for axis in numbers.rhs_spec[2:]]  # the specs list (samples or outputs, channels, *space)
    outputs, inputs = shape[numbers.rhs_spec[0]] // groups, shape[numbers.rhs_spec[1]]
    value, cotangent = _loops_in_order(use, values[0]), _loops_in_order(use, cotangents[0])

    # (batch, stack, groups, channels, iterations, samples, *space): with positions last, a product needs no transpose.
    def channels_first(x: jax.Array, spec: tuple[int, ...]) -> jax.Array:
        samples, channels, *space = (axis + 3 for axis in spec)
        x = x.transpose(0, 1, channels, 2, samples, *space)
        return x.reshape(*x.shape[:2], groups, x.shape[2] // groups, *x.shape[3:])

    value, cotangent = channels_first(value, numbers.lhs_spec), channels_first(cotangent, numbers.out_spec)
    stack, space, strides = cotangent.shape[1], cotangent.shape[6:], params["window_strides"]
    # `lhs_dilation` inserts zeros between the inputs, which is interior padding in `lax.pad`.
    padding = [(low, high, gap - 1) for (low, high), gap in zip(params["padding"], params["lhs_dilation"], strict=True)]
    padded = lax.pad(value, jnp.zeros((), value.dtype), [(0, 0, 0)] * 6 + padding)

    def at(x: jax.Array, place: int, i: int) -> jax.Array:
        """Slice the inputs of a place along window axis `i`: output t uses input t * stride + place * dilation."""
        begin, last = place * params["rhs_dilation"][i], strides[i] * (space[i] - 1)
        return lax.slice_in_dim(x, begin, begin + last + 1, strides[i], axis=i - len(space))

    others, rows = list(places), jnp.expand_dims(padded, 3)
    while others and _is_copied(math.prod(places[len(others) - 1 :]), inputs, outputs):
        count, axis = others.pop(), len(others)
        rows = jnp.concatenate([at(rows, k, axis) for k in range(count)], axis=3)
    slices = [reduce(lambda x, of: at(x, of[1], of[0]), enumerate(place), rows) for place in np.ndindex(*others)]

    def by_group(x: jax.Array, factors: int) -> jax.Array:
        return x.reshape(len(x), stack * groups, factors, math.prod(x.shape[-len(space) - 2 :]))

    lefts, right = [by_group(x, math.prod(x.shape[3:5])) for x in slices], by_group(cotangent, outputs)

    def restore(gradient: jax.Array) -> jax.Array:
        """Reshape a gradient of shape (stack * groups, places * inputs, outputs) to the shape of the operand."""
        split = gradient.reshape(stack, groups, *places, inputs, outputs)
        # Transpose to (stack, groups * outputs, inputs, *places), the order of the spec.
        order = (0, 1, len(shape) + 1, len(shape), *range(2, len(shape)))
        arranged = split.transpose(order).reshape(stack, groups * outputs, inputs, *places)
        back = (numbers.rhs_spec.index(axis) + 1 for axis in range(len(shape)))
        return arranged.transpose(0, *back).reshape(operand.shape)

    positions, p = right.shape[3], inputs * math.prod(places)
    if factors or positions * (p + outputs) < p * outputs:  # both factors are smaller than the gradient
        return OuterProduct(jnp.concatenate(lefts, axis=2).swapaxes(2, 3), right.swapaxes(2, 3), restore, None)
    parts = [_sum_over_positions(left, right) for left in lefts]
    return Dense(jax.vmap(restore)(jnp.concatenate(parts, axis=2)))


def _is_copied(copies: int, inputs: int, outputs: int) -> bool:
    """Return whether to copy an input so often, for one product in place of as many."""
    few = copies <= _MOST_COPIES_OF_FEW and copies * inputs <= _FEW and outputs > 1
    return copies <= _MOST_COPIES or few


def _sum_over_positions(left: jax.Array, right: jax.Array) -> jax.Array:
    """Return AGᵀ of each example and group: shape (batch, stack, p, d)."""
    if right.shape[2] == 1:  # depthwise: an elementwise product suffices
        return (left * right).sum(3, keepdims=True)
    return jnp.einsum("bspt,bsdt->bspd", left, right)


def _gather(
    use: ParameterUse, operand: jax.Array, values: list[Any], cotangents: list[jax.Array], *, factors: bool = False
) -> RowSparse | None:
    """Handle a `gather` of whole rows of a table, such as an embedding lookup."""
    if not takes_rows(use):
        return None
    params, shape = use.eqn.params, use.aval.shape
    numbers = params["dimension_numbers"]
    index, cotangent = _loops_in_order(use, values[1]), _loops_in_order(use, cotangents[0])
    places = [axis for axis in range(cotangent.ndim - 3) if axis not in numbers.offset_dims]
    right = _as_matrices(cotangent, (), places, numbers.offset_dims)
    index = index.reshape(right.shape[:3])
    rows = clipped_rows(use, index)
    if params["mode"] != lax.GatherScatterMode.CLIP:  # an out-of-range index has no gradient
        right = jnp.where((index == rows)[..., None], right, 0)
        rows = jnp.where(index == rows, rows, shape[0]) if factors else rows
    return RowSparse(rows, right, shape[0], lambda gradient: gradient.reshape(operand.shape))


def takes_rows(use: ParameterUse) -> bool:
    """Return whether the operation of a use takes whole rows of a table."""
    if use.eqn.primitive.name != "gather" or use.operand != 0:
        return False
    numbers = use.eqn.params["dimension_numbers"]
    rows = (numbers.collapsed_slice_dims, numbers.start_index_map, numbers.operand_batching_dims) == ((0,), (0,), ())
    return rows and use.eqn.params["slice_sizes"] == (1, *use.aval.shape[1:])


def clipped_rows(use: ParameterUse, index: jax.Array) -> jax.Array:
    """Return the indices of a lookup within the range of its table."""
    height = use.aval.shape[0]
    last = min(height - 1, int(jnp.iinfo(index.dtype).max))  # the largest index that the dtype can represent
    rows = jnp.clip(index, 0, last)
    # A scatter compares indices with the table's height in the index dtype, and a height of 256 wraps to 0 in uint8.
    return rows.astype(jnp.int32) if rows.dtype.itemsize < 4 else rows


def _elementwise(use: ParameterUse, operand: jax.Array, values: list[Any], cotangents: list[jax.Array]) -> Dense:
    """Handle an `add`, `sub` or `mul`, such as a bias or a scale: sum the cotangent over broadcast axes."""
    (gradient,) = cotangents
    if use.eqn.primitive.name == "mul":
        other, before = values[1 - use.operand], 1 + len(use.loops)
        missing = gradient.ndim - other.ndim  # all axes or none: both shapes are equal, or one operand is a scalar
        gradient = gradient * other.reshape(*other.shape[:before], *[1] * missing, *other.shape[before:])
    elif use.eqn.primitive.name == "sub" and use.operand == 1:
        gradient = -gradient
    gradient = _loops_in_order(use, gradient)
    shape = use.aval.shape
    shape = (*[1] * (gradient.ndim - 3 - len(shape)), *shape)
    axes = [axis + 3 for axis, size in enumerate(shape) if size == 1]
    return Dense(gradient.sum((2, *axes)).reshape(len(gradient), *operand.shape))


def norm_cost(use: ParameterUse) -> tuple[float, int]:
    """Return the cost of the norm of one example's gradient at a use: floating-point operations, and numbers stored.

    Costs that an ordinary gradient has too are not included.
    """
    name, operand = use.eqn.primitive.name, use.aval
    shared = math.prod(loop.length for loop in use.loops if loop.number not in use.value.stacked)
    stack = math.prod(loop.length for loop in use.loops if loop.number in use.value.stacked)
    if not operand.size or name not in ("gather", "dot_general"):
        return 0.0, stack * operand.size
    out = aval(use.eqn.outvars[0])
    if name == "gather":
        positions, d = shared * out.size * operand.shape[0] // operand.size, operand.size // operand.shape[0]
        return 2.0 * stack * positions**2 * d, stack * positions * d
    (contract, batch), side = use.eqn.params["dimension_numbers"], use.operand
    p, groups = (math.prod(operand.shape[axis] for axis in axes[side]) for axes in (contract, batch))
    d = operand.size // (p * groups)
    positions = shared * out.size // (groups * d)
    if positions * (p + d) >= p * d:
        return 0.0, stack * operand.size
    kept = stack * groups * positions * (p + d)
    return 2.0 * kept * positions, kept


def reads_values(use: ParameterUse) -> bool:
    """Return whether the rule for the operation of a use reads its other operands."""
    return use.eqn.primitive.name not in ("add", "sub") or not has_rule(use)


def has_rule(use: ParameterUse) -> bool:
    """Return whether a rule exists for the operation of a use."""
    return (use.eqn.primitive.name, use.operand) in _RULES


_ELEMENTWISE = ("add", "sub", "mul")
# Keyed by the primitive and the index of the parameter operand.
_RULES: dict[tuple[str, int], Callable[..., GradientForm | None]] = {
    ("dot_general", 0): _product,
    ("dot_general", 1): _product,
    ("conv_general_dilated", 1): _convolution,
    ("gather", 0): _gather,
    **{(name, operand): _elementwise for name in _ELEMENTWISE for operand in (0, 1)},
}


def _loops_in_order(use: ParameterUse, x: jax.Array) -> jax.Array:
    """Return `x` with its loop axes combined to two after the batch axis: stacked loops, then all others.

    The iterations of the others share their parameters, so they are positions like any other.
    """
    count = len(use.loops)
    stacked = [i + 1 for i, loop in enumerate(use.loops) if loop.number in use.value.stacked]
    shared = [i for i in range(1, count + 1) if i not in stacked]
    moved = x.transpose(0, *stacked, *shared, *range(count + 1, x.ndim))
    sizes = [math.prod(x.shape[i] for i in axes) for axes in (stacked, shared)]
    return moved.reshape(x.shape[0], *sizes, *x.shape[count + 1 :])


def _as_matrices(x: jax.Array, groups: Sequence[int], rows: Sequence[int], columns: Sequence[int]) -> jax.Array:
    """Reshape (batch, stack, iterations, *axes) to (batch, stack * groups, iterations * rows, columns)."""
    order = [[axis + 3 for axis in axes] for axes in (groups, rows, columns)]
    sizes = [math.prod(x.shape[axis] for axis in axes) for axes in order]
    moved = x.transpose(0, 1, *order[0], 2, *order[1], *order[2])
    return moved.reshape(len(x), x.shape[1] * sizes[0], x.shape[2] * sizes[1], sizes[2])


def _rest(ndim: int, *used: tuple[int, ...]) -> list[int]:
    """Return the axes that are not in `used`."""
    return [axis for axis in range(ndim) if not any(axis in axes for axes in used)]
