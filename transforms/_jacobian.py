"""Jacobians: by rows, by columns, and whichever is cheaper; in chunks where memory is short."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ._arguments import Argnums, check_argnums, check_callable, describe, leaf_name, wrap_like
from ._budget import check_budget, largest_chunk, lower_apart, temporaries
from ._call import Call
from ._chunk import check_chunk_size
from ._compat import NeedsValues
from ._vmap import vmap

# Where one side is so many times as large as the other, nothing else needs to be asked.
_DECISIVE = 4


class Choice(NamedTuple):
    """Which way `jacobian` takes, and why.

    Attributes:
      mode: "forward" (a column for each input) or "reverse" (a row for each output).
      inputs: how many numbers are differentiated.
      outputs: how many numbers come out.
      flops: the floating-point operations of both ways as XLA counts them; None where the sizes decide, or for a way
        that the function does not allow.
      why: a sentence.
    """

    mode: str
    inputs: int
    outputs: int
    flops: dict[str, float] | None
    why: str


class Jacobian(Protocol):
    """What `jacobian` returns."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The Jacobian at these arguments."""

    def explain(self, *args: Any, **kwargs: Any) -> Choice:
        """Which way is taken for these arguments, and why."""


def jacfwd(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
) -> Callable[..., Any]:
    """Jacobian of `fun` column by column, in forward mode.

    As `jax.jacfwd`, but modules are differentiated with respect to their parameters, arguments are checked by name, the
    auxiliary output may be anything, and `chunk_size` or `memory_budget` bound the memory.

    Args:
      fun: a function, a bound method or a module, of real arrays, with outputs of floating point, complex ones too.
      argnums: an int, or a tuple of ints; negative ones count from the end of the positional arguments.
      has_aux: whether `fun` returns `(output, aux)`; the result is then `(jacobian, aux)`.
      chunk_size: how many columns to compute at a time; None computes all at once. They are written in place.
      memory_budget: bytes, or a string such as "512MiB": the largest chunk with which the temporaries of the whole
        Jacobian, as the compiler counts them beside arguments and results, are within it; under `vmap`, those of one
        slice. `fun` must not branch on values for it.

    Returns:
      A function of the same arguments that returns the Jacobian: the structure of the output, in place of each of its
      arrays the structure of the argument (a tuple of them for a tuple of argnums; `nnx.State` for a module), with
      arrays of shape `output.shape + argument.shape`.

    Raises:
      TypeError: `argnums` of a wrong type; an argument that is not real floating point.
      ValueError: `argnums` empty, out of range, or naming an argument twice; `chunk_size` below 1 or given together
        with `memory_budget`; a budget that nothing fits; a module whose parameters `fun` assigns.

    Cost:
      One linearization, and the work of one derivative for each input number.

    Source:
      `jax.jacfwd`; `mindspore.jacfwd`; `torch.func.jacfwd`.

    Example:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import jacfwd
      >>> jacfwd(lambda x, y: x * y, argnums=(0, 1))(jnp.array([1.0, 2.0]), 3.0)
      (Array([[3., 0.],
             [0., 3.]], dtype=float32), Array([1., 2.], dtype=float32))
    """
    return jacobian_of("jacfwd", fun, argnums, has_aux, "forward", chunk_size, memory_budget)


def jacrev(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
) -> Callable[..., Any]:
    """Jacobian of `fun` row by row, in reverse mode.

    As `jax.jacrev`, with what `jacfwd` here adds to it.

    Args:
      fun: as for `jacfwd`, but with real outputs.
      argnums: as for `jacfwd`.
      has_aux: as for `jacfwd`.
      chunk_size: how many rows to compute at a time.
      memory_budget: as for `jacfwd`.

    Returns:
      As for `jacfwd`.

    Raises:
      TypeError, ValueError: as for `jacfwd`; an output that is not real floating point.

    Cost:
      One evaluation, and the work of one gradient for each output number.

    Source:
      `jax.jacrev`; `mindspore.jacrev`; `torch.func.jacrev`.

    Example:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import jacrev
      >>> jacrev(jnp.square)(jnp.array([1.0, 2.0]))
      Array([[2., 0.],
             [0., 4.]], dtype=float32)
    """
    return jacobian_of("jacrev", fun, argnums, has_aux, "reverse", chunk_size, memory_budget)


