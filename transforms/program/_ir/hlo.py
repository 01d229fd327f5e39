"""A parser for the text of a compiled program: its computations, their instructions, and their source lines."""

from __future__ import annotations

import ast
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..._core.source_lines import users_line

_NAME = r"%?([\w.\-]+)"
_COMPUTATION = re.compile(rf"^(ENTRY )?{_NAME} (?:\(.*\) -> .*)?\{{$")
_INSTRUCTION = re.compile(rf"^\s+(ROOT )?{_NAME} = (.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([\d,]*)(:[^}]*)?)?")
_OPCODE = re.compile(r"([a-z][\w\-]*)\(")
_CALLED = re.compile(
    rf"\b(?:calls|body|condition|to_apply|true_computation|false_computation)={_NAME}|branch_computations=\{{([^}}]*)\}}"
)
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_PARENTHESES = re.compile(rf"{_QUOTED.pattern}|[()]")  # a quoted string is one match, with all its parentheses
_METADATA = re.compile(rf", metadata=\{{(?:[^{{}}\"]|{_QUOTED.pattern})*\}}")

# XLA writes the number of iterations if it can prove it, as for `scan`.
_ITERATIONS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')

# Operations without cost, which only name arrays that already exist.
NAMES = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id"})
# Operations that only run other computations.
CONTAINERS = frozenset({"while", "conditional", "call", "async-start", "async-done"})


@dataclass(frozen=True)
class Array:
    """The type of an array.

    Attributes:
      dtype: the dtype in HLO's notation, such as `f32`.
      shape: the sizes of its axes.
      order: the axes from minor (contiguous in memory) to major.
      on_chip: whether it is in the memory of a TPU core instead of main memory.
    """

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    on_chip: bool = False

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Return its size in bytes; the name of a dtype, such as `f32` or `s4`, contains its number of bits."""
        if self.dtype in {"token", "opaque"}:
            return 0
        bits = re.search(r"\d+", self.dtype)
        return -(-self.size * (int(bits[0]) if bits else 8) // 8)  # `pred` takes a byte

    @property
    def traffic(self) -> int:
        """Return the bytes that reading or writing it moves from or to main memory."""
        return 0 if self.on_chip else self.bytes


@dataclass(frozen=True)
class Instruction:
    """An instruction of a compiled program.

    Attributes:
      name: its name, unique in the program; `hlo_op` in the trace of a run.
      opcode: the operation, such as `dot` or `fusion`.
      results: the arrays that it returns, one unless it returns a tuple.
      operands: the names of the instructions whose results are its operands.
      literal: the value of a constant, or the number of a parameter, as text; otherwise empty.
      root: whether its result is the result of its computation.
      rest: the text after the operands: attributes, metadata and backend configuration.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    literal: str
    root: bool
    rest: str

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Return the names of the computations that it runs."""
        found = (match[1] or match[2] for match in _CALLED.finditer(self.rest))
        return tuple(name.strip().lstrip("%") for names in found for name in names.split(","))

    @cached_property
    def op_name(self) -> str:
        """Return its scopes and its JAX operation, such as `jit(f)/layer/dot_general`; empty if it has no name."""
        found = re.search(rf"op_name={_QUOTED.pattern}", self.rest)
        # For an instruction that XLA has merged from several, the names are joined by semicolons: take the first.
        return _unescaped(found[1]).partition(";jit(")[0] if found else ""

    def attribute(self, name: str) -> str:
        """Return an attribute such as `window={size=3x3}`, without its braces; empty if it is not present."""
        found = re.search(rf"\b{name}=(?:\{{([^}}]*)\}}|([\w.\->]+))", self._settings)
        return (found[1] if found[1] is not None else found[2]) if found else ""

    @cached_property
    def _settings(self) -> str:
        # Remove quoted strings: a user may have named a scope `window=...`.
        return _QUOTED.sub('""', self.rest)

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return an attribute that is a list of integers."""
        return tuple(int(x) for x in self.attribute(name).split(",") if x)


