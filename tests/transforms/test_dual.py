"""`Dual` and `dual`: forward mode as arithmetic on pairs, against `jax.jvp`."""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.transforms import Dual, dual, grad, vmap

X = np.array([[0.5, -1.0, 2.0], [3.0, 0.1, -0.4]], np.float32)
T = np.array([[1.0, 0.0, -2.0], [0.3, 5.0, 1.0]], np.float32)
FLOAT0 = np.zeros((3,), jax.dtypes.float0)


class Net(nnx.Module):
    """Three inputs, two outputs, BatchNorm and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> jax.Array:
        return self.drop(self.norm(self.dense(x)))


class Gain(nnx.Module):
    """A gain for each of three inputs, and a count of the calls."""

    def __init__(self, value: float) -> None:
        self.gain = nnx.Param(jnp.full(3, value))
        self.count = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> jax.Array:
        self.count[...] += 1
        return x * self.gain[...]


def assert_dual(actual: Any, expected: tuple[Any, Any], rtol: float = 1e-6) -> None:
    """Assert that a `Dual` has the structures, shapes, dtypes and values of `jax.jvp`'s result."""
    assert isinstance(actual, Dual)
    chex.assert_trees_all_equal_shapes_and_dtypes((actual.primal, actual.tangent), expected)
    chex.assert_trees_all_close((actual.primal, actual.tangent), expected, rtol=rtol, atol=rtol)


def test_the_helper_detects_differences() -> None:
    assert_dual(Dual(jnp.ones(2), jnp.zeros(2)), (jnp.ones(2), jnp.zeros(2)))
    for wrong in (Dual(jnp.ones(2), jnp.ones(2)), Dual(jnp.ones(2, jnp.bfloat16), jnp.zeros(2, jnp.bfloat16)), 1.0):
        with pytest.raises(AssertionError):
            assert_dual(wrong, (jnp.ones(2), jnp.zeros(2)))


# Arguments.


@pytest.mark.parametrize(
    ("fun", "primals"),
    [
        pytest.param(lambda x: x * jnp.sin(x), (X,), id="array"),
        pytest.param(lambda x, y: x @ y, (X, X.T), id="two"),
        pytest.param(lambda x: x**3, (2.0,), id="number"),
        pytest.param(lambda x: x**3, (jnp.ones((2, 0)),), id="empty"),
        pytest.param(lambda x: x**3, (jnp.asarray(X, jnp.bfloat16),), id="bfloat16"),
        pytest.param(lambda z: jnp.abs(z * z), (X + 1j * T,), id="complex"),
        pytest.param(lambda p: p["a"] * p["b"][1], ({"a": X, "b": (None, 2.0 * X)},), id="pytree"),
        pytest.param(jax.jit(jnp.vdot), (X, 2 * X), id="jitted"),
    ],
)
def test_values_and_tangents_are_those_of_jvp(fun: Any, primals: Any) -> None:
    tangents = jax.tree.map(lambda x: jnp.cos(x).astype(jnp.result_type(x)), primals)
    expected = jax.jvp(fun, primals, tangents)
    actual = dual(fun)(*map(Dual, primals, tangents))
    assert_dual(actual, expected)
    assert_dual(jax.jit(dual(fun))(*map(Dual, primals, tangents)), expected)


def test_float64() -> None:
    with jax.enable_x64(True):
        x = X.astype(np.float64)
        assert_dual(dual(jnp.sin)(Dual(x, T.astype(np.float64))), (jnp.sin(x), jnp.cos(x) * T), 1e-14)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda f, x: f(x, 3.0), id="positional"),
        pytest.param(lambda f, x: f(factor=3.0, x=x), id="keyword"),
        pytest.param(
            lambda f, x: dual(lambda tree, how: how * f.__wrapped__(*tree["a"]))({"a": [x, 3.0]}, 1.0), id="nested"
        ),
        pytest.param(lambda f, x: f(x, jnp.array(3.0), mode="cube"), id="string"),
    ],
)
def test_duals_may_be_any_argument(call: Any) -> None:
    def fun(x: Any, factor: Any, mode: str = "cube") -> Any:
        assert mode == "cube"
        assert not isinstance(x, Dual)
        return factor * x**3

    assert_dual(call(dual(fun), Dual(X, T)), (jnp.asarray(3 * X**3), jnp.asarray(9 * X**2 * T)))


