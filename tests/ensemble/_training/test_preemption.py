"""Runs that are told to leave, and processes that die. This file is also the script that each process runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from plurax.ensemble import Ensemble, Preempted, ProcessBatches, Trainer, load

if __name__ != "__main__":  # the processes run this file as a script
    from ..._processes import Process, ended, free_port

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("preemption")]

STEPS, EVERY = 60, 24


def loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return ((model(x) - y) ** 2).mean()


class Loader:
    """Endless batches of this process's examples, whose iterator has a state; it notes which batches it makes."""

    def __init__(self, index: int, count: int, made: Path, fails_at: int) -> None:
        self.index, self.count, self.made, self.fails_at = index, count, made, fails_at

    def __iter__(self) -> Iterator[Any]:
        return LoaderIterator(self)


class LoaderIterator(Iterator[Any]):
    def __init__(self, loader: Loader) -> None:
        self.loader, self.next = loader, 0

    def get_state(self) -> dict[str, int]:
        return {"next": self.next, "of": self.loader.index}

    def set_state(self, state: dict[str, int]) -> None:
        assert state["of"] == self.loader.index
        self.next = state["next"]

    def __next__(self) -> Any:
        wait_for_signal(self.loader.made)
        x = np.random.default_rng(self.next).normal(size=(8, 3)).astype(np.float32)
        mine = x.reshape(self.loader.count, -1, 3)[self.loader.index]
        if self.next == self.loader.fails_at:
            raise OSError("a broken disk")
        with self.loader.made.open("a") as file:
            file.write(f"{self.next}\n")
        self.next += 1
        return mine, mine[:, :2] * 2


def wait_for_signal(made: Path) -> None:
    """Take longer for a batch in a run that is told to leave, so that all notice it before the end."""
    time.sleep(0.2 if made.with_name("slow").exists() else 0.01)


class Numbers:
    """Examples for Grain."""

    def __repr__(self) -> str:
        return "Numbers"

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> Any:
        x = np.random.default_rng(int(i)).normal(size=3).astype(np.float32)
        return x, x[:2] * 2


def loaded_by_grain(index: int, count: int, made: Path) -> Any:
    """Return endless batches of 8 examples among all processes, each of which loads its own."""
    import grain

    def noted(batch: Any) -> Any:
        wait_for_signal(made)
        with made.open("a") as file:
            file.write("0\n")
        return batch

    mine = grain.MapDataset.source(Numbers()).shuffle(seed=3).repeat()[index::count]
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return mine.batch(8 // count).map(noted).to_iter_dataset(options)


def fit(root: Path, by_grain: bool, fails_at: int) -> None:
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(-1, 2).T, ("ensemble", "data"))
    part = ProcessBatches.part(mesh)
    made = root / f"made {jax.process_index()}"
    loader: Any = loaded_by_grain(*part, made) if by_grain else Loader(*part, made, fails_at)
    batches = ProcessBatches(loader, mesh)
    trainer = Trainer(loss, optax.adam(0.05), mesh=mesh, strategy="vmap")
    state = trainer.init(Ensemble.create(lambda rngs: nnx.Linear(3, 2, rngs=rngs), 2, seed=0, mesh=mesh))
    options: dict[str, Any] = {"checkpoint_dir": root / "run", "checkpoint_every": EVERY, "progress": False}
    # Several steps in one program: JAX's sync point must not lie between them.
    trainer.fit(state, batches, steps=STEPS, steps_per_call=4 if by_grain else 1, **options)


def main() -> None:
    root, process, port, processes, by_grain, fails_at = Path(sys.argv[1]), *map(int, sys.argv[2:7])
    # One process too, as a job of one machine is started: then JAX has the signal.
    times: dict[str, int] = {"heartbeat_timeout_seconds": 10, "shutdown_timeout_seconds": 10}
    jax.distributed.initialize(f"localhost:{port}", processes, process, **times)
    try:
        fit(root, bool(by_grain), fails_at)
    except Preempted as left:
        sys.stdout.write(f"left at {left.step}\n")
        raise


# The tests, in one process with one device.


