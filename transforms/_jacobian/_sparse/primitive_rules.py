"""Rules for each kind of operation: the operand elements that each result element depends on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.compat import JaxprEqn
from ..._core.jaxpr import ELEMENTWISE, IDENTITIES, aval, evaluate
from .index_sets import grouped, is_set, known, matrix_at, mixed, places_of, stacked, take, united
from .indexing import PLACED, gathered, scattered, sliced, updated
from .windows import convolved, scattered_from_windows, windowed

# With more (result, operand) pairs than this, rules treat arrays as a whole and ignore, for example, known zeros.
_PAIRS = 2**23


def sets_of_results(eqn: JaxprEqn, values: list[Any]) -> list[Any] | None:
    """Return the sets of an operation's results, or None if it has no rule for such operands.

    Args:
      eqn: the operation.
      values: for each operand its sets (at least one has sets), or its value as far as it is known.
    """
    rule = _RULES.get(eqn.primitive.name)
    found = rule(eqn, values) if rule else None
    return found if found is None or isinstance(found, list) else [found]


# ---- Operations whose result elements are operand elements or constants


def _moved(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Return the sets of an operation that moves elements, by applying it to their flat indices."""
    name = eqn.primitive.name
    # Indices into `table`, which concatenates the operands' sets; -1 for elements of an operand without sets.
    # In NumPy, since JAX would compile each operation for each shape.
    places, start = [], 0
    for x, value in zip(eqn.invars, values, strict=True):
        places.append(places_of(x) + start if is_set(value) else np.full(aval(x).shape, -1))
        start += value.shape[0] if is_set(value) else 0
    out: Any
    if name == "select_n":
        which = known(values[0])
        if which is None:  # any operand may be chosen
            return [united([_spread(value, x, eqn) for value, x in zip(values[1:], eqn.invars[1:], strict=True)])]
        out = np.choose(np.broadcast_to(which, aval(eqn.outvars[0]).shape).astype(int), places[1:])
    elif name in _MOVES:
        out = _MOVES[name](*places, **eqn.params)
    else:  # stack, unstack, tile
        with jax.ensure_compile_time_eval():
            out = evaluate(eqn, *(jnp.asarray(x, np.int32) for x in places))
    table = stacked([value for value in values if is_set(value)])
    return [take(table, np.asarray(x)) for x in (out if isinstance(out, list) else [out])]


