"""Strategies: execute a function of one member for all members.

`vmap`, `map` and `unroll` are one compiled program: batched operations, a compiled loop, or one copy of the operations
for each member. `loop` is a Python loop over a compiled program for one member.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from ...transforms._calls.chunk import map_in_chunks
from ...transforms._convolutions.as_products import (
    convolutions_as_products,
    has_convolution,
    is_slow_alone,
    largest_convolution,
)
from ...transforms._core.arguments import check_choice, check_count
from ...transforms._core.axes import Axes, broadcast_axes
from ...transforms._core.compat import Jaxpr
from ...transforms._core.target import platform
from ...transforms._models.stacking import stack
from .rows import where_rows

Strategy = Literal["auto", "vmap", "map", "unroll", "loop"]

# Convolutions with results of at most this many bytes are batched by the rule for training steps.
_SMALL = {"cpu": 1 << 17, "gpu": 1 << 25}


class Execution(NamedTuple):
    """A way to execute the members, for `Trainer(strategy=)`; `Trainer.explain().chosen` is one.

    Attributes:
      strategy: "vmap", "map", "unroll" or "loop".
      chunk_size: for "vmap", the number of members at a time; None for all at once.
      products: whether convolutions are rewritten as matrix products.
      devices: the number of devices over which the members are distributed.

    Examples:
      >>> import optax
      >>> from plurax.ensemble import Execution, Trainer
      >>> trainer = Trainer(lambda model, x: (model(x) ** 2).mean(), optax.sgd(0.1), strategy=Execution("vmap", 4))
      >>> print(Execution("map", products=True))
      map, convolutions as matrix products
    """

    strategy: str
    chunk_size: int | None = None
    products: bool = False
    devices: int = 1

    def __str__(self) -> str:
        words = (
            self.strategy,
            "" if self.chunk_size is None else f"{self.chunk_size} at a time",
            "convolutions as matrix products" if self.products else "",
            f"on {self.devices} devices" if self.devices > 1 else "",
        )
        return ", ".join(filter(None, words))


def check_execution(name: str, execution: Execution) -> None:
    """Raise if an execution that a user made does not exist."""
    check_choice(name, "strategy", execution.strategy, get_args(Strategy)[1:])
    check_count(name, "chunk_size", execution.chunk_size, optional=True)
    check_count(name, "devices", execution.devices)
    if execution.chunk_size is not None and execution.strategy != "vmap":
        raise ValueError(f'{name}: chunk_size needs strategy="vmap", but the strategy is {execution.strategy!r}.')


def over_members(
    fun: Callable[..., Any],
    execution: Execution,
    in_axes: Sequence[Axes],
    size: int,
    *,
    in_place: bool = False,
    together: Callable[[int], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Map `fun` over `size` members, with the members along axis 0 of its outputs; return a traceable function.

    Args:
      fun: a function of one member's arguments.
      execution: the strategy, other than "loop", which cannot be traced.
      in_axes: an axis specification for each argument.
      size: the number of members.
      in_place: whether the first output replaces the first argument and is written into its memory.
      together: for a number of members, the function of these members stacked. Its outputs are those of `fun` for the
        first argument, then others, then totals, which are added over the members. `fun` has these three outputs too,
        and its second argument says whether a member counts in the totals.
    """
    # In a loop or with mapped weights XLA is slow at every convolution.
    everywhere = execution.strategy != "unroll"
    rewritten = partial(convolutions_as_products, everywhere=everywhere) if execution.products else lambda fun: fun
    if together is not None:
        return _with_totals(rewritten(fun), lambda size: rewritten(together(size)), execution, in_axes, size)
    fun = rewritten(fun)

    # `jax.vmap` instead of ours, since the arguments have been checked.
    def batched(size: int) -> Callable[..., Any]:
        return jax.vmap(fun, tuple(in_axes), axis_size=size)

    def unrolled(size: int) -> Callable[..., Any]:
        return lambda *args: stack([fun(*take_member(args, in_axes, i)) for i in range(size)])

    # "map" uses chunks of one member without batching: a batched convolution is a grouped one even for a batch of one
    # member, and XLA computes it by a slower kernel.
    mapped = batched if execution.strategy == "vmap" else unrolled
    chunk = 1 if execution.strategy == "map" else execution.chunk_size
    if chunk is None:
        return mapped(size)

    def in_chunks(*args: Any) -> Any:
        return map_in_chunks(mapped, args, tuple(in_axes), 0, size, chunk)

    if not in_place or platform() != "cpu":
        return in_chunks
    return _in_place(mapped(min(chunk, size)), in_chunks, in_axes, size, min(chunk, size))