def jacobian(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    mode: str = "auto",
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
    sparsity: Any = None,
) -> Jacobian:
    """Jacobian of `fun`, the cheaper way.

    Args:
      fun: as for `jacfwd`.
      argnums: as for `jacfwd`.
      has_aux: as for `jacfwd`.
      mode: "forward" (as `jacfwd`), "reverse" (as `jacrev`), or "auto": from the numbers of inputs and outputs, and
        where they are alike from the operations that XLA counts in both. Nothing is timed.
      chunk_size: how many columns or rows to compute at a time.
      memory_budget: as for `jacfwd`.
      sparsity: not available yet.

    Returns:
      As for `jacfwd`. The returned function has a method `.explain(*args, **kwargs)`, which says what "auto" takes for
      these arguments and why, as a `Choice`.

    Raises:
      TypeError, ValueError: as for `jacfwd` and `jacrev`; an unknown mode.
      NotImplementedError: `sparsity` is given.

    Cost:
      As the better one of `jacfwd` and `jacrev`. Where inputs and outputs are alike in number, both are lowered once
      more for each trace: outside `jit` that is for each call.

    Source:
      `jax.jacfwd` and `jax.jacrev`; Griewank and Walther 2008, "Evaluating Derivatives".

    Example:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import jacobian
      >>> rows = jacobian(lambda x: jnp.stack([x.sum(), x.prod()]))
      >>> rows(jnp.arange(1.0, 10.0)).shape
      (2, 9)
      >>> rows.explain(jnp.arange(1.0, 10.0)).mode
      'reverse'
    """
    if sparsity is not None:
        raise NotImplementedError("jacobian: sparsity is not available yet; leave it out for the dense Jacobian.")
    return jacobian_of("jacobian", fun, argnums, has_aux, mode, chunk_size, memory_budget)


def jacobian_of(
    api: str,
    fun: Callable[..., Any],
    argnums: Argnums,
    has_aux: bool,
    mode: str,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
    row_axis: int = 0,
    inner: str | None = None,
) -> Any:
    """`jacobian` for any transform, which `api` names in errors.

    In reverse mode the axes of the output come before axis `row_axis` of each argument. With `inner` it is the Jacobian
    of the Jacobian that this mode gives.
    """
    if mode not in ("auto", "forward", "reverse"):
        raise ValueError(f'{api}: mode must be "auto", "forward" or "reverse", but got {mode!r}.')
    check_callable(api, fun)
    positions = check_argnums(api, argnums)
    check_chunk_size(api, chunk_size)
    budget = check_budget(api, memory_budget, chunk_size)

    def prepare(args: Any, kwargs: Any, inner: str | None = inner, inner_chunk: int | None = None) -> Call:
        differentiated = fun if inner is None else jacobian_of(api, fun, argnums, has_aux, inner, inner_chunk)
        call = Call(api, differentiated, positions, has_aux, args, kwargs)
        call.check_floating(complex_too=False)
        return call

    def of_arguments(*args: Any, **kwargs: Any) -> Any:
        call, chunk = prepare(args, kwargs), chunk_size
        forward = (_choose(api, call).mode if mode == "auto" else mode) == "forward"
        compute = _forward if forward else partial(_reverse, axis=row_axis)
        if budget is not None:
            size = _slices(api, call, forward)
            inner_size = 1 if inner is None else _slices(api, prepare(args, kwargs, None), inner == "forward")

            def cut(k: int) -> tuple[Call, int]:
                """The inner Jacobian whole for some slices of the outer one, or in chunks for one of them."""
                return (call, k // inner_size) if k >= inner_size else (prepare(args, kwargs, inner, k), 1)

            call, chunk = cut(
                largest_chunk(api, lambda k: temporaries(partial(compute, api, *cut(k))), size * inner_size, budget)
            )
        out, rows, rest = compute(api, call, chunk)
        aux = call.finish(rest)

        def of_output(leaves: Sequence[Any]) -> Any:
            inputs = iter(leaves)
            trees = [jax.tree.map(lambda _: next(inputs), primal) for primal in call.primals]
            forms = tuple(call.gradient(i, tree) for i, tree in enumerate(trees))
            return forms if isinstance(argnums, (tuple, list)) else forms[0]

        result = jax.tree.unflatten(jax.tree.structure(out), [of_output(leaves) for leaves in rows])
        return (result, aux) if has_aux else result

    def again(fun: Callable[..., Any]) -> Any:
        return jacobian_of(api, fun, argnums, has_aux, mode, chunk_size, memory_budget, row_axis, inner)

    wrapped: Any = wrap_like(fun, api, of_arguments, again)
    if api == "jacobian":

        def explain(*args: Any, **kwargs: Any) -> Choice:
            choice = _choose(api, prepare(args, kwargs))
            return choice if mode == "auto" else choice._replace(mode=mode, why=f'it was asked for by mode="{mode}"')

        wrapped.explain = explain
    return wrapped


def _forward(api: str, call: Call, chunk_size: int | None) -> tuple[Any, list[list[Any]], Any]:
    """The output, for each array of it its derivative by each array of the input, and the rest of the call."""
    out, push, rest = jax.linearize(call, *call.primals, has_aux=True)
    _check_output(api, out)
    inputs, treedef = jax.tree.flatten(call.primals)

    def columns(basis: Callable[[Any], list[Any]], size: int) -> list[Any]:
        def column(k: Any) -> list[Any]:
            return jax.tree.leaves(push(*jax.tree.unflatten(treedef, basis(k))))

        return map_slices(column if chunk_size is None else checkpoint(column), size, -1, chunk_size)

    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(out)]
    parts = by_array(inputs, columns, -1, chunk_size)
    return (
        out,
        [
            [part[j].reshape(*shape, *jnp.shape(leaf)) for part, leaf in zip(parts, inputs, strict=True)]
            for j, shape in enumerate(shapes)
        ],
        rest,
    )


