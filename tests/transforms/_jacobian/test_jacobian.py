"""`jacfwd`, `jacrev` and `jacobian` against JAX's, in chunks or not, and the mode that "auto" chooses."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from plurax.transforms import batch_jacobian, jacfwd, jacobian, jacrev
from plurax.transforms._calls import decisions as memory
from plurax.transforms._jacobian import mode as modes

X = np.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.5]], np.float32)
BATCH = np.sin(np.arange(15.0, dtype=np.float32)).reshape(5, 3)
ALL = [(jacfwd, jax.jacfwd), (jacrev, jax.jacrev), (jacobian, jax.jacrev)]
TRANSFORMS = pytest.mark.parametrize(("transform", "plain"), ALL, ids=["jacfwd", "jacrev", "jacobian"])
OURS = pytest.mark.parametrize("transform", [jacfwd, jacrev, jacobian])


class Point(NamedTuple):
    x: Any
    y: Any


class Norm(nnx.Module):
    """BatchNorm, dropout, and a count of the calls."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.count = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> jax.Array:
        self.count[...] += 1
        return self.drop(self.norm(self.dense(x)))


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_the_helper_detects_differences() -> None:
    with pytest.raises(AssertionError, match="close"):
        assert_close(jnp.ones(2), 1.01 * jnp.ones(2))


def tree(x: Any, point: Point, *, scale: Any = 1.0) -> Any:
    return {"a": [jnp.sin(x) * point.x[0], None], "b": Point(jnp.sum(x * point.y) * scale, point.x)}


@pytest.mark.slow
@TRANSFORMS
@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (1, 0), (-2, 1), [0, 1]], ids=str)
def test_pytrees_nest_as_those_of_jax(transform: Any, plain: Any, argnums: Any) -> None:
    args = (X, Point(np.array([2.0, -3.0], np.float32), np.float32(0.5)))
    as_jax = tuple(argnums) if isinstance(argnums, list) else argnums
    expected = plain(tree, as_jax)(*args, scale=2.0)
    assert_close(transform(tree, argnums)(*args, scale=2.0), expected)
    assert_close(transform(tree, argnums, chunk_size=2)(*args, scale=2.0), expected)


@TRANSFORMS
@pytest.mark.parametrize("chunk_size", [1, 4, 6, 100])
def test_chunks_change_nothing(transform: Any, plain: Any, chunk_size: int) -> None:
    fun = lambda x: jnp.stack([jnp.sum(x * x, 0), jnp.prod(x, 0)], 1)
    assert_close(transform(fun, chunk_size=chunk_size)(X), plain(fun)(X))


@pytest.mark.parametrize(("transform", "plain"), ALL[:2])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float64])
def test_dtypes_are_kept(transform: Any, plain: Any, dtype: Any) -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(X, dtype)
        mixed = lambda x: {"own": jnp.sin(x), "bf": x[0].astype(jnp.bfloat16)}
        assert_close(jax.jit(transform(mixed, chunk_size=4))(x), jax.jit(plain(mixed))(x), 1e-2)


@OURS
@pytest.mark.parametrize(
    ("fun", "x"),
    [
        (lambda x: x**2, 3.0),
        (lambda x: jnp.full((2, 3), x) * x, 2.0),
        (jnp.sin, np.zeros((0, 3), np.float32)),
        (lambda x: x[:, :0], X),
        (lambda x: (x[:0], jnp.sum(x)), X),
        (lambda x: 3.0, X),
        (lambda x: (x, 1.0), np.ones(2, np.float32)),
    ],
)
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_scalars_empty_arrays_and_constants(transform: Any, fun: Any, x: Any, chunk_size: Any) -> None:
    expected = jax.jacfwd(lambda x: jax.tree.map(jnp.asarray, fun(x)))(x)
    actual = transform(fun, chunk_size=chunk_size)(x)
    chex.assert_trees_all_equal_shapes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-6)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=8)
