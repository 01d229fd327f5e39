"""Rewrite convolutions as matrix products and pooling as slices, anywhere in a program: `convolutions_as_products`.

XLA's CPU backend is slow at a convolution whose weights are mapped over, at a convolution inside a loop, and at the
gradients of convolutions and of pooling (`select_and_scatter`). It is fast at large matrix products. So a convolution
becomes one product with patches: shifted slices of the input, one for each position of the window, concatenated. For
the gradient of the input it becomes one product whose parts are added up, each shifted by its position.

The order of the long axes (positions, batch) matters as much: with the batch innermost, every slice is a contiguous
block of memory. So images are stored with channels first and the batch last, through all elementwise operations, and
transposed back only where an operation needs the original order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.compat import ClosedJaxpr, Jaxpr, JaxprEqn, Tracer
from .._core.jaxpr import CALLS, ELEMENTWISE, REMAT, at_source, aval, bodies, called, evaluate, interpret, with_inner
from .convolution import Convolution

# Windows with more positions than this are not rewritten, since each position is one slice in the program.
_MOST_SLICES = 64

WITH_BODIES = frozenset({"scan", "while", "cond"}) | REMAT
# Interpreted rather than evaluated, so that permuted arrays pass through calls: activation functions are calls.
_INTO_CALLS = frozenset(CALLS) - WITH_BODIES - {"call_hi_primitive"}


def convolutions_as_products(fun: Callable[..., Any], *, everywhere: bool = False) -> Callable[..., Any]:
    """Return `fun` with convolutions as matrix products and pooling as slices; results are equal to rounding.

    Use it only on functions that will not be differentiated again: custom derivative rules are lost.

    Args:
      fun: the function.
      everywhere: whether also convolutions at which XLA is fast are rewritten, because it is slow at them where they
        will run: in a loop, or with mapped weights. In a loop of `fun` itself they always are.
    """
    return run_by(run_everywhere if everywhere else run_outside_loops, fun)


def products_unless_differentiated(fun: Callable[..., Any], run: Any = None) -> Callable[..., Any]:
    """Return a function with products, whose derivatives are those of `fun` as it was.

    `run(jaxpr, consts, args)` evaluates the rewritten program; None for all convolutions.
    """

    def rewritten(*args: Any) -> Any:
        closed, out = jax.make_jaxpr(fun, return_shape=True)(*args)
        count = len(closed.consts)

        @jax.custom_jvp
        def outputs(*values: Any) -> list[Any]:  # what `fun` closes over is an argument too, so it has derivatives
            return (run or run_everywhere)(closed.jaxpr, values[:count], values[count:])

        @outputs.defjvp
        def derivative(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            def as_it_was(*values: Any) -> list[Any]:
                return interpret(closed.jaxpr, values[:count], values[count:], lambda eqn, args: evaluate(eqn, *args))

            return jax.jvp(as_it_was, values, tangents)

        return jax.tree.unflatten(jax.tree.structure(out), outputs(*closed.consts, *jax.tree.leaves(args)))

    return rewritten


def run_by(run: Callable[..., list[Any]], fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that traces `fun` and evaluates its program by `run(jaxpr, consts, args)`."""

    def rewritten(*args: Any) -> Any:
        closed, out = jax.make_jaxpr(fun, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(out), run(closed.jaxpr, closed.consts, jax.tree.leaves(args)))

    return rewritten


def has_convolution(jaxpr: Jaxpr) -> bool:
    """Return whether a program contains a convolution, at any depth."""
    return any(eqn.primitive.name == "conv_general_dilated" for eqn in with_inner(jaxpr.eqns))


def largest_convolution(jaxpr: Jaxpr) -> float:
    """Return the bytes of the largest result of a convolution, at any depth; infinity if one is not rewritten."""
    return _largest(jaxpr, lambda of: math.prod(of.shape))


