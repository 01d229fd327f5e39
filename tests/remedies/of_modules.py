"""Remedies of `transforms.modules`: files, frozen parameters, precision, adapters, initializers."""

from __future__ import annotations

import json
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import linen, nnx
from flax.nnx import initializers as init

from plurax.ensemble import Ensemble
from plurax.transforms import grad
from plurax.transforms.modules import (
    Base,
    _safetensors,
    batch_ensemble,
    freeze,
    load_params,
    lora,
    named_parameters,
    reinitialize,
    save_params,
    tabm,
    with_precision,
)

from ._registry import ROOT, Fails, remedy

X, KEY, HALF = jnp.ones((2, 4)), jax.random.key(0), jnp.bfloat16


def linear(seed: int = 0) -> nnx.Linear:
    return nnx.Linear(4, 3, rngs=nnx.Rngs(seed))


def mlp(rngs: nnx.Rngs) -> nnx.Sequential:
    return nnx.Sequential(nnx.Linear(4, 5, rngs=rngs), nnx.relu, nnx.Linear(5, 3, rngs=rngs))


def equal(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(found, expected)


@remedy("{}: model must be one module, but got an ensemble; use Ensemble.create, save or load.")
def ensembles_for_modules(fails: Fails) -> None:
    from plurax.ensemble import load, save

    ensemble = Ensemble.create(mlp, 2, seed=0)
    fails(save_params, "a.safetensors", ensemble)
    save("saved", ensemble)
    equal(load("saved", ensemble)(X), ensemble(X))
    fails(load_params, "a.safetensors", ensemble)
    rngs = nnx.Rngs(0)
    for adapted in (
        partial(lora, rank=1),
        batch_ensemble,
        partial(tabm, first="layers.0", head="layers.2"),
    ):
        fails(partial(adapted, rngs=rngs), ensemble)
        make = lambda rngs, adapted=adapted: adapted(mlp(rngs), rngs=rngs)
        assert len(Ensemble.create(make, 2, seed=0, shared=Base)) == 2
    rules = {nnx.Linear: init.ones}
    fails(reinitialize, ensemble, rules, KEY)
    drawn: Any = Ensemble.create(lambda rngs: reinitialize(mlp(rngs), rules, rngs.params()), 2, seed=0)
    equal(drawn[0].layers[0].kernel[...], 1)


@remedy("put modules into an nnx.Dict, or a Linen module into an nnx.bridge.ToNNX")
def other_models(fails: Fails) -> None:
    parts = {"a": linear(), "b": linear(1)}
    fails(save_params, "a.safetensors", parts)
    fails(named_parameters, linen.Dense(3))
    fails(freeze, parts, "a")
    save_params("a.safetensors", nnx.Dict(parts))
    equal(load_params("a.safetensors", nnx.Dict(a=linear(2), b=linear(3)))["b"].kernel[...], parts["b"].kernel[...])
    model = nnx.bridge.ToNNX(linen.Dense(3), rngs=nnx.Rngs(0)).lazy_init(X)
    assert {*named_parameters(model)} == {"kernel", "bias"}
    assert [*grad(lambda model: model["b"](X).sum())(freeze(nnx.Dict(parts), "a"))["b"]] == ["bias", "kernel"]


@remedy("convert it with nnx.with_vars(model, hijax=False, ref=False)")
def experimental_variables(fails: Fails) -> None:
    for kind in ("hijax", "ref"):
        model = nnx.with_vars(linear(), **{kind: True})
        fails(named_parameters, model)
        converted = nnx.with_vars(model, hijax=False, ref=False)
        equal(named_parameters(converted)["kernel"], linear().kernel[...])


@remedy("{}: two arrays of the model are called `{}`; leave dots out of the keys.")
def dots_in_names(fails: Fails) -> None:
    fails(named_parameters, nnx.Dict({"a.b": nnx.Param(jnp.ones(1)), "a": nnx.Dict(b=nnx.Param(jnp.ones(2)))}))
    model = nnx.Dict({"a_b": nnx.Param(jnp.ones(1)), "a": nnx.Dict(b=nnx.Param(jnp.ones(2)))})
    assert {*named_parameters(model)} == {"a_b", "a.b"}


class Listed(nnx.Module):
    """Has layers in a container."""

    def __init__(self, container: Any) -> None:
        self.layers = container([linear()])


@remedy("put the modules into an nnx.List or an nnx.Dict")
def plain_containers(fails: Fails) -> None:
    adapted = partial(lora, rank=1, rngs=nnx.Rngs(0))
    for container in (lambda x: nnx.data(tuple(x)), lambda x: nnx.data({"a": x[0]})):
        fails(adapted, Listed(container))
    assert adapted(Listed(nnx.List)).layers[0](X).shape == (2, 3)
    assert adapted(Listed(lambda x: nnx.Dict(a=x[0]))).layers["a"](X).shape == (2, 3)


@remedy("freeze: the filter {} selects no parameter of the {}.")
def frozen_nothing(fails: Fails) -> None:
    said = fails(freeze, mlp(nnx.Rngs(0)), "layers.7")
    name = said.rpartition("'")[0].rpartition("'")[2]
    kept = grad(lambda model: model(X).sum())(freeze(mlp(nnx.Rngs(0)), name))
    assert len(nnx.to_flat_state(kept)) == 3


class Doubled(nnx.Param):
    """Doubles what is read."""

    def get_value(self, **options: Any) -> Any:
        return 2 * super().get_value(**options)


def without_gradient_of_norm(model: Any) -> jax.Array:
    graph, norm, rest = nnx.split(model, nnx.PathContains("norm"), ...)
    model = nnx.merge(graph, jax.lax.stop_gradient(norm), rest)
    return model["out"](model["norm"](X)).sum()


@remedy(
    "leave it out of the filter, or cut its gradient with jax.lax.stop_gradient",
    "freeze: `{}` must be an nnx.Param for the {} around it; {}.",
    "freeze: `{}` would lose the {} of its {}; {}.",
)
def parameters_that_cannot_be_frozen(fails: Fails) -> None:
    rngs = nnx.Rngs(0)
    normed = nnx.Dict(norm=nnx.WeightNorm(linear(), rngs=rngs), out=nnx.Linear(3, 1, rngs=rngs))
    bridged = nnx.Dict(norm=nnx.bridge.ToNNX(linen.Dense(3), rngs=rngs).lazy_init(X), out=nnx.Linear(3, 1, rngs=rngs))
    for model in (normed, bridged):
        fails(freeze, model, "norm")
        kept = grad(lambda model: model["out"](nnx.clone(model["norm"])(X)).sum())(freeze(model, "out"))
        assert "out" not in kept
        gradients = grad(without_gradient_of_norm)(model)
        assert not any(jnp.any(x) for x in jax.tree.leaves(gradients["norm"]))
        assert jnp.any(gradients["out"]["kernel"][...])
    model = nnx.Dict(w=Doubled(jnp.ones(4)), v=nnx.Param(jnp.ones(4)))
    fails(freeze, model, "w")
    loss = lambda model: (model["w"] * model["v"]).sum()
    assert [*grad(loss)(freeze(model, "v"))] == ["w"]
    gradients = grad(lambda model: (jax.lax.stop_gradient(model["w"][...]) * model["v"]).sum())(model)
    equal(gradients["w"][...], 0)
    equal(gradients["v"][...], 2)


class Scale(nnx.Module):
    """Has a parameter of its own."""

    dtype: Any

    def __init__(self, **attributes: Any) -> None:
        self.scale = nnx.Param(jnp.ones(4))
        for name, value in attributes.items():
            setattr(self, name, value)

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...]
        return x * (scale if getattr(self, "dtype", None) is None else scale.astype(self.dtype))


