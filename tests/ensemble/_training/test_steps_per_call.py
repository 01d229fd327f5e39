"""`Trainer.fit(steps_per_call=k)`: k steps as one program, with the results of single steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Batches, EarlyStopping, Ensemble, Restarts, Trainer
from plurax.transforms._runs.source import Source, Stacked, first_batch


def losses(history):
    return [(row["step"], row["member"], row["loss"]) for row in history]


def fit(trainer, ens, batches, **options):
    return trainer.fit(trainer.init(ens), batches, progress=False, **options)


def same_history(found, expected):
    assert [row[:2] for row in losses(found)] == [row[:2] for row in losses(expected)]
    np.testing.assert_allclose([row[2] for row in losses(found)], [row[2] for row in losses(expected)], rtol=1e-4)


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("options", "kind", "per_member"),
    [
        ({"strategy": "vmap"}, "stateful", False),
        ({"strategy": "vmap"}, "plain", True),
        ({"strategy": "vmap", "chunk_size": 2}, "stateful", True),
        ({"strategy": "map"}, "plain", False),
        ({"strategy": "unroll"}, "plain", True),
        ({"strategy": "loop"}, "stateful", False),
        ({"strategy": "loop"}, "plain", True),
    ],
    ids=str,
)
def test_equals_single_steps(request, create, cross_entropy, make_batches, assert_same, options, kind, per_member):
    """With states that change, 11 steps in calls of 4, and a last batch of another shape."""
    ens = create(request.getfixturevalue(kind), 3)
    batches = make_batches(11, 3) if per_member else make_batches(11)
    batches[-1] = jax.tree.map(lambda x: x[:, :5] if per_member else x[:5], batches[-1])
    rates = {"learning_rate": [0.01, 0.02, 0.03]}
    trainer = Trainer(cross_entropy, optax.adam, hyperparams=rates, in_axes=0 if per_member else None, **options)
    expected, rows = fit(trainer, ens, batches)
    found, history = fit(trainer, ens, batches, steps_per_call=4)
    assert_same(found, expected, tolerance=1e-4)
    same_history(history, rows)
    assert int(found.step) == 11


@pytest.mark.parametrize("strategy", ["vmap", "map", "loop"])
def test_convolutions_on_a_cpu_take_a_program_for_each_step(strategy, assert_same):
    """There XLA is slow at convolutions in a loop, thus several steps take several times as long in one program."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(2, 3, (3, 2), rngs=rngs)

        def __call__(self, x):
            return nnx.max_pool(self.conv(x), (2, 2), (2, 2)).mean((1, 2))

    trainer = Trainer(lambda model, x: jnp.mean((model(x) - 1) ** 2), optax.adam(0.1), strategy=strategy)
    ens = Ensemble.create(Net, 3, seed=0)
    batches = [np.asarray(jax.random.normal(jax.random.key(i), (4, 6, 5, 2))) for i in range(7)]
    expected, rows = fit(trainer, ens, batches)
    found, history = fit(trainer, ens, batches, steps_per_call=3)
    assert_same(found, expected, tolerance=0)
    assert losses(history) == losses(rows)
    start = trainer.init(ens)
    kept = start.ensemble(batches[0])
    trainer.fit(start, batches, steps_per_call=3, progress=False)  # which leaves its first state usable
    np.testing.assert_array_equal(start.ensemble(batches[0]), kept)


def test_takes_that_many_steps_in_a_call(plain, create, cross_entropy, make_batches, monkeypatch):
    trainer = Trainer(cross_entropy, optax.sgd(0.1), strategy="vmap")
    advance, counts = trainer._stepper.advance, []

    def counted(state, batch, *args, **options):
        counts.append(batch.steps if isinstance(batch, Stacked) else 1)
        return advance(state, batch, *args, **options)

    monkeypatch.setattr(trainer._stepper, "advance", counted)
    ens = create(plain, 2)
    state, _ = fit(trainer, ens, make_batches(20), steps=11, steps_per_call=4)
    assert counts == [4, 4, 1, 1, 1]
    counts.clear()
    trainer.fit(state, make_batches(9), steps_per_call=4, progress=False)  # from step 11 on
    assert counts == [1, 4, 4]
    counts.clear()
    stopping = EarlyStopping(evaluate=lambda members: np.zeros(len(members)), every=6, patience=100)
    fit(trainer, ens, make_batches(8), steps_per_call=4, early_stopping=stopping)
    assert counts == [2, 2, 2, 2]


