"""`plurax.ensemble.sklearn`: scikit-learn's own checks, its tools, and what intervals promise."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import QuantileTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

from plurax.ensemble import Batches, Trainer
from plurax.ensemble.sklearn import EnsembleClassifier, EnsembleRegressor

SMALL: dict[str, Any] = {"members": 2, "hidden": (16,), "epochs": 80, "learning_rate": 1e-2, "random_state": 0}
RNG = np.random.default_rng(0)


@pytest.mark.slow
@parametrize_with_checks([EnsembleClassifier(**SMALL), EnsembleRegressor(**SMALL)])
def test_the_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "tabm"])
def test_classifiers_in_pipelines_searches_and_cross_validation(model: Any) -> None:
    x, y = load_wine(return_X_y=True)
    names = np.array(["a", "b", "c"])[y]
    classifier = EnsembleClassifier(model, **SMALL)
    pipeline = make_pipeline(QuantileTransformer(n_quantiles=50), classifier)
    assert cross_val_score(pipeline, x, names, cv=2).min() > 0.85
    search = GridSearchCV(classifier, {"learning_rate": [1e-5, 1e-2]}, cv=2).fit(x, names)
    assert search.best_params_ == {"learning_rate": 1e-2}
    assert search.best_estimator_.predict(x[:3]).dtype == names.dtype
    p = search.predict_proba(x)
    np.testing.assert_allclose(p.sum(1), 1)
    np.testing.assert_array_equal(search.predict_proba(x[7:9]), p[7:9])  # a row does not depend on the others
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    np.testing.assert_array_equal(again.predict_proba(x), search.best_estimator_.predict_proba(x))


def test_equal_seeds_are_equal_and_others_are_not() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    fits = [EnsembleClassifier(**{**SMALL, "epochs": 3, "random_state": seed}).fit(x, y) for seed in (0, 0, 1)]
    first, same, other = (fit.predict_proba(x) for fit in fits)
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "tabm"])
def test_intervals_of_held_out_examples_cover(model: Any) -> None:
    x = RNG.uniform(-2, 2, (1200, 2))
    y = 100 + 50 * np.sin(x[:, 0]) + 10 * np.abs(x[:, 1]) * RNG.standard_t(3, len(x))
    regressor = EnsembleRegressor(model, **SMALL, held_out=0.4).fit(x[:600], y[:600])
    ends = regressor.predict_interval(x[600:], error=0.2)
    covered = ((ends[:, 0] < y[600:]) & (y[600:] < ends[:, 1])).mean()
    # The coverage given 240 held-out examples has a standard deviation of 0.026, and the mean of 600 one of 0.016.
    assert 0.67 < covered < 0.93
    assert regressor.score(x[600:], y[600:]) > 0.5
    wide, narrow = (np.abs(x[600:, 1]) > 1.5), (np.abs(x[600:, 1]) < 0.5)
    widths = ends[:, 1] - ends[:, 0]
    assert widths[wide].mean() > 1.5 * widths[narrow].mean()
    plain = EnsembleRegressor(model, **SMALL).fit(x[:600], y[:600])
    with_normal = plain.predict_interval(x, error=0.05)
    assert (with_normal[:, 0] < plain.predict(x)).all()
    assert (with_normal[:, 1] > plain.predict(x)).all()


def test_models_of_the_user() -> None:
    def make(features: int, outputs: int, rngs: nnx.Rngs) -> Any:
        return nnx.Sequential(nnx.Linear(features, 8, rngs=rngs), nnx.relu, nnx.Linear(8, outputs, rngs=rngs))

    x, y = load_diabetes(return_X_y=True)
    regressor = EnsembleRegressor(make, members=3, epochs=30, random_state=0).fit(x, y)
    assert regressor.score(x, y) > 0.4
    assert regressor.predict_interval(x[:5]).shape == (5, 2)
    x, y = load_wine(return_X_y=True)
    assert EnsembleClassifier(make, members=3, epochs=60, random_state=0).fit(x, y).score(x, y) > 0.9


def test_what_is_refused() -> None:
    x, y = load_wine(return_X_y=True)
    with pytest.raises(ValueError, match=r"^EnsembleClassifier: model must be .*mlp.*tabm"):
        EnsembleClassifier("forest").fit(x, y)
    with pytest.raises(ValueError, match="^EnsembleClassifier: model='tabm' needs a hidden layer"):
        EnsembleClassifier("tabm", hidden=()).fit(x, y)
    with pytest.raises(ValueError, match="^EnsembleClassifier: members must be"):
        EnsembleClassifier(members=0).fit(x, y)
    with pytest.raises(ValueError, match="^EnsembleRegressor: held_out must be from 0 to below 1"):
        EnsembleRegressor(held_out=1.0).fit(x, y)
    fitted = EnsembleRegressor(members=1, hidden=(), epochs=1).fit(x, y)
    with pytest.raises(ValueError, match="^predict_interval: error must be between 0 and 1"):
        fitted.predict_interval(x, error=1.5)


@pytest.mark.parametrize("kind", [EnsembleClassifier, EnsembleRegressor])
def test_columns_that_are_constant_but_for_rounding_have_the_scale_one(kind: Any) -> None:
    x, y = load_diabetes(return_X_y=True)
    y = y > 100 if kind is EnsembleClassifier else y
    small = kind(**{**SMALL, "epochs": 20})
    score = small.fit(x, y).score(x, y)
    wobbling = 0.1 + np.where(np.arange(len(x)) % 2, 1e-17, 0)
    constant = np.concatenate([wobbling[:, None].repeat(3, axis=1) * [1, 3, 1e9], x], axis=1)
    assert constant.std(0)[:3].max() > 0
    found = small.fit(constant, y)
    np.testing.assert_array_equal(found.scale_[:3], 1)
    moved = constant + np.r_[1e-15, 1e-15, 1e-6, np.zeros(x.shape[1])]
    assert found.score(moved, y) == pytest.approx(score, abs=0.1)


def test_a_target_that_is_constant_but_for_rounding_has_the_scale_one() -> None:
    x = RNG.normal(size=(50, 2))
    y = 0.1 * 3 + np.where(np.arange(50) % 2, 1e-16, 0)
    assert y.std() > 0
    found = EnsembleRegressor(**{**SMALL, "epochs": 2}).fit(x, y)
    assert found.y_scale_ == 1
    assert np.abs(found.predict(x) - 0.3).max() < 1


def test_large_features_keep_their_scale() -> None:
    x, y = load_wine(return_X_y=True)
    small = {**SMALL, "epochs": 20}
    plain = EnsembleClassifier(**small).fit(x, y).predict_proba(x)
    large = EnsembleClassifier(**small).fit((x * 2.0**70).astype(np.float32), y)
    assert np.isfinite(large.scale_).all()
    np.testing.assert_allclose(large.predict_proba((x * 2.0**70).astype(np.float32)), plain, atol=1e-3)
    with (
        pytest.raises(ValueError, match="a column has no finite mean or variance in float64"),
        np.errstate(all="ignore"),
    ):
        EnsembleClassifier(**small).fit(x * 1e200, y)


@pytest.mark.parametrize("model", ["mlp", "tabm"])
def test_other_rates_use_the_same_programs(model: str, caplog: pytest.LogCaptureFixture) -> None:
    x, y = load_wine(return_X_y=True)
    small = {**SMALL, "epochs": 2, "hidden": (8,)}
    first = EnsembleClassifier(model, **small).fit(x, y)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        other = EnsembleClassifier(model, **{**small, "learning_rate": 0.02, "weight_decay": 0.1}).fit(x, y)
    compiled = [line for line in caplog.messages if line.startswith("Compiling")]
    assert len(compiled) <= 1  # of the initial parameters
    assert not np.allclose(first.predict_proba(x), other.predict_proba(x), atol=1e-3)


@pytest.mark.parametrize("model", ["mlp", "tabm"])
def test_rates_are_those_of_the_optimizer(model: str) -> None:
    """The parameters after some steps are those of a trainer whose optimizer has the rates as constants."""
    x, y = load_wine(return_X_y=True)
    rates = {"learning_rate": 0.02, "weight_decay": 0.3}
    found = EnsembleClassifier(model, **{**SMALL, "epochs": 2, "hidden": (8,), **rates}).fit(x, y)
    trainer = Trainer(type(found)._loss, optax.adamw(**rates))
    batches = Batches((found._scaled(x), y.astype(np.int32)), 32, key=jax.random.key(found.seed_))
    state, _ = trainer.fit(trainer.init(found._created()), batches, epochs=2, progress=False)
    chex.assert_trees_all_close(*(one.trainable for one in (found.ensemble_, state.ensemble)), atol=1e-5)
