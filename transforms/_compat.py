"""The imports from JAX whose place changes between versions, in one file."""

from jax.core import Tracer

__all__ = ["Tracer"]
