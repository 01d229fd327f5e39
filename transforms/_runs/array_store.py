"""Named NumPy arrays in a directory: zarr in an OCDBT database, which is how orbax stores them, by tensorstore itself.

Orbax writes NumPy arrays in the first of several processes only, and in the others nothing, in silence. Here a process
writes and reads on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def put(directory: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a new directory, all of them or, if one fails, none."""
    import tensorstore as ts

    context, transaction = ts.Context(), ts.Transaction()
    directory.mkdir(parents=True)
    stores = [
        ts.open(
            _spec(directory, name),
            create=True,
            dtype=ts.dtype(array.dtype),
            shape=array.shape,
            chunk_layout=ts.ChunkLayout(chunk_shape=array.shape),  # one chunk: no array is ever read in part
            context=context,
            transaction=transaction,
        )
        for name, array in arrays.items()
    ]
    # Every write is started before any is waited for: they run side by side.
    for written in [store.result().write(array) for store, array in zip(stores, arrays.values(), strict=True)]:
        written.result()
    transaction.commit_sync()


def get(directory: Path, names: list[str]) -> dict[str, np.ndarray]:
    """Return some of the arrays of a directory, and read no others."""
    import tensorstore as ts

    # One context for all arrays: their reads share its cache of the database, and its threads.
    context = ts.Context()
    stores = [ts.open(_spec(directory, name), open=True, read=True, context=context) for name in names]
    reads = [store.result().read() for store in stores]
    return {name: read.result() for name, read in zip(names, reads, strict=True)}


def _spec(directory: Path, name: str) -> dict[str, Any]:
    """Return where tensorstore finds an array; all of a directory are in one database, so they are few files."""
    base = {"driver": "file", "path": f"{directory}/"}
    return {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
