"""Parameter names and frozen parameters.

Names are tested against the attributes that one would write in code. Frozen parameters are tested for who sees them,
and for training that does not change a bit of them.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from plurax.ensemble import Ensemble, Trainer, load, save
from plurax.transforms import clipped_grad, grad, hessian, jacobian, per_sample_grad, value_and_grad
from plurax.transforms.modules import Frozen, freeze, named_parameters, unfreeze
from plurax.transforms.modules._places import places


class Net(nnx.Module):
    """An encoder, a norm, dropout and a head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder = nnx.Sequential(nnx.Linear(4, 6, rngs=rngs), nnx.tanh, nnx.Linear(6, 5, rngs=rngs))
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.dropout(self.norm(self.encoder(x))))


def plain(rngs: nnx.Rngs) -> Any:
    return nnx.Sequential(nnx.Linear(4, 6, rngs=rngs), nnx.tanh, nnx.Linear(6, 3, rngs=rngs))


def cross_entropy(model: Any, x: Any, y: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def squares(model: Any, x: Any) -> jax.Array:
    return (model(x) ** 2).sum()


NODES = (nnx.Pytree, nnx.Variable)
GENERATOR = np.random.default_rng(0)
X, Y = GENERATOR.normal(size=(6, 4)).astype(np.float32), np.array([0, 1, 2, 0, 1, 2])


def names(state: Any) -> set[str]:
    return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}


def frozen_names(model: Any) -> set[str]:
    return names(nnx.state(model, Frozen))


def bits(model: Any) -> dict[str, np.ndarray]:
    """Return the current frozen parameters."""
    return {name: np.array(x) for name, x in named_parameters(model).items() if name in frozen_names(model)}


def assert_unmoved(before: dict[str, np.ndarray], model: Any) -> None:
    after = bits(model)
    assert before
    assert before.keys() == after.keys()
    for name, x in before.items():
        np.testing.assert_array_equal(x.view(np.uint32), after[name].view(np.uint32))


def test_a_changed_bit_is_detected() -> None:
    model = freeze(plain(nnx.Rngs(0)), "layers.0.bias")
    before = bits(model)
    model.layers[0].bias[...] = -model.layers[0].bias[...]  # zeros that differ only in sign
    with pytest.raises(AssertionError):
        assert_unmoved(before, model)


