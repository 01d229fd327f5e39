"""Branches and loops under `vmap`: what is executed if slices take different paths, and the cost.

    python examples/control_flow.py --side 160 --limit 1000 --out demo

A mapped function computes all slices of the mapped axis together. If a predicate differs between slices, both branches
of a `cond` are computed for all of them, and a `while_loop` runs until the last slice has finished. The script shows
this in the StableHLO operations, in counted calls, in measured times, and in `control_flow.png`, which plots the work
of a loop as an area. It also measures two remedies: gathering the slices that need a branch into a bucket, and sorting
the slices before mapping them in chunks.
"""

from __future__ import annotations

import argparse
import collections
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl

mpl.use("Agg")  # draws to a file; needs no window

import matplotlib.pyplot as plt
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

from plurax.transforms import grad, jvp, vmap

console = Console(width=100, highlight=False)


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    table = Table(*head)
    for row in rows:
        table.add_row(*map(str, row))
    console.print(f"\n{title}", style="bold")
    console.print(table)


def median_times(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median time of each call in ms; calls alternate, and the first round, which compiles, is dropped."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def decisions(fun: Callable[..., Any], *args: Any) -> list[str]:
    """Return the control-flow operations that XLA receives: `case` and `while` skip work, `select` does not."""
    text = jax.jit(fun).lower(*args).as_text()
    return sorted(set(re.findall(r"stablehlo\.(case|while|select)\b", text)))


# 1. Branches

CALLS: collections.Counter[str] = collections.Counter()


def counted(name: str) -> Callable[[jax.Array], jax.Array]:
    """Return a branch that counts on the host for how many slices it runs."""

    def tell(x: np.ndarray) -> np.ndarray:
        CALLS[name] += 1
        return np.asarray(x)

    def branch(x: jax.Array) -> jax.Array:
        return jax.pure_callback(tell, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")

    return branch


def double(x: jax.Array) -> jax.Array:
    return 2 * x


def which_branches_run() -> dict[str, Any]:
    taken, x, which = jnp.array([True, False, False, True, False]), jnp.arange(5.0), jnp.array([0, 1, 2, 0, 0])

    def cond(branches: Sequence[Callable[..., Any]]) -> Callable[..., jax.Array]:
        return lambda p, x: lax.cond(p, *branches[:2], x)

    def switch(branches: Sequence[Callable[..., Any]]) -> Callable[..., jax.Array]:
        return lambda i, x: lax.switch(i, branches, x)

    def one_by_one(fun: Callable[..., Any]) -> Callable[..., jax.Array]:
        return lambda p, x: lax.map(lambda px: fun(*px), (p, x))

    cases: dict[str, tuple[Any, Any, tuple[jax.Array, jax.Array]]] = {
        "cond, not mapped": (lambda fun: fun, cond, (taken[0], x[0])),
        "vmap(cond)": (vmap, cond, (taken, x)),
        "vmap(cond), shared predicate": (lambda fun: vmap(fun, in_axes=(None, 0)), cond, (taken[0], x)),
        "vmap(cond, chunk_size=1)": (lambda fun: vmap(fun, chunk_size=1), cond, (taken, x)),
        "lax.map(cond)": (one_by_one, cond, (taken, x)),
        "vmap(switch)": (vmap, switch, (which, x)),
    }
    found = {}
    for name, (mapped, fun, args) in cases.items():
        CALLS.clear()
        jax.block_until_ready(jax.jit(mapped(fun([counted("a"), counted("b"), counted("c")])))(*args))
        found[name] = (decisions(mapped(fun([jnp.sin, jnp.cos, double])), *args), dict(sorted(CALLS.items())))
    show(
        "1. Five slices: two need branch a of the cond, three that of the switch",
        ("", "StableHLO ops", "runs of each branch"),
        [(name, ", ".join(ops), ", ".join(f"{k}: {v}" for k, v in calls.items()))
         for name, (ops, calls) in found.items()],
    )  # fmt: skip
    return found


def dear(x: jax.Array) -> jax.Array:
    """An expensive branch: 20 matrix products."""
    return lax.fori_loop(0, 20, lambda _, y: jnp.tanh(y @ x), x)


@jax.jit
def dear_of(slices: jax.Array, x: jax.Array) -> jax.Array:
    return x.at[slices].set(vmap(dear)(x[slices]))


def in_a_bucket(taken: np.ndarray, x: jax.Array) -> jax.Array:
    """Apply `dear` to the taken slices only, selected outside `jit` and padded to a power of two (few compilations)."""
    slices = np.flatnonzero(taken)
    if not len(slices):
        return x
    return dear_of(np.resize(slices, 1 << (len(slices) - 1).bit_length()), x)  # repeated slices are harmless


def what_a_branch_costs(slices: int, side: int, rounds: int) -> dict[str, list[float]]:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(slices, side, side)) / side, jnp.float32)

    def one(p: jax.Array, x: jax.Array) -> jax.Array:
        return lax.cond(p, dear, lambda x: x, x)

    alone, mapped = jax.jit(one), jax.jit(vmap(one))
    in_sequence = jax.jit(lambda p, x: lax.map(lambda px: one(*px), (p, x)))
    ways = {
        "Python loop over the slices": lambda p: [alone(p[i], x[i]) for i in range(slices)],
        "vmap": lambda p: mapped(p, x),
        "lax.map": lambda p: in_sequence(p, x),
        "vmap over a bucket": lambda p: in_a_bucket(p, x),
    }
    shares = (0, 1 / 16, 1 / 2, 1)
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for share in shares:
        p = np.random.default_rng(1).permutation(slices) < round(share * slices)
        expected = ways["vmap"](p)
        for way in ways.values():
            np.testing.assert_allclose(jnp.stack(list(way(p))), expected, rtol=1e-4, atol=1e-5)
        for name, value in median_times({n: lambda w=w, p=p: w(p) for n, w in ways.items()}, rounds).items():
            spent[name].append(value)
    show(
        f"2. {slices} slices: ms if a branch (20 products of {side} by {side}) is taken by",
        ("", *("none" if not share else "all" if share == 1 else f"1 in {1 / share:.0f}" for share in shares)),
        [(name, *(f"{value:.2f}" for value in values)) for name, values in spent.items()],
    )
    return spent


