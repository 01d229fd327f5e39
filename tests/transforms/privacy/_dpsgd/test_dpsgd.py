"""`DPSGD` against an explicit implementation of the algorithm, and its errors for wrong usage."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from flax import linen, nnx
from flax.core import freeze

from plurax.ensemble import Ensemble
from plurax.transforms.privacy import DPSGD, Batch, clipped_grad
from plurax.transforms.privacy._dpsgd import accounting
from plurax.transforms.privacy._dpsgd import settings as _settings
from plurax.transforms.privacy._dpsgd.noise import privatizer

N, CLIP, EXPECTED = 40, 0.7, 8.0
X = np.sin(np.arange(N * 4.0)).reshape(N, 4).astype(np.float32)
Y = np.arange(N) % 3
PARAMS = {"w": np.cos(np.arange(12.0)).reshape(4, 3).astype(np.float32), "b": np.array([0.1, -0.2, 0.3], np.float32)}
SETTINGS: dict[str, Any] = {
    "l2_clip_norm": CLIP,
    "noise_multiplier": 1.3,
    "target_delta": 1e-3,
    "num_examples": N,
    "expected_batch_size": EXPECTED,
    "num_steps": 12,
    "accountant": "rdp",
}


def loss(params: Any, x: Any, y: Any) -> Any:
    logits = x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def model_loss(model: Any, x: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0, norm: Any = None) -> None:
        self.first = nnx.Linear(4, 5, use_bias=False, rngs=rngs)
        self.norm = norm(5, rngs=rngs) if norm else (lambda x: x)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.drop(nnx.tanh(self.norm(self.first(x)))))


def group_norm(size: int, rngs: nnx.Rngs) -> nnx.GroupNorm:
    return nnx.GroupNorm(size, num_groups=1, rngs=rngs)


def make(loss: Any = loss, optimizer: Any = None, **settings: Any) -> DPSGD:
    return DPSGD(loss, optimizer or optax.sgd(0.5), **{**SETTINGS, **settings})


@cache
def usual(method: str = "auto") -> DPSGD:
    """Return the instance of most tests, which trace its step only once."""
    return make(method=method)


@cache
def noiseless(method: str = "auto") -> DPSGD:
    return make(method=method, noise_multiplier=0.0, optimizer=optax.sgd(EXPECTED))


value_and_gradient = jax.jit(jax.value_and_grad(loss))

SIZES = (20,)  # one size, hence one program


def a_batch(numbers: Any, size: int, x: Any = X, y: Any = Y) -> Batch:
    numbers = np.asarray(numbers, int)
    places = np.concatenate([numbers, np.zeros(size - len(numbers), int)])
    return Batch((x[places], y[places]), np.arange(size) >= len(numbers))


def noise_key(seed: int) -> jax.Array:
    """Return the key of a run's noise."""
    return jax.random.fold_in(jax.random.key(seed), 2**32 - 1)


def run(dp: DPSGD, model: Any, seed: int = 0, steps: int | None = None, sizes: Any = SIZES) -> Any:
    state = dp.init(model, key=jax.random.key(seed))
    for batch in islice(dp.batches((X, Y), state, sizes=sizes), steps):
        state, _ = dp.step(state, batch)
    return state


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance)


def arrays(state: Any) -> Any:
    """Return the leaves of a state as NumPy arrays, keys as their data."""
    key = jax.dtypes.prng_key
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, key) else x) for x in jax.tree.leaves(state)]


# Steps.


@pytest.fixture(scope="module")
def written_out() -> Any:
    """Return the parameters after a run, and for each step the batch, the mean loss and the clipped share."""
    dp = usual()
    noise = privatizer(dp.ledger, noise_key(5))
    params, noise_state, steps = PARAMS, noise.init(PARAMS), []
    update = jax.jit(noise.update)
    for batch in dp.batches((X, Y), dp.init(PARAMS, key=jax.random.key(5)), sizes=SIZES):
        x, y = (argument[~batch.is_padding_example] for argument in batch.arguments)
        total, losses, clipped = jax.tree.map(np.zeros_like, params), [], []
        for i in range(len(x)):
            value, gradient = jax.tree.map(np.asarray, value_and_gradient(params, x[i : i + 1], y[i : i + 1]))
            norm = math.sqrt(sum(float(np.sum(leaf**2)) for leaf in jax.tree.leaves(gradient)))
            total = jax.tree.map(lambda t, g, norm=norm: t + min(1.0, CLIP / norm) * g, total, gradient)
            losses.append(value)
            clipped.append(norm > CLIP)
        noisy, noise_state = update(total, noise_state)
        params = jax.tree.map(lambda p, g: p - 0.5 * np.asarray(g) / EXPECTED, params, noisy)
        steps.append((batch, np.mean(losses), np.mean(clipped)))
    return jax.tree.map(np.float32, params), steps


@pytest.mark.parametrize("method", ["auto", "vmap", "ghost", "book_keeping"])
def test_a_run_equals_the_explicit_algorithm(method: str, written_out: Any) -> None:
    dp = usual(method)
    state = dp.init(PARAMS, key=jax.random.key(5))
    params, steps = written_out
    for batch, mean_loss, clipped in steps:
        state, metrics = dp.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], mean_loss, rtol=1e-5)
        np.testing.assert_allclose(metrics["clipped"], clipped, rtol=1e-5)
    assert_close(state.model, params)
    assert int(state.step) == len(steps) == 12


@pytest.mark.parametrize("method", ["auto", "vmap", "ghost", "book_keeping"])
def test_auxiliary_outputs_of_the_loss_are_metrics(method: str) -> None:
    """Metrics are means over the examples; padding, which may hold NaN, is excluded."""

    def with_aux(params: Any, x: Any, y: Any) -> Any:
        logits = x @ params["w"] + params["b"]
        beside = {"correct": logits.argmax(-1) == y, "logits": {"of": logits}, "count": 1}
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), beside

    batch, plain = a_batch([3, 1, 4], 20), usual(method)
    batch = replace(batch, arguments=(np.where(batch.is_padding_example[:, None], np.nan, batch.arguments[0]), Y[:20]))
    state = plain.init(PARAMS, key=jax.random.key(5))
    expected, before = plain.step(state, batch)
    after, metrics = make(with_aux, method=method, has_aux=True).step(state, batch)
    assert_close(after.model, expected.model)
    assert_close({name: metrics[name] for name in before}, before)
    logits = batch.arguments[0][:3] @ PARAMS["w"] + PARAMS["b"]
    np.testing.assert_allclose(metrics["correct"], np.mean(logits.argmax(-1) == Y[:3]), rtol=1e-6)
    np.testing.assert_allclose(metrics["logits"]["of"], logits.mean(0), rtol=1e-5)
    assert float(metrics["count"]) == 1.0


