"""Fleets: groups of members on Ray, whose workers and drivers are killed. This file is also a driver that is killed."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import (
    Batches,
    EarlyStopping,
    Ensemble,
    Trainer,
    TrainState,
    exploit,
    k_best,
    load,
    save,
    select,
)
from plurax.ensemble.fleet import fit_fleet
from plurax.transforms._core.prng import is_key
from plurax.transforms._files.document import write_document

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

SIZE, STEPS = 7, 40
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 4)).astype(np.float32), RNG.integers(0, 3, 60)
RATES = np.geomspace(0.1, 0.001, SIZE).tolist()
KILLS = 20 if os.environ.get("HYPOTHESIS_PROFILE") == "fuzz" else 4


class Net(nnx.Module):
    """Two layers and dropout, so that keys are saved and loaded too."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden, self.drop = nnx.Linear(4, 8, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(self.drop(nnx.relu(self.hidden(x))))


def loss(net: Any, x: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(net(x), y).mean()


def make_trainer(which: list[int]) -> Trainer:
    rates = [RATES[i] for i in which]
    return Trainer(loss, optax.adam, hyperparams={"learning_rate": rates}, strategy="vmap")


def members(which: list[int]) -> Ensemble[Any]:
    return Ensemble.create(Net, len(which), seed=which)


def batches(which: list[int]) -> Batches:
    return Batches((X, Y), 20, key=jax.random.key(0))


def slowly(step: int, metrics: Any) -> None:
    time.sleep(0.05)


def fleet(directory: Path, **options: Any) -> Any:
    options = {"group_size": 2, "size": SIZE, "steps": STEPS, "checkpoint_every": 10, "progress": False, **options}
    given = options.pop("members", members), options.pop("batches", batches)
    return fit_fleet(make_trainer, *given, directory=directory, **options)


def all_at_once(steps: int = STEPS, state: Any = None, start: int = 0) -> tuple[TrainState[Any], Any]:
    """Return what one run of all members gives."""
    trainer, every = make_trainer([*range(SIZE)]), [*range(SIZE)]
    of_run = [batch for _, batch in zip(range(start + steps), batches(every), strict=False)][start:]
    return trainer.fit(trainer.init(members(every)) if state is None else state, of_run, progress=False)


def assert_close(found: Any, expected: Any) -> None:
    numbers = lambda x: jax.random.key_data(x) if is_key(x) else x
    jax.tree.map(lambda a, b: np.testing.assert_allclose(numbers(a), numbers(b), 1e-4, 1e-5), found, expected)


def assert_equal(found: Any, expected: Any) -> None:
    numbers = lambda x: jax.random.key_data(x) if is_key(x) else x
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(numbers(a), numbers(b)), found, expected)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray  # not at the top: then pytest would take the folder `tests` that jax_privacy installs for this one

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
        found_here: Any = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}  # by the workers
        ray.init(
            "local",  # not one that another program has left
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env=found_here,
        )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def undisturbed(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fleet(tmp_path_factory.mktemp("undisturbed"))


def test_groups_are_the_members_of_one_run(undisturbed: Any) -> None:
    ensemble, history = undisturbed
    expected, of_run = all_at_once()
    assert_close(ensemble, expected.ensemble)
    assert [row.keys() for row in history] == [row.keys() for row in of_run]
    for row, wanted in zip(history, of_run, strict=True):
        assert row["loss"] == pytest.approx(wanted.pop("loss"), rel=1e-4)
        assert {**row, **wanted} == row


def workers_of(directory: Path) -> list[tuple[Path, int]]:
    """Return the directories of the groups with the processes that last told about them."""
    found = []
    for path in directory.glob("round_*/group_*/report.json"):
        where = json.loads(path.read_text())["where"]
        found.append((path.parent, int(where.split(":")[1])))
    return found


def killing(directory: Path, kill: Callable[[int], None], kills: int) -> threading.Thread:
    """Kill workers at random times, each at most once; one whose first steps are being compiled reports nothing."""
    generator, killed = random.Random(0), set[int]()

    def work() -> None:
        while len(killed) < kills:
            time.sleep(generator.uniform(0.2, 0.8))
            alive = sorted(pid for _, pid in workers_of(directory) if pid not in killed)
            if alive:
                killed.add(pid := generator.choice(alive))
                kill(pid)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_killed_workers_change_nothing(cluster: None, undisturbed: Any, tmp_path: Path) -> None:
    steps = STEPS if KILLS < 20 else 400
    expected = undisturbed if steps == STEPS else fleet(tmp_path / "undisturbed", steps=steps)
    killed = list[int]()

    def kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    killer = killing(tmp_path / "killed", kill, KILLS)
    found = fleet(tmp_path / "killed", steps=steps, workers=4, callbacks=[slowly])
    killer.join(60)
    assert len(killed) == KILLS
    assert_equal(found[0], expected[0])
    assert found[1] == expected[1]


def test_a_driver_that_died_finds_its_groups(undisturbed: Any, tmp_path: Path) -> None:
    driver = subprocess.Popen([sys.executable, __file__, str(tmp_path / "fleet")], start_new_session=True)
    try:
        while len(list((tmp_path / "fleet").glob("round_0000/group_*/step_*"))) < 2:
            assert driver.poll() is None
            time.sleep(0.2)
    finally:
        driver.kill()
        driver.wait()
    found = fleet(tmp_path / "fleet")
    assert_equal(found[0], undisturbed[0])
    assert found[1] == undisturbed[1]
    again = fleet(tmp_path / "fleet")  # which is complete
    assert_equal(again[0], undisturbed[0])


def copies_of_the_best(state: TrainState[Any], metrics: Any) -> TrainState[Any]:
    return select(state, np.resize(k_best(metrics["loss"], 3), SIZE))


def perturbed_copies(state: TrainState[Any], metrics: Any) -> TrainState[Any]:
    key = jax.random.key(int(state.step))
    return exploit(state, metrics["loss"], key=key, perturb={"learning_rate": (0.5, 2.0)})[0]


@pytest.mark.parametrize("exchange", [perturbed_copies, copies_of_the_best])
def test_exchanges_are_between_all_groups(cluster: None, exchange: Any, tmp_path: Path) -> None:

    ensemble = members([*range(SIZE)])
    whole: Any = {"members": ensemble, "size": None, "batches": batches([])}
    found, history = fleet(tmp_path / "fleet", steps=25, exchange=exchange, exchange_every=10, **whole)
    state, of_run = all_at_once(10)
    for start, end in ((10, 20), (20, 25)):
        losses = np.array([row["loss"] for row in of_run[-SIZE:]])
        state, rows = all_at_once(end - start, exchange(state, {"loss": losses}), start)
        of_run += rows
    assert_close(found, state.ensemble)
    wanted = [(row["step"], row["member"], row["learning_rate"]) for row in of_run]
    assert [(row["step"], row["member"], row["learning_rate"]) for row in history] == wanted


def test_a_group_that_stops_early_makes_room(cluster: None, tmp_path: Path) -> None:
    never = EarlyStopping(evaluate=lambda ensemble: jnp.arange(len(ensemble)) * 1.0, every=5, patience=1)
    found, history = fleet(tmp_path / "fleet", workers=1, early_stopping=never)
    assert len(found) == SIZE
    assert {row["step"] for row in history} == {*range(1, 11)}


def test_a_group_that_takes_no_step_keeps_its_members(cluster: None, tmp_path: Path) -> None:
    options: Any = {"exchange": lambda state, metrics: state, "exchange_every": 10, "batches": [(X, Y)] * 15}
    with pytest.warns(UserWarning, match="the batches ended after step"):
        found, history = fleet(tmp_path / "fleet", **options)
    assert len(found) == SIZE
    assert {row["step"] for row in history} == {*range(1, 16)}


def test_an_error_names_the_group(cluster: None, tmp_path: Path) -> None:
    def broken(which: list[int]) -> Ensemble[Any]:
        if 4 in which:
            raise ZeroDivisionError("no such member")
        return members(which)

    with pytest.raises(ZeroDivisionError) as caught:
        fleet(tmp_path / "fleet", members=broken)
    assert "the group of members 4 to 5" in caught.value.__notes__[-1]


def test_a_group_that_always_dies_is_given_up(cluster: None, tmp_path: Path) -> None:
    def deadly(step: int, metrics: Any) -> None:
        if step == 12:
            while not list(tmp_path.glob("fleet/round_0000/group_0000/step_*")):  # it is written meanwhile
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match=r"members 0 to 6 died 3 times after step_00000010; see .*more memory"):
        fleet(tmp_path / "fleet", group_size=SIZE, callbacks=[deadly])


