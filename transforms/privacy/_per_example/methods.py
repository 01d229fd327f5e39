"""The methods "vmap", "ghost" and "book_keeping": the choice of one for "auto", and their computation.

On a CPU, "auto" takes the least cost by `_estimates/cpu_cost.py`. On accelerators it takes book-keeping, unless its
temporaries as estimated by `_estimates/temporaries.py` are far above those of an ordinary gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.arguments import check_choice
from ..._core.compat import varying, varying_axes
from ..._core.prng import is_key
from ..._core.target import platform
from ._estimates.cpu_cost import costs
from ._estimates.temporaries import added_bytes, ordinary_bytes
from .clip_norms import ClipGroups, of_group, sum_by_group
from .gradient_forms import Dense
from .in_backward import in_backward
from .loss import ExampleProgram, PerExample
from .norms import ExampleGradients

Method = Literal["auto", "vmap", "ghost", "book_keeping"]

# What a method may add to the temporaries of an ordinary gradient on accelerators: a part of them, or this many bytes.
_ROOM, _NO_MATTER = 0.5, 16 * 2**20
# A user's "strict" dtype promotion applies to tracing the loss; it would reject the mixed dtypes of our sums.
_PROMOTES = partial(jax.numpy_dtype_promotion, "standard")


def check_method(api: str, method: Any) -> None:
    """Raise if `method` is not the name of a method."""
    check_choice(api, "method", method, get_args(Method))


class MethodChoice(NamedTuple):
    """A method, the number of examples at a time, and the reason for this choice.

    Attributes:
      method: "vmap", "ghost", "book_keeping" or "mixed".
      examples: the number of examples to compute at a time.
      why: the reason, as a phrase for `explain`.
      inside_from: for "mixed", the first use as in `ExampleGradients`: book-keeping before it, "ghost" from it on.
      products: whether convolutions are computed as matrix products, for a CPU.
    """

    method: str
    examples: int
    why: str
    inside_from: int | None = None
    products: bool = False


def choose(program: ExampleProgram, batch: int, most: int, spmd_axis_name: Any) -> dict[str, MethodChoice]:
    """Return the choice for programs that are compiled for a CPU ("cpu") and for an accelerator ("default").

    Args:
      program: the loss.
      batch: the number of examples.
      most: the largest number of examples to compute at a time; it divides the batch.
      spmd_axis_name: as for `jax.vmap`.
    """
    if program.refusal:
        return dict.fromkeys(("cpu", "default"), MethodChoice("book_keeping", most, program.refusal))
    on_accelerator = _choice_by_memory(program, batch, most, spmd_axis_name)
    if jax.device_count() > 1 or spmd_axis_name is not None:
        why = "a loop over examples would leave several devices idle"
        return {"cpu": MethodChoice("book_keeping", most, why), "default": on_accelerator}
    return {"cpu": _choice_by_time(program, batch, most), "default": on_accelerator}


def held(program: ExampleProgram, batch: int, most: int, spmd_axis_name: Any, why: str) -> MethodChoice:
    """Return "vmap", for what needs each gradient, with the number of examples at a time of least estimated cost."""
    several = jax.device_count() > 1 or spmd_axis_name is not None or platform() != "cpu"
    if several or not batch or program.refusal:
        return MethodChoice("vmap", most, why)
    best = min(cost for cost in costs(program, batch, most) if cost.method == "vmap")
    return MethodChoice("vmap", best.examples, why, products=best.products)


def _choice_by_memory(program: ExampleProgram, batch: int, most: int, spmd_axis_name: Any) -> MethodChoice:
    """Return the quickest choice that takes at most 1.5 times the temporaries of an ordinary gradient, as estimated."""
    ordinary = ordinary_bytes(program)
    allowed = max(_ROOM * ordinary * batch, _NO_MATTER)
    kept = added_bytes(program, None)
    if kept * most <= allowed:
        why = f"an estimated {_size(kept * most)} more than the {_size(ordinary * batch)} of an ordinary gradient"
        return MethodChoice("book_keeping", most, why)
    inside = added_bytes(program, in_backward(program.plan, spmd_axis_name))
    # A group of examples takes the temporaries of its own gradient, and what it keeps.
    fitting = [n for n in range(1, most + 1) if most % n == 0 and (inside + ordinary) * n - ordinary * batch <= allowed]
    why = f"book-keeping would take an estimated {_size(kept * most)} more than the {_size(ordinary * batch)}"
    return MethodChoice("ghost", max(fitting, default=1), f"{why} of an ordinary gradient")


def _size(count: float) -> str:
    """Format a number of bytes."""
    return f"{count / 2**20:.1f} MiB"


def _choice_by_time(program: ExampleProgram, batch: int, most: int) -> MethodChoice:
    """Return the choice of least estimated cost on one CPU device."""
    found = [cost for cost in costs(program, batch, most) if cost.method != "ghost"]
    best = min(found)
    other = min(cost.traffic for cost in found if cost.method != best.method)
    instead = "with" if best.method == "book_keeping" else "without"
    why = f"estimated memory traffic {_size(best.traffic)}; {_size(other)} {instead} stored gradients"
    choice = MethodChoice(best.method, best.examples, why)
    return with_products(choice, batch) if best.products else choice


def with_products(choice: MethodChoice, batch: int) -> MethodChoice:
    """Return a choice with convolutions as matrix products: all in a loop over examples, else the slow ones."""
    where = "" if choice.examples < batch else " where XLA is slow at them"
    return choice._replace(products=True, why=f"{choice.why}; convolutions as matrix products{where}")


def routes(of: PerExample, choice: MethodChoice) -> list[MethodChoice]:
    """Return the routes to try in order: the choice, then an ordinary gradient of one example at a time.

    The last route always works. It is the only one if XLA would compute the choice incorrectly.
    """
    if of.size == 0:
        return [MethodChoice("vmap", 0, "there are no examples")]
    one = MethodChoice("vmap", 1, "one example at a time")
    if choice[:2] == one[:2] and not choice.products:
        return [choice]
    divided = jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes
    inside = of.program.wrong_inside() if divided else ""
    if inside:
        wrong = f"on several devices, XLA miscomputes the mapped derivative of a convolution inside {inside}"
        return [one._replace(why=f"{one.why}: {wrong}")]
    return [choice, one]


def first_that_traces(
    api: str, routes: Sequence[MethodChoice], compute: Callable[[MethodChoice], Any]
) -> tuple[MethodChoice, Any]:
    """Return the first route that JAX can trace, and its results.

    Errors that begin with `api` are our own, and are raised. Whether a route works is found by tracing it: an operation
    may lack a batching rule, or a derivative rule that an ordinary gradient does not need. The last route computes the
    gradient of one example at a time, as `jax.grad`.
    """
    failed = ""
    for route in routes[:-1]:
        try:
            return route._replace(why=route.why + failed), compute(route)
        except jax.errors.JaxRuntimeError:  # it was traced, and failed when it ran: out of memory, for example
            raise
        except Exception as error:  # missing rules raise errors of any type
            if str(error).startswith(f"{api}: "):  # one of ours
                raise
            first = f"{type(error).__name__}: {error}".splitlines()[0]
            failed += f'; method="{route.method}" failed ({first})'
    return routes[-1]._replace(why=routes[-1].why + failed), compute(routes[-1])


def on_platform(api: str, by_platform: dict[str, list[MethodChoice]], compute: Callable[[MethodChoice], Any]) -> Any:
    """Return the results of the first route that JAX can trace, for the platform that the program is compiled for.

    Args:
      api: as for `first_that_traces`.
      by_platform: the routes for "default", and those for "cpu" if they may differ.
      compute: as for `first_that_traces`.
    """
    structures: list[Any] = []

    def results(platform: str) -> list[Any]:
        found, structure = jax.tree.flatten(first_that_traces(api, by_platform[platform], compute)[1])
        structures.append(structure)  # the auxiliary output of a loss has another structure each time it is traced
        return found

    choices = {routes[0]._replace(why="") for routes in by_platform.values()}
    if len(choices) == 1:
        found = results("default")
    else:
        found = lax.platform_dependent(cpu=partial(results, "cpu"), default=partial(results, "default"))
    return jax.tree.unflatten(structures[0], found)


def in_groups(compute: Callable[..., Any], examples: list[Any], padding: jax.Array, group: int, start: Any) -> Any:
    """Compute all examples at once or in groups: sum the first result of `compute` and concatenate the second.

    Args:
      compute: a function of some examples and their padding mask that returns two pytrees.
      examples: the examples of the batch, along axis 0.
      padding: whether each example is padding, shape (batch,).
      group: the number of examples in a group.
      start: zeros like the first result.
    """
    size = len(padding)
    if group == size:
        return compute(examples, padding)

    def taken(x: Any, i: Any) -> Any:
        # Each group takes examples from every part of the batch: if it is sharded, no device sends any example. Slices
        # inside the loop; slices that `lax.scan` takes would be a copy of the batch with its groups one after another.
        return lax.dynamic_index_in_dim(x.reshape(group, size // group, *x.shape[1:]), i, 1, keepdims=False)

    def step(total: Any, i: Any) -> tuple[Any, Any]:
        part, each = compute(*jax.tree.map(lambda x: taken(x, i), (examples, padding)))
        return jax.tree.map(jnp.add, total, part), each

    # In a `shard_map`, the initial sum must be device-varying like the result, or the carry types would differ.
    start = jax.tree.map(lambda x: varying(x, varying_axes(examples[0])), start)
    total, each = lax.scan(step, start, jnp.arange(size // group))
    return total, jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(size, *x.shape[2:]), each)


class Backward:
    """A backward pass over some examples, which computes their norms and weighted sums of their gradients.

    Args:
      of: the loss.
      examples: the examples, along axis 0 of each array.
      choice: the method; its number of examples is that of these examples.
      spmd_axis_name: as for `jax.vmap`.
      transform: applied to each example's gradients before clipping; only for "vmap".
      clip_groups: as for `ExampleGradients`.
      transformed_groups: the groups of the results of `transform`.

    Attributes:
      values: the loss of each example.
      aux: the auxiliary output of the loss for each example.
      squares: the squared norm of each example's gradient, for each group.
    """

    def __init__(
        self,
        of: PerExample,
        examples: Sequence[Any],
        choice: MethodChoice,
        spmd_axis_name: str | None = None,
        transform: Callable[[list[Any]], Any] | None = None,
        clip_groups: ClipGroups | None = None,
        transformed_groups: ClipGroups | None = None,
    ) -> None:
        self._examples, self._found, self._clip_groups = list(examples), None, clip_groups
        if choice.method == "vmap":
            (self.values, self.aux), self._each = each_gradient(of, self._examples, spmd_axis_name)
            self.squares = clipped = squared_norms(self._each, clip_groups)
            if transform is not None:
                self._each, self._clip_groups = _mapped(transform, self._each), transformed_groups
                clipped = squared_norms(self._each, transformed_groups)
            self._clipped = jnp.sqrt(clipped)
            return
        with _PROMOTES():
            inside = self._inside_from = 0 if choice.method == "ghost" else choice.inside_from
            self._found = ExampleGradients(of.program, self._examples, spmd_axis_name, inside, clip_groups=clip_groups)
            self.values, self.aux, self.squares = self._found.values, self._found.aux, self._found.squared_norms
            self._clipped = self._found.upper_norms()

    def norms_to_clip(self) -> jax.Array:
        """Return the norms to clip by: those after `transform`, if there is one, rounded up and positive."""
        return positive(self._clipped)

    def weighted_sum(self, weights: jax.Array, dtype: Any) -> Any:
        """Sum `weights` times the gradient over the examples, in `dtype` or wider.

        Examples of weight zero are excluded, even if their gradients are NaN. With clip groups, each has its weights.
        """
        if self._found is None:
            leaves, treedef = jax.tree.flatten(self._each)
            groups = [None] * len(leaves) if self._clip_groups is None else self._clip_groups.of_leaf
            sums = [Dense(x).weighted(of_group(weights, group), dtype) for x, group in zip(leaves, groups, strict=True)]
            return jax.tree.unflatten(treedef, sums)
        with _PROMOTES():
            if self._inside_from is not None:
                return self._found.weighted_sum_again(self._without_excluded(weights), weights, dtype)
            return self._found.weighted_sum(weights, dtype)

    def each(self) -> Any:
        """Return each example's gradients, after `transform`; only for "vmap"."""
        assert self._found is None
        return self._each

    def _without_excluded(self, weights: jax.Array) -> list[Any]:
        """Return the examples, with the first one that has a weight in place of those that have none.

        The gradient of a weighted loss would be NaN if an example of weight 0 had an infinite gradient. The choice also
        keeps XLA from merging both passes into one (by CSE), which `lax.optimization_barrier` does not on a CPU.
        """
        has_weight = (weights != 0).reshape(len(weights), -1).any(1)
        places = jnp.arange(len(weights))
        is_first = places == jnp.where(has_weight, places, len(weights)).min()

        def chosen(x: jax.Array) -> jax.Array:
            if is_key(x):
                return jax.random.wrap_key_data(chosen(jax.random.key_data(x)), impl=jax.random.key_impl(x))
            first_only = jnp.where(_along(is_first, x), x, jnp.zeros_like(x))
            # This sum is a copy of the first. Indexing (and `argmax`) would gather a batch that is sharded.
            first = first_only.any(0) if x.dtype == bool else first_only.sum(0, dtype=x.dtype)
            return jnp.where(_along(has_weight, x), x, first)

        return [chosen(x) for x in self._examples]


