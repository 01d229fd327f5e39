"""A jaxpr as one flat list of operations: calls are inlined, and each value records its producer and its uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from ..._core.compat import Jaxpr, JaxprEqn, scan_counts
from ..._core.jaxpr import CALLS, CUSTOM, ELEMENTWISE, aval, called, evaluate, interpret
from .axis_correspondence import correspondence

# Calls that are not inlined, because their derivative rule would be lost.
ROOTS = frozenset({"sqrt", "rsqrt", "pow"})


@dataclass(eq=False)
class Value:
    """A value of a program.

    Attributes:
      aval: its shape and dtype.
      node: the operation that computes it; None for a constant or an argument.
      leaf: its index among the parameters; None if it is not a parameter.
      constant: the array, if it is a constant.
      static: whether it depends on parameters and constants only.
      leaves: the indices of the parameters that a static value depends on.
      learned: whether a static value depends on parameters or a constant array, not only on numbers in the code.
      rooted: whether the computation of a static value takes a root, such as of the variance in a batch norm.
      sizes: its shape, with 1 for each axis along which a static value is constant by construction.
      uses: the operation of each use, and None for each occurrence as an output of the program.
    """

    aval: Any
    node: Node | None = None
    leaf: int | None = None
    constant: Any = None
    static: bool = False
    leaves: frozenset[int] = frozenset()
    learned: bool = False
    rooted: bool = False
    sizes: tuple[int, ...] = ()
    uses: list[Node | None] = field(default_factory=list)


@dataclass(eq=False)
class Node:
    """An operation of a flat program, with the scopes of the enclosing calls."""

    eqn: JaxprEqn
    inputs: list[Value]
    outputs: list[Value] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Return the name of the primitive."""
        return self.eqn.primitive.name


class Rewrite(NamedTuple):
    """A replacement for an operation: a function of `inputs` that returns the list of its results."""

    inputs: Sequence[Value]
    function: Callable[..., Sequence[Any]]


_NONE: Mapping[Node, Rewrite] = MappingProxyType({})


class FlatProgram:
    """A program as a flat list of operations.

    Args:
      jaxpr: the program.
      consts: its constants.
      arguments: the values of its arguments.

    Attributes:
      nodes: its operations in order, without dead code.
      outputs: its outputs.
    """

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Value]) -> None:
        self.arguments = list(arguments)
        nodes: list[Node] = []
        self.outputs: list[Value] = interpret(jaxpr, consts, arguments, partial(_visit, nodes, None), _constant)
        # Prune before counting uses: a chain is folded only if nothing else uses it, and dead code does not count.
        self.nodes, _ = needed(nodes, self.outputs)
        for node in self.nodes:
            for value in node.inputs:
                value.uses.append(node)
        for value in self.outputs:
            value.uses.append(None)


def parameter(x: Any, leaf: int) -> Value:
    """Return the value of a parameter."""
    return Value(x, leaf=leaf, static=True, leaves=frozenset([leaf]), learned=True, sizes=tuple(x.shape))


def _constant(x: Any) -> Value:
    shape = np.shape(x)
    # A scalar constant is a number in the code, such as epsilon; an array is closed over, and may be a parameter.
    return Value(jax.typeof(x), constant=x, static=True, learned=bool(shape), sizes=shape)


def _visit(nodes: list[Node], scope: Any, eqn: JaxprEqn, values: list[Value]) -> Sequence[Value]:
    """Append an operation to `nodes`, or the operations of the function that it calls; return its outputs."""
    source = eqn.source_info
    if scope is not None:
        source = source.replace(name_stack=scope + source.name_stack)
    name = eqn.primitive.name
    if name in CALLS and name not in CUSTOM:
        # The scopes of the operations of a called function are relative to the call.
        return interpret(*called(eqn), values, partial(_visit, nodes, source.name_stack), _constant)
    node = Node(eqn.replace(source_info=source), list(values))
    nodes.append(node)
    static = all(x.static for x in values) and not eqn.effects
    for x in eqn.outvars:
        value = Value(aval(x), node, static=static)
        if static:
            value.leaves = frozenset[int]().union(*(x.leaves for x in values))
            value.learned = any(x.learned for x in values)
            value.rooted = name in ROOTS or any(x.rooted for x in values)
            value.sizes = _sizes(eqn, values, tuple(aval(x).shape))
        node.outputs.append(value)
    return node.outputs


