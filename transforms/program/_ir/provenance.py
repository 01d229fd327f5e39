"""The origin of an instruction of a compiled program: operations of JAX, their scopes and lines, and their shares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .cost import flops, weight
from .hlo import HloProgram, Instruction
from .scopes import scope_of

# The names of a matrix product and a convolution in XLA, and in JAX.
PRODUCTS = {"dot": "dot_general", "convolution": "conv_general_dilated"}
# Operations that only rearrange an operand. XLA names a product that it has merged with another view after the view.
VIEWS = frozenset(
    {"transpose", "reshape", "squeeze", "broadcast_in_dim", "convert_element_type", "copy", "rev", "pad", "slice"}
)
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
    if op in VIEWS and instruction.opcode in PRODUCTS:
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


@dataclass(frozen=True)
class Attribution:
    """The part of one run of an instruction that belongs to an operation.

    Attributes:
      place: the operation.
      part: its fraction of the time, from 0 to 1.
      flops: its floating point operations.
    """

    place: Provenance
    part: float
    flops: int


def shares(program: HloProgram, instruction: Instruction, found: Mapping[str, Provenance]) -> list[Attribution]:
    """Divide an instruction among the operations that it represents.

    The time of a fusion, which can only be measured for all its operations together, is divided in proportion to their
    flops: an estimate. What XLA has added by itself belongs where its result is needed.

    Args:
      program: the program.
      instruction: one that is run.
      found: the places of instructions that have no name of their own, such as products.
    """

    def place_for(x: Instruction) -> Provenance:
        return found.get(x.name) or place_of(program, x) or _nearest(program, x, found)

    weights: dict[Provenance, float] = defaultdict(float)
    counts: dict[Provenance, int] = defaultdict(int)
    for x in program.inside(instruction) if instruction.opcode == "fusion" else ():
        # Only what computes is weighed: a broadcast or a slice inside of a fused loop takes no time of its own.
        if needed := weight(program, x):
            place = place_for(x)
            weights[place] += needed
            counts[place] += flops(program, x)
    if not weights:
        return [Attribution(place_for(instruction), 1.0, flops(program, instruction))]
    total = sum(weights.values())
    return [Attribution(place, part / total, counts[place]) for place, part in weights.items()]


def is_mixed(program: HloProgram, instruction: Instruction) -> bool:
    """Return whether an instruction fuses a matrix product or a convolution with operations of other places."""
    if instruction.opcode != "fusion":
        return False
    working = [x for x in program.inside(instruction) if weight(program, x)]
    return any(x.opcode in PRODUCTS for x in working) and len({scope_of(x.op_name) for x in working}) > 1


def _nearest(program: HloProgram, instruction: Instruction, found: Mapping[str, Provenance]) -> Provenance:
    """Return what an instruction without a name does, at the place of its nearest neighbour."""
    near = next(around(program, instruction, found), Provenance("", "", ""))
    parts = program.inside(instruction) if instruction.opcode == "fusion" else ()
    # A fusion is called after its heaviest operation, or after the last one if none computes anything.
    heaviest = max(parts, key=lambda x: (weight(program, x), x.root), default=instruction)
    fusion = program.fusion_of(instruction)
    # An instruction inside a fusion that has a name was made of the named operation, as when XLA expands a function.
    op = near.op if fusion is not None and fusion.op_name else PRODUCTS.get(heaviest.opcode, heaviest.opcode)
    return Provenance(op, near.scope, near.source)
