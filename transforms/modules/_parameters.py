"""Parameters: by their names, and which of them train: `named_parameters`, `freeze` and `unfreeze`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import jax
from flax import nnx

from .._core.arguments import describe, short
from .._models.split_model import Model, dotted, is_members
from ._places import SEEKERS, Path, apply_to_module, check_module, copied, enclosing, named_leaves, places, replaced

# The metadata of a frozen parameter that has its kind from before.
_KIND = "frozen_from"


class Frozen(nnx.Variable[Any]):
    """A parameter that `freeze` has taken out of training.

    It is not an `nnx.Param`, so that nothing that asks for these finds it. `nnx.state(model, Frozen)` selects all.

    Examples:
      >>> from flax import nnx
      >>> from plurax.transforms.modules import Frozen, freeze
      >>> model = freeze(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "kernel")
      >>> isinstance(model.kernel, Frozen), isinstance(model.kernel, nnx.Param)
      (True, False)
    """


def is_parameter(x: Any) -> bool:
    """Return whether a variable is a parameter, frozen or not."""
    return isinstance(x, (nnx.Param, Frozen))


def frozen(parameter: Any) -> Any:
    """Return a frozen copy of a parameter, with its kind in the metadata."""
    copy = copied(parameter)
    if isinstance(parameter, Frozen):
        return copy
    return Frozen.from_metadata(copy.get_raw_value(), {**copy.get_metadata(), _KIND: type(parameter)})


def thawed(x: Any) -> Any:
    """Return a frozen parameter as it was before; anything else as it is."""
    if not isinstance(x, Frozen):
        return x
    copy = copied(x)
    metadata = copy.get_metadata()
    return metadata.pop(_KIND).from_metadata(copy.get_raw_value(), metadata)


def named_parameters(model: Any) -> dict[str, jax.Array]:
    """Return the parameters of a module by their dotted names, as MindSpore's `parameters_dict`.

    Args:
      model: an NNX module. Of an ensemble the arrays of all members are stacked along axis 0.

    Returns:
      For each `nnx.Param` its array, frozen ones included: `{"net.kernel": array, "layers.0.bias": array}`. A parameter
      with several paths is called by the first; one that holds a pytree has an entry for each array.
      BatchNorm statistics and random streams are not parameters.

    Raises:
      TypeError: `model` is not a module.
      ValueError: two arrays have one name, since a key of an `nnx.Dict` has a dot in it.

    Source:
      `mindspore.nn.Cell.parameters_dict`; `torch.nn.Module.named_parameters`.

    Examples:
      >>> from flax import nnx
      >>> from plurax.transforms.modules import named_parameters
      >>> model = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.relu, nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
      >>> {name: array.shape for name, array in named_parameters(model).items()}
      {'layers.0.bias': (3,), 'layers.0.kernel': (4, 3), 'layers.2.bias': (3,), 'layers.2.scale': (3,)}
      >>> sum(array.size for array in named_parameters(model).values())
      21
    """
    module = model.__plurax_member__() if is_members(model) else model
    check_module("named_parameters", module)
    return named_leaves("named_parameters", module, is_parameter)


def freeze(model: Model, filter: Any) -> Model:
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
    matches = _matching(filter)

    def change(module: Any) -> Any:
        """Return a copy of a module with the chosen parameters frozen."""
        nodes = places(module)
        parameters = {path: x for path, x in nodes.items() if is_parameter(x)}
        # A function among the filters sees a frozen parameter as it was before.
        chosen = {path for path, x in parameters.items() if matches(path, enclosing(nodes, path), thawed(x))}
        if not chosen:
            has = f"{type(module).__name__}, which has {len(parameters)}: {list(map(dotted, parameters))[:5]}"
            raise ValueError(f"freeze: the filter {short(filter)} takes no parameter of the {has}.")
        for path in chosen:
            _check_freezable(dotted(path), nodes[path], enclosing(nodes, path))
        # By identity: a shared parameter is frozen at all of its paths.
        of_chosen = {id(nodes[path]) for path in chosen}
        return replaced(module, lambda _, x: frozen(x) if id(x) in of_chosen else x)

    return apply_to_module("freeze", model, change)


def unfreeze(model: Model) -> Model:
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


# A function of a path, the modules around it, and the variable there.
_Matches = Callable[[Path, list[Any], Any], bool]


def _matching(filter: Any) -> _Matches:
    """Return a predicate for the variables that a filter takes.

    Flax reads a string as a tag, and a type as a kind of variable. It converts them to objects of its own inside
    `nnx.Not` and others, so these are unpacked here.
    """
    if isinstance(filter, (str, nnx.WithTag)):
        name = filter if isinstance(filter, str) else filter.tag
        # With a dot after both, "layers.1" takes "layers.1.kernel", but not "layers.10.kernel".
        return lambda path, _, x: f"{dotted(path)}.".startswith(f"{name}.") or getattr(x, "tag", None) == name
    if isinstance(filter, (type, nnx.OfType)):
        kind = filter if isinstance(filter, type) else filter.type
        return lambda _, modules, x: any(isinstance(node, kind) for node in (*modules, x))
    if isinstance(filter, nnx.Not):
        inner = _matching(filter.predicate)
        return lambda *found: not inner(*found)
    if isinstance(filter, (list, tuple, nnx.Any, nnx.All)):
        parts = [_matching(x) for x in (filter if isinstance(filter, (list, tuple)) else filter.predicates)]
        combine = all if isinstance(filter, nnx.All) else any
        return lambda *found: combine(part(*found) for part in parts)
    if isinstance(filter, (bool, EllipsisType)):
        return lambda *_: bool(filter)
    if callable(filter):
        return lambda path, _, x: bool(filter(path, x))
    wanted = "a dotted name, a kind of variable or module, a function of a path and a variable, or a filter of Flax"
    raise TypeError(f"freeze: filter must be {wanted}, but got {describe(filter)}.")


def _check_freezable(name: str, parameter: Any, modules: list[Any]) -> None:
    """Raise if something asks for this parameter as an `nnx.Param`, or if its kind has methods that would be lost."""
    cure = "leave it out of the filter, or cut its gradient with jax.lax.stop_gradient"
    for module in modules:
        if isinstance(module, SEEKERS):
            seeker = type(module).__name__
            raise ValueError(f"freeze: `{name}` must be an nnx.Param for the {seeker} that looks for it; {cure}.")
    kind = type(thawed(parameter))
    for base in kind.__mro__[: kind.__mro__.index(nnx.Param)]:
        for attribute, value in vars(base).items():
            if inspect.isroutine(value) or isinstance(value, property):
                raise ValueError(f"freeze: `{name}` would lose the {attribute} that a {kind.__name__} has; {cure}.")
