"""A loss and the arguments of a call as a function of the parameters and of one example, and as a program of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
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
from ..._core.compat import one_of, varying, varying_axes
from ..._core.jaxpr import aval, bodies, holds_refs, with_inner
from ..._grad import scalar_seed
from ..._models.hashable import Opaque
from ..._models.split_model import separate_filters
from .parameter_uses import find_uses

# Operations that name an axis of devices, though each device does them alone.
_ALONE = frozenset(["axis_index", "pcast", "pvary"])


def per_example(api: str, fun: Any, argnums: Any, batch_argnums: Any) -> Callable[..., PerExample]:
    """Check the positions of parameters and examples, and return `PerExample` with its first arguments filled in."""
    check_callable(api, fun)
    plain, filters = separate_filters(argnums)
    positions = check_argnums(api, plain)
    batched = check_argnums(api, batch_argnums, "batch_argnums")
    if min(*positions, *batched) < 0:
        given = f"argnums={argnums!r} and batch_argnums={batch_argnums!r}"
        raise ValueError(f"{api}: {given} must not be negative; count from the first argument.")
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
            parameters = call.form.gradients(call.primals)

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
                    given = f"keyword argument `{leaf_name(name, path)}` is {describe(leaf)}"
                    expected = f"keyword arguments have the {self.size} examples along axis 0"
                    raise ValueError(f"{api}: {given}, but {expected}; let fun close over what they share.")
        keys: Any = ()
        self._prng: int | None = None
        if prng_argnum is not None:
            (self._prng,) = resolve_argnums(api, fun, (prng_argnum,), args, "prng_argnum")
            if self._prng in (*self._call.selected, *batched):
                named = f"prng_argnum={prng_argnum} names `{argument_name(fun, args, self._prng)}`"
                raise ValueError(f"{api}: {named}, which has parameters or examples; name the argument that is a key.")
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
                f"{api}: the loss of one example has {exchanged}, which combines devices of the shard_map around; do "
                "that outside of the loss."
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
        forms = self._call.form.gradients(values)
        return forms[0] if bare else forms


class ExampleProgram:
    """A loss of one example, traced once.

    Args:
      loss: from the parameters (a list of arrays) and one example (a list of arrays) to a scalar and anything else.
      parameters: the parameters.
      examples: the examples, along axis 0 of each array; of which the shapes count.

    Attributes:
      parameters: the parameters.
      closed: the program, of the parameters, an example, and a zero.
      treedef: the structure of what it returns.
      refusal: why its uses do not say what each example's gradient is; empty if they do.
      plan: what to do with each of its operations.
      uses: where parameters meet data.
    """

    def __init__(
        self, loss: Callable[..., tuple[Any, Any]], parameters: Sequence[Any], examples: Sequence[Any]
    ) -> None:
        self.parameters = list(parameters)
        one = [one_of(x) for x in examples]
        # A loss of parameters alone must meet data too: this zero counts as data, and its sum with the loss is a use.
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
        # An operation that is taken as a whole is evaluated once more, and would draw other numbers then.
        drawing = _first(use.eqn for use in self.uses if any(map(_draws_as_mapped, with_inner([use.eqn]))))
        self.refusal = f"{drawing} draws random numbers that depend on how it is mapped" if drawing else ""
        if any(map(holds_refs, with_inner(self.closed.jaxpr.eqns))):
            self.refusal = "the loss has a jax.Ref, through which values go unseen"

    def exchanged_over(self, axes: Iterable[str]) -> str:
        """Return the name of an operation over the devices of some of these axes; empty if there is none."""
        over = frozenset(axes)

        def exchanges(eqn: JaxprEqn) -> bool:
            named = eqn.params.get("axes", ()), eqn.params.get("axis_name", ())
            return eqn.primitive.name not in _ALONE and not over.isdisjoint(jax.tree.leaves(named))

        return _first(filter(exchanges, with_inner(self.closed.jaxpr.eqns)))

    def mapped_wrongly(self) -> bool:
        """Return whether `jax.vmap` of its gradient may be wrong where the examples are divided among devices.

        XLA (of jax 0.10 and 0.11) divides the derivatives by kernels of convolutions with the channels last wrongly.
        """
        return any(use.eqn.primitive.name == "conv_general_dilated" and use.operand == 1 for use in self.uses)

    def wrong_inside(self) -> str:
        """Return the name of an operation on parameters that has such a convolution in a body; empty if there is none.

        It has no rule of its own, so its derivative is mapped, by whichever method.
        """
        return _first(use.eqn for use in self.uses if any(map(has_convolution, bodies(use.eqn))))


def _first(eqns: Iterable[JaxprEqn]) -> str:
    """Return the name of the first of some operations; empty if there is none."""
    return next((eqn.primitive.name for eqn in eqns), "")


def _draws_as_mapped(eqn: JaxprEqn) -> bool:
    """Return whether an operation draws random numbers that change with the `jax.vmap` around it."""
    name, keys = eqn.primitive.name, [str(aval(x).dtype) for x in (*eqn.invars, *eqn.outvars)]
    drawn = name in ("rng_bit_generator", "rng_uniform") or name.startswith("random_")
    # Of JAX's own generators, threefry draws the same, mapped or not.
    return drawn and all(key != "key<fry>" for key in keys)
