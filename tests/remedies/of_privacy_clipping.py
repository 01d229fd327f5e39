"""Remedies of losses of single examples: `check_loss`, `clipped_fun`, `clipped_grad` and `per_sample_*`."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from plurax.transforms import check_loss, clipped_grad, empirical_ntk, ntk_vp, per_sample_grad, per_sample_norm
from plurax.transforms.privacy import clipped_fun

from ._registry import Fails, remedy

W = jnp.array([1.0, -2.0, 0.5])
X = jnp.sin(jnp.arange(12.0)).reshape(4, 3)
clipped = partial(clipped_grad, l2_clip_norm=1.0)


def squares(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2)


def same(found: Any, expected: Any) -> None:
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), found, expected)


# The gradients of the examples, and their clipped sum, written out.
EACH = 2 * (X @ W)[:, None] * X
SUM = (EACH * jnp.minimum(1, 1 / jnp.linalg.norm(EACH, axis=1, keepdims=True))).sum(0)


@remedy("{}: `{}` is traced; call check_loss outside of jit, grad and vmap.")
def check_of_traced_values(fails: Fails) -> None:
    check = lambda w, x: check_loss(squares, w, x).kind
    for transformed in (jax.jit(check), jax.vmap(check, in_axes=(None, 0)), jax.grad(check)):
        fails(transformed, W, X[None])
    assert check(W, X) == "mean"


@remedy("return the mean over its batch, or pass has_aux=True if it returns (loss, aux)")
def check_of_a_loss_that_is_no_scalar(fails: Fails) -> None:
    fails(check_loss, lambda w, x: (x @ w) ** 2, W, X)
    fails(check_loss, lambda w, x: (squares(w, x), x), W, X)
    assert check_loss(lambda w, x: ((x @ w) ** 2).mean(), W, X).kind == "mean"
    assert check_loss(lambda w, x: (squares(w, x), x), W, X, has_aux=True).kind == "mean"


@remedy("{}: with has_aux, fun must return (value, aux), but it returned {}.")
def aux_of_a_clipped_function(fails: Fails) -> None:
    fails(clipped_fun(jnp.mean, has_aux=True, l2_clip_norm=1.0), X)
    same(clipped_fun(lambda x: (jnp.mean(x), x), has_aux=True, l2_clip_norm=1.0)(X), (X.mean(1).sum(), X))


@remedy("{}: fun must return real floating-point numbers, but `{}` is {}.")
def numbers_of_a_clipped_function(fails: Fails) -> None:
    for wrong in (jnp.argmax, lambda x: jnp.mean(x) * 1j):
        fails(clipped_fun(wrong, l2_clip_norm=9.0), X)
    same(clipped_fun(lambda x: jnp.float32(jnp.argmax(x)), l2_clip_norm=9.0)(X), X.argmax(1).sum())
    same(clipped_fun(lambda x: (jnp.mean(x) * 1j).imag, l2_clip_norm=9.0)(X), X.mean(1).sum())


@remedy("{}: prng_argnum={} is in batch_argnums; pass the position of a key.")
def key_of_a_clipped_function(fails: Fails) -> None:
    noisy = lambda x, key: jnp.mean(x) + jax.random.normal(key)
    key = jax.random.key(0)
    fails(clipped_fun(noisy, l2_clip_norm=9.0, prng_argnum=0), X, key)
    alone = jax.vmap(jax.random.normal)(jax.random.split(key, 4))
    same(clipped_fun(noisy, l2_clip_norm=9.0, prng_argnum=1)(X, key), (X.mean(1) + alone).sum())


@remedy("{}: no method fits into memory_budget={}: the smallest found is {}; raise the budget.")
def budget_too_small(fails: Fails) -> None:
    for method in ("auto", "vmap"):
        fails(clipped(squares, memory_budget=1, method=method), W, X)
        same(clipped(squares, memory_budget="1MiB", method=method)(W, X), SUM)


@remedy("{}: {}; pass more than {}.")
def grid_too_coarse(fails: Fails) -> None:
    with jax.enable_x64(True):
        for count in (4, 8, 9):  # the limits 1, 1.41 and 1.5
            sums = lambda scale, count=count: clipped_fun(lambda x: x, l2_clip_norm=1.0, grid_scale=scale)(
                np.ones((2, count), np.float32)
            )
            most = fails(sums, 1).rpartition("pass more than ")[2].rstrip(".")
            assert sums(int(most) + 1).shape == (1, count)


@remedy("{}: l2_clip_norm is {}, which has no number; pass one, or a tree of them.")
def clip_norms_without_a_number(fails: Fails) -> None:
    empty: Any
    for empty in ({}, (), [None]):
        fails(clipped_grad, squares, l2_clip_norm=empty)
    same(clipped_grad(squares, l2_clip_norm=1.0)(W, X), SUM)
    same(clipped_grad(lambda p, x: squares(p["w"], x), l2_clip_norm={"w": 1.0})({"w": W}, X), {"w": SUM})


@remedy("{}: grid_scale gives sums of integers, without {}; omit either.")
def options_with_a_grid(fails: Fails) -> None:
    options = [{"automatic": 0.1}, {"rescale_to_unit_norm": True}, {"normalize_by": 2.0}, {"dtype": jnp.float32}]
    with jax.enable_x64(True):
        for option in options:
            fails(clipped, squares, grid_scale=1000, **option)
        fails(clipped_grad, squares, grid_scale=1000, l2_clip_norm={"w": 1.0})
        same(clipped(squares, grid_scale=10**6)(W, X) / 1e6, SUM)
    for option in options:
        clipped(squares, **option)(W, X)


@remedy("{}: grid_scale needs 64-bit integers; call it with jax.enable_x64(True).")
def grid_without_wide_integers(fails: Fails) -> None:
    of = clipped(squares, grid_scale=10**6)
    fails(of, W, X)
    with jax.enable_x64(True):
        same(of(W, X) / 1e6, SUM)
        of_x64 = clipped_fun(lambda x: x, l2_clip_norm=1.0, grid_scale=2**31)
    fails(of_x64, X)


@remedy(
    "{}: {}; pass a number for each part of the parameters, or one number.",
    "{}: l2_clip_norm is None for some parameters; pass a number for each part of them.",
)
def clip_norms_that_do_not_fit(fails: Fails) -> None:
    loss = lambda p, x: jnp.mean((x @ p["w"]["kernel"] + p["b"]) ** 2)
    p = {"w": {"kernel": W}, "b": jnp.float32(0.1)}
    for wrong in ({"w": 1.0}, [1.0, 2.0], {"w": {"kernel": 1.0, "other": 1.0}, "b": 1.0}):
        fails(clipped_grad(loss, l2_clip_norm=wrong), p, X)
    fails(clipped_grad(loss, l2_clip_norm={"w": 1.0, "b": None}), p, X)
    alone = jax.vmap(jax.grad(loss), in_axes=(None, 0))(p, X[:, None])
    found = clipped_grad(loss, l2_clip_norm={"w": 9.0, "b": 9.0})(p, X)
    same(found, jax.tree.map(lambda x: x.sum(0), alone))
    assert jax.tree.structure(clipped_grad(loss, l2_clip_norm=1.0)(p, X)) == jax.tree.structure(p)
    # Those of an NNX module.
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    of_model = lambda model, x: jnp.mean(model(x) ** 2)
    fails(clipped_grad(of_model, l2_clip_norm={"weight": 1.0, "bias": 1.0}), model, X)
    clipped_grad(of_model, l2_clip_norm={"kernel": 1.0, "bias": 1.0})(model, X)


@remedy('clipped_grad: {}; omit method, or pass "vmap".')
def method_with_a_transform(fails: Fails) -> None:
    double = {"pre_clipping_transform": lambda gradient: 2 * gradient}
    for method in ("ghost", "book_keeping"):
        fails(clipped, squares, method=method, **double)
        with jax.enable_x64(True):
            fails(clipped, squares, method=method, grid_scale=100)
            clipped(squares, grid_scale=100)(W, X)
    expected = clipped_grad(squares, l2_clip_norm=0.5)(W, X) * 2
    same(clipped(squares, **double)(W, X), expected)
    same(clipped(squares, method="vmap", **double)(W, X), expected)


@remedy("{}: {}; pad the batch, and pass is_padding_example.", "there are {} examples; pass one boolean for each")
def batches_that_do_not_divide(fails: Fails) -> None:
    padded, is_padding = jnp.concatenate([X, jnp.zeros((2, 3))]), jnp.arange(6) >= 4
    fails(clipped(squares, microbatch_size=3), W, X)
    same(clipped(squares, microbatch_size=3)(W, padded, is_padding_example=is_padding), SUM)
    values = partial(clipped_fun, jnp.mean, l2_clip_norm=9.0)
    fails(values(microbatch_size=3), X)
    same(values(microbatch_size=3)(padded, is_padding_example=is_padding), X.mean(1).sum())
    for mask in (is_padding[:3], is_padding.astype(int)[:4], True):
        fails(clipped(squares), W, X, is_padding_example=mask)
    first = per_sample_norm(squares)(W, X)[0]
    same(clipped(squares)(W, X, is_padding_example=np.arange(4) > 0), EACH[0] / jnp.maximum(1, first))


@remedy("sensitivity needs dp-accounting; install it with pip install 'plurax[privacy]'.")
def sensitivity_without_the_extra(fails: Fails) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "dp_accounting", None)
        fails(clipped(squares).sensitivity)
    assert clipped(squares).sensitivity() == 1


@remedy("{}: {}, but {}; let fun close over values that examples share.")
def keywords_without_examples(fails: Fails) -> None:
    scaled = lambda w, x, scale: squares(w, x) * scale
    for shared in (2.0, jnp.ones(3), W):
        fails(per_sample_grad(scaled), W, X, scale=shared)
    same(per_sample_grad(lambda w, x: scaled(w, x, 2.0))(W, X), 2 * EACH)


@remedy("{}: {}, which has parameters or examples; pass the position of a key.")
def key_of_examples(fails: Fails) -> None:
    dropped = lambda w, x, key: squares(w, x * jax.random.bernoulli(key, 0.5, x.shape))
    for position in (0, 1, -2):
        fails(clipped(dropped, prng_argnum=position), W, X, jax.random.key(0))
    assert clipped(dropped, prng_argnum=2)(W, X, jax.random.key(0)).shape == (3,)


@remedy(
    "{}: the loss of one example has {}, which combines devices of the enclosing shard_map; move it out of the loss."
)
def collective_in_a_loss(fails: Fails) -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    examples, shared = PartitionSpec("data"), PartitionSpec()
    sharded = partial(jax.shard_map, mesh=mesh, in_specs=(shared, examples))
    across = lambda w, x: jax.lax.pmean(squares(w, x), "data")
    fails(sharded(clipped(across), out_specs=shared), W, X)
    found = sharded(lambda w, x: jax.lax.psum(clipped(squares)(w, x), "data"), out_specs=shared)(W, X)
    same(found, SUM)


@remedy("return the loss of one example")
def loss_that_is_no_scalar(fails: Fails) -> None:
    for wrong in (lambda w, x: (x @ w) ** 2, lambda w, x: (squares(w, x), x), lambda w, x: squares(w, x) * (1 + 0j)):
        for transform in (per_sample_grad, per_sample_norm, clipped):
            fails(transform(wrong), W, X)
    same(per_sample_grad(lambda w, x: ((x @ w) ** 2).sum())(W, X), EACH)
    same(per_sample_norm(lambda w, x: (squares(w, x), x)[0])(W, X), jnp.linalg.norm(EACH, axis=1))
    same(per_sample_grad(lambda w, x: (squares(w, x), x), has_aux=True)(W, X), (EACH, X))


@remedy(
    "{}: fun must map a batch to outputs along axis 0, but {}.",
    "{}: fun must return a real floating-point array of outputs, but it returned {}.",
)
def outputs_of_a_tangent_kernel(fails: Fails) -> None:
    outputs = lambda w, x: x @ w
    fails(empirical_ntk(lambda w, x: outputs(w, x).sum()), W, X)
    for wrong in (lambda w, x: jnp.int32(outputs(w, x)), lambda w, x: outputs(w, x) * 1j, lambda w, x: [outputs(w, x)]):
        fails(empirical_ntk(wrong), W, X)
        fails(ntk_vp(wrong), W, X, jnp.ones(4))
    same(empirical_ntk(outputs)(W, X), X @ X.T)
    same(ntk_vp(outputs)(W, X, jnp.ones(4)), X @ X.T @ jnp.ones(4))


@remedy("{}: {} must not be negative; pass positions counted from the first argument.")
def positions_from_the_end(fails: Fails) -> None:
    fails(per_sample_grad, squares, argnums=-2)
    fails(per_sample_grad, squares, batch_argnums=-1)
    same(per_sample_grad(squares, argnums=0, batch_argnums=1)(W, X), EACH)


@remedy(
    "{}: argument {} is in argnums and in batch_argnums, but parameters have no axis of examples; "
    "name parameters in argnums, and examples in batch_argnums."
)
def argument_that_is_both(fails: Fails) -> None:
    fails(per_sample_grad, squares, argnums=(0, 1))
    fails(per_sample_grad, lambda x, w: squares(w, x), argnums=1)
    same(per_sample_grad(squares, argnums=(0,))(W, X), (EACH,))
    same(per_sample_grad(lambda x, w: squares(w, x), argnums=1, batch_argnums=0)(X, W), EACH)
