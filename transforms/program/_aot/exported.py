"""`load_exported` and the file that it reads: a program of `jax.export`, its arrays, and a description."""

from __future__ import annotations

import importlib
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from ..._core.arguments import describe, leaf_name
from ..._core.prng import is_key
from ..._runs.atomic_write import write_atomically

_MAGIC = b"plurax exported 1\n"


class Exported:
    """A program that `plurax.ensemble.export` wrote: a function of a batch that returns a dict of arrays.

    `load_exported` makes it.

    Args:
      program: the program, whose first argument is a list of arrays.
      arrays: these arrays.
      description: as below.

    Attributes:
      description: what the file says of itself: the model, its inputs and outputs, platforms and versions.

    Examples:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, export, load_exported
      >>> ens = Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 5, seed=0)
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     export(ens, f"{directory}/model.plurax", jnp.ones((1, 4)), platforms=("cpu",), kind="classification")
      ...     model = load_exported(f"{directory}/model.plurax")
      >>> {name: array.shape for name, array in model(jnp.ones((7, 4))).items()}
      {'entropy': (7,), 'mean': (7, 3)}
    """

    def __init__(self, program: export.Exported, arrays: list[Any], description: dict[str, Any]) -> None:
        self.description = description
        self._inputs = program.in_avals[len(arrays) :]
        self._structure = jax.tree.unflatten(program.in_tree, program.in_avals)[0][1]
        self._arrays, self._call = [jnp.asarray(x) for x in arrays], jax.jit(program.call)

    def __call__(self, x: Any) -> dict[str, jax.Array]:
        """Return the outputs for a batch of any size.

        Args:
          x: an array, or a pytree of arrays, like the example of `export`, with the examples along axis 0.

        Raises:
          TypeError, ValueError: `x` has another structure, dtype or shape than the example.

        Cost:
          The first call with a batch size compiles the program for it.
        """
        found, wanted = (str(jax.tree.structure(tree)) for tree in (x, self._structure))
        if found != wanted:
            raise TypeError(f"load_exported: x has structure {found}, but the program takes {wanted}.")
        for (path, given), like in zip(jax.tree.leaves_with_path(x), self._inputs, strict=True):
            array = given if hasattr(given, "dtype") else np.asarray(given)
            if array.dtype != like.dtype or array.shape[1:] != like.shape[1:] or not array.ndim:
                wanted = f"{like.dtype} of shape (batch, {', '.join(map(str, like.shape[1:]))})"
                raise TypeError(f"load_exported: `{leaf_name('x', path)}` is {describe(given)}; pass {wanted}.")
        return self._call(self._arrays, x)

    def __repr__(self) -> str:
        return f"Exported({self.description['model']}: {', '.join(self.description['outputs'])})"


def load_exported(path: str | os.PathLike[str]) -> Exported:
    """Read a program that `plurax.ensemble.export` wrote, with JAX and flatbuffers alone: it has no Python code.

    Args:
      path: the file.

    Returns:
      An `Exported`: a function of a batch that returns a dict of arrays. On the platform where it was exported, they
      equal those of `predict` up to rounding (1e-6): XLA may fuse the exported program in another way.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not such a file, or it is damaged.
      ModuleNotFoundError: the extra is missing: `pip install 'plurax[export]'`.

    Cost:
      The file is read once, and its checksum is computed.

    Source:
      `jax.export`.

    Examples:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, export
      >>> from plurax.transforms.program import load_exported
      >>> ens = Ensemble.create(lambda rngs: nnx.Linear(4, 1, rngs=rngs), 5, seed=0)
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     outputs = {"kind": "regression", "outputs": ("mean", "variance"), "platforms": ("cpu",)}
      ...     export(ens, f"{directory}/model.plurax", jnp.ones((1, 4)), **outputs)
      ...     load_exported(f"{directory}/model.plurax")
      Exported(Ensemble of 5 × Linear, 5 parameters each: mean, variance)
    """
    check_library("load_exported")
    path = Path(path)
    data = memoryview(path.read_bytes())
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise ValueError(f"load_exported: {path} is not a program that plurax.ensemble.export wrote.")
    try:
        start = len(_MAGIC) + 8
        end = start + int.from_bytes(data[len(_MAGIC) : start], "little")
        header = json.loads(bytes(data[start:end]))
        content = data[end:]
        if zlib.crc32(content) != header["checksum"]:
            raise ValueError("its bytes are not those that were written")
        program = export.deserialize(bytearray(content[: header["program"]]))
        arrays, at = [], header["program"]
        for entry in header["arrays"]:
            dtype = jnp.dtype(entry["dtype"])
            size = dtype.itemsize * int(np.prod(entry["shape"], dtype=np.int64))
            arrays.append(np.frombuffer(content[at : at + size], dtype).reshape(entry["shape"]))
            at += size
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"load_exported: {path} is damaged: {error}.") from error
    return Exported(program, arrays, header["description"])


def check_library(api: str) -> None:
    """Raise if the library is missing with which `jax.export` writes and reads programs."""
    try:
        importlib.import_module("flatbuffers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{api}: it needs flatbuffers; install it with: pip install 'plurax[export]'"
        ) from error


def write_exported(path: Path, program: export.Exported, arrays: Sequence[Any], description: dict[str, Any]) -> None:
    """Write a program whose first argument is a list of these arrays, atomically."""
    held = [np.ascontiguousarray(jax.random.key_data(x) if is_key(x) else x) for x in arrays]
    serialized = bytes(program.serialize(vjp_order=0))
    pieces = [serialized, *(x.tobytes() for x in held)]
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    entries = [{"shape": list(x.shape), "dtype": str(x.dtype)} for x in held]
    header = {"description": description, "program": len(serialized), "arrays": entries, "checksum": checksum}
    encoded = json.dumps(header).encode()
    write_atomically(path, [_MAGIC, len(encoded).to_bytes(8, "little"), encoded, *pieces])
