"""`vmap` on arrays against `jax.vmap`, every form of axes, and errors before tracing."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import inspect
from typing import Any, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from plurax.transforms import vmap

X = jnp.arange(24.0).reshape(2, 3, 4)
Y = jnp.cos(jnp.arange(60.0)).reshape(3, 4, 5)
Point = collections.namedtuple("Point", ["x", "y"])
Pair = jax.tree_util.register_dataclass(dataclasses.make_dataclass("Pair", ["x", "y"]))


class Axis(enum.IntEnum):
    LAST = -1


class Counted:
    """A callable object that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Any, y: Any = 0.0, **rest: Any) -> Any:
        self.calls += 1
        return x


def convolve(x: Any, w: Any) -> Any:
    return jnp.stack([jnp.dot(x[i - 1 : i + 2], w) for i in range(1, len(x) - 1)])


def total(tree: Any) -> Any:
    """Return a weighted sum of all arrays, so that swapping two of them changes it."""
    return sum((i + 1) * jnp.sum(jnp.sin(leaf)) for i, leaf in enumerate(jax.tree.leaves(tree)))


def shifted(x: Any, y: Any = 0.0) -> Any:
    return x - y


# The examples of MindSpore's tutorial.

LINE, WINDOW = jnp.arange(5.0), jnp.arange(1.0, 4.0)
HYPER_X = jnp.array([[1.0, 2, 3, 4, 5], [2, 3, 4, 5, 6], [3, 4, 5, 6, 7]])
HYPER_W = jnp.array([[1.0, 1, 1], [2, 2, 2], [3, 3, 3]])


@pytest.mark.parametrize(
    ("in_axes", "out_axes", "args"),
    [
        (0, 0, (jnp.stack([LINE] * 3), jnp.stack([WINDOW] * 3))),
        ((0, 1), 1, (jnp.stack([LINE] * 3), jnp.stack([WINDOW] * 3, axis=1))),
        ((0, None), 0, (jnp.stack([LINE] * 3), WINDOW)),
        ([0, None], 0, (jnp.stack([LINE] * 3), WINDOW)),
    ],
)
def test_one_convolution_over_three_copies_gives_three_rows(in_axes: Any, out_axes: int, args: Any) -> None:
    out = vmap(convolve, in_axes, out_axes)(*args)
    chex.assert_trees_all_equal(out.T if out_axes else out, jnp.array([[8.0, 14, 20]] * 3))


def test_nested_maps_give_every_pair_of_line_and_window() -> None:
    out = vmap(vmap(convolve, [None, 0]), [0, None])(HYPER_X, HYPER_W)
    expected = [
        [[6, 9, 12], [12, 18, 24], [18, 27, 36]],
        [[9, 12, 15], [18, 24, 30], [27, 36, 45]],
        [[12, 15, 18], [24, 30, 36], [36, 45, 54]],
    ]
    chex.assert_trees_all_equal(out, jnp.array(expected, jnp.float32))


@pytest.mark.parametrize(("in_axes", "out_axes"), [((0, 1, None), 1), ((0, -1, None), -1)])
def test_axes_may_differ_between_arguments_and_output(in_axes: Any, out_axes: int) -> None:
    x, y, z = jnp.array([[1, 2], [3, 4], [5, 6]]), jnp.array([[-3, -2, -1], [3, 2, 1]]), jnp.array([0, 3])
    out = vmap(lambda x, y, z: x + y + z, in_axes, out_axes)(x, y, z)
    chex.assert_trees_all_equal(out, jnp.array([[-2, 1, 4], [8, 9, 10]]))


def test_each_output_has_its_own_axis() -> None:
    a = jnp.array([[1, 2], [3, 4], [5, 6]])
    same, (double, triple) = vmap(lambda a: (a, (2 * a, 3 * a)), out_axes=(0, (1, 0)))(a)
    chex.assert_trees_all_equal((same, triple), (a, 3 * a))
    chex.assert_trees_all_equal(double, jnp.array([[2, 6, 10], [4, 8, 12]]))


def test_nested_maps_give_the_outer_product() -> None:
    out = vmap(vmap(jnp.multiply, (None, 0)), (0, None))(jnp.array([1, 2]), jnp.array([3, 4, 5]))
    chex.assert_trees_all_equal(out, jnp.array([[3, 4, 5], [6, 8, 10]]))


# Every form of axes, against `jax.vmap`.


