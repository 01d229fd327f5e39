"""An ensemble over two processes with two devices each. This file is also the script that each process runs."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from plurax.ensemble import EarlyStopping, Ensemble, Restarts, Trainer, load, load_member, save
from plurax.transforms._files.errors import Damaged
from plurax.transforms._runs import checkpoint_clock, checkpoint_writer
from plurax.transforms._runs.checkpoint import Checkpoint
from plurax.transforms._runs.processes import Group

if __name__ != "__main__":  # the processes run this file as a script
    from ..._processes import Process, ended, free_port

# All in one worker, which runs the script once.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("two processes")]

BATCHES = [
    (
        np.sin(np.arange(24.0) + i).reshape(8, 3).astype(np.float32),
        np.cos(np.arange(16.0) * i).reshape(8, 2).astype("f"),
    )
    for i in range(4)
]


class Model(nnx.Module):
    """A dense layer and dropout, so that keys are saved and loaded too."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(3, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x)


class TwoLayers(nnx.Module):
    """A layer that members share, and one of their own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.trunk, self.head = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.tanh(self.trunk(x)))


def sharing(mesh: Any = None) -> Ensemble:
    return Ensemble.create(TwoLayers, 4, seed=0, mesh=mesh, shared="trunk")


def loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - y) ** 2)


def trainer_on(mesh: Any) -> Trainer:
    return Trainer(loss, optax.adam, hyperparams={"learning_rate": 0.1}, strategy="vmap", mesh=mesh)


def ill_trainer_on(mesh: Any) -> Trainer:
    """Of four members, the second does not learn and the third becomes non-finite."""
    rates = {"learning_rate": [0.1, 0.0, 1e30, 0.05]}
    return Trainer(loss, optax.sgd, hyperparams=rates, strategy="vmap", mesh=mesh)


def watching() -> dict[str, Any]:
    def evaluate(ensemble: Ensemble) -> jax.Array:
        x, y = BATCHES[0]
        return jnp.mean((ensemble(x) - y) ** 2, axis=(1, 2))

    return {
        "early_stopping": EarlyStopping(evaluate=evaluate, every=2, patience=2),
        "restarts": Restarts(every=3, times=1),
    }


def mean_output(ensemble: Ensemble, x: Any, y: Any) -> dict[str, jax.Array]:
    return {"mean": jnp.mean(ensemble(x)), "each": jnp.mean(ensemble(x), axis=(1, 2))}


def told_to(steps: list[int]) -> Any:
    return lambda step, metrics: steps.append(step)


def members(size: int, mesh: Any = None) -> Ensemble:
    return Ensemble.create(Model, size, seed=0, mesh=mesh)


def numbers(tree: Any) -> list[np.ndarray]:
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


def held(tree: Any) -> list[np.ndarray]:
    """Return the shards of this process."""
    data = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(tree)
    ]
    return [np.asarray(x.data) for array in data for x in getattr(array, "addressable_shards", [array])]


# The script.


def run(root: Path) -> dict[str, Any]:
    """Train, save and load on meshes over both processes; return tracebacks by name."""
    devices = np.array(jax.devices())
    assert (jax.process_count(), devices.size, jax.local_device_count()) == (2, 4, 2)
    flat = Mesh(devices, ("ensemble",))
    across = Mesh(devices.reshape(2, 2).T, ("ensemble", "data"))  # both processes hold a part of each batch
    found: dict[str, Any] = {}

    def check(work: Any) -> None:
        try:
            found[work.__name__] = work() or ""
        except Exception:  # the test reports any error
            found[work.__name__] = traceback.format_exc()

    @check
    def trains_and_goes_on_elsewhere() -> None:
        first = trainer_on(flat)
        ensemble = members(4, flat)
        assert {len(shard.data) for x in jax.tree.leaves(ensemble) for shard in x.addressable_shards} == {1}
        first.fit(first.init(ensemble), BATCHES[:2], progress=False, checkpoint_dir=root / "run", checkpoint_every=1)
        second = trainer_on(across)
        state, history = second.fit(second.init(members(4)), BATCHES, progress=False, checkpoint_dir=root / "run")
        assert int(state.step) == 4
        assert [row["step"] for row in history] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4

    @check
    def pads() -> None:
        trainer = trainer_on(flat)
        state = trainer.init(members(5))
        for batch in BATCHES:
            state, metrics = trainer.step(state, batch)
            assert len(state.ensemble) == 5  # `len` does not change the state
        assert metrics["loss"].shape == (5,)
        remade = jax.tree.map(lambda x: x, state)
        assert trainer.step(remade, BATCHES[0])[1]["loss"].shape == (5,)
        total = Trainer(lambda *args: 8 * loss(*args) + jnp.sum(args[1]), optax.sgd(0.1), strategy="vmap", mesh=across)
        with pytest.raises(ValueError, match="the loss reports `loss`"):
            total.step(total.init(members(2)), BATCHES[0])
        save(root / "padded", state)
        again = load(root / "padded", trainer.init(members(5)))
        for mine, theirs in zip(held(again), held(state), strict=True):
            np.testing.assert_array_equal(mine, theirs)

    @check
    def members_stop_and_leave() -> None:
        trainer, told = ill_trainer_on(flat), list[int]()
        options: dict[str, Any] = {**watching(), "checkpoint_dir": root / "watched", "callbacks": [told_to(told)]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(trainer.init(members(4, flat)), BATCHES * 6, steps=11, progress=False, **options)
            state, _ = trainer.fit(trainer.init(members(4)), BATCHES * 6, progress=False, **options)
        assert told == list(range(1, 25))  # in every process
        assert int(state.step) == 24
        assert len(state.ensemble) == 4
        again = load(root / "watched" / "step_00000024", trainer.init(members(4)))
        for mine, theirs in zip(held(again), held(state), strict=True):  # the best, and the last ones
            np.testing.assert_array_equal(mine, theirs)

    @check
    def validates() -> None:
        for mesh in (flat, across):
            trainer, kept = trainer_on(mesh), list[Any]()
            options: dict[str, Any] = {"validation": BATCHES[0], "validate_every": 2, "metrics": mean_output}
            _, history = trainer.fit(
                trainer.init(members(5)),
                BATCHES,
                progress=False,
                early_stopping=EarlyStopping(evaluate="mean"),
                callbacks=[lambda step, metrics, state, kept=kept: kept.append(state())],
                **options,
            )
            assert [int(state.step) for state in kept] == [1, 2, 3, 4]
            if jax.process_index() == 0:
                (root / f"history {len(mesh.shape)}").write_text(json.dumps(history))

    @check
    def fails_together() -> None:
        ensemble, put = members(4, flat), checkpoint_writer._write_rows

        def fail(*_: Any) -> None:
            raise OSError("disk full")

        save(root / "whole", ensemble)
        before = sorted(path.name for path in root.rglob("*"))
        failing: Any = fail if jax.process_index() == 1 else put
        checkpoint_writer._write_rows = failing
        try:
            for name in ("whole", "other"):
                with pytest.raises(
                    OSError, match="disk full" + (r" \(In process 1.\)" if jax.process_index() == 0 else "")
                ):
                    save(root / name, ensemble)
        finally:
            checkpoint_writer._write_rows = put
        if jax.process_index() == 0:  # the process that cleans up
            assert sorted(path.name for path in root.rglob("*")) == before
        with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
            load(root / "other", ensemble)

    def fit_slowly(name: str, write: Any, callback: Any) -> None:
        """Take eight steps, with a checkpoint after four, by a function that writes rows."""
        trainer, put = trainer_on(flat), checkpoint_writer._write_rows
        options: dict[str, Any] = {"checkpoint_dir": root / name, "checkpoint_every": 4, "callbacks": [callback]}
        checkpoint_writer._write_rows = lambda path, *args: write(put, path, *args)
        try:
            trainer.fit(trainer.init(members(4, flat)), BATCHES * 2, progress=False, **options)
        finally:
            checkpoint_writer._write_rows = put

    @check
    def writes_while_the_run_goes_on() -> None:
        later, path = threading.Event(), root / "meanwhile" / "step_00000004"

        def write_later(put: Any, *args: Any) -> Any:
            assert later.wait(60)
            return put(*args)

        def look(step: int, metrics: Any) -> None:
            if step != 5:
                return
            assert not path.exists()
            later.set()
            until = time.monotonic() + 60
            while not path.exists():  # now, not at the next checkpoint
                assert time.monotonic() < until
                time.sleep(0.01)

        fit_slowly("meanwhile", write_later, look)

    @check
    def the_first_clock_decides() -> None:
        """The clock of the other one stands still."""
        looks, before = itertools.count(), (checkpoint_clock.now, checkpoint_clock._SHARE)
        checkpoint_clock.now = lambda: 100.0 * next(looks) if jax.process_index() == 0 else 0.0
        checkpoint_clock._SHARE = 1e9
        trainer, options = trainer_on(flat), {"checkpoint_keep": 99, "progress": False}
        try:
            slowly = [lambda step, metrics: time.sleep(0.05)]  # so that checkpoints are done meanwhile
            paths: dict[str, Any] = {"checkpoint_dir": root / "clock", "callbacks": slowly}
            state, _ = trainer.fit(trainer.init(members(4, flat)), BATCHES * 5, **options, **paths)
        finally:
            checkpoint_clock.now, checkpoint_clock._SHARE = before
        whole, _ = trainer.fit(trainer.init(members(4, flat)), BATCHES * 5, **options)
        for mine, theirs in zip(held(state), held(whole), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert len([*(root / "clock").glob("step_*")]) > 2

    @check
    def a_disk_fails_in_one_process() -> None:
        for failing, then in ((4, "The run goes on"), (8, "It was the last one of the run")):

            def write(put: Any, path: Path, *args: Any, failing: int = failing) -> Any:
                if jax.process_index() == 1 and f"step_{failing:08d}" in f"{path}":
                    raise OSError("disk full")
                return put(path, *args)

            name = f"failing {failing}"
            with pytest.warns(UserWarning, match=rf"checkpoint of step {failing} in .*disk full.*{then}"):
                fit_slowly(name, write, told_to([]))
            names = sorted(path.name for path in (root / name).iterdir() if path.name != "run.lock")
            assert names == [f"step_{12 - failing:08d}"]

    @check
    def an_error_leaves_the_checkpoint_before_it() -> None:
        def fail(step: int, metrics: Any) -> None:
            if step == 5:
                raise ZeroDivisionError

        def write(put: Any, *args: Any) -> Any:
            time.sleep(2 * jax.process_index())  # the first process waits for the other
            return put(*args)

        with pytest.raises(ZeroDivisionError):
            fit_slowly("error", write, fail)

    @check
    def splits_each_member() -> None:
        """Within each process, and across both, which then put kernels together to write them."""
        for name, held_by in (("within", devices.reshape(2, 2)), ("across", devices.reshape(2, 2).T)):
            mesh = Mesh(held_by, ("ensemble", "model"))
            trainer = Trainer(loss, optax.adam(0.1), strategy="vmap", mesh=mesh)
            options: dict[str, Any] = {"progress": False, "checkpoint_dir": root / name, "checkpoint_every": 1}
            trainer.fit(trainer.init(sharing(mesh)), BATCHES[:2], **options)
            state, _ = trainer.fit(trainer.init(sharing(mesh)), BATCHES, **options)
            kernels = state.ensemble.trainable["head"]["kernel"], state.ensemble.shared.trainable["trunk"]["kernel"]
            assert [x.addressable_shards[0].data.shape for x in kernels] == [(2, 2, 2), (3, 2)]
            again = load(root / name / "step_00000004", trainer.init(sharing(mesh)))
            for mine, theirs in zip(held(again), held(state), strict=True):
                np.testing.assert_array_equal(mine, theirs)

    @check
    def one_process_reads_a_state() -> None:
        """Reading an attribute takes no program of all processes, also without a mesh of the trainer."""
        trainer = Trainer(loss, optax.adam(0.1), strategy="vmap")
        state = jax.jit(lambda x: x)(trainer.init(members(4, flat)))
        for i in range(2):
            state, _ = trainer.step(state, BATCHES[i])
            if jax.process_index() == 0:
                assert int(state.step) == i + 1

    @check
    def own_files() -> None:
        """A process saves and loads its local arrays alone."""
        mine = jax.tree.map(lambda x: x + jax.process_index(), members(2).trainable)
        ensemble = Ensemble(members(2).structure, mine, members(2).rest)
        save(root / f"own {jax.process_index()}", ensemble)
        again = load(root / f"own {jax.process_index()}", ensemble)
        np.testing.assert_array_equal(numbers(again.trainable)[0], jax.process_index())

    return found


def main() -> None:
    root, process, port = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    (root / f"found {process}").write_text(json.dumps(run(root / "files")))


# The tests, in one process with one device.


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory with the results and checkpoints of two processes."""
    root = tmp_path_factory.mktemp("processes")
    (root / "files").mkdir()
    environment, port = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}, str(free_port())
    found = ended([Process([sys.executable, __file__, str(root), str(i), port], env=environment) for i in range(2)])
    assert [code for code, *_ in found] == [0, 0], found
    return root


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize(
    "name",
    [
        "trains_and_goes_on_elsewhere",
        "pads",
        "members_stop_and_leave",
        "validates",
        "fails_together",
        "writes_while_the_run_goes_on",
        "the_first_clock_decides",
        "a_disk_fails_in_one_process",
        "an_error_leaves_the_checkpoint_before_it",
        "splits_each_member",
        "one_process_reads_a_state",
        "own_files",
    ],
)
def test_two_processes(root: Path, name: str, process: int) -> None:
    found = json.loads((root / f"found {process}").read_text())
    assert not found[name], found[name]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("run/step_00000004", 4),
        ("padded", 5),
        ("meanwhile/step_00000004", 4),
        ("failing 8/step_00000004", 4),
        ("error/step_00000004", 4),
    ],
)
def test_one_process_loads_a_checkpoint_of_two(root: Path, name: str, size: int) -> None:
    trainer = trainer_on(None)
    expected, _ = trainer.fit(trainer.init(members(size)), BATCHES, progress=False)
    path = root / "files" / name
    state = load(path, trainer.init(members(size)))
    for mine, theirs in zip(numbers(state), numbers(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(
        numbers(nnx.state(load_member(path, 3, state))), numbers(nnx.state(expected.ensemble[3])), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["within", "across"])
def test_one_process_loads_members_that_were_split(root: Path, name: str) -> None:
    trainer = Trainer(loss, optax.adam(0.1), strategy="vmap")
    expected, _ = trainer.fit(trainer.init(sharing()), BATCHES, progress=False)
    path = root / "files" / name / "step_00000004"
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), load(path, trainer.init(sharing())), expected)
    assert isinstance(load_member(path, 1, expected), TwoLayers)


