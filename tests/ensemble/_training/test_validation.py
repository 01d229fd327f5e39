"""Validation between the steps of `Trainer.fit`, and early stopping by the name of its values."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from plurax.ensemble import Batches, EarlyStopping, Ensemble, Restarts, TensorBoard, Trainer, metrics

SIZE = 5
RATES = {"learning_rate": [0.01, 0.02, 0.03, 0.04, 0.05]}
GENERATOR = np.random.default_rng(3)
X = GENERATOR.normal(size=(23, 4)).astype(np.float32)
Y = GENERATOR.integers(0, 3, 23).astype(np.int32)


class Net(nnx.Module):
    """With batch statistics and dropout, which only evaluation mode leaves unchanged."""

    def __init__(self, rngs):
        self.first = nnx.Linear(4, 6, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.second = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


def loss(model, x, y):
    logits = model(x)
    value = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return value, {"accuracy": (logits.argmax(-1) == y).mean()}


def scores(ens, x, y):
    p = ens.predict(x, kind="classification")
    return {"accuracy": metrics.accuracy(p.members, y), "nll": metrics.nll(p.mean, y)}


def batches(count, members=None):
    generator = np.random.default_rng(7)
    lead = () if members is None else (members,)
    shapes = [((*lead, 6, 4), (*lead, 6))] * count
    return [
        (generator.normal(size=x).astype(np.float32), generator.integers(0, 3, y).astype(np.int32)) for x, y in shapes
    ]


@pytest.fixture(scope="module")
def ens():
    return Ensemble.create(Net, SIZE, seed=0)


@functools.cache
def trainer_of(**options):
    """Return a trainer, the same one for the same options, so that tests share its programs."""
    return Trainer(loss, optax.adam, **{"hyperparams": RATES, "strategy": "vmap", **options})


def fit(trainer, ens, source, **options):
    return trainer.fit(trainer.init(ens), source, progress=False, **options)


def by_step(history, name):
    """Return the values of a column: a dict from steps to arrays with a value for each member."""
    found: dict[int, list[float]] = {}
    for row in history:
        if name in row:
            found.setdefault(row["step"], []).append(row[name])
    return {step: np.float32(values) for step, values in found.items()}


def expected_losses(ens, x, y):
    """Return the losses of all members, one after another, in evaluation mode."""
    members = [nnx.view(member, deterministic=True, use_running_average=True) for member in ens]
    return np.float32([loss_of_one(member, x, y)[0] for member in members])


loss_of_one = nnx.jit(loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"strategy": "vmap", "chunk_size": 2}, *({"strategy": s} for s in ("auto", "vmap", "map", "unroll", "loop"))],
    ids=str,
)
def test_is_that_of_each_member_and_changes_nothing(ens, options, assert_same):
    trainer, source = trainer_of(**options), batches(7)
    state, history = fit(trainer, ens, source, validation=(X, Y), validate_every=3, metrics=scores)
    plain, rows = fit(trainer, ens, source)
    assert_same(state, plain)
    columns = {"step", "member", "learning_rate", "loss", "accuracy"}
    assert [{name: row[name] for name in columns} for row in history] == rows
    for step in (3, 6):
        there, _ = fit(trainer, ens, source, steps=step)
        np.testing.assert_allclose(
            by_step(history, "validation_loss")[step], expected_losses(there.ensemble, X, Y), rtol=1e-5
        )
        of_ensemble = scores(there.ensemble, X, Y)
        np.testing.assert_allclose(by_step(history, "validation_accuracy")[step], of_ensemble["accuracy"], rtol=1e-6)
        np.testing.assert_allclose(by_step(history, "validation_nll")[step], [of_ensemble["nll"]] * SIZE, rtol=1e-5)
    assert by_step(history, "validation_loss").keys() == {3, 6}


def test_rows_are_recorded_at_every_validation(ens):
    _, history = fit(trainer_of(), ens, batches(7), validation=(X, Y), validate_every=2, history_every=3)
    assert sorted({row["step"] for row in history}) == [2, 3, 4, 6]
    assert [row["step"] for row in history if "validation_loss" in row][::SIZE] == [2, 4, 6]


def test_steps_are_those_of_the_state(ens):
    trainer = trainer_of()
    state, _ = fit(trainer, ens, batches(3))
    _, history = trainer.fit(state, batches(6), validation=(X, Y), validate_every=4, progress=False)
    assert list(by_step(history, "validation_loss")) == [4, 8]


@pytest.mark.slow
@given(cuts=st.sets(st.sampled_from([1, 2, 12, 22]), max_size=3))
def test_several_batches_are_averaged_by_their_examples(ens, cuts):
    parts = [(X[a:b], Y[a:b]) for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), 23], strict=True)]

    def summed(ens, x, y):
        first, second = np.asarray(x).mean(0)[:2]
        return {"first": first, "half": jnp.full(SIZE, second, jnp.bfloat16), "n": len(x)}

    trainer = TRAINER
    _, whole = fit(trainer, ens, batches(2), validation=(X, Y), validate_every=2, metrics=summed)
    _, history = fit(trainer, ens, batches(2), validation=parts, validate_every=2, metrics=summed)
    for name, atol in (("loss", 1e-6), ("first", 1e-6), ("half", 1e-2)):
        expected = by_step(whole, f"validation_{name}")[2]
        np.testing.assert_allclose(by_step(history, f"validation_{name}")[2], expected, rtol=1e-5, atol=atol)
    sizes = np.array([len(x) for x, _ in parts])
    np.testing.assert_allclose(by_step(history, "validation_n")[2], sizes @ sizes / 23, rtol=1e-6)


TRAINER = Trainer(loss, optax.sgd(0.1), strategy="vmap")


class Loader:
    """A data loader that can be iterated again, and reuses its buffer."""

    def __init__(self, parts):
        self.parts, self.passes = parts, 0

    def __iter__(self):
        self.passes += 1
        buffer = np.empty_like(self.parts[0][0])
        for x, y in self.parts:
            buffer[: len(x)] = x
            yield [buffer[: len(x)], y]


def test_sources_of_batches(ens):
    parts = [(X[:10], Y[:10]), (X[10:20], Y[10:20]), (X[20:], Y[20:])]
    loader = Loader(parts)
    trainer, source = trainer_of(), batches(4)
    expected = by_step(fit(trainer, ens, source, validation=parts, validate_every=2)[1], "validation_loss")
    found = by_step(fit(trainer, ens, source, validation=loader, validate_every=2)[1], "validation_loss")
    np.testing.assert_equal(found, expected)
    assert loader.passes == 2
    all_in_one = Batches((X, Y), 23, key=jax.random.key(0), epochs=1)
    found = by_step(fit(trainer, ens, source, validation=all_in_one, validate_every=2)[1], "validation_loss")
    for step in (2, 4):
        np.testing.assert_allclose(found[step], expected[step], rtol=1e-5)


def test_one_batch_may_be_of_any_structure(plain):
    def of_dict(model, batch):
        return jnp.mean((model(batch["x"]) - batch["scale"]) ** 2)

    data = {"x": X, "scale": 2.0}
    trainer = Trainer(of_dict, optax.sgd(0.1), strategy="vmap")
    ens = Ensemble.create(plain, 2, seed=0)
    state, history = fit(trainer, ens, [data] * 2, validation=data, validate_every=2)
    np.testing.assert_allclose(
        by_step(history, "validation_loss")[2], [nnx.jit(of_dict)(member, data) for member in state.ensemble], rtol=1e-5
    )
    trainer = Trainer(lambda model, x: jnp.mean(model(x) ** 2), optax.sgd(0.1), strategy="vmap")
    state, history = fit(trainer, ens, [X] * 2, validation=X, validate_every=2)
    np.testing.assert_allclose(
        by_step(history, "validation_loss")[2], [jnp.mean(member(X) ** 2) for member in state.ensemble], rtol=1e-5
    )


def test_later_changes_of_the_data_do_not_matter(ens):
    x, changed = X.copy(), []

    def metric(ens, x_seen, y):
        changed.append(np.asarray(x_seen).copy())
        x[:] = 0
        return {}

    _, history = fit(trainer_of(), ens, batches(4), validation=(x, Y), validate_every=2, metrics=metric)
    _, expected = fit(trainer_of(), ens, batches(4), validation=(X, Y), validate_every=2)
    np.testing.assert_equal(history, expected)
    np.testing.assert_array_equal(changed, [X, X])


@pytest.mark.parametrize("strategy", ["vmap", "map", "loop"])
class Test_batches_for_each_member:
    @pytest.mark.slow
    def test_data_that_all_share(self, ens, strategy):
        trainer, source = trainer_of(in_axes=0, strategy=strategy), batches(4, SIZE)
        state, history = fit(trainer, ens, source, validation=(X, Y), validate_every=4, metrics=scores)
        found = by_step(history, "validation_loss")[4]
        np.testing.assert_allclose(found, expected_losses(state.ensemble, X, Y), rtol=1e-5)

    @pytest.mark.slow
    @pytest.mark.parametrize("in_axes", [0, (-3, -2)])
    def test_data_of_each(self, ens, strategy, in_axes):
        trainer, source = trainer_of(in_axes=in_axes, strategy=strategy), batches(4, SIZE)
        x = GENERATOR.normal(size=(SIZE, 7, 4)).astype(np.float32)
        y = GENERATOR.integers(0, 3, (SIZE, 7))
        parts = [(x[:, :5], y[:, :5]), (x[:, 5:], y[:, 5:])]
        for validation in ((x, y), parts):
            state, history = fit(trainer, ens, source, validation=validation, validate_every=4)
            expected = [expected_losses(state.ensemble[i : i + 1], x[i], y[i])[0] for i in range(SIZE)]
            np.testing.assert_allclose(by_step(history, "validation_loss")[4], expected, rtol=1e-5)

    @pytest.mark.slow
    def test_labels_of_each(self, ens, strategy):
        trainer = trainer_of(in_axes=0, strategy=strategy)
        y = GENERATOR.integers(0, 3, (SIZE, 23))
        state, history = fit(trainer, ens, batches(2, SIZE), validation=(X, y), validate_every=2)
        expected = [expected_losses(state.ensemble[i : i + 1], X, y[i])[0] for i in range(SIZE)]
        np.testing.assert_allclose(by_step(history, "validation_loss")[2], expected, rtol=1e-5)

    def test_other_shapes_are_refused_before_the_first_step(self, ens, strategy):
        trainer, taken = trainer_of(in_axes=0, strategy=strategy), []
        wrong = GENERATOR.normal(size=(SIZE + 1, 23, 4)).astype(np.float32)
        message = r"`validation\[0\]` is an array of shape \(6, 23, 4\) .* it needs 2 axes .* or 3 with 5 slices along"
        with pytest.raises(ValueError, match=message):
            fit(
                trainer,
                ens,
                batches(4, SIZE),
                validation=(wrong, Y),
                validate_every=2,
                callbacks=[lambda *_: taken.append(1)],
            )
        with pytest.raises(ValueError, match="validation has structure .* but a batch has"):
            fit(trainer, ens, batches(4, SIZE), validation=X, validate_every=2)
        assert taken == []


def test_hyperparameters_of_the_loss_are_those_of_the_member(plain):
    def scaled(model, x, *, scale):
        return scale * jnp.mean(model(x) ** 2)

    trainer = Trainer(scaled, optax.sgd(0.01), hyperparams={"scale": [1.0, 2.0]}, strategy="vmap")
    state, history = fit(trainer, Ensemble.create(plain, 2, seed=0), [X] * 2, validation=X, validate_every=2)
    expected = [scale * jnp.mean(member(X) ** 2) for scale, member in zip((1, 2), state.ensemble, strict=True)]
    np.testing.assert_allclose(by_step(history, "validation_loss")[2], expected, rtol=1e-5)


def test_a_loss_that_draws_or_counts_leaves_the_state(assert_same):
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.dense, self.rngs = nnx.Linear(4, 1, rngs=rngs), rngs
            self.calls = nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1
            return self.dense(x + jax.random.normal(self.rngs(), x.shape))

    trainer = Trainer(lambda model, x: jnp.mean(model(x) ** 2), optax.sgd(0.1), strategy="vmap")
    ens = Ensemble.create(Noisy, 3, seed=0)
    assert_same(fit(trainer, ens, [X] * 4, validation=X, validate_every=1)[0], fit(trainer, ens, [X] * 4)[0])


@pytest.mark.slow
def test_linen_and_functions():
    from flax import linen

    class Linen(linen.Module):
        @linen.compact
        def __call__(self, x, train):
            x = linen.BatchNorm(use_running_average=not train)(linen.Dense(5)(x))
            return linen.Dense(3)(linen.Dropout(0.3, deterministic=not train)(x))

    module = Linen()
    init = jax.jit(functools.partial(module.init, train=False))
    variables = [init(jax.random.key(i), X) for i in range(3)]

    def of_linen(model, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model(x, train=False), y).mean()

    ens = Ensemble.from_apply(module.apply, variables)
    trainer = Trainer(of_linen, optax.adam(0.01), strategy="vmap")

    def metric(ens, x, y):
        return {"accuracy": metrics.accuracy(ens.predict(x, train=False, kind="classification").members, y)}

    state, history = fit(trainer, ens, batches(3), validation=(X, Y), validate_every=3, metrics=metric)
    np.testing.assert_allclose(
        by_step(history, "validation_loss")[3], [of_linen(m, X, Y) for m in state.ensemble], rtol=1e-5
    )
    assert by_step(history, "validation_accuracy")[3].shape == (3,)


@pytest.mark.slow
def test_equinox():
    eqx = pytest.importorskip("equinox")
    models = [eqx.nn.MLP(4, 3, 5, 1, key=jax.random.key(i)) for i in range(3)]
    ens = Ensemble.from_apply(lambda model, x: jax.vmap(model)(x), models)

    def of_equinox(model, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    trainer = Trainer(of_equinox, optax.adam(0.01), strategy="vmap")
    state, history = fit(trainer, ens, batches(3), validation=(X, Y), validate_every=3)
    np.testing.assert_allclose(
        by_step(history, "validation_loss")[3], [of_equinox(m, X, Y) for m in state.ensemble], rtol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_call", [3, 4, 12])
def test_steps_per_call_keeps_the_steps(ens, steps_per_call):
    options = {"validation": (X, Y), "validate_every": 4, "metrics": scores}
    _, expected = fit(trainer_of(), ens, batches(12), **options)
    _, history = fit(trainer_of(), ens, batches(12), steps_per_call=steps_per_call, **options)
    for name in ("validation_loss", "validation_nll"):
        found, wanted = by_step(history, name), by_step(expected, name)
        assert list(found) == list(wanted) == [4, 8, 12]
        np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-4)


class Test_refusals:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"validation": (X, Y)}, ValueError, "validate_every is needed without epochs"),
            ({"validate_every": 2}, ValueError, "validate_every needs validation data; pass validation="),
            ({"metrics": scores}, ValueError, "metrics needs validation data; pass validation="),
            ({"validation": (X, Y), "validate_every": 0}, ValueError, "validate_every must be at least 1, but got 0"),
            ({"validation": (X, Y), "validate_every": 1.5}, TypeError, "validate_every must be an int or None"),
            ({"validation": (X, Y), "metrics": 3, "validate_every": 1}, TypeError, "metrics must be a function"),
            ({"validation": iter([(X, Y)]), "validate_every": 1}, TypeError, "validation can be iterated only once"),
            ({"validation": ((x, Y) for x in [X]), "validate_every": 1}, TypeError, "can be iterated only once"),
            (
                {"validation": [X, Y], "validate_every": 1},
                ValueError,
                r"is a list of arrays, .* pass a tuple, \(x, y\)",
            ),
            ({"validation": [], "validate_every": 1}, ValueError, "validation is an empty list"),
            ({"validation": ("a", Y), "validate_every": 1}, TypeError, r"`validation\[0\]` is 'a' of type str"),
        ],
    )
    def test_before_training(self, ens, options, error, message):
        with pytest.raises(error, match=message):
            fit(trainer_of(), ens, batches(2), **options)

    def test_endless_batches_and_those_of_other_members(self, ens):
        key = jax.random.key(0)
        with pytest.raises(ValueError, match="the Batches of validation never end; pass epochs=1"):
            fit(trainer_of(), ens, batches(2), validation=Batches((X, Y), 4, key=key), validate_every=1)
        each = Batches((X, Y), 4, key=key, epochs=1, members=5)
        with pytest.raises(ValueError, match="of validation have members=5, but the trainer has in_axes=None"):
            fit(trainer_of(), ens, batches(2), validation=each, validate_every=1)

    def test_data_that_the_loss_does_not_take_before_the_first_step(self, ens):
        called = []
        with pytest.raises(TypeError, match="dot_general"):
            fit(
                trainer_of(),
                ens,
                batches(4),
                validation=(X[:, :3], Y),
                validate_every=4,
                callbacks=[lambda *_: called.append(1)],
            )
        assert called == []

    @pytest.mark.parametrize(
        ("found", "error", "message"),
        [
            (3.0, TypeError, "metrics must return a dict from names to arrays, but it returned 3.0"),
            (
                {"a": np.ones(4)},
                ValueError,
                r"one number for each of the 5 members, .* but 'a' is an array of shape \(4,\)",
            ),
            ({"a": np.ones((5, 1))}, ValueError, r"but 'a' is an array of shape \(5, 1\)"),
            ({"a": np.ones(5, complex)}, ValueError, "but 'a' is an array of shape .* and dtype complex128"),
            ({"a": "b"}, ValueError, "but 'a' is 'b' of type str"),
            ({"a": None}, ValueError, "but 'a' is None"),
            ({"a": {"b": 1.0}}, ValueError, "but 'a' is .* of type dict"),
            ({"a": [1.0, [2.0]]}, ValueError, "but 'a' is .* of type list"),
            ({1: np.ones(5)}, TypeError, "the names that metrics returns must be strings, but one is 1"),
            ({"": 1.0}, TypeError, "must be strings, but one is ''"),
            ({"loss": np.ones(5)}, ValueError, 'metrics returns a value named "loss"'),
        ],
    )
    def test_results_of_metrics(self, ens, found, error, message):
        with pytest.raises(error, match=message):
            fit(trainer_of(), ens, batches(2), validation=(X, Y), validate_every=1, metrics=lambda *_: found)

    def test_names_in_use(self, ens):
        def reporting(model, x, y):
            return loss(model, x, y)[0], {"validation_a": x.mean()}

        trainer = Trainer(reporting, optax.sgd(0.1), strategy="vmap")
        with pytest.raises(ValueError, match="the history would have two values named 'validation_a'; rename one"):
            fit(trainer, ens, batches(2), validation=(X, Y), validate_every=1, metrics=lambda *_: {"a": 1.0})
        _, history = fit(trainer, ens, batches(2), validation=(X, Y), validate_every=1, metrics=lambda *_: {"b": 1.0})
        assert {"validation_a", "validation_b"} <= history[0].keys()

    def test_several_batches(self, ens):
        source, options = batches(2), {"validate_every": 1}
        of_any = Trainer(lambda model, x, y: jnp.mean(model(x) ** 2), optax.sgd(0.1))
        with pytest.raises(ValueError, match=r"count by their examples, but one has the lengths \[4, 5\]"):
            fit(of_any, ens, source, validation=[(X, Y), (X[:4], Y[:5])], **options)
        found = iter([{"a": 1.0}, {"b": 1.0}])
        named = r"\['a', 'loss'\] and \['b', 'loss'\]"
        with pytest.raises(ValueError, match=f"the same names for each batch, but got {named}"):
            fit(trainer_of(), ens, source, validation=[(X, Y)] * 2, metrics=lambda *_: next(found), **options)

        class Once:
            passes = 0

            def __iter__(self):
                self.passes += 1
                return iter([(X, Y)] if self.passes == 1 else [])

        with pytest.raises(ValueError, match="validation has no batches; pass batches that can be iterated at each"):
            fit(trainer_of(), ens, source, validation=Once(), **options)


def test_the_bar_shows_the_latest_values(ens, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("LINES", "24")
    trainer = trainer_of()
    _, history = trainer.fit(trainer.init(ens), batches(5), validation=(X, Y), validate_every=4, metrics=scores)
    shown = capsys.readouterr().err
    found = {name: by_step(history, f"validation_{name}")[4] for name in ("loss", "accuracy", "nll")}
    for name in ("loss", "accuracy"):
        assert f"validation_{name} {found[name].min():.4f} to {found[name].max():.4f}" in shown
    assert f"validation_nll {found['nll'][0]:.4f}" in shown
    assert "validation_nll " + f"{found['nll'][0]:.4f} to" not in shown


@pytest.mark.slow
def test_tensorboard_has_the_values(ens, tmp_path):
    with TensorBoard(tmp_path) as board:
        fit(trainer_of(), ens, batches(4), validation=(X, Y), validate_every=2, metrics=scores, callbacks=[board])
    written = b"".join(path.read_bytes() for path in tmp_path.glob("member_03/*"))
    for name in (b"validation_loss", b"validation_accuracy", b"validation_nll"):
        assert written.count(name) >= 2


class Numbered(nnx.Module):
    """Stores the member's index and counts its training steps."""

    def __init__(self, rngs):
        self.net = Net(rngs)
        self.number = nnx.BatchStat(jnp.zeros(()))
        self.steps = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.steps[...] += 1
        return self.net(x)