def test_any_shapes_and_chunks(data: st.DataObject) -> None:
    shape, other = (tuple(data.draw(st.lists(st.integers(0, 3), max_size=2))) for _ in range(2))
    chunk_size = data.draw(st.one_of(st.none(), st.integers(1, 10)))
    weight = np.sin(np.arange(1.0, 1 + int(np.prod(shape + other)))).reshape(shape + other).astype(np.float32)
    x = np.cos(np.arange(int(np.prod(other)), dtype=np.float32)).reshape(other)
    fun = lambda x: jnp.tensordot(weight, x, len(other)) if other else weight * x
    for transform in (jacfwd, jacrev):
        assert_close(transform(fun, chunk_size=chunk_size)(x), jnp.asarray(weight))


@OURS
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_aux_may_be_anything(transform: Any, chunk_size: Any) -> None:
    aux_of = lambda x: {"name": "a string", "none": None, "int": 3, "array": [2 * x], "type": int}
    rows, aux = transform(lambda x: (x * x, aux_of(x)), has_aux=True, chunk_size=chunk_size)(X[0])
    assert_close(rows, jnp.diag(2 * X[0]))
    assert_close(aux.pop("array"), [jnp.asarray(2 * X[0])])
    assert aux == {"name": "a string", "none": None, "int": 3, "type": int}


@OURS
def test_python_may_branch_on_values(transform: Any) -> None:
    fun = lambda x: x**2 if x > 0 else -x
    assert (float(transform(fun)(3.0)), float(transform(fun)(-3.0))) == (6.0, -1.0)
    assert float(jacfwd(transform(fun))(3.0)) == 2.0


def test_complex_outputs_are_for_forward_mode() -> None:
    fun = lambda x: jnp.exp(1j * x)
    for transform in (jacfwd, jacobian):
        assert_close(transform(fun)(X[0]), jax.jacfwd(fun)(X[0]))
    assert jacobian(fun).explain(X[0]).mode == "forward"
    with pytest.raises(TypeError, match=r"^jacrev: `output` is an array of .* complex64, but reverse mode needs real"):
        jacrev(fun)(X[0])
    with pytest.raises(
        TypeError, match=r"^jacobian: `output\['z'\]` is .* use forward mode .jacfwd, .*, or pass holomorphic=True"
    ):
        jacobian(lambda x: {"z": fun(x)}, mode="reverse")(X[0])


@jax.custom_jvp
def twice_the_slope(x: Any) -> Any:
    return jnp.sin(x)


twice_the_slope.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), 2 * jnp.cos(primals[0]) * tangents[0]))


@jax.custom_vjp
def thrice_the_slope(x: Any) -> Any:
    return jnp.sin(x)


thrice_the_slope.defvjp(lambda x: (jnp.sin(x), x), lambda x, seed: (3 * jnp.cos(x) * seed,))


def power(x: Any) -> Any:
    """x³, by a loop of unknown length."""
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x), (0, jnp.ones_like(x)))[1]


def test_rules_of_the_user_are_obeyed() -> None:
    slope = np.diag(np.cos(X[0]))
    for transform in (jacfwd, jacrev, jacobian):
        assert_close(transform(twice_the_slope)(X[0]), jnp.asarray(2 * slope))
    for transform in (jacrev, jacobian):
        assert_close(transform(thrice_the_slope)(X[0]), jnp.asarray(3 * slope))


def test_auto_takes_the_available_mode() -> None:
    choice = jacobian(thrice_the_slope).explain(X[0])
    assert choice.mode == "reverse"
    assert choice.why.startswith("forward mode cannot differentiate it")
    long = jacobian(lambda x: jnp.tile(thrice_the_slope(x), 9))
    assert long.explain(X[0]).mode == "reverse"
    few = lambda x: jnp.sum(power(x))
    assert jacobian(few).explain(X).mode == "forward"
    assert_close(jacobian(few)(X), jax.jacfwd(few)(X))
    both = lambda x: jnp.sum(thrice_the_slope(power(x)))
    with pytest.raises((TypeError, ValueError), match="differentiation|autodiff"):
        jacobian(both)(X)


