"""The imports from JAX whose place changes between versions, and what it raises where, in one file."""

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.core import Tracer as Tracer
from jax.core import eval_context
from jax.extend.core import get_opaque_trace_state
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef, default_registry

# The class of functions under `jax.jit`, which has no public name.
Jitted: Any = type(jax.jit(len))

# What is raised where a function that is traced asks for a value: it branches on one, or hands an array to NumPy.
NeedsValues = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return how many operands of a `scan` are the same in each iteration, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    shared, carry, _ = params["ft_in"].unpack()  # from jax 0.11 on
    return len(shared), len(carry)


def varying_axes(x: Any) -> frozenset[str]:
    """Return the axes of the `shard_map` around us over whose devices an array, or an abstract value, differs."""
    differs = (x if hasattr(x, "manual_axis_type") else jax.typeof(x)).manual_axis_type
    return differs.varying if differs else frozenset()


def varying(x: Any, axes: Iterable[str]) -> Any:
    """Return an array as one that differs over the devices of these axes, so that each has a gradient of its own."""
    missing = tuple(sorted(set(axes) - varying_axes(x)))  # `pcast` refuses axes over which it differs already
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def one_of(examples: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of one of some examples, and over which devices of a `shard_map` they differ."""
    shape, dtype, kind = examples.shape[1:], jax.dtypes.result_type(examples), jax.typeof(examples)
    if not varying_axes(kind):
        return jax.ShapeDtypeStruct(shape, dtype)
    sharding = NamedSharding(kind.sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=kind.manual_axis_type)


def is_repeated(tracer: Tracer) -> bool:
    """Return whether a vmap, a derivative or a loop is being traced around a tracer, as far as JAX tells.

    The attributes that are read here are private to JAX. They are used for a warning only (see `memory.py`), which is
    not given where one is missing.
    """
    trace: Any = getattr(tracer, "_trace", None)
    while trace is not None:
        program = getattr(getattr(trace, "frame", None), "debug_info", None)
        if (getattr(program, "traced_for", None) or type(trace).__name__) in _REPEATING:
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


_REPEATING = {"BatchTrace", "JVPTrace", "LinearizeTrace", "scan", "fori_loop", "while_body", "while_cond"}


def serialized(compiled: Any) -> bytes:
    """Return a compiled program as bytes; one that calls back into Python has none, and raises one of many errors."""
    from jax.experimental.serialize_executable import serialize

    payload, _, _ = serialize(compiled)
    return payload


def loaded(payload: bytes, in_tree: Any, out_tree: Any, devices: Sequence[Any]) -> Any:
    """Return the compiled program that `serialized` gave, on these devices; reading it runs the code in it."""
    from jax.experimental.serialize_executable import deserialize_and_load

    return deserialize_and_load(payload, in_tree, out_tree, backend=devices[0].client, execution_devices=tuple(devices))


def devices_of(compiled: Any) -> list[Any]:
    """Return the devices of a compiled program, in its order."""
    return list(compiled.runtime_executable().local_devices())


def lowered_for(lowered: Any) -> list[Any]:
    """Return the devices of a lowered program, in its order: its text does not name them."""
    found = getattr(lowered._lowering, "_device_list", None)  # private to JAX, but spares a compilation
    return devices_of(lowered.compile()) if found is None else list(found)


def inside_a_transform() -> bool:
    """Return whether a `jax.jit`, `jax.grad`, `jax.vmap` or the like is around us, whatever our arguments are."""
    return get_opaque_trace_state() != _outside()


# Cached, since it never changes and `inside_a_transform` is asked at each call.
@functools.cache
def _outside() -> Any:
    with eval_context():
        return get_opaque_trace_state()


def node(kind: type, static: Any, children: Sequence[Any]) -> Any:
    """Return the `PyTreeDef` with this `node_data()` and these `children()`."""
    return PyTreeDef.from_node_data_and_children(default_registry, (kind, static), children)


def forget_cache() -> None:
    """Let JAX look anew where its persistent cache is: it does so once, when it first compiles."""
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()


def sparse_product(name: str) -> Callable[..., Any] | None:
    """Return the function that JAX lowers a product with a `BCOO` or `BCSR` to, by the name of the primitive."""
    kind = name.removesuffix("_dot_general")
    if kind not in ("bcoo", "bcsr"):
        return None
    return getattr(importlib.import_module(f"jax.experimental.sparse.{kind}"), f"_{name}_impl", None)
