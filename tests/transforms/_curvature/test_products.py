"""`hvp`, `vhp`, `gnvp` and `value_grad_and_hvp` against dense matrices, and their cost."""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from plurax.transforms import gnvp, grad, hvp, value_grad_and_hvp, vhp, vmap

pytestmark = pytest.mark.smoke

X = np.array([0.5, -1.0, 2.0], np.float32)
V = np.array([1.0, 0.5, -2.0], np.float32)
Y = np.array([[1.0, -0.5], [2.0, 0.25], [0.5, 1.5]], np.float32)
MODES = ["auto", "fwd_rev", "rev_rev", "rev_fwd"]


class Point(NamedTuple):
    x: Any
    y: Any


class Counted(nnx.Module):
    def __init__(self) -> None:
        self.gain = nnx.Param(jnp.array([1.0, -2.0, 3.0]))
        self.count = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> jax.Array:
        self.count[...] += 1
        return jnp.sum(jnp.sin(x * self.gain[...]))


def mixed(x: Any, tree: Any) -> Any:
    return jnp.sum(jnp.sin(x @ tree["y"])) + jnp.sum(x**3)


def assert_close(actual: Any, expected: Any) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_helper_detects_differences() -> None:
    with pytest.raises(AssertionError, match="close"):
        assert_close(jnp.ones(2), 1.01 * jnp.ones(2))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_products_over_all_primals_in_every_mode(mode: str) -> None:
    """The derivative of the gradient along the tangents, mixed derivatives included."""
    primals, tangents = (X, {"y": Y}), (V, {"y": np.cos(Y)})
    expected = jax.jvp(jax.grad(mixed, (0, 1)), primals, tangents)[1]
    assert_close(hvp(mixed, primals, tangents, mode=mode), expected)
    alone = hvp(lambda x: mixed(x, {"y": Y}), X, V, mode=mode)
    assert_close(alone, jax.hessian(mixed)(X, {"y": Y}) @ V)
    assert_close(vhp(mixed, primals, tangents), expected)


def test_one_primal_may_be_any_pytree_but_a_tuple() -> None:
    point, along = Point(X, 2.0), Point(V, 1.0)
    product = hvp(lambda p: jnp.sum(p.x**2) * p.y, point, along)
    assert isinstance(product, Point)
    assert_close(product, jax.jvp(jax.grad(lambda p: jnp.sum(p.x**2) * p.y), (point,), (along,))[1])
    assert float(hvp(lambda x: x**3, 2.0, 1)) == 12.0
    assert isinstance(hvp(lambda x: x**3, (2.0,), (1.0,)), tuple)


def test_the_function_runs_once_for_all_three() -> None:
    calls = []

    def counted(x: Any) -> Any:
        calls.append(x)
        return jnp.sum(x**3), {"aux": "a string", "x": x}

    value, gradient, product, aux = value_grad_and_hvp(counted, X, V, has_aux=True)
    assert len(calls) == 1
    assert_close((value, gradient, product), (jnp.sum(X**3), jnp.asarray(3 * X**2), jnp.asarray(6 * X * V)))
    assert aux["aux"] == "a string"
    for mode in MODES:
        assert_close(hvp(counted, X, V, mode=mode, has_aux=True)[0], jnp.asarray(6 * X * V))
    vhp(counted, X, V, has_aux=True)
    gnvp(lambda x: counted(x)[0], jnp.square, X, V)
    assert len(calls) == 7


@pytest.mark.parametrize("mode", MODES)
def test_modules_are_supported_and_updated_once(mode: str) -> None:
    model = Counted()
    tangent = jax.tree.map(lambda _: jnp.asarray(V), nnx.state(model, nnx.Param))
    gain = np.array([1.0, -2.0, 3.0], np.float32)
    product = hvp(lambda m: m(X), model, tangent, mode=mode)
    assert isinstance(product, nnx.State)
    assert_close(product["gain"][...], jnp.asarray(-np.sin(X * gain) * X**2 * V))
    assert_close(hvp(model, X, V, mode=mode), jnp.asarray(-np.sin(X * gain) * gain**2 * V))
    assert int(model.count[...]) == 2
    gauss_newton = gnvp(lambda m: m(X), lambda y: y**2, model, tangent)
    slope = np.cos(X * gain) * X
    assert_close(gauss_newton["gain"][...], jnp.asarray(2 * slope * (slope @ V)))
    assert int(model.count[...]) == 3