def largest_copies(jaxpr: Jaxpr) -> float:
    """Return the most bytes that a convolution copies, at any depth; infinity if one is not rewritten."""
    return _largest(jaxpr, lambda of: of.number * of.positions * min(of.patches, of.parts))


def _largest(jaxpr: Jaxpr, elements: Callable[[Convolution], float]) -> float:
    """Return the most bytes of any convolution, counted in elements; infinity if one is not rewritten."""
    found = [eqn for eqn in with_inner(jaxpr.eqns) if eqn.primitive.name == "conv_general_dilated"]
    sizes = [elements(Convolution(eqn)) * aval(eqn.outvars[0]).dtype.itemsize for eqn in found]
    return max(sizes, default=0.0) if all(map(_is_rewritten, found)) else math.inf


@dataclass(frozen=True)
class _Permuted:
    """An array with its axes in another order: axis i of `array` is axis `order[i]` of the array in the program.

    If it was padded with zeros, `unpadded` has the array before and the padding, both in this order.
    """

    array: jax.Array
    order: tuple[int, ...]
    unpadded: tuple[jax.Array, list[tuple[int, int, int]]] | None = None


Choice = Callable[[JaxprEqn, Sequence[Any]], bool]


def run_chosen(
    chosen: Choice, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], *, inside: Choice | None = None
) -> list[Any]:
    """Evaluate a program, with those convolutions and poolings rewritten for which `chosen(eqn, values)` is true.

    In its loops and branches `inside` chooses; the same as outside if None.
    """
    return [plain(x) for x in interpret(jaxpr, consts, args, partial(_visit, chosen, inside or chosen))]


def _is_slow(eqn: JaxprEqn, values: Sequence[Any]) -> bool:
    """Return whether XLA's CPU backend is slow at a convolution outside of a loop; it is slow at all pooling."""
    if eqn.primitive.name != "conv_general_dilated":
        return True
    of = Convolution(eqn)
    # A window of one position copies no patches, so an image that is permuted already need not be transposed back.
    return of.is_slow or (of.positions == 1 and isinstance(values[0], _Permuted))


def _any(*_: Any) -> bool:
    return True


# Evaluate a program (jaxpr, consts, args) with some convolutions as products: all; those at which XLA is slow out of
# loops, and all in loops; the former only, for a forward pass, at which XLA is as fast in loops.
run_everywhere = partial(run_chosen, _any)
run_outside_loops = partial(run_chosen, _is_slow, inside=_any)
run_where_slow = partial(run_chosen, _is_slow)


def is_slow_alone(jaxpr: Jaxpr) -> bool:
    """Return whether XLA's CPU backend is slow at every convolution of a program, at any depth, also out of loops."""
    found = [eqn for eqn in with_inner(jaxpr.eqns) if eqn.primitive.name == "conv_general_dilated"]
    return all(Convolution(eqn).is_slow for eqn in found)


