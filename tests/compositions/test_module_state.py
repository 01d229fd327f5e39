"""Stacked layers act as their layers do one by one: frozen, in half precision, reinitialized, loaded from files."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.transforms import grad
from plurax.transforms.modules import (
    Frozen,
    freeze,
    load_params,
    named_parameters,
    reinitialize,
    save_params,
    unfreeze,
    with_precision,
)
from plurax.transforms.program import scan_layers, stack_layers

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


class Block(nnx.Module):
    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.norm, self.inner = nnx.LayerNorm(4, rngs=rngs), nnx.Linear(4, 6, rngs=rngs)
        self.outer = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.outer(jnp.tanh(self.inner(self.norm(x))))


class Scanned(nnx.Module):
    def __init__(self, blocks: list[Any]) -> None:
        self.stack = stack_layers(blocks)

    def __call__(self, x: Any) -> Any:
        return scan_layers(self.stack, x)[0]


def looped(blocks: list[Any], x: Any) -> Any:
    for block in blocks:
        x = block(x)
    return x


def blocks() -> list[Any]:
    return [Block(i) for i in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("change", [lambda m: freeze(m, nnx.LayerNorm), lambda m: freeze(m, nnx.PathContains("inner"))])
def test_gradients_of_a_frozen_stack_are_those_of_frozen_layers(change: Any) -> None:
    frozen = change(Scanned(blocks()))
    gradient = grad(lambda model: (model(X) ** 2).sum())(frozen)
    apart = nnx.List([change(block) for block in blocks()])
    expected = grad(lambda model: (looped(list(model), X) ** 2).sum())(apart)
    by_layer: Any = nnx.to_pure_dict(expected)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *[by_layer[i] for i in range(3)])
    found = nnx.to_pure_dict(gradient)["stack"]["layer"]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5), found, stacked)
    assert jax.tree.leaves(nnx.state(frozen, Frozen))
    assert nnx.graphdef(unfreeze(frozen)) == nnx.graphdef(Scanned(blocks()))


@pytest.mark.slow
def test_a_stack_computes_in_half_precision_as_its_layers() -> None:
    mixed = with_precision(stack_layers(blocks()), jnp.bfloat16)
    found, _ = scan_layers(mixed, jnp.asarray(X, jnp.bfloat16))
    expected = looped([with_precision(block, jnp.bfloat16) for block in blocks()], jnp.asarray(X, jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(float), expected.astype(float), rtol=0.02, atol=0.02)
    assert mixed.layer.inner.kernel.dtype == jnp.float32


def test_layers_of_a_stack_are_initialized_one_by_one(tmp_path: Path) -> None:
    calls: list[Any] = []

    def recording(key: Any, shape: Any, dtype: Any) -> Any:
        calls.append(shape)
        return jax.random.normal(key, shape, dtype)

    model = reinitialize(Scanned(blocks()), {nnx.Linear: recording}, jax.random.key(0))
    assert sorted(calls) == [(4, 6)] * 3 + [(6, 4)] * 3
    kernels = np.stack([block.inner.kernel[...] for block in model.stack.unstack()])
    assert len(np.unique(kernels)) == kernels.size
    save_params(tmp_path / "stack.safetensors", model)
    again = load_params(tmp_path / "stack.safetensors", Scanned(blocks()))
    assert named_parameters(again)["stack.layer.inner.kernel"].shape == (3, 4, 6)
    np.testing.assert_array_equal(again(X), model(X))
