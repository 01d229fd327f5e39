"""jax-privacy's samplings and execution plans: their batches, their noise and their ε."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_privacy import batch_selection
from jax_privacy.experimental.execution_plan import BandMFExecutionPlanConfig
from jax_privacy.experimental.monte_carlo import delta_calculation, sample_generation

from plurax.transforms.privacy import DPSGD, Batch
from plurax.transforms.privacy._dpsgd.monte_carlo import monte_carlo_epsilon

N, EXPECTED = 40, 8.0
X = np.sin(np.arange(N * 4.0)).reshape(N, 4).astype(np.float32)
Y = np.arange(N) % 3
PARAMS = {"w": np.cos(np.arange(12.0)).reshape(4, 3).astype(np.float32), "b": np.array([0.1, -0.2, 0.3], np.float32)}
SETTINGS: dict[str, Any] = {
    "l2_clip_norm": 0.7,
    "noise_multiplier": 1.3,
    "target_delta": 1e-2,
    "num_examples": N,
    "expected_batch_size": EXPECTED,
    "num_steps": 12,
}
STRATEGY = np.array([1.0, 0.5, 0.25])
SAMPLINGS: dict[str, dict[str, Any]] = {
    "balls in bins": {"sampling": "balls_in_bins"},
    "balls in bins with bands": {"sampling": "balls_in_bins", "noise_strategy": STRATEGY},
    "b-min-sep": {"sampling": "b_min_sep", "noise_strategy": STRATEGY},
    "b-min-sep with two bands": {"sampling": "b_min_sep", "noise_strategy": STRATEGY[:2]},
    "truncated": {"truncated_batch_size": 9},
    "truncated with bands": {"truncated_batch_size": 9, "noise_strategy": STRATEGY},
}
SELECTIONS = {
    "balls in bins": batch_selection.BallsInBinsSampling(12, 5),
    "balls in bins with bands": batch_selection.BallsInBinsSampling(12, 5),
    "b-min-sep": batch_selection.BMinSepSampling(1 / 3, 12, 3),
    "b-min-sep with two bands": batch_selection.BMinSepSampling(1 / 4, 12, 2),
    "truncated": batch_selection.CyclicPoissonSampling(0.2, 12, 9),
    "truncated with bands": batch_selection.CyclicPoissonSampling(24 / 39, 12, 9, 3),
}


def loss(params: Any, x: Any, y: Any) -> Any:
    logits = x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def make(**settings: Any) -> DPSGD:
    return DPSGD(loss, optax.sgd(0.5), **{**SETTINGS, **settings})


def numbers_of(batch: Batch) -> list[int]:
    return sorted(np.asarray(batch.arguments[0])[~batch.is_padding_example].tolist())


@pytest.mark.parametrize("name", SAMPLINGS)
def test_batches_are_those_of_jax_privacy(name: str) -> None:
    dp = make(**SAMPLINGS[name])
    state = dp.init(PARAMS, key=jax.random.key(3))
    found = [numbers_of(batch) for batch in dp.batches(np.arange(N), state)]
    rng = np.random.default_rng(np.asarray(state.seed).tolist())
    expected = [sorted(map(int, numbers)) for numbers in SELECTIONS[name].batch_iterator(N, rng)]
    assert found == expected
    assert all(len(batch) <= 9 for batch in found) or "truncated" not in name


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_resumed_run_is_the_uninterrupted_one(name: str, tmp_path: Any) -> None:
    dp = make(**SAMPLINGS[name])
    first = dp.init(PARAMS, key=jax.random.key(3))
    whole, rows = dp.fit(first, (X, Y), progress=False)
    dp.fit(first, (X, Y), steps=7, progress=False, checkpoint_dir=tmp_path)
    again, resumed = dp.fit(first, (X, Y), progress=False, checkpoint_dir=tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again.tree, whole.tree)
    assert resumed == rows


def test_batches_of_another_sampling_are_refused() -> None:
    dp = make(**SAMPLINGS["balls in bins"])
    (first, *_) = make().batches((X, Y), None)
    drawn = r"with poisson sampling \(probability 0.2, every 1 steps\), but ε is computed for balls_in_bins sampling"
    with pytest.raises(ValueError, match=f"^DPSGD.step: the batch was drawn {drawn}"):
        dp.step(dp.init(PARAMS, key=jax.random.key(0)), first)
    state = make().init(PARAMS, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"sampling_probability=0.2, but this DPSGD has 1.0"):
        dp.step(state, first)


def test_sizes_of_truncated_batches_are_at_most_the_truncation() -> None:
    for size, microbatch_size, most in ((9, None, 12), (9, 5, 10), (100, None, 40)):
        dp = make(truncated_batch_size=size, microbatch_size=microbatch_size)
        assert max(dp.batches((X, Y)).sizes) <= most


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [None, STRATEGY], ids=["independent", "bands"])
def test_epsilon_of_truncated_batches_is_that_of_the_accountant(strategy: Any) -> None:
    dp, groups = make(truncated_batch_size=9, noise_strategy=strategy), 1 if strategy is None else 3
    relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    event = dp_accounting.TruncatedSubsampledGaussianDpEvent(40 // groups, dp.ledger.sampling_probability, 9, 1.3)
    for steps in (1, 12):
        accountant = dp_accounting.pld.PLDAccountant(relation)
        accountant.compose(dp_accounting.SelfComposedDpEvent(event, -(-steps // groups)))
        assert accountant.get_epsilon(1e-2) <= dp.epsilon(steps) <= (1 + 1e-4) * accountant.get_epsilon(1e-2)
    assert dp.epsilon(12) > make(noise_strategy=strategy).epsilon(12)
    state = dp.init(PARAMS, key=jax.random.key(0))
    for batch in dp.batches((X, Y), state):
        state, _ = dp.step(state, batch)
    assert dp.event(state) == dp_accounting.SelfComposedDpEvent(event, -(-12 // groups))


def test_the_epsilon_of_a_state_with_truncated_batches_needs_the_accountant_that_knows_them() -> None:
    state = make(truncated_batch_size=9).init(PARAMS, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r'^DPSGD.epsilon: accountant="rdp" does not know truncated batches; use "p'):
        make(accountant="rdp").epsilon(replace(state, step=jnp.int32(3)))


@pytest.mark.slow
def test_noise_for_truncated_batches_is_calibrated() -> None:
    dp = make(truncated_batch_size=9, noise_multiplier=None, target_epsilon=2.0)
    assert 1.99 < dp.epsilon(12) <= 2.0
    assert dp.noise_multiplier > make(noise_multiplier=None, target_epsilon=2.0).noise_multiplier


def test_monte_carlo_epsilon_of_poisson_sampling_is_close_to_the_tight_one() -> None:
    # A separation of one step is Poisson sampling. The bound spends half of δ on its own uncertainty.
    for probability, strategy in ((0.2, (1.0,)), (0.5, (2.0,))):
        found = monte_carlo_epsilon(1.3, probability, 1, strategy, 6, 1e-2)
        event = dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(probability, dp_accounting.GaussianDpEvent(1.3)), 6
        )
        tight = dp_accounting.pld.PLDAccountant().compose(event)
        assert tight.get_epsilon(1e-2) < found < 1.05 * tight.get_epsilon(0.4e-2)


@pytest.mark.slow
# jax-privacy's losses of b-min-sep are wrong with three bands, and those of balls in bins are right.
@pytest.mark.parametrize("name", ["balls in bins", "balls in bins with bands", "b-min-sep with two bands"])
def test_monte_carlo_epsilon_is_that_of_jax_privacy_s_samples(name: str) -> None:
    """Other samples, and jax-privacy's own losses for the sampling, give the same ε to four standard errors."""
    dp, strategy = make(**SAMPLINGS[name]), SAMPLINGS[name].get("noise_strategy", np.ones(1))
    stddev, rng, losses = 1.3 * float(np.linalg.norm(strategy)), np.random.default_rng(7), []
    for positive in (True, False):
        losses.append(
            sample_generation.get_privacy_loss_sample(SELECTIONS[name], stddev, strategy, rng, positive, 20_000)[0]
        )
    deltas = [delta_calculation.delta_from_epsilon_and_samples(dp.epsilon(12), x) for x in losses]
    assert max(deltas) == pytest.approx(0.5e-2, abs=4 * np.sqrt(0.5e-2 / 20_000))