@pytest.mark.slow
def test_the_history_contains_scalar_metrics() -> None:
    def with_aux(model: Any, x: Any, y: Any) -> Any:
        return model_loss(model, x, y), {"logits": model(x), "mean": model(x).mean()}

    dp = make(with_aux, has_aux=True, num_steps=2)
    for model in (Network(nnx.Rngs(0)), Ensemble.create(Network, 3, seed=0)):
        _, history = dp.fit(dp.init(model, key=jax.random.key(0)), (X, Y), progress=False)
        assert {"loss", "clipped", "mean"} < set(history[0])
        assert "logits" not in history[0]
    array = make(lambda params, x, y: (loss(params, x, y), x.mean()), has_aux=True)
    assert "aux" in array.step(array.init(PARAMS, key=jax.random.key(0)), a_batch([1], 2))[1]


@pytest.mark.parametrize(
    ("beside", "kind", "message"),
    [
        ({"name": "text"}, TypeError, r"`aux\['name'\]` is 'text' of type str; leave it out"),
        ({"loss": 1.0}, ValueError, r"DPSGD: the auxiliary output of the loss has `loss`, which DPSGD uses"),
        (None, TypeError, r"with has_aux=True, fun must return a pair"),
    ],
)
def test_invalid_metrics_are_refused(beside: Any, kind: type[Exception], message: str) -> None:
    def of(params: Any, x: Any, y: Any) -> Any:
        value = loss(params, x, y)
        return value if beside is None else (value, beside)

    dp = make(of, has_aux=True)
    with pytest.raises(kind, match=message):
        dp.step(dp.init(PARAMS, key=jax.random.key(0)), a_batch([1], 2))


INTEGERS = {"order": np.array([2, 0, 3, 1]), "count": np.array(7, np.int32)}


def indexed(params: Any, x: Any, y: Any) -> Any:
    return loss({"w": params["w"][params["order"]], "b": params["b"] * params["count"] / 7}, x, y)


@cache
def without_integers() -> Any:
    """Return the parameters after two steps of a loss that closes over the integers."""
    return run(make(lambda params, x, y: indexed({**params, **INTEGERS}, x, y)), PARAMS, steps=2).model


@pytest.mark.parametrize("method", ["auto", "vmap", "ghost", "book_keeping"])
def test_integer_parameters_are_unchanged(method: str) -> None:
    """They also receive no noise."""
    state = run(make(indexed, method=method), {**PARAMS, **INTEGERS}, steps=2)
    np.testing.assert_array_equal(state.model["order"], INTEGERS["order"])
    assert state.model["count"] == 7
    assert state.model["count"].dtype == jnp.int32
    assert_close({name: state.model[name] for name in PARAMS}, without_integers())


def test_the_divisor_is_the_expected_size_not_the_drawn_one() -> None:
    dp = noiseless()
    total = jax.jit(clipped_grad(loss, batch_argnums=(1, 2), l2_clip_norm=CLIP))(PARAMS, X[:3], Y[:3])
    state, _ = dp.step(dp.init(PARAMS, key=jax.random.key(0)), a_batch([0, 1, 2], 20))
    assert_close(state.model, jax.tree.map(lambda p, g: p - g, PARAMS, total))


def test_a_batch_without_examples_adds_noise() -> None:
    dp = usual()
    state = dp.init(PARAMS, key=jax.random.key(5))
    after, metrics = dp.step(state, a_batch([], 20))
    noise, _ = privatizer(dp.ledger, noise_key(5)).update(jax.tree.map(jnp.zeros_like, PARAMS), state.noise_state)
    assert_close(after.model, jax.tree.map(lambda p, z: p - 0.5 * z / EXPECTED, PARAMS, noise))
    assert float(jnp.abs(after.model["w"] - PARAMS["w"]).min()) > 0
    assert np.isnan(metrics["loss"])


def test_the_contents_of_padding_do_not_matter() -> None:
    dp = usual()
    state = dp.init(PARAMS, key=jax.random.key(5))
    batch = a_batch([3, 9], 20)
    lost = np.where(batch.is_padding_example[:, None], np.nan, batch.arguments[0])
    after, metrics = dp.step(state, batch)
    other, other_metrics = dp.step(state, Batch((lost, batch.arguments[1]), batch.is_padding_example))
    jax.tree.map(np.testing.assert_array_equal, (arrays(after), metrics), (arrays(other), other_metrics))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("method", ["auto", "vmap", "ghost", "book_keeping"])
def test_neighbors_are_at_most_one_clip_norm_apart(scale: float, method: str) -> None:
    """The noiseless step, with and without one example, which the noise has to hide."""
    dp = noiseless(method)
    x = (scale * X).astype(np.float32)
    state = dp.init(jax.tree.map(np.zeros_like, PARAMS), key=jax.random.key(0))
    everyone, _ = dp.step(state, a_batch(range(12), 20, x))
    farthest = 0.0
    for left_out in range(12):
        others, _ = dp.step(state, a_batch([i for i in range(12) if i != left_out], 20, x))
        apart = jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), everyone.model, others.model)
        farthest = max(farthest, math.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(apart))))
    assert farthest <= CLIP * (1 + 1e-5)
    assert scale < 1 or farthest > 0.99 * CLIP


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e38])
def test_one_non_finite_example_changes_nothing_else(poison: float) -> None:
    dp = usual()
    x = X.copy()
    x[3] = poison
    state = dp.init(PARAMS, key=jax.random.key(0))
    with_it, metrics = dp.step(state, a_batch([1, 3, 5], 20, x))
    without, _ = dp.step(state, a_batch([1, 5], 20, x))
    assert_close(with_it.model, without.model)
    assert metrics["clipped"] > 0


# Models, optimizers, dtypes.


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1, momentum=0.9),
        optax.adamw(1e-2),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(0.1, 10))),
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
        optax.lion(1e-3),
    ],
)
def test_any_optimizer_gets_the_noisy_mean(optimizer: Any) -> None:
    dp, plain = make(optimizer=optimizer), usual()  # its learning rate is 0.5
    state = dp.init(PARAMS, key=jax.random.key(0))
    params, opt_state = state.model, state.opt_state

    @jax.jit
    def update(gradient: Any, opt_state: Any, params: Any) -> Any:
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for batch in dp.batches((X, Y), state, sizes=SIZES):
        given = plain.init(params, key=jax.random.key(0))
        one, _ = plain.step(replace(given, noise_state=state.noise_state, step=state.step), batch)
        gradient = jax.tree.map(lambda p, q: (np.asarray(p) - np.asarray(q)) / np.float32(0.5), params, one.model)
        params, opt_state = update(gradient, opt_state, params)
        state, _ = dp.step(state, batch)
        assert_close(state.model, params, 1e-4)


def test_a_module_is_trained_as_its_arrays() -> None:
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    trained = run(make(model_loss), model).model
    by_arrays = run(make(lambda p, x, y: loss({"w": p["kernel"], "b": p["bias"]}, x, y)), before).model
    assert isinstance(trained, nnx.Linear)
    assert_close(nnx.to_pure_dict(nnx.state(trained)), by_arrays)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(model)), before)


