"""The dtype in which a module computes, against a module constructed with it and its program."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Ensemble
from plurax.transforms import value_and_grad
from plurax.transforms._core.jaxpr import bodies
from plurax.transforms.modules import freeze, named_parameters, with_precision

HALF = jnp.bfloat16
X = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)


def rnn(cell: Any) -> Any:
    return lambda x: cell(x, initial_carry=cell.cell.initialize_carry((2, 4), nnx.Rngs(0)))


LAYERS: dict[str, Any] = {
    "Linear": lambda r, **d: nnx.Linear(4, 3, rngs=r, **d),
    "LinearGeneral": lambda r, **d: nnx.LinearGeneral((5, 4), (3, 2), axis=(-2, -1), rngs=r, **d),
    "Einsum": lambda r, **d: nnx.Einsum("nta,hab->nthb", (3, 4, 2), (3, 2), rngs=r, **d),
    "Conv": lambda r, **d: nnx.Conv(4, 3, (3,), rngs=r, **d),
    "ConvTranspose": lambda r, **d: nnx.ConvTranspose(4, 3, (3,), rngs=r, **d),
    "Embed": lambda r, **d: nnx.Embed(7, 3, rngs=r, **d),
    "BatchNorm": lambda r, **d: nnx.BatchNorm(4, rngs=r, **d),
    "LayerNorm": lambda r, **d: nnx.LayerNorm(4, rngs=r, **d),
    "RMSNorm": lambda r, **d: nnx.RMSNorm(4, rngs=r, **d),
    "GroupNorm": lambda r, **d: nnx.GroupNorm(4, num_groups=2, rngs=r, **d),
    "InstanceNorm": lambda r, **d: nnx.InstanceNorm(4, rngs=r, **d),
    "MultiHeadAttention": lambda r, **d: nnx.MultiHeadAttention(
        2, 4, 8, normalize_qk=True, decode=False, deterministic=True, rngs=r, **d
    ),
    "LSTM": lambda r, **d: nnx.RNN(nnx.LSTMCell(4, 3, rngs=r, **d)),
    "OptimizedLSTM": lambda r, **d: nnx.RNN(nnx.OptimizedLSTMCell(4, 3, rngs=r, **d)),
    "GRU": lambda r, **d: nnx.RNN(nnx.GRUCell(4, 3, rngs=r, **d)),
    "LoRA": lambda r, **d: nnx.LoRA(4, 2, 3, base_module=nnx.Linear(4, 3, rngs=r, **d), rngs=r, **d),
    "LoRALinear": lambda r, dtype=None: nnx.LoRALinear(4, 3, lora_rank=2, lora_dtype=dtype, dtype=dtype, rngs=r),
    "PReLU": lambda r, **d: nnx.PReLU(**d),
    "WeightNorm": lambda r, **d: nnx.WeightNorm(nnx.Linear(4, 3, rngs=r, **d), rngs=r),
    "SpectralNorm": lambda r, **d: nnx.SpectralNorm(nnx.Linear(4, 3, rngs=r, **d), rngs=r),
}


def program(model: Any, x: Any) -> Any:
    """Return the program of a call, including the resulting state."""
    definition, state = nnx.split(model)

    def call(state: Any, x: Any) -> Any:
        model = nnx.merge(definition, state)
        return (rnn(model) if isinstance(model, nnx.RNN) else model)(x), nnx.state(model)

    return jax.make_jaxpr(call)(state, x)


def products(jaxpr: Any) -> Iterator[tuple[Any, Any]]:
    """Return the operand dtypes of each matrix product and convolution."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            yield tuple(x.aval.dtype for x in eqn.invars)
        for body in bodies(eqn):
            yield from products(body)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_as_one_constructed_with_the_dtype(name: str, frozen: bool) -> None:
    model, expected = LAYERS[name](nnx.Rngs(0)), LAYERS[name](nnx.Rngs(0), dtype=HALF)
    if frozen and not name.endswith(("WeightNorm", "SpectralNorm")):
        model, expected = freeze(model, True), freeze(expected, True)
    found = with_precision(model, HALF, keep={})
    assert nnx.graphdef(found) == nnx.graphdef(expected)
    assert hash(nnx.graphdef(found)) == hash(nnx.graphdef(expected))
    x = np.zeros((2, 3), np.int32) if name == "Embed" else X
    assert str(program(found, x)) == str(program(expected, x))
    if name != "SpectralNorm":  # multiplies weights by each other in their own dtype
        operands = {dtype for pair in products(program(found, x).jaxpr) for dtype in pair}
        assert operands <= {jnp.dtype(HALF)}
    assert {x.dtype for x in named_parameters(found).values()} == {jnp.dtype(jnp.float32)}


