"""Checkpoints: arrays of one or several members on disk, one subtree per member.

A checkpoint is a directory: `arrays/0/` and so on, one for each process that has written its members, with arrays
called `members.000003.ensemble.0000`; `history.npz`, where there is a history; and `plurax.json`, which names every
array with its path, shape, dtype and checksums, and every file with its size. It is written under another name and
renamed when it is complete, so a directory with its name is complete, unless somebody damages it later; the sizes and
the checksums show that.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.arguments import describe
from .._core.prng import is_key
from .._models.split_model import dotted
from . import array_store
from .atomic_write import sync
from .processes import Damaged, Group

# The arrays of a part: for each its path, shape and dtype, and how it is stored; see `outline`.
Outline = list[dict[str, Any]]

_FORMAT = "plurax checkpoint"
_VERSION = 2
_MANIFEST = "plurax.json"
_HISTORY = "history.npz"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest was read, and whose files have the sizes that it names."""

    api: str
    path: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, api: str, path: str | os.PathLike[str]) -> Checkpoint:
        """Read the manifest, check that every file has the size that it names, and return the checkpoint."""
        path = Path(path).resolve()
        if not path.exists():
            # A process killed between the two renames of `_replace` leaves the old one under this name.
            earlier = sorted(path.parent.glob(f".{path.name}.*.replaced"))
            hint = f" The one that a save was replacing is at {earlier[-1]}; rename it back." if earlier else ""
            raise FileNotFoundError(f"{api}: there is no checkpoint at {path}.{hint}")
        manifest = _manifest(path)
        if manifest is None:
            raise Damaged(f"{api}: {path} is not a checkpoint of this library, or is damaged: it has no {_MANIFEST}.")
        checkpoint = cls(api, path, manifest)
        if (version := manifest.get("version")) != _VERSION:
            raise ValueError(
                f"{checkpoint} has version {version}, but this library reads {_VERSION}; use the one that wrote it."
            )
        if manifest.pop("checksum", None) != _checksum(manifest):
            raise checkpoint.damaged(f"{_MANIFEST} has changed since it was written")
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
        """Return how errors begin."""
        return f"{self.api}: the checkpoint at {self.path}"

    def history(self) -> dict[str, np.ndarray]:
        """Return the arrays that `write` was given as its history."""
        try:
            with np.load(self.path / _HISTORY, allow_pickle=False) as file:
                return {name: file[f"{i}"] for i, name in enumerate(self.manifest["history"])}
        except Exception as error:  # numpy and zipfile raise many kinds for one fact: the bytes cannot be read
            raise self.damaged(f"{_HISTORY}: {error}") from error

    def load(self, likes: Mapping[str, Any], outlines: Mapping[str, Outline], size: int) -> dict[str, Any]:
        """Return trees of arrays with the values of the checkpoint; raise if it has other arrays, or they are damaged.

        Args:
          likes: for each part a tree of arrays, or of their shapes, with the members along axis 0.
          outlines: for each part its arrays as `outline` describes them.
          size: how many members there are.
        """
        members = _members_on_devices(likes, size)

        def of_part(part: str, like: Any) -> Any:
            rows, (leaves, structure) = self._read(part, outlines[part], members, size), jax.tree.flatten(like)
            arrays = (
                _stacked(leaf, x["dtype"], row) for leaf, x, row in zip(leaves, outlines[part], rows, strict=True)
            )
            return jax.tree.unflatten(structure, arrays)

        return {part: of_part(part, like) for part, like in likes.items()}

    def member(self, i: int, part: str, expected: Outline) -> list[jax.Array]:
        """Return the arrays of one member's part, which are those expected; read no others."""
        rows = self._read(part, expected, [i], self.manifest["size"])
        return [_as_saved(row[i], entry["dtype"]) for row, entry in zip(rows, expected, strict=True)]

    def _read(self, part: str, expected: Outline, members: list[int], size: int) -> list[dict[int, np.ndarray]]:
        """Return for each of the arrays expected in a part those of some members, as stored."""
        order = self._order(part, expected, size)
        entries, wanted = self.manifest["arrays"][part], defaultdict[int, list[str]](list)
        for i in members:
            wanted[self.manifest["owners"][i]] += [_name(i, part, j) for j in order if 0 not in entries[j]["stored"]]
        stored: dict[str, np.ndarray] = {}
        try:
            for owner, names in wanted.items():
                stored |= array_store.get(self.path / f"arrays/{owner}", names)
        except Exception as error:  # tensorstore raises many kinds for one fact: the bytes cannot be read
            raise self.damaged(error) from error
        return [{i: self._array(i, part, j, stored.get(_name(i, part, j))) for i in members} for j in order]

    def _order(self, part: str, expected: Outline, size: int) -> list[int]:
        """Return the place of each expected array in the checkpoint; raise if it has others, or lacks some."""
        if part not in self.manifest["arrays"]:
            held = ", ".join(self.manifest["arrays"])
            raise ValueError(f"{self} holds {held}, and no {part}; read it with what wrote it.")
        if size != self.manifest["size"]:
            raise ValueError(f"{self} has {self.manifest['size']} members, but like has {size}; pass one of that size.")
        written = {array["key"]: array for array in self.manifest["arrays"][part]}
        wanted = {array["key"]: array for array in expected}
        for key in [*wanted, *written]:
            if written.get(key) != wanted.get(key):
                has = f"{_say(written.get(key))} at `{(wanted.get(key) or written[key])['path']}` of a member's {part}"
                lacks = f"like has {_say(wanted.get(key))}"
                raise ValueError(f"{self} has {has}, but {lacks}; pass one of the model and optimiser that was saved.")
        places = {key: place for place, key in enumerate(written)}
        return [places[key] for key in wanted]

    def _array(self, i: int, part: str, j: int, stored: np.ndarray | None) -> np.ndarray:
        """Return array `j` of a part of member `i`, checked."""
        entry = self.manifest["arrays"][part][j]
        if stored is None:  # an array without elements is not written
            stored = np.zeros(entry["stored"], entry["stored_dtype"])
        if list(stored.shape) != entry["stored"] or str(stored.dtype) != entry["stored_dtype"]:
            raise self.damaged(f"`{entry['path']}` is stored as {describe(stored)}")
        if zlib.crc32(stored.tobytes()) != self.manifest["checksums"][part][i][j]:
            raise self.damaged(f"the bytes of `{entry['path']}` of member {i} have changed since they were saved")
        if jax.dtypes.canonicalize_dtype(stored.dtype) != stored.dtype:
            found = f"{self} has dtype {stored.dtype} at `{entry['path']}`"
            raise ValueError(f"{found}, which needs jax_enable_x64; enable it.")
        return stored


