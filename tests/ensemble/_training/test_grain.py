"""Runs on Grain's loaders, whose iterators have a state: a resumed run takes the example that comes next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Ensemble, Trainer

# Grain's import takes seconds.
pytestmark = pytest.mark.slow


class Points:
    """Examples that count how often each is read."""

    def __init__(self) -> None:
        self.x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
        self.read: list[int] = []

    def __repr__(self) -> str:
        return "Points"  # Grain compares it when an iterator takes a state

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        self.read.append(int(i))
        return self.x[i], self.x[i, :2]


def data_loader(points: Points) -> Any:
    sampler = grain.samplers.IndexSampler(40, shuffle=True, seed=3, num_epochs=None)
    return grain.DataLoader(data_source=points, sampler=sampler, operations=[grain.transforms.Batch(4)])


def map_dataset(points: Points) -> Any:
    return grain.MapDataset.source(points).shuffle(seed=3).repeat().batch(4)


def iter_dataset(points: Points) -> Any:
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return grain.MapDataset.source(points).shuffle(seed=3).repeat().to_iter_dataset(options).batch(4)


def loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return ((model(x) - y) ** 2).mean()


def trained(loader: Any, steps: int, **options: Any) -> tuple[Any, Any]:
    trainer = Trainer(loss, optax.adam(0.1), strategy="vmap")
    ensemble = Ensemble.create(lambda rngs: nnx.Linear(3, 2, rngs=rngs), 2, seed=0)
    return trainer.fit(trainer.init(ensemble), loader, steps=steps, progress=False, **options)


@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("make", [data_loader, map_dataset, iter_dataset])
def test_a_resumed_run_takes_the_next_example(make: Any, together: int, tmp_path: Path) -> None:
    expected, history = trained(make(Points()), 23, steps_per_call=together)
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_every": 8, "steps_per_call": together}
    trained(make(Points()), 16, **options)
    points = Points()
    state, same = trained(make(points), 23, **options)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert same == history
    if make is iter_dataset:  # the others read ahead
        assert len(points.read) < 4 * 10


def test_a_state_that_no_file_keeps_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Odd:
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            return np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)

        def get_state(self) -> Any:
            return {1: object()}

    with pytest.raises(TypeError, match="^Trainer.fit: get_state of the iterator over batches must return bytes"):
        trained(Odd(), 3, checkpoint_dir=tmp_path)
    assert not list(tmp_path.glob("step_*"))
    assert int(trained(Odd(), 3)[0].step) == 3
