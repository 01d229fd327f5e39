"""Checkpoints: arrays of one or several members on disk, one subtree per member.

A checkpoint is a directory: `arrays/`, written by orbax, with `members/000003/ensemble/0000` and so on; `history.npz`,
where there is a history; and `plurax.json`, which names every array with its path, shape, dtype and checksums, and
every file with its size. It is written under another name and renamed when it is whole, so what has its name is whole,
unless somebody damages it later; the sizes and the checksums tell.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._arguments import describe
from ._model import dotted

_FORMAT = "plurax checkpoint"
_VERSION = 1
_MANIFEST = "plurax.json"
_HISTORY = "history.npz"


class Damaged(ValueError):
    """A checkpoint that cannot be read whole."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest was read, and whose files have the sizes that it names."""

    api: str
    path: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, api: str, path: str | os.PathLike[str]) -> Checkpoint:
        """Read the manifest, and check that every file has the size that it names."""
        path = Path(path).resolve()
        if not path.exists():
            earlier = sorted(path.parent.glob(f".{path.name}.*.replaced"))
            hint = f" The one that a save was replacing is at {earlier[-1]}; rename it back." if earlier else ""
            raise FileNotFoundError(f"{api}: there is no checkpoint at {path}.{hint}")
        manifest = _manifest(path)
        if manifest is None:
            raise Damaged(f"{api}: {path} is not a checkpoint of this library, or is damaged: it has no {_MANIFEST}.")
        checkpoint = cls(api, path, manifest)
        if manifest.get("version") != _VERSION:
            raise ValueError(
                f"{api}: the checkpoint at {path} has version {manifest.get('version')}, but this library reads "
                f"{_VERSION}."
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
        """The error that says so."""
        return Damaged(f"{self.api}: the checkpoint at {self.path} is damaged: {fact}.")

    def history(self) -> dict[str, np.ndarray]:
        """The arrays that `write` was given."""
        try:
            with np.load(self.path / _HISTORY, allow_pickle=False) as file:
                return {name: file[f"{i}"] for i, name in enumerate(self.manifest["history"])}
        except Exception as error:  # numpy and zipfile raise many kinds for one fact: the bytes cannot be read
            raise self.damaged(f"{_HISTORY}: {error}") from error

    def order(self, part: str, expected: list[dict[str, Any]], size: int | None = None) -> list[int]:
        """Where the expected arrays stand in the checkpoint; refuses other arrays than those it has."""
        if part not in self.manifest["arrays"]:
            raise ValueError(
                f"{self.api}: the checkpoint at {self.path} holds {' and '.join(self.manifest['arrays'])}, and no "
                f"{part}; it was saved from something else: read it with what wrote it."
            )
        if size is not None and size != self.manifest["size"]:
            raise ValueError(
                f"{self.api}: the checkpoint at {self.path} has {self.manifest['size']} members, but like has {size}."
            )
        written = {array["key"]: array for array in self.manifest["arrays"][part]}
        wanted = {array["key"]: array for array in expected}
        for key in [*wanted, *written]:
            if written.get(key) != wanted.get(key):
                path = (wanted.get(key) or written[key])["path"]
                raise ValueError(
                    f"{self.api}: the checkpoint at {self.path} has {_say(written.get(key))} at `{path}` of a "
                    f"member's {part}, but like has {_say(wanted.get(key))}; pass one of the architecture and "
                    "optimiser that was saved."
                )
        places = {key: place for place, key in enumerate(written)}
        return [places[key] for key in wanted]

    def read(self, members: Sequence[int], order: Mapping[str, list[int]]) -> list[dict[str, list[Any]]]:
        """For each of some members, a dict from parts to their arrays in the order that `order` gives for each part."""
        import orbax.checkpoint as ocp

        arrays = self.manifest["arrays"]
        wanted = {
            _member(i): {
                part: {
                    _leaf(j): jax.ShapeDtypeStruct(tuple(array["stored"]), np.dtype(array["stored_dtype"]))
                    for j, array in enumerate(arrays[part])
                    if 0 not in array["stored"]
                }
                for part in order
            }
            for i in members
        }
        item = {"members": wanted}
        restore = ocp.args.PyTreeRestore(
            item=item,
            restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item),
            partial_restore=True,
        )
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                read = checkpointer.restore(self.path / "arrays", args=restore)["members"]
        except Exception as error:  # orbax and tensorstore raise many kinds for one fact: the bytes cannot be read
            raise self.damaged(error) from error
        return [
            {
                part: [self._array(i, part, j, read[_member(i)][part].get(_leaf(j))) for j in order[part]]
                for part in order
            }
            for i in members
        ]

    def _array(self, i: int, part: str, j: int, stored: np.ndarray | None) -> Any:
        """Array `j` of a part of member `i`, as it was saved."""
        entry = self.manifest["arrays"][part][j]
        if stored is None:  # orbax takes no arrays without elements
            stored = np.zeros(entry["stored"], entry["stored_dtype"])
        if list(stored.shape) != entry["stored"] or str(stored.dtype) != entry["stored_dtype"]:
            raise self.damaged(f"`{entry['path']}` is stored as {describe(stored)}")
        if zlib.crc32(stored.tobytes()) != self.manifest["checksums"][part][i][j]:
            raise self.damaged(f"the bytes of `{entry['path']}` of member {i} have changed since they were saved")
        array = jnp.asarray(stored)
        if array.dtype != stored.dtype:
            raise ValueError(
                f"{self.api}: the checkpoint at {self.path} has dtype {stored.dtype} at `{entry['path']}`, which "
                "needs jax_enable_x64; enable it."
            )
        if entry["dtype"] == entry["stored_dtype"]:
            return array
        return jax.random.wrap_key_data(array, impl=entry["dtype"].removeprefix("key<").removesuffix(">"))


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
    """Write a checkpoint, atomically.

    Args:
      api: who writes it, for errors.
      path: the directory to make, or a checkpoint to replace.
      parts: pytrees of arrays by name, with the members along axis 0 of every array.
      size: how many members there are.
      outlines: for each part its arrays as `outline` describes them, in the order of its leaves.
      about: what else its manifest shall hold; values for JSON.
      history: arrays to write beside those of the members.

    Raises:
      FileExistsError: `path` exists and is not a checkpoint, or holds other files too.
    """
    import orbax.checkpoint as ocp

    path = path.resolve()
    _check_replaceable(api, path)
    stored = {part: [_to_stored(leaf) for leaf in jax.tree.leaves(tree)] for part, tree in parts.items()}
    members = range(size)
    manifest: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "size": size, **(about or {})}
    manifest["arrays"] = outlines
    manifest["checksums"] = {
        part: [[zlib.crc32(array[i].tobytes()) for array in arrays] for i in members] for part, arrays in stored.items()
    }
    tree = {
        "members": {
            _member(i): {
                part: {_leaf(j): np.asarray(array[i]) for j, array in enumerate(arrays) if array[i].size}
                for part, arrays in stored.items()
            }
            for i in members
        }
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}.{uuid.uuid4().hex}.unfinished"
    try:
        unfinished.mkdir()
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(unfinished / "arrays", args=ocp.args.PyTreeSave(tree))
        if history is not None:
            # Under numbers: a name may be anything, but savez has parameters of its own.
            manifest["history"] = list(history)
            numbered = {f"{i}": array for i, array in enumerate(history.values())}
            np.savez(unfinished / _HISTORY, allow_pickle=False, **numbered)
        files = [file for file in unfinished.rglob("*") if file.is_file()]
        manifest["files"] = {file.relative_to(unfinished).as_posix(): file.stat().st_size for file in files}
        (unfinished / _MANIFEST).write_text(json.dumps({**manifest, "checksum": _checksum(manifest)}))
        for file in [*files, unfinished / _MANIFEST, *(d for d in unfinished.rglob("*") if d.is_dir()), unfinished]:
            _sync(file)
        _replace(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def outline(tree: Any, *, drop_axis: bool = False) -> list[dict[str, Any]]:
    """Path, shape and dtype of the arrays of one member, and how they are stored; plain values, for JSON."""

    def of_leaf(path: Any, leaf: Any) -> dict[str, Any]:
        leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)  # a variable of one model may hold a number
        shape = leaf.shape[1:] if drop_axis else leaf.shape
        # The key tells paths apart that read alike: `a.b` may be an entry of `a`, or one called "a.b".
        named = {"key": jax.tree_util.keystr(path), "path": dotted(path), "shape": list(shape)}
        data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
        stored = data.shape[1:] if drop_axis else data.shape
        return {**named, "dtype": _dtype_name(leaf.dtype), "stored": list(stored), "stored_dtype": str(data.dtype)}

    return [of_leaf(path, leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def restack(like: Any, members: list[list[Any]]) -> Any:
    """The tree `like`, with the members' arrays along axis 0."""
    return jax.tree.unflatten(jax.tree.structure(like), [jnp.stack(leaves) for leaves in zip(*members, strict=True)])


def _check_replaceable(api: str, path: Path) -> None:
    """Refuse to replace anything but what `write` wrote."""
    if not path.exists():
        return
    manifest = _manifest(path)
    if manifest is None:
        raise FileExistsError(f"{api}: {path} exists and is not a checkpoint; give another path.")
    files = {file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir()}
    others = sorted(files - {_MANIFEST, *manifest.get("files", {})})
    if others:
        raise FileExistsError(
            f"{api}: the checkpoint at {path} also holds {others[0]!r}, which would be lost; move it, or give another "
            "path."
        )


def _replace(new: Path, path: Path) -> None:
    """Put the directory `new` where `path` is. Between the two renames `path` is absent, but never half written."""
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
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest(path: Path) -> dict[str, Any] | None:
    """What the checkpoint at `path` says of itself, or None where that is no checkpoint."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == _FORMAT else None


def _say(entry: dict[str, Any] | None) -> str:
    return "nothing" if entry is None else f"shape {tuple(entry['shape'])} and dtype {entry['dtype']}"


def _dtype_name(dtype: Any) -> str:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return f"key<{jax.random.key_impl(jnp.empty((), dtype))}>"
    return str(dtype)


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _to_stored(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _member(i: int) -> str:
    return f"{i:06d}"


def _leaf(j: int) -> str:
    return f"{j:04d}"
