"""Norms and weighted sums of each example's gradients from one backward pass, without materializing the gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._calls.explicit_sharding import divided_as
from ..._convolutions.as_products import has_convolution
from ..._core.compat import varying, varying_axes
from ..._core.jaxpr import evaluate, interpret
from .clip_norms import ClipGroups, of_group, sum_by_group
from .gradient_forms import Dense, GradientForm, OuterProduct, RowSparse, merged, rounding, wide, widened
from .in_backward import InBackward, has_linear_backward, in_backward
from .loss import ExampleProgram
from .parameter_uses import sharing
from .perturbations import Perturbations, Records, operands, run_perturbed, zero_perturbations
from .rules import forms_at, has_rule


class ExampleGradients:
    """The gradients of a loss at each example of a batch, as gradient forms.

    Args:
      program: the loss.
      examples: the examples, along axis 0 of each array.
      spmd_axis_name: as for `jax.vmap`.
      inside_from: the number of the first use whose norm is computed inside the backward pass if possible, and whose
        gradients are summed in a second pass; None to keep the forms of all uses for the sum.
      seed: the cotangent of each example's output, for all examples or with one for each along axis 0; None for ones.
      clip_groups: the groups of parameters with a norm of their own; None for one norm. With them, norms and weights
        have the shape (batch, groups) instead of (batch,).
      factors: whether the forms of several uses stay apart, and outer products are kept as factors, even if these have
        more numbers than the gradients.

    Attributes:
      values: the loss of each example.
      aux: the auxiliary output of each example.
      parameters: the parameters.
      uses: the parameter uses of the program.
      groups: the numbers of the uses that share elements of parameters, each with the forms that `merged` returns.
      held: materialized gradients of the parameters whose uses have no common form, by the index of the parameter.
    """

    def __init__(
        self,
        program: ExampleProgram,
        examples: Sequence[Any],
        spmd_axis_name: str | None = None,
        inside_from: int | None = None,
        seed: Any = None,
        clip_groups: ClipGroups | None = None,
        *,
        factors: bool = False,
    ) -> None:
        if program.refusal:  # `first_that_traces` then falls back to `jax.grad`
            raise NotImplementedError(program.refusal)
        self._program, self._plan, self.parameters = program, program.plan, program.parameters
        self.uses, self._spmd, self._seed = program.uses, spmd_axis_name, seed
        self._clip_groups, self._factors = clip_groups, factors
        self._inside = None
        if inside_from is not None:
            self._inside = in_backward(self._plan, spmd_axis_name, inside_from, clip_groups)
        self._keeps = inside_from != 0  # whether forms of the first pass are kept for the sum
        zeros = zero_perturbations(self._plan, examples[0].shape[0], self._inside)
        self.values, self.aux, records, cotangents = self._backward(examples, zeros, self._inside)
        self._entries = {n: cotangents[n] for n in self._inside.uses} if self._inside else {}
        # First the gradient of the operand of each use. Then, for each group of uses that share elements of the
        # parameters, as few forms as possible, or materialized gradients of these parameters.
        self._at_uses = self._forms_at_uses(records, cotangents)
        groups = ([n for n in group if n in self._at_uses] for group in sharing(self.uses))
        self.groups = [(group, self._merged(group)) for group in groups if group]
        self._forms = {n: form for _, forms in self.groups for n, form in (forms or {}).items()}
        self.held: dict[int, jax.Array] = {}
        for group, forms in self.groups:
            if forms is None:
                for leaf, gradients in self.of_leaves(group).items():
                    self.held[leaf] = self.held.get(leaf, 0) + gradients

    def _merged(self, group: Sequence[int]) -> dict[int, GradientForm] | None:
        """Return the common forms of some uses; None if their gradients are materialized."""
        if self._clip_groups is not None and any(self._clip_group(n) is None for n in group):
            return None  # a use of parameters with norms of their own has no norm for each of them
        if self._factors:
            return {n: self._at_uses[n] for n in group}
        return merged([(n, self.uses[n], self._at_uses[n]) for n in group])

    def _clip_group(self, n: int) -> int | None:
        """Return the clip group of the parameters of a use; None without groups, or if there are several."""
        return None if self._clip_groups is None else self._clip_groups.common(self.uses[n].value.leaves)

    def _group_of_leaf(self, leaf: int) -> int | None:
        """Return the clip group of a parameter; None without groups."""
        return None if self._clip_groups is None else self._clip_groups.of_leaf[leaf]

    def _backward(
        self, examples: Sequence[Any], zeros: Perturbations, inside: InBackward | None, weights: Any = None
    ) -> tuple[Any, Any, Records, Perturbations]:
        """Run a backward pass; return losses, auxiliary outputs, records and the cotangents of the zeros.

        Args:
          examples: the examples, along axis 0 of each array.
          zeros: the zero perturbations.
          inside: the uses that have a backward rule of their own.
          weights: the weight of each example, shape (batch,), if these rules sum weighted gradients.
        """

        def of_example(zeros: Perturbations, example: list[Any], weight: Any) -> tuple[Any, tuple[Any, Any]]:
            own = inside and inside._replace(weight=weight)
            outputs, records = run_perturbed(self._plan, [*self.parameters, *example], zeros, own)
            value, aux = jax.tree.unflatten(self._program.treedef, outputs)
            return value, (aux, records)

        # The zeros of rules that sum gradients have no axis for the examples.
        summing = inside.uses if inside is not None and weights is not None else frozenset()
        axes = {n: None if n in summing else 0 for n in zeros}, 0, 0
        mapped = jax.vmap(of_example, axes, spmd_axis_name=self._spmd)
        given = [*examples, jnp.zeros(examples[0].shape[0], jnp.float32)]  # the zero that `ExampleProgram` adds
        values, pull, (aux, records) = jax.vjp(lambda zeros: mapped(zeros, given, weights), zeros, has_aux=True)
        # No example's loss depends on another's zeros, so a cotangent of ones for all losses gives the cotangents of
        # each example separately.
        (cotangents,) = pull(
            jnp.ones_like(values) if self._seed is None else jnp.broadcast_to(self._seed, values.shape)
        )
        return values, aux, records, cotangents

    def _forms_at_uses(self, records: Records, cotangents: Perturbations) -> dict[int, GradientForm]:
        """Return the form of each example's gradient of the operand of each use that was recorded."""
        given = operands(
            self._plan, self.parameters, frozenset(n for n, use in enumerate(self.uses) if use.first in records)
        )
        forms: dict[int, GradientForm] = {}
        for first in records:
            together = [n for n, use in enumerate(self.uses) if use.first == first]
            uses, fixed = [self.uses[n] for n in together], [given[n] for n in together]
            found = forms_at(uses, fixed, records[first], cotangents[first], self._spmd, factors=self._factors)
            forms |= zip(together, found, strict=True)
        return forms

    def of_leaves(self, numbers: Sequence[int]) -> dict[int, jax.Array]:
        """Materialize each example's gradients of the parameters of some uses."""
        leaves = sorted(frozenset[int]().union(*(self.uses[n].value.leaves for n in numbers)))

        def of_chosen(chosen: list[Any]) -> dict[int, Any]:
            changed = dict(zip(leaves, chosen, strict=True))
            given = [changed.get(i, x) for i, x in enumerate(self.parameters)]
            return operands(self._plan, given, frozenset(numbers))

        _, pull = jax.vjp(of_chosen, [self.parameters[i] for i in leaves])
        # The dtype of a product may differ from that of its operand, which `pull` expects.
        found = {n: self._at_uses[n].each().astype(self.uses[n].aval.dtype) for n in numbers}
        (gradients,) = jax.vmap(pull, spmd_axis_name=self._spmd)(found)
        return dict(zip(leaves, gradients, strict=True))

    @cached_property
    def squared_norms(self) -> jax.Array:
        """Return the squared norm of each example's gradient, for each clip group."""
        return self.squared_norms_without(frozenset())

    def squared_norms_without(self, left_out: Collection[int]) -> jax.Array:
        """Return the squared norm of each example's gradient, for each clip group, without the part of some uses.

        Args:
          left_out: the numbers of these uses, none of which shares a parameter with another use.
        """
        terms: list[tuple[int | None, Any]] = []
        for n, form in self._forms.items():
            if n not in left_out:
                terms.append((self._clip_group(n), form.squared_norm()))
        for leaf, gradients in self.held.items():
            terms.append((self._group_of_leaf(leaf), Dense(gradients).squared_norm()))
        for group, forms in self.groups:
            # A table that is both indexed and multiplied: ‖A + B‖² = ‖A‖² + ‖B‖² + 2⟨A, B⟩.
            rows = [form for form in (forms or {}).values() if isinstance(form, RowSparse)]
            factors = [form for form in (forms or {}).values() if isinstance(form, OuterProduct)]
            terms += [(self._clip_group(group[0]), row.cross(factor)) for row in rows for factor in factors]
        for n, (_, *at_rows) in self._entries.items():
            terms.append((self._clip_group(n), self._entry(n, 0)))
            lookups = self._inside.lookups.get(n, []) if self._inside else []
            for lookup, found in zip(lookups, at_rows, strict=True):
                form = self._at_uses[lookup]
                assert isinstance(form, RowSparse)
                terms.append((self._clip_group(n), 2 * (found * widened(form.right)[:, 0]).sum((1, 2))))
        # If terms cancel, a rounding error of either sign remains.
        return jnp.maximum(sum_by_group(self._clip_groups, terms, self._zero()), 0)

    def _zero(self) -> jax.Array:
        """Return zeros of shape (batch,) to add squared norms to."""
        return jnp.zeros(self.values.shape, jnp.promote_types(self.values.dtype, jnp.float32))

    def _entry(self, n: int, k: int) -> jax.Array:
        """Return an entry of the sums that were computed inside the backward pass, added over the loops of a use."""
        found = self._entries[n][0]
        return found[..., k].sum(tuple(range(1, found.ndim - 1)))

    def upper_norms(self) -> jax.Array:
        """Return the norms to clip by, for each clip group: upper bounds on norms that include rounding errors.

        The terms of a gradient, which are positions or uses of a parameter, may cancel. Its norm from inner products
        and the sum of the terms are then only as accurate as the rounding errors of the largest terms.
        """
        # The bound is ‖g‖² + 8ε Σₜ ‖aₜ‖²‖gₜ‖²; the sum is over positions t.
        squares, twice = self.squared_norms, self._inside is not None
        eps = float(jnp.finfo(squares.dtype).eps)
        added, least = [], []
        for group, forms in self.groups:
            for form in (forms or {}).values():
                bounds = rounding([self._at_uses[n] for n in group], form, eps, twice)
                added.append((self._clip_group(group[0]), bounds[0]))
                least.append((self._clip_group(group[0]), bounds[1]))
        for n in self._entries:
            added.append((self._clip_group(n), self._entry(n, 1)))
            least.append((self._clip_group(n), self._entry(n, 2)))
        upper, lower = (sum_by_group(self._clip_groups, terms, self._zero()) for terms in (added, least))
        norms = jnp.sqrt(jnp.maximum(squares + upper, lower))
        # A bfloat16 factor times its weight is rounded, and may grow. In a second pass, XLA may omit other roundings to
        # half precision than in the first.
        grown = [form.eps() / 2 for form in self._forms.values() if isinstance(form, OuterProduct)]
        if twice:
            # Gradients have the dtype of the results by a rule, and that of the operand by the operation's derivative.
            rounded = [use.dtypes()[1 if has_rule(use) else 0 :] for use in self.uses]
            grown += [2 * float(jnp.finfo(dtype).eps) for dtypes in rounded for dtype in dtypes]
        return norms * (1 + max(grown)) if grown and max(grown) > 4 * eps else norms

    def forms_summed(self, inside: InBackward | None = None) -> dict[int, GradientForm | None]:
        """Return, for each use, the form (possibly shared) of its norm and sum; None if gradients are materialized.

        Args:
          inside: the uses whose norms are computed inside the backward pass, from forms of their own.
        """
        found: dict[int, GradientForm | None] = {}
        for group, forms in self.groups:
            for n in group:
                every = list((forms or {}).values())
                alike = [form for form in every if isinstance(form, type(self._at_uses[n]))]
                found[n] = next(iter([*alike, *every]), None)
        if inside is not None:
            found |= {n: inside.summed(self.uses[n], self._at_uses[n]) for n in inside.uses}
        return found

    def each(self) -> list[jax.Array]:
        """Materialize each example's gradient of every parameter: shape (batch, *parameter)."""
        found = self.of_leaves(range(len(self.uses)))
        batch = self.values.shape
        return [found.get(i, jnp.zeros((*batch, *x.shape), x.dtype)) for i, x in enumerate(self.parameters)]

    def weighted_sum(
        self, weights: jax.Array, dtype: Any = None, known: Mapping[int, jax.Array] | None = None
    ) -> list[jax.Array]:
        """Sum `weights` times the gradient over examples, for each parameter; examples of weight zero are excluded.

        Args:
          weights: shape (batch,); with clip groups (batch, groups).
          dtype: the dtype of the sum, if it is wider than float32 and the dtypes of the parameters.
          known: sums of the forms of some uses, like their operands, if they are computed already.
        """
        known = known or {}
        given, pull = self.wide_operands(frozenset(self._forms), dtype)
        found = {n: known[n] if n in known else self._weighted(n, weights, dtype) for n in self._forms}
        return self._summed(given, pull, found, weights, dtype)

    def _weighted(self, n: int, weights: jax.Array, dtype: Any) -> jax.Array:
        """Sum `weights` times the form of a use over examples."""
        return self._forms[n].weighted(of_group(weights, self._clip_group(n)), dtype)

    def weighted_sum_again(self, examples: Sequence[Any], weights: jax.Array, dtype: Any = None) -> list[jax.Array]:
        """Return `weighted_sum` from a second backward pass, after norms that were computed inside the first.

        Args:
          examples: the same examples, but for those of weight zero, which may be any for which the loss is finite.
          weights: as for `weighted_sum`.
          dtype: as for `weighted_sum`.
        """
        assert self._inside is not None
        convolved = has_convolution(self._plan.closed.jaxpr)  # slow in a `cond` on a CPU
        at_uses = partial(self._sum_at_uses, examples, weights, dtype)
        at_uses = partial(self._apart, at_uses, weights, dtype, in_cond=not convolved)
        as_parameters = all(wide(x.dtype, dtype) == x.dtype for x in self.parameters)
        one_weight = self._clip_groups is None  # an ordinary gradient weights the loss, thus all parameters alike
        if self._keeps or not (one_weight and as_parameters) or self.held or not has_linear_backward(self._plan):
            return at_uses()
        ordinary = partial(self._apart, partial(self._ordinary_gradient, examples, weights), weights, dtype)
        # On a CPU, sums by rules are quicker, but take up to twice the memory, which "ghost" is to save. So they are
        # used for convolutions only, and for forms that the first pass has.
        if convolved or any(not isinstance(form, RowSparse) for form in self._forms.values()):
            return lax.platform_dependent(cpu=at_uses, default=ordinary)
        return ordinary()

    def _apart(
        self, summed: Callable[[], list[jax.Array]], weights: jax.Array, dtype: Any, *, in_cond: bool = True
    ) -> list[jax.Array]:
        """Return the sums of a second pass; zeros if no example has a weight."""
        zeros = [jnp.zeros_like(x, wide(x.dtype, dtype)) for x in self.parameters]
        has_weight = (weights != 0).any()
        if not in_cond:
            return [jnp.where(has_weight, x, zero) for x, zero in zip(summed(), zeros, strict=True)]
        # XLA does not merge operations inside a `cond` with those of the first pass (by CSE), which would keep arrays
        # of that pass: activations, or a zero that both scatter into.
        return lax.cond(has_weight, summed, lambda: zeros)

    def _sum_at_uses(self, examples: Sequence[Any], weights: jax.Array, dtype: Any) -> list[jax.Array]:
        """Weight the gradient at each use, so that cotangents are rounded as in the first pass."""
        assert self._inside is not None
        given, pull = self.wide_operands(self._inside.uses | self._forms.keys(), dtype)
        zeros = {n: [varying(jnp.zeros_like(given[n]), varying_axes(given[n]))] for n in self._inside.uses}
        _, _, _, cotangents = self._backward(examples, zeros, self._inside._replace(lookups={}), weights)
        found = {n: self._weighted(n, weights, dtype) for n in self._forms}
        found |= {n: cotangents[n][0] for n in self._inside.uses}
        return self._summed(given, pull, found, weights, dtype)

    def _ordinary_gradient(self, examples: Sequence[Any], weights: jax.Array) -> list[jax.Array]:
        """Return the gradient of the weighted loss."""

        def of_example(parameters: list[Any], example: list[Any]) -> jax.Array:
            closed, args = self._plan.closed, [*parameters, *example, jnp.zeros((), jnp.float32)]
            outputs = interpret(closed.jaxpr, closed.consts, args, lambda eqn, values: evaluate(eqn, *values))
            return jax.tree.unflatten(self._program.treedef, outputs)[0]

        mapped = jax.vmap(of_example, (None, 0), spmd_axis_name=self._spmd)
        values, pull = jax.vjp(lambda parameters: mapped(parameters, list(examples)), self.parameters)
        return pull(weights.astype(values.dtype))[0]

    def wide_operands(self, uses: frozenset[int], dtype: Any) -> tuple[dict[int, Any], Any]:
        """Return the operands of uses in the dtype of the sum, and the function that pulls sums back to parameters."""

        def of_parameters(parameters: list[Any]) -> dict[int, Any]:
            return operands(self._plan, parameters, uses, wider=True)

        return jax.vjp(of_parameters, [x.astype(wide(x.dtype, dtype)) for x in self.parameters])

    def _summed(self, given: Any, pull: Any, found: dict[int, Any], weights: jax.Array, dtype: Any) -> list[jax.Array]:
        """Pull the sums at operands back to the parameters once, by the transpose of a linear map, and add the rest."""
        (sums,) = pull({n: divided_as(x.astype(given[n].dtype), given[n]) for n, x in found.items()})
        for i, gradients in self.held.items():
            sums[i] += Dense(gradients).weighted(of_group(weights, self._group_of_leaf(i)), dtype)
        return sums
