"""Sums of neighbouring batches are never further apart than `.sensitivity()` says."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import NeighboringRelation

from plurax.transforms import clipped_grad

DRAWS, BATCH, SAME = 400, 3, 1 + 1e-5
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(4, 5)), "b": RNG.normal(size=5), "v": RNG.normal(size=(5, 2))}
PARAMS = jax.tree.map(np.float32, PARAMS)


def loss(params: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]) * jnp.sum(x) + jnp.sum(params["w"] ** 2) / 9


def draws(generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Examples whose gradients are tiny, huge, infinite, or no numbers."""
    x = generator.normal(size=(DRAWS, *shape, 4)) * 10 ** generator.uniform(-8, 25, (DRAWS, *shape, 1))
    kind = generator.integers(0, 20, (DRAWS, *shape))
    return np.where((kind == 0)[..., None], np.nan, np.where((kind == 1)[..., None], np.inf, x)).astype(np.float32)


def distance(a: Any, b: Any) -> np.ndarray:
    """For each draw, in float64."""
    leaves = [np.float64(x) - np.float64(y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)]
    return np.sqrt(sum(np.square(leaf).reshape(DRAWS, -1).sum(1) for leaf in leaves))


@pytest.mark.parametrize("method", ["auto", "vmap", "ghost", "book_keeping"])
@pytest.mark.parametrize(
    "options",
    [
        {"l2_clip_norm": 0.7},
        {"l2_clip_norm": 30.0, "normalize_by": 4.0},
        {"l2_clip_norm": 1e-3, "rescale_to_unit_norm": True},
        {"l2_clip_norm": 0.0},
    ],
    ids=str,
)
def test_neighbours_are_never_further_apart(method: str, options: Any) -> None:
    generator = np.random.default_rng(len(method))
    summed = clipped_grad(loss, method=method, **options)
    of_draws = jax.jit(jax.vmap(lambda x, padding: summed(PARAMS, x, is_padding_example=padding)))
    x, other = draws(generator, BATCH), draws(generator)
    nothing, first = np.zeros((DRAWS, BATCH), bool), np.broadcast_to(np.arange(BATCH) == 0, (DRAWS, BATCH))
    found = of_draws(x, nothing)
    replaced = x.copy()
    replaced[:, 0] = other
    neighbours = {
        NeighboringRelation.ADD_OR_REMOVE_ONE: of_draws(x[:, 1:], nothing[:, 1:]),
        NeighboringRelation.REPLACE_SPECIAL: of_draws(x, first),
        NeighboringRelation.REPLACE_ONE: of_draws(replaced, nothing),
    }
    for relation, neighbour in neighbours.items():
        apart, bound = distance(found, neighbour), summed.sensitivity(relation)
        assert np.isfinite(apart).all()
        assert (apart <= SAME * bound).all()
        # There are neighbours as far apart as that, so a smaller bound would be none.
        assert apart.max() >= 0.9 * bound


@pytest.mark.parametrize("method", ["vmap", "ghost", "book_keeping"])
def test_groups_of_samples_are_neighbours_too(method: str) -> None:
    summed = clipped_grad(loss, l2_clip_norm=0.7, keep_batch_dim=False, method=method)
    of_draws = jax.jit(jax.vmap(partial(summed, PARAMS)))
    x = draws(RNG, 2, 3)  # two users of three samples each
    apart = distance(of_draws(x), of_draws(x[:, 1:]))
    assert (apart <= SAME * summed.sensitivity(NeighboringRelation.ADD_OR_REMOVE_ONE)).all()
    assert apart.max() >= 0.69
