"""Everything that depends on the version of JAX: imports that move, private attributes, and classes of errors.

`jax.core`, `jax.extend`, `jax.experimental` and `jax.interpreters` are imported here and nowhere else.
`tests/test_surfaces.py` lists what this file and the rules for primitives read of JAX, and finds what a new version has
changed.
"""

import contextlib
import functools
import importlib
import io
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.core import ShapedArray as ShapedArray
from jax.core import Tracer as Tracer
from jax.core import eval_context
from jax.core import eval_jaxpr as eval_jaxpr
from jax.extend import core, source_info_util
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Literal as Literal
from jax.extend.core import Var as Var
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef, default_registry

# The newest version of JAX that the tests have run on.
NEWEST_TESTED = (0, 12)

# One class with `Jaxpr` from jax 0.12 on.
if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr as ClosedJaxpr
else:
    ClosedJaxpr = getattr(core, "ClosedJaxpr", Jaxpr)


@contextlib.contextmanager
def fragile(surface: str) -> Iterator[None]:
    """Explain errors from a part of JAX that a later version may change, if this version is a later one.

    Args:
      surface: the part, as a noun.

    Raises:
      RuntimeError: the part has changed in a version newer than the newest one tested. Errors in older versions pass.
    """
    try:
        yield
    except (AttributeError, ImportError, LookupError, TypeError) as error:
        if jax.__version_info__[:2] <= NEWEST_TESTED:
            raise
        tested = ".".join(map(str, NEWEST_TESTED))
        raise RuntimeError(
            f"{surface} has changed in JAX ({type(error).__name__}: {error}). The newest JAX that Plurax is tested "
            f"with is {tested}, and this is {jax.__version__}. Please report this at "
            "https://github.com/plurax/plurax/issues."
        ) from error


@contextlib.contextmanager
def fragile_parameters(eqn: JaxprEqn) -> Iterator[None]:
    """As `fragile`, for code of ours that reads the parameters of an operation."""
    try:
        yield
    except KeyError as error:
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        ours = frame is not None and frame.tb_frame.f_globals.get("__name__", "").startswith("plurax.")
        if not ours or error.args[0] in eqn.params:
            raise
        with fragile(f"the parameter `{error.args[0]}` of `{eqn.primitive.name}`"):
            raise


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


def needed(jaxpr: Any, outputs: Sequence[bool]) -> list[bool]:
    """Return for each input of a program whether one of these outputs, or an effect, depends on it."""
    with fragile("`jax.interpreters.partial_eval.dce_jaxpr`"):
        from jax.interpreters.partial_eval import dce_jaxpr

        return dce_jaxpr(jaxpr, list(outputs))[1]


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
    return struct_like(jax.typeof(examples), examples.shape[1:], jax.dtypes.result_type(examples))


def struct_like(kind: Any, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Return a struct that varies over the same axes of a surrounding `shard_map` as the abstract value `kind`."""
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
    return core.get_opaque_trace_state() != _outside()


# Cached, since it never changes and `inside_a_transform` runs at each call.
@functools.cache
def _outside() -> Any:
    with eval_context():
        return core.get_opaque_trace_state()


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


def expanded(eqn: JaxprEqn) -> Any:
    """Return the program of a `call_hi_primitive`, in terms of other primitives."""
    with fragile("the parameter `_prim` of `call_hi_primitive`"):
        primitive = eqn.params["_prim"]
        tree, expand = primitive.in_tree, primitive.expand
    avals: list[Any] = [x.aval for x in eqn.invars]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals]
    return jax.make_jaxpr(lambda *args: expand(*jax.tree.unflatten(tree, args)))(*shapes)


def is_of_jax(eqn: JaxprEqn) -> bool:
    """Return whether the derivative rule of an operation is certainly one of JAX's own."""
    return type(eqn.params.get("_prim")).__module__.startswith("jax.")


def at_source(eqn: JaxprEqn) -> contextlib.AbstractContextManager[None]:
    """Return a context in which new operations get the named scopes and the source line of an operation."""
    with fragile("`jax.extend.source_info_util`"):
        names = source_info_util.current_name_stack() + eqn.source_info.name_stack
        return source_info_util.user_context(eqn.source_info.traceback, name_stack=names)


def setting(name: str) -> Any:
    """Return the value of a setting of JAX."""
    with fragile(f"`jax.config.values[{name!r}]`"):
        return jax.config.values[name]


def memory_of(compiled: Any) -> Any:
    """Return the sizes in bytes that XLA counts for a compiled program: arguments, outputs, temporaries."""
    with fragile("`memory_analysis()` of a compiled program"):
        analysis = compiled.memory_analysis()
        for name in ("argument", "output", "alias", "temp"):
            getattr(analysis, f"{name}_size_in_bytes")
        return analysis


def flops_of(lowered: Any) -> float:
    """Return the operations that XLA counts in a lowered program; 0 if it does not count."""
    with fragile("`cost_analysis()` of a lowered program"):
        return (lowered.cost_analysis() or {}).get("flops", 0.0)


def jet_rules() -> Any:
    """Return the rules of Taylor mode, by primitive."""
    with fragile("`jax.experimental.jet`"):
        from jax.experimental.jet import jet_rules

        return jet_rules


def key_implementation(**functions: Any) -> Any:
    """Return an implementation of random keys."""
    with fragile("`jax.extend.random`"):
        from jax.extend.random import define_prng_impl

        return define_prng_impl(**functions)


def code_of(lowered: Any) -> bytes:
    """Return the code of a lowered program, without names and source lines."""
    with fragile("`jax.extend.mlir`"):
        from jax.extend.mlir import passmanager

        module = lowered.compiler_ir()
        with module.context:
            code, copy = io.BytesIO(), module.operation.clone()
            passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(copy)
        copy.write_bytecode(code)  # takes a third of the time of its text
        return code.getvalue()


def gathered(x: Any) -> Any:
    """Return the arrays of all processes, stacked."""
    with fragile("`jax.experimental.multihost_utils`"):
        from jax.experimental.multihost_utils import process_allgather

    return process_allgather(x)


def is_preempted(step: int) -> bool:
    """Return whether a process was told to stop, the same in all processes that ask with this number."""
    with fragile("`jax.experimental.multihost_utils`"):
        from jax.experimental.multihost_utils import reached_preemption_sync_point

    return reached_preemption_sync_point(step)


def devices_of_topology(name: str, platform: str) -> list[Any]:
    """Return the devices of a topology that this machine need not have."""
    with fragile("`jax.experimental.topologies`"):
        from jax.experimental import topologies

    return list(topologies.get_topology_desc(name, platform).devices)


def sparse_matrix(data: Any, indices: Any, shape: tuple[int, ...]) -> Any:
    """Return a `BCOO` with sorted indices, none of them twice."""
    with fragile("`jax.experimental.sparse`"):
        from jax.experimental.sparse import BCOO

    return BCOO((data, indices), shape=shape, indices_sorted=True, unique_indices=True)
