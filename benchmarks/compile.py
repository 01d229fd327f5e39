"""Measure tracing, compilation and run time of repeated layers, many array lengths, and new processes.

python benchmarks/compile.py            measure, and render the pages
python benchmarks/compile.py --smoke    run small cases once; write nothing
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _measure import Report, Tables, arguments, claim, interleaved, ratio, spread
from _repeated import convolutions, gradient, layers, lengths, parts
from flax import nnx
from jax import lax
from tqdm import tqdm

from plurax.transforms.modules import freeze
from plurax.transforms.program import aot, enable_compile_cache

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def loop(smoke: bool) -> Program:
    """Return a Python loop that becomes one long program, as in MindSpore's example of its cache."""

    def steps(x: jax.Array, y: jax.Array) -> jax.Array:
        out = x
        for _ in range(20 if smoke else 200):
            out = x + x * y + out
        return out

    return steps, (jnp.full((4, 16), 0.5), jnp.full((4, 16), 0.1))


def cnn(smoke: bool) -> Program:
    """Return the gradient of a small CNN with respect to its parameters."""
    rng = np.random.default_rng(0)
    width, batch = (2, 3) if smoke else (32, 16)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(0.1 * rng.normal(size=shape), jnp.float32)

    params = {
        "conv1": normal(3, 3, 1, width),
        "conv2": normal(3, 3, width, 2 * width),
        "dense1": normal(288 * width, 4 * width),
        "dense2": normal(4 * width, 10),
    }
    convolve = partial(
        lax.conv_general_dilated, window_strides=(1, 1), padding="VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )

    def loss(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        x = jax.nn.relu(convolve(x, params["conv1"]))
        x = jax.nn.relu(convolve(x, params["conv2"]))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = jax.nn.relu(x.reshape(len(x), -1) @ params["dense1"]) @ params["dense2"]
        return -jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1).mean()

    return jax.grad(loss), (params, normal(batch, 28, 28, 1), jnp.arange(batch) % 10)


PROGRAMS = {"loop of 200 steps": loop, "gradient of a CNN": cnn}
WAYS: dict[str, Callable[[Callable[..., Any], str], Callable[..., Any]]] = {
    "jax.jit": lambda fun, _: jax.jit(fun),
    "jax.jit, enable_compile_cache": lambda fun, directory: enable_compile_cache(directory) and jax.jit(fun),
    "aot": lambda fun, directory: aot(fun, directory),
    "aot, key": lambda fun, directory: aot(fun, directory, key="1"),
}


def first_results(program: str, way: str, directory: str, smoke: bool) -> list[float]:
    """Return the milliseconds to the first result, after imports and arguments are ready, and of each later call."""
    fun, args = PROGRAMS[program](smoke)
    jax.block_until_ready(args)
    moments = [time.perf_counter()]
    called = WAYS[way](fun, directory)
    for _ in range(3):
        jax.block_until_ready(called(*args))
        moments.append(time.perf_counter())
    return [(then - before) * 1e3 for before, then in pairwise(moments)]


def in_new_process(*args: str, smoke: bool) -> list[float]:
    """Run `first_results` in a separate process."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    command = [sys.executable, __file__, "--first-results", *args, *(["--smoke"] if smoke else [])]
    return json.loads(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)


def starts(smoke: bool, rounds: int) -> Tables:
    """Measure the time to the first result in a new process, after an earlier process has run the program."""
    rows, claims = [], []
    for program in list(PROGRAMS)[: 1 if smoke else None]:
        ways = list(WAYS)[:: 3 if smoke else 1]
        times: dict[str, dict[str, Any]] = {way: {"turns": [], "second": [], "again": []} for way in ways}
        with tempfile.TemporaryDirectory() as directory:
            for turn in tqdm(range(-1, rounds), unit="round", leave=False):
                # The first processes write the caches; `jax.jit` has none.
                for way in ways[1:] if turn < 0 else random.sample(ways, len(ways)):
                    milliseconds = in_new_process(program, way, os.path.join(directory, way), smoke=smoke)
                    if turn >= 0:
                        for turns, each in zip(times[way].values(), milliseconds, strict=True):
                            turns.append(each)
        for way, found in times.items():
            found["ms"] = spread(found["turns"])
            rows.append(
                {
                    "program": program,
                    "compiled by": way,
                    "first result (ms)": found["ms"],
                    "speed-up over jax.jit": ratio(times, "jax.jit", way),
                    "second (ms)": spread(found["second"]),
                    "later call (ms)": spread(found["again"]),
                }
            )
        others = [way for way in ways if not way.startswith("aot")]
        claims += [claim(times, way, others, program) for way in ways if way not in others]
    return rows, claims


def calls(smoke: bool, rounds: int, seconds: float) -> Tables:
    """Measure the overhead of later calls, with a trivial program."""
    rows, claims = [], []
    for count in (1, 20):
        args = [jnp.full((3,), float(i)) for i in range(count)]

        def total(*args: jax.Array) -> jax.Array:
            return sum(args, jnp.float32(1.0))  # uses all: `jax.jit` drops unused arrays, `aot` keeps them

        with tempfile.TemporaryDirectory() as directory:
            ways = {
                way: partial(repeat, WAYS[way](total, directory), args, 10 if smoke else 1000)
                for way in ("jax.jit", "aot, key")
            }
            times = interleaved(ways, rounds=rounds, seconds=seconds)
        # Each measurement has a thousand calls, so its milliseconds are the microseconds of one call.
        rows.append({"arrays": count} | {f"{way} (µs)": found["ms"] for way, found in times.items()})
        claims.append(claim(times, "aot, key", ["jax.jit"], f"1,000 calls with {count} array{'s' * (count > 1)}"))
    return rows, claims


def frozen(smoke: bool, rounds: int, seconds: float) -> Tables:
    """Compare gradients with and without the parameters of the first layers."""
    width, batch, rng = (8, 4, nnx.Rngs(0)) if smoke else (256, 256, nnx.Rngs(0))
    model = nnx.Sequential(*(nnx.Linear(width, width, rngs=rng) for _ in range(8)))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(batch, width)), jnp.float32)

    def cut(model: Any, x: jax.Array) -> jax.Array:
        for i, layer in enumerate(model.layers):
            x = layer(jax.lax.stop_gradient(x) if i == 6 else x)
        return x

    ways = {
        "all of 8 layers": gradient(model, lambda model, x: model(x), x),
        "first 6 frozen": gradient(freeze(model, [f"layers.{i}" for i in range(6)]), lambda model, x: model(x), x),
        "first 6 with stop_gradient": gradient(model, cut, x),
    }
    programs = {name: jax.jit(fun).lower(*args).compile() for name, (fun, args) in ways.items()}
    times = interleaved(
        {name: partial(programs[name], *args) for name, (_, args) in ways.items()}, rounds=rounds, seconds=seconds
    )
    rows = [
        {
            "gradient": name,
            "MFLOP": program.cost_analysis()["flops"] / 1e6,
            "arrays in the gradient": program.out_tree.num_leaves - 1,
            "ms": times[name]["ms"],
            "time / all": ratio(times, name, "all of 8 layers"),
        }
        for name, program in programs.items()
    ]
    return rows, [claim(times, "first 6 frozen", ["first 6 with stop_gradient"])]


def repeat(fun: Callable[..., Any], args: list[Any], number: int) -> Any:
    for _ in range(number):
        out = fun(*args)
    return out


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--first-results", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    smoke = options.smoke
    if options.first_results:
        print(json.dumps(first_results(*options.first_results, smoke)))
        return
    rounds, seconds = (2, 0.0) if smoke else (15, 0.1)
    # Without the cache on disk, repeated compilations are measured in full.
    jax.config.update("jax_enable_compilation_cache", smoke)
    Report("compile", options, "flax").measure(
        {
            "Layers, value and gradient": lambda: layers(smoke, rounds, seconds),
            "Layers with convolutions, value and gradient": lambda: convolutions(smoke, rounds),
            "Micro-batches, value and gradient": lambda: parts(smoke, rounds, seconds),
            "Arrays of many lengths": lambda: lengths(smoke),
            "Frozen parameters": lambda: frozen(smoke, rounds, seconds),
            "Time to the first result in a new process": lambda: starts(smoke, 1 if smoke else rounds),
            "Later calls": lambda: calls(smoke, rounds, seconds),
        }
    )


if __name__ == "__main__":
    main()