def test_a_pytree_may_hold_modules() -> None:
    tree = {"net": Network(nnx.Rngs(0)), "scale": jnp.ones(3)}
    trained = run(make(lambda t, x, y: model_loss(lambda x: t["net"](x) * t["scale"], x, y)), tree).model
    assert isinstance(trained["net"], Network)
    assert not np.allclose(trained["scale"], 1)


@pytest.mark.slow
def test_members_train_as_each_would_alone() -> None:
    dp = make(model_loss, optax.adam(1e-2))
    ensemble = Ensemble.create(lambda rngs: Network(rngs, 0.3), 3, seed=0)
    key = jax.random.key(7)
    together = dp.init(ensemble, key=key)
    alone = [dp.init(ensemble[i], key=jax.random.fold_in(key, i)) for i in range(3)]
    for batch in dp.batches((X, Y), together, sizes=SIZES):
        together, metrics = dp.step(together, batch)
        each = [dp.step(state, batch) for state in alone]
        alone = [state for state, _ in each]
        assert_close(metrics, jax.tree.map(lambda *x: jnp.stack(x), *(m for _, m in each)))
    assert isinstance(together.model, Ensemble)
    for i in range(3):
        assert_close(nnx.to_pure_dict(nnx.state(together.model[i], nnx.Param)), alone[i].tree.trainable)
    assert int(together.model[2].drop.rngs.count[...]) == int(alone[2].model.drop.rngs.count[...]) == 12


def test_members_have_independent_noise() -> None:
    same = Ensemble.stack([nnx.Linear(4, 3, rngs=nnx.Rngs(0)) for _ in range(2)])
    trained = run(make(model_loss), same, steps=1).model
    assert not np.isclose(trained[0].kernel[...], trained[1].kernel[...]).any()


def test_runs_with_data_of_their_own_train_together() -> None:
    dp = make(optimizer=optax.adam(1e-2))
    data = [(X + i, (Y + i) % 3) for i in range(3)]
    states = [dp.init(PARAMS, key=jax.random.key(i)) for i in range(3)]
    batches = [next(iter(dp.batches(mine, state, sizes=SIZES))) for mine, state in zip(data, states, strict=True)]
    stacked = lambda *x: jnp.stack(x)
    together, metrics = jax.vmap(dp.step)(jax.tree.map(stacked, *states), jax.tree.map(stacked, *batches))
    alone = [dp.step(state, batch) for state, batch in zip(states, batches, strict=True)]
    assert_close(together.model, jax.tree.map(stacked, *(state.model for state, _ in alone)))
    assert_close(metrics, jax.tree.map(stacked, *(mine for _, mine in alone)))
    assert repr(together).startswith("DPState(step=?, ")


def test_functions_of_variables_are_models_too() -> None:
    variables = [{"params": jax.tree.map(lambda x, i=i: x + i, PARAMS)} for i in range(2)]
    ensemble = Ensemble.from_apply(lambda v, x: x @ v["params"]["w"] + v["params"]["b"], variables)
    dp = make(lambda model, x, y: model_loss(model, x, y))
    trained = run(dp, ensemble).model
    alone = run(dp, ensemble[1], steps=0)
    assert trained[1].variables["params"]["w"].shape == alone.model.variables["params"]["w"].shape


@pytest.mark.parametrize("nested", [lambda v: v, lambda v: {"net": v, "w": jnp.ones(2)}, lambda v: (v,), freeze])
def test_linen_variables_with_statistics_are_refused(nested: Any) -> None:
    variables = {"params": PARAMS, "batch_stats": {"mean": jnp.zeros(3)}}
    with pytest.raises(
        ValueError, match="the Linen variables have 'batch_stats' in addition .* pass variables.\"params"
    ):
        make().init(nested(variables), key=jax.random.key(0))
    member = Ensemble.from_apply(lambda v, x: x @ v["params"]["w"], [variables])[0]
    assert make().init(member, key=jax.random.key(0)).tree.trainable["batch_stats"]["mean"] is None


@pytest.mark.parametrize("name", ["rng", "rngs"])
def test_keys_that_all_examples_share_give_a_warning(name: str) -> None:
    plain = {"w": jnp.ones(3), "key": jax.random.key(0)}
    with pytest.warns(
        UserWarning, match=r"draw from the random key `params\['key'\]`, so they share dropout masks"
    ) as seen:
        make().init(plain, key=jax.random.key(0))
    assert seen[0].filename == __file__
    variables = {"params": PARAMS, name: {"dropout": jax.random.key(0)}}
    for model in ((ensemble := Ensemble.from_apply(lambda v, x: x, [variables] * 2)), ensemble[0]):
        with pytest.warns(UserWarning, match="`rng.dropout`") if name == "rng" else contextlib.nullcontext():
            make().init(model, key=jax.random.key(0))


def test_linen_draws_a_mask_for_each_example_in_each_step() -> None:
    net = linen.Dropout(0.5, deterministic=False)

    def sees(model: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        kept = model.call_and_update(jnp.ones(20)) > 0
        return (model.variables["params"]["w"] * x).mean(), (kept * 2.0 ** jnp.arange(20)).sum()

    rngs = {"dropout": jax.random.key(0), "count": jnp.uint32(0)}
    ensemble = Ensemble.from_apply(net.apply, [{"params": {"w": jnp.ones(())}, "rngs": rngs}] * 2)
    for model in (ensemble[0], ensemble):
        dp = make(sees, has_aux=True)
        state, masks = dp.init(model, key=jax.random.key(1)), []
        for _ in range(2):
            batch = Batch((np.ones((3, 1), np.float32),), np.zeros(3, bool))
            for example in range(3):
                chosen = replace(batch, is_padding_example=np.arange(3) != example)
                masks.append(np.asarray(dp.step(state, chosen)[1]["aux"]).ravel())
            state, _ = dp.step(state, batch)
        drawn = np.concatenate(masks)
        # Two of twelve masks of 20 fair bits are equal with a probability below 12 * 11 / 2 / 2**20 = 6e-5.
        assert len(set(drawn.tolist())) == len(drawn)
        trained: Any = state.model
        trained = trained if model is not ensemble else trained[1]
        assert int(trained.variables["rngs"]["count"]) == 2
        assert jax.random.key_data(trained.variables["rngs"]["dropout"]).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("method", ["vmap", "book_keeping"])
def test_half_precision_keeps_the_bound(dtype: Any, method: str) -> None:
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(4, 3)), dtype), "b": jnp.zeros(3, dtype)}
    x = jnp.asarray(3 * rng.normal(size=(60, 4)), dtype)
    options: Any = {"batch_argnums": (1, 2), "l2_clip_norm": CLIP, "dtype": jnp.float32, "method": method}
    one = clipped_grad(loss, **options)
    norm = jax.jit(lambda *args: optax.tree.norm(one(*args)))
    norms = [float(norm(params, x[i : i + 1], Y[i % N : i % N + 1])) for i in range(60)]
    assert 0.95 * CLIP < max(norms) <= CLIP * (1 + 1e-6)


