"""Compute the kinetic energy of a wave function of trapped particles with the Laplacian of a network.

    python examples/laplacian.py --particles 2 4 8 16 --samples 256 --out demo

For a wave function exp(f) the kinetic energy at a point is -(∇²f + |∇f|²) / 2. The script first checks this against a
known case: in the ground state of a harmonic trap, kinetic and potential energy add up to 3/2 per particle at every
point. Then a network correlates the particles, and the script draws `laplacian.png`: the energies of sampled points,
and the time of the Laplacian by the trace of the Hessian, by second derivatives, and in one forward pass.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl

mpl.use("Agg")  # draws to a file; needs no window

import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from plurax.transforms import hessian, hessian_trace, laplacian, value_and_grad, vmap


class Correlation(nnx.Module):
    """A network of all coordinates that correlates the particles, with small initial outputs."""

    def __init__(self, particles: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3 * particles, 64, rngs=rngs)
        self.second = nnx.Linear(64, 64, rngs=rngs)
        self.out = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return a scalar for positions (particles, 3)."""
        return 0.1 * self.out(jnp.tanh(self.second(jnp.tanh(self.first(x.ravel())))))[0]


def ground_state(x: jax.Array) -> jax.Array:
    """Return the logarithm of the ground state of a harmonic trap."""
    return -0.5 * jnp.sum(x**2)


def kinetic_energy(
    log_psi: Callable[[jax.Array], jax.Array], method: Callable[..., Callable[..., jax.Array]]
) -> Callable:
    """Return the kinetic energy as a function of a point, with the Laplacian computed by `method`."""

    def at(x: jax.Array) -> jax.Array:
        _, slope = value_and_grad(log_psi)(x)
        return -0.5 * (method(log_psi)(x) + jnp.sum(slope**2))

    return at


def trace_of_hessian(fun: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Return the Laplacian as the trace of the whole Hessian."""
    return lambda x: jnp.trace(hessian(fun)(x).reshape(x.size, x.size))


METHODS = {"trace of the Hessian": trace_of_hessian, "hessian_trace": hessian_trace, "laplacian": laplacian}


def timed(functions: dict[str, Callable[[jax.Array], jax.Array]], x: jax.Array, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of a call of each function; the calls alternate."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, fun in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(fun(x))
            found[name].append(1e3 * (time.perf_counter() - start))
    return {name: float(np.median(values)) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--particles", type=int, nargs="+", default=[2, 4, 8, 16], help="numbers of particles (default 2 4 8 16)"
    )
    parser.add_argument("--samples", type=int, default=256, help="points to sample (default 256)")
    parser.add_argument("--rounds", type=int, default=15, help="timed calls, of which the median is taken (default 15)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory for the picture")
    options = parser.parse_args()
    for name, least in (("samples", 2), ("rounds", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}, but got {getattr(options, name)}")
    if min(options.particles) < 1:
        parser.error(f"--particles must be at least 1, but got {min(options.particles)}")
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console()

    table = Table(title=f"Time of the kinetic energy at {options.samples} points (ms)")
    for head in ("particles", *METHODS, "laplacian / trace of the Hessian"):
        table.add_column(head, justify="right")
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    for count in options.particles:
        # Samples of the squared ground state, which is a normal distribution.
        x = jax.random.normal(jax.random.key(count), (options.samples, count, 3)) / np.sqrt(2)
        model = Correlation(count, nnx.Rngs(0))

        def correlated(x: jax.Array, model: Correlation = model) -> jax.Array:
            return ground_state(x) + model(x)

        mapped = {name: jax.jit(vmap(kinetic_energy(correlated, method))) for name, method in METHODS.items()}
        energies = {name: fun(x) for name, fun in mapped.items()}
        for name, taken in timed(mapped, x, options.rounds).items():
            times[name].append(taken)
            np.testing.assert_allclose(energies[name], energies["trace of the Hessian"], rtol=1e-3, atol=1e-3)
        ours, plain = (times[name][-1] for name in ("laplacian", "trace of the Hessian"))
        table.add_row(str(count), *(f"{times[name][-1]:.2f}" for name in METHODS), f"{ours / plain:.2f}")
    exact = vmap(kinetic_energy(ground_state, laplacian))(x) + 0.5 * jnp.sum(x**2, axis=(1, 2))
    worst = float(jnp.abs(exact - 1.5 * count).max())
    console.print(f"Ground state of {count} particles: energy {1.5 * count} at every point, largest error {worst:.1e}.")
    console.print(table)
    potential = 0.5 * jnp.sum(x**2, axis=(1, 2))
    total = energies["laplacian"] + potential
    console.print(
        f"With correlation: mean energy {float(total.mean()):.3f} ± {float(total.std() / np.sqrt(len(total))):.3f}."
    )

    picture = options.out / "laplacian.png"
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.scatter(potential, energies["laplacian"], s=8, alpha=0.5, label="with the correlation network")
    line = np.array([float(potential.min()), float(potential.max())])
    left.plot(line, 1.5 * count - line, color="black", linewidth=1, label="ground state")
    left.set(
        xlabel="potential energy",
        ylabel="kinetic energy",
        title=f"Energies of {options.samples} points, {count} particles",
    )
    left.legend(fontsize=8)
    coordinates = [3 * n for n in options.particles]
    for name, values in times.items():
        right.plot(coordinates, values, "o-", label=name)
    right.set(xscale="log", yscale="log", xlabel="coordinates", ylabel="time (ms)", title="Time of the kinetic energy")
    right.set_xticks(coordinates, [str(n) for n in coordinates])
    right.set_xticks([], minor=True)
    right.legend(fontsize=8)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110)
    plt.close(figure)
    console.print(f"Picture: {picture}")


if __name__ == "__main__":
    main()
