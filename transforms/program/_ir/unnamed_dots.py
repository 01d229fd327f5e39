"""Attribute matrix products and convolutions of a compiled program that have lost their names.

XLA's rewrites of a convolution, above all of the gradient of its weights, create instructions without names. The jaxpr
still has the product, with a result of the same axis sizes and the same neighbors. The products of both programs are
therefore matched: first those with names, then the others by sizes and neighbors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..._core.source_lines import source_of
from .flat_program import FlatProgram, Node, Value, insides
from .hlo import HloProgram
from .provenance import PRODUCTS, VIEWS, Provenance, around, place_of, scope_of


class _Written(NamedTuple):
    """A product of the jaxpr: its provenance, the sizes of its result, and the provenance of its operands."""

    place: Provenance
    lengths: tuple[int, ...]
    sources: frozenset[Provenance]


def unnamed_dots(program: HloProgram, closed: Any) -> dict[str, Provenance]:
    """Return the provenance of products without a name, by the names of their instructions.

    Args:
      program: the compiled program.
      closed: its closed jaxpr.
    """
    products = [(x, place_of(program, x)) for x in program.instructions.values() if x.opcode in PRODUCTS]
    if all(place for _, place in products):
        return {}
    flat = FlatProgram(closed.jaxpr, closed.consts, [Value(x.aval) for x in closed.jaxpr.invars])
    written = list(_products(flat, ""))
    for x, place in products:
        # Each product of the jaxpr matches one of the compiled program, so remove those that have a name.
        key = place and (place.op, place.scope, _lengths(x.results[0].shape))
        if same := [y for y in written if (y.place.op, y.place.scope, y.lengths) == key]:
            written.remove(max(same, key=lambda y: y.place == place))
    found = {}
    for x, place in products:
        near = set(around(program, x, {}, users=False))
        if place is None and (candidates := [y for y in written if y.lengths == _lengths(x.results[0].shape)]):
            # Among several of these sizes, take the one with most neighbors in common, otherwise the first.
            best = max(candidates, key=lambda y: len(near & y.sources))
            written.remove(best)
            found[x.name] = best.place
    return found


def _products(flat: FlatProgram, scope: str) -> Iterator[_Written]:
    """Yield the products of a program in order, including those inside its loops and branches."""
    for node in flat.nodes:
        place = _place(node, scope)
        if node.name in PRODUCTS.values():
            sources = frozenset(_place(x, scope) for x in map(_maker, node.inputs) if x is not None)
            yield _Written(place, _lengths(node.outputs[0].aval.shape), sources)
        for inner in insides(node):
            yield from _products(inner, f"{scope}/{node.eqn.source_info.name_stack}")


def _place(node: Node, scope: str) -> Provenance:
    _, scope = scope_of(f"{scope}/{node.eqn.source_info.name_stack}/{node.name}")
    return Provenance(node.name, scope, source_of(node.eqn))


def _maker(value: Value) -> Node | None:
    """Return the operation that computes a value, skipping views of it; None for an argument."""
    while value.node is not None and value.node.name in VIEWS:
        value = value.node.inputs[0]
    return value.node


def _lengths(shape: tuple[int, ...]) -> tuple[int, ...]:
    # XLA may reorder axes, and drops those of size 1.
    return tuple(sorted(length for length in shape if length > 1))
