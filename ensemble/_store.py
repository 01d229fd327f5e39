"""The checkpoints of a run: which is the newest whole one, and which are no longer kept."""

from __future__ import annotations

import re
import shutil
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ._checkpoint import Checkpoint, Damaged, write
from ._state import TrainState
from ._strategy import Execution


@dataclass(frozen=True)
class Settings:
    """What a run computes with, as far as it is known; plain values, for JSON.

    Attributes:
      optimizer: the name of the optax factory, or None for a ready transformation.
      hyperparams: the hyperparameters that are numbers.
      strategy: how the members are executed; "auto" before the first step.
      chunk_size: how many members at a time.
    """

    optimizer: str | None
    hyperparams: Mapping[str, Any]
    strategy: str
    chunk_size: int | None


@dataclass(frozen=True)
class Resumed:
    """What a run goes on from."""

    state: TrainState
    history: dict[str, np.ndarray]
    execution: Execution


@dataclass(frozen=True)
class Store:
    """The checkpoints of one run, `step_00000100` and so on, in a directory. What else is there stays as it is."""

    directory: Path
    keep: int

    @classmethod
    def open(cls, directory: Any, keep: int) -> Store:
        """Make the directory where it is missing."""
        directory = Path(directory).resolve()
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise type(error)(
                f"Trainer.fit: checkpoint_dir={str(directory)!r} cannot be made: {error}; give another directory."
            ) from error
        return cls(directory, keep)

    def resume(self, like: TrainState, settings: Settings) -> Resumed | None:
        """The newest whole checkpoint, or None; refuses one of another run."""
        for path in reversed(self._paths()):
            try:
                checkpoint = Checkpoint.open("Trainer.fit", path)
                about = checkpoint.manifest
                if "history" not in about:
                    raise checkpoint.damaged("it has no history, so no run wrote it")
                _check_settings(path, about, settings)
                state, history = checkpoint.train_state(like), checkpoint.history()
            except Damaged as error:
                warnings.warn(f"{error} It is skipped, and renamed when another takes its place.", stacklevel=4)
                continue
            return Resumed(state, history, Execution(about["strategy"], about["chunk_size"]))
        return None

    def write(self, state: TrainState, history: Mapping[str, np.ndarray], settings: Settings) -> None:
        """Write a checkpoint, and remove those that are no longer to be kept."""
        path = self.directory / f"step_{int(state.step):08d}"
        if path.exists() and not _is_whole(path):
            path.rename(path.with_name(f"{path.name}.{uuid.uuid4().hex}.damaged"))
        write("Trainer.fit", path, state, vars(settings), history)
        for old in [path for path in self._paths() if _is_whole(path)][: -self.keep]:
            shutil.rmtree(old)

    def _paths(self) -> list[Path]:
        """What is named as a checkpoint, by step."""
        paths = [path for path in self.directory.iterdir() if re.fullmatch(r"step_\d{8,}", path.name)]
        return sorted(paths, key=lambda path: int(path.name[5:]))


def _is_whole(path: Path) -> bool:
    try:
        Checkpoint.open("Trainer.fit", path)
    except ValueError:
        return False
    return True


def _check_settings(path: Path, written: Mapping[str, Any], settings: Settings) -> None:
    """Refuse a checkpoint of another optimiser or other hyperparameters."""
    values = [{"optimizer": x["optimizer"], **x["hyperparams"]} for x in (written, vars(settings))]
    before, now = values
    for name in [*before, *now]:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"Trainer.fit: the checkpoint {path} was written with {name}={before.get(name)}, but the trainer has "
                f"{name}={now.get(name)}; use another checkpoint_dir, or the same optimiser and hyperparameters."
            )
