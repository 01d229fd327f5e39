"""Compare sparse Jacobians and Hessians with dense ones, asdex and sparsejac; measure Laplacians and traces.

python benchmarks/sparse.py            measure, and render the pages
python benchmarks/sparse.py --smoke    run small cases once; write nothing
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _matrices import generated, large
from _measure import Report, Tables, arguments, claim, interleaved, peer, ratio
from scipy import sparse as sp
from scipy import stats
from tqdm import tqdm

from plurax.transforms import hessian, hessian_trace, hutchinson_trace, jacobian, laplacian

asdex, sparsejac, folx = peer("asdex"), peer("sparsejac"), peer("folx")
SAMPLES = (4, 16, 64)


class Problem(NamedTuple):
    """A function, and the point of its Jacobian, or of its Hessian for a scalar function."""

    name: str
    fun: Callable[[jax.Array], jax.Array]
    x: jax.Array
    scalar: bool = False


def brusselator(y: jax.Array) -> jax.Array:
    """Return the rates of two substances that react and diffuse along a line."""
    u, v = jnp.split(y, 2)

    def even_out(x: jax.Array) -> jax.Array:
        wide = jnp.pad(x, 1, mode="edge")
        return (wide[2:] - 2 * x + wide[:-2]) * x.size / 50

    return jnp.concatenate([1 + u**2 * v - 4 * u + even_out(u), 3 * u - u**2 * v + even_out(v)])


def heat(y: jax.Array) -> jax.Array:
    """Return the rate of heat flow on a square whose conductivity grows with the temperature."""
    side = int(y.size**0.5)
    wide = jnp.pad(y.reshape(side, side), 1)
    flow = [jnp.diff(wide[1:-1] ** 3, axis=1), jnp.diff(wide[:, 1:-1] ** 3, axis=0)]
    return (jnp.diff(flow[0], axis=1) + jnp.diff(flow[1], axis=0)).ravel()


def arrow(x: jax.Array) -> jax.Array:
    """Return a function value whose Jacobian is a full row, a full column and a diagonal."""
    return jnp.concatenate([jnp.sin(x[:1]) * x.sum(), x[1:] ** 2 + x[0] * x[1:]])


def convnet(x: jax.Array) -> jax.Array:
    """Map an image to an image with two 3 x 3 convolutions."""
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
    """Return the sum of Wood's function over overlapping groups of four inputs."""
    a, b, c, d = x[:-3:2], x[1:-2:2], x[2:-1:2], x[3::2]
    first = 100 * (a**2 - b) ** 2 + (a - 1) ** 2
    second = 90 * (c**2 - d) ** 2 + (1 - c) ** 2
    return (first + second + 10 * (b + d - 2) ** 2 + 0.1 * (b - d) ** 2).sum()


def chained_powell(x: jax.Array) -> jax.Array:
    """Return the residuals of Powell's singular function for overlapping groups of four inputs."""
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
    """Return the Jacobian of sparsejac, which needs the pattern as an argument."""
    return sparsejac.jacfwd(jax.grad(problem.fun) if problem.scalar else problem.fun, pattern)


def prepared(make: Callable[[], Callable[..., Any]], x: jax.Array) -> tuple[Callable[[], Any], float, float]:
    """Return the compiled function, the seconds before compilation, and the seconds of compilation."""
    begin = time.perf_counter()
    lowered = jax.jit(make()).lower(x)
    middle = time.perf_counter()
    compiled = lowered.compile()
    return partial(compiled, x), middle - begin, time.perf_counter() - middle


