"""`gradient_noise_scale`: the batch size up to which more samples make a step better in proportion."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._core.arguments import Argnums, wrap_like
from ..privacy._per_example.gradient_forms import Dense, OuterProduct, magnitudes, wide
from ..privacy._per_example.loss import PerExample, on_any_mesh, per_example
from ..privacy._per_example.methods import MethodChoice
from ..privacy._per_example.norms import ExampleGradients
from ..privacy._per_example.report import Report
from .statistic import Chunks, Statistic, check_two, in_chunks, report_of
from .use_gradients import one_at_a_time

# How many multiplications a CPU does in the time in which it adds one element of a gradient, and its square, to sums.
_PER_ELEMENT = 48


class NoiseScale(NamedTuple):
    """The gradient noise scale of a batch, scalars in float32 or wider; none of them is clamped.

    Attributes:
      scale: noise / signal, in samples. It is negative if the estimate of the signal is.
      signal: an unbiased estimate of the squared norm of the gradient of the whole distribution.
      noise: an unbiased estimate of the trace of the covariance of per-sample gradients.
    """

    scale: jax.Array
    signal: jax.Array
    noise: jax.Array


def gradient_noise_scale(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    *,
    batch_argnums: Argnums = 1,
    keep_batch_dim: bool = True,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
) -> Statistic[Report]:
    """Estimate the gradient noise scale from the gradients of one batch, without holding the gradients.

    With gradients gᵢ of `batch` samples and their mean g, noise = Σᵢ ‖gᵢ - g‖² / (batch - 1) and
    signal = ‖g‖² - noise / batch. A batch much smaller than scale = noise / signal wastes steps, a much larger one
    wastes samples.

    Args:
      fun: as for `per_sample_grad`.
      argnums: as for `per_sample_grad`.
      batch_argnums: as for `per_sample_grad`.
      keep_batch_dim: as for `per_sample_grad`.
      chunk_size: the number of samples to compute at a time.
      memory_budget: bytes, or a string as for `vmap`: the largest chunk whose compiled temporaries fit.

    Returns:
      A function of the same arguments that returns `NoiseScale(scale, signal, noise)`. A single batch gives a noisy
      estimate of the signal, which may even be negative. So average signal and noise over steps, and divide then. Its
      `.explain(*args)` reports the form of the gradients at each parameter use.

    Raises:
      TypeError, ValueError: as for `per_sample_grad`; fewer than two samples.

    Cost:
      About one forward and one backward pass, as for `clipped_grad`.

    Source:
      McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import gradient_noise_scale
      >>> found = gradient_noise_scale(lambda w, x: jnp.sum(x * w))(jnp.ones(1), jnp.array([1.0, 2.0, 6.0]))
      >>> float(found.noise), round(float(found.signal), 4)  # 7, and 3² - 7 / 3
      (7.0, 6.6667)
    """
    api = "gradient_noise_scale"
    of_call = per_example(api, fun, argnums, batch_argnums)
    chunks = Chunks(api, chunk_size, memory_budget, sums=True)

    def prepare(args: Any, kwargs: Any) -> tuple[PerExample, Callable[[MethodChoice], Any]]:
        """Return the loss of a call, and a function that computes the sums by a route."""
        of = of_call(False, keep_batch_dim, None, args, kwargs)
        check_two(api, of)

        def compute(route: MethodChoice) -> Any:
            def of_some(examples: list[Any]) -> tuple[Any, Any]:
                return _sums(of, examples, route), ()

            return in_chunks(of_some, of.examples, route)[0]

        return of, compute

    def scale(*args: Any, **kwargs: Any) -> NoiseScale:
        """Return the noise scale for these arguments."""
        of, compute = prepare(args, kwargs)
        total, squares = chunks.results(of, compute)
        n = of.size
        dtype = wide(squares.dtype)
        of_mean = sum((magnitudes(x / n).sum().astype(dtype) for x in total), jnp.zeros((), dtype))
        noise = (squares - n * of_mean) / (n - 1)
        signal = of_mean - noise / n
        return NoiseScale(noise / signal, signal, noise)

    def explain(*args: Any, **kwargs: Any) -> Any:
        """Return the report for these arguments."""
        of, compute = prepare(args, kwargs)
        return report_of(of, chunks, compute)

    on_mesh = on_any_mesh(api, fun, batch_argnums, scale, lambda out: out)
    return Statistic(wrap_like(fun, api, on_mesh), on_any_mesh(api, fun, batch_argnums, explain))


def _sums(of: PerExample, examples: list[Any], route: MethodChoice) -> tuple[list[jax.Array], jax.Array]:
    """Return the sums of the gradients of some examples, for each parameter, and of their squared norms."""
    ones = jnp.ones(len(examples[0]), jnp.float32)
    if route.method == "vmap":
        each = list(map(Dense, one_at_a_time(of, examples, None)))
        squares: Any = sum(x.squared_norm().sum() for x in each)
        return [x.weighted(ones) for x in each], squares
    found = ExampleGradients(of.program, examples)
    folded = {
        n: form
        for _, forms in found.groups
        if forms is not None and len(forms) == 1
        for n, form in forms.items()
        if isinstance(form, OuterProduct) and _is_folded(form)
    }

    def sums(folded: dict[int, OuterProduct]) -> tuple[list[jax.Array], jax.Array]:
        known, squares = {}, found.squared_norms_without(folded).sum()
        for n, form in folded.items():
            first, second = form.fold(
                lambda sums, x: (sums[0] + x, sums[1] + magnitudes(x).sum()),
                lambda zeros: (zeros, magnitudes(zeros).sum()),
            )
            known[n], squares = form.restore(first), squares + second
        return found.weighted_sum(ones, known=known), squares

    # A loop over examples would leave most of an accelerator, and other devices, idle.
    if not folded or jax.device_count() > 1:
        return sums({})
    return lax.platform_dependent(cpu=partial(sums, folded), default=partial(sums, {}))


def _is_folded(form: OuterProduct) -> bool:
    """Return whether a CPU is quicker to materialize one gradient at a time than to multiply all pairs of positions."""
    (*_, positions, p), d = form.left.shape, form.right.shape[3]
    return positions**2 * (p + d) > _PER_ELEMENT * p * d