class TestFilters:
    """Accepted filters."""

    ALL = ("encoder.layers.0.bias", "encoder.layers.0.kernel", "encoder.layers.2.bias", "encoder.layers.2.kernel")

    @pytest.mark.parametrize(
        ("filter", "expected"),
        [
            ("encoder", [*ALL]),
            ("encoder.layers.2", ALL[2:]),
            ("head.kernel", ["head.kernel"]),
            ("tagged", ["norm.scale"]),
            (nnx.WithTag("tagged"), ["norm.scale"]),
            (["head.bias", "encoder.layers.0"], ["head.bias", *ALL[:2]]),
            (("head.bias", nnx.BatchNorm), ["head.bias", "norm.bias", "norm.scale"]),
            (nnx.PathContains("head"), ["head.bias", "head.kernel"]),
            (nnx.PathContains("ea", exact=False), ["head.bias", "head.kernel"]),
            (nnx.BatchNorm, ["norm.bias", "norm.scale"]),
            (nnx.OfType(nnx.BatchNorm), ["norm.bias", "norm.scale"]),
            (nnx.LoRAParam, ["norm.bias"]),
            (nnx.All("encoder", nnx.PathContains("kernel")), [ALL[1], ALL[3]]),
            (nnx.Any("head", nnx.LoRAParam), ["head.bias", "head.kernel", "norm.bias"]),
            (nnx.Not("encoder"), ["head.bias", "head.kernel", "norm.bias", "norm.scale"]),
            (nnx.Not(nnx.Linear), ["norm.bias", "norm.scale"]),
            (nnx.Not(nnx.Not("head")), ["head.bias", "head.kernel"]),
            (lambda path, x: path[-1] == "bias" and x.shape == (3,), ["head.bias"]),
            (nnx.All(lambda path, x: isinstance(x, nnx.Param), "head.bias"), ["head.bias"]),
            (True, [*ALL, "head.bias", "head.kernel", "norm.bias", "norm.scale"]),
            (..., [*ALL, "head.bias", "head.kernel", "norm.bias", "norm.scale"]),
            (nnx.Param, [*ALL, "head.bias", "head.kernel", "norm.bias", "norm.scale"]),
        ],
    )
    def test_matches(self, filter: Any, expected: list[str]) -> None:
        model = Net(nnx.Rngs(0))
        model.norm.scale = nnx.Param(jnp.ones(5), tag="tagged")
        model.norm.bias = nnx.LoRAParam(jnp.ones(5))
        frozen = freeze(model, filter)
        assert frozen_names(frozen) == {*expected}
        assert names(nnx.state(frozen, nnx.Param)) == named_parameters(model).keys() - {*expected}

    def test_a_name_matches_whole_parts_from_the_start(self) -> None:
        model = nnx.Dict(lin=nnx.Param(jnp.ones(1)), linear=nnx.Param(jnp.ones(2)))
        assert frozen_names(freeze(model, "lin")) == {"lin"}
        with pytest.raises(ValueError, match="selects no parameter"):
            freeze(model, "li")

    @pytest.mark.parametrize(
        "filter", ["encodr", "", "layers", False, nnx.BatchStat, nnx.Conv, [], lambda path, x: False]
    )
    def test_a_filter_without_a_match_is_refused(self, filter: Any) -> None:
        match = r"freeze: the filter .* selects no parameter of the Net, which has 8: \['encoder\.layers"
        with pytest.raises(ValueError, match=match):
            freeze(Net(nnx.Rngs(0)), filter)

    def test_without_parameters_every_filter_is_refused(self) -> None:
        with pytest.raises(ValueError, match="freeze: .* True selects no parameter of the Dropout, which has 0: "):
            freeze(nnx.Dropout(0.1), True)

    @pytest.mark.parametrize("filter", [None, 3, {"encoder"}, ["head", 1.5]])
    def test_other_objects_are_refused(self, filter: Any) -> None:
        with pytest.raises(TypeError, match="freeze: filter must be a dotted name, a kind of variable"):
            freeze(Net(nnx.Rngs(0)), filter)


