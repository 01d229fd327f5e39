"""`Told`: the static part of an ensemble that was told what the outputs of its members mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from ...transforms._core.prediction import Kind
from ...transforms._models.split_model import M, Structure


@dataclass(frozen=True, repr=False)
class Told(Generic[M]):
    """The structure of a member, and the meaning of its outputs.

    It takes the place of the member's structure, so that the meaning stays with the ensemble wherever its arrays are
    replaced: in training, in checkpoints that are read, in views and selections.
    """

    member: Structure[M]
    kind: Kind

    def merge(self, trainable: Any, rest: Any) -> M:
        """Return the member with these arrays."""
        return self.member.merge(trainable, rest)

    def gradient(self, trainable: Any, rest: Any) -> Any:
        """Return a gradient as for the member."""
        return self.member.gradient(trainable, rest)

    def __repr__(self) -> str:
        return repr(self.member)


def untold(structure: Structure[M]) -> Structure[M]:
    """Return the structure of a member as `split` returns it."""
    return structure.member if isinstance(structure, Told) else structure
