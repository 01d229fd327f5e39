"""`Dual` and `dual`: forward-mode differentiation with dual numbers, pairs of a value and its tangent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey, register_pytree_with_keys

from ._calls.call import Call
from ._core.arguments import check_callable, wrap_like
from ._models.split_model import bound_model, is_model, is_split, refuse_shared_state, split_tree


@dataclass(frozen=True, eq=False)
class Dual:
    """A value and its tangent: the dual number primal + ε·tangent, with ε² = 0.

    A pytree of both parts, so `jit` and `vmap` accept it, and `in_axes=0` maps both. Only the constructor checks that
    the two match; `jax.tree.map` may replace either with anything.

    Args:
      primal: an array, a number, a Flax NNX module, or a pytree of them.
      tangent: the direction of the primal, with its structure, shapes and dtypes. For a 0-d array it may be a Python
        number. For arrays of integers, booleans or keys it is zeros of dtype `jax.dtypes.float0`, as for `jax.jvp`. For
        a module it is an `nnx.State` of its `nnx.Param`s, such as `grad` returns, or a dict of the same structure.

    Raises:
      TypeError: the primal has leaves other than arrays and numbers; the tangent of an integer array is not zeros of
        dtype `jax.dtypes.float0`.
      ValueError: the tangent differs from the primal in structure, shape or dtype.

    Source:
      W. K. Clifford, Preliminary sketch of biquaternions (1873); `torch.autograd.forward_ad.make_dual`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import Dual
      >>> Dual(jnp.arange(2.0), jnp.ones(2))
      Dual(primal=Array([0., 1.], dtype=float32), tangent=Array([1., 1.], dtype=float32))
    """

    primal: Any
    tangent: Any

    def __post_init__(self) -> None:
        call = Call("Dual", lambda primal: primal, (0,), False, (self.primal,), {})
        call.check_arrays()
        call.form.tangents((self.tangent,))


def _unchecked(primal: Any, tangent: Any) -> Dual:
    """Return a `Dual` without checks, for JAX, which unflattens pytrees with placeholders, and for our own results."""
    pair = object.__new__(Dual)
    object.__setattr__(pair, "primal", primal)
    object.__setattr__(pair, "tangent", tangent)
    return pair


register_pytree_with_keys(
    Dual,
    lambda pair: (((GetAttrKey("primal"), pair.primal), (GetAttrKey("tangent"), pair.tangent)), None),
    lambda _, children: _unchecked(*children),
    lambda pair: ((pair.primal, pair.tangent), None),
)


def dual(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Evaluate `fun` on dual numbers, in forward mode.

    As `jax.jvp`, but each tangent is passed with its primal as a `Dual`; all other arguments have tangent zero.

    Args:
      fun: a function, a bound method or a module.

    Returns:
      A function of the same arguments, positional or by keyword. At least one argument must be a `Dual`, or a list,
      dict or other pytree that holds one. `fun` itself receives the primals; in nested calls of `dual`, a `Dual` inside
      a `Dual` is left for the inner call. Every array, number or module that `fun` returns becomes a `Dual`, and so
      does a `Dual` of an inner call; the tangent is zero if the value depends on no `Dual`. Integers have tangents of
      dtype `jax.dtypes.float0`, as for `jax.jvp`. Strings, None and other objects are returned unchanged. State that
      `fun` changes in a module (BatchNorm statistics, dropout keys) is updated in the module, without its tangent.

    Raises:
      TypeError: `fun` is not callable; no argument is a `Dual`.
      TypeError, ValueError: the parts of a `Dual` do not match, for instance after `jax.tree.map`.
      ValueError: modules share a variable; `fun` assigns parameters of a module or changes its structure.

    Cost:
      One evaluation of `fun` with tangents, about three times its FLOPs; no residuals are kept.

    Source:
      `jax.jvp`; PyTorch's tutorial on forward-mode automatic differentiation (`dual_level`, `make_dual`).

    Examples:
      >>> from plurax.transforms import Dual, dual
      >>> out = dual(lambda x, y: x**2 * y)(Dual(3.0, 1.0), 2.0)
      >>> float(out.primal), float(out.tangent)
      (18.0, 12.0)
    """
    check_callable("dual", fun)
    owner, function = bound_model(fun)

    def evaluated(*args: Any, **kwargs: Any) -> Any:
        """Return the output of `fun` with a `Dual` for each array that has a tangent."""
        leaves, structure = jax.tree.flatten((owner, args, kwargs), is_leaf=lambda x: _is_dual(x) or is_model(x))
        pairs = [x for x in leaves if _is_dual(x)]
        if not pairs:
            raise TypeError("dual: no argument is a Dual; wrap one, as in dual(fun)(Dual(x, tangent), y).")
        refuse_shared_state("dual", fun, owner, args, kwargs)

        # All other leaves are one keyword argument, so that `Call` splits models in it but does not differentiate it.
        def of_primals(*duals: Any, held: list[Any]) -> Any:
            """Return the arrays of the output by position, and everything else as the auxiliary output."""
            primals, others = iter(duals), iter(held)
            filled = [next(primals if _is_dual(x) else others) for x in leaves]
            owner, args, kwargs = jax.tree.unflatten(structure, filled)
            out, out_structure = jax.tree.flatten(split_tree(function(owner, *args, **kwargs)))
            # Only arrays have tangents; everything else is auxiliary output, keyed by its position.
            arrays = {i: jnp.asarray(x) for i, x in enumerate(out) if _is_array(x)}
            return arrays, (out_structure, {i: x for i, x in enumerate(out) if i not in arrays})

        held = [x for x in leaves if not _is_dual(x)]
        call = Call("dual", of_primals, range(len(pairs)), True, tuple(x.primal for x in pairs), {"held": held})
        # In this `Call` the primals of the pairs are the arguments, all differentiated; it also checks their tangents.
        tangents = call.form.tangents([x.tangent for x in pairs])
        values, slopes, rest = jax.jvp(call, call.primals, tangents, has_aux=True)
        out_structure, others = call.finish(rest)
        both = (
            jax.tree.unflatten(out_structure, [x for _, x in sorted((arrays | others).items())])
            for arrays in (values, slopes)
        )
        return jax.tree.map(_paired, *both, is_leaf=lambda x: _is_dual(x) or is_split(x))

    return wrap_like(fun, "dual", evaluated, dual)


def _is_dual(x: Any) -> bool:
    return isinstance(x, Dual)


def _is_array(x: Any) -> bool:
    numeric = isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))
    return numeric and getattr(x, "dtype", None) != jax.dtypes.float0


def _paired(value: Any, slope: Any) -> Any:
    """Return one output as a `Dual`; outputs that are not arrays, models or `Dual`s are returned unchanged."""
    if is_split(value):
        return _unchecked(value.merge(), value.structure.gradient(slope.trainable, value.rest))
    return _unchecked(value, slope) if _is_dual(value) or _is_array(value) else value
