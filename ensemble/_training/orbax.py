"""`to_orbax` and `from_orbax`: an ensemble or a training state as a checkpoint of Orbax, which other libraries read."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ...transforms._core.prng import is_key
from ...transforms._files.errors import Damaged
from ...transforms._files.reading import open_file, size_of
from .._members.ensemble import Ensemble
from .._step.state import TrainState

Saved = TypeVar("Saved", bound=Ensemble[Any] | TrainState[Any])
Name = tuple[str, ...]

# Bytes of a file besides those with arrays; that of a thousand arrays has some hundred kilobytes. TensorStore ends the
# process if it has no memory for one.
_METADATA = 1 << 26
_OF_THE_SYSTEM = ("Too many open files", "RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "Cannot allocate memory")
_METADATA_NAMES = re.compile(r"_.*|.*\.ocdbt|\.z(array|group|attrs|metadata)|.*\.json|process_.*")


def to_orbax(path: str | os.PathLike[str], state_or_ensemble: TrainState | Ensemble) -> None:
    """Write an ensemble or a training state as a checkpoint of Orbax.

    It is a nested dict of arrays, which `orbax.checkpoint.StandardCheckpointer().restore(path)` reads without this
    library: `found["ensemble"]["trainable"]["hidden"]["kernel"][3]` is the kernel of member 3. The names are those of
    the attributes: "rest" has the arrays of a model that do not train, "opt_state" the state of the optimizer.

    Args:
      path: the directory to create.
      state_or_ensemble: the `Ensemble` or `TrainState` to write. If it spreads over several processes, all call this.

    Raises:
      TypeError: `state_or_ensemble` is neither an `Ensemble` nor a `TrainState`.
      ValueError: `path` exists; two arrays have names that Orbax does not tell apart.

    Cost:
      Orbax writes all members into one array, and reads back whole arrays. It does not notice bytes that change on the
      disk. `save` does both.

    Examples:
      >>> import tempfile, orbax.checkpoint
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, from_orbax, to_orbax
      >>> ens = Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 2, seed=0)
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     to_orbax(f"{directory}/trained", ens)
      ...     same = from_orbax(f"{directory}/trained", ens)
      >>> bool((same[1].kernel[...] == ens[1].kernel[...]).all())
      True
    """
    if not isinstance(state_or_ensemble, (TrainState, Ensemble)):
        raise TypeError(f"to_orbax: needs an Ensemble or a TrainState, but got {type(state_or_ensemble).__name__}.")
    from orbax.checkpoint import StandardCheckpointer

    path = Path(os.path.realpath(path))
    if path.exists():
        raise ValueError(f"to_orbax: {path} exists; pass another path, or remove it.")
    with StandardCheckpointer() as checkpointer:
        checkpointer.save(path, _nested(_named("to_orbax", state_or_ensemble)))


def from_orbax(path: str | os.PathLike[str], like: Saved) -> Saved:
    """Read an ensemble or a training state that `to_orbax` wrote, or another program in the same form.

    Args:
      path: the directory.
      like: an `Ensemble` or a `TrainState` of the same architecture, size and optimizer. Only its shapes, dtypes and
        devices are used.

    Returns:
      An object of the type and structure of `like`, with the values of the checkpoint.

    Raises:
      TypeError: `like` is neither an `Ensemble` nor a `TrainState`.
      FileNotFoundError: the directory does not exist.
      ValueError: its arrays differ from those of `like`; the message names the first difference.

    Examples:
      >>> import tempfile
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, from_orbax, to_orbax
      >>> ens = Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 2, seed=0)
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     to_orbax(f"{directory}/trained", ens)
      ...     from_orbax(f"{directory}/trained", ens)
      Ensemble of 2 × Linear, 15 parameters each
    """
    if not isinstance(like, (TrainState, Ensemble)):
        raise TypeError(f"from_orbax: like must be an Ensemble or a TrainState, but got {type(like).__name__}.")
    from orbax.checkpoint import PyTreeCheckpointer, args, checkpoint_utils

    expected: Any = like
    path = Path(os.path.realpath(path))
    if not path.exists():
        raise FileNotFoundError(f"from_orbax: there is no checkpoint at {path}.")
    _check_files(path)
    with PyTreeCheckpointer() as checkpointer:
        with _reading(path):
            held = _flat(checkpointer.metadata(path).item_metadata.tree)
        if isinstance(like, Ensemble):
            held = {name: x for name, x in held.items() if name[0] == "ensemble"}
        else:  # of a run with early stopping, or not
            has_best = any(name[0] == "last" for name in held)
            expected = like._like_with_best() if has_best else like._going_on()
        arrays = _named("from_orbax", expected)
        wanted = {name: x for name, x in arrays.items() if x.size}
        _check(f"from_orbax: the checkpoint at {path}", held, wanted)
        item = _nested(wanted)
        how = checkpoint_utils.construct_restore_args(item)
        with _reading(path):
            found = _flat(checkpointer.restore(path, args.PyTreeRestore(item, restore_args=how, partial_restore=True)))
    empty = {name: jnp.zeros(x.shape, x.dtype) for name, x in arrays.items() if not x.size}
    return jax.tree.unflatten(jax.tree.structure(expected), [(found | empty)[name] for name in arrays])


def _check_files(path: Path) -> None:
    """Raise if a checkpoint has links, pipes or devices, which Orbax would follow, or metadata that fill the memory."""
    for folder, folders, files in os.walk(path):
        if links := [name for name in folders if Path(folder, name).is_symlink()]:
            raise Damaged(f"from_orbax: {path} is damaged: {Path(folder, links[0])} is a link; remove it.")
        for name in files:
            with open_file(f"from_orbax: {path}", Path(folder, name), path) as file:
                if _METADATA_NAMES.fullmatch(name) and size_of(file) > _METADATA:
                    raise Damaged(f"from_orbax: {path} is damaged: {name} has {size_of(file)} bytes.")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn the many types of errors that Orbax raises for what it cannot read into one."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # Orbax, TensorStore and JSON raise many types
        if any(word in f"{error}" for word in _OF_THE_SYSTEM):  # which TensorStore raises as a ValueError
            raise
        # TensorStore wraps what the operating system raises; of a file that is not there, the checkpoint is damaged.
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            raise
        fact = f"{type(error).__name__}: {error}"
        raise Damaged(f"from_orbax: {path} is no checkpoint of Orbax, or is damaged ({fact}).") from error


def _named(api: str, saved: TrainState | Ensemble) -> dict[Name, Any]:
    """Return the arrays by the names that they have in the dict, in the order of the leaves."""
    leaves = jax.tree.leaves_with_path({"ensemble": saved} if isinstance(saved, Ensemble) else saved)
    named = {tuple(jax.tree_util.keystr((key,), simple=True) for key in path): x for path, x in leaves}
    joined = {".".join(name): name for name in named}
    for name in named:
        if joined[".".join(name)] != name:
            both = " and ".join(map(str, (name, joined[".".join(name)])))
            raise ValueError(f"{api}: Orbax joins names by dots, so it would write {both} to one place; rename one.")
    return named


def _nested(named: dict[Name, Any]) -> dict[str, Any]:
    """Return the arrays in nested dicts. Orbax writes no arrays without elements, so they are left out."""
    nested: dict[str, Any] = {}
    for (*outer, last), x in named.items():
        place = nested
        for key in outer:
            place = place.setdefault(key, {})
        if x.size:
            place[last] = x
    return nested


def _flat(nested: Any) -> dict[Name, Any]:
    """Return the leaves of nested dicts by their names."""
    return {tuple(key.key for key in path): x for path, x in jax.tree.leaves_with_path(nested)}


def _check(where: str, held: dict[Name, Any], wanted: dict[Name, Any]) -> None:
    """Raise if the arrays of a checkpoint are not those that are wanted: Orbax would cast them, or leave some out."""

    def said(x: Any) -> str:
        if x is None:
            return "nothing"
        data = jax.eval_shape(jax.random.key_data, x) if is_key(x) else x
        return f"shape {tuple(data.shape)} and dtype {data.dtype}"

    for name in [*wanted, *held]:
        if said(held.get(name)) != said(wanted.get(name)):
            at = ".".join(name)
            raise ValueError(f"{where} has {said(held.get(name))} at `{at}`, but `like` has {said(wanted.get(name))}.")
