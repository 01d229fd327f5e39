"""On a CPU, method="auto" computes convolutions as matrix products in groups of examples or of channels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plurax.transforms import clipped_grad

pytestmark = pytest.mark.smoke

generator = np.random.default_rng(0)
X = generator.normal(size=(6, 8, 9, 2)).astype(np.float32)
Y = generator.normal(size=(6, 3)).astype(np.float32)
PARAMS = {
    "kernel": generator.normal(size=(3, 3, 1, 4)).astype(np.float32),
    "out": generator.normal(size=(64, 3)).astype(np.float32) / 8,
}


def convolve(x, kernel, groups):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def network(params, x):
    x = convolve(x, params["kernel"], 2)
    x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return x.reshape(len(x), -1) @ params["out"]


def clipped(params, x, y, scale=1.0, **options):
    """Return the clipped sum, and for each example its loss, norm and auxiliary output."""

    def loss(params, x, y):
        error = scale * network(params, x) - y
        return jnp.sum(error**2), {"error": error, "count": 3, "name": None}

    return of_loss(loss, batch_argnums=(1, 2), **options)(params, x, y)


def of_loss(loss, **options):
    return clipped_grad(loss, has_aux=True, l2_clip_norm=2.0, return_values=True, return_grad_norms=True, **options)


def by_hand(params, x, y, scale=1.0):
    """Return what `clipped` does, from the materialized gradient of each example."""

    def loss(params, x, y):
        error = scale * network(params, x[None]) - y[None]
        return jnp.sum(error**2), error[0]

    (values, errors), each = jax.vmap(jax.value_and_grad(loss, has_aux=True), (None, 0, 0))(params, x, y)
    norms = jnp.sqrt(sum(jnp.sum(g**2, tuple(range(1, g.ndim))) for g in jax.tree.leaves(each)))
    weights = jnp.minimum(1, 2 / norms)
    return jax.tree.map(lambda g: jnp.tensordot(weights, g, 1), each), values, norms, errors


def convolutions(fun, *args):
    return jax.jit(fun).lower(*args).as_text().count("stablehlo.convolution")


def test_the_sum_and_all_else_are_those_of_each_gradient():
    total, aux = jax.jit(clipped)(PARAMS, X, Y)
    assert aux.aux["name"] is None
    assert aux.aux["count"].tolist() == [3] * 6
    found = total, aux.values, aux.grad_norms, aux.aux["error"]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(by_hand)(PARAMS, X, Y)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("group", [None, 2])
def test_no_convolution_is_left_in_the_program(group):
    assert convolutions(lambda *args: clipped(*args, microbatch_size=group), PARAMS, X, Y) == 0
    assert convolutions(lambda *args: clipped(*args, method="book_keeping", microbatch_size=group), PARAMS, X, Y) > 0


def test_explain_says_so():
    of = of_loss(lambda params, x: (jnp.sum(network(params, x) ** 2), None))
    report = of.explain(PARAMS, X)
    assert report.method == "book_keeping"
    assert report.why.endswith("; convolutions as matrix products where XLA is slow at them")
    many = of.explain(PARAMS, jnp.tile(X, (200, *[1] * (X.ndim - 1))))
    assert many.examples < 200 * len(X)
    assert many.why.endswith("; convolutions as matrix products")


def test_a_window_and_a_result_of_many_positions_are_left_to_xla():
    def loss(kernel, x):
        return jnp.sum(jax.lax.conv(x, kernel, (1, 1), "VALID") ** 2)

    x, kernel = jnp.ones((4, 1, 20, 20)), jnp.ones((2, 1, 9, 9))
    of = clipped_grad(loss, l2_clip_norm=1.0)
    assert "products" not in of.explain(kernel, x).why
    assert convolutions(of, kernel, x) > 0


def test_with_many_channels_only_groups_of_examples_take_products():
    def loss(kernel, x):
        return jnp.sum(convolve(x, kernel, 1) ** 2)

    few, many = (generator.normal(size=(3, 3, n, n + 4)).astype(np.float32) for n in (2, 20))
    wide = np.repeat(X, 10, axis=-1)
    assert convolutions(clipped_grad(loss, l2_clip_norm=1.0), few, X) == 0
    assert convolutions(clipped_grad(loss, l2_clip_norm=1.0), many, wide) > 0
    assert convolutions(clipped_grad(loss, l2_clip_norm=1.0, microbatch_size=3), many, wide) == 0


@pytest.mark.slow
def test_derivatives_go_through_what_the_loss_closes_over():
    def total(of):
        def loss(params, scale):
            found = of(params, X, Y, scale)
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(found[0]))

        return loss

    def derivatives(of):
        along = jax.jvp(total(of), (PARAMS, 0.7), (PARAMS, 1.0))
        return (
            jax.grad(total(of), (0, 1))(PARAMS, 0.7),
            along,
            jax.vmap(lambda s: of(PARAMS, X, Y, s)[0])(X[0, 0, :, 0]),
        )

    found, expected = jax.jit(lambda: (derivatives(clipped), derivatives(by_hand)))()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_budget_is_kept_with_products():
    of = clipped_grad(lambda params, x: jnp.sum(network(params, x) ** 2), l2_clip_norm=2.0, memory_budget="64KiB")
    report = of.explain(PARAMS, X)
    assert report.examples < 6
    assert jax.jit(of).lower(PARAMS, X).compile().memory_analysis().temp_size_in_bytes <= 64 * 1024
    plain = clipped_grad(lambda params, x: jnp.sum(network(params, x) ** 2), l2_clip_norm=2.0, method="vmap")
    for a, b in zip(jax.tree.leaves(jax.jit(of)(PARAMS, X)), jax.tree.leaves(jax.jit(plain)(PARAMS, X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_keys_and_padding():
    def loss(params, key, x):
        return jnp.sum(network(params, x * jax.random.bernoulli(key, 0.5, x.shape)) ** 2)

    key, padding = jax.random.key(0), np.array([False, True, False, False, True, False])
    auto, vmap = (
        jax.jit(clipped_grad(loss, batch_argnums=2, prng_argnum=1, l2_clip_norm=2.0, method=method))(
            PARAMS, key, np.where(padding[:, None, None, None], np.nan, X), is_padding_example=padding
        )
        for method in ("auto", "vmap")
    )
    for a, b in zip(jax.tree.leaves(auto), jax.tree.leaves(vmap), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)
