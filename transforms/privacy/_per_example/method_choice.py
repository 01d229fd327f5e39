"""The choice that "auto" makes: the method, and how many examples at a time, by counting bytes and operations.

Both are counted from shapes; nothing is timed. Every method costs an ordinary gradient, and something in addition.
Book-keeping takes the norms of products between positions, and holds small gradients. Where each gradient is held, it
is written, and read for its norm and for the sum. In groups, every operation is started and every sum added to for each
of them; but what a group keeps from the forward pass for the backward pass may stay in the cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from ..._core.jaxpr import aval, bodies
from .example_program import ExampleProgram
from .parameter_uses import ParameterUse
from .rules import norm_cost

_METHODS = ("auto", "vmap", "ghost", "book_keeping")

# Of a CPU; from the shapes of benchmarks/privacy.py and dense layers of 64 to 1024.
_OPERATIONS_PER_BYTE = 8.0  # floating-point operations in the time of one byte of memory
_SMALL, _SMALL_START, _START = 65_536, 25_000, 100_000  # bytes in the time of starting an operation on few, and on many
_CACHE, _CACHE_OF_GRADIENTS = 16 * 2**20, 10 * 2**20


def check_method(api: str, method: Any) -> None:
    """Raise if `method` is not the name of a method."""
    if method not in _METHODS:
        raise ValueError(f"{api}: method must be one of {', '.join(_METHODS)}, but got {method!r}.")


class MethodChoice(NamedTuple):
    """A method, the number of examples at a time, and why they were chosen.

    Attributes:
      method: "vmap", "ghost" or "book_keeping".
      examples: how many at a time.
      why: a sentence.
    """

    method: str
    examples: int
    why: str


def choose(program: ExampleProgram, batch: int, most: int, spmd_axis_name: Any) -> MethodChoice:
    """Return the choice that costs the least.

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
        # Results between the passes are written and read, unless the cache holds those of a group.
        spilled = 2 * batch * between if size * between > _CACHE else 0
        # Each group but the first reads the sum, writes it, and writes its own part of it.
        groups = batch // size * (3 * held + starts) if size < batch else 0
        found.append((batch * norms + groups + spilled, "book_keeping", size))
        if size * held <= _CACHE_OF_GRADIENTS or size == 1:
            found.append((4 * batch * held + batch // size * starts + spilled, "vmap", size))
    cost, method, size = min(found)
    other = min(cost for cost, other, _ in found if other != method)
    instead = "held" if method == "book_keeping" else "not held"
    why = f"counted as {cost / 2**20:.1f} MiB to read, and {other / 2**20:.1f} MiB if gradients were {instead}"
    return MethodChoice(method, size, why)


def _bytes(use: ParameterUse) -> float:
    """Return the cost of the norm of one example's gradient at a use, in bytes to read or write."""
    operations, numbers = norm_cost(use)
    return operations / _OPERATIONS_PER_BYTE + 2 * numbers * use.aval.dtype.itemsize


def _starts_and_results(jaxpr: Jaxpr, examples: int) -> tuple[int, int]:
    """Return the cost of starting the operations for some examples, and the bytes of one's results, loops unrolled."""
    starts = results = 0
    for eqn in jaxpr.eqns:
        inner = [_starts_and_results(body, examples) for body in bodies(eqn)]
        iterations = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        if inner:
            starts += iterations * sum(start for start, _ in inner)
            results += iterations * sum(result for _, result in inner)
            continue
        # Only numbers with derivatives are kept for the backward pass.
        kept = [aval(out) for out in eqn.outvars if jnp.issubdtype(aval(out).dtype, jnp.inexact)]
        size = sum(x.size * x.dtype.itemsize for x in kept)
        starts += _START if examples * size >= _SMALL else _SMALL_START
        results += size
    return starts, results
