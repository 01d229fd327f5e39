"""See what a batch of gradients tells: which batch size pays, which samples teach the same, and a better direction.

    python examples/gradient_statistics.py --steps 400 --seconds 8 --out demo

The gradient noise scale of a network that learns the digits grows during training: at first small batches suffice. The
Gram matrix of its per-sample gradients shows which digits teach the same. With the tangent kernel of a physics-informed
network, the natural gradient is the solution of a small linear system; it is compared with Adam in the same time. The
script draws `gradient_statistics.png`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl

mpl.use("Agg")  # draws to a file; needs no window

import matplotlib.pyplot as plt
import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

from plurax.transforms import (
    empirical_ntk,
    grad,
    gradient_noise_scale,
    laplacian,
    per_sample_gram,
    value_and_grad,
    vjp,
    vmap,
)

Params = list[tuple[jax.Array, jax.Array]]


def network(params: Params, x: jax.Array) -> jax.Array:
    for weight, bias in params[:-1]:
        x = jnp.tanh(x @ weight + bias)
    return x @ params[-1][0] + params[-1][1]


def initial(key: jax.Array, *sizes: int) -> Params:
    keys = jax.random.split(key, len(sizes) - 1)
    pairs = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return [(jax.random.normal(k, (n, m)) / n**0.5, jnp.zeros(m)) for k, n, m in pairs]


def cross_entropy(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(network(params, x), y).mean()


def learn_digits(steps: int, batch: int) -> tuple[Params, np.ndarray, np.ndarray]:
    """Train, and return the parameters, and signal and noise at each step."""
    x, y = digits()
    optimizer = optax.adam(2e-3)
    of_batch = gradient_noise_scale(cross_entropy, batch_argnums=(1, 2))

    @jax.jit
    def step(params: Params, state: Any, x: jax.Array, y: jax.Array) -> Any:
        updates, state = optimizer.update(grad(cross_entropy)(params, x, y), state)
        found = of_batch(params, x, y)
        return optax.apply_updates(params, updates), state, (found.signal, found.noise)

    params = initial(jax.random.key(0), 64, 64, 64, 10)
    state, found, rng = optimizer.init(params), [], np.random.default_rng(0)
    for _ in range(steps):
        chosen = rng.choice(len(x), batch, replace=False)
        params, state, both = step(params, state, x[chosen], y[chosen])
        found.append(both)
    return params, *np.array(found).T


def digits() -> tuple[np.ndarray, np.ndarray]:
    data = load_digits()
    return (data.data / 16).astype(np.float32), data.target.astype(np.int32)


def blocks(steps: int, count: int = 12) -> list[np.ndarray]:
    """Divide the steps into blocks of growing length: one batch gives a noisy signal, which may be negative."""
    ends = np.unique(np.geomspace(10, steps, count).astype(int))
    return [block for block in np.split(np.arange(steps), ends[:-1]) if len(block)]


def alignment(params: Params, each: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosines between the gradients of some samples of each digit, and their labels."""
    x, y = digits()
    chosen = np.concatenate([np.flatnonzero(y == digit)[:each] for digit in range(10)])
    gram = jax.jit(per_sample_gram(cross_entropy, batch_argnums=(1, 2)))(params, x[chosen], y[chosen])
    norms = np.sqrt(np.diag(gram))
    return np.asarray(gram) / norms / norms[:, None], y[chosen]


# A physics-informed network u(x, y) for the equation ∇²u = -2π² sin(πx) sin(πy) on a square, zero at its edges.


def solution(x: jax.Array) -> jax.Array:
    return jnp.sin(jnp.pi * x).prod(-1)


def u(params: Params, x: jax.Array) -> jax.Array:
    return network(params, x)[..., 0] * (4 * x * (1 - x)).prod(-1)


def residuals(params: Params, x: jax.Array) -> jax.Array:
    """Return how much the equation is violated at each point."""
    of_point = laplacian(lambda x: u(params, x))
    return vmap(of_point)(x) + 2 * jnp.pi**2 * solution(x)


def misfit(params: Params, x: jax.Array) -> jax.Array:
    return jnp.mean(residuals(params, x) ** 2)


def natural_step(params: Params, state: None, x: jax.Array) -> tuple[Params, None]:
    """Step along Jᵀ(J Jᵀ)⁻¹ r for residuals r: the Gauss-Newton direction, from a system of the size of the batch."""
    r, pull = vjp(lambda params: residuals(params, x), params)
    kernel = empirical_ntk(residuals)(params, x)
    damped = kernel + 1e-10 * jnp.trace(kernel) * jnp.eye(len(x))
    (direction,) = pull(jax.scipy.linalg.solve(damped, r, assume_a="pos"))
    sizes = 0.5 ** jnp.arange(12.0)
    moved = [jax.tree.map(lambda p, d, size=size: p - size * d, params, direction) for size in sizes]
    losses = jnp.stack([misfit(p, x) for p in moved])
    best = jnp.nanargmin(losses)
    return jax.tree.map(lambda *leaves: jnp.stack(leaves)[best], *moved), state


def adam_step(params: Params, state: Any, x: jax.Array) -> tuple[Params, Any]:
    _, gradient = value_and_grad(misfit)(params, x)
    updates, state = ADAM.update(gradient, state)
    return optax.apply_updates(params, updates), state


