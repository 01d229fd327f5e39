"""Programs compiled in one process and run in another. This file is also the script that these processes run."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import serialize_executable, sparse
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from plurax.ensemble import Ensemble
from plurax.transforms import grad
from plurax.transforms._core.compat import Dispatched, inside_a_transform
from plurax.transforms.program import aot

if __name__ != "__main__":  # processes run this file as a script
    from ...._files import rewrite

X = np.cos(np.arange(12.0)).reshape(3, 4).astype(np.float32)
W = np.sin(np.arange(20.0)).reshape(4, 5).astype(np.float32)


class Net(nnx.Module):
    def __init__(self) -> None:
        self.first = nnx.Linear(4, 5, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(5, rngs=nnx.Rngs(1))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(2))
        self.last = nnx.Linear(5, 2, rngs=nnx.Rngs(3))

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.relu(self.dropout(self.norm(self.first(x)))))

    def loss(self, x: Any) -> Any:
        return (self(x) ** 2).mean()


def loss(model: Any, x: Any) -> Any:
    return model.loss(x)


def train(model: Any, optimizer: Any, x: Any) -> Any:
    value, grads = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, grads)
    return value


def net_and_optimizer() -> tuple[Net, Any]:
    model = Net()
    # With Adam, rounding errors would become steps: before the batch norm, the bias has no gradient.
    return model, nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)


# Functions and their arguments, each for a separate process.


def trees() -> Any:
    return lambda x, y, *, z: {"sum": [x + y, None], "rest": (x.sum(), y * z)}, ({"x": X, "y": X[:1], "z": 2.5})


def closes_over_arrays_and_a_key() -> Any:
    key, w = jax.random.key(5), jnp.asarray(W)
    return lambda x: x @ w + jax.random.normal(key, (3, 1)), {"x": X}


def takes_and_returns_keys() -> Any:
    return lambda key, old: (jax.random.split(key), old, jax.random.normal(key, (3,))), {
        "key": jax.random.key(3),
        "old": jax.random.PRNGKey(2),
    }


def calls_lapack() -> Any:
    return lambda x: jnp.linalg.svd(x), {"x": X}


def has_a_loop_and_a_branch() -> Any:
    def steps(x: Any) -> Any:
        carry, ys = jax.lax.scan(lambda c, y: (jnp.sin(c) + y, c.sum()), jnp.zeros(4), x)
        return jax.lax.cond(carry[0] > 0, lambda: ys, lambda: -ys)

    return steps, {"x": X}


def trains_a_module() -> Any:
    model, optimizer = net_and_optimizer()
    return train, {"model": model, "optimizer": optimizer, "x": X}


def has_the_gradient_of_a_module() -> Any:
    return grad(loss), {"model": Net(), "x": X}


def has_a_module_as_fun() -> Any:
    return Net(), {"x": X}


def has_a_method_as_fun() -> Any:
    return Net().loss, {"x": X}


def returns_the_module() -> Any:
    return lambda model, x: (model, x), {"model": Net(), "x": X}


def has_an_ensemble() -> Any:
    ens = Ensemble.create(lambda rngs: nnx.Linear(4, 2, rngs=rngs), 3, seed=0)
    return lambda ens, x: (ens(x), jax.tree.map(jnp.cos, ens)), {"ens": ens, "x": X}


def has_the_state_of_an_optimizer() -> Any:
    tx = optax.chain(optax.clip(1.0), optax.adam(1e-2))
    return lambda state, x: tx.update({"w": x}, state), {"state": tx.init({"w": X}), "x": X}


def donates() -> Any:
    return jax.jit(lambda x, y: x + y.sum(), donate_argnames="x"), {"x": jnp.asarray(X), "y": X}


def is_on_another_device() -> Any:
    return lambda x: x * 2, {"x": jax.device_put(X, jax.devices()[2])}


def is_on_devices_in_another_order() -> Any:
    mesh = Mesh(np.array(jax.devices())[[2, 0, 3, 1]], ("a",))
    rows = NamedSharding(mesh, P("a"))
    return lambda x: (x * 2, x.sum()), {"x": jax.device_put(np.arange(8.0), rows)}


def is_on_the_first_device_by_the_settings_of_jit() -> Any:
    return jax.jit(lambda x: x * 3, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[1])), {"x": X}


def is_on_the_second_device_by_the_settings_of_jit() -> Any:
    return jax.jit(lambda x: x * 3, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[2])), {"x": X}


def is_on_an_explicit_mesh() -> Any:
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Explicit,))
    return lambda x: jnp.sin(x), {"x": jax.device_put(np.arange(8.0), NamedSharding(mesh, P("a")))}


CASES: dict[str, Callable[[], Any]] = {
    make.__name__: make
    for make in (
        trees,
        closes_over_arrays_and_a_key,
        takes_and_returns_keys,
        calls_lapack,
        has_a_loop_and_a_branch,
        trains_a_module,
        has_the_gradient_of_a_module,
        has_a_module_as_fun,
        has_a_method_as_fun,
        returns_the_module,
        has_an_ensemble,
        has_the_state_of_an_optimizer,
        donates,
        is_on_another_device,
        is_on_devices_in_another_order,
        is_on_the_first_device_by_the_settings_of_jit,
        is_on_the_second_device_by_the_settings_of_jit,
        is_on_an_explicit_mesh,
    )
}
PLACED = ("is_on_the_first_device_by_the_settings_of_jit", "is_on_the_second_device_by_the_settings_of_jit")
# Without a key, a case differs only until the file is found.
WITHOUT_KEY = ("trees", "closes_over_arrays_and_a_key", "calls_lapack", "returns_the_module", "donates", *PLACED)
CALLS = [*((name, "1") for name in CASES), *((name, None) for name in WITHOUT_KEY)]
COMPILED = "/jax/core/compile/backend_compile_duration"
TRACED = "/jax/core/compile/jaxpr_trace_duration"


def in_bits(tree: Any) -> list[str]:
    """Return all arrays of a tree, with paths and devices."""
    lines = []
    for path, x in jax.tree.leaves_with_path(tree):
        where = f"{x.sharding} {sorted(d.id for d in x.devices())}" if isinstance(x, jax.Array) else ""
        values = jax.random.key_data(x) if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) else x
        lines.append(f"{jax.tree_util.keystr(path)} {jax.typeof(x)} {where} {np.asarray(values).tobytes().hex()}")
    return lines


def run(name: str, directory: str, key: str | None) -> dict[str, Any]:
    """Run a case; return the result, the state of the arguments, and how often JAX traced and compiled."""
    fun, kwargs = CASES[name]()
    by_position = name == "has_the_gradient_of_a_module"  # differentiated arguments are positional
    args, named = (tuple(kwargs.values()), {}) if by_position else ((), kwargs)
    events: list[str] = []

    def count(event: str, duration: float, **_: Any) -> None:
        events.append(event)

    program = aot(fun, directory, key=key)
    jax.monitoring.register_event_duration_secs_listener(count)
    out = jax.block_until_ready(program(*args, **named))
    jax.monitoring.unregister_event_duration_listener(count)
    left = {k: v for k, v in kwargs.items() if not (isinstance(v, jax.Array) and v.is_deleted())}
    owner = getattr(fun, "__self__", fun)
    found = in_bits((out, left, owner if isinstance(owner, nnx.Module) else None))
    counts = {"traced": events.count(TRACED), "compiled": events.count(COMPILED)}
    return {"bits": found, "deleted": len(kwargs) - len(left), **counts}


def run_all_cases(directory: str) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    warnings.simplefilter("error")
    found: dict[str, Any] = {f"{name}, key={key}": run(name, directory, key) for name, key in CALLS}

    print(json.dumps(found))  # noqa: T201 (read by the test)


def in_a_process(task: str, directory: Path) -> str:
    """Run a task (see the end of this file) in a process; return its output."""
    command = [sys.executable, __file__, task, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert "aot:" not in done.stderr, done.stderr  # each process checks its loaded programs at exit
    return done.stdout


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("aot")
    return [json.loads(in_a_process("run all cases", directory)) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.xdist_group("aot in two processes")
@pytest.mark.parametrize(("name", "key"), CALLS)
def test_the_second_process_has_the_same_to_the_bit_and_compiles_nothing(name, key, processes):
    first, second = (found[f"{name}, key={key}"] for found in processes)
    assert second["bits"] == first["bits"]
    assert second["deleted"] == first["deleted"] == (name == "donates")
    assert second["compiled"] == 0
    # JAX looks up LAPACK's functions at lowering, so such a program is traced with a key too.
    assert (second["traced"] > 0) == (key is None or name == "calls_lapack")
    assert (first["compiled"], min(1, first["traced"])) == (1, 1)


@pytest.mark.slow
@pytest.mark.xdist_group("aot in two processes")
@pytest.mark.parametrize("key", ["1", None])
def test_a_program_runs_on_the_devices_given_to_jit(key, processes):
    for i, name in enumerate(PLACED):
        for found in processes:
            assert f"SingleDeviceSharding(device=CpuDevice(id={i + 1})" in found[f"{name}, key={key}"]["bits"][0]


class Counted:
    """A function that counts its traces."""

    def __init__(self, fun: Callable[..., Any]) -> None:
        self.traces, self._fun = 0, fun

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.traces += 1
        return self._fun(*args, **kwargs)


def double(x: Any) -> Any:
    return 2.0 * x


def only_file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


@pytest.mark.parametrize("key", ["1", None])
def test_one_file_for_each_kind_of_arguments(key, tmp_path):
    fun = Counted(lambda x, y=1.0: x + y)
    program = aot(fun, tmp_path, key=key)
    kinds = [
        (X,),
        (X[:2],),
        (X.astype(np.int32),),
        (X.astype(jnp.bfloat16),),
        (2.5,),
        (2,),
        (np.float32(2.5),),
        (X, X),
        (X, 2),
        (jnp.zeros((0, 4)),),
    ]
    for args in 2 * kinds:
        got, wanted = program(*args), jax.jit(lambda x, y=1.0: x + y)(*args)
        assert (got.dtype, got.weak_type, got.tolist()) == (wanted.dtype, wanted.weak_type, wanted.tolist())
    assert (fun.traces, len(list(tmp_path.iterdir()))) == (len(kinds), len(kinds))


@pytest.mark.parametrize("key", ["1", None])
def test_layouts_are_distinguished(key, tmp_path):
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for _ in range(2):
        for order in ((0, 1), (1, 0)):
            program = aot(lambda x: 2.0 * x, tmp_path, key=key)
            x = jax.device_put(X, Format(Layout(order), here))
            for _ in range(2):
                np.testing.assert_array_equal(program(x), 2 * X)
    assert len(list(tmp_path.iterdir())) == 2


def test_keyword_arguments_are_distinguished(tmp_path):
    fun = Counted(lambda x, y: x - y)
    for _ in range(2):
        program = aot(fun, tmp_path, key="1", verify=False)
        assert [float(program(5.0, 3.0)), float(program(5.0, y=3.0)), float(program(x=5.0, y=3.0))] == [2.0, 2.0, 2.0]
    assert fun.traces == 3


def test_float64_is_another_program(tmp_path):
    fun = Counted(lambda x: jnp.asarray(x) / 3.0)
    for _ in range(2):
        program = aot(fun, tmp_path, key="1", verify=False)
        single = program(1.0)
        with jax.enable_x64(True):
            double, of_float32 = program(1.0), program(np.float32(1.0))
        assert (single.dtype, double.dtype, of_float32.dtype) == (jnp.float32, jnp.float64, jnp.float32)
        assert float(double) == 1.0 / 3.0
    assert fun.traces == 3


def test_settings_that_change_programs_are_distinguished(tmp_path):
    fun = Counted(lambda key: jax.random.bits(key, (3,)))
    key = jax.random.key(0)
    for _ in range(2):
        program = aot(fun, tmp_path, key="1", verify=False)
        partitionable = program(key)
        with jax.threefry_partitionable(False):
            original = program(key)
            assert original.tolist() == jax.random.bits(key, (3,)).tolist() != partitionable.tolist()
    assert fun.traces == 2


@contextlib.contextmanager
def setting(name: str, value: Any) -> Iterator[None]:
    """Set a JAX option for the whole process, within a context."""
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


# Changed settings: some are those of context managers, and not all of them change this program.
SETTINGS = {
    "jax_enable_x64": True,
    "jax_default_matmul_precision": "float32",
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": False,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_optimization_level": "O1",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_other_settings_of_the_process_have_separate_files(name, tmp_path):
    fun = Counted(double)
    aot(fun, tmp_path, key="1")(X)
    with setting(name, SETTINGS[name]):
        for _ in range(2):
            np.testing.assert_array_equal(aot(fun, tmp_path, key="1", verify=False)(X), 2 * X)
    assert (fun.traces, len(list(tmp_path.iterdir()))) == (2, 2)


def test_a_setting_that_changes_in_the_process_is_detected(tmp_path):
    fun = Counted(double)
    program = aot(fun, tmp_path, key="1")
    program(X)
    with jax.softmax_custom_jvp(not jax.config.values["jax_softmax_custom_jvp"]):
        program(X)
        program(X)
    assert (fun.traces, len(list(tmp_path.iterdir()))) == (2, 2)


def test_settings_without_effect_are_ignored(tmp_path):
    fun = Counted(double)
    program = aot(fun, tmp_path, key="1")
    program(X)
    with jax.log_compiles(False), jax.transfer_guard("allow"), jax.check_tracer_leaks(False):
        program(X)
        aot(fun, tmp_path, key="1")(X)
    assert fun.traces == 1


@pytest.mark.parametrize("name", ["jax_default_device", "jax_compilation_cache_dir", "jax_log_compiles"])
def test_locations_and_logging_do_not_change_the_program(name, tmp_path):
    fun = Counted(double)
    aot(fun, tmp_path / "programs", key="1")(X)
    values = {"jax_default_device": jax.devices()[0], "jax_compilation_cache_dir": str(tmp_path)}
    with setting(name, values.get(name, True)):
        np.testing.assert_array_equal(aot(fun, tmp_path / "programs", key="1", verify=False)(X), 2 * X)
    assert fun.traces == 1


@pytest.mark.parametrize("key", ["1", None])
def test_a_compiled_program_is_not_loaded_again(key, tmp_path):
    fun = Counted(double)
    program = aot(fun, tmp_path, key=key)
    program(X)
    only_file(tmp_path).unlink()
    np.testing.assert_array_equal(program(X), 2 * X)
    assert (fun.traces, list(tmp_path.iterdir())) == (1, [])


def test_without_a_key_closed_over_values_are_compared(tmp_path):
    def times(factor: Any) -> Callable[..., Any]:
        return aot(lambda x: x * factor, tmp_path)

    for _ in range(2):
        for factor in (2.0, 3.0, W[0, 0], W[:, 1], jnp.asarray(W[:, 2])):
            np.testing.assert_array_equal(times(factor)(X), X * np.asarray(factor, np.float32))
    assert len(list(tmp_path.iterdir())) == 5


def test_without_a_key_called_functions_are_compared(tmp_path, monkeypatch):
    def fun(x: Any) -> Any:
        return double(x)

    for factor in (2.0, 3.0):
        monkeypatch.setitem(globals(), "double", lambda x, factor=factor: factor * x)
        np.testing.assert_array_equal(aot(fun, tmp_path)(X), factor * X)


def test_without_a_key_the_used_arguments_are_compared(tmp_path):
    for fun, wanted in ((lambda x, y: 2 * x, 2 * X), (lambda x, y: 2 * y, 6 * X)):
        np.testing.assert_array_equal(aot(fun, tmp_path)(X, 3 * X), wanted)


def test_without_a_key_weak_types_of_results_are_compared(tmp_path):
    for scalar in (jnp.asarray(2.0), jnp.float32(2.0), 2.0 * jnp.asarray(1.0)):
        assert aot(lambda x, scalar=scalar: (x, scalar), tmp_path)(X)[1].weak_type == scalar.weak_type


def test_donation_distinguishes_programs(tmp_path):
    def step(x: Any) -> Any:
        return x + 1.0

    for directory, donations in (("a", (0, ())), ("b", ((), 0))):
        for donated in 2 * donations:
            state = jnp.asarray(X)
            got = aot(jax.jit(step, donate_argnums=donated), tmp_path / directory)(state)
            np.testing.assert_array_equal(got, X + 1)
            assert state.is_deleted() == (donated == 0)
        assert len(list((tmp_path / directory).iterdir())) == 2


def test_two_kinds_of_machine_share_a_directory(tmp_path, monkeypatch):
    fun = Counted(double)
    for _ in range(2):
        for change in (None, another_device, another_backend):
            with monkeypatch.context() as patch:
                if change:
                    change(patch)
                np.testing.assert_array_equal(aot(fun, tmp_path, key="1", verify=False)(X), 2 * X)
    assert (fun.traces, len(list(tmp_path.iterdir()))) == (3, 3)


def test_bound_arguments_are_compared_completely(tmp_path):
    @dataclass
    class Config:
        factor: float

    def fun(x: Any, config: Any) -> Any:
        return config.factor * x

    for _ in range(2):
        for factor in (2.0, 3.0):
            program = aot(partial(fun, config=Config(factor)), tmp_path, key="1")
            np.testing.assert_array_equal(program(X), factor * X)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_static_part_of_a_module_is_compared(tmp_path):
    scale = nnx.Param(jnp.asarray(2.0))

    class Scaled(nnx.Module):
        def __init__(self, offset: float, activation: Callable[..., Any]) -> None:
            self.scale, self.offset, self.activation = nnx.Param(scale[...]), offset, activation

    def fun(model: Any, x: Any) -> Any:
        return model.activation(model.scale * x + model.offset)

    for _ in range(2):
        for offset, activation in ((1.0, jnp.sin), (2.0, jnp.sin), (1.0, jnp.cos), (1.0, lambda x: 2.0 * x)):
            model = Scaled(offset, activation)
            np.testing.assert_allclose(aot(fun, tmp_path, key="1")(model, X), fun(model, X), rtol=1e-6)
    assert len(list(tmp_path.iterdir())) == 4


def test_the_rate_of_an_optimizer_is_compared_in_one_function(tmp_path):
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        grads = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)

    for _ in range(2):
        program = aot(step, tmp_path, key="1")
        for rate in (0.1, 0.2):
            model = nnx.Linear(4, 2, use_bias=False, rngs=nnx.Rngs(0))
            other = nnx.clone(model)
            optimizer, reference = (nnx.Optimizer(m, optax.sgd(rate), wrt=nnx.Param) for m in (model, other))
            program(model, optimizer, X)
            step(other, reference, X)
            np.testing.assert_allclose(model.kernel[...], other.kernel[...], rtol=1e-6)


def test_a_module_is_updated_as_without_aot(tmp_path):
    (model, optimizer), (other, reference) = net_and_optimizer(), net_and_optimizer()
    program = aot(train, tmp_path, key="1")
    for _ in range(3):
        np.testing.assert_allclose(program(model, optimizer, X), nnx.jit(train)(other, reference, X), rtol=1e-5)
    for a, b in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(other)), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        else:
            assert a == b
    assert int(optimizer.step[...]) == 3


def test_other_state_of_an_applied_model_is_updated(tmp_path):
    class Counter:
        def __init__(self, count: Any) -> None:
            self.count = count

        def __plurax_split__(self) -> Any:
            return CounterStructure(), {}, {"count": self.count}

        def __plurax_update__(self, rest: Any) -> None:
            self.count = rest["count"]

    class CounterStructure:
        def merge(self, trainable: Any, rest: Any) -> Any:
            return Counter(rest["count"])

        def __eq__(self, other: object) -> bool:
            return isinstance(other, CounterStructure)

        def __hash__(self) -> int:
            return 0

    jax.tree_util.register_pytree_node(Counter, lambda c: ((c.count,), None), lambda _, x: Counter(*x))

    def count(counter: Any) -> Any:
        counter.count = counter.count + 1
        return counter.count

    for _ in range(2):
        counter = Counter(jnp.int32(5))
        program = aot(count, tmp_path, key="1")
        assert [int(program(counter)), int(program(counter)), int(counter.count)] == [6, 7, 7]


def test_a_module_that_fun_closes_over_is_a_part_of_the_program(tmp_path):
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    program = aot(lambda x: model(x), tmp_path)
    before = program(X)
    model.kernel[...] = 2 * model.kernel[...]
    np.testing.assert_array_equal(program(X), before)
    assert not np.array_equal(aot(lambda x: model(x), tmp_path)(X), before)


def test_under_transforms_fun_itself_is_called(tmp_path):
    program = aot(lambda x: (x**2).sum(), tmp_path, key="1")
    np.testing.assert_allclose(jax.grad(program)(X), 2 * X)
    np.testing.assert_allclose(jax.vmap(program)(X), (X**2).sum(1), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(program)(X), (X**2).sum(), rtol=1e-6)
    assert not tmp_path.exists() or not list(tmp_path.iterdir())
    program(X)
    np.testing.assert_allclose(jax.grad(program)(X), 2 * X)
    with jax.disable_jit():
        np.testing.assert_allclose(program(X), (X**2).sum(), rtol=1e-6)
    with jax.set_mesh(jax.make_mesh((1,), ("a",))):
        np.testing.assert_allclose(jax.jit(lambda y: program(X) + y)(1.0), (X**2).sum() + 1, rtol=1e-6)


def test_nan_is_detected_with_jax_debug_nans(tmp_path):
    program = aot(lambda x: jnp.log(x), tmp_path, key="1")
    assert np.isnan(program(-1.0))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        program(-1.0)


@pytest.mark.parametrize("key", ["1", None])
def test_a_function_that_closes_over_a_tracer_is_called_directly(key, tmp_path):
    def total(factor: Any) -> Any:
        return aot(lambda x: (factor * x).sum(), tmp_path, key=key)(X)

    np.testing.assert_allclose(jax.grad(total)(2.0), X.sum(), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(total)(2.0), 2 * X.sum(), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(total)(jnp.arange(3.0)), np.arange(3) * X.sum(), rtol=1e-6)
    assert list(tmp_path.iterdir()) == []


def test_transforms_of_a_bound_method_see_its_model(tmp_path):
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    got, wanted = (grad(fun)(X[0]) for fun in (aot(lambda x: model(x).sum(), tmp_path), lambda x: model(x).sum()))
    np.testing.assert_array_equal(got, wanted)
    assert aot(double, tmp_path).__name__ == "aot(double)"


def damaged(content: bytes) -> list[bytes]:
    """Return copies with one bit flipped (fifty places), truncated copies, and one with a trailing byte."""
    places = sorted({0, 31, 32, 33, len(content) - 1, *range(0, len(content), len(content) // 45)})
    flipped = [content[:i] + bytes([content[i] ^ (1 << i % 8)]) + content[i + 1 :] for i in places]
    return [*flipped, *(content[:n] for n in (0, 1, 31, 32, 40, len(content) // 2, len(content) - 1)), content + b"x"]


def test_damage_is_noticed_before_anything_is_loaded(tmp_path, monkeypatch):
    def fun(x: Any) -> Any:
        if list(tmp_path.iterdir()):
            raise ZeroDivisionError("compiled again, which would take time")
        return 2.0 * x

    aot(fun, tmp_path, key="1")(X)
    path = only_file(tmp_path)
    content = path.read_bytes()
    monkeypatch.setattr(serialize_executable, "deserialize_and_load", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(pytest.fail.Exception, match="it was loaded"):
        aot(fun, tmp_path, key="1")(X)
    for bad in damaged(content):
        path.write_bytes(bad)
        match = r"aot: .*-\w{32}\.aot is damaged.*compiled again, and the file replaced"
        with pytest.warns(UserWarning, match=match), pytest.raises(ZeroDivisionError, match="compiled again"):
            aot(fun, tmp_path, key="1")(X)


def test_a_damaged_file_is_replaced(tmp_path):
    fun = Counted(double)
    aot(fun, tmp_path, key="1")(X)
    path = only_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    program = aot(fun, tmp_path, key="1")
    with pytest.warns(UserWarning, match="is damaged"):
        program(X)
    program(X)  # warns once
    np.testing.assert_array_equal(aot(fun, tmp_path, key="1")(X), 2 * X)
    assert fun.traces == 2
    assert only_file(tmp_path) == path


@pytest.mark.parametrize("key", [None, "1"])
def test_later_calls_are_dispatched_as_those_of_jit(key, tmp_path, monkeypatch):
    searches = []

    def searched() -> bool:
        searches.append(1)
        return inside_a_transform()

    monkeypatch.setattr(sys.modules["plurax.transforms.program._aot.aot"], "inside_a_transform", searched)

    def fun(x: Any, *, parts: Any, factor: float) -> Any:
        return {"sum": parts["a"][0] + x * factor, "none": None}, parts["b"]

    expected = jax.jit(fun)
    for process in range(2):  # the second finds the file
        ours = aot(fun, tmp_path, key=key)
        searches.clear()
        for x in (X, jnp.asarray(X), jnp.asarray(X, jnp.bfloat16), 2, 2.0):
            for call in range(5):
                arguments = {"parts": {"a": [x + call], "b": None, "c": (X,)}, "factor": 0.5}
                results = ours(x, **arguments), expected(x, **arguments)
                assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
                for a, b in zip(*map(jax.tree.leaves, results), strict=True):
                    for name in ("shape", "dtype", "weak_type", "sharding", "committed"):
                        assert getattr(a, name) == getattr(b, name)
                    np.testing.assert_array_equal(a, b)
        # The program of the first call is compared before its second call, and is known after that.
        assert len(searches) <= 5 + (key is not None and process == 1)
        with jax.disable_jit():
            assert isinstance(ours(2.0, parts={"a": [1.0], "b": None}, factor=0.5)[0]["sum"], float)


def test_two_threads_may_have_their_first_call_at_once():
    compiled = jax.jit(double).lower(X).compile()
    program, both = Dispatched(compiled, (X,), {}, compiled.out_tree), threading.Barrier(2, timeout=20)
    with pytest.raises(TypeError, match="other types"):
        program.run(X)

    def meeting(x: Any) -> Any:
        both.wait()
        return program.call(x)

    program.run = meeting
    with ThreadPoolExecutor(2) as pool:
        for (out,) in pool.map(program.first, [X, X]):
            np.testing.assert_array_equal(out, 2 * X)


def test_the_warning_is_at_the_line_of_the_call(tmp_path):
    aot(double, tmp_path, key="1")(X)
    only_file(tmp_path).write_bytes(b"")
    with pytest.warns(UserWarning, match="is damaged") as caught:
        aot(double, tmp_path, key="1")(X)
    assert [warning.filename for warning in caught] == [__file__]


PACKAGES = ["plurax", "jax", "jaxlib", "flax", "optax", "numpy"]


def installed(patch: pytest.MonkeyPatch, directory: Path, package: str, version: str) -> None:
    """Make Python report this version of a package."""
    info = directory / f"{package}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    patch.syspath_prepend(directory)
    if hasattr(module := sys.modules.get(package), "__version__"):  # the version of what is imported comes first
        patch.setattr(module, "__version__", version)


def another_python(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(platform, "python_version_tuple", lambda: ("3", "1", "0"))


def another_backend(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(jax.devices()[0].client), "platform_version", "another")


def another_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(jax.Device, "device_kind", "another")


def other_flags(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")


CHANGES = [another_python, another_backend, another_device, other_flags]


def has_a_file_of_its_own(fun: Counted, directory: Path) -> None:
    """Assert that the changed environment writes a second file, once."""
    traces = fun.traces
    for _ in range(2):
        np.testing.assert_array_equal(aot(fun, directory, key="1", verify=False)(X), 2 * X)
    assert (fun.traces, len(list(directory.iterdir()))) == (traces + 1, 2)


def tells_them_apart(fun: Counted, directory: Path, ours: Path) -> None:
    """Assert that `ours` is still loaded in its environment, and that the other file under its name is not."""
    traces = fun.traces
    np.testing.assert_array_equal(aot(fun, directory, key="1", verify=False)(X), 2 * X)
    assert fun.traces == traces
    (theirs,) = (path for path in directory.iterdir() if path != ours)
    theirs.replace(ours)
    with pytest.warns(UserWarning, match="was written for another program, and renamed; the program is compiled again"):
        np.testing.assert_array_equal(aot(fun, directory, key="1")(X), 2 * X)
    assert fun.traces == traces + 1


@pytest.mark.parametrize("package", PACKAGES)
def test_another_version_of_a_package_compiles_a_separate_file(package, tmp_path, monkeypatch):
    fun, programs = Counted(double), tmp_path / "programs"
    aot(fun, programs, key="1")(X)
    ours = only_file(programs)
    with monkeypatch.context() as patch:
        installed(patch, tmp_path / "same", package, importlib.metadata.version(package))
        np.testing.assert_array_equal(aot(fun, programs, key="1", verify=False)(X), 2 * X)
        assert fun.traces == 1
        installed(patch, tmp_path / "another", package, "0.0.1")
        has_a_file_of_its_own(fun, programs)
    tells_them_apart(fun, programs, ours)


@pytest.mark.parametrize("change", CHANGES)
def test_another_installation_or_machine_compiles_a_separate_file(change, tmp_path, monkeypatch):
    fun = Counted(double)
    aot(fun, tmp_path, key="1")(X)
    ours = only_file(tmp_path)
    with monkeypatch.context() as patch:
        change(patch)
        has_a_file_of_its_own(fun, tmp_path)
    tells_them_apart(fun, tmp_path, ours)


@pytest.mark.slow
def test_another_processor_compiles_a_separate_file(tmp_path):
    fun = Counted(double)
    aot(fun, tmp_path, key="1")(X)
    ours = only_file(tmp_path)
    in_a_process("on another processor", tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    tells_them_apart(fun, tmp_path, ours)


def on_another_processor(directory: str) -> None:
    platform.machine = lambda: "another"  # before the value is cached
    has_a_file_of_its_own(Counted(double), Path(directory))


def test_other_flags_of_xla_have_a_separate_file(tmp_path, monkeypatch):
    aot(double, tmp_path, key="1")(X)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp " + os.environ.get("XLA_FLAGS", ""))
    aot(double, tmp_path, key="1")(X)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    aot(double, tmp_path, key="1")(X)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_file_of_another_program_warns(tmp_path):
    aot(double, tmp_path / "a", key="1")(X)
    aot(double, tmp_path / "b", key="1")(X[:2])
    only_file(tmp_path / "b").replace(only_file(tmp_path / "a"))
    with pytest.warns(UserWarning, match="was written for another program, and renamed"):
        np.testing.assert_array_equal(aot(double, tmp_path / "a", key="1")(X), 2 * X)


def test_a_file_that_jax_cannot_load_warns(tmp_path):
    aot(double, tmp_path, key="1")(X)
    path = only_file(tmp_path)
    rewrite(path, lambda entries: None, b"no program")
    with pytest.warns(UserWarning, match=r"cannot be loaded \(UnpicklingError: .*\); the program is compiled again"):
        np.testing.assert_array_equal(aot(double, tmp_path, key="1")(X), 2 * X)
    assert path.stat().st_size > 1000


def test_an_unreadable_file_warns(tmp_path):
    aot(double, tmp_path, key="1")(X)
    path = only_file(tmp_path)
    path.unlink()
    path.mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        np.testing.assert_array_equal(aot(double, tmp_path, key="1")(X), 2 * X)
    read, write = (str(warning.message) for warning in caught)
    assert "is a directory, not a file; put a file there.; the program is compiled again" in read
    assert "cannot be written ([Errno 21] Is a directory" in write
    assert only_file(tmp_path) == path


def test_a_directory_that_cannot_be_created_warns(tmp_path):
    program = aot(double, tmp_path / "file" / "programs", key="1")
    (tmp_path / "file").write_bytes(b"")
    with pytest.warns(UserWarning, match="cannot be .*Not a directory"):
        np.testing.assert_array_equal(program(X), 2 * X)


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    aot(double, tmp_path, key="1")(X)
    path = only_file(tmp_path)
    content = path.read_bytes()
    monkeypatch.setattr(os, "replace", interrupt)
    other_flags(monkeypatch)
    program = aot(double, tmp_path, key="1")
    with pytest.raises(KeyboardInterrupt):
        program(X)
    assert only_file(tmp_path) == path
    assert path.read_bytes() == content


def test_many_write_at_once(tmp_path):
    results: list[Any] = []
    together = threading.Barrier(4)

    def work() -> None:
        program = aot(double, tmp_path, key="1")
        together.wait()
        results.extend(program(X[:n]) for n in (1, 2, 3))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(result) for result in results) == sorted(4 * [1, 2, 3])
    for result in results:
        np.testing.assert_array_equal(result, 2 * X[: len(result)])
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("key", ["1", None])
def test_a_callback_is_run_and_not_written(key, tmp_path):
    def shown(x: Any) -> Any:
        return jax.pure_callback(lambda x: np.asarray(x) + 1.0, x, x)

    with pytest.warns(UserWarning, match=r"shown.*\.aot cannot be written \(.*callback.*; other processes will"):
        np.testing.assert_array_equal(aot(shown, tmp_path, key=key)(X), X + 1)
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_no_other_process_can_make_is_not_written_with_a_key(tmp_path):
    def make(x: Any) -> Any:
        return nnx.Linear(4, 2, rngs=nnx.Rngs(0)), x

    with pytest.warns(UserWarning, match=r"another process cannot rebuild a SplitModel with \(Linear,\)"):
        model, _ = aot(make, tmp_path, key="1")(X)
    assert isinstance(model, nnx.Linear)
    for _ in range(2):
        assert isinstance(aot(make, tmp_path)(X)[0], nnx.Linear)


def test_several_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.warns(UserWarning, match="cannot be written .the run has several processes"):
        np.testing.assert_array_equal(aot(double, tmp_path, key="1")(X), 2 * X)


def test_a_program_with_external_calls_is_lowered_first(tmp_path):
    eye = sparse.BCSR.fromdense(np.eye(3, dtype=np.float32))  # its product is neither an operation of XLA nor of LAPACK
    fun = Counted(lambda x: eye @ x)
    for _ in range(2):
        np.testing.assert_array_equal(aot(fun, tmp_path, key="1")(X), X)
    assert (fun.traces, len(list(tmp_path.iterdir()))) == (2, 1)


def test_unused_donated_arguments_warn_as_in_jit(tmp_path):
    shrinking = jax.jit(lambda x: x[:1], donate_argnums=0)
    with pytest.warns(UserWarning, match="Some donated buffers were not usable"):
        aot(shrinking, tmp_path, key="1")(jnp.asarray(X))


def test_a_relative_path_refers_to_the_initial_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    program = aot(double, "here", key="1")
    monkeypatch.chdir("/")
    program(X)
    aot(double, "~/there", key="1")(X)
    assert len(list((tmp_path / "here").iterdir())) == len(list((tmp_path / "home" / "there").iterdir())) == 1


def test_invalid_paths_and_keys_are_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match="aot: path must be a directory, but '.*file' is a file; pass its"):
        aot(double, tmp_path / "file")
    with pytest.raises(TypeError, match="aot: path must be the path of a directory, but got 3 of type int"):
        aot(double, 3)
    with pytest.raises(ValueError, match="aot: path must be a directory of the file system, but got ''"):
        aot(double, "")
    with pytest.raises(TypeError, match="aot: key must be a string, but got 1 of type int"):
        aot(double, tmp_path, key=1)
    with pytest.raises(ValueError, match="aot: key is empty; name the program and its version, such as 'loss 1'"):
        aot(double, tmp_path, key="")
    with pytest.raises(TypeError, match="aot: fun must be a function"):
        aot(3, tmp_path)


def test_invalid_arguments_are_refused(tmp_path):
    program = aot(lambda x, options, y=1.0: x, tmp_path, key="1")
    with pytest.raises(TypeError, match=r"aot: `options\['mode'\]` is a str, not an array, .*bind it"):
        program(X, {"mode": "sum"})
    with pytest.raises(TypeError, match="aot: `y` is a str, not an array, a number or a module"):
        program(X, X, y="a")
    with pytest.raises(TypeError, match="aot: `x` is a ShapeDtypeStruct, not an array"):
        program(jax.ShapeDtypeStruct((3,), jnp.float32), X)
    with pytest.raises(TypeError, match=r"aot: `x` is a \w*Ref\w*, not an array"):
        program(jax.new_ref(jnp.ones(3)), X)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["1", None])
def test_static_arguments_are_refused(key, tmp_path):
    for fun, kwargs in (
        (jax.jit(lambda x, n: x * n, static_argnames="n"), {"n": 3}),
        (jax.jit(lambda n, x: x * n, static_argnums=1), {}),
    ):
        with pytest.raises(
            ValueError, match="aot: fun is under jax.jit with static arguments; bind them: functools.partial"
        ):
            aot(fun, tmp_path, key=key)(X, **kwargs) if kwargs else aot(fun, tmp_path, key=key)(X, 3)
    times = jax.jit(lambda x, n: x * n, static_argnames="n")
    np.testing.assert_array_equal(aot(partial(times, n=3), tmp_path, key=key)(X), 3 * X)


def test_a_module_for_a_jitted_function_is_refused(tmp_path):
    with pytest.raises(ValueError, match="aot: fun is under jax.jit and receives a module; pass the function without"):
        aot(jax.jit(loss), tmp_path, key="1")(Net(), X)


def test_a_changed_structure_and_assigned_parameters_are_refused(tmp_path):
    def add(model: Any) -> None:
        model.extra = nnx.Param(jnp.zeros(3))

    with pytest.raises(ValueError, match="aot: fun changes the structure of Net .`extra`., but only values of"):
        aot(add, tmp_path, key="1")(Net())
    ens = Ensemble.from_apply(lambda params, x: params["w"] * x, [{"w": X[0]}, {"w": X[1]}])

    def assign(member: Any) -> None:
        member.variables = {"w": 2 * member.variables["w"]}

    with pytest.raises(ValueError, match="aot: fun assigns the parameter `w`, but all calls share it"):
        aot(assign, tmp_path, key="1")(ens[0])


def test_a_variable_in_two_places_is_refused(tmp_path):
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="aot: `a` and `b` share the variable `bias`; put them into one module"):
        aot(lambda a, b: a(X) + b(X), tmp_path)(model, model)


if __name__ == "__main__":
    {"run all cases": run_all_cases, "on another processor": on_another_processor}[sys.argv[1]](sys.argv[2])
