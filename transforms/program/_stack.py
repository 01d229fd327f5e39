"""`Stack`: layers of one architecture as one module."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import jax
from flax import nnx

from .._models.split_model import SplitModel, split


class Stack(nnx.Module):
    """Layers of one architecture, stacked along axis 0 of every array; created by `stack_layers`.

    It is an ordinary module: it can be an attribute of another module, be trained and saved, and be a member of an
    ensemble.

    Attributes:
      layer: a module of the class of the layers that holds the arrays of all layers. Its arrays have an additional
        axis, so it cannot be called itself. Its settings (`stack.layer.set_attributes(...)`, `stack.eval()`) apply to
        every layer.
    """

    # `plurax.transforms.modules` recognizes a stack by this attribute, without importing Flax or this file.
    __plurax_layers__ = True

    def __init__(self, layer: Any, size: int) -> None:
        self.layer = layer
        self._size = size

    def __len__(self) -> int:
        """Return the number of layers."""
        return self._size

    def unstack(self) -> list[Any]:
        """Return the layers as a list of standalone modules, with copies of their arrays.

        Examples:
          >>> from flax import nnx
          >>> from plurax.transforms.program import stack_layers
          >>> stack = stack_layers([nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(5)])
          >>> stack.unstack()[4].kernel.shape
          (3, 3)
        """
        parts = self.parts()
        return [jax.tree.map(itemgetter(i), parts).merge() for i in range(self._size)]

    def parts(self) -> SplitModel:
        """Return the layers as one split model; raise unless axis 0 of each array has one entry for each layer."""
        parts = split(self.layer)
        for path, leaf in parts.arrays().items():
            if getattr(leaf, "shape", ())[:1] != (self._size,):
                what = f"`layer.{path}` has shape {getattr(leaf, 'shape', ())}"
                raise ValueError(f"Stack: {what}, but axis 0 must be its {self._size} layers; stack the layers again.")
        return parts