@pytest.mark.parametrize("method", ["ghost", "book_keeping"])
def test_half_precision_is_summed_in_float32(method: str) -> None:
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
    dp = make(method=method, noise_multiplier=0.0)
    state = dp.init(half, key=jax.random.key(0))
    after, _ = jax.jit(dp.step)(state, next(iter(dp.batches((X, Y), state))))
    assert {x.dtype for x in jax.tree.leaves(after.model)} == {jnp.dtype(jnp.bfloat16)}
    assert all(bool((a != b).any()) for a, b in zip(*map(jax.tree.leaves, (after.model, half)), strict=True))


def test_complex_parameters_are_refused() -> None:
    """Complex normal noise has half the variance in each part."""
    with pytest.raises(TypeError, match=r"^DPSGD.init: `params\['b'\]` is an array .* complex64, but parameters mu"):
        make().init({**PARAMS, "b": PARAMS["b"] + 0j}, key=jax.random.key(0))


@pytest.mark.parametrize("bands", [7, 11])
def test_batches_that_are_a_whole_group_are_fine(bands: int) -> None:
    dp = make(num_examples=25, expected_batch_size=25 / bands, noise_strategy=np.ones(bands), num_steps=30)
    assert dp.ledger.sampling_probability == 1.0


def test_half_precision_is_summed_and_made_noisy_in_float32() -> None:
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
    dp = make(optimizer=optax.sgd(1.0))
    state = dp.init(half, key=jax.random.key(0))
    batch = a_batch(range(9), 12)
    after, _ = dp.step(state, batch)
    of = jax.jit(clipped_grad(loss, batch_argnums=(1, 2), l2_clip_norm=CLIP, dtype=jnp.float32))
    total = of(half, X[:9], Y[:9])
    noisy, _ = privatizer(dp.ledger, noise_key(0)).update(total, state.noise_state)
    expected = jax.tree.map(lambda p, g: p - (g / EXPECTED).astype(p.dtype), half, noisy)
    chex.assert_trees_all_equal_shapes_and_dtypes(after.model, expected)
    assert_close(
        jax.tree.map(lambda x: x.astype(float), after.model), jax.tree.map(lambda x: x.astype(float), expected), 2e-2
    )


def test_double_precision_stays() -> None:
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), PARAMS)
        assert all(x.dtype == jnp.float64 for x in jax.tree.leaves(run(usual(), params, steps=2).model))


