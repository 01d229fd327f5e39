"""Calls of arrays alone take a shorter way outside `jit`: it gives what the checked way gives, to the bit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax import transforms
from plurax.transforms import _linear, _vmap, jacfwd, jvp, linearize, vjp, vmap
from plurax.transforms._calls.plain import are_tangents, plain_arrays, plain_size

pytestmark = pytest.mark.smoke

X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)


def tanh(x):
    return jnp.tanh(x) * 2.0


def several(tree, y):
    return {"sum": jnp.sin(tree["a"]) * y, "other": (y, tree["b"] ** 2)}


TREE = {"a": X[0], "b": X}
CASES = [(tanh, (X,)), (tanh, (jnp.float32(0.5),)), (tanh, (jnp.asarray(2.0),)), (several, (TREE, X[1]))]
CASES += [(tanh, (X.astype(jnp.complex64) * 1j,)), (tanh, (X.astype(jnp.float16),)), (lambda x: X, (X[0],))]


def same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (jax.typeof(x), x.weak_type) == (jax.typeof(y), y.weak_type)
        np.testing.assert_array_equal(x, y)


@pytest.fixture
def both(monkeypatch):
    """Return a function that calls `fun` the short way, and the checked one."""

    def of(fun):
        found = fun()
        with monkeypatch.context() as patch:
            patch.setattr(_linear, "plain_arrays", lambda *_: None)
            patch.setattr(_vmap, "plain_size", lambda *_: None)
            return found, fun()

    return of


@pytest.mark.parametrize(("fun", "args"), CASES)
class Test_the_same:
    def test_jvp(self, both, fun, args):
        assert plain_arrays(fun, args)
        tangents = jax.tree.map(lambda x: x * 2 + 1, args)
        same(*both(lambda: jvp(fun, args, tangents)))
        same(jvp(fun, args, tangents), jax.jvp(fun, args, tangents))

    def test_vjp(self, both, fun, args):
        same(*both(lambda: vjp(fun, *args)[1](vjp(fun, *args)[0])))
        found, expected = both(lambda: jax.tree.structure(vjp(fun, *args)[1].primals))
        assert found == expected

    def test_linearize(self, both, fun, args):
        same(*both(lambda: linearize(fun, *args)[1](*args)))

    @pytest.mark.parametrize("axis", [0, 1])
    def test_vmap(self, both, fun, args, axis):
        args = jax.tree.map(lambda x: jnp.stack([x, x + 1], axis=min(axis, x.ndim)), args)
        axes = 0 if min(x.ndim for x in jax.tree.leaves(args)) == 1 else axis
        same(*both(lambda: vmap(fun, axes)(*args)))
        same(vmap(fun, axes)(*args), jax.vmap(fun, axes)(*args))

    def test_inside_transforms(self, both, fun, args):
        same(*both(lambda: jax.jit(partial(jvp, fun))(args, args)))
        mapped = jax.tree.map(lambda x: jnp.stack([x, x + 1]), args)
        same(*both(lambda: jax.vmap(lambda *args: vjp(fun, *args)[1](fun(*args)))(*mapped)))
        same(*both(lambda: jax.vmap(lambda *args: vmap(fun)(*jax.tree.map(lambda x: x[None], args)))(*mapped)))


@pytest.mark.parametrize(
    "args",
    [
        (X, 1.0),
        (X, np.ones(3)),
        (X, jnp.arange(3)),
        (X, jax.random.key(0)),
        (X, X.astype(jnp.bfloat16)),
        (X, "name"),
        ({"model": nnx.Linear(2, 3, rngs=nnx.Rngs(0))},),
        [X],
        (),
    ],
)
def test_others_are_checked(args):
    assert plain_arrays(tanh, args) is None


def test_functions_bound_to_a_model_are_checked():
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    for fun in (model, model.__call__, partial(model), transforms.vmap(model)):
        assert plain_arrays(fun, (X,)) is None
    assert plain_arrays(3, (X,)) is None


@pytest.mark.parametrize("tangent", [X[0], X.astype(jnp.float16), [X], 1.0, None, np.asarray(X)])
def test_other_tangents_are_checked(tangent):
    assert not are_tangents(plain_arrays(tanh, (X,)), (tangent,))


@pytest.mark.parametrize(
    ("args", "axes"),
    [
        ((X, X[0]), (0, 0)),
        ((X,), (2,)),
        ((X,), (-1,)),
        ((X,), (True,)),
        ((X,), ([0],)),
        ((np.ones(3),), (0,)),
        ((1.0,), (None,)),
        ((X,), (None,)),
        ((nnx.Linear(2, 3, rngs=nnx.Rngs(0)), X), (None, 0)),
    ],
)
def test_other_maps_are_checked(args, axes):
    assert plain_size(args, axes) is None


def test_models_that_a_mapped_function_returns_are_stacked():
    model = vmap(lambda scale: nnx.Linear(2, 3, kernel_init=nnx.initializers.constant(0), rngs=nnx.Rngs(0)))(X[0])
    assert isinstance(model, nnx.Linear)
    assert model.kernel.shape == (4, 2, 3)
    with pytest.raises(ValueError, match="out_axes"):
        vmap(tanh, out_axes=2)(X[0])
    assert vmap(lambda x: (x, 2.0), out_axes=(0, None))(X[0])[1] == 2.0


@pytest.mark.parametrize(("fun", "args"), CASES[:2] + CASES[3:4] + CASES[5:])
def test_columns_outside_jit_are_those_inside(fun, args):
    positions = tuple(range(len(args)))
    found, inside = jacfwd(fun, positions)(*args), jax.jit(jacfwd(fun, positions))(*args)
    expected = jax.jacfwd(fun, positions)(*args)
    assert jax.tree.structure(found) == jax.tree.structure(expected) == jax.tree.structure(inside)
    for x, y, z in zip(*map(jax.tree.leaves, (found, inside, expected)), strict=True):
        assert x.dtype == y.dtype == z.dtype
        assert x.weak_type == y.weak_type
        np.testing.assert_allclose(x, y, rtol=1e-6 if x.dtype == jnp.float32 else 1e-3, atol=1e-6)
        np.testing.assert_array_equal(x, z)
