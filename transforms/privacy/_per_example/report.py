"""The report that `clipped_grad(...).explain` returns: the method, and the form of the gradient at each use."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..._core.source_lines import is_ours
from .example_program import ExampleProgram
from .parameter_uses import ParameterUse


class Use(NamedTuple):
    """One place where a parameter meets data.

    Attributes:
      parameter: which one: its number, or its path.
      rule: the form of its gradients: "outer product", "row-sparse", "dense" or "scaled constant".
      operation: the primitive.
      where: the line of the source.
      why: a sentence.
    """

    parameter: Any
    rule: str
    operation: str
    where: str
    why: str


class Report(NamedTuple):
    """The answer of `clipped_grad(...).explain`.

    Attributes:
      method: "vmap", "ghost" or "book_keeping".
      examples: how many are computed at a time.
      why: why this method.
      uses: each place where a parameter meets data, how its gradients are taken there, and why.
    """

    method: str
    examples: int
    why: str
    uses: list[Use]

    def __str__(self) -> str:
        lines = [f"{use.parameter}: {use.rule}, at {use.operation} ({use.where}): {use.why}" for use in self.uses]
        return "\n".join([f"method: {self.method}, {self.examples} examples at a time: {self.why}", *lines])


def reported(use: ParameterUse, rule: str, why: str) -> list[Use]:
    """Return what to report of a use, once for each parameter that its operand is computed from."""
    return [Use(leaf, rule, use.eqn.primitive.name, _where(use), why) for leaf in use.value.leaves]


def held_uses(program: ExampleProgram, why: str) -> list[Use]:
    """Return the report of all uses where each example's gradient is held."""
    return sorted(line for use in program.uses for line in reported(use, "dense", why))


def _where(use: ParameterUse) -> str:
    """Return the innermost line of the user's own source that a use comes from."""
    for eqn in (use.eqn, *reversed(use.within)):  # what a library has jitted may have been traced for another caller
        for frame in getattr(eqn.source_info.traceback, "frames", []):
            if not is_ours(frame.file_name) and "site-packages" not in frame.file_name:
                return f"{frame.file_name}:{frame.line_num} in {frame.function_name}"
    return "unknown"
