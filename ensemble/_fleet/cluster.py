"""`Cluster`: run the groups of a round on Ray; start a group again, from its checkpoint, if its worker has died."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .group import Done, Job, train_group

# A group whose worker dies so often without a newer checkpoint is given up: its step may need too much memory.
_DEATHS = 3


@dataclass
class Task:
    """The training of one group in one round.

    Attributes:
      which: the indices of its members.
      directory: its directory.
      ref: the reference of the running Ray task; None if it waits.
      deaths: how often its worker died since the newest checkpoint.
      newest: the name of that checkpoint.
      done: what it gave back.
    """

    which: list[int]
    directory: Path
    ref: Any = None
    deaths: int = 0
    newest: str = ""
    done: Done | None = None

    @property
    def name(self) -> str:
        """Return the group in words, for messages."""
        return f"the group of members {self.which[0]} to {self.which[-1]}"


class Cluster:
    """A Ray cluster on which groups train.

    Args:
      api: the caller's name in errors.
      job: what all groups have in common.
      workers: the number of groups at once; None for as many as the cluster has room for.
      resources: options of `ray.remote`, such as `num_cpus` and `num_gpus`.
    """

    def __init__(self, api: str, job: Job, workers: int | None, resources: dict[str, Any]) -> None:
        import ray

        self._api, self._workers, self._resources = api, workers, resources
        # A death is handled here, where it can be counted.
        self._train = ray.remote(max_retries=0, **resources)(train_group)
        self._job = ray.put(job)

    @staticmethod
    @contextmanager
    def connected(address: str | None, workers: int | None, num_cpus: float) -> Iterator[None]:
        """Connect to a cluster unless the program is connected already; without an address, to one on this machine."""
        import ray

        if ray.is_initialized():
            yield
            return
        # More workers than processors are possible: they share them.
        here: dict[str, Any] = {}
        if address is None and "RAY_ADDRESS" not in os.environ:
            processors = None if workers is None else math.ceil(workers * num_cpus)
            address, here = "local", {"num_cpus": processors, "include_dashboard": False}
        with warnings.catch_warnings():
            # JAX warns of any fork. Ray starts other programs, which do not go on in the copy of this process.
            warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **here)
        try:
            yield
        finally:
            ray.shutdown()

    def run(self, tasks: Sequence[Task], start: int, until: int | None, show: Callable[[], None]) -> None:
        """Train all groups up to a step.

        Args:
          tasks: the groups; what they give back is put into them.
          start: the step at which the round begins.
          until: the step at which it ends; None if the batches end it.
          show: called about twice a second.
        """
        import ray

        needed = {"CPU": self._resources["num_cpus"], "GPU": self._resources["num_gpus"]}
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(all(node.get(name, 0) >= count for name, count in needed.items()) for node in alive):
            what = f"no machine of the cluster has {needed['CPU']:g} processors and {needed['GPU']:g} GPUs for a group"
            warnings.warn(f"{self._api}: {what}; the fleet waits until one joins.", stacklevel=3)
        waiting, running = list(tasks), dict[Any, Task]()
        try:
            while waiting or running:
                while waiting and (self._workers is None or len(running) < self._workers):
                    task = waiting.pop(0)
                    task.ref = self._train.remote(self._job, task.which, f"{task.directory}", start, until)
                    running[task.ref] = task
                ended, _ = ray.wait([*running], timeout=0.5)
                for ref in ended:
                    task = running.pop(ref)
                    task.ref, task.done = None, self._result(ref, task)
                    if task.done is None:
                        waiting.insert(0, task)
                show()
        finally:
            for ref in running:
                ray.cancel(ref, force=True)

    def _result(self, ref: Any, task: Task) -> Done | None:
        """Return what a group gave back; None if its worker has died, and it is to be started again."""
        import ray
        from ray import exceptions

        died = exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.OutOfMemoryError
        try:
            found: Done = ray.get(ref)
        except exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            cause.add_note(f"In {self._api}, raised by {task.name}.")
            raise cause from error
        except died as error:
            newest = max((path.name for path in task.directory.glob("step_*")), default="")
            task.deaths = task.deaths + 1 if newest == task.newest else 1
            task.newest = newest
            if task.deaths >= _DEATHS:
                where = f"after {newest}" if newest else "before its first checkpoint"
                what = f"the worker of {task.name} died {_DEATHS} times {where}"
                remedy = "pass fewer workers=, or a smaller group_size= with another directory, for more memory of each"
                raise RuntimeError(f"{self._api}: {what}; see {task.directory}; {remedy}.") from error
            return None
        return found
