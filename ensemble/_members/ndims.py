"""`Ndims`: the number of axes of each array of an ensemble, which shows whether axis 0 still indexes the members."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Ndims:
    """The number of axes of each array of an ensemble, with -1 for each leaf that is not an array.

    An ensemble that holds ints or shardings instead of arrays is a prefix for `in_axes` or `in_shardings`. JAX compares
    the static parts of a prefix and of an ensemble with `==`, so such a prefix must be equal to every ensemble.
    """

    of: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ndims):
            return NotImplemented
        return self.of == other.of or not all(ndims and -1 not in ndims for ndims in (self.of, other.of))

    def __hash__(self) -> int:
        return 0  # equal objects need equal hashes, and a prefix is equal to every ensemble
