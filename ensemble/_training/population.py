"""Steps of a population: some members are taken, copied, perturbed, combined or averaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ...transforms._core.arguments import check_count, describe, is_real
from ...transforms._core.compat import Tracer
from ...transforms._core.prng import check_key
from .._members.ensemble import Ensemble
from .._members.rows import by_row, take, where_rows
from .._members.sharding import Layout
from .._scoring.classification import nll
from .._step.member_status import with_other_keys
from .._step.state import TrainState, check_state

Members = TypeVar("Members", Ensemble, TrainState)


def select(members: Members, indices: ArrayLike) -> Members:
    """An ensemble or a training state of some of the members.

    Args:
      members: an `Ensemble` or a `TrainState`.
      indices: which members, as integers (count,), in the order in which they shall stand. One may be taken several
        times: then each has what it has, its random keys too.

    Returns:
      The same with `count` members.

    Raises:
      TypeError: `members` is neither, or `indices` are no integers.
      ValueError: `indices` have another shape, or are none.
      IndexError: an index that is not traced is no member's.

    Examples:
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, select
      >>> select(Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 5, seed=0), [3, 1])
      Ensemble of 2 × Linear, 15 parameters each
    """
    if not isinstance(members, (Ensemble, TrainState)):
        raise TypeError(f"select: needs an Ensemble or a TrainState, but got {type(members).__name__}.")
    made: Any = _select(members, indices)
    return made


def k_best(scores: ArrayLike, k: int, *, mode: str = "min") -> jax.Array:
    """The indices of the k best scores, the best first.

    Args:
      scores: one number for each member, (size,). What is not finite is worst.
      k: how many.
      mode: "min" where smaller scores are better, "max" where larger ones are.

    Returns:
      int32 (k,); of equal scores the one that stands first is better.

    Raises:
      TypeError: `scores` are no real numbers, or `k` is no int.
      ValueError: another shape, `k` not from 1 to the number of scores, an unknown mode.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble import k_best
      >>> k_best(jnp.array([0.3, jnp.nan, 0.1, 0.2]), 2)
      Array([2, 3], dtype=int32)
    """
    ranked = _ranked("k_best", scores, mode)
    check_count("k_best", "k", k)
    if k > len(ranked):
        raise ValueError(f"k_best: k must be at most {len(ranked)}, as many as there are scores, but got {k}.")
    return ranked[:k]


def exploit(
    state: TrainState,
    scores: ArrayLike,
    *,
    key: jax.Array,
    fraction: float = 0.25,
    perturb: Mapping[str, tuple[float, ...]] | None = None,
    mode: str = "min",
) -> tuple[TrainState, jax.Array]:
    """Replace the worst members by copies of the best, with other hyperparameters: population based training.

    Each of the worst becomes a copy of one of the best, drawn at random: its parameters, its optimiser's state, its
    hyperparameters and its standing, but with random keys of its own. Then each hyperparameter in `perturb` is
    multiplied by one of the factors, drawn at random.

    Args:
      state: of a `Trainer`.
      scores: one number for each member, (size,). What is not finite is worst.
      key: for what is drawn.
      fraction: of the members that are replaced, above 0 and at most 0.5; at least one is.
      perturb: factors by the name of a hyperparameter that each member has one of.
      mode: "min" where smaller scores are better, "max" where larger ones are.

    Returns:
      The state, and for each member the index of the one that it continues, int32 (size,).

    Raises:
      TypeError: `state` is no `TrainState`, `scores` are no real numbers, `key` is no key, factors are no numbers.
      ValueError: another shape of `scores`, a `fraction` out of range, fewer than two members; members do not have a
        hyperparameter of that name, or it is a schedule.

    Source:
      Jaderberg et al. 2017, "Population Based Training of Neural Networks".

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, Trainer, exploit
      >>> rates = {"learning_rate": [0.1, 0.2]}
      >>> trainer = Trainer(lambda model, x: jnp.mean(model(x) ** 2), optax.sgd, hyperparams=rates)
      >>> state = trainer.init(Ensemble.create(lambda rngs: nnx.Linear(3, 1, rngs=rngs), 2, seed=0))
      >>> factors = {"learning_rate": (0.8, 1.25)}
      >>> state, source = exploit(state, jnp.array([0.3, 0.7]), key=jax.random.key(0), perturb=factors)
      >>> source  # both go on with what member 0 was
      Array([0, 0], dtype=int32)
    """
    check_state("exploit", state)
    structure, size = state._structure_and_size()
    check_key("exploit", key)
    if jnp.shape(scores) != (size,):
        raise ValueError(f"exploit: scores must have shape ({size},), but got {jnp.shape(scores)}.")
    if not is_real(fraction) or not 0 < fraction <= 0.5:
        raise ValueError(f"exploit: fraction must be above 0 and at most 0.5, but got {fraction!r}.")
    if size < 2:
        raise ValueError("exploit: a population of one has nobody to copy; give an ensemble of at least 2.")
    ranked = _ranked("exploit", scores, mode)
    count = max(1, int(float(fraction) * size))
    to_draw, to_renew, *to_perturb = jax.random.split(key, 2 + len(perturb or {}))
    best = ranked[jax.random.randint(to_draw, (count,), 0, count)]
    source = jnp.arange(size).at[ranked[size - count :]].set(best).astype(jnp.int32)
    copied = source != jnp.arange(size)
    trainable, rest, opt_state, standing = jax.tree.map(lambda x: x[source], state._arrays())
    numbers = jax.random.bits(to_renew, (size,))

    rest, opt_state = where_rows(copied, with_other_keys((rest, opt_state), numbers), (rest, opt_state))
    of_optimizer = dict(getattr(opt_state, "hyperparams", {}))
    of_loss = dict(standing.hyperparams)
    for name, own in zip(perturb or {}, to_perturb, strict=True):
        factors = _checked_factors(name, (perturb or {})[name], {**of_optimizer, **of_loss}, standing.schedules)
        values = of_loss if name in of_loss else of_optimizer
        if not jnp.issubdtype(values[name].dtype, jnp.inexact):
            raise TypeError(
                f"exploit: the hyperparameter {name!r} has integers, of which a factor makes none; give the Trainer "
                "numbers of floating point."
            )
        factor = jax.random.choice(own, factors.astype(values[name].dtype), (size,))
        values[name] = jnp.where(copied, values[name] * factor, values[name])
    if of_optimizer:
        opt_state = opt_state._replace(hyperparams=of_optimizer)
    arrays = trainable, rest, opt_state, standing._replace(hyperparams=of_loss)
    layout = None if state._is_traced() else Layout.around(state._rows())
    if layout is not None:
        arrays = layout.place(arrays, size)
    return TrainState._of_padded(structure, arrays, size, state.step), source


class Selection(NamedTuple):
    """Members that were chosen one after another.

    Attributes:
      indices: which, in the order in which they were chosen, int32 (rounds,). One may be chosen several times.
      scores: that of the mean of those chosen so far, (rounds,).

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble import greedy_selection
      >>> chosen = greedy_selection(jnp.array([[[0.9, 0.1]], [[0.4, 0.6]]]), jnp.array([0]), rounds=2)
      >>> chosen.indices, jnp.bincount(chosen.indices, length=2)  # which, and how often each
      (Array([0, 0], dtype=int32), Array([2, 0], dtype=int32))
    """

    indices: jax.Array
    scores: jax.Array


def greedy_selection(
    predictions: jax.Array,
    targets: jax.Array,
    *,
    rounds: int,
    score: Callable[[jax.Array, jax.Array], jax.Array] = nll,
) -> Selection:
    """Choose members, one after another and with replacement, whose mean prediction scores best.

    Args:
      predictions: on data that were not trained on, with the members along axis 0, such as `Prediction.members`.
      targets: what `score` takes as its second argument, such as labels.
      rounds: how many are chosen.
      score: of a mean prediction and the targets, a number that is better where it is smaller; a pure function.

    Returns:
      A `Selection`. Take as many of its indices as have the best score: with `select`, or as weights (`jnp.bincount`).

    Raises:
      TypeError: `score` is not callable, `rounds` is no int.
      ValueError: `predictions` have no members, `rounds` is below 1, a score is no scalar.

    Cost:
      Each round scores as many predictions as there are members, one after another.

    Source:
      Caruana et al. 2004, "Ensemble Selection from Libraries of Models".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble import greedy_selection
      >>> p = jnp.array([[[0.9, 0.1], [0.6, 0.4]], [[0.4, 0.6], [0.1, 0.9]], [[0.5, 0.5], [0.5, 0.5]]])
      >>> greedy_selection(p, jnp.array([0, 1]), rounds=2).indices
      Array([0, 1], dtype=int32)
    """
    if not callable(score):
        raise TypeError(f"greedy_selection: score must be a function, but got {describe(score)}.")
    predictions = jnp.asarray(predictions)
    if predictions.ndim < 1 or not predictions.shape[0]:
        raise ValueError(
            f"greedy_selection: predictions must have the members along axis 0, but got {describe(predictions)}."
        )
    check_count("greedy_selection", "rounds", rounds)
    known = not isinstance(predictions, Tracer) and not isinstance(jnp.zeros(()), Tracer)
    if known:
        score(predictions[0], targets)  # refuses what is no prediction, which it cannot in a program
    predictions = predictions.astype(jnp.promote_types(predictions.dtype, jnp.float32))
    scored = jax.eval_shape(score, jax.ShapeDtypeStruct(predictions.shape[1:], predictions.dtype), targets)
    if getattr(scored, "shape", None) != ():
        raise ValueError(
            f"greedy_selection: score must give one number for a mean prediction, but it gives {describe(scored)}."
        )

    def choose(total: jax.Array, i: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        scores = lax.map(lambda p: score((total + p) / (i + 1).astype(predictions.dtype), targets), predictions)
        best = jnp.argmin(jnp.where(jnp.isnan(scores), jnp.inf, scores)).astype(jnp.int32)
        return total + predictions[best], (best, scores[best])

    _, (indices, scores) = lax.scan(choose, jnp.zeros_like(predictions[0]), jnp.arange(rounds))
    if known and not np.isfinite(np.asarray(scores[0])):
        raise ValueError("greedy_selection: no member has a finite score; look at score(predictions[i], targets).")
    return Selection(indices, scores)


def soup(ensemble: Ensemble, weights: ArrayLike | None = None) -> Any:
    """One model whose parameters are the mean of the members'.

    Args:
      ensemble: members near each other, such as those fine-tuned from one model: the mean of models trained from
        different starts is no good model.
      weights: not negative, (size,); they are divided by their sum. None weighs all alike.

    Returns:
      A standalone model: the weighted mean of every array of floating point (BatchNorm statistics too, for which new
      ones from data are better); anything else is that of the first member.

    Raises:
      TypeError: not an `Ensemble`, or weights that are no real numbers.
      ValueError: weights of another shape, negative, not finite, or all zero, where they are known.

    Source:
      Wortsman et al. 2022, "Model soups: averaging weights of multiple fine-tuned models".

    Examples:
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, soup
      >>> type(soup(Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 5, seed=0))).__name__
      'Linear'
    """
    if not isinstance(ensemble, Ensemble):
        raise TypeError(f"soup: needs an Ensemble, but got {type(ensemble).__name__}.")
    size = len(ensemble)
    weights = jnp.ones(size) if weights is None else jnp.asarray(weights)
    _check_real("soup", "weights", weights)
    if weights.shape != (size,):
        raise ValueError(f"soup: weights must have shape ({size},), but got {weights.shape}.")
    if not isinstance(weights, Tracer):
        known = np.asarray(weights)
        if not (np.isfinite(known).all() and (known >= 0).all() and known.sum() > 0):
            raise ValueError(f"soup: weights must be finite and not negative, and one above 0, but got {known}.")
    weights = weights.astype(jnp.promote_types(weights.dtype, jnp.float32))
    shares = weights / weights.sum()

    def mean(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x[0]
        # A member without weight may hold what is not finite.
        own = by_row(shares, x)
        total = jnp.where(own > 0, x * own.astype(jnp.promote_types(x.dtype, jnp.float32)), 0).sum(axis=0)
        return total.astype(x.dtype)

    return jax.tree.map(mean, ensemble).__plurax_member__()


def _select(members: Any, given: Any) -> Any:
    size = len(members) if isinstance(members, Ensemble) else members._structure_and_size()[1]
    indices = _checked_indices(given, size)
    if isinstance(members, Ensemble):
        return jax.tree.map(lambda x: x[indices], members) if isinstance(indices, Tracer) else _taken(members, indices)
    structure, _ = members._structure_and_size()
    if isinstance(indices, Tracer):
        arrays = jax.tree.map(lambda x: x[indices], members._arrays())
    else:
        arrays = take(members._rows(), np.asarray(indices))
    return TrainState._of_padded(structure, arrays, indices.shape[0], members.step)


def _taken(ensemble: Ensemble, indices: Any) -> Ensemble:
    rows = (ensemble.trainable, ensemble.rest)
    layout = Layout.around(rows)
    if layout is not None and layout.padded(len(indices)) != len(indices):
        raise ValueError(
            f"select: {len(indices)} members do not divide over the {layout.devices} devices of the ensemble; select "
            "of a TrainState pads them."
        )
    return Ensemble(ensemble.structure, *take(rows, np.asarray(indices)))


def _checked_indices(indices: Any, size: int) -> Any:
    indices = indices if isinstance(indices, jax.Array) else np.asarray(indices)
    if not indices.size:
        raise ValueError("select: indices are none; an ensemble has at least one member.")
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"select: indices must be integers, but got {describe(indices)}.")
    if indices.ndim != 1:
        raise ValueError(f"select: indices must have shape (count,), but got {indices.shape}.")
    if isinstance(indices, Tracer):
        return indices
    known = np.asarray(indices)
    wrong = [i for i in known.tolist() if not -size <= i < size]  # as Python's integers, which do not overflow
    if wrong:
        raise IndexError(f"select: member {wrong[0]} is out of range for an ensemble of {size}.")
    return known.astype(int) % size


def _check_real(api: str, name: str, x: Any) -> None:
    if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
        raise TypeError(f"{api}: {name} must be real numbers, but got {describe(x)}.")


def _ranked(api: str, scores: Any, mode: str) -> jax.Array:
    """The indices from the best to the worst."""
    scores = jnp.asarray(scores)
    _check_real(api, "scores", scores)
    if scores.ndim != 1 or not scores.size:
        raise ValueError(f"{api}: scores must have shape (size,), but got {scores.shape}.")
    if mode not in ("min", "max"):
        raise ValueError(f'{api}: mode must be "min" or "max", but got {mode!r}.')
    finite = jnp.isfinite(scores)
    if mode == "max":  # what turns the order round, of integers without an overflow
        scores = ~scores if jnp.issubdtype(scores.dtype, jnp.integer) else -scores
    return jnp.lexsort((jnp.where(finite, scores, 0), ~finite)).astype(jnp.int32)


def _checked_factors(name: str, factors: Any, values: Mapping[str, Any], schedules: Mapping[str, Any]) -> jax.Array:
    if name in schedules:
        raise ValueError(f"exploit: the hyperparameter {name!r} is a schedule, which is not perturbed; leave it out.")
    if name not in values:
        known = f"has {', '.join(map(repr, values))}" if values else "has none"
        raise ValueError(
            f"exploit: members have no hyperparameter {name!r} of their own (each {known}); give the Trainer a list of "
            "its values."
        )
    found = np.asarray(factors)
    if found.ndim != 1 or not found.size or found.dtype.kind not in "fiu":
        raise TypeError(f"exploit: perturb[{name!r}] must be a tuple of numbers, but got {factors!r}.")
    return jnp.asarray(found)
