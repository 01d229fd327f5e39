"""Check the output of `profile`, `trace_diff`, `fold_bn` and `count_layout_ops`, and measure the gain of rewriting.

python benchmarks/program.py            measure, and render the pages
python benchmarks/program.py --smoke    run small cases once; write nothing
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import privacy
from _measure import Report, Tables, arguments, claim, interleaved, ratio, spread
from _models import LeNet5, Transformer, cross_entropy
from flax import nnx

from plurax.transforms.program import (
    TraceDiff,
    accumulate,
    convolutions_as_products,
    count_layout_ops,
    fold_bn,
    profile,
    trace_diff,
)

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from channels_last import given, network
from profile_resnet import resnet18

CALLS = 10
PARTS = 8  # of a batch, whose patches then stay in the cache


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def step(model: nnx.Module, x: jax.Array, y: jax.Array) -> Any:
    return nnx.value_and_grad(lambda model: cross_entropy(model, x, y))(model)


def models(smoke: bool) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return the functions to profile, with their arguments, by name."""
    batch, side, width = (2, 32, 4) if smoke else (64, 224, 64)
    labels = jnp.arange(batch) % 10
    tokens = jnp.arange(32 * batch).reshape(batch, 32) % 128
    lenet, transformer, resnet = LeNet5(nnx.Rngs(0)), Transformer(nnx.Rngs(0)), resnet18(width)
    images, large = normal(batch, 32, 32, 1), normal(2 if smoke else 5, side, side, 3)
    return {
        f"LeNet-5, batch {batch}": (lenet, (images,)),
        f"LeNet-5, batch {batch}, value and gradient": (step, (lenet, images, labels)),
        f"Transformer, batch {batch}": (transformer, (tokens,)),
        f"Transformer, batch {batch}, value and gradient": (step, (transformer, tokens, labels)),
        f"ResNet-18, {len(large)} images of {side}²": (resnet, (large,)),
    }


def attributed(smoke: bool) -> Tables:
    """Measure the share of the time that is attributed to a scope or a line."""
    rows = []
    for name, (fun, args) in list(models(smoke).items())[:: 4 if smoke else 1]:
        found = profile(fun, *args, repeats=2 if smoke else CALLS)
        rows.append(
            {
                "program": name,
                "attributed (%)": found.attributed * 100,
                "divided by flops (%)": found.estimated * 100,
                "products kept separate": "yes" if found.apart else "",
                "profiled (ms)": found.watched * 1e3,
                "a call without profiling (ms)": found.jitted * 1e3,
            }
        )
    return rows, []