def test_users_with_several_examples_are_clipped_as_one() -> None:
    dp = make(keep_batch_dim=False, num_examples=N // 2, noise_multiplier=0.0, optimizer=optax.sgd(EXPECTED))
    state = dp.init(PARAMS, key=jax.random.key(0))
    after, _ = dp.step(state, Batch((X.reshape(N // 2, 2, 4)[:1], Y.reshape(N // 2, 2)[:1]), np.zeros(1, bool)))
    _, gradient = value_and_gradient(PARAMS, X[:2], Y[:2])
    scale = min(1.0, CLIP / math.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(gradient))))
    assert_close(after.model, jax.tree.map(lambda p, g: p - scale * g, PARAMS, gradient))


# Random numbers and other model state.


def test_examples_and_steps_have_independent_dropout() -> None:
    seen = []

    def spying(model: Any, x: Any, y: Any) -> Any:
        out = model.drop(jnp.ones((1, 200)))
        jax.debug.callback(lambda mask: seen.append(np.asarray(mask)), out)
        return model_loss(model, x, y) + 0 * out.sum()

    dp = make(spying, method="vmap")
    state = dp.init(Network(nnx.Rngs(0), 0.5), key=jax.random.key(0))
    batch = a_batch([5, 5, 5], 3)
    for _ in range(2):
        state, _ = dp.step(state, batch)
        jax.effects_barrier()
    masks = np.concatenate([mask.reshape(-1, 200) for mask in seen])
    assert len(np.unique(masks, axis=0)) == len(masks) == 8  # each step also evaluates zeros once, for the count
    assert int(state.model.drop.rngs.count[...]) == 4  # two draws per step


def test_masks_do_not_follow_from_the_keys_of_the_model() -> None:
    """A model contains its keys, which would reveal the mask of each example."""
    dp = make(model_loss, noise_multiplier=0.0)
    model, batch = Network(nnx.Rngs(0), 0.5), a_batch([1, 2, 3], 4)
    one, other = (dp.step(dp.init(model, key=jax.random.key(seed)), batch)[0] for seed in (0, 1))
    kernels = [np.asarray(state.model.last.kernel[...]) for state in (one, other)]
    assert not np.allclose(*kernels)
    keys = [jax.random.key_data(state.model.drop.rngs.key[...]) for state in (one, other)]
    np.testing.assert_array_equal(*keys)


def test_an_example_with_a_mask_is_clipped_with_it() -> None:
    """Both runs draw the same masks: the last example is left out."""
    dp = make(model_loss, noise_multiplier=0.0, optimizer=optax.sgd(EXPECTED), l2_clip_norm=0.1)
    state = dp.init(Network(nnx.Rngs(0), 0.5), key=jax.random.key(0))
    one, _ = dp.step(state, a_batch(range(9), 12))
    other, _ = dp.step(state, a_batch(range(8), 12))
    apart = jax.tree.map(jnp.subtract, one.tree.trainable, other.tree.trainable)
    assert optax.tree.norm(apart) <= 0.1 * (1 + 1e-5)


@pytest.mark.parametrize("by", ["count", "cond"])
def test_counts_in_the_model_reveal_nothing_about_the_data(by: str) -> None:
    def telling(model: Any, x: Any, y: Any) -> Any:
        if by == "count":
            model.drop.rngs.count[...] += (1000 * y[0]).astype(jnp.uint32)
        else:
            nnx.cond(y[0] > 0, lambda m: m.drop(x), lambda m: x, model)
        return model_loss(model, x, y)

    dp = make(telling, method="vmap")
    state = dp.init(Network(nnx.Rngs(0), 0.5), key=jax.random.key(0))
    counts = {int(dp.step(state, a_batch([i], 2))[0].model.drop.rngs.count[...]) for i in range(3)}
    assert len(counts) == 1


def test_random_state_with_an_axis_of_one_keeps_it() -> None:
    model = Network(nnx.Rngs(0), 0.5)
    model.drop.rngs.key = nnx.RngKey(jax.random.split(jax.random.key(0), 1), tag="dropout")
    model.drop.rngs.count = nnx.RngCount(jnp.zeros(1, jnp.uint32), tag="dropout")

    def split_loss(model: Any, x: Any, y: Any) -> Any:
        mask = jax.random.bernoulli(model.drop.rngs.key[...][0], 0.5, (5,))
        model.drop.rngs.count[...] += 1
        return model_loss(lambda x: model.last(mask * nnx.tanh(model.first(x))), x, y)

    trained = run(make(split_loss), model, steps=2).model
    assert trained.drop.rngs.count[...].tolist() == [2]


def test_a_key_that_a_model_keeps_may_change() -> None:
    class Keeper(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.last = nnx.Linear(4, 3, rngs=rngs)
            self.key = nnx.Variable(jax.random.key(3))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.key[...], use = jax.random.split(self.key[...])
            return self.last(x + 0.1 * jax.random.normal(use, x.shape))

    trained = run(make(model_loss), Keeper(nnx.Rngs(0)), steps=2).model
    twice = jax.random.split(jax.random.split(jax.random.key(3))[0])[0]
    np.testing.assert_array_equal(*map(jax.random.key_data, (trained.key[...], twice)))


def test_microbatches_divide_the_padded_sizes() -> None:
    assert_close(run(make(microbatch_size=3), PARAMS, sizes=None).model, run(usual(), PARAMS).model)


def test_unused_dropout_has_no_effect() -> None:
    trained = run(make(model_loss), nnx.view(Network(nnx.Rngs(0), 0.5), deterministic=True))
    assert int(trained.model.drop.rngs.count[...]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit, nnx.remat])
def test_group_norm_trains_where_batch_norm_is_refused(wrap: Any) -> None:
    dp = make(lambda model, x, y: wrap(model_loss)(model, x, y))
    if wrap is nnx.jit:  # with the others, the network with fixed statistics trains, below
        run(dp, Network(nnx.Rngs(0), norm=group_norm), steps=1)
    message = (
        r"DPSGD: the loss changes `norm.(mean|var)` of Network, which the noise does not protect; "
        r"do not assign it; for BatchNorm use nnx.GroupNorm or nnx.view\(model, use_running_average=True\)."
    )
    training = Network(nnx.Rngs(0), norm=nnx.BatchNorm)
    with pytest.raises(ValueError, match=message):
        run(dp, training, steps=1)
    with pytest.raises(ValueError, match=message):
        run(dp, Ensemble.stack([training, Network(nnx.Rngs(1), norm=nnx.BatchNorm)]), steps=1)
    run(dp, nnx.view(training, use_running_average=True), steps=1)


# Compilation, traces, compositions.


def test_nothing_recompiles() -> None:
    traced = []

    def counted(params: Any, x: Any, y: Any) -> Any:
        traced.append(x.shape)
        return loss(params, x, y)

    dp = make(counted, optax.adam(1e-2), num_steps=100)
    state = dp.init(PARAMS, key=jax.random.key(0))
    counts: dict[int, int] = {}
    for batch in dp.batches((X, Y), state, sizes=(7, 10, 40)):
        state, _ = dp.step(state, batch)
        counts.setdefault(len(batch.is_padding_example), len(traced))
    assert sorted(counts) == [7, 10, 40]
    assert len(traced) == max(counts.values())  # traced only for the first batch of each size
    assert len(set(counts.values())) == 3


def test_a_step_under_jit_and_scan_is_a_step() -> None:
    dp = usual()
    state = dp.init(PARAMS, key=jax.random.key(0))
    batches = [a_batch([i, i + 3, i + 9], 5) for i in range(4)]
    expected = state
    for batch in batches:
        expected, _ = dp.step(expected, batch)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    scanned, metrics = jax.lax.scan(dp.step, state, stacked)
    assert metrics["loss"].shape == (4,)
    for one in (
        scanned,
        jax.jit(
            lambda s: jax.lax.fori_loop(0, 4, lambda i, s: dp.step(s, jax.tree.map(lambda x: x[i], stacked))[0], s)
        )(state),
    ):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), arrays(one), arrays(expected))


def test_a_step_leaves_its_arguments_usable() -> None:
    dp = usual()
    state = dp.init(PARAMS, key=jax.random.key(0))
    batch = next(dp.batches((X, Y), state, sizes=SIZES))
    first = arrays(dp.step(state, batch)[0])
    jax.tree.map(np.testing.assert_array_equal, first, arrays(dp.step(state, batch)[0]))


def test_the_same_key_gives_the_same_run_and_another_another() -> None:
    dp = make(model_loss)
    first, again, other = (run(dp, Network(nnx.Rngs(0)), seed) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, arrays(first), arrays(again))
    assert not np.isclose(first.tree.trainable["last"]["kernel"], other.tree.trainable["last"]["kernel"]).any()
    assert first.seed.tolist() != other.seed.tolist()


def test_batches_without_a_state_are_new_each_time() -> None:
    """A false alarm, two runs that draw the same examples in all twelve steps, has probability below 1e-30."""
    one, other = ([batch.arguments[0].tolist() for batch in make().batches((X, Y))] for _ in range(2))
    assert len(one) == len(other) == 12
    assert one != other


def test_batches_resume_at_the_step_of_the_state() -> None:
    dp = usual()
    state = run(dp, PARAMS, steps=5)
    whole = list(dp.batches((X, Y), dp.init(PARAMS, key=jax.random.key(0))))
    rest = list(dp.batches((X, Y), state))
    assert len(rest) == 7
    jax.tree.map(np.testing.assert_array_equal, rest, whole[5:])


# Accounting.


def test_epsilon_is_that_of_the_steps_taken() -> None:
    dp = usual()
    state = dp.init(PARAMS, key=jax.random.key(0))
    assert dp.epsilon(state) == 0
    state = run(dp, PARAMS)
    assert dp.epsilon(state) == dp.epsilon(12) == dp.ledger.epsilon(12, 1e-3, "rdp")
    assert dp.event(state) == dp.ledger.event(12)


def test_epsilon_of_members_alone_and_together() -> None:
    dp = make(model_loss)
    state = run(dp, Ensemble.create(Network, 4, seed=0), steps=3)
    np.testing.assert_array_equal(dp.epsilon(state), np.full(4, dp.epsilon(3)))
    assert dp.epsilon(state, together=True) == dp.ledger.epsilon(3, 1e-3, "rdp", 4) > dp.epsilon(3)
    assert dp.event(state, together=True) == dp.ledger.event(3, 4)


def test_epsilon_counts_by_the_ledger_of_the_state() -> None:
    state = run(usual(), PARAMS)
    assert make(noise_multiplier=9.0).epsilon(state) == usual().epsilon(12)


def test_calibrated_noise_meets_the_target() -> None:
    dp = make(noise_multiplier=None, target_epsilon=3.0)
    assert 2.99 < dp.epsilon(12) <= 3.0
    assert dp.noise_multiplier == dp.ledger.noise_multiplier
    by_reference = make(
        noise_multiplier=None,
        target_epsilon=8.0,
        target_delta=1e-5,
        num_examples=1000,
        expected_batch_size=40,
        num_steps=2000,
    )
    assert by_reference.noise_multiplier == pytest.approx(1.3562, abs=5e-5)


def test_no_noise_is_no_privacy() -> None:
    assert make(noise_multiplier=0.0).epsilon(1) == math.inf


@pytest.mark.parametrize("bands", [1, 3])
def test_correlated_noise_replaces_independent_noise(bands: int) -> None:
    dp = make(noise_strategy=np.array([1.0, 0.5, 0.25][:bands]), optimizer=optax.sgd(1.0))
    assert dp.ledger.sampling_probability == bands * EXPECTED / N
    state = dp.init(PARAMS, key=jax.random.key(5))
    noise = privatizer(dp.ledger, noise_key(5))
    params, noise_state = PARAMS, noise.init(PARAMS)
    clipped = jax.jit(clipped_grad(loss, batch_argnums=(1, 2), l2_clip_norm=CLIP))
    for batch in dp.batches((X, Y), state, sizes=SIZES):
        total = clipped(params, *batch.arguments, is_padding_example=batch.is_padding_example)
        noisy, noise_state = jax.jit(noise.update)(total, noise_state)
        params = jax.tree.map(lambda p, g: p - g / EXPECTED, params, noisy)
        state, _ = dp.step(state, batch)
    assert_close(state.model, params, 1e-4)


# Refusals.


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"target_epsilon": 1.0}, ValueError, "pass either noise_multiplier or target_epsilon, but got both."),
        (
            {"noise_multiplier": None},
            ValueError,
            "pass either noise_multiplier or target_epsilon, but got neither",
        ),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier must be finite and at least 0, but got -1.0."),
        ({"noise_multiplier": math.nan}, ValueError, "noise_multiplier must be finite and at least 0, but got nan."),
        ({"noise_multiplier": "1"}, TypeError, "noise_multiplier must be a number, but got '1' of type str."),
        (
            {"noise_multiplier": None, "target_epsilon": 0.0},
            ValueError,
            "target_epsilon must be positive and finite, but got 0.0.",
        ),
        ({"l2_clip_norm": 0.0}, ValueError, "l2_clip_norm must be positive and finite, but got 0.0."),
        ({"l2_clip_norm": math.inf}, ValueError, "l2_clip_norm must be positive and finite, but got inf."),
        ({"target_delta": 0.0}, ValueError, "target_delta must be between 0 and 1, but got 0.0."),
        ({"target_delta": 1.0}, ValueError, "target_delta must be between 0 and 1, but got 1.0."),
        ({"num_examples": 40.0}, TypeError, "num_examples must be an int, but got 40.0 of type float."),
        ({"num_examples": 0}, ValueError, "num_examples must be at least 1, but got 0."),
        ({"num_steps": True}, TypeError, "num_steps must be an int, but got True of type bool."),
        ({"num_steps": 0}, ValueError, "num_steps must be at least 1, but got 0."),
        (
            {"expected_batch_size": 41},
            ValueError,
            "expected_batch_size must be positive, and at most num_examples=40, but got 41.",
        ),
        ({"expected_batch_size": 0}, ValueError, "expected_batch_size must be positive, and at most num_examples=40"),
        (
            {"method": "fast"},
            ValueError,
            "method must be one of 'auto', 'vmap', 'ghost', 'book_keeping', but got 'fast'.",
        ),
        ({"accountant": "gdp"}, ValueError, "accountant must be one of 'pld', 'rdp', but got 'gdp'."),
        ({"microbatch_size": 0}, ValueError, "microbatch_size must be"),
        (
            {
                "noise_multiplier": None,
                "target_epsilon": 1.0,
                "target_delta": 1e-18,
                "truncated_batch_size": 9,
                "accountant": "pld",
            },
            ValueError,
            "truncated batches have an infinite ε for target_delta=1e-18; pass a larger δ, or omit truncated_batch",
        ),
        ({"optimizer": optax.adam}, TypeError, "optimizer must be an optax GradientTransformation, such as"),
        ({"loss": None}, TypeError, "loss must be a function, a bound method or a module, but got None."),
        (
            {"noise_strategy": [[1.0]]},
            ValueError,
            "noise_strategy must be an array of finite numbers, shape (bands,), the first positive, but got [[1.0]]",
        ),
        (
            {"noise_strategy": "banded"},
            ValueError,
            "noise_strategy must be an array of finite numbers, shape (bands,), the first positive",
        ),
        (
            {"noise_strategy": [-1.0, 0.5]},
            ValueError,
            "noise_strategy must be an array of finite numbers, shape (bands,), the first positive",
        ),
        (
            {"noise_strategy": np.ones(6)},
            ValueError,
            "6 bands allow batches of 6.66667 examples, but expected_batch_size=8.0; use fewer bands",
        ),
    ],
)
def test_invalid_settings_are_refused(settings: Any, error: Any, message: str) -> None:
    settings = {"loss": loss, "optimizer": optax.sgd(0.1), **settings}
    with pytest.raises(error, match="^" + re.escape(f"DPSGD: {message}")):
        make(settings.pop("loss"), settings.pop("optimizer"), **settings)


