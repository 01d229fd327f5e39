"""What of its operands each number of an operation's result depends on: a rule for each kind of operation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ._jaxpr import ELEMENTWISE, aval, evaluate
from ._set_windows import convolved, scattered_from_windows, windowed
from ._sets import PAIRS, everything, grouped, is_set, known, matrix_at, picked, places_of, stacked, united


def sets_of_results(eqn: JaxprEqn, values: list[Any]) -> list[Any] | None:
    """The sets of an operation's results, None if it has no rule.

    Args:
      eqn: the operation.
      values: for each of its operands sets, for one of them at least, or what is known of it.
    """
    name = eqn.primitive.name
    if name in _MOVES:
        return _moved(eqn, values)
    if name in ELEMENTWISE:
        return [_elementwise(eqn, values)]
    if name not in _RULES:
        return everything(eqn, values) if name in _OPAQUE else None
    found = _RULES[name](eqn, values)
    return everything(eqn, values) if found is None else [found]


# ---- Operations by which each number is one of an operand, or a constant


def _moved(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Does to the places of the operands' numbers what the operation does to the numbers."""
    name, params = eqn.primitive.name, eqn.params
    if name in _KEPT and (name != "reshape" or params["dimensions"] is None):
        return values[: len(eqn.outvars)]
    ends = np.cumsum([0, *(value.shape[0] if is_set(value) else 0 for value in values)])
    places: list[Any] = [
        places_of(x) + ends[i] if is_set(value) else None
        for i, (x, value) in enumerate(zip(eqn.invars, values, strict=True))
    ]
    none = [np.full(aval(x).shape, -1) if place is None else place for x, place in zip(eqn.invars, places, strict=True)]
    first = none[0]
    if name == "reshape":
        out = [first.transpose(params["dimensions"])]
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
        out = [np.concatenate(none, params["dimension"])]
    elif name == "split":
        out = np.split(first, np.cumsum(params["sizes"])[:-1], params["axis"])
    elif name == "pad":
        out = [_padded(first, none[1], eqn)]
    elif name == "select_n":
        which = known(values[0])
        if which is None:
            return [united([_spread(value, x, eqn) for value, x in zip(values[1:], eqn.invars[1:], strict=True)])]
        shape = aval(eqn.outvars[0]).shape
        out = [np.choose(np.broadcast_to(which, shape).astype(int), none[1:])]
    elif name in ("stack", "unstack", "tile"):
        with jax.ensure_compile_time_eval():
            out = [np.asarray(x) for x in evaluate(eqn, *(jnp.asarray(x, np.int32) for x in none))]
    else:  # with indices
        where = values[2:] if name == "dynamic_update_slice" else values[1:]
        indices = [known(value) for value in where]
        if any(index is None for index in indices):
            if name == "dynamic_update_slice":
                update = everything(eqn, [values[1]]) if is_set(values[1]) else []
                return [united([values[0], *update])]
            return everything(eqn, values)
        fill = {"fill_value": -1} if name == "gather" else {}
        with jax.ensure_compile_time_eval():
            moved = [jnp.asarray(x, np.int32) for x in none[: len(values) - len(where)]]
            out = [np.asarray(eqn.primitive.bind(*moved, *indices, **{**eqn.params, **fill}))]
    table = stacked([value for value in values if is_set(value)])
    return [picked(table, x) for x in out]


def _padded(places: np.ndarray, value: np.ndarray, eqn: JaxprEqn) -> np.ndarray:
    out = np.full(aval(eqn.outvars[0]).shape, value)
    to, take = [], []
    for size, end, (low, _, interior) in zip(places.shape, out.shape, eqn.params["padding_config"], strict=True):
        at = low + np.arange(size) * (interior + 1)
        inside = (at >= 0) & (at < end)
        to.append(at[inside])
        take.append(np.flatnonzero(inside))
    out[np.ix_(*to)] = places[np.ix_(*take)]
    return out


# In these the numbers stay in order.
_KEPT = {"reshape", "squeeze", "expand_dims", "copy", "copy_p", "optimization_barrier", "pvary", "pcast"}
_MOVES = {
    *_KEPT,
    *("transpose", "broadcast_in_dim", "slice", "rev", "concatenate", "split", "pad", "select_n"),
    *("stack", "unstack", "tile", "gather", "dynamic_slice", "dynamic_update_slice"),
}


# ---- Operations number by number


def _spread(value: Any, x: Any, eqn: JaxprEqn) -> Any:
    """The sets of an operand for each number of the result, to whose shape it is broadcast."""
    shape = aval(eqn.outvars[0]).shape
    return value if not is_set(value) or aval(x).shape == shape else value[np.broadcast_to(places_of(x), shape).ravel()]


