"""State changes during a call: where they may be written, and what only looks like a change."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax import transforms
from plurax.transforms import Dual
from plurax.transforms._models.split_model import split
from plurax.transforms.program import accumulate, bucketed, scan_layers, stack_layers


class Net(nnx.Module):
    """A network whose call updates statistics and a random stream."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.dense, self.norm = nnx.Linear(3, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.norm(self.dense(x)))

    def loss(self, x: jax.Array, mask: Any = None) -> jax.Array:
        return (self(x) ** 2).sum()


X = jnp.arange(12.0).reshape(4, 3)
# Each calls a method of a module that writes to the module's state.
CALLS: dict[str, Callable[[Any, jax.Array], Any]] = {
    name: lambda loss, x, name=name: getattr(transforms, name)(loss)(x)
    for name in (
        *("grad", "value_and_grad", "jacrev", "jacfwd", "jacobian", "hessian"),
        *("hessian_diagonal", "hessian_trace", "laplacian"),
    )
} | {
    "hutchinson_trace": lambda loss, x: transforms.hutchinson_trace(loss, 2)(jax.random.key(0), x),
    "jvp": lambda loss, x: transforms.jvp(loss, (x,), (x,)),
    "vjp": lambda loss, x: transforms.vjp(loss, x)[0],
    "linearize": lambda loss, x: transforms.linearize(loss, x)[0],
    "dual": lambda loss, x: transforms.dual(loss)(Dual(x, x)).primal,
    "hvp": lambda loss, x: transforms.hvp(loss, (x,), (x,)),
    "vhp": lambda loss, x: transforms.vhp(loss, (x,), (x,)),
    "value_grad_and_hvp": lambda loss, x: transforms.value_grad_and_hvp(loss, (x,), (x,)),
    "gnvp": lambda loss, x: transforms.gnvp(loss, jnp.sin, x, x),
    "accumulate": lambda loss, x: accumulate(loss, 2, batch_argnums=0)(x),
    "bucketed": lambda loss, x: bucketed(loss)(x),
}


