"""Files of named arrays in the safetensors format, written atomically, with a checksum that detects damage.

The safetensors library checks that a file is well formed, but not that its numbers are those that were written. So the
metadata of our files has a checksum of all bytes of the file, computed with zeros in place of the checksum's digits.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .._core.version import __version__
from .._files.atomic_write import write_atomically
from .._files.errors import Damaged, OtherVersion
from .._files.reading import open_file

_ATTEMPTS = 100  # each but the first needs a writer that has replaced the file during the one before
_DIGITS = b"00000000"
_METADATA = {"plurax.format": "1", "plurax.checksum": _DIGITS.decode()}
_CHECKSUM = re.compile(rb'"plurax\.checksum"\s*:\s*"([0-9a-f]{8})"')
DTYPES = {
    "BOOL": "bool",
    **{f"{kind}{bits}": f"{name}{bits}" for kind, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64"},
}


def write(api: str, path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a file atomically: an existing file is replaced after the new one is complete and on the disk."""
    save = _library(api).numpy.save
    # In C order, since the library writes an array's memory and ignores its strides.
    data = memoryview(save({name: np.asarray(x, order="C") for name, x in arrays.items()}, _METADATA))
    match = _CHECKSUM.search(data)
    assert match is not None
    start, end = match.span(1)
    write_atomically(path, (data[:start], b"%08x" % zlib.crc32(data), data[end:]))


@contextmanager
def reading(api: str, path: Path) -> Iterator[Any]:
    """Open a file with the library; raise if it is damaged, or written by a later version."""
    library = _library(api)
    with _opened(api, library, path) as (raw, file):
        metadata = file.metadata() or {}
        if any("plurax" in name for name in metadata):  # files of other libraries have no checksum
            if metadata.keys() != _METADATA.keys() or not _is_as_saved(raw):
                raise _damaged(api, path, "its bytes are not those that were saved")
            if (version := metadata["plurax.format"]) != _METADATA["plurax.format"]:
                this = f"version {version} of the format, but plurax {__version__} reads version 1"
                raise OtherVersion(f"{api}: {path} has {this}; use a release that reads version {version}.")
        yield file


@contextmanager
def _opened(api: str, library: Any, path: Path) -> Iterator[tuple[BinaryIO, Any]]:
    """Open a file twice, the second time with the library; both are the same, also if it is being replaced."""
    error: Exception = BlockingIOError(f"{api}: {path} is replaced faster than it can be read.")
    for _ in range(_ATTEMPTS):
        with open_file(f"{api}: {path}", path) as raw:
            try:
                file = library.safe_open(path, "np")
            except FileNotFoundError as missing:
                # The library says so of every file that it cannot open; the system says why: too many are open.
                open_file(f"{api}: {path}", path).close()
                error = missing
                continue
            except (OSError, MemoryError):
                raise
            except Exception as fault:  # the library's own, whose class is not public
                if not _is_at(path, raw):
                    continue
                raise _damaged(api, path, f"it is not a complete safetensors file ({fault})") from fault
            with file:
                if _is_at(path, raw):
                    yield raw, file
                    return
    raise error


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Return whether an open file is the one that is at a path now."""
    return os.path.samestat(os.fstat(file.fileno()), os.stat(path))


def read_array(api: str, file: Any, path: Path, name: str) -> np.ndarray:
    """Return one array of an open file; raise if NumPy lacks its dtype."""
    kind = file.get_slice(name).get_dtype()
    if kind not in DTYPES:
        raise ValueError(f"{api}: `{name}` of {path} has dtype {kind}, which cannot be read; convert it before saving.")
    return file.get_tensor(name)


def _library(api: str) -> Any:
    """Return the safetensors library, which is an extra."""
    try:
        import safetensors.numpy
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{api} needs safetensors; install it with pip install 'plurax[files]'.") from error
    return safetensors


def _is_as_saved(file: BinaryIO) -> bool:
    """Return whether a file's checksum matches its bytes, with zeros in place of the checksum's digits."""
    # A file is 8 bytes with the size of its header, the header (JSON, with the metadata), and the arrays.
    match = _CHECKSUM.search(file.read(int.from_bytes(file.read(8), "little")))
    if match is None:
        return False
    start = 8 + match.start(1)
    file.seek(0)
    found = zlib.crc32(_DIGITS, zlib.crc32(file.read(start)))
    file.seek(start + len(_DIGITS))
    while block := file.read(1 << 24):
        found = zlib.crc32(block, found)
    return match[1] == b"%08x" % found


def _damaged(api: str, path: Path, fact: str) -> Damaged:
    return Damaged(f"{api}: {path} is damaged: {fact}; restore a copy, or save it again.")
