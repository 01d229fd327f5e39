"""Matrix-free products with second derivatives: `hvp`, `value_grad_and_hvp`, `vhp`, `gnvp`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from .._calls.call import Call
from .._core.arguments import check_choice
from .._grad import scalar_seed
from .._jacobian.mode import forward_or, refusal
from .._linear import all_of

Mode = Literal["auto", "fwd_rev", "rev_rev", "rev_fwd"]

# The remedy for an argument that cannot be differentiated, where all are.
_CLOSE = "let the function close over it"


def hvp(fun: Callable[..., Any], primals: Any, tangents: Any, *, mode: Mode = "auto", has_aux: bool = False) -> Any:
    """Compute the product of the Hessian of a scalar function with a vector.

    Args:
      fun: a function of positional arguments, a bound method or a module, that returns one real scalar.
      primals: a tuple with the arguments, or a single argument that is not a tuple.
      tangents: one tangent for each primal, in the same form, with its structure, shapes and dtypes.
      mode: "fwd_rev" differentiates the gradient along the tangents, "rev_rev" takes the gradient of the gradient's
        product with them, "rev_fwd" the gradient of the derivative along them. "auto" is "fwd_rev", which needs the
        least time and memory, or "rev_rev" if the gradient has no forward mode (a `jax.custom_vjp` whose rule calls
        another).
      has_aux: whether `fun` returns `(output, aux)`; the result is then `(product, aux)`.

    Returns:
      The product, in the form of the primals: bare for one argument, a tuple for a tuple. The Hessian is over all
      primals together, mixed derivatives included.

    Raises:
      TypeError: `fun` is not callable or does not return one real scalar; an argument is not floating-point; the
        numbers of primals and tangents differ.
      ValueError: a tangent differs from its primal in structure, shape or dtype; `mode` is unknown.

    Cost:
      About twice a gradient; the Hessian is never formed. For many vectors map over the tangents with `vmap`.

    Source:
      Pearlmutter 1994, "Fast exact multiplication by the Hessian"; `torch.autograd.functional.hvp`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import hvp
      >>> hvp(lambda x: (x**3).sum(), jnp.array([1.0, 2.0]), jnp.array([1.0, 1.0]))
      Array([ 6., 12.], dtype=float32)
    """
    product, aux = _value_grad_and_hvp("hvp", fun, primals, tangents, mode, has_aux)[2:]
    return (product, aux) if has_aux else product


def value_grad_and_hvp(
    fun: Callable[..., Any], primals: Any, tangents: Any, *, has_aux: bool = False
) -> tuple[Any, ...]:
    """Compute the value, the gradient and the `hvp` in one pass.

    Args:
      fun: as for `hvp`.
      primals: as for `hvp`.
      tangents: as for `hvp`.
      has_aux: as for `hvp`; the auxiliary output is then the last of the results.

    Returns:
      The value, the gradient and the product; gradient and product in the form of the primals.

    Raises:
      TypeError, ValueError: as for `hvp`.

    Cost:
      That of `hvp`, which computes value and gradient anyway.

    Source:
      Pearlmutter 1994, "Fast exact multiplication by the Hessian".

    Examples:
      >>> from plurax.transforms import value_grad_and_hvp
      >>> [float(x) for x in value_grad_and_hvp(lambda x: x**3, 2.0, 1.0)]
      [8.0, 12.0, 12.0]
    """
    *found, aux = _value_grad_and_hvp("value_grad_and_hvp", fun, primals, tangents, "auto", has_aux)
    return (*found, aux) if has_aux else tuple(found)


def vhp(fun: Callable[..., Any], primals: Any, cotangents: Any, *, has_aux: bool = False) -> Any:
    """Compute the product of a vector with the Hessian of a scalar function, in reverse over reverse mode.

    The Hessian is symmetric, so this equals `hvp` with `mode="rev_rev"`.

    Args:
      fun: as for `hvp`.
      primals: as for `hvp`.
      cotangents: as the tangents of `hvp`.
      has_aux: as for `hvp`.

    Returns:
      As for `hvp`.

    Raises:
      TypeError, ValueError: as for `hvp`.

    Cost:
      About twice a gradient, and memory for the residuals of both passes.

    Source:
      `torch.autograd.functional.vhp`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import vhp
      >>> vhp(lambda x: (x**3).sum(), jnp.array([1.0, 2.0]), jnp.array([1.0, 1.0]))
      Array([ 6., 12.], dtype=float32)
    """
    product, aux = _value_grad_and_hvp("vhp", fun, primals, cotangents, "rev_rev", has_aux)[2:]
    return (product, aux) if has_aux else product


def gnvp(model: Callable[..., Any], loss: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    """Compute the product of the Gauss-Newton matrix with a vector: `Jᵀ H J v`.

    `J` is the Jacobian of `model` and `H` the Hessian of `loss` at the model's output. `Jᵀ H J` is the Hessian of
    `loss(model(*primals))` without the curvature of the model; it is positive semi-definite where the loss is convex.

    Args:
      model: a function of positional arguments, a bound method or a module, whose output is a pytree of floating-point
        arrays.
      loss: a function from that output to one real scalar.
      primals: a tuple with the arguments of `model`, or a single argument that is not a tuple.
      tangents: one tangent for each primal, in the same form, with its structure, shapes and dtypes.

    Returns:
      The product, in the form of the primals: bare for one argument, a tuple for a tuple.

    Raises:
      TypeError: `model` or `loss` is not callable; `loss` does not return one real scalar; an argument is not
        floating-point; the numbers of primals and tangents differ.
      ValueError: a tangent differs from its primal in structure, shape or dtype.

    Cost:
      About a forward-mode and a reverse-mode derivative of `model`, and an `hvp` of `loss`.

    Source:
      Schraudolph 2002, "Fast Curvature Matrix-Vector Products for Second-Order Gradient Descent".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import gnvp
      >>> x = jnp.array([1.0, 2.0])
      >>> gnvp(jnp.square, lambda y: (y**2).sum(), x, jnp.ones(2))  # diag(2x) 2 diag(2x) v
      Array([ 8., 32.], dtype=float32)
    """
    primals, tangents, bare = _as_tuples(primals, tangents)
    call = all_of("gnvp", model, primals, None)
    call.check_floating(instead=_CLOSE)
    tangents = call.form.tangents(tangents)

    # One linearization of the call serves both directions, so the model runs once.
    def forward() -> tuple[Any, ...]:
        out, push, rest = jax.linearize(call, *call.primals, has_aux=True)
        # J^T is the transpose of the linearized model, so residuals are kept only once.
        transposed = jax.linear_transpose(lambda tangents: push(*tangents), call.primals)
        return out, push(*tangents), lambda vector: transposed(vector)[0], rest

    def reverse() -> tuple[Any, ...]:
        out, pull, rest = jax.vjp(call, *call.primals, has_aux=True)
        return out, jax.linear_transpose(pull, out)(tangents)[0], pull, rest

    out, pushed, pull, rest = forward_or(reverse, forward, _along(call, call.primals), tangents)
    call.finish(rest)
    (curved,) = _value_grad_and_hvp("gnvp (loss)", loss, (out,), (pushed,), "auto", None)[2]
    products = pull(curved)
    found = call.form.gradients(products)
    return found[0] if bare else found


def _value_grad_and_hvp(
    api: str, fun: Callable[..., Any], primals: Any, tangents: Any, mode: Mode, has_aux: bool | None
) -> tuple[Any, Any, Any, Any]:
    """Return the value, the gradient, the product and the auxiliary output."""
    check_choice(api, "mode", mode, get_args(Mode))
    primals, tangents, bare = _as_tuples(primals, tangents)
    call = all_of(api, fun, primals, has_aux)
    call.check_floating(instead=_CLOSE)
    value, gradients, products, rest = _MODES[mode](api, call, call.form.tangents(tangents))
    aux = call.finish(rest)
    forms = map(call.form.gradients, (gradients, products))
    gradients, products = (form[0] if bare else form for form in forms)
    return value, gradients, products, aux


def gradient_of(api: str, call: Call) -> Callable[..., Any]:
    """Return a function of primals that returns `(gradients, (value, rest))`."""

    def gradient(*primals: Any) -> Any:
        value, pull, rest = jax.vjp(call, *primals, has_aux=True)
        return pull(seed_of(api, call, value)), (value, rest)

    return gradient


def hessian_product(api: str, call: Call) -> tuple[Callable[..., Any], Any]:
    """Return a function of tangents that returns their products with the Hessian, and `(value, rest)` of the call."""
    gradient = gradient_of(api, call)
    if refusal(_along(gradient, call.primals), call.primals) is None:
        _, push, rest = jax.linearize(gradient, *call.primals, has_aux=True)
        return push, rest
    _, pull, rest = jax.vjp(gradient, *call.primals, has_aux=True)
    return lambda *tangents: pull(tangents), rest


def _along(fun: Callable[..., Any], primals: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Return the derivative of a function with an auxiliary output, as a function of tangents."""
    return lambda tangents: jax.jvp(fun, primals, tangents, has_aux=True)[1]


