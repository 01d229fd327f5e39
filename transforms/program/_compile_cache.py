"""JAX's persistent compilation cache, with all the settings it needs to be of use: `enable_compile_cache`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import jax

from .._core.arguments import describe
from .._core.compat import forget_cache

_DIRECTORY = "jax_compilation_cache_dir"
# JAX records these events for its listeners.
_REQUEST = "/jax/compilation_cache/compile_requests_use_cache"
_HIT = "/jax/compilation_cache/cache_hits"


class CompileCache:
    """The settings that `enable_compile_cache` made, and how often the cache was of use.

    As a context manager it restores the earlier settings at the end.

    Attributes:
      directory: where the programs are.
      hits: the number of programs that were found there since.
      misses: the number that were not, and were compiled.

    Examples:
      >>> import tempfile, jax
      >>> from plurax.transforms.program import enable_compile_cache
      >>> with tempfile.TemporaryDirectory() as directory, enable_compile_cache(directory) as cache:
      ...     y = jax.jit(lambda x: 3.0 * x)(2.0)
      >>> cache.hits, cache.misses
      (0, 1)
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.hits = self._requests = 0
        self._set = {
            "jax_enable_compilation_cache": True,
            # A new string object: `disable` tells by identity whether a later cache has set the same directory.
            _DIRECTORY: os.fsdecode(os.fsencode(directory)),
            # By default what compiles in less than a second is not kept.
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            # Zero would let the file system choose a least size; -1 means none.
            "jax_persistent_cache_min_entry_size_bytes": -1,
            # By default one of XLA's own caches is put into the directory, which makes its path a part of each
            # program's key: moved, or mounted elsewhere, the directory would be of no use.
            "jax_persistent_cache_enable_xla_caches": "none",
        }
        self._before: dict[str, Any] | None = {name: getattr(jax.config, name) for name in self._set}
        _update(self._set)
        jax.monitoring.register_event_listener(self._count)

    @property
    def misses(self) -> int:
        """Return the number of programs that were compiled."""
        return self._requests - self.hits

    def disable(self) -> None:
        """Restore the earlier settings, and count no more.

        Raises:
          ValueError: the directory has been set since, by a later cache or otherwise; nothing changes then.
        """
        if self._before is None:
            return
        now = getattr(jax.config, _DIRECTORY)
        if now is not self._set[_DIRECTORY]:
            raise ValueError(f"CompileCache.disable: the cache in use, at {now!r}, was set later; disable that first.")
        before, self._before = self._before, None
        jax.monitoring.unregister_event_listener(self._count)
        _update(before)

    def _count(self, event: str, **_: Any) -> None:
        # Listeners hear of every compilation of the process, of other directories too.
        if getattr(jax.config, _DIRECTORY) == str(self.directory):
            self._requests += event == _REQUEST
            self.hits += event == _HIT

    def __enter__(self) -> CompileCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()

    def __repr__(self) -> str:
        return f"CompileCache({str(self.directory)!r}, hits={self.hits}, misses={self.misses})"


def enable_compile_cache(directory: str | os.PathLike[str]) -> CompileCache:
    """Keep every program that is compiled from now on in a directory, for later processes too.

    As `jax.config.update("jax_compilation_cache_dir", directory)`, but it also makes the other settings that it needs,
    works when something has been compiled already, and counts. It is for the whole process, so these settings change:
    `jax_enable_compilation_cache` and `jax_compilation_cache_dir`; `jax_persistent_cache_min_compile_time_secs` and
    `jax_persistent_cache_min_entry_size_bytes`, such that quick and small programs are kept (by default none that
    compiles in under a second is); and `jax_persistent_cache_enable_xla_caches`, such that the directory may be moved
    or mounted elsewhere (on a GPU this leaves out XLA's store of autotuning results, which programs share).

    A program is found by what it computes: by its operations, shapes and constants, by the versions of JAX and XLA, and
    by the device. So nothing in there is ever out of date, but every process traces and lowers each program to find it;
    `aot` does without. Programs with callbacks (`jax.debug.print`) are kept as of jax 0.11 only.

    The directory holds code that JAX runs: use none that somebody whom you do not trust may write to. It grows until
    you delete it, which you may at any time. If an entry is damaged, JAX warns in each process, and compiles; it does
    not replace it, so delete it.

    Args:
      directory: a directory; made if it is missing. `~` is your home.

    Returns:
      The settings, with the numbers of hits and misses. It is a context manager too.

    Raises:
      TypeError: `directory` is not a path.
      ValueError: `directory` is empty, or is a URL.
      OSError: it cannot be made, or not be written to.

    Cost:
      Compiling becomes reading. Tracing and lowering stay: of the time to the first result in a new process 1/3 for a
      loop of 200 steps, 2/9 for the gradient of a small CNN.

    Source:
      JAX, "Persistent compilation cache"; MindSpore's `compile_cache_path`.

    Examples:
      >>> import tempfile, jax
      >>> from plurax.transforms.program import enable_compile_cache
      >>> directory = tempfile.TemporaryDirectory()
      >>> cache = enable_compile_cache(directory.name)
      >>> y = jax.jit(lambda x: 2.0 * x)(1.0)
      >>> cache.hits, cache.misses
      (0, 1)
      >>> cache.disable()
      >>> directory.cleanup()
    """
    path = checked_directory("enable_compile_cache", "directory", directory)
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):  # raises where nothing can be written, of which JAX would only warn
        pass
    return CompileCache(path)


def checked_directory(api: str, name: str, directory: Any) -> Path:
    """Return the absolute path that `directory` names; raise if it is not a path, is empty, or is a URL."""
    if not isinstance(directory, (str, os.PathLike)) or isinstance(os.fspath(directory), bytes):
        raise TypeError(f"{api}: {name} must be the path of a directory, but got {describe(directory)}.")
    if not os.fspath(directory) or "://" in os.fspath(directory):
        raise ValueError(f"{api}: {name} must be a directory of the file system, but got {os.fspath(directory)!r}.")
    return Path(directory).expanduser().absolute()


def _update(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    forget_cache()  # JAX opens the cache at the first compilation, and would keep to the directory it had then