def test_balls_in_bins_need_less_noise_than_no_sampling() -> None:
    dp = make(sampling="balls_in_bins")
    assert dp.epsilon(0) == 0
    spent = [dp.epsilon(steps) for steps in (1, 5, 12)]
    assert spent == sorted(spent)
    # Without the randomness of the bins, an example takes part in every fifth step for sure.
    without = make(sampling="poisson", expected_batch_size=N, num_steps=3).epsilon(3)
    assert spent[-1] < without
    with pytest.raises(ValueError, match=r'DPSGD.event: dp-accounting has no event for sampling="balls_in_bins"'):
        dp.event(dp.init(PARAMS, key=jax.random.key(0)))
    assert repr(dp).endswith("sampling='balls_in_bins', target_delta=0.01)")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"sampling": "shuffled"},
            "sampling must be one of 'poisson', 'balls_in_bins', 'b_min_sep', but got 'shuffled'",
        ),
        (
            {"sampling": "balls_in_bins", "expected_batch_size": 7.0},
            'sampling="balls_in_bins" needs num_examples / exp',
        ),
        ({"sampling": "b_min_sep"}, 'sampling="b_min_sep" needs a noise_strategy; without one, use Poisson sampling'),
        (
            {"sampling": "b_min_sep", "noise_strategy": STRATEGY, "expected_batch_size": 20.0},
            'sampling="b_min_sep" with 3 bands allows batches of 13.3333 examples, but expected_batch_size=20.0; pa',
        ),
        ({"sampling": "balls_in_bins", "truncated_batch_size": 9}, "truncated_batch_size needs Poisson sampling, but"),
        ({"sampling": "balls_in_bins", "accountant": "rdp"}, 'accountant="rdp" does not know sampling="balls_in_bins"'),
        ({"truncated_batch_size": 9, "accountant": "rdp"}, 'accountant="rdp" does not know truncated batches; omit it'),
        ({"truncated_batch_size": 0}, "truncated_batch_size must be at least 1, but got 0"),
        ({"truncated_batch_size": 7}, "truncated_batch_size=7 is below expected_batch_size=8.0; pass a larger one"),
        (
            {"sampling": "balls_in_bins", "noise_strategy": np.array([1.0, -0.5])},
            'sampling="balls_in_bins" is accounted for without negative coefficients; pass others',
        ),
        (
            {"sampling": "balls_in_bins", "noise_multiplier": None, "target_epsilon": 1.0},
            'target_epsilon needs Poisson sampling, since ε of "balls_in_bins" takes minutes; pass noise_multiplier',
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^DPSGD: {message}"):
        make(**settings)


def test_a_budget_needs_poisson_sampling() -> None:
    dp = make(sampling="balls_in_bins")
    with pytest.raises(ValueError, match=r"^DPSGD.fit: epsilon_budget needs Poisson sampling; pass steps instead"):
        dp.fit(dp.init(PARAMS, key=jax.random.key(0)), (X, Y), epsilon_budget=1.0, progress=False)


def test_a_version_without_the_accounting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax_privacy.experimental.monte_carlo", None)
    with pytest.raises(ModuleNotFoundError, match=r"its module experimental.monte_carlo, as of jax-privacy 2.0 to 2.2"):
        make(sampling="balls_in_bins")


# Execution plans.


def config_of(**settings: Any) -> BandMFExecutionPlanConfig:
    given = {"iterations": 12, "strategy": np.ones(1), "epsilon": 2.0, "delta": 1e-2, "sampling_prob": 0.2}
    return BandMFExecutionPlanConfig(**{**given, **settings})


GIVEN: dict[str, Any] = {"epsilon": None, "delta": None, "noise_multiplier": 1.1}  # its calibration takes seconds
CONFIGS: dict[str, dict[str, Any]] = {
    "DP-SGD": {},
    "BandMF": {"strategy": STRATEGY, "sampling_prob": 0.6, "l2_clip_norm": 0.7},
    "a mean of clipped gradients": {"l2_clip_norm": 0.7, "rescale_to_unit_norm": False, "normalize_by": 8.0},
    "given noise": {"normalize_by": 4.0, **GIVEN},
    "truncated": {"truncated_batch_size": 9, "num_examples": N, **GIVEN},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")  # in jax-privacy
@pytest.mark.parametrize("name", CONFIGS)
def test_a_plan_takes_the_steps_of_jax_privacy(name: str) -> None:
    config = config_of(**CONFIGS[name])
    plan = config.plan
    dp = DPSGD.from_plan(loss, optax.sgd(0.3), config, num_examples=N, target_delta=1e-2)
    state = dp.init(PARAMS, key=jax.random.key(5))
    # The plan's own noise from the key of the run, and the plan's own clipping of the batches of the run.
    noise_state = (jax.random.fold_in(jax.random.key(5), 2**32 - 1), plan.noise_addition_transform.init(PARAMS)[1])
    gradient = plan.clipped_grad(loss, batch_argnums=(1, 2))
    params = jax.tree.map(jnp.asarray, PARAMS)
    for batch in dp.batches((X, Y), state):
        state, _ = dp.step(state, batch)
        sums = gradient(params, *batch.arguments, is_padding_example=jnp.asarray(batch.is_padding_example))
        noisy, noise_state = plan.noise_addition_transform.update(sums, noise_state)
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, noisy)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), state.tree, params)
    accountant = dp_accounting.pld.PLDAccountant(config.accountant.neighboring_relation).compose(plan.dp_event)
    assert accountant.get_epsilon(1e-2) <= dp.epsilon(state) <= (1 + 1e-4) * accountant.get_epsilon(1e-2)
    assert dp.num_steps == config.iterations


