"""Remedies of `Trainer`: its loss, its optimizer, and a step."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from plurax.ensemble import Ensemble, Trainer
from plurax.transforms import value_and_grad

from ._registry import Fails, remedy

X = jnp.arange(1.0, 7).reshape(2, 3)
ENSEMBLE = Ensemble.from_apply(lambda w, x: w * x, [jnp.float32(1), jnp.float32(2)])


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.square(model(x)).mean()


def stepped(fun: Any = loss, optimizer: Any = None, ensemble: Ensemble = ENSEMBLE, **options: Any) -> Any:
    """Return the metrics of one step."""
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    trainer = Trainer(fun, optimizer, strategy="vmap", **options)
    return trainer.step(trainer.init(ensemble), X)[1]


@remedy("Trainer: {}; rename the argument of the loss.")
def a_hyperparameter_of_both(fails: Fails) -> None:
    def of_both(model: Any, x: jax.Array, *, momentum: Any = 0.0) -> Any:
        return loss(model, x) + momentum

    def renamed(model: Any, x: jax.Array, *, offset: Any = 0.0) -> Any:
        return loss(model, x) + offset

    rates = {"learning_rate": [0.1, 0.2]}
    fails(stepped, of_both, optax.sgd, hyperparams={**rates, "momentum": [0.1, 0.9]})
    both = stepped(renamed, optax.sgd, hyperparams={**rates, "momentum": [0.1, 0.9], "offset": [5.0, 6.0]})
    np.testing.assert_allclose(both["loss"], stepped()["loss"] + jnp.array([5.0, 6.0]), rtol=1e-6)


@remedy(
    "give it in hyperparams={{}: ...}",
    "Trainer: {} needs {}; give it in hyperparams={{}: ...}.",
    "Trainer: {}; give one for each, or a single number for all.",
    "pass the factory itself, or write them after a * in the loss",
)
def hyperparameters(fails: Fails) -> None:
    def scaled(model: Any, x: jax.Array, *, scale: Any) -> Any:
        return scale * loss(model, x)

    fails(stepped, scaled)
    assert stepped(scaled, hyperparams={"scale": [0.0, 1.0]})["loss"][0] == 0
    fails(stepped, loss, optax.sgd)
    fails(stepped, loss, optax.sgd, hyperparams={"learning_rate": [0.1, 0.2, 0.3]})
    fails(stepped, loss, optax.sgd(0.1), hyperparams={"learning_rate": [0.1, 0.2]})
    for rates in ([0.1, 0.2], 0.1):
        assert stepped(loss, optax.sgd, hyperparams={"learning_rate": rates})["loss"].shape == (2,)

    def by_position(model: Any, x: jax.Array, scale: Any) -> Any:
        return scale * loss(model, x)

    fails(stepped, by_position, hyperparams={"scale": [0.0, 1.0]})
    assert stepped(scaled, hyperparams={"scale": [0.0, 1.0]})["loss"][0] == 0


@remedy("Trainer: the optax factory must return {}, but it returned {}.")
def a_factory_of_something_else(fails: Fails) -> None:
    fails(stepped, loss, lambda: optax.sgd)
    assert stepped(loss, lambda: optax.sgd(0.1))["loss"].shape == (2,)


@remedy(
    "Trainer: loss must return {}, but it returned {} (shapes); {}.",
    "take its mean over the batch",
    'return other values in the dict, as (loss, {"name": x})',
    'Trainer: loss reports a value named "{}", a name that the history uses; rename it.',
)
def what_the_loss_returns(fails: Fails) -> None:
    of_each = lambda model, x: jnp.square(model(x))
    fails(stepped, of_each)
    np.testing.assert_allclose(stepped(lambda model, x: of_each(model, x).mean())["loss"], stepped()["loss"])
    more = lambda model, x: (loss(model, x), x.sum(), x.max())
    fails(stepped, more)
    fails(stepped, lambda model, x: {"loss": loss(model, x), "most": x.max()})
    right = lambda model, x: (loss(model, x), {"sum": x.sum(), "most": x.max()})
    assert stepped(right)["most"].tolist() == [6, 6]
    reported = lambda name: lambda model, x, *, rate=0.0: (loss(model, x), {name: x.max()})
    for name in ("loss", "step", "member", "stopped", "validation"):
        fails(stepped, reported(name))
    fails(stepped, reported("rate"), hyperparams={"rate": [0.1, 0.2]})
    assert stepped(reported("most"), hyperparams={"rate": [0.1, 0.2]})["most"].tolist() == [6, 6]


@remedy("Trainer: {}; return gradients as plurax.transforms.value_and_grad does.")
def gradients_of_another_structure(fails: Fails) -> None:
    def doubled(fun: Any) -> Any:
        def of(model: Any, *batch: Any) -> Any:
            value, gradients = value_and_grad(fun)(model, *batch)
            return value, jax.tree.map(lambda g: 2 * g, gradients)

        return of

    def wrong(fun: Any) -> Any:
        return lambda model, *batch: (fun(model, *batch), {"w": jnp.zeros(())})

    fails(stepped, grad_fn=wrong)
    fails(stepped, grad_fn=lambda fun: lambda model, *batch: (fun(model, *batch), jnp.zeros(2)))
    assert stepped(grad_fn=doubled)["loss"].shape == (2,)
    assert stepped(grad_fn=value_and_grad)["loss"].shape == (2,)


@remedy("Trainer: loss changes `{}` of the model, {}, to {}; keep shape and dtype.")
def state_of_another_shape(fails: Fails) -> None:
    ens = Ensemble.from_apply(lambda v, x: v["w"] * x, [{"w": jnp.float32(i), "seen": jnp.int32(0)} for i in (1, 2)])

    def counting(new: Any) -> Any:
        def of(model: Any, x: jax.Array) -> Any:
            value = loss(model, x)
            model.variables = {**model.variables, "seen": new(model.variables["seen"])}
            return value

        return of

    fails(stepped, counting(lambda seen: (seen + 1).astype(jnp.uint8)), ensemble=ens)
    fails(stepped, counting(lambda seen: seen + jnp.ones(2, int)), ensemble=ens)
    assert stepped(counting(lambda seen: seen + 1), ensemble=ens)["loss"].shape == (2,)


class Normed(nnx.Module):
    """A batch norm and a dense layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dense = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> Any:
        return self.dense(self.norm(x))