def test_takes_no_batch_that_it_does_not_use(plain, create, cross_entropy, make_batches):
    source = iter(make_batches(20))
    trainer = Trainer(cross_entropy, optax.sgd(0.1), strategy="vmap")
    fit(trainer, create(plain, 2), source, steps=10, steps_per_call=4)
    assert len(list(source)) == 10


def test_a_loader_may_reuse_its_buffer(plain, create, assert_same):
    def loader():
        x = np.zeros((6, 4), np.float32)
        for i in range(8):
            x[:] = np.arange(24).reshape(6, 4) * (i + 1) / 100
            yield x

    trainer = Trainer(lambda model, x: jnp.mean((model(x) - 1) ** 2), optax.sgd(0.1), strategy="vmap")
    ens = create(plain, 2)
    expected, rows = fit(trainer, ens, [x.copy() for x in loader()])
    found, history = fit(trainer, ens, loader(), steps_per_call=4)
    assert_same(found, expected, tolerance=1e-5)
    same_history(history, rows)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["vmap", "loop"])
def test_a_member_that_fails_within_a_call_stops_there(plain, create, strategy):
    """And is restarted, if wanted, after the same step."""

    def loss(model, x, *, scale):
        return jnp.mean(model(x) ** 2) + jnp.where((x.sum() > 5.5) & (scale > 1), jnp.nan, 0.0)

    trainer = Trainer(loss, optax.sgd(0.01), hyperparams={"scale": [1.0, 2.0, 3.0]}, strategy=strategy)
    ens = create(plain, 3)
    batches = [np.full((1, 4), i / 4, np.float32) for i in range(1, 13)]  # the sum is the number of the step
    with pytest.warns(UserWarning, match="members 1, 2 stopped at step 6"):
        expected, rows = fit(trainer, ens, batches)
    seen = []
    with pytest.warns(UserWarning, match="members 1, 2 stopped at step 6"):
        found, history = fit(
            trainer,
            ens,
            batches,
            steps_per_call=4,
            callbacks=[lambda step, m: seen.append((step, np.isnan(m["loss"]).sum()))],
        )
    same_history([row for row in history if row["member"] == 0], [row for row in rows if row["member"] == 0])
    assert [row["step"] for row in history if row["member"] == 1] == [1, 2, 3, 4, 5, 6]
    assert seen == [(i, 0 if i < 6 else 2) for i in range(1, 13)]
    np.testing.assert_array_equal(found.standing.stopped, expected.standing.stopped)
    np.testing.assert_array_equal(found.standing.step, expected.standing.step)
    options = {"restarts": Restarts(every=4, times=2)}
    with pytest.warns(UserWarning, match="stopped at step"):
        expected, rows = fit(trainer, ens, batches, **options)
    with pytest.warns(UserWarning, match="stopped at step"):
        found, history = fit(trainer, ens, batches, steps_per_call=4, **options)
    assert [row[:2] for row in losses(history)] == [row[:2] for row in losses(rows)]
    np.testing.assert_array_equal(found.standing.restarts, expected.standing.restarts)


def test_early_stopping_sees_the_same_steps(plain, create, cross_entropy, make_batches, assert_same):
    def stopping(seen):
        def evaluate(members):
            seen.append(len(members))
            return np.arange(len(members)) * 1.0 + (len(seen) > 1) * np.arange(len(members))

        return EarlyStopping(evaluate=evaluate, every=4, patience=1)

    trainer = Trainer(cross_entropy, optax.sgd(0.1), strategy="vmap")
    ens, found = create(plain, 3), []
    for k in (1, 2, 4):
        found.append(fit(trainer, ens, make_batches(20), steps_per_call=k, early_stopping=stopping([])))
    for state, history in found[1:]:
        assert_same(state, found[0][0], tolerance=1e-5)
        assert [row[:2] for row in losses(history)] == [row[:2] for row in losses(found[0][1])]
        assert [row.get("validation") for row in history] == [row.get("validation") for row in found[0][1]]


@pytest.mark.slow
def test_a_resumed_run_repeats_the_calls_to_the_bit(tmp_path, stateful, create, cross_entropy, assert_same):
    data = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32), np.arange(40) % 3
    trainer = Trainer(cross_entropy, optax.adam(0.01), strategy="vmap")
    ens, batches = create(stateful, 3), Batches(data, 8, key=jax.random.key(1))
    expected, rows = fit(trainer, ens, batches, steps=23, steps_per_call=4)
    for steps in (9, 16, 23):  # ends within a call, at its end, and at the last step
        _, history = fit(
            trainer, ens, batches, steps=steps, steps_per_call=4, checkpoint_dir=tmp_path, checkpoint_every=8
        )
    # Step 9 was taken alone, and in a call otherwise, so only the steps until the checkpoint at 8 are equal.
    assert losses(history)[:24] == losses(rows)[:24]
    same_history(history, rows)
    again, history = fit(
        trainer,
        ens,
        batches,
        steps=23,
        steps_per_call=4,
        checkpoint_dir=tmp_path / "other",
        checkpoint_every=8,
        checkpoint_keep=9,
    )
    assert_same(again, expected)
    assert losses(history) == losses(rows)


