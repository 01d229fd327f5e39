"""`kfac` and `KroneckerFactors`, against the formulas of the papers, written out with dense Jacobians in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.flatten_util import ravel_pytree

from plurax.transforms.curvature import KroneckerFactors, _kfac, _squares, ekfac, ggn_diagonal, kfac

from .test_diagonal import MODELS, N, cross_entropy, dense, labels, matrix, normal, perceptron, square

Taps = Callable[[str, Any, Any], Any]


def sequence(p: Any, x: Any, tap: Taps) -> Any:
    h = jnp.tanh(tap("w", x, x @ p["w"]))
    h = h + h.mean(1, keepdims=True)
    return tap("v", h, h @ p["v"])


def one_position(p: Any, x: Any, tap: Taps) -> Any:
    h = jnp.tanh(tap("w", x[:, None], (x @ p["w"])[:, None]))
    return tap("v", h, h @ p["v"])[:, 0]


def convolution(p: Any, x: Any, tap: Taps) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    out = lax.conv_general_dilated(x, p["k"], (2, 1), "SAME", dimension_numbers=numbers)
    slices = lax.conv_general_dilated_patches(x, (3, 2), (2, 1), "SAME", dimension_numbers=numbers)
    # JAX orders patches by channel first, and the kernel's rows by place first.
    patches = slices.reshape(*slices.shape[:3], x.shape[3], 6).swapaxes(3, 4).reshape(len(x), -1, 6 * x.shape[3])
    out = tap("k", patches, out.reshape(len(x), -1, out.shape[3]))
    return jnp.tanh(out).mean(1) @ p["v"]


def over_time(p: Any, x: Any, tap: Taps) -> Any:
    h = x.mean(1)[:, :1] * jnp.arange(3.0)
    steps = tap("w", x, x @ p["w"])
    for t in range(x.shape[1]):
        h = jnp.tanh(steps[:, t] + tap(f"u {t}", h[:, None], (h @ p["u"])[:, None])[:, 0])
    return h


CASES: dict[str, Any] = {
    "one position": (one_position, {"w": (4, 6), "v": (6, 3)}, (N, 4), ()),
    "a sequence": (sequence, {"w": (4, 6), "v": (6, 3)}, (N, 4, 4), (4,)),
    "a convolution": (convolution, {"k": (3, 2, 2, 4), "v": (4, 3)}, (N, 5, 4, 2), ()),
    "weights shared over time": (over_time, {"u": (3, 3), "w": (2, 3)}, (N, 4, 2), ()),
}


def written_out(name: str, sharing: str) -> tuple[Any, Any, Any, Any, dict[str, np.ndarray]]:
    """Return a model without taps, parameters, inputs, labels, and A ⊗ G of each parameter."""
    model, shapes, shape, positions = CASES[name]
    p = {key: normal(*size) for key, size in shapes.items()}
    x, y = normal(*shape), labels(3, N, *positions)
    inputs: dict[str, Any] = {}
    zeros: dict[str, Any] = {}

    def record(key: str, a: Any, z: Any) -> Any:
        inputs[key], zeros[key] = a, jnp.zeros_like(z)
        return z

    outputs = model(p, x, record)

    def per_example(i: int) -> tuple[Any, Any]:
        def of(taps: Any) -> Any:
            return model(p, x[i : i + 1], lambda key, a, z: z + taps[key])[0]

        j = jax.jacobian(of)({key: z[i : i + 1] for key, z in zeros.items()})
        h = jax.hessian(lambda o: cross_entropy(o[None], y[i : i + 1]))(outputs[i])
        size = outputs[i].size
        return {key: np.reshape(each, (size, *each.shape[-2:])) for key, each in j.items()}, np.reshape(h, (size, size))

    groups: dict[str, list[str]] = {}
    for key in inputs:
        groups.setdefault(key.split()[0], []).append(key)
    each = [per_example(i) for i in range(N)]
    blocks = {}
    for key, uses in groups.items():
        a = np.concatenate([inputs[use] for use in uses], axis=1)
        a = a.reshape(N, a.shape[1], -1)
        j = [np.concatenate([jacobians[use] for use in uses], axis=1) for jacobians, _ in each]
        if sharing == "reduce":
            a, j = a.mean(1, keepdims=True), [x.sum(1, keepdims=True) for x in j]
        left = np.einsum("ntp,ntq->pq", a, a) / (N * a.shape[1])
        right = sum(np.einsum("ctd,cb,bte->de", x, h, x) for x, (_, h) in zip(j, each, strict=True)) / N
        blocks[key] = np.kron(left, right)
    return lambda p, x: model(p, x, lambda key, a, z: z), p, x, y, blocks


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_blocks_are_those_of_the_papers(name: str, sharing: Any, chunk_size: int | None) -> None:
    with jax.enable_x64(True):
        model, p, x, y, blocks = written_out(name, sharing)
        of = kfac(model, cross_entropy, fisher="exact", weight_sharing=sharing, chunk_size=chunk_size)
        found = jax.jit(of)(p, x, y)
        assert isinstance(found, KroneckerFactors)
        for key, block in zip(sorted(p), found.blocks, strict=True):
            if key in blocks:  # those of a matrix or a kernel, whose inputs and results are tapped
                np.testing.assert_allclose(block.dense(), blocks[key], rtol=1e-10, atol=1e-13)


def test_one_position_of_a_linear_model_with_the_square_loss_is_exact() -> None:
    with jax.enable_x64(True):
        p, x, y = {"w": normal(4, 3), "b": normal(3)}, normal(N, 4), normal(N, 3)
        model = lambda p, x: x @ p["w"] + p["b"]
        found = jax.jit(kfac(model, square, fisher="exact"))(p, x, y).dense()
        expected = dense(model, square, p, x, y)
        np.testing.assert_allclose(found[:3, :3], expected[:3, :3], rtol=1e-12)  # of the bias
        np.testing.assert_allclose(found[3:, 3:], expected[3:, 3:], rtol=1e-12, atol=1e-15)
        assert not found[:3, 3:].any()


def test_layers_of_a_scan_have_blocks_of_their_own() -> None:
    with jax.enable_x64(True):
        model, p, x, y = MODELS["a scan over layers"]()

        def unrolled(p: Any, x: Any) -> Any:
            for i in range(2):
                x = jnp.tanh(x @ p[f"w{i}"] + p[f"b{i}"])
            return x

        apart = {f"{key}{i}": p[key][i] for key in p for i in range(2)}
        expected = jax.jit(kfac(unrolled, cross_entropy, fisher="exact"))(apart, x, y)
        found = jax.jit(kfac(model, cross_entropy, fisher="exact"))(p, x, y)
        for i in range(2):
            part = found.blocks[1].dense()[9 * i : 9 * (i + 1), 9 * i : 9 * (i + 1)]
            np.testing.assert_allclose(part, expected.blocks[2 + i].dense(), rtol=1e-10, atol=1e-14)
        assert not found.blocks[1].dense()[:9, 9:].any()


@pytest.mark.slow
def test_casts_transposes_and_parts_of_a_parameter() -> None:
    with jax.enable_x64(True):
        p, x, y = {"w": normal(3, 4), "v": normal(3, 6)}, normal(N, 4), labels(3, N)
        plain = lambda p, x: jnp.tanh(x @ p["w"].T) @ p["v"][:, :3]
        moved = lambda p, x: jnp.tanh(x @ -p["w"].astype(jnp.float32).astype(jnp.float64).T) @ -p["v"][:, :3]
        one, two = (kfac(model, cross_entropy, fisher="exact") for model in (plain, moved))
        forms = dict(one.explain(p, x, y).blocks)
        assert forms == {"p['w']": "Kronecker product, 4 x 3", "p['v']": "exact, a matrix of 18 rows"}
        assert dict(two.explain(p, x, y).blocks) == forms
        w, v = np.asarray(one(p, x, y).blocks[1].dense()), np.asarray(one(p, x, y).blocks[0].dense())
        other = kfac(lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"][:, :3], cross_entropy, fisher="exact")
        upright = np.asarray(other(p | {"w": p["w"].T}, x, y).blocks[1].dense()).reshape(4, 3, 4, 3)
        np.testing.assert_allclose(w, upright.transpose(1, 0, 3, 2).reshape(12, 12), rtol=1e-11, atol=1e-14)
        expected = dense(plain, cross_entropy, p, x, y)
        np.testing.assert_allclose(v, expected[:18, :18], rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(two(p, x, y).blocks[1].dense(), w, rtol=1e-4, atol=1e-6)


def test_rows_of_a_table_and_large_sides_are_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.enable_x64(True):
        p, tokens, y = {"table": normal(7, 4), "out": normal(4, 7)}, labels(7, N, 6), labels(7, N, 6)
        model = lambda p, tokens: jnp.tanh(p["table"][tokens]) @ p["out"]
        whole = jax.jit(kfac(model, cross_entropy, fisher="exact"))(p, tokens, y)
        hot = np.eye(7)[np.asarray(tokens)].reshape(-1, 7)
        np.testing.assert_allclose(whole.blocks[1].left[0] * 30, (hot.T @ hot).diagonal(), rtol=1e-12)
        monkeypatch.setattr(_squares, "_LARGEST_SIDE", 6)
        found = jax.jit(kfac(model, cross_entropy, fisher="exact"))(p, tokens, y)
        assert "4 x 7 (diagonal)" in str(kfac(model, cross_entropy, fisher="exact").explain(p, tokens, y))
        one, other = found.blocks[0], whole.blocks[0]
        np.testing.assert_allclose(one.right[0], np.diagonal(other.right[0]), rtol=1e-12)
        np.testing.assert_allclose(found.trace(), whole.trace(), rtol=1e-12)
        reduced = jax.jit(kfac(model, cross_entropy, fisher="exact", weight_sharing="reduce"))(p, tokens, y)
        shares = np.eye(7)[np.asarray(tokens)].mean(1)
        np.testing.assert_allclose(reduced.blocks[1].left[0], np.square(shares).mean(0), rtol=1e-12)


@pytest.mark.slow
def test_symmetric_products_in_blocks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with jax.enable_x64(True):
        model, p, x, y, blocks = written_out("a convolution", "expand")
        monkeypatch.setattr(_squares, "_IN_BLOCKS", 3)  # of 12, in halves and quarters
        found = jax.jit(kfac(model, cross_entropy, fisher="exact"))(p, x, y)
        np.testing.assert_allclose(found.blocks[0].dense(), blocks["k"], rtol=1e-10, atol=1e-13)


def test_rows_out_of_range_do_not_count() -> None:
    with jax.enable_x64(True):
        p, tokens = {"table": normal(6, 3)}, jnp.array([[0, 6], [1, 6], [2, 6], [3, -9]])
        model = lambda p, tokens: jnp.take(p["table"], tokens, axis=0, fill_value=0.0).sum(1)
        found = jax.jit(kfac(model, cross_entropy, fisher="exact"))(p, tokens, jnp.zeros(4, int))
        np.testing.assert_allclose(found.blocks[0].left[0], np.array([1, 1, 1, 1, 0, 0]) / 8, rtol=1e-12)


def by_roles(model: Any, loss: Any, p: Any, x: Any, y: Any, role: int, shape: tuple[int, int]) -> tuple[Any, Any]:
    """Return the factors of one of several parameters that a model has for the roles of one of them."""
    of = jax.jit(kfac(model, loss, fisher="exact"))(p, x, y).blocks[role]
    left, right = of.left[0], of.right[0]
    left = jnp.diag(left) if left.ndim == 1 else left
    return (left, right) if len(left) == shape[0] else (right, left)


@pytest.mark.slow
def test_a_matrix_and_its_transpose_have_one_product_with_the_trace_of_both() -> None:
    with jax.enable_x64(True):
        p, x, y = {"w": normal(5, 3)}, normal(N, 5), normal(N, 5)
        model = lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T
        of = kfac(model, square, fisher="exact")
        assert dict(of.explain(p, x, y).blocks) == {"p['w']": "Kronecker product, 5 x 3"}
        apart = lambda p, x: jnp.tanh(x @ p[0]) @ p[1].T
        (a, b), (c, d) = (by_roles(apart, square, [p["w"], p["w"]], x, y, role, (5, 3)) for role in (0, 1))
        total = jnp.trace(a) * jnp.trace(b) + jnp.trace(c) * jnp.trace(d)
        # The partial traces of the sum of both, over its trace.
        left, right = a * jnp.trace(b) + c * jnp.trace(d), b * jnp.trace(a) + d * jnp.trace(c)
        np.testing.assert_allclose(of(p, x, y).dense(), np.kron(left, right) / total, rtol=1e-11, atol=1e-15)
        np.testing.assert_allclose(of(p, x, y).trace(), total, rtol=1e-12)
        chunked = kfac(model, square, fisher="exact", chunk_size=2)
        np.testing.assert_allclose(chunked(p, x, y).dense(), of(p, x, y).dense(), rtol=1e-11, atol=1e-15)
        zero = of(jax.tree.map(jnp.zeros_like, p), x, y)
        assert not zero.dense().any()


@pytest.mark.slow
def test_a_table_that_is_read_and_multiplied_has_one_product() -> None:
    with jax.enable_x64(True):
        p, tokens, y = normal(7, 4), labels(7, N, 6), labels(7, N, 6)
        of = kfac(lambda e, tokens: jnp.tanh(e[tokens]) @ e.T, cross_entropy, fisher="exact")
        assert dict(of.explain(p, tokens, y).blocks) == {"e": "Kronecker product, 7 x 4"}
        apart = lambda p, tokens: jnp.tanh(p[0][tokens]) @ p[1].T
        (a, b), (c, d) = (by_roles(apart, cross_entropy, [p, p], tokens, y, role, (7, 4)) for role in (0, 1))
        total = jnp.trace(a) * jnp.trace(b) + jnp.trace(c) * jnp.trace(d)
        left, right = a * jnp.trace(b) + c * jnp.trace(d), b * jnp.trace(a) + d * jnp.trace(c)
        np.testing.assert_allclose(of(p, tokens, y).dense(), np.kron(left, right) / total, rtol=1e-11, atol=1e-15)


def test_other_uses_have_exact_blocks_or_diagonals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that is multiplied and squared, and one that is not used."""
    with jax.enable_x64(True):
        p, x, y = {"kernel": normal(3, 4), "table": normal(4, 7)}, normal(N, 3), labels(7, N)
        model = lambda p, x: jnp.tanh(x @ p["kernel"]) @ p["table"] + jnp.square(p["table"]).sum(0)
        expected = dense(model, cross_entropy, p, x, y)
        p["unused"] = normal(2, 2)
        found = jax.jit(kfac(model, cross_entropy, fisher="exact"))(p, x, y)
        size = p["table"].size
        start = p["kernel"].size
        np.testing.assert_allclose(found.blocks[1].dense(), expected[start : start + size, start : start + size], 1e-10)
        report = kfac(model, cross_entropy, fisher="exact").explain(p, x, y)
        forms = dict(report.blocks)
        assert forms["p['table']"] == "exact, a matrix of 28 rows"
        assert forms["p['kernel']"] == "Kronecker product, 3 x 4"
        assert forms["p['unused']"] == "exact, a matrix of 4 rows"
        monkeypatch.setattr(_kfac, "_LARGEST_BLOCK", 20)
        found = jax.jit(kfac(model, cross_entropy, fisher="exact"))(p, x, y)
        np.testing.assert_allclose(
            found.blocks[1].diagonal().ravel(), np.diag(expected)[start : start + size], rtol=1e-10
        )