def test_a_delta_above_one_over_n_warns() -> None:
    with pytest.warns(UserWarning, match=r"target_delta=0.1 is more than 1 / num_examples = 2.5e-02, a δ that"):
        make(target_delta=0.1)


def test_a_half_precision_delta_is_not_rounded_again() -> None:
    dp = make(target_delta=np.float16(1e-5), num_examples=70_000)  # exceeds the largest float16, and would warn
    assert dp.target_delta == float(np.float16(1e-5))


@pytest.mark.parametrize("name", ["jax_privacy", "dp_accounting"])
def test_a_missing_extra_is_named(monkeypatch: Any, name: str) -> None:
    monkeypatch.setattr(_settings, "find_spec", lambda found: None if found == name else object())
    hyphened = name.replace("_", "-")
    with pytest.raises(ModuleNotFoundError, match=rf"DPSGD needs {hyphened}; install it with pip install 'plurax\[pri"):
        make()


def test_a_key_is_required() -> None:
    with pytest.raises(TypeError, match="key"):
        make().init(PARAMS)  # type: ignore[call-arg]  # tests the missing argument
    for wrong in (None, 0, jnp.zeros(2, jnp.uint32), jax.random.split(jax.random.key(0))):
        with pytest.raises(TypeError, match=r"^DPSGD.init: key must be one key, such as jax.random.key\(0\), but got "):
            make().init(PARAMS, key=wrong)


def test_parameters_that_cannot_train_are_refused() -> None:
    key = jax.random.key(0)
    with pytest.raises(
        TypeError, match=r"^DPSGD.init: `params\['n'\]` is an array of shape \(3,\) and dtype int32, but"
    ):
        make().init({"n": jnp.arange(3)}, key=key)
    with pytest.raises(TypeError, match=r"^DPSGD.init: `params\['act'\]` is .* of type \w+, but parameters must be"):
        make().init({**PARAMS, "act": jnp.tanh}, key=key)
    with pytest.raises(TypeError, match=r"^DPSGD.init: `params\[0\]` is 1.0 of type float, but parameters must be"):
        make().init([1.0], key=key)
    with pytest.raises(ValueError, match=r"^DPSGD.init: there are no parameters to train; pass a model"):
        make().init({}, key=key)
    one = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    other = nnx.Linear(2, 2, rngs=nnx.Rngs(1))
    other.kernel = one.kernel
    with pytest.raises(ValueError, match=r"^DPSGD.init: two modules share `kernel`; put them into one"):
        make().init([one, other], key=key)