@pytest.mark.parametrize(
    ("fun", "in_axes", "out_axes", "args", "kwargs"),
    [
        pytest.param(shifted, 1, 0, (X,), {}, id="int"),
        pytest.param(shifted, -1, -1, (X,), {}, id="negative"),
        pytest.param(shifted, (2, None), 1, (X, 5.0), {}, id="tuple"),
        pytest.param(lambda x, y: [x, y], [1, [0]], [1, [0]], (X, [Y]), {}, id="lists"),
        pytest.param(shifted, (None, 0), 0, (1.0, Y), {}, id="first-shared"),
        pytest.param(lambda d: (d["a"], d["b"]), ({"a": 2, "b": 1},), (0, -1), ({"a": X, "b": Y},), {}, id="dict"),
        pytest.param(total, ({"a": 1, "b": None},), 0, ({"a": [X, (X, X)], "b": Y},), {}, id="prefix"),
        pytest.param(total, (([0, {"c": -1}], None),), 0, (([X, {"c": X[0].T[:, :2]}], Y),), {}, id="nested"),
        pytest.param(total, (Point(1, 0),), 0, (Point(X, Y),), {}, id="namedtuple"),
        pytest.param(total, (Pair(None, 0),), 0, (Pair(2.0, Y),), {}, id="dataclass"),
        pytest.param(total, (0,), 0, (Pair(X, [X, None]),), {}, id="None-in-argument"),
        pytest.param(total, ((0, 1),), 0, ((X[0], None),), {}, id="axis-of-None"),
        pytest.param(lambda x, *, tree: x + total(tree), (None,), 0, (2.0,), {"tree": Y}, id="keyword"),
        pytest.param(lambda x, *, k: x + total(k), 1, 0, (X,), {"k": [Y, {"a": Y[..., 0]}]}, id="keyword-tree"),
        pytest.param(lambda *xs, **more: total((xs, more)), (0, 2), 0, (Y, X[..., :3]), {"b": Y}, id="star"),
        pytest.param(lambda x: {"a": (x, [x.T]), "b": 1.0}, 0, {"a": (-1, 1), "b": 0}, (X,), {}, id="out-prefix"),
        pytest.param(lambda x: (x, None, [2, 3.0, True]), 0, 0, (X,), {}, id="constants-out"),
        pytest.param(lambda x, y: (x + y, 2 * y), (0, None), (1, None), (X, Y[0, :, 0]), {}, id="out-None"),
        pytest.param(lambda x: x, 0, -2, (X,), {}, id="out-negative"),
        pytest.param(lambda x: jnp.zeros((0, 2)), 1, 1, (X,), {}, id="empty-out"),
        pytest.param(lambda x, y: x @ y, (0, None), 0, (np.asarray(X), np.ones((4, 1))), {}, id="numpy"),
        pytest.param(functools.partial(shifted, y=3.0), 2, 0, (X,), {}, id="partial"),
        pytest.param(jax.jit(shifted), (1, None), 0, (X, 1.0), {}, id="jitted"),
        pytest.param(jnp.add, (None, 0), 0, (X[0, 0], Y[..., 0]), {}, id="ufunc"),
        pytest.param(Counted(), 0, 0, (X,), {}, id="callable-object"),
        pytest.param(X[0].dot, 0, 0, (Y,), {}, id="bound-method-of-an-array"),
        pytest.param(lambda x, kind: x if kind == "a" else -x, (0, None), 0, (X, "a"), {}, id="shared-string"),
    ],
)
def test_every_form_of_axes_is_that_of_jax(fun: Any, in_axes: Any, out_axes: Any, args: Any, kwargs: Any) -> None:
    expected = jax.vmap(fun, in_axes, out_axes)(*args, **kwargs)
    out = vmap(fun, in_axes, out_axes)(*args, **kwargs)
    chex.assert_trees_all_equal_structs(out, expected)
    chex.assert_trees_all_equal(out, expected, strict=True)


@pytest.mark.parametrize(
    "x",
    [
        *(jnp.arange(6).reshape(3, 2).astype(dtype) for dtype in ("bfloat16", "int8", "uint32", "bool", "complex64")),
        jnp.ones((0, 2)),
        jnp.ones((1, 0)),
        jax.random.split(jax.random.key(0), (3, 2)),
        jax.random.split(jax.random.PRNGKey(0), 3),
    ],
    ids=lambda x: f"{x.dtype}{list(x.shape)}",
)
def test_every_kind_of_array_is_mapped(x: jax.Array) -> None:
    out = vmap(lambda row: row[::-1], out_axes=1)(x)
    assert (out.shape, out.dtype) == ((x.shape[1], x.shape[0]), x.dtype)
    assert bool(jnp.all(out == x[:, ::-1].T))


