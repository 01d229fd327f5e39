"""Averages of weights along a run: means (SWA, exponential), Gaussians around them (SWAG), and snapshots, as ensembles.

`update_statistics` computes the statistics of batch norms for such weights.

`collect` wraps an optimizer, whose state then holds the running means of each member. So they are in checkpoints, an
interrupted run goes on exactly, and every strategy and mesh works as without them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..transforms._core.arguments import check_count, check_number, describe
from ..transforms._core.prng import check_key
from ..transforms._models.split_model import dotted, is_module
from ..transforms._runs.optimizer import as_transform
from ._members.ensemble import Ensemble
from ._members.shared import divided, joined
from ._step.state import TrainState, check_state
from ._training._data.batches import Batches
from ._training.trainer import Trainer

__all__ = ["Collected", "collect", "mean", "sample", "snapshots", "update_statistics"]


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

    Batch norms keep their statistics, which fit the last parameters; `update_statistics` computes them again.

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


def update_statistics(ensemble: Ensemble[Any], batches: Iterable[Any], *, in_axes: int | None = None) -> Ensemble[Any]:
    """Return a copy whose batch norms have the statistics of some batches, as for the parameters of `mean`.

    The statistics start anew, and become the mean over the batches, weighted by their examples, of the mean and the
    variance of each batch. Each `nnx.BatchNorm` normalizes by the batch, as in training; dropout is on unless the
    ensemble is a view with `deterministic=True`. No other array changes.

    Args:
      ensemble: an ensemble of NNX modules. Without batch statistics it is returned as it is.
      batches: inputs, a pytree of arrays (batch, ...) each; or tuples, of which the first element is the input. Of
        `Batches` that never end, one epoch is used.
      in_axes: None gives all members the same batches; 0 gives member i slice i, of arrays (members, batch, ...).

    Returns:
      An ensemble of the same members.

    Raises:
      TypeError: `ensemble` is not an `Ensemble` of NNX modules.
      ValueError: there are no examples; members share batch statistics; another class than `nnx.BatchNorm` has some;
        `in_axes` is neither None nor 0; and as for `Trainer.step`.

    Cost:
      A forward pass of all members for each batch.

    Source:
      `torch.optim.swa_utils.update_bn`, which weights all batches alike; Izmailov et al. 2018, as for `collect`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, averages
      >>> ens = Ensemble.create(lambda rngs: nnx.BatchNorm(1, rngs=rngs), 2, seed=0)
      >>> batches = [jnp.array([[1.0], [3.0]]), jnp.array([[8.0]])]
      >>> averages.update_statistics(ens, batches)[0].mean[...]  # (2 × 2 + 1 × 8) / 3
      Array([4.], dtype=float32)
    """
    from flax import nnx

    api = "averages.update_statistics"
    if not isinstance(ensemble, Ensemble):
        raise TypeError(f"{api}: ensemble must be an Ensemble, but got {describe(ensemble)}.")
    if in_axes not in (None, 0) or isinstance(in_axes, bool):
        raise ValueError(f"{api}: in_axes must be None or 0, but got {in_axes!r}.")
    model: Any = ensemble.__plurax_member__()  # a copy, which may change
    if not is_module(model):
        cure = "take steps of a Trainer with optax.set_to_zero(), whose loss calls model.call_and_update"
        raise TypeError(f"{api}: the members are not NNX modules; for variables of Linen {cure}.")
    norms = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.BatchNorm)]
    known = {id(x) for norm in norms for x in (norm.mean, norm.var)}
    statistics = nnx.to_flat_state(nnx.state(model, nnx.BatchStat))
    if not statistics:
        return ensemble
    for path, x in statistics:
        if id(x) not in known:
            raise ValueError(f"{api}: `{dotted(path)}` belongs to no nnx.BatchNorm, so how it is updated is not known.")
    paths = [path for path, _ in statistics]
    if common := [path for path in paths if ensemble.shared is not None and path in ensemble.shared.paths]:
        raise ValueError(f"{api}: members share `{dotted(common[0])}`; leave statistics out of shared=.")
    for norm in norms:  # so that a call leaves the statistics of its batch alone
        norm.momentum, norm.use_running_average = 0.0, False
    started = ensemble.__plurax_stack__(model)
    own, before = divided(started.rest, paths)  # which may not be finite, and zero times infinity is no number
    started = started._with(started.trainable, joined(own, jax.tree.map(jnp.zeros_like, before)), started.shared)
    # No gradient is needed for updates of zero, so the compiled step is a forward pass.
    trainer = Trainer(lambda model, x: (model(x), jnp.zeros(()))[1], optax.set_to_zero(), in_axes=in_axes)
    state, total, means = trainer.init(started), 0, dict[Any, Any]()
    if isinstance(batches, Batches) and batches._epochs is None:
        batches = islice(batches, batches.per_epoch)
    for batch in batches:
        x = batch[0] if isinstance(batch, (tuple, list)) else batch
        state, _ = trainer.step(state, (x,))
        count = jax.tree.leaves(x)[0].shape[0 if in_axes is None else 1]
        total += count
        part = count / max(1, total)
        found = divided(state.ensemble.rest, paths)[1]
        means = jax.tree.map(lambda mean, x, part=part: mean + part * (x - mean), means, found) if means else found
    if not total:
        raise ValueError(f"{api}: batches has no examples; pass at least one batch (an iterator may be used up).")
    rest = joined(divided(ensemble.rest, paths)[0], means)
    return ensemble._with(ensemble.trainable, rest, ensemble.shared)


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
