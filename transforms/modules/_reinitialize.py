"""`reinitialize`: draw parameters again, with an initializer for each kind of layer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .._core.arguments import describe
from .._core.prng import check_key
from .._models.split_model import Model, dotted
from ._parameters import is_parameter
from ._places import Path, check_module, check_rules, holder, named_leaves, places, rule_for, with_leaves

Initializer = Callable[..., Any]
_WEIGHTS = ("kernel", "embedding")
# Marks a class whose attribute `layer` is one block with a leading axis of layers in each array.
_STACK = "__plurax_layers__"


def reinitialize(model: Model, rules: Mapping[type, Initializer | Mapping[str, Initializer]], key: jax.Array) -> Model:
    """Draw parameters of a module again, with an initializer for each kind of layer.

    Fans are computed as in Flax; for `nnx.LinearGeneral` from the flattened kernel. If `nnx.vmap` has stacked layers of
    your own class, the stacking axis cannot be detected: use an initializer with `batch_axis=0`, or the fans include
    that axis.

    Args:
      model: an NNX module.
      rules: a dict from kinds of layers to initializers; a subclass's entry overrides its base class's. A single
        initializer, such as `nnx.initializers.he_normal()`, is for the layer's `kernel` or `embedding`; a dict is for
        parameters by name, such as `{"scale": nnx.initializers.ones, "bias": nnx.initializers.zeros}`. The layer is the
        module that directly holds the parameter: `nnx.LinearGeneral` in an `nnx.MultiHeadAttention`, `nnx.Linear` in
        the cell of an `nnx.RNN`.
      key: a random key. The values of a parameter depend only on the key and the parameter's path.

    Returns:
      A new module with separate variables. Parameters without a rule, frozen parameters and other state, such as
      BatchNorm statistics, are unchanged. A parameter with several paths is drawn for the first.

    Raises:
      TypeError: `model` is not a module, `rules` is not such a dict, or `key` is not a key; an initializer does not
        return an array (for example, `he_normal` without parentheses).
      ValueError: a rule matches no layer, or no parameter of that name; an initializer returns another shape or dtype;
        `nnx.vmap` has stacked layers along an axis that is not a leading one.

    Cost:
      One call of an initializer for each parameter; for stacked layers, one for each layer.

    Source:
      He et al. 2015, "Delving Deep into Rectifiers"; MindSpore's `cells_and_names` with `set_data`.

    Examples:
      >>> import jax
      >>> from flax import nnx
      >>> from plurax.transforms.modules import reinitialize
      >>> model = nnx.Sequential(nnx.Linear(64, 50, rngs=nnx.Rngs(0)), nnx.LayerNorm(50, rngs=nnx.Rngs(0)))
      >>> init = nnx.initializers
      >>> rules = {nnx.Linear: init.he_uniform(), nnx.LayerNorm: {"scale": init.ones, "bias": init.constant(0.5)}}
      >>> model = reinitialize(model, rules, jax.random.key(0))
      >>> print(f"{model.layers[0].kernel[...].std():.2f}", model.layers[1].bias[0])  # (2 / 64) ** 0.5 = 0.18
      0.18 0.5
    """
    check_module("reinitialize", model)
    wanted = _checked_rules(rules)
    check_key("reinitialize", key)
    named_leaves("reinitialize", model, is_parameter)  # raises if two have the same name
    nodes = places(model)
    drawn: dict[str, jax.Array] = {}
    met: set[tuple[type, str]] = set()
    # All layers and their parameters, for the error about rules that match nothing.
    names: dict[str, set[str]] = {}
    # Reversed, so that the first of several paths to a shared parameter is kept.
    first = {id(x): (path, x) for path, x in reversed(nodes.items()) if is_parameter(x)}
    for path, x in first.values():
        length, layer = holder(nodes, path)
        kind, name, trains = rule_for(layer, wanted), dotted(path[length:]), isinstance(x, nnx.Param)
        names.setdefault(type(layer).__name__, set()).add(f"`{name}`" if trains else f"`{name}` (frozen)")
        if kind is not None and trains and name in wanted[kind]:
            met.add((kind, name))
            at = [i for i in range(len(path)) if path[i] == "layer" and hasattr(type(nodes.get(path[:i])), _STACK)]
            value = x.get_raw_value()
            axes = _axes_of_layers(layer, name, value, len(at), dotted(path))
            drawn[dotted(path)] = _drawn(wanted[kind][name], value, axes, layer, path, name, key)
    for kind, rule in rules.items():
        lacking = [f"`{name}`" for name in wanted[kind] if (kind, name) not in met]
        # A single initializer is for two names, of which a layer has only one.
        if lacking and (isinstance(rule, Mapping) or len(lacking) == len(_WEIGHTS)):
            has = ", ".join(f"{layer} with {', '.join(sorted(held))}" for layer, held in sorted(names.items()))
            lacks = f"the rule for {kind.__name__} matches no {' or '.join(lacking)}"
            raise ValueError(f"reinitialize: {lacks}; give rules for what the module has: {has}.")
    return with_leaves(model, drawn)


def _checked_rules(rules: Any) -> dict[type, Mapping[str, Initializer]]:
    """Return for each kind its initializers by name; a single initializer is for `kernel` and `embedding`."""
    check_rules("reinitialize", "rules", rules, "initializers")
    wanted, found = "an initializer, or a dict from names of parameters to initializers", {}
    for kind, rule in rules.items():
        found[kind] = rule if isinstance(rule, Mapping) else dict.fromkeys(_WEIGHTS, rule)
        if not all(isinstance(name, str) and callable(initializer) for name, initializer in found[kind].items()):
            raise TypeError(f"reinitialize: the rule for {kind.__name__} must be {wanted}, but got {describe(rule)}.")
    return found


def _axes_of_layers(layer: Any, name: str, value: Any, stacks: int, path: str) -> int:
    """Return the number of leading axes of a parameter that index stacked layers, of stacks or of an `nnx.vmap`."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(
            f"reinitialize: `{path}` holds {describe(value)}, but only one array can be drawn; leave it out."
        )
    expected = _shape_of_weights(layer) if name in _WEIGHTS else None
    if expected is None or len(value.shape) <= len(expected) + stacks:
        return stacks
    axes = len(value.shape) - len(expected)
    if value.shape[axes:] != expected:
        one = f"but one {type(layer).__name__} has {expected}"
        raise ValueError(f"reinitialize: `{path}` has shape {value.shape}, {one}; put the axes of layers in front.")
    return axes