# 2. Loops


def escape(limit: int) -> Callable[[jax.Array], jax.Array]:
    """Count the iterations of z → z² + c until |z| exceeds 2, at most `limit`: the Mandelbrot set."""

    def counts(c: jax.Array) -> jax.Array:
        def inside(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
            n, z = carry
            return (n < limit) & (z.real**2 + z.imag**2 <= 4)

        return lax.while_loop(inside, lambda carry: (carry[0] + 1, carry[1] ** 2 + c), (0, 0 * c))[0]

    return counts


def grid(side: int) -> jax.Array:
    x, y = np.linspace(-2.1, 0.6, side), np.linspace(-1.35, 1.35, side)
    return jnp.asarray(x + 1j * y[:, None], jnp.complex64)


def computed(counts: np.ndarray, chunk: int) -> int:
    """Count the iterations computed in chunks: every slice of a chunk runs as long as its slowest one."""
    return sum(len(part) * int(part.max()) for part in np.split(counts, range(chunk, len(counts), chunk)))


def what_a_loop_costs(side: int, limit: int, chunk: int, rounds: int) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    c = grid(side).ravel()
    of_one, coarse = escape(limit), 4

    def guess(c: jax.Array) -> jax.Array:
        """Estimate the iterations of all slices from every fourth slice in every fourth row."""
        few = c.reshape(side, side)[::coarse, ::coarse]
        counts = vmap(of_one, chunk_size=chunk)(few.ravel()).reshape(few.shape)
        return jnp.repeat(jnp.repeat(counts, coarse, 0), coarse, 1)[:side, :side].ravel()

    def sorted_first(c: jax.Array) -> jax.Array:
        order = jnp.argsort(guess(c))
        return jnp.zeros(c.shape, int).at[order].set(vmap(of_one, chunk_size=chunk)(c[order]))

    ways = {
        "lax.map": jax.jit(lambda c: lax.map(of_one, c)),
        "vmap": jax.jit(vmap(of_one)),
        f"vmap, chunk_size={chunk}": jax.jit(vmap(of_one, chunk_size=chunk)),
        "sorted by an estimate, chunked": jax.jit(sorted_first),
    }
    counts = np.asarray(ways["lax.map"](c))
    for way in ways.values():
        np.testing.assert_array_equal(way(c), counts)
    order = np.argsort(guess(c))
    work = [int(counts.sum()), computed(counts, len(counts)), computed(counts, chunk), computed(counts[order], chunk)]
    times = median_times({name: lambda way=way: way(c) for name, way in ways.items()}, rounds)
    found = {name: (done, work[0] / done, times[name]) for name, done in zip(ways, work, strict=True)}
    show(
        f"3. A while_loop: {len(c)} slices with 1 to {counts.max()} iterations, {counts.mean():.0f} on average",
        ("", "iterations run", "needed", "ms"),
        [(name, f"{done:,}", f"{share:.0%}", f"{ms:.1f}") for name, (done, share, ms) in found.items()],
    )
    return found, counts, order


def bounds_of_their_own() -> dict[str, Any]:
    x, n = jnp.array([2.0, 2.0, 3.0]), jnp.array([1, 5, 3])

    def power(x: jax.Array, n: Any) -> jax.Array:
        return lax.fori_loop(0, n, lambda _, y: y * x, jnp.ones_like(x))

    def masked(x: jax.Array, n: jax.Array) -> jax.Array:
        """Compute `power` for n up to 5, with a static bound and a mask."""
        return lax.fori_loop(0, 5, lambda i, y: jnp.where(i < n, y * x, y), jnp.ones_like(x))

    cases = {
        "a Python int": (vmap(lambda x: power(x, 3)), (x,)),
        "an array: a bound for each slice": (vmap(power), (x, n)),
        "a shared bound and a mask": (vmap(masked), (x, n)),
    }
    found = {}
    for name, (fun, args) in cases.items():
        try:
            slope = ", ".join(f"{value:.0f}" for value in grad(fun, cotangent=1.0)(*args))
        except ValueError as error:
            slope = "error: " + str(error).split(" for ")[0]
        found[name] = (decisions(fun, *args), [float(value) for value in fun(*args)], slope)
    show(
        "4. A fori_loop that multiplies by x, n times",
        ("n", "StableHLO ops", "values", "derivatives"),
        [(name, ", ".join(names), ", ".join(f"{v:.0f}" for v in values), slope)
         for name, (names, values, slope) in found.items()],
    )  # fmt: skip
    return found


# 3. Derivatives


def in_the_branch_not_taken() -> dict[str, list[float]]:
    x = jnp.array([0.0, 4.0])

    def once(x: jax.Array) -> jax.Array:
        return jnp.where(x > 0, jnp.sqrt(x), 0.0)

    def twice(x: jax.Array) -> jax.Array:
        return jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0)

    def cond(x: jax.Array) -> jax.Array:
        return lax.cond(x > 0, jnp.sqrt, jnp.zeros_like, x)

    def forward(fun: Callable[..., Any]) -> Callable[..., jax.Array]:
        return lambda x: jvp(fun, (x,), (jnp.ones_like(x),))[1]

    found = {
        "vmap(where)": [grad(vmap(once), cotangent=1.0)(x), forward(vmap(once))(x)],
        "vmap(where), where twice": [grad(vmap(twice), cotangent=1.0)(x), forward(vmap(twice))(x)],
        "vmap(cond)": [grad(vmap(cond), cotangent=1.0)(x), forward(vmap(cond))(x)],
    }
    slopes = {name: [float(value) for values in both for value in values] for name, both in found.items()}
    show(
        "5. The derivative of sqrt(x) if x > 0 else 0, at 0 and 4",
        ("", "reverse: at 0", "at 4", "forward: at 0", "at 4"),
        [(name, *values) for name, values in slopes.items()],
    )
    console.print("vmap of a cond also selects the inputs of each branch; a hand-written where does not.")
    return slopes


