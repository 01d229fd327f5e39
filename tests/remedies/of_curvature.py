"""Remedies of curvature, and of inner products of gradients of examples."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from plurax.transforms import empirical_ntk, ntk_vp, per_sample_gram, per_sample_jvp
from plurax.transforms.curvature import _output_hessian, ekfac, ggn_diagonal, kfac, laplace
from plurax.transforms.curvature._laplace import spectrum

from ._registry import Fails, remedy
from .of_modules import extras

X, Y, KEY = jnp.arange(8.0).reshape(4, 2), jnp.array([[1.0], [0.0], [2.0], [1.0]]), jax.random.key(0)
W = jnp.ones((2, 1))


def model(w: Any, x: jax.Array) -> jax.Array:
    return x @ w


def loss(out: jax.Array, y: jax.Array) -> jax.Array:
    return 0.5 * jnp.mean(jnp.sum((out - y) ** 2, -1))


def concave(out: jax.Array, y: jax.Array) -> jax.Array:
    return -loss(out, y)


def equal(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4)


fit = partial(laplace, model, loss, W, (X, Y), prior_precision=1.0)


@remedy("{}: the diagonal has no empirical form; pass fisher='exact' or 'mc'.")
def empirical_diagonal(fails: Fails) -> None:
    fails(fit, structure="diagonal", fisher="empirical")
    for fisher, key in (("exact", None), ("mc", KEY)):
        assert fit(structure="diagonal", fisher=fisher, key=key).size == 4


@remedy("{}: pass basis to ekfac; {} has no eigenvectors.")
def basis_of_kfac(fails: Fails) -> None:
    basis = kfac(model, loss, fisher="exact")(W, X, Y).eigen()
    fails(kfac(model, loss, fisher="exact"), W, X, Y, basis=basis)
    ekfac(model, loss, fisher="exact")(W, X, Y, basis=basis)


@remedy(
    "KroneckerFactors.{}: {}; pass a pytree like them.",
    "KroneckerFactors.{}: {}; pass a pytree like the parameters.",
)
def vectors_of_factors(fails: Fails) -> None:
    factors = kfac(model, loss, fisher="exact")(W, X, Y)
    for call in (factors.matvec, lambda v: factors.solve(v, 0.1)):
        fails(call, [W])
        fails(call, W[0])
        assert call(W).shape == W.shape


@remedy("{}: structure={} has products with the exact matrix only; leave fisher out.")
def options_of_laplace(fails: Fails) -> None:
    fails(fit, structure="full", fisher="mc")
    assert fit(structure="full").size == 4
    fails(fit, structure="ggn_lanczos", fisher="mc", key=KEY)
    assert fit(structure="ggn_lanczos", key=KEY, rank=2).size == 4


@remedy("Laplace.fit_prior: all parameters are zero; pass a prior_precision.")
def prior_of_zeros(fails: Fails) -> None:
    for structure in ("kfac", "diagonal", "full"):
        fails(laplace, model, loss, 0 * W, (X, Y), structure=structure)
        assert laplace(model, loss, 0 * W, (X, Y), structure=structure, prior_precision=2.0).prior_precision == 2


@remedy(
    "laplace: the whole matrix would have {} rows, but at most {} are stored; take another structure{}.",
    ", or name fewer parameters by wrt",
    "{}: wrt selects variables of an NNX module, but params is {}; leave it out, and take another structure than "
    "'last_layer'.",
)
def whole_matrix(fails: Fails) -> None:
    net = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Linear(3, 1, rngs=nnx.Rngs(1)))
    of_net = partial(laplace, lambda net, x: net(x), loss, net, (X, Y), prior_precision=1.0)
    last = nnx.PathContains(2)
    with patch.object(spectrum, "_MOST", 4):
        fails(of_net, structure="full")
        assert of_net(structure="full", wrt=last).curvature.eigenvalues().size == 4
    with patch.object(spectrum, "_MOST", 1):
        said = fails(fit, structure="full")
        assert "wrt" not in said
    for structure in ("diagonal", "kfac"):
        assert of_net(structure=structure).size == fit(structure=structure).size == 4
    for structure in ("full", "last_layer"):
        fails(fit, structure=structure, wrt=last)
        assert fit(structure="full").size == 4


@remedy(
    "laplace: the Hessian of the loss by the outputs is indefinite; pass a convex loss.",
    "{}: the Hessian of the loss by the outputs is indefinite; pass a convex loss.",
)
def loss_that_is_not_convex(fails: Fails) -> None:
    for structure in ("ggn_lanczos", "full", "kfac", "diagonal"):
        of_loss = partial(laplace, model, params=W, data=(X, Y), structure=structure, prior_precision=1.0)
        fails(of_loss, loss=concave)
        assert of_loss(loss=loss).size == 4
    for call in (ggn_diagonal(model, concave), kfac(model, concave, fisher="exact")):
        fails(call, W, X, Y)
    equal(ggn_diagonal(model, loss)(W, X, Y)[:, 0], (X**2).mean(0))


@remedy("laplace: structure='ggn_lanczos' needs matfree; install it with: pip install 'plurax[curvature]'")
def without_matfree(fails: Fails) -> None:
    with patch.dict(sys.modules, {"matfree": None}):
        fails(fit, structure="ggn_lanczos", rank=2)
    assert any(name.startswith("matfree") for name in extras()["curvature"])
    fit(structure="ggn_lanczos", rank=2)


@remedy("write it with logsumexp or log_softmax and with functions of single outputs")
def hessian_of_no_known_form(fails: Fails) -> None:
    def by_norm(out: jax.Array, y: jax.Array) -> jax.Array:
        probabilities = jnp.exp(out) / jnp.exp(out).sum(-1, keepdims=True)
        return -jnp.mean(jnp.log(jnp.sum(probabilities * y, -1)))

    def by_log_softmax(out: jax.Array, y: jax.Array) -> jax.Array:
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(out) * y, -1))

    weights, labels = jnp.ones((2, 3)), jax.nn.one_hot(jnp.array([0, 1, 2, 0]), 3)
    with patch.object(_output_hessian, "_MOST", 2):
        fails(ggn_diagonal(model, by_norm), weights, X, labels)
        found = ggn_diagonal(model, by_log_softmax)(weights, X, labels)
    equal(found, jnp.einsum("bi,o->io", X**2, jnp.full(3, 2 / 9)) / 4)
    with patch.object(_output_hessian, "_MOST", 3):
        equal(ggn_diagonal(model, by_norm)(weights, X, labels), found)


@remedy("{}: pass the parameters, a batch x and labels y, and possibly a key; {} arguments came.")
def arguments_of_curvature(fails: Fails) -> None:
    for transform in (kfac, ekfac, ggn_diagonal):
        fails(transform(model, loss), W, X)
        fails(transform(model, loss), W, X, Y, KEY, KEY)
    ggn_diagonal(model, loss)(W, X, Y)
    kfac(model, loss)(W, X, Y, KEY)
    ekfac(model, loss)(W, X, Y, key=KEY)


@remedy("{}: `{}` is {}; pass its real and imaginary parts.")
def complex_parameters(fails: Fails) -> None:
    of_complex = lambda w, x: jnp.abs(x @ w)
    fails(ggn_diagonal(of_complex, loss), W + 1j, X, Y)
    of_parts = lambda parts, x: of_complex(parts["re"] + 1j * parts["im"], x)
    diagonal = ggn_diagonal(of_parts, loss)({"re": W, "im": W}, X, Y)
    assert diagonal["re"].shape == W.shape


@remedy("{}: loss must return the mean over the examples, a real scalar, but for one example it returned {}.")
def loss_of_curvature(fails: Fails) -> None:
    each = lambda out, y: 0.5 * jnp.sum((out - y) ** 2, -1)
    for transform in (kfac, ggn_diagonal):
        fails(transform(model, each), W, X, Y, KEY if transform is kfac else None)
    equal(ggn_diagonal(model, lambda out, y: each(out, y).mean())(W, X, Y)[:, 0], (X**2).mean(0))


@remedy("{}: other has no keyword arguments; pass the batch by position.")
def gram_of_keywords(fails: Fails) -> None:
    total = lambda w, x, scale: jnp.sum(scale[:, None] * x @ w)
    scale = jnp.arange(1.0, 5.0)
    fails(per_sample_gram(total), W, X, scale=scale, other=(X[:2],))
    found = per_sample_gram(total, batch_argnums=(1, 2))(W, X, scale, other=(X[:2], scale[:2]))
    gradients = scale[:, None] * X
    equal(found, gradients @ gradients[:2].T)


@remedy("{}: trace=True sums over all outputs; leave diagonal_axes={} out.")
def trace_and_diagonal(fails: Fails) -> None:
    fails(lambda: empirical_ntk(model, trace=True, diagonal_axes=0))
    equal(empirical_ntk(model, trace=True)(W, X), X @ X.T)
    equal(empirical_ntk(model, diagonal_axes=0)(W, X)[..., 0], X @ X.T)


@remedy("{}: pass {}; {} arguments came.")
def arguments_of_kernels(fails: Fails) -> None:
    fails(empirical_ntk(model), W)
    fails(empirical_ntk(model), W, X, X, X)
    equal(empirical_ntk(model, trace=True)(W, X, X[:3]), X @ X[:3].T)


@remedy(
    "{}: pass the parameters, a batch x and a vector v; {} arguments came.",
    "{}: fun must return a real floating-point array of outputs, but it returned {}.",
)
def products_with_kernels(fails: Fails) -> None:
    v = jnp.ones((4, 1))
    fails(ntk_vp(model), W, X)
    fails(ntk_vp(lambda w, x: {"out": x @ w}), W, X, v)
    fails(ntk_vp(lambda w, x: x @ w * 1j), W, X, v)
    equal(ntk_vp(model)(W, X, v), X @ X.T @ v)


@remedy("{}: pass the parameters, a tangent and a batch; {} arguments came.")
def products_with_tangents(fails: Fails) -> None:
    total = lambda w, x: jnp.sum(x @ w)
    fails(per_sample_jvp(total), W)
    equal(per_sample_jvp(total)(W, W, X), X.sum(1))


@remedy("pass a larger one, or parameters and data in float64 (with jax.enable_x64(True))")
def directions_without_curvature(fails: Fails) -> None:
    x, w = np.repeat(np.float32(X[:, :1]), 2, axis=1), np.float32(W)
    of = lambda x, w, prior: laplace(
        model, loss, w, (x, np.asarray(Y, x.dtype)), structure="full", prior_precision=prior
    )
    fails(of, x, w, 1e-7)
    assert of(x, w, 1.0).prior_precision == 1
    with jax.enable_x64(True):
        assert of(np.float64(x), np.float64(w), 1e-7).curvature.eigenvalues().dtype == jnp.float64


@remedy('{}: {}; pass reduction="{}", or return the {}.')
def reduction_of_a_loss(fails: Fails) -> None:
    total = lambda out, y: 0.5 * jnp.sum((out - y) ** 2)
    expected = ggn_diagonal(model, loss)(W, X, Y)
    fails(ggn_diagonal(model, total), W, X, Y)
    of_sum = ggn_diagonal(model, total, reduction="sum")
    np.testing.assert_allclose(of_sum(W, X, Y) / len(X), expected, rtol=1e-5)
    fails(ggn_diagonal(model, loss, reduction="sum"), W, X, Y)
