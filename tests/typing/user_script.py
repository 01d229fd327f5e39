"""A user's script that `tests/test_user_types.py` runs and checks with mypy and pyright.

The comment after a `reveal_type` is the type that both show, without module names. Both report an error in each line
of `wrong`, and none elsewhere.
"""

import tempfile
from collections.abc import Callable, Mapping
from typing import Any, reveal_type

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from plurax.ensemble import (
    Batches,
    Callback,
    EarlyStopping,
    Ensemble,
    Trainer,
    TrainState,
    calibration,
    exploit,
    k_best,
    load,
    load_member,
    save,
    select,
    soup,
)
from plurax.transforms import (
    batch_jacobian,
    clipped_grad,
    derivative,
    grad,
    hessian,
    hvp,
    jacobian,
    jvp,
    linearize,
    per_sample_norm,
    value_and_grad,
    vjp,
    vmap,
)
from plurax.transforms.modules import freeze, load_params, reinitialize, save_params, unfreeze, with_precision
from plurax.transforms.privacy import DPSGD
from plurax.transforms.program import accumulate, bucketed, profile


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(3, 4, rngs=rngs)
        self.out = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(jax.nn.relu(self.hidden(x)))


def loss(model: MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - y) ** 2)


def cubic(x: jax.Array, scale: float = 1.0) -> jax.Array:
    return scale * (x**3).sum()


