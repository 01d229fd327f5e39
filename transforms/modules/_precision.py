"""`with_precision`: the dtype in which the layers of a module compute."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._core.arguments import describe
from .._models.split_model import Model, dotted
from ._parameters import is_parameter
from ._places import SEEKERS, WEIGHT_NORMS, apply_to_module, check_rules, enclosing, holder, places, replaced, rule_for


def with_precision(
    model: Model, dtype: Any, *, keep: Mapping[type, Any] = MappingProxyType({nnx.BatchNorm: jnp.float32})
) -> Model:
    """Let the layers of a module compute in another dtype.

    As building every layer with `dtype=`, or MindSpore's `to_float`: inputs and parameters are converted in each call.
    The parameters themselves keep their dtype, so that an optimiser still adds small steps to float32, and gradients
    are float32. Losses are outside the module; take `logits.astype(jnp.float32)` there, since sums over classes and
    examples lose most precision.

    Args:
      model: an NNX module, or an ensemble of them.
      dtype: of floating point, such as `jnp.bfloat16` or its name.
      keep: kinds of modules that compute in another dtype, with all layers in them. Of several kinds that a module is,
        the nearest counts, and of several modules around a layer the innermost. A BatchNorm keeps its running
        statistics in float32 in any case, but one in half precision rounds its inputs before it computes them, and the
        statistics when it normalizes. None leaves a module as it is (but not the layers in it): for one that holds
        parameters and casts them on its own. Giving `keep` replaces the default.

    Returns:
      A new module (or ensemble) with variables of its own, the arrays shared. Its inputs and outputs are as if it had
      been built so: an `nnx.RNN` of an `nnx.SimpleCell` needs `initial_carry` in that dtype.

    Raises:
      TypeError: `model` is not a module, a dtype is not of floating point, or `keep` is not a dict by kinds of modules.
      ValueError: a module holds parameters, but has no attribute `dtype` that sets how it computes with them, or
        complex ones; a shared module would have to compute in two dtypes; float64 without `jax_enable_x64`.

    Source:
      Micikevicius et al. 2018, "Mixed Precision Training"; `mindspore.nn.Cell.to_float`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from plurax.transforms.modules import with_precision
      >>> model = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
      >>> mixed = with_precision(model, jnp.bfloat16)
      >>> mixed.layers[0](jnp.ones((2, 4))).dtype, mixed(jnp.ones((2, 4))).dtype, mixed.layers[0].kernel.dtype
      (dtype(bfloat16), dtype('float32'), dtype('float32'))
    """
    dtype = _checked(dtype, "dtype")
    check_rules("with_precision", "keep", keep, "dtypes")
    kept = {kind: None if value is None else _checked(value, f"keep[{kind.__name__}]") for kind, value in keep.items()}

    def change(module: Any) -> Any:
        """Return a copy of a module whose parameters and layers have the dtype."""
        copy = replaced(module, lambda _, x: x)
        nodes = places(copy)
        for path, x in nodes.items():
            if is_parameter(x):
                _check_computed(dotted(path), x, holder(nodes, path)[1], kept)
        # Flax's layers read `dtype` in each call. A shared module is one object, which can have only one.
        first: dict[int, Any] = {}
        for path, node in nodes.items():
            if not _takes_dtype(node) or _is_left(node, kept):
                continue
            wanted = _wanted([*enclosing(nodes, path), node], dtype, kept)
            if jnp.dtype(first.setdefault(id(node), wanted)) != jnp.dtype(wanted):
                asked = f"keep asks for {jnp.dtype(first[id(node)])} and for {jnp.dtype(wanted)}"
                cure = f"name {type(node).__name__} in keep too"
                raise ValueError(f"with_precision: `{dotted(path)}` is shared by layers, for which {asked}; {cure}.")
            node.dtype = wanted
        return copy

    return apply_to_module("with_precision", model, change)


def _checked(dtype: Any, name: str) -> Any:
    """Return a dtype as it was given, or the one of this name; raise if it is not of floating point."""
    if dtype is None or not _is_floating(dtype):
        raise TypeError(f"with_precision: {name} must be a floating-point dtype, but got {describe(dtype)}.")
    found = jnp.dtype(dtype)
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise ValueError(f"with_precision: {name} is {found}, which needs jax_enable_x64; enable it.")
    return found if isinstance(dtype, str) else dtype


def _takes_dtype(module: Any) -> bool:
    """Return whether the attribute `dtype` of a module sets how it computes."""
    if not isinstance(module, nnx.Pytree) or isinstance(module, SEEKERS):
        return False  # a norm of weights would convert the parameters of its layer to that dtype permanently
    dtype = getattr(module, "dtype", "")
    return (dtype is None or _is_floating(dtype)) and not isinstance(getattr(type(module), "dtype", None), property)


def _is_floating(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        return False


def _is_left(module: Any, kept: Mapping[type, Any]) -> bool:
    kind = rule_for(module, kept)
    return kind is not None and kept[kind] is None


def _wanted(modules: list[Any], dtype: Any, kept: Mapping[type, Any]) -> Any:
    """Return the dtype for the innermost of some modules: of the last one with a rule, else `dtype`."""
    asked = [kept[kind] for module in modules if (kind := rule_for(module, kept)) is not None]
    return [dtype, *(x for x in asked if x is not None)][-1]


def _check_computed(name: str, parameter: Any, module: Any, kept: Mapping[type, Any]) -> None:
    """Raise if nothing sets the dtype in which a module computes with a parameter, which would then be promoted."""
    dtypes = [jnp.result_type(x) for x in jax.tree.leaves(parameter.get_raw_value())]
    if _is_left(module, kept) or not any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
        return
    # The parameters that a norm of weights adds are used by its layer, whose `dtype` holds for them too.
    is_complex = any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)
    if isinstance(module, WEIGHT_NORMS) or (_takes_dtype(module) and not is_complex):
        return
    kind = type(module).__name__
    cure = f"add one, or pass keep={{{kind}: None}} if the {kind} converts by itself"
    raise ValueError(f"with_precision: `{name}` is complex, or its {kind} has no attribute `dtype`; {cure}.")
