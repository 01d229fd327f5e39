"""Convolutions as matrix products, and pooling as slices, anywhere in a program: `convolutions_as_products`.

XLA's CPU backend is slow at a convolution whose weights are mapped over, at one inside a loop, and at the gradients of
both it and of pooling (`select_and_scatter`). It is quick at large matrix products. So here a convolution becomes one
product with as many shifted slices of its input as its window has positions, side by side ("patches"; for the gradient
of the input: one product, and its parts added up at shifted places).

Between the axes that are many (positions, batch) the order matters as much: with the batch innermost every slice is a
run of contiguous numbers. So images are held with channels first and the batch last, through all operations that work
on elements, and only put back where an operation asks for the order that it was written with.
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
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .._core.jaxpr import CALLS, ELEMENTWISE, REMAT, at_source, aval, bodies, called, evaluate, interpret, with_inner

# A window of more positions than this stays as it is: each is one slice in the program.
_MOST_SLICES = 64

WITH_BODIES = frozenset({"scan", "while", "cond"}) | REMAT


def convolutions_as_products(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fun` with its convolutions as matrix products and its pooling as slices; equal to rounding.

    It is for functions that are not differentiated any more: custom derivative rules are lost.
    """
    return run_by(_run, fun)


def run_by(run: Callable[..., list[Any]], fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that traces `fun` and evaluates its program by `run(jaxpr, consts, args)`."""

    def rewritten(*args: Any) -> Any:
        closed, out = jax.make_jaxpr(fun, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(out), run(closed.jaxpr, closed.consts, jax.tree.leaves(args)))

    return rewritten


def has_convolution(jaxpr: Jaxpr) -> bool:
    """Return whether a program contains a convolution, at any depth."""
    return any(eqn.primitive.name == "conv_general_dilated" for eqn in with_inner(jaxpr.eqns))


@dataclass(frozen=True)
class _Permuted:
    """An array with its axes in another order: axis i of `array` is axis `order[i]` of the array in the program."""

    array: jax.Array
    order: tuple[int, ...]


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    return [plain(x) for x in interpret(jaxpr, consts, args, _visit)]


def _visit(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
    """Return the results of one operation, permuted arrays among them where it keeps the order of the axes."""
    name = eqn.primitive.name
    if name in CALLS and name not in REMAT:
        # Interpreted rather than evaluated, so that permuted arrays pass through calls: activation functions are calls.
        with at_source(eqn):
            return interpret(*called(eqn), values, _visit)
    if name in WITH_BODIES and any(map(has_convolution, bodies(eqn))):
        eqn = with_bodies(eqn, _run)
    if name in _PRODUCTS_AND_SLICES:
        with at_source(eqn):
            out = _PRODUCTS_AND_SLICES[name](eqn, *values)
        if out is not None:  # None: not a case for products, so it is evaluated as it is
            return [out]
    order = next((x.order for x in values if isinstance(x, _Permuted)), None)
    arrays = list(map(plain, values))
    if order is not None and name in ELEMENTWISE:
        arrays = [lax.transpose(x, order) if jnp.ndim(x) else x for x in arrays]
        return [_Permuted(x, order) for x in evaluate(eqn, *arrays)]
    return evaluate(eqn, *arrays)


def with_bodies(eqn: JaxprEqn, run: Callable[..., list[Any]]) -> JaxprEqn:
    """Return the operation with its bodies traced anew, each by `run(jaxpr, consts, args)`."""
    return eqn.replace(params={key: _retraced(value, run) for key, value in eqn.params.items()})


def _retraced(value: Any, run: Callable[..., list[Any]]) -> Any:
    """Return a parameter of an operation with the programs in it traced anew, and anything else as it is."""
    if isinstance(value, (tuple, list)):
        return type(value)(_retraced(x, run) for x in value)
    if not isinstance(value, (ClosedJaxpr, Jaxpr)):
        return value
    closed = value if isinstance(value, ClosedJaxpr) else ClosedJaxpr(value, ())
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in map(aval, closed.jaxpr.invars)]
    retraced = jax.make_jaxpr(lambda *args: run(closed.jaxpr, closed.consts, args))(*avals)
    if isinstance(value, ClosedJaxpr):
        return retraced
    return value if retraced.consts else retraced.jaxpr  # an open program has no place for constants


def plain(x: Any) -> Any:
    """Return a permuted array with its axes in the order of the program, and anything else as it is."""
    return lax.transpose(x.array, np.argsort(x.order)) if isinstance(x, _Permuted) else x


# XLA removes a transpose that follows its inverse, as where a permuted array is wanted in the order that it has.
def _in_order(x: Any, order: Sequence[int]) -> jax.Array:
    """Return `x` as an array with its axes in the given order."""
    return lax.transpose(plain(x), order)


# Convolutions.


class _Convolution:
    """A convolution, with its axes and its settings by their names.

    Attributes:
      batch, channels, places: axes of the input.
      features, inputs, window: axes of the weights.
      out_batch, out_features, out_places: axes of the result.
      sizes: the lengths of the result's places.
      number: the length of the result's batch.
      groups: how many groups of channels there are, each for its own features.
      batches: how many groups of the batch there are, each for its own features.
    """

    def __init__(self, eqn: JaxprEqn) -> None:
        params = eqn.params
        numbers = params["dimension_numbers"]
        self.batch, self.channels, *self.places = numbers.lhs_spec
        self.features, self.inputs, *self.window = numbers.rhs_spec
        self.out_batch, self.out_features, *self.out_places = numbers.out_spec
        shape, dtype = aval(eqn.outvars[0]).shape, aval(eqn.outvars[0]).dtype
        self.sizes, self.number = [shape[i] for i in self.out_places], shape[self.out_batch]
        self.groups: int = params["feature_group_count"]
        self.batches: int = params["batch_group_count"]
        self.strides, self.padding = params["window_strides"], params["padding"]
        self.spread, self.dilation = params["lhs_dilation"], params["rhs_dilation"]
        # Parts of a result are added up in at least 32 bits, as XLA adds them.
        wide = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
        self._settings = {"precision": params["precision"], "preferred_element_type": wide}

    def product(self, left: jax.Array, right: jax.Array, over: Any, along: Any = ((), ())) -> jax.Array:
        """Return the product summed over some axes of each, for each place along others."""
        return lax.dot_general(left, right, (over, along), **self._settings)

    def padded(self, x: jax.Array) -> jax.Array:
        """Return the input, whose places follow its first axis, with padding, and zeros between for its dilation."""
        spread = zip(self.padding, self.spread, strict=True)
        config = [(0, 0, 0), *((low, high, step - 1) for (low, high), step in spread)]
        config += [(0, 0, 0)] * (x.ndim - len(config))
        return lax.pad(x, jnp.zeros((), x.dtype), config) if any(map(any, config)) else x


def convolved(eqn: JaxprEqn, lhs: Any, rhs: Any) -> Any:
    """Return a convolution as a product; None if its window has too many positions.

    Three products give the same. By patches copies the input as many times as the window has positions; by parts
    computes with the input as it is and copies the result as many times; by results is for the gradient of weights,
    where the "window" is an image and the result as small as a kernel.
    """
    of = _Convolution(eqn)
    lhs_shape, rhs_shape = (aval(x).shape for x in eqn.invars)
    positions, results = math.prod(rhs_shape[i] for i in of.window), math.prod(of.sizes)
    if 0 in (*lhs_shape, *rhs_shape, results) or min(positions, results) > _MOST_SLICES:
        return None
    # Numbers that each way holds besides its operands, for one position of the window and one example.
    patches = results * lhs_shape[of.channels]
    parts = math.prod(lhs_shape[i] for i in of.places) * rhs_shape[of.features]
    if positions > results:
        out = _by_results(of, lhs, rhs)
    elif parts < patches and of.batches == 1:
        out = _by_parts(of, lhs, rhs)
    else:
        out = _by_patches(of, lhs, rhs)
    return _Permuted(out.array.astype(aval(eqn.outvars[0]).dtype), out.order)


def _by_patches(of: _Convolution, lhs: Any, rhs: Any) -> _Permuted:
    """Return one product of the weights with the patches, of shape (positions, channels, places, batch).

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


def _by_parts(of: _Convolution, lhs: Any, rhs: Any) -> _Permuted:
    """Return one product of the weights with the input, whose parts, one for each position, are added up shifted.

    The same sum as by patches, with the channels summed first: parts[k, f, y, b] = Σ over c of w[k, c, f] x[c, y, b].
    """
    x = _in_order(lhs, (of.channels, *of.places, of.batch))
    w = _in_order(rhs, (*of.window, of.inputs, of.features))
    counts = w.shape[:-2]
    left = w.reshape(math.prod(counts), w.shape[-2], of.groups, -1)
    right = x.reshape(of.groups, -1, math.prod(x.shape[1:]))
    parts = of.product(left, right, ((1,), (1,)), ((2,), (0,))).swapaxes(0, 1).reshape(*counts, -1, *x.shape[1:])
    # One axis of the window after another: the first axis of `parts` holds the positions along it, and goes.
    axis = len(counts)  # of the places along it, once its positions are gone
    for i, (size, count) in enumerate(zip(of.sizes, counts, strict=True)):
        begin, length = of.padding[i][0], (size - 1) * of.strides[i] + 1
        shifted = [
            _placed(parts[position], axis, begin - position * of.dilation[i], of.spread[i], length, of.strides[i])
            for position in range(count)
        ]
        parts = reduce(jnp.add, shifted)
    return _Permuted(parts, (of.out_features, *of.out_places, of.out_batch))


def _by_results(of: _Convolution, lhs: Any, rhs: Any) -> _Permuted:
    """Return the product for a window larger than the result, with one slice of the input for each place of the result.

    In the gradient of weights the output's cotangent is the window, and the result has the size of a kernel.
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
    """Return slices of the axes after the first, shifted by `steps` for each position, stacked along a new axis 0.

    One axis after another, since XLA computes the operations that lead to `x` once more for each slice of it.
    """
    for i in reversed(range(len(counts))):
        axis = len(counts)  # of the place, behind the new axes and the first
        begins = [position * steps[i] for position in range(counts[i])]
        length = (sizes[i] - 1) * strides[i] + 1
        x = jnp.stack([lax.slice_in_dim(x, begin, begin + length, strides[i], axis) for begin in begins])
    return x.reshape(-1, *x.shape[len(counts) :])


def _placed(x: jax.Array, axis: int, begin: int, dilation: int, length: int, stride: int) -> jax.Array:
    """Return every `stride`-th of `length` places along an axis: `x` from `begin` on, each `dilation`, else zero."""
    config = [(0, 0, 0)] * x.ndim
    # A negative padding cuts off what falls outside.
    config[axis] = (begin, length - begin - (x.shape[axis] - 1) * dilation - 1, dilation - 1)
    return lax.slice_in_dim(lax.pad(x, jnp.zeros((), x.dtype), config), 0, None, stride, axis)


# Pooling.


def _pool(eqn: JaxprEqn, x: Any, *, combine: Callable[[jax.Array, jax.Array], jax.Array], empty: float) -> Any:
    """Return the slices of a window, combined element by element; None for large windows, and for other than floats."""
    order = x.order if isinstance(x, _Permuted) else tuple(range(len(x.shape)))
    x = _in_order(x, order)
    window, strides, padding, base, dilation = (
        [eqn.params[name][i] for i in order]
        for name in ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")
    )
    none = 0 in (*x.shape, *aval(eqn.outvars[0]).shape)
    if math.prod(window) > _MOST_SLICES or none or not jnp.issubdtype(x.dtype, jnp.floating):
        return None
    config = [(low, high, step - 1) for (low, high), step in zip(padding, base, strict=True)]
    x = lax.pad(x, jnp.asarray(empty, x.dtype), config)
    sizes = [aval(eqn.outvars[0]).shape[i] for i in order]
    return _Permuted(reduce(combine, _window_slices(x, window, strides, dilation, sizes)), order)


def _window_slices(
    x: jax.Array, window: Sequence[int], strides: Sequence[int], dilation: Sequence[int], sizes: Sequence[int]
) -> list[jax.Array]:
    """Return for each position of a window the elements that are there."""
    found = []
    for position in itertools.product(*map(range, window)):
        start = [i * step for i, step in zip(position, dilation, strict=True)]
        stop = [begin + (size - 1) * stride + 1 for begin, size, stride in zip(start, sizes, strides, strict=True)]
        found.append(lax.slice(x, start, stop, strides))
    return found


def _scatter(eqn: JaxprEqn, source: Any, operand: Any) -> Any:
    """Return the gradient of a maximum over windows: each goes to the first element that is it."""
    params = eqn.params
    given = next((x for x in (operand, source) if isinstance(x, _Permuted)), None)
    order = given.order if given else tuple(range(len(operand.shape)))
    source, operand = _in_order(source, order), _in_order(operand, order)
    window, strides, padding = (
        [params[name][i] for i in order] for name in ("window_dimensions", "window_strides", "padding")
    )
    other_kind = params["select_prim"].name != "ge" or any(map(any, padding))
    if other_kind or math.prod(window) > _MOST_SLICES or 0 in source.shape:
        return None
    # As XLA selects: an element stays while it is not less than the next, so that of equal ones the first is chosen.
    best, *others = _window_slices(operand, window, strides, [1] * len(window), source.shape)
    chosen = jnp.zeros(best.shape, jnp.int8)
    for i, other in enumerate(others, 1):
        stays = best >= other
        best, chosen = jnp.where(stays, best, other), jnp.where(stays, chosen, jnp.int8(i))
    # For each position of the window the cotangents that go there, `stride` apart; padding below zero cuts off.
    parts = []
    for i, position in enumerate(itertools.product(*map(range, window))):
        lengths = zip(position, strides, source.shape, operand.shape, strict=True)
        config = [(start, size - start - (count - 1) * step - 1, step - 1) for start, step, count, size in lengths]
        parts.append(lax.pad(jnp.where(chosen == i, source, 0), jnp.zeros((), source.dtype), config))
    return _Permuted(reduce(jnp.add, parts), order)


_PRODUCTS_AND_SLICES: dict[str, Callable[..., Any]] = {
    "conv_general_dilated": convolved,
    "reduce_window_max": partial(_pool, combine=lax.max, empty=-math.inf),
    "reduce_window_sum": partial(_pool, combine=lax.add, empty=0.0),
    "select_and_scatter_add": _scatter,
}
