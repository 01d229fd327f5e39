"""`per_sample_projection` and `per_sample_jvp`: per-sample gradients along random directions, and along a given one.

A direction for a parameter of shape (..., b) is a product u vᵀ of random signs u of shape (...) and v of shape (b,).
For activations A and cotangents G its inner product with the gradient is ⟨A u, G v⟩: the gradient is not needed. As the
signs are independent, the expectation of ⟨g, u vᵀ⟩⟨h, u vᵀ⟩ is ⟨g, h⟩, as with a dense random matrix.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._calls.call import Call
from .._core.arguments import Argnums, check_argnums, check_count, wrap_like
from .._core.prng import check_key
from .._models.split_model import separate_filters
from ..privacy._per_example.gradient_forms import Dense, OuterProduct, RowSparse, wide, widened, without_transposes
from ..privacy._per_example.loss import PerExample, on_any_mesh, per_example
from ..privacy._per_example.methods import MethodChoice
from ..privacy._per_example.perturbations import operands
from ..privacy._per_example.report import Report
from .inner_products import vectors
from .statistic import Chunks, Statistic, in_chunks, report_of
from .use_gradients import UseGradients, for_one_output, use_gradients

# The most numbers of the arrays for some directions at a time.
_TEMPORARY = 2**22


def per_sample_projection(
    fun: Callable[..., Any],
    dim: int,
    argnums: Argnums = 0,
    *,
    batch_argnums: Argnums = 1,
    keep_batch_dim: bool = True,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
) -> Statistic[Report]:
    """Project the gradient of each sample to `dim` random directions, without holding the gradients.

    Args:
      fun: as for `per_sample_grad`.
      dim: the number of directions.
      argnums: as for `per_sample_grad`.
      batch_argnums: as for `per_sample_grad`.
      keep_batch_dim: as for `per_sample_grad`.
      chunk_size: the number of samples to compute at a time.
      memory_budget: bytes, or a string as for `vmap`: the largest chunk whose compiled temporaries fit.

    Returns:
      A function of a key and then the same arguments that returns the projections, shape (batch, dim), in float32 or
      wider. The same key gives the same linear map of the gradients, whatever the batch, the chunks and `fun`, as long
      as the shapes of the parameters are equal. Inner products of projections have the inner products of the gradients
      as their expectation. Their relative standard deviation is at most about (8 / dim)^½ for one matrix, and nearer
      (2 / dim)^½ for many. Its `.explain(key, *args)` reports the form of the gradients at each parameter use.

    Raises:
      TypeError, ValueError: as for `per_sample_grad`; a key that is none; a `dim` that is no positive int.

    Cost:
      One forward and one backward pass; for each direction and sample two products of vectors per position and matrix.
      If a matrix is a reshaped parameter, or gradients are held, a direction costs one product with the gradient.

    Source:
      Rakhshan and Rabusseau 2020, "Tensorized Random Projections"; Park et al. 2023, "TRAK".

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import per_sample_projection
      >>> projected = per_sample_projection(lambda w, x: jnp.sum(x @ w), 4)
      >>> projected(jax.random.key(0), jnp.ones(2), jnp.array([[3.0, 4.0], [0.0, 1.0], [1.0, 1.0]])).shape
      (3, 4)
    """
    api = "per_sample_projection"
    of_call = per_example(api, fun, argnums, batch_argnums)
    check_count(api, "dim", dim)
    chunks = Chunks(api, chunk_size, memory_budget)

    def prepare(key: Any, args: Any, kwargs: Any) -> tuple[PerExample, Callable[[MethodChoice], Any]]:
        """Return the loss of a call, and a function that computes the projections by a route."""
        of = of_call(False, keep_batch_dim, None, args, kwargs)
        check_key(api, key, "the first argument")
        directions = _Directions(key, dim, [x.shape for x in of.parameters])

        def compute(route: MethodChoice) -> Any:
            def of_some(examples: list[Any]) -> tuple[Any, jax.Array]:
                return (), _projected(of, use_gradients(of, examples, route), directions)

            return in_chunks(of_some, of.examples, route)[1]

        return of, compute

    def project(key: Any, *args: Any, **kwargs: Any) -> jax.Array:
        """Return the projections for these arguments."""
        of, compute = prepare(key, args, kwargs)
        return chunks.results(of, compute)

    def explain(key: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the report for these arguments."""
        of, compute = prepare(key, args, kwargs)
        return report_of(of, chunks, compute)

    positions = [i + 1 for i in (batch_argnums if isinstance(batch_argnums, (tuple, list)) else (batch_argnums,))]
    on_mesh = on_any_mesh(api, fun, positions, project)
    return Statistic(wrap_like(fun, api, on_mesh), on_any_mesh(api, fun, positions, explain))


