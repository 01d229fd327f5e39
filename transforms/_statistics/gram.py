"""`per_sample_gram`: the inner products of the gradients of all pairs of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

from .._core.arguments import Argnums, describe, wrap_like
from ..privacy._per_example.loss import PerExample, on_any_mesh, per_example
from ..privacy._per_example.methods import MethodChoice
from ..privacy._per_example.report import Report
from .inner_products import products
from .statistic import Chunks, Statistic, for_pairs, other_examples, report_of
from .use_gradients import UseGradients, for_one_output, use_gradients


def per_sample_gram(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    *,
    batch_argnums: Argnums = 1,
    keep_batch_dim: bool = True,
    per_leaf: bool = False,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
) -> Statistic[Report]:
    """Compute the inner products of the gradients of all pairs of samples of a batch, without holding the gradients.

    Args:
      fun: as for `per_sample_grad`.
      argnums: as for `per_sample_grad`; inner products are over all of these arguments.
      batch_argnums: as for `per_sample_grad`.
      keep_batch_dim: as for `per_sample_grad`.
      per_leaf: whether to return the inner products for each parameter separately.
      chunk_size: the number of samples to compute at a time. Each chunk is computed again for every other chunk.
      memory_budget: bytes, or a string as for `vmap`: the largest chunk whose compiled temporaries fit.

    Returns:
      A function of the same arguments that returns the Gram matrix, shape (batch, batch), in float32 or wider. With
      `other=`, a tuple of the arguments at `batch_argnums` for another batch, it returns the inner products between
      both, shape (batch, other batch). With `per_leaf` it returns a pytree of matrices like the parameters. Its
      `.explain(*args)` reports the form of the gradients at each parameter use.

    Raises:
      TypeError, ValueError: as for `per_sample_grad`; an `other` that is no tuple of as many arguments, or whose
        samples have other shapes or dtypes.

    Cost:
      One forward and one backward pass of each batch, and the products of activations and of cotangents. If a matrix is
      used at many positions, some rows of each gradient at a time are materialized where that takes fewer operations.
      Gradients are held, batch times their size, where no smaller form determines them; `explain` reports this.

    Source:
      `batch_dot` of BackPACK; Novak et al. 2022, "Fast Finite Width Neural Tangent Kernel".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import per_sample_gram
      >>> per_sample_gram(lambda w, x: jnp.sum(x @ w))(jnp.ones(2), jnp.array([[3.0, 4.0], [0.0, 1.0]]))
      Array([[25.,  4.],
             [ 4.,  1.]], dtype=float32)
    """
    api = "per_sample_gram"
    of_call = per_example(api, fun, argnums, batch_argnums)
    chunks = Chunks(api, chunk_size, memory_budget, pairs=True)
    batched = batch_argnums if isinstance(batch_argnums, (tuple, list)) else (batch_argnums,)
    bare = not isinstance(argnums, (tuple, list))

    def prepare(args: Any, other: Any, kwargs: Any) -> tuple[PerExample, Callable[[MethodChoice], Any]]:
        """Return the loss of a call, and a function that computes the matrices by a route."""
        of = of_call(False, keep_batch_dim, None, args, kwargs)
        second = None if other is None else examples_of(of, args, other, kwargs)

        def compute(route: MethodChoice) -> list[Any]:
            def gradients(examples: Sequence[Any]) -> list[UseGradients]:
                return use_gradients(of, examples, route, per_leaf=per_leaf)

            added = partial(_added, leaves=len(of.parameters) if per_leaf else None)
            return for_pairs(gradients, added, of.examples, second, route)

        return of, compute

    def examples_of(of: PerExample, args: Sequence[Any], other: Any, kwargs: Any) -> list[Any]:
        """Return the examples of the other batch."""
        if kwargs:
            raise ValueError(f"{api}: other has no keyword arguments; pass the batch by position.")
        if not isinstance(other, (tuple, list)) or len(other) != len(batched):
            expected = f"a tuple with {len(batched)} argument{'s' * (len(batched) > 1)}, as batch_argnums names"
            raise TypeError(f"{api}: other must be {expected}, but got {describe(other)}.")
        again = partial(of_call, False, keep_batch_dim, None)
        return other_examples(api, of, again, args, dict(zip(batched, other, strict=True)))

    def gram(*args: Any, other: Any = None, **kwargs: Any) -> Any:
        """Return the inner products for these arguments."""
        of, compute = prepare(args, other, kwargs)
        found = chunks.results(of, compute)
        return of.gradients(found, bare) if per_leaf else found[0]

    def explain(*args: Any, other: Any = None, **kwargs: Any) -> Any:
        """Return the report for these arguments."""
        of, compute = prepare(args, other, kwargs)
        return report_of(of, chunks, compute)

    on_mesh = on_any_mesh(api, fun, batch_argnums, gram)
    return Statistic(wrap_like(fun, api, on_mesh), on_any_mesh(api, fun, batch_argnums, explain))


def _added(one: list[UseGradients], other: list[UseGradients] | None, leaves: int | None) -> list[Any]:
    """Add up the inner products at all uses, for each of so many parameters; if None, for all together."""
    totals: list[Any] = [0.0] * (leaves or 1)
    for i, part in enumerate(one):
        second = None if other is None else for_one_output(other[i].form)
        found = products(for_one_output(part.form), second)[:, :, 0, 0]
        place = 0 if leaves is None else min(part.leaves)
        totals[place] = totals[place] + found
    shape = len(one[0].form[0]), len((other or one)[0].form[0])
    return [jnp.zeros(shape, jnp.float32) if isinstance(total, float) else total for total in totals]