def _with_totals(
    fun: Callable[..., Any],
    together: Callable[[int], Callable[..., Any]],
    execution: Execution,
    in_axes: Sequence[Axes],
    size: int,
) -> Callable[..., Any]:
    """Return `over_members` for a function whose third output is added over the members."""

    def unrolled(size: int) -> Callable[..., Any]:
        def of_each(*args: Any) -> Any:
            results, totals = [], None
            for i in range(size):
                *result, total = fun(*take_member(args, in_axes, i))
                results.append(tuple(result))
                totals = total if totals is None else jax.tree.map(jnp.add, totals, total)
            return *stack(results), totals

        return of_each

    mapped = together if execution.strategy == "vmap" else unrolled
    chunk = 1 if execution.strategy == "map" else execution.chunk_size or size
    if chunk >= size:
        return mapped(size)
    return _in_place(mapped(chunk), mapped(size), in_axes, size, chunk, totals=True)


def _in_place(
    mapped: Callable[..., Any],
    otherwise: Callable[..., Any],
    in_axes: Sequence[Axes],
    size: int,
    chunk: int,
    *,
    totals: bool = False,
) -> Callable[..., Any]:
    """Return a loop that carries the first argument and replaces a chunk of its members in each iteration.

    A loop that slices its arguments and collects the outputs holds the whole first argument twice, and copies the
    result back at the end. `otherwise`, such a loop or all members at once, is used for outputs that differ from the
    argument in shape or dtype. With `totals`, the last output is added over the chunks.
    """
    of_chunk = jax.jit(mapped, inline=True)  # traced only once, for its output shapes and for the loop
    count = -(-size // chunk)

    def replaced(carried: Any, *others: Any) -> Any:
        """Return the first argument with all members replaced, and the other outputs."""

        def slice_members(start: Any, carried: Any) -> Any:
            """Return the arguments of the `chunk` members from `start` on."""
            take: Any = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=chunk)
            return _map_mapped(lambda x, axis: take(x, axis=axis % x.ndim), (carried, *others), in_axes)

        def zeros(tree: Any) -> Any:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)

        before = jax.eval_shape(partial(slice_members, 0), carried)
        new, extra, *total = jax.eval_shape(of_chunk, *before)
        # `skip` below returns zeros like the other outputs, which do not exist for keys.
        has_keys = any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in jax.tree.leaves(extra))
        if has_keys or _shapes(new) != _shapes(before[0]):
            return otherwise(carried, *others)

        def skip(own: Any, *_: Any) -> Any:
            return own, *zeros((extra, *total))

        def replace_chunk(carried: Any, i: Any) -> tuple[Any, Any]:
            """Return `carried` with chunk `i` replaced and its totals added, and the other outputs of the chunk."""
            carried, sums = carried
            # The last chunk starts early enough to have the same length as the others, so that one program serves all.
            start = jnp.minimum(i * chunk, size - chunk)
            args = slice_members(start, carried)
            # Where the last two chunks overlap, no member may take two steps or be added twice.
            is_first = start + jnp.arange(chunk) >= i * chunk if size % chunk else None
            if totals and is_first is not None:
                args = args[0], args[1] & is_first, *args[2:]
            # The condition always holds, but the compiler cannot know that, so it computes the whole chunk before it
            # writes any of it. Without the condition it would copy the whole array for each chunk.
            new, extra, *total = lax.cond(i >= 0, of_chunk, skip, *args)
            if is_first is not None:
                new = where_rows(is_first, new, args[0])
            carried = jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start, 0), carried, new)
            return (carried, jax.tree.map(jnp.add, sums, total)), extra

        (carried, sums), extras = lax.scan(replace_chunk, (carried, zeros(total)), jnp.arange(count))
        extras = jax.tree.map(lambda x: x.reshape(count * chunk, *x.shape[2:]), extras)
        # Members in both of the last two chunks have two rows. The second is dropped: it was computed from values that
        # had been updated already.
        last, overlap = (count - 1) * chunk, count * chunk - size
        return carried, jax.tree.map(lambda x: jnp.concatenate([x[:last], x[last + overlap :]]), extras), *sums

    return replaced


