"""`ggn_diagonal`: the diagonal of the Gauss-Newton matrix of a model and a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._core.arguments import Argnums, check_count, wrap_like
from .._statistics.statistic import Chunks, Statistic, in_chunks, report_of
from .._statistics.use_gradients import UseGradients, at_parameters, use_gradients
from ..privacy._per_example.gradient_forms import Dense, wide
from ..privacy._per_example.loss import on_any_mesh
from ..privacy._per_example.methods import MethodChoice
from ..privacy._per_example.norms import ExampleGradients
from ..privacy._per_example.report import Report
from ._outputs import Fisher, ModelAndLoss, OfBatch
from ._reduction import Reduction, ReductionName
from ._squares import sum_of_squares


def ggn_diagonal(
    model: Callable[..., Any],
    loss: Callable[..., Any],
    argnums: Argnums = 0,
    *,
    samples: int | None = None,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
    check_loss: bool = True,
    reduction: ReductionName = "mean",
) -> Statistic[Report]:
    """Compute the diagonal of the Gauss-Newton matrix of a model, without the matrix.

    The matrix is the mean over the examples of JᵀHJ, with the Jacobian J of the outputs by the parameters and the
    Hessian H of the loss by the outputs.

    Args:
      model: a function of parameters and, after them, a batch with the examples along axis 0, that returns the outputs,
        shape (n, *out): a function, a module or a bound method. Each example must be computed by itself.
      loss: `loss(outputs, y)` returns the mean over the examples. H must not be indefinite.
      argnums: the parameters, as for `per_sample_grad`; the batch is the next argument.
      samples: the number of samples of H^(1/2) ε, with normal ε, for each example, whose squares are averaged; None for
        the exact diagonal.
      chunk_size: the number of examples to compute at a time.
      memory_budget: bytes, or a string as for `vmap`: the largest chunk whose compiled temporaries fit.
      check_loss: whether to raise if the loss of a batch is not the mean, or the sum, of the losses of its examples, as
        `plurax.transforms.check_loss` finds once for arguments of some shapes that are not traced. False: the losses
        of single examples are meant.
      reduction: "mean", or "sum" for a loss that returns the sum over the examples: the matrix is then the sum too.

    Returns:
      A function of (params, x, y, key=None) that returns the diagonal, a pytree like the parameters, in float32 or
      wider, with None for leaves that are not floating point. `y` is an array, or a pytree of arrays, with the examples
      along axis 0. Samples need the key. Its `.explain(*args)` reports the form of the gradients at each use.

    Raises:
      TypeError, ValueError: as for `per_sample_grad`; outputs that are no real floating-point array with the examples
        along axis 0; a loss that returns no real scalar; an indefinite H (under `jax.jit` the result is NaN instead);
        a loss of a batch that is neither the mean nor the sum of the losses of its examples, or not the `reduction`;
        more than 1,024 outputs of an example whose H has no known form; samples without a key, or a key without them.

    Cost:
      A forward pass, and a backward pass for each column of a square root of H: for one output per class, as many as
      classes. Or one for each sample: the standard error of an entry is √2 of it for one sample and one example, and
      falls with the root of their number. The sum of squares at a use costs about as much as its gradient. All columns
      are computed at once, and need memory in proportion to the square of their number: for many tokens, take samples.

    Source:
      `DiagGGNExact` and `DiagGGNMC` of BackPACK (Dangel et al. 2020).

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms.curvature import ggn_diagonal
      >>> x, y = jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.zeros((2, 1))
      >>> ggn_diagonal(lambda w, x: x @ w, lambda o, y: 0.5 * jnp.mean((o - y) ** 2))(jnp.ones((2, 1)), x, y)
      Array([[5.],
             [2.]], dtype=float32)
    """
    api = "ggn_diagonal"
    check_count(api, "samples", samples, optional=True)
    both, chunks = ModelAndLoss(api, model, loss, argnums), Chunks(api, chunk_size, memory_budget, sums=True)
    said = Reduction(api, model, loss, both.position, check_loss, reduction)
    bare = not isinstance(argnums, (tuple, list))

    def prepare(args: tuple[Any, ...], key: Any) -> tuple[OfBatch, Callable[[MethodChoice], Any]]:
        """Return the outputs and the loss of a call, and a function that computes the sums by a route."""
        batch, key = both.of(args, key, samples=samples is not None)

        def compute(route: MethodChoice) -> Any:
            return in_chunks(lambda some: (_sums(batch, some, route, key, samples), ()), batch.examples, route)[0]

        return batch, compute

    def diagonal(*args: Any, key: Any = None) -> Any:
        """Return the diagonal for these arguments."""
        batch, compute = prepare(args, key)
        sums = chunks.with_columns(samples or batch.hessian.columns).results(batch.outputs, compute)
        batch.check_definite(sums)
        divisor = (1 if said.is_sum else batch.outputs.size) * (samples or 1)
        return batch.outputs.gradients([x / divisor for x in sums], bare)

    def explain(*args: Any, key: Any = None) -> Any:
        """Return the report for these arguments."""
        batch, compute = prepare(args, key)
        return report_of(batch.outputs, chunks.with_columns(samples or batch.hessian.columns), compute)

    batched = (both.position, both.position + 1)
    computed = on_any_mesh(api, model, batched, diagonal, sum_in=lambda sums: sums)
    explained = on_any_mesh(api, model, batched, explain)

    def checked(*args: Any, **options: Any) -> Any:
        said.check(args)
        return computed(*args, **options)

    def report(*args: Any, **options: Any) -> Report:
        found = said.check(args)
        return explained(*args, **options)._replace(loss=found)

    return Statistic(wrap_like(model, api, checked), report)


def _sums(batch: OfBatch, examples: Sequence[Any], route: MethodChoice, key: Any, samples: int | None) -> Any:
    """Return the sums of squared gradients over some examples and all columns or samples, for each parameter."""
    of = batch.outputs
    if samples is None and not batch.hessian.columns:
        return [jnp.zeros(x.shape, wide(x.dtype)) for x in of.parameters]
    dtype = of.program.closed.out_avals[0].dtype

    def use(inputs: Sequence[Any], seeds: jax.Array) -> list[UseGradients]:
        return use_gradients(of, inputs, route, seed=seeds.astype(dtype))

    kind: Fisher = "exact" if samples is None else "mc"
    parts, groups = batch.gradients(examples, kind, samples or 1, key, use, mapped=route.method != "vmap")
    squares = [sum_of_squares([part]) for part in parts]
    sums = [x if isinstance(form, Dense) else form.restore(x) for (form, *_), x in zip(parts, squares, strict=True)]
    if route.method == "vmap":
        return sums
    found = ExampleGradients(of.program, [x[:1] for x in examples[: len(of.examples)]])
    # A layout moves elements and changes at most their signs, and so moves their squares, but for the signs.
    return [jnp.abs(x) for x in at_parameters(found, groups, sums)]
