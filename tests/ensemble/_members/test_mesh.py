"""An ensemble on eight devices gives the results of one device. This file is also the script that has eight devices."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from plurax.ensemble import EarlyStopping, Ensemble, Restarts, Trainer, load, save, soup
from plurax.ensemble._execution.data_parallel import differs
from plurax.ensemble._execution.executor import StepInputs
from plurax.ensemble._members.strategy import Execution
from plurax.transforms import vmap

# All in one worker, which runs the script once.
pytestmark = pytest.mark.xdist_group("eight devices")

MEMBERS = 6
RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.normal(size=(8, 6, 6, 2)).astype(np.float32), np.arange(8) % 3
ROWS, TARGETS = RNG.normal(size=(8, 3)).astype(np.float32), RNG.normal(size=(8, 2)).astype(np.float32)


class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.out = nnx.Linear(36, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.conv(x)), (2, 2), (2, 2))
        return self.out(x.reshape(len(x), -1))


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, axis_name: str | None = None, rate: float = 0.0) -> None:
        self.first = nnx.Linear(3, 5, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(5, axis_name=axis_name, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.out = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(nnx.tanh(self.norm(self.first(x)))))


# The same function objects each time, so that caches apply.
SPREAD = partial(MLP, axis_name="data")
DROPPING = partial(MLP, rate=0.5)
SPREAD_DROPPING = partial(MLP, axis_name="data", rate=0.5)


def linear(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(3, 2, rngs=rngs)


@cache
def created(make: Callable[..., Any], size: int = MEMBERS) -> Ensemble:
    """Create members on one device, tracing once: smaller ensembles are slices of the largest."""
    return created(make)[:size] if size < MEMBERS else Ensemble.create(make, size, seed=0)


MOMENTUM = optax.sgd(0.1, momentum=0.9)


@cache
def begun(make: Callable[..., Any], size: int, optimizer: Any, mesh: Any) -> Any:
    """Return the state before the first step, shared by all losses and strategies."""
    return Trainer(square, optimizer, mesh=mesh).init(created(make, size))


def cross_entropy(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def square(model: Any, x: jax.Array, y: jax.Array) -> Any:
    loss = jnp.mean((model(x) - y) ** 2)
    return loss, {"mean": jnp.mean(jnp.abs(y)), "count": 3}


def mesh_of(ensemble: int, data: int | None = None) -> Any:
    shape = (ensemble,) if data is None else (ensemble, data)
    return jax.make_mesh(shape, ("ensemble", "data")[: len(shape)])


def train(
    make: Callable[..., Any],
    loss: Any,
    batch: Any,
    mesh: Any = None,
    *,
    size: int = MEMBERS,
    optimizer: Any = MOMENTUM,
    **o: Any,
) -> Any:
    """Return a trainer, the state after three steps and their last metrics."""
    trainer = Trainer(loss, optimizer, mesh=mesh, **{"strategy": "vmap", **o})
    state = begun(make, size, optimizer, mesh)
    for _ in range(3):
        state, metrics = trainer.step(state, batch)
    return trainer, state, metrics


@cache
def alone(name: str) -> Any:
    """Return the state and metrics on one device."""
    kinds: dict[str, Any] = {
        "cnn": (CNN, cross_entropy, (IMAGES, LABELS)),
        "mlp": (MLP, square, (ROWS, TARGETS)),
        "dropout": (DROPPING, square, (ROWS, TARGETS)),
    }
    return train(*kinds[name])[1:]


def reporting(value: Callable[[jax.Array], Any], model: Any, x: jax.Array, y: jax.Array) -> Any:
    """The loss `square`, with a reported value of the batch."""
    return square(model, x, y)[0], {"mine": value(x)}


def numbers(tree: Any) -> list[np.ndarray]:
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for mine, theirs in zip(numbers(actual), numbers(expected), strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)


@nnx.jit
def called(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def collectives(trainer: Trainer, state: Any, batch: Any) -> dict[str, set[str]]:
    """Return the collectives of the compiled step with their replica groups."""
    inputs = StepInputs(state, batch, (None,) * len(batch))
    execution = trainer._stepper.advance(state, batch)[2]
    text = trainer._stepper.executor.lower(inputs, False, execution).compile().as_text()
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
            if re.search(rf" {name}(-start)?\(", line):
                found.setdefault(name, set()).update(re.findall(r"replica_groups=(.+?)(?:, \w+=|$)", line))
    return found


def as_on_one(shape: tuple[int, ...], strategy: str, kind: str) -> None:
    """Compare parameters, optimizer state, metrics and outputs; 6 members do not divide over 4 devices, nor over 8."""
    make: Any
    make, loss, batch = {"cnn": (CNN, cross_entropy, (IMAGES, LABELS)), "mlp": (MLP, square, (ROWS, TARGETS))}[kind]
    if kind == "mlp" and len(shape) == 2:
        make = SPREAD
    trainer, state, metrics = train(make, loss, batch, mesh_of(*shape), strategy=strategy)
    expected, expected_metrics = alone(kind)
    assert len(state.ensemble) == MEMBERS
    assert_close(metrics, expected_metrics)
    for mine, theirs in zip(numbers(state._arrays()), numbers(expected._arrays()), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
    if kind == "cnn":
        assert_close(state.ensemble(IMAGES), expected.ensemble(IMAGES), 1e-5)
        assert_close(called(state.ensemble[4], IMAGES), called(expected.ensemble[4], IMAGES), 1e-5)
    found = collectives(trainer, state, batch)
    if len(shape) == 1:
        assert not found
    else:
        groups = np.arange(8)[: shape[0] * shape[1]].reshape(shape).tolist()
        assert set(found) == {"all-reduce"}
        listed = str(groups).replace(" ", "").replace("[", "{").replace("]", "}")
        named = f"mesh['ensemble'={shape[0]},'data'={shape[1]}] {{'data'}}"  # as of jax 0.11
        assert found["all-reduce"] in ({listed}, {named})


def held_by_each() -> None:
    """No device holds another's members, even at the start."""
    ensemble = Ensemble.create(CNN, 8, seed=0, mesh=mesh_of(4))
    assert_close(ensemble.trainable, created(CNN, 8).trainable)
    state = Trainer(cross_entropy, optax.adam(0.1), mesh=mesh_of(4)).init(ensemble)
    for leaf in jax.tree.leaves((ensemble, state.ensemble, state.opt_state)):
        assert [shard.data.shape[0] for shard in leaf.addressable_shards] == [2, 2, 2, 2]
    # Six members do not divide over four devices: in a run each device has two with padding, after it all six.
    trainer = Trainer(cross_entropy, optax.adam(0.1), mesh=mesh_of(4))
    in_run, _, _ = trainer._stepper.advance(trainer.init(created(CNN)), (IMAGES, LABELS), donate=True)
    assert {len(shard.data) for leaf in jax.tree.leaves(in_run.arrays) for shard in leaf.addressable_shards} == {2}
    after = trainer.step(trainer.init(created(CNN)), (IMAGES, LABELS))[0]
    assert {len(shard.data) for leaf in jax.tree.leaves(after.ensemble) for shard in leaf.addressable_shards} == {6}
    with pytest.raises(
        ValueError, match=r"6 members do not divide over the 4 devices of the mesh axis \"ensemble\"; use a mult"
    ):
        Ensemble.create(CNN, 6, seed=0, mesh=mesh_of(4))


