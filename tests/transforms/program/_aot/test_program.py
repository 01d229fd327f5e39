"""A key asserts that the code is unchanged; a change is detected and reported."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import re
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.experimental import serialize_executable, sparse

from plurax.transforms import grad
from plurax.transforms.program import aot

X = np.cos(np.arange(12.0)).reshape(3, 4).astype(np.float32)
STALE = (
    "aot: the program of `.*` for key '1' was stale: .* that it closes over. It is removed. Discard its earlier "
    "results and changes of modules, call it again, and use a new key for new code. "
)


# Edits that change `step`: module code with a number to replace.
EDITS = {
    "a default": "def step(x, rate={}): return rate * x",
    "a default by keyword": "def step(x, *, rate={}): return rate * x",
    "a default under a transform": """
def inner(x, rate={}): return (rate * x).sum()
step = jax.grad(inner)""",
    "an argument of a decorator": """
def times(rate):
    def wrap(fun):
        return functools.wraps(fun)(lambda x: rate * fun(x))
    return wrap
@times({})
def step(x): return x""",
    "a function hidden by a decorator": """
def plain(fun): return lambda x: fun(x)
def inner(x): return {} * x
step = plain(inner)""",
    "a default under jit and partial": """
def inner(x, y, rate={}): return rate * x + y
step = functools.partial(jax.jit(inner), y=0.0)""",
    "an array bound by a partial": """
step = functools.partial(lambda x, rate: rate * x, rate=jnp.full(4, {}))""",
    "a constant of a nested function": """
def step(x):
    def inner(): return {} * x
    return inner()""",
    "the call of an object": """
class Step:
    def __call__(self, x): return {} * x
step = Step()""",
    "the call of a module": """
class Step(nnx.Module):
    def __call__(self, x): return {} * x
step = Step()""",
    "the call of a module under nnx.jit": """
class Step(nnx.Module):
    @nnx.jit
    def __call__(self, x): return {} * x
step = Step()""",
    "the call of a module under eqx.filter_jit": """
class Step(eqx.Module):
    @eqx.filter_jit
    def __call__(self, x): return {} * x
step = Step()""",
    "an argument bound by the partial of a method": """
class Step:
    def method(self, x, rate): return rate * x
    times = functools.partialmethod(method, rate={})
    def __call__(self, x): return self.times(x)
step = Step()""",
    "a method of a class": """
class Step:
    @classmethod
    def method(cls, x, rate={}): return rate * x
step = Step.method""",
    "a property": """
class Step(nnx.Module):
    @property
    def rate(self): return {}
    def method(self, x): return self.rate * x
step = Step().method""",
    "the setter of a property": """
class Step:
    @property
    def rate(self): return self._rate
    @rate.setter
    def rate(self, value): self._rate = {} * value
    def __call__(self, x):
        self.rate = 1.0
        return self.rate * x
step = Step()""",
    "the attribute of a function": """
def step(x): return step.rate * x
step.rate = {}""",
    "a metaclass": """
class Meta(type):
    @property
    def rate(cls): return {}
class Step(metaclass=Meta):
    @classmethod
    def method(cls, x): return cls.rate * x
step = Step.method""",
    "a special attribute of a class": """
class Step:
    __slots__ = ()
    __call__ = staticmethod(functools.partial(lambda x, rate: rate * x, rate={}))
step = Step()""",
    "the flatten functions of a pytree": """
class Pair:
    def __init__(self, x): self.x = x
jax.tree_util.register_pytree_node(Pair, lambda pair: (({} * pair.x,), None), lambda _, x: Pair(*x))
def step(x): return jax.tree.leaves(Pair(x))[0]""",
    "a global number": """
rate = {}
def step(x): return rate * x""",
    "a global function": """
def inner(x): return {} * x
def step(x): return inner(x)""",
    "a method of a module under a transform": """
class Step(nnx.Module):
    def method(self, x): return ({} * x).sum()
