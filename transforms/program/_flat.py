"""A program as one flat list of operations: calls are entered, and a value knows what makes it and what uses it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from .._compat import scan_counts
from .._jaxpr import CALLS, ELEMENTWISE, aval, called, evaluate, interpret

# Not entered: the derivative rule would be lost.
_CLOSED = frozenset({"custom_jvp_call", "custom_vjp_call"})
ROOTS = frozenset({"sqrt", "rsqrt", "pow"})

Pairs = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(eq=False)
class Value:
    """A value of a program.

    Attributes:
      aval: its shape and dtype.
      node: the operation that makes it; None for a constant or an argument.
      leaf: its number among the parameters; None if it is not one.
      constant: the array, if it is a constant.
      static: whether it depends on parameters and constants only.
      leaves: the numbers of the parameters that a static value depends on.
      learned: whether a static value comes from parameters or a constant array, not only from numbers in the code.
      rooted: whether a root is taken on the way to a static value.
      sizes: its shape, with 1 for each axis along which a static value is the same by the way it is made.
      uses: the operations that take it, as often as they do, and None for each time that it is an output.
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
    """An operation of a flat program, with the scopes of the calls around it."""

    eqn: JaxprEqn
    inputs: list[Value]
    outputs: list[Value] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Which operation it is."""
        return self.eqn.primitive.name


class Rewrite(NamedTuple):
    """Another way to compute an operation: from these values, by this function, which gives a list."""

    inputs: Sequence[Value]
    function: Callable[..., Sequence[Any]]


class Flat:
    """A program, flat.

    Args:
      jaxpr: the program.
      consts: its constants.
      arguments: what stands for its arguments.

    Attributes:
      nodes: its operations in order; those that nothing needs are left out.
      outputs: its outputs.
    """

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Value]) -> None:
        self.arguments = list(arguments)
        nodes: list[Node] = []
        self.outputs: list[Value] = interpret(jaxpr, consts, arguments, partial(_visit, nodes, None), _constant)
        self.nodes, _ = needed(nodes, self.outputs)
        for node in self.nodes:
            for value in node.inputs:
                value.uses.append(node)
        for value in self.outputs:
            value.uses.append(None)


def parameter(x: Any, leaf: int) -> Value:
    """What stands for a parameter."""
    return Value(x, leaf=leaf, static=True, leaves=frozenset([leaf]), learned=True, sizes=tuple(x.shape))


def _constant(x: Any) -> Value:
    shape = np.shape(x)
    return Value(jax.typeof(x), constant=x, static=True, learned=bool(shape), sizes=shape)


def _visit(nodes: list[Node], scope: Any, eqn: JaxprEqn, values: list[Value]) -> Sequence[Value]:
    source = eqn.source_info
    if scope is not None:
        source = source.replace(name_stack=scope + source.name_stack)
    name = eqn.primitive.name
    if name in CALLS and name not in _CLOSED:
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


def insides(node: Node) -> Iterator[Flat]:
    """The programs that an operation repeats, chooses from, or brings with a derivative rule."""
    for closed in jax.tree.leaves(list(node.eqn.params.values())):
        jaxpr = getattr(closed, "jaxpr", closed)
        if not isinstance(jaxpr, Jaxpr):
            continue
        operands: list[Value | None] = list(node.inputs)
        if node.name == "scan":
            shared, carried = scan_counts(node.eqn.params)
            operands[shared : shared + carried] = [None] * carried
        elif node.name == "while":
            shared = node.eqn.params["body_nconsts"]
            operands = [*operands[node.eqn.params["cond_nconsts"] :][:shared], *[None] * (len(jaxpr.invars) - shared)]
        elif node.name == "cond":
            operands = operands[1:]
        if len(operands) != len(jaxpr.invars):
            operands = [None] * len(jaxpr.invars)
        arguments = [_inner(aval(x), operand) for x, operand in zip(jaxpr.invars, operands, strict=True)]
        yield Flat(jaxpr, getattr(closed, "consts", ()), arguments)


def _inner(x: Any, operand: Value | None) -> Value:
    if operand is None or not operand.static:
        return Value(x)
    return replace(operand, aval=x, node=None, leaf=None, constant=None, sizes=tuple(x.shape), uses=[])


def needed(
    nodes: Sequence[Node],
    wanted: Iterable[Value],
    rewrites: Mapping[Node, Rewrite] | None = None,
    *,
    effects: bool = True,
) -> tuple[list[Node], set[Value]]:
    """The operations that lead to some values, or have effects, and all values that these need."""
    rewrites = rewrites or {}
    seen = set(wanted)
    kept = []
    for node in reversed(nodes):
        if (effects and node.eqn.effects) or not seen.isdisjoint(node.outputs):
            kept.append(node)
            seen.update(rewrites[node].inputs if node in rewrites else node.inputs)
    return kept[::-1], seen


def run(nodes: Sequence[Node], known: dict[Value, Any], rewrites: Mapping[Node, Rewrite] | None = None) -> None:
    """Add to the values that are `known` those that some operations give."""
    rewrites = rewrites or {}
    for node in nodes:
        if not node.outputs or any(x not in known for x in node.outputs):
            inputs, function = rewrites.get(node) or (node.inputs, partial(evaluate, node.eqn))
            known |= zip(node.outputs, function(*[read(x, known) for x in inputs]), strict=True)


def read(value: Value, known: Mapping[Value, Any]) -> Any:
    """A value that is a constant or known."""
    return known[value] if value.constant is None else value.constant


# ---- Axes


def correspondence(eqn: JaxprEqn) -> Pairs | None:
    """Which axes of the first operand of a rearrangement become which of the result; None for other operations.

    The elements of each group of axes of the operand, in order, are those of a group of axes of the result. An axis of
    size 1 may come from nothing or become nothing; along an axis that comes from nothing all is the same.
    """
    name, params = eqn.primitive.name, eqn.params
    if not eqn.invars or len(eqn.invars) > 1:
        return None
    source, target = aval(eqn.invars[0]).shape, aval(eqn.outvars[0]).shape
    if name in ("convert_element_type", "copy", "copy_p"):
        return [((i,), (i,)) for i in range(len(source))]
    if name == "transpose":
        return [((axis,), (i,)) for i, axis in enumerate(params["permutation"])]
    if name == "squeeze":
        gone = [axis % len(source) for axis in params["dimensions"]]
        kept = [i for i in range(len(source)) if i not in gone]
        return [*(((i,), ()) for i in gone), *(((axis,), (i,)) for i, axis in enumerate(kept))]
    if name == "broadcast_in_dim":
        places = [int(i) for i in params["broadcast_dimensions"]]
        same = [source[i] == target[place] for i, place in enumerate(places)]
        new = [i for i in range(len(target)) if i not in places or not same[places.index(i)]]
        pairs = [((i,), (place,) if same[i] else ()) for i, place in enumerate(places)]
        return [*pairs, *(((), (i,)) for i in new)]
    if name == "reshape" and 0 not in source:
        order = params["dimensions"] or range(len(source))
        found = _reshaped([source[i] for i in order], target)
        return [(tuple(order[i] for i in sources), targets) for sources, targets in found]
    return None


def _reshaped(source: Sequence[int], target: Sequence[int]) -> Pairs:
    """The smallest groups of axes with equal numbers of elements."""
    pairs: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        if i < len(source) and source[i] == 1 and (j == len(target) or target[j] != 1):
            pairs.append(((i,), ()))
            i += 1
        elif j < len(target) and target[j] == 1 and (i == len(source) or source[i] != 1):
            pairs.append(((), (j,)))
            j += 1
        else:
            a, b = i + 1, j + 1
            while (left := math.prod(source[i:a])) != (right := math.prod(target[j:b])):
                a, b = (a + 1, b) if left < right else (a, b + 1)
            pairs.append((tuple(range(i, a)), tuple(range(j, b))))
            i, j = a, b
    return pairs


def carried(x: np.ndarray, pairs: Pairs, source: Sequence[int], target: Sequence[int]) -> np.ndarray | None:
    """`x`, of which each axis is whole or of size 1, where the axes of `source` become those of `target`.

    None if it differs along an axis that has become nothing.
    """
    whole = [any(x.shape[i] > 1 for i in axes) for axes, _ in pairs]
    if any(differs and not axes for differs, (_, axes) in zip(whole, pairs, strict=True)):
        return None
    x = x.transpose([i for axes, _ in pairs for i in axes])
    groups = list(zip(whole, pairs, strict=True))
    x = np.broadcast_to(x, [source[i] if differs else 1 for differs, (axes, _) in groups for i in axes])
    x = x.reshape([target[i] if differs else 1 for differs, (_, axes) in groups for i in axes])
    return x.transpose(np.argsort([i for _, axes in pairs for i in axes]))