def sparse(problem: Problem, rounds: int, seconds: float) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Measure ours, dense and the other libraries; return the rows of both tables and a claim."""
    makes: dict[str, Callable[[], Callable[..., Any]]] = {
        "ours": partial(ours, problem),
        "dense": partial(plain, problem),
        **({} if asdex is None else {"asdex": partial(of_asdex, problem)}),
    }
    found = {name: prepared(make, problem.x) for name, make in makes.items()}
    matrix = found["ours"][0]()
    if sparsejac is not None:
        found["sparsejac"] = prepared(partial(of_sparsejac, problem, matrix), problem.x)
    expected = np.asarray(found["dense"][0]())
    deviations = {
        name: float(np.abs((call() if name == "dense" else call().todense()) - expected).max() / np.abs(expected).max())
        for name, (call, *_) in found.items()
    }
    times = interleaved({name: call for name, (call, *_) in found.items()}, rounds=rounds, seconds=seconds)
    colors = ours(problem).explain(problem.x).colors
    row = {
        "problem": problem.name,
        "entries": f"{int(matrix.nse):,} of {expected.size:,}",
        "products": f"{colors[0]} + {colors[1]}" if colors else "dense",
        "ours (ms)": times["ours"]["ms"],
        "dense (ms)": times["dense"]["ms"],
        **{f"{name} / ours": ratio(times, name, "ours") for name in times if name != "ours"},
        "largest difference from dense": deviations["ours"],
    }
    both = {name: f"{before:.2f} + {after:.2f}" for name, (_, before, after) in found.items()}
    return row, {"problem": problem.name, **both}, claim(times, "ours", list(times)[1:], problem.name)


def traces(size: int, rounds: int, seconds: float) -> Tables:
    """Measure the trace of the Hessian of a perceptron with three tanh layers, with each method."""
    keys = jax.random.split(jax.random.key(1), 3)
    weights = [jax.random.normal(k, (size, n)) / size**0.5 for k, n in zip(keys, (size, size, 1), strict=True)]

    def network(x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return x[0]

    functions = exact_traces(network)
    functions |= {f"hutchinson_trace, {n} samples": partial(hutchinson_trace(network, n), KEY) for n in SAMPLES}
    return compared(functions, jnp.linspace(-1, 1, size), rounds, seconds)


def determinants(batch: int, rounds: int, seconds: float) -> Tables:
    """Measure the Laplacian of a determinant of 4 orbitals for 4 particles; orbitals are of one particle, or of all."""
    keys = jax.random.split(jax.random.key(3), 5)
    shapes = ((3, 16), (16, 4), (12, 64), (64, 16), (batch, 12))
    of_one, orbitals, of_all, shared, x = (
        jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, shapes, strict=True)
    )
    x = x * batch**0.5

    def each(x: jax.Array) -> jax.Array:
        return jnp.linalg.slogdet(jnp.tanh(x.reshape(4, 3) @ of_one) @ orbitals)[1]

    def together(x: jax.Array) -> jax.Array:
        return jnp.linalg.slogdet((jnp.tanh(x @ of_all) @ shared).reshape(4, 4))[1]

    rows, claims = [], []
    for name, fun in (("orbitals of one particle each", each), ("orbitals of all particles", together)):
        found, (one,) = compared({key: jax.vmap(f) for key, f in exact_traces(fun).items()}, x, rounds, seconds)
        rows += [{"network": name} | row for row in found]
        claims.append(one | {"what": name})
    return rows, claims


def exact_traces(fun: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Return the trace of the Hessian of `fun` by each method."""
    functions: dict[str, Callable[..., Any]] = {
        "trace of jax.hessian": lambda x: jnp.trace(jax.hessian(fun)(x)),
        "hessian_trace": hessian_trace(fun),
        "laplacian": laplacian(fun),
    }
    if folx is not None:
        functions["folx.forward_laplacian"] = lambda x: folx.forward_laplacian(fun)(x).laplacian
        sparse = folx.forward_laplacian(fun, sparsity_threshold=6)
        functions["folx.forward_laplacian, sparsity_threshold=6"] = lambda x: sparse(x).laplacian
    return functions


def compared(functions: dict[str, Callable[..., Any]], x: jax.Array, rounds: int, seconds: float) -> Tables:
    """Measure functions of one array; the first is the reference."""
    compiled = {name: jax.jit(fun).lower(x).compile() for name, fun in functions.items()}
    flops = {name: program.cost_analysis()["flops"] for name, program in compiled.items()}
    times = interleaved({name: partial(p, x) for name, p in compiled.items()}, rounds=rounds, seconds=seconds)
    first = next(iter(functions))
    rows = [
        {
            "": name,
            "operations / full Hessian": flops[name] / flops[first],
            "ms": times[name]["ms"],
            "time / full Hessian": ratio(times, name, first),
        }
        for name in functions
    ]
    others = [name for name in functions if name == first or name.startswith("folx")]
    return rows, [claim(times, "laplacian", others)]


KEY = jax.random.key(0)


