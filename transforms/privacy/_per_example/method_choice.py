"""Which method `auto` takes, and how many examples at a time: by bytes and operations, from shapes. Nothing is timed.

Every way costs an ordinary gradient, and something beside it. Book-keeping takes the norms of products between
positions, and holds small gradients. Where each gradient is held, it is written, and read for its norm and for the sum.
In groups, every operation is started and every sum added to for each of them; but what a group keeps from the forward
pass for the backward pass may stay in the cache.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from ..._core.jaxpr import aval, bodies
from .example_program import ExampleProgram
from .rules import norm_cost

_METHODS = ("auto", "vmap", "ghost", "book_keeping")

# Of a CPU; from the shapes of benchmarks/privacy.py and dense layers of 64 to 1024.
_OPERATIONS_PER_BYTE = 8.0  # floating-point operations in the time of one byte of memory
_SMALL, _SMALL_START, _START = 65_536, 25_000, 100_000  # bytes in the time of starting an operation on few, and on many
_CACHE, _CACHE_OF_GRADIENTS = 16 * 2**20, 10 * 2**20


def check_method(api: str, method: Any) -> None:
    if method not in _METHODS:
        raise ValueError(f"{api}: method must be one of {', '.join(_METHODS)}, but got {method!r}.")


class MethodChoice(NamedTuple):
    """Which way is taken, and why.

    Attributes:
      method: "vmap", "ghost" or "book_keeping".
      examples: how many at a time.
      why: a sentence.
    """

    method: str
    examples: int
    why: str


def choose(program: ExampleProgram, batch: int, most: int, spmd_axis_name: Any) -> MethodChoice:
    """The quickest way.

    Args:
      program: the loss.
      batch: how many examples there are.
      most: how many may be computed at a time; it divides the batch.
      spmd_axis_name: as for `jax.vmap`.
    """
    if jax.default_backend() != "cpu" or jax.device_count() > 1 or spmd_axis_name is not None:
        return MethodChoice(
            "book_keeping", most, "a loop over examples leaves an accelerator, or several devices, idle"
        )
    used = frozenset[int]().union(*(use.value.leaves for use in program.uses))
    held = sum(program.parameters[i].nbytes for i in used)
    norms = sum(map(_bytes, program.uses))
    found = []
    for size in (size for size in range(1, most + 1) if most % size == 0):
        starts, between = _starts_and_results(program.closed.jaxpr, size)
        beside = 2 * batch * between if size * between > _CACHE else 0
        again = batch // size * (3 * held + starts) if size < batch else 0
        found.append((batch * norms + again + beside, "book_keeping", size))
        if size * held <= _CACHE_OF_GRADIENTS or size == 1:
            found.append((4 * batch * held + batch // size * starts + beside, "vmap", size))
    cost, method, size = min(found)
    other = min(cost for cost, other, _ in found if other != method)
    instead = "held" if method == "book_keeping" else "not held"
    why = f"counted as {cost / 2**20:.1f} MiB to read, and {other / 2**20:.1f} MiB if gradients were {instead}"
    return MethodChoice(method, size, why)


def _bytes(use: Any) -> float:
    operations, numbers = norm_cost(use)
    return operations / _OPERATIONS_PER_BYTE + 2 * numbers * use.aval.dtype.itemsize


def _starts_and_results(jaxpr: Jaxpr, examples: int) -> tuple[int, int]:
    """What it costs to start the operations for some examples, and the bytes of all results of one, loops unrolled."""
    starts = results = 0
    for eqn in jaxpr.eqns:
        inner = [_starts_and_results(body, examples) for body in bodies(eqn)]
        turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        if inner:
            starts += turns * sum(start for start, _ in inner)
            results += turns * sum(result for _, result in inner)
            continue
        size = sum(math.prod(aval(out).shape) * _itemsize(aval(out)) for out in eqn.outvars)
        starts += _START if examples * size >= _SMALL else _SMALL_START
        results += size
    return starts, results


def _itemsize(array: Any) -> int:
    """Of numbers with derivatives; others are not kept."""
    return array.dtype.itemsize if jnp.issubdtype(array.dtype, jnp.inexact) else 0