def test_the_others_have_tangent_zero() -> None:
    key = jax.random.key(0)
    out = dual(lambda x, y, key: (x * y, y, jax.random.normal(key, (3,)) * x))(Dual(X, T), 2 * X, key=key)
    noise = jax.random.normal(key, (3,))
    assert_dual(out[0], (jnp.asarray(2 * X * X), jnp.asarray(2 * X * T)))
    assert_dual(out[1], (jnp.asarray(2 * X), jnp.zeros((2, 3))))
    assert_dual(out[2], (noise * X, noise * T))
    both = dual(jnp.multiply)(Dual(X, T), Dual(2 * X, T))
    assert_dual(both, (jnp.asarray(2 * X * X), jnp.asarray(3 * X * T)))


def test_outputs_of_every_kind() -> None:
    fun = lambda x: {"a": [x**2, None], "name": "text", "type": int, "number": 2.0, "count": 3, "sign": x > 0}
    out = dual(fun)(Dual(X, T))
    assert (out["name"], out["type"], out["a"][1]) == ("text", int, None)
    assert_dual(out["a"][0], (jnp.asarray(X**2), jnp.asarray(2 * X * T)))
    assert_dual(out["number"], (jnp.array(2.0), jnp.array(0.0)))
    assert isinstance(out["count"].primal, jax.Array)
    for name, shape in (("count", ()), ("sign", (2, 3))):
        assert out[name].tangent.dtype == jax.dtypes.float0
        assert out[name].tangent.shape == out[name].primal.shape == shape
    assert dual(lambda x: None)(Dual(X, T)) is None
    assert dual(lambda x: "text")(Dual(X, T)) == "text"


def test_integers_are_constants_with_tangents_of_float0() -> None:
    index = Dual(np.arange(3), FLOAT0)
    assert_dual(dual(lambda x, i: x[0, i])(Dual(X, T), index), (jnp.asarray(X[0]), jnp.asarray(T[0])))
    assert_dual(jax.jit(dual(lambda x, i: x[0, i]))(Dual(X, T), index), (jnp.asarray(X[0]), jnp.asarray(T[0])))


def test_the_function_keeps_its_name_and_runs_once() -> None:
    calls = []

    def counted(x: Any) -> Any:
        calls.append(x)
        return x

    dual(counted)(Dual(X, T))
    assert len(calls) == 1
    assert dual(counted).__name__ == "dual(counted)"


# The pair.


def test_a_dual_is_a_frozen_pytree() -> None:
    pair = Dual({"a": X}, {"a": T})
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(pair)] == [
        ".primal['a']",
        ".tangent['a']",
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        pair.primal = 1.0
    shapes = jax.tree.map(np.shape, Dual(X, T))
    assert (shapes.primal, shapes.tangent) == ((2, 3), (2, 3))
    assert jax.tree.structure(jax.eval_shape(lambda: pair)) == jax.tree.structure(pair)
    jax.tree.map(lambda x: "anything", pair)
    assert (Dual(2.0, 1).primal, Dual(2.0, 1).tangent) == (2.0, 1)
    assert_dual(dual(lambda x: x**2)(Dual(jnp.bfloat16(3), 1)), (jnp.bfloat16(9), jnp.bfloat16(6)))


@pytest.mark.parametrize("map_over", [jax.vmap, vmap])
def test_vmap_maps_both_parts(map_over: Any) -> None:
    out = map_over(dual(lambda x, y: jnp.sum(x * y)), in_axes=(0, None))(Dual(X, T), X[0])
    assert_dual(out, (X @ X[0], T @ X[0]))
    many = map_over(lambda t: dual(jnp.sin)(Dual(X[0], t)).tangent)(jnp.eye(3))
    chex.assert_trees_all_close(many, jnp.diag(jnp.cos(X[0])))
    signs = map_over(dual(lambda x: x > 0))(Dual(X, T))
    assert signs.tangent.shape == (2, 3)


def test_duals_pass_through_scan_and_grad() -> None:
    def step(pair: Any, x: Any) -> Any:
        pair = dual(lambda p: p * jnp.sin(x))(pair)
        return pair, pair.tangent

    last, tangents = jax.lax.scan(step, Dual(jnp.float32(2.0), jnp.float32(1.0)), X[0])
    expected = jnp.cumprod(jnp.sin(X[0]))
    chex.assert_trees_all_close(tangents, expected, rtol=1e-6)
    assert_dual(last, (2 * expected[-1], expected[-1]))
    slope = jax.grad(lambda x: dual(lambda x: x**3)(Dual(x, 1.0)).tangent)(2.0)
    assert float(slope) == 12


# Duals of duals.


def test_second_derivatives_by_duals_of_duals() -> None:
    fun = lambda x: jnp.exp(jnp.sin(x)) * x
    first = lambda x, t: jax.jvp(fun, (x,), (t,))
    expected = jax.jvp(first, (X, T), (2 * T, 3 * X))
    inner = dual(lambda x, t: dual(fun)(Dual(x, t)).tangent)(Dual(X, 2 * T), Dual(T, 3 * X))
    assert_dual(inner, (expected[0][1], expected[1][1]), 1e-5)
    for twice in (dual(dual(fun)), jax.jit(dual(dual(fun)))):
        both = twice(Dual(Dual(X, T), Dual(2 * T, 3 * X)))
        assert_dual(both.primal, expected[0], 1e-5)
        assert_dual(both.tangent, expected[1], 1e-5)
    third = dual(lambda x: dual(lambda x: dual(lambda x: x**4)(Dual(x, 1.0)).tangent)(Dual(x, 1.0)).tangent)
    assert_dual(third(Dual(2.0, 1.0)), (jnp.array(48.0), jnp.array(48.0)))


def test_an_inner_dual_keeps_integers_and_text() -> None:
    out = dual(dual(lambda x: (x > 0, "text")))(Dual(Dual(X, T), Dual(T, X)))
    assert out[1] == "text"
    assert isinstance(out[0].primal, Dual)
    assert out[0].primal.tangent.dtype == jax.dtypes.float0


# Modules.


def test_a_module_carries_tangents_on_its_parameters() -> None:
    model, twin = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    loss = lambda model, x: jnp.mean(model(x) ** 3)
    direction = jax.tree.map(jnp.cos, nnx.state(model, nnx.Param))
    gradient = grad(loss)(twin, X)
    slope = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient, direction)))
    out = dual(loss)(Dual(model, direction), X)
    np.testing.assert_allclose(out.tangent, slope, rtol=1e-5)
    state, of_twin = (nnx.state(m, nnx.Not(nnx.RngKey)) for m in (model, twin))
    chex.assert_trees_all_close(state, of_twin, rtol=1e-5)
    assert not np.allclose(model.norm.mean[...], 0)


