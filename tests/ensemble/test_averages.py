"""Averages of weights along a run, against lists of all parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from plurax.ensemble import Batches, Ensemble, Trainer, averages

RNG = np.random.default_rng(0)
BATCHES = [RNG.normal(size=(6, 4)).astype(np.float32) for _ in range(12)]
SIZE = 3


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.norm = nnx.Linear(4, 5, use_bias=False, rngs=rngs), nnx.BatchNorm(5, rngs=rngs)
        self.last = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.tanh(self.norm(self.first(x))))


def loss(net: Any, x: Any) -> Any:
    return jnp.mean((net(x) - x[:, :2]) ** 2)


def created() -> Ensemble[Any]:
    return Ensemble.create(Net, SIZE, seed=0)


def run(optimizer: Any, **options: Any) -> tuple[Any, list[Any]]:
    """Return the last state, and the parameters after each step."""
    trainer = Trainer(loss, optimizer, **options)
    state, each = trainer.init(created()), []
    for batch in BATCHES:
        state, _ = trainer.step(state, batch)
        each.append(jax.tree.map(np.asarray, state.ensemble.trainable))
    return state, each


def stacked(each: list[Any]) -> Any:
    return jax.tree.map(lambda *x: np.stack(x).astype(np.float64), *each)


def close(found: Any, expected: Any, **tolerance: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **{"rtol": 1e-5, "atol": 1e-6, **tolerance}), found, expected
    )


def test_means_are_those_of_the_parameters() -> None:
    plain, each = run(optax.adam(0.05))
    state, same = run(averages.collect(optax.adam(0.05), start=3, every=2))
    close(same[-1], each[-1])
    close(averages.mean(state).trainable, jax.tree.map(lambda x: x.mean(0), stacked(each[3::2])))
    jax.tree.map(np.testing.assert_array_equal, averages.mean(state).rest, plain.ensemble.rest)
    state, _ = run(averages.collect(optax.adam(0.05), decay=0.7))
    weights = 0.7 ** np.arange(len(BATCHES))[::-1]
    exponential = jax.tree.map(lambda x: np.average(x, axis=0, weights=weights), stacked(each))
    close(averages.mean(state).trainable, exponential)


@pytest.mark.slow
def test_rates_of_their_own_and_other_strategies() -> None:
    rates = {"learning_rate": [0.1, 0.05, 0.01]}
    make = lambda learning_rate: averages.collect(optax.sgd(learning_rate), start=5, snapshots=3)
    one, each = run(make, hyperparams=rates, strategy="vmap")
    for strategy in ("map", "loop"):
        other, _ = run(make, hyperparams=rates, strategy=strategy)
        close(averages.mean(other).trainable, averages.mean(one).trainable)
    close(averages.mean(one).trainable, jax.tree.map(lambda x: x.mean(0), stacked(each[5:])))
    kept = averages.snapshots(one)
    assert len(kept) == 3 * SIZE
    expected = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), stacked(each[-3:]))
    close(kept.trainable, expected)
    np.testing.assert_allclose(kept[5].last.bias[...], each[-1]["last"]["bias"][1], rtol=1e-6)


@pytest.mark.slow
def test_draws_have_the_covariance_of_swag() -> None:
    """The variance of 20,000 draws has a standard deviation of 1 %; the largest of 90 entries exceeds 6 % with 10⁻⁷."""
    state, each = run(averages.collect(optax.adam(0.05), covariance=True, rank=4))
    draws = averages.sample(state, jax.random.key(0), 20_000)
    assert len(draws) == SIZE * 20_000
    all_steps = stacked(each)

    def variance(x: np.ndarray) -> np.ndarray:
        means = np.cumsum(x, 0) / np.arange(1, len(x) + 1).reshape(-1, *[1] * (x.ndim - 1))
        deviations = (x - means)[-4:]
        return x.var(0) / 2 + np.square(deviations).sum(0) / (2 * 3)

    found = jax.tree.map(lambda x: np.asarray(x).reshape(SIZE, -1, *x.shape[1:]), draws.trainable)
    close(jax.tree.map(lambda x: x.var(1), found), jax.tree.map(variance, all_steps), rtol=0.06, atol=1e-7)
    means, expected = jax.tree.map(lambda x: x.mean(1), found), jax.tree.map(lambda x: x.mean(0), all_steps)
    deviation = max(float(np.sqrt(x.max())) for x in jax.tree.leaves(jax.tree.map(variance, all_steps)))
    close(means, expected, atol=6 * deviation / np.sqrt(20_000))
    again = averages.sample(state, jax.random.key(0), 2)
    jax.tree.map(np.testing.assert_array_equal, again, averages.sample(state, jax.random.key(0), 2))
    assert not np.array_equal(again[0].last.bias[...], again[1].last.bias[...])


def test_a_resumed_run_has_the_same_averages(tmp_path: Path) -> None:
    trainer = Trainer(loss, averages.collect(optax.adam(0.05), start=2, covariance=True, rank=3, snapshots=2))
    whole, _ = trainer.fit(trainer.init(created()), BATCHES, progress=False)
    trainer.fit(trainer.init(created()), BATCHES[:7], progress=False, checkpoint_dir=tmp_path)
    resumed, _ = trainer.fit(trainer.init(created()), BATCHES, progress=False, checkpoint_dir=tmp_path)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^averages.collect: optimizer must be an optax transformation"):
        averages.collect(optax.sgd)
    with pytest.raises(ValueError, match=r"^averages.collect: decay must be"):
        averages.collect(optax.sgd(0.1), decay=1.0)
    with pytest.raises(ValueError, match=r"^averages.collect: covariance is that of a plain mean"):
        averages.collect(optax.sgd(0.1), decay=0.9, covariance=True)
    with pytest.raises(ValueError, match=r"^averages.collect: every must be"):
        averages.collect(optax.sgd(0.1), every=0)
    trainer = Trainer(loss, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"^averages.mean: the trainer's optimizer must be one that averages.collect"):
        averages.mean(trainer.init(created()))
    with pytest.raises(TypeError, match=r"^averages.mean: state must be a TrainState"):
        averages.mean(created())
    trainer = Trainer(loss, averages.collect(optax.sgd(0.1), start=1))
    state, _ = trainer.step(trainer.init(created()), BATCHES[0])
    with pytest.raises(ValueError, match=r"^averages.mean: nothing was collected yet"):
        averages.mean(state)
    state, _ = trainer.step(state, BATCHES[0])
    with pytest.raises(ValueError, match=r"^averages.sample: the optimizer keeps no covariance"):
        averages.sample(state, jax.random.key(0), 2)
    with pytest.raises(ValueError, match=r"^averages.snapshots: the optimizer keeps no snapshots"):
        averages.snapshots(state)
    shared = Ensemble.create(Net, SIZE, seed=0, shared="first")
    state, _ = trainer.step(trainer.step(trainer.init(shared), BATCHES[0])[0], BATCHES[0])
    with pytest.raises(ValueError, match=r"^averages.mean: members share parameters that train"):
        averages.mean(state)


class Normed(nnx.Module):
    """Two batch norms, of which the second sees what the first normalizes, and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.BatchNorm(4, rngs=rngs), nnx.BatchNorm(4, momentum=0.5, rngs=rngs)])
        self.between, self.dropout = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norms[1](self.between(self.dropout(self.norms[0](x))))


