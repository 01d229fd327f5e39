import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

from plurax.ensemble import Ensemble, metrics
from plurax.ensemble.calibration import conformal_threshold, fit_temperature

SCORES = (metrics.accuracy, metrics.nll, metrics.brier, metrics.ece, metrics.adaptive_ece)
OF_PROBABILITIES = SCORES[1:]
HALVES = (jnp.float16, jnp.bfloat16)


@pytest.fixture
def probabilities():
    return jax.nn.softmax(2 * jax.random.normal(jax.random.key(0), (3, 40, 5)))


@pytest.fixture
def labels():
    return jax.random.randint(jax.random.key(1), (40,), 0, 5)


def test_accuracy_is_scikit_learns(probabilities, labels):
    expected = accuracy_score(labels, probabilities[0].argmax(axis=-1))
    np.testing.assert_allclose(metrics.accuracy(probabilities[0], labels), expected, rtol=1e-6)


def test_nll_is_scikit_learns(probabilities, labels):
    expected = log_loss(labels, np.asarray(probabilities[0]), labels=range(5))
    np.testing.assert_allclose(metrics.nll(probabilities[0], labels), expected, rtol=1e-5)


def test_brier_is_the_mean_squared_distance(probabilities, labels):
    one_hot = np.eye(5)[np.asarray(labels)]
    expected = ((np.asarray(probabilities[0]) - one_hot) ** 2).sum(axis=1).mean()
    np.testing.assert_allclose(metrics.brier(probabilities[0], labels), expected, rtol=1e-5)


@given(seed=st.integers(0, 10**6), bins=st.integers(1, 20))
def test_ece_is_that_of_a_loop_over_bins(seed, bins):
    generator = np.random.default_rng(seed)
    probabilities = generator.dirichlet(np.ones(3) * 0.5, 30).astype(np.float32)
    labels = generator.integers(0, 3, 30)
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    error = 0.0
    for i in range(bins):
        inside = (confidence > np.float32(i) / bins) & (confidence <= np.float32(i + 1) / bins)
        if inside.any():
            error += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    np.testing.assert_allclose(metrics.ece(probabilities, labels, bins=bins), error, atol=1e-5)


def test_perfect_and_hopeless_forecasts():
    labels = jnp.array([0, 1, 2])
    perfect, hopeless = jnp.eye(3), jnp.roll(jnp.eye(3), 1, axis=0)
    assert [float(score(perfect, labels)) for score in SCORES] == [1, 0, 0, 0, 0]
    accuracy, nll, brier, *errors = (float(score(hopeless, labels)) for score in SCORES)
    assert (accuracy, brier, *errors) == (0, 2, 1, 1)
    assert 80 < nll < np.inf