def _shape_of_weights(layer: Any) -> tuple[int, ...] | None:
    """Return the shape of the weights of one layer of Flax, or None; weights with more axes are stacked."""
    if isinstance(layer, nnx.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, nnx.Embed):
        return layer.num_embeddings, layer.features
    if isinstance(layer, nnx.LinearGeneral):
        return *layer.batch_axis.values(), *layer.in_features, *layer.out_features
    return tuple(layer.kernel_shape) if isinstance(layer, (nnx.Conv, nnx.ConvTranspose, nnx.Einsum)) else None


def _drawn(
    initializer: Initializer, value: Any, axes: int, layer: Any, path: Path, name: str, key: jax.Array
) -> jax.Array:
    """Return new values like `value`, whose first `axes` axes index layers."""
    shape = _shape_for(layer, name, value.shape[axes:])
    # From the path alone, so that a layer's draw stays the same if other layers are added or removed.
    words = np.frombuffer(hashlib.blake2b(dotted(path).encode(), digest_size=8).digest(), "<u4")
    for word in words:  # 64 bits, so that a million paths most likely have different keys
        key = jax.random.fold_in(key, word)
    keys = [jax.random.fold_in(key, i) for i in range(math.prod(value.shape[:axes]))] if axes else [key]
    # Not under `vmap`: an initializer may be any function, and could draw other values there.
    drawn = [_called(initializer, dotted(path), key, shape, value.dtype) for key in keys]
    return jnp.stack(drawn).reshape(value.shape) if drawn else value


def _called(initializer: Initializer, name: str, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return the values that an initializer draws; raise if it is not one, or if the shape or dtype is wrong."""
    who = f"reinitialize: the initializer of `{name}`"
    cure = "give an initializer, such as nnx.initializers.normal() (with the parentheses)"
    try:
        found = initializer(key, shape, dtype)
    except TypeError as error:
        raise TypeError(f"{who} cannot be called with a key, a shape and a dtype ({error}); {cure}.") from error
    if getattr(found, "shape", None) != shape or getattr(found, "dtype", None) != dtype:
        kind = ValueError if hasattr(found, "dtype") else TypeError
        raise kind(f"{who} returned {describe(found)}, but must return shape {shape} and dtype {dtype}; {cure}.")
    return found


def _shape_for(layer: Any, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that Flax passes to an initializer: `nnx.LinearGeneral` flattens the kernel to a matrix."""
    if not isinstance(layer, nnx.LinearGeneral) or name not in ("kernel", "bias"):
        return shape
    outputs = len(layer.out_features)
    return (math.prod(shape),) if name == "bias" else (math.prod(shape[:-outputs]), math.prod(shape[-outputs:]))
