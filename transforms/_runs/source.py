"""`Source`: the batches of a run, one by one or several as one, so that one program can take a step for each.

When a run resumes, batches are skipped up to where it was, or their iterator takes the state that it had there: the
iterators of some data loaders, such as Grain's, have methods `get_state` and `set_state`.
"""

from __future__ import annotations

import base64
import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.arguments import describe
from .._files.document import parse_json
from .processes import Group


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
        self._states: deque[Any] = deque()  # of the iterator before each that waits

    def __next__(self) -> Any:
        if not self._waiting:
            return self._convert(next(self._batches))
        self._states.popleft()
        return self._waiting.popleft()

    def state(self) -> Any:
        """Return the state of the iterator after the last batch that was returned; None if it has no `get_state`."""
        return self._states[0] if self._waiting else self._state()

    def _state(self) -> Any:
        return self._batches.get_state() if hasattr(self._batches, "get_state") else None

    def stacked(self, count: int) -> Stacked | None:
        """Return the next batches as one; None if there are fewer, or if they differ in structure or shapes."""
        if hasattr(self._batches, "_stacked"):
            arrays = self._batches._stacked(count)
            return None if arrays is None else Stacked(arrays, count)
        while len(self._waiting) < count:
            state = self._state()
            try:
                batch = next(self._batches)
            except StopIteration:
                break
            # Batches that wait for others are copied, since a data loader may reuse their memory.
            self._waiting.append(copied(self._convert(batch)))
            self._states.append(state)
        kinds = [
            (treedef, [(getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in leaves])
            for leaves, treedef in map(jax.tree.flatten, self._waiting)
        ]
        if len(kinds) < count or any(kind != kinds[0] for kind in kinds[1:]):
            return None
        batches = list(self._waiting)
        self._waiting.clear()
        self._states.clear()
        # In one program, or by NumPy, so that there is one transfer instead of one for each array.
        on_host = all(isinstance(x, np.ndarray) for x in jax.tree.leaves(batches))
        return Stacked(jax.tree.map(lambda *x: np.stack(x), *batches) if on_host else _stack(batches), count)


def position(api: str, source: Source, group: Group) -> list[Any] | None:
    """Return the state of the batches' iterator in each process, as values for JSON; None if there is no such state.

    Raises:
      TypeError: a state is neither bytes nor a value that JSON keeps as it is.
    """
    states = group.gather(group.agree(lambda: _as_json(api, source.state())))
    return None if None in states else states


def go_to(api: str, source: Iterator[Any], count: int, states: list[Any] | None, group: Group) -> Any:
    """Let an iterator go on after the `count` batches that a checkpoint has used, and return the first of them.

    Args:
      api: the caller's name in errors.
      source: the iterator at its start.
      count: the number of batches.
      states: what `position` returned for the checkpoint. Without it, or without a method `set_state`, batches are
        skipped.
      group: the processes of the run.

    Raises:
      ValueError: there are fewer batches; other processes than these wrote the states.
    """
    if states is None or not hasattr(source, "set_state"):
        first, skipped = skip(source, count)
        if skipped < count:
            raise ValueError(
                f"{api}: the checkpoint has used {count} batches, but got {skipped}; pass the same batches."
            )
        return first
    if len(states) != len(group.processes):
        wrote = f"{len(states)} processes, each with its own part of the batches, wrote the checkpoint"
        remedy = "start as many, or pass batches whose iterator has no set_state, which are skipped instead"
        raise ValueError(f"{api}: {wrote}, but there are {len(group.processes)}; {remedy}.")
    first = list(islice(source, 1))
    if not first:
        raise ValueError(f"{api}: the checkpoint has used {count} batches, but got none; pass the same batches.")
    source.set_state(_of_json(states[group.place]))
    return first[0]


def skip(source: Iterator[Any], count: int) -> tuple[Any, int]:
    """Skip batches, at least one; return the first of them, or None, and how many there were."""
    first = list(islice(source, 1))
    # A source with a method `skip` need not create the batches that it skips.
    rest = source.skip(count - 1) if hasattr(source, "skip") else sum(1 for _ in islice(source, count - 1))
    return (first[0] if first else None), len(first) + rest


def _as_json(api: str, state: Any) -> dict[str, Any] | None:
    if state is None:
        return None
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    try:
        same = parse_json(json.dumps({"value": state}, ensure_ascii=False).encode()) == {"value": state}
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        what = (
            f"get_state of the iterator over batches must return bytes or a value for JSON, but got {describe(state)}"
        )
        raise TypeError(f"{api}: {what}; pass batches without get_state, which are skipped when the run resumes.")
    return {"value": state}


def _of_json(state: dict[str, Any]) -> Any:
    return base64.b64decode(state["bytes"]) if "bytes" in state else state["value"]


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
