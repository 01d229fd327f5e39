"""Flax modules: what trains, in which precision they compute, how they begin, and files of parameters."""

from ._files import load_params, save_params
from ._freeze import freeze, unfreeze
from ._parameters import Frozen, named_parameters
from ._precision import with_precision
from ._reinitialize import reinitialize

__all__ = [
    "Frozen",
    "freeze",
    "load_params",
    "named_parameters",
    "reinitialize",
    "save_params",
    "unfreeze",
    "with_precision",
]
