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

from ...transforms._core.arguments import describe
from ...transforms._models.split_model import is_model, split
from ...transforms._runs.checkpoint import Checkpoint, members_of, outline, rebuild, write
from ...transforms._runs.processes import Group
from .._members.ensemble import Ensemble
from .._step.state import TrainState


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
        return Group.of(like).agree(lambda: _read_ensemble(Checkpoint.open("load", path), like))
    if isinstance(like, TrainState):
        return Group.of(like._contents()).agree(lambda: read_run(Checkpoint.open("load", path), like, {})[0])
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
    checkpoint = Checkpoint.open("load_member", path)
    if isinstance(like, (Ensemble, TrainState)):
        # Not what is behind `like.ensemble`, which other processes may have to help to make.
        trainable, rest = like._rows()[:2] if isinstance(like, TrainState) else (like.trainable, like.rest)
        structure = like._structure_and_size()[0] if isinstance(like, TrainState) else like.structure
        stacked, expected = (trainable, rest), _outline_members(trainable, rest)
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
    leaves = checkpoint.member(operator.index(i) % size, "ensemble", checkpoint.order("ensemble", expected))
    return structure.merge(*jax.tree.unflatten(jax.tree.structure(stacked), leaves))


def write_state(
    api: str,
    path: Path,
    saved: TrainState | Ensemble,
    about: Mapping[str, Any] | None = None,
    history: Mapping[str, np.ndarray] | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint: `about` goes into its manifest, `history` beside its arrays, `more` among those."""
    about = dict(about or {})
    if isinstance(saved, Ensemble):
        trainable, rest, size = saved.trainable, saved.rest, len(saved)
    else:
        (trainable, rest, opt_state, standing), (_, size) = saved._rows(), saved._structure_and_size()
        about["step"] = int(saved.step)
    parts: dict[str, Any] = {"ensemble": (trainable, rest)}
    outlines = {"ensemble": _outline_members(trainable, rest)}
    if isinstance(saved, TrainState):
        for part, tree in (("opt_state", opt_state), ("standing", standing)):
            parts[part], outlines[part] = tree, outline(tree, drop_axis=True)
    for part, tree in (more or {}).items():
        parts[part], outlines[part] = tree, outline(tree, drop_axis=True)
    write(api, path, parts, size, outlines=outlines, about=about, history=history)


def read_run(checkpoint: Checkpoint, like: TrainState, more: Mapping[str, Any]) -> tuple[TrainState, dict[str, Any]]:
    """The training state, as `like`, and what the checkpoint has of `more`."""
    if "opt_state" not in checkpoint.manifest["arrays"]:
        raise ValueError(
            f"{checkpoint.api}: the checkpoint at {checkpoint.path} holds an ensemble, but no training state; load it "
            "with an Ensemble as like."
        )
    (trainable, rest, opt_state, standing), (structure, size) = like._rows(), like._structure_and_size()
    likes = {"ensemble": (trainable, rest), "opt_state": opt_state, "standing": standing}
    order = {"ensemble": checkpoint.order("ensemble", _outline_members(trainable, rest), size)}
    held = checkpoint.manifest["arrays"]
    likes |= {part: tree for part, tree in more.items() if part in held}
    for part, tree in likes.items():
        if part != "ensemble":
            order[part] = checkpoint.order(part, outline(tree, drop_axis=True))
    read = _read(checkpoint, likes, order)
    arrays = (*read["ensemble"], read["opt_state"], read["standing"])
    state = TrainState._of_padded(structure, arrays, size, _step(checkpoint.manifest["step"], like.step))
    return state, {part: read[part] for part in more if part in read}


def _read_ensemble(checkpoint: Checkpoint, like: Ensemble) -> Ensemble:
    """The ensemble, as `like`."""
    order = {"ensemble": checkpoint.order("ensemble", _outline_members(like.trainable, like.rest), len(like))}
    return Ensemble(like.structure, *_read(checkpoint, {"ensemble": (like.trainable, like.rest)}, order)["ensemble"])


def _read(checkpoint: Checkpoint, likes: Mapping[str, Any], order: Mapping[str, list[int]]) -> dict[str, Any]:
    """For each part what `likes` has for it, with the values of the checkpoint."""
    size = checkpoint.manifest["size"]
    rows = checkpoint.read(members_of(likes, size), order)

    def of_part(part: str, like: Any) -> Any:
        entries = checkpoint.manifest["arrays"][part]
        leaves = [
            rebuild(leaf, entries[j]["dtype"], {i: row[part][k] for i, row in rows.items()}, size)
            for k, (leaf, j) in enumerate(zip(jax.tree.leaves(like), order[part], strict=True))
        ]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    return {part: of_part(part, like) for part, like in likes.items()}


def _outline_members(trainable: Any, rest: Any) -> list[dict[str, Any]]:
    return outline(trainable, drop_axis=True) + outline(rest, drop_axis=True)


def _step(step: int, like: Any) -> jax.Array:
    """The number of a step, on the devices on which `like` is."""
    value = np.asarray(step, like.dtype)
    sharding = getattr(like, "sharding", None)
    if sharding is None or len(sharding.device_set) == 1:
        return jnp.asarray(value)
    return jax.make_array_from_callback((), sharding, lambda _: value)
