"""Convolutions as products, against XLA's own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from plurax.transforms._convolutions import as_products
from plurax.transforms._convolutions.as_products import has_convolution
from plurax.transforms._convolutions.in_scans import with_scannable_gradients

pytestmark = pytest.mark.smoke


convolutions_as_products = partial(as_products.convolutions_as_products, everywhere=True)


def normal(seed: int, shape: tuple[int, ...], dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def names(jaxpr: Any) -> set[str]:
    """Return the primitives of a program, including nested ones."""
    found = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for value in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(getattr(value, "jaxpr", value), "eqns"):
                found |= names(getattr(value, "jaxpr", value))
    return found


def assert_same(fun: Callable[..., Any], *args: Any, tolerance: float = 1e-5) -> None:
    """Assert that convolutions as products give the same values, relative to the largest."""
    assert_equal(convolutions_as_products(fun), fun, *args, tolerance=tolerance)


def assert_equal(rewritten: Callable[..., Any], fun: Callable[..., Any], *args: Any, tolerance: float = 1e-5) -> None:
    expected, found = jax.jit(fun)(*args), jax.jit(rewritten)(*args)
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * max(1.0, np.abs(theirs).max(initial=0)))


def with_gradients(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns the value and the cotangents, for a non-constant output cotangent."""

    def both(*args: Any) -> Any:
        out, back = jax.vjp(fun, *args)
        return out, back(jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype))

    return both


@st.composite
def convolutions(draw: st.DrawFn, crops_and_pads: bool) -> tuple[Callable[..., Any], Callable[..., Any], Any, Any]:
    """Return an arbitrary convolution, the same on an explicitly cropped and padded input, and the input shapes.

    XLA reads out of bounds in an input that is cropped at its start and padded at its end (openxla/xla#48713). The
    gradient of an input that is padded by more than its window is such a case.
    """
    places = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (3, 1), (1, 2)]))
    many = lambda values: st.lists(st.sampled_from(values), min_size=places, max_size=places)
    window, sizes = draw(many([1, 2, 3, 5])), draw(many([5, 7, 8]))
    strides, dilation, spread = draw(many([1, 1, 2, 3])), draw(many([1, 1, 2])), draw(many([1, 1, 2]))
    padding = list(zip(draw(many([-1, 0, 1, 2])), draw(many([-1, 0, 1, 3])), strict=True))
    if not crops_and_pads:
        padding = [(low, min(high, 0)) if low < 0 else (low, high) for low, high in padding]
    channels, features, batch = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(3))
    names = "HWD"[:places]
    lhs, rhs, out = ("".join(draw(st.permutations(x + names))) for x in ("NC", "IO", "NC"))
    if draw(st.booleans()):  # channels last, the layout that is fast in loops
        lhs, rhs, out = f"N{names}C", f"{names}IO", f"N{names}C"
    lengths = {**dict(zip(names, sizes, strict=True)), "N": batch * groups[1], "C": channels * groups[0]}
    kernel = {**dict(zip(names, window, strict=True)), "I": channels, "O": features * groups[0] * groups[1]}

    numbers: dict[str, Any] = {"dimension_numbers": (lhs, rhs, out)}
    numbers |= {"feature_group_count": groups[0], "batch_group_count": groups[1]}

    def fun(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, strides, padding, lhs_dilation=spread, rhs_dilation=dilation, **numbers)

    def padded(x: jax.Array, w: jax.Array) -> jax.Array:
        places = (axis for axis in rhs if axis in names)  # JAX reads strides and padding in this order
        config = {axis: (*pad, step - 1) for axis, pad, step in zip(places, padding, spread, strict=True)}
        x = lax.pad(x, jnp.zeros((), x.dtype), [config.get(axis, (0, 0, 0)) for axis in lhs])
        return lax.conv_general_dilated(x, w, strides, "VALID", rhs_dilation=dilation, **numbers)

    return fun, padded, tuple(lengths[x] for x in lhs), tuple(kernel[x] for x in rhs)


@pytest.mark.slow
@pytest.mark.hypothesis
@given(convolutions(crops_and_pads=True))
def test_every_convolution_and_its_gradients(case: Any) -> None:
    fun, padded, lhs, rhs = case
    x, w = normal(0, lhs), normal(1, rhs)
    try:
        size = jax.eval_shape(fun, x, w).size
    except (TypeError, ValueError):  # the window is larger than the input
        return
    if size:
        assert_equal(convolutions_as_products(with_gradients(fun)), with_gradients(padded), x, w)


