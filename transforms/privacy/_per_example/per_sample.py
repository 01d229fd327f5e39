"""`per_sample_grad` and `per_sample_norm`: the gradient of each sample of a batch, and its norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.arguments import Argnums, check_count, wrap_like
from ..._core.memory import check_budget
from ..._vmap import vmap_of
from .budget import within_budget
from .loss import on_any_mesh, per_example
from .methods import (
    Backward,
    Method,
    MethodChoice,
    check_method,
    each_gradient,
    first_that_traces,
    in_groups,
    routes,
)

P = ParamSpec("P")


def per_sample_grad(
    fun: Callable[P, Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    batch_argnums: Argnums = 1,
    keep_batch_dim: bool = True,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
) -> Callable[P, Any]:
    """Compute the gradient of a loss at each sample of a batch.

    Args:
      fun: a loss that takes parameters and a batch and returns a real scalar: a function, a bound method or a module.
      argnums: the parameters, as for `grad`: arrays, pytrees of arrays, or modules. Leaves that are not floating point,
        such as a counter or an index, are passed to `fun` unchanged; their gradient is None.
      has_aux: whether `fun` returns `(loss, aux)`; the result is then `(gradients, aux)`.
      batch_argnums: the arguments with the samples along axis 0. All other positional arguments are shared; keyword
        arguments are split along axis 0 too.
      keep_batch_dim: whether `fun` receives each sample as a batch of one; with False, without that axis.
      chunk_size: the number of samples to compute at a time.
      memory_budget: as for `vmap`, with the same warning.

    Returns:
      A function of the same arguments that returns the gradients, in the structure of the parameters, each of shape
      (batch, *parameter).

    Raises:
      TypeError: `fun` does not return a real scalar; parameters that are not real floating point; argnums of a wrong
        type.
      ValueError: argnums that are empty, negative, out of range, or also in `batch_argnums`; batch sizes that differ; a
        module whose state `fun` changes; options as for `vmap`; in a `jax.shard_map`, a loss that combines devices.

    Cost:
      Memory for batch times parameters, the size of the result. `per_sample_norm` and `clipped_grad` compute norms and
      clipped sums without it.

    Source:
      `torch.func.vmap(torch.func.grad(...))`; PyTorch's tutorial on per-sample gradients.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import per_sample_grad
      >>> per_sample_grad(lambda w, x: jnp.mean((x @ w) ** 2))(jnp.ones(2), jnp.array([[1.0, 2.0], [3.0, 4.0]]))
      Array([[ 6., 12.],
             [42., 56.]], dtype=float32)
    """
    of_call = per_example("per_sample_grad", fun, argnums, batch_argnums)
    check_count("per_sample_grad", "chunk_size", chunk_size, optional=True)
    check_budget("per_sample_grad", memory_budget, chunk_size)

    def gradients(*args: Any, **kwargs: Any) -> Any:
        """Return the gradient of each example of these arguments."""
        of = of_call(has_aux, keep_batch_dim, None, args, kwargs)
        in_chunks = chunk_size is not None or memory_budget is not None

        def each(route: MethodChoice) -> tuple[Any, Any]:
            """Return the gradients and the auxiliary output of the loss, computed by a route."""
            one = jax.grad(of.loss, has_aux=True)
            if route.examples < of.size:
                return lax.map(lambda example: one(of.parameters, example), of.examples)
            if in_chunks:
                limits: Any = {"chunk_size": chunk_size, "memory_budget": memory_budget}
                return vmap_of("per_sample_grad", one, (None, 0), **limits)(of.parameters, of.examples)
            (_, aux), leaves = each_gradient(of, of.examples)
            return leaves, aux

        candidates = routes(of, MethodChoice("vmap", of.size, ""))
        # `each_gradient` avoids a convolution that XLA miscomputes on several devices, but chunks do not use it.
        if in_chunks and jax.device_count() > 1 and of.program.mapped_wrongly():
            candidates = candidates[-1:]
        leaves, aux = first_that_traces("per_sample_grad", candidates, each)[1]
        found = of.gradients(leaves, not isinstance(argnums, (tuple, list)))
        return (found, of.aux(aux)) if has_aux else found

    return wrap_like(fun, "per_sample_grad", on_any_mesh("per_sample_grad", fun, batch_argnums, gradients))


def per_sample_norm(
    fun: Callable[P, Any],
    argnums: Argnums = 0,
    *,
    batch_argnums: Argnums = 1,
    keep_batch_dim: bool = True,
    method: Method = "auto",
    memory_budget: int | str | None = None,
) -> Callable[P, jax.Array]:
    """Compute the norm of the gradient of a loss at each sample of a batch.

    Args:
      fun: as for `per_sample_grad`.
      argnums: as for `per_sample_grad`; the norm is the joint norm over all of these arguments.
      batch_argnums: as for `per_sample_grad`.
      keep_batch_dim: as for `per_sample_grad`.
      method: as for `clipped_grad`; all methods other than "vmap" are the same here: norms inside the backward pass.
      memory_budget: bytes, or a string as for `vmap`: the largest group of samples whose compiled temporaries fit is
        computed at a time.

    Returns:
      A function of the same arguments that returns the norms, shape (batch,), in float32 or wider.

    Raises:
      TypeError, ValueError: as for `per_sample_grad`; an unknown method; no group of samples fits into
        `memory_budget`.

    Cost:
      About one forward and one backward pass of the batch. Gradients are materialized only where no smaller form
      determines their norm.

    Rounding:
      A norm from such a form is a sum of inner products, as accurate as the rounding error of the largest of them: if a
      whole gradient cancels, up to a thousandth of the norm of its terms may remain. "vmap" takes norms of materialized
      gradients instead.

    Source:
      Goodfellow 2015, "Efficient Per-Example Gradient Computations"; Li et al. 2022, "Large Language Models Can Be
      Strong Differentially Private Learners" (ghost clipping).

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import per_sample_norm
      >>> per_sample_norm(lambda w, x: jnp.sum(x @ w))(jnp.ones(2), jnp.array([[3.0, 4.0], [0.0, 1.0]]))
      Array([5., 1.], dtype=float32)
    """
    of_call = per_example("per_sample_norm", fun, argnums, batch_argnums)
    check_method("per_sample_norm", method)
    budget = check_budget("per_sample_norm", memory_budget, None)
    # With only norms to compute there is no second pass, and the methods other than "vmap" take the same time.
    method = "vmap" if method == "vmap" else "ghost"

    def norms(*args: Any, **kwargs: Any) -> jax.Array:
        """Return the norm of the gradient of each example of these arguments."""
        of = of_call(False, keep_batch_dim, None, args, kwargs)

        def squares(route: MethodChoice) -> jax.Array:
            def of_some(examples: list[Any], _: Any) -> tuple[Any, jax.Array]:
                return (), Backward(of, examples, route).squares

            return in_groups(of_some, of.examples, jnp.zeros(of.size, bool), route.examples, ())[1]

        choice = MethodChoice(method, of.size, "")
        if budget is not None and of.size:
            choice = within_budget("per_sample_norm", of.program, (method,), of.size, None, squares, budget)
        return jnp.sqrt(first_that_traces("per_sample_norm", routes(of, choice), squares)[1])

    return wrap_like(fun, "per_sample_norm", on_any_mesh("per_sample_norm", fun, batch_argnums, norms))