def a_batch_for_each() -> None:
    batch = np.stack([IMAGES + i for i in range(MEMBERS)]), np.stack([np.roll(LABELS, i) for i in range(MEMBERS)])
    _, expected, expected_metrics = train(CNN, cross_entropy, batch, in_axes=0)
    for mesh in (mesh_of(4), mesh_of(2, 4)):
        _, state, metrics = train(CNN, cross_entropy, batch, mesh, in_axes=0)
        assert_close(metrics, expected_metrics, 5e-6)
        assert_close(state.ensemble.trainable, expected.ensemble.trainable, 5e-6)
        assert_close(state.ensemble(batch[0], in_axes=0), expected.ensemble(batch[0], in_axes=0), 2e-5)


def random_numbers() -> None:
    """Dropout draws the same numbers with members on many devices, and different ones for each part of a batch."""
    expected, expected_metrics = alone("dropout")
    _, state, metrics = train(DROPPING, square, (ROWS, TARGETS), mesh_of(4))
    assert_close((state.ensemble, metrics), (expected.ensemble, expected_metrics))

    _, state, _ = train(SPREAD_DROPPING, square, (ROWS, TARGETS), mesh_of(2, 4))
    counts = [x for path, x in jax.tree.leaves_with_path(state.ensemble.rest) if "count" in str(path)]
    expected_counts = [x for path, x in jax.tree.leaves_with_path(expected.ensemble.rest) if "count" in str(path)]
    assert_close(counts, expected_counts)
    keys = [x for x in jax.tree.leaves(state.ensemble.rest) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    assert_close(keys, [x for x in jax.tree.leaves(expected.ensemble.rest) if x.dtype == keys[0].dtype])


def keys_in_the_batch() -> None:
    """Per-example keys give the same numbers on any device; a single key gives different numbers for each part."""

    def noisy(m: Any, x: jax.Array, keys: jax.Array) -> jax.Array:
        return jnp.mean((m(x) + jax.vmap(lambda k: jax.random.normal(k, (2,)))(keys)) ** 2)

    batch = ROWS, jax.random.split(jax.random.key(0), 8)
    expected = train(linear, noisy, batch)[1]
    assert_close(train(linear, noisy, batch, mesh_of(2, 4))[1].ensemble, expected.ensemble)

    def drawn(m: Any, x: jax.Array, key: jax.Array) -> Any:
        return jnp.mean(m(x) ** 2), {"mine": jax.random.normal(key)}

    one = train(linear, drawn, (ROWS, jax.random.key(0)), mesh_of(2, 4))[2]["mine"][0]
    parts = [jax.random.normal(jax.random.fold_in(jax.random.key(0), i)) for i in range(4)]
    np.testing.assert_allclose(one, np.mean(parts), rtol=1e-5)


def padded() -> None:
    """Five members on four devices, each with its own rate; states are read inside and outside of traces."""
    rates = [0.1, 0.2, 0.3, 0.05, 0.4]
    states = []
    for mesh in (None, mesh_of(4)):
        trainer = Trainer(square, optax.sgd, hyperparams={"learning_rate": rates}, strategy="vmap", mesh=mesh)
        state = trainer.init(created(linear, 5))
        for _ in range(2):
            state, _ = trainer.step(state, (ROWS, TARGETS))
            jax.jit(lambda x, state=state: state.ensemble(x))(ROWS)
            assert len(state.ensemble) == 5
        assert_close(jax.jit(lambda state: state.ensemble(ROWS))(state), state.ensemble(ROWS))
        state, _ = trainer.step(jax.tree.map(lambda x: x, state), (ROWS, TARGETS))  # rebuilt, without padding
        states.append(state)
    assert_close(states[1], states[0])


def several_steps_in_a_call() -> None:
    """On members with padding, and on parts of a batch: the same as single steps."""
    for size, mesh in ((5, mesh_of(4)), (4, mesh_of(2, 2))):
        trainer = Trainer(square, optax.adam(0.1), strategy="vmap", mesh=mesh)
        batches = [(ROWS * i, TARGETS) for i in range(1, 8)]
        expected, rows = trainer.fit(trainer.init(created(linear, size)), batches, progress=False)
        found, again = trainer.fit(trainer.init(created(linear, size)), batches, steps_per_call=3, progress=False)
        assert_close(found, expected, 1e-4)
        assert [row["step"] for row in again] == [row["step"] for row in rows]
        assert_close(np.array([row["loss"] for row in again]), np.array([row["loss"] for row in rows]), 1e-4)


def validations_and_states() -> None:
    """Of members with padding, on parts of a batch, on devices of "auto", with data that are shared or of each."""
    metric: Any = lambda ens, x, y: {"mean": jnp.mean(ens(x)), "each": jnp.mean(ens(x) ** 2, (1, 2))}
    kept: list[Any] = []
    # On one device, which is not that of all members; in parts, on the host.
    whole = tuple(jax.device_put(x[:7], jax.devices()[0]) for x in (ROWS, TARGETS))
    parts = [(ROWS[:5], TARGETS[:5]), (ROWS[5:7], TARGETS[5:7])]

    def fit(size: int, on: Execution | None = None, make: Any = MLP, **options: Any) -> Any:
        trainer = Trainer(square, optax.adam(0.1), **{"strategy": on or "vmap", **options})
        kept.clear()
        state, history = trainer.fit(
            trainer.init(created(make, size)),
            [(ROWS * i, TARGETS) for i in range(1, 6)],
            validation=whole if options or on else parts,
            validate_every=2,
            metrics=metric,
            callbacks=[lambda step, metrics, state: kept.append(state()) if step == 3 else None],
            progress=False,
        )
        return numbers((state, kept[0])), [np.array(list(row.values())) for row in history]

    expected = {size: fit(size) for size in (4, 5)}
    assert_close(fit(5, mesh=mesh_of(4)), expected[5], 1e-4)
    assert_close(fit(4, mesh=mesh_of(2, 2), make=SPREAD), expected[4], 1e-4)
    assert_close(fit(5, mesh=mesh_of(4), strategy="map"), expected[5], 1e-4)
    assert_close(fit(4, mesh=mesh_of(2), chunk_size=1), expected[4], 1e-4)
    assert_close(fit(5, Execution("vmap", devices=2)), expected[5], 1e-4)
    assert_close(fit(4, Execution("map", devices=4)), expected[4], 1e-4)
    trainer = Trainer(square, optax.adam(0.1), in_axes=0, strategy="vmap", mesh=mesh_of(4))
    x, y = (np.stack([array * i for i in range(5)]) for array in (ROWS, TARGETS))
    state, history = trainer.fit(
        trainer.init(created(MLP, 5)), [(x, y)], validation=(x, y), validate_every=1, progress=False
    )
    members = [nnx.view(member, use_running_average=True, deterministic=True) for member in state.ensemble]
    losses = [square(member, x[i], y[i])[0] for i, member in enumerate(members)]
    assert_close(np.array([row["validation_loss"] for row in history]), np.array(losses, float), 1e-4)


def calls() -> None:
    """Negative axes, and arrays on one device."""
    whole = created(linear, 4)
    spread = Trainer(square, optax.sgd(0.1), mesh=mesh_of(4)).init(whole).ensemble
    inputs = np.sin(np.arange(24.0, dtype=np.float32)).reshape(2, 4, 3)
    assert_close(spread(inputs, in_axes=-2), whole(inputs, in_axes=1))
    assert_close(spread(jax.device_put(ROWS, jax.devices()[0])), whole(ROWS))
    # Explicit mesh axes are part of an array's type; the members on one device are sharded like the array.
    explicit = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Explicit,))
    divided = jax.device_put(inputs.swapaxes(0, 1), NamedSharding(explicit, P("rows")))
    for ensemble in (whole, spread):
        assert_close(ensemble(divided, in_axes=0), whole(inputs, in_axes=1))


