"""`load_exported` and the file that it reads: a program of `jax.export`, its arrays, and a description."""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from ..._core.arguments import describe, leaf_name
from ..._core.prng import is_key
from ..._files.document import read_document, write_document
from ..._files.errors import Damaged
from ..._files.schema import decode

_FORMAT = "plurax exported"
# Operations that call code outside the program. These targets are parts of XLA, and of the libraries of numerics behind
# `jax.numpy.linalg` and random numbers. Others, which are refused unless they are allowed by name, may reach Python:
# among them are JAX's callbacks, whose operation holds the address of a function.
_CALL = re.compile(r'\w*hlo\.(?:custom_call\w*"?\s*(?:@("(?:[^"\\]|\\.)*"|[\w$.-]+))?|(send|recv|infeed|outfeed)\b)')
_NATIVE = re.compile(
    r"(lapack|cusolver|cusparse|cublas|hipsolver|hipsparse|hipblas)_\w+|(cu|hip)_\w+|SPMD\w+|Sharding|Qr|Eigh|"
    r"LuDecomposition|ProductOfElementaryHouseholderReflectors|(Approx)?TopK|AllocateBuffer|shape_assertion|"
    r"annotate_device_placement|stablehlo\.dynamic_\w+|tpu_custom_call|mosaic_gpu\w*|__cu[\w$]+|__gpu\$xla\.gpu\.\w+|xla\.gpu\.\w+"
)


@dataclass(frozen=True)
class _Array:
    """An array in the file."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _Description:
    """What the file says of itself; see `Exported.description`."""

    model: str
    kind: str
    inputs: list[str]
    outputs: dict[str, str]
    platforms: list[str]
    versions: dict[str, str]


@dataclass(frozen=True)
class _Header:
    """The description, the number of bytes of the program, and the arrays that follow it."""

    description: _Description
    program: int
    arrays: list[_Array]


class Exported:
    """A program that `plurax.ensemble.export` wrote: a function of a batch that returns a dict of arrays.

    `load_exported` makes it.

    Args:
      program: the program, whose first argument is a list of arrays.
      arrays: these arrays.
      description: as below.
      custom_calls: as below.

    Attributes:
      description: what the file says of itself: the model, its inputs and outputs, platforms and versions.
      custom_calls: the names of the code outside the program that it calls, such as that of a decomposition.

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

    def __init__(
        self,
        program: export.Exported,
        arrays: list[Any],
        description: dict[str, Any],
        custom_calls: Sequence[str] = (),
    ) -> None:
        self.description, self.custom_calls = description, tuple(custom_calls)
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


def load_exported(path: str | os.PathLike[str], *, allow_custom_calls: Sequence[str] = ()) -> Exported:
    """Read a program that `plurax.ensemble.export` wrote, with JAX and flatbuffers alone: it has no Python code.

    Args:
      path: the file.
      allow_custom_calls: names of code outside the program that it may call although the code may reach Python. Allow
        only what you have registered yourself, for files that you trust.

    Returns:
      An `Exported`: a function of a batch that returns a dict of arrays. On the platform where it was exported, they
      equal those of `predict` up to rounding (1e-6): XLA may fuse the exported program in another way.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not such a file, is damaged, or of another version; it calls code that may reach Python, and is
        not in `allow_custom_calls`.
      OSError: it cannot be read.
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
    what = f"load_exported: {path}"
    found = read_document(what, path, _FORMAT, 1)
    try:
        header = decode(_Header, found.entries, "header")
        program = _deserialized(found.content[: header.program])
        arrays, at = [], header.program
        for like, array in zip(program.in_avals, header.arrays, strict=False):
            if (tuple(like.shape), str(like.dtype)) != (array.shape, array.dtype):
                raise ValueError(
                    f"an array of shape {array.shape} and dtype {array.dtype} is not what the program takes"
                )
            size = like.dtype.itemsize * math.prod(array.shape)
            arrays.append(np.frombuffer(found.content[at : at + size], like.dtype).reshape(array.shape))
            at += size
        if at != len(found.content) or len(arrays) != len(header.arrays):
            raise ValueError("its arrays are not those that the program takes")
        exported = Exported(program, arrays, asdict(header.description), custom_calls(program))
    except ValueError as error:
        raise Damaged(f"{what} is damaged: {error}.") from error
    allowed = set(allow_custom_calls)
    if others := [x for x in exported.custom_calls if not _NATIVE.fullmatch(x) and x not in allowed]:
        remedy = f"if you trust the file, and this code is yours, pass allow_custom_calls={others}"
        raise ValueError(f"{what} calls code that may reach Python: {', '.join(others)}; {remedy}.")
    return exported


def custom_calls(program: export.Exported) -> list[str]:
    """Return the names of the code outside a program that it calls, in its order; those without a name are "?"."""
    text = program.mlir_module()
    names = [(match[1] or match[2] or "?").strip('"') for match in _CALL.finditer(text)]
    return list(dict.fromkeys(names))


def _deserialized(data: memoryview) -> export.Exported:
    try:
        return export.deserialize(bytearray(data))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # JAX, flatbuffers and MLIR raise many types
        raise ValueError(f"its program cannot be read ({type(error).__name__}: {error})") from error


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
    held = [np.asarray(jax.random.key_data(x) if is_key(x) else x, order="C") for x in arrays]
    serialized = bytes(program.serialize(vjp_order=0))
    of_arrays = [_Array(x.shape, str(x.dtype)) for x in held]
    header = _Header(_Description(**description), len(serialized), of_arrays)
    write_document(path, _FORMAT, 1, asdict(header), [serialized, *(memoryview(x.tobytes()) for x in held)])