@pytest.mark.slow
@pytest.mark.hypothesis
@given(convolutions(crops_and_pads=False))
def test_every_convolution_with_loopable_gradients(case: Any) -> None:
    fun, padded, lhs, rhs = case
    x, w = normal(0, lhs), normal(1, rhs)
    try:
        size = jax.eval_shape(fun, x, w).size
    except (TypeError, ValueError):
        return
    if size:
        assert_equal(with_gradients(with_scannable_gradients(fun)), with_gradients(padded), x, w)


@pytest.mark.parametrize("rewrite", [convolutions_as_products, with_scannable_gradients])
@pytest.mark.parametrize(("window", "channels", "features", "strides"), [(3, 32, 32, 1), (5, 32, 2, 1), (7, 4, 9, 2)])
def test_half_precision_is_rounded_as_by_xla(
    rewrite: Any, window: int, channels: int, features: int, strides: int
) -> None:
    def fun(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, (strides,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def derivatives(fun: Any, *args: jax.Array) -> Any:
        return *with_gradients(fun)(*args), jax.jvp(fun, args, args)[1]

    def distance(found: Any, expected: Any) -> float:
        found, expected = (np.asarray(x, np.float64) for x in (found, expected))
        return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))

    args = [
        normal(i, shape, jnp.bfloat16)
        for i, shape in enumerate([(4, 8, 8, channels), (window, window, channels, features)])
    ]
    of_xla = jax.jit(partial(derivatives, fun))(*args)
    if rewrite is convolutions_as_products:
        ours = jax.jit(rewrite(partial(derivatives, fun)))(*args)
    else:
        ours = jax.jit(partial(derivatives, rewrite(fun)))(*args)
    exact = jax.jit(partial(derivatives, fun))(*(x.astype(jnp.float32) for x in args))
    for found, theirs, expected in zip(*map(jax.tree.leaves, (ours, of_xla, exact)), strict=True):
        assert found.dtype == jnp.bfloat16
        assert distance(found, expected) < 1.1 * distance(theirs, expected)


@pytest.mark.parametrize("rewrite", [convolutions_as_products, with_scannable_gradients])
def test_named_scopes_reach_into_calls(rewrite: Any) -> None:
    w = normal(1, (3, 2, 3))

    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        with jax.named_scope("inner"):
            return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))

    def fun(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            return jnp.sin(jax.nn.silu(inner(x)))

    eqns = jax.make_jaxpr(rewrite(fun))(normal(0, (2, 5, 2))).eqns
    scopes = {str(eqn.source_info.name_stack) for eqn in eqns}
    assert scopes - {""} == {"outer", "outer/inner"}  # the final transpose has no scope


class LeNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(2, 3, (5, 3), padding="VALID", rngs=rngs)
        self.second = nnx.Conv(3, 4, (3, 3), strides=(2, 1), rngs=rngs)
        self.dense = nnx.Linear(4 * 2 * 4, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.first(x)), (2, 2), (2, 2))
        x = nnx.gelu(self.second(x))
        return self.dense(x.reshape(len(x), -1))


def lenet_gradient() -> tuple[Callable[..., Any], Any, jax.Array]:
    graphdef, params = nnx.split(LeNet(nnx.Rngs(0)))

    def fun(params: Any, x: jax.Array) -> Any:
        return jax.value_and_grad(lambda p: jnp.mean(nnx.merge(graphdef, p)(x) ** 2))(params)

    return fun, params, normal(2, (6, 12, 10, 2))


