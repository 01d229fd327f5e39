"""Operations with unusual gradient paths: every method gives the result of `jax.grad` per example."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.sparse.linalg import cg

from plurax.transforms import clipped_grad, per_sample_grad, per_sample_norm

METHODS = ("auto", "vmap", "ghost", "book_keeping")
X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
Q = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
# In range, at the end, slightly and far out of range.
PLACES = np.array([[0], [2], [-1], [-4], [3], [100]])
TABLE, STACK = (np.random.default_rng(2).normal(size=shape).astype(np.float32) for shape in [(300, 3), (2, 3, 3)])
BYTES = np.random.default_rng(3).integers(0, 127, size=(4, 6)) * np.array([1, 1, 1, -1, 2, 1])
ZEROS = X * np.float32([[1], [0], [1], [np.nan], [np.inf]])


def spun(x: Any) -> Any:
    """Return `x` with imaginary parts."""
    return x[0] * jnp.exp(1j * x[0])


def square(q: Any) -> Any:
    return q @ q.T + 3 * jnp.eye(3)


@jax.custom_vjp
def clipping(x: Any) -> Any:
    return x


clipping.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


def scaled_by_one_and(params: Any, x: Any) -> Any:
    """Gemma's normalization: its scale is computed from parameters and constants."""
    hidden = x[0] @ params["w"]
    hidden = hidden * lax.rsqrt(jnp.mean(hidden**2) + 1e-6) * (1 + params["scale"])
    return jnp.sum(hidden.astype(jnp.float32) ** 2 * jnp.arange(4))


def tied(table: Any, tokens: Any) -> Any:
    """Embed tokens, and compute logits with the same table."""
    hidden = table[tokens[0]].sum(0)
    return jnp.sum(jnp.sin((table @ hidden).astype(jnp.float32)))


def taking(mode: str) -> Any:
    return lambda q, i: jnp.sum(jnp.sin(jnp.take(q, i[0], axis=0, mode=mode, fill_value=0)) * jnp.arange(1.0, 4.0))


def tied_matrices(axes: Any) -> Any:
    """A table of matrices: rows are looked up, then multiplied by the transposed table."""
    return lambda q, i: jnp.sum(jnp.sin(jnp.tensordot(jnp.tanh(q[i[0]]), q.transpose(0, 2, 1), axes)))


def half(dtype: Any) -> Any:
    return {"w": jnp.asarray(Q, dtype), "scale": jnp.asarray([0.1, -0.2, 0.3, 0.5], dtype)}


def reading(mode: str) -> Any:
    return lambda q, i: jnp.sum(q.at[i[0]].get(mode=mode, fill_value=0) * jnp.arange(1.0, 5.0))


def reading_numbers(mode: str) -> Any:
    return lambda q, i: jnp.sum(3 * q.at[i[0], i[0] - 1].get(mode=mode, fill_value=0))


def writing(mode: str) -> Any:
    return lambda q, i: jnp.sum(jnp.sin(jnp.ones((3, 4)).at[i[0]].add(q[1] * i[0, 0], mode=mode)) * q)


