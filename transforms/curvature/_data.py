"""The curvature of a loss over all examples of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._core.arguments import describe
from .._models.split_model import is_module
from ._blocks import EigenBlock, KroneckerBlock
from ._diagonal import ggn_diagonal
from ._ekfac import ekfac
from ._kfac import kfac
from ._kronecker import KroneckerFactors
from ._outputs import Fisher, ModelAndLoss
from ._squares import WeightSharing

Structure = Literal["kfac", "ekfac", "diagonal"]


def batches_of(api: str, data: Any) -> list[tuple[Any, Any]]:
    """Return the batches (x, y) of one such tuple, or of an iterable of them."""
    if not isinstance(data, Iterable):
        raise TypeError(f"{api}: data must be a tuple (x, y) or an iterable of such tuples, but got {describe(data)}.")
    every = [data] if isinstance(data, tuple) else list(data)
    if not every:
        raise ValueError(f"{api}: data has no batches.")
    for batch in every:
        if not isinstance(batch, tuple) or len(batch) != 2:
            given = describe(batch) if not isinstance(batch, tuple) else f"a tuple of {len(batch)}"
            raise TypeError(f"{api}: data must be a tuple (x, y) or an iterable of such tuples, but has {given}.")
    return [jax.tree.map(jnp.asarray, batch) for batch in every]


def snapshot(params: Any) -> Any:
    """Return a copy of a module, whose later training must not change what was computed; anything else as it is."""
    if not is_module(params):
        return params
    from flax import nnx

    return nnx.clone(params)


def check_definite(
    api: str, model: Any, loss: Any, params: Any, batches: Sequence[tuple[Any, Any]], argnums: Any, results: Any
) -> None:
    """Raise if results that are not traced are NaN because the Hessian of an example's loss is indefinite."""
    both = ModelAndLoss(api, model, loss, argnums)
    for batch in batches:
        both.of((params, *batch), None, samples=False)[0].check_definite(results)


def size_of(batch: tuple[Any, Any]) -> int:
    """Return the number of examples of a batch."""
    return len(jax.tree.leaves(batch[0])[0])


def factors_of_data(
    api: str,
    model: Callable[..., Any],
    loss: Callable[..., Any],
    params: Any,
    batches: Sequence[tuple[Any, Any]],
    structure: Structure,
    *,
    argnums: Any = 0,
    fisher: Fisher = "exact",
    weight_sharing: WeightSharing = "expand",
    key: Any = None,
) -> KroneckerFactors:
    """Return the mean curvature over the examples of all batches, by eigenvectors if `structure` is "ekfac"."""
    total = sum(map(size_of, batches))
    keys = [None] * len(batches) if key is None else list(jax.random.split(key, len(batches)))
    options: dict[str, Any] = {"argnums": argnums, "fisher": fisher, "weight_sharing": weight_sharing}

    def mean(of_batch: Callable[..., Any], **given: Any) -> KroneckerFactors:
        """Return the mean over the batches of the factors that `of_batch` returns."""
        compiled = jax.jit(of_batch)
        result: Any = None
        for batch, own in zip(batches, keys, strict=True):
            found = (size_of(batch) / total) * compiled(params, *batch, key=own, **given)
            result = found if result is None else _added(result, found)
        return result

    if structure == "diagonal":
        if fisher == "empirical":
            raise ValueError(f"{api}: the diagonal has no empirical form; pass fisher='exact' or 'mc'.")
        diagonal = ggn_diagonal(model, loss, argnums, samples=None if fisher == "exact" else 1)
        found = mean(lambda *args, **given: _of_diagonal(diagonal(*args, **given)))
    else:
        found = mean(kfac(model, loss, **options))
    if structure == "ekfac":
        basis = tuple(x if isinstance(x, KroneckerBlock) and x.exact else x.eigen() for x in found.blocks)
        found = mean(ekfac(model, loss, **options), basis=replace(found, blocks=basis))
    check_definite(api, model, loss, params, batches, argnums, found)
    return found


def _added(one: KroneckerFactors, other: KroneckerFactors) -> KroneckerFactors:
    """Return the sum of factors which have the same eigenvectors, if they have any."""
    pairs: Any = zip(one.blocks, other.blocks, strict=True)
    blocks = [replace(x, values=x.values + y.values) if isinstance(x, EigenBlock) else x.plus(y) for x, y in pairs]
    return replace(one, blocks=tuple(blocks))


def _of_diagonal(diagonal: Any) -> KroneckerFactors:
    """Return the factors of a diagonal matrix from a pytree like the parameters."""
    leaves, structure = jax.tree.flatten(diagonal)
    return KroneckerFactors(tuple(KroneckerBlock.of_matrix(x.ravel(), x.shape) for x in leaves), structure)
