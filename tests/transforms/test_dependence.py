"""Patterns that are found against dense Jacobians: no entry may be missing, whatever the program does."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from plurax.transforms import _set_rules, _set_windows, jacobian
from plurax.transforms._call import Call
from plurax.transforms._sparsity import found_pattern

X = np.array([0.5, -1.0, 2.0, 0.3, 1.7, -0.6], np.float32)
MASK = np.array([1, 0, 1, 0, 1, 0], bool)
W = np.arange(24, dtype=np.float32).reshape(4, 6) % 5
ROW = jnp.arange(6)


@jax.jit
def pick(x: Any, i: Any) -> Any:
    return lax.dynamic_slice(x, (i,), (2,))


@jax.jit
def scaled(x: Any, w: Any) -> Any:
    return x * w


def image(x: Any) -> Any:
    return jnp.concatenate([x, x**2, jnp.sin(x)])[:16].reshape(1, 4, 4, 1)


def convolved(x: Any, kernel: Any = None, **options: Any) -> Any:
    kernel = np.ones((3, 2, 1, 2), np.float32) if kernel is None else kernel
    dimensions = ("NHWC", "HWIO", "NHWC")
    options = {"window_strides": (1, 1), "padding": "SAME", **options}
    return lax.conv_general_dilated(x, kernel, dimension_numbers=dimensions, **options)


def pooled(x: Any, how: Any = lax.add, start: Any = 0.0, strides: Any = (1, 1, 1, 1)) -> Any:
    return lax.reduce_window(image(x), start, how, (1, 2, 2, 1), strides, "SAME")


# With how many entries are found, where the fewest are.
PROGRAMS: dict[str, tuple[Any, int | None]] = {
    # The same compiled function with constants, and with what is not known.
    "masks": (lambda x: jnp.where(MASK, x, 0.0) + jnp.where(x > 0, x, 0.0), 6),
    "masks the other way": (lambda x: jnp.where(x > 0, x, 0.0) + jnp.where(MASK, x, 0.0), 6),
    "upwind": (lambda x: jnp.where(ROW == 0, x, jnp.roll(x, 1)) - jnp.where(x > 0, x, jnp.roll(x, -1)), None),
    "indices": (lambda x: jnp.take(x, np.arange(6)) + jnp.take(x, jnp.argsort(x)), 36),
    "slices": (lambda x: pick(x, 0) + pick(x, jnp.argsort(x)[0]), 12),
    "factors": (lambda x: scaled(x, MASK.astype(np.float32)) + scaled(x, jnp.cos(x)), 6),
    "only a mask": (lambda x: jnp.where(MASK, x, 0.0) * MASK, 3),
    # Indices beyond the ends, which JAX clamps, drops, or fills.
    "slice beyond": (lambda x: lax.dynamic_slice(x, (5,), (3,)) ** 2, 3),
    "slice before": (lambda x: lax.dynamic_slice(x, (-20,), (3,)) ** 2, 3),
    "index beyond": (lambda x: lax.dynamic_index_in_dim(x, 9) ** 2, 1),
    "update beyond": (lambda x: lax.dynamic_update_slice(x**2, x[:2] * 3, (5,)), 6),
    "clipped put": (lambda x: jnp.zeros(6).at[jnp.array([7, -9])].add(x[:2] ** 2, mode="clip"), 2),
    "dropped put": (lambda x: jnp.zeros(6).at[jnp.array([7, 2])].add(x[:2] ** 2, mode="drop"), 1),
    "clipped get": (lambda x: x.at[jnp.array([7, -8])].get(mode="clip") ** 2, 2),
    "filled get": (lambda x: x.at[jnp.array([7, 1])].get(mode="fill", fill_value=3.0) ** 2, 1),
    "put anywhere": (lambda x: x.at[jnp.argmax(x) + 9].add(x[0] ** 2, mode="clip"), None),
    "set twice": (lambda x: (x**2).at[jnp.array([1, 1, 3])].set(x[:3] * 2), 6),
    "windows of updates": (
        lambda x: jax.vmap(lambda i: lax.dynamic_update_slice(jnp.zeros(6), x[:2] ** 2, (i,)))(jnp.array([0, 3, 5])),
        None,
    ),
    "sliding windows": (lambda x: jax.vmap(lambda i: lax.dynamic_slice(x, (i,), (3,)))(jnp.arange(6)) ** 2, 18),
    # Constants, of which JAX says what they are.
    "whole division": (lambda x: x[lax.div(lax.iota(np.int32, 6) - 5, np.int32(2))] ** 2, 6),
    "remainder": (lambda x: x[lax.rem(jnp.arange(6) - 5, 4)] ** 2, 6),
    "bits": (lambda x: x * (lax.bitcast_convert_type(jnp.arange(6.0) + 0.25, np.int32) / 1e9), 6),
    "drawn": (lambda x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, (6,)), x, 0.0), 3),
    "banded": (lambda x: jnp.diag(jnp.ones(5), 1) @ x, 5),
    # Sums.
    "product": (lambda x: jnp.tanh(x) @ W.T, 19),
    "batched product": (
        lambda x: jnp.einsum("bij,bj->bi", jnp.tri(4).reshape(2, 2, 4)[:, :, :3], x.reshape(2, 3)),
        None,
    ),
    "product with unknown": (lambda x: jnp.outer(jnp.cos(x), x) @ x, 36),
    "sums along": (lambda x: jnp.cumsum(x.reshape(2, 3) ** 2, axis=1), 12),
    "sums backwards": (lambda x: lax.cumsum(x**2, reverse=True), 21),
    "means": (lambda x: (x.reshape(2, 3) - x.reshape(2, 3).mean(1, keepdims=True)) ** 2, 18),
    "squares": (lambda x: jnp.linalg.norm(x.reshape(3, 2), axis=0), 6),
    "convolution": (lambda x: convolved(image(x)), None),
    "strided convolution": (lambda x: convolved(image(x), window_strides=(2, 1), padding=[(1, 2), (0, -1)]), None),
    "dilated convolution": (
        lambda x: convolved(image(x), lhs_dilation=(2, 1), rhs_dilation=(1, 2), padding=[(0, 2), (1, -1)]),
        None,
    ),
    "grouped convolution": (
        lambda x: convolved(
            jnp.concatenate([image(x), image(x**2)], 3), np.ones((2, 2, 1, 4), np.float32), feature_group_count=2
        ),
        None,
    ),
    "convolution of groups of a batch": (
        lambda x: convolved(
            image(x).reshape(2, 2, 4, 1),
            np.ones((2, 2, 1, 2), np.float32) - np.eye(2).reshape(2, 2, 1, 1),
            batch_group_count=2,
        ),
        None,
    ),
    "kernel": (lambda x: convolved(np.ones((1, 4, 4, 1), np.float32), x.reshape(3, 2, 1, 1)), None),
    "convolution of many channels": (
        lambda x: convolved(
            jnp.tanh(convolved(image(x), W.reshape(2, 2, 1, 6) - 2)),
            np.cos(np.arange(72, dtype=np.float32)).reshape(3, 2, 6, 2).clip(0.3) - 0.3,
        ),
        None,
    ),
    "convolution of a cube": (
        lambda x: lax.conv_general_dilated(
            x.reshape(1, 1, 2, 3, 1), np.ones((3, 1, 2, 2, 1), np.float32), (1, 1, 1), [(0, 1), (1, 1), (0, 0)]
        ),
        None,
    ),
    "convolution of nothing in space": (
        lambda x: lax.conv_general_dilated(x.reshape(2, 3), np.ones((4, 3), np.float32), (), []),
        24,
    ),
    "pooled sums": (pooled, None),
    "pooled in strides": (lambda x: pooled(x, strides=(1, 2, 2, 1)), None),
    "pooled maxima": (lambda x: pooled(x, lax.max, -np.inf, (1, 2, 2, 1)), None),
    "largest": (lambda x: jnp.max(x.reshape(2, 3), 1) + lax.top_k(x, 2)[0], None),
    # Loops and branches.
    "short loop": (lambda x: lax.fori_loop(0, 4, lambda i, c: c.at[i].add(c[i] * x[i + 1]), x), 10),
    "long loop": (lambda x: lax.fori_loop(0, 40, lambda i, c: c * x[::-1], x), 12),
    "long scan": (lambda x: lax.scan(lambda c, y: (y, c + y), jnp.zeros(()), jnp.concatenate([x] * 7))[1], 83),
    "long scan backwards": (
        lambda x: lax.scan(lambda c, y: (c * y, c), x[0], jnp.concatenate([x] * 7), reverse=True)[1],
        None,
    ),
    "late carry": (
        lambda x: lax.scan(lambda c, y: ((c[1], c[2], y), c[0]), (jnp.zeros(()),) * 3, jnp.tile(x, 6))[1],
        33,
    ),
    "until": (lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.roll(c[1], 1) * x), (0, x))[1], 36),
    "branches": (lambda x: lax.switch(jnp.argmax(x) % 3, [jnp.sin, lambda x: x[::-1], lambda x: x * 0 + x[0]], x), 16),
    "known branch": (lambda x: lax.cond(np.True_, jnp.sin, lambda x: x[::-1], x), 6),
    "branch in a loop": (
        lambda x: lax.scan(lambda c, y: (c, lax.cond(y > 0, jnp.sin, lambda y: y * c, y)), x[0], x)[1],
        None,
    ),
    "tree of sums": (lambda x: lax.associative_scan(jnp.add, x**2), 21),
    # Shapes and dtypes.
    "moved about": (lambda x: jnp.flip(jnp.tile(x.reshape(2, 3).T, (2, 1))[::2], 1) ** 2, 6),
    "columns first": (lambda x: x.reshape(2, 3).ravel(order="F") ** 2, 6),
    "padded inside": (lambda x: lax.pad(x**2, 0.0, ((1, -2, 2),)), 5),
    "cut before": (lambda x: lax.pad(x**2, 0.0, ((-2, 1, 0),)), 4),
    "stacked": (lambda x: jnp.stack([x[:3], x[3:]], 1) ** 2, 6),
    "split": (lambda x: jnp.concatenate(jnp.split(x, [1, 4])[::-1]) ** 2, 6),
    "broadcast": (lambda x: x.reshape(2, 3)[:, :1] * x.reshape(2, 3)[:1] + x[0], None),
    "casts": (lambda x: (x.astype(jnp.bfloat16) * 2).astype(np.float32) * x.astype(int), 6),
    "complex inside": (lambda x: jnp.abs(lax.complex(x, x[::-1])) ** 2, 12),
    "printed": (lambda x: (jax.debug.callback(lambda _: None, x), x**2)[1], 6),
    "behind a barrier": (lambda x: sum(lax.optimization_barrier((x**2, x[::-1]))), 12),
    "mapped inside": (lambda x: jax.vmap(lambda a, b: jnp.sin(a) * b)(x, x[::-1]), 12),
    "empty": (lambda x: x[:0] ** 2, 0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_entry_is_missing(name: str) -> None:
    fun, fewest = PROGRAMS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = jax.jit(jacobian(fun, mode="forward", sparsity="auto"))(X)
        expected = np.asarray(jax.jit(jax.jacfwd(fun))(X))
        np.testing.assert_allclose(found.todense(), expected, rtol=2e-5, atol=2e-5)
        assert found.nse >= np.count_nonzero(expected)
        assert fewest in (None, found.nse)
        if name == "until":  # which JAX does not take in reverse mode
            return
        # Entries are read alike in both modes; here only where they are.
        pattern = found_pattern("jacobian", Call("jacobian", fun, (0,), False, (jnp.asarray(X),), {}), "reverse")
        assert pattern.shape == (expected.size // 6, 6)
        beside = expected.reshape(pattern.shape).copy()
        beside[pattern.rows, pattern.cols] = 0
        np.testing.assert_allclose(beside, 0, atol=2e-5)


@settings(max_examples=max(4, settings().max_examples // 20), deadline=None)
@given(st.lists(st.sampled_from(sorted(PROGRAMS)), min_size=2, max_size=3))
def test_programs_of_programs(names: list[str]) -> None:
    def fun(x: Any) -> Any:
        for name in names:
            out = jnp.concatenate([jnp.tanh(PROGRAMS[name][0](x).ravel()), x])
            x = out[:6] + 0.01 * jnp.cos(ROW)  # apart, so that none are equally large
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = jax.jit(jacobian(fun, mode="forward", sparsity="auto"))(X)
    expected = jax.jit(jax.jacfwd(fun))(X)
    np.testing.assert_allclose(found.todense(), expected, rtol=1e-3, atol=1e-3 * (1 + np.abs(expected).max()))


@pytest.mark.parametrize(
    ("name", "entries"), [("sums along", 18), ("banded", 36), ("convolution of groups of a batch", None)]
)
def test_sums_of_too_many_pairs_go_over_all_along_their_axes(
    name: str, entries: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fun = PROGRAMS[name][0]
    for file in (_set_rules, _set_windows):
        monkeypatch.setattr(file, "PAIRS", 0)
    found = jax.jit(jacobian(fun, mode="forward", sparsity="auto"))(X)
    assert entries in (None, found.nse)
    np.testing.assert_allclose(found.todense(), jax.jit(jax.jacfwd(fun))(X), rtol=2e-5, atol=2e-5)


def halved(t: Any) -> Any:
    """Rounded by its bits, as half of them."""
    bits = lax.bitcast_convert_type(t, np.uint32)
    return lax.bitcast_convert_type((bits + 0x8000) & np.uint32(0xFFFF0000), np.float32)


def fixed(t: Any) -> Any:
    """In steps of 1/1024."""
    return (t * 1024).astype(int).astype(np.float32) / 1024


def in_bytes(t: Any) -> Any:
    return lax.bitcast_convert_type(lax.bitcast_convert_type(t, np.uint8)[:, ::-1][:, ::-1], np.float32)


def guarded(t: Any) -> Any:
    """None of it where some is not finite, which makes no entry."""
    return jnp.where(jnp.isfinite(t).all(), t, 0.0)


@pytest.mark.parametrize(("rule", "entries"), [(halved, 6), (fixed, 6), (in_bytes, 36), (guarded, 6)])
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_tangents_in_whole_numbers_and_truth_values(mode: str, rule: Any, entries: int) -> None:
    """In a derivative that a user wrote, where JAX gives integers none."""
    fun: Any
    if mode == "forward":
        fun = jax.custom_jvp(jnp.sin)
        fun.defjvp(lambda x, t: (jnp.sin(*x), rule(jnp.cos(*x) * t[0])))
    else:
        fun = jax.custom_vjp(jnp.sin)
        fun.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (rule(jnp.cos(x) * g),))
    found = jax.jit(jacobian(fun, mode=mode, sparsity="auto"))(X)
    assert found.nse == entries
    np.testing.assert_allclose(found.todense(), np.diag(np.cos(X)), rtol=1e-2)


def test_what_has_no_rule_depends_on_all_that_goes_in() -> None:
    with pytest.warns(UserWarning, match="what comes out of `cumprod`, `fft` is taken to depend on all that goes in"):
        jacobian(lambda x: odd(x) + jnp.fft.fft(x).real, sparsity="auto")(X)


@jax.custom_jvp
def odd(x: Any) -> Any:
    return x


odd.defjvp(lambda x, t: (x[0], lax.cumprod(t[0])))
