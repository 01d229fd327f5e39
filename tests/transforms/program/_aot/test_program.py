"""A key is the caller's word that the code is the same; that it was not is found out, and said."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import subprocess
import sys
import threading
import types
import warnings
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

from plurax.transforms import grad
from plurax.transforms.program import aot
from plurax.transforms.program._aot import program as aot_program

X = np.cos(np.arange(12.0)).reshape(3, 4).astype(np.float32)
STALE = (
    "aot: the program of `.*` for key '1' was stale: .* that it closes over. It is removed. Discard what it has "
    "returned and changed of modules so far, call it again, and give new code a new key. "
)


@pytest.fixture(autouse=True)
def waiting(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that wait for the end of the process, of which there are none of other tests, nor are at its end."""
    found: list[Any] = []
    monkeypatch.setattr(aot_program, "_waiting", found)
    return found


# What makes `step` another function: code in a module, with a number in it that somebody edits.
EDITS = {
    "a default": "def step(x, rate={}): return rate * x",
    "a default by keyword": "def step(x, *, rate={}): return rate * x",
    "a default under a transform": """
def inner(x, rate={}): return (rate * x).sum()
step = jax.grad(inner)""",
    "the rate of a decorator": """
def times(rate):
    def wrap(fun):
        return functools.wraps(fun)(lambda x: rate * fun(x))
    return wrap
@times({})
def step(x): return x""",
    "a function under a decorator that hides it": """
def plain(fun): return lambda x: fun(x)
def inner(x): return {} * x
step = plain(inner)""",
    "a default under jit and partial": """
def inner(x, y, rate={}): return rate * x + y
step = functools.partial(jax.jit(inner), y=0.0)""",
    "an array that is bound by a partial": """
step = functools.partial(lambda x, rate: rate * x, rate=jnp.full(4, {}))""",
    "the constant of a function in it": """
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
    "what is bound by the partial of a method": """
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
    __call__ = functools.partial(lambda x, rate: rate * x, rate={})
step = Step()""",
    "the registered functions of a pytree": """
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
    "what an object holds": """
class Step:
    def __init__(self, rate): self.rate = [rate]
    def method(self, x): return self.rate[0] * x
step = Step({}).method""",
    "an optimizer": """
optimizer = optax.sgd({})
def step(x): return -optimizer.update(x, optimizer.init(x))[0]""",
}


