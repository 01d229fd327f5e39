"""Remedies of `vmap`, of axes and of memory budgets."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from plurax.ensemble import Ensemble
from plurax.transforms import grad, jacfwd, per_sample_grad, value_and_grad, vmap

from ._registry import Fails, remedy

ENSEMBLE = Ensemble.create(lambda rngs: nnx.Linear(3, 2, rngs=rngs), 4, seed=0)
X = jnp.arange(6.0).reshape(2, 3)


@remedy("{}: with {}, a collective over axis_name would see only one chunk; leave one out.")
def axis_name_with_chunks(fails: Fails) -> None:
    fails(lambda: vmap(jnp.sin, axis_name="i", chunk_size=2))
    vmap(jnp.sin, axis_name="i")(X)
    vmap(jnp.sin, chunk_size=2)(X)


@remedy("{}: axis_size={}, but the ensemble has {} members; leave it out.")
def size_of_an_ensemble(fails: Fails) -> None:
    fails(lambda: vmap(ENSEMBLE, in_axes=None, axis_size=3))
    assert vmap(ENSEMBLE, in_axes=None)(X).shape == (4, 2, 2)


@remedy(
    "whose members are along axis 0; pass 0 to map over them, or None to pass the whole ensemble",
)
def axis_of_an_ensemble(fails: Fails) -> None:
    outputs = lambda ensemble: ensemble(X)
    for axis in (1, -1, 5):
        fails(vmap(outputs, in_axes=axis), ENSEMBLE)
        fails(vmap(lambda parts, x: parts[1](x), in_axes=((None, axis), 0)), (1.0, ENSEMBLE), X)
    assert vmap(outputs)(ENSEMBLE).shape == (4, 2, 2)
    both = vmap(lambda ensemble, x: ensemble(x), in_axes=(None, 0))
    assert both(ENSEMBLE, X).shape == (2, 4, 2)


@remedy("return its arrays or outputs, or map over its members with in_axes=0")
def ensemble_returned(fails: Fails) -> None:
    fails(vmap(lambda ensemble, x: (ensemble, ensemble(x)), in_axes=(None, 0)), ENSEMBLE, X)
    assert vmap(lambda ensemble, x: ensemble(x), in_axes=(None, 0))(ENSEMBLE, X).shape == (2, 4, 2)
    back, out = vmap(lambda member, x: (member, member(x)), in_axes=(0, None))(ENSEMBLE, X)
    assert len(back) == 4
    assert out.shape == (4, 2, 2)


@remedy("{}: in_axes for `{}` has axes within a model; give one axis for all of it.")
def axes_within_a_model(fails: Fails) -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    call = lambda model, x: model(x)
    fails(vmap(call, in_axes=(jax.tree.map(lambda _: 0, model), 0)), model, X)
    assert vmap(call, in_axes=(None, 0))(model, X).shape == (2, 2)
    stacked = vmap(lambda key: nnx.Linear(3, 2, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 2))
    fails(vmap(call, in_axes=(jax.tree.map(lambda _: 0, stacked), 0)), stacked, X)
    assert vmap(call)(stacked, X).shape == (2, 2)


class Noisy(nnx.Module):
    """Has dropout and BatchNorm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.dropout = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(x))


@remedy(
    "return the model as well",
    "pass split_rngs=True, so that each slice draws its own numbers",
    "use its evaluation mode: {}{})",
)
def state_in_vmap(fails: Fails) -> None:
    model, batches = Noisy(nnx.Rngs(0)), jnp.arange(24.0).reshape(4, 2, 3)
    call = lambda model, x: model(x)
    evaluation = nnx.view(model, use_running_average=True, deterministic=True)
    for mapped in (functools.partial(vmap(call, in_axes=(None, 0)), model), vmap(model)):
        fails(mapped, batches)
    assert vmap(call, in_axes=(None, 0))(evaluation, batches).shape == batches.shape
    assert vmap(evaluation)(batches).shape == batches.shape
    both = lambda model, x: (model, model(x))
    back, out = vmap(both, in_axes=(None, 0), split_rngs=True)(model, jnp.tile(batches[:1], (4, 50, 1)))
    assert len({(row == 0).tobytes() for row in np.asarray(out)}) == 4
    back, _ = vmap(both, in_axes=(None, 0))(model, batches)
    np.testing.assert_allclose(back.norm.mean[...], 0.01 * batches.mean(1), rtol=1e-5)

    members = Ensemble.create(Noisy, 4, seed=0)
    assert "ensemble.view(" in fails(vmap(members, in_axes=None), batches[0])
    back, _ = vmap(lambda member, x: (member, member(x)), in_axes=(0, None))(members, batches[0])
    assert isinstance(back, Ensemble)
    view = members.view(use_running_average=True, deterministic=True)
    assert vmap(view, in_axes=None)(batches[0]).shape == (4, 2, 3)