@pytest.mark.parametrize(
    ("optimizer", "needs"),
    [
        (optax.lbfgs(), "missing 3 required keyword-only arguments: 'value', 'grad', and 'value_fn'"),
        (optax.polyak_sgd(), "missing 1 required keyword-only argument: 'value'"),
        (optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), "missing 1 required keyword-only argument"),
        (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True), "grad_fn must be provided"),
        (optax.MultiSteps(optax.polyak_sgd(), 2), "missing 1 required keyword-only argument: 'value'"),
    ],
)
def test_an_optimizer_that_evaluates_the_loss_is_refused(optimizer: Any, needs: str) -> None:
    message = (
        "the optimizer must update from gradients and parameters alone, since the loss is not private, but it raises"
    )
    for model in (PARAMS, Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 2, seed=0)):
        with pytest.raises(TypeError, match=f"^DPSGD.init: {message}: .*{needs}"):
            make(optimizer=optimizer).init(model, key=jax.random.key(0))


@pytest.mark.slow
def test_optimizers_that_need_more_than_a_transformation() -> None:
    """Without noise and clipping, a step over all examples is one of ordinary gradients."""
    settings: Any = {"noise_multiplier": 0.0, "l2_clip_norm": 1e3, "expected_batch_size": N}
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    for optimizer in (
        optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.4),
        optax.contrib.sam(optax.sgd(0.1), ascent, sync_period=2),
        optax.MultiSteps(optax.sgd(0.1), 2),
    ):
        dp = make(optimizer=optimizer, **settings)
        state = run(dp, PARAMS, steps=3, sizes=(N,))
        looks_ahead = hasattr(state.opt_state, "slow")
        params: Any = optax.LookaheadParams.init_synced(PARAMS) if looks_ahead else PARAMS
        opt_state = optimizer.init(params)
        for _ in range(3):
            now = params.fast if looks_ahead else params
            updates, opt_state = optimizer.update(jax.grad(loss)(now, X, Y), opt_state, params)
            params = optax.apply_updates(params, updates)
        assert_close(state.model, params.fast if looks_ahead else params, 1e-4)
        if looks_ahead:
            assert_close(state.opt_state.slow, params.slow, 1e-4)


@pytest.mark.parametrize("members", [None, 2])
@pytest.mark.parametrize(
    ("made_by", "used_by", "difference"),
    [
        (optax.adam(0.1), optax.sgd(0.1), r"it has `opt_state\[0\].count`, which this optimizer does not use"),
        (optax.sgd(0.1), optax.adam(0.1), r"it lacks `opt_state\[0\].count`, an array of shape .* and dtype int32"),
        (optax.rmsprop(0.1), optax.adam(0.1), r"it lacks `opt_state\[0\].count`"),
        (optax.sgd(0.1), optax.chain(optax.clip(1.0), optax.sgd(0.1)), "it consists of other transformations"),
    ],
)
def test_a_state_of_another_optimizer_is_refused(made_by: Any, used_by: Any, difference: str, members: Any) -> None:
    model: Any = PARAMS
    if members:
        model = Ensemble.from_apply(lambda v, x: x @ v["w"] + v["b"], [PARAMS] * members)
    state = make(optimizer=made_by).init(model, key=jax.random.key(0))
    dp = make(optimizer=used_by)
    message = f"the state is from another optimizer: {difference}.*; use the optimizer that made it, or call init"
    with pytest.raises(ValueError, match=f"^DPSGD.step: {message}"):
        dp.step(state, a_batch([1], 2))
    with pytest.raises(ValueError, match=f"^DPSGD.step: {message}"):
        jax.jit(dp.step)(state, a_batch([1], 2))
    with pytest.raises(ValueError, match=f"^DPSGD.fit: {message}"):
        dp.fit(state, (X, Y), progress=False)


def test_data_of_other_libraries_are_examples_too(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "x", X.dtype, "w+", shape=X.shape)
    mapped[:] = X
    expected = run(make(), PARAMS, steps=2)
    for x, y in ((mapped, Y), (pd.DataFrame(X), pd.Series(Y)), (jnp.asarray(X), jnp.asarray(Y))):
        dp = make()
        state, _ = dp.fit(dp.init(PARAMS, key=jax.random.key(0)), (x, y), steps=2, sizes=SIZES, progress=False)
        assert_close(state.model, expected.model)


def test_batches_are_taken_one_after_another_each_once() -> None:
    dp = usual()
    state = dp.init(PARAMS, key=jax.random.key(0))
    first, second = (next(batches) for batches in [dp.batches((X, Y), state, sizes=SIZES)] for _ in range(2))
    after, _ = dp.step(state, first)
    message = r"^DPSGD.step: the batch was drawn for a state after {} steps, but this state has taken {}; use each"
    for wrong, given, numbers in [(first, after, (0, 1)), (second, state, (1, 0))]:
        with pytest.raises(ValueError, match=message.format(*numbers)):
            dp.step(given, wrong)
    with pytest.raises(ValueError, match=message.format(0, 1)):
        dp.step(after, next(dp.batches((X, Y), sizes=SIZES)))
    dp.step(after, second)


def test_batches_of_another_probability_are_refused() -> None:
    dp, everyone = make(), make(expected_batch_size=N)
    batch = next(everyone.batches((X, Y)))
    message = (
        r"^DPSGD.step: the batch was drawn with poisson sampling \(probability 1, every 1 steps\), but ε is computed "
        r"for poisson sampling \(probability 0.2, every 1 steps\)"
    )
    with pytest.raises(ValueError, match=message):
        dp.step(dp.init(PARAMS, key=jax.random.key(0)), batch)


@pytest.mark.parametrize("padding", [None, np.zeros(2), np.zeros((2, 1), bool), np.zeros(0, bool)])
def test_invalid_padding_is_refused(padding: Any) -> None:
    dp = make()
    message = r"^DPSGD.step: is_padding_example must be booleans, shape \(size,\), but got .*; an empty batch consists"
    with pytest.raises(ValueError, match=message):
        dp.step(dp.init(PARAMS, key=jax.random.key(0)), Batch((X[:2], Y[:2]), padding))


