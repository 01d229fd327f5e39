import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.ensemble import Ensemble, Prediction


def constant(values):
    """An ensemble whose members return these values, whatever they see."""
    return Ensemble.from_apply(lambda v, _: v, list(values))


@pytest.fixture
def logits():
    return jax.random.normal(jax.random.key(0), (4, 5, 3)) * 3


def test_classification_is_the_mean_of_probabilities(logits):
    prediction = constant(logits).predict(0)
    probabilities = np.exp(np.asarray(logits, np.float64))
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    mean = probabilities.mean(axis=0)
    total = -(mean * np.log(mean)).sum(axis=-1)
    within = -(probabilities * np.log(probabilities)).sum(axis=-1).mean(axis=0)
    np.testing.assert_allclose(prediction.members, probabilities, rtol=1e-5)
    np.testing.assert_allclose(prediction.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(prediction.variance, probabilities.var(axis=0), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(prediction.entropy, total, rtol=1e-5)
    np.testing.assert_allclose(prediction.mutual_information, total - within, rtol=1e-4, atol=1e-6)


def test_members_that_agree_have_no_mutual_information(logits):
    prediction = constant([logits[0]] * 4).predict(0)
    assert prediction.mutual_information.min() >= 0
    np.testing.assert_allclose(prediction.mutual_information, 0, atol=1e-6)


def test_members_that_are_sure_of_different_things_have_all_of_it():
    prediction = constant([100 * jnp.eye(2, 3), 100 * jnp.eye(2, 3)[::-1]]).predict(0)
    np.testing.assert_allclose(prediction.mutual_information, np.log(2), rtol=1e-6)
    np.testing.assert_allclose(prediction.entropy, np.log(2), rtol=1e-6)


def test_regression_of_values(logits):
    prediction = constant(logits).predict(0, kind="regression")
    np.testing.assert_allclose(prediction.mean, np.mean(logits, axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(prediction.variance, np.var(logits, axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(prediction.members, logits)
    assert prediction.entropy is None
    assert prediction.mutual_information is None


def test_regression_of_means_and_variances_is_the_mixtures(logits):
    means, variances = logits[..., 0], jnp.exp(logits[..., 1])
    prediction = constant(zip(means, variances, strict=True)).predict(0, kind="regression")
    second_moment = (variances + means**2).mean(axis=0)
    np.testing.assert_allclose(prediction.mean, means.mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(prediction.variance, second_moment - means.mean(axis=0) ** 2, rtol=1e-4)


def test_it_is_always_in_evaluation_mode(stateful):
    ens = Ensemble.create(stateful, 3, seed=0)
    x = jnp.ones((2, 4))
    evaluating = ens.view(deterministic=True, use_running_average=True)
    np.testing.assert_allclose(ens.predict(x).members, jax.nn.softmax(evaluating(x)), rtol=1e-6)
    np.testing.assert_array_equal(ens.predict(x).members, ens.predict(x).members)


def test_a_module_of_ones_own_is_put_into_evaluation_mode_too():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(4, 3, rngs=rngs)
            self.rngs = rngs.fork()
            self.deterministic = False

        def __call__(self, x):
            y = self.dense(x)
            return y if self.deterministic else y + jax.random.normal(self.rngs(), y.shape)

    ens = Ensemble.create(Noisy, 2, seed=0)
    x = jnp.ones((2, 4))
    np.testing.assert_allclose(ens.predict(x).members[1], jax.nn.softmax(ens[1].dense(x)), rtol=1e-5)


def test_it_works_under_jit(logits):
    prediction = jax.jit(lambda ens: ens.predict(0))(constant(logits))
    assert isinstance(prediction, Prediction)
    np.testing.assert_allclose(prediction.mean, constant(logits).predict(0).mean, rtol=1e-6)


def test_it_refuses_an_unknown_kind(logits):
    with pytest.raises(ValueError, match='kind must be "classification" or "regression", but got \'ranking\''):
        constant(logits).predict(0, kind="ranking")


def test_it_refuses_outputs_that_are_no_logits(logits):
    with pytest.raises(ValueError, match=r"must return logits of shape \(batch, classes\).*\(4, 5\)"):
        constant(logits[..., 0]).predict(0)
    with pytest.raises(ValueError, match="for values use kind='regression'"):
        constant(zip(logits, logits, strict=True)).predict(0)


def test_it_refuses_outputs_that_are_no_values(logits):
    with pytest.raises(ValueError, match=r"values or a pair \(mean, variance\)"):
        constant([(x, x, x) for x in logits]).predict(0, kind="regression")
    with pytest.raises(ValueError, match=r"values or a pair \(mean, variance\)"):
        constant([{"mean": x} for x in logits]).predict(0, kind="regression")
    with pytest.raises(ValueError, match=r"means have shape \(5, 3\), but their variances \(5,\)"):
        constant([(x, x[..., 0]) for x in logits]).predict(0, kind="regression")
