"""`save`, `load` and `load_member`: an ensemble or a training state on disk.

This file names the arrays of an ensemble and of a training state; `transforms._runs` writes and reads them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import jax
import jax.numpy as jnp
import numpy as np

from ...transforms._core.arguments import describe
from ...transforms._models.split_model import is_model, split
from ...transforms._runs.checkpoint import Checkpoint, read_checkpoint
from ...transforms._runs.checkpoint_writer import CheckpointWriter
from ...transforms._runs.manifest import About, StoredArray, outline
from ...transforms._runs.processes import Group
from .._members.ensemble import Ensemble
from .._members.rows import member_index
from .._members.shared import SharedArrays, with_shared
from .._step.state import LastStep, SharedState, TrainState

# The part with the best parameters of early stopping; then the part "ensemble" has those of the last step.
_BEST = "best"

Saved = TypeVar("Saved", bound=Ensemble[Any] | TrainState[Any])
Model = TypeVar("Model")


def save(path: str | os.PathLike[str], state_or_ensemble: TrainState | Ensemble) -> None:
    """Write an ensemble or a training state to a directory, atomically.

    Args:
      path: the directory to create. An earlier checkpoint there is replaced once the new one is complete: the earlier
        one is renamed to a hidden name in the parent directory, then the new one is renamed to `path`. (If the process
        is killed between the two, the earlier one remains under the hidden name.)
      state_or_ensemble: the `Ensemble` or `TrainState` to write.

    Raises:
      TypeError: `state_or_ensemble` is neither an `Ensemble` nor a `TrainState`.
      FileExistsError: `path` exists and is not a checkpoint, or contains other files too.

    Cost:
      A copy of 64 MiB of members at a time, and of all arrays of an accelerator in host memory. Ten thousand members of
      33 parameters, with Adam's state, take about a second to write and two to read.

    Examples:
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
    begin_writing("save", Path(path), state_or_ensemble).write()


def load(path: str | os.PathLike[str], like: Saved) -> Saved:
    """Read an ensemble or a training state that `save` wrote.

    Args:
      path: the directory.
      like: an `Ensemble` or a `TrainState` of the same architecture, size and optimizer. Only its shapes and dtypes are
        used, so a result of `jax.eval_shape` suffices. An `Ensemble` also reads the ensemble of a saved training state.

    Returns:
      An object of the type and structure of `like`, with the values of the checkpoint. If it is of a run with
      `early_stopping`, each member has its best parameters, and a `TrainState` those of the last step beside, as `fit`
      returns it.

    Raises:
      TypeError: `like` is neither an `Ensemble` nor a `TrainState`.
      FileNotFoundError: the directory does not exist.
      ValueError: the directory is not a checkpoint or is damaged; it holds only an ensemble, but `like` is a
        `TrainState`; its arrays differ from those of `like` (the message names the first difference).

    Examples:
      >>> import tempfile
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, load, save
      >>> make = lambda rngs: nnx.Linear(4, 3, rngs=rngs)
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     save(f"{directory}/trained", Ensemble.create(make, 2, seed=0))
      ...     load(f"{directory}/trained", Ensemble.create(make, 2, seed=1))
      Ensemble of 2 × Linear, 15 parameters each
    """
    if isinstance(like, Ensemble):
        read: Callable[[Checkpoint, Any], Any] = read_ensemble
    elif isinstance(like, TrainState):
        read = _read_state
    else:
        raise TypeError(f"load: like must be an Ensemble or a TrainState, but got {type(like).__name__}.")
    return cast(Saved, read_checkpoint("load", path, lambda checkpoint: read(checkpoint, like), Group.of(like)))


@overload
def load_member(path: str | os.PathLike[str], i: int, like: Ensemble[Model] | TrainState[Model]) -> Model: ...


@overload
def load_member(path: str | os.PathLike[str], i: int, like: Model) -> Model: ...


