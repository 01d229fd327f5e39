"""What the statistics of per-sample gradients share: options, chunks of examples, and the report of `explain`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from .._convolutions.as_products import (
    largest_copies,
    products_unless_differentiated,
    run_everywhere,
    run_outside_loops,
)
from .._core.arguments import check_count
from .._core.memory import check_budget, chunk_within
from .._core.target import platform
from ..privacy._per_example._estimates.cpu_cost import costs
from ..privacy._per_example.loss import PerExample
from ..privacy._per_example.methods import (
    MethodChoice,
    first_that_traces,
    in_groups,
    on_platform,
    routes,
    with_products,
)
from ..privacy._per_example.norms import ExampleGradients
from ..privacy._per_example.report import Report, report_uses
from ..privacy._per_example.rules import norm_cost

# The most numbers of gradients, activations and cotangents to keep at a time, unless a chunk size is given.
_NUMBERS = 2**28


R = TypeVar("R")


@dataclass(frozen=True)
class Statistic(Generic[R]):
    """A function that computes a statistic of per-sample gradients.

    Attributes:
      fun: computes the statistic.
      report: computes the report of `explain`.
    """

    fun: Callable[..., Any]
    report: Callable[..., R]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the statistic for these arguments."""
        return self.fun(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> R:
        """Report the form of the gradients at each parameter use for these arguments, without computing them.

        Args:
          *args: the arguments of a call.
          **kwargs: its keyword arguments.

        Returns:
          A report: `print` it for a readable text.

        Raises:
          TypeError, ValueError: as for a call.
        """
        return self.report(*args, **kwargs)


class Chunks:
    """The number of examples to compute at a time, and whether their convolutions are computed as matrix products.

    Args:
      api: the name for errors.
      chunk_size: the number of examples, or None.
      memory_budget: bytes of temporaries, a string as for `vmap`, or None.
      pairs: whether pairs of examples are computed, so that each chunk is computed once for each other chunk.
      sums: whether gradients are only summed: for convolutions, one CPU device then takes the number of examples of
        least estimated cost, as `clipped_grad` does.

    Raises:
      TypeError, ValueError: a chunk size or a budget that is no size, or both.
    """

    def __init__(
        self, api: str, chunk_size: Any, memory_budget: Any, *, pairs: bool = False, sums: bool = False
    ) -> None:
        check_count(api, "chunk_size", chunk_size, optional=True)
        self._api, self._chunk, self._pairs, self._sums, self._columns = api, chunk_size, pairs, sums, 1
        self._budget = check_budget(api, memory_budget, chunk_size)

    def with_columns(self, columns: int) -> Chunks:
        """Return the same for calls that keep so many gradients of each example."""
        found = copy(self)
        found._columns = max(1, columns)
        return found

    def results(self, of: PerExample, compute: Callable[[MethodChoice], Any]) -> Any:
        """Return the results of the first route that JAX can trace; `compute` computes a route."""
        return self._results(of, self._given(of, compute), compute)

    def route(self, of: PerExample, compute: Callable[[MethodChoice], Any]) -> MethodChoice:
        """Return the route of the results on the default device."""
        by_platform = self._routes(of, self._given(of, compute))
        tried = by_platform["cpu" if platform() == "cpu" else "default"]
        return first_that_traces(self._api, tried, partial(_promoting, compute))[0]

    def _given(self, of: PerExample, compute: Callable[[MethodChoice], Any]) -> int | None:
        """Return the number of examples that is given, or that fits into the given budget; None without either."""
        if self._budget is None or not of.size:
            return self._chunk
        return chunk_within(self._api, lambda n: self._results(of, n, compute), of.size, self._budget)

    def _results(self, of: PerExample, examples: int | None, compute: Callable[[MethodChoice], Any]) -> Any:
        return on_platform(self._api, self._routes(of, examples), partial(_promoting, compute))

    def _routes(self, of: PerExample, examples: int | None) -> dict[str, list[MethodChoice]]:
        """Return the routes to try in order, by platform."""
        most = min(examples or self._most(of), of.size)
        choice = MethodChoice("book_keeping", most, "from the activations and cotangents of one backward pass")
        choices = {"cpu": self._on_cpu(of, choice, examples is not None), "default": choice}
        return {
            name: [_keep(route, one.examples, self._pairs) for route in routes(of, one)]
            for name, one in choices.items()
        }

    def _on_cpu(self, of: PerExample, choice: MethodChoice, given: bool) -> MethodChoice:
        """Return the choice for one CPU device, where XLA's convolutions are slow in a loop; on several, `choice`."""
        program = of.program  # traced with the user's setting of dtype promotion, unlike our sums
        if program.refusal or jax.device_count() > 1 or not 0 < largest_copies(program.closed.jaxpr) < math.inf:
            return choice
        if self._sums and not given:
            found = [cost for cost in costs(program, of.size, of.size) if cost.method == choice.method]
            choice = choice._replace(examples=min(x for x in found if x.examples <= choice.examples).examples)
        return with_products(choice, of.size)

    def _most(self, of: PerExample) -> int:
        """Return how many examples to compute at a time by default."""
        if self._pairs or of.program.refusal:
            return of.size
        numbers = sum(norm_cost(use)[1] for use in of.program.uses)
        numbers += sum(
            of.parameters[i].size for use in of.program.uses if use.value.layout is None for i in use.value.leaves
        )
        return max(1, _NUMBERS // max(1, numbers * self._columns))


def _promoting(compute: Callable[[MethodChoice], Any], route: MethodChoice) -> Any:
    """Compute a route with JAX's standard promotion of dtypes, whatever the user's setting."""
    with jax.numpy_dtype_promotion("standard"):
        return compute(route)


def _keep(route: MethodChoice, examples: int, pairs: bool) -> MethodChoice:
    """Return the route with a number of examples: if gradients of pairs are held, all of them are."""
    return route._replace(examples=examples) if pairs and route.method == "vmap" else route


def check_two(api: str, of: PerExample) -> None:
    """Raise if there are fewer than two examples, which have no variance."""
    if of.size < 2:
        raise ValueError(f"{api}: a variance needs at least two samples, but the batch has {of.size}.")


def in_chunks(
    compute: Callable[[list[Any]], tuple[Any, Any]], examples: Sequence[Any], route: MethodChoice
) -> tuple[Any, Any]:
    """Compute some examples at a time: add the first result of `compute` and concatenate the second along axis 0.

    Args:
      compute: a function of some examples that returns two pytrees of arrays.
      examples: the examples of the batch, along axis 0 of each array.
      route: has the number of examples at a time, of which the last chunk has the remaining ones, and whether
        convolutions are computed as matrix products.
    """
    size, chunk = len(examples[0]), max(1, route.examples)
    run = run_everywhere if chunk < size else run_outside_loops
    compute = products_unless_differentiated(compute, run) if route.products else compute
    if chunk >= size:
        return compute(list(examples))
    whole = size // chunk * chunk
    first = [x[:whole] for x in examples] if whole < size else list(examples)
    sums = jax.eval_shape(lambda x: compute(x)[0], [x[:chunk] for x in examples])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    found = in_groups(lambda examples, _: compute(examples), first, jnp.zeros(whole, bool), chunk, zeros)
    if whole == size:
        return found
    rest = compute([x[whole:] for x in examples])
    each = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), found[1], rest[1])
    return jax.tree.map(jnp.add, found[0], rest[0]), each


