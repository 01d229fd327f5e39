import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss

from plurax.ensemble import metrics

SCORES = (metrics.accuracy, metrics.nll, metrics.brier, metrics.ece)


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
    assert [float(score(perfect, labels)) for score in SCORES] == [1, 0, 0, 0]
    accuracy, nll, brier, ece = (float(score(hopeless, labels)) for score in SCORES)
    assert (accuracy, brier, ece) == (0, 2, 1)
    assert 80 < nll < np.inf


def test_entropy_of_certainty_is_zero_and_of_ignorance_the_logarithm():
    np.testing.assert_allclose(metrics.entropy(jnp.array([[1.0, 0.0, 0.0], [1 / 3] * 3])), [0, np.log(3)], rtol=1e-6)


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
    with pytest.raises(TypeError, match="labels must be integers"):
        score(probabilities, labels.astype(float))
    with pytest.raises(ValueError, match=r"probabilities must have shape .* but got \(3, 40, 5\) and \(39,\)"):
        score(probabilities, labels[:-1])
    with pytest.raises(ValueError, match=r"labels \(batch,\)"):
        score(probabilities[0], labels[:, None])


@pytest.mark.parametrize("bins", [0, -1, 1.5, True])
def test_ece_refuses_a_number_of_bins_that_is_none(probabilities, labels, bins):
    with pytest.raises(ValueError, match="bins must be a positive int"):
        metrics.ece(probabilities[0], labels, bins=bins)
