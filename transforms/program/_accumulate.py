"""`accumulate`: evaluate a function over micro-batches, compiled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._convolutions.in_scans import with_scannable_gradients
from .._core.arguments import (
    Argnums,
    argument_name,
    check_argnums,
    check_callable,
    check_choice,
    check_count,
    count_examples,
    describe,
    leaf_name,
    resolve_argnums,
    wrap_like,
)
from .._core.compat import Tracer, jaxpr_as_fun, varying, varying_axes
from .._core.target import platform
from .._core.weak_types import weak_like
from .._models.mutation import call_purely, update, with_changes
from .._models.split_model import (
    bound_model,
    is_model,
    models_of,
    named_arrays,
    refuse_shared_state,
    split_tree,
    splits_of,
    with_splits,
)

Reduction = Literal["mean", "sum"]


def accumulate(
    fun: Callable[..., Any],
    micro_batches: int,
    *,
    batch_argnums: Argnums = 1,
    reduction: Reduction = "mean",
    weights: ArrayLike | Callable[..., ArrayLike] | None = None,
) -> Callable[..., Any]:
    """Evaluate `fun` on one micro-batch at a time, and return the mean of the results.

    The program contains one micro-batch, and holds one in memory at a time: neither compile time nor memory grows with
    their number. If `fun` returns means over its examples, the result equals that of the whole batch. Means that do not
    count all examples alike, such as those over unmasked tokens, need `weights` for that.

    `accumulate(value_and_grad(loss), 8)` accumulates gradients. The gradient of `accumulate(loss, 8)` is the same and
    needs the same memory, but evaluates every micro-batch twice.

    Args:
      fun: a function of arrays, pytrees and modules. Module state that it changes (BatchNorm statistics, dropout keys)
        is carried from each micro-batch to the next.
      micro_batches: the number of micro-batches; each has consecutive examples.
      batch_argnums: the positions of the arguments whose arrays have the examples along axis 0. Their sizes must be
        equal, and divisible by `micro_batches`. All other arguments are shared by all micro-batches, random keys too:
        pass one key for each example as part of the batch.
      reduction: "mean"; or "sum" if `fun` returns sums or counts.
      weights: the weights of a mean: an array (micro_batches,), or a function of the arguments of the batch, in their
        order and cut to a micro-batch, that returns a number, such as that of unmasked tokens. The results are
        Σ wᵢ rᵢ / Σ wᵢ; a micro-batch of weight zero is left out. None weighs all micro-batches equally.

    Returns:
      A function of the same arguments, to be called under `jax.jit`, or `nnx.jit` if a module has state. It returns the
      mean or sum of the outputs of `fun` over the micro-batches, as arrays of the same shapes and dtypes; narrower
      dtypes are accumulated in float32. This applies to every array: an output with an axis of examples, such as logits
      as auxiliary output, has the size of one micro-batch and mixes examples of all micro-batches. No check can
      distinguish it from a gradient, so return means or sums over the examples, and no value for each example.

    Raises:
      TypeError: `fun` is not callable; `micro_batches` is not an int; an argument of the batch is a model; `fun`
        returns a model, an object that is not an array, or, for a mean, integers or booleans; `weights` are not real.
      ValueError: `micro_batches` is below 1 or does not divide the number of examples; the arrays of the batch have
        different numbers of examples; `reduction` is neither "mean" nor "sum"; `weights` have another shape,
        go with a sum, or are not traced and negative, not finite or all zero; `fun` assigns a parameter or changes
        the structure of a module.

    Cost:
      The evaluations of all micro-batches, the memory of one, and one more copy of the output of `fun`. XLA's CPU
      backend runs the body of a loop on one core: 1.3 to 1.7 times the time of the whole batch on two cores, 0.78 times
      on one.

    Source:
      MindSpore, `mindspore.nn.PipelineCell`, whose parts `lazy_inline` compiles once.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from plurax.transforms import value_and_grad
      >>> from plurax.transforms.program import accumulate
      >>> def loss(w, batch):
      ...     return jnp.mean((batch @ w) ** 2)
      >>> step = jax.jit(accumulate(value_and_grad(loss), 4))
      >>> value, gradient = step(jnp.ones(3), jnp.ones((8, 3)))
      >>> float(value), gradient.tolist()
      (9.0, [6.0, 6.0, 6.0])

      The mean over what a mask keeps:

      >>> def masked(w, x, mask):
      ...     return jnp.sum((x @ w) ** 2 * mask) / jnp.sum(mask)
      >>> x, mask = jnp.arange(8.0).reshape(8, 1), jnp.array([1, 1, 1, 1, 1, 0, 0, 0])
      >>> one, count = jnp.ones(1), lambda x, mask: jnp.sum(mask)
      >>> float(masked(one, x, mask)), float(accumulate(masked, 4, batch_argnums=(1, 2), weights=count)(one, x, mask))
      (6.0, 6.0)
    """
    check_callable("accumulate", fun)
    check_count("accumulate", "micro_batches", micro_batches)
    positions = check_argnums("accumulate", batch_argnums, "batch_argnums")
    check_choice("accumulate", "reduction", reduction, get_args(Reduction))
    if weights is not None and reduction != "mean":
        raise ValueError("accumulate: weights are for a mean, but got reduction='sum'; sums add up without weights.")
    owner, function = bound_model(fun)

    def accumulated(*args: Any, **kwargs: Any) -> Any:
        """Scan over the micro-batches."""
        batch = _cut(fun, args, positions, micro_batches)
        shares = None if weights is None else _shares(weights, batch, micro_batches)
        refuse_shared_state("accumulate", fun, owner, args, kwargs)
        arguments = split_tree((owner, args, kwargs))
        splits = splits_of(arguments)
        state = [named_arrays(parts.rest) for parts in splits]

        def of_part(state: Any, part: Any) -> Any:
            owner, args, kwargs = with_splits(arguments, with_changes(splits, state))
            args = tuple(part.get(i, value) for i, value in enumerate(args))
            out, changed = call_purely("accumulate", function, (owner, args, kwargs))
            return _checked(out, reduction), changed

        # `fun` is traced only here: the shapes of its results determine the initial carry, and the jaxpr is the body.
        one = jax.eval_shape(lambda batch: jax.tree.map(lambda x: x[0], batch), batch)
        closed, outline = jax.make_jaxpr(of_part, return_shape=True)(state, one)
        run: Callable[..., Any] = jaxpr_as_fun(closed)
        if platform() == "cpu":
            # Gradients of convolutions are many times slower inside a loop of XLA's CPU backend than outside.
            run = with_scannable_gradients(run)

        def body(carry: Any, of_part: tuple[Any, Any]) -> tuple[Any, None]:
            (totals, changed), (share, part) = carry, of_part
            now = [held | new for held, new in zip(state, changed, strict=True)]
            leaves = run(*jax.tree.leaves((now, part)))
            out, changed = jax.tree.unflatten(jax.tree.structure(outline), leaves)
            return (jax.tree.map(partial(_added, share=share), totals, out), changed), None

        # Under `shard_map` the initial carry must be device-varying over the same axes as the carry that is returned.
        axes = frozenset() if shares is None else varying_axes(shares)
        zeros = jax.tree.map(
            lambda x: varying(jnp.zeros(x.shape, _accumulator(x.dtype)), varying_axes(x) | axes), outline[0]
        )
        # Carry only the state that `fun` changes: any other state would be copied in each iteration.
        first = [
            {path: varying(jnp.asarray(held[path]), varying_axes(x)) for path, x in new.items()}
            for held, new in zip(state, outline[1], strict=True)
        ]
        # With `checkpoint`, a gradient recomputes the intermediate results of a micro-batch instead of storing them.
        # XLA does not merge common subexpressions across loop iterations, so barriers against that are not needed.
        (totals, last), _ = lax.scan(jax.checkpoint(body, prevent_cse=False), (zeros, first), (shares, batch))
        update("accumulate", models_of((owner, args, kwargs)), splits, with_changes(splits, last))
        number = micro_batches if reduction == "mean" and shares is None else 1

        def scaled(x: Any, like: Any) -> Any:
            return weak_like((x / number if number > 1 else x).astype(like.dtype), like)

        return jax.tree.map(scaled, totals, outline[0])

    rebuild = partial(
        accumulate, micro_batches=micro_batches, batch_argnums=batch_argnums, reduction=reduction, weights=weights
    )
    return wrap_like(fun, "accumulate", accumulated, rebuild)


def _cut(fun: Any, args: Sequence[Any], positions: tuple[int, ...], parts: int) -> dict[int, Any]:
    """Return the arguments of the batch by position, with a leading axis of micro-batches."""
    selected = resolve_argnums("accumulate", fun, positions, args, "batch_argnums")
    for i in selected:
        if models_of(args[i]):
            name = argument_name(fun, args, i)
            raise TypeError(f"accumulate: `{name}` is a model; name only arguments with examples in batch_argnums.")
    size = count_examples("accumulate", fun, selected, args)
    if 0 < size < parts:
        raise ValueError(f"accumulate: micro_batches={parts} is more than the {size} examples; pass fewer.")
    if size % parts:
        raise ValueError(f"accumulate: micro_batches={parts} does not divide the {size} examples; drop some.")
    batch = {i: args[i] for i in selected}
    return jax.tree.map(lambda x: jnp.reshape(x, (parts, size // parts, *x.shape[1:])), batch)


def _shares(weights: Any, batch: dict[int, Any], micro_batches: int) -> jax.Array:
    """Return the weight of each micro-batch divided by the sum of all, in at least float32: (micro_batches,)."""
    given = lax.map(lambda part: weights(*(part[i] for i in batch)), batch) if callable(weights) else weights
    if not (isinstance(given, (list, tuple)) or hasattr(given, "dtype")):
        raise TypeError(f"accumulate: weights must be an array or a function, but got {describe(given)}.")
    values = jnp.asarray(given)
    if jnp.shape(values) != (micro_batches,):
        kind, shape = ("results", jnp.shape(values)[1:]) if callable(weights) else ("an array", jnp.shape(values))
        what = f"weights must be a number for each of {micro_batches} micro-batches"
        raise ValueError(f"accumulate: {what}, but got {kind} of shape {shape}.")
    if not (jnp.issubdtype(values.dtype, jnp.floating) or jnp.issubdtype(values.dtype, jnp.integer)):
        raise TypeError(f"accumulate: weights must be real numbers, but got {values.dtype}; count a mask by its sum.")
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    if not isinstance(values, Tracer):
        each = np.asarray(values)
        if not (np.isfinite(each).all() and (each >= 0).all() and each.any()):
            raise ValueError(f"accumulate: weights must be finite, not negative and not all zero, but got {each}.")
    return values / values.sum()


def _added(total: jax.Array, x: Any, *, share: jax.Array | None) -> jax.Array:
    """Add the result of a micro-batch, or its share; a share of zero leaves it out, also if it is not finite."""
    x = jnp.asarray(x, total.dtype)
    return total + (x if share is None else jnp.where(share > 0, share * x, 0).astype(total.dtype))


def _checked(out: Any, reduction: str) -> Any:
    """Return the output as arrays; raise unless each has a mean or a sum."""
    kind = jnp.inexact if reduction == "mean" else jnp.number
    for path, leaf in jax.tree.leaves_with_path(out, is_leaf=is_model):
        number = hasattr(leaf, "dtype") or isinstance(leaf, (bool, int, float, complex))
        if is_model(leaf) or not number or not jnp.issubdtype(jnp.result_type(leaf), kind):
            what = f"`{leaf_name('output', path)}` is {describe(leaf)}, which has no {reduction} over micro-batches"
            raise TypeError(f'accumulate: {what}; return floats, or for reduction="sum" floats or ints.')
    return jax.tree.map(jnp.asarray, out)


def _accumulator(dtype: Any) -> Any:
    """Return the dtype in which to sum `dtype`: at least float32, so that small terms are not lost to rounding."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
