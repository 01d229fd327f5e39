"""Every factory of optax and of `optax.contrib` in a `Trainer`, against a loop over the members."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

from plurax.ensemble import Ensemble, Trainer, averages

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(5, 3)).astype(np.float32), RNG.normal(size=(5, 2)).astype(np.float32)
RATES = [0.01, 0.02]


def member(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    w, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 4), (4, 2)))
    return {"w": w, "b": jnp.full(4, 0.1 * seed), "v": v}


MEMBERS = [member(1), member(2)]


def model(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]


def loss(net: Any, x: Any, y: Any) -> Any:
    return jnp.mean((net(x) - y) ** 2)


ENSEMBLE = Ensemble.from_apply(model, MEMBERS)
MASK = {"w": True, "b": False, "v": True}
# Values of required arguments, by name.
ARGUMENTS: dict[str, Any] = {
    "learning_rate": RATES[0],
    "clipping": 0.1,
    "max_delta": 0.1,
    "threshold": 0.1,
    "max_norm": 0.5,
    "decay": 0.9,
    "step_size": -0.1,
    "step_size_fn": lambda count: -0.1 / (1 + count),
    "max_backtracking_steps": 5,
    "max_consecutive_errors": 2,
    "inner": optax.adam(0.01),
    "tx": optax.adam(0.01),
    "optimizer": optax.adam(0.01),
    "base_optimizer": optax.adam(0.01),
    "mask": MASK,
    "freeze_mask": MASK,
    "transforms": {"a": optax.adam(0.01), "b": optax.sgd(0.1)},
    "param_labels": {"w": "a", "b": "b", "v": "a"},
    "should_transform_fn": lambda *_, **__: True,
}
UNANNOTATED = {"dog", "dowg", "scale_by_factored_rms"}  # they return a transformation, but do not say so
# Not optimizers of one step from gradients: they take pairs of parameters or gradients of examples, need a second
# gradient or a slow line search (tested in `test_trainer.py`), or take functions that return transformations.
ELSEWHERE = {"lookahead", "sam", "differentially_private_aggregate", "dpsgd", "scale_by_zoom_linesearch", "lbfgs"}
ELSEWHERE |= {"optimistic_adam", "scale_by_muon"}  # deprecated; fails in optax for vectors, without `muon` around it


def factories() -> dict[str, Any]:
    """Return the functions of optax that return a transformation, and whose required arguments are known here."""
    found = {}
    for module in (optax, optax.contrib):
        for name, factory in vars(module).items():
            if name.startswith("_") or not inspect.isfunction(factory) or name in ELSEWHERE:
                continue
            signature = inspect.signature(factory)
            required = [x for x, p in signature.parameters.items() if p.default is p.empty]
            returns = name in UNANNOTATED or "GradientTransformation" in str(signature.return_annotation)
            if returns and {*required} <= {*ARGUMENTS}:
                found[name] = factory
    return found


FACTORIES = factories()


def alone(optimizer: Any, params: Any, steps: int, needs_loss: bool) -> Any:
    """Return the parameters after some steps of plain optax."""

    def of(params: Any) -> Any:
        return jnp.mean((model(params, X) - Y) ** 2)

    more = {"obj_fn": of} if needs_loss else {}
    state, transform = optimizer.init(params), optax.with_extra_args_support(optimizer)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, gradients = jax.value_and_grad(of)(params)
        updates, state = transform.update(gradients, state, params, value=value, grad=gradients, value_fn=of, **more)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return params


def check(trainer: Any, optimizers: Any, needs_loss: bool = False, steps: int = 3) -> None:
    state = trainer.init(ENSEMBLE)
    for _ in range(steps):
        state, _ = trainer.step(state, (X, Y))
    for i, (optimizer, params) in enumerate(zip(optimizers, MEMBERS, strict=True)):
        expected = alone(optimizer, params, steps, needs_loss)
        # Differences as a part of the way that the parameters have gone: without a rate, it is long.
        for name, x in expected.items():
            scale = 1 + np.abs(x).max()
            np.testing.assert_allclose(state.ensemble[i].variables[name], x, rtol=0, atol=1e-4 * scale, err_msg=name)


def made(name: str, **options: Any) -> Any:
    required = [x for x, p in inspect.signature(FACTORIES[name]).parameters.items() if p.default is p.empty]
    return FACTORIES[name](**{x: ARGUMENTS[x] for x in required} | options)


# Their states have a constant after the first update.
CONSTANT = ["optimistic_gradient_descent", "optimistic_adam_v2", "dog"]


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
@pytest.mark.parametrize("name", CONSTANT)
def test_a_state_with_a_constant(name: str, strategy: Any) -> None:
    check(Trainer(loss, made(name), strategy=strategy), [made(name)] * 2)


def test_the_factories_are_found() -> None:
    assert len(FACTORIES) > 60
    assert {*CONSTANT, "adam", "muon", "partition", "prodigy"} <= FACTORIES.keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:optax")
@pytest.mark.parametrize("name", [name for name in FACTORIES if name not in CONSTANT])
def test_each_factory_of_optax(name: str) -> None:
    """As a ready optimizer, and with a learning rate for each member where there is one."""
    needs_loss = name == "sophia"  # as `obj_fn`, which line searches refuse
    check(Trainer(loss, made(name), strategy="vmap"), [made(name)] * 2, needs_loss)
    parameters = inspect.signature(FACTORIES[name]).parameters
    if "learning_rate" in parameters:
        required = {x: ARGUMENTS[x] for x, p in parameters.items() if p.default is p.empty}
        rates: Any = {"hyperparams": required | {"learning_rate": RATES}, "strategy": "vmap"}
        check(Trainer(loss, FACTORIES[name], **rates), [made(name, learning_rate=rate) for rate in RATES], needs_loss)


def test_lookahead_inside_of_averages() -> None:
    """The model has the fast parameters, whose mean is taken."""
    optimizer = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.4)
    plain, averaged = (Trainer(loss, x, strategy="vmap") for x in (optimizer, averages.collect(optimizer)))
    state, with_mean, seen = plain.init(ENSEMBLE), averaged.init(ENSEMBLE), []
    for _ in range(3):
        state, _ = plain.step(state, (X, Y))
        with_mean, _ = averaged.step(with_mean, (X, Y))
        seen.append(state.ensemble.trainable)
    for name, x in state.ensemble.trainable.items():
        np.testing.assert_allclose(with_mean.ensemble.trainable[name], x, rtol=1e-5, atol=1e-6)
        expected = np.mean([one[name] for one in seen], axis=0)
        np.testing.assert_allclose(averages.mean(with_mean).trainable[name], expected, rtol=1e-5, atol=1e-6)


def test_a_state_of_flax_as_mask_names_the_structure() -> None:
    make = lambda rngs: nnx.Sequential(nnx.Linear(3, 2, rngs=rngs), nnx.Linear(2, 1, rngs=rngs))
    mask = jax.tree.map(lambda x: x.ndim > 1, nnx.state(make(nnx.Rngs(0)), nnx.Param))
    ensemble = Ensemble.create(make, 2, seed=0)
    squares = lambda net, x: jnp.mean(net(x) ** 2)
    for optimizer, options in (
        (optax.masked(optax.sgd(0.1), mask), {}),
        (optax.adamw, {"hyperparams": {"learning_rate": RATES, "mask": mask}}),
    ):
        with pytest.raises(ValueError, match="optimizer: a mask or labels have another structure than the parameters"):
            Trainer(squares, optimizer, strategy="vmap", **options).init(ensemble)
    trainer = Trainer(squares, optax.masked(optax.sgd(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)))
    trainer.init(ensemble)  # as the error says
