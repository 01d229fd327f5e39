"""`per_sample_moments` and `gradient_noise_scale`, against gradients that are held."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from plurax.transforms import gradient_noise_scale, per_sample_grad, per_sample_moments
from plurax.transforms.privacy._per_example.gradient_forms import OuterProduct

from .test_gram import batch, loss, parameters, rows_of

pytestmark = pytest.mark.smoke

OPTIONS: Any = {"batch_argnums": (1, 2)}


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"chunk_size": 3}, {"memory_budget": "60KiB"}])
def test_equal_to_held_gradients(options: Any) -> None:
    p, xy = parameters(), batch()
    held = per_sample_grad(loss, **OPTIONS)(p, *xy)
    moments = jax.jit(per_sample_moments(loss, **OPTIONS, **options))(p, *xy)
    for name, each in held.items():
        each = np.float64(each)
        scale = np.square(each).mean(0).max()
        assert np.abs(moments.mean[name] - each.mean(0)).max() < 1e-5 * np.sqrt(scale)
        assert np.abs(moments.second_moment[name] - np.square(each).mean(0)).max() < 1e-5 * scale
        assert np.abs(moments.variance[name] - each.var(0, ddof=1)).max() < 1e-5 * scale
    rows = rows_of(p, *xy)
    found = gradient_noise_scale(loss, **OPTIONS, **options)(p, *xy)
    noise = rows.var(0, ddof=1).sum()
    np.testing.assert_allclose(found.noise, noise, 1e-5)
    np.testing.assert_allclose(found.signal, np.square(rows.mean(0)).sum() - noise / len(rows), 1e-4)
    np.testing.assert_allclose(found.scale, found.noise / found.signal, 1e-6)


@pytest.mark.parametrize("chunk", [None, 2])
def test_many_positions_of_layers_in_a_loop(chunk: int | None) -> None:
    generator = np.random.default_rng(0)
    layers, x = generator.normal(size=(2, 3, 3)), generator.normal(size=(5, 40, 3))

    def of(layers: Any, x: Any) -> Any:
        return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, layers)[0][..., 0])

    # Gradients this small would otherwise be materialized.
    with jax.enable_x64(True), mock.patch.object(OuterProduct, "smaller", return_value=True):
        rows = np.asarray(per_sample_grad(of)(layers, x)).reshape(5, -1)
        found = jax.tree.map(np.asarray, jax.jit(gradient_noise_scale(of, chunk_size=chunk))(layers, x))
    np.testing.assert_allclose(found.noise, rows.var(0, ddof=1).sum(), 1e-12)
    np.testing.assert_allclose(found.signal, np.square(rows.mean(0)).sum() - found.noise / 5, 1e-12)


def test_rows_read_several_times_add_up_before_they_are_squared() -> None:
    table = jnp.ones((5, 2))
    rows = jnp.array([[1, 1, 3], [1, 0, 0]])
    of = lambda table, rows: jnp.sum(table[rows] * jnp.array([1.0, 2.0]))
    moments = per_sample_moments(of)(table, rows)
    counts = np.array([[0, 2, 0, 1, 0], [2, 1, 0, 0, 0]])
    each = counts[:, :, None] * np.array([1.0, 2.0])
    np.testing.assert_array_equal(moments.second_moment, np.square(each).mean(0))
    np.testing.assert_array_equal(moments.variance, each.var(0, ddof=1))


def test_signs_of_a_rearranged_parameter() -> None:
    w, x = jnp.ones((6, 2)), jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
    of = lambda w, x: jnp.sum(jnp.tanh(x @ -w[1:4].reshape(2, 3).T))
    held = np.float64(per_sample_grad(of)(w, x))
    found = per_sample_moments(of)(w, x)
    np.testing.assert_allclose(found.second_moment, np.square(held).mean(0), 1e-5)
    np.testing.assert_allclose(found.mean, held.mean(0), 1e-5)


def test_halves_are_summed_in_float32() -> None:
    of = lambda w, x: jnp.sum(x @ w)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(50, 3)), jnp.bfloat16)
    moments = per_sample_moments(of)(jnp.ones((3, 1), jnp.bfloat16), x)
    assert {leaf.dtype for leaf in jax.tree.leaves(moments)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(moments.variance[:, 0], np.float64(x).var(0, ddof=1), 1e-5)


def test_members_have_noise_scales_of_their_own() -> None:
    p, xy = parameters(), batch()
    members = jax.tree.map(lambda x: jnp.stack([x, -0.5 * x]), p)
    scale = gradient_noise_scale(loss, **OPTIONS)
    found = jax.jit(jax.vmap(scale, (0, None, None)))(members, *xy)
    for i in range(2):
        alone = scale(jax.tree.map(lambda x, i=i: x[i], members), *xy)
        np.testing.assert_allclose(found.noise[i], alone.noise, 1e-5)
        np.testing.assert_allclose(found.signal[i], alone.signal, 1e-4)


def test_nothing_is_clamped() -> None:
    of = lambda w, x: jnp.sum(x * w)
    found = gradient_noise_scale(of)(jnp.ones(1), jnp.array([1.0, -1.0]))
    assert (float(found.noise), float(found.signal), float(found.scale)) == (2.0, -1.0, -2.0)


def test_a_loss_that_jax_cannot_map() -> None:
    def of(p: Any, x: Any) -> Any:
        return jnp.sum(lax.ragged_dot(jnp.tanh(x), jnp.stack([p, jnp.cos(p)]), jnp.array([1, 2], jnp.int32)) ** 2)

    rng = np.random.default_rng(0)
    p, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 3), (4, 3, 3)))
    each = np.stack([jax.grad(of)(p, row) for row in x])
    moments = per_sample_moments(of, keep_batch_dim=False)
    np.testing.assert_allclose(moments(p, x).variance, each.var(0, ddof=1), 1e-4)
    assert moments.explain(p, x).examples == 1
    found = gradient_noise_scale(of, keep_batch_dim=False)(p, x)
    np.testing.assert_allclose(found.noise, each.var(0, ddof=1).sum(), 1e-5)


@pytest.mark.parametrize("statistic", [per_sample_moments, gradient_noise_scale])
def test_one_sample_has_no_variance(statistic: Any) -> None:
    with pytest.raises(ValueError, match=f"{statistic.__name__}: a variance needs at least two samples"):
        statistic(loss, **OPTIONS)(parameters(), *batch(1))


def test_no_array_of_batch_and_parameters() -> None:
    width, size = 256, 33
    of = lambda p, x: jnp.mean(jnp.tanh(x @ p["a"]) ** 2)
    text = jax.jit(per_sample_moments(of)).lower({"a": jnp.ones((width, width))}, jnp.ones((size, width))).compile()
    assert f"[{size},{width},{width}]" not in text.as_text()
