"""Remedies of meshes with an axis "data", on two devices. This file also runs with them as a script."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from plurax.ensemble import Ensemble, Trainer

from ._registry import ROOT, Fails, remedy

TEXTS = (
    'take means over the examples, or use a mesh without the axis "{}"',
    'let the parts agree, as nnx.BatchNorm does with axis_name="{}"',
    'Trainer: {}, which cannot be split; use a mesh without the axis "{}".',
    'Trainer: grad_fn cannot be used with a mesh axis "data"; leave one of them out.',
    '{} examples, which do not split over the {} devices of the mesh axis "data"',
    "{}: the batch (`{}`) has {}; pass a multiple of {}.",
    "only floating-point scalars can be averaged; return a mean",
    "let the loss close over arrays that do not have one row per example",
)


@remedy(*TEXTS)
def with_an_axis_of_data(fails: Fails) -> None:
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.remedies.of_ensemble_devices"]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=600)
    fails.left = []


def on_two_devices(fails: Fails) -> None:
    """Raise the errors, and run the remedies."""
    data, members = jax.make_mesh((1, 2), ("ensemble", "data")), jax.make_mesh((2,), ("ensemble",))
    x = jnp.arange(12.0).reshape(4, 3)
    plain = Ensemble.from_apply(lambda w, x: w * x, [jnp.float32(1), jnp.float32(2)])

    def loss(model: Any, x: jax.Array) -> Any:
        return 1e-3 * jnp.square(model(x)).mean()

    def stepped(fun: Any = loss, mesh: Any = data, ensemble: Any = plain, batch: Any = x, **options: Any) -> Any:
        trainer = Trainer(fun, options.pop("optimizer", optax.sgd(0.1)), strategy="vmap", mesh=mesh, **options)
        return trainer.step(trainer.init(ensemble), batch)[1]["loss"]

    expected = stepped(mesh=None)
    for coupled in (lambda model, x: jnp.square(model(x)).sum(), lambda model, x: jnp.std(model(x))):
        fails(stepped, coupled)
        stepped(coupled, members)
    assert jnp.allclose(stepped(), expected)
    fails(stepped, lambda model, x: (loss(model, x), {"most": (x > 9).sum()}))
    stepped(lambda model, x: (loss(model, x), {"most": (x > 9).mean()}))

    def normed(**options: Any) -> Ensemble[Any]:
        make = lambda rngs: nnx.Sequential(nnx.BatchNorm(3, rngs=rngs, **options), nnx.Linear(3, 2, rngs=rngs))
        return Ensemble.create(make, 2, seed=0)

    fails(stepped, ensemble=normed())
    assert jnp.allclose(stepped(ensemble=normed(axis_name="data")), stepped(mesh=None, ensemble=normed()), atol=1e-6)

    def counting(count: Any) -> Any:
        def of(model: Any, x: jax.Array) -> Any:
            value = loss(model, x)
            model.variables = {**model.variables, "seen": model.variables["seen"] + count(x)}
            return value

        return of

    counted = Ensemble.from_apply(lambda v, x: v["w"] * x, [{"w": jnp.ones(3), "seen": jnp.zeros((), int)}] * 2)
    large = lambda x: (x > 9).any().astype(int)
    fails(stepped, counting(large), ensemble=counted)
    assert stepped(counting(lambda x: lax.pmax(large(x), "data")), ensemble=counted).shape == (2,)
    fails(stepped, counting(len), ensemble=counted)
    assert stepped(counting(len), members, counted).shape == (2,)
    searching = optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(3))
    fails(stepped, optimizer=searching)
    assert jnp.allclose(stepped(mesh=members, optimizer=searching), expected)
    fails(stepped, grad_fn=jax.value_and_grad)
    fails(stepped, batch=x[:3])
    assert stepped(batch=x[:2]).shape == (2,)
    weights = jnp.ones(3)
    fails(stepped, lambda model, x, w: (loss(model, x) * w).mean(), batch=(x, weights[:2]))
    assert jnp.allclose(stepped(lambda model, x: (loss(model, x) * weights).mean()), expected)


if __name__ == "__main__":
    script = Fails(TEXTS)
    on_two_devices(script)
    assert not script.left, script.left
