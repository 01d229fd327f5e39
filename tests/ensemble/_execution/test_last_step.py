"""`LastStep`: a step like the last one gives the same to the bit, and one of another kind is checked and chosen anew.

Each trainer here has taken steps, and is compared with one that has not.
"""

import copy
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plurax.ensemble import Ensemble, Execution, Trainer


def mse(model, x, y):
    return jnp.mean((model(x)[..., 0] - y) ** 2), {"largest": jnp.abs(y).max()}


def batch(size=6, seed=0):
    generator = np.random.default_rng(seed)
    return jnp.asarray(generator.normal(size=(size, 4)), jnp.float32), jnp.asarray(generator.normal(size=size))


@pytest.fixture
def begun(plain, create):
    """Return a trainer, a state after three steps, and the state before the last one."""

    def of(**options):
        trainer = Trainer(mse, optax.adam(0.1), **options)
        states = [trainer.init(create(plain, 3))]
        for i in range(3):
            states.append(trainer.step(states[-1], batch(seed=i))[0])
        return trainer, states[-1], states[-2]

    return of


def anew(state, data, **options):
    """Return the step of a trainer that has taken none."""
    return Trainer(mse, optax.adam(0.1), **options).step(state, data)


@pytest.mark.optimized
@pytest.mark.parametrize("strategy", ["vmap", "map", "unroll", "loop", "auto", Execution("vmap", 2)])
def test_a_step_again_is_a_step(begun, assert_same, strategy):
    trainer, state, before = begun(strategy=strategy)
    for start in (state, before, before):
        assert_same(trainer.step(start, batch(seed=7)), anew(start, batch(seed=7), strategy=strategy))


def test_the_last_step_is_taken_again_without_its_checks(begun, counted_checks):
    from plurax.ensemble._execution import stepper

    trainer, state, _ = begun(strategy="vmap")
    checks = counted_checks(stepper)
    axes_of = trainer._stepper.arguments
    trainer._stepper.arguments = lambda *_: pytest.fail("the batch was checked again")
    state, _ = trainer.step(state, batch(seed=7))
    trainer._stepper.arguments = axes_of
    trainer.step(state, batch(5))
    assert len(checks) == 2  # of the other shape


@pytest.mark.parametrize(
    "data",
    [
        batch(5),
        list(batch()),
        tuple(map(np.asarray, batch())),
        (batch()[0].astype(jnp.float16), batch()[1]),
        (batch()[0], batch()[1].astype(int)),
    ],
    ids=["shape", "list", "numpy", "half", "integers"],
)
def test_a_batch_of_another_kind(begun, assert_same, data):
    trainer, state, _ = begun(strategy="vmap")
    for _ in range(2):
        assert_same(trainer.step(state, data), anew(state, data, strategy="vmap"))


@pytest.mark.parametrize("data", [(batch()[0], "y"), batch()[0], (*batch(), 1.0), {"x": batch()[0], "y": None}])
def test_a_batch_that_is_refused(begun, data):
    trainer, state, _ = begun(strategy="vmap")
    for start in (state, state._with_rows(state._arrays())):
        with pytest.raises((TypeError, AttributeError)):
            trainer.step(start, data)
    trainer.step(state, batch())


def test_slices_of_other_lengths_are_refused(plain, create):
    trainer = Trainer(mse, optax.sgd(0.1), in_axes=0, strategy="vmap")
    state = trainer.init(create(plain, 3))
    x, y = batch()
    of_three = jnp.stack([x, x + 1, x]), jnp.stack([y] * 3)
    state, _ = trainer.step(state, of_three)
    state, _ = trainer.step(state, of_three)
    with pytest.raises(ValueError, match="number of members"):
        trainer.step(state, (of_three[0][:2], of_three[1][:2]))


def test_states_of_others(begun, assert_same):
    trainer, state, _ = begun(strategy="vmap")
    other = Trainer(mse, optax.sgd(0.1), strategy="vmap")
    with pytest.raises(ValueError, match="another optimizer"):
        trainer.step(other.init(state.ensemble), batch())
    fewer = jax.tree.map(lambda x: x[:2] if x.ndim else x, state._arrays())
    smaller = state._with_rows(fewer)
    assert_same(trainer.step(smaller, batch()), anew(smaller, batch(), strategy="vmap"))


def test_inside_a_trace_with_a_concrete_state(begun, assert_same):
    trainer, state, _ = begun(strategy="vmap")
    traced = jax.jit(lambda shift: trainer.step(state, (batch()[0] + shift, batch()[1])))(0.0)
    assert_same(traced[0].step, state.step + 1)
    closed = jax.jit(lambda: trainer.step(state, batch())[1]["loss"])()
    np.testing.assert_allclose(closed, anew(state, batch())[1]["loss"], rtol=1e-5)
    # The trace leaves nothing behind that a later step would use.
    assert_same(trainer.step(state, batch()), anew(state, batch(), strategy="vmap"))


def test_changed_hyperparameters_of_the_state_count(plain, create, assert_same):
    trainer = Trainer(mse, optax.sgd, hyperparams={"learning_rate": [0.1, 0.2, 0.3]}, strategy="vmap")
    state = trainer.init(create(plain, 3))
    for _ in range(2):
        state, _ = trainer.step(state, batch())
    state.opt_state.hyperparams["learning_rate"] = jnp.zeros(3)
    after, _ = trainer.step(state, batch())
    assert_same(after.ensemble, state.ensemble)


def test_a_member_that_stops_stays_stopped(plain, create):
    trainer = Trainer(mse, optax.sgd(0.1), in_axes=0, strategy="vmap")
    state, (x, y) = trainer.init(create(plain, 3)), batch()
    good = jnp.stack([x] * 3), jnp.stack([y] * 3)
    for data in (good, (good[0].at[1].set(jnp.nan), good[1]), good, good):
        state, metrics = trainer.step(state, data)
    np.testing.assert_array_equal(state.standing.stopped, [0, 1, 0])
    np.testing.assert_array_equal(state.standing.step, [4, 2, 4])
    assert set(metrics) == {"loss", "largest"}


@pytest.mark.slow
def test_no_state_is_kept_alive(begun):
    trainer, state, before = begun(strategy="vmap")
    held = [weakref.ref(x) for x in (state, before)]
    del state, before
    gc.collect()
    assert [x() for x in held] == [None, None]
    assert trainer._stepper.last is not None


def test_a_copied_state_is_checked_and_gives_the_same(begun, assert_same):
    trainer, state, _ = begun(strategy="vmap")
    assert_same(trainer.step(copy.deepcopy(state), batch()), trainer.step(state, batch()))


def test_auto_repeats_a_step_only_when_it_tries_nothing(plain, create):
    trainer = Trainer(mse, optax.adam(0.1), strategy="auto", tune_seconds=5.0)
    state = trainer.init(create(plain, 3))
    for _ in range(20):
        state, _ = trainer.step(state, batch())
        assert trainer._stepper.search is not None
        assert trainer._stepper.last is None or not trainer._stepper.search.is_open


def test_an_ensemble_after_a_step_is_whole(begun):
    _, state, _ = begun(strategy="vmap")
    assert isinstance(state.ensemble, Ensemble)
    assert state.ensemble(batch()[0]).shape == (3, 6, 3)
    assert len(state.ensemble[1:]) == 2
