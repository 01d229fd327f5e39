"""Compare a private step with an ordinary step, and with its parts: clipped sum, noise and optimizer.

python benchmarks/dpsgd.py               measure, and render the pages
python benchmarks/dpsgd.py --only GPT    measure the networks with GPT in their titles; keep the other tables
python benchmarks/dpsgd.py --smoke       run small cases once; write nothing

All rows of a network take a step with Adam. JAX rows with noise draw the same bits. Every row is compared with the
first of its kind before it is timed, PyTorch rows without noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import _private_options
import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from _measure import Report, Tables, arguments, claim, interleaved, ratio
from privacy import CLIP, Job, _opacus, best_of_jax_privacy, jobs, mlp, torch

from plurax.transforms import clipped_grad
from plurax.transforms.privacy import DPSGD, Batch
from plurax.transforms.privacy._dpsgd.noise import add_noise, privatizer

RATE = 1e-3
OPTIMIZER = optax.adam(RATE)
ORDINARY, OF_TORCH = "ordinary step: gradient and Adam", "torch, ordinary step"
BASE, STEP = "clipped_grad and Adam: no noise", "DPSGD.step"


def by_hand(job: Job, sums: Callable[..., Any], noise: optax.GradientTransformation | None) -> Callable[..., Any]:
    """Return the step written by hand."""

    def step(params: Any, opt_state: Any, noise_state: Any, x: jax.Array, y: jax.Array) -> Any:
        total = sums(params, x, y)
        if noise is not None:
            total, noise_state = noise.update(total, noise_state)
        mean = jax.tree.map(lambda g: g / len(job.x), total)
        updates, opt_state = OPTIMIZER.update(mean, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, noise_state

    return step


def compiled(fun: Callable[..., Any], *args: Any) -> tuple[Callable[[], Any], float]:
    """Return a compiled call, and the seconds of compilation without tracing."""
    lowered = jax.jit(lambda *args: fun(*args)).lower(*args)
    start = time.perf_counter()
    run = lowered.compile()
    return partial(run, *args), time.perf_counter() - start


def steps_of_torch(job: Job, ordinary: Any, private: Any) -> dict[str, Callable[[], Any]]:
    """Return the steps of PyTorch and Opacus, after comparing their parameters without noise with those of JAX."""
    noise, args = [0.0], (job.x, job.y, CLIP)
    ghost = {"use_ghost_clipping": job.twin != "gpt"}  # Opacus refuses tied parameters
    module = partial(_opacus.model, job.twin, job.params)
    plain = module(cell=torch.nn.LSTM) if job.twin == "lstm" else module()
    found = {
        OF_TORCH: _opacus.ordinary_step(plain, job.x, job.y),
        "Opacus, ghost": _opacus.ghost(module(), *args, noise, **ghost),
    }
    if len(job.y) * sum(leaf.nbytes for leaf in jax.tree.leaves(job.params)) < 2**30:  # bounds the memory of hooks
        found["Opacus, hooks"] = _opacus.hooks(module(), *args, noise)
    for name, step in found.items():
        expected = _opacus.arrays(job.twin, ordinary if name == OF_TORCH else private)
        leaves = {key: jnp.asarray(leaf.detach()) for key, leaf in step().items()}
        # Relative to a step of Adam, which has full size even where a gradient is only rounding, such as a key's bias.
        if max(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.mean(jnp.abs(a - b)), expected, leaves))) > RATE / 100:
            raise RuntimeError(f"{name}: the result differs from that of JAX")
    noise[0] = 1.0
    return found


def measure(job: Job, rounds: int, seconds: float) -> Tables:
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
    size_of_theirs = best_of_jax_privacy(job)[1]
    theirs = jax_privacy.clipped_grad(job.loss, microbatch_size=size_of_theirs, **options)
    best_theirs = f"jax-privacy, {size_of_theirs} at a time (its best), its noise, and Adam"

    def summed(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return jax.tree.map(lambda g: g * size, jax.grad(job.loss)(params, x, y))

    args = (job.params, OPTIMIZER.init(job.params), state.noise_state, job.x, job.y)
    zeros = jax.tree.map(jnp.zeros_like, job.params)
    ways = {
        ORDINARY: compiled(by_hand(job, summed, None), *args),
        BASE: compiled(by_hand(job, ours, None), *args),
        "DPSGD with noise_multiplier=0": compiled(quiet.step, quiet_state, batch),
        STEP: compiled(dp.step, state, batch),
        "clipped_grad, jax-privacy's own noise, and Adam": compiled(by_hand(job, ours, noise), *args),
        best_theirs: compiled(by_hand(job, theirs, noise), *args),
        "noise only, as drawn by DPSGD": compiled(partial(add_noise, dp.ledger), zeros, args[2]),
        "noise only, as drawn by jax-privacy": compiled(noise.update, zeros, args[2]),
    }
    for names in (list(ways)[1:3], list(ways)[3:6], list(ways)[6:]):
        found = [ways[name][0]() for name in names]
        for name, one in zip(names[1:], found[1:], strict=True):
            if not same(parameters(found[0]), parameters(one)):
                raise RuntimeError(f"{name}: the result differs from that of {names[0]}")
    calls = {name: call for name, (call, _) in ways.items()}
    if _opacus is not None:
        calls |= steps_of_torch(job, *(parameters(calls[name]()) for name in (ORDINARY, BASE)))
    times = interleaved(calls, rounds=rounds, seconds=seconds)

    def against(name: str) -> str:
        return ORDINARY if name in ways else OF_TORCH

    rows = [
        {
            "": name,
            "ms": times[name]["ms"],
            "time / ordinary step": None if name.startswith("noise only") else ratio(times, name, against(name)),
            "time / step without noise": ratio(times, name, BASE) if name in ways else None,
            "compile (s)": ways[name][1] if name in ways else None,
        }
        for name in times
    ]
    others = [name for name in times if name.startswith(("jax-privacy", "Opacus"))]
    return rows, [claim(times, STEP, others)]


def measure_options(job: Job, rounds: int, seconds: float) -> Tables:
    """Compare private steps with other ways of clipping."""
    plain = _private_options.ours(job, "one norm", OPTIMIZER, 1.0)
    at_a_time = best_of_jax_privacy(job)[1]
    rows, claims = [], []
    for kind in _private_options.KINDS:
        calls = _private_options.ways(job, kind, OPTIMIZER, at_a_time, same)
        times = interleaved({**calls, "one norm": plain}, rounds=rounds, seconds=seconds)
        for name in calls:
            rows.append(
                {
                    "": f"{kind}: {name}",
                    "ms": times[name]["ms"],
                    "time / DPSGD.step": ratio(times, name, "DPSGD.step"),
                    "time / DPSGD.step with one norm": ratio(times, name, "one norm"),
                }
            )
        claims.append(claim(times, "DPSGD.step", [name for name in calls if name != "DPSGD.step"], kind))
    return rows, claims


def parameters(result: Any) -> Any:
    """Return the updated parameters from the result of a step by hand or of `DPSGD.step`."""
    first = result[0]
    return first.tree if hasattr(first, "tree") else first


def same(one: Any, other: Any) -> bool:
    """Return whether two pytrees agree on average, since Adam takes full-size steps from rounding of zero gradients."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(float(jnp.mean(jnp.abs(a - b)) / (jnp.mean(jnp.abs(a)) + 1e-3)) < 1e-3 for a, b in pairs)


def main() -> None:
    options = arguments(__doc__).parse_args()
    report, smoke = Report("dpsgd", options, "jax-privacy", "torch", "opacus"), options.smoke
    if smoke:
        jax.config.update("jax_disable_most_optimizations", True)  # halves the compile time
    if torch is not None:
        torch.set_num_threads(2)
    large = mlp(np.random.default_rng(0), 2048, (784, 512, 256, 10))
    chosen = {"MLP": jobs(True)["MLP"]} if smoke else {"MLP 784-512-256-10, batch 2048": large, **jobs(False)}
    sizes = (2, 0.001) if smoke else (7, 0.2)
    parts = {f"Private steps: {title}": partial(measure, job, *sizes) for title, job in chosen.items()}
    for title, job in chosen.items():
        if job.twin in ("mlp", "cnn") and len(job.x) < 2048:
            parts[f"Other ways of clipping: {title}"] = partial(measure_options, job, *sizes)
    report.measure(parts)


if __name__ == "__main__":
    main()
