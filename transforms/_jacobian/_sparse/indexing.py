"""Rules for gathers, scatters, slices and updates, whose indices may be known, partly known or unknown."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._core.compat import JaxprEqn
from ..._core.jaxpr import ELEMENTWISE, aval, evaluate
from .index_sets import PartlyKnown, cells_of, grouped, is_set, matrix_at, partly_known, take, united

# Operations that copy elements of operands to fixed positions, which do not depend on values.
PLACED = frozenset(
    """
    reshape squeeze expand_dims transpose broadcast_in_dim slice rev concatenate split pad stack unstack tile
    """.split()  # noqa: SIM905 (words read better)
)


def may_be_partly_known(eqn: JaxprEqn) -> bool:
    """Return whether elements of a result can be known although not all operands are.

    These are operations on integers and booleans, as in computations of indices, that work element by element. So is a
    selection, which is known where all choices are equal, as where JAX maps over a branch. So is a sort by known keys,
    which moves the other operands to known positions.
    """
    name = eqn.primitive.name
    integers = all(jnp.issubdtype(aval(x).dtype, np.integer) or aval(x).dtype == bool for x in eqn.outvars)
    return name in ("select_n", "sort") or (integers and (name in PLACED or name in ELEMENTWISE))


def evaluated_partly(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Return the results of an operation that `may_be_partly_known`, as far as they are known."""
    parts = [partly_known(value, x) for value, x in zip(values, eqn.invars, strict=True)]
    numbers = evaluate(eqn, *(jnp.asarray(part.numbers) for part in parts))
    # The masks of known elements are moved in the same way as the elements.
    if eqn.primitive.name in PLACED:
        sure = evaluate(eqn, *(jnp.asarray(part.sure, np.int32) for part in parts))
    elif eqn.primitive.name == "sort":
        keys = eqn.params["num_keys"]
        stays = eqn.params["is_stable"] and all(part.sure.all() for part in parts[:keys])
        moved = [part.sure & stays for part in parts]
        sure = evaluate(eqn, *map(jnp.asarray, [*(part.numbers for part in parts[:keys]), *moved[keys:]]))
        sure[:keys] = moved[:keys]
    else:
        shape = aval(eqn.outvars[0]).shape
        all_sure = [np.broadcast_to(part.sure, shape) for part in parts]
        if eqn.primitive.name == "select_n":
            first, *others = (part.numbers for part in parts[1:])
            all_sure[0] = all_sure[0] | np.logical_and.reduce([first == other for other in others])
        sure = [np.logical_and.reduce(all_sure)]
    found = [PartlyKnown(np.asarray(x), np.asarray(y, bool)) for x, y in zip(numbers, sure, strict=True)]
    return [part.numbers if part.sure.all() else part for part in found]


