"""Exchange small values between processes that share arrays, and agree on success or failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from .._core.compat import gathered
from .._files.errors import Damaged, OtherVersion

Result = TypeVar("Result")

# Each further attempt to read needs a writer that has replaced the files during the one before.
_ATTEMPTS = 100

_KINDS = (Damaged, OtherVersion, ValueError, TypeError, OSError, FileExistsError, FileNotFoundError, PermissionError)


@dataclass(frozen=True)
class Group:
    """The processes whose devices hold some arrays: this process alone, or all processes.

    Attributes:
      processes: their indices.
    """

    processes: tuple[int, ...]

    @classmethod
    def of(cls, tree: Any) -> Group:
        """Return the processes that hold the arrays in a tree; this process alone if it can read all of them.

        Raises:
          ValueError: the arrays spread over some, but not all, of several processes.
        """
        shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
        spread = [x for x in shardings if x is not None and not x.is_fully_addressable]
        found = {device.process_index for sharding in spread for device in sharding.device_set}
        if found and len(found) < jax.process_count():
            raise ValueError(f"arrays spread over {len(found)} of {jax.process_count()} processes; use one, or all.")
        return cls(tuple(sorted(found)) or (jax.process_index(),))

    @property
    def is_alone(self) -> bool:
        """Return whether this process is the only one."""
        return len(self.processes) == 1

    @property
    def place(self) -> int:
        """Return the place of this process among them."""
        return self.processes.index(jax.process_index())

    @property
    def is_first(self) -> bool:
        """Return whether this process does what only one process may do, such as renaming a directory."""
        return jax.process_index() == self.processes[0]

    def gather(self, value: Any) -> list[Any]:
        """Wait for all processes, and return the values that they pass, in their order. Values must be valid JSON."""
        if self.is_alone:
            return [value]
        # JAX can only exchange arrays of one shape: first the lengths, then the bytes, padded to the longest.
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = gathered(np.int32(data.size))
        # Padded to powers of two, since each length needs a compiled program.
        padded = np.zeros(max(1024, 1 << int(sizes.max() - 1).bit_length()), np.uint8)
        padded[: data.size] = data
        return [json.loads(row[:size].tobytes()) for row, size in zip(gathered(padded), sizes, strict=True)]

    def agree(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work` in this process once all have succeeded; raise in all if one fails."""
        if self.is_alone:
            return work()
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        failures = self.gather(None if error is None else [_kind(error), str(error)])
        try:
            if error is not None and not isinstance(error, Exception):  # Ctrl-C in this process
                raise error
            for process, failure in zip(self.processes, failures, strict=True):
                if failure is not None:
                    # The first failure, which is the same in all processes, so that all handle it in the same way.
                    mine = process == jax.process_index()
                    raise error if error is not None and mine else _error(failure[0], failure[1], process)
        finally:
            error = None  # it holds this frame, and would keep all that the work held
        return result  # type: ignore[return-value]  # no process has failed, so it has a value


ALONE = Group((0,))


def read_again_if_replaced(
    identify: Callable[[], object], read: Callable[[], tuple[Result, str]], group: Group = ALONE
) -> Result:
    """Return what `read` returns; call it again if the files have been replaced or removed meanwhile.

    Args:
      identify: returns what tells the files from those that replace them.
      read: returns what it reads, and its checksum. It raises `Damaged` or `FileNotFoundError` if the files do not fit
        together.
      group: the processes that read it together, and the same files.

    Raises:
      Damaged, FileNotFoundError: those of `read`, of files that nobody has replaced.
      BlockingIOError: they are being replaced all the time.
    """
    for _ in range(_ATTEMPTS):
        before = identify()
        try:
            result, checksum = group.agree(read)
        except (Damaged, FileNotFoundError):
            if not any(group.gather(identify() != before)):
                raise
            continue
        if len(set(group.gather(checksum))) == 1:
            return result
    raise BlockingIOError("the files are replaced faster than they can be read; read them when their writer has ended")


def _kind(error: BaseException) -> str:
    """Return the name of the first class of an error that `_error` knows, or of its own class."""
    names = [kind.__name__ for kind in type(error).__mro__]
    return next((name for name in names if name in {kind.__name__ for kind in _KINDS}), names[0])


def _error(name: str, message: str, process: int) -> Exception:
    """Return an error like that of another process, of the same class if that takes a message alone."""
    for kind in _KINDS:
        if kind.__name__ == name:
            return kind(f"{message} (In process {process}.)")
    return RuntimeError(f"{name}: {message} (In process {process}.)")