class _Directions(NamedTuple):
    """Random directions in the space of the parameters.

    Attributes:
      key: the key.
      dim: the number of directions.
      shapes: the shapes of the parameters.
    """

    key: jax.Array
    dim: int
    shapes: list[tuple[int, ...]]

    def signs(self, leaf: int, directions: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Return both factors for a parameter: shapes (directions, *all axes but the last) and (directions, last)."""
        shape = self.shapes[leaf] or (1,)
        key = jax.random.fold_in(self.key, leaf)

        def of_one(direction: jax.Array) -> tuple[jax.Array, jax.Array]:
            left, right = jax.random.split(jax.random.fold_in(key, direction))
            u = jax.random.rademacher(left, shape[:-1], dtype) if len(shape) > 1 else jnp.ones((), dtype)
            return u, jax.random.rademacher(right, shape[-1:], dtype)

        return jax.vmap(of_one)(directions)

    def dense(self, leaf: int, direction: jax.Array, dtype: Any) -> jax.Array:
        """Return one direction for a parameter, with its shape."""
        if jnp.issubdtype(dtype, jnp.complexfloating):  # the imaginary parts are parameters of their own
            real = jnp.finfo(dtype).dtype
            key = jax.random.fold_in(self.key, len(self.shapes))
            return lax.complex(self.dense(leaf, direction, real), self._replace(key=key).dense(leaf, direction, real))
        u, v = self.signs(leaf, direction[None], dtype)
        return (u[0][..., None] * v.reshape(*[1] * u[0].ndim, -1)).reshape(self.shapes[leaf])

    def in_slices(self, compute: Callable[[jax.Array], jax.Array], numbers: int) -> jax.Array:
        """Compute the projections, shape (batch, directions), for some directions at a time.

        Args:
          compute: a function of the numbers of some directions.
          numbers: the size of the temporary arrays for one direction.
        """
        at_once = min(self.dim, max(1, _TEMPORARY // max(1, numbers)))
        count = -(-self.dim // at_once)
        at_once = -(-self.dim // count)
        if count == 1:
            return compute(jnp.arange(self.dim))
        # The last slice repeats some directions, which are cut off.
        found = lax.map(lambda start: compute(start + jnp.arange(at_once)), at_once * jnp.arange(count))
        return found.swapaxes(0, 1).reshape(found.shape[1], -1)[:, : self.dim]


def _projected(of: PerExample, parts: list[UseGradients], directions: _Directions) -> jax.Array:
    """Return the projections of the gradients of some examples."""
    total: Any = jnp.zeros((), jnp.float32)
    others = []
    for part in parts:
        found = _by_factors(of, part, directions)
        if found is None:
            others.append(part)
        else:
            total = total + found
    if others:
        total = total + _by_directions(of, others, directions)
    return total / math.sqrt(directions.dim)


def _by_factors(of: PerExample, part: UseGradients, directions: _Directions) -> jax.Array | None:
    """Return ⟨A u, G v⟩ for a parameter that is used as it is or transposed; None for any other."""
    form = part.form
    if part.use is None or not isinstance(form, OuterProduct) or part.axes is None:
        return None
    if len(part.leaves) != 1 or without_transposes(of.program.uses[part.use])[0] != ():
        return None
    (leaf,) = part.leaves
    shape = of.parameters[leaf].shape
    if not 2 <= len(shape) <= len(string.ascii_uppercase):
        return None
    stack, p, d = part.axes
    left, right = widened(form.left), widened(form.right)
    n, _, positions, _ = left.shape
    sizes = [[shape[axis] for axis in axes] for axes in (stack, p, d)]
    left = left.reshape(n, *sizes[0], positions, *sizes[1])
    right = right.reshape(n, *sizes[0], positions, *sizes[2])
    names = string.ascii_uppercase
    of_stack, of_p, of_d = ("".join(names[axis] for axis in axes) for axes in (stack, p, d))
    leading, last = names[: len(shape) - 1], names[len(shape) - 1]
    sums = f"n{of_stack}t{of_p},n{of_stack}t{of_d},k{leading},k{last}->nk"

    def compute(some: jax.Array) -> jax.Array:
        u, v = directions.signs(leaf, some, left.dtype)
        return jnp.einsum(sums, left, right, u, v, precision="highest", optimize="optimal")

    # One of A u and G v sums over the last axis of the parameter, which leaves the other axes of its side.
    kept = math.prod(shape[axis] for axis in (*stack, *(d if len(shape) - 1 in d else p)) if axis < len(shape) - 1)
    return directions.in_slices(compute, 2 * n * positions * kept + math.prod(shape[:-1]))


def _by_directions(of: PerExample, parts: list[UseGradients], directions: _Directions) -> jax.Array:
    """Return the inner products with one direction at a time: shape (batch, directions)."""
    leaves = sorted(frozenset[int]().union(*(part.leaves for part in parts)))

    def of_one(direction: jax.Array) -> jax.Array:
        return along(of, parts, {i: directions.dense(i, direction, wide(of.parameters[i].dtype)) for i in leaves})

    numbers = sum(math.prod(directions.shapes[i]) for i in leaves)
    return directions.in_slices(lambda some: jax.vmap(of_one, out_axes=1)(some), numbers)


def along(of: PerExample, parts: list[UseGradients], direction: dict[int, jax.Array]) -> jax.Array:
    """Return the inner products of the gradients of some examples with a direction: shape (batch,).

    Args:
      of: the loss.
      parts: the gradients.
      direction: an array like each parameter of `parts`, by its index, in float32 or wider.
    """
    uses = frozenset(part.use for part in parts if part.use is not None)
    given = [direction.get(i, jnp.zeros(x.shape, wide(x.dtype))) for i, x in enumerate(of.parameters)]
    found = operands(of.program.plan, given, uses, wider=True)
    total: Any = 0.0
    for part in parts:
        total = total + _along(part, direction[min(part.leaves)] if part.use is None else found[part.use])
    return total


def _along(part: UseGradients, direction: jax.Array) -> jax.Array:
    """Return the inner product of each example's gradient with a direction like the operand: shape (batch,)."""
    form = part.form
    if isinstance(form, Dense):
        numbers = [direction.real, direction.imag] if jnp.iscomplexobj(direction) else [direction]
        return vectors(for_one_output(form))[:, 0] @ jnp.concatenate([jnp.ravel(x) for x in numbers])
    right = widened(form.right)
    if isinstance(form, RowSparse):
        table = direction.reshape(right.shape[1], form.height, right.shape[3])
        read = table[jnp.arange(len(table))[None, :, None], form.rows]
        return (read * right).sum((1, 2, 3))
    left = widened(form.left)
    matrix = jax.ShapeDtypeStruct((left.shape[1], left.shape[3], right.shape[3]), direction.dtype)
    (arranged,) = jax.linear_transpose(form.restore, matrix)(direction)  # `restore` moves elements
    return jnp.einsum("istp,istd,spd->i", left, right, arranged, precision="highest", optimize="optimal")


def per_sample_jvp(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    *,
    batch_argnums: Argnums = 1,
    keep_batch_dim: bool = True,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
) -> Callable[..., jax.Array]:
    """Compute the inner product of each sample's gradient with one direction, in forward mode.

    Args:
      fun: as for `per_sample_grad`.
      argnums: as for `per_sample_grad`.
      batch_argnums: as for `per_sample_grad`: positions among the arguments of `fun`.
      keep_batch_dim: as for `per_sample_grad`.
      chunk_size: the number of samples to compute at a time.
      memory_budget: bytes, or a string as for `vmap`: the largest chunk whose compiled temporaries fit.

    Returns:
      A function of (params, tangent, *batch): the arguments of `fun`, with the tangent as the second of them. It has
      the structure, shapes and dtypes of the parameters (a tuple of such if `argnums` is one; an `nnx.State` for a
      module, as from `grad`). It returns ⟨gᵢ, tangent⟩ for all samples, shape (batch,).

    Raises:
      TypeError, ValueError: as for `per_sample_grad`; a tangent of another structure, shape or dtype than the
        parameters.

    Cost:
      About two to three evaluations of `fun`, and no memory for residuals.

    Source:
      `jax.jvp`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import per_sample_jvp
      >>> x = jnp.array([[3.0, 4.0], [0.0, 1.0]])
      >>> per_sample_jvp(lambda w, x: jnp.sum(x @ w))(jnp.ones(2), jnp.array([1.0, 0.5]), x)
      Array([5. , 0.5], dtype=float32)
    """
    api = "per_sample_jvp"
    of_call = per_example(api, fun, argnums, batch_argnums)
    chunks = Chunks(api, chunk_size, memory_budget)
    plain, filters = separate_filters(argnums)
    several = isinstance(argnums, (tuple, list))

    def products(*args: Any, **kwargs: Any) -> jax.Array:
        """Return the inner products for these arguments."""
        if len(args) < 2:
            raise TypeError(f"{api}: pass the parameters, a tangent and a batch; {len(args)} arguments came.")
        first, tangent, *rest = args
        of = of_call(False, keep_batch_dim, None, (first, *rest), kwargs)
        call = Call(api, fun, check_argnums(api, plain), False, (first, *rest), {}, integers=True, filters=filters)
        tangents = jax.tree.leaves(call.form.tangents(tuple(tangent) if several else (tangent,)))

        def compute(route: MethodChoice) -> jax.Array:
            def of_one(example: list[Any]) -> jax.Array:
                return jax.jvp(lambda parameters: of.loss(parameters, example)[0], (of.parameters,), (tangents,))[1]

            if route.method == "vmap":
                return lax.map(of_one, of.examples)
            return in_chunks(lambda some: ((), jax.vmap(of_one)(some)), of.examples, route)[1]

        return chunks.results(of, compute)

    positions = [i + (i > 0) for i in (batch_argnums if isinstance(batch_argnums, (tuple, list)) else (batch_argnums,))]
    return wrap_like(fun, api, on_any_mesh(api, fun, positions, products))
