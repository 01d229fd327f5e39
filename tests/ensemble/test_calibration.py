"""Temperatures and conformal sets, against SciPy and the promised coverage."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.special

from plurax.ensemble import calibration, metrics
from plurax.ensemble.calibration import (
    conformal_intervals,
    conformal_radius,
    conformal_sets,
    conformal_threshold,
    fit_temperature,
)


def data(batch=300, members=4, classes=5, seed=0):
    """Return logits whose confidence differs by a factor between members, and labels."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, batch)
    logits = generator.normal(size=(members, batch, classes)) + 1.2 * np.eye(classes)[labels]
    return (logits * np.geomspace(0.3, 12, members)[:, None, None]).astype(np.float32), labels


def nll_at(logits, labels, temperature, pooled):
    p = scipy.special.softmax(logits.astype(np.float64) / temperature, axis=-1)
    p = p.mean(axis=0) if pooled else p
    return -np.log(np.maximum(p[np.arange(len(labels)), labels], 1e-300)).mean()


def best_temperature(logits, labels, pooled=False):
    found = scipy.optimize.minimize_scalar(
        lambda t: nll_at(logits, labels, np.exp(t), pooled), bounds=(-5, 5), method="bounded", options={"xatol": 1e-9}
    )
    return np.exp(found.x)


class Test_temperature:
    def test_is_that_of_scipy_for_each_member(self):
        logits, labels = data()
        found = fit_temperature(logits, labels)
        assert found.shape == (4,)
        np.testing.assert_allclose(found, [best_temperature(x, labels) for x in logits], rtol=2e-3)
        for x, t in zip(logits, found, strict=True):
            least = nll_at(x, labels, best_temperature(x, labels), False)
            assert nll_at(x, labels, float(t), False) <= least + 1e-6
            assert least <= nll_at(x, labels, 1.0, False)

    def test_pooled_is_that_of_the_mean(self):
        logits, labels = data()
        found = fit_temperature(logits, labels, pooled=True)
        assert found.shape == ()
        assert nll_at(logits, labels, float(found), True) <= (
            nll_at(logits, labels, best_temperature(logits, labels, pooled=True), True) + 1e-5
        )

    @pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
    def test_of_other_scales(self, scale):
        logits, labels = data(members=1)
        found = fit_temperature(logits[0] * scale, labels)
        assert float(found) == pytest.approx(float(fit_temperature(logits[0], labels)) * scale, rel=5e-3)

    def test_in_programs_and_dtypes(self):
        logits, labels = data()
        whole = fit_temperature(logits, labels)
        np.testing.assert_allclose(jax.jit(fit_temperature)(logits, labels), whole, rtol=1e-3)
        np.testing.assert_allclose(jax.vmap(fit_temperature, (0, None))(logits, jnp.asarray(labels)), whole, rtol=1e-3)
        assert fit_temperature(logits.astype(np.float16), labels).dtype == np.float32
        with jax.enable_x64(True):
            precise = fit_temperature(logits.astype(np.float64), labels)
            assert precise.dtype == np.float64
            np.testing.assert_allclose(precise, [best_temperature(x, labels) for x in logits], rtol=1e-6)

    def test_undefined_temperatures(self):
        logits, labels = data()
        ill = logits.copy()
        ill[2, 5, 1] = np.nan
        np.testing.assert_array_equal(np.isnan(fit_temperature(ill, labels)), [False, False, True, False])
        assert np.isnan(fit_temperature(ill, labels, pooled=True))
        traced = jax.jit(fit_temperature)(logits, np.where(np.arange(300) == 3, 9, labels))
        np.testing.assert_array_equal(np.isnan(traced), True)
        sure = fit_temperature(jnp.array([[3.0, 0.0]] * 3), jnp.array([0, 0, 0]))
        assert 0 < float(sure) < 0.2
        assert float(fit_temperature(jnp.zeros((4, 3)), jnp.array([0, 1, 2, 0]))) == 1

    @pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32])
    def test_refuses_probabilities(self, dtype):
        logits, labels = data()
        p = jax.nn.softmax(logits).astype(dtype)
        with pytest.raises(ValueError, match=r"logits has probabilities, .*; pass what the model returns before"):
            fit_temperature(p[1], labels)
        with pytest.raises(ValueError, match=r"logits\[0\] has prob"):
            fit_temperature(p, labels, pooled=True)
        with pytest.raises(ValueError, match=r"logits\[2\] has prob"):
            fit_temperature(jnp.where(jnp.arange(4)[:, None, None] == 2, p, logits.astype(dtype)), labels)
        with pytest.raises(ValueError, match="has prob"):  # for each pixel
            fit_temperature(p[0].reshape(100, 3, 5), labels.reshape(100, 3))
        assert np.isfinite(jax.jit(fit_temperature)(p[1], labels))  # traced values cannot be told
        assert np.isnan(fit_temperature(p[1, :0], labels[:0]))
        found = fit_temperature(jnp.log(p[1].astype(np.float32)), labels)  # the remedy
        assert float(found) == pytest.approx(float(fit_temperature(logits[1], labels)), rel=0.02)

    def test_one_row_that_is_no_distribution_makes_logits(self):
        p, labels = jax.nn.softmax(data()[0][1]), data()[1]
        for row in ([0.5, 0.5, 0.1, 0, 0], [1.5, -0.5, 0, 0, 0], [-0.2, 0.2, 0.5, 0.25, 0.25]):
            assert np.isfinite(fit_temperature(p.at[7].set(jnp.array(row)), labels))

    def test_refusals(self):
        logits, labels = data()
        with pytest.raises(ValueError, match=r"pooled logits must have shape \(members, batch, classes\), but got"):
            fit_temperature(logits[0], labels, pooled=True)
        with pytest.raises(TypeError, match="labels must be an array of integers"):
            fit_temperature(logits, labels.astype(float))
        with pytest.raises(ValueError, match=r"labels\[0\] is 7"):
            fit_temperature(logits, np.full(300, 7))
        with pytest.raises(TypeError, match=r"logits must be a floating-point array, .*; cast them with .astype"):
            fit_temperature(logits.astype(int), labels)
        with pytest.raises(ValueError, match=r"logits must have at least 2 classes, .*; if z is the single log"):
            fit_temperature(logits[..., :1], labels)
        with pytest.raises(ValueError, match=r"logits must have shape \(..., batch, classes\), but got \(5,\)"):
            fit_temperature(logits[0, 0], labels)
        with pytest.raises(ValueError, match=r"labels must have shape \(300,\) to match logits, but got"):
            fit_temperature(logits, labels[1:])


