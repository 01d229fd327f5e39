"""The modes of NNX modules: other values of static attributes, such as those for evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ...transforms._models.equinox import is_equinox
from ...transforms._models.split_model import is_module


def viewed(model: Any, attributes: Mapping[str, Any]) -> Any:
    """Return a module with other values of static attributes; arguments and errors as `Ensemble.view`."""
    from flax import nnx

    if not is_module(model):
        remedy = "pass options of their apply function, as ens(x, train=False)"
        if any(map(is_equinox, jax.tree.leaves(model.variables, is_leaf=is_equinox))):
            remedy = "use eqx.nn.inference_mode of each model, before Ensemble.from_apply"
        raise TypeError(f"Ensemble.view: the members are not NNX modules; {remedy}.")
    try:
        return nnx.view(model, **attributes)
    except ValueError as error:
        kind = type(model).__name__
        raise ValueError(f"Ensemble.view: no module of {kind} takes {sorted(attributes)}: {error}") from None