def members_that_leave_a_mesh() -> None:
    """A member, a part and the average meet inputs on other devices and on other meshes, also within `set_mesh`."""
    single, whole = jax.devices()[2], Ensemble.create(DROPPING, 4, seed=0).view(deterministic=True)
    for mesh in (mesh_of(2, 4), mesh_of(1, 8), mesh_of(4)):
        made = Ensemble.create(DROPPING, 4, seed=0, mesh=mesh)
        trained = Trainer(square, optax.sgd(0.1), mesh=mesh).init(whole).ensemble
        axis = "data" if "data" in mesh.axis_names else "ensemble"
        places: Any = (None, single, NamedSharding(mesh, P(axis)), NamedSharding(jax.make_mesh((8,), ("x",)), P("x")))
        for spread, place in (
            (spread, place) for spread in (made.view(deterministic=True), trained) for place in places
        ):
            x = ROWS if place is None else jax.device_put(ROWS, place)
            eager = nnx.view(spread[1], use_running_average=True)
            assert_close(eager(x), nnx.view(whole[1], use_running_average=True)(ROWS), 1e-5)
            for part in (slice(3), [2, 0, 1], [True, False, True, False]):
                assert_close(spread[part].predict(x, kind="regression"), whole[part].predict(ROWS, kind="regression"))
            assert_close(
                nnx.view(soup(spread), use_running_average=True)(x),
                nnx.view(soup(whole), use_running_average=True)(ROWS),
                1e-5,
            )
        assert_close(made[3], Ensemble.create(DROPPING, 4, seed=0)[3])
        with jax.set_mesh(mesh):
            leaves = jax.tree.leaves((made[1], made[:3], made[[0, 1]], made.unstack()[2], soup(made)))
            result = nnx.view(trained[1], use_running_average=True)(ROWS)
        assert leaves
        assert_close(result, nnx.view(whole[1], use_running_average=True)(ROWS), 1e-5)
    with jax.enable_x64(True):
        wide = Ensemble.from_apply(lambda w, x: w * x, [jnp.full(3, 1 / 3)] * 4)
        wide = Trainer(lambda m, x: m(x).sum(), optax.sgd(0.1), mesh=mesh_of(4)).init(wide).ensemble
    assert wide[2].variables.dtype == np.float64
    assert float(wide[2].variables[0]) == 1 / 3


