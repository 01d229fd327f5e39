"""Axis specifications of `vmap` (`in_axes`, `out_axes`), checked against the arguments, with errors that name them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .arguments import argument_name, describe, is_int, leaf_name

Axes = Any  # int, None, or a nested container of them that is a prefix of the tree it is for
_ALIKE = "use the same containers and keys, or one int for all of it"


def is_axis(x: Any) -> bool:
    """Return whether `x` is an int (an axis) or None (no axis)."""
    return x is None or is_int(x)


def check_axes(api: str, name: str, axes: Axes) -> Axes:
    """Return `axes` with plain ints; raise if it holds anything but ints and None."""
    for leaf in jax.tree.leaves(axes):
        if not is_int(leaf):
            raise TypeError(f"{api}: {name} must hold ints and None, but got {describe(leaf)}.")
    return jax.tree.map(int, axes)


def check_in_axes(api: str, in_axes: Axes) -> Axes:
    """Return `in_axes` with plain ints; raise if it is not an int, None, or a tuple or list of entries."""
    if not is_axis(in_axes) and not isinstance(in_axes, (tuple, list)):
        wanted = "an int, None, or a tuple with one entry for each positional argument, such as (axes,)"
        raise TypeError(f"{api}: in_axes must be {wanted}, but got {describe(in_axes)}.")
    return check_axes(api, "in_axes", in_axes)


def axes_per_argument(api: str, in_axes: Axes, args: Sequence[Any]) -> tuple[Axes, ...]:
    """Return one axis specification for each positional argument."""
    if is_axis(in_axes):
        return (in_axes,) * len(args)
    if len(in_axes) != len(args):
        counts = f"{len(in_axes)} entries, but the call has {len(args)} positional argument(s)"
        raise ValueError(f"{api}: in_axes has {counts}; give one entry for each, None for a shared one.")
    return tuple(in_axes)


def broadcast_axes(axes: Axes, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return the axis of each leaf of `tree`; JAX raises a `ValueError` where `axes` is not a prefix of it."""
    found: list[Any] = []

    # `jax.tree.map` over a prefix calls `collect` with each leaf of the prefix and the subtree at its place.
    def collect(axis: Any, subtree: Any) -> None:
        found.extend([axis] * len(jax.tree.leaves(subtree, is_leaf=is_leaf)))

    jax.tree.map(collect, axes, tree, is_leaf=lambda x: x is None)
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
    """Return the common size of all mapped axes; raise at the first leaf that does not fit.

    `given_by` is the source of `axis_size` in errors.

    Raises:
      ValueError: an axis specification is not a prefix of its argument, an axis is out of range, two mapped axes have
        different sizes, a size differs from `axis_size`, or nothing is mapped and `axis_size` is None.
    """
    first: tuple[int | str, Any, int, int] | None = None
    mapped: list[tuple[int | str, Any, Axes]] = [(i, *each) for i, each in enumerate(zip(args, axes, strict=True))]
    mapped += [(keyword, value, keyword_axis) for keyword, value in kwargs.items()]

    # Names are made for errors only: they need the signature of `fun`, and reading that takes longer than the check.
    def name(argument: int | str, path: tuple[Any, ...] = ()) -> str:
        return leaf_name(argument if isinstance(argument, str) else argument_name(fun, args, argument), path)

    def say(argument: int | str, path: tuple[Any, ...], axis: int, size: int) -> str:
        return f"axis {axis} of argument `{name(argument, path)}` has size {size}"

    for argument, value, axes_of_value in mapped:
        try:
            leaf_axes = broadcast_axes(axes_of_value, value)
        except (ValueError, TypeError, KeyError):
            fact = f"{axes_of_value!r}, which is not a prefix of its structure {jax.tree.structure(value)}"
            raise ValueError(f"{api}: in_axes for argument `{name(argument)}` is {fact}; {_ALIKE}.") from None
        # Positional arguments come first: if one of two that differ was passed by keyword, it is the second.
        or_shared = ", or pass None for an argument that is shared"
        if isinstance(argument, str):
            # A partial of an ensemble is no ensemble any more: `vmap` would pass each slice to all members.
            how = "functools.partial" if given_by == "axis_size" else "a function of a member, mapped over the ensemble"
            or_shared = f", or bind shared keyword arguments with {how}, since all are mapped over axis 0"
        for (path, leaf), axis in zip(jax.tree.leaves_with_path(value), leaf_axes, strict=True):
            if axis is None:
                continue
            shape = getattr(leaf, "shape", ())
            if not -len(shape) <= axis < len(shape):
                fact = f"cannot be mapped over axis {axis}: it is {describe(leaf)}"
                raise ValueError(f"{api}: argument `{name(argument, path)}` {fact}; name an axis it has{or_shared}.")
            here = argument, path, axis, shape[axis]
            first = first or here
            if here[3] != (first[3] if axis_size is None else axis_size):
                other = say(*first) if axis_size is None else f"{given_by} is {axis_size}"
                raise ValueError(f"{api}: {other}, but {say(*here)}; map arrays of one size{or_shared}.")
    if axis_size is not None:
        return axis_size
    if first is None:
        why = "every entry of in_axes is None" if jax.tree.leaves((args, kwargs)) else "the call has no array"
        raise ValueError(f"{api}: nothing is mapped: {why}; map at least one argument, or pass axis_size.")
    return first[3]


def check_out_axes(api: str, out_axes: Axes, out: Any, fixed: Callable[[Any], bool]) -> None:
    """Raise if `out_axes` does not fit the output for one slice; leaves that are `fixed` need axis 0."""
    try:
        axes = broadcast_axes(out_axes, out, is_leaf=fixed)
    except (ValueError, TypeError, KeyError):
        fact = f"is not a prefix of the output's structure {jax.tree.structure(out, is_leaf=fixed)}"
        raise ValueError(f"{api}: out_axes={out_axes!r} {fact}; {_ALIKE}.") from None
    for (path, leaf), axis in zip(jax.tree.leaves_with_path(out, is_leaf=fixed), axes, strict=True):
        if fixed(leaf):
            if axis != 0:
                name = leaf_name("the model at output", path)
                raise ValueError(f"{api}: out_axes is {axis} for {name}; models are stacked along axis 0, so pass 0.")
            continue
        rank = np.ndim(leaf) + 1  # `out_axes` counts the mapped axis too
        if axis is not None and not -rank <= axis < rank:
            name = leaf_name("output", path)
            cure = f"name one from {-rank} to {rank - 1}"
            raise ValueError(f"{api}: out_axes is {axis} for {name}, which has {rank} axes once it is mapped; {cure}.")
