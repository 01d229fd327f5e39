"""Each example's gradients of a loss, from one backward pass, without holding them: norms and weighted sums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._calls.explicit_sharding import divided_as
from ..._core.jaxpr import aval
from ..._core.source_lines import is_ours
from .example_program import ExampleProgram
from .gradient_forms import (
    FORM_NAMES,
    Dense,
    GradientForm,
    Norms,
    OuterProduct,
    RowSparse,
    dtype_of,
    merged,
    wide,
    widened,
)
from .parameter_uses import ParameterUse, disjoint, is_real, is_scaled
from .perturbations import operands, rearranged, run_perturbed, zero_perturbations
from .rules import forms_at, has_rule

# What the rounding of the terms of a sum may come to, in that of one of them.
_ROUNDINGS = 8


class Use(NamedTuple):
    """One place where a parameter meets data.

    Attributes:
      parameter: which one: its number, or its path.
      rule: the form of its gradients: "outer product", "row-sparse", "dense" or "scaled constant".
      operation: the primitive.
      where: the line of the source.
      why: a sentence.
    """

    parameter: Any
    rule: str
    operation: str
    where: str
    why: str


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
        self._program, self._parameters = program, program.parameters
        self._plan, self._uses, self._spmd = program.plan, program.uses, spmd_axis_name
        self._shared = [n for n, use in enumerate(self._uses) if _is_number(use)]
        batch = examples[0].shape[0]

        def of_example(zeros: Any, example: list[Any]) -> Any:
            args = [*self._parameters, *example]
            closed = program.closed
            outputs, records = run_perturbed(closed.jaxpr, closed.consts, args, self._plan, self._uses, zeros)
            value, aux = jax.tree.unflatten(program.treedef, outputs)
            return value, (aux, records)

        def of_batch(zeros: Any) -> Any:
            nothing = jnp.zeros(batch, jnp.float32)
            return jax.vmap(of_example, spmd_axis_name=spmd_axis_name)(zeros, [*examples, nothing])

        zeros = zero_perturbations(self._plan, self._uses, batch)
        self.values, pull, (self.aux, records) = jax.vjp(of_batch, zeros, has_aux=True)
        (cotangents,) = pull(jnp.ones_like(self.values))
        # What is summed in the end: forms by use, and the gradients of parameters that are held.
        self._forms = self._taken = self._take_forms(records, cotangents)
        self._held: dict[int, jax.Array] = {}
        self._groups = self._find_groups()
        for group in self._groups:
            self._put_together(group)

    def _take_forms(self, records: Any, cotangents: Any) -> dict[int, GradientForm]:
        given = self._operands(self._parameters, frozenset(range(len(self._uses))))
        forms: dict[int, GradientForm] = {}
        for first in self._plan.firsts():
            together = [n for n, use in enumerate(self._uses) if use.first == first]
            uses, fixed = [self._uses[n] for n in together], [given[n] for n in together]
            found = forms_at(uses, fixed, records[first], cotangents[first], self._spmd)
            forms |= zip(together, found, strict=True)
        return forms

    def _operands(self, parameters: Sequence[Any], wanted: frozenset[int]) -> dict[int, Any]:
        return operands(
            self._program.closed.jaxpr, self._program.closed.consts, parameters, self._plan, self._uses, wanted
        )

    def _rearranged(self, wanted: Iterable[int], dtype: Any = None) -> tuple[Callable[..., Any], list[jax.Array]]:
        """The operands of uses with a layout as a linear function of the parameters, and these, widened."""
        closed, numbers = self._program.closed, frozenset(wanted)

        def operands(parameters: list[Any]) -> dict[int, Any]:
            given = self._parameters
            return rearranged(closed.jaxpr, closed.consts, parameters, given, self._plan, self._uses, numbers)

        return operands, [x.astype(wide(x.dtype, dtype)) for x in self._parameters]

    def _find_groups(self) -> list[list[int]]:
        """The uses that have parameters in common; those of single numbers are none."""
        groups: list[list[int]] = []
        for n, use in enumerate(self._uses):
            if n not in self._shared:
                joined = [group for group in groups if any(not disjoint(use.value, self._uses[m].value) for m in group)]
                groups = [group for group in groups if group not in joined] + [[*itertools.chain(*joined), n]]
        return groups

    def _put_together(self, group: list[int]) -> None:
        """Have as few forms for a group as there can be; where their norms have no form, hold the gradients."""
        taken = {n: self._taken[n] for n in group}
        together: dict[int, GradientForm] | None = taken
        if len(group) > 1:
            together = merged([(n, self._uses[n], form) for n, form in taken.items()])
        elif self._uses[group[0]].value.layout is None:
            together = None
        if together is None:
            self._held |= {
                leaf: self._held.get(leaf, 0) + gradients for leaf, gradients in self._of_leaves(taken).items()
            }
            together = {}
        elif len(together) == 1:
            ((n, form),) = together.items()
            if isinstance(form, OuterProduct) and not form.smaller():
                together = {n: Dense(form.direct())}
        self._forms = {n: form for n, form in self._forms.items() if n not in group} | together

    @cached_property
    def squared_norms(self) -> jax.Array:
        """The squared norm of each example's gradient."""
        total = self._without_shared()
        # Where terms cancel each other, a rounding error is left, of either sign.
        return jnp.maximum(total + self._beside() if self._shared else total, 0)

    def upper_norms(self, twice: bool) -> jax.Array:
        """The norms to clip by, which are those of the gradients, rounded up.

        A gradient may be what remains where terms cancel each other: positions, or uses of a parameter. Neither its
        norm from inner products nor a sum of the terms is then closer than the rounding errors of the largest.

        Args:
          twice: whether the sum is taken from a second backward pass, and not from the forms.
        """
        squares = self.squared_norms
        eps = float(jnp.finfo(squares.dtype).eps)
        # Of the norms, by their own dtype; of the sum, by that in which it is taken: most often the same.
        terms, lost = ([self._without_shared()] if self._shared else []), []
        for n in self._shared:
            squared = sum(jnp.sum(jnp.square(x)) for x in self._directions[n].values())
            terms.append(jnp.square(self._factors[n]) * squared)
        for group in self._groups:
            for n in group:
                form, taken = self._forms.get(n), self._taken[n]
                if isinstance(form, (OuterProduct, RowSparse)):
                    terms.append(self._norms[n].terms)
                    if form.eps() > eps:
                        lost.append(_ROUNDINGS * form.eps() * terms[-1])
                elif twice:
                    summed = self._norms[n].terms if form is taken else self._of_parameters(n, taken).terms()
                    lost.append(_ROUNDINGS * taken.eps() * summed)
        squares = squares + _ROUNDINGS * eps * sum(terms)
        norms = jnp.sqrt(jnp.maximum(squares, sum(lost)) if lost else squares)
        # A factor of bfloat16 times the weight is rounded, and may grow. Of what is computed twice, XLA may leave out
        # other roundings to half precision each time.
        grown = [form.eps() / 2 for form in self._forms.values() if isinstance(form, OuterProduct)]
        grown += [2 * float(jnp.finfo(dtype_of(form)).eps) for form in self._taken.values() if twice]
        return norms * (1 + max(grown)) if grown and max(grown) > 4 * eps else norms

    @cached_property
    def _norms(self) -> dict[int, Norms]:
        forms = self._forms.items()
        return {n: self._of_parameters(n, form).norms() for n, form in forms if n not in self._shared}

    def _without_shared(self) -> jax.Array:
        total: Any = jnp.zeros(self.values.shape, jnp.promote_types(self.values.dtype, jnp.float32))
        for group in self._groups:
            forms = {n: self._of_parameters(n, self._forms[n]) for n in group if n in self._forms}
            if forms:
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
        """The constants by which some operands are the numbers of the parameters multiplied, by use."""
        layouts = {n: use.value.layout for n, use in enumerate(self._uses) if n not in self._shared}
        scaled = [n for n, layout in layouts.items() if layout is not None and is_scaled(layout)]
        operands, parameters = self._rearranged(scaled)
        found = operands(list(map(jnp.ones_like, parameters))) if scaled else {}
        return {n: jnp.ravel(x)[0] for n, x in found.items() if x.size}

    def _of_parameters(self, n: int, form: GradientForm) -> GradientForm:
        """The gradient of the numbers of the parameters at a use, where the operand is these times a constant.

        They are multiplied before anything is squared: of the square alone, too much is beyond the dtype.
        """
        return form.times(self._scales[n]) if n in self._scales else form

    def _beside(self) -> Any:
        """What the numbers in `self._shared` add to the squared norms, with what they have in common with all else.

        Of such a number the gradient is the same for each example, but for a factor.
        """
        total: Any = 0.0
        factors = self._factors
        for n, direction in self._directions.items():
            for m, other in self._directions.items():
                common = direction.keys() & other.keys()
                total += factors[n] * factors[m] * sum(jnp.vdot(direction[i], other[i]) for i in common)
            rest = [k for k in self._forms if k not in self._directions and self._leaves(k) & direction.keys()]
            inner = [self._of_parameters(k, self._forms[k]).inner(x) for k, x in self._along(direction, rest).items()]
            inner += [Dense(self._held[i]).inner(direction[i]) for i in direction.keys() & self._held.keys()]
            total += 2 * factors[n] * sum(inner)
        return total

    def _along(self, direction: dict[int, jax.Array], numbers: list[int]) -> dict[int, jax.Array]:
        """The numbers of a direction among the parameters where the operands of some uses have those of these."""
        found: dict[int, jax.Array] = {}
        scaled = [k for k in numbers if k in self._scales]
        for group in [[k for k in numbers if k not in scaled], *([k] for k in scaled)]:
            operands, parameters = self._rearranged(group)
            scale = self._scales.get(group[0], jnp.ones(())) if group else jnp.ones(())
            given = [direction.get(i, jnp.zeros_like(x)) for i, x in enumerate(parameters)]
            found |= operands([x / jnp.where(scale == 0, 1, scale).astype(x.dtype) for x in given])
        return found

    @cached_property
    def _pulled(self) -> dict[int, tuple[jax.Array, dict[int, jax.Array]]]:
        """For each number in `self._shared` its gradient at each example: a factor, times one direction for all.

        No number of the direction is larger than one, so that neither it nor the factor is beyond the dtype, be it
        squared, where the gradient is not; and none but the examples whose own gradients are are left out. It comes
        from the largest of the cotangents for which it is finite, of one and those at both ends. These are rounded to
        powers of two: then the direction is rounded alike, whichever other examples there are.
        """
        found = {}
        for n in self._shared:
            chain, leaves = self._chain(self._leaves(n), frozenset([n]))
            operand, pull = jax.vjp(lambda leaves: chain(leaves)[n], leaves)  # noqa: B023 (used at once)
            cotangents = widened(self._forms[n].direct().reshape(self.values.shape))
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
            # Of a quotient and a product that do the same, the one in which nothing is beyond the dtype.
            ratio = size / at
            direct = jnp.isfinite(ratio) & (ratio >= jnp.finfo(ratio.dtype).tiny)
            factors = jnp.where(direct, cotangents * jnp.where(direct, ratio, 1), cotangents / at * size)
            found[n] = factors, {i: x / size for i, x in zip(sorted(self._leaves(n)), gradients, strict=True)}
        return found

    @cached_property
    def _factors(self) -> dict[int, jax.Array]:
        """By what `self._directions[n]` is multiplied at each example."""
        return {n: factors for n, (factors, _) in self._pulled.items()}

    @cached_property
    def _directions(self) -> dict[int, dict[int, jax.Array]]:
        """The direction of the gradients of each number in `self._shared`, for each parameter."""
        return {n: gradients for n, (_, gradients) in self._pulled.items()}

    def _chain(self, parameters: Iterable[int], wanted: frozenset[int]) -> tuple[Callable[..., Any], list[jax.Array]]:
        """The operands of some uses as a function of some parameters, in their order, and these."""
        chosen = sorted(parameters)

        def operands(leaves: list[Any]) -> dict[int, Any]:
            filled = list(self._parameters)
            for i, leaf in zip(chosen, leaves, strict=True):
                filled[i] = leaf
            return self._operands(filled, wanted)

        return operands, [self._parameters[i] for i in chosen]

    def uses(self) -> list[Use]:
        """How each parameter's gradients are taken, for each place where it meets data."""
        found = []
        for n, use in enumerate(self._uses):
            form = self._summed(n)
            rule = FORM_NAMES.get(type(form), "")
            if n in self._shared:
                rule, why = (
                    "scaled constant",
                    "a single number, whose gradient is the same for each example but for a factor",
                )
            elif form is None:
                others = any(n in group and len(group) > 1 for group in self._groups)
                how = "used in other ways too" if others else "computed from the parameters"
                rule, why = "dense", f"the operand is {how}, so each example's gradient is held"
            elif isinstance(form, OuterProduct):
                why = form.choice()
            elif isinstance(form, RowSparse):
                why = f"rows of a table are taken, {form.taken.shape[2]} for each example"
            else:
                why = f"the gradient at each example has {math.prod(form.gradients.shape[1:])} numbers"
                why += "" if has_rule(use) else f", by the derivative of {use.eqn.primitive.name}"
            found += [Use(leaf, rule, use.eqn.primitive.name, _where(use), why) for leaf in self._leaves(n)]
        return sorted(found)

    def _summed(self, n: int) -> GradientForm | None:
        """The form that the gradient at a use is summed from, be it with others; None where it is held."""
        others = [m for group in self._groups if n in group for m in group if m in self._forms]
        alike = [m for m in others if isinstance(self._forms[m], type(self._taken[n]))]
        return next((self._forms[m] for m in [n, *alike, *others] if m in self._forms), None)

    def _leaves(self, n: int) -> frozenset[int]:
        """The parameters that the operand of a use is computed from."""
        return self._uses[n].value.leaves

    def _of_leaves(self, forms: dict[int, GradientForm]) -> dict[int, jax.Array]:
        """Each example's gradients of the parameters of some uses."""
        parameters = frozenset[int]().union(*map(self._leaves, forms))
        chain, leaves = self._chain(parameters, frozenset(forms))
        (gradients,) = jax.vmap(jax.vjp(chain, leaves)[1], spmd_axis_name=self._spmd)(
            {n: self._like_operand(n, form.direct()) for n, form in forms.items()}
        )
        return dict(zip(sorted(parameters), gradients, strict=True))

    def _like_operand(self, n: int, gradients: jax.Array) -> jax.Array:
        """In the dtype of the operand: a product may be of another."""
        use = self._uses[n]
        return gradients.astype(aval(use.eqn.invars[use.operand]).dtype)

    def each(self) -> list[jax.Array]:
        """The gradient of each parameter at each example: shape (batch, *parameter)."""
        found = self._of_leaves(self._taken)
        batch = self.values.shape
        return [found.get(i, jnp.zeros((*batch, *x.shape), x.dtype)) for i, x in enumerate(self._parameters)]

    def weighted_sum(self, weights: jax.Array, dtype: Any = None) -> list[jax.Array]:
        """The sum over examples of `weights` times the gradient, for each parameter; those of weight zero are left out.

        Args:
          weights: shape (batch,).
          dtype: what to sum in, if it is wider than the dtypes of the parameters, or float32.
        """
        numbers = self._forms.keys() - set(self._shared)
        operands, parameters = self._rearranged(numbers, dtype)
        given, pull = jax.vjp(operands, parameters)
        found = {n: self._forms[n].weighted(weights, dtype).astype(given[n].dtype) for n in numbers}
        (sums,) = pull({n: divided_as(x, given[n]) for n, x in found.items()})
        for n in self._shared:
            factor = Dense(self._factors[n]).weighted(weights, dtype)
            for i, direction in self._directions[n].items():
                sums[i] += jnp.where(factor == 0, 0, factor * direction)  # all are left out where it is not finite
        for i, gradients in self._held.items():
            sums[i] += Dense(gradients).weighted(weights, dtype)
        return sums


