"""Rules by kind of operation: the numbers of its operands that each number of a result depends on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..._core.jaxpr import ELEMENTWISE, IDENTITIES, aval, evaluate
from .index_sets import PAIRS, grouped, is_set, known, matrix_at, mixed, places_of, stacked, take, united
from .indexing import PLACED, gathered, scattered, sliced, updated
from .windows import convolved, scattered_from_windows, windowed


def sets_of_results(eqn: JaxprEqn, values: list[Any]) -> list[Any] | None:
    """Return the sets of an operation's results, None if it has no rule for operands of this kind.

    Args:
      eqn: the operation.
      values: for each of its operands its sets (for one of them at least), or its value as far as it is known.
    """
    name = eqn.primitive.name
    if name in IDENTITIES:
        return values[: len(eqn.outvars)]
    if name in _MOVES:
        return _moved(eqn, values)
    if name in ELEMENTWISE:
        return [_elementwise(eqn, values)]
    if name in _LINES or name in _SUMS:
        return _mixed_along(eqn, values)
    if name in _MATRICES:
        return _mixed_matrices(eqn, values)
    if name not in _RULES:
        return None
    found = _RULES[name](eqn, values)
    return None if found is None else [found]


# ---- Operations by which each number is one of an operand, or a constant


def _moved(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Return the sets of an operation that moves numbers, which is done to the flat indices of these instead."""
    name, params = eqn.primitive.name, eqn.params
    # Indices into `table`, which has the sets of one operand after another; -1 for numbers of an operand without sets.
    # NumPy moves them, since JAX would compile each operation for each shape.
    places, start = [], 0
    for x, value in zip(eqn.invars, values, strict=True):
        places.append(places_of(x) + start if is_set(value) else np.full(aval(x).shape, -1))
        start += value.shape[0] if is_set(value) else 0
    first = places[0]
    if name == "reshape":
        out = [first if params["dimensions"] is None else first.transpose(params["dimensions"])]
    elif name in ("expand_dims", "squeeze"):
        out = [first]
    elif name == "transpose":
        out = [first.transpose(params["permutation"])]
    elif name == "broadcast_in_dim":
        thin = np.ones(len(params["shape"]), int)
        thin[list(params["broadcast_dimensions"])] = first.shape
        out = [np.broadcast_to(first.reshape(thin), params["shape"])]
    elif name == "slice":
        strides = params["strides"] or [1] * first.ndim
        out = [first[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]]
    elif name == "rev":
        out = [np.flip(first, params["dimensions"])]
    elif name == "concatenate":
        out = [np.concatenate(places, params["dimension"])]
    elif name == "split":
        out = np.split(first, np.cumsum(params["sizes"])[:-1], params["axis"])
    elif name == "pad":
        out = [_padded(first, places[1], eqn)]
    elif name == "select_n":
        which = known(values[0])
        if which is None:  # any operand may be chosen
            return [united([_spread(value, x, eqn) for value, x in zip(values[1:], eqn.invars[1:], strict=True)])]
        shape = aval(eqn.outvars[0]).shape
        out = [np.choose(np.broadcast_to(which, shape).astype(int), places[1:])]
    else:  # stack, unstack, tile
        with jax.ensure_compile_time_eval():
            out = [np.asarray(x) for x in evaluate(eqn, *(jnp.asarray(x, np.int32) for x in places))]
    table = stacked([value for value in values if is_set(value)])
    return [take(table, x) for x in out]


def _padded(places: np.ndarray, value: np.ndarray, eqn: JaxprEqn) -> np.ndarray:
    """Return indices padded as `lax.pad` does it: with spaces between them, and cut where the padding is negative."""
    out = np.full(aval(eqn.outvars[0]).shape, value)
    to, take = [], []
    for size, end, (low, _, interior) in zip(places.shape, out.shape, eqn.params["padding_config"], strict=True):
        at = low + np.arange(size) * (interior + 1)
        inside = (at >= 0) & (at < end)
        to.append(at[inside])
        take.append(np.flatnonzero(inside))
    out[np.ix_(*to)] = places[np.ix_(*take)]
    return out


_MOVES = PLACED | {"select_n"}


# ---- Operations number by number