def test_entropy_is_zero_when_certain_and_the_logarithm_when_uniform():
    np.testing.assert_allclose(metrics.entropy(jnp.array([[1.0, 0.0, 0.0], [1 / 3] * 3])), [0, np.log(3)], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("lead", [(), (3,)])
def test_several_labels_for_each_example(lead):
    """Dense and multi-label predictions against scikit-learn, and every score against the flattened one."""
    p = jax.nn.softmax(jax.random.normal(jax.random.key(3), (*lead, 6, 2, 5, 4)), axis=-1)
    labels = np.random.default_rng(0).integers(0, 4, (6, 2, 5))
    for score in SCORES:
        np.testing.assert_array_equal(score(p, labels), score(p.reshape(*lead, 60, 4), labels.ravel()))
        np.testing.assert_allclose(jax.jit(score)(p, jnp.asarray(labels)), score(p, labels), rtol=1e-6)
    for one, nll, accuracy in zip(
        p.reshape(-1, 60, 4), np.ravel(metrics.nll(p, labels)), np.ravel(metrics.accuracy(p, labels)), strict=True
    ):
        np.testing.assert_allclose(nll, log_loss(labels.ravel(), np.asarray(one), labels=range(4)), rtol=1e-5)
        np.testing.assert_allclose(accuracy, accuracy_score(labels.ravel(), np.asarray(one).argmax(axis=-1)), rtol=1e-6)


@pytest.mark.parametrize("shape", [(40,), (8, 5)])
def test_yes_or_no_labels(shape):
    """Binary and multi-label predictions against scikit-learn; its Brier score has one of our two equal terms."""
    logits = np.random.default_rng(1).normal(size=(3, *shape)).astype(np.float32)
    labels = np.random.default_rng(0).integers(0, 2, shape)
    p = Ensemble.from_apply(lambda v, _: v, list(logits)).predict(0, kind="binary").mean
    yes = np.asarray(p[..., 1]).ravel()
    np.testing.assert_allclose(metrics.accuracy(p, labels), accuracy_score(labels.ravel(), yes > 0.5), rtol=1e-6)
    np.testing.assert_allclose(metrics.nll(p, labels), log_loss(labels.ravel(), yes), rtol=1e-5)
    np.testing.assert_allclose(metrics.brier(p, labels), 2 * brier_score_loss(labels.ravel(), yes), rtol=1e-5)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("shape", [(6,), (6, 3)])
def test_probabilities_without_an_axis_of_classes_are_refused(score, shape):
    message = (
        r"probabilities need an axis of classes, but have the shape \(6.*\) of labels; .*jnp.stack\(\[1 - p, p\], ax"
    )
    with pytest.raises(ValueError, match=message):
        score(jnp.full(shape, 0.5), jnp.zeros(shape, int))


@pytest.mark.parametrize("score", SCORES)
def test_a_label_out_of_range_among_several_is_named(score):
    labels = jnp.zeros((6, 2), int).at[4, 1].set(7)
    with pytest.raises(ValueError, match=r"labels\[4, 1\] is 7"):
        score(jnp.full((6, 2, 3), 1 / 3), labels)
    with pytest.raises(ValueError, match=r"labels must have shape \(6, 2\) to match"):
        score(jnp.full((6, 2, 3), 1 / 3), labels.T)


@pytest.mark.parametrize("score", SCORES)
def test_members_are_scored_one_by_one(score, probabilities, labels):
    together = score(probabilities, labels)
    assert together.shape == (3,)
    np.testing.assert_allclose(together, [score(member, labels) for member in probabilities], rtol=1e-5)


@pytest.mark.parametrize("score", SCORES)
def test_scores_work_under_jit_and_vmap(score, probabilities, labels):
    np.testing.assert_allclose(jax.jit(score)(probabilities, labels), score(probabilities, labels), rtol=1e-5)
    mapped = jax.vmap(score, (0, None))(probabilities, labels)
    np.testing.assert_allclose(mapped, score(probabilities, labels), rtol=1e-5)


@pytest.mark.parametrize("score", SCORES)
def test_scores_refuse_other_labels_and_shapes(score, probabilities, labels):
    with pytest.raises(TypeError, match="labels must be an array of integers"):
        score(probabilities, labels.astype(float))
    with pytest.raises(ValueError, match=r"labels must have shape \(40,\) to match probabilities, but got \(39,\)"):
        score(probabilities, labels[:-1])
    with pytest.raises(ValueError, match=r"labels must have shape \(40,\) to match"):
        score(probabilities[0], labels[:, None])


@pytest.mark.parametrize("bins", [0, -1, 1.5, True])
def test_ece_refuses_invalid_numbers_of_bins(probabilities, labels, bins):
    with pytest.raises((TypeError, ValueError), match="bins must be (an int|at least 1), but got"):
        metrics.ece(probabilities[0], labels, bins=bins)
    same = [score(probabilities[0], labels, bins=np.uint8(9)) for score in (metrics.ece, metrics.adaptive_ece)]
    assert same == [score(probabilities[0], labels, bins=9) for score in (metrics.ece, metrics.adaptive_ece)]


@pytest.mark.parametrize("bins", [1, 13, 26])
def test_each_bin_of_ece_holds_its_upper_end(bins):
    # One example at the upper end of every bin and one in its middle. Right and wrong examples alternate from bin to
    # bin, so counting an end in the next bin would change the sum.
    first = bins // 2 + 1
    ends = np.arange(first, bins + 1, dtype=np.float32) / np.float32(bins)
    middles = (np.arange(first, bins + 1) - 0.5).astype(np.float32) / np.float32(bins)
    confidence = np.concatenate([ends, middles])
    right = np.tile(np.arange(len(ends)) % 2 == 0, 2)
    probabilities = np.stack([confidence, 1 - confidence], axis=-1)
    winner = probabilities.argmax(axis=-1)
    gaps = (probabilities.max(axis=-1).astype(np.float64) - right).reshape(2, -1)
    expected = np.abs(gaps.sum(axis=0)).sum() / len(confidence)
    labels = np.where(right, winner, 1 - winner)
    np.testing.assert_allclose(metrics.ece(probabilities, labels, bins=bins), expected, rtol=1e-5)


@pytest.mark.slow
def test_ece_of_millions_of_examples_keeps_its_digits():
    confidence = np.random.default_rng(0).uniform(0.9, 0.95, 3_000_000).astype(np.float32)
    expected = 1 - confidence.astype(np.float64).mean()
    ece = metrics.ece(np.stack([confidence, 1 - confidence], axis=-1), np.zeros(confidence.shape, np.int32))
    np.testing.assert_allclose(ece, expected, rtol=1e-5)


@pytest.mark.parametrize("wrong", [-1, 5, 7])
@pytest.mark.parametrize("score", SCORES)
def test_labels_out_of_range_are_refused(score, wrong, probabilities, labels):
    message = rf"labels must be in 0 to 4, but labels\[17\] is {wrong}; leave such examples out"
    labels = labels.at[17].set(wrong).at[23].set(9)
    with pytest.raises(ValueError, match=message):
        score(probabilities, labels)
    with pytest.raises(ValueError, match=message):
        score(probabilities, np.asarray(labels))
    with pytest.raises(ValueError, match=message):  # a constant in the trace
        jax.jit(lambda p: score(p, labels))(probabilities)
    with pytest.raises(ValueError, match=message):
        jax.vmap(lambda p: score(p, labels))(probabilities)


@pytest.mark.parametrize("wrong", [-1, -5, 5, 7])
@pytest.mark.parametrize("score", SCORES)
def test_traced_labels_out_of_range_make_the_score_nan(score, wrong, probabilities, labels):
    several = jnp.stack([labels, labels.at[17].set(wrong)])
    assert np.isnan(jax.jit(score)(probabilities, several[1])).all()
    mapped = jax.vmap(score, (None, 0))(probabilities, several)
    assert np.isnan(mapped[1]).all()
    np.testing.assert_allclose(mapped[0], score(probabilities, labels), rtol=1e-5)


def test_a_label_that_jax_would_wrap_into_a_class_is_refused(probabilities):
    with pytest.raises(ValueError, match=rf"labels\[0\] is {2**32 + 1}"):
        metrics.nll(probabilities[0, :1], np.array([2**32 + 1]))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_labels_of_a_narrow_dtype_score_with_more_classes_than_its_maximum(score, dtype):
    probabilities = jax.nn.softmax(jax.random.normal(jax.random.key(0), (2, 300)))
    labels = jnp.array([5, 100])
    np.testing.assert_array_equal(score(probabilities, labels.astype(dtype)), score(probabilities, labels))


@pytest.mark.parametrize("score", SCORES)
def test_variables_are_scored_as_their_arrays(score, probabilities, labels):
    p, y = nnx.Variable(probabilities), nnx.Variable(labels)
    np.testing.assert_array_equal(score(p, y), score(probabilities, labels))
    traced = jax.jit(lambda p, y: score(nnx.Variable(p), nnx.Variable(y)))(probabilities, labels)
    np.testing.assert_allclose(traced, score(probabilities, labels), rtol=1e-5)
    with pytest.raises(ValueError, match=r"labels\[1\] is -1"):
        score(p, nnx.Variable(labels.at[1].set(-1)))


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("score", SCORES)
def test_a_nan_makes_the_score_of_its_member_nan(score, place, probabilities, labels):
    broken = probabilities.at[1, 7, place].set(jnp.nan)
    for scores in (score(broken, labels), jax.jit(score)(broken, labels), jax.vmap(score, (0, None))(broken, labels)):
        assert np.isnan(scores).tolist() == [False, True, False]
        np.testing.assert_allclose(scores[::2], score(probabilities, labels)[::2], rtol=1e-5)


def test_entropy_of_nan_is_nan(probabilities):
    entropy = metrics.entropy(probabilities.at[1, 7, 3].set(jnp.nan))
    assert np.argwhere(np.isnan(entropy)).tolist() == [[1, 7]]


@pytest.mark.parametrize("score", SCORES)
def test_the_score_of_no_examples_is_nan_and_of_no_members_empty(score, probabilities, labels):
    assert np.isnan(score(probabilities[:, :0], labels[:0])).tolist() == [True] * 3
    assert score(probabilities[:0], labels).shape == (0,)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("score", SCORES)
def test_half_precision_is_scored_in_float32(score, dtype, probabilities, labels):
    half = probabilities.astype(dtype)
    scores = score(half, labels)
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, score(half.astype(jnp.float32), labels), rtol=1e-6)
    entropy = metrics.entropy(half)
    assert entropy.dtype == jnp.float32
    np.testing.assert_array_equal(entropy, metrics.entropy(half.astype(jnp.float32)))


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_scores_more_examples_than_its_maximum(dtype):
    probabilities = np.tile(np.array([[0.75, 0.25], [0.625, 0.375]], dtype), (100_000, 1))
    scores = [score(probabilities, np.tile([0, 1], 100_000)) for score in SCORES[:4]]
    nll, brier, ece = -np.log(0.75 * 0.375) / 2, 0.25**2 + 0.625**2, (0.25 + 0.625) / 2
    np.testing.assert_allclose(scores, [0.5, nll, brier, ece], rtol=1e-5)


