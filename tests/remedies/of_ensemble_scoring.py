"""Remedies of scores, plots, distillation and the estimators of scikit-learn."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plurax.ensemble import Committee, Ensemble, Trainer, calibration, distillation, metrics, plots
from plurax.ensemble.sklearn import EnsembleClassifier, EnsembleRegressor

from ._registry import Fails, remedy

X = jnp.arange(6.0).reshape(2, 3)
LABELS = jnp.array([1, 0])
P = jnp.array([[0.2, 0.8], [0.6, 0.4]])
LOGITS = jnp.array([[[1.0, -1.0], [0.5, 2.0]], [[3.0, 1.0], [-1.0, 0.0]]])
ENSEMBLE = Ensemble.from_apply(lambda logits, x: logits, [*LOGITS])


@remedy(
    "disagreement: a single member cannot disagree; pass the predictions of at least 2.",
    "{}: probabilities must be in 0 to 1, but {}; apply jax.nn.softmax to logits.",
    "{}: variances must not be negative, but {}; apply jnp.exp to log-variances.",
    "{}: labels must be in 0 to {}, but {}; leave such examples out.",
)
def values_out_of_range(fails: Fails) -> None:
    fails(metrics.disagreement, LOGITS[:1])
    assert metrics.disagreement(LOGITS[:2]).tolist() == [0, 0]
    for score in (metrics.nll, metrics.brier, metrics.ece):
        fails(score, 5 * LOGITS[0], LABELS)
        assert score(jax.nn.softmax(5 * LOGITS[0]), LABELS) >= 0
    fails(metrics.aleatoric_variance, -jnp.ones((2, 3)))
    assert metrics.aleatoric_variance(jnp.exp(-jnp.ones((2, 3)))).shape == (3,)
    apply = lambda w, x: (x @ w, -jnp.ones(2))
    fails(Ensemble.from_apply(apply, [jnp.ones(3)]).predict, X, kind="regression")
    positive = lambda w, x: (x @ w, jnp.exp(-jnp.ones(2)))
    assert Ensemble.from_apply(positive, [jnp.ones(3)]).predict(X, kind="regression").variance.shape == (2,)
    ignored = jnp.array([1, -1])
    fails(metrics.accuracy, P, ignored)
    assert metrics.accuracy(P[ignored >= 0], ignored[ignored >= 0]) == 1


@remedy(
    "pass the output of jax.nn.softmax, or one-hot predictions with .astype(float)",
    "pass an array, such as jnp.asarray of a list",
    "pass its .mean, or its .members for a result for each member",
    "pass one of its arrays",
    "pass the outputs of the ensemble, ensemble(x), since a prediction has no logits",
    "cast them with .astype(float)",
)
def predictions_of_another_type(fails: Fails) -> None:
    one_hot = jnp.array([[0, 1], [1, 0]])
    fails(metrics.accuracy, one_hot, LABELS)
    assert metrics.accuracy(one_hot.astype(float), LABELS) == 1
    assert metrics.accuracy(jax.nn.softmax(LOGITS[0]), LABELS) == 0
    fails(metrics.accuracy, [[0.2, 0.8], [0.6, 0.4]], LABELS)
    assert metrics.accuracy(jnp.asarray([[0.2, 0.8], [0.6, 0.4]]), LABELS) == 1
    prediction = ENSEMBLE.predict(X, kind="classification")
    fails(metrics.nll, prediction, LABELS)
    assert metrics.nll(prediction.mean, LABELS) > 0
    assert metrics.nll(prediction.members, LABELS).shape == (2,)
    fails(metrics.risk_coverage, prediction, jnp.array([0.0, 1.0]))
    assert metrics.risk_coverage(prediction.entropy, jnp.array([0.0, 1.0]))
    fails(calibration.fit_temperature, prediction, LABELS)
    assert calibration.fit_temperature(ENSEMBLE(X), LABELS).shape == (2,)
    integers = jnp.array([[3, -1], [0, 2]])
    fails(calibration.fit_temperature, integers, LABELS)
    assert calibration.fit_temperature(integers.astype(float), LABELS) > 0
    kind: Any = {"kind": "classification"}
    fails(Ensemble.from_apply(lambda logits, x: logits.astype(int), [*LOGITS]).predict, X, **kind)
    assert Ensemble.from_apply(lambda logits, x: logits.astype(int).astype(float), [*LOGITS]).predict(X, **kind)


@remedy(
    "if p is the probability of the second of two classes, pass jnp.concatenate([1 - p, p], axis=-1)",
    "if z is the single logit of a sigmoid, pass jnp.concatenate([jnp.zeros_like(z), z], axis=-1)",
    "for yes-or-no labels pass {}",
)
def a_single_column(fails: Fails) -> None:
    p, z = P[:, 1:], LOGITS[:, :, :1]
    fails(metrics.nll, p, LABELS)
    np.testing.assert_allclose(metrics.nll(jnp.concatenate([1 - p, p], axis=-1), LABELS), metrics.nll(P, LABELS), 1e-5)
    fails(calibration.fit_temperature, z, LABELS)
    fails(metrics.nll, p[:, 0], LABELS)
    p, z = p[:, 0], z[0, :, 0]
    fails(calibration.fit_temperature, z, LABELS)
    assert metrics.nll(jnp.stack([1 - p, p], axis=-1), LABELS) > 0
    assert calibration.fit_temperature(jnp.stack([jnp.zeros_like(z), z], axis=-1), LABELS) > 0
    z = LOGITS[:, :, :1]
    assert calibration.fit_temperature(jnp.concatenate([jnp.zeros_like(z), z], axis=-1), LABELS).shape == (2,)


@remedy(
    "reliability: there are no examples, or some probabilities are NaN; leave those out.",
    "disagreement: some predictions are NaN; leave those members or examples out.",
    "learning_curves: not all rows of the history have {}; name a column that all have.",
)
def what_cannot_be_plotted(fails: Fails) -> None:
    p = P.at[0].set(jnp.nan)
    fails(plots.reliability, p, LABELS)
    fails(plots.reliability, p[:0], LABELS[:0])
    plots.reliability(p[1:], LABELS[1:])
    members = jnp.stack([P, p, P])
    fails(plots.disagreement, members)
    plots.disagreement(members[::2])
    plots.disagreement(members[:, 1:])
    history = [{"step": 1, "member": i, "loss": 1.0, "rate": 0.1, **extra} for i, extra in enumerate(({}, {"kind": 1}))]
    fails(plots.learning_curves, history, by="kind")
    plots.learning_curves(history, by="rate")


@remedy(
    "plots needs matplotlib; install it with: pip install 'plurax[plot]'",
    "plurax.ensemble.sklearn needs scikit-learn; install it with pip install 'plurax[sklearn]'",
)
def without_an_extra(fails: Fails) -> None:
    extras = metadata("plurax").get_all("Provides-Extra", [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        fails(plots.reliability, P, LABELS)
    plots.reliability(P, LABELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "plurax.ensemble.sklearn")
        patch.setitem(sys.modules, "sklearn.base", None)
        fails(import_module, "plurax.ensemble.sklearn")
    assert import_module("plurax.ensemble.sklearn").EnsembleClassifier is EnsembleClassifier
    assert {"plot", "sklearn"} <= set(extras)


@remedy(
    "{}: model='tabm' needs a hidden layer, but hidden is empty; use model='mlp'.",
    "{}: {}; divide it by its largest absolute value.",
)
def estimators(fails: Fails) -> None:
    x, y = np.arange(8.0).reshape(4, 2), np.arange(4) % 2
    options: dict[str, Any] = {"members": 2, "hidden": (), "epochs": 1, "batch_size": 4, "random_state": 0}
    fails(EnsembleClassifier("tabm", **options).fit, x, y)
    EnsembleClassifier("mlp", **options).fit(x, y)
    large = np.array([[0.0, 0.0], [-1e200, 1.0], [-1e200, 2.0], [-1e199, 3.0]])
    fails(EnsembleClassifier("mlp", **options).fit, large, y)
    EnsembleClassifier("mlp", **options).fit(large / np.abs(large).max(0), y)
    fails(EnsembleRegressor("mlp", **options).fit, x, large[:, 0])
    EnsembleRegressor("mlp", **options).fit(x, large[:, 0] / np.abs(large[:, 0]).max())


@remedy(
    "targets: x has no examples; pass at least one.",
    "loss: temperature divides logits, but kind='regression' has none; leave it out.",
    "loss: {}; let both have one shape.",
)
def distillations(fails: Fails) -> None:
    teacher = Ensemble.from_apply(lambda w, x: x @ w, [jnp.ones(3), jnp.zeros(3)])
    fails(distillation.targets, teacher, X[:0], kind="regression")
    targets = distillation.targets(teacher, X[:1], kind="regression")
    fails(distillation.loss, "regression", temperature=2.0)
    compare = distillation.loss("regression")

    def stepped(width: tuple[int, ...]) -> Any:
        student = Ensemble.from_apply(lambda w, x: x @ w, [jnp.ones((3, *width))])
        trainer = Trainer(compare, optax.sgd(0.1), strategy="vmap")
        return trainer.step(trainer.init(student), (X[:1], targets))[1]["loss"]

    fails(stepped, (1,))
    assert stepped(()).shape == (1,)


@remedy("pass what the model returns before its softmax, or jnp.log of the probabilities")
def probabilities_as_logits(fails: Fails) -> None:
    logits = 3 * LOGITS[0]
    probabilities = jax.nn.softmax(logits)
    fails(calibration.fit_temperature, probabilities, LABELS)
    expected = calibration.fit_temperature(logits, LABELS)
    np.testing.assert_allclose(calibration.fit_temperature(jnp.log(probabilities), LABELS), expected, rtol=1e-4)


@remedy("pass kind='classification', kind='binary' or kind='regression'{}")
def outputs_of_no_kind(fails: Fails) -> None:
    said = fails(ENSEMBLE.predict, X)
    assert "ensemble.with_kind('regression')" in said
    for kind in ("classification", "binary", "regression"):
        found = ENSEMBLE.predict(X, kind=kind)
        assert (ENSEMBLE.with_kind(kind).predict(X).mean == found.mean).all()
    committee = Committee([ENSEMBLE])
    assert "committee.with_kind('regression')" in fails(committee.predict, X)
    assert (committee.with_kind("regression").predict(X).mean == LOGITS.mean(0)).all()