def _elementwise(eqn: JaxprEqn, values: list[Any]) -> Any:
    found = united([_spread(value, x, eqn) for value, x in zip(values, eqn.invars, strict=True)])
    if eqn.primitive.name == "mul" and sum(map(is_set, values)) == 1:
        factor = known(values[1 if is_set(values[0]) else 0])
        if factor is not None and not factor.all():
            places = np.arange(found.shape[0])
            return picked(found, np.where(np.broadcast_to(factor, aval(eqn.outvars[0]).shape).ravel() != 0, places, -1))
    return found


def _bits(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Bits as another dtype; of another width, numbers are cut or put together."""
    return values[0] if aval(eqn.invars[0]).shape == aval(eqn.outvars[0]).shape else None


# ---- Sums


def _reduced(eqn: JaxprEqn, values: list[Any]) -> Any:
    shape = aval(eqn.invars[0]).shape
    axes = set(eqn.params["axes"])
    thin = [1 if i in axes else n for i, n in enumerate(shape)]
    size = math.prod(thin)
    return grouped(values[0], np.broadcast_to(np.arange(size).reshape(thin), shape).ravel(), size)


def _cumulated(eqn: JaxprEqn, values: list[Any]) -> Any:
    axis, places = eqn.params["axis"], places_of(eqn.invars[0])
    lines = np.moveaxis(places, axis, -1).reshape(-1, places.shape[axis])
    count, length = lines.shape
    if count * length * (length + 1) // 2 > PAIRS:
        line = np.empty(places.size, int)
        line[lines] = np.arange(count)[:, None]
        return grouped(values[0], line, count)[line]
    after, before = np.tril_indices(length)
    if eqn.params["reverse"]:
        after, before = before, after
    return matrix_at(lines[:, after], lines[:, before], (places.size, places.size)) @ values[0]


def _product(eqn: JaxprEqn, values: list[Any]) -> Any:
    """A matrix product: over all that is summed over, but for what meets a known zero."""
    if all(map(is_set, values)):
        return None
    (contract, batch) = eqn.params["dimension_numbers"]
    side = 0 if is_set(values[0]) else 1

    def ordered(array: np.ndarray, k: int) -> np.ndarray:
        """With three axes: batch, free, contracted."""
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
    groups = np.empty(places.size, int)
    numbers = np.arange(batches * count).reshape(batches, count)
    groups[places.ravel()] = np.broadcast_to(numbers[..., None], places.shape).ravel()
    sums = grouped(values[side], groups, batches * count)
    return sums[np.broadcast_to(numbers[:, :, None] if side == 0 else numbers[:, None, :], shape).ravel()]


def _scattered(eqn: JaxprEqn, values: list[Any]) -> Any:
    """What is there, and all that is put there."""
    operand, indices, updates = values
    if not is_set(updates):
        return operand
    where = known(indices)
    out, given = aval(eqn.outvars[0]).shape, aval(eqn.invars[2])
    if where is None:
        return united([operand, *everything(eqn, [updates])])
    if math.prod(out) >= 2**24:  # float32 counts up to there
        return None

    def put(x: jax.Array) -> jax.Array:
        params = {key: eqn.params[key] for key in ("dimension_numbers", "mode")}
        return jax.lax.scatter_add(jnp.zeros(out, np.float32), jnp.asarray(where), x, **params)

    with jax.ensure_compile_time_eval():
        places = jnp.arange(1.0, math.prod(out) + 1, dtype=np.float32).reshape(out)
        (to,) = jax.linear_transpose(put, jax.ShapeDtypeStruct(given.shape, np.float32))(places)
    to = np.asarray(to).ravel().astype(int) - 1
    found = np.flatnonzero(to >= 0)
    return united([operand, matrix_at(to[found], found, (math.prod(out), len(to))) @ updates])


_RULES: dict[str, Callable[[JaxprEqn, list[Any]], Any]] = {
    "reduce_sum": _reduced,
    "cumsum": _cumulated,
    "bitcast_convert_type": _bits,
    "dot_general": _product,
    "conv_general_dilated": convolved,
    "reduce_window_sum": windowed,
    "select_and_gather_add": windowed,
    "select_and_scatter_add": scattered_from_windows,
    "scatter": _scattered,
    "scatter-add": _scattered,
}

# Operations that are known to mix everything, or of which nobody knows what comes from where.
_OPAQUE = {"sort"}
