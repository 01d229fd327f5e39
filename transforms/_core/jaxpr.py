"""An interpreter for jaxprs, with the evaluation of each operation passed in, and sets of primitives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from .compat import Jaxpr, JaxprEqn, Literal, at_source, expanded, fragile_parameters

# The name of `jax.checkpoint` in a program, by version.
REMAT = frozenset({"checkpoint", "remat2"})
# Operations that only call a program, and the parameter that holds it. Those in `CUSTOM` have derivatives of their own.
# Which of them JAX uses, and for what, depends on its version.
CUSTOM = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "call_hi_primitive": "_prim"}
PLAIN = {"jit": "jaxpr", "closed_call": "call_jaxpr", "eval_jaxpr": "call_jaxpr", "xla_metadata_call": "jaxpr"}
CALLS = {**PLAIN, **CUSTOM, **dict.fromkeys(REMAT, "jaxpr")}

# Operations whose results equal their first operands, possibly on other devices or in another layout.
IDENTITIES = frozenset(
    """
    copy copy_p device_put dce_sink layout_constraint mesh_cast name optimization_barrier pcast pin pvary preduced
    reduced_vary_cast reduced_vary_cast_p relayout reshard sharding_constraint tie unpin vary_unreduced_cast
    vary_unreduced_cast_p with_memory_space_constraint xla_metadata_value
    """.split()  # noqa: SIM905 (words read better)
)

# Operations whose result at each position depends only on the operands at that position.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex conj convert_element_type
    copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le
    lgamma log log1p log2 logistic lt max min mul ne neg nextafter not one_minus_square or polynomial population_count
    pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin
    sinh sqrt square stop_gradient sub tan tanh xor
    """.split()  # noqa: SIM905 (words read better)
)


def interpret(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    visit: Callable[[JaxprEqn, list[Any]], Sequence[Any]],
    constant: Callable[[Any], Any] = lambda value: value,
) -> list[Any]:
    """Interpret a program, operation by operation.

    Args:
      jaxpr: the program.
      consts: the values of its constants.
      args: the interpreter's value for each argument of the program: anything, such as an array, or a pair of an array
        and its Taylor coefficients.
      visit: a function from an operation and the values of its operands to the values of its results.
      constant: a function from a constant or a literal to its value.

    Returns:
      The value of each output of the program.
    """
    known = dict(zip(jaxpr.constvars, map(constant, consts), strict=True))
    known |= zip(jaxpr.invars, args, strict=True)

    def read(x: Any) -> Any:
        return constant(x.val) if isinstance(x, Literal) else known[x]

    for eqn in jaxpr.eqns:
        with fragile_parameters(eqn):
            known |= zip(eqn.outvars, visit(eqn, [read(x) for x in eqn.invars]), strict=True)
    return [read(x) for x in jaxpr.outvars]


def evaluate(eqn: JaxprEqn, *values: Any) -> list[Any]:
    """Return the results of one operation on arrays, recorded with the operation's named scopes and source line."""
    with at_source(eqn):
        # Some primitives, such as `custom_jvp_call`, are bound with functions where the jaxpr holds programs.
        out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def called(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]]:
    """Return the program that an operation in `CALLS` calls, and the program's constants."""
    name = eqn.primitive.name
    body = expanded(eqn) if name == "call_hi_primitive" else eqn.params[CALLS[name]]
    return getattr(body, "jaxpr", body), getattr(body, "consts", ())  # `checkpoint` holds a `Jaxpr`, not a closed one


def bodies(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the programs inside an operation, such as the body of a loop or the branches of a `cond`."""
    if eqn.primitive.name == "call_hi_primitive":
        return [called(eqn)[0]]
    found = (getattr(x, "jaxpr", x) for x in jax.tree.leaves(list(eqn.params.values())))
    return [x for x in found if isinstance(x, Jaxpr)]


def with_inner(eqns: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Yield operations, each followed by the operations in its bodies, at any depth."""
    for eqn in eqns:
        yield eqn
        for body in bodies(eqn):
            yield from with_inner(body.eqns)


def holds_refs(eqn: JaxprEqn) -> bool:
    """Return whether an operation takes or returns a `jax.Ref`."""
    return any(isinstance(aval(x), jax.ref.AbstractRef) for x in (*eqn.invars, *eqn.outvars))


def aval(variable: Any) -> Any:
    """Return the shape and dtype of a variable or literal of a program."""
    return variable.aval