def module_of(code: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of this code, which can be imported by this name."""
    module: Any = types.ModuleType(name)
    vars(module).update(eqx=eqx, functools=functools, grad=grad, jax=jax, jnp=jnp, nnx=nnx, optax=optax)
    monkeypatch.setitem(sys.modules, name, module)
    exec(code, vars(module))
    return module


def found_to_be_stale(old: Callable[..., Any], make: Callable[[], Callable[..., Any]], directory: Path) -> None:
    """Assert that `old`, compiled in a process, is noticed to be another function than `make()` in the next one."""
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


def test_an_edit_of_what_only_seems_to_be_a_standard_module_is_noticed(tmp_path, monkeypatch):
    old, new = (
        functools.partial(module_of, f"def step(x): return {rate} * x", "wave", monkeypatch) for rate in (2.0, 3.0)
    )
    found_to_be_stale(old().step, lambda: new().step, tmp_path)


def test_an_edit_of_another_package_is_noticed(tmp_path, monkeypatch):
    def installed(rate: float) -> Any:
        module_of(f"def times(x): return {rate} * x", "package", monkeypatch)
        return module_of("import package\ndef step(x): return package.times(x)", "edited", monkeypatch).step

    found_to_be_stale(installed(2.0), lambda: installed(3.0), tmp_path)


def test_a_setting_of_flax_is_noticed(tmp_path):
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


def test_other_code_for_the_structure_of_the_result_is_noticed(tmp_path):
    program = aot(lambda x: {"a": x, "b": -x}, tmp_path, key="1")
    assert list(program(X)) == ["a", "b"]
    program = aot(lambda x: {"a": x, "c": -x}, tmp_path, key="1")
    assert list(program(X)) == ["a", "b"]
    with pytest.raises(RuntimeError, match=STALE):
        program(X)
    assert list(program(X)) == ["a", "c"]


def test_what_is_the_same_is_traced_once_and_no_more(tmp_path, waiting):
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
    assert counts == [1, 2, 2, 2]
    assert waiting == []


def test_each_kind_of_arguments_is_compared_by_itself(tmp_path):
    sizes = (1, 2, 3)
    for n in sizes:
        aot(lambda x: 2.0 * x, tmp_path, key="1")(X[:n])
    program = aot(lambda x: 3.0 * x, tmp_path, key="1")
    np.testing.assert_array_equal(program(X[:1]), 2 * X[:1])
    with pytest.raises(RuntimeError, match=STALE):  # of the first call
        program(X[:2])
    for n in (2, 3):
        with pytest.raises(RuntimeError, match=STALE):
            program(X[:n])
    for n in sizes:
        np.testing.assert_array_equal(program(X[:n]), 3 * X[:n])


def test_only_the_first_call_of_a_function_is_compared_later(tmp_path, waiting):
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
    assert (traces, len(waiting)) == ([], 1)
    program(X[:2])
    assert (traces, waiting) == ([(1, 4), (2, 4)], [])
    for n in sizes:
        program(X[:n])
    assert (traces, waiting) == ([(n, 4) for n in sizes], [])


def test_the_second_call_may_be_that_of_another_function_of_the_same_file(tmp_path, waiting):
    aot(lambda x: 2.0 * x, tmp_path, key="1")(X)
    np.testing.assert_array_equal(aot(lambda x: 3.0 * x, tmp_path, key="1")(X), 2 * X)
    with pytest.raises(RuntimeError, match=STALE):
        aot(lambda x: 3.0 * x, tmp_path, key="1")(X)
    for _ in range(3):
        np.testing.assert_array_equal(aot(lambda x: 3.0 * x, tmp_path, key="1")(X), 3 * X)
        assert waiting == []  # what has been stale is compared at once


def test_two_objects_of_one_key_are_right_or_refused_from_the_second_call_on(tmp_path, monkeypatch):
    class Loss:
        def __init__(self, rate: float) -> None:
            self.rate = rate

        def __call__(self, x: Any) -> Any:
            return self.rate * x

    for process in range(4):
        monkeypatch.setattr(aot_program, "_stale", set())
        said = "was stale"
        programs = {rate: aot(Loss(rate), tmp_path, key="1") for rate in (2.0, 3.0)}
        calls = dict.fromkeys(programs, 0)
        for rate in [2.0, 3.0, 3.0, 2.0, 3.0, 2.0, 3.0][process % 2 :]:
            for _ in range(3):  # each file is of one of the two, so both may be stale
                try:
                    found = programs[rate](X)
                    break
                except RuntimeError as error:
                    said = str(error)
            assert "was stale" in said
            assert not calls[rate] or np.array_equal(found, rate * X)
            calls[rate] += 1


def test_no_two_threads_have_a_first_call(tmp_path):
    for n in range(1, 4):
        aot(lambda x: 2.0 * x, tmp_path, key="1")(X[:n])
    program = aot(lambda x: 3.0 * x, tmp_path, key="1")
    found = called_at_once(program, [X[: 1 + i % 3] for i in range(9)])
    assert sum(x == 2.0 for x in found) == 1
    assert all(x in (2.0, 3.0) or "was stale" in str(x) for x in found)


def test_static_parts_that_cannot_be_told_apart_by_name_are_traced_in_one_process(tmp_path):
    class Net(nnx.Module):
        def __init__(self, activation: Callable[..., Any]) -> None:
            self.activation = activation

    nets = [Net(lambda x: 2.0 * x), Net(lambda x: 3.0 * x)]
    for _ in range(2):
        program = aot(lambda net, x: net.activation(x), tmp_path, key="1")
        for _ in range(2):
            for net, rate in zip(nets, (2, 3), strict=True):
                np.testing.assert_array_equal(program(net, X), rate * X)


def test_unless_it_is_to_be_verified(tmp_path, waiting):
    aot(lambda x: 2.0 * x, tmp_path, key="1")(X)
    program = aot(lambda x: 3.0 * x, tmp_path, key="1", verify=False)
    for _ in range(3):
        np.testing.assert_array_equal(program(X), 2 * X)
    assert waiting == []
    np.testing.assert_array_equal(grad(program)(X[0, 0]), np.float32(3.0))  # its own code is what is differentiated


def test_verify_goes_with_the_function_through_transforms(tmp_path):
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    aot(lambda model, x: model(x).sum(), tmp_path, key="1")(model, X)
    program = aot(model, tmp_path, key="1", verify=False)
    np.testing.assert_allclose(
        grad(lambda x: program(x).sum())(X), np.tile(model.kernel[...].sum(1), (3, 1)), rtol=1e-6
    )


def test_a_file_does_not_hide_a_value_of_a_transform_that_is_closed_over(tmp_path):
    def total(factor: Any) -> Any:
        return aot(lambda x: (factor * x).sum(), tmp_path, key="1")(X)

    np.testing.assert_allclose(total(2.0), 2 * X.sum(), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(total)(2.0), X.sum(), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(total)(jnp.arange(3.0)), np.arange(3) * X.sum(), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(total)(3.0), 3 * X.sum(), rtol=1e-6)


def test_what_cannot_be_traced_any_more_removes_the_file(tmp_path):
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


def test_a_comparison_that_is_interrupted_is_made_later(tmp_path, monkeypatch, waiting):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    aot(lambda x: 2.0 * x, tmp_path, key="1")(X)
    program = aot(lambda x: 3.0 * x, tmp_path, key="1")
    program(X)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(aot_program.CallSignature, "lower", interrupt)
        with pytest.raises(KeyboardInterrupt):
            program(X)
    assert len(waiting) == 1
    with pytest.raises(RuntimeError, match=STALE):
        program(X)
    assert waiting == []


def test_a_new_program_that_cannot_be_written_takes_the_old_one_away(tmp_path):
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


def test_what_has_to_be_traced_to_be_loaded_is_compared_at_once(tmp_path, monkeypatch, waiting):
    line = aot_program._line
    monkeypatch.setattr(aot_program, "_line", lambda *args: line(*args) | {"calls": ["somebody_elses"]})
    aot(lambda x: 2.0 * x, tmp_path, key="1")(X)
    program = aot(lambda x: 3.0 * x, tmp_path, key="1")
    with pytest.raises(RuntimeError, match=STALE):
        program(X)
    np.testing.assert_array_equal(program(X), 3 * X)
    assert waiting == []


def test_what_waits_holds_no_array_of_the_arguments(tmp_path, waiting):
    aot(lambda x: 2.0 * x, tmp_path, key="1")(jnp.asarray(X))
    held = jnp.asarray(X)
    aot(lambda x: 2.0 * x, tmp_path, key="1")(held)
    reference = weakref.ref(held)
    del held
    gc.collect()
    assert reference() is None
    assert len(waiting) == 1


def test_threads_that_call_at_once_all_hear_of_it_or_have_the_new_result(tmp_path):
    aot(lambda x: 2.0 * x, tmp_path, key="1")(X)
    program = aot(lambda x: 3.0 * x, tmp_path, key="1")
    program(X)
    found = called_at_once(program, [X] * 4)
    assert any("was stale" in str(x) for x in found)
    assert all(x == 3.0 or "was stale" in x for x in found)


def called_at_once(program: Callable[..., Any], arguments: list[Any]) -> list[Any]:
    """For each argument, which has a thread of its own: by what the first number was multiplied, or the error."""
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


# Programs that are wanted once in a process, in several surroundings; how it ends is the last argument.
SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from plurax.transforms.program import aot

directory, rate, ending = sys.argv[1], float(sys.argv[2]), sys.argv[3]

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
print([float(np.ravel(y)[0]) for y in out], flush=True)
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
    ends = [("2", ""), ("2", "interrupt"), ("3", "exit"), ("3", "")]
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


@pytest.mark.xdist_group("aot at the end of processes")
def test_at_the_end_of_a_process_what_is_stale_is_warned_of_and_removed(ended):
    compiled, same, edited, last = ended
    assert [done.stdout.split(", ")[0] for done in ended] == ["[2.0", "[2.0", "[2.0", "[3.0"]
    assert edited.stdout == compiled.stdout
    assert last.stdout == compiled.stdout.replace("2.0", "3.0")
    assert edited.stderr.count("was stale: ") == edited.stderr.count("It is removed.") == 5
    assert edited.returncode == 3
    assert "KeyboardInterrupt" in same.stderr
    for done in (compiled, same, last):
        assert "stale" not in done.stderr
        assert "aot:" not in done.stderr
    assert "Exception ignored" not in "".join(done.stderr for done in ended)


def test_at_the_end_a_directory_that_is_gone_stays_so(tmp_path, waiting):
    directory = tmp_path / "programs"
    aot(lambda x: 2.0 * x, directory, key="1")(X)
    aot(lambda x: 3.0 * x, directory, key="1")(X)
    next(directory.iterdir()).unlink()
    directory.rmdir()
    with pytest.warns(UserWarning, match=r"was stale: .* It is removed\."):
        aot_program._compare_all()
    assert not directory.exists()
    assert waiting == []


def test_at_the_end_what_cannot_be_traced_is_warned_of_and_removed(tmp_path):
    numbers = [2.0]
    for _ in range(2):
        aot(lambda x: numbers[0] * x, tmp_path, key="1")(X)
    numbers.clear()
    with pytest.warns(UserWarning, match=r"aot: whether .* is stale is not known, since fun .*IndexError.*is removed"):
        aot_program._compare_all()
    assert list(tmp_path.iterdir()) == []


def test_at_the_end_a_filter_that_makes_warnings_errors_hides_none(tmp_path, waiting):
    for rate in (2.0, 3.0):
        for n in (1, 2):
            aot(lambda x, rate=rate: rate * x, tmp_path, key="1")(X[:n])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        aot_program._compare_all()
    assert ["was stale: " in str(warning.message) for warning in caught] == [True, True]
    assert waiting == []


def test_under_a_mesh_without_devices_there_is_a_program_too(tmp_path):
    x = jax.device_put(jnp.arange(4.0), jax.NamedSharding(jax.make_mesh((1,), ("a",)), jax.P("a")))
    for _ in range(2):
        with jax.sharding.use_abstract_mesh(x.sharding.mesh.abstract_mesh):
            np.testing.assert_array_equal(aot(lambda x: 2.0 * x, tmp_path, key="1")(x), 2 * np.arange(4.0))
    aot_program._compare_all()


def test_a_fork_does_not_trace_at_its_end(tmp_path, monkeypatch):
    for rate in (2.0, 3.0):
        aot(lambda x, rate=rate: rate * x, tmp_path, key="1")(X)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    aot_program._compare_all()


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("key", ["1", None])
def test_a_file_that_everybody_may_write_is_refused(key, tmp_path):
    with umask(0):
        aot(lambda x: 2.0 * x, tmp_path, key=key)(X)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o644
    path.chmod(0o664)
    np.testing.assert_array_equal(aot(lambda x: 2.0 * x, tmp_path, key=key)(X), 2 * X)
    path.chmod(0o646)
    match = (
        r"aot: .*\.aot may be written by everybody \(its mode is 646\), and its code would run; delete it, or give your"
    )
    with pytest.raises(PermissionError, match=match):
        aot(lambda x: 2.0 * x, tmp_path, key=key)(X)


def test_a_file_of_another_user_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    aot(lambda x: 2.0 * x, tmp_path, key="1")(X)
    monkeypatch.setattr(aot_program, "loaded", lambda *_: pytest.fail("it was loaded"))
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
