"""`grad` and `value_and_grad`: `jax.grad` with any cotangent, and `nnx.grad` for models."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from plurax.ensemble import Ensemble
from plurax.transforms import clipped_grad, grad, hessian, jacobian, value_and_grad, vjp, vmap

X = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
BATCH = np.sin(np.arange(15.0, dtype=np.float32)).reshape(5, 3)
Point = collections.namedtuple("Point", ["x", "y"])
Pair = jax.tree_util.register_dataclass(dataclasses.make_dataclass("Pair", ["x", "y"]))


class Net(nnx.Module):
    """Three inputs, two outputs, BatchNorm and dropout; `calls` counts how often Python runs it."""

    calls = 0

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> jax.Array:
        Net.calls += 1
        return self.drop(self.norm(self.dense(x)))

    def loss(self, x: Any) -> jax.Array:
        return jnp.mean(self(x) ** 2)


class Gain(nnx.Module):
    """A gain for each of three inputs, and a count of the calls."""

    def __init__(self, value: float) -> None:
        self.gain = nnx.Param(jnp.full(3, value))
        self.count = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> jax.Array:
        self.count[...] += 1
        return x * self.gain[...]

    def loss(self, x: Any) -> jax.Array:
        return jnp.sum(self(x))


def loss(model: Any, x: Any) -> jax.Array:
    return model.loss(x)


def product(x: Any, y: Any, z: Any) -> Any:
    return x * y * z


def arrays(model: Any) -> list[Any]:
    return jax.tree.leaves(nnx.state(model))


def untouched(before: list[Any], model: Any) -> bool:
    return all(a is b for a, b in zip(before, arrays(model), strict=True))


def assert_close(actual: Any, expected: Any) -> None:
    """Assert equal structures, shapes and dtypes; close values."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_the_helpers_detect_differences() -> None:
    with pytest.raises(AssertionError, match="close"):
        assert_close(jnp.ones(2), 1.01 * jnp.ones(2))
    with pytest.raises(AssertionError, match="dtype"):
        assert_close(jnp.ones(2), jnp.ones(2, jnp.bfloat16))
    model = Gain(1.0)
    before = arrays(model)
    assert untouched(before, model)
    model(BATCH)
    assert not untouched(before, model)


# The examples of MindSpore's documentation.


@pytest.mark.parametrize(("cotangent", "factor"), [(1.0, [1, 1]), (jnp.array([1.0, 2.0]), [1, 2])])
def test_positions_and_cotangents_of_a_product(cotangent: Any, factor: Any) -> None:
    x, y, z = jnp.array([1.0, 2.0]), jnp.array([-2.0, 3.0]), jnp.array([0.0, 3.0])
    gradients = grad(product, (1, 2), cotangent=cotangent)(x, y, z)
    chex.assert_trees_all_equal(gradients, tuple(jnp.array(g) * jnp.array(factor) for g in ([0.0, 6.0], [-2.0, 6.0])))


def test_a_gradient_comes_with_its_aux() -> None:
    fun = lambda x, y, z: (x * jnp.exp(y) * z**2, z)
    gradients, aux = grad(fun, (1, 2), has_aux=True)(3.0, 0.0, 5.0)
    chex.assert_trees_all_close((gradients, aux), ((jnp.array(75.0), jnp.array(30.0)), 5.0))


def test_the_gradient_of_a_map_is_the_map_of_the_gradient() -> None:
    fun = lambda x, y: jnp.sum(jnp.sin(x + 2 * y))
    x, y = jnp.array([[1.0, 2, 3], [2, 3, 4]]), jnp.array([[2.0, 3, 4], [3, 4, 5]])
    expected = np.array(
        [[0.2836622, -0.145500034, 0.00442569796], [-0.145500034, 0.00442569796, 0.136737213]], np.float32
    )
    for gradients in (grad(vmap(fun), (0, 1), cotangent=1.0)(x, y), vmap(grad(fun, (0, 1)))(x, y)):
        chex.assert_trees_all_close(gradients, (expected, 2 * expected), rtol=2e-5)


def test_the_gradients_of_rows() -> None:
    rows = vmap(grad(lambda w, x: jnp.dot(w, x) ** 2), (None, 0))
    chex.assert_trees_all_equal(rows(jnp.array([1.0, 2.0]), X), jnp.array([[10.0, 20.0], [66.0, 88.0]]))


def test_the_value_and_the_vjp_of_a_cube() -> None:
    value, gradients = value_and_grad(lambda x, y: x**3 + y, (0, 1), cotangent=1.0)(X, X)
    chex.assert_trees_all_close(value, jnp.array([[2.0, 10.0], [30.0, 68.0]]))
    chex.assert_trees_all_close(gradients, (jnp.array([[3.0, 12.0], [27.0, 48.0]]), jnp.ones((2, 2))))


# Against `jax.grad`.


def mixed(x: Any, tree: Any, *rest: Any, scale: Any = 1.0) -> Any:
    return jnp.sum(x * jnp.sin(tree["a"][0]) * scale) + sum(jnp.sum(r**2) for r in rest)


