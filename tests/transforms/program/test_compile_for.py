"""`compile_for`: figures that can be counted by hand, for a CPU and, where the TPU compiler is installed, for TPUs."""

import importlib.util
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from plurax.ensemble import Ensemble, Trainer
from plurax.transforms import clipped_grad
from plurax.transforms.privacy import DPSGD
from plurax.transforms.program import compile_for

HAS_TPU = importlib.util.find_spec("libtpu") is not None
TARGETS = [
    "cpu",
    pytest.param("v5e:2x2", marks=pytest.mark.skipif(not HAS_TPU, reason="the TPU compiler is not installed")),
]


def shape(*axes: int) -> Any:
    return jax.ShapeDtypeStruct(axes, jnp.float32)


def mean_square(model: Any, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


@pytest.mark.parametrize("target", TARGETS)
def test_figures_of_a_product(target: str) -> None:
    report = compile_for(lambda x, w: jnp.tanh(x @ w), target, shape(128, 256), shape(256, 384))
    assert report.flops == 2 * 128 * 256 * 384 + 128 * 384
    assert report.arguments == 4 * (128 * 256 + 256 * 384)
    assert report.outputs == 4 * 128 * 384
    assert report.peak == report.arguments + report.outputs + report.temporaries
    assert report.operations[0][:2] == ("dot_general", "")
    assert report.operations[0].flops == 2 * 128 * 256 * 384
    assert report.collectives == []
    assert "no collectives" in str(report)
    assert (report.fits, report.memory) == ((None, None) if target == "cpu" else (True, 16 * 2**30))


@pytest.mark.parametrize("target", TARGETS)
def test_the_body_of_a_loop_counts_for_each_iteration(target: str) -> None:
    def loop(x: Any, w: Any) -> Any:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    report = compile_for(loop, target, shape(128, 128), shape(7, 128, 128))
    products = sum(row.flops for row in report.operations if row.op == "dot_general")
    assert products == 7 * 2 * 128**3


@pytest.mark.parametrize("target", TARGETS)
def test_scopes_of_a_module(target: str) -> None:
    model = nnx.Sequential(nnx.Linear(64, 128, rngs=nnx.Rngs(0)), nnx.Linear(128, 32, rngs=nnx.Rngs(0)))
    report = compile_for(model, target, shape(16, 64))
    found = {row.scope: row.flops for row in report.operations if row.op == "dot_general"}
    assert found == {"layers/0": 2 * 16 * 64 * 128, "layers/1": 2 * 16 * 128 * 32}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_steps_and_clipped_gradients(target: str) -> None:
    model, x = nnx.Linear(8, 3, rngs=nnx.Rngs(0)), jnp.ones((16, 8))
    clipped = compile_for(clipped_grad(mean_square, l2_clip_norm=1.0), target, model, x)
    assert clipped.flops > 2 * 2 * 16 * 8 * 3
    sizes: Any = {"num_examples": 16, "expected_batch_size": 4, "num_steps": 2, "target_delta": 1e-2}
    dpsgd = DPSGD(mean_square, optax.sgd(0.1), l2_clip_norm=1.0, noise_multiplier=1.0, **sizes)
    state = dpsgd.init(model, key=jax.random.key(0))
    batch = next(iter(dpsgd.batches((x,), state)))
    assert compile_for(dpsgd.step, target, state, batch).flops > 0
    trainer = Trainer(mean_square, optax.adam(1e-3))
    members = trainer.init(Ensemble.create(lambda rngs: nnx.Linear(8, 3, rngs=rngs), 4, seed=0))
    assert compile_for(trainer.step, target, members, x).arguments > 4 * 3 * 4 * (8 * 3 + 3)


@pytest.mark.parametrize("target", TARGETS)
def test_a_memory_budget_is_that_of_the_target(target: str) -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ w[0]) @ w[1])

    weights, x, budget = (shape(512, 2048), shape(2048, 512)), shape(64, 64, 512), 200_000_000
    free = compile_for(clipped_grad(loss, l2_clip_norm=1.0, method="vmap"), target, weights, x)
    limited = clipped_grad(loss, l2_clip_norm=1.0, method="vmap", memory_budget=budget)
    assert free.temporaries > budget > compile_for(limited, target, weights, x).temporaries