def gathered(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Return the sets of a gather; along an axis with an unknown index, the union over the whole axis."""
    if is_set(values[1]):
        return None
    shape, params = aval(eqn.invars[0]).shape, eqn.params
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    where, cells = _cells(partly_known(values[1], eqn.invars[1]), numbers.start_index_map, sizes, shape)
    found = _gather(cells, where, numbers, sizes, params["mode"])
    return take(grouped(values[0], cells.ravel(), cells.size), found)


def scattered(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Return the sets of a scatter: of the operand and the updates, which can be anywhere along unknown axes."""
    operand, indices, updates = values
    if is_set(indices):
        return None
    shape, params = aval(eqn.invars[0]).shape, eqn.params
    numbers = params["dimension_numbers"]
    single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = iter(aval(eqn.invars[2]).shape[i] for i in numbers.update_window_dims)
    sizes = [1 if i in single else next(windows) for i in range(len(shape))]
    axes = numbers.scatter_dims_to_operand_dims
    where, cells = _cells(partly_known(indices, eqn.invars[1]), axes, sizes, shape)
    # The position that each element of the updates is written to: a scatter is the transpose of this gather.
    transposed = lax.GatherDimensionNumbers(
        offset_dims=numbers.update_window_dims,
        collapsed_slice_dims=numbers.inserted_window_dims,
        start_index_map=axes,
        operand_batching_dims=numbers.operand_batching_dims,
        start_indices_batching_dims=numbers.scatter_indices_batching_dims,
    )
    # A plain `scatter` replaces elements; all others combine them with the updates.
    replaces = eqn.primitive.name == "scatter" and params["update_jaxpr"] is None
    placed = partial(_gather, cells, where, transposed, sizes)
    return _written(operand, updates, replaces, cells, placed, params["mode"])


def sliced(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Return the sets of a dynamic slice; along an axis with an unknown start, the union over the whole axis."""
    if any(map(is_set, values[1:])):
        return None
    sizes = eqn.params["slice_sizes"]
    where, cells, numbers = _starts(eqn, values, 1, sizes)
    return take(grouped(values[0], cells.ravel(), cells.size), _gather(cells, where, numbers, sizes, "clip"))


def updated(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Return the sets of a dynamic update slice; with an unknown start, the operand's sets remain everywhere."""
    if any(map(is_set, values[2:])):
        return None
    sizes = aval(eqn.invars[1]).shape
    where, cells, numbers = _starts(eqn, values, 2, sizes)
    placed = partial(_gather, cells, where, numbers, sizes)
    return _written(values[0], values[1], True, cells, placed, lax.GatherScatterMode.CLIP)


def _starts(eqn: JaxprEqn, values: list[Any], first: int, sizes: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    """Return the result of `_cells` for start indices that are separate operands, and the equivalent gather."""
    parts = [partly_known(value, x) for value, x in zip(values[first:], eqn.invars[first:], strict=True)]
    # JAX clamps starts in their own dtype, which may exceed the int32 of the gather.
    starts = np.array([min(max(int(part.numbers), 0), 2**31 - 1) for part in parts], np.int32)
    shape, axes = aval(eqn.invars[0]).shape, tuple(range(len(parts)))
    where, cells = _cells(PartlyKnown(starts, np.array([part.sure for part in parts], bool)), axes, sizes, shape)
    return where, cells, lax.GatherDimensionNumbers(axes, (), axes)


def _cells(where: PartlyKnown, axes: Any, sizes: Any, shape: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices, with zeros for unknown ones, and for each element of the array its cell.

    Elements along an axis with an unknown index share a cell, since any of them may be read or written. Axes that a
    slice covers completely are exempt, since the slice can only start at 0.
    """
    loose = {d for i, d in enumerate(axes) if sizes[d] < shape[d] and not where.sure[..., i].all()}
    cells = cells_of(shape, [d for d in range(len(shape)) if d not in loose])
    return np.where(where.sure, where.numbers, 0), cells


def _gather(cells: np.ndarray, where: np.ndarray, numbers: Any, sizes: Any, mode: Any) -> np.ndarray:
    """Return the cells that `lax.gather` reads at these indices, -1 where it reads a fill value."""
    with jax.ensure_compile_time_eval():
        moved = jnp.asarray(cells, np.int32), jnp.asarray(where)
        return np.asarray(lax.gather(*moved, numbers, tuple(sizes), mode=mode, fill_value=-1))


def _written(operand: Any, updates: Any, replaces: bool, cells: np.ndarray, placed: Any, mode: Any) -> Any:
    """Return an array's sets united with the updates' sets, each spread over the cell that it is written to.

    `placed` returns, for a mode of out-of-bounds indices, the cell that each element of the updates is written to.
    """
    if replaces and is_set(operand) and len(np.unique(cells)) == cells.size:  # known indices: old sets are removed
        # Indices that were promised to be in bounds but are not replace nothing.
        clip = mode == lax.GatherScatterMode.CLIP
        lost = placed(mode if clip else "fill")
        kept = np.arange(operand.shape[0])
        kept[lost[lost >= 0]] = -1
        operand = take(operand, kept)
    if not is_set(updates):
        return operand
    to = placed(mode).ravel()
    found = np.flatnonzero(to >= 0)
    sums = matrix_at(to[found], found, (cells.size, len(to))) @ updates
    return united([operand, sums[cells.ravel()]])