@remedy("keep it per member, or freeze it: batch norms with view(use_running_average=True)")
def state_that_members_share(fails: Fails) -> None:
    one = Normed(nnx.Rngs(0))
    shared = Ensemble.stack([nnx.clone(one) for _ in range(2)], shared="norm")
    fails(stepped, ensemble=shared)
    assert stepped(ensemble=shared.view(use_running_average=True))["loss"].shape == (2,)
    own = Ensemble.stack([nnx.clone(one) for _ in range(2)], shared=nnx.All("norm", nnx.Param))
    assert stepped(ensemble=own)["loss"].shape == (2,)


@remedy(
    "Trainer.init: shared_optimizer has nothing to train, since no parameter is shared.",
    "pass shared_optimizer=, such as optax.adam(1e-3)",
)
def an_optimizer_of_shared_parameters(fails: Fails) -> None:
    one, rates = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), {"learning_rate": [0.1, 0.2]}
    shared = Ensemble.stack([nnx.clone(one) for _ in range(2)], shared="kernel")
    fails(stepped, shared_optimizer=optax.adam(1e-3))
    fails(stepped, loss, optax.sgd, shared, hyperparams=rates)
    assert stepped(loss, optax.sgd, shared, hyperparams=rates, shared_optimizer=optax.adam(1e-3))["loss"].shape == (2,)
    assert stepped(loss, optax.sgd, hyperparams=rates)["loss"].shape == (2,)


@remedy(
    "make one with Ensemble.stack([...]), or of models that are not of NNX with Ensemble.from_apply",
    "pass state.ensemble",
    "give them nnx.Param variables, or a `trainable` rule that matches",
)
def something_else_than_an_ensemble(fails: Fails) -> None:
    trainer = Trainer(loss, optax.sgd(0.1))
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    fails(trainer.init, model)
    state = trainer.init(Ensemble.stack([model]))
    fails(trainer.init, state)
    assert int(trainer.init(state.ensemble).step) == 0
    equinox, dense = eqx.nn.Linear(3, 2, key=jax.random.key(0)), linen.Dense(2)
    for other in (equinox, dense.init(jax.random.key(0), X), {"w": jnp.ones(3)}):
        fails(trainer.init, other)
    trainer.init(Ensemble.from_apply(lambda model, x: jax.vmap(model)(x), [equinox]))
    trainer.init(Ensemble.from_apply(dense.apply, [dense.init(jax.random.key(0), X)]))
    trainer.init(Ensemble.from_apply(lambda v, x: v["w"] * x, [{"w": jnp.ones(3)}]))
    fails(trainer.init, Ensemble.stack([nnx.Sequential(nnx.Variable(jnp.ones(3)))]))
    trainer.init(Ensemble.stack([nnx.Sequential(nnx.Param(jnp.ones(3)))]))
    values = [{"w": jnp.ones(3), "b": jnp.ones(3)}]
    apply = lambda v, x: v["w"] * x + v["b"]
    fails(trainer.init, Ensemble.from_apply(apply, values, trainable=lambda path, _: path == "kernel"))
    trainer.init(Ensemble.from_apply(apply, values, trainable=lambda path, _: path == "w"))


@remedy("pass a function of the parameters, such as lambda params: jax.tree.map(lambda x: x.ndim > 1, params)")
def a_mask_of_another_structure(fails: Fails) -> None:
    ensemble = Ensemble.create(lambda rngs: nnx.Linear(3, 3, rngs=rngs), 2, seed=0)
    mask: Any = nnx.State({"kernel": True, "bias": False})
    for wrong in (mask, {"kernel": True}):
        fails(stepped, loss, optax.adamw(0.1, mask=wrong), ensemble)
    mask = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    assert jnp.isfinite(stepped(loss, optax.adamw(0.1, mask=mask), ensemble)["loss"]).all()
