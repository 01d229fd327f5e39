"""Split models into arrays and a static structure, and merge them.

For JAX a model is a `SplitModel`: a static structure, the trainable arrays and the other arrays. A model is a Flax NNX
module, or an object with two methods:

- `__plurax_split__()` returns the structure, the trainable arrays and the other arrays: pytrees that have no path in
  common;
- `__plurax_update__(rest)` replaces the other arrays with those after a call.

An ensemble, several models of one structure stacked along axis 0 of every array, has four methods, with which `vmap`
passes one member at a time to a function, as an ordinary model:

- `__len__()` returns the number of members, or raises a ValueError if axis 0 does not index the members;
- `__plurax_member__()` returns one model, if `vmap` has removed axis 0 from the arrays;
- `__plurax_stack__(model)` is its inverse: it returns an ensemble with the arrays of `model`, to which `vmap` adds the
  axis;
- `__plurax_own__()` returns the ensemble without arrays that all members share, which are the last of its arrays and
  have no axis of members.

This file never imports Flax first: if `flax.nnx` is not loaded, no value can be an NNX module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from operator import getitem
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar

import jax
from jax.tree_util import keystr, register_dataclass

from .._core.arguments import argument_name, transform_of

if TYPE_CHECKING:
    from flax import nnx

Model = TypeVar("Model")
M = TypeVar("M", covariant=True)


class Structure(Protocol[M]):
    """The static part of a model: hashable, and equal for models of one architecture and configuration."""

    def merge(self, trainable: Any, rest: Any) -> M:
        """Return the model with these arrays."""

    def gradient(self, trainable: Any, rest: Any) -> Any:
        """Return a gradient of the trainable arrays in the form that the user expects."""


class Members(Protocol):
    """Several models of one structure, stacked along axis 0."""

    def __len__(self) -> int: ...
    def __plurax_member__(self) -> Any: ...
    def __plurax_stack__(self, model: Any) -> Any: ...
    def __plurax_own__(self) -> Any: ...


def is_module(x: Any) -> bool:
    """Return whether `x` is a Flax NNX module (or another NNX object: an optimizer, a metric, `Rngs`)."""
    # Looked up instead of imported: Flax takes a second to import, and a module exists only if it was imported.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Pytree)


def separate_filters(argnums: Any) -> tuple[Any, dict[int, Any]]:
    """Return `argnums` with each `nnx.DiffState` replaced by its position, and the filters by position."""
    nnx = sys.modules.get("flax.nnx")
    kinds = nnx.DiffState if nnx else ()
    several = isinstance(argnums, (tuple, list))
    filters = {x.argnum: x.filter for x in (argnums if several else [argnums]) if isinstance(x, kinds)}
    plain = [x.argnum if isinstance(x, kinds) else x for x in (argnums if several else [argnums])]
    return (tuple(plain) if several else plain[0]), filters


def is_members(x: Any) -> TypeGuard[Members]:
    """Return whether `x` is an ensemble: several models along axis 0."""
    return hasattr(type(x), "__plurax_member__")


def without_shared(tree: Any) -> Any:
    """Return `tree` without the arrays that all members of an ensemble in it share."""
    return jax.tree.map(lambda x: x.__plurax_own__() if is_members(x) else x, tree, is_leaf=is_members)


def is_model(x: Any) -> bool:
    """Return whether `x` is a model: an NNX module, or an object with `__plurax_split__`."""
    return is_module(x) or hasattr(type(x), "__plurax_split__")


def by_value(x: Any) -> Any:
    """Return a key to compare `x` by: unlike in Python, partials are equal if their parts are."""
    if type(x) is tuple:
        return tuple(map(by_value, x))
    if type(x) is not partial:
        return x
    leaves = (x.func, *x.args, *(value for _, value in sorted(x.keywords.items())))
    # 1, 1.0 and True are equal, but a function may treat them differently.
    value = (partial, tuple(map(by_value, leaves)), tuple(map(type, leaves)), tuple(sorted(x.keywords)))
    try:
        hash(value)
    except TypeError:
        return x  # bound to an array, for example: compared by identity, as in Python
    return value


@dataclass(eq=False, repr=False)
class ModuleStructure:
    """A `GraphDef` and the paths of its arrays.

    The key for comparisons is computed only once, since it takes 0.3 ms for a small network.

    Args:
      graphdef: the static part of a module.
      paths: for each variable of the module, in the order of `graphdef`, its path and whether it trains. A variable
        that holds a pytree has one path.
      trains: an NNX filter that selects the variables that train; None for `nnx.Param`.
    """

    graphdef: nnx.GraphDef[Any]
    paths: Sequence[tuple[tuple[Any, ...], bool]]
    trains: Any = None

    def merge(self, trainable: Any, rest: Any) -> Any:
        """Return the module with these arrays."""
        from flax import nnx

        # A list, since in nested dicts it is ambiguous where a variable that holds a dict begins.
        return nnx.merge(
            self.graphdef, [reduce(getitem, path, trainable if trains else rest) for path, trains in self.paths]
        )

    def gradient(self, trainable: Any, rest: Any) -> Any:
        """Return the gradient as an `nnx.State` of parameters, as `nnx.grad` does."""
        from flax import nnx

        return nnx.state(self.merge(trainable, rest), nnx.Param if self.trains is None else self.trains)

    def __repr__(self) -> str:
        root: Any = self.graphdef.nodes[0]
        return root.type.__name__

    def __deepcopy__(self, _: Any) -> ModuleStructure:
        return self  # immutable, and functions in a copied `GraphDef` would no longer be equal

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, ModuleStructure) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(self.paths))  # much faster than hashing the graph, and distinguishes most structures

    @cached_property
    def _key(self) -> nnx.GraphDef[Any]:
        """Return the graph in a form to compare by."""

        # Python compares partials by identity, so that two models built in the same way would differ.
        def compared(attribute: Any) -> Any:
            value = getattr(attribute, "value", None)
            return replace(attribute, value=by_value(value)) if isinstance(value, (tuple, partial)) else attribute

        attributes = [(name, compared(attribute)) for name, attribute in self.graphdef.attributes]
        return replace(self.graphdef, attributes=attributes)


@partial(register_dataclass, data_fields=["trainable", "rest"], meta_fields=["structure"])
@dataclass(eq=False, repr=False, slots=True)
class SplitModel:
    """A model as a pytree of its arrays, with its structure as static data."""

    structure: Structure
    trainable: Any
    rest: Any

    def merge(self) -> Any:
        """Return the model with these arrays."""
        return self.structure.merge(self.trainable, self.rest)

    def arrays(self) -> dict[str, Any]:
        """Return all arrays by name, in the order of the leaves."""
        return named_arrays(self.trainable) | named_arrays(self.rest)

    def changes(self, after: SplitModel) -> list[str]:
        """Return the dotted paths of arrays that are different objects `after` a call, or "configuration"."""
        # By identity, since traced values cannot be compared: an array that a call does not change is the same object.
        then, now = self.arrays(), after.arrays()
        paths = [path for path in now if path not in then or now[path] is not then[path]]
        paths += [path for path in then if path not in now]
        return paths or ([] if self.structure == after.structure else ["configuration"])


def split(model: Any, trains: Any = None) -> SplitModel:
    """Return `model` split; in an NNX module variables that match `trains` (default `nnx.Param`) are trainable."""
    if not is_module(model):
        return SplitModel(*model.__plurax_split__())
    from flax import nnx

    # Pure dicts: a `State` would hold the module's own variables, and a copy of it would change with the original.
    parts: Any = nnx.split(model, nnx.Param if trains is None else trains, ...)
    graphdef, trainable, rest = parts
    if not all(isinstance(x, nnx.Variable) for _, x in nnx.to_flat_state(rest)):
        refuse_models_within(model)
    # In the order of the leaves of `graphdef`, in which `merge` has to pass them.
    paths = sorted(
        (path, trains) for state, trains in ((trainable, True), (rest, False)) for path, _ in nnx.to_flat_state(state)
    )
    return SplitModel(
        ModuleStructure(graphdef, paths, trains), *(nnx.to_pure_dict(state, _held) for state in (trainable, rest))
    )


def refuse_models_within(module: Any) -> None:
    """Raise if an NNX module contains an ensemble or another model of ours, which has no variables, so nothing trains.

    Flax sees plain arrays in it, which neither a derivative nor an optimizer of Flax selects.
    """
    from flax import nnx

    for path, node in nnx.iter_graph(module):
        if is_module(node) or not is_model(node):
            continue
        cure = "pass it as an argument of its own"
        if is_members(node):
            stacked = "jax.tree.map(lambda *x: jnp.stack(x), *ensemble)"
            call = "plurax.transforms.vmap(lambda member, x: member(x), (0, None))(self.members, x)"
            cure += f", or keep the members as one stacked module, self.members = {stacked}, and call {call}"
        what = f"`{dotted(path)}` of {type(module).__name__} is of the class {type(node).__name__}"
        raise TypeError(f"{what}, in which Flax finds no variables, so it would never train; {cure}.")


def _held(variable: Any) -> Any:
    """Return the stored value of a variable, which differs from its visible value if a class or hook computes that."""
    return variable.get_raw_value() if hasattr(variable, "get_raw_value") else variable


def to_pure(tree: Any) -> Any:
    """Return an `nnx.State` as plain dicts of arrays, and anything else unchanged."""
    nnx = sys.modules.get("flax.nnx")
    return nnx.to_pure_dict(tree) if nnx is not None and isinstance(tree, nnx.State) else tree


def is_split(x: Any) -> bool:
    """Return whether `x` is a split model."""
    return isinstance(x, SplitModel)


def split_tree(tree: Any, trains: Any = None) -> Any:
    """Return `tree` with every model in it split, as by `split`."""
    return jax.tree.map(lambda x: split(x, trains) if is_model(x) else x, tree, is_leaf=is_model)


def merge_tree(tree: Any) -> Any:
    """Return `tree` with every split model in it merged."""
    return jax.tree.map(lambda x: x.merge() if is_split(x) else x, tree, is_leaf=is_split)


def with_splits(tree: Any, parts: Sequence[SplitModel]) -> Any:
    """Return `tree` with its split models replaced by `parts`, in order."""
    given = iter(parts)
    return jax.tree.map(lambda x: next(given) if is_split(x) else x, tree, is_leaf=is_split)


def models_of(tree: Any) -> list[Any]:
    """Return the models among the leaves of `tree`."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_model) if is_model(x)]


