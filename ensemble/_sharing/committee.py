"""`Committee`: ensembles and models of different architectures, whose predictions are combined."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ...transforms._core.arguments import describe
from ...transforms._core.prediction import Kind, Prediction
from ...transforms._files.atomic_write import replace_directory
from ...transforms._files.document import read_document, write_document
from ...transforms._files.errors import Damaged, OtherVersion
from ...transforms._files.replaced import identity
from ...transforms._files.schema import decode
from ...transforms._models.split_model import is_model
from ...transforms._runs.checkpoint import Checkpoint
from ...transforms._runs.checkpoint_writer import others_in
from ...transforms._runs.processes import Group, read_again_if_replaced
from .._members.ensemble import Ensemble
from .._members.prediction import check_temperature, classify, kind_for, regress
from .._members.rows import member_index
from .._step.state import TrainState
from .._training.checkpoint import read_ensemble, save

_MANIFEST = "committee.json"
_FORMAT, _VERSION = "plurax committee", 1


@dataclass(frozen=True)
class _Manifest:
    """What a directory holds.

    Attributes:
      groups: for each group the checksum of its manifest, so that none can be exchanged for that of another save.
      weights: the weight of each member; None for equal ones.
      save: a random number, so that two saves of one committee differ.
    """

    groups: list[str]
    weights: list[float] | None
    save: str


class Committee:
    """Members of different architectures, sources and sizes behind one `predict`.

    Args:
      groups: ensembles, and single models: NNX modules, or members of an ensemble. For Linen, Equinox and functions,
        pass `Ensemble.from_apply(apply, [variables])`. The members of a group run as one program.
      weights: a weight for each member, in the order of the groups: not negative, and not all zero; they are divided by
        their sum. None weights all members equally.

    Attributes:
      groups: the ensembles; a single model is an ensemble of one.
      weights: the weights, whose sum is 1, float32 (members,); None for equal ones.

    Raises:
      TypeError: `groups` is not a list of ensembles and models; the weights are not real numbers.
      ValueError: there are no groups, or they were told different kinds of outputs; the weights have another shape, are
        negative, not finite or all zero.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from plurax.ensemble import Committee, Ensemble
      >>> small = Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 5, seed=0)
      >>> other = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(1)), nnx.relu, nnx.Linear(8, 3, rngs=nnx.Rngs(2)))
      >>> committee = Committee([small, other])
      >>> committee
      Committee of 6 members: 5 × Linear, 1 × Sequential
      >>> committee.predict(jnp.ones((2, 4)), kind="classification").mean.shape
      (2, 3)
    """

    def __init__(self, groups: Sequence[Any], weights: ArrayLike | Sequence[float] | None = None) -> None:
        if not isinstance(groups, (list, tuple)):
            raise TypeError(f"Committee: groups must be a list of ensembles and models, but got {describe(groups)}.")
        if not groups:
            raise ValueError("Committee: the list of groups is empty; pass at least one ensemble or model.")
        for i, group in enumerate(groups):
            if not isinstance(group, Ensemble) and not is_model(group):
                found = f"group {i} is {type(group).__name__}, neither an Ensemble nor a model"
                remedy = "for functions use Ensemble.from_apply(apply, [variables])"
                if isinstance(group, (list, tuple)):
                    remedy = "put its models into the list of groups, or use Ensemble.stack if they are alike"
                elif isinstance(group, TrainState):
                    remedy = "pass state.ensemble"
                raise TypeError(f"Committee: {found}; {remedy}.")
        self.groups = [group if isinstance(group, Ensemble) else Ensemble.stack([group]) for group in groups]
        told: dict[Kind, int] = {group.kind: i for i, group in enumerate(self.groups) if group.kind is not None}
        if len(told) > 1:
            (one, i), (other, j), *_ = told.items()
            found = f"group {i} was told kind={one!r}, but group {j} kind={other!r}"
            raise ValueError(f"Committee: {found}; tell both the same, by with_kind.")
        self.weights = None if weights is None else _checked(weights, len(self))

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def __iter__(self) -> Iterator[Any]:
        return (member for group in self.groups for member in group)

    def __getitem__(self, index: int) -> Any:
        """Return a member as a standalone model, counted over all groups."""
        i = member_index("Committee", index, len(self))
        for group in self.groups:
            if i < len(group):
                return group[i]
            i -= len(group)
        raise AssertionError

    def __call__(self, x: Any) -> Any:
        """Evaluate every member in its present mode.

        Args:
          x: the input of each member.

        Returns:
          The outputs of all members, stacked along a new axis 0.

        Raises:
          TypeError, ValueError: as for a call of an ensemble; the groups return outputs of different structures or
            shapes.
        """
        return together([group(x) for group in self.groups])

    def predict(self, x: Any, *, kind: Kind | None = None, temperature: ArrayLike | None = None) -> Prediction:
        """Predict with all members in evaluation mode; return the weighted mean and measures of uncertainty.

        Args:
          x: inputs, shape (batch, ...).
          kind: as for `Ensemble.predict`; None takes what any of the groups was told.
          temperature: as for `Ensemble.predict`, one for each of all members.

        Returns:
          A `Prediction`: means, variances and entropies are weighted, and `members` has all members along axis 0.

        Raises:
          TypeError, ValueError: as for `Ensemble.predict`, and as for a call.
        """
        kind = kind_for("Committee.predict", self, kind)
        check_temperature(temperature, kind, len(self))
        outputs = together([group._evaluating()(x) for group in self.groups])
        return predicted_from(outputs, kind, temperature, self.weights)

    def with_kind(self, kind: Kind) -> Committee:
        """Return the committee, told once what the outputs of all members mean, as `Ensemble.with_kind`."""
        return Committee([group.with_kind(kind) for group in self.groups], self.weights)

    @property
    def kind(self) -> Kind | None:
        """What the outputs mean, as one of the groups or the committee was told; None if none was."""
        return next((group.kind for group in self.groups if group.kind is not None), None)

    def weighted(self, weights: ArrayLike | Sequence[float] | None) -> Committee:
        """Return a committee of the same members with other weights, such as how often `greedy_selection` chose each.

        Examples:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> from plurax.ensemble import Committee
          >>> committee = Committee([nnx.Linear(4, 3, rngs=nnx.Rngs(i)) for i in range(3)])
          >>> committee.weighted([2, 1, 1]).weights
          Array([0.5 , 0.25, 0.25], dtype=float32)
        """
        return Committee(self.groups, weights)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all members to a directory, atomically.

        Args:
          path: the directory to create. An earlier committee there is replaced once the new one is complete.

        Raises:
          FileExistsError: `path` exists and is no whole committee, or contains other files too.
          OSError: the files cannot be written.
        """
        path = Path(os.path.realpath(path))
        _check_replaceable(path)
        unfinished = path.parent / f".{path.name}.{uuid.uuid4().hex}.unfinished"
        try:
            unfinished.mkdir(parents=True)
            checksums = []
            for i, group in enumerate(self.groups):
                save(unfinished / _group(i), group)
                checksums.append(Checkpoint.open("Committee.save", unfinished / _group(i)).checksum)
            weights = None if self.weights is None else np.asarray(self.weights).tolist()
            write_document(
                unfinished / _MANIFEST, _FORMAT, _VERSION, asdict(_Manifest(checksums, weights, uuid.uuid4().hex))
            )
            _check_replaceable(path)  # again: somebody may have put files there meanwhile
            replace_directory(unfinished, path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    @staticmethod
    def load(path: str | os.PathLike[str], like: Committee) -> Committee:
        """Read a committee that `save` wrote.

        Args:
          path: the directory.
          like: a committee of the same architectures and sizes, whose values are replaced.

        Raises:
          FileNotFoundError: there is no such directory.
          ValueError: it holds no committee, is damaged or of another version, or has other groups than `like`.
        """
        path = Path(os.path.realpath(path))

        def attempt() -> tuple[Committee, str]:
            about, checksum = _read(path)
            if len(about.groups) != len(like.groups):
                has = f"{len(about.groups)} groups, but `like` has {len(like.groups)}"
                raise ValueError(f"Committee.load: the committee at {path} has {has}.")
            groups = []
            for i, (group, expected) in enumerate(zip(like.groups, about.groups, strict=True)):
                groups.append(read_ensemble(_open_group(path, i, expected), group))
            try:
                return Committee(groups, about.weights), checksum
            except (TypeError, ValueError) as error:
                raise Damaged(f"Committee.load: the committee at {path} is damaged: {error}") from error

        return read_again_if_replaced(lambda: identity(path, _MANIFEST), attempt, Group.of(like.groups))

    def __repr__(self) -> str:
        groups = ", ".join(f"{len(group)} × {group.structure!r}" for group in self.groups)
        return f"Committee of {len(self)} members: {groups}{'' if self.weights is None else ', weighted'}"


def predicted_from(outputs: Any, kind: Kind, temperature: Any, weights: jax.Array | None) -> Prediction:
    """Return the prediction for the outputs of all members, stacked along axis 0."""
    if kind == "regression":
        return regress(outputs, weights)
    return classify(outputs, kind, temperature, weights)


def together(outputs: list[Any]) -> Any:
    """Return the outputs of all groups, stacked along axis 0; raise if they differ in structure or shape."""
    shapes = [jax.tree.map(lambda x: jnp.shape(x)[1:], out) for out in outputs]
    for i, found in enumerate(shapes):
        if found != shapes[0]:
            raise ValueError(
                f"Committee: a member of group {i} returns {found} (shapes), but one of group 0 {shapes[0]}; let all "
                "return outputs of one shape."
            )
    return jax.tree.map(lambda *x: jnp.concatenate(x), *outputs)


def _checked(weights: Any, size: int) -> jax.Array:
    """Return weights divided by their sum; raise if they are not one for each member."""
    found = np.asarray(weights)
    if found.dtype.kind not in "fiub" and not jnp.issubdtype(found.dtype, jnp.floating):
        raise TypeError(f"Committee: weights must be real numbers, but got {describe(weights)}.")
    found = found.astype(np.float64)
    if found.shape != (size,):
        raise ValueError(f"Committee: weights must have shape ({size},), one for each member, but got {found.shape}.")
    if not (np.isfinite(found).all() and (found >= 0).all() and found.sum() > 0):
        raise ValueError(f"Committee: weights must be finite and not negative, and one above 0, but got {found}.")
    return jnp.asarray(found / found.sum(), jnp.float32)


def _read(path: Path) -> tuple[_Manifest, str]:
    """Return the manifest of the committee at a path, and its checksum."""
    what = f"Committee.load: the committee at {path}"
    try:
        found = read_document(what, path / _MANIFEST, _FORMAT, _VERSION, within=path, of_json=True)
        return decode(_Manifest, found.entries, "manifest"), found.checksum
    except FileNotFoundError as error:
        if os.path.lexists(path):
            raise Damaged(f"Committee.load: {path} holds no committee, or is damaged: no {_MANIFEST}.") from error
        raise FileNotFoundError(f"Committee.load: there is no committee at {path}.") from error
    except (Damaged, OtherVersion):
        raise
    except ValueError as error:
        raise Damaged(f"{what} is damaged: {_MANIFEST}: {error}.") from error


def _open_group(path: Path, i: int, checksum: str) -> Checkpoint:
    """Return the checkpoint of a group; raise if it is missing, or not the one that was saved with the others."""
    if (path / _group(i)).is_symlink():
        raise Damaged(f"Committee.load: the committee at {path} is damaged: {_group(i)} is a link.")
    try:
        checkpoint = Checkpoint.open("Committee.load", path / _group(i))
    except FileNotFoundError as error:
        raise Damaged(f"Committee.load: the committee at {path} is damaged: {_group(i)} is missing.") from error
    if checkpoint.checksum != checksum:
        raise Damaged(f"Committee.load: the committee at {path} is damaged: {_group(i)} is of another save.")
    return checkpoint


def _check_replaceable(path: Path) -> None:
    """Raise if a path holds something other than a committee."""
    if not os.path.lexists(path):
        return

    def attempt() -> tuple[list[str], str]:
        groups = [_group(i) for i in range(len(_read(path)[0].groups))]
        others = sorted({file.name for file in path.iterdir()} - {_MANIFEST, *groups})
        others += [f"{name}/{other}" for name in groups for other in others_in("Committee.save", path / name)]
        return others, ""

    try:
        others = read_again_if_replaced(lambda: identity(path, _MANIFEST), attempt)
    except FileNotFoundError:
        return
    except (Damaged, OtherVersion) as error:
        what = f"{path} exists and is no whole committee of this version"
        raise FileExistsError(f"Committee.save: {what}; pass another path, or move it.") from error
    if others:
        raise FileExistsError(f"Committee.save: {path} also holds {others[0]!r}, which would be lost; move it.")


def _group(i: int) -> str:
    return f"group_{i:03d}"
