"""Memory budgets: the largest chunk that fits, verified on the compiled program, inside and outside other traces."""

from __future__ import annotations

import contextlib
import re
import warnings
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.ensemble import Ensemble
from plurax.transforms import (
    batch_jacobian,
    hessian,
    hessian_diagonal,
    jacfwd,
    jacobian,
    jacrev,
    per_sample_grad,
    vmap,
)
from plurax.transforms._core import memory as budgets

pytestmark = pytest.mark.smoke

W = np.sin(np.arange(96.0 * 64)).reshape(96, 64).astype(np.float32)
X = np.cos(np.arange(64.0)).astype(np.float32)


def layer(x: Any) -> Any:
    return jnp.tanh(W @ jnp.tanh(x * x)) * jnp.sin(x).sum()


def temporaries(fun: Any, *args: Any) -> int:
    return held(jax.jit(fun).lower(*args).compile())


def held(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def energy(x: Any) -> Any:
    return jnp.sum(jnp.tanh(W @ x) ** 2)


@pytest.fixture(scope="module")
def expected() -> Any:
    return jax.jit(jax.jacfwd(layer))(X)


@pytest.fixture(scope="module")
def hessian_of_energy() -> Any:
    return jax.jit(jax.hessian(energy))(X)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    lower = budgets.lower_apart

    def counted(fun: Any) -> Any:
        lowered, tracers = lower(fun)
        found.append(held(lowered.compile()))
        return lowered, tracers

    monkeypatch.setattr(budgets, "lower_apart", counted)
    return found


@pytest.mark.optimized
@pytest.mark.parametrize("transform", [jacfwd, jacrev])
@pytest.mark.parametrize("budget", [6000, "12KiB"])
def test_the_temporaries_stay_within_the_budget(transform: Any, budget: Any, expected: Any, probes: list[int]) -> None:
    within = jax.jit(transform(layer, memory_budget=budget)).lower(X).compile()
    size = budget if isinstance(budget, int) else 12 * 2**10
    assert temporaries(transform(layer), X) > size
    assert held(within) <= size
    assert len(probes) <= 8
    assert max(need for need in probes if need <= size) > size / 3  # the chunk is about as large as possible
    chex.assert_trees_all_close(within(X), expected, rtol=2e-5, atol=1e-5)


def test_a_large_budget_needs_no_chunks(expected: Any, probes: list[int]) -> None:
    chex.assert_trees_all_close(jax.jit(jacobian(layer, memory_budget="1GB"))(X), expected, rtol=2e-5, atol=1e-5)
    assert len(probes) == 1


def test_a_uniform_constant_counts_as_in_the_whole_program() -> None:
    ones = jnp.ones((128, 128))
    fun = jax.jit(jacfwd(lambda x: jnp.tanh(ones @ jnp.tanh(ones @ x)), memory_budget=100_000))
    assert temporaries(fun, jnp.ones(128)) <= 100_000


def test_the_result_is_stored_once() -> None:
    """In chunks of 1, temporaries far below the result show that it is written in place."""
    fun = lambda x: {"a": jnp.tanh(x[:, None] * jnp.arange(40.0)), "b": jnp.sin(x)}
    x = jnp.ones(150)
    result = 4 * 150 * 150 * 41
    for transform in (jacfwd, jacrev):
        assert temporaries(transform(fun, chunk_size=1), x) < result / 10
        assert temporaries(transform(fun, chunk_size=4), x) < result / 4


def test_budgets_of_vmap(probes: list[int]) -> None:
    xs = np.sin(np.arange(90.0 * 64)).reshape(90, 64).astype(np.float32)
    row = lambda x: jnp.sin(jnp.cumsum(jnp.tanh(W @ x))).sum()
    within, whole = (jax.jit(f).lower(xs).compile() for f in (vmap(row, memory_budget=16_000), vmap(row)))
    assert held(whole) > 16_000 >= held(within)
    chex.assert_trees_all_close(within(xs), whole(xs), rtol=1e-5, atol=1e-5)
    assert any(need > 8_000 for need in probes if need <= 16_000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outer", "plain"),
    [
        pytest.param(jax.jit, lambda f: f, id="jit"),
        pytest.param(lambda f: jax.vmap(lambda s: f(s * X)), lambda f: jax.vmap(lambda s: f(s * X)), id="vmap"),
        pytest.param(
            lambda f: jax.grad(lambda s: jnp.sum(f(s * X) ** 2)),
            lambda f: jax.grad(lambda s: jnp.sum(f(s * X) ** 2)),
            id="grad",
        ),
        pytest.param(
            lambda f: lambda s: jax.lax.scan(lambda c, k: (c + f(k * X), None), jnp.zeros((96, 64)), s)[0],
            lambda f: lambda s: sum(f(k * X) for k in s),
            id="scan",
        ),
    ],
)
def test_budgets_work_inside_other_traces(outer: Any, plain: Any, request: Any) -> None:
    kind = request.node.callspec.id
    arg = X if kind == "jit" else np.float32(0.5) if kind == "grad" else np.array([0.5, -0.3], np.float32)
    warned = (
        contextlib.nullcontext() if kind == "jit" else pytest.warns(UserWarning, match="but the vmap, loop or deriv")
    )
    with warned:
        actual = outer(jacfwd(layer, memory_budget="20KiB"))(arg)
    chex.assert_trees_all_close(actual, jax.jit(plain(jax.jacfwd(layer)))(arg), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_budgets_close_over_tracers() -> None:
    within = lambda scale: jacrev(lambda x: layer(scale * x), memory_budget="20KiB")(X)
    expected = jax.jit(jax.jacrev(lambda x: layer(0.5 * x)))(X)
    chex.assert_trees_all_close(jax.jit(within)(0.5), expected, rtol=1e-4, atol=1e-5)
    with pytest.warns(UserWarning, match=r"^jacrev: memory_budget=20 KiB bounds this part .* around it may need"):
        mapped = jax.vmap(within)(np.array([0.5], np.float32))[0]
    chex.assert_trees_all_close(mapped, expected, rtol=1e-4, atol=1e-5)


def grad_of(fun: Any) -> Any:
    return jax.grad(lambda scale: jnp.sum(fun(scale) ** 2))


@pytest.mark.parametrize(
    ("outer", "warns"),
    [
        pytest.param(lambda f: jax.jit(jax.vmap(f)), True, id="jit of vmap"),
        pytest.param(lambda f: jax.vmap(lambda s: jax.jit(f)(s)), True, id="vmap of jit"),
        pytest.param(lambda f: lambda s: jax.lax.map(f, s), True, id="map"),
        pytest.param(lambda f: jax.vmap(grad_of(f)), True, id="vmap of grad"),
        pytest.param(lambda f: grad_of(lambda s: jax.lax.map(f, s)), True, id="grad of map"),
        pytest.param(
            lambda f: lambda s: jax.lax.fori_loop(0, 2, lambda i, c: c + f(jnp.take(s, i)), 0.0), True, id="fori"
        ),
        pytest.param(lambda f: vmap(f, chunk_size=1), True, id="chunks"),
        pytest.param(lambda f: jax.jit(lambda s: f(s[0])), False, id="jit"),
        pytest.param(lambda f: jax.vmap(lambda s: s + f(0.5)), False, id="not mapped"),
    ],
)
@pytest.mark.parametrize("transform", [jacrev, hessian_diagonal, "vmap"])
def test_a_budget_of_a_part_of_the_program_warns_once(transform: Any, outer: Any, warns: bool) -> None:
    """The warning points to the caller's line and names the budget and the compiled program."""
    xs = X[:12].reshape(4, 3)

    def within(scale: Any) -> Any:
        if transform == "vmap":
            return vmap(lambda x: jnp.sin(scale * x).sum(), memory_budget="1MiB")(xs).sum()
        return transform(lambda x: jnp.sin(scale * x).sum(), memory_budget="1MiB")(X).sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        outer(within)(np.array([0.5, -0.3], np.float32))
    assert len(caught) == warns
    for warning in caught:
        name = transform if transform == "vmap" else transform.__name__
        assert re.match(
            rf"{name}: memory_budget=1 MiB bounds .* \(it needs \d.*B, with \d+ of \d+ .* around it may need more",
            str(warning.message),
        )
        assert warning.filename == __file__


@pytest.mark.parametrize(
    "outer", [jax.vmap, lambda f: lambda xs: jax.lax.map(f, xs), lambda f: nnx.vmap(f), lambda f: vmap(f, chunk_size=1)]
)
@pytest.mark.parametrize(
    ("within", "need"),
    [
        (jacfwd(lambda x: jnp.sin(x), memory_budget="1MiB"), "36 B"),
        (jacrev(lambda x: jnp.sum(x), memory_budget="1MiB"), "0 B"),
    ],
)
def test_the_warning_names_the_users_line_when_jax_makes_the_call(outer: Any, within: Any, need: str) -> None:
    with pytest.warns(UserWarning, match=rf"bounds this part .* \(it needs {need}") as caught:
        outer(within)(jnp.ones((2, 3)))
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fwd_rev", "rev_rev", "fwd_fwd", "rev_fwd"])
@pytest.mark.parametrize("budget", [10, 14])
def test_budgets_of_hessians(mode: str, budget: int, hessian_of_energy: Any) -> None:
    within = jax.jit(hessian(energy, mode=mode, memory_budget=f"{budget}KiB")).lower(X).compile()
    assert temporaries(hessian(energy, mode=mode), X) > budget * 2**10 >= held(within)
    chex.assert_trees_all_close(within(X), hessian_of_energy, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rev_rev", "fwd_fwd"])
def test_budgets_of_hessians_of_several_outputs(mode: str) -> None:
    weights = np.sin(np.arange(16.0 * 12)).reshape(16, 12).astype(np.float32)

    def vector(x: Any, y: Any) -> Any:
        return {"a": jnp.tanh(weights @ jnp.tanh(x * y)), "b": jnp.sum(y**3)}, "a string"

    args = (X[:12], 1.5 * X[12:24])
    plain = lambda *args: hessian(vector, (1, 0), has_aux=True, mode=mode)(*args)[0]
    inside = lambda *args: hessian(vector, (1, 0), has_aux=True, mode=mode, memory_budget="16KiB")(*args)[0]
    within = jax.jit(inside).lower(*args).compile()
    assert temporaries(plain, *args) > 16 * 2**10 >= held(within)
    expected = jax.jit(jax.hessian(lambda *args: vector(*args)[0], (1, 0)))(*args)
    chex.assert_trees_all_close(within(*args), expected, rtol=1e-5, atol=1e-5)


def test_an_impossible_budget_of_a_hessian() -> None:
    with pytest.raises(ValueError, match=r"^hessian: no chunk fits into memory_budget=9 B: the smallest found is"):
        hessian(lambda x: jnp.tanh(x).sum(), mode="fwd_fwd", memory_budget=9)(X[:3])


def test_budgets_of_modules() -> None:
    ens = Ensemble.create(lambda rngs: nnx.Linear(8, 3, rngs=rngs), 2, seed=0)
    of_member = lambda model, x: jacrev(lambda m: jnp.tanh(m(x)), memory_budget="1MB")(model)
    with pytest.warns(UserWarning, match=r"^jacrev: memory_budget=977 KiB bounds this part .* around it may need"):
        rows = vmap(of_member, (0, None))(ens, X[:8])
    plain = vmap(lambda model, x: jacrev(lambda m: jnp.tanh(m(x)))(model), (0, None))(ens, X[:8])
    chex.assert_trees_all_close(rows, plain, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["vmap", "independent"])
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_budgets_of_batches(rows: str, mode: str) -> None:
    xs = np.sin(np.arange(40.0 * 64)).reshape(40, 64).astype(np.float32)
    batch = lambda x: jnp.tanh(jnp.tanh(x * x) @ W.T)
    of = lambda **budget: jax.jit(batch_jacobian(batch, rows=rows, mode=mode, **budget)).lower(xs).compile()
    plain, within = of(), of(memory_budget="160KiB")
    assert held(plain) > 160 * 2**10 >= held(within)
    chex.assert_trees_all_close(within(xs), plain(xs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "call", [lambda: jacfwd(layer, memory_budget=8)(X), lambda: jacrev(layer, memory_budget="8B")(X)]
)
def test_an_impossible_budget_reports_the_minimum(call: Any, probes: list[int]) -> None:
    with pytest.raises(
        ValueError,
        match=r"^jac\w+: no chunk fits into memory_budget=8 B: the smallest found is .* KiB, for .* of .* raise",
    ) as caught:
        call()
    least = min(probes)
    named = str(caught.value).partition("the smallest found is ")[2].partition(",")[0]
    assert 0 <= budgets.check_budget("vmap", named, None) / (least + least // 64 + 256) - 1 < 0.01
    assert len(probes) <= 10


@pytest.mark.parametrize("transform", [vmap, jacfwd, jacrev, jacobian, hessian])
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"memory_budget": "12 parsecs"}, ValueError, r'such as "512MiB" .*, "2GB" .* or "1e9", but got \'12 parsecs'),
        ({"memory_budget": "12 bytes"}, ValueError, r"memory_budget must be a number of bytes .* but got '12 bytes'"),
        ({"memory_budget": "\uff11\uff12"}, ValueError, r"memory_budget must be .* but got '\uff11\uff12'"),
        ({"memory_budget": "512M"}, ValueError, r"memory_budget must be a number of bytes .* but got '512M'"),
        ({"memory_budget": "1e"}, ValueError, r"memory_budget must be a number of bytes .* but got '1e'"),
        ({"memory_budget": "-1kB"}, ValueError, r"memory_budget must be a number of bytes .* but got '-1kB'"),
        ({"memory_budget": ""}, ValueError, r"memory_budget must be a number of bytes .* but got ''"),
        ({"memory_budget": "1e999"}, ValueError, r"must be at least one byte, and finite, but got '1e999'"),
        ({"memory_budget": "0.1B"}, ValueError, r"must be at least one byte, and finite, but got '0\.1B'"),
        (
            {"memory_budget": 1e9},
            TypeError,
            r"memory_budget must be a number of bytes .* but got 1000000000\.0 of type",
        ),
        ({"memory_budget": True}, TypeError, r"memory_budget must be a number of bytes"),
        ({"memory_budget": 0}, ValueError, r"memory_budget must be at least one byte, and finite, but got 0"),
        ({"memory_budget": -5}, ValueError, r"memory_budget must be at least one byte, and finite, but got -5"),
        ({"memory_budget": "1GB", "chunk_size": 2}, ValueError, r"chunk_size and memory_budget both set .* give one"),
        ({"chunk_size": 0}, ValueError, r"chunk_size must be at least 1, but got 0"),
        ({"chunk_size": 1.5}, TypeError, r"chunk_size must be an int or None, but got 1\.5"),
    ],
)
def test_invalid_budgets_are_refused_at_once(transform: Any, options: Any, error: Any, match: str) -> None:
    with pytest.raises(
        error, match=f"^{transform.__name__}: {match}" if "both" in match or match.startswith("ch") else match
    ):
        transform(jnp.sin, **options)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("512MiB", 2**29),
        ("2GB", 2 * 10**9),
        (" 1.5 KiB ", 1536),
        ("7kB", 7000),
        ("1kb", 1000),
        ("1KB", 1000),
        ("256mib", 2**28),
        ("3tib", 3 * 2**40),
        ("2Tb", 2 * 10**12),
        ("1e6", 10**6),
        ("2.5E3 b", 2500),
        ("12", 12),
        (np.int64(9), 9),
    ],
)
def test_sizes_with_units(written: Any, size: int) -> None:
    assert budgets.check_budget("vmap", written, None) == size


