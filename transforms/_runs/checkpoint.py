"""`Checkpoint`: read the arrays of one or several members from the disk; `CheckpointWriter` writes them.

A checkpoint is a directory with: `arrays/0/` and so on, one for each process that has written members, with a file for
each part, such as `ensemble.bin`, which has the bytes of one member after another; `history.bin`, if there is a
history; and `plurax.json`, the `Manifest`, which lists every array with its path, shape and dtype, beside
`numbers.bin`, which has their checksums. From these follow the names and sizes of all files. The directory is written
under a temporary name and renamed when it is complete, so under its final name it is complete. Sizes and checksums
detect later damage.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._files.errors import Damaged
from .._files.reading import open_file, size_of
from .._files.replaced import identity, left_aside
from .held_rows import as_saved, members_on_devices, rows, stacked
from .history import check_columns
from .manifest import HISTORY, MANIFEST, About, Manifest, Part, StoredArray, file_of
from .processes import ALONE, Group, read_again_if_replaced

Outline = Sequence[StoredArray]
Result = TypeVar("Result")


class OtherStructure(ValueError):
    """A checkpoint holds other arrays than the object that it is read into."""

    def __init__(self, where: str, has: str, like: str) -> None:
        remedy = "pass as `like` an object with the saved structure"
        super().__init__(f"{where} has {has}, but `like` has {like}; {remedy}.")
        self.where, self.has, self.like = where, has, like


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest has been read, and whose files have the sizes that follow from it.

    Attributes:
      api: the caller's name in errors.
      path: the directory.
      manifest: its manifest.
      checksum: that of the manifest, which identifies what was saved, to the bit.
    """

    api: str
    path: Path
    manifest: Manifest
    checksum: str

    @classmethod
    def open(cls, api: str, path: str | os.PathLike[str]) -> Checkpoint:
        """Read the manifest, check the sizes of all files, and return the checkpoint.

        Raises:
          FileNotFoundError: there is no checkpoint at `path`.
          Damaged: there is no manifest, or it has changed, or a file is missing or has another size.
          OtherVersion: the checkpoint has another version.
          OSError: it cannot be read, for a reason that tells nothing about it.
        """
        path = Path(os.path.realpath(path))
        what = f"{api}: the checkpoint at {path}"
        try:
            checkpoint = cls(api, path, *Manifest.read(what, path))
        except FileNotFoundError as error:
            if os.path.lexists(path):
                what = f"{api}: {path} is not a checkpoint of this library, or is damaged"
                raise Damaged(f"{what}: it has no {MANIFEST}.") from error
            # A process killed between the two renames of `replace_directory` leaves the old checkpoint there.
            earlier = left_aside(path)
            hint = f" An interrupted save left the previous one at {earlier[-1]}; rename it back." if earlier else ""
            raise FileNotFoundError(f"{api}: there is no checkpoint at {path}.{hint}") from error
        for name in checkpoint.manifest.files:
            checkpoint._open(name).close()
        return checkpoint

    @property
    def about(self) -> About:
        """Return what it says besides its arrays."""
        return self.manifest.about

    def damaged(self, fact: object) -> Damaged:
        """Return the error for this damage."""
        return Damaged(f"{self} is damaged: {fact}; restore a copy, or write it anew.")

    def __str__(self) -> str:
        """Return the beginning of errors about this checkpoint."""
        return f"{self.api}: the checkpoint at {self.path}"

    def history(self, size: int) -> dict[str, np.ndarray]:
        """Return the history of `size` members that was passed to `CheckpointWriter.begin`, as arrays by name."""
        part = self.manifest.history
        if part is None:
            return {}
        (row,) = self._rows(part, [0], lambda _: (HISTORY, 0))
        for j, stored in enumerate(row):
            self._check(part, 0, j, stored)
        columns = {array.key: stored for array, stored in zip(part.arrays, row, strict=True)}
        try:
            check_columns(columns, size)
        except ValueError as error:
            raise self.damaged(f"{HISTORY}: {error}") from error
        return columns

    def load(self, likes: Mapping[str, Any], outlines: Mapping[str, Outline], size: int) -> dict[str, Any]:
        """Return trees of arrays with the checkpoint's values; raise if its arrays differ or are damaged.

        Args:
          likes: for each part a tree of arrays, or of shapes, with the members along axis 0, or one row for all.
          outlines: for each part the result of `outline` for its arrays.
          size: the number of members.
        """
        members = members_on_devices([like for like in likes.values() if rows(like, size) == size], size)

        def of_part(part: str, like: Any) -> Any:
            mine = members if rows(like, size) == size else [0]
            read, (leaves, structure) = self._read(part, outlines[part], mine, size), jax.tree.flatten(like)
            arrays = (stacked(leaf, x.dtype, row) for leaf, x, row in zip(leaves, outlines[part], read, strict=True))
            return jax.tree.unflatten(structure, arrays)

        return {part: of_part(part, like) for part, like in likes.items()}

    def member(self, i: int, part: str, expected: Outline) -> list[jax.Array]:
        """Return the arrays of one part of one member; raise if they differ from `expected`. No others are read."""
        rows = self._read(part, expected, [i], self.manifest.size)
        return [as_saved(row[i], array.dtype) for row, array in zip(rows, expected, strict=True)]

    def _read(self, name: str, expected: Outline, members: list[int], size: int) -> list[dict[int, np.ndarray]]:
        """Return for each expected array of a part a dict from members to stored arrays."""
        order, part = self._order(name, expected, size), self.manifest.parts[name]
        owners, places = self.manifest.owners, self.manifest.places
        read = self._rows(part, members, lambda i: (file_of(int(owners[i]), name), places[i]))
        for i, row in zip(members, read, strict=True):
            for j in order:
                self._check(part, i, j, row[j])
        for j in order:
            self._check_precision(part.arrays[j])
        return [{i: row[j] for i, row in zip(members, read, strict=True)} for j in order]

    def _rows(self, part: Part, members: list[int], place: Callable[[int], tuple[str, int]]) -> list[list[np.ndarray]]:
        """Return the arrays of some rows of a part; `place` returns the file of a row, and its place there."""
        ends = np.cumsum([0, *(array.nbytes for array in part.arrays)], dtype=int).tolist()
        dtypes = [jnp.dtype(array.stored_dtype) for array in part.arrays]
        found = []
        with ExitStack() as stack:
            files: dict[str, BinaryIO] = {}
            for i in members:
                name, at = place(i)
                if name not in files:
                    files[name] = stack.enter_context(self._open(name))
                files[name].seek(at * part.row_bytes)
                data = files[name].read(part.row_bytes)
                if len(data) < part.row_bytes:
                    raise self.damaged(f"{name} ends early")
                pieces = (data[start:end] for start, end in pairwise(ends))
                of_row = zip(pieces, dtypes, part.arrays, strict=True)
                found.append([np.frombuffer(x, dtype).reshape(array.stored) for x, dtype, array in of_row])
        return found

    def _open(self, name: str) -> BinaryIO:
        """Open a file; raise if it is missing, no plain file, or of another size."""
        try:
            file = open_file(f"{self}", self.path / name, self.path)
        except FileNotFoundError as error:
            raise self.damaged(f"{name} is missing") from error
        size, expected = size_of(file), self.manifest.files[name]
        if size != expected:
            file.close()
            raise self.damaged(f"{name} has {size} bytes instead of {expected}")
        return file

    def _order(self, part: str, expected: Outline, size: int) -> list[int]:
        """Return the position of each expected array in the checkpoint; raise if its arrays differ."""
        if part not in self.manifest.parts:
            held = ", ".join(self.manifest.parts)
            raise ValueError(f"{self} holds {held}, but no {part}; read it with the function for what it holds.")
        if size != self.manifest.size:
            raise OtherStructure(f"{self}", f"{self.manifest.size} members", f"{size}")
        written = {array.key: array for array in self.manifest.parts[part].arrays}
        wanted = {array.key: array for array in expected}
        for key in [*wanted, *written]:
            if written.get(key) != wanted.get(key):
                path = (wanted.get(key) or written[key]).path
                has = f"{_say(written.get(key))} at `{path}` in `{part}`, for each member"
                raise OtherStructure(f"{self}", has, _say(wanted.get(key)))
        places = {key: place for place, key in enumerate(written)}
        return [places[key] for key in wanted]

    def _check(self, part: Part, i: int, j: int, stored: np.ndarray) -> None:
        """Raise if an array of a row is not the one that was written."""
        if zlib.crc32(stored.tobytes()) != part.checksums[i if part.rows > 1 else 0, j]:
            path = part.arrays[j].path
            raise self.damaged(f"the bytes of `{path}` of member {i} have changed since they were saved")

    def _check_precision(self, array: StoredArray) -> None:
        """Raise if JAX would cut an array to 32 bits."""
        dtype = jnp.dtype(array.stored_dtype)
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            found = f"{self} has dtype {dtype} at `{array.path}`"
            raise ValueError(f"{found}, which needs jax_enable_x64; enable it.")


def read_checkpoint(
    api: str, path: str | os.PathLike[str], read: Callable[[Checkpoint], Result], group: Group = ALONE
) -> Result:
    """Return what `read` returns for a checkpoint, which other processes may replace or remove meanwhile.

    Args:
      api: the caller's name in errors.
      path: the directory.
      read: a function of the checkpoint.
      group: the processes that read it together; all call this, and read the same one.

    Raises:
      FileNotFoundError, Damaged, OtherVersion, OSError: as for `Checkpoint.open`.
      ValueError: as `read` does.
    """

    def attempt() -> tuple[Result, str]:
        checkpoint = Checkpoint.open(api, path)
        return read(checkpoint), checkpoint.checksum

    return read_again_if_replaced(lambda: identity(Path(os.path.realpath(path)), MANIFEST), attempt, group)


def _say(entry: StoredArray | None) -> str:
    return "nothing" if entry is None else f"shape {entry.shape} and dtype {entry.dtype}"
