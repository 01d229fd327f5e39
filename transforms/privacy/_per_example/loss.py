"""The loss of a call as a function of its parameters and one example, and as a traced program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..._calls.call import Call
from ..._calls.explicit_sharding import along, explicit_axes, with_automatic
from ..._convolutions.as_products import has_convolution
from ..._core.arguments import (
    argument_name,
    check_argnums,
    check_callable,
    count_examples,
    describe,
    leaf_name,
    resolve_argnums,
)
from ..._core.compat import JaxprEqn, one_of, varying, varying_axes
from ..._core.jaxpr import aval, bodies, holds_refs, with_inner
from ..._grad import scalar_seed
from ..._models.hashable import Opaque
from ..._models.split_model import separate_filters
from .parameter_uses import find_uses

# Operations that name a device axis but do not communicate.
_ALONE = frozenset(["axis_index", "pcast", "pvary"])


def per_example(api: str, fun: Any, argnums: Any, batch_argnums: Any) -> Callable[..., PerExample]:
    """Check the positions of parameters and examples, and return `PerExample` with its first arguments bound."""
    check_callable(api, fun)
    plain, filters = separate_filters(argnums)
    positions = check_argnums(api, plain)
    batched = check_argnums(api, batch_argnums, "batch_argnums")
    if min(*positions, *batched) < 0:
        given = f"argnums={argnums!r} and batch_argnums={batch_argnums!r}"
        raise ValueError(f"{api}: {given} must not be negative; pass positions counted from the first argument.")
    both = sorted({*positions} & {*batched})
    if both:
        raise ValueError(
            f"{api}: argument {both[0]} is in argnums and in batch_argnums, but parameters have no axis of examples; "
            "name parameters in argnums, and examples in batch_argnums."
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
    """Wrap `compute` so that examples sharded over explicit mesh axes are sharded over automatic axes inside it.

    Args:
      api: the name for errors.
      fun: the loss.
      batch_argnums: as for `per_sample_grad`.
      compute: returns arrays with the examples along axis 0, and possibly a sum over the examples first.
      sum_in: returns the part of the results of `compute` that is that sum.
      argnums: the parameters whose shapes the sum has; None if it has other shapes.
    """
    batched = batch_argnums if isinstance(batch_argnums, (tuple, list)) else (batch_argnums,)

    def computed(*args: Any, **kwargs: Any) -> Any:
        """Return the results of `compute`, sharded like its arguments."""
        # JAX cannot map over examples that are sharded over explicit axes; over automatic axes it can.
        entry, axes = explicit_axes(([args[i] for i in batched if i < len(args)], kwargs))
        if not axes:
            return compute(*args, **kwargs)
        parameters: Any = ()
        if argnums is not None:
            plain, filters = separate_filters(argnums if isinstance(argnums, (tuple, list)) else (argnums,))
            call = Call(api, fun, plain, False, args, {}, integers=True, filters=filters)
            parameters = call.form.gradients(call.primals)

        def place(out: Any) -> list[PartitionSpec]:
            """Shard the sum like the parameters, and all other results along their examples."""
            summed = jax.tree.leaves(sum_in(out))
            like = [along(axes, x) for x in jax.tree.leaves(parameters)] or [PartitionSpec()] * len(summed)
            return like + [entry] * (sum(isinstance(x, jax.Array) for x in jax.tree.leaves(out)) - len(summed))

        return with_automatic(api, lambda args, kwargs: compute(*args, **kwargs), (args, kwargs), axes, place)

    return computed


class PerExample:
    """The loss `fun(*args, **kwargs)` as a function of its parameters and one example of the batch.

    Args:
      api: the name of the transform for errors.
      fun: the loss.
      argnums: the positions of the parameters, as returned by `check_argnums`.
      filters: for some positions, an NNX filter that selects the parameters of a module.
      batch_argnums: the positions of the arguments with the examples along axis 0.
      has_aux: whether `fun` returns a pair of the loss and an auxiliary output.
      keep_batch_dim: whether `fun` receives an example with a leading axis of size 1.
      prng_argnum: the position of a key to split into one key for each example.
      args: the positional arguments.
      kwargs: the keyword arguments, which have the examples along axis 0 too.
      scalar: whether `fun` returns a real scalar; otherwise an array of outputs, with an axis of size 1 for the example
        if `keep_batch_dim`.

    Attributes:
      parameters: the parameters, a flat list of arrays.
      examples: the arguments that differ between the examples, a flat list of arrays.
      size: the number of examples.
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
        scalar: bool = True,
    ) -> None:
        self._api, self._has_aux, self._keep, self._scalar = api, has_aux, keep_batch_dim, scalar
        self._call = Call(api, fun, argnums, has_aux, args, kwargs, integers=True, filters=filters)
        self._call.check_floating()
        self.parameters, self._treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, self._call.primals))
        batched = resolve_argnums(api, fun, tuple(batch_argnums), args, "batch_argnums")
        self.size = count_examples(api, fun, batched, args)
        batch = {i: args[i] for i in batched}
        for name, value in kwargs.items():
            for path, leaf in jax.tree.leaves_with_path(value):
                if tuple(getattr(leaf, "shape", ()))[:1] != (self.size,):
                    given = f"keyword argument `{leaf_name(name, path)}` is {describe(leaf)}"
                    expected = f"keyword arguments must have the {self.size} examples along axis 0"
                    raise ValueError(f"{api}: {given}, but {expected}; let fun close over values that examples share.")
        keys: Any = ()
        self._prng: int | None = None
        if prng_argnum is not None:
            (self._prng,) = resolve_argnums(api, fun, (prng_argnum,), args, "prng_argnum")
            if self._prng in (*self._call.selected, *batched):
                named = f"prng_argnum={prng_argnum} names `{argument_name(fun, args, self._prng)}`"
                raise ValueError(f"{api}: {named}, which has parameters or examples; pass the position of a key.")
            keys = jax.tree.map(lambda key: jax.random.split(key, self.size), args[self._prng])
        # One flat list of all arrays that differ between examples: mapping, grouping and sharding treat them alike,
        # whatever argument they come from.
        examples, self._example_treedef = jax.tree.flatten((batch, keys, kwargs))
        self.examples = list(map(jnp.asarray, examples))
        # In a `shard_map`, the gradient of a replicated value is summed over the devices, which would destroy the norms
        # of single examples. Parameters marked as device-varying have a separate gradient on each device.
        axes = frozenset[str]().union(*map(varying_axes, [*self.parameters, *self.examples]))
        self.parameters = [varying(x, axes) for x in self.parameters]
        self.examples = [varying(x, axes) for x in self.examples]
        manual = jax.sharding.get_abstract_mesh().manual_axes
        exchanged = self.program.exchanged_over(manual) if manual and self.size else ""
        if exchanged:
            raise ValueError(
                f"{api}: the loss of one example has {exchanged}, which combines devices of the enclosing shard_map; "
                "move it out of the loss."
            )

    def loss(self, parameters: Sequence[Any], example: Sequence[Any]) -> tuple[Any, Opaque]:
        """Return the loss of one example, and the auxiliary output of `fun`."""
        batch, keys, kwargs = jax.tree.unflatten(self._example_treedef, example)
        if self._keep:
            batch = jax.tree.map(lambda x: jnp.expand_dims(x, 0), batch)
        if self._prng is not None:
            batch[self._prng] = keys
        value, aux = self._call.evaluate(jax.tree.unflatten(self._treedef, list(parameters)), batch, kwargs)
        if self._scalar:
            scalar_seed(f"{self._api}: fun", value, "return the loss of one example")
        else:
            value = _outputs(self._api, value, self._keep)
        # Convert numbers to arrays, so that they are returned for each example like all arrays.
        numbers = (bool, int, float, complex, np.ndarray, np.generic)
        aux = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, numbers) else x, aux)
        return value, Opaque.of(aux)

    @cached_property
    def program(self) -> ExampleProgram:
        """Trace the loss once. Values that it closes over belong to the trace in which this is first accessed."""
        return ExampleProgram(self.loss, self.parameters, self.examples)

    def aux(self, found: Opaque) -> Any:
        """Return the auxiliary output of `fun`, without the axis of size 1 that `keep_batch_dim` adds."""
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
        """Return a flat list of gradients in the structure of the arguments; if `bare`, of the only argument."""
        values = jax.tree.unflatten(self._treedef, list(leaves))
        forms = self._call.form.gradients(values)
        return forms[0] if bare else forms

    def numbers(self, bare: bool) -> Any:
        """Return the index of each parameter in the structure of the gradients, which may have another order."""
        return self.gradients(list(range(len(self.parameters))), bare)


