"""`per_sample_grad` and `per_sample_norm`: the gradient of each sample, and its norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.arguments import Argnums, check_count, wrap_like
from ..._core.memory import check_budget
from ..._vmap import vmap_of
from .loss import on_any_mesh, per_example
from .methods import Backward, Method, MethodChoice, check_method, each_gradient, first_that_traces, routes

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
    """Take the gradient of a loss at each sample of a batch.

    Args:
      fun: a loss of parameters and of a batch that returns a real scalar; a function, a bound method or a module.
      argnums: the parameters, as for `grad`: arrays, pytrees of them, or modules. Leaves that are not of floating
        point, such as a counter or an index, go to `fun` as they are, and None is their gradient.
      has_aux: whether `fun` returns `(loss, aux)`; the result is then `(gradients, aux)`.
      batch_argnums: the arguments that have the samples along axis 0. All others are shared; keyword arguments are
        split along axis 0 too.
      keep_batch_dim: whether `fun` gets each sample as a batch of one (else without that axis).
      chunk_size: how many samples to compute at a time.
      memory_budget: as for `vmap`, with its warning.

    Returns:
      A function of the same arguments that returns the gradients, like the parameters with the samples along axis 0.

    Raises:
      TypeError: `fun` returns no real scalar; parameters that are not real floating point; argnums of a wrong type.
      ValueError: argnums empty, negative, out of range or in both places; sizes that differ; a module whose state
        `fun` changes; options as for `vmap`.

    Cost:
      Memory for batch times parameters, which is what it returns. For norms and clipped sums see `per_sample_norm` and
      `clipped_grad`, which need none of it.

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
            """Return the gradients and what the loss returns in addition, computed by a route."""
            one = jax.grad(of.loss, has_aux=True)
            if route.examples < of.size:
                return lax.map(lambda example: one(of.parameters, example), of.examples)
            if in_chunks:
                limits: Any = {"chunk_size": chunk_size, "memory_budget": memory_budget}
                return vmap_of("per_sample_grad", one, (None, 0), **limits)(of.parameters, of.examples)
            (_, aux), leaves = each_gradient(of, of.examples)
            return leaves, aux

        candidates = routes(of, MethodChoice("vmap", of.size, ""))
        # `each_gradient` works around what XLA maps wrongly, but chunks do not pass through it.
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
) -> Callable[P, jax.Array]:
    """Take the norm of a loss's gradient at each sample of a batch.

    Args:
      fun: as for `per_sample_grad`.
      argnums: as for `per_sample_grad`; the norm is that over all of them together.
      batch_argnums: as for `per_sample_grad`.
      keep_batch_dim: as for `per_sample_grad`.
      method: as for `clipped_grad`; all but "vmap" are the same here.

    Returns:
      A function of the same arguments that returns the norms, shape (batch,), of float32 or wider.

    Raises:
      TypeError, ValueError: as for `per_sample_grad`; an unknown method.

    Cost:
      About a forward and a backward pass of the batch; no sample's gradient is held where its norm has a shorter form.

    Rounding:
      Such a norm is a sum of inner products, so it is as close as the rounding of the largest of them: where all of a
      gradient cancels, up to a thousandth of the norm of its terms may be left. With "vmap" each gradient is held.

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

    def norms(*args: Any, **kwargs: Any) -> jax.Array:
        """Return the norm of the gradient of each example of these arguments."""
        of = of_call(False, keep_batch_dim, None, args, kwargs)

        def squares(route: MethodChoice) -> jax.Array:
            if route.examples == of.size:
                return Backward(of, of.examples, route.method).squares
            return lax.map(lambda one: Backward(of, [x[None] for x in one], route.method).squares[0], of.examples)

        return jnp.sqrt(first_that_traces("per_sample_norm", routes(of, MethodChoice(method, of.size, "")), squares)[1])

    return wrap_like(fun, "per_sample_norm", on_any_mesh("per_sample_norm", fun, batch_argnums, norms))