@remedy(
    "add one, as in x[None], or, if what is differentiated is not mapped, use {}",
)
def mapped_gradient(fails: Fails) -> None:
    def loss(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jnp.einsum("bi,i->b", x, w) - y) ** 2)

    w, y = jnp.ones(3), jnp.ones(2)
    said = fails(vmap(grad(loss), in_axes=(None, 0, 0)), w, X, y)
    assert "per_sample_grad(loss, batch_argnums=(1, 2))" in said
    expected = jnp.stack([jax.grad(loss)(w, X[i : i + 1], y[i : i + 1]) for i in range(2)])
    np.testing.assert_allclose(per_sample_grad(loss, batch_argnums=(1, 2))(w, X, y), expected, rtol=1e-5)
    with_axis = lambda w, x, y: loss(w, x[None], y[None])
    np.testing.assert_allclose(vmap(grad(with_axis), in_axes=(None, 0, 0))(w, X, y), expected, rtol=1e-5)
    fails(vmap(value_and_grad(loss, argnums=1), in_axes=(None, 0, 0)), w, X, y)
    _, by_x = vmap(value_and_grad(with_axis, argnums=1), in_axes=(None, 0, 0))(w, X, y)
    np.testing.assert_allclose(by_x, 2 * (X @ w - y)[:, None] * w, rtol=1e-5)


@remedy("use the same containers and keys, or one int for all of it")
def structure_of_axes(fails: Fails) -> None:
    batch = {"x": X, "y": jnp.ones(2)}
    total = lambda batch: {"sum": batch["x"].sum() + batch["y"], "x": batch["x"]}
    for axes in ({"x": 0}, {"x": 0, "z": 0}, [0, 0]):
        fails(vmap(total, in_axes=(axes,)), batch)
    np.testing.assert_allclose(vmap(total, in_axes=({"x": 0, "y": 0},))(batch)["sum"], [4, 13])
    np.testing.assert_allclose(vmap(total, in_axes=(0,))(batch)["sum"], [4, 13])
    fails(vmap(total, out_axes={"sum": 0}), batch)
    assert vmap(total, out_axes={"sum": 0, "x": 1})(batch)["x"].shape == (3, 2)
    assert vmap(total, out_axes=0)(batch)["x"].shape == (2, 3)


@remedy(
    "{} entries, but the call has {} positional argument(s)",
    "{}: in_axes has {}; give one entry for each, None for a shared one.",
)
def number_of_axes(fails: Fails) -> None:
    fails(vmap(jnp.dot, in_axes=(0,)), X, jnp.ones(3))
    np.testing.assert_allclose(vmap(jnp.dot, in_axes=(0, None))(X, jnp.ones(3)), [3, 12])
    scaled = lambda x, *, scale: x * scale
    fails(vmap(scaled, in_axes=(0, 0)), X, scale=jnp.ones(2))
    np.testing.assert_allclose(vmap(scaled, in_axes=(0,))(X, scale=jnp.ones(2)), X)


