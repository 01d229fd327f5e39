import copy
import pickle
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.core import FrozenDict, freeze

from plurax.ensemble import Ensemble, Trainer, load_member, save
from plurax.transforms import grad, vmap

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(6, use_bias=False)(x)
        return nn.Dense(3)(nn.relu(nn.BatchNorm(use_running_average=not train)(x)))


NORMED = Normed()


@pytest.fixture(scope="module")
def linen():
    return [NORMED.init(jax.random.key(i), X) for i in range(3)]


def apply_mlp(model, x):
    return jax.vmap(model)(x)


@pytest.fixture(scope="module")
def equinox():
    return [eqx.nn.MLP(4, 3, 5, 1, key=jax.random.key(i)) for i in range(3)]


def test_linen_variables_give_the_results_of_the_module(linen):
    ens = Ensemble.from_apply(NORMED.apply, linen)
    expected = [NORMED.apply(variables, X) for variables in linen]
    np.testing.assert_allclose(ens(X, train=False), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ens[1](X), expected[1], rtol=1e-5, atol=1e-6)
    assert set(ens[1].variables) == {"params", "batch_stats"}


def test_only_the_collection_params_of_linen_trains(linen, leaves):
    ens = Ensemble.from_apply(NORMED.apply, linen)
    assert jax.tree.map(jnp.shape, ens.trainable)["batch_stats"]["BatchNorm_0"] == {"mean": None, "var": None}
    assert len(leaves(ens.trainable)) == len(leaves(linen[0]["params"]))
    assert len(leaves(ens.rest)) == 2


@pytest.mark.slow
def test_linen_trains_as_alone_and_its_statistics_are_updated(linen, make_batches, assert_same):
    def loss(model, x, y):
        logits, updates = model(x, train=True, mutable=["batch_stats"])
        model.variables = {**model.variables, **updates}
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    batches = make_batches(5)
    trainer = Trainer(loss, optax.adam, hyperparams={"learning_rate": [0.01, 0.02, 0.03]})
    state, _ = trainer.fit(trainer.init(Ensemble.from_apply(NORMED.apply, linen)), batches, progress=False)

    for i, variables in enumerate(linen):
        optimizer = optax.adam([0.01, 0.02, 0.03][i])
        params, stats = variables["params"], variables["batch_stats"]
        opt_state = optimizer.init(params)
        for x, y in batches:

            def alone(params, stats, x=x, y=y):
                logits, updates = NORMED.apply(
                    {"params": params, "batch_stats": stats}, x, True, mutable=["batch_stats"]
                )
                value = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
                return value, updates["batch_stats"]

            gradient, stats = jax.grad(alone, has_aux=True)(params, stats)
            updates, opt_state = optimizer.update(gradient, opt_state)
            params = optax.apply_updates(params, updates)
        assert_same(state.ensemble[i].variables, {"params": params, "batch_stats": stats}, 1e-5)


