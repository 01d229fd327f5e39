"""Which numbers of its arguments the results of a program depend on: sets, carried from operation to operation.

What is looked at is a derivative as a program, in which tangents, or cotangents, go in and come out. The sets of an
array are the rows of a sparse matrix of booleans, and an operation that moves or adds numbers is a product with such a
matrix. Constants are computed by JAX itself, and what an operation without a rule gives is taken to depend on all that
goes in: too many entries cost time, too few would be wrong numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from ._compat import Tracer, scan_counts
from ._jaxpr import CALLS, aval, evaluate, interpret

# A value that does not depend on what is asked about, and is not known.
UNKNOWN = object()
# Loops of so many turns are gone through one by one, with what is known in each; of longer ones the body just once.
_TURNS = 32
# Above so many pairs a sum counts as one over everything along its axes.
_PAIRS = 2**23


def dependence(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """For each output of a program the matrix (its size, columns) of what it depends on, and what has no rule.

    Args:
      jaxpr: the program.
      consts: its constants; those that are traced count as unknown.
      args: for each argument such a matrix, or `UNKNOWN`.

    Returns:
      A matrix for each output, or `UNKNOWN` where it depends on nothing; the names of primitives without a rule.
    """
    blind: list[str] = []
    return _run(jaxpr, consts, args, blind), blind


def is_set(value: Any) -> bool:
    """Whether a value depends on what is asked about."""
    return getattr(value, "format", None) == "csr"


def unit_sets(sizes: Sequence[int]) -> tuple[list[Any], int]:
    """For arrays of these sizes sets with one column for each number, and how many columns there are."""
    ends = np.cumsum([0, *sizes])
    columns = int(ends[-1])
    return [
        _matrix(np.arange(size), end + np.arange(size), (size, columns)) for size, end in zip(sizes, ends, strict=False)
    ], columns


class Later:
    """A value that depends on constants only, computed when it is asked for."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.value = cache(compute)


