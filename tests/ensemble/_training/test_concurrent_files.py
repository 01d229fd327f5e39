"""Files are read while other processes replace or remove them. This file is also the script that writes.

A reader gets what one save has written, whole, or hears that there is none; it never calls it damaged.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Committee, Ensemble, Trainer, export, load, load_exported, load_member, save
from plurax.transforms.modules import load_params, save_params

if __name__ != "__main__":
    from ..._processes import Process, ended

pytestmark = pytest.mark.slow

READS, WRITES = 500, 60
X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)


def filled(value: float) -> Any:
    """Return a model whose numbers all tell which save they are of."""
    model = nnx.Sequential(nnx.Linear(2, 5, rngs=nnx.Rngs(0)), nnx.Linear(5, 3, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    return nnx.merge(graph, nnx.map_state(lambda _, x: jnp.full_like(x, value), state))


def ensemble(value: float) -> Any:
    return Ensemble.stack([filled(value), filled(value)])


def committee(value: float) -> Committee:
    return Committee([ensemble(value), filled(value)], [1.0, 1.0, value])


def export_to(path: Path, value: float) -> None:
    return export(ensemble(value), path, X[:1], platforms=("cpu",), kind="regression", outputs=("mean",))


def values_of(*arrays: Any) -> set[float]:
    return {float(x) for array in arrays for x in np.ravel(array)}


def read_committee(path: Path) -> set[float]:
    found = Committee.load(path, committee(1.0))
    assert found.weights is not None
    weights = np.asarray(found.weights)
    return values_of(*[x for group in found.groups for x in _leaves(group)], np.round(weights[-1] / weights[0]))


def _leaves(tree: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(tree)


WRITE: dict[str, Callable[[Path, float], object]] = {
    "ensemble": lambda path, value: save(path, ensemble(value)),
    "committee": lambda path, value: committee(value).save(path),
    "export": export_to,
    "parameters": lambda path, value: save_params(path, filled(value)),
}
WRITE |= {"member": WRITE["ensemble"]}
READ: dict[str, Callable[[Path], set[float]]] = {
    "ensemble": lambda path: values_of(*_leaves(load(path, ensemble(0.0)))),
    "member": lambda path: values_of(*_leaves(nnx.state(load_member(path, 1, filled(0.0))))),
    "committee": read_committee,
    # A model of two layers that are all v returns 10 v² x + 5 v² + v for inputs of sum x.
    "export": lambda path: {float(np.round(load_exported(path)(jnp.zeros((1, 2)))["mean"][0, 0], 4))},
    "parameters": lambda path: values_of(*_leaves(nnx.state(load_params(path, filled(0.0))))),
}


def loss(model: Any, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


def write_for_ever(kind: str, path: Path, until: Path, values: tuple[float, ...] = (1.0, 2.0)) -> None:
    for count, value in enumerate(itertools.cycle(values)):
        WRITE[kind](path, value)
        if until.exists() or count > 100_000:
            return


def write_run(path: Path, until: Path) -> None:
    trainer = Trainer(loss, optax.sgd(0.0), strategy="vmap")

    def batches() -> Iterator[Any]:
        for _ in range(1_000_000):
            if until.exists():
                return
            yield (X,)

    trainer.fit(
        trainer.init(ensemble(3.0)),
        batches(),
        progress=False,
        checkpoint_dir=path,
        checkpoint_every=1,
        checkpoint_keep=1,
    )


@contextmanager
def writer(kind: str, path: Path, tmp_path: Path, count: int = 1) -> Iterator[None]:
    """Let other processes write until the end."""
    end = tmp_path / "end"
    processes = [Process([sys.executable, __file__, kind, str(path), str(end)]) for _ in range(count)]
    try:
        yield
    finally:
        end.touch()
        found = ended(processes)
    assert [(code, error[-2000:] if code else "") for code, _, error in found] == [(0, "")] * count


def wait_for(path: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("kind", READ)
def test_what_is_replaced_meanwhile_is_read_whole(kind: str, tmp_path: Path) -> None:
    path, seen = tmp_path / "a", Counter[float]()
    WRITE[kind](path, 1.0)
    with writer(kind, path, tmp_path):
        reads = 0
        while reads < READS or len(seen) < 2:
            (value,) = READ[kind](path)  # of one save
            seen[value] += 1
            reads += 1
            assert reads < 100 * READS
    assert set(seen) == ({6.0, 22.0} if kind == "export" else {1.0, 2.0})
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a", "end"]  # nothing is left


def test_what_a_run_removes_meanwhile_is_read_or_gone(tmp_path: Path) -> None:
    path, outcomes = tmp_path / "run", Counter[str]()
    with writer("run", path, tmp_path):
        wait_for(path / "step_00000001")
        while sum(outcomes.values()) < READS or len(outcomes) < 2:
            for step in sorted(path.glob("step_*"))[:1]:
                try:
                    outcomes[str(values_of(*_leaves(load(step, ensemble(0.0)))))] += 1
                except FileNotFoundError:
                    outcomes["gone"] += 1
            assert sum(outcomes.values()) < 100 * READS
    assert set(outcomes) == {"{3.0}", "gone"}


@pytest.mark.parametrize("kind", ["ensemble", "committee", "export"])
def test_several_processes_save_to_one_place(kind: str, tmp_path: Path) -> None:
    """The last one wins, none fails, and nothing is left."""
    path = tmp_path / "a"
    with writer(kind, path, tmp_path, count=2):
        wait_for(path)
        for _ in range(WRITES):
            WRITE[kind](path, 2.0)
            assert len(READ[kind](path)) == 1
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a", "end"]


if __name__ == "__main__":
    of, where, end = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if of == "run":
        write_run(where, end)
    else:
        write_for_ever(of, where, end)
