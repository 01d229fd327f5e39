"""What is static in a call, in another process: arguments' structures are recognised, and results' made again.

Without pickle, which knows no function but those that a module has under their name.
"""

from __future__ import annotations

import ast
import copyreg
import hashlib
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial, reduce
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from .._arguments import short
from .._compat import node

JITTED: Any = type(jax.jit(len))

_LEAF = "*"
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))


def described(value: Any, *, whole: bool = True) -> str:
    """A text that is the same in every process for what is the same, and another for anything else.

    Functions and classes that a module has under their name are described by that name; other functions by their code,
    defaults and what they close over; arrays by their bytes; and every other object by what `copy` would copy of it,
    or, where it shall not be the `whole`, by its type alone.

    Raises:
      TypeError: it holds an object that cannot be copied, such as a lock.
    """
    inside: list[int] = []

    def text(x: Any) -> str:
        if type(x) in _PLAIN:
            return repr(x)
        if id(x) in inside:
            return f"<{len(inside) - inside.index(id(x))} up>"
        inside.append(id(x))
        parts = _parts(x)
        if parts is None:
            parts = _reduced(x) if whole else ()
        line = f"{_name(type(x))}({', '.join(map(text, parts))})"
        inside.pop()
        return line

    return text(value)


def _parts(x: Any) -> Iterable[Any] | None:
    """What tells an object from others of its type; None for those of other types than these."""
    if type(x) in (tuple, list):
        return x
    if type(x) is dict:
        return x.items()
    if type(x) in (set, frozenset):
        return sorted(map(described, x))
    if isinstance(x, type) or _is_global(x):
        return [_name(x)]
    if isinstance(x, ModuleType):
        return [x.__name__]
    if isinstance(x, PyTreeDef):
        return [x.node_data(), *x.children()]
    if isinstance(x, partial):
        return [x.func, x.args, x.keywords]
    if isinstance(x, JITTED):
        return [x.__wrapped__]
    if isinstance(x, MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, FunctionType):
        return [_name(x), x.__code__, x.__defaults__, x.__kwdefaults__, *map(_content, x.__closure__ or ())]
    if isinstance(x, CodeType):
        return [x.co_code, x.co_names, x.co_varnames, x.co_consts]
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return [str(x.dtype), np.asarray(jax.random.key_data(x))]
    if isinstance(x, (np.ndarray, jax.Array)) and not x.dtype.hasobject:
        return [x.shape, str(x.dtype), hashlib.sha256(np.asarray(x).tobytes()).hexdigest()]
    return None


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is assigned later
        return ...


def _reduced(x: Any) -> Iterator[Any]:
    """What `copy` makes an object of."""
    try:
        registered = copyreg.dispatch_table.get(type(x))
        found: Any = registered(x) if registered else x.__reduce_ex__(4)
    except Exception as error:  # TypeError as a rule, but it is the object's own method
        raise TypeError(f"{short(x)} of type {_name(type(x))} cannot be told from others: {error}") from error
    for part in (found,) if isinstance(found, str) else found:
        yield list(part) if isinstance(part, Iterator) else part


def _name(x: Any) -> str:
    return f"{x.__module__}:{x.__qualname__}"


def _is_global(x: Any) -> bool:
    """Whether a module has `x` under its name."""
    module, name = getattr(x, "__module__", None), getattr(x, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return False
    try:
        return _find(module, name) is x
    except (AttributeError, ImportError):
        return False


def _find(module: str, name: str) -> Any:
    return reduce(getattr, name.split("."), sys.modules.get(module) or importlib.import_module(module))


def written(tree: PyTreeDef, known: Sequence[PyTreeDef]) -> Any:
    """The structure of a result, for `json`; `known` are all parts of the structure of the arguments.

    Of each node it has the class, its static part and the children. A static part that is no literal of Python can be
    made again only where it is that of a node of the arguments: as the graph of a module that is trained.

    Raises:
      TypeError: there is a node of which neither holds.
    """
    data: Any = tree.node_data()
    if data is None:
        return _LEAF
    kind, static = data
    children = [written(child, known) for child in tree.children()]
    if kind is type(None):
        return None
    if _is_global(kind) and _is_literal(static):
        return [_name(kind), repr(static), *children]
    for i, other in enumerate(known):
        there: Any = other.node_data()
        if there is not None and there[0] is kind and (there[1] is static or there[1] == static):
            return [i, None, *children]
    raise TypeError(f"a {kind.__name__} with {short(static)} cannot be made again by another process")


def read(text: Any, known: Sequence[PyTreeDef]) -> PyTreeDef:
    """The inverse of `written`."""
    if text == _LEAF:
        return jax.tree.structure(0)
    if text is None:
        return jax.tree.structure(None)
    place, static, *children = text
    data: Any = known[place].node_data() if isinstance(place, int) else None
    kind, static = data or (_find(*place.split(":")), ast.literal_eval(static))
    return node(kind, static, [read(child, known) for child in children])


def nodes(tree: PyTreeDef) -> list[PyTreeDef]:
    """All parts of a structure, itself first."""
    return [tree, *(x for child in tree.children() for x in nodes(child))]


def _is_literal(value: Any) -> bool:
    try:
        again = ast.literal_eval(repr(value))
    except (ValueError, SyntaxError):
        return False
    return type(again) is type(value) and again == value and repr(again) == repr(value)
