"""Members that stop early and leave the run, and runs that resume after being killed."""

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import (
    EarlyStopping,
    Ensemble,
    Restarts,
    Trainer,
    from_orbax,
    load,
    load_member,
    save,
    select,
    to_orbax,
)


class Counter(nnx.Module):
    """Counts its steps and learns a little."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.steps = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.steps[...] += 1
        return self.dropout(self.linear(x))


def loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def batches(count, members=None):
    generator = np.random.default_rng(5)
    lead = () if members is None else (members,)
    return [tuple(generator.normal(size=(*lead, 4, n)).astype(np.float32) for n in (3, 2)) for _ in range(count)]


class Numbered(nnx.Module):
    """A `Counter` that stores its member's index."""

    def __init__(self, rngs):
        self.counter = Counter(rngs)
        self.number = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        return self.counter(x)


@functools.cache
def numbered(size):
    made = Ensemble.create(Numbered, size, seed=0)
    return dataclasses.replace(made, rest={**made.rest, "number": jnp.asarray(np.arange(size, dtype=np.float32))})


@functools.cache
def adam(in_axes=None, strategy="auto", chunk_size=None):
    """Return a trainer, the same one for the same options, so that tests share its programs."""
    return Trainer(loss, optax.adam(0.01), in_axes=in_axes, strategy=strategy, chunk_size=chunk_size)


def evaluate(turning_points):
    """Member i is best after `turning_points[i]` steps."""

    def of(ensemble):
        numbers = np.asarray(ensemble.rest["number"]).astype(int)
        seen.append(tuple(numbers))
        return np.abs(np.asarray(ensemble.rest["counter"]["steps"]) - np.asarray(turning_points)[numbers])

    seen: list[tuple[int, ...]] = []
    return of, seen


def arrays_of(state, i):
    return jax.tree.map(lambda x: x[i], (state.ensemble.trainable, state.ensemble.rest))


