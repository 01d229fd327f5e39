"""Which operations of JAX an instruction of a compiled program stands for, and how much of it each is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from .cost import flops, weight
from .hlo import HloProgram, Instruction
from .provenance import PRODUCTS, Provenance, around, is_product, place_of
from .scopes import scope_of


@dataclass(frozen=True)
class Attribution:
    """The part that an operation is of one run of an instruction.

    Attributes:
      place: the operation.
      part: of its time, from 0 to 1.
      flops: floating point operations.
    """

    place: Provenance
    part: float
    flops: int


def shares(program: HloProgram, instruction: Instruction, lost: Mapping[str, Provenance]) -> list[Attribution]:
    """What an instruction stands for.

    The time of a fusion, that of its operations together, is divided by their flops: an estimate. What XLA has added of
    itself belongs where its result is needed.

    Args:
      program: the program.
      instruction: one that is run.
      lost: the places of some that have no name, such as products.
    """
    parts: dict[Provenance, float] = defaultdict(float)
    counts: dict[Provenance, int] = defaultdict(int)
    for x in program.inside(instruction) if instruction.opcode == "fusion" else ():
        if needed := weight(program, x):
            # What XLA has made of an operation may have no name; what waits for it has.
            place = lost.get(x.name) or place_of(program, x) or _nearest(program, x, lost)
            parts[place] += needed
            counts[place] += flops(program, x)
    if not parts:
        place = lost.get(instruction.name) or place_of(program, instruction) or _nearest(program, instruction, lost)
        return [Attribution(place, 1.0, flops(program, instruction))]
    whole = sum(parts.values())
    return [Attribution(place, part / whole, counts[place]) for place, part in parts.items()]


def is_mixed(program: HloProgram, instruction: Instruction) -> bool:
    """Whether an instruction is a matrix product or a convolution together with something else than it."""
    if instruction.opcode != "fusion":
        return False
    working = [x for x in program.inside(instruction) if weight(program, x)]
    return any(map(is_product, working)) and len({scope_of(x.op_name) for x in working}) > 1


def _nearest(program: HloProgram, instruction: Instruction, lost: Mapping[str, Provenance]) -> Provenance:
    """Of an instruction without a name: what it does, where its nearest neighbour is."""
    near = next(around(program, instruction, lost), Provenance("", "", ""))
    parts = list(program.inside(instruction)) if instruction.opcode == "fusion" else []
    most = max(parts, key=lambda x: (weight(program, x), x.root), default=instruction)
    fusion = program.fusion_of(instruction)
    # Inside what is named after one operation it belongs to that.
    op = near.op if fusion is not None and fusion.op_name else PRODUCTS.get(most.opcode, most.opcode)
    return Provenance(op, near.scope, near.source)
