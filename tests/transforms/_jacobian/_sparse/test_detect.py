"""Detected patterns against dense Jacobians: no entry may be missing for any program."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import sparse
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.lax import linalg
from jax.scipy.linalg import cho_factor, cho_solve, expm, lu, solve_triangular
from jax.scipy.sparse.linalg import cg, gmres
from jax.scipy.special import betainc, gammainc, i0e
from jax.sharding import SingleDeviceSharding

from plurax.transforms import jacobian
from plurax.transforms._calls.call import Call
from plurax.transforms._jacobian._sparse import primitive_rules
from plurax.transforms._jacobian._sparse.pattern import UnknownPattern, found_pattern

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


# With the number of detected entries where it is minimal.
PROGRAMS: dict[str, tuple[Any, int | None]] = {
    # The same compiled function with constant and with unknown values.
    "masks": (lambda x: jnp.where(MASK, x, 0.0) + jnp.where(x > 0, x, 0.0), 6),
    "masks the other way": (lambda x: jnp.where(x > 0, x, 0.0) + jnp.where(MASK, x, 0.0), 6),
    "upwind": (lambda x: jnp.where(ROW == 0, x, jnp.roll(x, 1)) - jnp.where(x > 0, x, jnp.roll(x, -1)), None),
    "indices": (lambda x: jnp.take(x, np.arange(6)) + jnp.take(x, jnp.argsort(x)), 36),
    "slices": (lambda x: pick(x, 0) + pick(x, jnp.argsort(x)[0]), 12),
    "factors": (lambda x: scaled(x, MASK.astype(np.float32)) + scaled(x, jnp.cos(x)), 6),
    "only a mask": (lambda x: jnp.where(MASK, x, 0.0) * MASK, 3),
    # Out-of-range indices, which JAX clamps, drops, or fills.
    "slice beyond": (lambda x: lax.dynamic_slice(x, (5,), (3,)) ** 2, 3),
    "slice before": (lambda x: lax.dynamic_slice(x, (-20,), (3,)) ** 2, 3),
    **{
        f"slice at {start}": (lambda x, start=start: lax.dynamic_slice(x, (start,), (2,)) ** 2, 2)
        for start in (-12, -9, -7, -6, -1)
    },
    **{
        f"update at {start}": (
            lambda x, start=start: lax.dynamic_update_slice(jnp.append(x[:3] ** 2, jnp.zeros(3)), x[4:], (start,)),
            entries,
        )
        for start, entries in ((-12, 3), (-8, 3), (-7, 3), (-4, 4), (-1, 5))
    },
    # The primitive itself does not count negative starts from the end.
    **{
        f"slice by the operation at {start}": (
            lambda x, start=start: lax.dynamic_slice_p.bind(x, np.int32(start), slice_sizes=(2,)) ** 2,
            2,
        )
        for start in (-7, -3, -1)
    },
    "index before": (lambda x: lax.dynamic_index_in_dim(x, -8) ** 2, 1),
    "slices before": (
        lambda x: lax.fori_loop(0, 3, lambda i, c: c + lax.dynamic_slice(x, (i - 9,), (2,)) ** 2, jnp.zeros(2)),
        2,
    ),
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
    # Constants that JAX evaluates.
    "permuted": (lambda x: jax.random.permutation(jax.random.key(0), x) ** 2, 6),
    "chosen": (lambda x: jax.random.choice(jax.random.key(0), x, (3,), replace=False) ** 2, 3),
    "sorted by constants": (lambda x: lax.sort_key_val(jnp.array([3, 1, 2, 1, 1, 0]), x)[1] ** 2, 6),
    "sorted by constants and more": (lambda x: lax.sort((MASK.astype(int), x, x**2), num_keys=2)[2], None),
    "by platform": (lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=lambda x: x[::-1] * x), 12),
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


def matrix(x: Any) -> Any:
    return jnp.concatenate([x, jnp.sin(x)])[:9].reshape(3, 3) + 4 * jnp.eye(3)


def positive(x: Any) -> Any:
    return matrix(x) @ matrix(x).T + jnp.eye(3)


BANDS = np.where(abs(np.subtract.outer(np.arange(6), np.arange(6))) < 2, 1 + np.arange(6.0), 0).astype(np.float32)
TRIANGLE = np.tri(6, dtype=np.float32) + 3 * np.eye(6, dtype=np.float32)
BCOO = sparse.BCOO.fromdense(BANDS)
BCSR = sparse.BCSR.fromdense(BANDS)
PLACES = np.array([[0, 1], [1, 2], [0, 3], [2, 2], [2, 0], [1, 1]])
# Out of range at both ends, and on two axes.
BEYOND = np.array([-9, 2, 7, -1, 3])
PAIRS = np.array([[0, 2], [1, -5], [9, 0], [-1, 1]])


def put(how: str, mode: str, unknown: bool) -> Any:
    """Return a function that scatters at indices, some out of range, with the last one unknown if `unknown`."""

    def fun(x: Any) -> Any:
        where = jnp.append(BEYOND, jnp.argmax(x) - 3) if unknown else BEYOND
        given = jnp.tanh(x)[: len(where)] + 2
        return getattr((x**2).at[where], how)(given, mode=mode, unique_indices=how == "multiply")

    return fun


def got(mode: str, unknown: bool) -> Any:
    def fun(x: Any) -> Any:
        where = jnp.append(BEYOND, jnp.argmax(x) - 3) if unknown else BEYOND
        return x.at[where].get(mode=mode, fill_value=1.0) ** 2

    return fun


def got_pairs(mode: str) -> Any:
    def fun(x: Any) -> Any:
        table = x.reshape(2, 3)
        loose = table.at[PAIRS[:, 0], jnp.argsort(x)[:4] % 4].get(mode=mode, fill_value=1.0)
        return loose**2 + table.at[*PAIRS.T].get(mode=mode, fill_value=1.0)

    return fun


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -1e3, 1e3)[::-1],))


@jax.custom_jvp
def straight(x: Any) -> Any:
    return jnp.round(x)


straight.defjvp(lambda x, t: (straight(*x), t[0] + 0.5 * jnp.roll(t[0], 1)))


# With the number of entries detected for one cell; k cells have k times as many.
CELLS: dict[str, tuple[Any, int | None]] = {
    "solve": (lambda x: jnp.linalg.solve(matrix(x), x[:3]), 18),
    "solve with a constant": (lambda x: jnp.linalg.solve(TRIANGLE + 1, x), 36),
    "inverse": (lambda x: jnp.linalg.inv(matrix(x)), 54),
    "Cholesky": (lambda x: jnp.linalg.cholesky(positive(x)), 36),
    "Cholesky solve": (lambda x: cho_solve(cho_factor(positive(x)), x[:3]), 18),
    "triangular": (lambda x: solve_triangular(matrix(x), x[:3], lower=True), 10),
    "triangular with a constant": (lambda x: solve_triangular(TRIANGLE, x, lower=True), 21),
    "triangular, transposed": (lambda x: solve_triangular(TRIANGLE, x, lower=True, trans=1), 21),
    "triangular from the right": (
        lambda x: linalg.triangular_solve(TRIANGLE[:3, :3], x.reshape(2, 3), left_side=False, lower=True),
        12,
    ),
    "tridiagonal": (lambda x: linalg.tridiagonal_solve(x, x + 5, x, x[:, None]), 36),
    "tridiagonal with a constant": (
        lambda x: linalg.tridiagonal_solve(*np.ones((3, 3), np.float32) * [[1], [5], [1]], x.reshape(3, 2)),
        18,
    ),
    "determinant": (lambda x: jnp.linalg.slogdet(matrix(x))[1] + jnp.linalg.det(matrix(x)), 6),
    "eigenvalues": (lambda x: jnp.linalg.eigh(positive(x))[0], 18),
    "singular values": (lambda x: jnp.linalg.svd(matrix(x), compute_uv=False), 18),
    "QR": (lambda x: jnp.linalg.qr(matrix(x))[1], 54),
    "LU": (lambda x: lu(matrix(x))[2], 36),
    "exponential": (lambda x: expm(matrix(x) / 4), 54),
    "conjugate gradients": (lambda x: cg(lambda v: positive(x) @ v, x[:3])[0], 18),
    "GMRES": (lambda x: gmres(lambda v: positive(x) @ v, x[:3])[0], 18),
    "a solve of its own": (
        lambda x: lax.custom_linear_solve(
            lambda v: v * (2 + x**2), x, lambda _, b: b / (2 + lax.stop_gradient(x) ** 2), symmetric=True
        ),
        6,
    ),
    "Fourier": (lambda x: jnp.fft.fft(x).real, 36),
    "Fourier of an axis": (lambda x: jnp.abs(jnp.fft.fft(x.reshape(2, 3), axis=0)), 12),
    "Fourier of two axes": (lambda x: jnp.abs(jnp.fft.rfft2(x.reshape(2, 3))) ** 2, 24),
    "Fourier and back": (lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * 2), 36),
    "sorted": (jnp.sort, 36),
    "sorted along an axis": (lambda x: jnp.sort(x.reshape(2, 3), axis=0), 12),
    "sorted by others": (lambda x: lax.sort((x[:3], x[3:]), num_keys=1)[1], 9),
    "median": (jnp.median, 6),
    "largest three": (lambda x: lax.top_k(x, 3)[0], 18),
    "largest, approximately": (lambda x: lax.approx_max_k(x.reshape(2, 3), 2)[0], 12),
    "largest of an axis": (lambda x: lax.top_k(x.reshape(2, 3), 1, axis=0)[0], 6),
    "in order": (lambda x: x.reshape(3, 2)[jnp.argsort(x[::2])] ** 2, 18),
    "along an axis": (
        lambda x: jnp.take_along_axis(x.reshape(3, 2), jnp.argsort(x.reshape(3, 2), axis=0), axis=0) ** 2,
        18,
    ),
    "running": (lambda x: lax.cummax(x) + lax.cumprod(x) + lax.cumlogsumexp(x), 21),
    "slice from anywhere": (lambda x: lax.dynamic_slice(x.reshape(3, 2), (jnp.argmax(x), 0), (2, 2)) ** 2, 12),
    "update anywhere": (lambda x: lax.dynamic_update_slice(jnp.zeros(6), x[:2] ** 2, (jnp.argmax(x),)), 12),
    "between": (lambda x: jnp.interp(x[:3], jnp.arange(6.0), x), 18),
    "segments": (lambda x: jax.ops.segment_sum(x, np.array([0, 0, 1, 1, 2, 2]), num_segments=3) ** 2, 6),
    "known in another shape": (lambda x: x * jnp.squeeze(jnp.expand_dims(MASK[:, None] * 1.0, 1)[:, 0], 1), 3),
    "on a device": (lambda x: jax.device_put(x) + jax.device_put(x**2), 6),
    "constrained": (lambda x: lax.with_sharding_constraint(x**2, SingleDeviceSharding(jax.devices()[0])) * 2, 6),
    "BCOO": (lambda x: BCOO @ x, 16),
    "BCOO from the right": (lambda x: x.reshape(1, 6) @ BCOO, 16),
    "BCSR": (lambda x: BCSR @ x, 16),
    "BCOO of data": (lambda x: sparse.BCOO((x, PLACES), shape=(3, 4)) @ jnp.ones(4), 6),
    "sparsified": (lambda x: sparse.sparsify(lambda m, y: (m * 2) @ y)(BCOO, x), 16),
    "convolved with itself": (lambda x: jnp.convolve(jnp.sin(x), x[:3]), 33),
    "special": (lambda x: gammainc(2.0, x**2 + 1) + i0e(x) + betainc(2.0, 3.0, jax.nn.sigmoid(x)), 6),
    "while": (lambda x: lax.while_loop(lambda c: jnp.sum(c) < 30, lambda c: abs(c) * 2 + 1, x), 6),
    "one of two": (lambda x: lax.cond(x[0] > 0, jnp.sin, lambda x: x[::-1], x), 12),
    "rounded straight": (straight, 12),
    "rule backwards": (clipped, 6),
    "half precision": (lambda x: (x.astype(np.float16) * (1 + jnp.float16(0.5))).astype(jnp.bfloat16) ** 2, 6),
    "complex cast": (lambda x: jnp.real((x.astype(complex) + 1j) * jnp.conj(x[::-1] + 2j)), 12),
    "complex solve": (lambda x: jnp.abs(jnp.linalg.solve(matrix(x) + 1j, x[:3] + 0j)), 18),
    "complex eigenvalues": (lambda x: jnp.linalg.eigh(positive(x) + 0j)[0], 18),
    "products of neighbors": (lambda x: lax.associative_scan(jnp.multiply, x, reverse=True), 21),
    "affine scan": (
        lambda x: lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (x, jnp.sin(x)))[1],
        None,
    ),
    "softmax of rows": (lambda x: jax.nn.softmax(x.reshape(2, 3)), 18),
    "mapped solves": (
        lambda x: lax.map(lambda r: jnp.linalg.solve(jnp.outer(r, r) + jnp.eye(2), r), x.reshape(3, 2)),
        12,
    ),
    **{
        f"get, {mode}, {unknown}": (got(mode, unknown), None)
        for mode in ("clip", "fill", "promise_in_bounds")
        for unknown in (False, True)
    },
    **{f"get of two axes, {mode}": (got_pairs(mode), None) for mode in ("clip", "fill", "promise_in_bounds")},
    **{
        f"{how}, {mode}, {unknown}": (put(how, mode, unknown), None)
        for how in ("add", "set", "min", "max", "multiply")
        for mode in ("clip", "drop", "promise_in_bounds")
        for unknown in (False, True)
        if (how in ("add", "set") or mode == "drop") and not (how == "multiply" and unknown)
    },
}
# Programs that JAX cannot differentiate in the other mode.
FORWARD = {"until", "while"}
REVERSE = {"rule backwards", "with a rule backwards", "through a reference"}


def pattern(fun: Any, x: Any, mode: str) -> np.ndarray:
    """Return the detected pattern; warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = found_pattern("jacobian", Call("jacobian", fun, (0,), False, (jnp.asarray(x),), {}), mode)
    out = np.zeros(found.shape, bool)
    out[found.rows, found.cols] = True
    return out