def _visit(chosen: Choice, inside: Choice, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
    """Return the results of one operation; elementwise operations keep permuted arrays permuted."""
    name = eqn.primitive.name
    if name in _INTO_CALLS:
        with at_source(eqn):
            return interpret(*called(eqn), values, partial(_visit, chosen, inside))
    if name in WITH_BODIES and any(map(has_convolution, bodies(eqn))):
        eqn = with_bodies(eqn, partial(run_chosen, chosen if name in REMAT else inside, inside=inside))
    if name in _PRODUCTS_AND_SLICES and chosen(eqn, values):
        with at_source(eqn):
            out = _PRODUCTS_AND_SLICES[name](eqn, *values)
        if out is not None:  # None: the operation is not rewritten, but evaluated below
            return [out]
    if isinstance(values[0] if values else None, _Permuted):
        if name == "pad":
            return [_padded(eqn, *values)]
        if name in ("reshape", "squeeze") and (reshaped := _without_ones(eqn, values[0])) is not None:
            return [reshaped]
    order = next((x.order for x in values if isinstance(x, _Permuted)), None)
    arrays = list(map(plain, values))
    if order is not None and name in ELEMENTWISE:
        arrays = [lax.transpose(x, order) if jnp.ndim(x) else x for x in arrays]
        return [_Permuted(x, order) for x in evaluate(eqn, *arrays)]
    return evaluate(eqn, *arrays)


def with_bodies(eqn: JaxprEqn, run: Callable[..., list[Any]]) -> JaxprEqn:
    """Return the operation with each of its bodies replaced by the trace of `run(jaxpr, consts, args)`."""
    return eqn.replace(params={key: _retraced(value, run) for key, value in eqn.params.items()})


def _retraced(value: Any, run: Callable[..., list[Any]]) -> Any:
    """Return a parameter of an operation with the programs in it retraced, and anything else unchanged."""
    if isinstance(value, (tuple, list)):
        return type(value)(_retraced(x, run) for x in value)
    if not isinstance(value, (ClosedJaxpr, Jaxpr)):
        return value
    closed = value if isinstance(value, ClosedJaxpr) else ClosedJaxpr(value, ())
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in map(aval, closed.jaxpr.invars)]
    retraced = jax.make_jaxpr(lambda *args: run(closed.jaxpr, closed.consts, args))(*avals)
    if isinstance(value, ClosedJaxpr):
        return retraced
    return value if retraced.consts else retraced.jaxpr  # a `Jaxpr` that is not closed cannot hold constants


def plain(x: Any) -> Any:
    """Return a permuted array with its axes in the program's order, and anything else unchanged."""
    return lax.transpose(x.array, np.argsort(x.order)) if isinstance(x, _Permuted) else x


def _without_ones(eqn: JaxprEqn, x: _Permuted) -> _Permuted | None:
    """Return a permuted array with axes of size one added or removed; None for any other reshape.

    A mapped function has such an axis at each convolution: that of the batch of one example.
    """
    if eqn.params.get("sharding") is not None:
        return None
    before, after = aval(eqn.invars[0]).shape, aval(eqn.outvars[0]).shape
    kept, now = [i for i, size in enumerate(before) if size != 1], [i for i, size in enumerate(after) if size != 1]
    if [before[i] for i in kept] != [after[i] for i in now]:
        return None
    ones = [i for i, size in enumerate(after) if size == 1]
    order = (*ones, *(now[kept.index(i)] for i in x.order if before[i] != 1))
    return _Permuted(x.array.reshape([after[i] for i in order]), order)


# If a permuted array already has the wanted order, the two transposes are inverse, and XLA removes both.
def _in_order(x: Any, order: Sequence[int]) -> jax.Array:
    """Return `x` as an array with its axes in the given order."""
    return lax.transpose(plain(x), order)


# Convolutions.


def _is_rewritten(eqn: JaxprEqn) -> bool:
    """Return whether a convolution becomes a product: not if it is empty, or has too many positions."""
    of = Convolution(eqn)
    empty = any(0 in aval(x).shape for x in (*eqn.invars, *eqn.outvars))
    return not empty and min(of.positions, of.results) <= _MOST_SLICES


def convolved(eqn: JaxprEqn, lhs: Any, rhs: Any) -> Any:
    """Return a convolution as a product; None if it is empty, or window and result both have too many positions.

    Three kinds of product give the same result. By patches: copies the input once for each window position. By parts:
    uses the input as it is and copies the result once for each window position. By results: for the gradient of
    weights, where the "window" is an image and the result is as small as a kernel.
    """
    if not _is_rewritten(eqn):
        return None
    of = Convolution(eqn)
    if of.positions > of.results:
        out = _by_results(of, lhs, rhs)
    elif of.parts < of.patches and of.batches == 1:
        out = _by_parts(of, lhs, rhs)
    else:
        out = _by_patches(of, lhs, rhs)
    return _Permuted(out.array.astype(aval(eqn.outvars[0]).dtype), out.order)


