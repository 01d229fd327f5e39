"""`vmap` of models: modules as functions and as arguments, and ensembles as both."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Ensemble
from plurax.transforms import grad, per_sample_grad, value_and_grad, vmap

SIZE = 3
X = np.sin(np.arange(30.0, dtype=np.float32)).reshape(5, 2, 3)
XS = np.cos(np.arange(SIZE * 6.0, dtype=np.float32)).reshape(SIZE, 2, 3)


class Gain(nnx.Module):
    """Three gains, and in training a running mean of the inputs."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gain = nnx.Param(rngs.normal((3,)))
        self.mean = nnx.BatchStat(jnp.zeros(3))
        self.use_running_average = False

    def set_view(self, use_running_average: bool) -> None:
        self.use_running_average = use_running_average

    def __call__(self, x: Any, scale: Any = 1.0, *, shift: Any = 0.0) -> jax.Array:
        if not self.use_running_average:
            self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean(0)
        return x * self.gain[...] * scale + shift

    def loss(self, x: Any) -> jax.Array:
        return jnp.sum(self(x) ** 2)


class Net(nnx.Module):
    """Real layers: dense, BatchNorm and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> jax.Array:
        return self.drop(self.norm(self.dense(x)))

    def loss(self, x: Any) -> jax.Array:
        return jnp.mean(self(x) ** 2)


class Tied(nnx.Module):
    """One gain under two names."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gain = nnx.Param(rngs.normal((3,)))
        self.again = self.gain

    def __call__(self, x: Any) -> jax.Array:
        return x * self.gain[...] * self.again[...]


def evaluating(model: Any) -> Any:
    return nnx.view(model, use_running_average=True)


def arrays(model: Any) -> list[Any]:
    return jax.tree.leaves(nnx.state(model))


