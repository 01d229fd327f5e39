"""Where in a model an operation is: the scopes that its name tells of, and such scopes for the parts of NNX modules."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from .._model import is_module, models_of

# What the structure of a program adds to the names of scopes: calls, the bodies of loops, branches.
_CALLS = frozenset(
    """
    checkpoint closed_call core_call custom_jvp_call custom_vjp_call jit pjit remat rematted_computation
    """.split()  # noqa: SIM905 (words read better)
)
_BRANCH = re.compile(r"branch_\d+_fun")


def scope_of(op_name: str) -> tuple[str, str]:
    """The operation of JAX and its scopes, from a name such as `jit(f)/layer/while/body/mix/dot_general`."""
    *scopes, operation = _parts(op_name)
    return operation, _without_structure(scopes)


def _parts(name: str) -> list[str]:
    """A name at those of its strokes that are not in brackets."""
    parts, depth = [""], 0
    for character in name:
        depth += (character == "(") - (character == ")")
        if character == "/" and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _without_structure(parts: list[str]) -> str:
    kept = []
    for i, part in enumerate(parts):
        before, after = parts[i - 1] if i else "", parts[i + 1] if i + 1 < len(parts) else ""
        opens = (part == "while" and after in {"body", "cond"}) or (part == "cond" and _BRANCH.fullmatch(after))
        inside = (part in {"body", "cond"} and before == "while") or (_BRANCH.fullmatch(part) and before == "cond")
        outer, bracket, inner = part.removesuffix(")").partition("(")
        if opens or inside or outer in _CALLS:
            continue
        if bracket and part.endswith(")"):
            # A transform of scopes, such as `transpose(jvp(layer))`.
            inner = _without_structure(_parts(inner))
            part = f"{outer}({inner})" if inner else ""
        kept.append(part)
    return "/".join(filter(None, kept))


def modules_of(fun: Callable[..., Any], owner: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """The NNX modules of a call by a name to put before the paths of their parts, empty if there is only one.

    They are the function itself, those among its arguments, and those it refers to.
    """
    found = {"fun": owner, **_closed_over(fun)}
    parameters = list(_parameters(fun))
    for i, argument in enumerate(args):
        models = models_of(argument)
        name = parameters[i] if i < len(parameters) else f"argument {i}"
        found |= {name if len(models) == 1 else f"{name}.{j}": model for j, model in enumerate(models)}
    modules = {id(module): (name, module) for name, module in reversed(found.items()) if is_module(module)}
    return {name if len(modules) > 1 else "": module for name, module in modules.values()}


def _closed_over(fun: Callable[..., Any]) -> dict[str, Any]:
    function = inspect.unwrap(fun)
    if not inspect.isfunction(function):
        return {}
    variables = inspect.getclosurevars(function)
    return {**variables.globals, **variables.nonlocals}


def _parameters(fun: Callable[..., Any]) -> Iterator[str]:
    try:
        yield from inspect.signature(fun).parameters
    except (TypeError, ValueError):  # a builtin
        return


@contextmanager
def module_scopes(modules: dict[str, Any]) -> Iterator[None]:
    """Let each part of these NNX modules name a scope while it is called: its path of attributes.

    The scopes are relative, as the calls are nested. Each part is of a subclass of its class meanwhile, so it keeps its
    scope where it is taken apart and put together again.
    """
    from flax import nnx

    changed = []
    active: list[tuple[str, ...]] = [()]
    try:
        seen = set()
        for name, module in modules.items():
            for path, part in nnx.iter_modules(module):
                if id(part) not in seen and callable(part):
                    seen.add(id(part))
                    whole = (*filter(None, [name]), *map(str, path))
                    changed.append((part, type(part)))
                    object.__setattr__(part, "__class__", _scoped(type(part), whole, active))
        yield
    finally:
        for part, kind in changed:
            object.__setattr__(part, "__class__", kind)


def _scoped(kind: type, path: tuple[str, ...], active: list[tuple[str, ...]]) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer = active[-1]
        relative = path[len(outer) :] if path[: len(outer)] == outer else path
        if not relative:
            return kind.__call__(self, *args, **kwargs)
        active.append(path)
        try:
            with jax.named_scope("/".join(relative)):
                return kind.__call__(self, *args, **kwargs)
        finally:
            active.pop()

    return type(kind)(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