class Test_programs:
    @pytest.mark.slow
    def test_a_network_and_its_gradient_contain_no_convolutions(self) -> None:
        fun, params, x = lenet_gradient()
        assert_same(fun, params, x)
        found = names(jax.make_jaxpr(convolutions_as_products(fun))(params, x).jaxpr)
        assert found.isdisjoint({"conv_general_dilated", "reduce_window_max", "select_and_scatter_add"})
        assert {"conv_general_dilated", "select_and_scatter_add"} <= names(jax.make_jaxpr(fun)(params, x).jaxpr)

    def test_under_vmap_over_weights_and_inputs(self) -> None:
        fun, params, x = lenet_gradient()
        many = jax.tree.map(lambda p: jnp.stack([p, 2 * p, -p]), params)
        mapped = jax.vmap(convolutions_as_products(fun), (0, 0))
        members = [params, jax.tree.map(lambda p: 2 * p, params), jax.tree.map(lambda p: -p, params)]
        expected = [jax.jit(fun)(member, x + i) for i, member in enumerate(members)]
        found = jax.jit(mapped)(many, jnp.stack([x, x + 1, x + 2]))
        for ours, *theirs in zip(*map(jax.tree.leaves, (found, *expected)), strict=True):
            np.testing.assert_allclose(ours, np.stack(theirs), atol=2e-5, rtol=1e-4)

    def test_the_axis_order_is_kept_through_elementwise_operations_and_restored(self) -> None:
        def fun(x: jax.Array, w: jax.Array) -> Any:
            y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            z = jnp.where(y > 0, jnp.exp(-y), y * jnp.arange(y.shape[1], dtype=y.dtype)[:, None, None])
            moved = z.transpose(2, 0, 3, 1) + 1
            return z.sum((0, 2)), z.max(3), moved, jnp.argmax(z, axis=1), z.reshape(len(z), -1), z[:, 1:, ::2], y.mean()

        assert_same(fun, normal(0, (2, 5, 7, 3)), normal(1, (3, 3, 3, 4)))

    def test_the_axis_order_is_kept_where_axes_of_size_one_come_and_go(self) -> None:
        """A mapped loss has an axis of size one at each convolution, and none at the pooling."""

        def fun(x: jax.Array, w: jax.Array) -> jax.Array:
            numbers = ("NHWC", "HWIO", "NHWC")
            for _ in range(2):
                y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
                x = nnx.avg_pool(jnp.tanh(y), (2, 1), (2, 1))
            return x

        def mapped(x: jax.Array, w: jax.Array) -> jax.Array:
            of_one = lambda x: fun(x[None], w).squeeze(0)
            return jax.vmap(lambda x: jnp.squeeze(of_one(x[0])[None], 0))(x[:, None])

        args = normal(0, (4, 8, 5, 3)), normal(1, (3, 2, 3, 3))
        assert_same(mapped, *args)

        def transposes(fun: Callable[..., Any]) -> int:
            equations = jax.make_jaxpr(convolutions_as_products(fun))(*args).jaxpr.eqns
            return sum(eqn.primitive.name == "transpose" and eqn.outvars[0].aval.size > 60 for eqn in equations)

        assert transposes(mapped) == transposes(fun)

    def test_inside_loops_and_branches(self) -> None:
        def conv(x: jax.Array, w: jax.Array) -> jax.Array:
            return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))

        def fun(x: jax.Array, ws: jax.Array) -> Any:
            def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
                x = jax.checkpoint(lambda x: jnp.tanh(conv(x, w)))(x)
                return lax.cond(x.sum() > 0, lambda x: conv(x, w), lambda x: x, x), x.sum()

            return jax.value_and_grad(lambda ws: lax.scan(layer, x, ws)[0].sum())(ws)

        args = normal(0, (2, 6, 3)), normal(1, (4, 3, 3, 3))
        assert_same(fun, *args)
        assert "conv_general_dilated" not in names(jax.make_jaxpr(convolutions_as_products(fun))(*args).jaxpr)

    def test_large_windows_stay(self) -> None:
        fun = partial(lax.conv, window_strides=(1, 1), padding="VALID")
        args = normal(0, (1, 1, 20, 20)), normal(1, (1, 1, 10, 10))
        assert_same(fun, *args, tolerance=1e-4)
        assert has_convolution(jax.make_jaxpr(convolutions_as_products(fun))(*args).jaxpr)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32"])
    def test_dtypes(self, dtype: str) -> None:
        with jax.enable_x64(dtype == "float64"):
            x, w = (normal(i, shape).astype(dtype) for i, shape in enumerate([(2, 3, 8, 6), (4, 3, 3, 2)]))
            fun = partial(lax.conv, window_strides=(2, 1), padding="SAME")
            eps = {"float16": 1e-3, "bfloat16": 1e-2, "float64": 1e-14, "int32": 0.0}[dtype]
            assert_same(fun if dtype == "int32" else with_gradients(fun), x, w, tolerance=4 * eps)