@pytest.mark.parametrize("score", SCORES)
def test_scores_have_the_dtype_of_the_probabilities(score, probabilities, labels):
    assert score(probabilities, labels).dtype == jnp.float32
    p, y = np.asarray(probabilities), np.asarray(labels)
    with jax.enable_x64(True):
        assert score(p, y).dtype == jnp.float32
        p = p.astype(np.float64)
        double = score(p, y)
        assert double.dtype == jnp.float64
        assert metrics.entropy(p).dtype == jnp.float64
        assert np.isnan(jax.jit(score)(p, np.where(np.arange(40) == 17, -1, y))).all()
    np.testing.assert_allclose(double, score(probabilities, labels), rtol=1e-5)


@pytest.mark.parametrize("dtype", [int, bool, complex])
def test_probabilities_that_are_not_floating_are_refused(dtype):
    one_hot, labels = np.eye(3, dtype=dtype)[:2], jnp.array([0, 1])
    for score in SCORES:
        with pytest.raises(TypeError, match=r"probabilities must be a floating-point array.*\(2, 3\) and dtype"):
            score(one_hot, labels)
    with pytest.raises(TypeError, match=r"entropy: probabilities must be a floating-point array"):
        metrics.entropy(one_hot)


def test_lists_are_refused(probabilities, labels):
    with pytest.raises(TypeError, match="labels must be an array of integers, but got a list"):
        metrics.nll(probabilities, labels.tolist())
    with pytest.raises(TypeError, match="probabilities must be a floating-point array, but got a list"):
        metrics.nll(probabilities.tolist(), labels)
    with pytest.raises(TypeError, match="probabilities must be a floating-point array, but got a list"):
        metrics.entropy([0.5, 0.5])


