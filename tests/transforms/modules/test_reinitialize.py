"""Reinitialized parameters: initializers are called as in Flax's constructors, each with its own key."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx import initializers as init

from plurax.ensemble import Ensemble
from plurax.transforms.modules import freeze, named_parameters, reinitialize

KEY = jax.random.key(3)


def recording(calls: list[Any]) -> Any:
    def initializer(key: Any, shape: Any, dtype: Any) -> Any:
        calls.append((tuple(shape), jnp.dtype(dtype)))
        return jnp.zeros(shape, dtype)

    return initializer


LAYERS: dict[str, tuple[Any, Any, list[str]]] = {
    "Linear": (lambda r, **k: nnx.Linear(4, 3, rngs=r, **k), nnx.Linear, ["kernel", "bias"]),
    "LinearGeneral": (
        lambda r, **k: nnx.LinearGeneral((5, 4), (3, 2, 7), axis=(-2, -1), rngs=r, **k),
        nnx.LinearGeneral,
        ["kernel", "bias"],
    ),
    "batched LinearGeneral": (
        lambda r, **k: nnx.LinearGeneral(4, (3, 2), batch_axis={0: 6}, rngs=r, **k),
        nnx.LinearGeneral,
        ["kernel", "bias"],
    ),
    "Einsum": (
        lambda r, **k: nnx.Einsum("nta,hab->nthb", (3, 4, 2), (3, 2), rngs=r, **k),
        nnx.Einsum,
        ["kernel", "bias"],
    ),
    "Conv": (lambda r, **k: nnx.Conv(4, 6, (3, 5), feature_group_count=2, rngs=r, **k), nnx.Conv, ["kernel", "bias"]),
    "ConvTranspose": (
        lambda r, **k: nnx.ConvTranspose(4, 6, (3, 5), transpose_kernel=True, rngs=r, **k),
        nnx.ConvTranspose,
        ["kernel", "bias"],
    ),
    "Embed": (lambda r, **k: nnx.Embed(7, 3, rngs=r, **k), nnx.Embed, ["embedding"]),
    "LayerNorm": (lambda r, **k: nnx.LayerNorm(4, rngs=r, **k), nnx.LayerNorm, ["scale", "bias"]),
    "BatchNorm": (lambda r, **k: nnx.BatchNorm(4, rngs=r, **k), nnx.BatchNorm, ["scale", "bias"]),
    "GroupNorm": (lambda r, **k: nnx.GroupNorm(4, num_groups=2, rngs=r, **k), nnx.GroupNorm, ["scale", "bias"]),
    "RMSNorm": (lambda r, **k: nnx.RMSNorm(4, rngs=r, **k), nnx.RMSNorm, ["scale"]),
    "MultiHeadAttention": (
        lambda r, **k: nnx.MultiHeadAttention(2, 4, 8, decode=False, rngs=r, **k),
        nnx.LinearGeneral,
        ["kernel", "bias"],
    ),
    "GRUCell": (
        lambda r, kernel_init=init.zeros, **k: nnx.GRUCell(
            4, 3, kernel_init=kernel_init, recurrent_kernel_init=kernel_init, rngs=r, **k
        ),
        nnx.Linear,
        ["kernel", "bias"],
    ),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_initializers_are_called_as_by_the_constructor(name: str, dtype: Any) -> None:
    make, kind, names = LAYERS[name]
    expected: list[Any] = []
    found: list[Any] = []
    model = make(nnx.Rngs(0), param_dtype=dtype, **{f"{x}_init": recording(expected) for x in names})
    reinitialize(model, {kind: {x: recording(found) for x in names}}, KEY)
    assert expected
    assert sorted(found, key=str) == sorted(expected, key=str)
    assert nnx.graphdef(reinitialize(model, {kind: {names[0]: init.ones}}, KEY)) == nnx.graphdef(model)


@pytest.mark.parametrize("name", ["Conv", "LinearGeneral", "Embed"])
def test_it_is_distributed_as_by_the_constructor(name: str) -> None:
    make, kind, names = {
        "Conv": (lambda **k: nnx.Conv(64, 80, (3, 5), rngs=nnx.Rngs(0), **k), nnx.Conv, "kernel_init"),
        "LinearGeneral": (
            lambda **k: nnx.LinearGeneral((8, 60), (9, 50), axis=(-2, -1), rngs=nnx.Rngs(0), **k),
            nnx.LinearGeneral,
            "kernel_init",
        ),
        "Embed": (lambda **k: nnx.Embed(900, 80, rngs=nnx.Rngs(0), **k), nnx.Embed, "embedding_init"),
    }[name]
    parameter = names.removesuffix("_init")
    for initializer in (init.he_normal(), init.xavier_uniform(), init.variance_scaling(1.0, "fan_out", "normal")):
        model = make(**{names: initializer})
        drawn = reinitialize(make(), {kind: initializer}, KEY)
        x, y = (np.asarray(getattr(m, parameter)[...]).ravel() for m in (model, drawn))
        # The standard deviation of 72,000 numbers has a standard error below 0.3 %; their ratio is tested to 7 of its
        # own.
        assert abs(x.std() / y.std() - 1) < 0.03
        assert abs(y.mean()) < 0.03 * y.std()
        assert (x != y).all()


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, use_bias=False, rngs=rngs)])
        self.adapter = nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs)


def test_each_class_has_its_rule_and_the_rest_is_unchanged() -> None:
    model = Model(nnx.Rngs(0))
    model.norm.mean[...] = jnp.full(8, 5.0)
    rules = {
        nnx.Conv: init.he_normal(),
        nnx.BatchNorm: {"scale": init.constant(2.0), "bias": init.constant(3.0)},
        nnx.Linear: {"kernel": init.he_uniform(), "bias": init.constant(4.0)},
    }
    before = {name: np.array(x) for name, x in named_parameters(model).items()}
    found = named_parameters(drawn := reinitialize(model, rules, KEY))
    for name, value in {"norm.scale": 2, "norm.bias": 3, "layers.0.bias": 4, "adapter.bias": 4}.items():
        assert (found[name] == value).all()
    for name in ("conv.bias", "adapter.lora.lora_a", "adapter.lora.lora_b"):
        np.testing.assert_array_equal(found[name], before[name])
    kernels = ["conv.kernel", "layers.0.kernel", "layers.1.kernel", "adapter.kernel"]
    assert all((found[name] != before[name]).all() for name in kernels)
    assert (found["layers.0.kernel"] != found["layers.1.kernel"]).all()
    assert np.abs(found["layers.0.kernel"]).max() <= np.sqrt(6 / 8)
    assert (drawn.norm.mean[...] == 5).all()
    for name, x in named_parameters(model).items():
        np.testing.assert_array_equal(x, before[name])
    assert drawn.conv.kernel is not model.conv.kernel
    nearest = reinitialize(
        model, {nnx.LoRALinear: init.ones, nnx.Linear: init.zeros, nnx.Module: init.constant(2.0)}, KEY
    )
    values = {name: float(x.ravel()[0]) for name, x in named_parameters(nearest).items() if name.endswith("kernel")}
    assert values == {"conv.kernel": 2, "layers.0.kernel": 0, "layers.1.kernel": 0, "adapter.kernel": 1}


def test_each_key_depends_on_the_path() -> None:
    rules = {nnx.Linear: init.normal()}

    def kernels(model: Any, key: Any = KEY) -> dict[str, np.ndarray]:
        found = named_parameters(reinitialize(model, rules, key))
        return {name: np.asarray(x) for name, x in found.items() if name.endswith("kernel")}

    small = nnx.Dict(a=nnx.Linear(3, 2, rngs=nnx.Rngs(0)), c=nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    large = nnx.Dict(a=nnx.Linear(3, 2, rngs=nnx.Rngs(7)), b=nnx.Linear(3, 2, rngs=nnx.Rngs(0)), c=small.c)
    first, second, other = kernels(small), kernels(large), kernels(small, jax.random.key(4))
    for name, x in first.items():
        np.testing.assert_array_equal(x, second[name])
        assert (x != other[name]).all()
    assert (second["a.kernel"] != second["b.kernel"]).all()


def test_shared_parameters_are_drawn_once_and_stay_shared() -> None:
    shared = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    found: Any = reinitialize(nnx.Dict(a=shared, b=shared, k=shared.kernel), {nnx.Linear: init.ones}, KEY)
    assert found.a is found.b
    assert found.a.kernel is found.k
    assert (found.k[...] == 1).all()


def test_frozen_parameters_are_unchanged() -> None:
    model = nnx.Dict(a=nnx.Linear(3, 2, rngs=nnx.Rngs(0)), b=nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    found = reinitialize(freeze(model, "a"), {nnx.Linear: init.ones}, KEY)
    assert (found.b.kernel[...] == 1).all()
    np.testing.assert_array_equal(found.a.kernel[...], model.a.kernel[...])
    with pytest.raises(
        ValueError,
        match=r"matches no `kernel` or `embedding`; give rules for .*: Linear with `bias`, `kernel` \(frozen\)",
    ):
        reinitialize(freeze(model, nnx.PathContains("kernel")), {nnx.Linear: init.ones}, KEY)


class Stack(nnx.Module):
    """One block with a leading layer axis on every array."""

    __plurax_layers__ = True

    def __init__(self, blocks: list[Any]) -> None:
        definition = nnx.graphdef(blocks[0])
        self.layer = nnx.merge(definition, jax.tree.map(lambda *x: jnp.stack(x), *map(nnx.state, blocks)))
        self.scale = nnx.Linear(3, 2, rngs=nnx.Rngs(0))


class TestStacks:
    """The layers of a stack are initialized one by one."""

    def make(self, seed: int) -> Any:
        rngs = nnx.Rngs(seed)
        return nnx.Dict(
            linear=nnx.Linear(40, 30, rngs=rngs),
            attention=nnx.MultiHeadAttention(2, 8, 8, decode=False, rngs=rngs),
            conv=nnx.Conv(3, 4, (5,), rngs=rngs),
        )

    def test_initializers_are_called_for_one_layer(self) -> None:
        expected: list[Any] = []
        found: list[Any] = []
        kinds = (nnx.Linear, nnx.LinearGeneral, nnx.Conv)
        reinitialize(
            self.make(0), {kind: {"kernel": recording(expected), "bias": recording(expected)} for kind in kinds}, KEY
        )
        stack = nnx.Dict(stack=Stack([self.make(i) for i in range(3)]).layer)
        stack.stack = Stack([self.make(i) for i in range(3)])
        stack.stack.scale = nnx.data(None)
        reinitialize(stack, {kind: {"kernel": recording(found), "bias": recording(found)} for kind in kinds}, KEY)
        assert sorted(found, key=str) == sorted(expected * 3, key=str)

    def test_layers_differ_and_have_the_fans_of_one(self) -> None:
        stack = Stack([self.make(i) for i in range(3)])
        found = reinitialize(stack, {nnx.Linear: init.he_normal()}, KEY)
        kernel = np.asarray(found.layer["linear"].kernel[...])
        assert kernel.shape == (3, 40, 30)
        assert all((kernel[i] != kernel[j]).all() for i in range(3) for j in range(i))
        # Standard deviations of 1,200 numbers, within 5 standard errors.
        np.testing.assert_allclose(kernel.std((1, 2)), np.sqrt(2 / 40), rtol=0.1)
        assert found.scale.kernel.shape == (3, 2)
        again = reinitialize(Stack([self.make(i) for i in range(2)]), {nnx.Linear: init.he_normal()}, KEY)
        np.testing.assert_array_equal(again.layer["linear"].kernel[...], kernel[:2])

    def test_stacks_of_stacks(self) -> None:
        inner = [Stack([nnx.Dict(w=nnx.Linear(4, 3, rngs=nnx.Rngs(i + j))) for i in range(3)]) for j in range(2)]
        calls: list[Any] = []
        found = reinitialize(Stack(inner), {nnx.Linear: {"kernel": recording(calls)}}, KEY)
        assert found.layer.layer["w"].kernel.shape == (2, 3, 4, 3)
        assert calls.count(((4, 3), jnp.dtype(jnp.float32))) == 6
        drawn = reinitialize(Stack(inner), {nnx.Linear: init.normal()}, KEY).layer.layer["w"].kernel[...]
        assert len(np.unique(drawn)) == drawn.size

    @pytest.mark.parametrize("name", ["Linear", "batched LinearGeneral", "Einsum", "Conv", "ConvTranspose", "Embed"])
    def test_layers_of_nnx_vmap_are_recognized_by_their_axes(self, name: str) -> None:
        make, kind, (weights, *_) = LAYERS[name]
        one: list[Any] = []
        found: list[Any] = []
        reinitialize(make(nnx.Rngs(0)), {kind: {weights: recording(one)}}, KEY)
        layers = nnx.vmap(make, in_axes=0)(nnx.Rngs(0).split(5))
        reinitialize(layers, {kind: {weights: recording(found)}}, KEY)
        assert found == 5 * one
        drawn = getattr(reinitialize(layers, {kind: {weights: init.normal()}}, KEY), weights)[...]
        assert len(np.unique(drawn)) == drawn.size
        last = nnx.vmap(make, in_axes=0, out_axes=-1)(nnx.Rngs(0).split(5))
        with pytest.raises(
            ValueError, match=rf"reinitialize: `{weights}` has shape .* 5\), but one {kind.__name__} has"
        ):
            reinitialize(last, {kind: {weights: init.normal()}}, KEY)

    def test_stacked_custom_layers_need_an_initializer_with_a_batch_axis(self) -> None:
        class Own(nnx.Module):
            def __init__(self, rngs: nnx.Rngs) -> None:
                self.kernel = nnx.Param(rngs.normal((40, 30)))

        layers = nnx.vmap(Own)(nnx.Rngs(0).split(3))
        found = reinitialize(layers, {Own: init.he_normal(batch_axis=0)}, KEY)
        # 3,600 numbers, within 5 standard errors.
        np.testing.assert_allclose(found.kernel[...].std(), np.sqrt(2 / 40), rtol=0.06)
        counted = reinitialize(layers, {Own: init.he_normal()}, KEY)
        np.testing.assert_allclose(counted.kernel[...].std(), np.sqrt(2 / 40 / 3), rtol=0.06)

    def test_a_stack_of_no_layers(self) -> None:
        stack = Stack([self.make(0)])
        stack.layer = jax.tree.map(lambda x: x[:0], stack.layer)
        found = reinitialize(stack, {nnx.Conv: init.ones}, KEY)
        assert found.layer["conv"].kernel.shape == (0, 5, 3, 4)


def test_it_works_inside_ensemble_create() -> None:
    def make(rngs: nnx.Rngs) -> Any:
        return reinitialize(nnx.Linear(4, 3, rngs=rngs), {nnx.Linear: init.he_normal()}, rngs())

    ensemble = Ensemble.create(make, 2, seed=0)
    assert (ensemble[0].kernel[...] != ensemble[1].kernel[...]).all()
    np.testing.assert_allclose(
        ensemble[1].kernel[...], make(nnx.Rngs(jax.random.fold_in(jax.random.key(0), 1))).kernel[...], rtol=1e-6
    )


def test_shapes_suffice() -> None:
    abstract = nnx.eval_shape(lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    found = reinitialize(abstract, {nnx.Linear: {"kernel": init.ones, "bias": init.zeros}}, KEY)
    assert found(jnp.ones((1, 4))).tolist() == [[4, 4, 4]]


def wrong(**results: Any) -> Any:
    return {nnx.Linear: {"bias": lambda key, shape, dtype: jnp.ones(**{"shape": shape, "dtype": dtype, **results})}}


class TestRefusals:
    """Invalid rules, keys and initializers."""

    @pytest.mark.parametrize(
        ("rules", "match"),
        [
            (
                {nnx.Conv: init.ones},
                "the rule for Conv matches no `kernel` or `embedding`; .*: LayerNorm with .*, Linear with .*, LinearG",
            ),
            (
                {nnx.Linear: {"kernl": init.ones}},
                "the rule for Linear matches no `kernl`; give rules for .* Linear with `bias`, `kernel`, LinearGeneral",
            ),
            ({nnx.Linear: {"kernel": init.ones, "a": init.ones}}, "the rule for Linear matches no `a`; give rules"),
            (
                {nnx.LayerNorm: init.ones},
                "the rule for LayerNorm matches no `kernel` or `embedding`; .*: LayerNorm with `bias`, `scale`",
            ),
            (
                {nnx.MultiHeadAttention: init.ones},
                "for MultiHeadAttention matches no .*; give rules for what the module has: .*LinearGeneral",
            ),
            (
                wrong(dtype=jnp.float16),
                r"of `linear\.bias` returned .* float16, but must return shape \(3,\) and dtype float32",
            ),
            (wrong(shape=(1, 3)), r"returned an array of shape \(1, 3\) .*, but must return shape \(3,\)"),
        ],
    )
    def test_mismatched_rules(self, rules: Any, match: str) -> None:
        with pytest.raises(ValueError, match=f"reinitialize: .*{match}"):
            reinitialize(self.model(), rules, KEY)

    @pytest.mark.parametrize(
        ("rules", "match"),
        [
            ([], r"rules must be a dict from kinds of modules to initializers, but got \[\]"),
            ({"Linear": init.ones}, "rules must name kinds of modules"),
            ({nnx.Linear: 0.5}, "the rule for Linear must be an initializer, or a dict from names .*, but got 0.5"),
            ({nnx.Linear: {"bias": 0.5}}, "the rule for Linear must be an initializer, or a dict from names"),
            ({nnx.Linear: {0: init.ones}}, "the rule for Linear must be an initializer, or a dict from names"),
            (
                {nnx.Linear: init.he_normal},
                r"returned <function .*, but must return shape .*; give an initializer, such as",
            ),
            ({nnx.Linear: init.zeros_init}, r"of `linear\.kernel` cannot be called with a key, a shape and a dtype"),
            ({nnx.Linear: lambda *_: 3.0}, "returned 3.0 of type float, but must return"),
        ],
    )
    def test_rules_of_a_wrong_type(self, rules: Any, match: str) -> None:
        with pytest.raises(TypeError, match=f"reinitialize: .*{match}"):
            reinitialize(self.model(), rules, KEY)

    @pytest.mark.parametrize("key", [0, None, jax.random.PRNGKey(0), jax.random.split(KEY, 2)])
    def test_invalid_keys(self, key: Any) -> None:
        with pytest.raises(
            TypeError, match=r"reinitialize: key must be one key, such as jax\.random\.key\(0\), but got"
        ):
            reinitialize(self.model(), {nnx.Linear: init.ones}, key)

    def test_other_models(self) -> None:
        with pytest.raises(TypeError, match="reinitialize: model must be a Flax NNX module"):
            reinitialize(jnp.ones(2), {nnx.Linear: init.ones}, KEY)
        ensemble = Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 2, seed=0)
        with pytest.raises(
            TypeError, match="reinitialize: model must be one module, but got an ensemble; use Ensemble.create"
        ):
            reinitialize(ensemble, {nnx.Linear: init.ones}, KEY)

    def test_duplicate_names(self) -> None:
        model = nnx.Dict(
            {"a.b": nnx.Linear(4, 3, rngs=nnx.Rngs(0)), "a": nnx.Dict(b=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))}
        )
        with pytest.raises(ValueError, match=r"reinitialize: two arrays of the model are called `a\.b\.bias`"):
            reinitialize(model, {nnx.Linear: init.ones}, KEY)

    def test_a_parameter_that_holds_a_pytree(self) -> None:
        class Tree(nnx.Module):
            def __init__(self) -> None:
                self.kernel = nnx.Param({"a": jnp.ones(2)})

        with pytest.raises(
            TypeError, match="reinitialize: `kernel` holds .* of type dict, but only one array can be drawn; leave"
        ):
            reinitialize(Tree(), {Tree: init.ones}, KEY)

    def model(self) -> Any:
        rngs = nnx.Rngs(0)
        return nnx.Dict(
            linear=nnx.Linear(4, 3, rngs=rngs),
            norm=nnx.LayerNorm(3, rngs=rngs),
            attention=nnx.MultiHeadAttention(2, 4, 8, decode=False, rngs=rngs),
        )
