"""The choice between forward and reverse mode, by sizes or by the operations that XLA counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from .._calls.call import Call, check_output
from .._core.compat import NeedsValues, flops_of, inside_a_transform
from .._core.jaxpr import with_inner
from .._core.memory import lower_apart
from .dense import DENSE, by_columns, by_rows, sizes_of

R = TypeVar("R")

# If inputs outnumber outputs by this factor, or the other way round, sizes decide, and nothing is lowered.
_DECISIVE = 4
# Counts that differ by less than this part say nothing about the time.
_TIE = 0.01
# Errors of JAX if a mode cannot differentiate a function: forward mode cannot pass through a custom_vjp (TypeError),
# reverse mode not through a while_loop or a callback (ValueError), neither through an operation without a rule
# (NotImplementedError). Mistakes in the function itself have raised before, when its output shapes were computed.
_NO_DERIVATIVE = (TypeError, ValueError, NotImplementedError)


class ModeChoice(NamedTuple):
    """The mode that `jacobian` uses, and the reason.

    Attributes:
      mode: "forward" (a column for each input element) or "reverse" (a row for each output element); "both" for a
        sparse Jacobian with products of both kinds.
      inputs: the number of input elements, over all differentiated arguments.
      outputs: the number of output elements.
      flops: the floating-point operations of both modes as counted by XLA; None if the sizes decide, or if only one
        mode is possible.
      why: the reason, as a sentence.
      colors: the numbers of products in forward and in reverse mode for a sparse Jacobian; None for a dense one.
    """

    mode: str
    inputs: int
    outputs: int
    flops: dict[str, float] | None
    why: str
    colors: tuple[int, int] | None = None


# A function from a transform's name, a call, and the number of slices to compute at a time, to the output, the blocks
# (for each output array one for each input array), and the `rest` of the call.
Compute = Callable[[str, Call, int | None], tuple[Any, list[list[Any]], Any]]


class Evaluator(NamedTuple):
    """A method to compute a Jacobian.

    Attributes:
      compute: the function that computes it.
      slices: a function that returns the number of columns, rows or products, the largest possible chunk.
    """

    compute: Compute
    slices: Callable[[], int]


def product_in(mode: str, call: Call) -> Callable[[Any, Any], Any]:
    """Return a function of primals and tangents (in reverse mode, cotangents): the product with the Jacobian."""

    def fun(*primals: Any) -> Any:
        return call(*primals)[0]

    if mode == "forward":
        return lambda primals, tangents: jax.jvp(fun, primals, tangents)[1]
    return lambda primals, cotangents: jax.vjp(fun, *primals)[1](cotangents)


def refusal(product: Callable[[Any], Any], vectors: Any) -> Exception | None:
    """Return the error of JAX if it cannot compute a product of a derivative with vectors like these, or None."""
    try:
        try:
            # Under `vmap`, as in the Jacobian, because some rules are missing only for a mapped derivative. Without it,
            # forward mode of a `jax.custom_vjp` inside of a `jit` would raise only when that is compiled.
            jax.eval_shape(jax.vmap(product), jax.tree.map(_batch_of_one, vectors))
        except NeedsValues:  # test the branch that these values take
            product(jax.tree.map(jnp.zeros_like, vectors))
    except _NO_DERIVATIVE as error:
        return error
    return None


def forward_or(reverse: Callable[[], R], forward: Callable[[], R], product: Callable[[Any], Any], vectors: Any) -> R:
    """Return `forward()`, or `reverse()` if forward mode cannot differentiate a function (with a `jax.custom_vjp`).

    Outside of transforms JAX raises at once, so that the function runs once. Inside of a `jit` it might raise only when
    the program is compiled, so the product that `forward` needs is traced before.

    Args:
      reverse: computes the same in reverse mode.
      forward: computes a result in forward mode.
      product: a product in forward mode.
      vectors: its argument.
    """
    if inside_a_transform():
        return forward() if refusal(product, vectors) is None else reverse()
    try:
        return forward()
    except (TypeError, NotImplementedError) as refused:
        try:
            return reverse()
        except (TypeError, NotImplementedError):
            raise refused from None


def refused_modes(call: Call, out: Any) -> dict[str, str]:
    """Return the mode that cannot differentiate this call, if any, with the reason; raise if neither mode can."""
    if not call.holomorphic:
        if not all(jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in jax.tree.leaves(call.primals)):
            return {"forward": "forward mode needs real arguments"}
        if any(jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in jax.tree.leaves(out)):
            return {"reverse": "the output is complex, but reverse mode needs real outputs"}
    errors: dict[str, Exception] = {}
    for mode, vectors in (("forward", call.primals), ("reverse", out)):
        if (error := refusal(partial(product_in(mode, call), call.primals), vectors)) is not None:
            errors[mode] = error
    if len(errors) == 2:
        raise errors["forward"]
    return {mode: f"{mode} mode cannot differentiate it: {error}" for mode, error in errors.items()}


def in_cheaper_mode(api: str, call: Call, compute: Callable[[str], Any], origin: tuple[Any, Any] | None = None) -> Any:
    """Return the result of `compute` in the cheaper mode, which is chosen again if the remembered one fails.

    Values that `fun` takes or closes over can make the remembered mode impossible: `fun` takes another branch, or its
    output is now complex.

    Args:
      api: the transform's name in errors.
      call: the call to differentiate.
      compute: a function of a mode.
      origin: as for `jacobian_of`.
    """
    fun, made = origin or (call.fun, None)
    # The list that is cached for such calls: empty, or with the previous choice.
    choices = call.remembered(fun, made)
    remembered = choices[:]
    choices[:] = remembered or [choose_mode(api, call)]
    try:
        return compute(choices[0].mode)
    except _NO_DERIVATIVE:
        if not remembered:
            raise
        choices[:] = [choose_mode(api, call)]
        if choices[0].mode == remembered[0].mode:
            raise
    return compute(choices[0].mode)


def choose_mode(api: str, call: Call) -> ModeChoice:
    """Choose the only possible mode, or else the cheaper one by sizes, or by the operations that XLA counts."""
    out = output_shapes(api, call)
    inputs, outputs = sum(sizes_of(call.primals)), sum(sizes_of(out))
    choice = partial(ModeChoice, inputs=inputs, outputs=outputs, flops=None)
    refused = refused_modes(call, out)
    for mode, other in (("forward", "reverse"), ("reverse", "forward")):
        if other in refused:
            return choice(mode, why=refused[other])
    first = "reverse" if outputs < inputs else "forward"
    few, many = sorted((inputs, outputs))
    if many >= _DECISIVE * few:
        return choice(first, why=f"input size {inputs}, output size {outputs}")
    flops: dict[str, float] = {}
    try:
        for mode, compute in DENSE.items():
            # Counted in the lowered program: nothing is compiled or run.
            flops[mode] = flops_of(lower_apart(partial(compute, api, call, None))[0])
    except NeedsValues:
        return choice(first, why=f"fun branches on values; {inputs} inputs, {outputs} outputs")
    if abs(flops["reverse"] - flops["forward"]) <= _TIE * max(flops.values()):
        # Reverse mode keeps values of each step of a loop, forward mode a tangent for each input.
        if (steps := _steps(call)) > inputs:
            why = f"about equally many operations; reverse mode would store values of {steps} steps of a loop"
            return choice("forward", flops=flops, why=why)
        # The rows of reverse mode are contiguous in memory, while the columns of forward mode are strided.
        why = "about equally many operations; reverse mode writes contiguous rows"
        return choice("reverse", flops=flops, why=why)
    return choice(min(flops, key=flops.__getitem__), flops=flops, why="XLA counts fewer operations")


def _steps(call: Call) -> int:
    """Return the number of iterations of the longest loop of known length in a function; 0 if there is none."""
    closed = jax.make_jaxpr(lambda *primals: call(*primals)[0])(*call.primals)
    return max((eqn.params["length"] for eqn in with_inner(closed.eqns) if eqn.primitive.name == "scan"), default=0)


def _batch_of_one(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of an array with a leading axis of size 1, sharded as the array is."""
    kind = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    spec, sharding = getattr(kind.sharding, "spec", ()), None
    if any(spec):  # sharded over explicit axes of a mesh, which is part of the type
        sharding = NamedSharding(kind.sharding.mesh, PartitionSpec(None, *spec))
    return jax.ShapeDtypeStruct((1, *kind.shape), kind.dtype, sharding=sharding)


def output_shapes(api: str, call: Call) -> Any:
    """Return the output as shapes, or as arrays if `fun` branches on values."""
    try:
        out = jax.eval_shape(lambda: call(*call.primals)[0])
    except NeedsValues:
        out = jax.tree.map(jnp.asarray, call(*call.primals)[0])
    check_output(api, out)
    return out


def dense_evaluator(api: str, call: Call, mode: str, row_axis: int = 0) -> Evaluator:
    """Return the `Evaluator` of a dense Jacobian in one mode.

    Args:
      api: the transform's name in errors.
      call: the call to differentiate.
      mode: "forward" or "reverse".
      row_axis: as for `by_rows`.
    """
    if mode == "forward":
        return Evaluator(by_columns, lambda: max([1, *sizes_of(call.primals)]))
    return Evaluator(partial(by_rows, axis=row_axis), lambda: max([1, *sizes_of(output_shapes(api, call))]))