@functools.cache
def numbered(size):
    made = Ensemble.create(Numbered, size, seed=0)
    return Ensemble(made.structure, made.trainable, {**made.rest, "number": jnp.arange(size, dtype=jnp.float32)})


@functools.cache
def adam(in_axes=None, strategy="vmap"):
    return Trainer(loss, optax.adam(0.01), in_axes=in_axes, strategy=strategy)


def distance(turning_points):
    """Member i is best after `turning_points[i]` steps."""

    def of(ens, x, y):
        numbers, steps = (np.asarray(ens.rest[name]) for name in ("number", "steps"))
        seen.append(tuple(numbers.astype(int)))
        each = np.abs(steps - np.asarray(turning_points)[numbers.astype(int)])
        return {"distance": each, "worst": each.max(), "steps": steps}

    seen: list[tuple[int, ...]] = []
    return of, seen


class Test_early_stopping_by_name:
    points = (4, 30, 8, 2, 30, 6, 12, 30)

    @pytest.mark.slow
    @pytest.mark.parametrize(("every", "strategy"), [(None, "vmap"), (2, "loop")])
    def test_equals_early_stopping_by_a_function(self, strategy, every, assert_same):
        trainer, source = adam(strategy=strategy), batches(24)
        metric, seen = distance(self.points)
        stopping = EarlyStopping(evaluate="distance", every=every, patience=3)
        options = {"validation": (X, Y), "validate_every": 2, "metrics": metric}
        state, history = fit(trainer, numbered(8), source, early_stopping=stopping, **options)
        found = EarlyStopping(evaluate=lambda ens: metric(ens, X, Y)["distance"], every=2, patience=3)
        expected, rows = fit(trainer, numbered(8), source, early_stopping=found)
        assert (state.last.criterion, expected.last.criterion) == ("min of 'distance'", "min of a function")
        assert_same(jax.tree.leaves(state), jax.tree.leaves(expected))
        assert [(row["step"], row["member"], row["loss"]) for row in history] == [
            (row["step"], row["member"], row["loss"]) for row in rows
        ]
        assert [row.get("validation_distance") for row in history] == [row.get("validation") for row in rows]
        assert not any("validation" in row for row in history)
        # All members are evaluated at each validation, those that have stopped in their best state.
        assert set(seen[:12]) == {tuple(range(8))}
        last = [row["validation_worst"] for row in history if row["step"] == 24]
        assert set(last) == {30 - 24}

    @pytest.mark.slow
    def test_the_loss_and_a_multiple(self, assert_same):
        trainer, source = Trainer(loss, optax.adam(0.3), strategy="vmap"), batches(24)
        options = {"validation": (X, Y), "validate_every": 2}
        stopping = EarlyStopping(evaluate="loss", every=4, patience=1)
        state, history = fit(trainer, numbered(6), source, early_stopping=stopping, **options)
        values = by_step(fit(trainer, numbered(6), source, **options)[1], "validation_loss")
        looked_at = np.array([values[step] for step in range(4, 25, 4)])
        for i in range(6):
            best, stop = np.inf, 24
            for step, value in zip(range(4, 25, 4), looked_at[:, i], strict=True):
                if not value < best:
                    stop = step
                    break
                best = value
            assert state.standing.step[i] == stop
            assert max(row["step"] for row in history if row["member"] == i) == stop
        assert (np.asarray(state.standing.step) < 24).any()

    @pytest.mark.slow
    def test_a_value_of_the_ensemble_stops_all_together(self, capsys, assert_same):
        values = iter([3.0, 1.0, 2.0, np.nan, 0.5])
        trainer, source = adam(), batches(30)
        start = trainer.init(numbered(3))
        state, history = trainer.fit(
            start,
            source,
            validation=(X, Y),
            validate_every=2,
            metrics=lambda *_: {"of_all": next(values), "each": np.arange(3.0)},
            early_stopping=EarlyStopping(evaluate="of_all", patience=2),
        )
        np.testing.assert_array_equal(state.standing.step, [8, 8, 8])
        np.testing.assert_array_equal(state.standing.stopped, [2, 2, 2])
        assert "members 0, 1, 2 stopped, not better for 2 evaluations" in capsys.readouterr().err
        best, _ = trainer.fit(start, source, steps=4, progress=False)
        assert_same(state.ensemble, best.ensemble)
        assert max(row["step"] for row in history) == 8

    @pytest.mark.filterwarnings("ignore:Trainer.fit. member . stopped")
    def test_a_member_that_waits_for_a_restart_stops_with_the_others(self):
        given = [tuple(np.array(x) for x in batch) for batch in batches(30, 3)]
        given[2][0][1] = np.nan
        trainer = adam(in_axes=0)
        values = iter([3.0, 1.0, 2.0, 2.0, 0.5])
        state, _ = fit(
            trainer,
            numbered(3),
            given,
            validation=(X, Y),
            validate_every=2,
            metrics=lambda *_: {"of_all": next(values)},
            early_stopping=EarlyStopping(evaluate="of_all", patience=2),
            restarts=Restarts(every=50),
        )
        np.testing.assert_array_equal(state.standing.stopped, [2, 2, 2])
        assert int(state.step) == 8

    @pytest.mark.parametrize(
        ("stopping", "options", "message"),
        [
            ({"evaluate": "loss"}, {}, "early stopping watches 'loss' of the validation; pass validation="),
            (
                {"evaluate": "nll"},
                {"validation": (X, Y), "validate_every": 2},
                "watches 'nll', but a validation has only 'loss'; name one of these",
            ),
            (
                {"evaluate": "loss", "every": 3},
                {"validation": (X, Y), "validate_every": 2},
                "watches 'loss' every 3 steps, but validations are every 2; pass a multiple",
            ),
        ],
    )
    def test_refused_before_training(self, ens, stopping, options, message):
        with pytest.raises(ValueError, match=message):
            fit(trainer_of(), ens, iter(()), early_stopping=EarlyStopping(**stopping), **options)

    def test_refused_at_the_first_validation(self, ens):
        with pytest.raises(ValueError, match="watches 'other', but a validation has only 'loss', 'accuracy', 'nll'"):
            fit(
                trainer_of(),
                ens,
                batches(4),
                validation=(X, Y),
                validate_every=2,
                metrics=scores,
                early_stopping=EarlyStopping(evaluate="other"),
            )

    def test_the_default_of_every_depends_on_what_is_watched(self):
        assert EarlyStopping(evaluate=len).every == 100
        assert EarlyStopping(evaluate="loss").every is None
        assert EarlyStopping(evaluate="loss", every=20).every == 20