def check_cells(fun: Any, mode: str) -> np.ndarray:
    """Assert that no entry is missing and that mapped cells add no entries; return the pattern of one cell."""
    transform = jax.jit((jax.jacfwd if mode == "forward" else jax.jacrev)(fun))
    cells = np.stack([X, X[::-1] + 0.25, X * 0.5])
    one, several = pattern(fun, X, mode), pattern(jax.vmap(fun), cells, mode)
    assert not (several & ~np.kron(np.eye(len(cells), dtype=bool), one)).any()
    rows, columns = one.shape
    for i, cell in enumerate(cells):
        expected = np.asarray(transform(cell)).reshape(one.shape)
        scale = 1e-6 * (1 + np.abs(np.nan_to_num(expected)).max(initial=0))
        own = several[rows * i : rows * (i + 1), columns * i : columns * (i + 1)]
        # Zeros times infinities elsewhere are NaN.
        np.testing.assert_allclose(np.where((one & own) | ~np.isfinite(expected), 0, expected), 0, atol=scale)
    return one


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_independent_cells_have_the_pattern_of_cells(name: str) -> None:
    fun, entries = CELLS[name]
    for mode in ("forward", "reverse"):
        if name not in (REVERSE if mode == "forward" else FORWARD):
            one = check_cells(fun, mode)
            assert entries is None or mode == "reverse" or one.sum() == entries


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
        if name == "until":  # JAX has no reverse mode for it
            return
        # Both modes read entries alike; only their positions are tested here.
        pattern = found_pattern("jacobian", Call("jacobian", fun, (0,), False, (jnp.asarray(X),), {}), "reverse")
        assert pattern.shape == (expected.size // 6, 6)
        beside = expected.reshape(pattern.shape).copy()
        beside[pattern.rows, pattern.cols] = 0
        np.testing.assert_allclose(beside, 0, atol=2e-5)


def tail(out: Any, x: Any) -> Any:
    """Return six values of a result, offset so that no two are equal."""
    return jnp.concatenate([jnp.tanh(out.ravel().astype(np.float32)), x])[:6] + 0.01 * jnp.cos(ROW)


def with_a_rule(fun: Any) -> Any:
    ruled = jax.custom_jvp(fun)
    ruled.defjvp(lambda x, t: jax.jvp(fun, x, t))
    return ruled


def through_a_reference(fun: Any) -> Any:
    def written(x: Any) -> Any:
        ref = jax.new_ref(jnp.zeros(6))

        def body(carry: Any, y: Any) -> Any:
            ref[...] += y
            return carry, ref[...]

        return lax.scan(body, 0.0, jnp.stack([x, fun(x)]))[1][:, ::2]

    return written


def with_a_rule_backwards(fun: Any) -> Any:
    ruled = jax.custom_vjp(fun)
    ruled.defvjp(lambda x: jax.vjp(fun, x), lambda pull, g: pull(g))
    return ruled


# Wrappers from one step to another.
WRAPS: dict[str, Any] = {
    "itself": lambda fun: fun,
    "compiled": jax.jit,
    "computed again": jax.checkpoint,
    "repeated": lambda fun: lambda x: lax.scan(lambda c, _: (fun(c), c), x, None, length=2)[1][:, ::2],
    "repeated often": lambda fun: lambda x: lax.fori_loop(0, 40, lambda i, c: fun(c).at[i % 6].add(0.1), x),
    "until": lambda fun: lambda x: lax.while_loop(lambda c: c[1] < 2, lambda c: (fun(c[0]), c[1] + 1), (x, 0))[0],
    "one of two": lambda fun: lambda x: lax.cond(x[1] < x[0], fun, lambda x: x * jnp.roll(x, 1), x),
    "mapped": lambda fun: lambda x: jax.vmap(fun)(jnp.stack([x, x[::-1]]))[:, :3].T,
    "mapped along columns": lambda fun: lambda x: jax.vmap(fun, 1, 1)(jnp.stack([x, jnp.sin(x)], 1))[1:4],
    "one by one": lambda fun: lambda x: lax.map(fun, jnp.stack([x, x[::-1]]))[:, 2:5],
    "with a rule": with_a_rule,
    "with a rule backwards": with_a_rule_backwards,
    "through a reference": through_a_reference,
    "gradient": lambda fun: jax.grad(lambda x: jnp.sin(fun(x)).sum()),
    "on a device": lambda fun: lambda x: jax.device_put(fun(jax.device_put(x))),
    "half": lambda fun: lambda x: fun(x.astype(np.float16).astype(np.float32)) * x.astype(jnp.bfloat16),
    "complex": lambda fun: lambda x: jnp.abs(fun(x) * jnp.exp(1j * x)) + jnp.imag(fun(x) + 1j * x),
}
STEPS = {name: fun for name, (fun, _) in (*PROGRAMS.items(), *CELLS.items())}


@pytest.mark.slow
@settings(max_examples=5 if settings().max_examples < 100 else 5000, deadline=None)  # more under `make fuzz`
@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from(sorted(WRAPS))), min_size=1, max_size=3),
    st.sampled_from(["forward", "reverse"]),
)
def test_programs_of_programs(steps: list[tuple[str, str]], mode: str) -> None:
    only = {name for pair in steps for name in pair}
    if only & REVERSE:
        mode = "reverse"
        assume(not only & FORWARD)
    elif only & FORWARD:
        mode = "forward"
    # These differentiate a step in the other mode inside.
    assume(not any(name in FORWARD and wrap in ("gradient", "with a rule backwards") for name, wrap in steps))
    assume(not any(name in REVERSE and wrap == "with a rule" for name, wrap in steps))

    def step(name: str, wrap: str) -> Any:
        return WRAPS[wrap](lambda x: tail(STEPS[name](x), x))

    def fun(x: Any) -> Any:
        for name, wrap in steps:
            x = tail(step(name, wrap)(x), x)
        return x

    try:
        check_cells(fun, mode)
    except NotImplementedError:  # such as a mapped branch within a custom backward rule
        transform = jax.jacfwd if mode == "forward" else jax.jacrev
        with pytest.raises(NotImplementedError):  # in JAX itself
            jax.eval_shape(transform(jax.vmap(fun)), np.stack([X, X]))
    except UnknownPattern:
        if "through a reference" not in only:
            raise


