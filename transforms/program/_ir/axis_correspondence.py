"""The correspondence between the axes of operand and result, for operations that only rearrange elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..._core.compat import JaxprEqn
from ..._core.jaxpr import aval

# Operations that keep all elements in their order.
_RESHAPES = frozenset({"reshape", "squeeze", "convert_element_type", "copy", "copy_p"})
Pairs = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]


def correspondence(eqn: JaxprEqn) -> Pairs | None:
    """Return pairs of corresponding axes of operand and result of a rearrangement; None for other operations.

    Each pair has a group of operand axes and a group of result axes with the same elements in the same order. An empty
    group pairs with an axis that the operation drops (of size 1) or adds (along which all elements are equal). For
    example, a reshape from (2, 3, 4) to (6, 1, 4) gives ((0, 1), (0,)), ((), (1,)), ((2,), (2,)).
    """
    name, params = eqn.primitive.name, eqn.params
    if not eqn.invars or len(eqn.invars) > 1:
        return None
    source, target = aval(eqn.invars[0]).shape, aval(eqn.outvars[0]).shape
    if name == "transpose":
        return [((axis,), (i,)) for i, axis in enumerate(params["permutation"])]
    if name == "broadcast_in_dim":
        places = [int(i) for i in params["broadcast_dimensions"]]
        # Broadcasting an axis of size 1 to another size counts as dropping it and adding a new, constant axis.
        moved = {i: place for i, place in enumerate(places) if source[i] == target[place]}
        new = [i for i in range(len(target)) if i not in moved.values()]
        return [*(((i,), (moved[i],) if i in moved else ()) for i in range(len(places))), *(((), (i,)) for i in new)]
    # In an empty array any two groups of axes match, so there is no unique correspondence.
    if name in _RESHAPES and 0 not in source:
        order = (name == "reshape" and params["dimensions"]) or range(len(source))
        found = _reshaped([source[i] for i in order], target)
        return [(tuple(order[i] for i in sources), targets) for sources, targets in found]
    return None


def _reshaped(source: Sequence[int], target: Sequence[int]) -> Pairs:
    """Return the smallest groups of consecutive axes with equal numbers of elements."""
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
            # Grow the group with the smaller product until both are equal, which happens because both shapes have the
            # same number of elements. The smallest groups keep as many axes as possible in one-to-one correspondence.
            a, b = i + 1, j + 1
            while (left := math.prod(source[i:a])) != (right := math.prod(target[j:b])):
                a, b = (a + 1, b) if left < right else (a, b + 1)
            pairs.append((tuple(range(i, a)), tuple(range(j, b))))
            i, j = a, b
    return pairs


def carried(x: np.ndarray, pairs: Pairs, source: Sequence[int], target: Sequence[int]) -> np.ndarray | None:
    """Apply the rearrangement of shape `source` to shape `target` to `x`; None if `x` varies along a dropped axis.

    Each axis of `x` has the size of that axis in `source`, or size 1 if `x` is constant along it.
    """
    groups = [(any(x.shape[i] > 1 for i in before), before, after) for before, after in pairs]
    if any(differs and not after for differs, _, after in groups):
        return None
    # Transpose to the order of the pairs, reshape group by group (constant groups keep size 1, so that they are not
    # materialized), and transpose the new axes back into order.
    x = x.transpose([i for before, _ in pairs for i in before])
    x = np.broadcast_to(x, [source[i] if differs else 1 for differs, before, _ in groups for i in before])
    x = x.reshape([target[i] if differs else 1 for differs, _, after in groups for i in after])
    return x.transpose(np.argsort([i for _, after in pairs for i in after]))
