"""Each example's gradients of each parameter as outer products, and which axes of the parameter are their sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._core.jaxpr import IDENTITIES
from .._statistics.use_gradients import UseGradients, one_at_a_time
from ..privacy._per_example.gradient_forms import Dense, concatenated
from ..privacy._per_example.loss import PerExample
from ..privacy._per_example.methods import MethodChoice
from ..privacy._per_example.norms import ExampleGradients
from ..privacy._per_example.parameter_uses import ParameterUse
from ..privacy._per_example.rules import sides_of_product, takes_rows

# Operations on a parameter that keep its axes. Of their elements they change at most the sign of all, or the dtype.
_KEEPING_AXES = frozenset(["convert_element_type", "neg", *IDENTITIES])


def parameter_gradients(
    of: PerExample, examples: Sequence[Any], route: MethodChoice, seed: Any = None
) -> list[UseGradients]:
    """Return the gradients of each parameter: as outer products, one for each role in which it is used, or as arrays.

    In two uses of one role, the same axes are multiplied, so that positions of one are like those of the other.

    Args:
      of: the function of an example.
      examples: the examples, along axis 0 of each array.
      route: with the method "vmap", every gradient is materialized, one example at a time.
      seed: as for `ExampleGradients`.
    """
    if route.method == "vmap":
        held = enumerate(one_at_a_time(of, examples, seed))
        return [UseGradients(frozenset([i]), None, Dense(x)) for i, x in held]
    found = ExampleGradients(of.program, examples, seed=seed, factors=True)
    result: list[UseGradients] = []
    materialized: dict[int, Any] = {}
    for group, forms in found.groups:
        leaves = frozenset[int]().union(*(found.uses[n].value.leaves for n in group))
        alone = sum(not leaves.isdisjoint(found.uses[n].value.leaves) for n in range(len(found.uses))) == len(group)
        if forms is not None and len(leaves) == 1 and alone:
            roles: dict[Any, list[int]] = {}
            for n in group:
                roles.setdefault((_axes(found.uses[n]), type(forms[n])), []).append(n)
            if _share_sides([axes for axes, _ in roles]) and Dense not in {kind for _, kind in roles}:
                for (axes, _), numbers in roles.items():
                    each: list[Any] = [_with_sign(found.uses[n], forms[n]) for n in numbers]
                    form = concatenated(each) if len(each) > 1 else each[0]
                    result.append(UseGradients(leaves, numbers[0], form, axes))
                continue
        for leaf, x in found.of_leaves(group).items():
            materialized[leaf] = materialized.get(leaf, 0) + x
    return result + [UseGradients(frozenset([leaf]), None, Dense(x)) for leaf, x in materialized.items()]


def _with_sign(use: ParameterUse, form: Any) -> Any:
    """Return the gradients by the parameter instead of those by the operand, whose sign may be the other."""
    negative = sum(name == "neg" for name, *_ in use.value.layout or ()) % 2
    return form._replace(right=-form.right) if negative else form


def _share_sides(every: Sequence[Any]) -> bool:
    """Return whether the axes of all roles are known, and are the same sides, possibly swapped."""
    return None not in every and len({(stack, frozenset(sides)) for stack, *sides in every}) == 1


def _axes(use: ParameterUse) -> Any:
    """Return the axes of the parameter that are the stack, p and d of its form; None if these are not whole axes."""
    name, ndim = use.eqn.primitive.name, len(use.aval.shape)
    if name == "conv_general_dilated" and use.operand == 1 and use.eqn.params["feature_group_count"] == 1:
        spec = use.eqn.params["dimension_numbers"].rhs_spec
        axes: Any = ((), (*spec[2:], spec[1]), spec[:1])
    elif name == "dot_general":
        axes = sides_of_product(use)
    elif takes_rows(use):
        axes = ((), (0,), tuple(range(1, ndim)))
    else:
        return None
    found = _moved_axes(use.value.layout, ndim)
    if found is None:
        return None
    loops, order = found
    stack, p, d = (tuple(order[axis] for axis in some) for some in axes)
    return (*loops, *stack), p, d


def _moved_axes(layout: Any, ndim: int) -> tuple[list[int], list[int]] | None:
    """Return the axes of a parameter over which loops iterate, and which of its axes the axes of an operand are.

    Args:
      layout: the operations that turn the parameter into the operand, or None.
      ndim: the number of axes of the operand.
    """
    if layout is None:
        return None
    loops: list[int] = []
    order = list(range(ndim + sum(name == "slice" for name, *_ in layout)))
    for name, *given in layout:
        if name == "slice":  # the iterations of a loop
            loops.append(order.pop(0))
        elif name == "transpose":
            order = [order[axis] for axis in given[0]]
        elif name not in _KEEPING_AXES:
            return None
    return loops, order
