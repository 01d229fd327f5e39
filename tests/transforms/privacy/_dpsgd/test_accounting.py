"""Accounting against published figures of other libraries, and against direct calls of dp-accounting."""

import math
import time

import dp_accounting
import pytest
from dp_accounting.pld import privacy_loss_distribution
from jax_privacy.experimental.accounting import amplified_bandmf_event, dpsgd_event

from plurax.transforms.privacy._dpsgd import accounting
from plurax.transforms.privacy._dpsgd.accounting import Ledger, calibrate

REFERENCE = [
    ("rdp", 1.3, 0.0025, 6000, 1e-5, 0.7242),
    ("rdp", 1.0, 0.001, 30000, 1e-7, 1.4155),
    ("rdp", 0.7, 0.01, 120, 1e-5, 3.2393),
    ("pld", 0.7, 0.01, 120, 1e-5, 2.4612),
    ("pld", 1.5, 0.05, 1000, 1e-6, 6.1997),
]


def ledger(noise_multiplier: float = 1.0, probability: float = 0.25, strategy: tuple[float, ...] = (1.0,)) -> Ledger:
    return Ledger(noise_multiplier, probability, 1.0, 10.0, strategy)


@pytest.mark.parametrize(("accountant", "sigma", "q", "steps", "delta", "expected"), REFERENCE)
def test_epsilon_is_that_of_the_reference(accountant, sigma, q, steps, delta, expected):
    found = ledger(sigma, q).epsilon(steps, delta, accountant)
    # A discretization relative to ε adds up to 2e-5 of it.
    assert expected - 5e-5 <= found <= (1 + 2e-5) * expected + 5e-5


@pytest.mark.slow
@pytest.mark.parametrize(("accountant", "expected"), [("rdp", 1.3562), ("pld", 1.2900)])
def test_noise_is_that_of_the_reference(accountant, expected):
    found = calibrate(8.0, 0.04, 2000, 1e-5, accountant)
    assert found == pytest.approx(expected, abs=5e-5)
    assert 7.999 < ledger(found, 0.04).epsilon(2000, 1e-5, accountant) <= 8.0


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize(("epsilon", "q", "rounds"), [(0.5, 1.0, 3), (2.0, 0.06, 600), (0.1, 0.0001, 10**5)])
def test_calibrated_noise_is_enough_and_no_more(accountant, epsilon, q, rounds):
    sigma = calibrate(epsilon, q, rounds, 1e-6, accountant)
    assert ledger(sigma, q).epsilon(rounds, 1e-6, accountant) <= epsilon
    assert ledger(sigma - 1e-4, q).epsilon(rounds, 1e-6, accountant) > epsilon


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "delta"),
    [(0.5, 1.0, 10, 1e-5), (0.3, 0.01, 30, 1e-6), (0.4, 0.3, 100, 1e-3), (0.5, 1e-5, 20, 1e-4), (1.0, 0.02, 900, 1e-5)],
)
def test_epsilon_is_that_of_the_finest_discretization_or_slightly_more(sigma, q, steps, delta):
    fine = privacy_loss_distribution.from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=1e-4)
    exact = fine.self_compose(steps).get_epsilon_for_delta(delta)
    found = ledger(sigma, q).epsilon(steps, delta, "pld")
    assert exact * (1 - 1e-12) <= found <= exact * (1 + 1e-4)


@pytest.fixture
def intervals(monkeypatch):
    """Return the discretization intervals that are computed, as a list that grows."""
    found, make = [], privacy_loss_distribution.from_gaussian_mechanism

    def recorded(*args, **options):
        found.append(options["value_discretization_interval"])
        return make(*args, **options)

    monkeypatch.setattr(privacy_loss_distribution, "from_gaussian_mechanism", recorded)
    return found


# By dp-accounting with intervals of 1e-3 and 1e-2, which take 2.5 and 0.5 seconds; 1e-4 takes 88 seconds and 1.4 GiB.
@pytest.mark.parametrize(("sigma", "expected"), [(0.1, 354.19609), (0.05, 1464.0)])
def test_little_noise_has_a_coarse_discretization(intervals, sigma, expected):
    assert expected <= ledger(sigma, 0.01001).epsilon(100, 1e-5, "pld")
    found = ledger(sigma, 0.01).epsilon(100, 1e-5, "pld")
    assert expected * (1 - 1e-7) <= found <= expected * (1 + 1e-4)
    assert min(intervals) > 1e-5 * expected


@pytest.mark.parametrize("sigma", [1e-3, 1e-8])
def test_hardly_any_noise_is_bounded_by_renyi_divergences(intervals, sigma):
    assert ledger(sigma, 0.01).epsilon(100, 1e-5, "pld") == ledger(sigma, 0.01).epsilon(100, 1e-5, "rdp") < math.inf
    assert not intervals