def with_aux(x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return cubic(x), {"norm": jnp.linalg.norm(x)}


def apply(variables: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return variables["w"] * x, x


KEY = jax.random.key(0)
X, Y = jnp.ones((6, 3)), jnp.zeros((6, 2))

# Ensembles
ens = Ensemble.create(MLP, 4, seed=0)
reveal_type(ens)  # Ensemble[MLP]
reveal_type(Ensemble.stack([MLP(nnx.Rngs(i)) for i in range(2)]))  # Ensemble[MLP]
reveal_type(Ensemble.create(lambda rngs: nnx.Linear(3, 2, rngs=rngs), 2, seed=0))  # Ensemble[Linear]
reveal_type(ens[0])  # MLP
reveal_type(ens[1:])  # Ensemble[MLP]
reveal_type(ens[[0, 2]])  # Ensemble[MLP]
reveal_type(ens[[True, False, True, False]])  # Ensemble[MLP]
reveal_type(ens[np.array([0, 2])])  # Any
reveal_type(ens[jnp.argmin(jnp.ones(4))])  # Any
reveal_type(ens[np.argmin(np.ones(4))])  # MLP
reveal_type(Ensemble.create(MLP, 2, seed=[1, 2]))  # Ensemble[MLP]
reveal_type(ens.unstack())  # list[MLP]
reveal_type([member for member in ens])  # list[MLP]
reveal_type(ens(X))  # Array
reveal_type(ens(np.ones((4, 6, 3)), in_axes=0))  # Array
reveal_type(ens[0](X))  # Array
reveal_type(ens.view())  # Ensemble[MLP]
reveal_type(ens.predict(X, kind="classification").mean)  # Array
reveal_type(select(ens, [2, 0]))  # Ensemble[MLP]
reveal_type(soup(ens))  # MLP
reveal_type(vmap(ens)(X[:4]))  # Array
pairs = Ensemble.from_apply(apply, [{"w": jnp.ones(3)}, {"w": jnp.zeros(3)}])
reveal_type(pairs(X))  # tuple[Array, Array]
reveal_type(pairs[0](X))  # tuple[Array, Array]


def count(members: Ensemble[nnx.Module]) -> int:
    return len(members)


reveal_type(count(ens))  # int

# Training
trainer = Trainer(loss, optax.adam, hyperparams={"learning_rate": [0.1, 0.2, 0.3, 0.4]}, strategy="vmap")
state = trainer.init(ens)
reveal_type(state)  # TrainState[MLP]
reveal_type(trainer.step(state, (X, Y)))  # tuple[TrainState[MLP], dict[str, Array]]
state, history = trainer.fit(state, [(X, Y)] * 2, progress=False)
reveal_type(state)  # TrainState[MLP]
reveal_type(history)  # list[dict[str, Any]]
reveal_type(state.ensemble)  # Ensemble[MLP]
reveal_type(state.ensemble[0])  # MLP
reveal_type(select(state, [0, 1]))  # TrainState[MLP]
reveal_type(exploit(state, jnp.arange(4.0), key=KEY))  # tuple[TrainState[MLP], Array]


def worst(step: int, metrics: Mapping[str, np.ndarray]) -> None:
    reveal_type(metrics["loss"])  # ndarray


def keep(step: int, metrics: Mapping[str, np.ndarray], state: Callable[[], TrainState[MLP]]) -> None:
    reveal_type(state())  # TrainState[MLP]


def keep_by_name(i: int, values: Mapping[str, np.ndarray], *, state: Callable[[], TrainState[MLP]]) -> None:
    reveal_type(state().ensemble[0])  # MLP


def squares(members: Ensemble[MLP], x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    return {"square": jnp.mean((members(x) - y) ** 2, axis=(1, 2))}


callbacks: list[Callback] = [worst, keep, keep_by_name, lambda step, metrics: None]
state, history = trainer.fit(
    state,
    [(X, Y)],
    epochs=2,
    validation=(X, Y),
    metrics=squares,
    early_stopping=EarlyStopping(evaluate="square"),
    callbacks=callbacks,
    progress=False,
)
reveal_type(state)  # TrainState[MLP]
with tempfile.TemporaryDirectory() as directory:
    save(f"{directory}/state", state)
    reveal_type(load(f"{directory}/state", state))  # TrainState[MLP]
    reveal_type(load(f"{directory}/state", ens))  # Ensemble[MLP]
    reveal_type(load_member(f"{directory}/state", 0, ens))  # MLP
    reveal_type(load_member(f"{directory}/state", 0, state))  # MLP
    reveal_type(load_member(f"{directory}/state", 0, ens[1]))  # MLP

# Transforms: a derivative with the structure of the arguments, which no checker can follow, is Any.
reveal_type(vmap(cubic)(X))  # Array
reveal_type(grad(cubic)(X[0], scale=2.0))  # Any
reveal_type(value_and_grad(cubic)(X[0]))  # tuple[Array, Any]
reveal_type(value_and_grad(with_aux, has_aux=True)(X[0]))  # tuple[tuple[Array, dict[str, Array]], Any]
reveal_type(jacobian(cubic)(X[0]))  # Array
reveal_type(jacobian(cubic)(X[0], scale=2.0))  # Array
reveal_type(jacobian(cubic)(np.ones(3)))  # Array
reveal_type(jacobian(lambda d: d["x"] ** 2)({"x": X[0]}))  # Any
reveal_type(jacobian(loss, 1)(ens[0], X, Y))  # Any
reveal_type(jacobian(cubic, (0,))(X[0]))  # Any
reveal_type(jacobian(with_aux, has_aux=True)(X[0]))  # Any
reveal_type(jacobian(jnp.sin, sparsity="auto", mode="forward")(X[0]))  # Any
reveal_type(jacobian(cubic).explain(X[0]).mode)  # str
reveal_type(vmap(hessian(cubic))(X))  # Any
reveal_type(jvp(cubic, (X,), (X,)))  # tuple[Array, Array]
reveal_type(jvp(with_aux, (X,), (X,), has_aux=True))  # tuple[Any, ...]
reveal_type(vjp(cubic, X)[0])  # Array
reveal_type(vjp(cubic, X)[1](1.0))  # tuple[Any, ...]
reveal_type(linearize(cubic, X)[1](X))  # Array
reveal_type(derivative(cubic, 2)(X))  # Array
reveal_type(per_sample_norm(loss)(ens[0], X, Y))  # Array

# Modules
reveal_type(freeze(ens[0], "hidden.kernel"))  # MLP
reveal_type(unfreeze(ens))  # Ensemble[MLP]
reveal_type(with_precision(ens, jnp.bfloat16))  # Ensemble[MLP]
reveal_type(reinitialize(ens[0], {nnx.Linear: nnx.initializers.ones}, KEY))  # MLP
with tempfile.TemporaryDirectory() as directory:
    save_params(f"{directory}/mlp", ens[0])
    reveal_type(load_params(f"{directory}/mlp", ens[1]))  # MLP

# Privacy
options: Any = {"num_examples": 600, "expected_batch_size": 6, "num_steps": 3}
dp = DPSGD(loss, optax.sgd(0.1), l2_clip_norm=1.0, noise_multiplier=2.0, target_delta=1e-5, accountant="rdp", **options)
one, many = dp.init(ens[0], key=KEY), dp.init(ens, key=KEY)
reveal_type(one.model)  # MLP
reveal_type(many.model)  # Ensemble[MLP]
batch = next(iter(dp.batches((np.ones((600, 3)), np.zeros((600, 2))), one)))
reveal_type(dp.step(one, batch))  # tuple[DPState[MLP], dict[str, Array]]
reveal_type(dp.epsilon(one))  # float
reveal_type(dp.epsilon(3))  # float
reveal_type(dp.epsilon(many))  # ndarray
reveal_type(dp.epsilon(many, together=True))  # float
reveal_type(dp.init({"w": X}, key=KEY).model)  # dict[str, Array]


def wrong() -> None:
    """Every line has an error; never called."""
    Trainer(loss, optax.adam, strategy="vmpa")
    Trainer(loss, optax.adam, nonfinite="stop")
    ens.predict(X, kind="regresion")
    Ensemble.create(lambda: MLP(nnx.Rngs(0)), 2, seed=0)
    ens[0].hiden(X)
    trainer.init(ens[0])
    load("directory", {"w": X})
    EarlyStopping(evaluate=count, mode="minimum")
    EarlyStopping(evaluate=5)
    trainer.fit(state, [(X, Y)], metrics=5)
    trainer.fit(state, [(X, Y)], callbacks=[lambda step: None])
    k_best(X[0], 1, mode="best")
    Batches((X, Y), 2, key=KEY, draw="some")
    calibration.conformal_sets(X, X, score="softmax")
    jacobian(cubic, mode="foward")
    jacobian(cubic)(X, scle=2.0)
    jacobian(loss)(ens[0], X)
    jacobian(jnp.dot)(X)
    hessian(cubic, mode="forward")
    hvp(cubic, X, X, mode="reverse")
    batch_jacobian(cubic, rows="columns")
    grad(cubic)(X, scle=2.0)
    per_sample_norm(loss, method="gost")
    clipped_grad(loss, l2_clip_norm=1.0, method="gost")
    DPSGD(loss, optax.sgd(0.1), l2_clip_norm=1.0, target_epsilon=1.0, target_delta=1e-5, accountant="pdl", **options)
    profile(cubic, X, mode="eagre")
    profile(cubic, X).table(sort="tme")
    profile(cubic, X).table(by="line")
    accumulate(loss, 2, reduction="max")
    bucketed(cubic, sizes="pow3")