def dropout_of_linen_on_a_data_axis() -> None:
    """Each part of the batch draws its own mask, and all parts keep one key and one count."""
    net = nn.Dropout(0.5, deterministic=False)
    rngs = {"dropout": jax.random.key(3), "count": jnp.uint32(0)}
    members = Ensemble.from_apply(net.apply, [{"params": {"w": jnp.ones(2)}, "rngs": rngs}] * 2)

    def loss(model: Any, x: jax.Array) -> Any:
        return jnp.mean(x * model.variables["params"]["w"]), {"kept": model.call_and_update(jnp.ones(99)).mean()}

    trainer = Trainer(loss, optax.sgd(0.1), mesh=mesh_of(2, 2))
    state = trainer.init(members)
    for step in range(2):
        state, metrics = trainer.step(state, ROWS[:, :2])
        keys = [jax.random.fold_in(jax.random.fold_in(rngs["dropout"], part), step) for part in range(2)]
        kept = [net.apply({}, jnp.ones(99), rngs={"dropout": key}).mean() for key in keys]
        np.testing.assert_allclose(metrics["kept"], [np.mean(kept)] * 2, rtol=1e-5)
    assert_close(state.ensemble[1].variables["rngs"], {**rngs, "count": jnp.uint32(2)})


def a_data_axis_of_one() -> None:
    for seconds in (0, 0.1):
        state = train(SPREAD, square, (ROWS, TARGETS), mesh_of(4, 1), strategy="auto", tune_seconds=seconds)[1]
        assert_close(state.ensemble.trainable, alone("mlp")[0].ensemble.trainable)


