"""A process may be killed between any two changes of files: what is there then is what was there before, or after.

Before every change that a writer makes, the directory is copied, as a crash would leave it.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Committee, Ensemble, Trainer, export, load, load_exported, save
from plurax.ensemble._fleet.group import Job, train_group
from plurax.transforms._core.prng import is_key

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
Y = np.ones((3, 1), np.float32)
CHANGES = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "shutil.rmtree"}


class Copies:
    """Copies of a directory, one for each state in which a crash could leave it."""

    def __init__(self, root: Path, home: Path) -> None:
        self.root, self.home, self.made, self.on = root, home, list[Path](), True
        root.mkdir()
        sys.addaudithook(self._before)

    def _before(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on or event not in CHANGES or not str(args[0]).startswith(str(self.home)):
            return
        if event == "open" and not (args[2] & 0o3 or args[2] & 0o100):  # to read
            return
        self.on = False
        try:
            self.made.append(self.root / f"{len(self.made):04d}")
            shutil.copytree(self.home, self.made[-1])
        finally:
            self.on = True


def states_of(write: Callable[[Path], object], tmp_path: Path) -> list[Path]:
    """Return the states of a directory while a function writes to it."""
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    copies = Copies(tmp_path / "states", home)
    write(home)
    copies.on = False  # a hook stays until the process ends
    return copies.made


def numbers(tree: Any) -> list[Any]:
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(numbers(a), numbers(b), strict=True))


def model(rngs: nnx.Rngs) -> Any:
    return nnx.Linear(2, 1, rngs=rngs)


def loss(model: Any, x: Any, y: Any) -> Any:
    return jnp.mean((model(x) - y) ** 2)


def ensemble(seed: int) -> Any:
    return Ensemble.create(model, 2, seed=seed)


def committee(seed: int) -> Committee:
    return Committee([ensemble(seed), ensemble(seed + 9)], [1.0, 2.0, 1.0, float(seed)])


def export_to(path: Path, seed: int) -> None:
    export(ensemble(seed), path, X[:1], platforms=("cpu",), kind="regression", outputs=("mean",))


KINDS: dict[str, tuple[Callable[[Path, int], object], Callable[[Path], Any]]] = {
    "ensemble": (lambda path, seed: save(path, ensemble(seed)), lambda path: load(path, ensemble(0))),
    "committee": (
        lambda path, seed: committee(seed).save(path),
        lambda path: [(x := Committee.load(path, committee(0))).groups, x.weights],
    ),
    "export": (export_to, lambda path: load_exported(path)(X)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_save_leaves_what_was_there_or_what_is_new(kind: str, tmp_path: Path) -> None:
    write, read = KINDS[kind]
    (tmp_path / "home").mkdir()
    write(tmp_path / "home" / "a", 1)
    before = read(tmp_path / "home" / "a")
    states = states_of(lambda home: write(home / "a", 2), tmp_path)
    after = read(tmp_path / "home" / "a")
    assert not same(before, after)
    assert len(states) > 2
    outcomes = []
    for state in states:
        try:
            found = read(state / "a")
            outcomes.append("before" if same(found, before) else "after" if same(found, after) else "torn")
        except FileNotFoundError as error:
            outcomes.append(f"{error}")
    # Between two renames there is none, and the error says where the earlier one is.
    between = [x for x in outcomes if x not in ("before", "after")]
    assert len(between) <= 1
    if between:
        (left,) = (states[outcomes.index(between[0])]).glob(".a.*.replaced")
        assert same(read(left), before)
        assert kind == "committee" or str(left) in between[0]
        outcomes.remove(between[0])
    assert outcomes == sorted(outcomes, reverse=True)  # never back
    for state in (states[0], states[len(states) // 2], states[-1]):  # and the next save succeeds
        write(state / "a", 3)
        read(state / "a")


@pytest.mark.slow
def test_a_run_goes_on_from_any_state_of_its_directory(tmp_path: Path) -> None:
    trainer = Trainer(loss, optax.adam(0.1), strategy="vmap")

    def fit(directory: Path) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is damaged
            return trainer.fit(
                trainer.init(ensemble(0)),
                [(X, Y)] * 4,
                progress=False,
                checkpoint_dir=directory,
                checkpoint_every=1,
                checkpoint_keep=2,
            )

    states = states_of(lambda home: fit(home), tmp_path)
    state, history = fit(tmp_path / "whole")
    assert len(states) > 40
    for directory in states:
        found, rows = fit(directory)
        assert same(found, state)
        assert rows == history
        left = {x.name for x in directory.iterdir()}
        assert {"step_00000003", "step_00000004"} <= left
        # Killed before the oldest was removed: a run that takes no further step removes none.
        assert left <= {"step_00000002", "step_00000003", "step_00000004"}


@pytest.mark.slow
def test_a_group_of_a_fleet_goes_on_from_any_state_of_its_directory(tmp_path: Path) -> None:
    trainer = Trainer(loss, optax.adam(0.1), strategy="vmap")
    job = Job(lambda which: trainer, lambda which: ensemble(0), [(X, Y)] * 3, {"checkpoint_every": 1}, {})

    def train(home: Path) -> Any:
        group = home / "round_0000" / "group_0000"
        done = train_group(job, [0, 1], str(group), 0, 3)
        return load(group / f"step_{done.step:08d}", trainer.init(ensemble(0))), done.history

    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "fleet.json").write_bytes(b"")  # a sign of the shared disk
    states = states_of(train, tmp_path)
    state, history = train(tmp_path / "home")
    assert len(states) > 20
    for home in states[::3]:
        found, rows = train(home)
        assert same(found, state)
        assert rows == history
