"""Compare the clipped sum of per-sample gradients with the ordinary gradient and with other implementations.

python benchmarks/privacy.py               measure, and render the pages
python benchmarks/privacy.py --only GPT    measure the jobs with GPT in their titles; keep the other tables
python benchmarks/privacy.py --smoke       run small cases once; write nothing
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import Report, Tables, arguments, claim, interleaved, peer, ratio
from jax import lax

from plurax.transforms import clipped_grad

jax_privacy, torch, _opacus = peer("jax_privacy"), None, None
if peer("opacus") is not None:
    import _opacus
    import torch

MIB = 2**20
CLIP = 1.0
ORDINARY, BY_VMAP, OF_TORCH = "ordinary gradient", "by hand: vmap of grad", "torch, ordinary gradient"
OURS = 'clipped_grad, "auto"'


class Job(NamedTuple):
    """A loss of parameters, inputs and labels, with these arguments, and the name of the model in PyTorch.

    `model` and `loss_of_outputs` are its parts where a benchmark needs them.
    """

    loss: Callable[..., jax.Array]
    params: Any
    x: jax.Array
    y: jax.Array
    twin: str
    model: Callable[..., jax.Array] | None = None
    loss_of_outputs: Callable[..., jax.Array] | None = None

    @classmethod
    def of(cls, model: Callable[..., jax.Array], loss: Callable[..., jax.Array], params: Any, *rest: Any) -> Job:
        """Return the job of a model and a loss of its outputs."""
        return cls(lambda params, x, y: loss(model(params, x), y), params, *rest, model, loss)


class Way(NamedTuple):
    """A compiled call, its expected result, and its measurements."""

    call: Callable[[], Any]
    expected: Any = None
    tolerance: float = 1e-4
    temporaries: int | None = None
    tracing: float | None = None
    against: str = ORDINARY


def normal(generator: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(generator.normal(size=shape) / shape[0] ** 0.5, jnp.float32)


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def plain_cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1).mean()


def mlp(generator: np.random.Generator, batch: int, sizes: tuple[int, ...]) -> Job:
    params = [(normal(generator, n, m), jnp.zeros(m)) for n, m in itertools.pairwise(sizes)]

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for weight, bias in params[:-1]:
            x = jax.nn.relu(x @ weight + bias)
        return cross_entropy(x @ params[-1][0] + params[-1][1], y)

    return Job(loss, params, normal(generator, batch, sizes[0]), labels(generator, batch, sizes[-1]), "mlp")


def cnn(generator: np.random.Generator, batch: int, side: int) -> Job:
    """Return a CNN: convolutions of 32 and 64 channels, pooling, 9216-128-10 (for 28 by 28 pixels)."""
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

    return Job(loss, params, normal(generator, batch, side, side, 1), labels(generator, batch, 10), "cnn")


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

    return Job(loss, params, normal(generator, batch, length, inputs), labels(generator, batch, 10), "lstm")


def gpt(batch: int, length: int, layers: int, width: int, vocabulary: int, plain: bool = False) -> Job:
    """Return a GPT with four attention heads; the output head is tied to the embedding, unless `params` has a head.

    With `plain`, the loss uses `jax.nn.log_softmax` instead of optax.
    """
    generator, heads = np.random.default_rng(0), 4

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

    def model(params: Any, x: jax.Array) -> jax.Array:
        h = params["embedding"][x] + params["position"]
        mask = jnp.tril(jnp.ones((length, length), bool))
        for p in params["blocks"]:
            parts = jnp.split(dense(norm(h, *p["norm1"]), *p["qkv"]), 3, axis=-1)
            q, k, v = (part.reshape(len(x), length, heads, -1) for part in parts)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width / heads) ** 0.5
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
            h += dense(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(h.shape), *p["out"])
            h += dense(jax.nn.gelu(dense(norm(h, *p["norm2"]), *p["up"])), *p["down"])
        return h @ params.get("head", params["embedding"]).T

    x, y = (jnp.asarray(generator.integers(0, vocabulary, (batch, length))) for _ in range(2))
    return Job.of(model, plain_cross_entropy if plain else cross_entropy, params, x, y, "gpt")


def labels(generator: np.random.Generator, batch: int, classes: int) -> jax.Array:
    return jnp.asarray(generator.integers(0, classes, batch))


def clipped(loss: Callable[..., jax.Array], params: Any, x: jax.Array, y: jax.Array) -> Any:
    """Return the clipped gradient of one example, by hand."""
    gradient = jax.grad(loss)(params, x[None], y[None])
    factor = jnp.minimum(1, CLIP / optax.global_norm(gradient))
    return jax.tree.map(lambda leaf: leaf * factor, gradient)


def by_vmap(job: Job) -> Callable[..., Any]:
    def fun(params: Any, x: jax.Array, y: jax.Array) -> Any:
        gradients = jax.vmap(partial(clipped, job.loss), (None, 0, 0))(params, x, y)
        return jax.tree.map(lambda leaf: leaf.sum(0), gradients)

    return fun


def by_scan(job: Job) -> Callable[..., Any]:
    def fun(params: Any, x: jax.Array, y: jax.Array) -> Any:
        def step(total: Any, example: Any) -> Any:
            return jax.tree.map(jnp.add, total, clipped(job.loss, params, *example)), None

        return lax.scan(step, jax.tree.map(jnp.zeros_like, params), (x, y))[0]

    return fun


def by_python(job: Job) -> Way:
    """Return a Python loop with a call for each example, which adds to the sum in place."""

    def add(total: Any, params: Any, x: jax.Array, y: jax.Array) -> Any:
        return jax.tree.map(jnp.add, total, clipped(job.loss, params, x, y))

    one = compiled(add, job.params, job.params, job.x[0], job.y[0], donate_argnums=0)

    def call() -> Any:
        total = jax.tree.map(jnp.zeros_like, job.params)
        for example in zip(job.x, job.y, strict=True):
            total = one.call.func(total, job.params, *example)
        return total

    return one._replace(call=call)


def compiled(fun: Callable[..., Any], *args: Any, **options: Any) -> Way:
    start = time.perf_counter()
    lowered = jax.jit(lambda *args: fun(*args), **options).lower(*args)  # a new function, so it is traced again
    tracing = time.perf_counter() - start
    run = lowered.compile()
    return Way(partial(run, *args), temporaries=run.memory_analysis().temp_size_in_bytes, tracing=tracing)


def once(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def ways_of_jax(job: Job, few: bool) -> dict[str, Way]:
    """Return our methods, those by hand, and jax_privacy; or only a `few` of them."""
    args = (job.params, job.x, job.y)
    options: dict[str, Any] = {"l2_clip_norm": CLIP, "batch_argnums": (1, 2)}
    found = {
        ORDINARY: compiled(jax.grad(job.loss), *args),
        OURS: compiled(clipped_grad(job.loss, **options), *args),
        BY_VMAP: compiled(by_vmap(job), *args),
    }
    if few:
        return found
    for method, size, note in (
        ("book_keeping", None, ""),
        ("book_keeping", 4, ", four at a time"),
        ("ghost", None, ""),
        ("vmap", 2, ", two at a time"),
        ("vmap", 1, ", one at a time"),
    ):
        fun = clipped_grad(job.loss, method=method, microbatch_size=size, **options)
        found[f'clipped_grad, "{method}"{note}'] = compiled(fun, *args)
    found[BY_VMAP] = found.pop(BY_VMAP)  # keeps the rows of a library together
    found["by hand: scan of grad, one at a time"] = compiled(by_scan(job), *args)
    found["by hand: Python loop, a compiled call for each"] = by_python(job)
    if jax_privacy is not None:
        found["jax_privacy, all at once (its default)"] = compiled(jax_privacy.clipped_grad(job.loss, **options), *args)
        name, _, best = best_of_jax_privacy(job)
        found[name] = best
    return found


def best_of_jax_privacy(job: Job) -> tuple[str, int, Way]:
    """Find the fastest microbatch size of jax_privacy; return its label, the size, and the compiled call."""
    options: dict[str, Any] = {"l2_clip_norm": CLIP, "batch_argnums": (1, 2)}
    args, found = (job.params, job.x, job.y), {}
    for size in (2**i for i in range(10) if 2**i < len(job.x)):
        way = compiled(jax_privacy.clipped_grad(job.loss, microbatch_size=size, **options), *args)
        found[size] = min(once(way.call) for _ in range(2)), way
        if found[size][0] > 3 * min(seconds for seconds, _ in found.values()):
            break  # larger sizes are slower still; the label names the largest tried
    best = min(found, key=lambda size: found[size][0])
    return f"jax_privacy, {best} at a time (its best of 1 to {max(found)})", best, found[best][1]


def ways_of_torch(job: Job, ordinary: Any, total: Any) -> dict[str, Way]:
    """Return PyTorch's gradient and Opacus's clipped sums, with the results expected from JAX."""
    module, data = partial(_opacus.model, job.twin), (job.x, job.y)
    # PyTorch's norm of an embedding with two million numbers has an error of 3e-4: it sums in float32.
    tolerance = 1e-3 if job.twin == "gpt" else 1e-4

    def way(call: Callable[[], Any], expected: Any) -> Way:
        return Way(call, _opacus.arrays(job.twin, expected), tolerance, against=OF_TORCH)

    found = {OF_TORCH: way(_opacus.ordinary(module(job.params), *data), ordinary)}
    if job.twin == "lstm":
        found[f"{OF_TORCH} of Opacus's DPLSTM"] = found[OF_TORCH]
        found[OF_TORCH] = way(_opacus.ordinary(module(job.params, cell=torch.nn.LSTM), *data), ordinary)
    found["Opacus, hooks"] = way(_opacus.hooks(module(job.params), *data, CLIP), total)
    if job.twin != "gpt":
        note = {
            "cnn": " (dense layers; convolution gradients materialized)",
            "lstm": " (last layer; LSTM gradients materialized)",
        }
        name = "Opacus, ghost" + note.get(job.twin, "")
        found[name] = way(_opacus.ghost(module(job.params), *data, CLIP), total)
        return found
    # Opacus does not support ghost norms of tied parameters. Untied ones favor it: no products of their gradients.
    untied = job.params | {"head": job.params["embedding"]}
    call = _opacus.ghost(module(job.params), *data, CLIP, use_ghost_clipping=False)
    found["Opacus, fast gradient clipping (ghost without ghost norms)"] = way(call, total)
    expected = jax.jit(by_vmap(job))(untied, *data)
    found["Opacus, ghost, untied head (tied not supported)"] = way(_opacus.ghost(module(untied), *data, CLIP), expected)
    return found


def agree(found: Any, expected: Any, tolerance: float) -> bool:
    """Return whether the error norm of each array is within `tolerance` of the expected norm."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(np.linalg.norm(np.asarray(a) - b) < tolerance * np.linalg.norm(b) for a, b in pairs)