def refusals() -> None:
    data = mesh_of(2, 2)
    with pytest.raises(
        ValueError, match="on each part of a batch that the mesh splits over 'data', the loss leaves ano"
    ):
        train(MLP, square, (ROWS, TARGETS), data)
    with pytest.raises(ValueError, match=r"the batch \(`0`\) has 7 examples, which do not split over the 2 devices"):
        train(linear, square, (ROWS[:7], TARGETS[:7]), data)
    with pytest.raises(ValueError, match="splits arrays of one length, but got"):
        train(linear, lambda m, x, y, w: square(m, x, w), (ROWS, TARGETS, np.ones(2, np.float32)), data)
    for value in (lambda x: (x > 0).sum(), lambda x: x.mean(1)):
        with pytest.raises(ValueError, match="the loss reports `mine`, an array of shape .* only floating-point scal"):
            train(linear, partial(reporting, value), (ROWS, TARGETS), data)
    for loss in (lambda m, x, y: ((m(x) - y) ** 2).sum(), lambda m, x, y: jnp.std(m(x))):
        with pytest.raises(
            ValueError, match="the loss reports `loss`, .* for the batch, but .* as the mean over its 2 parts"
        ):
            train(linear, loss, (ROWS, TARGETS), data)
    not_a_mean = "for the batch, but .* as the mean over its 2 parts"
    with pytest.raises(ValueError, match=f"the loss reports `loss`, .* {not_a_mean}"):
        train(linear, lambda m, x, y: jnp.sum(m(x) ** 2) * 1e-3 + jnp.mean(m(x) * y), (ROWS, TARGETS), data)
    with pytest.raises(ValueError, match=f"the loss reports `loss`, .* {not_a_mean}"):
        train(SPREAD, lambda m, x, y: jnp.sum(m(x) * y), (ROWS, TARGETS), data)
    key = jax.random.key(0)
    # A loss that draws random numbers is not compared: the parts draw other numbers than the whole.
    train(linear, lambda m, x, k: jnp.mean(m(x) * jax.random.bernoulli(k, 0.5, (len(x), 2))), (ROWS, key), data)
    train(SPREAD_DROPPING, lambda m, x, y: jnp.mean(m(x) * y), (ROWS, TARGETS), data)
    for value in (lambda x: len(x), lambda x: jnp.float32(len(x)), lambda x: x.sum(), lambda x: jnp.sqrt(x.var())):
        with pytest.raises(ValueError, match=f"the loss reports `mine`, .* {not_a_mean}"):
            train(linear, partial(reporting, value), (ROWS, TARGETS), data)
    counting = Ensemble.from_apply(lambda v, x: x @ v["w"], [{"w": jnp.ones((3, 2)), "seen": jnp.zeros((), int)}] * 2)

    def counts(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        model.variables = {**model.variables, "seen": model.variables["seen"] + len(x)}
        return jnp.mean((model(x) - y) ** 2)

    trainer = Trainer(counts, optax.sgd(0.1), strategy="vmap", mesh=data)
    with pytest.raises(ValueError, match=f"the loss leaves `seen` in the model, 8 {not_a_mean}"):
        trainer.step(trainer.init(counting), (ROWS, TARGETS))
    traced = Trainer(lambda m, x, y: jnp.sum(m(x)), MOMENTUM, strategy="vmap", mesh=data)
    state = begun(linear, MEMBERS, MOMENTUM, data)
    jax.jit(traced.step)(state, (ROWS, TARGETS))
    with pytest.raises(ValueError, match="the loss reports `loss`"):  # nothing was compared in the trace
        traced.step(state, (ROWS, TARGETS))
    with pytest.raises(ValueError, match='grad_fn cannot be used with a mesh axis "data"'):
        Trainer(square, optax.sgd(0.1), mesh=data, grad_fn=jax.value_and_grad)
    searching = optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(5))
    with pytest.raises(ValueError, match=r"the optimizer evaluates the loss again \(value_fn, as optax.lbfgs does\)"):
        train(linear, square, (ROWS, TARGETS), data, optimizer=searching)
    _, state, _ = train(linear, square, (ROWS, TARGETS), mesh_of(4), optimizer=searching)
    assert_close(state.ensemble, train(linear, square, (ROWS, TARGETS), optimizer=searching)[1].ensemble)


