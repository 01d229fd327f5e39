"""What keeps models from being stacked: state that they share, and what differs in their architecture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..transforms._arguments import short
from ..transforms._model import Parts, by_value, dotted, is_module, shared_variable
from ._static import Static


def check_separate(api: str, members: Sequence[Any]) -> None:
    """Refuse NNX modules that share a variable, since stacking would give each its own."""
    shared = shared_variable(members)
    if shared:
        (i, path), (j, other_path) = shared
        raise ValueError(
            f"{api}: members {i} and {j} share a variable, `{path}` of the one and `{other_path}` of the other, which "
            "would be two once they are stacked; build each with an nnx.Rngs of its own, or pass nnx.clone(member) "
            "where equal copies are meant."
        )


def check_same_architecture(api: str, index: int, first: tuple[Any, Parts], other: tuple[Any, Parts]) -> None:
    """Refuse model `index` where it differs from member 0: each is given as the model and its parts.

    Raises:
      TypeError: the classes differ.
      ValueError: an array is missing, added, or of another shape or dtype; the configuration differs.
    """
    (model, parts), (other_model, other_parts) = first, other
    if type(model) is not type(other_model):
        raise TypeError(
            f"{api}: member {index} is a {type(other_model).__name__}, but member 0 is a {type(model).__name__}; "
            "stack models of one class."
        )
    expected, found = _outline(parts), _outline(other_parts)
    for path in [*expected, *found]:
        if expected.get(path) != found.get(path):
            raise ValueError(
                f"{api}: member {index} differs from member 0 at `{path}`: it has {_say(found.get(path))}, but "
                f"member 0 has {_say(expected.get(path))}; build all members with one configuration."
            )
    if not _same_structure(parts, other_parts):
        raise ValueError(
            f"{api}: member {index} differs from member 0 in its configuration: {_configuration(model, other_model)}."
        )


def _same_structure(tree: Any, other: Any) -> bool:
    structures: list[Any] = [jax.tree.structure(tree), jax.tree.structure(other)]
    return structures[0] == structures[1]


def _outline(parts: Parts) -> dict[str, tuple[tuple[int, ...], Any]]:
    # A variable may hold a Python number.
    return {
        path: (jnp.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf))
        for path, leaf in parts.arrays().items()
    }


def _say(outline: tuple[tuple[int, ...], Any] | None) -> str:
    return "no array there" if outline is None else f"shape {outline[0]} and dtype {outline[1]}"


def _configuration(model: Any, other: Any) -> str:
    """Where two models first differ in something that is not an array, and what to do about it."""
    if not is_module(model):
        return _of_variables(model.variables, other.variables)
    from flax import nnx

    nodes = dict(nnx.iter_graph(other))
    for path, node in nnx.iter_graph(model):
        if not isinstance(node, nnx.Variable) and not is_module(node):
            continue
        place = ".".join(map(str, path)) or "the model"
        counterpart = nodes.get(path)
        if type(counterpart) is not type(node):
            return f"{place} is a {type(counterpart).__name__}, but there a {type(node).__name__}; {_REMEDY}"
        ours, theirs = (x.get_metadata() if isinstance(x, nnx.Variable) else vars(x) for x in (node, counterpart))
        for name, value in ours.items():
            if name.startswith("_pytree__") or nnx.is_data(value) or by_value(value) == by_value(theirs.get(name)):
                continue
            return _difference(f"{name} of {place}", theirs.get(name), value, ", or use Ensemble.create")
    return f"their variables are shared in other ways, or hold other containers; {_REMEDY}"


def _of_variables(variables: Any, other: Any) -> str:
    if _same_structure(variables, other):
        both = zip(jax.tree.leaves_with_path(variables), jax.tree.leaves(other), strict=True)
        for (path, value), theirs in both:
            if not Static.is_array(value) and Static.of(theirs) != Static.of(value):
                return _difference(f"`{dotted(path)}`", theirs, value)
    return f"their variables are in other containers, have other static fields, or train in other places; {_REMEDY}"


def _difference(place: str, theirs: Any, value: Any, remedy: str = "") -> str:
    if _without_address(theirs) == _without_address(value):
        return f"{place} is {short(value)}, a different object in each; define it once, at module level{remedy}"
    return f"{place} is {short(theirs)}, but there {short(value)}; {_REMEDY}"


def _without_address(x: Any) -> str:
    return re.sub(" at 0x[0-9a-f]+", "", repr(x))


_REMEDY = "build all members with one configuration"
