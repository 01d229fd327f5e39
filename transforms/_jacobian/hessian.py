"""`hessian`: the Jacobian of a Jacobian, dense or sparse."""

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

    As `jax.hessian`, with the additions of `jacfwd` to `jax.jacfwd`.

    Args:
      fun: as for `jacrev`; its output may have any shape.
      argnums: as for `jacfwd`.
      has_aux: whether `fun` returns `(output, aux)`; the result is then `(hessian, aux)`.
      mode: the modes of the outer and the inner Jacobian: "fwd_rev", "rev_rev", "fwd_fwd" or "rev_fwd". The results are
        equal; "auto" is "fwd_rev", whose columns are derivatives of one gradient, or "rev_rev" if the gradient has no
        forward mode (a `jax.custom_vjp` whose rule calls another).
      chunk_size: the number of columns (rows, if the outer mode is "rev") to compute at a time.
      memory_budget: as for `jacfwd`, for both Jacobians together: the outer one is computed in chunks, and if a single
        column needs too much memory, the inner one too.
      sparsity: as for `jacobian`; a pattern has the shape of the Hessian.
      check: as for `jacobian`.
      holomorphic: as for `jacfwd`, and as for `jax.hessian`; not together with `sparsity`.

    Returns:
      A function of the same arguments that returns the Hessian, nested as the Jacobian of a Jacobian: with arrays of
      shape `output.shape + first.shape + second.shape`, or with `sparsity` with `BCOO`s of these shapes. It has a
      method `.explain`, as for `jacobian`.

    Raises:
      TypeError, ValueError: as for `jacfwd` and `jacrev`; `mode` is unknown; as for `jacobian` with a pattern.
      ModuleNotFoundError: as for `jacobian`.

    Warns:
      UserWarning: as for `jacobian`.

    Cost:
      About one gradient for each input element (for several outputs, for each output element too). A sparse Hessian
      costs a gradient's derivative for each color. The Hessian of a scalar is symmetric, so an entry is read from any
      product in which it or its mirror image is not summed with others. For functions with custom derivative rules
      (`jax.custom_jvp`) symmetry is not used, since such rules need not give a symmetric matrix.

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
    how["other_mode"] = "reverse" if mode == "auto" else None
    return jacobian_of("hessian", fun, argnums, has_aux, modes[outer], chunk_size, memory_budget, **how)
