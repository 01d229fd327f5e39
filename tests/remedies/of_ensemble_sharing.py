"""Remedies of committees, exported predictions and fleets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
import ray
from flax import nnx
from ray import exceptions

from plurax.ensemble import Committee, Ensemble, Trainer, export, load_exported
from plurax.ensemble.fleet import fit_fleet

from ._registry import Fails, remedy

X = jnp.arange(6.0).reshape(2, 3)


def linear(rngs: nnx.Rngs, features: int = 2) -> nnx.Linear:
    return nnx.Linear(3, features, rngs=rngs)


ENSEMBLE = Ensemble.create(linear, 2, seed=0)


@remedy(
    "Committee: groups must be a list of ensembles and models, but got {}.",
    "Committee: the list of groups is empty; pass at least one ensemble or model.",
    "for functions use Ensemble.from_apply(apply, [variables])",
    "put its models into the list of groups, or use Ensemble.stack if they are alike",
    "pass state.ensemble",
)
def groups_of_a_committee(fails: Fails) -> None:
    models = [linear(nnx.Rngs(i)) for i in range(2)]
    fails(Committee, ENSEMBLE)
    fails(Committee, [])
    assert len(Committee([ENSEMBLE])) == 2
    equinox = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    for function in (jnp.sin, equinox):
        fails(Committee, [ENSEMBLE, function])
    apply = lambda model, x: jax.vmap(model)(x)
    assert len(Committee([ENSEMBLE, Ensemble.from_apply(apply, [equinox])]).predict(X, kind="regression").members) == 3
    fails(Committee, [ENSEMBLE, models])
    for groups in ([ENSEMBLE, *models], [ENSEMBLE, Ensemble.stack(models)]):
        assert len(Committee(groups).predict(X, kind="regression").members) == 4
    state = Trainer(lambda model, x: model(x).mean(), optax.sgd(0.1)).init(ENSEMBLE)
    fails(Committee, [state])
    assert len(Committee([state.ensemble])) == 2


@remedy(
    "Committee: a member of group {} returns {} (shapes), but one of group 0 {}; let all return outputs of one shape.",
    "Committee.save: {}; pass another path, or move it.",
    "Committee.save: {} also holds {}, which would be lost; move it.",
)
def groups_with_other_outputs(fails: Fails) -> None:
    fails(Committee([ENSEMBLE, linear(nnx.Rngs(0), 4)]).predict, X, kind="regression")
    committee = Committee([ENSEMBLE, linear(nnx.Rngs(0))])
    assert committee.predict(X, kind="regression").mean.shape == (2, 2)
    Path("taken").mkdir()
    fails(committee.save, "taken")
    committee.save("saved")
    assert len(Committee.load("saved", committee)) == 3
    Path("taken").rename("moved")
    committee.save("taken")
    for name in ("notes.txt", "group_001/notes.txt"):
        Path("saved", name).write_text("mine")
        fails(committee.save, "saved")
        Path("saved", name).rename("notes.txt")
        committee.save("saved")
        assert len(Committee.load("saved", committee)) == 3


class Rows(nnx.Module):
    """A dense layer and a function of its input and its output."""

    def __init__(self, rngs: nnx.Rngs, function: Any) -> None:
        self.dense, self.function = linear(rngs), function

    def __call__(self, x: jax.Array) -> Any:
        return self.function(x, self.dense(x))


@remedy("write x.shape[0] instead of len(x), which must be an int, and jax.vmap instead of a loop over examples")
def models_of_a_fixed_batch(fails: Fails) -> None:
    def exported(function: Any) -> Any:
        ens = Ensemble.create(lambda rngs: Rows(rngs, function), 2, seed=0)
        export(ens, "model", X, platforms=("cpu",), kind="classification")
        for x in (X, X[:1]):
            assert (load_exported("model")(x)["mean"] == ens.predict(x, kind="classification").mean).all()

    fails(exported, lambda x, y: y.reshape(len(x), 2))
    exported(lambda x, y: y.reshape(x.shape[0], 2))
    fails(exported, lambda x, y: jnp.stack([2 * y[i] for i in range(x.shape[0])]))
    exported(lambda x, y: jax.vmap(lambda row: 2 * row)(y))


@contextmanager
def ray_in_this_process(most: int = 10**6) -> Iterator[None]:
    """Replace a cluster by calls in this process, in which a group dies while `most` members train at once."""
    running: dict[int, Any] = {}

    class Remote:
        def __init__(self, fun: Any) -> None:
            self.fun = fun

        def remote(self, *args: Any) -> int:
            running[len(running)] = lambda: self.fun(*args)
            waiting.append(len(args[1]))
            return len(running) - 1

    waiting: list[int] = []

    def get(ref: int) -> Any:
        at_once = sum(waiting)
        waiting.pop(0)
        if at_once >= most:
            raise exceptions.WorkerCrashedError
        try:
            return running[ref]()
        except Exception as error:
            raise exceptions.RayTaskError("train", "", error) from None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "is_initialized", lambda: True)
        patch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 8}}])
        patch.setattr(ray, "put", lambda x: x)
        patch.setattr(ray, "remote", lambda **_: Remote)
        patch.setattr(ray, "wait", lambda refs, **_: (refs[:1], refs[1:]))
        patch.setattr(ray, "get", get)
        patch.setattr(ray, "cancel", lambda *_, **__: None)
        yield


def loss(model: Any, x: jax.Array) -> Any:
    return jnp.square(model(x)).mean()


def trainer(which: list[int]) -> Trainer:
    return Trainer(loss, optax.sgd(0.1), strategy="vmap")


def members(which: list[int]) -> Ensemble[Any]:
    return Ensemble.from_apply(lambda w, x: w * x, [jnp.float32(i) for i in which])


FOUR = members([0, 1, 2, 3])


def fleet(
    members: Any = FOUR, batches: Any = None, *, directory: Any = "fleet", make: Any = trainer, **options: Any
) -> Any:
    """Return the number of members of a fleet after a step, or after the steps that are given."""
    settings = {"group_size": 2, "progress": False, "directory": directory, "steps": 1, **options}
    with ray_in_this_process(settings.pop("most", 10**6)):
        return len(fit_fleet(make, members, [X] if batches is None else batches, **settings)[0])


@remedy("plurax.ensemble.fleet needs Ray; install it with: pip install 'plurax[ray]'")
def without_ray(fails: Fails) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plurax.ensemble.fleet.find_spec", lambda name: None)
        fails(fit_fleet, trainer, FOUR, [X], directory="none", group_size=2)
    assert "ray" in metadata("plurax").get_all("Provides-Extra", [])
    assert fleet() == 4


@remedy(
    "fit_fleet: {}= is an option of a single run, not of a fleet; leave it out.",
    "fit_fleet: batches must be iterable again for each group, but got a {}; pass a function.",
    "fit_fleet: size is that of the ensemble; leave it out.",
    "fit_fleet: members is a function, so pass their number as size=.",
    "fit_fleet: exchange and exchange_every belong together; pass both, or none.",
    "fit_fleet: members of different groups cannot share parameters; train them by Trainer.fit.",
)
def arguments_of_a_fleet(fails: Fails) -> None:
    for name in ("epochs", "checkpoint_dir", "resume"):
        fails(fleet, **{name: 1})
    fails(fleet, FOUR, iter([X]))
    fails(fleet, FOUR, size=4)
    fails(fleet, members)
    exchange = lambda state, metrics: state
    fails(fleet, exchange=exchange)
    fails(fleet, exchange_every=1)
    assert fleet(members, lambda which: iter([X]), directory="function", size=4) == 4
    assert fleet(FOUR, [X, X], exchange=exchange, exchange_every=1, steps=2, directory="exchanged") == 4
    one = linear(nnx.Rngs(0))
    shared = Ensemble.stack([nnx.clone(one) for _ in range(4)], shared="kernel")
    fails(fleet, shared)
    single = trainer([0])
    assert len(single.fit(single.init(shared), [X], progress=False)[0].ensemble) == 4


@remedy(
    "fit_fleet: {} is of a fleet with {}; use another directory.",
    "fit_fleet: members must return {} of them, but returned {}.",
    "fit_fleet: exchange must return the TrainState of all {} members, not {}.",
)
def what_a_fleet_gets(fails: Fails) -> None:
    assert fleet() == 4
    fails(fleet, group_size=4)
    assert fleet(group_size=4, directory="other") == 4
    fails(fleet, lambda which: FOUR, size=4, directory="all")
    assert fleet(lambda which: FOUR[which], size=4, directory="each") == 4
    for exchange in (lambda state, metrics: state.ensemble, lambda state, metrics: None):
        fails(fleet, exchange=exchange, exchange_every=1, steps=2, batches=[X, X], directory=f"not_{id(exchange)}")
    right = {"exchange": lambda state, metrics: state, "exchange_every": 1, "steps": 2, "batches": [X, X]}
    assert fleet(**right, directory="right") == 4


@remedy("pass fewer workers=, or a smaller group_size= with another directory, for more memory of each")
def workers_that_die(fails: Fails) -> None:
    fails(fleet, most=4)
    assert fleet(most=4, workers=1) == 4
    fails(fleet, most=2, workers=1, directory="large")
    assert fleet(most=2, workers=1, group_size=1, directory="small") == 4
    assert os.path.exists("fleet/round_0000/group_0000")
