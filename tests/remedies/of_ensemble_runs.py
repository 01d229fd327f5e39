"""Remedies of runs: callbacks, checkpoints, early stopping, populations and averages."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from plurax.ensemble import (
    EarlyStopping,
    Ensemble,
    TensorBoard,
    Trainer,
    averages,
    exploit,
    from_orbax,
    greedy_selection,
    grid,
    load,
    save,
    to_orbax,
)
from plurax.transforms.privacy import DPSGD

from ._registry import Fails, remedy

X = jnp.arange(1.0, 7).reshape(2, 3)
ENSEMBLE = Ensemble.from_apply(lambda w, x: w * x, [jnp.float32(1), jnp.float32(2)])
KEY = jax.random.key(0)


def loss(model: Any, x: jax.Array) -> jax.Array:
    return 1e-2 * jnp.square(model(x)).mean()


def trained(
    steps: int = 2, optimizer: Any = None, ensemble: Ensemble = ENSEMBLE, fun: Any = loss, **options: Any
) -> Any:
    """Return the state and the history of a run; `options` of `Trainer` are those that it takes."""
    of_trainer = {name: options.pop(name) for name in ("hyperparams",) if name in options}
    trainer = Trainer(fun, optax.sgd(0.1) if optimizer is None else optimizer, strategy="vmap", **of_trainer)
    return trainer.fit(trainer.init(ensemble), [X] * steps, steps=steps, progress=False, **options)


@remedy("Trainer.fit: {}; call state() in the callback, and keep what it returns.")
def the_state_after_a_callback(fails: Fails) -> None:
    kept: list[Any] = []
    trained(callbacks=[lambda step, metrics, state: kept.append(state)])
    fails(kept[0])
    kept.clear()
    trained(callbacks=[lambda step, metrics, state: kept.append(state())])
    assert [int(state.step) for state in kept] == [1, 2]


@remedy("Trainer.fit: callbacks must be a list of functions, but got {}.")
def callbacks_that_are_no_list(fails: Fails) -> None:
    seen: list[int] = []
    callback = lambda step, metrics: seen.append(step)
    fails(trained, callbacks=callback)
    fails(trained, callbacks=[callback, None])
    trained(callbacks=[callback])
    assert seen == [1, 2]


@remedy("Trainer.fit: the history would have two values named {}; rename one.")
def two_values_of_one_name(fails: Fails) -> None:
    reporting = lambda name: lambda model, x: (loss(model, x), {name: x.max()})
    options = {"validation": X, "validate_every": 1}
    fails(trained, fun=reporting("validation_loss"), **options)
    measured = {"metrics": lambda ensemble, x: {"most": ensemble(x).max()}, **options}
    fails(trained, fun=reporting("validation_most"), **measured)
    assert {"validation_loss", "validation_most", "most"} <= trained(fun=reporting("most"), **measured)[1][0].keys()


@remedy(
    "save: needs an Ensemble or a TrainState, but got {}.",
    "load: like must be an Ensemble or a TrainState, but got {}.",
)
def saving_something_else(fails: Fails) -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    fails(save, "saved", model)
    save("saved", Ensemble.stack([model]))
    fails(load, "saved", model)
    assert (
        load("saved", Ensemble.stack([nnx.Linear(3, 2, rngs=nnx.Rngs(1))]))[0].kernel[...] == model.kernel[...]
    ).all()


@remedy("{} holds an ensemble, but no training state; load it with an Ensemble as like.")
def a_checkpoint_without_a_training_state(fails: Fails) -> None:
    save("saved", ENSEMBLE)
    state = Trainer(loss, optax.sgd(0.1)).init(ENSEMBLE)
    fails(load, "saved", state)
    assert load("saved", state.ensemble).trainable.tolist() == [1, 2]


@remedy(
    "Trainer.fit: {}; take more steps or use another directory.",
    "Trainer.fit: another kind of run wrote {}; use another checkpoint_dir.",
)
def directories_of_other_runs(fails: Fails) -> None:
    trained(2, checkpoint_dir="run")
    fails(trained, 1, checkpoint_dir="run")
    assert int(trained(3, checkpoint_dir="run")[0].step) == 3
    assert int(trained(1, checkpoint_dir="other")[0].step) == 1
    options = {"target_delta": 1e-5, "num_examples": 2, "expected_batch_size": 1, "num_steps": 1}
    private = DPSGD(lambda w, x: (w * x).mean(), optax.sgd(0.1), l2_clip_norm=1.0, noise_multiplier=1.0, **options)
    private.fit(private.init(jnp.ones(3), key=KEY), X, checkpoint_dir="private", progress=False)
    fails(trained, 2, checkpoint_dir="private")


@remedy("EarlyStopping: evaluate must return {}, but it returned {}.")
def what_evaluate_returns(fails: Fails) -> None:
    def stopping(evaluate: Any) -> EarlyStopping:
        return EarlyStopping(evaluate=evaluate, every=1)

    for wrong in (lambda ens: ens(X), lambda ens: ens(X).mean(), lambda ens: None):
        fails(trained, early_stopping=stopping(wrong))
    assert "validation" in trained(early_stopping=stopping(lambda ens: ens(X).mean((1, 2))))[1][0]


@remedy(
    "its best state had other values of the parameters that all members share, which train on",
    "Trainer.fit: a member cannot be restored, since {}; pass restore_best=False.",
)
def the_best_of_members_that_share_parameters(fails: Fails) -> None:
    one = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    shared = Ensemble.stack([nnx.clone(one) for _ in range(2)], shared="kernel")
    stopping = {"evaluate": lambda ens: ens(X).mean((1, 2)), "every": 1}
    fails(trained, ensemble=shared, early_stopping=EarlyStopping(**stopping))
    assert int(trained(ensemble=shared, early_stopping=EarlyStopping(**stopping, restore_best=False))[0].step) == 2


@remedy(
    "grid: there are no hyperparameters; give some, such as learning_rate=[0.1, 0.01].",
    "grid: {} has no values; give it at least one.",
)
def an_empty_grid(fails: Fails) -> None:
    fails(grid)
    fails(grid, learning_rate=[])
    assert grid(learning_rate=[0.1, 0.01]) == {"learning_rate": [0.1, 0.01]}


@remedy(
    "{}: Orbax joins names by dots, so it would write {} to one place; rename one.",
    "to_orbax: {} exists; pass another path, or remove it.",
)
def checkpoints_of_orbax(fails: Fails) -> None:
    def of(name: str) -> Ensemble:
        value = {"a": {"b": jnp.ones(2)}, name: jnp.zeros(2)}
        return Ensemble.from_apply(lambda v, x: v["a"]["b"] * x, [value, value])

    fails(to_orbax, "saved", of("a.b"))
    to_orbax("saved", of("c"))
    fails(to_orbax, "saved", of("c"))
    to_orbax("other", of("c"))
    for file in sorted(Path("saved").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    Path("saved").rmdir()
    to_orbax("saved", of("c"))
    assert from_orbax("saved", of("c")).trainable["a"]["b"].shape == (2, 2)


@remedy(
    "exploit: a population of one has no other member to copy; give an ensemble of at least 2.",
    "exploit: {} has integer values, which cannot be scaled; give the Trainer floats.",
    "exploit: the hyperparameter {} is a schedule, which is not perturbed; leave it out.",
    "exploit: members have no {} of their own (each {}); give the Trainer a list.",
)
def populations(fails: Fails) -> None:
    def exploited(rates: Any, ensemble: Ensemble = ENSEMBLE, name: str = "learning_rate", **more: Any) -> Any:
        trainer = Trainer(loss, optax.sgd, hyperparams={"learning_rate": rates, **more})
        perturb = {name: (0.5, 2.0)} if name else None
        state, source = exploit(trainer.init(ensemble), jnp.arange(len(ensemble)), key=KEY, perturb=perturb)
        assert source.tolist() == [0] * len(ensemble)
        return state.opt_state.hyperparams["learning_rate"]

    fails(exploited, [0.1], ENSEMBLE[:1])
    fails(exploited, [1, 2])
    fails(exploited, 0.1)
    fails(exploited, [0.1, 0.2], name="momentum")
    fails(exploited, [optax.constant_schedule(0.1), 0.2])
    assert exploited([1.0, 2.0])[1] in (0.5, 2)
    assert exploited([0.1, 0.2], name="momentum", momentum=[0.9, 0.5]).shape == (2,)
    assert exploited([optax.constant_schedule(0.1), 0.2], name="").shape == (2,)


@remedy("greedy_selection: score must return one number, but it returns {}.")
def a_score_of_each_example(fails: Fails) -> None:
    p, targets = jnp.array([[0.9, 0.1], [0.5, 0.6]]), jnp.array([1.0, 0.0])
    of_each = lambda mean, targets: jnp.abs(mean - targets)
    fails(greedy_selection, p, targets, rounds=1, score=of_each)
    found = greedy_selection(p, targets, rounds=1, score=lambda mean, targets: of_each(mean, targets).mean())
    assert found.indices.tolist() == [0]


@remedy("install it with: pip install 'plurax[tensorboard]'")
def without_tensorboard(fails: Fails) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tensorboardX", None)
        fails(TensorBoard, "board")
    assert "tensorboard" in metadata("plurax").get_all("Provides-Extra", [])
    with TensorBoard("board") as board:
        trained(callbacks=[board])
    assert {path.name for path in Path("board").iterdir()} == {"member_00", "member_01"}


@remedy(
    "averages.collect: covariance is that of a plain mean; leave decay out.",
    "{}: the optimizer keeps no covariance; pass covariance=True to averages.collect.",
    "{}: a covariance needs two collections, but there was one; train on.",
    "{}: the optimizer keeps no snapshots; pass snapshots= to averages.collect.",
    "{}: nothing was collected yet; train on, or let averages.collect start earlier.",
    "{}: members share parameters that train, which it does not average.",
)
def averages_of_weights(fails: Fails) -> None:
    def after(steps: int = 2, ensemble: Ensemble = ENSEMBLE, **options: Any) -> Any:
        return trained(steps, averages.collect(optax.sgd(0.1), **options), ensemble)[0]

    fails(averages.collect, optax.sgd(0.1), covariance=True, decay=0.9)
    state = after()
    fails(averages.sample, state, KEY, 1)
    fails(averages.snapshots, state)
    fails(averages.sample, after(1, covariance=True), KEY, 1)
    assert len(averages.sample(after(2, covariance=True), KEY, 1)) == len(averages.snapshots(after(snapshots=1))) == 2
    for start in (2, 5):
        fails(averages.mean, after(start=start))
    np.testing.assert_array_equal(averages.mean(after(3, start=2)).trainable, after(3).ensemble.trainable)
    assert len(averages.mean(after(start=1))) == 2
    one = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    shared = Ensemble.stack([nnx.clone(one) for _ in range(2)], shared="kernel")
    fails(averages.mean, after(ensemble=shared))
    assert len(averages.mean(after(ensemble=Ensemble.stack([nnx.clone(one) for _ in range(2)])))) == 2


@remedy("pass dataclasses.replace(state, last=None) to go on from these, with the full patience")
def another_criterion(fails: Fails) -> None:
    stopping = {"evaluate": lambda ens: ens(X).mean((1, 2)), "every": 1, "patience": 9}
    state = trained(early_stopping=EarlyStopping(**stopping))[0]
    trainer = Trainer(loss, optax.sgd(0.1), strategy="vmap")
    again = partial(trainer.fit, batches=[X], progress=False, early_stopping=EarlyStopping(**stopping, mode="max"))
    fails(again, state)
    assert again(replace(state, last=None))[0].last.criterion == "max of a function"


class Normalized(nnx.Module):
    """A batch norm, of which members may share the statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


