"""Flax modules: what trains, in which precision they compute, how they begin, and files of parameters.

A module (or an ensemble of them) comes in, a new one with variables of its own goes out; the given one never changes.

- `_places.py` lists every module and variable by its path, shared ones by each of their paths, and copies a module
  with some variables replaced. It also finds which rule applies to a module (rules are a dict from kind of module to
  rule), and which module owns a variable. All other files here use it.
- `_parameters.py`: `named_parameters`; `freeze` and `unfreeze`, parameters taken out of training as variables of kind
  `Frozen` and put back; which variables a filter of Flax, a name or a kind selects.
- `_precision.py`: `with_precision`, the dtype in which layers compute.
- `_reinitialize.py`: `reinitialize`, parameters drawn again by kind of layer, from a key and their paths.
- `_files.py`: `save_params` and `load_params`: names, renaming, and what does not fit; `_safetensors.py`: the format
  on the disk, its checksum, and the errors of damaged files. A file is made atomic by `_runs/atomic_write.py`.
"""

from ._files import load_params, save_params
from ._parameters import Frozen, freeze, named_parameters, unfreeze
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
