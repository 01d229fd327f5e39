"""Rules by kind of module: which of them holds for a module, and which module holds a variable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx

from .._core.arguments import describe
from ._places import Path

# In each call these look for the `nnx.Param`s within them: to normalise them in place, or to pass them to Linen.
NORMS_OF_WEIGHTS = (nnx.WeightNorm, nnx.SpectralNorm)
SEEKERS = (*NORMS_OF_WEIGHTS, nnx.bridge.ToNNX)
_CONTAINERS = (nnx.List, nnx.Dict)


def check_rules(api: str, name: str, rules: Any, value: str) -> None:
    """Raise if rules are not a dict from kinds of modules."""
    if not isinstance(rules, Mapping):
        raise TypeError(f"{api}: {name} must be a dict from kinds of modules to {value}, but got {describe(rules)}.")
    for kind in rules:
        if not isinstance(kind, type) or issubclass(kind, nnx.Variable):
            raise TypeError(f"{api}: {name} must name kinds of modules, such as nnx.Conv, but got {describe(kind)}.")


def rule_for(module: Any, rules: Mapping[type, Any]) -> type | None:
    """Return the first kind in the module's method resolution order that has a rule; None if there is none."""
    return next((kind for kind in type(module).__mro__ if kind in rules), None)


def holder(nodes: Mapping[Path, Any], path: Path) -> tuple[int, Any]:
    """Return the module that holds the variable at a path, also in its lists and dicts, after its own path's length."""
    around = [(i, nodes[path[:i]]) for i in range(len(path)) if path[:i] in nodes]
    return next((found for found in reversed(around) if not isinstance(found[1], _CONTAINERS)), around[0])
