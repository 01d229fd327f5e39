"""Folded functions against the original functions."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from plurax.transforms.program import fold_bn

KEY = jax.random.key(0)
LAYOUTS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype))


def norm(seed: int, *channels: int, shift: bool = True) -> dict[str, jax.Array]:
    """Return parameters and statistics of a batch norm; without `shift`, mean and bias are zero."""
    draw = np.random.default_rng(seed).uniform
    ranges = {"mean": (-1, 1), "var": (0.5, 2), "scale": (0.5, 2), "bias": (-1, 1)}
    zero = () if shift else ("mean", "bias")
    values = {name: draw(*ends, channels) * (name not in zero) for name, ends in ranges.items()}
    return {name: jnp.asarray(value.astype(np.float32)) for name, value in values.items()}


def bn(p: dict[str, jax.Array], x: jax.Array, axis: int = -1) -> jax.Array:
    shape = [1] * x.ndim
    shape[axis] = -1
    mean, var, scale, bias = (p[name].reshape(shape) for name in ("mean", "var", "scale", "bias"))
    return (x - mean) * (lax.rsqrt(var + 1e-5) * scale) + bias


def batch_bn(p: dict[str, jax.Array], x: jax.Array, axes: tuple[int, ...] = (-1,)) -> jax.Array:
    """Normalize with statistics over all axes except `axes`: training mode, if these are the channels."""
    kept = [axis % x.ndim for axis in axes]
    over = tuple(i for i in range(x.ndim) if i not in kept)
    shape = [n if i in kept else 1 for i, n in enumerate(x.shape)]
    normalized = (x - x.mean(over, keepdims=True)) * lax.rsqrt(x.var(over, keepdims=True) + 1e-5)
    return normalized * p["scale"].reshape(shape) + p["bias"].reshape(shape)


def conv(x: jax.Array, kernel: jax.Array, padding: Any = "SAME", **settings: Any) -> jax.Array:
    n = x.ndim - 2
    settings = {"window_strides": (1,) * n, "dimension_numbers": LAYOUTS[n], **settings}
    return lax.conv_general_dilated(x, kernel, padding=padding, **settings)


def assert_close(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    """Assert the same structure, shapes and dtypes, and close values, relative to the largest."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1.0, np.abs(y).max(initial=0)))


def of_arrays(fun: Callable[..., Any], params: Any) -> tuple[Callable[..., Any], Any]:
    """Return the function with the arrays of its parameters as first argument, for `jit`, and these arrays."""
    if isinstance(params, nnx.Module):
        graphdef, state = nnx.split(params)
        return lambda state, *args: fun(nnx.merge(graphdef, state), *args), state
    arrays, rest = eqx.partition(params, eqx.is_array)
    return lambda arrays, *args: fun(eqx.combine(arrays, rest), *args), arrays


def folds(
    fun: Callable[..., Any], params: Any, *args: Any, folded: int, kept: int = 0, tolerance: float = 1e-5
) -> tuple[Callable[..., Any], dict[str, jax.Array], Any]:
    """Fold, and compare with the original function on a batch with one more example."""
    result = new, new_params, report = fold_bn(fun, params, *args)
    assert (len(report.folded), len(report.kept)) == (folded, kept), str(report)
    more = jax.tree.map(lambda x: jnp.asarray(np.concatenate([x, np.cos(x[:1], dtype=x.dtype)])), args)
    as_it_was, arrays = of_arrays(fun, params)
    both = jax.jit(lambda new_params, arrays, *more: (new(new_params, *more), as_it_was(arrays, *more)))
    assert_close(*both(new_params, arrays, *more), tolerance=tolerance)
    return result


def kept_because(fun: Callable[..., Any], params: Any, *args: Any) -> str:
    """Return the reason why the only candidate was kept."""
    _, _, report = folds(fun, params, *args, folded=0, kept=1)
    return report.kept[0].reason


def compiled(fun: Callable[..., Any], *args: Any) -> tuple[Any, str, float]:
    """Return the output, the compiled program, and the bytes that it accesses."""
    program: Any = jax.jit(fun).lower(*args).compile()
    return program(*args), program.as_text(), program.cost_analysis()["bytes accessed"]


def assert_leaner(fun: Callable[..., Any], params: Any, new: Callable[..., Any], new_params: Any, x: jax.Array) -> None:
    """Assert the same results, without a norm and with fewer bytes accessed."""
    as_it_was, arrays = of_arrays(fun, params)
    (old_out, old_text, old_bytes), (out, text, size) = compiled(as_it_was, arrays, x), compiled(new, new_params, x)
    assert_close(out, old_out)
    assert ("sqrt" in old_text, "sqrt" in text) == (True, False)
    assert size < old_bytes


def test_a_wrong_value_a_dtype_and_a_count_fail() -> None:
    x = normal(0, 2, 3)
    for wrong in (x.at[1, 2].add(1e-3), x.astype(jnp.bfloat16), x[None], (x,)):
        with pytest.raises(AssertionError):
            assert_close(wrong, x)
    with pytest.raises(AssertionError, match="folded 1, kept 0"):
        folds(lambda p, x: bn(p["bn"], x @ p["w"]), {"w": normal(1, 3, 5), "bn": norm(2, 5)}, x, folded=2)


# ---- The model of PyTorch's tutorial: a norm after each of three convolutions, one nested and one wrapped