OPERATIONS: dict[str, tuple[Any, Any, Any]] = {
    # Complex intermediates of real parameters.
    "a cast": (lambda q, x: jnp.real(spun(x) @ q.astype(complex)).sum(), Q, X),
    "a sum with 0j": (lambda q, x: jnp.imag(spun(x) @ (q + 0j)).sum(), Q, X),
    "parts": (lambda q, x: jnp.abs(spun(x) @ lax.complex(q, 2 * q) + 1j).sum(), Q, X),
    "a number": (lambda q, x: jnp.real(spun(x).sum() * (q[0, 0] + 1j * q[0, 1]) ** 2), Q, X),
    "a cast of a number": (lambda q, x: jnp.real(spun(x).sum() * q[0, 0].astype(complex)), Q, X),
    "a spectrum": (lambda q, x: jnp.abs(jnp.fft.fft(q) * spun(x)[:, None]).sum(), Q, X),
    "complex parameters": (lambda q, x: jnp.abs(x[0] @ q + 1j).sum() + jnp.sum(q.imag), Q * (1 + 2j), X),
    "a complex scale": (
        lambda q, x: jnp.abs(x[0] * q["c"] + q["r"]).sum(),
        {"c": 1 + 2j * jnp.ones(()), "r": Q[0, :3]},
        X,
    ),
    # Indices out of range.
    **{f"read, {mode}": (reading(mode), Q, PLACES) for mode in ("fill", "clip", "promise_in_bounds")},
    **{f"read two, {mode}": (reading_numbers(mode), Q, PLACES) for mode in ("fill", "clip", "promise_in_bounds")},
    **{f"write, {mode}": (writing(mode), Q, PLACES) for mode in ("drop", "clip", "promise_in_bounds")},
    "one row": (lambda q, i: jnp.sum(q[i[0, 0]] * jnp.arange(1.0, 5.0)), Q, PLACES),
    "one number": (lambda q, i: 3 * q[i[0, 0], i[0, 0]], Q, PLACES),
    "rows of a stack": (lambda q, i: jnp.sum(jnp.stack([q, 2 * q])[:, i[0]] ** 2), Q, PLACES),
    # Narrow index types, which cannot represent the height of the table.
    "rows by uint8 of 256": (taking("clip"), TABLE[:256], BYTES.astype(np.uint8)),
    "rows by uint8 of 300": (taking("fill"), TABLE, BYTES.astype(np.uint8)),
    "rows by int8 of 300": (taking("clip"), TABLE, BYTES.astype(np.int8)),
    # A table that is indexed by rows, and multiplied with its other axes in another order.
    **{
        f"a table of matrices, over {axes}": (tied_matrices(axes), TABLE[:30].reshape(5, 3, 6)[:, :, :3], BYTES % 5)
        for axes in ([[1, 2], [1, 2]], [[1, 2], [2, 1]])
    },
    "a table of matrices, rows free": (
        lambda q, i: jnp.sin(q[i[0]] * 0.3).sum() + jnp.sin(jnp.tensordot(q[i[0]].mean((0, 1)), q, [[0], [2]])).sum(),
        TABLE[:15].reshape(5, 3, 3),
        BYTES % 5,
    ),
    # Gradients that are not finite at zero, with examples that contain zeros.
    "a norm": (lambda q, x: 2 * jnp.linalg.norm(x[0] @ q), Q, ZEROS),
    "a logarithm": (lambda q, x: jnp.log(jnp.abs(x[0] @ q)).sum(), Q, ZEROS),
    "a quotient": (lambda q, x: (1 / (x[0] @ q)).sum(), Q, ZEROS),
    "an overflow": (
        lambda q, x: (1 + jnp.exp(100 * (1 - jnp.abs(x[0]).sum()))) * jnp.sin(x[0] @ q).sum(),
        Q,
        ZEROS,
    ),
    # Half precision, with operations on parameters and constants only.
    "a scale of float16": (scaled_by_one_and, half(jnp.float16), X.astype(np.float16)),
    "a scale of bfloat16": (scaled_by_one_and, half(jnp.bfloat16), X.astype(jnp.bfloat16)),
    "a table of float16": (tied, jnp.asarray(Q, jnp.float16), np.arange(30).reshape(5, 6) % 3),
    "a cast to float16": (lambda q, x: tied(q.astype(jnp.float16), x), Q, np.arange(30).reshape(5, 6) % 3),
    "a product summed in float32": (
        lambda q, x: jnp.sin(jnp.dot(x[0], q, preferred_element_type=jnp.float32)).sum(),
        jnp.asarray(Q, jnp.bfloat16),
        X.astype(jnp.bfloat16),
    ),
    "a product of computed bfloat16": (
        lambda q, x: jnp.sin(jnp.dot(x[0], q * q, preferred_element_type=jnp.float32)).sum(),
        jnp.asarray(Q, jnp.bfloat16),
        X.astype(jnp.bfloat16),
    ),
    "a product of integers and float32": (
        lambda q, i: jnp.sin(lax.dot_general(i[0], q[:2], (((0,), (0,)), ((), ())))).sum(),
        Q,
        BYTES[:, :2].astype(np.int8),
    ),
    "a table of float8": (
        lambda q, i: jnp.sum(q[i[0]].astype(jnp.float32)) * 440,
        jnp.asarray(Q, jnp.float8_e4m3fn),
        BYTES[:, :1] % 3,
    ),
    # Gradients and factors that are subnormal in float16.
    "small numbers of float16": (
        lambda q, x: jnp.sum(x[0] @ q),
        jnp.asarray(Q, jnp.float16),
        (3e-5 * X).astype(np.float16),
    ),
    "small cotangents of float16": (
        lambda q, x: 3e-5 * jnp.sum((x[0] @ q).astype(jnp.float32)),
        jnp.asarray(Q, jnp.float16),
        (1000 * X).astype(np.float16),
    ),
    "a small number of float16": (
        lambda q, x: 1e-5 * (x[0, 0] * jnp.sum(q**2)).astype(jnp.float32),
        jnp.asarray(5 * Q, jnp.float16),
        X.astype(np.float16),
    ),
    # Operations that distinguish zeros by their sign.
    "the sign of zero": (
        lambda q, x: jnp.sum(jnp.where(jnp.signbit(x[0, 0] * q), 3.0, -1.0) * q * x[0, 1]),
        -np.abs(Q),
        np.abs(X) * np.float32([0, 1, 1]),
    ),
    # A scalar function of the parameters whose gradient overflows unless first multiplied by a small number.
    "a number of float16": (
        lambda q, x: (
            1e-3 * (x[0, 0] * jnp.exp(10 * q[0, 0])).astype(jnp.float32) + (x[0] @ q).astype(jnp.float32).sum()
        ),
        jnp.ones((3, 4), jnp.float16),
        X.astype(np.float16),
    ),
    # Parameters scaled or masked by their own values, and concatenated.
    "scaled by its largest": (lambda q, x: jnp.sin(x[0] @ (q / lax.stop_gradient(jnp.abs(q).max()))).sum(), Q, X),
    "slices scaled by their largest": (
        lambda q, x: lax.scan(
            lambda h, w: (jnp.sin(h @ (w / lax.stop_gradient(w.max()))), None), x[0], STACK * q[0, 0]
        )[0].sum(),
        Q,
        X,
    ),
    "slices where they are large": (
        lambda q, x: lax.scan(lambda h, w: (jnp.sin(h @ jnp.where(w > 1, w, q[:, :3])), None), x[0], STACK * q[0, 0])[
            0
        ].sum(),
        Q,
        X,
    ),
    "a scale of parts": (
        lambda q, x: jnp.sin(x[0] @ (0.5 * jnp.concatenate([q["a"], q["b"]]))).sum(),
        {"a": Q[:1], "b": 3 * Q[1:]},
        X,
    ),
    "no numbers": (lambda q, x: (x[0] @ q["none"]).sum() + jnp.sin(x[0] @ q["w"]).sum(), {"none": Q[:, :0], "w": Q}, X),
    # Solves.
    "solve": (lambda q, x: jnp.linalg.solve(square(q), x[0]).sum(), Q, X),
    "solve with data": (lambda q, x: jnp.linalg.solve(square(q) + jnp.outer(x[0], x[0]), x[0]).sum(), Q, X),
    "solve for parameters": (lambda q, x: jnp.linalg.solve(3 * jnp.eye(3) + jnp.outer(x[0], x[0]), q).sum(), Q, X),
    "cg": (lambda q, x: cg(square(q), x[0])[0].sum(), Q, X),
    "cg of a function": (lambda q, x: cg(lambda v: square(q) @ v, x[0])[0].sum(), Q, X),
    "custom_linear_solve": (
        lambda q, x: lax.custom_linear_solve(
            lambda v: square(q) @ v, x[0], lambda _, b: jnp.linalg.solve(square(q), b), symmetric=True
        ).sum(),
        Q,
        X,
    ),
    "custom_root": (
        lambda q, x: lax.custom_root(
            lambda y: y + 0.1 * jnp.tanh(q[:, :3] @ y) - x[0],
            x[0],
            lambda f, y: lax.fori_loop(0, 20, lambda _, y: y - f(y), y),
            lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y),
        ).sum(),
        Q,
        X,
    ),
    # Nonlinear backward rules: the result depends on the size of the cotangent.
    "a rule of data": (lambda q, x: 7 * clipping(x[0] @ q).sum() + (x[0] @ q).sum(), Q, X),
    "a rule of parameters": (lambda q, x: 7 * (x[0] @ clipping(q)).sum(), Q, X),
    "a rule of a number": (lambda q, x: 7 * (x[0] * clipping(q[0, 0] + q[1, 1])).sum() + x[0] @ q[:, 0], Q, X),
    "a rule in a loop": (
        lambda q, x: 7 * (x[0] * lax.scan(lambda c, r: (clipping(c + r[0]), None), 0.0, q)[0]).sum(),
        Q,
        X,
    ),
    "a rule of the same parameters in each turn": (
        lambda q, x: lax.scan(lambda c, t: (c + 7 * jnp.sum(jnp.sin(t * clipping(q))), None), jnp.zeros(()), x[0])[0],
        Q,
        X,
    ),
    "a rule in a loop in a loop": (
        lambda q, x: lax.scan(
            lambda c, t: (lax.scan(lambda c, w: (jnp.sin(c + 2 * t * clipping(w) @ q[0]), None), c, q)[0], None),
            jnp.zeros(()),
            x[0],
        )[0],
        Q,
        X,
    ),
    "a rule of the same parameters in a branch of each turn": (
        lambda q, x: lax.scan(
            lambda c, t: (
                c + lax.cond(t > 0, lambda: 3 * t * clipping(q).sum(), lambda: (t * clipping(q)[0]).sum()),
                None,
            ),
            jnp.zeros(()),
            x[0],
        )[0],
        Q,
        X,
    ),
}
# Tolerances: in half precision, gradients of one and of several examples round differently.
ROUGH = {name: 0.25 if "float8" in name else 2e-2 for name in OPERATIONS if "float" in name}