def for_pairs(
    gradients: Callable[[list[Any]], Any],
    pairs: Callable[[Any, Any], Any],
    examples: Sequence[Any],
    others: Sequence[Any] | None,
    route: MethodChoice,
) -> Any:
    """Compute a pytree of arrays of shape (batch, other batch, ...) from the gradients of all pairs of examples.

    Args:
      gradients: a function from some examples to their gradients.
      pairs: a function from the gradients of some examples, and those of some others or None for the same ones, to
        arrays.
      examples: the examples of the batch, along axis 0 of each array.
      others: those of the other batch; None for the same.
      route: as for `in_chunks`, for both batches.
    """
    chunk = max(1, route.examples)
    second = list(examples if others is None else others)
    if chunk >= len(examples[0]) and chunk >= len(second[0]):
        return pairs(gradients(list(examples)), None if others is None else gradients(second))

    def rows(some: list[Any]) -> tuple[Any, Any]:
        """Return the arrays for some examples and all others."""
        one = gradients(some)

        def columns(some: list[Any]) -> tuple[Any, Any]:
            return (), _swapped(pairs(one, gradients(some)))

        return (), _swapped(in_chunks(columns, second, route)[1])

    return in_chunks(rows, examples, route)[1]


def _swapped(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.swapaxes(0, 1), tree)


def other_examples(
    api: str, of: PerExample, again: Callable[..., PerExample], args: Sequence[Any], other: dict[int, Any]
) -> list[Any]:
    """Return the examples of another batch; raise if they are not like those of the first.

    Args:
      api: the name for errors.
      of: the loss with the first batch.
      again: as returned by `per_example`, with all arguments bound up to `args`.
      args: the positional arguments with the first batch.
      other: the arguments to replace, by their positions.
    """
    examples = again(tuple(other.get(i, arg) for i, arg in enumerate(args)), {}).examples
    one, two = ([(x.shape[1:], x.dtype) for x in some] for some in (of.examples, examples))
    if one != two:
        given, expected = (", ".join(f"{dtype}{list(shape)}" for shape, dtype in some) for some in (two, one))
        raise ValueError(
            f"{api}: a sample of the other batch is {given}, but of the batch {expected}; they must agree."
        )
    return examples


def report_of(of: PerExample, chunks: Chunks, compute: Callable[[MethodChoice], Any]) -> Report:
    """Return the report for a call."""
    program = of.program  # traced here and not inside `eval_shape`, so that it can be reused
    chosen: list[MethodChoice] = []

    jax.eval_shape(lambda: chosen.append(chunks.route(of, compute)))
    uses: list[Any] = []

    def found(examples: Any) -> None:
        forms = None if chosen[0].method == "vmap" else ExampleGradients(program, examples).forms_summed()
        uses.extend(report_uses(program, of.names(), forms))

    jax.eval_shape(found, of.examples)
    return Report(chosen[0].method, chosen[0].examples, chosen[0].why, uses)
