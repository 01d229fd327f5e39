"""Remedies of the tools that compile, store and inspect programs: `aot`, `compile_for`, `trace_diff` and others."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from plurax.ensemble import Ensemble, export
from plurax.transforms.program import (
    aot,
    capture,
    compile_for,
    count_layout_ops,
    enable_compile_cache,
    load_exported,
    trace_diff,
)

from ._registry import Fails, remedy

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)


def version(scale: float) -> Any:
    """Return a version of a function; all have one name."""

    def scaled(x: Any) -> Any:
        return x * scale

    return scaled


@remedy(
    "aot: path must be a directory, but {} is a file; pass its directory.",
    "aot: key is empty; name the program and its version, such as 'loss 1', or omit key.",
    "aot: fun is under jax.jit and receives a module; pass the function without jax.jit.",
    "aot: fun is under jax.jit with static arguments; bind them: functools.partial(fun, n=2).",
    "aot: {}; bind it with functools.partial.",
)
def arguments_of_aot(fails: Fails) -> None:
    Path("programs").mkdir()
    file = Path("programs/mine.aot")
    file.touch()
    fails(aot, version(2.0), file)
    assert (aot(version(2.0), file.parent)(X) == 2 * X).all()
    fails(aot, version(2.0), "programs", key="")
    for options in ({"key": "scaled 1"}, {}):
        assert (aot(version(2.0), "programs", **options)(X) == 2 * X).all()
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    call = lambda model, x: model(x)
    fails(aot(jax.jit(call), "programs", key="jitted"), model, X)
    assert np.allclose(aot(call, "programs", key="plain")(model, X), model(X))
    power = lambda x, n: x**n
    fails(aot(jax.jit(power, static_argnames="n"), "programs"), X, n=2)
    fails(aot(jax.jit(power, static_argnums=1), "programs"), X, 2)
    assert (aot(partial(power, n=2), "programs")(X) == X**2).all()
    named = lambda x, name: jnp.sin(x) if name == "sine" else x
    fails(aot(named, "programs"), X, "sine")
    assert np.allclose(aot(partial(named, name="sine"), "programs")(X), np.sin(X))


@remedy(
    "aot: the program of `{}` for key {} was stale: {} was compiled "
    "from different code, or with different values that it closes over. It {}. "
    "Discard its earlier results and changes of modules, call it again, and use a new key for new code. "
    "(If the code traces to another program each time, such as a loop over a set, pass verify=False.)",
    "cannot be removed ({}); remove it",
)
def stale_programs(fails: Fails) -> None:
    aot(version(2.0), "programs", key="1")(X)
    newer = aot(version(3.0), "programs", key="1")
    assert (newer(X) == 2 * X).all()
    fails(newer, X)
    assert (newer(X) == 3 * X).all()
    again = aot(version(4.0), "programs", key="2")
    assert (again(X) == 4 * X).all()
    # A file that cannot be removed.
    aot(version(5.0), "removed", key="1")(X)
    (file,) = Path("removed").iterdir()
    newer = aot(version(6.0), "removed", key="1")
    assert (newer(X) == 5 * X).all()
    file.unlink()
    file.mkdir()
    assert "cannot be removed" in fails(newer, X)
    file.rmdir()
    assert (newer(X) == 6 * X).all()
    # A function that traces to another program each time.
    calls = [0]

    def counting(x: Any) -> Any:
        calls.append(0)
        return x * len(calls)

    aot(counting, "counted", key="1")(X)
    later = aot(counting, "counted", key="1")
    later(X)
    fails(later, X)
    trusted = aot(counting, "counted", key="1", verify=False)
    assert (trusted(X) == trusted(X)).all()


@remedy("aot: {} {}, and its code would run; delete it, or pass your own directory.")
def files_of_others(fails: Fails) -> None:
    aot(version(2.0), "programs", key="1")(X)
    (file,) = Path("programs").iterdir()
    file.chmod(0o666)
    fails(aot(version(2.0), "programs", key="1"), X)
    assert (aot(version(2.0), "mine", key="1")(X) == 2 * X).all()
    file.unlink()
    assert (aot(version(2.0), "programs", key="1")(X) == 2 * X).all()


@remedy(
    "{}: it needs flatbuffers; install it with: pip install 'plurax[export]'",
    "load_exported: `{}` is {}; pass {}.",
)
def exported_programs(fails: Fails) -> None:
    ensemble = Ensemble.create(lambda rngs: nnx.Linear(3, 2, rngs=rngs), 2, seed=0)
    write = lambda: export(ensemble, "model.plurax", X[:1], platforms=("cpu",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flatbuffers", None)
        fails(write)
        fails(load_exported, "model.plurax")
    write()
    model = load_exported("model.plurax")
    for wrong in (X[:, :2], X.astype(int), X[0], jnp.float32(0)):
        assert "pass float32 of shape (batch, 3)" in fails(model, wrong)
    assert model(X)["mean"].shape == (2, 2)


@remedy("CompileCache.disable: the cache at {} was set later; disable that one first, or set {} to None.")
def caches_that_were_set_later(fails: Fails) -> None:
    name = "jax_compilation_cache_dir"
    before = jax.config.values[name]
    first, second = enable_compile_cache("first"), enable_compile_cache("second")
    fails(first.disable)
    second.disable()
    first.disable()
    assert jax.config.values[name] == before
    first = enable_compile_cache("first")
    jax.config.update(name, "third")
    fails(first.disable)
    jax.config.update(name, None)
    first.disable()
    assert jax.config.values[name] == before


@remedy(
    "compile_for: {}, but got {}; pass mesh= and a tuple.",
    "compile_for: mesh={} has {} devices, but {} has {}; make it smaller.",
)
def meshes_of_a_target(fails: Fails) -> None:
    data = PartitionSpec("data")
    compiled = lambda **options: compile_for(jnp.tanh, "cpu", X, **options)
    for wrong in ({"shardings": (data,)}, {"mesh": {"data": 1}, "shardings": data}):
        fails(compiled, **wrong)
    fails(compiled, mesh={"data": 1}, shardings=(data, data))
    fails(compiled, mesh={"data": 1 + len(jax.devices())})
    assert compiled(mesh={"data": 1}, shardings=(data,)).devices == 1


@remedy("{}: arguments have no values under jax.jit, jax.grad or jax.vmap; call it outside.")
def traced_programs(fails: Fails) -> None:
    counted = lambda x: count_layout_ops(jnp.tanh, x)
    for transformed in (jax.jit(counted), jax.vmap(counted), jax.grad(counted)):
        fails(transformed, jnp.arange(3.0))
    assert set(counted(jnp.arange(3.0)).values()) == {0}


@remedy(
    "{}: {} is not a capture ({}); write one with `capture`.",
    "trace_diff: captures take no arguments; pass only the two paths.",
    "plots need matplotlib; install it with: pip install 'plurax[plot]'",
)
def captures(fails: Fails) -> None:
    Path("old.json").write_text('{"operations": []}')
    fails(trace_diff, "old.json", "old.json")
    for name, fun in (("old.json", jnp.tanh), ("new.json", lambda x: jnp.tanh(jnp.sin(x)))):
        capture(name, fun, X, repeats=2)
    fails(trace_diff, "old.json", "new.json", X)
    found = trace_diff("old.json", "new.json")
    assert [row.op for row in found.added] == ["sin"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        fails(found.plot_counts)
    found.plot_counts()
