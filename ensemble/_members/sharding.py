"""Distribute members over devices: each device executes its own members, without communication between members.

`shard_map` wraps the strategy, so that the compiler sees the program of one device; otherwise it would gather the
members for convolutions. A mesh axis `data` splits the batch; over it, losses, gradients and metrics are averaged. An
axis `model` splits the arrays of a member, and those that members share; what it sends is left to the compiler.
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
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...transforms._core.arguments import describe
from ...transforms._core.axes import Axes, broadcast_axes
from ...transforms._core.compat import Tracer
from ...transforms._core.prng import is_key
from ...transforms._models.split_model import dotted
from ...transforms._runs.source import first_of

ENSEMBLE, DATA, MODEL = "ensemble", "data", "model"


@dataclass(frozen=True)
class Layout:
    """The devices over which the members of an ensemble are distributed.

    Attributes:
      mesh: a mesh with an axis `ensemble` and, optionally, axes `data` and `model`.
    """

    mesh: Mesh | AbstractMesh

    @classmethod
    def of(cls, api: str, mesh: Any) -> Layout:
        """Return the layout for a mesh of the user; raise if it has other axes than the three."""
        if not isinstance(mesh, (Mesh, AbstractMesh)):
            expected = 'a jax.sharding.Mesh, such as jax.make_mesh((4,), ("ensemble",))'
            raise TypeError(f"{api}: mesh must be {expected}, but got {describe(mesh)}.")
        if ENSEMBLE not in mesh.axis_names or not set(mesh.axis_names) <= {ENSEMBLE, DATA, MODEL}:
            expected = 'an axis "ensemble" and may have axes "data" and "model"'
            names = ", ".join(map(repr, mesh.axis_names))
            remedy = "rename the axes of the mesh"
            if set(mesh.axis_names) <= {DATA, MODEL}:
                remedy = 'add an axis "ensemble", of length 1 if no device has members of its own'
            raise ValueError(f"{api}: mesh must have {expected}, but its axes are {names}; {remedy}.")
        # Axes of type Auto: with Explicit axes JAX would check the sharding of each operation of the user's model.
        auto = (AxisType.Auto,) * len(mesh.axis_names)
        if isinstance(mesh, AbstractMesh):
            return cls(AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto))
        return cls(Mesh(mesh.devices, mesh.axis_names, axis_types=auto))

    @classmethod
    def local(cls, devices: int) -> Layout:
        """Return the layout on the first devices of this process."""
        return cls(Mesh(np.array(jax.local_devices()[:devices]), (ENSEMBLE,), axis_types=(AxisType.Auto,)))

    @classmethod
    def around(cls, tree: Any) -> Layout | None:
        """Return the layout of stacked arrays; None if they are traced, or not distributed over devices."""
        sharding = getattr(jax.tree.leaves(tree)[0], "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh) or sharding.mesh.size == 1:
            return None
        # The compiler may leave out the name of an axis with one device.
        is_one = sharding.mesh.shape.get(ENSEMBLE) == 1
        return cls(sharding.mesh) if is_one or tuple(sharding.spec)[:1] == (ENSEMBLE,) else None

    @classmethod
    def home(cls, tree: Any) -> Layout | None:
        """Return the layout of stacked arrays also if every device has a copy; None if they lie on one device."""
        sharding = getattr(jax.tree.leaves(tree)[0], "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh) or sharding.mesh.size == 1:
            return None
        return None if sharding.mesh.explicit_axes else cls(sharding.mesh)

    @property
    def devices(self) -> int:
        """Return the number of devices along the axis `ensemble`."""
        return self.mesh.shape[ENSEMBLE]

    @property
    def shards(self) -> int:
        """Return the number of parts into which a batch is split."""
        return self.mesh.shape.get(DATA, 1)

    @property
    def named(self) -> dict[str, int]:
        """Return the numbers of devices along the axes that the program of one device may name."""
        return {name: size for name, size in self.mesh.shape.items() if name != MODEL}

    @property
    def splits_models(self) -> bool:
        """Return whether arrays of one member are split."""
        return self.mesh.shape.get(MODEL, 1) > 1

    def of_members(self, x: Any) -> NamedSharding:
        """Return the sharding of an array with the members along axis 0."""
        # JAX shards an axis only if the number of devices divides its length; otherwise every device has a copy.
        size, *shape = x.shape
        return self._sharding(None if size % self.devices else ENSEMBLE, *self._split(shape))

    def of_shared(self, x: Any) -> NamedSharding:
        """Return the sharding of an array that all members share."""
        return self._sharding(*self._split(jnp.shape(x)))

    @cached_property
    def copies(self) -> NamedSharding:
        """Return the sharding of an array of which every device has a copy."""
        return self._sharding()

    def _sharding(self, *names: str | None) -> NamedSharding:
        # Without names at the end that are None, since JAX compares shardings by them.
        return NamedSharding(self.mesh, P(*names) if any(names) else P())

    def _split(self, shape: Sequence[int]) -> tuple[str | None, ...]:
        """Return the names for the axes of one member's array: `model` splits the longest that it divides evenly.

        Of equals it splits the last one, the outputs of a kernel. Vectors, such as biases, are not split: an operation
        with few numbers is shorter than the exchange that it may need.
        """
        parts = self.mesh.shape.get(MODEL, 1)
        fitting = [(length, axis) for axis, length in enumerate(shape) if length and length % parts == 0]
        if not self.splits_models or len(shape) < 2 or not fitting:
            return ()
        return *[None] * max(fitting)[1], MODEL

    def context(self) -> AbstractContextManager[Any]:
        """Return a context in which this mesh replaces the one that the user has set."""
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

    @property
    def in_one_process(self) -> bool:
        here = jax.process_index()
        return isinstance(self.mesh, Mesh) and all(x.process_index == here for x in self.mesh.devices.flat)

    def padded(self, size: int) -> int:
        """Return the number of rows for `size` members: the next multiple of the number of devices."""
        # `-(-a // b)` is the quotient rounded up, in integers.
        return -(-size // self.devices) * self.devices

    def place(self, tree: Any) -> Any:
        """Return `tree`, whose arrays have the members along axis 0, with each row on the device of its member."""
        return jax.tree.map(lambda x: move(x, self.of_members(x)), tree)

    def place_shared(self, tree: Any) -> Any:
        """Return `tree`, whose arrays all members share, on the devices."""
        return jax.tree.map(lambda x: move(x, self.of_shared(x)), tree)

    def copy(self, x: Any) -> jax.Array:
        """Return the array with a copy on every device."""
        return move(x, self.copies)

    def reach(self, x: Any) -> jax.Array:
        """Return the array unchanged if it lies on these devices, else with a copy on every device."""
        sharding = getattr(x, "sharding", None)
        return x if getattr(sharding, "mesh", None) == self.mesh else self.copy(x)

    def place_batch(self, batch: Any, axes: Sequence[Axes], size: int, stacked: bool = False) -> Any:
        """Return the batch of `size` members with each array on the devices that need it, padded like the members.

        With `stacked`, these are several batches along a new axis 0, which is not split.
        """

        def place(x: Any, spec: P) -> jax.Array:
            spec = P(None, *spec) if stacked else spec
            x = pad(x, tuple(spec).index(ENSEMBLE), self.padded(size) - size) if ENSEMBLE in spec else x
            return move(x, NamedSharding(self.mesh, spec))

        return jax.tree.map(place, batch, self.batch_specs(jax.eval_shape(first_of, batch) if stacked else batch, axes))

    def batch_specs(self, batch: Any, axes: Sequence[Axes]) -> Any:
        """Return the `PartitionSpec` of each array of the batch, as a tree of the same structure."""

        def spec(x: Any, axis: int | None) -> P:
            """Return the spec of one array: split by members, and by examples along the first other axis."""
            names: list[str | None] = [None] * jnp.ndim(x)
            if axis is not None:
                names[axis % jnp.ndim(x)] = ENSEMBLE
            # The examples lie along the first axis that does not index members.
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
                raise ValueError(f"{api}: the batch (`{where}`) has {found}; pass a multiple of {self.shards}.")
        if len(set(lengths.values())) > 1:
            remedy = "let the loss close over arrays that do not have one row per example"
            raise ValueError(f'{api}: the mesh axis "data" splits arrays of one length, but got {lengths}; {remedy}.')

    def on_each(self, fun: Callable[..., Any], *specs: Any) -> Callable[..., Any]:
        """Return `fun` executed on each device, on the parts of its arguments that `specs` assign to the device."""
        # Without the check of which values vary over devices (`check_vma`): it rejects a loop whose carry begins as
        # zeros, equal on all devices, and ends as values that differ. Models of users contain such loops.
        # The axis `model` is left to the compiler: in the program, arrays have their whole length along it.
        options: Any = {"mesh": self.mesh, "axis_names": set(self.named), "check_vma": False}
        return jax.shard_map(fun, in_specs=specs, out_specs=P(ENSEMBLE), **options)


def within(layout: Layout | None) -> AbstractContextManager[Any]:
    """Return the context of a layout, or a context that does nothing for None."""
    return nullcontext() if layout is None else layout.context()


def constrain(tree: Any, layout: Layout | None) -> Any:
    """Place `tree` as `Layout.place` does, but inside a program; without a layout, return it unchanged."""
    if layout is None:
        return tree
    return jax.tree.map(lambda x: lax.with_sharding_constraint(x, layout.of_members(x)), tree)


def constrain_shared(tree: Any, layout: Layout) -> Any:
    """Place `tree` as `Layout.place_shared` does, but inside a program; without a split, return it unchanged."""
    if not layout.splits_models:
        return tree
    return jax.tree.map(lambda x: lax.with_sharding_constraint(x, layout.of_shared(x)), tree)


def pad(x: jax.Array, axis: int, more: int) -> jax.Array:
    """Return `x` with `more` copies of its last slice along `axis`."""
    # With "clip", an index beyond the end takes the last slice.
    return jnp.take(x, np.arange(x.shape[axis] + more), axis, mode="clip") if more else x


def everywhere(tree: Any) -> Any:
    """Return `tree` with every array complete in this process, including the parts that other processes hold."""

    def gather(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or not isinstance(x.sharding, NamedSharding):
            return x
        return _moved(NamedSharding(x.sharding.mesh, P()))(x)

    return jax.tree.map(gather, tree)


# Cached, so that arrays of one sharding share a compiled program: `jax.jit` compiles again for every new lambda.
@cache
def _moved(sharding: NamedSharding) -> Callable[[Any], Any]:
    return jax.jit(lambda x: x, out_shardings=sharding)


def move(tree: Any, sharding: Any) -> Any:
    """Return `tree` with its arrays in another sharding, which may span several processes."""

    def of_leaf(x: Any) -> jax.Array:
        """Return one array with the sharding, moved only if necessary."""
        if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
            try:
                return lax.with_sharding_constraint(jnp.asarray(x), sharding)
            except TypeError as error:  # not traced
                how = "trace the call, with jax.eval_shape or program.compile_for, or pass a jax.sharding.Mesh"
                raise ValueError(f"an AbstractMesh has no devices to place an array on; {how}.") from error
        if isinstance(x, Tracer):
            return jax.device_put(x, sharding)
        if isinstance(x, jax.Array) and x.sharding == sharding:
            return x
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return _moved(sharding)(x)  # no process holds the whole array: all of them run a program that moves parts
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        x = x if hasattr(x, "dtype") else jnp.asarray(x)
        # Each process has the whole array and copies the parts for its own devices. `device_put` to devices of other
        # processes would compare the array across processes. NumPy has no keys: their data is placed, then wrapped.
        data = np.asarray(jax.random.key_data(x) if is_key(x) else x)
        held = jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])
        return jax.random.wrap_key_data(held, impl=jax.random.key_impl(x)) if is_key(x) else held

    return jax.tree.map(of_leaf, tree)


def uncommitted(x: jax.Array) -> jax.Array:
    """Return a copy of an array that JAX may move to other devices, to meet the arrays there."""
    # No function of JAX releases an array from its devices, so it is copied through the host. NumPy has no keys.
    if is_key(x):
        with within(Layout.home(x)):
            words = jax.random.key_data(x)
        return jax.random.wrap_key_data(uncommitted(words), impl=jax.random.key_impl(x))
    with jax.enable_x64(True):  # or numbers of 64 bits would lose half of them
        return jnp.array(np.asarray(x))


def one_copy(tree: Any) -> Any:
    """Return arrays that lie on several devices as uncommitted arrays, complete in this process."""

    def of_leaf(x: Any) -> Any:
        if isinstance(x, Tracer) or not isinstance(x, jax.Array) or len(x.sharding.device_set) == 1:
            return x
        return uncommitted(everywhere(x))

    return jax.tree.map(of_leaf, tree)


def own_keys(tree: Any) -> Any:
    """Fold the index along the axis `data` into each single key of `tree`, so that examples draw different numbers.

    Arrays of keys are split with the batch or stay unchanged.
    """

    def of_shard(x: Any) -> Any:
        return jax.random.fold_in(x, lax.axis_index(DATA)) if is_key(x) and not x.ndim else x

    return jax.tree.map(of_shard, tree)