def untouched(before: list[Any], model: Any) -> bool:
    return all(a is b for a, b in zip(before, arrays(model), strict=True))


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def assert_close(actual: Any, expected: Any) -> None:
    """Assert equal structures, shapes, dtypes and keys; close values."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    actual, expected = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, (actual, expected))
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


def stack(results: Any) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *results)


@pytest.fixture(scope="module")
def ens() -> Ensemble:
    return Ensemble.create(Gain, SIZE, seed=0)


@pytest.fixture(scope="module")
def nets() -> Ensemble:
    return Ensemble.create(Net, SIZE, seed=0)


@pytest.fixture(scope="module")
def members(ens: Ensemble) -> Ensemble:
    return ens.view(use_running_average=True)


def test_the_helpers_detect_differences(ens: Ensemble) -> None:
    model = ens[0]
    before = arrays(model)
    assert untouched(before, model)
    model(X[0])
    assert not untouched(before, model)
    with pytest.raises(AssertionError, match="not equal|not close|differ|close"):
        assert_close(ens[0:2], ens[1:3])
    with pytest.raises(AssertionError, match="dtype"):
        assert_close(jnp.ones(2), jnp.ones(2, jnp.int32))
    with pytest.raises(AssertionError, match="close"):
        assert_close(jax.random.key(0), jax.random.key(1))


# Modules.


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_module_equals_applying_it_to_each_slice(chunk_size: int | None) -> None:
    dense = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    xs = X[:3]
    expected = stack([dense(x) for x in xs])
    assert_close(vmap(dense, chunk_size=chunk_size)(xs), expected)
    assert_close(vmap(dense.__call__, 1, 1, chunk_size=chunk_size)(xs.swapaxes(0, 1)), expected.swapaxes(0, 1))
    assert_close(vmap(lambda model, x: model(x), (None, 0), chunk_size=chunk_size)(dense, xs), expected)
    assert_close(vmap(lambda x: dense(x), chunk_size=chunk_size)(xs), expected)


def test_a_module_takes_every_kind_of_argument() -> None:
    model = evaluating(Gain(nnx.Rngs(0)))
    scale, shift = X[:, 0, 0], X[:, :, 0, None]
    expected = stack([model(x, s, shift=t) for x, s, t in zip(X, scale, shift, strict=True)])
    assert_close(vmap(model)(X, scale, shift=shift), expected)
    assert_close(vmap(model, (0, None))(X, 3.0, shift=shift), stack([model(x, 3.0) for x in X]) + shift)
    assert_close(vmap(model.loss)(X), stack([model.loss(x) for x in X]))
    gains = vmap(lambda key: Gain(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 5))
    assert_close(vmap(lambda x, *, model: model(x))(X, model=evaluating(gains)), X * gains.gain[...][:, None])


def test_a_module_in_training_is_refused_and_unchanged() -> None:
    model = Gain(nnx.Rngs(0))
    before = arrays(model)
    message = r"^vmap: the mapped function changes the state of Gain \(`mean`\), which would be lost; .*nnx\.view\("
    for mapped, args in [
        (vmap(model), (X,)),
        (vmap(model.loss, chunk_size=2), (X,)),
        (vmap(lambda x, model: model(x), (0, None)), (X, model)),
        (vmap(lambda models, x: models["a"][0](x), (None, 0)), ({"a": [model]}, X)),
    ]:
        with pytest.raises(ValueError, match=message):
            mapped(*args)
        assert untouched(before, model)


def test_batch_norm_and_dropout_in_training_are_refused(nets: Ensemble) -> None:
    net = nets[0]
    for view, changed in [
        ({"deterministic": True}, r"Net \(`norm\.mean`\)"),
        ({"use_running_average": True}, r"Net \(`drop\.rngs\.count`\)"),
    ]:
        with pytest.raises(ValueError, match=f"changes the state of {changed}, which would be lost"):
            jax.eval_shape(vmap(nnx.view(net, **view)), X)
    with pytest.raises(ValueError, match=r"changes the state of Rngs \(`default\.count`\)"):
        vmap(lambda x, rngs: x + rngs.uniform(), (0, None))(X, nnx.Rngs(0))


def test_a_module_that_changes_its_configuration_is_refused() -> None:
    def switch(model: Gain, x: Any) -> jax.Array:
        model.eval()
        return model(x)

    model = Gain(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"changes the state of Gain \(`configuration`\), which would be lost"):
        vmap(switch, (None, 0))(model, X)
    assert not model.use_running_average


@pytest.mark.parametrize("wrap", [nnx.jit, nnx.remat, jax.jit], ids=["nnx.jit", "nnx.remat", "jax.jit"])
@pytest.mark.parametrize("outer", [lambda fun: fun, jax.jit], ids=["eager", "jit"])
def test_a_module_may_pass_through_inner_transforms(members: Ensemble, wrap: Any, outer: Any) -> None:
    # nnx.jit and nnx.remat return every array of a module as a new one, changed or not.
    call = wrap(lambda model, x: model(x))
    assert_close(outer(vmap(call))(members, XS), XS * members.trainable["gain"][:, None])
    assert_close(outer(vmap(call, (None, 0), chunk_size=2))(members[1], X), X * members[1].gain[...])


def test_a_change_inside_an_inner_transform_is_detected(ens: Ensemble) -> None:
    with pytest.raises(ValueError, match=r"changes the state of Gain \(`mean`\), which would be lost"):
        vmap(nnx.jit(lambda model, x: model(x)))(ens, XS)

    @nnx.jit
    def flip(model: Any) -> None:
        model.kernel[...], model.bias[...] = model.kernel[...], -model.bias[...]

    with pytest.raises(ValueError, match=r"changes the state of Linear \(`bias`\), which would be lost"):
        vmap(nnx.remat(flip))(Ensemble.create(lambda rngs: nnx.Linear(3, 2, rngs=rngs), 2, seed=0))


def test_a_module_that_is_returned_is_stacked() -> None:
    model = Gain(nnx.Rngs(0))
    out, ys = vmap(lambda model, x: ({"model": model}, model(x)), (None, 0))(model, X)
    assert isinstance(out["model"], Gain)
    assert_close(out["model"].mean[...], 0.1 * X.mean(1))
    assert_close(ys, X * model.gain[...])
    # The output can be an input again: a module with mapped state.
    assert_close(vmap(lambda model, x: model(x))(evaluating(out["model"]), X), ys)


def test_modules_are_constructed_in_a_map() -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    made = vmap(lambda key: Gain(nnx.Rngs(key)))(keys)
    assert isinstance(made, Gain)
    assert_close(made.gain[...], stack([Gain(nnx.Rngs(key)).gain[...] for key in keys]))


def test_tied_weights_stay_tied() -> None:
    tied = Tied(nnx.Rngs(0))
    assert_close(vmap(tied)(X), X * tied.gain[...] ** 2)

    def double(model: Any) -> Any:
        model.again[...] = 2 * model.gain[...]
        return model

    member = vmap(double)(Ensemble.stack([tied, nnx.clone(tied)]))[1]
    assert member.again is member.gain
    assert_close(member.gain[...], 2 * tied.gain[...])


def test_modules_that_share_a_variable_are_refused() -> None:
    first, second = Gain(nnx.Rngs(0)), Gain(nnx.Rngs(1))
    second.gain = first.gain
    call = lambda first, second, x: first(x) + second(x)
    with pytest.raises(ValueError, match=r"^vmap: `first` and `second` share the variable `gain`; put them into one"):
        vmap(call, (None, None, 0))(first, first, X)
    with pytest.raises(ValueError, match=r"`first` and `second` share the variable `gain`; .* such as nnx\.Dict"):
        vmap(call, (None, None, 0))(first, {"b": second}, X)
    wrong: Any = vmap(first)  # type checkers reject the call too
    with pytest.raises(ValueError, match=r"`fun` and `model` share the variable"):
        wrong(X, model=first)
    pair = nnx.Dict(first=evaluating(first), second=evaluating(second))
    mapped = vmap(lambda pair, x: call(pair["first"], pair["second"], x), (None, 0))
    assert_close(mapped(pair, X), 2 * X * first.gain[...])


# Random streams of modules that are not mapped.


class Noisy(nnx.Module):
    """Dropout that is applied twice, noise from another stream, and a mean of the inputs in training."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0, dropout=1, noise=2)
        self.gain, self.drop = Gain(rngs), nnx.Dropout(0.5, rngs=rngs)
        self.gain.use_running_average = True
        self.noise = rngs.noise.fork()

    def __call__(self, x: Any) -> jax.Array:
        return self.drop(self.drop(self.gain(x))) + self.noise.normal(x.shape)


