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
from plurax.transforms.modules import Adapter, Base, Frozen, batch_ensemble, freeze, lora, tabm, unfreeze

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


@pytest.mark.parametrize(
    "adapt",
    [
        lambda model: lora(model, 2, rngs=nnx.Rngs(1)),
        lambda model: batch_ensemble(model, rngs=nnx.Rngs(1)),
        lambda model: tabm(model, first="layers.0", head="layers.2", rngs=nnx.Rngs(1)),
    ],
    ids=["lora", "batch_ensemble", "tabm"],
)
def test_frozen_parameters_stay_frozen(adapt: Any) -> None:
    model = mlp(nnx.Rngs(0))
    adapted, expected = adapt(freeze(model, "layers.0")), adapt(model)
    np.testing.assert_array_equal(adapted(X), expected(X))
    assert sorted(x.shape for x in jax.tree.leaves(nnx.state(adapted, Frozen))) == [(4, 7), (7,)]
    kinds = [
        jax.tree.map(type, nnx.state(x), is_leaf=lambda x: isinstance(x, nnx.Variable))
        for x in (unfreeze(adapted), expected)
    ]
    assert kinds[0] == kinds[1]


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


class Einsum(nnx.Module):
    """A layer as packages have their own: one parameter, used in a sum of products."""

    def __init__(self, shape: tuple[int, ...], *, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(0.1 * rngs.params.normal(shape))

    def __call__(self, x: Any) -> Any:
        return jnp.einsum("bi,ijk->bj", x, self.w[...])


class LowRankEinsum(nnx.Module):
    """What a user writes for such a layer."""

    def __init__(self, layer: Any, rngs: nnx.Rngs) -> None:
        size, outputs, _ = layer.w.shape
        self.layer = freeze(layer, True)
        self.a, self.b = nnx.LoRAParam(rngs.params.normal((size, 2))), nnx.LoRAParam(jnp.zeros((2, outputs)))

    def __call__(self, x: Any) -> Any:
        return self.layer(x) + x @ self.a[...] @ self.b[...]


class Mixed(nnx.Module):
    """Layers of all sorts, 4 to 3, for inputs (batch, 4)."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.first = nnx.Embed(5, 4, rngs=rngs), nnx.Linear(4, 6, rngs=rngs)
        self.blocks = nnx.List([nnx.Dict(q=Einsum((6, 6, 2), rngs=rngs))])
        self.norm, self.shift = nnx.LayerNorm(6, rngs=rngs), nnx.Param(jnp.zeros(6))
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.first(x + self.embed(jnp.arange(len(x))))
        return self.head(self.norm(self.blocks[0]["q"](x)) + self.shift[...])


def adapt(api: str, model: Any, **options: Any) -> Any:
    """Call one of the three functions."""
    rngs = nnx.Rngs(1)
    if api == "lora":
        return lora(model, 2, rngs=rngs, **options)
    if api == "tabm":
        return tabm(model, first="first", head="head", rngs=rngs, **options)
    return batch_ensemble(model, rngs=rngs, **options)


APIS = ("lora", "tabm", "batch_ensemble")


@pytest.mark.parametrize("api", APIS)
def test_a_layer_of_an_unknown_class_is_refused_unless_one_says_how(api: str) -> None:
    model: Any = Mixed(nnx.Rngs(0))
    match = (
        rf"^{api}: `blocks\.0\.q\.w` of shape \(6, 6, 2\) is a parameter of a layer of class Einsum, .* rules=\{{Einsum"
    )
    with pytest.raises(ValueError, match=match):
        adapt(api, model)
    # Both remedies that the error names.
    left = adapt(api, model, where=nnx.Not(Einsum))
    np.testing.assert_array_equal(left.blocks[0].q.w[...], model.blocks[0].q.w[...])
    assert type(left.blocks[0].q.w) is nnx.Param
    assert type(left.first) is not nnx.Linear
    rngs = nnx.Rngs(2)
    ruled = adapt(api, model, rules={Einsum: lambda layer: LowRankEinsum(layer, rngs)})
    assert type(ruled.blocks[0].q) is LowRankEinsum
    assert type(ruled.first) is not nnx.Linear
    assert type(model.blocks[0].q) is Einsum
    assert isinstance(ruled.norm.scale, nnx.Param)
    assert not isinstance(ruled.embed.embedding, Base)
    if api == "lora":
        np.testing.assert_array_equal(ruled(X), model(X))
        names = {path[-1] for path, _ in nnx.to_flat_state(nnx.state(freeze(ruled, Base), nnx.Param))}
        assert names == {"embedding", "kernel", "a", "b", "scale", "bias", "shift"}
        low = freeze(ruled, nnx.Not(nnx.LoRAParam))  # as the docstring says
        assert (
            len(jax.tree.leaves(nnx.state(low, nnx.Param))) == len(jax.tree.leaves(nnx.state(low, nnx.LoRAParam))) == 6
        )


FLAX: dict[str, Any] = {
    "Einsum": lambda r: nnx.Einsum("bi,ijk->bjk", (4, 2, 3), rngs=r),
    "LinearGeneral": lambda r: nnx.LinearGeneral(4, (2, 3), rngs=r),
    "MultiHeadAttention": lambda r: nnx.MultiHeadAttention(2, 4, 8, decode=False, rngs=r),
    "ConvTranspose": lambda r: nnx.ConvTranspose(4, 3, (3,), rngs=r),
    "LoRALinear": lambda r: nnx.LoRALinear(4, 3, lora_rank=2, rngs=r),
    "LoRA": lambda r: nnx.LoRA(4, 2, 3, rngs=r),
}


@pytest.mark.parametrize("name", FLAX)
def test_other_layers_of_flax_are_refused(name: str) -> None:
    rngs = nnx.Rngs(0)
    model = nnx.Dict(a=nnx.Linear(4, 4, rngs=rngs), b=FLAX[name](rngs), c=nnx.Linear(4, 3, rngs=rngs))
    match = r"^(lora|tabm|batch_ensemble): `b\.[a-z_.]*` of shape \([0-9, ]*\) is a parameter of a layer of class"
    for api in APIS:
        options: Any = {"first": "a", "head": "c"} if api == "tabm" else {}
        function: Any = {"lora": lora, "tabm": tabm, "batch_ensemble": batch_ensemble}[api]
        options |= {"rank": 2} if api == "lora" else {}
        with pytest.raises(ValueError, match=match):
            function(model, rngs=nnx.Rngs(1), **options)
        function(model, rngs=nnx.Rngs(1), where=["a", "c"], **options)


@pytest.mark.parametrize(
    "model",
    [
        nnx.LSTMCell(4, 3, rngs=nnx.Rngs(0)),
        nnx.OptimizedLSTMCell(4, 3, rngs=nnx.Rngs(0)),
        nnx.SimpleCell(4, 3, rngs=nnx.Rngs(0)),
        nnx.GRUCell(4, 3, rngs=nnx.Rngs(0)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_cells_consist_of_linear_layers(model: Any) -> None:
    carry = model.initialize_carry((5, 4), nnx.Rngs(1))
    adapted: Any = lora(model, 2, rngs=nnx.Rngs(1))
    (_, found), (_, expected) = adapted(carry, X), model(carry, X)
    np.testing.assert_array_equal(found, expected)
    scaled: Any = batch_ensemble(model, rngs=nnx.Rngs(1), init=lambda key, shape, dtype: jnp.ones(shape, dtype))
    np.testing.assert_array_equal(scaled(carry, X)[1], expected)
    for path, parameter in nnx.to_flat_state(nnx.state(adapted, nnx.Not(nnx.LoRAParam))):
        assert isinstance(parameter, (Base, nnx.RngState)), path


def test_a_rule_covers_all_that_is_in_a_layer_and_the_nearest_class_counts() -> None:
    class Attention(nnx.MultiHeadAttention):
        pass

    rngs = nnx.Rngs(0)
    model: Any = nnx.Dict(a=Attention(2, 4, 8, decode=False, rngs=rngs), b=nnx.Linear(4, 4, rngs=rngs))
    rules: Any = {nnx.Module: lambda _: None, nnx.Linear: lambda x: x, Attention: lambda x: freeze(x, True)}
    with pytest.raises(TypeError, match=r"^lora: rules\[Module\] must return a layer, but it returned None"):
        lora(model, 2, rngs=rngs, rules=rules)  # the model itself is a module
    found: Any = lora(model, 2, rngs=rngs, rules=rules, where=["a", "b"])
    assert not nnx.to_flat_state(nnx.state(found.a, nnx.Param))
    assert type(found.b.kernel) is nnx.Param


def test_rules_and_selections_that_do_not_fit_are_refused() -> None:
    model: Any = Mixed(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^lora: rules has a function for Conv, but the model has none; leave it out"):
        adapt("lora", model, rules={nnx.Conv: lambda layer: layer})
    with pytest.raises(TypeError, match=r"^batch_ensemble: rules must be a dict from kinds of modules to functions"):
        adapt("batch_ensemble", model, rules=[Einsum])
    with pytest.raises(TypeError, match=r"^lora: rules\[Einsum\] must be a function of a layer, but got 3"):
        adapt("lora", model, rules={Einsum: 3})
    for options in ({"where": ["blocks", "head"]}, {"rules": {nnx.Linear: lambda layer: layer}}):
        with pytest.raises(ValueError, match=r"^tabm: first must select an nnx.Linear or nnx.Conv .* selects `first`"):
            adapt("tabm", model, **options)
    with pytest.raises(
        ValueError, match=r"^tabm: first must select an nnx.Linear or nnx.Conv .* selects `blocks\.0\.q`"
    ):
        tabm(model, first="blocks", head="head", rngs=nnx.Rngs(0))
    assert type(tabm(model, first="first", head=["head", "blocks"], rngs=nnx.Rngs(0)).blocks[0].q.w) is nnx.Param


def test_a_subclass_with_parameters_of_its_own_is_another_class() -> None:
    class Gated(nnx.Linear):
        def __init__(self, rngs: nnx.Rngs) -> None:
            super().__init__(4, 3, rngs=rngs)
            self.gates = nnx.List([nnx.Param(jnp.ones((4, 3)))])

    with pytest.raises(
        ValueError, match=r"^lora: `gates\.0` of shape \(4, 3\) is a parameter of a layer of class Gated"
    ):
        lora(Gated(nnx.Rngs(0)), 2, rngs=nnx.Rngs(1))


@pytest.mark.parametrize("norm", [nnx.WeightNorm, nnx.SpectralNorm])
def test_a_layer_whose_weights_are_normalized_is_refused(norm: Any) -> None:
    rngs = nnx.Rngs(0)
    model: Any = nnx.Dict(a=norm(nnx.Linear(4, 3, rngs=rngs), rngs=rngs), b=nnx.Linear(4, 3, rngs=rngs))
    match = rf"^batch_ensemble: `a.layer_instance` must stay as it is for the {norm.__name__} around it; leave it out"
    with pytest.raises(ValueError, match=match):
        batch_ensemble(model, rngs=rngs)
    for options in ({"where": nnx.Not(norm)}, {"rules": {norm: lambda layer: layer}}):
        found: Any = batch_ensemble(model, rngs=rngs, **options)  # as the error says
        np.testing.assert_array_equal(found.a(X), model.a(X))
        assert type(found.b) is not nnx.Linear
