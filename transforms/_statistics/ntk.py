"""`empirical_ntk` and `ntk_vp`: the empirical neural tangent kernel of a model, and its products with vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .._calls.call import Call
from .._core.arguments import Argnums, check_argnums, describe, is_int, wrap_like
from .._models.split_model import separate_filters
from ..privacy._per_example.loss import PerExample, on_any_mesh, per_example
from ..privacy._per_example.methods import MethodChoice
from ..privacy._per_example.report import Report
from .inner_products import products, traces
from .statistic import Chunks, Statistic, for_pairs, other_examples, report_of
from .use_gradients import OutputGradients, for_each_output, use_gradients


def empirical_ntk(
    apply: Callable[..., Any],
    argnums: Argnums = 0,
    *,
    trace: bool = False,
    diagonal_axes: int | Sequence[int] = (),
    keep_batch_dim: bool = True,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
) -> Statistic[Report]:
    """Compute the empirical neural tangent kernel of a model: inner products of the gradients of its outputs.

    Args:
      apply: a function of parameters and, after them, a batch with the samples along axis 0, that returns the outputs,
        shape (n, *out): a function or a bound method.
      argnums: the parameters, as for `per_sample_grad`; the batch is the next argument.
      trace: whether to return the trace over all outputs, divided by their number.
      diagonal_axes: axes of `out`, for which only equal positions are compared.
      keep_batch_dim: whether `apply` receives each sample as a batch of one; with False, without that axis.
      chunk_size: the number of samples of each batch to compute at a time. Each chunk is computed again for every chunk
        of the other batch.
      memory_budget: bytes, or a string as for `vmap`: the largest chunk whose compiled temporaries fit.

    Returns:
      A function of (params, x1, x2=None) that returns the kernel in float32 or wider, shape (n1, n2, *out, *out), with
      the outputs for x1 first; without x2 for all pairs of x1. With `trace` its shape is (n1, n2). With
      `diagonal_axes` the second `out` lacks these axes. Its `.explain(*args)` reports the form of the gradients at each
      parameter use.

    Raises:
      TypeError, ValueError: as for `per_sample_grad`; outputs that are no real floating-point array with the samples
        along axis 0; axes that are out of range or named twice, or together with `trace`; samples of `x2` whose shapes
        or dtypes differ from those of `x1`.

    Cost:
      One forward pass of each batch, and a backward pass for each output. At each parameter use the cheapest of three
      ways is taken, counted from shapes: inner products of activations and of cotangents, products of one with the
      other, or Jacobians of some rows of the parameter at a time.

    Source:
      Novak et al. 2022, "Fast Finite Width Neural Tangent Kernel"; `neural_tangents.empirical_ntk_fn`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import empirical_ntk
      >>> x = jnp.array([[1.0, 2.0], [0.0, 1.0], [1.0, 1.0]])
      >>> empirical_ntk(lambda w, x: x @ w, trace=True)(jnp.ones((2, 4)), x, x[:2])
      Array([[5., 2.],
             [2., 1.],
             [3., 1.]], dtype=float32)
    """
    api = "empirical_ntk"
    position = 1 + max(check_argnums(api, separate_filters(argnums)[0]))
    of_call = partial(per_example(api, apply, argnums, position), scalar=False)
    chunks = Chunks(api, chunk_size, memory_budget, pairs=True)
    axes = diagonal_axes if isinstance(diagonal_axes, (tuple, list)) else (diagonal_axes,)
    if not all(map(is_int, axes)):
        raise TypeError(f"{api}: diagonal_axes must be an int or a tuple of ints, but got {diagonal_axes!r}.")
    if trace and axes:
        raise ValueError(f"{api}: trace=True sums over all outputs; leave diagonal_axes={diagonal_axes!r} out.")

    def prepare(args: Any, other: Any) -> tuple[PerExample, Callable[[MethodChoice], Any]]:
        """Return the outputs of a call, and a function that computes the kernel by a route."""
        if len(args) == position + 2 and other is None:
            *args, other = args
        if len(args) != position + 1:
            expected = "the parameters, a batch x1, and optionally another batch x2"
            raise TypeError(f"{api}: pass {expected}; {len(args)} arguments came.")
        again = partial(of_call, False, keep_batch_dim, None)
        of = again(tuple(args), {})
        second = None if other is None else other_examples(api, of, again, args, {position: other})
        out = of.program.closed.out_avals[0]
        kernel = _Kernel(out.shape, out.dtype, trace, _axes_of(api, axes, len(out.shape)))

        def compute(route: MethodChoice) -> Any:
            def gradients(examples: Sequence[Any]) -> list[OutputGradients]:
                return kernel.gradients(of, examples, route)

            return for_pairs(gradients, kernel.pairs, of.examples, second, route)

        return of, compute

    def ntk(*args: Any, x2: Any = None) -> jax.Array:
        """Return the kernel for these arguments."""
        of, compute = prepare(args, x2)
        return chunks.results(of, compute)

    def explain(*args: Any, x2: Any = None) -> Any:
        """Return the report for these arguments."""
        of, compute = prepare(args, x2)
        return report_of(of, chunks, compute)

    on_mesh = on_any_mesh(api, apply, position, ntk)
    return Statistic(wrap_like(apply, api, on_mesh), on_any_mesh(api, apply, position, explain))


def _axes_of(api: str, axes: Sequence[int], ndim: int) -> tuple[int, ...]:
    """Return axes of the outputs as numbers from 0 on."""
    found = tuple(axis % ndim if -ndim <= axis < ndim else ndim for axis in axes)
    if ndim in found or len({*found}) < len(found):
        raise ValueError(f"{api}: diagonal_axes={tuple(axes)} must be different axes of outputs with {ndim} axes.")
    return tuple(sorted(found))


class _Kernel:
    """The kernel between the outputs of two batches.

    Args:
      shape: the shape of the outputs for one example.
      dtype: their dtype.
      trace: whether only the mean over equal outputs is computed.
      diagonal: the axes of the outputs for which only equal positions are compared.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, trace: bool, diagonal: tuple[int, ...]) -> None:
        self._shape, self._dtype, self._trace = shape, dtype, trace
        # Outputs are ordered with the axes on the diagonal first.
        self._order = (*diagonal, *(axis for axis in range(len(shape)) if axis not in diagonal))
        self._equal = math.prod(shape[axis] for axis in diagonal)
        self._diagonal = len(diagonal)

    def gradients(self, of: PerExample, examples: Sequence[Any], route: MethodChoice) -> list[OutputGradients]:
        """Return the gradients of all outputs for some examples."""
        ordered = tuple(self._shape[axis] for axis in self._order)
        back = [self._order.index(axis) for axis in range(len(ordered))]

        def of_seed(seed: jax.Array) -> Any:
            return use_gradients(of, examples, route, seed=seed.reshape(ordered).transpose(back))

        return for_each_output(of_seed, math.prod(ordered), self._dtype, mapped=route.method != "vmap")

    def pairs(self, one: list[OutputGradients], other: list[OutputGradients] | None) -> jax.Array:
        """Return the kernel between two batches; `other` is None if they are the same."""
        total: Any = 0.0
        for i, part in enumerate(one):
            total = total + self._at_use(part, None if other is None else other[i])
        sizes = [self._shape[axis] for axis in self._order]
        if self._trace:
            return total / max(1, math.prod(sizes))
        n, m = total.shape[1:3]
        equal, rest = sizes[: self._diagonal], sizes[self._diagonal :]
        outputs = math.prod(rest)
        # Where no gradient reaches any use, the kernel has no axes of outputs.
        total = jnp.broadcast_to(total, (self._equal, n, m, outputs, outputs))
        found = total.reshape(*equal, n, m, *rest, *rest)
        start = len(equal)
        # The axes of the first outputs in their own order, then those of the second without the diagonal.
        first = [axis if axis < start else axis + 2 for axis in map(self._order.index, range(len(sizes)))]
        return found.transpose(start, start + 1, *first, *range(found.ndim - len(rest), found.ndim))

    def _at_use(self, one: OutputGradients, other: OutputGradients | None) -> jax.Array:
        """Return the kernel at a use: shape (equal outputs, n, m, outputs, outputs); (n, m) for the trace."""
        if self._trace:
            return traces(one, other)
        if self._equal == 1 or not any(one.has_outputs):
            return products(one, other)[None]

        # Map over equal outputs: those on the diagonal, which are in front.
        def split(part: OutputGradients) -> list[jax.Array]:
            return [
                x.reshape(x.shape[0], self._equal, -1, *x.shape[2:]) if has else x
                for x, has in zip(part.arrays, part.has_outputs, strict=True)
            ]

        axes = [1 if has else None for has in one.has_outputs]
        if other is None:
            return jax.vmap(lambda x: products(one._replace(arrays=x), None), (axes,))(split(one))
        second = other
        return jax.vmap(
            lambda x, y: products(one._replace(arrays=x), second._replace(arrays=y)),
            (axes, [1 if has else None for has in second.has_outputs]),
        )(split(one), split(second))


