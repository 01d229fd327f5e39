"""Checkpoints: an ensemble or a training state on disk, one subtree per member.

A checkpoint is a directory: `arrays/`, written by orbax, with `members/000003/ensemble/0000` and so on; `history.npz`,
where there is a history; and `plurax.json`, which names every array with its path, shape and dtype, and every file with
its size. It is written under another name and renamed when it is whole, so what has its name is whole, unless somebody
damages it later; the sizes tell.
"""

from __future__ import annotations

import json
import operator
import os
import shutil
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..transforms._arguments import describe
from ..transforms._model import dotted, is_model, split
from ._ensemble import Ensemble
from ._state import TrainState

_FORMAT = "plurax checkpoint"
_VERSION = 1
_MANIFEST = "plurax.json"


def save(path: str | os.PathLike[str], state_or_ensemble: TrainState | Ensemble) -> None:
    """Write an ensemble or a training state to a directory, atomically.

    Args:
      path: the directory to make. A checkpoint that is there already is replaced once the new one is whole.
      state_or_ensemble: what to write.

    Raises:
      TypeError: neither an `Ensemble` nor a `TrainState`.
      FileExistsError: `path` exists and is not a checkpoint.

    Cost:
      One copy of the arrays in host memory, and about half a second beside the writing.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, load, save
      >>> ens = Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 2, seed=0)
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     save(f"{directory}/trained", ens)
      ...     same = load(f"{directory}/trained", ens)
      >>> bool((same[1].kernel[...] == ens[1].kernel[...]).all())
      True
    """
    if not isinstance(state_or_ensemble, (TrainState, Ensemble)):
        raise TypeError(f"save: needs an Ensemble or a TrainState, but got {type(state_or_ensemble).__name__}.")
    _write(Path(path).absolute(), state_or_ensemble, {}, None)


def load(path: str | os.PathLike[str], like: Any) -> Any:
    """Read what `save` wrote.

    Args:
      path: the directory.
      like: an `Ensemble` or a `TrainState` of the same architecture, size and optimiser, whose values do not matter
        (what `jax.eval_shape` gives will do). An `Ensemble` reads the ensemble of a saved training state.

    Returns:
      What `like` is, with the values of the checkpoint.

    Raises:
      TypeError: `like` is neither.
      FileNotFoundError: there is no such directory.
      ValueError: it is no checkpoint, is damaged, or holds other arrays than `like`; the first difference is named.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, load, save
      >>> make = lambda rngs: nnx.Linear(4, 3, rngs=rngs)
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     save(f"{directory}/trained", Ensemble.create(make, 2, seed=0))
      ...     load(f"{directory}/trained", Ensemble.create(make, 2, seed=1))
      Ensemble of 2 × Linear, 15 parameters each
    """
    checkpoint = _Checkpoint.open("load", path)
    if isinstance(like, Ensemble):
        return checkpoint.ensemble(like)
    if isinstance(like, TrainState):
        return checkpoint.train_state(like)
    raise TypeError(f"load: like must be an Ensemble or a TrainState, but got {type(like).__name__}.")


