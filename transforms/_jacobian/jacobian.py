"""`jacfwd`, `jacrev` and `jacobian`: Jacobians by columns, by rows, or in the cheaper mode, also in chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypedDict, Unpack, get_args, overload

import jax
from jax.typing import ArrayLike

from .._calls.call import Call
from .._core.arguments import Argnums, check_argnums, check_callable, check_choice, check_count, wrap_like
from .._core.memory import check_budget, chunk_within
from ._sparse.compressed import sparse_evaluator
from ._sparse.pattern import check_sparsity, has_symmetric_hessian
from .dense import in_form, mesh_of
from .mode import (
    Evaluator,
    ModeChoice,
    choose_mode,
    dense_evaluator,
    forward_or,
    in_cheaper_mode,
    product_in,
    refusal,
)

P = ParamSpec("P")
Mode = Literal["auto", "forward", "reverse"]


class Jacobian(Protocol[P]):
    """The function that `jacobian` and `hessian` return."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Compute the Jacobian at these arguments."""

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> ModeChoice:
        """Return the mode that is used for these arguments, and the reason."""


class ArrayJacobian(Protocol[P]):
    """The `Jacobian` of a function from an array, and further arguments, to an array."""

    @overload
    def __call__(self, x: ArrayLike, /, *args: P.args, **kwargs: P.kwargs) -> jax.Array: ...
    @overload
    def __call__(self, x: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any: ...

    def explain(self, x: Any, /, *args: P.args, **kwargs: P.kwargs) -> ModeChoice:
        """Return the mode that is used for these arguments, and the reason."""


class _Options(TypedDict, total=False):
    mode: Mode
    chunk_size: int | None
    memory_budget: int | str | None
    check: bool
    holomorphic: bool
    allow_int: bool


def jacfwd(
    fun: Callable[P, Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
    holomorphic: bool = False,
) -> Callable[P, Any]:
    """Compute the Jacobian of `fun` column by column, in forward mode.

    As `jax.jacfwd`, but modules are differentiated with respect to their parameters, errors name the argument, the
    auxiliary output may be anything, and `chunk_size` or `memory_budget` bounds the memory.

    Args:
      fun: a function, a bound method or a module that takes real arrays and returns real or complex floating-point
        arrays.
      argnums: an int, or a tuple of ints; negative ones count from the end of the positional arguments.
      has_aux: whether `fun` returns `(output, aux)`; the result is then `(jacobian, aux)`.
      chunk_size: the number of columns to compute at a time; None computes all at once. They are written in place.
      memory_budget: bytes, or a string such as "512MiB" (1024 * 1024 bytes each), "2GB" (1000**3) or "1e9", in upper or
        lower case. The largest chunk is used for which the temporaries of the whole Jacobian fit, as reported by the
        compiler; arguments and results are not counted. Inside a `vmap`, a loop or a derivative the budget bounds the
        temporaries of one slice, iteration or evaluation, and a warning is given. `fun` must not branch on values.
      holomorphic: whether `fun` is holomorphic, as for `jax.jacfwd`: its arguments, its outputs and the derivatives are
        complex. This is not checked.

    Returns:
      A function of the same arguments that returns the Jacobian: the structure of the output with, in place of each
      array, the structure of the argument (a tuple for a tuple of argnums; an `nnx.State` for a module), and arrays of
      shape `output.shape + argument.shape`.

    Raises:
      TypeError: `fun` is not callable; `argnums` or `chunk_size` has a wrong type; an argument is not real
        floating-point (with `holomorphic`, arguments and outputs must be complex).
      ValueError: `argnums` is empty, out of range, or names an argument twice; `chunk_size` is below 1 or given along
        with `memory_budget`; no chunk fits into the budget; `fun` assigns parameters of a module.

    Warns:
      UserWarning: a memory budget is used inside a `vmap`, a loop or a derivative, so the whole program may need more.

    Cost:
      One linearization, and one forward-mode derivative for each input element.

    Source:
      `jax.jacfwd`; `mindspore.jacfwd`; `torch.func.jacfwd`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import jacfwd
      >>> jacfwd(lambda x, y: x * y, argnums=(0, 1))(jnp.array([1.0, 2.0]), 3.0)
      (Array([[3., 0.],
             [0., 3.]], dtype=float32), Array([1., 2.], dtype=float32))
    """
    return jacobian_of("jacfwd", fun, argnums, has_aux, "forward", chunk_size, memory_budget, holomorphic=holomorphic)


def jacrev(
    fun: Callable[P, Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, Any]:
    """Compute the Jacobian of `fun` row by row, in reverse mode.

    As `jax.jacrev`, with the additions of `jacfwd` to `jax.jacfwd`.

    Args:
      fun: as for `jacfwd`, but with real outputs.
      argnums: as for `jacfwd`.
      has_aux: as for `jacfwd`.
      chunk_size: the number of rows to compute at a time.
      memory_budget: as for `jacfwd`.
      holomorphic: as for `jacfwd`. Without it, complex arguments of functions with real outputs give the same as
        `jax.jacrev`.
      allow_int: whether `argnums` may name integer and boolean arguments, as for `jax.jacrev`: their blocks are zeros
        of the argument's dtype.

    Returns:
      As for `jacfwd`.

    Raises:
      TypeError, ValueError: as for `jacfwd`; an output is not real floating-point (with `holomorphic`, not complex).

    Warns:
      UserWarning: as for `jacfwd`.

    Cost:
      One evaluation, and one reverse-mode derivative for each output element.

    Source:
      `jax.jacrev`; `mindspore.jacrev`; `torch.func.jacrev`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import jacrev
      >>> jacrev(jnp.square)(jnp.array([1.0, 2.0]))
      Array([[2., 0.],
             [0., 4.]], dtype=float32)
    """
    kinds: Any = {"holomorphic": holomorphic, "allow_int": allow_int}
    return jacobian_of("jacrev", fun, argnums, has_aux, "reverse", chunk_size, memory_budget, **kinds)


@overload
def jacobian(
    fun: Callable[Concatenate[jax.Array, P], jax.Array],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    *,
    sparsity: None = None,
    **options: Unpack[_Options],
) -> ArrayJacobian[P]: ...
@overload
def jacobian(
    fun: Callable[P, Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    sparsity: Any = None,
    **options: Unpack[_Options],
) -> Jacobian[P]: ...
def jacobian(
    fun: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    mode: Mode = "auto",
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
    sparsity: Any = None,
    check: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Any:
    """Compute the Jacobian of `fun` in the cheaper mode, dense or sparse.

    Args:
      fun: as for `jacfwd`.
      argnums: as for `jacfwd`.
      has_aux: as for `jacfwd`.
      mode: "forward" (as `jacfwd`), "reverse" (as `jacrev`), or "auto": chosen by the numbers of input and output
        elements, or where these are similar by the operations that XLA counts for both modes. Nothing is timed.
      chunk_size: the number of columns or rows to compute at a time.
      memory_budget: as for `jacfwd`.
      sparsity: None for dense arrays. "auto" for a sparse result: its entries are found by analysis of the program, and
        are those that can be nonzero for some values of the differentiated arguments (the product of a known zero and
        an infinity counts as zero). Or a pattern that contains all of these entries: a `BCOO`, such as an earlier
        result, a SciPy sparse array or a boolean array, of shape (outputs, inputs) or, nested as the result, one for
        each pair of arrays.
      check: whether to compare a sparse result with the product of the Jacobian and a random vector, to about the
        square root of the dtype's precision.
      holomorphic: as for `jacrev`; not together with `sparsity`.
      allow_int: as for `jacrev`; not together with `sparsity` or `mode="forward"`.

    Returns:
      As for `jacfwd`; with `sparsity`, a `jax.experimental.sparse.BCOO` in place of each array, with sorted indices.
      The returned function has a method `.explain(*args, **kwargs)`, which returns a `ModeChoice`: the mode that is
      used for these arguments, and the reason.

    Raises:
      TypeError, ValueError: as for `jacfwd` and `jacrev`; `mode` is unknown; `sparsity` is given with `holomorphic` or
        `allow_int`; the pattern has a wrong type or shape; with `check`, the pattern lacks entries. Inside `jit` or
        `vmap` a callback raises the last error at run time.

    Warns:
      UserWarning: as for `jacfwd`; a primitive has no rule for patterns (such as a callback into Python), so every
        result is assumed to depend on all operands; or `fun` branches on values, so all entries are computed and kept.

    Cost:
      The cost of the cheaper of `jacfwd` and `jacrev`. If the numbers of input and output elements are similar, both
      modes are lowered once for each kind of arguments (structure, shapes, dtypes, values of integers and strings), and
      the choice is remembered as long as the function is alive. Values that `fun` closes over, and other values, are
      assumed not to change which mode is cheaper; if they make the remembered mode impossible, it is chosen again.
      `.explain` always chooses again, and so do calls of objects without weak references (because of `__slots__`).

      Sparse: one linearization and one product for each color. Columns that share no row, or rows that share no
      column, can have the same color. In mode "auto" a few dense rows or columns may be computed in the other mode
      than the rest. If this takes as many products as the dense Jacobian, the entries are read from that. The pattern
      is found and colored once for each trace, or outside `jit` at each call: in 0.1 s for 2,000 inputs, 0.5 s for
      100,000.

    Source:
      `jax.jacfwd` and `jax.jacrev`; Griewank and Walther 2008, "Evaluating Derivatives"; for sparse ones Gebremedhin,
      Manne and Pothen 2005, "What color is your Jacobian?".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import jacobian
      >>> rows = jacobian(lambda x: jnp.stack([x.sum(), x.prod()]))
      >>> rows(jnp.arange(1.0, 10.0)).shape
      (2, 9)
      >>> rows.explain(jnp.arange(1.0, 10.0)).mode
      'reverse'
      >>> differences = jacobian(lambda x: x[1:] ** 2 - x[:-1], sparsity="auto")
      >>> differences(jnp.arange(1.0, 10.0))
      BCOO(float32[8, 9], nse=16)
    """
    options: Any = {"sparsity": sparsity, "check": check, "holomorphic": holomorphic, "allow_int": allow_int}
    return jacobian_of("jacobian", fun, argnums, has_aux, mode, chunk_size, memory_budget, **options)


def jacobian_of(
    api: str,
    fun: Callable[..., Any],
    argnums: Argnums,
    has_aux: bool,
    mode: str,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
    row_axis: int = 0,
    inner: str | None = None,
    sparsity: Any = None,
    check: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    origin: tuple[Any, Any] | None = None,
    other_mode: str | None = None,
) -> Any:
    """Return the Jacobian transform that all public transforms here share; errors begin with `api`.

    In reverse mode the axes of the output come before axis `row_axis` of each argument. With `inner`, return the
    Jacobian of the Jacobian in that mode. If `fun` is a new wrapper in each call, `origin` is the key under which the
    chosen mode is remembered: the user's function and a hashable value. If forward mode cannot differentiate `fun`, the
    Jacobian is taken in `other_mode`, if there is one.
    """
    check_choice(api, "mode", mode, get_args(Mode))
    check_callable(api, fun)
    positions = check_argnums(api, argnums)
    check_count(api, "chunk_size", chunk_size, optional=True)
    budget = check_budget(api, memory_budget, chunk_size)
    check_sparsity(api, sparsity, check)
    if sparsity is not None and (holomorphic or allow_int):
        raise ValueError(f"{api}: sparsity is for real arguments; leave out holomorphic and allow_int, or sparsity.")
    if allow_int and mode == "forward":
        raise ValueError(f'{api}: allow_int=True needs reverse mode; pass mode="reverse" or "auto".')
    # Only reverse mode supports complex arguments with real outputs, in the convention of `jax.jacrev`.
    complex_too = mode != "forward" and inner is None and sparsity is None

    def prepare(args: Any, kwargs: Any, inner: str | None = inner, inner_chunk: int | None = None) -> Call:
        """Return the `Call` of `fun`, or of its Jacobian in mode `inner`."""
        differentiated = fun
        if inner is not None:
            differentiated = jacobian_of(api, fun, argnums, has_aux, inner, inner_chunk, holomorphic=holomorphic)
        call = Call(api, differentiated, positions, has_aux, args, kwargs, holomorphic=holomorphic)
        call.check_floating(complex_too=complex_too, allow_int=allow_int)
        return call

    def possible(call: Call) -> str:
        """Return the mode, or `other_mode` if forward mode cannot differentiate a call (with a `jax.custom_vjp`)."""
        if other_mode is None or refusal(partial(product_in("forward", call), call.primals), call.primals) is None:
            return mode
        return other_mode

    def nest(call: Call, out: Any, blocks: list[list[Any]]) -> Any:
        """Arrange blocks, one for each pair of an output and an input array, in the structure of the result."""
        return jax.tree.unflatten(jax.tree.structure(out), [in_form(argnums, call, row) for row in blocks])

    def sparse_of(call: Call, args: Any, kwargs: Any, mode: str) -> tuple[Evaluator, ModeChoice]:
        # Whether the Hessian is symmetric depends on the innermost function: custom rules may be inconsistent.
        symmetric = inner is not None and has_symmetric_hessian(prepare(args, kwargs, None))
        return sparse_evaluator(api, call, partial(nest, call), sparsity, check, mode, symmetric)

    def compute(call: Call, evaluator: Evaluator, args: Any, kwargs: Any) -> tuple[Any, list[list[Any]], Any]:
        """Evaluate in chunks that fit into the budget; return the output, the blocks, and `rest` for `call.finish`."""
        chunk = chunk_size
        if budget is not None:
            # One search serves both Jacobians of a Hessian: k = (slices of the outer one) * (slices of the inner one).
            # The outer chunk is reduced first; at a single outer slice the inner Jacobian is chunked too.
            inner_size = 1 if inner is None else dense_evaluator(api, prepare(args, kwargs, None), inner).slices()

            def chunked(k: int) -> tuple[Call, int]:
                return (unchunked, k // inner_size) if k >= inner_size else (prepare(args, kwargs, inner, k), 1)

            unchunked, size = call, evaluator.slices() * inner_size
            call, chunk = chunked(chunk_within(api, lambda k: evaluator.compute(api, *chunked(k)), size, budget))
        return evaluator.compute(api, call, chunk)

    def of_arguments(*args: Any, **kwargs: Any) -> Any:
        """Return the Jacobian at these arguments, in the chosen or requested mode."""
        call = prepare(args, kwargs)

        def dense(mode: str) -> Any:
            return compute(call, dense_evaluator(api, call, mode, row_axis), args, kwargs)

        with mesh_of((args, kwargs)):  # for arrays sharded over explicit axes of a mesh that is not set
            if sparsity is not None:
                found = compute(call, sparse_of(call, args, kwargs, possible(call))[0], args, kwargs)
            elif other_mode is not None:
                product = partial(product_in(mode, call), call.primals)
                found = forward_or(partial(dense, other_mode), partial(dense, mode), product, call.primals)
            else:
                found = in_cheaper_mode(api, call, dense, origin) if mode == "auto" else dense(mode)
            out, blocks, rest = found
            aux = call.finish(rest)
            result = nest(call, out, blocks)
        return (result, aux) if has_aux else result

    def rebuild(fun: Callable[..., Any]) -> Any:
        options: Any = {"row_axis": row_axis, "inner": inner, "sparsity": sparsity, "check": check}
        options |= {"holomorphic": holomorphic, "allow_int": allow_int, "other_mode": other_mode}
        return jacobian_of(api, fun, argnums, has_aux, mode, chunk_size, memory_budget, **options)

    # `jacfwd`, `jacrev` and `batch_jacobian` return a plain function: there is no choice to explain.
    wrapped: Any = wrap_like(fun, api, of_arguments, rebuild)
    if api in ("jacobian", "hessian"):

        def explain(*args: Any, **kwargs: Any) -> ModeChoice:
            """Return the mode for these arguments, and the reason."""
            call = prepare(args, kwargs)
            with mesh_of((args, kwargs)):
                chosen = possible(call)
                if sparsity is not None:
                    return sparse_of(call, args, kwargs, chosen)[1]
                choice = choose_mode(api, call)
            asked = f'mode="{mode}" was passed' if inner is None else f"the outer Jacobian is in {mode} mode"
            return choice if mode == "auto" or chosen != mode else choice._replace(mode=mode, why=asked)

        wrapped.explain = explain
    return wrapped
