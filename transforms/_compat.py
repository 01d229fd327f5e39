"""The imports from JAX whose place changes between versions, and what it raises where, in one file."""

import jax
from jax.core import Tracer

__all__ = ["NeedsValues", "Tracer"]

# What is raised where a function that is traced asks for a value: it branches on one, or hands an array to NumPy.
NeedsValues = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
