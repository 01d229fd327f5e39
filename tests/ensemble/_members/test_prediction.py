from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.ensemble import Ensemble, Prediction, metrics
from plurax.ensemble.calibration import fit_temperature


def constant(values):
    """An ensemble whose members return fixed values for any input."""
    return Ensemble.from_apply(lambda v, _: v, list(values)).with_kind("classification")


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


def divided(logits, temperature):
    """The probabilities of logits divided by one temperature, or by one per member, in NumPy."""
    z = np.asarray(logits, np.float64) / np.reshape(temperature, (-1, *[1] * (np.ndim(logits) - 1)))
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def entropy(p):
    return -(p * np.log(p)).sum(axis=-1)


def assert_mixture_of(prediction, members, tolerance=1e-5):
    mean = members.mean(axis=0)
    np.testing.assert_allclose(prediction.members, members, rtol=tolerance, atol=1e-6)
    np.testing.assert_allclose(prediction.mean, mean, rtol=tolerance, atol=1e-6)
    np.testing.assert_allclose(prediction.variance, members.var(axis=0), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(prediction.entropy, entropy(mean), rtol=tolerance, atol=1e-6)
    within = entropy(mean) - entropy(members).mean(axis=0)
    np.testing.assert_allclose(prediction.mutual_information, within, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "temperature", [2.5, 3, np.float64(0.7), jnp.array(1.7), [0.5, 1.0, 2.0, 4.0], jnp.array([1, 2, 3, 4])], ids=str
)
def test_a_temperature_divides_the_logits(logits, temperature):
    prediction = constant(logits).predict(0, temperature=temperature)
    assert_mixture_of(prediction, divided(logits, temperature))
    assert prediction.mean.dtype == jnp.float32
    traced = jax.jit(lambda t: constant(logits).predict(0, temperature=t))(jnp.asarray(temperature))
    np.testing.assert_allclose(traced.mean, prediction.mean, rtol=1e-6)


def test_a_fitted_temperature_calibrates_what_it_was_fitted_for():
    logits = 4 * jax.random.normal(jax.random.key(0), (4, 60, 3))
    labels = jnp.where(jnp.arange(60) % 3 > 0, logits.sum(axis=0).argmax(axis=-1), jnp.arange(60) % 2)
    ens = constant(logits)
    shared = float(fit_temperature(logits, labels, pooled=True))
    each = fit_temperature(logits, labels)
    loss = lambda t: float(metrics.nll(ens.predict(0, temperature=t).mean, labels))
    assert loss(shared) < min(loss(shared * 1.1), loss(shared / 1.1), loss(None))
    losses = lambda t: np.asarray(metrics.nll(ens.predict(0, temperature=t).members, labels))
    assert (losses(each) <= np.minimum(losses(each * 1.1), losses(each / 1.1))).all()


def test_a_tiny_temperature_gives_the_most_probable_class():
    prediction = constant(jnp.array([[[1e30, 2e30, 0.0]]])).predict(0, temperature=1e-20)
    np.testing.assert_array_equal(prediction.mean, [[0, 1, 0]])


def test_half_precision_with_a_temperature(logits):
    prediction = constant(logits.astype(jnp.bfloat16)).predict(0, temperature=1.5)
    assert prediction.mean.dtype == jnp.float32
    assert_mixture_of(prediction, divided(logits.astype(jnp.bfloat16), 1.5))


@pytest.mark.parametrize(
    ("temperature", "error", "message"),
    [(x, ValueError, "positive and finite, but got") for x in (0, -1.0, np.nan, np.inf, [1.0, 2, 0, 1])]
    + [(x, TypeError, "a real number, but got") for x in (True, "1", 1j)]
    + [([1.0, 2.0], ValueError, r"one number, or one for each of the 4 members, but got shape \(2,\)")]
    + [(jnp.ones((4, 1)), ValueError, r"one number, or one for each of the 4 members, but got shape \(4, 1\)")],
)
def test_temperatures_that_are_refused(logits, temperature, error, message):
    with pytest.raises(error, match=f"Ensemble.predict: temperature must be {message}"):
        constant(logits).predict(0, temperature=temperature)


def test_a_traced_temperature_that_is_not_positive_gives_nan(logits):
    mean = jax.jit(lambda t: constant(logits).predict(0, temperature=t).members)(jnp.array([1.0, -1, 0, jnp.inf]))
    assert jnp.isnan(mean).all(axis=(1, 2)).tolist() == [False, True, True, True]


def test_a_temperature_has_no_meaning_for_values(logits):
    with pytest.raises(ValueError, match="temperature divides logits, but kind='regression' has none"):
        constant(logits).predict(0, kind="regression", temperature=1.0)


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1), (4, 5, 3), (4, 2, 5, 3)])
@pytest.mark.parametrize("temperature", [None, 1.7, [0.5, 1.0, 2.0, 4.0]])
def test_binary_logits_are_those_of_a_sigmoid(shape, temperature):
    logits = 3 * jax.random.normal(jax.random.key(1), shape)
    prediction = constant(logits).predict(0, kind="binary", temperature=temperature)
    scale = np.reshape(1.0 if temperature is None else temperature, (-1, *[1] * (len(shape) - 1)))
    yes = 1 / (1 + np.exp(-np.asarray(logits, np.float64) / scale))
    assert_mixture_of(prediction, np.stack([1 - yes, yes], axis=-1))