def known(value: Any) -> np.ndarray | None:
    """A value as an array, None if it is not known."""
    if isinstance(value, Later):
        value = value.value()
    if value is UNKNOWN or is_set(value) or isinstance(value, Tracer):
        return None
    if jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.prng_key):
        return None
    return np.asarray(value)


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], blind: list[str]) -> list[Any]:
    def visit(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        if not any(map(is_set, values)):
            return _constant(eqn, values)
        name = eqn.primitive.name
        if not any(map(_differentiable, eqn.outvars)):
            return [UNKNOWN] * len(eqn.outvars)
        if name in CALLS:
            body = eqn.params[CALLS[name]]
            found = _run(getattr(body, "jaxpr", body), getattr(body, "consts", ()), values, blind)
        elif name in _MOVES:
            found = _moved(eqn, values)
        elif name in _ELEMENTWISE:
            found = [_elementwise(eqn, values)]
        elif name in _LOOPS:
            found = _LOOPS[name](eqn, values, blind)
        else:
            rule = _RULES.get(name)
            result = None if rule is None else rule(eqn, values)
            if rule is None and name not in _OPAQUE:
                blind.append(name)
            found = [result] if result is not None else _everything(eqn, values)
        return [
            value if not is_set(value) or (value.nnz and _differentiable(x)) else UNKNOWN
            for value, x in zip(found, eqn.outvars, strict=True)
        ]

    return interpret(jaxpr, consts, args, visit)


def _differentiable(x: Any) -> bool:
    return jnp.issubdtype(aval(x).dtype, jnp.inexact)


def _constant(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """What an operation gives that nothing asked about goes into: known if all operands are."""
    if eqn.effects or any(value is UNKNOWN or isinstance(value, Tracer) for value in values):
        return [UNKNOWN] * len(eqn.outvars)

    @cache
    def compute() -> list[Any]:
        operands = [value.value() if isinstance(value, Later) else value for value in values]
        if any(operand is UNKNOWN for operand in operands):
            return [UNKNOWN] * len(eqn.outvars)
        try:
            with jax.ensure_compile_time_eval():
                return evaluate(eqn, *operands)
        except Exception:  # such as the index along an axis that is mapped around all of this
            return [UNKNOWN] * len(eqn.outvars)

    def number(i: int) -> Later:
        return Later(lambda: compute()[i])

    return [number(i) for i in range(len(eqn.outvars))]


# ---- Sets of arrays


def _numbers(x: Any) -> np.ndarray:
    """The places of an array's numbers, in its shape."""
    return np.arange(math.prod(aval(x).shape)).reshape(aval(x).shape)


def _matrix(rows: Any, cols: Any, shape: tuple[int, int]) -> Any:
    from scipy.sparse import csr_array

    rows, cols = np.ravel(rows), np.ravel(cols)
    return csr_array((np.ones(len(rows), bool), (rows, cols)), shape=shape)


def _stacked(parts: Sequence[Any]) -> Any:
    """The sets of several arrays, one behind another."""
    from scipy.sparse import vstack

    return vstack(parts, format="csr")


def _picked(sets: Any, places: np.ndarray) -> Any:
    """The sets at these places, none where a place is below 0."""
    places = places.ravel()
    found = np.flatnonzero(places >= 0)
    if len(found) == len(places):
        return sets[places]
    return _matrix(found, places[found], (len(places), sets.shape[0])) @ sets


def _union(sets: Sequence[Any]) -> Any:
    """The union of sets of arrays of one size; `UNKNOWN` for none."""
    found = [x for x in sets if is_set(x)]
    return sum(found[1:], start=found[0]) if found else UNKNOWN


def _everything(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Each number depends on all that goes in."""
    found = [value for value in values if is_set(value)]
    columns = np.unique(np.concatenate([value.indices for value in found]))
    whole = _matrix(np.zeros(len(columns), int), columns, (1, found[0].shape[1]))
    return [whole[np.zeros(math.prod(aval(x).shape), int)] for x in eqn.outvars]


def _grouped(sets: Any, groups: np.ndarray, size: int) -> Any:
    """The union of the sets of each group."""
    return _matrix(groups, np.arange(groups.size), (size, groups.size)) @ sets


# ---- Operations by which each number is one of an operand, or a constant


def _moved(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Does to the places of the operands' numbers what the operation does to the numbers."""
    name, params = eqn.primitive.name, eqn.params
    if name in _KEPT and (name != "reshape" or params["dimensions"] is None):
        return values[: len(eqn.outvars)]
    ends = np.cumsum([0, *(value.shape[0] if is_set(value) else 0 for value in values)])
    places: list[Any] = [
        _numbers(x) + ends[i] if is_set(value) else None
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
            return [_union([_spread(value, x, eqn) for value, x in zip(values[1:], eqn.invars[1:], strict=True)])]
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
                update = [x for x in _everything(eqn, [values[1]])] if is_set(values[1]) else []
                return [_union([values[0], *update])]
            return _everything(eqn, values)
        fill = {"fill_value": -1} if name == "gather" else {}
        with jax.ensure_compile_time_eval():
            moved = [jnp.asarray(x, np.int32) for x in none[: len(values) - len(where)]]
            out = [np.asarray(eqn.primitive.bind(*moved, *indices, **{**eqn.params, **fill}))]
    table = _stacked([value for value in values if is_set(value)])
    return [_picked(table, x) for x in out]


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

_ELEMENTWISE = {
    *("neg", "add", "add_any", "sub", "mul", "div", "convert_element_type", "reduce_precision", "real", "imag", "conj"),
    *(
        "complex",
        "abs",
        "max",
        "min",
        "sign",
        "sin",
        "cos",
        "tanh",
        "exp",
        "log",
        "integer_pow",
        "pow",
        "square",
        "sqrt",
    ),
}


def _spread(value: Any, x: Any, eqn: JaxprEqn) -> Any:
    """The sets of an operand for each number of the result, to whose shape it is broadcast."""
    shape = aval(eqn.outvars[0]).shape
    return value if not is_set(value) or aval(x).shape == shape else value[np.broadcast_to(_numbers(x), shape).ravel()]


def _elementwise(eqn: JaxprEqn, values: list[Any]) -> Any:
    found = _union([_spread(value, x, eqn) for value, x in zip(values, eqn.invars, strict=True)])
    if eqn.primitive.name == "mul" and sum(map(is_set, values)) == 1:
        factor = known(values[1 if is_set(values[0]) else 0])
        if factor is not None and not factor.all():
            places = np.arange(found.shape[0])
            return _picked(
                found, np.where(np.broadcast_to(factor, aval(eqn.outvars[0]).shape).ravel() != 0, places, -1)
            )
    return found


# ---- Sums


def _reduced(eqn: JaxprEqn, values: list[Any]) -> Any:
    shape = aval(eqn.invars[0]).shape
    axes = set(eqn.params["axes"])
    thin = [1 if i in axes else n for i, n in enumerate(shape)]
    size = math.prod(thin)
    return _grouped(values[0], np.broadcast_to(np.arange(size).reshape(thin), shape).ravel(), size)


def _cumulated(eqn: JaxprEqn, values: list[Any]) -> Any:
    axis, places = eqn.params["axis"], _numbers(eqn.invars[0])
    lines = np.moveaxis(places, axis, -1).reshape(-1, places.shape[axis])
    length = lines.shape[1]
    after, before = np.tril_indices(length)
    if eqn.params["reverse"]:
        after, before = before, after
    if lines.shape[0] * len(after) > _PAIRS:
        return None
    return _matrix(lines[:, after], lines[:, before], (places.size, places.size)) @ values[0]


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

    places = ordered(_numbers(eqn.invars[side]), side)
    other = ordered(_numbers(eqn.invars[1 - side]), 1 - side)
    batches, count, _ = places.shape
    shape = (batches, count, other.shape[1]) if side == 0 else (batches, other.shape[1], count)
    weights = known(values[1 - side])
    if weights is not None and not weights.all():
        b, j, k = np.nonzero(ordered(weights, 1 - side))
        if count * len(b) <= _PAIRS:
            out = np.arange(math.prod(shape)).reshape(shape)
            to = out[b, :, j] if side == 0 else out[b, j, :]
            size = (out.size, places.size)
            return _matrix(to, places[b, :, k], size) @ values[side]
    groups = np.empty(places.size, int)
    numbers = np.arange(batches * count).reshape(batches, count)
    groups[places.ravel()] = np.broadcast_to(numbers[..., None], places.shape).ravel()
    sums = _grouped(values[side], groups, batches * count)
    return sums[np.broadcast_to(numbers[:, :, None] if side == 0 else numbers[:, None, :], shape).ravel()]


def _convolved(eqn: JaxprEqn, values: list[Any]) -> Any:
    """A convolution: over the kernel's places and what goes into its channels, but for what meets a known zero."""
    if is_set(values[1]):
        return None
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    places, out = (
        _numbers(x).transpose(spec) for x, spec in zip((eqn.invars[0], eqn.outvars[0]), numbers[::2], strict=True)
    )
    kernel = [aval(eqn.invars[1]).shape[i] for i in numbers[1]]
    axes = [
        _along(size, window, stride, padding, base, dilation)
        for size, window, stride, padding, base, dilation in zip(
            places.shape[2:],
            kernel[2:],
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            strict=True,
        )
    ]
    to, source, within = _together(axes, (out.shape[2:], places.shape[2:], tuple(kernel[2:])))
    outputs, channels, batch, area = kernel[0], kernel[1], out.shape[0], math.prod(out.shape[2:])
    weights = known(values[1])
    groups = max(params["feature_group_count"], params["batch_group_count"])
    mask = None
    if weights is not None and not weights.all() and outputs * channels * batch * len(to) <= _PAIRS:
        mask, groups = weights.transpose(numbers[1]).reshape(outputs, channels, -1) != 0, outputs
    # The outputs of a group go over the same numbers.
    places = places.reshape(*places.shape[:2], -1)
    rows, cols = [], []
    for group in range(groups):
        first = group * outputs // groups
        part = first * params["feature_group_count"] // outputs
        batches = np.arange(batch) + batch * (first * params["batch_group_count"] // outputs)
        for channel in range(channels):
            chosen = slice(None) if mask is None else mask[group, channel, within]
            rows.append((group * batch + np.arange(batch)[:, None]) * area + to[chosen])
            cols.append(places[batches[:, None], part * channels + channel, source[chosen]])
    shape = (groups * batch * area, places.size)
    sums = _matrix(np.concatenate([x.ravel() for x in rows]), np.concatenate([x.ravel() for x in cols]), shape)
    of_group = (np.arange(outputs) * groups // outputs)[:, None]
    row = (of_group * batch + np.arange(batch)[:, None, None]) * area + np.arange(area)
    picked = np.empty(out.size, int)
    picked[out.ravel()] = row.ravel()
    return (sums @ values[0])[picked]


def _along(size: int, window: int, stride: int, padding: tuple[int, int], base: int, dilation: int) -> tuple[Any, ...]:
    """Along one axis for each window, and each of its places that meets a number, the three; how many windows."""
    reach = (window - 1) * dilation + 1
    count = max(0, (((size - 1) * base + 1 if size else 0) + sum(padding) - reach) // stride + 1)
    at = np.arange(count)[:, None] * stride - padding[0] + np.arange(window) * dilation
    inside = (at >= 0) & (at <= (size - 1) * base) & (at % base == 0)
    to, within = np.nonzero(inside)
    return to, at[inside] // base, within, count


def _together(axes: Sequence[tuple[Any, ...]], shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """The same for all axes: places in arrays of these shapes."""
    found = []
    for which, shape in enumerate(shapes):
        grid = np.meshgrid(*(axis[which] for axis in axes), indexing="ij")
        found.append((np.ravel_multi_index(grid, shape) if grid else np.zeros(1, int)).ravel())
    return found


def _windows(shape: tuple[int, ...], params: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, int]:
    """Pairs of a window and a number in it, and how many windows there are."""
    ones, size = [1] * len(shape), params["window_dimensions"]
    dilations = [params.get(key) or ones for key in ("base_dilation", "window_dilation")]
    axes = list(map(_along, shape, size, params["window_strides"], params["padding"], *dilations))
    counts = tuple(axis[3] for axis in axes)
    window, number = _together(axes, (counts, shape))
    return window, number, math.prod(counts)


def _windowed(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Sums over windows, or one number out of each; which one may depend on operands that nothing is asked about."""
    if any(map(is_set, values[1:])):
        return None
    shape = aval(eqn.invars[0]).shape
    window, number, count = _windows(shape, eqn.params)
    return _matrix(window, number, (count, math.prod(shape))) @ values[0]


def _scattered_from_windows(eqn: JaxprEqn, values: list[Any]) -> Any:
    if not is_set(values[0]) or is_set(values[1]):
        return None
    shape = aval(eqn.invars[1]).shape
    window, number, count = _windows(shape, eqn.params)
    return _matrix(number, window, (math.prod(shape), count)) @ values[0]


def _scattered(eqn: JaxprEqn, values: list[Any]) -> Any:
    """What is there, and all that is put there."""
    operand, indices, updates = values
    if not is_set(updates):
        return operand
    where = known(indices)
    out, given = aval(eqn.outvars[0]).shape, aval(eqn.invars[2])
    if where is None:
        return _union([operand, *_everything(eqn, [updates])])
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
    return _union([operand, _matrix(to[found], found, (math.prod(out), len(to))) @ updates])


_RULES: dict[str, Callable[[JaxprEqn, list[Any]], Any]] = {
    "reduce_sum": _reduced,
    "cumsum": _cumulated,
    "dot_general": _product,
    "conv_general_dilated": _convolved,
    "reduce_window_sum": _windowed,
    "select_and_gather_add": _windowed,
    "select_and_scatter_add": _scattered_from_windows,
    "scatter": _scattered,
    "scatter-add": _scattered,
}


# Operations that are known to mix everything, or of which nobody knows what comes from where.
_OPAQUE = {"sort"}


# ---- Branches and loops


def _branched(eqn: JaxprEqn, values: list[Any], blind: list[str]) -> list[Any]:
    which = known(values[0])
    branches = eqn.params["branches"]
    taken = branches if which is None else [branches[int(np.clip(which, 0, len(branches) - 1))]]
    found = [_run(branch.jaxpr, branch.consts, values[1:], blind) for branch in taken]
    return [_union(outs) for outs in zip(*found, strict=True)]


def _body(closed: Any, values: list[Any], carried: slice, blind: list[str]) -> tuple[list[bool], list[Any]]:
    """Which operands of a loop's body have sets in some turn, and the sets of its results in terms of these operands.

    What is carried is known in no turn, since it changes from one to the next.
    """
    jaxpr = closed.jaxpr
    has = [is_set(value) for value in values]
    start = carried.start
    while True:
        sizes = [math.prod(aval(x).shape) if flag else 0 for x, flag in zip(jaxpr.invars, has, strict=True)]
        ends = np.cumsum([0, *sizes])
        given = [
            _matrix(np.arange(size), end + np.arange(size), (size, ends[-1])) if flag else value
            for value, flag, size, end in zip(values, has, sizes, ends, strict=False)
        ]
        given = [
            UNKNOWN if i >= start and not flag else value
            for i, (value, flag) in enumerate(zip(given, has, strict=True))
        ]
        seen: list[str] = []
        found = _run(jaxpr, closed.consts, given, seen)
        count = carried.stop - carried.start
        now = [old or is_set(new) for old, new in zip(has[carried], found[:count], strict=True)]
        if now == has[carried]:
            blind.extend(seen)
            return has, found
        has[carried] = now


def _rows(x: Any, value: Any, columns: int) -> Any:
    """The sets of a value, empty ones if it has none."""
    return value if is_set(value) else _matrix([], [], (math.prod(aval(x).shape), columns))


def _scanned(eqn: JaxprEqn, values: list[Any], blind: list[str]) -> list[Any]:
    params, closed = eqn.params, eqn.params["jaxpr"]
    consts, carries = scan_counts(params)
    length = params["length"]
    columns = next(value.shape[1] for value in values if is_set(value))
    order = range(length)[::-1] if params["reverse"] else range(length)
    variables = closed.jaxpr.invars
    if length <= _TURNS:

        def slice_of(value: Any, x: Any, turn: int) -> Any:
            if is_set(value):
                size = math.prod(aval(x).shape)
                return value[turn * size : (turn + 1) * size]
            return UNKNOWN if value is UNKNOWN else Later(lambda: _at(value, turn))

        def turn_of(carry: list[Any], turn: int) -> list[Any]:
            xs = [
                slice_of(v, x, turn)
                for v, x in zip(values[consts + carries :], variables[consts + carries :], strict=True)
            ]
            return _run(closed.jaxpr, closed.consts, [*values[:consts], *carry, *xs], blind)
    else:
        has, found = _body(closed, values, slice(consts, consts + carries), blind)

        def turn_of(carry: list[Any], turn: int) -> list[Any]:
            rows = []
            for i, (x, flag) in enumerate(zip(variables, has, strict=True)):
                size = math.prod(aval(x).shape)
                if not flag:
                    continue
                if i < consts:
                    rows.append(values[i])
                elif i < consts + carries:
                    rows.append(_rows(x, carry[i - consts], columns))
                else:
                    rows.append(values[i][turn * size : (turn + 1) * size])
            table = _stacked(rows)
            return [out @ table if is_set(out) else UNKNOWN for out in found]

    carry, turns = list(values[consts : consts + carries]), {}
    for turn in order:
        outs = turn_of(carry, turn)
        carry, turns[turn] = outs[:carries], outs[carries:]
    stacked = []
    for i, x in enumerate(closed.jaxpr.outvars[carries:]):
        parts = [turns[turn][i] for turn in range(length)]
        some = any(map(is_set, parts))
        stacked.append(_stacked([_rows(x, p, columns) for p in parts]) if some else UNKNOWN)
    return [*carry, *stacked]


def _at(value: Any, turn: int) -> Any:
    found = known(value)
    return UNKNOWN if found is None else found[turn]


def _repeated(eqn: JaxprEqn, values: list[Any], blind: list[str]) -> list[Any]:
    """A loop of any number of turns: what is carried after none, one, two and so on, together."""
    skipped, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    values, closed = values[skipped:], eqn.params["body_jaxpr"]
    columns = next((value.shape[1] for value in values if is_set(value)), 0)
    if not columns:
        return [UNKNOWN] * len(eqn.outvars)
    has, found = _body(closed, values, slice(consts, len(values)), blind)
    variables = closed.jaxpr.invars
    fixed = [value for value, flag in zip(values[:consts], has, strict=False) if flag]
    now = [_rows(x, v, columns) for x, v in zip(variables[consts:], values[consts:], strict=True)]
    while True:
        table = _stacked([*fixed, *(x for x, flag in zip(now, has[consts:], strict=True) if flag)])
        after = [old + out @ table if is_set(out) else old for old, out in zip(now, found, strict=True)]
        if all(new.nnz == old.nnz for new, old in zip(after, now, strict=True)):
            return after
        now = after


_LOOPS: dict[str, Callable[[JaxprEqn, list[Any], list[str]], list[Any]]] = {
    "cond": _branched,
    "scan": _scanned,
    "while": _repeated,
}