def places(smoke: bool, rounds: int, seconds: float) -> Tables:
    """Compare the profiled times of layers of very different cost with the times when compiled alone."""
    size, batch = (16, 8) if smoke else (64, 64)
    w3, w1, dense = normal(3, 3, size, size), normal(1, 1, size, size), normal(size, size)
    layers: dict[str, Callable[[jax.Array], jax.Array]] = {
        "convolution, 3 x 3": partial(convolution, w=w3),
        "convolution, 1 x 1": partial(convolution, w=w1),
        "product": lambda x: x @ dense,
        "sines": lambda x: jnp.sin(jnp.sin(x)),
        "sum over the channels": lambda x: x - x.sum(-1, keepdims=True),
        "sorting": lambda x: jnp.sort(x, axis=1),
    }

    def all_layers(x: jax.Array) -> jax.Array:
        for name, layer in layers.items():
            with jax.named_scope(name):
                # Barriers prevent fusion, so that layers are comparable with those compiled alone.
                x = jax.lax.optimization_barrier(layer(jax.lax.optimization_barrier(x)))
        return x

    x = normal(batch, size // 4, size // 4, size)
    found = profile(all_layers, x, repeats=2 if smoke else 2 * CALLS)
    together: dict[str, float] = {}
    for row in found.operations:
        together[row.scope] = together.get(row.scope, 0.0) + row.mean * row.count * 1e3
    alone = interleaved(
        {name: partial(jax.jit(layer), x) for name, layer in layers.items()}, rounds=rounds, seconds=seconds
    )
    # Other processes slow both measurements down differently, so shares of the sum are compared.
    sums = [sum(turns) / 100 for turns in zip(*(alone[name]["turns"] for name in layers), strict=True)]
    rows = [
        {
            "layer": name,
            "in the profile (%)": together.get(name, 0.0) / sum(together.values()) * 100,
            "compiled alone (% of the sum)": spread(x / y for x, y in zip(alone[name]["turns"], sums, strict=True)),
            "in the profile (ms)": together.get(name, 0.0),
            "compiled alone (ms)": alone[name]["ms"],
        }
        for name in layers
    ]
    return rows, []


def convolution(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def differences(smoke: bool, runs: int) -> Tables:
    """Count how often real differences and false ones are reported."""
    size, layers = (16, 3) if smoke else (256, 8)
    ws, x = [normal(size, size) / size**0.5] * layers, normal(size, size)

    def perceptron(extra: str) -> Callable[..., jax.Array]:
        def call(ws: list[jax.Array], x: jax.Array) -> jax.Array:
            for i, w in enumerate(ws):
                with jax.named_scope(f"layer{i}"):
                    x = jnp.tanh(x @ w)
                    if i == 1 and extra == "one product":
                        x = x @ w
                    if i == 1 and extra == "one sine":
                        x = jnp.sin(x)
            return x

        return call

    def elsewhere(found: TraceDiff) -> tuple[int, int]:
        changed = [row for row in found.differences() if row.category != "unchanged" and row.scope != "layer1"]
        by_count = sum(row.diff_counts != 0 for row in changed)
        return by_count, len(changed) - by_count

    rows = []
    for extra in ("nothing", "one product", "one sine"):
        found = [trace_diff(perceptron(""), perceptron(extra), ws, x) for _ in range(runs)]
        inside = sum(any(row.scope == "layer1" for row in (*one.added, *one.increased)) for one in found)
        others = [elsewhere(one) for one in found]
        rows.append(
            {
                "added to the second program": extra,
                "runs": runs,
                "found in its scope": inside,
                "false reports, by count": sum(count for count, _ in others),
                "false reports, by duration": sum(duration for _, duration in others),
                "rows compared": sum(len(one.differences()) for one in found),
            }
        )
    return rows, []


class ConvBN(nnx.Module):
    """The model of PyTorch's tutorial on fusing convolutions and batch norms, with more than one channel."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.conv1, self.bn1 = nnx.Conv(3, width, (1, 1), rngs=rngs), nnx.BatchNorm(width, rngs=rngs)
        self.conv2 = nnx.Conv(width, width, (1, 1), rngs=rngs)
        self.nested = nnx.Sequential(nnx.BatchNorm(width, rngs=rngs), nnx.Conv(width, width, (1, 1), rngs=rngs))
        self.wrapped = nnx.Sequential(nnx.BatchNorm(width, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.wrapped(self.nested(self.conv2(self.bn1(self.conv1(x)))))


def folding(smoke: bool, rounds: int, seconds: float) -> Tables:
    """Measure the gain of folding batch norms into the weights."""
    width, side = (4, 32) if smoke else (64, 224)
    small = ConvBN(16, nnx.Rngs(0))
    small.eval()
    rows, claims = [], []
    for name, model, x in (
        ("the tutorial's model, 16 channels", small, normal(8, side // 4, side // 4, 3)),
        (f"ResNet-18, 5 images of {side}²", resnet18(width), normal(5, side, side, 3)),
    ):
        graphdef, state = nnx.split(model)

        def apply(state: Any, x: jax.Array, graphdef: Any = graphdef) -> jax.Array:
            return nnx.merge(graphdef, state)(x)

        folded, params, report = fold_bn(apply, state, x)
        before, after = (jax.jit(fun).lower(p, x).compile() for fun, p in ((apply, state), (folded, params)))
        deviation = jnp.abs(before(state, x) - after(params, x)).max() / jnp.abs(before(state, x)).max()
        calls = {"jax.jit": partial(before, state, x), "fold_bn": partial(after, params, x)}
        times = interleaved(calls, rounds=rounds, seconds=seconds)
        moved = [program.cost_analysis()["bytes accessed"] / 1e6 for program in (before, after)]
        rows.append(
            {
                "model": name,
                "folded / kept": f"{len(report.folded)} / {len(report.kept)}",
                "largest difference": float(deviation),
                "rsqrt": " to ".join(str(program.as_text().count(" rsqrt(")) for program in (before, after)),
                "bytes accessed (MB)": " to ".join(f"{x:.1f}" for x in moved),
                "before (ms)": times["jax.jit"]["ms"],
                "after (ms)": times["fold_bn"]["ms"],
                "after / before": ratio(times, "fold_bn", "jax.jit"),
            }
        )
        claims.append(claim(times, "fold_bn", ["jax.jit"], name))
    return rows, claims


def orders(smoke: bool, rounds: int, seconds: float) -> Tables:
    """Compare a network with channels last and with channels first."""
    arguments = given(*((1, 8, 4, 2) if smoke else (8, 56, 32, 5)))
    calls = {order: partial(jax.jit(network(order)), *args) for order, args in arguments.items()}
    times = interleaved(calls, rounds=rounds, seconds=seconds)
    rows = []
    for order, args in arguments.items():
        counts = count_layout_ops(network(order), *args)
        rows.append(
            {
                "order": order,
                "transposes": counts["transpose"],
                "copies": counts["copy"],
                "moved (MiB)": counts["bytes"] / 2**20,
                "ms": times[order]["ms"],
                "time / NHWC": ratio(times, order, "NHWC"),
            }
        )
    return rows, []


def products(smoke: bool, rounds: int, seconds: float) -> Tables:
    """Compare gradients of convolutional networks with and without `convolutions_as_products`, and with PyTorch."""
    rows, claims, generator = [], [], np.random.default_rng(0)
    in_parts = partial(accumulate, micro_batches=PARTS, batch_argnums=(1, 2))
    lenet = nnx.split(LeNet5(nnx.Rngs(0)))

    def loss(state: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(nnx.merge(lenet[0], state), x, y)

    batch = PARTS if smoke else 64
    jobs = {"LeNet-5": privacy.Job(loss, lenet[1], normal(batch, 32, 32, 1), jnp.arange(batch) % 10, "")}
    jobs |= {"the CNN of PyTorch's tutorial": privacy.cnn(generator, batch, 12 if smoke else 28)}
    for name, job in jobs.items():
        gradient, given = jax.value_and_grad(job.loss), (job.params, job.x, job.y)
        rewritten = convolutions_as_products(gradient)
        ways = {"jax.value_and_grad": gradient, "convolutions_as_products": rewritten}
        ways |= {f"convolutions_as_products, {PARTS} parts": in_parts(rewritten)}
        compiled = {key: jax.jit(way).lower(*given).compile() for key, way in ways.items()}
        calls: dict[str, Callable[[], Any]] = {key: partial(run, *given) for key, run in compiled.items()}
        if job.twin and privacy._opacus is not None:
            calls["torch"] = privacy._opacus.ordinary(privacy._opacus.model(job.twin, job.params), job.x, job.y)
        times = interleaved(calls, rounds=rounds, seconds=seconds)
        for key, found in times.items():
            need = compiled[key].memory_analysis().temp_size_in_bytes / 2**20 if key in compiled else None
            row = {"network": name, "gradient by": key, "ms": found["ms"], "temporaries (MiB)": need}
            rows.append(row | {"time / jax.value_and_grad": ratio(times, key, "jax.value_and_grad")})
        ours = min(list(compiled)[1:], key=lambda key: times[key]["ms"]["median"])
        claims.append(claim(times, ours, [key for key in ("jax.value_and_grad", "torch") if key in calls], name))
    return rows, claims


def main() -> None:
    options = arguments(__doc__).parse_args()
    report, smoke = Report("program", options, "flax"), options.smoke
    rounds, seconds = (2, 0.0) if smoke else (15, 0.1)
    report.measure(
        {
            "Attributed time": lambda: attributed(smoke),
            "Attribution against layers compiled alone": lambda: places(smoke, rounds, seconds),
            "Differences found, and false reports": lambda: differences(smoke, 1 if smoke else 20),
            "Batch norms folded": lambda: folding(smoke, rounds, seconds),
            "Channels last and first": lambda: orders(smoke, rounds, seconds),
            "Convolutions as products": lambda: products(smoke, rounds, seconds),
        }
    )


if __name__ == "__main__":
    main()
