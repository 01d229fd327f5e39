"""`hessian_diagonal`, `hessian_trace` and the estimate `hutchinson_trace`, without forming the Hessian."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from .._calls.call import Call
from .._core.arguments import Argnums, check_argnums, check_callable, check_count, wrap_like
from .._core.memory import check_budget, chunk_within
from .._core.prng import check_key
from .._core.weak_types import weak_like
from .._jacobian.dense import by_array, in_form, map_slices
from .._jacobian.mode import refusal
from .products import hessian_product, seed_of

P = ParamSpec("P")


def hessian_diagonal(
    fun: Callable[P, Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
) -> Callable[P, Any]:
    """Compute the diagonal of the Hessian of a scalar function, exactly.

    Args:
      fun: a function, a bound method or a module that takes real arrays and returns one real scalar.
      argnums: as for `jacfwd`.
      has_aux: whether `fun` returns `(output, aux)`; the result is then `(diagonal, aux)`.
      chunk_size: how many entries to compute at a time; None computes all at once.
      memory_budget: as for `jacfwd`, with its warning.

    Returns:
      A function of the same arguments that returns the second derivative with respect to each element of the argument,
      in its structure, shapes and dtypes (a tuple for a tuple of argnums; an `nnx.State` for a module).

    Raises:
      TypeError: `fun` is not callable or does not return one real scalar; an argument is not real floating-point;
        `argnums` has a wrong type.
      ValueError: as for `jacfwd`.

    Warns:
      UserWarning: as for `jacfwd`.

    Cost:
      For each element a second derivative along its unit vector, in forward mode: two to three evaluations. Functions
      without forward mode (`jax.custom_vjp`) cost one Hessian-vector product for each element.

    Source:
      Griewank and Walther 2008, "Evaluating Derivatives", chapter 13.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import hessian_diagonal
      >>> hessian_diagonal(lambda x: x[0] * x[1] + (x**3).sum())(jnp.array([1.0, 2.0]))
      Array([ 6., 12.], dtype=float32)
    """

    def compute(call: Call, chunk: int | None) -> Any:
        return in_form(argnums, call, diagonal("hessian_diagonal", call, chunk))

    return of_scalar("hessian_diagonal", fun, argnums, has_aux, chunk_size, memory_budget, compute)


def hessian_trace(
    fun: Callable[P, Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
) -> Callable[P, Any]:
    """Compute the trace of the Hessian of a scalar function, exactly.

    Args:
      fun: as for `hessian_diagonal`.
      argnums: as for `hessian_diagonal`; the trace is over all of these arguments.
      has_aux: as for `hessian_diagonal`.
      chunk_size: as for `hessian_diagonal`.
      memory_budget: as for `hessian_diagonal`.

    Returns:
      A function of the same arguments that returns a scalar.

    Raises:
      TypeError, ValueError: as for `hessian_diagonal`.

    Cost:
      That of `hessian_diagonal`. `laplacian` computes the same in a third to two thirds of the operations for networks.
      `hutchinson_trace` estimates the trace at a cost that is independent of the dimension.

    Source:
      Griewank and Walther 2008, "Evaluating Derivatives", chapter 13.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import hessian_trace
      >>> hessian_trace(lambda x: x[0] * x[1] + (x**3).sum())(jnp.array([1.0, 2.0]))
      Array(18., dtype=float32)
    """

    def compute(call: Call, chunk: int | None) -> jax.Array:
        return total(diagonal("hessian_trace", call, chunk))

    return of_scalar("hessian_trace", fun, argnums, has_aux, chunk_size, memory_budget, compute)


def hutchinson_trace(
    fun: Callable[..., Any], samples: int, argnums: Argnums = 0, *, chunk_size: int | None = None
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Estimate the trace of the Hessian of a scalar function from products with random signs.

    Args:
      fun: as for `hessian_diagonal`.
      samples: the number of products, at least 2; the error falls as 1 / sqrt(samples).
      argnums: as for `hessian_trace`, counted without the key.
      chunk_size: how many samples to compute at a time; None computes all at once.

    Returns:
      A function of a key and the arguments of `fun` that returns `(mean, standard_error)`, two scalars. The estimate is
      unbiased. Its deviation from the trace, divided by the standard error, follows approximately Student's t
      distribution with samples - 1 degrees of freedom. For a diagonal Hessian the mean is exact and the error 0.

    Raises:
      TypeError: `samples` is not an int; the key is not a key; otherwise as for `hessian_diagonal`.
      ValueError: `samples` is below 2; otherwise as for `hessian_diagonal`.

    Cost:
      One Hessian-vector product for each sample, about twice a gradient.

    Source:
      Hutchinson 1990, "A stochastic estimator of the trace of the influence matrix for Laplacian smoothing splines".

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from plurax.transforms import hutchinson_trace
      >>> mean, error = hutchinson_trace(lambda x: (x**3).sum(), 4)(jax.random.key(0), jnp.array([1.0, 2.0]))
      >>> float(mean), float(error)
      (18.0, 0.0)
    """
    check_callable("hutchinson_trace", fun)
    positions = check_argnums("hutchinson_trace", argnums)
    check_count("hutchinson_trace", "samples", samples, 2)
    check_count("hutchinson_trace", "chunk_size", chunk_size, optional=True)

    def estimate(key: Any, *args: Any, **kwargs: Any) -> tuple[jax.Array, jax.Array]:
        """Return the mean of the samples and its standard error."""
        check_key("hutchinson_trace", key, "the first argument")
        call = Call("hutchinson_trace", fun, positions, None, args, kwargs)
        call.check_floating(complex_too=False)
        inputs, treedef = jax.tree.flatten(call.primals)
        # E[s^T H s] = trace(H) for independent signs s: the gradient is linearized once, each sample is one H s.
        push, (_, rest) = hessian_product("hutchinson_trace", call)

        def sample(i: Any) -> list[jax.Array]:
            # The key depends on the sample's index only, so that the estimate does not depend on the chunk size.
            keys = jax.random.split(jax.random.fold_in(key, i), max(1, len(inputs)))
            shapes = [(jnp.shape(x), jnp.result_type(x)) for x in inputs]
            signs = [jax.random.rademacher(k, *shape) for k, shape in zip(keys, shapes, strict=True)]
            return [_along_itself(push, treedef, signs)]

        (found,) = map_slices(sample, int(samples), 0, chunk_size)
        call.finish(rest)
        # The standard error of a mean, with the unbiased variance of the samples (divided by n - 1): divided by n it
        # would be too small for the usual few samples.
        return found.mean(), found.std(ddof=1) / np.sqrt(samples).astype(found.dtype)

    return estimate


