"""Laplacians of functions that treat the positions of an axis separately, for a while."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plurax.transforms import laplacian
from plurax.transforms._core.jaxpr import aval, with_inner
from plurax.transforms._curvature.directions import Slopes, of_coordinates

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 3))  # four particles
W, V, U = (RNG.normal(size=shape) / 2 for shape in ((3, 5), (5, 4), (4, 3, 5)))
MIX, WIDE = RNG.normal(size=(4, 6)), RNG.normal(size=(12, 7)) / 2

# Functions of the positions (4, 3) of particles.
FUNCTIONS: dict[str, Any] = {
    "one layer each": lambda x: jnp.tanh(x @ W) @ V,
    "its transpose": lambda x: W.T @ jnp.tanh(x.T),
    "of a flat array": lambda x: jnp.tanh(x.reshape(12).reshape(4, 3) @ W),
    "regrouped": lambda x: jnp.sin(x.reshape(2, 6) @ np.concatenate([W, W])) ** 2,
    "regrouped after a layer": lambda x: jnp.tanh(jnp.sin(x.reshape(12)).reshape(3, 4) @ V.T),
    "ungrouped": lambda x: jnp.tanh(x @ W).reshape(20) ** 2,
    "split heads": lambda x: jnp.tanh(x @ np.ones((3, 6))).reshape(4, 2, 3) ** 2,
    "own weights": lambda x: jnp.einsum("ij,ijk->ik", x, U) ** 3,
    "own weights, in front": lambda x: jnp.einsum("ijk,ij->ki", U, jnp.sin(x)) ** 3,
    "both move": lambda x: jnp.einsum("ij,ik->ijk", x, jnp.sin(x)).sum(1) ** 2,
    "all pairs": lambda x: jnp.sin(x @ x.T),
    "sums over particles": lambda x: jnp.tanh(x @ W).sum(0) ** 2,
    "mixed by a product": lambda x: jnp.tanh(MIX.T @ jnp.sin(x)) ** 2,
    "mixed from the right": lambda x: jnp.tanh(jnp.sin(x).T @ MIX) ** 2,
    "mixed with a stack": lambda x: jnp.tanh(jnp.einsum("ij,ikj->jk", x**2, U.transpose(0, 2, 1))) ** 2,
    "a dense first layer": lambda x: jnp.tanh(x.ravel() @ WIDE) ** 2,
    "a dense second layer": lambda x: jnp.tanh(jnp.sin(x.ravel()) @ WIDE) ** 2,
    "distances": lambda x: jnp.sqrt(((x[:, None] - x[None]) ** 2).sum(-1) + 1),
    "sums over coordinates": lambda x: jnp.exp((x**2).sum(-1) / 9) * jnp.arange(1.0, 5),
    "broadcast": lambda x: jnp.sin(x[:, None, :, None] * jnp.ones((2, 1, 2))) ** 2,
    "added to a mean": lambda x: jnp.tanh(x @ W + x.mean(0) @ W) ** 2,
    "product of both": lambda x: jnp.sin(x) * x.sum(0),
    "custom rules": lambda x: jax.nn.silu(jax.nn.relu(x @ W) + jax.nn.gelu(x @ W)),
    "softmax": lambda x: jax.nn.softmax(x @ W, axis=-1) * jax.nn.softmax(x @ W, axis=0),
    "rows of a determinant": lambda x: jnp.linalg.slogdet(jnp.tanh(x @ W[:, :4]) + 2 * jnp.eye(4))[1],
    "columns of a determinant": lambda x: jnp.linalg.slogdet(W[:, :4].T @ jnp.tanh(x).T + 2 * jnp.eye(4))[1] ** 2,
    "determinants": lambda x: jnp.linalg.slogdet(jnp.sin(x[..., None] * W[:, :3]) + 2 * jnp.eye(3))[1],
    "several determinants of rows": lambda x: (
        jnp.linalg.slogdet(jnp.einsum("id,kdj->kij", jnp.tanh(x), np.stack([W[:, :4]] * 2)) + 2 * jnp.eye(4))[1] ** 2
    ),
    "sorted": lambda x: jnp.sort(x @ W, axis=0) ** 2 * jnp.arange(1.0, 5)[:, None],
    "shifted": lambda x: x[1:] * x[:-1] * jnp.roll(x, 1, 0)[1:],
    "concatenated": lambda x: jnp.concatenate([x @ W, jnp.sin(x)], axis=1) ** 2,
    "loop": lambda x: jax.lax.scan(lambda c, row: (jnp.sin(c + row), c * row), x[0], x)[1],
}


def total(name: str) -> Any:
    """Return the scalar function of the flat coordinates, with different weights for all its numbers."""

    def fun(x: Any) -> Any:
        found = FUNCTIONS[name](x)
        return jnp.sum(found * jnp.cos(jnp.arange(found.size)).reshape(found.shape))

    return fun


@pytest.mark.parametrize("name", FUNCTIONS)
def test_equal_to_the_trace_of_the_hessian(name: str) -> None:
    fun = total(name)
    with jax.enable_x64(True):
        plain = lambda x: jnp.trace(jax.jacfwd(jax.jacfwd(lambda x: fun(x.reshape(4, 3))))(x.ravel()))
        both = jax.jit(lambda x: (laplacian(fun)(x), laplacian(lambda x: fun(x.reshape(4, 3)))(x.ravel()), plain(x)))
        found, flat, expected = both(X)
    np.testing.assert_allclose(found, expected, 1e-9, 1e-9)
    np.testing.assert_allclose(flat, expected, 1e-9, 1e-9)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 3), (4, 3), (4, 1, 2), (0,), (0, 2)])
def test_directions_of_coordinates(shape: tuple[int, ...]) -> None:
    leaf = jnp.zeros(shape)
    found = of_coordinates(leaf).expanded().array
    np.testing.assert_array_equal(found, np.eye(leaf.size).reshape(leaf.size, *shape))


def test_positions_in_groups() -> None:
    found = of_coordinates(jnp.zeros((6, 2))).grouped(3)
    assert found.array.shape == (4, 6, 2)
    regrouped = Slopes(found.array.reshape(4, 3, 4), 0)
    np.testing.assert_array_equal(regrouped.expanded().array.reshape(12, 12), np.eye(12))


def products(fun: Any, x: Any) -> float:
    """Return the operations of all products of the Laplacian of `fun`."""
    found, seen = 0.0, set()
    for eqn in with_inner(jax.make_jaxpr(laplacian(fun))(x).eqns):
        one = (*map(id, eqn.invars), str(eqn.params))
        if eqn.primitive.name == "dot_general" and one not in seen:  # the compiler computes equal products once
            seen.add(one)
            contracted = eqn.params["dimension_numbers"][0][0]
            summed = np.prod([aval(eqn.invars[0]).shape[i] for i in contracted])
            found += float(np.prod(aval(eqn.outvars[0]).shape) * summed)
    return found


def test_directions_of_all_particles_share_products() -> None:
    """A layer for each particle costs the products of 3 directions, and not of 12."""
    one = products(lambda x: jnp.sum(jnp.tanh(jnp.tanh(x @ W) @ V)), X.astype(np.float32))
    layer = 4 * 3 * 5 + 4 * 5 * 4
    assert one <= (2 + 3 + 1) * layer  # the values (JAX traces some twice), three directions, the Laplacian


def test_a_first_layer_costs_no_sum_for_its_directions() -> None:
    x = X.ravel().astype(np.float32)
    assert products(lambda x: jnp.sum(jnp.tanh(x @ WIDE)), x) == (1 + 1 + 1) * 12 * 7