class Test_early_stopping:
    turning_points = (4, 30, 8, 2, 30, 6, 12, 30)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("strategy", "chunk_size", "in_axes"),
        [
            ("vmap", None, None),
            ("vmap", 3, 0),
            ("map", None, 0),
            ("unroll", None, None),
            ("loop", None, None),
            ("loop", None, 0),
        ],
    )
    def test_each_member_stops_on_its_own_and_gets_its_best_back(self, strategy, chunk_size, in_axes, assert_same):
        trainer = adam(in_axes, strategy, chunk_size)
        given = batches(24, None if in_axes is None else 8)
        start = trainer.init(numbered(8))
        found, seen = evaluate(self.turning_points)
        stopping = EarlyStopping(evaluate=found, every=2, patience=3)
        state, history = trainer.fit(start, given, progress=False, early_stopping=stopping)
        stops = [point + 6 for point in self.turning_points]
        np.testing.assert_array_equal(state.standing.stopped, [2 if stop <= 24 else 0 for stop in stops])
        np.testing.assert_array_equal(state.standing.step, [min(stop, 24) for stop in stops])
        for i, (point, stop) in enumerate(zip(self.turning_points, stops, strict=True)):
            rows = [row for row in history if row["member"] == i]
            assert [row["step"] for row in rows] == list(range(1, min(stop, 24) + 1))
            evaluated = [row["validation"] for row in rows if row["step"] % 2 == 0]
            assert evaluated == [abs(step - point) for step in range(2, min(stop, 24) + 1, 2)]
        # Stopped members have their best parameters; the others are as without early stopping.
        calm = {steps: trainer.fit(start, given, steps=steps, progress=False)[0] for steps in {4, 8, 12, 24}}
        for i, steps in ((0, 4), (2, 8), (6, 12), (1, 24), (4, 24), (7, 24)):
            assert_same(arrays_of(state, i), arrays_of(calm[steps], i), tolerance=1e-6)
        # Members leave once a quarter of those in the run have stopped.
        sizes = [len(members) for members in seen]
        assert sizes == sorted(sizes, reverse=True)
        assert set(sizes) == {8, 6, 4} or set(sizes) == {8, 6, 4, 3}
        assert set(seen[-1]) >= {1, 4, 7}

    @pytest.mark.slow
    def test_a_run_ends_when_all_have_stopped(self, capsys):
        trainer = adam()
        found, _ = evaluate((2, 4, 6))
        stopping = EarlyStopping(evaluate=found, every=2, patience=2)
        state, _ = trainer.fit(trainer.init(numbered(3)), batches(30), steps=30, early_stopping=stopping)
        shown = capsys.readouterr().err
        assert "Step 8: member 1 stopped, not better for 2 evaluations." in shown
        assert "All members have stopped after step 10, 20 steps before the 30 requested." in shown
        assert int(state.step) == 10
        np.testing.assert_array_equal(state.standing.step, [6, 8, 10])

    @pytest.mark.slow
    def test_larger_is_better_and_small_changes_do_not_count(self):
        values = iter([[1.0, 1.0], [1.05, 0.5], [1.3, np.nan], [1.2, 0.9], [1.35, 2.0], [1.3, 1.0]])
        stopping = EarlyStopping(
            evaluate=lambda ensemble: np.array(next(values))[: len(ensemble)],
            every=1,
            patience=3,
            mode="max",
            min_delta=np.float32(0.1),
            restore_best=False,
        )
        trainer = adam()
        state, _ = trainer.fit(trainer.init(numbered(2)), batches(6), progress=False, early_stopping=stopping)
        np.testing.assert_array_equal(state.standing.step, [6, 4])
        np.testing.assert_array_equal([m.counter.steps[...] for m in state.ensemble], [6, 4])

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:Trainer.fit. member . stopped")
    @pytest.mark.parametrize("strategy", ["vmap", "loop"])
    def test_resumes_in_another_run(self, tmp_path, strategy, assert_same):
        trainer = adam(0, strategy)
        given = [tuple(np.array(x) for x in batch) for batch in batches(24, 8)]
        given[12][0][1] = np.nan

        def run(**options):
            stopping = EarlyStopping(evaluate=evaluate(self.turning_points)[0], every=2, patience=3)
            return trainer.fit(
                start, given, progress=False, early_stopping=stopping, restarts=Restarts(every=3, times=1), **options
            )

        start = trainer.init(numbered(8))
        whole, history = run()
        for cut in (5, 10, 15, 19):
            directory = tmp_path / f"cut at {cut}"
            run(steps=cut, checkpoint_dir=directory)
            state, again = run(checkpoint_dir=directory)
            assert_same(state, whole)
            np.testing.assert_equal(again, history)
            assert_same(load(directory / "step_00000024", start), whole)

    @pytest.mark.slow
    def test_a_member_that_is_not_finite_leaves_too(self):
        trainer = adam(in_axes=0)
        given = [tuple(np.array(x) for x in batch) for batch in batches(8, 4)]
        given[2][0][1] = np.nan
        found, seen = evaluate((30, 30, 30, 30))
        with pytest.warns(UserWarning, match="member 1 stopped at step 3"):
            state, _ = trainer.fit(
                trainer.init(numbered(4)),
                given,
                progress=False,
                early_stopping=EarlyStopping(evaluate=found, every=2, patience=3),
            )
        assert seen[-1] == (0, 2, 3)
        np.testing.assert_array_equal(state.standing.stopped, [0, 1, 0, 0])
        assert len(state.ensemble) == 4

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"evaluate": 3}, TypeError, "evaluate must be a function, a bound method or a module, but got"),
            ({"every": 0}, ValueError, "every must be at least 1, but got 0"),
            ({"patience": 1.5}, TypeError, "patience must be an int, but got"),
            ({"min_delta": -1}, ValueError, "min_delta must be at least 0, but got -1"),
            ({"min_delta": "a"}, TypeError, "min_delta must be a number, but got"),
            ({"mode": "best"}, ValueError, "mode must be one of 'min', 'max', but got 'best'"),
        ],
    )
    def test_refusals(self, options, error, message):
        with pytest.raises(error, match=message):
            EarlyStopping(**{"evaluate": len, **options})

    def test_invalid_results_of_evaluate_are_refused(self):
        trainer = adam()
        start = trainer.init(numbered(3))
        for wrong in (lambda _: 1.0, lambda _: np.ones(2), lambda _: np.ones(3, bool), lambda _: np.ones(3, complex)):
            with pytest.raises(
                ValueError, match="evaluate must return one number for each of the 3 members in the run"
            ):
                trainer.fit(start, batches(2), progress=False, early_stopping=EarlyStopping(evaluate=wrong, every=1))
        with pytest.raises(TypeError, match="early_stopping must be of type EarlyStopping, but got"):
            trainer.fit(start, batches(2), early_stopping=5)