def magnitude(tree: Any) -> np.ndarray:
    leaves = (np.asarray(x, np.complex128 if jnp.iscomplexobj(x) else np.float64) for x in jax.tree.leaves(tree))
    return np.sqrt(sum(np.square(np.abs(x)).sum() for x in leaves))


@functools.cache
def one_by_one(name: str) -> list[Any]:
    """Return the gradient of each example, which the tests of all methods share."""
    loss, params, batch = OPERATIONS[name]
    gradient = jax.jit(jax.grad(loss))
    return [gradient(jax.tree.map(jnp.asarray, params), x[None]) for x in batch]


def widened(x: Any) -> np.ndarray:
    return np.asarray(x, np.complex128 if jnp.iscomplexobj(x) else np.float64)


@pytest.mark.optimized
@pytest.mark.parametrize("name", OPERATIONS)
def test_sums_and_norms_are_those_of_one_example_at_a_time(name: str) -> None:
    loss, params, batch = OPERATIONS[name]
    tolerance = ROUGH.get(name, 2e-5)
    params, gradients = jax.tree.map(jnp.asarray, params), one_by_one(name)
    norms = np.array([magnitude(g) for g in gradients])
    finite = np.isfinite(norms)
    bound = float(np.median(norms[finite])) or 1.0
    kept = [(min(1, bound / n) if n else 1.0, g) for n, g in zip(norms, gradients, strict=True) if np.isfinite(n)]
    expected = jax.tree.map(lambda *leaves: sum(leaves), *(jax.tree.map(lambda x: w * widened(x), g) for w, g in kept))  # noqa: B023 (used at once)

    @jax.jit
    def of_every_method(params: Any, batch: Any, padding: Any) -> Any:
        of = functools.partial(clipped_grad, loss, l2_clip_norm=bound, dtype=jnp.float32, return_grad_norms=True)
        sums = {method: of(method=method)(params, batch, is_padding_example=padding) for method in METHODS}
        return sums, {method: per_sample_norm(loss, method=method)(params, batch) for method in METHODS}

    sums, norms_alone = of_every_method(params, batch, np.zeros(len(batch), bool))
    sums_without, _ = of_every_method(params, batch, np.arange(len(batch)) == 0)
    for method in METHODS:
        total, aux = sums[method]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 0, tolerance * bound * len(batch)), total, expected)
        assert aux.grad_norms.dtype == jnp.float32
        for each in map(np.asarray, (aux.grad_norms, norms_alone[method])):
            np.testing.assert_allclose(each[finite], norms[finite], tolerance, tolerance, err_msg=method)
            assert not np.isfinite(each[~finite]).any(), method
        apart = magnitude(jax.tree.map(lambda a, b: widened(a) - widened(b), total, sums_without[method][0]))
        assert apart <= bound * (1 + 1e-6) + 1e-6 * magnitude(total), method


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ROUGH])
def test_gradients_are_those_of_one_example_at_a_time(name: str) -> None:
    loss, params, batch = OPERATIONS[name]
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *one_by_one(name))
    found = jax.jit(per_sample_grad(loss))(jax.tree.map(jnp.asarray, params), batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-5, 2e-5), found, expected)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_requested_method_is_used(name: str) -> None:
    loss, params, batch = OPERATIONS[name]
    for method in METHODS[1:]:
        report = clipped_grad(loss, l2_clip_norm=1.0, method=method).explain(jax.tree.map(jnp.asarray, params), batch)
        assert (report.method, report.examples) == (method, len(batch)), report.why


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_nan_derivative_excludes_only_examples_that_depend_on_it(method: str) -> None:
    """A norm at zero parameters has a NaN gradient, and so has each example that multiplies the norm."""

    def loss(q: Any, x: Any) -> Any:
        return jnp.where(x[0, 0] > 0, x[0, 0] * jnp.linalg.norm(q["z"]), 0) + jnp.sum(x[0] @ q["w"])

    params = {"w": Q, "z": np.zeros(3, np.float32)}
    of = clipped_grad(loss, l2_clip_norm=1e3, method=method, return_grad_norms=True)
    padding = np.ones(len(X), bool)
    both = jax.jit(lambda params, x: (of(params, x), of(params, x, is_padding_example=padding)))
    (total, aux), (without, _) = both(params, X)
    assert np.isnan(aux.grad_norms).all()
    np.testing.assert_array_equal(total["w"], 0)
    np.testing.assert_array_equal(total["z"], 0)
    for leaf in jax.tree.leaves(without):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.parametrize("method", METHODS)
