"""Decisions for a function and a kind of arguments, remembered as long as the function lives."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import MethodType
from typing import Any, TypeVar

import jax

from .._models.equinox import is_equinox
from .._models.split_model import is_model

Decision = TypeVar("Decision")

# How many decisions are kept for each function; the one that was asked for longest ago goes first.
_MOST = 128
# By the `id` of what lives as long as the function, with which they go.
_decisions: dict[int, OrderedDict[Hashable, Any]] = {}
_lock = threading.Lock()


def remembered(fun: Any, arguments: Any, options: Hashable, decide: Callable[[], Decision]) -> Decision:
    """Return what `decide` gave when it was first called for this function, such arguments and these options.

    The values of arrays and floats, and what the function closes over, may have changed since. So only what those
    cannot make wrong may be decided here (such as which of two ways to one result is cheaper), or what is decided anew
    where it fails.

    Args:
      fun: a function, which is not kept alive. A method is known by the identity of its object and its code; a model or
        Equinox module by its class and structure, kept until `_MOST` others of the class have been asked for.
      arguments: a pytree, with split models. Its structure is compared by value, and kept as long as the function
        lives. Arrays and floats are compared by their types, other numbers and strings by their values, anything else
        by its identity; none of these is kept alive.
      options: what else the decision depends on.
      decide: makes it. It is called each time where the function or a leaf cannot be referred to weakly, or a part of
        a structure cannot be compared.
    """
    owner, rest = _owner_of(fun)
    leaves, treedef = jax.tree.flatten((arguments, rest))
    try:
        key = (options, treedef, tuple(map(_kind, leaves)))
        with _lock:
            known = _known(owner)
            if key in known:
                known.move_to_end(key)
                return known[key]
    except (TypeError, ValueError):
        return decide()
    found = decide()
    with _lock:
        known[key] = found
        if len(known) > _MOST:
            known.popitem(last=False)
    return found


def _owner_of(fun: Any) -> tuple[Any, Any]:
    """Return the object whose life bounds how long a function is remembered, and what tells it from others of that."""
    if is_model(fun):
        return type(fun), None  # its structure is among the arguments
    if is_equinox(fun):  # or a method of one
        return type(fun), fun
    if isinstance(fun, MethodType):
        return (fun.__func__, None) if is_model(fun.__self__) else (fun.__self__, fun.__func__)
    return fun, None


def _known(owner: Any) -> OrderedDict[Hashable, Any]:
    """Return the decisions of an owner, which go when it does; a TypeError if it has no weak references."""
    found = _decisions.get(id(owner))
    if found is None:
        # An `id` is used again once its object is gone: the decisions go first.
        weakref.finalize(owner, _decisions.pop, id(owner), None).atexit = False
        found = _decisions[id(owner)] = OrderedDict()
    return found


class _Same:
    """An object by its identity, without keeping it alive: when it is gone, this is equal to itself alone."""

    __slots__ = ("_id", "_of")

    def __init__(self, x: Any) -> None:
        self._id, self._of = id(x), weakref.ref(x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._of() is other._of() is not None

    def __hash__(self) -> int:
        return self._id


def _kind(leaf: Any) -> Hashable:
    """Return what a leaf is compared by: a program depends on the values of integers and strings, not of arrays."""
    if leaf is None or isinstance(leaf, (bool, int, str, bytes)):
        return type(leaf), leaf
    if isinstance(leaf, (float, complex)) or hasattr(leaf, "dtype"):
        return jax.typeof(leaf)
    return _Same(leaf)