class HloProgram:
    """A parsed compiled program.

    Args:
      text: the result of `compiled.as_text()`.

    Attributes:
      computations: the instructions of each computation, by the name of the computation.
      entry: the name of the entry computation, which a call runs.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        self._lines: list[str] = []
        # XLA writes call stacks once, as numbered rows of four tables before the computations. Each instruction has the
        # number of its frame.
        self._tables: dict[str, dict[int, str]] = {}
        rows: dict[int, str] = {}
        current: list[Instruction] = []
        for line in text.splitlines():
            if match := _INSTRUCTION.match(line):
                current.append(_instruction(*match.groups()))
                self._lines.append(line)
            elif match := _COMPUTATION.match(line):
                current = self.computations[match[2]] = []
                self.entry = match[2] if match[1] else self.entry
                self._lines.append(f"%{match[2]}")
            elif line in {"FileNames", "FunctionNames", "FileLocations", "StackFrames"}:
                rows = self._tables[line] = {}
            elif match := re.match(r"(\d+) (.*)$", line):
                rows[int(match[1])] = match[2]

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """Return all instructions by name."""
        return {x.name: x for computation in self.computations.values() for x in computation}

    def anonymous(self) -> str:
        """Return the text with numbered names and without metadata: equal for programs with the same instructions."""
        numbers: dict[str, int] = {}  # by name, in order of appearance
        plain = _METADATA.sub("", "\n".join(self._lines))
        return re.sub(r"%[\w.\-]+", lambda x: f"%{numbers.setdefault(x[0], len(numbers))}", plain)

    def runs(self, computation: str = "") -> Iterator[tuple[Instruction, int]]:
        """Yield the instructions that a call runs with their counts; a fusion is one, unbounded loops count once."""
        for x in self.computations[computation or self.entry]:
            if x.opcode not in NAMES:
                yield x, 1
            # Skip the computations that a fusion or a reduction calls: they are part of its kernel.
            for name in x.called if x.opcode in CONTAINERS else ():
                number = self._iterations(x) if x.opcode == "while" else 1
                yield from ((inner, times * number) for inner, times in self.runs(name))

    def _iterations(self, loop: Instruction) -> int:
        """Return the number of iterations of a `while`; 1 if the program does not show it."""
        if found := _ITERATIONS.search(loop.rest):
            return int(found[1])
        # On a TPU it is not written. The loop of a `scan` ends when its counter, which begins at 0, reaches a constant.
        for root in (x for name in loop.called for x in self.computations[name] if x.root):
            bounds = [self.instructions[x].literal for x in root.operands if self.instructions[x].opcode == "constant"]
            if root.opcode == "compare" and root.attribute("direction") == "LT" and len(bounds) == 1:
                return max(int(bounds[0]), 1)
        return 1

    @cached_property
    def _users(self) -> dict[str, list[Instruction]]:
        users = defaultdict(list)
        for instruction in self.instructions.values():
            for name in instruction.operands:
                users[name].append(instruction)
        return users

    def waiting(self, name: str) -> Iterator[str]:
        """Yield the names of the instructions that depend directly on the instruction `name`."""
        for user in self._users.get(name, ()):
            if user.opcode in NAMES:  # it takes no time, but its users depend on `name` too
                yield from self.waiting(user.name)
            else:
                yield user.name

    @cached_property
    def _fusions(self) -> dict[str, Instruction]:
        fusions = [x for x in self.instructions.values() if x.opcode == "fusion"]
        return {inner.name: x for x in fusions for name in x.called for inner in self.computations.get(name, ())}

    def fusion_of(self, instruction: Instruction) -> Instruction | None:
        """Return the fusion that contains an instruction, or None."""
        return self._fusions.get(instruction.name)

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yield the instructions of a fusion, including those of nested fusions."""
        for name in instruction.called:
            for x in self.computations.get(name, ()):
                yield from self.inside(x) if x.opcode == "fusion" else (x,)

    def source(self, instruction: Instruction) -> str:
        """Return the line of user code that an instruction comes from, as `file:line`; empty if unknown."""
        return self._sources.get(int(instruction.attribute("stack_frame_id") or 0), "")

    @cached_property
    def _sources(self) -> dict[int, str]:
        """Return the line of user code for each frame of the call stacks."""
        frames, locations = (
            {i: dict(re.findall(r"(\w+)=(\d+)", row)) for i, row in self._tables.get(name, {}).items()}
            for name in ("StackFrames", "FileLocations")
        )

        def lines(frame: int) -> Iterator[str]:
            """Yield the lines of a call stack, innermost first."""
            while frame:
                place = locations[int(frames[frame]["file_location_id"])]
                file = self._tables["FileNames"][int(place["file_name_id"])]
                yield f"{_unescaped(file[1:-1])}:{place['line']}"
                # The first frame has no caller. Some versions of XLA number every caller one too high.
                frame = int(frames[frame]["parent_frame_id"]) - int(frames[1]["parent_frame_id"])

        return {frame: users_line(lines(frame)) for frame in frames}


def _instruction(root: str | None, name: str, text: str) -> Instruction:
    """Parse the right side of `name = f32[2,3]{1,0} add(f32[2,3]{1,0} %x, ...), metadata={...}`."""
    # The type of the result comes first: an array, or a tuple in parentheses.
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    kind, text = text[:end], text[end:].lstrip()
    opcode = _OPCODE.match(text)
    if not opcode:
        raise ValueError(f"cannot parse an instruction of a compiled program: {name} = {kind} {text[:80]}")
    end = _closing(text, opcode.end() - 1)
    # Operands may have comments such as `/*index=5*/`; those of a constant or parameter are values.
    inside = re.sub(r"/\*.*?\*/", "", text[opcode.end() : end])
    literal = inside if opcode[1] in {"constant", "parameter"} else ""
    operands = () if literal else tuple(re.findall(r"[\w.\-]+", inside))
    arrays = tuple(_array(*found) for found in _ARRAY.findall(kind))
    return Instruction(name, opcode[1], arrays, operands, literal, root is not None, text[end + 1 :])


def _unescaped(text: str) -> str:
    """Undo the escapes of a quoted string, which are those of Python bytes: UTF-8 in octal, and backslashes."""
    plain: bytes = ast.literal_eval(f'b"{text.encode("ascii", "backslashreplace").decode()}"')
    return plain.decode("utf-8", "replace")


def _array(dtype: str, lengths: str, order: str, layout: str) -> Array:
    # A dynamic axis is written with its bound, as `<=5`. Without a layout, the memory order is that of C.
    shape = tuple(int(x.lstrip("<=")) for x in lengths.split(",") if x)
    axes = tuple(map(int, order.split(","))) if order else tuple(reversed(range(len(shape))))
    return Array(dtype, shape, axes, "S(1)" in layout)


def _closing(text: str, start: int) -> int:
    """Return the position of the parenthesis that closes the one at `start`."""
    depth = 0
    for found in _PARENTHESES.finditer(text, start):
        depth += (found[0] == "(") - (found[0] == ")")
        if not depth:
            return found.start()
    raise ValueError(f"cannot parse an instruction of a compiled program: {text[:80]}")
