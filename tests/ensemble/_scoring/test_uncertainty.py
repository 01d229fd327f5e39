"""Uncertainty scores, and how well they separate right from wrong, against scikit-learn, SciPy and slow loops."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from sklearn.metrics import roc_auc_score

from plurax.ensemble import Ensemble, metrics

pytestmark = pytest.mark.smoke

GENERATOR = np.random.default_rng(3)
P = GENERATOR.dirichlet([0.4, 1.0, 0.7, 0.5], size=(5, 60)).astype(np.float32)
LABELS = GENERATOR.integers(0, 4, 60)


def entropy_slowly(p):
    return scipy.stats.entropy(p.astype(np.float64), axis=-1)


class Test_uncertainty_of_classes:
    def test_predictive_entropy(self):
        np.testing.assert_allclose(metrics.predictive_entropy(P), entropy_slowly(P.mean(axis=0)), rtol=2e-6)

    def test_mutual_information(self):
        expected = entropy_slowly(P.mean(axis=0)) - entropy_slowly(P).mean(axis=0)
        np.testing.assert_allclose(metrics.mutual_information(P), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(metrics.mutual_information(P[[0, 0, 0]]) < 1e-6, True)

    def test_are_those_of_predictions(self):
        found = Ensemble.from_apply(lambda v, x: v, list(np.log(P))).predict(None, kind="classification")
        np.testing.assert_allclose(found.entropy, metrics.predictive_entropy(P), rtol=1e-5)
        np.testing.assert_allclose(found.mutual_information, metrics.mutual_information(P), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found.variance, metrics.epistemic_variance(P), rtol=1e-4, atol=1e-7)

    def test_variances_add_up_to_that_of_the_label(self):
        whole = metrics.epistemic_variance(P) + metrics.aleatoric_variance(P * (1 - P))
        mean = P.mean(axis=0)
        np.testing.assert_allclose(whole, mean * (1 - mean), rtol=1e-4, atol=1e-6)

    def test_disagreement(self):
        votes = P.argmax(axis=-1)
        pairs = [votes[i] != votes[j] for i, j in itertools.combinations(range(5), 2)]
        np.testing.assert_allclose(metrics.disagreement(P), np.mean(pairs, axis=0), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(metrics.disagreement(np.log(P)), np.mean(pairs, axis=0), rtol=1e-6, atol=1e-7)
        with pytest.raises(ValueError, match="a single member cannot disagree"):
            metrics.disagreement(P[:1])

    @pytest.mark.parametrize("name", ["predictive_entropy", "mutual_information", "disagreement"])
    def test_in_programs_half_precision_and_with_nan(self, name):
        score = getattr(metrics, name)
        whole = score(P)
        assert whole.shape == (60,)
        np.testing.assert_allclose(jax.jit(score)(P), whole, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(jax.vmap(score, 1)(P), whole, rtol=1e-5, atol=1e-6)
        assert score(P.astype(np.float16)).dtype == np.float32
        ill = P.copy()
        ill[1, 7] = np.nan
        np.testing.assert_array_equal(np.isnan(score(ill)), np.arange(60) == 7)
        with pytest.raises(TypeError, match=f"{name}: probabilities must be a floating-point array"):
            score(LABELS)
        if name != "disagreement":
            with pytest.raises(ValueError, match=f"{name}: probabilities must be in 0 to 1"):
                score(4 * P)


class Test_uncertainty_of_values:
    def test_epistemic_and_aleatoric(self):
        means, variances = GENERATOR.normal(size=(4, 7)), GENERATOR.uniform(0.1, 2, (4, 7))
        np.testing.assert_allclose(metrics.epistemic_variance(means.astype(np.float32)), means.var(axis=0), rtol=1e-5)
        np.testing.assert_allclose(
            metrics.aleatoric_variance(variances.astype(np.float32)), variances.mean(axis=0), rtol=1e-6
        )
        together = Ensemble.from_apply(lambda v, x: v, list(zip(*np.float32([means, variances]), strict=True)))
        whole = metrics.epistemic_variance(np.float32(means)) + metrics.aleatoric_variance(np.float32(variances))
        np.testing.assert_allclose(together.predict(None, kind="regression").variance, whole, rtol=1e-5)
        with pytest.raises(ValueError, match=r"variances must not be negative, but variances\[1\] is -1"):
            metrics.aleatoric_variance(np.array([1.0, -1.0]))
        assert np.isnan(jax.jit(metrics.aleatoric_variance)(jnp.array([1.0, -1.0])))
        with pytest.raises(TypeError, match="values must be an array of real numbers, but got"):
            metrics.epistemic_variance([1.0, 2.0])


class Test_regression:
    MEAN, VARIANCE = GENERATOR.normal(size=(3, 50)), GENERATOR.uniform(0.2, 3, (3, 50))
    Y = GENERATOR.normal(size=50)

    def given(self, dtype=np.float32):
        return tuple(x.astype(dtype) for x in (self.MEAN, self.VARIANCE, self.Y))

    def test_gaussian_nll(self):
        expected = -scipy.stats.norm(self.MEAN, np.sqrt(self.VARIANCE)).logpdf(self.Y).mean(axis=-1)
        np.testing.assert_allclose(metrics.gaussian_nll(*self.given()), expected, rtol=1e-5)

    def test_mixture_nll(self):
        densities = scipy.stats.norm(self.MEAN, np.sqrt(self.VARIANCE)).pdf(self.Y).mean(axis=0)
        np.testing.assert_allclose(metrics.mixture_nll(*self.given()), -np.log(densities).mean(), rtol=1e-5)
        with pytest.raises(ValueError, match=r"mean must have shape \(members, batch\), but got \(50,\)"):
            metrics.mixture_nll(*(x[0] if x.ndim == 2 else x for x in self.given()))

    def test_gaussian_crps(self):
        # By definition: the integrated squared difference of the distribution functions.
        grid = np.linspace(-15, 15, 60001)
        cdf = scipy.stats.norm.cdf(grid[:, None, None], self.MEAN[:, :5], np.sqrt(self.VARIANCE[:, :5]))
        squared = (cdf - (grid[:, None, None] >= self.Y[:5])) ** 2
        expected = np.trapezoid(squared, grid, axis=0).mean(axis=-1)
        mean, variance, y = self.given()
        np.testing.assert_allclose(metrics.gaussian_crps(mean[:, :5], variance[:, :5], y[:5]), expected, rtol=2e-4)

    @pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
    def test_interval_coverage(self, level):
        low, high = scipy.stats.norm(self.MEAN, np.sqrt(self.VARIANCE)).interval(level)
        expected = ((low <= self.Y) & (high >= self.Y)).mean(axis=-1)
        for number in (level, np.float32(level)):
            np.testing.assert_allclose(metrics.interval_coverage(*self.given(), level=number), expected, rtol=1e-6)
        # (1 + level) / 2 is not representable in float16.
        half = metrics.interval_coverage(np.zeros(2), np.ones(2), np.array([0.0, 50.0]), level=np.float16(0.9995))
        assert float(half) == 0.5
        with pytest.raises(ValueError, match="level must be above 0 and below 1, but got 1"):
            metrics.interval_coverage(*self.given(), level=1)

    @pytest.mark.parametrize("score", [metrics.gaussian_nll, metrics.gaussian_crps, metrics.interval_coverage])
    def test_in_programs_half_precision_and_refusals(self, score):
        mean, variance, y = self.given()
        whole = score(mean, variance, y)
        assert whole.shape == (3,)
        np.testing.assert_allclose(jax.jit(score)(mean, variance, y), whole, rtol=1e-6)
        np.testing.assert_allclose(jax.vmap(score, (0, 0, None))(mean, variance, y), whole, rtol=1e-5)
        np.testing.assert_allclose(score(*self.given(np.float16)), whole, rtol=0.02)
        with jax.enable_x64(True):
            assert score(*self.given(np.float64)).dtype == np.float64
        variance[1, 3] = 0
        assert list(np.isnan(jax.jit(score)(mean, variance, y))) == [False, True, False]
        with pytest.raises(ValueError, match=r"variance must be above 0, but variance\[1, 3\] is 0"):
            score(mean, variance, y)
        with pytest.raises(ValueError, match="to match mean, but got"):
            score(mean, np.ones((3, 49)), y)


class Test_auroc:
    @pytest.mark.parametrize("ties", [False, True])
    def test_is_that_of_scikit_learn(self, ties):
        inner, outer = GENERATOR.normal(size=(4, 90)), GENERATOR.normal(0.7, size=(4, 35))
        if ties:
            inner, outer = inner.round(), outer.round()
        for i in range(4):
            truth = np.r_[np.zeros(90), np.ones(35)]
            expected = roc_auc_score(truth, np.r_[inner[i], outer[i]])
            assert float(metrics.auroc(inner[i].astype(np.float32), outer[i].astype(np.float32))) == pytest.approx(
                expected, abs=1e-6
            )
        found = jax.jit(metrics.auroc)(np.float32(inner), np.float32(outer))
        assert found.shape == (4,)
        assert float(found[3]) == pytest.approx(expected, abs=1e-6)

    def test_many_examples_nan_and_refusals(self):
        many = metrics.auroc(jnp.arange(70000.0), jnp.arange(70000.0) + 0.5)
        assert float(many) == pytest.approx(0.5 + 0.5 / 70000, abs=1e-5)
        assert np.isnan(metrics.auroc(jnp.array([1.0, jnp.nan]), jnp.ones(3)))
        assert np.isnan(metrics.auroc(jnp.ones(3), jnp.array([1.0, jnp.nan])))
        with pytest.raises(ValueError, match="both scores must have the same axes before the last"):
            metrics.auroc(jnp.ones((2, 3)), jnp.ones((3, 3)))
        with pytest.raises(ValueError, match="scores_out must have shape .* and not be empty, but got"):
            metrics.auroc(jnp.ones(3), jnp.ones(0))


class Test_risk_coverage:
    def test_equals_a_loop(self):
        doubts, errors = GENERATOR.normal(size=(2, 30)), GENERATOR.integers(0, 2, (2, 30))
        found = jax.jit(metrics.risk_coverage)(np.float32(doubts), errors.astype(bool))
        np.testing.assert_allclose(found.coverage, np.arange(1, 31) / 30, rtol=1e-6)
        for i in range(2):
            kept = errors[i][np.argsort(doubts[i])]
            risks = [kept[:k].mean() for k in range(1, 31)]
            np.testing.assert_allclose(found.risk[i], risks, rtol=1e-5)
            assert float(found.area[i]) == pytest.approx(np.mean(risks), rel=1e-5)
        assert np.isnan(metrics.risk_coverage(jnp.array([1.0, jnp.nan]), jnp.ones(2)).area)
        with pytest.raises(ValueError, match="errors must have shape .* to match doubts"):
            metrics.risk_coverage(jnp.ones(3), jnp.ones(4))
        with pytest.raises(TypeError, match="doubts must be an array of real numbers"):
            metrics.risk_coverage(jnp.ones(3, bool), jnp.ones(3))


class Test_adaptive_ece:
    def slowly(self, p, labels, bins):
        order = np.argsort(p.max(axis=-1), kind="stable")
        right = (p.argmax(axis=-1) == labels)[order].astype(float)
        confidence = p.max(axis=-1)[order].astype(float)
        ends = [k * len(labels) // bins for k in range(bins + 1)]
        gaps = [abs((confidence[a:b] - right[a:b]).sum()) for a, b in itertools.pairwise(ends)]
        return sum(gaps) / len(labels)

    @pytest.mark.parametrize("bins", [1, 7, 15, 60, 80])
    def test_equals_a_loop(self, bins):
        found = metrics.adaptive_ece(P, LABELS, bins=bins)
        np.testing.assert_allclose(found, [self.slowly(p, LABELS, bins) for p in P], rtol=1e-5)

    def test_ties_bins_and_refusals(self):
        p = np.float32([[0.75, 0.25]] * 8)
        labels = np.array([0, 0, 0, 1] * 2)
        assert float(metrics.adaptive_ece(p, labels, bins=2)) == pytest.approx(0)
        assert float(metrics.adaptive_ece(p, labels, bins=1)) == pytest.approx(float(metrics.ece(p, labels)))
        with pytest.raises(ValueError, match="adaptive_ece: bins must be at least 1, but got 0"):
            metrics.adaptive_ece(p, labels, bins=0)
