"""`jvp`, `vjp` and `linearize` of arrays and modules, against JAX's, and their errors."""

from __future__ import annotations

from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.transforms import grad, jvp, linearize, vjp, vmap

X = np.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.5]], np.float32)
V = np.cos(X)
AD: Any = jax.ad
FLOAT0 = np.zeros((), jax.dtypes.float0)


class Counted(nnx.Module):
    def __init__(self) -> None:
        self.gain = nnx.Param(jnp.array([1.0, -2.0, 3.0]))
        self.count = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> jax.Array:
        self.count[...] += 1
        return jnp.sin(x * self.gain[...])


def fun(x: Any, tree: Any) -> Any:
    return {"out": jnp.tanh(x * tree["a"][0]), "sum": (jnp.sum(x**2),)}


def assert_close(actual: Any, expected: Any) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_the_helper_detects_differences() -> None:
    with pytest.raises(AssertionError, match="close"):
        assert_close(jnp.ones(2), 1.01 * jnp.ones(2))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float64, jnp.complex64])
def test_values_equal_those_of_jax(dtype: Any) -> None:
    with jax.enable_x64(True):
        primals = (jnp.asarray(X, dtype), {"a": [jnp.asarray(2.0, dtype), None]})
        tangents = (jnp.asarray(V, dtype), {"a": [jnp.asarray(-1.0, dtype), None]})
        assert_close(jvp(fun, primals, tangents), jax.jvp(fun, primals, tangents))
        out, push = linearize(fun, *primals)
        assert_close((out, push(*tangents)), jax.jvp(fun, primals, tangents))
        out, pull = vjp(fun, *primals)
        assert_close(pull(out), jax.vjp(fun, *primals)[1](out))
        assert_close(pull(1.0), jax.vjp(fun, *primals)[1](jax.tree.map(jnp.ones_like, out)))


def test_numbers_and_numpy_arrays_are_accepted() -> None:
    assert_close(jvp(lambda x, y: x * y, (3.0, np.ones(2)), (1, np.ones(2))), (3 * jnp.ones(2), 4 * jnp.ones(2)))
    assert jvp(lambda x, n: x * n, (1.0, 2), (1.0, FLOAT0)) == (2.0, 2.0)
    assert jvp(lambda x: x, [2.0], [1.0]) == (2.0, 1.0)


def test_maps_of_linear_functions() -> None:
    _, push = linearize(jnp.sin, X)
    _, pull = vjp(jnp.sin, X)
    many = np.stack([V, X, -V])
    assert_close(jax.jit(vmap(push))(many), np.cos(X) * many)
    assert_close(jax.jit(vmap(pull))(many), (np.cos(X) * many,))


@pytest.mark.parametrize("linear", [vjp, linearize])
def test_returned_functions_pass_through_transforms(linear: Any) -> None:
    """As in JAX, the returned functions pass through jit, vmap and scan, and as arguments of these."""
    tree = {"a": [jnp.float32(2.0), None]}
    plain = getattr(jax, linear.__name__)
    out = plain(fun, X, tree)[0]
    vectors = (out,) if linear is vjp else (V, tree)
    expected = plain(fun, X, tree)[1](*vectors)
    of_x = lambda x: linear(fun, x, tree)
    found, linear_map = jax.jit(of_x)(X)
    assert_close((found, linear_map(*vectors)), (out, expected))
    assert_close(jax.jit(lambda f, v: f(*v))(linear_map, vectors), expected)
    assert_close(jax.jit(linear_map)(*vectors), expected)
    _, maps = jax.vmap(of_x)(np.stack([X, -X, V]))
    one = jax.tree.map(lambda leaf: leaf[0], maps)
    assert_close(one(*vectors), expected)
    many = jax.vmap(lambda f, v: f(*v), (0, None))(maps, vectors)
    assert_close(jax.tree.map(lambda leaf: leaf[0], many), expected)
    stacked = lambda tree: jax.tree.map(lambda x: jnp.asarray(x)[None], tree)
    assert_close(jax.lax.scan(lambda f, v: (f, f(*v)), linear_map, stacked(vectors))[1], stacked(expected))
    assert_close(jax.lax.cond(True, lambda f: f(*vectors), lambda f: f(*vectors), linear_map), expected)


