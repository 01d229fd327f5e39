"""`convolutions_as_products`: a function whose convolutions are matrix products, for CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from .._convolutions.as_products import convolutions_as_products as rewritten
from .._core.arguments import check_callable, wrap_like
from .._core.target import platform
from .._models.hashable import HashablePytree
from .._models.mutation import call_purely, update, with_changes
from .._models.split_model import bound_model, models_of, refuse_shared_state, split_tree, splits_of

P = ParamSpec("P")
R = TypeVar("R")


def convolutions_as_products(fun: Callable[P, R]) -> Callable[P, R]:
    """Compute convolutions of `fun`, usually a gradient, as matrix products, and pooling as slices.

    XLA's CPU backend is slow at convolutions with few channels or with groups, at those inside a loop or with mapped
    weights, and at the gradients of pooling, but fast at large matrix products. These are rewritten. All other
    convolutions stay, and on other platforms `fun` stays as it is, since their convolutions are fast.

    Wrap the gradient, not the loss: `jax.jit(convolutions_as_products(value_and_grad(loss)))`. Wrap a loop or a `vmap`
    over weights too, since what is around `fun` is not seen. `Trainer` does the same by itself where it is faster.

    Args:
      fun: a function of arrays, pytrees and modules, that returns arrays and numbers in pytrees. State of modules that
        it changes (BatchNorm statistics, dropout keys) is updated in the module.

    Returns:
      A function of the same arguments, to be called under `jax.jit` (`nnx.jit` if a module has state). Results are
      equal to rounding. A convolution whose window and whose result both have more than 64 positions always stays one.

    Raises:
      TypeError: `fun` is not callable; the result is differentiated (custom derivative rules are no longer in the
        program); `fun` returns something other than arrays and numbers.
      ValueError: modules share a variable; `fun` assigns a parameter or changes the structure of a module.

    Cost:
      The operations of the convolutions. Gradients of twelve networks take 0.1 to 1.1 times as long as by XLA
      (`benchmarks/convolutions.md`). Patches of the input need memory: 1.2 times the temporaries for the CNN of
      PyTorch's tutorial. In 8 parts whose patches stay in the cache, as
      `accumulate(convolutions_as_products(value_and_grad(loss)), 8)`, its gradient takes 0.28 times as long and 0.17
      times the memory. Small networks such as LeNet-5 are faster without parts (`benchmarks/program.md`).

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from plurax.transforms import grad
      >>> from plurax.transforms.program import convolutions_as_products
      >>> conv = nnx.Conv(1, 4, (3, 3), rngs=nnx.Rngs(0))
      >>> step = jax.jit(convolutions_as_products(grad(lambda model, x: model(x).sum())))
      >>> step(conv, jnp.ones((2, 8, 8, 1)))["bias"][...]
      Array([128., 128., 128., 128.], dtype=float32)
    """
    check_callable("convolutions_as_products", fun)
    owner, function = bound_model(fun)

    def of_arguments(*args: Any, **kwargs: Any) -> Any:
        """Return the output of `fun` with convolutions as products."""
        if platform() != "cpu":
            return fun(*args, **kwargs)
        refuse_shared_state("convolutions_as_products", fun, owner, args, kwargs)
        arguments = split_tree((owner, args, kwargs))
        arrays, static = HashablePytree.separate(arguments)

        def pure(arrays: list[Any]) -> tuple[Any, list[dict[str, Any]]]:
            return call_purely("convolutions_as_products", function, static.join(arrays))

        out, changed = rewritten(pure)(_not_differentiated(arrays))
        parts = splits_of(arguments)
        update("convolutions_as_products", models_of((owner, args, kwargs)), parts, with_changes(parts, changed))
        return out

    return wrap_like(fun, "convolutions_as_products", of_arguments, convolutions_as_products)


@jax.custom_jvp
def _not_differentiated(arrays: list[Any]) -> list[Any]:
    return arrays


@_not_differentiated.defjvp
def _refuse(*_: Any) -> Any:
    fact = "its result is differentiated, but custom derivative rules are lost in it"
    cure = "wrap the derivative instead, as convolutions_as_products(grad(fun))"
    raise TypeError(f"convolutions_as_products: {fact}; {cure}.")
