"""Which method `auto` takes: by the bytes and operations of each, from shapes. Nothing is timed.

Both ways cost an ordinary gradient, and something beside it. Book-keeping takes the norms of products between
positions, and holds small gradients. One example after another, each gradient is written, and read for its norm and for
the sum; the parameters are read, and every operation is started, for each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr

from .._jaxpr import aval
from ._program import Program
from ._rules import norm_cost

# On CPU: floating-point operations in the time of one byte of memory, and bytes in the time that starting an operation
# takes. Both are from the shapes of benchmarks/privacy.py.
_OPERATIONS_PER_BYTE, _BYTES_PER_START = 4.0, 100_000


class Choice(NamedTuple):
    """Which way is taken, and why.

    Attributes:
      method: "vmap", "ghost" or "book_keeping".
      examples: how many at a time.
      why: a sentence.
    """

    method: str
    examples: int
    why: str


def choose(program: Program, batch: int, most: int, spmd_axis_name: Any) -> Choice:
    """The quicker way.

    Args:
      program: the loss.
      batch: how many examples there are.
      most: how many may be computed at a time; it divides the batch.
      spmd_axis_name: as for `jax.vmap`.
    """
    if jax.default_backend() != "cpu" or jax.device_count() > 1 or spmd_axis_name is not None:
        return Choice("book_keeping", most, "a loop over examples leaves an accelerator, or several devices, idle")
    used = frozenset().union(*(site.value.leaves for site in program.sites))
    held = sum(program.parameters[i].nbytes for i in used)
    together = batch * sum(_bytes(site) for site in program.sites)
    apart = batch * (7 * held + _starts(program.closed.jaxpr) * _BYTES_PER_START)
    counted = f"{apart / 2**20:.1f} MiB one at a time, {together / 2**20:.1f} MiB for norms"
    if apart < together:
        return Choice("vmap", 1, f"estimated as bytes of memory: {counted}")
    return Choice("book_keeping", most, f"estimated as bytes of memory: {counted}")


def _bytes(site: Any) -> float:
    operations, numbers = norm_cost(site)
    return operations / _OPERATIONS_PER_BYTE + 2 * numbers * aval(site.eqn.invars[site.operand]).dtype.itemsize


def _starts(jaxpr: Jaxpr) -> int:
    """How many operations are executed, those of loops in each turn."""
    count = 0
    for eqn in jaxpr.eqns:
        bodies = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(list(eqn.params.values()))]
        inner = sum(_starts(body) for body in bodies if isinstance(body, Jaxpr))
        count += max(1, inner * (eqn.params["length"] if eqn.primitive.name == "scan" else 1))
    return count
