"""Transposes and copies that remain in compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from plurax.transforms.program import count_layout_ops


def convolutions(x: jax.Array, w: jax.Array, order: str) -> jax.Array:
    weights = {"NCHW": "OIHW", "NHWC": "HWIO"}[order]
    for _ in range(2):
        x = jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=(order, weights, order)))
    return x


def test_a_transpose_counts_once_with_what_it_moves() -> None:
    found = count_layout_ops(lambda x: x.T, jnp.ones((3, 5)))
    assert found["transpose"] + found["copy"] == 1
    assert found["bytes"] == 2 * 4 * 3 * 5


def test_transposes_without_copies_do_not_count() -> None:
    assert count_layout_ops(lambda x: x * 2.0, jnp.ones((3, 5))) == {"transpose": 0, "copy": 0, "bytes": 0}
    assert count_layout_ops(lambda x: x.T.T + 1.0, jnp.ones((3, 5)))["transpose"] == 0


def test_each_iteration_of_a_scan_counts() -> None:
    def turns(x: jax.Array, n: int) -> jax.Array:
        return lax.scan(lambda x, _: (jnp.sin(x).T, None), x, None, length=n)[0]

    few, many = (count_layout_ops(lambda x, n=n: turns(x, n), jnp.ones((5, 5))) for n in (4, 9))
    assert many["transpose"] - few["transpose"] + many["copy"] - few["copy"] >= 5


def test_channels_last_needs_no_transposes_on_a_cpu() -> None:
    x, w = jnp.ones((2, 9, 7, 8)), jnp.ones((3, 3, 8, 8))
    last = count_layout_ops(lambda x, w: convolutions(x, w, "NHWC"), x, w)
    first = count_layout_ops(lambda x, w: convolutions(x, w, "NCHW"), x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1))
    assert last["transpose"] == 0 < first["transpose"]


def test_non_callables_are_refused() -> None:
    with pytest.raises(TypeError, match="count_layout_ops: fun must be a function"):
        count_layout_ops(3)