@remedy(
    ", or pass None for an argument that is shared",
    "{}: argument `{}` {}; name an axis it has{}.",
    "{}: {}, but {}; map arrays of one size{}.",
)
def mapped_axes(fails: Fails) -> None:
    fails(vmap(jnp.multiply), X, 2.0)
    fails(vmap(jnp.multiply, in_axes=(0, 2)), X, X)
    fails(vmap(jnp.multiply), X, jnp.ones(3))
    np.testing.assert_allclose(vmap(jnp.multiply, in_axes=(0, None))(X, 2.0), 2 * X)
    np.testing.assert_allclose(vmap(jnp.multiply, in_axes=(0, None))(X, jnp.ones(3)), X)
    np.testing.assert_allclose(vmap(jnp.multiply, in_axes=(0, 0))(X, X), X * X)
    np.testing.assert_allclose(vmap(jnp.multiply, in_axes=(1, 0))(X, jnp.ones(3)), X.T)
    # Members of an ensemble are mapped too.
    fails(vmap(ENSEMBLE), X)
    assert vmap(ENSEMBLE, in_axes=None)(X).shape == (4, 2, 2)
    assert vmap(ENSEMBLE)(jnp.ones((4, 3))).shape == (4, 2)


class Scaled(nnx.Linear):
    """Has a keyword argument."""

    def __call__(self, inputs: jax.Array, out_sharding: Any = None, *, scale: Any = 1.0) -> jax.Array:
        return super().__call__(inputs, out_sharding) * scale


@remedy(", or bind shared keyword arguments with {}, since all are mapped over axis 0")
def shared_keywords(fails: Fails) -> None:
    scaled = lambda x, *, scale: x * scale
    assert "functools.partial" in fails(vmap(scaled), X, scale=2.0)
    np.testing.assert_allclose(vmap(functools.partial(scaled, scale=2.0))(X), 2 * X)
    ensemble, inputs = Ensemble.create(lambda rngs: Scaled(3, 2, rngs=rngs), 4, seed=0), jnp.ones((4, 3))
    expected = ensemble(inputs, scale=jnp.full(4, 2.0), in_axes=0)
    for call in (vmap(ensemble), functools.partial(ensemble, in_axes=0)):
        assert "a function of a member" in fails(call, inputs, scale=jnp.array(2.0))
    member_of = lambda member, x: member(x, scale=jnp.array(2.0))
    np.testing.assert_allclose(vmap(member_of)(ensemble, inputs), expected, rtol=1e-6)


@remedy("{}: nothing is mapped: {}; map at least one argument, or pass axis_size.")
def nothing_mapped(fails: Fails) -> None:
    fails(vmap(jnp.sin, in_axes=None), X)
    assert vmap(jnp.sin, in_axes=None, axis_size=5)(X).shape == (5, 2, 3)
    assert vmap(jnp.sin)(X).shape == (2, 3)
    fails(vmap(lambda: jnp.ones(3)))
    assert vmap(lambda: jnp.ones(3), axis_size=5)().shape == (5, 3)
    ones = lambda batch: jnp.ones(3)
    fails(vmap(ones), {})
    assert vmap(ones, axis_size=5)({}).shape == (5, 3)


@remedy("name one from {} to {}", "{}: out_axes is {} for {}; models are stacked along axis 0, so pass 0.")
def output_axes(fails: Fails) -> None:
    axis: int | None
    for axis in (2, -3):
        fails(vmap(jnp.sum, out_axes=axis), X)
    for axis in (-1, 0):
        assert vmap(jnp.sum, out_axes=axis)(X).shape == (2,)
    one: Any = lambda x: 1.0
    fails(vmap(one, out_axes=1), X)
    assert vmap(one, out_axes=-1)(X).shape == (2,)

    def train(member: Any, x: jax.Array) -> Any:
        return member, member(x)

    for axis in (1, None):
        fails(vmap(train, in_axes=(0, None), out_axes=axis), ENSEMBLE, X)
        back, out = vmap(train, in_axes=(0, None), out_axes=(0, 1))(ENSEMBLE, X)
        assert len(back) == 4
        assert out.shape == (2, 4, 2)


@remedy("{}: {} and memory_budget both set the chunk; give one of them.")
def chunk_and_budget(fails: Fails) -> None:
    fails(lambda: vmap(jnp.sin, chunk_size=2, memory_budget="1MiB"))
    vmap(jnp.sin, chunk_size=2)(X)
    vmap(jnp.sin, memory_budget="1MiB")(X)


def wide(x: jax.Array) -> jax.Array:
    """Need some memory for each slice."""
    return jnp.linalg.inv(jnp.eye(40) + jnp.outer(x, x)).sum()


