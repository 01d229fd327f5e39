"""The axis specifications of `vmap`: which axis of which leaf is mapped, checked with the arguments' own names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .arguments import argument_name, describe, is_int, leaf_name

Axes = Any  # int, None, or a nested container of them: a prefix of what it describes


def _is_none(x: Any) -> bool:
    return x is None


def is_axis(x: Any) -> bool:
    """Whether `x` names an axis (or None, for no axis)."""
    return x is None or is_int(x)


def check_axes(api: str, name: str, axes: Axes) -> Axes:
    """`axes` with plain ints; refuses an axis specification that holds anything but ints and None."""
    for leaf in jax.tree.leaves(axes, is_leaf=_is_none):
        if not is_axis(leaf):
            raise TypeError(f"{api}: {name} must hold ints and None, but got {describe(leaf)}.")
    return jax.tree.map(int, axes)


def check_in_axes(api: str, in_axes: Axes) -> Axes:
    """`in_axes` with plain ints; refuses what is not an int, None, or a tuple or list with an entry per argument."""
    if not is_axis(in_axes) and not isinstance(in_axes, (tuple, list)):
        raise TypeError(
            f"{api}: in_axes must be an int, None, or a tuple with one entry for each positional argument, but got "
            f"{describe(in_axes)}"
            + (f"; wrap the axes of a dict: in_axes=({in_axes!r},)." if isinstance(in_axes, dict) else ".")
        )
    return check_axes(api, "in_axes", in_axes)


def axes_per_argument(api: str, in_axes: Axes, args: Sequence[Any]) -> tuple[Axes, ...]:
    """One axis specification for each positional argument."""
    if is_axis(in_axes):
        return (in_axes,) * len(args)
    if len(in_axes) != len(args):
        raise ValueError(
            f"{api}: in_axes has {len(in_axes)} entries, but the call has {len(args)} positional argument(s); "
            "give one entry for each, None for one that is shared."
        )
    return tuple(in_axes)


def broadcast_axes(axes: Axes, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The axis of each leaf of `tree`; a `ValueError` where `axes` is not a prefix of it."""
    found: list[Any] = []

    def collect(axis: Any, subtree: Any) -> None:
        found.extend([axis] * len(jax.tree.leaves(subtree, is_leaf=is_leaf)))

    jax.tree.map(collect, axes, tree, is_leaf=_is_none)
    return found


def mapped_size(
    api: str,
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    axes: Sequence[Axes],
    keyword_axis: int | None,
    axis_size: int | None,
    given_by: str = "axis_size",
) -> int:
    """The one size of all mapped axes; refuses axes that do not fit the arguments.

    `given_by` says in an error where `axis_size` comes from.

    Raises:
      ValueError: an axis specification is not a prefix of its argument, an axis is out of range, two mapped axes have
        different sizes, a size differs from `axis_size`, or nothing is mapped and `axis_size` is None.
    """
    sizes: list[int] = []
    for subtree, axis in [*zip(args, axes, strict=True), *((value, keyword_axis) for value in kwargs.values())]:
        if is_axis(axis):
            if axis is not None:
                sizes.extend(_size(leaf, axis) for leaf in jax.tree.leaves(subtree))
            continue
        try:
            leaf_axes = broadcast_axes(axis, subtree)
        except (ValueError, TypeError, KeyError):
            sizes.append(-1)
            continue
        sizes.extend(
            _size(leaf, a) for leaf, a in zip(jax.tree.leaves(subtree), leaf_axes, strict=True) if a is not None
        )
    if not sizes and axis_size is None:
        raise ValueError(
            f"{api}: nothing is mapped: "
            + ("every entry of in_axes is None" if jax.tree.leaves((args, kwargs)) else "the call has no array")
            + "; map at least one argument, or pass axis_size."
        )
    if axis_size is not None:
        sizes.append(axis_size)
    if min(sizes) < 0 or len(set(sizes)) > 1:
        _raise_first_misfit(api, fun, args, kwargs, axes, keyword_axis, axis_size, given_by)
    return sizes[0]


def _size(leaf: Any, axis: int) -> int:
    """The size of `leaf` along `axis`, -1 where it has no such axis."""
    shape = getattr(leaf, "shape", ())
    return shape[axis] if -len(shape) <= axis < len(shape) else -1


def _raise_first_misfit(
    api: str,
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    axes: Sequence[Axes],
    keyword_axis: int | None,
    axis_size: int | None,
    given_by: str,
) -> None:
    first: tuple[str, int, int] | None = None
    named = [(argument_name(fun, args, i), value, axis) for i, (value, axis) in enumerate(zip(args, axes, strict=True))]
    named += [(name, value, keyword_axis) for name, value in kwargs.items()]
    for name, value, axes_of_value in named:
        try:
            leaf_axes = broadcast_axes(axes_of_value, value)
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"{api}: in_axes for argument `{name}` is {axes_of_value!r}, which is not a prefix of that argument's "
                f"structure {jax.tree.structure(value)}; use the same containers and keys, or one int for all of it."
            ) from None
        for (path, leaf), axis in zip(jax.tree.leaves_with_path(value), leaf_axes, strict=True):
            if axis is None:
                continue
            leaf_path, size = leaf_name(name, path), _size(leaf, axis)
            # Positional arguments come first, so that of two which differ the latter is by keyword if any is.
            remedy, or_shared = "", ", or pass None for an argument that is shared"
            if name in kwargs:
                remedy = "; keyword arguments are mapped over axis 0, so bind one that is shared with functools.partial"
                or_shared = remedy
            if size < 0:
                raise ValueError(
                    f"{api}: argument `{leaf_path}` cannot be mapped over axis {axis}: it is {describe(leaf)}"
                    f"{remedy or '; name an axis it has' + or_shared}."
                )
            if axis_size is not None and size != axis_size:
                raise ValueError(
                    f"{api}: axis {axis} of argument `{leaf_path}` has size {size}, but {given_by} is {axis_size}; "
                    f"make them one size{or_shared}."
                )
            if first is None:
                first = (leaf_path, axis, size)
            elif size != first[2]:
                raise ValueError(
                    f"{api}: axis {first[1]} of argument `{first[0]}` has size {first[2]}, but axis {axis} of "
                    f"argument `{leaf_path}` has size {size}; map arrays of one size{or_shared}."
                )


def check_out_axes(api: str, out_axes: Axes, out: Any, fixed: Callable[[Any], bool]) -> None:
    """Refuse `out_axes` that do not fit the output of one lane; one that is `fixed` is stacked along axis 0 only."""
    try:
        axes = broadcast_axes(out_axes, out, is_leaf=fixed)
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            f"{api}: out_axes={out_axes!r} is not a prefix of the output's structure "
            f"{jax.tree.structure(out, is_leaf=fixed)}; use the same containers and keys, or one int for all of it."
        ) from None
    for (path, leaf), axis in zip(jax.tree.leaves_with_path(out, is_leaf=fixed), axes, strict=True):
        if fixed(leaf):
            if axis != 0:
                raise ValueError(
                    f"{api}: out_axes is {axis} for {leaf_name('the model at output', path)}; models are stacked "
                    "along axis 0, so pass 0 for it."
                )
            continue
        rank = np.ndim(leaf) + 1
        if axis is not None and not -rank <= axis < rank:
            raise ValueError(
                f"{api}: out_axes is {axis} for {leaf_name('output', path)}, which has {rank} axes once it is mapped; "
                f"name one from {-rank} to {rank - 1}."
            )
