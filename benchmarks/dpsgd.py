"""A private step against what it is made of: the clipped sum, the noise and the optimizer.

    python benchmarks/dpsgd.py            # or make bench
    python benchmarks/dpsgd.py --smoke    # small and once

All rows of a network do the same step with Adam, those with noise to the same bits of noise. Every row is checked
against the first of its kind before it is timed.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from _measure import interleaved, publish, ratio, table
from privacy import CLIP, Job, jobs, mlp

from plurax.transforms import clipped_grad
from plurax.transforms.privacy import DPSGD, Batch
from plurax.transforms.privacy._noise import add_noise, privatizer

OPTIMIZER = optax.adam(1e-3)
BASE, STEP = "clipped_grad and Adam: no noise", "DPSGD.step"


def by_hand(job: Job, sums: Callable[..., Any], noise: optax.GradientTransformation | None) -> Callable[..., Any]:
    """The step written out."""

    def step(params: Any, opt_state: Any, noise_state: Any, x: jax.Array, y: jax.Array) -> Any:
        total = sums(params, x, y)
        if noise is not None:
            total, noise_state = noise.update(total, noise_state)
        mean = jax.tree.map(lambda g: g / len(job.x), total)
        updates, opt_state = OPTIMIZER.update(mean, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, noise_state

    return step


def compiled(fun: Callable[..., Any], *args: Any) -> tuple[Callable[[], Any], float]:
    """A call, and the seconds that compiling takes, tracing aside."""
    lowered = jax.jit(lambda *args: fun(*args)).lower(*args)
    start = time.perf_counter()
    run = lowered.compile()
    return partial(run, *args), time.perf_counter() - start


def measure(job: Job, rounds: int, seconds: float) -> list[dict[str, Any]]:
    size = len(job.x)
    settings: dict[str, Any] = {"target_delta": 1e-9, "num_examples": 100 * size, "num_steps": 10, "accountant": "rdp"}

    def private(noise_multiplier: float) -> tuple[DPSGD, Any]:
        dp = DPSGD(
            job.loss,
            OPTIMIZER,
            l2_clip_norm=CLIP,
            noise_multiplier=noise_multiplier,
            expected_batch_size=size,
            **settings,
        )
        return dp, dp.init(job.params, key=jax.random.key(0))

    (dp, state), (quiet, quiet_state) = private(1.0), private(0.0)
    batch = Batch((job.x, job.y), np.zeros(size, bool))
    noise = privatizer(dp.ledger, jax.random.key(0))
    options: dict[str, Any] = {"l2_clip_norm": CLIP, "batch_argnums": (1, 2)}
    ours = clipped_grad(job.loss, **options)
    theirs = jax_privacy.clipped_grad(job.loss, microbatch_size=1, **options)
    args = (job.params, OPTIMIZER.init(job.params), state.noise_state, job.x, job.y)
    zeros = jax.tree.map(jnp.zeros_like, job.params)
    ways = {
        BASE: compiled(by_hand(job, ours, None), *args),
        "DPSGD.step with noise_multiplier=0": compiled(quiet.step, quiet_state, batch),
        STEP: compiled(dp.step, state, batch),
        "clipped_grad, jax-privacy's noise as it is, and Adam": compiled(by_hand(job, ours, noise), *args),
        "jax-privacy, one example at a time, its noise, and Adam": compiled(by_hand(job, theirs, noise), *args),
        "the noise alone, as DPSGD takes it": compiled(partial(add_noise, dp.ledger), zeros, args[2]),
        "the noise alone, as jax-privacy takes it": compiled(noise.update, zeros, args[2]),
    }
    for names in (list(ways)[:2], list(ways)[2:5], list(ways)[5:]):
        found = [ways[name][0]() for name in names]
        for name, one in zip(names[1:], found[1:], strict=True):
            if not same(parameters(found[0]), parameters(one)):
                raise RuntimeError(f"{name}: the result is not that of {names[0]}")
    times = interleaved({name: call for name, (call, _) in ways.items()}, rounds=rounds, seconds=seconds)
    return [
        {
            "": name,
            "ms": f"{times[name]['median_ms']:.2f}",
            "times the step without noise": f"{ratio(times, name, BASE):.2f}",
            "compiling (s)": f"{ways[name][1]:.1f}",
        }
        for name in ways
    ]


def parameters(result: Any) -> Any:
    """What was updated: a state, or the first of a tuple, is behind a pair of `DPSGD.step`."""
    first = result[0]
    return first.tree if hasattr(first, "tree") else first


def same(one: Any, other: Any) -> bool:
    """Whether two pytrees agree in the mean: Adam makes whole steps of rounding where a gradient is zero."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(float(jnp.mean(jnp.abs(a - b)) / (jnp.mean(jnp.abs(a)) + 1e-3)) < 1e-3 for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="run everything small and once, write nothing")
    parser.add_argument("--only", default="", metavar="NAME", help="jobs with NAME in their titles, write nothing")
    options = parser.parse_args()
    if options.smoke:
        jax.config.update("jax_disable_most_optimizations", True)  # which compiles in half the time
    device = jax.devices()[0]
    about = (
        f"jax {jax.__version__}, jax-privacy {jax_privacy.__version__}, Python {platform.python_version()}, "
        f"{device.platform} ({device.device_kind})."
    )
    chosen = jobs(options.smoke)
    if options.smoke:
        chosen = {"MLP": chosen["MLP"]}
    else:
        large = "MLP 784-512-256-10, batch 2048"
        chosen = {large: mlp(np.random.default_rng(0), 2048, (784, 512, 256, 10)), **chosen}
    sections, results = [about], {"about": about}
    for title, job in chosen.items():
        if options.only.lower() not in title.lower():
            continue
        rows = measure(job, *((2, 0.001) if options.smoke else (7, 0.2)))
        results[title] = rows
        sections.append(f"### Private steps: {title}\n\n{table(rows)}")
        print(title, table(rows), sep="\n", flush=True)
    if not options.smoke and not options.only:
        publish("dpsgd", "\n\n".join(sections), results)


if __name__ == "__main__":
    main()
