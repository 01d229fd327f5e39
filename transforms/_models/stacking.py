"""Several models of one architecture stacked into one, along axis 0 of every array, or the first difference named."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.arguments import describe, short
from .hashable import HashablePytree
from .split_model import SplitModel, by_value, dotted, is_module, shared_variable, split


@dataclass(frozen=True)
class Stacking:
    """A function that stacks models; its errors name the first difference and the model that has it.

    Args:
      api: what the user called.
      noun: what one of the models is called there.
      remedy: what to do where configurations differ, and where they differ only in the identity of objects.
    """

    api: str
    noun: str
    remedy: tuple[str, str]

    def __call__(self, models: Sequence[Any]) -> SplitModel:
        """Return the models as one, with their axis in front of each array.

        Raises:
          TypeError: the classes differ, or a variable holds something that is not an array.
          ValueError: the models share a variable; an array of one is missing, added, or of another shape or dtype; the
            configurations differ.
        """
        self._check_separate(models)
        # All of them before any is compared: an error names the first difference, in the order of the models.
        parts = [split(model) for model in models]
        for i, part in enumerate(parts):
            check_leaves(self.api, f"{self.noun} {i}", part)
        for i in range(1, len(parts)):
            self._check_same(i, (models[0], parts[0]), (models[i], parts[i]))
        return SplitModel(parts[0].structure, *strong(stack([(part.trainable, part.rest) for part in parts])))

    def _check_separate(self, models: Sequence[Any]) -> None:
        """Raise if NNX modules share a variable, since stacking would give each its own."""
        shared = shared_variable(models)
        if shared:
            (i, path), (j, other_path) = shared
            raise ValueError(
                f"{self.api}: {self.noun}s {i} and {j} share a variable, `{path}` of the one and `{other_path}` of the "
                "other, which would be two once they are stacked; build each with an nnx.Rngs of its own, or pass "
                f"nnx.clone({self.noun}) where equal copies are meant."
            )

    def _check_same(self, index: int, first: tuple[Any, SplitModel], other: tuple[Any, SplitModel]) -> None:
        """Raise if a model differs from the first in class, arrays or configuration, in this order."""
        (model, parts), (other_model, other_parts) = first, other
        whose = f"{self.api}: {self.noun} {index}"
        if type(model) is not type(other_model):
            raise TypeError(
                f"{whose} is a {type(other_model).__name__}, but {self.noun} 0 is a {type(model).__name__}; stack "
                "models of one class."
            )
        # Arrays before configuration: one that is missing changes the configuration too, but its path is more helpful.
        expected, found = ({path: outline(x) for path, x in each.arrays().items()} for each in (parts, other_parts))
        for path in [*expected, *found]:
            if expected.get(path) != found.get(path):
                raise ValueError(
                    f"{whose} differs from {self.noun} 0 at `{path}`: it has {_say(found.get(path))}, but {self.noun} "
                    f"0 has {_say(expected.get(path))}; {self.remedy[0]}."
                )
        if not _same_structure(parts, other_parts):
            difference, same = _configuration(model, other_model)
            raise ValueError(
                f"{whose} differs from {self.noun} 0 in its configuration: {difference}; {self.remedy[same]}."
            )


def check_leaves(api: str, whose: str, parts: SplitModel) -> None:
    """Raise if a variable of a model holds something that is not an array or a number."""
    for path, leaf in parts.arrays().items():
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (int, float, complex)):
            raise TypeError(
                f"{api}: `{path}` of {whose} holds {describe(leaf)}, but only arrays can be stacked; make it a plain "
                "attribute instead of a variable."
            )


def stack(trees: Sequence[Any]) -> Any:
    """Return one pytree with the given ones along axis 0 of its arrays."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def strong(tree: Any) -> Any:
    """Return `tree` without weak types: an update makes them strong, and a program would be compiled for both."""
    return jax.tree.map(lambda x: lax.convert_element_type(x, jnp.result_type(x)), tree)


def _same_structure(tree: Any, other: Any) -> bool:
    structures: list[Any] = [jax.tree.structure(tree), jax.tree.structure(other)]  # a `PyTreeDef` has no typed `==`
    return structures[0] == structures[1]


def outline(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Return the shape and dtype of a leaf, which may be a Python number."""
    return np.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def _say(found: tuple[tuple[int, ...], Any] | None) -> str:
    return "no array there" if found is None else f"shape {found[0]} and dtype {found[1]}"


def _configuration(model: Any, other: Any) -> tuple[str, bool]:
    """Return where two models first differ in their configuration, and whether only in the identity of an object.

    NNX modules are walked node by node: `GraphDef`s compare as a whole, and would not tell where they differ.
    """
    if not is_module(model):
        return _of_variables(model.variables, other.variables)
    from flax import nnx

    nodes = dict(nnx.iter_graph(other))
    for path, node in nnx.iter_graph(model):
        if not isinstance(node, nnx.Variable) and not is_module(node):
            continue
        place = dotted(path) or "the model"
        counterpart = nodes.get(path)
        if type(counterpart) is not type(node):
            return f"{place} is a {type(counterpart).__name__}, but there a {type(node).__name__}", False
        ours, theirs = (x.get_metadata() if isinstance(x, nnx.Variable) else vars(x) for x in (node, counterpart))
        for name, value in ours.items():
            # NNX's own bookkeeping, and arrays and modules, which are compared elsewhere.
            if name.startswith("_pytree__") or nnx.is_data(value) or by_value(value) == by_value(theirs.get(name)):
                continue
            return _difference(f"{name} of {place}", theirs.get(name), value)
    return "their variables are shared in other ways, or hold other containers", False


def _of_variables(variables: Any, other: Any) -> tuple[str, bool]:
    """Return what `_configuration` does, for models that are pytrees."""
    if _same_structure(variables, other):
        both = zip(jax.tree.leaves_with_path(variables), jax.tree.leaves(other), strict=True)
        for (path, value), theirs in both:
            # By type and value: `HashablePytree.of` distinguishes 1, 1.0 and True, which are equal.
            if not HashablePytree.is_array(value) and HashablePytree.of(theirs) != HashablePytree.of(value):
                return _difference(f"`{dotted(path)}`", theirs, value)
    return "their variables are in other containers, have other static fields, or train in other places", False


def _difference(place: str, theirs: Any, value: Any) -> tuple[str, bool]:
    if _without_address(theirs) == _without_address(value):
        return f"{place} is {short(value)}, a different object in each", True
    return f"{place} is {short(theirs)}, but there {short(value)}", False


# Two objects that read alike but for their address are most likely made by one constructor twice.
def _without_address(x: Any) -> str:
    return re.sub(" at 0x[0-9a-f]+", "", repr(x))
