"""The methods "vmap", "ghost" and "book_keeping": which one to take, and what it computes.

"auto" counts bytes and operations from shapes; nothing is timed. Every method costs an ordinary gradient, and something
in addition. Book-keeping takes the norms of products between positions, and holds small gradients. Where each gradient
is held, it is written, and read for its norm and for the sum. In groups, every operation is started and every sum added
to for each of them; but what a group keeps from the forward pass for the backward pass may stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from ..._core.arguments import check_choice
from ..._core.jaxpr import aval, bodies
from ..._core.prng import is_key
from .gradient_forms import Dense
from .loss import ExampleProgram, PerExample
from .norms import ExampleGradients
from .parameter_uses import ParameterUse
from .rules import norm_cost

Method = Literal["auto", "vmap", "ghost", "book_keeping"]

# Of a CPU; from the shapes of benchmarks/privacy.py and dense layers of 64 to 1024.
_OPERATIONS_PER_BYTE = 8.0  # floating-point operations in the time of one byte of memory
_SMALL, _SMALL_START, _START = 65_536, 25_000, 100_000  # bytes in the time of starting an operation on few, and on many
_CACHE, _CACHE_OF_GRADIENTS = 16 * 2**20, 10 * 2**20
# A user's own setting of "strict" is for the tracing of the loss; it would refuse the mixed dtypes of our sums.
_PROMOTES = partial(jax.numpy_dtype_promotion, "standard")


def check_method(api: str, method: Any) -> None:
    """Raise if `method` is not the name of a method."""
    check_choice(api, "method", method, get_args(Method))


class MethodChoice(NamedTuple):
    """A method, the number of examples at a time, and why they were chosen.

    Attributes:
      method: "vmap", "ghost" or "book_keeping".
      examples: how many at a time.
      why: a sentence.
    """

    method: str
    examples: int
    why: str


def choose(program: ExampleProgram, batch: int, most: int, spmd_axis_name: Any) -> MethodChoice:
    """Return the choice that costs the least.

    Args:
      program: the loss.
      batch: how many examples there are.
      most: how many may be computed at a time; it divides the batch.
      spmd_axis_name: as for `jax.vmap`.
    """
    if jax.default_backend() != "cpu" or jax.device_count() > 1 or spmd_axis_name is not None:
        return MethodChoice(
            "book_keeping", most, "a loop over examples leaves an accelerator, or several devices, idle"
        )
    used = frozenset[int]().union(*(use.value.leaves for use in program.uses))
    held = sum(program.parameters[i].nbytes for i in used)
    norms = sum(_bytes(use, program.parameters) for use in program.uses)
    found = []
    for size in (size for size in range(1, most + 1) if most % size == 0):
        starts, between = _starts_and_results(program.closed.jaxpr, size)
        # Results between the passes are written and read, unless the cache holds those of a group.
        spilled = 2 * batch * between if size * between > _CACHE else 0
        # Each group but the first reads the sum, writes it, and writes its own part of it.
        groups = batch // size * (3 * held + starts) if size < batch else 0
        found.append((batch * norms + groups + spilled, "book_keeping", size))
        if size * held <= _CACHE_OF_GRADIENTS or size == 1:
            found.append((4 * batch * held + batch // size * starts + spilled, "vmap", size))
    cost, method, size = min(found)
    other = min(cost for cost, other, _ in found if other != method)
    instead = "held" if method == "book_keeping" else "not held"
    why = f"counted as {cost / 2**20:.1f} MiB to read, and {other / 2**20:.1f} MiB if gradients were {instead}"
    return MethodChoice(method, size, why)


def _bytes(use: ParameterUse, parameters: Sequence[jax.Array]) -> float:
    """Return the cost of the norm of one example's gradient at a use, in bytes to read or write."""
    operations, numbers = norm_cost(use)
    if use.value.layout is None:  # the gradients of the parameters themselves are held
        numbers += sum(parameters[i].size for i in use.value.leaves)
    return operations / _OPERATIONS_PER_BYTE + 2 * numbers * use.aval.dtype.itemsize


def _starts_and_results(jaxpr: Jaxpr, examples: int) -> tuple[int, int]:
    """Return the cost of starting the operations for some examples, and the bytes of one's results, loops unrolled."""
    starts = results = 0
    for eqn in jaxpr.eqns:
        inner = [_starts_and_results(body, examples) for body in bodies(eqn)]
        iterations = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        if inner:
            starts += iterations * sum(start for start, _ in inner)
            results += iterations * sum(result for _, result in inner)
            continue
        # Only numbers with derivatives are kept for the backward pass.
        kept = [aval(out) for out in eqn.outvars if jnp.issubdtype(aval(out).dtype, jnp.inexact)]
        size = sum(x.size * x.dtype.itemsize for x in kept)
        starts += _START if examples * size >= _SMALL else _SMALL_START
        results += size
    return starts, results


def routes(of: PerExample, choice: MethodChoice) -> list[MethodChoice]:
    """Return the routes to try in order: the choice, and an ordinary gradient of one example after another.

    The last one always works, and is the only one where XLA would compute the choice wrongly.
    """
    if of.size == 0:
        return [MethodChoice("vmap", 0, "there are no examples")]
    one = MethodChoice("vmap", 1, "one example at a time")
    if choice[:2] == one[:2]:
        return [choice]
    divided = jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes
    inside = of.program.wrong_inside() if divided else ""
    if inside:
        wrong = f"among several devices, XLA computes the mapped derivative of a convolution inside of {inside} wrongly"
        return [one._replace(why=f"{one.why}: {wrong}")]
    return [choice, one]


