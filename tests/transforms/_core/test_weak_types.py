"""Weak types: each transform returns the dtypes and weak types of its counterpart in JAX, in chunks too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from plurax.transforms import (
    Dual,
    batch_jacobian,
    derivative,
    dual,
    gnvp,
    grad,
    hessian,
    hessian_diagonal,
    hessian_trace,
    hvp,
    jacfwd,
    jacobian,
    jacrev,
    jvp,
    laplacian,
    linearize,
    per_sample_grad,
    value_and_grad,
    value_grad_and_hvp,
    vhp,
    vjp,
    vmap,
)
from plurax.transforms._core.weak_types import weak_like
from plurax.transforms.program import accumulate, scan_layers, stack_layers


def weak() -> jax.Array:
    """Return a weakly typed array, as Python scalars give."""
    return lax.full((5,), 2.0)


def mixed(x: Any) -> Any:
    return {"weak": x**2, "array": jnp.sin(x) * jnp.ones(2), "strong": jnp.float32(3) * x}


def cube(x: Any) -> Any:
    return x**3 * 2.0


def product_of(w: Any, x: Any) -> Any:
    return jnp.sum(w * x)


def kinds(tree: Any) -> Any:
    return [(leaf.dtype, leaf.shape, leaf.weak_type) for leaf in map(jax.typeof, jax.tree.leaves(tree))]


def every(x: Any) -> Any:
    return x * 2.0, 1.0, 3, 1j * x, x > 0, jnp.float32(2) * x


class Doubles(nnx.Module):
    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones(2))

    def __call__(self, x: Any) -> Any:
        return x * 2.0, x


def hvp_of_jax(fun: Any, x: Any, v: Any) -> Any:
    return jax.jvp(jax.grad(fun), (x,), (v,))[1]


CASES = {
    "vmap": (lambda: vmap(every)(weak()), lambda: jax.vmap(every)(weak())),
    "vmap in chunks": (lambda: vmap(every, chunk_size=2)(weak()), lambda: jax.vmap(every)(weak())),
    "vmap in chunks along the last axis": (
        lambda: vmap(lambda x: x * lax.full((3,), 1.0), out_axes=-1, chunk_size=2)(weak()),
        lambda: jax.vmap(lambda x: x * lax.full((3,), 1.0), out_axes=-1)(weak()),
    ),
    "vmap of shared": (
        lambda: vmap(every, in_axes=None, axis_size=5, chunk_size=3)(2.0),
        lambda: jax.vmap(every, in_axes=None, axis_size=5)(2.0),
    ),
    "jvp": (lambda: jvp(mixed, (2.0,), (1,)), lambda: jax.jvp(mixed, (2.0,), (1.0,))),
    "jvp of strong": (
        lambda: jvp(cube, (np.float32(2),), (1,)),
        lambda: jax.jvp(cube, (np.float32(2),), (np.float32(1),)),
    ),
    "linearize": (lambda: linearize(mixed, 2.0)[1](1), lambda: jax.linearize(mixed, 2.0)[1](1.0)),
    "vjp": (lambda: vjp(cube, 2.0)[1](1), lambda: jax.vjp(cube, 2.0)[1](1.0)),
    "grad": (lambda: grad(cube)(2.0), lambda: jax.grad(cube)(2.0)),
    "grad, seeded": (lambda: grad(cube, cotangent=1.0)(weak()), lambda: jax.vjp(cube, weak())[1](weak())),
    "value_and_grad": (lambda: value_and_grad(cube)(2.0), lambda: jax.value_and_grad(cube)(2.0)),
    "hvp": (lambda: hvp(cube, 2.0, 1.0), lambda: hvp_of_jax(cube, 2.0, 1.0)),
    "hvp, rev_fwd": (lambda: hvp(cube, 2.0, 1.0, mode="rev_fwd"), lambda: hvp_of_jax(cube, 2.0, 1.0)),
    "vhp": (lambda: vhp(cube, 2.0, 1.0), lambda: hvp_of_jax(cube, 2.0, 1.0)),
    "value_grad_and_hvp": (
        lambda: value_grad_and_hvp(cube, 2.0, 1.0),
        lambda: (*jax.value_and_grad(cube)(2.0), hvp_of_jax(cube, 2.0, 1.0)),
    ),
    "gnvp": (lambda: gnvp(jnp.sin, cube, 2.0, 1.0), lambda: hvp_of_jax(cube, 2.0, 1.0)),
    "hessian_diagonal": (lambda: hessian_diagonal(cube)(2.0), lambda: jax.hessian(cube)(2.0)),
    "hessian_trace": (lambda: hessian_trace(cube)(2.0), lambda: jax.hessian(cube)(2.0)),
    "laplacian": (lambda: laplacian(cube, chunk_size=1)(2.0), lambda: jax.hessian(cube)(2.0)),
    "derivative": (lambda: derivative(cube, 2)(2.0), lambda: jax.hessian(cube)(2.0)),
    "derivative, nested": (lambda: derivative(jnp.tanh, 2)(2.0), lambda: jax.hessian(jnp.tanh)(2.0)),
    "dual": (
        lambda: dual(mixed)(Dual(2.0, 1.0)),
        lambda: jax.tree.map(lambda *pair: pair, *jax.jvp(mixed, (2.0,), (1.0,))),
    ),
    "accumulate": (
        lambda: accumulate(jax.value_and_grad(product_of), 2)(2.0, jnp.ones(4)),
        lambda: jax.value_and_grad(product_of)(2.0, jnp.ones(4)),
    ),
    "scan_layers": (
        lambda: scan_layers(stack_layers([Doubles(), Doubles()]), 2.0),
        lambda: lax.scan(lambda x, _: (x * 2.0, x), 2.0, length=2),
    ),
}
for chunk_size in (None, 1, 2):
    options: Any = {"chunk_size": chunk_size}
    for ours, kind, plain in (
        (jacfwd, {}, jax.jacfwd),
        (jacrev, {}, jax.jacrev),
        (jacobian, {"mode": "forward"}, jax.jacfwd),
        (jacobian, {"mode": "reverse"}, jax.jacrev),
    ):
        CASES[f"{ours.__name__}, {options | kind}"] = (
            lambda ours=ours, how=options | kind: ours(mixed, **how)(2.0),
            lambda plain=plain: plain(mixed)(2.0),
        )
    for mode, outer, inner in (("fwd_rev", jax.jacfwd, jax.jacrev), ("rev_fwd", jax.jacrev, jax.jacfwd)):
        CASES[f"hessian, {mode}, {options}"] = (
            lambda mode=mode, options=options: hessian(mixed, mode=mode, **options)(2.0),
            lambda outer=outer, inner=inner: outer(inner(mixed))(2.0),
        )
    for rows in ("vmap", "independent"):
        for mode in ("forward", "reverse"):
            CASES[f"batch_jacobian, {rows}, {mode}, {options}"] = (
                lambda rows=rows, mode=mode, options=options: batch_jacobian(cube, rows=rows, mode=mode, **options)(
                    weak()
                ),
                lambda: jax.vmap(jax.jacrev(cube))(weak()),
            )
    CASES[f"per_sample_grad, {options}"] = (
        lambda options=options: per_sample_grad(product_of, **options)(2.0, jnp.ones((5, 1))),
        lambda: jax.vmap(jax.grad(product_of), (None, 0))(2.0, jnp.ones((5, 1))),
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("wide", [False, True])
def test_dtypes_and_weak_types_are_those_of_jax(case: str, wide: bool) -> None:
    ours, plain = CASES[case]
    with jax.enable_x64(wide):
        assert kinds(ours()) == kinds(plain())


def test_only_arrays_of_one_dtype_become_weak() -> None:
    x = jnp.ones((2, 3))
    assert weak_like(x, 2.0).weak_type
    assert (weak_like(x, 2.0) == x).all()
    for like in (2, 2j, np.float32(2), np.float64(2), jnp.float16(2), x):
        assert not weak_like(x, like).weak_type
    assert not weak_like(x, 2.0, x).weak_type
    assert weak_like(x[:0], 2.0).shape == (0, 3)