def state(net: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a module, except random keys."""
    return {path: np.asarray(x) for path, x in split(net).arrays().items() if not path.endswith("key")}


def outer_grad(fun: Any) -> Any:
    return jax.grad(lambda x: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(fun(x))))


@pytest.mark.parametrize("name", CALLS)
def test_state_that_is_closed_over_is_not_written(name: str) -> None:
    net = Net()
    before = state(net)
    outer = outer_grad if name in ("grad", "jvp", "accumulate") else jax.jit
    with pytest.raises(ValueError, match=f"^{name}: the call changes `.*` of Net, which is closed over by a function"):
        outer(lambda x: CALLS[name](net.loss, x))(X)
    np.testing.assert_equal(state(net), before)
    still = nnx.view(net, deterministic=True, use_running_average=True)
    outer(lambda x: CALLS[name](still.loss, x))(X)  # changes nothing


class Layer(nnx.Module):
    """A layer whose call changes the given attribute."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.w, self.seen = nnx.Param(jnp.ones(3)), nnx.BatchStat(jnp.zeros(()))
        self.plain = nnx.data(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.what == "plain":
            self.plain = self.plain + 1
        elif self.what:
            variable = getattr(self, self.what)
            variable[...] = variable[...] + 1
        return x * self.w


@pytest.mark.parametrize("outer", [jax.jit, outer_grad, jax.vmap, jax.checkpoint])
@pytest.mark.parametrize("what", ["w", "seen", "plain", ""])
def test_a_stack_that_is_closed_over_is_not_written(what: str, outer: Any) -> None:
    stack = stack_layers([Layer(what) for _ in range(2)])
    before = state(stack)
    transformed = outer(lambda x: scan_layers(stack, x)[0])
    if what:
        with pytest.raises(ValueError, match=f"^scan_layers: the call changes `{what}` of Layer, which is closed over"):
            transformed(X)
        np.testing.assert_equal(state(stack), before)
        nnx.jit(lambda stack, x: scan_layers(stack, x)[0])(stack, X)
        np.testing.assert_array_equal(state(stack)[f"layer.{what}"], before[f"layer.{what}"] + 1)
    else:
        transformed(X)


def test_no_module_is_written_if_one_cannot_be() -> None:
    far = Layer("seen")

    def outer(x: jax.Array) -> jax.Array:
        near = Layer("seen")
        held = near.seen.get_raw_value()
        with pytest.raises(ValueError, match="`seen` of Layer, which is closed over"):
            transforms.grad(lambda x, near, far: (near(x) + far(x)).sum())(x, near, far)
        assert near.seen.get_raw_value() is held
        return x

    jax.jit(outer)(X)


def test_an_inner_jit_updates_state_and_returns_the_rest() -> None:
    @nnx.jit
    def call(model: Layer, x: jax.Array) -> jax.Array:
        return model(x)

    def loss(model: Layer, x: jax.Array) -> jax.Array:
        return call(model, x).sum()

    layer = Layer("seen")
    transforms.grad(loss)(layer, X)
    assert float(layer.seen[...]) == 1
    with pytest.raises(ValueError, match="^grad: the call changes `seen` of Layer"):
        jax.jit(lambda x: transforms.grad(loss, 1)(layer, x))(X)
    quiet = Layer("")
    before = state(quiet)
    jax.jit(lambda x: transforms.grad(loss, 1)(quiet, x))(X)
    np.testing.assert_equal(state(quiet), before)


def test_each_of_several_models_gets_its_own_state() -> None:
    models: dict[str, Any] = {
        "a": Layer(""),
        "b": Layer("seen"),
        "c": nnx.Linear(3, 3, rngs=nnx.Rngs(0)),
        "d": Layer("seen"),
    }

    def mean(models: dict[str, Any], x: jax.Array) -> jax.Array:
        models["d"](x)
        return sum(model(x).mean() for model in models.values())

    accumulate(mean, 2)(models, X)
    assert [float(models[name].seen[...]) for name in ("a", "b", "d")] == [0, 2, 4]


# Counts of random streams from which no output draws.


class Recurrent(nnx.Module):
    """A recurrent layer, whose initial carry is zero or random; it draws a key for it in either case."""

    def __init__(self, rngs: nnx.Rngs, carry: Any = None) -> None:
        cell = nnx.GRUCell(3, 4, rngs=rngs)
        if carry:
            cell.carry_init = carry
        self.rnn, self.norm = nnx.RNN(cell, rngs=rngs), nnx.BatchNorm(4, use_running_average=True, rngs=rngs)

    def __call__(self, x: jax.Array, **kwargs: Any) -> jax.Array:
        return self.norm(self.rnn(x, **kwargs))


SEQUENCES = np.sin(np.arange(30.0, dtype=np.float32)).reshape(2, 5, 3)
EACH: dict[str, Callable[..., Any]] = {
    "vmap": lambda model, x, call=Recurrent.__call__: transforms.vmap(call, (None, 0))(model, x),
    "batch_jacobian": lambda model, x, call=Recurrent.__call__: transforms.batch_jacobian(call, 1, in_axes=(None, 0))(
        model, x
    ),
    "per_sample_grad": lambda model, x, call=Recurrent.__call__: transforms.per_sample_grad(
        lambda model, x: call(model, x).sum()
    )(model, x),
}


def of_each_alone(name: str, model: Any, x: Any) -> list[Any]:
    """Return the results of a transform in `EACH` for each sequence, by a transform that may change the model."""
    if name == "vmap":
        return [model(one) for one in x]
    if name == "batch_jacobian":
        return [jax.jacrev(lambda one: nnx.clone(model)(one))(one) for one in x]
    return [nnx.grad(lambda model, one: model(one).sum())(model, one[None]) for one in x]


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("wrap", [lambda call: call, nnx.jit], ids=["plain", "nnx.jit"])
def test_a_count_may_advance_if_no_output_draws_from_its_stream(name: str, wrap: Any) -> None:
    model = Recurrent(nnx.Rngs(0))
    call = wrap(lambda model, x: model(x))
    got = EACH[name](model, SEQUENCES, call)
    assert int(model.rnn.rngs.count[...]) == 0  # lost, as nothing depends on it
    expected = jax.tree.map(lambda *xs: jnp.stack(xs), *of_each_alone(name, model, SEQUENCES))
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    for actual, wanted in leaves:
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", EACH)
def test_a_count_on_which_an_output_depends_may_not_change(name: str) -> None:
    model = Recurrent(nnx.Rngs(0), nnx.initializers.normal())
    with pytest.raises(
        ValueError, match=rf"^{name}: .* state of Recurrent \(`rnn\.rngs\.count`\).*nnx\.RNN with initial"
    ):
        EACH[name](model, SEQUENCES)
    carried = lambda model, x: model(x, initial_carry=jnp.zeros((*x.shape[:-2], 4)))
    assert jax.tree.leaves(EACH[name](model, SEQUENCES, carried))
    norm = nnx.view(Recurrent(nnx.Rngs(0)), use_running_average=False)
    with pytest.raises(
        ValueError, match=rf"^{name}: .* state of Recurrent \(`norm\.mean`\).*use_running_average=True\)"
    ):
        EACH[name](norm, SEQUENCES)


class Drawing(nnx.Module):
    """A stream, and statistics."""

    def __init__(self) -> None:
        self.rngs, self.other, self.seen = nnx.Rngs(0), nnx.Rngs(1), nnx.BatchStat(jnp.zeros(()))


def count(model: Drawing) -> Any:
    return model.rngs.default.count


def advance(model: Drawing, by: Any) -> Any:
    count(model)[...] += by


def in_scan(model: Drawing, x: Any) -> Any:
    """Draw in a loop, and return something else."""
    graph, state = nnx.split(model)

    def step(state: Any, _: None) -> tuple[Any, Any]:
        inner = nnx.merge(graph, state)
        drawn = inner.rngs.uniform()
        return nnx.state(inner), drawn

    state, _ = jax.lax.scan(step, state, None, 3)
    nnx.update(model, state)
    return x


def branching(model: Drawing, x: Any) -> Any:
    drawn = model.rngs.uniform()
    return jax.lax.cond(x.sum() > 0, lambda: x, lambda: x + drawn)


CHANGES: dict[str, tuple[bool, Callable[[Any, Any], Any]]] = {
    # Whether the call is allowed, and the call.
    "a key that is not used": (True, lambda model, x: (model.rngs(), x)[1]),
    "numbers that are not used": (True, lambda model, x: (model.rngs.normal((3,)) * x.sum(), x)[1]),
    "a loop": (True, in_scan),
    "numbers of another stream": (False, lambda model, x: (model.rngs(), x + model.other.uniform())[1]),
    "numbers in an output": (False, lambda model, x: x + model.rngs.uniform()),
    "numbers in a branch": (False, branching),
    "numbers in aux": (False, lambda model, x: (x, {"drawn": model.rngs.uniform()})),
    "numbers in an effect": (False, lambda model, x: (jax.debug.print("{}", model.rngs.uniform()), x)[1]),
    "numbers in a returned module": (False, lambda model, x: (nnx.Param(model.rngs.uniform()), x)),
    "numbers in statistics": (False, lambda model, x: (model.seen.set_value(model.rngs.uniform()), x)[1]),
    "the count in an output": (False, lambda model, x: x + count(model)[...]),
    "a reset": (False, lambda model, x: (count(model).set_value(jnp.uint32(0)), x)[1]),
    "a reset, and a draw": (
        False,
        lambda model, x: (count(model).set_value(jnp.uint32(7)), x + model.rngs.uniform())[1],
    ),
    "a step from the data": (False, lambda model, x: (advance(model, x.sum().astype(jnp.uint32)), x)[1]),
    "a key": (False, lambda model, x: (model.rngs.default.key.set_value(model.rngs()), x)[1]),
}


@pytest.mark.parametrize("what", CHANGES)
def test_only_an_advance_that_reaches_nothing_may_be_lost(what: str) -> None:
    allowed, call = CHANGES[what]
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)

    def moved(model: Any, x: Any) -> Any:
        if what == "the count in an output":
            model.rngs()
        return call(model, x)

    for function in (moved, nnx.jit(moved)):
        model = Drawing()
        if allowed:
            np.testing.assert_array_equal(transforms.vmap(function, (None, 0))(model, x), x)
        else:
            with pytest.raises(ValueError, match=r"changes the state of Drawing \(`"):
                transforms.vmap(function, (None, 0))(model, x)
        assert int(count(model)[...]) == 0