def _by_patches(of: Convolution, lhs: Any, rhs: Any) -> _Permuted:
    """Return one product of the weights with patches of shape (positions, channels, places, batch).

    out[f, y, b] = Σ over positions k and channels c of w[k, c, f] x[c, y·stride + k·dilation, b].
    """
    x = of.padded(_in_order(lhs, (of.channels, *of.places, of.batch)))
    w = _in_order(rhs, (*of.window, of.inputs, of.features))
    patches = _slices(x, of.dilation, w.shape[:-2], of.strides, of.sizes)
    positions = len(patches)
    # (positions, group, channels of one, places, group of the batch, batch) and (positions, channels, group, features)
    patches = patches.reshape(positions, of.groups, w.shape[-2], math.prod(of.sizes), of.batches, of.number)
    w = w.reshape(positions, w.shape[-2], of.groups * of.batches, -1)
    if of.batches == 1:
        out = of.product(w, patches, ((0, 1), (0, 2)), ((2,), (1,)))
    else:
        out = of.product(w, patches.squeeze(1), ((0, 1), (0, 1)), ((2,), (3,)))
    return _Permuted(out.reshape(-1, *of.sizes, of.number), (of.out_features, *of.out_places, of.out_batch))


def _by_parts(of: Convolution, lhs: Any, rhs: Any) -> _Permuted:
    """Return the sum of the shifted parts, one for each window position, of one product of weights and input.

    The same sum as by patches, with the channels summed first: parts[k, f, y, b] = Σ over c of w[k, c, f] x[c, y, b].
    """
    x = _in_order(lhs, (of.channels, *of.places, of.batch))
    w = _in_order(rhs, (*of.window, of.inputs, of.features))
    counts = w.shape[:-2]
    left = w.reshape(math.prod(counts), w.shape[-2], of.groups, -1)
    right = x.reshape(of.groups, -1, math.prod(x.shape[1:]))
    parts = of.product(left, right, ((1,), (1,)), ((2,), (0,))).swapaxes(0, 1).reshape(*counts, -1, *x.shape[1:])
    # Sum over one window axis at a time: the first axis of `parts` has the positions along it, and is summed away.
    axis = len(counts)  # the spatial axis for this window axis, after its positions are summed away
    for i, (size, count) in enumerate(zip(of.sizes, counts, strict=True)):
        begins = [of.padding[i][0] - position * of.dilation[i] for position in range(count)]
        parts = _overlaid(parts, begins, of.spread[i], (size - 1) * of.strides[i] + 1, axis)
        parts = lax.slice_in_dim(parts, 0, None, of.strides[i], axis)
    return _Permuted(parts, (of.out_features, *of.out_places, of.out_batch))


def _by_results(of: Convolution, lhs: Any, rhs: Any) -> _Permuted:
    """Return one product of the weights with slices of the input, one for each position of the result.

    For a window larger than the result: in the gradient of weights the window is the output's cotangent, and the result
    is as large as a kernel.
    """
    x = of.padded(_in_order(lhs, (of.batch, *of.places, of.channels)))
    w = _in_order(rhs, (of.features, *of.window, of.inputs))
    slices = _slices(x, of.strides, of.sizes, of.dilation, w.shape[1:-1])
    window, inputs = math.prod(w.shape[1:-1]), w.shape[-1]
    # (results, group of the batch, batch, window, group, inputs of one) and (group, features, window, inputs of one)
    slices = slices.reshape(len(slices), of.batches, of.number, window, of.groups, inputs)
    w = w.reshape(of.groups * of.batches, -1, window, inputs)
    if of.batches == 1:
        out = of.product(slices.squeeze(1), w, ((2, 4), (2, 3)), ((3,), (0,))).transpose(1, 2, 0, 3)
    else:
        out = of.product(slices.squeeze(4), w, ((3, 4), (2, 3)), ((1,), (0,))).transpose(1, 2, 0, 3)
    return _Permuted(out.reshape(*of.sizes, of.number, -1), (*of.out_places, of.out_batch, of.out_features))


