"""The loss of one example as a program, and where its parameters meet data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ..._convolutions.as_products import has_convolution
from ..._core.compat import one_of
from ..._core.jaxpr import aval, bodies, holds_refs, with_inner
from .parameter_uses import find_uses

# Operations that name an axis of devices, though each device does them alone.
_ALONE = frozenset(["axis_index", "pcast", "pvary"])


class ExampleProgram:
    """A loss of one example, traced once.

    Args:
      loss: from the parameters (a list of arrays) and one example (a list of arrays) to a scalar and anything else.
      parameters: the parameters.
      examples: the examples, along axis 0 of each array; of which the shapes count.

    Attributes:
      parameters: the parameters, as arrays.
      closed: the program, of the parameters, an example, and a zero.
      treedef: the structure of what it returns.
      has_refs: whether it has mutable arrays, `jax.Ref`.
      draws_inside: an operation on parameters and data whose bodies draw random numbers that differ with the transforms
        around (those of "rbg" keys do); empty if there is none.
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
        self.has_refs = any(map(holds_refs, with_inner(self.closed.jaxpr.eqns)))
        self.plan = find_uses(self.closed, len(self.parameters))
        self.uses = self.plan.uses
        drawing = (use.eqn for use in self.uses if any(map(_draws_as_mapped, with_inner([use.eqn]))))
        self.draws_inside = next((eqn.primitive.name for eqn in drawing), "")

    def exchanged_over(self, axes: Iterable[str]) -> str:
        """Return the name of an operation over the devices of some of these axes; empty if there is none."""
        over = frozenset(axes)

        def exchanges(eqn: JaxprEqn) -> bool:
            named = eqn.params.get("axes", ()), eqn.params.get("axis_name", ())
            return eqn.primitive.name not in _ALONE and not over.isdisjoint(jax.tree.leaves(named))

        return next((eqn.primitive.name for eqn in with_inner(self.closed.jaxpr.eqns) if exchanges(eqn)), "")

    def mapped_wrongly(self) -> bool:
        """Return whether `jax.vmap` of its gradient may be wrong where the examples are divided among devices.

        XLA (of jax 0.10 and 0.11) divides the derivatives by kernels of convolutions with the channels last wrongly.
        """
        return any(use.eqn.primitive.name == "conv_general_dilated" and use.operand == 1 for use in self.uses)

    def wrong_inside(self) -> str:
        """Return the name of an operation on parameters that has such a convolution in a body; empty if there is none.

        It has no rule of its own, so its derivative is mapped, by whichever method.
        """
        found = (use.eqn for use in self.uses if any(map(has_convolution, bodies(use.eqn))))
        return next((eqn.primitive.name for eqn in found), "")


def _draws_as_mapped(eqn: JaxprEqn) -> bool:
    """Return whether an operation draws random numbers that change with the `jax.vmap` around it."""
    name, keys = eqn.primitive.name, [str(aval(x).dtype) for x in (*eqn.invars, *eqn.outvars)]
    drawn = name in ("rng_bit_generator", "rng_uniform") or name.startswith("random_")
    # Of JAX's own generators, threefry draws the same, mapped or not.
    return drawn and all(key != "key<fry>" for key in keys)
