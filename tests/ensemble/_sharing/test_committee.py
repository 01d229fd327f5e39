"""`Committee`: members of different architectures behind one `predict`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from plurax.ensemble import Committee, Ensemble, greedy_selection, metrics
from plurax.ensemble.calibration import fit_temperature

from ..._files import rewrite

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(6, 4)).astype(np.float32), RNG.integers(0, 3, 6)


class Dropping(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.last = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(nnx.relu(self.first(x))))


def linear(rngs: nnx.Rngs) -> Any:
    return nnx.Linear(4, 3, rngs=rngs)


def groups(seed: int = 0) -> list[Any]:
    """Return two linear networks, one with dropout, two of Linen and a function."""
    dense = nn.Dense(3)
    variables = [dense.init(jax.random.key(seed + i), X) for i in range(2)]
    function = Ensemble.from_apply(lambda w, x: jnp.sin(x) @ w, [jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32)])
    several = Ensemble.create(linear, 2, seed=seed), Dropping(nnx.Rngs(seed))
    return [*several, Ensemble.from_apply(dense.apply, variables), function]


def logits_of(committee: Committee) -> np.ndarray:
    """Return the logits of one member at a time, in evaluation mode."""
    each = [nnx.view(m, deterministic=True) if isinstance(m, Dropping) else m for m in committee]
    return np.stack([member(X) for member in each])


def test_the_prediction_is_the_mean_over_all_members() -> None:
    committee = Committee(groups())
    assert len(committee) == 6
    assert repr(committee).startswith("Committee of 6 members: 2 × Linear, 1 × Dropping, 2 × Module.apply, 1 × ")
    found, p = committee.predict(X, kind="classification"), jax.nn.softmax(logits_of(committee), axis=-1)
    np.testing.assert_allclose(found.members, p, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.mean, p.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.variance, p.var(0), rtol=1e-4, atol=1e-6)
    assert found.entropy is not None
    assert (found.mutual_information >= 0).all()
    alone = Committee([Ensemble.create(linear, 2, seed=0)]).predict(X, kind="classification")
    jax.tree.map(np.testing.assert_array_equal, alone, committee.groups[0].predict(X, kind="classification"))
    assert committee[2](X).shape == (6, 3)
    np.testing.assert_allclose(committee[-1](X), logits_of(committee)[-1], rtol=1e-5, atol=1e-6)


def test_weights_are_those_of_a_mixture() -> None:
    """Weights of 2 and 1 are those of a committee in which one group appears twice, but not in `members`."""
    one, other = Ensemble.create(linear, 2, seed=0).with_kind("classification"), Dropping(nnx.Rngs(1))
    found, twice = Committee([one, other], [2, 2, 1]).predict(X), Committee([one, one, other]).predict(X)
    for name in ("mean", "variance", "entropy", "mutual_information"):
        np.testing.assert_allclose(getattr(found, name), getattr(twice, name), rtol=1e-5, atol=1e-6)
    values = Ensemble.from_apply(lambda w, x: (x @ w, jnp.exp(x[:, 0])), [jnp.ones(4), jnp.zeros(4)])
    more = Ensemble.from_apply(lambda w, x: (w * x[:, 0], jnp.ones(len(x))), [jnp.array(2.0)])
    found = Committee([values, more], [3, 0, 1]).predict(X, kind="regression")
    means, variances = (np.asarray(x) for x in Committee([values, more])(X))
    w = np.array([0.75, 0, 0.25])[:, None]
    np.testing.assert_allclose(found.mean, (w * means).sum(0), rtol=1e-5)
    mixture = (w * (variances + (means - (w * means).sum(0)) ** 2)).sum(0)
    np.testing.assert_allclose(found.variance, mixture, rtol=1e-5)
    broken = Ensemble.from_apply(lambda w, x: x @ w, [jnp.full((4, 3), jnp.nan)])
    assert np.isfinite(Committee([one, broken], [1, 1, 0]).predict(X, kind="regression").variance).all()


def test_scores_selection_and_calibration_of_all_members() -> None:
    committee = Committee(groups()).with_kind("classification")
    predicted = committee.predict(X)
    assert metrics.nll(predicted.members, Y).shape == (6,)
    chosen = greedy_selection(predicted.members, Y, rounds=4)
    best = committee.weighted(jnp.bincount(chosen.indices, length=6))
    assert metrics.nll(best.predict(X).mean, Y) <= metrics.nll(predicted.mean, Y) + 1e-6
    temperature = fit_temperature(logits_of(committee), Y)
    scaled = committee.predict(X, temperature=temperature).members
    expected = jax.nn.softmax(logits_of(committee) / temperature[:, None, None], axis=-1)
    np.testing.assert_allclose(scaled, expected, rtol=1e-4, atol=1e-5)


def test_a_directory_holds_all_groups(tmp_path: Path) -> None:
    committee = Committee(groups(), [1, 2, 3, 1, 1, 0]).with_kind("classification")
    committee.save(tmp_path / "committee")
    again = Committee.load(tmp_path / "committee", Committee(groups(7)).with_kind("classification"))
    jax.tree.map(np.testing.assert_array_equal, again.predict(X), committee.predict(X))
    Committee(groups(3)).save(tmp_path / "committee")  # replaces it
    assert Committee.load(tmp_path / "committee", committee).weights is None
    assert [file.name for file in tmp_path.iterdir()] == ["committee"]
    with pytest.raises(ValueError, match=r"^Committee.load: the committee at .* has 4 groups, but `like` has 1"):
        Committee.load(tmp_path / "committee", Committee([linear(nnx.Rngs(0))]))
    with pytest.raises(FileNotFoundError, match=r"^Committee.load: there is no committee at"):
        Committee.load(tmp_path / "nothing", committee)
    (tmp_path / "other").mkdir()
    with pytest.raises(FileExistsError, match=r"^Committee.save: .* exists and is no whole committee of this version"):
        committee.save(tmp_path / "other")
    manifest = tmp_path / "committee" / "committee.json"
    rewrite(manifest, lambda entries: entries.update(weights=[1.0]))
    with pytest.raises(ValueError, match=r"is damaged: Committee: weights must have shape \(6,\)"):
        Committee.load(tmp_path / "committee", committee)


def test_groups_of_another_save_are_refused(tmp_path: Path) -> None:
    first, like = Committee(groups(0)), Committee(groups(1))
    first.save(tmp_path / "a")
    Committee(groups(7)).save(tmp_path / "b")

    def refused(match: str) -> None:
        with pytest.raises(ValueError, match=rf"^Committee.load: the committee at .* is damaged: {match}"):
            Committee.load(tmp_path / "a", like)

    shutil.copytree(tmp_path / "a", tmp_path / "whole")
    shutil.rmtree(tmp_path / "a" / "group_001")
    refused("group_001 is missing")
    shutil.copytree(tmp_path / "b" / "group_001", tmp_path / "a" / "group_001")
    refused("group_001 is of another save")
    shutil.rmtree(tmp_path / "a" / "group_001")
    (tmp_path / "a" / "group_001").symlink_to(tmp_path / "whole" / "group_001")
    refused("group_001 is a link")
    (tmp_path / "a" / "group_001").unlink()
    shutil.copytree(tmp_path / "whole" / "group_001", tmp_path / "a" / "group_001")
    again = Committee.load(tmp_path / "a", like).predict(X, kind="classification")
    jax.tree.map(np.testing.assert_array_equal, again, first.predict(X, kind="classification"))


def test_files_of_the_user_among_those_of_a_committee(tmp_path: Path) -> None:
    committee = Committee(groups())
    committee.save(tmp_path / "a")
    for name in ("notes.txt", "group_000/notes.txt"):
        (tmp_path / "a" / name).write_text("mine")
        with pytest.raises(FileExistsError, match=rf"^Committee.save: .* also holds '{name}', which would be lost"):
            committee.save(tmp_path / "a")
        assert (tmp_path / "a" / name).read_text() == "mine"
        (tmp_path / "a" / name).unlink()
    committee.save(tmp_path / "a")


def test_what_does_not_fit_is_refused() -> None:
    one = linear(nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"^Committee: groups must be a list of ensembles and models, but got"):
        Committee(one)
    with pytest.raises(ValueError, match=r"^Committee: the list of groups is empty"):
        Committee([])
    with pytest.raises(TypeError, match=r"^Committee: group 1 is function, neither an Ensemble nor a model"):
        Committee([one, lambda x: x])
    with pytest.raises(ValueError, match=r"^Committee: weights must have shape \(1,\), one for each member, but got"):
        Committee([one], [1.0, 2.0])
    for weights in ([-1.0], [0.0], [np.nan]):
        with pytest.raises(ValueError, match=r"^Committee: weights must be finite and not negative, and one above 0"):
            Committee([one], weights)
    with pytest.raises(TypeError, match=r"^Committee: weights must be real numbers"):
        Committee([one], np.array(["a"]))
    wide = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^Committee: a member of group 1 returns \(6, 2\) \(shapes\), but one of gr"):
        Committee([one, wide]).predict(X, kind="classification")
    with pytest.raises(ValueError, match=r"^Committee.predict: kind must be"):
        Committee([one]).predict(X, kind="logits")
    with pytest.raises(IndexError, match=r"^Committee: member 1 is out of range"):
        Committee([one])[1]