def test_auto_gives_its_reason() -> None:
    wide, tall, square = (np.ones(shape, np.float32) for shape in ((2, 40), (40, 2), (6, 6)))
    times = jacobian(lambda w, x: w @ x, 1)
    assert times.explain(wide, np.ones(40, np.float32))[:3] == ("reverse", 40, 2)
    x = np.ones(2, np.float32)
    assert times.explain(tall, x).why == "input size 2, output size 40"
    choice = times.explain(square, np.ones(6, np.float32))
    assert choice.flops is not None
    assert set(choice.flops) == {"forward", "reverse"}
    assert choice.flops[choice.mode] == min(choice.flops.values())
    asked = jacobian(lambda w, x: w @ x, 1, mode="reverse").explain(tall, x)
    assert asked.mode == "reverse"
    assert asked.why == 'mode="reverse" was passed'


def test_auto_takes_the_cheaper_mode_for_square_jacobians() -> None:
    narrow = lambda x: jnp.tanh(jnp.ones((8, 30)) @ jnp.sin(jnp.ones((30, 6)) @ x))
    choice = jacobian(narrow).explain(np.ones(6, np.float32))
    assert choice.mode == min(choice.flops, key=choice.flops.get) == "forward"


@pytest.mark.slow
@pytest.mark.parametrize(("transform", "chunk_size"), [(jacfwd, None), (jacrev, 3), (jacobian, None)])
def test_modules_are_differentiated_and_updated_once(transform: Any, chunk_size: Any) -> None:
    model, twin = (Norm(nnx.Rngs(0)) for _ in range(2))
    rows = transform(lambda model, x: jnp.tanh(model(x)), chunk_size=chunk_size)(model, BATCH)
    apart: Any = nnx.split(twin, nnx.Param, ...)
    graphdef, params, rest = apart
    fun = lambda params: jnp.tanh(nnx.merge(graphdef, params, rest, copy=True)(BATCH))
    expected = jax.jit(jax.jacrev(fun))(params)
    assert_close(jax.tree.leaves(rows), jax.tree.leaves(expected))
    assert rows["dense"]["kernel"][...].shape == (5, 2, 3, 2)
    twin(BATCH)
    assert_close(jax.tree.leaves(nnx.state(model, nnx.BatchStat)), jax.tree.leaves(nnx.state(twin, nnx.BatchStat)))
    assert int(model.drop.rngs.count[...]) == int(twin.drop.rngs.count[...])
    assert int(model.count[...]) == 1


@pytest.mark.slow
@OURS
def test_a_module_or_its_method_may_be_the_function(transform: Any) -> None:
    model, twin = (Norm(nnx.Rngs(0)) for _ in range(2))
    rows = transform(model)(BATCH)
    assert int(model.count[...]) == 1
    model.drop.rngs.count[...] = twin.drop.rngs.count[...]
    again = transform(model.__call__)(BATCH)
    assert_close(again, rows)
    assert int(model.count[...]) == 2
    nnx.jit(lambda m: transform(m)(BATCH))(model)
    assert int(model.count[...]) == 3
    transform(lambda x, *, m: m(x))(BATCH, m=model)
    assert int(model.count[...]) == 4


@pytest.mark.parametrize(("steps", "mode"), [(5, "reverse"), (6, "reverse"), (7, "forward")])
def test_a_loop_of_more_steps_than_inputs_takes_forward_mode(steps: int, mode: str) -> None:
    weights = np.sin(np.arange(36.0, dtype=np.float32)).reshape(6, 6)
    of = jacobian(lambda x: lax.scan(lambda h, _: (jnp.tanh(weights @ h), None), x, None, steps)[0])
    x = np.cos(np.arange(6.0, dtype=np.float32))
    choice = of.explain(x)
    assert (choice.mode, choice.why.partition(";")[0]) == (mode, "about equally many operations")
    np.testing.assert_allclose(of(x), jax.jacfwd(of.__wrapped__)(x), rtol=1e-5, atol=1e-6)


def test_explaining_changes_no_module() -> None:
    model = Norm(nnx.Rngs(0))
    jacobian(model).explain(BATCH)
    assert int(model.count[...]) == 0


