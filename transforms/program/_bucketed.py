"""Arrays of many lengths with few compilations: `bucketed`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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

    As `jax.jit`, but arrays are filled up with zeros to the next of some lengths, and `fun` gets one argument more,
    `mask=`, a bool array (length,) that is True for actual elements. `fun` must ignore the others.

    Args:
      fun: a function of arrays, pytrees and modules, with a keyword argument `mask`. The state that it changes of a
        module (BatchNorm statistics, dropout keys) ends up in the module.
      axis: the axis whose length varies, the same length in all arguments: an int for all arrays, or as `in_axes` of
        `jax.vmap` a tuple with one entry for each positional argument, None for one that has no such axis, such as a
        model. Keyword arguments have none.
      sizes: the lengths to fill up to: "pow2" for 1, 2, 4, 8 and so on, or ints.
      out_axes: as `out_axes` of `jax.vmap`, the axes of the output along which it is cut to the length again. None
        returns it as `fun` does.

    Returns:
      A function of the arguments of `fun` without `mask`. Its attribute `traces` counts how many programs were traced
      and compiled: one for each size, and each kind of the other arguments. An output that `out_axes` cuts is an array
      of NumPy. Under another transform it fills up and cuts inside of the program.

    Raises:
      TypeError: `fun` is not callable; `sizes` holds something that is not an int; the axis is asked of a model or of
        keys; `mask` is passed.
      ValueError: `sizes` is empty, or a string other than "pow2"; arrays of different lengths, or longer than the
        largest of `sizes`; an axis that an array does not have; no axis at all; `out_axes` does not fit the output.

    Cost:
      That of the next size: below twice the work with "pow2" where that grows with the length. Arrays are filled up,
      and outputs cut, by NumPy: 0.1 ms a call, and on an accelerator each call copies them to the host, unless they are
      there already.

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
    """A function of arrays of any length, compiled for a few: see `bucketed`.

    Attributes:
      traces: the number of programs that were traced and compiled.
    """

    def __init__(self, fun: Callable[..., Any], axis: Axes, sizes: Sequence[int], out_axes: Axes) -> None:
        self.traces = 0
        self._fun, self._axis, self._sizes, self._out_axes = fun, axis, sizes, out_axes
        self._owner, self._function = bound_model(fun)
        self._compiled = jax.jit(self._run, static_argnames="size")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return `fun(*args, mask=..., **kwargs)` with arrays filled up."""
        if "mask" in kwargs:
            raise TypeError("bucketed: mask is not passed, since it comes from the lengths; leave it out.")
        axes = self._axes_of(args)
        refuse_shared_state("bucketed", self._fun, self._owner, args, kwargs)
        each = self._axis if isinstance(self._axis, tuple) else (self._axis,) * len(args)
        length = mapped_size("bucketed", self._fun, args, {}, each, None, None)
        size = self._size_for(length)
        leaves, treedef = jax.tree.flatten(args, is_leaf=is_model)
        filled = jax.tree.unflatten(treedef, [_filled(x, axis, size) for x, axis in zip(leaves, axes, strict=True)])
        arguments = split_tree((self._owner, filled, kwargs))
        # The length is an argument of the program, so one program serves all lengths of one size.
        out, changed = self._compiled(arguments, length, size=size)
        out = self._cut(out, length, size)  # before modules are updated: where `out_axes` does not fit, nothing changes
        parts = splits_of(arguments)
        update("bucketed", models_of((self._owner, args, kwargs)), parts, with_changes(parts, changed))
        return out

    def _run(self, arguments: Any, length: Any, *, size: int) -> Any:
        self.traces += 1  # runs while JAX traces, so once for each program
        owner, args, kwargs = arguments
        mask = jnp.arange(size) < length
        return call_purely("bucketed", self._function, (owner, args, {**kwargs, "mask": mask}))

    def _axes_of(self, args: tuple[Any, ...]) -> list[int | None]:
        """Return the axis of each array of the arguments, and None for each model; raise unless they have these."""
        axes = _of_leaves("axis", self._axis, args)
        if all(axis is None for axis in axes):
            raise ValueError("bucketed: axis names no axis of any array in the call; give one, or use jax.jit.")
        for (path, leaf), axis in zip(jax.tree.leaves_with_path(args, is_leaf=is_model), axes, strict=True):
            if axis is None:
                continue
            # Zeros behind parameters or keys would be used like any others: a mask says nothing about them.
            if is_model(leaf) or jnp.issubdtype(getattr(leaf, "dtype", float), jax.dtypes.extended):
                name = leaf_name(argument_name(self._fun, args, path[0].idx), path[1:])
                kind = "a model" if is_model(leaf) else "an array of keys"
                raise TypeError(f"bucketed: `{name}` is {kind}, which cannot be filled up; give it None in axis.")
        return axes

    def _size_for(self, length: int) -> int:
        """Return the smallest of the sizes that is not below `length`."""
        if not self._sizes:  # the next power of two, and 1 for an empty array
            return 1 << max(length - 1, 0).bit_length()
        if length > self._sizes[-1]:
            raise ValueError(f"bucketed: length {length} is above the largest of sizes={self._sizes}; add one.")
        return next(size for size in self._sizes if size >= length)

    def _cut(self, out: Any, length: int, size: int) -> Any:
        """Return the output with the axes of `out_axes` cut to `length`; raise unless they have the size `size`."""
        leaves, treedef = jax.tree.flatten_with_path(out)
        cut = []
        for (path, x), axis in zip(leaves, _of_leaves("out_axes", self._out_axes, out), strict=True):
            if axis is not None:
                if not -x.ndim <= axis < x.ndim or x.shape[axis] != size:
                    what = f"`{leaf_name('output', path)}` is {describe(x)}, without the filled size {size}"
                    raise ValueError(f"bucketed: {what} along out_axes={axis}; name the axis that has it, or None.")
                # By NumPy, as JAX would compile a program for each length.
                x = x if isinstance(x, Tracer) or jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.asarray(x)
                x = x[(slice(None),) * (axis % x.ndim) + (slice(length),)]
            cut.append(x)
        return jax.tree.unflatten(treedef, cut)


def _of_leaves(name: str, axes: Axes, tree: Any) -> list[int | None]:
    """Return the axis of each leaf of a tree, of which models are leaves; raise unless `axes` is a prefix of it."""
    try:
        return broadcast_axes(axes, tree, is_leaf=is_model)
    except (ValueError, TypeError, KeyError):
        structure = jax.tree.structure(tree, is_leaf=is_model)
        remedy = "use the same containers and keys, or one int for all"
        raise ValueError(f"bucketed: {name}={axes!r} is not a prefix of {structure}; {remedy}.") from None


def _filled(x: Any, axis: int | None, size: int) -> Any:
    """Return an array filled up with zeros to `size` along an axis."""
    if axis is None:
        return x
    axis %= x.ndim
    if isinstance(x, Tracer):
        return jnp.pad(x, [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)])
    # By NumPy, as `jnp.pad` would compile a program for each length. An assignment, as `numpy.pad` takes five times as
    # long for small arrays.
    filled = np.zeros((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype)
    filled[(slice(None),) * axis + (slice(x.shape[axis]),)] = x
    # Back to the device that a committed array was on, so that `fun` runs there.
    there = isinstance(x, jax.Array) and x.committed and len(x.devices()) == 1
    return jax.device_put(filled, x.sharding) if there else filled


def _check_sizes(sizes: Any) -> tuple[int, ...]:
    """Return the lengths in order; none for powers of two."""
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