@pytest.mark.parametrize("argnums", [0, 1, -1, np.int64(2), (0,), (2, 0), (-1, 1), [1, 0]], ids=str)
def test_argnums_are_those_of_jax(argnums: Any) -> None:
    args = (X, {"a": [2 * X, None]}, np.ones((0, 3), np.float32), np.float32(2.0))
    kwargs = {"scale": X.T}
    plain = tuple(argnums) if isinstance(argnums, list) else argnums
    both = value_and_grad(mixed, argnums)(*args, **kwargs)
    chex.assert_trees_all_equal(both, jax.value_and_grad(mixed, plain)(*args, **kwargs), strict=True)
    chex.assert_trees_all_equal(grad(mixed, argnums)(*args, **kwargs), both[1], strict=True)


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        pytest.param(lambda x: x**2, (3.0,), id="Python-number"),
        pytest.param(lambda x: 3.0, (X,), id="constant"),
        pytest.param(lambda x: jnp.sum(x), (np.ones((2, 0)),), id="empty"),
        pytest.param(lambda x: jnp.sum(x * x), (np.ones(3),), id="numpy-float64"),
        pytest.param(lambda x: jnp.sum(x * x), (jnp.ones(3, jnp.bfloat16),), id="bfloat16"),
        pytest.param(lambda z: jnp.abs(z) ** 2, (1.0 + 2.0j,), id="complex-argument"),
        pytest.param(lambda p: p.x * jnp.sum(p.y), (Point(2.0, X),), id="namedtuple"),
        pytest.param(lambda p: p.x * jnp.sum(p.y), (Pair(2.0, X),), id="dataclass"),
        pytest.param(functools.partial(product, 2.0, z=3.0), (4.0,), id="partial"),
        pytest.param(jax.jit(jnp.vdot), (X, X), id="jitted"),
        pytest.param(jax.checkpoint(jnp.vdot), (X, X), id="checkpoint"),
        pytest.param(lambda x, how: x if how == "as it is" else -x, (1.0, "as it is"), id="string"),
    ],
)
def test_values_and_gradients_are_those_of_jax(fun: Any, args: Any) -> None:
    actual, expected = value_and_grad(fun)(*args), jax.value_and_grad(fun)(*args)
    chex.assert_trees_all_equal(actual, expected, strict=True)
    weak = [[leaf.weak_type for leaf in jax.tree.leaves(gradient)] for _, gradient in (actual, expected)]
    assert weak[0] == weak[1]


def test_a_holomorphic_derivative_is_a_cotangent_of_one() -> None:
    z = jnp.array(1.0 + 2.0j)
    chex.assert_trees_all_equal(grad(lambda z: z**3, cotangent=1.0)(z), jax.grad(lambda z: z**3, holomorphic=True)(z))


@pytest.mark.parametrize("argnums", [0, (0, 1)])
def test_aux_may_be_anything(argnums: Any) -> None:
    def fun(x: Any, y: Any) -> Any:
        return x * y, {"name": "a string", "none": None, "int": 3, "twice": [2 * x], "type": int}

    value, gradients = value_and_grad(fun, argnums, has_aux=True)(2.0, 3.0)
    assert value == (6.0, {"name": "a string", "none": None, "int": 3, "twice": [4.0], "type": int})
    assert gradients == ((3.0, 2.0) if argnums else 3.0)
    assert grad(fun, argnums, True)(2.0, 3.0) == (gradients, value[1])


def test_the_function_runs_once() -> None:
    calls = []

    def counted(x):
        calls.append(x)
        return x**2

    value_and_grad(counted)(3.0)
    grad(lambda x: (counted(x), 1), has_aux=True, cotangent=2.0)(X)
    assert len(calls) == 2


def test_the_arguments_of_the_gradient_are_those_of_the_function() -> None:
    assert list(inspect.signature(grad(product)).parameters) == ["x", "y", "z"]
    assert grad(product).__name__ == "grad(product)"
    assert float(jax.jit(grad(product), static_argnames="z")(2.0, 3.0, z=4)) == 12
    assert float(grad(lambda x, *, _, model: x * _ * model)(2.0, _=3.0, model=4.0)) == 12


def test_gradients_are_right_to_the_second_order() -> None:
    with jax.enable_x64(True):
        x, y = np.array([0.3, 0.7, -0.2]), np.array([[0.1], [0.4]])
        fun = lambda x, y: jnp.sum(jnp.sin(x * y))
        check_grads(jax.jit(lambda x: grad(fun, 1)(x, y)), (x,), order=1)
        seed = np.arange(6.0).reshape(2, 3)
        expected = jax.vjp(lambda x: jnp.sin(x * y), x)[1](seed)[0]
        chex.assert_trees_all_close(grad(lambda x: jnp.sin(x * y), cotangent=seed)(x), expected, rtol=1e-12)


# Cotangents.


