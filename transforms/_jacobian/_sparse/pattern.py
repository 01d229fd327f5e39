"""Sparsity patterns: the entries of a Jacobian that may be nonzero, given by the caller or found in the program."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._calls.call import Call
from ..._core.arguments import describe
from ..._core.compat import NeedsValues, Tracer, is_of_jax
from ..._core.jaxpr import CUSTOM, with_inner
from ..dense import sizes_of
from ..mode import product_in

# For each output array, for each input array, the entries of their block in row-major order.
Entries = list[list[jax.Array]]


class Pattern(NamedTuple):
    """The entries of a matrix that may be nonzero, without duplicates, in row-major order.

    Rows are output elements, columns are input elements; several arrays are flattened and concatenated.

    Attributes:
      rows: the row of each entry.
      cols: the column of each entry.
      shape: the numbers of rows and columns.
    """

    rows: np.ndarray
    cols: np.ndarray
    shape: tuple[int, int]


class UnknownPattern(Exception):
    """The pattern cannot be found; the message is the reason."""


def pattern_at(rows: Any, cols: Any, shape: tuple[int, int]) -> Pattern:
    """Return the pattern with entries at these rows and columns, in any order and possibly with duplicates."""
    # In 64 bits, since the product of both sizes may exceed 32 bits. Usually the entries are sorted already.
    flat = np.asarray(rows, np.int64) * shape[1] + np.asarray(cols, np.int64)
    if not (flat[1:] > flat[:-1]).all():
        flat = np.sort(flat)
        flat = flat[np.diff(flat, prepend=-1) > 0]
    return Pattern(*np.divmod(flat, max(1, shape[1])), shape)


def full_pattern(shape: tuple[int, int]) -> Pattern:
    """Return the pattern with every entry."""
    rows, cols = np.indices(shape).reshape(2, -1)
    return Pattern(rows, cols, shape)


def blocks_of(
    pattern: Pattern, outputs: list[Any], inputs: list[Any]
) -> Iterator[tuple[int, int, np.ndarray, tuple[np.ndarray, np.ndarray]]]:
    """Yield for each pair of an output and an input array: both indices, the entries of its block, their positions."""
    row, col = starts_of(outputs), starts_of(inputs)
    # Rows are sorted, so the entries of an output array are contiguous, but not the entries of an input array.
    borders = np.searchsorted(pattern.rows, row)
    for j in range(len(outputs)):
        within = np.arange(borders[j], borders[j + 1])
        array = np.searchsorted(col, pattern.cols[within], "right") - 1
        for i in range(len(inputs)):
            chosen = within[array == i]
            yield j, i, chosen, (pattern.rows[chosen] - row[j], pattern.cols[chosen] - col[i])


def starts_of(arrays: list[Any]) -> np.ndarray:
    """Return the offset of each array in the concatenation of all, followed by the total size."""
    return np.cumsum([0, *sizes_of(arrays)])


def strides_of(shape: Sequence[int]) -> np.ndarray:
    """Return the strides of an array of this shape, in elements."""
    return np.cumprod([1, *shape[:0:-1]], dtype=np.int64)[::-1][: len(shape)]


def check_sparsity(api: str, sparsity: Any, check: Any) -> None:
    """Raise if `sparsity` is not a valid pattern for any call, or if `check` is set without one."""
    if not isinstance(check, bool):
        raise TypeError(f"{api}: check must be True or False, but got {describe(check)}.")
    if sparsity is None:
        if check:
            raise ValueError(f"{api}: check=True compares a sparse result with a product; pass sparsity too.")
        return
    if isinstance(sparsity, str) and sparsity != "auto":
        raise ValueError(f'{api}: sparsity must be "auto" or a pattern, but got {sparsity!r}.')
    if not isinstance(sparsity, str):
        for pattern in jax.tree.leaves(sparsity, is_leaf=lambda x: hasattr(x, "shape")):
            _check_pattern(api, pattern)


def _check_pattern(api: str, given: Any) -> None:
    """Raise if one matrix of a pattern has a wrong type, has batch or dense axes, or is traced."""
    if _is_bcoo(given):
        if given.n_batch or given.n_dense:
            raise ValueError(f"{api}: the sparsity pattern has batch or dense axes; pass one with sparse axes only.")
    elif not _is_scipy(given) and getattr(given, "dtype", None) != np.bool_:
        got = describe(given)
        raise TypeError(f"{api}: a sparsity pattern must be a BCOO, SciPy sparse or boolean array, but got {got}.")
    if isinstance(given.indices if _is_bcoo(given) else given, Tracer):
        raise TypeError(f"{api}: the sparsity pattern is traced; create it outside jit, or with NumPy.")


# Tested by name, so that neither library is imported for a pattern of another type.
def _is_bcoo(x: Any) -> bool:
    return type(x).__name__ == "BCOO" and hasattr(x, "n_batch")


def _is_scipy(x: Any) -> bool:
    return type(x).__module__.startswith("scipy.sparse")


def given_pattern(api: str, sparsity: Any, nest: Any, outputs: list[Any], inputs: list[Any]) -> Pattern:
    """Return the pattern that a caller passed, in any of its forms.

    Args:
      api: the transform's name in errors.
      sparsity: one matrix for all outputs and inputs, or one for each pair of their arrays, nested as the result.
      nest: the structure of the result.
      outputs: the output arrays, or their shapes.
      inputs: the input arrays, or their shapes.
    """
    starts = [starts_of(arrays).tolist() for arrays in (outputs, inputs)]
    shape = starts[0][-1], starts[1][-1]
    single = len(outputs) == len(inputs) == 1
    if hasattr(sparsity, "shape") and not single:
        return pattern_at(*_entries(api, sparsity, shape), shape)
    try:
        blocks = iter(nest.flatten_up_to(sparsity))
    except ValueError as error:
        wanted = f"one pattern of shape {shape}, or patterns nested as the result, {nest}"
        raise TypeError(f"{api}: sparsity must be {wanted}, but got {describe(sparsity)}.") from error
    rows, cols = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for output, row in zip(outputs, starts[0], strict=False):
        for x, col in zip(inputs, starts[1], strict=False):
            size = math.prod(jnp.shape(output)), math.prod(jnp.shape(x))
            block = _entries(api, next(blocks), size, jnp.shape(output) + jnp.shape(x))
            rows.append(block[0] + row)
            cols.append(block[1] + col)
    return pattern_at(np.concatenate(rows), np.concatenate(cols), shape)


def _entries(
    api: str, given: Any, size: tuple[int, int], shape: tuple[int, ...] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns of the entries of one matrix, which has shape `size` or, with all axes, `shape`."""
    if tuple(given.shape) not in (size, shape):
        also = "" if shape in (None, size) else f" or {shape}"
        raise ValueError(f"{api}: the sparsity pattern must have shape {size}{also}, but it has {tuple(given.shape)}.")
    if _is_bcoo(given):
        places = np.asarray(given.indices, np.int64)
        inside = (places >= 0) & (places < np.array(given.shape))
        places = places[inside.all(1)]  # a BCOO pads with indices out of bounds
        flat = places @ strides_of(given.shape)
    elif _is_scipy(given):
        flat = np.stack(given.tocoo().coords, 1).astype(np.int64) @ strides_of(given.shape)
    else:
        flat = np.flatnonzero(np.asarray(given))
    return np.divmod(flat, max(1, size[1]))


