"""`Packed`: the state that a step returns is what it was as a tree, whenever and however its attributes are read."""

import copy
import dataclasses
import gc
import pickle
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Ensemble, MemberStatus, Trainer
from plurax.ensemble._step.state import TrainState


def mse(model, x, *, scale=1.0):
    return scale * jnp.mean(model(x) ** 2)


X = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)


def is_packed(state):
    return "_packed" in vars(state)


def stepped(create, model, *, shared=None, loss=mse, steps=2, **options):
    """Return a trainer, and the states before and after a number of steps."""
    trainer = Trainer(loss, strategy="vmap", **{"optimizer": optax.adam(0.1), **options})
    ensemble = create(model, 3) if shared is None else Ensemble.create(model, 3, seed=0, shared=shared)
    states = [trainer.init(ensemble)]
    for _ in range(steps):
        states.append(trainer.step(states[-1], X)[0])
    return trainer, states


@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer": optax.sgd, "hyperparams": {"learning_rate": [0.1, 0.2, 0.3], "scale": [1.0, 2.0, 3.0]}}],
    ids=["plain", "hyperparams"],
)
@pytest.mark.parametrize("kind", ["plain", "stateful", "shared"])
def test_a_packed_state_is_the_state(create, plain, stateful, assert_same, kind, options):
    model, shared = {"plain": (plain, None), "stateful": (stateful, None), "shared": (plain, "first")}[kind]
    if shared is not None:
        options = {**options, "shared": nnx.PathContains(shared), "shared_optimizer": optax.sgd(0.1)}
    _, states = stepped(create, model, **options)
    assert is_packed(states[-1])
    assert not is_packed(states[0])
    held = states[-1]._pack()
    leaves, treedef = jax.tree.flatten(states[-1])
    assert treedef == jax.tree.structure(states[0])
    assert not is_packed(states[-1])
    # Packed again, it has the same arrays in the same order; integers that are given are used.
    again = states[-1]._pack()
    assert again.packing == held.packing
    assert_same(again.arrays, held.arrays)
    assert states[-1]._pack(held.arrays[-1]).arrays[-1] is held.arrays[-1]
    assert_same(jax.tree.leaves(TrainState._of_packed(again)), leaves)
    assert [int(x) for x in states[-1].standing.step] == [2, 2, 2]
    assert int(states[-1].step) == 2
    assert states[-1].step.shape == ()
    assert states[-1].step.dtype == jnp.int32
    assert isinstance(states[-1].standing, MemberStatus)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(TrainState)])
def test_each_attribute_can_be_read_first(create, plain, assert_same, name):
    _, (*_, state) = stepped(create, plain)
    _, (*_, other) = stepped(create, plain)
    jax.tree.leaves(other)
    assert is_packed(state)
    assert not is_packed(other)
    found, expected = getattr(state, name), getattr(other, name)
    assert_same(jax.tree.leaves(found), jax.tree.leaves(expected))
    assert not is_packed(state)


def test_other_attributes_are_missing_as_of_any_object(create, plain):
    _, (*_, state) = stepped(create, plain)
    with pytest.raises(AttributeError, match="'TrainState' object has no attribute 'stp'"):
        _ = state.stp
    assert is_packed(state)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.step = 3


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda x: jax.tree.map(jnp.copy, x), lambda x: pickle.loads(pickle.dumps(x))],
    ids=["copy", "deepcopy", "map", "pickle"],
)
def test_copies_of_a_packed_state(create, plain, assert_same, copied):
    trainer, (*_, state) = stepped(create, plain)
    other = copied(state)
    assert not is_packed(other)  # private classes do not get into files
    assert_same(trainer.step(other, X), trainer.step(state, X))
    assert_same(jax.tree.leaves(other), jax.tree.leaves(state))


def test_the_size_and_the_structure_are_known_without_unpacking(create, plain):
    _, (first, *_, state) = stepped(create, plain)
    assert state._size == 3
    assert state._structure == first._structure
    assert is_packed(state)