class TestCopies:
    """The argument is unchanged, and shared variables stay shared."""

    @pytest.mark.parametrize("change", [lambda m: freeze(m, "encoder"), unfreeze, lambda m: unfreeze(freeze(m, True))])
    def test_nothing_is_shared_with_the_argument(self, change: Callable[[Any], Any]) -> None:
        model = freeze(Net(nnx.Rngs(0)), "head")
        definition, before = nnx.graphdef(model), {name: np.array(x) for name, x in named_parameters(model).items()}
        changed = change(model)
        mine, theirs = ({id(x) for _, x in nnx.iter_graph(m) if isinstance(x, NODES)} for m in (model, changed))
        assert len(mine) == len(theirs)
        assert not mine & theirs
        for _, x in nnx.to_flat_state(nnx.state(changed, (nnx.Param, Frozen))):
            x[...] = x[...] + 1
        assert nnx.graphdef(model) == definition
        for name, x in named_parameters(model).items():
            np.testing.assert_array_equal(x, before[name])

    def test_numpy_arrays_are_copied_since_they_are_mutable(self) -> None:
        model: Any = nnx.Dict(a=nnx.Param(np.ones(2)), b=nnx.Param({"c": np.ones(2)}), d=nnx.BatchStat(np.ones(2)))
        for changed in (freeze(model, "a"), unfreeze(freeze(model, True))):
            changed.a[0] = changed.b.get_raw_value()["c"][0] = changed.d[0] = 7
        assert (model.a[0], model.b.get_raw_value()["c"][0], model.d[0]) == (1, 1, 1)

    def test_unfreezing_restores_the_module(self) -> None:
        model = Net(nnx.Rngs(0))
        model.head.bias = nnx.LoRAParam(jnp.ones(3), tag="extra", note=("a", 1))
        again = unfreeze(freeze(freeze(model, "encoder"), ["head", "encoder.layers.0"]))
        assert nnx.graphdef(again) == nnx.graphdef(model)
        assert hash(nnx.graphdef(again)) == hash(nnx.graphdef(model))
        for name, x in named_parameters(again).items():
            assert x is named_parameters(model)[name]
        assert type(again.head.bias) is nnx.LoRAParam
        assert again.head.bias.get_metadata("note") == ("a", 1)

    def test_frozen_parameters_stay_frozen(self) -> None:
        model = freeze(freeze(plain(nnx.Rngs(0)), "layers.0"), "layers.2.bias")
        assert frozen_names(model) == {"layers.0.bias", "layers.0.kernel", "layers.2.bias"}
        assert frozen_names(freeze(model, "layers.0.bias")) == frozen_names(model)
        assert frozen_names(freeze(model, nnx.Param)) == named_parameters(model).keys()

    def test_a_tied_parameter_matches_under_each_name(self) -> None:
        shared = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        for name in ("first", "second", "tied", "inner.0"):
            model: Any = nnx.Dict(first=shared, second=shared, tied=shared.kernel, inner=nnx.data([shared.kernel]))
            frozen = freeze(model, name)
            assert isinstance(frozen.tied, Frozen)
            assert frozen.first is frozen.second
            assert frozen.first.kernel is frozen.tied is frozen.inner[0]
            assert isinstance(frozen.first.bias, Frozen) == (name in ("first", "second"))
            again = unfreeze(frozen)
            assert again.first.kernel is again.tied is again.inner[0]
            assert nnx.graphdef(again) == nnx.graphdef(model)

    def test_a_variable_may_hold_a_pytree(self) -> None:
        model = nnx.Dict(tree=nnx.Param({"w": jnp.ones(2), "b": [jnp.zeros(3)]}), other=nnx.Param(jnp.ones(1)))
        frozen = freeze(model, "tree")
        gradient = grad(lambda m: m.tree.get_value()["w"].sum() * m.other[...].sum())(frozen)
        assert names(gradient) == {"other"}
        assert nnx.graphdef(unfreeze(frozen)) == nnx.graphdef(model)

    def test_it_works_under_jit(self) -> None:
        model = plain(nnx.Rngs(0))
        frozen = nnx.jit(lambda model: freeze(model, "layers.0"))(model)
        assert frozen_names(frozen) == {"layers.0.bias", "layers.0.kernel"}


class TestRefusals:
    """Parameters that cannot be frozen, and arguments that are not modules."""

    @pytest.mark.parametrize("norm", [nnx.WeightNorm, nnx.SpectralNorm])
    def test_parameters_that_a_norm_needs(self, norm: Any) -> None:
        model = nnx.Dict(
            norm=norm(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)), head=nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        )
        parameters = named_parameters(model.norm)  # newer versions of Flax count a WeightNorm's scales too
        assert {"layer_instance.bias", "layer_instance.kernel"} <= set(parameters)
        any_of_them = "|".join(map(re.escape, parameters))
        match = rf"freeze: `norm\.({any_of_them})` must be an nnx\.Param for the {norm.__name__} around it"
        with pytest.raises(ValueError, match=match):
            freeze(model, True)
        assert frozen_names(freeze(model, "head")) == {"head.bias", "head.kernel"}

    def test_parameters_that_linen_needs(self) -> None:
        model = nnx.bridge.ToNNX(linen.Dense(3), rngs=nnx.Rngs(0)).lazy_init(X)
        with pytest.raises(ValueError, match=r"freeze: `kernel` must be an nnx\.Param for the ToNNX around it"):
            freeze(model, "kernel")

    def test_a_parameter_class_with_custom_methods(self) -> None:
        class Doubled(nnx.Param):
            def get_value(self, **kwargs: Any) -> Any:
                return 2 * super().get_value(**kwargs)

        class Named(Doubled):
            pass

        model = nnx.Dict(w=Named(jnp.ones(2)))
        with pytest.raises(
            ValueError, match="freeze: `w` would lose the get_value of its Named; leave it out of the filter"
        ):
            freeze(model, "w")

    @pytest.mark.parametrize("change", [lambda x: freeze(x, True), unfreeze])
    @pytest.mark.parametrize("other", [{"a": nnx.Linear(2, 3, rngs=nnx.Rngs(0))}, linen.Dense(3), jnp.ones(2)])
    def test_other_models(self, change: Any, other: Any) -> None:
        with pytest.raises(TypeError, match="freeze: model must be a Flax NNX module, but got"):
            change(other)