step = grad(Step().method)""",
    "the rule of a derivative": """
@jax.custom_jvp
def inner(x): return x.sum()
@inner.defjvp
def rule(primals, tangents): return inner(*primals), {} * tangents[0].sum()
step = jax.grad(inner)""",
    "the attribute of an object": """
class Step:
    def __init__(self, rate): self.rate = [rate]
    def method(self, x): return self.rate[0] * x
step = Step({}).method""",
    "an optimizer": """
optimizer = optax.sgd({})
def step(x): return -optimizer.update(x, optimizer.init(x))[0]""",
}


def module_of(code: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module with this code, importable under this name."""
    module: Any = types.ModuleType(name)
    vars(module).update(eqx=eqx, functools=functools, grad=grad, jax=jax, jnp=jnp, nnx=nnx, optax=optax)
    monkeypatch.setitem(sys.modules, name, module)
    exec(code, vars(module))
    return module


def found_to_be_stale(old: Callable[..., Any], make: Callable[[], Callable[..., Any]], directory: Path) -> None:
    """Assert that the next process detects that `make()` differs from the compiled `old`."""
    before = jax.tree.leaves(aot(old, directory, key="1")(X))
    new = make()
    after = jax.tree.leaves(new(X))
    assert any(not np.allclose(a, b) for a, b in zip(before, after, strict=True))
    program = aot(new, directory, key="1")
    chosen_by_the_key = jax.tree.leaves(program(X))
    with pytest.raises(RuntimeError, match=STALE):
        program(X)
    assert list(directory.iterdir()) == []
    program(X)
    (path,) = directory.iterdir()
    content = path.read_bytes()
    for again in (program, program, aot(new, directory, key="1")):
        for a, b, c, d in zip(jax.tree.leaves(again(X)), after, chosen_by_the_key, before, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
            np.testing.assert_array_equal(c, d)
    assert path.read_bytes() == content


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_noticed_before_the_second_call_returns(edit, tmp_path, monkeypatch):
    old, new = (functools.partial(module_of, EDITS[edit].format(rate), "edited", monkeypatch) for rate in (2.0, 3.0))
    found_to_be_stale(old().step, lambda: new().step, tmp_path)


def test_an_edit_of_a_module_that_shadows_a_standard_one_is_detected(tmp_path, monkeypatch):
    old, new = (
        functools.partial(module_of, f"def step(x): return {rate} * x", "wave", monkeypatch) for rate in (2.0, 3.0)
    )
    found_to_be_stale(old().step, lambda: new().step, tmp_path)


def test_an_edit_of_another_package_is_detected(tmp_path, monkeypatch):
    def installed(rate: float) -> Any:
        module_of(f"def times(x): return {rate} * x", "package", monkeypatch)
        return module_of("import package\ndef step(x): return package.times(x)", "edited", monkeypatch).step

    found_to_be_stale(installed(2.0), lambda: installed(3.0), tmp_path)


def test_a_setting_of_flax_is_detected(tmp_path):
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dropout(0.5, deterministic=False)(
                linen.Sequential([linen.Dropout(0.5, deterministic=False)])(x)
            )

    def step(x: Any) -> Any:
        return Net().apply({}, x, rngs={"dropout": jax.random.key(0)})

    with contextlib.ExitStack() as stack:

        def make() -> Callable[..., Any]:
            stack.enter_context(flax.config.temp_flip_flag("fix_rng_separator", not flax.config.flax_fix_rng_separator))
            return step

        found_to_be_stale(step, make, tmp_path)


@pytest.mark.parametrize("key", ["1", None])
def test_a_function_on_other_lines_is_unchanged(key, tmp_path, monkeypatch):
    code = "def step(x): return {} * jnp.linalg.cholesky(jnp.diag(1.0 + x[0] ** 2))"
    results = []
    for rate, lines in (("2.0", ""), ("2.0", "\n" * 7)):
        program = aot(module_of(lines + code.format(rate), "edited", monkeypatch).step, tmp_path, key=key)
        results += [program(X), program(X)]
    assert len(list(tmp_path.iterdir())) == 1
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    if key is None:  # and on the same lines, but with another number, it is another program
        other = aot(module_of(code.format("3.0"), "edited", monkeypatch).step, tmp_path)
        np.testing.assert_allclose(other(X), 1.5 * results[0], rtol=1e-6)
        assert len(list(tmp_path.iterdir())) == 2


def test_a_changed_result_structure_is_detected(tmp_path):
    program = aot(lambda x: {"a": x, "b": -x}, tmp_path, key="1")
    assert list(program(X)) == ["a", "b"]
    program = aot(lambda x: {"a": x, "c": -x}, tmp_path, key="1")
    assert list(program(X)) == ["a", "b"]
    with pytest.raises(RuntimeError, match=STALE):
        program(X)
    assert list(program(X)) == ["a", "c"]


def test_unchanged_functions_are_traced_only_once(tmp_path, end_of_process):
    traces = []

    def step(x: Any) -> Any:
        traces.append(x)
        return 2.0 * x

    aot(step, tmp_path, key="1")(X)
    program = aot(step, tmp_path, key="1")
    counts = []
    for _ in range(4):
        np.testing.assert_array_equal(program(X), 2 * X)
        counts.append(len(traces))
    end_of_process()
    assert [*counts, len(traces)] == [1, 2, 2, 2, 2]


def test_each_kind_of_arguments_is_compared_separately(tmp_path):
    sizes = (1, 2, 3)
    for n in sizes:
        aot(lambda x: 2.0 * x, tmp_path, key="1")(X[:n])
    program = aot(lambda x: 3.0 * x, tmp_path, key="1")
    np.testing.assert_array_equal(program(X[:1]), 2 * X[:1])
    with pytest.raises(RuntimeError, match=STALE):  # from the first call
        program(X[:2])
    for n in (2, 3):
        with pytest.raises(RuntimeError, match=STALE):
            program(X[:n])
    for n in sizes:
        np.testing.assert_array_equal(program(X[:n]), 3 * X[:n])


def test_only_the_first_call_of_a_function_is_compared_later(tmp_path, end_of_process):
    def step(x: Any) -> Any:
        traces.append(x.shape)
        return 2.0 * x

    traces: list[Any] = []
    sizes = (1, 2, 3)
    for n in sizes:
        aot(step, tmp_path, key="1")(X[:n])
    traces.clear()
    program = aot(step, tmp_path, key="1")
    program(X[:1])
    assert traces == []
    program(X[:2])
    assert traces == [(1, 4), (2, 4)]
    end_of_process()
    assert traces == [(1, 4), (2, 4)]
    for n in sizes:
        program(X[:n])
    end_of_process()
    assert traces == [(n, 4) for n in sizes]


def test_the_first_call_of_a_function_is_compared_at_the_end_if_it_is_the_only_one(tmp_path, end_of_process):
    def step(x: Any) -> Any:
        traces.append(x.shape)
        return 2.0 * x

    traces: list[Any] = []
    for _ in range(2):
        aot(step, tmp_path, key="1")(X)
    assert traces == [(3, 4)]
    for _ in range(2):
        assert end_of_process() == []
        assert traces == 2 * [(3, 4)]


def test_the_second_call_may_be_that_of_another_function_of_the_same_file(tmp_path, end_of_process):
    def thrice(x: Any) -> Any:
        traces.append(x)
        return 3.0 * x

    traces: list[Any] = []
    thrice.__qualname__ = (lambda: None).__qualname__
    aot(lambda x: 2.0 * x, tmp_path, key="1")(X)
    np.testing.assert_array_equal(aot(thrice, tmp_path, key="1")(X), 2 * X)
    with pytest.raises(RuntimeError, match=STALE):
        aot(thrice, tmp_path, key="1")(X)
    for n in range(3):
        np.testing.assert_array_equal(aot(thrice, tmp_path, key="1")(X), 3 * X)
        assert len(traces) == 2 + n  # after a stale result, programs are checked immediately
    assert end_of_process() == []
    assert len(traces) == 4


def test_only_one_thread_has_the_first_call(tmp_path):
    for n in range(1, 4):
        aot(lambda x: 2.0 * x, tmp_path, key="1")(X[:n])
    program = aot(lambda x: 3.0 * x, tmp_path, key="1")
    found = called_at_once(program, [X[: 1 + i % 3] for i in range(9)])
    assert sum(x == 2.0 for x in found) == 1
    assert all(x in (2.0, 3.0) or "was stale" in str(x) for x in found)


def test_static_parts_without_distinct_names_are_traced_in_one_process(tmp_path):
    class Net(nnx.Module):
        def __init__(self, activation: Callable[..., Any]) -> None:
            self.activation = activation

    nets = [Net(lambda x: 2.0 * x), Net(lambda x: 3.0 * x)]
    for _ in range(2):
        program = aot(lambda net, x: net.activation(x), tmp_path, key="1")
        for _ in range(2):
            for net, rate in zip(nets, (2, 3), strict=True):
                np.testing.assert_array_equal(program(net, X), rate * X)


def test_without_verification_a_stale_program_is_used(tmp_path, end_of_process):
    aot(lambda x: 2.0 * x, tmp_path, key="1")(X)
    program = aot(lambda x: 3.0 * x, tmp_path, key="1", verify=False)
    for _ in range(3):
        np.testing.assert_array_equal(program(X), 2 * X)
    assert end_of_process() == []
    np.testing.assert_array_equal(grad(program)(X[0, 0]), np.float32(3.0))  # derivatives use the function's own code


def test_verify_applies_under_transforms(tmp_path):
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    aot(lambda model, x: model(x).sum(), tmp_path, key="1")(model, X)
    program = aot(model, tmp_path, key="1", verify=False)
    np.testing.assert_allclose(
        grad(lambda x: program(x).sum())(X), np.tile(model.kernel[...].sum(1), (3, 1)), rtol=1e-6
    )


def test_a_file_is_not_used_for_a_function_that_closes_over_a_tracer(tmp_path):
    def total(factor: Any) -> Any:
        return aot(lambda x: (factor * x).sum(), tmp_path, key="1")(X)

    np.testing.assert_allclose(total(2.0), 2 * X.sum(), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(total)(2.0), X.sum(), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(total)(jnp.arange(3.0)), np.arange(3) * X.sum(), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(total)(3.0), 3 * X.sum(), rtol=1e-6)


def test_a_function_that_can_no_longer_be_traced_removes_the_file(tmp_path):
    def broken(x: Any) -> Any:
        raise ZeroDivisionError("no")

    broken.__qualname__ = "step"

    def step(x: Any) -> Any:
        return 2.0 * x

    step.__qualname__ = "step"
    aot(step, tmp_path, key="1")(X)
    program = aot(broken, tmp_path, key="1")
    program(X)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) as caught:
            program(X)
        assert "aot: fun was traced to compare it with" in caught.value.__notes__[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("later", ["the next call", "the end"])
def test_an_interrupted_comparison_is_repeated(later, tmp_path, end_of_process):
    def thrice(x: Any) -> Any:
        if interrupts:
            raise interrupts.pop()
        return 3.0 * x

    interrupts = [KeyboardInterrupt()]
    thrice.__qualname__ = (lambda: None).__qualname__
    aot(lambda x: 2.0 * x, tmp_path, key="1")(X)
    program = aot(thrice, tmp_path, key="1")
    program(X)
    with pytest.raises(KeyboardInterrupt):
        program(X)
    if later == "the next call":
        with pytest.raises(RuntimeError, match=STALE):
            program(X)
    else:
        assert ["was stale: " in warning for warning in end_of_process()] == [True]
    assert end_of_process() == []


def test_a_failed_write_removes_the_stale_program(tmp_path):
    def called(x: Any) -> Any:
        return jax.pure_callback(lambda x: 3 * np.asarray(x), x, x)

    aot(lambda x: 2.0 * x, tmp_path, key="1")(X)
    called.__qualname__ = (lambda: None).__qualname__
    program = aot(called, tmp_path, key="1")
    program(X)
    with pytest.raises(RuntimeError, match=STALE):
        program(X)
    with pytest.warns(UserWarning, match="cannot be written .*callback"):
        np.testing.assert_array_equal(program(X), 3 * X)
    np.testing.assert_array_equal(program(X), 3 * X)
    assert list(tmp_path.iterdir()) == []


def test_programs_that_are_traced_to_be_loaded_are_compared_at_once(tmp_path, end_of_process):
    eye = sparse.BCSR.fromdense(np.eye(3, dtype=np.float32))  # its product is not an operation of XLA
    aot(lambda x: 2.0 * (eye @ x), tmp_path, key="1")(X)
    program = aot(lambda x: 3.0 * (eye @ x), tmp_path, key="1")
    with pytest.raises(RuntimeError, match=STALE):
        program(X)
    np.testing.assert_array_equal(program(X), 3 * X)
    assert end_of_process() == []


def test_deferred_checks_hold_no_arguments(tmp_path, end_of_process):
    aot(lambda x: 2.0 * x, tmp_path, key="1")(jnp.asarray(X))
    held = jnp.asarray(X)
    aot(lambda x: 3.0 * x, tmp_path, key="1")(held)
    reference = weakref.ref(held)
    del held
    gc.collect()
    assert reference() is None
    assert ["was stale: " in warning for warning in end_of_process()] == [True]  # the check was deferred


def test_concurrent_calls_raise_or_return_the_new_result(tmp_path):
    aot(lambda x: 2.0 * x, tmp_path, key="1")(X)
    program = aot(lambda x: 3.0 * x, tmp_path, key="1")
    program(X)
    found = called_at_once(program, [X] * 4)
    assert any("was stale" in str(x) for x in found)
    assert all(x == 3.0 or "was stale" in x for x in found)


def called_at_once(program: Callable[..., Any], arguments: list[Any]) -> list[Any]:
    """Call in one thread for each argument; return the factor applied to its first entry, or the error."""
    found: list[Any] = []
    together = threading.Barrier(len(arguments))

    def work(x: Any) -> None:
        together.wait()
        try:
            found.append(float(program(x)[0, 0] / x[0, 0]))
        except RuntimeError as error:
            found.append(str(error))

    threads = [threading.Thread(target=work, args=(x,)) for x in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(arguments)
    return found


# Programs that are called once per process, in several contexts, and two objects with one key that are called
# alternately. The arguments select how the process ends, and where in this sequence it starts.
SCRIPT = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from plurax.transforms.program import aot

directory, rate, ending, first = sys.argv[1], float(sys.argv[2]), sys.argv[3], int(sys.argv[4])

def plain(x): return rate * x
def of_doubles(x): return rate * jnp.asarray(x, float)
def on_a_mesh(x): return rate * x
def of_a_product(x): return rate * (x @ x)
class Net(nnx.Module):
    def __init__(self): self.w = nnx.Param(jnp.ones(3))
    def __call__(self, x): return rate * self.w * x

x = jnp.ones(3)
out = [aot(plain, directory, key="1")(x)]
with jax.enable_x64(True):
    out.append(aot(of_doubles, directory, key="1")(1.0))
mesh = jax.make_mesh((1,), ("a",))
with jax.set_mesh(mesh):
    out.append(aot(on_a_mesh, directory, key="1")(jax.device_put(jnp.ones(8), jax.P("a"))))
with jax.default_matmul_precision("float32"):
    out.append(aot(of_a_product, directory, key="1")(jnp.eye(3)))
out.append(aot(Net(), directory, key="1")(x))
print([float(np.ravel(y)[0]) for y in out])

class Loss:
    def __init__(self, rate): self.rate = rate
    def __call__(self, x): return self.rate * x

def found_or_said(program):
    said = []
    for _ in range(3):  # each file belongs to one of the two, so both may be stale
        try:
            return float(program(x)[0]), said
        except RuntimeError as error:
            said.append(str(error))
    return None, said

programs = {rate: aot(Loss(rate), "of_two_objects", key="1") for rate in (2.0, 3.0)}
rates = [2.0, 3.0, 3.0, 2.0, 3.0, 2.0, 3.0][first:]
print(json.dumps([[rate, *found_or_said(programs[rate])] for rate in rates]), flush=True)
if ending == "interrupt":
    raise KeyboardInterrupt
if ending == "exit":
    jax.set_mesh(mesh)
    sys.exit(3)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    directory = tmp_path_factory.mktemp("aot")
    (directory / "script.py").write_text(SCRIPT)
    ends = [("2", "", "0"), ("2", "interrupt", "1"), ("3", "exit", "0"), ("3", "", "1")]
    return [
        subprocess.run(
            [sys.executable, "script.py", "programs", *how],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        for how in ends
    ]


@pytest.mark.slow
@pytest.mark.xdist_group("aot at the end of processes")
def test_at_the_end_of_a_process_what_is_stale_is_warned_of_and_removed(ended):
    compiled, same, edited, last = ended
    found = [done.stdout.splitlines()[0] for done in ended]
    assert found[0].startswith("[2.0, ")
    assert found[1:] == [found[0], found[0], found[0].replace("2.0", "3.0")]
    assert edited.stderr.count("was stale: ") == edited.stderr.count("It is removed.") == 5
    assert edited.returncode == 3
    assert "KeyboardInterrupt" in same.stderr
    for done in (compiled, same, last):
        assert "stale" not in done.stderr
        assert "aot:" not in done.stderr
    assert "Exception ignored" not in "".join(done.stderr for done in ended)


@pytest.mark.slow
@pytest.mark.xdist_group("aot at the end of processes")
def test_two_functions_with_one_key_are_correct_or_refused_from_the_second_call(ended):
    stale = 0
    for done in ended:
        called = set()
        for rate, found, said in json.loads(done.stdout.splitlines()[1]):
            assert found == rate or (found is not None and rate not in called)
            assert all("was stale" in message for message in said)
            called.add(rate)
            stale += len(said)
    assert stale >= len(ended)


# Programs whose checks are deferred to exit, each with its own directory. A fork exits earlier.
WAITING = """
import atexit, os, shutil, sys, warnings

process = os.getpid()
atexit.register(lambda: os.getpid() != process and os._exit(4))  # runs last, where JAX would crash in a fork

import jax, jax.numpy as jnp
from plurax.transforms.program import aot

x = jnp.arange(1.0, 5.0)

def edit(directory, x=x):
    for rate in (2.0, 3.0):
        aot(lambda x: rate * x, directory, key="1")(x)

edit("gone")
shutil.rmtree("gone")

numbers = [2.0]
for _ in range(2):
    aot(lambda x: numbers[0] * x, "untraceable", key="1")(x)
numbers.clear()

edit("several")
edit("several", x[:2])

mesh = jax.make_mesh((1,), ("a",))
for _ in range(2):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        out = aot(lambda x: 2.0 * x, "abstract", key="1")(jax.device_put(x, jax.NamedSharding(mesh, jax.P("a"))))
print(out.tolist(), flush=True)

with warnings.catch_warnings(action="ignore"):  # JAX warns of forks
    fork = os.fork()
if fork == 0:
    os.dup2(os.open("fork.txt", os.O_WRONLY | os.O_CREAT), 2)
    sys.exit()
print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), len(os.listdir("several")))
warnings.simplefilter("error")
"""


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], Callable[[str], list[str]]]:
    """Return the directory, the output, and a function that returns the warnings about one of its subdirectories."""
    directory = tmp_path_factory.mktemp("aot")
    (directory / "script.py").write_text(WAITING)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=directory, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    lines = done.stderr.splitlines()
    return directory, done.stdout.splitlines(), lambda name: [line for line in lines if f"{directory / name}/" in line]


@pytest.mark.slow
@pytest.mark.xdist_group("aot at the end of processes")
def test_at_exit_a_removed_directory_is_not_recreated(waiting):
    directory, _, warnings_about = waiting
    (warning,) = warnings_about("gone")
    assert re.search(r"was stale: .* It is removed\.", warning)
    assert not (directory / "gone").exists()


@pytest.mark.slow
@pytest.mark.xdist_group("aot at the end of processes")
def test_at_exit_untraceable_programs_warn_and_are_removed(waiting):
    directory, _, warnings_about = waiting
    (warning,) = warnings_about("untraceable")
    assert re.search(r"aot: .* could not be verified, because tracing fun .*IndexError.*is removed", warning)
    assert list((directory / "untraceable").iterdir()) == []


@pytest.mark.slow
@pytest.mark.xdist_group("aot at the end of processes")
def test_at_exit_warnings_as_errors_are_all_shown(waiting):
    directory, _, warnings_about = waiting
    assert ["was stale: " in warning for warning in warnings_about("several")] == [True, True]
    assert list((directory / "several").iterdir()) == []


@pytest.mark.slow
@pytest.mark.xdist_group("aot at the end of processes")
def test_under_an_abstract_mesh_a_program_is_written_too(waiting):
    directory, printed, warnings_about = waiting
    assert printed[0] == "[2.0, 4.0, 6.0, 8.0]"
    assert warnings_about("abstract") == []
    assert len(list((directory / "abstract").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.xdist_group("aot at the end of processes")
def test_a_fork_does_not_trace_at_exit(waiting):
    directory, printed, _ = waiting
    assert printed[1] == "4 2"  # its exit code, and the number of its files
    assert "aot:" not in (directory / "fork.txt").read_text()


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("key", ["1", None])
def test_a_world_writable_file_is_refused(key, tmp_path):
    with umask(0):
        aot(lambda x: 2.0 * x, tmp_path, key=key)(X)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o644
    path.chmod(0o664)
    np.testing.assert_array_equal(aot(lambda x: 2.0 * x, tmp_path, key=key)(X), 2 * X)
    path.chmod(0o646)
    match = (
        r"aot: .*\.aot may be written by everybody \(its mode is 646\), and its code would run; delete it, or pass your"
    )
    with pytest.raises(PermissionError, match=match):
        aot(lambda x: 2.0 * x, tmp_path, key=key)(X)


def test_a_file_of_another_user_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    aot(lambda x: 2.0 * x, tmp_path, key="1")(X)
    monkeypatch.setattr(serialize_executable, "deserialize_and_load", lambda *_, **__: pytest.fail("it was loaded"))
    fstat = os.fstat
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for uid, refused in ((1001, True), (1000, False), (0, False)):
        monkeypatch.setattr(os, "fstat", lambda descriptor, uid=uid: owned(fstat(descriptor), uid))
        outcome = pytest.raises(PermissionError, match=r"\.aot belongs to another user \(number 1001\), and its code")
        with outcome if refused else pytest.raises(pytest.fail.Exception, match="it was loaded"):
            aot(lambda x: 2.0 * x, tmp_path, key="1")(X)


def owned(found: os.stat_result, uid: int) -> os.stat_result:
    fields = list(found)
    fields[4] = uid
    return os.stat_result(fields)