def load_member(path: str | os.PathLike[str], i: int, like: Any) -> Any:
    """Read one member of what `save` wrote, and its bytes only.

    Args:
      path: the directory.
      i: the member's index; negative ones count from the end.
      like: an `Ensemble`, a `TrainState`, or a model of the same architecture, whose values do not matter.

    Returns:
      The member as a standalone model.

    Raises:
      TypeError, FileNotFoundError, ValueError: as for `load`.
      IndexError: there is no such member.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, load_member, save
      >>> make = lambda rngs: nnx.Linear(4, 3, rngs=rngs)
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     save(f"{directory}/trained", Ensemble.create(make, 2, seed=0))
      ...     model = load_member(f"{directory}/trained", 1, make(nnx.Rngs(0)))
      >>> type(model).__name__
      'Linear'
    """
    checkpoint = _Checkpoint.open("load_member", path)
    if isinstance(like, TrainState):
        like = like.ensemble
    if isinstance(like, Ensemble):
        structure, stacked = like.structure, (like.trainable, like.rest)
        outline = _outline_members(like)
    elif is_model(like):
        parts = split(like)
        structure, stacked = parts.structure, (parts.trainable, parts.rest)
        outline = _outline(parts.trainable) + _outline(parts.rest)
    else:
        raise TypeError(
            f"load_member: like must be an Ensemble, a TrainState or a model, but got {type(like).__name__}."
        )
    size = checkpoint.manifest["size"]
    if isinstance(i, bool) or not hasattr(type(i), "__index__"):
        raise TypeError(f"load_member: i must be an int, but got {describe(i)}.")
    if not -size <= i < size:
        raise IndexError(f"load_member: member {i} is out of range; the checkpoint at {checkpoint.path} has {size}.")
    checkpoint.check("ensemble", outline)
    (leaves,) = checkpoint.read([operator.index(i) % size], ["ensemble"])
    return structure.merge(*jax.tree.unflatten(jax.tree.structure(stacked), leaves["ensemble"]))


@dataclass(frozen=True)
class Resumed:
    """What a run goes on from."""

    state: TrainState
    columns: dict[str, np.ndarray]
    strategy: str | None