def own(state):
    """Return the arrays of the members, with the state of their optimizers."""
    return state.ensemble.trainable, state.ensemble.rest, state.opt_state


@pytest.fixture(scope="module")
def start():
    return adam(None, "vmap").init(numbered(3))


@pytest.fixture(scope="module")
def calm(start):
    """The states after each step, without early stopping."""
    states = {}
    options = {"callbacks": [lambda step, metrics, state: states.update({step: state()})]}
    adam(None, "vmap").fit(start, batches(16), progress=False, **options)
    return states


class Test_best_parameters_at_every_end:
    """Member i is best after `turning_points[i]` steps; one that is not yet worse has what it has at the end."""

    turning_points = (4, 30, 8)

    def stopping(self, **options):
        options = {"every": 2, "patience": 3, **options}
        return EarlyStopping(evaluate=evaluate(self.turning_points)[0], **options)

    def fit(self, state, given, **options):
        options = {"early_stopping": self.stopping(), "progress": False, **options}
        return adam(None, "vmap").fit(state, given, **options)

    def check(self, state, calm, steps, assert_same):
        assert int(state.step) == steps
        for i, point in enumerate(self.turning_points):
            best = min(point, steps - steps % 2)
            assert_same(arrays_of(state, i), arrays_of(calm[best], i), tolerance=1e-6)

    @pytest.mark.parametrize("steps", [1, 5, 9, 13, 16])
    def test_the_last_step(self, steps, start, calm, assert_same):
        if steps == 1:  # no evaluation yet
            state, _ = self.fit(start, batches(16), steps=1)
            assert_same(state.ensemble, calm[1].ensemble)
            return
        state, _ = self.fit(start, batches(16), steps=steps)
        self.check(state, calm, steps, assert_same)

    def test_all_patience_ends(self, start, calm, assert_same):
        state, _ = self.fit(start, batches(40), early_stopping=self.stopping(patience=1), steps=10)
        self.check(state, calm, 10, assert_same)
        np.testing.assert_array_equal(state.standing.stopped, [2, 0, 2])

    def test_ctrl_c(self, start, calm, assert_same):
        def interrupting():
            """Interrupt where a batch is read, since callbacks see a step some steps later."""
            for i, batch in enumerate(batches(16)):
                if i == 8:
                    os.kill(os.getpid(), signal.SIGINT)
                yield batch

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            state, _ = self.fit(start, interrupting(), steps=16)
        finally:
            signal.signal(signal.SIGINT, before)
        assert 6 <= int(state.step) < 12
        self.check(state, calm, int(state.step), assert_same)

    def test_patience_does_not_decide_what_is_returned(self, start, assert_same):
        """As long as no member has stopped."""
        few, _ = self.fit(start, batches(16), early_stopping=self.stopping(patience=7))
        many, _ = self.fit(start, batches(16), early_stopping=self.stopping(patience=1000))
        assert_same(few, many)
        assert few.last is not None

    def test_without_restoring_the_last_parameters_stay(self, start, calm, assert_same):
        options = {"early_stopping": self.stopping(restore_best=False, patience=4)}
        state, _ = self.fit(start, batches(9), **options)
        assert state.last is None
        assert_same(state, calm[9], tolerance=1e-6)
        after, _ = self.fit(state, batches(16)[9:], **options)
        np.testing.assert_array_equal(after.standing.stopped, [0, 0, 0])  # the patience has begun anew

    def test_it_goes_on_from_the_last_step(self, start, calm, assert_same):
        """By `step`, and by `fit` without early stopping; `ensemble` then is that of the last step."""
        given, trainer = batches(16), adam(None, "vmap")
        state, _ = self.fit(start, given, steps=9)
        one, _ = trainer.step(state, given[9])
        assert one.last is None
        assert_same(own(one), own(calm[10]), tolerance=1e-6)
        more, _ = trainer.fit(state, given[9:], progress=False)
        assert more.last is None
        assert_same(own(more), own(calm[16]), tolerance=1e-6)
        again, _ = trainer.step(dataclasses.replace(state, last=None), given[9])  # from the best ones
        np.testing.assert_array_equal([m.counter.steps[...] for m in again.ensemble], [5, 9, 9])

    @pytest.mark.parametrize("cut", [1, 6, 9, 11, 15])
    def test_a_run_in_two_equals_the_whole_one_to_the_bit(self, cut, start, assert_same, tmp_path):
        """Handed over in memory, by files, and by checkpoints; member 0 stops at step 10, and leaves."""
        given = batches(16)
        whole, rows = self.fit(start, given)
        half, first = self.fit(start, given, steps=cut, checkpoint_dir=tmp_path / "run")
        save(tmp_path / "saved", half)
        to_orbax(tmp_path / "orbax", half)
        for state in (half, load(tmp_path / "saved", start), load(tmp_path / "saved", half)):
            assert_same(state, half)
        found = from_orbax(tmp_path / "orbax", start)
        assert_same(jax.tree.leaves(found), jax.tree.leaves(half))  # Orbax has no place for the criterion
        assert found.last.criterion == ""
        assert_same(load(tmp_path / "run" / f"step_{cut:08d}", start), half)
        after, second = self.fit(load(tmp_path / "saved", start), given[cut:])
        assert_same(after, whole)
        np.testing.assert_equal(first + second, rows)
        for name, state, left in (("start", start, given), ("half", half, given[cut:])):
            shutil.copytree(tmp_path / "run", tmp_path / name)
            after, history = self.fit(state, left, checkpoint_dir=tmp_path / name)
            assert_same(after, whole)
            np.testing.assert_equal(history, rows)

    def test_another_criterion_does_not_compare_with_the_values_of_the_first(self, start, tmp_path):
        state, _ = self.fit(start, batches(9))
        save(tmp_path / "state", state)
        other = {"early_stopping": self.stopping(mode="max", patience=30)}
        for given in (state, load(tmp_path / "state", start)):
            match = "^Trainer.fit: `state` has the best parameters by the min of a function, not by the max of a func"
            with pytest.raises(ValueError, match=match):
                self.fit(given, batches(16)[9:], **other)
        after, _ = self.fit(dataclasses.replace(state, last=None), batches(16)[9:], **other)  # from 4, 8 and 8
        np.testing.assert_array_equal(after.last.rest["counter"]["steps"], [11, 15, 15])
        np.testing.assert_array_equal(after.last.values, [7, 21, 7])
        np.testing.assert_array_equal(after.ensemble.rest["counter"]["steps"], [11, 9, 15])

    def test_files_and_selections_have_the_best_ones_too(self, start, calm, assert_same, tmp_path):
        state, _ = self.fit(start, batches(9), checkpoint_dir=tmp_path)
        path = tmp_path / "step_00000009"
        assert_same(load(path, start.ensemble), state.ensemble)
        for like in (start, start.ensemble, start.ensemble[0]):
            assert_same(load_member(path, 2, like), state.ensemble[2])
        chosen = select(state, [2, 0])
        assert_same(chosen.ensemble, select(state.ensemble, [2, 0]))
        after, _ = adam(None, "vmap").step(chosen, batches(10)[9])
        assert_same(own(after), own(select(calm[10], [2, 0])), tolerance=1e-6)

    def test_a_run_that_did_not_keep_the_best_begins_to(self, start, tmp_path):
        """Its values had no parameters."""
        given = batches(16)
        self.fit(start, given[:9], checkpoint_dir=tmp_path, early_stopping=self.stopping(restore_best=False))
        state, _ = self.fit(start, given, checkpoint_dir=tmp_path)
        np.testing.assert_array_equal(state.ensemble.rest["counter"]["steps"], [10, 16, 10])