def factors_of(name: str, **options: Any) -> tuple[KroneckerFactors, Any]:
    model, p, x, y = MODELS[name]()
    return jax.jit(kfac(model, cross_entropy, **({"fisher": "exact"} | options)))(p, x, y), p


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("largest", [(4096, 1024), (3, 1)])
def test_methods_agree_with_the_dense_matrix(name: str, largest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_squares, "_LARGEST_SIDE", largest[0])
    monkeypatch.setattr(_kfac, "_LARGEST_BLOCK", largest[1])
    with jax.enable_x64(True):
        found, p = factors_of(name)
        d = np.asarray(matrix(found))
        flat, unravel = ravel_pytree(p)
        v, damped = np.asarray(normal(flat.size)), d + 0.1 * np.eye(len(d))
        np.testing.assert_allclose(d, d.T, atol=1e-14)
        assert np.linalg.eigvalsh(d)[0] > -1e-12
        of = lambda name, *args: np.asarray(ravel_pytree(getattr(found, name)(unravel(v), *args))[0])
        np.testing.assert_allclose(of("matvec"), d @ v, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(of("solve", 0.1), np.linalg.solve(damped, v), rtol=1e-9, atol=1e-11)
        values, vectors = np.linalg.eigh(damped)
        np.testing.assert_allclose(of("sqrt_solve", 0.1), vectors @ (vectors.T @ v / values**0.5), rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(found.logdet(0.1), np.linalg.slogdet(damped)[1], rtol=1e-11)
        np.testing.assert_allclose(found.trace(), d.trace(), rtol=1e-12)
        np.testing.assert_allclose(ravel_pytree(found.diagonal())[0], np.diag(d), rtol=1e-12, atol=1e-15)
        back = found.solve(jax.tree.map(lambda a, b: a + 0.1 * b, found.matvec(unravel(v)), unravel(v)), 0.1)
        np.testing.assert_allclose(ravel_pytree(back)[0], v, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose((3.0 * found).dense(), 3 * d, rtol=1e-12, atol=1e-15)


@pytest.mark.slow
def test_factors_of_batches_are_averaged() -> None:
    with jax.enable_x64(True):
        model, p, x, y = MODELS["attention"]()
        of = jax.jit(kfac(model, cross_entropy, fisher="exact"))
        one, other, whole = of(p, x[:2], y[:2]), of(p, x[2:], y[2:]), of(p, x, y)
        both = one * 0.4 + 0.6 * other
        np.testing.assert_allclose(both.dense(), matrix(whole), rtol=1e-11, atol=1e-14)
        assert not (0.0 * one).dense().any()
        np.testing.assert_array_equal((0.0 * one + other).trace(), other.trace())
    with pytest.raises(
        ValueError, match=r"^KroneckerFactors: the matrix is positive semi-definite; -1 times it is not"
    ):
        -1 * one
    with pytest.raises(ValueError, match=r"^KroneckerFactors: factors can be added if they have the same parameters"):
        one + factors_of("perceptron")[0]


def test_samples_have_the_exact_factor_as_their_mean() -> None:
    """Entries of ggᵀ have a variance of at most 2 GᵢᵢGⱼⱼ; six standard deviations of 45 entries fail once in 10⁷."""
    repeats = 800
    with jax.enable_x64(True):
        model, p, x, y = MODELS["perceptron"]()
        tiled = jnp.tile(x, (repeats, 1)), jnp.tile(y, repeats)
        of = jax.jit(kfac(model, cross_entropy))
        found = of(p, *tiled, jax.random.key(0))
        exact = [jax.jit(kfac(model, cross_entropy, fisher="exact"))(p, x[i : i + 1], y[i : i + 1]) for i in range(N)]
        for leaf in (2, 3):
            each = np.stack([one.blocks[leaf].right[0] for one in exact])
            diagonals = np.diagonal(each, axis1=1, axis2=2)
            deviation = np.sqrt((2 * diagonals[:, :, None] * diagonals[:, None, :]).mean(0) / (N * repeats))
            assert (np.abs(found.blocks[leaf].right[0] - each.mean(0)) < 6 * deviation).all()
        other = of(p, *tiled, jax.random.key(1))
        assert not np.allclose(found.blocks[3].right, other.blocks[3].right, rtol=1e-6)


def test_the_empirical_factor_has_gradients_of_the_loss() -> None:
    with jax.enable_x64(True):
        model, p, x, y = MODELS["perceptron"]()
        found = jax.jit(kfac(model, cross_entropy, fisher="empirical"))(p, x, y)
        each = jax.vmap(jax.grad(lambda p, x, y: cross_entropy(model(p, x[None]), y[None])), (None, 0, 0))(p, x, y)
        np.testing.assert_allclose(found.blocks[0].left[0], each["b"].T @ each["b"] / N, rtol=1e-11)
        np.testing.assert_allclose(found.blocks[0].left[0], found.blocks[3].right[0], rtol=1e-11)


@pytest.mark.slow
def test_modules_members_and_pytrees() -> None:
    net = nnx.Sequential(nnx.Linear(4, 6, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Linear(6, 3, rngs=nnx.Rngs(1)))
    x, y = jnp.float32(normal(N, 4)), labels(3, N)
    found = jax.jit(lambda net: kfac(lambda net, x: net(x), cross_entropy, fisher="exact")(net, x, y))(net)
    layers = nnx.to_pure_dict(nnx.state(net, nnx.Param))["layers"]
    p = {
        "w": layers[0]["kernel"],
        "b": layers[0]["bias"],
        "v": layers[2]["kernel"],
        "c": layers[2]["bias"],
    }
    plain = lambda p, x: jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] + p["c"]
    expected = jax.jit(kfac(plain, cross_entropy, fisher="exact"))(p, x, y)
    for one, other in zip(found.blocks, [expected.blocks[i] for i in (0, 3, 1, 2)], strict=True):
        np.testing.assert_allclose(matrix(one), other.dense(), rtol=1e-4, atol=1e-6)
    solved = found.solve(nnx.state(net, nnx.Param), 0.1)
    assert jax.tree.structure(solved) == jax.tree.structure(nnx.state(net, nnx.Param))
    members = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), p)
    together = jax.vmap(kfac(plain, cross_entropy, fisher="exact"), (0, None, None))(members, x, y)
    second = jax.jit(kfac(plain, cross_entropy, fisher="exact"))(jax.tree.map(lambda a: 2 * a, p), x, y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b, rtol=1e-4, atol=1e-6), together, second)


