"""Random programs of parameters and data: norms and clipped sums against `jax.grad` of one example at a time."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from plurax.transforms import clipped_grad
from plurax.transforms.privacy import clipped_fun
from plurax.transforms.privacy._per_example.gradient_forms import OuterProduct

pytestmark = pytest.mark.slow

N, BATCH = 3, 3
METHODS = ("auto", "vmap", "ghost", "book_keeping")
MODES = ("fill", "clip", "promise_in_bounds")


@jax.jit
def by_factor(a: Any, b: Any, factor: Any) -> Any:
    return a @ (factor * b)


@jax.custom_jvp
def own_tangent(a: Any, b: Any) -> Any:
    return jnp.sin(a) @ b


own_tangent.defjvp(lambda p, t: (own_tangent(*p), 2 * (jnp.cos(p[0]) * t[0]) @ p[1] - t[1]))


@jax.custom_vjp
def own_cotangent(a: Any, b: Any) -> Any:
    return jnp.sin(a) @ b


# A nonlinear backward rule that is not the derivative; the rule is what counts.
own_cotangent.defvjp(lambda a, b: (own_cotangent(a, b), (a, b)), lambda kept, g: (jnp.clip(g, -0.1, 0.1), g * kept[0]))


@jax.custom_vjp
def clipped_cotangent(a: Any) -> Any:
    return a


clipped_cotangent.defvjp(lambda a: (a, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


def complex_of(a: Any, b: Any) -> Any:
    return a * jnp.exp(1j * b)


def places(a: Any) -> Any:
    """Return indices, some negative and some out of range."""
    return jnp.floor(4 * a).astype(int)


def well(a: Any) -> Any:
    """Return a well-conditioned matrix."""
    return jnp.tanh(a) + 5 * jnp.eye(N)


def read(mode: str, a: Any, b: Any) -> Any:
    return a.at[places(b[0])].get(mode=mode, fill_value=0) * b


def read_numbers(mode: str, a: Any, b: Any) -> Any:
    return a.at[places(b), places(b.T)].get(mode=mode, fill_value=0) + a


def write(mode: str, a: Any, b: Any) -> Any:
    return a.at[places(b[1])].add(jnp.cos(b), mode=mode)


def write_numbers(mode: str, a: Any, b: Any) -> Any:
    return jnp.cos(a).at[places(a[0]), places(b[0])].add(b[:, 1], mode=mode)


def write_over(mode: str, a: Any, b: Any) -> Any:
    return a.at[places(b[1, :1])].set(b[:1], mode=mode)  # one index: with several, the order of writes is undefined


def batched_places(a: Any, b: Any) -> Any:
    return jnp.take_along_axis(a, places(b), axis=1, mode="fill", fill_value=0) * b


def half(dtype: Any, a: Any, b: Any) -> Any:
    return ((1 + a.astype(dtype)) @ b.astype(dtype)).astype(a.dtype)


def half_norm(dtype: Any, a: Any, b: Any) -> Any:
    """A normalization with scale 1 + parameter."""
    x = b.astype(dtype)
    return (x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1) * (1 + a[0].astype(dtype))).astype(a.dtype)


def solved_in_steps(a: Any, b: Any) -> Any:
    return jax.scipy.sparse.linalg.cg(well(a) @ well(a).T, b, maxiter=20)[0]


def repeated(a: Any, b: Any) -> Any:
    """A loop of unknown length, which has no gradient."""
    start = (lax.stop_gradient(a), jnp.tanh(b))
    grown = lax.while_loop(lambda c: jnp.sum(c[0] ** 2) < 50, lambda c: (1.5 * c[0] + c[1] ** 2 + 1, c[1]), start)
    return b * jnp.tanh(lax.stop_gradient(grown[0]))


def repeated_on_both(a: Any, b: Any) -> Any:
    return a * lax.stop_gradient(lax.while_loop(lambda c: jnp.sum(c**2) < 9, lambda c: 2 * c + 1, jnp.tanh(a * b)))


def through_a_reference(a: Any, b: Any) -> Any:
    kept = jax.new_ref(a)
    kept[0] += b[1]
    return kept[...] * b


def rounded_in_each_turn(a: Any, b: Any) -> Any:
    """Rounding, which also rounds the cotangents."""
    return lax.scan(lambda c, row: (jnp.tanh(c + row @ lax.reduce_precision(a, 11, 20)), c), b[0], b)[1]


@jax.checkpoint
def dropped_and_not(a: Any, b: Any) -> Any:
    kept = jax.random.bernoulli(jax.random.key(0, impl="rbg"), 0.5, (N, N))
    return jnp.tanh(a * b * kept), jnp.cos(a)


def dropped(a: Any, b: Any) -> Any:
    """Random numbers that depend on the transforms around them, inside a `jax.checkpoint`."""
    return sum(dropped_and_not(a, b))


def in_groups(a: Any, b: Any) -> Any:
    """A product that JAX cannot map."""
    sizes = jnp.array([1, N - 1], jnp.int32)
    return lax.ragged_dot(jnp.tanh(b), jnp.stack([a, jnp.cos(a)]), sizes)


# Each step takes two (N, N) values, from parameters, data or both, and returns one.
STEPS: dict[str, Any] = {
    "product": lambda a, b: a @ b,
    "product of a transpose": lambda a, b: a.T @ b,
    "product with a transpose": lambda a, b: a @ b.T,
    "outer": lambda a, b: jnp.einsum("ij,kj->ik", a, b),
    "diagonal product": lambda a, b: jnp.einsum("ij,ij->i", a, b)[:, None] * b,
    "one matrix a row": lambda a, b: jnp.einsum("ij,ijk->ik", a, jnp.stack([b, b.T, b[::-1]])),
    "sum": lambda a, b: a + b,
    "difference": lambda a, b: a - b,
    "scale": lambda a, b: a * b,
    "row scale": lambda a, b: a * b[0],
    "row shift": lambda a, b: a + b[:, :1],
    "quotient": lambda a, b: a / (2 + b**2),
    "tanh": lambda a, b: jnp.tanh(a),
    "normalized": lambda a, b: a / jnp.sqrt(1 + jnp.sum(b**2)),
    "reshape": lambda a, b: a.T.reshape(N, N) + b.reshape(N * N)[::-1].reshape(N, N),
    "concatenate": lambda a, b: jnp.concatenate([a[:1], b[1:]]),
    "wide product": lambda a, b: jnp.concatenate([a, b], 1) @ jnp.concatenate([b, a]),
    "choice": lambda a, b: jnp.where(a > b, a, 2 * b),
    "rows": lambda a, b: a[jnp.array([2, 0, 2])] * b,
    "rows by data": lambda a, b: a[jnp.argsort(b[0])],
    "half": lambda a, b: (0.5 * a) @ b,
    "divided": lambda a, b: (a / jnp.sqrt(3.0)) @ b.T,
    "small times large": lambda a, b: ((a * 1e-200) @ b) * 1e200,
    "large times small": lambda a, b: ((a / 1e-200) @ b.T) * 1e-200,
    "by a jitted factor": lambda a, b: by_factor(by_factor(a, b, jnp.sqrt(2.0)), b, jnp.sqrt(3.0)),
    "parts": lambda a, b: jnp.concatenate([a[:2] @ b, b[2:] @ a]),
    "parts with numbers in common": lambda a, b: (a[:, :2] @ b[:2]) * (a[:, 1:] @ b[1:]),
    "split": lambda a, b: jnp.split(a, [1], 1)[0] * b + jnp.split(a, [1], 1)[1] @ b[:2],
    "decay": lambda a, b: a + 0.1 * jnp.sum(b**2),
    "times a norm": lambda a, b: a * jnp.linalg.norm(b),
    "times the norm of a small one": lambda a, b: a * (1e200 * jnp.linalg.norm(1e-200 * b)),
    "stop": lambda a, b: a * lax.stop_gradient(b),
    "stopped inside": lambda a, b: a * jax.checkpoint(lambda a, b: (lax.stop_gradient(a), a * b))(a, b)[0] + b,
    "cast": lambda a, b: a.astype(jnp.float32).astype(jnp.float64) + b,
    "jitted": jax.jit(lambda a, b: jnp.sin(a) @ b),
    "jitted pair": lambda a, b: jnp.matmul(*jax.jit(lambda a, b: (jnp.cos(a), b * a[0, 0]))(a, b)),
    "relu": lambda a, b: jax.nn.relu(a) - jax.nn.softplus(b),
    "checkpoint": jax.checkpoint(lambda a, b: jnp.tanh(a @ b)),
    "convolution": lambda a, b: lax.conv_general_dilated(
        a[None, :, :, None], b[:2, :2, None, None], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )[0, :, :, 0],
    "scan over rows": lambda a, b: lax.scan(lambda h, row: (jnp.tanh(h @ a + row), h), b[0], b)[1],
    "scan over a stack": lambda a, b: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), a, jnp.stack([b, b.T]))[0],
    "scan that carries": lambda a, b: lax.scan(lambda c, _: ((c[0] @ b, c[1] + c[0]), None), (a, b), None, 2)[0][1],
    "scan with a rule": lambda a, b: lax.scan(
        lambda c, row: (jnp.tanh(c + row @ clipped_cotangent(a)), clipped_cotangent(a[0, 0]) * c), b[0], b
    )[1],
    "scan with a rounding": rounded_in_each_turn,
    "scan over a scaled stack": lambda a, b: lax.scan(
        lambda h, w: (jnp.tanh(h @ (w / lax.stop_gradient(1 + jnp.abs(w).max()))), None), a, jnp.stack([b, b.T])
    )[0],
    "scaled by its largest": lambda a, b: (a / lax.stop_gradient(1 + jnp.abs(a).max())) @ b,
    "scaled parts": lambda a, b: (0.5 * jnp.concatenate([a, b])).reshape(2, N, N).sum(0) @ b,
    "through a reference": through_a_reference,
    "branch": lambda a, b: lax.cond(a[0, 0] > b[0, 0], lambda: a @ b, lambda: a * b),
    "branches": lambda a, b: lax.switch(places(b[0, 0]), [lambda: a @ b, lambda: a * b, lambda: jnp.sin(a)]),
    # Complex intermediates.
    "complex cast": lambda a, b: jnp.real(complex_of(b, a) @ a.astype(complex)),
    "complex sum": lambda a, b: jnp.imag(complex_of(b, b) * (a + 0j)),
    "complex parts": lambda a, b: jnp.abs(lax.complex(a, b) @ complex_of(b, b) + 2) - jnp.angle(complex_of(b, a) + 9),
    "complex number": lambda a, b: jnp.real(complex_of(b, b) * (a[0, 0] + 1j * a[1, 0]) ** 2),
    "Fourier": lambda a, b: jnp.fft.fft(a).real + jnp.fft.irfft(jnp.fft.rfft(b) * jnp.fft.rfft(a), N),
    # Indices, some out of range.
    **{f"read, {mode}": partial(read, mode) for mode in MODES},
    **{f"read numbers, {mode}": partial(read_numbers, mode) for mode in MODES},
    **{f"write, {mode}": partial(write, mode) for mode in ("drop", *MODES[1:])},
    **{f"write numbers, {mode}": partial(write_numbers, mode) for mode in ("drop", *MODES[1:])},
    **{f"write over, {mode}": partial(write_over, mode) for mode in ("drop", *MODES[1:])},
    "read along an axis": batched_places,
    "one row": lambda a, b: a[places(b[0, 0])] * b,
    "a window": lambda a, b: b[:, :2] @ lax.dynamic_slice(a, places(b[0, :2]), (2, 3)),
    "put into a window": lambda a, b: lax.dynamic_update_slice(a, b[:2, :1], places(b[0, :2])),
    "rows by bytes": lambda a, b: jnp.take(a, places(b[0]).astype(jnp.uint8), axis=0, mode="clip") * b,
    # Half precision, with operations on parameters only.
    **{f"{dtype.__name__} product": partial(half, dtype) for dtype in (jnp.float16, jnp.bfloat16)},
    **{f"{dtype.__name__} norm": partial(half_norm, dtype) for dtype in (jnp.float16, jnp.bfloat16)},
    # Solves and factorizations.
    "solve": lambda a, b: jnp.linalg.solve(well(a), b),
    "solve one": lambda a, b: b * jnp.linalg.solve(well(b), a[0]),
    "solve in steps": solved_in_steps,
    "inverse": lambda a, b: jnp.linalg.inv(well(a)) @ b,
    "Cholesky": lambda a, b: jnp.linalg.cholesky(well(a) @ well(a).T) * b,
    "triangular": lambda a, b: jax.scipy.linalg.solve_triangular(well(a), b, lower=True),
    "determinant": lambda a, b: b * jnp.linalg.slogdet(well(a))[1],
    "QR": lambda a, b: jnp.linalg.qr(well(a))[1] @ b,
    "eigenvalues": lambda a, b: b * jnp.linalg.eigvalsh(jnp.diag(10.0 * jnp.arange(N)) + jnp.tanh(a)),
    # Loops of unknown length, custom rules, sorts and scans.
    "while": repeated,
    "while on both": repeated_on_both,
    "own tangent": own_tangent,
    "own cotangent": own_cotangent,
    "clipped cotangent": lambda a, b: clipped_cotangent(a) @ b,
    "clipped cotangent of one": lambda a, b: clipped_cotangent(a[0, 0] + 1) * b,
    "sort": lambda a, b: jnp.sort(a, axis=0) @ b,
    "sort by another": lambda a, b: lax.sort((b, a), dimension=1, num_keys=1)[1],
    "largest": lambda a, b: lax.top_k(a, 2)[0] @ b[:2],
    "associative scan": lambda a, b: lax.associative_scan(jnp.multiply, jnp.tanh(a) + b, axis=1),
    "associative scan of matrices": lambda a, b: lax.associative_scan(jnp.matmul, jnp.stack([a, b, jnp.tanh(a)]))[2],
    "sums so far": lambda a, b: jnp.cumsum(a, 0) * lax.cummax(b, 1) + lax.cumlogsumexp(a, 1),
    "pooled": lambda a, b: lax.reduce_window(a * b, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"),
    "dropped": dropped,
    "in groups": in_groups,
    # Data movement and nested transforms.
    "barrier": lambda a, b: lax.optimization_barrier(a.T) @ b,
    "barrier of both": lambda a, b: jnp.matmul(*lax.optimization_barrier((b, a))),
    "barrier of two": lambda a, b: lax.optimization_barrier((jnp.tanh(a), a.T))[1] @ b,
    "named": lambda a, b: checkpoint_name(a, "a") @ checkpoint_name(b, "b"),
    "placed": lambda a, b: jax.device_put(a) @ lax.with_sharding_constraint(b, SingleDeviceSharding(jax.devices()[0])),
    "mapped": lambda a, b: jax.vmap(lambda row, column: row * jnp.sum(column), (0, 1), 1)(a, b),
    "tangent": lambda a, b: jax.jvp(lambda a: jnp.sin(a) @ b, (a,), (b,))[1],
    "gradient": lambda a, b: jax.grad(lambda a: jnp.sum(jnp.sin(a @ b)))(a),
}
# Parameters times a constant whose square overflows or underflows in float64.
FAR = ("small times large", "large times small")
# Steps with fewer digits than float64, which need short programs and wider tolerances.
ROUGH = {name: 3e-2 for name in STEPS if name.split()[0] in ("float16", "bfloat16")} | {"cast": 1e-5}


@pytest.mark.hypothesis
@pytest.mark.parametrize("part", range(4))  # run in parallel
def test_every_way_of_a_parameter_to_the_loss_counts(part: int) -> None:
    left = 13 if settings().max_examples < 100 else 1250  # more under `make fuzz`
    for turn in range(-(-left // 250)):
        program = given(data=st.data())(a_program_counts_every_way)
        seed(part + 4 * turn)(settings(max_examples=min(250, left - 250 * turn))(program))()
        jax.clear_caches()  # release the compiled programs


def a_program_counts_every_way(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5), label="steps")
    rough = max((ROUGH.get(name, 0) for name in names), default=0)
    names = names[:2] if rough else names
    steps = [(name, data.draw(st.integers(0, 3 + i)), data.draw(st.integers(0, 3 + i))) for i, name in enumerate(names)]
    # Scale only parameters: the squares of data at these scales are not representable.
    steps = [(name, i % 2 if name in FAR else i, j) for name, i, j in steps]
    generator = np.random.default_rng(data.draw(st.integers(0, 99), label="seed"))
    method = data.draw(st.sampled_from(METHODS), label="method")
    rank = data.draw(st.sampled_from([0, 1, None]), label="the norm to clip to")  # None: nothing is clipped
    by_parameter = data.draw(st.booleans(), label="a norm for each parameter")
    automatic = data.draw(st.sampled_from([None, None, 0.1]), label="automatic clipping")
    mappable = not {"in groups", "through a reference", "dropped", "while"} & {*names}
    more = data.draw(st.sampled_from([None, None, "clipped_fun", "grid"]), label="more") if mappable else None

    def loss(parameters: Any, example: Any) -> Any:
        values = [*parameters, *example]
        for name, i, j in steps:
            values.append(STEPS[name](values[i], values[j]))
        return sum(jnp.sum(jnp.sin(value)) for value in values[4:])

    with ExitStack() as stack:
        stack.enter_context(jax.enable_x64(True))
        if data.draw(st.booleans(), label="factors"):  # gradients this small would otherwise be materialized
            stack.enter_context(mock.patch.object(OuterProduct, "smaller", return_value=True))
        parameters = [generator.normal(size=(N, N)) for _ in range(2)]
        examples = [generator.normal(size=(BATCH, N, N)) for _ in range(2)]
        padding = np.array(data.draw(st.lists(st.booleans(), min_size=BATCH, max_size=BATCH), label="padding"))
        outlier = data.draw(st.sampled_from([None, None, None, 1e-170, 1e150, 1e170]), label="an outlier's size")
        if outlier is not None:  # must not affect the other examples
            padding[-1] = True
            for x in examples:
                x[-1] *= outlier
        gradient = jax.jit(jax.grad(loss))
        each = [gradient(parameters, [x[i] for x in examples]) for i in range(BATCH)]
        gradients = np.array(each)  # (example, parameter, N, N)
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.sqrt(np.square(gradients).sum((2, 3) if by_parameter else (1, 2, 3))).reshape(BATCH, -1)
        finite = np.isfinite(norms).all(1)
        broken = ~finite
        if outlier is not None:
            finite[-1] = broken[-1] = False
        bound = np.sort(norms[finite].max(1))[min(rank, finite.sum() - 1)] if rank is not None and finite.any() else 1e3
        if not np.isfinite(bound):
            bound = 1e3
        if rank is None and automatic is None:
            bound = np.inf
        bounds = bound * np.array([1.0, 0.5])[: norms.shape[1]]
        positive = np.maximum(np.where(finite[:, None], norms, 1), 1e-300)
        factors = np.minimum(1, bounds / positive) if automatic is None else bounds / (positive + automatic)
        weights = np.where((finite & ~padding)[:, None], factors, 0)
        known = np.where(finite[:, None, None, None], gradients, 0)
        expected = (np.broadcast_to(weights, (BATCH, 2))[..., None, None] * known).sum(0)

        if data.draw(st.integers(0, 7), label="explicit axes") == 7:
            mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
            examples = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for x in examples]
        given_norms = [*map(float, bounds)] if by_parameter else float(bound)
        options = {"method": method, "automatic": automatic, "return_grad_norms": True, "keep_batch_dim": False}
        of = clipped_grad(loss, l2_clip_norm=given_norms, **options)
        call = of.__call__ if data.draw(st.integers(0, 7), label="eager") == 7 else jax.jit(of)
        total, aux = call(parameters, examples, is_padding_example=padding)
        total, found = np.array(total), np.stack(jax.tree.leaves(aux.grad_norms), axis=1)
        others, allowed = [], 0.0
        if more == "clipped_fun":
            bounded = partial(clipped_fun, l2_clip_norm=given_norms, automatic=automatic)
            outputs = bounded(jax.grad(loss), batch_argnums=1, keep_batch_dim=False)
            others.append((outputs(parameters, examples, is_padding_example=padding), expected))
        elif more == "grid" and automatic is None and not by_parameter and 1e-6 < bound < np.inf:
            on_grid = clipped_grad(loss, l2_clip_norm=float(bound), grid_scale=1000, keep_batch_dim=False)
            steps_up_to = on_grid(parameters, examples, is_padding_example=padding)
            assert all(x.dtype == jnp.int64 for x in steps_up_to)
            room = bound * (1 - 0.5 * np.sqrt(gradients[0].size) / 1000)
            tightened = np.where((finite & ~padding)[:, None], np.minimum(1, room / positive), 0)
            wanted = (np.broadcast_to(tightened, (BATCH, 2))[..., None, None] * known).sum(0)
            allowed = 0.5 * BATCH * bound / 1000  # each example is rounded by up to half a step
            others.append((np.array(steps_up_to) * bound / 1000, wanted))

    scale = 1 + max(np.abs(expected).max(), norms[finite].max(initial=0))
    # Long programs amplify float64 rounding; the largest error of "vmap", which is JAX itself, was 2.4e-9.
    np.testing.assert_allclose(found[finite], norms[finite], rough or 1e-7, (rough or 1e-7) * scale)
    assert not np.isfinite(found[broken]).all(1).any()
    # Terms may cancel, so the error is relative to more than their sum.
    np.testing.assert_allclose(total, expected, 0, (rough or 1e-6) * scale)
    for other, wanted in others:
        np.testing.assert_allclose(np.array(other), wanted, 0, (rough or 1e-6) * scale + allowed)


@pytest.mark.parametrize("method", ["ghost", "book_keeping"])
def test_no_other_step_falls_back_to_one_example_at_a_time(method: Any) -> None:
    generator = np.random.default_rng(0)
    fallen = set()
    with jax.enable_x64(True):
        parameter, example = jnp.array(generator.normal(size=(N, N))), jnp.array(generator.normal(size=(BATCH, N, N)))
        for name, step in STEPS.items():

            def loss(q: Any, x: Any, step: Any = step) -> Any:
                return jnp.sum(jnp.sin(step(q, x)) + jnp.cos(step(x, q)))

            of = clipped_grad(loss, l2_clip_norm=1.0, method=method, keep_batch_dim=False)
            if of.explain(parameter, example).method != method:
                fallen.add(name)
    # JAX cannot map it, it has no backward pass, it holds a `jax.Ref`, or its random numbers change under `vmap`.
    assert fallen == {"in groups", "while", "through a reference", "dropped"}
