"""Operations with indices, which may be known, known in part, or not known: gathers, scatters, slices and updates."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from ..._core.jaxpr import ELEMENTWISE, aval, evaluate
from .index_sets import (
    Partly,
    cells_of,
    grouped,
    is_set,
    matrix_at,
    partly_known,
    picked,
    united,
)

# Operations by which each number is one of an operand's, at a place that depends on no operand.
PLACED = frozenset(
    """
    reshape squeeze expand_dims transpose broadcast_in_dim slice rev concatenate split pad stack unstack tile
    """.split()  # noqa: SIM905 (words read better)
)


def keeps_apart(eqn: JaxprEqn) -> bool:
    """Tell whether each number of a result is an index, made of single numbers of operands, at places that are known.

    A choice is as good: it is known where all that can be chosen is the same, as where JAX maps a branch. So is a sort
    by keys that are known, which moves the other operands to places that are.
    """
    name = eqn.primitive.name
    whole = all(jnp.issubdtype(aval(x).dtype, np.integer) or aval(x).dtype == bool for x in eqn.outvars)
    return name in ("select_n", "sort") or (whole and (name in PLACED or name in ELEMENTWISE))


def partly_computed(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Compute what such an operation gives, as far as it is known."""
    parts = [partly_known(value, x) for value, x in zip(values, eqn.invars, strict=True)]
    numbers = evaluate(eqn, *(jnp.asarray(part.numbers) for part in parts))
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
    found = [Partly(np.asarray(x), np.asarray(y, bool)) for x, y in zip(numbers, sure, strict=True)]
    return [part.numbers if part.sure.all() else part for part in found]


def gathered(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Pick numbers at places: along an axis of which the index is not known any of them, but for whole slices of it."""
    if is_set(values[1]):
        return None
    shape, params = aval(eqn.invars[0]).shape, eqn.params
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    where, cells = _cells(partly_known(values[1], eqn.invars[1]), numbers.start_index_map, sizes, shape)
    found = _gather(cells, where, numbers, sizes, params["mode"])
    return picked(grouped(values[0], cells.ravel(), cells.size), found)


def scattered(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Keep what is there, and add all that is put there: along an axis of which the index is not known, anywhere."""
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
    last = len(np.unique(cells)) == cells.size and eqn.primitive.name == "scatter" and params["update_jaxpr"] is None
    # From each number of the updates to where it is put: the gather of which this is the transpose.
    transposed = lax.GatherDimensionNumbers(
        offset_dims=numbers.update_window_dims,
        collapsed_slice_dims=numbers.inserted_window_dims,
        start_index_map=axes,
        operand_batching_dims=numbers.operand_batching_dims,
        start_indices_batching_dims=numbers.scatter_indices_batching_dims,
    )
    if last and is_set(operand):
        # Indices that were promised to be within bounds, and are not, put nothing anywhere.
        clip = params["mode"] == lax.GatherScatterMode.CLIP
        operand = _replaced(operand, _gather(cells, where, transposed, sizes, params["mode"] if clip else "fill"))
    return _put(operand, updates, _gather(cells, where, transposed, sizes, params["mode"]), cells)


def sliced(eqn: JaxprEqn, values: list[Any]) -> Any:
    if any(map(is_set, values[1:])):
        return None
    starts, cells = _starts(eqn, values, 1, eqn.params["slice_sizes"])
    return picked(grouped(values[0], cells.ravel(), cells.size), _slice(cells, starts, eqn.params["slice_sizes"]))


def updated(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Put a slice into an array; where it is not known, what is there remains."""
    if any(map(is_set, values[2:])):
        return None
    operand, update = values[:2]
    starts, cells = _starts(eqn, values, 2, aval(eqn.invars[1]).shape)
    places = _slice(cells, starts, aval(eqn.invars[1]).shape)
    if is_set(operand) and len(np.unique(cells)) == cells.size:
        operand = _replaced(operand, places)
    return _put(operand, update, places, cells)


def _cells(where: Partly, axes: Any, sizes: Any, shape: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return indices with zeros for those that are not known, and cells, alike along axes that these may pick from."""
    loose = {d for i, d in enumerate(axes) if sizes[d] < shape[d] and not where.sure[..., i].all()}
    cells = cells_of(shape, [d for d in range(len(shape)) if d not in loose])
    return np.where(where.sure, where.numbers, 0), cells


def _starts(eqn: JaxprEqn, values: list[Any], first: int, sizes: Any) -> tuple[list[np.ndarray], np.ndarray]:
    parts = [partly_known(value, x) for value, x in zip(values[first:], eqn.invars[first:], strict=True)]
    shape = aval(eqn.invars[0]).shape
    if not parts:
        return [], cells_of(shape, [])
    where = Partly(*(np.stack(x) for x in zip(*parts, strict=True)))
    starts, cells = _cells(where, range(len(shape)), sizes, shape)
    return list(starts), cells


def _gather(cells: np.ndarray, where: np.ndarray, numbers: Any, sizes: Any, mode: Any) -> np.ndarray:
    with jax.ensure_compile_time_eval():
        moved = jnp.asarray(cells, np.int32), jnp.asarray(where)
        return np.asarray(lax.gather(*moved, numbers, tuple(sizes), mode=mode, fill_value=-1))


def _slice(cells: np.ndarray, starts: list[np.ndarray], sizes: Any) -> np.ndarray:
    """Move starts into bounds, as the operation does; `lax.dynamic_slice` takes those below zero from the end."""
    firsts = [min(max(int(start), 0), n - size) for start, n, size in zip(starts, cells.shape, sizes, strict=True)]
    return cells[tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))]


def _replaced(operand: Any, places: np.ndarray) -> Any:
    """Keep what is there, but at these places."""
    kept = np.arange(operand.shape[0])
    kept[places[places >= 0]] = -1
    return picked(operand, kept)


def _put(operand: Any, updates: Any, to: np.ndarray, cells: np.ndarray) -> Any:
    if not is_set(updates):
        return operand
    to = to.ravel()
    found = np.flatnonzero(to >= 0)
    sums = matrix_at(to[found], found, (math.prod(cells.shape), len(to))) @ updates
    return united([operand, sums[cells.ravel()]])