def other_meshes() -> None:
    """Other axis types, inside a trace, and with the mesh set globally."""
    expected, _ = alone("cnn")
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("ensemble", "data"), axis_types=(kind, kind))
        with jax.set_mesh(mesh):
            _, state, _ = train(CNN, cross_entropy, (IMAGES, LABELS), mesh)
        assert_close(state.ensemble.trainable, expected.ensemble.trainable)
    trainer = Trainer(cross_entropy, optax.sgd(0.1, momentum=0.9), strategy="loop", mesh=mesh_of(4))
    state, step = trainer.init(created(CNN)), jax.jit(trainer.step)
    for _ in range(3):
        state, _ = step(state, (IMAGES, LABELS))
    assert_close(state.ensemble, expected.ensemble)


def sharded_by_hand() -> None:
    """A state whose arrays were placed on a mesh steps there, also where explicit axes are part of the types."""
    trainer = Trainer(square, optax.adam(0.1), strategy="vmap")
    state = trainer.init(created(MLP, 4))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("m",), axis_types=(kind,))

        def placing(x: jax.Array, mesh: Any = mesh) -> NamedSharding:
            return NamedSharding(mesh, P("m") if x.ndim else P())

        one, there = state, jax.tree.map(lambda x: jax.device_put(x, placing(x)), state)
        for _ in range(3):
            one, _ = trainer.step(one, (ROWS, TARGETS))
        # Without the mesh as context, JAX 0.12 raises in the gradient of `jnp.maximum` under `vmap`, and 0.11 in that
        # of `jnp.clip`: "Resource axis: m of P('m', None) is not found in mesh: ()".
        broken = kind == AxisType.Explicit and jax.__version_info__ >= (0, 12)
        with jax.set_mesh(mesh) if broken else nullcontext():
            for _ in range(3):
                there, _ = trainer.step(there, (ROWS, TARGETS))
            fitted, _ = trainer.fit(there, [(ROWS, TARGETS)] * 2, progress=False)
        assert (int(there.step), int(fitted.step)) == (3, 5)
        assert_close(there, one, 1e-5)
        for x in jax.tree.leaves(there):
            assert x.sharding.is_equivalent_to(placing(x), x.ndim), x.sharding


def split_by_hand() -> None:
    """Early stopping and restarts keep each array where it was placed, on an auto mesh kernels in parts too."""
    batch = ROWS, TARGETS
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("m", "tp"), axis_types=(kind, kind))

        def placing(x: jax.Array, mesh: Any = mesh) -> NamedSharding:
            if x.ndim == 3 and not mesh.explicit_axes:
                return NamedSharding(mesh, P("m", None, "tp"))
            return NamedSharding(mesh, P("m") if x.ndim else P())

        trainer = Trainer(square, optax.adam(0.3), strategy="vmap")
        state = trainer.init(Ensemble.create(lambda rngs: nnx.Linear(3, 2, rngs=rngs), 4, seed=0))
        there = jax.tree.map(lambda x, placing=placing: jax.device_put(x, placing(x)), state)
        # No member leaves an explicit mesh, since JAX takes no rows of an axis in parts there.
        patience = 2 if kind == AxisType.Auto else 6
        evaluate = vmap(lambda model: square(model, *batch)[0])
        stop = EarlyStopping(evaluate=evaluate, every=1, patience=patience)
        for options in ({"early_stopping": stop}, {"restarts": Restarts(every=2)}):
            here, found = (trainer.fit(x, [batch] * 6, progress=False, **options)[0] for x in (state, there))
            assert_close(found.ensemble, here.ensemble, 1e-5)


def read_elsewhere() -> None:
    """What a step returned can be first read where other devices are in context, and stays where it was computed."""
    trainer = Trainer(square, optax.adam(0.1), strategy="vmap")
    first = trainer.init(created(MLP, 4))
    mesh = jax.make_mesh((8,), ("m",), axis_types=(AxisType.Auto,))
    for device in (None, jax.devices()[0], jax.devices()[1]):
        batch = jax.device_put((ROWS, TARGETS), device)
        given = first if device is None else jax.device_put(first, device)
        expected = int(trainer.step(given, batch)[0].step), given.step.sharding
        for reads in ("mesh", "shards", "other device"):
            state, _ = trainer.step(given, batch)
            if reads == "mesh":
                with jax.set_mesh(mesh):
                    found = state.step
            elif reads == "shards":
                of_shards = jax.shard_map(
                    lambda x, state=state: x * state.step, mesh=mesh, in_specs=P("m"), out_specs=P("m")
                )
                if device is None:
                    of_shards(jnp.arange(8.0))
                found = state.step
            else:
                with jax.default_device(jax.devices()[2]):
                    found = state.step
            assert not isinstance(found, jax.core.Tracer)
            assert (int(found), found.committed) == (expected[0], device is not None)
            if reads != "other device" or device is not None:
                assert found.sharding == expected[1], (reads, found.sharding)
            again, _ = trainer.step(replace(state), batch)
            assert int(again.step) == 2