@pytest.mark.parametrize("options", [{"strategy": "unroll"}, {"strategy": "vmap", "memory_budget": "1GiB"}], ids=str)
def test_steps_of_a_run_unpack_nothing(create, plain, options, monkeypatch):
    trainer = Trainer(mse, optax.adam(0.1), **options)
    state = trainer.init(create(plain, 3))
    trainer.fit(state, [X] * 3, progress=False)
    whole, counts = TrainState._of_unpacked, []
    for steps in (2, 7):
        unpacked: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr(TrainState, "_of_unpacked", lambda x, u=unpacked: (u.append(x), whole(x))[1])
            trainer.fit(state, [X] * steps, progress=False)
        counts.append(len(unpacked))
    assert counts[0] == counts[1] > 0  # at the end alone


def test_a_state_that_is_first_read_in_a_trace_keeps_no_tracer(create, plain, assert_same):
    trainer, (*_, state) = stepped(create, plain)
    with jax.checking_leaks():
        steps = jax.jit(lambda shift: state.step + shift)(1)
    assert int(steps) == 3
    assert not isinstance(state.step, jax.core.Tracer)
    assert int(state.step) == 2
    assert [int(x) for x in state.standing.step] == [2, 2, 2]
    after = trainer.step(state, X)[0]
    with jax.checking_leaks():
        traced = jax.jit(lambda x: jax.tree.leaves(trainer.step(after, x)[0]))(X)
    assert_same(jax.tree.leaves(trainer.step(after, X)[0]), traced)


@pytest.mark.parametrize("read", [lambda s: s.step, lambda s: jax.tree.leaves(s.ensemble)[0].sum().astype(int)])
def test_a_state_of_a_trace_may_be_first_read_in_an_inner_one(create, plain, read):
    trainer, (*_, state) = stepped(create, plain)

    def steps(state, x):
        state, _ = trainer.step(state, x)
        total, _ = jax.lax.scan(lambda total, _: (total + read(state), None), 0, None, 3)
        inner = jax.grad(jax.checkpoint(lambda x: x * read(state)))(1.0)
        return total, inner, state.step + read(state), trainer.step(state, x)[0].step

    with jax.checking_leaks():
        total, inner, step, after = jax.jit(steps)(state, X)
    expected = read(trainer.step(state, X)[0])
    assert (int(total), int(inner), int(step), int(after)) == (3 * expected, expected, 3 + expected, 4)


def test_threads_that_read_a_state_first_get_the_same_objects(create, plain):
    trainer, (*_, state) = stepped(create, plain)
    for _ in range(50):
        state, _ = trainer.step(state, X)
        start = threading.Barrier(2)
        found: list[Any] = []

        def read(state=state, start=start, found=found):
            start.wait()
            found.append(state.opt_state)

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found[0] is found[1]


def test_a_state_that_another_thread_has_read(create, plain):
    _, (*_, state) = stepped(create, plain)
    expected = state.ensemble
    # As a thread that did not find the attribute before the other one made it.
    assert state.__getattr__("ensemble") is expected


def test_what_is_written_into_a_state_that_was_read_counts(create, plain):
    trainer, (*_, state) = stepped(create, plain, optimizer=optax.sgd, hyperparams={"learning_rate": [0.1, 0.2, 0.3]})
    weights = jax.tree.leaves(state.ensemble.trainable)
    state.opt_state.hyperparams["learning_rate"] = jnp.zeros(3)
    after, _ = trainer.step(state, X)
    for old, new in zip(weights, jax.tree.leaves(after.ensemble.trainable), strict=True):
        np.testing.assert_array_equal(old, new)
    # Also in a state of another structure, which the last program does not take.
    state.opt_state.hyperparams["learning_rate"] = {"other": jnp.zeros(3)}
    with pytest.raises((TypeError, ValueError)):
        trainer.step(state, X)