class Test_sets:
    @pytest.mark.slow
    @pytest.mark.parametrize("score", ["probability", "cumulative"])
    @pytest.mark.parametrize(("error", "batch"), [(0.1, 99), (0.25, 30)])
    def test_hold_the_label_as_often_as_promised(self, score, error, batch):
        """Over many draws of calibration data, with a deliberately wrong model."""
        repeats, new, classes = 3000, 20, 4
        generator = np.random.default_rng(1)
        labels = generator.integers(0, classes, (repeats, batch + new))
        logits = generator.normal(size=(repeats, batch + new, classes)) + np.eye(classes)[labels]
        p = np.asarray(jax.nn.softmax(jnp.asarray(3 * logits, jnp.float32), axis=-1))

        def covered(p, labels):
            threshold = conformal_threshold(p[:batch], labels[:batch], error=error, score=score)
            sets = conformal_sets(p[batch:], threshold, score=score)
            return jnp.take_along_axis(sets, labels[batch:, None], axis=1).mean(), sets.sum(axis=1).mean()

        found, sizes = jax.jit(jax.vmap(covered))(p, labels)
        exact = np.ceil((batch + 1) * (1 - error)) / (batch + 1)  # scores without ties
        spread = np.std(found) / np.sqrt(repeats)
        assert abs(np.mean(found) - exact) < 5 * spread + (0.02 if score == "cumulative" else 0)
        assert np.mean(found) > 1 - error - 5 * spread
        assert 1 < np.mean(sizes) < classes

    def test_of_members_and_by_hand(self):
        generator = np.random.default_rng(2)
        p = generator.dirichlet(np.ones(3), size=(2, 12)).astype(np.float32)
        labels = generator.integers(0, 3, 12)
        threshold = conformal_threshold(p, labels, error=0.3)
        k = int(np.ceil(13 * 0.7))
        for i in range(2):
            scores = np.sort(1 - p[i][np.arange(12), labels])
            assert float(threshold[i]) == pytest.approx(scores[k - 1])
        sets = conformal_sets(p, threshold)
        np.testing.assert_array_equal(sets, 1 - p <= np.asarray(threshold)[:, None, None])
        by_sums = conformal_sets(p, conformal_threshold(p, labels, error=0.3, score="cumulative"), score="cumulative")
        # Such a set contains every class that is more probable than one in it.
        order = np.argsort(-p, axis=-1)
        inside = np.take_along_axis(np.asarray(by_sums), order, axis=-1)
        assert (np.diff(inside.astype(int), axis=-1) <= 0).all()

    @pytest.mark.parametrize(("shape", "labelled"), [((9, 2), (9,)), ((3, 11, 4), (11,)), ((2, 7, 3, 5), (7, 3))])
    def test_by_sums_treat_equally_probable_classes_alike(self, shape, labelled):
        """The score of a label is the sum of all probabilities that are at least its own."""
        generator = np.random.default_rng(4)
        p = generator.integers(1, 4, shape).astype(np.float32)
        p /= p.sum(-1, keepdims=True)
        labels = generator.integers(0, shape[-1], labelled)
        of_label = np.take_along_axis(p, np.broadcast_to(labels, shape[:-1])[..., None], axis=-1)
        scores = np.where(p >= of_label, p, 0).sum(-1)
        threshold = np.asarray(conformal_threshold(p, labels, error=0.3, score="cumulative"))
        kept = scores.reshape(*threshold.shape, -1)
        each = int(np.prod(labels.shape[1:]))
        k = int(np.ceil((kept.shape[-1] + each) * 0.7 - 1e-9))
        np.testing.assert_allclose(threshold, np.sort(kept, axis=-1)[..., k - 1], rtol=1e-6)
        sets = np.asarray(conformal_sets(p, threshold + 1e-6, score="cumulative"))
        same = p[..., :, None] == p[..., None, :]
        assert (~same | (sets[..., :, None] == sets[..., None, :])).all()

    def test_ties_by_hand(self):
        threshold = conformal_threshold(jnp.array([[0.5, 0.5]] * 9), jnp.zeros(9, int), error=0.2, score="cumulative")
        assert float(threshold) == 1.0
        p = jnp.array([[0.2, 0.4, 0.4], [0.2, 0.6, 0.2]])
        sets = conformal_sets(p, 0.85, score="cumulative")
        np.testing.assert_array_equal(sets, [[False, True, True], [False, True, False]])

    def test_of_too_few_data_hold_everything(self):
        p = np.float32([[0.9, 0.1]] * 5)
        threshold = conformal_threshold(p, np.zeros(5, int), error=0.1)
        assert np.isinf(threshold)
        assert conformal_sets(p, threshold).all()

    def test_of_nan_hold_everything(self):
        p = np.float32([[0.9, 0.1], [np.nan, 0.5], [0.8, 0.2]])
        np.testing.assert_array_equal(conformal_sets(p, 0.15), [[True, False], [True, True], [False, False]])
        assert np.isnan(conformal_threshold(p, np.zeros(3, int), error=0.5))
        assert conformal_sets(p, np.nan).all()

    @pytest.mark.parametrize("error", [0, 1, 1.5, True, "a"])
    def test_refuse_errors(self, error):
        with pytest.raises((TypeError, ValueError), match="error must be (a number|above 0 and below 1), but got"):
            conformal_threshold(jnp.ones((3, 2)) / 2, jnp.zeros(3, int), error=error)

    def test_refuse_scores_and_thresholds(self):
        p = jnp.ones((3, 2)) / 2
        with pytest.raises(ValueError, match="score must be one of 'probability', 'cumulative', but got 'aps'"):
            conformal_threshold(p, jnp.zeros(3, int), error=0.1, score="aps")
        with pytest.raises(ValueError, match=r"threshold must have shape \(\) to match probabilities, but got \(3,\)"):
            conformal_sets(p, jnp.ones(3))


