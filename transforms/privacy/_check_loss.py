"""`check_loss`: whether the loss of a batch is the mean, or the sum, of the losses of its examples.

This package takes a loss apart into the losses of single examples. Its results are about the loss of a batch only if
that is their mean or sum. Losses that compare the examples of a batch with each other, or normalize by the batch,
are neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._core.arguments import (
    Argnums,
    argument_name,
    check_argnums,
    check_callable,
    count_examples,
    is_int,
    resolve_argnums,
)
from .._core.compat import Tracer
from .._core.jaxpr import aval, with_inner
from .._core.prng import is_key
from .._core.target import platform
from .._grad import scalar_seed
from .._models.evaluation import evaluating_tree
from .._models.hashable import HashablePytree
from .._models.split_model import (
    SplitModel,
    bound_model,
    merge_tree,
    refuse_shared_state,
    split_tree,
    splits_of,
    with_splits,
)

Kind = Literal["mean", "sum", "neither", "unknown"]

# The number of examples that are compared.
_MOST = 16
# By how many units of rounding losses may differ: of float32 and wider, and of half precision, where 100 would be 80 %.
_ROUNDING, _HALF_ROUNDING = 100, 8
# Why a loss with random numbers is unknown: its values differ, or its examples would draw others together than alone.
RANDOM_REASONS = ("the loss depends on random numbers", "the loss draws random numbers")
_REMEDY = "return the mean over its batch, or pass has_aux=True if it returns (loss, aux)"
# Primitives that draw random numbers.
_RANDOM = frozenset(["random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32"])


@dataclass(frozen=True)
class LossCheck:
    """What `check_loss` found.

    Attributes:
      kind: "mean" or "sum" of the losses of the examples, or "neither"; "unknown" if that cannot be told.
      from_mean: how far the loss of a batch is from the mean of the losses of its examples, in units of the mean
        absolute loss: the largest of three batches. None if it was not computed.
      from_sum: likewise from the sum, divided by the number of examples.
      examples: the number of examples that were compared.
      reason: why it is neither or unknown; otherwise empty.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import check_loss
      >>> check_loss(lambda w, x: jnp.sum((x @ w) ** 2), jnp.ones(2), jnp.ones((5, 2))).kind
      'sum'
    """

    kind: Kind
    from_mean: float | None
    from_sum: float | None
    examples: int
    reason: str = ""

    def refusal(self, api: str) -> str:
        """Return the message of an error of `api`; it contains no number computed from the data."""
        return (
            f"{api}: the loss of a batch is neither the mean nor the sum of the losses of its examples: {self.reason}. "
            "If examples are compared with each other (in-batch negatives, mined triplets), make the pair or group the "
            "example, with keep_batch_dim=False; if the loss is normalized by the batch (weights, tokens), divide by a "
            "fixed number, or take the mean of each example; or pass check_loss=False if the losses of single "
            "examples are meant."
        )


def line_of(found: LossCheck | None) -> list[str]:
    """Return a line of a report that says what was found; no line if nothing was compared."""
    if found is None:
        return []
    what = f"unknown: {found.reason}" if found.kind == "unknown" else f"the {found.kind} over its examples"
    return [f"loss of a batch: {what}"]


def check_loss(
    loss: Callable[..., Any],
    *args: Any,
    batch_argnums: Argnums = 1,
    has_aux: bool = False,
    prng_argnum: int | None = None,
    is_padding_example: Any = None,
    **kwargs: Any,
) -> LossCheck:
    """Find out whether the loss of a batch is the mean, or the sum, of the losses of its examples.

    `per_sample_grad`, `clipped_grad`, `DPSGD` and `plurax.transforms.curvature` evaluate a loss on single examples, as
    batches of one. For a loss that compares the examples of a batch with each other, or normalizes by the batch, that
    is another loss: with in-batch negatives, a batch of one has none, and its gradient is zero.

    Args:
      loss: as for `per_sample_grad`. Modules are evaluated in evaluation mode, on copies.
      *args: the arguments of a call of `loss`.
      batch_argnums: as for `per_sample_grad`.
      has_aux: whether `loss` returns `(loss, aux)`.
      prng_argnum: the position of a random key, which all examples share here.
      is_padding_example: as for `clipped_grad`: booleans (batch,); padding is not used.
      **kwargs: keyword arguments of the call, with the examples along axis 0 as for `per_sample_grad`.

    Returns:
      A `LossCheck`. Up to 16 examples are compared, drawn at random. A mean plus a regularization term, which does not
      depend on the examples, is a mean.

    Raises:
      TypeError: an argument is traced, or is not as for `per_sample_grad`; `loss` does not return a real scalar.
      ValueError: batch sizes that differ; argnums as for `per_sample_grad`.

    Cost:
      One compiled program: forward passes of the examples, one by one and together.

    Source:
      Opacus validates modules for layers that mix examples; no library checks losses.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from plurax.transforms import check_loss
      >>> x = jax.random.normal(jax.random.key(0), (8, 3))
      >>> check_loss(lambda w, x: jnp.mean((x @ w) ** 2), jnp.ones(3), x).kind
      'mean'
      >>> def contrastive(w, x):
      ...     return -jnp.mean(jnp.diag(jax.nn.log_softmax(x @ (w * x).T)))
      >>> check_loss(contrastive, jnp.ones(3), x).kind
      'neither'
    """
    api = "check_loss"
    check_callable(api, loss, "loss")
    positions = resolve_argnums(api, loss, check_argnums(api, batch_argnums, "batch_argnums"), args, "batch_argnums")
    size = count_examples(api, loss, positions, args)
    owner, function = bound_model(loss)
    refuse_shared_state(api, loss, owner, args, kwargs)
    for name, value in ({argument_name(loss, args, i): x for i, x in enumerate(args)} | kwargs).items():
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
            raise TypeError(f"{api}: `{name}` is traced; call check_loss outside of jit, grad and vmap.")
    batch = {i: args[i] for i in positions}, kwargs
    rest = tuple(None if i in batch[0] else value for i, value in enumerate(args))
    if is_padding_example is None:
        real = np.arange(size)
    else:
        if np.shape(is_padding_example) != (size,):
            shape = np.shape(is_padding_example)
            raise ValueError(f"{api}: is_padding_example must have shape ({size},), but got {shape}.")
        real = np.flatnonzero(~np.asarray(is_padding_example, bool))
    tree = split_tree((owner, rest))
    keys: jax.Array | None = None
    if prng_argnum is not None:
        if not is_int(prng_argnum) or prng_argnum not in range(len(args)) or prng_argnum in batch[0]:
            expected = "the position of a random key that is not in batch_argnums"
            raise ValueError(f"{api}: prng_argnum must be {expected}, but got {prng_argnum!r}.")
        key = args[prng_argnum]
        keys = jnp.stack([key, jax.random.fold_in(key, 1)])
    models = splits_of(tree)
    tree = with_splits(tree, [with_both_keys(parts, _other_keys(parts)) for parts in models])
    arrays, outline = HashablePytree.separate(tree)

    def evaluate(arrays: Any, batch: Any, number: jax.Array) -> jax.Array:
        arrays, keys = arrays
        tree = outline.join(arrays)
        tree = with_splits(tree, [with_one_key(parts, number) for parts in splits_of(tree)])
        owner, args = evaluating_tree(merge_tree(tree))
        given = batch[0] if keys is None else {**batch[0], prng_argnum: keys[number]}
        args = tuple(given.get(i, x) for i, x in enumerate(args))
        out = function(owner, *args, **batch[1])
        return out[0] if has_aux else out

    return compared(evaluate, (arrays, keys), batch, real)


def with_both_keys(first: Any, second: Any) -> Any:
    """Return a tree whose keys are those of both trees along axis 0, and whose other arrays are those of the first."""
    return jax.tree.map(lambda a, b: jnp.stack([a, b]) if is_key(a) else a, first, second)


def with_one_key(tree: Any, number: jax.Array) -> Any:
    """Return the tree of that number of which `with_both_keys` was made."""
    # Keys are drawn outside of the program and selected here, so that it draws random numbers only if the loss does.
    return jax.tree.map(lambda x: x[number] if is_key(x) else x, tree)


def _other_keys(parts: Any) -> Any:
    """Return a split model with other keys."""

    def other(x: Any) -> Any:
        fold = partial(jax.random.fold_in, data=1)
        for _ in jnp.shape(x):
            fold = jax.vmap(fold)
        return fold(x) if is_key(x) else x

    return SplitModel(parts.structure, parts.trainable, jax.tree.map(other, parts.rest))


def compared(
    evaluate: Callable[[Any, Any, jax.Array], jax.Array], arrays: Any, batch: Any, real: np.ndarray
) -> LossCheck:
    """Compare the losses of examples together with those of the examples alone.

    Args:
      evaluate: returns the loss of a batch: a function of `arrays`, the batch, and a number that random keys depend on.
      arrays: a pytree of arrays.
      batch: a pytree of concrete arrays with the examples along axis 0.
      real: the indices of the examples that are not padding.
    """
    count = min(_MOST, len(real))
    if count < 2:
        return LossCheck("unknown", None, None, count, "there are fewer than two examples to compare")
    drawn = np.sort(np.random.default_rng(0).choice(real, count, replace=False))
    # Arrays of JAX are indexed inside the program: outside, each shape takes one of its own.
    given = jax.tree.map(lambda x: x[drawn] if isinstance(x, np.ndarray) else _replicated(x), batch)
    # Two uneven parts, repeated to the size of the whole, so that one program evaluates all three.
    part = max(1, count // 3)
    order = np.arange(count)
    positions = np.stack([order, np.resize(order[:part], count), np.resize(order[part:], count), order])
    numbers = np.array([0, 0, 0, 1])

    def program(arrays: Any, given: Any) -> tuple[jax.Array, jax.Array]:
        """Return the losses of single examples, and those of the batches at `positions`."""
        rows = jax.tree.map(lambda x, of: x if isinstance(of, np.ndarray) else x[drawn], given, batch)

        def loss(rows: Any, number: Any) -> jax.Array:
            value = evaluate(arrays, rows, number)
            scalar_seed("check_loss: the loss", value, _REMEDY)
            return jnp.asarray(value)

        def together(at: Any) -> jax.Array:
            return loss(jax.tree.map(lambda x: x[at[0]], rows), at[1])

        alone = lax.map(lambda row: loss(jax.tree.map(lambda x: x[None], row), 0), rows)
        return alone, lax.map(together, (positions, numbers))

    try:
        # Products of reduced precision, as on GPUs and TPUs by default, would differ between sizes of batches.
        with jax.default_matmul_precision("highest"):
            traced = jax.jit(program).trace(arrays, given)
            # It runs once, and most of its time goes into compiling.
            options = {"xla_backend_optimization_level": 0} if platform() == "cpu" else {}
            alone, together = traced.lower().compile(compiler_options=options)(arrays, given)
    except Exception as error:  # a loss that is written for a batch of one may raise anything for a larger one
        if isinstance(error, TypeError) and str(error).startswith("check_loss: "):
            raise
        return LossCheck("unknown", None, None, count, f"the loss raised {type(error).__name__} for {count} examples")
    eqns = list(with_inner(traced.jaxpr.eqns))
    dtypes = {aval(x).dtype for eqn in eqns for x in eqn.outvars if hasattr(aval(x), "dtype")}
    rounding = max((jnp.finfo(x).eps for x in dtypes if jnp.issubdtype(x, jnp.inexact)), default=0)
    factor = _HALF_ROUNDING if rounding > 1e-5 else _ROUNDING
    random = any(eqn.primitive.name in _RANDOM for eqn in eqns)
    return _verdict(
        np.asarray(alone, np.float64),
        np.asarray(together, np.float64),
        positions[:3],
        factor * float(rounding),
        random,
    )


def _replicated(x: Any) -> Any:
    """Return an array that is sharded over a mesh whole on each of its devices, and any other as it is."""
    mesh = getattr(getattr(x, "sharding", None), "mesh", None)
    return x if mesh is None else jax.device_put(x, NamedSharding(mesh, PartitionSpec()))


def _verdict(
    alone: np.ndarray, together: np.ndarray, positions: np.ndarray, tolerance: float, random: bool
) -> LossCheck:
    """Return what the losses say.

    Args:
      alone: the losses of single examples, (count,).
      together: the losses of three batches, and of the first of them with another random key, (4,).
      positions: the examples of the three batches, (3, count).
      tolerance: by how much equal losses may differ, relative to the mean absolute loss.
      random: whether the program draws random numbers.
    """
    count = len(alone)
    batches, again = together[:3], together[3]
    if not np.isfinite(batches).all():
        return LossCheck("unknown", None, None, count, "the loss of a batch is not finite")
    if not np.isfinite(alone).all():
        return LossCheck(
            "neither", None, None, count, "the loss of an example alone is not finite, but that of a batch is"
        )
    scale = np.abs(alone).mean()
    means = alone[positions].mean(axis=1)
    if abs(again - batches[0]) > tolerance * max(scale, abs(batches[0])):
        return LossCheck("unknown", None, None, count, RANDOM_REASONS[0])
    if scale == 0 and not batches.any():
        return LossCheck("unknown", None, None, count, "all losses are zero")
    # Relative to the losses of the batches if those of single examples are zero.
    unit = scale or np.abs(batches).mean()
    from_mean, from_sum = np.abs(batches - means) / unit, np.abs(batches / count - means) / unit
    found = partial(LossCheck, from_mean=float(from_mean.max()), from_sum=float(from_sum.max()), examples=count)
    if (from_mean <= tolerance).all():
        return found("mean")
    if (from_sum <= tolerance).all():
        return found("sum")
    if (np.abs(batches - alone[positions[:, 0]]) <= tolerance * unit).all():
        return found("unknown", reason="the loss uses the first example of its batch alone")
    if random:
        return found("unknown", reason=RANDOM_REASONS[1])
    beyond = batches - count * means
    if np.ptp(beyond) <= tolerance * count * unit:
        return found("neither", reason="it is a sum over the examples plus a term that does not depend on them")
    return found("neither", reason="the loss of an example depends on the other examples of its batch")
