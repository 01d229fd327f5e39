"""`ProcessBatches` in one process; `test_preemption.py` has several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Batches, Ensemble, ProcessBatches, Trainer

X = np.arange(48.0, dtype=np.float32).reshape(12, 4) / 48
PARTS = [X[:6], X[6:]]


@pytest.fixture(scope="module")
def mesh() -> Any:
    return jax.make_mesh((1, 1), ("ensemble", "data"))


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - x[..., :3]) ** 2)


def fitted(mesh: Any, batches: Any, **options: Any) -> Any:
    trainer = Trainer(loss, optax.adam(0.1), strategy="vmap", mesh=mesh, in_axes=options.pop("in_axes", None))
    state = trainer.init(Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 2, seed=0, mesh=mesh))
    return trainer.fit(state, batches, progress=False, **options)[0].ensemble.trainable


def test_the_parts_of_one_process_are_its_batches(mesh: Any) -> None:
    given = ProcessBatches(PARTS, mesh)
    assert len(given) == 2
    for found, part in zip(given, PARTS, strict=True):
        np.testing.assert_array_equal(found, part)
    jax.tree.map(np.testing.assert_array_equal, fitted(mesh, given), fitted(mesh, PARTS))


def test_trees_numbers_and_slices_for_members(mesh: Any) -> None:
    part = {"x": X[:2], "none": None, "number": 3, "own": np.ones((2, 6, 4), np.float32)}
    (found,) = ProcessBatches([(part,)], mesh, ({"x": None, "none": None, "number": None, "own": 0},))
    assert isinstance(found, tuple)
    assert (found[0]["none"], found[0]["number"]) == (None, 3)
    assert (found[0]["own"].shape, found[0]["x"].shape) == ((2, 6, 4), (2, 4))
    own = [np.stack([part, part + 1]) for part in PARTS]
    expected = fitted(mesh, own, in_axes=0)
    jax.tree.map(np.testing.assert_array_equal, fitted(mesh, ProcessBatches(own, mesh, 0), in_axes=0), expected)


def test_endless_batches(mesh: Any) -> None:
    batches = Batches((X,), 4, key=jax.random.key(0))
    expected = fitted(mesh, batches, steps=5)
    jax.tree.map(np.testing.assert_array_equal, fitted(mesh, ProcessBatches(batches, mesh), steps=5), expected)


def test_parts_of_other_shapes_are_refused(mesh: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^ProcessBatches: part 2 has `batch` \(5, 4\) float32, but the first part had"
    ):
        list(ProcessBatches([X[:6], X[6:11]], mesh))
    with pytest.raises(TypeError, match="^ProcessBatches: mesh must be"):
        ProcessBatches(PARTS, None)
    with pytest.raises(ValueError, match='^ProcessBatches: mesh must have an axis "ensemble"'):
        ProcessBatches(PARTS, jax.make_mesh((1,), ("data",)))


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([[0, 1], [0, 1]], (1, 2)),  # a row for each coordinate of the members, a column for each part
        ([[0, 0], [1, 1]], (0, 1)),
        ([[0, 0, 1, 1]], (1, 2)),
        ([[1, 1, 0, 0]], (0, 2)),
        ([[0, 1, 0, 1]], "must give each process a part of equal length"),
        ([[0, 1, 1, 1]], "must give each process a part of equal length"),
        ([[0, 0], [0, 0]], "the mesh has no device of this process"),
    ],
)
def test_which_part(processes: Any, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of process 1, for the processes of the devices of a mesh."""
    devices = np.vectorize(lambda i: SimpleNamespace(process_index=i), otypes=[object])(np.array(processes))
    mesh = SimpleNamespace(devices=devices, axis_names=("ensemble", "data"), shape={"data": devices.shape[1]})
    monkeypatch.setattr("plurax.ensemble._training._data.process_batches.Layout.of", lambda *_: None)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            ProcessBatches.part(mesh)
    else:
        assert ProcessBatches.part(mesh) == expected
