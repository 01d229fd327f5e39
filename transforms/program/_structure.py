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
from types import CellType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from .._arguments import short
from .._compat import Jitted, Tracer, jit_settings, node
from .._keys import is_key
from .._model import is_model, to_parts
from ._environment import PACKAGES

_LEAF = "*"
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
# Of these the version is compared, so that what they have under a name is described by it (`ml_dtypes` are dtypes).
_LIBRARIES = {*PACKAGES, "ml_dtypes", *sys.stdlib_module_names}


def described(value: Any, *, whole: bool = True, owner: Any = None) -> str:
    """A text that is the same in every process for what is the same, and another for anything else.

    Functions are described by their code, defaults and what they close over, so not by the globals that they use;
    classes by what their bodies define; functions and classes of the libraries by their names, and modules too; arrays
    by their bytes; and every other object by what `copy` would copy of it. Of `owner` there is only its class.

    Raises:
      TypeError: it holds an object that cannot be copied, such as a lock (where it shall not be the `whole`, or where a
        class or a function of a module holds it, it counts by its type), or it is nested too deeply.
    """
    numbers: dict[int, int] = {}
    found: list[tuple[Any, bool]] = []  # which also keeps alive what is made on the way: no two have one id

    def text(x: Any, whole: bool) -> str:
        if type(x) in _PLAIN:
            return repr(x)
        if type(x) is tuple:
            return f"({', '.join([text(y, whole) for y in x])})"
        if id(x) not in numbers:
            numbers[id(x)] = len(found)
            found.append((x, whole))
        return f"#{numbers[id(x)]}"

    try:
        lines = [text(value, whole)]
        for x, all_of_it in found:
            parts = [type(x)] if x is owner else _parts(x, all_of_it)
            all_of_it = all_of_it and not isinstance(x, type) and not _is_global(x)
            lines.append(_name(type(x)) + text(tuple(parts), all_of_it))
    except RecursionError:
        raise TypeError(f"something of type {_name(type(value))} is nested too deeply to be told from others") from None
    return "\n".join(lines)


def _parts(x: Any, whole: bool) -> Iterable[Any]:
    """What tells an object from others of its type."""
    if type(x) is list:
        return x
    if isinstance(x, MappingProxyType) or type(x) is dict:
        return x.items()
    if type(x) in (set, frozenset):
        return sorted(described(y, whole=whole) for y in x)
    if isinstance(x, ModuleType):
        return [x.__name__]
    if _is_global(x) and x.__module__.partition(".")[0] in _LIBRARIES:
        return [_name(x)]
    if isinstance(x, type):
        return [_name(x), x.__bases__, *_body(x)]
    if isinstance(x, PyTreeDef):
        return [x.node_data(), *x.children()]
    if isinstance(x, partial):
        return [x.func, x.args, x.keywords]
    if isinstance(x, Jitted):
        return [jit_settings(x), x.__wrapped__]
    if isinstance(x, (MethodType, staticmethod, classmethod)):
        return [x.__func__, getattr(x, "__self__", None)]
    if isinstance(x, property):
        return [x.fget]
    if isinstance(x, FunctionType):
        return [_name(x), x.__code__, x.__defaults__, x.__kwdefaults__, *map(_content, x.__closure__ or ())]
    if isinstance(x, CodeType):
        arguments = x.co_argcount, x.co_posonlyargcount, x.co_kwonlyargcount, x.co_flags
        return [*arguments, x.co_code, x.co_exceptiontable, x.co_names, x.co_varnames, x.co_consts]
    if isinstance(x, jax.Array):
        return [str(jax.typeof(x)), _digest(x)]  # the type says also whether it is weak
    if isinstance(x, np.generic) or (type(x) is np.ndarray and not x.dtype.hasobject):
        return [x.shape, str(x.dtype), _digest(x)]
    if isinstance(x, jax.Device):
        return [str(x)]
    if is_model(x):  # whose attributes change their order where it is updated
        leaves, structure = jax.tree.flatten(to_parts(x))
        return [structure, *leaves]
    return _reduced(x, whole)


def _digest(x: Any) -> str:
    if isinstance(x, jax.Array):
        if not isinstance(x, Tracer) and x.is_deleted():
            return "deleted"
        if is_key(x):
            x = jax.random.key_data(x)
    return hashlib.sha256(np.asarray(x).tobytes()).hexdigest()


def _body(kind: type) -> Iterator[tuple[str, Any]]:
    """What somebody has defined in a class: other special attributes than functions are Python's own."""
    return ((k, v) for k, v in vars(kind).items() if not k.startswith("__") or isinstance(v, FunctionType))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is assigned later
        return ...


def _reduced(x: Any, whole: bool) -> list[Any]:
    """What `copy` makes an object of."""
    try:
        registered = copyreg.dispatch_table.get(type(x))
        found: Any = registered(x) if registered else x.__reduce_ex__(4)
    except Exception as error:  # TypeError as a rule, but it is the object's own method
        if not whole:
            return []
        raise TypeError(f"{short(x)} of type {_name(type(x))} cannot be told from others: {error}") from error
    if isinstance(found, str):  # it says that it has this name, as each `functools.cache` does
        found = found, getattr(x, "__dict__", None)
    return [list(part) if isinstance(part, Iterator) else part for part in found]


def _name(x: Any) -> str:
    return f"{x.__module__}:{x.__qualname__}"


def _is_global(x: Any) -> bool:
    """Whether a module has `x` under its name."""
    try:
        module, name = x.__module__, x.__qualname__
        return isinstance(module, str) and isinstance(name, str) and _find(module, name) is x
    except Exception:  # AttributeError or ImportError as a rule, but attributes may be the object's own work
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
