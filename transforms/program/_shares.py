"""Which operations of JAX an instruction of a compiled program stands for, and how much of it each is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ._cost import flops, is_product, weight
from ._hlo import Instruction, Program
from ._scopes import scope_of

# XLA names a product that it has put together with another view of an operand after the view.
_VIEWS = frozenset({"transpose", "reshape", "squeeze", "broadcast_in_dim", "convert_element_type", "rev"})
_PRODUCTS = {"dot": "dot_general", "convolution": "conv_general_dilated"}


@dataclass(frozen=True)
class Place:
    """An operation of JAX.

    Attributes:
      op: its name, such as `dot_general`; for what XLA has added of itself, that of the instruction, such as `copy`.
      scope: its scopes, such as `layers/0/attention`; empty where there are none.
      source: the line of the user's code, `file:line`; empty where it is not known.
    """

    op: str
    scope: str
    source: str


@dataclass(frozen=True)
class Share:
    """The part that an operation is of one run of an instruction.

    Attributes:
      place: the operation.
      part: of its time, from 0 to 1.
      flops: floating point operations.
    """

    place: Place
    part: float
    flops: int


def shares(program: Program, instruction: Instruction) -> list[Share]:
    """What an instruction stands for.

    The time of a fusion, that of its operations together, is divided by their flops: an estimate. What XLA has added of
    itself belongs where its result is needed.
    """
    parts: dict[Place, float] = defaultdict(float)
    counts: dict[Place, int] = defaultdict(int)
    for x in program.inside(instruction) if instruction.opcode == "fusion" else ():
        if needed := weight(program, x):
            # What XLA has made of an operation may have no name; what waits for it has.
            named = x if is_named(x) else next(_named_around(program, x), instruction)
            place = _place(program, named)
            parts[place] += needed
            counts[place] += flops(program, x)
    if not parts:
        return [Share(_place(program, instruction), 1.0, flops(program, instruction))]
    whole = sum(parts.values())
    return [Share(place, part / whole, counts[place]) for place, part in parts.items()]


def is_mixed(program: Program, instruction: Instruction) -> bool:
    """Whether an instruction is a matrix product or a convolution together with something else than it."""
    if instruction.opcode != "fusion":
        return False
    working = [x for x in program.inside(instruction) if weight(program, x)]
    return any(map(is_product, working)) and len({scope_of(x.op_name) for x in working}) > 1


def is_named(instruction: Instruction) -> bool:
    """Whether it has the name of an operation: those of parameters are the names of variables, as in `params['w']`."""
    return instruction.op_name.startswith(("jit(", "pjit(")) and bool(scope_of(instruction.op_name)[0])


def _place(program: Program, instruction: Instruction) -> Place:
    if is_named(instruction):
        op, scope = scope_of(instruction.op_name)
        if op in _VIEWS and is_product(instruction):
            op = _PRODUCTS[instruction.opcode]
        return Place(op, scope, program.source(instruction))
    named = next(_named_around(program, instruction), None)
    scope, source = (scope_of(named.op_name)[1], program.source(named)) if named else ("", "")
    parts = list(program.inside(instruction)) if instruction.opcode == "fusion" else []
    most = max(parts, key=lambda x: (weight(program, x), x.root), default=instruction)
    return Place(_PRODUCTS.get(most.opcode, most.opcode), scope, source)


def _named_around(program: Program, instruction: Instruction) -> Iterator[Instruction]:
    """The named instructions that wait for one, then those it waits for."""
    for name in (*program.waiting(instruction.name), *instruction.operands):
        found = program.instructions[name]
        if is_named(found):
            yield found