def flops(fun: Any, *args: Any) -> float:
    analysis: Any = jax.jit(fun).lower(*args).compile().cost_analysis()
    return float(analysis["flops"])


def test_the_cost_of_a_product() -> None:
    n, hidden = 64, 96
    weights = {"a": jnp.ones((hidden, n)) / n, "b": jnp.ones((hidden, hidden)) / n, "c": jnp.ones((hidden,))}

    def mlp(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(w["b"] @ jnp.tanh(w["a"] @ x.T)) * w["c"][:, None])

    x = jnp.ones((32, n))
    for_inputs = flops(lambda w, x, v: hvp(lambda x: mlp(w, x), x, v), weights, x, x)
    assert for_inputs <= 4.2 * flops(mlp, weights, x)
    for_parameters = flops(lambda w, x, v: hvp(lambda w: mlp(w, x), w, v), weights, x, weights)
    assert for_parameters <= 2.5 * flops(jax.grad(mlp), weights, x)
    sines = lambda x: jnp.sum(jnp.sin(x))
    counts = [
        float(jax.jit(f).lower(*a).compile().cost_analysis().get("transcendentals", 0))
        for f, a in (
            (sines, (x,)),
            (lambda x, v: hvp(sines, x, v), (x, x)),
        )
    ]
    assert counts[1] <= 4.2 * counts[0]


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=10)
def test_the_gauss_newton_matrix_of_a_convex_loss_is_positive_semidefinite(data: st.DataObject) -> None:
    numbers = st.floats(-2, 2, allow_subnormal=False, width=32)
    x, v, bias = (np.array(data.draw(st.lists(numbers, min_size=3, max_size=3)), np.float32) for _ in range(3))
    loss = data.draw(st.sampled_from([lambda y: jnp.sum(y**4), jax.nn.logsumexp, lambda y: jnp.sum(jnp.cosh(y))]))
    model = lambda x: jnp.sin(x @ Y) * jnp.tanh(x + bias)[:2]
    product = gnvp(model, loss, x, v)
    rows = jax.jacrev(model)(x)
    expected = rows.T @ jax.hessian(loss)(model(x)) @ rows @ v
    chex.assert_trees_all_close(product, expected, rtol=1e-3, atol=1e-3)
    assert float(v @ product) >= -1e-3


def test_gauss_newton_of_pytrees_and_several_primals() -> None:
    model = lambda x, tree: {"a": x @ tree["y"], "b": [jnp.sum(x**2)]}
    loss = lambda out: jnp.sum(jnp.exp(out["a"])) + out["b"][0] ** 2
    primals, tangents = (X, {"y": Y}), (V, {"y": np.cos(Y)})
    out, pushed = jax.jvp(model, primals, tangents)
    curved = jax.jvp(jax.grad(loss), (out,), (pushed,))[1]
    assert_close(gnvp(model, loss, primals, tangents), jax.vjp(model, *primals)[1](curved))
    many = vmap(lambda v: gnvp(lambda x: x**2, jnp.sum, X, v))(np.eye(3, dtype=np.float32))
    assert_close(many, jnp.zeros((3, 3)))


def test_rules_of_the_user() -> None:
    rule = jax.custom_vjp(jnp.sin)
    rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, seed: (2 * jnp.cos(x) * seed,))
    for product in (hvp, vhp):
        assert_close(product(lambda x: jnp.sum(rule(x)), X, V), jnp.asarray(-2 * np.sin(X) * V))
    assert_close(grad(lambda x: hvp(lambda x: jnp.sum(x**3), x, V) @ V)(X), jnp.asarray(6 * V**2))


@jax.custom_vjp
def cube(x: Any) -> Any:
    """A function whose gradient has no forward mode either."""
    return x**3


@jax.custom_vjp
def thrice_square(x: Any) -> Any:
    return 3 * x**2


cube.defvjp(lambda x: (cube(x), x), lambda x, g: (g * thrice_square(x),))
thrice_square.defvjp(lambda x: (thrice_square(x), x), lambda x, g: (6 * g * x,))


def no_forward_mode(x: Any, tree: Any) -> Any:
    return jnp.sum(cube(x @ tree["y"])) + jnp.sum(x**2)


def with_forward_mode(x: Any, tree: Any) -> Any:
    return jnp.sum((x @ tree["y"]) ** 3) + jnp.sum(x**2)


