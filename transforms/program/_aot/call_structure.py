"""What is static in a call, in another process: arguments' structures are described, and results' made again.

Without pickle, which knows no function but those that a module has under their name.
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
    """The types in a structure, and what is static in it as far as its `repr` tells: the same text in every process.

    It need not tell all that differs: it is for names of files, and what they hold is compared otherwise.
    """
    static = [data[1] for data in (part.node_data() for part in nodes(tree)) if data]
    return without_addresses(f"{tree} {[x.graphdef for x in static if isinstance(x, ModuleStructure)]}")


def without_addresses(text: str) -> str:
    """`text` as every process has it, where it is made of `repr`s."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


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
    return reduce(getattr, name.split("."), importlib.import_module(module))
