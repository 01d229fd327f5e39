"""A cache of decisions for a function and a kind of arguments, kept as long as the function is alive."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from types import MethodType
from typing import Any

import jax

from .._core.target import device
from .._models.equinox import is_equinox
from .._models.split_model import is_model

# How many decisions are kept for each function; the least recently used one is dropped first.
_MOST = 128
# Keyed by the `id` of an object that lives as long as the function; entries are removed with that object.
_decisions: dict[int, dict[Hashable, list[Any]]] = {}
_lock = threading.Lock()


def remembered(fun: Any, arguments: Any, options: Hashable) -> list[Any]:
    """Return the mutable list of decisions for this function, such arguments and these options; empty at first.

    Values of arrays and floats, and of what the function closes over, are not part of the key. So a stored decision
    must stay correct for any such values (for example, which of two equivalent methods is cheaper), or the caller must
    decide again where it fails.

    Args:
      fun: a function, which is not kept alive. A method is identified by its object and its code, a model or Equinox
        module by its class and structure, which is kept until `_MOST` others of the class have been used. Nothing is
        remembered if `fun` does not support weak references or part of a structure cannot be compared.
      arguments: a pytree, with split models. Its structure is compared by value, and kept as long as the function
        is alive. Arrays and floats are compared by their types, other numbers and strings by their values, anything
        else by its `id`; none of these is kept alive.
      options: everything else that the decision depends on.
    """
    owner, rest = _owner_of(fun)
    leaves, treedef = jax.tree.flatten((arguments, rest))
    try:
        key = (options, device(), treedef, tuple(map(_kind, leaves)))
        with _lock:
            if id(owner) not in _decisions:
                # An `id` can be reused once its object is gone, so the decisions are removed with the object.
                weakref.finalize(owner, _decisions.pop, id(owner), None).atexit = False
                _decisions[id(owner)] = {}
            known = _decisions[id(owner)]
            found = known[key] = known.pop(key, [])  # moved to the end: the dict is in order of use
            if len(known) > _MOST:
                del known[next(iter(known))]
            return found
    except (TypeError, ValueError):
        return []


def _owner_of(fun: Any) -> tuple[Any, Any]:
    """Return the object whose lifetime bounds how long a function is remembered, and the rest of the function's key."""
    if is_model(fun):
        return type(fun), None  # the structure of `fun` is among the arguments
    if is_equinox(fun):  # or a method of one
        return type(fun), fun
    if isinstance(fun, MethodType):
        return (fun.__func__, None) if is_model(fun.__self__) else (fun.__self__, fun.__func__)
    return fun, None


def _kind(leaf: Any) -> Hashable:
    """Return the key of a leaf: a program depends on the values of integers and strings, but not of arrays."""
    if leaf is None or isinstance(leaf, (bool, int, str, bytes)):
        return type(leaf), leaf
    if isinstance(leaf, (float, complex)) or hasattr(leaf, "dtype"):
        return jax.typeof(leaf)
    return id(leaf)  # may be reused once the object is gone, which at worst recalls the slower of two methods
