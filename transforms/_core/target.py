"""The device that programs are compiled for: one of this process, unless `compile_for` compiles for another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

_DEVICE: ContextVar[Any] = ContextVar("device", default=None)


def device() -> Any | None:
    """Return the device that `compile_for` compiles for, or None."""
    return _DEVICE.get()


def platform() -> str:
    """Return the platform that programs are compiled for: "cpu", "gpu" or "tpu"."""
    chosen = device()
    name = jax.default_backend() if chosen is None else chosen.platform
    return "gpu" if name in ("cuda", "rocm") else name


@contextmanager
def compiling_for(chosen: Any) -> Iterator[None]:
    """Compile for a device that need not be here. A program traced inside must not be used for another device."""
    token = _DEVICE.set(chosen)
    try:
        yield
    finally:
        _DEVICE.reset(token)
