"""Averages of weights along a run: means (SWA, exponential), Gaussians around them (SWAG), and snapshots, as ensembles.

`collect` wraps an optimizer, whose state then holds the running means of each member. So they are in checkpoints, an
interrupted run goes on exactly, and every strategy and mesh works as without them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..transforms._core.arguments import check_count, check_number, describe
from ..transforms._core.prng import check_key
from ..transforms._runs.optimizer import as_transform
from ._members.ensemble import Ensemble
from ._step.state import TrainState, check_state

__all__ = ["Collected", "collect", "mean", "sample", "snapshots"]


class Collected(NamedTuple):
    """The state of the optimizer that `collect` returns; with the members along axis 0 in a training state.

    Attributes:
      inner: the state of the wrapped optimizer.
      step: the number of steps, int32.
      number: how often parameters were collected, int32.
      mean: their mean, like the parameters, in float32 or wider.
      square: the mean of their squares; None without `covariance`.
      deviations: the last differences from the mean, along a new first axis; None without `covariance`.
      last: the last parameters, along a new first axis; None without `snapshots`.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from plurax.ensemble import averages
      >>> averages.collect(optax.sgd(0.1)).init(jnp.zeros(3)).number
      Array(0, dtype=int32)
    """

    inner: Any
    step: jax.Array
    number: jax.Array
    mean: Any
    square: Any
    deviations: Any
    last: Any


def collect(
    optimizer: Any,
    *,
    start: int = 0,
    every: int = 1,
    decay: float | None = None,
    covariance: bool = False,
    rank: int = 20,
    snapshots: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that also collects the parameters after some of its steps.

    Args:
      optimizer: an optax transformation. For hyperparameters per member, wrap what a factory returns:
        `lambda learning_rate: collect(optax.sgd(learning_rate))`.
      start: the first step after which parameters are collected, counted from 0.
      every: steps between two collections.
      decay: None for the plain mean (SWA); a number between 0 and 1 for an exponential one, without the bias to zero.
      covariance: whether to keep what `sample` needs: the mean of squares, and the last `rank` deviations (SWAG).
      rank: the number of deviations.
      snapshots: the number of last parameters to keep, for `snapshots`.

    Returns:
      A transformation whose updates are those of `optimizer`, and whose state is a `Collected`.

    Raises:
      TypeError: `optimizer` is not a transformation; a count is not an int.
      ValueError: a count is negative, `every` or `rank` is not positive, `decay` is not between 0 and 1, or it is given
        with `covariance`.

    Cost:
      Memory of one more copy of the parameters for the mean, of 1 + rank more with `covariance`, and of `snapshots`.

    Source:
      Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima and Better Generalization"; Maddox et al. 2019, "A
      Simple Baseline for Bayesian Uncertainty in Deep Learning"; Huang et al. 2017, "Snapshot Ensembles".

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, Trainer, averages
      >>> trainer = Trainer(lambda model, x: jnp.mean(model(x) ** 2), averages.collect(optax.sgd(0.1), start=5))
      >>> state = trainer.init(Ensemble.create(lambda rngs: nnx.Linear(3, 1, rngs=rngs), 2, seed=0))
      >>> state, history = trainer.fit(state, [jnp.ones((4, 3))] * 10, progress=False)
      >>> averages.mean(state)
      Ensemble of 2 × Linear, 4 parameters each
    """
    inner = as_transform(optimizer)
    if inner is None:
        expected = "an optax transformation, such as optax.adam(1e-3)"
        raise TypeError(f"averages.collect: optimizer must be {expected}, but got {describe(optimizer)}.")
    check_count("averages.collect", "start", start, 0)
    check_count("averages.collect", "every", every)
    check_count("averages.collect", "rank", rank)
    check_count("averages.collect", "snapshots", snapshots, 0)
    if decay is not None:
        check_number("averages.collect", "decay", decay, lambda x: 0 < x < 1, "between 0 and 1")
        if covariance:
            raise ValueError("averages.collect: covariance is that of a plain mean; leave decay out.")
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> Collected:
        zeros = _wide(jax.tree.map(jnp.zeros_like, params))
        return Collected(
            inner.init(params),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), jnp.int32),
            zeros,
            zeros if covariance else None,
            _rows(rank, zeros) if covariance else None,
            _rows(snapshots, params) if snapshots else None,
        )

    def update(updates: Any, state: Collected, params: Any = None, **extra: Any) -> tuple[Any, Collected]:
        updates, inside = inner.update(updates, state.inner, params, **extra)
        now = optax.apply_updates(params, updates)
        takes, count = (state.step >= start) & ((state.step - start) % every == 0), state.number

        def moved(mean: jax.Array, x: jax.Array) -> jax.Array:
            times = (count + 1).astype(mean.dtype)
            # With decay, the weights of n terms have the sum 1 - decay^n, by which the mean is divided as it goes.
            part = 1 / times if decay is None else (1 - decay) / (1 - decay**times)
            return jnp.where(takes, mean + part * (x - mean), mean)

        def put(rows: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.where(takes, rows.at[count % len(rows)].set(x.astype(rows.dtype)), rows)

        wide = _wide(now)
        mean = jax.tree.map(moved, state.mean, wide)
        square, deviations, last = state.square, state.deviations, state.last
        if covariance:
            square = jax.tree.map(moved, square, jax.tree.map(jnp.square, wide))
            deviations = jax.tree.map(put, deviations, jax.tree.map(jnp.subtract, wide, mean))
        if snapshots:
            last = jax.tree.map(put, last, now)
        return updates, Collected(inside, state.step + 1, count + takes, mean, square, deviations, last)

    return optax.GradientTransformationExtraArgs(init, update)


def mean(state: TrainState[Any]) -> Ensemble[Any]:
    """Return the members with the mean of the parameters that `collect` has collected.

    Batch norms keep their statistics, which fit the last parameters; call the ensemble in training mode on some batches
    to estimate them again.

    Args:
      state: a state of a trainer whose optimizer `collect` returned.

    Returns:
      An ensemble of the same members, with these parameters in their dtypes.

    Raises:
      TypeError: `state` is not a `TrainState`.
      ValueError: its optimizer does not collect, or has not yet.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from plurax.ensemble import Ensemble, Trainer, averages
      >>> trainer = Trainer(lambda model, x: (model(x) ** 2).sum(), averages.collect(optax.sgd(0.5)))
      >>> state = trainer.init(Ensemble.from_apply(lambda w, x: w * x, [jnp.array(1.0)]))
      >>> for _ in range(2):
      ...     state, _ = trainer.step(state, jnp.array([0.5]))
      >>> print(state.ensemble.trainable, averages.mean(state).trainable)  # of 0.75 and 0.5625
      [0.5625] [0.65625]
    """
    found = _found("averages.mean", state)
    return _with("averages.mean", state, found.mean)


def sample(state: TrainState[Any], key: jax.Array, n: int) -> Ensemble[Any]:
    """Draw members from the normal distribution around the mean of each member (SWAG).

    Its covariance is half the diagonal one of the collected parameters, and half that of the last deviations.

    Args:
      state: as for `mean`, with `covariance=True`.
      key: a random key.
      n: the number of draws of each member.

    Returns:
      An ensemble of n times as many members: the draws of member 0 first.

    Raises:
      TypeError, ValueError: as for `mean`; a key that is none; no positive number of draws; no covariance; fewer than
        two collections; parameters that members share.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, Trainer, averages
      >>> swag = averages.collect(optax.sgd(0.1), covariance=True, rank=3)
      >>> trainer = Trainer(lambda model, x: jnp.mean(model(x) ** 2), swag)
      >>> state = trainer.init(Ensemble.create(lambda rngs: nnx.Linear(3, 1, rngs=rngs), 2, seed=0))
      >>> state, history = trainer.fit(state, [jnp.ones((4, 3))] * 10, progress=False)
      >>> averages.sample(state, jax.random.key(0), 5)
      Ensemble of 10 × Linear, 4 parameters each
    """
    api = "averages.sample"
    found = _found(api, state)
    check_key(api, key)
    check_count(api, "n", n)
    if found.square is None:
        raise ValueError(f"{api}: the optimizer keeps no covariance; pass covariance=True to averages.collect.")
    if int(found.number.min()) < 2:
        raise ValueError(f"{api}: a covariance needs two collections, but there was one; train on.")

    def drawn(own: Collected, key: jax.Array) -> Any:
        rank = len(jax.tree.leaves(own.deviations)[0])
        used = jnp.minimum(own.number, rank)
        to_rank, *keys = jax.random.split(key, 1 + len(jax.tree.leaves(own.mean)))
        along = jax.random.normal(to_rank, (rank,)) * (jnp.arange(rank) < used)

        def of_leaf(mean: jax.Array, square: jax.Array, deviations: jax.Array, key: jax.Array) -> jax.Array:
            deviation = jnp.sqrt(jnp.maximum(square - jnp.square(mean), 0) / 2)
            low = jnp.tensordot(along.astype(mean.dtype), deviations, 1) / jnp.sqrt(2 * jnp.maximum(used - 1, 1))
            return mean + deviation * jax.random.normal(key, mean.shape, mean.dtype) + low.astype(mean.dtype)

        own_keys = jax.tree.unflatten(jax.tree.structure(own.mean), keys)
        return jax.tree.map(of_leaf, own.mean, own.square, own.deviations, own_keys)

    size = len(state.ensemble)
    keys = jax.random.split(key, (size, n))
    rows = jax.jit(jax.vmap(jax.vmap(drawn, (None, 0))))(found._replace(inner=(), last=None), keys)
    return _with(api, state, jax.tree.map(lambda x: x.reshape(size * n, *x.shape[2:]), rows), n)


def snapshots(state: TrainState[Any]) -> Ensemble[Any]:
    """Return the last parameters that were collected, as one ensemble.

    Args:
      state: as for `mean`, with `snapshots=`.

    Returns:
      An ensemble of as many members for each member as were kept: those of member 0 first, from the oldest to the last.

    Raises:
      TypeError, ValueError: as for `mean`; no snapshots; parameters that members share.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, Trainer, averages
      >>> trainer = Trainer(lambda model, x: jnp.mean(model(x) ** 2), averages.collect(optax.sgd(0.1), snapshots=3))
      >>> state = trainer.init(Ensemble.create(lambda rngs: nnx.Linear(3, 1, rngs=rngs), 2, seed=0))
      >>> state, history = trainer.fit(state, [jnp.ones((4, 3))] * 10, progress=False)
      >>> averages.snapshots(state)
      Ensemble of 6 × Linear, 4 parameters each
    """
    api = "averages.snapshots"
    found = _found(api, state)
    if found.last is None:
        raise ValueError(f"{api}: the optimizer keeps no snapshots; pass snapshots= to averages.collect.")
    most = jax.tree.leaves(found.last)[0].shape[1]
    kept = min(int(found.number.min()), most)

    def in_order(rows: Any, count: jax.Array) -> Any:
        return jax.tree.map(lambda x: x[(count - kept + jnp.arange(kept)) % most], rows)

    rows = jax.jit(jax.vmap(in_order))(found.last, found.number)
    return _with(api, state, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows), kept)


def _found(api: str, state: Any) -> Collected:
    """Return what the optimizer of a training state has collected; raise if it has nothing."""
    check_state(api, state)
    leaves = jax.tree.leaves(state.opt_state, is_leaf=lambda x: isinstance(x, Collected))
    found = [x for x in leaves if isinstance(x, Collected)]
    if len(found) != 1:
        raise ValueError(f"{api}: the trainer's optimizer must be one that averages.collect returned.")
    if int(found[0].number.min()) < 1:
        raise ValueError(f"{api}: nothing was collected yet; train on, or let averages.collect start earlier.")
    return found[0]


def _with(api: str, state: TrainState[Any], trainable: Any, times: int = 1) -> Ensemble[Any]:
    """Return an ensemble with these parameters, and the other arrays of each member repeated."""
    ensemble = state.ensemble
    if state._shared is not None and state._shared.trains:
        raise ValueError(f"{api}: members share parameters that train, which it does not average.")
    trainable = jax.tree.map(
        lambda new, old: new.astype(old.dtype), trainable, jax.tree.map(lambda x: x[:1], ensemble.trainable)
    )
    rest = jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), state._arrays()[1])
    return ensemble._of_rows(trainable, rest)


def _rows(count: int, like: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), like)


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)