@pytest.mark.parametrize("linear", [vjp, linearize])
def test_a_jitted_function_of_them_is_traced_once(linear: Any) -> None:
    traces = []

    @jax.jit
    def linear_map(x: Any) -> Any:
        return linear(jnp.sin, x)[1]

    @jax.jit
    def called(linear_map: Any) -> Any:
        traces.append(1)
        return linear_map(V)

    for x in (X, 2 * X, V):
        assert_close(jax.tree.leaves(called(linear_map(x)))[0], np.cos(x) * V)
    assert len(traces) == 1


@pytest.mark.parametrize("linear", [vjp, linearize])
def test_returned_functions_of_modules_pass_through_transforms(linear: Any) -> None:
    model, x = Counted(), X[0]
    tangent = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    linear_map = nnx.jit(lambda model, x: linear(lambda m, x: m(x), model, x)[1])(model, x)
    slope = np.cos(x * model.gain[...])
    if linear is vjp:
        state, by_x = linear_map(V[0])
        assert isinstance(state, nnx.State)
        assert_close((state["gain"][...], by_x), (slope * x * V[0], slope * model.gain[...] * V[0]))
    else:
        assert_close(linear_map(tangent, V[0]), slope * (x + model.gain[...] * V[0]))
    assert int(model.count[...]) == 1


@pytest.mark.parametrize("n", [3, True, np.arange(3), np.array([True, False, True])])
def test_integers_have_gradients_of_float0_as_in_jax(n: Any) -> None:
    scaled = lambda x, n: {"out": jnp.sin(x) * n, "n": n}
    (_, pull), (out, plain) = vjp(scaled, X, n), jax.vjp(scaled, X, n)
    zeros = lambda y: np.zeros(np.shape(y), jax.dtypes.float0)
    cotangent = {"out": out["out"], "n": zeros(n)}
    found, expected = pull(cotangent), plain(cotangent)
    assert_close(found[0], expected[0])
    assert found[1].dtype == expected[1].dtype == jax.dtypes.float0
    assert found[1].shape == expected[1].shape == np.shape(n)
    _, push = jax.jit(lambda x: linearize(scaled, x, n))(X)
    assert_close(push(V, zeros(n))["out"], jax.jvp(scaled, (X, n), (V, zeros(n)))[1]["out"])


def test_gradients_are_added_to_references_as_in_jax() -> None:
    def product(x: Any, gains: Any) -> jax.Array:
        return x * gains["one"] * gains["two"]

    def bound(vjp: Any) -> Any:
        gains = {"one": jnp.float32(2.0), "two": jnp.float32(3.0)}
        of_x, of_one = jax.new_ref(V), jax.new_ref(jnp.float32(100.0))
        out, pull = vjp(product, X, gains)
        pull = pull.with_refs(of_x, {"one": of_one, "two": AD.DontWant()})
        gradients = [jax.jit(pull)(V), pull(X)]
        _, more = vjp(product, X, gains)
        gradients.append(more.with_refs(AD.GradValue(), {"one": of_one, "two": AD.GradValue()})(V))
        return out, gradients, (of_x[...], of_one[...])

    assert_close(bound(vjp), bound(jax.vjp))
    _, [(of_x, of_gains), _, _], (sums, _) = bound(vjp)
    assert_close(sums, V + 6 * V + 6 * X)
    assert isinstance(of_x, AD.GradRef)
    assert isinstance(of_gains["one"], AD.GradRef)
    assert isinstance(of_gains["two"], AD.DidntWant)


def test_gradients_of_a_module_are_added_to_references() -> None:
    model, place = Counted(), jax.new_ref(jnp.ones(3))
    _, pull = vjp(lambda model, x: model(x), model, X[0])
    state, by_x = pull.with_refs({"gain": place}, AD.GradValue())(V[0])
    slope = np.cos(X[0] * model.gain[...])
    assert isinstance(state, nnx.State)
    assert_close((place[...], by_x), (1 + slope * X[0] * V[0], slope * model.gain[...] * V[0]))


