"""`save`, `load` and `load_member`: an ensemble or a training state on disk."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..transforms._arguments import describe
from ..transforms._checkpoint import Checkpoint, outline, restack, write
from ..transforms._model import is_model, split
from ._ensemble import Ensemble
from ._state import TrainState


def save(path: str | os.PathLike[str], state_or_ensemble: TrainState | Ensemble) -> None:
    """Write an ensemble or a training state to a directory, atomically.

    Args:
      path: the directory to make. A checkpoint that is there already is replaced once the new one is whole: it is
        renamed to a hidden name beside it, then the new one takes its name. (Who is killed between the two finds the
        earlier one there.)
      state_or_ensemble: what to write.

    Raises:
      TypeError: neither an `Ensemble` nor a `TrainState`.
      FileExistsError: `path` exists and is not a checkpoint, or holds other files too.

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
    write_state("save", Path(path), state_or_ensemble)


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
    checkpoint = Checkpoint.open("load", path)
    if isinstance(like, Ensemble):
        return _read_ensemble(checkpoint, like)
    if isinstance(like, TrainState):
        return read_state(checkpoint, like)
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
    checkpoint = Checkpoint.open("load_member", path)
    if isinstance(like, TrainState):
        like = like.ensemble
    if isinstance(like, Ensemble):
        structure, stacked = like.structure, (like.trainable, like.rest)
        expected = _outline_members(like)
    elif is_model(like):
        parts = split(like)
        structure, stacked = parts.structure, (parts.trainable, parts.rest)
        expected = outline(parts.trainable) + outline(parts.rest)
    else:
        raise TypeError(
            f"load_member: like must be an Ensemble, a TrainState or a model, but got {type(like).__name__}."
        )
    size = checkpoint.manifest["size"]
    if isinstance(i, bool) or not hasattr(type(i), "__index__"):
        raise TypeError(f"load_member: i must be an int, but got {describe(i)}.")
    if not -size <= i < size:
        raise IndexError(f"load_member: member {i} is out of range; the checkpoint at {checkpoint.path} has {size}.")
    order = {"ensemble": checkpoint.order("ensemble", expected)}
    (leaves,) = checkpoint.read([operator.index(i) % size], order)
    return structure.merge(*jax.tree.unflatten(jax.tree.structure(stacked), leaves["ensemble"]))


def write_state(
    api: str,
    path: Path,
    saved: TrainState | Ensemble,
    about: Mapping[str, Any] | None = None,
    history: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write a checkpoint: `about` goes into its manifest, `history` beside its arrays."""
    ensemble = saved.ensemble if isinstance(saved, TrainState) else saved
    parts: dict[str, Any] = {"ensemble": (ensemble.trainable, ensemble.rest)}
    outlines = {"ensemble": _outline_members(ensemble)}
    about = dict(about or {})
    if isinstance(saved, TrainState):
        parts["opt_state"] = saved.opt_state
        outlines["opt_state"] = outline(saved.opt_state, drop_axis=True)
        about["step"] = int(saved.step)
    write(api, path, parts, len(ensemble), outlines=outlines, about=about, history=history)


def read_state(checkpoint: Checkpoint, like: TrainState) -> TrainState:
    """The training state, as `like`."""
    if "opt_state" not in checkpoint.manifest["arrays"]:
        raise ValueError(
            f"{checkpoint.api}: the checkpoint at {checkpoint.path} holds an ensemble, but no training state; load it "
            "with an Ensemble as like."
        )
    size = len(like.ensemble)
    order = {
        "ensemble": checkpoint.order("ensemble", _outline_members(like.ensemble), size),
        "opt_state": checkpoint.order("opt_state", outline(like.opt_state, drop_axis=True)),
    }
    members = checkpoint.read(range(size), order)
    arrays = (like.ensemble.trainable, like.ensemble.rest)
    trainable, rest = restack(arrays, [member["ensemble"] for member in members])
    opt_state = restack(like.opt_state, [member["opt_state"] for member in members])
    step = jnp.asarray(checkpoint.manifest["step"], like.step.dtype)
    return TrainState(Ensemble(like.ensemble.structure, trainable, rest), opt_state, step)


def _read_ensemble(checkpoint: Checkpoint, like: Ensemble) -> Ensemble:
    """The ensemble, as `like`."""
    order = {"ensemble": checkpoint.order("ensemble", _outline_members(like), len(like))}
    members = checkpoint.read(range(len(like)), order)
    arrays = (like.trainable, like.rest)
    return Ensemble(like.structure, *restack(arrays, [member["ensemble"] for member in members]))


def _outline_members(ensemble: Ensemble) -> list[dict[str, Any]]:
    return outline(ensemble.trainable, drop_axis=True) + outline(ensemble.rest, drop_axis=True)
