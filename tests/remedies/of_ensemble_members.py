"""Remedies of `Ensemble`: its creation, calls, predictions and members."""

from __future__ import annotations

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.sharding import AbstractMesh

import plurax.ensemble
from plurax.ensemble import Ensemble, Trainer, select
from plurax.transforms import vmap

from ._registry import Fails, remedy

X = jnp.arange(6.0).reshape(2, 3)


def linear(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(3, 2, rngs=rngs)


def models(count: int = 2) -> list[nnx.Linear]:
    return [linear(nnx.Rngs(i)) for i in range(count)]


class Activated(nnx.Module):
    """A dense layer and a function."""

    def __init__(self, rngs: nnx.Rngs, function: Any = None) -> None:
        self.dense = linear(rngs)
        self.function = function or (lambda x: 2 * x)

    def __call__(self, x: jax.Array) -> Any:
        return self.function(self.dense(x))


class Masked(linen.Module):
    """A dense layer and dropout."""

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = True) -> Any:
        return linen.Dropout(0.5, deterministic=not train)(linen.Dense(2)(x))


def dense_and_dropout(key: jax.Array) -> eqx.Module:
    return eqx.nn.Sequential([eqx.nn.Linear(3, 2, key=key), eqx.nn.Dropout(0.5)])


def per_example(model: Any, x: jax.Array) -> jax.Array:
    return jax.vmap(model)(x)


ENSEMBLE = Ensemble.create(linear, 4, seed=0)