def streams(model: Noisy) -> dict[str, Any]:
    return {"dropout": model.drop.rngs, "noise": model.noise}


def one_by_one(model: Noisy, xs: Any, only: Any) -> jax.Array:
    """Return the outputs for each slice, with the keys that `nnx.split_rngs` gives a copy of the model."""
    divided = nnx.clone(model)
    backups = list(nnx.split_rngs(divided, splits=len(xs), only=only, graph=True, graph_updates=True))
    outs = []
    for i, x in enumerate(xs):
        copy = nnx.clone(model)
        for name, stream in streams(copy).items():
            key = streams(divided)[name].key.get_raw_value()
            if key.ndim:
                stream.key.set_value(key[i])
                stream.count.set_value(jnp.uint32(0))
        outs.append(copy(x))
    assert backups
    return jnp.stack(outs)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_each_slice_draws_its_own_numbers_as_with_nnx_split_rngs(chunk_size: int | None) -> None:
    options: Any = {"split_rngs": True, "chunk_size": chunk_size}
    expected = one_by_one(Noisy(), X, ...)
    for mapped in (
        lambda model: vmap(model, **options)(X),
        lambda model: vmap(model.__call__, 1, 1, **options)(X.swapaxes(0, 1)).swapaxes(0, 1),
        lambda model: vmap(lambda models, x: models["a"][0](x), (None, 0), **options)({"a": [model]}, X),
        lambda model: nnx.jit(lambda model, x: vmap(model, **options)(x))(model, X),
    ):
        model = Noisy()
        assert_close(mapped(model), expected)
        for name, stream in streams(model).items():
            assert int(stream.count[...]) == 1, name
            assert_close(stream.key[...], streams(Noisy())[name].key[...])
    again = mapped(model)
    assert_close(again, one_by_one(model_after_one_draw(), X, ...))
    assert float(jnp.abs(again - expected).max()) > 0.1


def model_after_one_draw() -> Noisy:
    model = Noisy()
    for stream in streams(model).values():
        stream()
    return model


