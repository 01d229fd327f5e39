"""Choose the layers of a model that a function changes: by a filter and by rules, and none of an unknown class."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._core.arguments import describe
from .._models.split_model import dotted
from ._parameters import is_parameter, matching
from ._places import SEEKERS, Path, check_rules, enclosing, holder, rule_for

# From kinds of layers to functions from such a layer, which they may change, to the layer in its place.
Rules = Mapping[type, Callable[[Any], Any]]

# The parameters of two or more dimensions that a module may have itself (stacked layers have vectors with two).
_KNOWN: dict[type, tuple[str, ...]] = {
    **dict.fromkeys((nnx.Linear, nnx.Conv), ("kernel", "bias")),
    **dict.fromkeys((nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm), ("scale", "bias")),
    nnx.Embed: ("embedding",),
}


def check_layer_rules(api: str, rules: Any, nodes: Mapping[Path, Any]) -> Rules:
    """Return the rules, or none for None; raise if they are not functions, or for kinds that a model does not have."""
    if rules is None:
        return {}
    check_rules(api, "rules", rules, "functions of a layer")
    for kind, rule in rules.items():
        if not callable(rule):
            raise TypeError(f"{api}: rules[{kind.__name__}] must be a function of a layer, but got {describe(rule)}.")
        if not any(isinstance(x, kind) for x in nodes.values()):
            raise ValueError(f"{api}: rules has a function for {kind.__name__}, but the model has none; leave it out.")
    return rules


def with_rule(nodes: Mapping[Path, Any], paths: Collection[Path], rules: Rules) -> set[Path]:
    """Return the paths of the modules that have a rule."""
    return {path for path in paths if isinstance(nodes[path], nnx.Pytree) and rule_for(nodes[path], rules) is not None}


def by_rule(api: str, rules: Rules, layer: Any) -> Any:
    """Return what the rule for a layer makes of it; raise if that is not a module."""
    kind = rule_for(layer, rules)
    assert kind is not None
    made = rules[kind](layer)
    if not isinstance(made, nnx.Module):
        raise TypeError(f"{api}: rules[{kind.__name__}] must return a layer, but it returned {describe(made)}.")
    return made


def selected(
    api: str, nodes: Mapping[Path, Any], layers: set[Path], rules: Rules, where: Any, name: str = "where"
) -> set[Path]:
    """Return all paths of the layers that a filter selects (all for None), but for those inside one with a rule."""
    if where is not None:
        matches = matching(api, where, name)
        # By identity: a layer with several paths is selected if any of them is.
        found = {id(nodes[path]) for path in layers if matches(path, enclosing(nodes, path), nodes[path])}
        layers = {path for path in layers if id(nodes[path]) in found}
    ruled = with_rule(nodes, layers, rules)
    return {path for path in layers if not any(path[:i] in ruled for i in range(len(path)))}


def unknown_layers(nodes: Mapping[Path, Any]) -> dict[Path, str]:
    """Return the modules of other classes than Flax's own layers that hold a parameter of two or more dimensions.

    Args:
      nodes: the modules and variables of a model by path.

    Returns:
      By path, the first such parameter in words.
    """
    found: dict[Path, str] = {}
    for path, x in nodes.items():
        if not is_parameter(x):
            continue
        length, layer = holder(nodes, path)
        shape = max((jnp.shape(leaf) for leaf in jax.tree.leaves(x.get_raw_value())), key=len, default=())
        own = [names for kind, names in _KNOWN.items() if isinstance(layer, kind)]
        if len(shape) >= 2 and not any(path[length:] == (name,) for names in own for name in names):
            found.setdefault(path[:length], f"`{dotted(path)}` of shape {shape}")
    return found


def check_known(api: str, nodes: Mapping[Path, Any], layers: set[Path], rules: Rules) -> None:
    """Raise if a layer is of an unknown class and has no rule, or if a module around it needs it as it is."""
    for path in layers:
        for module in enclosing(nodes, path):
            if isinstance(module, SEEKERS):
                kind = type(module).__name__
                cure = f"leave it out, as where=nnx.Not({kind}) does, or give a function for {kind} in rules"
                raise ValueError(f"{api}: `{dotted(path)}` must stay as it is for the {kind} around it; {cure}.")
    for path, parameter in unknown_layers(nodes).items():
        if path in layers and rule_for(nodes[path], rules) is None:
            kind = type(nodes[path]).__name__
            held = f"{parameter} is a parameter of a layer of class {kind}, which {api} does not know"
            cure = f"say how to adapt it with rules={{{kind}: function(layer) -> layer}}"
            raise ValueError(f"{api}: {held}; {cure}, or leave it out, as where=nnx.Not({kind}) does.")
