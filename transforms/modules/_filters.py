"""Filters of variables: Flax's, in which names and kinds of modules mean something too."""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType
from typing import Any

from flax import nnx

from .._core.arguments import describe
from .._models.split_model import dotted
from ._places import Path

# A function of a path, the modules around it, and the variable there.
Matches = Callable[[Path, list[Any], Any], bool]


def matching(api: str, filter: Any) -> Matches:
    """Return a predicate for the variables that a filter takes.

    Flax reads a string as a tag, and a type as a kind of variable. It converts them to objects of its own inside
    `nnx.Not` and others, so these are unpacked here.
    """
    if isinstance(filter, (str, nnx.WithTag)):
        name = filter if isinstance(filter, str) else filter.tag
        # With a dot after both, "layers.1" takes "layers.1.kernel", but not "layers.10.kernel".
        return lambda path, _, x: f"{dotted(path)}.".startswith(f"{name}.") or getattr(x, "tag", None) == name
    if isinstance(filter, (type, nnx.OfType)):
        kind = filter if isinstance(filter, type) else filter.type
        return lambda _, modules, x: any(isinstance(node, kind) for node in (*modules, x))
    if isinstance(filter, nnx.Not):
        inner = matching(api, filter.predicate)
        return lambda *found: not inner(*found)
    if isinstance(filter, (list, tuple, nnx.Any, nnx.All)):
        parts = [matching(api, x) for x in (filter if isinstance(filter, (list, tuple)) else filter.predicates)]
        combine = all if isinstance(filter, nnx.All) else any
        return lambda *found: combine(part(*found) for part in parts)
    if isinstance(filter, (bool, EllipsisType)):
        return lambda *_: bool(filter)
    if callable(filter):
        return lambda path, _, x: bool(filter(path, x))
    raise TypeError(
        f"{api}: filter must be the beginning of a dotted name, a kind of variable or module, a function of a path and "
        f"a variable, or a filter of Flax, but got {describe(filter)}."
    )
