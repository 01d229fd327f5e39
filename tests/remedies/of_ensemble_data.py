"""Remedies of the batches and of the validation of `Trainer.fit`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from plurax.ensemble import Batches, EarlyStopping, Ensemble, ProcessBatches, Trainer

from ._registry import Fails, remedy

X = np.arange(12.0, dtype=np.float32).reshape(6, 2)
Y = X.sum(1)
KEY = jax.random.key(0)
ENSEMBLE = Ensemble.from_apply(lambda w, x: x @ w, [jnp.ones(2), jnp.zeros(2)])


def loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return 1e-3 * jnp.square(model(x) - y).mean()


def fitted(batches: Any, in_axes: Any = None, fun: Any = loss, **options: Any) -> list[dict[str, Any]]:
    """Return the history of a run."""
    trainer = Trainer(fun, optax.sgd(0.1), strategy="vmap", in_axes=in_axes)
    return trainer.fit(trainer.init(ENSEMBLE), batches, progress=False, **options)[1]


def steps(batches: Any, *args: Any, **options: Any) -> int:
    """Return the number of steps that a run takes."""
    return fitted(batches, *args, **options)[-1]["step"]


class Once:
    """Batches that can be iterated only once, though they are no iterator."""

    def __init__(self) -> None:
        self.left = [(X, Y)]

    def __iter__(self) -> Iterator[Any]:
        while self.left:
            yield self.left.pop()


@remedy(
    "Batches: a subset has at most all examples, but fraction is {}; pass at most 1.",
    "Batches: draw={} is for each member; pass the number of members as members=.",
    "Batches: batch_size is {}, but there are only {} examples; make it smaller.",
    "Batches: without epochs= the batches never end; pass epochs= for a length.",
)
def arguments_of_batches(fails: Fails) -> None:
    fails(Batches, X, 2, key=KEY, members=2, draw="subset", fraction=1.5)
    fails(Batches, X, 2, key=KEY, draw="subset", fraction=0.5)
    fails(Batches, X, 7, key=KEY)
    fails(Batches, X, 4, key=KEY, members=2, draw="subset", fraction=0.5)
    fails(len, Batches(X, 2, key=KEY))
    assert next(iter(Batches(X, 2, key=KEY, members=2, draw="subset", fraction=1.0))).shape == (2, 2, 2)
    assert next(iter(Batches(X, 3, key=KEY, members=2, draw="subset", fraction=0.5))).shape == (2, 3, 2)
    assert len(Batches(X, 6, key=KEY, epochs=3)) == 3


@remedy(
    "Trainer.fit: epoch {} has no batches; pass batches that can be iterated {} times, such as a list or Batches.",
    "Trainer.fit: got steps={} and epochs={}; pass one of them.",
    "pass what it iterates over, such as a list, a data loader or Batches, or pass steps",
    "Trainer.fit: epochs={} is given, but {}; give the number in one place.",
)
def epochs(fails: Fails) -> None:
    batches = Batches((X, Y), 3, key=KEY)
    fails(fitted, Once(), epochs=2)
    fails(fitted, batches, steps=2, epochs=1)
    fails(fitted, iter([(X, Y)]), epochs=2)
    fails(fitted, iter(batches), epochs=1)
    fails(fitted, Batches((X, Y), 3, key=KEY, epochs=2), epochs=2)
    assert steps([(X, Y)], epochs=2) == steps(batches, epochs=1) == steps(batches, steps=2) == 2
    assert steps(iter([(X, Y)] * 2), steps=2) == steps(Batches((X, Y), 3, key=KEY, epochs=1)) == 2


@remedy(
    "Batches(data, batch_size, key=...), [data] * steps for full batches, or a list of batches",
    "Trainer.fit: batches must be an iterable of batches, but got data, {}; pass {}.",
)
def data_in_place_of_batches(fails: Fails) -> None:
    of_dict = lambda model, batch: loss(model, batch["x"], batch["y"])
    of_array = lambda model, x: loss(model, x, x.sum(1))
    for data, fun in (((X, Y), loss), ({"x": X, "y": Y}, of_dict), (X, of_array), (jnp.asarray(X), of_array)):
        fails(fitted, data, fun=fun, steps=2)
        assert steps(Batches(data, 3, key=KEY), fun=fun, steps=2) == steps([data] * 2, fun=fun) == 2
    assert steps([*X.reshape(2, 3, 2)], fun=of_array) == 2


@remedy(
    "Trainer.fit: the Batches never end; pass steps= or epochs= to fit, or epochs= to Batches.",
    "pass members={} to Batches{}, or in_axes=None to Trainer",
    "Trainer.fit: {}, {}; pass in_axes=0 to Trainer.",
)
def members_of_batches(fails: Fails) -> None:
    shared, own = Batches((X, Y), 3, key=KEY), Batches((X, Y), 3, key=KEY, members=2)
    fails(fitted, shared)
    fails(fitted, iter(shared))
    assert steps(shared, steps=2) == steps(shared, epochs=1) == steps(Batches((X, Y), 3, key=KEY, epochs=1)) == 2
    assert "pass members=2 to Batches, or" in fails(fitted, shared, 0, steps=1)
    assert "pass members=2 to Batches and in_axes=0 to Trainer, or" in fails(fitted, shared, (0, None), steps=1)
    assert steps(own, 0, steps=2) == steps(shared, steps=2) == 2
    fails(fitted, own, steps=1)
    fails(fitted, own, (0, None), steps=1)


@remedy("ProcessBatches: part {} {}; drop examples that do not fill a batch.")
def parts_of_other_shapes(fails: Fails) -> None:
    mesh = jax.make_mesh((1, 1), ("ensemble", "data"))
    fails(list, ProcessBatches([X[:4], X[4:]], mesh))
    assert len(list(ProcessBatches([X[:3], X[3:]], mesh))) == 2
    assert len(list(ProcessBatches([X[:4]], mesh))) == 1


def named(name: str, value: Any) -> Any:
    return lambda ensemble, *batch: {name: value(ensemble, *batch)}


def errors(ensemble: Ensemble, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.abs(ensemble(x) - y).mean(1)


BATCHES = [(X, Y)] * 2


@remedy(
    "Trainer.fit: {} needs validation data; pass validation=.",
    "Trainer.fit: validate_every is needed {}; pass the steps between two validations.",
    "Trainer.fit: early stopping watches {} of the validation; pass validation=.",
    "Trainer.fit: early stopping watches {}, but a validation has only {}; name one of these.",
    "Trainer.fit: {}; pass a multiple as every, or None for each validation.",
)
def when_to_validate(fails: Fails) -> None:
    stopping = EarlyStopping(evaluate="loss")
    fails(fitted, BATCHES, validate_every=1)
    fails(fitted, BATCHES, metrics=named("error", errors))
    fails(fitted, BATCHES, validation=(X, Y))
    fails(fitted, BATCHES, early_stopping=stopping)
    fails(fitted, BATCHES, epochs=1, early_stopping=stopping)
    options = {"validation": (X, Y), "validate_every": 1}
    assert "validation_error" in fitted(BATCHES, metrics=named("error", errors), **options)[0]
    assert "validation_loss" in fitted(BATCHES, early_stopping=stopping, **options)[0]
    assert "validation_loss" in fitted(BATCHES, epochs=1, validation=(X, Y), early_stopping=stopping)[-1]
    other = EarlyStopping(evaluate="accuracy")
    fails(fitted, BATCHES, early_stopping=other, **options)
    fails(fitted, BATCHES, early_stopping=other, metrics=named("error", errors), **options)
    for name in ("loss", "error"):
        fitted(BATCHES, early_stopping=EarlyStopping(evaluate=name), metrics=named("error", errors), **options)
    rare = {"validation": (X, Y), "validate_every": 2}
    fails(fitted, BATCHES, early_stopping=EarlyStopping(evaluate="loss", every=3), **rare)
    for every in (4, None):
        assert steps(BATCHES * 2, early_stopping=EarlyStopping(evaluate="loss", every=every), **rare) == 4


@remedy(
    "Trainer.fit: {}; pass Batches that all members share.",
    "Trainer.fit: the Batches of validation never end; pass epochs=1 to Batches.",
    "pass batches that can be iterated at each validation, such as a list",
    "pass a tuple (one batch), a list of batches, or a data loader",
    "Trainer.fit: validation can be iterated only once, but is read several times; {}.",
    "pass a tuple, (x, y), for one batch, or a list of tuples, [(x, y), ...], for several",
    "Trainer.fit: validation is a list of arrays, one batch or several; {}.",
    "Trainer.fit: validation is an empty list; pass at least one batch.",
    "pass arrays with the examples along axis 0, or one batch",
)
def data_of_validation(fails: Fails) -> None:
    def validated(data: Any, **options: Any) -> int:
        rows = fitted(BATCHES, validation=data, validate_every=1, **options)
        return sum("validation_loss" in row for row in rows)

    shared = Batches((X, Y), 3, key=KEY, epochs=1)
    fails(validated, Batches((X, Y), 3, key=KEY, members=2, epochs=1))
    fails(validated, Batches((X, Y), 3, key=KEY))
    fails(validated, Once())
    for once in (iter([(X, Y)]), iter(shared), ((X, Y) for _ in range(2))):
        fails(validated, once)
    fails(validated, [X, Y])
    fails(validated, [])
    uneven = lambda model, x, y: loss(model, x, y.sum())
    fails(validated, [(X, Y[:3]), (X, Y[:3])], fun=uneven)
    fails(validated, [(jnp.float32(1), jnp.float32(2))], fun=lambda model, x, y: loss(model, X, Y))
    assert validated((X, Y[:3]), fun=uneven) == 4
    for data in ((X, Y), [(X, Y)], [(X[:3], Y[:3]), (X[3:], Y[3:])], shared):
        assert validated(data) == 4


@remedy("pass what the loss takes after the model")
def another_structure_of_validation(fails: Fails) -> None:
    own = [(np.stack([X, X]), Y)]
    fails(fitted, own, (0, None), validation=X, validate_every=1)
    fails(fitted, own, (0, None), validation={"x": X, "y": Y}, validate_every=1)
    assert "validation_loss" in fitted(own, (0, None), validation=(X, Y), validate_every=1)[0]


@remedy(
    "Trainer.fit: metrics must return {}, but it returned {}.",
    'Trainer.fit: metrics returns a value named "loss", as the validation loss; rename it.',
    "Trainer.fit: metrics must return {}, but {} is {}.",
    "Trainer.fit: metrics must return the same names for each batch, but got {}.",
)
def metrics(fails: Fails) -> None:
    def validated(metrics: Any) -> dict[str, Any]:
        halves = [(X[:4], Y[:4]), (X[4:], Y[4:])]
        return fitted(BATCHES[:1], validation=halves, validate_every=1, metrics=metrics)[0]

    fails(validated, errors)
    fails(validated, named("loss", errors))
    fails(validated, named("error", lambda ensemble, x, y: jnp.abs(ensemble(x) - y)))
    fails(validated, lambda ensemble, x, y: {f"error_{len(x)}": errors(ensemble, x, y)})
    assert "validation_error" in validated(named("error", errors))
    assert "validation_error" in validated(named("error", lambda *args: errors(*args).mean()))
