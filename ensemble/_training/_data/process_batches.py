"""`ProcessBatches`: batches of which each of several processes makes only its own part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ....transforms._core.arguments import leaf_name
from ....transforms._core.axes import Axes, axes_per_argument
from ....transforms._runs.data import as_arrays
from ....transforms._runs.processes import Group
from ..._members.sharding import DATA, Layout


class ProcessBatches:
    """An iterable of batches of which each process makes only its own part, for `Trainer.fit` over several processes.

    The parts become arrays over all devices of the mesh, whose axis `data` splits the examples; no process holds more
    than its part.

    Args:
      batches: an iterable of this process's parts: a data loader, a list, or `Batches` of its own examples. Each part
        is a pytree of arrays, with the same shapes in all processes and for all batches. `part(mesh)` says which
        examples a process loads.
      mesh: the mesh of the trainer, whose axis `data` lies across the processes, so that each has a range of it.
        Processes that have devices for the same part must pass the same numbers.
      in_axes: as for `Trainer`: which arrays have slices for the members, along which axis. The slices of all members
        are passed by every process.

    Raises:
      TypeError: `mesh` is not a mesh; when iterated, a batch holds something other than numbers.
      ValueError: `mesh` has other axes than those of `Trainer`; its axis `data` gives the processes unequal parts; when
        iterated, the number of batches differs between the processes, or the shapes of parts do; a process has no
        batch although batches without a length end for all processes alike (an error in one process ends all).

    Cost:
      A part is copied to its devices. The processes exchange the number of batches and the shapes of the first one.

    Examples:
      >>> import jax, numpy as np
      >>> from plurax.ensemble import ProcessBatches
      >>> mesh = jax.make_mesh((1, 1), ("ensemble", "data"))
      >>> index, count = ProcessBatches.part(mesh)
      >>> mine = np.arange(12.0).reshape(6, 2)[index::count]
      >>> [x.shape for x in ProcessBatches([mine[:3], mine[3:]], mesh)]
      [(3, 2), (3, 2)]
    """

    def __init__(self, batches: Iterable[Any], mesh: Mesh, in_axes: Axes = None) -> None:
        self._layout = Layout.of("ProcessBatches", mesh)
        self._batches, self._in_axes = batches, in_axes
        self._index, self._count = self.part(mesh)

    @staticmethod
    def part(mesh: Mesh) -> tuple[int, int]:
        """Return which part of the examples this process loads, and into how many they are split.

        Args:
          mesh: the mesh of the trainer.

        Returns:
          The index of the part and the number of parts, for example for Grain's `ShardOptions`. A mesh without an axis
          `data`, or with one that lies within each process, has one part: every process loads all examples.

        Raises:
          TypeError, ValueError: as for the class.
        """
        Layout.of("ProcessBatches", mesh)
        if DATA not in mesh.axis_names:
            return 0, 1
        slices = np.moveaxis(mesh.devices, mesh.axis_names.index(DATA), 0).reshape(mesh.shape[DATA], -1)
        held: dict[int, set[int]] = {}
        for i, devices in enumerate(slices):
            for device in devices:
                held.setdefault(device.process_index, set()).add(i)
        parts = sorted({tuple(sorted(x)) for x in held.values()})
        if [i for part in parts for i in part] != list(range(len(slices))) or len({*map(len, parts)}) > 1:
            found = ", ".join(f"process {process} has {sorted(x)}" for process, x in sorted(held.items()))
            raise ValueError(
                f"ProcessBatches: the axis `data` must give each process a part of equal length, but of its slices "
                f"{found}; order the devices of the mesh by their processes along `data`."
            )
        mine = held.get(jax.process_index())
        if mine is None:
            raise ValueError("ProcessBatches: the mesh has no device of this process; use one that has.")
        return parts.index(tuple(sorted(mine))), len(parts)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # raises TypeError where there is no length

    def __iter__(self) -> Iterator[Any]:
        return _Parts(self._batches, self._layout, self._in_axes, self._count)


class _Parts(Iterator[Any]):
    """The batches of one pass. It can `skip`, `get_state` and `set_state` if the iterator over the parts can."""

    _parts: Any

    def __init__(self, batches: Any, layout: Layout, in_axes: Axes, count: int) -> None:
        self._parts, self._layout, self._in_axes, self._count = iter(batches), layout, in_axes, count
        self._group = Group(tuple(sorted({device.process_index for device in layout.mesh.devices.flat})))
        self._length: int | None = None
        with suppress(TypeError):  # an iterator, or endless batches
            self._length = len(batches)
        self._shapes: list[Any] | None = None
        self._taken = 0
        lengths = self._group.gather(self._length)
        if len({*lengths}) > 1:
            found = ", ".join(map(str, lengths))
            raise ValueError(f"ProcessBatches: the processes have {found} batches; give each as many.")

    @property
    def skip(self) -> Any:
        return self._parts.skip

    @property
    def get_state(self) -> Any:
        return self._parts.get_state

    @property
    def set_state(self) -> Any:
        return self._parts.set_state

    def __next__(self) -> Any:
        try:
            part = next(self._parts)
        except StopIteration:
            if self._length is None and not self._group.is_alone:
                raise ValueError(
                    f"ProcessBatches: there are no batches after {self._taken}, and they have no length, so other "
                    "processes may have more; repeat them without an end and pass steps, or give them a length."
                ) from None
            raise
        self._taken += 1
        part = as_arrays("ProcessBatches", "batch", part)
        self._check(part)
        arguments = tuple(part) if isinstance(part, (tuple, list)) else (part,)
        axes = axes_per_argument("ProcessBatches", self._in_axes, arguments)
        whole = jax.tree.map(self._whole, arguments, self._layout.batch_specs(arguments, axes))
        return whole if isinstance(part, (tuple, list)) else whole[0]

    def _whole(self, x: Any, spec: PartitionSpec) -> Any:
        """Return the array of all parts; every process has the slices of all members."""
        if not np.ndim(x):
            return x
        spec = PartitionSpec(*[name if name == DATA else None for name in spec])
        shape = [n * (self._count if name == DATA else 1) for n, name in zip(np.shape(x), spec, strict=True)]
        return jax.make_array_from_process_local_data(
            NamedSharding(self._layout.mesh, spec), np.asarray(x), tuple(shape)
        )

    def _check(self, part: Any) -> None:
        """Raise if the shapes of a part differ from those of the first one, or of the other processes."""
        shapes = [
            [leaf_name("batch", path), f"{np.shape(x)} {getattr(x, 'dtype', type(x).__name__)}"]
            for path, x in jax.tree.leaves_with_path(part)
        ]
        if self._shapes is None:
            self._shapes = shapes
            for process, theirs in zip(self._group.processes, self._group.gather(shapes), strict=True):
                if theirs != shapes:
                    raise ValueError(
                        f"ProcessBatches: this process has a first part of {_said(shapes)}, but process {process} one "
                        f"of {_said(theirs)}; make them equal."
                    )
        if shapes != self._shapes:
            was = f"has {_said(shapes)}, but the first part had {_said(self._shapes)}"
            raise ValueError(f"ProcessBatches: part {self._taken} {was}; drop examples that do not fill a batch.")


def _said(shapes: list[Any]) -> str:
    return ", ".join(f"`{name}` {shape}" for name, shape in shapes)
