"""`convolutions_as_products`, against the function that it wraps; the products have tests in `_convolutions`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.transforms import grad, value_and_grad, vmap
from plurax.transforms.program import _convolutions, accumulate, convolutions_as_products

X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 9, 8, 2)), jnp.float32)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dtype: Any = jnp.float32) -> None:
        self.first = nnx.Conv(2, 4, (3, 2), strides=(2, 1), rngs=rngs, dtype=dtype)
        self.norm = nnx.BatchNorm(4, rngs=rngs, dtype=dtype)
        self.second = nnx.Conv(4, 6, (2, 2), padding="VALID", feature_group_count=2, rngs=rngs, dtype=dtype)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.gelu(self.norm(self.first(x))), (2, 2), (2, 1))
        return self.dropout(self.second(x)).reshape(len(x), -1)


def loss(model: Net, x: jax.Array, scale: float = 1.0, kind: str = "squares") -> Any:
    out = model(x)
    value = (out.astype(jnp.float32) ** 2).mean() if kind == "squares" else jnp.abs(out).mean()
    return value * scale, {"largest": out.max()}


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        x, y = (z.astype(jnp.float32) if jnp.issubdtype(z.dtype, jnp.floating) else z for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 5e-2)])
def test_values_gradients_and_state_are_those_of_the_function(dtype: Any, tolerance: float) -> None:
    found, expected = (Net(nnx.Rngs(0), dtype) for _ in range(2))
    gradient = value_and_grad(loss, has_aux=True)
    rewritten, reference = (
        nnx.jit(fun, static_argnames="kind") for fun in (convolutions_as_products(gradient), gradient)
    )
    for _ in range(2):
        close(rewritten(found, X, 2.0), reference(expected, X, 2.0), tolerance)
    other = convolutions_as_products(gradient) if dtype == jnp.float32 else rewritten  # once outside of jit
    close(other(found, X, kind="other"), reference(expected, X, kind="other"), tolerance)
    keys = nnx.RngKey
    close(nnx.state(found, nnx.Not(keys)), nnx.state(expected, nnx.Not(keys)), tolerance)
    assert found.dropout.rngs.count[...] == expected.dropout.rngs.count[...] == 3


def test_no_convolution_and_no_pooling_is_left() -> None:
    model = nnx.view(Net(nnx.Rngs(0)), deterministic=True, use_running_average=True)
    graph, state, rest = nnx.split(model, nnx.Param, ...)

    def of_state(state: Any, x: jax.Array) -> jax.Array:
        return (nnx.merge(graph, state, rest)(x) ** 2).sum()

    for fun in (of_state, jax.grad(of_state, (0, 1))):
        before, after = (str(jax.make_jaxpr(f)(state, X)) for f in (fun, convolutions_as_products(fun)))
        for name in ("conv_general_dilated", "reduce_window", "select_and_scatter"):
            assert name not in after, name
        assert "conv_general_dilated" in before
        close(jax.jit(convolutions_as_products(fun))(state, X), jax.jit(fun)(state, X), 1e-4)


@pytest.mark.slow
def test_inside_jit_vmap_and_scan() -> None:
    kernel = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3, 2, 5)), jnp.float32)

    def of_image(image: jax.Array, kernel: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jnp.sin(
            jax.lax.conv_general_dilated(image[None], kernel, (1, 1), "SAME", dimension_numbers=numbers)
        ).sum()

    gradient = jax.grad(of_image, 1)
    rewritten = convolutions_as_products(gradient)
    reference = jax.jit(gradient)
    each = np.stack([reference(image, kernel) for image in np.asarray(X)])
    close(jax.jit(vmap(rewritten, (0, None)))(X, kernel), each)
    close(jax.vmap(rewritten, (0, None))(X, kernel), each)
    close(jax.lax.map(lambda image: rewritten(image, kernel), X), each)
    many = lambda kernel, x: jax.vmap(gradient, (0, None))(x, kernel).mean(0)
    close(convolutions_as_products(accumulate(many, 3))(kernel, X), each.mean(0))
    with jax.enable_x64(True):
        image, wide = (jnp.asarray(np.asarray(x, np.float64)) for x in (X[0], kernel))
        close(rewritten(image, wide), reference(image, wide), 1e-12)


@pytest.mark.parametrize(
    "transform", [jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: lambda x: jax.jvp(f, (x,), (x,))]
)
def test_a_derivative_of_the_result_is_refused(transform: Any) -> None:
    fun = convolutions_as_products(lambda x: (x**2).sum())
    with pytest.raises(TypeError, match=r"^convolutions_as_products: .* wrap the derivative instead"):
        transform(fun)(X)
    close(jax.grad(lambda x: fun(jax.lax.stop_gradient(x)) + x.sum())(X), jnp.ones_like(X))


def test_on_other_platforms_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_convolutions, "platform", lambda: "gpu")
    model = nnx.Conv(2, 4, (3, 3), rngs=nnx.Rngs(0))
    fun = grad(lambda x: model(x).sum())
    assert str(jax.make_jaxpr(convolutions_as_products(fun))(X)) == str(jax.make_jaxpr(fun)(X))


def test_methods_and_modules() -> None:
    model = Net(nnx.Rngs(0))
    model.eval()
    expected = model(X)
    close(convolutions_as_products(model)(X), expected)
    close(convolutions_as_products(model.__call__)(X), expected)


def test_refusals() -> None:
    with pytest.raises(TypeError, match="convolutions_as_products"):
        convolutions_as_products(3)
    shared = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="share the variable"):
        convolutions_as_products(lambda a, b: a.kernel[...] + b.kernel[...])(shared, shared)

    def assigns(model: nnx.Linear) -> jax.Array:
        model.kernel[...] = model.kernel[...] + 1
        return model.kernel[...]

    with pytest.raises(ValueError, match="assigns the parameter `kernel`"):
        convolutions_as_products(assigns)(shared)