@remedy("leave it out of where, pass keep={{}: None} if it converts by itself, or a function in rules")
def precision_of_own_parameters(fails: Fails) -> None:
    fails(with_precision, Scale(), HALF)
    x = X.astype(HALF)
    assert with_precision(Scale(dtype=None), HALF)(x).dtype == HALF
    assert with_precision(Scale(), HALF, keep={Scale: None})(x).dtype == jnp.float32
    both = nnx.Sequential(linear(), nnx.Linear(3, 4, rngs=nnx.Rngs(1)), Scale())
    fails(with_precision, both, HALF)
    assert with_precision(both, HALF, where=nnx.Linear)(x).dtype == jnp.float32
    assert with_precision(both, HALF, rules={Scale: lambda scale: Scale(dtype=HALF)})(x).dtype == HALF


class Head(nnx.Module):
    """Has a layer."""

    def __init__(self, layer: nnx.Linear) -> None:
        self.layer = layer


@remedy("keep gives {} and {}", "name {} in keep too")
def precision_of_a_shared_layer(fails: Fails) -> None:
    layer = linear()
    model = nnx.Dict(head=Head(layer), again=layer)
    fails(with_precision, model, HALF, keep={Head: jnp.float32})
    found: Any = with_precision(model, HALF, keep={Head: jnp.float32, nnx.Linear: jnp.float16})
    assert found["again"].dtype == jnp.float16


