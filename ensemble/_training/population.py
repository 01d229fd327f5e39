"""Operations on populations: select, copy, perturb, combine and average members."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ...transforms._core.arguments import check_callable, check_choice, check_count, check_number, describe
from ...transforms._core.compat import Tracer
from ...transforms._core.prng import check_key
from .._members.ensemble import Ensemble, M
from .._members.rows import by_row, select_rows, where_rows
from .._members.sharding import Layout, one_copy, within
from .._scoring.classification import nll
from .._step.member_status import with_other_keys
from .._step.state import TrainState, check_state

Mode = Literal["min", "max"]
Members = TypeVar("Members", bound=Ensemble[Any] | TrainState[Any])


def select(members: Members, indices: ArrayLike | Sequence[int]) -> Members:
    """Return an ensemble or a training state with only the selected members.

    Args:
      members: an `Ensemble` or a `TrainState`.
      indices: the indices of the members, integers (count,), in the order of the result. Negative ones count from the
        end. An index may be repeated; the copies are then equal, including their random keys. Or a mask, bool (size,),
        that is True for the members to select.

    Returns:
      An object of the same type, with `count` members.

    Raises:
      TypeError: `members` is neither an `Ensemble` nor a `TrainState`; `indices` are neither integers nor booleans, or
        a mixture of both; a mask is traced.
      ValueError: `indices` have another number of axes, or select no member.
      IndexError: an index that is not traced is out of range; a mask does not have one entry for each member.

    Examples:
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, select
      >>> select(Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 5, seed=0), [3, 1])
      Ensemble of 2 × Linear, 15 parameters each
    """
    if isinstance(members, TrainState):
        best = members.ensemble.trainable, members.ensemble.rest
        rows = members._arrays(), None if members.last is None else (best, members.last)
        arrays, beside = select_rows("select", rows, indices, len(members.ensemble))
        chosen: Any = members._with_rows(arrays)
        chosen = chosen if beside is None else chosen._with_best(*beside)
    elif isinstance(members, Ensemble):
        arrays = select_rows("select", (members.trainable, members.rest), indices, len(members))
        chosen = members._of_rows(*arrays)
    else:
        raise TypeError(f"select: needs an Ensemble or a TrainState, but got {type(members).__name__}.")
    return chosen


def k_best(scores: ArrayLike, k: int, *, mode: Mode = "min") -> jax.Array:
    """Return the indices of the k best scores, the best first.

    Args:
      scores: one number for each member, (size,). Non-finite scores rank last.
      k: the number of indices.
      mode: "min" if smaller scores are better, "max" if larger ones are.

    Returns:
      int32 (k,); equal scores are ranked by index.

    Raises:
      TypeError: `scores` are not real numbers, or `k` is not an int.
      ValueError: `scores` have another shape or are empty; `k` is not in 1 to the number of scores; `mode` is unknown.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble import k_best
      >>> k_best(jnp.array([0.3, jnp.nan, 0.1, 0.2]), 2)
      Array([2, 3], dtype=int32)
    """
    ranked = _ranked("k_best", scores, mode)
    check_count("k_best", "k", k)
    if k > len(ranked):
        raise ValueError(f"k_best: k must be at most {len(ranked)}, the number of scores, but got {k}.")
    return ranked[:k]


def exploit(
    state: TrainState[M],
    scores: ArrayLike,
    *,
    key: jax.Array,
    fraction: float = 0.25,
    perturb: Mapping[str, tuple[float, ...]] | None = None,
    mode: Mode = "min",
) -> tuple[TrainState[M], jax.Array]:
    """Replace the worst members with perturbed copies of the best: one step of population based training.

    Each of the worst members becomes a copy of a randomly chosen member among the best: its parameters, optimizer
    state, hyperparameters and status, but with new random keys. Then each hyperparameter in `perturb` of the copy is
    multiplied by a randomly chosen factor.

    Args:
      state: a state from `Trainer.init`, `step` or `fit`.
      scores: one number for each member, (size,). Non-finite scores rank last.
      key: the key of all random choices.
      fraction: the fraction of the members to replace, and of the best to copy from; above 0 and at most 0.5. At least
        one member is replaced.
      perturb: the factors for each hyperparameter to perturb, by name; each member must have its own value of it.
      mode: "min" if smaller scores are better, "max" if larger ones are.

    Returns:
      The new state, and for each member the index of the member that it is a copy of (its own if it was not replaced),
      int32 (size,).

    Raises:
      TypeError: `state` is not a `TrainState`; `scores` are not real numbers; `key` is not a key; factors are not
        numbers; a hyperparameter to perturb has integer values.
      ValueError: `scores` have another shape; `fraction` is out of range; `mode` is unknown; there are fewer than two
        members; a hyperparameter to perturb does not exist, has no values per member, or is a schedule.

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
      >>> source  # both members now continue from member 0
      Array([0, 0], dtype=int32)
    """
    check_state("exploit", state)
    size = state._size
    check_key("exploit", key)
    if jnp.shape(scores) != (size,):
        raise ValueError(f"exploit: scores must have shape ({size},), but got {jnp.shape(scores)}.")
    fraction = check_number("exploit", "fraction", fraction, lambda x: 0 < x <= 0.5, "above 0 and at most 0.5")
    if size < 2:
        raise ValueError("exploit: a population of one has no other member to copy; give an ensemble of at least 2.")
    ranked = _ranked("exploit", scores, mode)
    count = max(1, int(fraction * size))
    to_draw, to_renew, *to_perturb = jax.random.split(key, 2 + len(perturb or {}))
    best = ranked[jax.random.randint(to_draw, (count,), 0, count)]
    source = jnp.arange(size).at[ranked[size - count :]].set(best).astype(jnp.int32)
    # All other members are their own source. The best and the worst do not overlap, since the fraction is at most 0.5.
    copied = source != jnp.arange(size)
    trainable, rest, opt_state, standing = jax.tree.map(lambda x: x[source], state._arrays())
    numbers = jax.random.bits(to_renew, (size,))

    # New keys, since otherwise a copy would draw the same dropout masks as its source.
    rest, opt_state = where_rows(copied, with_other_keys((rest, opt_state), numbers), (rest, opt_state))
    of_optimizer = dict(getattr(opt_state, "hyperparams", {}))
    of_loss = dict(standing.hyperparams)
    for (name, given), own in zip((perturb or {}).items(), to_perturb, strict=True):
        factors = _checked_factors(name, given, {**of_optimizer, **of_loss}, standing.schedules)
        values = of_loss if name in of_loss else of_optimizer
        if not jnp.issubdtype(values[name].dtype, jnp.inexact):
            raise TypeError(f"exploit: {name!r} has integer values, which cannot be scaled; give the Trainer floats.")
        factor = jax.random.choice(own, factors.astype(values[name].dtype), (size,))
        values[name] = jnp.where(copied, values[name] * factor, values[name])
    if of_optimizer:
        opt_state = opt_state._replace(hyperparams=of_optimizer)
    arrays = trainable, rest, opt_state, standing._replace(hyperparams=of_loss)
    # `x[source]` may have gathered the members on one device.
    layout = Layout.around(state.ensemble)
    if layout is not None:
        arrays = layout.place(arrays)
    return state._with_rows(arrays), source


class Selection(NamedTuple):
    """Members that `greedy_selection` chose, one in each round.

    Attributes:
      indices: the indices of the members, in the order of selection, int32 (rounds,). An index may be repeated.
      scores: the score of the mean prediction of the members chosen so far, (rounds,).

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble import greedy_selection
      >>> chosen = greedy_selection(jnp.array([[[0.9, 0.1]], [[0.4, 0.6]]]), jnp.array([0]), rounds=2)
      >>> chosen.indices, jnp.bincount(chosen.indices, length=2)  # the members, and how often each was chosen
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
    """Choose members greedily, with replacement, so that their mean prediction has the best score.

    Each round adds the member that improves the score of the mean prediction most (or worsens it least).

    Args:
      predictions: the predictions of all members on held-out data, with the members along axis 0, such as
        `Prediction.members`.
      targets: the second argument of `score`, such as labels.
      rounds: the number of rounds; each chooses one member.
      score: a pure function `score(mean_prediction, targets)` that returns a scalar; smaller is better.

    Returns:
      A `Selection`. Use its indices up to the best score, with `select` or as weights (`jnp.bincount`).

    Raises:
      TypeError: `score` is not callable, or `rounds` is not an int.
      ValueError: `predictions` have no members; `rounds` is below 1; `score` does not return a scalar; no member has a
        finite score. In addition, the errors of `score` itself.

    Cost:
      In each round one evaluation of `score` for each member, one after another.

    Source:
      Caruana et al. 2004, "Ensemble Selection from Libraries of Models".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble import greedy_selection
      >>> p = jnp.array([[[0.9, 0.1], [0.6, 0.4]], [[0.4, 0.6], [0.1, 0.9]], [[0.5, 0.5], [0.5, 0.5]]])
      >>> greedy_selection(p, jnp.array([0, 1]), rounds=2).indices
      Array([0, 1], dtype=int32)
    """
    check_callable("greedy_selection", score, "score")
    predictions = jnp.asarray(predictions)
    if predictions.ndim < 1 or not predictions.shape[0]:
        raise ValueError(f"greedy_selection: predictions must be (members, ...), but got {describe(predictions)}.")
    check_count("greedy_selection", "rounds", rounds)
    known = not isinstance(predictions, Tracer) and not isinstance(jnp.zeros(()), Tracer)
    if known:
        score(predictions[0], targets)  # raises for invalid values, which it cannot do in the compiled loop
    predictions = predictions.astype(jnp.promote_types(predictions.dtype, jnp.float32))
    scored = jax.eval_shape(score, jax.ShapeDtypeStruct(predictions.shape[1:], jax.typeof(predictions).dtype), targets)
    if getattr(scored, "shape", None) != ():
        raise ValueError(f"greedy_selection: score must return one number, but it returns {describe(scored)}.")

    def choose(total: jax.Array, i: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        scores = lax.map(lambda p: score((total + p) / (i + 1).astype(predictions.dtype), targets), predictions)
        best = jnp.argmin(jnp.where(jnp.isnan(scores), jnp.inf, scores)).astype(jnp.int32)
        return total + predictions[best], (best, scores[best])

    _, (indices, scores) = lax.scan(choose, jnp.zeros_like(predictions[0]), jnp.arange(rounds))
    if known and not np.isfinite(np.asarray(scores[0])):
        raise ValueError("greedy_selection: no member has a finite score; check score(predictions[i], targets).")
    return Selection(indices, scores)


def soup(ensemble: Ensemble[M], weights: ArrayLike | Sequence[float] | None = None) -> M:
    """Return one model whose parameters are the average over the members.

    Args:
      ensemble: members that lie close to each other, such as models fine-tuned from one model. The average of models
        trained from different initializations is not a good model.
      weights: non-negative weights (size,), which are divided by their sum. None weights all members equally.

    Returns:
      A standalone model with the weighted mean of every floating-point array, and the other arrays of the first member.
      BatchNorm statistics are averaged too; statistics recomputed from data are better.

    Raises:
      TypeError: `ensemble` is not an `Ensemble`, or the weights are not real numbers.
      ValueError: the weights have another shape, or, unless they are traced, are negative, not finite or all zero.

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
        """Return the weighted mean of one array over the members."""
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x[0]
        # The `where` excludes members with zero weight, which may not be finite: 0 * inf is NaN. The sum is computed in
        # float32 or wider and rounded once.
        own = by_row(shares, x)
        total = jnp.where(own > 0, x * own.astype(jnp.promote_types(x.dtype, jnp.float32)), 0).sum(axis=0)
        return total.astype(x.dtype)

    home = Layout.home(ensemble)
    with within(home):
        shares = home.reach(shares) if home else shares
        trainable, rest = jax.tree.map(mean, (ensemble.trainable, ensemble.rest))
    return one_copy(ensemble._with(trainable, rest, ensemble.shared)).__plurax_member__()


def _check_real(api: str, name: str, x: Any) -> None:
    if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
        raise TypeError(f"{api}: {name} must be real numbers, but got {describe(x)}.")


def _ranked(api: str, scores: Any, mode: str) -> jax.Array:
    """Return the indices of the scores from the best to the worst."""
    scores = jnp.asarray(scores)
    _check_real(api, "scores", scores)
    if scores.ndim != 1 or not scores.size:
        raise ValueError(f"{api}: scores must have shape (size,), but got {scores.shape}.")
    check_choice(api, "mode", mode, get_args(Mode))
    finite = jnp.isfinite(scores)
    if mode == "max":  # ~x = -x - 1 reverses the order of integers, and does not overflow at the smallest
        scores = ~scores if jnp.issubdtype(scores.dtype, jnp.integer) else -scores
    # Sorted by whether the score is finite, then by the score. The sort is stable, so equal scores keep their order.
    return jnp.lexsort((jnp.where(finite, scores, 0), ~finite)).astype(jnp.int32)


def _checked_factors(name: str, factors: Any, values: Mapping[str, Any], schedules: Mapping[str, Any]) -> jax.Array:
    """Return the factors as an array; raise if they are not numbers, or the hyperparameter has no values per member."""
    if name in schedules:
        raise ValueError(f"exploit: the hyperparameter {name!r} is a schedule, which is not perturbed; leave it out.")
    if name not in values:
        known = f"has {', '.join(map(repr, values))}" if values else "has none"
        raise ValueError(f"exploit: members have no {name!r} of their own (each {known}); give the Trainer a list.")
    found = np.asarray(factors)
    if found.ndim != 1 or not found.size or found.dtype.kind not in "fiu":
        raise TypeError(f"exploit: perturb[{name!r}] must be a tuple of numbers, but got {factors!r}.")
    return jnp.asarray(found)
