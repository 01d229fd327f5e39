"""`clipped_fun`: the sum of a function's outputs over the samples of a batch, each clipped to a norm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .._core.arguments import (
    Argnums,
    check_argnums,
    check_callable,
    check_count,
    count_examples,
    describe,
    leaf_name,
    resolve_argnums,
    wrap_like,
)
from ._per_example.clip_norms import check_grid, clip_norms, of_group, sum_on_grid
from ._per_example.clipped import ClippedFun, checked_divisor, most_at_a_time, padding_mask
from ._per_example.gradient_forms import Dense, wide
from ._per_example.loss import on_any_mesh
from ._per_example.methods import in_groups, positive, squared_norms

_API = "clipped_fun"


def clipped_fun(
    fun: Callable[..., Any],
    has_aux: bool = False,
    *,
    batch_argnums: Argnums = 0,
    keep_batch_dim: bool = True,
    l2_clip_norm: Any = 1.0,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
    return_norms: bool = False,
    microbatch_size: int | None = None,
    nan_safe: bool = True,
    dtype: Any = None,
    prng_argnum: int | None = None,
    spmd_axis_name: str | None = None,
    automatic: float | None = None,
    grid_scale: int | None = None,
) -> ClippedFun:
    """Sum the outputs of a function for the samples of a batch, each scaled down to a norm.

    A drop-in replacement for `jax_privacy.clipping.clipped_fun`, for private means, histograms and other queries.
    Gradients of losses take less memory with `clipped_grad`.

    Args:
      fun: a function that returns a real floating-point array, or a pytree of them, for one sample.
      has_aux: whether `fun` returns `(value, aux)`; only the value is clipped and summed.
      batch_argnums: the arguments with the samples along axis 0. All other positional arguments are shared; keyword
        arguments are split along axis 0 too.
      keep_batch_dim: whether `fun` receives each sample as a batch of one; with False, without that axis.
      l2_clip_norm: as for `clipped_grad`; a pytree of norms is a prefix of the value.
      rescale_to_unit_norm: as for `clipped_grad`.
      normalize_by: the divisor of the sum.
      return_norms: whether to return the norm of each sample's value before clipping.
      microbatch_size: the number of samples to compute at a time; it must divide the batch.
      nan_safe: as for `clipped_grad`.
      dtype: the dtype of the sum; None for that of the value.
      prng_argnum: as for `clipped_grad`.
      spmd_axis_name: as for `jax.vmap`.
      automatic: as for `clipped_grad`.
      grid_scale: as for `clipped_grad`.

    Returns:
      A function of the same arguments, and of `is_padding_example=` as for `clipped_grad`. It returns the sum; with
      `has_aux` or `return_norms` a pair of the sum and the auxiliary output or the norms, or a pair of both, with the
      samples along axis 0. Its method `.sensitivity()` returns the L2 sensitivity.

    Raises:
      TypeError, ValueError: as for `clipped_grad`; a value that is not floating point.

    Cost:
      Memory for the values of all samples, or of `microbatch_size` of them.

    Source:
      `jax_privacy.clipping.clipped_fun`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms.privacy import clipped_fun
      >>> clipped_fun(jnp.mean, l2_clip_norm=1.0)(jnp.array([0.0, 0.5, 3.0, -4.0]))
      Array(0.5, dtype=float32)
    """
    check_callable(_API, fun)
    positions = check_argnums(_API, batch_argnums, "batch_argnums")
    check_count(_API, "microbatch_size", microbatch_size, optional=True)
    clipping = clip_norms(_API, l2_clip_norm, automatic, rescale=rescale_to_unit_norm, nan_safe=nan_safe)
    normalize_by = checked_divisor(_API, normalize_by, dtype, prng_argnum)
    check_grid(_API, grid_scale, clipping, normalize_by, dtype)

    def of_one(args: tuple[Any, ...], example: Any) -> tuple[Any, Any]:
        """Return the value for one sample, and the auxiliary output."""
        batch, keys, kwargs = example
        if keep_batch_dim:
            batch = jax.tree.map(lambda x: x[None], batch)
        given = {**dict(enumerate(args)), **batch, **keys}
        result = fun(*(given[i] for i in range(len(args))), **kwargs)
        if has_aux and not (isinstance(result, (tuple, list)) and len(result) == 2):
            raise TypeError(f"{_API}: with has_aux, fun must return (value, aux), but it returned {describe(result)}.")
        value, aux = result if has_aux else (result, ())
        for path, x in jax.tree.leaves_with_path(value):
            if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
                where = leaf_name("value", path)
                raise TypeError(f"{_API}: fun must return real floating-point numbers, but `{where}` is {describe(x)}.")
        value = jax.tree.map(jnp.asarray, value)
        return (value if dtype is None else jax.tree.map(lambda x: x.astype(dtype), value)), aux

    def clipped(*args: Any, is_padding_example: Any = None, **kwargs: Any) -> Any:
        """Return the clipped sum, and the auxiliary results that were requested."""
        batched = resolve_argnums(_API, fun, positions, args, "batch_argnums")
        size = count_examples(_API, fun, batched, args)
        padding = padding_mask(_API, is_padding_example, size)
        group = most_at_a_time(_API, microbatch_size, size)
        keys = {}
        if prng_argnum is not None:
            (at,) = resolve_argnums(_API, fun, (prng_argnum,), args, "prng_argnum")
            if at in batched:
                raise ValueError(f"{_API}: prng_argnum={prng_argnum} is in batch_argnums; pass the position of a key.")
            keys[at] = jax.tree.map(lambda key: jax.random.split(key, size), args[at])
        leaves, treedef = jax.tree.flatten(({i: args[i] for i in batched}, keys, kwargs))
        examples = list(map(jnp.asarray, leaves))
        one = partial(of_one, args)
        shapes = jax.eval_shape(lambda example: one(example)[0], _first(examples, treedef))
        groups = clipping.groups(_API, shapes)
        clip, like = clipping, jax.tree.leaves(shapes)
        if grid_scale is not None:
            clip = clipping.before_rounding(_API, grid_scale, sum(x.size for x in like))

        def of_some(examples: list[Any], padding: jax.Array) -> tuple[Any, Any]:
            """Return the clipped sum of some samples, and their norms and auxiliary outputs."""
            values, aux = jax.vmap(one, spmd_axis_name=spmd_axis_name)(jax.tree.unflatten(treedef, examples))
            each = jax.tree.leaves(values)
            norms = jnp.sqrt(squared_norms(each, groups))
            weights = jnp.where(padding if groups is None else padding[:, None], 0.0, clip.weights(positive(norms)))
            if grid_scale is not None:
                return sum_on_grid(each, weights, l2_clip_norm, grid_scale), (norms, aux)
            of_leaf = [None] * len(each) if groups is None else groups.of_leaf
            sums = [Dense(x).weighted(of_group(weights, g), dtype) for x, g in zip(each, of_leaf, strict=True)]
            return sums, (norms, aux)

        start = [jnp.zeros(x.shape, wide(x.dtype, dtype) if grid_scale is None else jnp.int64) for x in like]
        total, (norms, aux) = in_groups(of_some, examples, padding, group, start)
        if grid_scale is None:
            total = [(x / normalize_by).astype(y.dtype) for x, y in zip(total, like, strict=True)]
        result = jax.tree.unflatten(jax.tree.structure(shapes), total)
        if keep_batch_dim:  # the axis of the batch of one
            aux = jax.tree.map(lambda x: x.squeeze(1) if x.ndim > 1 and x.shape[1] == 1 else x, aux)
        more = [*([aux] if has_aux else []), *([clipping.shaped(norms)] if return_norms else [])]
        return (result, more[0] if len(more) == 1 else tuple(more)) if more else result

    bound = clipping.l2_norm_bound() / normalize_by if grid_scale is None else float(grid_scale)
    more = has_aux or return_norms
    on_mesh = on_any_mesh(_API, fun, batch_argnums, clipped, lambda out: out[0] if more else out)
    return ClippedFun(wrap_like(fun, _API, on_mesh), bound, more)


def _first(examples: list[jax.Array], treedef: Any) -> Any:
    """Return the shapes and dtypes of one sample."""
    return jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in examples])