def measure(job: Job, rounds: int, seconds: float, few: bool) -> Tables:
    ways = ways_of_jax(job, few)
    ordinary, total = ways[ORDINARY].call(), ways[BY_VMAP].call()
    ways = {name: way._replace(expected=ordinary if name == ORDINARY else total) for name, way in ways.items()}
    if _opacus is not None:
        ways |= ways_of_torch(job, ordinary, total)
    for name, way in ways.items():
        if not agree(way.call(), way.expected, way.tolerance):
            raise RuntimeError(f"{name}: the result differs from JAX's ordinary gradient, or from the sum by hand")
    times = interleaved({name: way.call for name, way in ways.items()}, rounds=rounds, seconds=seconds)
    first = ways[ORDINARY].temporaries
    rows = [
        {
            "": name,
            "ms": times[name]["ms"],
            "time / ordinary": ratio(times, name, way.against),
            "temporaries (MiB)": None if way.temporaries is None else way.temporaries / MIB,
            "memory / ordinary": None if way.temporaries is None else way.temporaries / first,
            "tracing and lowering (s)": way.tracing,
        }
        for name, way in ways.items()
    ]
    others = [name for name in ways if not name.startswith("clipped_grad") and "ordinary" not in name]
    return rows, [claim(times, OURS, others)]


