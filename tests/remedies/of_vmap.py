"""Remedies of `vmap`."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from plurax.ensemble import Ensemble
from plurax.transforms import vmap

from ._registry import Fails, remedy

ENSEMBLE = Ensemble.create(lambda rngs: nnx.Linear(3, 2, rngs=rngs), 4, seed=0)
X = jnp.arange(6.0).reshape(2, 3)


@remedy("{}: with {}, a collective over axis_name would see only one chunk; leave one out.")
def axis_name_with_chunks(fails: Fails) -> None:
    fails(lambda: vmap(jnp.sin, axis_name="i", chunk_size=2))
    vmap(jnp.sin, axis_name="i")(X)
    vmap(jnp.sin, chunk_size=2)(X)


@remedy("{}: axis_size={}, but the ensemble has {} members; leave it out.")
def size_of_an_ensemble(fails: Fails) -> None:
    fails(lambda: vmap(ENSEMBLE, in_axes=None, axis_size=3))
    assert vmap(ENSEMBLE, in_axes=None)(X).shape == (4, 2, 2)


@remedy(
    "whose members are along axis 0; pass 0 to map over them, or None to pass the whole ensemble",
)
def axis_of_an_ensemble(fails: Fails) -> None:
    outputs = lambda ensemble: ensemble(X)
    fails(vmap(outputs, in_axes=1), ENSEMBLE)
    assert vmap(outputs)(ENSEMBLE).shape == (4, 2, 2)
    both = vmap(lambda ensemble, x: ensemble(x), in_axes=(None, 0))
    assert both(ENSEMBLE, X).shape == (2, 4, 2)
