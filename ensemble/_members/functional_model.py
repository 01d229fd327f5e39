"""`FunctionalModel`: a model made of a pytree and an apply function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp

from ...transforms._core.arguments import describe
from ...transforms._models.hashable import HashablePytree, Placeholder
from ...transforms._models.split_model import array_name, dotted

Rule = Callable[[str, Any], bool]
P = ParamSpec("P")
R = TypeVar("R", covariant=True)


@dataclass(eq=False, repr=False)
class FunctionalModel(Generic[P, R]):
    """A model made of variables and a pure function that takes them.

    A member of an ensemble that `Ensemble.from_apply` made, as indexing returns it and as a loss receives it. A loss
    updates state by assigning to `variables`; for a Linen module `call_and_update` does that.

    Attributes:
      apply: the function.
      variables: the pytree that is its first argument.
    """

    apply: Callable[Concatenate[Any, P], R]
    variables: Any
    _rule: Rule | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return `apply(variables, *args, **kwargs)`."""
        return self.apply(self.variables, *args, **kwargs)

    def call_and_update(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call a Linen module and keep its new state in `variables`, as an NNX module does.

        All collections except "params" and "rngs" are mutable. "rngs" holds the random keys by name, such as "dropout",
        and an unsigned integer "count". A call receives each key with the count folded in, and adds 1 to the count.

        Args:
          *args: the arguments of the module.
          **kwargs: its keyword arguments, such as `train=True`.

        Returns:
          The output of the module.

        Raises:
          TypeError: `variables` is not a mapping with a collection "params"; `mutable` or `rngs` is passed.
          ValueError: there are keys, but "count" is missing or not an integer array.
        """
        variables = self.variables
        if not _is_linen(variables):
            got = type(variables).__name__
            raise TypeError(f'FunctionalModel.call_and_update: needs Linen variables with "params", but got a {got}.')
        rngs = dict(variables.get("rngs", {}))
        count = rngs.pop("count", None)
        if rngs and not (HashablePytree.is_array(count) and jnp.issubdtype(count.dtype, jnp.integer)):
            found, remedy = f"is {describe(count)}", 'pass {"rngs": {"dropout": key, "count": jnp.uint32(0)}}'
            raise ValueError(f'FunctionalModel.call_and_update: "count" in the collection "rngs" {found}; {remedy}.')
        mutable = [name for name in variables if name not in ("params", "rngs")]
        drawn = {name: jax.random.fold_in(key, count) for name, key in rngs.items()}
        apply: Callable[..., tuple[Any, Any]] = cast(Any, self.apply)
        out, updates = apply(variables, *args, mutable=mutable, rngs=drawn, **kwargs)
        if rngs:
            updates = {**updates, "rngs": {**rngs, "count": count + 1}}
        # `type` keeps a FrozenDict one.
        self.variables = type(variables)({**variables, **updates})
        return out

    def __repr__(self) -> str:
        return f"FunctionalModel({_name(self.apply)}, {self.variables!r})"

    def __plurax_split__(self) -> tuple[FunctionalStructure, Any, Any]:
        """Return the structure, the trainable arrays, and the other arrays: two trees, each with None for the rest."""
        named, treedef = jax.tree.flatten_with_path(self.variables)
        rule = self._rule or (_trains_params if _is_linen(self.variables) else _trains_floats)

        def kind_of(path: Any, leaf: Any) -> Any:
            if not HashablePytree.is_array(leaf):
                return leaf
            return Placeholder.TRAINABLE if rule(dotted(path), leaf) else Placeholder.REST

        # The entry of each leaf in the structure: a placeholder for an array, the leaf itself for anything else.
        kinds = tuple(kind_of(path, leaf) for path, leaf in named)

        # None is a pytree without leaves, so optax and `jax.grad` see only the wanted arrays.
        trainable, rest = (
            jax.tree.unflatten(
                treedef, [x if kind is wanted else None for kind, (_, x) in zip(kinds, named, strict=True)]
            )
            for wanted in (Placeholder.TRAINABLE, Placeholder.REST)
        )
        return FunctionalStructure(self.apply, self._rule, HashablePytree(kinds, treedef)), trainable, rest

    def __plurax_update__(self, rest: Any) -> None:
        structure, trainable, _ = self.__plurax_split__()
        self.variables = structure.merge(trainable, rest).variables

    def __plurax_random__(self) -> set[str]:
        """Return the names of the arrays from which random numbers are drawn."""
        named = jax.tree.leaves_with_path(self.variables) if _is_linen(self.variables) else []
        return {array_name(path) for path, _ in named if dotted(path[:1]) == "rngs"}


@dataclass(frozen=True, eq=False, repr=False)
class FunctionalStructure:
    """The static part of members of a `from_apply` ensemble: the function, and the variables without their arrays."""

    apply: Callable[..., Any]
    rule: Rule | None
    static: HashablePytree

    def merge(self, trainable: Any, rest: Any) -> FunctionalModel:
        """Return the model with these arrays; each tree has None where the other has an array."""
        both = zip((Placeholder.TRAINABLE, Placeholder.REST), (trainable, rest), strict=True)
        arrays = {kind: iter(jax.tree.leaves(part)) for kind, part in both}
        # In the order of the leaves, as `__plurax_split__` visits them.
        variables = self.static.map(lambda kind: next(arrays[kind]) if isinstance(kind, Placeholder) else kind)
        return FunctionalModel(self.apply, variables, self.rule)

    def gradient(self, trainable: Any, _: Any) -> Any:
        """Return the variables with gradients in place of the trainable arrays, and None elsewhere."""
        return trainable

    def __repr__(self) -> str:
        return _name(self.apply)

    def __deepcopy__(self, _: Any) -> FunctionalStructure:
        return self  # it never changes, and a copied function would no longer be equal

    def _key(self) -> tuple[Any, ...]:
        # A tuple, since tuples compare by identity first: `==` of some callables, such as Equinox modules, is an array.
        return self.apply, self.rule, self.static

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, FunctionalStructure) and self._key() == other._key())

    def __hash__(self) -> int:
        return hash(self._key())


jax.tree_util.register_pytree_node(
    FunctionalModel,
    lambda model: ((parts := model.__plurax_split__())[1:], parts[0]),
    lambda structure, children: structure.merge(*children),
)


def _is_linen(variables: Any) -> bool:
    return isinstance(variables, Mapping) and "params" in variables


def _trains_params(path: str, leaf: Any) -> bool:
    return path.split(".")[0] == "params" and _trains_floats(path, leaf)


def _trains_floats(_: str, leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _name(apply: Callable[..., Any]) -> str:
    return getattr(apply, "__qualname__", type(apply).__name__)
