"""Callbacks of `Trainer.fit`, and the state that they can ask for."""

import functools
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plurax.ensemble import Batches, EarlyStopping, Ensemble, Restarts, Trainer
from plurax.ensemble._training.callbacks import takes_state
from plurax.transforms._runs import loop
from plurax.transforms._runs.source import Stacked


@pytest.fixture(scope="module")
def ens(stateful):
    return Ensemble.create(stateful, 5, seed=0)


def trainer_of(cross_entropy, **options):
    rates = {"learning_rate": [0.01, 0.02, 0.03, 0.04, 0.05]}
    return Trainer(cross_entropy, optax.adam, **{"hyperparams": rates, "strategy": "vmap", **options})


class Keep:
    """Ask for the state after some steps, or after each."""

    def __init__(self, steps=None):
        self.steps, self.states, self.called = steps, {}, []

    def __call__(self, step, metrics, state):
        self.called.append(step)
        if self.steps is None or step in self.steps:
            self.states[step] = state()


class Test_the_state:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "options",
        [{"strategy": "vmap", "chunk_size": 2}, *({"strategy": s} for s in ("vmap", "map", "unroll", "loop"))],
        ids=str,
    )
    def test_is_that_after_exactly_this_step(self, ens, cross_entropy, make_batches, assert_same, options):
        trainer, keep, seen = trainer_of(cross_entropy, **options), Keep(), []
        start = trainer.init(ens)
        last, history = trainer.fit(
            start, make_batches(9), progress=False, callbacks=[lambda step, metrics: seen.append(step), keep]
        )
        expected, rows = trainer.fit(start, make_batches(9), progress=False)
        assert_same(last, expected)
        assert history == rows
        assert seen == keep.called == list(range(1, 10))
        for step, state in keep.states.items():
            expected, _ = trainer.fit(start, make_batches(9), steps=step, progress=False)
            assert_same(state, expected)
        # It is a copy that later steps leave alone, and may be trained further.
        again, _ = trainer.fit(keep.states[4], make_batches(9)[4:], progress=False)
        assert_same(again, last)
        trainer.step(keep.states[4], make_batches(1)[0])

    def test_only_at_recorded_steps(self, ens, cross_entropy, make_batches, assert_same):
        trainer, keep = trainer_of(cross_entropy), Keep()
        start = trainer.init(ens)
        batch = make_batches(1)[0]
        trainer.fit(
            start,
            make_batches(11),
            progress=False,
            history_every=4,
            validation=batch,
            validate_every=6,
            callbacks=[keep],
        )
        assert list(keep.states) == [4, 6, 8]
        for step, state in keep.states.items():
            assert_same(state, trainer.fit(start, make_batches(11), steps=step, progress=False)[0])

    @pytest.mark.slow
    @pytest.mark.parametrize("k", [4, 6])
    def test_steps_per_call_keeps_recorded_steps(self, ens, cross_entropy, make_batches, assert_same, monkeypatch, k):
        trainer, keep, counts = trainer_of(cross_entropy), Keep(), []
        advance, start = trainer._stepper.advance, trainer.init(ens)

        def counted(state, batch, *args, **options):
            counts.append(batch.steps if isinstance(batch, Stacked) else 1)
            return advance(state, batch, *args, **options)

        monkeypatch.setattr(trainer._stepper, "advance", counted)
        options = {"steps_per_call": k, "history_every": 4, "progress": False}
        trainer.fit(start, make_batches(13), callbacks=[keep], **options)
        assert counts == {4: [4, 4, 4, 1], 6: [2] * 6 + [1]}[k]
        assert keep.called == [4, 8, 12]
        for step, state in keep.states.items():
            expected, _ = trainer.fit(start, make_batches(13), steps=step, progress=False)
            assert_same(state, expected, tolerance=1e-4)
        counts.clear()  # without a callback that takes the state, recorded steps may lie within a call
        trainer.fit(start, make_batches(12), callbacks=[lambda step, metrics: None], **options)
        assert counts == [k] * (12 // k)

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:Trainer.fit. member . stopped")
    @pytest.mark.parametrize("strategy", ["vmap", "loop"])
    def test_with_members_that_stop_leave_and_restart(self, ens, cross_entropy, make_batches, assert_same, strategy):
        """All members are in it, also those that have left, as in a checkpoint of that step."""
        trainer, keep = trainer_of(cross_entropy, in_axes=0, strategy=strategy), Keep()
        given = [tuple(np.array(x) for x in batch) for batch in make_batches(16, 5)]
        given[4][0][2] = np.nan
        start = trainer.init(ens)

        def options():
            def evaluate(members):
                rates = [x.item() for x in members.trainable["first"]["kernel"][:, 0, 0]]
                return np.arange(len(rates)) + 1.0

            return {
                "progress": False,
                "early_stopping": EarlyStopping(evaluate=evaluate, every=2, patience=2),
                "restarts": Restarts(every=6, times=1),
            }

        trainer.fit(start, given, callbacks=[keep], **options())
        assert keep.called
        for step, state in keep.states.items():
            assert len(state.ensemble) == 5
            expected, _ = trainer.fit(start, given, steps=step, **options())
            last = {"trainable": expected.last.trainable, "rest": expected.last.rest}
            assert_same(state, replace(expected, ensemble=replace(expected.ensemble, **last), last=None))

    def test_on_a_mesh(self, plain, cross_entropy, make_batches, assert_same):
        mesh = jax.make_mesh((1,), ("ensemble",))
        trainer, keep = Trainer(cross_entropy, optax.adam(0.01), strategy="vmap", mesh=mesh), Keep()
        start = trainer.init(Ensemble.create(plain, 3, seed=0))
        trainer.fit(start, make_batches(5), progress=False, callbacks=[keep])
        for step, state in keep.states.items():
            assert_same(state, trainer.fit(start, make_batches(5), steps=step, progress=False)[0])

    def test_is_refused_after_the_callback_has_returned(self, ens, cross_entropy, make_batches):
        kept = []
        trainer = trainer_of(cross_entropy)
        trainer.fit(
            trainer.init(ens),
            make_batches(2),
            progress=False,
            callbacks=[lambda step, metrics, state: kept.append(state)],
        )
        for step, state in enumerate(kept, 1):
            with pytest.raises(RuntimeError, match=rf"the state of step {step} is asked for after the callback has"):
                state()

    def test_a_callback_that_raises_ends_the_run(self, ens, cross_entropy, make_batches):
        kept = []

        def failing(step, metrics, state):
            kept.append(state)
            raise KeyError("mine")

        trainer = trainer_of(cross_entropy)
        with pytest.raises(KeyError, match="mine"):
            trainer.fit(trainer.init(ens), make_batches(2), progress=False, callbacks=[failing])
        with pytest.raises(RuntimeError, match="after the callback has returned"):
            kept[0]()

    def test_steps_are_dispatched_ahead_without_such_a_callback(self, ens, cross_entropy, make_batches):
        """The second step is dispatched before the first is recorded, unless a callback may ask for its state."""
        trainer = trainer_of(cross_entropy)

        def order(callback):
            events = []

            def source():
                for i, batch in enumerate(make_batches(5), 1):
                    events.append(("batch", i))
                    yield batch

            trainer.fit(trainer.init(ens), source(), progress=False, callbacks=[functools.partial(callback, events)])
            return events

        ahead = order(lambda events, step, metrics: events.append(("record", step)))
        assert ahead.index(("record", 1)) > ahead.index(("batch", 3))
        exact = order(lambda events, step, metrics, state: events.append(("record", step)))
        assert exact == [(what, i) for i in range(1, 6) for what in ("batch", "record")]

    def test_few_steps_are_queued_after_a_slow_callback(self, ens, cross_entropy, make_batches, monkeypatch):
        """Steps that were done while a callback was slow do not count as quick ones."""
        monkeypatch.setattr(loop, "_SECONDS", 15e-3)  # less than a step takes
        queued, most = 0, 0

        def source():
            nonlocal queued, most
            for batch in make_batches(1) * 60:
                queued += 1
                most = max(most, queued)
                yield batch

        def recorded(step, metrics):
            nonlocal queued
            queued -= 1
            if step % 20 == 1:
                time.sleep(0.5)

        def slow(model, x, y):
            big = jnp.full((1000, 1000), x.mean())
            loss, metrics = cross_entropy(model, x, y)
            return loss + 0 * (jnp.tanh(big @ big) @ big).sum(), metrics

        trainer = trainer_of(slow)
        trainer.fit(trainer.init(ens), source(), progress=False, callbacks=[recorded])
        assert most <= 12


def test_a_callback_takes_the_state_by_the_name_of_its_parameter():
    class Method:
        def __call__(self, step, metrics, state):
            pass

        def other(self, step, metrics, *, state=None):
            pass

    def only_others(step, metrics, *args, **kwargs):
        pass

    def positional(step, metrics, state, /):
        pass

    def plainly(step, metrics, state):
        pass

    assert takes_state(plainly)
    assert takes_state(Method())
    assert takes_state(Method().other)
    assert takes_state(functools.partial(lambda a, step, metrics, state: None, 1))
    assert not takes_state(only_others)
    assert not takes_state(positional)
    assert not takes_state(functools.partial(plainly, state=3))
    assert not takes_state(lambda step, metrics: None)
    assert not takes_state(print)
    assert not takes_state(np.add)


def test_a_bound_parameter_is_kept(ens, cross_entropy, make_batches):
    seen = []
    bound = functools.partial(lambda step, metrics, state: seen.append(state), state="mine")
    trainer = trainer_of(cross_entropy)
    trainer.fit(trainer.init(ens), make_batches(2), progress=False, callbacks=[bound])
    assert seen == ["mine", "mine"]


def test_after_a_resumption(tmp_path, ens, cross_entropy, make_batches, assert_same):
    trainer, keep = trainer_of(cross_entropy), Keep()
    start, options = trainer.init(ens), {"progress": False, "checkpoint_dir": tmp_path}
    trainer.fit(start, make_batches(7), steps=3, **options)
    trainer.fit(start, make_batches(7), callbacks=[keep], **options)
    assert keep.called == [4, 5, 6, 7]
    for step, state in keep.states.items():
        assert_same(state, trainer.fit(start, make_batches(7), steps=step, progress=False)[0])


def test_receives_the_values_of_a_validation(ens, cross_entropy, make_batches):
    told = {}
    batch, trainer = make_batches(1)[0], trainer_of(cross_entropy)
    source = Batches(make_batches(1, features=4, batch=20)[0], 6, key=jax.random.key(0))
    _, history = trainer.fit(
        trainer.init(ens),
        source,
        steps=5,
        progress=False,
        validation=batch,
        validate_every=2,
        metrics=lambda ens, x, y: {"count": len(ens), "number": jnp.arange(5)},
        callbacks=[lambda step, metrics: told.update({step: dict(metrics)})],
    )
    for row in history:
        for name, value in row.items():
            if name.startswith("validation"):
                assert told[row["step"]][name][row["member"]] == np.asarray(value, told[row["step"]][name].dtype)
    assert [("validation_loss" in told[step]) for step in range(1, 6)] == [False, True, False, True, False]
    np.testing.assert_array_equal(told[2]["validation_count"], [5] * 5)
    np.testing.assert_array_equal(told[2]["validation_number"], np.arange(5))