class TestTraining:
    """No gradient, no update, no weight decay, no computation."""

    @pytest.mark.parametrize("differentiate", [grad, nnx.grad])
    def test_gradients_contain_only_the_other_parameters(self, differentiate: Any) -> None:
        whole = differentiate(squares)(plain(nnx.Rngs(0)), X)
        for filter, left in (("layers.0", 2), ("layers.2", 0)):
            part = differentiate(squares)(freeze(plain(nnx.Rngs(0)), filter), X)
            assert names(part) == {f"layers.{left}.bias", f"layers.{left}.kernel"}
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6),
                nnx.to_pure_dict(part)["layers"][left],
                nnx.to_pure_dict(whole)["layers"][left],
            )

    def test_an_optimizer_with_weight_decay_moves_nothing(self) -> None:
        model = freeze(Net(nnx.Rngs(0)), ["encoder", "norm"])
        optimizer = nnx.Optimizer(model, optax.adamw(0.1, weight_decay=0.5), wrt=nnx.Param)
        before, head, mean = bits(model), model.head.kernel[...], model.norm.mean[...]

        @nnx.jit
        def step(model: Any, optimizer: Any) -> None:
            optimizer.update(model, nnx.grad(cross_entropy)(model, X, Y))

        for _ in range(3):
            step(model, optimizer)
        assert_unmoved(before, model)
        assert np.abs(model.head.kernel[...] - head).min() > 0
        assert np.abs(model.norm.mean[...] - mean).min() > 0  # statistics are not parameters
        assert sum(x.size for x in jax.tree.leaves(nnx.state(optimizer.opt_state))) == 1 + 2 * (5 * 3 + 3)

    def test_stop_gradient_leaves_it_to_the_decay(self) -> None:
        model = plain(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(0.1, weight_decay=0.5), wrt=nnx.Param)
        before = model.layers[0].kernel[...]
        gradient = nnx.grad(lambda m: (m.layers[2](jax.lax.stop_gradient(jnp.tanh(m.layers[0](X)))) ** 2).sum())(model)
        assert not np.any(gradient["layers"][0]["kernel"][...])
        optimizer.update(model, gradient)
        np.testing.assert_allclose(model.layers[0].kernel[...], 0.95 * before, rtol=1e-5)

    @pytest.mark.slow
    @pytest.mark.parametrize("strategy", ["vmap", "map", "unroll", "loop"])
    def test_a_trainer_does_not_change_them(self, strategy: str) -> None:
        ensemble = Ensemble.stack([freeze(Net(nnx.Rngs(i)), "encoder") for i in range(2)])
        self._train(ensemble, strategy)

    @pytest.mark.slow
    def test_members_may_be_frozen_when_made_or_later(self) -> None:
        made = Ensemble.create(lambda rngs: freeze(Net(rngs), "encoder"), 2, seed=0)
        later = freeze(Ensemble.create(Net, 2, seed=0), "encoder")
        assert jax.tree.structure(made) == jax.tree.structure(later)
        jax.tree.map(np.testing.assert_array_equal, made.trainable, later.trainable)
        self._train(later, "vmap")
        assert jax.tree.structure(unfreeze(later)) == jax.tree.structure(Ensemble.create(Net, 2, seed=0))

    def _train(self, ensemble: Ensemble, strategy: str) -> None:
        trainer = Trainer(cross_entropy, optax.adamw, hyperparams={"learning_rate": [0.1, 0.2]}, strategy=strategy)
        state, _ = trainer.fit(trainer.init(ensemble), [(X, Y)] * 3, progress=False)
        for before, after in zip(ensemble, state.ensemble, strict=True):
            assert frozen_names(after) == set(TestFilters.ALL)
            assert_unmoved(bits(before), after)
            assert np.abs(before.head.kernel[...] - after.head.kernel[...]).min() > 0

    def test_training_equals_masked_updates(self) -> None:
        def train(model: Any, transformation: Any) -> Any:
            trainer = Trainer(cross_entropy, transformation, strategy="vmap")
            return trainer.fit(trainer.init(Ensemble.stack([model])), [(X, Y)] * 4, progress=False)[0].ensemble[0]

        model = plain(nnx.Rngs(0))
        sgd = optax.sgd(0.1, momentum=0.9)
        labels = {"layers": {0: "still", 2: "moves"}}
        masked = optax.partition({"still": optax.set_to_zero(), "moves": sgd}, labels)
        expected, found = train(model, masked), train(freeze(model, "layers.0"), sgd)
        for name, x in named_parameters(expected).items():
            np.testing.assert_allclose(named_parameters(found)[name], x, rtol=1e-6)

    def test_a_checkpoint_fits_frozen_or_not(self, tmp_path: Any) -> None:
        ensemble = Ensemble.create(plain, 2, seed=0)
        save(tmp_path / "saved", freeze(ensemble, "layers.0"))
        for like in (ensemble, freeze(ensemble, "layers.2")):
            again = load(tmp_path / "saved", like)
            assert frozen_names(again[0]) == frozen_names(like[0])
            np.testing.assert_array_equal(again[1].layers[0].kernel[...], ensemble[1].layers[0].kernel[...])

    @pytest.mark.slow
    @pytest.mark.parametrize("method", ["vmap", "ghost", "book_keeping"])
    def test_per_sample_gradients_are_clipped_by_trainable_parameters(self, method: str) -> None:
        model = freeze(plain(nnx.Rngs(0)), "layers.0")
        clip = clipped_grad(cross_entropy, l2_clip_norm=0.1, batch_argnums=(1, 2), method=method)
        apart = per_sample_grad(cross_entropy, batch_argnums=(1, 2))
        clipped, each = jax.jit(lambda *args: (clip(*args), nnx.to_pure_dict(apart(*args))))(model, X, Y)
        assert [*each["layers"]] == [2]
        norms = np.sqrt(sum((np.asarray(x) ** 2).reshape(6, -1).sum(1) for x in jax.tree.leaves(each)))
        assert norms.min() > 0.1
        expected = jax.tree.map(lambda x: np.einsum("i...,i", x, 0.1 / norms), each)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7), nnx.to_pure_dict(clipped), expected
        )

    def test_jacobians_and_hessians_contain_only_trainable_parameters(self) -> None:
        model = plain(nnx.Rngs(0))
        rows = jax.jit(lambda *models: [nnx.to_pure_dict(jacobian(lambda m: m(X))(m)) for m in models])
        whole, part = rows(model, freeze(model, "layers.0"))
        assert [*part["layers"]] == [2]
        np.testing.assert_allclose(part["layers"][2]["kernel"], whole["layers"][2]["kernel"], rtol=1e-5)
        second = hessian(lambda m: squares(m, X[:1]))(freeze(model, ["layers.0", "layers.2.kernel"]))
        np.testing.assert_allclose(second["layers"][2]["bias"].get_value()["layers"][2]["bias"][...], 2 * np.eye(3))

    def test_the_work_for_them_is_gone(self) -> None:
        layers = [nnx.Linear(512, 512, use_bias=False, rngs=nnx.Rngs(i)) for i in range(8)]
        model = nnx.Sequential(*[part for layer in layers for part in (layer, jnp.tanh)])

        def megaflops(model: Any) -> float:
            definition, state = nnx.split(model)

            def gradient(state: Any) -> Any:
                return value_and_grad(lambda model: model(jnp.ones((16, 512))).sum())(nnx.merge(definition, state))

            return dict(jax.jit(gradient).lower(state).compile().cost_analysis() or {})["flops"] / 1e6

        last_two = freeze(model, [f"layers.{2 * i}" for i in range(6)])
        assert 192 < megaflops(model) < 195
        assert 91 < megaflops(last_two) < 94


