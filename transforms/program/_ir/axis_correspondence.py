"""The axes of an array and those of the result that they become, for operations that only rearrange elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jax.extend.core import JaxprEqn

from ..._core.jaxpr import aval

# Operations that keep all elements in their order.
_RESHAPES = frozenset({"reshape", "squeeze", "convert_element_type", "copy", "copy_p"})
Pairs = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]


def correspondence(eqn: JaxprEqn) -> Pairs | None:
    """Return the axes of a rearrangement's operand paired with those of its result; None for other operations.

    The elements along each group of axes of the operand, in order, are those along a group of axes of the result. An
    axis of size 1 may come from nothing or become nothing; along an axis that comes from nothing all elements are the
    same. For example, a reshape from (2, 3, 4) to (6, 1, 4) gives ((0, 1), (0,)), ((), (1,)), ((2,), (2,)).
    """
    name, params = eqn.primitive.name, eqn.params
    if not eqn.invars or len(eqn.invars) > 1:
        return None
    source, target = aval(eqn.invars[0]).shape, aval(eqn.outvars[0]).shape
    if name == "transpose":
        return [((axis,), (i,)) for i, axis in enumerate(params["permutation"])]
    if name == "broadcast_in_dim":
        places = [int(i) for i in params["broadcast_dimensions"]]
        # An axis of size 1 that is spread to another size ends, and a new axis, along which all is the same, begins.
        moved = {i: place for i, place in enumerate(places) if source[i] == target[place]}
        new = [i for i in range(len(target)) if i not in moved.values()]
        return [*(((i,), (moved[i],) if i in moved else ()) for i in range(len(places))), *(((), (i,)) for i in new)]
    # Without elements any two groups of axes match, so there is no correspondence to find.
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
            # Both shapes have the same number of elements, so the smaller product can always take one axis more.
            # The smallest such groups, so that as many axes as possible correspond one to one.
            a, b = i + 1, j + 1
            while (left := math.prod(source[i:a])) != (right := math.prod(target[j:b])):
                a, b = (a + 1, b) if left < right else (a, b + 1)
            pairs.append((tuple(range(i, a)), tuple(range(j, b))))
            i, j = a, b
    return pairs


def carried(x: np.ndarray, pairs: Pairs, source: Sequence[int], target: Sequence[int]) -> np.ndarray | None:
    """Rearrange `x` as an array of shape `source` that becomes one of shape `target`.

    Each axis of `x` has the size that `source` has there, or size 1, along which it is constant. None if `x` differs
    along an axis that becomes nothing.
    """
    groups = [(any(x.shape[i] > 1 for i in before), before, after) for before, after in pairs]
    if any(differs and not after for differs, _, after in groups):
        return None
    # Pairs are in any order: bring the axes into theirs, reshape group by group (constant groups stay of size 1, so
    # that nothing is materialized that need not be), and bring the new axes back into order.
    x = x.transpose([i for before, _ in pairs for i in before])
    x = np.broadcast_to(x, [source[i] if differs else 1 for differs, before, _ in groups for i in before])
    x = x.reshape([target[i] if differs else 1 for differs, _, after in groups for i in after])
    return x.transpose(np.argsort([i for _, after in pairs for i in after]))
