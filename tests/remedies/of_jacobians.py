"""Remedies of Jacobians: sparse patterns, Jacobians of batches, modes, complex outputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from plurax.transforms import batch_jacobian, hessian, jacfwd, jacobian, jacrev

from ._registry import Fails, remedy

X = jnp.array([1.0, 2.0, 3.0])
DIAGONAL = np.eye(3, dtype=bool)
BATCH = jnp.arange(6.0).reshape(2, 3)


def equal(found: jax.Array, expected: jax.Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@remedy(
    "{}: the pattern cannot be found, so all entries are computed and kept: {}. Pass the pattern as sparsity=, or "
    "leave sparsity out for a dense array."
)
def pattern_of_branches(fails: Fails) -> None:
    branched = lambda x: x**2 if x[0] > 0 else x
    fails(jacobian(branched, sparsity="auto"), X)
    found = jacobian(branched, sparsity=DIAGONAL)(X)
    assert found.nse == 3
    equal(found.todense(), jnp.diag(2 * X))
    equal(jacobian(branched)(X), jnp.diag(2 * X))


@remedy(
    "{}: the sparsity pattern may have superfluous entries: the results of {} are assumed to depend on all operands. "
    "Pass the pattern as sparsity=, or leave sparsity out for a dense array."
)
def pattern_without_a_rule(fails: Fails) -> None:
    @jax.custom_jvp
    def square(x: jax.Array) -> jax.Array:
        return x**2

    @square.defjvp
    def by_numpy(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        (x,), (t,) = primals, tangents
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        slope = jax.pure_callback(lambda x, t: 2 * x * t, shape, x, t, vmap_method="broadcast_all")
        return x**2, slope

    fails(jacobian(square, mode="forward", sparsity="auto"), X)
    found = jacobian(square, mode="forward", sparsity=DIAGONAL, check=True)(X)
    assert found.nse == 3
    equal(found.todense(), jnp.diag(2 * X))
    equal(jacobian(square, mode="forward")(X), jnp.diag(2 * X))


@remedy("{}: the sparsity pattern is traced; create it outside jit, or with NumPy.")
def traced_pattern(fails: Fails) -> None:
    fails(jax.jit(lambda x: jacobian(jnp.square, sparsity=jnp.eye(3, dtype=bool) & (x == x))(x)), X)
    inside = jnp.eye(3, dtype=bool)
    equal(jax.jit(lambda x: jacobian(jnp.square, sparsity=inside)(x).todense())(X), jnp.diag(2 * X))
    with_numpy = lambda x: jacobian(jnp.square, sparsity=np.eye(3, dtype=bool))(x).todense()
    equal(jax.jit(with_numpy)(X), jnp.diag(2 * X))
    # Functions of JAX return traced arrays inside `jit`, also without traced arguments.
    fails(jax.jit(lambda x: jacobian(jnp.square, sparsity=jnp.eye(3, dtype=bool))(x)), X)


@remedy("{}: check=True compares a sparse result with a product; pass sparsity too.")
def check_without_sparsity(fails: Fails) -> None:
    for transform in (jacobian, hessian):
        fails(lambda transform=transform: transform(jnp.square, check=True))
    equal(jacobian(jnp.square, sparsity="auto", check=True)(X).todense(), jnp.diag(2 * X))


@remedy("{}: the sparsity pattern has batch or dense axes; pass one with sparse axes only.")
def pattern_with_dense_axes(fails: Fails) -> None:
    for kind in ({"n_dense": 1}, {"n_batch": 1}):
        fails(lambda kind=kind: jacobian(jnp.square, sparsity=BCOO.fromdense(DIAGONAL, **kind)))
    equal(jacobian(jnp.square, sparsity=BCOO.fromdense(DIAGONAL))(X).todense(), jnp.diag(2 * X))


@remedy("{}: {}; add every entry that can differ from zero, or leave sparsity out.")
def pattern_without_an_entry(fails: Fails) -> None:
    fun = lambda x: x * x[::-1]
    full = jax.jacobian(fun)(X)
    for mode in ("forward", "reverse"):
        fails(jacobian(fun, mode=mode, sparsity=DIAGONAL, check=True), X)
        complete = jacobian(fun, mode=mode, sparsity=DIAGONAL | DIAGONAL[::-1], check=True)
        equal(complete(X).todense(), full)
    equal(jacobian(fun)(X), full)


@remedy('use rows="vmap" to call fun on each sample alone, or jacobian for the whole matrix')
def dependent_samples(fails: Fails) -> None:
    centered = lambda x: x - x.mean(axis=0)
    fails(batch_jacobian(centered, rows="independent", check=True), BATCH)
    equal(batch_jacobian(centered, rows="vmap")(BATCH), jnp.zeros((2, 3, 3)))
    equal(jacobian(centered)(BATCH), jax.jacobian(centered)(BATCH))


@remedy("batch_jacobian: {}, but axis 0 must be the {} samples; do not reduce them.")
def reduced_samples(fails: Fails) -> None:
    for rows in ("vmap", "independent"):
        fails(batch_jacobian(lambda x: x.sum(axis=0), rows=rows), BATCH)
        fails(batch_jacobian(lambda x: (x**2).sum(), rows=rows), BATCH)
        equal(batch_jacobian(lambda x: (x**2).sum(axis=1), rows=rows)(BATCH), 2 * BATCH)


@remedy('batch_jacobian: all samples share `{}`; use rows="vmap".')
def shared_by_samples(fails: Fails) -> None:
    scaled = lambda x, scale: x * scale
    options = {"argnums": 1, "in_axes": (0, None)}
    fails(batch_jacobian(scaled, **options, rows="independent"), BATCH, X)
    equal(batch_jacobian(scaled, **options, rows="vmap")(BATCH, X), jax.vmap(jnp.diag)(BATCH))


@remedy(
    'use forward mode (jacfwd, mode="forward" or "fwd_fwd") if the arguments are real',
    "reverse mode needs real outputs; {}, return its real and imaginary parts",
    "{}, or pass holomorphic=True if fun is holomorphic",
)
def complex_outputs_in_reverse(fails: Fails) -> None:
    turned = lambda x: 1j * x**2
    parts = lambda x: (turned(x).real, turned(x).imag)
    transform: Any
    for transform in (jacrev, partial(jacobian, mode="reverse")):
        fails(transform(turned), X)
        equal(transform(parts)(X)[1], jnp.diag(2 * X))
        equal(transform(turned, holomorphic=True)(X + 0j), jnp.diag(2j * X))
    for transform in (jacfwd, partial(jacobian, mode="forward")):
        equal(transform(turned)(X), jnp.diag(2j * X))
    cube = lambda x: 1j * (x**3).sum()
    for mode in ("auto", "fwd_rev", "rev_rev"):
        fails(hessian(cube, mode=mode), X)
    equal(hessian(cube, mode="fwd_fwd")(X), jnp.diag(6j * X))
    equal(hessian(lambda x: cube(x).imag)(X), jnp.diag(6 * X))
    equal(hessian(cube, holomorphic=True)(X + 0j), jnp.diag(6j * X))
    for rows in ("vmap", "independent"):
        fails(batch_jacobian(turned, mode="reverse", rows=rows), BATCH)
        equal(batch_jacobian(turned, mode="forward", rows=rows)(BATCH), 2j * jax.vmap(jnp.diag)(BATCH))
    sparse: Any = partial(jacobian, turned, sparsity=DIAGONAL)
    fails(sparse(mode="reverse"), X)
    equal(sparse(mode="forward")(X).todense(), jnp.diag(2j * X))


@remedy("{}: sparsity is for real arguments; leave out holomorphic and allow_int, or sparsity.")
def sparse_and_complex(fails: Fails) -> None:
    fails(lambda: jacobian(jnp.square, sparsity=DIAGONAL, holomorphic=True))
    fails(lambda: jacobian(jnp.square, sparsity=DIAGONAL, allow_int=True))
    equal(jacobian(jnp.square, sparsity=DIAGONAL)(X).todense(), jnp.diag(2 * X))
    equal(jacobian(jnp.square, holomorphic=True)(X + 0j), jnp.diag(2 * X))


@remedy('{}: allow_int=True needs reverse mode; pass mode="reverse" or "auto".')
def integers_in_forward_mode(fails: Fails) -> None:
    scaled = lambda x, n: x * n
    fails(lambda: jacobian(scaled, (0, 1), mode="forward", allow_int=True))
    for mode in ("reverse", "auto"):
        equal(jacobian(scaled, (0, 1), mode=mode, allow_int=True)(X, 2)[0], 2 * jnp.eye(3))
