"""What a clipped sum of per-sample gradients costs, against the ordinary gradient and other ways to it.

python benchmarks/privacy.py            measures, and rewrites its tables of benchmarks/README.md
python benchmarks/privacy.py --smoke    runs everything small and once, and writes nothing
"""

from __future__ import annotations

import argparse
import itertools
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import interleaved, publish, ratio, table
from jax import lax

from plurax.transforms import clipped_grad

try:
    import jax_privacy
except ModuleNotFoundError:
    jax_privacy = None

MIB = 2**20


class Job(NamedTuple):
    """A loss of parameters, of inputs and of labels, with all three."""

    loss: Callable[..., jax.Array]
    params: Any
    x: jax.Array
    y: jax.Array


def normal(generator: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(generator.normal(size=shape) / shape[0] ** 0.5, jnp.float32)


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def mlp(generator: np.random.Generator, batch: int, sizes: tuple[int, ...]) -> Job:
    params = [(normal(generator, n, m), jnp.zeros(m)) for n, m in itertools.pairwise(sizes)]

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for weight, bias in params[:-1]:
            x = jax.nn.relu(x @ weight + bias)
        return cross_entropy(x @ params[-1][0] + params[-1][1], y)

    return Job(loss, params, normal(generator, batch, sizes[0]), labels(generator, batch, sizes[-1]))


def cnn(generator: np.random.Generator, batch: int, side: int) -> Job:
    """Convolutions of 32 and 64 channels, pooling, 9216-128-10 (at 28 by 28 pixels)."""
    flat = 64 * ((side - 4) // 2) ** 2
    params = {
        "conv1": (normal(generator, 3, 3, 1, 32), jnp.zeros(32)),
        "conv2": (normal(generator, 3, 3, 32, 64) / 10, jnp.zeros(64)),
        "dense1": (normal(generator, flat, 128), jnp.zeros(128)),
        "dense2": (normal(generator, 128, 10), jnp.zeros(10)),
    }

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for name in ("conv1", "conv2"):
            kernel, bias = params[name]
            x = lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu(x + bias)
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").reshape(len(x), -1)
        x = jax.nn.relu(x @ params["dense1"][0] + params["dense1"][1])
        return cross_entropy(x @ params["dense2"][0] + params["dense2"][1], y)

    return Job(loss, params, normal(generator, batch, side, side, 1), labels(generator, batch, 10))


def lstm(generator: np.random.Generator, batch: int, length: int, inputs: int, hidden: int) -> Job:
    params = {
        "w": normal(generator, inputs, 4 * hidden),
        "u": normal(generator, hidden, 4 * hidden),
        "b": jnp.zeros(4 * hidden),
        "out": normal(generator, hidden, 10),
    }

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def step(carry: Any, x: jax.Array) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(x @ params["w"] + h @ params["u"] + params["b"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zeros = jnp.zeros((len(x), hidden))
        (h, _), _ = lax.scan(step, (zeros, zeros), x.swapaxes(0, 1))
        return cross_entropy(h @ params["out"], y)

    return Job(loss, params, normal(generator, batch, length, inputs), labels(generator, batch, 10))


def gpt(generator: np.random.Generator, batch: int, length: int, layers: int, width: int, vocabulary: int) -> Job:
    """Blocks of causal attention in four heads, with a tied embedding."""
    heads = 4

    def block() -> dict[str, Any]:
        return {
            "qkv": (normal(generator, width, 3 * width), jnp.zeros(3 * width)),
            "out": (normal(generator, width, width), jnp.zeros(width)),
            "up": (normal(generator, width, 4 * width), jnp.zeros(4 * width)),
            "down": (normal(generator, 4 * width, width), jnp.zeros(width)),
            "norm1": (jnp.ones(width), jnp.zeros(width)),
            "norm2": (jnp.ones(width), jnp.zeros(width)),
        }

    params = {
        "embedding": normal(generator, vocabulary, width),
        "position": normal(generator, length, width),
        "blocks": [block() for _ in range(layers)],
    }

    def norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
        return jax.nn.standardize(x) * scale + shift

    def dense(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        return x @ weight + bias

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = params["embedding"][x] + params["position"]
        mask = jnp.tril(jnp.ones((length, length), bool))
        for p in params["blocks"]:
            parts = jnp.split(dense(norm(h, *p["norm1"]), *p["qkv"]), 3, axis=-1)
            q, k, v = (part.reshape(len(x), length, heads, -1) for part in parts)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width / heads) ** 0.5
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
            h += dense(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(h.shape), *p["out"])
            h += dense(jax.nn.gelu(dense(norm(h, *p["norm2"]), *p["up"])), *p["down"])
        return cross_entropy(h @ params["embedding"].T, y)

    x, y = (jnp.asarray(generator.integers(0, vocabulary, (batch, length))) for _ in range(2))
    return Job(loss, params, x, y)


def labels(generator: np.random.Generator, batch: int, classes: int) -> jax.Array:
    return jnp.asarray(generator.integers(0, classes, batch))


def candidates(job: Job, naive: bool) -> dict[str, Callable[..., Any]]:
    """Functions of the parameters, the inputs and the labels."""
    options: dict[str, Any] = {"l2_clip_norm": 1.0, "batch_argnums": (1, 2)}
    found: dict[str, Callable[..., Any]] = {"ordinary gradient": jax.grad(job.loss)}
    for method in ("book_keeping", "ghost"):
        found[f'clipped_grad, "{method}"'] = clipped_grad(job.loss, method=method, **options)
    found['clipped_grad, "vmap", one at a time'] = clipped_grad(job.loss, method="vmap", microbatch_size=1, **options)
    few = clipped_grad(job.loss, method="book_keeping", microbatch_size=4, **options)
    found['clipped_grad, "book_keeping", four at a time'] = few
    if naive:
        found["vmap of grad, then clipped"] = clipped_grad(job.loss, method="vmap", **options)
    if jax_privacy is not None:
        found["jax_privacy, one at a time"] = jax_privacy.clipped_grad(job.loss, microbatch_size=1, **options)
        if naive:
            found["jax_privacy"] = jax_privacy.clipped_grad(job.loss, **options)
    return found


def measure(job: Job, naive: bool, rounds: int, seconds: float) -> list[dict[str, Any]]:
    compiled, traced = {}, {}
    for name, fun in candidates(job, naive).items():
        start = time.perf_counter()
        lowered = jax.jit(lambda *args, fun=fun: fun(*args)).lower(job.params, job.x, job.y)
        traced[name] = time.perf_counter() - start
        compiled[name] = lowered.compile()
    calls = {name: partial(run, job.params, job.x, job.y) for name, run in compiled.items()}
    times = interleaved(calls, rounds=rounds, seconds=seconds)
    memory = {name: run.memory_analysis().temp_size_in_bytes for name, run in compiled.items()}
    first = memory["ordinary gradient"]
    return [
        {
            "": name,
            "ms": f"{found['median_ms']:.2f}",
            "times the ordinary": f"{ratio(times, name, 'ordinary gradient'):.2f}",
            "temporaries (MiB)": f"{memory[name] / MIB:.2f}",
            "times the ordinary's": f"{memory[name] / first:.2f}",
            "tracing and lowering (s)": f"{traced[name]:.2f}",
        }
        for name, found in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="run everything small and once, write nothing")
    smoke = parser.parse_args().smoke
    device, generator = jax.devices()[0], np.random.default_rng(0)
    about = (
        f"jax {jax.__version__}, {'jax-privacy' if jax_privacy else 'without jax-privacy'}, "
        f"Python {platform.python_version()}, {device.platform} ({device.device_kind})."
    )
    if smoke:
        jobs = {"MLP": mlp(generator, 4, (6, 5, 3)), "LSTM": lstm(generator, 4, 3, 2, 4)}
    else:
        jobs = {
            "MLP 784-512-256-10, batch 256": mlp(generator, 256, (784, 512, 256, 10)),
            "CNN of PyTorch's tutorial, batch 64": cnn(generator, 64, 28),
            "LSTM, 32 steps of 64 numbers, hidden 128, batch 64": lstm(generator, 64, 32, 64, 128),
            "GPT, 4 layers of 256, 128 tokens, tied vocabulary 8192, batch 16": gpt(generator, 16, 128, 4, 256, 8192),
        }
    sections, results = [about], {"about": about}
    for title, job in jobs.items():
        rows = measure(job, title.startswith("MLP"), *((2, 0.001) if smoke else (7, 0.1)))
        results[title] = rows
        sections.append(f"### {title}\n\n{table(rows)}")
        print(title, table(rows), sep="\n", flush=True)
    if not smoke:
        publish("privacy", "\n\n".join(sections), results)


if __name__ == "__main__":
    main()