def outputs(x: Any) -> Any:
    return {"a": x**2, "b": (jnp.sum(x), [jnp.sin(x).astype(jnp.bfloat16)])}


@pytest.mark.parametrize(
    ("cotangent", "full"),
    [
        (2, {"a": [2.0, 2], "b": (2.0, [[2.0, 2]])}),
        (-0.5, {"a": [-0.5] * 2, "b": (-0.5, [[-0.5] * 2])}),
        ({"a": np.array([1, 2], np.float32), "b": (3.0, [1])}, {"a": [1.0, 2], "b": (3.0, [[1.0, 1]])}),
        ({"a": 0.0, "b": (np.float32(3), [jnp.ones(2, jnp.bfloat16)])}, {"a": [0.0] * 2, "b": (3.0, [[1.0, 1]])}),
    ],
)
def test_a_cotangent_is_a_number_or_like_the_output(cotangent: Any, full: Any) -> None:
    x = jnp.array([0.5, 2.0])
    seeds = {"a": jnp.array(full["a"]), "b": (jnp.array(full["b"][0]), [jnp.array(full["b"][1][0], jnp.bfloat16)])}
    value, gradient = value_and_grad(outputs, cotangent=cotangent)(x)
    expected, vjp = jax.vjp(outputs, x)
    chex.assert_trees_all_equal((value, gradient), (expected, *vjp(seeds)), strict=True)


def test_a_cotangent_may_be_traced() -> None:
    x = jnp.arange(3.0)
    chex.assert_trees_all_equal(vmap(lambda seed: grad(jnp.square, cotangent=seed)(3.0))(x), 6 * x)
    chex.assert_trees_all_equal(vmap(grad(jnp.square, cotangent=1.0))(x), 2 * x)


@given(data=st.data())
def test_a_cotangent_multiplies_from_the_left(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=2)))
    values = st.lists(st.integers(-3, 3), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))
    x, seed = (np.array(data.draw(values), np.float32).reshape(shape) for _ in range(2))
    chex.assert_trees_all_equal(grad(jnp.square, cotangent=seed)(x), jnp.asarray(2 * x * seed))


