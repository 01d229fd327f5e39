"""Arrays that all members of an ensemble have in common, and that are stored once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...transforms._core.compat import Tracer
from ...transforms._core.prng import is_key
from ...transforms._models.split_model import SplitModel, dotted, named_arrays

Path = tuple[Any, ...]


@partial(jax.tree_util.register_dataclass, data_fields=["trainable", "rest"], meta_fields=["paths"])
@dataclass(frozen=True)
class SharedArrays:
    """The arrays that all members share, without an axis of members.

    Attributes:
      trainable: the trainable ones, as nested dicts.
      rest: the others.
      paths: the paths of the variables that hold them.
    """

    trainable: Any
    rest: Any
    paths: frozenset[Path]


def shared_paths(api: str, model: Any, filter: Any) -> frozenset[Path]:
    """Return the paths of the variables of an NNX module that a filter selects.

    Random streams are left out, so that each member draws its own numbers.

    Raises:
      TypeError: `filter` is not a filter, or the model is no module.
      ValueError: the filter selects no variable, or all of them.
    """
    from flax import nnx

    from ...transforms.modules._parameters import matching, thawed
    from ...transforms.modules._places import check_module, enclosing, places

    check_module(api, model)
    matches, nodes = matching(api, filter, "shared"), places(model)
    variables = {path: x for path, x in nodes.items() if isinstance(x, nnx.Variable)}
    # By identity: a variable with several paths is selected if any of them is. A frozen one has its earlier kind too.
    chosen = {
        id(x)
        for path, x in variables.items()
        if any(matches(path, enclosing(nodes, path), as_kind) for as_kind in (x, thawed(x)))
    }
    every = nnx.to_flat_state(nnx.state(model))
    found = frozenset(path for path, x in every if id(x) in chosen and not isinstance(x, nnx.RngState))
    if not found:
        names = [dotted(path) for path, _ in every][:5]
        raise ValueError(f"{api}: shared= selects no variable of {type(model).__name__}, which has {names}.")
    if len(found) == len(every):
        raise ValueError(f"{api}: shared= selects all variables, so that the members would be one; select fewer.")
    return found


def separate(parts: SplitModel, paths: frozenset[Path]) -> tuple[tuple[Any, Any], SharedArrays]:
    """Return the own trainable and other arrays of a model, and those at the paths of variables that are shared."""
    (trainable, shared), (rest, others) = divided(parts.trainable, paths), divided(parts.rest, paths)
    return (trainable, rest), SharedArrays(shared, others, paths)


def divided(tree: Mapping[Any, Any], paths: Iterable[Path]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return nested dicts of the entries at other paths than these, and of those at these paths."""
    own: dict[Any, Any] = {}
    shared: dict[Any, Any] = {}
    below: dict[Any, list[Path]] = {}
    for key, *rest in paths:
        below.setdefault(key, []).append(tuple(rest))
    for key, x in tree.items():
        if key not in below:
            own[key] = x
        elif () in below[key]:
            shared[key] = x
        else:
            for side, found in zip((own, shared), divided(x, below[key]), strict=True):
                if found:
                    side[key] = found
    return own, shared


def joined(own: Any, shared: Any) -> Any:
    """Return nested dicts of arrays together."""
    both = {key: joined(own[key], shared[key]) for key in own.keys() & shared.keys()}
    return {**own, **shared, **both}


def with_shared(trainable: Any, rest: Any, shared: SharedArrays | None) -> tuple[Any, Any]:
    """Return the trainable and the other arrays of a member, with those that it shares."""
    if shared is None:
        return trainable, rest
    return joined(trainable, shared.trainable), joined(rest, shared.rest)


def check_equal(api: str, members: Sequence[SharedArrays]) -> None:
    """Raise if members differ in the values of arrays that they share."""
    first = named_arrays(members[0].trainable) | named_arrays(members[0].rest)
    for i, member in enumerate(members[1:], 1):
        for path, x in (named_arrays(member.trainable) | named_arrays(member.rest)).items():
            if x is first[path]:
                continue
            if isinstance(x, Tracer) or isinstance(first[path], Tracer):
                raise TypeError(f"{api}: shared arrays are compared, but `{path}` is traced; call it outside of jit.")
            if _bytes(x) != _bytes(first[path]):
                cure = "load the same values into all members, or leave it out of shared="
                raise ValueError(f"{api}: members 0 and {i} share `{path}`, but differ in its values; {cure}.")


def _bytes(x: Any) -> bytes:
    return np.asarray(jax.random.key_data(x) if is_key(x) else jnp.asarray(x)).tobytes()
