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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .atomic_write import replace_directory, sync
from .checkpoint import FORMAT, HISTORY, MANIFEST, VERSION, Outline, checksum, read_manifest
from .held_rows import Held, copied, members_held, rows, rows_as_bytes
from .processes import Group

_NOTES = "notes"
# What a process has written: for each part the checksums of each member's arrays, and the sizes of files.
Written = dict[str, Any]


@dataclass(frozen=True)
class CheckpointWriter:
    """A checkpoint that is being written.

    Attributes:
      path: where it will be.
      group: the processes that write it.
      unfinished: the directory until then.
      owners: for each member the process that writes it.
      counts: the number of rows of each part: that of members, or one for all of them.
      held: for each part the rows of each array that this process holds, at least those that it writes, until then.
      manifest: the manifest, without what the processes have written.
      history: further arrays.
      secret: whether only the owner of the files may read them.
    """

    path: Path
    group: Group
    unfinished: Path
    owners: list[int]
    counts: dict[str, int]
    held: dict[str, list[Held]]
    manifest: dict[str, Any]
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
        about: Mapping[str, Any] | None = None,
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
          about: further entries of the manifest; must be valid JSON.
          history: arrays to write in addition to the members.
          copies: whether to copy the arrays, whose memory is reused before they are written.
          secret: whether only the owner of the files may read them.

        Raises:
          FileExistsError: `path` exists and is not a checkpoint, or holds other files too.
          ValueError: no process has all arrays of a member.
        """
        path, group = path.resolve(), Group.of(parts)
        unfinished = path.parent / f".{path.name}.{group.gather(uuid.uuid4().hex)[0]}.unfinished"

        def prepare() -> None:
            if group.is_first:
                _check_replaceable(api, path)
                path.parent.mkdir(parents=True, exist_ok=True)
                unfinished.mkdir(mode=0o700 if secret else 0o777)

        counts = {part: rows(tree, size) for part, tree in parts.items()}
        try:
            group.agree(prepare)  # so that the directory exists before others write into it
            leaves = {part: jax.tree.leaves(tree) for part, tree in parts.items()}
            held = {part: [members_held(x, counts[part]) for x in of_part] for part, of_part in leaves.items()}
            owners = _owners(api, group, [leaf for part in held if counts[part] == size for leaf in held[part]], size)
            mine = [i for i, owner in enumerate(owners) if owner == jax.process_index()]

            manifest = {"format": FORMAT, "version": VERSION, "size": size, **(about or {}), "arrays": outlines}

            def copy() -> Any:
                rows_written = {
                    part: [copied(leaf, [i for i in mine if i < counts[part]]) for leaf in of_part]
                    for part, of_part in held.items()
                }
                arrays = history and {name: np.array(x) for name, x in history.items()}
                return rows_written, json.loads(json.dumps(manifest)), arrays

            if copies:
                held, manifest, history = group.agree(copy)
        except BaseException:
            if group.is_first:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return cls(path, group, unfinished, owners, counts, held, manifest, history, secret)

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
        note.write_text(json.dumps(written))

    def notes(self) -> list[Written] | None:
        """Return what all processes have written; None as long as a note is missing."""
        try:
            return [json.loads(self._note(process).read_text()) for process in self.group.processes]
        except (OSError, ValueError):  # not there yet, or not whole on a file system that shows files early
            return None

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
        checksums = {}
        for part, count in self.counts.items():
            of_each = {i: sums for one in written for i, sums in one["checksums"].get(part, ())}
            checksums[part] = [of_each[i] for i in range(count)]
        manifest = {**self.manifest, "owners": self.owners, "checksums": checksums, "files": files}
        if self.history is not None:
            # Saved by index: a metric's name may be anything, including the name of a parameter of savez.
            manifest["history"] = list(self.history)
            numbered = {f"{i}": array for i, array in enumerate(self.history.values())}
            np.savez(self.unfinished / HISTORY, allow_pickle=False, **numbered)
            files[HISTORY] = (self.unfinished / HISTORY).stat().st_size
        (self.unfinished / MANIFEST).write_text(json.dumps({**manifest, "checksum": checksum(manifest)}))
        # Nobody else could enter the directory so far; copies of single files keep their own permissions.
        for file in self.unfinished.rglob("*") if self.secret else ():
            file.chmod(0o700 if file.is_dir() else 0o600)
        # Flush before the rename, or a power failure could leave the final name with incomplete files.
        for file in [*self.unfinished.iterdir(), self.unfinished]:
            sync(file)
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


def _write_rows(path: Path, members: list[int], leaves: list[Held]) -> list[tuple[int, list[int]]]:
    """Write the bytes of these members, one after another, and return the checksums of the arrays of each."""
    found: list[tuple[int, list[int]]] = []
    with path.open("wb") as file:
        for some, columns in rows_as_bytes(leaves, members):
            for column in columns if len(some) == 1 else [np.concatenate(columns, 1)] if columns else []:
                file.write(np.ascontiguousarray(column).data)
            # CRC-32 detects accidental damage, but does not protect against deliberate changes.
            found += [(i, [zlib.crc32(column[k]) for column in columns]) for k, i in enumerate(some)]
    return found


def _check_replaceable(api: str, path: Path) -> None:
    """Raise if `path` was not written by a `CheckpointWriter`, or contains files that were not."""
    if not path.exists():
        return
    manifest = read_manifest(path)
    if manifest is None:
        raise FileExistsError(f"{api}: {path} exists and is not a checkpoint; pass another path.")
    files = {file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir()}
    others = sorted(files - {MANIFEST, *manifest.get("files", {})})
    if others:
        raise FileExistsError(f"{api}: {path} also holds {others[0]!r}, which would be lost; move it.")
