"""Functional transforms on JAX: functions in, functions out."""

from ._grad import grad, value_and_grad
from ._vmap import vmap

__all__ = ["grad", "value_and_grad", "vmap"]