def _broadcast(places: np.ndarray, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> np.ndarray:
    """Return indices broadcast as by `lax.broadcast_in_dim`."""
    thin = np.ones(len(shape), int)
    thin[list(broadcast_dimensions)] = places.shape
    return np.broadcast_to(places.reshape(thin), shape)


def _padded(places: np.ndarray, value: np.ndarray, *, padding_config: Any) -> np.ndarray:
    """Return indices padded as by `lax.pad`, with interior padding and negative padding."""
    for axis, (low, high, interior) in enumerate(padding_config):
        size = places.shape[axis]
        at = low + np.arange(size) * (interior + 1)
        end = low + high + size + max(0, size - 1) * interior
        inside = (at >= 0) & (at < end)
        padded = np.full((*places.shape[:axis], end, *places.shape[axis + 1 :]), value)
        np.moveaxis(padded, axis, 0)[at[inside]] = np.moveaxis(places, axis, 0)[inside]
        places = padded
    return places


# Functions from flat indices of the operand's elements, and the parameters, to flat indices in the result.
_MOVES: dict[str, Callable[..., Any]] = {
    "reshape": lambda x, dimensions, **_: x if dimensions is None else x.transpose(dimensions),
    "squeeze": lambda x, **_: x,
    "expand_dims": lambda x, **_: x,
    "transpose": lambda x, permutation: x.transpose(permutation),
    "broadcast_in_dim": _broadcast,
    "slice": lambda x, start_indices, limit_indices, strides: x[
        tuple(map(slice, start_indices, limit_indices, strides or [1] * x.ndim))
    ],
    "rev": lambda x, dimensions: np.flip(x, dimensions),
    "concatenate": lambda *x, dimension: np.concatenate(x, dimension),
    "split": lambda x, sizes, axis: np.split(x, np.cumsum(sizes)[:-1], axis),
    "pad": _padded,
}


# ---- Elementwise operations


def _spread(value: Any, x: Any, eqn: JaxprEqn) -> Any:
    """Return the sets of an operand, broadcast to the shape of the result; other values unchanged."""
    shape = aval(eqn.outvars[0]).shape
    return value if not is_set(value) or aval(x).shape == shape else value[np.broadcast_to(places_of(x), shape).ravel()]


def _elementwise(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Return the elementwise union of the operands' sets, empty where a factor is a known zero."""
    found = united([_spread(value, x, eqn) for value, x in zip(values, eqn.invars, strict=True)])
    if eqn.primitive.name == "mul" and sum(map(is_set, values)) == 1:
        factor = known(values[1 if is_set(values[0]) else 0])
        if factor is not None and not factor.all():
            places = np.arange(found.shape[0])
            return take(found, np.where(np.broadcast_to(factor, aval(eqn.outvars[0]).shape).ravel() != 0, places, -1))
    return found


def _bits(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Return the sets of a bit cast; a change of width merges the last axis, or adds one."""
    axes = range(min(aval(eqn.invars[0]).ndim, aval(eqn.outvars[0]).ndim))
    return mixed(eqn, values, [axes], [axes])[0]


# ---- Sums


def _mixed_along(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Return the sets of an operation that mixes some axes, which the results keep (a sort) or lose (a sum)."""
    name, ndim = eqn.primitive.name, aval(eqn.invars[0]).ndim
    summed = eqn.params[_SUMS.get(name) or _LINES[name]]
    summed = {axis % ndim for axis in (summed if name in _SUMS else (summed,))}
    rest = [i for i in range(ndim) if i not in summed]
    operands = [rest if aval(x).ndim == ndim else None for x in eqn.invars]  # without axes: the initial value of a sum
    return mixed(eqn, values, operands, [range(len(rest)) if name in _SUMS else rest] * len(eqn.outvars))


def _cumulated(eqn: JaxprEqn, values: list[Any]) -> Any:
    return cumulated(values[0], aval(eqn.invars[0]).shape, eqn.params["axis"], eqn.params["reverse"])


def cumulated(value: Any, shape: tuple[int, ...], axis: int, reverse: bool) -> Any:
    """Return for each element the union of all sets before it along an axis (after it, with `reverse`), and its own."""
    places = np.arange(math.prod(shape)).reshape(shape)
    lines = np.moveaxis(places, axis, -1).reshape(-1, places.shape[axis])
    count, length = lines.shape
    if count * length * (length + 1) // 2 > _PAIRS:  # too many pairs: take the union over the whole line
        line = np.empty(places.size, int)
        line[lines] = np.arange(count)[:, None]
        return grouped(value, line, count)[line]
    after, before = np.tril_indices(length)
    if reverse:
        after, before = before, after
    return matrix_at(lines[:, after], lines[:, before], (places.size, places.size)) @ value


def _product(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Return the sets of a matrix product: unions over the contracted axes, without terms with a known zero."""
    contract, batch = eqn.params["dimension_numbers"]
    return united([_from_side(eqn, values, side, contract, batch) for side in (0, 1) if is_set(values[side])])


def _from_side(eqn: JaxprEqn, values: list[Any], side: int, contract: Any, batch: Any) -> Any:
    """Return the sets of a matrix product that come from the operand `side`."""
    free = [[i for i in range(aval(x).ndim) if i not in (*contract[k], *batch[k])] for k, x in enumerate(eqn.invars)]

    def ordered(array: np.ndarray, k: int) -> np.ndarray:
        """Return an array of operand `k` with three axes: batch, free, contracted."""
        sizes = [math.prod(array.shape[i] for i in axes) for axes in (batch[k], free[k], contract[k])]
        return array.transpose(*batch[k], *free[k], *contract[k]).reshape(sizes)

    weights = known(values[1 - side])
    if weights is not None and not weights.all():
        places, weights = ordered(places_of(eqn.invars[side]), side), ordered(weights, 1 - side)
        b, j, k = np.nonzero(weights)
        if places.shape[1] * len(b) <= _PAIRS:
            out = places_of(eqn.outvars[0]).reshape(len(places), (places, weights)[side].shape[1], -1)
            out = out if side else out.swapaxes(1, 2)
            return matrix_at(out[b, j], places[b, :, k], (out.size, places.size)) @ values[side]
    # Without zeros, all results with the same batch index and free index of this side have the same set.
    first = len(batch[0]) + (len(free[0]) if side else 0)
    results = [*range(len(batch[0])), *range(first, first + len(free[side]))]
    alone = [value if k == side else None for k, value in enumerate(values)]
    return mixed(eqn, alone, [[*batch[side], *free[side]]] * 2, [results])[0]


def _solution(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Return the sets of a linear solve: the whole matrix, and the same column (or row) of the right-hand side.

    With a triangular matrix, only the part of the right-hand side that comes earlier in the substitution.
    """
    params, shape, count = eqn.params, aval(eqn.outvars[0]).shape, len(values)
    batch = range(len(shape) - 2)
    axis = len(shape) - (2 if params.get("left_side", True) else 1)
    found = mixed(eqn, [*values[:-1], None], [batch] * count, [batch])
    if is_set(values[-1]) and "lower" in params:
        # Forward substitution for a lower matrix; transposing it, or solving x a = b, reverses the order.
        forward = params["lower"] ^ bool(params["transpose_a"]) ^ (not params["left_side"])
        found.append(cumulated(values[-1], shape, axis, not forward))
    elif is_set(values[-1]):
        columns = [i for i in range(len(shape)) if i != axis]
        found += mixed(eqn, [None] * (count - 1) + values[-1:], [columns] * count, [columns])
    return united(found)


def _mixed_matrices(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Return sets over each whole matrix, or over the axes of each Fourier transform; leading axes are batch axes."""
    lengths = eqn.params.get("fft_lengths", (0, 0))
    batch = range(aval(eqn.invars[0]).ndim - len(lengths))
    return mixed(eqn, values, [batch] * len(eqn.invars), [batch] * len(eqn.outvars))


# Operations whose results depend on all elements along some axes, with the parameter that names the axes: results of
# `_LINES` keep the axis, results of `_SUMS` lose it.
_LINES = {"sort": "dimension", "top_k": "axis", "approx_top_k": "reduction_dimension"}
_SUMS = {
    **dict.fromkeys(["reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "argmax", "argmin"], "axes"),
    **dict.fromkeys(["reduce_and", "reduce_or", "reduce_xor"], "axes"),  # of integers, bit by bit
    "reduce": "dimensions",
}
# Factorizations and transforms: each result element depends on its whole matrix, or line.
_MATRICES = frozenset(
    """
    cholesky cholesky_update eig eigh fft geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd
    symmetric_product tridiagonal
    """.split()  # noqa: SIM905 (words read better)
)
# Rules return the sets of the result, a list for several results, or None; later entries override earlier ones.
_RULES: dict[str, Callable[[JaxprEqn, list[Any]], Any]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys([*PLACED, "select_n"], _moved),
    **dict.fromkeys(IDENTITIES, lambda eqn, values: values[: len(eqn.outvars)]),
    **dict.fromkeys([*_LINES, *_SUMS], _mixed_along),
    **dict.fromkeys(_MATRICES, _mixed_matrices),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], _cumulated),
    "bitcast_convert_type": _bits,
    "dot_general": _product,
    **dict.fromkeys(["triangular_solve", "tridiagonal_solve"], _solution),
    "conv_general_dilated": convolved,
    **dict.fromkeys(["reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add"], windowed),
    "select_and_scatter_add": scattered_from_windows,
    "gather": gathered,
    **dict.fromkeys(["scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"], scattered),
    "dynamic_slice": sliced,
    "dynamic_update_slice": updated,
}
