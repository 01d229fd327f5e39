"""MindSpore's techniques for static graphs, and their equivalents in JAX.

    python examples/static_graph_tour.py --steps 100 --rounds 50

The sections follow MindSpore's tutorial "Advanced programming techniques with static graphs", with its sizes and
numbers. Each describes the technique in MindSpore and in JAX, and prints a table of results in JAX. Results are checked
before they are printed; compilation and execution are timed separately.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

from plurax.transforms import grad, vmap
from plurax.transforms.program import assert_donated, depend

console = Console(width=100, highlight=False)


def section(title: str, mindspore: str, jax_way: str) -> None:
    console.print(f"\n{title}", style="bold")
    console.print(f"MindSpore: {mindspore}\nJAX: {jax_way}")


def show(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    table = Table(*head)
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)


def median_times(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median time of each call in µs; the calls alternate, and the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def compiled(ways: dict[str, tuple[Any, ...]], rounds: int) -> dict[str, Any]:
    """Return the results, instructions, ms to trace and compile, and µs to run of each function with its arguments."""
    programs, compile_ms = {}, {}
    for name, (fun, *args) in ways.items():
        start = time.perf_counter()
        programs[name] = functools.partial(jax.jit(fun).lower(*args).compile(), *args)
        compile_ms[name] = (time.perf_counter() - start) * 1e3
    return {
        "results": {name: program() for name, program in programs.items()},
        "instructions": {name: program.func.as_text().count(" = ") for name, program in programs.items()},
        "compile_ms": compile_ms,
        "run_us": median_times(programs, rounds),
    }


def show_compiled(title: str, found: dict[str, Any]) -> None:
    rows = zip(*(found[key].items() for key in ("instructions", "compile_ms", "run_us")), strict=True)
    head = title, "instructions", "compile, ms", "run, µs"
    show(head, ((name, count, f"{ms:.0f}", f"{us:.0f}") for (name, count), (_, ms), (_, us) in rows))


# 1. HyperMap and MultitypeFuncGraph


@functools.singledispatch
def add(x: Any, y: Any) -> Any:  # noqa: ARG001 (the rules take it)
    raise TypeError(f"add supports numbers and arrays, not {type(x).__name__}")


@add.register(int)
@add.register(float)
def _(x: float, y: float) -> float:
    return x + y


# In a compiled function an array is a tracer. isinstance treats a tracer as an array, but singledispatch uses the
# class, so tracers are registered explicitly.
@add.register(jax.Array)
@add.register(jax.core.Tracer)
def _(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.add(x, y)


def one_rule_for_each_type(entries: int, rounds: int) -> dict[str, Any]:
    section(
        "1. One rule per type, applied to every entry",
        "MultitypeFuncGraph selects a function by the types of its arguments, and HyperMap applies it to each entry, "
        "which compiles faster than a loop.",
        "functools.singledispatch selects by the type of the first argument, and jax.tree.map applies it to any "
        "pytree. The compiled program is the same as for the loop; only a single array is faster.",
    )
    mixed = {"array": jnp.ones(3), "numbers": [1, (2.5, jnp.zeros(2))]}
    twice = jax.jit(lambda x: jax.tree.map(add, mixed | {"array": x}, mixed | {"array": x}))(mixed["array"])
    jax.tree.map(np.testing.assert_array_equal, twice, jax.tree.map(lambda x: 2 * x, mixed))

    numbers = [jnp.float32(i) for i in range(entries)]
    array = jnp.arange(entries, dtype=jnp.float32)
    found = compiled(
        {
            "a loop": (lambda x, y: [a + b for a, b in zip(x, y, strict=True)], numbers, numbers),
            "jax.tree.map": (lambda x, y: jax.tree.map(add, x, y), numbers, numbers),
            "one array": (add, array, array),
        },
        rounds,
    )
    for result in found["results"].values():
        np.testing.assert_array_equal(jnp.stack(list(result)), 2 * array)
    show_compiled(f"{entries} sums", found)
    return found


# 2. jit_class

TRACED: collections.Counter[str] = collections.Counter()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    """MindSpore's InnerNet as a pytree: `number` is a leaf, `sign` a static part of the structure."""

    number: Any
    sign: int = dataclasses.field(default=1, metadata={"static": True})

    @jax.jit
    def __call__(self, x: Any, y: Any) -> Any:
        """Return the sum, times the number."""
        TRACED["registered"] += 1  # a side effect: runs only when the method is traced
        return self.sign * self.number * (x + y)


