"""`named_parameters`, `freeze` and `unfreeze`: list parameters by name, and choose which of them train."""

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

# The metadata of a frozen parameter that stores its original kind.
_KIND = "frozen_from"


class Frozen(nnx.Variable[Any]):
    """A parameter that `freeze` has excluded from training.

    It is not an `nnx.Param`, so code that selects `nnx.Param`s skips it. `nnx.state(model, Frozen)` selects all frozen
    parameters.

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
    """Return a frozen copy of a parameter, with its original kind in the metadata."""
    copy = copied(parameter)
    if isinstance(parameter, Frozen):
        return copy
    return Frozen.from_metadata(copy.get_raw_value(), {**copy.get_metadata(), _KIND: type(parameter)})


def thawed(x: Any) -> Any:
    """Return a frozen parameter as it was before freezing, and anything else unchanged."""
    if not isinstance(x, Frozen):
        return x
    copy = copied(x)
    metadata = copy.get_metadata()
    return metadata.pop(_KIND).from_metadata(copy.get_raw_value(), metadata)


def named_parameters(model: Any) -> dict[str, jax.Array]:
    """Return the parameters of a module by dotted name, like MindSpore's `parameters_dict`.

    Args:
      model: an NNX module, or an ensemble, whose arrays have all members along axis 0.

    Returns:
      A dict such as `{"net.kernel": array, "layers.0.bias": array}` with the array of each `nnx.Param`, frozen ones
      included. A parameter with several paths has the name of the first; one that holds a pytree has an entry for each
      array. BatchNorm statistics and random streams are not parameters.

    Raises:
      TypeError: `model` is not a module.
      ValueError: two arrays have the same name, because a key of an `nnx.Dict` contains a dot.

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
    """Exclude some parameters of a module from training.

    As MindSpore's `requires_grad=False`, but without computing their gradients: in the returned copy they are variables
    of kind `Frozen` instead of `nnx.Param`, so they are neither differentiated nor updated, by `nnx.grad`, optimizers
    with `wrt=nnx.Param`, or this library's transforms and trainers. Gradients flow through them to other parameters.

    The alternative is `jax.lax.stop_gradient` inside the model. It blocks the gradient of a value: everything before it
    gets a gradient of zero. But the parameters there remain parameters, so weight decay and momentum still change them,
    and optimizers keep state for them. Use it for a value that is constant in one place while its parameters train in
    another: a target, a baseline, a straight-through estimate. Freeze parameters that must not change at all, such as
    those of a pretrained encoder, or of a head after the layers that train.

    Args:
      model: an NNX module, or an ensemble.
      filter: selects parameters. A string is a dotted name or its beginning, `"encoder"` or `"layers.0.kernel"` (or a
        tag, as in Flax). A type is a kind of variable (`nnx.LoRAParam`), or a kind of module, for everything in it
        (`nnx.BatchNorm`). A function takes a path, such as `("layers", 0, "kernel")`, and the variable, and returns a
        bool. A list or tuple selects the union of its filters; `nnx.Not`, `nnx.All`, `nnx.Any`, `nnx.PathContains`,
        True and `...` are as in Flax. A parameter with several paths is selected if any of its paths is.

    Returns:
      A new module (or ensemble) with separate variables and shared arrays. Frozen parameters stay frozen. BatchNorm
      statistics are not parameters: unless a norm is in evaluation mode, they are still updated.

    Raises:
      TypeError: `model` is not a module, or `filter` is not a filter.
      ValueError: the filter selects no parameter; it selects a parameter whose kind defines methods, or one that must
        be an `nnx.Param` for an enclosing `nnx.WeightNorm`, `nnx.SpectralNorm` or `nnx.bridge.ToNNX`.

    Cost:
      No arrays are copied. For 8 equal dense layers, the gradient of all needs 193 MFLOP, of the last 2 alone 92 MFLOP.

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
        """Return a copy of a module with the selected parameters frozen."""
        nodes = places(module)
        parameters = {path: x for path, x in nodes.items() if is_parameter(x)}
        # Functions among the filters receive a frozen parameter as it was before freezing.
        chosen = {path for path, x in parameters.items() if matches(path, enclosing(nodes, path), thawed(x))}
        if not chosen:
            has = f"{type(module).__name__}, which has {len(parameters)}: {list(map(dotted, parameters))[:5]}"
            raise ValueError(f"freeze: the filter {short(filter)} selects no parameter of the {has}.")
        for path in chosen:
            _check_freezable(dotted(path), nodes[path], enclosing(nodes, path))
        # By identity: a shared parameter is frozen at all of its paths.
        of_chosen = {id(nodes[path]) for path in chosen}
        return replaced(module, lambda _, x: frozen(x) if id(x) in of_chosen else x)

    return apply_to_module("freeze", model, change)


def unfreeze(model: Model) -> Model:
    """Let every parameter of a module train again.

    Args:
      model: an NNX module, or an ensemble. A model without frozen parameters is copied.

    Returns:
      A new module (or ensemble) in which each frozen parameter has its original class and metadata; arrays are shared.
      To unfreeze only some parameters, freeze the others again.

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


def matching(api: str, filter: Any, name: str = "filter") -> _Matches:
    """Return a predicate for the variables that a filter, an argument of this name, selects; errors as `freeze`.

    Flax interprets a string as a tag and a type as a kind of variable. Inside `nnx.Not` and others it has converted
    them to such filters, so these are converted back here.
    """
    if isinstance(filter, (str, nnx.WithTag)):
        tag = filter if isinstance(filter, str) else filter.tag
        # With a dot after both, "layers.1" selects "layers.1.kernel", but not "layers.10.kernel".
        return lambda path, _, x: f"{dotted(path)}.".startswith(f"{tag}.") or getattr(x, "tag", None) == tag
    if isinstance(filter, (type, nnx.OfType)):
        kind = filter if isinstance(filter, type) else filter.type
        return lambda _, modules, x: any(isinstance(node, kind) for node in (*modules, x))
    if isinstance(filter, nnx.Not):
        inner = matching(api, filter.predicate, name)
        return lambda *found: not inner(*found)
    if isinstance(filter, (list, tuple, nnx.Any, nnx.All)):
        parts = [matching(api, x, name) for x in (filter if isinstance(filter, (list, tuple)) else filter.predicates)]
        combine = all if isinstance(filter, nnx.All) else any
        return lambda *found: combine(part(*found) for part in parts)
    if isinstance(filter, (bool, EllipsisType)):
        return lambda *_: bool(filter)
    if callable(filter):
        return lambda path, _, x: bool(filter(path, x))
    wanted = "a dotted name, a kind of variable or module, a function of a path and a variable, or a filter of Flax"
    raise TypeError(f"{api}: {name} must be {wanted}, but got {describe(filter)}.")


def _check_freezable(name: str, parameter: Any, modules: list[Any]) -> None:
    """Raise if an enclosing module needs this parameter as an `nnx.Param`, or if methods of its kind would be lost."""
    cure = "leave it out of the filter, or cut its gradient with jax.lax.stop_gradient"
    for module in modules:
        if isinstance(module, SEEKERS):
            seeker = type(module).__name__
            raise ValueError(f"freeze: `{name}` must be an nnx.Param for the {seeker} around it; {cure}.")
    kind = type(thawed(parameter))
    for base in kind.__mro__[: kind.__mro__.index(nnx.Param)]:
        for attribute, value in vars(base).items():
            if inspect.isroutine(value) or isinstance(value, property):
                raise ValueError(f"freeze: `{name}` would lose the {attribute} of its {kind.__name__}; {cure}.")