def test_norms_of_cancelling_gradients_are_not_nan(method: str) -> None:
    def loss(q: Any, x: Any) -> Any:
        rows = q[x[0].astype(int) % 9]
        return sum(weight * jnp.sum(jnp.sin(rows)) for weight in (0.3, 0.7, -1.0))

    tables = np.random.default_rng(4).normal(size=(20, 9, 30)).astype(np.float32)
    tokens = np.random.default_rng(5).integers(0, 9, size=(20, 12))
    norms = jax.jit(per_sample_norm(loss, method=method))
    for table in tables:
        found = norms(table, tokens)
        assert (found >= 0).all()
        assert (found < 3e-2).all()


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


THREE = ("auto", "ghost", "book_keeping")


def clipped_by_hand(fun: Any, w: Any, batch: Any, bound: float) -> tuple[Any, Any]:
    """Sum the clipped finite gradients one by one; return the sum and the norms."""
    each = np.asarray(jax.jit(lambda w, batch: lax.map(lambda x: jax.grad(fun)(w, x), batch))(w, batch), np.float64)
    norms = np.sqrt(np.square(each).reshape(len(each), -1).sum(1))
    weights = np.where(norms > bound, bound / np.maximum(norms, 1e-300), 1)
    return np.tensordot(weights, each, 1), norms


