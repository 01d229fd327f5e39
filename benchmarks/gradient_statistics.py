"""Compare statistics of per-sample gradients and tangent kernels with gradients that are held, and with BackPACK.

python benchmarks/gradient_statistics.py              measure, and render the pages
python benchmarks/gradient_statistics.py --only CNN   measure the tables with CNN in their titles; keep the others
python benchmarks/gradient_statistics.py --smoke      run small cases once; write nothing
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _measure import Report, Tables, arguments, claim, interleaved, peer, ratio
from jax import lax
from privacy import MIB, Job, Way, agree, cnn, compiled, cross_entropy, gpt, labels, mlp, normal

from plurax.transforms import empirical_ntk, gradient_noise_scale, per_sample_gram, per_sample_moments

_backpack: Any = None
if peer("backpack") is not None and peer("opacus") is not None:
    import _backpack
    import torch

ORDINARY = "ordinary gradient"


def resnet18(generator: np.random.Generator, batch: int, side: int, width: int = 64, classes: int = 10) -> Job:
    """Return a ResNet-18 for small images, with group normalization: batch norm mixes the samples."""

    def conv(size: int, inputs: int, outputs: int) -> jax.Array:
        kernel = generator.normal(size=(size, size, inputs, outputs)) * (2 / (size * size * inputs)) ** 0.5
        return jnp.asarray(kernel, jnp.float32)

    def block(inputs: int, outputs: int) -> dict[str, Any]:
        found: dict[str, Any] = {"conv1": conv(3, inputs, outputs), "conv2": conv(3, outputs, outputs)}
        found |= {f"norm{i}": (jnp.ones(outputs), jnp.zeros(outputs)) for i in (1, 2)}
        return found | ({"shortcut": conv(1, inputs, outputs)} if inputs != outputs else {})

    widths = [width * 2**i for i in range(4)]
    pairs = [(widths[max(i - 1, 0)], widths[i]) for i in range(4)]
    params = {
        "stem": conv(3, 3, width),
        "blocks": [block(*sizes) for inputs, outputs in pairs for sizes in ((inputs, outputs), (outputs, outputs))],
        "head": normal(generator, widths[-1], classes),
    }

    def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
        return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def norm(x: jax.Array, scale: jax.Array, shift: jax.Array, groups: int = 4) -> jax.Array:
        apart = x.reshape(*x.shape[:-1], groups, -1)
        return jax.nn.standardize(apart, (1, 2, 4)).reshape(x.shape) * scale + shift

    def model(params: Any, x: jax.Array) -> jax.Array:
        h = jax.nn.relu(convolve(x, params["stem"]))
        for p in params["blocks"]:
            stride = 2 if "shortcut" in p else 1
            out = jax.nn.relu(norm(convolve(h, p["conv1"], stride), *p["norm1"]))
            out = norm(convolve(out, p["conv2"]), *p["norm2"])
            h = jax.nn.relu(out + (convolve(h, p["shortcut"], stride) if "shortcut" in p else h))
        return h.mean((1, 2)) @ params["head"]

    batch_of = normal(generator, batch, side, side, 3), labels(generator, batch, classes)
    return Job.of(model, cross_entropy, params, *batch_of, "resnet18")


def held(job: Job, params: Any, x: jax.Array, y: jax.Array) -> list[jax.Array]:
    """Return the gradient of each sample, held: shape (batch, numbers) for each parameter."""

    def of_one(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return jax.grad(job.loss)(params, x[None], y[None])

    found = jax.vmap(of_one, (None, 0, 0))(params, x, y)
    return [leaf.reshape(len(x), -1) for leaf in jax.tree.leaves(found)]


def by_hand(job: Job) -> dict[str, Callable[..., Any]]:
    """Return each statistic from gradients that are held."""

    def gram(*args: Any) -> jax.Array:
        return sum(leaf @ leaf.T for leaf in held(job, *args))

    def second_moment(*args: Any) -> Any:
        return [jnp.square(leaf).mean(0) for leaf in held(job, *args)]

    def variance(*args: Any) -> Any:
        return [leaf.var(0, ddof=1) for leaf in held(job, *args)]

    def noise_scale(*args: Any) -> Any:
        leaves = held(job, *args)
        noise = sum(leaf.var(0, ddof=1).sum() for leaf in leaves)
        return [noise, sum(jnp.square(leaf.mean(0)).sum() for leaf in leaves) - noise / len(leaves[0])]

    return {"gram": gram, "second moment": second_moment, "variance": variance, "noise scale": noise_scale}


def ours(job: Job) -> dict[str, Callable[..., Any]]:
    options: Any = {"batch_argnums": (1, 2)}
    moments = per_sample_moments(job.loss, **options)

    def flat(tree: Any) -> Any:
        return [jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)]

    def noise_scale(*args: Any) -> Any:
        found = gradient_noise_scale(job.loss, **options)(*args)
        return [found.noise, found.signal]

    return {
        "gram": lambda *args: per_sample_gram(job.loss, **options)(*args),
        "second moment": lambda *args: flat(moments(*args).second_moment),
        "variance": lambda *args: flat(moments(*args).variance),
        "noise scale": noise_scale,
    }


def measure(job: Job, rounds: int, seconds: float, hold: bool) -> Tables:
    """Measure each statistic: ours, from gradients that are held (if they are to be), and by BackPACK."""
    args = (job.params, job.x, job.y)
    ways: dict[str, Way] = {ORDINARY: compiled(jax.grad(job.loss), *args)}
    names = {"gram": "per_sample_gram", "second moment": "per_sample_moments, second moment"}
    names |= {"variance": "per_sample_moments, variance", "noise scale": "gradient_noise_scale"}
    mine, theirs = ours(job), by_hand(job)
    others: dict[str, list[str]] = {}
    for name in names:
        ways[names[name]] = compiled(mine[name], *args)
        if hold:
            ways[f"{name}, gradients held"] = compiled(theirs[name], *args)
            others[name] = [f"{name}, gradients held"]
            # A variance is a difference of moments; its error is relative to these.
            tolerance = 1e-2 if name == "noise scale" else 1e-3
            if not agree(ways[names[name]].call(), ways[others[name][0]].call(), tolerance):
                raise RuntimeError(f"{names[name]}: the result differs from that of held gradients")
    if _backpack is not None and job.twin in ("mlp", "cnn"):
        for name in ("gram", "second moment", "variance"):
            ways[f"{name}, BackPACK"] = Way(_backpack.statistic(job.twin, *args, name))
            others[name].append(f"{name}, BackPACK")
        expected = np.asarray(ways["gram, gradients held"].call())
        if not agree(ways["gram, BackPACK"].call()[0].numpy(), expected, 1e-3):
            raise RuntimeError("BackPACK's Gram matrix differs")
    times = interleaved({name: way.call for name, way in ways.items()}, rounds=rounds, seconds=seconds)
    rows = [
        {
            "": name,
            "ms": times[name]["ms"],
            "time / ordinary": ratio(times, name, ORDINARY),
            "temporaries (MiB)": None if way.temporaries is None else way.temporaries / MIB,
            "memory / ordinary": None
            if way.temporaries is None
            else way.temporaries / max(1, ways[ORDINARY].temporaries or 1),
        }
        for name, way in ways.items()
    ]
    return rows, [claim(times, names[name], others[name], name) for name in others]


def contraction(apply: Callable[..., jax.Array], trace: bool) -> Callable[..., jax.Array]:
    """Return the kernel from whole Jacobians, as neural-tangents and NetKet contract them."""

    def kernel(params: Any, x1: jax.Array, x2: jax.Array) -> jax.Array:
        def jacobian(x: jax.Array) -> Any:
            found = jax.vmap(lambda x: jax.jacrev(lambda p: apply(p, x[None])[0])(params))(x)
            return [leaf.reshape(len(x), leaf.shape[1], -1) for leaf in jax.tree.leaves(found)]

        pairs = list(zip(jacobian(x1), jacobian(x2), strict=True))
        if trace:
            return sum(jnp.einsum("iop,jop->ij", a, b) / a.shape[1] for a, b in pairs)
        return sum(jnp.einsum("iop,jqp->ijoq", a, b) for a, b in pairs)

    return kernel


def measure_kernel(
    apply: Callable[..., jax.Array], params: Any, x: jax.Array, rounds: int, seconds: float, trace: bool = False
) -> Tables:
    half = len(x) // 2
    args = (params, x[:half], x[half:])
    mine, whole = "empirical_ntk", "jacrev, then einsum"
    ways = {
        mine: compiled(empirical_ntk(apply, trace=trace), *args),
        whole: compiled(contraction(apply, trace), *args),
    }
    if not agree(ways[mine].call(), ways[whole].call(), 1e-3):
        raise RuntimeError("the kernels differ")
    times = interleaved({name: way.call for name, way in ways.items()}, rounds=rounds, seconds=seconds)
    rows = [
        {"": name, "ms": times[name]["ms"], "temporaries (MiB)": (way.temporaries or 0) / MIB}
        for name, way in ways.items()
    ]
    return rows, [claim(times, mine, [whole])]


def dense_stack(generator: np.random.Generator, sizes: tuple[int, ...]) -> tuple[Callable[..., jax.Array], Any]:
    params = [normal(generator, n, m) for n, m in itertools.pairwise(sizes)]

    def apply(params: Any, x: jax.Array) -> jax.Array:
        for weight in params[:-1]:
            x = jnp.tanh(x @ weight)
        return x @ params[-1]

    return apply, params


def convolutional(generator: np.random.Generator, width: int) -> tuple[Callable[..., jax.Array], Any]:
    params = [normal(generator, 3, 3, a, b) / a for a, b in ((1, width), (width, width))]
    params.append(normal(generator, width, 10))

    def apply(params: Any, x: jax.Array) -> jax.Array:
        for kernel in params[:-1]:
            numbers = ("NHWC", "HWIO", "NHWC")
            x = jnp.tanh(lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=numbers))
        return x.mean((1, 2)) @ params[-1]

    return apply, params


def kernels(smoke: bool) -> dict[str, Callable[..., Tables]]:
    generator = np.random.default_rng(0)
    wide, narrow = ((6, 5, 4), (3, 4, 1)) if smoke else ((784, 512, 512, 10), (8, 16, 16, 1))
    size, side, width = (4, 4, 2) if smoke else (64, 16, 16)
    found = {}
    for words, sizes in (("wide dense layers, 10 outputs", wide), ("narrow dense layers, 1 output", narrow)):
        job = (*dense_stack(generator, sizes), normal(generator, size, sizes[0]))
        found[f"Kernel; {words}"] = partial(measure_kernel, *job)
    job = (*dense_stack(generator, wide), normal(generator, size, wide[0]))
    found["Kernel; wide dense layers, trace over 10 outputs"] = partial(measure_kernel, *job, trace=True)
    image = normal(generator, size // 2, side, side, 1)
    found["Kernel; convolutions, 10 outputs"] = partial(measure_kernel, *convolutional(generator, width), image)
    return found


def jobs(smoke: bool) -> dict[str, tuple[Job, bool]]:
    """Return the losses by title, and whether the gradients of a batch can be held."""
    generator = np.random.default_rng(0)
    if smoke:
        return {
            "MLP": (mlp(generator, 4, (6, 5, 3)), True),
            "CNN": (cnn(generator, 4, 6), True),
            "GPT": (gpt(4, 3, 1, 8, 5), True),
            "ResNet-18": (resnet18(generator, 2, 8, 4), True),
        }
    return {
        "MLP 784-512-256-10, batch 256": (mlp(generator, 256, (784, 512, 256, 10)), True),
        "CNN of PyTorch's tutorial, batch 64": (cnn(generator, 64, 28), True),
        "GPT, 4 layers of 256, 128 tokens, tied vocabulary 512, batch 16": (gpt(16, 128, 4, 256, 512), True),
        "ResNet-18 with group norms, 32 x 32, batch 16": (resnet18(generator, 16, 32), True),
    }


def main() -> None:
    options = arguments(__doc__).parse_args()
    report, smoke = Report("gradient_statistics", options, "torch", "backpack-for-pytorch"), options.smoke
    if smoke:
        jax.config.update("jax_disable_most_optimizations", True)  # halves the compile time
    if _backpack is not None:
        torch.set_num_threads(2)
    rounds, seconds = (2, 0.001) if smoke else (5, 0.1)
    parts: dict[str, Callable[[], Tables]] = {
        title: partial(measure, job, rounds, seconds, hold) for title, (job, hold) in jobs(smoke).items()
    }
    parts |= {title: partial(part, rounds, seconds) for title, part in kernels(smoke).items()}
    report.measure(parts)


if __name__ == "__main__":
    main()