@pytest.mark.parametrize("target", [50.0, 200.0])
def test_large_targets_are_met_by_coarse_discretizations(intervals, target):
    sigma = calibrate(target, 0.01, 100, 1e-5, "pld")
    assert target * (1 - 1e-4) < ledger(sigma, 0.01).epsilon(100, 1e-5, "pld") <= target
    assert min(intervals) > 1e-5 * target
    assert len(intervals) < 25


def test_a_tiny_delta_is_accounted_for():
    # Privacy loss distributions lose 1e-15 of the probability, so that their ε is infinite.
    assert ledger(2.0).epsilon(5, 1e-18, "pld") == ledger(2.0).epsilon(5, 1e-18, "rdp") < math.inf


def test_a_long_calibration_shows_that_it_works(monkeypatch, capsys):
    epsilon = accounting._epsilon

    def slow(*args):
        time.sleep(0.15)
        return epsilon(*args)

    monkeypatch.setattr(accounting, "_epsilon", slow)
    calibrate(1.0, 0.1, 3, 1e-5, "rdp")
    assert "DPSGD: noise_multiplier for target_epsilon=1: " in capsys.readouterr().err


def test_the_event_is_that_of_jax_privacy():
    assert ledger().event(7) == dpsgd_event(1.0, 7, sampling_prob=0.25)
    banded = ledger(strategy=(1.0, 0.5, 0.25))
    assert banded.event(7) == amplified_bandmf_event(1.0, 7, num_bands=3, sampling_prob=0.25)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accountant", "make"), [("rdp", dp_accounting.rdp.RdpAccountant), ("pld", dp_accounting.pld.PLDAccountant)]
)
def test_epsilon_is_that_of_the_accountant_for_the_event(accountant, make):
    for steps, models in [(1, 1), (5, 3)]:
        by_hand = make().compose(ledger(2.0).event(steps, models)).get_epsilon(1e-5)
        found = ledger(2.0).epsilon(steps, 1e-5, accountant, models)
        # "pld" takes a discretization relative to ε.
        assert by_hand * (1 - 1e-9) <= found <= by_hand * (1 + (1e-9 if accountant == "rdp" else 1e-4))


def test_models_on_the_same_batches_are_one_sum():
    # Four models with noise σ each are one sum with norm 2 and the same noise: a multiplier of σ / 2.
    assert ledger(3.0).epsilon(5, 1e-5, "rdp", models=4) == pytest.approx(ledger(1.5).epsilon(5, 1e-5, "rdp"))


def test_bands_count_a_round_when_it_starts():
    banded = ledger(2.0, strategy=(1.0, 0.5, 0.25))
    spent = [banded.epsilon(steps, 1e-5, "rdp") for steps in range(8)]
    once = [ledger(2.0).epsilon(rounds, 1e-5, "rdp") for rounds in (0, 1, 1, 1, 2, 2, 2, 3)]
    assert spent == once


def test_no_steps_spend_nothing_and_no_noise_spends_everything():
    assert ledger().epsilon(0, 1e-5, "pld") == 0
    assert ledger(0.0).epsilon(1, 1e-5, "pld") == math.inf
    assert ledger(0.0).epsilon(1, 1e-5, "rdp") == math.inf


@pytest.mark.parametrize("q", [0.001, 0.2])
def test_the_fast_bound_is_a_bound(q):
    for steps in (1, 10, 300):
        exact = ledger(1.2, q).epsilon(steps, 1e-5, "pld")
        shown = float(ledger(1.2, q).progress(steps, 20 * steps, 1e-5, "pld", 1).removeprefix("ε ≤ "))
        assert exact <= shown <= 1.1 * exact + 1e-3


@pytest.mark.slow
def test_the_bound_in_the_progress_bar_holds_until_the_next_one():
    """At most twenty distinct values, never below the privacy spent, and exact at the end."""
    of = ledger(1.2, 0.2)
    shown = [of.progress(step, 41, 1e-5, "rdp", 2) for step in range(1, 42)]
    assert len(set(shown)) <= 20
    spent = [of.epsilon(step, 1e-5, "rdp", 2) for step in range(1, 42)]
    assert all(float(text.removeprefix("ε ≤ ")) >= exact for text, exact in zip(shown, spent, strict=True))
    assert float(shown[-1].removeprefix("ε ≤ ")) <= spent[-1] + 1e-3
    assert ledger(0.0).progress(1, 2, 1e-5, "rdp", 1) == "ε = ∞"


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_steps_within_a_budget_are_maximal(accountant):
    of = ledger(2.0, 0.1)
    for budget in (0.3, 1.0, 1.5):
        steps = of.steps_within(budget, 1e-5, accountant, 1, 40)
        assert of.epsilon(steps, 1e-5, accountant) <= budget
        assert steps == 40 or of.epsilon(steps + 1, 1e-5, accountant) > budget
    assert of.steps_within(1e-9, 1e-5, accountant, 1, 40) == 0
    assert of.steps_within(math.inf, 1e-5, accountant, 1, 40) == 40