def dense(batch, seed=0, shape=(2, 3), classes=4):
    """Return probabilities and labels of images, most of whose pixels are hard in a third of the images."""
    generator = np.random.default_rng(seed)
    hard = generator.random((batch, *[1] * len(shape))) < 1 / 3
    labels = generator.integers(0, classes, (batch, *shape))
    logits = (
        generator.normal(size=(batch, *shape, classes)) + np.where(hard, 0.2, 3)[..., None] * np.eye(classes)[labels]
    )
    return scipy.special.softmax(logits, axis=-1).astype(np.float32), labels


class Test_several_labels:
    def test_a_temperature_is_that_of_all_labels(self):
        p, labels = dense(20)
        logits = np.log(np.stack([p, p**0.5]))
        for pooled in (False, True):
            expected = fit_temperature(logits.reshape(2, -1, 4), labels.ravel(), pooled=pooled)
            np.testing.assert_array_equal(fit_temperature(logits, labels, pooled=pooled), expected)

    @pytest.mark.parametrize("score", ["probability", "cumulative"])
    @pytest.mark.parametrize("error", [0.04, 0.05, 0.1, 0.35])
    def test_the_threshold_is_the_smallest_that_controls_the_risk(self, score, error):
        p, labels = dense(19)
        threshold = float(conformal_threshold(p, labels, error=error, score=score))

        def bound(at):
            sets = np.asarray(conformal_sets(p, jnp.float32(at), score=score))
            missed = ~np.take_along_axis(sets, labels[..., None], axis=-1)[..., 0]
            return (missed.mean(axis=(1, 2)).sum() + 1) / (len(p) + 1)

        if error * (len(p) + 1) < 1:
            assert threshold == np.inf
        else:
            assert bound(threshold) <= error + 1e-9 < bound(np.nextafter(threshold, np.float32(0), dtype=np.float32))

    def test_one_label_for_each_example_is_the_usual_case(self):
        p, labels = dense(50, shape=())
        for each in (p[:, None], p[:, None, None]):
            found = conformal_threshold(each, labels.reshape(each.shape[:-1]), error=0.2)
            np.testing.assert_array_equal(found, conformal_threshold(p, labels, error=0.2))

    def test_the_expected_fraction_of_missed_labels_is_at_most_the_error(self):
        """Over 400 draws of 30 + 30 images: the mean is within 0.1 ± 0.005, 5 standard errors of less than 0.001."""
        missed = []
        for seed in range(400):
            p, labels = dense(60, seed)
            sets = conformal_sets(p[30:], conformal_threshold(p[:30], labels[:30], error=0.1))
            missed.append(1 - np.take_along_axis(np.asarray(sets), labels[30:, ..., None], axis=-1).mean())
        assert np.std(missed) / 20 < 0.003
        # The bound is met up to 1 / (batch + 1): Angelopoulos et al. 2022, theorem 2.
        assert 0.1 - 2 / 31 < np.mean(missed) < 0.1 + 5 * np.std(missed) / 20

    def test_members_have_their_own_thresholds(self):
        p, labels = dense(30)
        both = np.stack([p, p[:, ::-1]])
        thresholds = conformal_threshold(both, labels, error=0.2)
        assert thresholds.shape == (2,)
        sets = conformal_sets(both, thresholds)
        for member, threshold, chosen in zip(both, thresholds, sets, strict=True):
            np.testing.assert_array_equal(threshold, conformal_threshold(member, labels, error=0.2))
            np.testing.assert_array_equal(chosen, conformal_sets(member, threshold))

    def test_yes_or_no_labels(self):
        yes = np.float32([[0.9, 0.2], [0.6, 0.45], [0.3, 0.1]])
        sets = conformal_sets(np.stack([1 - yes, yes], axis=-1), jnp.float32(0.56))
        np.testing.assert_array_equal(sets[..., 1], yes >= 0.44)
        np.testing.assert_array_equal(sets[..., 0], 1 - yes >= 0.44)

    def test_shapes_that_do_not_match(self):
        p, labels = dense(5)
        with pytest.raises(ValueError, match=r"labels must have shape \(5, 2, 3\) to match probabilities"):
            conformal_threshold(p, labels.swapaxes(1, 2), error=0.3)
        with pytest.raises(
            ValueError, match=r"threshold must have shape \(5,\) to match probabilities, but got \(2,\)"
        ):
            conformal_sets(p, jnp.ones(2))


