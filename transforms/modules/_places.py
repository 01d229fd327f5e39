"""List variables and modules of a model by path and kind, and copy a model with some variables replaced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .._core.arguments import describe
from .._core.compat import Tracer
from .._models.split_model import dotted, is_members, is_module, refuse_models_within

Path = tuple[Any, ...]

# In each call these select the `nnx.Param`s within them, to normalize them in place or to pass them to Linen.
WEIGHT_NORMS = (nnx.WeightNorm, nnx.SpectralNorm)
SEEKERS = (*WEIGHT_NORMS, nnx.bridge.ToNNX)
_CONTAINERS = (nnx.List, nnx.Dict)


def apply_to_module(api: str, model: Any, change: Callable[[Any], Any]) -> Any:
    """Return `change(model)`; for an ensemble, apply `change` to all members at once."""
    if is_members(model):
        return model.__plurax_stack__(apply_to_module(api, model.__plurax_member__(), change))
    check_module(api, model)
    return change(model)


def check_module(api: str, model: Any) -> None:
    """Raise if a model is not one NNX module, holds an ensemble, or has variables of an experimental kind of Flax."""
    if is_members(model):
        raise TypeError(f"{api}: model must be one module, but got an ensemble; use Ensemble.create, save or load.")
    if not is_module(model):
        cure = "put modules into an nnx.Dict, or a Linen module into an nnx.bridge.ToNNX"
        raise TypeError(f"{api}: model must be a Flax NNX module, but got {describe(model)}; {cure}.")
    refuse_models_within(model)
    for path, x in nnx.to_flat_state(nnx.state(model)):
        if isinstance(x, nnx.Variable) and (x.hijax or x.ref):
            cure = "convert it with nnx.with_vars(model, hijax=False, ref=False)"
            raise TypeError(f"{api}: `{dotted(path)}` is a variable of an experimental kind of Flax; {cure}.")


def named_leaves(api: str, model: Any, wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the arrays of the wanted variables of a module by dotted name; shared variables have their first name."""
    found: dict[str, Any] = {}
    for path, x in nnx.to_flat_state(nnx.state(model)):
        for name, leaf in _leaves(path, x) if wanted(x) else ():
            if name in found:
                raise ValueError(f"{api}: two arrays of the model are called `{name}`; leave dots out of the keys.")
            found[name] = leaf
    return found