# A run that is killed repeatedly, also between validations: it resumes to the bit.

STEPS = 60


def one_run(directory, every=None, callbacks=(), strategy="vmap"):
    """Run with validations, members that fail, restart, stop by the name of a value, and leave."""
    trainer = adam(in_axes=0, strategy=strategy)
    given = [tuple(np.array(x) for x in batch) for batch in batches(STEPS, 6)]
    given[10][0][2] = given[40][0][4] = np.nan
    metric, _ = distance((4, 200, 200, 10, 200, 200))

    def all_metrics(ens, x, y):
        kernels = ens.trainable["net"]["second"]["kernel"]
        return {**metric(ens, x, y), "spread": jnp.std(kernels, axis=0).mean()}

    return trainer.fit(
        trainer.init(numbered(6)),
        given,
        progress=False,
        checkpoint_dir=directory,
        checkpoint_every=every,
        validation=[(X[:10], Y[:10]), (X[10:], Y[10:])],
        validate_every=4,
        metrics=all_metrics,
        early_stopping=EarlyStopping(evaluate="distance", every=8, patience=2),
        restarts=Restarts(every=15, times=1),
        callbacks=callbacks,
    )


@functools.cache
def whole_run(strategy="vmap"):
    return one_run(None, strategy=strategy)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Trainer.fit. member . stopped")
