"""A call as a program of its own, in which the parts of NNX modules are scopes: traced, compiled, and repeated."""

from __future__ import annotations

import re
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
from .attribution import Attribution, is_mixed, shares
from .hlo import HloProgram, Instruction
from .module_scopes import LOCK, module_paths, modules_of, scoped_calls
from .provenance import Provenance
from .unnamed_dots import unnamed_dots

# XLA's CPU backend passes parts of a program, or all of it, to a library as one instruction. Its parts cannot be timed.
# With these options each matrix product and convolution is handed over alone.
_SEPARATE_PRODUCTS = {
    "xla_cpu_experimental_ynn_fusion_type": ",".join(
        f"LIBRARY_FUSION_TYPE_INDIVIDUAL_{kind}" for kind in ("DOT", "CONVOLUTION")
    )
}
# And it compiles small loops into one function that the trace does not look into.
_SEPARATE_LOOPS = {"xla_disable_hlo_passes": "small-while-loop-hoisting"}
_SMALL_LOOP = "xla_cpu_small_call"


class TracedProgram:
    """`fun(*args)` as a program.

    Modules are not changed by it: the state that `fun` changes is a result of the program, so that it is computed.

    Args:
      api: the name of the tool, for errors.
      fun: a function, a bound method or a module; one that is jitted keeps its settings.
      args: its arguments. Those that are neither arrays, numbers nor modules stay as they are.

    Attributes:
      name: the name of the function.
      traced: the trace, `jax.stages.Traced`: the program before XLA has changed it.
    """

    def __init__(self, api: str, fun: Callable[..., Any], args: tuple[Any, ...]) -> None:
        check_callable(api, fun)
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(split_tree(args))):
            raise TypeError(
                f"{api}: the arguments have no values under jax.jit, jax.grad or jax.vmap; call it outside."
            )
        named: Any = fun
        while isinstance(named, partial):
            named = named.func
        self.name: str = getattr(named, "__name__", type(named).__name__)
        owner, function = bound_model(fun)
        refuse_shared_state(api, fun, owner, args, {})
        modules = modules_of(fun, owner, args)
        # Modules are split while they have their paths, so that the copies merged from the parts have them too.
        with module_paths(modules) as kinds, scoped_calls(kinds):
            jitted = isinstance(fun, Jitted)
            if jitted and not models_of(args):
                self.traced: Any = call_users(cast(Any, fun).trace, *args)
                dynamic = _dynamic(fun, args, self.traced)
                self._args = tuple(args[i] for i in dynamic)
                if modules:
                    # JAX may have cached a trace of it without the scopes; a new function has none.
                    static = tuple(i for i in range(len(args)) if i not in dynamic)
                    self.traced = call_users(jax.jit(_uncached(fun), static_argnums=static).trace, *args)
            else:
                # Ints and bools of a jitted function may be static, so they stay as they are.
                numbers = (float, complex) if jitted else (bool, int, float, complex)
                kinds_of_arrays = (np.ndarray, np.generic, *numbers)
                parts = split_tree((owner, args, {}))
                parts = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, kinds_of_arrays) else x, parts)
                self._args = (Opaque.of(parts),)
                self.traced = call_users(jax.jit(_of_arrays(function, self.name)).trace, *self._args)
            self._lowered: Any = self.traced.lower()

    def compile(self, options: dict[str, str] | None = None) -> Compiled:
        """Return the program, compiled."""
        with LOCK, names_in_cache_key():
            return Compiled(self._lowered.compile(compiler_options=options), self._args, self.traced.jaxpr)

    def arrays(self) -> list[Any]:
        """Return the arguments of the program."""
        return jax.tree.leaves(self._args)

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
        self.module = re.split(r"[\s,]", self.text.split("HloModule ", 1)[1], maxsplit=1)[0]
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

    JAX does not tell which are static, but what the arguments of the program are called and look like. So those of the
    call are matched with those of the program in order, and the ones that are left out are static.
    """
    infos, _ = traced.args_info
    names = iter(traced.jaxpr.jaxpr.debug_info.arg_names)
    firsts = [[str(next(names)) for _ in jax.tree.leaves(info)][:1] for info in infos]

    def fits(i: int, k: int) -> bool:
        """Return whether argument `i` of the call can be argument `k` of the program."""
        name = argument_name(fun, args, i)
        if not all(re.split(r"[.\[]", x, maxsplit=1)[0] == name.partition("[")[0] for x in firsts[k]):
            return False
        leaves, expected = jax.tree.leaves(args[i]), jax.tree.leaves(infos[k])
        structure: Any = jax.tree.structure(args[i])
        return (
            structure == jax.tree.structure(infos[k])
            and all(hasattr(x, "dtype") or isinstance(x, (bool, int, float, complex)) for x in leaves)
            and all(np.shape(x) == info.shape for x, info in zip(leaves, expected, strict=True))
        )

    def match(i: int, k: int) -> list[int] | None:
        """Match the arguments from `i` on with those of the program from `k` on, with backtracking."""
        if k == len(infos):
            return []
        if i == len(args):
            return None
        found = match(i + 1, k + 1) if fits(i, k) else None
        return match(i + 1, k) if found is None else [i, *found]

    # Where nothing matches, all are taken for dynamic, and JAX raises an error about them when the program runs.
    found = match(0, 0)
    return list(range(len(args))) if found is None else found


def _uncached(fun: Any) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return fun.__wrapped__(*args)

    call.__name__ = getattr(fun, "__name__", "call")
    return call


@contextmanager
def names_in_cache_key() -> Iterator[None]:
    """Keep JAX's persistent cache from returning the same program with the scopes and lines of another function."""
    setting = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, setting)
    jax.config.update(setting, True)
    try:
        yield
    finally:
        jax.config.update(setting, before)


def _of_arrays(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return `function` as one of arrays alone, to its arrays and those that it changes of modules."""

    def call(arguments: Opaque) -> list[jax.Array]:
        parts = arguments.value
        out, models = call_with_models(function, parts)
        changed = zip(map(split, models), changes(function, parts, models), strict=True)
        kept = [x for after, paths in changed for path, x in after.arrays().items() if path in paths]
        return [*Opaque.of(split_tree(out)).arrays, *kept]

    call.__name__ = name
    return call