@pytest.mark.parametrize(
    ("cotangent", "error", "match"),
    [
        (None, TypeError, r"^grad: without a cotangent, fun must return one real scalar, but it returned a pytree "),
        (
            (1.0, 1.0),
            ValueError,
            r"^grad: cotangent has the structure PyTreeDef\(\(\*, \*\)\), but the output PyTr",
        ),
        ({"a": np.ones(2)}, ValueError, r"the output PyTreeDef\(\{'a': \*, 'b': .* make them match\."),
        (
            {"a": jnp.ones(3), "b": (1, [1])},
            ValueError,
            r"cotangent of output\['a'\] is an array of shape \(3,\) .* pass a number, or an array of shape \(2,\)",
        ),
        (
            {"a": 1, "b": (1, [jnp.ones(2)])},
            ValueError,
            r"of output\['b'\]\[1\]\[0\] is .* float32, which .* pass .* bfloat16",
        ),
        (
            {"a": 1, "b": (np.ones(1), [1])},
            ValueError,
            r"of output\['b'\]\[0\] is an array of shape \(1,\) .* shape \(\)",
        ),
        (
            {"a": 1, "b": (True, [1])},
            TypeError,
            r"cotangent of output\['b'\]\[0\] is True of type bool, which does not match it; pass a number",
        ),
        (
            {"a": "one", "b": (1, [1])},
            TypeError,
            r"of output\['a'\] is 'one' of type str, which does not match it",
        ),
        (1j, TypeError, r"^grad: cotangent=1j is complex, but output\['a'\] is real; pass a real number"),
        ({"a": 1, "b": (2j, [1])}, TypeError, r"cotangent=2j is complex, but output\['b'\]\[0\] is real"),
    ],
)
def test_a_cotangent_unlike_the_output_is_refused(cotangent: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        grad(outputs, cotangent=cotangent)(jnp.ones(2))


# Refusals.


@pytest.mark.parametrize(
    ("argnums", "error", "match"),
    [
        ((), ValueError, r"^value_and_grad: argnums is empty; name at least one positional argument"),
        ([], ValueError, r"argnums is empty"),
        ((0, 0), ValueError, r"argnums=\(0, 0\) names an argument twice; name each once\.$"),
        (0.5, TypeError, r"^value_and_grad: argnums must be an int or a tuple of ints, but got 0\.5\.$"),
        ("x", TypeError, r"argnums must be an int or a tuple of ints, but got 'x'"),
        (None, TypeError, r"argnums must be an int or a tuple of ints, but got None"),
        (True, TypeError, r"argnums must be an int or a tuple of ints, but got True"),
        ((0, False), TypeError, r"argnums must be an int or a tuple of ints, but got \(0, False\)"),
        (np.array([0, 1]), TypeError, r"argnums must be an int or a tuple of ints, but got array"),
    ],
    ids=str,
)
def test_invalid_argnums_are_refused_at_once(argnums: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        value_and_grad(product, argnums)


def test_non_callables_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^grad: fun must be a function, a bound method or a module, but got 'f' of"):
        grad("f")


@pytest.mark.parametrize(
    ("argnums", "args", "kwargs", "error", "match"),
    [
        (2, (1.0, 2.0), {}, ValueError, r"argnums selects argument 2, but the call has 2 positional .* not by keyword"),
        ((0, -3), (1.0, 2.0), {}, ValueError, r"argnums selects argument -3, but the call has 2 positional"),
        (0, (), {"x": 1.0}, ValueError, r"argnums selects argument 0, but the call has 0 positional argument\(s\)"),
        (
            (0, -2),
            (1.0, 2.0),
            {},
            ValueError,
            r"argnums=\(0, -2\) names argument `x` twice in this call; name each once",
        ),
        (0, (1,), {}, TypeError, r"argument `x` is 1 of type int, but only floating-point arrays can be diff"),
        (0, (True,), {}, TypeError, r"argument `x` is True of type bool, but only"),
        (0, ("a",), {}, TypeError, r"argument `x` is 'a' of type str, but only .* or leave it out of argnums\.$"),
        (0, (np.arange(3),), {}, TypeError, r"argument `x` is an array of shape \(3,\) and dtype int64, but only"),
        (1, (1.0, {"a": [X, jnp.arange(2)]}), {}, TypeError, r"argument `y\['a'\]\[1\]` is an array of shape \(2,\)"),
        (0, (jax.random.key(0),), {}, TypeError, r"argument `x` is an array of shape \(\) and dtype key<fry>, but"),
        (0, (np.zeros(2, jax.dtypes.float0),), {}, TypeError, r"argument `x` is an array of shape \(2,\) and dtype"),
        (0, (Pair(1.0, None),), {"y": 0}, TypeError, r"without a cotangent, fun must return one real scalar"),
    ],
)
def test_arguments_that_cannot_be_differentiated_are_refused(
    argnums: Any, args: Any, kwargs: Any, error: type[Exception], match: str
) -> None:
    calls = []

    def fun(x: Any, y: Any = 0.0) -> Any:
        calls.append(x)
        return x

    with pytest.raises(error, match=match):
        grad(fun, argnums)(*args, **kwargs)
    assert bool(calls) == ("without a cotangent" in match)


@pytest.mark.parametrize(
    ("out", "shown"),
    [
        (lambda x: x, r"an array of shape \(2, 2\) and dtype float32; pass cotangent=1\.0 to seed .* has_aux=True"),
        (lambda x: x[:1, 0], r"an array of shape \(1,\) and dtype float32"),
        (lambda x: jnp.sum(x) * 1j, r"an array of shape \(\) and dtype complex64"),
        (lambda x: (jnp.sum(x), 1.0), r"a pytree PyTreeDef\(\(\*, \*\)\)"),
        (lambda x: [jnp.sum(x)], r"a pytree PyTreeDef\(\[\*\]\)"),
        (lambda x: Pair(jnp.sum(x), None), r"a pytree PyTreeDef\(CustomNode\(Pair"),
        (lambda x: nnx.Param(jnp.sum(x)), r"a pytree PyTreeDef\(CustomNode\(Param"),
    ],
)
def test_an_output_that_is_not_a_real_scalar_is_refused(out: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=f"^grad: without a cotangent, fun must return one real .* returned {shown}"):
        grad(out)(X)


@pytest.mark.parametrize("out", [lambda x: jnp.sum(x).astype(int), lambda x: x.astype(int)])
def test_for_an_output_that_is_no_floating_point_array_no_cotangent_is_recommended(out: Any) -> None:
    with pytest.raises(TypeError, match="^grad: `output` is .*, but only floating-point arrays have derivatives"):
        grad(out)(X)


@pytest.mark.parametrize("cotangent", [None, 1.0])
@pytest.mark.parametrize("out", [None, (), {"a": None}])
def test_an_output_without_arrays_is_refused(out: Any, cotangent: Any) -> None:
    with pytest.raises(TypeError, match=r"^grad: fun must return a number or arrays to differentiate, but it returned"):
        grad(lambda x: out, cotangent=cotangent)(X)


def test_an_output_of_integers_is_refused() -> None:
    """Regression: with a scalar cotangent, it was treated as having a zero gradient."""
    for out, name in ((lambda x: jnp.round(x).astype(int), "output"), (lambda x: (x, x > 0), r"output\[1\]")):
        with pytest.raises(TypeError, match=f"^grad: `{name}` is an array of .*, but only floating-point arrays have"):
            grad(out, cotangent=1.5)(X)
        with pytest.raises(TypeError, match=f"^vjp: `{name}` is an array of .*, but only floating-point arrays have"):
            vjp(out, X)[1](1.0)


@pytest.mark.parametrize("out", [lambda x: x[0], lambda x: (x, 1, 2), lambda x: {"a": x, "b": 1}])
def test_has_aux_needs_a_pair(out: Any) -> None:
    with pytest.raises(TypeError, match=r"^value_and_grad: with has_aux=True, fun must return a pair \(output, aux\)"):
        value_and_grad(out, has_aux=True)(X)


# Modules.


@pytest.fixture(scope="module")
def nets() -> Ensemble:
    return Ensemble.create(Net, 3, seed=0)


def test_a_module_is_differentiated_as_by_nnx(nets: Ensemble) -> None:
    model, twin = nets[0], nets[0]
    Net.calls = 0
    value, gradient = nnx.jit(value_and_grad(loss))(model, BATCH)
    assert Net.calls == 1
    expected = nnx.jit(nnx.value_and_grad(loss))(twin, BATCH)
    assert isinstance(gradient, nnx.State)
    assert_close((value, gradient), expected)
    state, of_twin = (nnx.state(m, nnx.Not(nnx.RngKey)) for m in (model, twin))
    assert_close(state, of_twin)
    assert int(model.drop.rngs.count[...]) == 1 + int(nets[0].drop.rngs.count[...])
    assert not np.allclose(model.norm.mean[...], nets[0].norm.mean[...])


def test_the_gradient_of_a_module_feeds_optax_and_nnx() -> None:
    model = Gain(2.0)
    gradient = grad(loss)(model, BATCH)
    params = nnx.state(model, nnx.Param)
    chex.assert_trees_all_equal_structs(gradient, params)
    transform = optax.sgd(0.5)
    updates, _ = transform.update(gradient, transform.init(params), params)
    expected = 2.0 - 0.5 * BATCH.sum(0)
    assert_close(optax.apply_updates(params, updates)["gain"][...], jnp.asarray(expected))
    nnx.Optimizer(model, transform, wrt=nnx.Param).update(model, gradient)
    assert_close(model.gain[...], jnp.asarray(expected))


@pytest.mark.parametrize(
    "differentiate",
    [
        pytest.param(lambda m: grad(loss)(m, BATCH), id="argument"),
        pytest.param(lambda m: grad(lambda tree: loss(tree["m"][0], BATCH))({"m": [m]})["m"][0], id="container"),
        pytest.param(lambda m: grad(lambda x, m: loss(m, x), -1)(BATCH, m), id="last"),
        pytest.param(lambda m: grad(lambda m, x: (loss(m, x), "aux"), has_aux=True)(m, BATCH)[0], id="aux"),
        pytest.param(lambda m: grad(lambda m, x: m(x), cotangent=1.0)(m, BATCH), id="cotangent"),
        pytest.param(lambda m: jax.jit(lambda m: (grad(loss)(m, BATCH), m))(m)[0], id="jit"),
        pytest.param(lambda m: nnx.jit(grad(loss))(m, BATCH), id="nnx.jit"),
        pytest.param(lambda m: grad(nnx.jit(loss))(m, BATCH), id="of-nnx.jit"),
        pytest.param(lambda m: grad(nnx.remat(loss))(m, BATCH), id="of-nnx.remat"),
        pytest.param(lambda m: grad(jax.checkpoint(loss))(m, BATCH), id="of-checkpoint"),
        pytest.param(
            lambda m: jax.jit(lambda m: grad(nnx.remat(nnx.jit(loss)))(m, BATCH))(m), id="jit-of-remat-of-jit"
        ),
        pytest.param(lambda m: grad(lambda m: vmap(lambda x: x * m.gain[...])(BATCH).sum())(m), id="of-vmap"),
        pytest.param(lambda m: vmap(lambda x: grad(lambda m: jnp.sum(x * m.gain[...]))(m))(BATCH), id="in-vmap"),
    ],
)
def test_the_gradient_of_a_module_is_a_state(differentiate: Any) -> None:
    gradient = differentiate(Gain(2.0))
    assert isinstance(gradient, nnx.State)
    assert list(gradient) == ["gain"]
    assert isinstance(gradient["gain"], nnx.Param)
    per_row = gradient["gain"][...].ndim == 2
    assert_close(gradient["gain"][...], jnp.asarray(BATCH if per_row else BATCH.sum(0)))


@pytest.mark.parametrize(
    ("call", "count"),
    [
        pytest.param(lambda m: grad(loss)(m, BATCH), 1, id="argument"),
        pytest.param(lambda m: grad(m.loss)(BATCH), 1, id="bound-method"),
        pytest.param(lambda m: grad(m, cotangent=1.0)(BATCH), 1, id="the-function-itself"),
        pytest.param(lambda m: grad(lambda x, *, other: loss(other[0], x))(BATCH, other=[m]), 1, id="keyword"),
        pytest.param(lambda m: grad(lambda x, m: loss(m, x))(BATCH, m), 1, id="not-differentiated"),
        pytest.param(lambda m: grad(lambda m, x: loss(m, x) + loss(m, x))(m, BATCH), 2, id="called-twice"),
        pytest.param(lambda m: grad(nnx.jit(loss))(m, BATCH), 1, id="of-nnx.jit"),
        pytest.param(lambda m: grad(nnx.remat(loss))(m, BATCH), 1, id="of-nnx.remat"),
        pytest.param(lambda m: nnx.jit(grad(loss))(m, BATCH), 1, id="nnx.jit"),
        pytest.param(lambda m: [grad(loss)(m, BATCH) for _ in range(3)], 3, id="three-calls"),
    ],
)
def test_other_state_ends_up_in_the_module_once(call: Any, count: int) -> None:
    model = Gain(2.0)
    gain = model.gain[...]
    call(model)
    assert int(model.count[...]) == count
    assert_close(model.gain[...], gain)


def test_state_follows_a_module_through_a_scan() -> None:
    apart: Any = nnx.split(Gain(2.0))
    graphdef, state = apart

    def step(state: Any, x: Any) -> Any:
        model = nnx.merge(graphdef, state)
        gradient = grad(loss)(model, x)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model, nnx.Param), gradient))
        return nnx.state(model), gradient["gain"][...]

    state, gradients = jax.lax.scan(step, state, BATCH)
    assert_close(gradients, jnp.asarray(BATCH))
    assert int(state["count"][...]) == 5
    assert_close(state["gain"][...], jnp.asarray(2 - BATCH.sum(0)))