def ntk_vp(apply: Callable[..., Any], argnums: Argnums = 0) -> Callable[..., jax.Array]:
    """Multiply the empirical neural tangent kernel of a model with a vector, without computing the kernel.

    Args:
      apply: as for `empirical_ntk`.
      argnums: as for `empirical_ntk`.

    Returns:
      A function of (params, x, v) that returns K v for the kernel K of the batch x: v has the shape (n, *out) and the
      dtype of the outputs, and so has the result.

    Raises:
      TypeError, ValueError: as for `empirical_ntk`; a `v` of another shape or dtype than the outputs.

    Cost:
      A forward and a backward pass of the batch, and one tangent; the memory of one gradient. Under `jax.jit`, products
      with several vectors (`jax.vmap` over v) share the forward pass.

    Source:
      Novak et al. 2022, "Fast Finite Width Neural Tangent Kernel", section 3.2; `jax.vjp` and `jax.jvp`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import ntk_vp
      >>> ntk_vp(lambda w, x: x @ w)(jnp.ones(2), jnp.array([[3.0, 4.0], [0.0, 1.0]]), jnp.array([1.0, 0.0]))
      Array([25.,  4.], dtype=float32)
    """
    api = "ntk_vp"
    plain, filters = separate_filters(argnums)
    positions = check_argnums(api, plain)

    def product(*args: Any) -> jax.Array:
        """Return the product for these arguments."""
        if len(args) != max(positions) + 3:
            raise TypeError(f"{api}: pass the parameters, a batch x and a vector v; {len(args)} arguments came.")
        call = Call(api, apply, positions, False, args[:-1], {}, integers=True, filters=filters)
        call.check_floating(complex_too=False)
        out, push = jax.linearize(lambda *primals: call.evaluate(primals, {}, {})[0], *call.primals)
        v = jnp.asarray(args[-1])
        if not isinstance(out, jax.Array) or not jnp.issubdtype(out.dtype, jnp.floating):
            raise TypeError(
                f"{api}: fun must return a real floating-point array of outputs, but it returned {describe(out)}."
            )
        if (v.shape, v.dtype) != (out.shape, out.dtype):
            raise ValueError(f"{api}: v is {describe(v)}, but the outputs are {describe(out)}; they must agree.")
        return push(*jax.linear_transpose(push, *call.primals)(v))

    return wrap_like(apply, api, product)
