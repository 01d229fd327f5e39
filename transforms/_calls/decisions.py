"""Decisions for a function and a kind of arguments, remembered as long as the function lives."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from types import MethodType
from typing import Any

import jax

from .._models.equinox import is_equinox
from .._models.split_model import is_model

# How many decisions are kept for each function; the one that was asked for longest ago goes first.
_MOST = 128
# By the `id` of what lives as long as the function, with which they go.
_decisions: dict[int, dict[Hashable, list[Any]]] = {}
_lock = threading.Lock()


def remembered(fun: Any, arguments: Any, options: Hashable) -> list[Any]:
    """Return the list of what was decided for this function, such arguments and these options: empty at first.

    The values of arrays and floats, and what the function closes over, may have changed since. So only what those
    cannot make wrong may be put there (such as which of two ways to one result is cheaper), or what is decided anew
    where it fails.

    Args:
      fun: a function, which is not kept alive. A method is known by the identity of its object and its code; a model or
        Equinox module by its class and structure, kept until `_MOST` others of the class have been asked for. Where it
        cannot be referred to weakly, or a part of a structure cannot be compared, nothing is remembered.
      arguments: a pytree, with split models. Its structure is compared by value, and kept as long as the function
        lives. Arrays and floats are compared by their types, other numbers and strings by their values, anything else
        by its `id`; none of these is kept alive.
      options: what else the decision depends on.
    """
    owner, rest = _owner_of(fun)
    leaves, treedef = jax.tree.flatten((arguments, rest))
    try:
        key = (options, treedef, tuple(map(_kind, leaves)))
        with _lock:
            if id(owner) not in _decisions:
                # An `id` is used again once its object is gone: the decisions go first.
                weakref.finalize(owner, _decisions.pop, id(owner), None).atexit = False
                _decisions[id(owner)] = {}
            known = _decisions[id(owner)]
            found = known[key] = known.pop(key, [])  # the last of the dict, which is in the order of use
            if len(known) > _MOST:
                del known[next(iter(known))]
            return found
    except (TypeError, ValueError):
        return []


def _owner_of(fun: Any) -> tuple[Any, Any]:
    """Return the object whose life bounds how long a function is remembered, and what tells it from others of that."""
    if is_model(fun):
        return type(fun), None  # its structure is among the arguments
    if is_equinox(fun):  # or a method of one
        return type(fun), fun
    if isinstance(fun, MethodType):
        return (fun.__func__, None) if is_model(fun.__self__) else (fun.__self__, fun.__func__)
    return fun, None


def _kind(leaf: Any) -> Hashable:
    """Return what a leaf is compared by: a program depends on the values of integers and strings, not of arrays."""
    if leaf is None or isinstance(leaf, (bool, int, str, bytes)):
        return type(leaf), leaf
    if isinstance(leaf, (float, complex)) or hasattr(leaf, "dtype"):
        return jax.typeof(leaf)
    return id(leaf)  # of an object that is gone it may be used again, which at worst recalls the slower of two ways
