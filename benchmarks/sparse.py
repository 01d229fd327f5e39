"""Sparse Jacobians and Hessians against dense ones and against asdex and sparsejac alone; Laplacians and traces.

python benchmarks/sparse.py            measures, and rewrites its tables of benchmarks/README.md
python benchmarks/sparse.py --smoke    runs everything small and once, and writes nothing
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import asdex
import jax
import jax.numpy as jnp
import numpy as np
from _measure import interleaved, publish, ratio, table
from scipy import stats

from plurax.transforms import hessian, hessian_trace, hutchinson_trace, jacobian, laplacian

try:
    import sparsejac
except ModuleNotFoundError:
    sparsejac = None
try:
    import folx
except ModuleNotFoundError:
    folx = None

SAMPLES = (4, 16, 64)


class Problem(NamedTuple):
    """A function and where to take its Jacobian, or its Hessian if it is a scalar."""

    name: str
    fun: Callable[[jax.Array], jax.Array]
    x: jax.Array
    scalar: bool = False


def brusselator(y: jax.Array) -> jax.Array:
    """A reaction of two substances that spread along a line."""
    u, v = jnp.split(y, 2)

    def even_out(x: jax.Array) -> jax.Array:
        wide = jnp.pad(x, 1, mode="edge")
        return (wide[2:] - 2 * x + wide[:-2]) * x.size / 50

    return jnp.concatenate([1 + u**2 * v - 4 * u + even_out(u), 3 * u - u**2 * v + even_out(v)])


def heat(y: jax.Array) -> jax.Array:
    """Heat on a square whose conductivity grows with the temperature."""
    side = int(y.size**0.5)
    wide = jnp.pad(y.reshape(side, side), 1)
    flow = [jnp.diff(wide[1:-1] ** 3, axis=1), jnp.diff(wide[:, 1:-1] ** 3, axis=0)]
    return (jnp.diff(flow[0], axis=1) + jnp.diff(flow[1], axis=0)).ravel()


def arrow(x: jax.Array) -> jax.Array:
    """A full row, a full column, and a diagonal."""
    return jnp.concatenate([jnp.sin(x[:1]) * x.sum(), x[1:] ** 2 + x[0] * x[1:]])


def convnet(x: jax.Array) -> jax.Array:
    """Two 3 x 3 convolutions, from an image to an image."""
    side = int(x.size**0.5)
    convolve = partial(
        jax.lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    random = np.random.default_rng(0)
    first, second = (random.normal(size=(3, 3, *channels)).astype(np.float32) for channels in ((1, 8), (8, 1)))
    return convolve(jnp.tanh(convolve(x.reshape(1, side, side, 1), first)), second).ravel()


def rosenbrock(x: jax.Array) -> jax.Array:
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def chained_wood(x: jax.Array) -> jax.Array:
    """Wood's function of four numbers, again and again along the numbers."""
    a, b, c, d = x[:-3:2], x[1:-2:2], x[2:-1:2], x[3::2]
    first = 100 * (a**2 - b) ** 2 + (a - 1) ** 2
    second = 90 * (c**2 - d) ** 2 + (1 - c) ** 2
    return (first + second + 10 * (b + d - 2) ** 2 + 0.1 * (b - d) ** 2).sum()


def chained_powell(x: jax.Array) -> jax.Array:
    """The residuals of Powell's singular function of four numbers, likewise."""
    a, b, c, d = x[:-3:2], x[1:-2:2], x[2:-1:2], x[3::2]
    return jnp.stack([a + 10 * b, 5**0.5 * (c - d), (b - 2 * c) ** 2, 10**0.5 * (a - d) ** 2], 1).ravel()


def problems(smoke: bool) -> list[Problem]:
    line, side, image, few, many = (32, 6, 5, 10, 24) if smoke else (2048, 48, 32, 100, 2000)

    def at(size: int) -> jax.Array:
        return jnp.linspace(0.5, 1.5, size)

    return [
        Problem(f"Brusselator, {line}", brusselator, at(line)),
        Problem(f"heat on a square, {side**2}", heat, at(side**2)),
        Problem(f"arrow, {many}", arrow, at(many)),
        Problem(f"convnet, {image} x {image}", convnet, at(image**2)),
        Problem(f"chained Powell, {many}", chained_powell, at(many)),
        Problem(f"Hessian of Rosenbrock, {few}", rosenbrock, at(few), scalar=True),
        Problem(f"Hessian of Rosenbrock, {many}", rosenbrock, at(many), scalar=True),
        Problem(f"Hessian of chained Wood, {many}", chained_wood, at(many), scalar=True),
    ]


