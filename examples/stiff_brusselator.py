"""Integrate a stiff reaction with implicit steps, and compare the cost of dense and sparse Jacobians.

    python examples/stiff_brusselator.py --cells 64 256 1024 --until 10 --out demo

Two substances react and diffuse along a line (the Brusselator). An explicit method must resolve the diffusion between
neighboring cells, so its time step shrinks as the square of the cell width. An implicit method solves a linear system
with the Jacobian instead. Each cell depends only on itself and its two neighbors, so six products give the whole
matrix for any number of cells. The script times dense and sparse Jacobians and steps, runs the reaction, and draws
`stiff_brusselator.png`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl

mpl.use("Agg")  # draws to a file; needs no window

import matplotlib.pyplot as plt
import numpy as np
import scipy.linalg
import scipy.sparse.linalg
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from plurax.transforms import jacobian

SPREAD = 1 / 50
# This coefficient makes the method L-stable: components that decay much faster than a step are damped at once.
GAMMA = 1 - 0.5**0.5
TOLERANCE = 1e-4

Solver = Callable[[np.ndarray], np.ndarray]


def brusselator(y: jax.Array) -> jax.Array:
    """Return the rates of change of both substances, (2 * cells,); their boundary values are 1 and 3."""
    u, v = jnp.split(y, 2)
    spread = SPREAD * (u.size + 1) ** 2

    def even_out(x: jax.Array, end: float) -> jax.Array:
        wide = jnp.pad(x, 1, constant_values=end)
        return spread * (wide[2:] - 2 * x + wide[:-2])

    reaction = u**2 * v
    return jnp.concatenate([1 + reaction - 4 * u + even_out(u, 1.0), 3 * u - reaction + even_out(v, 3.0)])


def start(cells: int) -> np.ndarray:
    """Return the initial state: a sine wave of the first substance, and a constant second one."""
    x = np.arange(1, cells + 1) / (cells + 1)
    return np.concatenate([1 + np.sin(2 * np.pi * x), np.full(cells, 3.0)])


def solve_sparse(matrix: Any, step: float) -> Solver:
    """Return a solver for the matrix 1 - GAMMA * step * J, with a Jacobian J as `BCOO`."""
    rows, cols = np.asarray(matrix.indices).T
    sparse = scipy.sparse.csc_array((-GAMMA * step * np.asarray(matrix.data), (rows, cols)), shape=matrix.shape)
    return scipy.sparse.linalg.splu(sparse + scipy.sparse.eye_array(len(matrix), format="csc")).solve


def solve_dense(matrix: Any, step: float) -> Solver:
    """Return the same for a dense Jacobian."""
    factors = scipy.linalg.lu_factor(np.eye(len(matrix)) - GAMMA * step * np.asarray(matrix))
    return lambda right: scipy.linalg.lu_solve(factors, right)


class Method:
    """The Rosenbrock method ROS2 of Verwer et al. (1999): second order, with two solves of one matrix per step."""

    def __init__(self, jacobian_at: Callable[..., Any], solver: Callable[[Any, float], Solver]) -> None:
        self.slope, self.jacobian_at, self.solver = jax.jit(brusselator), jax.jit(jacobian_at), solver

    def step(self, y: np.ndarray, step: float) -> tuple[np.ndarray, float]:
        """Return the state after a step, and its estimated error in units of the tolerance."""
        solve = self.solver(self.jacobian_at(y), step)
        first = solve(np.asarray(self.slope(y)))
        second = solve(np.asarray(self.slope(y + step * first)) - 2 * first)
        error = np.abs(0.5 * step * (first + second)) / (TOLERANCE * (1 + np.abs(y)))
        return y + step * (1.5 * first + 0.5 * second), float(error.max())

    def run(self, y: np.ndarray, until: float) -> tuple[np.ndarray, np.ndarray]:
        """Integrate with adaptive steps; return the times (n,) and the states (n, 2 * cells)."""
        times, states, step = [0.0], [y], 1e-4
        with tqdm(total=until, unit="s", leave=False, bar_format="{l_bar}{bar}| {n:.2f} of {total:.2f}") as bar:
            while times[-1] < until:
                step = min(step, until - times[-1])
                found, error = self.step(states[-1], step)
                if error <= 1:
                    times.append(until if step == until - times[-1] else times[-1] + step)
                    states.append(found)
                    bar.update(step)
                step *= float(np.clip(0.9 / max(error, 1e-9) ** 0.5, 0.2, 4))
        return np.array(times), np.stack(states)


def timed(call: Callable[[], Any], rounds: int) -> float:
    """Return the median time of a call in milliseconds."""
    jax.block_until_ready(call())
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        found.append(1e3 * (time.perf_counter() - begin))
    return float(np.median(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cells", type=int, nargs="+", default=[64, 256, 1024], help="numbers of cells (default 64 256 1024)"
    )
    parser.add_argument("--until", type=float, default=10.0, help="end time (default 10)")
    parser.add_argument("--rounds", type=int, default=5, help="timed calls, of which the median is taken (default 5)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory for the picture")
    options = parser.parse_args()
    if min(options.cells) < 2:
        parser.error(f"--cells must be at least 2, but got {min(options.cells)}")
    if not options.until > 0:
        parser.error(f"--until must be positive, but got {options.until}")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, but got {options.rounds}")
    options.out.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_enable_x64", True)
    console = Console()

    methods = {
        "dense": Method(jacobian(brusselator), solve_dense),
        "sparse": Method(jacobian(brusselator, sparsity="auto"), solve_sparse),
    }
    table = Table(title="Time (ms)")
    for head in ("unknowns", "Jacobian: dense", "sparse", "speedup", "step: dense", "sparse", "speedup"):
        table.add_column(head, justify="right")
    times: dict[str, list[float]] = {}
    for cells in options.cells:
        y = start(cells)
        row = [str(2 * cells)]
        for kind in ("Jacobian", "step"):
            for name, method in methods.items():
                call = partial(method.jacobian_at, y) if kind == "Jacobian" else partial(method.step, y, 0.01)
                times.setdefault(f"{kind}, {name}", []).append(timed(call, options.rounds))
            dense, sparse = (times[f"{kind}, {name}"][-1] for name in methods)
            row += [f"{dense:.2f}", f"{sparse:.2f}", f"{dense / sparse:.0f}"]
        table.add_row(*row)
        deviation = np.abs(methods["dense"].step(y, 0.01)[0] - methods["sparse"].step(y, 0.01)[0]).max()
        assert deviation < 1e-9, f"dense and sparse steps differ by {deviation}"
    choice = jacobian(brusselator, sparsity="auto").explain(y)
    console.print(f"{choice.inputs} unknowns, {choice.inputs**2} entries: {choice.why}.")
    console.print(table)

    begin = time.perf_counter()
    moments, states = methods["sparse"].run(start(cells), options.until)
    seconds = time.perf_counter() - begin
    steps = np.diff(moments)
    limit = 2 / (4 * SPREAD * (cells + 1) ** 2)
    console.print(
        f"{cells} cells until time {options.until:g}: {len(steps)} implicit steps in {seconds:.1f} s. Explicit Euler "
        f"would need {options.until / limit:,.0f}, since it is unstable with steps longer than {limit:.1e}."
    )

    picture = options.out / "stiff_brusselator.png"
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    x = np.arange(1, cells + 1) / (cells + 1)
    image = left.pcolormesh(moments, x, states[:, :cells].T, shading="nearest", rasterized=True)
    figure.colorbar(image, ax=left, label="first substance")
    left.set(xlabel="time", ylabel="position", title=f"Concentration, {cells} cells")
    middle.plot(moments[1:], steps, label="implicit steps")
    middle.axhline(limit, color="black", linewidth=1, label="stability limit of explicit steps")
    middle.set(yscale="log", xlabel="time", ylabel="step size", title="Step size")
    middle.legend(fontsize=8)
    for name, values in times.items():
        style = {"linestyle": "-" if "step" in name else "--", "color": "C1" if "dense" in name else "C0"}
        right.plot([2 * cells for cells in options.cells], values, marker="o", label=name, **style)
    right.set(
        xscale="log", yscale="log", xlabel="unknowns", ylabel="time (ms)", title="Time of a Jacobian and of a step"
    )
    right.set_xticks([2 * cells for cells in options.cells], [str(2 * cells) for cells in options.cells])
    right.minorticks_off()
    right.legend(fontsize=8)
    for panel in (left, middle, right):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110, bbox_inches="tight")
    plt.close(figure)
    console.print(f"Picture: {picture}")


if __name__ == "__main__":
    main()