def test_what_is_written_into_an_earlier_state_does_not_count_in_a_later_one(create, plain):
    options = {"optimizer": optax.sgd, "hyperparams": {"learning_rate": 0.1, "scale": [1.0, 2.0, 3.0]}}
    trainer, (first, *_) = stepped(create, plain, steps=1, **options)
    later = trainer.step(first, X)[0]
    assert is_packed(later)
    first.standing.hyperparams["scale"] = jnp.zeros(3)
    np.testing.assert_array_equal(later.standing.hyperparams["scale"], [1.0, 2.0, 3.0])


def test_the_arrays_of_a_state_are_freed_with_it(create, plain):
    trainer, states = stepped(create, plain)
    state = trainer.step(states[-1], X)[0]
    del states
    gone = weakref.ref(state._pack().arrays[0])
    state = trainer.step(state, X)[0]
    gc.collect()
    assert gone() is None
    kept = weakref.ref(state._pack().arrays[0])
    _ = state.ensemble
    assert kept() is jax.tree.leaves(state.ensemble.trainable)[0]  # no copy


def test_a_member_that_stops_is_seen_in_a_packed_state(create, plain):
    trainer = Trainer(lambda model, x: jnp.log(x).mean() + mse(model, x), optax.sgd(0.1), in_axes=0, strategy="vmap")
    state = trainer.init(create(plain, 3))
    batch = np.abs(np.stack([X, X, X]))
    state, _ = trainer.step(state, batch)
    bad = batch.copy()
    bad[1] = -1
    for _ in range(2):
        state, metrics = trainer.step(state, bad)
        assert sorted(metrics) == ["loss"]
    assert is_packed(state)
    np.testing.assert_array_equal(state.standing.stopped, [0, 1, 0])
    np.testing.assert_array_equal(state.standing.step, [3, 2, 3])  # the step that stopped it
    np.testing.assert_array_equal(state.standing.trains, [True, False, True])
    assert int(state.step) == 3


@pytest.mark.parametrize("nonfinite", ["freeze", "ignore"])
@pytest.mark.parametrize("by", [jax.jit, jax.vmap, jax.checkpoint])
def test_a_state_passes_through_transforms(create, plain, assert_same, by, nonfinite):
    trainer, (*_, state) = stepped(create, plain, nonfinite=nonfinite)
    given = jax.tree.map(lambda x: x[None], state) if by is jax.vmap else state
    x = X[None] if by is jax.vmap else X
    found = by(lambda state, x: trainer.step(trainer.step(state, x)[0], x)[0])(given, x)
    found = jax.tree.map(lambda x: x[0], found) if by is jax.vmap else found
    expected = trainer.step(trainer.step(state, X)[0], X)[0]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nonfinite", ["freeze", "ignore"])
def test_a_step_is_differentiated(create, plain, nonfinite):
    trainer, (*_, state) = stepped(create, plain, nonfinite=nonfinite)

    def after(scale, step):
        for _ in range(2):
            state_after, metrics = step(state, scale * X)
        return metrics["loss"].sum() + jax.tree.leaves(state_after.ensemble.trainable)[0].sum()

    eager = jax.grad(after)(1.5, trainer.step)
    jitted = jax.jit(jax.grad(after), static_argnums=1)(1.5, trainer.step)
    h = 1e-2
    by_difference = (after(1.5 + h, trainer.step) - after(1.5 - h, trainer.step)) / (2 * h)
    np.testing.assert_allclose(eager, jitted, rtol=1e-4)
    np.testing.assert_allclose(eager, by_difference, rtol=0.05)
    assert int(trainer.step(state, X)[0].step) == 3


def test_integers_keep_the_dtype_of_the_members(create, plain):
    trainer, (*_, state) = stepped(create, plain)
    given = dataclasses.replace(state, standing=state.standing._replace(stopped=jnp.zeros(3)))
    after, _ = trainer.step(given, X)
    assert {x.dtype for x in (after.step, after.standing.step, after.standing.restarts)} == {jnp.dtype("int32")}