@pytest.mark.parametrize(("every", "strategy"), [(3, "vmap"), (5, "loop"), (8, "vmap")])
def test_an_interrupted_run_resumes_to_the_bit(tmp_path, every, strategy, assert_same):
    """Interrupted at several steps, with checkpoints at, before and after validations."""

    class Stopped(Exception):
        pass

    def until(count):
        def callback(step, metrics):
            if step >= count:
                raise Stopped

        return callback

    whole, history = whole_run(strategy)
    for count in (7, 18, 33, 47):
        with pytest.raises(Stopped):
            one_run(tmp_path, every, [until(count)], strategy)
    state, again = one_run(tmp_path, every, strategy=strategy)
    assert_same(state, whole)
    np.testing.assert_equal(again, history)
    assert (np.asarray(whole.standing.stopped) == 2).any()
    assert (np.asarray(whole.standing.restarts) == 1).any()


@functools.cache
def of_four():
    return Ensemble.create(Net, 4, seed=0)


@pytest.mark.slow
@settings(max_examples=10)
@given(
    every=st.integers(1, 5),
    times=st.integers(1, 2),
    history_every=st.integers(1, 4),
    checkpoint_every=st.integers(1, 6),
    cut=st.integers(1, 11),
    begun=st.integers(0, 2),
    name=st.sampled_from(["loss", "accuracy", "nll"]),
)
def test_any_run_resumes_to_the_bit(every, times, history_every, checkpoint_every, cut, begun, name, assert_same):
    """In epochs, from a state that has taken steps, with any intervals, interrupted anywhere."""

    class Stopped(Exception):
        pass

    def stop(step, metrics):
        if step >= begun + cut:
            raise Stopped

    start = TRAINER.init(of_four())
    if begun:
        start, _ = TRAINER.fit(start, batches(begun), progress=False)

    def run(directory=None, **options):
        return TRAINER.fit(
            start,
            batches(4),
            epochs=3,
            progress=False,
            history_every=history_every,
            validation=(X, Y),
            validate_every=None if every == 5 else every,
            metrics=scores,
            early_stopping=EarlyStopping(evaluate=name, every=None if every == 5 else times * every, patience=1),
            checkpoint_dir=directory,
            **options,
        )

    whole, expected = run()
    with tempfile.TemporaryDirectory() as directory:
        with contextlib.suppress(Stopped):
            run(directory, checkpoint_every=checkpoint_every, callbacks=[stop])
        state, history = run(directory)
    assert_same(state, whole)
    np.testing.assert_equal(history, expected)


