"""Compare Kronecker factors and Gauss-Newton products with the ordinary gradient and with curvlinops.

python benchmarks/curvature.py              measure, and render the pages
python benchmarks/curvature.py --only GPT   measure the tables with GPT in their titles; keep the others
python benchmarks/curvature.py --smoke      run small cases once; write nothing
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _measure import Report, Tables, arguments, claim, interleaved, peer, ratio
from gradient_statistics import resnet18
from privacy import MIB, Job, Way, compiled, cross_entropy, gpt, mlp

from plurax.transforms import gnvp
from plurax.transforms.curvature import ekfac, ggn_diagonal, kfac

_curvlinops: Any = None
if peer("curvlinops") is not None and peer("opacus") is not None:
    import _curvlinops
    import torch

ORDINARY, OF_TORCH = "ordinary gradient", "torch, ordinary gradient"
EXPAND, REDUCE, PRODUCT = 'kfac, "expand"', 'kfac, "reduce"', "gnvp"


def functions(job: Job) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return the ordinary gradient and our functions, with their arguments."""
    args, key = (job.params, job.x, job.y), jax.random.key(0)
    model, loss = job.model, job.loss_of_outputs
    assert model is not None
    assert loss is not None

    def product(params: Any, v: Any, x: Any, y: Any) -> Any:
        return gnvp(lambda params: model(params, x), lambda outputs: loss(outputs, y), params, v)

    return {
        ORDINARY: (jax.grad(job.loss), args),
        EXPAND: (kfac(model, loss), (*args, key)),
        REDUCE: (kfac(model, loss, weight_sharing="reduce"), (*args, key)),
        "ekfac": (ekfac(model, loss), (*args, key)),
        "ggn_diagonal, one sample": (ggn_diagonal(model, loss, samples=1), (*args, key)),
        PRODUCT: (product, (job.params, jax.tree.map(jnp.ones_like, job.params), job.x, job.y)),
    }


def measure(job: Job, rounds: int, seconds: float) -> Tables:
    """Measure our ways against JAX's ordinary gradient, and those of curvlinops against PyTorch's."""
    ways = {name: compiled(fun, *args) for name, (fun, args) in functions(job).items()}
    others: dict[str, str] = {}
    if _curvlinops is not None:
        twin = _curvlinops.Twin(job.twin, job.params, job.x, job.y)
        theirs = {EXPAND: twin.factors("expand"), REDUCE: twin.factors("reduce"), PRODUCT: twin.product()}
        others = {name: f"curvlinops, {name.split(', ')[-1]}" for name in theirs}
        others[PRODUCT] = "curvlinops, GGN product"
        ways[OF_TORCH] = Way(twin.ordinary())
        ways |= {others[name]: Way(call, against=OF_TORCH) for name, call in theirs.items()}
    times = interleaved({name: way.call for name, way in ways.items()}, rounds=rounds, seconds=seconds)
    rows = [
        {
            "": name,
            "ms": times[name]["ms"],
            "time / ordinary gradient of the same library": ratio(times, name, way.against),
            "temporaries (MiB)": None if way.temporaries is None else way.temporaries / MIB,
            "memory / ordinary": None
            if way.temporaries is None
            else way.temporaries / max(1, ways[ORDINARY].temporaries or 1),
        }
        for name, way in ways.items()
        if name != OF_TORCH
    ]
    return rows, [claim(times, name, [other], name) for name, other in others.items()]


def jobs(smoke: bool) -> dict[str, Job]:
    """Return the models and losses by title."""
    generator = np.random.default_rng(0)
    if smoke:
        small = gpt(2, 3, 1, 8, 5)
        return {"MLP": dense(generator, 4, (6, 5, 3)), "GPT": small, "ResNet-18": resnet18(generator, 2, 8, 4)}
    return {
        "MLP 784-512-256-10, batch 256": dense(generator, 256, (784, 512, 256, 10)),
        "GPT, 4 layers of 256, 128 tokens, tied vocabulary 512, batch 16": gpt(16, 128, 4, 256, 512),
        "ResNet-18 with group norms, 32 x 32, batch 16": resnet18(generator, 16, 32),
    }


def dense(generator: np.random.Generator, batch: int, sizes: tuple[int, ...]) -> Job:
    """Return the MLP of `privacy.py`, as a model and a loss of its outputs."""
    job = mlp(generator, batch, sizes)

    def model(params: Any, x: jax.Array) -> jax.Array:
        for weight, bias in params[:-1]:
            x = jax.nn.relu(x @ weight + bias)
        return x @ params[-1][0] + params[-1][1]

    return Job.of(model, cross_entropy, job.params, job.x, job.y, "mlp")


def main() -> None:
    options = arguments(__doc__).parse_args()
    report, smoke = Report("curvature", options, "torch", "curvlinops-for-pytorch"), options.smoke
    if smoke:
        jax.config.update("jax_disable_most_optimizations", True)  # halves the compile time
    if _curvlinops is not None:
        torch.set_num_threads(2)
    rounds, seconds = (2, 0.001) if smoke else (5, 0.3)
    parts: dict[str, Callable[[], Tables]] = {
        title: partial(measure, job, rounds, seconds) for title, job in jobs(smoke).items()
    }
    report.measure(parts)


if __name__ == "__main__":
    main()
