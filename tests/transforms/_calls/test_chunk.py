"""`vmap(chunk_size=)`: the results of the unchunked map for every chunk size, in less memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from plurax.transforms import jacfwd, jacrev, vmap

X = np.sin(np.arange(35.0, dtype=np.float32)).reshape(5, 7)


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def assert_same(actual: Any, expected: Any) -> None:
    """Assert equal structures, shapes and dtypes; floats to a few ulp, everything else exactly."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if is_key(a):
            np.testing.assert_array_equal(jax.random.key_data(a), jax.random.key_data(b))
        elif jnp.issubdtype(a.dtype, jnp.inexact):
            np.testing.assert_allclose(a, b, rtol=8 * float(jnp.finfo(a.dtype).eps), atol=1e-6)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "other",
    [jnp.ones(3), jnp.ones(2, jnp.int32), 1.01 * jnp.ones(2), [jnp.ones(2)]],
    ids=["shape", "dtype", "value", "structure"],
)
def test_the_helper_detects_differences(other: Any) -> None:
    assert_same(jnp.ones(2), jnp.ones(2))
    with pytest.raises(AssertionError, match="differ|equal|dtype|shape|tolerance"):
        assert_same(jnp.ones(2), other)


def test_the_helper_detects_other_keys() -> None:
    with pytest.raises(AssertionError, match="not equal"):
        assert_same(jax.random.key(0), jax.random.key(1))


def everything(tree: Any, shared: Any, key: Any, *, scale: Any) -> Any:
    """Return many kinds of output: containers, constants, dtypes, random numbers, an unmapped output."""
    x = tree["x"][0]
    out = {
        "float": jnp.sin(x) @ shared * scale["s"],
        "half": (x[:2].astype(jnp.bfloat16), jnp.exp(1j * x[0])),
        "int": [jnp.argsort(x).astype(jnp.int8), x > 0],
        "key": jax.random.split(key),
        "drawn": jax.random.normal(key, (2,)),
        "constant": 2.0,
        "empty": jnp.zeros((0, 3)),
    }
    return out, shared.sum()


AXES = ({"x": [1, None]}, None, 0)
OUT_AXES = ({"float": -1, "half": (1, 0), "int": 0, "key": 1, "drawn": -1, "constant": 0, "empty": 2}, None)
ARGUMENTS = ({"x": [X.T, None]}, np.cos(np.arange(14, dtype=np.float32)).reshape(7, 2))


def arguments() -> tuple[Any, dict[str, Any]]:
    return (*ARGUMENTS, jax.random.split(jax.random.key(0), 5)), {"scale": {"s": np.arange(5.0, dtype=np.float32)}}


@pytest.fixture(scope="module")
def unchunked() -> Any:
    args, kwargs = arguments()
    return jax.jit(jax.vmap(everything, AXES, OUT_AXES))(*args, **kwargs)


@pytest.mark.parametrize("chunk_size", [1, 2, np.int64(99)])
def test_every_chunk_size_gives_the_same(unchunked: Any, chunk_size: int) -> None:
    args, kwargs = arguments()
    assert_same(jax.jit(vmap(everything, AXES, OUT_AXES, chunk_size=chunk_size))(*args, **kwargs), unchunked)


@given(data=st.data(), size=st.integers(0, 5), chunk_size=st.integers(1, 6))
def test_any_chunk_size_and_axes_give_the_same(data: st.DataObject, size: int, chunk_size: int) -> None:
    shape = data.draw(st.lists(st.integers(0, 3), max_size=2))
    rank = len(shape)
    axis, out_axis = (data.draw(st.integers(-rank - 1, rank)) for _ in range(2))
    shape.insert(axis % (rank + 1), size)
    x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    out = jax.jit(vmap(lambda x: x + 1, axis, out_axis, chunk_size=chunk_size))(x)
    assert_same(out, np.moveaxis(x + 1, axis, out_axis))


@pytest.mark.parametrize("size", [0, 1])
def test_short_axes_are_one_chunk(size: int) -> None:
    x = np.ones((3, size, 2), np.float32)
    assert_same(vmap(jnp.sin, 1, 2, chunk_size=1)(x), np.sin(x.swapaxes(1, 2)))


