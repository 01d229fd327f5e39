"""Measure repeated layers, micro-batches, and arrays of many lengths. Part of `compile.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _measure import Tables, claim, instructions, interleaved, ratio, spread
from flax import nnx

from plurax.transforms.program import accumulate, bucketed, scan_layers, stack_layers


class Block(nnx.Module):
    """A transformer block."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm, self.attention = nnx.LayerNorm(width, rngs=rngs), nnx.MultiHeadAttention(4, width, rngs=rngs)
        self.second, self.up = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x), mask=mask, decode=False)
        return x + self.down(nnx.gelu(self.up(self.second(x))))


class Convolutional(nnx.Module):
    """A residual block with two convolutions."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm = nnx.GroupNorm(width, num_groups=2, rngs=rngs)
        self.first, self.second = (nnx.Conv(width, width, (3, 3), rngs=rngs) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.second(nnx.relu(self.first(self.norm(x))))


def gradient(model: Any, forward: Callable[..., jax.Array], *args: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a function of a loss and its gradient, for `jax.jit`, and its arguments."""
    split: Any = nnx.split(model, nnx.Param, ...)
    graphdef, params, rest = split

    def loss(params: Any, rest: Any, *args: Any) -> jax.Array:
        return (forward(nnx.merge(graphdef, params, rest), *args) ** 2).mean()

    return jax.value_and_grad(loss), (params, rest, *args)


def in_a_loop(layers: Any, x: jax.Array, *shared: Any) -> jax.Array:
    for layer in layers:
        x = layer(x, *shared)
    return x


def by_flax(layers: Any, x: jax.Array, *shared: Any) -> jax.Array:
    @partial(nnx.scan, in_axes=(0, nnx.Carry, *[None] * len(shared)), out_axes=nnx.Carry)
    def body(layer: Any, x: jax.Array, *shared: Any) -> jax.Array:
        return layer(x, *shared)

    return body(layers, x, *shared)


def scanned(layers: Any, x: jax.Array, *shared: Any, **options: Any) -> jax.Array:
    return scan_layers(layers, x, *shared, **options)[0]