def files() -> None:
    """A run over four devices resumes over two and on one with the same results."""
    batches = [(IMAGES + i, LABELS) for i in range(4)]
    make = lambda mesh: Trainer(cross_entropy, optax.adam(0.01), strategy="vmap", mesh=mesh)
    ensemble = created(CNN)
    whole, history = make(None).fit(make(None).init(ensemble), batches, progress=False)
    for mesh in (None, mesh_of(2, 2)):
        with tempfile.TemporaryDirectory() as directory:
            first = make(mesh_of(4))
            first.fit(first.init(ensemble), batches[:2], progress=False, checkpoint_dir=directory)
            second = make(mesh)
            state, rows = second.fit(second.init(ensemble), batches, progress=False, checkpoint_dir=directory)
        assert_close(state.ensemble, whole.ensemble)
        np.testing.assert_allclose([row["loss"] for row in rows], [row["loss"] for row in history], rtol=1e-5)
    with tempfile.TemporaryDirectory() as directory:
        trainer, state, _ = train(CNN, cross_entropy, (IMAGES, LABELS), mesh_of(4))
        save(f"{directory}/x", state)
        again = load(f"{directory}/x", trainer.init(ensemble))
        assert_close(again, state)
        assert [x.sharding for x in jax.tree.leaves(again)] == [x.sharding for x in jax.tree.leaves(state)]
        assert_close(load(f"{directory}/x", alone("cnn")[0]).ensemble, alone("cnn")[0].ensemble)
        assert_close(trainer.step(again, (IMAGES, LABELS))[1], trainer.step(state, (IMAGES, LABELS))[1])


def chosen() -> None:
    """ "auto" on a mesh, and on all devices of a CPU."""
    expected, _ = alone("cnn")
    for mesh in (mesh_of(4), None):
        trainer, state, _ = train(CNN, cross_entropy, (IMAGES, LABELS), mesh, strategy="auto", tune_seconds=0.2)
        assert_close(state.ensemble.trainable, expected.ensemble.trainable)
        found = trainer.explain().candidates
        assert {one.execution.devices for one in found} == ({1} if mesh else {1, MEMBERS})
        assert {one.execution.strategy for one in found} == {"vmap", "map", "unroll"} | (set() if mesh else {"loop"})
    for seconds in (0, 0.2):
        options = {"strategy": "auto", "tune_seconds": seconds}
        _, state, _ = train(SPREAD, square, (ROWS, TARGETS), mesh_of(2, 2), **options)
        assert_close(state.ensemble.trainable, alone("mlp")[0].ensemble.trainable)
    _, state, _ = train(CNN, cross_entropy, (IMAGES, LABELS), mesh_of(4), strategy="auto", tune_seconds=0)
    assert_close(state.ensemble.trainable, expected.ensemble.trainable)