def test_probabilities_of_one_class_are_refused(probabilities, labels):
    for score in SCORES:
        with pytest.raises(
            ValueError, match=r"at least 2 classes, but got shape \(3, 40, 1\).*concatenate\(\[1 - p, p"
        ):
            score(probabilities[..., :1], labels)
    with pytest.raises(ValueError, match=r"entropy: .* at least 2 classes, but got shape \(3, 40, 0\)"):
        metrics.entropy(probabilities[..., :0])
    with pytest.raises(ValueError, match=r"entropy: probabilities must have shape \(..., classes\), but got \(\)"):
        metrics.entropy(np.float32(0.5))


@pytest.mark.parametrize("wrong", [-0.25, 1.5, np.inf])
@pytest.mark.parametrize("score", OF_PROBABILITIES)
def test_logits_are_not_scored_as_probabilities(score, wrong, probabilities, labels):
    logits = probabilities.at[1, 7, 3].set(wrong)
    message = rf"probabilities must be in 0 to 1, but probabilities\[1, 7, 3\] is {wrong}; .* jax.nn.softmax"
    with pytest.raises(ValueError, match=message):
        score(logits, labels)
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda y: score(logits, y))(labels)
    with pytest.raises(ValueError, match=message):
        metrics.entropy(logits)
    assert np.isnan(jax.jit(score)(logits, labels)).tolist() == [False, True, False]
    assert np.argwhere(np.isnan(jax.jit(metrics.entropy)(logits))).tolist() == [[1, 7]]


