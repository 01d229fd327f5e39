"""`shard_map`: programs that run on every device of a mesh, each on its block of the arrays, followed in step.

A value here is a list with the sets, or the known value, of each device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from ..._core.compat import PERMUTES_AS_MESH
from ..._core.jaxpr import CALLS, aval, called, interpret, with_inner
from .control_flow import ITERATIONS, branched, unrolled
from .index_sets import (
    UNKNOWN,
    Lazy,
    grouped,
    is_set,
    known,
    matrix_at,
    part_of,
    places_of,
    refuse_refs,
    rows_of,
    stacked,
    take,
    united,
)

# From an operation and its operands to its results, on one device.
Visit = Callable[[JaxprEqn, list[Any]], list[Any]]

_TOTALS = frozenset({"psum", "psum_invariant", "pmax", "pmin", "unreduced_psum"})
_GATHERS = frozenset({"all_gather", "all_gather_invariant", "all_gather_reduced"})
_SCATTERS = frozenset({"reduce_scatter", "unreduced_reduce_scatter"})
# These have names of axes as parameters, but send no number from one device to another.
_LOCAL = frozenset({"axis_index", "pcast", "preduced", "pvary", "reduced_vary_cast_p", "vary_unreduced_cast_p"})


def on_devices(eqn: JaxprEqn, values: list[Any], visit: Visit, without_rule: list[str]) -> list[Any]:
    """Return the sets of the results of a `shard_map`."""
    params, jaxpr = eqn.params, eqn.params["jaxpr"]
    axes = {
        name: params["mesh"].shape[name] for name in params["mesh"].axis_names if name in params["newly_manual_axes"]
    }
    # A device is its index along each of the mesh's axes that the program may name.
    devices = [dict(zip(axes, at, strict=True)) for at in np.ndindex(*axes.values())]
    given = [
        [part_of(value, _block(x, spec, at, axes)) for at in devices]
        for x, value, spec in zip(eqn.invars, values, params["in_specs"], strict=True)
    ]
    found = _run(jaxpr, (), given, devices, visit, without_rule)
    # Where a result is replicated, all devices have the same block, and any of them may have computed it: the union.
    results = []
    for x, parts, spec in zip(eqn.outvars, found, params["out_specs"], strict=True):
        blocks = [_block(x, spec, at, axes) for at in devices]
        size = math.prod(aval(x).shape)
        placed = [
            matrix_at(block, np.arange(block.size), (size, block.size)) @ part
            for part, block in zip(parts, blocks, strict=True)
            if is_set(part)
        ]
        results.append(united(placed) if placed else Lazy(partial(_joined, x, parts, blocks)))
    return results


def communicates(eqn: JaxprEqn) -> bool:
    """Return whether an operation, or one inside it, sends numbers from one device to another."""

    def sends(eqn: JaxprEqn) -> bool:
        names = jax.tree.leaves([eqn.params.get(key) for key in ("axes", "axis_name")])
        return any(isinstance(name, str) for name in names) and eqn.primitive.name not in _LOCAL

    return any(map(sends, with_inner([eqn])))


def _block(x: Any, spec: Any, at: dict[str, int], axes: dict[str, int]) -> np.ndarray:
    """Return the flat indices of the numbers of an array that a device has."""
    places = places_of(x)
    for i, names in enumerate(spec):
        names = [name for name in (names if isinstance(names, tuple) else (names,)) if name in axes]
        # Over several axes the blocks are numbered with the last axis fastest, as in a `PartitionSpec`.
        index, count = 0, 1
        for name in names:
            index, count = index * axes[name] + at[name], count * axes[name]
        size = places.shape[i] // count
        places = places.take(np.arange(index * size, (index + 1) * size), i)
    return places


def _joined(x: Any, parts: list[Any], blocks: list[np.ndarray]) -> Any:
    """Return an array merged from the blocks of all devices, if all of it is known."""
    found = [part for part in map(known, parts) if part is not None]  # keys count as unknown: NumPy has none
    if len(found) < len(parts):
        return UNKNOWN
    out = np.empty(aval(x).shape, aval(x).dtype)
    for part, block in zip(found, blocks, strict=True):
        out.flat[block.ravel()] = part.ravel()
    return out


def _run(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    args: list[Any],
    devices: list[dict[str, int]],
    visit: Visit,
    without_rule: list[str],
) -> list[Any]:
    """Follow a program as `interpret` does, with the values of all devices in place of each value."""

    def run(jaxpr: Jaxpr, consts: Sequence[Any], args: list[list[Any]]) -> list[list[Any]]:
        return _run(jaxpr, consts, args, devices, visit, without_rule)

    def visit_all(eqn: JaxprEqn, values: list[list[Any]]) -> list[Any]:
        """Return the results of an operation on every device."""
        name = eqn.primitive.name
        if name == "axis_index" and isinstance(eqn.params["axis_name"], str):
            return [[np.int32(at[eqn.params["axis_name"]]) for at in devices]]
        # Only what communicates needs all devices in step; everything else is followed for each device on its own.
        if not communicates(eqn):
            found = [visit(eqn, [value[d] for value in values]) for d in range(len(devices))]
            return [list(x) for x in zip(*found, strict=True)]
        if name in CALLS:
            return run(*called(eqn), values)
        if name == "cond":
            return branched(eqn, values, run)
        if name == "scan" and eqn.params["length"] <= ITERATIONS:
            return unrolled(eqn, values, run)
        columns = next((x.shape[1] for value in values for x in value if is_set(x)), None)
        if columns is None:
            return [[UNKNOWN] * len(devices) for _ in eqn.outvars]
        refuse_refs(eqn)
        sets = [[rows_of(x, part, columns) for part in value] for x, value in zip(eqn.invars, values, strict=True)]
        out = _exchanged(eqn, sets, devices)
        if out is None:  # every result depends on all operands of all devices
            without_rule.append(name)
            every = united([grouped(part, np.zeros(part.shape[0], int), 1) for value in sets for part in value])
            out = [[every[np.zeros(math.prod(aval(x).shape), int)]] * len(devices) for x in eqn.outvars]
        return [[part if part.nnz else UNKNOWN for part in parts] for parts in out]

    return interpret(jaxpr, consts, args, visit_all, lambda value: [value] * len(devices))


def _exchanged(eqn: JaxprEqn, sets: list[list[Any]], devices: list[dict[str, int]]) -> list[list[Any]] | None:
    """Return the sets of every device after an operation by which devices exchange numbers; None if it has no rule."""
    name, params = eqn.primitive.name, eqn.params
    names = params.get("axes", params.get("axis_name"))
    names = names if isinstance(names, tuple) else (names,)
    # In these versions of JAX `ppermute` counts devices in the order of the mesh's axes, not of its own argument.
    if name == "ppermute" and PERMUTES_AS_MESH:
        names = tuple(sorted(names, key=list(devices[0]).index))
    if params.get("axis_index_groups") is not None or not all(isinstance(axis, str) for axis in names):
        return None

    def group_of(at: dict[str, int]) -> list[int]:
        """Return the devices that differ from one along these axes only, in the order of these axes."""
        same = [d for d, other in enumerate(devices) if all(other[k] == at[k] for k in at if k not in names)]
        return sorted(same, key=lambda d: [devices[d][k] for k in names])

    if name in _TOTALS:
        return [[united([parts[d] for d in group_of(at)]) for at in devices] for parts in sets]
    (shape, out), (parts,) = (aval(eqn.invars[0]).shape, aval(eqn.outvars[0]).shape), sets[:1]
    places = np.arange(math.prod(shape)).reshape(shape)
    found = []
    for d, at in enumerate(devices):
        group = group_of(at)
        me = group.index(d)
        if name == "ppermute":
            source = [group[a] for a, b in params["perm"] if b == me]
            found.append(parts[source[0]] if source else parts[d] * False)  # a device that nobody sends to gets zeros
        elif name in _GATHERS:
            all_places = [places + k * places.size for k in range(len(group))]
            join = np.concatenate if params["tiled"] else np.stack
            found.append(stacked([parts[k] for k in group])[join(all_places, params["all_gather_dimension"]).ravel()])
        elif name in _SCATTERS:
            axis = params["scatter_dimension"]
            mine = np.split(places, len(group), axis)[me].reshape(out)
            found.append(united([take(parts[k], mine) for k in group]))
        elif name == "all_to_all":
            cuts = [np.split(places + k * places.size, len(group), params["split_axis"])[me] for k in range(len(group))]
            if not params["tiled"]:
                cuts = [np.expand_dims(x.squeeze(params["split_axis"]), params["concat_axis"]) for x in cuts]
            mine = np.concatenate(cuts, params["concat_axis"])
            found.append(stacked([parts[k] for k in group])[mine.ravel()])
        else:
            return None
    return [found]
