"""`batch_ensemble`, `lora`, `tabm`: few parameters of its own for a member, around kernels that all members share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._core.arguments import check_count, check_number, describe
from .._models.split_model import Model, dotted
from ._layers import Rules, by_rule, check_known, check_layer_rules, selected, unknown_layers, with_rule
from ._parameters import Frozen, frozen, thawed
from ._places import Path, check_module, places, rule_for, with_modules

_LAYERS = (nnx.Linear, nnx.Conv)


class Base(nnx.Param[Any]):
    """A parameter of a layer that has an adapter: members of an ensemble share it with `shared=Base`.

    Examples:
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble
      >>> from plurax.transforms.modules import Base, batch_ensemble
      >>> make = lambda rngs: batch_ensemble(nnx.Linear(100, 50, rngs=rngs), rngs=rngs)
      >>> Ensemble.create(make, 8, seed=0, shared=Base)  # 5,000 numbers shared, 200 of its own for each member
      Ensemble of 8 × ScaledLayer, 200 parameters each, 5,000 shared
    """


class Adapter(nnx.Param[Any]):
    """A parameter of an adapter: scales, and the bias of a layer that has them.

    Examples:
      >>> from flax import nnx
      >>> from plurax.transforms.modules import Adapter, batch_ensemble
      >>> model = batch_ensemble(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
      >>> [path[-1] for path, _ in nnx.to_flat_state(nnx.state(model, Adapter))]
      ['bias', 'inputs', 'outputs']
    """


class ScaledLayer(nnx.Module):
    """A layer between scales of its inputs and outputs: s ∘ layer(r ∘ x) + b, along the last axis."""

    def __init__(self, layer: Any, inputs: Any, outputs: Any, bias: Any) -> None:
        self.layer, self.bias = layer, bias
        self.inputs, self.outputs = (None if x is None else Adapter(x) for x in (inputs, outputs))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the outputs for inputs of shape (..., inputs)."""
        y = self.layer(x if self.inputs is None else x * self.inputs[...])
        y = y if self.outputs is None else y * self.outputs[...]
        return y if self.bias is None else y + self.bias[...]


class LowRankLayer(nnx.Module):
    """A layer plus a product of low rank: layer(x) + scale · B(A x), where A is a layer of the same kind."""

    def __init__(self, layer: Any, down: Any, up: Any, scale: float) -> None:
        self.layer, self.down, self.up, self.scale = layer, down, up, scale

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the outputs for inputs of shape (..., inputs)."""
        return self.layer(x) + self.scale * self.up(self.down(x))


def batch_ensemble(
    model: Model,
    *,
    rngs: nnx.Rngs,
    where: Any = None,
    rules: Rules | None = None,
    init: Callable[..., Any] | None = None,
) -> Model:
    """Give linear and convolutional layers scales of their inputs and outputs, and let their kernels be shared.

    A member of an ensemble then has the kernel W ∘ r sᵀ, of which r, s and the bias are its own.

    Args:
      model: an NNX module.
      rngs: draws the scales, by its stream `params`.
      where: a filter, as for `freeze`, of layers; None for all of them.
      rules: a dict from kinds of layers to functions, each from a copy of such a layer, which it may change, to the
        layer in its place. What is in such a layer is left to the function. A subclass's entry overrides its base
        class's.
      init: an initializer of the scales; None for random signs.

    Returns:
      A new module in which `nnx.Linear` and `nnx.Conv` layers are `ScaledLayer`s. Their kernels are of kind `Base`,
      scales and biases of kind `Adapter`. `Ensemble.create(..., shared=Base)` stores the kernels once. Norms and
      embeddings of Flax, and parameters of one dimension, stay as they are: each member has its own, unless they are
      shared too (`shared=(Base, nnx.Embed)`) or frozen (`freeze(model, nnx.Embed)`). Frozen parameters stay frozen.

    Raises:
      TypeError: `model` is not a module, `where` not a filter, or `rules` not such a dict; a layer is in a plain list
        or tuple; a rule returns no module.
      ValueError: the filter selects no layer, or one of another class that has a parameter of two or more dimensions
        itself and no rule, or one in an `nnx.WeightNorm`, `nnx.SpectralNorm` or `nnx.bridge.ToNNX`; the model has no
        layer of a kind in `rules`.

    Cost:
      Two products by elements around each layer.

    Source:
      Wen et al. 2020, "BatchEnsemble: An Alternative Approach to Efficient Ensemble and Lifelong Learning".

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from plurax.transforms.modules import batch_ensemble
      >>> model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(8, 3, rngs=nnx.Rngs(1)))
      >>> batch_ensemble(model, rngs=nnx.Rngs(2), where="layers.0")(jnp.ones((2, 4))).shape
      (2, 3)
    """

    def scaled(_: Path, layer: Any) -> ScaledLayer:
        draw = _signs if init is None else init
        inputs = draw(rngs.params(), (layer.in_features,), layer.param_dtype)
        outputs = draw(rngs.params(), (layer.out_features,), layer.param_dtype)
        return ScaledLayer(_as_base(layer), inputs, outputs, _taken_bias(layer))

    nodes, rules = _nodes_and_rules("batch_ensemble", model, rules)
    return _adapted("batch_ensemble", model, nodes, _chosen("batch_ensemble", nodes, rules, where), rules, scaled)


def tabm(
    model: Model,
    *,
    first: Any,
    head: Any,
    rngs: nnx.Rngs,
    mini: bool = False,
    where: Any = None,
    rules: Rules | None = None,
) -> Model:
    """Turn a network into a member of a TabM: an ensemble that shares all kernels but that of the head.

    Args:
      model: an NNX module, such as a multilayer perceptron.
      first: a filter, as for `freeze`, of the first layer, whose inputs get random signs.
      head: a filter of the last layer, which each member has for itself.
      rngs: draws the signs, by its stream `params`.
      mini: whether the scales of the first layer's inputs and the head are all that a member has; otherwise each linear
        layer but the head has scales of inputs and outputs, which are ones, and a bias of its own.
      where: a filter of the layers that members share; None for all but the head.
      rules: as for `batch_ensemble`, for layers other than the first and the head.

    Returns:
      A new module, whose shared parameters are of kind `Base`, for `Ensemble.create(..., shared=Base)`. What else there
      is stays as for `batch_ensemble`.

    Raises:
      TypeError: as for `batch_ensemble`.
      ValueError: as for `batch_ensemble`; `first` and `head` select the same layer; `first` selects one that `where`
        leaves out, that has a rule, or that is no `nnx.Linear` or `nnx.Conv`.

    Cost:
      As for `batch_ensemble`.

    Source:
      Gorishniy et al. 2025, "TabM: Advancing Tabular Deep Learning with Parameter-Efficient Ensembling".

    Examples:
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble
      >>> from plurax.transforms.modules import Base, tabm
      >>> def make(rngs):
      ...     mlp = nnx.Sequential(nnx.Linear(8, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 1, rngs=rngs))
      ...     return tabm(mlp, first="layers.0", head="layers.2", rngs=rngs, mini=True)
      >>> Ensemble.create(make, 32, seed=0, shared=Base)
      Ensemble of 32 × Sequential, 73 parameters each, 576 shared
    """
    nodes, rules = _nodes_and_rules("tabm", model, rules)
    firsts, heads = (_chosen("tabm", nodes, rules, x, name) for x, name in ((first, "first"), (head, "head")))
    if both := firsts & heads:
        raise ValueError(f"tabm: first and head select the same layer, {sorted(both, key=str)[0]}; name two.")

    def shared(path: Path, layer: Any) -> Any:
        inputs = None
        if path in firsts:
            inputs = _signs(rngs.params(), (layer.in_features,), layer.param_dtype)
        if mini:
            layer = _as_base(layer, bias=True)
            return layer if inputs is None else ScaledLayer(layer, inputs, None, None)
        ones = [jnp.ones((size,), layer.param_dtype) for size in (layer.in_features, layer.out_features)]
        return ScaledLayer(_as_base(layer), ones[0] if inputs is None else inputs, ones[1], _taken_bias(layer))

    chosen = _chosen("tabm", nodes, rules, where) - heads
    for path in firsts:
        if path not in chosen or not isinstance(nodes[path], _LAYERS) or rule_for(nodes[path], rules) is not None:
            wanted = "an nnx.Linear or nnx.Conv that where selects and that has no rule"
            raise ValueError(f"tabm: first must select {wanted}, but selects `{dotted(path)}`; name another layer.")
    return _adapted("tabm", model, nodes, chosen, rules, shared)


def lora(
    model: Model, rank: int, *, rngs: nnx.Rngs, where: Any = None, rules: Rules | None = None, scale: float = 1.0
) -> Model:
    """Add a product of low rank to linear and convolutional layers: W + scale · A B, where B starts as zeros.

    Args:
      model: an NNX module.
      rank: the rank.
      rngs: draws A, by its stream `params`.
      where: as for `batch_ensemble`.
      rules: as for `batch_ensemble`.
      scale: α / rank in the paper.

    Returns:
      A new module that computes the same as `model`. A and B are of kind `nnx.LoRAParam`, the layers' own parameters of
      kind `Base`; `freeze(model, Base)` excludes these from training. Norms and embeddings of Flax, and parameters of
      one dimension, stay as they are and train in full; `freeze(model, nnx.Not(nnx.LoRAParam))` excludes them too.
      Frozen parameters stay frozen.

    Raises:
      TypeError, ValueError: as for `batch_ensemble`; a rank that is not a positive int, or a scale that is no number.

    Cost:
      For each layer, rank · (inputs + outputs) parameters, and products with them.

    Source:
      Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models".

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from plurax.transforms.modules import lora
      >>> model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
      >>> bool((lora(model, 2, rngs=nnx.Rngs(1))(jnp.ones((1, 4))) == model(jnp.ones((1, 4)))).all())
      True
    """
    check_count("lora", "rank", rank)
    check_number("lora", "scale", scale, lambda _: True, "a number")

    def low_rank(path: Path, layer: Any) -> LowRankLayer:
        if isinstance(layer, nnx.Conv) and layer.feature_group_count != 1:
            raise ValueError(f"lora: {describe(path)} is a grouped convolution; leave it out of where.")
        options: dict[str, Any] = {"use_bias": False, "param_dtype": layer.param_dtype, "dtype": layer.dtype}
        draw = nnx.initializers.he_uniform()
        if isinstance(layer, nnx.Conv):
            places: dict[str, Any] = {name: getattr(layer, name) for name in _OF_CONV}
            down: Any = nnx.Conv(layer.in_features, rank, **places, **options, kernel_init=draw, rngs=rngs)
        else:
            down = nnx.Linear(layer.in_features, rank, **options, kernel_init=draw, rngs=rngs)
        up = nnx.Linear(rank, layer.out_features, **options, kernel_init=nnx.initializers.zeros, rngs=rngs)
        for part in (down, up):
            part.kernel = nnx.LoRAParam(part.kernel.get_raw_value())
        return LowRankLayer(_as_base(layer, bias=True), down, up, scale)

    nodes, rules = _nodes_and_rules("lora", model, rules)
    return _adapted("lora", model, nodes, _chosen("lora", nodes, rules, where), rules, low_rank)


_OF_CONV = ("kernel_size", "strides", "padding", "input_dilation", "kernel_dilation")


def _nodes_and_rules(api: str, model: Any, rules: Any) -> tuple[dict[Path, Any], Rules]:
    """Return the modules and variables of a model by path, and the checked rules."""
    check_module(api, model)
    nodes = places(model)
    return nodes, check_layer_rules(api, rules, nodes)


def _chosen(api: str, nodes: Mapping[Path, Any], rules: Rules, where: Any, name: str = "where") -> set[Path]:
    """Return all paths of the layers that a filter selects, of unknown classes too; raise if there are none."""
    layers = {path for path, x in nodes.items() if isinstance(x, _LAYERS)} | with_rule(nodes, nodes, rules)
    found = selected(api, nodes, layers | unknown_layers(nodes).keys(), rules, where, name)
    if not found:
        none = f"{name} selects no nnx.Linear or nnx.Conv of {type(nodes[()]).__name__}"
        raise ValueError(f"{api}: {none}; name a layer, such as 'layers.0', or a kind of layers.")
    return found


def _adapted(
    api: str,
    model: Any,
    nodes: Mapping[Path, Any],
    chosen: set[Path],
    rules: Rules,
    new: Callable[[Path, Any], Any],
) -> Any:
    """Return a copy of a model with the chosen layers replaced: by their rules, else by the results of `new`."""
    check_known(api, nodes, chosen, rules)

    def replacement(path: Path, layer: Any) -> Any:
        return new(path, layer) if rule_for(layer, rules) is None else by_rule(api, rules, layer)

    return with_modules(api, model, chosen, replacement)


def _as_base(layer: Any, *, bias: bool = False) -> Any:
    """Return a layer whose kernel, and possibly bias, are of kind `Base`."""
    for name in ("kernel", "bias") if bias else ("kernel",):
        parameter = getattr(layer, name)
        if parameter is not None:
            setattr(layer, name, _as_kind(Base, parameter))
    return layer


def _as_kind(kind: type[nnx.Param[Any]], parameter: Any) -> Any:
    """Return a parameter as one of another kind, which is frozen if it was."""
    was = thawed(parameter)
    new = kind.from_metadata(was.get_raw_value(), was.get_metadata())
    return frozen(new) if isinstance(parameter, Frozen) else new


def _taken_bias(layer: Any) -> Any:
    """Return a layer's bias, which the layer no longer has, as a parameter of an adapter."""
    if layer.bias is None:
        return None
    bias = _as_kind(Adapter, layer.bias)
    layer.bias, layer.use_bias = nnx.data(None), False
    return bias


def _signs(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.rademacher(key, shape, dtype)
