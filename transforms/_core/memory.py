"""Memory budgets: find the largest chunk whose compiled temporaries fit.

XLA reports the memory of a program after compiling it. This runs and allocates nothing, so it also works while another
transform traces, when only shapes are known.
"""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Context
from functools import partial
from typing import Any

import jax

from .arguments import describe, is_int
from .compat import NeedsValues, Tracer, eval_jaxpr, is_repeated, memory_of
from .target import device

_UNITS = {f"{prefix}b": 1000**i for i, prefix in enumerate(["", "k", "m", "g", "t"])}
_UNITS |= {f"{prefix}ib": 1024**i for i, prefix in enumerate(["k", "m", "g", "t"], 1)}
_SIZE = r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)"
# The search ends once a chunk fills this fraction of the budget, or after this many compiled programs. If no chunk has
# fitted by then, it continues until one does.
_ENOUGH, _PROBES = 0.9, 6

# Libraries whose stack frames may be between the user's line and the warning.
_LIBRARIES = ("plurax", "jax", "flax", "equinox")


def check_budget(api: str, budget: Any, chunk_size: Any, name: str = "chunk_size") -> int | None:
    """Return the budget in bytes, or None; raise if it is not a valid size, or if a chunk size is given too."""
    if budget is None:
        return None
    if chunk_size is not None:
        raise ValueError(f"{api}: {name} and memory_budget both set the chunk; give one of them.")
    found = re.fullmatch(_SIZE, budget.strip()) if isinstance(budget, str) else None
    unit = (found[2] or "B").lower() if found else None
    if found and unit in _UNITS:
        size = float(found[1]) * _UNITS[unit]
    elif is_int(budget):
        size = budget
    else:
        wanted = 'a number of bytes or a string such as "512MiB" (1024**2 bytes each), "2GB" (1000**3) or "1e9"'
        kind = ValueError if isinstance(budget, str) else TypeError
        raise kind(f"{api}: memory_budget must be {wanted}, but got {describe(budget)}.")
    if not 1 <= size < math.inf:
        raise ValueError(f"{api}: memory_budget must be at least one byte, and finite, but got {budget!r}.")
    return int(size)