@pytest.mark.slow
def test_equinox_modules_are_differentiated_by_their_arrays() -> None:
    model, xs = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)), X
    loss = lambda model, xs: jnp.sum(jax.vmap(model)(xs) ** 2)
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    of_arrays = lambda arrays, xs: loss(eqx.combine(arrays, rest), xs)
    tangent = jax.tree.map(jnp.cos, arrays)
    expected = jax.jvp(of_arrays, (arrays, xs), (tangent, V))
    assert_close(jvp(loss, (model, xs), (tangent, V)), expected)
    out, push = linearize(loss, model, xs)
    assert_close((out, push(tangent, V)), expected)
    assert_close(jax.jit(lambda push: push(tangent, V))(push), expected[1])
    with pytest.raises(ValueError, match=r"^linearize: the tangent of `model` has the structure"):
        push(None, V)
    gradients = jax.grad(of_arrays, (0, 1))(arrays, xs)
    places = jax.tree.map(lambda x: jax.new_ref(jnp.ones_like(x)), arrays)
    by_xs = vjp(loss, model, xs)[1].with_refs(places, AD.GradValue())(1.0)[1]
    sums = jax.tree.map(lambda place: place[...] - 1, places)
    chex.assert_trees_all_close((sums, by_xs), gradients, rtol=1e-5, atol=1e-5)


def test_mismatched_references_are_refused() -> None:
    pull = vjp(fun, X, {"a": [2.0, None]})[1]
    with pytest.raises(TypeError, match=r"^vjp: with_refs must be a tuple with one entry for each of the 2 primals"):
        pull.with_refs(AD.DontWant())
    with pytest.raises(ValueError, match=r"^vjp: with_refs of `tree` has the structure PyTreeDef\(\*\), but"):
        pull.with_refs(AD.GradValue(), AD.DontWant())


