"""Each example's gradients of a loss, from one backward pass, without holding them: norms and weighted sums."""

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

# The most that the rounding of a sum may come to, in roundings of its largest terms.
_ROUNDINGS = 8


class ExampleGradients:
    """The gradients of a loss at each example of a batch.

    Args:
      program: the loss.
      examples: the examples, along axis 0 of each array.
      spmd_axis_name: as for `jax.vmap`.
      held: those of a first pass over the same examples.

    Attributes:
      values: the loss of each example.
      aux: what else it returned, for each example.
      held: each example's gradients of the parameters whose uses have no form together, by the number of the parameter.
    """

    def __init__(
        self,
        program: ExampleProgram,
        examples: Sequence[Any],
        spmd_axis_name: str | None = None,
        held: dict[int, jax.Array] | None = None,
    ) -> None:
        if program.refusal:  # `jax.grad` takes its place
            raise NotImplementedError(program.refusal)
        self._plan, self._parameters, self._uses = program.plan, program.parameters, program.uses
        self._spmd = spmd_axis_name
        batch = examples[0].shape[0]

        def of_example(zeros: Any, example: list[Any]) -> Any:
            outputs, records = run_perturbed(self._plan, [*self._parameters, *example], zeros)
            value, aux = jax.tree.unflatten(program.treedef, outputs)
            return value, (aux, records)

        # The only backward pass. No example's loss depends on another's zeros, so a cotangent of ones for all of the
        # losses gives each example's own cotangents.
        zeros = zero_perturbations(self._plan, batch)
        given = [*examples, jnp.zeros(batch, jnp.float32)]  # with the zero that `ExampleProgram` adds to the loss
        mapped = jax.vmap(of_example, spmd_axis_name=spmd_axis_name)
        self.values, pull, (self.aux, records) = jax.vjp(lambda zeros: mapped(zeros, given), zeros, has_aux=True)
        (cotangents,) = pull(jnp.ones_like(self.values))
        # The gradient of the operand of each use; then what is summed: for each group of uses that have numbers of the
        # parameters in common, as few forms as there can be, or each example's gradients of these parameters.
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
        """Group the uses that have numbers of the parameters in common."""
        groups: list[list[int]] = []
        for n, use in enumerate(self._uses):
            joined = [group for group in groups if any(not disjoint(use.value, self._uses[m].value) for m in group)]
            groups = [group for group in groups if group not in joined] + [[*itertools.chain(*joined), n]]
        return groups

    def _of_leaves(self, numbers: Sequence[int]) -> dict[int, jax.Array]:
        """Return each example's gradients of the parameters of some uses."""
        leaves = sorted(frozenset[int]().union(*(self._uses[n].value.leaves for n in numbers)))

        def of_chosen(chosen: list[Any]) -> dict[int, Any]:
            changed = dict(zip(leaves, chosen, strict=True))
            given = [changed.get(i, x) for i, x in enumerate(self._parameters)]
            return operands(self._plan, given, frozenset(numbers))

        _, pull = jax.vjp(of_chosen, [self._parameters[i] for i in leaves])
        # A product may be of another dtype than its operand, whose dtype `pull` wants.
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
            # A table that is read by rows and multiplied with: ‖A + B‖² = ‖A‖² + ‖B‖² + 2⟨A, B⟩.
            rows = [form for form in forms.values() if isinstance(form, RowSparse)]
            factors = [form for form in forms.values() if isinstance(form, OuterProduct)]
            total = total + sum(row.cross(factor) for row in rows for factor in factors)
        return jnp.maximum(total, 0)  # where terms cancel each other, a rounding error is left, of either sign

    def upper_norms(self, twice: bool) -> jax.Array:
        """Return the norms to clip by, which are those of the gradients, rounded up.

        A gradient may be what remains where terms cancel each other: positions, or uses of a parameter. Neither its
        norm from inner products nor a sum of the terms is then closer than the rounding errors of the largest.

        Args:
          twice: whether the sum is taken from the forms of a second backward pass, and not from these.
        """
        # ‖g‖² + 8ε Σₜ ‖aₜ‖²‖gₜ‖², of which the sum over positions is `terms`.
        squares = self.squared_norms
        eps = float(jnp.finfo(squares.dtype).eps)
        # Of the norms, by their own dtype; of the sum, by that in which it is taken: most often the same.
        terms, lost = [], []
        for group, forms in self._groups:
            for form in forms.values():
                if isinstance(form, (OuterProduct, RowSparse)):
                    terms.append(form.terms())
                    if form.eps() > eps:
                        lost.append(_ROUNDINGS * form.eps() * terms[-1])
                elif twice:  # else it is summed as it is
                    lost += [_ROUNDINGS * self._at_uses[n].eps() * self._at_uses[n].terms() for n in group]
        squares = squares + _ROUNDINGS * eps * sum(terms)
        norms = jnp.sqrt(jnp.maximum(squares, sum(lost)) if lost else squares)
        # A factor of bfloat16 times the weight is rounded, and may grow. Of what is computed twice, XLA may leave out
        # other roundings to half precision each time.
        grown = [form.eps() / 2 for form in self._forms.values() if isinstance(form, OuterProduct)]
        grown += [2 * float(jnp.finfo(dtype_of(form)).eps) for form in self._at_uses.values() if twice]
        return norms * (1 + max(grown)) if grown and max(grown) > 4 * eps else norms

    def forms_summed(self) -> dict[int, GradientForm | None]:
        """Return the form that the gradient at each use is summed from, be it with others; None where it is held."""
        found: dict[int, GradientForm | None] = {}
        for group, forms in self._groups:
            for n in group:
                alike = [form for form in forms.values() if isinstance(form, type(self._at_uses[n]))]
                found[n] = next(iter([*alike, *forms.values()]), None)
        return found

    def each(self) -> list[jax.Array]:
        """Return the gradient of each parameter at each example: shape (batch, *parameter)."""
        found = self._of_leaves(range(len(self._uses)))
        batch = self.values.shape
        return [found.get(i, jnp.zeros((*batch, *x.shape), x.dtype)) for i, x in enumerate(self._parameters)]

    def weighted_sum(self, weights: jax.Array, dtype: Any = None) -> list[jax.Array]:
        """Sum `weights` times the gradient over examples, for each parameter; examples of weight zero are left out.

        Args:
          weights: shape (batch,).
          dtype: what to sum in, if it is wider than the dtypes of the parameters, or float32.
        """

        def of_parameters(parameters: list[Any]) -> dict[int, Any]:
            return operands(self._plan, parameters, frozenset(self._forms), wider=True)

        # The sums are taken at the operands, and go back to the parameters once, by the transpose of a linear map.
        given, pull = jax.vjp(of_parameters, [x.astype(wide(x.dtype, dtype)) for x in self._parameters])
        found = {n: form.weighted(weights, dtype).astype(given[n].dtype) for n, form in self._forms.items()}
        (sums,) = pull({n: divided_as(x, given[n]) for n, x in found.items()})
        for i, gradients in self.held.items():
            sums[i] += Dense(gradients).weighted(weights, dtype)
        return sums