@pytest.mark.parametrize("temperature", [None, [0.5, 1.0, 2.0, 4.0]])
def test_every_pixel_may_have_a_class(temperature):
    logits = jax.random.normal(jax.random.key(1), (4, 5, 2, 3, 6))
    prediction = constant(logits).predict(0, temperature=temperature)
    assert_mixture_of(prediction, divided(logits, temperature or 1.0))
    assert prediction.entropy.shape == (5, 2, 3)


def test_members_that_agree_have_no_mutual_information(logits):
    prediction = constant([logits[0]] * 4).predict(0)
    assert prediction.mutual_information.min() >= 0
    np.testing.assert_allclose(prediction.mutual_information, 0, atol=1e-6)


def test_confident_members_that_disagree_have_full_mutual_information():
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


def test_regression_of_means_and_variances_is_that_of_the_mixture(logits):
    means, variances = logits[..., 0], jnp.exp(logits[..., 1])
    prediction = constant(zip(means, variances, strict=True)).predict(0, kind="regression")
    second_moment = (variances + means**2).mean(axis=0)
    np.testing.assert_allclose(prediction.mean, means.mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(prediction.variance, second_moment - means.mean(axis=0) ** 2, rtol=1e-4)


def test_it_is_always_in_evaluation_mode(stateful):
    ens = Ensemble.create(stateful, 3, seed=0).with_kind("classification")
    x = jnp.ones((2, 4))
    evaluating = ens.view(deterministic=True, use_running_average=True)
    np.testing.assert_allclose(ens.predict(x).members, jax.nn.softmax(evaluating(x)), rtol=1e-6)
    np.testing.assert_array_equal(ens.predict(x).members, ens.predict(x).members)


def test_a_custom_module_is_put_into_evaluation_mode_too():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(4, 3, rngs=rngs)
            self.rngs = rngs.fork()
            self.deterministic = False

        def __call__(self, x):
            y = self.dense(x)
            return y if self.deterministic else y + jax.random.normal(self.rngs(), y.shape)

    ens = Ensemble.create(Noisy, 2, seed=0).with_kind("classification")
    x = jnp.ones((2, 4))
    np.testing.assert_allclose(ens.predict(x).members[1], jax.nn.softmax(ens[1].dense(x)), rtol=1e-5)


def test_members_may_see_inputs_of_their_own():
    ens = Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 2, seed=0)
    xs = jnp.arange(40.0).reshape(2, 5, 4) / 10
    expected = [jax.nn.softmax(member(x)) for member, x in zip(ens, xs, strict=True)]
    np.testing.assert_allclose(ens.predict(xs, in_axes=0, kind="classification").members, expected, rtol=1e-5)
    with pytest.raises(ValueError, match="number of members"):
        ens.predict(xs[:1], in_axes=0, kind="classification")


def test_it_works_under_jit(logits):
    prediction = jax.jit(lambda ens: ens.predict(0))(constant(logits))
    assert isinstance(prediction, Prediction)
    np.testing.assert_allclose(prediction.mean, constant(logits).predict(0).mean, rtol=1e-6)


def test_it_refuses_an_unknown_kind(logits):
    with pytest.raises(
        ValueError, match="kind must be one of 'classification', 'binary', 'regression', but got 'ranking'"
    ):
        constant(logits).predict(0, kind="ranking")


def test_it_refuses_outputs_that_are_not_logits(logits):
    with pytest.raises(
        ValueError, match=r"must return logits of shape \(batch, ..., classes\).*\(4, 5\); .*kind='binary\'"
    ):
        constant(logits[..., 0]).predict(0)
    with pytest.raises(ValueError, match="for values use kind='regression'"):
        constant(zip(logits, logits, strict=True)).predict(0)


def test_it_refuses_outputs_that_are_not_values(logits):
    with pytest.raises(ValueError, match=r"values or a pair \(mean, variance\)"):
        constant([(x, x, x) for x in logits]).predict(0, kind="regression")
    with pytest.raises(ValueError, match=r"values or a pair \(mean, variance\)"):
        constant([{"mean": x} for x in logits]).predict(0, kind="regression")
    with pytest.raises(ValueError, match=r"means have shape \(5, 3\), but their variances \(5,\)"):
        constant([(x, x[..., 0]) for x in logits]).predict(0, kind="regression")


@pytest.mark.parametrize("classes", [0, 1])
def test_it_refuses_logits_of_fewer_than_two_classes(classes, logits):
    message = (
        rf"at least 2 classes, but got shape \(4, 5, {classes}\); for logits of yes-or-no labels use kind='binary'"
    )
    with pytest.raises(ValueError, match=message):
        constant(logits[..., :classes]).predict(0)
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda ens: ens.predict(0))(constant(logits[..., :classes]))