@remedy(
    "give an initializer, such as nnx.initializers.normal() (with the parentheses)",
    "{} returned {}, but must return shape {} and dtype {}; {}.",
)
def initializers(fails: Fails) -> None:
    other_shape = lambda key, shape, dtype: jnp.zeros((1, 3), dtype)
    wrong = (init.he_normal, init.zeros_init, lambda *_: 3.0, other_shape)
    for initializer in wrong:
        for name in ("kernel", "bias"):
            fails(reinitialize, linear(), {nnx.Linear: {name: initializer}}, KEY)
            drawn: Any = reinitialize(linear(), {nnx.Linear: {name: init.normal()}}, KEY)
            assert jnp.any(drawn.bias[...]) == (name == "bias")


class Tree(nnx.Module):
    """Has a parameter that holds two arrays."""

    def __init__(self) -> None:
        self.kernel, self.bias = nnx.Param({"a": jnp.ones(2), "b": jnp.ones(2)}), nnx.Param(jnp.ones(2))


@remedy("reinitialize: `{}` holds {}, but only one array can be drawn; leave it out.")
def parameter_of_two_arrays(fails: Fails) -> None:
    fails(reinitialize, Tree(), {Tree: init.zeros}, KEY)
    fails(reinitialize, Tree(), {Tree: {"kernel": init.zeros, "bias": init.zeros}}, KEY)
    equal(reinitialize(Tree(), {Tree: {"bias": init.zeros}}, KEY).bias[...], 0)


@remedy("reinitialize: `{}` has shape {}, {}; put the axes of layers in front.")
def axes_of_layers(fails: Fails) -> None:
    make = lambda rngs: nnx.Linear(4, 3, rngs=rngs)
    for out_axes in (-1, 0):
        layers = nnx.vmap(make, in_axes=0, out_axes=out_axes)(nnx.Rngs(0).split(5))
        draw = partial(reinitialize, layers, {nnx.Linear: init.ones}, KEY)
        if out_axes:
            fails(draw)
        else:
            equal(draw().kernel[...], 1)


@remedy("reinitialize: {}; give rules for what the module has: {}.")
def rules_for_nothing(fails: Fails) -> None:
    said = fails(reinitialize, linear(), {nnx.Embed: init.ones}, KEY)
    assert "Linear with `bias`, `kernel`" in said
    drawn: Any = reinitialize(linear(), {nnx.Linear: {"bias": init.ones, "kernel": init.ones}}, KEY)
    equal(drawn.bias[...], 1)


@remedy("tabm: first and head select the same layer, {}; name two.")
def layers_of_tabm(fails: Fails) -> None:
    of = partial(tabm, mlp(nnx.Rngs(0)), rngs=nnx.Rngs(1))
    fails(of, first="layers.0", head="layers.0")
    assert of(first="layers.0", head="layers.2")(X).shape == (2, 3)


@remedy("{}: {}; name a layer, such as 'layers.0', or a kind of layers.")
def layers_to_adapt(fails: Fails) -> None:
    where: Any
    for where in ("layers.7", nnx.Conv, "layers.1"):
        fails(lora, mlp(nnx.Rngs(0)), rank=1, where=where, rngs=nnx.Rngs(0))
        fails(batch_ensemble, mlp(nnx.Rngs(0)), where=where, rngs=nnx.Rngs(0))
    for where in ("layers.0", nnx.Linear):
        assert lora(mlp(nnx.Rngs(0)), rank=1, where=where, rngs=nnx.Rngs(0))(X).shape == (2, 3)