@jax.jit
def put_first(ref: Any, x: Any) -> None:
    ref[1] = x[0] ** 2


def written_by_a_call(x: Any) -> Any:
    ref = jax.new_ref(jnp.zeros(6))
    put_first(ref, x)
    return ref[...]


def written_in_a_loop(x: Any) -> Any:
    ref = jax.new_ref(jnp.zeros(6))

    def body(i: Any, carry: Any) -> Any:
        ref[i] = x[i] * x[(i + 1) % 6]
        return carry

    lax.fori_loop(0, 6, body, 0)
    return ref[...]


def totals(x: Any) -> Any:
    return through_a_reference(jnp.sin)(x)[1]


@pytest.mark.slow
@pytest.mark.parametrize("fun", [written_by_a_call, written_in_a_loop, totals])
def test_writes_to_a_reference_may_depend_on_everything(fun: Any) -> None:
    with pytest.warns(UserWarning, match="may write values that depend on the inputs to a `jax.Ref`"):
        found = jax.jit(jacobian(fun, mode="reverse", sparsity="auto"))(X)
    expected = jax.jacrev(fun)(X)
    assert found.nse == expected.size
    np.testing.assert_allclose(found.todense(), expected, rtol=1e-5)


@pytest.mark.parametrize("draws", [1, 2])
def test_values_that_differ_between_runs_are_unknown(draws: int) -> None:
    def fun(x: Any) -> Any:
        def add(total: Any, _: None) -> Any:
            return total + lax.rng_uniform(0.0, 1.0, (6,)), None

        total = add(0.0, None)[0] if draws == 1 else lax.scan(add, jnp.zeros(6), None, length=draws)[0]
        return jnp.where(total > draws / 2, x, 0.0)

    assert pattern(fun, X, "forward").sum() == 6