def largest_chunk(api: str, need_of: Callable[[int], int], size: int, budget: int) -> int:
    """Return the largest chunk of `size` slices whose temporaries fit into `budget` bytes; raise if none does.

    Of all sizes that give the same number of chunks only the smallest is tried: a larger one takes as many iterations
    and more memory.

    Args:
      api: the caller's name in errors.
      need_of: a function from a chunk size to the bytes of its temporaries.
      size: the number of slices, at least 1.
      budget: bytes.
    """
    needs: dict[int, int] = {}

    def need(chunk: int) -> int:
        """Return the bytes for a chunk size; each size is compiled once."""
        if chunk not in needs:
            try:
                alone = need_of(chunk)
            except NeedsValues as error:
                cure = "use lax.cond or jnp.where, or leave the budget out if the value is the same for all slices"
                raise ValueError(f"{api}: memory_budget traces fun, but fun branches on a value; {cure}.") from error
            # The complete program has additional copies of small arrays, and loop counters.
            needs[chunk] = alone + alone // 64 + 256
        return needs[chunk]

    if need(size) <= budget:
        return size
    # `low` fits and `high` does not; a chunk of 0 needs no memory.
    low, high = 0, size
    while high - low > 1 and not (low and (len(needs) >= _PROBES or needs[low] >= _ENOUGH * budget)):
        # Assume that memory is linear in the chunk size between the two: the secant meets the budget at
        # low + (high - low) (budget - need(low)) / (need(high) - need(low)).
        needed = needs.get(low, 0)
        guess = low + int((high - low) * (budget - needed) / max(needs[high] - needed, 1))
        # XLA often compiles a chunk of one to a worse program than a chunk of two, so one is tried last.
        guess = min(max(guess, low + 1, 2), high - 1 if low else max(high // 2, 1))
        chunk = -(-size // -(-size // guess))  # the smallest with as many chunks as `guess` makes
        if chunk in needs:
            break
        low, high = (chunk, high) if need(chunk) <= budget else (low, chunk)
    if not low and need(1) <= budget:
        low = 1
    if not low:
        chunk = min(needs, key=needs.__getitem__)
        least = f"the smallest found is {in_words(needs[chunk], up=True)}, for {chunk} of {size} at a time"
        raise ValueError(f"{api}: no chunk fits into memory_budget={in_words(budget)}: {least}; raise the budget.")
    return low


def chunk_within(api: str, compute: Callable[[int], Any], size: int, budget: int) -> int:
    """Return the largest chunk for which the temporaries of `compute(chunk)` fit into the budget.

    Args:
      api: the caller's name in errors.
      compute: a function of the number of slices, out of `size`, to compute at a time.
      size: the number of slices, at least 1.
      budget: bytes.

    Warns:
      UserWarning: the computation is part of a larger program that maps, repeats or differentiates it, whose
        temporaries are not known here.
    """
    found: dict[int, tuple[int, bool]] = {}

    def need(chunk: int) -> int:
        found[chunk] = temporaries(partial(compute, chunk))
        return found[chunk][0]

    chunk = largest_chunk(api, need, size, budget)
    needed, repeated = found[chunk]
    warn_if_repeated(api, budget, needed, f"{chunk} of {size} slices at a time", repeated)
    return chunk


def temporaries(compute: Callable[[], Any]) -> tuple[int, bool]:
    """Return the bytes of a computation's compiled temporaries, and whether an outer transform repeats it."""
    lowered, tracers = lower_apart(compute)
    # An outer transform maps, repeats or differentiates `compute` only if `compute` closes over its tracers.
    return memory_of(lowered.compile()).temp_size_in_bytes, any(map(is_repeated, tracers))


def warn_if_repeated(api: str, budget: int, needed: int, described: str, repeated: bool) -> None:
    """Warn that the temporaries of a larger program, which maps or differentiates this part, are not known."""
    if repeated:
        warnings.warn(
            f"{api}: memory_budget={in_words(budget)} bounds this part of the program alone (it needs "
            f"{in_words(needed)}, with {described}), but the vmap, loop or derivative around it "
            "may need more; give the budget to the outermost transform, or compile the whole program and read its "
            "memory_analysis().",
            stacklevel=level_of_the_user(),
        )


def level_of_the_user() -> int:
    """Return the `stacklevel` with which the caller's warning shows the user's line of code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level


def lower_apart(fun: Callable[[], Any]) -> tuple[Any, list[Tracer]]:
    """Return `fun` lowered as a separate program, and the tracers of outer traces that it closes over."""
    # Values that `fun` closes over are constants of this jaxpr, and become arguments of the program. Inside an outer
    # trace only tracers do: arrays stay constants, as in the outer program, since XLA lays constants out differently.
    closed = jax.make_jaxpr(fun)()
    tracers = [x for x in closed.consts if isinstance(x, Tracer)]
    free = (Tracer,) if tracers else (object,)

    def of_constants(*arguments: Any) -> Any:
        given = iter(arguments)
        constants = [next(given) if isinstance(x, free) else x for x in closed.consts]
        return eval_jaxpr(closed.jaxpr, constants)

    avals = [jax.typeof(x) for x in closed.consts if isinstance(x, free)]
    place = None if device() is None else jax.sharding.SingleDeviceSharding(device())
    program = jax.jit(of_constants, in_shardings=place, out_shardings=place)
    return program.lower(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals)), tracers


def in_words(size: int, *, up: bool = False) -> str:
    """Return a number of bytes in the largest unit that it fills, as in "1.5 MiB"; rounded `up`, at least so many."""
    unit = next((unit for unit in ("B", "KiB", "MiB", "GiB") if size < 1024 * _UNITS[unit.lower()]), "TiB")
    rounding = Context(prec=3, rounding=ROUND_CEILING if up else ROUND_HALF_EVEN)
    return f"{float(rounding.create_decimal_from_float(size / _UNITS[unit.lower()])):.3g} {unit}"