def test_the_newer_configuration_is_taken_too() -> None:
    """A stand-in with the attributes of jax-privacy 2.2's `BandMFConfig`, which the installed version lacks."""
    attributes = {
        "iterations": 12,
        "expected_participations": 2.4,
        "strategy": STRATEGY,
        "noise_multiplier": 1.1,
        "l2_clip_norm": 0.7,
        "rescale_to_unit_norm": True,
        "normalize_by": 1.0,
        "truncated_batch_size": None,
        "num_examples": None,
        "column_normalize": False,
    }
    newer = type("BandMFConfig", (SimpleNamespace,), {})
    dp = DPSGD.from_plan(loss, optax.sgd(0.3), newer(**attributes), num_examples=N, target_delta=1e-2)
    assert dp.ledger.sampling_probability == pytest.approx(2.4 * 3 / 12)
    assert dp.noise_multiplier == 1.1
    without = newer(**{**attributes, "noise_multiplier": None})
    with pytest.raises(ValueError, match=r"config has no noise yet; pass config.calibrate\(epsilon=..., delta=...\)"):
        DPSGD.from_plan(loss, optax.sgd(0.3), without, num_examples=N, target_delta=1e-2)


@pytest.mark.parametrize(
    ("config", "options", "error", "message"),
    [
        ({}, {"l2_clip_norm": 1.0}, TypeError, "l2_clip_norm is the plan's; omit it"),
        ({}, {"sampling": "balls_in_bins"}, TypeError, "sampling is the plan's; omit it"),
        ({}, {"automatic": 0.1}, TypeError, "automatic is the plan's; omit it"),
        ({"normalize_by": 0.0}, {}, ValueError, "config.normalize_by is 0, but gradients are divided by it"),
        (
            {"accountant": dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)},
            {},
            ValueError,
            "ε of DPSGD is not for replacing an example; pass another accountant",
        ),
        ({"column_normalize": True}, {}, ValueError, "column_normalize makes the noise depend on the step's number"),
        (
            {"truncated_batch_size": 9, "num_examples": 50},
            {},
            ValueError,
            "num_examples=40, but config.num_examples=50",
        ),
    ],
)
def test_plans_that_cannot_run_are_refused(config: Any, options: Any, error: Any, message: str) -> None:
    config = config_of(**{**GIVEN, **config})
    with pytest.raises(error, match=f"^DPSGD.from_plan: {message}"):
        DPSGD.from_plan(loss, optax.sgd(0.3), config, num_examples=N, target_delta=1e-2, **options)
    with pytest.raises(TypeError, match=r"^DPSGD.from_plan: config must be a BandMF configuration, but got"):
        DPSGD.from_plan(loss, optax.sgd(0.3), {"iterations": 12}, num_examples=N)