@pytest.mark.parametrize("batch", [(X, Y), X, None])
def test_batches_of_another_sampling_are_refused(batch: Any) -> None:
    dp = make()
    message = r"^DPSGD.step: batch must be a Batch, such as from DPSGD.batches, but got "
    with pytest.raises(TypeError, match=message):
        dp.step(dp.init(PARAMS, key=jax.random.key(0)), batch)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"noise_multiplier": 2.0}, "noise_multiplier=1.3, but this DPSGD has 2.0"),
        ({"l2_clip_norm": 1.0}, "l2_clip_norm=0.7, but this DPSGD has 1.0"),
        ({"expected_batch_size": 4.0}, "sampling_probability=0.2, but this DPSGD has 0.1"),
    ],
)
def test_a_state_of_other_settings_is_refused(other: Any, message: str) -> None:
    dp = make(**other)
    state = make().init(PARAMS, key=jax.random.key(0))
    message += "; use the same settings, or call init(state.model, key=...) and compose both runs with DPSGD.event"
    for api, call in [
        ("step", lambda: dp.step(state, a_batch([1], 2))),
        ("batches", lambda: dp.batches((X, Y), state)),
    ]:
        with pytest.raises(ValueError, match=rf"^DPSGD.{api}: the state was made with {re.escape(message)}"):
            call()


def test_invalid_states_are_refused() -> None:
    dp = make()
    for api, call in [("step", lambda x: dp.step(x, a_batch([1], 2))), ("batches", lambda x: dp.batches((X, Y), x))]:
        with pytest.raises(TypeError, match=rf"^DPSGD.{api}: state must come from DPSGD.init, but got "):
            call(PARAMS)
    with pytest.raises(TypeError, match=r"^DPSGD.event: state must come from DPSGD.init, but got "):
        dp.event(3)
    with pytest.raises(TypeError, match=r"^DPSGD.epsilon: needs a state, but got 12 of type int."):
        dp.epsilon(12, together=True)
    for wrong in (PARAMS, -1, True, 1.5):
        with pytest.raises(TypeError, match=r"^DPSGD.epsilon: needs a state or a number of steps, but got "):
            dp.epsilon(wrong)


@pytest.mark.parametrize(
    "wrong", [lambda p, x, y: x @ p["w"], lambda p, x, y: (loss(p, x, y), {}), lambda p, x, y: 1, lambda p, x, y: None]
)
def test_a_non_scalar_loss_is_refused(wrong: Any) -> None:
    dp = make(wrong)
    with pytest.raises(TypeError, match=r"^DPSGD: the loss must return one real scalar, but it returned "):
        dp.step(dp.init(PARAMS, key=jax.random.key(0)), a_batch([1], 2))


# What trains.


def lora_network() -> Any:
    base = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    return nnx.Sequential(nnx.LoRA(4, 2, 3, base_module=base, rngs=nnx.Rngs(1)), nnx.Dropout(0.3, rngs=nnx.Rngs(2)))


def test_only_selected_variables_train_and_others_are_not_copied() -> None:
    model, dp = lora_network(), make(model_loss)
    state = dp.init(model, key=jax.random.key(0), wrt=nnx.LoRAParam)
    after, _ = dp.fit(state, (X, Y), sizes=SIZES, progress=False)
    stepped = run_from(dp, state)
    for trained in (after.model, stepped.model):
        base = trained.layers[0].base_module
        for name in ("kernel", "bias"):
            own, theirs = (getattr(of, name).get_raw_value() for of in (model.layers[0].base_module, base))
            assert own.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()
        assert (trained.layers[0].lora_b[...] != 0).all()
        assert (model.layers[0].lora_b[...] == 0).all()
    jax.tree.map(np.testing.assert_array_equal, arrays(after), arrays(stepped))


def run_from(dp: DPSGD, state: Any) -> Any:
    for batch in dp.batches((X, Y), state, sizes=SIZES):
        state, _ = dp.step(state, batch)
    return state


@pytest.mark.parametrize("ensemble", [False, True])
def test_random_state_is_not_frozen(ensemble: bool) -> None:
    def make_network(rngs: nnx.Rngs) -> Network:
        return Network(rngs, rate=0.3)

    model: Any = Ensemble.create(make_network, 2, seed=0) if ensemble else make_network(nnx.Rngs(0))
    dp = make(model_loss)
    state = dp.init(model, key=jax.random.key(0))
    after, _ = dp.fit(state, (X, Y), sizes=SIZES, progress=False)
    jax.tree.map(np.testing.assert_array_equal, arrays(after), arrays(run_from(dp, state)))
    trained: Any = after.model
    counts = nnx.state(trained[0] if ensemble else trained, nnx.RngCount)
    assert jax.tree.leaves(nnx.to_pure_dict(counts)) == [12]


def test_a_frozen_run_resumes(tmp_path: Any) -> None:
    dp = make(model_loss)
    state = dp.init(lora_network(), key=jax.random.key(0), wrt=nnx.LoRAParam)
    whole, _ = dp.fit(state, (X, Y), sizes=SIZES, progress=False)
    dp.fit(state, (X, Y), steps=5, sizes=SIZES, progress=False, checkpoint_dir=tmp_path)
    again, _ = dp.fit(state, (X, Y), sizes=SIZES, progress=False, checkpoint_dir=tmp_path)
    jax.tree.map(np.testing.assert_array_equal, arrays(again), arrays(whole))


@pytest.mark.parametrize("wrt", [nnx.Variable, True, ...])
def test_random_state_never_trains(wrt: Any) -> None:
    dp = make(model_loss)
    every, usual = (dp.init(lora_network(), key=jax.random.key(0), wrt=given) for given in (wrt, nnx.Param))
    assert jax.tree.structure(every.tree.trainable) == jax.tree.structure(usual.tree.trainable)
    (batch, *_) = dp.batches((X, Y), every, sizes=SIZES)
    jax.tree.map(np.testing.assert_array_equal, arrays(dp.step(every, batch)[0]), arrays(dp.step(usual, batch)[0]))


def test_a_filter_that_selects_nothing_is_refused() -> None:
    network = Network(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^DPSGD.init: wrt=.*LoRAParam.* selects no variable of the model; pass"):
        make(model_loss).init(network, key=jax.random.key(0), wrt=nnx.LoRAParam)
    with pytest.raises(TypeError, match=r"^DPSGD.init: wrt selects variables of NNX modules, but the models are none"):
        make().init(PARAMS, key=jax.random.key(0), wrt=nnx.Param)
    ensemble = Ensemble.create(Network, 2, seed=0)
    with pytest.raises(TypeError, match=r"^DPSGD.init: wrt selects variables of NNX modules, but the models are En"):
        make(model_loss).init(ensemble, key=jax.random.key(0), wrt=nnx.Param)


def test_what_is_printed_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    dp = usual()
    state = run(dp, PARAMS, steps=2)
    both = make(model_loss).init(Ensemble.create(Network, 2, seed=0), key=jax.random.key(0))
    monkeypatch.setattr(accounting, "_epsilon", None)
    settings = "noise_multiplier=1.3, sampling_probability=0.2, target_delta=0.001"
    assert repr(dp) == f"DPSGD(num_steps=12, {settings})"
    assert repr(state) == f"DPState(step=2, {settings})"
    assert repr(jax.eval_shape(lambda: state)) == f"DPState(step=?, {settings})"
    assert repr(both) == f"DPState(members=2, step=0, {settings})"
    with pytest.raises(TypeError, match="not callable"):
        dp.epsilon(11)
