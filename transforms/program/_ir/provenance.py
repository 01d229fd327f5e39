"""The origin of an instruction of a compiled program: operations of JAX, their scopes and lines, and their shares."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .cost import flops, weight
from .hlo import HloProgram, Instruction

# The names of a matrix product and a convolution in XLA, and in JAX.
PRODUCTS = {"dot": "dot_general", "convolution": "conv_general_dilated"}
# Operations that only rearrange an operand. XLA names a product that it has merged with another view after the view.
VIEWS = frozenset(
    {"transpose", "reshape", "squeeze", "broadcast_in_dim", "convert_element_type", "copy", "rev", "pad", "slice"}
)
# How many operands and users away to look for a neighbour with a name.
_STEPS = 6
# The structure of a program adds names of its own to the scopes: calls, the bodies of loops, branches.
_CALLS = frozenset(
    """
    checkpoint closed_call core_call custom_jvp_call custom_vjp_call eval_jaxpr jit pjit remat rematted_computation
    shard_map
    """.split()  # noqa: SIM905 (words read better)
)
_BRANCH = re.compile(r"branch_\d+_fun")


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


def scope_of(op_name: str) -> tuple[str, str]:
    """Split a name such as `jit(f)/layer/while/body/mix/dot_general` into `dot_general` and `layer/mix`.

    The operation is empty where the name is that of a call alone.
    """
    *scopes, operation = _parts(op_name)
    return "" if operation.partition("(")[0] in _CALLS else operation, _without_structure(scopes)


def _parts(name: str) -> list[str]:
    """Split a name at the slashes that are not in parentheses, since `transpose(jvp(a/b))` is one part."""
    # By hand, since regular expressions do not count parentheses.
    parts, depth = [""], 0
    for character in name:
        depth += (character == "(") - (character == ")")
        if character == "/" and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _without_structure(parts: list[str]) -> str:
    """Join the parts that are scopes, without calls, loops and branches."""
    kept = []
    for i, part in enumerate(parts):
        before, after = parts[i - 1] if i else "", parts[i + 1] if i + 1 < len(parts) else ""
        # `while` and `body` are dropped only next to each other, since a user may name a scope `body`.
        opens = (part == "while" and after in {"body", "cond"}) or (part == "cond" and _BRANCH.fullmatch(after))
        inside = (part in {"body", "cond"} and before == "while") or (_BRANCH.fullmatch(part) and before == "cond")
        outer, bracket, inner = part.removesuffix(")").partition("(")
        if opens or inside or outer in _CALLS:
            continue
        if bracket and part.endswith(")"):
            # A transform of scopes, such as `transpose(jvp(layer))`.
            inner = _without_structure(_parts(inner))
            part = f"{outer}({inner})" if inner else ""
        kept.append(part)
    return "/".join(filter(None, kept))


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
    seen, queue = {instruction.name}, deque([(instruction, 1)])
    while queue:
        x, steps = queue.popleft()
        fusion = program.fusion_of(x)
        # Users first: what XLA adds, such as a copy, is there for the sake of what needs its result.
        names = [*(program.waiting(x.name) if users else ()), *x.operands, *([fusion.name] if fusion else ())]
        for name in names:
            if name not in seen:
                seen.add(name)
                neighbour = program.instructions[name]
                place = known.get(name) or place_of(program, neighbour)
                if place is not None:
                    yield place
                elif steps < _STEPS:
                    queue.append((neighbour, steps + 1))


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