def load_member(path: str | os.PathLike[str], i: int, like: Any) -> Any:
    """Read one member of an ensemble that `save` wrote, and only its bytes.

    Args:
      path: the directory.
      i: the member's index; negative ones count from the end.
      like: an `Ensemble`, a `TrainState`, or a model of the same architecture. Only its shapes and dtypes are used.

    Returns:
      The member as a standalone model.

    Raises:
      TypeError: `like` is none of these; `i` is not an int.
      FileNotFoundError, ValueError: as for `load`.
      IndexError: `i` is out of range.

    Examples:
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
    return read_checkpoint("load_member", path, lambda checkpoint: _read_member(checkpoint, i, like))


def _read_member(checkpoint: Checkpoint, i: int, like: Any) -> Any:
    """Return a member as a standalone model."""
    if isinstance(like, (Ensemble, TrainState)):
        ensemble = like.ensemble if isinstance(like, TrainState) else like
        member = jax.eval_shape(lambda own: jax.tree.map(lambda x: x[0], own), (ensemble.trainable, ensemble.rest))
        structure, arrays = ensemble.structure, with_shared(member[0], member[1], ensemble.shared)
    elif is_model(like):
        parts = split(like)
        structure, arrays = parts.structure, (parts.trainable, parts.rest)
    else:
        raise TypeError(f"load_member: like must be an Ensemble, a TrainState or a model, but got {describe(like)}.")
    i = member_index(f"{checkpoint}", i, checkpoint.manifest.size)
    # `like` may have its arrays in another order than the saved model; `Checkpoint.member` returns them in this one.
    expected = outline(arrays[0]) + outline(arrays[1])
    stored_parts = checkpoint.manifest.parts
    shared = {array.key for array in stored_parts["shared"].arrays} if "shared" in stored_parts else set()
    own, others = ([x for x in expected if (x.key in shared) == of_all] for of_all in (False, True))
    if _BEST in stored_parts:
        named = zip(expected, outline(arrays), strict=True)
        part, stored = _BEST, [of_best for x, of_best in named if x.key not in shared]
    else:
        part, stored = "ensemble", own
    leaves = dict(zip([x.key for x in own], checkpoint.member(i, part, stored), strict=True))
    if shared:
        leaves |= dict(zip([x.key for x in others], checkpoint.member(0, "shared", others), strict=True))
    in_order = [leaves[x.key] for x in expected]
    return structure.merge(*jax.tree.unflatten(jax.tree.structure(arrays), in_order))


def begin_writing(
    api: str,
    path: Path,
    saved: TrainState | Ensemble,
    about: About | None = None,
    history: Mapping[str, np.ndarray] | None = None,
    more: Mapping[str, Any] | None = None,
    *,
    copies: bool = False,
) -> CheckpointWriter:
    """Begin a checkpoint, with `about` in its manifest, `history` in a file, and `more` as additional arrays."""
    about = about or About()
    if isinstance(saved, TrainState):
        about = replace(about, step=int(saved.step))
    size = saved._size if isinstance(saved, TrainState) else len(saved)
    parts = _parts(saved) | dict(more or {})
    if isinstance(saved, TrainState) and saved.last is not None:
        best = saved.ensemble.trainable, saved.ensemble.rest
        parts |= {_BEST: best, "watch": saved.last.watched}
        about = replace(about, best_by=saved.last.criterion)
    options: dict[str, Any] = {"about": about, "history": history, "copies": copies}
    return CheckpointWriter.begin(api, path, parts, size, outlines=_outlines(parts), **options)


def read_run(checkpoint: Checkpoint, like: TrainState, more: Mapping[str, Any]) -> tuple[TrainState, dict[str, Any]]:
    """Return the training state, structured as `like`, and those parts of `more` that the checkpoint has."""
    # A saved ensemble has no optimizer state, and a fresh one would silently change the run.
    held, step = checkpoint.manifest.parts, checkpoint.about.step
    if "opt_state" not in held or step is None:
        where = f"{checkpoint.api}: the checkpoint at {checkpoint.path}"
        raise ValueError(f"{where} holds an ensemble, but no training state; load it with an Ensemble as like.")
    read = _read(checkpoint, _parts(like) | {part: tree for part, tree in more.items() if part in held}, like._size)
    arrays = (*read["ensemble"], read["opt_state"], read["standing"])
    shared = None
    if like._shared is not None:
        shared = SharedState(_shared_arrays(like._shared.arrays, read), _of_row(read.get("shared_opt_state")))
    state = TrainState._of_arrays(like._structure, arrays, _step(step, like.step), shared)
    return state, {part: read[part] for part in more if part in read}


def _read_state(checkpoint: Checkpoint, like: TrainState) -> TrainState:
    """Return the training state with the best parameters, if the checkpoint has them, and the last ones beside."""
    own = like._arrays()[:2]
    state, more = read_run(checkpoint, like, {_BEST: own, "watch": LastStep.like(*own, like._size).watched})
    if _BEST not in more:
        return state
    watch, criterion = jax.tree.map(np.asarray, more["watch"]), checkpoint.about.best_by
    return state._with_best(more[_BEST], LastStep(*state._arrays()[:2], **watch, criterion=criterion))


def read_ensemble(checkpoint: Checkpoint, like: Ensemble) -> Ensemble:
    """Return the ensemble, structured as `like`; with the best parameters, if the checkpoint has them."""
    parts = _parts(like)
    if _BEST in checkpoint.manifest.parts:
        parts[_BEST] = parts.pop("ensemble")
    read = _read(checkpoint, parts, len(like))
    trainable, rest = read[_BEST if _BEST in read else "ensemble"]
    return Ensemble(like.structure, trainable, rest, None if like.shared is None else _shared_arrays(like.shared, read))


def _read(checkpoint: Checkpoint, likes: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return each part of `likes` with the values of the checkpoint; raise if the arrays differ."""
    return checkpoint.load(likes, _outlines(likes), size)