def with_leaves(model: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a module with some values replaced, on the devices of the present values."""

    def new(path: Path, x: Any) -> Any:
        """Return the entry of a module at a path, with the new values in it."""
        leaves = _leaves(path, x)
        if not any(name in values for name, _ in leaves):
            return x
        held = [_placed(values[name], leaf) if name in values else leaf for name, leaf in leaves]
        value = jax.tree.unflatten(jax.tree.structure(_content(x)), held)
        return x.copy(value) if isinstance(x, nnx.Variable) else value

    return replaced(model, new)


def replaced(model: Any, new: Callable[[Path, Any], Any]) -> Any:
    """Return a copy of a module with each variable replaced by the result of `new`; shared variables stay shared."""

    # `nnx.map` calls this once for a shared variable, with its first path.
    def replace(path: Path, x: Any) -> Any:
        found = new(path, x)
        return copied(found) if found is x else found

    return nnx.map(replace, model)


def with_modules(api: str, model: Any, chosen: Collection[Path], new: Callable[[Path, Any], Any]) -> Any:
    """Return a copy of a module with some modules in it replaced; a module with several paths is replaced once.

    Args:
      api: the name for errors.
      model: the module.
      chosen: the paths of the modules.
      new: returns the replacement for a path and the module there, which it may change.
    """
    model = replaced(model, lambda _, x: x)
    made: dict[int, Any] = {}
    nodes = places(model)
    for path in sorted(chosen, key=lambda path: [str(key) for key in path]):
        module = nodes[path]
        if id(module) not in made:
            made[id(module)] = new(path, module)
        if not path:
            return made[id(module)]
        holds, key = nodes.get(path[:-1]), path[-1]
        if holds is None:
            cure = "put the modules into an nnx.List or an nnx.Dict"
            raise TypeError(f"{api}: `{dotted(path)}` is in a plain container and cannot be replaced; {cure}.")
        if isinstance(holds, nnx.List):
            holds[key] = made[id(module)]
        else:
            setattr(holds, key, made[id(module)])
    return model


def copied(x: Any) -> Any:
    """Return a copy of a variable or array that shares nothing mutable with the original."""
    # JAX arrays are immutable, so they are shared; NumPy arrays are copied.
    value = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, _content(x))
    return x.copy(value) if isinstance(x, nnx.Variable) else value


def places(model: Any) -> dict[Path, Any]:
    """Return a dict from paths to modules and variables, with all paths of each object, its first path first."""
    groups = [_outer(paths) for paths in nnx.find_duplicates(model, only=lambda _, x: _is_node(x))]
    return {path: x for first, x in nnx.iter_graph(model) if _is_node(x) for path in _aliases(first, groups)}


def enclosing(nodes: Mapping[Path, Any], path: Path) -> list[Any]:
    """Return the modules around the node at a path, outermost first."""
    return [nodes[path[:i]] for i in range(len(path)) if path[:i] in nodes]


def check_rules(api: str, name: str, rules: Any, value: str) -> None:
    """Raise if `rules` is not a dict whose keys are kinds of modules."""
    if not isinstance(rules, Mapping):
        raise TypeError(f"{api}: {name} must be a dict from kinds of modules to {value}, but got {describe(rules)}.")
    for kind in rules:
        if not isinstance(kind, type) or issubclass(kind, nnx.Variable):
            raise TypeError(f"{api}: {name} must name kinds of modules, such as nnx.Conv, but got {describe(kind)}.")


def rule_for(module: Any, rules: Mapping[type, Any]) -> type | None:
    """Return the first kind in the module's method resolution order that has a rule; None if there is none."""
    return next((kind for kind in type(module).__mro__ if kind in rules), None)


def holder(nodes: Mapping[Path, Any], path: Path) -> tuple[int, Any]:
    """Return the module that holds the variable at a path, possibly in a list or dict, after the length of its path."""
    around = [(i, nodes[path[:i]]) for i in range(len(path)) if path[:i] in nodes]
    return next((found for found in reversed(around) if not isinstance(found[1], _CONTAINERS)), around[0])


def _is_node(x: Any) -> bool:
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def _outer(paths: list[Path]) -> list[Path]:
    """Return the paths without those that extend another, such as through a child's reference to its parent."""
    return [path for path in paths if not any(path != other == path[: len(other)] for other in paths)]


def _aliases(first: Path, groups: list[list[Path]]) -> list[Path]:
    """Return all paths of the object at `first`; all paths in a group lead to one object."""
    found = [first]
    for path in found:  # `found` grows: a shared module in a shared module has all combinations of both paths
        for group in groups:
            for rest in [path[len(part) :] for part in group if path[: len(part)] == part]:
                found += [(*other, *rest) for other in group if (*other, *rest) not in found]
    return found


def _content(x: Any) -> Any:
    return x.get_raw_value() if isinstance(x, nnx.Variable) else x


def _leaves(path: Path, x: Any) -> list[tuple[str, Any]]:
    return [(dotted((*path, *inner)), leaf) for inner, leaf in jax.tree.leaves_with_path(_content(x))]


def _placed(value: Any, like: Any) -> jax.Array:
    # An uncommitted array stays uncommitted: JAX may move it to the devices of other operands.
    if isinstance(like, jax.Array) and not isinstance(like, Tracer) and like.committed:
        return jax.device_put(value, like.sharding)
    return value if isinstance(value, jax.Array) else jnp.array(value)
