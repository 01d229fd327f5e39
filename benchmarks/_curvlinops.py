"""Kronecker factors and Gauss-Newton products by curvlinops, for the models of `curvature.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _opacus
import torch
from curvlinops import GGNLinearOperator, KFACLinearOperator
from torch import nn


class _ChannelsSecond(nn.Module):
    """A model whose outputs have the classes along axis 1, as `nn.CrossEntropyLoss` expects."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x).movedim(-1, 1)


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(4, outputs), nn.GroupNorm(4, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, 2, bias=False) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class _ResNet(nn.Module):
    """The ResNet-18 of `gradient_statistics.py`, with parameters of its own."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(4)]
        pairs = [(widths[max(i - 1, 0)], widths[i]) for i in range(4)]
        blocks = [_Block(*sizes) for inputs, outputs in pairs for sizes in ((inputs, outputs), (outputs, outputs))]
        self.stem, self.blocks = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], classes, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(torch.relu(self.stem(x))).mean((2, 3)))


class Twin:
    """A model in PyTorch, and its loss for a batch.

    Args:
      kind: "mlp", "gpt" or "resnet18".
      params: the parameters in JAX; a ResNet has only their shapes.
      x: the inputs.
      y: the labels.
    """

    def __init__(self, kind: str, params: Any, x: Any, y: Any) -> None:
        if kind == "resnet18":
            classes = params["head"].shape[1]
            self.module: nn.Module = _ResNet(params["stem"].shape[-1], classes)
        else:
            self.module = _ChannelsSecond(_opacus.model(kind, params))
        self.x, self.y = _opacus._tensor(x), _opacus._tensor(y).long()
        self.loss = nn.CrossEntropyLoss()

    def ordinary(self) -> Callable[[], Any]:
        named = [*self.module.parameters()]
        return lambda: torch.autograd.grad(self.loss(self.module(self.x), self.y), named)

    def factors(self, sharing: str) -> Callable[[], Any]:
        """Return a call that computes the factors of all linear layers and convolutions, from one sample."""
        layers = [x for x in self.module.modules() if isinstance(x, (nn.Linear, nn.Conv2d))]
        named = [p for layer in layers for p in layer.parameters()]

        def call() -> Any:
            operator = KFACLinearOperator(
                self.module,
                self.loss,
                named,
                [(self.x, self.y)],
                fisher_type="mc",
                kfac_approx=sharing,
                check_deterministic=False,
            )
            operator.compute_kronecker_factors()
            return operator

        return call

    def product(self) -> Callable[[], Any]:
        """Return a call that multiplies the Gauss-Newton matrix with a vector."""
        named = [*self.module.parameters()]
        options: dict[str, Any] = {"check_deterministic": False}
        operator = GGNLinearOperator(self.module, self.loss, named, [(self.x, self.y)], **options)
        v = torch.randn(operator.shape[1])
        return lambda: operator @ v
