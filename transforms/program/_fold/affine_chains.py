"""Chains that multiply and shift each channel by what parameters alone decide.

A chain is y = s·x + t with s and t constant along every axis but those of channels, made of any number of operations:
additions, subtractions, multiplications, divisions, negations, and rearrangements of the axes in between. s and t go
from axis to axis until they are axes of the weights that the chain is folded into: see `weighted_ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._ir.axis_correspondence import Pairs, carried, correspondence
from .._ir.flat_program import Node, Value

_ARITHMETIC = frozenset({"add", "add_any", "sub", "mul", "div", "neg"})
Read = Callable[[Value], np.ndarray]


class ChannelStep(NamedTuple):
    """An operation of a chain.

    Attributes:
      node: the operation.
      operand: which of its operands the chain goes through.
      static: the other operand; None where there is none.
      pairs: how the axes are rearranged; None for arithmetic.
    """

    node: Node
    operand: int
    static: Value | None
    pairs: Pairs | None

    @property
    def before(self) -> Value:
        """What goes in."""
        return self.node.inputs[self.operand]

    @property
    def after(self) -> Value:
        """What comes out."""
        return self.node.outputs[0]

    @property
    def shifts(self) -> bool:
        """Whether it adds or subtracts."""
        return self.node.name in ("add", "add_any", "sub")

    @property
    def learned(self) -> bool:
        """Whether it multiplies or divides by parameters or a constant array."""
        return self.node.name in ("mul", "div") and self.static is not None and self.static.learned

    @property
    def differs(self) -> int:
        """Along how many axes what it multiplies by or adds differs."""
        return 0 if self.static is None else sum(size > 1 for size in self.static.sizes)


def step_of(node: Node, value: Value | None = None) -> ChannelStep | None:
    """An operation as a step of a chain through `value`, or through its only operand that is not static."""
    moving = [i for i, x in enumerate(node.inputs) if not x.static]
    if len(moving) != 1 or len(node.outputs) != 1 or (value is not None and node.inputs[moving[0]] is not value):
        return None
    before, after = node.inputs[moving[0]].aval, node.outputs[0].aval
    if not number_kind(before.dtype) or number_kind(before.dtype) != number_kind(after.dtype):
        return None
    if node.name not in _ARITHMETIC:
        pairs = correspondence(node.eqn)
        return None if pairs is None else ChannelStep(node, 0, None, pairs)
    if before.shape != after.shape or (node.name == "div" and moving == [1]):
        return None
    return ChannelStep(node, moving[0], node.inputs[1 - moving[0]] if len(node.inputs) > 1 else None, None)


def number_kind(dtype: Any) -> str:
    """What kind of number it is; none for integers, and for floats of 8 bits, with which rounding is what is meant."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return "complex"
    return "real" if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1 else ""


class Chain(NamedTuple):
    """A chain: what goes in, and its operations."""

    base: Value
    steps: tuple[ChannelStep, ...]

    @property
    def learned(self) -> bool:
        """Whether it multiplies by more than numbers in the code."""
        return any(step.learned for step in self.steps)

    @property
    def shifts(self) -> bool:
        """Whether it adds anything."""
        return any(step.shifts for step in self.steps)

    def trimmed(self) -> Chain:
        """Without the rearrangements at its end."""
        last = max((i for i, step in enumerate(self.steps) if step.pairs is None), default=-1)
        return Chain(self.base, self.steps[: last + 1])

    def affine(self, read: Read) -> tuple[np.ndarray, np.ndarray] | None:
        """The factor and the shift, in the axes of `base`, of size 1 where they are constant; None if there are none.

        Args:
          read: from a static value to the array, in float64, of the sizes `Value.sizes`.
        """
        factor = np.ones((1,) * len(self.base.aval.shape))
        shift = np.zeros_like(factor)
        for number, step in enumerate(self.steps):
            if step.pairs is not None:
                continue
            operand: Any = None
            if step.static is not None:
                operand = read(step.static)
                operand = operand.reshape(operand.shape or (1,) * len(step.after.aval.shape))
                for other in reversed(self.steps[:number]):
                    if other.pairs is not None:
                        pairs = [(target, source) for source, target in other.pairs]
                        operand = carried(operand, pairs, other.after.aval.shape, other.before.aval.shape)
                        if operand is None:
                            return None
            factor, shift = _applied(step, factor, shift, operand)
        return factor, shift

    def affine_at_end(self, read: Read) -> tuple[np.ndarray, np.ndarray] | None:
        """The factor and the shift in the axes of what comes out."""
        found = self.affine(read)
        for step in self.steps if found else ():
            if step.pairs is not None and found is not None:
                factor, shift = (carried(x, step.pairs, step.before.aval.shape, step.after.aval.shape) for x in found)
                found = None if factor is None or shift is None else (factor, shift)
        return found


def _applied(step: ChannelStep, factor: Any, shift: Any, operand: Any) -> tuple[Any, Any]:
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
    return factor, shift + operand


def axes_of(found: tuple[np.ndarray, np.ndarray]) -> set[int]:
    """The axes along which a factor or a shift differs."""
    return {i for x in found for i, size in enumerate(x.shape) if size > 1}


def sizes_only(value: Value) -> np.ndarray:
    """Ones of the sizes of a static value: to see which axes a chain's factor and shift differ along."""
    return np.ones(value.sizes)
