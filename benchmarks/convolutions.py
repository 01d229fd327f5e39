"""Compare gradients of convolutional networks on a CPU: by XLA, with convolutions as products, and clipped.

python benchmarks/convolutions.py               measure, and render the pages
python benchmarks/convolutions.py --smoke       run a small case once; write nothing
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Report, Tables, arguments, interleaved, quickest, ratio
from _networks import NETWORKS, network

from plurax.transforms import clipped_grad
from plurax.transforms.program import convolutions_as_products

ORDINARY, PRODUCTS, CLIPPED = "ordinary", "as products", "clipped"


def by_hand(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Return the sum of the clipped gradients by `jax.vmap`."""

    def clipped(params: Any, x: jax.Array, y: jax.Array) -> Any:
        gradient = jax.grad(loss)(params, x[None], y[None])
        return jax.tree.map(lambda leaf: leaf * jnp.minimum(1, 1 / optax.global_norm(gradient)), gradient)

    return lambda *args: jax.tree.map(lambda leaf: leaf.sum(0), jax.vmap(clipped, (None, 0, 0))(*args))


def differ(found: Any, expected: Any) -> bool:
    """Return whether the error of an array exceeds a thousandth of its norm."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return any(np.linalg.norm(np.asarray(a) - b) > 1e-3 * np.linalg.norm(b) for a, b in pairs)


def measure(rounds: int, seconds: float, smoke: bool) -> Tables:
    """Return a row for each network: its clipped gradient beside the quicker one of two ordinary gradients."""
    rows = []
    for name in list(NETWORKS)[: 1 if smoke else None]:
        loss, *args = network(name, 2 if smoke else None)
        ways = {
            ORDINARY: jax.jit(jax.grad(loss)),
            PRODUCTS: jax.jit(convolutions_as_products(jax.grad(loss))),
            CLIPPED: jax.jit(clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2))),
        }
        if differ(ways[PRODUCTS](*args), ways[ORDINARY](*args)):
            raise RuntimeError(f"{name}: the gradient with products differs from the ordinary one")
        if differ(ways[CLIPPED](*args), jax.jit(by_hand(loss))(*args)):
            raise RuntimeError(f"{name}: the clipped gradient differs from the sum by hand")
        times = interleaved({key: partial(way, *args) for key, way in ways.items()}, rounds=rounds, seconds=seconds)
        rows.append(
            {
                "network": name,
                "ordinary gradient (ms)": times[ORDINARY]["ms"],
                "as products / ordinary": ratio(times, PRODUCTS, ORDINARY),
                "clipped / ordinary": ratio(times, CLIPPED, ORDINARY),
                "clipped / the quicker": ratio(times, CLIPPED, quickest(times, (ORDINARY, PRODUCTS))),
            }
        )
    return rows, []


def main() -> None:
    options = arguments(__doc__).parse_args()
    sizes = (2, 0.001) if options.smoke else (5, 0.1)
    Report("convolutions", options, "flax").measure(
        {"Gradients of convolutional networks": partial(measure, *sizes, options.smoke)}
    )


if __name__ == "__main__":
    main()
