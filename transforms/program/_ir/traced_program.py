"""A call as a program of its own, in which the parts of NNX modules are scopes: traced, compiled, and repeated."""

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

# XLA's CPU backend passes parts of a program, or all of it, to a library as one instruction. Its parts cannot be timed.
# With these options each matrix product and convolution is handed over alone.
_ALONE = "LIBRARY_FUSION_TYPE_INDIVIDUAL"
_SEPARATE_PRODUCTS = {"xla_cpu_experimental_ynn_fusion_type": f"{_ALONE}_DOT,{_ALONE}_CONVOLUTION"}
# And it compiles small loops into one function that the trace does not look into.
_SEPARATE_LOOPS = {"xla_disable_hlo_passes": "small-while-loop-hoisting"}
_SMALL_LOOP = "xla_cpu_small_call"
_LOCK = threading.RLock()


class TracedProgram:
    """`fun(*args)` as a program.

    Modules are not changed by it: the state that `fun` changes is a result of the program, so that it is computed.

    Args:
      api: the name of the tool, for errors.
      fun: a function, a bound method or a module; one that is jitted keeps its settings.
      args: its arguments. Those that are neither arrays, numbers nor modules stay as they are.

    Attributes:
      name: the name of the function.
      args: the arguments of the program: pytrees of arrays and numbers.
      traced: the trace, `jax.stages.Traced`: the program before XLA has changed it.
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
                # JAX may have cached that trace, without the scopes. A new function has them, but not the settings.
                renewed = jax.jit(lambda *args: cast(Any, fun).__wrapped__(*args), static_argnums=static)
                again: Any = call_users(renewed.trace, *args)
                self.traced = again if found else self.traced
            else:
                # Ints and bools of a jitted function may be static, so they stay as they are.
                kinds = (np.ndarray, np.generic, *((float, complex) if jitted else (bool, int, float, complex)))
                parts = split_tree((*with_paths(fun, owner, args), {}))
                parts = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, kinds) else x, parts)
                self.args = (Opaque.of(parts),)
                self.traced = call_users(jax.jit(_of_arrays(function)).trace, *self.args)
        self._lowered: Any = self.traced.lower()

    def compile(self, options: dict[str, str] | None = None) -> Compiled:
        """Return the program, compiled."""
        with names_in_cache_key():
            return Compiled(self._lowered.compile(compiler_options=options), self.args, self.traced.jaxpr)

    @cached_property
    def compiled(self) -> Compiled:
        """Return the program as it would be run."""
        return self.compile()

    @cached_property
    def separated(self) -> Compiled:
        """Return the program with products and small loops as instructions of their own, where XLA can do so."""
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
      text: the program, as XLA writes it.
      program: the text, parsed.
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
        """Divide an instruction among the operations that it represents."""
        return shares(self.program, instruction, self._unnamed)

    def calls(self, number: int) -> list[Callable[[], Any]]:
        """Return so many calls of the program, each of which can be made once."""
        # A donated buffer is gone after a call, so each call needs copies, made before anything is timed.
        each = [jax.tree.map(jnp.copy, self._args) if self._donates else self._args for _ in range(number)]
        jax.block_until_ready(each)
        return [partial(self._executable, *args) for args in each]


def _dynamic(fun: Callable[..., Any], args: Sequence[Any], traced: Any) -> list[int]:
    """Return the positions of the arguments of a jitted function that are not static.

    JAX does not tell which are static, but gives the names and structures of the arguments of the program, in order.
    """
    names = iter(traced.jaxpr.jaxpr.debug_info.arg_names)
    left: list[Any] = [(jax.tree.structure(x), [next(names) for _ in jax.tree.leaves(x)]) for x in traced.args_info[0]]
    found = []
    for i, argument in enumerate(args):
        # An argument without leaves has no names, but those of one structure are alike: whichever is passed will do.
        name = argument_name(fun, args, i)
        begins = left and all(x.removeprefix(name)[:1] in ("", ".", "[") for x in left[0][1])
        if begins and left[0][0] == jax.tree.structure(argument):
            found.append(i)
            left.pop(0)
    # Where some do not match, as without a signature, all are taken for dynamic, and JAX raises an error when it runs.
    return list(range(len(args))) if left else found


@contextmanager
def names_in_cache_key() -> Iterator[None]:
    """Keep JAX's persistent cache from returning the same program with the scopes and lines of another function."""
    setting = "jax_compilation_cache_include_metadata_in_key"
    with _LOCK:  # all threads see the setting
        before = getattr(jax.config, setting)
        jax.config.update(setting, True)
        try:
            yield
        finally:
            jax.config.update(setting, before)


def _of_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as one of arrays alone, to its arrays and those that it changes of modules."""

    def call(arguments: Opaque) -> list[jax.Array]:
        parts = arguments.value
        out, models = call_with_models(function, parts)
        changed = zip(map(split, models), changes(function, parts, models), strict=True)
        kept = [x for after, paths in changed for path, x in after.arrays().items() if path in paths]
        return [*Opaque.of(split_tree(out)).arrays, *kept]

    return call