class Static:
    """The same with `self` as a static argument, which JAX identifies by its id, so changed attributes go unnoticed."""

    def __init__(self, number: Any) -> None:
        self.number = number

    @functools.partial(jax.jit, static_argnums=0)
    def __call__(self, x: Any, y: Any) -> Any:
        """Return the sum, times the number."""
        TRACED["static self"] += 1
        return self.number * (x + y)


def a_class_of_ones_own() -> dict[str, Any]:
    section(
        "2. A user-defined class in a compiled function",
        "jit_class compiles the attributes and methods of a class into the graph that uses it.",
        "an object registered as a pytree is an ordinary argument, so a changed attribute changes the result. With "
        "static_argnums=0, changes of self are silently ignored.",
    )
    TRACED.clear()
    net, stale = Registered(2), Static(2)
    assert int(net.number + net(2, 3)) == 12  # the result in the tutorial
    rows = [("number = 2", net(2, 3), TRACED["registered"], stale(2, 3), TRACED["static self"])]
    net.number = stale.number = 3
    rows.append(("number = 3", net(2, 3), TRACED["registered"], stale(2, 3), TRACED["static self"]))
    net = dataclasses.replace(net, sign=-1)
    rows.append(("a static field: sign = -1", net(2, 3), TRACED["registered"], "", ""))
    assert [int(row[1]) for row in rows] == [10, 15, -15]
    show(("net(2, 3) with", "registered", "traced", "static self", "traced"), rows)
    return {
        "registered": [int(row[1]) for row in rows],
        "static self": [int(row[3]) for row in rows[:2]],
        "traced": dict(TRACED),
    }


# 3. select instead of if


