"""`jacfwd`, `jacrev` and `jacobian`: by columns, by rows, or whichever is cheaper; in chunks where memory is short."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, ParamSpec, Protocol, get_args

import jax

from .._calls.call import Call
from .._core.arguments import Argnums, check_argnums, check_callable, check_choice, check_count, wrap_like
from .._core.memory import check_budget, chunk_within
from ._sparse.compressed import sparse_evaluator
from ._sparse.pattern import check_sparsity, has_symmetric_hessian
from .dense import in_form, mesh_of
from .mode import Evaluator, ModeChoice, choose_mode, dense_evaluator, in_cheaper_mode

P = ParamSpec("P")
Mode = Literal["auto", "forward", "reverse"]


class Jacobian(Protocol[P]):
    """The function that `jacobian` and `hessian` return."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Compute the Jacobian at these arguments."""

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> ModeChoice:
        """Return which mode is taken for these arguments, and why."""


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

    As `jax.jacfwd`, but modules are differentiated with respect to their parameters, arguments are checked by name, the
    auxiliary output may be anything, and `chunk_size` or `memory_budget` bound the memory.

    Args:
      fun: a function, a bound method or a module, of real arrays, with outputs of floating point, complex ones too.
      argnums: an int, or a tuple of ints; negative ones count from the end of the positional arguments.
      has_aux: whether `fun` returns `(output, aux)`; the result is then `(jacobian, aux)`.
      chunk_size: how many columns to compute at a time; None computes all at once. They are written in place.
      memory_budget: bytes, or a string such as "512MiB" (1024 * 1024 bytes each), "2GB" (1000**3) or "1e9", in letters
        of either case. The largest chunk is taken with which the temporaries of the whole Jacobian, as the compiler
        counts them besides arguments and results, fit into it; inside a `vmap`, a loop or a derivative, those of one
        slice, iteration or evaluation, with a warning. `fun` must not branch on values then.
      holomorphic: whether `fun` is a holomorphic function, as for `jax.jacfwd`: its arguments, its outputs and the
        derivatives are complex. That it is holomorphic is not checked.

    Returns:
      A function of the same arguments that returns the Jacobian: the structure of the output, in place of each of its
      arrays the structure of the argument (a tuple of them for a tuple of argnums; `nnx.State` for a module), with
      arrays of shape `output.shape + argument.shape`.

    Raises:
      TypeError: `argnums` of a wrong type; an argument that is not real floating point (with `holomorphic` complex, and
        so the outputs).
      ValueError: `argnums` empty, out of range, or naming an argument twice; `chunk_size` below 1 or given together
        with `memory_budget`; a budget that nothing fits; a module whose parameters `fun` assigns.

    Warns:
      UserWarning: a memory budget inside a `vmap`, a loop or a derivative; the program around may need more memory.

    Cost:
      One linearization, and the work of one derivative for each input number.

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

    As `jax.jacrev`, with what `jacfwd` adds to `jax.jacfwd`.

    Args:
      fun: as for `jacfwd`, but with real outputs.
      argnums: as for `jacfwd`.
      has_aux: as for `jacfwd`.
      chunk_size: how many rows to compute at a time.
      memory_budget: as for `jacfwd`.
      holomorphic: as for `jacfwd`. Without it, complex arguments of real outputs give what `jax.jacrev` gives.
      allow_int: whether `argnums` may name arguments of integers and booleans, as for `jax.jacrev`: their blocks are
        zeros of the argument's dtype.

    Returns:
      As for `jacfwd`.

    Raises:
      TypeError, ValueError: as for `jacfwd`; an output that is not real floating point (with `holomorphic` complex).

    Warns:
      UserWarning: as for `jacfwd`.

    Cost:
      One evaluation, and the work of one gradient for each output number.

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