def test_a_model_that_cannot_be_mapped_has_exact_blocks() -> None:
    """A random number from a key that draws others under `jax.vmap`: gradients are held, one example at a time."""
    key = jax.random.key(0, impl="rbg")

    def noisy(p: Any, x: Any) -> Any:
        return lax.cond(True, lambda: perceptron(p, x) * jax.random.normal(key, ()), lambda: perceptron(p, x))

    with jax.enable_x64(True):
        _, p, x, y = MODELS["perceptron"]()
        found = jax.jit(kfac(noisy, cross_entropy, fisher="exact"))(p, x, y)
        expected = dense(noisy, cross_entropy, p, x, y)
        offset = 0
        for block, leaf in zip(found.blocks, jax.tree.leaves(p), strict=True):
            part = expected[offset : offset + leaf.size, offset : offset + leaf.size]
            np.testing.assert_allclose(block.dense(), part, rtol=1e-9, atol=1e-13)
            offset += leaf.size


def test_what_does_not_fit_is_refused() -> None:
    found, p = factors_of("perceptron")
    with pytest.raises(ValueError, match=r"^KroneckerFactors.matvec: v has the structure .*; pass a pytree like them"):
        found.matvec([jnp.ones(3)])
    with pytest.raises(ValueError, match=r"^KroneckerFactors.solve: v has .* where a parameter has "):
        found.solve(p | {"b": jnp.ones(7)}, 0.1)
    model, p, x, y = MODELS["perceptron"]()
    with pytest.raises(TypeError, match=r"^kfac: key must be one key"):
        kfac(model, cross_entropy)(p, x, y)
    with pytest.raises(TypeError, match=r"^kfac: key must be one key"):
        kfac(model, cross_entropy, fisher="exact")(p, x, y, 3.0)
    with pytest.raises(ValueError, match=r"^kfac: fisher must be"):
        kfac(model, cross_entropy, fisher="none")


@pytest.mark.parametrize("of", [kfac, ekfac, ggn_diagonal])
def test_a_key_that_is_not_needed_is_accepted(of: Any) -> None:
    model, p, x, y = MODELS["perceptron"]()
    options: dict[str, Any] = {} if of is ggn_diagonal else {"fisher": "exact"}
    found = of(model, cross_entropy, **options)
    expected = found(p, x, y)
    jax.tree.map(np.testing.assert_array_equal, found(p, x, y, jax.random.key(1)), expected)
    jax.tree.map(np.testing.assert_array_equal, found(p, x, y, key=jax.random.key(2)), expected)
    assert found.explain(p, x, y, key=jax.random.key(2)) == found.explain(p, x, y)