def ours(problem: Problem) -> Any:
    return (hessian if problem.scalar else jacobian)(problem.fun, sparsity="auto")


def plain(problem: Problem) -> Callable[..., Any]:
    return (jax.hessian if problem.scalar else jax.jacfwd)(problem.fun)


def of_asdex(problem: Problem) -> Callable[..., Any]:
    if problem.scalar:
        return asdex.hessian_from_coloring(problem.fun, asdex.hessian_coloring(problem.fun, problem.x))
    return asdex.jacobian_from_coloring(problem.fun, asdex.jacobian_coloring(problem.fun, problem.x))


def of_sparsejac(problem: Problem, pattern: Any) -> Callable[..., Any]:
    """It does not look for the pattern: it is given."""
    return sparsejac.jacfwd(jax.grad(problem.fun) if problem.scalar else problem.fun, pattern)


def prepared(make: Callable[[], Callable[..., Any]], x: jax.Array) -> tuple[Callable[[], Any], float, float]:
    """The compiled function, the seconds before the compiler is called, and those in it."""
    begin = time.perf_counter()
    lowered = jax.jit(make()).lower(x)
    middle = time.perf_counter()
    compiled = lowered.compile()
    return partial(compiled, x), middle - begin, time.perf_counter() - middle


def sparse(problem: Problem, rounds: int, seconds: float) -> dict[str, Any]:
    """Ours, dense and the peers in one run; how far the results are apart."""
    makes: dict[str, Callable[[], Callable[..., Any]]] = {
        "ours": partial(ours, problem),
        "dense": partial(plain, problem),
        "asdex": partial(of_asdex, problem),
    }
    found = {name: prepared(make, problem.x) for name, make in makes.items()}
    matrix = found["ours"][0]()
    if sparsejac is not None:
        found["sparsejac"] = prepared(partial(of_sparsejac, problem, matrix), problem.x)
    expected = np.asarray(found["dense"][0]())
    apart = {
        name: float(np.abs((call() if name == "dense" else call().todense()) - expected).max() / np.abs(expected).max())
        for name, (call, *_) in found.items()
    }
    times = interleaved({name: call for name, (call, *_) in found.items()}, rounds=rounds, seconds=seconds)
    return {
        "entries": int(matrix.nse),
        "shape": list(expected.shape),
        "colors": ours(problem).explain(problem.x).colors,
        "apart": apart,
        "prepare_s": {name: before for name, (_, before, _) in found.items()},
        "compile_s": {name: after for name, (*_, after) in found.items()},
        "times": times,
        "ratios": {name: ratio(times, name, "ours") for name in times},
    }


def row(name: str, case: dict[str, Any]) -> dict[str, Any]:
    colors = case["colors"]
    return {
        "problem": name,
        "entries": f"{case['entries']:,} of {np.prod(case['shape']):,}",
        "products": f"{colors[0]} + {colors[1]}" if colors else "dense",
        "ours (ms)": f"{case['times']['ours']['median_ms']:.3f}",
        "dense (ms)": f"{case['times']['dense']['median_ms']:.3f}",
        "dense / ours": f"{case['ratios']['dense']:.1f}",
        "asdex / ours": f"{case['ratios']['asdex']:.2f}",
        "sparsejac / ours": f"{case['ratios']['sparsejac']:.2f}" if "sparsejac" in case["ratios"] else "",
        "apart from dense": f"{case['apart']['ours']:.0e}",
    }


def preparation(name: str, case: dict[str, Any]) -> dict[str, Any]:
    both = {way: f"{before:.2f} + {case['compile_s'][way]:.2f}" for way, before in case["prepare_s"].items()}
    return {"problem": name, **both}