def test_float64_stays_float64() -> None:
    with jax.enable_x64(True):
        x = jnp.arange(6, dtype=jnp.float64).reshape(2, 3) / 3
        chex.assert_trees_all_equal(vmap(jnp.square, 1, 1)(x), x * x, strict=True)


@pytest.mark.parametrize(("in_axes", "out_axes"), [(np.int64(1), np.int32(0)), (Axis.LAST, 0), ((np.uint8(1),), 0)])
def test_any_integer_is_an_axis(in_axes: Any, out_axes: Any) -> None:
    chex.assert_trees_all_equal(vmap(jnp.sum, in_axes, out_axes)(X[0]), jnp.sum(X[0], 0))


def test_a_named_axis_takes_collectives() -> None:
    out = vmap(lambda x: x / lax.psum(x, "rows"), axis_name="rows")(X[0] + 1)
    chex.assert_trees_all_close(out.sum(0), jnp.ones(4), rtol=1e-6)


def test_axis_size_alone_maps_nothing_over_it() -> None:
    shape, three = (3, 2), np.int64(3)
    chex.assert_trees_all_equal(vmap(lambda: jnp.ones(2), axis_size=3)(), jnp.ones(shape))
    chex.assert_trees_all_equal(vmap(lambda: jnp.ones(2), (), axis_size=cast(int, three))(), jnp.ones(shape))
    chex.assert_trees_all_equal(vmap(lambda x: x, None, axis_size=3)(jnp.ones(2)), jnp.ones(shape))
    out = vmap(lambda _: lax.axis_index("i"), None, axis_size=3, axis_name="i")(0.0)
    chex.assert_trees_all_equal(out, jnp.arange(3))


def test_axis_size_that_agrees_changes_nothing() -> None:
    chex.assert_trees_all_equal(vmap(jnp.sin, axis_size=2)(X), jnp.sin(X))


def test_shared_and_split_keys_are_distinguished() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda key, x: x + jax.random.normal(key)
    shared = vmap(draw, (None, 0))(keys[0], jnp.zeros(3))
    chex.assert_trees_all_equal(shared, jnp.full(3, jax.random.normal(keys[0])))
    split = vmap(draw)(keys, jnp.zeros(3))
    chex.assert_trees_all_equal(split, jnp.stack([jax.random.normal(key) for key in keys]))


def test_the_arguments_of_the_map_are_those_of_the_function() -> None:
    mapped = vmap(shifted)
    assert list(inspect.signature(mapped).parameters) == ["x", "y"]
    chex.assert_trees_all_equal(jax.jit(mapped, donate_argnames="y")(X[0], y=X[1]), X[0] - X[1])
    assert mapped.__name__ == "vmap(shifted)"
    out = vmap(lambda _, model: _ - model)(X[0], model=X[1])
    chex.assert_trees_all_equal(vmap(lambda *, _, model: _ - model)(_=X[0], model=X[1]), out)


shapes = st.lists(st.integers(0, 3), min_size=0, max_size=3)


@given(data=st.data())
def test_any_axes_are_those_of_jax(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4))
    args, in_axes = [], []
    for i in range(data.draw(st.integers(1, 3))):
        shape = data.draw(shapes)
        axis = data.draw(st.one_of(st.none(), st.integers(-len(shape) - 1, len(shape)))) if i else 0
        if axis is not None:
            shape.insert(axis % (len(shape) + 1), size)
        args.append(np.arange(np.prod(shape)).reshape(shape).astype(np.int32))
        in_axes.append(axis)
    ranks = [arg.ndim - (axis is not None) for arg, axis in zip(args, in_axes, strict=True)]
    out_axes = tuple(data.draw(st.integers(-rank - 1, rank)) for rank in ranks)
    fun = lambda *xs: xs
    out = vmap(fun, tuple(in_axes), out_axes)(*args)
    chex.assert_trees_all_equal(out, jax.vmap(fun, tuple(in_axes), out_axes)(*args), strict=True)


# Errors. Those of a call are raised before the function is traced.


