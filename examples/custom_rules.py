"""Custom rules for `vmap`, `jvp` and `vjp`, for operators whose automatic rule is slow or missing.

    python examples/custom_rules.py --slices 10 --batch 16

There are three operators:

- A convolution whose filters differ between the mapped slices. `vmap` turns it into a grouped convolution,
  which is slow on a CPU; `custom_vmap` replaces it with matrix products.
- Kepler's equation, solved by a loop that reverse mode cannot differentiate; `custom_jvp` gives the derivative of the
  equation instead.
- A fixed point after many iterations. Reverse mode would store all of them; `custom_vjp` stores only the last.

Each is compared with the slow method, checked by `check_grads`, and timed. At the end, `check_grads` finds wrong rules.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.test_util import check_grads
from rich.console import Console
from rich.table import Table

from plurax.transforms import grad, vmap

console = Console(width=100, highlight=False)


def show(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
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


def refusal(call: Callable[[], Any]) -> str:
    """Return the first sentence of the error of a call that must fail."""
    try:
        call()
    except Exception as error:  # of any type, since the tables show the type
        return f"{type(error).__name__}: {str(error).split('. ')[0].split(chr(10))[0]}"
    raise AssertionError("no error was raised")


def deviation(found: Any, expected: Any) -> float:
    """Return the largest difference between two trees of arrays, relative to the largest number in each array."""
    differences = jax.tree.map(lambda f, e: float(jnp.abs(f - e).max() / jnp.abs(e).max()), found, expected)
    return max(jax.tree.leaves(differences))


# 1. custom_vmap: a convolution whose filters differ between slices


def native(w: jax.Array, x: jax.Array) -> jax.Array:
    """Convolve `x` (batch, height, width, channels) with `w` (rows, columns, channels, features), without padding."""
    return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def by_patches(w: jax.Array, x: jax.Array) -> jax.Array:
    """Compute the same as one matrix product: the patches under the filter, concatenated, times the filter."""
    rows, columns, _, features = w.shape
    height, width = x.shape[1] - rows + 1, x.shape[2] - columns + 1
    patches = [x[:, i : i + height, j : j + width] for i in range(rows) for j in range(columns)]
    return jnp.concatenate(patches, -1) @ w.reshape(-1, features)


@custom_vmap
def batched(w: jax.Array, x: jax.Array) -> jax.Array:
    return native(w, x)


# Where the mapped axis can be merged into the images or the features, the rule calls `batched` again, so that an outer
# `vmap` uses the rule too.
@batched.def_vmap
def _(axis_size: int, is_mapped: list[bool], w: jax.Array, x: jax.Array) -> tuple[jax.Array, bool]:
    filters_mapped, images_mapped = is_mapped
    if filters_mapped and images_mapped:
        return lax.map(lambda wx: by_patches(*wx), (w, x)), True
    if images_mapped:
        out = batched(w, x.reshape(axis_size * x.shape[1], *x.shape[2:]))
        return out.reshape(axis_size, x.shape[1], *out.shape[1:]), True
    out = batched(jnp.moveaxis(w, 0, -2).reshape(*w.shape[1:-1], axis_size * w.shape[-1]), x)
    return jnp.moveaxis(out.reshape(*out.shape[:-1], axis_size, w.shape[-1]), -2, 0), True


@jax.custom_jvp
def convolve(w: jax.Array, x: jax.Array) -> jax.Array:
    """Wrap `batched` in a `custom_jvp` rule for all modes, since `custom_vmap` does not support reverse mode."""
    return batched(w, x)


@convolve.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return convolve(*primals), jax.jvp(by_patches, primals, tangents)[1]  # calls `convolve` for second derivatives


def squares(fun: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda w, x: jnp.sum(fun(w, x) ** 2)


def agrees_with_a_loop(w: jax.Array, x: jax.Array) -> dict[str, float]:
    """Compare values and gradients with a loop over the slices, for all combinations of mapped arguments."""
    slices, found = len(w), {}
    one = {"values": jax.jit(native), "gradients": jax.jit(grad(squares(native), (0, 1)))}
    rule = {"values": convolve, "gradients": grad(squares(convolve), (0, 1))}
    for name, axes, options in (
        ("both mapped", (0, 0), {}),
        ("in chunks", (0, 0), {"chunk_size": max(1, slices // 3)}),
        ("filters shared", (None, 0), {}),
        ("images shared", (0, None), {}),
    ):
        args = [arg if axis == 0 else arg[0] for arg, axis in zip((w, x), axes, strict=True)]
        for what, fun in rule.items():
            each = [one[what](w[i if axes[0] == 0 else 0], x[i if axes[1] == 0 else 0]) for i in range(slices)]
            expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
            found[f"{name}, {what}"] = deviation(jax.jit(vmap(fun, axes, **options))(*args), expected)
    pairs = jnp.stack([jnp.stack([native(w[j], x[i]) for j in range(slices)]) for i in range(2)])
    nested = vmap(vmap(convolve, (0, None)), (None, 0))
    found["nested, values"] = deviation(jax.jit(nested)(w, x[:2]), pairs)
    return found


def a_rule_for_vmap(slices: int, batch: int, rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(slices, 5, 5, 6, 16)) / 12, jnp.float32)
    x = jnp.asarray(rng.normal(size=(slices, batch, 14, 14, 6)), jnp.float32)
    differences = agrees_with_a_loop(w[:4, :3, :2], x[:4, :2, :7])
    assert max(differences.values()) < 1e-5, differences
    small = w[0, :2, :2, :2, :3], x[0, :2, :4, :3, :2]
    check_grads(jax.jit(convolve), small, order=2, modes=("fwd", "rev"), rtol=2e-2, atol=2e-2)

    kinds = {
        "values": lambda fun: vmap(fun),
        "vmap(grad)": lambda fun: vmap(grad(squares(fun), (0, 1))),
        "grad(vmap)": lambda fun: grad(squares(vmap(fun)), (0, 1)),
    }
    spent = {}
    for what, kind in kinds.items():
        one = jax.jit(native if what == "values" else grad(squares(native), (0, 1)))
        calls = {
            "vmap": functools.partial(jax.jit(kind(native)), w, x),
            "a loop over the slices": lambda one=one: [one(w[i], x[i]) for i in range(slices)],
            "vmap, with the rule": functools.partial(jax.jit(kind(convolve)), w, x),
        }
        spent[what] = median_times(calls, rounds)
    show(
        f"1. custom_vmap: LeNet's second convolution, {slices} sets of filters, {batch} images for each; ms",
        ("", *spent),
        ((name, *(f"{spent[what][name]:.1f}" for what in spent)) for name in spent["values"]),
    )
    gain = {what: times["vmap"] / times["vmap, with the rule"] for what, times in spent.items()}
    error = refusal(lambda: grad(squares(batched))(w[0], x[0]))
    console.print("Speedup by the rule: " + ", ".join(f"{what} {value:.1f} times" for what, value in gain.items()))
    console.print(f"Largest relative difference from a loop: {max(differences.values()):.0e}. Cases compared:")
    console.print("; ".join(differences))
    console.print(f"Gradient without custom_jvp: {error}")
    return {"ms": spent, "gain": gain, "deviation": differences, "refused": error}


# 2. custom_jvp: Kepler's equation


def newton(mean: jax.Array, e: jax.Array) -> Callable[[jax.Array], jax.Array]:
    return lambda E: E - (E - e * jnp.sin(E) - mean) / (1 - e * jnp.cos(E))


def kepler_by_loop(mean: jax.Array, e: jax.Array) -> jax.Array:
    """Solve Kepler's equation, E − e sin E = mean, for an eccentricity 0 ≤ e < 1 and a mean anomaly from 0 to π."""
    update, start = newton(mean, e), jnp.minimum(mean + e, jnp.pi)
    # The function is convex from 0 to π and the start is above the solution, so Newton's method decreases E
    # monotonically until rounding stops it.
    return lax.while_loop(lambda c: c[1] < c[0], lambda c: (c[1], update(c[1])), (start, update(start)))[1]