def jacobian(
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
    allow_int: bool = False,
) -> Jacobian[P]:
    """Compute the Jacobian of `fun` in the cheaper mode, dense or sparse.

    Args:
      fun: as for `jacfwd`.
      argnums: as for `jacfwd`.
      has_aux: as for `jacfwd`.
      mode: "forward" (as `jacfwd`), "reverse" (as `jacrev`), or "auto": chosen by the numbers of inputs and outputs,
        and where these are similar by the operations that XLA counts for both. Nothing is timed.
      chunk_size: how many columns or rows to compute at a time.
      memory_budget: as for `jacfwd`.
      sparsity: None for arrays. "auto" for a sparse result, whose entries are found in the program: those that can
        differ from zero for any values of the arguments differentiated (a known factor of zero is taken to make zero
        of infinities too). Or a pattern that has all of these entries: a `BCOO`, such as an earlier result, a SciPy
        sparse array or an array of booleans, over all outputs and inputs or, nested as the result, for each pair of
        arrays. Patterns are coloured by `asdex` (extra `sparse`).
      check: whether a sparse result is compared with the product of the Jacobian and a random vector, to about the
        square root of the dtype's precision.
      holomorphic: as for `jacrev`; not together with `sparsity`.
      allow_int: as for `jacrev`; not together with `sparsity` or `mode="forward"`.

    Returns:
      As for `jacfwd`; with `sparsity`, a `jax.experimental.sparse.BCOO` in place of each array, its entries in order.
      The returned function has a method `.explain(*args, **kwargs)`, which returns the mode that "auto" takes for these
      arguments, and why, as a `ModeChoice`.

    Raises:
      TypeError, ValueError: as for `jacfwd` and `jacrev`; an unknown mode; a pattern of another type or shape; with
        `check`, a pattern that lacks entries. Inside `jit` or `vmap` a callback raises the latter when it runs.
      ModuleNotFoundError: the extra is missing: `pip install 'plurax[sparse]'`.

    Warns:
      UserWarning: as for `jacfwd`; a primitive has no rule for patterns (a call of Python, one of another library), so
        that its results are taken to depend on all of its operands; or `fun` branches on values, and every entry is
        computed and kept.

    Cost:
      That of the cheaper one of `jacfwd` and `jacrev`. Where the numbers of inputs and outputs are similar, both are
      lowered once for each kind of arguments (structure, shapes, dtypes, values of integers and strings), and the mode
      is remembered as long as the function lives. Closed-over values and other arguments are assumed not to change
      which mode is cheaper; where they make the remembered mode impossible, it is decided again. `.explain` always
      decides again, as does each call of an object without weak references (because of its `__slots__`).

      A sparse one: one linearization and a product for each colour. Columns that share no row have the same colour,
      or rows that share no column; with mode "auto" a few full rows, or columns, are computed in the other mode than
      the rest. Where that takes as many products as the dense one, the entries are taken from the dense one. The
      pattern is found and coloured once for each trace, and outside `jit` for each call: in 0.1 s for 2,000 inputs,
      0.5 s for 100,000.

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
) -> Any:
    """Return the Jacobian transform that all public ones here share; `api` is its name in errors.

    In reverse mode the axes of the output come before axis `row_axis` of each argument. With `inner` it is the Jacobian
    of the Jacobian in this mode. Where `fun` is a new wrapper in each call, `origin` is what it is made from, by which
    the chosen mode is remembered: the user's function and a hashable value.
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
        raise ValueError(f'{api}: allow_int=True needs reverse mode; take mode="reverse" or "auto".')
    # Complex arguments of real outputs have reverse mode only, with the convention of `jax.jacrev`.
    complex_too = mode != "forward" and inner is None and sparsity is None

    def prepare(args: Any, kwargs: Any, inner: str | None = inner, inner_chunk: int | None = None) -> Call:
        """Return the call of `fun`, or of its `inner` Jacobian."""
        differentiated = fun
        if inner is not None:
            differentiated = jacobian_of(api, fun, argnums, has_aux, inner, inner_chunk, holomorphic=holomorphic)
        call = Call(api, differentiated, positions, has_aux, args, kwargs, holomorphic=holomorphic)
        call.check_floating(complex_too=complex_too, allow_int=allow_int)
        return call

    def nest(call: Call, out: Any, blocks: list[list[Any]]) -> Any:
        """Arrange one block for each pair of an output and an input array in the structure of the result."""
        return jax.tree.unflatten(jax.tree.structure(out), [in_form(argnums, call, row) for row in blocks])

    def sparse_of(call: Call, args: Any, kwargs: Any) -> tuple[Evaluator, ModeChoice]:
        # Symmetry is a property of the innermost function: its derivative rules must belong together.
        symmetric = inner is not None and has_symmetric_hessian(prepare(args, kwargs, None))
        return sparse_evaluator(api, call, partial(nest, call), sparsity, check, mode, symmetric)

    def compute(call: Call, evaluator: Evaluator, args: Any, kwargs: Any) -> tuple[Any, list[list[Any]], Any]:
        """Evaluate in chunks that fit into the budget: the output, the blocks, and the rest for `call.finish`."""
        chunk = chunk_size
        if budget is not None:
            # One search serves both Jacobians of a Hessian: k = (slices of the outer one) * (slices of the inner one).
            # The outer chunk shrinks first; below one outer slice the inner Jacobian is chunked too.
            inner_size = 1 if inner is None else dense_evaluator(api, prepare(args, kwargs, None), inner).slices()

            def chunked(k: int) -> tuple[Call, int]:
                return (unchunked, k // inner_size) if k >= inner_size else (prepare(args, kwargs, inner, k), 1)

            unchunked, size = call, evaluator.slices() * inner_size
            call, chunk = chunked(chunk_within(api, lambda k: evaluator.compute(api, *chunked(k)), size, budget))
        return evaluator.compute(api, call, chunk)

    def of_arguments(*args: Any, **kwargs: Any) -> Any:
        """Return the Jacobian at these arguments, in the mode that was chosen or asked for."""
        call = prepare(args, kwargs)

        def dense(mode: str) -> Any:
            return compute(call, dense_evaluator(api, call, mode, row_axis), args, kwargs)

        with mesh_of((args, kwargs)):  # arrays may be sharded over explicit axes of a mesh that is not set
            if sparsity is not None:
                found = compute(call, sparse_of(call, args, kwargs)[0], args, kwargs)
            else:
                found = in_cheaper_mode(api, call, dense, origin) if mode == "auto" else dense(mode)
            out, blocks, rest = found
            aux = call.finish(rest)
            result = nest(call, out, blocks)
        return (result, aux) if has_aux else result

    def rebuild(fun: Callable[..., Any]) -> Any:
        options: Any = {"row_axis": row_axis, "inner": inner, "sparsity": sparsity, "check": check}
        options |= {"holomorphic": holomorphic, "allow_int": allow_int}
        return jacobian_of(api, fun, argnums, has_aux, mode, chunk_size, memory_budget, **options)

    # `jacfwd`, `jacrev` and `batch_jacobian` return a plain function, which has nothing to explain.
    wrapped: Any = wrap_like(fun, api, of_arguments, rebuild)
    if api in ("jacobian", "hessian"):

        def explain(*args: Any, **kwargs: Any) -> ModeChoice:
            """Return the mode for these arguments, and why."""
            call = prepare(args, kwargs)
            with mesh_of((args, kwargs)):
                if sparsity is not None:
                    return sparse_of(call, args, kwargs)[1]
                choice = choose_mode(api, call)
            asked = f'it was asked for by mode="{mode}"' if inner is None else f"the outer Jacobian is in {mode} mode"
            return choice if mode == "auto" else choice._replace(mode=mode, why=asked)

        wrapped.explain = explain
    return wrapped