@pytest.mark.parametrize(
    ("name", "entries"), [("sums along", 18), ("banded", 36), ("convolution of groups of a batch", None)]
)
def test_sums_over_too_many_pairs_cover_their_whole_axes(
    name: str, entries: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fun = PROGRAMS[name][0]
    monkeypatch.setattr(primitive_rules, "_PAIRS", 0)
    found = jax.jit(jacobian(fun, mode="forward", sparsity="auto"))(X)
    assert entries in (None, found.nse)
    np.testing.assert_allclose(found.todense(), jax.jit(jax.jacfwd(fun))(X), rtol=2e-5, atol=2e-5)


def halved(t: Any) -> Any:
    """Round to half the bits through a bit cast."""
    bits = lax.bitcast_convert_type(t, np.uint32)
    return lax.bitcast_convert_type((bits + 0x8000) & np.uint32(0xFFFF0000), np.float32)


def fixed(t: Any) -> Any:
    """Round to multiples of 1/1024."""
    return (t * 1024).astype(int).astype(np.float32) / 1024


def in_bytes(t: Any) -> Any:
    return lax.bitcast_convert_type(lax.bitcast_convert_type(t, np.uint8)[:, ::-1][:, ::-1], np.float32)


def guarded(t: Any) -> Any:
    """Return zeros if any value is not finite; the check adds no entries."""
    return jnp.where(jnp.isfinite(t).all(), t, 0.0)


@pytest.mark.parametrize(("rule", "entries"), [(halved, 6), (fixed, 6), (in_bytes, 6), (guarded, 6)])
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_integer_and_boolean_tangents(mode: str, rule: Any, entries: int) -> None:
    """Integer and boolean tangents in a custom derivative rule, where JAX has no tangent types for them."""
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


@jax.custom_jvp
def odd(x: Any) -> Any:
    return x


def looked_up(t: Any) -> Any:
    return jax.pure_callback(lambda t: t, jax.ShapeDtypeStruct(t.shape, t.dtype), t, vmap_method="sequential")


odd.defjvp(lambda x, t: (x[0], looked_up(t[0])))


def test_operations_without_a_rule_depend_on_all_inputs() -> None:
    with pytest.warns(UserWarning, match="the results of `pure_callback` are assumed to depend on all operands"):
        found = jacobian(lambda x: odd(x[:4]) + x[2:], sparsity="auto")(X)
    assert found.nse == 4 * 4 + 2


def test_an_operation_of_another_library_mixes_everything() -> None:
    """Even though JAX can map it: no parameter shows that it acts along the last axis."""
    mirror = Primitive("mirror")
    mirror.def_abstract_eval(lambda x: x)
    mlir.register_lowering(mirror, mlir.lower_fun(lambda x: lax.rev(x, (x.ndim - 1,)), multiple_results=False))
    batching.primitive_batchers[mirror] = lambda args, axes: (mirror.bind(jnp.moveaxis(args[0], axes[0], 0)), 0)
    fun = jax.custom_jvp(lambda x: x)
    fun.defjvp(lambda x, t: (x[0], mirror.bind(t[0])))
    with pytest.warns(UserWarning, match="the results of `mirror` are assumed"):
        found = jax.jit(jacobian(jax.vmap(fun), sparsity="auto"))(X.reshape(2, 3))
    assert found.nse == 36
    np.testing.assert_array_equal(found.todense().reshape(6, 6), np.kron(np.eye(2), np.eye(3)[::-1]))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_values_from_other_examples_of_an_outer_map_are_not_tracked(mode: str) -> None:
    fun = lambda x: x * lax.psum(x**2, "b")
    cells = np.stack([X, X[::-1] + 0.25])
    with pytest.warns(UserWarning, match="`psum` communicates between devices"):
        found = jax.vmap(jacobian(fun, mode=mode, sparsity="auto"), axis_name="b")(cells)
    expected = jax.vmap((jax.jacfwd if mode == "forward" else jax.jacrev)(fun), axis_name="b")(cells)
    np.testing.assert_allclose(found.todense(), expected, rtol=1e-5)
