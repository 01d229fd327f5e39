"""Compare a convolutional network with channels last and with channels first in JAX.

    python examples/channels_last.py --images 8 --side 56

A PyTorch tensor has a memory format in addition to its shape, and "channels last" is one of them. A JAX array has no
such setting: the code fixes the order of the axes (`NHWC` or `NCHW`, given by `dimension_numbers`), and inside a
compiled function XLA chooses the layout of each value in memory. What matters is how much data XLA has to move. The
script writes one network in both orders, checks that the outputs are equal, counts the transposes and copies in the two
compiled programs, and times them alternately.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

from plurax.transforms.program import count_layout_ops

# The order of the axes of the images, and the matching order for the weights.
ORDERS = {"NHWC": "HWIO", "NCHW": "OIHW"}


def network(order: str) -> Callable[[list[dict[str, jax.Array]], jax.Array], jax.Array]:
    """Return a network of convolutions, each with scale, shift and ReLU, and global average pooling at the end."""
    places = tuple(order.index(axis) for axis in "HW")

    def apply(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for layer in params:
            x = lax.conv_general_dilated(x, layer["w"], (1, 1), "SAME", dimension_numbers=(order, ORDERS[order], order))
            shape = [-1 if axis == "C" else 1 for axis in order]
            x = jax.nn.relu(x * layer["scale"].reshape(shape) + layer["shift"].reshape(shape))
        return x.mean(places)

    return apply


def parameters(channels: int, layers: int) -> list[dict[str, jax.Array]]:
    """Return random parameters, with weights for channels last (HWIO)."""
    generator = np.random.default_rng(0)
    found = []
    for before in [3, *[channels] * (layers - 1)]:
        w = generator.normal(size=(3, 3, before, channels)) / np.sqrt(9 * before)
        found.append({"w": w, "scale": generator.uniform(0.5, 1.5, channels), "shift": generator.normal(size=channels)})
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), found)


def given(
    images: int, side: int, channels: int, layers: int
) -> dict[str, tuple[list[dict[str, jax.Array]], jax.Array]]:
    """Return parameters and images in both orders."""
    last = parameters(channels, layers)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(images, side, side, 3)), jnp.float32)
    first = [{**layer, "w": layer["w"].transpose(3, 2, 0, 1)} for layer in last]
    return {"NHWC": (last, x), "NCHW": (first, x.transpose(0, 3, 1, 2))}


def median_times(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median time of each call in ms; the calls alternate, and the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--side", type=int, default=56, help="pixels")
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()

    results, counts, calls = {}, {}, {}
    for order, arguments in given(options.images, options.side, options.channels, options.layers).items():
        jitted = jax.jit(network(order))
        results[order] = jitted(*arguments)
        counts[order] = count_layout_ops(network(order), *arguments)
        calls[order] = lambda jitted=jitted, arguments=arguments: jitted(*arguments)
    deviation = float(jnp.abs(results["NHWC"] - results["NCHW"]).max())
    times = median_times(calls, options.rounds)

    console = Console(width=100)
    console.print(f"Outputs of shape {results['NHWC'].shape} differ by at most {deviation:.1e}.")
    table = Table("order", "transposes", "copies", "bytes moved", "time")
    for order, found in counts.items():
        row = [found["transpose"], found["copy"], f"{found['bytes'] / 2**20:.2f} MiB", f"{times[order]:.2f} ms"]
        table.add_row(order, *map(str, row))
    console.print(table)
    console.print(f"NCHW takes {times['NCHW'] / times['NHWC']:.2f} times as long on this {jax.default_backend()}.")
    if counts["NCHW"]["transpose"] == 1 + options.layers:
        console.print("XLA transposes the images and the weights of each layer on input, and nothing between layers.")
    if deviation > 1e-4:
        raise SystemExit("the two orders disagree")


if __name__ == "__main__":
    main()
