"""`update_where` equals `jnp.where` on every array, and lets XLA update the state in place."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Ensemble, Trainer
from plurax.ensemble._execution.executor import StepInputs
from plurax.ensemble._members.strategy import Execution
from plurax.ensemble._step.update_where import update_where
from plurax.transforms._core.prng import is_key

pytestmark = pytest.mark.smoke

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.1),
    "adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 10))),
    "adafactor": optax.adafactor(0.1),
    "half moments": optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "average": optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "noisy": optax.noisy_sgd(0.1, key=0),
    "accumulated": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(0.1),
}


def updated(optimizer, gradients, state, params):
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def where(takes, update, old):
    """The obvious form."""
    return jax.tree.map(lambda x, y: jnp.where(takes, x, y if is_key(y) else y.astype(x.dtype)), update(), old)


@pytest.mark.parametrize(("name", "compiled"), [*((name, True) for name in OPTIMIZERS), ("adam", False)])
def test_equals_where_on_every_array(name, compiled):
    optimizer = OPTIMIZERS[name]
    shapes = {"b": (5,), "c": (), "d": (0, 2)}
    ones = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    params = jax.tree.map(jnp.asarray, {"a": np.linspace(0.1, 1, 6, dtype=np.float32).reshape(2, 3), **ones})

    def both(takes, value, params):
        state = optimizer.init(params)
        gradients = jax.tree.map(jnp.cos, params)
        params, state = updated(optimizer, gradients, state, params)  # so that no moment is zero
        gradients["b"] = gradients["b"].at[3].set(value)
        update = partial(updated, optimizer, gradients, state, params)
        return [f(takes, update, (params, state)) for f in (update_where, where)]

    both = jax.jit(both) if compiled else both
    for takes, value in itertools.product((True, False), np.float32([0.5, np.nan, np.inf])):
        found, expected = both(jnp.asarray(takes), value, params)
        assert jax.tree.map(jnp.result_type, found) == jax.tree.map(jnp.result_type, expected)
        # Compiled one by one or together, operations round differently.
        rtol = 1e-5 if takes else 0
        for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            x, y = (np.asarray(jax.random.key_data(z) if is_key(z) else z).astype(float) for z in (x, y))
            np.testing.assert_allclose(x, y, rtol=rtol)


def test_each_member_keeps_or_takes():
    takes = jnp.array([True, False, True])
    optimizer, params = optax.adam(0.1), {f"p{i}": jnp.full((3, 2, 4), i + 1.0) for i in range(6)}
    state = jax.vmap(optimizer.init)(params)
    gradients = jax.tree.map(lambda x: jnp.cos(x).at[1].set(jnp.nan), params)

    def step(select, takes, gradients, params, state):
        return select(takes, lambda: updated(optimizer, gradients, state, params), (params, state))

    found, expected = (
        jax.jit(jax.vmap(partial(step, f)))(takes, gradients, params, state) for f in (update_where, where)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, expected)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[1], y[1]), found, (params, state))


@pytest.mark.parametrize("takes", [True, False])
def test_arrays_returned_twice_unchanged_or_constant(takes):
    x, y, z, key = jnp.arange(3.0), jnp.ones(3), jnp.array([0.0, np.nan]), jax.random.key(0)

    def update():
        new = x + 1
        return new, new, z, jnp.float32(7), jax.random.fold_in(key, 1)

    found = update_where(jnp.array(takes), update, (x, y, z, jnp.float32(2), key))
    expected = update() if takes else (x, y, z, jnp.float32(2), key)
    for a, b in zip(found[:4], expected[:4], strict=True):
        np.testing.assert_array_equal(a, b)
    assert found[4] == expected[4]


def test_another_structure_is_refused():
    with pytest.raises(ValueError, match="structure|Dict key|arity"):
        update_where(jnp.array(True), lambda: {"a": jnp.ones(2)}, {"b": jnp.ones(2)})


def test_differentiates():
    def loss(scale, select):
        optimizer, params = optax.sgd(0.1, momentum=0.9), jnp.arange(1.0, 4)
        update = partial(updated, optimizer, scale * params, optimizer.init(params), params)
        return select(jnp.array(True), update, (params, optimizer.init(params)))[0].sum() ** 2

    found, expected = (jax.grad(loss)(0.7, f) for f in (update_where, where))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(16, 256, rngs=rngs), nnx.Linear(256, 256, rngs=rngs)

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)))


def test_the_moments_are_not_copied():
    """Plain `jnp.where` needs 2.4 times the size of the parameters, since it copies both moments."""
    ens, x = Ensemble.create(MLP, 3, seed=0), jnp.ones((8, 16))
    trainer = Trainer(lambda model, x: jnp.mean(model(x) ** 2), optax.adam(1e-3), strategy="vmap")
    inputs = StepInputs(trainer.init(ens), *trainer._stepper.arguments((x,), 3))
    needed = trainer._stepper.executor.temporaries(inputs, True, Execution("vmap"))
    assert needed < 1.5 * sum(x.nbytes for x in jax.tree.leaves(ens.trainable))


def test_few_updates_become_ready_at_a_time():
    """Beyond eight, XLA's runtime for CPUs starts threads for them."""
    params = {f"p{i}": jnp.ones((2, 3)) for i in range(6)}
    update = partial(updated, optax.adam(0.1), params, optax.adam(0.1).init(params), params)
    jaxpr = jax.make_jaxpr(lambda takes: update_where(takes, update, (params, optax.adam(0.1).init(params))))(True)
    conditions = [eqn.invars[0] for eqn in jaxpr.eqns if eqn.params.get("name") == "_where"]
    assert len(conditions) >= 19  # two moments and the parameters, and the number of steps
    assert max(conditions.count(x) for x in conditions) <= 4