# Names.


class Child(nnx.Module):
    """A module that references its parent."""

    def __init__(self, parent: Any) -> None:
        self.parent, self.scale = parent, nnx.Param(jnp.ones(2))


class Model(nnx.Module):
    """Lists, dicts, other state, shared parts, and a parameter that holds a pytree."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(7, 3, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(1 + i % 3, 2, rngs=rngs) for i in range(11)])
        self.parts = nnx.Dict(norm=nnx.BatchNorm(2, rngs=rngs), again=self.blocks[10])
        self.loose = nnx.data({"x": [nnx.LoRAParam(jnp.ones(1))]})
        self.tree = nnx.Param({"w": jnp.ones((2, 3)), "b": [jnp.zeros(3), jnp.ones(())]})
        self.head = self.embed.embedding
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.child = Child(self)


def follow(model: Any, name: str) -> Any:
    """Evaluate the code `model.name`."""
    for part in name.split("."):
        model = model[int(part)] if part.isdigit() else model[part] if isinstance(model, dict) else getattr(model, part)
        model = model.get_value() if isinstance(model, nnx.Variable) else model
    return model


def test_names_are_attribute_paths() -> None:
    model = Model(nnx.Rngs(0))
    found = named_parameters(model)
    expected = {f"blocks.{i}.{name}" for i in range(11) for name in ("bias", "kernel")}
    expected |= {"embed.embedding", "loose.x.0", "parts.norm.bias", "parts.norm.scale", "child.scale"}
    assert found.keys() == expected | {"tree.b.0", "tree.b.1", "tree.w"}
    for name, array in found.items():
        assert array is follow(model, name)
    assert sum(array.size for array in found.values()) == sum(
        x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))
    )


def test_freezing_keeps_names() -> None:
    model = Model(nnx.Rngs(0))
    found = named_parameters(freeze(model, ["embed", "tree"]))
    assert [*found] == [*named_parameters(model)]
    assert all(x is y for x, y in zip(found.values(), named_parameters(model).values(), strict=True))


def test_an_ensemble_has_the_names_of_its_members() -> None:
    ensemble = Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 2, seed=0)
    found = named_parameters(ensemble)
    assert {name: x.shape for name, x in found.items()} == {"bias": (2, 3), "kernel": (2, 4, 3)}
    np.testing.assert_array_equal(found["kernel"][1], ensemble[1].kernel[...])


def test_modules_without_parameters() -> None:
    assert named_parameters(nnx.Dropout(0.5)) == {}


def test_shapes_suffice() -> None:
    abstract = nnx.eval_shape(lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    assert named_parameters(abstract)["kernel"] == jax.ShapeDtypeStruct((4, 3), jnp.float32)


def test_duplicate_names_are_refused() -> None:
    model = nnx.Dict({"a.b": nnx.Param(jnp.ones(1)), "a": nnx.Dict(b=nnx.Param(jnp.ones(2)))})
    with pytest.raises(
        ValueError, match=r"named_parameters: two arrays of the model are called `a\.b`; leave dots out"
    ):
        named_parameters(model)


@pytest.mark.parametrize("other", [{"a": jnp.ones(2)}, None, nnx.Linear, nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))])
def test_non_modules_are_refused(other: Any) -> None:
    with pytest.raises(TypeError, match=r"named_parameters: model must be a Flax NNX module, but got .*nnx\.bridge"):
        named_parameters(other)


@pytest.mark.parametrize("kind", ["hijax", "ref"])
def test_experimental_variables_are_refused(kind: str) -> None:
    model = nnx.with_vars(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), **{kind: True})
    with pytest.raises(TypeError, match="named_parameters: `bias` is a variable of an experimental kind of Flax"):
        named_parameters(model)
    assert named_parameters(nnx.with_vars(model, hijax=False, ref=False))["bias"].shape == (3,)


def test_all_names_of_shared_parameters_are_found() -> None:
    model = Model(nnx.Rngs(0))
    found = places(model)
    paths = [".".join(map(str, path)) for path, x in found.items() if x is model.blocks[10].kernel]
    assert paths == ["blocks.10.kernel", "parts.again.kernel"]
    assert [path for path, x in found.items() if x is model.embed.embedding] == [("embed", "embedding"), ("head",)]
    nested: Any = nnx.Dict(a=nnx.Dict(x=nnx.Dict(w=nnx.Param(jnp.ones(1)))))
    nested.b, nested.c = nested.a, nested.a.x
    paths = [".".join(path) for path, x in places(nested).items() if isinstance(x, nnx.Variable)]
    assert paths == ["a.x.w", "b.x.w", "c.w"]


def test_flax_does_not_treat_frozen_as_a_parameter() -> None:
    assert not issubclass(Frozen, nnx.Param)
