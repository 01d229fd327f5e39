"""Train an ensemble in groups of members, each in a process of its own, on one machine or a cluster, with Ray.

Members need nothing from each other, so a fleet has no common program: a group is a run of `Trainer.fit` with its own
checkpoints, which goes on elsewhere if its process or machine dies. The groups, not the workers, determine what is
computed, so that workers may come and go.

Needs the extra `ray`: `pip install "plurax[ray]"`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..transforms._core.arguments import check_callable, check_count
from ..transforms._files.atomic_write import write_atomically
from ..transforms._files.document import read_document, write_document
from ..transforms._files.lock import locked
from ._fleet.cluster import Cluster, Task
from ._fleet.group import Job
from ._fleet.table import Table
from ._members.ensemble import Ensemble
from ._step.state import TrainState
from ._training.checkpoint import load, save
from ._training.population import select
from ._training.trainer import Trainer

__all__ = ["fit_fleet"]

# Settings of JAX that workers take over from the driver.
_FORMAT = "plurax fleet"
_SETTINGS = ("jax_enable_x64", "jax_default_prng_impl", "jax_default_matmul_precision")
Exchange = Callable[[TrainState, dict[str, np.ndarray]], TrainState]


def fit_fleet(
    make_trainer: Callable[[list[int]], Trainer],
    members: Ensemble | Callable[[list[int]], Ensemble],
    batches: Iterable[Any] | Callable[[list[int]], Iterable[Any]],
    *,
    directory: str | os.PathLike[str],
    group_size: int,
    size: int | None = None,
    steps: int | None = None,
    exchange: Exchange | None = None,
    exchange_every: int | None = None,
    workers: int | None = None,
    num_cpus: float = 1,
    num_gpus: float = 0,
    address: str | None = None,
    gather: bool = True,
    progress: bool = True,
    **options: Any,
) -> tuple[Any, list[dict[str, Any]]]:
    """Train members in groups on the workers of a Ray cluster.

    Args:
      make_trainer: a function from the indices of the members of a group to their `Trainer`.
      members: an `Ensemble`; or a function from the indices of the members of a group to their `Ensemble`, which is
        called in the worker, so that no process holds all members before they are trained. The driver calls it too,
        for shapes only, in `jax.eval_shape`.
      batches: as for `Trainer.fit`, the same for all groups; or a function from the indices of the members of a group
        to its batches, which is called in the worker. They must be the same each time, since a group that was
        interrupted takes them from the beginning, and skips those that it has used.
      directory: where the groups write their checkpoints; all machines must see it. With the same directory, a fleet
        goes on where it was when its driver died.
      group_size: the number of members of a group, the last of which may have fewer. Another number gives the same
        members up to rounding, and the same number the same to the bit, on whatever workers.
      size: the number of members, if `members` is a function.
      steps: as for `Trainer.fit`.
      exchange: a function of the `TrainState` of all members and of their last metrics since the exchange before,
        arrays (size,) by name with NaN for members without any, that returns the state to go on from, as `exploit`
        does.
      exchange_every: steps between two exchanges, at which all groups wait for each other.
      workers: how many groups train at once; None for as many as the cluster has room for.
      num_cpus: the processors that a group occupies on the cluster.
      num_gpus: the GPUs that a group occupies.
      address: the address of a Ray cluster; None for the one that the program is connected to, else the one that the
        environment variable RAY_ADDRESS names, else a new one on this machine.
      gather: whether to return the ensemble of all members. False is for more than the memory of the driver holds.
      progress: whether to show a table of the groups.
      **options: further arguments of `Trainer.fit`, but for `epochs`, `checkpoint_dir`, `progress` and `resume`.
        Functions among them, and messages, count members within the group. Each round is a run of its own, in which the
        patience of `early_stopping` begins anew.

    Returns:
      The `Ensemble` of all members as they ended, and the history, as `Trainer.fit` returns them, ordered by step and
      member. With `gather=False`, instead of the ensemble a list of the checkpoints of the groups, as `pathlib.Path`,
      which `load(path, members(which))` and `load_member` read.

    Raises:
      ModuleNotFoundError: Ray is not installed.
      TypeError: an argument has the wrong type.
      ValueError: `size` is missing, or is given with an `Ensemble`; a count is too small; the members share parameters;
        `directory` is of another fleet; `exchange` is given without `exchange_every` and `steps`, or returns a state of
        another size.
      BlockingIOError: another fleet is writing to `directory`.
      RuntimeError: the worker of a group died three times in a row without a newer checkpoint.
      Exception: what a group raises, with a note that names its members.

    Cost:
      Each worker imports JAX, and compiles the step of each group that it trains, in each round again.

    Examples:
      `fit_fleet(make_trainer, members, batches, size=4, group_size=2, directory="runs/fleet", steps=1000)` trains two
      groups of two members, with

      >>> import optax
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, Trainer
      >>> rates = [0.1, 0.03, 0.01, 0.003]
      >>> def make_trainer(which):
      ...     options = {"learning_rate": [rates[i] for i in which]}
      ...     return Trainer(lambda model, x: (model(x) ** 2).mean(), optax.adam, hyperparams=options)
      >>> def members(which):
      ...     return Ensemble.create(lambda rngs: nnx.Linear(3, 1, rngs=rngs), len(which), seed=which)
      >>> make_trainer([2, 3]).init(members([2, 3])).opt_state.hyperparams["learning_rate"]
      Array([0.01 , 0.003], dtype=float32)
    """
    found = find_spec("ray")
    if found is None or found.origin is None:  # a folder of this name, such as Ray's in /tmp, is no package
        needed = "plurax.ensemble.fleet needs Ray; install it with: pip install 'plurax[ray]'"
        raise ModuleNotFoundError(needed, name="ray")
    check_callable("fit_fleet", make_trainer, "make_trainer")
    count = _size_of(members, size)
    check_count("fit_fleet", "group_size", group_size)
    check_count("fit_fleet", "workers", workers, optional=True)
    for name in ("epochs", "checkpoint_dir", "progress", "resume"):
        if name in options:
            raise TypeError(f"fit_fleet: {name}= is an option of a single run, not of a fleet; leave it out.")
    if isinstance(batches, Iterator):
        got = type(batches).__name__
        raise TypeError(f"fit_fleet: batches must be iterable again for each group, but got a {got}; pass a function.")
    ends = _rounds(steps, exchange, exchange_every, options.get("history_every", 1))
    groups = [list(range(i, min(i + group_size, count))) for i in range(0, count, group_size)]
    settings = {name: getattr(jax.config, name) for name in _SETTINGS}
    job = Job(make_trainer, members, batches, options, settings)
    if jax.eval_shape(lambda: job.ensemble(groups[0])).shared is not None:
        raise ValueError("fit_fleet: members of different groups cannot share parameters; train them by Trainer.fit.")
    home, history, told = Path(os.path.realpath(directory)), list[dict[str, Any]](), dict[str, None]()
    _claim(home, {"size": count, "group_size": group_size, "exchange_every": exchange_every})
    start, tasks, rows = 0, list[Task](), list[dict[str, Any]]()
    with locked("fit_fleet", home), Cluster.connected(address, workers, num_cpus), Table(progress) as table:
        cluster = Cluster("fit_fleet", job, workers, {"num_cpus": num_cpus, "num_gpus": num_gpus})
        for number, end in enumerate(ends):
            before, place = tasks, home / f"round_{number:04d}"
            tasks = [Task(which, place / f"group_{i:04d}") for i, which in enumerate(groups)]
            if exchange is not None and before:
                _exchanged(job, before, tasks, start, exchange, _last(rows, count))
            cluster.run(tasks, start, end, partial(table.show, tasks, end))
            rows = sorted((row for task in tasks for row in _done(task).history), key=_step_and_member)
            history += rows
            told |= dict.fromkeys(
                f"In {task.name}, counted from 0: {text}" for task in tasks for text in _done(task).warnings
            )
            start = end or 0
    for text in told:
        warnings.warn(text, stacklevel=2)
    return _joined(job, tasks) if gather else [_path(task) for task in tasks], history


def _size_of(members: Any, size: int | None) -> int:
    """Return the number of members; raise if it is not known."""
    if isinstance(members, Ensemble):
        if size is not None:
            raise ValueError("fit_fleet: size is that of the ensemble; leave it out.")
        return len(members)
    check_callable("fit_fleet", members, "members")
    if size is None:
        raise ValueError("fit_fleet: members is a function, so pass their number as size=.")
    check_count("fit_fleet", "size", size)
    return size


def _rounds(steps: int | None, exchange: Any, every: int | None, recorded: int) -> list[int | None]:
    """Return the steps at which the rounds end, between which members are exchanged."""
    check_count("fit_fleet", "steps", steps, optional=True)
    check_count("fit_fleet", "exchange_every", every, optional=True)
    if (exchange is None) != (every is None):
        raise ValueError("fit_fleet: exchange and exchange_every belong together; pass both, or none.")
    if exchange is None or every is None:
        return [steps]
    check_callable("fit_fleet", exchange, "exchange")
    if steps is None:
        raise ValueError("fit_fleet: exchange needs steps=, at which all groups end.")
    if every % recorded:
        raise ValueError(f"fit_fleet: exchange_every={every} must be a multiple of history_every={recorded}.")
    return [*range(every, steps, every), steps]


def _claim(home: Path, about: dict[str, Any]) -> None:
    """Write what identifies a fleet into its directory; raise if it holds another one."""
    path = home / "fleet.json"
    try:
        found = read_document(f"fit_fleet: the fleet at {home}", path, _FORMAT, 1, within=home, of_json=True).entries
    except FileNotFoundError:
        write_document(path, _FORMAT, 1, about)
        return
    if found != about:
        differs = ", ".join(f"{name}={found.get(name)}" for name in about if found.get(name) != about[name])
        raise ValueError(f"fit_fleet: {home} is of a fleet with {differs}; use another directory.")


def _done(task: Task) -> Any:
    assert task.done is not None  # the round has ended
    return task.done


def _step_and_member(row: dict[str, Any]) -> tuple[int, int]:
    return row["step"], row["member"]


def _last(history: Sequence[dict[str, Any]], size: int) -> dict[str, np.ndarray]:
    """Return the last number of each member under each name, as arrays (size,); NaN where there is none."""
    found: dict[str, np.ndarray] = {}
    for row in history:
        for name in row.keys() - {"step", "member"}:
            found.setdefault(name, np.full(size, np.nan))[row["member"]] = row[name]
    return found


def _exchanged(
    job: Job, before: Sequence[Task], after: Sequence[Task], step: int, exchange: Exchange, metrics: dict[str, Any]
) -> None:
    """Write the states with which the groups of the next round begin, unless they are there."""
    ready = after[0].directory.parent / "ready"
    if ready.exists():  # a driver that died has written them
        return
    states = [load(_path(task), job.make_trainer(task.which).init(job.ensemble(task.which))) for task in before]
    if any(state.standing.schedules for state in states):
        raise ValueError("fit_fleet: schedules per member belong to one group, and cannot be exchanged.")
    arrays = jax.tree.map(lambda *x: jnp.concatenate(x), *(state._arrays() for state in states))
    whole = TrainState._of_arrays(states[0]._structure, arrays, jnp.int32(step), None)
    new = exchange(whole, metrics)
    if not isinstance(new, TrainState) or new._size != whole._size:
        what = f"{new._size} members" if isinstance(new, TrainState) else type(new).__name__
        raise ValueError(f"fit_fleet: exchange must return the TrainState of all {whole._size} members, not {what}.")
    for task in after:
        save(task.directory / "start", select(new, task.which))
    write_atomically(ready, [])


def _joined(job: Job, tasks: Sequence[Task]) -> Ensemble:
    """Return the ensemble of all members as they ended."""
    found = [load(_path(task), jax.eval_shape(lambda which=task.which: job.ensemble(which))) for task in tasks]
    own = jax.tree.map(lambda *x: jnp.concatenate(x), *((x.trainable, x.rest) for x in found))
    return found[0]._with(*own, found[0].shared)


def _path(task: Task) -> Path:
    """Return the last checkpoint of a group."""
    last = task.directory / f"step_{_done(task).step:08d}"
    return last if last.exists() else task.directory / "end"