@pytest.mark.parametrize("score", OF_PROBABILITIES)
def test_rounding_above_one_is_not_a_logit(score):
    probabilities = jnp.array([[1.004, -0.004], [0.25, 0.75]], jnp.bfloat16)
    assert np.isfinite(score(probabilities, jnp.array([0, 1])))


def test_accuracy_of_logits_is_that_of_their_probabilities(labels):
    logits = 5 * jax.random.normal(jax.random.key(2), (3, 40, 5))
    np.testing.assert_array_equal(metrics.accuracy(logits, labels), metrics.accuracy(jax.nn.softmax(logits), labels))


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda p, y: metrics.nll(p, y), "mean"),
        (lambda p, y: metrics.accuracy(p, y), "mean"),
        (lambda p, y: metrics.brier(p, y), "members"),
        (lambda p, y: metrics.entropy(p), "mean"),
        (lambda p, y: metrics.mutual_information(p), "members"),
        (lambda p, y: metrics.gaussian_nll(p, jnp.ones((4, 3)), jnp.zeros(3)), "mean"),
        (lambda p, y: metrics.gaussian_nll(jnp.ones(3), p, jnp.zeros(3)), "variance"),
        (lambda p, y: metrics.epistemic_variance(p), "members"),
    ],
)
def test_a_whole_prediction_is_refused_with_the_part_to_pass(call, remedy):
    logits = jax.random.normal(jax.random.key(0), (2, 5, 3))
    prediction = Ensemble.from_apply(lambda v, _: v, list(logits)).predict(0, kind="classification")
    labels = jnp.array([0, 1, 2, 0, 1])
    with pytest.raises(TypeError, match=rf"but got a Prediction.*; pass .*its \.{remedy}"):
        call(prediction, labels)


def test_the_parts_of_a_prediction_are_scored():
    logits = jax.random.normal(jax.random.key(0), (2, 5, 3))
    prediction = Ensemble.from_apply(lambda v, _: v, list(logits)).predict(0, kind="classification")
    labels = jnp.array([0, 1, 2, 0, 1])
    assert metrics.nll(prediction.mean, labels).shape == ()
    assert metrics.nll(prediction.members, labels).shape == (2,)
    with pytest.raises(TypeError, match=r"^fit_temperature: logits .* Prediction.*; pass the outputs of the ensemble"):
        fit_temperature(prediction, labels)
    with pytest.raises(TypeError, match=r"^conformal_threshold: .* Prediction.*; pass its \.mean, or its \.members"):
        conformal_threshold(prediction, labels, error=0.5)