def clipped_by(fun: Any, method: Any, bound: float) -> Any:
    return clipped_grad(fun, l2_clip_norm=bound, keep_batch_dim=False, return_grad_norms=True, method=method)


def assert_clipped_by_every_method(fun: Any, w: Any, batch: Any, bound: float, *tolerances: float) -> None:
    """Compare with `clipped_by_hand`; the tolerances are relative for the norms and absolute for the sum."""
    expected, norms = clipped_by_hand(fun, w, batch, bound)
    of_every_method = jax.jit(lambda w, batch: {method: clipped_by(fun, method, bound)(w, batch) for method in THREE})
    for method, (found, aux) in of_every_method(w, batch).items():
        np.testing.assert_allclose(aux.grad_norms, norms, tolerances[0], err_msg=method)
        np.testing.assert_allclose(found, expected, 0, tolerances[1], err_msg=method)


@functools.cache
def with_a_nonlinear_weight(method: str) -> Any:
    fun = lambda w, x: jnp.sum((x @ w) / jnp.linalg.norm(w)) + x[0] * jnp.linalg.norm(w)
    return jax.jit(clipped_by(fun, method, 0.01).__call__)


@pytest.mark.parametrize("method", THREE)
@pytest.mark.parametrize("size", [1e-38, 1e18, 1e19, 1e20, 1e38])
def test_a_huge_or_tiny_example_does_not_affect_the_others(method: str, size: float) -> None:
    of = with_a_nonlinear_weight(method)
    w, rest = normal(0, 4, 3), normal(1, 3, 4)
    batch = np.concatenate([np.float32(size) * normal(2, 1, 4), rest])
    found, aux = of(w, batch, is_padding_example=np.array([True, False, False, False]))
    expected, norms = of(w, rest)
    np.testing.assert_allclose(found, expected, 0, 1e-7)
    np.testing.assert_allclose(aux.grad_norms[1:], norms.grad_norms, 1e-6)


