"""`hessian` in every mode against `jax.hessian` and closed forms."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.transforms import hessian

pytestmark = pytest.mark.smoke

X = np.array([0.5, -1.0, 2.0], np.float32)
Y = np.array([[1.0, -0.5], [2.0, 0.25], [0.5, 1.5]], np.float32)
MODES = ["auto", "fwd_rev", "rev_rev", "fwd_fwd", "rev_fwd"]


def mixed(x: Any, tree: Any, *, scale: Any = 1.0) -> Any:
    return scale * jnp.sum(jnp.sin(x @ tree["y"])) + tree["s"] ** 3 * jnp.sum(x**2)


def assert_close(actual: Any, expected: Any) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_helper_detects_differences() -> None:
    with pytest.raises(AssertionError, match="close"):
        assert_close(jnp.ones(2), 1.01 * jnp.ones(2))


@pytest.fixture(scope="module")
def expected() -> Any:
    return jax.jit(jax.hessian(mixed, (1, 0)))(X, {"y": Y, "s": np.float32(2.0)}, scale=0.5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_every_mode_nests_as_jax(mode: str, chunk_size: Any, expected: Any) -> None:
    every = jax.jit(hessian(mixed, (1, 0), mode=mode, chunk_size=chunk_size))
    assert_close(every(X, {"y": Y, "s": np.float32(2.0)}, scale=0.5), expected)


@pytest.mark.parametrize("mode", MODES[1:])
def test_outputs_of_any_shape(mode: str) -> None:
    vector = lambda x: {"a": jnp.stack([x[0] * x[1], jnp.sum(x**3)]), "b": jnp.prod(x)}
    assert_close(jax.jit(hessian(vector, mode=mode))(X), jax.jit(jax.hessian(vector))(X))
    assert hessian(lambda x: jnp.sum(x), mode=mode)(np.zeros((0, 2), np.float32)).shape == (0, 2, 0, 2)
    assert float(hessian(lambda x: x**3 if x > 0 else x, mode=mode)(2.0)) == 12.0


def test_aux_and_bfloat16() -> None:
    found, aux = hessian(lambda x: (jnp.sum(x**3), {"s": "a string", "x": x}), has_aux=True)(X)
    assert_close((found, aux.pop("x")), (jnp.diag(6 * X), jnp.asarray(X)))
    assert aux == {"s": "a string"}
    assert hessian(lambda x: jnp.sum(x**2))(jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("mode", MODES[1:])
def test_modules_are_updated_once(mode: str) -> None:
    class Counted(nnx.Module):
        def __init__(self) -> None:
            self.gain = nnx.Param(jnp.array([1.0, -2.0, 3.0]))
            self.count = nnx.BatchStat(jnp.zeros((), jnp.int32))

        def __call__(self, x: Any) -> jax.Array:
            self.count[...] += 1
            return jnp.sum(jnp.sin(x * self.gain[...]))

    model = Counted()
    curvature = -np.sin(X * np.array([1.0, -2.0, 3.0]))
    by_parameters = hessian(lambda m, x: m(x), mode=mode)(model, X)
    (leaf,) = jax.tree.leaves(by_parameters)
    assert_close(leaf, jnp.asarray(np.diag(curvature * X**2), jnp.float32))
    assert int(model.count[...]) == 1
    gain = np.array([1.0, -2.0, 3.0])
    assert_close(hessian(model, mode=mode)(X), jnp.asarray(np.diag(curvature * gain**2), jnp.float32))
    assert int(model.count[...]) == 2


@jax.custom_vjp
def cube(x: Any) -> Any:
    """A function whose gradient has no forward mode either."""
    return x**3


@jax.custom_vjp
def thrice_square(x: Any) -> Any:
    return 3 * x**2


cube.defvjp(lambda x: (cube(x), x), lambda x, g: (g * thrice_square(x),))
thrice_square.defvjp(lambda x: (thrice_square(x), x), lambda x, g: (6 * g * x,))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"memory_budget": "1MiB"}])
def test_without_forward_mode_auto_is_reverse_over_reverse(options: Any, jitted: bool) -> None:
    fun = lambda x, y: {"a": jnp.sum(cube(x) * y[0, 0]), "b": cube(x[:2]) * y[0, 1]}
    plain = lambda x, y: {"a": jnp.sum(x**3 * y[0, 0]), "b": x[:2] ** 3 * y[0, 1]}
    found = hessian(fun, (0, 1), **options)
    result = (jax.jit(found) if jitted else found)(X, np.array([[0.5, 2.0]], np.float32))
    assert_close(result, jax.hessian(plain, (0, 1))(X, np.array([[0.5, 2.0]], np.float32)))
    with pytest.raises(TypeError, match="custom_vjp"):
        hessian(fun, mode="fwd_rev", **options)(X, np.ones((1, 2), np.float32))
    choice = hessian(fun, **options).explain(X, np.ones((1, 2), np.float32))
    assert choice.mode == "reverse"
    # A single element, whose derivative is not mapped, and a sparse Hessian.
    one = jax.jit(hessian(cube, **options))
    assert_close(one(jnp.float32(0.5)), jnp.float32(3.0))


def test_without_forward_mode_a_sparse_hessian_is_reverse_over_reverse() -> None:
    found = hessian(lambda x: jnp.sum(cube(x)), sparsity=np.eye(3, dtype=bool))
    assert_close(found(X).todense(), jnp.diag(6 * X))
    assert found.explain(X).mode == "reverse"


def test_a_mistake_in_the_function_is_raised_as_it_is() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        hessian(lambda x: x + "a")(X)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: hessian(jnp.sum, mode="fwd"), ValueError, r"mode must be one of 'auto', 'fwd_rev', .* but got 'fwd'"),
        (
            lambda: hessian(jnp.sum, sparsity=1),
            TypeError,
            r"a sparsity pattern must be a BCOO, SciPy sparse or boolean array",
        ),
        (lambda: hessian(jnp.sum, chunk_size=0), ValueError, r"chunk_size must be at least 1"),
        (lambda: hessian("f"), TypeError, r"fun must be a function"),
        (lambda: hessian(jnp.sum, ()), ValueError, r"argnums is empty"),
        (lambda: hessian(lambda x: x)(3), TypeError, r"argument `x` is 3 of type int, but only real floating-point"),
        (lambda: hessian(lambda x: 1)(3.0), TypeError, r"`output` is .* but only floating-point arrays have deriv"),
        (lambda: hessian(mixed, 2)(X, X), ValueError, r"argnums selects argument 2"),
    ],
)
def test_refusals_name_the_hessian(call: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=f"^hessian: {match}"):
        call()


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("mode", ["auto", "rev_rev", "fwd_fwd", "rev_fwd"])
def test_holomorphic_functions_have_complex_hessians(mode: str, chunk_size: Any) -> None:
    z = np.array([0.5 + 1j, -1.0 - 0.25j, 2j], np.complex64)
    fun = lambda z: {"a": jnp.sum(jnp.sin(z) * z[::-1] ** 2), "b": z[:2] ** 3}
    found = hessian(fun, mode=mode, chunk_size=chunk_size, holomorphic=True)(z)
    chex.assert_trees_all_close(found, jax.hessian(fun, holomorphic=True)(z), rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match=r"^hessian: argument `z` is .* complex64, but only real floating-point"):
        hessian(lambda z: jnp.sum(jnp.abs(z)), mode=mode)(z)
    with pytest.raises(ValueError, match=r"^hessian: sparsity is for real arguments; leave out holomorphic and"):
        hessian(fun, mode=mode, sparsity="auto", holomorphic=True)