class Test_intervals:
    def test_an_error_of_half_precision_is_taken_as_it_is(self):
        y = jnp.arange(70_000.0)  # exceeds the largest float16
        radii = [conformal_radius(jnp.zeros(70_000), y, error=error) for error in (np.float16(0.1), 0.0999755859375)]
        assert float(radii[0]) == float(radii[1]) < 70_000

    @pytest.mark.parametrize("scaled", [False, True])
    def test_hold_the_target_as_often_as_promised(self, scaled):
        repeats, batch, new, error = 3000, 49, 20, 0.2
        generator = np.random.default_rng(4)
        scale = generator.uniform(0.2, 3, (repeats, batch + new)).astype(np.float32)
        mean = generator.normal(size=scale.shape).astype(np.float32)
        y = (mean + 0.4 + 2 * scale * generator.normal(size=scale.shape)).astype(np.float32)

        def covered(mean, y, scale):
            first, second = (scale[:batch], scale[batch:]) if scaled else (None, None)
            radius = conformal_radius(mean[:batch], y[:batch], error=error, scales=first)
            low, high = conformal_intervals(mean[batch:], radius, scales=second)
            return ((low <= y[batch:]) & (y[batch:] <= high)).mean()

        found = jax.jit(jax.vmap(covered))(mean, y, scale)
        exact = np.ceil(50 * 0.8) / 50
        assert abs(np.mean(found) - exact) < 5 * np.std(found) / np.sqrt(repeats)

    def test_refusals(self):
        with pytest.raises(ValueError, match=r"targets must have shape \(3,\) to match predictions, but got"):
            conformal_radius(jnp.ones(3), jnp.ones(4), error=0.1)
        with pytest.raises(ValueError, match=r"scales must have shape \(3,\) to match predictions, but got \(4,\)"):
            conformal_radius(jnp.ones(3), jnp.ones(3), error=0.1, scales=jnp.ones(4))
        with pytest.raises(ValueError, match=r"scales must be above 0, but scales\[2\] is 0"):
            conformal_radius(jnp.ones(3), jnp.ones(3), error=0.1, scales=jnp.array([1.0, 1, 0]))
        with pytest.raises(ValueError, match=r"radius must have shape \(\) to match predictions, but got \(3,\)"):
            conformal_intervals(jnp.ones(3), jnp.ones(3))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("classes", [256, 300])
def test_labels_of_a_narrow_dtype_with_more_classes_than_its_maximum(dtype, classes):
    logits, labels = data(batch=40, members=2, classes=classes)
    labels = labels % 128
    p = jax.nn.softmax(jnp.asarray(logits))
    for found in (fit_temperature, lambda _, y: conformal_threshold(p, y, error=0.2)):
        np.testing.assert_array_equal(found(logits, labels.astype(dtype)), found(logits, labels))
        assert np.isfinite(found(logits, labels)).all()


def test_a_temperature_calibrates():
    logits, labels = data(batch=4000, members=1, seed=9)
    half = 2000
    temperature = fit_temperature(logits[0, :half] * 5, labels[:half])
    before, after = (metrics.ece(jax.nn.softmax(logits[0, half:] * 5 / t), labels[half:]) for t in (1.0, temperature))
    assert float(after) < 0.3 * float(before)
    assert set(calibration.__all__) >= {"fit_temperature", "conformal_sets"}
