"""`CheckpointWriter`: write a checkpoint atomically, together with the other processes that hold parts of it.

Each process writes the members that it owns into a directory under a temporary name. When all have, the first process
adds the history and the manifest, and renames the directory. `write` does that and waits. A run does it in threads,
which exchange no arrays: the programs that do must not run between those of the steps. There a process leaves a note
beside its files when it has written them, and the first one waits for the notes of all.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import numpy as np

from .._files.atomic_write import replace_directory, sync
from .._files.document import document, read_document
from .._files.errors import Damaged, OtherVersion
from .._files.replaced import identity
from .checkpoint import Checkpoint, Outline
from .held_rows import Held, copied, members_held, rows, rows_as_bytes
from .manifest import HISTORY, MANIFEST, NUMBERS, About, Manifest, Part, StoredArray
from .processes import Group, read_again_if_replaced

_NOTES, _NOTE = "notes", "plurax note"
# What a process has written: for each part the checksums of each member's arrays, and the sizes of files.
Written = dict[str, Any]


@dataclass(frozen=True)
class CheckpointWriter:
    """A checkpoint that is being written.

    Attributes:
      api: the caller's name in errors.
      path: where it will be.
      group: the processes that write it.
      unfinished: the directory until then.
      owners: for each member the process that writes it.
      counts: the number of rows of each part: that of members, or one for all of them.
      held: for each part the rows of each array that this process holds, at least those that it writes, until then.
      outlines: for each part the arrays of a row.
      about: what the manifest says besides.
      history: further arrays.
      secret: whether only the owner of the files may read them.
    """

    api: str
    path: Path
    group: Group
    unfinished: Path
    owners: list[int]
    counts: dict[str, int]
    held: dict[str, list[Held]]
    outlines: Mapping[str, Outline]
    about: About
    history: Mapping[str, np.ndarray] | None
    secret: bool

    @classmethod
    def begin(
        cls,
        api: str,
        path: Path,
        parts: Mapping[str, Any],
        size: int,
        *,
        outlines: Mapping[str, Outline],
        about: About,
        history: Mapping[str, np.ndarray] | None = None,
        copies: bool = False,
        secret: bool = False,
    ) -> CheckpointWriter:
        """Create the directory, and find out which process writes which members. All processes call it.

        Args:
          api: the caller's name in errors.
          path: the directory to create, or a checkpoint to replace.
          parts: pytrees of arrays by name, with the members along axis 0 of every array, or one row for all of them.
          size: the number of members.
          outlines: for each part the result of `outline` for its arrays, in the order of its leaves.
          about: what the manifest says besides.
          history: arrays to write in addition to the members.
          copies: whether to copy the arrays, whose memory is reused before they are written.
          secret: whether only the owner of the files may read them.

        Raises:
          FileExistsError: `path` exists and is not a checkpoint, or holds other files too.
          ValueError: no process has all arrays of a member.
        """
        path, group = Path(os.path.realpath(path)), Group.of(parts)
        unfinished = path.parent / f".{path.name}.{group.gather(uuid.uuid4().hex)[0]}.unfinished"

        def prepare() -> None:
            if group.is_first:
                check_replaceable(api, path)
                path.parent.mkdir(parents=True, exist_ok=True)
                unfinished.mkdir(mode=0o700 if secret else 0o777)

        counts = {part: rows(tree, size) for part, tree in parts.items()}
        try:
            group.agree(prepare)  # so that the directory exists before others write into it
            leaves = {part: jax.tree.leaves(tree) for part, tree in parts.items()}
            held = {part: [members_held(x, counts[part]) for x in of_part] for part, of_part in leaves.items()}
            owners = _owners(api, group, [leaf for part in held if counts[part] == size for leaf in held[part]], size)
            mine = [i for i, owner in enumerate(owners) if owner == jax.process_index()]

            def copy() -> Any:
                rows_written = {
                    part: [copied(leaf, [i for i in mine if i < counts[part]]) for leaf in of_part]
                    for part, of_part in held.items()
                }
                arrays = history and {name: np.array(x) for name, x in history.items()}
                return rows_written, arrays

            if copies:
                about = deepcopy(about)
                held, history = group.agree(copy)
        except BaseException:
            if group.is_first:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return cls(api, path, group, unfinished, owners, counts, held, outlines, about, history, secret)

    def write(self) -> None:
        """Write the checkpoint. All processes call it."""
        try:
            written = self.group.gather(self.group.agree(self.write_rows))
            self.group.agree(lambda: self.publish(written) if self.group.is_first else None)
        finally:
            self.discard()

    def write_rows(self) -> Written:
        """Write the members that this process owns."""
        mine = [i for i, owner in enumerate(self.owners) if owner == jax.process_index()]
        if not mine:
            return {"checksums": {}, "files": {}}
        home = self.unfinished / f"arrays/{jax.process_index()}"
        # Not with all parents: where `unfinished` is not seen, the directory is not shared, or it has been given up.
        home.parent.mkdir(exist_ok=True)
        home.mkdir()
        checksums = {
            part: _write_rows(home / f"{part}.bin", [i for i in mine if i < self.counts[part]], leaves)
            for part, leaves in self.held.items()
        }
        for file in [*home.iterdir(), home, home.parent]:
            sync(file)
        files = {file.relative_to(self.unfinished).as_posix(): file.stat().st_size for file in home.iterdir()}
        return {"checksums": checksums, "files": files}

    def leave_note(self, written: Written) -> None:
        """Tell the first process, by a file, what this one has written; it may rename the directory at once."""
        note = self._note(jax.process_index())
        note.parent.mkdir(exist_ok=True)
        note.write_bytes(b"".join(document(_NOTE, 1, {}, [json.dumps(written).encode()])))

    def notes(self) -> list[Written] | None:
        """Return what all processes have written; None as long as a note is missing."""
        try:
            read = [read_document("note", self._note(i), _NOTE, 1).content for i in self.group.processes]
        except (OSError, ValueError):  # not there yet, or not whole on a file system that shows files early
            return None
        return [json.loads(bytes(content)) for content in read]

    def bytes_written(self) -> int:
        """Return the size of all files."""
        sizes = 0
        with suppress(OSError):  # it is being renamed
            for file in self.unfinished.rglob("*"):
                sizes += file.stat().st_size
        return sizes

    def publish(self, written: Sequence[Written]) -> None:
        """In the first process: write history and manifest, and rename the directory."""
        shutil.rmtree(self.unfinished / _NOTES, ignore_errors=True)
        files = {name: length for one in written for name, length in one["files"].items()}
        for name, length in files.items():
            with (self.unfinished / name).open("rb") as file:  # which asks a shared disk anew
                if (found := os.fstat(file.fileno()).st_size) != length:
                    raise OSError(f"{name} has {found} bytes here instead of {length}; all processes must share a disk")
        stored = {}
        for part, count in self.counts.items():
            sums = np.zeros((count, len(self.outlines[part])), np.uint32)
            for one in written:
                for members, digits in one["checksums"].get(part, ()):
                    sums[members] = np.frombuffer(bytes.fromhex(digits), np.uint32).reshape(len(members), -1)
            stored[part] = Part(count, tuple(self.outlines[part]), sums)
        history = None if self.history is None else _write_history(self.unfinished / HISTORY, self.history)
        owners = np.asarray(self.owners, np.int32)
        manifest = Manifest(len(self.owners), owners, stored, history, self.about)
        manifest.write(self.unfinished)
        # Nobody else could enter the directory so far; copies of single files keep their own permissions.
        for file in self.unfinished.rglob("*") if self.secret else ():
            file.chmod(0o700 if file.is_dir() else 0o600)
        # Flush before the rename, or a power failure could leave the final name with incomplete files.
        for file in [*self.unfinished.iterdir(), self.unfinished]:
            sync(file)
        check_replaceable(self.api, self.path)  # again: somebody may have put files there meanwhile
        replace_directory(self.unfinished, self.path)

    def discard(self) -> None:
        """Remove what is unfinished."""
        if self.group.is_first:
            shutil.rmtree(self.unfinished, ignore_errors=True)

    def _note(self, process: int) -> Path:
        return self.unfinished / _NOTES / f"{process}.json"


def _owners(api: str, group: Group, held: Sequence[Held], size: int) -> list[int]:
    """Return for each member the first process that has all its arrays."""
    whole = [i for i in range(size) if all(i in leaf for leaf in held)]
    holders = [(process, {*has}) for process, has in zip(group.processes, group.gather(whole), strict=True)]
    owners = [next((process for process, members in holders if i in members), -1) for i in range(size)]
    if -1 in owners:
        lost = owners.index(-1)
        raise ValueError(f"{api}: no process has all of member {lost}; shard all arrays alike along axis 0.")
    return owners


def _write_rows(path: Path, members: list[int], leaves: list[Held]) -> list[tuple[list[int], str]]:
    """Write the bytes of these members, one after another; return some members, and their checksums in hexadecimal."""
    found: list[tuple[list[int], str]] = []
    with path.open("wb") as file:
        for some, columns in rows_as_bytes(leaves, members):
            for column in columns if len(some) == 1 else [np.concatenate(columns, 1)] if columns else []:
                file.write(np.ascontiguousarray(column).data)
            # CRC-32 detects accidental damage, but does not protect against deliberate changes.
            sums = [[zlib.crc32(column[k]) for column in columns] for k in range(len(some))]
            found.append((some, np.asarray(sums, np.uint32).tobytes().hex()))
    return found


def _write_history(path: Path, history: Mapping[str, np.ndarray]) -> Part:
    """Write the columns of a history, one after another, and return what describes them."""
    columns = {name: np.ascontiguousarray(column) for name, column in history.items()}
    with path.open("wb") as file:
        for column in columns.values():
            file.write(column.data)
    arrays = [StoredArray(name, name, x.shape, str(x.dtype), x.shape, str(x.dtype)) for name, x in columns.items()]
    sums = [[zlib.crc32(x.data) for x in columns.values()]]
    return Part(1, tuple(arrays), np.asarray(sums, np.uint32).reshape(1, len(columns)))


def check_replaceable(api: str, path: Path) -> None:
    """Raise if a directory was not written by a `CheckpointWriter`, or contains files that were not."""
    if others := others_in(api, path):
        raise FileExistsError(f"{api}: {path} also holds {others[0]!r}, which would be lost; move it.")


def others_in(api: str, path: Path) -> list[str]:
    """Return the names of files and folders among those of a checkpoint that are none of its own.

    Raises:
      FileExistsError: the path exists, and is no checkpoint.
    """

    def attempt() -> tuple[list[str], str]:
        checkpoint = Checkpoint.open(api, path)
        own = {MANIFEST, NUMBERS, *checkpoint.manifest.files}
        folders = {parent.as_posix() for name in own for parent in PurePosixPath(name).parents}
        return sorted({file.relative_to(path).as_posix() for file in path.rglob("*")} - own - folders), ""

    if not os.path.lexists(path):
        return []
    try:
        return read_again_if_replaced(lambda: identity(path, MANIFEST), attempt)
    except FileNotFoundError:
        return []
    except (Damaged, OtherVersion) as error:
        what = f"{path} exists and is not a whole checkpoint of this version"
        raise FileExistsError(f"{api}: {what}; pass another path, or move it.") from error