def traces(size: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """The trace of the Hessian of a perceptron with three layers of tanh, by four ways."""
    keys = jax.random.split(jax.random.key(1), 3)
    weights = [jax.random.normal(k, (size, n)) / size**0.5 for k, n in zip(keys, (size, size, 1), strict=True)]

    def network(x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return x[0]

    functions: dict[str, Callable[..., Any]] = {
        "trace of jax.hessian": lambda x: jnp.trace(jax.hessian(network)(x)),
        "hessian_trace": hessian_trace(network),
        "laplacian": laplacian(network),
    }
    if folx is not None:
        functions["folx.forward_laplacian"] = lambda x: folx.forward_laplacian(network)(x).laplacian
    functions |= {f"hutchinson_trace, {n} samples": partial(hutchinson_trace(network, n), KEY) for n in SAMPLES}
    x = jnp.linspace(-1, 1, size)
    compiled = {name: jax.jit(fun).lower(x).compile() for name, fun in functions.items()}
    flops = {name: program.cost_analysis()["flops"] for name, program in compiled.items()}
    times = interleaved({name: partial(p, x) for name, p in compiled.items()}, rounds=rounds, seconds=seconds)
    first = "trace of jax.hessian"
    return [
        {
            "": name,
            "operations / those of the Hessian": f"{flops[name] / flops[first]:.2f}",
            "ms": f"{times[name]['median_ms']:.3f}",
            "time / that of the Hessian": f"{ratio(times, name, first):.2f}",
        }
        for name in functions
    ]


KEY = jax.random.key(0)


def coverage(size: int, repeats: int) -> list[dict[str, Any]]:
    """How often the interval of Student's t at 95 % holds the trace."""
    weights = jax.random.normal(jax.random.key(2), (size, size)) / size**0.5

    def fun(x: jax.Array) -> jax.Array:
        return (jnp.tanh(x @ weights) ** 2).sum()

    x = jnp.linspace(-1, 1, size)
    exact, rows = hessian_trace(fun)(x), []
    for samples in SAMPLES:
        estimate = jax.jit(jax.vmap(lambda key, n=samples: hutchinson_trace(fun, n)(key, x)))
        means, errors = estimate(jax.random.split(KEY, repeats))
        inside = jnp.abs(means - exact) <= stats.t.ppf(0.975, samples - 1) * errors
        rows.append(
            {
                "samples": samples,
                "mean of all / trace": f"{float(means.mean() / exact):.4f}",
                "standard error / trace": f"{float(errors.mean() / exact):.4f}",
                "trace inside": f"{100 * float(inside.mean()):.1f} %",
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="run everything small and once, write nothing")
    smoke = parser.parse_args().smoke
    rounds, seconds = (2, 0.0) if smoke else (15, 0.05)
    device = jax.devices()[0]
    versions = [f"{m.__name__} {getattr(m, '__version__', '')}".strip() for m in (jax, asdex, sparsejac, folx) if m]
    about = f"{', '.join(versions)}, Python {platform.python_version()}, {device.platform} ({device.device_kind})."
    asdex.jacobian_coloring(lambda x: x[1:] * x[:-1], jnp.ones(3))  # loads what it compiles with
    cases = {}
    for problem in problems(smoke)[:: 3 if smoke else 1]:
        cases[problem.name] = sparse(problem, rounds, seconds)
        print(table([row(problem.name, cases[problem.name])]), flush=True)
    trace_rows = traces(*((6, 2, 0.001) if smoke else (64, 31, 0.05)))
    coverage_rows = coverage(*((5, 20) if smoke else (50, 4000)))
    sections = [about]
    for title, rows in (
        ("Sparse Jacobians and Hessians", [row(name, case) for name, case in cases.items()]),
        ("Before the first result: prepared + compiled (s)", [preparation(*item) for item in cases.items()]),
        ("The trace of a Hessian", trace_rows),
        ("`hutchinson_trace`: how often its interval holds the trace", coverage_rows),
    ):
        sections.append(f"### {title}\n\n{table(rows)}")
        print(title, table(rows), sep="\n", flush=True)
    if not smoke:
        results = {"about": about, "cases": cases, "traces": trace_rows, "coverage": coverage_rows}
        publish("sparse", "\n\n".join(sections), results)


if __name__ == "__main__":
    main()