def test_checkpoints_instead_of_an_ensemble(cluster: None, undisturbed: Any, tmp_path: Path) -> None:
    paths, history = fleet(tmp_path / "fleet", gather=False)
    assert history == undisturbed[1]
    assert len(paths) == 4
    for i, path in enumerate(paths):
        which = [*range(SIZE)][2 * i : 2 * i + 2]
        assert_equal(load(path, members(which)), undisturbed[0][which])


def test_a_fleet_without_room_says_so(cluster: None, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # or it would wait for such a machine
        with pytest.raises(
            UserWarning, match="no machine of the cluster has 1 processors and 3 GPUs for a group; the f"
        ):
            fleet(tmp_path / "fleet", num_gpus=3)


def test_workers_come_and_go(undisturbed: Any, tmp_path: Path) -> None:
    """A second node joins the cluster while groups train, trains some, and is turned off."""
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "fleet"), "elastic"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "at once").read_text() == "1, then 2"
    assert_equal(load(tmp_path / "result", members([*range(SIZE)])), undisturbed[0])


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"size": None}, ValueError, "members is a function, so pass their number as size="),
        ({"members": members([0, 1])}, ValueError, "size is that of the ensemble; leave it out"),
        ({"group_size": 0}, ValueError, "group_size must be"),
        ({"epochs": 3}, TypeError, "epochs= is an option of a single run"),
        ({"batches": iter([])}, TypeError, "batches must be iterable again for each group"),
        ({"exchange": exploit}, ValueError, "exchange and exchange_every belong together"),
        ({"exchange": exploit, "exchange_every": 2, "steps": None}, ValueError, "exchange needs steps="),
        (
            {"members": lambda which: Ensemble.create(Net, len(which), seed=which, shared="hidden")},
            ValueError,
            "members of different groups cannot share parameters",
        ),
    ],
)
def test_refusals(tmp_path: Path, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^fit_fleet: .*{message}"):
        fleet(tmp_path / "fleet", **options)


def test_a_directory_of_another_fleet_is_refused(undisturbed: Any, tmp_path: Path) -> None:
    write_document(tmp_path / "fleet.json", "plurax fleet", 1, {"size": SIZE, "group_size": 3, "exchange_every": None})
    with pytest.raises(ValueError, match="is of a fleet with group_size=3; use another directory"):
        fleet(tmp_path)


def elastic(directory: Path) -> None:
    """Train on a node for one group, beside which another is added and removed, without notice."""
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
    found: list[Any] = []

    def training() -> int:
        return len(list(directory.glob("round_0000/group_*/run.lock")))

    trains = threading.Thread(target=lambda: found.append(fleet(directory, callbacks=[slowly])[0]))
    trains.start()
    while not list(directory.glob("round_0000/group_*/step_*")):
        time.sleep(0.1)
    before, node = training(), nodes.add_node(num_cpus=1)
    while training() < 2:
        time.sleep(0.1)
    (directory.parent / "at once").write_text(f"{before}, then {training()}")
    time.sleep(1)
    nodes.remove_node(node, allow_graceful=False)
    trains.join()
    save(directory.parent / "result", found[0])
    ray.shutdown()
    nodes.shutdown()


if __name__ == "__main__":
    if sys.argv[2:] == ["elastic"]:
        elastic(Path(sys.argv[1]))
    else:
        fleet(Path(sys.argv[1]), callbacks=[slowly])