class Network(nnx.Module):
    """Convolutions, batch norms and a dense layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1, self.norm1 = nnx.Conv(3, 8, (3, 3), use_bias=False, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.conv2, self.norm2 = nnx.Conv(8, 4, (3, 3), use_bias=False, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.dense = nnx.Linear(4 * 6 * 5, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return self.dense(x.reshape(len(x), -1))


IMAGES = np.random.default_rng(1).normal(size=(4, 6, 5, 3)).astype(np.float32)
LABELS = np.array([1, 7, 0, 3])


def loss(model: Any, x: Any, y: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x).astype(jnp.float32), y).mean()


def test_everything_but_batch_norms_and_the_loss() -> None:
    model = Network(nnx.Rngs(0))
    mixed = with_precision(model, HALF)
    assert [*products(program(model, IMAGES).jaxpr)] == [(jnp.float32, jnp.float32)] * 3
    assert [*products(program(mixed, IMAGES).jaxpr)] == [(HALF, HALF)] * 3
    statistics = [eqn for eqn in program(mixed, IMAGES).jaxpr.eqns if eqn.primitive.name in ("rsqrt", "reduce_sum")]
    assert statistics
    assert {x.aval.dtype for eqn in statistics for x in eqn.invars} == {jnp.dtype(jnp.float32)}
    full, gradient = nnx.jit(value_and_grad(loss))(model, IMAGES, LABELS)
    half, mixed_gradient = nnx.jit(value_and_grad(loss))(mixed, IMAGES, LABELS)
    assert half.dtype == jnp.float32
    assert 0 < abs(full - half) < 0.02 * full
    for (_, x), (_, y) in zip(nnx.to_flat_state(gradient), nnx.to_flat_state(mixed_gradient), strict=True):
        assert y.dtype == jnp.float32
        assert np.linalg.norm(x - y) <= 0.05 * np.linalg.norm(x) + 1e-5
    for norms in ((model.norm1, mixed.norm1), (model.norm2, mixed.norm2)):
        for x, y in zip(*((norm.mean[...], norm.var[...]) for norm in norms), strict=True):
            assert y.dtype == jnp.float32
            np.testing.assert_allclose(x, y, rtol=0.02, atol=1e-3)
    assert mixed(IMAGES).dtype == HALF


def test_without_keep_a_batch_norm_rounds_its_input_but_not_its_statistics() -> None:
    norms = [nnx.BatchNorm(4, momentum=0.0, rngs=nnx.Rngs(0)) for _ in range(3)]
    full, rounded, mixed = *norms[:2], with_precision(norms[2], HALF, keep={})
    far = X + 100  # bfloat16 has a spacing of 0.5 here
    for norm, x in ((full, far), (rounded, jnp.asarray(far, HALF).astype(jnp.float32)), (mixed, far)):
        norm(x)
        norm.eval()
    for name in ("mean", "var"):
        of_full, of_rounded, of_mixed = (getattr(norm, name)[...] for norm in (full, rounded, mixed))
        assert of_mixed.dtype == jnp.float32
        np.testing.assert_allclose(of_mixed, of_rounded, rtol=1e-4)
        assert np.abs(of_mixed - of_full).max() > 1e-3
        assert (of_mixed.astype(HALF).astype(jnp.float32) != of_mixed).any()
    assert np.abs(full(far) - mixed(far).astype(jnp.float32)).max() > 0.1


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Sequential(nnx.Linear(4, 3, rngs=rngs), nnx.LayerNorm(3, rngs=rngs))


class BigHead(Head):
    pass


def told(model: Any) -> dict[str, str]:
    """Return the dtypes of the layers that have one."""
    found = {".".join(map(str, path)): getattr(x, "dtype", None) for path, x in nnx.iter_modules(model)}
    return {name: jnp.dtype(dtype).name for name, dtype in found.items() if dtype is not None}


def both(linear: str, norm: str) -> dict[str, str]:
    return {"inner.layers.0": linear, "inner.layers.1": norm}


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ({}, both("bfloat16", "bfloat16")),
        ({nnx.LayerNorm: jnp.float32}, both("bfloat16", "float32")),
        ({Head: "float32"}, both("float32", "float32")),
        ({nnx.Module: jnp.float16, Head: jnp.float32}, both("float16", "float16")),
        ({Head: jnp.float32, BigHead: jnp.float16}, both("float16", "float16")),
        ({Head: jnp.float32, nnx.Linear: jnp.bfloat16}, both("bfloat16", "float32")),
        ({Head: jnp.float32, nnx.LayerNorm: None}, {"inner.layers.0": "float32"}),
        ({BigHead: None}, both("bfloat16", "bfloat16")),
        ({nnx.Linear: None, nnx.LayerNorm: None}, {}),
        ({nnx.Conv: jnp.float32}, both("bfloat16", "bfloat16")),
    ],
)
def test_keep_uses_the_innermost_module_and_the_nearest_class(keep: Any, expected: dict[str, str]) -> None:
    assert told(with_precision(BigHead(nnx.Rngs(0)), "bfloat16", keep=keep)) == expected


def test_the_argument_is_unchanged() -> None:
    model = Network(nnx.Rngs(0))
    definition = nnx.graphdef(model)
    mixed = with_precision(model, HALF)
    assert nnx.graphdef(model) == definition
    assert mixed.dense.kernel is not model.dense.kernel
    assert mixed.dense.kernel[...] is model.dense.kernel[...]
    assert told(with_precision(mixed, jnp.float32)) == dict.fromkeys(told(mixed), "float32")


def test_an_ensemble_computes_in_the_dtype_too() -> None:
    ensemble = Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 2, seed=0)
    assert with_precision(ensemble, HALF)(X).dtype == HALF
    assert ensemble(X).dtype == jnp.float32


class Own(nnx.Module):
    """A module with parameters and a sublayer."""

    def __init__(self, value: Any = 1.0, **attributes: Any) -> None:
        self.scales, self.linear = nnx.List([nnx.Param(jnp.full(4, value))]), nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        for name, attribute in attributes.items():
            setattr(self, name, attribute)


class ReadOnly(Own):
    @property
    def dtype(self) -> Any:
        return self.scales[0].dtype


class ByDefault(Own):
    dtype: Any = None


class TestParametersOfItsOwn:
    """A module with parameters needs a `dtype` attribute, or an entry in `keep`."""

    @pytest.mark.parametrize("model", [Own(), ReadOnly(), freeze(Own(), "scales"), Own(dtype="int32"), Own(dtype=3)])
    def test_without_a_dtype_it_is_refused(self, model: Any) -> None:
        kind = type(model).__name__
        match = (
            rf"`scales\.0` of shape \(4,\) .* class {kind}, which has no attribute `dtype` .* keep=\{{{kind}: None\}}"
        )
        with pytest.raises(ValueError, match=match):
            with_precision(model, HALF)
        found = with_precision(model, HALF, keep={type(model): None})
        assert found.linear.dtype == HALF

    @pytest.mark.parametrize("model", [Own(dtype=None), Own(dtype=jnp.float32), Own(dtype="float32"), ByDefault()])
    def test_a_dtype_is_set(self, model: Any) -> None:
        found = with_precision(model, HALF)
        assert found.dtype is HALF
        assert found.linear.dtype is HALF

    def test_complex_ones_are_refused(self) -> None:
        match = r"with_precision: `scales\.0` of shape \(4,\) is a parameter of a module of class Own and is complex"
        with pytest.raises(ValueError, match=match):
            with_precision(Own(1j, dtype=None), HALF)
        found: Any = with_precision(Own(1j, dtype=None), HALF, keep={Own: None})
        assert found.dtype is None

    def test_integers_need_no_dtype(self) -> None:
        assert with_precision(Own(2), HALF).linear.dtype is HALF

    def test_parameters_in_a_container_belong_to_it(self) -> None:
        with pytest.raises(ValueError, match=r"`w` of shape \(2,\) .* class Dict, which has no attribute"):
            with_precision(nnx.Dict(w=nnx.Param(jnp.ones(2))), HALF)


class TestSelections:
    """`where` says which modules change, and `rules` what becomes of those that no attribute changes."""

    @pytest.mark.parametrize("where", ["linear", nnx.Linear, nnx.Not(Own), lambda path, _: path == ("linear",)])
    def test_only_what_where_selects_changes(self, where: Any) -> None:
        model: Any = nnx.Dict(own=Own(), linear=nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
        found = with_precision(model, HALF, where=where)
        assert found.linear.dtype is HALF
        assert (found.own.linear.dtype is HALF) == (where is nnx.Linear)

    def test_a_rule_replaces_a_module_with_all_that_is_in_it(self) -> None:
        model: Any = nnx.Dict(own=Own(), linear=nnx.Linear(4, 3, rngs=nnx.Rngs(0)))

        def halved(own: Any) -> Any:
            own.scales[0] = nnx.Param(own.scales[0][...].astype(HALF))
            return own

        found: Any = with_precision(model, HALF, rules={Own: halved})
        assert (found.own.scales[0].dtype, model.own.scales[0].dtype) == (HALF, jnp.float32)
        assert found.own.linear.dtype is None
        assert found.linear.dtype is HALF
        ensemble = Ensemble.create(lambda _: Own(), 2, seed=0)
        assert with_precision(ensemble, HALF, rules={nnx.Module: halved})[1].scales[0].dtype == HALF

    def test_what_does_nothing_is_refused(self) -> None:
        model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="with_precision: where selects no module whose attribute `dtype`"):
            with_precision(model, HALF, where="encoder")
        with pytest.raises(ValueError, match="with_precision: rules has a function for Conv, but the model has none"):
            with_precision(model, HALF, rules={nnx.Conv: lambda layer: layer})
        with pytest.raises(
            TypeError, match=r"with_precision: rules\[Linear\] must be a function of a layer, but got 3"
        ):
            with_precision(model, HALF, rules={nnx.Linear: 3})  # type: ignore[dict-item]
        with pytest.raises(
            TypeError, match=r"with_precision: rules\[Linear\] must return a layer, but it returned None"
        ):
            with_precision(model, HALF, rules={nnx.Linear: lambda _: None})


def test_a_norm_of_weights_does_not_round_them() -> None:
    mixed: Any = with_precision(nnx.WeightNorm(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)), HALF)
    assert mixed(X).dtype == HALF
    assert mixed.layer_instance.kernel.dtype == jnp.float32
    assert (mixed.layer_instance.kernel[...].astype(HALF) != mixed.layer_instance.kernel[...]).any()


def test_a_shared_layer_in_two_dtypes_is_refused() -> None:
    model: Any = BigHead(nnx.Rngs(0))
    model.again = model.inner.layers[0]
    outer = nnx.Dict(head=model, again=model.inner)
    match = "is shared by layers, for which keep gives bfloat16 and float32; name Linear in keep too"
    with pytest.raises(ValueError, match=match):
        with_precision(outer, HALF, keep={Head: jnp.float32})
    named = with_precision(outer, HALF, keep={Head: jnp.float32, nnx.Linear: jnp.float16, nnx.LayerNorm: jnp.float16})
    assert named.head.again.dtype == jnp.float16
    assert named.head.again is named.again.layers[0]


@pytest.mark.parametrize("dtype", [None, jnp.int32, "bool", "bfloat17", jnp.complex64, 3, X])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"with_precision: dtype must be a floating-point dtype, but got"):
        with_precision(model, dtype)
    if dtype is not None:
        with pytest.raises(TypeError, match=r"with_precision: keep\[Linear\] must be a floating-point dtype"):
            with_precision(model, HALF, keep={nnx.Linear: dtype})


def test_float64_needs_x64() -> None:
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="with_precision: dtype is float64, which needs jax_enable_x64; enable it"):
        with_precision(model, jnp.float64)
    with jax.enable_x64(True):
        assert with_precision(model, "float64")(X).dtype == jnp.float64


@pytest.mark.parametrize(
    ("keep", "match"),
    [
        ([nnx.BatchNorm], "keep must be a dict from kinds of modules to dtypes, but got"),
        (None, "keep must be a dict from kinds of modules to dtypes, but got None"),
        ({"BatchNorm": jnp.float32}, r"keep must name kinds of modules, such as nnx\.Conv, but got 'BatchNorm'"),
        ({nnx.BatchStat: jnp.float32}, "keep must name kinds of modules"),
    ],
)
def test_invalid_values_of_keep(keep: Any, match: str) -> None:
    with pytest.raises(TypeError, match=f"with_precision: {match}"):
        with_precision(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), HALF, keep=keep)


def test_non_modules_are_refused() -> None:
    with pytest.raises(TypeError, match="with_precision: model must be a Flax NNX module"):
        with_precision(jnp.ones(2), HALF)