@pytest.mark.parametrize(
    ("fun", "options", "error", "match"),
    [
        (3, {}, TypeError, r"^vmap: fun must be a function, a bound method or a module, but got 3 of type int\.$"),
        (shifted, {"in_axes": 1.0}, TypeError, r"^vmap: in_axes must be an int, None, or a tuple .* got 1\.0 of type"),
        (shifted, {"in_axes": True}, TypeError, r"in_axes must be an int, .* but got True of type bool"),
        (shifted, {"in_axes": {"a": 0}}, TypeError, r"in_axes must be .* such as \(axes,\), but got \{'a': 0\} of"),
        (shifted, {"in_axes": {0}}, TypeError, r"in_axes must be .* but got \{0\} of type set"),
        (shifted, {"in_axes": (0, "1")}, TypeError, r"in_axes must hold ints and None, but got '1' of type str"),
        (shifted, {"in_axes": ([0, {"a": 0.5}],)}, TypeError, r"in_axes must hold ints and None, but got 0\.5"),
        (shifted, {"out_axes": "0"}, TypeError, r"^vmap: out_axes must hold ints and None, but got '0' of type str"),
        (shifted, {"out_axes": [False]}, TypeError, r"out_axes must hold ints and None, but got False of type bool"),
        (shifted, {"axis_size": 2.0}, TypeError, r"^vmap: axis_size must be an int or None, but got 2\.0 of type"),
        (shifted, {"axis_size": True}, TypeError, r"axis_size must be an int or None, but got True"),
        (shifted, {"axis_size": -1}, ValueError, r"^vmap: axis_size must be at least 0, but got -1\.$"),
        (shifted, {"chunk_size": 2.0}, TypeError, r"^vmap: chunk_size must be an int or None, but got 2\.0"),
        (shifted, {"chunk_size": True}, TypeError, r"chunk_size must be an int or None, but got True"),
        (shifted, {"chunk_size": np.array(2)}, TypeError, r"chunk_size must be an int or None, but got an array"),
        (shifted, {"chunk_size": jnp.array(2.5)}, TypeError, r"chunk_size must be an int or None, but got an array"),
        (shifted, {"memory_budget": np.array(2.5)}, TypeError, r"memory_budget must be a number of bytes .* an array"),
        (shifted, {"chunk_size": 0}, ValueError, r"^vmap: chunk_size must be at least 1, but got 0\.$"),
        (
            shifted,
            {"chunk_size": 1, "axis_name": "i"},
            ValueError,
            r"^vmap: with chunk_size, a collective over axis_name would",
        ),
        (shifted, {"memory_budget": "1MiB", "chunk_size": 2}, ValueError, r"^vmap: chunk_size and memory_budget both"),
        (shifted, {"memory_budget": "1 cow"}, ValueError, r"^vmap: memory_budget must be .* but got '1 cow'"),
    ],
)
def test_bad_options_are_refused_at_once(fun: Any, options: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        vmap(fun, **options)


@pytest.mark.parametrize(
    ("options", "args", "kwargs", "match"),
    [
        ({}, (X, Y), {}, r"axis 0 of argument `x` has size 2, but axis 0 of argument `y` has size 3; map arrays of"),
        (
            {"in_axes": (0, -1)},
            ({"a": [X]}, (X, Y)),
            {},
            r"argument `x\['a'\]\[0\]` .* axis -1 of argument `y\[0\]`",
        ),
        (
            {},
            (X,),
            {"z": {"k": Y}},
            r"`x` has size 2, but axis 0 of argument `z\['k'\]` has size 3; map .* keyword .* functools\.partial",
        ),
        ({"axis_size": 2}, (X,), {"z": Y}, r"axis_size is 2, but .*`z` has size 3; .* keyword .* functools\.partial"),
        ({}, (Pair(X, Y),), {}, r"`x\.x` has size 2, but axis 0 of argument `x\.y` has size 3"),
        ({"axis_size": 5}, (X,), {}, r"axis_size is 5, but axis 0 of argument `x` has size 2; map arrays of one size"),
        ({"in_axes": 3}, (X,), {}, r"argument `x` cannot be mapped over axis 3: it is an array of shape \(2, 3, 4\)"),
        ({"in_axes": -4}, (X,), {}, r"argument `x` cannot be mapped over axis -4: .* dtype float32; name an axis"),
        ({"in_axes": (None, (0, 1))}, (X, (Y, Y[0, 0])), {}, r"argument `y\[1\]` cannot be mapped over axis 1"),
        ({}, (1.0,), {}, r"argument `x` cannot be mapped over axis 0: it is 1\.0 of type float; .* or pass None"),
        ({}, ([1.0, 2.0],), {}, r"argument `x\[0\]` cannot be mapped over axis 0: it is 1\.0 of type float"),
        ({}, (X, "sum"), {}, r"argument `y` cannot be mapped over axis 0: it is 'sum' of type str"),
        ({}, (X,), {"mode": "sum"}, r"argument `mode` cannot .* type str; .* keyword arguments .* functools\.partial"),
        ({"in_axes": (0,)}, (X, X), {}, r"in_axes has 1 entries, but the call has 2 positional argument\(s\); give"),
        ({"in_axes": (0, None)}, (X,), {"y": X}, r"in_axes has 2 entries, but the call has 1 positional"),
        ({"in_axes": ({"b": 0},)}, ({"a": X},), {}, r"in_axes for argument `x` is \{'b': 0\}, which is not a prefix"),
        ({"in_axes": ((0, 0),)}, ([X, X],), {}, r"in_axes for argument `x` is \(0, 0\), .* same containers and keys"),
        ({"in_axes": (0, [0])}, (X, X), {}, r"in_axes for argument `y` is \[0\], which is not a prefix"),
        ({"in_axes": (Point(0, 0),)}, (Pair(X, X),), {}, r"in_axes for argument `x` is Point\(x=0, y=0\), which"),
        ({"in_axes": None}, (X,), {}, r"nothing is mapped: every entry of in_axes is None; map at least one"),
        ({"in_axes": (None, None)}, (X, X), {}, r"nothing is mapped: every entry .* or pass axis_size\.$"),
        ({}, (), {}, r"nothing is mapped: the call has no array; map"),
        ({}, ({}, None), {}, r"nothing is mapped: the call has no array; map"),
    ],
)
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_arguments_that_do_not_fit_are_refused_untraced(
    chunk_size: int | None, options: Any, args: Any, kwargs: Any, match: str
) -> None:
    fun = Counted()
    with pytest.raises(ValueError, match=f"^vmap: .*{match}"):
        vmap(fun, **options, chunk_size=chunk_size)(*args, **kwargs)
    assert fun.calls == 0


def test_every_argument_has_a_name_in_an_error() -> None:
    def named(function: Any, *args: Any) -> str:
        with pytest.raises(ValueError, match="has size 2, but") as caught:
            vmap(function)(*args)
        return str(caught.value).replace("vmap: axis 0 of argument ", "").partition(" has size")[0]

    assert named(lambda first, second: 0, X, Y) == "`first`"
    assert named(lambda *rest: 0, X, Y) == "`rest[0]`"
    assert named(functools.partial(lambda bound, free, other: 0, 1), X, Y) == "`free`"
    assert named(vmap(lambda first, second: 0), X, Y) == "`first`"
    assert named(Counted(), X, Y) == "`x`"
    assert named(max, X, Y) == "`argument 0`"


@pytest.mark.parametrize(
    ("out_axes", "match"),
    [
        (2, r"^vmap: out_axes is 2 for output\['a'\]\[0\], which has 2 axes once it is mapped; name one from -2 to 1"),
        ({"a": [0, -2], "b": 0}, r"^vmap: out_axes is -2 for output\['a'\]\[1\], which has 1 axes .* from -1 to 0"),
        ({"a": 0}, r"^vmap: out_axes=\{'a': 0\} is not a prefix of the output's structure .* same containers and keys"),
        ((0, 0), r"^vmap: out_axes=\(0, 0\) is not a prefix"),
        ({"a": (0, 0), "b": 0}, r"is not a prefix of the output's structure"),
    ],
)
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_out_axes_that_do_not_fit_are_refused(chunk_size: int | None, out_axes: Any, match: str) -> None:
    mapped = vmap(lambda x: {"a": [x, 1.0], "b": x}, out_axes=out_axes, chunk_size=chunk_size)
    with pytest.raises(ValueError, match=match):
        mapped(X[0])


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_an_output_that_is_mapped_needs_an_axis(chunk_size: int | None) -> None:
    with pytest.raises(ValueError, match="out_axes, got axis spec None but output was batched"):
        vmap(jnp.sin, out_axes=None, chunk_size=chunk_size)(X)


def test_later_changes_of_in_axes_have_no_effect() -> None:
    in_axes: list[Any] = [0, None]
    mapped = vmap(shifted, in_axes)
    in_axes[1] = 0
    chex.assert_trees_all_equal(mapped(X, Y[0, 0, 0]), X - Y[0, 0, 0])
