"""Checkpoints of Orbax: written for its own reader, and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx

from plurax.ensemble import Ensemble, Trainer, from_orbax, to_orbax

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


class Model(nnx.Module):
    """Layers in a list, dropout with its key, statistics, another dtype, and an array without elements."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(4, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.half, self.empty = nnx.Param(jnp.ones(3, jnp.bfloat16)), nnx.Param(jnp.zeros((0, 2)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.layers[1](self.layers[0](x))) * self.half[...]


def linear(inputs: int = 4, **options: Any) -> Any:
    return lambda rngs: nnx.Linear(inputs, 3, rngs=rngs, **options)


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - x[:, :3]) ** 2)


def trainer() -> Trainer:
    rates = {"learning_rate": [0.1, 0.01, 0.2]}
    return Trainer(loss, optax.adam, hyperparams=rates, shared_optimizer=optax.sgd(0.1), strategy="vmap")


def state_of(seed: int) -> Any:
    return trainer().init(Ensemble.create(Model, 3, seed=seed, shared="layers.0"))


def assert_same(found: Any, expected: Any) -> None:
    def numbers(x: Any) -> np.ndarray:
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(numbers(x), numbers(y)), found, expected)


def test_a_state_comes_back_and_trains_on_to_the_bit(tmp_path: Path) -> None:
    state, _ = trainer().step(state_of(0), X)
    to_orbax(tmp_path / "state", state)
    found = from_orbax(tmp_path / "state", state_of(1))
    assert_same(found, state)
    assert_same(trainer().step(found, X)[0], trainer().step(state, X)[0])
    assert_same(from_orbax(tmp_path / "state", state_of(1).ensemble), state.ensemble)
    assert_same(from_orbax(tmp_path / "state", jax.eval_shape(lambda: state_of(1).ensemble)), state.ensemble)


def test_orbax_alone_reads_members(tmp_path: Path) -> None:
    ensemble = Ensemble.create(Model, 3, seed=0)
    to_orbax(tmp_path / "ensemble", ensemble)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "ensemble")
    kernel = found["ensemble"]["trainable"]["layers"]["0"]["kernel"]
    third: Any = ensemble[2]
    np.testing.assert_array_equal(kernel[2], third.layers[0].kernel[...])


def test_one_that_orbax_wrote_is_read(tmp_path: Path) -> None:
    """Members in one array each, under the names of a model of Flax."""
    ensemble = Ensemble.create(linear(), 2, seed=0)
    kernel = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "theirs", {"ensemble": {"trainable": {"kernel": kernel, "bias": kernel[:, 0]}}})
    found = from_orbax(tmp_path / "theirs", ensemble)
    np.testing.assert_array_equal(found[1].kernel[...], kernel[1])
    np.testing.assert_array_equal(found[0].bias[...], kernel[0, 0])


@pytest.mark.parametrize("kind", [dict, list])
def test_members_of_functions(kind: Any, tmp_path: Path) -> None:
    members = [kind([("w", jnp.full(3, i))] if kind is dict else [jnp.full(3, i)]) for i in range(2)]
    ensemble = Ensemble.from_apply(lambda p, x: x @ jax.tree.leaves(p)[0], members)
    to_orbax(tmp_path / "functions", ensemble)
    assert_same(from_orbax(tmp_path / "functions", ensemble), ensemble)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    ensemble, nothing = Ensemble.create(linear(), 2, seed=0), cast(Any, {})
    to_orbax(tmp_path / "one", ensemble)
    with pytest.raises(ValueError, match="^to_orbax: .*one exists; pass another path"):
        to_orbax(tmp_path / "one", ensemble)
    with pytest.raises(TypeError, match="^to_orbax: needs an Ensemble or a TrainState, but got dict"):
        to_orbax(tmp_path / "two", nothing)
    with pytest.raises(TypeError, match="^from_orbax: like must be an Ensemble or a TrainState, but got dict"):
        from_orbax(tmp_path / "one", nothing)
    with pytest.raises(FileNotFoundError, match="^from_orbax: there is no checkpoint at "):
        from_orbax(tmp_path / "two", ensemble)
    half = {"param_dtype": jnp.bfloat16}
    for match, inputs, options in (
        (r"shape \(2, 4, 3\) .* at `ensemble.trainable.kernel`, but `like` has shape \(2, 5, 3\)", 5, {}),
        (r"dtype float32 at `ensemble.trainable.bias`, but `like` has .*bfloat16", 4, half),
        ("at `ensemble.trainable.bias`, but `like` has nothing", 4, {"use_bias": False}),
    ):
        other = Ensemble.create(linear(inputs, **options), 2, seed=0)
        with pytest.raises(ValueError, match=match):
            from_orbax(tmp_path / "one", other)
    fewer = Ensemble.create(linear(), 3, seed=0)
    with pytest.raises(ValueError, match=r"has shape \(2, 3\) .*, but `like` has shape \(3, 3\)"):
        from_orbax(tmp_path / "one", fewer)
    dots = Ensemble.from_apply(lambda p, x: x, [{"a.b": {"w": jnp.ones(2)}, "a": {"b": {"w": jnp.zeros(2)}}}])
    with pytest.raises(ValueError, match="^to_orbax: Orbax joins names by dots, so it would write .* to one place"):
        to_orbax(tmp_path / "two", dots)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
