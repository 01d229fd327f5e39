"""What `fit` tells while it runs: the text of the progress bar, and that a long compilation is under way."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

# The seconds after which a user is told that the first step is being compiled.
_LONG = 5.0


@contextmanager
def told_of(text: str) -> Iterator[None]:
    """Print a text, with and without a progress bar, if the body takes long."""
    timer = threading.Timer(_LONG, tqdm.write, (text,), {"file": sys.stderr})
    timer.daemon = True
    if jax.process_index() == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def range_of_loss(metrics: Mapping[str, Any], steps: int) -> str:
    """Return the range of the loss over the members that train, after the last of several steps."""
    loss, stopped = (np.asarray(metrics[name]) for name in ("loss", "stopped"))
    if steps > 1:
        loss, stopped = loss[:, -1], stopped[:, -1]
    # Stopped members are left out: one that stopped with a large loss would keep the range wide to the end.
    return range_of("loss", loss[stopped <= 0])


def range_of(name: str, values: np.ndarray) -> str:
    """Return the range of the finite values, and how many others there are, as words."""
    values = values.astype(np.float64)
    finite = values[np.isfinite(values)]
    others = values.size - finite.size
    ends = [f"{finite.min():.4f}", f"{finite.max():.4f}"][: values.size] if finite.size else []
    return f"{name} {' to '.join(ends)}".rstrip() + (f", {others} not finite" if others else "")
