"""The models of `privacy.py` in PyTorch, and their gradients by PyTorch and by Opacus."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.layers import DPLSTM
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer, DPOptimizerFastGradientClipping, DPPerLayerOptimizer
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import nn

Arrays = dict[str, np.ndarray]
Gradients = Callable[[], dict[str, torch.Tensor]]


def arrays(kind: str, params: Any) -> Arrays:
    """Return the parameters of a job, or their gradients, with PyTorch's names and layout."""
    found = MODELS[kind][0](params)
    return {name: np.ascontiguousarray(leaf) for name, leaf in found.items()}


def model(kind: str, params: Any, **options: Any) -> nn.Module:
    """Return the module of a job; parameters that the job lacks (the LSTM's second bias) are zero and frozen."""
    named = arrays(kind, params)
    module = MODELS[kind][1](named, **options)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in named)
        parameter.data = torch.tensor(named[name]) if name in named else torch.zeros_like(parameter)
    return module


def losses(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss of each example: the mean over its labels."""
    logits = module(x).flatten(0, -2)
    return nn.functional.cross_entropy(logits, y.flatten(), reduction="none").reshape(len(y), -1).mean(1)


def ordinary(module: nn.Module, x: Any, y: Any) -> Gradients:
    x, y, named = _tensor(x), _tensor(y), _trained(module)
    return lambda: dict(zip(named, torch.autograd.grad(losses(module, x, y).mean(), [*named.values()]), strict=True))


def ordinary_step(module: nn.Module, x: Any, y: Any) -> Gradients:
    """Return a step with Adam, which returns the parameters."""
    x, y, named = _tensor(x), _tensor(y), _trained(module)
    optimizer = torch.optim.Adam(named.values(), lr=1e-3)

    def call() -> dict[str, torch.Tensor]:
        optimizer.zero_grad(set_to_none=True)
        losses(module, x, y).mean().backward()
        optimizer.step()
        return named

    return call


def hooks(
    module: nn.Module,
    x: Any,
    y: Any,
    clip: float,
    noise: list[float] | None = None,
    *,
    per_parameter: bool = False,
    adaptive: tuple[float, float, float] | None = None,
) -> Gradients:
    """Materialize, clip and sum the gradients of the examples with Opacus's optimizer.

    With `noise`, a list with the current noise multiplier, take a step with Adam and return the parameters.
    `per_parameter` clips each parameter to an equal share of `clip`; `adaptive` is the quantile, the learning rate and
    the standard deviation of the count.
    """
    x, y, named = _tensor(x), _tensor(y), _trained(module)
    wrapped = GradSampleModule(module, loss_reduction="sum")
    options = _options(named, clip, len(y))
    if per_parameter:
        optimizer = DPPerLayerOptimizer(**{**options, "max_grad_norm": [clip / len(named) ** 0.5] * len(named)})
    elif adaptive is not None:
        names = ("target_unclipped_quantile", "clipbound_learning_rate", "unclipped_num_std")
        more = dict(zip(names, adaptive, strict=True)) | {"max_clipbound": 1e6, "min_clipbound": 1e-6}
        optimizer = AdaClipDPOptimizer(**options, **more)
    else:
        optimizer = DPOptimizer(**options)

    def call() -> dict[str, torch.Tensor]:
        optimizer.zero_grad(set_to_none=True)
        losses(wrapped, x, y).sum().backward()
        if noise is None:
            optimizer.clip_and_accumulate()
            return {name: parameter.summed_grad for name, parameter in named.items()}
        return _step(optimizer, named, noise)

    return call


def _step(optimizer: DPOptimizer, named: dict[str, nn.Parameter], noise: list[float]) -> dict[str, torch.Tensor]:
    (optimizer.noise_multiplier,) = noise
    optimizer.step()
    return named


def ghost(
    module: nn.Module,
    x: Any,
    y: Any,
    clip: float,
    noise: list[float] | None = None,
    *,
    use_ghost_clipping: bool = True,
) -> Gradients:
    """Compute norms in one backward pass and the sum in another, with Opacus's loss.

    Opacus 1.6 has ghost norms for `nn.Linear` and `nn.Embedding`. For other layers, or without `use_ghost_clipping`,
    the first pass materializes the gradient of each example, one layer at a time. `noise` is as in `hooks`.
    """
    x, y, named = _tensor(x), _tensor(y), _trained(module)
    wrapped = GradSampleModuleFastGradientClipping(
        module, loss_reduction="sum", max_grad_norm=clip, use_ghost_clipping=use_ghost_clipping
    )
    optimizer = DPOptimizerFastGradientClipping(**_options(named, clip, len(y)))

    def call() -> dict[str, torch.Tensor]:
        optimizer.zero_grad(set_to_none=True)
        DPTensorFastGradientClipping(wrapped, optimizer, losses(wrapped, x, y), "sum").backward()
        if noise is None:
            return {name: parameter.grad for name, parameter in named.items()}
        return _step(optimizer, named, noise)

    return call


def _tensor(array: Any) -> torch.Tensor:
    """Convert to a tensor, channels first also in memory: with other layouts, Opacus's gradients are silently wrong."""
    array = np.array(array)
    found = torch.from_numpy(np.moveaxis(array, -1, 1) if array.ndim == 4 else array)
    return (found if found.is_floating_point() else found.long()).clone(memory_format=torch.contiguous_format)


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _options(named: dict[str, nn.Parameter], clip: float, batch: int) -> dict[str, Any]:
    return {
        "optimizer": torch.optim.Adam(named.values(), lr=1e-3),
        "noise_multiplier": 0.0,
        "max_grad_norm": clip,
        "expected_batch_size": batch,  # divides the noisy sum
    }


def _dense(name: str, weight: Any, bias: Any) -> dict[str, Any]:
    return {f"{name}.weight": weight.T, f"{name}.bias": bias}


def _linear(named: Arrays, name: str) -> nn.Linear:
    outputs, inputs = named[f"{name}.weight"].shape
    return nn.Linear(inputs, outputs, bias=f"{name}.bias" in named)


def _mlp_arrays(params: Any) -> dict[str, Any]:
    return {name: leaf for i, layer in enumerate(params) for name, leaf in _dense(str(2 * i), *layer).items()}


def _mlp(named: Arrays) -> nn.Module:
    layers = [[_linear(named, str(2 * i)), nn.ReLU()] for i in range(len(named) // 2)]
    return nn.Sequential(*itertools.chain(*layers[:-1]), layers[-1][0])


def _cnn_arrays(params: Any) -> dict[str, Any]:
    """Return the parameters for images with channels first, also when flattened."""
    channels = params["conv2"][1].size
    weight, bias = params["dense1"]
    side = round((len(weight) / channels) ** 0.5)
    weight = weight.reshape(side, side, channels, -1).transpose(2, 0, 1, 3).reshape(weight.shape)
    found = _dense("6", weight, bias) | _dense("8", *params["dense2"])
    for name, (kernel, shift) in {"0": params["conv1"], "2": params["conv2"]}.items():
        found |= {f"{name}.weight": kernel.transpose(3, 2, 0, 1), f"{name}.bias": shift}
    return found


def _cnn(named: Arrays) -> nn.Module:
    def conv(name: str) -> nn.Conv2d:
        outputs, inputs, *kernel = named[f"{name}.weight"].shape
        return nn.Conv2d(inputs, outputs, tuple(kernel))

    convolutions = [conv("0"), nn.ReLU(), conv("2"), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*convolutions, _linear(named, "6"), nn.ReLU(), _linear(named, "8"))


def _lstm_arrays(params: Any) -> dict[str, Any]:
    found = {"lstm.weight_ih_l0": params["w"].T, "lstm.weight_hh_l0": params["u"].T, "lstm.bias_ih_l0": params["b"]}
    return found | {"out.weight": params["out"].T}


class _LSTM(nn.Module):
    def __init__(self, named: Arrays, cell: type[nn.Module] = DPLSTM) -> None:
        super().__init__()
        _, hidden = named["lstm.weight_hh_l0"].shape
        self.lstm = cell(named["lstm.weight_ih_l0"].shape[1], hidden, batch_first=True)
        self.out = _linear(named, "out")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(x)
        return self.out(hidden[:, -1])


def _gpt_arrays(params: Any) -> dict[str, Any]:
    """Return the parameters; without a `head`, the embedding is the head as well."""
    found = {f"{name}.weight": params[name] for name in ("embedding", "position", "head") if name in params}
    for i, block in enumerate(params["blocks"]):
        for name in ("qkv", "out", "up", "down"):
            found |= _dense(f"blocks.{i}.{name}", *block[name])
        for name in ("norm1", "norm2"):
            found |= dict(zip((f"blocks.{i}.{name}.weight", f"blocks.{i}.{name}.bias"), block[name], strict=True))
    return found


class _Block(nn.Module):
    def __init__(self, named: Arrays, name: str) -> None:
        super().__init__()
        self.qkv, self.out, self.up, self.down = (
            _linear(named, f"{name}.{layer}") for layer in ("qkv", "out", "up", "down")
        )
        self.norm1, self.norm2 = (nn.LayerNorm(self.out.out_features) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute causal attention in four heads and an MLP, as the job does."""
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        scores = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).masked_fill(~mask, -1e9)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class _GPT(nn.Module):
    def __init__(self, named: Arrays) -> None:
        super().__init__()
        self.embedding = nn.Embedding(*named["embedding.weight"].shape)
        self.position = nn.Embedding(*named["position.weight"].shape)
        layers = sum(name.endswith("qkv.weight") for name in named)
        self.blocks = nn.Sequential(*(_Block(named, f"blocks.{i}") for i in range(layers)))
        self.head = nn.Linear(*self.embedding.weight.shape[::-1], bias=False)
        if "head.weight" not in named:
            self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1]).repeat(len(x), 1)  # for every example, since Opacus expects a batch
        return self.head(self.blocks(self.embedding(x) + self.position(places)))


MODELS: dict[str, tuple[Callable[[Any], dict[str, Any]], Callable[..., nn.Module]]] = {
    "mlp": (_mlp_arrays, _mlp),
    "cnn": (_cnn_arrays, _cnn),
    "lstm": (_lstm_arrays, _LSTM),
    "gpt": (_gpt_arrays, _GPT),
}
