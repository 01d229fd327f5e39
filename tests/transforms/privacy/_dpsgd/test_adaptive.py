"""Adaptive clipping against an explicit implementation of the algorithm, its noise and its sensitivity."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plurax.ensemble import Ensemble
from plurax.transforms.privacy import DPSGD, AdaptiveClipping, Batch
from plurax.transforms.privacy._dpsgd.accounting import Ledger

N, EXPECTED = 40, 8.0
X = np.sin(np.arange(N * 4.0)).reshape(N, 4).astype(np.float32) * np.linspace(0.2, 3, N, dtype=np.float32)[:, None]
Y = np.arange(N) % 3
PARAMS = {"w": np.cos(np.arange(12.0)).reshape(4, 3).astype(np.float32), "b": np.array([0.1, -0.2, 0.3], np.float32)}
SETTINGS: dict[str, Any] = {
    "l2_clip_norm": 0.7,
    "noise_multiplier": 1.3,
    "target_delta": 1e-3,
    "num_examples": N,
    "expected_batch_size": EXPECTED,
    "num_steps": 12,
    "accountant": "rdp",
    "adaptive": AdaptiveClipping(0.6, 0.3),
}
TREE = {"w": 0.7, "b": 0.2}


def loss(params: Any, x: Any, y: Any) -> Any:
    logits = x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def make(optimizer: Any = None, **settings: Any) -> DPSGD:
    return DPSGD(settings.pop("loss", loss), optimizer or optax.sgd(0.5), **{**SETTINGS, **settings})


def a_batch(numbers: Any, size: int) -> Batch:
    numbers = np.asarray(numbers, int)
    places = np.concatenate([numbers, np.zeros(size - len(numbers), int)])
    return Batch((X[places], Y[places]), np.arange(size) >= len(numbers))


def written_out(params: Any, norms: Any, numbers: Any) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """Return the mean of the clipped gradients, the next clip norms, and the norms of the examples."""
    grads = [jax.grad(loss)(params, X[i : i + 1], Y[i : i + 1]) for i in numbers]
    tree = isinstance(norms, dict)

    def size(grad: Any, name: str) -> float:
        return float(np.linalg.norm(grad[name])) if tree else float(optax.tree.norm(grad))

    names = list(PARAMS) if tree else ["all"]
    most = norms if tree else {"all": norms}
    sizes = {name: np.array([size(grad, name) for grad in grads]) for name in names}
    mean = {
        name: sum(g[name] * min(1, most[name if tree else "all"] / size(g, name)) for g in grads) / EXPECTED
        for name in PARAMS
    }
    after = {}
    for name in names:
        unclipped = np.sum((sizes[name] <= most[name]) - 0.5) / EXPECTED + 0.5
        after[name] = most[name] * math.exp(-0.3 * (unclipped - 0.6))
    return mean, after if tree else after["all"], sizes


@pytest.mark.parametrize("first", [0.7, TREE], ids=["one norm", "a tree"])
@pytest.mark.parametrize("method", ["vmap", "ghost", "book_keeping"])
def test_without_noise_a_run_is_the_written_out_algorithm(first: Any, method: Any) -> None:
    dp = make(optax.sgd(1.0), l2_clip_norm=first, noise_multiplier=0.0, method=method)
    state = dp.init(PARAMS, key=jax.random.key(0))
    params, norms = PARAMS, first
    for numbers in ([3, 10, 39, 2], [], list(range(0, 40, 3)), [39, 38, 37]):
        mean, after, _ = written_out(params, norms, numbers)
        state, metrics = dp.step(state, a_batch(numbers, 16))
        params = jax.tree.map(lambda p, g: p - g, params, mean)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), dict(state.model), params)
        for found, expected in ((metrics["l2_clip_norm"], norms), (state.clip_norms, after)):
            np.testing.assert_allclose(found, jax.tree.leaves(expected) if first is TREE else expected, rtol=1e-5)
        norms = after
    assert state.clip_norms.dtype == jnp.float32


def test_the_clip_norm_finds_the_quantile() -> None:
    still = optax.sgd(0.0)  # the norms of the gradients stay
    settings = {"expected_batch_size": 40.0, "num_steps": 150, "l2_clip_norm": 9.0}
    dp = make(still, adaptive=AdaptiveClipping(0.75, 0.3, 4.0), **settings)
    _, history = dp.fit(dp.init(PARAMS, key=jax.random.key(0)), (X, Y), progress=False)
    sizes = np.sort(written_out(PARAMS, 1.0, range(N))[2]["all"])
    assert sizes[N // 2] < np.median([row["l2_clip_norm"] for row in history[50:]]) < sizes[-3]
    assert history[0]["l2_clip_norm"] == 9.0


@pytest.mark.parametrize("groups", [1, 3])
def test_noise_multipliers_add_up(groups: int) -> None:
    found = Ledger(1.3, 0.1, 1.0, 50.0, clip_groups=groups, adaptive=AdaptiveClipping(count_stddev=5.0))
    precision = found.gradient_multiplier**-2 + groups / (2 * 5.0) ** 2
    assert precision == pytest.approx(1.3**-2, rel=1e-12)


@pytest.mark.parametrize("first", [0.7, TREE], ids=["one norm", "a tree"])
def test_gradients_and_counts_get_their_noise(first: Any) -> None:
    """Each standard deviation of 4,000 numbers is within 5 % with a probability above 1 - 1e-5."""
    adaptive = AdaptiveClipping(0.5, 0.01, 3.0)
    dp = make(optax.sgd(1.0), l2_clip_norm=first, adaptive=adaptive, num_steps=4000)
    state = dp.init({"w": np.zeros((4, 3), np.float32), "b": np.zeros(3, np.float32)}, key=jax.random.key(1))
    batch = a_batch([], 4)

    def step(state: Any, _: Any) -> Any:
        after, _ = dp._step(state, batch)
        noise = jax.tree.map(lambda new, old: (old - new) * EXPECTED, after.tree, state.tree)
        count = jnp.log(after.clip_norms / state.clip_norms) / -0.01 * EXPECTED  # a fraction of 1/2 is the quantile
        bound = jnp.linalg.norm(state.clip_norms)
        return after, ({name: x / bound for name, x in noise.items()}, count)

    _, (noise, counts) = jax.jit(lambda state: jax.lax.scan(step, state, length=4000))(state)
    groups = 2 if first is TREE else 1
    expected = (1.3**-2 - groups / 36) ** -0.5
    assert dp.ledger.gradient_multiplier == pytest.approx(expected)
    for found in noise.values():
        np.testing.assert_allclose(np.std(found, axis=0), expected, rtol=0.05)
    np.testing.assert_allclose(np.std(counts, axis=0), 3.0, rtol=0.05)
    both = np.corrcoef(np.asarray(noise["b"])[:, 0], np.asarray(counts).reshape(4000, -1)[:, 0])
    assert abs(both[0, 1]) < 0.08


@pytest.mark.parametrize("first", [0.7, TREE], ids=["one norm", "a tree"])
def test_neighbors_are_within_the_joint_sensitivity(first: Any) -> None:
    """Gradients and counts together: their distance in units of the noise is at most 1 / noise_multiplier."""
    dp = make(optax.sgd(1.0), l2_clip_norm=first, noise_multiplier=0.0, adaptive=AdaptiveClipping(0.5, 0.3, 0.9))
    noisy = Ledger(0.8, 0.2, 1.0, EXPECTED, clip_groups=dp.ledger.clip_groups, adaptive=dp.ledger.adaptive)
    state, rng = dp.init(PARAMS, key=jax.random.key(0)), np.random.default_rng(0)
    bound = float(np.linalg.norm(state.clip_norms))
    for _ in range(30):
        numbers = rng.choice(N, rng.integers(1, 12), replace=False)
        one, two = (dp.step(state, a_batch(taken, 16))[0] for taken in (numbers, numbers[1:]))
        of_sums = jax.tree.map(lambda a, b: float(np.sum(np.square((a - b) * EXPECTED))), one.tree, two.tree)
        counts = np.log(np.asarray(one.clip_norms) / np.asarray(two.clip_norms)) / -0.3 * EXPECTED
        of_counts = np.sum(np.square(counts)) / 0.9**2
        distance = sum(of_sums.values()) / (noisy.gradient_multiplier * bound) ** 2 + of_counts
        assert distance <= (1 + 1e-4) / 0.8**2
        assert of_counts == pytest.approx(dp.ledger.clip_groups / 4 / 0.9**2, rel=1e-3)


def test_clip_norms_keep_their_dtype_in_64_bits(tmp_path: Any) -> None:
    with jax.enable_x64(True):
        dp = make(optax.sgd(0.1))
        state = dp.init(jax.tree.map(lambda x: np.float64(x), PARAMS), key=jax.random.key(0))
        after, _ = dp.fit(state, (X, Y), steps=2, progress=False, checkpoint_dir=tmp_path)
        assert state.clip_norms.dtype == after.clip_norms.dtype == jnp.float32
        again, _ = dp.fit(state, (X, Y), steps=3, progress=False, checkpoint_dir=tmp_path)
        assert int(again.step) == 3


def test_epsilon_is_that_of_the_noise_multiplier() -> None:
    assert make().epsilon(7) == make(adaptive=None).epsilon(7)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Any) -> None:
    dp = make(l2_clip_norm=TREE)
    first = dp.init(PARAMS, key=jax.random.key(0))
    whole, rows = dp.fit(first, (X, Y), progress=False)
    dp.fit(first, (X, Y), steps=5, progress=False, checkpoint_dir=tmp_path)
    again, resumed = dp.fit(first, (X, Y), progress=False, checkpoint_dir=tmp_path)
    np.testing.assert_array_equal(again.clip_norms, whole.clip_norms)
    jax.tree.map(np.testing.assert_array_equal, again.tree, whole.tree)
    assert resumed == rows
    dp.save(tmp_path / "state", whole)
    np.testing.assert_array_equal(dp.load(tmp_path / "state", first).clip_norms, whole.clip_norms)
    with pytest.raises(ValueError, match="`clip_norms` in `private state`, .* but `like` has nothing"):
        make(l2_clip_norm=TREE, adaptive=None).load(
            tmp_path / "state", make(l2_clip_norm=TREE, adaptive=None).init(PARAMS, key=jax.random.key(0))
        )


@pytest.mark.slow
def test_members_adapt_their_own_clip_norms() -> None:
    def apply(params: Any, x: Any) -> Any:
        return x @ params["w"] + params["b"]

    def of_model(model: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    members = [PARAMS, jax.tree.map(lambda x: 2 * x, PARAMS)]
    ensemble = Ensemble.from_apply(apply, members)
    dp = make(loss=of_model)
    together = dp.init(ensemble, key=jax.random.key(0))
    assert together.clip_norms.shape == (2,)
    for batch in [a_batch([3, 10, 39, 2], 8), a_batch([1, 39], 8)]:
        together, metrics = dp.step(together, batch)
    assert metrics["l2_clip_norm"].shape == (2,)
    for i in range(2):
        alone = make().init(members[i], key=jax.random.fold_in(jax.random.key(0), i))
        for batch in [a_batch([3, 10, 39, 2], 8), a_batch([1, 39], 8)]:
            alone, _ = make().step(alone, batch)
        np.testing.assert_allclose(np.asarray(together.clip_norms)[i], alone.clip_norms, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"adaptive": 0.5}, TypeError, "adaptive must be an AdaptiveClipping or None, but got 0.5 of type float"),
        ({"automatic": 0.1}, ValueError, "automatic clipping has no quantile to adapt to; pass either"),
        ({"noise_strategy": np.array([1.0, 0.5])}, ValueError, "adaptive does not go with noise_strategy"),
        (
            {"adaptive": AdaptiveClipping(count_stddev=0.65)},
            ValueError,
            "with count_stddev=0.65 the counts alone spend more than noise_multiplier=1.3 allows; omit it, or pass at",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^DPSGD: {message}"):
        make(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantile": 1.0}, "quantile must be between 0 and 1, but got 1.0"),
        ({"learning_rate": 0.0}, "learning_rate must be positive and finite, but got 0.0"),
        ({"count_stddev": -1.0}, "count_stddev must be positive and finite, but got -1.0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^AdaptiveClipping: {message}"):
        AdaptiveClipping(**settings)


def test_an_auxiliary_output_must_not_take_the_name() -> None:
    def with_aux(params: Any, x: Any, y: Any) -> Any:
        return loss(params, x, y), {"l2_clip_norm": jnp.zeros(())}

    dp = make(loss=with_aux, has_aux=True)
    with pytest.raises(ValueError, match="the auxiliary output of the loss has `l2_clip_norm`, which DPSGD uses"):
        dp.step(dp.init(PARAMS, key=jax.random.key(0)), a_batch([1], 4))
    make(loss=with_aux, has_aux=True, adaptive=None)


def test_gradients_of_zero_cannot_make_the_clip_norm_vanish() -> None:
    adaptive = AdaptiveClipping(0.01, 5.0)
    dp = make(loss=lambda params, x, y: 0.0 * loss(params, x, y), adaptive=adaptive, num_steps=50, num_examples=40)
    state, _ = dp.fit(dp.init(PARAMS, key=jax.random.key(0)), (X, Y), progress=False)
    np.testing.assert_allclose(state.clip_norms, 0.7e-6, rtol=1e-3)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.tree))
