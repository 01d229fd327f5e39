"""On a CPU, convolutions in a loop over examples become matrix products, with the same results."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from plurax.transforms import (
    empirical_ntk,
    gradient_noise_scale,
    per_sample_gram,
    per_sample_moments,
    per_sample_projection,
)

generator = np.random.default_rng(0)
X = generator.normal(size=(5, 7, 6, 2)).astype(np.float32)
KERNELS = {1: generator.normal(size=(3, 3, 2, 4)), 2: generator.normal(size=(3, 3, 1, 4))}


def loss_of(groups: int) -> Any:
    def loss(kernel: Any, x: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        found = lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )
        return jnp.sum(jnp.tanh(found))

    return loss


def convolutions(fun: Any, *args: Any, **kwargs: Any) -> int:
    return jax.jit(fun).lower(*args, **kwargs).as_text().count("stablehlo.convolution")


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_chunks_have_none_and_give_the_same(groups: int) -> None:
    loss, kernel = loss_of(groups), KERNELS[groups].astype(np.float32)
    moments = lambda **options: per_sample_moments(loss, **options)
    scale = lambda **options: gradient_noise_scale(loss, **options)
    gram = lambda **options: per_sample_gram(loss, **options)
    projected = lambda **options: lambda *args: per_sample_projection(loss, 3, **options)(jax.random.key(0), *args)
    for of in (moments, scale, gram, projected):
        assert convolutions(of(chunk_size=2), kernel, X) == 0
        found, expected = (jax.tree.leaves(jax.jit(of(chunk_size=n))(kernel, X)) for n in (2, 5))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, 1e-4, 1e-4)


def test_the_whole_batch_has_them_where_they_are_quicker() -> None:
    many, x = generator.normal(size=(3, 3, 20, 24)), np.repeat(X, 10, axis=-1)
    for of in (per_sample_moments, gradient_noise_scale):
        for groups in (1, 2):
            assert convolutions(of(loss_of(groups)), KERNELS[groups], X) == 0
            assert "products" in of(loss_of(groups)).explain(KERNELS[groups], X).why
        assert convolutions(of(loss_of(1)), many, x) > 0
    assert convolutions(per_sample_gram(loss_of(2)), KERNELS[2], X) > 0


def test_a_batch_that_is_too_large_for_one_chunk() -> None:
    whole = gradient_noise_scale(loss_of(1))(KERNELS[1], X[:4])
    with mock.patch("plurax.transforms._statistics.statistic._NUMBERS", 200):
        some = gradient_noise_scale(loss_of(1))
        assert some.explain(KERNELS[1], X[:4]).examples == 2
        np.testing.assert_allclose(some(KERNELS[1], X[:4]), whole, 1e-4)


@pytest.mark.slow
def test_a_loop_over_the_other_batch_only() -> None:
    gram = per_sample_gram(loss_of(1), chunk_size=2)
    assert convolutions(lambda kernel, x, other: gram(kernel, x, other=(other,)), KERNELS[1], X[:2], X) == 0
    found = gram(KERNELS[1], X[:2], other=(X,))
    np.testing.assert_allclose(found, per_sample_gram(loss_of(1))(KERNELS[1], X)[:2], 1e-4, 1e-4)
    kernel = empirical_ntk(lambda kernel, x: loss_of(1)(kernel, x[None])[None], keep_batch_dim=False, chunk_size=2)
    assert convolutions(kernel, KERNELS[1], X, X[:2]) == 0
    np.testing.assert_allclose(kernel(KERNELS[1], X, X[:2])[..., 0, 0], found.T, 1e-4, 1e-4)