def test_a_returned_module_has_its_streams_advanced_once() -> None:
    model = Noisy()
    model.gain.use_running_average = False
    called = lambda model, x: (model, model(x))
    out, ys = vmap(called, (None, 0), split_rngs=True, chunk_size=3)(model, X)
    assert_close(ys, one_by_one(Noisy(), X, ...))
    assert_close(out.gain.mean[...], 0.1 * X.mean(1))
    for name, stream in streams(out).items():
        np.testing.assert_array_equal(stream.count[...], np.ones(5, np.uint32))
        assert_close(stream.key[...], jnp.stack([streams(Noisy())[name].key[...]] * 5))
    assert not model.gain.mean[...].any()


def test_a_filter_selects_the_streams_that_are_split() -> None:
    model = Noisy()
    out, ys = vmap(lambda model, x: (model, model(x)), (None, 0), split_rngs="dropout")(model, X)
    assert_close(ys, one_by_one(Noisy(), X, "dropout"))
    assert [int(stream.count[...]) for stream in streams(model).values()] == [1, 0]
    # A stream that is not split is shared, and changes like any other state.
    np.testing.assert_array_equal(out.noise.count[...], np.ones(5, np.uint32))
    with pytest.raises(
        ValueError, match=r"changes the state of Noisy \(`noise\.count`\), which would be lost; pass split"
    ):
        vmap(model, split_rngs="dropout")(X)
    for wrong in ("droput", None, nnx.Param):
        with pytest.raises(ValueError, match=r"^vmap: split_rngs=.* selects no random stream of a module that is not"):
            vmap(model, split_rngs=wrong)(X)
    with pytest.raises(
        TypeError, match=r"^vmap: split_rngs must be False, True or an NNX filter, but got 3 of type int"
    ):
        vmap(model, split_rngs=3)
    assert_close(vmap(jnp.sin, split_rngs=True)(X), np.sin(X))
    stack = vmap(lambda key: nnx.Dropout(0.5, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 4))
    with pytest.raises(
        ValueError, match=r"the random stream `rngs\.key` of Dropout is a stack of shape \(4,\); map the"
    ):
        vmap(lambda stack, x: x, (None, 0), split_rngs=True)(stack, X)


def test_streams_are_split_inside_of_transforms() -> None:
    loss = lambda model, x: vmap(lambda model, x: model(x), (None, 0), split_rngs=True)(model, x).sum()
    model = Noisy()
    gradient = grad(loss)(model, X)
    expected = jax.grad(lambda gain: one_by_one(with_gain(Noisy(), gain), X, ...).sum())(model.gain.gain[...])
    assert_close(gradient["gain"]["gain"][...], expected)
    assert int(model.drop.rngs.count[...]) == 1  # as after any gradient, the module has the new state
    with pytest.raises(
        ValueError, match=r"^vmap: the call changes `.*count` of Noisy, which is closed over by a function"
    ):
        jax.jit(lambda x: vmap(model, split_rngs=True)(x))(X)
    # Rows of slices: the keys are split once for the rows, and again in each.
    rows = vmap(vmap(Noisy.__call__, (None, 0), split_rngs=True), (None, 0), split_rngs=True)(Noisy(), X)
    assert rows.shape == X.shape
    assert len(np.unique(np.asarray(rows))) == X.size


def with_gain(model: Noisy, gain: Any) -> Noisy:
    model.gain.gain.set_value(gain)
    return model


def test_remedies_for_state_that_would_be_lost(nets: Ensemble) -> None:
    net = nets[0]
    both = (
        r"return the model as well and pass split_rngs=True, .*\(model, use_running_average=True, deterministic=True\)"
    )
    with pytest.raises(ValueError, match=both):
        vmap(net)(X)
    assert vmap(lambda net, x: (net, net(x)), (None, 0), split_rngs=True)(net, X)[1].shape == (5, 2, 2)
    assert vmap(nnx.view(net, use_running_average=True, deterministic=True))(X).shape == (5, 2, 2)
    evaluated = nnx.view(net, use_running_average=True)
    with pytest.raises(
        ValueError, match=r"lost; pass split_rngs=True, so .*, or .* nnx\.view\(model, deterministic=True"
    ):
        vmap(evaluated)(X)
    assert vmap(evaluated, split_rngs=True)(X).shape == (5, 2, 2)
    with pytest.raises(
        ValueError, match=r"lost; return the model as well, or use .*\(model, use_running_average=True\)\."
    ):
        vmap(nnx.view(net, deterministic=True))(X)
    # Each member has streams of its own.
    with pytest.raises(
        ValueError, match=r"lost; return the model as well, or use .* ensemble\.view\(deterministic=True\)\."
    ):
        vmap(nets.view(use_running_average=True), None)(X[0])