def kepler_unrolled(mean: jax.Array, e: jax.Array) -> jax.Array:
    """Solve it with a fixed number of iterations, always enough, which reverse mode can differentiate."""
    return lax.fori_loop(0, 20, lambda _, E: newton(mean, e)(E), jnp.minimum(mean + e, jnp.pi))


@jax.custom_jvp
def kepler(mean: jax.Array, e: jax.Array) -> jax.Array:
    """Solve it with the loop, and differentiate the equation: (1 − e cos E) dE = dmean + sin E de."""
    return kepler_by_loop(mean, e)


@kepler.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    (mean, e), (dmean, de) = primals, tangents
    E = kepler(mean, e)
    return E, (dmean + jnp.sin(E) * de) / (1 - e * jnp.cos(E))


def a_rule_for_jvp(planets: int, rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    mean, e = (jnp.asarray(rng.uniform(0, high, planets), jnp.float32) for high in (np.pi, 0.9))
    with jax.enable_x64(True):
        check_grads(jax.jit(kepler), (1.1, 0.6), order=2, modes=("fwd", "rev"))
        E = kepler(1.1, 0.6)
        residual = float(jnp.abs(E - 0.6 * jnp.sin(E) - 1.1))
    error = refusal(lambda: grad(kepler_by_loop)(1.1, 0.6))
    ways = {"20 iterations, differentiated": kepler_unrolled, "while_loop with the rule": kepler}
    gradients = {name: jax.jit(vmap(grad(fun, (0, 1)))) for name, fun in ways.items()}
    difference = deviation(*(fun(mean, e) for fun in gradients.values()))
    times = median_times({name: functools.partial(fun, mean, e) for name, fun in gradients.items()}, rounds)
    show(
        f"2. custom_jvp: the gradients of {planets} solutions of Kepler's equation",
        ("", "ms"),
        ((name, f"{value:.2f}") for name, value in times.items()),
    )
    console.print(f"while_loop without the rule: {error}")
    return {"ms": times, "residual": residual, "deviation": difference, "refused": error}


# 3. custom_vjp: a fixed point, and two gradients that deliberately differ from the derivative

ITERATIONS = 60


def fixed_point_by_loop(w: jax.Array, x: jax.Array) -> jax.Array:
    """Return the fixed point of z = tanh(w z + x), for `w` with a spectral norm below 1."""
    return lax.fori_loop(0, ITERATIONS, lambda _, z: jnp.tanh(w @ z + x), x)


@jax.custom_vjp
def fixed_point(w: jax.Array, x: jax.Array) -> jax.Array:
    return fixed_point_by_loop(w, x)


def _forward(w: jax.Array, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    z = fixed_point_by_loop(w, x)
    return z, (w, x, z)


def _backward(saved: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """From z = f(w, x, z) follows dz = f_w dw + f_x dx + f_z dz, so the cotangent of f is u = cotangent + f_zᵀ u."""
    w, x, z = saved
    _, pull = jax.vjp(lambda w, x, z: jnp.tanh(w @ z + x), w, x, z)
    u = lax.fori_loop(0, ITERATIONS, lambda _, u: cotangent + pull(u)[2], cotangent)
    return pull(u)[:2]


fixed_point.defvjp(_forward, _backward)


@jax.custom_vjp
def rounded(x: jax.Array) -> jax.Array:
    """Round to integers, with the gradient of the identity: the straight-through estimator."""
    return jnp.round(x)


rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, cotangent: (cotangent,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def clipped(x: jax.Array, most: float) -> jax.Array:  # noqa: ARG001 (the backward pass takes it)
    """Return `x`, and clip the gradient in the backward pass."""
    return x


clipped.defvjp(lambda x, _: (x, None), lambda most, _, cotangent: (jnp.clip(cotangent, -most, most),))


def a_rule_for_vjp(size: int, rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    w, x = rng.normal(size=(size, size)), rng.normal(size=size)
    w *= 0.6 / np.linalg.norm(w, 2)
    with jax.enable_x64(True):
        check_grads(fixed_point, (w, x), order=1, modes=("rev",))
        ways = {"iterations, differentiated": fixed_point_by_loop, "with the rule": fixed_point}
        gradients = {n: jax.jit(grad(lambda w, x, f=fun: f(w, x).sum(), (0, 1))) for n, fun in ways.items()}
        programs = {n: fun.lower(w, x).compile() for n, fun in gradients.items()}
        given = jnp.asarray(w), jnp.asarray(x)
        difference = deviation(*(program(*given) for program in programs.values()))
        times = median_times({n: functools.partial(program, *given) for n, program in programs.items()}, rounds)
    kept = {name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()}
    show(
        f"3. custom_vjp: the gradient of a fixed point of {size} numbers, {ITERATIONS} iterations",
        ("", "temporaries, KiB", "ms"),
        ((name, f"{kept[name] / 1024:.0f}", f"{times[name]:.2f}") for name in ways),
    )
    slopes = {
        "of round(x)² at 2.4": float(grad(lambda x: jnp.round(x) ** 2)(2.4)),
        "straight-through": float(grad(lambda x: rounded(x) ** 2)(2.4)),
        "of x³ at 2": float(grad(lambda x: x**3)(2.0)),
        "clipped at 5": float(grad(lambda x: clipped(x, 5.0) ** 3)(2.0)),
    }
    console.print("Gradients: " + ", ".join(f"{name}: {value:.1f}" for name, value in slopes.items()))
    return {"ms": times, "bytes": kept, "deviation": difference, "slopes": slopes}


# 4. check_grads finds wrong rules


def wrong_rules() -> dict[str, str]:
    wrong = jax.custom_jvp(kepler_by_loop)
    wrong.defjvp(lambda p, t: (kepler(*p), (t[0] - jnp.sin(kepler(*p)) * t[1]) / (1 - p[1] * jnp.cos(kepler(*p)))))
    forgetful = jax.custom_vjp(fixed_point_by_loop)
    forgetful.defvjp(_forward, lambda saved, g: jax.vjp(lambda w, x: jnp.tanh(w @ saved[2] + x), *saved[:2])[1](g))
    w, x = np.array([[0.3, 0.2], [-0.1, 0.4]]), np.array([0.5, -0.2])
    cases = {
        "Kepler's equation, wrong sign": (wrong, (1.1, 0.6)),
        "fixed point, without the sum over the iterations": (forgetful, (w, x)),
        "straight-through (wrong by design)": (rounded, (2.4,)),
    }
    found = {}
    with jax.enable_x64(True):
        for name, (fun, args) in cases.items():
            message = refusal(functools.partial(check_grads, fun, args, order=1, modes=("rev",)))
            found[name] = message.split(":")[0]
    show("4. Wrong rules under check_grads", ("", "raises"), found.items())
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slices", type=int, default=10, help="slices, each with its own filters (default 10)")
    parser.add_argument("--batch", type=int, default=16, help="images in each slice (default 16)")
    parser.add_argument("--planets", type=int, default=10_000, help="solutions of Kepler's equation (default 10000)")
    parser.add_argument("--size", type=int, default=128, help="dimension of the fixed point (default 128)")
    parser.add_argument("--rounds", type=int, default=5, help="timed calls, of which the median is taken (default 5)")
    options = parser.parse_args(arguments)
    for name, least in (("slices", 2), ("batch", 1), ("planets", 1), ("size", 1), ("rounds", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}, but got {getattr(options, name)}")
    return {
        "vmap": a_rule_for_vmap(options.slices, options.batch, options.rounds),
        "jvp": a_rule_for_jvp(options.planets, options.rounds),
        "vjp": a_rule_for_vjp(options.size, options.rounds),
        "wrong": wrong_rules(),
    }


if __name__ == "__main__":
    main()
