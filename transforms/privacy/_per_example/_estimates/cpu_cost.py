"""A cost model of the methods on a CPU, in bytes of memory traffic, computed from shapes.

Every method costs an ordinary gradient plus an overhead. Book-keeping computes norms from inner products between
positions, and materializes small gradients. A materialized gradient is written once and read twice, for its norm and
for the sum. "ghost" computes the gradient twice. Groups start every operation and update the sum once for each group,
but the residuals of a group may stay in the cache between its forward and its backward pass.

Convolutions may be computed as matrix products, if all of them can be, which copies patches of their inputs or parts of
their results. In the loop over groups they always are, where XLA's own are many times slower. Outside of it, XLA's own
are slower only with few channels or with groups of channels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ...._convolutions.as_products import largest_copies
from ...._convolutions.convolution import Convolution
from ...._core.compat import Jaxpr, JaxprEqn
from ...._core.jaxpr import aval, bodies
from ..loss import ExampleProgram
from ..parameter_uses import ParameterUse
from ..rules import norm_cost

# Fitted to the shapes of benchmarks/privacy.py and to dense layers of 64 to 1024.
_OPERATIONS_PER_BYTE = 8.0  # floating-point operations in the time of one byte of memory
# An operation on fewer than `_SMALL` bytes takes the time of `_SMALL_START` bytes to start, any other that of `_START`.
_SMALL, _SMALL_START, _START = 65_536, 25_000, 100_000
_CACHE, _CACHE_OF_GRADIENTS, _CACHE_OF_CONVOLUTIONS = 16 * 2**20, 10 * 2**20, 8 * 2**20  # bytes
# Products of a forward and a backward pass, for each product of the forward pass.
_PRODUCTS = 3
# What XLA's convolutions take in addition to the time of an equal product: in the time of one byte, so many operations,
# two for each element of a result and position of the window.
_AT_WINDOWS = 1.4


class Cost(NamedTuple):
    """The cost of a method beyond an ordinary gradient.

    Attributes:
      traffic: bytes.
      method: "vmap", "ghost" or "book_keeping".
      examples: the number of examples to compute at a time.
      products: whether convolutions are computed as matrix products.
    """

    traffic: float
    method: str
    examples: int
    products: bool


class _Way(NamedTuple):
    """A way to compute convolutions: the bytes of its copies, its cost for one example, and the sizes of groups."""

    copied: float
    slower: float
    smallest: int
    largest: int


def costs(program: ExampleProgram, batch: int, most: int) -> list[Cost]:
    """Return the cost of every method and number of examples at a time.

    Args:
      program: the loss.
      batch: the number of examples.
      most: the largest number of examples to compute at a time; it divides the batch.
    """
    used = frozenset[int]().union(*(use.value.leaves for use in program.uses))
    held = sum(program.parameters[i].nbytes for i in used)
    norms = sum(_bytes(use, program.parameters) for use in program.uses)
    again = _PRODUCTS * _operations(program.closed.jaxpr) / _OPERATIONS_PER_BYTE
    copies = largest_copies(program.closed.jaxpr)
    # A loop over groups rewrites all convolutions, the whole batch those at which XLA is slow.
    ways, reads, products = [_Way(0.0, 0.0, 1, batch)], 1.0, 0 < copies < math.inf
    if products:
        by_xla, copying, copies_of_slow, share = _of_convolutions(program.closed.jaxpr)
        ways = [_Way(copies, copying, 1, batch - 1), _Way(copies_of_slow, by_xla, batch, batch)]
        reads = 1 + (_PRODUCTS - 1) * share
    found = []
    for size, (copied, slower, smallest, largest) in itertools.product(range(1, most + 1), ways):
        if most % size or not smallest <= size <= largest:
            continue
        starts, between = _starts_and_results(program.closed.jaxpr, size)
        # Residuals between the passes are written and read, unless those of a group fit into the cache. Each product of
        # a convolution pads or copies its image anew.
        whole = products and size == batch
        fits = size * (between + copied) <= (_CACHE_OF_CONVOLUTIONS if whole else _CACHE)
        spilled = 0.0 if fits else 2 * batch * (between + copied) * reads
        # Each group reads the sum, writes it, and writes its own part of it.
        groups = batch // size * (3 * held + starts) if size < batch else 0
        alone = batch * (norms + slower) + groups + spilled
        found.append(Cost(alone, "book_keeping", size, products))
        ghost = alone + batch * (again + slower) + batch // size * starts + spilled
        found.append(Cost(ghost, "ghost", size, products))
        if size * held <= _CACHE_OF_GRADIENTS or size == 1:
            materialized = batch * (4 * held + slower) + batch // size * starts + spilled
            found.append(Cost(materialized, "vmap", size, products))
    return found


def _bytes(use: ParameterUse, parameters: Sequence[jax.Array]) -> float:
    """Return the cost of the norm of one example's gradient at a use."""
    operations, numbers = norm_cost(use)
    if use.value.layout is None:  # the gradients of the parameters are materialized
        numbers += sum(parameters[i].size for i in use.value.leaves)
    return operations / _OPERATIONS_PER_BYTE + 2 * numbers * use.aval.dtype.itemsize