def _parts(saved: TrainState | Ensemble) -> dict[str, Any]:
    """Return the stacked arrays, by the names of their parts in a checkpoint."""
    ensemble = saved if isinstance(saved, Ensemble) else saved.ensemble
    own = (ensemble.trainable, ensemble.rest)
    parts: dict[str, Any] = {"ensemble": own if isinstance(saved, Ensemble) else saved._arrays()[:2]}
    if ensemble.shared is not None:
        parts["shared"] = one_row((ensemble.shared.trainable, ensemble.shared.rest))
    if isinstance(saved, TrainState):
        parts |= {"opt_state": saved.opt_state, "standing": saved.standing}
        if saved.shared_opt_state is not None:
            parts["shared_opt_state"] = one_row(saved.shared_opt_state)
    return parts


def one_row(shared: Any) -> Any:
    """Return arrays that all members share with an axis 0 of length 1."""

    def of_leaf(x: Any) -> Any:
        return jax.ShapeDtypeStruct((1, *x.shape), x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x[None]

    return jax.tree.map(of_leaf, shared)


def _of_row(rows: Any) -> Any:
    """Return arrays that all members share, without the axis of `one_row`."""
    return jax.tree.map(lambda x: x[0], rows)


def _shared_arrays(like: SharedArrays, read: Mapping[str, Any]) -> SharedArrays:
    trainable, rest = _of_row(read["shared"])
    return SharedArrays(trainable, rest, like.paths)


def _outlines(parts: Mapping[str, Any]) -> dict[str, list[StoredArray]]:
    """Return for each part the `outline` of the arrays of one member."""
    models = ("ensemble", "shared")
    outlines = {part: outline(tree, drop_axis=True) for part, tree in parts.items() if part not in models}
    return {part: _outline_members(*parts[part]) for part in models if part in parts} | outlines


def _outline_members(trainable: Any, rest: Any) -> list[StoredArray]:
    # Separately: a path starts at the model and does not show which of the two trees it belongs to.
    return outline(trainable, drop_axis=True) + outline(rest, drop_axis=True)


def _step(step: int, like: Any) -> jax.Array:
    """Return the step number as an array on the devices of `like`."""
    # With the sharding of `like`: otherwise the first step after a resumption would be compiled as another program.
    value = np.asarray(step, like.dtype)
    sharding = getattr(like, "sharding", None)
    if sharding is None or len(sharding.device_set) == 1:
        return jnp.asarray(value)
    return jax.make_array_from_callback((), sharding, lambda _: value)
