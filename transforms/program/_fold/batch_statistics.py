"""Batch norm in training mode, which divides each channel by a statistic of the batch: found, to be refused.

Two things are followed through the program: which axes of a value are channels (`_Axes`), and which values are made
of sums of another, over which axes, and with a root (`_Statistic`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..._core.jaxpr import ELEMENTWISE
from .._ir.axis_correspondence import correspondence
from .._ir.flat_program import ROOTS, Node, Value
from .weighted_ops import weighted_op

_SUMS = frozenset({"reduce_sum", "psum"})


class _Axes(NamedTuple):
    """The known axes of a value: those of its channels, and that of its batch, None if it has none."""

    channels: frozenset[int]
    batch: int | None


class _Statistic(NamedTuple):
    """A value that is computed from sums of another.

    Attributes:
      source: the value that is summed.
      left: the axes of the source that it is not summed over.
      root: whether a root has been taken.
    """

    source: Value
    left: tuple[int, ...]
    root: bool


def batch_statistics(nodes: Sequence[Node]) -> Node | None:
    """Return the first operation that multiplies or divides by the root of sums over all axes but those of channels.

    The channels are those of the product before, where there is one; else any axis but the first, which is the batch.
    So norms over the channels (LayerNorm), groups of them (GroupNorm) or the positions of an example (InstanceNorm) do
    not count, and neither do gates, which take no root.
    """
    axes: dict[Value, _Axes] = {}
    statistics: dict[Value, _Statistic] = {}
    for node in nodes:
        moving = [x for x in node.inputs if not x.static]
        if not moving or not node.outputs:
            continue
        found = [statistics.get(x) for x in moving]
        if node.name in ("mul", "div") and len(moving) == 2 and found.count(None) == 1:
            # x / root is a norm; root / x is not.
            statistic = found[1] or (found[0] if node.name == "mul" else None)
            if statistic is not None and statistic.root and _of_channels(statistic, axes):
                return node
        out = node.outputs[0]
        statistic = _statistic(node, moving, found)
        if statistic is not None:
            statistics[out] = statistic
        known = _axes(node, next((x for x in moving if x in axes), moving[0]), axes)
        if known is not None:
            axes[out] = known
    return None


def _of_channels(statistic: _Statistic, axes: dict[Value, _Axes]) -> bool:
    """Return whether the axes that are left are channels, so that the batch is summed over."""
    known, left = axes.get(statistic.source), statistic.left
    if not 0 < len(left) < len(statistic.source.aval.shape):
        return False
    return known.channels.issuperset(left) if known is not None else len(left) == 1 and left != (0,)


def _statistic(node: Node, moving: Sequence[Value], found: Sequence[_Statistic | None]) -> _Statistic | None:
    """Return the statistic that an operation makes of those of its operands, or by its own sum; None if neither."""
    if node.name in _SUMS:
        if len(moving) > 1 or not all(isinstance(axis, int) for axis in _summed(node)):
            return None
        (value,) = moving
        before = found[0]
        # A sum of a sum goes on from the first one, unless axes were added or dropped in between.
        if before is None or len(before.left) != len(value.aval.shape):
            before = _Statistic(value, tuple(range(len(value.aval.shape))), False)
        left = tuple(axis for i, axis in enumerate(before.left) if i not in _summed(node))
        return before._replace(left=left)
    if node.name not in ELEMENTWISE and correspondence(node.eqn) is None:
        return None
    first = found[0]
    if first is None or any(x is None or x.left != first.left for x in found):
        return None
    return first._replace(root=node.name in ROOTS or any(x is not None and x.root for x in found))


def _summed(node: Node) -> tuple[Any, ...]:
    """Return the axes of a sum; those of `psum` may be names of a mapped axis."""
    return tuple(int(axis) if hasattr(axis, "__index__") else axis for axis in node.eqn.params["axes"])


def _axes(node: Node, value: Value, axes: dict[Value, _Axes]) -> _Axes | None:
    """Return the channels and batch of an operation's result, made of `value`; None if they are not known."""
    op = weighted_op(node)
    if op is not None:
        batch = node.eqn.params["dimension_numbers"].out_spec[0] if node.name == "conv_general_dilated" else None
        return _Axes(frozenset(op.outputs), batch)
    known = axes.get(value)
    if known is None or node.name == "dot_general":
        return None
    pairs = correspondence(node.eqn)
    if pairs is None:
        # Pooling, padding and activations leave the axes where they are.
        same = len(value.aval.shape) == len(node.outputs[0].aval.shape)
        return known if same and node.name != "conv_general_dilated" else None
    channels = frozenset(i for source, target in pairs if known.channels.intersection(source) for i in target)
    if known.batch is None:
        return _Axes(channels, None)
    batch = [i for source, target in pairs if known.batch in source for i in target]
    # Without a batch, a norm over the places of the one example looks like one over the batch.
    return _Axes(channels, batch[0]) if batch else _Axes(frozenset(), None)