def test_functions_whose_gradient_has_no_forward_mode() -> None:
    primals, tangents = (X, {"y": Y}), (V, {"y": np.cos(Y)})
    expected = jax.jvp(jax.grad(with_forward_mode, (0, 1)), primals, tangents)[1]
    assert_close(hvp(no_forward_mode, primals, tangents), expected)
    assert_close(jax.jit(lambda *p: hvp(no_forward_mode, p, tangents))(*primals), expected)
    value, gradients, products = value_grad_and_hvp(no_forward_mode, primals, tangents)
    assert_close(products, expected)
    assert_close((value, gradients), jax.value_and_grad(with_forward_mode, (0, 1))(*primals))
    mapped = vmap(lambda v: hvp(lambda x: no_forward_mode(x, {"y": Y}), X, v))(jnp.eye(3))
    assert_close(mapped, jax.hessian(with_forward_mode)(X, {"y": Y}))
    with pytest.raises(TypeError, match="custom_vjp"):
        hvp(no_forward_mode, primals, tangents, mode="fwd_rev")
    with pytest.raises(TypeError, match="unsupported operand"):
        hvp(lambda x: x + "a", X, V)


def test_gauss_newton_of_a_model_without_forward_mode() -> None:
    model, plain = (lambda x, f=f: {"a": f(x[:2]) * x[2], "b": jnp.sin(x)} for f in (cube, lambda x: x**3))
    loss = lambda out: jnp.sum(cube(out["a"])) + jnp.sum(out["b"] ** 2 * out["a"][0])
    plain_loss = lambda out: jnp.sum(out["a"] ** 3) + jnp.sum(out["b"] ** 2 * out["a"][0])
    expected = gnvp(plain, plain_loss, X, V)
    assert_close(gnvp(model, loss, X, V), expected)
    assert_close(jax.jit(lambda x, v: gnvp(model, loss, x, v))(X, V), expected)


@pytest.mark.parametrize("product", [hvp, vhp, value_grad_and_hvp])
@pytest.mark.parametrize(
    ("fun", "primals", "tangents", "error", "match"),
    [
        (jnp.sin, X, V, TypeError, r"fun must return one real scalar, but it returned an array of shape \(3,\)"),
        (lambda x: (jnp.sum(x), 1), X, V, TypeError, r"fun must return one real scalar, but it returned a pytree"),
        (lambda x: jnp.sum(x) * 1j, X, V, TypeError, r"fun must return one real scalar, .* complex64; convert it"),
        (jnp.sum, np.arange(2), np.arange(2), TypeError, r"argument `.*` is an array .* int64, but only floating"),
        (
            jnp.sum,
            X,
            V[:2],
            ValueError,
            r"the tangent of `.*` is an array of shape \(2,\) .* the primal has shape \(3,",
        ),
        (jnp.sum, X, V.astype(np.float16), ValueError, r"the tangent of `.*` is an array .* float16"),
        (jnp.sum, X, [V], ValueError, r"the tangent of `.*` has the structure PyTreeDef\(\[\*\]\), but the primal has"),
        (mixed, (X, {"y": Y}), (V,), TypeError, r"tangents must be a tuple with one entry for each of the 2 primals"),
        ("f", X, V, TypeError, r"fun must be a function, a bound method or a module"),
        (jnp.sum, (), (), TypeError, r"primals must be a tuple with the arguments of fun, but got \(\) of type tuple"),
    ],
)
def test_undefined_products_are_refused(
    product: Any, fun: Any, primals: Any, tangents: Any, error: Any, match: str
) -> None:
    with pytest.raises(error, match=f"^{product.__name__}: {match}"):
        product(fun, primals, tangents)


def test_refusals_of_modes_and_losses() -> None:
    with pytest.raises(
        ValueError, match=r"^hvp: mode must be one of 'auto', 'fwd_rev', 'rev_rev', 'rev_fwd', but got 'fwd'"
    ):
        hvp(jnp.sum, X, V, mode="fwd")
    with pytest.raises(TypeError, match=r"^gnvp \(loss\): fun must return one real scalar, but it returned an array"):
        gnvp(jnp.sin, jnp.sin, X, V)
    with pytest.raises(TypeError, match=r"^gnvp: argument `.*` is an array .* int64, but only floating-point ar"):
        gnvp(jnp.sin, jnp.sum, np.arange(2), np.arange(2))
    with pytest.raises(ValueError, match=r"^gnvp: the tangent of `.*` is an array of shape \(2,\)"):
        gnvp(jnp.sin, jnp.sum, X, V[:2])