def _along(mask: jax.Array, x: jax.Array) -> jax.Array:
    """Return a mask of shape (batch,) with axes of size 1 appended, to select along axis 0 of `x`."""
    return mask.reshape(-1, *[1] * (x.ndim - 1))


def each_gradient(of: PerExample, examples: Sequence[Any], spmd_axis_name: str | None = None) -> Any:
    """Return `((values, aux), gradients)`, each with the examples along axis 0."""
    each = jax.value_and_grad(of.loss, has_aux=True)
    if examples[0].shape[0] == 1:  # on CPU, axes of size 1 cost a tenth of the time
        return jax.tree.map(lambda x: x[None], each(of.parameters, [x[0] for x in examples]))
    # `jax.vmap` of these gradients may be wrong on several devices; `rules.py` does not use that derivative.
    if jax.device_count() > 1 and of.program.mapped_wrongly():
        found = ExampleGradients(of.program, examples, spmd_axis_name)
        return (found.values, found.aux), found.each()
    return jax.vmap(each, (None, 0), spmd_axis_name=spmd_axis_name)(of.parameters, list(examples))


def _mapped(transform: Callable[[list[Any]], Any], each: list[jax.Array]) -> Any:
    """Apply `transform` to each example's gradients; for a single example without `jax.vmap`, which may fail."""
    if each and len(each[0]) == 1:
        return jax.tree.map(lambda x: x[None], transform([x[0] for x in each]))
    return jax.vmap(transform)(each)


def positive(norms: jax.Array) -> jax.Array:
    """Return norms that are not too small to divide by."""
    # tiny^0.4 is 10⁻¹⁵ in float32, whose square is still a normal number. Smaller norms may come from squares that
    # underflowed, and a norm of zero would give an infinite weight.
    return jnp.maximum(norms, float(jnp.finfo(norms.dtype).tiny) ** 0.4)


def squared_norms(gradients: Any, groups: ClipGroups | None) -> jax.Array:
    """Return the squared norm of each example's gradients, over all arrays of a pytree or of each clip group."""
    leaves = [Dense(x).squared_norm() for x in jax.tree.leaves(gradients)]
    if groups is None:
        total: Any = sum(leaves)
        return total
    return sum_by_group(groups, zip(groups.of_leaf, leaves, strict=True), jnp.zeros_like(sum(leaves)))