def _outputs(api: str, value: Any, keep_batch_dim: bool) -> jax.Array:
    """Return the outputs for one example; raise if `value` is not an array of them."""
    shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{api}: fun must return a real floating-point array of outputs, but it returned {describe(value)}."
        )
    if keep_batch_dim and shape[:1] != (1,):
        given = f"for a batch of one example it returned {describe(value)}"
        raise ValueError(f"{api}: fun must map a batch to outputs along axis 0, but {given}.")
    return value[0] if keep_batch_dim else value


class ExampleProgram:
    """The loss of one example as a traced program.

    Args:
      loss: a function of the parameters (a list of arrays) and one example (a list of arrays) that returns a scalar and
        an auxiliary output.
      parameters: the parameters.
      examples: the examples, along axis 0 of each array; only their shapes and dtypes matter.

    Attributes:
      parameters: the parameters.
      closed: the jaxpr; its inputs are the parameters, an example, and a zero.
      treedef: the structure of its results.
      refusal: the reason why its parameter uses do not determine each example's gradient; empty if they do.
      plan: the plan of each of its operations.
      uses: the parameter uses, where parameters meet data.
    """

    def __init__(
        self, loss: Callable[..., tuple[Any, Any]], parameters: Sequence[Any], examples: Sequence[Any]
    ) -> None:
        self.parameters = list(parameters)
        one = [one_of(x) for x in examples]
        # A loss that depends on parameters alone needs a use too: this zero counts as data, and adding it is a use.
        zero = jax.ShapeDtypeStruct((), jnp.float32)

        def of_leaves(*leaves: Any) -> Any:
            (*inputs, zero) = leaves
            value, aux = loss(inputs[: len(parameters)], inputs[len(parameters) :])
            value = jnp.asarray(value)
            return value + zero.astype(value.dtype), aux

        self.closed, shapes = jax.make_jaxpr(of_leaves, return_shape=True)(*self.parameters, *one, zero)
        self.treedef = jax.tree.structure(shapes)
        self.plan = find_uses(self.closed, len(self.parameters))
        self.uses = self.plan.uses
        # The derivative of an operation without a rule evaluates it again, which would draw other random numbers.
        drawing = _first(use.eqn for use in self.uses if any(map(_draws_as_mapped, with_inner([use.eqn]))))
        self.refusal = f"{drawing} draws random numbers that depend on how it is mapped" if drawing else ""
        if any(map(holds_refs, with_inner(self.closed.jaxpr.eqns))):
            self.refusal = "the loss has a jax.Ref, whose values are not part of the dataflow"

    def exchanged_over(self, axes: Iterable[str]) -> str:
        """Return the name of an operation that communicates over one of these axes; empty if there is none."""
        over = frozenset(axes)

        def exchanges(eqn: JaxprEqn) -> bool:
            named = eqn.params.get("axes", ()), eqn.params.get("axis_name", ())
            return eqn.primitive.name not in _ALONE and not over.isdisjoint(jax.tree.leaves(named))

        return _first(filter(exchanges, with_inner(self.closed.jaxpr.eqns)))

    def mapped_wrongly(self) -> bool:
        """Return whether `jax.vmap` of its gradient may be wrong if the examples are sharded over devices.

        XLA (of jax 0.10 and 0.11) partitions the kernel derivative of a channels-last convolution incorrectly.
        """
        return any(use.eqn.primitive.name == "conv_general_dilated" and use.operand == 1 for use in self.uses)

    def wrong_inside(self) -> str:
        """Return the name of a parameter use with such a convolution in a body; empty if there is none.

        No rule covers such an operation, so every method maps its derivative.
        """
        return _first(use.eqn for use in self.uses if any(map(has_convolution, bodies(use.eqn))))


def _first(eqns: Iterable[JaxprEqn]) -> str:
    """Return the name of the first operation; empty if there is none."""
    return next((eqn.primitive.name for eqn in eqns), "")


def _draws_as_mapped(eqn: JaxprEqn) -> bool:
    """Return whether an operation draws random numbers that differ under `jax.vmap`."""
    name, keys = eqn.primitive.name, [str(aval(x).dtype) for x in (*eqn.invars, *eqn.outvars)]
    drawn = name in ("rng_bit_generator", "rng_uniform") or name.startswith("random_")
    # Of JAX's own generators, only threefry draws the same numbers with and without `jax.vmap`.
    return drawn and all(key != "key<fry>" for key in keys)