def test_several_modules_and_arrays_are_differentiated_together() -> None:
    first, second = Gain(2.0), Gain(3.0)
    fun = lambda models, x, last: jnp.sum(models["a"](x) * last(x) * models["b"])
    (tree, of_last), x = grad(fun, (0, 2))({"a": first, "b": 2.0}, BATCH, second), BATCH
    assert_close(tree["a"]["gain"][...], jnp.asarray(2 * 3 * (x * x).sum(0)))
    assert_close(tree["b"], jnp.sum(6 * x * x))
    assert_close(of_last["gain"][...], jnp.asarray(2 * 2 * (x * x).sum(0)))
    assert (int(first.count[...]), int(second.count[...])) == (1, 1)


def test_a_state_or_a_variable_is_a_pytree_like_any_other() -> None:
    apart: Any = nnx.split(Gain(2.0), nnx.Param, ...)
    graphdef, params, rest = apart
    gradient = grad(lambda params: loss(nnx.merge(graphdef, params, rest, copy=True), BATCH))(params)
    assert isinstance(gradient, nnx.State)
    assert_close(gradient["gain"][...], jnp.asarray(BATCH.sum(0)))
    assert_close(grad(lambda w: jnp.sum(w[...] ** 2))(nnx.Param(jnp.ones(2)))[...], 2 * jnp.ones(2))