def by_cond(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.cond((x < y)[0], lambda: x - y, lambda: x + y)


def by_where(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(x < y, x - y, x + y)


def repeated(step: Callable[..., jax.Array], steps: int, loop: bool) -> Callable[..., jax.Array]:
    """Return the loop of the tutorial, which sums all values of x: unrolled by Python, or as a compiled loop."""

    def body(_: int, carry: tuple[jax.Array, jax.Array], y: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = step(carry[0], y)
        return x, carry[1] + x

    def run(x: jax.Array, y: jax.Array) -> jax.Array:
        carry = x, jnp.zeros_like(x)
        if loop:
            return lax.fori_loop(0, steps, lambda i, carry: body(i, carry, y), carry)[1]
        for i in range(steps):
            carry = body(i, carry, y)
        return carry[1]

    return run


def select_or_cond(steps: int, side: int, rounds: int) -> dict[str, Any]:
    section(
        "3. select instead of if, and when cond is better",
        "each if on a tensor is a separate subgraph, so ops.select compiles faster for small branches.",
        "the same holds for jnp.where and lax.cond, and a compiled loop compiles even faster. But where computes "
        "both branches, so cond wins if the branch that is not taken is expensive.",
    )
    args = jnp.array([0]), jnp.array([1])
    found = compiled(
        {
            f"cond, {steps} times": (repeated(by_cond, steps, False), *args),
            f"where, {steps} times": (repeated(by_where, steps, False), *args),
            "cond in a fori_loop": (repeated(by_cond, steps, True), *args),
            "where in a fori_loop": (repeated(by_where, steps, True), *args),
        },
        rounds,
    )
    show_compiled("small branches", found)

    def dear(m: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 20, lambda _, a: jnp.tanh(a @ m), m)

    m, never = jnp.eye(side), jnp.array(False)
    untaken = compiled(
        {
            "cond": (lambda p, m: lax.cond(p, dear, lambda m: m, m), never, m),
            "where": (lambda p, m: jnp.where(p, dear(m), m), never, m),
        },
        rounds,
    )
    for result in untaken["results"].values():
        np.testing.assert_array_equal(result, m)
    show_compiled(f"20 products of {side} by {side}, not taken", untaken)
    console.print(f"where takes {untaken['run_us']['where'] / untaken['run_us']['cond']:.0f} times as long here.")
    return {**found, "untaken": untaken}


def where_twice() -> dict[str, list[float]]:
    section(
        "4. The derivative of a select",
        "ops.select computes both branches; the tutorial does not discuss its derivative.",
        "where computes both branches, forward and backward, and an infinite slope of the branch not taken, times "
        "zero, is nan. A second, inner where keeps invalid values out of the branch.",
    )
    functions = {
        "where": lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0),
        "where twice": lambda x: jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0),
        "cond": lambda x: lax.cond(x > 0, jnp.sqrt, jnp.zeros_like, x),
    }
    slopes = {name: [float(grad(fun)(x)) for x in (0.0, 4.0)] for name, fun in functions.items()}
    show(("slope of sqrt(x) if x > 0 else 0", "at 0", "at 4"), ((name, *found) for name, found in slopes.items()))
    return slopes


# 5. vmap instead of a loop


def hswish(x: jax.Array) -> jax.Array:
    return x * jnp.clip(x + 3, 0, 6) / 6


def map_instead_of_a_loop(rows: int, rounds: int) -> dict[str, Any]:
    section(
        "5. vmap instead of a loop",
        "vmap over 100 rows is 30 times faster than a loop in a compiled function, each timed at its first call.",
        "the same here, mostly because of compilation; after the first call, the loop pays for many small kernels.",
    )
    x = np.asarray(100 * np.random.default_rng(0).normal(size=(rows, 2)), np.float32)

    def loop(x: jax.Array) -> jax.Array:
        return jnp.stack([hswish(row) for row in x])

    ways = {
        "a loop": loop,
        "a loop, compiled": jax.jit(loop),
        "vmap": vmap(hswish),
        "vmap, compiled": jax.jit(vmap(hswish)),
    }
    first_ms, given = {}, jnp.asarray(x)
    for name, fun in ways.items():
        start = time.perf_counter()
        found = jax.block_until_ready(fun(given))
        first_ms[name] = (time.perf_counter() - start) * 1e3
        np.testing.assert_allclose(found, x * np.clip(x + 3, 0, 6) / 6, rtol=1e-6)
    run_us = median_times({name: functools.partial(fun, given) for name, fun in ways.items()}, rounds)
    show(
        (f"hswish of {rows} rows", "first call, ms", "later, µs"),
        ((name, f"{first_ms[name]:.0f}", f"{run_us[name]:.0f}") for name in ways),
    )
    ratios = [times["a loop, compiled"] / times["vmap, compiled"] for times in (first_ms, run_us)]
    console.print(
        f"Compiled, the loop takes {ratios[0]:.0f} times as long as vmap at first, and {ratios[1]:.0f} times later."
    )
    return {"first_ms": first_ms, "run_us": run_us}


# 6. Depend


def one_before_the_other() -> dict[str, Any]:
    section(
        "6. The order of two independent computations",
        "y = Depend(y, a) computes a before anything that uses y.",
        "y, a = depend(y, a) does so if both results are used, since unused results are removed; ordered callbacks "
        "keep side effects in order.",
    )
    programs = {
        "x + 1, the cosine not used": lambda x: (x + 1, jnp.cos(x))[0],
        "depend(x + 1, cos(x))[0]": lambda x: depend(x + 1, jnp.cos(x))[0],
        "depend(x + 1, cos(x))": lambda x: depend(x + 1, jnp.cos(x)),
    }
    kept = {n: "cosine" in jax.jit(fun).lower(jnp.ones(3)).compile().as_text() for n, fun in programs.items()}
    show(("returned", "computes the cosine"), ((name, "yes" if found else "no") for name, found in kept.items()))

    said: list[str] = []

    @jax.jit
    def ordered(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: said.append("before"), ordered=True)
        y = jnp.sin(x)
        jax.debug.callback(lambda: said.append("after"), ordered=True)
        return y

    for _ in range(3):
        ordered(1.0)
    jax.effects_barrier()
    console.print(f"Ordered callbacks of three calls: {', '.join(said)}.")
    return {"kept": kept, "said": said}


# 7. Redundant copies


def no_redundant_copies(size: int) -> dict[str, Any]:
    section(
        "7. Memory without redundant copies",
        "MS_DEV_SIDE_EFFECT_LOAD_ELIM controls how often an assigned parameter is copied; with the fewest copies, "
        "results may be wrong.",
        "arrays are immutable. A donated argument gives its memory to a result, and the values stay the same; "
        "assert_donated checks that the memory is reused.",
    )

    def step(state: jax.Array, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, lambda _, state: state + x, state)

    state, x = jnp.zeros((size, 7)), jnp.ones(7)
    donating = jax.jit(step, donate_argnums=0)
    assert_donated(donating, state, x)
    try:
        assert_donated(jax.jit(lambda state, x: (state + x).sum(), donate_argnums=0), state, x)
    except AssertionError as error:
        refused = str(error)
    found = {}
    for name, fun in {"kept": jax.jit(step), "donated": donating}.items():
        memory = fun.lower(state, x).compile().memory_analysis()
        total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        found[name] = total, memory.alias_size_in_bytes
    show(
        (f"a state of {state.nbytes:,} bytes", "arguments, results, temporaries", "shared", "total"),
        ((name, f"{total:,}", f"{shared:,}", f"{total - shared:,}") for name, (total, shared) in found.items()),
    )
    np.testing.assert_array_equal(donating(state, x), jnp.full((size, 7), 3.0))
    console.print(f"Error for a donation that cannot be used:\n{refused}")
    return {"bytes": found, "refused": refused, "deleted": state.is_deleted()}


# 8. A parameter that is assigned in a loop


def assigned_in_a_loop() -> dict[str, float]:
    section(
        "8. A parameter that is assigned in a loop",
        "assign(weight, i) and out = x * weight + out in three iterations: for the gradient 0 + 1 + 2 = 3 each "
        "weight has to be copied; with only the last one it would be 6.",
        "values that change between iterations are a carry, and reverse mode stores them for each iteration.",
    )

    def body(i: Any, carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, out = carry
        weight = jnp.asarray(i, x.dtype)
        return weight, x * weight + out

    functions = {
        "fori_loop": lambda x: lax.fori_loop(0, 3, lambda i, carry: body(i, carry, x), (x, 0 * x)),
        "scan": lambda x: lax.scan(lambda carry, i: (body(i, carry, x), None), (x, 0 * x), jnp.arange(3))[0],
        "a Python loop": lambda x: functools.reduce(lambda carry, i: body(i, carry, x), range(3), (x, 0 * x)),
    }
    found = {}
    for name, fun in functions.items():
        (_, weight), gradient = jax.jit(jax.value_and_grad(lambda x, fun=fun: fun(x)[::-1], has_aux=True))(1.0)
        found[name] = float(weight), float(gradient)
    show(("carry of", "last weight", "gradient"), ((name, *values) for name, values in found.items()))
    return {name: gradient for name, (_, gradient) in found.items()}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="steps of the loop with a branch (default 100)")
    parser.add_argument("--entries", type=int, default=200, help="entries of the lists to add (default 200)")
    parser.add_argument("--rows", type=int, default=100, help="rows to map over (default 100)")
    parser.add_argument("--side", type=int, default=256, help="side of the matrices in the branch (default 256)")
    parser.add_argument("--rounds", type=int, default=50, help="timed calls, of which the median is taken (default 50)")
    options = parser.parse_args(arguments)
    for name, value in vars(options).items():
        if value < 1:
            parser.error(f"--{name} must be at least 1, but got {value}")
    return {
        "types": one_rule_for_each_type(options.entries, options.rounds),
        "class": a_class_of_ones_own(),
        "select": select_or_cond(options.steps, options.side, options.rounds),
        "where": where_twice(),
        "vmap": map_instead_of_a_loop(options.rows, options.rounds),
        "depend": one_before_the_other(),
        "donation": no_redundant_copies(1024),
        "assignment": assigned_in_a_loop(),
    }


if __name__ == "__main__":
    main()
