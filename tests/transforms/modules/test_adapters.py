"""`batch_ensemble`, `lora` and `tabm`, against models that are written out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Ensemble, Trainer
from plurax.transforms.modules import Adapter, Base, batch_ensemble, freeze, lora, tabm

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 4)).astype(np.float32)
IMAGES = RNG.normal(size=(2, 6, 5, 3)).astype(np.float32)
SIZE = 3


def mlp(rngs: nnx.Rngs) -> Any:
    return nnx.Sequential(nnx.Linear(4, 7, rngs=rngs), nnx.tanh, nnx.Linear(7, 2, rngs=rngs))


def conv(rngs: nnx.Rngs) -> Any:
    return nnx.Conv(3, 8, (3, 2), strides=(2, 1), padding="VALID", rngs=rngs)


def kernel(layer: Any) -> Any:
    return layer.kernel[...]


def test_scales_are_those_of_the_kernel() -> None:
    """A kernel W ∘ r sᵀ, written out."""
    model = mlp(nnx.Rngs(0))
    scaled = batch_ensemble(model, rngs=nnx.Rngs(1))
    written = nnx.clone(model)
    for i in (0, 2):
        r, s = (x[...] for x in (scaled.layers[i].inputs, scaled.layers[i].outputs))
        assert {*np.abs(r).tolist(), *np.abs(s).tolist()} == {1.0}
        written.layers[i].kernel[...] = kernel(model.layers[i]) * r[:, None] * s
    assert {*np.concatenate([jnp.ravel(x) for x in jax.tree.leaves(nnx.state(scaled, Adapter))])} > {-1.0, 1.0}
    np.testing.assert_allclose(scaled(X), written(X), rtol=1e-5, atol=1e-6)
    layer = conv(nnx.Rngs(0))
    normal = lambda key, shape, dtype: 1 + 0.5 * jax.random.normal(key, shape, dtype)
    of_images = batch_ensemble(layer, rngs=nnx.Rngs(1), init=normal)
    written = nnx.clone(layer)
    written.kernel[...] = kernel(layer) * of_images.inputs[...][:, None] * of_images.outputs[...]
    np.testing.assert_allclose(of_images(IMAGES), written(IMAGES), rtol=1e-4, atol=1e-5)
    assert isinstance(layer.kernel, nnx.Param)
    assert not isinstance(layer.kernel, Base)


def test_an_ensemble_stores_the_kernels_once() -> None:
    make = lambda rngs: batch_ensemble(mlp(rngs), rngs=rngs)
    ens = Ensemble.create(make, SIZE, seed=0, shared=Base)
    assert sum(x.size for x in jax.tree.leaves(ens.shared)) == 4 * 7 + 7 * 2
    assert sum(x.size for x in jax.tree.leaves(ens.trainable)) == SIZE * (4 + 7 + 7 + 7 + 2 + 2)
    for i, member in enumerate(ens):
        np.testing.assert_allclose(member(X), ens(X)[i], rtol=1e-5, atol=1e-6)
    trainer = Trainer(lambda net, x, y: jnp.mean((net(x) - y) ** 2), optax.adam(0.05))
    state = trainer.init(ens)
    losses = []
    for _ in range(30):
        state, metrics = trainer.step(state, (X, X[:, :2]))
        losses.append(float(metrics["loss"].mean()))
    assert losses[-1] < 0.3 * losses[0]
    assert not np.allclose(state.ensemble(X)[0], state.ensemble(X)[1])


def test_a_layer_of_low_rank_adds_to_the_kernel() -> None:
    for model, x in ((mlp(nnx.Rngs(0)), X), (conv(nnx.Rngs(0)), IMAGES)):
        adapted = lora(model, 2, rngs=nnx.Rngs(1), scale=0.5)
        np.testing.assert_array_equal(adapted(x), model(x))
        for path, parameter in nnx.to_flat_state(nnx.state(adapted, nnx.LoRAParam)):
            parameter[...] = jnp.asarray(RNG.normal(size=parameter[...].shape), jnp.float32)
            assert path[-2] in ("down", "up")
        nnx.update(adapted, nnx.state(adapted, nnx.LoRAParam))
        written = nnx.clone(model)
        layers = [(adapted, written)] if x is IMAGES else [(adapted.layers[i], written.layers[i]) for i in (0, 2)]
        for low, layer in layers:
            layer.kernel[...] += 0.5 * jnp.einsum("...ir,ro->...io", kernel(low.down), kernel(low.up))
        np.testing.assert_allclose(adapted(x), written(x), rtol=1e-4, atol=1e-5)
    frozen = freeze(lora(mlp(nnx.Rngs(0)), 2, rngs=nnx.Rngs(1)), Base)
    assert sum(x.size for x in jax.tree.leaves(nnx.state(frozen, nnx.Param))) == 2 * (4 + 7) + 2 * (7 + 2)
    ens = Ensemble.stack([frozen, nnx.clone(frozen)], shared=Base)
    assert not jax.tree.leaves(ens.shared.trainable)
    assert sum(x.size for x in jax.tree.leaves(ens.shared.rest)) == 4 * 7 + 7 + 7 * 2 + 2


@pytest.mark.parametrize("mini", [False, True])
def test_members_of_a_tabm(mini: bool) -> None:
    def make(rngs: nnx.Rngs) -> Any:
        layers = nnx.Linear(4, 6, rngs=rngs), nnx.relu, nnx.Linear(6, 6, rngs=rngs), nnx.relu
        model = nnx.Sequential(*layers, nnx.Linear(6, 1, rngs=rngs))
        return tabm(model, first="layers.0", head="layers.4", rngs=rngs, mini=mini)

    ens = Ensemble.create(make, SIZE, seed=0, shared=Base)
    own = (4 if mini else 4 + 6 + 6 + 6 + 6 + 6) + 6 + 1
    assert sum(x.size for x in jax.tree.leaves(ens.trainable)) == SIZE * own
    assert sum(x.size for x in jax.tree.leaves(ens.shared)) == 4 * 6 + 6 * 6 + (12 if mini else 0)
    for i, member in enumerate(ens):
        signs = ens.trainable["layers"][0]["inputs"][i]
        assert set(np.abs(signs).tolist()) == {1.0}
        shared: Any = ens.shared.trainable["layers"]
        first, second = (shared[j]["layer" if j == 0 or not mini else "kernel"] for j in (0, 2))
        first, second = (x["kernel"] if isinstance(x, dict) else x for x in (first, second))
        hidden = nnx.relu(nnx.relu((X * signs) @ first) @ second)  # biases and other scales are as they start
        head = jax.tree.map(lambda x, i=i: x[i], ens.trainable["layers"][4])
        np.testing.assert_allclose(member(X), hidden @ head["kernel"] + head["bias"], rtol=1e-4, atol=1e-5)


def test_layers_with_several_paths_and_selections() -> None:
    class Twice(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(4, 4, rngs=rngs)
            self.again = nnx.Dict(same=self.first)
            self.last = nnx.Linear(4, 2, use_bias=False, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(self.again["same"](self.first(x)))

    model = batch_ensemble(Twice(nnx.Rngs(0)), rngs=nnx.Rngs(1), where="first")
    assert model.first is model.again["same"]
    assert isinstance(model.last, nnx.Linear)
    assert model(X).shape == (5, 2)
    half: Any = batch_ensemble(nnx.Linear(4, 3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    assert half.inputs[...].dtype == jnp.bfloat16


def test_what_does_not_fit_is_refused() -> None:
    model = mlp(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^batch_ensemble: where selects no nnx.Linear or nnx.Conv of Sequential"):
        batch_ensemble(model, rngs=nnx.Rngs(0), where="encoder")
    with pytest.raises(TypeError, match=r"^lora: where must be a dotted name"):
        lora(model, 2, rngs=nnx.Rngs(0), where=3)
    with pytest.raises(TypeError, match=r"^lora: rank must be"):
        lora(model, 1.5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^tabm: first and head select the same layer"):
        tabm(model, first="layers.0", head="layers", rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"^batch_ensemble: model must be a Flax NNX module"):
        batch_ensemble(lambda x: x, rngs=nnx.Rngs(0))
    grouped = nnx.Conv(4, 4, (3,), feature_group_count=2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^lora: .* is a grouped convolution"):
        lora(grouped, 2, rngs=nnx.Rngs(0))
