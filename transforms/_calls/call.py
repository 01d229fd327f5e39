"""A call as a function of the arguments it is differentiated in: `argnums`, `has_aux` and models, in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from .._core.arguments import argument_name, describe, leaf_name, resolve_argnums
from .._models.hashable import Opaque
from .._models.mutation import call_with_models, check_structure, passing_through, refuse_changes, update
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

    A model is differentiated with respect to its trainable arrays, any other argument with respect to all of it. Called
    with primals it returns `(output, rest)`, which `jax` transforms with `has_aux=True`; `finish(rest)` then writes
    into the models what `fun` changed of their other state, and returns the auxiliary output.

    Args:
      api: what to call the transform in an error.
      fun: the function.
      argnums: the positions as `check_argnums` gives them.
      has_aux: whether `fun` returns a pair of an output and anything else.
      args: the positional arguments.
      kwargs: the keyword arguments.
      holomorphic: whether it is a holomorphic function of complex arguments; None for a transform that never asks.
      integers: whether the arguments that are differentiated may have leaves that are not of floating point, which pass
        through to `fun` with None for their gradient, as functions and text always do.
      filters: for some of `argnums` which variables of a module are differentiated, as a filter of NNX; its `nnx.Param`
        where there is none.

    Attributes:
      fun: the function.
      primals: what is differentiated, one for each of `argnums`.
      selected: their positions, none of them negative.
      form: their names, structures and shapes as the user knows them.
    """

    def __init__(
        self,
        api: str,
        fun: Callable[..., Any],
        argnums: Sequence[int],
        has_aux: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        holomorphic: bool | None = None,
        integers: bool = False,
        filters: Mapping[int, Any] | None = None,
    ) -> None:
        self._api, self.fun, self._has_aux = api, fun, has_aux
        self.holomorphic = holomorphic
        self._owner, self._function = bound_model(fun)
        self.selected = resolve_argnums(api, fun, tuple(argnums), args)
        # Before models are split one by one: a variable that two of them share would be two arrays.
        refuse_shared_state(api, fun, self._owner, args, kwargs)
        self._models = models_of((self._owner, args, kwargs))
        split_by = dict(zip(self.selected, map((filters or {}).get, argnums), strict=True))
        parts = tuple(split_tree(arg, split_by.get(i)) for i, arg in enumerate(args))
        self._split = split_tree(self._owner), parts, split_tree(kwargs)
        names = tuple(argument_name(fun, args, i) for i in self.selected)
        for name, (i, by) in zip(names, split_by.items(), strict=True):
            if by is not None and not any(map(is_module, models_of(args[i]))):
                raise TypeError(
                    f"{api}: argnums has an nnx.DiffState for `{name}`, not an NNX module; write {i} alone."
                )
        self.form = Primals(api, names, tuple(parts[i] for i in self.selected), integers)
        self.primals = self.form.values

    def remembered(self, fun: Any, options: Any) -> list[Any]:
        """Return what was decided for `fun`, of which this is a call, and calls like this one: see `decisions.py`."""
        return remembered(fun, self._split, (options, self.selected, self._has_aux, self.holomorphic))

    def check_floating(self, *, complex_too: bool = True, allow_int: bool = False) -> None:
        """Raise if a primal cannot be differentiated; with `allow_int` integers and booleans pass."""
        kind: Any = jnp.inexact if complex_too else jnp.floating
        name = "floating point" if complex_too else "real floating point"
        if self.holomorphic:
            kind, name = jnp.complexfloating, "complex floating point, with holomorphic=True,"
        kinds = (kind, jnp.integer, jnp.bool_) if allow_int and not self.holomorphic else (kind,)
        for place, leaf in self._leaves():
            dtype = dtype_of(leaf)
            if dtype is not None and any(jnp.issubdtype(dtype, one) for one in kinds):
                continue
            cure = "convert it"
            # A function that is not holomorphic has no complex derivative, but one by each part.
            if dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating):
                cure = "give its real and imaginary parts, as arguments of their own"
                cure += ", pass holomorphic=True if fun is holomorphic" if self.holomorphic is False else ""
            fact = f"is {describe(leaf)}, but only arrays of {name} can be differentiated"
            raise TypeError(f"{self._api}: argument `{place}` {fact}; {cure}, or leave it out of argnums.")

    def check_arrays(self) -> None:
        """Raise if a primal has a leaf that is not an array or a number."""
        for place, leaf in self._leaves():
            if dtype_of(leaf) is None:
                fact = f"is {describe(leaf)}, which has no derivative"
                raise TypeError(f"{self._api}: `{place}` {fact}; let fun close over it.")

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield the leaves of the primals by name; all leaves of an argument in which nothing is differentiated."""
        for name, primal, whole in zip(self.form.names, self.primals, self.form.trees, strict=True):
            tree = primal if jax.tree.leaves(primal) else trainable_of(whole)
            for path, leaf in jax.tree.leaves_with_path(tree):
                yield leaf_name(name, path), leaf

    def _evaluate(
        self, primals: Sequence[Any], replaced: Mapping[int, Any], kwargs: Any
    ) -> tuple[Any, Any, Any, list[Any]]:
        """Return the output, the auxiliary output, the split arguments, and the models as the call has left them."""
        owner, parts, _ = self._split
        args = list(parts)
        for i, primal in zip(self.selected, primals, strict=True):
            args[i] = with_trainable(args[i], primal)
        before = owner, [replaced.get(i, arg) for i, arg in enumerate(args)], kwargs
        out, left = call_with_models(self._function, before)
        out, aux = pair_of(self._api, out) if self._has_aux else (out, None)
        return out, aux, before, left

    def __call__(self, *primals: Any) -> tuple[Any, Any]:
        # The models are merged anew in each trace: JAX may trace a call several times, each with tracers of its own.
        out, aux, before, left = self._evaluate(primals, {}, self._split[2])
        after = []
        for i, (then, model) in enumerate(zip(splits_of(before), left, strict=True)):
            # With the filter of before: under another one the two would have other parts, and not compare.
            now = split(model, getattr(then.structure, "trains", None))
            check_structure(f"{self._api}: fun", type(model).__name__, then, now)
            assigned = set(then.changes(now)) & set(named_arrays(then.trainable))
            # Inner transforms of NNX make new objects of unchanged arrays too: then the program of the call decides.
            assigned = assigned and assigned - passing_through(self._function, before)[i]
            if assigned:
                cure = "keep values that fun computes in another kind of variable, such as nnx.BatchStat"
                raise ValueError(f"{self._api}: fun assigns the parameter `{min(assigned)}` of a model; {cure}.")
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
        # This is called for one example of many: no single one of their states could be written back.
        why, more = "of which there is one for all examples; use", "; call nnx.RNN with initial_carry="
        refuse_changes(f"{self._api}: fun", self._function, before, left, why, more)
        return out, aux

    def finish(self, rest: Any) -> Any:
        """Write what `fun` changed into the models; return the auxiliary output."""
        aux, after = rest
        before = splits_of(self._split)
        # The trainable arrays stay as they were: they are other objects after the transform, but equal.
        left = [replace(parts, rest=now) for parts, now in zip(before, after, strict=True)]
        update(self._api, self._models, before, left, passing=lambda: passing_through(self._function, self._split))
        return aux.value


def check_output(api: str, out: Any, name: str = "output") -> None:
    """Raise if an output has no arrays, or a part that is not of floating point; errors call it `name`."""
    if not jax.tree.leaves(out):
        raise TypeError(f"{api}: fun must return a number or arrays to differentiate, but it returned {describe(out)}.")
    fact = "only floating point has derivatives; convert it, or return it as auxiliary output with has_aux=True"
    check_dtypes(api, name, out, jnp.inexact, fact)


def check_complex(api: str, out: Any) -> None:
    """Raise if a part of an output is not complex, as those of a holomorphic function are."""
    fact = "holomorphic=True takes complex outputs only; convert it, or leave holomorphic out"
    check_dtypes(api, "output", out, jnp.complexfloating, fact)


def check_dtypes(api: str, name: str, tree: Any, kind: Any, fact: str) -> None:
    """Raise if a leaf of what errors call `name` is not of this kind of dtype; `fact` says why, and what to do."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        dtype = dtype_of(leaf)
        if dtype is None or not jnp.issubdtype(dtype, kind):
            raise TypeError(f"{api}: `{leaf_name(name, path)}` is {describe(leaf)}, but {fact}.")


def pair_of(api: str, out: Any) -> tuple[Any, Any]:
    """Return what a function with `has_aux` has returned; raise if it is not a pair."""
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(f"{api}: with has_aux=True, fun must return a pair (output, aux), not {describe(out)}.")
    return tuple(out)
