"""The imports from JAX whose place changes between versions, and what it raises where, in one file."""

from typing import Any

import jax
from jax.core import Tracer

__all__ = ["NeedsValues", "Tracer", "scan_counts"]

# What is raised where a function that is traced asks for a value: it branches on one, or hands an array to NumPy.
NeedsValues = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a `scan` with these parameters are the same in each turn, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    shared, carry, _ = params["ft_in"].unpack()  # from jax 0.11 on
    return len(shared), len(carry)
