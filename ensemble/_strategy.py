"""How the members are executed: the same function of each, in one program or in several.

`vmap`, `map` and `unroll` are one compiled program: batched operations, a loop that the compiler sees, and one copy of
the operations for each member. `loop` is a Python loop over a compiled program for one member.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr

from ..transforms import vmap
from ..transforms._axes import Axes, broadcast_axes
from ..transforms._convolutions import convolutions_as_products, has_convolution

STRATEGIES = ("auto", "vmap", "map", "unroll", "loop")


class Execution(NamedTuple):
    """How members are executed.

    Attributes:
      strategy: "vmap", "map", "unroll" or "loop".
      chunk_size: for "vmap", how many members at a time; None for all at once.
      products: whether convolutions are rewritten as matrix products.
      devices: over how many devices the members are spread.
    """

    strategy: str
    chunk_size: int | None = None
    products: bool = False
    devices: int = 1

    def __str__(self) -> str:
        words = [self.strategy]
        if self.chunk_size is not None:
            words.append(f"{self.chunk_size} at a time")
        if self.products:
            words.append("convolutions as products")
        if self.devices > 1:
            words.append(f"on {self.devices} devices")
        return ", ".join(words)


def over_members(
    fun: Callable[..., Any], execution: Execution, in_axes: Sequence[Axes], size: int
) -> Callable[..., Any]:
    """`fun` over `size` members, with the members along axis 0 of its outputs; a function that can be traced.

    Args:
      fun: a function of one member's arguments.
      execution: how; a "loop" cannot be traced.
      in_axes: an axis specification for each argument.
      size: how many members.
    """
    if execution.products:
        fun = convolutions_as_products(fun)
    if execution.strategy == "vmap":
        return vmap(fun, tuple(in_axes), axis_size=size, chunk_size=execution.chunk_size)

    def mapped(*args: Any) -> Any:
        if execution.strategy == "unroll":
            return stack([fun(*take_member(args, in_axes, i)) for i in range(size)])
        # Arrays as what is looped over: taking members by their number makes a longer program.
        leaves, treedef = jax.tree.flatten(args)
        axes = broadcast_axes(tuple(in_axes), args)
        moved = [jnp.moveaxis(leaf, axis, 0) for leaf, axis in zip(leaves, axes, strict=True) if axis is not None]

        def of_slices(slices: list[Any]) -> Any:
            rest = iter(slices)
            taken = [leaf if axis is None else next(rest) for leaf, axis in zip(leaves, axes, strict=True)]
            return fun(*jax.tree.unflatten(treedef, taken))

        return lax.map(of_slices, moved)

    return mapped


def take_member(args: Sequence[Any], in_axes: Sequence[Axes], i: Any) -> Any:
    """The arguments of member `i`, an int or a traced integer."""
    leaves, treedef = jax.tree.flatten(tuple(args))
    axes = broadcast_axes(tuple(in_axes), tuple(args))

    def take(leaf: Any, axis: int) -> Any:
        if isinstance(i, int):
            return lax.index_in_dim(leaf, i, axis, keepdims=False)
        return lax.dynamic_index_in_dim(leaf, i, axis, keepdims=False)

    taken = [leaf if axis is None else take(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)]
    return jax.tree.unflatten(treedef, taken)


def stack(trees: Sequence[Any]) -> Any:
    """One pytree with the given ones along axis 0 of its arrays."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def in_turn(jaxpr: Jaxpr, platform: str) -> bool:
    """The rule where nothing is measured: whether members are quicker one after another than batched.

    Mapping a convolution over its weights makes a grouped convolution, and XLA's CPU backend computes that two to three
    times slower than one member after another, forward and backward. So convolutions on a CPU are not batched.
    """
    return platform == "cpu" and has_convolution(jaxpr)