class Test_pooling:
    @pytest.mark.parametrize(
        ("window", "strides", "padding"),
        [
            ((2, 2), (2, 2), "VALID"),
            ((3, 2), (3, 2), "SAME"),
            ((3, 3), (2, 1), "VALID"),
            ((2, 3), (3, 4), "VALID"),
            ((3, 4), (2, 3), "SAME"),
            ((3, 2), (1, 2), ((2, 0), (1, 1))),
        ],
    )
    @pytest.mark.parametrize("pool", [nnx.max_pool, nnx.avg_pool, nnx.min_pool])
    @pytest.mark.parametrize("convolved", [False, True])
    def test_values_and_gradients(self, pool: Any, window: Any, strides: Any, padding: Any, convolved: bool) -> None:
        """Of an image, and of the result of a convolution, whose axes have another order."""
        # Rounded values, so that windows have ties: the first maximum receives the gradient. All are below the zeros of
        # padding, which are no maximum.
        x, w = jnp.round(normal(3, (2, 7, 9, 3))) - 9, jnp.ones((1, 1, 3, 3))
        first = lambda x: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        assert_same(with_gradients(lambda x: pool(first(x) if convolved else x, window, strides, padding)), x)

    @pytest.mark.parametrize(("window", "padding"), [((2, 2), "VALID"), ((3, 3), "SAME"), ((3, 3), ((2, 1), (0, 2)))])
    def test_nan_propagates_as_in_xla(self, window: Any, padding: Any) -> None:
        x = (
            normal(4, (1, 6, 4, 2))
            .at[0, 1, 2, 0]
            .set(jnp.nan)
            .at[0, 4, 1, 1]
            .set(jnp.inf)
            .at[0, :2, :2, 1]
            .set(-jnp.inf)
        )
        fun = with_gradients(lambda x: nnx.max_pool(x, window, (2, 2), padding))
        (value, (gradient,)), (value_, (gradient_,)) = jax.jit(fun)(x), jax.jit(convolutions_as_products(fun))(x)
        np.testing.assert_array_equal(value, value_)
        np.testing.assert_allclose(gradient, gradient_, rtol=1e-6, atol=1e-6)  # sums of several windows

    def test_in_the_axis_order_of_a_convolution(self) -> None:
        def fun(x: jax.Array, w: jax.Array) -> jax.Array:
            y = lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NCHW", "HWIO", "NCHW"))
            return lax.reduce_window(jax.nn.relu(y), -jnp.inf, lax.max, (1, 1, 2, 3), (1, 1, 2, 3), "VALID")

        assert_same(with_gradients(fun), normal(0, (3, 2, 9, 11)), normal(1, (2, 3, 2, 5)))


class Test_loopable_gradients:
    @pytest.mark.parametrize(("channels", "strides"), [(2, (2, 1)), (4, (2, 1)), (4, (1, 1))])
    def test_of_every_order_and_mode(self, channels: int, strides: tuple[int, int]) -> None:
        w = normal(1, (3, 3, channels, 3))

        def fun(x: jax.Array) -> jax.Array:
            y = lax.conv_general_dilated(
                x, jnp.sin(w * x.mean()), strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            return (jnp.tanh(y) ** 2).sum()

        x = normal(0, (2, 5, 4, channels))
        ours = with_scannable_gradients(fun)
        for derive in (jax.grad, jax.jacfwd, jax.hessian):
            np.testing.assert_allclose(jax.jit(derive(ours))(x), jax.jit(derive(fun))(x), rtol=1e-4, atol=1e-5)
        found, expected = (jax.jit(jax.vmap(jax.grad(f)))(x[:, None]) for f in (ours, fun))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

    def test_custom_rules_and_their_convolutions_are_kept(self) -> None:
        w = normal(1, (3, 2, 3))

        def fun(x: jax.Array) -> jax.Array:
            return jax.nn.relu(lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")))

        ours, x = with_scannable_gradients(fun), jnp.zeros((2, 5, 2))
        assert not jax.vjp(ours, x)[1](jnp.ones((2, 5, 3)))[0].any()  # relu's custom rule has a zero derivative at zero
        assert "conv_general_dilated" in names(jax.make_jaxpr(ours)(x).jaxpr)
        backward = jax.make_jaxpr(jax.grad(lambda x: ours(x).sum()))(x)
        assert str(backward).count("conv_general_dilated") == 1

    def test_inside_loops_and_checkpoints(self) -> None:
        w = normal(1, (3, 2, 2))

        def conv(x: jax.Array) -> jax.Array:
            return jnp.tanh(lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")))

        def fun(x: jax.Array) -> jax.Array:
            x = lax.scan(lambda x, _: (jax.checkpoint(conv)(x), None), x, None, length=3)[0]
            return (lax.cond(x.sum() > 0, conv, lambda x: x, x) ** 2).sum()

        ours, x = with_scannable_gradients(fun), normal(0, (2, 5, 2))
        np.testing.assert_allclose(jax.jit(jax.grad(ours))(x), jax.jit(jax.grad(fun))(x), rtol=1e-4, atol=1e-6)
        assert str(jax.make_jaxpr(jax.grad(ours))(x)).count("conv_general_dilated") < str(
            jax.make_jaxpr(jax.grad(fun))(x)
        ).count("conv_general_dilated")

    def test_an_operand_that_is_not_differentiated_costs_nothing(self) -> None:
        x, w = normal(0, (2, 5, 2)), normal(1, (3, 2, 3))
        fun = with_scannable_gradients(
            lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")).sum()
        )
        products = [
            str(jax.make_jaxpr(jax.grad(fun, argnums))(x, w)).count("dot_general") for argnums in (0, 1, (0, 1))
        ]
        assert products[0] < products[2]
        assert products[1] < products[2]
