"""`Checkpoint`: read the arrays of one or several members from the disk; `CheckpointWriter` writes them.

A checkpoint is a directory with: `arrays/0/` and so on, one for each process that has written members, with a file for
each part, such as `ensemble.bin`, which has the bytes of one member after another; `history.npz`, if there is a
history; and `plurax.json`, the manifest, which lists every array with its path, shape, dtype and checksums, and every
file with its size. The directory is written under a temporary name and renamed when it is complete, so under its final
name it is complete. Sizes and checksums detect later damage.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.arguments import describe
from .._core.prng import is_key
from .._models.split_model import dotted
from .held_rows import as_saved, members_on_devices, rows, stacked
from .processes import Damaged

# For each array of a part its path, shape and dtype, and the stored shape and dtype; see `outline`.
Outline = list[dict[str, Any]]

FORMAT = "plurax checkpoint"
VERSION = 4
_EARLIER = (2, 3)  # these have an array of tensorstore for each array of a member; 3 has parts with one row for all
MANIFEST = "plurax.json"
HISTORY = "history.npz"


class OtherStructure(ValueError):
    """A checkpoint holds other arrays than the object that it is read into."""

    def __init__(self, where: str, has: str, like: str) -> None:
        remedy = "pass as `like` an object with the saved structure"
        super().__init__(f"{where} has {has}, but `like` has {like}; {remedy}.")
        self.where, self.has, self.like = where, has, like


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest has been read, and whose files have the sizes listed there."""

    api: str
    path: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, api: str, path: str | os.PathLike[str]) -> Checkpoint:
        """Read the manifest, check the sizes of all files, and return the checkpoint.

        Raises:
          FileNotFoundError: there is no checkpoint at `path`.
          Damaged: there is no manifest, or it has changed, or a file is missing or has another size.
          ValueError: the checkpoint has another version.
        """
        path = Path(path).resolve()
        if not path.exists():
            # A process killed between the two renames of `replace_directory` leaves the old checkpoint under this name.
            earlier = sorted(path.parent.glob(f".{path.name}.*.replaced"))
            hint = f" An interrupted save left the previous one at {earlier[-1]}; rename it back." if earlier else ""
            raise FileNotFoundError(f"{api}: there is no checkpoint at {path}.{hint}")
        manifest = read_manifest(path)
        if manifest is None:
            raise Damaged(f"{api}: {path} is not a checkpoint of this library, or is damaged: it has no {MANIFEST}.")
        checkpoint = cls(api, path, manifest)
        if (version := manifest.get("version")) not in (*_EARLIER, VERSION):
            raise ValueError(
                f"{checkpoint} has version {version}, but this library reads 2 to 4; use the one that wrote it."
            )
        if manifest.pop("checksum", None) != checksum(manifest):
            raise checkpoint.damaged(f"{MANIFEST} has changed since it was written")
        for name, size in manifest["files"].items():
            file = path / name
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes instead of {size}"
                raise checkpoint.damaged(f"{name} {state}")
        return checkpoint

    def damaged(self, fact: object) -> Damaged:
        """Return the error for this damage."""
        return Damaged(f"{self} is damaged: {fact}.")

    def __str__(self) -> str:
        """Return the beginning of errors about this checkpoint."""
        return f"{self.api}: the checkpoint at {self.path}"

    def history(self) -> dict[str, np.ndarray]:
        """Return the history that was passed to `CheckpointWriter.begin`, as arrays by name."""
        try:
            with np.load(self.path / HISTORY, allow_pickle=False) as file:
                return {name: file[f"{i}"] for i, name in enumerate(self.manifest["history"])}
        except Exception as error:  # numpy and zipfile raise many kinds of errors if bytes cannot be read
            raise self.damaged(f"{HISTORY}: {error}") from error

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
            found, (leaves, structure) = self._read(part, outlines[part], mine, size), jax.tree.flatten(like)
            arrays = (
                stacked(leaf, x["dtype"], row) for leaf, x, row in zip(leaves, outlines[part], found, strict=True)
            )
            return jax.tree.unflatten(structure, arrays)

        return {part: of_part(part, like) for part, like in likes.items()}

    def member(self, i: int, part: str, expected: Outline) -> list[jax.Array]:
        """Return the arrays of one part of one member; raise if they differ from `expected`. No others are read."""
        rows = self._read(part, expected, [i], self.manifest["size"])
        return [as_saved(row[i], entry["dtype"]) for row, entry in zip(rows, expected, strict=True)]

    def _read(self, part: str, expected: Outline, members: list[int], size: int) -> list[dict[int, np.ndarray]]:
        """Return for each expected array of a part a dict from members to stored arrays."""
        order, entries = self._order(part, expected, size), self.manifest["arrays"][part]
        try:
            earlier = self.manifest["version"] in _EARLIER
            stored = self._read_earlier(part, members, order) if earlier else self._read_rows(part, members, order)
        except Exception as error:  # tensorstore raises many kinds of errors if bytes cannot be read
            raise self.damaged(error) from error
        empty = {j: np.zeros(entries[j]["stored"], entries[j]["stored_dtype"]) for j in order}  # these are not written
        return [{i: self._array(i, part, j, stored.get((i, j), empty[j])) for i in members} for j in order]

    def _read_rows(self, part: str, members: list[int], order: list[int]) -> dict[tuple[int, int], np.ndarray]:
        """Return arrays by member and place in the outline."""
        entries, owners = self.manifest["arrays"][part], self.manifest["owners"]
        dtypes = [jnp.dtype(x["stored_dtype"]) for x in entries]
        sizes = [math.prod(x["stored"]) * dtype.itemsize for x, dtype in zip(entries, dtypes, strict=True)]
        ends, row = np.cumsum(sizes, dtype=int), sum(sizes)
        found: dict[tuple[int, int], np.ndarray] = {}
        counts: dict[int, int] = defaultdict(int)
        places = []  # of each member in the file of its owner
        for owner in owners:
            places.append(counts[owner])
            counts[owner] += 1
        with ExitStack() as stack:
            files = {
                owner: stack.enter_context((self.path / f"arrays/{owner}/{part}.bin").open("rb"))
                for owner in {owners[i] for i in members}
                if row
            }
            for i in members if row else ():
                files[owners[i]].seek(places[i] * row)
                data = files[owners[i]].read(row)
                for j in order:
                    if sizes[j]:
                        one = np.frombuffer(data[ends[j] - sizes[j] : ends[j]], dtypes[j])
                        found[i, j] = one.reshape(entries[j]["stored"])
        return found

    def _read_earlier(self, part: str, members: list[int], order: list[int]) -> dict[tuple[int, int], np.ndarray]:
        """Return the same from a checkpoint of an earlier version."""
        entries, wanted = self.manifest["arrays"][part], defaultdict[int, dict[str, tuple[int, int]]](dict)
        for i in members:
            filled = (j for j in order if 0 not in entries[j]["stored"])
            wanted[self.manifest["owners"][i]] |= {f"members.{i:06d}.{part}.{j:04d}": (i, j) for j in filled}
        found: dict[tuple[int, int], np.ndarray] = {}
        for owner, names in wanted.items():
            found |= {names[name]: array for name, array in _stored(self.path / f"arrays/{owner}", names)}
        return found

    def _order(self, part: str, expected: Outline, size: int) -> list[int]:
        """Return the position of each expected array in the checkpoint; raise if its arrays differ."""
        if part not in self.manifest["arrays"]:
            held = ", ".join(self.manifest["arrays"])
            raise ValueError(f"{self} holds {held}, but no {part}; read it with the function for what it holds.")
        if size != self.manifest["size"]:
            raise OtherStructure(f"{self}", f"{self.manifest['size']} members", f"{size}")
        written = {array["key"]: array for array in self.manifest["arrays"][part]}
        wanted = {array["key"]: array for array in expected}
        for key in [*wanted, *written]:
            if written.get(key) != wanted.get(key):
                path = (wanted.get(key) or written[key])["path"]
                has = f"{_say(written.get(key))} at `{path}` in `{part}`, for each member"
                raise OtherStructure(f"{self}", has, _say(wanted.get(key)))
        places = {key: place for place, key in enumerate(written)}
        return [places[key] for key in wanted]

    def _array(self, i: int, part: str, j: int, stored: np.ndarray) -> np.ndarray:
        """Return array `j` of a part of member `i`, after checking shape, dtype and checksum."""
        entry = self.manifest["arrays"][part][j]
        if list(stored.shape) != entry["stored"] or str(stored.dtype) != entry["stored_dtype"]:
            raise self.damaged(f"`{entry['path']}` is stored as {describe(stored)}")
        if zlib.crc32(stored.tobytes()) != self.manifest["checksums"][part][i][j]:
            raise self.damaged(f"the bytes of `{entry['path']}` of member {i} have changed since they were saved")
        if jax.dtypes.canonicalize_dtype(stored.dtype) != stored.dtype:
            found = f"{self} has dtype {stored.dtype} at `{entry['path']}`"
            raise ValueError(f"{found}, which needs jax_enable_x64; enable it.")
        return stored