def test_a_function_that_needs_concrete_values_has_no_budget() -> None:
    branching = lambda x: x**2 if x[0] > 0 else x
    chex.assert_trees_all_close(jacfwd(branching)(X), jnp.diag(2 * X), rtol=1e-6)
    for fun in (branching, lambda x: x * np.asarray(x).sum()):
        with pytest.raises(ValueError, match=r"^jacfwd: memory_budget traces fun, but fun branches on a value"):
            jacfwd(fun, memory_budget="1GB")(X)


@pytest.mark.parametrize("rows", ["vmap", "independent"])
def test_refusals_name_the_called_function(rows: str) -> None:
    batch = lambda x: jnp.tanh(jnp.tanh(x * x) @ W.T)
    with pytest.raises(ValueError, match=r"^batch_jacobian: no chunk fits into memory_budget=9 B"):
        batch_jacobian(batch, rows=rows, memory_budget=9)(X.reshape(1, 64) * np.ones((40, 1), np.float32))
    branching = lambda x: x**2 if x[0, 0] > 0 else x
    with pytest.raises(ValueError, match=r"^batch_jacobian: memory_budget traces fun, but fun branches on a value"):
        batch_jacobian(branching, rows=rows, memory_budget="1GB")(X[:6].reshape(2, 3))
    if rows == "vmap":
        loss = lambda w, x: jnp.sum(jnp.tanh(w @ jnp.tanh(w.T @ x[0])) ** 2)
        with pytest.raises(ValueError, match=r"^per_sample_grad: no chunk fits into memory_budget=9 B"):
            per_sample_grad(loss, memory_budget=9)(W.T, np.ones((40, 64), np.float32))


def test_a_budget_and_an_axis_name_exclude_each_other() -> None:
    with pytest.raises(
        ValueError,
        match=r"^vmap: with memory_budget, a collective over axis_name would see only one chunk; leave one out",
    ):
        vmap(jnp.sin, axis_name="i", memory_budget="1GB")
