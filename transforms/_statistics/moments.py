"""`per_sample_moments`: the mean, the second moment and the variance of the gradients of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.arguments import Argnums, wrap_like
from ..privacy._per_example.gradient_forms import (
    Dense,
    GradientForm,
    RowSparse,
    magnitudes,
    wide,
    widened,
)
from ..privacy._per_example.loss import PerExample, on_any_mesh, per_example
from ..privacy._per_example.methods import MethodChoice
from ..privacy._per_example.norms import ExampleGradients
from ..privacy._per_example.report import Report
from .statistic import Chunks, Statistic, check_two, in_chunks, report_of
from .use_gradients import at_parameters, of_groups, one_at_a_time


class Moments(NamedTuple):
    """The moments of per-sample gradients, each a pytree like the parameters, in float32 or wider.

    Attributes:
      mean: the mean over samples.
      second_moment: the mean of the squares (of the squared magnitudes, for complex parameters).
      variance: the sample variance, with the divisor batch - 1.
    """

    mean: Any
    second_moment: Any
    variance: Any


def per_sample_moments(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    *,
    batch_argnums: Argnums = 1,
    keep_batch_dim: bool = True,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
) -> Statistic[Report]:
    """Compute the mean, second moment and variance of the gradients of a batch, without holding the gradients.

    Args:
      fun: as for `per_sample_grad`.
      argnums: as for `per_sample_grad`.
      batch_argnums: as for `per_sample_grad`.
      keep_batch_dim: as for `per_sample_grad`.
      chunk_size: the number of samples to compute at a time.
      memory_budget: bytes, or a string as for `vmap`: the largest chunk whose compiled temporaries fit.

    Returns:
      A function of the same arguments that returns `Moments(mean, second_moment, variance)`, each a pytree like the
      parameters, in float32 or wider, with None for leaves that are not floating point. Its `.explain(*args)` reports
      the form of the gradients at each parameter use.

    Raises:
      TypeError, ValueError: as for `per_sample_grad`; fewer than two samples.

    Cost:
      One forward and one backward pass. For a matrix that each sample uses once, the squares cost one more product,
      (A²)ᵀG² of activations A and cotangents G. Otherwise the gradient of one sample at a time is materialized there.

    Rounding:
      The variance is a difference of the second moment and the squared mean: it has the absolute error of the second
      moment, and may be slightly negative where all gradients are equal.

    Source:
      `Variance` and `SumGradSquared` of BackPACK.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import per_sample_moments
      >>> moments = per_sample_moments(lambda w, x: jnp.sum(x * w))(jnp.ones(1), jnp.array([1.0, 2.0, 6.0]))
      >>> [round(float(leaf[0]), 3) for leaf in moments]
      [3.0, 13.667, 7.0]
    """
    api = "per_sample_moments"
    of_call = per_example(api, fun, argnums, batch_argnums)
    chunks = Chunks(api, chunk_size, memory_budget, sums=True)
    bare = not isinstance(argnums, (tuple, list))

    def prepare(args: Any, kwargs: Any) -> tuple[PerExample, Callable[[MethodChoice], Any]]:
        """Return the loss of a call, and a function that computes the sums by a route."""
        of = of_call(False, keep_batch_dim, None, args, kwargs)
        check_two(api, of)

        def compute(route: MethodChoice) -> Any:
            return in_chunks(lambda some: (_sums(of, some, route), ()), of.examples, route)[0]

        return of, compute

    def moments(*args: Any, **kwargs: Any) -> Moments:
        """Return the moments for these arguments."""
        of, compute = prepare(args, kwargs)
        first, second = chunks.results(of, compute)
        n = of.size
        mean, second = [x / n for x in first], [x / n for x in second]
        variance = [(x - magnitudes(m)) * (n / (n - 1)) for x, m in zip(second, mean, strict=True)]
        return Moments(*(of.gradients(x, bare) for x in (mean, second, variance)))

    def explain(*args: Any, **kwargs: Any) -> Any:
        """Return the report for these arguments."""
        of, compute = prepare(args, kwargs)
        return report_of(of, chunks, compute)

    on_mesh = on_any_mesh(api, fun, batch_argnums, moments, lambda out: out)
    return Statistic(wrap_like(fun, api, on_mesh), on_any_mesh(api, fun, batch_argnums, explain))


def _sums(of: PerExample, examples: Sequence[Any], route: MethodChoice) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the sums of the gradients and of their squared magnitudes over some examples, for each parameter."""
    weights = jnp.ones(len(examples[0]), jnp.float32)
    if route.method == "vmap":
        each = one_at_a_time(of, examples, None)
        return [Dense(x).weighted(weights) for x in each], [magnitudes(widened(x)).sum(0) for x in each]
    found = ExampleGradients(of.program, examples)
    groups = of_groups(found)
    sums = [_sums_of_form(part.form, weights) for part in groups]
    # A layout moves elements and changes at most their signs, and so moves their squares, but for the signs.
    first, second = (at_parameters(found, groups, x) for x in zip(*sums, strict=True))
    return first, [jnp.abs(x) for x in second]


def _sums_of_form(form: GradientForm, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the sums over examples of their gradients and of the squared magnitudes, like the operand."""
    if isinstance(form, Dense):
        squares = magnitudes(widened(form.gradients))
        return form.weighted(weights), Dense(squares).weighted(weights, finite=True)
    if isinstance(form, RowSparse):
        # Cotangents of the same row add up before they are squared. Each of them is one part in `same` of the square.
        same = (form.rows[..., :, None] == form.rows[..., None, :]).astype(wide(form.right.dtype))
        total = jnp.einsum("istu,isud->istd", same, widened(form.right), precision="highest")
        squares = jnp.square(total) / same.sum(-1, keepdims=True)
        return form.weighted(weights), form._replace(right=squares).weighted(weights, finite=True)
    if form.left.shape[2] != 1:
        # One example at a time: XLA on CPU sums squares over examples on one core, which takes up to 16 times as long.
        first, second = form.fold(lambda sums, x: (sums[0] + x, sums[1] + jnp.square(x)), lambda zeros: (zeros, zeros))
        return form.restore(first), form.restore(second)
    left, right = (jnp.square(widened(x)) for x in (form.left, form.right))  # for one position it is (A²)ᵀG²
    if left.shape[1] == 1:  # a product of matrices: XLA on CPU copies arrays with axes of size 1
        squares = jnp.matmul(left[:, 0, 0].T, right[:, 0, 0], precision="highest")[None]
    else:
        squares = jnp.einsum("isp,isd->spd", left[:, :, 0], right[:, :, 0], precision="highest")
    return form.weighted(weights), form.restore(squares)