def found_pattern(api: str, call: Call, mode: str) -> Pattern:
    """Return the pattern of a call, which is valid for any values of its primals.

    It is found in the program of the derivative rather than of the function, so custom derivative rules are respected.
    Other arguments of the call are constants with known values, or unknown if they are traced.

    Args:
      api: the transform's name in errors.
      call: the call.
      mode: "forward" or "reverse": the mode of the derivative that is traced.

    Raises:
      UnknownPattern: the program cannot be traced, or has an operation that no rule can follow.

    Warns:
      UserWarning: a primitive has no rule, so its results are assumed to depend on all operands.
    """
    from .detect import dependence
    from .index_sets import UNKNOWN, matrix_at, rows_of, stacked, unit_sets

    forward = mode == "forward"
    try:
        vectors = call.primals
        if not forward:
            vectors = jax.eval_shape(lambda: call(*call.primals)[0])
        closed = jax.make_jaxpr(product_in(mode, call))(call.primals, vectors)
    except NeedsValues:
        raise UnknownPattern("fun branches on values") from None
    primals = jax.tree.leaves(call.primals)
    sets, columns = unit_sets(sizes_of(vectors))
    try:
        found, without_rule = dependence(closed.jaxpr, closed.consts, [UNKNOWN] * len(primals) + sets)
    except Exception as error:  # an operation in an unknown form: a full pattern is correct too
        raise UnknownPattern(f"the analysis failed with {error!r}") from error
    if without_rule:
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(without_rule))
        warnings.warn(
            f"{api}: the sparsity pattern may have superfluous entries: the results of {names} are assumed to depend "
            "on all operands. Pass the pattern as sparsity=, or leave sparsity out for a dense array.",
            stacklevel=5,
        )
    none = matrix_at([], [], (0, columns))  # in reverse mode there may be no results
    matrix = stacked(
        [none, *(rows_of(x, value, columns) for x, value in zip(closed.jaxpr.outvars, found, strict=True))]
    )
    # The derivative maps `vectors`, along the columns, to its results: in reverse mode this is the transposed Jacobian.
    entries = (matrix if forward else matrix.T).tocoo()
    return pattern_at(entries.row, entries.col, entries.shape)


def has_symmetric_hessian(call: Call) -> bool:
    """Return whether the Hessian is certainly symmetric: with custom derivative rules it need not be."""
    try:
        closed = jax.make_jaxpr(lambda *primals: call(*primals)[0])(*call.primals)
    except NeedsValues:
        return False
    return not any(eqn.primitive.name in CUSTOM and not is_of_jax(eqn) for eqn in with_inner(closed.jaxpr.eqns))
