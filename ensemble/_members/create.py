"""Create the stacked arrays of the members, from given models or from a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from ...transforms._core.arguments import check_callable, check_count, describe, is_int
from ...transforms._core.compat import Tracer
from ...transforms._core.prng import is_key
from ...transforms._models.equinox import is_equinox
from ...transforms._models.split_model import SplitModel, Structure, is_model, is_module, split
from ...transforms._models.stacking import check_leaves, split_alike, stack, stack_models, strong
from .sharding import ENSEMBLE, Layout, constrain, uncommitted
from .shared import SharedArrays, check_equal, separate, shared_paths

_REMEDY = "build all members with one configuration", "define it once, at module level, or use Ensemble.create"
# `Ensemble.create` makes NNX modules only.
_REMEDY_OF_OTHERS = _REMEDY[0], "define it once, outside the function that makes a member"

_OTHERS = "for models of Linen or Equinox, and for functions, use Ensemble.from_apply(apply, variables)"


# The structure of the members, their stacked trainable and other arrays, and what they share.
Created = tuple[Structure, Any, Any, SharedArrays | None]


def stack_members(api: str, members: Sequence[Any], filter: Any = None) -> Created:
    """Return the parts of an ensemble of these members; raise if they differ."""
    remedy = _REMEDY if is_module(members[0]) else _REMEDY_OF_OTHERS
    if filter is None:
        parts = stack_models(api, "member", remedy, members)
        _check_any_arrays(api, parts)
        return parts.structure, parts.trainable, parts.rest, None
    paths = shared_paths(api, members[0], filter)
    each = split_alike(api, "member", remedy, members, paths)
    own, shared = zip(*(separate(part, paths) for part in each), strict=True)
    check_equal(api, shared)
    return each[0].structure, *strong(stack(own)), strong(shared[0])


def create_members(make: Callable[..., Any], size: int, seed: Any, mesh: Any, filter: Any = None) -> Created:
    """Return the parts of an ensemble of newly created members; arguments as for `Ensemble.create`."""
    from flax import nnx

    _check_make(make)
    check_count("Ensemble.create", "size", size)
    key = _key(seed, size)
    structures: list[Structure] = []

    def made(i: jax.Array) -> tuple[tuple[Any, Any], SharedArrays | None]:
        """Return the own and the shared arrays of member `i`, and append its structure to a list."""
        # A folded key does not depend on the number of members.
        member = make(nnx.Rngs(key[i] if key.ndim else jax.random.fold_in(key, i)))
        if not is_model(member):
            found = f"make must return an NNX module, but it returned {describe(member)}"
            raise TypeError(f"Ensemble.create: {found}; {_OTHERS}.")
        parts = split(member)
        check_leaves("Ensemble.create", "the model that make returns", parts)
        _check_any_arrays("Ensemble.create", parts)
        structures.append(parts.structure)
        if filter is None:
            return strong((parts.trainable, parts.rest)), None
        return strong(separate(parts, shared_paths("Ensemble.create", member, filter)))

    # A loop instead of a vmap, since keys of the `rbg` kind give different numbers under vmap.
    make_some = partial(lax.map, lambda i: made(i)[0])
    share = (lambda: None) if filter is None else (lambda: made(jnp.array(0))[1])
    if mesh is None:
        own, shared = _run_once(lambda: (make_some(jnp.arange(size)), share()), key)
        return structures[0], *own, shared
    layout = Layout.of("Ensemble.create", mesh)
    if layout.padded(size) != size:
        devices = f'the {layout.devices} devices of the mesh axis "ensemble"; use a multiple of {layout.devices}'
        raise ValueError(f"Ensemble.create: {size} members do not divide over {devices}.")
    if isinstance(mesh, AbstractMesh) or isinstance(key, Tracer) or _in_a_trace():
        why = "an AbstractMesh has none" if isinstance(mesh, AbstractMesh) else "the call is traced"
        remedy = "leave mesh out, and pass it to the Trainer"
        raise ValueError(f"Ensemble.create: members are created on the devices of the mesh, but {why}; {remedy}.")
    # `made` closes over the key, which may be committed to devices outside the mesh.
    key = uncommitted(key)
    indices = layout.place(np.arange(size))
    with layout.context():
        own = jax.jit(lambda i: constrain(layout.on_each(make_some, P(ENSEMBLE))(i), layout))(indices)
        shared = jax.jit(share, out_shardings=jax.tree.map(layout.of_shared, jax.eval_shape(share)))()
    return structures[0], *own, shared


def _check_make(make: Any) -> None:
    """Raise if `make` is not callable, or is a model, which is callable too."""
    from flax import linen

    check_callable("Ensemble.create", make, "make")
    if is_model(make) or isinstance(make, linen.Module) or is_equinox(make):
        found = f"make must be a function of nnx.Rngs that returns a new model, but got a model, {type(make).__name__}"
        remedy = "pass a function, or use Ensemble.stack for models that exist" if is_model(make) else _OTHERS
        raise TypeError(f"Ensemble.create: {found}; {remedy}.")


def _run_once(fun: Callable[[], Any], key: jax.Array) -> Any:
    """Return `fun()`, compiled for a single run."""
    # LLVM optimization level 2 compiles in 1.3 s where level 3 takes 5 to 8 s, with the same results. Compilation ahead
    # of time needs values: no traced key, and no trace around the call, in which even a constant is traced.
    if isinstance(key, Tracer) or _in_a_trace():
        return fun()
    options: dict[str, Any] = {"xla_backend_optimization_level": 2}
    return jax.jit(fun).lower().compile(compiler_options=options)()


def _in_a_trace() -> bool:
    return isinstance(jnp.zeros(()), Tracer)


def _check_any_arrays(api: str, parts: SplitModel) -> None:
    if not jax.tree.leaves(parts):
        raise ValueError(f"{api}: the models hold no arrays to stack; pass models with parameters.")


def _key(seed: Any, size: int) -> jax.Array:
    """Return one key, or `size` keys, for a seed or for one seed per member; raise if it is neither."""
    if is_int(seed):
        return jax.random.key(seed)
    # An array of integers in JAX may be a key of the old kind: two words of uint32, which are not two seeds.
    if isinstance(seed, (list, tuple, range)) or (isinstance(seed, np.ndarray) and seed.ndim == 1):
        if len(seed) and all(is_int(x) and 0 <= x < 2**31 for x in seed):
            _check_length(len(seed), size)
            # `key` of a Python int is that of an int32. Stacking thousands of keys would compile a program of as many
            # arguments, which takes minutes.
            return jax.vmap(jax.random.key)(np.asarray(seed, np.int32))
        each: list[Any] = [jax.random.key(x) if is_int(x) else x for x in seed]
        if all(is_key(x) and x.ndim == 0 for x in each) and len({x.dtype for x in each}) < 2:
            _check_length(len(each), size)
            return jnp.stack(each)
    elif isinstance(seed, jax.Array) and is_key(seed) and seed.ndim < 2:
        if seed.ndim:
            _check_length(len(seed), size)
        return seed
    expected = f"an int, a key such as jax.random.key(0), or a list of {size} ints or keys"
    raise TypeError(f"Ensemble.create: seed must be {expected}, but got {describe(seed)}.")


def _check_length(seeds: int, size: int) -> None:
    if seeds != size:
        raise ValueError(f"Ensemble.create: seed has {seeds} entries for {size} members; pass one for each.")
