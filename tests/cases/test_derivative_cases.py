"""Derivatives from MindSpore's documentation and PyTorch's tutorials, with their shapes and numbers."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.transforms import (
    batch_jacobian,
    grad,
    hessian,
    hvp,
    jacfwd,
    jacobian,
    jacrev,
    jvp,
    value_and_grad,
    vhp,
    vjp,
    vmap,
)

X = np.array([[1.0, 2.0], [3.0, 4.0]])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def assert_close(actual, expected, tolerance=1e-6):
    chex.assert_trees_all_close(actual, jax.tree.map(jnp.asarray, expected), rtol=tolerance, atol=tolerance)


def diagonal(*values):
    return np.diag(np.asarray(values, float)).reshape(2, 2, 2, 2)


def test_gradients_by_position_seeded_and_with_aux():
    args = (np.array([1.0, 2.0]), np.array([-2.0, 3.0]), np.array([0.0, 3.0]))
    product = lambda x, y, z: x * y * z
    assert_close(grad(product, (1, 2), cotangent=1.0)(*args), (np.array([0.0, 6.0]), np.array([-2.0, 6.0])))
    seeded = grad(product, (1, 2), cotangent=np.array([1.0, 2.0]))(*args)
    assert_close(seeded, (np.array([0.0, 12.0]), np.array([-2.0, 12.0])))
    gradients, aux = grad(lambda x, y, z: (x * jnp.exp(y) * z**2, z), (1, 2), has_aux=True)(3.0, 0.0, 5.0)
    assert_close((gradients, aux), ((75.0, 30.0), 5.0))


@pytest.mark.parametrize("transform", [jacrev, jacfwd, jacobian])
def test_jacobians_with_aux_and_of_two_positions(transform):
    fun = lambda x, y, z: (x**2 + y**2 + z**2, x * y * z)
    rows, aux = transform(fun, has_aux=True)(X, X, 1.0)
    assert_close(rows, diagonal(2, 4, 6, 8))
    assert_close(aux, np.array([[1.0, 4.0], [9.0, 16.0]]))
    both = transform(jnp.multiply, (0, 1))(np.array([1.0, 2.0]), np.array([3.0, 4.0]))
    assert_close(both, (np.diag([3.0, 4.0]), np.diag([1.0, 2.0])))


def test_a_cube_and_a_summand_along_ones():
    fun = lambda x, y: x**3 + y
    value, tangent = jvp(fun, (X, X), (np.ones((2, 2)), np.ones((2, 2))))
    assert_close((value, tangent), (np.array([[2.0, 10], [30, 68]]), np.array([[4.0, 13], [28, 49]])))
    value, pull = vjp(fun, X, X)
    slopes = np.array([[3.0, 12], [27, 48]])
    assert_close((value, pull(1.0)), (np.array([[2.0, 10], [30, 68]]), (slopes, np.ones((2, 2)))))
    assert_close(value_and_grad(fun, (0, 1), cotangent=1.0)(X, X)[1], (slopes, np.ones((2, 2))))


def test_derivatives_of_the_exponential_of_a_sine():
    """Three orders along ones, with nested `jvp`."""
    expected = [
        [[1.2533808, -1.0331168], [-1.1400385, -0.3066662]],
        [[-1.2748207, -1.8274734], [0.966121, 0.55551505]],
        [[-4.0515366, 3.6724353], [0.5053504, -0.52061415]],
    ]
    along_ones = lambda fun: lambda x: jvp(fun, (x,), (jnp.ones_like(x),))[1]
    fun = lambda x: jnp.exp(jnp.sin(x))
    for values in expected:
        fun = along_ones(fun)
        assert_close(fun(X), np.array(values), 3e-6)  # the reference values are float32


def test_the_hessian_of_a_sum_of_cubes():
    modes = ("fwd_rev", "rev_rev", "fwd_fwd", "rev_fwd")
    every = jax.jit(lambda a: {mode: hessian(lambda a: (a**3).sum(), mode=mode)(a) for mode in modes})
    assert_close(every(np.array([1.0, 2.0])), dict.fromkeys(modes, np.diag([6.0, 12.0])))


def tanh_layer(weight, bias, x):
    return jnp.tanh(weight @ x + bias)


@pytest.mark.parametrize(("inputs", "outputs", "mode"), [(32, 2048, "forward"), (2048, 32, "reverse"), (16, 16, None)])
def test_the_jacobian_of_a_tanh_layer_takes_the_shorter_side(inputs, outputs, mode):
    weight = np.sin(np.arange(outputs * inputs)).reshape(outputs, inputs) / 9
    bias, x = np.cos(np.arange(outputs)), np.linspace(-1, 1, inputs)
    rows = jacobian(tanh_layer, 2)
    choice = rows.explain(weight, bias, x)
    assert choice.mode == mode or mode is None
    slope = 1 - np.tanh(weight @ x + bias) ** 2
    assert_close(jax.jit(rows)(weight, bias, x), slope[:, None] * weight)
    if mode is None:
        unrolled = [vjp(lambda x: tanh_layer(weight, bias, x), x)[1](row)[0] for row in np.eye(outputs)]
        assert_close(np.stack(unrolled), slope[:, None] * weight)


def test_the_hessians_of_a_wide_layer_are_equal():
    weight, x = np.sin(np.arange(32.0 * 512)).reshape(32, 512) / 9, np.linspace(-1, 1, 512)
    t = np.tanh(weight @ x)
    expected = np.einsum("o,oi,oj->oij", -2 * t * (1 - t**2), weight, weight)
    for mode in ("fwd_rev", "fwd_fwd", "rev_rev"):
        assert_close(jax.jit(hessian(lambda x: jnp.tanh(weight @ x), mode=mode))(x), expected)


def test_jacobians_and_hessians_of_a_batch():
    weight, bias = np.sin(np.arange(33.0 * 31)).reshape(33, 31) / 5, np.cos(np.arange(33.0))
    batch = np.sin(np.arange(64.0 * 31) ** 2).reshape(64, 31)
    fun = lambda x: jnp.tanh(x @ weight.T + bias)
    t = np.tanh(batch @ weight.T + bias)
    expected = (1 - t**2)[:, :, None] * weight
    assert expected.shape == (64, 33, 31)
    assert_close(jax.jit(batch_jacobian(fun, rows="independent"))(batch), expected)
    assert_close(jax.jit(batch_jacobian(fun))(batch), expected)
    assert_close(jax.jit(vmap(jacrev(fun)))(batch), expected)
    curvature = jax.jit(vmap(hessian(fun)))(batch)
    assert curvature.shape == (64, 33, 31, 31)
    assert_close(curvature, np.einsum("bo,oi,oj->boij", -2 * t * (1 - t**2), weight, weight))


def test_hessian_vector_products_of_a_sum_of_sines():
    x, v = np.linspace(-3, 3, 2048), np.cos(np.arange(2048.0))
    fun = lambda x: jnp.sum(jnp.sin(x))
    for mode in ("fwd_rev", "rev_rev", "rev_fwd"):
        assert_close(hvp(fun, x, v, mode=mode), -np.sin(x) * v)
    assert_close(vhp(fun, x, v), -np.sin(x) * v)


def test_a_module_in_the_place_of_its_weights():
    model = nnx.Linear(3, 2, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    x = np.array([0.5, -1.0, 2.0])
    slope = 1 - np.tanh(model(x)) ** 2
    for transform in (jacrev, jacfwd, jacobian):
        rows = transform(lambda m, x: jnp.tanh(m(x)))(model, x)
        assert_close(rows["kernel"][...], np.einsum("o,i,op->oip", slope, x, np.eye(2)))
        assert_close(rows["bias"][...], np.diag(slope))


# The same with a module as an argument.


def tanh_of(model, x):
    return jnp.tanh(model(x))


def linear(inputs, outputs):
    model: Any = nnx.Linear(inputs, outputs, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    model.kernel[...] = np.sin(np.arange(inputs * outputs)).reshape(inputs, outputs) / 9
    model.bias[...] = np.cos(np.arange(outputs))
    return model, np.asarray(model.kernel[...]).T


@pytest.mark.parametrize(("inputs", "outputs", "mode"), [(32, 2048, "forward"), (2048, 32, "reverse")])
def test_with_a_module_the_shorter_side_is_taken_too(inputs, outputs, mode):
    (model, weight), x = linear(inputs, outputs), np.linspace(-1, 1, inputs)
    rows = jacobian(tanh_of, 1)
    assert rows.explain(model, x).mode == mode
    assert_close(jax.jit(rows)(model, x), (1 - np.tanh(model(x)) ** 2)[:, None] * weight)


def test_hessians_with_and_by_a_module():
    (model, weight), x = linear(512, 32), np.linspace(-1, 1, 512)
    t = np.tanh(model(x))
    expected = np.einsum("o,oi,oj->oij", -2 * t * (1 - t**2), weight, weight)
    assert_close(jax.jit(hessian(tanh_of, 1))(model, x), expected)
    (model, _), x = linear(3, 2), np.array([0.5, -1.0, 2.0])
    t = np.tanh(model(x))
    curvature = -2 * t * (1 - t**2)
    for mode in ("fwd_rev", "fwd_fwd", "rev_rev"):
        blocks = jax.jit(hessian(tanh_of, mode=mode))(model, x)
        assert_close(blocks["bias"]["bias"][...], np.einsum("o,op,oq->opq", curvature, np.eye(2), np.eye(2)))
        expected = np.einsum("o,i,op,j,oq->oipjq", curvature, x, np.eye(2), x, np.eye(2))
        assert_close(blocks["kernel"]["kernel"][...], expected)


def test_a_batch_with_a_module_by_its_inputs_and_by_its_parameters():
    (model, weight), batch = linear(31, 33), np.sin(np.arange(64.0 * 31) ** 2).reshape(64, 31)
    t = np.tanh(model(batch))
    slope = 1 - t**2
    for rows in ("independent", "vmap"):
        of_inputs = jax.jit(batch_jacobian(tanh_of, 1, in_axes=(None, 0), rows=rows))(model, batch)
        assert_close(of_inputs, slope[:, :, None] * weight)
    of_bias = jax.jit(batch_jacobian(tanh_of, in_axes=(None, 0)))(model, batch)["bias"][...]
    assert_close(of_bias, slope[:, :, None] * np.eye(33))
    curvature = jax.jit(vmap(hessian(tanh_of, 1), (None, 0)))(model, batch)
    assert_close(curvature, np.einsum("bo,oi,oj->boij", -2 * t * slope, weight, weight))


class Angles(nnx.Module):
    def __init__(self, values):
        self.values = nnx.Param(jnp.asarray(values))


def test_products_of_a_sum_of_sines_of_parameters():
    x, v = np.linspace(-3, 3, 2048), np.cos(np.arange(2048.0))
    model, direction = Angles(x), nnx.state(Angles(v), nnx.Param)
    total = lambda model: jnp.sum(jnp.sin(model.values[...]))
    for mode in ("fwd_rev", "rev_rev", "rev_fwd"):
        assert_close(hvp(total, model, direction, mode=mode)["values"][...], -np.sin(x) * v)
    assert_close(vhp(total, model, direction)["values"][...], -np.sin(x) * v)
