"""The provenance of an instruction of a compiled program: JAX operations, their scopes, source lines and shares."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .cost import flops, weight
from .hlo import HloProgram, Instruction

# The names of a matrix product and a convolution in XLA, and in JAX.
PRODUCTS = {"dot": "dot_general", "convolution": "conv_general_dilated"}
# Operations that only rearrange an operand. XLA names a product that it has merged with such a view after the view.
VIEWS = frozenset(
    {"transpose", "reshape", "squeeze", "broadcast_in_dim", "convert_element_type", "copy", "rev", "pad", "slice"}
)
# The maximum distance, in operands and users, to search for a neighbor with a name.
_STEPS = 6
# Names that JAX adds to the scopes for the structure of a program: calls, loop bodies, branches.
_CALLS = frozenset(
    """
    checkpoint closed_call core_call custom_jvp_call custom_vjp_call eval_jaxpr jit pjit remat rematted_computation
    shard_map
    """.split()  # noqa: SIM905 (words read better)
)
_BRANCH = re.compile(r"branch_\d+_fun")


@dataclass(frozen=True)
class Provenance:
    """A JAX operation with its scope and source line.

    Attributes:
      op: its name, such as `dot_general`; for an instruction that XLA has added, the opcode, such as `copy`.
      scope: its scopes, such as `layers/0/attention`; empty if there are none.
      source: the line of user code, `file:line`; empty if unknown.
    """

    op: str
    scope: str
    source: str


def scope_of(op_name: str) -> tuple[str, str]:
    """Split a name such as `jit(f)/layer/while/body/mix/dot_general` into `dot_general` and `layer/mix`.

    The operation is empty if the name is that of a call only.
    """
    *scopes, operation = _parts(op_name)
    return "" if operation.partition("(")[0] in _CALLS else operation, _without_structure(scopes)


def _parts(name: str) -> list[str]:
    """Split a name at the slashes outside parentheses, since `transpose(jvp(a/b))` is one part."""
    # A loop, since regular expressions cannot match nested parentheses.
    parts, depth = [""], 0
    for character in name:
        depth += (character == "(") - (character == ")")
        if character == "/" and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _without_structure(parts: list[str]) -> str:
    """Join the parts of a name that are scopes, dropping calls, loops and branches."""
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
            # Scopes under a transform, such as `transpose(jvp(layer))`.
            inner = _without_structure(_parts(inner))
            part = f"{outer}({inner})" if inner else ""
        kept.append(part)
    return "/".join(filter(None, kept))


def place_of(program: HloProgram, instruction: Instruction) -> Provenance | None:
    """Return the provenance that the name of an instruction gives; None if it has no name."""
    op, scope = scope_of(instruction.op_name)
    # Parameters are named after variables, such as `params['w']`, and some instructions only after a call.
    if not op or not instruction.op_name.startswith(("jit(", "pjit(")):
        return None
    if op in VIEWS and instruction.opcode in PRODUCTS:
        op = PRODUCTS[instruction.opcode]
    return Provenance(op, scope, program.source(instruction))


def around(
    program: HloProgram, instruction: Instruction, known: Mapping[str, Provenance], *, users: bool = True
) -> Iterator[Provenance]:
    """Yield the provenance of the nearest neighbors of an instruction, breadth first.

    Args:
      program: the program.
      instruction: the instruction to start from.
      known: the provenance of instructions without a name, by instruction name.
      users: whether to follow users as well as operands.
    """
    seen, queue = {instruction.name}, deque([(instruction, 1)])
    while queue:
        x, steps = queue.popleft()
        fusion = program.fusion_of(x)
        # Users first: XLA adds an instruction such as a copy for the users of its result.
        names = [*(program.waiting(x.name) if users else ()), *x.operands, *([fusion.name] if fusion else ())]
        for name in names:
            if name not in seen:
                seen.add(name)
                neighbor = program.instructions[name]
                place = known.get(name) or place_of(program, neighbor)
                if place is not None:
                    yield place
                elif steps < _STEPS:
                    queue.append((neighbor, steps + 1))


@dataclass(frozen=True)
class Attribution:
    """The share of a JAX operation in one run of an instruction.

    Attributes:
      place: the operation.
      part: its fraction of the time, from 0 to 1.
      flops: its floating point operations.
    """

    place: Provenance
    part: float
    flops: int


def shares(program: HloProgram, instruction: Instruction, found: Mapping[str, Provenance]) -> list[Attribution]:
    """Divide an instruction among the JAX operations that it represents.

    The time of a fusion can only be measured as a whole. It is divided in proportion to the flops of its operations,
    which is an estimate. An instruction that XLA has added is attributed to the users of its result.

    Args:
      program: the program.
      instruction: an instruction that is run.
      found: the provenance of instructions without a name, such as products, by instruction name.
    """

    def place_for(x: Instruction) -> Provenance:
        return found.get(x.name) or place_of(program, x) or _nearest(program, x, found)

    weights: dict[Provenance, float] = defaultdict(float)
    counts: dict[Provenance, int] = defaultdict(int)
    for x in program.inside(instruction) if instruction.opcode == "fusion" else ():
        # Only arithmetic has weight: a broadcast or a slice inside a fused loop takes no separate time.
        if needed := weight(program, x):
            place = place_for(x)
            weights[place] += needed
            counts[place] += flops(program, x)
    if not weights:
        return [Attribution(place_for(instruction), 1.0, flops(program, instruction))]
    total = sum(weights.values())
    return [Attribution(place, part / total, counts[place]) for place, part in weights.items()]


def is_mixed(program: HloProgram, instruction: Instruction) -> bool:
    """Return whether an instruction fuses a matrix product or a convolution with other JAX operations."""
    if instruction.opcode != "fusion":
        return False
    working = [x for x in program.inside(instruction) if weight(program, x)]
    return any(x.opcode in PRODUCTS for x in working) and len({scope_of(x.op_name) for x in working}) > 1


def _nearest(program: HloProgram, instruction: Instruction, found: Mapping[str, Provenance]) -> Provenance:
    """Return the operation of an instruction without a name, with the scope and line of its nearest neighbor."""
    near = next(around(program, instruction, found), Provenance("", "", ""))
    parts = program.inside(instruction) if instruction.opcode == "fusion" else ()
    # Name a fusion after its most expensive operation, or after its root if it has no arithmetic.
    heaviest = max(parts, key=lambda x: (weight(program, x), x.root), default=instruction)
    fusion = program.fusion_of(instruction)
    # An instruction inside a named fusion comes from the named operation, as when XLA expands a function.
    op = near.op if fusion is not None and fusion.op_name else PRODUCTS.get(heaviest.opcode, heaviest.opcode)
    return Provenance(op, near.scope, near.source)
