"""Store named NumPy arrays in a directory, with tensorstore: zarr in an OCDBT database, the format of orbax.

Orbax writes NumPy arrays only in the first of several processes, and silently nothing in the others. Here each process
writes and reads independently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def put(directory: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a new directory; if one fails, write none.

    Raises:
      OSError: the disk is full, or fails in another way.
    """
    try:
        _put(directory, arrays)
    except ValueError as error:
        # Tensorstore raises `ValueError` for every error, with the code of the operating system in its text.
        if code := re.search(r"os_error_code='(\d+)'", str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(directory)) from error
        raise


def _put(directory: Path, arrays: Mapping[str, np.ndarray]) -> None:
    import tensorstore as ts

    context, transaction = ts.Context(), ts.Transaction()
    directory.mkdir(parents=True)
    stores = [
        ts.open(
            _spec(directory, name),
            create=True,
            dtype=ts.dtype(array.dtype),
            shape=array.shape,
            chunk_layout=ts.ChunkLayout(chunk_shape=array.shape),  # one chunk: arrays are always read whole
            context=context,
            transaction=transaction,
        )
        for name, array in arrays.items()
    ]
    # Start all writes before waiting for any, so that they run concurrently.
    for written in [store.result().write(array) for store, array in zip(stores, arrays.values(), strict=True)]:
        written.result()
    transaction.commit_sync()


def get(directory: Path, names: list[str]) -> dict[str, np.ndarray]:
    """Return the arrays with these names; other arrays are not read."""
    import tensorstore as ts

    # One context for all arrays: their reads share its cache of the database, and its threads.
    context = ts.Context()
    stores = [ts.open(_spec(directory, name), open=True, read=True, context=context) for name in names]
    reads = [store.result().read() for store in stores]
    return {name: read.result() for name, read in zip(names, reads, strict=True)}


def _spec(directory: Path, name: str) -> dict[str, Any]:
    """Return tensorstore's spec of an array; all arrays of a directory share a database, so there are few files."""
    base = {"driver": "file", "path": f"{directory}/"}
    return {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