def test_vjp_functions_inside_a_shard_map() -> None:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    pulled = jax.shard_map(lambda x: vjp(jnp.sin, x)[1](2.0)[0], mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
    assert_close(pulled(X), 2 * np.cos(X))


def test_aux_may_be_anything() -> None:
    with_aux = lambda x: (x**2, {"name": "a string", "none": None, "twice": 2 * x})
    aux = {"name": "a string", "none": None, "twice": 6.0}
    assert jvp(with_aux, (3.0,), (1.0,), has_aux=True) == (9.0, 6.0, aux)
    out, pull, found = vjp(with_aux, 3.0, has_aux=True)
    assert (out, pull(1.0), found) == (9.0, (6.0,), aux)
    out, push, found = linearize(with_aux, 3.0, has_aux=True)
    assert (out, push(1.0), found) == (9.0, 6.0, aux)


def test_modules_are_differentiated_by_their_parameters() -> None:
    model = Counted()
    call = lambda model, x: model(x)
    tangent = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    gain = model.gain[...]
    slope = np.cos(X * gain)
    out, pushed = jvp(call, (model, X), (tangent, V))
    assert_close((out, pushed), (np.sin(X * gain), slope * (X + gain * V)))
    out, push = linearize(call, model, X)
    assert_close(push(tangent, V), pushed)
    out, pull = vjp(call, model, X)
    state, by_x = pull(1.0)
    assert isinstance(state, nnx.State)
    assert_close(state["gain"][...], (slope * X).sum(0))
    assert_close(by_x, slope * gain)
    assert int(model.count[...]) == 3
    assert_close(jvp(model, (X,), (V,))[1], slope * gain * V)
    assert_close(vjp(model.__call__, X)[1](1.0), (slope * gain,))
    assert int(model.count[...]) == 5
    gradient = grad(lambda m: jnp.sum(m(X)))(model)
    assert_close(jvp(lambda m: m(X), (model,), (gradient,))[1], slope * X * gradient["gain"][...])


@pytest.mark.parametrize(
    ("primals", "tangents", "error", "match"),
    [
        (X, X, TypeError, r"primals must be a tuple with the arguments of fun, but got an array of shape \(2, 3\)"),
        ((), (), TypeError, r"primals must be a tuple with the arguments of fun, but got \(\) of type tuple"),
        ((X, 1.0), (X,), TypeError, r"tangents must be a tuple with one entry for each of the 2 primals, but got 1"),
        ((X,), X, TypeError, r"tangents must be a tuple with one entry for each of the 1 primals, but got an array"),
        (
            (X, {"a": X}),
            (X, {"b": X}),
            ValueError,
            r"the tangent of `y` has the structure .*'b'.* the primal has .*'a'",
        ),
        (
            (X, {"a": [X]}),
            (X, {"a": [X[0]]}),
            ValueError,
            r"the tangent of `y\['a'\]\[0\]` is an array of shape \(3,\)",
        ),
        ((X,), (X.astype(np.float16),), ValueError, r"the tangent of `x` is an array .* float16, but .* float32"),
        ((1.0,), (1j,), ValueError, r"the tangent of `x` is 1j of type complex, but the primal has shape \(\)"),
        ((1.0,), ("a",), ValueError, r"the tangent of `x` is 'a' of type str, but the primal .* pass an array of"),
        ((X,), (None,), ValueError, r"the tangent of `x` has the structure PyTreeDef\(None\)"),
        ((X, 1), (X, 1), TypeError, r"`y` is .* int.*, which has no derivative; convert it to floating point"),
        (("a",), ("a",), TypeError, r"`x` is 'a' of type str, which has no derivative; let fun close over it"),
    ],
)
def test_tangents_unlike_the_primals_are_refused(primals: Any, tangents: Any, error: Any, match: str) -> None:
    called = lambda x, y=None: x
    with pytest.raises(error, match=f"^jvp: {match}"):
        jvp(called, primals, tangents)
    if isinstance(primals, tuple) and isinstance(tangents, tuple):
        with pytest.raises(error, match=f"^linearize: {match}"):
            linearize(called, *primals)[1](*tangents)


def test_cotangents_and_arguments_of_vjp_are_checked() -> None:
    pull = vjp(fun, X, {"a": [2.0, None]})[1]
    with pytest.raises(ValueError, match=r"^vjp: cotangent has the structure .*, but the output .* make them match"):
        pull(X)
    with pytest.raises(ValueError, match=r"^vjp: the cotangent of output\['out'\] is an array of shape \(3,\)"):
        pull({"out": X[0], "sum": (1.0,)})
    with pytest.raises(TypeError, match=r"^vjp: the cotangent is None; pass one of the structure of the output"):
        pull(None)
    with pytest.raises(TypeError, match=r"^vjp: pass one cotangent, with the structure of the output, but got 2\."):
        pull(V, V)
    with pytest.raises(TypeError, match=r"^vjp: `tree\['a'\]\[0\]` is 'a' of type str, which has no derivative"):
        vjp(fun, X, {"a": ["a"]})
    pull = vjp(lambda x: {"x": x, "n": jnp.arange(3)}, X)[1]
    with pytest.raises(TypeError, match=r"^vjp: `output\['n'\]` is an array of .* int32, but only floating-point"):
        pull(1.0)
    for cotangent in (np.ones(3, np.int32), np.zeros(2, jax.dtypes.float0)):
        with pytest.raises(TypeError, match=r"^vjp: the cotangent of output\['n'\] is .* pass zeros of .*float0"):
            pull({"x": X, "n": cotangent})
    with pytest.raises(TypeError, match=r"^vjp: fun must be a function, a bound method or a module"):
        vjp("f", 1.0)


def test_tangents_of_modules_are_checked() -> None:
    model = Counted()
    with pytest.raises(ValueError, match=r"^jvp: the tangent of `model` has the structure"):
        jvp(lambda model: model(X), (model,), (None,))
    with pytest.raises(ValueError, match=r"^jvp: the tangent of `model\['gain'\]` is an array of shape \(2,\)"):
        jvp(lambda model: model(X), (model,), (nnx.State({"gain": nnx.Param(jnp.ones(2))}),))
    assert int(model.count[...]) == 0