def write(
    api: str,
    path: Path,
    parts: Mapping[str, Any],
    size: int,
    *,
    outlines: Mapping[str, list[dict[str, Any]]],
    about: Mapping[str, Any] | None = None,
    history: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write a checkpoint atomically, together with the other processes that hold parts of it.

    Args:
      api: who writes it, for errors.
      path: the directory to make, or a checkpoint to replace.
      parts: pytrees of arrays by name, with the members along axis 0 of every array.
      size: how many members there are.
      outlines: for each part its arrays as `outline` describes them, in the order of its leaves.
      about: further entries of its manifest; values for JSON.
      history: arrays to write besides those of the members.

    Raises:
      FileExistsError: `path` exists and is not a checkpoint, or holds other files too.
    """
    path = path.resolve()
    group = Group.of(parts)
    unfinished = path.parent / f".{path.name}.{group.gather(uuid.uuid4().hex)[0]}.unfinished"
    try:

        def prepare() -> dict[str, list[dict[int, tuple[Any, int]]]]:
            """Make the directory in the first process; return the members whose arrays this process has."""
            if group.is_first:
                _check_replaceable(api, path)
                path.parent.mkdir(parents=True, exist_ok=True)
                unfinished.mkdir()
            return {part: [_held(leaf, size) for leaf in jax.tree.leaves(tree)] for part, tree in parts.items()}

        def write_members() -> dict[str, Any]:
            """Write the members that this process owns; return what the manifest needs of them."""
            mine = [i for i in range(size) if owners[i] == jax.process_index()]
            arrays: dict[str, np.ndarray] = {}
            for part, leaves in held.items():
                for j, leaf in enumerate(leaves):
                    arrays |= {_name(i, part, j): np.asarray(leaf[i][0])[leaf[i][1]] for i in mine}
            home = unfinished / f"arrays/{jax.process_index()}"
            if mine:
                array_store.put(home, {name: array for name, array in arrays.items() if array.size})
                for file in [*home.rglob("*"), home]:
                    sync(file)
            # CRC-32 finds damage, which is what it is for; it protects from nobody who changes a file on purpose.
            checksums = {name: zlib.crc32(array.tobytes()) for name, array in arrays.items()}
            files = {f.relative_to(unfinished).as_posix(): f.stat().st_size for f in home.rglob("*") if f.is_file()}
            return {"checksums": checksums, "files": files}

        def finish() -> None:
            """Write history and manifest in the first process, and rename the directory."""
            if not group.is_first:
                return
            sums, files = ({k: v for w in written for k, v in w[kind].items()} for kind in ("checksums", "files"))
            checksums = {
                part: [[sums[_name(i, part, j)] for j in range(len(arrays))] for i in range(size)]
                for part, arrays in outlines.items()
            }
            manifest: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "size": size, **(about or {})}
            manifest |= {"arrays": outlines, "owners": owners, "checksums": checksums, "files": files}
            if history is not None:
                # Under numbers: a name may be anything, but savez has parameters of its own.
                manifest["history"] = list(history)
                numbered = {f"{i}": array for i, array in enumerate(history.values())}
                np.savez(unfinished / _HISTORY, allow_pickle=False, **numbered)
                files[_HISTORY] = (unfinished / _HISTORY).stat().st_size
            (unfinished / _MANIFEST).write_text(json.dumps({**manifest, "checksum": _checksum(manifest)}))
            # On the disk before the rename, or a power cut could leave the final name with files that are not.
            for file in [*unfinished.iterdir(), unfinished]:
                sync(file)
            _replace(unfinished, path)

        # Each step in all processes before the next in any: a directory is there before others write into it, and all
        # arrays are written before the first process renames it.
        held = group.agree(prepare)
        whole = [i for i in range(size) if all(i in leaf for leaves in held.values() for leaf in leaves)]
        # The first process that has all arrays of a member writes them.
        holders = list(zip(group.processes, group.gather(whole), strict=True))
        owners = [next((process for process, members in holders if i in members), None) for i in range(size)]
        if None in owners:
            lost = owners.index(None)
            raise ValueError(f"{api}: no process has member {lost} whole; give all arrays one sharding of axis 0.")
        written = group.gather(group.agree(write_members))
        group.agree(finish)
    finally:
        if group.is_first:
            shutil.rmtree(unfinished, ignore_errors=True)


def _held(leaf: Any, size: int) -> dict[int, tuple[Any, int]]:
    """Return for each member whose whole array this process has an array that it is in, and its place there."""
    leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf  # the shards of keys have their data's indices
    if getattr(leaf, "is_fully_addressable", True):
        return {i: (leaf, i) for i in range(size)}
    return {
        i: (shard.data, place)
        for shard in leaf.addressable_shards
        if all(i.indices(n) == (0, n, 1) for i, n in zip(shard.index[1:], leaf.shape[1:], strict=True))
        for place, i in enumerate(range(*shard.index[0].indices(size)))
    }


def _members_on_devices(tree: Any, size: int) -> list[int]:
    """Return the members whose arrays this process needs to make a tree like this one."""
    leaves = jax.tree.leaves(tree)
    if not all(map(_is_spread, leaves)):
        return list(range(size))
    parts = [x.sharding.addressable_devices_indices_map(x.shape).values() for x in leaves]
    return sorted({i for indices in parts for index in indices for i in range(*index[0].indices(size))})


def _stacked(like: Any, dtype: str, rows: Mapping[int, np.ndarray]) -> jax.Array:
    """Return the stacked array of members, sharded as `like`."""
    if not _is_spread(like):
        return _as_saved(np.stack([rows[i] for i in range(len(rows))]), dtype)
    size = like.shape[0]

    def of_shard(index: Any) -> np.ndarray:
        members, *others = index
        return np.stack([rows[i] for i in range(*members.indices(size))])[(slice(None), *others)]

    # A sharding of keys is one of their data too: that has more axes behind.
    shape = (size, *next(iter(rows.values())).shape)
    return _as_saved(jax.make_array_from_callback(shape, like.sharding, of_shard), dtype)


def _as_saved(data: Any, dtype: str) -> jax.Array:
    """Return stored data as an array, of keys where it held keys."""
    if not dtype.startswith("key<"):
        return jnp.asarray(data)
    return jax.random.wrap_key_data(jnp.asarray(data), impl=dtype.removeprefix("key<").removesuffix(">"))


def _is_spread(leaf: Any) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return sharding is not None and len(sharding.device_set) > 1


def _name(i: int, part: str, j: int) -> str:
    return f"members.{i:06d}.{part}.{j:04d}"


def outline(tree: Any, *, drop_axis: bool = False) -> list[dict[str, Any]]:
    """Return path, shape and dtype of the arrays of one member, and how they are stored; plain values, for JSON."""

    def of_leaf(path: Any, leaf: Any) -> dict[str, Any]:
        """Return the entry of one array in the manifest."""
        leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)  # a variable of one model may hold a number
        # The key tells paths apart that read alike: `a.b` may be an entry of `a`, or one called "a.b".
        named = {"key": jax.tree_util.keystr(path), "path": dotted(path)}
        # Keys are stored as their data, of which the dtype does not tell the implementation: its name does.
        data = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
        dtype = f"key<{jax.random.key_impl(jnp.empty((), leaf.dtype))}>" if is_key(leaf) else str(leaf.dtype)
        shape, stored = (list(x.shape[1:] if drop_axis else x.shape) for x in (leaf, data))
        return {**named, "shape": shape, "dtype": dtype, "stored": stored, "stored_dtype": str(data.dtype)}

    return [of_leaf(path, leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def _check_replaceable(api: str, path: Path) -> None:
    """Raise if `path` is something that `write` did not write, or holds files that it did not write."""
    if not path.exists():
        return
    manifest = _manifest(path)
    if manifest is None:
        raise FileExistsError(f"{api}: {path} exists and is not a checkpoint; give another path.")
    files = {file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir()}
    others = sorted(files - {_MANIFEST, *manifest.get("files", {})})
    if others:
        raise FileExistsError(f"{api}: {path} also holds {others[0]!r}, which would be lost; move it.")


def _replace(new: Path, path: Path) -> None:
    """Put the directory `new` where `path` is. Between the two renames `path` is absent, but never half written."""
    # A directory that is not empty cannot be replaced by a single rename.
    old = new.with_suffix(".replaced")
    if not path.exists():
        new.rename(path)
    else:
        path.rename(old)
        try:
            new.rename(path)
        except BaseException:
            old.rename(path)
            raise
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest of the checkpoint at `path`, or None if there is no checkpoint."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == _FORMAT else None


def _say(entry: dict[str, Any] | None) -> str:
    return "nothing" if entry is None else f"shape {tuple(entry['shape'])} and dtype {entry['dtype']}"


def _checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
