"""Everything that depends on the version of JAX: imports that move, private attributes, and classes of errors."""

import functools
import importlib
import threading
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

# The errors that JAX raises if a traced function needs a value: to branch on it, or to pass an array to NumPy.
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
    """Return the mesh axes of the surrounding `shard_map` over which an array, or an abstract value, varies."""
    differs = (x if hasattr(x, "manual_axis_type") else jax.typeof(x)).manual_axis_type
    return differs.varying if differs else frozenset()


def varying(x: Any, axes: Iterable[str]) -> Any:
    """Mark an array as varying over these mesh axes, so that each device has its own gradient."""
    missing = tuple(sorted(set(axes) - varying_axes(x)))  # `pcast` refuses axes over which it already varies
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def one_of(examples: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of one example of a batch; inside a `shard_map` it varies over the same axes."""
    shape, dtype, kind = examples.shape[1:], jax.dtypes.result_type(examples), jax.typeof(examples)
    if not varying_axes(kind):
        return jax.ShapeDtypeStruct(shape, dtype)
    sharding = NamedSharding(kind.sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=kind.manual_axis_type)


def is_repeated(tracer: Tracer) -> bool:
    """Return whether a tracer belongs to a trace inside a vmap, a derivative or a loop, as far as JAX shows.

    The attributes read here are private to JAX. The result is used for a warning only (see `memory.py`), which is
    omitted if an attribute is missing.
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
    """Return a compiled program as bytes; a program that calls back into Python raises one of many kinds of error."""
    from jax.experimental.serialize_executable import serialize

    payload, _, _ = serialize(compiled)
    return payload


def loaded(payload: bytes, in_tree: Any, out_tree: Any, devices: Sequence[Any]) -> Any:
    """Load the compiled program that `serialized` returned onto these devices; this can run code in `payload`."""
    from jax.experimental.serialize_executable import deserialize_and_load

    return deserialize_and_load(payload, in_tree, out_tree, backend=devices[0].client, execution_devices=tuple(devices))


class Dispatched:
    """A compiled program behind the dispatch of `jax.jit`, which compares types of arguments without Python.

    Calling it raises TypeError for arguments of other types than those of earlier calls of `first`.
    """

    def __init__(self, compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out_tree: Any) -> None:
        """Prepare it.

        Args:
          compiled: a program that was compiled for the leaves of the arguments.
          args: the positional arguments.
          kwargs: the keyword arguments.
          out_tree: the structure of the result; the program's own may have more structure, but no more leaves.

        Raises:
          AttributeError: the program must run through Python, such as one with callbacks; or a private attribute of JAX
            is missing.
        """
        self._executable, self._thread = compiled._executable, threading.local()
        in_tree = jax.tree.structure((args, kwargs))
        params = compiled._params._replace(executable=self, in_tree=in_tree, out_tree=out_tree)
        self.run: Callable[..., Any] = self._executable.create_cpp_call(params)
        if self.run is None:
            raise AttributeError("the program must run through Python")

    def first(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program with arguments of types for which it was compiled, and remember these types."""
        self._thread.in_first = True
        try:
            return self.run(*args, **kwargs)
        finally:
            self._thread.in_first = False

    def call(self, *args: Any) -> Any:
        """Execute the program; JAX calls this for types that it does not know."""
        if not getattr(self._thread, "in_first", False):
            raise TypeError("arguments of other types")
        return self._executable.call(*args)


def devices_of(compiled: Any) -> list[Any]:
    """Return the devices of a compiled program, in the program's order."""
    return list(compiled.runtime_executable().local_devices())


def lowered_for(lowered: Any) -> list[Any]:
    """Return the devices of a lowered program, in the program's order; its code does not contain them."""
    found = getattr(lowered._lowering, "_device_list", None)  # private to JAX, but saves a compilation
    return devices_of(lowered.compile()) if found is None else list(found)


def inside_a_transform() -> bool:
    """Return whether a `jax.jit`, `jax.grad`, `jax.vmap` or the like is being traced, whatever the arguments are."""
    return get_opaque_trace_state() != _outside()


# Cached, since it never changes and `inside_a_transform` runs at each call.
@functools.cache
def _outside() -> Any:
    with eval_context():
        return get_opaque_trace_state()


def node(kind: type, static: Any, children: Sequence[Any]) -> Any:
    """Return the `PyTreeDef` with this `node_data()` and these `children()`."""
    return PyTreeDef.from_node_data_and_children(default_registry, (kind, static), children)


def forget_cache() -> None:
    """Make JAX read the location of its persistent cache again: it does so only at the first compilation."""
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()


def sparse_product(name: str) -> Callable[..., Any] | None:
    """Return the function that implements the primitive of this name, a product with a `BCOO` or `BCSR`, or None."""
    kind = name.removesuffix("_dot_general")
    if kind not in ("bcoo", "bcsr"):
        return None
    return getattr(importlib.import_module(f"jax.experimental.sparse.{kind}"), f"_{name}_impl", None)