def test_the_arguments_are_those_of_the_function() -> None:
    assert list(inspect.signature(jacobian(tree)).parameters) == ["x", "point", "scale"]
    assert jacrev(tree).__name__ == "jacrev(tree)"


def assign(model: Any, x: Any) -> Any:
    model.dense.kernel[...] = 2 * model.dense.kernel[...]
    return model(x)


@OURS
@pytest.mark.parametrize(
    ("fun", "args", "options", "error", "match"),
    [
        (jnp.sin, (3,), {}, TypeError, r"argument `x` is 3 of type int, but only (real )?floating-point arrays"),
        (tree, (X, Point(np.arange(2), 1.0)), {"argnums": 1}, TypeError, r"argument `point\.x` is an array .* int64"),
        (lambda z: z, (1j,), {}, TypeError, r".*1j.* of type .*omplex, .* holomorphic=True (if|where) fun is"),
        (
            lambda z: z,
            (1.0,),
            {"holomorphic": True},
            TypeError,
            r"argument `z` is 1\.0 .* complex arrays",
        ),
        (jnp.real, (1j,), {"holomorphic": True}, TypeError, r"`output` is .* holomorphic=True needs complex outputs"),
        (tree, (X,), {"argnums": 3}, ValueError, r"argnums selects argument 3, but the call has 1 positional"),
        (lambda x: {"n": jnp.sum(x).astype(int)}, (X,), {}, TypeError, r"`output\['n'\]` is an array .* int32, but on"),
        (lambda x: None, (X,), {}, TypeError, r"fun must return a number or arrays to differentiate, but .* None"),
        (lambda x: x, (X,), {"has_aux": True, "argnums": 0}, TypeError, r"with has_aux=True, fun must return a pair"),
        (assign, (Norm(nnx.Rngs(0)), BATCH), {}, ValueError, r"fun assigns the parameter `dense\.kernel` of a model"),
    ],
)
def test_calls_without_a_jacobian_are_refused(
    transform: Any, fun: Any, args: Any, options: Any, error: Any, match: str
) -> None:
    with pytest.raises(error, match=f"^{transform.__name__}: {match}"):
        transform(fun, **options)(*args)


@OURS
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"argnums": ()}, ValueError, r"argnums is empty"),
        ({"argnums": (0, 0)}, ValueError, r"argnums=\(0, 0\) names an argument twice"),
        ({"argnums": 0.5}, TypeError, r"argnums must be an int or a tuple of ints, but got 0\.5"),
    ],
)
def test_invalid_options_are_refused_at_once(transform: Any, options: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=f"^{transform.__name__}: {match}"):
        transform(jnp.sin, **options)
    with pytest.raises(TypeError, match=f"^{transform.__name__}: fun must be a function, a bound method or a module"):
        transform("f")


def swirl(z: Any, w: Any) -> Any:
    return {"a": jnp.sin(z) * w[0], "b": (jnp.sum(z) * w**2,)}


Z = np.array([0.5 + 1j, -1.0 - 0.25j, 2j], np.complex64)


@pytest.mark.slow
@TRANSFORMS
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_holomorphic_functions_have_complex_jacobians(transform: Any, plain: Any, chunk_size: Any, dtype: Any) -> None:
    with jax.enable_x64(dtype == np.complex128):
        args, options = (Z.astype(dtype), Z[:2].astype(dtype)), {"argnums": (1, 0), "holomorphic": True}
        expected = plain(swirl, **options)(*args)
        assert_close(transform(swirl, chunk_size=chunk_size, **options)(*args), expected)
        assert_close(jax.jit(transform(swirl, memory_budget="1mb", **options))(*args), expected)
        both = jax.vmap(transform(swirl, **options), (0, None))(np.stack([args[0], -args[0]]), args[1])
        assert_close(jax.tree.map(lambda x: x[0], both), expected)


