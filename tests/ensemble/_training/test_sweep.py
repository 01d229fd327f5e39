"""Per-member hyperparameters: of the optimizer, of the loss, schedules, and grids."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Ensemble, Trainer, exploit, grid, load, save, select

STRATEGIES = ("vmap", "map", "unroll", "loop")
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
Y = np.linspace(1, -1, 8, dtype=np.float32).reshape(4, 2)


def make(rngs):
    return nnx.Linear(3, 2, rngs=rngs)


def smoothed(model, x, y, *, weight, power=2):
    return weight * jnp.mean(jnp.abs(model(x) - y) ** power) + 0.01 * jnp.sum(model.kernel[...] ** 2)


def final(trainer, ensemble, steps=5):
    state = trainer.init(ensemble)
    losses = []
    for _ in range(steps):
        state, metrics = trainer.step(state, (X, Y))
        losses.append(metrics["loss"])
    return state, np.array(losses)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_loss_takes_values_of_each_member(strategy, assert_same):
    ensemble = Ensemble.create(make, 3, seed=0)
    weights = [0.5, 1.0, 3.0]
    trainer = Trainer(
        smoothed, optax.adam, hyperparams={"weight": weights, "learning_rate": [0.1, 0.2, 0.1]}, strategy=strategy
    )
    state, losses = final(trainer, ensemble)
    np.testing.assert_array_equal(state.standing.hyperparams["weight"], np.float32(weights))
    for i, (weight, rate) in enumerate(zip(weights, [0.1, 0.2, 0.1], strict=True)):
        alone = Trainer(lambda m, x, y, w=weight: smoothed(m, x, y, weight=w), optax.adam(rate))
        mine, its = final(alone, ensemble[i : i + 1])
        np.testing.assert_allclose(losses[:, i], its[:, 0], rtol=1e-5)
        one = jax.tree.map(lambda x, i=i: x[i : i + 1], state.ensemble)
        assert_same(one.trainable, mine.ensemble.trainable, tolerance=1e-5)


def test_values_of_the_loss_may_be_shared_and_have_defaults():
    ensemble = Ensemble.create(make, 2, seed=0)
    trainer = Trainer(smoothed, optax.sgd(0.1), hyperparams={"weight": 2.0, "power": 1})
    _, losses = final(trainer, ensemble)
    _, expected = final(Trainer(lambda m, x, y: smoothed(m, x, y, weight=2.0, power=1), optax.sgd(0.1)), ensemble)
    np.testing.assert_array_equal(losses, expected)


@pytest.mark.slow
def test_a_grad_fn_and_a_line_search_get_the_loss_of_the_member():
    ensemble = Ensemble.create(make, 2, seed=0)
    seen = []

    def doubled(loss):
        def value_and_grad(model, x, y):
            from plurax.transforms import value_and_grad

            value, gradient = value_and_grad(loss)(model, x, y)
            seen.append(loss)
            return value, jax.tree.map(lambda g: 2 * g, gradient)

        return value_and_grad

    options = {"hyperparams": {"weight": [1.0, 2.0]}}
    state, _ = final(Trainer(smoothed, optax.sgd(0.1), grad_fn=doubled, **options), ensemble, 1)
    single, _ = final(Trainer(smoothed, optax.sgd(0.2), **options), ensemble, 1)
    np.testing.assert_allclose(state.ensemble[1].kernel[...], single.ensemble[1].kernel[...], rtol=1e-5)
    state, losses = final(Trainer(smoothed, optax.lbfgs(), **options), ensemble, 8)
    _, one = final(Trainer(lambda m, x, y: smoothed(m, x, y, weight=2.0), optax.lbfgs()), ensemble[1:], 8)
    np.testing.assert_allclose(losses[:, 1], one[:, 0], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_member_has_its_schedule(strategy):
    decay = optax.cosine_decay_schedule(0.3, 6)
    steps = optax.piecewise_constant_schedule(0.2, {2: 0.1, 4: 0.1})
    ensemble = Ensemble.create(make, 4, seed=0)
    trainer = Trainer(
        lambda m, x, y: smoothed(m, x, y, weight=1.0),
        optax.sgd,
        hyperparams={"learning_rate": [decay, 0.05, steps, decay], "momentum": 0.9},
        strategy=strategy,
    )
    state, losses = final(trainer, ensemble, 7)
    for i, rate in enumerate([decay, 0.05, steps, decay]):
        alone = Trainer(lambda m, x, y: smoothed(m, x, y, weight=1.0), optax.sgd(rate, momentum=0.9))
        _, its = final(alone, ensemble[i : i + 1], 7)
        np.testing.assert_allclose(losses[:, i], its[:, 0], rtol=1e-5)
    np.testing.assert_allclose(
        state.opt_state.hyperparams["learning_rate"], [decay(6), 0.05, steps(6), decay(6)], atol=1e-7
    )


@pytest.mark.parametrize("values", [[0, 1], np.array([0, 1]), np.float16([0, 1]), jnp.array([0, 1], jnp.bfloat16)])
def test_values_are_numbers_of_any_kind(values):
    ensemble = Ensemble.create(make, 2, seed=0)
    loss = lambda m, x, y: smoothed(m, x, y, weight=1.0)
    trainer, expected = (
        Trainer(loss, optax.adamw, hyperparams={"learning_rate": 0.1, "weight_decay": decays}, strategy="vmap")
        for decays in (values, [0.0, 1.0])
    )
    np.testing.assert_allclose(final(trainer, ensemble)[1], final(expected, ensemble)[1], rtol=1e-6)


@pytest.mark.parametrize("number", [1, jnp.array(1), np.float32(1), np.array(1.0)])
def test_numbers_of_any_kind_mix_with_schedules(number):
    schedule = optax.cosine_decay_schedule(0.3, 6)
    trainer = Trainer(
        lambda m, x, y: smoothed(m, x, y, weight=1.0), optax.sgd, hyperparams={"learning_rate": [schedule, number]}
    )
    state, _ = final(trainer, Ensemble.create(make, 2, seed=0), 2)
    np.testing.assert_allclose(state.opt_state.hyperparams["learning_rate"], [schedule(1), 1.0])


@pytest.mark.slow
def test_a_loaded_state_resumes_with_its_values(tmp_path, assert_same):
    options = {"hyperparams": {"learning_rate": [optax.cosine_decay_schedule(0.3, 6), 0.1], "weight": [1.0, 2.0]}}
    trainer = Trainer(smoothed, optax.sgd, **options)
    state, _ = final(trainer, Ensemble.create(make, 2, seed=0), 3)
    save(tmp_path / "saved", state)
    assert_same(load(tmp_path / "saved", trainer.init(Ensemble.create(make, 2, seed=1))), state)
    batches = [(X, Y)] * 6
    start = trainer.init(Ensemble.create(make, 2, seed=0))
    whole, _ = trainer.fit(start, batches, progress=False)
    trainer.fit(start, batches, steps=2, progress=False, checkpoint_dir=tmp_path / "run")
    again, _ = trainer.fit(start, batches, progress=False, checkpoint_dir=tmp_path / "run")
    assert_same(again, whole)
    other = Trainer(smoothed, optax.sgd, hyperparams={**options["hyperparams"], "weight": [1.0, 3.0]})
    with pytest.raises(ValueError, match=r"has weight=\[1.0, 2.0\], but the trainer has weight=\[1.0, 3.0\]"):
        other.fit(start, batches, progress=False, checkpoint_dir=tmp_path / "run")


def test_a_grid_has_every_combination():
    found = grid(learning_rate=[0.1, 0.2, 0.3], weight=(1, 2), repeats=2)
    members = list(zip(found["learning_rate"], found["weight"], strict=True))
    assert members[:4] == [(0.1, 1), (0.1, 1), (0.1, 2), (0.1, 2)]
    assert len(members) == 12
    assert len(set(members)) == 6


def test_members_may_start_equal():
    keys = jnp.tile(jax.random.split(jax.random.key(3), 2), 3)
    ensemble = Ensemble.create(make, 6, seed=keys)
    kernels = np.stack([member.kernel[...] for member in ensemble])
    np.testing.assert_array_equal(kernels[0], kernels[2])
    np.testing.assert_array_equal(kernels[1], kernels[5])
    assert np.abs(kernels[0] - kernels[1]).max() > 0.1
    np.testing.assert_allclose(kernels[1], make(nnx.Rngs(keys[1])).kernel[...], rtol=1e-6)
    with pytest.raises(ValueError, match="seed has 6 entries for 5 members"):
        Ensemble.create(make, 5, seed=keys)


def test_the_history_has_the_values_of_each_member():
    trainer = Trainer(smoothed, optax.sgd, hyperparams={"learning_rate": [0.1, 0.2], "weight": [1, 2], "power": 2})
    _, history = trainer.fit(trainer.init(Ensemble.create(make, 2, seed=0)), [(X, Y)] * 2, progress=False)
    assert [(row["member"], row["learning_rate"], row["weight"]) for row in history] == [(0, 0.1, 1), (1, 0.2, 2)] * 2
    assert set(history[0]) == {"step", "member", "learning_rate", "weight", "loss"}


def test_the_history_follows_the_values_in_the_state(assert_same):
    trainer = Trainer(smoothed, optax.sgd, hyperparams={"learning_rate": [0.1, 0.2, 0.3], "weight": 1.0})
    state = select(trainer.init(Ensemble.create(make, 3, seed=0)), [2, 0, 2, 1])
    _, history = trainer.fit(state, [(X, Y)], progress=False)
    assert [row["learning_rate"] for row in history] == [0.3, 0.1, 0.3, 0.2]
    perturbed, source = exploit(
        state, jnp.arange(4.0), key=jax.random.key(0), perturb={"learning_rate": (0.5,)}, fraction=0.5
    )
    _, history = trainer.fit(perturbed, [(X, Y)], progress=False)
    expected = [0.3, 0.1, *([0.3, 0.1][i] * 0.5 for i in source.tolist()[2:])]
    assert [row["learning_rate"] for row in history] == pytest.approx(expected)


def test_other_schedules_are_another_run(tmp_path):
    first, second = optax.cosine_decay_schedule(0.3, 6), optax.cosine_decay_schedule(0.3, 60)
    start = Ensemble.create(make, 2, seed=0)
    for schedules, same in (([first, second], True), ([first, second], True), ([second, first], False)):
        trainer = Trainer(smoothed, optax.sgd, hyperparams={"learning_rate": schedules, "weight": 1.0})
        run = functools.partial(
            trainer.fit, trainer.init(start), [(X, Y)] * 3, progress=False, checkpoint_dir=tmp_path / "run"
        )
        if same:
            run()
        else:
            with pytest.raises(ValueError, match="has learning_rate=schedules 0.3, .* but the trainer has"):
                run()


class Test_refusals:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({}, ValueError, r"the loss needs the argument `weight`; give it in hyperparams=\{'weight': ...\}"),
            ({"weight": [1.0, "a"]}, TypeError, "must be a number or a list with one number for each member"),
            ({"weight": 1.0, "other": 3}, ValueError, "sgd takes no hyperparameter 'other'"),
            ({"weight": 1, "learning_rate": [print, "a"]}, TypeError, "must have a number or a schedule for each"),
            ({"weight": 1, "learning_rate": [print, np.ones(1)]}, TypeError, "must have a number or a schedule for e"),
        ],
    )
    def test_of_values(self, options, error, message):
        with pytest.raises(error, match=message):
            Trainer(smoothed, optax.sgd, hyperparams={"learning_rate": 0.1, **options})

    def test_one_name_for_two_things(self):
        with pytest.raises(ValueError, match="both the loss and adamw take a hyperparameter 'weight_decay'; rename"):
            Trainer(lambda m, x, *, weight_decay: 0, optax.adamw, hyperparams={"weight_decay": 0.1})

    def test_the_wrong_number_of_values(self):
        trainer = Trainer(smoothed, optax.sgd(0.1), hyperparams={"weight": [1.0, 2.0]})
        with pytest.raises(ValueError, match=r"hyperparams\['weight'\] has 2 values, but the ensemble has 3 members"):
            trainer.init(Ensemble.create(make, 3, seed=0))

    def test_a_metric_of_the_same_name(self):
        trainer = Trainer(
            lambda m, x, y, *, weight: (jnp.sum(m(x)), {"weight": weight}),
            optax.sgd(0.1),
            hyperparams={"weight": [1, 2]},
        )
        with pytest.raises(ValueError, match='reports a value named "weight"'):
            trainer.step(trainer.init(Ensemble.create(make, 2, seed=0)), (X, Y))

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"repeats": 0, "a": [1]}, ValueError, "repeats must be at least 1, but got 0"),
            ({"repeats": 1.5, "a": [1]}, TypeError, "repeats must be an int, but got"),
            ({}, ValueError, "there are no hyperparameters"),
            ({"a": []}, ValueError, "a has no values"),
            ({"a": 3}, TypeError, "a must be a list of values, but got"),
            ({"a": "abc"}, TypeError, "a must be a list of values, but got"),
        ],
    )
    def test_of_grids(self, options, error, message):
        with pytest.raises(error, match=message):
            grid(**options)
