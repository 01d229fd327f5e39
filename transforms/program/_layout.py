"""`count_layout_ops`: count the transposes and copies of a compiled program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from ._ir.hlo import HloProgram, Instruction
from ._ir.traced_program import TracedProgram


def count_layout_ops(fun: Callable[..., Any], *args: Any) -> dict[str, int]:
    """Count the transposes and copies of the compiled `fun(*args)`.

    XLA chooses the memory layout of arrays inside a program, so a convolution need not run in the order of axes that
    the code uses (`NHWC` or `NCHW`). The cost of that choice is in the remaining transposes and copies.

    Args:
      fun: as for `profile`.
      *args: as for `profile`.

    Returns:
      A dict. `transpose`: the number of operations in a call that reorder elements in memory; `copy`: the number that
      copy them in the same order; `bytes`: the bytes that both read and write in total. Operations inside fusions
      count too, and those of a scan count once for each iteration. The body of a loop whose number of iterations
      depends on data, and each branch of a condition, count once.

    Raises:
      TypeError: `fun` is not callable, or the arguments have no values, as inside `jax.jit`.

    Cost:
      Compiling `fun`.

    Source:
      PyTorch's tutorial "Channels Last Memory Format".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms.program import count_layout_ops
      >>> count_layout_ops(lambda x: x.T + 1.0, jnp.ones((3, 5)))["transpose"]
      1
    """
    program = TracedProgram("count_layout_ops", fun, args).compiled.program
    counts: Counter[str] = Counter()
    for instruction, times in program.runs():
        for x in program.inside(instruction) if instruction.opcode == "fusion" else (instruction,):
            kind = _kind(program, x)
            if kind:
                counts[kind] += times
                counts["bytes"] += 2 * times * sum(array.bytes for array in x.results)
    return {name: counts[name] for name in ("transpose", "copy", "bytes")}


def _kind(program: HloProgram, instruction: Instruction) -> str:
    """Return `transpose` or `copy`, by the effect of an instruction in memory; empty if it moves nothing."""
    # The opcode is not sufficient: a `transpose` moves nothing if the layout of its result is permuted as well, and a
    # `copy` from one layout to another is a transpose.
    if instruction.opcode not in {"transpose", "copy"}:
        return ""
    before = program.instructions[instruction.operands[0]].results[0].order
    axes = instruction.numbers("dimensions") or range(len(before))
    same = tuple(axes[i] for i in instruction.results[0].order) == before
    if instruction.opcode == "copy":
        return "copy" if same else "transpose"
    return "" if same else "transpose"
