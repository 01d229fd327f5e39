"""Chains of operations that scale and shift each channel by values that depend on parameters alone.

A chain is y = s·x + t with s and t constant along every axis except the channel axes. It consists of any number of
additions, subtractions, multiplications, divisions and negations, and of rearrangements of axes between them. s and t
are carried through the rearrangements to the axes of the weights that the chain is folded into: see
`weighted_ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._ir.axis_correspondence import Pairs, carried, correspondence
from .._ir.flat_program import Node, Value

_ARITHMETIC = frozenset({"add", "add_any", "sub", "mul", "div", "neg"})
Affine = tuple[np.ndarray, np.ndarray]
Read = Callable[[Value], np.ndarray]


class ChannelStep(NamedTuple):
    """An operation of a chain.

    Attributes:
      node: the operation.
      operand: the index of the operand that belongs to the chain.
      static: the other operand; None if there is none.
      pairs: the rearrangement of the axes, see `correspondence`; None for arithmetic.
    """

    node: Node
    operand: int
    static: Value | None
    pairs: Pairs | None

    @property
    def before(self) -> Value:
        """Return the input of the step."""
        return self.node.inputs[self.operand]

    @property
    def after(self) -> Value:
        """Return the output of the step."""
        return self.node.outputs[0]

    @property
    def shifts(self) -> bool:
        """Return whether the step adds or subtracts."""
        return self.node.name in ("add", "add_any", "sub")

    @property
    def scale(self) -> Value | None:
        """Return the parameters or constant array that the step multiplies or divides by; otherwise None."""
        return self.static if self.node.name in ("mul", "div") and self.static and self.static.learned else None


def step_of(node: Node, value: Value | None = None) -> ChannelStep | None:
    """Return an operation as a step of a chain, or None if it is not one.

    The chain goes through its only operand that is not static, which must be `value` if that is given.
    """
    moving = [i for i, x in enumerate(node.inputs) if not x.static]
    # Two operands that are not static combine data with data, as in a gate.
    if len(moving) != 1 or len(node.outputs) != 1 or (value is not None and node.inputs[moving[0]] is not value):
        return None
    before, after = node.inputs[moving[0]].aval, node.outputs[0].aval
    if not number_kind(before.dtype) or number_kind(before.dtype) != number_kind(after.dtype):
        return None
    if node.name not in _ARITHMETIC:
        # Casts of dtype count as rearrangements that keep the axes.
        pairs = correspondence(node.eqn)
        return None if pairs is None else ChannelStep(node, 0, None, pairs)
    # Broadcasting the data is not a rearrangement, and s / x is not affine in x.
    if before.shape != after.shape or (node.name == "div" and moving == [1]):
        return None
    return ChannelStep(node, moving[0], node.inputs[1 - moving[0]] if len(node.inputs) > 1 else None, None)


def number_kind(dtype: Any) -> str:
    """Return "complex" or "real"; empty for integers, and for 8-bit floats, whose rounding is intended."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return "complex"
    return "real" if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1 else ""


class Chain(NamedTuple):
    """A chain: its input and its operations."""

    base: Value
    steps: tuple[ChannelStep, ...]

    @property
    def learned(self) -> bool:
        """Return whether it scales by parameters or a constant array, and not only by numbers in the code."""
        return any(step.scale for step in self.steps)

    @property
    def shifts(self) -> bool:
        """Return whether any step adds or subtracts."""
        return any(step.shifts for step in self.steps)

    def trimmed(self) -> Chain:
        """Return the chain without trailing rearrangements, which need not be replaced."""
        last = max((i for i, step in enumerate(self.steps) if step.pairs is None), default=-1)
        return Chain(self.base, self.steps[: last + 1])

    def affine(self, read: Read) -> Affine:
        """Return the factor and the shift in the axes of the output, with size 1 along axes where they are constant.

        Args:
          read: returns the array of a static value, in float64, with the sizes `Value.sizes`.
        """
        factor: Any = np.ones((1,) * len(self.base.aval.shape))
        shift: Any = np.zeros_like(factor)
        for step in self.steps:
            before, after = step.before.aval.shape, step.after.aval.shape
            if step.pairs is None:
                operand = np.zeros(()) if step.static is None else read(step.static)
                factor, shift = _applied(step, factor, shift, operand.reshape(operand.shape or (1,) * len(after)))
            else:
                # This is exact: a rearrangement drops only axes of size 1, along which no array varies.
                factor, shift = (carried(x, step.pairs, before, after) for x in (factor, shift))
        return factor, shift

    def affine_at_base(self, read: Read) -> Affine | None:
        """Return the same in the axes of `base`; None if they vary along an axis that a step has added."""
        found: tuple[Any, Any] = self.affine(read)
        for step in reversed(self.steps):
            if step.pairs is not None:
                pairs = [(target, source) for source, target in step.pairs]
                factor, shift = (carried(x, pairs, step.after.aval.shape, step.before.aval.shape) for x in found)
                if factor is None or shift is None:
                    return None
                found = factor, shift
        return found


def _applied(step: ChannelStep, factor: Any, shift: Any, operand: Any) -> tuple[Any, Any]:
    """Apply one more step to y = factor·x + shift; return the new factor and shift."""
    match step.node.name, step.operand:
        case "mul", _:
            return factor * operand, shift * operand
        case "div", _:
            return factor / operand, shift / operand
        case "neg", _:
            return -factor, -shift
        case "sub", 0:
            return factor, shift - operand
        case "sub", 1:
            return -factor, operand - shift
    return factor, shift + operand  # add, add_any


def axes_of(found: Affine) -> set[int]:
    """Return the axes along which a factor or a shift varies."""
    return {i for x in found for i, size in enumerate(x.shape) if size > 1}


def sizes_only(value: Value) -> np.ndarray:
    """Return ones with the sizes of a static value: a `read` that determines only the axes of factor and shift."""
    return np.ones(value.sizes)
