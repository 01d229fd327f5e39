"""`hessian`: the Jacobian of a Jacobian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from .._core.arguments import Argnums, check_choice
from .jacobian import Jacobian, P, jacobian_of

Mode = Literal["auto", "fwd_rev", "rev_rev", "fwd_fwd", "rev_fwd"]


def hessian(
    fun: Callable[P, Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    mode: Mode = "auto",
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
    sparsity: Any = None,
    check: bool = False,
    holomorphic: bool = False,
) -> Jacobian[P]:
    """Compute the Hessian of `fun`, dense or sparse.

    As `jax.hessian`, with what `jacfwd` adds to `jax.jacfwd`.

    Args:
      fun: as for `jacrev`; its output may have any shape.
      argnums: as for `jacfwd`.
      has_aux: whether `fun` returns `(output, aux)`; the result is then `(hessian, aux)`.
      mode: how the outer and the inner Jacobian are taken: "fwd_rev", "rev_rev", "fwd_fwd" or "rev_fwd". All are equal;
        "auto" takes the first, whose columns are derivatives of one gradient.
      chunk_size: how many columns (rows, where the outer one is "rev") to compute at a time.
      memory_budget: as for `jacfwd`, for both Jacobians together: the outer one in chunks, and where one of its columns
        needs too much, the inner one in chunks for each.
      sparsity: as for `jacobian`, where a pattern is one of the Hessian.
      check: as for `jacobian`.
      holomorphic: as for `jacfwd`, and as for `jax.hessian`; not together with `sparsity`.

    Returns:
      A function of the same arguments that returns the Hessian, nested as the Jacobian of a Jacobian: with arrays of
      shape `output.shape + first.shape + second.shape`, or with `sparsity` such `BCOO`. It has
      a method `.explain`, as for `jacobian`.

    Raises:
      TypeError, ValueError: as for `jacfwd` and `jacrev`; an unknown mode; as for `jacobian` with a pattern.
      ModuleNotFoundError: as for `jacobian`.

    Warns:
      UserWarning: as for `jacobian`.

    Cost:
      That of a gradient for each input number, and for each output number if there are several. A sparse one costs a
      gradient's derivative for each colour; that of a scalar is symmetric, and an entry is read from any product in
      which it or its mirror image is not summed with others. Functions with derivative rules of their own
      (`jax.custom_jvp`) are coloured as any Jacobian, since such rules need not give a symmetric matrix.

    Source:
      `jax.hessian`; `torch.func.hessian`; for sparse ones Gebremedhin, Tarafdar, Manne and Pothen 2007, "New acyclic
      and star coloring algorithms with application to computing Hessians".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import hessian
      >>> hessian(lambda a: (a**3).sum())(jnp.array([1.0, 2.0]))
      Array([[ 6.,  0.],
             [ 0., 12.]], dtype=float32)
      >>> hessian(lambda a: (a**3).sum(), sparsity="auto")(jnp.array([1.0, 2.0]))
      BCOO(float32[2, 2], nse=2)
    """
    check_choice("hessian", "mode", mode, get_args(Mode))
    # Forward over reverse: one gradient is linearized once, and no residuals of a second reverse pass are kept.
    outer, inner = ("fwd_rev" if mode == "auto" else mode).split("_")
    modes = {"fwd": "forward", "rev": "reverse"}
    how: Any = {"inner": modes[inner], "sparsity": sparsity, "check": check, "holomorphic": holomorphic}
    return jacobian_of("hessian", fun, argnums, has_aux, modes[outer], chunk_size, memory_budget, **how)
