"""Pytree structures across processes: those of arguments as a text to compare, those of results to rebuild.

Without pickle, which knows only functions that a module has under their name.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from ..._core.arguments import short
from ..._core.compat import node
from ..._models.split_model import ModuleStructure

_LEAF = "*"


def described(tree: PyTreeDef) -> str:
    """Return the types in a structure, and its static parts by their `repr`: the same text in every process.

    Two structures may have one text: it is for names of files, whose contents are compared otherwise.
    """
    static = jax.tree.leaves([data[1] for data in (part.node_data() for part in nodes(tree)) if data])
    # The `repr` of the structure of a module does not show its graph definition.
    return without_addresses(f"{tree} {[x.graphdef for x in static if isinstance(x, ModuleStructure)]}")


def without_addresses(text: str) -> str:
    """Return a `repr` without addresses in memory, which differ from process to process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def written(tree: PyTreeDef, known: Sequence[PyTreeDef]) -> Any:
    """Return the structure of a result, for `json`; `known` are all nodes of the structure of the arguments.

    Each node is a list of the class, its static part and the children. A static part that is not a literal of Python
    can be rebuilt only if a node of the arguments has the same one, as the graph definition of a module that is trained
    and returned; then the index of that node replaces both.

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
        return [f"{kind.__module__}:{kind.__qualname__}", repr(static), *children]
    for i, other in enumerate(known):
        there: Any = other.node_data()
        if there is not None and there[0] is kind and (there[1] is static or there[1] == static):
            return [i, None, *children]
    raise TypeError(f"a {kind.__name__} with {short(static)} cannot be made again by another process")


def read(text: Any, known: Sequence[PyTreeDef]) -> PyTreeDef:
    """Return the structure that `written` was given."""
    if text == _LEAF:
        return jax.tree.structure(0)
    if text is None:
        return jax.tree.structure(None)
    name, static, *children = text
    data: Any = known[name].node_data() if isinstance(name, int) else None
    kind, static = data or (_find(*name.split(":")), ast.literal_eval(static))
    return node(kind, static, [read(child, known) for child in children])


def nodes(tree: PyTreeDef) -> list[PyTreeDef]:
    """Return all nodes of a structure, the root first."""
    return [tree, *(x for child in tree.children() for x in nodes(child))]


def _is_literal(value: Any) -> bool:
    """Return whether a value can be rebuilt from its `repr`."""
    try:
        rebuilt = ast.literal_eval(repr(value))
    except (ValueError, SyntaxError):
        return False
    # The `repr` too: inside of a tuple there may be an object of another class that equals a number, written as 0x1.
    return type(rebuilt) is type(value) and rebuilt == value and repr(rebuilt) == repr(value)


def _is_global(kind: type) -> bool:
    """Return whether a module has a class under its name."""
    try:
        return _find(kind.__module__, kind.__qualname__) is kind
    except (AttributeError, ImportError):
        return False


def _find(module: str, name: str) -> Any:
    return reduce(getattr, name.split("."), importlib.import_module(module))