def of_scalar(
    api: str,
    fun: Callable[..., Any],
    argnums: Argnums,
    has_aux: bool,
    chunk_size: int | None,
    memory_budget: int | str | None,
    compute: Callable[[Call, int | None], Any],
) -> Callable[..., Any]:
    """Return the transform of a scalar function that `compute` evaluates, in chunks or within a memory budget.

    Args:
      api: the transform's name in errors.
      fun: the function.
      argnums: as for `hessian_diagonal`.
      has_aux: as for `hessian_diagonal`.
      chunk_size: as for `hessian_diagonal`.
      memory_budget: as for `hessian_diagonal`.
      compute: a function of a call and the number of directions to take at a time, which returns the result.
    """
    check_callable(api, fun)
    positions = check_argnums(api, argnums)
    check_count(api, "chunk_size", chunk_size, optional=True)
    budget = check_budget(api, memory_budget, chunk_size)

    def of_arguments(*args: Any, **kwargs: Any) -> Any:
        """Return the transform of `fun` at these arguments, after one evaluation for the auxiliary output and state."""
        call = Call(api, fun, positions, has_aux, args, kwargs)
        call.check_floating(complex_too=False)
        # Evaluated once separately for the auxiliary output and changed state, which the second derivatives discard.
        # Under `jit` XLA merges this with the evaluation inside the derivatives.
        value, rest = call(*call.primals)
        seed_of(api, call, value)  # raises if it is not a scalar
        chunk = chunk_size
        if budget is not None:
            size = max(1, sum(map(jnp.size, jax.tree.leaves(call.primals))))
            chunk = chunk_within(api, partial(compute, call), size, budget)
        result = compute(call, chunk)
        aux = call.finish(rest)
        return (result, aux) if has_aux else result

    again = (argnums, has_aux, chunk_size, memory_budget, compute)
    return wrap_like(fun, api, of_arguments, lambda fun: of_scalar(api, fun, *again))


def diagonal(api: str, call: Call, chunk_size: int | None) -> list[jax.Array]:
    """Return for each input array the second derivatives with respect to its elements."""
    inputs, treedef = jax.tree.flatten(call.primals)

    def entries_of(entry: Callable[[list[Any]], jax.Array]) -> list[jax.Array]:
        """Return the value of `entry` for each unit vector, in the shapes of the inputs."""
        found = by_array(
            inputs, lambda basis, size: map_slices(lambda k: [entry(basis(k))], size, 0, chunk_size), 0, chunk_size
        )
        # In the dtype of the input, since `fun` may compute in another dtype and return it.
        return [
            weak_like(part.astype(jnp.result_type(x)).reshape(jnp.shape(x)), x)
            for (part,), x in zip(found, inputs, strict=True)
        ]

    def along(unit: list[Any]) -> jax.Array:
        """Return d^2/dt^2 fun(x + t unit): forward over forward mode, which keeps no residuals for a reverse pass."""
        direction = jax.tree.unflatten(treedef, unit)

        def slope(*primals: Any) -> Any:
            return jax.jvp(lambda *primals: call(*primals)[0], primals, direction)[1]

        return jax.jvp(slope, call.primals, direction)[1]

    if refusal(along, [jnp.asarray(x) for x in inputs]) is None:
        return entries_of(along)
    # A jax.custom_vjp has reverse mode only.
    return entries_of(partial(_along_itself, hessian_product(api, call)[0], treedef))


def _along_itself(push: Callable[..., Any], treedef: Any, vector: list[Any]) -> jax.Array:
    """Return v^T H v, where `push` is the linear function from a vector to its product with H."""
    products = jax.tree.leaves(push(*jax.tree.unflatten(treedef, vector)))
    return total([x * y for x, y in zip(vector, products, strict=True)])


def total(parts: list[jax.Array]) -> jax.Array:
    """Return the sum of all elements of some arrays."""
    return weak_like(jnp.stack([part.sum() for part in parts]).sum(), *parts) if parts else jnp.zeros(())
