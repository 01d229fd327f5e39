"""A loss and the arguments of a call as a function of the parameters and of one example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..._calls.call import Call
from ..._calls.explicit_sharding import along, explicit_axes, with_automatic
from ..._core.arguments import (
    argument_name,
    check_argnums,
    check_callable,
    count_examples,
    describe,
    leaf_name,
    resolve_argnums,
)
from ..._core.compat import varying, varying_axes
from ..._grad import scalar_seed
from ..._models.hashable import Opaque
from ..._models.split_model import separate_filters
from .example_program import ExampleProgram


def per_example(api: str, fun: Any, argnums: Any, batch_argnums: Any) -> Callable[..., PerExample]:
    """Check the positions of parameters and examples, and return `PerExample` with its first arguments filled in."""
    check_callable(api, fun)
    plain, filters = separate_filters(argnums)
    positions = check_argnums(api, plain)
    batched = check_argnums(api, batch_argnums, "batch_argnums")
    if min(*positions, *batched) < 0:
        raise ValueError(
            f"{api}: argnums={argnums!r} and batch_argnums={batch_argnums!r} must not be negative; count from the "
            "first argument."
        )
    both = sorted({*positions} & {*batched})
    if both:
        raise ValueError(
            f"{api}: argument {both[0]} is in argnums and in batch_argnums, but parameters have no axis of examples; "
            "name it in one of them."
        )

    return partial(PerExample, api, fun, positions, filters, batched)


def on_any_mesh(
    api: str,
    fun: Callable[..., Any],
    batch_argnums: Any,
    compute: Callable[..., Any],
    sum_in: Callable[[Any], Any] = lambda _: (),
    argnums: Any = None,
) -> Callable[..., Any]:
    """Return `compute` such that the examples are divided over no explicit axes of a mesh inside of it.

    Args:
      api: the name in errors.
      fun: the loss.
      batch_argnums: as for `per_sample_grad`.
      compute: returns arrays with the examples along axis 0, except for those of a sum over them.
      sum_in: picks that sum, which comes first, out of what `compute` returns.
      argnums: the parameters whose shapes the sum has; None where it has others.
    """
    batched = batch_argnums if isinstance(batch_argnums, (tuple, list)) else (batch_argnums,)

    def computed(*args: Any, **kwargs: Any) -> Any:
        """Return what `compute` returns, divided as its arguments are."""
        # JAX cannot map over examples that are divided over explicit axes; with automatic ones it can.
        entry, axes = explicit_axes(([args[i] for i in batched if i < len(args)], kwargs))
        if not axes:
            return compute(*args, **kwargs)
        parameters: Any = ()
        if argnums is not None:
            plain, filters = separate_filters(argnums if isinstance(argnums, (tuple, list)) else (argnums,))
            call = Call(api, fun, plain, False, args, {}, integers=True, filters=filters)
            parameters = [call.gradient(i, primal) for i, primal in enumerate(call.primals)]

        def place(out: Any) -> list[PartitionSpec]:
            """Divide the sum as the parameters are divided, and all else along its examples."""
            summed = jax.tree.leaves(sum_in(out))
            like = [along(axes, x) for x in jax.tree.leaves(parameters)] or [PartitionSpec()] * len(summed)
            return like + [entry] * (sum(isinstance(x, jax.Array) for x in jax.tree.leaves(out)) - len(summed))

        return with_automatic(api, lambda args, kwargs: compute(*args, **kwargs), (args, kwargs), axes, place)

    return computed


class PerExample:
    """The loss `fun(*args, **kwargs)` of its parameters at each example of a batch.

    Args:
      api: the name of the transform in errors.
      fun: the loss.
      argnums: the positions of the parameters, as `check_argnums` gives them.
      filters: which variables of a module are its parameters, for some of them.
      batch_argnums: the positions of the arguments with the examples along axis 0.
      has_aux: whether `fun` returns a pair of the loss and anything else.
      keep_batch_dim: whether `fun` gets an example with an axis of size 1 in front.
      prng_argnum: the position of a key to split, one for each example.
      args: the positional arguments.
      kwargs: the keyword arguments, which have the examples along axis 0 too.

    Attributes:
      parameters: the parameters, a flat list of arrays.
      examples: the arguments that differ between the examples, a flat list of arrays.
      size: how many examples there are.
    """

    def __init__(
        self,
        api: str,
        fun: Callable[..., Any],
        argnums: Sequence[int],
        filters: dict[int, Any],
        batch_argnums: Sequence[int],
        has_aux: bool,
        keep_batch_dim: bool,
        prng_argnum: int | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._api, self._has_aux, self._keep = api, has_aux, keep_batch_dim
        self._call = Call(api, fun, argnums, has_aux, args, kwargs, integers=True, filters=filters)
        self._call.check_floating()
        self.parameters, self._treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, self._call.primals))
        batched = resolve_argnums(api, fun, tuple(batch_argnums), args, "batch_argnums")
        self.size = count_examples(api, fun, batched, args)
        batch = {i: args[i] for i in batched}
        for name, value in kwargs.items():
            for path, leaf in jax.tree.leaves_with_path(value):
                if tuple(getattr(leaf, "shape", ()))[:1] != (self.size,):
                    raise ValueError(
                        f"{api}: keyword argument `{leaf_name(name, path)}` is {describe(leaf)}, but keyword arguments "
                        f"have the {self.size} examples along axis 0; let fun close over what they share."
                    )
        keys: Any = ()
        self._prng: int | None = None
        if prng_argnum is not None:
            (self._prng,) = resolve_argnums(api, fun, (prng_argnum,), args, "prng_argnum")
            if self._prng in (*self._call.selected, *batched):
                raise ValueError(
                    f"{api}: prng_argnum={prng_argnum} names `{argument_name(fun, args, self._prng)}`, which has "
                    "parameters or examples; name the argument that is a key, or leave prng_argnum out."
                )
            keys = jax.tree.map(lambda key: jax.random.split(key, self.size), args[self._prng])
        # One flat list of all that differs between examples: it is what is mapped, cut into groups, and divided over
        # devices, whichever argument an array came in.
        examples, self._example_treedef = jax.tree.flatten((batch, keys, kwargs))
        self.examples = list(map(jnp.asarray, examples))
        # In a `shard_map`, the gradient of what all devices share is a sum over them, and no norm can be taken of that:
        # as values that differ between devices, parameters have each device's own gradient.
        axes = frozenset[str]().union(*map(varying_axes, [*self.parameters, *self.examples]))
        self.parameters = [varying(x, axes) for x in self.parameters]
        self.examples = [varying(x, axes) for x in self.examples]
        manual = jax.sharding.get_abstract_mesh().manual_axes
        exchanged = self.program.exchanged_over(manual) if manual and self.size else ""
        if exchanged:
            raise ValueError(
                f"{api}: the loss of one example has {exchanged}, which combines devices of the shard_map around, so "
                "that it is not the loss of one example; do that outside of it."
            )

    def loss(self, parameters: Sequence[Any], example: Sequence[Any]) -> tuple[Any, Opaque]:
        """Return the loss of one example, and what else `fun` returns."""
        batch, keys, kwargs = jax.tree.unflatten(self._example_treedef, example)
        if self._keep:
            batch = jax.tree.map(lambda x: jnp.expand_dims(x, 0), batch)
        if self._prng is not None:
            batch[self._prng] = keys
        value, aux = self._call.evaluate(jax.tree.unflatten(self._treedef, list(parameters)), batch, kwargs)
        scalar_seed(f"{self._api}: fun", value, "return the loss of one example")
        # Numbers become arrays, so that they come out once for each example like all else.
        numbers = (bool, int, float, complex, np.ndarray, np.generic)
        aux = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, numbers) else x, aux)
        return value, Opaque.of(aux)

    @cached_property
    def program(self) -> ExampleProgram:
        """Trace the loss. What it closes over belongs to the trace in which this is first asked for."""
        return ExampleProgram(self.loss, self.parameters, self.examples)

    def aux(self, found: Opaque) -> Any:
        """Return what `fun` returned in addition to the loss, without the axis of size 1 that it got."""
        if self._keep:
            found = jax.tree.map(lambda x: x.squeeze(1) if x.ndim > 1 and x.shape[1] == 1 else x, found)
        return found.value

    def names(self) -> list[str]:
        """List the paths of the parameters, in the order of `parameters`."""
        return [
            leaf_name(self._call.form.names[i], path)
            for i, primal in enumerate(self._call.primals)
            for path, _ in jax.tree.leaves_with_path(primal)
        ]

    def gradients(self, leaves: Sequence[Any], bare: bool) -> Any:
        """Return gradients of the parameters with the structure of the arguments; of one argument alone if `bare`."""
        values = jax.tree.unflatten(self._treedef, list(leaves))
        forms = tuple(self._call.gradient(i, value) for i, value in enumerate(values))
        return forms[0] if bare else forms