def jobs(smoke: bool) -> dict[str, Job]:
    generator = np.random.default_rng(0)
    if smoke:
        return {
            "MLP": mlp(generator, 4, (6, 5, 3)),
            "CNN": cnn(generator, 4, 6),
            "LSTM": lstm(generator, 4, 3, 2, 4),
            "GPT": gpt(4, 3, 1, 8, 5, plain=True),
        }
    size = (16, 128, 4, 256, 8192)
    title = "GPT, 4 layers of 256, 128 tokens, tied vocabulary 8192, batch 16, loss"
    return {
        "MLP 784-512-256-10, batch 256": mlp(generator, 256, (784, 512, 256, 10)),
        "CNN of PyTorch's tutorial, batch 64": cnn(generator, 64, 28),
        "LSTM, 32 steps of 64 numbers, hidden 128, batch 64": lstm(generator, 64, 32, 64, 128),
        f"{title} from optax": gpt(*size),
        f"{title} written with log_softmax and take_along_axis": gpt(*size, plain=True),
    }


def main() -> None:
    options = arguments(__doc__).parse_args()
    report, smoke = Report("privacy", options, "jax-privacy", "torch", "opacus"), options.smoke
    if smoke:
        jax.config.update("jax_disable_most_optimizations", True)  # halves the compile time
    if torch is not None:
        torch.set_num_threads(2)
    sizes = (2, 0.001) if smoke else (5, 0.1)
    report.measure(
        {title: partial(measure, job, *sizes, smoke and job.twin != "mlp") for title, job in jobs(smoke).items()}
    )


if __name__ == "__main__":
    main()
