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
from .example_program import Program
from .gradient_forms import Direct, Factors, Norms, Piece, Rows, dtype_of, merged, wide, widened
from .parameter_uses import Site, apart, is_real, is_scaled
from .rules import has_rule, pieces_at
from .taps import operands, rearranged, run_with_taps, zero_taps

# What the rounding of the terms of a sum may come to, in that of one of them.
_ROUNDINGS = 8


class Use(NamedTuple):
    """One place where a parameter meets data.

    Attributes:
      parameter: which one: its number, or its path.
      rule: "factors", "rows", "direct" or "shared".
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

    def __init__(self, program: Program, examples: Sequence[Any], spmd_axis_name: str | None = None) -> None:
        if program.has_refs:  # no variable leads from what is written to what is read; `jax.grad` takes its place
            raise NotImplementedError("the loss has a jax.Ref, through which values go unseen")
        if program.draws_inside:  # evaluated once more, it would draw other numbers
            raise NotImplementedError(f"{program.draws_inside} draws random numbers that depend on how it is mapped")
        self._program, self._parameters = program, program.parameters
        self._plan, self._sites, self._spmd = program.plan, program.sites, spmd_axis_name
        self._shared = [n for n, site in enumerate(self._sites) if _is_number(site)]
        batch = examples[0].shape[0]

        def of_example(taps: Any, example: list[Any]) -> Any:
            args = [*self._parameters, *example]
            closed = program.closed
            outputs, records = run_with_taps(closed.jaxpr, closed.consts, args, self._plan, self._sites, taps)
            value, aux = jax.tree.unflatten(program.treedef, outputs)
            return value, (aux, records)

        def of_batch(taps: Any) -> Any:
            zeros = jnp.zeros(batch, jnp.float32)
            return jax.vmap(of_example, spmd_axis_name=spmd_axis_name)(taps, [*examples, zeros])

        taps = zero_taps(self._plan, self._sites, batch)
        self.values, pull, (self.aux, records) = jax.vjp(of_batch, taps, has_aux=True)
        (cotangents,) = pull(jnp.ones_like(self.values))
        # What is summed in the end: pieces by site, and the gradients of parameters that are held.
        self._pieces = self._taken = self._take_pieces(records, cotangents)
        self._held: dict[int, jax.Array] = {}
        self._groups = self._find_groups()
        for group in self._groups:
            self._put_together(group)

    def _take_pieces(self, records: Any, cotangents: Any) -> dict[int, Piece]:
        given = self._operands(self._parameters, frozenset(range(len(self._sites))))
        pieces: dict[int, Piece] = {}
        for tap in self._plan.taps():
            together = [n for n, site in enumerate(self._sites) if site.tap == tap]
            sites, fixed = [self._sites[n] for n in together], [given[n] for n in together]
            found = pieces_at(sites, fixed, records[tap], cotangents[tap], self._spmd)
            pieces |= zip(together, found, strict=True)
        return pieces

    def _operands(self, parameters: Sequence[Any], wanted: frozenset[int]) -> dict[int, Any]:
        return operands(
            self._program.closed.jaxpr, self._program.closed.consts, parameters, self._plan, self._sites, wanted
        )

    def _rearranged(self, wanted: Iterable[int], dtype: Any = None) -> tuple[Callable[..., Any], list[jax.Array]]:
        """The operands of sites with a layout as a linear function of the parameters, and these, widened."""
        closed, numbers = self._program.closed, frozenset(wanted)

        def operands(parameters: list[Any]) -> dict[int, Any]:
            given = self._parameters
            return rearranged(closed.jaxpr, closed.consts, parameters, given, self._plan, self._sites, numbers)

        return operands, [x.astype(wide(x.dtype, dtype)) for x in self._parameters]

    def _find_groups(self) -> list[list[int]]:
        """The sites that have parameters in common; those of single numbers are none."""
        groups: list[list[int]] = []
        for n, site in enumerate(self._sites):
            if n not in self._shared:
                joined = [group for group in groups if any(not apart(site.value, self._sites[m].value) for m in group)]
                groups = [group for group in groups if group not in joined] + [[*itertools.chain(*joined), n]]
        return groups

    def _put_together(self, group: list[int]) -> None:
        """Have as few pieces for a group as there can be; where their norms have no form, hold the gradients."""
        taken = {n: self._taken[n] for n in group}
        together: dict[int, Piece] | None = taken
        if len(group) > 1:
            together = merged([(n, self._sites[n], piece) for n, piece in taken.items()])
        elif self._sites[group[0]].value.layout is None:
            together = None
        if together is None:
            self._held |= {
                leaf: self._held.get(leaf, 0) + gradients for leaf, gradients in self._of_leaves(taken).items()
            }
            together = {}
        elif len(together) == 1:
            ((n, piece),) = together.items()
            if isinstance(piece, Factors) and not piece.smaller():
                together = {n: Direct(piece.direct())}
        self._pieces = {n: piece for n, piece in self._pieces.items() if n not in group} | together

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
          twice: whether the sum is taken from a second backward pass, and not from the pieces.
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
                piece, taken = self._pieces.get(n), self._taken[n]
                if isinstance(piece, (Factors, Rows)):
                    terms.append(self._norms[n].terms)
                    if piece.eps() > eps:
                        lost.append(_ROUNDINGS * piece.eps() * terms[-1])
                elif twice:
                    summed = self._norms[n].terms if piece is taken else self._of_parameters(n, taken).terms()
                    lost.append(_ROUNDINGS * taken.eps() * summed)
        squares = squares + _ROUNDINGS * eps * sum(terms)
        norms = jnp.sqrt(jnp.maximum(squares, sum(lost)) if lost else squares)
        # A factor of bfloat16 times the weight is rounded, and may grow. Of what is computed twice, XLA may leave out
        # other roundings to half precision each time.
        grown = [piece.eps() / 2 for piece in self._pieces.values() if isinstance(piece, Factors)]
        grown += [2 * float(jnp.finfo(dtype_of(piece)).eps) for piece in self._taken.values() if twice]
        return norms * (1 + max(grown)) if grown and max(grown) > 4 * eps else norms

    @cached_property
    def _norms(self) -> dict[int, Norms]:
        pieces = self._pieces.items()
        return {n: self._of_parameters(n, piece).norms() for n, piece in pieces if n not in self._shared}

    def _without_shared(self) -> jax.Array:
        total: Any = jnp.zeros(self.values.shape, jnp.promote_types(self.values.dtype, jnp.float32))
        for group in self._groups:
            pieces = {n: self._of_parameters(n, self._pieces[n]) for n in group if n in self._pieces}
            if pieces:
                rows = [piece for piece in pieces.values() if isinstance(piece, Rows)]
                factors = [piece for piece in pieces.values() if isinstance(piece, Factors)]
                norms = [self._norms[n].squared for n in pieces]
                norms += [row.cross(factor) for row in rows for factor in factors]
                total = total + sum(norms)
        for gradients in self._held.values():
            total = total + Direct(gradients).squared_norm()
        return total

    @cached_property
    def _scales(self) -> dict[int, jax.Array]:
        """The constants by which some operands are the numbers of the parameters multiplied, by site."""
        layouts = {n: site.value.layout for n, site in enumerate(self._sites) if n not in self._shared}
        scaled = [n for n, layout in layouts.items() if layout is not None and is_scaled(layout)]
        operands, parameters = self._rearranged(scaled)
        found = operands(list(map(jnp.ones_like, parameters))) if scaled else {}
        return {n: jnp.ravel(x)[0] for n, x in found.items() if x.size}

    def _of_parameters(self, n: int, piece: Piece) -> Piece:
        """The gradient of the numbers of the parameters at a site, where the operand is these times a constant.

        They are multiplied before anything is squared: of the square alone, too much is beyond the dtype.
        """
        return piece.times(self._scales[n]) if n in self._scales else piece

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
            rest = [k for k in self._pieces if k not in self._directions and self._leaves(k) & direction.keys()]
            inner = [self._of_parameters(k, self._pieces[k]).inner(x) for k, x in self._along(direction, rest).items()]
            inner += [Direct(self._held[i]).inner(direction[i]) for i in direction.keys() & self._held.keys()]
            total += 2 * factors[n] * sum(inner)
        return total

    def _along(self, direction: dict[int, jax.Array], numbers: list[int]) -> dict[int, jax.Array]:
        """The numbers of a direction among the parameters where the operands of some sites have those of these."""
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
            cotangents = widened(self._pieces[n].direct().reshape(self.values.shape))
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
        """The operands of some sites as a function of some parameters, in their order, and these."""
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
        for n, site in enumerate(self._sites):
            piece = self._summed(n)
            rule = type(piece).__name__.lower()
            if n in self._shared:
                rule, why = "shared", "a single number, whose gradient is the same for each example but for a factor"
            elif piece is None:
                others = any(n in group and len(group) > 1 for group in self._groups)
                how = "used in other ways too" if others else "computed from the parameters"
                rule, why = "direct", f"the operand is {how}, so each example's gradient is held"
            elif isinstance(piece, Factors):
                why = piece.choice()
            elif isinstance(piece, Rows):
                why = f"rows of a table are taken, {piece.taken.shape[2]} for each example"
            else:
                why = f"the gradient at each example has {math.prod(piece.gradients.shape[1:])} numbers"
                why += "" if has_rule(site) else f", by the derivative of {site.eqn.primitive.name}"
            found += [Use(leaf, rule, site.eqn.primitive.name, _where(site), why) for leaf in self._leaves(n)]
        return sorted(found)

    def _summed(self, n: int) -> Piece | None:
        """The piece that the gradient at a site is summed from, be it with others; None where it is held."""
        others = [m for group in self._groups if n in group for m in group if m in self._pieces]
        alike = [m for m in others if isinstance(self._pieces[m], type(self._taken[n]))]
        return next((self._pieces[m] for m in [n, *alike, *others] if m in self._pieces), None)

    def _leaves(self, n: int) -> frozenset[int]:
        """The parameters that the operand of a site is computed from."""
        return self._sites[n].value.leaves

    def _of_leaves(self, pieces: dict[int, Piece]) -> dict[int, jax.Array]:
        """Each example's gradients of the parameters of some sites."""
        parameters = frozenset[int]().union(*map(self._leaves, pieces))
        chain, leaves = self._chain(parameters, frozenset(pieces))
        (gradients,) = jax.vmap(jax.vjp(chain, leaves)[1], spmd_axis_name=self._spmd)(
            {n: self._like_operand(n, piece.direct()) for n, piece in pieces.items()}
        )
        return dict(zip(sorted(parameters), gradients, strict=True))

    def _like_operand(self, n: int, gradients: jax.Array) -> jax.Array:
        """In the dtype of the operand: a product may be of another."""
        site = self._sites[n]
        return gradients.astype(aval(site.eqn.invars[site.operand]).dtype)

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
        numbers = self._pieces.keys() - set(self._shared)
        operands, parameters = self._rearranged(numbers, dtype)
        given, pull = jax.vjp(operands, parameters)
        found = {n: self._pieces[n].weighted(weights, dtype).astype(given[n].dtype) for n in numbers}
        (sums,) = pull({n: divided_as(x, given[n]) for n, x in found.items()})
        for n in self._shared:
            factor = Direct(self._factors[n]).weighted(weights, dtype)
            for i, direction in self._directions[n].items():
                sums[i] += jnp.where(factor == 0, 0, factor * direction)  # all are left out where it is not finite
        for i, gradients in self._held.items():
            sums[i] += Direct(gradients).weighted(weights, dtype)
        return sums


def held_uses(program: Program, why: str) -> list[Use]:
    """How each parameter's gradients are taken, where those of each example are held."""
    return sorted(
        Use(leaf, "direct", site.eqn.primitive.name, _where(site), why)
        for site in program.sites
        for leaf in site.value.leaves
    )


def _power_of_two(x: jax.Array) -> jax.Array:
    """Return the largest power of two that is not larger than `x`, which is positive."""
    return jnp.ldexp(jnp.ones_like(x), jnp.frexp(x)[1] - 1)


def _is_number(site: Site) -> bool:
    """Whether the operand is a single number that is computed from parameters, with one gradient but for a factor."""
    operand = site.eqn.invars[site.operand]
    one = aval(operand).size == 1 and is_real(operand) and not site.value.stacked
    return one and site.value.layout is None and site.value.linear


def _where(site: Site) -> str:
    """The innermost line of the user's own source that a site comes from."""
    for eqn in (site.eqn, *reversed(site.within)):  # what a library has jitted may have been traced for another caller
        for frame in getattr(eqn.source_info.traceback, "frames", []):
            if not is_ours(frame.file_name) and "site-packages" not in frame.file_name:
                return f"{frame.file_name}:{frame.line_num} in {frame.function_name}"
    return "unknown"