@remedy("{}: no chunk fits into memory_budget={}: {}; raise the budget.")
def budget_too_small(fails: Fails) -> None:
    slices = jnp.ones((3, 40))
    said = fails(vmap(wide, memory_budget=100), slices)
    enough = said.partition("the smallest found is ")[2].partition(",")[0]
    vmap(wide, memory_budget=enough)(slices)


@remedy("use lax.cond or jnp.where, or leave the budget out if the value is the same for all slices")
def branch_under_a_budget(fails: Fails) -> None:
    def scaled(x: jax.Array, scale: Any) -> jax.Array:
        return x * scale if scale > 1 else x

    by_where = lambda x, scale: jnp.where(scale > 1, x * scale, x)
    fails(jacfwd(scaled, 1, memory_budget="1MiB"), X[0], 2.0)
    np.testing.assert_allclose(jacfwd(scaled, 1)(X[0], 2.0), X[0])
    np.testing.assert_allclose(jacfwd(by_where, 1, memory_budget="1MiB")(X[0], 2.0), X[0])
    # Of the slices all values are traced, with a budget and without one.
    fails(vmap(scaled, memory_budget="1MiB"), X, jnp.ones(2))
    np.testing.assert_allclose(vmap(by_where, memory_budget="1MiB")(X, jnp.ones(2)), X)


@remedy(
    "{}: memory_budget={} bounds this part of the program alone (it needs {}, with {}), but the vmap, loop or "
    "derivative around it may need more; give the budget to the outermost transform, or compile the whole program and "
    "read its memory_analysis()."
)
def budget_inside(fails: Fails) -> None:
    inner = vmap(jnp.sin, memory_budget="1MiB")
    fails(vmap(inner), X)
    vmap(vmap(jnp.sin), memory_budget="1MiB")(X)
    fails(grad(lambda x: inner(x).sum()), X[0])
    program = jax.jit(grad(lambda x: vmap(jnp.sin)(x).sum())).lower(X[0]).compile()
    assert program.memory_analysis() is not None


@remedy(
    "pass plurax.ensemble.Ensemble.stack([*models]), with in_axes=None if all get the same input",
    "{}: fun is a {} of {} models; to map over models, {}.",
)
def list_of_models(fails: Fails) -> None:
    models = [nnx.Linear(3, 2, rngs=nnx.Rngs(i)) for i in range(2)]
    for several in (models, nnx.List(models)):
        fails(lambda several=several: vmap(several))
        found = vmap(Ensemble.stack([*several]), in_axes=None)(X)
        np.testing.assert_allclose(found, jnp.stack([model(X) for model in models]), rtol=1e-6)


@remedy(
    "{}: {}; pass True for all streams, or False.",
    "{}: split_rngs selects {}; map the module, or pass a filter that leaves it out.",
)
def streams_to_split(fails: Fails) -> None:
    call = lambda model, x: (model, model(x))
    batches = jnp.ones((4, 50, 3))
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))
    fails(vmap(call, (None, 0), split_rngs="params"), model, batches)
    for chosen in (True, "dropout"):
        out = np.asarray(vmap(call, (None, 0), split_rngs=chosen)(model, batches)[1])
        assert len({row.tobytes() for row in out}) == 4
    evaluation = nnx.view(model, deterministic=True)
    assert (vmap(call, (None, 0), split_rngs=False)(evaluation, batches)[1] == 1).all()

    stacked = nnx.Dict(dropout=nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0)), noise=nnx.Rngs(noise=1).split(4))
    drop = lambda model, x: (model, model["dropout"](x))
    fails(vmap(drop, (None, 0), split_rngs=True), stacked, batches)
    out = np.asarray(vmap(drop, (None, 0), split_rngs=nnx.PathContains("dropout"))(stacked, batches)[1])
    assert len({row.tobytes() for row in out}) == 4
    many = nnx.Rngs(dropout=1).split(4)
    mapped = vmap(lambda rngs, x: (rngs, jax.random.bernoulli(rngs.dropout(), 0.5, x.shape)), (0, 0))
    assert len({row.tobytes() for row in np.asarray(mapped(many, batches)[1])}) == 4
