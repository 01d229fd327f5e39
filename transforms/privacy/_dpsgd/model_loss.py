"""The loss of a model as a function of one example, with a random key for each example and no other mutable state.

Noise protects gradients only. A model that keeps anything else computed from the data, such as BatchNorm statistics,
would publish it, so a loss that changes state raises. Random state is the exception: the number of times that a key
was used is public.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax

from ..._calls.call import pair_of
from ..._calls.primals import with_trainable
from ..._core.arguments import leaf_name
from ..._core.prng import is_key
from ..._grad import scalar_seed
from ..._models.equinox import released
from ..._models.evaluation import evaluating_tree
from ..._models.mutation import call_with_models, changes, random_state, with_changes
from ..._models.split_model import (
    SplitModel,
    array_name,
    is_members,
    is_module,
    is_split,
    split,
    splits_of,
    with_splits,
)


def of_example(loss: Callable[..., Any], tree: Any, key: jax.Array, has_aux: bool) -> Callable[..., Any]:
    """Return `loss(model, *batch)` as a function of the trainable parameters, an example's index, and its batch.

    Args:
      loss: as for `DPSGD`.
      tree: the model, or a pytree that contains models, split; shared by all examples.
      key: the key from which each example's random state of modules is drawn. The modules' own keys are not used: they
        are published with the model, so anyone could compute the dropout masks of each index.
      has_aux: as for `DPSGD`.

    Returns:
      A function `(trainable, number, *batch)` with the results of the loss.
    """

    def example_loss(trainable: Any, number: jax.Array, *batch: Any) -> Any:
        # `number` has shape (1,) if the batch axis is kept, otherwise it is a scalar.
        of_number = jax.random.fold_in(key, number.reshape(()))
        return _call(loss, with_trainable(tree, trainable), of_number, batch, has_aux)[0]

    return example_loss


def of_batch(loss: Callable[..., Any], tree: Any, batch: Any, has_aux: bool) -> jax.Array:
    """Return the loss of a batch in evaluation mode; arguments as for `of_example`."""

    def evaluated(model: Any, *batch: Any) -> Any:
        return loss(evaluating_tree(model), *batch)

    out, _ = _call(evaluated, tree, None, batch, has_aux)
    return out[0] if has_aux else out


def with_random_state(loss: Callable[..., Any], tree: Any, batch: Any, has_aux: bool) -> Any:
    """Return `tree` with the random state of its models after a call, such as the number of uses of each key.

    Args:
      loss: as for `DPSGD`.
      tree: as for `of_example`.
      batch: an example of zeros, so that the random state cannot depend on the data.
      has_aux: as for `DPSGD`.
    """
    if not any(random_state(parts.merge()) or _kept_keys(parts) for parts in splits_of(tree)):
        return tree
    return with_splits(tree, with_changes(splits_of(tree), _call(loss, tree, None, batch, has_aux)[1]))


def without_frozen(tree: Any, known: dict[Any, set[str]]) -> tuple[Any, Any]:
    """Return `tree` without the arrays of its models that no step changes, and those arrays alone.

    Both have None in place of the arrays of the other. A step changes parameters that train, and random state.

    Args:
      tree: a tree with split models.
      known: the paths of the random state for each structure of a model, remembered from call to call.
    """

    def of(frozen: bool) -> Any:
        def part(x: Any) -> Any:
            if not is_split(x):
                return None if frozen else x
            if (paths := known.get(x.structure)) is None:
                model = x.merge()
                member = model.__plurax_member__() if is_members(model) else model
                paths = known[x.structure] = random_state(member) | _kept_keys(x)
            rest = jax.tree.map_with_path(lambda path, x: x if (array_name(path) in paths) != frozen else None, x.rest)
            return SplitModel(x.structure, None if frozen else x.trainable, rest)

        return jax.tree.map(part, tree, is_leaf=is_split)

    return of(False), of(True)


def with_frozen(changing: Any, frozen: Any) -> Any:
    """Return the tree of which `without_frozen` returned the two parts."""

    def whole(x: Any, y: Any) -> Any:
        if not is_split(x):
            return x
        rest = jax.tree.map(lambda a, b: b if a is None else a, x.rest, y.rest, is_leaf=lambda leaf: leaf is None)
        return SplitModel(x.structure, x.trainable, rest)

    return jax.tree.map(whole, changing, frozen, is_leaf=lambda x: is_split(x) or x is None)


def warn_of_shared_keys(tree: Any) -> None:
    """Warn if a key outside of modules is not random state: all examples would draw the same numbers from it."""
    for path, x in jax.tree.leaves_with_path(tree, is_leaf=is_split):
        model = x.merge() if is_split(x) else None
        model = model.__plurax_member__() if is_members(model) else model
        if is_module(model):
            continue  # a key that is no random state is a choice there
        own = random_state(model)
        arrays = x.arrays() if is_split(x) else {leaf_name("params", path): x}
        shared = next((name for name, array in arrays.items() if is_key(array) and name not in own), None)
        if shared:
            what = f"all examples of all steps draw from the random key `{shared}`, so they share dropout masks"
            remedy = 'pass an NNX module, or a member of Ensemble.from_apply with its keys in the collection "rngs"'
            warnings.warn(f"DPSGD.init: {what}; {remedy}.", UserWarning, stacklevel=4)
            return


def _call(
    loss: Callable[..., Any], tree: Any, key: jax.Array | None, batch: Any, has_aux: bool
) -> tuple[Any, list[dict[str, Any]]]:
    """Return the results of the loss, and the random state that it changed in each model; raise on any other change."""
    if key is not None:
        tree = with_keys(tree, key)

    # `call_with_models` calls `function(owner, *args)`, where the owner is the model of a bound method: None for a
    # function.
    def function(_: None, model: Any, /, *batch: Any) -> Any:
        return loss(model, *batch)

    arguments: Any = (None, (released(tree), *batch), {})
    out, left = call_with_models(function, arguments)
    found = []
    for model, paths in zip(left, changes(function, arguments, left), strict=True):
        parts = split(model)
        arrays, allowed = parts.arrays(), random_state(model) | _kept_keys(parts)
        other = [path for path in paths if path not in allowed]
        if other:
            what = f"the loss changes `{other[0]}` of {type(model).__name__}, which the noise does not protect"
            remedy = "do not assign it; for BatchNorm use nnx.GroupNorm or nnx.view(model, use_running_average=True)"
            raise ValueError(f"DPSGD: {what}; {remedy}.")
        found.append({path: arrays[path] for path in paths})
    value = pair_of("DPSGD", out)[0] if has_aux else out
    remedy = "return the mean over its batch, which has one example, or pass has_aux=True if it returns (loss, aux)"
    scalar_seed("DPSGD: the loss", value, remedy)
    return out, found


def with_keys(tree: Any, key: jax.Array) -> Any:
    """Return the tree with the keys of its models' random state drawn from `key`."""
    return jax.tree.map(lambda x: _with_keys(x, key) if is_split(x) else x, tree, is_leaf=is_split)


def _with_keys(parts: SplitModel, key: jax.Array) -> SplitModel:
    """Return the model with the keys of its random state drawn from `key`."""
    random = random_state(parts.merge())

    def draw(path: Any, x: Any) -> Any:
        """Return a new key for a key of the random state, and any other array unchanged."""
        if array_name(path) not in random or not is_key(x):
            return x
        # Number the keys by their sorted paths: a distinct number for each key, equal in every process.
        words = jax.eval_shape(jax.random.key_data, x)
        number = sorted(random).index(array_name(path))
        bits = jax.random.bits(jax.random.fold_in(key, number), words.shape, words.dtype)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(x))

    return SplitModel(parts.structure, parts.trainable, jax.tree.map_with_path(draw, parts.rest))


def _kept_keys(parts: SplitModel) -> set[str]:
    """Return the paths of all keys of a model, in variables of any type."""
    return {array_name(path) for path, x in jax.tree.leaves_with_path(parts.rest) if is_key(x)}
