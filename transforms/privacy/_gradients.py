"""Each example's gradients of a loss, from one backward pass, without holding them: norms and weighted sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._pieces import Direct, Factors, Piece, Rows, merged
from ._rules import has_rule, piece_at
from ._sites import Site, find_sites
from ._taps import operands, run_with_taps, zero_taps


class Use(NamedTuple):
    """One place where a parameter meets data.

    Attributes:
      parameter: which one: its number, or its path.
      rule: "factors", "rows" or "direct".
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
      loss: from the parameters (a list of arrays) and one example (a list of arrays) to a scalar and anything else.
      parameters: the parameters.
      examples: the examples, along axis 0 of each array.
      spmd_axis_name: as for `jax.vmap`.

    Attributes:
      values: the loss of each example.
      aux: what else it returned, for each example.
    """

    def __init__(
        self,
        loss: Callable[..., tuple[Any, Any]],
        parameters: Sequence[Any],
        examples: Sequence[Any],
        spmd_axis_name: str | None = None,
    ) -> None:
        self._parameters = [jnp.asarray(x) for x in parameters]
        batch = examples[0].shape[0]
        one = [jax.ShapeDtypeStruct(x.shape[1:], jnp.result_type(x)) for x in examples]
        # A loss of parameters alone must meet data too.
        zero = jax.ShapeDtypeStruct((), jnp.float32)

        def of_leaves(*leaves: Any) -> Any:
            (*inputs, zero) = leaves
            value, aux = loss(inputs[: len(parameters)], inputs[len(parameters) :])
            return value + zero.astype(value.dtype), aux

        closed, shapes = jax.make_jaxpr(of_leaves, return_shape=True)(*self._parameters, *one, zero)
        self._closed, treedef = closed, jax.tree.structure(shapes)
        self._plan, self._sites = find_sites(closed, len(self._parameters))

        def of_example(taps: Any, example: list[Any]) -> Any:
            outputs, records = run_with_taps(
                closed.jaxpr, closed.consts, [*self._parameters, *example], self._plan, self._sites, taps
            )
            value, aux = jax.tree.unflatten(treedef, outputs)
            return value, (aux, records)

        def of_batch(taps: Any) -> Any:
            return jax.vmap(of_example, spmd_axis_name=spmd_axis_name)(taps, [*examples, jnp.zeros(batch, zero.dtype)])

        taps = zero_taps(self._plan, self._sites, batch)
        self.values, pull, (self.aux, records) = jax.vjp(of_batch, taps, has_aux=True)
        (cotangents,) = pull(jnp.ones_like(self.values))
        self._pieces = self._take_pieces(records, cotangents)
        for members, alone in self._groups():
            piece = self._pieces[members[0]]
            if alone and isinstance(piece, Factors) and not piece.smaller():
                self._pieces[members[0]] = Direct(piece.direct())

    def _take_pieces(self, records: Any, cotangents: Any) -> dict[int, Piece]:
        numbers = frozenset(range(len(self._sites)))
        given = self._operands(self._parameters, numbers)
        pieces: dict[int, Piece] = {}
        for n, site in enumerate(self._sites):
            mates = [(other, given[m]) for m, other in enumerate(self._sites) if other.tap == site.tap and m != n]
            pieces[n] = piece_at(site, given[n], mates, records[site.tap], cotangents[site.tap])
        return pieces

    def _operands(self, parameters: Sequence[Any], wanted: frozenset[int]) -> dict[int, Any]:
        return operands(self._closed.jaxpr, self._closed.consts, parameters, self._plan, self._sites, wanted)

    def _groups(self) -> list[tuple[list[int], bool]]:
        """The sites that have parameters in common, and whether one is alone with all numbers of its parameters."""
        groups: list[tuple[set[int], list[int]]] = []
        for n, site in enumerate(self._sites):
            leaves, members = set(site.value.leaves), [n]
            apart = []
            for group in groups:
                if group[0] & leaves:
                    leaves |= group[0]
                    members = group[1] + members
                else:
                    apart.append(group)
            groups = [*apart, (leaves, members)]
        return [
            (members, len(members) == 1 and self._sites[members[0]].value.layout is not None) for _, members in groups
        ]

    def squared_norms(self) -> jax.Array:
        """The squared norm of each example's gradient."""
        total: Any = jnp.zeros(self.values.shape, jnp.promote_types(self.values.dtype, jnp.float32))
        for members, alone in self._groups():
            pieces = [self._pieces[n] for n in members]
            together = pieces if alone else merged([(self._sites[n], self._pieces[n]) for n in members])
            if together is not None:
                total = total + sum(piece.squared_norm() for piece in together)
                if len(together) == 2 and isinstance(together[0], Factors) and isinstance(together[1], Rows):
                    total = total + together[1].cross(together[0])
                continue
            for gradients in self._of_leaves(members).values():
                total = total + Direct(gradients).squared_norm()
        return total

    def uses(self) -> list[Use]:
        """How each parameter's gradients are taken, for each place where it meets data."""
        found = []
        for members, alone in self._groups():
            apart = not alone and merged([(self._sites[n], self._pieces[n]) for n in members]) is None
            for n in members:
                site, piece = self._sites[n], self._pieces[n]
                rule = type(piece).__name__.lower()
                if isinstance(piece, Factors):
                    why = piece.choice()
                elif isinstance(piece, Rows):
                    why = f"rows of a table are taken, {piece.taken.shape[2]} for each example"
                else:
                    why = f"the gradient at each example has {math.prod(piece.gradients.shape[1:])} numbers"
                    why += "" if has_rule(site) else f", by the derivative of {site.eqn.primitive.name}"
                if apart:
                    how = "used in other ways too" if len(members) > 1 else "computed from the parameters"
                    rule, why = "direct", f"the operand is {how}, so each example's gradient is held"
                found += [Use(leaf, rule, site.eqn.primitive.name, _where(site), why) for leaf in site.value.leaves]
        return sorted(found)

    def _of_leaves(self, members: list[int]) -> dict[int, jax.Array]:
        """Each example's gradients of the parameters of some sites."""
        wanted = frozenset(members)
        leaves = sorted(frozenset().union(*(self._sites[n].value.leaves for n in members)))

        def chain(chosen: list[Any]) -> dict[int, Any]:
            filled = list(self._parameters)
            for i, leaf in zip(leaves, chosen, strict=True):
                filled[i] = leaf
            return self._operands(filled, wanted)

        _, pull = jax.vjp(chain, [self._parameters[i] for i in leaves])
        direct = {n: self._pieces[n].direct() for n in members}
        (gradients,) = jax.vmap(pull)(direct)
        return dict(zip(leaves, gradients, strict=True))

    def weighted_sum(self, weights: jax.Array, dtype: Any = None) -> list[jax.Array]:
        """The sum over examples of `weights` times the gradient, for each parameter; those of weight zero are left out.

        Args:
          weights: shape (batch,).
          dtype: what to sum in; None for the dtype of the parameters.
        """
        numbers = frozenset(range(len(self._sites)))
        parameters = [x if dtype is None else x.astype(dtype) for x in self._parameters]
        given, pull = jax.vjp(lambda parameters: self._operands(parameters, numbers), parameters)
        (gradients,) = pull(
            {n: piece.weighted(weights, given[n].dtype).astype(given[n].dtype) for n, piece in self._pieces.items()}
        )
        return gradients


def _where(site: Site) -> str:
    """The innermost line of the user's own source that a site comes from."""
    ours = str(Path(__file__).parents[1])
    for eqn in (site.eqn, *reversed(site.within)):  # what a library has jitted may have been traced for another caller
        for frame in getattr(eqn.source_info.traceback, "frames", []):
            if not frame.file_name.startswith(ours) and "site-packages" not in frame.file_name:
                return f"{frame.file_name}:{frame.line_num} in {frame.function_name}"
    return "unknown"