@dataclass(frozen=True)
class Store:
    """The checkpoints of one run, `step_00000100` and so on, in a directory."""

    directory: Path
    keep: int

    def resume(self, like: TrainState, hyperparams: Mapping[str, Any]) -> Resumed | None:
        """The newest whole checkpoint, or None; refuses one of another run."""
        for path in reversed(self._paths()):
            try:
                checkpoint = _Checkpoint.open("Trainer.fit", path)
            except ValueError as error:
                warnings.warn(f"{error} It is skipped.", stacklevel=4)
                continue
            written = checkpoint.manifest.get("hyperparams", {})
            current = _plain(hyperparams)
            for name in sorted({*written, *current}):
                if written.get(name) != current.get(name):
                    raise ValueError(
                        f"Trainer.fit: the checkpoint {path} was written with {name}={written.get(name)}, but the "
                        f"trainer has {name}={current.get(name)}; use another checkpoint_dir, or the same "
                        "hyperparameters."
                    )
            state = checkpoint.train_state(like)
            return Resumed(state, checkpoint.columns(), checkpoint.manifest.get("strategy"))
        return None

    def write(
        self,
        state: TrainState,
        columns: dict[str, np.ndarray],
        strategy: str | None,
        chunk_size: int | None,
        hyperparams: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint, and remove those that are no longer to be kept."""
        about = {"strategy": strategy, "chunk_size": chunk_size, "hyperparams": _plain(hyperparams)}
        _write(self.directory.absolute() / f"step_{int(state.step):08d}", state, about, columns)
        for path in self._paths()[: -self.keep]:
            shutil.rmtree(path)

    def _paths(self) -> list[Path]:
        return sorted(path for path in self.directory.glob("step_*") if path.name[5:].isdigit())


@dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint that was found whole."""

    api: str
    path: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, api: str, path: str | os.PathLike[str]) -> _Checkpoint:
        """Read the manifest, and check that every file has the size that it names."""
        path = Path(path).absolute()
        if not path.exists():
            raise FileNotFoundError(f"{api}: there is no checkpoint at {path}.")
        manifest = _manifest(path)
        if manifest is None:
            raise ValueError(
                f"{api}: {path} is not a checkpoint of this library, or is damaged: it has no {_MANIFEST}."
            )
        if manifest["version"] != _VERSION:
            raise ValueError(
                f"{api}: the checkpoint at {path} has version {manifest['version']}, but this library reads {_VERSION}."
            )
        for name, size in manifest["files"].items():
            file = path / name
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes instead of {size}"
                raise ValueError(f"{api}: the checkpoint at {path} is damaged: {name} {state}.")
        return cls(api, path, manifest)

    def ensemble(self, like: Ensemble) -> Ensemble:
        arrays = (like.trainable, like.rest)
        self.check("ensemble", _outline_members(like), len(like))
        members = self.read(range(self.manifest["size"]), ["ensemble"])
        return Ensemble(like.structure, *_restack(arrays, [member["ensemble"] for member in members]))

    def train_state(self, like: TrainState) -> TrainState:
        if "opt_state" not in self.manifest["arrays"]:
            raise ValueError(
                f"{self.api}: the checkpoint at {self.path} holds an ensemble, but no training state; load it with an "
                "Ensemble as like."
            )
        arrays = (like.ensemble.trainable, like.ensemble.rest)
        self.check("ensemble", _outline_members(like.ensemble), len(like.ensemble))
        self.check("opt_state", _outline(like.opt_state, drop_axis=True))
        members = self.read(range(self.manifest["size"]), ["ensemble", "opt_state"])
        trainable, rest = _restack(arrays, [member["ensemble"] for member in members])
        opt_state = _restack(like.opt_state, [member["opt_state"] for member in members])
        step = jnp.asarray(self.manifest["step"], like.step.dtype)
        return TrainState(Ensemble(like.ensemble.structure, trainable, rest), opt_state, step)

    def columns(self) -> dict[str, np.ndarray]:
        with np.load(self.path / "history.npz", allow_pickle=False) as file:
            return dict(file)

    def check(self, part: str, expected: list[dict[str, Any]], size: int | None = None) -> None:
        """Refuse arrays that are not those of the checkpoint."""
        if size is not None and size != self.manifest["size"]:
            raise ValueError(
                f"{self.api}: the checkpoint at {self.path} has {self.manifest['size']} members, but like has {size}."
            )
        written = {array["path"]: array for array in self.manifest["arrays"][part]}
        wanted = {array["path"]: array for array in expected}
        for path in [*wanted, *written]:
            if written.get(path) != wanted.get(path):
                raise ValueError(
                    f"{self.api}: the checkpoint at {self.path} has {_say(written.get(path))} at `{path}` of a "
                    f"member's {part}, but like has {_say(wanted.get(path))}; pass one of the architecture and "
                    "optimiser that was saved."
                )

    def read(self, members: Sequence[int], parts: Sequence[str]) -> list[dict[str, list[Any]]]:
        """The arrays of some members: for each a dict from parts to lists."""
        import orbax.checkpoint as ocp

        arrays = self.manifest["arrays"]
        wanted = {
            _member(i): {
                part: {
                    _leaf(j): jax.ShapeDtypeStruct(tuple(array["stored"]), np.dtype(array["stored_dtype"]))
                    for j, array in enumerate(arrays[part])
                    if 0 not in array["stored"]
                }
                for part in parts
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
            raise ValueError(f"{self.api}: the checkpoint at {self.path} is damaged: {error}") from error
        return [
            {
                part: [
                    _from_stored(read[_member(i)][part].get(_leaf(j)), array) for j, array in enumerate(arrays[part])
                ]
                for part in parts
            }
            for i in members
        ]


def _write(
    path: Path,
    saved: TrainState | Ensemble,
    about: dict[str, Any],
    columns: dict[str, np.ndarray] | None,
) -> None:
    import orbax.checkpoint as ocp

    if path.exists() and _manifest(path) is None:
        raise FileExistsError(f"save: {path} exists and is not a checkpoint; give another path.")
    ensemble = saved.ensemble if isinstance(saved, TrainState) else saved
    parts: dict[str, Any] = {"ensemble": (ensemble.trainable, ensemble.rest)}
    if isinstance(saved, TrainState):
        parts["opt_state"] = saved.opt_state
        about = {"step": int(saved.step), **about}
    manifest = {"format": _FORMAT, "version": _VERSION, "size": len(ensemble), **about}
    manifest["arrays"] = {"ensemble": _outline_members(ensemble)}
    if isinstance(saved, TrainState):
        manifest["arrays"]["opt_state"] = _outline(saved.opt_state, drop_axis=True)
    stored = {part: [_to_stored(leaf) for leaf in jax.tree.leaves(tree)] for part, tree in parts.items()}
    tree = {
        "members": {
            _member(i): {
                part: {_leaf(j): np.asarray(array[i]) for j, array in enumerate(arrays) if array[i].size}
                for part, arrays in stored.items()
            }
            for i in range(len(ensemble))
        }
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}.{uuid.uuid4().hex}.unfinished"
    try:
        unfinished.mkdir()
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(unfinished / "arrays", args=ocp.args.PyTreeSave(tree))
        if columns is not None:
            np.savez(unfinished / "history.npz", allow_pickle=False, **columns)
        files = [file for file in unfinished.rglob("*") if file.is_file()]
        manifest["files"] = {file.relative_to(unfinished).as_posix(): file.stat().st_size for file in files}
        (unfinished / _MANIFEST).write_text(json.dumps(manifest))
        for file in [*files, unfinished / _MANIFEST, *(d for d in unfinished.rglob("*") if d.is_dir()), unfinished]:
            _sync(file)
        _replace(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _replace(new: Path, path: Path) -> None:
    """Put the directory `new` where `path` is. Between the two renames `path` is absent, but never half written."""
    old = new.with_suffix(".replaced")
    if path.exists():
        path.rename(old)
    new.rename(path)
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


def _outline_members(ensemble: Ensemble) -> list[dict[str, Any]]:
    return _outline(ensemble.trainable, drop_axis=True) + _outline(ensemble.rest, drop_axis=True)


def _outline(tree: Any, *, drop_axis: bool = False) -> list[dict[str, Any]]:
    """Path, shape and dtype of the arrays of one member, and how they are stored; plain values, for JSON."""

    def of_leaf(path: Any, leaf: Any) -> dict[str, Any]:
        shape = leaf.shape[1:] if drop_axis else leaf.shape
        outline = {"path": dotted(path), "shape": list(shape), "dtype": _dtype_name(leaf.dtype)}
        data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
        stored = data.shape[1:] if drop_axis else data.shape
        return {**outline, "stored": list(stored), "stored_dtype": str(data.dtype)}

    return [of_leaf(path, leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def _say(outline: dict[str, Any] | None) -> str:
    return "nothing" if outline is None else f"shape {tuple(outline['shape'])} and dtype {outline['dtype']}"


def _dtype_name(dtype: Any) -> str:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return f"key<{jax.random.key_impl(jnp.empty((), dtype))}>"
    return str(dtype)


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _to_stored(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _from_stored(array: np.ndarray | None, outline: dict[str, Any]) -> Any:
    if array is None:  # orbax takes no arrays without elements
        array = np.zeros(outline["stored"], outline["stored_dtype"])
    if list(array.shape) != outline["stored"] or str(array.dtype) != outline["stored_dtype"]:
        raise ValueError(f"`{outline['path']}` is stored as {describe(array)}, but its manifest says otherwise.")
    if outline["dtype"] == outline["stored_dtype"]:
        return jnp.asarray(array)
    return jax.random.wrap_key_data(jnp.asarray(array), impl=outline["dtype"].removeprefix("key<").removesuffix(">"))


def _restack(like: Any, members: list[list[Any]]) -> Any:
    """The tree `like`, with the members' arrays along axis 0."""
    return jax.tree.unflatten(jax.tree.structure(like), [jnp.stack(leaves) for leaves in zip(*members, strict=True)])


def _plain(hyperparams: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that are numbers, as JSON has them."""
    plain = {}
    for name, value in hyperparams.items():
        array = np.asarray(value) if not callable(value) else np.asarray(None)
        if array.dtype.kind in "fiub":
            plain[name] = array.astype(float).tolist()
    return plain


def _member(i: int) -> str:
    return f"{i:06d}"


def _leaf(j: int) -> str:
    return f"{j:04d}"
