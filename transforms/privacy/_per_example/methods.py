"""The methods "vmap", "ghost" and "book_keeping": the norms of a batch, and the weighted sum of its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.prng import is_key
from .gradient_forms import Dense
from .loss import PerExample
from .method_choice import MethodChoice
from .norms import ExampleGradients

# A user's own setting of "strict" is for the tracing of the loss; it would refuse the mixed dtypes of our sums.
_PROMOTES = partial(jax.numpy_dtype_promotion, "standard")


def routes(of: PerExample, choice: MethodChoice) -> list[MethodChoice]:
    """Return the routes to try in order: the choice, and an ordinary gradient of one example after another.

    The last one always works, and is the only one where XLA would compute the choice wrongly.
    """
    one = MethodChoice("vmap", min(choice.examples, 1), "one example at a time")
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
                # The same once more, so that nothing of the first pass is kept until the weights are known. (A second
                # pass through the weighted losses would let examples of weight zero in: 0 * inf is NaN.)
                found = ExampleGradients(self._of.program, self._hidden(weights), self._spmd)
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
