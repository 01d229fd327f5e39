"""One function over many micro-batches, compiled once: `accumulate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

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
from .._core.compat import varying, varying_axes
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
    """Evaluate `fun` on one part of a batch after another, and return the mean of its results.

    One part is in memory at a time, and in the program: neither the time to compile nor the memory depends on how many
    there are. Where `fun` returns means over its examples, the result is that of the whole batch.

    `accumulate(value_and_grad(loss), 8)` accumulates gradients. The gradient of `accumulate(loss, 8)` is the same, in
    the same memory, and computes every part a second time.

    Args:
      fun: a function of arrays, pytrees and modules. The state of a module that it changes (BatchNorm statistics,
        dropout keys) goes from each part to the next one.
      micro_batches: the number of parts that the batch is cut into, each of consecutive examples.
      batch_argnums: the positions of the arguments whose arrays have the examples along axis 0; they are the same
        number in each, and `micro_batches` divides it. All other arguments are the same for every part: a random key
        too, so pass keys of the examples as part of the batch.
      reduction: "mean", or "sum" where `fun` returns sums, or counts.

    Returns:
      A function of the same arguments, to be called under `jax.jit`, or `nnx.jit` where a module keeps state. It
      returns what `fun` does, as arrays of the same shapes and dtypes: the mean or sum over the parts, which is taken
      in float32 where they have fewer bits. That holds of every array: one that has the examples as an axis, such as
      logits as auxiliary output, has the size of one part and mixes the examples of all parts, and no check can tell it
      from a parameter's gradient. Return means or sums over the examples, and nothing for each of them.

    Raises:
      TypeError: `fun` is not callable; `micro_batches` is not an int; `fun` returns a model, something that is not an
        array, or for a mean integers or booleans.
      ValueError: `micro_batches` is below 1 or does not divide the number of examples; the arrays of the batch
        differ in it; `reduction` is neither "mean" nor "sum"; `fun` assigns a parameter or changes the structure of a
        module.

    Cost:
      The evaluations of all parts, the memory of one, and one more copy of what `fun` returns. XLA's CPU backend runs
      the body of a loop on one core: 1.3 to 1.7 times the time of the whole batch on two cores, 0.78 times on one.

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
        """Scan over the parts of the batch."""
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

        # `fun` is traced once, here: its results' shapes make the first carry of the loop, and the jaxpr is its body.
        one = jax.eval_shape(lambda batch: jax.tree.map(lambda x: x[0], batch), batch)
        closed, outline = jax.make_jaxpr(of_part, return_shape=True)(state, one)
        run: Callable[..., Any] = jaxpr_as_fun(closed)
        if jax.default_backend() == "cpu":
            # Gradients of convolutions are many times slower inside a loop of XLA's CPU backend than outside.
            run = with_scannable_gradients(run)

        def body(carry: Any, part: Any) -> tuple[Any, None]:
            totals, changed = carry
            now = [held | new for held, new in zip(state, changed, strict=True)]
            leaves = run(*jax.tree.leaves((now, part)))
            out, changed = jax.tree.unflatten(jax.tree.structure(outline), leaves)
            return (jax.tree.map(lambda total, x: total + jnp.asarray(x, total.dtype), totals, out), changed), None

        # Under `shard_map` what is carried must differ over the same devices from the first iteration on.
        zeros = jax.tree.map(lambda x: varying(jnp.zeros(x.shape, _accumulator(x.dtype)), varying_axes(x)), outline[0])
        # Only state that `fun` changes is carried: the rest would be copied in each iteration.
        first = [
            {path: varying(jnp.asarray(held[path]), varying_axes(x)) for path, x in new.items()}
            for held, new in zip(state, outline[1], strict=True)
        ]
        # With `checkpoint` a gradient keeps no intermediate results of a part, but computes them again. XLA does not
        # merge common subexpressions across the iterations of a loop, so barriers against that are not needed.
        (totals, last), _ = lax.scan(jax.checkpoint(body, prevent_cse=False), (zeros, first), batch)
        update("accumulate", models_of((owner, args, kwargs)), splits, with_changes(splits, last))
        number = micro_batches if reduction == "mean" else 1

        def scaled(x: Any, like: Any) -> Any:
            return weak_like((x / number if number > 1 else x).astype(like.dtype), like)

        return jax.tree.map(scaled, totals, outline[0])

    rebuild = partial(accumulate, micro_batches=micro_batches, batch_argnums=batch_argnums, reduction=reduction)
    return wrap_like(fun, "accumulate", accumulated, rebuild)


def _cut(fun: Any, args: Sequence[Any], positions: tuple[int, ...], parts: int) -> dict[int, Any]:
    """Return the arguments of the batch by positions, with an axis of the parts in front."""
    selected = resolve_argnums("accumulate", fun, positions, args, "batch_argnums")
    for i in selected:
        if models_of(args[i]):
            raise TypeError(f"accumulate: `{argument_name(fun, args, i)}` is a model; name others in batch_argnums.")
    size = count_examples("accumulate", fun, selected, args)
    if size % parts:
        raise ValueError(f"accumulate: micro_batches={parts} does not divide the {size} examples; leave some out.")
    batch = {i: args[i] for i in selected}
    return jax.tree.map(lambda x: jnp.reshape(x, (parts, size // parts, *x.shape[1:])), batch)


def _checked(out: Any, reduction: str) -> Any:
    """Return the output as arrays; raise unless each has a mean or a sum."""
    kind = jnp.inexact if reduction == "mean" else jnp.number
    for path, leaf in jax.tree.leaves_with_path(out, is_leaf=is_model):
        number = hasattr(leaf, "dtype") or isinstance(leaf, (bool, int, float, complex))
        if is_model(leaf) or not number or not jnp.issubdtype(jnp.result_type(leaf), kind):
            what = f"`{leaf_name('output', path)}` is {describe(leaf)}, which has no {reduction} over the parts"
            raise TypeError(f'accumulate: {what}; return floats, or for reduction="sum" floats or ints.')
    return jax.tree.map(jnp.asarray, out)


def _accumulator(dtype: Any) -> Any:
    """Return the dtype in which numbers of `dtype` are summed: many small ones would be lost in few bits."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
