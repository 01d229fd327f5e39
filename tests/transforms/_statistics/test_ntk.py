"""`empirical_ntk` and `ntk_vp`, against Jacobians that are held."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from plurax.transforms import empirical_ntk, ntk_vp

N, M, OUT = 6, 4, (2, 3)


def parameters() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"in": (5, 7), "bias": (7,), "tied": (7, 7), "kernel": (3, 3, 1, 2), "out": (28, 6)}
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def batch(size: int) -> Any:
    return jnp.asarray(np.random.default_rng(size).normal(size=(size, 4, 5)), jnp.float32)


def apply(p: Any, x: Any) -> Any:
    """Use a matrix at several positions, a tied one, a kernel, and one at one position."""
    hidden = jnp.tanh(jnp.tanh(x @ p["in"] + p["bias"]) @ p["tied"]) @ p["tied"].T
    layout = ("NHWC", "HWIO", "NHWC")
    image = jnp.sin(lax.conv_general_dilated(x[..., None], p["kernel"], (1, 1), "SAME", dimension_numbers=layout))
    out = jnp.tanh(hidden.reshape(len(x), -1) @ p["out"]) * (1 + image.sum((1, 2, 3))[:, None])
    return out.reshape(len(x), *OUT)


def kernel(x1: Any, x2: Any) -> Any:
    """Return the kernel (n, m, 2, 3, 2, 3) from Jacobians, in float64, and the sizes that errors are relative to."""
    one, two = (
        np.concatenate([np.float64(leaf).reshape(len(x), *OUT, -1) for leaf in jax.tree.leaves(jacobians)], axis=-1)
        for x in (x1, x2)
        for jacobians in [jax.jit(jax.jacrev(apply))(parameters(), x)]
    )
    norms = [np.linalg.norm(x, axis=-1) for x in (one, two)]
    return np.einsum("iabp,jcdp->ijabcd", one, two), np.einsum("iab,jcd->ijabcd", *norms)


# For each option, the indices that remain of (i, j, a, b, c, d).
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "all": ({}, "ijabcd->ijabcd"),
    "first": ({"diagonal_axes": 0}, "ijabad->ijabd"),
    "last": ({"diagonal_axes": (-1,)}, "ijabcb->ijabc"),
    "both": ({"diagonal_axes": (1, 0)}, "ijabab->ijab"),
    "trace": ({"trace": True}, "ijabab->ij"),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("chunks", [{}, {"chunk_size": 4}, {"memory_budget": "1MiB"}])
def test_equal_to_held_jacobians(option: str, chunks: Any) -> None:
    given, indices = OPTIONS[option]
    ntk = jax.jit(empirical_ntk(apply, **given, **chunks))
    for x1, x2 in ((batch(N), None), (batch(N), batch(M))):
        expected, size = (np.einsum(indices, x) for x in kernel(x1, x1 if x2 is None else x2))
        if option == "trace":
            expected, size = expected / 6, size / 6
        found = ntk(parameters(), x1) if x2 is None else ntk(parameters(), x1, x2)
        assert found.shape == expected.shape
        assert (np.abs(found - expected) <= 1e-5 * size).all()


@pytest.mark.slow
def test_every_way_of_multiplying_gives_the_same() -> None:
    def every(p: Any, x1: Any, x2: Any) -> Any:
        kernels = [empirical_ntk(apply, **given) for given, _ in OPTIONS.values()]
        return [(ntk(p, x1), ntk(p, x1, x2)) for ntk in kernels]

    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: x.astype(jnp.float64), (parameters(), batch(N), batch(M)))
        found = []
        for way in ("positions", "contraction", "blocks"):
            with (
                mock.patch("plurax.transforms._statistics.inner_products.way", return_value=way),
                mock.patch("plurax.transforms._statistics.inner_products._room", return_value=700),
                mock.patch(
                    "plurax.transforms.privacy._per_example.gradient_forms.OuterProduct.smaller", return_value=True
                ),
            ):
                found.append(jax.jit(lambda *args: every(*args))(*args))
    for other in found[1:]:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 0, 1e-10 * np.abs(y).max()), other, found[0])


def test_the_activations_are_not_repeated_for_each_output() -> None:
    """The kernel of one wide layer: two products, and no array with activations for each output."""
    width, outputs, size = 128, 10, 9
    x, w = jnp.ones((size, width)), jnp.ones((width, outputs))
    text = jax.jit(empirical_ntk(lambda w, x: jnp.tanh(x @ w))).lower(w, x).compile().as_text()
    for shape in (f"[{size},{outputs},{width}]", f"[{outputs},{size},{width}]", f"[{size * outputs},{width}]"):
        assert shape not in text


@pytest.mark.slow
def test_products_with_vectors() -> None:
    p, x = parameters(), batch(N)
    v = jnp.asarray(np.random.default_rng(9).normal(size=(N, *OUT)), jnp.float32)
    expected, size = kernel(x, x)
    found = jax.jit(ntk_vp(apply))(p, x, v)
    scale = np.einsum("ijabcd,jcd->iab", size, np.abs(v))
    assert (np.abs(found - np.einsum("ijabcd,jcd->iab", expected, v)) <= 1e-5 * scale).all()
    several = jax.vmap(ntk_vp(apply), (None, None, 0))(p, x, jnp.stack([v, -2 * v]))
    np.testing.assert_allclose(several[1], -2 * found, 1e-4, 1e-4 * np.abs(found).max())


@pytest.mark.slow
def test_modules_members_and_derivatives() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)), jnp.float32)
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    of = lambda model, x: jnp.tanh(model(x))
    found = empirical_ntk(of)(model, x)
    graph, state = nnx.split(model)
    pure = lambda state, x: of(nnx.merge(graph, state), x)
    np.testing.assert_allclose(found, empirical_ntk(pure)(state, x), 1e-5)
    v = jnp.ones((5, 3))
    np.testing.assert_allclose(ntk_vp(of)(model, x, v), jnp.einsum("ijab,jb->ia", found, v), 1e-5)
    members = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), state)
    mapped = jax.vmap(empirical_ntk(pure, trace=True), (0, None))(members, x)
    np.testing.assert_allclose(mapped[0], jnp.trace(found, axis1=2, axis2=3) / 3, 1e-5)
    slope = jax.grad(lambda state: empirical_ntk(pure, trace=True)(state, x).sum())(state)

    def by_hand(state: Any) -> Any:
        rows = jnp.concatenate([y.reshape(5, 3, -1) for y in jax.tree.leaves(jax.jacrev(pure)(state, x))], axis=-1)
        return jnp.einsum("iap,jap->", rows, rows) / 3

    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-3, 1e-4), slope, jax.grad(by_hand)(state))


def test_a_model_that_jax_cannot_map() -> None:
    def of(p: Any, x: Any) -> Any:
        return lax.ragged_dot(jnp.tanh(x), jnp.stack([p, jnp.cos(p)]), jnp.array([1, 2], jnp.int32))[0]

    rng = np.random.default_rng(0)
    p, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 2), (4, 3, 3)))
    rows = np.stack([[np.ravel(jax.grad(lambda p, row=row, i=i: of(p, row)[i])(p)) for i in range(2)] for row in x])
    found = empirical_ntk(of, keep_batch_dim=False)
    np.testing.assert_allclose(found(p, x), np.einsum("iap,jbp->ijab", rows, rows), 1e-4, 1e-5)
    assert found.explain(p, x).method == "vmap"


@pytest.mark.parametrize("given", [{}, {"trace": True}, {"diagonal_axes": 0}])
def test_outputs_without_their_parameters(given: Any) -> None:
    x = jnp.ones((4, 2))
    for of in (lambda p, x: jnp.sin(x), lambda p, x: x * lax.stop_gradient(p)):
        found = empirical_ntk(of, **given)(jnp.ones(2), x, x[:3])
        shape = (4, 3) if given.get("trace") else (4, 3, 2) if given else (4, 3, 2, 2)
        np.testing.assert_array_equal(found, np.zeros(shape))


def test_what_is_refused() -> None:
    p, x = parameters(), batch(N)
    with pytest.raises(ValueError, match="empirical_ntk: trace=True sums over all outputs"):
        empirical_ntk(apply, trace=True, diagonal_axes=0)
    with pytest.raises(TypeError, match="empirical_ntk: diagonal_axes must be an int or a tuple of ints"):
        empirical_ntk(apply, diagonal_axes="last")
    for axes in (2, (0, 0), (0, -2)):
        with pytest.raises(ValueError, match="empirical_ntk: diagonal_axes=.* must be different axes of outputs"):
            empirical_ntk(apply, diagonal_axes=axes)(p, x)
    with pytest.raises(TypeError, match="empirical_ntk: pass the parameters, a batch x1"):
        empirical_ntk(apply)(p)
    with pytest.raises(TypeError, match="empirical_ntk: fun must return a real floating-point array of outputs"):
        empirical_ntk(lambda p, x: (apply(p, x), 0))(p, x)
    with pytest.raises(ValueError, match="empirical_ntk: fun must map a batch to outputs along axis 0"):
        empirical_ntk(lambda p, x: apply(p, x)[0])(p, x)
    with pytest.raises(ValueError, match="a sample of the other batch is"):
        empirical_ntk(apply)(p, x, x[:, :2])
    with pytest.raises(ValueError, match="ntk_vp: v is an array of shape"):
        ntk_vp(apply)(p, x, jnp.ones(N))
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="ntk_vp: fun changes"):
        ntk_vp(lambda norm, x: norm(x))(norm, jnp.ones((5, 4)), jnp.ones((5, 4)))
    with pytest.raises(TypeError, match="ntk_vp: pass the parameters, a batch x and a vector v"):
        ntk_vp(apply)(p, x)


# The kinds of models that neural-tangents tests its kernels with, written anew.


def dense_stack(p: Any, x: Any) -> Any:
    x = x.reshape(len(x), -1)
    for i, weight in enumerate(p["weights"]):
        x = x @ weight / np.sqrt(len(weight)) + 0.1 * p["shifts"][i]
        x = jax.lax.erf(x) if i < 3 else x
    return x


def convolve(x: Any, kernel: Any, stride: int = 1) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    scale = 1 / np.sqrt(np.prod(kernel.shape[:3]))
    return scale * lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=numbers)


def resnet18(p: Any, x: Any) -> Any:
    x = convolve(x, p["stem"])
    for block in p["blocks"]:
        stride = 2 if "shortcut" in block else 1
        out = convolve(jax.nn.relu(convolve(jax.nn.relu(x), block["first"], stride)), block["second"])
        x = out + (convolve(x, block["shortcut"], stride) if "shortcut" in block else x)
    return jax.nn.relu(x).mean((1, 2)) @ p["head"]


def mixer(p: Any, x: Any) -> Any:
    x = x.reshape(len(x), 4, 2, 4, 2, 2).transpose(0, 1, 3, 2, 4, 5).reshape(len(x), 16, 8) @ p["patches"]
    for block in p["blocks"]:
        normed = jax.nn.standardize(x, epsilon=1e-6) * block["scale"]
        tokens = jnp.einsum("btc,ts->bcs", normed, block["tokens in"])
        x = x + jnp.einsum("bcs,st->btc", jax.nn.gelu(tokens), block["tokens out"])
        x = x + jax.nn.gelu(jax.nn.standardize(x, epsilon=1e-6) @ block["channels in"]) @ block["channels out"]
    return x.mean(1) @ p["head"]


def shapes_of_resnet(widths: tuple[int, ...] = (3, 4, 5, 6)) -> Any:
    blocks = []
    for inputs, outputs in zip((widths[0], *widths[:-1]), widths, strict=True):
        first = {"first": (3, 3, inputs, outputs), "second": (3, 3, outputs, outputs)}
        blocks.append(first | ({"shortcut": (1, 1, inputs, outputs)} if inputs != outputs else {}))
        blocks.append({"first": (3, 3, outputs, outputs), "second": (3, 3, outputs, outputs)})
    return {"stem": (3, 3, 2, widths[0]), "blocks": blocks, "head": (widths[-1], 3)}


MIXER = {"scale": (6,), "tokens in": (16, 5), "tokens out": (5, 16), "channels in": (6, 7), "channels out": (7, 6)}
KINDS: dict[str, tuple[Any, Any]] = {
    "dense stack": (
        dense_stack,
        {"weights": [(128, 10), (10, 11), (11, 12), (12, 3)], "shifts": [(10,), (11,), (12,), (3,)]},
    ),
    "ResNet-18": (resnet18, shapes_of_resnet()),
    "mixer": (mixer, {"patches": (8, 6), "blocks": [MIXER, MIXER], "head": (6, 3)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_kernels_of_larger_models_in_float64(name: str) -> None:
    apply, shapes = KINDS[name]
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        p = jax.tree.map(lambda shape: rng.normal(size=shape), shapes, is_leaf=lambda x: isinstance(x, tuple))
        x1, x2 = rng.normal(size=(4, 8, 8, 2)), rng.normal(size=(3, 8, 8, 2))

        def every(p: Any, x1: Any, x2: Any) -> Any:
            jacobians = [jax.vmap(jax.jacrev(lambda p, x: apply(p, x[None])[0]), (None, 0))(p, x) for x in (x1, x2)]
            kernels = [
                empirical_ntk(apply, **given)(p, x1, x2) for given in ({}, {"trace": True}, {"diagonal_axes": 0})
            ]
            return jacobians, kernels, empirical_ntk(apply)(p, x1)

        quick: Any = {"xla_backend_optimization_level": 0}
        jacobians, kernels, own = jax.jit(every, compiler_options=quick)(p, x1, x2)
        one, two = (
            np.concatenate([x.reshape(*x.shape[:2], -1) for x in jax.tree.leaves(found)], axis=-1)
            for found in jacobians
        )
        expected = np.einsum("iap,jbp->ijab", one, two)
        size = np.einsum("ia,jb->ijab", np.linalg.norm(one, axis=-1), np.linalg.norm(two, axis=-1))
        assert (np.abs(kernels[0] - expected) <= 1e-10 * size).all()
        np.testing.assert_allclose(kernels[1], np.einsum("ijaa->ij", expected) / 3, 1e-9, 1e-10 * size.max())
        np.testing.assert_allclose(kernels[2], np.einsum("ijaa->ija", expected), 1e-9, 1e-10 * size.max())
        np.testing.assert_allclose(own, np.einsum("iap,jbp->ijab", one, one), 1e-9, 1e-10 * size.max())