def _reverse(api: str, call: Call, chunk_size: int | None, axis: int = 0) -> tuple[Any, list[list[Any]], Any]:
    """As `_forward`; the axes of the output come before axis `axis` of each argument."""
    out, pull, rest = jax.vjp(call, *call.primals, has_aux=True)
    _check_output(api, out)
    _check_real(api, out)
    outputs, treedef = jax.tree.flatten(out)

    def rows(basis: Callable[[Any], list[Any]], size: int) -> list[Any]:
        def row(k: Any) -> list[Any]:
            return jax.tree.leaves(pull(jax.tree.unflatten(treedef, basis(k))))

        return map_slices(row if chunk_size is None else checkpoint(row), size, axis, chunk_size)

    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(call.primals)]
    return (
        out,
        [
            [
                array.reshape(*shape[:axis], *jnp.shape(leaf), *shape[axis:])
                for array, shape in zip(part, shapes, strict=True)
            ]
            for part, leaf in zip(by_array(outputs, rows, axis, chunk_size), outputs, strict=True)
        ],
        rest,
    )


# What is differentiated in chunks keeps nothing of one for the next.
checkpoint = partial(jax.checkpoint, prevent_cse=False)
_COMPUTE = {"forward": _forward, "reverse": _reverse}


def by_array(
    arrays: list[Any],
    compute: Callable[[Callable[[Any], list[Any]], int], list[Any]],
    axis: int,
    chunk_size: int | None,
) -> list[list[Any]]:
    """For each of `arrays` what `compute` gives for the unit vectors of its space, which stand along `axis`.

    All at once they are one map over the unit vectors of all arrays. In chunks there is one map for each array: cutting
    the result of one would hold it twice.
    """
    sizes = _sizes(arrays)
    if chunk_size is not None:
        return [compute(partial(_unit, arrays, (i,)), size) for i, size in enumerate(sizes)]
    together = compute(partial(_unit, arrays, range(len(arrays))), sum(sizes))
    cut = [jnp.split(result, np.cumsum(sizes)[:-1], axis) for result in together]
    return [[pieces[i] for pieces in cut] for i in range(len(arrays))]


