"""Each example's gradients of a loss, from one backward pass, without holding them: norms and weighted sums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from ..._calls.explicit_sharding import divided_as
from .example_program import ExampleProgram
from .gradient_forms import (
    FORM_NAMES,
    Dense,
    GradientForm,
    Norms,
    OuterProduct,
    RowSparse,
    ScaledConstant,
    dtype_of,
    merged,
    wide,
    widened,
)
from .parameter_uses import ParameterUse, disjoint, is_real, is_scaled
from .perturbations import operands, rearranged, run_perturbed, zero_perturbations
from .report import Use, reported
from .rules import forms_at, has_rule

# The most that the rounding of a sum may come to, in roundings of its largest terms.
_ROUNDINGS = 8


class ExampleGradients:
    """The gradients of a loss at each example of a batch.

    Args:
      program: the loss.
      examples: the examples, along axis 0 of each array.
      spmd_axis_name: as for `jax.vmap`.

    Attributes:
      values: the loss of each example.
      aux: what else it returned, for each example.
    """

    def __init__(self, program: ExampleProgram, examples: Sequence[Any], spmd_axis_name: str | None = None) -> None:
        if program.has_refs:  # no variable leads from what is written to what is read; `jax.grad` takes its place
            raise NotImplementedError("the loss has a jax.Ref, through which values go unseen")
        if program.draws_inside:  # evaluated once more, it would draw other numbers
            raise NotImplementedError(f"{program.draws_inside} draws random numbers that depend on how it is mapped")
        self._plan, self._parameters, self._uses = program.plan, program.parameters, program.uses
        self._spmd = spmd_axis_name
        self._single = [n for n, use in enumerate(self._uses) if _is_number(use)]
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
        # The forms by use; then what is summed: merged forms, and the gradients of parameters that are held.
        self._forms = self._unmerged = self._forms_at_uses(records, cotangents)
        self._held: dict[int, jax.Array] = {}
        self._groups = self._find_groups()
        for group in self._groups:
            self._merge(group)

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

    def _rearranged(self, wanted: Iterable[int], dtype: Any = None) -> tuple[Callable[..., Any], list[jax.Array]]:
        """Return the operands of uses with a layout as a linear function of the parameters, and these, widened."""
        numbers = frozenset(wanted)

        def linear(parameters: list[Any]) -> dict[int, Any]:
            return rearranged(self._plan, parameters, self._parameters, numbers)

        return linear, [x.astype(wide(x.dtype, dtype)) for x in self._parameters]

    def _find_groups(self) -> list[list[int]]:
        """Group the uses that have numbers of the parameters in common; those of single numbers are in no group."""
        groups: list[list[int]] = []
        for n, use in enumerate(self._uses):
            if n not in self._single:
                joined = [group for group in groups if any(not disjoint(use.value, self._uses[m].value) for m in group)]
                groups = [group for group in groups if group not in joined] + [[*itertools.chain(*joined), n]]
        return groups

    def _merge(self, group: list[int]) -> None:
        """Have as few forms for a group as there can be; where their norms have no form, hold the gradients."""
        unmerged = {n: self._unmerged[n] for n in group}
        forms: dict[int, GradientForm] | None = unmerged
        if len(group) > 1:
            forms = merged([(n, self._uses[n], form) for n, form in unmerged.items()])
        elif self._uses[group[0]].value.layout is None:
            forms = None
        if forms is None:
            for leaf, gradients in self._of_leaves(unmerged).items():
                self._held[leaf] = self._held.get(leaf, 0) + gradients
            forms = {}
        elif len(forms) == 1:
            ((n, form),) = forms.items()
            if isinstance(form, OuterProduct) and not form.smaller():
                forms = {n: Dense(form.each())}
        self._forms = {n: form for n, form in self._forms.items() if n not in group} | forms

    @cached_property
    def squared_norms(self) -> jax.Array:
        """Return the squared norm of each example's gradient."""
        total = self._without_constants()
        # Where terms cancel each other, a rounding error is left, of either sign.
        return jnp.maximum(total + self._of_constants() if self._single else total, 0)

    def upper_norms(self, twice: bool) -> jax.Array:
        """Return the norms to clip by, which are those of the gradients, rounded up.

        A gradient may be what remains where terms cancel each other: positions, or uses of a parameter. Neither its
        norm from inner products nor a sum of the terms is then closer than the rounding errors of the largest.

        Args:
          twice: whether the sum is taken from a second backward pass, and not from the forms.
        """
        # ‖g‖² + 8ε Σₜ ‖aₜ‖²‖gₜ‖², of which the sum over positions is `Norms.terms`.
        squares = self.squared_norms
        eps = float(jnp.finfo(squares.dtype).eps)
        # Of the norms, by their own dtype; of the sum, by that in which it is taken: most often the same.
        terms, lost = ([self._without_constants()] if self._single else []), []
        for constant in self._constants.values():
            squared = sum(jnp.sum(jnp.square(x)) for x in constant.direction.values())
            terms.append(jnp.square(constant.factors) * squared)
        for n in itertools.chain(*self._groups):
            form, unmerged = self._forms.get(n), self._unmerged[n]
            if isinstance(form, (OuterProduct, RowSparse)):
                terms.append(self._norms[n].terms)
                if form.eps() > eps:
                    lost.append(_ROUNDINGS * form.eps() * terms[-1])
            elif twice:  # a gradient that is held is summed as it is, unless it is computed again
                summed = self._norms[n].terms if form is unmerged else self._of_parameters(n, unmerged).terms()
                lost.append(_ROUNDINGS * unmerged.eps() * summed)
        squares = squares + _ROUNDINGS * eps * sum(terms)
        norms = jnp.sqrt(jnp.maximum(squares, sum(lost)) if lost else squares)
        # A factor of bfloat16 times the weight is rounded, and may grow. Of what is computed twice, XLA may leave out
        # other roundings to half precision each time.
        grown = [form.eps() / 2 for form in self._forms.values() if isinstance(form, OuterProduct)]
        grown += [2 * float(jnp.finfo(dtype_of(form)).eps) for form in self._unmerged.values() if twice]
        return norms * (1 + max(grown)) if grown and max(grown) > 4 * eps else norms

    @cached_property
    def _norms(self) -> dict[int, Norms]:
        """Return the norms of each merged form, by use; those of scaled constants are not among them."""
        forms = self._forms.items()
        return {n: self._of_parameters(n, form).norms() for n, form in forms if n not in self._single}

    def _without_constants(self) -> jax.Array:
        """Return the squared norm of each example's gradient without what scaled constants add to it."""
        total: Any = jnp.zeros(self.values.shape, jnp.promote_types(self.values.dtype, jnp.float32))
        for group in self._groups:
            forms = {n: self._of_parameters(n, self._forms[n]) for n in group if n in self._forms}
            if forms:
                # A table that is read by rows and multiplied with: ‖A + B‖² = ‖A‖² + ‖B‖² + 2⟨A, B⟩.
                rows = [form for form in forms.values() if isinstance(form, RowSparse)]
                factors = [form for form in forms.values() if isinstance(form, OuterProduct)]
                norms = [self._norms[n].squared for n in forms]
                norms += [row.cross(factor) for row in rows for factor in factors]
                total = total + sum(norms)
        for gradients in self._held.values():
            total = total + Dense(gradients).squared_norm()
        return total

    @cached_property
    def _scales(self) -> dict[int, jax.Array]:
        """Return the constant factor between an operand and the parameters that it is a layout of, by use."""
        layouts = {n: use.value.layout for n, use in enumerate(self._uses) if n not in self._single}
        scaled = [n for n, layout in layouts.items() if layout is not None and is_scaled(layout)]
        # A layout moves numbers and multiplies all by one factor: of ones it makes the factor, at each place.
        linear, parameters = self._rearranged(scaled)
        found = linear(list(map(jnp.ones_like, parameters))) if scaled else {}
        return {n: jnp.ravel(x)[0] for n, x in found.items() if x.size}

    def _of_parameters(self, n: int, form: GradientForm) -> GradientForm:
        """Return the gradient of the numbers of the parameters at a use, whose operand is these times a constant.

        They are multiplied before anything is squared: of the square alone, too much is beyond the dtype.
        """
        return form.times(self._scales[n]) if n in self._scales else form

    def _of_constants(self) -> Any:
        """Return what scaled constants add to the squared norms: their own, and twice the inner products with the rest.

        With gradients fᵢ v of such uses and Gᵢ of all else, ‖Σ fᵢv + Gᵢ‖² = ‖Gᵢ‖² + ‖Σ fᵢv‖² + 2 Σ fᵢ⟨v, Gᵢ⟩.
        """
        total: Any = 0.0
        for factors, direction in self._constants.values():
            for others, other in self._constants.values():
                common = direction.keys() & other.keys()
                total += factors * others * sum(jnp.vdot(direction[i], other[i]) for i in common)
            rest = [k for k in self._forms if k not in self._constants and self._leaves(k) & direction.keys()]
            inner = [self._of_parameters(k, self._forms[k]).inner(x) for k, x in self._along(direction, rest).items()]
            inner += [Dense(self._held[i]).inner(direction[i]) for i in direction.keys() & self._held.keys()]
            total += 2 * factors * sum(inner)
        return total

    def _along(self, direction: dict[int, jax.Array], numbers: list[int]) -> dict[int, jax.Array]:
        """Return a direction among the parameters as arrays like the operands of some uses."""
        found: dict[int, jax.Array] = {}
        scaled = [k for k in numbers if k in self._scales]
        for group in [[k for k in numbers if k not in scaled], *([k] for k in scaled)]:
            linear, parameters = self._rearranged(group)
            scale = self._scales.get(group[0], jnp.ones(())) if group else jnp.ones(())
            given = [direction.get(i, jnp.zeros_like(x)) for i, x in enumerate(parameters)]
            # `linear` multiplies by the scale, which `_of_parameters` has put on the gradient already.
            found |= linear([x / jnp.where(scale == 0, 1, scale).astype(x.dtype) for x in given])
        return found

    @cached_property
    def _constants(self) -> dict[int, ScaledConstant]:
        """Return the gradients at the uses of single numbers."""
        return {n: self._scaled_constant(n) for n in self._single}

    def _scaled_constant(self, n: int) -> ScaledConstant:
        """Return the gradient of a single number at each example: a factor, times one direction for all.

        No number of the direction is larger than one. So neither it nor the factor overflows, even squared, where the
        gradient does not, and only examples whose own gradient overflows are left out. The direction is pulled back
        from one of three cotangents: the smallest and the largest of the batch, and one. It is the largest for which
        the direction is finite. All are rounded to powers of two, which change no digits: the direction is rounded
        alike, whichever other examples there are.
        """
        chain, leaves = self._chain(self._leaves(n), frozenset([n]))
        operand, pull = jax.vjp(lambda leaves: chain(leaves)[n], leaves)
        cotangents = widened(self._forms[n].each().reshape(self.values.shape))
        sizes = jnp.abs(cotangents)
        counted = jnp.isfinite(sizes) & (sizes > 0)
        least = jnp.where(counted, sizes, jnp.inf).min(initial=jnp.inf)
        most = jnp.where(counted.any(), jnp.where(counted, sizes, 0).max(initial=0), 1)
        least, most = _power_of_two(jnp.minimum(least, most)), _power_of_two(most)
        at, gradients = least, [*map(widened, pull(jnp.full_like(operand, least))[0])]
        for end in (jnp.clip(jnp.ones_like(least), least, most), most):
            larger = [*map(widened, pull(jnp.full_like(operand, end))[0])]
            fits = jnp.stack([jnp.isfinite(x).all() for x in larger]).all()
            at = jnp.where(fits, end, at)
            gradients = [jnp.where(fits, x, y) for x, y in zip(larger, gradients, strict=True)]
        size = jnp.stack([jnp.abs(x).max(initial=0) for x in gradients]).max()
        size = jnp.where(size > 0, size, 1)
        # Factor times direction is cotangent / at * gradients. The factor, cotangent * size / at, is computed in that
        # one of two orders in which nothing overflows or vanishes.
        ratio = size / at
        normal = jnp.isfinite(ratio) & (ratio >= jnp.finfo(ratio.dtype).tiny)
        factors = jnp.where(normal, cotangents * jnp.where(normal, ratio, 1), cotangents / at * size)
        return ScaledConstant(factors, {i: x / size for i, x in zip(sorted(self._leaves(n)), gradients, strict=True)})

    def _chain(self, parameters: Iterable[int], wanted: frozenset[int]) -> tuple[Callable[..., Any], list[jax.Array]]:
        """Return the operands of some uses as a function of some parameters, in their order, and these."""
        chosen = sorted(parameters)

        def of_leaves(leaves: list[Any]) -> dict[int, Any]:
            changed = dict(zip(chosen, leaves, strict=True))
            return operands(self._plan, [changed.get(i, x) for i, x in enumerate(self._parameters)], wanted)

        return of_leaves, [self._parameters[i] for i in chosen]

    def uses(self) -> list[Use]:
        """Report how each parameter's gradients are taken, for each place where it meets data."""
        found = []
        for n, use in enumerate(self._uses):
            form = self._summed(n)
            rule = FORM_NAMES.get(type(form), "dense")
            if n in self._single:
                rule = FORM_NAMES[ScaledConstant]
                why = "a single number, whose gradient is the same for each example but for a factor"
            elif form is None:
                others = any(n in group and len(group) > 1 for group in self._groups)
                how = "used in other ways too" if others else "computed from the parameters"
                why = f"the operand is {how}, so each example's gradient is held"
            elif isinstance(form, OuterProduct):
                why = form.choice()
            elif isinstance(form, RowSparse):
                why = f"rows of a table are taken, {form.rows.shape[2]} for each example"
            else:
                why = f"the gradient at each example has {math.prod(form.gradients.shape[1:])} numbers"
                why += "" if has_rule(use) else f", by the derivative of {use.eqn.primitive.name}"
            found += reported(use, rule, why)
        return sorted(found)

    def _summed(self, n: int) -> GradientForm | None:
        """Return the form that the gradient at a use is summed from, be it with others; None where it is held."""
        others = [m for group in self._groups if n in group for m in group if m in self._forms]
        alike = [m for m in others if isinstance(self._forms[m], type(self._unmerged[n]))]
        return next((self._forms[m] for m in [n, *alike, *others] if m in self._forms), None)

    def _leaves(self, n: int) -> frozenset[int]:
        """Return the parameters that the operand of a use is computed from."""
        return self._uses[n].value.leaves

    def _of_leaves(self, forms: dict[int, GradientForm]) -> dict[int, jax.Array]:
        """Return each example's gradients of the parameters of some uses."""
        parameters = frozenset[int]().union(*map(self._leaves, forms))
        chain, leaves = self._chain(parameters, frozenset(forms))
        pull = jax.vmap(jax.vjp(chain, leaves)[1], spmd_axis_name=self._spmd)
        # A product may be of another dtype than its operand, whose dtype `pull` wants.
        (gradients,) = pull({n: form.each().astype(self._uses[n].aval.dtype) for n, form in forms.items()})
        return dict(zip(sorted(parameters), gradients, strict=True))

    def each(self) -> list[jax.Array]:
        """Return the gradient of each parameter at each example: shape (batch, *parameter)."""
        found = self._of_leaves(self._unmerged)
        batch = self.values.shape
        return [found.get(i, jnp.zeros((*batch, *x.shape), x.dtype)) for i, x in enumerate(self._parameters)]

    def weighted_sum(self, weights: jax.Array, dtype: Any = None) -> list[jax.Array]:
        """Sum `weights` times the gradient over examples, for each parameter; examples of weight zero are left out.

        Args:
          weights: shape (batch,).
          dtype: what to sum in, if it is wider than the dtypes of the parameters, or float32.
        """
        # The sums are taken at the operands, and go back to the parameters once, by the transpose of a linear map.
        numbers = self._forms.keys() - set(self._single)
        linear, parameters = self._rearranged(numbers, dtype)
        given, pull = jax.vjp(linear, parameters)
        found = {n: self._forms[n].weighted(weights, dtype).astype(given[n].dtype) for n in numbers}
        (sums,) = pull({n: divided_as(x, given[n]) for n, x in found.items()})
        for factors, direction in self._constants.values():
            factor = Dense(factors).weighted(weights, dtype)
            for i, x in direction.items():
                sums[i] += jnp.where(factor == 0, 0, factor * x)  # all are left out where it is not finite
        for i, gradients in self._held.items():
            sums[i] += Dense(gradients).weighted(weights, dtype)
        return sums


def _power_of_two(x: jax.Array) -> jax.Array:
    """Return the largest power of two that is not larger than `x`, which is positive."""
    return jnp.ldexp(jnp.ones_like(x), jnp.frexp(x)[1] - 1)


def _is_number(use: ParameterUse) -> bool:
    """Return whether the operand is a single real number computed from parameters: a scaled constant at each example.

    It is one where real gradients go back through all that it is computed by as through one linear map.
    """
    one = use.aval.size == 1 and is_real(use.eqn.invars[use.operand]) and not use.value.stacked
    return one and use.value.layout is None and use.value.linear
