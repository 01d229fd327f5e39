"""The rows of stacked arrays that this process holds or needs: which members it writes into a checkpoint, and reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._core.prng import is_key

# About so many bytes of members are copied together.
_BYTES = 2**26
# For each member an array that contains it, and its index there.
Held = dict[int, tuple[Any, int]]


def rows(tree: Any, size: int) -> int:
    """Return the number of rows of a part, for an ensemble of `size` members."""
    leaves = jax.tree.leaves(tree)
    return int(leaves[0].shape[0]) if leaves else size


def members_held(leaf: Any, size: int) -> Held:
    """Return for each member that is complete in this process an array that contains it, and its index there.

    Rows that are split over devices are put together first, by all processes, one array at a time.
    """
    leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf  # shards of keys are indexed like their data
    if getattr(leaf, "is_fully_addressable", True):
        return {i: (leaf, i) for i in range(size)}
    whole = _with_whole_rows(leaf)
    found: Held = {}
    for shard in {str(shard.index): shard for shard in whole.addressable_shards}.values():
        members, *others = shard.index
        if all(i.indices(n) == (0, n, 1) for i, n in zip(others, leaf.shape[1:], strict=True)):
            # A copy of rows put together leaves the devices at once, since it may not fit there beside others.
            data = shard.data if whole is leaf else np.asarray(shard.data)
            found |= {i: (data, place) for place, i in enumerate(range(*members.indices(size)))}
    return found


def copied(held: Held, members: Sequence[int]) -> Held:
    """Return these members with copies of their arrays in the memory of the host."""
    copies = {id(array): _copy(array) for array in {id(held[i][0]): held[i][0] for i in members}.values()}
    return {i: (copies[id(held[i][0])], held[i][1]) for i in members}


def _copy(x: Any) -> Any:
    # A view of it by NumPy would keep its memory from being reused.
    on_host = isinstance(x, jax.Array) and all(device.platform == "cpu" for device in x.devices())
    # JAX keeps what it has copied from a device, so a second copy would be one too many.
    return jnp.copy(x) if on_host else np.asarray(x) if isinstance(x, jax.Array) else np.array(x)


def rows_as_bytes(held: Sequence[Held], members: list[int]) -> Iterator[tuple[list[int], list[np.ndarray]]]:
    """Yield some members, and for each array their bytes, uint8 (members, bytes), until all have been yielded.

    Args:
      held: the results of `members_held` for several arrays.
      members: members that are in all of them.
    """
    sizes = [math.prod(x.shape[1:]) * x.dtype.itemsize for x in (leaf[members[0]][0] for leaf in held if members)]
    together = max(1, _BYTES // max(1, sum(sizes)))
    for some in (members[k : k + together] for k in range(0, len(members), together)):
        yield some, [_bytes_of(leaf, some, size) for leaf, size in zip(held, sizes, strict=True)]


def _bytes_of(held: Held, members: list[int], size: int) -> np.ndarray:
    sources: dict[int, tuple[Any, list[int], list[int]]] = {}
    for k, i in enumerate(members):
        array, place = held[i]
        _, to, places = sources.setdefault(id(array), (array, [], []))
        to.append(k)
        places.append(place)

    def taken(array: Any, places: list[int]) -> np.ndarray:
        first, end = places[0], places[-1] + 1
        rows = np.asarray(array)[first:end] if places == [*range(first, end)] else np.asarray(array)[places]
        return np.ascontiguousarray(rows).reshape(len(places), -1).view(np.uint8)

    if not size:
        return np.empty((len(members), 0), np.uint8)
    if len(sources) == 1:  # without a copy, if they lie one after another in the host's memory
        ((array, _, places),) = sources.values()
        return taken(array, places)
    out = np.empty((len(members), size), np.uint8)
    for array, to, places in sources.values():
        out[to] = taken(array, places)
    return out


def _with_whole_rows(x: jax.Array) -> jax.Array:
    """Return the array with its sharding along axis 0 alone."""
    if not isinstance(x.sharding, NamedSharding) or not any(x.sharding.spec[1:]):
        return x
    sharding = NamedSharding(x.sharding.mesh, PartitionSpec(*x.sharding.spec[:1]))
    return jax.jit(lambda x: x, out_shardings=sharding)(x)


def members_on_devices(tree: Any, size: int) -> list[int]:
    """Return the members that this process needs to create its shards of a tree like this one."""
    leaves = jax.tree.leaves(tree)
    if not all(map(_is_spread, leaves)):
        return list(range(size))
    parts = [x.sharding.addressable_devices_indices_map(x.shape).values() for x in leaves]
    return sorted({i for indices in parts for index in indices for i in range(*index[0].indices(size))})


def stacked(like: Any, dtype: str, rows: Mapping[int, np.ndarray]) -> jax.Array:
    """Return the stacked array of members, sharded as `like`."""
    if not _is_spread(like):
        return as_saved(np.stack([rows[i] for i in range(len(rows))]), dtype)
    size = like.shape[0]

    def of_shard(index: Any) -> np.ndarray:
        members, *others = index
        return np.stack([rows[i] for i in range(*members.indices(size))])[(slice(None), *others)]

    # The sharding of keys applies to their data too, which has additional trailing axes.
    shape = (size, *next(iter(rows.values())).shape)
    return as_saved(jax.make_array_from_callback(shape, like.sharding, of_shard), dtype)


def as_saved(data: Any, dtype: str) -> jax.Array:
    """Return stored data as an array, converted back to keys if it was an array of keys."""
    if not dtype.startswith("key<"):
        return jnp.asarray(data)
    return jax.random.wrap_key_data(jnp.asarray(data), impl=dtype.removeprefix("key<").removesuffix(">"))


def _is_spread(leaf: Any) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return sharding is not None and len(sharding.device_set) > 1