COLLECTIVES = """
import sys
import jax, jax.numpy as jnp, optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
from plurax.ensemble import Ensemble, Trainer
from plurax.transforms.program import compile_for

shape = lambda *axes: jax.ShapeDtypeStruct(axes, jnp.float32)
gradient = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
mesh = {"data": 4}
report = compile_for(gradient, sys.argv[1], shape(128, 64), shape(256, 128), mesh=mesh, shardings=(None, P("data")))
assert report.devices == 4
assert report.arguments == 4 * (128 * 64 + 64 * 128), report.arguments
assert [tuple(x) for x in report.collectives] == [("all-reduce", 1, 4 * 128 * 64)], report.collectives
apart = compile_for(lambda x: jnp.tanh(x), sys.argv[1], shape(256, 128), mesh=mesh, shardings=(P("data"),))
assert apart.collectives == []

# The mesh is set while a function is traced: shard_map, constraints, and explicit axes.
specs = {"in_specs": P("data"), "out_specs": P(), "check_vma": False}
whole = jax.shard_map(lambda x: jax.lax.all_gather(x, "data", tiled=True), **specs)
gathered = compile_for(whole, sys.argv[1], shape(256, 128), mesh=mesh, shardings=(P("data"),))
assert [tuple(x) for x in gathered.collectives] == [("all-gather", 1, 4 * 256 * 128)], gathered.collectives
for one in (mesh, AbstractMesh((4,), ("data",), axis_types=(AxisType.Explicit,))):
    place = jax.lax.with_sharding_constraint if one is mesh else jax.sharding.reshard
    copied = lambda x: jnp.tanh(place(x, P()))
    found = compile_for(copied, sys.argv[1], shape(256, 128), mesh=one, shardings=(P("data"),))
    assert sum(x.bytes for x in found.collectives) == 4 * 256 * 128, found.collectives
    assert found.outputs == 4 * 256 * 128
    found = compile_for(jnp.tanh, sys.argv[1], shape(256, 128), mesh=one, shardings=(P("data"),))
    assert (found.collectives, found.outputs) == ([], 4 * 64 * 128), found

# Members on devices that are not here exchange nothing; parts of a batch exchange gradients and the loss.
def loss(model, x):
    return jnp.mean(model(x) ** 2)

for axes, numbers in (({"ensemble": 4}, 0), ({"ensemble": 2, "data": 2}, 4 * (64 * 3 + 3 + 1))):
    trainer = Trainer(loss, optax.adam(1e-3), mesh=AbstractMesh(tuple(axes.values()), tuple(axes)))
    create = lambda: Ensemble.create(lambda rngs: nnx.Linear(64, 3, rngs=rngs), 4 * axes["ensemble"], seed=0)
    state = jax.eval_shape(lambda: trainer.init(create()))
    shardings = lambda x: P("ensemble") if x.ndim else None, P("data") if "data" in axes else None
    found = compile_for(trainer.step, sys.argv[1], state, shape(32, 64), mesh=axes, shardings=shardings)
    assert sum(x.bytes for x in found.collectives) == 4 * numbers, found.collectives

# Members that share a layer add up its gradients, and how many they are, in one all-reduce.
trainer = Trainer(loss, optax.adam(1e-3), mesh=AbstractMesh((4,), ("ensemble",)))
make = lambda rngs: nnx.Sequential(nnx.Linear(64, 32, rngs=rngs), nnx.tanh, nnx.Linear(32, 3, rngs=rngs))
state = jax.eval_shape(lambda: trainer.init(Ensemble.create(make, 16, seed=0, shared="layers.0")))
shardings = lambda x: P("ensemble") if x.ndim and x.shape[0] == 16 else None, None
found = compile_for(trainer.step, sys.argv[1], state, shape(32, 64), mesh={"ensemble": 4}, shardings=shardings)
assert [tuple(x) for x in found.collectives] == [("all-reduce", 1, 4 * (64 * 32 + 32 + 1))], found.collectives

# An axis "model" halves what a device holds of a layer that they share, and of its optimizer state.
def on(**axes):
    trainer = Trainer(loss, optax.adam(1e-3), mesh=AbstractMesh(tuple(axes.values()), tuple(axes)))
    wide = lambda rngs: nnx.Sequential(nnx.Linear(64, 8192, rngs=rngs), nnx.tanh, nnx.Linear(8192, 3, rngs=rngs))
    state = jax.eval_shape(lambda: trainer.init(Ensemble.create(wide, 4, seed=0, shared="layers.0")))
    of = {(64, 8192): P(None, "model"), (4, 8192, 3): P("ensemble", "model")}
    name = lambda x: of.get(x.shape, P("ensemble") if x.shape[:1] == (4,) else P())
    shardings = (name if "model" in axes else lambda x: P("ensemble") if x.shape[:1] == (4,) else P()), None
    return compile_for(trainer.step, sys.argv[1], state, shape(32, 64), mesh=axes, shardings=shardings)

whole, split = on(ensemble=2), on(ensemble=2, model=2)
kernels = 3 * 4 * (64 * 8192 + 2 * 8192 * 3)  # of a device with two members, with Adam's moments
assert whole.arguments - split.arguments == kernels / 2, (whole.arguments, split.arguments)
assert whole.outputs - split.outputs == kernels / 2, (whole.outputs, split.outputs)
assert split.temporaries <= whole.temporaries, (split.temporaries, whole.temporaries)
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_collectives_over_a_mesh(target: str) -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", COLLECTIVES, target], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not HAS_TPU, reason="the TPU compiler is not installed")
def test_a_program_that_does_not_fit() -> None:
    def large(x: Any) -> Any:
        return jnp.sum(jnp.sin(x[:, None] * x[None]).cumsum(0).cumsum(1) @ x)

    report = compile_for(large, "v5e:2x2", shape(80_000))
    assert report.fits is False
    assert report.temporaries > 16 * 2**30
    assert "does not fit" in str(report)


@pytest.mark.skipif(not HAS_TPU, reason="the TPU compiler is not installed")
def test_a_lower_bound_on_the_time() -> None:
    report = compile_for(lambda x: x @ x, "v5e:2x2", shape(4096, 4096))
    assert report.least_seconds == pytest.approx(2 * 4096**3 / 197e12)
    moved = compile_for(lambda x: x + 1, "v5e:2x2", shape(4096, 4096))
    assert moved.least_seconds == pytest.approx(2 * 4 * 4096**2 / 819e9)


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("h200", {}, r"no public way to compile for a GPU that is not here"),
        ("abacus", {}, r"target must be a TPU slice .* or a platform of this process, but got 'abacus'"),
        ("cpu", {"mesh": {"data": 4096}}, r"has 4096 devices, but cpu has"),
        ("cpu", {"mesh": {"data": 0}}, r"mesh\['data'\] must be"),
        ("cpu", {"shardings": (P(),)}, r"shardings must be one entry for each of the 1 arguments, with a mesh"),
        ("cpu", {"shardings": (), "mesh": {"data": 1}}, r"shardings must be one entry for each of the 1 arguments"),
    ],
)
def test_refusals(target: str, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compile_for(jnp.tanh, target, shape(3), **options)


def test_shardings_of_other_kinds() -> None:
    mesh = jax.make_mesh((1,), ("data",))  # of a mesh of JAX, the devices do not matter
    assert compile_for(jnp.tanh, "cpu", shape(3), mesh=mesh, shardings=(P("data"),)).devices == 1
    for bad in ("data", lambda _: "data", 3):
        with pytest.raises(TypeError, match="shardings must hold PartitionSpec or None, but got"):
            compile_for(jnp.tanh, "cpu", shape(3), mesh=mesh, shardings=(bad,))
    with pytest.raises(ValueError, match="compile_for: shardings must be a prefix of the argument"):
        compile_for(jnp.tanh, "cpu", shape(3), mesh=mesh, shardings=([P("data")],))


def test_a_missing_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError, match=r"needs the TPU compiler; install it with pip install 'plurax\[tpu\]'"
    ):
        compile_for(jnp.tanh, "v5e:4x4", shape(3))


def test_a_target_of_another_type() -> None:
    bad: Any = 3
    with pytest.raises(TypeError, match='target must be a string such as "v5e:4x4"'):
        compile_for(jnp.tanh, bad, shape(3))


def test_numpy_arrays_of_64_bits_have_the_dtype_that_jax_gives_them() -> None:
    """From jax 0.11 on, a 64-bit shape warns, and warnings are errors here."""
    report = compile_for(lambda x, i: x[i], "cpu", np.zeros((6, 4)), np.arange(3))
    assert report.arguments == 6 * 4 * 4 + 3 * 4
