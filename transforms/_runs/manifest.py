"""`Manifest`: what a checkpoint holds. Everything that is read from one is declared here, with its type."""

from __future__ import annotations

import base64
import hashlib
import math
import re
import uuid
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.prng import is_key
from .._files.document import document, read_document
from .._files.errors import Damaged
from .._files.reading import open_file, size_of
from .._files.schema import decode, with_arrays
from .._models.split_model import dotted

MANIFEST, NUMBERS, HISTORY = "plurax.json", "numbers.bin", "history.bin"
_FORMAT, _VERSION = "plurax checkpoint", 5
_CHECKSUM, _OWNER, _WEIGHT = np.dtype(np.uint32), np.dtype(np.int32), np.dtype(np.float64)
# Of the data of an array; NumPy would understand more, among them what is no number.
_DTYPES = {
    "bool", "complex128", "complex64", "float16", "float32", "float64", "bfloat16", "uint64", "int64",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (2, 4, 8, 16, 32)),
    *(name for name in dir(jnp) if name.startswith(("float8_", "float4_", "float6_"))),
}  # fmt: skip
_NDIM = 32
_MOST = 2**31 - 1


@dataclass(frozen=True)
class StoredArray:
    """An array of one row: of each member, or of all members together.

    Attributes:
      key: its path in the pytree, by which it is found.
      path: the same in words. Two paths may have one text: `a.b` may be an entry of `a`, or an entry named "a.b".
      shape: its shape.
      dtype: its dtype; for an array of keys "key<...>" with their implementation, which the dtype of the data omits.
      stored: the shape of its data in the file.
      stored_dtype: their dtype.
    """

    key: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    stored: tuple[int, ...]
    stored_dtype: str

    def __post_init__(self) -> None:
        sizes = [*self.shape, *self.stored]
        if self.stored_dtype not in _DTYPES or max(map(len, (self.shape, self.stored))) > _NDIM:
            raise ValueError(f"`{self.path[:60]}` has dtype {self.stored_dtype[:60]!r} and {len(self.stored)} axes")
        if min(sizes, default=0) < 0 or math.prod(x for x in self.stored if x) > _MOST**2:
            raise ValueError(f"`{self.path[:60]}` has shape {self.stored}")

    @property
    def nbytes(self) -> int:
        """Return the number of its bytes."""
        return math.prod(self.stored) * jnp.dtype(self.stored_dtype).itemsize


@dataclass(frozen=True)
class Part:
    """Arrays that lie in one file, row by row.

    Attributes:
      rows: the number of rows: that of members, or one for all of them.
      arrays: the arrays of a row.
      checksums: CRC-32 of the arrays of each row, uint32 (rows, arrays).
    """

    rows: int
    arrays: tuple[StoredArray, ...]
    checksums: np.ndarray

    def __post_init__(self) -> None:
        each = Counter(array.key for array in self.arrays)
        if twice := [key for key, count in each.items() if count > 1]:
            raise ValueError(f"there are two arrays {twice[0]}")
        if self.checksums.shape != (self.rows, len(self.arrays)) or self.checksums.dtype != _CHECKSUM:
            raise ValueError(f"{self.rows} rows of {len(self.arrays)} arrays have {self.checksums.shape} checksums")

    @property
    def row_bytes(self) -> int:
        """Return the number of bytes of a row."""
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True)
class Start:
    """A state from which a run has started; see `Identity`. Weights are some numbers of each member, (members, n)."""

    step: int
    device: str | None
    digests: dict[str, str]
    weights: np.ndarray
    ulp: float

    def __post_init__(self) -> None:
        if self.weights.ndim != 2 or self.weights.dtype != _WEIGHT:
            raise ValueError(f"weights have shape {self.weights.shape} and dtype {self.weights.dtype}")


@dataclass(frozen=True)
class StepProgram:
    """The program of a step: the shapes of a batch, and a digest of the operations for them."""

    shapes: list[Any]
    digest: str


@dataclass(frozen=True)
class RunRecord:
    """What identifies a run; see `Identity`."""

    libraries: dict[str, str]
    starts: list[Start]
    batches: dict[str, Any]
    program: StepProgram | None


@dataclass(frozen=True)
class TrainerSettings:
    """The settings of a `Trainer`: the name of its optimizer, its hyperparameters, and the fields of its execution."""

    optimizer: str | None
    hyperparams: dict[str, Any]
    strategy: str
    chunk_size: int | None
    products: bool
    devices: int


@dataclass(frozen=True)
class About:
    """What a checkpoint says besides its arrays.

    Attributes:
      step: the step of a training state; None for an ensemble.
      best_by: what the best parameters of early stopping are best by.
      run: what identifies the run that wrote it.
      settings: those of the trainer.
      position: the state of the iterator over batches in each process.
      ledger: what a privacy accountant needs.
    """

    step: int | None = None
    best_by: str = ""
    run: RunRecord | None = None
    settings: TrainerSettings | None = None
    position: list[dict[str, Any]] | None = None
    ledger: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not 0 <= (self.step or 0) <= _MOST:
            raise ValueError(f"`step` is {self.step}")
        for state in self.position or ():
            if state.keys() not in ({"bytes"}, {"value"}):
                raise ValueError("`position` has a state that is neither bytes nor a value")
            if "bytes" in state:
                base64.b64decode(str(state["bytes"]).encode(), validate=True)