def test_a_model_may_be_the_aux() -> None:
    (_, aux), _ = value_and_grad(lambda m: (loss(m, BATCH), m), has_aux=True)(Gain(2.0))
    assert isinstance(aux, Gain)
    assert int(aux.count[...]) == 1


class Boom(Exception):
    pass


def explode(model: Any, x: Any) -> jax.Array:
    model(x)
    raise Boom("midway")


def assign(model: Any, x: Any) -> jax.Array:
    model.gain[...] = 2 * model.gain[...]
    return loss(model, x)


def extend(model: Any, x: Any) -> jax.Array:
    model.seen = nnx.Variable(x)
    return loss(model, x)


def relabel(model: Any, x: Any) -> jax.Array:
    model.label = "another"
    return loss(model, x)


@pytest.mark.parametrize(
    ("fun", "options", "error", "match"),
    [
        (explode, {}, Boom, "midway"),
        (
            lambda m, x: m(x),
            {},
            TypeError,
            r"fun must return one real scalar, but it returned an array of shape \(5, 3",
        ),
        (lambda m, x: m(x), {"cotangent": np.ones(2)}, ValueError, r"cotangent of output is an array of shape \(2,\)"),
        (lambda m, x: m(x), {"has_aux": True}, TypeError, r"must return a pair \(output, aux\)"),
        (assign, {}, ValueError, r"^grad: fun assigns the parameter `gain` of a model; .* such as nnx\.BatchStat"),
        (nnx.jit(assign), {}, ValueError, r"fun assigns the parameter `gain`"),
        (extend, {}, ValueError, r"^grad: fun changes the structure of Gain \(`seen`\), but only .*such as by sow"),
        (relabel, {}, ValueError, r"fun changes the structure of Gain \(`configuration`\), .* or change attributes"),
        (lambda m, x: loss(m, x), {"argnums": 2}, ValueError, r"argnums selects argument 2"),
        (lambda m, x: loss(m, x), {"argnums": (0, 1)}, TypeError, r"argument `x` is an array of .* int32"),
    ],
)
def test_a_failing_call_leaves_the_module_as_it_was(fun: Any, options: Any, error: Any, match: str) -> None:
    model: Any = Gain(2.0)
    model.label = "one"
    before = arrays(model)
    x = jnp.arange(15).reshape(5, 3) if "int32" in match else BATCH
    with pytest.raises(error, match=match):
        grad(fun, **options)(model, x)
    assert untouched(before, model)
    assert model.label == "one"
    assert not hasattr(model, "seen")