def splits_of(tree: Any) -> list[SplitModel]:
    """Return the split models among the leaves of `tree`."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_split) if is_split(x)]


def bound_model(fun: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """Return the model that `fun` is bound to, or None, and `fun` as a function that takes the model first.

    `fun` may be a model, a method of one, or a transform or partial of either.
    """
    owner, rebind = _binding(fun)
    return owner, lambda owner, /, *args, **kwargs: rebind(owner)(*args, **kwargs)


def _binding(fun: Callable[..., Any]) -> tuple[Any, Callable[[Any], Callable[..., Any]]]:
    """Return the model that `fun` is bound to, or None, and a function that binds `fun` to another model."""
    # In a call the merged copy of the model has to replace the user's model, wherever `fun` holds it.
    if is_model(fun) or is_members(fun):
        return fun, lambda owner: owner
    if isinstance(fun, MethodType) and is_model(fun.__self__):
        return fun.__self__, partial(MethodType, fun.__func__)
    transform = transform_of(fun)
    if transform:
        inner, rebuild = transform
        owner, rebind = _binding(inner)
        if owner is not None:
            return owner, lambda owner: rebuild(rebind(owner))
    return None, lambda _: fun


def refuse_shared_state(
    api: str, fun: Callable[..., Any], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise if NNX modules of one call share a variable: modules that are split separately would stop sharing it."""
    named = [("fun", model) for model in models_of(owner)]
    named += [(argument_name(fun, args, i), model) for i, value in enumerate(args) for model in models_of(value)]
    named += [(name, model) for name, value in kwargs.items() for model in models_of(value)]
    shared = shared_variable([model for _, model in named])
    if shared:
        (i, _), (j, path) = shared
        both = f"`{named[i][0]}` and `{named[j][0]}` share the variable `{path}`"
        raise ValueError(f"{api}: {both}; put them into one module, such as nnx.Dict, and pass that.")