def test_the_suggestion_of_that_error_equals_the_sigmoid(logits):
    z = logits[..., :1]
    np.testing.assert_allclose(constant(z).predict(0, kind="binary").members[..., 1], jax.nn.sigmoid(z), rtol=1e-5)


def test_it_refuses_logits_that_are_not_floating(logits):
    with pytest.raises(TypeError, match=r"logits must be .* floating.*\(4, 5, 3\) and dtype int8.*astype\(float\)"):
        constant((30 * logits).astype(jnp.int8)).predict(0)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_computed_in_float32(dtype, logits):
    half = (logits / 20).astype(dtype)  # members that nearly agree
    for prediction in (constant(half).predict(0), jax.jit(lambda ens: ens.predict(0))(constant(half))):
        expected = constant(half.astype(jnp.float32)).predict(0)
        for found, wanted in zip(prediction, expected, strict=True):
            assert found.dtype == jnp.float32
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(prediction.members.sum(axis=-1), 1, rtol=1e-6)
        assert (prediction.mutual_information > 0).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_regression_of_half_precision_is_computed_in_float32(dtype, logits):
    half = (100 + 300 * logits).astype(dtype)  # in float16 the squares overflow
    values = np.asarray(half, np.float64)
    prediction = constant(half).predict(0, kind="regression")
    pairs = constant(zip(half, jnp.abs(half), strict=True)).predict(0, kind="regression")
    for found in (prediction.mean, prediction.variance, prediction.members, *pairs[:2], pairs.members):
        assert found.dtype == jnp.float32
    np.testing.assert_allclose(prediction.mean, values.mean(axis=0), rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(prediction.variance, values.var(axis=0), rtol=1e-5)
    np.testing.assert_array_equal(prediction.members, values)
    np.testing.assert_allclose(pairs.variance, values.var(axis=0) + np.abs(values).mean(axis=0), rtol=1e-5)


def test_double_precision_is_kept(logits):
    with jax.enable_x64(True):
        double = constant(np.asarray(logits, np.float64))
        assert {x.dtype.name for x in double.predict(0)} == {"float64"}
        assert {x.dtype.name for x in double.predict(0, kind="regression") if x is not None} == {"float64"}


def test_regression_of_integers():
    values = np.array([[100, -100], [127, 5], [-128, 0]], np.int8)
    prediction = constant(values).predict(0, kind="regression")
    np.testing.assert_allclose(prediction.mean, values.astype(float).mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(prediction.variance, values.astype(float).var(axis=0), rtol=1e-6)


def test_negative_variances_are_refused_and_nan_where_traced(logits):
    means, variances = logits[..., 0], jnp.exp(logits[..., 1]).at[2, 3].set(-0.5)
    ens = constant(zip(means, variances, strict=True))
    with pytest.raises(ValueError, match=r"not be negative, but variances\[2, 3\] is -0.5.*jnp.exp"):
        ens.predict(0, kind="regression")
    prediction = jax.jit(lambda ens: ens.predict(0, kind="regression"))(ens)
    assert np.isnan(prediction.variance).tolist() == [False, False, False, True, False]
    np.testing.assert_allclose(prediction.mean, means.mean(axis=0), rtol=1e-5, atol=1e-6)
    assert constant(zip(means, variances * 0, strict=True)).predict(0, kind="regression").variance.shape == (5,)


def test_a_nan_affects_all_scores_of_its_example_only(logits):
    prediction = constant(logits.at[1, 2, 0].set(jnp.nan)).predict(0)
    for found in (prediction.mean[:, 1], prediction.variance[:, 1], prediction.entropy, prediction.mutual_information):
        assert np.isnan(found).tolist() == [False, False, True, False, False]
    assert np.argwhere(np.isnan(prediction.members[..., 1])).tolist() == [[1, 2]]


def test_it_works_on_an_empty_batch(logits):
    prediction = constant(logits[:, :0]).predict(0)
    assert [x.shape for x in prediction] == [(0, 3), (0, 3), (0,), (0,), (4, 0, 3)]


def test_it_works_under_vmap(logits):
    scales = jnp.array([0.5, 2.0])
    ens = Ensemble.from_apply(lambda v, scale: v * scale, list(logits)).with_kind("classification")
    mapped = jax.vmap(ens.predict)(scales)
    for i, scale in enumerate(scales):
        one = jax.tree.map(itemgetter(i), mapped)
        for found, wanted in zip(one, ens.predict(scale), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_module_that_is_only_a_pytree_is_put_into_evaluation_mode_too():
    class Scaled(nnx.Pytree):
        def __init__(self, rngs):
            self.kernel = nnx.Param(jnp.ones((4, 3)))
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(x @ self.kernel[...])

    prediction = Ensemble.create(Scaled, 2, seed=0).predict(jnp.ones((5, 4)), kind="classification")
    np.testing.assert_allclose(prediction.mean, np.full((5, 3), 1 / 3), rtol=1e-6)
