"""Matrix products and convolutions of a compiled program that have lost their names.

XLA's rewrites of a convolution, above all of the gradient of its weights, leave no name on what they make. But the
program as JAX wrote it has the product, with a result of the same lengths, and computed from the same neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..._core.source_lines import source_of
from .flat_program import FlatProgram, Node, Value, insides
from .hlo import HloProgram, Instruction
from .provenance import PRODUCTS, Provenance, around, is_product, place_of
from .scopes import scope_of

# What only puts the numbers of an operand elsewhere, between a product and what it is computed from.
_VIEWS = frozenset(
    {"transpose", "reshape", "squeeze", "broadcast_in_dim", "convert_element_type", "copy", "rev", "pad", "slice"}
)

Lengths = tuple[int, ...]


class _Written(NamedTuple):
    """A product of the program as JAX wrote it: where, the lengths of its result, and what it is computed from."""

    place: Provenance
    lengths: Lengths
    sources: frozenset[Provenance]


def unnamed_dots(program: HloProgram, closed: Any) -> dict[str, Provenance]:
    """Where the products without a name come from, by the names of their instructions.

    Args:
      program: the compiled program.
      closed: the program before XLA has changed it.
    """
    products = [x for x in program.instructions.values() if is_product(x)]
    nameless = [x for x in products if place_of(program, x) is None]
    if not nameless:
        return {}
    flat = FlatProgram(closed.jaxpr, closed.consts, [Value(x.aval) for x in closed.jaxpr.invars])
    written = list(_products(flat, ""))
    for x in products:
        place = place_of(program, x)
        if place is not None:
            alike = [
                y for y in written if (y.place.op, y.place.scope, y.lengths) == (place.op, place.scope, _lengths(x))
            ]
            if alike:
                written.remove(max(alike, key=lambda y: y.place.source == place.source))
    found = {}
    for x in nameless:
        near = set(around(program, x, users=False))
        candidates = [y for y in written if y.lengths == _lengths(x)]
        if candidates:
            # Of several that are alike, the one with most neighbours in common, else the first that is left.
            best = max(candidates, key=lambda y: len(near & y.sources))
            written.remove(best)
            found[x.name] = best.place
    return found


def _products(flat: FlatProgram, scope: str) -> Iterator[_Written]:
    for node in flat.nodes:
        place = _place(node, scope)
        if node.name in PRODUCTS.values():
            sources = frozenset(_place(x, scope) for value in node.inputs for x in _makers(value))
            yield _Written(place, _sorted(node.outputs[0].aval.shape), sources)
        for inner in insides(node):
            yield from _products(inner, "/".join(filter(None, [scope, str(node.eqn.source_info.name_stack)])))


def _place(node: Node, scope: str) -> Provenance:
    name = "/".join(filter(None, [scope, str(node.eqn.source_info.name_stack), node.name]))
    return Provenance(node.name, scope_of(name)[1], source_of(node.eqn))


def _makers(value: Value) -> Iterator[Node]:
    """The operation that a value comes from, past those that only put it elsewhere."""
    node = value.node
    if node is not None and node.name in _VIEWS:
        yield from _makers(node.inputs[0])
    elif node is not None:
        yield node


def _lengths(instruction: Instruction) -> Lengths:
    return _sorted(instruction.results[0].shape)


def _sorted(shape: tuple[int, ...]) -> Lengths:
    return tuple(sorted(length for length in shape if length > 1))
