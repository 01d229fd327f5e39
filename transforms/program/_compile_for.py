"""`compile_for`: compile a call for a device that need not be here, and report what it will take."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._core.arguments import check_callable, check_count, describe
from .._core.compat import devices_of_topology, memory_of
from .._core.memory import in_words
from .._core.target import compiling_for
from .._models.hashable import HashablePytree, Opaque
from .._models.split_model import bound_model, refuse_shared_state
from ._ir.cost import memory
from ._ir.hlo import HloProgram, Instruction
from ._ir.module_scopes import module_scopes
from ._ir.provenance import shares
from ._ir.traced_program import as_arrays, names_in_cache_key
from ._profile.display import count, seconds, table

_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all", "reduce-scatter")
_SHOWN = 10  # rows of the largest operations
_OUT_OF_MEMORY = re.compile(r"temporaries \(([\d.]+)([KMG])\) exceeds available HBM")
# The kinds of argument that are arrays of the program; anything else is passed unchanged.
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


class _Chip(NamedTuple):
    """What a chip can do, by cloud.google.com/tpu/docs: dense bfloat16 operations and bytes of memory per second."""

    flops: float
    bandwidth: float
    memory: float


_GB = 2.0**30
_CHIPS = {
    "v4": _Chip(275e12, 1228e9, 32 * _GB),
    "v5e": _Chip(197e12, 819e9, 16 * _GB),
    "v5p": _Chip(459e12, 2765e9, 95 * _GB),
    "v6e": _Chip(918e12, 1640e9, 32 * _GB),
}


class Collective(NamedTuple):
    """All collectives of one kind in a call.

    Attributes:
      kind: such as "all-reduce". XLA may write a gather as an all-reduce.
      runs: how often one is run.
      bytes: the bytes of their results on one device.

    Examples:
      >>> from plurax.transforms.program import Collective
      >>> Collective("all-reduce", 1, 32768).bytes
      32768
    """

    kind: str
    runs: int
    bytes: int


class OperationCost(NamedTuple):
    """A JAX operation in a scope.

    Attributes:
      op: the primitive, such as "dot_general".
      scope: its named scopes and parts of modules.
      flops: floating point operations on one device.
      bytes: bytes read and written on one device. The bytes of a fusion count for the operation with most flops.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from plurax.transforms.program import compile_for
      >>> x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
      >>> compile_for(lambda x: jnp.tanh(x @ x), "cpu", x).operations[0].op
      'dot_general'
    """

    op: str
    scope: str
    flops: float
    bytes: float


@dataclass(frozen=True)
class CompileReport:
    """What a program takes on each device; `print` it for a table.

    Attributes:
      target: the target.
      devices: the number of devices.
      fits: whether it compiles within the memory of a device; None for targets whose memory is not known ("cpu").
      arguments: bytes of the arguments.
      outputs: bytes of the results that are not arguments updated in place.
      temporaries: bytes of all else, at their peak.
      memory: bytes of memory of a device, of which a part is reserved; None if not known.
      flops: floating point operations; the body of a loop counts once for each iteration.
      bytes: bytes that the instructions read from and write to main memory.
      collectives: the collectives, by kind.
      operations: the operations, those with most flops first.
      least_seconds: a lower bound on the time of this program, not an estimate: the larger of flops and bytes over the
        highest rates of a device, without communication. None if these are not known.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from plurax.transforms.program import compile_for
      >>> report = compile_for(jnp.tanh, "cpu", jax.ShapeDtypeStruct((512, 512), jnp.float32))
      >>> report.arguments, report.peak - report.temporaries
      (1048576, 2097152)
    """

    target: str
    devices: int
    fits: bool | None
    arguments: int
    outputs: int
    temporaries: int
    memory: float | None
    flops: float
    bytes: float
    collectives: list[Collective]
    operations: list[OperationCost]
    least_seconds: float | None

    @property
    def peak(self) -> int:
        """Return the bytes of arguments, results and temporaries together."""
        return self.arguments + self.outputs + self.temporaries

    def __str__(self) -> str:
        def size(number: float) -> str:
            return in_words(int(number))

        of = "" if self.memory is None else f" of {size(self.memory)}"
        parts = f"arguments {size(self.arguments)}, results {size(self.outputs)}, temporaries {size(self.temporaries)}"
        lines = [f"{self.target}, {self.devices} device{'s' * (self.devices > 1)}; on each of them:"]
        lines.append(f"memory: {size(self.peak)}{of} ({parts})" + (": does not fit" if self.fits is False else ""))
        if self.fits is False:
            return "\n".join(lines)
        lines.append(f"operations: {count(self.flops)} flops, {count(self.bytes)}B read and written")
        lines += [f"{x.kind}: {x.runs}, {count(x.bytes)}B" for x in self.collectives] or ["no collectives"]
        if self.least_seconds is not None:
            lines.append(f"lower bound on the time, from the device's highest rates: {seconds(self.least_seconds)}")
        rows = [(x.op, x.scope, count(x.flops), count(x.bytes) + "B") for x in self.operations[:_SHOWN]]
        return "\n".join([*lines, table(("operation", "scope", "flops", "bytes"), rows, 2)])


def compile_for(
    fun: Callable[..., Any],
    target: str,
    *args: Any,
    mesh: Mapping[str, int] | Mesh | AbstractMesh | None = None,
    shardings: Any = None,
) -> CompileReport:
    """Compile a call for another device, and report its memory, operations and collectives. Nothing is run.

    Args:
      fun: a function, a bound method or a module; a function under `jax.jit` loses its options.
      target: a TPU slice such as "v5e:4x4" or "v6e:16x16" (generation and topology), or a platform that this process
        has, such as "cpu".
      *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, pytrees of them, or modules.
      mesh: the names and sizes of the mesh axes, such as `{"data": 16, "model": 16}`, or a mesh of JAX, of which only
        these and the types of the axes (automatic or explicit) matter. The product of the sizes is at most the number
        of devices of the target. It is the mesh of `jax.set_mesh` while `fun` is traced. None for one device.
      shardings: for each argument, a `PartitionSpec`, None (a copy on each device), a function that returns one of the
        two for an array, such as `lambda x: P("ensemble") if x.ndim else None`, or a pytree of them that is a prefix of
        the argument (a module has no parts). None if all arguments are copies.

    Returns:
      A `CompileReport`. `fits` is False if the program needs more memory than a device has.

    Raises:
      TypeError: `fun` is not callable, `target` is not a string, or `shardings` hold something else.
      ValueError: an unknown target; a GPU that is not here, for which JAX has no public way; a mesh that does not fit
        the target, or `shardings` without a mesh or for another number of arguments.
      ModuleNotFoundError: the plugin of the target is not installed.

    Cost:
      Tracing and compiling; for a large model a minute.

    Source:
      `jax.experimental.topologies`; XLA's memory analysis.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from plurax.transforms.program import compile_for
      >>> x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
      >>> compile_for(lambda x: jnp.tanh(x @ x), "cpu", x).flops
      268697600.0
    """
    check_callable("compile_for", fun)
    devices = _devices_of(target)
    grid = _mesh_of(devices, target, mesh)
    if shardings is not None and (mesh is None or not isinstance(shardings, Sequence) or len(shardings) != len(args)):
        wanted = f"shardings must be one entry for each of the {len(args)} arguments, with a mesh"
        raise ValueError(f"compile_for: {wanted}, but got {describe(shardings)}; pass mesh= and a tuple.")
    owner, function = bound_model(fun)
    refuse_shared_state("compile_for", fun, owner, args, {})
    # A mesh is set, also for one device, so that JAX traces anew what it has traced for another platform.
    with module_scopes(), names_in_cache_key(), compiling_for(devices[0]), jax.set_mesh(grid):
        parts, call = as_arrays(fun, owner, function, args)
        specs = [_spread(spec, part) for spec, part in zip(shardings or [None] * len(args), parts[1], strict=True)]
        every = [*_spread(None, parts[0]), *itertools.chain(*specs)]
        arrays, rest = HashablePytree.separate(parts, _ARRAYS)
        placed = [
            NamedSharding(grid, spec)
            for leaf, spec in zip(jax.tree.leaves(parts), every, strict=True)
            if isinstance(leaf, _ARRAYS)
        ]
        shapes = [
            jax.ShapeDtypeStruct(x.shape, jax.typeof(x).dtype, sharding=sharding)
            for x, sharding in zip(arrays, placed, strict=True)
        ]
        lowered = jax.jit(call).lower(Opaque(shapes, rest.join))
        chip = _CHIPS.get(target.partition(":")[0])
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if not (found := _OUT_OF_MEMORY.search(str(error))):
                raise
            needed = int(float(found[1]) * 2.0 ** {"K": 10, "M": 20, "G": 30}[found[2]])
            held = sum(
                math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
                for x, sharding in zip(shapes, placed, strict=True)
            )
            memory_of = None if chip is None else chip.memory
            return CompileReport(target, grid.size, False, held, 0, needed, memory_of, 0, 0, [], [], None)
    return report_of(target, grid.size, compiled, chip)


def _spread(specs: Any, argument: Any) -> list[PartitionSpec]:
    """Return the specification of each leaf of an argument, given a pytree of them that is a prefix of it."""

    def of_part(spec: Any, part: Any) -> list[PartitionSpec]:
        found = [spec(x) if callable(spec) else spec for x in jax.tree.leaves(part)]
        for x in found:
            if not (x is None or isinstance(x, PartitionSpec)):
                raise TypeError(f"compile_for: shardings must hold PartitionSpec or None, but got {describe(x)}.")
        return [x or PartitionSpec() for x in found]

    try:
        found = jax.tree.map(of_part, specs, argument, is_leaf=lambda x: x is None or isinstance(x, PartitionSpec))
    except ValueError as error:  # JAX names the place
        raise ValueError(f"compile_for: shardings must be a prefix of the argument: {error}") from error
    return jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _devices_of(target: str) -> list[Any]:
    """Return the devices of a target."""
    if not isinstance(target, str):
        raise TypeError(f'compile_for: target must be a string such as "v5e:4x4", but got {describe(target)}.')
    generation, _, topology = target.partition(":")
    if generation in _CHIPS and topology:
        if not _has_tpu_compiler():
            message = f"compile_for: {target} needs the TPU compiler; install it with pip install 'plurax[tpu]'."
            raise ModuleNotFoundError(message)
        # Do not look for a TPU of this machine, nor for other processes that use it.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        try:
            return devices_of_topology(target, "tpu")
        except Exception as error:  # the compiler knows which topologies exist
            first = str(error).splitlines()[0]
            raise ValueError(f"compile_for: the TPU compiler refuses target={target!r}: {first}") from error
    try:
        return list(jax.devices(target))
    except RuntimeError as error:
        known = f'a TPU slice such as "v5e:4x4" (of {", ".join(_CHIPS)}) or a platform of this process'
        gpu = re.fullmatch(r"gpu|cuda|rocm|[abh]\d{2,3}.*", target, re.IGNORECASE)
        why = (
            "; JAX has no public way to compile for a GPU that is not here (jax issues 23971 and 28376)" if gpu else ""
        )
        raise ValueError(f"compile_for: target must be {known}, but got {target!r}{why}.") from error


def _has_tpu_compiler() -> bool:
    """Return whether the package with the TPU compiler is installed."""
    from importlib.util import find_spec

    return find_spec("libtpu") is not None


def _mesh_of(devices: Sequence[Any], target: str, mesh: Any) -> Mesh:
    """Return the mesh of the devices that are used."""
    of_jax = isinstance(mesh, (Mesh, AbstractMesh))
    axes: dict[Any, int] = dict(mesh.shape if of_jax else mesh or {"one": 1})
    types = mesh.axis_types if of_jax else (AxisType.Auto,) * len(axes)
    for name, size in axes.items():
        check_count("compile_for", f"mesh[{name!r}]", size)
    size = math.prod(axes.values())
    if size > len(devices):
        raise ValueError(
            f"compile_for: mesh={axes} has {size} devices, but {target} has {len(devices)}; make it smaller."
        )
    return Mesh(np.array(devices[:size]).reshape(*axes.values()), tuple(axes), axis_types=types)


def report_of(target: str, devices: int, compiled: Any, chip: _Chip | None) -> CompileReport:
    """Return the report of a compiled program."""
    analysis = memory_of(compiled)
    program = HloProgram(compiled.as_text())
    operations: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    collectives: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for instruction, times in program.runs():
        found = shares(program, instruction, {})
        for share in found:
            operations[share.place.op, share.place.scope][0] += times * share.flops
        largest = max(found, key=lambda share: share.flops)
        operations[largest.place.op, largest.place.scope][1] += times * memory(program, instruction)
        for kind, size in _exchanged(program, instruction):
            collectives[kind][0] += times
            collectives[kind][1] += times * size
    total, moved = (sum(x[i] for x in operations.values()) for i in range(2))
    rows = [OperationCost(op, scope, *numbers) for (op, scope), numbers in operations.items()]
    return CompileReport(
        target=target,
        devices=devices,
        fits=None if chip is None else True,
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        memory=None if chip is None else chip.memory,
        flops=total,
        bytes=moved,
        collectives=[Collective(kind, *collectives[kind]) for kind in sorted(collectives)],
        operations=sorted(rows, key=lambda row: (-row.flops, -row.bytes, row.scope)),
        least_seconds=None if chip is None else max(total / chip.flops, moved / chip.bandwidth),
    )


def _exchanged(program: HloProgram, instruction: Instruction) -> Iterator[tuple[str, int]]:
    """Yield the kind and the bytes of each collective in an instruction, which may be a fusion."""
    for x in program.inside(instruction) if instruction.opcode == "fusion" else (instruction,):
        kind = x.opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            results = x.results
            if x.opcode != kind and kind != "all-reduce":  # the operands come first, then the results
                results = results[1:2] if kind == "collective-permute" else results[len(results) // 2 :]
            yield kind, sum(array.bytes for array in results)
