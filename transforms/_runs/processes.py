"""What several processes that share some arrays tell each other."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Result = TypeVar("Result")


class Damaged(ValueError):
    """A checkpoint that cannot be read whole."""


@dataclass(frozen=True)
class Group:
    """The processes over whose devices some arrays spread.

    Attributes:
      devices: one device of each, by process.
    """

    devices: tuple[jax.Device, ...]

    @classmethod
    def of(cls, tree: Any) -> Group:
        """The processes of the arrays in a tree; this one alone, where it can read all of them by itself."""
        found: dict[int, jax.Device] = {}
        for leaf in jax.tree.leaves(tree):
            sharding = getattr(leaf, "sharding", None)
            if sharding is not None and not sharding.is_fully_addressable:
                for device in sorted(sharding.device_set, key=lambda device: device.id):
                    found.setdefault(device.process_index, device)
        return cls(tuple(found[i] for i in sorted(found)) or (jax.local_devices()[0],))

    @property
    def processes(self) -> list[int]:
        """Their indices."""
        return [device.process_index for device in self.devices]

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody else."""
        return len(self.devices) == 1

    @property
    def is_first(self) -> bool:
        """Whether this process does what one of them does for all."""
        return jax.process_index() == self.processes[0]

    def gather(self, value: Any) -> list[Any]:
        """What each process gives, by process; plain values, for JSON. Waits until all have given theirs."""
        if self.is_alone:
            return [value]
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = self._gather_row(np.asarray([data.size], np.int32))[:, 0]
        # Powers of two: few programs to compile.
        padded = np.zeros(max(1024, 1 << int(sizes.max() - 1).bit_length()), np.uint8)
        padded[: data.size] = data
        return [json.loads(row[:size].tobytes()) for row, size in zip(self._gather_row(padded), sizes, strict=True)]

    def agree(self, work: Callable[[], Result]) -> Result:
        """What `work` gives in this process, once it has succeeded in all; raises in all where it fails in one."""
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        told = self.gather(None if error is None else [type(error).__name__, str(error)])
        for process, failure in zip(self.processes, told, strict=True):
            if failure is not None:
                # The same in all, so that all do the same about it.
                name, message = failure
                mine = error is not None and process == jax.process_index()
                raise error if error is not None and mine else _error(name, message, process)
        return result  # type: ignore[return-value]  # nobody has failed, so it has one

    def _gather_row(self, row: np.ndarray) -> np.ndarray:
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
    """What another process has raised, where it is an error of arguments or files."""
    kind = Damaged if name == "Damaged" else getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, (OSError, ValueError, TypeError))):
        return RuntimeError(f"{name}: {message} (In process {process}.)")
    return RuntimeError(message) if issubclass(kind, UnicodeError) else kind(f"{message} (In process {process}.)")
