"""Messages between the processes that share some arrays: small values, and whether all have succeeded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Result = TypeVar("Result")


class Damaged(ValueError):
    """A checkpoint that cannot be read completely."""


@dataclass(frozen=True)
class Group:
    """The processes over whose devices some arrays spread.

    Attributes:
      devices: one device of each, by process.
    """

    devices: tuple[jax.Device, ...]

    @classmethod
    def of(cls, tree: Any) -> Group:
        """Return the processes of the arrays in a tree; this one alone if it can read all of them by itself."""
        found: dict[int, jax.Device] = {}
        for leaf in jax.tree.leaves(tree):
            sharding = getattr(leaf, "sharding", None)
            if sharding is not None and not sharding.is_fully_addressable:
                for device in sorted(sharding.device_set, key=lambda device: device.id):
                    found.setdefault(device.process_index, device)
        return cls(tuple(found[i] for i in sorted(found)) or (jax.local_devices()[0],))

    @property
    def processes(self) -> list[int]:
        """Return their indices."""
        return [device.process_index for device in self.devices]

    @property
    def is_alone(self) -> bool:
        """Return whether this process is the only one."""
        return len(self.devices) == 1

    @property
    def is_first(self) -> bool:
        """Return whether this is the process that does for all what only one may do, such as renaming a directory."""
        return jax.process_index() == self.processes[0]

    def gather(self, value: Any) -> list[Any]:
        """Return what each process gives, by process; plain values, for JSON. Wait until all have given theirs."""
        if self.is_alone:
            return [value]
        # JAX can exchange arrays of one shape only: first the lengths, then the bytes, padded to the longest.
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = self._gather_row(np.asarray([data.size], np.int32))[:, 0]
        # Powers of two, since each length is a program to compile.
        padded = np.zeros(max(1024, 1 << int(sizes.max() - 1).bit_length()), np.uint8)
        padded[: data.size] = data
        return [json.loads(row[:size].tobytes()) for row, size in zip(self._gather_row(padded), sizes, strict=True)]

    def agree(self, work: Callable[[], Result]) -> Result:
        """Return what `work` gives in this process once it has succeeded in all; raise in all if it fails in one."""
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        failures = self.gather(None if error is None else [type(error).__name__, str(error)])
        for process, failure in zip(self.processes, failures, strict=True):
            if failure is not None:
                # The first failure, the same in all processes, so that all do the same about it.
                name, message = failure
                mine = process == jax.process_index()
                raise error if error is not None and mine else _error(name, message, process)
        return result  # type: ignore[return-value]  # nobody has failed, so it has one

    def _gather_row(self, row: np.ndarray) -> np.ndarray:
        """Return the rows of all processes: a sharded array with a row on each device, replicated by a program."""
        mesh = Mesh(np.asarray(self.devices), ("process",))
        device = self.devices[self.processes.index(jax.process_index())]
        rows = jax.make_array_from_single_device_arrays(
            (len(self.devices), *row.shape),
            NamedSharding(mesh, PartitionSpec("process")),
            [jax.device_put(row[None], device)],
        )
        with jax.set_mesh(mesh):
            return np.asarray(jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))(rows))


def _same(x: Any) -> Any:
    return x


def _error(name: str, message: str, process: int) -> Exception:
    """Return an error like that of another process, of its kind where that is made of a message."""
    for kind in (Damaged, ValueError, TypeError, OSError, FileExistsError, FileNotFoundError, PermissionError):
        if kind.__name__ == name:
            return kind(f"{message} (In process {process}.)")
    return RuntimeError(f"{name}: {message} (In process {process}.)")
