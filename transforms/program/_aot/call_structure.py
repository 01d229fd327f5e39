"""Write pytree structures for other processes: argument structures as text to compare, result structures to rebuild.

Pickle is not used, because it supports only functions that are attributes of a module under their name.
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
    """Return a text of the node types and the `repr` of the static parts that is the same in every process.

    Different structures may have the same text: it serves for file names, and contents are compared in other ways.
    """
    static = jax.tree.leaves([data[1] for data in (part.node_data() for part in nodes(tree)) if data])
    # The `repr` of the structure of a module does not show its graph definition.
    return without_addresses(f"{tree} {[x.graphdef for x in static if isinstance(x, ModuleStructure)]}")


def without_addresses(text: str) -> str:
    """Return a `repr` without memory addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def written(tree: PyTreeDef, known: Sequence[PyTreeDef]) -> Any:
    """Return the structure of a result as JSON data; `known` are all nodes of the argument structure.

    Each node becomes a list of its class, its static part and its children. A static part that is not a Python literal
    can be rebuilt only if a node of the arguments has an equal one, such as the graph definition of a module that is
    trained and returned; the index of that node then replaces class and static part.

    Raises:
      TypeError: a node is neither a literal nor equal to a node of the arguments.
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
    raise TypeError(f"another process cannot rebuild a {kind.__name__} with {short(static)}")


def read(text: Any, known: Sequence[PyTreeDef]) -> PyTreeDef:
    """Rebuild the structure that was passed to `written`."""
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
    # Compare the `repr` too: a tuple may contain an object of another class that equals a number.
    return type(rebuilt) is type(value) and rebuilt == value and repr(rebuilt) == repr(value)


def _is_global(kind: type) -> bool:
    """Return whether a class can be imported under its qualified name."""
    try:
        return _find(kind.__module__, kind.__qualname__) is kind
    except (AttributeError, ImportError):
        return False


def _find(module: str, name: str) -> Any:
    return reduce(getattr, name.split("."), importlib.import_module(module))