@pytest.mark.parametrize("mode", ["forward", "reverse", "auto"])
def test_both_modes_are_those_of_a_holomorphic_function(mode: str) -> None:
    of = jacobian(lambda z: jnp.sin(z) * z[0], mode=mode, holomorphic=True)
    assert_close(of(Z), jax.jacfwd(lambda z: jnp.sin(z) * z[0], holomorphic=True)(Z))
    assert of.explain(Z).mode in ("forward", "reverse")


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_real_functions_of_complex_numbers_are_those_of_jax(chunk_size: Any) -> None:
    real = lambda z, x: {"r": jnp.abs(z) ** 2 * x, "i": (z**2).imag}
    expected = jax.jacrev(real, (0, 1))(Z, 2.0)
    for transform in (jacrev, jacobian):
        assert_close(transform(real, (0, 1), chunk_size=chunk_size)(Z, 2.0), expected)
    assert jacobian(real).explain(Z, 2.0).why == "forward mode needs real arguments"
    with pytest.raises(TypeError, match=r"^jacfwd: argument `z` is .* complex64, but only real floating-point"):
        jacfwd(real)(Z, 2.0)


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("transform", [jacrev, jacobian])
@pytest.mark.parametrize("n", [np.arange(3), 3, True, np.array([True, False, True])])
def test_integers_have_jacobians_of_zeros_as_in_jax(transform: Any, n: Any, chunk_size: Any) -> None:
    scaled = lambda x, n: {"y": x[0] * n, "s": jnp.sum(x)}
    numbers = jax.tree.map(lambda x: 1 * x, n)  # JAX's fails with booleans
    expected = jax.jacrev(scaled, (1, 0), allow_int=True)(X[0], numbers)
    booleans = jnp.result_type(n) == jnp.bool_
    expected = jax.tree.map(lambda x: x.astype(bool) if booleans and x.dtype == jnp.int32 else x, expected)
    found = transform(scaled, (1, 0), allow_int=True, chunk_size=chunk_size)(X[0], n)
    assert_close(found, expected)
    weak = lambda tree: [x.weak_type for x in jax.tree.leaves(tree)]
    assert booleans or weak(found) == weak(expected)
    with pytest.raises(TypeError, match=rf"^{transform.__name__}: argument `n` is .*, but only floating-point arrays"):
        transform(scaled, (1, 0))(X[0], n)


ON_FOUR_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from plurax.transforms import hessian, jacfwd, jacobian, jacrev

jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((4,), ("i",))
x = np.sin(np.arange(24, dtype=np.float32)).reshape(8, 3)
cut = jax.device_put(x, jax.NamedSharding(mesh, jax.P("i")))
for transform in (jacfwd, jacrev, jacobian, hessian):
    fun = (lambda x: jnp.sum(jnp.sin(x))) if transform is hessian else jnp.sin
    expected = getattr(jax, transform.__name__, jax.jacrev)(fun)(x)
    for options in ({}, {"chunk_size": 5}, {"memory_budget": "1MiB"}):
        of = transform(fun, **options)
        found = of(cut)
        assert jax.sharding.get_abstract_mesh().empty
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        with jax.set_mesh(mesh):
            assert jax.typeof(found) == jax.typeof(of(cut)) != jax.typeof(expected)
    if transform is jacobian:
        assert of.explain(cut).inputs == 24
"""


@pytest.mark.slow
def test_arrays_sharded_over_explicit_axes_need_no_active_mesh() -> None:
    done = subprocess.run([sys.executable, "-c", ON_FOUR_DEVICES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_transforms_without_complex_or_integer_support_raise() -> None:
    for option in ("holomorphic", "allow_int"):
        with pytest.raises(ValueError, match=r"^jacobian: sparsity is for real arguments; leave out holomorphic and"):
            jacobian(jnp.sin, sparsity="auto", **{option: True})
    with pytest.raises(ValueError, match=r"^jacobian: allow_int=True needs reverse mode; pass mode=\"reverse\" or"):
        jacobian(jnp.sin, mode="forward", allow_int=True)
    with pytest.raises(TypeError, match=r"^jacobian: argument `x` is .* complex64, but only real floating-point"):
        jacobian(jnp.sin, sparsity="auto")(Z)


@pytest.fixture
def lowerings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list with an entry for each program lowered for a cost estimate."""
    found: list[Any] = []
    lower = modes.lower_apart

    def counted(fun: Any) -> Any:
        found.append(1)
        return lower(fun)

    monkeypatch.setattr(modes, "lower_apart", counted)
    return found