class LinenNormalized(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        return linen.BatchNorm(use_running_average=not train, momentum=0.0)(x)


@remedy(
    "take steps of a Trainer with optax.set_to_zero(), whose loss calls model.call_and_update",
    "{}: members share `{}`; leave statistics out of shared=.",
    "{}: batches has no examples; pass at least one batch (an iterator may be used up).",
)
def statistics_of_averages(fails: Fails) -> None:
    of_linen = Ensemble.from_apply(LinenNormalized().apply, [LinenNormalized().init(KEY, X, train=True)])
    fails(averages.update_statistics, of_linen, [X])
    train = lambda model, x: 0 * model.call_and_update(x, train=True).mean()
    found = trained(1, optax.set_to_zero(), of_linen, train)[0].ensemble
    np.testing.assert_allclose(found[0].variables["batch_stats"]["BatchNorm_0"]["mean"], X.mean(0))
    models = [Normalized(nnx.Rngs(0)) for _ in range(2)]
    fails(averages.update_statistics, Ensemble.stack(models, shared=nnx.BatchStat), [X])
    fails(averages.update_statistics, Ensemble.stack(models, shared="norm.scale"), iter([]))
    for shared in (None, "norm.scale"):
        found = averages.update_statistics(Ensemble.stack(models, shared=shared), [X])
        np.testing.assert_allclose(found[1].norm.mean[...], X.mean(0))