def _shapes(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(x.shape, x.dtype) for x in leaves]


def take_member(args: Sequence[Any], in_axes: Sequence[Axes], i: Any) -> Any:
    """Return the arguments of member `i`, an int or a traced integer."""
    # A static slice if the index is known, which the compiler can fuse into its consumers.
    take: Any = lax.index_in_dim if isinstance(i, int) else lax.dynamic_index_in_dim
    return _map_mapped(lambda x, axis: take(x, i, axis, keepdims=False), args, in_axes)


def _map_mapped(fun: Callable[[Any, int], Any], args: Sequence[Any], in_axes: Sequence[Axes]) -> Any:
    """Apply `fun(array, axis)` to each array of the arguments that is mapped over the members."""
    leaves, treedef = jax.tree.flatten(tuple(args))
    axes = broadcast_axes(tuple(in_axes), tuple(args))
    found = [x if axis is None else fun(x, axis) for x, axis in zip(leaves, axes, strict=True)]
    return jax.tree.unflatten(treedef, found)


def in_turn(jaxpr: Jaxpr, platform: str) -> bool:
    """Return whether to call members one after another instead of batched, by a rule that is used without measurements.

    Batching a convolution over its weights gives a grouped convolution. The CPU backend of XLA needs two to three times
    as long for it as for one member after another. So convolutions on a CPU are not batched. Those with few channels
    are fast as batched products too, but with many images only one after another (0.23 instead of 0.71 for LeNet-5).
    """
    return platform == "cpu" and has_convolution(jaxpr)


def by_rule(jaxpr: Jaxpr, platform: str) -> Execution:
    """Return the execution of a training step that is used without measurements, from the program of a member's step.

    The CPU backend of XLA is slow at a convolution with batched weights or in a loop, at those with few channels and at
    pooling, and fast at matrix products. As products, convolutions of small arrays are batched; larger ones would not
    stay in the caches, so one member follows another: in a loop, or, where XLA is fast at a convolution that is not in
    one, one call after another.

    On a GPU, batched weights become grouped convolutions, which are slow in cuDNN (PyTorch issues 70954 and 73764), and
    gradients of strided ones have 2.7 times the operations. As products they have those of one member after another, in
    as few kernels as batched ones. If the arrays of a member are large, its kernels take longer than their start; one
    member after another then needs the fewest bytes and the least memory (benchmarks/accelerators.md; not timed).
    """
    largest = largest_convolution(jaxpr) if platform in _SMALL else 0
    if not largest:
        return Execution("vmap")
    if platform == "gpu" and largest > _SMALL[platform]:
        return Execution("map")
    if largest == inf:  # some are not rewritten, and would be slow in a compiled loop
        return Execution("loop", products=platform == "cpu")
    if largest <= _SMALL[platform]:
        return Execution("vmap", products=True)
    return Execution("map" if platform == "gpu" or is_slow_alone(jaxpr) else "loop", products=True)