def wave(x: Any, n: int = 2, *, scale: Any = 1.0) -> Any:
    return jnp.sin(x * scale) * n


class Waves(nnx.Module):
    def __init__(self) -> None:
        self.gain = nnx.Param(jnp.array([1.0, -2.0, 3.0]))

    def __call__(self, x: Any) -> Any:
        return jnp.sin(x * self.gain[...])

    def of(self, x: Any) -> Any:
        return self(x)


def test_the_mode_is_decided_once_for_each_kind_of_arguments(lowerings: list[Any]) -> None:
    def fresh(x: Any, n: int = 2, *, scale: Any = 1.0) -> Any:
        return wave(x, n, scale=scale)

    def decisions(*args: Any, argnums: Any = 0, **kwargs: Any) -> int:
        before = len(lowerings)
        expected = jax.jacrev(fresh, argnums)(*args, **kwargs)
        assert_close(jacobian(fresh, argnums)(*args, **kwargs), expected)
        return (len(lowerings) - before) // 2

    assert decisions(X[0]) == 1
    assert decisions(X[1]) == decisions(jnp.asarray(X[0])) == 0  # other values
    assert decisions(X) == 1  # another shape
    assert decisions(X.astype(np.float16)) == 1  # another dtype
    assert decisions(X[0], 3) == 1  # a number that may change the program
    assert decisions(X[0], 3) == 0
    assert decisions(X[0], 2.5) == 1
    assert decisions(X[0], 3.5) == 0  # a number that may not
    assert decisions(X[0], scale=X[1]) == 1
    assert decisions(X[0], scale=X[0]) == 0
    assert decisions(X[0], X[1], argnums=(0, 1)) <= 1
    jax.jit(jacobian(fresh))(X[0])
    jax.vmap(jacobian(fresh))(X)
    assert decisions(X[0]) == 0


def test_models_and_methods_are_remembered_by_their_structure(lowerings: list[Any]) -> None:
    model = Waves()
    for of, first in ((model, 2), (model.of, 2), (Waves(), 0), (Waves().of, 0), (lambda x: model(x), 2)):
        before = len(lowerings)
        for x in (X[0], X[1]):
            assert_close(jacobian(of)(x), jnp.diag(jnp.cos(x * model.gain[...]) * model.gain[...]))
        assert len(lowerings) - before == first
    by_model = lambda model, x: model(x)
    for each, first in ((model, 2), (Waves(), 0)):
        before = len(lowerings)
        jacobian(by_model)(each, X[0])
        assert len(lowerings) - before == first


@pytest.mark.slow
def test_batches_are_remembered_too(lowerings: list[Any]) -> None:
    layer = lambda x: jnp.sin(x) * x[:, :1]
    for x in (BATCH, 2 * BATCH, BATCH[:3]):
        assert_close(batch_jacobian(layer)(x), jax.vmap(jax.jacrev(lambda x: jnp.sin(x) * x[0]))(x))
    assert len(lowerings) == 2
    batch_jacobian(layer, in_axes=(0,))(BATCH)
    assert len(lowerings) == 4


def test_equinox_modules_and_their_methods_are_remembered_by_their_structure(lowerings: list[Any]) -> None:
    class Gain(eqx.Module):
        gain: jax.Array
        power: int = eqx.field(static=True)

        def __call__(self, x: Any) -> Any:
            return jnp.sin(x * self.gain) ** self.power

        def of(self, x: Any) -> Any:
            return self(x)

    first, second, other = Gain(jnp.ones(3), 1), Gain(2 * jnp.ones(3), 1), Gain(jnp.ones(3), 2)
    for of, expected in ((first, 2), (second, 0), (other, 2), (first.of, 2), (second.of, 0)):
        before = len(lowerings)
        for x in (X[0], X[1]):
            assert_close(jacobian(of)(x), jax.jacrev(of)(x))
            batch_jacobian(of, in_axes=(0,), mode="reverse")(X)
        assert len(lowerings) - before == expected