def test_the_last_chunk_holds_what_remains() -> None:
    sizes = []

    @jax.custom_batching.custom_vmap
    def double(x: Any) -> Any:
        return 2 * x

    @double.def_vmap
    def _(axis_size: int, in_batched: Any, x: Any) -> Any:
        sizes.append(axis_size)
        return 2 * x + 0, True

    assert_same(vmap(lambda x: double(x) + 1, chunk_size=3)(jnp.asarray(X)), jnp.asarray(2 * X + 1))
    assert set(sizes) == {3, 2}


def test_unmapped_outputs_are_repeated_or_shared() -> None:
    fun = lambda *xs: jnp.arange(3)
    assert_same(vmap(fun, axis_size=5, chunk_size=2)(), np.tile(np.arange(3, dtype=np.int32), (5, 1)))
    assert_same(vmap(fun, None, 1, axis_size=5, chunk_size=2)(1.0), np.tile(np.arange(3, dtype=np.int32), (5, 1)).T)
    assert_same(vmap(fun, (0, None), None, chunk_size=2)(X, "shared"), jnp.arange(3))


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 9])
@pytest.mark.parametrize("shared", [3.0, 3, True, 2j, np.float32(3), np.arange(2), jnp.bfloat16(3), None, ()])
def test_what_is_shared_may_be_no_array_of_jax(shared: Any, chunk_size: int) -> None:
    fun = lambda x: (x, {"shared": shared})
    for transform in (lambda fun: fun, jax.jit):
        results = (
            transform(vmap(fun, out_axes=(0, None), chunk_size=chunk_size))(X),
            transform(jax.vmap(fun, out_axes=(0, None)))(X),
        )
        assert_same(*jax.tree.map(jnp.asarray, results))


def test_chunks_never_change_the_random_numbers() -> None:
    key = jax.random.key(0)
    draw = lambda key, x: jax.random.bits(key, (2,)) + x
    alone = jax.jit(draw)
    x = np.zeros(5, np.uint32)
    for axis, keys in [(0, jax.random.split(key, 5)), (None, key), (0, jax.random.split(jax.random.PRNGKey(0), 5))]:
        expected = np.stack([alone(keys if axis is None else keys[i], x[0]) for i in range(5)])
        assert_same(jax.jit(vmap(draw, (axis, 0), chunk_size=2))(keys, x), expected)


def test_branches_differ_between_the_slices_of_a_chunk() -> None:
    fun = lambda x: lax.cond(x[0] > 0, jnp.cos, lambda x: 3 * x, x)
    assert_same(jax.jit(vmap(fun, chunk_size=3))(X), np.where(X[:, :1] > 0, np.cos(X), 3 * X))


# Under other transforms.


def loss(chunk_size: int | None, w: Any, x: Any) -> Any:
    rows = vmap(lambda row, bias: jnp.tanh(w["kernel"] @ row) + bias, (1, None), 1, chunk_size=chunk_size)
    return jnp.sum(jnp.sin(rows(x, w["bias"])))


W = {"kernel": np.cos(np.arange(21.0, dtype=np.float32)).reshape(3, 7), "bias": np.arange(3, dtype=np.float32)}


@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(lambda f: jax.value_and_grad(f, (0, 1)), id="value_and_grad"),
        pytest.param(lambda f: lambda *args: jax.jvp(f, args, args), id="jvp"),
        pytest.param(lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, jnp.stack([x, -x])), id="vmap"),
        pytest.param(lambda f: lambda w, x: jax.vmap(jax.grad(f), (None, 0))(w, jnp.stack([x, 2 * x])), id="vmap-grad"),
        pytest.param(lambda f: jax.grad(lambda w, x: jax.grad(f)(w, x)["kernel"].sum()), id="grad-grad"),
    ],
)
def test_chunks_work_under_transforms(transform: Callable[..., Any]) -> None:
    expected, actual = (jax.jit(transform(functools.partial(loss, chunk_size)))(W, X.T) for chunk_size in (None, 2))
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_maps_in_chunks_nest() -> None:
    fun = lambda x, y: x * y
    for inner, outer in [(2, 3), (None, 2), (2, None)]:
        nested = vmap(vmap(fun, (None, 0), chunk_size=inner), (0, None), 1, chunk_size=outer)
        assert_same(jax.jit(nested)(X[:, 0], X[0]), X[0][:, None] * X[:, 0])


