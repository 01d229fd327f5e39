"""`Source`: the batches of a run, one by one or several as one, so that one program can take a step for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Stacked:
    """Several batches of one structure, shapes and dtypes: each array has them along a new axis 0."""

    arrays: Any
    steps: int


class Source(Iterator[Any]):
    """An iterator over batches.

    Args:
      batches: the batches. Their method `_stacked(count)`, if there is one, returns the arrays of the next `count`
        batches, or None if there are fewer.
      convert: converts and checks a batch.
    """

    def __init__(self, batches: Iterator[Any], convert: Callable[[Any], Any]) -> None:
        self._batches, self._convert = batches, convert
        self._waiting: deque[Any] = deque()

    def __next__(self) -> Any:
        return self._waiting.popleft() if self._waiting else self._convert(next(self._batches))

    def stacked(self, count: int) -> Stacked | None:
        """Return the next batches as one; None if there are fewer, or if they differ in structure or shapes."""
        if hasattr(self._batches, "_stacked"):
            arrays = self._batches._stacked(count)
            return None if arrays is None else Stacked(arrays, count)
        for batch in islice(self._batches, count - len(self._waiting)):
            # Batches that wait for others are copied, since a data loader may reuse their memory.
            self._waiting.append(copied(self._convert(batch)))
        kinds = [
            (treedef, [(getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in leaves])
            for leaves, treedef in map(jax.tree.flatten, self._waiting)
        ]
        if len(kinds) < count or any(kind != kinds[0] for kind in kinds[1:]):
            return None
        batches = list(self._waiting)
        self._waiting.clear()
        # In one program, or by NumPy, so that there is one transfer instead of one for each array.
        on_host = all(isinstance(x, np.ndarray) for x in jax.tree.leaves(batches))
        return Stacked(jax.tree.map(lambda *x: np.stack(x), *batches) if on_host else _stack(batches), count)


def first_batch(batch: Any) -> Any:
    """Return the first of several batches that are stacked; any other batch itself."""
    return first_of(batch.arrays) if isinstance(batch, Stacked) else batch


def first_of(arrays: Any) -> Any:
    """Return the first entry of each array along axis 0."""
    return jax.tree.map(lambda x: x[0], arrays)


_stack = jax.jit(lambda batches: jax.tree.map(lambda *x: jnp.stack(x), *batches))


def copied(batch: Any) -> Any:
    """Return a batch with copies of its NumPy arrays: a data loader may reuse their memory before they are read."""
    if not any(isinstance(x, np.ndarray) for x in jax.tree.leaves(batch)):
        return batch
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, batch)