def compilations(programs: dict[str, tuple[Any, tuple[Any, ...]]], rounds: int) -> dict[str, dict[str, Any]]:
    """Measure the seconds to trace and to compile each program, alternately; return them with the programs."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    found = {}
    for _ in range(rounds):
        for name, (fun, args) in programs.items():
            jax.clear_caches()
            start = time.perf_counter()
            lowered = jax.jit(fun).lower(*args)
            traced = time.perf_counter()
            found[name] = lowered.compile()
            times[name].append((traced - start, time.perf_counter() - traced))
    return {
        name: {
            "program": found[name],
            "trace": spread(trace for trace, _ in pairs),
            "compile": spread(compiling for _, compiling in pairs),
        }
        for name, pairs in times.items()
    }


def compared(
    programs: dict[str, tuple[Any, tuple[Any, ...]]],
    what: str,
    first: str,
    own: dict[str, list[str]],
    rounds: int,
    compiles: int,
    seconds: float,
) -> Tables:
    """Compare compilation and run time of each program with the first; return rows, and claims for our own."""
    built = compilations(programs, compiles)
    calls = {name: partial(built[name]["program"], *args) for name, (_, args) in programs.items()}
    times = interleaved(calls, rounds=rounds, seconds=seconds)
    rows = [
        {
            what: name,
            "HLO lines": instructions(one["program"]),
            "trace (s)": one["trace"],
            "compile (s)": one["compile"],
            "temporaries (MiB)": one["program"].memory_analysis().temp_size_in_bytes / 2**20,
            "step (ms)": times[name]["ms"],
            f"step / {first}": ratio(times, name, first),
        }
        for name, one in built.items()
    ]
    there = {name: [other for other in others if other in times] for name, others in own.items() if name in times}
    return rows, [claim(times, name, others) for name, others in there.items() if others]


def layers(smoke: bool, rounds: int, seconds: float) -> Tables:
    """Compare transformer blocks in a loop and in a scan."""
    depth, width, length = (2, 8, 4) if smoke else (48, 128, 64)
    blocks = [Block(width, nnx.Rngs(i)) for i in range(depth)]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, length, width)), jnp.float32)
    mask = nnx.make_causal_mask(jnp.ones((4, length)))
    stack, policies = stack_layers(blocks), jax.checkpoint_policies
    programs = {
        "loop": gradient(nnx.List(blocks), in_a_loop, x, mask),
        "nnx.scan": gradient(stack.layer, by_flax, x, mask),
        "scan_layers, 2 blocks": gradient(stack_layers(blocks[:2]), scanned, x, mask),
        "scan_layers": gradient(stack, scanned, x, mask),
        "remat=True": gradient(stack, partial(scanned, remat=True), x, mask),
        "remat=dots_saveable": gradient(stack, partial(scanned, remat=policies.dots_saveable), x, mask),
        "remat=dots_saveable, unroll=2": gradient(
            stack, partial(scanned, remat=policies.dots_saveable, unroll=2), x, mask
        ),
        "unroll=2": gradient(stack, partial(scanned, unroll=2), x, mask),
        "unroll=4": gradient(stack, partial(scanned, unroll=4), x, mask),
    }
    programs = dict(list(programs.items())[:: 4 if smoke else 1])
    own = {"scan_layers": ["loop", "nnx.scan"]}
    return compared(programs, f"{depth} blocks", "loop", own, rounds, 1 if smoke else 3, seconds)


def convolutions(smoke: bool, rounds: int) -> Tables:
    """Compare blocks with convolutions in a loop and in a scan."""
    depth, width, side = (2, 4, 4) if smoke else (16, 32, 16)
    blocks = [Convolutional(width, nnx.Rngs(i)) for i in range(depth)]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, side, side, width)), jnp.float32)
    stack = stack_layers(blocks)
    programs = {
        "loop": gradient(nnx.List(blocks), in_a_loop, x),
        "nnx.scan": gradient(stack.layer, by_flax, x),
        "scan_layers": gradient(stack, scanned, x),
        "remat=True": gradient(stack, partial(scanned, remat=True), x),
    }
    programs = dict(list(programs.items())[:: 2 if smoke else 1])
    own = {"scan_layers": ["loop", "nnx.scan"]}
    return compared(programs, f"{depth} blocks of convolutions", "loop", own, min(rounds, 5), 1 if smoke else 3, 0.0)


def parts(smoke: bool, rounds: int, seconds: float) -> Tables:
    """Compare gradients of a batch with gradients accumulated over micro-batches."""
    size, width, length = (8, 8, 4) if smoke else (64, 64, 32)
    blocks = nnx.List([Block(width, nnx.Rngs(i)) for i in range(2)])
    graphdef, state = nnx.split(blocks)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(size, length, width)), jnp.float32)
    mask = jnp.tril(jnp.ones((length, length), bool))

    def loss(state: Any, x: jax.Array) -> jax.Array:
        return (in_a_loop(nnx.merge(graphdef, state), x, mask) ** 2).mean()

    step = jax.value_and_grad(loss)

    def written_out(state: Any, x: jax.Array, number: int) -> Any:
        found = [step(state, part) for part in jnp.split(x, number)]
        return jax.tree.map(lambda *each: sum(each) / number, *found)

    numbers = (2, 4) if smoke else (4, 16, 64)
    programs: dict[str, Any] = {"the whole batch": (step, (state, x))}
    programs |= {f"written out, {k}": (partial(written_out, number=k), (state, x)) for k in numbers[:2]}
    programs |= {f"accumulate, {k}": (accumulate(step, k), (state, x)) for k in numbers}
    programs[f"gradient of accumulate, {numbers[1]}"] = (
        jax.value_and_grad(accumulate(loss, numbers[1])),
        (state, x),
    )
    programs = dict(list(programs.items())[:: 3 if smoke else 1])
    own = {f"accumulate, {k}": [f"written out, {k}"] for k in numbers}
    return compared(programs, "micro-batches", "the whole batch", own, rounds, 1 if smoke else 3, seconds)


def lengths(smoke: bool) -> Tables:
    """Compare a function of arrays of many lengths with and without `bucketed`."""
    number = 5 if smoke else 200
    w = jnp.asarray(np.random.default_rng(1).normal(size=(16, 16)), jnp.float32)
    drawn = np.random.default_rng(0).integers(1, 257, number)
    data = np.random.default_rng(2).normal(size=(256, 16)).astype(np.float32)
    traces = [0]

    def masked(x: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.where(mask[:, None], jnp.tanh(x @ w) @ w, 0).sum(0)

    @jax.jit
    def raw(x: jax.Array) -> jax.Array:
        traces[0] += 1
        return masked(x, jnp.ones(len(x), bool))

    filled = bucketed(masked)
    rows, times = [], {}
    for name, fun, count in (("jax.jit", raw, lambda: traces[0]), ("bucketed", filled, lambda: filled.traces)):
        seconds = []
        for _ in range(2 if smoke else 21):
            start = time.perf_counter()
            for n in drawn:
                jax.block_until_ready(fun(data[:n]))
            seconds.append(time.perf_counter() - start)
        turns = [one * 1e3 / number for one in seconds[1:]]
        times[name] = {"turns": turns, "ms": spread(turns)}
        rows.append(
            {
                f"{number} lengths": name,
                "different lengths": len(set(drawn.tolist())),
                "compilations": count(),
                "first pass (s)": seconds[0],
                "later (ms per call)": times[name]["ms"],
            }
        )
    return rows, [claim(times, "bucketed", ["jax.jit"], "a compiled call")]