@dataclass(frozen=True)
class _Numbers:
    """The file with the arrays of a manifest: its size, and its checksum, SHA-256."""

    bytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
      size: the number of members.
      owners: for each member the process that has written it.
      parts: its arrays by the names of their parts.
      history: the columns of a history.
      about: the rest.
      save: a random number, so that two saves of one state differ.
    """

    size: int
    owners: np.ndarray
    parts: dict[str, Part]
    history: Part | None = None
    about: About = field(default_factory=About)
    save: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        if self.owners.shape != (self.size,) or self.owners.dtype != _OWNER or self.owners.min(initial=0) < 0:
            raise ValueError(f"{self.size} members have {self.owners.size} owners")
        for name, part in self.parts.items():
            if not re.fullmatch("[a-z_ ]+", name):
                raise ValueError(f"{name!r} is no name of a part")
            if part.rows not in (1, self.size):
                raise ValueError(f"`{name}` has {part.rows} rows for {self.size} members")
        if self.history is not None and self.history.rows != 1:
            raise ValueError(f"the history has {self.history.rows} rows")

    @cached_property
    def places(self) -> list[int]:
        """Return for each member its place in the files of its owner."""
        counts = Counter[int]()
        places = []
        for owner in self.owners.tolist():
            places.append(counts[owner])
            counts[owner] += 1
        return places

    @cached_property
    def files(self) -> dict[str, int]:
        """Return the names of all files besides the manifest, with their sizes."""
        sizes = {HISTORY: self.history.row_bytes} if self.history is not None else {}
        for owner, count in Counter(self.owners.tolist()).items():
            for name, part in self.parts.items():
                written = count if part.rows == self.size else int(self.owners[0] == owner)
                sizes[file_of(owner, name)] = written * part.row_bytes
        return sizes

    def write(self, directory: Path) -> None:
        """Write the manifest into a directory that nobody else sees yet: JSON, and a file with its arrays."""
        entries, arrays = with_arrays(asdict(self))
        content = b"".join(arrays)
        (directory / NUMBERS).write_bytes(content)
        numbers = _Numbers(len(content), hashlib.sha256(content).hexdigest())
        with (directory / MANIFEST).open("wb") as file:
            file.writelines(document(_FORMAT, _VERSION, {"numbers": asdict(numbers), **entries}))

    @staticmethod
    def read(what: str, directory: Path) -> tuple[Manifest, str]:
        """Return the manifest of a checkpoint and its checksum; errors are those of `read_document`."""
        path = directory / MANIFEST
        found = read_document(what, path, _FORMAT, _VERSION, within=directory, of_json=True)
        try:
            numbers = decode(_Numbers, found.entries.pop("numbers", None), "numbers")
            with open_file(what, directory / NUMBERS, directory) as file:
                content = file.read(numbers.bytes) if size_of(file) == numbers.bytes else b""
            if hashlib.sha256(content).hexdigest() != numbers.checksum:
                raise ValueError(f"the checksum of {NUMBERS} does not match its bytes")
            return decode(Manifest, found.entries, "manifest", memoryview(content)), found.checksum
        except FileNotFoundError as error:
            raise Damaged(f"{what} is damaged: {NUMBERS} is missing.") from error
        except Damaged:
            raise
        except ValueError as error:
            raise Damaged(f"{what} is damaged: {MANIFEST}: {error}.") from error


def file_of(owner: int, part: str) -> str:
    """Return the name of the file of a part that a process has written."""
    return f"arrays/{owner}/{part}.bin"


def outline(tree: Any, *, drop_axis: bool = False) -> list[StoredArray]:
    """Return the arrays of one row of a pytree of arrays, in the order of its leaves.

    Args:
      tree: the arrays.
      drop_axis: whether they have an axis 0 of rows.
    """

    def of_leaf(path: Any, leaf: Any) -> StoredArray:
        leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)  # a variable of one model may hold a number
        # Keys are stored as their data, whose dtype does not determine the implementation, so that is stored by name.
        data = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
        dtype = f"key<{jax.random.key_impl(jnp.empty((), leaf.dtype))}>" if is_key(leaf) else str(leaf.dtype)
        shape, stored = (tuple(x.shape[1:] if drop_axis else x.shape) for x in (leaf, data))
        return StoredArray(jax.tree_util.keystr(path), dotted(path), shape, dtype, stored, str(data.dtype))

    return [of_leaf(path, leaf) for path, leaf in jax.tree.leaves_with_path(tree)]