def test_statistics_are_the_means_over_batches_weighted_by_examples() -> None:
    """Of a net without dropout, against NumPy in float64, for batches of several sizes and each member's own ones."""
    ens = Ensemble.create(Normed, SIZE, seed=0).view(deterministic=True, use_running_average=True)
    spoiled = jax.tree.map(lambda x: x * jnp.nan if x.dtype == jnp.float32 else x, ens.rest)  # they start anew
    ens = ens._with(ens.trainable, spoiled, None)
    sizes = (6, 2, 9)
    own = [RNG.normal(1, 2, size=(SIZE, n, 4)).astype(np.float32) for n in sizes]
    for in_axes, batches in ((0, own), (None, [x[0] for x in own])):
        found = averages.update_statistics(ens, iter(batches), in_axes=in_axes)
        for i, member in enumerate(found):
            moments: Any = []
            for batch in batches:
                x = np.float64(batch if in_axes is None else batch[i])
                first = x.mean(0), x.var(0)
                h = (x - first[0]) / np.sqrt(first[1] + 1e-5)
                h = h @ np.float64(member.between.kernel[...]) + np.float64(member.between.bias[...])
                moments.append([*first, h.mean(0), h.var(0)])
            expected = np.average(moments, axis=0, weights=sizes)
            of = [x[...] for norm in member.norms for x in (norm.mean, norm.var)]
            np.testing.assert_allclose(of, expected, rtol=1e-4, atol=1e-5)
        close(found.trainable, ens.trainable, rtol=0, atol=0)
        assert found.structure == ens.structure
        assert np.isfinite(found(batches[0], in_axes=in_axes)).all()
    pairs = [(x[0], np.arange(len(x[0]))) for x in own]  # with labels, as a `Trainer` takes them
    close(averages.update_statistics(ens, pairs).rest["norms"], found.rest["norms"])


