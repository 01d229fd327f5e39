"""What the outputs of members mean: told once, passed, or assumed with a warning."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Committee, Ensemble, Trainer, distill, distillation, export, load, save, select
from plurax.transforms import vmap
from plurax.transforms.curvature import laplace

X = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
ASSUMED = (
    r"^{}: nothing says what the outputs mean, so they are taken for logits of classes; pass kind='classification'"
)


def two_values(rngs: nnx.Rngs) -> Any:
    return nnx.Linear(4, 2, rngs=rngs)


def created(seed: int = 0) -> Ensemble[Any]:
    return Ensemble.create(two_values, 3, seed=seed)


def loss(model: Any, x: Any) -> Any:
    return jnp.square(model(x)).mean()


def test_an_assumption_is_warned_of_once_for_each_ensemble() -> None:
    several = created(), created(1), Committee([created()])
    with pytest.warns(UserWarning, match="nothing says") as caught:
        assumed = [ens.predict(X) for ens in (*several, *several)]
    assert [w.filename for w in caught] == [__file__] * 3
    assert re.match(ASSUMED.format("Ensemble.predict"), str(caught[0].message))
    assert str(caught[0].message).endswith("or tell the ensemble once: ensemble.with_kind('regression').")
    assert str(caught[2].message).endswith("or tell the committee once: committee.with_kind('regression').")
    jax.tree.map(np.testing.assert_array_equal, assumed[0], several[0].predict(X, kind="classification"))
    again = created()
    for _ in range(2):  # a warning that a filter turns into an error
        with pytest.raises(UserWarning, match=ASSUMED.format("Ensemble.predict")):
            again.predict(X)


def test_what_was_told_is_the_default() -> None:
    ens = created().with_kind("regression")
    assert (created().kind, ens.kind) == (None, "regression")
    np.testing.assert_allclose(ens.predict(X).mean, created()(X).mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ens.predict(X, kind="classification").mean.sum(-1), np.ones(5), rtol=1e-5)
    assert ens.with_kind("binary").kind == "binary"
    assert repr(ens) == repr(created())
    with pytest.raises(ValueError, match=r"^Ensemble.with_kind: kind must be"):
        ens.with_kind("logits")


def test_views_selections_copies_and_programs_keep_it(tmp_path: Path) -> None:
    ens = created().with_kind("regression")
    save(tmp_path / "ens", ens)
    kept: list[Ensemble[Any]] = [
        ens[1:],
        ens[[0, 2]],
        select(ens, [2, 1]),
        ens._evaluating(),
        jax.tree.map(lambda x: 2 * x, ens),
        jax.jit(lambda x: x)(ens),
        copy.deepcopy(ens),
        pickle.loads(pickle.dumps(jax.tree.map(np.asarray, ens))),
        load(tmp_path / "ens", ens),
        vmap(lambda member: member)(ens),
        Ensemble.create(two_values, 2, seed=0, shared="bias").with_kind("regression").view(),
    ]
    assert {one.kind for one in kept} == {"regression"}
    assert load(tmp_path / "ens", created()).kind is None  # as `like`
    noisy = Ensemble.create(lambda rngs: nnx.Dropout(0.5, rngs=rngs), 2, seed=0).with_kind("regression")
    assert noisy.view(deterministic=True).kind == "regression"
    # A program compiled for one kind is not used for another.
    of_kind = jax.jit(lambda ens: ens.predict(X).mean)
    assert not np.allclose(of_kind(ens), of_kind(ens.with_kind("classification")))


@pytest.mark.parametrize("strategy", ["vmap", "map", "unroll", "loop"])
def test_training_keeps_it_and_is_not_changed_by_it(strategy: Any) -> None:
    trainer = Trainer(loss, optax.adam(0.1), strategy=strategy)
    found, expected = trainer.init(created().with_kind("regression")), trainer.init(created())
    for _ in range(2):
        (found, _), (expected, _) = trainer.step(found, X), trainer.step(expected, X)
    assert found.ensemble.kind == "regression"
    after, _ = trainer.fit(found, [X] * 3, progress=False)
    assert after.ensemble.kind == "regression"
    jax.tree.map(np.testing.assert_array_equal, found.ensemble.trainable, expected.ensemble.trainable)


def test_statistics_and_keys_of_a_told_ensemble_are_updated() -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm, self.dropout = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.dropout(self.norm(x))

    trainer = Trainer(loss, optax.sgd(0.1))
    ens = Ensemble.create(Net, 2, seed=0)
    plain, told = (trainer.step(trainer.init(x), X)[0].ensemble for x in (ens, ens.with_kind("regression")))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(jnp.asarray(a == b), True), plain.rest, told.rest)


def test_a_run_of_an_ensemble_that_was_told_nothing_is_resumed(tmp_path: Path) -> None:
    trainer = Trainer(loss, optax.adam(0.1))
    options: dict[str, Any] = {"progress": False, "checkpoint_dir": tmp_path / "run"}
    trainer.fit(trainer.init(created()), [X] * 3, **options)
    state, _ = trainer.fit(trainer.init(created().with_kind("regression")), [X] * 5, **options)
    assert (int(state.step), state.ensemble.kind) == (5, "regression")


def test_a_committee_knows_what_its_groups_were_told(tmp_path: Path) -> None:
    one, other = created(), created(1).with_kind("regression")
    committee = Committee([one, other])
    assert committee.kind == committee.weighted([1, 1, 1, 2, 2, 2]).kind == "regression"
    np.testing.assert_allclose(committee.predict(X).mean, committee(X).mean(0), rtol=1e-5, atol=1e-6)
    assert Committee([one, created(1)]).with_kind("binary").kind == "binary"
    with pytest.raises(ValueError, match=r"^Committee: group 0 was told kind='binary', but group 1 kind='regression'"):
        Committee([one.with_kind("binary"), other])
    committee.save(tmp_path / "committee")
    assert Committee.load(tmp_path / "committee", committee).kind == "regression"


def test_export_and_distillation_know_it_too(tmp_path: Path) -> None:
    ens, example, outputs = created().with_kind("regression"), X[:1], ("mean", "variance")
    export(ens, tmp_path / "model", example, outputs=outputs, platforms=("cpu",))
    with pytest.warns(UserWarning, match=ASSUMED.format("export")):
        export(created(), tmp_path / "assumed", example, platforms=("cpu",))
    np.testing.assert_array_equal(distillation.targets(ens, X).mean, ens.predict(X).mean)
    with pytest.warns(UserWarning, match=ASSUMED.format("targets")):
        distillation.targets(created(), X)
    with pytest.warns(UserWarning, match=ASSUMED.format("loss")):
        distillation.loss()
    options: dict[str, Any] = {"steps": 1, "key": jax.random.key(0), "progress": False}
    assert distill(ens, created(1), X, **options).kind == "regression"
    with pytest.warns(UserWarning, match=ASSUMED.format("distill")) as caught:
        distill(created(), two_values(nnx.Rngs(0)), X, **options)
    assert len(caught) == 1
    distill(created(), two_values(nnx.Rngs(0)), X, head="dirichlet", **options)  # which says that they are logits
    with pytest.raises(ValueError, match="head='dirichlet' is for kind='classification', but kind is 'regression'"):
        distill(ens, two_values(nnx.Rngs(0)), X, head="dirichlet", **options)


def test_a_posterior_warns_too() -> None:
    of = laplace(lambda w, x: x @ w, lambda o, y: jnp.square(o - y).mean() / 2, jnp.ones((4, 2)), (X, X[:, :2]))
    with pytest.warns(UserWarning, match=ASSUMED.format("Laplace.predict")):
        of.predict(X)
