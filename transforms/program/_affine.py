"""Chains that multiply and shift each channel by what parameters alone decide, and products with static weights.

A chain is y = s·x + t with s and t constant along every axis but those of channels, made of any number of operations:
additions, subtractions, multiplications, divisions, negations, and rearrangements of the axes in between. `site_of`
finds the products that a chain can be folded into; s and t go from axis to axis until they are axes of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jaxpr import evaluate
from ._flat import Node, Pairs, Value, carried, correspondence

PRODUCTS = ("conv_general_dilated", "dot_general")
_ARITHMETIC = frozenset({"add", "add_any", "sub", "mul", "div", "neg"})
Read = Callable[[Value], np.ndarray]


class Step(NamedTuple):
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


def step_of(node: Node, value: Value | None = None) -> Step | None:
    """An operation as a step of a chain through `value`, or through its only operand that is not static."""
    moving = [i for i, x in enumerate(node.inputs) if not x.static]
    if len(moving) != 1 or len(node.outputs) != 1 or (value is not None and node.inputs[moving[0]] is not value):
        return None
    before, after = node.inputs[moving[0]].aval, node.outputs[0].aval
    if not _number(before.dtype) or _number(before.dtype) != _number(after.dtype):
        return None
    if node.name not in _ARITHMETIC:
        pairs = correspondence(node.eqn)
        return None if pairs is None else Step(node, 0, None, pairs)
    if before.shape != after.shape or (node.name == "div" and moving == [1]):
        return None
    return Step(node, moving[0], node.inputs[1 - moving[0]] if len(node.inputs) > 1 else None, None)


def _number(dtype: Any) -> str:
    """What kind of number it is; none for integers, and for floats of 8 bits, with which rounding is what is meant."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return "complex"
    return "real" if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1 else ""


class Chain(NamedTuple):
    """A chain: what goes in, and its operations."""

    base: Value
    steps: tuple[Step, ...]

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


def _applied(step: Step, factor: Any, shift: Any, operand: Any) -> tuple[Any, Any]:
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


# ---- Products


@dataclass(frozen=True)
class Site:
    """A convolution or dense product of data with static weights.

    Attributes:
      node: the operation.
      kernel: which operand the weights are.
      outputs: for each axis of the result along which the weights differ, the axis of the weights.
      inputs: for each axis of the data along which the weights differ, the axis of the weights.
    """

    node: Node
    kernel: int
    outputs: Mapping[int, int]
    inputs: Mapping[int, int]

    @property
    def weights(self) -> Value:
        """The weights."""
        return self.node.inputs[self.kernel]

    @property
    def data(self) -> Value:
        """The data."""
        return self.node.inputs[1 - self.kernel]

    @property
    def out(self) -> Value:
        """The result."""
        return self.node.outputs[0]

    @property
    def dilutes(self) -> bool:
        """Whether zeros are put around or between the data."""
        params = self.node.eqn.params
        return self._convolves and (
            any(side > 0 for pair in params["padding"] for side in pair) or any(n > 1 for n in params["lhs_dilation"])
        )

    @property
    def mixes_batch(self) -> bool:
        """Whether parts of the batch meet different weights."""
        return self._convolves and self.node.eqn.params["batch_group_count"] > 1

    @property
    def _convolves(self) -> bool:
        return self.node.name == "conv_general_dilated"

    def factor_before(self, x: np.ndarray) -> np.ndarray:
        """A factor of the data as a factor of the weights."""
        if not self._convolves:
            return _along(x, self.inputs, len(self.weights.aval.shape))
        # The weights know the channels of one group only, but they have the features of all.
        ((channels, inputs),) = self.inputs.items()
        ((_, features),) = self.outputs.items()
        groups = self.node.eqn.params["feature_group_count"]
        x = np.broadcast_to(x.reshape(-1), self.data.aval.shape[channels]).reshape(groups, -1)
        x = np.repeat(x, self.weights.aval.shape[features] // groups, axis=0)
        return _along(x, {0: features, 1: inputs}, len(self.weights.aval.shape))

    def factor_after(self, x: np.ndarray) -> np.ndarray:
        """A factor of the result as a factor of the weights."""
        return _along(x, self.outputs, len(self.weights.aval.shape))

    def of_shift(self, x: np.ndarray, weights: Any) -> np.ndarray:
        """What a shift of the data, where there are no zeros around it, adds to the result."""
        shape = [size if i in self.inputs else 1 for i, size in enumerate(self.data.aval.shape)]
        params = dict(self.node.eqn.params)
        if self._convolves:
            # One window of the shift gives one place of the result.
            _, _, *places = params["dimension_numbers"].lhs_spec
            _, _, *window = params["dimension_numbers"].rhs_spec
            for i, axis, dilation in zip(places, window, params["rhs_dilation"], strict=True):
                shape[i] = (weights.shape[axis] - 1) * dilation + 1
            ones = (1,) * len(places)
            params |= {"padding": ((0, 0),) * len(places), "window_strides": ones, "lhs_dilation": ones}
        params |= {"precision": (lax.Precision.HIGHEST,) * 2, "preferred_element_type": None}
        dtype = jnp.result_type(weights, jnp.float32)
        with jax.ensure_compile_time_eval():
            operands = [jnp.asarray(np.broadcast_to(x, shape).astype(dtype)), jnp.asarray(weights, dtype)]
            (found,) = evaluate(self.node.eqn.replace(params=params), *operands[:: 1 if self.kernel else -1])
        return np.asarray(found, np.float64)


def site_of(node: Node) -> Site | None:
    """An operation as a product of data with static weights; None if it is not one."""
    params = node.eqn.params
    if node.name not in PRODUCTS:
        return None
    avals = [x.aval for x in (*node.inputs, *node.outputs)]
    if any(_number(x.dtype) != "real" or 0 in x.shape for x in avals):
        return None
    static = [i for i, x in enumerate(node.inputs) if x.static]
    if node.name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        features, inputs, *_ = numbers.rhs_spec
        _, channels, *_ = numbers.lhs_spec
        return Site(node, 1, {numbers.out_spec[1]: features}, {channels: inputs}) if static == [1] else None
    if len(static) != 1:
        return None
    kernel = static[0]
    summed, batch = params["dimension_numbers"]
    free = [i for i in range(len(avals[kernel].shape)) if i not in (*summed[kernel], *batch[kernel])]
    # The axes of the result: those that are mapped over, then what is left of the first operand, then of the second.
    first = len(batch[0]) if kernel == 0 else len(avals[2].shape) - len(free)
    outputs = {i: int(axis) for i, axis in enumerate(batch[kernel])} | {first + i: axis for i, axis in enumerate(free)}
    inputs = {
        int(axis): int(other)
        for pair in (summed, batch)
        for axis, other in zip(pair[1 - kernel], pair[kernel], strict=True)
    }
    return Site(node, kernel, outputs, inputs)


def _along(x: np.ndarray, axes: Mapping[int, int], ndim: int) -> np.ndarray:
    """`x` with each of the given axes where it says; it is of size 1 along all others."""
    order = sorted(axes, key=lambda i: axes[i])
    shape = [1] * ndim
    for i in order:
        shape[axes[i]] = x.shape[i]
    return x.transpose([*order, *(i for i in range(x.ndim) if i not in axes)]).reshape(shape)