def _unit(arrays: Sequence[Any], which: Sequence[int], k: Any) -> list[Any]:
    """Arrays like `arrays`, all zero but for a one at place `k` of those numbered by `which`, one behind another."""
    units, start = [], 0
    for i, array in enumerate(arrays):
        shape, dtype = jnp.shape(array), jnp.result_type(array)
        if i not in which:
            units.append(jnp.zeros(shape, dtype))
            continue
        size = math.prod(shape)
        units.append((jnp.arange(start, start + size) == k).astype(dtype).reshape(shape))
        start += size
    return units


def map_slices(fun: Callable[[Any], list[Any]], size: int, axis: int, chunk_size: int | None) -> list[Any]:
    """`fun` of 0 to `size`, along `axis` of its results."""
    if size == 1:  # a gradient: mapping it costs a few operations in vain
        return [jnp.expand_dims(leaf, axis) for leaf in fun(0)]
    if size:
        return vmap(fun, out_axes=axis, chunk_size=chunk_size)(jnp.arange(size))
    leaves = jax.eval_shape(fun, jax.ShapeDtypeStruct((), jnp.result_type(int)))
    return [jnp.expand_dims(jnp.zeros(leaf.shape, leaf.dtype), axis).take(jnp.arange(0), axis) for leaf in leaves]


def _choose(api: str, call: Call) -> Choice:
    out = _shapes(api, call)
    inputs, outputs = sum(_sizes(call.primals)), sum(_sizes(out))
    choice = partial(Choice, inputs=inputs, outputs=outputs)
    if any(jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in jax.tree.leaves(out)):
        return choice("forward", flops=None, why="the output is complex, which reverse mode does not take")
    first, other = ("reverse", "forward") if outputs < inputs else ("forward", "reverse")
    few, many = sorted((inputs, outputs))
    flops: dict[str, float] = {}
    errors: dict[str, Exception] = {}
    for mode in (first, other):
        try:
            if many >= _DECISIVE * few and mode == first:
                jax.eval_shape(partial(_COMPUTE[mode], api, call, None))
                return choice(mode, flops=None, why=f"there are {inputs} inputs and {outputs} outputs")
            analysis = lower_apart(partial(_COMPUTE[mode], api, call, None)).cost_analysis() or {}
            flops[mode] = analysis.get("flops", 0.0)
        except NeedsValues:
            return choice(first, flops=None, why=f"fun branches on values; {inputs} inputs, {outputs} outputs")
        except (TypeError, ValueError, NotImplementedError) as error:
            errors[mode] = error
    if len(errors) == 2:
        raise errors[first]
    if errors:
        (mode,), (refused,) = flops, errors
        return choice(mode, flops=None, why=f"{refused} mode cannot differentiate it: {errors[refused]}")
    if flops["reverse"] == flops["forward"]:
        return choice("reverse", flops=flops, why="XLA counts as many operations either way; rows lie in one piece")
    mode = min(flops, key=flops.__getitem__)
    return choice(mode, flops=flops, why="XLA counts fewer operations")


def _shapes(api: str, call: Call) -> Any:
    """The output as shapes, or as it is where `fun` branches on values."""
    try:
        out = jax.eval_shape(lambda: call(*call.primals)[0])
    except NeedsValues:
        out = jax.tree.map(jnp.asarray, call(*call.primals)[0])
    _check_output(api, out)
    return out


def _slices(api: str, call: Call, forward: bool) -> int:
    """How many columns or rows there are for the largest array."""
    return max([1, *_sizes(call.primals if forward else _shapes(api, call))])


def _check_output(api: str, out: Any) -> None:
    if not jax.tree.leaves(out):
        raise TypeError(f"{api}: fun must return a number or arrays to differentiate, but it returned {describe(out)}.")
    for path, leaf in jax.tree.leaves_with_path(out):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"{api}: `{leaf_name('output', path)}` is {describe(leaf)}, but only floating point has derivatives; "
                "convert it, or return it beside the output with has_aux=True."
            )


def _check_real(api: str, out: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(out):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"{api}: `{leaf_name('output', path)}` is {describe(leaf)}, but reverse mode takes real outputs only; "
                "use jacfwd, or return its real and imaginary parts."
            )


def _sizes(tree: Any) -> list[int]:
    return [math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree)]