class Test_callbacks:
    def test_receive_each_recorded_step(self):
        told = []
        trainer = Trainer(lambda m, x, y: (loss(m, x, y), {"count": 3}), optax.adam(0.01), in_axes=0)
        given = [tuple(np.array(x) for x in batch) for batch in batches(6, 3)]
        given[2][0][1] = np.nan
        with pytest.warns(UserWarning, match="member 1 stopped at step 3"):
            _, history = trainer.fit(
                trainer.init(numbered(3)),
                given,
                progress=False,
                history_every=2,
                callbacks=[lambda step, metrics: told.append((step, dict(metrics)))],
            )
        assert [step for step, _ in told] == [2, 4, 6]
        for step, metrics in told:
            of_step = {row["member"]: row for row in history if row["step"] == step}
            for name in ("loss", "count"):
                expected = [of_step[i][name] if i in of_step else np.nan for i in range(3)]
                np.testing.assert_array_equal(metrics[name], np.float32(expected))

    def test_are_refused(self):
        trainer = adam()
        for wrong in (print, [3]):
            with pytest.raises(TypeError, match="callbacks must be a list of functions, but got"):
                trainer.fit(trainer.init(numbered(2)), [], callbacks=wrong)


# A run that is killed repeatedly. One process imports everything once, and each run is a fork of it.

