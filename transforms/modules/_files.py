"""`save_params` and `load_params`: save and load named parameters, with renaming, transformation and checks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from .._core.arguments import check_callable, describe
from .._core.prng import is_key
from .._models.split_model import Model
from .._models.stacking import outline
from ._places import check_module, named_leaves, with_leaves
from ._safetensors import DTYPES, read_array, reading, write

# Not written: random streams, and values that a call stores in the module.
_LEFT_OUT = (nnx.RngState, nnx.Cache, nnx.Intermediate)
_SHOWN = 8


def save_params(path: str | os.PathLike[str], model: Any) -> None:
    """Write the parameters of a module to a file in the safetensors format.

    The file contains all arrays that the network computes with, under the names of `named_parameters`: parameters,
    frozen or not, BatchNorm statistics and other state. It does not contain random streams, caches and intermediate
    values (`nnx.RngState`, `nnx.Cache`, `nnx.Intermediate`), nor the class and its arguments. It contains no code, and
    can be read by PyTorch and other libraries. For ensembles use `plurax.ensemble.save`.

    Args:
      path: the path of the file; `~` is the home directory. An existing file is replaced after the new one is complete
        and on the disk. Missing folders are created.
      model: an NNX module.

    Raises:
      ModuleNotFoundError: the extra is missing: `pip install 'plurax[files]'`.
      TypeError: `model` is not a module; a variable holds something other than arrays with values; an array is spread
        over several processes.
      ValueError: two arrays have the same name; an array has a dtype that the format lacks (complex128, int4).
      OSError: the file cannot be written.

    Cost:
      One copy of the arrays in host memory.

    Source:
      https://huggingface.co/docs/safetensors; `mindspore.save_checkpoint`.

    Examples:
      >>> import tempfile
      >>> from flax import nnx
      >>> from plurax.transforms.modules import load_params, save_params
      >>> model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_params(f"{folder}/linear.safetensors", model)
      ...     again = load_params(f"{folder}/linear.safetensors", nnx.Linear(4, 3, rngs=nnx.Rngs(1)))
      >>> bool((again.kernel[...] == model.kernel[...]).all())
      True
    """
    check_module("save_params", model)
    # Absolute, so that an error names the file wherever the process was started.
    file = Path(os.path.realpath(Path(path).expanduser()))
    write("save_params", file, {name: _to_host(name, leaf) for name, leaf in _kept("save_params", model).items()})


def load_params(
    path: str | os.PathLike[str],
    model: Model,
    *,
    rename: Mapping[str, str | None] | Callable[[str], str | None] | None = None,
    strict: bool = True,
    transform: Callable[[str, np.ndarray], Any] | None = None,
) -> Model:
    """Read parameters from a safetensors file, written by `save_params` or by another library.

    Args:
      path: the path of the file, as for `save_params`.
      model: an NNX module of the architecture; its values are ignored (`nnx.eval_shape` gives a module without values).
      rename: a dict from names in the file to names in the module, or a function of the name in the file. Names that
        are not in the dict stay. None as the new name skips the array.
      strict: whether the file must contain exactly the arrays that `save_params` would write. False loads the arrays
        that module and file have in common, and warns about the others. Shapes and dtypes must match in any case.
      transform: a function of the name in the module and the array, to change dtypes or the order of axes, such as
        `lambda name, x: x.T if x.ndim == 2 else x`. Without it no array is converted.

    Returns:
      A new module with separate variables, on the devices of the variables of `model`. State that is not in files, such
      as random streams, is as in `model`.

    Raises:
      ModuleNotFoundError: the extra is missing: `pip install 'plurax[files]'`.
      FileNotFoundError: there is no such file.
      TypeError: `model` is not a module, or an argument has a wrong type.
      ValueError: the file is damaged (files of `save_params` have a checksum), or does not fit: the error lists all
        arrays that are missing, unknown, or have another shape or dtype; `rename` has a name that is not in the file,
        or maps two names to one; a dtype needs `jax_enable_x64`. Nothing is changed then.

    Warns:
      UserWarning: with `strict=False`, arrays are missing or unknown.

    Cost:
      Two passes over the file; host memory for the loaded arrays and one more.

    Source:
      `mindspore.load_param_into_net`; `torch.nn.Module.load_state_dict`.

    Examples:
      >>> import tempfile
      >>> import numpy as np
      >>> from flax import nnx
      >>> from safetensors.numpy import save_file
      >>> from plurax.transforms.modules import load_params
      >>> theirs = {"fc.weight": np.ones((3, 4), np.float32), "fc.bias": np.zeros(3, np.float32)}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_file(theirs, f"{folder}/torch.safetensors")
      ...     model = load_params(
      ...         f"{folder}/torch.safetensors",
      ...         nnx.Linear(4, 3, rngs=nnx.Rngs(0)),
      ...         rename={"fc.weight": "kernel", "fc.bias": "bias"},
      ...         transform=lambda name, x: x.T,
      ...     )
      >>> model(np.ones((1, 4), np.float32))
      Array([[4., 4., 4.]], dtype=float32)
    """
    check_module("load_params", model)
    if not isinstance(strict, bool):
        raise TypeError(f"load_params: strict must be True or False, but got {describe(strict)}.")
    if transform is not None:
        check_callable("load_params", transform, "transform")
    expected = {name: outline(leaf) for name, leaf in _kept("load_params", model).items()}
    # A module from `nnx.eval_shape` may need 64 bits, which JAX would silently truncate to 32.
    for name, (_, dtype) in expected.items():
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise ValueError(f"load_params: `{name}` has dtype {dtype}, which needs jax_enable_x64; enable it.")
    file = Path(os.path.realpath(Path(path).expanduser()))
    # Everything is read and compared before the copy is made, so that an error has no effect.
    with reading("load_params", file) as opened:
        sources = _renamed(opened.keys(), rename, file)
        found = {name: read_array("load_params", opened, file, sources[name]) for name in expected if name in sources}
    # After renaming, so that the transform receives the module's names.
    if transform is not None:
        found = {name: transform(name, x) for name, x in found.items()}
    missing = [f"`{name}`" for name in expected if name not in sources]
    unknown = [f"`{source}`" for name, source in sources.items() if name not in expected]
    wrong = [
        f"`{name}`, {describe(x)}, in place of shape {expected[name][0]} and dtype {expected[name][1]}"
        for name, x in found.items()
        if (getattr(x, "shape", None), getattr(x, "dtype", None)) != expected[name]
    ]
    facts = [("lacks", missing), ("has in addition", unknown), ("has", wrong)]
    report = f"load_params: {file} does not fit the {type(model).__name__}: it " + ", and ".join(
        f"{fact} {_some(names)}" for fact, names in facts if names
    )
    # Even with strict=False a file with no array of the module is an error: its names need `rename`.
    if wrong or (strict and (missing or unknown)) or (missing and not found):
        cure = "rename= is for other names, transform= for other shapes and dtypes, strict=False for a part of them"
        raise ValueError(f"{report}; {cure}.")
    if missing or unknown:
        warnings.warn(f"{report}; the rest is loaded.", stacklevel=2)
    return with_leaves(model, found)


def _kept(api: str, model: Any) -> dict[str, Any]:
    """Return the arrays of a module that belong in a file, by their names."""
    leaves = named_leaves(api, model, lambda x: not isinstance(x, _LEFT_OUT))
    for name, leaf in leaves.items():
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) and not isinstance(leaf, (int, float, complex)):
            raise TypeError(f"{api}: `{name}` holds {describe(leaf)}, not an array; make it a plain attribute.")
    # A key outside a random stream is left out as well: the format has no dtype for it.
    return {name: leaf for name, leaf in leaves.items() if not is_key(leaf)}


def _to_host(name: str, leaf: Any) -> np.ndarray:
    """Return an array in host memory; raise if it has no values here, or a dtype that the format lacks."""
    dtype = outline(leaf)[1]
    if dtype.name not in DTYPES.values():
        known = ", ".join(DTYPES.values())
        raise ValueError(f"save_params: `{name}` has dtype {dtype}, but safetensors supports {known}; convert it.")
    try:
        # A Python number has no dtype; it gets the dtype that it has as a JAX array.
        return np.asarray(leaf, dtype)
    except (TypeError, RuntimeError) as error:  # traced, a shape only, or on the devices of other processes
        raise TypeError(f"save_params: `{name}` is {describe(leaf)} without values in this process: {error}") from error


def _renamed(names: Iterable[str], rename: Any, file: Path) -> dict[str, str]:
    """Return a dict from names in the module to names in the file, without skipped arrays."""
    # Sorted, so that an error about two names that clash is always the same.
    names = sorted(names)
    new_names = {name: name for name in names}
    if isinstance(rename, Mapping):
        gone = [f"`{name}`" for name in rename if name not in names]
        if gone:
            has = _some([f"`{name}`" for name in names]) or "nothing"
            raise ValueError(f"load_params: rename has names that {file} lacks: {_some(gone)}; it has {has}.")
        new_names |= rename
    elif callable(rename):
        new_names = {name: rename(name) for name in names}
    elif rename is not None:
        raise TypeError(f"load_params: rename must be a dict or a function of names, but got {describe(rename)}.")
    found: dict[str, str] = {}
    for name, new in new_names.items():
        if new is None:
            continue
        if not isinstance(new, str):
            raise TypeError(f"load_params: rename must give a name or None, but gave {describe(new)} for `{name}`.")
        if new in found:
            raise ValueError(f"load_params: `{found[new]}` and `{name}` of {file} would both be `{new}`; rename one.")
        found[new] = name
    return found


def _some(items: list[str]) -> str:
    """Return the first items as text, with the number of further items."""
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
