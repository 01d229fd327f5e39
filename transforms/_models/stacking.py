"""Stack models of one architecture along axis 0 of every array, or raise with the first difference between them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.arguments import describe, short
from .hashable import HashablePytree
from .split_model import SplitModel, dotted, is_module, shared_variable, split


def stack_models(api: str, noun: str, remedy: tuple[str, str], models: Sequence[Any]) -> SplitModel:
    """Return the models stacked into one, along a new axis 0 of each array; arguments and errors as `split_alike`."""
    parts = split_alike(api, noun, remedy, models)
    return SplitModel(parts[0].structure, *strong(stack([(part.trainable, part.rest) for part in parts])))


def split_alike(
    api: str, noun: str, remedy: tuple[str, str], models: Sequence[Any], besides: Collection[Any] = ()
) -> list[SplitModel]:
    """Return models of one architecture split.

    Args:
      api: the function's name in errors.
      noun: the word for one model in errors.
      remedy: the remedies for configurations that differ, and for those that differ only in the identity of objects.
      models: the models.
      besides: the paths of variables that models may share.

    Raises:
      TypeError: the classes differ, or a variable holds something that is not an array.
      ValueError: models share a variable; arrays differ in presence, shape or dtype; the configurations differ.
    """
    shared = shared_variable(models, besides)
    if shared:
        (i, path), (j, other_path) = shared
        which = f"`{path}` of the first and `{other_path}` of the second"
        cure = f"build each with a separate nnx.Rngs, or pass nnx.clone({noun}) if equal copies are intended"
        raise ValueError(f"{api}: {noun}s {i} and {j} share a variable, {which}; {cure}.")
    # Split and check all before comparing, so that the error names the first difference in the order of the models.
    parts = [split(model) for model in models]
    for i, part in enumerate(parts):
        check_leaves(api, f"{noun} {i}", part)
    expected = _outlines(parts[0])
    for i, (model, part) in enumerate(zip(models, parts, strict=True)):
        whose = f"{api}: {noun} {i}"
        if type(model) is not type(models[0]):
            first = f"{noun} 0 is a {type(models[0]).__name__}"
            raise TypeError(f"{whose} is a {type(model).__name__}, but {first}; stack models of one class.")
        # Arrays before configuration: a missing array changes the configuration too, but its path is more helpful.
        found = _outlines(part)
        for path in [*expected, *found]:
            if expected.get(path) != found.get(path):
                fact = f"it has {_say(found.get(path))}, but {noun} 0 has {_say(expected.get(path))}"
                raise ValueError(f"{whose} differs from {noun} 0 at `{path}`: {fact}; {remedy[0]}.")
        structures: list[Any] = [jax.tree.structure(x) for x in (part, parts[0])]  # a `PyTreeDef` has no typed `==`
        if structures[0] != structures[1]:
            difference, same = _difference(models[0], model)
            raise ValueError(f"{whose} differs from {noun} 0 in its configuration: {difference}; {remedy[same]}.")
    return parts


def check_leaves(api: str, whose: str, parts: SplitModel) -> None:
    """Raise if a variable of a model holds something that is not an array or a number."""
    for path, leaf in parts.arrays().items():
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (int, float, complex)):
            fact = f"holds {describe(leaf)}, but only arrays can be stacked"
            raise TypeError(f"{api}: `{path}` of {whose} {fact}; make it a plain attribute instead of a variable.")


def stack(trees: Sequence[Any]) -> Any:
    """Return pytrees stacked into one, along axis 0 of each array."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def strong(tree: Any) -> Any:
    """Return `tree` without weak types: an update makes them strong, so programs would be compiled for both."""
    return jax.tree.map(lambda x: lax.convert_element_type(x, jnp.result_type(x)), tree)


def outline(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Return the shape and dtype of a leaf, which may be a Python number."""
    return np.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def _outlines(parts: SplitModel) -> dict[str, Any]:
    return {path: outline(x) for path, x in parts.arrays().items()}


def _say(found: tuple[tuple[int, ...], Any] | None) -> str:
    return "no array there" if found is None else f"shape {found[0]} and dtype {found[1]}"


def _difference(model: Any, other: Any) -> tuple[str, bool]:
    """Describe the first difference between two configurations; return it and whether only object identity differs."""
    expected, found = _configuration(model), _configuration(other)
    for place, value in expected.items():
        theirs = found.get(place)
        # By type and value: 1, 1.0 and True are equal, but a function may treat them differently.
        if HashablePytree.of(theirs) == HashablePytree.of(value):
            continue
        # Two objects whose reprs differ only in the address were most likely made by two calls of one constructor.
        if len({re.sub(" at 0x[0-9a-f]+", "", repr(x)) for x in (value, theirs)}) == 1:
            return f"{place} is {short(value)}, a different object in each", True
        return f"{place} is {short(theirs)}, but there {short(value)}", False
    return "they differ in the containers, the sharing or the trainable parts of their variables", False


def _configuration(model: Any) -> dict[str, Any]:
    """Return everything in a model that is not an array, by its path.

    NNX modules are traversed node by node, since a comparison of `GraphDef`s would not show where they differ.
    """
    if not is_module(model):
        leaves = jax.tree.leaves_with_path(model.variables)
        return {f"`{dotted(path)}`": x for path, x in leaves if not HashablePytree.is_array(x)}
    from flax import nnx

    found: dict[str, Any] = {}
    for path, node in nnx.iter_graph(model):
        if not isinstance(node, nnx.Variable) and not is_module(node):
            continue
        place = dotted(path) or "the model"
        found[f"the class of {place}"] = type(node).__name__
        for name, value in (node.get_metadata() if isinstance(node, nnx.Variable) else vars(node)).items():
            # Except NNX's own bookkeeping, and arrays and modules, which are compared elsewhere.
            if not name.startswith("_pytree__") and not nnx.is_data(value):
                found[f"{name} of {place}"] = value
    return found
