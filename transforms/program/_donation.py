"""`assert_donated`: a check that donated memory is reused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import jax

from .._core.arguments import describe
from .._core.compat import Jitted
from ._ir.hlo import HloProgram
from ._ir.traced_program import names_in_cache_key

# In the first line of a program, as `input_output_alias={ {0}: (3, {}, may-alias) }`: output 0 reuses parameter 3.
_ALIASED = re.compile(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}")


def assert_donated(fun: Callable[..., Any], *args: Any) -> None:
    """Raise unless the memory of each donated argument of `fun` is reused for a result.

    If a donated buffer is not reused, JAX only warns, once, and the program needs the memory twice.

    Args:
      fun: a function under `jax.jit` with `donate_argnums` or `donate_argnames`.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`s. Nothing is run and nothing is donated.

    Raises:
      AssertionError: a donated array is not reused: no result has its shape and dtype, or every such result reuses
        another argument, or `fun` does not use it. The message names the array.
      TypeError: `fun` is not under `jax.jit`.
      ValueError: `fun` donates no argument.

    Cost:
      Compiling `fun`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from plurax.transforms.program import assert_donated
      >>> step = jax.jit(lambda state, x: state + x.sum(), donate_argnums=0)
      >>> assert_donated(step, jnp.zeros(3), jnp.ones(5))
    """
    jitted: Any = fun
    remedy = "pass jax.jit(fun, donate_argnums=...)"
    if not isinstance(fun, Jitted):
        raise TypeError(f"assert_donated: fun must be a function under jax.jit, but got {describe(fun)}; {remedy}.")
    # Argument names in the program are metadata: an entry of the persistent cache may have those of another program.
    with warnings.catch_warnings(), names_in_cache_key():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        traced = jitted.trace(*args)
        compiled = traced.lower().compile()
    given = jax.tree.leaves(compiled.args_info)
    names = [x or f"array {i}" for i, x in enumerate(traced.jaxpr.jaxpr.debug_info.arg_names)]
    donated = {name: info for name, info in zip(names, given, strict=True) if info.donated}
    if not donated:
        raise ValueError(f"assert_donated: fun donates nothing; name the arguments to donate: {remedy}.")
    text = compiled.as_text()
    program = HloProgram(text)
    inputs = [x for x in program.computations[program.entry] if x.opcode == "parameter"]
    # Arguments that `fun` does not use are not parameters of the program, so match by names and not by numbers.
    reused = {int(number) for number in _ALIASED.findall(text.split("\n", 1)[0])}
    is_reused = {x.op_name: i in reused for i, x in enumerate(inputs)}
    wasted = []
    for name, info in donated.items():
        if not is_reused.get(name):
            why = (
                "no result has its shape and dtype, or one that has is taken" if name in is_reused else "it is not used"
            )
            wasted.append(f"`{name}`, an array of shape {info.shape} and dtype {info.dtype} ({why})")
    if wasted:
        which = ", ".join(wasted)
        raise AssertionError(f"assert_donated: fun does not reuse {which}; return such arrays, or donate less.")