@pytest.mark.filterwarnings("ignore:Trainer.fit")
def test_members_stop_and_leave_as_in_one_process(root: Path) -> None:
    trainer = ill_trainer_on(None)
    expected, _ = trainer.fit(trainer.init(members(4)), BATCHES * 6, progress=False, **watching())
    assert expected.standing.stopped[1] == 2
    np.testing.assert_array_equal(expected.standing.restarts, [0, 0, 1, 0])
    state = load(root / "files" / "watched" / "step_00000024", trainer.init(members(4)))
    for mine, theirs in zip(numbers(state), numbers(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axes", [1, 2])
def test_validates_as_in_one_process(root: Path, axes: int) -> None:
    trainer = trainer_on(None)
    options: dict[str, Any] = {"validation": BATCHES[0], "validate_every": 2, "metrics": mean_output}
    _, expected = trainer.fit(trainer.init(members(5)), BATCHES, progress=False, **options)
    history = json.loads((root / "files" / f"history {axes}").read_text())
    assert [row.keys() for row in history] == [row.keys() for row in expected]
    for row, wanted in zip(history, expected, strict=True):
        np.testing.assert_allclose(list(row.values()), list(wanted.values()), rtol=1e-5, atol=1e-6)


def owners_of(path: Path) -> list[int]:
    found: list[int] = Checkpoint.open("load", path).manifest.owners.tolist()
    return found


def test_each_process_has_written_its_members(root: Path) -> None:
    assert owners_of(root / "files" / "run" / "step_00000002") == [0, 0, 1, 1]
    assert {path.name for path in (root / "files" / "run" / "step_00000002" / "arrays").iterdir()} == {"0", "1"}
    # Five members do not divide over four devices: each process holds all.
    assert owners_of(root / "files" / "padded") == [0, 0, 0, 0, 0]


class Test_a_group_of_one:
    """Gathers and agrees without communication."""

    def test_gathers_and_agrees_with_itself(self) -> None:
        group = Group.of({"x": jnp.ones(3), "y": np.ones(2)})
        assert group.is_alone
        assert group.is_first
        assert group.gather({"a": 1}) == [{"a": 1}]
        assert group.agree(lambda: 3) == 3

    def test_reraises_errors(self) -> None:
        def fail() -> None:
            raise Damaged("no")

        with pytest.raises(Damaged, match="^no$"):
            Group.of(()).agree(fail)


if __name__ == "__main__":
    main()
