"""Statistics of per-sample gradients by BackPACK, for the models of `gradient_statistics.py` that it supports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _opacus
import torch
from backpack import backpack, extend
from backpack.extensions import BatchGrad, SumGradSquared, Variance
from torch import nn


def statistic(kind: str, params: Any, x: Any, y: Any, extension: str) -> Callable[[], list[torch.Tensor]]:
    """Return a call that computes the Gram matrix, the sums of squares, or the variances.

    Args:
      kind: the model: "mlp" or "cnn".
      params: its parameters in JAX.
      x: the inputs.
      y: the labels.
      extension: "gram", "second moment" or "variance".
    """
    module = extend(_opacus.model(kind, params))
    # The mean over the batch divides each gradient by its size; the sum does not.
    loss = extend(nn.CrossEntropyLoss(reduction="sum"))
    x, y, size = _opacus._tensor(x), _opacus._tensor(y), len(y)
    grams: list[torch.Tensor] = []

    def hook(module: nn.Module) -> None:
        """Multiply the gradients of a layer, and free them, before those of the next layer are computed."""
        for parameter in module.parameters(recurse=False):
            if hasattr(parameter, "grad_batch"):
                rows = parameter.grad_batch.flatten(1)
                grams.append(rows @ rows.T)
                del parameter.grad_batch

    extensions = {"gram": BatchGrad(), "second moment": SumGradSquared(), "variance": Variance()}

    def call() -> list[torch.Tensor]:
        module.zero_grad()
        grams.clear()
        with backpack(extensions[extension], extension_hook=hook if extension == "gram" else None):
            loss(module(x), y).backward()
        if extension == "gram":
            return [sum(grams)]
        parameters = [p for p in module.parameters() if p.requires_grad]
        if extension == "second moment":
            return [p.sum_grad_squared / size for p in parameters]
        return [p.variance for p in parameters]

    return call