SCALED = (
    lambda w, x, far: jnp.dot(w * far, x) / far,
    lambda w, x, far: jnp.dot(w / jnp.sqrt(far) / jnp.sqrt(far), x) * far,
    lambda w, x, far: jnp.dot(w * far, x) / far + x[0] * jnp.linalg.norm(w),
    lambda w, x, far: (w * far)[1:] @ x[1:] / far + (far * w[:2]) @ x[:2] / far,
)


@pytest.mark.optimized
@pytest.mark.parametrize("far", [1e-25, 1e-20, 1e20, 1e25])
@pytest.mark.parametrize("of_scaled", SCALED)
def test_factors_whose_squares_are_beyond_the_dtype(of_scaled: Any, far: float) -> None:
    assert_clipped_by_every_method(lambda w, x: of_scaled(w, x, far), normal(0, 3), normal(1, 5, 3), 1e-3, 1e-5, 1e-8)


@pytest.mark.optimized
@pytest.mark.parametrize("far", [1e20, 1e-20])
@pytest.mark.parametrize(("of_scaled", "method"), [*zip(SCALED, (*THREE, "ghost"), strict=True)])
def test_factors_whose_squares_are_beyond_the_dtype_outside_jit(of_scaled: Any, method: str, far: float) -> None:
    fun, w, batch = lambda w, x: of_scaled(w, x, far), normal(0, 3), normal(1, 5, 3)
    found, aux = clipped_by(fun, method, 1e-3)(w, batch)
    expected, norms = clipped_by_hand(fun, w, batch, 1e-3)
    np.testing.assert_allclose(aux.grad_norms, norms, 1e-5)
    np.testing.assert_allclose(found, expected, 0, 1e-8)


def in_a_checkpoint(w: Any, x: Any) -> Any:
    drop = lambda: jax.random.bernoulli(jax.random.key(3, impl="rbg"), 0.5, (3,)) * 2
    return sum(jax.checkpoint(lambda w, x: (jnp.tanh(w * x * drop()).sum(), (w**2).sum()))(w, x))


def in_a_branch(w: Any, x: Any) -> Any:
    def body(c: Any, key: Any) -> Any:
        drop = lambda: jax.random.bernoulli(key, 0.5, (3,))
        return jax.lax.cond(c[0] > 0, lambda: jnp.tanh(w * c * drop()) + c, lambda: c * w), None

    return jax.lax.scan(body, x, jax.random.split(jax.random.key(5, impl="rbg"), 4))[0].sum()


def by_a_custom_rule(w: Any, x: Any) -> Any:
    rule = jax.custom_jvp(lambda w, x: (w * x * jax.random.normal(jax.random.key(1, impl="unsafe_rbg"), (3,))).sum())
    rule.defjvp(lambda primals, tangents: jax.jvp(rule.fun, primals, tangents))
    return rule(w, x)


@pytest.mark.parametrize("fun", [in_a_checkpoint, in_a_branch, by_a_custom_rule])
def test_random_numbers_are_those_of_the_forward_pass(fun: Any) -> None:
    w, batch = normal(0, 3), normal(1, 4, 3)
    assert_clipped_by_every_method(fun, w, batch, 0.7, 1e-5, 1e-5)
    for method in THREE:
        assert "random numbers" in clipped_by(fun, method, 0.7).explain(w, batch).why


@pytest.mark.parametrize(
    "rounded",
    [
        lambda w: jax.lax.reduce_precision(w, 5, 2),
        lambda w: w.astype(jnp.float8_e4m3fn).astype(jnp.float32),
        lambda w: jnp.tanh(jax.lax.reduce_precision(w, 5, 2)),
    ],
)
def test_cotangents_are_rounded_in_each_iteration(rounded: Any) -> None:
    def fun(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda c, t: (c + rounded(w) @ x * t, None), 0.0, jnp.array([0.3, 0.7, 1.3]))[0]

    assert_clipped_by_every_method(fun, normal(0, 3), normal(1, 4, 3), 0.7, 1e-6, 1e-6)


def test_half_precision_under_strict_promotion_needs_no_fallback() -> None:
    w, batch = (jnp.asarray(x, jnp.bfloat16) for x in (normal(0, 3), normal(1, 4, 3)))
    of = clipped_grad(jnp.dot, l2_clip_norm=0.7, keep_batch_dim=False, method="book_keeping")
    expected = jax.jit(lambda w, batch: of(w, batch))(w, batch)
    with jax.numpy_dtype_promotion("strict"):
        assert of.explain(w, batch).method == "book_keeping"
        np.testing.assert_array_equal(jax.jit(lambda w, batch: of(w, batch))(w, batch), expected)