@remedy("lora: {} is a grouped convolution; leave it out of where.")
def grouped_convolutions(fails: Fails) -> None:
    rngs = nnx.Rngs(0)
    grouped = nnx.Conv(4, 4, (3,), feature_group_count=2, rngs=rngs)
    model = nnx.Sequential(grouped, nnx.Conv(4, 2, (3,), rngs=rngs))
    fails(lora, model, rank=1, rngs=rngs)
    assert lora(model, rank=1, where="layers.1", rngs=rngs)(jnp.ones((2, 5, 4))).shape == (2, 5, 2)


@remedy("rename= is for other names, transform= for other shapes and dtypes, strict=False for a part of them")
def files_that_do_not_fit(fails: Fails) -> None:
    model: Any = linear()
    file = Path("a.safetensors")
    kernel, bias = (np.asarray(x[...]) for x in (model.kernel, model.bias))
    load = partial(load_params, file, linear(1))
    safetensors.numpy.save_file({"weight": kernel, "b": bias}, file)
    fails(load)
    fails(load, strict=False)
    equal(load(rename={"weight": "kernel", "b": "bias"}).kernel[...], kernel)
    safetensors.numpy.save_file({"kernel": kernel.T.copy(), "bias": bias.astype(np.float16)}, file)
    fails(load)
    fails(load, strict=False)
    fitted = load(transform=lambda name, x: (x.T if name == "kernel" else x).astype(np.float32))
    equal(fitted.kernel[...], kernel)
    safetensors.numpy.save_file({"kernel": kernel}, file)
    fails(load)
    with pytest.warns(UserWarning, match="the rest is loaded"):
        equal(load(strict=False).kernel[...], kernel)


@remedy("save_params: `{}` has dtype {}, but safetensors supports {}; convert it.")
def dtypes_of_files(fails: Fails) -> None:
    for value in (jnp.ones(2, jnp.int4), np.ones(2, complex)):
        fails(save_params, "a.safetensors", nnx.Dict(w=nnx.Param(value)))
        converted = jnp.asarray(value).real.astype(jnp.float32)
        save_params("a.safetensors", nnx.Dict(w=nnx.Param(converted)))
        equal(load_params("a.safetensors", nnx.Dict(w=nnx.Param(jnp.zeros(2))))["w"][...], 1)


@remedy("{}: `{}` holds {}, not an array; make it a plain attribute.")
def text_in_a_file(fails: Fails) -> None:
    fails(save_params, "a.safetensors", nnx.Dict(w=nnx.Param(jnp.ones(2)), name=nnx.Variable("a")))
    save_params("a.safetensors", nnx.Dict(w=nnx.Param(jnp.ones(2)), name="a"))


@remedy(
    "load_params: rename has names that {} lacks: {}; it has {}.",
    "load_params: rename must give a name or None, but gave {} for `{}`.",
    "load_params: `{}` and `{}` of {} would both be `{}`; rename one.",
    "load_params: rename must be a dict or a function of names, but got {}.",
)
def renamed(fails: Fails) -> None:
    arrays = {"weight": np.ones((4, 3), np.float32), "b": np.ones(3, np.float32)}
    safetensors.numpy.save_file(arrays, "a.safetensors")
    load = partial(load_params, "a.safetensors", linear())
    said = fails(load, rename={"weights": "kernel"})
    assert "`b`, `weight`" in said
    fails(load, rename=lambda name: {"weight": "kernel"}.get(name, 3))
    fails(load, rename=lambda name: "kernel")
    fails(load, rename=["kernel", "bias"])
    names = {"weight": "kernel", "b": "bias"}
    for rename in (names, names.get):
        equal(load(rename=rename).kernel[...], 1)


@remedy("{}: {} is damaged: {}; restore a copy, or save it again.")
def damaged_file(fails: Fails) -> None:
    file, model = Path("a.safetensors"), linear()
    save_params(file, model)
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:-4] + b"abcd"):
        file.write_bytes(damaged)
        fails(load_params, file, linear(1))
        file.write_bytes(whole)
        equal(load_params(file, linear(1)).kernel[...], model.kernel[...])
        file.write_bytes(damaged)
        save_params(file, model)
        equal(load_params(file, linear(1)).kernel[...], model.kernel[...])


