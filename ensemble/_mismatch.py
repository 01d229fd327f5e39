"""What differs between two models that should have one architecture."""

from __future__ import annotations

from typing import Any

import jax

from ..transforms._model import Parts, is_module, named_arrays


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
    if parts.structure != other_parts.structure:
        raise ValueError(
            f"{api}: member {index} differs from member 0 in its configuration: {_configuration(model, other_model)}; "
            "build all members with one configuration."
        )


def _outline(parts: Parts) -> dict[str, tuple[tuple[int, ...], Any]]:
    arrays = named_arrays(parts.trainable) | named_arrays(parts.rest)
    return {path: (tuple(leaf.shape), leaf.dtype) for path, leaf in arrays.items()}


def _say(outline: tuple[tuple[int, ...], Any] | None) -> str:
    return "no array there" if outline is None else f"shape {outline[0]} and dtype {outline[1]}"


def _configuration(model: Any, other: Any) -> str:
    """The first static attribute in which two NNX modules differ; for functions of variables, where they do."""
    if not is_module(model):
        return f"{jax.tree.structure(model.variables)} with other leaves that are not arrays"
    from flax import nnx

    nodes = {path: node for path, node in nnx.iter_graph(other) if is_module(node)}
    for path, node in nnx.iter_graph(model):
        if not is_module(node):
            continue
        place = ".".join(map(str, path)) or "the model"
        counterpart = nodes.get(path)
        if type(counterpart) is not type(node):
            return f"{place} is a {type(counterpart).__name__}, but there a {type(node).__name__}"
        for name, value in vars(node).items():
            theirs = vars(counterpart).get(name)
            if name.startswith("_pytree__") or nnx.is_data(value) or value == theirs:
                continue
            return f"{name} of {place} is {theirs!r}, but there {value!r}"
    return "their graphs share variables in different ways"
