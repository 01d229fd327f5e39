"""`freeze` and `unfreeze`: parameters that do not train."""

from __future__ import annotations

import inspect
from typing import Any

from flax import nnx

from .._core.arguments import short
from .._models.split_model import dotted
from ._filters import matching
from ._kinds import SEEKERS
from ._parameters import frozen, is_parameter, thawed
from ._places import apply_to_module, enclosing, places, replaced


def freeze(model: Any, filter: Any) -> Any:
    """Take some parameters of a module out of training.

    As MindSpore's `requires_grad=False`, but no work is done for them: in the returned copy they are variables of kind
    `Frozen` and no longer `nnx.Param`, so that nothing differentiates or updates them: neither `nnx.grad`, optimisers
    with `wrt=nnx.Param`, nor the transforms and trainers of this library. Gradients flow through them to what trains.

    `jax.lax.stop_gradient`, written into the model, is the alternative. It cuts a value: everything computed before it
    gets a gradient of zero. But the parameters there remain parameters, so weight decay and momentum still change them,
    and optimisers keep state for them. Use it where a value is constant in one place while its parameters train in
    another: a target, a baseline, a straight-through estimate. Freeze parameters that must not change at all, wherever
    they are: those of a pretrained encoder, or of a head after the layers that train.

    Args:
      model: an NNX module, or an ensemble of them.
      filter: which parameters. A string is a dotted name or the beginning of one, `"encoder"` or `"layers.0.kernel"`
        (or a tag, as in Flax). A type is a kind of variable (`nnx.LoRAParam`), or a kind of module for all that it
        contains (`nnx.BatchNorm`). A function takes a path, such as `("layers", 0, "kernel")`, and the variable, and
        returns a bool. A list or tuple takes what one of its filters takes; `nnx.Not`, `nnx.All`, `nnx.Any`,
        `nnx.PathContains`, True and `...` are as in Flax. A parameter with several paths is taken if one of them is.

    Returns:
      A new module (or ensemble) with variables of its own, the arrays shared. What was frozen before stays frozen.
      BatchNorm statistics are not parameters: unless a norm is in evaluation mode, they are still updated.

    Raises:
      TypeError: `model` is not a module, or `filter` is not a filter.
      ValueError: the filter takes no parameter; it takes one whose kind has methods of its own, or one that an
        `nnx.WeightNorm`, `nnx.SpectralNorm` or `nnx.bridge.ToNNX` around it looks for as an `nnx.Param`.

    Cost:
      No arrays are copied. A gradient of the last 2 of 8 equal dense layers needs 92 MFLOP where one of all needs 193.

    Source:
      `mindspore.Parameter.requires_grad`; `flax.nnx` filters.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from plurax.transforms import grad
      >>> from plurax.transforms.modules import freeze
      >>> model = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 2, rngs=nnx.Rngs(1)))
      >>> tuned = freeze(model, nnx.Any("layers.0", lambda path, x: path[-1] == "bias"))
      >>> gradient = grad(lambda model, x: model(x).sum())(tuned, jnp.ones((5, 4)))
      >>> [path for path, _ in nnx.to_flat_state(gradient)]
      [('layers', 1, 'kernel')]
    """
    matches = matching("freeze", filter)

    def change(module: Any) -> Any:
        nodes = places(module)
        parameters = {path: x for path, x in nodes.items() if is_parameter(x)}
        # A function among the filters sees a frozen parameter as it was before.
        chosen = {path for path, x in parameters.items() if matches(path, enclosing(nodes, path), thawed(x))}
        if not chosen:
            names = ", ".join(f"`{dotted(path)}`" for path in list(parameters)[:5])
            has = f"its {len(parameters)} parameters begin with {names}" if parameters else "it has none"
            raise ValueError(
                f"freeze: the filter {short(filter)} takes no parameter of the {type(module).__name__}; {has}."
            )
        for path in chosen:
            _check_freezable(dotted(path), nodes[path], enclosing(nodes, path))
        # By identity: a shared parameter is frozen at all of its paths.
        of_chosen = {id(nodes[path]) for path in chosen}
        return replaced(module, lambda _, x: frozen(x) if id(x) in of_chosen else x)

    return apply_to_module("freeze", model, change)


def unfreeze(model: Any) -> Any:
    """Let every parameter of a module train again.

    Args:
      model: an NNX module, or an ensemble of them. One in which nothing is frozen is copied.

    Returns:
      A new module (or ensemble) in which each frozen parameter has its original class and metadata, the
      arrays shared. To let only some of them train, freeze the others again.

    Raises:
      TypeError: `model` is not a module.

    Examples:
      >>> from flax import nnx
      >>> from plurax.transforms.modules import freeze, unfreeze
      >>> model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
      >>> nnx.graphdef(unfreeze(freeze(model, True))) == nnx.graphdef(model)
      True
    """
    return apply_to_module("unfreeze", model, lambda module: replaced(module, lambda _, x: thawed(x)))


def _check_freezable(name: str, parameter: Any, modules: list[Any]) -> None:
    """Raise if something asks for this parameter as an `nnx.Param`, or if its kind has methods that would be lost."""
    for module in modules:
        if isinstance(module, SEEKERS):
            raise ValueError(
                f"freeze: `{name}` is looked for in each call by a {type(module).__name__}, which finds only an "
                "nnx.Param; leave it out of the filter, or cut its gradient with jax.lax.stop_gradient."
            )
    kind = type(thawed(parameter))
    for base in kind.__mro__[: kind.__mro__.index(nnx.Param)]:
        for attribute, value in vars(base).items():
            if inspect.isroutine(value) or isinstance(value, property):
                raise ValueError(
                    f"freeze: `{name}` is a {kind.__name__}, which has a {attribute} of its own that would be lost if "
                    "it were frozen; leave it out of the filter, or cut its gradient with jax.lax.stop_gradient."
                )