def test_a_chunked_map_supports_collectives_of_an_outer_map() -> None:
    inner = vmap(lambda x: x - lax.pmean(x, "outer"), chunk_size=2)
    assert_same(vmap(inner, axis_name="outer")(X), X - X.mean(0))


def test_floats_are_equal_under_float64() -> None:
    with jax.enable_x64(True):
        x = np.sin(np.arange(10.0)).reshape(5, 2)
        assert_same(vmap(jnp.exp, chunk_size=2)(x), jnp.exp(x))


# Memory, as planned by the compiler.


def temporaries(fun: Callable[..., Any], *args: Any) -> int:
    analysis = jax.jit(fun).lower(*args).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def test_the_temporaries_are_those_of_one_chunk() -> None:
    n, width = 32, 64

    def fun(x: Any) -> Any:
        return jnp.sort(jnp.outer(x, x), axis=None)[::7].sum()  # compilers materialize the product to sort it

    x = jax.ShapeDtypeStruct((n, width), jnp.float32)
    whole = temporaries(vmap(fun), x)
    assert whole > n * width * width * 4
    for chunk_size in (1, 2, 3, 8):
        held = temporaries(vmap(fun, chunk_size=chunk_size), x)
        assert held == pytest.approx(whole * chunk_size / n, rel=0.1)


@pytest.mark.parametrize("out_axes", [0, 1, -1])
def test_the_result_is_stored_once(out_axes: int) -> None:
    n, width = 128, 48
    fun = lambda x: jnp.cos(jnp.outer(x, x))
    x = jax.ShapeDtypeStruct((n, width), jnp.float32)
    result = n * width * width * 4
    assert temporaries(vmap(fun, out_axes=out_axes, chunk_size=4), x) < result / 8
    # `lax.map` followed by `moveaxis` needs memory for the whole result.
    twice = lambda x: jnp.moveaxis(lax.map(fun, x, batch_size=4), 0, out_axes)
    assert out_axes == 0 or temporaries(twice, x) >= result


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("transform", [lambda fun: fun, jax.jit])
def test_references_are_mapped_and_shared_in_chunks(chunk_size: int, transform: Any) -> None:
    def fun(x: Any, rows: Any, both: Any, shared: Any) -> Any:
        rows[...] = rows[...] * x + shared[1]
        both["half"][1] += x.sum().astype(jnp.float16)
        return x + rows[0]

    def of(vmap: Any) -> Any:
        rows = jax.new_ref(jnp.arange(15.0).reshape(5, 3))
        both = {"half": jax.new_ref(jnp.ones((5, 2), jnp.float16))}
        mapped = transform(vmap(fun, (0, 0, 0, None)))
        out = mapped(jnp.linspace(0.0, 1.0, 15).reshape(5, 3), rows, both, jax.new_ref(jnp.arange(2.0)))
        return out, rows[...], both["half"][...]

    chex.assert_trees_all_close(of(functools.partial(vmap, chunk_size=chunk_size)), of(jax.vmap), rtol=1e-6)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5])
def test_every_element_of_a_result_is_written(chunk_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`jnp.empty` holds zeros in jax 0.10, and what happens to be in memory from 0.11 on."""

    def garbage(shape: Any, dtype: Any, **options: Any) -> jax.Array:
        return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 77, dtype)

    def fun(row: jax.Array) -> Any:
        return {"a": row * 2, "b": (row.sum(), jnp.arange(3))}

    expected = jax.vmap(fun, out_axes={"a": 1, "b": (0, -1)})(X)
    monkeypatch.setattr(jnp, "empty", garbage)
    assert_same(vmap(fun, out_axes={"a": 1, "b": (0, -1)}, chunk_size=chunk_size)(X), expected)
    for transform, plain in ((jacrev, jax.jacrev), (jacfwd, jax.jacfwd)):
        np.testing.assert_allclose(transform(jnp.sin, chunk_size=chunk_size)(X), plain(jnp.sin)(X), rtol=1e-6)
    mapped = vmap(lambda row: jnp.sin(row).sum(), chunk_size=chunk_size)
    np.testing.assert_allclose(jax.grad(lambda x: mapped(x).sum())(X), jnp.cos(X), rtol=1e-6)