@remedy("plurax.ensemble: `{}` is deprecated and will be removed in 0.4; use `{}`.")
def a_deprecated_name(fails: Fails) -> None:
    assert "use `MemberStatus`" in fails(lambda: plurax.ensemble.Standing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plurax.ensemble.MemberStatus.__name__ == "MemberStatus"


@remedy(
    "Ensemble.stack: members must be a list of models, but got {}.",
    "Ensemble.stack: the list of members is empty; an ensemble has at least one.",
    "for others use Ensemble.from_apply(apply, variables)",
    "pass the members of an ensemble, as [*ensemble]",
)
def stack_of_something_else(fails: Fails) -> None:
    for no_list in (models()[0], iter(models()), ENSEMBLE):
        fails(Ensemble.stack, no_list)
    fails(Ensemble.stack, [])
    assert len(Ensemble.stack(models(1))) == 1
    fails(Ensemble.stack, [ENSEMBLE, ENSEMBLE])
    assert len(Ensemble.stack([*ENSEMBLE, *ENSEMBLE])) == 8
    dense, equinox = linen.Dense(2), eqx.nn.Linear(3, 2, key=jax.random.key(0))
    of_linen = dense.init(jax.random.key(0), X)
    for other, apply, variables in (
        (dense, dense.apply, of_linen),
        (of_linen, dense.apply, of_linen),
        (equinox, per_example, equinox),
        (jnp.sin, lambda _, x: jnp.sin(x), jnp.zeros(())),
    ):
        fails(Ensemble.stack, [other, other])
        assert len(Ensemble.from_apply(apply, [variables, variables])(X)) == 2


@remedy(
    "build all members with one configuration",
    "define it once, at module level, or use Ensemble.create",
    "define it once, outside the function that makes a member",
)
def members_that_differ(fails: Fails) -> None:
    fails(Ensemble.stack, [Activated(nnx.Rngs(0), nnx.relu), Activated(nnx.Rngs(1), nnx.gelu)])
    fails(Ensemble.stack, [nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Linear(3, 2, use_bias=False, rngs=nnx.Rngs(0))])
    assert len(Ensemble.stack([Activated(nnx.Rngs(i), nnx.relu) for i in range(2)])) == 2
    fails(Ensemble.stack, [Activated(nnx.Rngs(i)) for i in range(2)])
    assert Ensemble.create(Activated, 2, seed=0)(X).shape == (2, 2, 2)

    def mlp(i: int, activation: Any = None) -> eqx.Module:
        return eqx.nn.MLP(3, 2, 4, 1, activation=activation or (lambda x: 2 * x), key=jax.random.key(i))

    fails(Ensemble.from_apply, per_example, [mlp(i) for i in range(2)])
    assert Ensemble.from_apply(per_example, [mlp(i, linen.relu) for i in range(2)])(X).shape == (2, 2, 2)


@remedy("{}: the models hold no arrays to stack; pass models with parameters.")
def models_without_arrays(fails: Fails) -> None:
    fails(Ensemble.stack, [nnx.Sequential(nnx.relu)])
    fails(Ensemble.create, lambda rngs: nnx.Sequential(nnx.relu), 2, seed=0)
    fails(Ensemble.from_apply, lambda _, x: x, [(), ()])
    assert len(Ensemble.stack([nnx.Sequential(models()[0], nnx.relu)])) == 1


@remedy(
    "an int, a key such as jax.random.key(0), or a list of {} ints or keys",
    "Ensemble.create: seed has {} entries for {} members; pass one for each.",
)
def seeds(fails: Fails) -> None:
    wrong: Any
    for wrong in (None, 1.5, "0", [0.5, 1.0], jnp.arange(2)):
        fails(Ensemble.create, linear, 2, seed=wrong)
    for wrong in ([0], [0, 1, 2], jax.random.split(jax.random.key(0), 3)):
        fails(Ensemble.create, linear, 2, seed=wrong)
    for right in (0, jax.random.key(0), [0, 1], [jax.random.key(0), jax.random.key(1)]):
        assert len(Ensemble.create(linear, 2, seed=right)) == 2


@remedy(
    "for models of Linen or Equinox, and for functions, use Ensemble.from_apply(apply, variables)",
    "make must return an NNX module, but it returned {}",
    "make must be a function of nnx.Rngs that returns a new model, but got a model, {}",
    "pass a function, or use Ensemble.stack for models that exist",
)
def something_else_than_a_function_that_makes_modules(fails: Fails) -> None:
    fails(Ensemble.create, models()[0], 2, seed=0)
    assert len(Ensemble.create(linear, 2, seed=0)) == len(Ensemble.stack(models())) == 2
    dense, equinox = linen.Dense(2), eqx.nn.Linear(3, 2, key=jax.random.key(0))
    for model in (dense, equinox):
        fails(Ensemble.create, model, 2, seed=0)
        fails(Ensemble.create, lambda rngs, model=model: model, 2, seed=0)
    fails(Ensemble.create, lambda rngs: jnp.sin, 2, seed=0)
    assert Ensemble.from_apply(dense.apply, [dense.init(jax.random.key(i), X) for i in range(2)])(X).shape == (2, 2, 2)
    assert Ensemble.from_apply(per_example, [equinox, equinox])(X).shape == (2, 2, 2)
    assert Ensemble.from_apply(lambda w, x: jnp.sin(w * x), [jnp.ones(3)] * 2)(X).shape == (2, 2, 3)


@remedy(
    "Ensemble.from_apply: variables must be a list, one pytree per member, but got a {}.",
    "Ensemble.from_apply: the list of variables is empty; pass at least one pytree.",
)
def variables_that_are_no_list(fails: Fails) -> None:
    apply = lambda v, x: v["w"] * x
    stacked = {"w": jnp.arange(6.0).reshape(2, 3)}
    fails(Ensemble.from_apply, apply, stacked)
    fails(Ensemble.from_apply, apply, [])
    each = [jax.tree.map(lambda w, i=i: w[i], stacked) for i in range(2)]
    np.testing.assert_array_equal(Ensemble.from_apply(apply, each)(jnp.ones(3)), stacked["w"])


@remedy(
    "use plurax.transforms.vmap, or pass all of it, with in_axes=None",
    "map over their first axis with jax.vmap",
    "take members by their index, as ensemble[0]",
)
def an_ensemble_whose_arrays_were_sliced_or_stacked(fails: Fails) -> None:
    call = lambda model: model(X)
    expected = ENSEMBLE(X)
    for mapped in (jax.vmap, lambda fun: lambda ens: jax.lax.map(fun, ens), lambda fun: jax.jit(jax.vmap(fun))):
        fails(mapped(call), ENSEMBLE)
    np.testing.assert_allclose(vmap(call)(ENSEMBLE), expected, rtol=1e-6)
    whole = jax.vmap(lambda ens, x: ens(x), in_axes=(None, 0))(ENSEMBLE, X)
    np.testing.assert_allclose(whole.swapaxes(0, 1), expected, rtol=1e-6)
    fails(lambda: jax.tree.map(lambda x: x[1], ENSEMBLE)(X))
    np.testing.assert_allclose(ENSEMBLE[1](X), expected[1], rtol=1e-6)
    two = jax.tree.map(lambda *x: jnp.stack(x), ENSEMBLE, ENSEMBLE)
    made = jax.jit(jax.vmap(lambda key: Ensemble.create(linear, 4, seed=key)))(jax.random.split(jax.random.key(0), 2))
    for stacked in (two, made):
        fails(stacked, X)
        fails(vmap(call), stacked)
        fails(jax.jit(call), stacked)
        assert jax.vmap(call)(stacked).shape == (2, 4, 2, 2)


@remedy(
    "use its evaluation mode: {}{})",
    "return the members: plurax.transforms.vmap(lambda member, x: (member, member(x)), (0, None))(ensemble, x)",
)
def a_call_that_changes_members(fails: Fails) -> None:
    ens: Any = Ensemble.create(lambda rngs: nnx.BatchNorm(3, rngs=rngs), 2, seed=0)
    assert "ensemble.view(use_running_average=True)" in fails(ens, X)
    assert ens.view(use_running_average=True)(X).shape == (2, 2, 3)
    after, _ = vmap(lambda member, x: (member, member(x)), (0, None))(ens, X)
    assert isinstance(after, Ensemble)
    np.testing.assert_allclose(after[1].mean[...], 0.01 * X.mean(0), rtol=1e-5)
    ens = Ensemble.create(lambda rngs: nnx.Dropout(0.5, rngs=rngs), 2, seed=0)
    assert "deterministic=True" in fails(ens, X)
    assert (ens.view(deterministic=True)(X) == X).all()


@remedy(
    "pass options of their apply function, as ens(x, train=False)",
    "use eqx.nn.inference_mode of each model, before Ensemble.from_apply",
)
def views_of_models_that_are_not_of_nnx(fails: Fails) -> None:
    variables = [Masked().init(jax.random.key(i), X, train=False) for i in range(2)]
    ens = Ensemble.from_apply(Masked().apply, variables)
    fails(ens.view, deterministic=True)
    assert ens(X, train=False).shape == (2, 2, 2)
    equinox = [dense_and_dropout(jax.random.key(i)) for i in range(2)]
    fails(Ensemble.from_apply(per_example, equinox).view, inference=True)
    nested = lambda variables, x: per_example(variables["net"], x)
    fails(Ensemble.from_apply(nested, [{"net": net} for net in equinox]).view, inference=True)
    inference = [eqx.nn.inference_mode({"net": net}) for net in equinox]
    assert Ensemble.from_apply(nested, inference)(X).shape == (2, 2, 2)
    assert Ensemble.from_apply(per_example, [*map(eqx.nn.inference_mode, equinox)])(X).shape == (2, 2, 2)


@remedy('pass {"rngs": {"dropout": key, "count": jnp.uint32(0)}}')
def keys_of_linen_without_a_count(fails: Fails) -> None:
    params, key = Masked().init(jax.random.key(0), X, train=False), jax.random.key(1)

    def stepped(rngs: dict[str, Any]) -> Any:
        ens = Ensemble.from_apply(Masked().apply, [{**params, "rngs": rngs}] * 2)
        trainer = Trainer(lambda model, x: model.call_and_update(x).mean(), optax.sgd(0.1), strategy="vmap")
        return trainer.step(trainer.init(ens), X)[0].ensemble

    for rngs in ({"dropout": key}, {"dropout": key, "count": jnp.float32(0)}):
        fails(stepped, rngs)
    assert stepped({"dropout": key, "count": jnp.uint32(0)}).rest["rngs"]["count"].tolist() == [1, 1]


@remedy("Ensemble.predict: temperature divides logits, but kind='regression' has none; leave it out.")
def a_temperature_for_values(fails: Fails) -> None:
    fails(ENSEMBLE.predict, X, kind="regression", temperature=2.0)
    np.testing.assert_allclose(ENSEMBLE.predict(X, kind="regression").mean, ENSEMBLE(X).mean(0), rtol=1e-6)


@remedy(
    "Ensemble.predict: each member must return logits of shape {}, but {}.",
    "for logits of yes-or-no labels use kind='binary', {}",
    "for a single example pass x[None], {}",
    "for values use kind='regression'",
    "for regression each member must return values or a pair (mean, variance)",
)
def outputs_of_another_kind(fails: Fails) -> None:
    single = Ensemble.from_apply(lambda w, x: x @ w, [jnp.arange(3.0) - i for i in range(2)])  # (batch,)
    assert single.predict(X, kind="binary").mean.shape == (2, 2)
    assert single.predict(X, kind="regression").mean.shape == (2,)
    fails(single.predict, X)
    fails(ENSEMBLE.predict, X[0])
    assert ENSEMBLE.predict(X[:1]).mean.shape == (1, 2)
    assert "binary" not in fails(single.predict, X[0], kind="binary")
    assert single.predict(X[:1], kind="binary").mean.shape == (1, 2)
    pairs = Ensemble.from_apply(lambda w, x: (x @ w, jnp.ones(len(x))), [jnp.ones(3)] * 2)
    fails(pairs.predict, X)
    assert "binary" not in fails(pairs.predict, X, kind="binary")
    assert pairs.predict(X, kind="regression").mean.shape == (2,)
    three = Ensemble.from_apply(lambda w, x: (x @ w, x @ w, x @ w), [jnp.ones(3)] * 2)
    fails(three.predict, X, kind="regression")
    column = Ensemble.create(lambda rngs: nnx.Linear(3, 1, rngs=rngs), 2, seed=0)  # (batch, 1)
    fails(column.predict, X)
    assert column.predict(X, kind="binary").mean.shape == (2, 1, 2)
    assert column.predict(X, kind="regression").mean.shape == (2, 1)


@remedy("Ensemble.predict: the members' {}; return one variance for each mean.")
def variances_of_another_shape(fails: Fails) -> None:
    apply = lambda w, x, n: (x @ w, jnp.ones(n))
    ens = Ensemble.from_apply(apply, [jnp.ones(3)] * 2)
    fails(ens.predict, X, kind="regression", n=1)
    assert ens.predict(X, kind="regression", n=2).variance.tolist() == [1, 1]


@remedy(
    "Ensemble: {} selects none of the {} members; select at least one.",
    "{}: indices are empty; select at least one member.",
    "{}: the mask selects none of the {} members; select at least one.",
    "select: needs an Ensemble or a TrainState, but got {}.",
)
def no_members(fails: Fails) -> None:
    fails(lambda: ENSEMBLE[4:])
    fails(lambda: ENSEMBLE[[]])
    fails(select, ENSEMBLE, jnp.zeros(4, bool))
    fails(select, [*ENSEMBLE], [0])
    assert len(ENSEMBLE[3:]) == len(ENSEMBLE[[0]]) == len(select(ENSEMBLE, jnp.arange(4) == 1)) == 1


@remedy("{}: a traced mask selects an unknown number of members; pass indices of a fixed count.")
def a_traced_mask(fails: Fails) -> None:
    mask = jnp.array([True, False, True, False])
    fails(jax.jit(select), ENSEMBLE, mask)
    fails(jax.jit(lambda ens, mask: ens[mask]), ENSEMBLE, mask)
    two = jax.jit(lambda ens, mask: select(ens, jnp.nonzero(mask, size=2)[0]))(ENSEMBLE, mask)
    np.testing.assert_allclose(two(X), ENSEMBLE(X)[::2], rtol=1e-5)


@remedy(
    "{}: shared arrays are compared, but `{}` is traced; call it outside of jit.",
    "load the same values into all members, or leave it out of shared=",
    "{}: shared= selects all variables, so that the members would be one; select fewer.",
)
def shared_arrays_that_differ(fails: Fails) -> None:
    members = models()
    fails(Ensemble.stack, members, shared="kernel")
    fails(Ensemble.stack, members, shared=nnx.Param)
    fails(jax.jit(lambda: Ensemble.stack(models(), shared="kernel")))
    assert Ensemble.stack(members, shared="bias").shared is not None
    members[1].kernel[...] = members[0].kernel[...]
    shared = Ensemble.stack(members, shared="kernel")
    np.testing.assert_allclose(jax.jit(lambda ens: ens(X))(shared)[0], members[0](X), rtol=1e-5)


@remedy(
    "rename the axes of the mesh",
    'add an axis "ensemble", of length 1 if no device has members of its own',
)
def axes_of_a_mesh(fails: Fails) -> None:
    loss = lambda model, x: jnp.square(model(x)).mean()

    def stepped(mesh: Any) -> Any:
        trainer = Trainer(loss, optax.sgd(0.1), mesh=mesh)
        return trainer.step(trainer.init(ENSEMBLE), X)[1]["loss"]

    names: tuple[str, ...]
    for names in (("members",), ("ensemble", "examples"), ("data",), ("data", "model")):
        fails(stepped, jax.make_mesh((1,) * len(names), names))
    for names in (("ensemble",), ("ensemble", "data"), ("ensemble", "data", "model")):
        assert stepped(jax.make_mesh((1,) * len(names), names)).shape == (4,)


@remedy(
    'the {} devices of the mesh axis "ensemble"; use a multiple of {}',
    "leave mesh out, and pass it to the Trainer",
    "trace the call, with jax.eval_shape or program.compile_for, or pass a jax.sharding.Mesh",
)
def members_on_a_mesh(fails: Fails) -> None:
    abstract, mesh = AbstractMesh((2,), ("ensemble",)), jax.make_mesh((1,), ("ensemble",))
    fails(Ensemble.create, linear, 3, seed=0, mesh=abstract)
    fails(Ensemble.create, linear, 4, seed=0, mesh=abstract)
    fails(jax.jit(lambda: Ensemble.create(linear, 4, seed=0, mesh=mesh)))
    assert len(Ensemble.create(linear, 4, seed=0, mesh=mesh)) == 4

    def begun(mesh: Any) -> Any:
        trainer = Trainer(lambda model, x: jnp.square(model(x)).mean(), optax.sgd(0.1), mesh=mesh)
        return trainer.init(Ensemble.create(linear, 4, seed=0))

    fails(begun, abstract)
    for state in (jax.eval_shape(lambda: begun(abstract)), jax.jit(lambda: begun(mesh))(), begun(mesh)):
        assert len(state.ensemble) == 4
