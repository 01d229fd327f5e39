"""Optimizers in one form, against loops that use optax as its documentation does."""

import logging
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plurax.transforms._runs.optimizer import as_transform, check_opt_state

pytestmark = pytest.mark.smoke

PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.array([0.5, -1.0, 2.0])}


def loss(params: Any) -> jax.Array:
    return jnp.sum((params["w"] - 0.3) ** 2) + jnp.sum(jnp.cos(params["b"]))


def train(optimizer: Any, steps: int) -> tuple[Any, Any]:
    """Return the parameters and the state after some steps."""
    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(steps):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("reset_state", [False, True])
@pytest.mark.parametrize("chained", [False, True])
def test_lookahead_is_that_of_optax(reset_state: bool, chained: bool, caplog: Any) -> None:
    optimizer = optax.lookahead(optax.adam(0.1), sync_period=3, slow_step_size=0.4, reset_state=reset_state)
    if chained:
        optimizer = optax.chain(optax.clip_by_global_norm(0.5), optimizer)
    for steps in (2, 3, 7):
        pair = optax.LookaheadParams.init_synced(PARAMS)
        state = optimizer.init(pair)
        for _ in range(steps):
            updates, state = optimizer.update(jax.grad(loss)(pair.fast), state, pair)
            pair = optax.apply_updates(pair, updates)
        with caplog.at_level(logging.WARNING):
            params, ours = train(as_transform(optimizer), steps)
        assert not caplog.records  # optax warns of parameters that are not a pair
        chex.assert_trees_all_equal(params, pair.fast)
        chex.assert_trees_all_equal(ours.slow, pair.slow)
        chex.assert_trees_all_equal(ours.inner, state)
        assert np.allclose(params["w"], ours.slow["w"]) == (steps == 3)


def test_lookahead_that_is_converted_twice_is_the_same() -> None:
    """As inside `averages.collect`, whose result `Trainer` converts again."""
    optimizer = optax.lookahead(optax.adam(0.1), sync_period=2, slow_step_size=0.4)
    once, twice = as_transform(optimizer), as_transform(as_transform(optimizer))
    chex.assert_trees_all_equal(train(once, 3), train(twice, 3))


@pytest.mark.parametrize("make", ["masked", "partition", "adamw"])
def test_a_mask_of_another_structure_is_named(make: str) -> None:
    class Masks(dict[str, Any]):
        """Another kind of node, as an `nnx.State` is."""

    jax.tree_util.register_pytree_node(
        Masks, lambda x: (list(x.values()), (*x,)), lambda keys, x: Masks(zip(keys, x, strict=True))
    )
    masks, labels = Masks(w=True, b=False), Masks(w="a", b="b")
    kinds = {"a": optax.sgd(0.1), "b": optax.set_to_zero()}
    of = {
        "masked": lambda masks, _: optax.masked(optax.sgd(0.1), masks),
        "partition": lambda _, labels: optax.partition(kinds, labels),
        "adamw": lambda masks, _: optax.adamw(0.1, mask=masks),
    }[make]
    match = r"^optimizer: a mask or labels have another structure than the parameters, which are \{'b': 'float32\[3\]'"
    with pytest.raises(ValueError, match=match):
        as_transform(of(masks, labels)).init(PARAMS)
    remedy = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    labelled = lambda params: jax.tree.map(lambda x: "a" if x.ndim > 1 else "b", params)
    plain = of({"w": True, "b": False}, {"w": "a", "b": "b"})
    chex.assert_trees_all_equal(train(as_transform(of(remedy, labelled)), 2)[0], train(as_transform(plain), 2)[0])
    with pytest.raises(ValueError, match="^unrelated"):
        as_transform(optax.GradientTransformation(lambda _: _raise("unrelated"), optax.sgd(0.1).update)).init(PARAMS)


def _raise(text: str) -> None:
    raise ValueError(text)


def test_multi_steps_is_its_own_transformation() -> None:
    optimizer = optax.MultiSteps(optax.adam(0.1), every_k_schedule=2)
    chex.assert_trees_all_equal(train(as_transform(optimizer), 5), train(optimizer.gradient_transformation(), 5))


def test_other_optimizers_are_unchanged() -> None:
    mask = {"w": True, "b": False}
    for optimizer in (optax.adam(0.1), optax.masked(optax.sgd(0.1), mask), optax.contrib.schedule_free_sgd(0.1)):
        chex.assert_trees_all_equal(train(as_transform(optimizer), 3), train(optimizer, 3))


@pytest.mark.parametrize("other", [None, "adam", optax.adam, (lambda params: None, lambda *args: None)])
def test_anything_else_is_not_an_optimizer(other: Any) -> None:
    assert as_transform(other) is None


@pytest.mark.parametrize(
    ("made_by", "used_by", "difference"),
    [
        (optax.adam(0.1), optax.sgd(0.1), r"it has `opt_state\[0\].count`, which this optimizer does not use"),
        (optax.sgd(0.1), optax.adam(0.1), r"it lacks `opt_state\[0\].count`, an array of shape \(\) and dtype int32"),
        (optax.adam(0.1), optax.sgd(0.1, 0.9), r"it lacks `opt_state\[0\].trace\['b'\]`, an array of shape \(3,\)"),
        (optax.sgd(0.1), optax.chain(optax.sgd(0.1)), "it consists of other transformations"),
        (
            optax.adafactor(0.1, min_dim_size_to_factor=2),
            optax.adafactor(0.1),
            r"`opt_state\[0\]\[0\].v\['w'\]|`opt_state\[0\].v\w*\['w'\]` is an array of shape .*, but must be an array",
        ),
        (optax.lookahead(optax.sgd(0.1), 2, 0.5), optax.sgd(0.1), r"it has `opt_state.slow\['b'\]`, which this optim"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(made_by: Any, used_by: Any, difference: str) -> None:
    state, init = as_transform(made_by).init(PARAMS), as_transform(used_by).init
    checked: set[Any] = set()
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^api: the state is from another optimizer: {difference}.*; use"):
            check_opt_state("api", state, init, PARAMS, checked)
    assert not checked


def test_a_state_is_compared_once() -> None:
    calls = []

    def init(params: Any) -> Any:
        calls.append(params)
        return optax.adam(0.1).init(params)

    checked: set[Any] = set()
    for value in (1.0, 2.0):
        state = optax.adam(0.1).init(jax.tree.map(lambda x, v=value: jnp.full_like(x, v), PARAMS))
        check_opt_state("api", state, init, PARAMS, checked)
    assert len(calls) == 1


def test_a_state_of_another_precision_is_accepted() -> None:
    state = optax.adam(0.1).init(PARAMS)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim else x, state)
    check_opt_state("api", half, optax.adam(0.1).init, PARAMS, set())
    wrong = jax.tree.map(lambda x: x.astype(int), state)
    with pytest.raises(ValueError, match=r"`opt_state\[0\].mu\['b'\]` is an array .* int32, but must be .* float32"):
        check_opt_state("api", wrong, optax.adam(0.1).init, PARAMS, set())