# An ensemble as the function.


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_an_ensemble_slices_arguments_by_in_axes(members: Ensemble, chunk_size: int | None) -> None:
    gains = np.asarray(members.trainable["gain"])[:, None]
    scale, shift = XS[:, 0, 0], XS[:, :, :1]
    for in_axes, args, kwargs, expected in [
        (None, (X[0],), {}, X[0] * gains),
        (0, (XS,), {}, XS * gains),
        ((None, 0), (X[0], scale), {}, X[0] * gains * scale[:, None, None]),
        (None, (X[0], 2.0), {"shift": shift[0]}, X[0] * gains * 2 + shift[0]),
        (0, (XS,), {"shift": shift}, XS * gains + shift),
        ([0, None], (XS, 2.0), {}, XS * gains * 2),
    ]:
        assert_close(vmap(members, in_axes, axis_size=SIZE, chunk_size=chunk_size)(*args, **kwargs), expected)
    assert_close(vmap(members, 1, -1, chunk_size=chunk_size)(np.moveaxis(XS, 0, 1)), np.moveaxis(XS * gains, 0, -1))


def test_an_ensemble_of_one_is_an_ensemble(members: Ensemble) -> None:
    assert_close(vmap(members[2:3], None)(X[0]), members[2](X[0])[None])


def test_an_ensemble_as_the_function_is_checked(ens: Ensemble) -> None:
    with pytest.raises(ValueError, match=r"the number of members is 3, but axis 0 of argument `args\[0\]` has size 5"):
        vmap(ens)(X)
    with pytest.raises(ValueError, match=r"^vmap: axis_size=5, but the ensemble has 3 members; leave it out"):
        vmap(ens, axis_size=5)
    with pytest.raises(ValueError, match=r"changes the state of Gain \(`mean`\), which would be lost"):
        vmap(ens, None)(X[0])


# An ensemble as an argument.


def train(model: Any, x: Any) -> tuple[Any, jax.Array]:
    """A user's training step, written without ensembles in mind."""
    assert isinstance(model, nnx.Module)
    value, gradients = value_and_grad(lambda model: model.loss(x))(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradients))
    return model, value


def train_one_by_one(ens: Ensemble, xs: Any) -> tuple[Ensemble, Any]:
    results = [train(member, x) for member, x in zip(ens, xs, strict=True)]
    return Ensemble.stack([model for model, _ in results]), jnp.stack([value for _, value in results])


def test_a_users_own_step_trains_every_member(nets: Ensemble) -> None:
    before = jax.tree.leaves(nets)
    trained, values = jax.jit(vmap(train, chunk_size=2))(nets, XS)
    assert isinstance(trained, Ensemble)
    assert_close((trained, values), jax.jit(train_one_by_one)(nets, XS))
    np.testing.assert_array_equal(trained.rest["drop"]["rngs"]["count"], nets.rest["drop"]["rngs"]["count"] + 1)
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nets), strict=True))


def test_a_step_that_updates_in_place_under_nnx_jit_trains_every_member(ens: Ensemble) -> None:
    make = lambda model: nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: nnx.Optimizer[Any], x: Any) -> Any:
        optimizer.update(model, grad(lambda model: model.loss(x))(model))
        return model, optimizer

    optimizers = vmap(make)(ens)
    trained, optimizers = vmap(step)(ens, optimizers, XS)
    assert isinstance(trained, Ensemble)
    assert isinstance(optimizers, nnx.Optimizer)
    member, optimizer = ens[2], make(ens[2])
    step(member, optimizer, XS[2])
    assert_close(nnx.state(trained[2]), nnx.state(member))
    with pytest.raises(
        ValueError, match=r"changes the state of Gain \(`gain`\), which would be lost; return the model"
    ):
        vmap(lambda *args: step(*args)[1])(ens, optimizers, XS)
    with pytest.raises(ValueError, match=r"changes the state of Optimizer \(`.*`\), which would be lost"):
        vmap(lambda *args: step(*args)[0])(ens, optimizers, XS)


