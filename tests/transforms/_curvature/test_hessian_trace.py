"""Diagonals and traces against full Hessians, and an estimate against its expectation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from plurax.transforms import hessian, hessian_diagonal, hessian_trace, hutchinson_trace, laplacian, vmap

X = np.array([0.5, -1.0, 2.0], np.float32)
TREE = {"y": np.array([[1.0, -0.5], [2.0, 0.25], [0.5, 1.5]], np.float32), "s": np.float32(2.0)}


def mixed(x: Any, tree: Any, *, scale: Any = 1.0) -> Any:
    return scale * jnp.sum(jnp.sin(x @ tree["y"])) + tree["s"] ** 3 * jnp.sum(x**2)


def assert_close(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jnp.shape(x) == jnp.shape(y)
        assert jnp.result_type(x) == jnp.result_type(y)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def test_the_helper_detects_differences() -> None:
    with pytest.raises(AssertionError, match="tolerance"):
        assert_close(jnp.ones(2), 1.01 * jnp.ones(2))
    with pytest.raises(AssertionError):
        assert_close(jnp.ones(2), jnp.ones(2, int))


def diagonal(matrix: Any, like: Any) -> Any:
    """Return the diagonal of a nested Hessian, through a dense matrix."""
    size, shape = np.size(like), np.shape(like)
    return jnp.diagonal(jnp.asarray(matrix).reshape(size, size)).reshape(shape)


@pytest.fixture(scope="module")
def expected() -> Any:
    """Return the Hessian diagonal and trace of `mixed`."""
    by_tree, by_x = jax.jit(jax.hessian(mixed, (1, 0)))(X, TREE, scale=0.5)
    found = {name: diagonal(by_tree[name][0][name], TREE[name]) for name in TREE}, diagonal(by_x[1], X)
    return found, sum(jnp.sum(leaf) for leaf in jax.tree.leaves(found))


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{}, {"chunk_size": 1}, {"chunk_size": 4}, {"memory_budget": "1MiB"}])
def test_pytrees_argnums_and_keywords(limits: Any, expected: Any) -> None:
    assert_close(jax.jit(hessian_diagonal(mixed, (1, 0), **limits))(X, TREE, scale=0.5), expected[0])
    assert_close(jax.jit(hessian_trace(mixed, (1, 0), **limits))(X, TREE, scale=0.5), expected[1])


def test_one_argument_and_negative_argnums(expected: Any) -> None:
    assert_close(hessian_diagonal(mixed, -2)(X, TREE, scale=0.5), expected[0][1])
    assert_close(hessian_trace(mixed)(X, TREE, scale=0.5), expected[0][1].sum())


@pytest.mark.slow
def test_a_large_hessian_fits_into_a_small_budget() -> None:
    weights = jax.random.normal(jax.random.key(0), (300, 20)) / 20

    def fun(x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ weights) ** 2)

    x = jnp.linspace(-1, 1, 300)
    need = {}
    for budget in (None, "20KiB"):
        compiled = jax.jit(hessian_trace(fun, memory_budget=budget)).lower(x).compile()
        analysis: Any = compiled.memory_analysis()
        need[budget] = analysis.temp_size_in_bytes
        assert_close(compiled(x), jnp.trace(jax.hessian(fun)(x)), 1e-4)
    assert need["20KiB"] <= 20 * 1024 < need[None]


@pytest.mark.slow
def test_under_vmap_and_grad() -> None:
    rows = jnp.asarray(np.stack([X, X + 1, 2 * X, X - 3]))
    fun = lambda x: jnp.sum(jnp.sin(x) * x[0] ** 2)
    whole = jax.jit(jax.vmap(jax.hessian(fun)))(rows)
    assert_close(vmap(hessian_diagonal(fun))(rows), jnp.diagonal(whole, axis1=1, axis2=2))
    assert_close(jax.vmap(hessian_trace(fun, chunk_size=2))(rows), jnp.trace(whole, axis1=1, axis2=2))
    assert_close(
        jax.jit(jax.grad(hessian_trace(fun, chunk_size=2)))(X), jax.grad(lambda x: jnp.trace(jax.hessian(fun)(x)))(X)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float16, 2e-2), (jnp.bfloat16, 5e-2), (jnp.float64, 1e-12)])
def test_dtypes(dtype: Any, tolerance: float) -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(X, dtype)
        fun = lambda x: jnp.sum(x**3) * x[0]
        assert_close(hessian_diagonal(fun)(x), jnp.diagonal(jax.hessian(fun)(x)), tolerance)
        assert hessian_trace(fun)(x).dtype == dtype


@pytest.mark.slow
def test_modules_and_aux() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.dense = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
            self.calls = nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x: Any) -> Any:
            self.calls[...] += 1
            return jnp.tanh(self.dense(x))

    model = Model()
    fun = lambda model, x: (jnp.sum(model(x) ** 2), {"said": "said", "x": x, "model": model(x)})
    found, aux = hessian_diagonal(fun, has_aux=True)(model, X)
    assert float(model.calls[...]) == 2
    assert aux.pop("said") == "said"
    assert_close((jnp.asarray(aux["x"]), aux["model"]), (jnp.asarray(X), model(X)))
    whole = hessian(fun, has_aux=True)(model, X)[0]
    for name in ("kernel", "bias"):
        matrix = whole["dense"][name]["dense"][name][...]
        assert_close(found["dense"][name][...], diagonal(matrix, getattr(model.dense, name)[...]))
    trace, _ = hessian_trace(fun, has_aux=True)(model, X)
    assert_close(trace, sum(jnp.sum(leaf) for leaf in jax.tree.leaves(found)))


def test_functions_without_forward_mode() -> None:
    @jax.custom_vjp
    def cube(x: Any) -> Any:
        return x**3

    cube.defvjp(lambda x: (cube(x), x), lambda x, g: (3 * g * x**2,))
    assert_close(hessian_diagonal(lambda x: jnp.sum(cube(x)))(X), jnp.asarray(6 * X))


@jax.custom_vjp
def fourth_power(x: Any) -> Any:
    """A function whose gradient has no forward mode either."""
    return x**4


@jax.custom_vjp
def its_slope(x: Any) -> Any:
    return 4 * x**3


fourth_power.defvjp(lambda x: (fourth_power(x), x), lambda x, g: (g * its_slope(x),))
its_slope.defvjp(lambda x: (its_slope(x), x), lambda x, g: (12 * g * x**2,))


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_functions_whose_gradient_has_no_forward_mode(chunk_size: Any) -> None:
    fun = lambda x, y: jnp.sum(fourth_power(x)) * y[0, 1]
    y = np.array([[1.0, 2.0]], np.float32)
    chunks: Any = {"chunk_size": chunk_size}
    assert_close(hessian_diagonal(fun, **chunks)(X, y), jnp.asarray(24 * X**2))
    for trace in (hessian_trace, laplacian):
        np.testing.assert_allclose(trace(fun, (0, 1), **chunks)(X, y), 24 * (X**2).sum(), rtol=1e-5)
        np.testing.assert_allclose(jax.jit(trace(fun, **chunks))(X, y), 24 * (X**2).sum(), rtol=1e-5)
    mean, error = hutchinson_trace(fun, 3, **chunks)(jax.random.key(0), X, y)
    np.testing.assert_allclose(mean, 24 * (X**2).sum(), rtol=1e-5)
    np.testing.assert_allclose(error, 0, atol=1e-4)


def test_a_loop_without_reverse_mode() -> None:
    fun = lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x), (0, x))[1].sum()  # x**4
    assert_close(hessian_diagonal(fun)(X), jnp.asarray(12 * X**2))


def test_no_hessian_is_formed() -> None:
    shapes = str(jax.make_jaxpr(hessian_trace(lambda x: jnp.sum(x**3), chunk_size=5))(jnp.ones(700)))
    assert "700,700" not in shapes


def test_empty_and_scalar_arguments() -> None:
    assert hessian_diagonal(jnp.sum)(np.zeros((0, 2), np.float32)).shape == (0, 2)
    assert float(hessian_trace(jnp.sum)(np.zeros((0, 2), np.float32))) == 0
    assert float(hessian_diagonal(lambda x: x**3 if x > 0 else x)(2.0)) == 12


class Test_the_estimate:
    def quadratic(self) -> tuple[Any, Any]:
        matrix = jax.random.normal(jax.random.key(3), (12, 12))
        matrix = matrix + matrix.T
        return matrix, lambda x, scale=1.0: scale * x @ matrix @ x / 2

    def test_covers_the_trace_as_often_as_stated(self) -> None:
        matrix, fun = self.quadratic()
        estimate = jax.jit(jax.vmap(hutchinson_trace(fun, 20), (0, None)))
        means, errors = estimate(jax.random.split(jax.random.key(0), 4000), jnp.ones(12))
        inside = np.abs(means - jnp.trace(matrix)) <= stats.t.ppf(0.975, 19) * errors
        # Each interval covers with 95 %; of 4000, a share within 0.9366 and 0.9634 has probability 99.99 % for normal
        # estimates, and these nearly are.
        assert 0.93 < float(inside.mean()) < 0.97
        spread = float(
            means.std() / np.sqrt(2 * (np.sum(np.square(matrix)) - np.sum(np.square(np.diagonal(matrix)))) / 20)
        )
        assert 0.9 < spread < 1.1  # variance of the off-diagonal; false alarms below 1e-10

    @pytest.mark.slow
    def test_is_that_of_a_plain_loop(self) -> None:
        _, fun = self.quadratic()
        x, key = jnp.linspace(-1, 1, 12), jax.random.key(7)
        found = [hutchinson_trace(fun, 6, chunk_size=k)(key, x, scale=2.0) for k in (None, 1, 4)]
        for other in found[1:]:
            assert_close(other, found[0], 1e-5)
        matrix, values = 2 * jax.hessian(fun)(x), []
        for i in range(6):
            (key_of_array,) = jax.random.split(jax.random.fold_in(key, i), 1)
            v = jax.random.rademacher(key_of_array, (12,), jnp.float32)
            values.append(float(v @ matrix @ v))
        assert_close(
            [np.float32(x) for x in found[0]], [np.float32(np.mean(values)), np.float32(stats.sem(values))], 1e-4
        )

    def test_takes_pytrees_and_argnums(self) -> None:
        exact = hessian_trace(mixed, (0, 1))(X, TREE)
        mean, error = jax.jit(hutchinson_trace(mixed, 4000, (0, 1), chunk_size=500))(jax.random.key(1), X, TREE)
        assert abs(float(mean - exact)) < 5 * float(error)  # false alarms below 1e-6
        assert 0 < float(error) < 0.1 * abs(float(exact))

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ((jnp.sum, 1), ValueError, "samples must be at least 2, but got 1"),
            ((jnp.sum, 2.0), TypeError, "samples must be an int, but got"),
            ((3, 2), TypeError, "fun must be callable|must be a function"),
        ],
    )
    def test_refusals(self, arguments: Any, error: Any, message: str) -> None:
        with pytest.raises(error, match=message):
            hutchinson_trace(*arguments)

    @pytest.mark.slow
    def test_counts_may_be_numpy_integers(self) -> None:
        estimate = hutchinson_trace(mixed, np.int64(4), (0, 1), chunk_size=np.int32(3))
        expected = hutchinson_trace(mixed, 4, (0, 1))
        key = jax.random.key(0)
        assert_close(estimate(key, X, TREE), expected(key, X, TREE))

    @pytest.mark.parametrize("key", [0, np.ones(2), jnp.ones(2, jnp.uint32), jax.random.split(jax.random.key(0))])
    def test_refuses_invalid_keys(self, key: Any) -> None:
        with pytest.raises(TypeError, match="hutchinson_trace: the first argument must be one key, such as"):
            hutchinson_trace(jnp.sum, 2)(key, X)


@pytest.mark.parametrize(
    "transform", [hessian_diagonal, hessian_trace, lambda f: lambda x: hutchinson_trace(f, 2)(jax.random.key(0), x)]
)
def test_refusals(transform: Any) -> None:
    with pytest.raises(TypeError, match="fun must return a real scalar|one real scalar|scalar"):
        transform(jnp.sin)(X)
    with pytest.raises(TypeError, match="only real floating-point arrays can be differentiated"):
        transform(jnp.sum)(jnp.arange(3))
    with pytest.raises(TypeError, match="only real floating-point arrays can be differentiated"):
        transform(lambda x: jnp.sum(jnp.abs(x)))(jnp.ones(2, complex))


@pytest.mark.parametrize("transform", [hessian_diagonal, hessian_trace])
def test_options_are_checked(transform: Any) -> None:
    name = transform.__name__
    with pytest.raises(ValueError, match=f"{name}: chunk_size must be at least 1, but got 0"):
        transform(jnp.sum, chunk_size=0)
    with pytest.raises(ValueError, match=f"{name}: chunk_size and memory_budget both set the chunk"):
        transform(jnp.sum, chunk_size=1, memory_budget=100)
    with pytest.raises(ValueError, match=f"{name}: no chunk fits into memory_budget=1 B"):
        transform(lambda x: jnp.sum(jnp.sin(x) ** 2), memory_budget=1)(jnp.ones(40))
