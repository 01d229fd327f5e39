"""The modes of NNX modules: other values of static attributes, such as those for evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...transforms._models.split_model import is_module


def viewed(model: Any, attributes: Mapping[str, Any]) -> Any:
    """Return a module with other values of static attributes; arguments and errors as `Ensemble.view`."""
    from flax import nnx

    if not is_module(model):
        raise TypeError("Ensemble.view: the members are not NNX modules; pass options, as ens(x, train=False).")
    try:
        return nnx.view(model, **attributes)
    except ValueError as error:
        kind = type(model).__name__
        raise ValueError(f"Ensemble.view: no module of {kind} takes {sorted(attributes)}: {error}") from None