@jax.custom_vjp
def cubed(x: Any) -> Any:
    return x**3


cubed.defvjp(lambda x: (x**3, x), lambda x, seed: (3 * x**2 * seed,))


@dataclass(frozen=True)
class Cube:
    """x³, by a loop without a reverse mode or a rule without a forward mode; all instances are equal."""

    loop: Any = field(compare=False)

    def __call__(self, x: Any) -> Any:
        return power(x) if self.loop else cubed(x)

    def of(self, x: Any) -> Any:
        return self(x)

    def turned(self, loop: Any) -> Cube:
        object.__setattr__(self, "loop", loop)
        return self


BY_CUBE = lambda x, cube: cube(x)
BOTH = (True, False, True)


def captured_flag() -> Any:
    cube = Cube(True)
    fun = lambda x: cube(x)
    for loop in BOTH:
        cube.turned(loop)
        yield fun, ()


def flag_of_an_object() -> Any:
    cube = Cube(True)
    return ((cube.turned(loop), ()) for loop in BOTH)


def flag_of_a_method() -> Any:
    cube = Cube(True)
    return ((cube.turned(loop).of, ()) for loop in BOTH)


def flag_of_an_argument() -> Any:
    cube = Cube(True)
    return ((BY_CUBE, (cube.turned(loop),)) for loop in BOTH)


def branch_on_a_float() -> Any:
    fun = lambda x, p: Cube(p > 0)(x)
    return ((fun, (p,)) for p in (1.0, -1.0, 2.0))


def branch_on_an_array() -> Any:
    fun = lambda x, p: Cube(p[0] > 0)(x)
    return ((fun, (p * np.ones(2),)) for p in (1.0, -1.0, 2.0))


def branch_on_the_configuration() -> Any:
    fun = lambda x: Cube(jnp.result_type(float) == jnp.float64)(x)
    for on in BOTH:
        with jax.enable_x64(on):
            yield fun, ()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["whole", "chunks", "budget", "batch"])
@pytest.mark.parametrize(
    "calls",
    [
        captured_flag,
        flag_of_an_object,
        flag_of_a_method,
        flag_of_an_argument,
        branch_on_a_float,
        branch_on_an_array,
        branch_on_the_configuration,
    ],
)
def test_a_mode_that_has_become_impossible_is_chosen_again(calls: Any, way: str) -> None:
    options: Any = {"chunks": {"chunk_size": 2}, "budget": {"memory_budget": "1MiB"}}.get(way, {})
    x = jnp.asarray(X)
    expected = jax.vmap(jnp.diag)(3 * x**2)
    for fun, more in calls():
        if way == "batch":
            found = batch_jacobian(fun, in_axes=(0, *(None for _ in more)))(x, *more)
            np.testing.assert_allclose(found, expected, rtol=1e-5)
        else:
            np.testing.assert_allclose(jacobian(fun, **options)(x[0], *more), expected[0], rtol=1e-5)
            assert jacobian(fun).explain(x[0], *more).mode in ("forward", "reverse")


def test_a_branch_on_the_differentiated_value_has_its_own_mode() -> None:
    for loop_above_zero in (True, False):
        fun = lambda x, loop=loop_above_zero: Cube((x[0] > 0) == loop)(x)
        for x in (X[0], -X[0], X[1]):
            np.testing.assert_allclose(jacobian(fun)(x), np.diag(3 * x**2), rtol=1e-5)


def test_the_mode_is_chosen_again_for_an_output_that_has_become_complex() -> None:
    matrices = [np.sin(np.arange(9, dtype=np.float32)).reshape(3, 3)]
    fun = lambda x: matrices[-1] @ x
    of = jacobian(fun)
    assert of.explain(X[0]).mode == "reverse"
    for factor in (1, 1j, 1):
        matrices.append(factor * matrices[0])
        assert_close(of(X[0]), jax.jacfwd(fun)(X[0]))
    matrices.append(1j * matrices[0])
    with pytest.raises(TypeError, match=r"^jacobian: `output` is .* complex64, but reverse mode needs real outputs"):
        jacobian(fun, mode="reverse")(X[0])