class Dropping(nn.Module):
    rate: float = 0.4

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(6, use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(3)(nn.Dropout(self.rate, deterministic=not train)(x))


DROPPING = Dropping()


def with_keys(i):
    return {**DROPPING.init(jax.random.key(i), X), "rngs": {"dropout": jax.random.key(9 + i), "count": jnp.uint32(0)}}


def updating(model, x, y):
    logits = model.call_and_update(x, train=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["vmap", "map", "loop"])
def test_linen_statistics_and_dropout_are_carried_along(make_batches, assert_same, strategy):
    members, batches = [with_keys(i) for i in range(2)], make_batches(4)
    trainer = Trainer(updating, optax.sgd(0.1), strategy=strategy)
    state, _ = trainer.fit(trainer.init(Ensemble.from_apply(DROPPING.apply, members)), batches, progress=False)

    for i, variables in enumerate(members):
        params, stats, key = variables["params"], variables["batch_stats"], variables["rngs"]["dropout"]
        for step, (x, y) in enumerate(batches):

            def alone(params, stats, step=step, key=key, x=x, y=y):
                options = {"mutable": ["batch_stats"], "rngs": {"dropout": jax.random.fold_in(key, step)}}
                logits, updates = DROPPING.apply({"params": params, "batch_stats": stats}, x, True, **options)
                value = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
                return value, updates["batch_stats"]

            gradient, stats = jax.grad(alone, has_aux=True)(params, stats)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
        expected = {"params": params, "batch_stats": stats, "rngs": {"dropout": key, "count": jnp.uint32(4)}}
        assert_same(state.ensemble[i].variables, expected, 1e-5)


def test_calls_that_update_keep_the_kind_of_the_variables_and_leave_out_what_is_missing(linen, assert_same):
    only = Ensemble.from_apply(nn.Dense(3).apply, [nn.Dense(3).init(jax.random.key(0), X)])[0]
    before = only.variables
    assert_same(only.call_and_update(X), only(X))
    assert_same(only.variables, before)
    frozen = Ensemble.from_apply(NORMED.apply, [freeze(variables) for variables in linen])
    member = frozen[0]
    member.call_and_update(X, train=True)
    assert isinstance(member.variables, FrozenDict)
    assert not np.allclose(member.variables["batch_stats"]["BatchNorm_0"]["mean"], 0)
    trainer = Trainer(updating, optax.sgd(0.1))
    trainer.step(trainer.init(frozen), (X, np.zeros(2, int)))


def test_a_call_that_updates_an_ensemble_is_refused():
    ens = Ensemble.from_apply(DROPPING.apply, [with_keys(0)])
    with pytest.raises(ValueError, match=r"changes the state of FunctionalModel \(`.*`\)"):
        vmap(lambda model, x: model.call_and_update(x, train=True), (0, None))(ens, X)


def test_calls_that_update_are_refused_without_their_collections():
    with pytest.raises(TypeError, match='call_and_update: needs Linen variables with "params", but got a ArrayImpl'):
        Ensemble.from_apply(jnp.multiply, [jnp.ones(2)])[0].call_and_update(1.0)
    for count in ({}, {"count": 0}, {"count": jnp.zeros(())}):
        rngs = {"dropout": jax.random.key(0), **count}
        member = Ensemble.from_apply(DROPPING.apply, [{**with_keys(0), "rngs": rngs}])[0]
        with pytest.raises(ValueError, match=r'call_and_update: "count" in the collection "rngs" is .*; pass'):
            member.call_and_update(X, train=True)


def test_equinox_modules_with_functions_among_their_leaves(equinox):
    ens = Ensemble.from_apply(apply_mlp, equinox)
    np.testing.assert_allclose(ens(X), [apply_mlp(model, X) for model in equinox], rtol=1e-5, atol=1e-6)
    assert isinstance(ens[2].variables, eqx.nn.MLP)
    assert ens[2].variables.activation is equinox[2].activation


def test_equinox_trains_as_alone(equinox, make_batches):
    def loss(model, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    batches = make_batches(4)
    trainer = Trainer(loss, optax.sgd(0.1, momentum=0.9))
    state, _ = trainer.fit(trainer.init(Ensemble.from_apply(apply_mlp, equinox)), batches, progress=False)
    optimizer = optax.sgd(0.1, momentum=0.9)
    for i, model in enumerate(equinox):
        opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
        for x, y in batches:
            gradient = eqx.filter_grad(lambda m, x, y: loss(lambda z: apply_mlp(m, z), x, y))(model, x, y)
            updates, opt_state = optimizer.update(gradient, opt_state)
            model = eqx.apply_updates(model, updates)
        np.testing.assert_allclose(state.ensemble[i](X), apply_mlp(model, X), rtol=1e-5, atol=1e-6)


def test_plain_dictionaries_and_a_rule_for_trainable_arrays(make_batches, assert_same):
    variables = [{"w": jnp.full((4, 3), i + 1.0), "scale": jnp.ones(3), "steps": jnp.int32(i)} for i in range(2)]
    ens = Ensemble.from_apply(lambda v, x: x @ v["w"] * v["scale"], variables, trainable=lambda path, _: path == "w")
    trainer = Trainer(lambda model, x, y: (model(x) ** 2).mean(), optax.sgd(0.1))
    state, _ = trainer.step(trainer.init(ens), make_batches(1)[0])
    after = state.ensemble[1].variables
    assert_same(after["scale"], variables[1]["scale"])
    assert after["steps"] == 1
    assert bool((after["w"] != variables[1]["w"]).any())


def test_integers_do_not_train_by_default():
    ens = Ensemble.from_apply(lambda v: v["a"], [{"a": jnp.ones(2), "n": jnp.arange(3)}])
    assert set(jax.tree.leaves_with_path(ens.trainable)[0][0]) == {jax.tree_util.DictKey("a")}
    assert ens.trainable["n"] is None


def test_a_rule_sees_whole_paths():
    attention = {"attn": {name: jnp.ones(2) for name in ("query", "key", "value")}}
    seen = []

    def rule(path, _):
        seen.append(path)
        return path.endswith(("query", "value"))

    ens = Ensemble.from_apply(lambda v: v["attn"]["value"], [attention], trainable=rule)
    assert sorted(set(seen)) == ["attn.key", "attn.query", "attn.value"]
    assert [name for name, leaf in ens.trainable["attn"].items() if leaf is not None] == ["query", "value"]
    with pytest.raises(ValueError, match="at `attn.value`"):
        Ensemble.from_apply(jnp.sin, [attention, {"attn": {**attention["attn"], "value": jnp.ones(3)}}])


def _scaled(variables, x):
    return variables["w"] * x * variables["f"](x)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_works_as_the_original(duplicate, assert_same):
    variables = [{"w": jnp.full(4, i + 1.0), "n": jnp.int32(i), "f": len} for i in range(2)]
    ens = Ensemble.from_apply(_scaled, variables)
    trainer = Trainer(lambda model, x: (model(x) ** 2).mean(), optax.sgd(0.1))
    state = trainer.init(ens)
    assert_same(duplicate(ens), ens)
    assert_same(duplicate(ens)[1].variables["w"], variables[1]["w"])
    np.testing.assert_array_equal(duplicate(ens)(X), ens(X))
    assert_same(trainer.step(duplicate(state), X), trainer.step(state, X))


def test_weak_types_become_strong_so_that_only_the_first_step_compiles():
    traces = []

    def loss(model, x):
        traces.append(1)
        return model(x).sum()

    ens = Ensemble.from_apply(lambda v, x: v * x, [jnp.full(4, 2.0), jnp.full(4, 3.0)])
    assert (ens.trainable.weak_type, ens.trainable.dtype) == (False, jnp.float32)
    trainer = Trainer(loss, optax.sgd(0.1))
    state, _ = trainer.step(trainer.init(ens), X)
    traces.clear()
    for _ in range(3):
        state, _ = trainer.step(state, X)
    assert not traces


def test_recreated_partials_are_equal_configurations():
    variables = [{"w": jnp.full(4, i - 1.0), "f": partial(jax.nn.gelu, approximate=False)} for i in range(3)]
    ens = Ensemble.from_apply(lambda v, x: v["f"](x * v["w"]), variables)
    expected = [jax.nn.gelu(X * v["w"], approximate=False) for v in variables]
    np.testing.assert_allclose(ens(X), expected, rtol=1e-5, atol=1e-6)


def test_a_member_is_differentiated_by_its_trainable_arrays(linen):
    member = Ensemble.from_apply(NORMED.apply, linen)[0]
    gradient = grad(lambda m, x: (m(x) ** 2).sum())(member, X)
    expected = jax.grad(lambda p: (NORMED.apply({**linen[0], "params": p}, X) ** 2).sum())(linen[0]["params"])
    np.testing.assert_allclose(
        gradient["params"]["Dense_0"]["kernel"], expected["Dense_0"]["kernel"], rtol=1e-5, atol=1e-6
    )
    assert jax.tree.leaves(gradient["batch_stats"]) == []


def test_members_pass_through_jit_and_vmap(linen, equinox):
    for apply, variables in ((NORMED.apply, linen), (apply_mlp, equinox)):
        ens = Ensemble.from_apply(apply, variables)
        np.testing.assert_allclose(jax.jit(lambda m, x: m(x))(ens[1], X), ens(X)[1], rtol=1e-5, atol=1e-6)
        doubled = vmap(lambda m: jax.tree.map(lambda a: 2 * a, m))(ens)
        assert isinstance(doubled, Ensemble)
        np.testing.assert_allclose(
            jax.tree.leaves(doubled.trainable)[0], 2 * jax.tree.leaves(ens.trainable)[0], rtol=1e-6
        )


def test_updated_state_must_be_returned(linen):
    ens = Ensemble.from_apply(NORMED.apply, linen)

    def train(model, x):
        logits, updates = model(x, train=True, mutable=["batch_stats"])
        model.variables = {**model.variables, **updates}
        return logits

    with pytest.raises(ValueError, match="changes the state of FunctionalModel .*batch_stats"):
        vmap(train, (0, None))(ens, X)
    logits, after = vmap(lambda m, x: (train(m, x), m), (0, None))(ens, X)
    assert logits.shape == (3, 2, 3)
    assert bool((after[0].variables["batch_stats"]["BatchNorm_0"]["mean"] != 0).any())


def test_one_member_is_loaded_from_a_checkpoint(tmp_path, linen, equinox, assert_same):
    for name, apply, variables in (("linen", NORMED.apply, linen), ("equinox", apply_mlp, equinox)):
        ens = Ensemble.from_apply(apply, variables)
        save(tmp_path / name, ens)
        assert_same(load_member(tmp_path / name, 1, ens), ens[1])
        assert_same(load_member(tmp_path / name, 1, ens[0]), ens[1])


def test_prediction_passes_keywords_to_the_apply_function(linen):
    ens = Ensemble.from_apply(NORMED.apply, linen)
    assert ens.predict(X, train=False, kind="classification").mean.shape == (2, 3)


class Test_refusals:
    def test_not_a_function_not_a_list_and_no_members(self):
        with pytest.raises(TypeError, match="apply must be a function"):
            Ensemble.from_apply(3, [1])
        with pytest.raises(TypeError, match="variables must be a list, one pytree per member, but got a dict"):
            Ensemble.from_apply(jnp.sin, {"a": 1})
        with pytest.raises(ValueError, match="the list of variables is empty"):
            Ensemble.from_apply(jnp.sin, [])
        with pytest.raises(ValueError, match="hold no arrays"):
            Ensemble.from_apply(jnp.sin, [1.0, 1.0])

    def test_members_that_differ(self):
        with pytest.raises(ValueError, match=r"member 1 differs from member 0 at `w`: it has shape \(3,\)"):
            Ensemble.from_apply(lambda v: v, [{"w": jnp.ones(2)}, {"w": jnp.ones(3)}])
        with pytest.raises(ValueError, match="member 1 differs from member 0 in its configuration"):
            Ensemble.from_apply(lambda v: v, [{"w": jnp.ones(2), "rate": 0.1}, {"w": jnp.ones(2), "rate": 0.2}])

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ((0.1, 0.2), "`a.rate` is 0.2, but there 0.1; build all members with one configuration"),
            ((1, 1.0), "`a.rate` is 1.0, but there 1;"),
            (([1], (1,)), "they differ in the containers"),
            (
                [(lambda: lambda: 0)() for _ in range(2)],
                "`a.rate` is .*, a different object in each; define it once, outside the function",
            ),
        ],
    )
    def test_members_of_another_configuration(self, values, message):
        with pytest.raises(ValueError, match=message):
            Ensemble.from_apply(jnp.sin, [{"w": jnp.ones(2), "a": {"rate": value}} for value in values])

    def test_a_view(self):
        with pytest.raises(TypeError, match="the members are not NNX modules; pass options"):
            Ensemble.from_apply(lambda v: v, [jnp.ones(2)]).view(deterministic=True)

    def test_a_loss_that_assigns_trainable_arrays(self, make_batches):
        def loss(model, x, y):
            value = (model(x) ** 2).mean()
            model.variables = {"w": model.variables["w"] * 2}
            return value

        trainer = Trainer(loss, optax.sgd(0.1))
        state = trainer.init(Ensemble.from_apply(lambda v, x: x @ v["w"], [{"w": jnp.ones((4, 3))}]))
        with pytest.raises(ValueError, match="assigns the parameter `w`"):
            trainer.step(state, make_batches(1)[0])


def test_functions_made_anew_are_refused_with_a_remedy_that_works():
    def made(i, activation):
        return eqx.nn.MLP(4, 3, 5, 1, activation=activation, key=jax.random.key(i))

    with pytest.raises(
        ValueError, match=r"a different object in each; define it once, outside the function that makes a member\.$"
    ):
        Ensemble.from_apply(apply_mlp, [made(i, lambda x: x**2) for i in range(2)])
    square = lambda x: x**2
    assert Ensemble.from_apply(apply_mlp, [made(i, square) for i in range(2)])(X).shape == (2, 2, 3)