@remedy("{}: {} has {}; use a release that reads version {}.")
def later_version(fails: Fails) -> None:
    from plurax.transforms.curvature import laplace
    from plurax.transforms.curvature._laplace import files

    with patch.dict(_safetensors._METADATA, {"plurax.format": "2"}):
        save_params("a.safetensors", linear())
    fails(load_params, "a.safetensors", linear(1))
    with patch.dict(_safetensors._METADATA, {"plurax.format": "2"}):
        equal(load_params("a.safetensors", linear(1)).kernel[...], linear().kernel[...])
    fit = lambda w, x: x @ w
    loss = lambda out, y: 0.5 * jnp.mean((out - y) ** 2)
    of = laplace(fit, loss, jnp.array([2.0]), (jnp.ones((4, 1)), jnp.full(4, 2.0)), prior_precision=1.0)
    with patch.object(files, "_VERSION", files._VERSION + 1):
        of.save("laplace.safetensors")
    load = partial(type(of).load, "laplace.safetensors", fit, jnp.array([0.0]))
    fails(load)
    with patch.object(files, "_VERSION", files._VERSION + 1):
        equal(load().params, of.params)


@remedy("{}: `{}` of {} has dtype {}, which cannot be read; convert it before saving.")
def dtype_that_cannot_be_read(fails: Fails) -> None:
    header = json.dumps({"bias": {"dtype": "F8_E4M3", "shape": [3], "data_offsets": [0, 3]}}).encode()
    Path("a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    load = partial(load_params, "a.safetensors", nnx.Dict(bias=nnx.Param(jnp.ones(3))))
    fails(load)
    safetensors.numpy.save_file({"bias": np.zeros(3, np.float32)}, "a.safetensors")
    equal(load()["bias"][...], 0)


def extras() -> dict[str, list[str]]:
    """Return what can be installed in addition."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@remedy("{} needs safetensors; install it with pip install 'plurax[files]'.")
def without_safetensors(fails: Fails) -> None:
    with patch.dict(sys.modules, {"safetensors.numpy": None}):
        fails(save_params, "a.safetensors", linear())
        fails(load_params, "a.safetensors", linear())
    assert any(name.startswith("safetensors") for name in extras()["files"])
    save_params("a.safetensors", linear())


class Projection(nnx.Module):
    """A layer of a class of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(rngs.params.normal((4, 4)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...]


@remedy(
    "{}: {}; {}, or leave it out, as where=nnx.Not({}) does.",
    "{}: rules[{}] must return a layer, but it returned {}.",
    "{}: rules has a function for {}, but the model has none; leave it out.",
)
def layers_of_other_classes(fails: Fails) -> None:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(Projection(rngs), linear())
    stays = {Projection: lambda layer: layer}
    for adapt in (partial(lora, rank=1), batch_ensemble):
        fails(adapt, model, rngs=rngs)
        assert adapt(model, rngs=rngs, where=nnx.Not(Projection))(X).shape == (2, 3)
        fails(adapt, model, rngs=rngs, rules={Projection: lambda layer: layer.w})
        assert adapt(model, rngs=rngs, rules=stays)(X).shape == (2, 3)
        fails(adapt, linear(), rngs=rngs, rules=stays)


@remedy("leave it out, as where=nnx.Not({}) does, or give a function for {} in rules")
def layers_inside_others(fails: Fails) -> None:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.WeightNorm(linear(), rngs=rngs), nnx.Linear(3, 2, rngs=rngs))
    fails(lora, model, 1, rngs=rngs)
    assert lora(model, 1, rngs=rngs, where=nnx.Not(nnx.WeightNorm))(X).shape == (2, 2)
    assert lora(model, 1, rngs=rngs, rules={nnx.WeightNorm: lambda layer: layer})(X).shape == (2, 2)


@remedy("tabm: first must select {}, but selects `{}`; name another layer.")
def first_layers_of_tabm(fails: Fails) -> None:
    layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(3)]
    of = partial(tabm, nnx.Sequential(*layers), head="layers.2", rngs=nnx.Rngs(1), where="layers.0")
    fails(of, first="layers.1")
    assert of(first="layers.0")(X).shape == (2, 4)


@remedy("with_precision: where selects no module {}; name a layer, such as 'layers.0'.")
def modules_without_a_dtype(fails: Fails) -> None:
    fails(with_precision, mlp(nnx.Rngs(0)), HALF, where="layers.1")
    found: Any = with_precision(mlp(nnx.Rngs(0)), HALF, where="layers.0")
    assert [found.layers[i].dtype for i in (0, 2)] == [HALF, None]