def test_explain_reports_the_current_choice() -> None:
    cube = Cube(True)
    of = jacobian(cube)
    for loop, mode in ((True, "forward"), (False, "reverse")):
        cube.turned(loop)
        assert of.explain(X[0]).mode == mode


def test_mistakes_of_a_remembered_function_are_raised(lowerings: list[Any]) -> None:
    bad: list[type[Exception]] = []

    def fun(x: Any) -> Any:
        if bad:
            raise bad[-1]("a mistake")
        return jnp.sin(x)

    jacobian(fun)(X[0])
    for error in (ValueError, RuntimeError):
        bad.append(error)
        with pytest.raises(error, match="^a mistake"):
            jacobian(fun)(X[0])
    bad.clear()
    assert_close(jacobian(fun)(X[0]), jnp.diag(jnp.cos(X[0])))
    assert len(lowerings) == 2


def test_equal_objects_are_distinguished(lowerings: list[Any]) -> None:
    class Odd:
        """An object that is neither comparable nor hashable."""

        __hash__ = None  # type: ignore[assignment]  # as in a class with an `__eq__`

        def __eq__(self, other: object) -> Any:
            return np.zeros(2, bool)

    for things in ((Cube(True), Cube(True)), (Odd(), Odd())):
        for known in (0, 1):
            for thing in things:
                before = len(lowerings)
                jacobian(wave_of)(X[0], thing)
                assert len(lowerings) - before == (0 if known else 2)


def wave_of(x: Any, _: Any) -> Any:
    return jnp.sin(x)


@pytest.mark.slow
def test_the_cache_is_bounded_and_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MOST", 3)

    class Data:
        """An object that is not an array."""

    data = Data()
    fun: Any = lambda x, data: jnp.sin(x)
    gone = [weakref.ref(fun), weakref.ref(data)]
    for size in range(1, 6):
        jacobian(fun)(jnp.ones(size), data)
    assert len(memory._decisions[id(fun)]) == 3
    del fun, data
    gc.collect()
    assert [each() for each in gone] == [None, None]


@pytest.mark.slow
def test_static_parts_of_arguments_are_released_with_the_function() -> None:
    class Told(eqx.Module):
        gain: jax.Array
        note: Any = eqx.field(static=True)

    class Note:
        """An object that is not an array."""

    class Waving:
        def of(self, x: Any, _: Any) -> Any:
            return jnp.sin(x)

    owners: list[Any] = [lambda x, _: jnp.sin(x), Waving()]
    many = len(memory._decisions)
    for owner in owners:
        note = Note()
        jacobian(getattr(owner, "of", owner))(X[0], Told(jnp.ones(3), note))
        gone = weakref.ref(note)
        del note
        assert gone() is not None
        assert len(memory._decisions) == many + 1
        owners[owners.index(owner)] = None
        del owner
        jax.clear_caches()
        gc.collect()
        assert gone() is None
        assert len(memory._decisions) == many


def test_the_mode_is_chosen_again_for_objects_that_cannot_be_compared(lowerings: list[Any]) -> None:
    class Slotted:
        __slots__ = ()

        def __call__(self, x: Any) -> Any:
            return jnp.sin(x)

    class Odd:
        __hash__ = object.__hash__

        def __eq__(self, other: object) -> Any:
            return np.zeros(2, bool)

    class Told(eqx.Module):
        note: Any = eqx.field(static=True)

        def __call__(self, x: Any) -> Any:
            return jnp.sin(x)

    for make in (Slotted, lambda: Told(Odd())):
        before = len(lowerings)
        for _ in range(2):
            assert_close(jacobian(make())(X[0]), jnp.diag(jnp.cos(X[0])))
        assert len(lowerings) - before == 4


def test_unknown_modes_and_patterns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^jacobian: mode must be one of 'auto', 'forward', 'reverse', but got 'fwd'"):
        jacobian(jnp.sin, mode="fwd")
