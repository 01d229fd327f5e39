"""Rules by kind of module: which of them is for a module, and which module holds a variable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx

from .._core.arguments import describe
from ._places import Path

# In each call they look for the `nnx.Param`s within them: to normalise them in their place, or to hand them to Linen.
NORMS_OF_WEIGHTS = (nnx.WeightNorm, nnx.SpectralNorm)
SEEKERS = (*NORMS_OF_WEIGHTS, nnx.bridge.ToNNX)
_CONTAINERS = (nnx.List, nnx.Dict)


def check_rules(api: str, name: str, rules: Any, value: str) -> None:
    """Refuse rules that are no dict from kinds of modules."""
    if not isinstance(rules, Mapping):
        raise TypeError(f"{api}: {name} must be a dict from kinds of modules to {value}, but got {describe(rules)}.")
    for kind in rules:
        if not isinstance(kind, type) or issubclass(kind, nnx.Variable):
            raise TypeError(f"{api}: {name} must name kinds of modules, such as nnx.Conv, but got {describe(kind)}.")


def rule_for(module: Any, rules: Mapping[type, Any]) -> type | None:
    """The kind among those of the rules to which a module is nearest; None where it is of none."""
    return next((kind for kind in type(module).__mro__ if kind in rules), None)


def holder(nodes: Mapping[Path, Any], path: Path) -> tuple[int, Any]:
    """The module that holds what is at a path, itself or in its lists and dicts, and the length of its own path."""
    around = [(i, nodes[path[:i]]) for i in range(len(path)) if path[:i] in nodes]
    return next((found for found in reversed(around) if not isinstance(found[1], _CONTAINERS)), around[0])
