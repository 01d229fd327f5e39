"""What was decided for a function and a kind of arguments, remembered as long as the function lives."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import MethodType
from typing import Any, TypeVar

import jax

from ._model import is_model

Decision = TypeVar("Decision")

# How many decisions are kept; the one that was asked for longest ago goes first.
_MOST = 1024
_decisions: OrderedDict[Hashable, Any] = OrderedDict()
_lock = threading.Lock()


def remembered(fun: Any, arguments: Any, options: Hashable, decide: Callable[[], Decision]) -> Decision:
    """Return what `decide` gave when it was first called for this function, such arguments and these options.

    Only what cannot be made wrong by another value of the arguments, or of what the function closes over, may be
    decided so: which of several ways to the same result is the cheapest, say.

    Args:
      fun: a function, which is not kept alive.
      arguments: a pytree, models in it taken apart. Arrays and floats count by their types, other numbers and strings
        by their values, anything else by its identity.
      options: what else bears on the decision.
      decide: makes it.
    """
    leaves, treedef = jax.tree.flatten(arguments)
    try:
        key = (_reference(fun), options, treedef, tuple(map(_kind, leaves)))
        with _lock:
            if key in _decisions:
                _decisions.move_to_end(key)
                return _decisions[key]
    except TypeError:  # a part of the key has no hash, or cannot be referred to weakly
        return decide()
    found = decide()
    with _lock:
        _decisions[key] = found
        while len(_decisions) > _MOST:
            _decisions.popitem(last=False)
    return found


def _reference(fun: Any) -> Any:
    """Return a key that is that of no other function, and does not keep this one alive."""
    if is_model(fun):
        return type(fun)  # its structure is among the arguments
    if isinstance(fun, MethodType):
        return weakref.ref(fun.__func__) if is_model(fun.__self__) else weakref.WeakMethod(fun)
    return weakref.ref(fun)


def _kind(leaf: Any) -> Hashable:
    if leaf is None or isinstance(leaf, (bool, int, str, bytes)):
        return type(leaf), leaf
    if isinstance(leaf, (float, complex)) or hasattr(leaf, "dtype"):
        return jax.typeof(leaf)
    return weakref.ref(leaf)
