"""`jvp`, `vjp` and `linearize` as in JAX, with checked arguments and support for models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar, overload

import jax
from jax.tree_util import Partial, register_dataclass

from ._calls.call import Call
from ._calls.plain import are_tangents, outline_of, plain_arrays
from ._calls.primals import Primals
from ._core.arguments import check_callable, describe
from ._grad import seed
from ._models.hashable import HashablePytree

R = TypeVar("R")


@overload
def jvp(
    fun: Callable[..., R], primals: Sequence[Any], tangents: Sequence[Any], *, has_aux: Literal[False] = False
) -> tuple[R, R]: ...


@overload
def jvp(
    fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], *, has_aux: bool
) -> tuple[Any, ...]: ...


def jvp(
    fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], *, has_aux: bool = False
) -> tuple[Any, ...]:
    """Evaluate `fun` and its derivative along `tangents`, in forward mode.

    As `jax.jvp`, but tangents are checked and errors name them, and modules are differentiated with respect to their
    parameters.

    Args:
      fun: a function of positional arguments, a bound method or a module.
      primals: a tuple with the arguments.
      tangents: a tuple with one tangent for each primal, with its structure, shapes and dtypes; for a module an
        `nnx.State` of its `nnx.Param`s, such as `grad` returns.
      has_aux: whether `fun` returns `(output, aux)`.

    Returns:
      The output and its tangent, and with `has_aux` the auxiliary output, which may be anything.

    Raises:
      TypeError: `fun` is not callable; `primals` or `tangents` is not a tuple, or their lengths differ; an argument has
        no derivative.
      ValueError: a tangent differs from its primal in structure, shape or dtype; modules share a variable; `fun`
        assigns parameters of a module or changes its structure.

    Cost:
      About two to three evaluations of `fun`, and no memory for residuals.

    Source:
      `jax.jvp`; `mindspore.jvp`; `torch.func.jvp`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import jvp
      >>> jvp(lambda x, y: x**3 + y, (2.0, 1.0), (1.0, 1.0))
      (Array(9., dtype=float32, weak_type=True), Array(13., dtype=float32, weak_type=True))
    """
    plain = None if has_aux else plain_arrays(fun, primals)
    if plain and are_tangents(plain, tangents):
        return jax.jvp(fun, primals, tangents)
    call = all_of("jvp", fun, primals, has_aux)
    call.check_arrays()  # integers pass, unlike in `grad`: their tangents are zeros of dtype float0, as in JAX
    out, tangent, rest = jax.jvp(call, call.primals, call.form.tangents(tangents), has_aux=True)
    aux = call.finish(rest)
    return (out, tangent, aux) if has_aux else (out, tangent)


@overload
def vjp(fun: Callable[..., R], *primals: Any, has_aux: Literal[False] = False) -> tuple[R, Pullback]: ...


@overload
def vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool) -> tuple[Any, ...]: ...


def vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """Evaluate `fun` and return its output with a function from cotangents to gradients, in reverse mode.

    As `jax.vjp`, but cotangents are checked and errors name them, and modules are differentiated with respect to their
    parameters.

    Args:
      fun: as for `jvp`.
      *primals: its arguments.
      has_aux: as for `jvp`.

    Returns:
      The output, and a function that takes one cotangent with the output's structure, shapes and dtypes (or a Python
      number, which is broadcast) and returns a tuple with the gradient of each primal; with `has_aux` also the
      auxiliary output. The function is a pytree of its residuals, so `jit`, `vmap` and `scan` accept and return it. Its
      method `with_refs` adds gradients to a `jax.Ref` or omits them, as in JAX. As in JAX, the gradients of integer and
      boolean primals and the cotangents of such outputs have dtype `jax.dtypes.float0`.

    Raises:
      TypeError: `fun` is not callable; an argument has leaves other than arrays and numbers; a number is the cotangent
        of integers.
      ValueError: the cotangent differs from the output in structure, shape or dtype; modules share a variable; `fun`
        assigns parameters of a module or changes its structure.

    Cost:
      One evaluation, whose residuals are kept; each cotangent costs about two evaluations.

    Source:
      `jax.vjp`; `mindspore.vjp`; `torch.func.vjp`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import vjp
      >>> out, pull = vjp(jnp.multiply, jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0]))
      >>> pull(1.0)
      (Array([3., 4.], dtype=float32), Array([1., 2.], dtype=float32))
    """
    plain = None if has_aux else plain_arrays(fun, primals)
    if plain:
        out, pull = jax.vjp(fun, *primals)
        aux, outline = None, outline_of("vjp", fun, plain)
    else:
        call = all_of("vjp", fun, primals, has_aux)
        call.check_arrays()
        # `rest` holds the auxiliary output and the changed state of models, both known before any cotangent is given.
        out, pull, rest = jax.vjp(call, *call.primals, has_aux=True)
        aux, outline = call.finish(rest), call.form.outline()
    # Only the types of primals and outputs are kept, for checks of cotangents, so the arrays can be freed.
    gradients = Pullback(pull, outline, HashablePytree.of(jax.tree.map(jax.typeof, out)))
    return (out, gradients, aux) if has_aux else (out, gradients)


@overload
def linearize(fun: Callable[..., R], *primals: Any, has_aux: Literal[False] = False) -> tuple[R, Callable[..., R]]: ...


@overload
def linearize(fun: Callable[..., Any], *primals: Any, has_aux: bool) -> tuple[Any, ...]: ...


def linearize(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """Evaluate `fun` and return its output with its derivative there, as a linear function of tangents.

    As `jax.linearize`, but tangents are checked and errors name them, and modules are differentiated with respect to
    their parameters.

    Args:
      fun: as for `jvp`.
      *primals: its arguments.
      has_aux: as for `jvp`.

    Returns:
      The output, and a function that takes a tangent for each primal and returns the output's tangent; with `has_aux`
      also the auxiliary output. The function is a pytree, as for `vjp`.

    Raises:
      TypeError, ValueError: as for `jvp`.

    Cost:
      One evaluation, whose residuals are kept; each tangent costs about one evaluation.

    Source:
      `jax.linearize`; `torch.func.linearize`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import linearize
      >>> out, push = linearize(jnp.square, 3.0)
      >>> float(push(1.0)), float(push(2.0))
      (6.0, 12.0)
    """
    plain = None if has_aux else plain_arrays(fun, primals)
    if plain:
        out, push = jax.linearize(fun, *primals)
        aux, outline = None, outline_of("linearize", fun, plain)
    else:
        call = all_of("linearize", fun, primals, has_aux)
        call.check_arrays()
        out, push, rest = jax.linearize(call, *call.primals, has_aux=True)
        aux, outline = call.finish(rest), call.form.outline()
    derivative = Partial(_pushed, push, outline)
    return (out, derivative, aux) if has_aux else (out, derivative)


@partial(register_dataclass, data_fields=["pull", "primals"], meta_fields=["out"])
@dataclass(frozen=True, eq=False)
class Pullback:
    """The function from cotangents to gradients that `vjp` returns: a pytree of its residuals."""

    pull: Any
    primals: Primals
    out: HashablePytree

    def __call__(self, cotangent: Any, *more: Any) -> tuple[Any, ...]:
        """Return the gradient of each primal."""
        if more:
            raise TypeError(f"vjp: pass one cotangent, with the structure of the output, but got {1 + len(more)}.")
        if cotangent is None:
            raise TypeError("vjp: the cotangent is None; pass one of the structure of the output, or a Python number.")
        values = self.pull(seed("vjp", self.out.value, cotangent))
        return self.primals.gradients(values)

    def with_refs(self, *refs: Any) -> Pullback:
        """Return a function that adds gradients to `jax.Ref`s, returns them or omits them, as `with_refs` in JAX.

        Args:
          *refs: one pytree for each primal, with its structure and one of these in place of each array: a `jax.Ref`, to
            which the gradient is added; `jax.ad.GradValue()`, to return the gradient; or `jax.ad.DontWant()`, to not
            compute it.

        Raises:
          TypeError: there is not one pytree for each primal.
          ValueError: a pytree has another structure than its primal.
        """
        return replace(self, pull=self.pull.with_refs(*self.primals.matched(refs, "with_refs", "with_refs")))


def _pushed(push: Callable[..., Any], primals: Primals, *tangents: Any) -> Any:
    """Return the tangent of the output for these tangents of the primals, after checking them."""
    return push(*primals.tangents(tangents))


def all_of(api: str, fun: Callable[..., Any], primals: Any, has_aux: bool | None) -> Call:
    """Return the call of `fun` with these primals, all of which are differentiated."""
    check_callable(api, fun)
    if not isinstance(primals, (tuple, list)) or not primals:
        raise TypeError(f"{api}: primals must be a tuple with the arguments of fun, but got {describe(primals)}.")
    return Call(api, fun, tuple(range(len(primals))), has_aux, tuple(primals), {})
