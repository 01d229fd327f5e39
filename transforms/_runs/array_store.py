"""Read named NumPy arrays of a directory by tensorstore: zarr in an OCDBT database, in which earlier versions wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


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
