"""`accumulate`: evaluate a function over micro-batches, compiled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

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
from .._core.compat import jaxpr_as_fun, varying, varying_axes
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
    fun: Callable[..., Any], micro_batches: int, *, batch_argnums: Argnums = 1, reduction: Reduction = "mean"
) -> Callable[..., Any]:
    """Evaluate `fun` on one micro-batch at a time, and return the mean of the results.

    The program contains one micro-batch, and holds one in memory at a time: neither compile time nor memory grows with
    their number. If `fun` returns means over its examples, the result equals that of the whole batch.

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

    Returns:
      A function of the same arguments, to be called under `jax.jit`, or `nnx.jit` if a module has state. It returns the
      mean or sum of the outputs of `fun` over the micro-batches, as arrays of the same shapes and dtypes; narrower
      dtypes are accumulated in float32. This applies to every array: an output with an axis of examples, such as logits
      as auxiliary output, has the size of one micro-batch and mixes examples of all micro-batches. No check can
      distinguish it from a gradient, so return means or sums over the examples, and no value for each example.

    Raises:
      TypeError: `fun` is not callable; `micro_batches` is not an int; an argument of the batch is a model; `fun`
        returns a model, an object that is not an array, or, for a mean, integers or booleans.
      ValueError: `micro_batches` is below 1 or does not divide the number of examples; the arrays of the batch have
        different numbers of examples; `reduction` is neither "mean" nor "sum"; `fun` assigns a parameter or changes the
        structure of a module.

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
    """
    check_callable("accumulate", fun)
    check_count("accumulate", "micro_batches", micro_batches)
    positions = check_argnums("accumulate", batch_argnums, "batch_argnums")
    check_choice("accumulate", "reduction", reduction, get_args(Reduction))
    owner, function = bound_model(fun)

    def accumulated(*args: Any, **kwargs: Any) -> Any:
        """Scan over the micro-batches."""
        batch = _cut(fun, args, positions, micro_batches)
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

        def body(carry: Any, part: Any) -> tuple[Any, None]:
            totals, changed = carry
            now = [held | new for held, new in zip(state, changed, strict=True)]
            leaves = run(*jax.tree.leaves((now, part)))
            out, changed = jax.tree.unflatten(jax.tree.structure(outline), leaves)
            return (jax.tree.map(lambda total, x: total + jnp.asarray(x, total.dtype), totals, out), changed), None

        # Under `shard_map` the initial carry must be device-varying over the same axes as the carry that is returned.
        zeros = jax.tree.map(lambda x: varying(jnp.zeros(x.shape, _accumulator(x.dtype)), varying_axes(x)), outline[0])
        # Carry only the state that `fun` changes: any other state would be copied in each iteration.
        first = [
            {path: varying(jnp.asarray(held[path]), varying_axes(x)) for path, x in new.items()}
            for held, new in zip(state, outline[1], strict=True)
        ]
        # With `checkpoint`, a gradient recomputes the intermediate results of a micro-batch instead of storing them.
        # XLA does not merge common subexpressions across loop iterations, so barriers against that are not needed.
        (totals, last), _ = lax.scan(jax.checkpoint(body, prevent_cse=False), (zeros, first), batch)
        update("accumulate", models_of((owner, args, kwargs)), splits, with_changes(splits, last))
        number = micro_batches if reduction == "mean" else 1

        def scaled(x: Any, like: Any) -> Any:
            return weak_like((x / number if number > 1 else x).astype(like.dtype), like)

        return jax.tree.map(scaled, totals, outline[0])

    rebuild = partial(accumulate, micro_batches=micro_batches, batch_argnums=batch_argnums, reduction=reduction)
    return wrap_like(fun, "accumulate", accumulated, rebuild)


def _cut(fun: Any, args: Sequence[Any], positions: tuple[int, ...], parts: int) -> dict[int, Any]:
    """Return the arguments of the batch by position, with a leading axis of micro-batches."""
    selected = resolve_argnums("accumulate", fun, positions, args, "batch_argnums")
    for i in selected:
        if models_of(args[i]):
            raise TypeError(f"accumulate: `{argument_name(fun, args, i)}` is a model; remove it from batch_argnums.")
    size = count_examples("accumulate", fun, selected, args)
    if size % parts:
        raise ValueError(f"accumulate: micro_batches={parts} does not divide the {size} examples; drop some.")
    batch = {i: args[i] for i in selected}
    return jax.tree.map(lambda x: jnp.reshape(x, (parts, size // parts, *x.shape[1:])), batch)


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
