"""`Call`: a user's call as a pure function of the differentiated arguments; handles `argnums`, `has_aux` and models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from .._core.arguments import argument_name, describe, leaf_name, resolve_argnums
from .._models.hashable import Opaque
from .._models.mutation import NO_ASSIGNMENT, call_with_models, check_structure, passing_through, refuse_changes, update
from .._models.split_model import (
    bound_model,
    is_module,
    models_of,
    named_arrays,
    refuse_shared_state,
    split,
    split_tree,
    splits_of,
)
from .decisions import remembered
from .primals import Primals, dtype_of, trainable_of, with_trainable


class Call:
    """`fun(*args, **kwargs)` as a function of some of its arguments.

    A model is differentiated with respect to its trainable arrays, any other argument with respect to all its leaves.
    Called with primals, it returns `(output, rest)`, for a transform of JAX with `has_aux=True`; `finish(rest)` then
    writes the other state that `fun` changed into the models, and returns the auxiliary output.

    Args:
      api: the transform's name in errors.
      fun: the function.
      argnums: the positions, as returned by `check_argnums`.
      has_aux: whether `fun` returns a pair of an output and anything else; None for a transform without this option.
      args: the positional arguments.
      kwargs: the keyword arguments.
      holomorphic: whether `fun` is a holomorphic function of complex arguments; None for a transform without this
        option.
      integers: whether differentiated arguments may have leaves that are not floating-point. Such leaves are passed to
        `fun` and have the gradient None, as functions and strings always do.
      filters: by entry of `argnums`, an NNX filter that selects the variables of a module to differentiate; without
        one, its `nnx.Param`s.

    Attributes:
      fun: the function.
      has_aux: as above.
      primals: the differentiated values, one for each entry of `argnums`.
      selected: the positions of the primals, none of them negative.
      form: names, structures and shapes of the primals as the user passed them.
    """

    def __init__(
        self,
        api: str,
        fun: Callable[..., Any],
        argnums: Sequence[int],
        has_aux: bool | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        holomorphic: bool | None = None,
        integers: bool = False,
        filters: Mapping[int, Any] | None = None,
    ) -> None:
        self._api, self.fun, self.has_aux = api, fun, has_aux
        self.holomorphic = holomorphic
        self._owner, self._function = bound_model(fun)
        self.selected = resolve_argnums(api, fun, tuple(argnums), args)
        # Before models are split one by one, since a variable that two models share would become two arrays.
        refuse_shared_state(api, fun, self._owner, args, kwargs)
        self._models = models_of((self._owner, args, kwargs))
        split_by = dict(zip(self.selected, map((filters or {}).get, argnums), strict=True))
        parts = tuple(split_tree(arg, split_by.get(i)) for i, arg in enumerate(args))
        self._split = split_tree(self._owner), parts, split_tree(kwargs)
        names = tuple(argument_name(fun, args, i) for i in self.selected)
        for name, (i, by) in zip(names, split_by.items(), strict=True):
            if by is not None and not any(map(is_module, models_of(args[i]))):
                raise TypeError(
                    f"{api}: argnums has an nnx.DiffState for `{name}`, which is not an NNX module; pass {i} instead."
                )
        self.form = Primals(api, names, tuple(parts[i] for i in self.selected), integers)
        self.primals = self.form.values

    def remembered(self, fun: Any, options: Any) -> list[Any]:
        """Return the decisions that were cached for `fun` and calls like this one; see `decisions.py`."""
        return remembered(fun, self._split, (options, self.selected, self.has_aux, self.holomorphic))

    def check_floating(
        self, *, complex_too: bool = True, allow_int: bool = False, instead: str = "leave it out of argnums"
    ) -> None:
        """Raise if a primal cannot be differentiated; with `allow_int` integers and booleans pass.

        `instead` is the last remedy in the error.
        """
        kind: Any = jnp.inexact if complex_too else jnp.floating
        name = "floating-point arrays" if complex_too else "real floating-point arrays"
        if self.holomorphic:
            kind, name = jnp.complexfloating, "complex arrays (holomorphic=True)"
        kinds = (kind, jnp.integer, jnp.bool_) if allow_int and not self.holomorphic else (kind,)
        for place, leaf in self._leaves():
            dtype = dtype_of(leaf)
            if dtype is not None and any(jnp.issubdtype(dtype, one) for one in kinds):
                continue
            cure = "convert it" if dtype is not None or not callable(leaf) else "pass a pytree of its arrays"
            # A function that is not holomorphic has no complex derivative, but one with respect to each part.
            if dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating):
                cure = "pass its real and imaginary parts as separate arguments"
                cure += ", pass holomorphic=True if fun is holomorphic" if self.holomorphic is False else ""
            fact = f"is {describe(leaf)}, but only {name} can be differentiated"
            raise TypeError(f"{self._api}: argument `{place}` {fact}; {cure}, or {instead}.")

    def check_arrays(self) -> None:
        """Raise if a primal has a leaf that is not an array or a number."""
        for place, leaf in self._leaves():
            if dtype_of(leaf) is None:
                fact = f"is {describe(leaf)}, which has no derivative"
                raise TypeError(f"{self._api}: `{place}` {fact}; let fun close over it.")

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield the primals' leaves with names; if nothing in an argument is differentiated, all of its leaves."""
        for name, primal, whole in zip(self.form.names, self.primals, self.form.trees, strict=True):
            tree = primal if jax.tree.leaves(primal) else trainable_of(whole)
            for path, leaf in jax.tree.leaves_with_path(tree):
                yield leaf_name(name, path), leaf

    def _evaluate(
        self, primals: Sequence[Any], replaced: Mapping[int, Any], kwargs: Any
    ) -> tuple[Any, Any, Any, list[Any]]:
        """Return the output, the auxiliary output, the split arguments, and the models after the call."""
        owner, parts, _ = self._split
        args = list(parts)
        for i, primal in zip(self.selected, primals, strict=True):
            args[i] = with_trainable(args[i], primal)
        before = owner, [replaced.get(i, arg) for i, arg in enumerate(args)], kwargs
        out, left = call_with_models(self._function, before)
        out, aux = pair_of(self._api, out) if self.has_aux else (out, None)
        return out, aux, before, left

    def __call__(self, *primals: Any) -> tuple[Any, Any]:
        # The models are merged again in each trace: JAX may trace a call several times, with different tracers.
        out, aux, before, left = self._evaluate(primals, {}, self._split[2])
        after = []
        for i, (then, model) in enumerate(zip(splits_of(before), left, strict=True)):
            # Split with the same filter as before, so that the two have the same parts and can be compared.
            now = split(model, getattr(then.structure, "trains", None))
            check_structure(f"{self._api}: fun", type(model).__name__, then, now)
            assigned = set(then.changes(now)) & set(named_arrays(then.trainable))
            # Inner transforms of NNX return unchanged arrays as new objects too: then the program of the call decides.
            assigned = assigned and assigned - passing_through(self._function, before)[i]
            if assigned:
                fact = f"fun assigns the parameter `{min(assigned)}` of a model"
                raise ValueError(f"{self._api}: {fact}; {NO_ASSIGNMENT}.")
            after.append(now.rest)
        return out, (Opaque.of(aux), after)

    def evaluate(self, primals: Sequence[Any], replaced: dict[int, Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the output and the auxiliary output for other arguments; raise if the call changes a model's state.

        Args:
          primals: as for `__call__`.
          replaced: other positional arguments by their positions.
          kwargs: the keyword arguments.
        """
        out, aux, before, left = self._evaluate(primals, replaced, kwargs)
        # This is called for one example of a batch: there is a new state for each, and none could be written back.
        refuse_changes(f"{self._api}: fun", self._function, before, left, "which all examples share")
        return out, aux

    def finish(self, rest: Any) -> Any:
        """Write the state that `fun` changed into the models; return the auxiliary output."""
        aux, after = rest
        before = splits_of(self._split)
        # The trainable arrays stay as they were: after the transform they are different objects, but equal.
        left = [replace(parts, rest=now) for parts, now in zip(before, after, strict=True)]
        update(self._api, self._models, before, left, passing=lambda: passing_through(self._function, self._split))
        return aux.value


def check_output(api: str, out: Any, name: str = "output") -> None:
    """Raise if an output has no arrays, or a leaf that is not floating-point; errors call it `name`."""
    if not jax.tree.leaves(out):
        raise TypeError(f"{api}: fun must return a number or arrays to differentiate, but it returned {describe(out)}.")
    fact = "only floating-point arrays have derivatives; convert it, or return it as aux with has_aux=True"
    check_dtypes(api, name, out, jnp.inexact, fact)


def check_complex(api: str, out: Any) -> None:
    """Raise if a leaf of the output of a holomorphic function is not complex."""
    cure = "leave holomorphic out (forward mode and Hessians then need real and imaginary parts as separate arguments)"
    fact = f"holomorphic=True needs complex outputs; convert it, or {cure}"
    check_dtypes(api, "output", out, jnp.complexfloating, fact)


def check_dtypes(api: str, name: str, tree: Any, kind: Any, fact: str) -> None:
    """Raise if a leaf of `tree`, called `name` in errors, is not of this kind of dtype; `fact` ends the message."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        dtype = dtype_of(leaf)
        if dtype is None or not jnp.issubdtype(dtype, kind):
            raise TypeError(f"{api}: `{leaf_name(name, path)}` is {describe(leaf)}, but {fact}.")


def pair_of(api: str, out: Any) -> tuple[Any, Any]:
    """Return the pair that a function with `has_aux` has returned; raise if it is not a pair."""
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(f"{api}: with has_aux=True, fun must return a pair (output, aux), not {describe(out)}.")
    return tuple(out)
