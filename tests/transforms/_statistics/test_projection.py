"""`per_sample_projection` and `per_sample_jvp`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.transforms import per_sample_grad, per_sample_jvp, per_sample_projection

from .test_gram import batch, loss, parameters, rows_of

OPTIONS: Any = {"batch_argnums": (1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"chunk_size": 3}, {"memory_budget": "200KiB"}])
def test_one_linear_map_of_the_gradients(options: Any) -> None:
    """The projections of a loss are those of its gradients, as parameters of a linear loss."""
    p, xy, key = parameters(), batch(), jax.random.key(1)
    held = per_sample_grad(loss, **OPTIONS)(p, *xy)
    linear = lambda p, gradient: sum(jnp.vdot(p[name], gradient[name]) for name in p)
    expected = per_sample_projection(linear, 10, keep_batch_dim=False)(key, p, held)
    project = per_sample_projection(loss, 10, **OPTIONS, **options)
    size = np.abs(rows_of(p, *xy)).sum(1).max()
    np.testing.assert_allclose(jax.jit(project)(key, p, *xy), expected, 0, 1e-5 * size)
    assert np.abs(project(jax.random.key(2), p, *xy) - expected).max() > 1e-2 * size


@pytest.mark.slow
def test_slices_of_directions_change_nothing() -> None:
    p, xy, key = parameters(), batch(), jax.random.key(1)
    found = per_sample_projection(loss, 10, **OPTIONS)(key, p, *xy)
    with mock.patch("plurax.transforms._statistics.projection._TEMPORARY", 500):
        sliced = per_sample_projection(loss, 10, **OPTIONS)(key, p, *xy)
    np.testing.assert_allclose(sliced, found, 1e-4, 1e-5)


def shapes_of_uses(p: Any, x: Any) -> Any:
    """Use each kind of parameter in another way: heads, transposes, a stack, a reshape, a convolution."""
    heads = jnp.einsum("btd,dhk->bthk", x, p["heads"])
    back = jnp.einsum("bthk,khd->btd", jnp.tanh(heads), p["back"])
    stacked = jnp.einsum("btd,tde->bte", back, p["stacked"])
    mixed = jnp.tanh(stacked @ p["reshaped"].reshape(-1, 4)) @ p["transposed"].T
    return jnp.sum(jnp.sin(mixed)) + jnp.sum(jax.lax.conv(x[:, None], p["kernel"], (1, 1), "SAME") ** 2)


@pytest.mark.slow
def test_every_use_of_a_parameter() -> None:
    rng = np.random.default_rng(0)
    shapes = {"heads": (5, 2, 3), "back": (3, 2, 6), "stacked": (4, 6, 7), "reshaped": (14, 2), "transposed": (3, 4)}
    shapes |= {"kernel": (2, 1, 3, 3)}
    p = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    x, key = jnp.asarray(rng.normal(size=(6, 4, 5)), jnp.float32), jax.random.key(3)
    held = per_sample_grad(shapes_of_uses)(p, x)
    for name in p:
        only = lambda value, rest, x, name=name: shapes_of_uses({**rest, name: value}, x)
        with mock.patch(
            "plurax.transforms.privacy._per_example.gradient_forms.OuterProduct.smaller", return_value=True
        ):
            found = per_sample_projection(only, 9, batch_argnums=2)(key, p[name], p, x)
        linear = lambda value, gradient: jnp.vdot(value, gradient)
        expected = per_sample_projection(linear, 9, keep_batch_dim=False)(key, p[name], held[name])
        size = np.abs(held[name]).reshape(6, -1).sum(1).max()
        np.testing.assert_allclose(found, expected, 0, 1e-5 * size, err_msg=name)


def test_inner_products_are_kept_in_expectation() -> None:
    """A z-test for each pair of samples over 4,000 directions; all 28 pass in all but 1 of 10⁴ cases of bad luck."""
    p, xy, dim = parameters(), batch(), 4000
    rows = rows_of(p, *xy)
    found = np.float64(per_sample_projection(loss, dim, **OPTIONS)(jax.random.key(0), p, *xy)) * np.sqrt(dim)
    pairs = found[:, None] * found[None]  # one estimate of an inner product for each direction
    deviation = pairs.std(2, ddof=1) / np.sqrt(dim)
    # |z| > 4.8 has a probability of 1.6e-6 for one pair.
    assert (np.abs(pairs.mean(2) - rows @ rows.T) < 4.8 * deviation).all()
    norms = np.linalg.norm(rows, axis=1)
    assert (deviation < np.sqrt(9 / dim) * norms[:, None] * norms).all()  # the docstring's bound, 8, and some


def test_a_complex_parameter() -> None:
    of = lambda w, x: jnp.sum(jnp.abs(x @ w) ** 2)
    w, x = jnp.ones((4, 2), jnp.complex64) * (1 + 2j), jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)), "f")
    rows = np.asarray(per_sample_grad(of)(w, x)).reshape(5, -1)
    found = per_sample_projection(of, 4000)(jax.random.key(0), w, x)
    gram, norms = (rows @ rows.conj().T).real, np.linalg.norm(rows, axis=1)
    assert np.abs(found @ found.T - gram).max() < 5 * np.sqrt(8 / 4000) * norms.max() ** 2


@pytest.mark.slow
def test_jvp_along_a_tangent() -> None:
    p, xy = parameters(), batch()
    tangent = jax.tree.map(jnp.cos, p)
    rows = rows_of(p, *xy)
    expected = rows @ np.concatenate([np.float64(x).ravel() for x in jax.tree.leaves(tangent)])
    for options in ({}, {"chunk_size": 3}):
        along = per_sample_jvp(loss, **OPTIONS, **options)
        np.testing.assert_allclose(along(p, tangent, *xy), expected, 0, 1e-5 * np.abs(rows).sum(1).max())
    mapped = jax.vmap(along, (None, 0, None, None))(p, jax.tree.map(lambda x: jnp.stack([x, 2 * x]), tangent), *xy)
    np.testing.assert_allclose(mapped[1], 2 * mapped[0], 1e-4, 1e-5)


def test_jvp_of_a_module_and_of_several_arguments() -> None:
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)), jnp.float32)
    of = lambda model, scale, x: jnp.mean(jnp.tanh(model(x) * scale) ** 2)
    held = per_sample_grad(of, (0, 1), batch_argnums=2)(model, jnp.ones(3), x)
    tangent = jax.tree.map(lambda x: jnp.cos(x[0]), held)
    found = per_sample_jvp(of, (0, 1), batch_argnums=2)(model, tangent, jnp.ones(3), x)
    products = jax.tree.map(lambda x, t: (x * t).reshape(5, -1).sum(1), held, tangent)
    np.testing.assert_allclose(found, sum(jax.tree.leaves(products)), 1e-5, 1e-6)


def test_what_is_refused() -> None:
    p, xy = parameters(), batch()
    with pytest.raises(TypeError, match="per_sample_projection: the first argument"):
        per_sample_projection(loss, 3, **OPTIONS)(p, p, *xy)
    with pytest.raises(ValueError, match="per_sample_projection: dim"):
        per_sample_projection(loss, 0)
    with pytest.raises(TypeError, match="per_sample_projection: dim"):
        per_sample_projection(loss, 2.5)
    with pytest.raises(ValueError, match="per_sample_jvp: "):
        per_sample_jvp(loss, **OPTIONS)(p, {**p, "bias": jnp.ones(3)}, *xy)
    with pytest.raises(TypeError, match="per_sample_jvp: pass the parameters, a tangent and a batch"):
        per_sample_jvp(loss, **OPTIONS)(p)
