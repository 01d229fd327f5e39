"""The methods: how the norms of a batch and the weighted sum of its gradients are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._gradients import ExampleGradients
from ._per_example import PerExample
from ._pieces import Direct, kept
from ._program import Program


class Backward:
    """A backward pass over some examples: their norms, and sums of their gradients.

    Args:
      of: the loss.
      program: the same, traced; None to hold each example's gradient.
      examples: the examples, along axis 0 of each array.
      method: "ghost" for a second pass that sums; anything else for one pass.
      spmd_axis_name: as for `jax.vmap`.
      transform: what becomes of each example's gradients before they are clipped; only without a program.

    Attributes:
      values: the loss of each example.
      aux: the arrays that it returned beside the loss, for each.
      squares: the squared norm of each example's gradient.
    """

    def __init__(
        self,
        of: PerExample,
        program: Program | None,
        examples: Sequence[Any],
        method: str,
        spmd_axis_name: str | None = None,
        transform: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._of, self._examples, self._method, self._spmd = of, list(examples), method, spmd_axis_name
        self._parameters = of.parameters
        self._held = program is None
        if program is None:
            (self.values, self.aux), self._each = each_gradient(of, self._examples, spmd_axis_name)
            self.squares = _squares(self._each)
            clipped = self.squares
            if transform is not None:
                self._each = jax.vmap(transform)(self._each)
                clipped = _squares(self._each)
            self._clipped = jnp.sqrt(clipped)
            return
        self._found = ExampleGradients(program, self._examples, spmd_axis_name)
        self.values, self.aux, self.squares = self._found.values, self._found.aux, self._found.squared_norms
        self._clipped = self._found.upper_norms(twice=method == "ghost")

    def norms_to_clip(self) -> jax.Array:
        """The norms that are to be bounded: after the transform, if there is one, and rounded up; never zero."""
        return jnp.maximum(self._clipped, float(jnp.finfo(self._clipped.dtype).tiny) ** 0.4)

    def weighted_sum(self, weights: jax.Array, dtype: Any) -> Any:
        """The sum over the examples of `weights` times the gradient; examples of weight zero are left out."""
        if self._held:
            return jax.tree.map(lambda x: Direct(x).weighted(weights, dtype), self._each)
        if self._method != "ghost":
            return self._found.weighted_sum(weights, dtype)

        def weighted_loss(parameters: list[Any]) -> Any:
            mapped = jax.vmap(self._of.loss, (None, 0), spmd_axis_name=self._spmd)
            losses = kept(mapped(parameters, self._kept_examples(weights))[0], weights)
            return jnp.sum(losses * weights.astype(losses.dtype))

        return jax.grad(weighted_loss)(self._parameters)

    def _kept_examples(self, weights: jax.Array) -> list[Any]:
        """The examples, with those of weight zero, which may hold NaN, replaced by zeros."""
        return [kept(x, weights) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in self._examples]


def each_gradient(of: PerExample, examples: Sequence[Any], spmd_axis_name: str | None = None) -> Any:
    """The values, what is returned beside them, and the gradients, for each of some examples."""
    each = jax.value_and_grad(of.loss, has_aux=True)
    if examples[0].shape[0] == 1:  # axes of size 1 cost a tenth of the time on CPU
        beside, gradients = each(of.parameters, [x[0] for x in examples])
        return jax.tree.map(lambda x: x[None], (beside, gradients))
    if jax.device_count() > 1 and of.program.mapped_wrongly():
        found = ExampleGradients(of.program, examples, spmd_axis_name)
        return (found.values, found.aux), found.each()
    return jax.vmap(each, (None, 0), spmd_axis_name=spmd_axis_name)(of.parameters, list(examples))


def _squares(gradients: Any) -> jax.Array:
    total: Any = sum(Direct(x).squared_norm() for x in jax.tree.leaves(gradients))
    return total