def _sizes(eqn: JaxprEqn, values: Sequence[Value], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the `sizes` of a static result: 1 along axes where all inputs are constant, otherwise the full size."""
    if eqn.primitive.name in ELEMENTWISE:
        return tuple(max([1, *(x.sizes[i] for x in values if x.sizes)]) if n else n for i, n in enumerate(shape))
    pairs = correspondence(eqn)
    if pairs is None or len(eqn.outvars) > 1 or 0 in shape:
        return shape
    sizes = list(shape)
    for sources, targets in pairs:
        if all(values[0].sizes[i] == 1 for i in sources):
            for i in targets:
                sizes[i] = 1
    return tuple(sizes)


def insides(node: Node) -> Iterator[FlatProgram]:
    """Yield the inner programs of an operation: loop bodies, branches, and functions with a derivative rule.

    Their arguments are static if the operands are: constants of a loop may be static, its carry is not.
    """
    for closed in jax.tree.leaves(list(node.eqn.params.values())):
        jaxpr = getattr(closed, "jaxpr", closed)
        if not isinstance(jaxpr, Jaxpr):
            continue
        operands: list[Value | None] = list(node.inputs)
        if node.name == "scan":
            shared, carried = scan_counts(node.eqn.params)
            operands[shared : shared + carried] = [None] * carried
        elif node.name == "while":
            # The operands are the constants of the condition, then those of the body, then the carry.
            shared = node.eqn.params["body_nconsts"]
            operands = [*operands[node.eqn.params["cond_nconsts"] :][:shared], *[None] * (len(jaxpr.invars) - shared)]
        elif node.name == "cond":
            # The first operand is the index of the branch.
            operands = operands[1:]
        if len(operands) != len(jaxpr.invars):  # an operation that passes its operands in an unknown way
            operands = [None] * len(jaxpr.invars)
        arguments = [_inner(aval(x), operand) for x, operand in zip(jaxpr.invars, operands, strict=True)]
        yield FlatProgram(jaxpr, getattr(closed, "consts", ()), arguments)


def _inner(x: Any, operand: Value | None) -> Value:
    if operand is None or not operand.static:
        return Value(x)
    # Drop its constant and its sizes, because `x` may be a slice of the operand.
    return replace(operand, aval=x, node=None, leaf=None, constant=None, sizes=tuple(x.shape), uses=[])


def needed(
    nodes: Sequence[Node], wanted: Iterable[Value], rewrites: Mapping[Node, Rewrite] = _NONE, *, effects: bool = True
) -> tuple[list[Node], set[Value]]:
    """Return the operations that the wanted values depend on, or that have effects, and all values that they need."""
    seen = set(wanted)
    kept = []
    # Go backwards, so that all users of a value are visited before the operation that computes it.
    for node in reversed(nodes):
        if (effects and node.eqn.effects) or not seen.isdisjoint(node.outputs):
            kept.append(node)
            seen.update(rewrites[node].inputs if node in rewrites else node.inputs)
    return kept[::-1], seen


def run(nodes: Sequence[Node], known: dict[Value, Any], rewrites: Mapping[Node, Rewrite] = _NONE) -> None:
    """Evaluate operations in order, and add their results to the `known` values."""
    for node in nodes:
        # Some results may already be known: parameters, and the results of an earlier run.
        if not node.outputs or any(x not in known for x in node.outputs):
            inputs, function = rewrites.get(node) or (node.inputs, partial(evaluate, node.eqn))
            known |= zip(node.outputs, function(*[read(x, known) for x in inputs]), strict=True)


def read(value: Value, known: Mapping[Value, Any]) -> Any:
    """Return the array of a constant or known value."""
    return known[value] if value.constant is None else value.constant
