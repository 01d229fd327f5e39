"""A call as a program of its own, with the parts of NNX modules as scopes: lowered, compiled, and run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._arguments import check_callable
from .._call import arrays_apart
from .._changes import call_with_models
from .._model import owner_of, refuse_shared_state, to_parts
from ._hlo import CONTAINERS, Instruction, Program
from ._scopes import module_scopes, modules_of, scope_of

# XLA's CPU backend hands whole networks to a library as one instruction; with these its products stay apart.
_APART = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
}


class Lowered:
    """`fun(*args)` lowered for the arguments that are given.

    The modules are not changed: what `fun` changes of them becomes a result of the program, so that it is computed.

    Args:
      api: what to call the tool in an error.
      fun: a function, a bound method or a module; one that is jitted keeps its settings.
      args: its arguments; what is not an array or a number stays as it is.

    Attributes:
      name: what to call the function.
    """

    def __init__(self, api: str, fun: Callable[..., Any], args: tuple[Any, ...]) -> None:
        check_callable(api, fun)
        self.name = getattr(fun, "__name__", type(fun).__name__)
        owner, function = owner_of(fun)
        refuse_shared_state(api, fun, owner, args, {})
        with module_scopes(modules_of(fun, owner, args)):
            if isinstance(fun, type(jax.jit(len))):
                self._args: tuple[Any, ...] = args
                self._jitted: Any = fun
            else:
                arrays, join = arrays_apart(_numbers_as_arrays(to_parts((owner, args, {}))))
                self._args = (arrays,)
                self._jitted = jax.jit(_named(lambda arrays: _outputs(function, join(arrays)), self.name))
            self._lowered = self._jitted.lower(*self._args)

    def jaxpr(self) -> Any:
        """The program before XLA has changed it."""
        return self._jitted.trace(*self._args).jaxpr