def leaving() -> None:
    """Members fail, restart, stop early and leave, on devices that they do not divide over, as on one device."""
    generator = np.random.default_rng(3)
    batches = [tuple(generator.normal(size=(6, 4, n)).astype(np.float32) for n in (3, 2)) for _ in range(12)]
    batches[4][0][1] = np.nan
    ends = jnp.array([3.0, 30, 1, 30, 5, 30])

    class Numbered(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(3, 2, rngs=rngs)
            self.number, self.steps = nnx.BatchStat(jnp.zeros(())), nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.steps[...] += 1
            return self.linear(x)

    members = Ensemble.create(Numbered, 6, seed=0).unstack()
    for i, member in enumerate(members):
        member.number[...] = jnp.float32(i)

    def of_member(member: Any) -> jax.Array:
        return jnp.abs(member.steps[...] - ends[member.number[...].astype(int)])

    distance = jax.jit(vmap(of_member))

    found = {}
    for name, mesh in (("one", None), ("four", mesh_of(4))):
        trainer = Trainer(
            lambda m, x, y: jnp.mean((m(x) - y) ** 2), optax.adam(0.01), in_axes=0, strategy="vmap", mesh=mesh
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = trainer.fit(
                trainer.init(Ensemble.stack(members)),
                batches,
                progress=False,
                early_stopping=EarlyStopping(evaluate=distance, every=1, patience=3),
                restarts=Restarts(every=3, times=1),
            )
    for state, _ in found.values():
        assert np.asarray(state.standing.stopped).tolist() == [2, 0, 2, 0, 2, 0]
        assert np.asarray(state.standing.restarts).tolist() == [0, 1, 0, 0, 0, 0]
    assert_close(found["four"][0].ensemble, found["one"][0].ensemble, 1e-5)
    assert_close(found["four"][0].opt_state, found["one"][0].opt_state, 1e-5)
    keys = [[(row["step"], row["member"]) for row in history] for _, history in found.values()]
    assert keys[0] == keys[1]


WAYS = (
    leaving,
    held_by_each,
    a_batch_for_each,
    random_numbers,
    keys_in_the_batch,
    padded,
    several_steps_in_a_call,
    validations_and_states,
    calls,
    members_that_leave_a_mesh,
    dropout_of_linen_on_a_data_axis,
    a_data_axis_of_one,
    refusals,
    other_meshes,
    sharded_by_hand,
    split_by_hand,
    read_elsewhere,
    files,
    chosen,
)
LAYOUTS = [
    ((4,), "vmap", "cnn"),
    ((8,), "map", "cnn"),
    ((2,), "unroll", "cnn"),
    ((4, 2), "vmap", "cnn"),
    ((2, 4), "map", "cnn"),
    ((1, 8), "unroll", "cnn"),
    ((4,), "vmap", "mlp"),
    ((2, 4), "vmap", "mlp"),
    ((4, 2), "loop", "mlp"),
]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return a traceback from eight devices, or an empty string, by name, for the selected tests of this file."""
    selected = [item for item in request.session.items if item.path == Path(__file__)]
    names = {str(x) for item in selected if hasattr(item, "callspec") for x in item.callspec.params.values()}
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, __file__, *names], env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("way", [way.__name__ for way in WAYS])
def test_eight_devices(way: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[way], outcomes[way]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_as_on_one_device_and_nothing_exchanged_between_members(layout: Any, outcomes: dict[str, str]) -> None:
    assert not outcomes[str(layout)], outcomes[str(layout)]


def test_a_difference_is_detected(outcomes: dict[str, str]) -> None:
    assert "Not equal to tolerance" in outcomes["wrong"]


class Test_meshes_that_are_refused:
    def test_no_mesh(self) -> None:
        with pytest.raises(
            TypeError, match=r"Trainer: mesh must be a jax.sharding.Mesh, such as .* but got 3 of type in"
        ):
            Trainer(square, optax.sgd(0.1), mesh=3)
        with pytest.raises(TypeError, match=r"Ensemble.create: mesh must be a jax.sharding.Mesh"):
            Ensemble.create(linear, 2, seed=0, mesh="all")

    def test_a_mesh_without_devices_outside_a_trace(self) -> None:
        mesh = jax.sharding.AbstractMesh((2,), ("ensemble",))
        trainer = Trainer(square, optax.sgd(0.1), mesh=mesh)
        with pytest.raises(ValueError, match="an AbstractMesh has no devices to place an array on; trace the call"):
            trainer.init(Ensemble.create(linear, 2, seed=0))
        with pytest.raises(
            ValueError, match="on the devices of the mesh, but an AbstractMesh has none; leave mesh out"
        ):
            Ensemble.create(linear, 2, seed=0, mesh=mesh)

    def test_other_axes(self) -> None:
        for names in (("members",), ("ensemble", "layers"), ("data",), ("model",)):
            mesh = jax.make_mesh((1,) * len(names), names)
            with pytest.raises(
                ValueError, match=r"mesh must have an axis \"ensemble\" and may have axes \"data\" and \"model\", bu"
            ):
                Trainer(square, optax.sgd(0.1), mesh=mesh)


class Test_differs:
    """`differs` follows values that depend on a part of the batch."""

    def of(self, fun: Callable[..., Any]) -> list[bool]:
        closed = jax.make_jaxpr(fun, axis_env=[("data", 2)])(1.0, jnp.ones(3))
        return differs(closed.jaxpr, [False, True])

    def test_through_operations_and_calls(self) -> None:
        assert self.of(lambda a, x: (a + 1, x + 1, jax.jit(lambda a, x: (a, a * x))(a, x))) == [
            False,
            True,
            False,
            True,
        ]

    def test_until_the_devices_agree(self) -> None:
        assert self.of(lambda a, x: (jax.lax.pmean(x, "data"), jax.lax.psum(x, "data") + a, x)) == [False, False, True]

    def test_where_a_device_reads_its_index(self) -> None:
        assert self.of(lambda a, x: (a + jax.lax.axis_index("data"), a)) == [True, False]

    def test_in_loops_the_whole_carry(self) -> None:
        def fun(a: Any, x: Any) -> Any:
            return jax.lax.scan(lambda c, x: (c + a, x), a, x), jax.lax.fori_loop(0, 3, lambda i, c: c + a, a)

        assert self.of(fun) == [True, True, False]


def wrong() -> None:
    """A check that must fail."""
    assert_close(np.ones(2), np.full(2, 1.001))


def failure_of(way: Callable[[], None]) -> str:
    try:
        way()
    except Exception:  # the test reports any error
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    assert jax.device_count() == 8
    every = {way.__name__: way for way in WAYS} | {str(layout): partial(as_on_one, *layout) for layout in LAYOUTS}
    failures = {name: failure_of(way) for name, way in every.items() if name in sys.argv[1:]}
    Path("/dev/stdout").write_text(json.dumps(failures | {"wrong": failure_of(wrong)}))
