"""Floating point operations and memory traffic of an instruction of a compiled program, from its shapes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from itertools import product

from .hlo import CONTAINERS, NAMES, Array, HloProgram, Instruction

_TRANSCENDENTAL = frozenset(
    """
    atan2 cbrt cosine erf exponential exponential-minus-one log log-plus-one logistic power rsqrt sine sqrt tan tanh
    """.split()  # noqa: SIM905 (words read better)
)
_ELEMENTWISE = _TRANSCENDENTAL | frozenset(
    """
    abs add and ceil clamp compare divide floor is-finite maximum minimum multiply negate not or remainder
    round-nearest-afz round-nearest-even select shift-left shift-right-arithmetic shift-right-logical sign subtract xor
    """.split()  # noqa: SIM905 (words read better)
)
# The time of a transcendental function in additions, if its data is in a register or cache.
_ADDITIONS_PER_TRANSCENDENTAL = 10


def flops(program: HloProgram, instruction: Instruction) -> int:
    """Return the floating point operations of one run: two for each multiplication of a product, else one per element.

    Integer operations and comparisons count too, and each function such as `tanh` counts as one, as in XLA's own cost
    analysis. In contrast to XLA's, sorts, Fourier transforms and decompositions count as zero. A loop counts as zero:
    the instructions of its body are counted separately.
    """
    opcode, size = instruction.opcode, sum(x.size for x in instruction.results)
    if opcode == "dot":
        # Each element of the result is a sum of one product for each index of the contracted axes.
        left = _operand(program, instruction, 0)
        return 2 * size * math.prod(left.shape[i] for i in instruction.numbers("lhs_contracting_dims"))
    if opcode == "convolution":
        return _of_convolution(program, instruction)
    if opcode in _ELEMENTWISE:
        return size
    if opcode == "reduce":
        # Reducing n numbers to m takes n - m operations; a reduction of several arrays has one operand for each.
        return sum(_operand(program, instruction, i).size for i in range(len(instruction.results))) - size
    if opcode == "reduce-window":
        return size * (math.prod(_window(instruction, "size")) - 1)
    if opcode == "select-and-scatter":  # the gradient of max pooling: each window is searched for its maximum
        return _operand(program, instruction, 1).size * math.prod(_window(instruction, "size"))
    if opcode == "scatter":  # the last operand holds the updates
        return _operand(program, instruction, -1).size
    if opcode == "fusion":
        return sum(flops(program, x) for x in program.inside(instruction))
    return _of_library(program, instruction) if opcode == "custom-call" else 0


def weight(program: HloProgram, instruction: Instruction) -> float:
    """Estimate how long an operation takes relative to others of one fusion, in units of an addition."""
    cost = _ADDITIONS_PER_TRANSCENDENTAL if instruction.opcode in _TRANSCENDENTAL else 1
    return flops(program, instruction) * cost


def memory(program: HloProgram, instruction: Instruction) -> int:
    """Return the bytes that one run of an instruction reads and writes, counting each of its arrays once.

    For an array that is only sliced, the slices count; for one that is updated in place, the update counts.
    """
    opcode = instruction.opcode
    if opcode in NAMES or opcode in CONTAINERS or opcode.endswith("-done"):  # counted for `-start`
        return 0
    results = sum(x.traffic for x in instruction.results)
    if opcode in {"dynamic-slice", "gather", "slice"}:
        return 2 * results
    if opcode == "dynamic-update-slice":
        return 2 * _operand(program, instruction, 1).traffic
    if opcode != "fusion":
        return results + sum(x.traffic for name in instruction.operands for x in program.instructions[name].results)
    # A fusion reads its parameters and writes its root; intermediate values stay in registers.
    inside = {x.name: x for x in program.inside(instruction)}
    users = defaultdict(list)
    for x in inside.values():
        for name in x.operands:
            users[name].append(x)

    def read(array: Instruction) -> int:
        """Return the bytes read from a parameter, or from a view of it."""
        size, found = sum(x.traffic for x in array.results), 0
        for user in users[array.name]:
            if user.opcode in {"bitcast", "reshape"}:
                found += read(user)
            elif user.opcode in {"dynamic-slice", "gather", "slice"} and user.operands[0] == array.name:
                found += sum(x.traffic for x in user.results)
            elif user.opcode != "dynamic-update-slice" or user.operands[0] != array.name:
                return size
            # Otherwise the array is updated in place, and none of it is read.
        return min(found, size)

    def written(root: Instruction) -> int:
        """Return the bytes written for the root, or for all parts of a tuple."""
        if root.opcode == "tuple" or (root.opcode == "bitcast" and root.operands[0] in inside):
            return sum(written(inside[name]) for name in root.operands if name in inside)
        if root.opcode == "dynamic-update-slice":
            return _operand(program, root, 1).traffic
        return sum(x.traffic for x in root.results)

    return sum(read(x) for x in inside.values() if x.opcode == "parameter") + sum(
        written(x) for x in inside.values() if x.root
    )


def _operand(program: HloProgram, instruction: Instruction, i: int) -> Array:
    return program.instructions[instruction.operands[i]].results[0]


def _of_convolution(program: HloProgram, instruction: Instruction) -> int:
    """Return two flops for each product of an input element and a kernel element; padding does not count."""
    left, kernel = (_operand(program, instruction, i) for i in range(2))
    out = instruction.results[0]  # a second result of cuDNN is its workspace
    # A gradient by cuDNN has the window and the labels of the convolution that it is a gradient of.
    if 'custom_call_target="__cudnn$convBackwardInput"' in instruction.rest:
        left, out = out, left
    elif 'custom_call_target="__cudnn$convBackwardFilter"' in instruction.rest:
        kernel, out = out, kernel
    names, kernel_names, out_names = instruction.attribute("dim_labels").replace("->", "_").split("_")
    total = 2 * out.shape[out_names.index("b")] * out.shape[out_names.index("f")]
    total *= kernel.shape[kernel_names.index("i")]
    ndim = sum(x.isdigit() for x in names)
    strides, spread, dilation = (_window(instruction, name, ndim) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    padding = _window(instruction, "pad", ndim, "0")
    for i in range(ndim):
        size, window, results = (
            shape[labels.index(str(i))]
            for shape, labels in ((left.shape, names), (kernel.shape, kernel_names), (out.shape, out_names))
        )
        # Result p multiplies kernel element k by position p·stride + k·dilation - padding of the dilated input. That is
        # an element, and not padding or a hole, if it is inside and a multiple of the input dilation. The axes are
        # independent, so the counts multiply.
        total *= sum(
            0 <= (at := place * strides[i] + position * dilation[i] - padding[i]) <= (size - 1) * spread[i]
            and at % spread[i] == 0
            for place, position in product(range(results), range(window))
        )
    return total


def _window(instruction: Instruction, name: str, ndim: int = 0, default: str = "1") -> list[int]:
    """Return a window setting for each axis, such as `3x3` for the size or `1_0x1_0` for the padding."""
    settings = dict(x.split("=") for x in instruction.attribute("window").split())
    # HLO omits a setting that has its default value along all axes.
    return [int(x.split("_")[0]) for x in settings[name].split("x")] if name in settings else [int(default)] * ndim


def _of_library(program: HloProgram, instruction: Instruction) -> int:
    """Return the flops of a library call: `__cublas$gemm`, `__cudnn$convForward`, `__onednn$matmul`."""
    if instruction.attribute("dim_labels"):
        return _of_convolution(program, instruction)
    # For cuBLAS, only the backend config has the contracted axes, as JSON.
    contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.rest)
    if not contracted:
        return 0
    left = _operand(program, instruction, 0)
    axes = [int(x.strip('"')) for x in contracted[1].split(",") if x]
    return 2 * instruction.results[0].size * math.prod(left.shape[i] for i in axes)