@pytest.mark.parametrize(
    ("fun", "call"),
    [
        pytest.param(lambda m, x: m(x), lambda f, m, t: f(Dual(m, t), X), id="State"),
        pytest.param(lambda m, x: m(x), lambda f, m, t: f(Dual(m, nnx.to_pure_dict(t)), X), id="dict"),
        pytest.param(lambda m, x: m(x), lambda f, m, t: f(x=X, m=Dual(m, t)), id="keyword"),
        pytest.param(lambda p, x: p["m"][0](x), lambda f, m, t: f({"m": [Dual(m, t)]}, X), id="in-a-tree"),
        pytest.param(
            lambda p, x: p["m"][0](x), lambda f, m, t: f(Dual({"m": [m]}, {"m": [t]}), X), id="tree-in-a-dual"
        ),
        pytest.param(nnx.jit(lambda m, x: m(x)), lambda f, m, t: f(Dual(m, t), X), id="of-nnx.jit"),
    ],
)
def test_modules_may_be_any_argument(fun: Any, call: Any) -> None:
    model = Gain(2.0)
    tangent = jax.tree.map(lambda p: p + 1, nnx.state(model, nnx.Param))
    assert_dual(call(dual(fun), model, tangent), (jnp.asarray(2 * X), jnp.asarray(3 * X)))
    assert int(model.count[...]) == 1
    chex.assert_trees_all_equal(model.gain[...], jnp.full(3, 2.0))


def test_a_module_is_the_function() -> None:
    model = Gain(2.0)
    for fun in (model, model.__call__):
        assert_dual(dual(fun)(Dual(X, T)), (jnp.asarray(2 * X), jnp.asarray(2 * T)))
    assert int(model.count[...]) == 2
    assert_dual(dual(lambda x, m: m(x))(Dual(X, T), model), (jnp.asarray(2 * X), jnp.asarray(2 * T)))
    assert int(model.count[...]) == 3


def test_a_dual_module_passes_through_jit_and_vmap() -> None:
    model = Gain(2.0)
    tangent = nnx.state(model, nnx.Param)
    assert_dual(jax.jit(dual(lambda m, x: m(x)))(Dual(model, tangent), X), (jnp.asarray(2 * X), jnp.asarray(2 * X)))
    rows = jax.vmap(lambda t: dual(lambda m: jnp.sum(X * m.gain[...]))(Dual(model, {"gain": t})).tangent)(jnp.eye(3))
    chex.assert_trees_all_close(rows, X.sum(0), rtol=1e-6)