def outline(tree: Any, *, drop_axis: bool = False) -> list[dict[str, Any]]:
    """Return path, shape, dtype, stored shape and stored dtype of one member's arrays, as plain values for JSON."""

    def of_leaf(path: Any, leaf: Any) -> dict[str, Any]:
        """Return the entry of one array in the manifest."""
        leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)  # a variable of one model may hold a number
        # The key distinguishes paths with the same text: `a.b` may be an entry of `a`, or an entry named "a.b".
        named = {"key": jax.tree_util.keystr(path), "path": dotted(path)}
        # Keys are stored as their data, whose dtype does not determine the implementation, so that is stored by name.
        data = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
        dtype = f"key<{jax.random.key_impl(jnp.empty((), leaf.dtype))}>" if is_key(leaf) else str(leaf.dtype)
        shape, stored = (list(x.shape[1:] if drop_axis else x.shape) for x in (leaf, data))
        return {**named, "shape": shape, "dtype": dtype, "stored": stored, "stored_dtype": str(data.dtype)}

    return [of_leaf(path, leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest of the checkpoint at `path`, or None if there is no checkpoint."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == FORMAT else None


def _say(entry: dict[str, Any] | None) -> str:
    return "nothing" if entry is None else f"shape {tuple(entry['shape'])} and dtype {entry['dtype']}"


def checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _stored(directory: Path, names: Iterable[str]) -> list[tuple[str, np.ndarray]]:
    """Return arrays of a checkpoint of an earlier version: zarr in an OCDBT database."""
    import tensorstore as ts

    # One context for all arrays: their reads share its cache of the database, and its threads.
    context = ts.Context()

    def spec(name: str) -> dict[str, Any]:
        base = {"driver": "file", "path": f"{directory}/"}
        return {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}

    stores = [(name, ts.open(spec(name), open=True, read=True, context=context)) for name in names]
    reads = [(name, store.result().read()) for name, store in stores]
    return [(name, read.result()) for name, read in reads]
