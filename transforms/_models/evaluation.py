"""Models in evaluation mode: without dropout, and with the running statistics of normalization layers."""

from __future__ import annotations

import sys
from typing import Any

import jax

from .equinox import is_equinox
from .split_model import is_module


def evaluating(model: Any) -> Any:
    """Return an NNX or Equinox module in evaluation mode, with the same variables; anything else unchanged."""
    if is_equinox(model):
        return sys.modules["equinox"].nn.inference_mode(model)
    if not is_module(model):
        return model
    from flax import nnx

    # Not `model.eval()`: a user's class may define a method `eval` with another meaning.
    return nnx.with_attributes(model, deterministic=True, use_running_average=True, raise_if_not_found=False)


def evaluating_tree(tree: Any) -> Any:
    """Return `tree` with every NNX and Equinox module in it in evaluation mode."""
    return jax.tree.map(evaluating, tree, is_leaf=lambda x: is_module(x) or is_equinox(x))