def draw(path: Path, counts: np.ndarray, order: np.ndarray, chunk: int) -> None:
    """Plot the iterations of each slice as an image, and the work of the loop as areas."""
    side = round(len(counts) ** 0.5)
    figure, (image, *panels) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained", width_ratios=(1, 1.25, 1.25))
    image.imshow(counts.reshape(side, side), norm=mpl.colors.LogNorm(1, counts.max()), cmap="magma", origin="lower")
    image.set(title=f"Iterations of {len(counts):,} slices", xticks=[], yticks=[])
    named = (
        ("Computed and needed iterations", "slice, in row-major order"),
        ("Slices sorted by an estimate", "slice, sorted"),
    )
    for panel, of_slice, (title, label) in zip(panels, (counts, counts[order]), named, strict=True):
        slices = np.arange(len(counts))
        slowest = np.concatenate(
            [np.full(len(part), part.max()) for part in np.split(of_slice, range(chunk, len(counts), chunk))]
        )
        if of_slice is counts:
            panel.fill_between(slices, counts.max(), color="0.9", step="post", label="computed by vmap")
        panel.fill_between(
            slices, slowest, color="tab:orange", step="post", alpha=0.6, label=f"computed in chunks of {chunk}"
        )
        panel.fill_between(slices, of_slice, color="tab:blue", step="post", linewidth=0, label="needed")
        panel.set(xlabel=label, ylabel="iterations", title=title, xlim=(0, len(counts)), ylim=(0, 1.25 * counts.max()))
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(loc="upper left", fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slices", type=int, default=64, help="slices that branch (default 64)")
    parser.add_argument("--width", type=int, default=48, help="side of the matrices in the branch (default 48)")
    parser.add_argument(
        "--side", type=int, default=160, help="the loop has this number squared of slices (default 160)"
    )
    parser.add_argument("--limit", type=int, default=1000, help="maximum iterations of the loop (default 1000)")
    parser.add_argument("--chunk-size", type=int, default=256, help="slices in a chunk (default 256)")
    parser.add_argument("--rounds", type=int, default=9, help="timed calls, of which the median is taken (default 9)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory for the picture")
    options = parser.parse_args(arguments)
    for name in ("slices", "width", "side", "limit", "chunk_size", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, but got {getattr(options, name)}")
    options.out.mkdir(parents=True, exist_ok=True)
    figures = {
        "branches": which_branches_run(),
        "branch ms": what_a_branch_costs(options.slices, options.width, options.rounds),
    }
    figures["loop"], counts, order = what_a_loop_costs(options.side, options.limit, options.chunk_size, options.rounds)
    figures["bounds"] = bounds_of_their_own()
    figures["slopes"] = in_the_branch_not_taken()
    picture = options.out / "control_flow.png"
    draw(picture, counts, order, options.chunk_size)
    console.print(f"Picture: {picture}", markup=False)
    return figures


if __name__ == "__main__":
    main()
