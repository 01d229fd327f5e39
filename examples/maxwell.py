"""Simulate waves from many point sources in two dimensions, and reconstruct a hidden object from the received signals.

    python examples/maxwell.py --cells 20 40 80 --sources 48 --steps 40 --out demo

It solves Maxwell's equations in the time domain, on the staggered grid of Yee (IEEE Trans. Antennas Propag. 14, 1966),
with the absorbing layer of Berenger (J. Comput. Phys. 114, 1994). MindSpore's tutorial on vmap mentions this as an
application. Lengths are in wavelengths of the source in vacuum; the speed of light in vacuum is 1. The script

1. compares a wave with the analytic solution (speed, decay, and the whole signal) on successively finer grids;
2. computes and times the waves of many sources one by one, by `vmap`, and by `vmap` in chunks;
3. differentiates the signals with respect to the permittivity of each cell, through all time steps, in bounded memory;
4. finds a hidden square with that gradient, and draws `maxwell.png`.
"""

from __future__ import annotations

import argparse
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
import optax
from jax import lax
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from plurax.transforms import value_and_grad, vmap

COURANT = 0.7  # the time step, in cells; the stability limit is 1/sqrt(2)
LAYER = 0.5  # thickness of the absorbing layer around the grid, in wavelengths
DELAY = 1.2  # time of the maximum of the source
CHUNK, BUDGET = 4, "2MiB"  # two ways to bound the memory of many sources

console = Console(width=100, highlight=False)


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    table = Table(*head)
    for row in rows:
        table.add_row(*map(str, row))
    console.print(f"\n{title}", style="bold")
    console.print(table)


def check(name: str, value: float, limit: float) -> float:
    assert value <= limit, f"{name} is {value:.3g}, but should be at most {limit:.3g}"
    return float(value)


# Waves


def place(points: Any, cells: int) -> np.ndarray:
    """Return the grid indices of points, whose coordinates start at the inner edge of the absorbing layer."""
    return np.round((np.asarray(points) + LAYER) * cells).astype(int)


def vacuum(width: float, height: float, cells: int) -> jax.Array:
    return jnp.ones(place((width + LAYER, height + LAYER), cells) + 1)


def moments(until: float, cells: int, multiple: int = 1) -> np.ndarray:
    """Return the times of the samples; their number is a multiple of `multiple`."""
    count = int(np.ceil(until * cells / COURANT / multiple)) * multiple
    return (1 + np.arange(count)) * COURANT / cells


