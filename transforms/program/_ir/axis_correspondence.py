"""Which axes of an array become which of the result where an operation only puts its numbers elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jax.extend.core import JaxprEqn

from ..._core.jaxpr import aval

Pairs = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]


def correspondence(eqn: JaxprEqn) -> Pairs | None:
    """Which axes of the first operand of a rearrangement become which of the result; None for other operations.

    The elements of each group of axes of the operand, in order, are those of a group of axes of the result. An axis of
    size 1 may come from nothing or become nothing; along an axis that comes from nothing all is the same.
    """
    name, params = eqn.primitive.name, eqn.params
    if not eqn.invars or len(eqn.invars) > 1:
        return None
    source, target = aval(eqn.invars[0]).shape, aval(eqn.outvars[0]).shape
    if name in ("convert_element_type", "copy", "copy_p"):
        return [((i,), (i,)) for i in range(len(source))]
    if name == "transpose":
        return [((axis,), (i,)) for i, axis in enumerate(params["permutation"])]
    if name == "squeeze":
        gone = [axis % len(source) for axis in params["dimensions"]]
        kept = [i for i in range(len(source)) if i not in gone]
        return [*(((i,), ()) for i in gone), *(((axis,), (i,)) for i, axis in enumerate(kept))]
    if name == "broadcast_in_dim":
        places = [int(i) for i in params["broadcast_dimensions"]]
        same = [source[i] == target[place] for i, place in enumerate(places)]
        new = [i for i in range(len(target)) if i not in places or not same[places.index(i)]]
        pairs = [((i,), (place,) if same[i] else ()) for i, place in enumerate(places)]
        return [*pairs, *(((), (i,)) for i in new)]
    if name == "reshape" and 0 not in source:
        order = params["dimensions"] or range(len(source))
        found = _reshaped([source[i] for i in order], target)
        return [(tuple(order[i] for i in sources), targets) for sources, targets in found]
    return None


def _reshaped(source: Sequence[int], target: Sequence[int]) -> Pairs:
    """The smallest groups of axes with equal numbers of elements."""
    pairs: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        if i < len(source) and source[i] == 1 and (j == len(target) or target[j] != 1):
            pairs.append(((i,), ()))
            i += 1
        elif j < len(target) and target[j] == 1 and (i == len(source) or source[i] != 1):
            pairs.append(((), (j,)))
            j += 1
        else:
            a, b = i + 1, j + 1
            while (left := math.prod(source[i:a])) != (right := math.prod(target[j:b])):
                a, b = (a + 1, b) if left < right else (a, b + 1)
            pairs.append((tuple(range(i, a)), tuple(range(j, b))))
            i, j = a, b
    return pairs


def carried(x: np.ndarray, pairs: Pairs, source: Sequence[int], target: Sequence[int]) -> np.ndarray | None:
    """`x`, of which each axis is whole or of size 1, where the axes of `source` become those of `target`.

    None if it differs along an axis that has become nothing.
    """
    whole = [any(x.shape[i] > 1 for i in axes) for axes, _ in pairs]
    if any(differs and not axes for differs, (_, axes) in zip(whole, pairs, strict=True)):
        return None
    x = x.transpose([i for axes, _ in pairs for i in axes])
    groups = list(zip(whole, pairs, strict=True))
    x = np.broadcast_to(x, [source[i] if differs else 1 for differs, (axes, _) in groups for i in axes])
    x = x.reshape([target[i] if differs else 1 for differs, (_, axes) in groups for i in axes])
    return x.transpose(np.argsort([i for _, axes in pairs for i in axes]))
