"""`named_parameters`: parameters by their names, and the kind of frozen ones."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from .._models.split_model import is_members
from ._places import check_module, copied, named_leaves

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