def coverage(size: int, repeats: int) -> Tables:
    """Measure how often the 95 % interval of Student's t contains the trace."""
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
                "mean estimate / trace": float(means.mean() / exact),
                "standard error / trace": float(errors.mean() / exact),
                "interval contains the trace (%)": 100 * float(inside.mean()),
            }
        )
    return rows, []


def products(matrix: Any, symmetric: bool) -> int:
    """Return how many products a matrix with this pattern takes."""
    size, x = matrix.shape[0], jnp.zeros(matrix.shape[1])
    if symmetric:
        choice = hessian(lambda x: jnp.sum(x) * 0.0, sparsity=matrix).explain(x)
    else:
        choice = jacobian(lambda x: jnp.zeros(size) * x[0], mode="forward", sparsity=matrix).explain(x)
    return sum(choice.colors or matrix.shape[1:])


def products_of_asdex(matrix: Any, symmetric: bool) -> int:
    rows, cols = (x.astype(np.int32) for x in matrix.nonzero())
    pattern = asdex.SparsityPattern.from_coo(rows, cols, matrix.shape)
    return int((asdex.color_symmetric(pattern, postprocess=True) if symmetric else asdex.color_cols(pattern))[1])


KINDS = {"columns": False, "symmetric": True}
COUNTS = {"ours": products} | ({} if asdex is None else {"asdex": products_of_asdex})


def patterns(matrices: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield each matrix and its symmetric form, with the name and the kind of the products."""
    for name, matrix in matrices.items():
        yield name, "columns", sp.csr_array(matrix)
        if matrix.shape[0] == matrix.shape[1]:
            yield name, "symmetric", sp.csr_array(matrix + matrix.T)


def colors(matrices: dict[str, Any]) -> Tables:
    """Count the products of ours and of asdex."""
    rows = [
        {"matrix": name, "products": kind, "entries": f"{pattern.nnz:,}"}
        | {library: count(pattern, KINDS[kind]) for library, count in COUNTS.items()}
        for name, kind, pattern in tqdm(list(patterns(matrices)))
    ]
    sums = {"matrix": "sum", "products": "", "entries": ""} | {name: sum(row[name] for row in rows) for name in COUNTS}
    return [*rows, sums], []


def coloring_times(matrices: dict[str, Any], rounds: int) -> Tables:
    """Measure how long our coloring takes; asdex takes up to twenty minutes for these."""
    rows = []
    for name, kind, pattern in tqdm(list(patterns(matrices))):
        times = interleaved({"ours": partial(products, pattern, KINDS[kind])}, rounds=rounds, seconds=0)
        rows.append(
            {"matrix": name, "products": kind, "entries": f"{pattern.nnz:,}"}
            | {"ours (ms)": times["ours"]["ms"], "number": products(pattern, KINDS[kind])}
        )
    return rows, []


def main() -> None:
    options = arguments(__doc__).parse_args()
    report, smoke = Report("sparse", options, "asdex", "sparsejac", "folx"), options.smoke
    rounds, seconds = (2, 0.0) if smoke else (15, 0.05)

    @cache
    def measured() -> Any:
        if asdex is not None:
            asdex.jacobian_coloring(lambda x: x[1:] * x[:-1], jnp.ones(3))  # compiles its loops
        found = [sparse(problem, rounds, seconds) for problem in tqdm(problems(smoke)[:: 3 if smoke else 1])]
        return [list(column) for column in zip(*found, strict=True)]

    report.measure(
        {
            "Sparse Jacobians and Hessians": lambda: (measured()[0], measured()[2]),
            "Before the first result: preparation + compilation (s)": lambda: (measured()[1], []),
            "Products for generated matrices": lambda: colors(dict(list(generated().items())[:: 6 if smoke else 1])),
            "Coloring of a million entries": lambda: coloring_times(large(2000 if smoke else 10**6), 2 if smoke else 3),
            "The trace of a Hessian": lambda: traces(*((6, 2, 0.001) if smoke else (64, 31, 0.05))),
            "The Laplacian of a determinant": lambda: determinants(*((3, 2, 0.001) if smoke else (512, 31, 0.05))),
            "`hutchinson_trace`: coverage of its interval": lambda: coverage(*((5, 20) if smoke else (50, 4000))),
        }
    )


if __name__ == "__main__":
    main()
