"""Norms and weighted sums of each example's gradients from one backward pass, without materializing the gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from ..._calls.explicit_sharding import divided_as
from .gradient_forms import Dense, GradientForm, OuterProduct, RowSparse, dtype_of, merged, wide
from .loss import ExampleProgram
from .parameter_uses import disjoint
from .perturbations import operands, run_perturbed, zero_perturbations
from .rules import forms_at

# A bound on the rounding error of a sum, in units of the rounding error of its largest terms.
_ROUNDINGS = 8


class ExampleGradients:
    """The gradients of a loss at each example of a batch, as gradient forms.

    Args:
      program: the loss.
      examples: the examples, along axis 0 of each array.
      spmd_axis_name: as for `jax.vmap`.
      held: the attribute `held` of a first pass over the same examples.

    Attributes:
      values: the loss of each example.
      aux: the auxiliary output of each example.
      held: materialized gradients of the parameters whose uses have no common form, by the index of the parameter.
    """

    def __init__(
        self,
        program: ExampleProgram,
        examples: Sequence[Any],
        spmd_axis_name: str | None = None,
        held: dict[int, jax.Array] | None = None,
    ) -> None:
        if program.refusal:  # `first_that_traces` then falls back to `jax.grad`
            raise NotImplementedError(program.refusal)
        self._plan, self._parameters, self._uses = program.plan, program.parameters, program.uses
        self._spmd = spmd_axis_name
        batch = examples[0].shape[0]

        def of_example(zeros: Any, example: list[Any]) -> Any:
            outputs, records = run_perturbed(self._plan, [*self._parameters, *example], zeros)
            value, aux = jax.tree.unflatten(program.treedef, outputs)
            return value, (aux, records)

        # The only backward pass. No example's loss depends on another's zeros, so a cotangent of ones for all losses
        # gives the cotangents of each example separately.
        zeros = zero_perturbations(self._plan, batch)
        given = [*examples, jnp.zeros(batch, jnp.float32)]  # with the zero that `ExampleProgram` adds to the loss
        mapped = jax.vmap(of_example, spmd_axis_name=spmd_axis_name)
        self.values, pull, (self.aux, records) = jax.vjp(lambda zeros: mapped(zeros, given), zeros, has_aux=True)
        (cotangents,) = pull(jnp.ones_like(self.values))
        # First the gradient of the operand of each use. Then, for each group of uses that share elements of the
        # parameters, as few forms as possible, or materialized gradients of these parameters.
        self._at_uses = self._forms_at_uses(records, cotangents)
        self._groups: list[tuple[list[int], dict[int, GradientForm]]] = []
        self.held: dict[int, jax.Array] = held or {}
        for group in self._uses_in_common():
            forms = merged([(n, self._uses[n], self._at_uses[n]) for n in group])
            if forms is None and held is None:
                for leaf, gradients in self._of_leaves(group).items():
                    self.held[leaf] = self.held.get(leaf, 0) + gradients
            self._groups.append((group, forms or {}))
        self._forms = {n: form for _, forms in self._groups for n, form in forms.items()}

    def _forms_at_uses(self, records: Any, cotangents: Any) -> dict[int, GradientForm]:
        """Return the form of each example's gradient of the operand of each use."""
        given = operands(self._plan, self._parameters, frozenset(range(len(self._uses))))
        forms: dict[int, GradientForm] = {}
        for first in self._plan.firsts():
            together = [n for n, use in enumerate(self._uses) if use.first == first]
            uses, fixed = [self._uses[n] for n in together], [given[n] for n in together]
            found = forms_at(uses, fixed, records[first], cotangents[first], self._spmd)
            forms |= zip(together, found, strict=True)
        return forms

    def _uses_in_common(self) -> list[list[int]]:
        """Group the uses that share elements of the parameters."""
        groups: list[list[int]] = []
        for n, use in enumerate(self._uses):
            joined = [group for group in groups if any(not disjoint(use.value, self._uses[m].value) for m in group)]
            groups = [group for group in groups if group not in joined] + [[*itertools.chain(*joined), n]]
        return groups

    def _of_leaves(self, numbers: Sequence[int]) -> dict[int, jax.Array]:
        """Materialize each example's gradients of the parameters of some uses."""
        leaves = sorted(frozenset[int]().union(*(self._uses[n].value.leaves for n in numbers)))

        def of_chosen(chosen: list[Any]) -> dict[int, Any]:
            changed = dict(zip(leaves, chosen, strict=True))
            given = [changed.get(i, x) for i, x in enumerate(self._parameters)]
            return operands(self._plan, given, frozenset(numbers))

        _, pull = jax.vjp(of_chosen, [self._parameters[i] for i in leaves])
        # The dtype of a product may differ from that of its operand, which `pull` expects.
        found = {n: self._at_uses[n].each().astype(self._uses[n].aval.dtype) for n in numbers}
        (gradients,) = jax.vmap(pull, spmd_axis_name=self._spmd)(found)
        return dict(zip(leaves, gradients, strict=True))

    @cached_property
    def squared_norms(self) -> jax.Array:
        """Return the squared norm of each example's gradient."""
        total: Any = jnp.zeros(self.values.shape, jnp.promote_types(self.values.dtype, jnp.float32))
        for form in [*self._forms.values(), *map(Dense, self.held.values())]:
            total = total + form.squared_norm()
        for _, forms in self._groups:
            # A table that is both indexed and multiplied: ‖A + B‖² = ‖A‖² + ‖B‖² + 2⟨A, B⟩.
            rows = [form for form in forms.values() if isinstance(form, RowSparse)]
            factors = [form for form in forms.values() if isinstance(form, OuterProduct)]
            total = total + sum(row.cross(factor) for row in rows for factor in factors)
        return jnp.maximum(total, 0)  # if terms cancel, a rounding error of either sign remains

    def upper_norms(self, twice: bool) -> jax.Array:
        """Return the norms to clip by: upper bounds on the gradient norms that include rounding errors.

        The terms of a gradient, which are positions or uses of a parameter, may cancel. Its norm from inner products
        and the sum of the terms are then only as accurate as the rounding errors of the largest terms.

        Args:
          twice: whether the weighted sum uses the forms of a second backward pass instead of these.
        """
        # The bound is ‖g‖² + 8ε Σₜ ‖aₜ‖²‖gₜ‖²; `terms` is the sum over positions t.
        squares = self.squared_norms
        eps = float(jnp.finfo(squares.dtype).eps)
        # `terms` are weighted by the rounding error of the norms' dtype; `lost` by that of the sum, if it is larger.
        terms, lost = [], []
        for group, forms in self._groups:
            for form in forms.values():
                if isinstance(form, (OuterProduct, RowSparse)):
                    terms.append(form.terms())
                    if form.eps() > eps:
                        lost.append(_ROUNDINGS * form.eps() * terms[-1])
                elif twice:  # otherwise the materialized gradients are summed as they are
                    lost += [_ROUNDINGS * self._at_uses[n].eps() * self._at_uses[n].terms() for n in group]
        squares = squares + _ROUNDINGS * eps * sum(terms)
        norms = jnp.sqrt(jnp.maximum(squares, sum(lost)) if lost else squares)
        # A bfloat16 factor times its weight is rounded, and may grow. In a second pass, XLA may omit other roundings to
        # half precision than in the first.
        grown = [form.eps() / 2 for form in self._forms.values() if isinstance(form, OuterProduct)]
        grown += [2 * float(jnp.finfo(dtype_of(form)).eps) for form in self._at_uses.values() if twice]
        return norms * (1 + max(grown)) if grown and max(grown) > 4 * eps else norms

    def forms_summed(self) -> dict[int, GradientForm | None]:
        """Return, for each use, the form (possibly shared) that its gradient is summed from; None if materialized."""
        found: dict[int, GradientForm | None] = {}
        for group, forms in self._groups:
            for n in group:
                alike = [form for form in forms.values() if isinstance(form, type(self._at_uses[n]))]
                found[n] = next(iter([*alike, *forms.values()]), None)
        return found

    def each(self) -> list[jax.Array]:
        """Materialize each example's gradient of every parameter: shape (batch, *parameter)."""
        found = self._of_leaves(range(len(self._uses)))
        batch = self.values.shape
        return [found.get(i, jnp.zeros((*batch, *x.shape), x.dtype)) for i, x in enumerate(self._parameters)]

    def weighted_sum(self, weights: jax.Array, dtype: Any = None) -> list[jax.Array]:
        """Sum `weights` times the gradient over examples, for each parameter; examples of weight zero are excluded.

        Args:
          weights: shape (batch,).
          dtype: the dtype of the sum, if it is wider than float32 and the dtypes of the parameters.
        """

        def of_parameters(parameters: list[Any]) -> dict[int, Any]:
            return operands(self._plan, parameters, frozenset(self._forms), wider=True)

        # Sum at the operands, then pull the sums back to the parameters once, by the transpose of a linear map.
        given, pull = jax.vjp(of_parameters, [x.astype(wide(x.dtype, dtype)) for x in self._parameters])
        found = {n: form.weighted(weights, dtype).astype(given[n].dtype) for n, form in self._forms.items()}
        (sums,) = pull({n: divided_as(x, given[n]) for n, x in found.items()})
        for i, gradients in self.held.items():
            sums[i] += Dense(gradients).weighted(weights, dtype)
        return sums