def test_a_module_may_be_returned() -> None:
    def step(model: Any, x: Any) -> Any:
        model(x)
        return {"model": model}

    model = Gain(2.0)
    out = dual(step)(Dual(model, {"gain": jnp.arange(3.0)}), X)["model"]
    assert isinstance(out.primal, Gain)
    assert isinstance(out.tangent, nnx.State)
    chex.assert_trees_all_equal(out.tangent["gain"][...], jnp.arange(3.0))
    again = dual(lambda m, x: m(x))(out, X)
    assert_dual(again, (jnp.asarray(2 * X), jnp.asarray(jnp.arange(3.0) * X)))


# Refusals.


@pytest.mark.parametrize(
    ("primal", "tangent", "error", "match"),
    [
        (
            {"a": [X]},
            {"a": [T[0]]},
            ValueError,
            r"^Dual: the tangent of `primal\['a'\]\[0\]` is an array of shape \(3,\) and dtype float32, but the primal "
            r"has shape \(2, 3\) and dtype float32; pass an array of that shape and dtype\.$",
        ),
        (
            X,
            jnp.asarray(T, jnp.bfloat16),
            ValueError,
            r"tangent of `primal` is .* dtype bfloat16, but .* dtype float32",
        ),
        (X, T.astype(np.float16), ValueError, r"tangent of `primal` is .* dtype float16, but .* dtype float32"),
        (X, 1.0, ValueError, r"tangent of `primal` is 1\.0 of type float, but the primal has shape \(2, 3\)"),
        ({"a": X}, {"b": T}, ValueError, r"has the structure PyTreeDef\({'b': \*}\), but the primal has .*'a': \*"),
        ([X], (T,), ValueError, r"has the structure PyTreeDef\(\(\*,\)\), but the primal has PyTreeDef\(\[\*\]\)"),
        (X, None, ValueError, r"has the structure PyTreeDef\(None\), but the primal has PyTreeDef\(\*\)"),
        (
            {"n": np.arange(3)},
            {"n": np.ones(3)},
            TypeError,
            r"`primal\['n'\]` is .* dtype int64, which has no derivative",
        ),
        ("a", "b", TypeError, r"^Dual: `primal` is 'a' of type str, which has no derivative; let fun close over it"),
        (Gain(1.0), {"gain": jnp.ones(2)}, ValueError, r"tangent of `primal\['gain'\]` is an array of shape \(2,\)"),
        (Gain(1.0), {"gian": jnp.ones(3)}, ValueError, r"'gian': \*}\), but the primal has PyTreeDef\({'gain': \*}\)"),
        (
            Gain(1.0),
            jnp.ones(3),
            ValueError,
            r"has the structure PyTreeDef\(\*\), but the primal has PyTreeDef\({'gain",
        ),
    ],
)
def test_a_tangent_unlike_the_primal_is_refused(primal: Any, tangent: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        Dual(primal, tangent)


def test_mismatched_parts_are_refused() -> None:
    broken = jax.tree.unflatten(jax.tree.structure(Dual(X, T)), [X, T[0]])
    with pytest.raises(ValueError, match=r"^dual: the tangent of `duals\[1\]` is an array of shape \(3,\)"):
        dual(lambda x, y: x * y)(Dual(X, T), broken)


def test_a_call_without_a_dual_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^dual: no argument is a Dual; wrap one, as in dual\(f"):
        dual(lambda x, y: x)(X, y={"a": T})
    with pytest.raises(TypeError, match=r"^dual: fun must be a function, a bound method or a module, but got None\.$"):
        dual(None)


def assign(model: Any, x: Any) -> jax.Array:
    model.gain[...] = 2 * model.gain[...]
    return model(x)


def extend(model: Any, x: Any) -> jax.Array:
    model.seen = nnx.Variable(x)
    return model(x)


@pytest.mark.parametrize(
    ("fun", "match"),
    [
        (assign, r"^dual: fun assigns the parameter `gain` of a model; keep values"),
        (extend, r"^dual: fun changes the structure of Gain \(`seen`\)"),
    ],
)
def test_changes_that_would_be_lost_are_refused(fun: Any, match: str) -> None:
    model = Gain(1.0)
    with pytest.raises(ValueError, match=match):
        dual(fun)(Dual(model, nnx.state(model, nnx.Param)), X)
    assert int(model.count[...]) == 0
    chex.assert_trees_all_equal(model.gain[...], jnp.ones(3))


def test_modules_that_share_a_variable_are_refused() -> None:
    first, second = Gain(1.0), Gain(2.0)
    second.gain = first.gain
    with pytest.raises(ValueError, match=r"^dual: `a` and `b` share the variable `gain`"):
        dual(lambda a, b, x: a(x) + b(x))(Dual(first, {"gain": jnp.ones(3)}), second, X)