def _spread(value: Any, x: Any, eqn: JaxprEqn) -> Any:
    """Return the sets of an operand, broadcast to the shape of the result; other values as they are."""
    shape = aval(eqn.outvars[0]).shape
    return value if not is_set(value) or aval(x).shape == shape else value[np.broadcast_to(places_of(x), shape).ravel()]


def _elementwise(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Return the union of the operands' sets number by number, none where a factor is a known zero."""
    found = united([_spread(value, x, eqn) for value, x in zip(values, eqn.invars, strict=True)])
    if eqn.primitive.name == "mul" and sum(map(is_set, values)) == 1:
        factor = known(values[1 if is_set(values[0]) else 0])
        if factor is not None and not factor.all():
            places = np.arange(found.shape[0])
            return take(found, np.where(np.broadcast_to(factor, aval(eqn.outvars[0]).shape).ravel() != 0, places, -1))
    return found


def _bits(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Return the sets of a bit cast: to another width, a last axis of numbers is merged into one, or one is split."""
    axes = range(min(aval(eqn.invars[0]).ndim, aval(eqn.outvars[0]).ndim))
    return mixed(eqn, values, [axes], [axes])[0]


# ---- Sums


def _mixed_along(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Return sets over some axes of the first operand, which the results have too (a sort) or lack (a sum)."""
    name, ndim = eqn.primitive.name, aval(eqn.invars[0]).ndim
    summed = eqn.params[_SUMS.get(name) or _LINES[name]]
    summed = {axis % ndim for axis in (summed if name in _SUMS else (summed,))}
    rest = [i for i in range(ndim) if i not in summed]
    operands = [rest if aval(x).ndim == ndim else None for x in eqn.invars]  # without axes: where a sum starts
    return mixed(eqn, values, operands, [range(len(rest)) if name in _SUMS else rest] * len(eqn.outvars))


def _cumulated(eqn: JaxprEqn, values: list[Any]) -> Any:
    return cumulated(values[0], aval(eqn.invars[0]).shape, eqn.params["axis"], eqn.params["reverse"])


def cumulated(value: Any, shape: tuple[int, ...], axis: int, reverse: bool) -> Any:
    """Return the union of all sets up to each number along an axis, or of all from it on."""
    places = np.arange(math.prod(shape)).reshape(shape)
    lines = np.moveaxis(places, axis, -1).reshape(-1, places.shape[axis])
    count, length = lines.shape
    if count * length * (length + 1) // 2 > PAIRS:  # then every number of the line counts
        line = np.empty(places.size, int)
        line[lines] = np.arange(count)[:, None]
        return grouped(value, line, count)[line]
    after, before = np.tril_indices(length)
    if reverse:
        after, before = before, after
    return matrix_at(lines[:, after], lines[:, before], (places.size, places.size)) @ value


def _product(eqn: JaxprEqn, values: list[Any]) -> Any:
    return united([_product_of(eqn, values, side) for side in (0, 1) if is_set(values[side])])


def _product_of(eqn: JaxprEqn, values: list[Any], side: int) -> Any:
    """Return the sets from one side of a matrix product: over the contracted axes, without terms with a known zero."""
    (contract, batch) = eqn.params["dimension_numbers"]

    def ordered(array: np.ndarray, k: int) -> np.ndarray:
        """Return an array of operand `k` with three axes: batch, free, contracted."""
        free = [i for i in range(array.ndim) if i not in (*contract[k], *batch[k])]
        sizes = [math.prod(array.shape[i] for i in axes) for axes in (batch[k], free, contract[k])]
        return array.transpose(*batch[k], *free, *contract[k]).reshape(sizes)

    places = ordered(places_of(eqn.invars[side]), side)
    other = ordered(places_of(eqn.invars[1 - side]), 1 - side)
    batches, count, _ = places.shape
    shape = (batches, count, other.shape[1]) if side == 0 else (batches, other.shape[1], count)
    weights = known(values[1 - side])
    if weights is not None and not weights.all():
        b, j, k = np.nonzero(ordered(weights, 1 - side))
        if count * len(b) <= PAIRS:
            out = np.arange(math.prod(shape)).reshape(shape)
            to = out[b, :, j] if side == 0 else out[b, j, :]
            size = (out.size, places.size)
            return matrix_at(to, places[b, :, k], size) @ values[side]
    # Without zeros all results with the same batch and free index have the same set: it is formed once and repeated.
    groups = np.empty(places.size, int)
    numbers = np.arange(batches * count).reshape(batches, count)
    groups[places.ravel()] = np.broadcast_to(numbers[..., None], places.shape).ravel()
    sums = grouped(values[side], groups, batches * count)
    return sums[np.broadcast_to(numbers[:, :, None] if side == 0 else numbers[:, None, :], shape).ravel()]


def _ragged_product(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Return the sets of a product whose rows are in groups, each with its own matrix; any group may hold a row."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contract, batch = numbers.dot_dimension_numbers
    groups: tuple[Any, Any] = ((), numbers.rhs_group_dimensions)
    out = range(aval(eqn.outvars[0]).ndim)
    free = [
        [i for i in range(aval(x).ndim) if i not in (*contract[k], *batch[k], *groups[k])]
        for k, x in enumerate(eqn.invars[:2])
    ]
    first = len(out) - len(batch[0]) - len(free[0]) - len(free[1])  # after the axis of groups, if the result has one
    shared = out[first : first + len(batch[0])]
    axes = (out[first + len(shared) : len(out) - len(free[1])], out[len(out) - len(free[1]) :])
    found = []
    for k in (0, 1):
        if is_set(values[k]):
            alone = [value if i == k else None for i, value in enumerate(values)]
            operands = [[*batch[k], *free[k]]] * len(values)
            found += mixed(eqn, alone, operands, [[*shared, *axes[k]]])
    return None if any(map(is_set, values[2:])) else united(found)


def _triangular_solution(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Return the sets of a solution: all of the matrix, and the right-hand side up to each number, or from it on."""
    params, shape = eqn.params, aval(eqn.invars[1]).shape
    found = mixed(eqn, [values[0], None], [range(len(shape) - 2)] * 2, [range(len(shape) - 2)])
    if is_set(values[1]):
        axis = len(shape) - (2 if params["left_side"] else 1)
        # Forward substitution for a lower matrix; transposing it, or solving x a = b, turns the order around.
        forward = params["lower"] ^ bool(params["transpose_a"]) ^ (not params["left_side"])
        found.append(cumulated(values[1], shape, axis, not forward))
    return united(found)


def _tridiagonal_solution(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Return the sets of a solution: all of its right-hand side, which is a column, and of the matrix."""
    ndim = aval(eqn.outvars[0]).ndim
    batch = range(ndim - 2)
    columns = [*batch, ndim - 1]
    matrix = mixed(eqn, [*values[:3], None], [batch] * 4, [batch])
    return united([*matrix, *mixed(eqn, [None] * 3 + values[3:], [columns] * 4, [columns])])


def _mixed_matrices(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Return sets over all of each matrix, or over the axes of each Fourier transform: the leading axes are batches."""
    lengths = eqn.params.get("fft_lengths", (0, 0))
    batch = range(aval(eqn.invars[0]).ndim - len(lengths))
    return mixed(eqn, values, [batch] * len(eqn.invars), [batch] * len(eqn.outvars))


# Operations whose results depend on all numbers along an axis, or axes, and the parameter that names these: of `_LINES`
# the results have the axis too, of `_SUMS` they lack it.
_LINES = {"sort": "dimension", "top_k": "axis", "approx_top_k": "reduction_dimension"}
_SUMS = {
    **dict.fromkeys(["reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "argmax", "argmin"], "axes"),
    **dict.fromkeys(["reduce_and", "reduce_or", "reduce_xor"], "axes"),  # of integers, bit by bit
    "reduce": "dimensions",
}
# Factorisations and transforms: each number of a result does depend on its whole matrix, or line.
_MATRICES = frozenset(
    """
    cholesky cholesky_update eig eigh fft geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd
    symmetric_product tridiagonal
    """.split()  # noqa: SIM905 (words read better)
)
_RULES: dict[str, Callable[[JaxprEqn, list[Any]], Any]] = {
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], _cumulated),
    "bitcast_convert_type": _bits,
    "dot_general": _product,
    "ragged_dot_general": _ragged_product,
    "triangular_solve": _triangular_solution,
    "tridiagonal_solve": _tridiagonal_solution,
    "conv_general_dilated": convolved,
    **dict.fromkeys(["reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add"], windowed),
    "select_and_scatter_add": scattered_from_windows,
    "gather": gathered,
    **dict.fromkeys(["scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"], scattered),
    "dynamic_slice": sliced,
    "dynamic_update_slice": updated,
}
