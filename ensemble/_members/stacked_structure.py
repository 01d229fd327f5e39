"""`StackedStructure`: the static part of an ensemble that is differentiated as one model with stacked parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...transforms._models.split_model import Structure
from .shared import SharedArrays


@dataclass(frozen=True)
class StackedStructure:
    """The static part of an ensemble.

    Attributes:
      kind: `Ensemble`.
      member: the structure of a member.
      paths: the paths of the variables that all members share; None if they share nothing.
    """

    kind: type[Any]
    member: Structure
    paths: frozenset[Any] | None

    @classmethod
    def split(cls, ens: Any) -> tuple[StackedStructure, Any, Any]:
        """Return the structure of an ensemble, and its trainable and other arrays, each with those that are shared."""
        if ens.shared is None:
            return cls(type(ens), ens.structure, None), ens.trainable, ens.rest
        structure = cls(type(ens), ens.structure, ens.shared.paths)
        pairs = (ens.trainable, ens.shared.trainable), (ens.rest, ens.shared.rest)
        trainable, rest = ({"own": own, "shared": shared} for own, shared in pairs)
        return structure, trainable, rest

    def merge(self, trainable: Any, rest: Any) -> Any:
        """Return the ensemble with these arrays."""
        if self.paths is None:
            return self.kind(self.member, trainable, rest)
        shared = SharedArrays(trainable["shared"], rest["shared"], self.paths)
        return self.kind(self.member, trainable["own"], rest["own"], shared)

    def gradient(self, trainable: Any, _: Any) -> Any:
        """Return the gradients of the trainable arrays."""
        return trainable
