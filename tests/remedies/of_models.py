"""Remedies of models: state that a call changes, shared variables, stacks of models."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from plurax.ensemble import Ensemble
from plurax.transforms import grad, hvp, per_sample_grad, value_and_grad, vmap
from plurax.transforms.privacy import clipped_grad
from plurax.transforms.program import accumulate, scan_layers, stack_layers

from ._registry import Fails, remedy

X = jnp.arange(6.0).reshape(2, 3)


class Counting(nnx.Module):
    """Counts its calls in a variable of some kind."""

    def __init__(self, kind: type[nnx.Variable]) -> None:
        self.w, self.count = nnx.Param(jnp.ones(3)), kind(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.count[...] = self.count[...] + 1
        return x @ self.w[...]


def total(model: Any, x: jax.Array) -> jax.Array:
    return model(x).sum()


@remedy(
    "keep values that fun computes in another kind of variable, such as nnx.BatchStat, or, if they need not be kept, "
    "call a copy of the model, nnx.clone(model)"
)
def parameter_assigned(fails: Fails) -> None:
    fails(grad(total), Counting(nnx.Param), X)
    fails(accumulate(grad(total), 2), Counting(nnx.Param), X)
    model: Any
    for transform in (grad(total), accumulate(grad(total), 2)):
        model = Counting(nnx.BatchStat)
        gradients = transform(model, X)
        assert [*gradients] == ["w"]
        assert model.count[...] > 0
    # A layer of Flax that assigns its weights in each call.
    model = nnx.WeightNorm(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    of_copy = lambda model, x: nnx.clone(model)(x).sum()
    expected = jax.tree.leaves(nnx.grad(total)(nnx.clone(model), X))
    for transform in (grad, lambda loss: accumulate(grad(loss), 2, reduction="sum")):
        fails(transform(total), model, X)
        for found, wanted in zip(jax.tree.leaves(transform(of_copy)(model, X)), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


class Sowing(nnx.Module):
    """Adds a variable in each call, or changes an attribute."""

    def __init__(self, what: str) -> None:
        self.w, self.what, self.calls = nnx.Param(jnp.ones(3)), what, 0

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.what == "sow":
            self.sow(nnx.Intermediate, "hidden", x)
        elif self.what == "attribute":
            self.calls += 1
        return x @ self.w[...]


@remedy("only values of variables may change; do not add variables (such as by sow) or change attributes")
def structure_changed(fails: Fails) -> None:
    for what in ("sow", "attribute"):
        fails(grad(total), Sowing(what), X)
        fails(accumulate(grad(total), 2), Sowing(what), X)
    np.testing.assert_allclose(grad(total)(Sowing(""), X)["w"], X.sum(0))
    np.testing.assert_allclose(grad(total)(Counting(nnx.BatchStat), X)["w"], X.sum(0))


@remedy(
    "pass it as an argument of the outer transform, one of nnx or plurax",
    "{}: the call changes {}, which is closed over by a function under JAX; {}.",
)
def changed_in_an_outer_transform(fails: Fails) -> None:
    model = Counting(nnx.BatchStat)
    fails(jax.jit(lambda x: grad(total)(model, x)), X)
    nnx.jit(lambda model, x: grad(total)(model, x))(model, X)
    assert model.count[...] == 1
    fails(jax.grad(lambda x: value_and_grad(total)(model, x)[0]), X)
    by_x = grad(lambda model, x: value_and_grad(total)(model, x)[0], argnums=1)(model, X)
    np.testing.assert_allclose(by_x, jnp.ones((2, 3)))
    assert model.count[...] == 2
    fails(grad(lambda x: value_and_grad(total)(model, x)[0]), X)
    # `vmap` then asks what becomes of the state of all slices.
    fails(vmap(lambda x: value_and_grad(total)(model, x)[0]), X)
    back, _ = vmap(lambda model, x: (model, value_and_grad(total)(model, x)[0]), in_axes=(None, 0))(model, X)
    np.testing.assert_allclose(back.count[...], [3, 3])


@remedy("{}: {}; put them into one module, such as nnx.Dict, and pass that.")
def shared_variables(fails: Fails) -> None:
    first = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    second = nnx.Sequential(first, nnx.relu)
    both = lambda first, second, x: (first(x) + second(x)).sum()
    together = lambda models, x: both(models["first"], models["second"], x)
    models = nnx.Dict(first=first, second=second)
    expected = jax.grad(lambda kernel: jnp.sum(X @ kernel + jax.nn.relu(X @ kernel)))(first.kernel[...])
    fails(grad(both, argnums=(0, 1)), first, second, X)
    gradients = grad(together)(models, X)
    np.testing.assert_allclose(gradients["first"]["kernel"], expected, rtol=1e-5)
    fails(vmap(both, in_axes=(None, None, 0)), first, second, X)
    np.testing.assert_allclose(vmap(together, in_axes=(None, 0))(models, X).sum(), together(models, X), rtol=1e-5)
    fails(hvp, lambda first, second: both(first, second, X), (first, second), (first, second))
    state = nnx.state(models, nnx.Param)
    hvp(lambda models: together(models, X), models, state)
    fails(per_sample_grad(both, batch_argnums=2), first, second, X)
    each = per_sample_grad(together)(models, X)
    np.testing.assert_allclose(each["first"]["kernel"].sum(0), expected, rtol=1e-5)


@remedy("build each with a separate nnx.Rngs, or pass nnx.clone({}) if equal copies are intended")
def members_that_share(fails: Fails) -> None:
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    fails(Ensemble.stack, [model, model])
    assert len(Ensemble.stack([model, nnx.clone(model)])) == 2
    assert len(Ensemble.stack([nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(2)])) == 2
    fails(stack_layers, [model, model])
    for layers in ([model, nnx.clone(model)], [nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(2)]):
        assert scan_layers(stack_layers(layers), X)[0].shape == (2, 3)


@remedy("{} is a {}, but {}; stack models of one class.")
def members_of_two_classes(fails: Fails) -> None:
    linear, norm = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.LayerNorm(3, rngs=nnx.Rngs(0))
    fails(Ensemble.stack, [linear, norm])
    fails(stack_layers, [linear, norm])
    assert len(Ensemble.stack([linear, nnx.Linear(3, 3, rngs=nnx.Rngs(1))])) == 2


class Named(nnx.Module):
    """Has a name in a variable, or as a plain attribute."""

    def __init__(self, kind: Any) -> None:
        self.w, self.name = nnx.Param(jnp.ones(3)), kind("a")


@remedy("{}: `{}` of {} {}; make it a plain attribute instead of a variable.")
def text_in_a_variable(fails: Fails) -> None:
    fails(Ensemble.stack, [Named(nnx.Variable), Named(nnx.Variable)])
    fails(Ensemble.create, lambda rngs: Named(nnx.Variable), 2, seed=0)
    fails(stack_layers, [Named(nnx.Variable), Named(nnx.Variable)])
    assert len(Ensemble.stack([Named(str), Named(str)])) == 2
    assert len(Ensemble.create(lambda rngs: Named(str), 2, seed=0)) == 2
    assert len(stack_layers([Named(str), Named(str)])) == 2


@remedy("{}: {}; pass it as an argument, or make the axes AxisType.Auto.")
def array_of_an_explicit_mesh(fails: Fails) -> None:
    w = jnp.ones(3)

    def gradient(kind: AxisType, *, closes: bool) -> Any:
        mesh = jax.make_mesh((1,), ("data",), (kind,))
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
        scale = jax.device_put(jnp.full(3, 2.0), NamedSharding(mesh, PartitionSpec()))
        if closes:
            return clipped_grad(lambda w, x: jnp.sum(x * w * scale), l2_clip_norm=1e3)(w, x)
        return clipped_grad(lambda w, x, scale: jnp.sum(x * w * scale), l2_clip_norm=1e3)(w, x, scale)

    fails(gradient, AxisType.Explicit, closes=True)
    for kind, closes in ((AxisType.Explicit, False), (AxisType.Auto, True)):
        np.testing.assert_allclose(gradient(kind, closes=closes), 2 * X.sum(0), rtol=1e-5)


class WithRandomCarry(nnx.SimpleCell):
    """Begins with a random carry, as an `nnx.RNN` may."""

    def initialize_carry(self, input_shape: Any, rngs: Any = None, *_: Any) -> Any:
        return super().initialize_carry(input_shape, rngs, nnx.initializers.normal())


class Running(nnx.Module):
    """Has statistics, dropout and a recurrent layer, as chosen."""

    def __init__(self, what: str) -> None:
        rngs = nnx.Rngs(0)
        self.layer: Any = {
            "norm": lambda: nnx.BatchNorm(3, rngs=rngs),
            "dropout": lambda: nnx.Dropout(0.5, rngs=rngs),
            "rnn": lambda: nnx.RNN(WithRandomCarry(3, 3, rngs=rngs), rngs=rngs),
        }[what]()
        self.w = nnx.Param(jnp.ones(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        if isinstance(self.layer, nnx.RNN):
            return self.layer(x[:, None])[:, -1] @ self.w[...]
        return self.layer(x) @ self.w[...]


@remedy("use its evaluation mode: {}{})", "call nnx.RNN with initial_carry=")
def state_of_examples(fails: Fails) -> None:
    for what, mode in (("norm", "use_running_average"), ("dropout", "deterministic")):
        fails(per_sample_grad(total), Running(what), X)
        assert per_sample_grad(total)(nnx.view(Running(what), **{mode: True}), X)["w"].shape == (2, 3)
    with_carry = lambda model, x: (
        model.layer(x[:, None], initial_carry=jnp.zeros((len(x), 3)))[:, -1] @ model.w[...]
    ).sum()
    fails(per_sample_grad(total), Running("rnn"), X)
    assert per_sample_grad(with_carry)(Running("rnn"), X)["w"].shape == (2, 3)


class Holder(nnx.Module):
    """Holds an ensemble where Flax sees no variables."""

    def __init__(self, ensemble: Any) -> None:
        self.members = nnx.data(ensemble)

    def __call__(self, x: jax.Array) -> jax.Array:
        return vmap(lambda member, x: member(x), (0, None))(self.members, x).mean(0)


@remedy(
    "{}, in which Flax finds no variables, so it would never train; {}.",
    "pass it as an argument of its own",
    ", or keep the members as one stacked module, self.members = {}, and call {}",
)
def ensemble_within_a_module(fails: Fails) -> None:
    ensemble = Ensemble.create(lambda rngs: nnx.Linear(3, 2, rngs=rngs), 4, seed=0)
    fails(grad(total), Holder(ensemble), X)
    expected = grad(lambda ensemble, x: ensemble(x).mean(0).sum())(ensemble, X)
    held = grad(total)(Holder(jax.tree.map(lambda *x: jnp.stack(x), *ensemble)), X)
    np.testing.assert_allclose(held["members"]["kernel"], jax.tree.leaves(expected)[1], rtol=1e-6)


@remedy("pass a pytree of its arrays")
def a_function_instead_of_parameters(fails: Fails) -> None:
    model = lambda x: x @ jnp.ones(3)
    loss = lambda w, x: (x @ w).sum()
    fails(grad(lambda model, x: model(x).sum()), model, X)
    np.testing.assert_allclose(grad(loss)(jnp.ones(3), X), X.sum(0))
