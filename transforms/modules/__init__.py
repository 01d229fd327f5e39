"""Tools for Flax modules: freeze parameters, set the precision, initialize again, save and load parameters.

Each function that changes a module (or an ensemble) returns a new one with separate variables; its argument never
changes.

- `_places.py` lists every module and variable by its path, shared ones by each of their paths, and copies a module
  with some variables replaced. It also finds the rule for a module (rules are a dict from kinds of modules) and the
  module that owns a variable. All other files here use it.
- `_parameters.py`: `named_parameters`; `freeze` and `unfreeze`, which exclude parameters from training as variables of
  kind `Frozen` and undo this; selection of variables by a Flax filter, a name or a kind.
- `_layers.py`: the layers that a function changes, chosen by a filter and by rules, and the error for one of an unknown
  class.
- `_adapters.py`: `batch_ensemble`, `tabm` and `lora`: few parameters of its own for each member of an ensemble, around
  kernels of kind `Base`, which all members share.
- `_precision.py`: `with_precision`, the dtype in which layers compute.
- `_reinitialize.py`: `reinitialize`, which draws parameters again by kind of layer, from a key and their paths.
- `_files.py`: `save_params` and `load_params`: names, renaming, and mismatches; `_safetensors.py`: the file format, its
  checksum, and errors for damaged files. `_files/atomic_write.py` writes the file atomically.
"""

from ._adapters import Adapter, Base, batch_ensemble, lora, tabm
from ._files import load_params, save_params
from ._parameters import Frozen, freeze, named_parameters, unfreeze
from ._precision import with_precision
from ._reinitialize import reinitialize

__all__ = [
    "Adapter",
    "Base",
    "Frozen",
    "batch_ensemble",
    "freeze",
    "load_params",
    "lora",
    "named_parameters",
    "reinitialize",
    "save_params",
    "tabm",
    "unfreeze",
    "with_precision",
]
