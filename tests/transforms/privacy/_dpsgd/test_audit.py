"""Audits stay below ε for the mechanism as it is, and exceed it for mechanisms with mistakes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax_privacy.auditing import CanaryScoreAuditor

from plurax.ensemble import Ensemble
from plurax.transforms.privacy import DPSGD, AdaptiveClipping, Audit
from plurax.transforms.privacy._dpsgd import step as _step
from plurax.transforms.privacy._dpsgd.accounting import Ledger
from plurax.transforms.privacy._dpsgd.audit import _log_ratios

N = 30
X = np.sin(np.arange(N * 4.0)).reshape(N, 4).astype(np.float32)
Y = np.arange(N) % 3
PARAMS = {"w": np.cos(np.arange(12.0)).reshape(4, 3).astype(np.float32), "b": np.array([0.1, -0.2, 0.3], np.float32)}
SETTINGS: dict[str, Any] = {
    "l2_clip_norm": 0.7,
    "noise_multiplier": 2.0,
    "target_delta": 1e-2,
    "num_examples": N,
    "expected_batch_size": 15.0,
    "num_steps": 4,
}
STRATEGY = np.array([1.0, 0.5])
# Many canaries in one run need many parameters.
LARGE = {"w": np.zeros((4, 700), np.float32), "b": np.zeros(700, np.float32)}
ONE_RUN: dict[str, Any] = {"noise_multiplier": 0.7, "l2_clip_norm": 0.1, "target_delta": 1e-5}


def loss(params: Any, x: Any, y: Any) -> Any:
    logits = x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def make(**settings: Any) -> DPSGD:
    return DPSGD(settings.pop("loss", loss), optax.sgd(0.5), **{**SETTINGS, **settings})


def audit(dp: DPSGD, seed: int = 0, **options: Any) -> Audit:
    given = {"runs": 4000, "confidence": 0.999, "progress": False}
    return dp.audit(options.pop("params", PARAMS), (X, Y), key=jax.random.key(seed), **{**given, **options})


MECHANISMS: dict[str, dict[str, Any]] = {
    "DP-SGD": {},
    "a tree of clip norms": {"l2_clip_norm": {"w": 0.7, "b": 0.2}},
    "automatic": {"automatic": 0.1},
    "adaptive": {"adaptive": AdaptiveClipping()},
    "bands": {"noise_strategy": STRATEGY, "expected_batch_size": 7.5},
    "balls in bins": {"sampling": "balls_in_bins", "expected_batch_size": 10.0},
    "b-min-sep": {"sampling": "b_min_sep", "noise_strategy": STRATEGY, "expected_batch_size": 10.0},
    "microbatches": {"microbatch_size": 4},
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_an_audit_of_many_runs_stays_below(name: str) -> None:
    found = audit(make(**{"noise_multiplier": 1.0} | MECHANISMS[name]))
    assert 0.1 * found.upper < found.lower <= found.upper
    assert len(found.inside) + len(found.outside) == 4000
    assert found.inside.mean() > found.outside.mean()
    assert "sees the noisy gradient of each step; a canary in 4,000 runs" in found.threat_model
    assert found.lower_gdp is None


def test_if_each_example_takes_part_in_each_step_the_bound_is_tight() -> None:
    found = audit(make(noise_multiplier=1.0, expected_batch_size=N))
    assert found.lower_gdp is not None
    assert found.lower < found.lower_gdp <= found.upper
    assert found.lower_gdp > 0.75 * found.upper


@pytest.mark.slow
def test_an_audit_of_one_run_stays_below() -> None:
    found = audit(make(**ONE_RUN), params=LARGE, runs=1, canaries=500)
    assert 0 < found.lower <= found.upper
    assert found.inside.mean() > found.outside.mean()
    assert "a canary among 500 in one run" in found.threat_model
    every = audit(make(**ONE_RUN, expected_batch_size=N), params=LARGE, runs=1, canaries=500)
    assert every.lower_gdp is not None
    assert 0 < every.lower_gdp <= every.upper


@pytest.mark.slow
def test_twenty_of_twenty_audits_stay_below_and_are_tight() -> None:
    """A right mechanism exceeds its ε with a probability of at most 0.001 each."""
    for settings in ({"noise_multiplier": 1.0}, {"noise_multiplier": 1.0, "expected_batch_size": N}):
        dp = make(**settings)
        found = [audit(dp, seed) for seed in range(20)]
        assert all(one.lower <= one.upper for one in found)
        assert np.median([one.lower for one in found]) > 0.4 * found[0].upper
        assert all(one.lower_gdp is None or one.lower_gdp <= one.upper for one in found)
    one_run = make(**ONE_RUN)
    found = [audit(one_run, seed, params=LARGE, runs=1, canaries=500) for seed in range(20)]
    assert all(one.lower <= one.upper for one in found)


def half_the_noise(ledger: Any, sums: Any, state: Any) -> Any:
    noisy, state = ORIGINAL(ledger, sums, state)
    return jax.tree.map(lambda x, y: (x + y) / 2, noisy, sums), state


def no_noise(ledger: Any, sums: Any, state: Any) -> Any:
    return sums, ORIGINAL(ledger, sums, state)[1]


ORIGINAL = _step.add_noise


def leaking(*args: Any, factor: float = 3.0, **options: Any) -> Any:
    """Clip to a multiple of the norm."""
    options["l2_clip_norm"] = jax.tree.map(lambda c: factor * c, options["l2_clip_norm"])
    return CLIPPED(*args, **options)


CLIPPED = _step.clipped_grad


@pytest.mark.parametrize(
    ("name", "wrong"), [("add_noise", no_noise), ("add_noise", half_the_noise), ("clipped_grad", leaking)]
)
def test_an_audit_finds_mistakes(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_step, name, wrong)
    found = audit(make())
    assert found.lower > found.upper


@pytest.mark.parametrize(("name", "wrong"), [("add_noise", no_noise), ("clipped_grad", partial(leaking, factor=20.0))])
def test_an_audit_of_one_run_finds_mistakes(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_step, name, wrong)
    found = audit(make(**ONE_RUN | {"noise_multiplier": 3.0}), params=LARGE, runs=1, canaries=500)
    assert found.lower > found.upper


@pytest.mark.slow
def test_canaries_may_be_examples() -> None:
    dp = make(num_steps=8, noise_multiplier=0.5, l2_clip_norm=3.0)
    x, y = np.full((1, 4), 5.0, np.float32), np.array([2])
    found = audit(dp, canaries=(x, y), runs=400)
    assert 0 < found.lower <= found.upper
    assert "chooses the canaries, and sees the trained model" in found.threat_model
    many = audit(dp, canaries=(X[:20] * 3, Y[:20]), runs=1)
    assert len(many.inside) + len(many.outside) == 20


@pytest.mark.slow
def test_chunks_of_runs_change_nothing() -> None:
    whole, parts = (audit(make(), runs=50, chunk_size=size) for size in (None, 7))
    np.testing.assert_allclose(np.sort(whole.inside), np.sort(parts.inside), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(audit(make(), runs=50).outside, whole.outside)


def test_modules_and_auxiliary_outputs_are_audited() -> None:
    def with_aux(model: Any, x: Any, y: Any) -> Any:
        logits = model(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), {"logits": logits.mean()}

    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.state(model))
    dp = make(loss=with_aux, has_aux=True)
    found = dp.audit(model, (X, Y), key=jax.random.key(0), runs=200, progress=False)
    assert 0 <= found.lower <= found.upper
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)


@pytest.mark.parametrize(
    ("strategy", "sampling", "separation"),
    [
        ((1.0,), "poisson", None),
        ((1.0, 0.5, 0.25), "poisson", None),
        ((1.0, 0.5), "balls_in_bins", 3),
        ((1.0, 0.5, 0.25), "balls_in_bins", 3),
        ((0.5, 2.0, 0.1), "balls_in_bins", 4),
    ],
)
def test_scores_are_likelihood_ratios(strategy: Any, sampling: Any, separation: Any) -> None:
    """Against the sum over all ways in which a canary may take part in five steps."""
    probability = 1.0 if sampling == "balls_in_bins" else 0.3
    ledger = Ledger(0.8, probability, 1.0, 10.0, strategy, sampling=sampling, separation=separation)
    c = sum(np.diag(np.full(5 - k, x), -k) for k, x in enumerate(strategy))
    stddev = 0.8 * np.linalg.norm(strategy)
    seen = np.random.default_rng(0).normal(size=(5, 7))
    white, period, total = c @ seen, separation or len(strategy), 0.0
    for start in range(period):
        steps = np.arange(start, 5, period)
        for taken in np.ndindex(*[2] * len(steps)):
            weight = np.prod([probability if t else 1 - probability for t in taken]) / period
            mean = np.zeros(5)
            mean[steps] = taken
            mean = c @ mean
            total += weight * np.exp((white.T @ mean - mean @ mean / 2) / stddev**2)
    np.testing.assert_allclose(_log_ratios(ledger, seen), np.log(total), rtol=1e-9)


def test_the_bound_is_that_of_jax_privacy() -> None:
    found = audit(make(), runs=300, confidence=0.9)
    auditor = CanaryScoreAuditor(found.inside, found.outside)
    assert found.lower == pytest.approx(auditor.epsilon_clopper_pearson(0.1, 1e-2))
    assert found.upper == make().epsilon(4)


def test_the_picture_shows_both_bounds() -> None:
    found = audit(make(), runs=300)
    scores, bounds = found.plot()
    assert [text.get_text() for text in bounds.texts] == [f"{found.lower:.2f}", f"{found.upper:.2f}"]
    assert bounds.get_ylabel() == "ε at δ = 0.01"
    assert len(scores.patches) == 80
    of_gaussian = audit(make(expected_batch_size=N), runs=300)
    assert len(of_gaussian.plot()[1].texts) == 3


@pytest.mark.parametrize(
    ("settings", "options", "error", "message"),
    [
        ({"noise_multiplier": 0.0}, {}, ValueError, "noise_multiplier is 0, so ε is infinite; pass a positive one"),
        ({"truncated_batch_size": 20}, {}, ValueError, "with truncated batches canaries depend on each other"),
        ({}, {"runs": 5, "canaries": 3}, ValueError, "an audit needs many runs with one canary, or one run with many"),
        ({}, {"runs": 1, "canaries": 1}, ValueError, "an audit needs many runs with one canary, or one run with many"),
        (
            {},
            {"canaries": "x"},
            ValueError,
            "canaries must be a number, or examples in the form of the data, with shapes",
        ),
        ({}, {"canaries": (X[:1],)}, ValueError, "canaries must be a number, or examples in the form of the data"),
        ({}, {"canaries": (X[:1, :3], Y[:1])}, ValueError, "canaries must be a number, or examples in the form of the"),
        ({}, {"canaries": (X[:1] > 0, Y[:1])}, ValueError, "canaries must be a number, or examples in the form of the"),
        ({}, {"canaries": (X[:9], Y[:9]), "runs": 1}, ValueError, "an audit needs many runs with one canary, or one"),
        ({}, {"runs": 1, "canaries": 40}, ValueError, "40 gradient canaries need as many parameters, but there are 15"),
        ({}, {"steps": 5}, ValueError, "steps=5 is beyond num_steps=4; pass fewer"),
        ({}, {"confidence": 1.0}, ValueError, "confidence must be between 0.5 and 1, but got 1.0"),
    ],
)
def test_audits_that_cannot_run_are_refused(settings: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^DPSGD.audit: {message}"):
        audit(make(**settings), **options)


def test_b_min_sep_scores_are_likelihood_ratios() -> None:
    """Against all participations in six steps, at least three apart, with those before the first step."""
    strategy, probability, separation = (0.7, 1.5, 0.2), 0.4, 3
    ledger = Ledger(0.8, probability, 1.0, 10.0, strategy, sampling="b_min_sep", separation=separation)
    c = sum(np.diag(np.full(6 - k, x), -k) for k, x in enumerate(strategy))
    stddev, seen = 0.8 * np.linalg.norm(strategy), np.random.default_rng(0).normal(size=(6, 5))
    white = c @ seen

    def total(step: int, taken: tuple[int, ...], weight: float) -> Any:
        if step >= 6:
            mean = c @ np.isin(np.arange(6), taken)
            return weight * np.exp((white.T @ mean - mean @ mean / 2) / stddev**2)
        without = total(step + 1, taken, weight * (1 - probability))
        return without + total(step + separation, (*taken, step), weight * probability)

    # The first step in which it may take part, with the probabilities of the process that has always run.
    starts = np.array([1.0, *[probability] * (separation - 1)]) / (1 + (separation - 1) * probability)
    expected = sum(total(start, (), weight) for start, weight in enumerate(starts))
    np.testing.assert_allclose(_log_ratios(ledger, seen), np.log(expected), rtol=1e-9)


@pytest.mark.slow
def test_only_what_trains_is_audited() -> None:
    model = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    audited = {}

    def of_bias(path: Any, _: Any) -> bool:
        return path[-1] == "bias"

    def model_loss(model: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    for name, wrt in (("all", None), ("bias", of_bias)):
        dp = make(loss=model_loss, noise_multiplier=1.0)
        options: dict[str, Any] = {"runs": 1, "wrt": wrt, "progress": False}
        with pytest.raises(
            ValueError, match=r"^DPSGD.audit: 1000 gradient canaries need as many .*, but there are"
        ) as e:
            dp.audit(model, (X, Y), key=jax.random.key(0), **options)
        audited[name] = str(e.value)
        found = dp.audit(model, (X, Y), key=jax.random.key(0), **options | {"runs": 200, "chunk_size": 70})
        assert found.inside.mean() > found.outside.mean()
    assert [text.split()[-1] for text in audited.values()] == ["15.", "3."]


def test_an_ensemble_is_refused() -> None:
    ensemble = Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 2, seed=0)
    with pytest.raises(TypeError, match=r"^DPSGD.audit: pass one model, not an ensemble"):
        make().audit(ensemble, (X, Y), key=jax.random.key(0))
