"""`with_precision`: set the dtype in which the layers of a module compute."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._core.arguments import describe
from .._models.split_model import Model, dotted
from ._layers import Rules, by_rule, check_layer_rules, selected, with_rule
from ._parameters import is_parameter
from ._places import (
    SEEKERS,
    WEIGHT_NORMS,
    apply_to_module,
    check_rules,
    enclosing,
    holder,
    places,
    replaced,
    rule_for,
    with_modules,
)


def with_precision(
    model: Model,
    dtype: Any,
    *,
    keep: Mapping[type, Any] = MappingProxyType({nnx.BatchNorm: jnp.float32}),
    where: Any = None,
    rules: Rules | None = None,
) -> Model:
    """Set the dtype in which the layers of a module compute.

    Like building every layer with `dtype=`, or MindSpore's `to_float`: inputs and parameters are converted in each
    call. The parameters themselves keep their dtype, so gradients and updates of float32 parameters are in float32. The
    loss is outside the module: use `logits.astype(jnp.float32)` there, since sums over classes and examples lose the
    most precision.

    Args:
      model: an NNX module, or an ensemble.
      dtype: a floating-point dtype, such as `jnp.bfloat16` or its name.
      keep: a dict from kinds of modules to the dtypes in which these, and all layers in them, compute instead. A
        subclass's entry overrides its base class's, and an inner module's entry overrides an outer module's.
        BatchNorm always keeps its running statistics in float32, but in half precision it would round its inputs before
        computing them, and the statistics in normalization. None leaves a module unchanged (but not the layers in it),
        for modules that cast their parameters themselves. Passing `keep` replaces the default.
      where: a filter, as for `freeze`, of the modules that change; None for all of them.
      rules: a dict from kinds of modules to functions, each from a copy of such a module, which it may change, to the
        module in its place. What is in such a module is left to the function. A subclass's entry overrides its base
        class's. In an ensemble, the arrays of these modules have all members along axis 0.

    Returns:
      A new module (or ensemble) with separate variables and shared arrays. Its inputs and outputs are as if the layers
      had been built with this dtype: an `nnx.RNN` of an `nnx.SimpleCell` needs `initial_carry` in that dtype.

    Raises:
      TypeError: `model` is not a module; a dtype is not floating-point; `where` is not a filter; `keep` or `rules` is
        not a dict with kinds of modules as keys; a rule returns no module.
      ValueError: a module with parameters has no attribute `dtype` that sets how it computes, or has complex
        parameters; a shared module would have to compute in two dtypes; float64 without `jax_enable_x64`; `where`
        selects no module that changes; the model has no module of a kind in `rules`.

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
        """Return a copy of a module whose layers compute in the dtype."""
        copy = replaced(module, lambda _, x: x)
        nodes = places(copy)
        functions = check_layer_rules("with_precision", rules, nodes)
        modules = {path for path, x in nodes.items() if isinstance(x, nnx.Pytree)}
        chosen = selected("with_precision", nodes, modules, functions, where)
        ruled = with_rule(nodes, chosen, functions)
        chosen -= ruled
        for path, x in nodes.items():
            if is_parameter(x):
                length, owner = holder(nodes, path)
                if path[:length] in chosen:
                    _check_computed(dotted(path), x, owner, kept)
        # Flax layers read `dtype` in each call. A shared module is one object, which can have only one dtype.
        first: dict[int, Any] = {}
        for path, node in nodes.items():
            if path not in chosen or not _takes_dtype(node) or _is_left(node, kept):
                continue
            wanted = _wanted([*enclosing(nodes, path), node], dtype, kept)
            if jnp.dtype(first.setdefault(id(node), wanted)) != jnp.dtype(wanted):
                asked = f"keep gives {jnp.dtype(first[id(node)])} and {jnp.dtype(wanted)}"
                cure = f"name {type(node).__name__} in keep too"
                raise ValueError(f"with_precision: `{dotted(path)}` is shared by layers, for which {asked}; {cure}.")
            node.dtype = wanted
        if where is not None and not first and not ruled:
            changes = "whose attribute `dtype` sets how it computes, or that has a rule"
            raise ValueError(f"with_precision: where selects no module {changes}; name a layer, such as 'layers.0'.")
        return with_modules("with_precision", copy, ruled, lambda _, x: by_rule("with_precision", functions, x))

    return apply_to_module("with_precision", model, change)


def _checked(dtype: Any, name: str) -> Any:
    """Return the dtype, converted from a name if it is a string; raise if it is not floating-point."""
    if dtype is None or not _is_floating(dtype):
        raise TypeError(f"with_precision: {name} must be a floating-point dtype, but got {describe(dtype)}.")
    found = jnp.dtype(dtype)
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise ValueError(f"with_precision: {name} is {found}, which needs jax_enable_x64; enable it.")
    return found if isinstance(dtype, str) else dtype


def _takes_dtype(module: Any) -> bool:
    """Return whether the attribute `dtype` of a module sets how it computes."""
    if not isinstance(module, nnx.Pytree) or isinstance(module, SEEKERS):
        return False  # a weight norm would permanently convert the parameters of its layer to that dtype
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
    """Return the dtype for the innermost of nested modules: from the innermost module with a rule, else `dtype`."""
    asked = [kept[kind] for module in modules if (kind := rule_for(module, kept)) is not None]
    return [dtype, *(x for x in asked if x is not None)][-1]


def _check_computed(name: str, parameter: Any, module: Any, kept: Mapping[type, Any]) -> None:
    """Raise if nothing sets the dtype in which a module computes with a parameter, as types would be promoted."""
    dtypes = [jnp.result_type(x) for x in jax.tree.leaves(parameter.get_raw_value())]
    if _is_left(module, kept) or not any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
        return
    # The parameters that a weight norm adds are used by its layer, whose `dtype` applies to them too.
    is_complex = any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)
    if isinstance(module, WEIGHT_NORMS) or (_takes_dtype(module) and not is_complex):
        return
    kind, shape = type(module).__name__, jnp.shape(jax.tree.leaves(parameter.get_raw_value())[0])
    held = f"`{name}` of shape {shape} is a parameter of a module of class {kind}"
    cure = f"leave it out of where, pass keep={{{kind}: None}} if it converts by itself, or a function in rules"
    if is_complex:
        raise ValueError(f"with_precision: {held} and is complex; {cure}.")
    raise ValueError(f"with_precision: {held}, which has no attribute `dtype` that sets how it computes; {cure}.")
