"""Private steps with other ways of clipping, for `dpsgd.py`: a norm for each layer, automatic, and adaptive clipping.

jax-privacy 2.0 and Opacus have not all of them. Where jax-privacy lacks one, it is written with jax-privacy's
`pre_clipping_transform`, or by hand around its `clipped_grad`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from privacy import CLIP, Job, _opacus

from plurax.transforms.privacy import DPSGD, AdaptiveClipping, Batch

GAMMA = 0.01
ADAPTIVE = AdaptiveClipping(0.5, 0.2)
KINDS = ("a norm for each parameter", "automatic", "adaptive")
_NORMS = {"l2_clip_norm": CLIP, "batch_argnums": (1, 2)}


def norms_of(job: Job) -> Any:
    """Return a clip norm for each parameter, with the norm `CLIP` together."""
    leaves, structure = jax.tree.flatten(job.params)
    return structure.unflatten([CLIP / np.sqrt(len(leaves))] * len(leaves))


def ours(job: Job, kind: str, optimizer: Any, noise_multiplier: float) -> Callable[[], Any]:
    """Return a step of `DPSGD`."""
    size = len(job.x)
    options: dict[str, Any] = {"automatic": {"automatic": GAMMA}, "adaptive": {"adaptive": ADAPTIVE}}.get(kind, {})
    dp = DPSGD(
        job.loss,
        optimizer,
        l2_clip_norm=norms_of(job) if kind == KINDS[0] else CLIP,
        noise_multiplier=noise_multiplier,
        target_delta=1e-9,
        num_examples=100 * size,
        expected_batch_size=size,
        num_steps=10,
        accountant="rdp",
        **options,
    )
    state, batch = dp.init(job.params, key=jax.random.key(0)), Batch((job.x, job.y), np.zeros(size, bool))
    return lambda: dp.step(state, batch)[0].tree


def of_jax_privacy(job: Job, kind: str, optimizer: Any, noise_multiplier: float, at_a_time: int) -> Callable[[], Any]:
    """Return a compiled step with jax-privacy's clipped sum and noise."""
    size, noise = len(job.x), jax_privacy.noise_addition.gaussian_privatizer
    options: dict[str, Any] = {**_NORMS, "microbatch_size": at_a_time}
    norms = norms_of(job)

    def of_each_parameter(gradients: Any) -> Any:
        return jax.tree.map(lambda g, c: g * jnp.minimum(1, c / jnp.linalg.norm(g)), gradients, norms)

    def automatic(gradients: Any) -> Any:
        return jax.tree.map(lambda g: g * (CLIP / (optax.tree.norm(gradients) + GAMMA)), gradients)

    if kind == "adaptive":
        stddev = (noise_multiplier**-2 - (2 * size / 20) ** -2) ** -0.5 if noise_multiplier else 0.0

        def step(params: Any, opt_state: Any, noise_state: Any, clip_norm: jax.Array, x: Any, y: Any) -> Any:
            gradient = jax_privacy.clipped_grad(
                job.loss, **{**options, "l2_clip_norm": clip_norm}, return_grad_norms=True
            )
            sums, aux = gradient(params, x, y)
            count = jnp.sum((aux.grad_norms <= clip_norm) - 0.5)
            scale = size / 20 / stddev if stddev else 1.0
            given = jax.tree.map(lambda g: g / clip_norm, sums), count / scale
            (noisy, count), noise_state = noise(stddev=stddev, prng_key=jax.random.key(0)).update(given, noise_state)
            mean = jax.tree.map(lambda g: g * clip_norm / size, noisy)
            updates, opt_state = optimizer.update(mean, opt_state, params)
            after = clip_norm * jnp.exp(-0.2 * (count * scale / size))
            return optax.apply_updates(params, updates), opt_state, noise_state, after

        extra = (jnp.float32(CLIP),)
    else:
        transform = of_each_parameter if kind == KINDS[0] else automatic
        gradient = jax_privacy.clipped_grad(job.loss, pre_clipping_transform=transform, **options)

        def step(params: Any, opt_state: Any, noise_state: Any, x: Any, y: Any) -> Any:
            drawn = noise(stddev=noise_multiplier * CLIP, prng_key=jax.random.key(0))
            noisy, noise_state = drawn.update(gradient(params, x, y), noise_state)
            updates, opt_state = optimizer.update(jax.tree.map(lambda g: g / size, noisy), opt_state, params)
            return optax.apply_updates(params, updates), opt_state, noise_state

        extra = ()
    given = (job.params, optimizer.init(job.params), (jax.random.key(0), ()), *extra, job.x, job.y)
    run = jax.jit(step).lower(*given).compile()
    return lambda: run(*given)[0]


def of_opacus(job: Job, kind: str, noise: list[float]) -> Callable[[], Any] | None:
    """Return a step of Opacus with hooks; None if it has none of this kind."""
    if _opacus is None or kind == "automatic":
        return None
    module = _opacus.model(job.twin, job.params)
    if kind == KINDS[0]:
        return _opacus.hooks(module, job.x, job.y, CLIP, noise, per_parameter=True)
    return _opacus.hooks(module, job.x, job.y, CLIP, noise, adaptive=(0.5, 0.2, len(job.x) / 20))


def ways(job: Job, kind: str, optimizer: Any, at_a_time: int, same: Callable[[Any, Any], bool]) -> dict[str, Any]:
    """Return the steps by name, after comparing them without noise."""
    makers: dict[str, Callable[[float], Any]] = {
        "DPSGD.step": partial(ours, job, kind, optimizer),
        f"jax-privacy, {at_a_time} at a time": lambda noise: of_jax_privacy(job, kind, optimizer, noise, at_a_time),
    }
    expected = makers["DPSGD.step"](0.0)()
    for name, make in makers.items():
        if not same(make(0.0)(), expected):
            raise RuntimeError(f"{kind}: {name} differs without noise")
    found = {name: make(1.0) for name, make in makers.items()}
    noise = [0.0]
    if (opacus := of_opacus(job, kind, noise)) is not None:
        wanted = _opacus.arrays(job.twin, expected)
        leaves = {key: jnp.asarray(leaf.detach()) for key, leaf in opacus().items()}
        if not same(leaves, {key: jnp.asarray(wanted[key]) for key in leaves}):
            raise RuntimeError(f"{kind}: Opacus differs without noise")
        noise[0] = 1.0
        found["Opacus, hooks"] = opacus
    return found