class WrappedNNX(nnx.Module):
    def __init__(self, features: int, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


class NNX(nnx.Module):
    def __init__(self, features: int, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(features, features, (1, 1), rngs=rngs)
        self.bn1 = nnx.BatchNorm(features, rngs=rngs)
        self.conv2 = nnx.Conv(features, features, (1, 1), rngs=rngs)
        inner = nnx.Conv(features, features, (1, 1), rngs=rngs)
        self.nested = nnx.Sequential(nnx.BatchNorm(features, rngs=rngs), inner)
        self.wrapped = WrappedNNX(features, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.wrapped(self.nested(self.conv2(self.bn1(self.conv1(x)))))


class WrappedLinen(nn.Module):
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.BatchNorm(use_running_average=not self.train)(x)


class Linen(nn.Module):
    features: int
    train: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = WrappedLinen(self.train)(nn.Conv(self.features, (1, 1))(x))
        norm = nn.BatchNorm(use_running_average=not self.train)
        x = nn.Sequential([norm, nn.Conv(self.features, (1, 1))])(nn.Conv(self.features, (1, 1))(x))
        return WrappedLinen(self.train)(x)


class Equinox(eqx.Module):
    convs: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.BatchNorm]
    nested: eqx.nn.Sequential

    def __init__(self, features: int, key: jax.Array) -> None:
        make = lambda key: eqx.nn.Conv2d(features, features, 1, key=key)
        norms = [eqx.nn.BatchNorm(features, "batch", mode="batch") for _ in range(3)]
        one, two, three = map(make, jax.random.split(key, 3))
        self.convs, self.norms = [one, two], norms[:2]
        self.nested = eqx.nn.Sequential([norms[2], three])

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
        x, state = self.norms[0](self.convs[0](x), state)
        x, state = self.nested(self.convs[1](x), state)
        return self.norms[1](x, state)


def in_nnx(features: int, train: bool = False) -> tuple[Callable[..., Any], Any]:
    model = NNX(features, nnx.Rngs(0))
    norms = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.BatchNorm)]
    for i, node in enumerate(norms):
        nnx.update(node, norm(i, features))
    model.train() if train else model.eval()
    return lambda model, x: model(x), model


def in_linen(features: int, train: bool = False) -> tuple[Callable[..., Any], Any]:
    variables = Linen(features).init(KEY, jnp.ones((1, 2, 3, features)))
    leaves = jax.tree.leaves(variables["batch_stats"])
    drawn = [norm(i, features)["var"] for i, _ in enumerate(leaves)]
    statistics = jax.tree.unflatten(jax.tree.structure(variables["batch_stats"]), drawn)
    model = Linen(features, train)
    fun = lambda v, x: model.apply(v, x, mutable=["batch_stats"])[0] if train else model.apply(v, x)
    return fun, {**variables, "batch_stats": statistics}