def held_uses(program: ExampleProgram, why: str) -> list[Use]:
    """How each parameter's gradients are taken, where those of each example are held."""
    return sorted(
        Use(leaf, "dense", use.eqn.primitive.name, _where(use), why)
        for use in program.uses
        for leaf in use.value.leaves
    )


def _power_of_two(x: jax.Array) -> jax.Array:
    """Return the largest power of two that is not larger than `x`, which is positive."""
    return jnp.ldexp(jnp.ones_like(x), jnp.frexp(x)[1] - 1)


def _is_number(use: ParameterUse) -> bool:
    """Whether the operand is a single number that is computed from parameters, with one gradient but for a factor."""
    operand = use.eqn.invars[use.operand]
    one = aval(operand).size == 1 and is_real(operand) and not use.value.stacked
    return one and use.value.layout is None and use.value.linear


def _where(use: ParameterUse) -> str:
    """The innermost line of the user's own source that a use comes from."""
    for eqn in (use.eqn, *reversed(use.within)):  # what a library has jitted may have been traced for another caller
        for frame in getattr(eqn.source_info.traceback, "frames", []):
            if not is_ours(frame.file_name) and "site-packages" not in frame.file_name:
                return f"{frame.file_name}:{frame.line_num} in {frame.function_name}"
    return "unknown"
