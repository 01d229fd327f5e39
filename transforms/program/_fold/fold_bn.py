"""Batch norm folded into the weights before or after it: `fold_bn`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..._core.arguments import check_callable, describe, wrap_like
from ..._core.compat import Tracer
from ..._core.source_lines import call_users
from ..._models.mutation import call_with_models, changes
from ..._models.split_model import dotted, is_model, split, split_tree
from .._ir.flat_program import FlatProgram, Value, parameter
from .._ir.module_scopes import module_scopes, with_paths
from .plan import FoldPlan
from .report import FoldReport


def fold_bn(
    fun: Callable[..., Any], params: Any, *example: Any
) -> tuple[Callable[..., Any], dict[str, jax.Array], FoldReport]:
    """Fold batch norms into the weights of the convolutions and dense layers next to them.

    Batch norms are found in the program of `fun`, so models of Flax NNX, Linen, Equinox and plain functions are treated
    alike: a convolution or dense product with weights that depend on `params` alone, followed by any sequence of
    additions, subtractions, multiplications and divisions that are constant along all axes but the channels. Where the
    sequence comes before a product, it is folded too if that is exact: not into a convolution that pads with zeros,
    unless its shift is zero. Other uses of a value in between are respected: nothing that is used is left out. A
    norm by statistics of the batch (training mode) is computed as before, and the report says so of its scale.

    Args:
      fun: called as `fun(params, *args)`, in inference: it returns arrays, and changes no state.
      params: the parameters and statistics: a module, or any pytree. Leaves that are not arrays stay as they are.
      *example: the other arguments, of which only shapes and dtypes count; `jax.ShapeDtypeStruct` will do.

    Returns:
      fun: called as `fun(params, *args)` with the new parameters; to be compiled, differentiated and mapped like any
        function. It is compiled for each shape of `args`, and any batch size will do.
      params: the new parameters, `{"conv.kernel": array, ...}`: the folded weights under the names of the old, shifts
        under those of biases, or `conv.shift`, and all others that are still used.
      report: the batch norms that were folded, and those that were not and why; `print(report)`.

    Raises:
      TypeError: `fun` cannot be called, or is a module; `params` have no values, as under `jax.jit` or another
        transform.
      ValueError: the call changes a module, as a batch norm in training mode does; or, by the new function: parameters
        that are not those returned here, or a program that differs for these arguments.

    Cost:
      One trace of `fun`, and the weights once more in float64, one at a time. The folded function has fewer operations
      and fewer parameters to read. Where the compiler fuses elementwise operations, as XLA does, that is little: of
      ResNet-18 on a CPU 0.1 % of the bytes. Results are equal up to rounding in the dtype of the weights; of a norm
      before a product, rounding is relative to its shift. Inner `jax.jit` and `jax.checkpoint` are dissolved.

    Source:
      Markuš, "Fusing batch normalization and convolution in runtime", 2018; Jacob et al., "Quantization and training of
      neural networks for efficient integer-arithmetic-only inference", CVPR 2018, section 3.2. Answers to PyTorch's
      convolution and batch norm fusion with `torch.fx`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from plurax.transforms.program import fold_bn
      >>> def block(p, x):
      ...     x = x @ p["dense"]["kernel"] + p["dense"]["bias"]
      ...     x = (x - p["norm"]["mean"]) / jnp.sqrt(p["norm"]["var"] + 1e-5)
      ...     return jax.nn.relu(x)
      >>> dense = {"kernel": jnp.array([[1.0, 2.0]]), "bias": jnp.array([3.0, 4.0])}
      >>> norm = {"mean": jnp.array([1.0, 0.0]), "var": jnp.array([4.0, 1.0])}
      >>> folded, params, report = fold_bn(block, {"dense": dense, "norm": norm}, jnp.ones((2, 1)))
      >>> sorted(params), len(report.folded)
      (['dense.bias', 'dense.kernel'], 1)
      >>> print(folded(params, jnp.ones((3, 1)))[0].round(2))
      [1.5 6. ]
    """
    check_callable("fold_bn", fun)
    if is_model(fun):
        remedy = "pass fold_bn(lambda model, *args: model(*args), model, *example)"
        raise TypeError(f"fold_bn: fun must take the parameters first, but got {describe(fun)}; {remedy}.")
    names = _names(params)
    # With their paths, since the report names the scopes in which `fun` calls modules.
    _, (params, *rest) = with_paths(fun, None, (params, *example))
    leaves, structure = _split(params, numbers=False)
    arguments, argument_structure = _split(tuple(rest))
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, (Tracer, jax.ShapeDtypeStruct)):
            raise TypeError(f"fold_bn: `params.{name}` has no value here; call fold_bn outside of jax.jit.")
    # Only types of the old parameters are kept for later traces, so that their memory can be freed.
    leaf_types = jax.eval_shape(lambda *x: list(x), *leaves)
    flat, _ = _trace(fun, leaf_types, structure, arguments, argument_structure)
    plan = FoldPlan(flat, names, leaves)
    folded, report, first, answers = plan.parameters(), plan.report(), plan.fingerprint(), plan.answers
    expected = {name: (x.shape, x.dtype) for name, x in folded.items()}

    def rewritten(new: dict[str, Any], arguments: Sequence[Any], argument_structure: Any) -> Any:
        """Return the output of `fun`, by its program with the folded weights."""
        # The program has shapes in it, so it is traced and planned for each; the values of the old parameters are gone,
        # and what the first plan found out by them is recorded.
        flat, out = _trace(fun, leaf_types, structure, arguments, argument_structure)
        plan = FoldPlan(flat, names, (), answers)
        if plan.fingerprint() != first:
            raise ValueError("fold_bn: for these shapes, fun combines other parameters; fold with such an example.")
        return jax.tree.unflatten(out, plan(new, arguments))

    # Compiled as one program: the folded weights are arguments, so that new ones of the same shapes compile nothing.
    compiled = jax.jit(rewritten, static_argnums=2)

    def call(params: dict[str, Any], *args: Any) -> Any:
        _check(params, expected)
        arguments, argument_structure = _split(args)
        return compiled(params, arguments, argument_structure)

    return wrap_like(fun, "fold_bn", call), folded, report


def _split(tree: Any, *, numbers: bool = True) -> tuple[list[Any], Any]:
    """Split a pytree into its arrays (and numbers, if asked for) and the rest, which is hashable."""
    leaves, treedef = jax.tree.flatten(split_tree(tree))
    kinds = (int, float, complex) if numbers else ()
    # Numbers among the arguments are traced as under `jax.jit`; those among the parameters stay numbers in the code.
    moves = [_is_array(x) or (isinstance(x, kinds) and not isinstance(x, bool)) for x in leaves]
    rest = tuple(None if moving else x for x, moving in zip(leaves, moves, strict=True))
    return [x for x, moving in zip(leaves, moves, strict=True) if moving], (treedef, rest)


def _merge(arrays: Sequence[Any], structure: Any) -> Any:
    treedef, rest = structure
    left = iter(arrays)
    return jax.tree.unflatten(treedef, [next(left) if x is None else x for x in rest])  # a leaf is never None itself


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _names(tree: Any) -> list[str]:
    """Return the dotted path of each array of a pytree, numbered where two would be the same."""
    names: list[str] = []
    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_model):
        inner = split(leaf).arrays().items() if is_model(leaf) else [("", leaf)]
        names += [".".join(filter(None, [dotted(path), name])) or "params" for name, x in inner if _is_array(x)]
    return [name if name not in names[:i] else f"{name}_{i}" for i, name in enumerate(names)]


def _trace(
    fun: Callable[..., Any], leaves: Sequence[Any], structure: Any, arguments: Sequence[Any], argument_structure: Any
) -> tuple[FlatProgram, Any]:
    """Return the program of `fun`, and the structure of its output."""

    def function(leaves: Sequence[Any], arguments: Sequence[Any]) -> Any:
        """Return the output of `fun`; raise if it changes a module."""
        split: Any = _merge(leaves, structure), _merge(arguments, argument_structure), {}
        out, models = call_with_models(fun, split)
        for paths in changes(fun, split, models):
            if paths:
                raise ValueError(f"fold_bn: fun changes `{paths[0]}` of a module, as in training; call model.eval().")
        return out

    with module_scopes():
        closed, out = call_users(jax.make_jaxpr(function, return_shape=True), leaves, arguments)
    invars = [x.aval for x in closed.jaxpr.invars]
    values = [parameter(x, i) if i < len(leaves) else Value(x) for i, x in enumerate(invars)]
    return FlatProgram(closed.jaxpr, closed.consts, values), jax.tree.structure(out)


def _check(params: Any, expected: dict[str, tuple[tuple[int, ...], np.dtype]]) -> None:
    """Raise unless parameters are those of the folded function."""
    if not isinstance(params, dict):
        raise TypeError(f"fold_bn: params must be the dict that fold_bn returned, but got {describe(params)}.")
    found = {name: (np.shape(x), getattr(x, "dtype", None)) for name, x in params.items()}
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            has, wanted = (x.get(name, "nothing") for x in (found, expected))
            raise ValueError(f"fold_bn: `{name}` of params is {has}, but fold_bn returned {wanted}; pass such arrays.")