def kill_again_and_again(directory, kills):
    """Start a run and kill it four times, more often until one was killed between validations; print the steps."""
    generator = np.random.default_rng(0)
    reached: list[int] = []
    while len(reached) < kills and not (len(reached) >= 4 and any(step % 4 for step in reached)):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            one_run(directory, 1, [lambda step, metrics, write=write: os.write(write, b"a step\n")])
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as lines:
            for _ in range(generator.integers(1, 6)):
                lines.readline()
            time.sleep(float(generator.uniform(0, 0.03)))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        reached.append(max((int(path.name[5:]) for path in Path(directory).glob("step_*")), default=0))
    os.write(1, json.dumps(reached).encode())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Trainer.fit. member . stopped")
def test_a_killed_run_has_the_same_history(tmp_path, assert_same):
    command = [sys.executable, "-W", "ignore", __file__, str(tmp_path / "killed"), "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    reached = json.loads(done.stdout.splitlines()[-1])
    assert 0 < reached[-1] < STEPS
    assert any(step % 4 for step in reached)  # some were killed between validations
    state, history = one_run(tmp_path / "killed", 40)
    whole, expected = whole_run()
    assert_same(state, whole)
    np.testing.assert_equal(history, expected)


if __name__ == "__main__":
    kill_again_and_again(sys.argv[1], int(sys.argv[2]))