def absorb(count: int, cells: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return for the fields at the nodes and between them the factors of the old value and of the curl in a step."""
    middle, both = (count - 1) / 2, []
    for x in (np.arange(count), np.arange(count) + 0.5):
        depth = np.maximum(0, (np.abs(x - middle) - middle) / (LAYER * cells) + 1)
        lost = np.log(1e6) / LAYER * COURANT / cells * depth**3  # two layers reduce a wave by 1e-6
        both.append(((1 - lost) / (1 + lost), COURANT / (1 + lost)))
    return both


def wave(epsilon: jax.Array, source: Any, receivers: Any, times: np.ndarray, cells: int, segments: int = 1) -> Any:
    """Return the signals of one source, (steps, receivers), and the final electric field.

    The electric field is perpendicular to the plane, the magnetic field lies in it. Berenger's layer splits the
    electric field into two parts, one for each direction. The grid is periodic: a wave that leaves on one side enters
    on the other, after crossing two layers. Reverse mode stores the fields within one time segment, and between
    segments.
    """
    # With dE/dt = (curl H - J) / epsilon and dH/dt = -curl E the field obeys epsilon d²E/dt² = ∇²E - dJ/dt. J is in one
    # cell, of area 1 / cells², and half a step before E; -dJ/dt, a Ricker wavelet, is the source in `analytic`.
    (keep_ex, take_ex), (keep_hy, take_hy) = ((k[:, None], t[:, None]) for k, t in absorb(epsilon.shape[0], cells))
    (keep_ey, take_ey), (keep_hx, take_hx) = absorb(epsilon.shape[1], cells)
    source, receivers = tuple(source), tuple(jnp.asarray(receivers).T)
    since = times - 0.5 * COURANT / cells - DELAY
    current = -since * np.exp(-((np.pi * since) ** 2)) * COURANT * cells

    def step(fields: Any, current: jax.Array) -> tuple[Any, jax.Array]:
        ex, ey, hx, hy = fields
        e = ex + ey
        hx = keep_hx * hx - take_hx * (jnp.roll(e, -1, 1) - e)
        hy = keep_hy * hy + take_hy * (jnp.roll(e, -1, 0) - e)
        ex = keep_ex * ex + take_ex / epsilon * (hy - jnp.roll(hy, 1, 0))
        ey = keep_ey * ey - take_ey / epsilon * (hx - jnp.roll(hx, 1, 1))
        ex = ex.at[source].add(-current / epsilon[source])
        return (ex, ey, hx, hy), (ex + ey)[receivers]

    def segment(fields: Any, current: jax.Array) -> tuple[Any, jax.Array]:
        return lax.scan(step, fields, current)

    segment = jax.checkpoint(segment) if segments > 1 else segment
    start = (jnp.zeros(epsilon.shape),) * 4
    fields, signals = lax.scan(segment, start, jnp.asarray(current.reshape(segments, -1)))
    return signals.reshape(len(times), -1), fields[0] + fields[1]


def analytic(distance: float, times: np.ndarray, index: float) -> np.ndarray:
    """Convolve the source with H(t - s) / (2 pi sqrt(t² - s²)), for a travel time s of light; here t = s cosh(u)."""
    u = np.linspace(0, 4, 2_001)
    since = times[:, None] - index * distance * np.cosh(u) - DELAY
    return np.trapezoid((1 - 2 * (np.pi * since) ** 2) * np.exp(-((np.pi * since) ** 2)), u) / (2 * np.pi)


# 1. Comparison with the analytic wave

DISTANCES = np.array([1.0, 2.0, 3.0, 4.0] * 2)
RECEIVERS = np.array([(r, 0) for r in DISTANCES[:4]] + [(0.6 * r, 0.8 * r) for r in DISTANCES[4:]])


def one_source(cells: int, index: float, margin: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return times and signals in a homogeneous medium, which extends by `margin` on all sides."""
    times = moments(DELAY + 4 * index + 1.5, cells)
    medium = index**2 * vacuum(6 + 2 * margin, 5 + 2 * margin, cells)
    source = np.array([1.0, 1.0]) + margin
    run = jax.jit(lambda medium: wave(medium, place(source, cells), place(source + RECEIVERS, cells), times, cells)[0])
    return times, np.asarray(run(medium))


def arrival(times: np.ndarray, signal: np.ndarray) -> float:
    """Return the time of the peak of a signal, by a parabola through the three highest samples."""
    k = int(signal.argmax())
    before, at, after = signal[k - 1 : k + 2]
    return float(times[k] + 0.5 * (before - after) / (before - 2 * at + after) * (times[1] - times[0]))


def against_the_analytic_wave(cells: Sequence[int]) -> dict[str, Any]:
    rows, found = [], {}
    for index, name in ((1.0, "vacuum"), (2.0, "permittivity 4")):
        for each in cells:
            times, signals = one_source(each, index)
            exact = np.stack([analytic(r, times, index) for r in DISTANCES], axis=1)
            deviation = float((np.linalg.norm(signals - exact, axis=0) / np.linalg.norm(exact, axis=0)).max())
            speed = 1 / np.polyfit(DISTANCES, [arrival(times, signal) for signal in signals.T], 1)[0]
            decay = np.polyfit(np.log(DISTANCES), np.log(np.abs(signals).max(axis=0)), 1)[0]
            rows.append((name, each, f"{speed:.4f}", f"{decay:.3f}", f"{deviation:.2%}"))
            found[name, each] = {"times": times, "signals": signals, "exact": exact, "deviation": deviation}
        check(f"the error of the speed in {name}", abs(speed * index - 1), 0.01 * max(1, (40 / each) ** 2))
        if index == 1:
            check("the error of the decay exponent", abs(decay + 0.5), 0.01)
            order = np.log2(found[name, cells[-2]]["deviation"] / deviation) / np.log2(cells[-1] / cells[-2])
            check("the difference of the order from 2", abs(order - 2), 0.2)
    show(
        "1. Comparison with the analytic wave, at 1 to 4 wavelengths",
        ("medium", "cells per wavelength", "speed", "decay exponent", "largest error of a signal"),
        rows,
    )
    near, (_, far) = found["vacuum", cells[0]]["signals"], one_source(cells[0], 1.0, margin=3.5)
    back = check("the reflection of the layer", float(np.abs(near - far).max() / np.abs(far).max()), 5e-3)
    console.print(f"Order of the error in vacuum: {order:.2f}. Reflected by the layer: {back:.1e} of the wave.")
    return found


# 2. Many sources


def milliseconds(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median time of each call; the calls alternate."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def built(fun: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], float, float]:
    """Return the compiled function, the seconds of its compilation, and the MiB of its temporaries."""
    start = time.perf_counter()
    compiled = jax.jit(fun).lower(*args).compile()
    return compiled, time.perf_counter() - start, compiled.memory_analysis().temp_size_in_bytes / 2**20


def many_sources(sources: int, rounds: int) -> dict[str, dict[str, float]]:
    """Time random sources in a small and a larger room, with eight receivers, for each method."""
    cells, found, rows, deviation = 10, {}, [], 0.0
    for side in (1, 6):
        epsilon, times = vacuum(side, side, cells), moments(DELAY + side, cells)
        at = jnp.asarray(place(np.random.default_rng(0).uniform(0, side, (sources, 2)), cells))

        def signals(source: jax.Array, epsilon: Any = epsilon, times: Any = times, heard: Any = at[:8]) -> jax.Array:
            return wave(epsilon, source, heard, times, cells)[0]

        ways = {
            "one by one": built(signals, at[0]),
            "vmap": built(vmap(signals), at),
            f"vmap, chunk_size={CHUNK}": built(vmap(signals, chunk_size=CHUNK), at),
        }
        if side > 1:
            ways[f"vmap, memory_budget={BUDGET}"] = built(vmap(signals, memory_budget=BUDGET), at)
        calls = {name: lambda way=way, at=at: way(at) for name, (way, *_) in ways.items()}
        calls["one by one"] = lambda one=ways["one by one"][0], at=list(at): jnp.stack([one(each) for each in at])
        outs = [np.asarray(call()) for call in calls.values()]
        deviation = max(deviation, *(np.abs(out - outs[0]).max() / np.abs(outs[0]).max() for out in outs))
        grid = " × ".join(map(str, epsilon.shape))
        found[grid] = milliseconds(calls, rounds)
        for name, (_, seconds, mebibytes) in ways.items():
            rows.append((grid, name, f"{seconds:.1f}", f"{found[grid][name]:.1f}", f"{mebibytes:.2f}"))
    head = ("cells", "", "compile, s", "run, ms", "temporaries, MiB")
    show(f"2. {sources} sources, {len(times)} steps in the larger room", head, rows)
    console.print(
        f"Signals of all methods differ by at most {check('the difference of methods', deviation, 1e-5):.0e}."
    )
    return found


# 3. and 4. The permittivity between antennas


class Scene:
    """A ring of antennas around a window of unknown permittivity; one sends at a time, and all receive."""

    def __init__(self, cells: int, antennas: int, segments: int) -> None:
        self.cells, self.segments = cells, segments
        angle = 2 * np.pi * np.arange(antennas) / antennas
        self.antennas = place(2 + 1.6 * np.stack([np.cos(angle), np.sin(angle)], axis=1), cells)
        self.empty, self.window = vacuum(4, 4, cells), slice(*place((1, 3), cells))
        self.times = moments(DELAY + 5, cells, segments)
        low, high, more = (round(part * cells) for part in (0.5, 1.3, 0.2))
        self.none = jnp.zeros((2 * cells, 2 * cells))
        self.hidden = self.none.at[low:high, low + more : high + more].set(0.5)

    def medium(self, change: jax.Array) -> jax.Array:
        """Return the permittivity of the whole grid, given the excess over 1 in the window."""
        return self.empty.at[self.window, self.window].add(change)

    def signals(self, change: jax.Array, segments: int | None = None) -> jax.Array:
        """Return the signals of all receivers for each sender, (senders, steps, receivers)."""
        medium, segments = self.medium(change), segments or self.segments
        return vmap(lambda at: wave(medium, at, self.antennas, self.times, self.cells, segments)[0])(self.antennas)

    def measure(self, noise: float) -> tuple[jax.Array, jax.Array]:
        """Return signals of the hidden square, with noise relative to its effect, and the misfit of an empty window."""
        signals = jax.jit(self.signals)
        empty, full = signals(self.none), signals(self.hidden)
        exchanged = float(jnp.abs(full - full.transpose(2, 1, 0)).max() / jnp.abs(full).max())
        check("the difference between exchanged antennas", exchanged, 1e-10)
        console.print(f"\nReciprocity: signals differ by {exchanged:.0e} if sender and receiver are exchanged.")
        full += noise * jnp.std(full - empty) * np.random.default_rng(2).normal(size=full.shape)
        return full, jnp.sum((full - empty) ** 2)

    def misfit(self, change: jax.Array, measured: Any, segments: int | None = None) -> jax.Array:
        """Return the squared difference to the measured signals, relative to that of an empty window."""
        return jnp.sum((self.signals(change, segments) - measured[0]) ** 2) / measured[1]


def gradients(scene: Scene, measured: Any, rounds: int) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Return the misfit and its gradient in time segments, checked against storing all steps and finite differences."""
    ways = {
        name: built(value_and_grad(lambda change, n=n: scene.misfit(change, measured, n)), scene.none)
        for name, n in (("all steps stored", 1), (f"{scene.segments} segments", scene.segments))
    }
    (kept, *_), (gradient, *_) = ways.values()
    change, middle = 0.1 * jnp.asarray(np.random.default_rng(1).uniform(size=scene.none.shape)), scene.cells
    slope, deviation = gradient(change)[1], []
    for cell in ((0, 0), (middle // 2, middle), (middle, middle), (middle, 2 * middle - 1)):
        up, down = (float(gradient(change.at[cell].add(by))[0]) for by in (1e-4, -1e-4))
        deviation.append(abs(float(slope[cell]) / ((up - down) / 2e-4) - 1))
    otherwise = float(jnp.abs(kept(change)[1] - slope).max() / jnp.abs(slope).max())
    check("the difference of the gradient in segments", otherwise, 1e-10)
    check("the difference from central differences", max(deviation), 1e-6)
    taken = milliseconds({name: lambda way=way: way(change) for name, (way, *_) in ways.items()}, rounds)
    show(
        f"3. The gradient for {change.size} unknowns, {len(scene.antennas)} sources and {len(scene.times)} steps",
        ("", "compile, s", "run, ms", "temporaries, MiB"),
        [(name, f"{way[1]:.1f}", f"{taken[name]:.0f}", f"{way[2]:.1f}") for name, way in ways.items()],
    )
    console.print(f"At four cells it differs from central differences by at most {max(deviation):.0e}.")
    return gradient


def find(scene: Scene, gradient: Callable[..., Any], steps: int) -> tuple[np.ndarray, list[float]]:
    """Find the excess permittivity of the window with Adam; return it, and the misfits before and after all steps."""
    optimizer = optax.adam(0.03)

    @jax.jit
    def update(change: jax.Array, slope: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        updates, state = optimizer.update(slope, state)
        return jnp.maximum(0, change + updates), state  # the permittivity is at least that of vacuum

    change, state, values = scene.none, optimizer.init(scene.none), []
    for _ in tqdm(range(steps), desc="finding the square", leave=False):
        value, slope = gradient(change)
        change, state = update(change, slope, state)
        values.append(float(value))
    return np.asarray(change), [*values, float(gradient(change)[0])]


def draw(path: Path, scene: Scene, waves: dict[Any, Any], times: Any, change: np.ndarray, misfits: list[float]) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(13, 7.6), layout="constrained")
    (field, signal, error), (true, found, bars) = axes

    fine = Scene(40, len(scene.antennas), 1)
    medium, until = fine.medium(fine.hidden), moments(DELAY + 1.9, 40)
    shot = np.asarray(jax.jit(lambda m: wave(m, fine.antennas[0], fine.antennas, until, 40)[1])(medium))
    extent, top = (-LAYER, 4 + LAYER) * 2, np.quantile(np.abs(shot), 0.995)
    field.imshow(shot, extent=extent, origin="lower", cmap="RdBu", vmin=-top, vmax=top)
    field.contour(medium, levels=[1.25], extent=extent, colors="black", linewidths=1)
    x, y = (fine.antennas / 40 - LAYER).T
    field.plot(y[1:], x[1:], "o", color="black", markersize=3)
    field.plot(y[0], x[0], "*", color="black", markersize=12)
    field.set(title="Wave from one antenna (★), hidden square", xlabel="wavelengths", ylabel="wavelengths")
    field.set(xlim=(0, 4), ylim=(0, 4), xticks=range(5), yticks=range(5))

    best = max(cells for _, cells in waves)
    one = waves["vacuum", best]
    for k, color in ((0, "tab:blue"), (1, "tab:orange"), (3, "tab:green")):
        signal.plot(one["times"], one["signals"][:, k], color=color, linewidth=4, alpha=0.5, label=f"distance {k + 1}")
        signal.plot(
            one["times"], one["exact"][:, k], color="black", linewidth=0.9, label="analytic" if k == 3 else None
        )
    signal.set(title=f"Received signals, {best} cells per wavelength", xlabel="time (periods)", ylabel="electric field")
    for name, marker in (("vacuum", "o"), ("permittivity 4", "s")):
        cells = np.array([each for medium, each in waves if medium == name])
        deviation = np.array([waves[name, each]["deviation"] for each in cells])
        error.plot(cells, deviation, marker=marker, label=name)
        error.plot(cells, deviation[-1] * (cells[-1] / cells) ** 2, color="black", linewidth=0.8, linestyle=":")
    error.plot([], [], color="black", linewidth=0.8, linestyle=":", label="second order")
    error.set(title="Error of the signals", xlabel="cells per wavelength", ylabel="relative L2 error")
    error.set(xscale="log", yscale="log")
    error.set_xticks(cells, [str(each) for each in cells])
    error.minorticks_off()
    error.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1, decimals=None))

    for panel, values, title in (
        (true, np.asarray(scene.hidden), "True permittivity"),
        (found, change, f"Reconstruction after {len(misfits) - 1} steps"),
    ):
        image = panel.imshow(1 + values, extent=(1, 3, 1, 3), origin="lower", vmin=1, vmax=1.6, cmap="viridis")
        panel.set(title=title, xlabel="wavelengths", ylabel="wavelengths", xticks=(1, 2, 3), yticks=(1, 2, 3))
    figure.colorbar(image, ax=found, label="permittivity")

    names = list(times[next(reversed(times))])
    for k, (grid, taken) in enumerate(times.items()):
        shown = [(names.index(name), ms / taken["one by one"]) for name, ms in taken.items()]
        rows, ratios = np.array(shown).T
        drawn = bars.barh(rows + 0.4 * (k - 0.5), ratios, 0.36, label=f"{grid} cells")
        bars.bar_label(drawn, [f"{ms:.0f} ms" for ms in taken.values()], padding=3, fontsize=8)
    bars.set_yticks(range(len(names)), ["one by one", "vmap", f"chunks of {CHUNK}", f"budget {BUDGET}"])
    bars.set_ylim(len(names) + 0.1, -0.6)
    bars.margins(x=0.25)
    bars.set(title="Time of all sources", xlabel="time / time one by one")
    for panel, corner in ((signal, "upper right"), (error, "upper right"), (bars, "lower right")):
        panel.legend(loc=corner, fontsize=8, frameon=False, ncols=2 if panel is bars else 1)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, bbox_inches="tight")  # the layout ignores the labels of square panels
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cells", type=int, nargs="+", default=[20, 40, 80], help="per wavelength, multiples of 10 (default 20 40 80)"
    )
    parser.add_argument("--sources", type=int, default=48, help="number of sources (default 48)")
    parser.add_argument("--antennas", type=int, default=12, help="antennas in the ring around the square (default 12)")
    parser.add_argument("--steps", type=int, default=40, help="steps of the reconstruction (default 40)")
    parser.add_argument("--rounds", type=int, default=5, help="timed calls, of which the median is taken (default 5)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory for the picture")
    options = parser.parse_args(arguments)
    for name in ("sources", "antennas", "steps", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, but got {getattr(options, name)}")
    if len(set(options.cells)) < 2 or any(each < 10 or each % 10 for each in options.cells):
        parser.error(f"--cells must be two or more multiples of 10, but got {options.cells}")
    options.out.mkdir(parents=True, exist_ok=True)

    waves = against_the_analytic_wave(sorted(set(options.cells)))
    times = many_sources(options.sources, options.rounds)
    noise = 0.05
    with jax.enable_x64(True):
        scene = Scene(10, options.antennas, segments=10)
        gradient = gradients(scene, scene.measure(noise), options.rounds)
        change, misfits = find(scene, gradient, options.steps)
    hidden = np.asarray(scene.hidden)
    deviation = np.linalg.norm(change - hidden) / np.linalg.norm(hidden)
    console.print(
        f"4. After {options.steps} steps the misfit is {misfits[-1]:.4f} of its initial value "
        f"(noise alone: {noise**2:.4f}), and the relative error of the map is {deviation:.0%}."
    )
    check("the misfit", misfits[-1], 0.01 if options.steps >= 40 and options.antennas >= 12 else misfits[0])
    picture = options.out / "maxwell.png"
    draw(picture, scene, waves, times, change, misfits)
    console.print(f"Picture: {picture}", markup=False)


if __name__ == "__main__":
    main()
