"""Named scopes for the parts of NNX modules, which bring none of their own: their paths of attributes."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import jax

from ..._core.arguments import argument_name, leaf_name
from ..._models.split_model import is_model, is_module

# An attribute of a module is part of its graph definition, so copies that are merged from a split module have it too.
_PATH = "_plurax_path"
# Modules and their classes are changed for a while, which all threads see, so only one thread may do so at a time.
LOCK = threading.RLock()
# Functions of these libraries refer to much, but never to a module of the user's.
_LIBRARIES = frozenset({"builtins", "equinox", "flax", "functools", "jax", "jaxlib", "numpy", "optax", "plurax"})


def modules_of(fun: Callable[..., Any], owner: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the NNX modules of a call by a name to put before the paths of their parts, empty if there is only one.

    They are the function itself, those in its arguments, and those that it refers to: what it closes over, its defaults
    and global variables, the arguments of partials, attributes of the object whose method it is, and likewise for the
    functions among these.
    """
    found = [("fun", owner)]
    for i, argument in enumerate(args):
        found += _inside(argument_name(fun, args, i), argument)
    found += _referred("fun", fun, set())
    # A module that is found several times has the name it was found by first: reversed, the first assignment is last.
    modules = {id(module): (name, module) for name, module in reversed(found) if is_module(module)}
    names: dict[str, Any] = {}
    for name, module in reversed(modules.values()):
        number = sum(other.partition(" ")[0] == name for other in names)
        names[name if not number else f"{name} {number + 1}"] = module
    return names if len(names) > 1 else dict(zip([""], names.values(), strict=False))


def _inside(name: str, tree: Any) -> list[tuple[str, Any]]:
    """Return the modules in a pytree, each with its path."""
    try:
        leaves = jax.tree.leaves_with_path(tree, is_leaf=is_model)
    except (TypeError, ValueError):  # a global dict need be no pytree: JAX sorts its keys, which may have no order
        return []
    return [(leaf_name(name, path), leaf) for path, leaf in leaves if is_module(leaf)]


def _referred(name: str, value: Any, seen: set[int]) -> list[tuple[str, Any]]:
    """Return the modules that a value is, holds, or refers to if it is a function, each by the name of the variable."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    found: list[tuple[str, Any]] = []
    if isinstance(value, (dict, list, tuple)) or is_model(value):
        found += _inside(name, value)
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        parts = {f"{name} {i}": x for i, x in enumerate(values) if callable(x) and not is_model(x)}
    elif not callable(value) or _library(value):
        return []
    else:
        parts = _references(name, value)
    for inner, x in parts.items():
        found += _referred(inner, x, seen)
    return found


def _library(value: Any) -> bool:
    """Return whether a callable is a library's own, and does not wrap a user's function, as `jax.jit` does."""
    kind = value if hasattr(value, "__module__") else type(value)
    wraps = hasattr(value, "__wrapped__") or isinstance(value, (functools.partial, MethodType))
    return not wraps and str(kind.__module__).partition(".")[0] in _LIBRARIES


def _references(name: str, value: Any) -> dict[str, Any]:
    """Return what a callable refers to, by the names of the variables."""
    if isinstance(value, functools.partial):
        return {name: value.func, **{f"{name} {i}": x for i, x in enumerate(value.args)}, **value.keywords}
    if isinstance(value, MethodType):
        return {name: value.__func__, "self": value.__self__}
    if hasattr(value, "__wrapped__"):
        return {name: value.__wrapped__}
    if not isinstance(value, FunctionType):  # an object with `__call__`; looked up without running a property
        return {**getattr(value, "__dict__", {}), name: inspect.getattr_static(type(value), "__call__", None)}
    code, cells = value.__code__, value.__closure__ or ()
    found = {x: value.__globals__[x] for x in code.co_names if x in value.__globals__}
    for variable, cell in zip(code.co_freevars, cells, strict=True):
        try:
            found[variable] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    parameters = list(inspect.signature(value, follow_wrapped=False).parameters.values())
    return found | {x.name: x.default for x in parameters if x.default is not inspect.Parameter.empty}


@contextmanager
def module_paths(modules: dict[str, Any]) -> Iterator[list[type]]:
    """Store in each part of these NNX modules its path of attributes, and yield the classes of the parts.

    Inside the context the parts have one attribute more, and so have copies that are merged from split modules.
    """
    named: list[Any] = []
    with LOCK:
        try:
            for path, part in _parts(modules):
                if not hasattr(part, _PATH):  # a shared part keeps its first path
                    setattr(part, _PATH, path)
                    named.append(part)
            yield list(dict.fromkeys(map(type, named)))
        finally:
            for part in named:
                delattr(part, _PATH)


@contextmanager
def scoped_calls(kinds: Iterable[type]) -> Iterator[None]:
    """Name a scope around each call, in this thread, of a module of these classes that knows its path.

    The scopes are relative, as the calls are nested. Inside the context the classes have another `__call__`.
    """
    active: list[str] = []
    with LOCK:
        classes: list[tuple[Any, Any]] = [(kind, vars(kind).get("__call__")) for kind in kinds]
        try:
            for kind, _ in classes:
                kind.__call__ = _scoped(kind.__call__, active, threading.get_ident())
            yield
        finally:
            for kind, own in reversed(classes):
                if own is None:  # it was inherited
                    del kind.__call__
                else:
                    kind.__call__ = own


def _parts(modules: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the callable parts of modules with their paths."""
    for name, module in modules.items():
        from flax import nnx  # here, so that nothing is imported where there are no modules

        for path, part in nnx.iter_modules(module):
            if callable(part):
                yield "/".join([*filter(None, [name]), *map(str, path)]), part


def _scoped(call: Callable[..., Any], active: list[str], thread: int) -> Callable[..., Any]:
    """Wrap the `__call__` of a class to run in the scope of the object it is called on."""

    @functools.wraps(call)
    def scoped(self: Any, *args: Any, **kwargs: Any) -> Any:
        path = getattr(self, _PATH, "") if threading.get_ident() == thread else ""
        outer = active[-1] if active else ""
        # With the same path a class calls the `__call__` of its parent class, which may be wrapped as well.
        if path == outer or not path:
            return call(self, *args, **kwargs)
        active.append(path)
        try:
            with jax.named_scope(path.removeprefix(f"{outer}/") if outer else path):
                return call(self, *args, **kwargs)
        finally:
            active.pop()

    return scoped
