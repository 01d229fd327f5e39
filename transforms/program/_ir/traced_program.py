"""A call as a traced and compiled program that can run repeatedly, with scopes for the parts of NNX modules."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.arguments import argument_name, check_callable
from ..._core.compat import Jitted, Tracer
from ..._core.source_lines import call_users
from ..._models.hashable import Opaque
from ..._models.mutation import call_with_models, changes
from ..._models.split_model import bound_model, models_of, refuse_shared_state, split, split_tree
from .hlo import HloProgram, Instruction
from .module_scopes import module_scopes, with_paths
from .provenance import Attribution, Provenance, is_mixed, shares
from .unnamed_dots import unnamed_dots

# XLA's CPU backend may pass a part of a program, or all of it, to a library as one instruction, whose parts cannot be
# timed. With these options, each matrix product and convolution is a separate library call.
_ALONE = "LIBRARY_FUSION_TYPE_INDIVIDUAL"
_SEPARATE_PRODUCTS = {"xla_cpu_experimental_ynn_fusion_type": f"{_ALONE}_DOT,{_ALONE}_CONVOLUTION"}
# It also compiles a small loop into one function, whose instructions do not appear in the trace.
_SEPARATE_LOOPS = {"xla_disable_hlo_passes": "small-while-loop-hoisting"}
_SMALL_LOOP = "xla_cpu_small_call"
_LOCK = threading.RLock()


class TracedProgram:
    """The call `fun(*args)` as a program.

    It does not modify modules: the state that `fun` changes is a result of the program, so that it is still computed.

    Args:
      api: the name of the tool, for errors.
      fun: a function, a bound method or a module; a jitted function keeps its settings.
      args: its arguments. Those that are not arrays, numbers or modules are passed unchanged.

    Attributes:
      name: the name of the function.
      args: the arguments of the program: pytrees of arrays and numbers.
      traced: the trace, `jax.stages.Traced`: the program before XLA's optimizations.
    """

    def __init__(self, api: str, fun: Callable[..., Any], args: tuple[Any, ...]) -> None:
        check_callable(api, fun)
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(split_tree(args))):
            raise TypeError(f"{api}: arguments have no values under jax.jit, jax.grad or jax.vmap; call it outside.")
        inner: Any = fun.func if isinstance(fun, partial) else fun
        self.name: str = getattr(inner, "__name__", type(inner).__name__)
        owner, function = bound_model(fun)
        refuse_shared_state(api, fun, owner, args, {})
        jitted = isinstance(fun, Jitted)
        with module_scopes() as found:
            if jitted and not models_of(args):
                self.traced: Any = call_users(cast(Any, fun).trace, *args)
                dynamic = _dynamic(fun, args, self.traced)
                self.args = tuple(args[i] for i in dynamic)
                static = tuple(i for i in range(len(args)) if i not in dynamic)
                # JAX may have cached that trace without the scopes. A new function has them, but not the jit options.
                renewed = jax.jit(lambda *args: cast(Any, fun).__wrapped__(*args), static_argnums=static)
                again: Any = call_users(renewed.trace, *args)
                self.traced = again if found else self.traced
            else:
                # Ints and bools of a jitted function may be static, so they are not converted.
                kinds = (np.ndarray, np.generic, *((float, complex) if jitted else (bool, int, float, complex)))
                parts, call = as_arrays(fun, owner, function, args)
                parts = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, kinds) else x, parts)
                self.args = (Opaque.of(parts),)
                self.traced = call_users(jax.jit(call).trace, *self.args)
        self._lowered: Any = self.traced.lower()

    def compile(self, options: dict[str, str] | None = None) -> Compiled:
        """Return the compiled program."""
        with names_in_cache_key():
            return Compiled(self._lowered.compile(compiler_options=options), self.args, self.traced.jaxpr)

    @cached_property
    def compiled(self) -> Compiled:
        """Return the program compiled with its own settings."""
        return self.compile()

    @cached_property
    def separated(self) -> Compiled:
        """Return the program with products and small loops as separate instructions, if XLA supports the options."""
        program = self.compiled.program
        options: dict[str, str] = {}
        if any(is_mixed(program, x) for x in program.instructions.values()):
            options |= _SEPARATE_PRODUCTS
        if _SMALL_LOOP in self.compiled.text:
            options |= _SEPARATE_LOOPS
        try:
            return self.compile(options) if options else self.compiled
        except jax.errors.JaxRuntimeError:  # another version of XLA, without these options
            return self.compiled


class Compiled:
    """A compiled program and its arguments.

    Attributes:
      text: the program as text, written by XLA.
      program: the parsed text.
      module: the name of the program in the trace of a run.
    """

    def __init__(self, executable: Any, args: tuple[Any, ...], closed: Any) -> None:
        self.text: str = executable.as_text()
        self.program = HloProgram(self.text)
        self.module = re.split(r"[\s,]", self.text.removeprefix("HloModule "), maxsplit=1)[0]
        self._executable, self._args, self._closed = executable, args, closed
        self._donates = any(info.donated for info in jax.tree.leaves(executable.args_info))

    @cached_property
    def _unnamed(self) -> dict[str, Provenance]:
        return unnamed_dots(self.program, self._closed)

    def shares(self, instruction: Instruction) -> list[Attribution]:
        """Divide an instruction among the JAX operations that it represents."""
        return shares(self.program, instruction, self._unnamed)

    def calls(self, number: int) -> list[Callable[[], Any]]:
        """Return `number` calls of the program; each can be made once."""
        # A call consumes donated buffers, so make copies for each call before anything is timed.
        each = [jax.tree.map(jnp.copy, self._args) if self._donates else self._args for _ in range(number)]
        jax.block_until_ready(each)
        return [partial(self._executable, *args) for args in each]


def _dynamic(fun: Callable[..., Any], args: Sequence[Any], traced: Any) -> list[int]:
    """Return the positions of the arguments of a jitted function that are not static.

    JAX does not report static arguments, but it gives the names and structures of the program's arguments, in order.
    """
    names = iter(traced.jaxpr.jaxpr.debug_info.arg_names)
    left: list[Any] = [(jax.tree.structure(x), [next(names) for _ in jax.tree.leaves(x)]) for x in traced.args_info[0]]
    found = []
    for i, argument in enumerate(args):
        # An argument without leaves has no names, but arguments of equal empty structure are interchangeable.
        name = argument_name(fun, args, i)
        begins = left and all(x.removeprefix(name)[:1] in ("", ".", "[") for x in left[0][1])
        if begins and left[0][0] == jax.tree.structure(argument):
            found.append(i)
            left.pop(0)
    # If some do not match, such as without a signature, treat all as dynamic; a wrong guess raises an error in JAX.
    return list(range(len(args))) if left else found


@contextmanager
def names_in_cache_key() -> Iterator[None]:
    """Prevent JAX's persistent cache from returning the same program with another function's scopes and lines."""
    setting = "jax_compilation_cache_include_metadata_in_key"
    with _LOCK:  # all threads see the setting
        before = getattr(jax.config, setting)
        jax.config.update(setting, True)
        try:
            yield
        finally:
            jax.config.update(setting, before)


def as_arrays(
    fun: Callable[..., Any], owner: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Any, Callable[[Opaque], list[jax.Array]]]:
    """Return the parts of a call with its models split, and a function of them (as an `Opaque`) that makes the call.

    The function returns the arrays of the result, and the arrays of modules that the call changes.
    """
    if not models_of((owner, args)):

        def of_values(arguments: Opaque) -> list[jax.Array]:
            owner, args, _ = arguments.value
            return Opaque.of(split_tree(function(owner, *args))).arrays

        return (owner, args, {}), of_values  # without merging the split models that a training state holds

    def of_models(arguments: Opaque) -> list[jax.Array]:
        parts = arguments.value
        out, models = call_with_models(function, parts)
        changed = zip(map(split, models), changes(function, parts, models), strict=True)
        kept = [x for after, paths in changed for path, x in after.arrays().items() if path in paths]
        return [*Opaque.of(split_tree(out)).arrays, *kept]

    return split_tree((*with_paths(fun, owner, args), {})), of_models
