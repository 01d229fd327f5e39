"""The report that `clipped_grad(...).explain` returns: the method, and the form of the gradient at each use."""

from __future__ import annotations

from typing import NamedTuple

from ..._core.source_lines import is_installed, is_ours
from .._check_loss import LossCheck, line_of
from .clip_norms import ClipGroups
from .gradient_forms import GradientForm, OuterProduct, RowSparse
from .in_backward import InBackward
from .loss import ExampleProgram
from .parameter_uses import ParameterUse
from .rules import has_rule


class Use(NamedTuple):
    """A parameter use: one operation in which a parameter meets data.

    Attributes:
      parameter: the path of the parameter.
      rule: the form of its gradients: "outer product", "row-sparse" or "dense".
      operation: the name of the JAX primitive.
      where: the line of the source.
      why: the reason for the rule.
    """

    parameter: str
    rule: str
    operation: str
    where: str
    why: str


class Report(NamedTuple):
    """The report of `clipped_grad(...).explain`; `print` it for a readable text.

    Attributes:
      method: "vmap", "ghost" or "book_keeping".
      examples: the number of samples that are computed at a time.
      why: the reason for this method.
      uses: the parameter uses, each with the form of its gradients and the reason for it.
      loss: what `check_loss` found; None if it was not called.
    """

    method: str
    examples: int
    why: str
    uses: list[Use]
    loss: LossCheck | None = None

    def __str__(self) -> str:
        lines = [f"{use.parameter}: {use.rule}, at {use.operation} ({use.where}): {use.why}" for use in self.uses]
        return "\n".join(
            [f"method: {self.method}, {self.examples} examples at a time: {self.why}", *lines, *line_of(self.loss)]
        )


def report_uses(
    program: ExampleProgram,
    names: list[str],
    forms: dict[int, GradientForm | None] | None,
    inside: InBackward | None = None,
    clip_groups: ClipGroups | None = None,
) -> list[Use]:
    """Report each parameter use.

    Args:
      program: the loss.
      names: the paths of the parameters.
      forms: the form that the gradient at each use is summed from, from `ExampleGradients.forms_summed`; None if all
        gradients are materialized.
      inside: the uses whose norms are computed inside the backward pass, if there are any.
      clip_groups: as for `ExampleGradients`.
    """
    found = []
    for n, use in enumerate(program.uses):
        rule, form = "dense", None if forms is None else forms[n]
        if forms is None:
            why = "each example's gradient is materialized"
        elif form is None:
            how = "computed from the parameters" if use.value.layout is None else "used in other ways too"
            if clip_groups is not None and clip_groups.common(use.value.leaves) is None:
                how = "made of parameters with clip norms of their own"
            why = f"the operand is {how}, so each example's gradient is materialized"
        elif isinstance(form, OuterProduct):
            rule, why = (
                "outer product",
                f"inner products between positions: {form.left.shape[2]} per example",
            )
        elif isinstance(form, RowSparse):
            rule, why = "row-sparse", f"rows of a table are taken, {form.rows.shape[2]} for each example"
        else:
            why = f"the gradient at each example has {form.gradients[0].size} numbers"
            why += "" if has_rule(use) else f", by the derivative of {use.eqn.primitive.name}"
        why += ", inside the backward pass" if inside is not None and n in inside.uses else ""
        found += [Use(names[i], rule, use.eqn.primitive.name, _where(use), why) for i in use.value.leaves]
    return sorted(found)


def _where(use: ParameterUse) -> str:
    """Return the innermost line of user code that a use comes from."""
    for eqn in (use.eqn, *reversed(use.within)):  # a library's jitted function may have been traced for another caller
        for frame in getattr(eqn.source_info.traceback, "frames", []):
            if not is_ours(frame.file_name) and not is_installed(frame.file_name):
                return f"{frame.file_name}:{frame.line_num} in {frame.function_name}"
    return "unknown"