def test_a_returned_copy_of_a_member_becomes_an_ensemble(ens: Ensemble, members: Ensemble) -> None:
    out = vmap(lambda model: [nnx.clone(model), 1.0])(ens)
    assert isinstance(out[0], Ensemble)
    assert_close(out[0], ens)
    viewed = vmap(lambda model: model.eval() or model)(ens)
    assert isinstance(viewed, Ensemble)
    assert_close(viewed(X[0]), members(X[0]))


def test_ensembles_are_found_in_containers(members: Ensemble) -> None:
    other = Ensemble.create(Tied, SIZE, seed=1)

    def call(models: Any, pair: Any, x: Any, *, each: Any) -> Any:
        return {"all": (models["a"](x) * each, pair[0](x))}, (models["a"], [pair[0]])

    out, (a, [b]) = vmap(call, ({"a": 0}, (0, None), None))({"a": members}, (other, 7), X[0], each=XS[:, 0, 0])
    gains, others = members.trainable["gain"][:, None], other.trainable["again"][:, None]
    assert_close(out, {"all": (X[0] * gains * XS[:, :1, :1], X[0] * others**2)})
    assert isinstance(a, Ensemble)
    assert isinstance(b, Ensemble)
    assert_close((a, b), (members, other))


def test_a_teacher_and_its_students_are_mapped_together(members: Ensemble) -> None:
    difference = lambda student, teacher, x: student(x) - teacher(x)
    gains = members.trainable["gain"][:, None]
    assert_close(vmap(difference, (0, 0, None))(members, members[::-1], X[0]), X[0] * (gains - gains[::-1]))
    assert_close(vmap(difference, (0, None, None))(members, members[2], X[0]), X[0] * (gains - gains[2]))


def test_a_shared_ensemble_is_not_sliced(members: Ensemble) -> None:
    def call(ensemble: Any, x: Any) -> jax.Array:
        assert isinstance(ensemble, Ensemble)
        return ensemble(x)

    expected = X[:, None] * members.trainable["gain"][:, None]
    assert_close(vmap(call, (None, 0))(members, X), expected)
    assert_close(vmap(lambda tree, x: call(tree["e"], x), ({"e": None}, 0), chunk_size=2)({"e": members}, X), expected)
    assert_close(vmap(members.__call__)(X), expected)


def test_maps_over_members_and_over_data_nest(members: Ensemble) -> None:
    call = lambda model, x: model(x)
    expected = X * members.trainable["gain"][:, None, None]
    assert_close(vmap(vmap(call, (None, 0)), (0, None))(members, X), expected)
    assert_close(vmap(vmap(call, (0, None)), (None, 0), 1)(members, X), expected)
    assert_close(vmap(vmap(call, (None, 0), chunk_size=2), (0, None), chunk_size=2)(members, X), expected)
    assert_close(vmap(vmap(members, None), 0, 1)(X), expected)


def test_training_in_a_scan_carries_the_ensemble(ens: Ensemble) -> None:
    batches = np.stack([XS, XS[::-1], -XS])
    final, values = jax.lax.scan(lambda ens, x: vmap(train)(ens, x), ens, batches)
    expected, each = ens, []
    for batch in batches:
        expected, value = jax.jit(train_one_by_one)(expected, batch)
        each.append(value)
    assert_close((final, values), (expected, np.stack(each)))


