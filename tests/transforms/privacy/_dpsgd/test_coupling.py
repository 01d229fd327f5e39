"""`DPSGD.fit` refuses a loss that couples the examples of a batch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Ensemble
from plurax.transforms.privacy import DPSGD

X = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 40)


def mean(w: Any, x: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, y).mean()


def contrastive(w: Any, x: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels((x @ w) @ (x[:, ::-1] @ w).T, jnp.arange(len(x))).mean()


def dpsgd(loss: Any, **options: Any) -> DPSGD:
    settings: dict[str, Any] = {"num_examples": 40, "expected_batch_size": 10, "num_steps": 4, "noise_multiplier": 1.0}
    return DPSGD(loss, optax.sgd(0.1), l2_clip_norm=1.0, target_delta=1e-3, **settings | options)


def run(dp: DPSGD, model: Any, data: Any = (X, Y), **options: Any) -> Any:
    return dp.fit(dp.init(model, key=jax.random.key(0)), data, progress=False, **options)


W = jnp.full((6, 3), 0.1)


def test_a_coupled_loss_is_refused_before_the_first_step(tmp_path: Path) -> None:
    match = "^DPSGD.fit: the loss of a batch is neither the mean nor the sum of the losses of its examples"
    with pytest.raises(ValueError, match=match) as error:
        run(dpsgd(contrastive), W, checkpoint_dir=tmp_path)
    assert not any(character.isdigit() for character in str(error.value))
    assert not list(tmp_path.glob("step_*"))
    assert len(run(dpsgd(contrastive, check_loss=False), W)[1]) == 4


@pytest.mark.parametrize("loss", [mean, lambda w, x, y: 7 * mean(w, x, y) * len(x)], ids=["mean", "sum"])
def test_means_and_sums_train(loss: Any) -> None:
    checked, unchecked = (run(dpsgd(loss, check_loss=check), W)[0].model for check in (True, False))
    np.testing.assert_array_equal(checked, unchecked)


@pytest.mark.parametrize("is_sum", [False, True])
def test_a_sum_is_said_to_be_reported_as_a_mean(is_sum: bool, capsys: pytest.CaptureFixture[str]) -> None:
    dp = dpsgd(lambda w, x, y: mean(w, x, y) * (len(x) if is_sum else 1))
    dp.fit(dp.init(W, key=jax.random.key(0)), (X, Y), steps=1)
    assert ('is the sum over its examples; the metric "loss" is their mean' in capsys.readouterr().err) == is_sum


class Net(nnx.Module):
    """A network with dropout and running statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.dropout = nnx.Linear(6, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(6, use_running_average=True, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(self.dropout(self.norm(x)))


def of_model(model: Any, x: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def coupled_of_model(model: Any, x: Any, y: Any) -> Any:
    return jnp.sqrt(of_model(model, x, y))


@pytest.mark.parametrize("members", [None, 3])
def test_modules_with_dropout_and_ensembles_are_checked(members: int | None) -> None:
    make = lambda: Net(nnx.Rngs(0)) if members is None else Ensemble.create(Net, members, seed=0)
    checked, unchecked = (run(dpsgd(of_model, check_loss=check), make())[0] for check in (True, False))
    for a, b in zip(*(jax.tree.leaves(jax.tree.map(raw, state)) for state in (checked, unchecked)), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="depends on the other examples of its batch"):
        run(dpsgd(coupled_of_model), make())


def raw(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


class Noisy(nnx.Module):
    """A network whose noise has no evaluation mode."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.rngs = nnx.Linear(6, 3, rngs=rngs), rngs

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x + jax.random.normal(self.rngs.noise(), x.shape))


def test_random_losses_are_warned_of_once() -> None:
    model = Noisy(nnx.Rngs(0, noise=1))
    with pytest.warns(UserWarning, match="^DPSGD.fit: the loss depends on random numbers") as caught:
        run(dpsgd(of_model), model)
    assert [str(Path(warning.filename).name) for warning in caught] == ["test_coupling.py"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(dpsgd(of_model, check_loss=False), model)


def test_a_resumed_run_and_single_examples_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    dp = dpsgd(contrastive, check_loss=False)
    state, _ = run(dp, W, steps=2)
    dpsgd(contrastive).fit(state, (X, Y), progress=False)
    # The loss of a group of three, which also takes a batch of groups and is no mean of theirs.
    of_group = lambda w, x: jnp.sqrt(jnp.mean((x @ w) ** 2))
    groups = np.stack([X, 2 * X, X**2], axis=1)
    assert len(run(dpsgd(of_group, keep_batch_dim=False), W, groups)[1]) == 4
    with pytest.raises(ValueError, match="^DPSGD.fit: the loss of a batch is neither"):
        run(dpsgd(of_group), W, groups)


def test_auxiliary_outputs_and_small_batches() -> None:
    with_aux = lambda w, x, y: (contrastive(w, x, y), {"norm": jnp.sum(w**2)})
    with pytest.raises(ValueError, match="^DPSGD.fit: the loss of a batch is neither"):
        run(dpsgd(with_aux, has_aux=True), W)
    # Batches of one or two examples: the check waits for the first of two.
    with pytest.raises(ValueError, match="^DPSGD.fit: the loss of a batch is neither"):
        run(dpsgd(contrastive, expected_batch_size=1, num_steps=40), W)
