"""Members over many devices: each device executes its own, and nothing is exchanged between members.

`shard_map` goes around the strategy, so the compiler sees the program of one device: left to itself it would gather
members for convolutions. An axis `data` splits the batch; there the gradients are averaged, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...transforms._core.arguments import describe
from ...transforms._core.axes import Axes, broadcast_axes
from ...transforms._core.compat import Tracer
from ...transforms._core.prng import is_key
from ...transforms._models.split_model import dotted

ENSEMBLE, DATA = "ensemble", "data"


@dataclass(frozen=True)
class Layout:
    """The devices over which the members of an ensemble are spread.

    Attributes:
      mesh: with an axis `ensemble`, and perhaps an axis `data`.
    """

    mesh: Mesh

    @classmethod
    def of(cls, api: str, mesh: Any) -> Layout:
        """Return the layout on a mesh of the user; raise if its axes are not those of an ensemble."""
        if not isinstance(mesh, Mesh):
            expected = 'a jax.sharding.Mesh, such as jax.make_mesh((4,), ("ensemble",))'
            raise TypeError(f"{api}: mesh must be {expected}, but got {describe(mesh)}.")
        if ENSEMBLE not in mesh.axis_names or not set(mesh.axis_names) <= {ENSEMBLE, DATA}:
            expected, names = 'an axis "ensemble" and may have an axis "data"', ", ".join(map(repr, mesh.axis_names))
            raise ValueError(f"{api}: mesh must have {expected}, but its axes are {names}; rename them.")
        # With automatic axes: under explicit ones JAX would check the sharding of each operation of the user's model.
        return cls(Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names)))

    @classmethod
    def local(cls, devices: int) -> Layout:
        """Return the layout on the first devices of this process."""
        return cls(Mesh(np.array(jax.local_devices()[:devices]), (ENSEMBLE,), axis_types=(AxisType.Auto,)))

    @classmethod
    def around(cls, tree: Any) -> Layout | None:
        """Return the layout of stacked arrays; None if they are not spread over devices, or are traced."""
        sharding = getattr(jax.tree.leaves(tree)[0], "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh) or sharding.mesh.size == 1:
            return None
        return cls(sharding.mesh) if tuple(sharding.spec)[:1] == (ENSEMBLE,) else None

    @property
    def devices(self) -> int:
        """Return the number of devices over which the members are spread."""
        return self.mesh.shape[ENSEMBLE]

    @property
    def shards(self) -> int:
        """Return the number of parts into which a batch is split."""
        return self.mesh.shape.get(DATA, 1)

    def of_members(self, size: int) -> NamedSharding:
        """Return the sharding of an array with `size` members along axis 0."""
        # JAX spreads only what divides: otherwise every device has a copy.
        return self.shared if size % self.devices else NamedSharding(self.mesh, P(ENSEMBLE))

    @cached_property
    def shared(self) -> NamedSharding:
        """Return the sharding of an array that all members share."""
        return NamedSharding(self.mesh, P())

    def context(self) -> AbstractContextManager[Any]:
        """Return a context in which this mesh replaces one that the user has set."""
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

    @property
    def in_one_process(self) -> bool:
        return all(device.process_index == jax.process_index() for device in self.mesh.devices.flat)

    def padded(self, size: int) -> int:
        """Return the number of rows for `size` members, a multiple of the devices; the last member fills them up."""
        # Rounded up: `-(-a // b)` is the ceiling of the quotient, in integers.
        return -(-size // self.devices) * self.devices

    def place(self, tree: Any) -> Any:
        """Return `tree`, whose arrays have the members along axis 0, on the devices of these members."""
        return jax.tree.map(lambda x: move(x, self.of_members(len(x))), tree)

    def place_shared(self, x: Any) -> jax.Array:
        """Return an array of which every device has a copy."""
        return move(x, self.shared)

    def place_batch(self, batch: Any, axes: Sequence[Axes], size: int) -> Any:
        """Return the batch of `size` members with each array on the devices that need it, padded where these do not."""

        def place(x: Any, spec: P) -> jax.Array:
            x = pad(x, tuple(spec).index(ENSEMBLE), self.padded(size) - size) if ENSEMBLE in spec else x
            return move(x, NamedSharding(self.mesh, spec))

        return jax.tree.map(place, batch, self.batch_specs(batch, axes))

    def batch_specs(self, batch: Any, axes: Sequence[Axes]) -> Any:
        """Return the partition of each array of the batch, as a tree like it."""

        def spec(x: Any, axis: int | None) -> P:
            """Return how one array is divided: by members, and by examples along the first other axis."""
            names: list[str | None] = [None] * jnp.ndim(x)
            if axis is not None:
                names[axis % jnp.ndim(x)] = ENSEMBLE
            # The examples are along the first axis that is not the members'.
            if self.shards > 1 and None in names:
                names[names.index(None)] = DATA
            return P(*names)

        leaves, treedef = jax.tree.flatten(batch)
        return jax.tree.unflatten(treedef, map(spec, leaves, broadcast_axes(tuple(axes), batch)))

    def check_batch(self, api: str, batch: Any, axes: Sequence[Axes]) -> None:
        """Raise if the batch does not split into equal parts."""
        specs = jax.tree.leaves(self.batch_specs(batch, axes))
        leaves = zip(jax.tree.leaves_with_path(batch), specs, strict=True)
        lengths = {dotted(path): x.shape[tuple(spec).index(DATA)] for (path, x), spec in leaves if DATA in spec}
        for where, length in lengths.items():
            if length % self.shards:
                found = f'{length} examples, which do not split over the {self.shards} devices of the mesh axis "data"'
                raise ValueError(f"{api}: the batch (`{where}`) has {found}; change it.")
        if len(set(lengths.values())) > 1:
            remedy = "let the loss close over what is not one per example"
            raise ValueError(f'{api}: the mesh axis "data" splits arrays of one length, but got {lengths}; {remedy}.')

    def on_each(self, fun: Callable[..., Any], *specs: Any) -> Callable[..., Any]:
        """Return `fun` on each device, of the parts of its arguments that `specs` give."""
        # Without the check of which values vary over devices (`check_vma`): it refuses a loop whose carry begins as
        # zeros that all devices share and ends as values that differ, such as those of a user's model.
        return jax.shard_map(fun, mesh=self.mesh, in_specs=specs, out_specs=P(ENSEMBLE), check_vma=False)


def within(layout: Layout | None) -> AbstractContextManager[Any]:
    """Return the context of a layout; of None, one that changes nothing."""
    return nullcontext() if layout is None else layout.context()


def constrain(tree: Any, layout: Layout | None) -> Any:
    """Return what `Layout.place` does, within a program; of no layout, the tree as it is."""
    if layout is None:
        return tree
    return jax.tree.map(lambda x: lax.with_sharding_constraint(x, layout.of_members(len(x))), tree)


def pad(x: jax.Array, axis: int, more: int) -> jax.Array:
    """Return `x` with `more` copies of its last slice along `axis`."""
    # Of places beyond the end, "clip" takes the last.
    return jnp.take(x, np.arange(x.shape[axis] + more), axis, mode="clip") if more else x


def everywhere(tree: Any) -> Any:
    """Return `tree` with all of each array in this process, also what other processes hold."""

    def gather(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or not isinstance(x.sharding, NamedSharding):
            return x
        return _moved(NamedSharding(x.sharding.mesh, P()))(x)

    return jax.tree.map(gather, tree)


# Cached, so that arrays of one sharding share a compiled program: `jax.jit` of a new lambda would compile anew.
@cache
def _moved(sharding: NamedSharding) -> Callable[[Any], Any]:
    return jax.jit(lambda x: x, out_shardings=sharding)


def move(tree: Any, sharding: Any) -> Any:
    """Return `tree` with its arrays in another sharding, which may span several processes."""

    def of_leaf(x: Any) -> jax.Array:
        """Return one array with the sharding, moved as far as needed."""
        if isinstance(x, Tracer):
            return jax.device_put(x, sharding)
        if isinstance(x, jax.Array) and x.sharding == sharding:
            return x
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return _moved(sharding)(x)  # no process holds all of it: a program of all processes moves its parts
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        x = x if hasattr(x, "dtype") else jnp.asarray(x)
        # Each process has all of the array, and copies the parts of its own devices. `device_put` to devices of other
        # processes would compare the array in all of them. NumPy has no keys: their words are placed, and wrapped.
        data = np.asarray(jax.random.key_data(x) if is_key(x) else x)
        held = jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])
        return jax.random.wrap_key_data(held, impl=jax.random.key_impl(x)) if is_key(x) else held

    return jax.tree.map(of_leaf, tree)


def own_keys(tree: Any) -> Any:
    """Return `tree` with single keys that differ over the axis `data`, so that examples draw different numbers.

    Arrays of keys are split with the batch, or stay as they are.
    """

    def of_shard(x: Any) -> Any:
        return jax.random.fold_in(x, lax.axis_index(DATA)) if is_key(x) and not x.ndim else x

    return jax.tree.map(of_shard, tree)
