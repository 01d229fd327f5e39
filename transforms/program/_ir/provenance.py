"""The origin of an instruction of a compiled program: the operation of JAX, its scopes, and a line of source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .hlo import HloProgram, Instruction
from .scopes import scope_of

# The names of a matrix product and a convolution in XLA, and in JAX.
PRODUCTS = {"dot": "dot_general", "convolution": "conv_general_dilated"}
# XLA names a product that it has merged with another view of an operand after the view.
_VIEWS = frozenset({"transpose", "reshape", "squeeze", "broadcast_in_dim", "convert_element_type", "rev"})
# How many operands and users away to look for a neighbour with a name.
_STEPS = 6


@dataclass(frozen=True)
class Provenance:
    """An operation of JAX.

    Attributes:
      op: its name, such as `dot_general`; for what XLA has added of itself, that of the instruction, such as `copy`.
      scope: its scopes, such as `layers/0/attention`; empty where there are none.
      source: the line of the user's code, `file:line`; empty where it is not known.
    """

    op: str
    scope: str
    source: str


def place_of(program: HloProgram, instruction: Instruction) -> Provenance | None:
    """Return the place that an instruction is named after; None where it has no name."""
    op, scope = scope_of(instruction.op_name)
    # Parameters are named after variables, as in `params['w']`, and some instructions after a call alone.
    if not op or not instruction.op_name.startswith(("jit(", "pjit(")):
        return None
    if op in _VIEWS and instruction.opcode in PRODUCTS:
        op = PRODUCTS[instruction.opcode]
    return Provenance(op, scope, program.source(instruction))


def around(
    program: HloProgram, instruction: Instruction, known: Mapping[str, Provenance], *, users: bool = True
) -> Iterator[Provenance]:
    """Yield the places nearest to an instruction, breadth first, along users and operands or operands alone.

    Args:
      program: the program.
      instruction: where to begin.
      known: the places of instructions that have no name of their own.
      users: whether to look at what waits for the instruction too.
    """
    seen, level = {instruction.name}, [instruction]
    for _ in range(_STEPS):
        further = []
        for x in level:
            fusion = program.fusion_of(x)
            # Users first: what XLA adds, such as a copy, is there for the sake of what needs its result.
            names = [*(program.waiting(x.name) if users else ()), *x.operands, *([fusion.name] if fusion else ())]
            for name in names:
                if name in seen:
                    continue
                seen.add(name)
                neighbour = program.instructions[name]
                place = known.get(name) or place_of(program, neighbour)
                if place is not None:
                    yield place
                else:
                    further.append(neighbour)
        level = further