def shared_variable(
    models: Sequence[Any], besides: Collection[Any] = ()
) -> tuple[tuple[int, str], tuple[int, str]] | None:
    """Return the first variable shared by two models, as each model's index and path; None if there is none.

    Args:
      models: the models.
      besides: the paths of variables that may be shared.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or len(models) < 2:
        return None
    places: dict[int, tuple[int, str]] = {}
    for i, model in enumerate(models):
        for path, node in nnx.iter_graph(model) if is_module(model) else ():
            if isinstance(node, nnx.Variable) and tuple(path) not in besides:
                place = i, dotted(path)
                # By identity: variables with equal values are not shared.
                first = places.setdefault(id(node), place)
                if first[0] != i:  # sharing within one module is fine, since a module is split as a whole
                    return first, place
    return None


def dotted(path: Iterable[Any]) -> str:
    """Return a path of a pytree or of Flax as dotted text, such as `blocks.0.kernel`."""
    return keystr(tuple(path), simple=True, separator=".")


def array_name(path: Sequence[Any]) -> str:
    """Return a dotted path with keys that contain a dot in brackets, since `a.b` is also the entry `b` of `a`."""
    name = dotted(path)
    if name.count(".") < len(path):
        return name
    return ".".join(f"[{key!r}]" if "." in key else key for key in map(dotted, zip(path, strict=True)))


def named_arrays(tree: Any) -> dict[str, Any]:
    """Return the arrays in one part of a split model by name."""
    return {array_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