def _slices(
    x: jax.Array, steps: Sequence[int], counts: Sequence[int], strides: Sequence[int], sizes: Sequence[int]
) -> jax.Array:
    """Return slices along the axes after the first, shifted by `steps` for each position, stacked along a new axis 0.

    It slices one axis at a time, since XLA recomputes the operations that produce `x` for each slice of it.
    """
    for i in reversed(range(len(counts))):
        axis = len(counts)  # the spatial axis, after the new axes and the first
        begins = [position * steps[i] for position in range(counts[i])]
        length = (sizes[i] - 1) * strides[i] + 1
        x = jnp.stack([lax.slice_in_dim(x, begin, begin + length, strides[i], axis) for begin in begins])
    return x.reshape(-1, *x.shape[len(counts) :])


def _overlaid(parts: Sequence[Any] | jax.Array, begins: Sequence[int], step: int, length: int, axis: int) -> jax.Array:
    """Return an array of `length` along an axis that is the sum of all parts.

    The elements of a part are `step` apart, from its place in `begins` on; those outside are dropped. So the places p,
    p + step, ... are a sum of shifted parts for each p, and nothing but zeros is computed for the gaps.
    """
    shape, places = parts[0].shape, -(-length // step)
    if (len(parts), *begins, step, length) == (1, 0, 1, shape[axis]):
        return parts[0]
    terms = [[(k, begin // step) for k, begin in enumerate(begins) if begin % step == p] for p in range(step)]

    def shifted(k: int, begin: int) -> jax.Array:
        config = [(0, 0, 0)] * len(shape)
        config[axis] = (begin, places - shape[axis] - begin, 0)  # negative padding crops
        return lax.pad(parts[k], jnp.zeros((), parts[k].dtype), config)

    sums = [reduce(jnp.add, [shifted(*term) for term in of]) if of else jnp.zeros_like(shifted(0, 0)) for of in terms]
    return lax.slice_in_dim(lax.collapse(jnp.stack(sums, axis + 1), axis, axis + 2), 0, length, axis=axis)


# Pooling.


def _padded(eqn: JaxprEqn, x: _Permuted, fill: Any) -> _Permuted:
    """Return a permuted array with padding."""
    config = [eqn.params["padding_config"][i] for i in x.order]
    zeros = not isinstance(fill, Tracer) and not np.any(fill)
    return _Permuted(lax.pad(x.array, plain(fill), config), x.order, (x.array, config) if zeros else None)


def _pool(eqn: JaxprEqn, x: Any, *, combine: Callable[[jax.Array, jax.Array], jax.Array], empty: float) -> Any:
    """Return the slices of a window, combined elementwise; None for large windows, empty arrays and integers."""
    order = x.order if isinstance(x, _Permuted) else tuple(range(len(x.shape)))
    unpadded = x.unpadded if isinstance(x, _Permuted) else None
    x = _in_order(x, order)
    window, strides, padding, base, dilation = (
        [eqn.params[name][i] for i in order]
        for name in ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")
    )
    none = 0 in (*x.shape, *aval(eqn.outvars[0]).shape)
    if math.prod(window) > _MOST_SLICES or none or not jnp.issubdtype(x.dtype, jnp.floating):
        return None
    if (
        unpadded is not None
        and combine is lax.add
        and {*strides, *base, *dilation} == {1}
        and not any(map(any, padding))
    ):
        return _Permuted(_sums_of_padded(*unpadded, window), order)
    config = [(low, high, step - 1) for (low, high), step in zip(padding, base, strict=True)]
    x = lax.pad(x, jnp.asarray(empty, x.dtype), config)
    sizes = [aval(eqn.outvars[0]).shape[i] for i in order]
    return _Permuted(reduce(combine, _window_slices(x, window, strides, dilation, sizes)), order)


def _sums_of_padded(x: jax.Array, config: Sequence[tuple[int, int, int]], window: Sequence[int]) -> jax.Array:
    """Return the sums over the windows of `lax.pad(x, 0, config)`: the gradient of average pooling."""
    for axis, ((low, high, between), size) in enumerate(zip(config, window, strict=True)):
        step, count = between + 1, x.shape[axis]
        length = low + high + (count - 1) * step + 1 - (size - 1)
        if (low, high, step, size) == (size - 1, size - 1, size, size):  # windows side by side: repeat each element
            x = jnp.repeat(x, size, axis, total_repeat_length=length)
        else:
            x = _overlaid([x] * size, [low - k for k in range(size)], step, length, axis)
    return x


def _window_slices(
    x: jax.Array, window: Sequence[int], strides: Sequence[int], dilation: Sequence[int], sizes: Sequence[int]
) -> list[jax.Array]:
    """Return for each position of a window the slice of `x` at that position of all windows."""
    found = []
    for position in itertools.product(*map(range, window)):
        start = [i * step for i, step in zip(position, dilation, strict=True)]
        stop = [begin + (size - 1) * stride + 1 for begin, size, stride in zip(start, sizes, strides, strict=True)]
        found.append(lax.slice(x, start, stop, strides))
    return found


def _scatter(eqn: JaxprEqn, source: Any, operand: Any) -> Any:
    """Return the gradient of max pooling: each cotangent goes to the first element that equals the maximum."""
    params = eqn.params
    given = next((x for x in (operand, source) if isinstance(x, _Permuted)), None)
    order = given.order if given else tuple(range(len(operand.shape)))
    source, operand = _in_order(source, order), _in_order(operand, order)
    window, strides, padding = (
        [params[name][i] for i in order] for name in ("window_dimensions", "window_strides", "padding")
    )
    if params["select_prim"].name != "ge" or math.prod(window) > _MOST_SLICES or 0 in source.shape:
        return None
    sizes, counts = operand.shape, source.shape
    operand = lax.pad(operand, jnp.zeros((), operand.dtype), [(low, high, 0) for low, high in padding])
    positions = list(itertools.product(*map(range, window)))

    def inside(position: Sequence[int]) -> np.ndarray:
        """Return for all windows whether their element at a position is no padding."""
        found = np.array(True)
        for i in (i for i, sides in enumerate(padding) if any(sides)):
            places = np.arange(counts[i]) * strides[i] + position[i] - padding[i][0]
            found = found & np.expand_dims(
                (places >= 0) & (places < sizes[i]), [k for k in range(len(sizes)) if k != i]
            )
        return found

    # As in XLA: an element stays selected while it is not less than the next, so the first of equal elements is chosen,
    # and padding is left out.
    best, *others = _window_slices(operand, window, strides, [1] * len(window), counts)
    chosen, known = jnp.zeros(counts, jnp.int8), inside(positions[0])
    for i, other in enumerate(others, 1):
        there = inside(positions[i])
        stays = best >= other if known.all() and there.all() else (best >= other) & known | ~there
        best, chosen = jnp.where(stays, best, other), jnp.where(stays, chosen, jnp.int8(i))
        known = known | there
    parts = jnp.stack([jnp.where(chosen == i, source, 0) for i in range(len(positions))]).reshape(*window, *counts)
    for i, (low, _) in enumerate(padding):
        parts = _overlaid(parts, [k - low for k in range(window[i])], strides[i], sizes[i], len(window) - 1)
    return _Permuted(parts, order)


_PRODUCTS_AND_SLICES: dict[str, Callable[..., Any]] = {
    "conv_general_dilated": convolved,
    "reduce_window_max": partial(_pool, combine=lax.max, empty=-math.inf),
    "reduce_window_sum": partial(_pool, combine=lax.add, empty=0.0),
    "select_and_scatter_add": _scatter,
}