def test_modules_that_share_a_variable_are_refused() -> None:
    first, second = Gain(1.0), Gain(2.0)
    second.gain = first.gain
    fun = lambda first, second: loss(first, BATCH) + loss(second["m"], BATCH)
    with pytest.raises(
        ValueError, match=r"^grad: `first` and `second` share the variable `gain`; put them into one mod"
    ):
        grad(fun)(first, {"m": second})
    with pytest.raises(ValueError, match=r"^grad: `fun` and `x` share the variable `count`; .* such as nnx\.Dict"):
        grad(first.loss)(first)
    shared = nnx.Dict(first=first, second=second)
    gradient = grad(lambda pair: loss(pair["first"], BATCH) + loss(pair["second"], 2 * BATCH))(shared)
    assert_close(gradient["first"]["gain"][...], jnp.asarray(3 * BATCH.sum(0)))


def test_a_parameter_of_integers_is_refused() -> None:
    model: Any = Gain(1.0)
    model.steps = nnx.Param(jnp.arange(2))
    with pytest.raises(
        TypeError, match=r"^grad: argument `model\['steps'\]` is an array of shape \(2,\) and dtype int32"
    ):
        grad(loss)(model, BATCH)


# Members of ensembles and whole ensembles.


def test_a_member_of_an_apply_function_is_differentiated() -> None:
    def centered(model: Any, x: Any) -> Any:
        y = model(x)
        model.variables = model.variables | {"mean": x.mean(0)}
        return jnp.sum(y)

    apply = lambda variables, x: x * variables["params"]["w"] - variables["mean"]
    made = Ensemble.from_apply(apply, [{"params": {"w": BATCH[i]}, "mean": BATCH[1]} for i in range(2)])
    member = made[1]
    gradient = grad(centered)(member, BATCH)
    assert_close(gradient, {"params": {"w": jnp.asarray(BATCH.sum(0))}, "mean": None})
    assert_close(member.variables["mean"], BATCH.mean(0))
    gradients, after = jax.jit(vmap(lambda member: (grad(centered)(member, BATCH), member)))(made)
    assert_close(gradients["params"]["w"][1], gradient["params"]["w"])
    assert_close(after[1].variables, member.variables)

    def assign(model: Any) -> Any:
        model.variables = jax.tree.map(lambda v: 2 * v, model.variables)
        return jnp.sum(model(BATCH))

    def extend(model: Any) -> Any:
        model.variables = model.variables | {"more": 1.0}
        return jnp.sum(model(BATCH))

    with pytest.raises(ValueError, match=r"^grad: fun assigns the parameter `params\.w` of a model"):
        grad(assign)(member)
    with pytest.raises(ValueError, match=r"^grad: fun changes the structure of FunctionalModel \(`.*`\), but only"):
        grad(extend)(member)
    assert sorted(member.variables) == ["mean", "params"]