def seed_of(api: str, call: Call, value: Any) -> Any:
    """Return the cotangent 1 of a scalar; raise if the value of a call is not one real scalar."""
    is_scalar = jax.tree_util.all_leaves([value]) and jnp.shape(value) == ()
    cure = "convert it to a real number" if is_scalar else "reduce it to a real number"
    more = "" if call.has_aux is None else ", or return other values with has_aux=True"
    return scalar_seed(f"{api}: fun", value, cure + more)


def _forward_over_reverse(api: str, call: Call, tangents: tuple[Any, ...]) -> Any:
    gradients, products, (value, rest) = jax.jvp(gradient_of(api, call), call.primals, tangents, has_aux=True)
    return value, gradients, products, rest


def _reverse_over_reverse(api: str, call: Call, tangents: tuple[Any, ...]) -> Any:
    gradients, pull, (value, rest) = jax.vjp(gradient_of(api, call), *call.primals, has_aux=True)
    return value, gradients, pull(tangents), rest


def _forward_or_reverse_over_reverse(api: str, call: Call, tangents: tuple[Any, ...]) -> Any:
    reverse, forward = (partial(way, api, call, tangents) for way in (_reverse_over_reverse, _forward_over_reverse))
    return forward_or(reverse, forward, _along(gradient_of(api, call), call.primals), tangents)


def _reverse_over_forward(api: str, call: Call, tangents: tuple[Any, ...]) -> Any:
    """Return the value, the gradient, the product with the Hessian, and the rest of the call."""

    def derivative(*primals: Any) -> Any:
        value, tangent, rest = jax.jvp(call, primals, tangents, has_aux=True)
        return (value, tangent), rest

    # One pullback gives both gradients: of the value, and of the derivative along the tangents, which is H v.
    (value, _), pull, rest = jax.vjp(derivative, *call.primals, has_aux=True)
    one = seed_of(api, call, value)
    zero = jnp.zeros_like(one)
    return value, pull((one, zero)), pull((zero, one)), rest


_MODES: dict[Mode, Callable[[str, Call, tuple[Any, ...]], Any]] = {
    "auto": _forward_or_reverse_over_reverse,
    "fwd_rev": _forward_over_reverse,
    "rev_rev": _reverse_over_reverse,
    "rev_fwd": _reverse_over_forward,
}


def _as_tuples(primals: Any, tangents: Any) -> tuple[Any, Any, bool]:
    """Return both as tuples, and whether the primals were a single argument."""
    if type(primals) is tuple:  # a NamedTuple is one argument
        return primals, tangents, False
    return (primals,), (tangents,), True
