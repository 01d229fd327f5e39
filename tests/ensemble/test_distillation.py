"""`distillation`: a student against its teacher, and the losses against the densities that they are written for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
import scipy.stats
from flax import nnx

from plurax.ensemble import Committee, Ensemble, Trainer, distill, distillation

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 3)).astype(np.float32)


def linear(rngs: nnx.Rngs) -> Any:
    return nnx.Linear(3, 4, rngs=rngs)


def teacher(scale: float = 1.0) -> Ensemble[Any]:
    """Return five linear classifiers that differ by noise of a scale."""
    base, noise = RNG.normal(size=(3, 4)), RNG.normal(size=(5, 3, 4))
    return Ensemble.from_apply(
        lambda w, x: x @ w, [jnp.asarray(base + scale * n, jnp.float32) for n in noise]
    ).with_kind("classification")


class Classifier(nnx.Module):
    """A network for logits."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.last = nnx.Linear(3, 64, rngs=rngs), nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.tanh(self.first(x)))


class Wide(nnx.Module):
    """A network for values, or for means and variances."""

    def __init__(self, heads: int, rngs: nnx.Rngs) -> None:
        self.first, self.last = nnx.Linear(3, 64, rngs=rngs), nnx.Linear(64, heads, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        out = self.last(nnx.tanh(self.first(x)))
        return out[..., 0] if out.shape[-1] == 1 else (out[..., 0], nnx.softplus(out[..., 1]) + 1e-4)


OPTIONS: dict[str, Any] = {"key": jax.random.key(0), "optimizer": optax.adam(0.02), "progress": False}


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_a_student_has_the_mean_of_a_weighted_committee(temperature: float) -> None:
    committee = Committee([teacher(0.3), teacher(0.3)[:1]], [1, 0, 2, 1, 1, 3])
    student = distill(committee, Classifier(nnx.Rngs(1)), X, steps=400, temperature=temperature, **OPTIONS)
    assert isinstance(student, Classifier)
    found = jax.nn.softmax(student(X) / temperature)
    np.testing.assert_allclose(found, committee.predict(X, temperature=temperature).mean, atol=0.03)


def test_students_of_an_ensemble_learn_as_alone() -> None:
    many, students = teacher(), Ensemble.create(linear, 2, seed=3)
    before = np.asarray(students.trainable["kernel"])
    both = distill(many, students, X, steps=5, **OPTIONS)
    assert isinstance(both, Ensemble)
    alone = distill(many, students[1], X, steps=5, **OPTIONS)
    np.testing.assert_allclose(both[1].kernel[...], alone.kernel[...], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(students.trainable["kernel"], before)


def test_a_dirichlet_head_learns_the_disagreement() -> None:
    """A student that is free in each example finds the maximum of the likelihood, and the members' information."""
    many = teacher(0.8)
    free = Ensemble.from_apply(lambda logits, _: logits, [jnp.zeros((64, 4))])
    given = distillation.targets(many, X)
    trainer = Trainer(distillation.loss(head="dirichlet"), optax.adam(0.05))
    state = trainer.init(free)
    for _ in range(400):
        state, _ = trainer.step(state, (X, given))
    alpha = np.exp(state.ensemble(X)[0])
    # There the expected logarithm of each probability is the members' mean of it (Minka 2000).
    expected_log = scipy.special.digamma(alpha) - scipy.special.digamma(alpha.sum(-1, keepdims=True))
    np.testing.assert_allclose(expected_log, given.spread, rtol=0.01, atol=0.01)
    found, expected = distillation.dirichlet(state.ensemble(X)[0]), many.predict(X)
    told = np.corrcoef(found.mutual_information, expected.mutual_information)[0, 1]
    assert told > 0.8, told


@pytest.mark.slow
def test_a_gaussian_head_has_the_variance_of_the_mixture() -> None:
    slopes = [jnp.asarray(w) for w in RNG.normal(size=(6, 3)).astype(np.float32)]
    members = Ensemble.from_apply(lambda w, x: (x @ w, jnp.full(len(x), 0.5)), slopes)
    expected = members.predict(X, kind="regression")
    student = distill(members, Wide(2, nnx.Rngs(0)), X, steps=3000, batch_size=64, kind="regression", **OPTIONS)
    mean, variance = student(X)
    np.testing.assert_allclose(mean, expected.mean, atol=0.15)
    np.testing.assert_allclose(variance, expected.variance, rtol=0.35, atol=0.1)
    values = distill(members, Wide(1, nnx.Rngs(0)), X, steps=600, batch_size=64, kind="regression", **OPTIONS)
    np.testing.assert_allclose(values(X), expected.mean, atol=0.1)


def test_the_losses_are_those_of_the_densities() -> None:
    p, alpha = RNG.dirichlet(np.ones(4), 5), np.exp(RNG.normal(size=4))
    with jax.enable_x64(True):
        given = distillation.Targets(jnp.asarray(p.mean(0))[None], jnp.log(p).mean(0)[None])
        found = distillation.loss(head="dirichlet")(lambda x: x, jnp.log(alpha)[None], given)
        np.testing.assert_allclose(found, -np.mean([scipy.stats.dirichlet.logpdf(q, alpha) for q in p]), rtol=1e-10)
        values, mean, variance = RNG.normal(size=6), 0.3, 0.7
        given = distillation.Targets(jnp.array([values.mean()]), jnp.array([values.var()]))
        found = distillation.loss("regression")(lambda x: x, (jnp.array([mean]), jnp.array([variance])), given)
        expected = -np.mean(scipy.stats.norm.logpdf(values, mean, variance**0.5)) - np.log(2 * np.pi) / 2
        np.testing.assert_allclose(found, expected, rtol=1e-10)
        q = RNG.dirichlet(np.ones(4))
        given = distillation.Targets(jnp.asarray(p[:1]), jnp.zeros((1, 4)))
        found = distillation.loss("classification", temperature=2.0)(lambda x: x, 2 * jnp.log(q)[None], given)
        np.testing.assert_allclose(found, 4 * scipy.stats.entropy(p[0], q), rtol=1e-10)


def test_the_moments_of_a_dirichlet_distribution() -> None:
    alpha = np.array([0.7, 3.0, 1.5])
    found = distillation.dirichlet(jnp.log(alpha))
    draws = jnp.asarray(RNG.dirichlet(alpha, 200_000))
    np.testing.assert_allclose(found.mean, scipy.stats.dirichlet.mean(alpha), rtol=1e-5)
    np.testing.assert_allclose(found.variance, scipy.stats.dirichlet.var(alpha), rtol=1e-5)
    entropies = scipy.stats.entropy(np.asarray(draws), axis=-1)
    np.testing.assert_allclose(found.entropy - found.mutual_information, entropies.mean(), atol=0.005)


def test_targets_of_each_kind_and_in_parts() -> None:
    many = teacher()
    whole, parts = distillation.targets(many, X), distillation.targets(many, X, batch_size=10)
    np.testing.assert_allclose(whole.mean, parts.mean, rtol=1e-5)
    np.testing.assert_allclose(whole.spread, parts.spread, rtol=1e-5)
    yes = Ensemble.from_apply(lambda w, x: x @ w, [jnp.ones(3), jnp.zeros(3)])
    given = distillation.targets(yes, X, kind="binary")
    assert given.mean.shape == (64, 2)
    at_teacher = distillation.loss("binary")(lambda x: jnp.log(given.mean[:, 1] / given.mean[:, 0]), X, given)
    np.testing.assert_allclose(at_teacher, 0, atol=1e-6)


def test_what_is_refused() -> None:
    many, ok = teacher(), {"steps": 1, **OPTIONS}
    with pytest.raises(TypeError, match="^distill: teacher must be an Ensemble or a Committee"):
        distill(linear(nnx.Rngs(0)), linear(nnx.Rngs(0)), X, **ok)
    for nothing, error in ((3.0, TypeError), (X[:0], ValueError), ({"a": X, "b": X[:3]}, ValueError)):
        with pytest.raises(error, match="^targets: "):
            distill(many, linear(nnx.Rngs(0)), nothing, **ok)
    with pytest.raises(TypeError, match="^distill: student must be a model or an Ensemble"):
        distill(many, 3, X, **ok)
    with pytest.raises(ValueError, match=r"^loss: the student returns .*\(64, 2\).* let both have one shape"):
        distill(many, nnx.Linear(3, 2, rngs=nnx.Rngs(0)), X, **ok)
    with pytest.raises(ValueError, match="^loss: head='dirichlet' is for kind='classification'"):
        distillation.loss("regression", head="dirichlet")
    with pytest.raises(ValueError, match="^loss: temperature divides logits"):
        distillation.loss("regression", temperature=2.0)
    with pytest.raises(ValueError, match="^loss: temperature must be positive and finite"):
        distillation.loss("classification", temperature=0.0)
    with pytest.raises(TypeError, match="^dirichlet: the outputs must be floating-point"):
        distillation.dirichlet(jnp.ones(3, int))
    with pytest.raises(ValueError, match="^dirichlet: the outputs must have a last axis of classes"):
        distillation.dirichlet(jnp.ones(1))
