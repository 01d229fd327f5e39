"""The loss of a model as that of one example: keys of its own, and no other state that it may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .._call import with_trainable
from .._changes import call_with_models, changes
from .._grad import scalar_seed
from .._model import Parts, dotted, is_module, is_parts, split


def of_example(loss: Callable[..., Any], tree: Any) -> Callable[..., Any]:
    """`loss(model, *batch)` as a function of what trains, of an example's number, and of its batch.

    Args:
      loss: as for `DPSGD`.
      tree: the model, or a pytree with models in it, taken apart; shared by all examples.

    Returns:
      A function `(trainable, number, *batch)` that returns the loss and, for each model in `tree`, a dict from the
      paths of the random state that the call has changed to its new values.
    """

    def function(_: None, model: Any, /, *batch: Any) -> Any:
        return loss(model, *batch)

    def example_loss(trainable: Any, number: jax.Array, *batch: Any) -> tuple[Any, list[dict[str, Any]]]:
        parts = jax.tree.map(
            lambda x: _for_example(x, number.reshape(())) if is_parts(x) else x,
            with_trainable(tree, trainable),
            is_leaf=is_parts,
        )
        arguments: Any = (None, (parts, *batch), {})
        out, left = call_with_models(function, arguments)
        changed = changes(function, arguments, left)
        kept = [_random_state(model) for model in left]
        for model, paths, random in zip(left, changed, kept, strict=True):
            arrays = split(model).arrays()
            lost = [path for path in paths if path not in random and not _is_key(arrays.get(path))]
            if lost:
                raise ValueError(
                    f"DPSGD: the loss changes the state of {type(model).__name__} (`{lost[0]}`), which the noise does "
                    "not cover: statistics of a batch say something of each of its examples; use nnx.GroupNorm or "
                    "nnx.LayerNorm in place of BatchNorm, or the evaluation mode of trained statistics, "
                    "nnx.view(model, use_running_average=True)."
                )
        scalar_seed("DPSGD: the loss", out, "return the mean over the batch that it is given, which is of one example")
        after = [split(model).arrays() for model in left]
        return out, [{path: arrays[path] for path in paths} for paths, arrays in zip(changed, after, strict=True)]

    return example_loss


def with_random_state(tree: Any, changed: list[dict[str, Any]]) -> Any:
    """`tree` with the random state that the first example has left: keys and counts do not depend on any data."""
    each = iter(changed)

    def of_model(parts: Any) -> Any:
        if not is_parts(parts):
            return parts
        new = next(each)
        rest = jax.tree.map_with_path(lambda path, x: new[dotted(path)][0] if dotted(path) in new else x, parts.rest)
        return Parts(parts.structure, parts.trainable, rest)

    return jax.tree.map(of_model, tree, is_leaf=is_parts)


def _for_example(parts: Parts, number: jax.Array) -> Parts:
    """A model whose random keys are those of one example."""
    random = _random_state(parts.merge())

    def fold(path: Any, x: Any) -> Any:
        if dotted(path) not in random or not _is_key(x):
            return x
        keys = jax.vmap(lambda key: jax.random.fold_in(key, number))(x.reshape(-1))
        return keys.reshape(x.shape)

    return Parts(parts.structure, parts.trainable, jax.tree.map_with_path(fold, parts.rest))


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _random_state(model: Any) -> set[str]:
    """The paths of what a module draws random numbers from: its keys, and how often each was used."""
    if not is_module(model):
        return set()
    from flax import nnx

    return {dotted(path) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.RngState))}
