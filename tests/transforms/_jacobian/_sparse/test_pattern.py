"""Sparse Jacobians and Hessians against JAX's dense ones: detected and given patterns, products in either mode."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from flax import nnx
from jax.experimental.ode import odeint
from jax.experimental.sparse import BCOO

from plurax.transforms import hessian, jacobian, vmap
from plurax.transforms._jacobian._sparse import compressed, primitive_rules

X = np.array([0.5, -1.0, 2.0, 0.3, 1.7, -0.6], np.float32)
XS = np.sin(np.arange(42.0, dtype=np.float32)).reshape(7, 6)
# Large enough that a few products are chosen without XLA's cost analysis, which is slow.
LONG = np.concatenate([X, np.cos(np.arange(10.0, dtype=np.float32))])
LONGS = np.sin(np.arange(112.0, dtype=np.float32)).reshape(7, 16)
K = np.arange(9.0, dtype=np.float32).reshape(3, 3, 1, 1)


def is_sparse(x: Any) -> bool:
    return isinstance(x, BCOO)


def dense_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.todense() if is_sparse(x) else x, tree, is_leaf=is_sparse)


def assert_equals(sparse: Any, dense: Any, tolerance: float = 1e-5) -> None:
    """Assert that each array is a `BCOO` of the dense shape and dtype, with sorted, unique entries."""
    for x in jax.tree.leaves(sparse, is_leaf=is_sparse):
        assert is_sparse(x)
        assert x.indices.dtype == jnp.int32
        if not x.n_batch:
            places = [tuple(place) for place in np.asarray(x.indices).tolist()]
            assert places == sorted(set(places))
        assert x.indices_sorted
        assert x.unique_indices
    found = dense_of(sparse)
    assert jax.tree.structure(found) == jax.tree.structure(dense)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(dense), strict=True):
        assert (x.shape, x.dtype) == (jnp.shape(y), jnp.result_type(y))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def test_the_helper_detects_differences() -> None:
    with pytest.raises(AssertionError, match="tolerance"):
        assert_equals(BCOO.fromdense(jnp.ones(2)), 1.01 * jnp.ones(2))
    with pytest.raises(AssertionError):
        assert_equals(jnp.ones(2), jnp.ones(2))
    with pytest.raises(AssertionError):
        assert_equals(BCOO.fromdense(jnp.ones(2)), np.ones(2, np.float16))


def arrow(x: Any) -> Any:
    return jnp.concatenate([jnp.sin(x[:1]) * x.sum(), x[1:] ** 2 + x[0] * x[1:]])


def bands(x: Any) -> Any:
    return jnp.sin(x[1:]) * x[:-1]


@jax.custom_jvp
def rounded(x: Any) -> Any:
    return jnp.round(x)


rounded.defjvp(lambda x, t: (rounded(*x), t[0]))


@jax.custom_vjp
def rounded_back(x: Any) -> Any:
    return jnp.round(x)


rounded_back.defvjp(lambda x: (rounded_back(x), None), lambda _, g: (2 * g,))

FUNCTIONS = {
    "diagonal": (jnp.tanh, 16),
    "bands": (bands, 30),
    "arrow": (arrow, 46),
    "one row": (lambda x: (x[1:3] ** 2).sum(), 2),
    "more rows": (lambda x: jnp.stack([x, x**2], 1), 32),
    "no entry": (lambda x: jnp.ones(3), 0),
    "full": (jax.nn.softmax, 256),
    "stopped": (lambda x: x * jax.lax.stop_gradient(x[::-1]), 16),
    "picked": (lambda x: x[jnp.array([0, 4, 4])] ** 2, 3),
    "scattered": (lambda x: jnp.zeros(4).at[jnp.array([0, 0, 3])].add(x[:3] ** 2), 3),
    "padded": (lambda x: jnp.pad(x, 2)[::-1] * 3, 16),
    "constant matrix": (lambda x: jnp.eye(16)[:4] @ x, 4),
    "scan": (lambda x: jax.lax.scan(lambda c, y: (c, c * y), 2.0, x)[1], None),
    "while": (lambda x: jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.sin(c[0]), c[1] + 1), (x, 0))[0], 16),
    "cond": (lambda x: jax.lax.cond(x[0] > 0, lambda x: x**2, lambda x: x * 3, x), 16),
    "where": (lambda x: jnp.where(x > 0, x**3, x), 16),
    "sorted": (jnp.sort, 256),
    "convolution": (lambda x: jnp.convolve(x, jnp.ones(3), mode="same") ** 2, 46),
    "image": (
        lambda x: jax.lax.conv_general_dilated(
            jnp.tanh(x.reshape(1, 8, 2, 1)), K, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        81,  # one entry of the kernel is zero
    ),
    "compiled": (jax.jit(bands), 30),
    "remat": (jax.checkpoint(bands), 30),
    "a custom rule": (lambda x: rounded(x) * 3, 16),
    "a custom backward rule": (lambda x: rounded_back(x) * 3, 16),
    "complex": (lambda x: x + 1j * x**2, 16),
    "number": (lambda x: x[0] * x[5], 2),
}


def dense(fun: Any, *args: Any) -> Any:
    try:
        return jax.jit(jax.jacfwd(fun))(*args)
    except TypeError:
        return jax.jit(jax.jacrev(fun))(*args)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_against_the_dense_jacobian(name: str) -> None:
    fun, entries = FUNCTIONS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparse = jacobian(fun, sparsity="auto")(LONG)
    expected = dense(fun, LONG)
    assert_equals(sparse, expected)
    assert entries is None or sparse.nse == entries
    compiled = jax.jit(jacobian(fun, sparsity="auto", check=True, chunk_size=2))(LONG)
    assert_equals(compiled, expected)
    if name in ("arrow", "no entry", "more rows", "a custom backward rule", "complex", "number"):
        mapped = jax.jit(jax.vmap(jacobian(fun, sparsity="auto")))(LONGS)
        assert_equals(mapped, jax.jit(jax.vmap(lambda x: dense(fun, x)))(LONGS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fun", "mode"), [(arrow, "auto"), (bands, "forward"), (bands, "reverse"), (jax.nn.softmax, "auto")]
)
def test_modes_chunks_and_budgets(fun: Any, mode: str) -> None:
    expected = jax.jit(jax.jacfwd(fun))(LONG)
    for chunk_size in (1, 4):
        assert_equals(jax.jit(jacobian(fun, mode=mode, sparsity="auto", chunk_size=chunk_size))(LONG), expected)
    assert_equals(jax.jit(jacobian(fun, mode=mode, sparsity="auto", memory_budget="1KiB"))(LONG), expected)
    assert_equals(
        jax.jit(vmap(jacobian(fun, mode=mode, sparsity="auto"), chunk_size=3))(LONGS),
        jax.jit(jax.vmap(jax.jacfwd(fun)))(LONGS),
    )
    again = jax.jit(jax.jacfwd(jax.jacfwd(fun)))(LONG)
    sparse = jacobian(fun, mode=mode, sparsity="auto")
    for plain in (jax.jacrev, jax.jacfwd):
        found = jax.jit(plain(lambda x: sparse(x).todense()))(LONG)
        np.testing.assert_allclose(found, again, rtol=1e-5, atol=1e-5)


def test_a_budget_bounds_the_products_at_a_time() -> None:
    first, second = np.ones((10, 400), np.float32), np.ones((400, 10), np.float32)
    fun = lambda x: (jnp.tanh(x.reshape(50, 10) @ first) @ second).ravel()
    x = jnp.linspace(0, 0.1, 500)
    sparse = jax.jit(jacobian(fun, sparsity="auto", memory_budget="400KiB")).lower(x).compile()
    whole = jax.jit(jacobian(fun, sparsity="auto")).lower(x).compile()
    few, all_of_them = (program.memory_analysis().temp_size_in_bytes for program in (sparse, whole))
    assert few <= 400 * 1024 < all_of_them
    np.testing.assert_allclose(sparse(x).data, whole(x).data, rtol=1e-6)
    with pytest.raises(ValueError, match=r"^jacobian: no chunk fits into memory_budget=8 B"):
        jacobian(fun, sparsity="auto", memory_budget=8)(x)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bcoo", "padded", "csr", "coo matrix", "numpy", "jax", "result"])
def test_forms_of_patterns(form: str) -> None:
    expected = jax.jit(jax.jacfwd(bands))(LONG)
    mask = np.asarray(expected != 0)
    pattern = {
        "bcoo": BCOO.fromdense(jnp.asarray(mask)),
        "padded": BCOO.fromdense(jnp.asarray(mask), nse=34),
        "csr": scipy.sparse.csr_array(mask),
        "coo matrix": scipy.sparse.coo_matrix(mask.astype(float)),
        "numpy": mask,
        "jax": jnp.asarray(mask),
        "result": jacobian(bands, sparsity="auto")(LONG),
    }[form]
    for wrap in (lambda fun: fun, jax.jit):
        found = wrap(jacobian(bands, sparsity=pattern, check=True))(LONGS[0])
        assert found.nse == 30
        assert_equals(found, jax.jit(jax.jacfwd(bands))(LONGS[0]))
    assert_equals(jax.vmap(jacobian(bands, sparsity=pattern))(LONGS), jax.jit(jax.vmap(jax.jacfwd(bands)))(LONGS))


def test_given_patterns_may_contain_zeros_which_are_kept() -> None:
    found = jacobian(lambda x: x * jnp.array([1.0, 0, 0, 1, 1, 1]), sparsity=np.tri(6, k=1, dtype=bool))(X)
    assert found.nse == 26
    assert_equals(found, jnp.diag(jnp.array([1.0, 0, 0, 1, 1, 1])))


def tree(point: Any, scale: Any) -> Any:
    return {"a": point["x"] ** 2 * scale, "b": jnp.outer(point["y"], jnp.sin(point["x"])), "none": None}


POINT = {"x": np.arange(3, dtype=np.float32), "y": np.ones((2,), np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize(("argnums", "mode"), [(0, "auto"), (-1, "reverse"), ((1, 0), "auto"), ((0, 1), "reverse")])
def test_pytrees_with_patterns_of_every_form(argnums: Any, mode: str) -> None:
    expected = jax.jit(jax.jacfwd(tree, argnums))(POINT, 3.0)
    of = lambda **options: jax.jit(jacobian(tree, argnums, mode=mode, **options))(POINT, 3.0)
    found = of(sparsity="auto", check=True)
    assert_equals(found, expected)
    nested = jax.tree.map(lambda x: np.asarray(x) != 0, expected)
    assert_equals(of(sparsity=found, check=True), expected)
    assert_equals(of(sparsity=nested, check=True), expected)
    numbers = sum(np.size(x) for x in jax.tree.leaves([(POINT, 3.0)[i] for i in np.atleast_1d(argnums)]))
    full = np.ones((9, numbers), bool)
    assert_equals(of(sparsity=full), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float64])
def test_dtypes(dtype: Any) -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(LONG, dtype)
        tolerance = {2: 2e-2, 4: 1e-5, 8: 1e-12}[x.dtype.itemsize]
        for fun in (bands, arrow):
            found = jax.jit(jacobian(fun, sparsity="auto", check=True))(x)
            assert_equals(found, jax.jit(jax.jacfwd(fun))(x), tolerance)
        scalar = lambda x: (bands(x) ** 2).sum()
        found = jax.jit(hessian(scalar, sparsity="auto", check=True))(x)
        assert_equals(found, jax.jit(jax.hessian(scalar))(x), tolerance)


@pytest.mark.slow
def test_several_dtypes_at_once() -> None:
    def fun(x: Any, y: Any) -> Any:
        return (x[0] * y, (x * jnp.concatenate([y, y])).astype(jnp.bfloat16))

    x, y = jnp.asarray(X, jnp.float16), jnp.arange(3.0)
    for mode, plain in (("forward", jax.jacfwd), ("reverse", jax.jacrev)):
        found = jax.jit(jacobian(fun, (0, 1), mode=mode, sparsity="auto", check=True))(x, y)
        assert_equals(found, jax.jit(plain(fun, (0, 1)))(x, y), 2e-2)


@pytest.mark.slow
def test_keywords_aux_and_values() -> None:
    def fun(x: Any, indices: Any, *, power: int) -> Any:
        return x[indices] ** power, {"sum": x.sum(), "power": power}

    indices = np.array([3, 1, 1])
    found, aux = jacobian(fun, has_aux=True, sparsity="auto")(X, indices, power=3)
    assert found.nse == 3  # the indices are known
    assert_equals(found, jax.jacfwd(lambda x: fun(x, indices, power=3)[0])(X))
    assert aux["power"] == 3
    np.testing.assert_allclose(aux["sum"], X.sum(), rtol=1e-6)
    traced = jax.jit(lambda x, i: jacobian(fun, has_aux=True, sparsity="auto")(x, i, power=3)[0])(X, indices)
    assert traced.nse == 18  # unknown indices: any entry may be picked
    assert_equals(traced, dense_of(found))


@pytest.mark.slow
def test_models() -> None:
    model = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(2, 2, rngs=nnx.Rngs(1)))
    x = jnp.arange(3.0)
    found = jacobian(lambda model, x: model(x), sparsity="auto", check=True)(model, x)
    expected = jacobian(lambda model, x: model(x))(model, x)
    assert_equals(found, expected)
    assert found["layers"][2]["bias"].nse == 2
    assert_equals(jacobian(model, sparsity="auto")(x), jax.jacfwd(model)(x))


def test_random_keys_and_outer_traces() -> None:
    @jax.jit
    def drawn(key: Any, x: Any, scale: Any) -> Any:
        noise = lambda x: x**2 * scale + jax.random.normal(key, x.shape) * x
        return jacobian(noise, sparsity="auto")(x), jax.jacfwd(noise)(x)

    sparse, expected = drawn(jax.random.key(0), LONG, 3.0)
    assert sparse.nse == 16
    assert_equals(sparse, expected)
    _, stacked = jax.lax.scan(lambda c, x: (c, jacobian(lambda x: c * x**2, sparsity="auto")(x).data), 2.0, LONGS)
    np.testing.assert_allclose(stacked, 4 * LONGS, rtol=1e-6)


@pytest.mark.slow
def test_products_with_the_result() -> None:
    found, expected = jacobian(bands, sparsity="auto")(LONG), jax.jit(jax.jacfwd(bands))(LONG)
    np.testing.assert_allclose(found @ LONG, expected @ LONG, rtol=1e-5)
    np.testing.assert_allclose(found.T @ LONG[:15], expected.T @ LONG[:15], rtol=1e-5)
    batch = jax.vmap(jacobian(bands, sparsity="auto"))(LONGS)
    for chunk_size in (None, 2):
        products = vmap(lambda matrix, x: matrix @ x, chunk_size=chunk_size)(batch, LONGS)
        np.testing.assert_allclose(
            products, jax.jit(jax.vmap(lambda x: jax.jacfwd(bands)(x) @ x))(LONGS), rtol=1e-5, atol=1e-6
        )


# ---- Choice of products


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("fun", "mode", "colors"),
    [
        (lambda x: jnp.sin(x[1:]) * x[:-1], "forward", (2, 0)),
        (lambda x: jnp.concatenate([jnp.sin(x), x**2]), "forward", (1, 0)),
        (lambda x: jnp.stack([x[:25].sum(), (x[25:] ** 2).sum()]), "reverse", (0, 1)),
        (arrow, "both", (2, 1)),
        (lambda x: arrow(x)[1:], "forward", (2, 0)),
        (lambda x: rounded_back(x) * jnp.roll(x, 1), "reverse", (0, 2)),
    ],
)
def test_the_mode_follows_from_the_colors(fun: Any, mode: str, colors: Any) -> None:
    sparse = jacobian(fun, sparsity="auto")
    x = np.linspace(0.1, 1, 50, dtype=np.float32)
    choice = sparse.explain(x)
    assert (choice.mode, choice.colors, choice.inputs) == (mode, colors, 50)
    assert choice.why.startswith(f"{colors[0]} products in forward and {colors[1]} in reverse mode give all ")
    assert_equals(jax.jit(sparse)(x), dense(fun, x))


def test_the_program_computes_only_these_products() -> None:
    """The arrow matrix of size 2,000 takes three products; one mode alone would take 2,000."""
    x = jnp.linspace(0.1, 1, 2000)
    compiled = jax.jit(jacobian(arrow, sparsity="auto")).lower(x).compile()
    analysis: Any = compiled.cost_analysis()
    assert analysis["flops"] < 60 * x.size


def test_dense_is_chosen_where_it_needs_fewer_products() -> None:
    sparse = jacobian(jax.nn.softmax, sparsity="auto")
    choice = sparse.explain(X)
    assert choice.colors is None
    assert choice.why == "a dense Jacobian takes no more than 6 products"
    assert_equals(sparse(X), jax.jit(jax.jacfwd(jax.nn.softmax))(X))
    # Some entries are never computed.
    assert_equals(jacobian(jax.nn.softmax, sparsity=~np.eye(6, dtype=bool))(X) * 1.0, _off_diagonal(X))


def _off_diagonal(x: Any) -> Any:
    whole = jax.jit(jax.jacfwd(jax.nn.softmax))(x)
    return whole * (1 - jnp.eye(6))


# ---- Hessians


def rosenbrock(x: Any) -> Any:
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


@jax.custom_jvp
def swirl(x: Any) -> Any:
    return (x**2).sum()


# A non-conservative field: the derivative of this gradient is not symmetric.
swirl.defjvp(lambda x, t: (swirl(*x), (jnp.roll(x[0], 1) * t[0]).sum()))

SCALARS = {
    "rosenbrock": (rosenbrock, 46),
    "arrow": (lambda x: x[0] * (x**2).sum(), 46),
    "separable": (lambda x: jnp.sum(jnp.cos(x) * x), 16),
    "linear": (lambda x: x.sum(), 0),
    "full": (lambda x: jnp.sum(x) ** 3, 256),
    "no diagonal": (lambda x: (x[:8] * x[8:]).sum(), 16),
    "no potential": (swirl, 16),
    "one number": (lambda x: (x[1:] * x[:-1]).sum(keepdims=True), 30),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "auto") for name in SCALARS),
        ("rosenbrock", "rev_rev"),
        ("no potential", "rev_rev"),
        ("arrow", "fwd_fwd"),
    ],
)
def test_hessians(name: str, mode: str) -> None:
    fun, entries = SCALARS[name]
    expected = jax.jit(jax.hessian(fun))(LONG)
    for chunk_size in (None, 2):
        found = jax.jit(hessian(fun, mode=mode, sparsity="auto", check=True, chunk_size=chunk_size))(LONG)
        assert_equals(found, expected)
    assert entries == found.nse or mode == "fwd_fwd"
    sparse: Any = vmap(hessian(fun, mode=mode, sparsity="auto"), chunk_size=4)
    assert_equals(jax.jit(sparse)(LONGS), jax.jit(jax.vmap(jax.hessian(fun)))(LONGS))


def test_a_hessian_in_a_budget() -> None:
    found = jax.jit(hessian(rosenbrock, sparsity="auto", memory_budget="4KiB"))(X)
    assert_equals(found, jax.jit(jax.hessian(rosenbrock))(X))


@pytest.mark.slow
def test_hessians_of_trees_models_and_vectors() -> None:
    fun = lambda point, s: jnp.sum(jnp.sin(point["x"]) * point["y"][0]) + s * point["y"].sum() ** 2
    for argnums, wrap in ((1, jax.jit), ((0, 1), lambda fun: fun)):
        expected = jax.jit(jax.hessian(fun, argnums))(POINT, 2.0)
        found = wrap(hessian(fun, argnums, sparsity="auto", check=True))(POINT, 2.0)
        assert_equals(found, expected)
        assert_equals(jax.jit(hessian(fun, argnums, sparsity=found))(POINT, 2.0), expected)
    squares = lambda x: bands(x) ** 2
    assert_equals(jax.jit(hessian(squares, sparsity="auto", check=True))(X), jax.jit(jax.hessian(squares))(X))
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    loss = lambda model: (model(jnp.arange(2.0)) ** 3).sum()
    assert_equals(hessian(loss, sparsity="auto", check=True)(model), jax.jit(hessian(loss))(model))


def test_half_of_a_hessian_may_be_requested() -> None:
    upper = np.triu(np.ones((6, 6), bool)) & ~np.triu(np.ones((6, 6), bool), 2)
    found = hessian(rosenbrock, sparsity=upper)(X)
    assert found.nse == 11
    np.testing.assert_allclose(found.todense(), np.triu(jax.jit(jax.hessian(rosenbrock))(X)), rtol=1e-6)


def test_a_symmetric_arrow_takes_two_products() -> None:
    x = np.linspace(0.1, 1, 2000, dtype=np.float32)
    fun = lambda x: x[0] * (x**2).sum()
    compiled = jax.jit(hessian(fun, sparsity="auto")).lower(x).compile()
    analysis: Any = compiled.cost_analysis()
    assert analysis["flops"] < 60 * x.size
    assert_equals(compiled(x), jax.jit(jax.hessian(fun))(x), 1e-4)


# ---- Undetectable patterns and errors


@jax.custom_jvp
def looked_up(x: Any) -> Any:
    return jnp.sin(x)


@looked_up.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    shape = jax.ShapeDtypeStruct(t.shape, t.dtype)
    slope = lambda t: jax.pure_callback(lambda t: t, shape, t, vmap_method="sequential")
    return jnp.sin(x), jnp.cos(x) * slope(t)


def test_dense_with_a_warning_where_the_pattern_is_unknown() -> None:
    sparse = jacobian(looked_up, mode="forward", sparsity="auto", check=True)
    with pytest.warns(
        UserWarning, match=r"^jacobian: .* the results of `pure_callback` are .* depend on all operands"
    ) as caught:
        found = sparse(X)
    assert caught[0].filename == __file__
    assert "Pass the pattern as sparsity=, or leave sparsity out for a dense array" in str(caught[0].message)
    assert found.nse == 36
    assert_equals(found, dense(looked_up, X))
    with pytest.warns(UserWarning, match="pure_callback"):
        choice = sparse.explain(X)
    assert choice.colors is None
    assert_equals(jax.jit(jacobian(looked_up, mode="forward", sparsity=np.ones((6, 6), bool)))(X), dense(looked_up, X))


@pytest.mark.parametrize(
    ("fun", "entries"),
    [
        (lambda x: jnp.fft.fft(x).real, 36),
        (lambda x: jnp.linalg.solve(jnp.eye(6) * 3 + jnp.outer(x, x), x), 36),
        (lambda x: jnp.linalg.cholesky(jnp.diag(x**2 + 1)).sum(0), 36),
        (lambda x: jnp.concatenate([jnp.fft.fft(x[:3]).real, x[3:] ** 2]), 12),
    ],
    ids=["fft", "solve", "cholesky", "a part"],
)
def test_operations_that_mix_a_matrix_or_a_row_do_not_warn(fun: Any, entries: int) -> None:
    found = jax.jit(jacobian(fun, sparsity="auto", check=True))(X)
    assert found.nse <= entries
    assert_equals(found, dense(fun, X))


def test_dense_with_a_warning_where_fun_branches_on_values() -> None:
    fun = lambda x: x * 2 if x[0] > 0 else x
    sparse = jacobian(fun, sparsity="auto", check=True)
    with pytest.warns(
        UserWarning, match=r"^jacobian: the pattern cannot be found, .*: fun branches on values"
    ) as caught:
        found = sparse(X)
    assert caught[0].filename == __file__
    assert found.nse == 36
    assert_equals(found, jax.jacfwd(fun)(X))
    with pytest.warns(UserWarning, match="branches"):
        assert sparse.explain(X).why == "the pattern cannot be found: fun branches on values"
    assert_equals(jacobian(fun, sparsity=np.eye(6, dtype=bool), check=True)(X), jax.jacfwd(fun)(X))


def test_dense_with_a_warning_where_detection_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(primitive_rules._RULES, "cumsum", lambda eqn, values: eqn.params["another name"])
    with pytest.warns(UserWarning, match=r"cannot be found, .*: the analysis failed with KeyError\('another name'\)"):
        found = jacobian(lambda x: jnp.cumsum(x) * x, sparsity="auto")(X)
    assert_equals(found, jax.jacfwd(lambda x: jnp.cumsum(x) * x)(X))


@pytest.mark.slow
def test_a_solver_of_differential_equations() -> None:
    fun = lambda x: odeint(lambda y, t: -y * y, x, jnp.array([0.0, 0.1]))[-1]
    assert_equals(jax.jit(jacobian(fun, sparsity="auto"))(X), jax.jit(jax.jacrev(fun))(X), 1e-4)


def test_a_hessian_with_a_fourier_transform() -> None:
    fun = lambda x: jnp.abs(jnp.fft.fft(x**2)[1]) ** 2
    assert_equals(jax.jit(hessian(fun, sparsity="auto"))(X), jax.jit(jax.hessian(fun))(X), 1e-3)


WRONG = np.eye(5, 6, dtype=bool)


def test_a_probe_catches_a_wrong_pattern() -> None:
    sparse = jacobian(bands, sparsity=WRONG, check=True)
    message = (
        r"jacobian: the sparsity pattern lacks entries of row `output\[\d\]` of the result, \d in all; add every "
        r"entry that can differ from zero"
    )
    with pytest.raises(ValueError, match=f"^{message}"):
        sparse(X)
    for wrapped, x in (
        (jax.jit(sparse), X),
        (jax.vmap(sparse), XS),
        (jax.jit(jax.grad(lambda x: sparse(x).data.sum())), X),
    ):
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
            jax.block_until_ready(jax.tree.leaves(wrapped(x)))
    assert_equals(jacobian(lambda x: x[:5] ** 2, sparsity=WRONG, check=True)(X), jax.jacfwd(lambda x: x[:5] ** 2)(X))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 17, 45])
def test_one_entry_that_is_missing_is_caught(lost: int) -> None:
    pattern = jacobian(arrow, sparsity="auto")(LONG)
    keep = np.arange(46) != lost
    lacking = BCOO((pattern.data[keep], pattern.indices[keep]), shape=pattern.shape)
    for mode in ("auto", "forward", "reverse"):
        with pytest.raises(ValueError, match=r"^jacobian: the sparsity pattern lacks entries of "):
            jacobian(arrow, mode=mode, sparsity=lacking, check=True)(LONG)


@pytest.mark.slow
def test_the_probe_names_wrong_entries_in_trees_and_reverse_mode() -> None:
    wrong = jax.tree.map(lambda x: np.asarray(x) != 0, jax.jacfwd(tree)(POINT, 3.0))
    wrong["b"]["y"] = np.zeros_like(wrong["b"]["y"])
    with pytest.raises(ValueError, match=r"row `output\['b'\]\[0, 1\]` of the result, 4 in all"):
        jacobian(tree, sparsity=wrong, check=True)(POINT, 3.0)
    with pytest.raises(ValueError, match=r"row `output\[4\]` of the result, 1 in all; add"):
        jacobian(lambda x: x[:5] ** 2, sparsity=np.arange(6) == np.array([[0], [1], [2], [3], [0]]), check=True)(X)
    with pytest.raises(ValueError, match=r"column `x\[0\]` of the result, 6 in all"):
        jacobian(lambda x: rounded_back(x), sparsity=np.eye(6, k=1, dtype=bool), check=True)(X)
    hilly = hessian(rosenbrock, sparsity=np.eye(6, dtype=bool), check=True)
    with pytest.raises(ValueError, match=r"^hessian: the sparsity pattern lacks entries of row `output\[0\]`"):
        hilly(X)


@pytest.mark.slow
def test_the_probe_accepts_infinities_and_rounding() -> None:
    steep = jnp.asarray([0.0, 1.0, 4.0])
    assert not np.isfinite(jacobian(jnp.sqrt, sparsity="auto", check=True)(steep).data[0])
    assert np.isnan(jacobian(lambda x: x * jnp.sqrt(x), sparsity="auto", check=True)(steep).data[0])
    mixed = lambda x: jnp.sqrt(x) + jnp.roll(x, 1) * 100
    with pytest.raises(ValueError, match=r"row `output\[1\]` of the result, 2 in all"):
        jacobian(mixed, sparsity=np.eye(3, dtype=bool), check=True)(steep)
    for seed in range(2):
        random = np.random.default_rng(seed)
        weights, x = jnp.asarray(random.standard_normal((20, 20))), jnp.asarray(random.standard_normal(20))
        jacobian(lambda x, w=weights: jax.nn.softmax(w @ x * 3), sparsity=np.ones((20, 20), bool), check=True)(x)
        x, weights = x.astype(np.float16), weights.astype(np.float16)
        cancelling = lambda x, w=weights: (w @ x * 50 + x) - w @ x * 50
        jacobian(cancelling, sparsity=np.ones((20, 20), bool), check=True)(x)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: jacobian(bands, sparsity="yes"), ValueError, r'sparsity must be "auto" or a pattern, but got \'yes\''),
        (
            lambda: jacobian(bands, sparsity=1),
            TypeError,
            r"a sparsity pattern must be a BCOO, .* but got 1 of type int",
        ),
        (lambda: jacobian(bands, sparsity=np.eye(5, 6)), TypeError, r"a sparsity pattern must .* dtype float64"),
        (lambda: jacobian(bands, check=True), ValueError, r"check=True compares a sparse result with a product; pass"),
        (
            lambda: jacobian(bands, sparsity="auto", check=1),
            TypeError,
            r"check must be True or False, but got 1 of type",
        ),
        (
            lambda: jacobian(bands, sparsity=np.eye(6, dtype=bool))(X),
            ValueError,
            r"the sparsity pattern must have shape \(5, 6\), but it has \(6, 6\)",
        ),
        (
            lambda: jacobian(lambda x: x.reshape(2, 3), sparsity=np.ones((2, 6), bool))(X),
            ValueError,
            r"the sparsity pattern must have shape \(6, 6\) or \(2, 3, 6\), but it has \(2, 6\)",
        ),
        (
            lambda: jacobian(tree, sparsity=np.ones((9, 4), bool))(POINT, 3.0),
            ValueError,
            r"the sparsity pattern must have shape \(9, 5\), but it has \(9, 4\)",
        ),
        (
            lambda: jacobian(tree, sparsity={"a": np.ones((3, 5), bool)})(POINT, 3.0),
            TypeError,
            r"sparsity must be one pattern of shape \(9, 5\), or patterns nested as the result",
        ),
        (
            lambda: jacobian(bands, sparsity=jax.vmap(jacobian(bands, sparsity="auto"))(XS)),
            ValueError,
            r"the sparsity pattern has batch or dense axes; pass one with sparse axes only",
        ),
        (
            lambda: jax.jit(lambda mask: jacobian(bands, sparsity=mask)(X))(np.ones((5, 6), bool)),
            TypeError,
            r"the sparsity pattern is traced; create it outside jit, or with NumPy",
        ),
        (
            lambda: jax.jit(lambda old: jacobian(bands, sparsity=old)(X))(jacobian(bands, sparsity="auto")(X)),
            TypeError,
            r"the sparsity pattern is traced",
        ),
        (lambda: jacobian(lambda x: x * 1j, mode="reverse", sparsity="auto")(X), TypeError, r".*complex"),
        (lambda: jacobian(lambda x: {}, sparsity="auto")(X), TypeError, r"fun must return a number or arrays"),
        (
            lambda: jacobian(bands, sparsity="auto")(np.arange(6)),
            TypeError,
            r"argument `x` is an array of shape \(6,\)",
        ),
    ],
)
def test_refusals(call: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=f"^jacobian: {match}"):
        call()


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 2**20])
def test_seeds_may_be_constants_or_compared(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "_FOLDED", limit)
    for chunk_size in (None, 1):
        sparse = jacobian(arrow, sparsity="auto", chunk_size=chunk_size)
        assert_equals(jax.jit(sparse)(LONG), jax.jit(jax.jacfwd(arrow))(LONG))
        assert_equals(jax.jit(jax.vmap(sparse))(LONGS), jax.jit(jax.vmap(jax.jacfwd(arrow)))(LONGS))


def test_uninitialized_arrays_are_not_known() -> None:
    """In jax 0.10 they are zeros, so that a product with one has no entries."""
    uninitialized = "empty" in str(jax.make_jaxpr(lambda x: jnp.empty_like(x))(X))
    assert jacobian(lambda x: x * jnp.empty_like(x), sparsity="auto")(X).nse == (len(X) if uninitialized else 0)
