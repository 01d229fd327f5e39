"""A call as a program of its own, in which the parts of NNX modules are scopes: traced, compiled, and run again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from .._arguments import argument_name, check_callable
from .._call import arrays_apart
from .._changes import call_with_models, changes
from .._model import models_of, owner_of, refuse_shared_state, split, to_parts
from ._hlo import Program
from ._scopes import module_scopes, modules_of
from ._shares import is_mixed

# XLA's CPU backend hands parts of a program, or all of it, to a library as one instruction whose parts cannot be timed.
# With these each matrix product and convolution is handed over alone.
_APART = {
    "xla_cpu_experimental_ynn_fusion_type": ",".join(
        f"LIBRARY_FUSION_TYPE_INDIVIDUAL_{kind}" for kind in ("DOT", "CONVOLUTION")
    )
}


class Prepared:
    """`fun(*args)` as a program.

    Modules are not changed by it: what `fun` changes of them is a result of the program, so that it is computed.

    Args:
      api: what to call the tool in an error.
      fun: a function, a bound method or a module; one that is jitted keeps its settings.
      args: its arguments. What is neither array, number nor module stays as it is.

    Attributes:
      name: what to call the function.
      traced: what JAX made of it, before XLA has changed it.
    """

    def __init__(self, api: str, fun: Callable[..., Any], args: tuple[Any, ...]) -> None:
        check_callable(api, fun)
        self.name: str = getattr(fun, "__name__", type(fun).__name__)
        owner, function = owner_of(fun)
        refuse_shared_state(api, fun, owner, args, {})
        # Taken apart while they are named: so are then the copies that are put together from the parts.
        with module_scopes(modules_of(fun, owner, args)):
            if isinstance(fun, type(jax.jit(len))) and not models_of(args):
                self._args, jitted = args, cast(Any, fun)
            else:
                arrays, join = arrays_apart(jax.tree.map(_as_array, to_parts((owner, args, {}))))
                self._args, jitted = (arrays,), jax.jit(_of_arrays(function, join, self.name))
            self.traced: Any = jitted.trace(*self._args)
        if jitted is fun:
            self._args = self._without_static(fun, args)
        self._lowered: Any = self.traced.lower()

    def _without_static(self, fun: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments that are left in the program: a static one is not among the names of its inputs."""
        named = {re.split(r"[.\[]", name or "", maxsplit=1)[0] for name in self.traced.jaxpr.jaxpr.debug_info.arg_names}
        names = (argument_name(fun, args, i).partition("[")[0] for i in range(len(args)))
        return tuple(x for x, name in zip(args, names, strict=True) if name in named or not jax.tree.leaves(x))

    def compile(self, options: dict[str, str] | None = None) -> Compiled:
        """The program, compiled."""
        with _names_in_cache_key():
            return Compiled(self._lowered.compile(compiler_options=options), self._args)

    def arrays(self) -> list[Any]:
        """The arguments of the program."""
        return jax.tree.leaves(self._args)

    @cached_property
    def compiled(self) -> Compiled:
        """The program as it would be run."""
        return self.compile()

    @cached_property
    def apart(self) -> Compiled:
        """The program with its products as instructions of their own, where XLA can keep them so."""
        program = self.compiled.program
        if not any(is_mixed(program, x) for x in program.instructions.values()):
            return self.compiled
        try:
            return self.compile(_APART)
        except jax.errors.JaxRuntimeError:  # another version of XLA, without these options
            return self.compiled


class Compiled:
    """A compiled program and its arguments.

    Attributes:
      text: it, as XLA writes it.
      program: the text, read.
      module: what the trace of a run calls it.
    """

    def __init__(self, executable: Any, args: tuple[Any, ...]) -> None:
        self.text: str = executable.as_text()
        self.program = Program(self.text)
        self.module = re.split(r"[\s,]", self.text.split("HloModule ", 1)[1], maxsplit=1)[0]
        self._executable, self._args = executable, args
        donated = (
            info.donated for info in jax.tree.leaves(executable.args_info, is_leaf=lambda x: hasattr(x, "donated"))
        )
        self._donates = any(donated)

    def calls(self, number: int) -> list[Callable[[], Any]]:
        """So many calls of it, each of which can be made once."""
        each = [jax.tree.map(jnp.copy, self._args) if self._donates else self._args for _ in range(number)]
        jax.block_until_ready(each)
        return [partial(self._executable, *args) for args in each]


@contextmanager
def _names_in_cache_key() -> Iterator[None]:
    """Let the persistent cache, where there is one, not give back a program with the scopes and lines of another."""
    setting = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, setting)
    jax.config.update(setting, True)
    try:
        yield
    finally:
        jax.config.update(setting, before)


def _of_arrays(function: Callable[..., Any], join: Callable[[list[Any]], Any], name: str) -> Callable[..., Any]:
    def call(arrays: list[jax.Array]) -> list[jax.Array]:
        parts = join(arrays)
        out, models = call_with_models(function, parts)
        changed = zip(map(split, models), changes(function, parts, models), strict=True)
        kept = [x for after, paths in changed for path, x in after.arrays().items() if path in paths]
        return [*arrays_apart(to_parts(out))[0], *kept]

    call.__name__ = name
    return call


def _as_array(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, (np.ndarray, np.generic, bool, int, float, complex)) else x