def test_statistics_of_a_mean_are_updated_and_nothing_else() -> None:
    trainer = Trainer(loss, averages.collect(optax.adam(0.05), start=3))
    state = trainer.init(created().with_kind("regression"))
    for batch in BATCHES:
        state, _ = trainer.step(state, batch)
    mean = averages.mean(state)
    data = Batches(np.concatenate(BATCHES), 18, key=jax.random.key(0))  # which never end
    found = averages.update_statistics(mean, data)
    assert found.kind == "regression"
    x = np.concatenate(BATCHES)
    order = np.asarray(data.order(0)).reshape(4, 18)
    for one, before in zip(found, mean, strict=True):
        hidden = [np.float64(x[rows] @ one.first.kernel[...]) for rows in order]
        np.testing.assert_allclose(one.norm.mean[...], np.mean([h.mean(0) for h in hidden], 0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(one.norm.var[...], np.mean([h.var(0) for h in hidden], 0), rtol=1e-4, atol=1e-5)
        assert not np.allclose(one.norm.mean[...], before.norm.mean[...], rtol=1e-2)
    dropping = Ensemble.create(Normed, 2, seed=0)
    again = averages.update_statistics(dropping, BATCHES)
    assert (again.rest["dropout"]["rngs"]["count"] == dropping.rest["dropout"]["rngs"]["count"]).all()
    still = averages.update_statistics(dropping.view(deterministic=True), BATCHES)
    assert not np.allclose(again.rest["norms"][1]["var"], still.rest["norms"][1]["var"], rtol=1e-2)


def test_statistics_that_cannot_be_updated_are_refused() -> None:
    api = "^averages.update_statistics: "
    with pytest.raises(ValueError, match=api + "batches has no examples"):
        averages.update_statistics(created(), iter([]))
    with pytest.raises(TypeError, match=api + "ensemble must be an Ensemble, but got"):
        averages.update_statistics(Net(nnx.Rngs(0)), BATCHES)
    with pytest.raises(
        TypeError, match=api + "the members are not NNX modules; for variables of Linen take steps of a"
    ):
        averages.update_statistics(Ensemble.from_apply(lambda w, x: w * x, [jnp.ones(4)]), BATCHES)
    with pytest.raises(ValueError, match=api + "in_axes must be None or 0, but got 1"):
        averages.update_statistics(created(), BATCHES, in_axes=1)
    shared = Ensemble.create(Net, SIZE, seed=0, shared=nnx.BatchStat)
    with pytest.raises(ValueError, match=api + "members share `norm.mean`; leave statistics out of shared="):
        averages.update_statistics(shared, BATCHES)

    class Own(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.net, self.seen = Net(rngs), nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x: Any) -> Any:
            self.seen[...] += len(x)
            return self.net(x)

    with pytest.raises(ValueError, match=api + "`seen` belongs to no nnx.BatchNorm"):
        averages.update_statistics(Ensemble.create(Own, 2, seed=0), BATCHES)
    without = Ensemble.create(lambda rngs: nnx.Linear(4, 2, rngs=rngs), 2, seed=0)
    assert averages.update_statistics(without, BATCHES) is without


def test_the_remedy_for_linen_updates_statistics() -> None:
    net = linen.BatchNorm(use_running_average=None)
    members = [net.init(jax.random.key(i), BATCHES[0], use_running_average=True) for i in range(2)]
    ens = Ensemble.from_apply(net.apply, members)

    def call(model: Any, x: Any) -> Any:
        model.call_and_update(x, use_running_average=False)
        return jnp.zeros(())

    trainer = Trainer(call, optax.set_to_zero())
    state = trainer.init(ens)
    for _ in range(4):
        state, _ = trainer.step(state, BATCHES[0])
    expected = (1 - 0.99**4) * BATCHES[0].mean(0)
    np.testing.assert_allclose(state.ensemble.rest["batch_stats"]["mean"], [expected] * 2, rtol=1e-3)
    close(state.ensemble.trainable, ens.trainable, rtol=0, atol=0)