@pytest.mark.parametrize("outer", [lambda fun: fun, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"])
def test_a_whole_ensemble_is_differentiated(outer: Any) -> None:
    ens = Ensemble.stack([Gain(1.0), Gain(2.0)])

    def total(ens: Any, x: Any) -> Any:
        counted, values = vmap(lambda model, x: (model, loss(model, x)), (0, None))(ens, x)
        return jnp.sum(values), counted

    gradient, counted = outer(grad(total, has_aux=True))(ens, BATCH)
    assert_close(gradient, {"gain": jnp.stack([BATCH.sum(0)] * 2)})
    assert isinstance(counted, Ensemble)
    assert counted.rest["count"].tolist() == [1, 1]
    gradients = vmap(grad(lambda pair, x: total(pair["e"], x)[0]), (None, 0))({"e": ens}, BATCH[:, None])
    assert_close(gradients, {"e": {"gain": jnp.stack([BATCH] * 2, 1)}})


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_holomorphic_functions_have_complex_gradients(dtype: Any) -> None:
    with jax.enable_x64(dtype == np.complex128):
        z, w = np.array([0.5 + 1j, -1.0 - 0.25j, 2j], dtype), np.array(1.5 - 1j, dtype)
        fun = lambda z, w: jnp.sum(jnp.sin(z) * w**2)
        options: Any = {"argnums": (1, 0), "holomorphic": True}
        expected = jax.value_and_grad(fun, **options)(z, w)
        chex.assert_trees_all_close(value_and_grad(fun, **options)(z, w), expected, rtol=1e-6)
        chex.assert_trees_all_close(jax.jit(grad(fun, **options))(z, w), expected[1], rtol=1e-6)
        mapped = jax.vmap(grad(fun, **options))(z[:2], np.stack([w, -w]))
        chex.assert_trees_all_close(mapped, jax.vmap(jax.grad(fun, **options))(z[:2], np.stack([w, -w])), rtol=1e-6)
        seeded = grad(lambda z: jnp.sin(z), cotangent=1.0, holomorphic=True)(z)
        chex.assert_trees_all_close(seeded, jnp.cos(z), rtol=1e-5)


@pytest.mark.parametrize("n", [3, True, np.arange(3), np.array([True, False, True])])
def test_integers_have_gradients_of_float0_as_in_jax(n: Any) -> None:
    fun = lambda x, n: jnp.sum(jnp.sin(x) * n)
    for ours, plain in ((grad, jax.grad), (value_and_grad, jax.value_and_grad)):
        found = ours(fun, (0, 1), allow_int=True)(2.0, n)
        expected = plain(fun, (0, 1), allow_int=True)(2.0, n)
        chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
        chex.assert_trees_all_close(*(jax.tree.leaves(tree)[:-1] for tree in (found, expected)))
        assert jax.tree.leaves(found)[-1].dtype == jax.dtypes.float0


class OfAnotherLibrary:
    """A model, as those of Keras, or one of its variables: it says a dtype, but is no array."""

    dtype = "float32"

    def __call__(self, x: Any) -> Any:
        return x


class VariableOfAnotherLibrary:
    dtype, shape = "float32", (3,)


@pytest.mark.parametrize(
    ("transform", "api"),
    [
        (grad, "grad"),
        (functools.partial(clipped_grad, l2_clip_norm=1.0), "clipped_grad"),
        (jacobian, "jacobian"),
        (hessian, "hessian"),
    ],
)
def test_models_and_variables_of_other_libraries_are_refused_by_name(transform: Any, api: str) -> None:
    loss = lambda model, x: jnp.sum(x)
    match = (
        f"^{api}: argument `model` is .* of type OfAnotherLibrary, but only .* can be diff.*; pass a pytree of its arr"
    )
    with pytest.raises(TypeError, match=match):
        transform(loss)(OfAnotherLibrary(), np.ones((2, 3), np.float32))
    match = (
        rf"^{api}: argument `model\[0\]` is .* shape \(3,\) and dtype float32, but only .* can be diff.*; convert it"
    )
    with pytest.raises(TypeError, match=match):
        transform(loss)([VariableOfAnotherLibrary()], np.ones((2, 3), np.float32))


@pytest.mark.parametrize(
    ("fun", "x", "options", "match"),
    [
        (
            jnp.sum,
            1.0,
            {"holomorphic": True},
            r"argument `\w+` is 1\.0 .* but only complex arrays \(holomorphic=True\) can",
        ),
        (jnp.sum, 3, {"holomorphic": True, "allow_int": True}, r"argument `\w+` is 3 of type int, but only complex"),
        (
            jnp.real,
            1j,
            {"holomorphic": True},
            r"`output` is .* float32, but holomorphic=True needs complex outputs",
        ),
        (jnp.sin, np.array([1j]), {"holomorphic": True}, r"without a cotangent, fun must return one complex scalar"),
        (jnp.sin, 1j, {}, r"without a cotangent, fun must return one real scalar"),
        (jnp.sin, 3, {}, r"argument `x` is 3 of type int, but only floating-point arrays can be differentiated"),
        (jnp.sin, "a", {"allow_int": True}, r"argument `x` is 'a' of type str, but only floating-point arrays"),
    ],
)
def test_other_kinds_of_numbers_are_refused_by_name(fun: Any, x: Any, options: Any, match: str) -> None:
    for transform in (grad, value_and_grad):
        with pytest.raises(TypeError, match=f"^{transform.__name__}: {match}"):
            transform(fun, **options)(x)


@pytest.mark.parametrize("kind", [nnx.Param, nnx.PathContains("bias"), nnx.All(nnx.Param, nnx.Not("kernel"))])
def test_a_filter_selects_variables_as_for_nnx(kind: Any) -> None:
    for argnums in (nnx.DiffState(0, kind), (nnx.DiffState(0, kind), 1), (1, nnx.DiffState(-2, kind))):
        model, twin = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
        positive = (1, nnx.DiffState(0, kind)) if argnums == (1, nnx.DiffState(-2, kind)) else argnums
        found = grad(lambda model, x: model.loss(x), argnums)(model, BATCH)
        expected = nnx.grad(lambda model, x: model.loss(x), argnums=positive)(twin, BATCH)
        chex.assert_trees_all_close(found, expected, rtol=1e-5)
        chex.assert_trees_all_close(nnx.state(model, nnx.BatchStat), nnx.state(twin, nnx.BatchStat))


def test_a_filter_needs_a_module() -> None:
    select = nnx.DiffState(0, nnx.Param)
    with pytest.raises(TypeError, match=r"grad: argnums has an nnx.DiffState for `x`, which is not an NNX module"):
        grad(lambda x: x.sum(), select)(X)
    with pytest.raises(TypeError, match=r"jacobian: argnums must be an int or a tuple of ints, but got DiffState"):
        jacobian(lambda x: x.sum(), select)