def test_members_of_an_apply_function_carry_their_state() -> None:
    def step(model: Any, x: Any) -> Any:
        y = model(x)
        model.variables = model.variables | {"mean": x.mean(0)}
        return model, y

    apply = lambda variables, x: x * variables["params"] - variables["mean"]
    made = Ensemble.from_apply(apply, [{"params": X[i, 0], "mean": X[i, 1]} for i in range(SIZE)])
    after, ys = vmap(step)(made, XS)
    assert isinstance(after, Ensemble)
    assert_close([m.variables for m in after], [{"params": X[i, 0], "mean": XS[i].mean(0)} for i in range(SIZE)])
    assert_close(ys, XS * X[:SIZE, :1] - X[:SIZE, 1:])
    with pytest.raises(ValueError, match=r"changes the state of FunctionalModel \(`mean`\), which would be lost"):
        vmap(lambda model, x: step(model, x)[1])(made, XS)


def test_invalid_axes_of_an_ensemble_are_refused(ens: Ensemble) -> None:
    # Two members of shape (2, 2): without the check, a wrong axis would give wrong numbers.
    square = Ensemble.from_apply(jnp.dot, [np.ones((2, 2)), np.zeros((2, 2))])
    call = lambda model, *rest: model
    for in_axes in (1, (-1,), np.int64(-2)):
        with pytest.raises(ValueError, match=r"^vmap: in_axes is -?[12] for the ensemble `model`, whose members"):
            vmap(call, in_axes)(square)
    with pytest.raises(ValueError, match=r"in_axes is 1 for the ensemble `model\['a'\]`, .* pass 0 to map over them"):
        vmap(call, ({"a": 1},))({"a": square})
    with pytest.raises(ValueError, match=r"^vmap: in_axes for `model` has axes within a model; give one axis for all"):
        vmap(call, (jax.tree.map(lambda _: 0, square),))(square)
    with pytest.raises(ValueError, match=r"in_axes for `model` has axes within a model"):
        vmap(call, ([jax.tree.map(lambda _: 0, ens[0])],))([ens[0]])
    with pytest.raises(ValueError, match=r"axis 0 of argument `model\.trainable.*` has size 3, but .* has size 5"):
        vmap(call)(ens, X)


@pytest.mark.parametrize("out_axes", [1, None, -1, (1, 0), ({"m": None}, 0)])
def test_models_are_stacked_along_axis_0_only(ens: Ensemble, out_axes: Any) -> None:
    with pytest.raises(ValueError, match=r"^vmap: out_axes is .* for the model at output\[0\]\['m'\]; models are"):
        vmap(lambda model: ({"m": model}, np.ones((2, 3))), 0, out_axes)(ens)


def test_a_gradient_whose_slices_lack_the_batch_axis_points_to_per_sample_grad() -> None:
    model = nnx.Sequential(nnx.Conv(1, 2, (3, 3), rngs=nnx.Rngs(0)), lambda x: x.reshape(len(x), -1))
    x, y = jnp.ones((5, 8, 8, 1)), jnp.ones((5, 128))

    def loss(model: Any, x: Any, y: Any) -> Any:
        return ((model(x) - y) ** 2).sum(axis=1).mean()

    for transform in (grad, value_and_grad):
        with pytest.raises(Exception) as raised:  # noqa: PT011 (an error of Flax; the note is tested)
            vmap(transform(loss), in_axes=(None, 0, 0))(model, x, y)
        notes = "".join(raised.value.__notes__)
        assert "use plurax.transforms.per_sample_grad(loss, batch_argnums=(1, 2))" in notes
    assert jax.tree.leaves(per_sample_grad(loss, batch_argnums=(1, 2))(model, x, y))[0].shape[0] == 5
    with pytest.raises(ZeroDivisionError) as raised:
        vmap(lambda x: 1 / 0)(x)
    assert "per_sample_grad" not in "".join(getattr(raised.value, "__notes__", []))


@pytest.mark.parametrize("several", [list, tuple, nnx.List])
def test_several_models_as_a_function_are_refused_with_the_way_to_map_them(several: Any) -> None:
    nets = several([nnx.Linear(4, 3, rngs=nnx.Rngs(i)) for i in range(2)])
    with pytest.raises(TypeError, match=r"^vmap: fun is a .* of 2 models; .* pass plurax.ensemble.Ensemble.stack"):
        vmap(nets)
    x = jnp.ones((5, 4))
    np.testing.assert_allclose(vmap(Ensemble.stack([*nets]), in_axes=None)(x), [net(x) for net in nets], rtol=1e-6)