def started(
    root: Path, processes: int, *, by_grain: bool = False, fails: tuple[int, int] = (-1, -1)
) -> list[subprocess.Popen[str]]:
    """Start processes with four devices in all; the first number of `fails` is that of one that fails at a batch."""
    root.mkdir(exist_ok=True)
    port = str(free_port())
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(4 // processes), "JAX_PLATFORMS": "cpu"}
    options = str(processes), str(int(by_grain))
    return [
        Process(
            [sys.executable, __file__, str(root), str(i), port, *options, str(fails[1] if i == fails[0] else -1)],
            env=environment,
        )
        for i in range(processes)
    ]


def wait_for_batch(root: Path, count: int, processes: int) -> None:
    """Wait until each process has made a batch with this number."""
    for i in range(processes):
        until, made = time.monotonic() + 90, root / f"made {i}"
        while not made.exists() or len(made.read_text().split()) < count:
            assert time.monotonic() < until
            time.sleep(0.01)


def result(root: Path) -> Any:
    path = root / "run" / f"step_{STEPS:08d}"
    like = Ensemble.create(lambda rngs: nnx.Linear(3, 2, rngs=rngs), 2, seed=0)
    return jax.tree.map(np.asarray, load(path, like).trainable)


KINDS = ((1, False), (2, False), (2, True))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, bool], Any]:
    """Return the results of runs by one process and by two, and by Grain."""
    found = {}
    for processes, by_grain in KINDS:
        root = tmp_path_factory.mktemp("undisturbed")
        codes = [code for code, *_ in ended(started(root, processes, by_grain=by_grain))]
        assert codes == [0] * processes
        found[processes, by_grain] = result(root)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), found[1, False], found[2, False])
    return found


@pytest.mark.parametrize(("kind", "told", "late"), [(KINDS[0], 0, 10), (KINDS[1], 0, 30), (KINDS[2], 1, 7)])
def test_all_stop_at_one_step_and_go_on_to_the_bit(
    kind: tuple[int, bool], told: int, late: int, tmp_path: Path, undisturbed: dict[tuple[int, bool], Any]
) -> None:
    processes, by_grain = kind
    running = started(tmp_path, processes, by_grain=by_grain)
    wait_for_batch(tmp_path, late, processes)
    (tmp_path / "slow").touch()
    running[told].send_signal(signal.SIGTERM)
    found = ended(running)
    (tmp_path / "slow").unlink()
    assert [code for code, *_ in found] == [143] * processes, found
    (said,) = {out.splitlines()[-1] for _, out, _ in found}
    left = int(said.removeprefix("left at "))
    assert late - 3 <= left < STEPS
    assert max((tmp_path / "run").glob("step_*")).name == f"step_{left:08d}"
    for made in tmp_path.glob("made *"):
        made.unlink()
    assert [code for code, *_ in ended(started(tmp_path, processes, by_grain=by_grain))] == [0] * processes
    for i in range(0 if by_grain else processes):  # the first batch identifies the program; then the next ones
        numbers = [int(x) for x in (tmp_path / f"made {i}").read_text().split()]
        assert numbers == [0, *range(left, STEPS)]
    jax.tree.map(np.testing.assert_array_equal, result(tmp_path), undisturbed[kind])


@pytest.mark.parametrize("dies", [0, 1])
def test_the_death_of_one_ends_all_and_they_go_on(
    dies: int, tmp_path: Path, undisturbed: dict[tuple[int, bool], Any]
) -> None:
    running = started(tmp_path, 2)
    wait_for_batch(tmp_path, EVERY + 5, 2)
    running[dies].kill()
    begin = time.monotonic()
    found = ended(running, seconds=60)
    assert time.monotonic() - begin < 30  # the timeout of heartbeats, and a while
    assert found[dies][0] == -signal.SIGKILL
    assert found[1 - dies][0] == -signal.SIGABRT
    named = (
        "coordination service" if dies == 0 else r"(Task 1 heartbeat|unhealthy \(stopped sending heartbeats\):\s*1\b)"
    )
    assert re.search(named, found[1 - dies][2]), found[1 - dies][2]
    assert [code for code, *_ in ended(started(tmp_path, 2))] == [0, 0]
    jax.tree.map(np.testing.assert_array_equal, result(tmp_path), undisturbed[2, False])


def test_an_error_in_one_ends_all(tmp_path: Path) -> None:
    begin = time.monotonic()
    found = ended(started(tmp_path, 2, fails=(1, 30)), seconds=60)
    assert time.monotonic() - begin < 50  # with the start; the timeouts are ten seconds
    assert all(code != 0 for code, *_ in found)
    assert "a broken disk" in found[1][2]


if __name__ == "__main__":
    main()
