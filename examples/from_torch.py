"""Load a network trained in PyTorch into Flax: translate names and axes, and check that the outputs are equal.

    python examples/from_torch.py

The PyTorch network is small, but has the layers whose parameters differ from Flax: convolutions, batch norms,
attention, and a dense layer after a flatten. If PyTorch is installed, the script creates the network and writes its
state dict with safetensors; otherwise it reads `from_torch.safetensors`, which was created in the same way.
`load_params` then needs two rules, one for names and one for axes, and raises for parameters that the rules miss.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from plurax.transforms.modules import freeze, load_params, named_parameters

HEADS, CHANNELS, CLASSES = 2, 6, 5
MADE_BEFORE = Path(__file__).with_suffix(".safetensors")


class Net(nnx.Module):
    """A network for images (batch, 12, 8, 3), with logits (batch, 5)."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1, self.bn1 = nnx.Conv(3, 4, (3, 3), rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.conv2, self.bn2 = nnx.Conv(4, CHANNELS, (3, 3), rngs=rngs), nnx.BatchNorm(CHANNELS, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, CHANNELS, decode=False, rngs=rngs)
        self.fc = nnx.Linear(3 * 2 * CHANNELS, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits (batch, 5); channels are last, also when flattened."""
        x = nnx.max_pool(nnx.relu(self.bn1(self.conv1(x))), (2, 2), (2, 2))
        x = nnx.max_pool(nnx.relu(self.bn2(self.conv2(x))), (2, 2), (2, 2))
        return self.fc(self.attention(x.reshape(len(x), 6, CHANNELS)).reshape(len(x), -1))


def from_torch(file: Path) -> None:
    """Train the same network in PyTorch; write its state dict, with some images and their logits."""
    import torch
    from safetensors.torch import save_file
    from torch import nn

    class TorchNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.conv2, self.bn2 = nn.Conv2d(4, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS)
            self.attention = nn.MultiheadAttention(CHANNELS, HEADS, batch_first=True)
            self.fc = nn.Linear(CHANNELS * 3 * 2, CLASSES)

        def forward(self, x: Any) -> Any:
            """Return logits (batch, 5); channels are first, also when flattened."""
            x = nn.functional.max_pool2d(self.bn1(self.conv1(x)).relu(), 2)
            x = nn.functional.max_pool2d(self.bn2(self.conv2(x)).relu(), 2)
            tokens = x.flatten(2).transpose(1, 2)
            tokens = self.attention(tokens, tokens, tokens, need_weights=False)[0]
            return self.fc(tokens.transpose(1, 2).flatten(1))

    torch.manual_seed(0)
    model = TorchNet()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(30):  # statistics, scales and biases then differ from their initial values
        images = torch.randn(16, 3, 12, 8)
        loss = nn.functional.cross_entropy(model(images), images.mean((2, 3)).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    images = torch.randn(2, 3, 12, 8)
    with torch.no_grad():
        example = {"example.images": images, "example.logits": model(images)}
    save_file({**model.state_dict(), **example}, file)


def split_projections(file: Path, target: Path) -> None:
    """Split PyTorch's combined weights of queries, keys and values into separate arrays."""
    arrays = load_file(file)
    for kind in ("weight", "bias"):
        parts = np.split(arrays.pop(f"attention.in_proj_{kind}"), 3)
        arrays |= {f"attention.{name}.{kind}": x for name, x in zip(("query", "key", "value"), parts, strict=True)}
    save_file(arrays, target)


def rename(name: str) -> str | None:
    """Return the Flax name of a PyTorch parameter, or None to leave it out."""
    layer, _, kind = name.rpartition(".")
    if kind == "num_batches_tracked" or layer == "example":
        return None
    weight = "scale" if layer.startswith("bn") else "kernel"
    kinds = {"weight": weight, "running_mean": "mean", "running_var": "var"}
    return f"{layer.replace('out_proj', 'out')}.{kinds.get(kind, kind)}"


def transform(name: str, x: np.ndarray) -> np.ndarray:
    """Return a parameter with its axes in the order of Flax."""
    if x.ndim == 4:
        return x.transpose(2, 3, 1, 0)  # OIHW to HWIO
    if name == "fc.kernel":  # its inputs were flattened as channels, rows, columns
        return x.reshape(CLASSES, CHANNELS, 3, 2).transpose(2, 3, 1, 0).reshape(-1, CLASSES)
    if name == "attention.out.kernel":
        return x.T.reshape(HEADS, -1, CHANNELS)
    if name.startswith("attention.") and name != "attention.out.bias":
        return x.T.reshape(*x.T.shape[:-1], HEADS, -1)  # Flax has a separate axis for the heads
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, help="read this file instead of creating one with PyTorch")
    parser.add_argument("--keep", type=Path, help="where to save the file that PyTorch creates")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        file = options.file or options.keep or Path(folder) / "torch.safetensors"
        if options.file is None and importlib.util.find_spec("torch") is not None:
            from_torch(file)
            print("PyTorch created and ran the network in this process.")
        else:
            file = options.file or MADE_BEFORE
            print(f"PyTorch created and ran the network earlier: {file.name}.")
        split = Path(folder) / "split.safetensors"
        split_projections(file, split)
        # Only shapes and dtypes: the parameters are not initialized, since they are replaced.
        empty = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
        print("\nWithout rules:")
        try:
            load_params(split, empty)
        except ValueError as error:
            said = f"ValueError: {str(error).replace(f'{split}', 'the file')}"
            print(textwrap.fill(said, 96, initial_indent="  ", subsequent_indent="  "))
        model = load_params(split, empty, rename=rename, transform=transform)
        example = load_file(file)
    model.eval()
    logits = model(jnp.asarray(example["example.images"].transpose(0, 2, 3, 1)))
    deviation = float(np.abs(logits - example["example.logits"]).max())

    total = sum(x.size for x in named_parameters(model).values())
    print(
        f"\nWith rules: {len(named_parameters(model))} parameter arrays with {total} numbers, 4 arrays of statistics."
    )
    print(f"Logits of {len(logits)} images differ from PyTorch's by at most {deviation:.1e}.")
    tuned = freeze(model, nnx.Not("fc"))
    left = sum(x.size for x in jax.tree.leaves(nnx.state(tuned, nnx.Param)))
    print(f"To fine-tune only the last layer: freeze(model, nnx.Not('fc')) leaves {left} trainable numbers.")
    if deviation > 1e-5:
        raise SystemExit("the two networks disagree")


if __name__ == "__main__":
    main()