def first_that_traces(
    api: str, routes: Sequence[MethodChoice], compute: Callable[[MethodChoice], Any]
) -> tuple[MethodChoice, Any]:
    """Return the first of some routes that JAX can trace, and what it computed.

    A refusal of ours, which begins with `api`, is raised. What an operation can do is known only by trying: it may have
    no rule to be mapped with, or none for a backward pass of which an ordinary gradient needs no part. The last route
    is the gradient of one example, as `jax.grad` has it.
    """
    failed = ""
    for route in routes[:-1]:
        try:
            return route._replace(why=route.why + failed), compute(route)
        except jax.errors.JaxRuntimeError:  # the program was traced, and failed when it ran: out of memory, say
            raise
        except Exception as error:  # of any kind: a rule that is missing raises what its author thought of
            if str(error).startswith(f"{api}: "):  # a refusal
                raise
            first = f"{type(error).__name__}: {error}".splitlines()[0]
            failed += f'; method="{route.method}" cannot do it ({first})'
    return routes[-1]._replace(why=routes[-1].why + failed), compute(routes[-1])


class Backward:
    """A backward pass over some examples: their norms, and sums of their gradients.

    Args:
      of: the loss.
      examples: the examples, along axis 0 of each array.
      method: "vmap" to hold each example's gradient, "ghost" for a second pass that sums, anything else for one pass.
      spmd_axis_name: as for `jax.vmap`.
      transform: applied to each example's gradients before they are clipped; only for "vmap".

    Attributes:
      values: the loss of each example.
      aux: the arrays that the loss returned in addition, for each.
      squares: the squared norm of each example's gradient.
    """

    def __init__(
        self,
        of: PerExample,
        examples: Sequence[Any],
        method: str,
        spmd_axis_name: str | None = None,
        transform: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._of, self._examples, self._method, self._spmd = of, list(examples), method, spmd_axis_name
        self._found = None
        if method == "vmap":
            (self.values, self.aux), self._each = each_gradient(of, self._examples, spmd_axis_name)
            self.squares = clipped = _squares(self._each)
            if transform is not None:
                self._each = _mapped(transform, self._each)
                clipped = _squares(self._each)
            self._clipped = jnp.sqrt(clipped)
            return
        with _PROMOTES():
            self._found = ExampleGradients(of.program, self._examples, spmd_axis_name)
            self.values, self.aux, self.squares = self._found.values, self._found.aux, self._found.squared_norms
            self._clipped = self._found.upper_norms(twice=method == "ghost")

    def norms_to_clip(self) -> jax.Array:
        """Return the norms that are to be bounded: after the transform, if there is one, and rounded up; never zero."""
        # tiny^0.4 is 10⁻¹⁵ in float32, whose square is still a normal number: smaller norms may come from squares that
        # vanished, and a bound divided by zero is no weight.
        return jnp.maximum(self._clipped, float(jnp.finfo(self._clipped.dtype).tiny) ** 0.4)

    def weighted_sum(self, weights: jax.Array, dtype: Any) -> Any:
        """Sum `weights` times the gradient over the examples, in `dtype` or wider.

        Examples of weight zero are left out, whatever they hold.
        """
        if self._found is None:
            return jax.tree.map(lambda x: Dense(x).weighted(weights, dtype), self._each)
        found = self._found
        with _PROMOTES():
            if self._method == "ghost":
                # The same once more, so that no form of the first pass is kept until the weights are known. (A second
                # pass through the weighted losses would let examples of weight zero in: 0 * inf is NaN.)
                found = ExampleGradients(self._of.program, self._hidden(weights), self._spmd, self._found.held)
            return found.weighted_sum(weights, dtype)

    def _hidden(self, weights: jax.Array) -> list[Any]:
        """Return the examples in a form in which XLA does not see that they are those of the first pass.

        It would merge both passes into one. `lax.optimization_barrier` does not keep it from that on a CPU.
        """
        unchanged = ~(weights < 0)  # true for all of them, which XLA cannot know

        def hidden(x: jax.Array) -> jax.Array:
            return jnp.where(unchanged.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))

        return [x if is_key(x) else hidden(x) for x in self._examples]  # keys have no zeros


def each_gradient(of: PerExample, examples: Sequence[Any], spmd_axis_name: str | None = None) -> Any:
    """Return the values with what is returned in addition, and the gradients, for each of some examples."""
    each = jax.value_and_grad(of.loss, has_aux=True)
    if examples[0].shape[0] == 1:  # axes of size 1 cost a tenth of the time on CPU
        return jax.tree.map(lambda x: x[None], each(of.parameters, [x[0] for x in examples]))
    # `jax.vmap` of these gradients may be wrong on several devices; the rules of `rules.py` do without its derivatives.
    if jax.device_count() > 1 and of.program.mapped_wrongly():
        found = ExampleGradients(of.program, examples, spmd_axis_name)
        return (found.values, found.aux), found.each()
    return jax.vmap(each, (None, 0), spmd_axis_name=spmd_axis_name)(of.parameters, list(examples))


def _mapped(transform: Callable[[list[Any]], Any], each: list[jax.Array]) -> Any:
    """Apply `transform` to each example's gradients; to a single one without `jax.vmap`, which it need not allow."""
    if each and len(each[0]) == 1:
        return jax.tree.map(lambda x: x[None], transform([x[0] for x in each]))
    return jax.vmap(transform)(each)


def _squares(gradients: Any) -> jax.Array:
    """Return the squared norm of each example's gradients, over all arrays of a pytree."""
    total: Any = sum(Dense(x).squared_norm() for x in jax.tree.leaves(gradients))
    return total