STEPS = 160


def one_run(directory, every=2, told=None):
    """Run with frequent checkpoints; members fail, restart, stop early and leave."""
    trainer = adam(0, "vmap")
    given = [tuple(np.array(x) for x in batch) for batch in batches(STEPS, 6)]
    given[20][0][2] = given[90][0][4] = np.nan

    found, _ = evaluate((4, 200, 200, 10, 200, 200))
    return trainer.fit(
        trainer.init(numbered(6)),
        given,
        progress=False,
        checkpoint_dir=directory,
        checkpoint_every=every,
        early_stopping=EarlyStopping(evaluate=found, every=20, patience=3),
        restarts=Restarts(every=30, times=1),
        callbacks=[lambda step, metrics: os.write(told, b"a step\n")] if told else [],
    )


def kill_again_and_again(directory, kills):
    """Start a run and kill it, until it went on several times and was killed while writing, at most `kills` times.

    Print the steps reached, and how often it was killed while writing.
    """
    generator = np.random.default_rng(0)
    reached: list[int] = []
    writing = 0
    while len(reached) < kills and not (writing and len(reached) >= 8 and len(set(reached)) > 5):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            one_run(directory, told=write)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as lines:
            for _ in range(generator.integers(1, 7)):  # started, and far from its end
                lines.readline()
            time.sleep(float(generator.uniform(0, 0.03)))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        reached.append(max((int(path.name[5:]) for path in Path(directory).glob("step_*")), default=0))
        writing += any(Path(directory).glob(".step_*.unfinished"))
    os.write(1, json.dumps([reached, writing]).encode())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Trainer.fit. member . stopped")
def test_a_run_killed_many_times_gives_the_same_result(tmp_path, assert_same):
    command = [sys.executable, "-W", "ignore", __file__, str(tmp_path / "killed"), "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    reached, writing = json.loads(done.stdout.splitlines()[-1])
    assert writing  # some were killed while writing a checkpoint
    assert reached == sorted(reached)  # every named checkpoint is complete, and none is lost
    assert len(set(reached)) > 5
    assert 0 < reached[-1] < STEPS
    state, history = one_run(tmp_path / "killed", 40)
    assert not list((tmp_path / "killed").glob(".*"))  # no partial files are left
    whole, expected = one_run(tmp_path / "whole", 40)
    assert_same(state, whole)
    np.testing.assert_equal(history, expected)
    np.testing.assert_array_equal(whole.standing.stopped, [2, 0, 0, 2, 0, 0])
    np.testing.assert_array_equal(whole.standing.restarts, [0, 0, 1, 0, 1, 0])


if __name__ == "__main__":
    kill_again_and_again(sys.argv[1], int(sys.argv[2]))
