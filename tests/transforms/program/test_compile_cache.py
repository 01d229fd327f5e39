"""JAX's persistent cache is used, and its hits are reported. This file is also the script that processes run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plurax.transforms.program import aot, enable_compile_cache

X = np.cos(np.arange(12.0)).reshape(3, 4).astype(np.float32)
SETTINGS = [
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_enable_xla_caches",
]


def settings() -> list[Any]:
    return [getattr(jax.config, name) for name in SETTINGS]


def run(factor: float = 2.0) -> jax.Array:
    """Run a new function, which JAX must compile or find in the cache each time."""
    return jax.jit(lambda x: jnp.sin(x) * factor)(X)


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("jit_*-cache"))


def main(first: str, directory: str) -> None:
    """Compile without a cache, then with another, then with the given one."""
    run()
    with enable_compile_cache(first):
        run()
        cache = enable_compile_cache(directory)
        out = run(), run(3.0)
        print(json.dumps([cache.hits, cache.misses, np.asarray(out).tolist()]))  # noqa: T201 (read by the test)
        cache.disable()


def in_a_process(*directories: Path) -> list[Any]:
    command = [sys.executable, __file__, *map(str, directories)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_second_process_finds_all_programs_even_in_a_moved_directory(tmp_path):
    hits, misses, first = in_a_process(tmp_path / "other", tmp_path / "cache")
    assert (hits, misses) == (0, 2)
    shutil.move(tmp_path / "cache", tmp_path / "moved")
    hits, misses, second = in_a_process(tmp_path / "other", tmp_path / "moved")
    assert (hits, misses) == (2, 0)
    assert first == second


def test_hits_and_misses_are_counted(tmp_path):
    with enable_compile_cache(tmp_path) as cache:
        assert (cache.hits, cache.misses) == (0, 0)
        wanted = run()
        assert (cache.hits, cache.misses, len(entries(tmp_path))) == (0, 1, 1)
        np.testing.assert_array_equal(run(), wanted)
        assert (cache.hits, cache.misses, len(entries(tmp_path))) == (1, 1, 1)
        run(3.0)
        assert (cache.hits, cache.misses, len(entries(tmp_path))) == (1, 2, 2)
    run()
    assert repr(cache) == f"CompileCache({str(tmp_path)!r}, hits=1, misses=2)"


def test_a_program_with_a_callback_calls_its_own(tmp_path):
    with enable_compile_cache(tmp_path) as cache:
        for fun in (np.sin, np.cos):
            np.testing.assert_allclose(jax.jit(lambda x, fun=fun: jax.pure_callback(fun, x, x))(X), fun(X), rtol=1e-6)
    kept = jax.__version_info__ >= (0, 11)
    assert (cache.hits, cache.misses, len(entries(tmp_path))) == ((1, 1, 1) if kept else (0, 2, 0))


def test_the_settings_are_set_and_restored(tmp_path):
    before = settings()
    cache = enable_compile_cache(tmp_path)
    assert settings() == [True, str(tmp_path), 0.0, -1, "none"]
    assert cache.directory == tmp_path
    cache.disable()
    assert settings() == before
    cache.disable()
    with pytest.raises(RuntimeError, match="inside"), enable_compile_cache(tmp_path):
        raise RuntimeError("inside")
    assert settings() == before


def test_only_programs_in_its_own_directory_are_counted(tmp_path):
    with enable_compile_cache(tmp_path / "a") as outer:
        run()
        with enable_compile_cache(tmp_path / "b") as inner:
            run()
            run()
        run()
    assert [(x.hits, x.misses) for x in (outer, inner)] == [(1, 1), (1, 1)]
    assert len(entries(tmp_path / "a")) == len(entries(tmp_path / "b")) == 1


def test_enabling_twice_equals_once(tmp_path):
    with enable_compile_cache(tmp_path) as outer, enable_compile_cache(tmp_path) as inner:
        run()
        run()
    assert [(x.hits, x.misses) for x in (outer, inner)] == [(1, 1), (1, 1)]


def test_an_inactive_cache_cannot_be_disabled(tmp_path):
    before = settings()
    first = enable_compile_cache(tmp_path / "a")
    second = enable_compile_cache(tmp_path / "b")
    with pytest.raises(ValueError, match="CompileCache.disable: the cache at '.*b' was set later; disable"):
        first.disable()
    assert settings()[1] == str(tmp_path / "b")
    second.disable()
    first.disable()
    assert settings() == before


def test_of_two_caches_on_one_directory_the_first_cannot_be_disabled_first(tmp_path):
    before = settings()
    first, second = enable_compile_cache(tmp_path), enable_compile_cache(tmp_path)
    with pytest.raises(ValueError, match="CompileCache.disable: the cache at '.*' was set later; disable"):
        first.disable()
    assert settings() == [True, str(tmp_path), 0.0, -1, "none"]
    run()
    second.disable()
    assert settings() == [True, str(tmp_path), 0.0, -1, "none"]
    first.disable()
    assert settings() == before
    run()
    assert (first.misses, second.misses) == (1, 1)


@pytest.mark.filterwarnings("default:Error reading persistent compilation cache entry")
def test_a_damaged_entry_warns_and_is_compiled(tmp_path):
    with enable_compile_cache(tmp_path) as cache:
        wanted = run()
        (path,) = tmp_path.glob("jit_*-cache")
        path.write_bytes(path.read_bytes()[:100])
        for _ in range(2):
            with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry for 'jit"):
                np.testing.assert_array_equal(run(), wanted)
        assert (cache.hits, cache.misses) == (0, 3)
        path.unlink()
        run()
        run()
        assert (cache.hits, cache.misses) == (1, 4)


def test_files_of_aot_are_complete_with_any_cache(tmp_path):
    with enable_compile_cache(tmp_path / "cache") as cache:
        for directory in ("a", "a", "b", "b"):
            np.testing.assert_array_equal(aot(lambda x: 2.0 * x, tmp_path / directory, key="1")(X), 2 * X)
    assert cache.hits == 0


def test_a_relative_directory_is_resolved_when_enabled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with enable_compile_cache("some/where") as cache:
        monkeypatch.chdir("/")
        run()
    assert cache.directory == tmp_path / "some" / "where"
    assert len(entries(cache.directory)) == 1
    with enable_compile_cache("~/cache") as cache:
        assert cache.directory == tmp_path / "home" / "cache"


def test_unwritable_directories_are_refused(tmp_path, monkeypatch):
    before = settings()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileExistsError, match="File exists: '.*file'"):
        enable_compile_cache(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="'/proc/none'"):
        enable_compile_cache("/proc/none")
    with pytest.raises(TypeError, match="directory must be the path of a directory, but got None"):
        enable_compile_cache(None)
    with pytest.raises(TypeError, match="directory must be the path of a directory, but got b'x'"):
        enable_compile_cache(b"x")
    for url in ("", "gs://bucket/cache"):
        with pytest.raises(ValueError, match=f"directory must be a directory of the file system, but got '{url}'"):
            enable_compile_cache(url)
    assert settings() == before


if __name__ == "__main__":
    main(*sys.argv[1:])