def _starts_and_results(jaxpr: Jaxpr, examples: int) -> tuple[int, int]:
    """Return the cost of starting all operations, and the bytes of one example's results; unroll loops."""
    starts = results = 0
    for eqn in jaxpr.eqns:
        inner = [_starts_and_results(body, examples) for body in bodies(eqn)]
        iterations = _iterations(eqn)
        if inner:
            starts += iterations * sum(start for start, _ in inner)
            results += iterations * sum(result for _, result in inner)
            continue
        # Only floating-point results are kept for the backward pass.
        kept = [aval(out) for out in eqn.outvars if jnp.issubdtype(aval(out).dtype, jnp.inexact)]
        size = sum(x.size * x.dtype.itemsize for x in kept)
        starts += _START if examples * size >= _SMALL else _SMALL_START
        results += size
    return starts, results


def _operations(jaxpr: Jaxpr, convolved: bool = False) -> float:
    """Return the floating-point operations of one example's products and convolutions, or of convolutions only."""
    total = 0.0
    for eqn, iterations in _unrolled(jaxpr):
        if eqn.primitive.name == "dot_general" and not convolved:
            (contracted, _), _ = eqn.params["dimension_numbers"]
            terms = math.prod(aval(eqn.invars[0]).shape[i] for i in contracted)
            total += iterations * 2.0 * aval(eqn.outvars[0]).size * terms
        elif eqn.primitive.name == "conv_general_dilated":
            kernel, spec = aval(eqn.invars[1]), eqn.params["dimension_numbers"].rhs_spec
            total += iterations * 2.0 * aval(eqn.outvars[0]).size * kernel.size / kernel.shape[spec[0]]
    return total


def _of_convolutions(jaxpr: Jaxpr) -> tuple[float, float, float, float]:
    """Return what one example's convolutions cost.

    These are the cost where only those are products at which XLA is slow, the cost where all are, the most bytes that
    one of the former copies, and the share of convolutions in all operations.
    """
    by_xla = copying = most = 0.0
    for eqn, iterations in _unrolled(jaxpr):
        if eqn.primitive.name == "conv_general_dilated":
            of = Convolution(eqn)
            operations = iterations * 2.0 * math.prod(of.shape) * of.positions
            copied = of.number * of.positions * min(of.patches, of.parts) * aval(eqn.outvars[0]).dtype.itemsize
            copying += _PRODUCTS * iterations * copied
            by_xla += _PRODUCTS * (iterations * copied if of.is_slow else operations / _AT_WINDOWS)
            most = max(most, copied) if of.is_slow else most
    return by_xla, copying, most, _operations(jaxpr, convolved=True) / max(1.0, _operations(jaxpr))


def _unrolled(jaxpr: Jaxpr) -> Iterator[tuple[JaxprEqn, int]]:
    """Return the operations of a program, at any depth, and how often each of them runs."""
    for eqn in jaxpr.eqns:
        yield eqn, 1
        for body in bodies(eqn):
            for inner, iterations in _unrolled(body):
                yield inner, iterations * _iterations(eqn)


def _iterations(eqn: JaxprEqn) -> int:
    """Return how often the body of an operation runs."""
    return eqn.params["length"] if eqn.primitive.name == "scan" else 1