ADAM = optax.adam(optax.exponential_decay(1e-2, 1000, 0.7))


def errors(
    step: Callable[..., Any], state: Any, params: Params, points: int, seconds: float
) -> Iterator[tuple[float, int, float]]:
    """Yield seconds, steps and the relative error of the solution, until the time is over; compilation is not timed."""
    rng, spent, steps = np.random.default_rng(1), 0.0, 0
    grid = np.stack(np.meshgrid(*[np.linspace(0, 1, 41)] * 2), -1).reshape(-1, 2)
    exact = solution(grid)
    error = jax.jit(lambda params: jnp.linalg.norm(u(params, grid) - exact) / jnp.linalg.norm(exact))
    compiled = jax.jit(step)
    jax.block_until_ready(compiled(params, state, rng.random((points, 2))))
    while spent < seconds:
        x = rng.random((points, 2))
        start = time.perf_counter()
        params, state = jax.block_until_ready(compiled(params, state, x))
        spent, steps = spent + time.perf_counter() - start, steps + 1
        if steps < 10 or steps % 20 == 0 or step is natural_step:
            yield spent, steps, float(error(params))


def solve(points: int, seconds: float) -> dict[str, list[tuple[float, int, float]]]:
    """Return the errors of both methods, in 64 bits: the system of equations is ill-conditioned."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: x.astype(jnp.float64), initial(jax.random.key(1), 2, 32, 32, 1))
        ways: dict[str, tuple[Callable[..., Any], Any]] = {
            "Adam": (adam_step, ADAM.init(params)),
            "natural gradient": (natural_step, None),
        }
        return {name: list(errors(step, state, params, points, seconds)) for name, (step, state) in ways.items()}


def draw(signal: np.ndarray, noise: np.ndarray, cosines: np.ndarray, found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    parts = blocks(len(signal))
    scale = [noise[part].mean() / signal[part].mean() for part in parts]
    axes[0].plot([part.mean() + 1 for part in parts], scale, "o-", color="#0072B2", markersize=4)
    axes[0].set(xscale="log", yscale="log", xlabel="step", ylabel="samples")
    axes[0].set_title("Gradient noise scale: the batch size that pays", loc="left", fontsize=10)
    image = axes[1].imshow(cosines, cmap="RdBu", vmin=-1, vmax=1)
    places = np.arange(10) * len(cosines) / 10 + len(cosines) / 20
    axes[1].set_xticks(places, [str(i) for i in range(10)])
    axes[1].set_yticks(places, [str(i) for i in range(10)])
    axes[1].tick_params(length=0)
    axes[1].set_title("Cosine between the gradients of digits", loc="left", fontsize=10)
    figure.colorbar(image, ax=axes[1], shrink=0.85)
    for (name, rows), color in zip(found.items(), ("#777777", "#0072B2"), strict=True):
        seconds, _, error = np.array(rows).T
        axes[2].plot(seconds, error, color=color, linewidth=1)
        place = (seconds[-1] / 2, max(error[len(error) // 4 :]))
        axes[2].annotate(name, place, xytext=(0, 6), textcoords="offset points", ha="center", color=color)
    axes[2].set(yscale="log", xlabel="seconds", ylabel="relative error of u")
    axes[2].set_title("A physics-informed network", loc="left", fontsize=10)
    for axis in (axes[0], axes[2]):
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="training steps on the digits")
    parser.add_argument("--batch", type=int, default=64, help="batch size on the digits")
    parser.add_argument("--each", type=int, default=20, help="samples of each digit in the Gram matrix")
    parser.add_argument("--points", type=int, default=200, help="points of the physics-informed network in a step")
    parser.add_argument("--seconds", type=float, default=8.0, help="time for each method")
    parser.add_argument("--out", type=Path, default=Path("demo"))
    options = parser.parse_args()
    console = Console()

    params, signal, noise = learn_digits(options.steps, options.batch)
    parts = np.array_split(np.arange(options.steps), 4)
    table = Table(title="Gradient noise scale while a network learns the digits")
    for head in ("steps", "signal", "noise", "noise scale (samples)"):
        table.add_column(head, justify="right")
    for part in parts:
        mean = signal[part].mean(), noise[part].mean()
        table.add_row(f"{part[0] + 1} to {part[-1] + 1}", *(f"{x:.3g}" for x in mean), f"{mean[1] / mean[0]:.0f}")
    console.print(table)

    cosines, labels = alignment(params, options.each)
    same = labels[:, None] == labels
    apart = ~np.eye(len(labels), dtype=bool)
    console.print(
        f"Mean cosine between gradients of one digit: {cosines[same & apart].mean():.2f}; "
        f"of two digits: {cosines[~same].mean():.2f}."
    )

    found = solve(options.points, options.seconds)
    table = Table(title=f"A physics-informed network in {options.seconds:g} seconds")
    for head in ("method", "steps", "relative error of u"):
        table.add_column(head, justify="right")
    for name, rows in found.items():
        table.add_row(name, str(rows[-1][1]), f"{rows[-1][2]:.1e}")
    console.print(table)

    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "gradient_statistics.png"
    draw(signal, noise, cosines, found).savefig(path, dpi=100)
    console.print(f"Picture: {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
