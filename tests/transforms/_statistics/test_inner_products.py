"""The way in which the gradients at a use are multiplied, counted from shapes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plurax.transforms._statistics import inner_products
from plurax.transforms._statistics.inner_products import Factors, block_size, way


def factors(n: int, outputs: int, positions: int, p: int, d: int, stack: int = 1, seed: int = 0) -> Factors:
    rng = np.random.default_rng(seed)
    left, right = (rng.normal(size=size) for size in ((n, stack, positions, p), (n, outputs, stack, positions, d)))
    return Factors(jnp.asarray(left, "f"), jnp.asarray(right, "f"), p)


def rows(n: int, outputs: int, positions: int, height: int, d: int, stack: int = 1, seed: int = 0) -> Factors:
    found = factors(n, outputs, positions, 1, d, stack, seed)
    read = np.random.default_rng(seed).integers(0, height, (n, stack, positions))
    return Factors(jnp.asarray(read), found.right, height)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (factors(64, 1, 1, 100, 200), "positions"),  # a dense layer
        (factors(64, 10, 1, 100, 100), "positions"),  # and its kernel
        (factors(8, 1, 64, 32, 64), "blocks"),  # many positions
        (factors(8, 10, 4, 64, 64), "contraction"),  # many outputs and few positions
        (factors(8, 10, 300, 9, 16), "blocks"),  # a convolution
        (rows(8, 1, 2, 1000, 16), "positions"),  # few rows of a large table
        (rows(8, 1, 64, 20, 16), "blocks"),  # many rows of a small one
    ],
)
def test_the_cheapest_way(one: Factors, expected: str) -> None:
    assert way(one, None) == way(one, one) == expected


def dense(of: Factors) -> Any:
    """Return the gradients: shape (n, outputs, stack, p, d)."""
    left = of.left if of.left.ndim == 4 else jax.nn.one_hot(of.left, of.height)
    return np.einsum("istp,iostd->iospd", np.float64(left), np.float64(of.right))


@pytest.mark.parametrize("name", ["positions", "contraction", "blocks"])
@pytest.mark.parametrize("room", [1, 100, 10**9])
@pytest.mark.parametrize("kind", [factors, rows])
def test_every_way_and_room(name: Any, room: int, kind: Any) -> None:
    one, other = kind(6, 2, 3, 5, 4, stack=2), kind(4, 3, 2, 5, 4, stack=2, seed=1)
    with (
        mock.patch.object(inner_products, "way", return_value=name),
        mock.patch.object(inner_products, "_room", return_value=room),
    ):
        for second in (None, other):
            found = inner_products._of_factors(one, second)
            expected = np.einsum("iospd,jqspd->ijoq", dense(one), dense(second or one))
            np.testing.assert_allclose(found, expected, 1e-4, 1e-4)


def test_blocks_keep_temporaries_small() -> None:
    one = factors(16, 1, 40, 4096, 512)
    size = block_size(one)
    assert 16 * size * 512 <= max(2**22, one.left.size + one.right.size)
    blocks = jax.jit(lambda left, right: inner_products._by_blocks(Factors(left, right, 4096), None))
    compiled = blocks.lower(one.left, one.right).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * 4096 * 512 * 4 / 4  # of all gradients held