def in_equinox(features: int, train: bool = False) -> tuple[Callable[..., Any], Any]:
    model, state = eqx.nn.make_with_state(Equinox)(features, KEY)

    def apply(pair: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        model, state = pair
        mapped = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, state = mapped(jnp.moveaxis(x, -1, 1), state)
        return out, state

    _, state = apply((model, state), normal(5, 4, 2, 3, features))
    model = eqx.nn.inference_mode(model, not train)
    return lambda pair, x: apply(pair, x)[0], (model, state)


def in_functions(features: int, train: bool = False) -> tuple[Callable[..., Any], Any]:
    params: dict[str, Any] = {f"w{i}": normal(i, 1, 1, features, features) for i in range(3)}
    params |= {f"n{i}": norm(i, features) for i in range(3)}
    normalize = batch_bn if train else bn

    def fun(p: Any, x: jax.Array) -> jax.Array:
        for i in range(3):
            x = normalize(p[f"n{i}"], conv(x, p[f"w{i}"]))
        return x

    return fun, params


LIBRARIES = [in_nnx, in_linen, in_equinox, in_functions]


@pytest.mark.smoke
@pytest.mark.parametrize("features", [1, 3])
@pytest.mark.parametrize("library", LIBRARIES)
def test_all_norms_of_the_tutorial_fold(library: Callable[..., Any], features: int) -> None:
    fun, params = library(features)
    x = normal(1, 4, 8, 6, features)
    new, new_params, report = folds(fun, params, x, folded=3)
    assert {row.what for row in report.folded} == {"batch norm"}
    assert len(new_params) == 6
    assert_leaner(fun, params, new, new_params, x)


@pytest.mark.parametrize("library", LIBRARIES)
def test_training_mode_is_not_folded_and_the_remedy_is_named(library: Callable[..., Any]) -> None:
    fun, params = library(3, train=True)
    x = normal(1, 4, 5, 6, 3)
    if library is in_nnx:  # its statistics would change
        with pytest.raises(ValueError, match=r"fold_bn: fun changes `bn1\.\w+` .* training; call model\.eval\(\)"):
            fold_bn(fun, params, x)
        return
    new, new_params, report = fold_bn(fun, params, x)
    assert_close(new(new_params, x), fun(params, x))
    assert {row.what for row in report.folded + report.kept} == {"per-channel scale"}
    assert report.kept
    for row in report.kept:
        assert "batch norm in training mode, use model.eval() in Flax NNX, use_running_average=True" in row.reason


def test_new_parameters_keep_the_names_of_the_old() -> None:
    fun, model = in_nnx(3)
    _, params, report = fold_bn(fun, model, normal(1, 4, 8, 6, 3))
    convs = ("conv1", "conv2", "nested.layers.1")
    assert list(params) == [f"{name}.{part}" for name in convs for part in ("bias", "kernel")]
    assert [(row.parameters, row.kernel) for row in report.folded] == [
        ("bn1", "conv1.kernel"),
        ("nested.layers.0", "conv2.kernel"),
        ("wrapped.norm", "nested.layers.1.kernel"),
    ]


# ---- After a product


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"padding": "VALID", "window_strides": 2},
        {"rhs_dilation": 2, "feature_group_count": 2},
        {"lhs_dilation": 2, "padding": [(2, 1)]},
    ],
)
def test_a_norm_after_any_convolution_folds(n: int, settings: dict[str, Any]) -> None:
    spread = ("window_strides", "rhs_dilation", "lhs_dilation")
    settings = {k: (v,) * n if k in spread else v * n if isinstance(v, list) else v for k, v in settings.items()}
    inputs = 4 // settings.get("feature_group_count", 1)
    params: dict[str, Any] = {"w": normal(1, *(3, 2, 3)[:n], inputs, 6), "b": normal(2, 6), "bn": norm(3, 6)}
    x = normal(4, 2, *(7, 6, 5)[:n], 4)
    _, new_params, _ = folds(
        lambda p, x: jax.nn.relu(bn(p["bn"], conv(x, p["w"], **settings) + p["b"])), params, x, folded=1
    )
    assert {name: value.shape for name, value in new_params.items()} == {"b": (6,), "w": params["w"].shape}


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["SAME", "VALID", "CIRCULAR"])
def test_norms_after_modules_fold(padding: str) -> None:
    # A transposed convolution with circular padding sums parts of its output.
    kept = int(padding == "CIRCULAR")

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up = nnx.ConvTranspose(3, 4, (2, 3), (2, 1), padding=padding, use_bias=False, rngs=rngs)
            self.down = nnx.Conv(4, 6, (3, 2), (1, 2), padding=padding, feature_group_count=2, rngs=rngs)
            self.dense = nnx.LinearGeneral(6, (2, 5), rngs=rngs)
            self.norms = nnx.List([nnx.BatchNorm(n, use_running_average=True, rngs=rngs) for n in (4, 6, 5)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer, norm in zip((self.up, self.down, self.dense), self.norms, strict=True):
                x = jax.nn.relu(norm(layer(x)))
            return x

    model = Model(nnx.Rngs(0))
    for i, n in enumerate((4, 6, 5)):
        nnx.update(model.norms[i], norm(i, n))
    _, params, _ = folds(lambda model, x: model(x), model, normal(1, 2, 5, 7, 3), folded=3 - kept, kept=kept)
    assert ("up.shift" in params) == (not kept)
    assert params["dense.bias"].shape == (2, 5)


@pytest.mark.parametrize(
    ("fun", "shapes"),
    [
        (lambda p, x: -(p["t"] - (x @ p["w"]) / (3 + p["s"])), {"w": (4, 6), "t": (6,), "s": (6,)}),
        (lambda p, x: 0.5 * (x @ p["w"]) * p["s"] * 3, {"w": (4, 6), "s": (6,)}),
        (lambda p, x: (p["w"] @ x.T) * p["s"][:, None], {"w": (6, 4), "s": (6,)}),
        (lambda p, x: (x @ p["w"]) * p["s"], {"w": (4, 6), "s": ()}),
        (lambda p, x: (x @ p["w"]) * jax.nn.softplus(p["s"]), {"w": (4, 6), "s": (6,)}),
        (lambda p, x: jnp.einsum("bc,chd->bhd", x, p["w"]) * p["s"] + p["t"], {"w": (4, 2, 3), "s": (2, 3), "t": (3,)}),
        (lambda p, x: jnp.einsum("bc,chd->hbd", x, p["w"]) * p["s"][:, None], {"w": (4, 2, 3), "s": (2, 3)}),
        (lambda p, x: jnp.einsum("bc,nc->nb", x, p["w"]).T.reshape(-1, 2, 3) * p["s"], {"w": (6, 4), "s": (2, 3)}),
        (lambda p, x: (x @ p["w"]).reshape(-1, 2, 3) * p["s"], {"w": (4, 6), "s": (3,)}),
        (lambda p, x: jnp.broadcast_to((x @ p["w"])[:, None], (len(x), 5, 6)) * p["s"], {"w": (4, 6), "s": (6,)}),
        (lambda p, x: jax.jit(jnp.multiply)(jax.checkpoint(jnp.dot)(x, p["w"]), p["s"]), {"w": (4, 6), "s": (6,)}),
        (lambda p, x: jax.vmap(lambda x: (x @ p["w"]) * p["s"])(x), {"w": (4, 6), "s": (6,)}),
        (
            lambda p, x: jax.vmap(lambda p, x: (x @ p["w"]) * p["s"] + p["t"], (0, None))(p, x).mean(0),
            {"w": (3, 4, 6), "s": (3, 6), "t": (3, 6)},
        ),
    ],
)
def test_a_scale_after_a_dense_product_folds(fun: Callable[..., Any], shapes: dict[str, tuple[int, ...]]) -> None:
    params = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    _, new_params, report = folds(fun, params, normal(5, 2, 4), folded=1)
    assert report.folded[0].what == "per-channel scale"
    assert "s" not in new_params


def test_norms_of_mapped_models_fold_into_grouped_convolutions() -> None:
    params = {"w": normal(1, 3, 2, 3, 4, 6), "v": normal(2, 3, 2, 2, 6, 5), "m": norm(3, 3, 6), "n": norm(4, 3, 6)}

    def member(p: Any, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(bn(p["m"], conv(x, p["w"])))
        return conv(bn(p["n"], jnp.sin(x)), p["v"], "VALID")

    def fun(p: Any, x: jax.Array) -> jax.Array:
        return jax.vmap(member, (0, None), 1)(p, x)

    _, new_params, _ = folds(fun, params, normal(5, 2, 4, 5, 4), folded=2)
    assert sorted(new_params) == ["shift", "shift_2", "v", "w"]


def test_a_shared_kernel_becomes_two() -> None:
    params = {"w": normal(1, 3, 2, 4, 4), "m": norm(2, 4), "n": norm(3, 4)}
    fun = lambda p, x: bn(p["n"], conv(jnp.tanh(bn(p["m"], conv(x, p["w"]))), p["w"]))
    _, new_params, _ = folds(fun, params, normal(4, 2, 5, 6, 4), folded=2)
    assert sorted(new_params) == ["shift", "shift_2", "w", "w_2"]


def test_a_kernel_with_other_uses_is_kept() -> None:
    params = {"w": normal(1, 4, 4), "bn": norm(2, 4)}
    _, new_params, _ = folds(lambda p, x: bn(p["bn"], x @ p["w"]) @ p["w"], params, normal(3, 2, 4), folded=1)
    assert sorted(new_params) == ["shift", "w", "w_2"]
    np.testing.assert_array_equal(new_params["w"], params["w"])


def test_computed_weights_of_a_module_are_folded() -> None:
    def fun(p: Any, x: jax.Array) -> jax.Array:
        kernel = p["v"] / jnp.linalg.norm(p["v"], axis=0) * p["g"]
        return bn(p["bn"], x @ kernel)

    params = {"v": normal(1, 4, 6), "g": normal(2, 6), "bn": norm(3, 6)}
    _, new_params, _ = folds(fun, params, normal(4, 2, 4), folded=1)
    assert sorted(new_params) == ["kernel", "shift"]


def test_constants_that_a_function_closes_over_are_folded() -> None:
    kernel, parts = normal(1, 4, 6), norm(2, 6)
    _, new_params, report = folds(lambda _, x: bn(parts, x @ kernel), {}, normal(3, 2, 4), folded=1)
    assert sorted(new_params) == ["kernel", "shift"]
    assert report.folded[0].parameters == ""


@pytest.mark.parametrize("statistics", [jnp.bfloat16, jnp.float32])
def test_low_precision_weights_keep_their_dtype_and_shifts_that_of_the_statistics(statistics: Any) -> None:
    def fun(p: Any, x: jax.Array) -> jax.Array:
        x = conv(x.astype(jnp.bfloat16), p["w"].astype(jnp.bfloat16)).astype(statistics)
        return bn(p["bn"], x).astype(jnp.bfloat16)

    params = {"w": normal(1, 2, 3, 4, 6), "bn": jax.tree.map(lambda x: x.astype(statistics), norm(2, 6))}
    _, new_params, _ = folds(fun, params, normal(3, 2, 7, 6, 4), folded=1, tolerance=2e-2)
    assert (new_params["w"].dtype, new_params["shift"].dtype) == (jnp.bfloat16, statistics)


def test_weights_of_64_bits_are_folded_to_their_precision() -> None:
    with jax.enable_x64(True):
        params = {
            "w": normal(1, 3, 2, 4, 6, dtype=np.float64),
            "bn": {k: v.astype(float) for k, v in norm(2, 6).items()},
        }
        fun = lambda p, x: bn(p["bn"], conv(x, p["w"]))
        _, new_params, _ = folds(fun, params, normal(3, 2, 7, 6, 4, dtype=np.float64), folded=1, tolerance=1e-13)
        assert {x.dtype for x in new_params.values()} == {jnp.dtype(np.float64)}


# ---- Before a product


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_norm_before_a_convolution_without_padding_folds(n: int, groups: int) -> None:
    params = {"w": normal(1, *(3, 2, 3)[:n], 4 // groups, 6), "b": normal(2, 6), "bn": norm(3, 4)}
    settings = {"window_strides": (2,) * n, "rhs_dilation": (1, 2, 1)[:n], "feature_group_count": groups}
    fun = lambda p, x: conv(bn(p["bn"], jnp.sin(x)), p["w"], "VALID", **settings) + p["b"]
    _, new_params, _ = folds(fun, params, normal(4, 2, *(7, 6, 5)[:n], 4), folded=1)
    assert "shift" in new_params


def test_a_norm_between_products_folds_backwards_and_one_after_an_activation_forwards() -> None:
    params = {"w": normal(1, 3, 4), "v": normal(2, 4, 5), "m": norm(3, 4), "n": norm(4, 4)}
    fun = lambda p, x: bn(p["n"], jax.nn.relu(bn(p["m"], x @ p["w"]))) @ p["v"]
    _, _, report = folds(fun, params, normal(5, 2, 3), folded=2)
    assert [(row.parameters, row.kernel) for row in report.folded] == [("m", "w"), ("n", "v")]


def test_a_norm_before_products_of_all_kinds_folds_into_each() -> None:
    params = {"bn": norm(1, 4), "w": normal(2, 4, 6), "v": normal(3, 5, 4), "u": normal(4, 3, 4, 2)}

    def fun(p: Any, x: jax.Array) -> Any:
        x = bn(p["bn"], jnp.sin(x))
        return x @ p["w"], jnp.einsum("oc,btc->bot", p["v"], x), jnp.einsum("btc,tcd->btd", x, p["u"])

    _, new_params, report = folds(fun, params, normal(5, 2, 3, 4), folded=1)
    assert report.folded[0].kernel == "w, v, u"
    assert new_params["shift_3"].shape == (3, 2)


def test_a_norm_folds_through_flattening() -> None:
    params = {"w": normal(1, 3, 2, 4, 2), "v": normal(2, 12, 3), "bn": norm(3, 12), "n": norm(4, 2)}
    fun = lambda p, x: bn(p["bn"], conv(x, p["w"]).reshape(-1, 12)) @ p["v"]
    folds(fun, params, normal(5, 2, 2, 3, 4), folded=1)
    fun = lambda p, x: bn(p["n"], jax.nn.relu(conv(x, p["w"]))).reshape(-1, 12) @ p["v"]
    folds(fun, params, normal(5, 2, 2, 3, 4), folded=1)
    fun = lambda p, x: jnp.einsum("buc,uco->bo", bn(p["bn"], jnp.sin(x)).reshape(-1, 3, 4), p["v"].reshape(3, 4, 3))
    folds(fun, params, normal(5, 2, 12), folded=1)


def test_zero_shifts_fold_into_padded_and_transposed_convolutions() -> None:
    params = {"w": normal(1, 3, 2, 4, 6), "bn": norm(2, 4, shift=False)}
    x = normal(3, 2, 7, 6, 4)
    _, new_params, _ = folds(lambda p, x: conv(bn(p["bn"], jnp.sin(x)), p["w"]), params, x, folded=1)
    assert sorted(new_params) == ["w"]
    folds(lambda p, x: lax.conv_transpose(bn(p["bn"], jnp.sin(x)), p["w"], (2, 1), "VALID"), params, x, folded=1)


def test_the_normalization_of_inputs_folds() -> None:
    mean, std = jnp.array([1.0, 2, 3]), jnp.array([2.0, 3, 4])
    fun = lambda p, x: conv((x / 255 - mean) / std, p["w"], "VALID")
    _, new_params, _ = folds(fun, {"w": normal(1, 3, 2, 3, 5)}, 255 * normal(2, 2, 7, 6, 3), folded=1)
    assert sorted(new_params) == ["shift", "w"]


# ---- Kept norms


IMAGE = normal(9, 2, 5, 6, 4)
PARAMS = {"w": normal(1, 3, 2, 4, 4), "b": normal(2, 4), "bn": norm(3, 4), "v": normal(4, 4, 4)}


@pytest.mark.parametrize(
    ("fun", "reason"),
    [
        (
            lambda p, x: (lambda y: jnp.sin(bn(p["bn"], y)) + y)(conv(x, p["w"])),
            "its input has several uses: `add` and `sub`",
        ),
        (
            lambda p, x: (lambda y: (bn(p["bn"], y), y))(conv(x, p["w"])),
            "its input has several uses: `sub` and the output",
        ),
        (lambda p, x: bn(p["bn"], jax.nn.relu(conv(x, p["w"]))), "no convolution or dense product is next to it"),
        (lambda p, x: conv(bn(p["bn"], jnp.sin(x)), p["w"]), "after it pads with zeros, which its shift would change"),
        (
            lambda p, x: lax.conv_transpose(bn(p["bn"], jnp.sin(x)), p["w"], (2, 2), "VALID"),
            "after it pads with zeros, which its shift would change",
        ),
        (lambda p, x: (lambda y: y @ p["v"] + y)(bn(p["bn"], jnp.sin(x))), "its output is also used by `add`"),
        (
            lambda p, x: jnp.einsum("bhwc,bhwd->bcd", x, x) * p["b"],
            "the `dot_general` before it depend on data",
        ),
        (lambda p, x: jax.lax.scan(lambda c, _: (jnp.tanh(bn(p["bn"], c @ p["v"])), 0), x, length=2)[0], "a `scan`"),
        (lambda p, x: jax.lax.scan(lambda c, q: (jnp.tanh(c @ p["v"] * q), 0), x, p["v"])[0], "inside a `scan`"),
        (lambda p, x: lax.fori_loop(0, len(x), lambda _, c: jnp.tanh(bn(p["bn"], c @ p["v"])), x), "inside a `scan`"),
        (
            lambda p, x: lax.while_loop(lambda c: c.sum() < 9, lambda c: 1 + jnp.abs(c @ p["v"] * p["b"]), x),
            "inside a `while`",
        ),
        (lambda p, x: lax.cond(x[0, 0, 0, 0] > 0, lambda x: x @ p["v"] * p["b"], jnp.sin, x), "inside a `cond`"),
        (
            lambda p, x: bn(jax.tree.map(lambda x: jnp.tile(x, 30), p["bn"]), conv(x, p["w"]).reshape(-1, 120)),
            "varies within a channel of the product before it",
        ),
        (
            lambda p, x: (jnp.sin(x) * jnp.tile(p["b"], 2)[:6, None]) @ p["v"],
            "varies along axes over which the product after it does not sum",
        ),
        (lambda p, x: (x @ p["v"] - p["b"]) / (p["b"] - p["b"]), "would not be finite, or underflow in float32"),
        (lambda p, x: conv((jnp.sin(x) - p["b"]) / (p["b"] - p["b"]), p["w"]), "pads with zeros"),
        (lambda p, x: (x @ p["v"].astype(complex) * p["b"]).real, "complex numbers are not folded"),
    ],
)
def test_kept_norms_have_a_reason(fun: Callable[..., Any], reason: str) -> None:
    with np.errstate(all="ignore"):
        new, params, report = fold_bn(fun, PARAMS, IMAGE)
    assert len(report.folded) == 0
    assert [row for row in report.kept if reason in row.reason] == list(report.kept) != []
    np.testing.assert_allclose(new(params, IMAGE), jax.jit(fun)(PARAMS, IMAGE), 1e-5, 1e-5)


def test_weights_that_differ_within_the_batch_fold_no_norm() -> None:
    fun = lambda p, x: bn(p["bn"], conv(bn(p["bn"], jnp.sin(x)), p["w"], "VALID", batch_group_count=2))
    new, params, report = fold_bn(fun, PARAMS, IMAGE)
    assert_close(new(params, IMAGE), fun(PARAMS, IMAGE))
    assert len(report.folded) == 0
    no_product = "no convolution or dense product is next to it"
    differ = "the weights of the `conv_general_dilated` before it depend on data, or differ between parts of the batch"
    assert [row.reason for row in report.kept] == [no_product, differ]


def test_weights_that_their_dtype_cannot_hold_are_kept() -> None:
    half = lambda x: x.astype(jnp.float16)
    fun = lambda p, x: (half(x) @ half(p["w"])).astype(jnp.float32) * p["s"]
    params = {"w": normal(1, 4, 3), "s": jnp.array([1e-7, 1.0, 2.0])}
    assert "underflow in float16" in kept_because(fun, params, normal(2, 2, 4))


def test_a_product_with_a_custom_derivative_rule_is_unchanged() -> None:
    @jax.custom_jvp
    def dense(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    dense.defjvps(lambda t, _, x, w: 7 * (t @ w), None)
    fun = lambda p, x: bn(p["bn"], dense(x, p["v"]))
    assert kept_because(fun, PARAMS, IMAGE) == "the product before it is inside a `custom_jvp_call`"
    new, params, _ = fold_bn(fun, PARAMS, IMAGE)
    gradient = lambda fun, params: jax.grad(lambda x: fun(params, x).sum())(IMAGE)
    assert_close(gradient(new, params), gradient(fun, PARAMS))


@pytest.mark.parametrize("dtype", [int, jnp.uint8])
def test_integers_are_not_candidates(dtype: Any) -> None:
    params = {"w": jnp.arange(12, dtype=dtype).reshape(4, 3), "s": jnp.arange(3, dtype=dtype)}
    folds(lambda p, x: (x.astype(dtype) @ p["w"]) * p["s"], params, normal(1, 2, 4), folded=0)


def test_a_stopped_gradient_is_kept() -> None:
    fun = lambda p, x: lax.stop_gradient(x @ p["v"]) * p["b"]
    assert "no convolution or dense product" in kept_because(fun, PARAMS, IMAGE)
    new, params, _ = fold_bn(fun, PARAMS, IMAGE)
    np.testing.assert_array_equal(jax.grad(lambda x: new(params, x).sum())(IMAGE), 0)


def test_values_that_are_printed_are_used(capfd: pytest.CaptureFixture[str]) -> None:
    def fun(p: Any, x: jax.Array) -> jax.Array:
        y = x @ p["v"]
        jax.debug.print("largest {}", y.max())
        return bn(p["bn"], y)

    assert "has several uses: `reduce_max` and `sub`" in kept_because(fun, PARAMS, IMAGE)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("largest") == 2


def test_gates_and_residuals_end_a_chain() -> None:
    def fun(p: Any, x: jax.Array) -> jax.Array:
        y = bn(p["bn"], conv(x, p["w"]))
        gate = jax.nn.sigmoid(y.mean((1, 2)) @ p["v"] * p["b"])
        return y * gate[:, None, None] + x

    folds(fun, PARAMS, IMAGE, folded=2)


# ---- Batch statistics and instance statistics


@pytest.mark.parametrize(
    "fun",
    [
        lambda p, x: jax.nn.relu(batch_bn(p["bn"], conv(x, p["w"]))),
        lambda p, x: batch_bn(p["bn"], conv(x[:1], p["w"])),
        lambda p, x: conv(jax.nn.relu(batch_bn(p["bn"], x)), p["w"]),
        lambda p, x: batch_bn(p["bn"], nn.max_pool(jax.nn.relu(conv(x, p["w"])), (2, 2))),
        lambda p, x: batch_bn(p["bn"], conv(x, p["w"]).reshape(-1, 4)),
        lambda p, x: batch_bn(p["bn"], conv(x, p["w"]).transpose(3, 0, 1, 2), (0,)),
        lambda p, x: batch_bn(p["bn"], p["v"] @ x[:, 0, 0].T, (0,)),
        lambda p, x: (lambda y: (y - y.mean(0)) / (y.std(0) + 1e-3))(x[:, 0, 0] @ p["v"]),
        lambda p, x: lax.scan(lambda c, _: (batch_bn(p["bn"], c @ p["v"]), 0), x, length=2)[0],
    ],
)
def test_statistics_of_the_batch_are_not_folded(fun: Callable[..., Any]) -> None:
    new, params, report = fold_bn(fun, PARAMS, IMAGE)
    assert_close(new(params, IMAGE), fun(PARAMS, IMAGE))
    assert report.folded == ()
    assert all("training mode" in row.reason or "inside a `scan`" in row.reason for row in report.kept)


class Norms(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(4, 6, (3, 2), rngs=rngs)
        self.norms = nnx.List([
            nnx.GroupNorm(6, num_groups=2, rngs=rngs),
            nnx.InstanceNorm(6, rngs=rngs),
            nnx.LayerNorm(6, rngs=rngs),
            nnx.RMSNorm(6, rngs=rngs),
        ])  # fmt: skip
        self.attention = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.conv(x)
        for norm in self.norms:
            x = jax.nn.relu(norm(x))
        return self.attention(x.reshape(len(x), -1, 6))


def squeeze_and_excite(p: Any, x: jax.Array) -> jax.Array:
    x = conv(x, p["w"])
    return x * jax.nn.sigmoid(x.mean((1, 2)) @ p["v"])[:, None, None]


def response_norm(p: Any, x: jax.Array) -> jax.Array:
    x = conv(x, p["w"])
    size = jnp.linalg.norm(x, axis=(1, 2), keepdims=True)
    return x * (size / (size.mean(-1, keepdims=True) + 1e-6)) * p["b"] + x


def of_places(p: Any, x: jax.Array) -> jax.Array:
    """Instance norm of one example, without a batch axis."""
    return batch_bn(p["bn"], conv(x[None], p["w"])[0])


NO_BATCH = {
    "layer": lambda p, x: batch_bn(p["bn"], (x @ p["v"])[0, 0, :4], (0,)),
    "layer, inputs": lambda p, x: batch_bn(p["bn"], x[0, 0, :4], (0,)) @ p["v"],
    "layer, features first": lambda p, x: batch_bn(p["bn"], p["v"] @ x[0, 0, :4].T, (1,)),
    "layer, one example": lambda p, x: batch_bn({"scale": p["b"][:1], "bias": p["b"][1:2]}, (x @ p["v"])[0, 0, 0], ()),
    "instance": lambda p, x: batch_bn({"scale": p["v"][:2], "bias": p["v"][:2]}, conv(x, p["w"]), (0, 3)),
    "instance, one example": lambda p, x: of_places(p, x[0]),
    "instance, mapped": lambda p, x: jax.vmap(lambda x: of_places(p, x))(x),
    "gate": squeeze_and_excite,
    "response": response_norm,
    "length": lambda p, x: (lambda y: y / jnp.linalg.norm(y, axis=-1, keepdims=True))(x @ p["v"]),
    "pooling": lambda p, x: conv(x, p["w"]).mean((1, 2)) @ p["v"],
    "softmax": lambda p, x: jax.nn.log_softmax(x @ p["v"]).mean(),
}


@pytest.mark.parametrize("name", NO_BATCH)
def test_norms_of_examples_are_kept_as_norms_by_statistics_of_data(name: str) -> None:
    fun = NO_BATCH[name]
    new, params, report = fold_bn(fun, PARAMS, IMAGE)
    assert_close(new(params, IMAGE), fun(PARAMS, IMAGE))
    assert len(report.folded) == 0
    assert [row for row in report.kept if "no convolution" in row.reason or row.what == "batch norm"] == []


def test_a_batch_norm_of_gated_or_scaled_inputs_is_a_candidate() -> None:
    gated = lambda p, x: bn(p["bn"], squeeze_and_excite(p, x))
    assert "it scales a gate" in kept_because(gated, PARAMS, IMAGE)
    scaled = lambda p, x: (lambda y: bn(p["bn"], y) + y)(x * p["b"])
    _, _, report = fold_bn(scaled, PARAMS, IMAGE)
    assert [row.what for row in report.kept] == ["per-channel scale", "batch norm"]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_norms_of_modules_are_kept_as_norms_by_statistics_of_data(batch: int) -> None:
    model = Norms(nnx.Rngs(0))
    _, params, report = folds(lambda model, x: model(x), model, IMAGE[:batch], folded=0, kept=2)
    assert all("norm that uses statistics of the data" in row.reason for row in report.kept)
    assert len(params) == len(jax.tree.leaves(nnx.state(model, nnx.Param)))
    image = jnp.moveaxis(IMAGE, -1, 1)
    modules = [eqx.nn.GroupNorm(2, 4), eqx.nn.LayerNorm((4, 5, 6)), eqx.nn.GroupNorm(4, 4)]
    fun = lambda m, x: jax.vmap(eqx.nn.Sequential([m[0], eqx.nn.Lambda(jax.nn.relu), m[1], m[2]]))(x)
    _, _, report = fold_bn(fun, modules, image[:batch])
    assert (report.folded, {row.what for row in report.kept}) == ((), {"per-channel scale"})


# ---- The folded function


def test_the_folded_function_is_compiled_differentiated_and_mapped() -> None:
    fun = lambda p, x: jnp.tanh(bn(p["bn"], conv(jax.nn.relu(x), p["w"]) + p["b"]))
    new, params, _ = fold_bn(fun, PARAMS, IMAGE)
    loss = lambda fun: lambda p, x: (fun(p, x) ** 2).sum()
    assert_close(jax.jit(new)(params, IMAGE), fun(PARAMS, IMAGE))
    assert_close(jax.grad(loss(new), 1)(params, IMAGE), jax.grad(loss(fun), 1)(PARAMS, IMAGE))
    assert_close(jax.vmap(new, (None, 0))(params, IMAGE[:, None])[:, 0], fun(PARAMS, IMAGE))
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params)
    both = jax.vmap(new, (0, None))(stacked, IMAGE)
    assert_close(both[1], new(jax.tree.map(lambda x: 2 * x, params), IMAGE))

    def by_hand(p: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(conv(jax.nn.relu(x), p["w"]) + p["b"])

    assert_close(new(params, IMAGE), by_hand(params, IMAGE))
    assert_close(jax.grad(loss(new))(params, IMAGE), jax.grad(loss(by_hand))(params, IMAGE))


def test_other_arguments_may_be_modules_numbers_and_flags() -> None:
    def fun(p: Any, batch: Any, twice: bool, factor: float) -> Any:
        x = batch["dense"](batch["x"]) * factor
        return {"y": bn(p["bn"], x @ p["v"]), "twice": 2 * x if twice else x}

    batch = {"dense": nnx.Linear(3, 4, rngs=nnx.Rngs(0)), "x": normal(1, 2, 3)}
    new, params, report = fold_bn(fun, PARAMS, batch, True, 2.0)
    assert len(report.folded) == 1
    for twice, factor in ((True, 2.0), (False, 3.0)):
        assert_close(new(params, batch, twice, factor), fun(PARAMS, batch, twice, factor))


def test_shapes_suffice_as_an_example() -> None:
    fun = lambda p, x: bn(p["bn"], conv(x, p["w"]))
    new, params, _ = fold_bn(fun, PARAMS, jax.ShapeDtypeStruct(IMAGE.shape, IMAGE.dtype))
    assert_close(new(params, IMAGE), fun(PARAMS, IMAGE))


def test_a_program_is_traced_once_for_each_shape() -> None:
    traces = []

    def fun(p: Any, x: jax.Array) -> jax.Array:
        traces.append(x.shape)
        return bn(p["bn"], conv(x, p["w"]))

    new, params, _ = fold_bn(fun, PARAMS, IMAGE)
    for _ in range(3):
        new(params, IMAGE)
        new(params, IMAGE[:1])
    assert len(traces) == 3


def test_folding_works_inside_of_a_trace_if_the_parameters_are_known() -> None:
    def outer(x: jax.Array) -> jax.Array:
        new, params, report = fold_bn(lambda p, x: bn(p["bn"], conv(x, p["w"])), PARAMS, x)
        assert len(report.folded) == 1
        return new(params, x)

    assert_close(jax.jit(outer)(IMAGE), bn(PARAMS["bn"], conv(IMAGE, PARAMS["w"])))


def test_scopes_and_source_lines_of_the_user_are_kept() -> None:
    def fun(p: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("stem"):
            return jax.jit(lambda x: jnp.tanh(bn(p["bn"], conv(x, p["w"]))))(x)

    new, params, report = fold_bn(fun, PARAMS, IMAGE)
    assert report.folded[0].where.startswith("stem (test_fold_bn.py:")
    _, text, _ = compiled(new, params, IMAGE)
    assert "stem/conv_general_dilated" in text
    assert "test_fold_bn.py" in text


def test_the_repr_of_the_folded_function() -> None:
    def classify(params: Any, x: jax.Array) -> jax.Array:
        return x @ params["v"]

    new, _, report = fold_bn(classify, PARAMS, IMAGE)
    assert new.__name__ == "fold_bn(classify)"
    assert str(report) == "folded 0, kept 0"


def test_the_report_has_a_line_for_each() -> None:
    def fun(p: Any, x: jax.Array) -> jax.Array:
        x = bn(p["bn"], conv(x, p["w"]))
        return jax.nn.relu(x) * p["b"]

    _, _, report = fold_bn(fun, PARAMS, IMAGE)
    head, one, two = str(report).splitlines()
    assert head == "folded 1, kept 1"
    assert one.startswith("+ batch norm bn at test_fold_bn.py:")
    assert one.endswith(": into w")
    assert two.startswith("- per-channel scale b at test_fold_bn.py:")
    assert two.endswith(": no convolution or dense product is next to it")
    assert str(report.kept[0]).endswith(": no convolution or dense product is next to it")
    assert str(report.folded[0]).endswith(": into w")


# ---- Errors


def test_wrong_arguments_are_refused() -> None:
    fun = lambda p, x: bn(p["bn"], x @ p["v"])
    with pytest.raises(TypeError, match="fold_bn: fun must be a function"):
        fold_bn(3, PARAMS, IMAGE)
    with pytest.raises(TypeError, match="fold_bn: fun must take the parameters first, but got .*Linear.*; pass"):
        fold_bn(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), IMAGE)
    with pytest.raises(TypeError, match=r"`params\.b` has no value here; call fold_bn outside jax\.jit"):
        jax.jit(lambda p: fold_bn(fun, p, IMAGE)[1])(PARAMS)
    with pytest.raises(TypeError, match=r"`params\.b` has a shape, but no value; pass arrays"):
        fold_bn(fun, jax.eval_shape(lambda: PARAMS), IMAGE)


def test_dropout_that_draws_is_refused() -> None:
    model = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    with pytest.raises(ValueError, match=r"fun changes `layers\.1\.rngs\.count` of a module.*model\.eval\(\)"):
        fold_bn(lambda model, x: model(x), model, IMAGE)


def test_other_parameters_are_refused() -> None:
    new, params, _ = fold_bn(lambda p, x: bn(p["bn"], x @ p["v"]), PARAMS, IMAGE)
    with pytest.raises(TypeError, match="params must be the dict that fold_bn returned, but got"):
        new([1], IMAGE)
    with pytest.raises(ValueError, match=r"`shift` of params is nothing, but fold_bn returned \(\(4,\), .*float32"):
        new({"v": params["v"]}, IMAGE)
    with pytest.raises(ValueError, match="`bn` of params is .*, but fold_bn returned nothing; pass its"):
        new({**params, "bn": 1}, IMAGE)
    with pytest.raises(ValueError, match=r"`v` of params is \(\(4, 3\), .*, but fold_bn returned \(\(4, 4\), "):
        new({**params, "v": params["v"][:, :3]}, IMAGE)
    with pytest.raises(ValueError, match=r"`v` of params is .*bfloat16.*, but fold_bn returned .*float32"):
        new({**params, "v": params["v"].astype(jnp.bfloat16)}, IMAGE)


@pytest.mark.parametrize(
    "fun",
    [
        lambda p, x: x @ p["v"] * p["b"] / len(x),
        lambda p, x: x @ p["v"] * (p["b"] if len(x) == 2 else p["bn"]["scale"]),
        lambda p, x: x @ p["v"] * p["b"] if len(x) == 2 else x @ p["v"] + p["b"],
        lambda p, x: (lambda y: y * p["b"] if len(x) == 2 else y * p["b"] + y)(x @ p["v"]),
        lambda p, x: conv(jnp.sin(x) * p["b"] + (p["b"] - p["b"]), p["w"], "SAME" if len(x) == 2 else "VALID"),
        lambda p, x: x @ p["v"] * p["b"] + (0 if len(x) == 2 else jnp.sin(p["bn"]["bias"])),
    ],
)
def test_a_program_that_depends_on_the_shape_is_refused(fun: Callable[..., Any]) -> None:
    new, params, report = fold_bn(fun, PARAMS, IMAGE)
    assert len(report.folded) == 1
    assert_close(new(params, IMAGE), fun(PARAMS, IMAGE))
    with pytest.raises(ValueError, match="for these shapes, fun combines other parameters; call fold_bn with such"):
        new(params, IMAGE[:1])


# ---- Whole networks


class Block(nnx.Module):
    def __init__(self, inputs: int, features: int, stride: int, rngs: nnx.Rngs) -> None:
        steps = (stride, stride)
        self.conv1 = nnx.Conv(inputs, features, (3, 3), steps, use_bias=False, rngs=rngs)
        self.bn1 = nnx.BatchNorm(features, rngs=rngs)
        self.conv2 = nnx.Conv(features, features, (3, 3), use_bias=False, rngs=rngs)
        self.bn2 = nnx.BatchNorm(features, rngs=rngs)
        self.down = self.bn3 = nnx.data(None)
        if inputs != features:
            self.down = nnx.Conv(inputs, features, (1, 1), steps, use_bias=False, rngs=rngs)
            self.bn3 = nnx.BatchNorm(features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.bn2(self.conv2(jax.nn.relu(self.bn1(self.conv1(x)))))
        return jax.nn.relu(y + (x if self.down is None else self.bn3(self.down(x))))


class ResNet18(nnx.Module):
    def __init__(self, widths: tuple[int, ...], rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, widths[0], (7, 7), (2, 2), use_bias=False, rngs=rngs)
        self.bn = nnx.BatchNorm(widths[0], rngs=rngs)
        pairs = [(widths[max(i - 1, 0)], n, 1 if i == 0 else 2) for i, n in enumerate(widths)]
        blocks = [(a, b, s) for a, n, stride in pairs for a, b, s in ((a, n, stride), (n, n, 1))]
        self.blocks = nnx.List([Block(a, b, s, rngs) for a, b, s in blocks])
        self.head = nnx.Linear(widths[-1], 7, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(jax.nn.relu(self.bn(self.stem(x))), (3, 3), (2, 2), "SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


@pytest.mark.slow
def test_resnet18_is_folded_completely() -> None:
    model = ResNet18((4, 5, 6, 8), nnx.Rngs(0))
    norms = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.BatchNorm)]
    for i, node in enumerate(norms):
        nnx.update(node, norm(i, node.num_features))
    model.eval()
    fun = lambda model, x: model(x)
    new, params, report = fold_bn(fun, model, normal(1, 2, 33, 31, 3))
    assert (len(norms), len(report.folded), len(report.kept)) == (20, 20, 0)
    assert_leaner(fun, model, new, params, normal(2, 3, 33, 31, 3))


def skip_from(place: int) -> Callable[..., jax.Array]:
    return lambda _, values: values[-1] + values[place]


PIECES: dict[str, tuple[tuple[int, ...], Callable[..., jax.Array]]] = {
    "same": ((3, 2, 4, 4), lambda p, values: conv(values[-1], p)),
    "grouped": ((2, 2, 2, 4), lambda p, values: conv(values[-1], p, feature_group_count=2)),
    "valid": ((1, 1, 4, 4), lambda p, values: conv(values[-1], p, "VALID")),
    "dense": ((4, 4), lambda p, values: values[-1] @ p),
    "scale": ((4,), lambda p, values: values[-1] * p),
    "shift": ((4,), lambda p, values: p - values[-1]),
    "norm": ((), lambda p, values: bn(p, values[-1])),
    "channels first": ((), lambda p, values: bn(p, values[-1].transpose(0, 3, 1, 2), 1).transpose(0, 2, 3, 1)),
    "relu": ((), lambda _, values: jax.nn.relu(values[-1])),
    "flip": ((), lambda _, values: values[-1].reshape(-1, 3, 5, 2, 2).swapaxes(-1, -2).reshape(values[-1].shape)),
    "skip": ((), skip_from(0)),
}


@st.composite
def networks(draw: st.DrawFn) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Draw a network of random layers for images with 4 channels, and its parameters."""
    params: dict[str, Any] = {}
    pieces = []
    for i, name in enumerate(draw(st.lists(st.sampled_from(sorted(PIECES)), max_size=9))):
        shape, piece = PIECES[name]
        if name in ("norm", "channels first"):
            params[f"{i}"] = norm(i, 4, shift=draw(st.booleans()))
        elif shape:
            params[f"{i}"] = normal(i, *shape) / 2
        pieces.append(skip_from(draw(st.integers(0, i))) if name == "skip" else piece)

    def fun(p: dict[str, Any], x: jax.Array) -> jax.Array:
        values = [x]
        for i, piece in enumerate(pieces):
            values.append(piece(p.get(f"{i}"), values))
        return values[-1]

    return fun, params


@pytest.mark.slow
@given(networks(), st.integers(1, 2))
def test_random_networks_keep_their_results(network: tuple[Callable[..., Any], dict[str, Any]], batch: int) -> None:
    fun, params = network
    x = normal(7, 2, 3, 5, 4)
    new, new_params, report = fold_bn(fun, params, x[:batch])
    assert_close(new(new_params, x), fun(params, x), 2e-5)
    assert_close(new(new_params, x[:1]), fun(params, x[:1]), 2e-5)
    norms = sum(isinstance(part, dict) for part in params.values())
    left = str(jax.make_jaxpr(new)(new_params, x)).count("rsqrt")
    assert left <= norms
    assert bool(left) == any(row.what == "batch norm" for row in report.kept)