@pytest.mark.slow
@pytest.mark.parametrize("members", [None, 3])
def test_batches_of_ours_are_gathered_for_a_whole_call(plain, create, cross_entropy, assert_same, monkeypatch, members):
    """Across epochs of three batches, where members leave the run, and for the last steps one by one."""
    data = np.random.default_rng(0).normal(size=(25, 4)).astype(np.float32), np.arange(25) % 3
    trainer = Trainer(cross_entropy, optax.adam(0.05), in_axes=None if members is None else 0, strategy="vmap")
    ens, batches = create(plain, 3), Batches(data, 8, key=jax.random.key(1), members=members)
    gathered, counts = Batches._gathered, []

    def counted(self, orders, i, count, stacked):
        counts.append(count if stacked else 0)
        return gathered(self, orders, i, count, stacked)

    def fitted(stops, **options):
        values = iter(range(100, 0, -1))
        # Member 0 stops after two evaluations, and leaves the run.
        early = EarlyStopping(
            every=10, patience=1, evaluate=lambda ensemble: np.array([0.0, 1.0, 1.0])[-len(ensemble) :] * next(values)
        )
        return fit(trainer, ens, batches, steps=53, early_stopping=early if stops else None, **options)

    for stops in (False, True):
        expected, rows = fitted(stops)
        with monkeypatch.context() as patch:
            counts.clear()
            patch.setattr(Batches, "_gathered", counted)
            found, history = fitted(stops, steps_per_call=5)
        assert counts[:10] == [5] * 10
        assert set(counts[10:]) == {0}
        assert_same(found, expected, tolerance=1e-4)
        same_history(history, rows)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_batches_become_one(kind, assert_same):
    """With numbers and None in them; those that differ in shape, structure or dtype are taken one by one."""
    batches = [{"x": kind(np.full((2, 3), i, np.float32)), "n": 0.5 * i, "none": None} for i in range(6)]
    batches += [{**batches[0], "x": kind(np.zeros((4, 3), np.float32))}, batches[1]]
    source = Source(iter(batches), lambda batch: batch)
    assert next(source) is batches[0]
    found = source.stacked(3)
    assert found.steps == 3
    assert_same(found.arrays["x"], np.stack([batch["x"] for batch in batches[1:4]]))
    np.testing.assert_array_equal(found.arrays["n"], [0.5, 1.0, 1.5])
    assert found.arrays["none"] is None
    assert_same(first_batch(found)["x"], batches[1]["x"])
    assert source.stacked(4) is None  # another shape
    jax.tree.map(np.testing.assert_array_equal, list(source), batches[4:])
    assert source.stacked(2) is None
    other = [{"x": kind(np.zeros(2, np.float32))}, {"x": kind(np.zeros(2, np.int32))}, {"y": kind(np.zeros(2))}]
    for pair in (other[:2], other[1:]):
        assert Source(iter(pair), lambda batch: batch).stacked(2) is None


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (2.0, TypeError), (None, TypeError), (True, TypeError)])
def test_refuses_other_counts(plain, create, cross_entropy, make_batches, value, error):
    trainer = Trainer(cross_entropy, optax.sgd(0.1))
    with pytest.raises(error, match=r"Trainer\.fit: steps_per_call"):
        fit(trainer, create(plain, 2), make_batches(2), steps_per_call=value)


def test_a_loss_with_random_keys_draws_the_same(assert_same):
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.dense, self.rngs = nnx.Linear(4, 1, rngs=rngs), rngs

        def __call__(self, x):
            return self.dense(x + jax.random.normal(self.rngs(), x.shape))

    trainer = Trainer(lambda model, x: jnp.mean(model(x) ** 2), optax.sgd(0.1), strategy="vmap")
    ens, batches = Ensemble.create(Noisy, 3, seed=0), [np.ones((5, 4), np.float32)] * 8
    expected, _ = fit(trainer, ens, batches)
    found, _ = fit(trainer, ens, batches, steps_per_call=8)
    assert_same(found, expected, tolerance=1e-5)
