"""`bucketed`: call a function with arrays of any length, with few compilations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._core.arguments import argument_name, check_callable, check_count, describe, leaf_name, wrap_like
from .._core.axes import Axes, broadcast_axes, check_axes, mapped_size
from .._core.compat import Tracer
from .._models.mutation import call_purely, update, with_changes
from .._models.split_model import bound_model, is_model, models_of, refuse_shared_state, split_tree, splits_of


def bucketed(
    fun: Callable[..., Any], *, axis: Axes = 0, sizes: Literal["pow2"] | Sequence[int] = "pow2", out_axes: Axes = None
) -> Bucketed:
    """Compile `fun` for a few lengths, and call it with arrays of any length.

    As `jax.jit`, but arrays are zero-padded to the next of a few sizes, and `fun` receives an additional argument
    `mask=`, a bool array of shape (size,) that is True for the actual elements. `fun` must ignore all others.

    Args:
      fun: a function of arrays, pytrees and modules, with a keyword argument `mask`. Module state that it changes
        (BatchNorm statistics, dropout keys) is updated in the module.
      axis: the axis whose length varies; the length must be the same in all arguments. An int for all arrays, or, as
        `in_axes` of `jax.vmap`, a tuple with one entry for each positional argument, None for one without such an axis,
        such as a model. Keyword arguments are not padded.
      sizes: the sizes to pad to: "pow2" for 1, 2, 4, 8 and so on, or a list of ints.
      out_axes: as `out_axes` of `jax.vmap`, the axes along which outputs are sliced back to the actual length. None
        returns outputs unchanged.

    Returns:
      A function of the arguments of `fun` without `mask`. Its attribute `traces` counts the programs that were traced
      and compiled: one for each size and each combination of types of the other arguments. Outputs that `out_axes`
      slices are NumPy arrays. Under another transform, padding and slicing are part of the program.

    Raises:
      TypeError: `fun` is not callable; `sizes` contains a value that is not an int; `axis` selects a model or an array
        of keys; `mask` is passed.
      ValueError: `sizes` is empty, or a string other than "pow2"; arrays of different lengths, or longer than the
        largest of `sizes`; an axis that an array does not have; no axis at all; `out_axes` does not fit the output.

    Cost:
      The cost of the next size: with "pow2" less than twice the work if the work is linear in the length. NumPy pads
      arrays and slices outputs: some µs a call. On an accelerator each call copies them to the host, unless they are
      already there.

    Examples:
      >>> import jax.numpy as jnp, numpy as np
      >>> from plurax.transforms.program import bucketed
      >>> mean = bucketed(lambda x, mask: jnp.sum(x * mask) / mask.sum())
      >>> [float(mean(np.arange(float(n)))) for n in (3, 5, 6, 7, 8)]
      [1.0, 2.0, 2.5, 3.0, 3.5]
      >>> mean.traces
      2
    """
    check_callable("bucketed", fun)
    axis = check_axes("bucketed", "axis", tuple(axis) if isinstance(axis, list) else axis)
    out_axes = check_axes("bucketed", "out_axes", out_axes)
    of_any_length = Bucketed(fun, axis, _check_sizes(sizes), out_axes)
    wrap_like(fun, "bucketed", of_any_length, lambda fun: bucketed(fun, axis=axis, sizes=sizes, out_axes=out_axes))
    return of_any_length


class Bucketed:
    """A function of arrays of any length, compiled for a few sizes: see `bucketed`.

    Attributes:
      traces: the number of programs that were traced and compiled.
    """

    def __init__(self, fun: Callable[..., Any], axis: Axes, sizes: Sequence[int], out_axes: Axes) -> None:
        self.traces = 0
        self._fun, self._axis, self._sizes, self._out_axes = fun, axis, sizes, out_axes
        self._owner, self._function = bound_model(fun)
        self._programs: dict[int, Any] = {}  # by size
        # The arrays that are padded in a call without models, and their axes, by the structure, types and ranks of all
        # arrays: checked once for each kind of call.
        self._known: dict[Any, list[tuple[int, int]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return `fun(*args, mask=..., **kwargs)` with padded arrays."""
        if "mask" in kwargs:
            raise TypeError("bucketed: mask must not be passed, since bucketed computes it from the lengths; omit it.")
        unflatten: Callable[[list[Any]], Any]
        if all([type(x) is np.ndarray for x in args]):
            leaves, treedef, unflatten = list(args), None, tuple  # the usual case, in half the time
        else:
            leaves, treedef = jax.tree.flatten(args, is_leaf=is_model)
            unflatten = partial(jax.tree.unflatten, treedef)
        kind = treedef, *[(type(x), getattr(x, "ndim", 0), getattr(x, "dtype", None)) for x in leaves]
        if not kwargs and (padded := self._known.get(kind)) is not None:
            # XLA's threads fall asleep within a few microseconds, so that checks would make the program slower, too.
            length = leaves[padded[0][0]].shape[padded[0][1]]
            if all([leaves[i].shape[axis] == length for i, axis in padded]):
                size = self._size_for(length)
                for i, axis in padded:
                    leaves[i] = _filled(leaves[i], axis, size)
                out, _ = self._program(size)((self._owner, unflatten(leaves), kwargs), length)
                return self._cut(out, length, size)
        return self._checked(kind, args, kwargs)

    def _checked(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call of a kind that is not known yet."""
        leaves, treedef = jax.tree.flatten(args, is_leaf=is_model)
        axes = self._axes_of(args)
        refuse_shared_state("bucketed", self._fun, self._owner, args, kwargs)
        each = self._axis if isinstance(self._axis, tuple) else (self._axis,) * len(args)
        length = mapped_size("bucketed", self._fun, args, {}, each, None, None)
        models = models_of((self._owner, args, kwargs))
        if not models and not kwargs:
            self._known[kind] = [(i, axis % leaves[i].ndim) for i, axis in enumerate(axes) if axis is not None]
        size = self._size_for(length)
        filled = jax.tree.unflatten(treedef, [_filled(x, axis, size) for x, axis in zip(leaves, axes, strict=True)])
        arguments = (self._owner, filled, kwargs)
        arguments = split_tree(arguments) if models else arguments
        # The length is an argument of the program, so one program covers all lengths of one size.
        out, changed = self._program(size)(arguments, length)
        out = self._cut(out, length, size)  # before updating modules: if `out_axes` does not fit, nothing changes
        if models:
            parts = splits_of(arguments)
            update("bucketed", models, parts, with_changes(parts, changed))
        return out

    def _program(self, size: int) -> Any:
        if size not in self._programs:
            self._programs[size] = jax.jit(partial(self._run, size=size))
        return self._programs[size]

    def _run(self, arguments: Any, length: Any, *, size: int) -> Any:
        self.traces += 1  # runs while JAX traces, so once for each program
        owner, args, kwargs = arguments
        mask = jnp.arange(size) < length
        return call_purely("bucketed", self._function, (owner, args, {**kwargs, "mask": mask}))

    def _axes_of(self, args: tuple[Any, ...]) -> list[int | None]:
        """Return the axis of each array of the arguments, and None for models; raise if an array lacks its axis."""
        axes = _of_leaves("axis", self._axis, args)
        if all(axis is None for axis in axes):
            raise ValueError("bucketed: axis selects no axis of any array in the call; pass one, or use jax.jit.")
        for (path, leaf), axis in zip(jax.tree.leaves_with_path(args, is_leaf=is_model), axes, strict=True):
            if axis is None:
                continue
            # Padding of parameters or keys would be used like actual values: the mask does not cover them.
            if is_model(leaf) or jnp.issubdtype(getattr(leaf, "dtype", float), jax.dtypes.extended):
                name = leaf_name(argument_name(self._fun, args, path[0].idx), path[1:])
                kind = "a model" if is_model(leaf) else "an array of keys"
                raise TypeError(f"bucketed: `{name}` is {kind}, which cannot be padded; pass None for it in axis.")
        return axes

    def _size_for(self, length: int) -> int:
        """Return the smallest size that is at least `length`."""
        if not self._sizes:  # the next power of two, and 1 for an empty array
            return 1 << max(length - 1, 0).bit_length()
        if length > self._sizes[-1]:
            raise ValueError(f"bucketed: length {length} is above the largest of sizes={self._sizes}; add one.")
        return next(size for size in self._sizes if size >= length)

    def _cut(self, out: Any, length: int, size: int) -> Any:
        """Slice the output to `length` along `out_axes`; raise unless these axes have the padded `size`."""
        if self._out_axes is None:
            return out
        leaves, treedef = jax.tree.flatten_with_path(out)
        cut = []
        for (path, x), axis in zip(leaves, _of_leaves("out_axes", self._out_axes, out), strict=True):
            if axis is not None:
                if not -x.ndim <= axis < x.ndim or x.shape[axis] != size:
                    what = f"`{leaf_name('output', path)}` is {describe(x)}, without the padded size {size}"
                    raise ValueError(f"bucketed: {what} along out_axes={axis}; pass the axis that has it, or None.")
                # Slice with NumPy: JAX would compile a program for each length.
                x = x if isinstance(x, Tracer) or jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.asarray(x)
                x = x[(slice(None),) * (axis % x.ndim) + (slice(length),)]
            cut.append(x)
        return jax.tree.unflatten(treedef, cut)


def _of_leaves(name: str, axes: Axes, tree: Any) -> list[int | None]:
    """Return the axis of each leaf of a tree, with models as leaves; raise unless `axes` is a prefix of the tree."""
    try:
        return broadcast_axes(axes, tree, is_leaf=is_model)
    except (ValueError, TypeError, KeyError):
        structure = jax.tree.structure(tree, is_leaf=is_model)
        remedy = "use the same containers and keys, or one int for all"
        raise ValueError(f"bucketed: {name}={axes!r} is not a prefix of {structure}; {remedy}.") from None


def _filled(x: Any, axis: int | None, size: int) -> Any:
    """Return an array zero-padded to `size` along an axis."""
    if axis is None:
        return x
    shape = x.shape
    axis %= len(shape)
    if isinstance(x, Tracer):
        return jnp.pad(x, [(0, size - n if i == axis else 0) for i, n in enumerate(shape)])
    # Pad with NumPy: `jnp.pad` would compile a program for each length. Use an assignment: for small arrays `numpy.pad`
    # takes five times as long.
    filled = np.zeros((*shape[:axis], size, *shape[axis + 1 :]), x.dtype)
    filled[(slice(None),) * axis + (slice(shape[axis]),)] = x
    # Put a committed array back on its device, so that `fun` runs there.
    there = type(x) is not np.ndarray and isinstance(x, jax.Array) and x.committed and len(x.devices()) == 1
    return jax.device_put(filled, x.sharding) if there else filled


def _check_sizes(sizes: Any) -> tuple[int, ...]:
    """Return the sizes in increasing order; an empty tuple for powers of two."""
    if isinstance(sizes, str) and sizes == "pow2":
        return ()
    if not isinstance(sizes, Iterable):
        raise TypeError(f'bucketed: sizes must be "pow2" or a list of ints, but got {describe(sizes)}.')
    found = [] if isinstance(sizes, str) else list(sizes)
    if not found:
        raise ValueError(f'bucketed: sizes must be "pow2" or a list of ints, at least one, but got {sizes!r}.')
    for i, size in enumerate(found):
        check_count("bucketed", f"sizes[{i}]", size)
    return tuple(sorted(map(int, found)))
