"""A batch over four devices gives the results of one device. This file is also the script that has four devices."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from plurax.transforms import clipped_grad, per_sample_grad, per_sample_norm, vmap
from plurax.transforms.privacy import DPSGD, Batch

# All in one worker, which runs the script once.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("four devices")]

BATCH, METHODS = 8, ("vmap", "ghost", "book_keeping")
PARAMS = {
    name: np.sin(np.arange(float(np.prod(shape)))).reshape(shape).astype(np.float32)
    for name, shape in {"table": (7, 6), "hidden": (6, 4), "bias": (4,), "kernel": (3, 4, 3)}.items()
}
EXAMPLES = (
    np.cos(np.arange(BATCH * 30.0)).reshape(BATCH, 5, 6).astype(np.float32),
    np.arange(BATCH * 5).reshape(BATCH, 5) * 3 % 7,
    np.arange(BATCH * 5).reshape(BATCH, 5) % 3,
)
PADDING = np.arange(BATCH) % 3 == 1
OPTIONS: dict[str, Any] = {"l2_clip_norm": 0.5, "batch_argnums": (1, 2, 3), "return_grad_norms": True}


def loss(params: Any, x: Any, tokens: Any, labels: Any) -> Any:
    """Return a loss with positions, table rows, a bias and a convolution."""
    hidden = jnp.tanh((x + params["table"][tokens]) @ params["hidden"] + params["bias"])
    form = ("NWC", "WIO", "NWC")  # XLA partitions its mapped derivative incorrectly
    logits = lax.conv_general_dilated(hidden, params["kernel"], (1,), "SAME", dimension_numbers=form)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def mesh_of(**axes: int) -> Any:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def assert_close(actual: Any, expected: Any) -> None:
    actual, expected = ((sums, tuple(aux)) for sums, aux in (actual, expected))
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    actual, expected = jax.tree.map(np.asarray, (actual, expected))  # to the host
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-5)


def spread(mesh: Any, xs: Any) -> Any:
    """Shard the examples over the first axis of a mesh."""
    return jax.device_put(xs, NamedSharding(mesh, P(mesh.axis_names[0])))


@cache
def on_one_device() -> Any:
    return jax.jit(clipped_grad(loss, **OPTIONS, method="vmap"))(PARAMS, *EXAMPLES, is_padding_example=PADDING)


@cache
def on_four_devices(method: str, microbatch_size: int | None = None) -> tuple[Any, set[str]]:
    """Return the result, and the collectives in its program."""
    of = clipped_grad(loss, **OPTIONS, method=method, microbatch_size=microbatch_size)
    args = (PARAMS, *spread(mesh_of(data=4), (*EXAMPLES, PADDING)))
    program = jax.jit(lambda *args: of(*args[:-1], is_padding_example=args[-1])).lower(*args).compile()
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return program(*args), set(re.findall(rf" ({kinds})(?:-start)?\(", program.as_text()))


def jit(method: str) -> None:
    found, exchanged = on_four_devices(method)
    assert_close(found, on_one_device())
    assert found[1].grad_norms.sharding.spec == P("data")
    assert found[0]["hidden"].sharding.is_fully_replicated
    assert exchanged == {"all-reduce"}


def jit_in_parts(method: str) -> None:
    assert_close(on_four_devices(method, 4)[0], on_one_device())


def jit_in_parts_that_stay_where_they_are(method: str) -> None:
    """Each microbatch has examples of all devices, so that no device waits and no example is sent."""
    found, exchanged = on_four_devices(method, 4)
    assert exchanged == {"all-reduce"}
    assert found[1].grad_norms.sharding.spec == P("data")


def keys(method: str) -> None:
    """An example's key does not depend on its device."""

    def noisy(params: Any, x: Any, key: Any) -> Any:
        return jnp.sum(jnp.sin(x @ params["hidden"]) * jax.random.uniform(key, (4,)))

    options = {"l2_clip_norm": 0.5, "prng_argnum": 2, "return_grad_norms": True, "method": method}
    of, key = clipped_grad(noisy, **options), jax.random.key(0)
    found = jax.jit(of)(PARAMS, spread(mesh_of(data=4), EXAMPLES[0]), key)
    assert_close(found, jax.jit(of)(PARAMS, EXAMPLES[0], key))


def of_each_device(method: str, microbatch_size: int | None = None, **options: Any) -> Any:
    """Each device has some examples, and the sums are added."""
    of = clipped_grad(loss, **OPTIONS, method=method, microbatch_size=microbatch_size)

    def of_some(params: Any, *examples: Any) -> Any:
        sums, aux = of(params, *examples[:-1], is_padding_example=examples[-1])
        return lax.psum(sums, "data"), tuple(aux)

    specs = (P(), *[P("data")] * 4)
    mapped = jax.shard_map(of_some, mesh=mesh_of(data=4), in_specs=specs, out_specs=(P(), P("data")), **options)
    return jax.jit(mapped)(PARAMS, *EXAMPLES, PADDING)


def shard_map_unchecked(method: str) -> None:
    assert_close(of_each_device(method, check_vma=False), on_one_device())


def shard_map(method: str) -> None:
    """JAX sums gradients of replicated parameters over devices, which must not happen before their norms are taken."""
    assert_close(of_each_device(method), on_one_device())


def shard_map_in_parts(method: str) -> None:
    assert_close(of_each_device(method, 1), on_one_device())


def shard_map_of_norms(method: str) -> None:
    norms = per_sample_norm(loss, batch_argnums=(1, 2, 3), method=method)
    specs = (P(), P("data"), P("data"), P("data"))
    mapped = jax.shard_map(norms, mesh=mesh_of(data=4), in_specs=specs, out_specs=P("data"))
    assert_close(({}, (jax.jit(mapped)(PARAMS, *EXAMPLES),)), ({}, (on_one_device()[1].grad_norms,)))


def shard_map_of_members(method: str) -> None:
    """Each device has its own model, and all have the same examples."""
    stacked = jax.tree.map(lambda x: np.stack([x * scale for scale in (1, 2, 3, 4)]), PARAMS)
    of = clipped_grad(loss, **OPTIONS, method=method)

    def of_one(params: Any, *examples: Any) -> Any:
        return jax.tree.map(lambda x: x[None], of(jax.tree.map(lambda x: x[0], params), *examples))

    specs = (P("data"), P(), P(), P())
    found = jax.jit(jax.shard_map(of_one, mesh=mesh_of(data=4), in_specs=specs, out_specs=P("data")))
    expected = jax.jit(jax.vmap(of, (0, None, None, None)))
    assert_close(found(stacked, *EXAMPLES), expected(stacked, *EXAMPLES))


def shard_map_of_what_is_combined(method: str) -> None:
    """A loss that sums over devices is not a loss of one example, nor is its gradient."""
    of = clipped_grad(lambda w, x: lax.psum(jnp.sum(x @ w), "data"), l2_clip_norm=1.0, method=method)
    for check_vma in (True, False):
        specs: dict[str, Any] = {"in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": check_vma}
        mapped = jax.shard_map(of, mesh=mesh_of(data=4), **specs)
        with pytest.raises(ValueError, match=r"clipped_grad: the loss of one example has psum\w*, which combines dev"):
            mapped(np.ones(3), np.ones((8, 3)))


def spmd_axis_name(method: str) -> None:
    """A loss that is itself sharded, with its examples over the remaining devices."""
    mesh = mesh_of(data=2, model=2)
    product = jax.shard_map(
        lambda x, w: lax.psum(x @ w, "model"),
        mesh=mesh,
        in_specs=(P(None, None, "model"), P("model", None)),
        out_specs=P(),
    )
    plain = lambda params, x: jnp.mean(jnp.tanh(x @ params["hidden"] + params["bias"]) ** 2)
    parallel = lambda params, x: jnp.mean(jnp.tanh(product(x, params["hidden"]) + params["bias"]) ** 2)
    options = {"l2_clip_norm": 0.1, "return_grad_norms": True}
    expected = jax.jit(clipped_grad(plain, **options))(PARAMS, EXAMPLES[0])
    of = clipped_grad(parallel, **options, method=method, spmd_axis_name="data")
    found = jax.jit(of)(PARAMS, spread(mesh, EXAMPLES[0]))
    assert_close(found, expected)
    assert found[1].grad_norms.sharding.spec == P("data")


def explicit(method: str, **options: Any) -> None:
    """A mesh from `jax.make_mesh`, set or not: the sharding is part of an array's type."""
    of = clipped_grad(loss, **OPTIONS, method=method, **options)
    args = (PARAMS, *spread(jax.make_mesh((4,), ("data",)), EXAMPLES))
    for place in (contextlib.nullcontext(), jax.set_mesh(jax.make_mesh((4,), ("data",)))):
        with place:
            found = jax.jit(of)(*args, is_padding_example=PADDING)
            assert_close(found, on_one_device())
            assert jax.typeof(found[1].grad_norms).sharding.spec == P("data")
            assert jax.typeof(found[0]["hidden"]).sharding.spec == P(None, None)


def explicit_in_parts(method: str) -> None:
    explicit(method, microbatch_size=4)


def explicit_parameters(method: str) -> None:
    """Parameters, and so their sums, are sharded over another axis or over that of the examples."""

    def model(params: Any, x: Any, tokens: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ params["hidden"] + params["bias"]) ** 2) + jnp.mean(params["table"][tokens])

    params = {name: PARAMS[name] for name in ("table", "hidden", "bias")}
    options: dict[str, Any] = {"l2_clip_norm": 0.05, "batch_argnums": (1, 2), "return_grad_norms": True}
    expected = jax.jit(clipped_grad(model, **options))(params, *EXAMPLES[:2])
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    for axis in ("data", "model"):
        specs = {"table": P(), "hidden": P(None, axis), "bias": P(axis)}
        divided = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in params.items()}
        found = clipped_grad(model, **options, method=method)(divided, *spread(mesh, EXAMPLES[:2]))
        assert_close(found, expected)
        assert jax.typeof(found[0]["hidden"]).sharding.spec == P(None, axis)
        each = per_sample_grad(model, batch_argnums=(1, 2), chunk_size=3)(divided, *spread(mesh, EXAMPLES[:2]))
        norms = jax.vmap(optax.tree.norm)(jax.tree.map(np.asarray, each))
        assert_close(({}, (norms,)), ({}, (expected[1].grad_norms,)))


WIDE = {
    name: np.sin(np.arange(float(np.prod(shape)))).reshape(shape).astype(np.float32) / 8
    for name, shape in {"up": (2, 48, 64), "bias": (2, 64), "down": (2, 64, 48)}.items()
}

COLUMNS = {"up": P(None, None, "data"), "bias": P(None, "data"), "down": P(None, None, "data")}


def layers(params: Any, x: Any, gather: Any = lambda w: w) -> Any:
    """Return a loss of two rematerialised layers in a scan, whose parameters `gather` may collect."""

    @jax.checkpoint
    def layer(x: Any, p: Any) -> Any:
        p = jax.tree.map(gather, p)
        return x + jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]

    return jnp.mean(lax.scan(lambda x, p: (layer(x, p), None), x, params)[0] ** 2)


def spread_parameters(method: str) -> None:
    """Parameters over the devices of the examples (FSDP) or over others (tensor parallel).

    Norms are those of whole gradients, sums are spread like the parameters (over automatic axes XLA decides, as for
    `jax.grad`, unless `jax.jit` is told), and no device holds the gradients of more than one example.
    """
    x = np.cos(np.arange(16 * 3 * 48.0)).reshape(16, 3, 48).astype(np.float32)
    options: dict[str, Any] = {"l2_clip_norm": 0.05, "return_grad_norms": True}
    expected = jax.jit(clipped_grad(layers, **options, method="vmap"))(WIDE, x)
    last, inner = P(None, None, "model"), P(None, "model")
    gathered = lambda w: lax.with_sharding_constraint(w, P())
    cases: tuple[tuple[Any, Any, Any, AxisType], ...] = (
        ({"data": 4}, COLUMNS, lambda w: w, AxisType.Auto),
        ({"data": 4}, COLUMNS, gathered, AxisType.Auto),
        ({"data": 4}, COLUMNS, gathered, AxisType.Explicit),
        ({"data": 2, "model": 2}, {"up": last, "bias": inner, "down": inner}, lambda w: w, AxisType.Auto),
    )
    for axes, specs, gather, kind in cases:
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))
        with jax.set_mesh(mesh):
            divided = {name: jax.device_put(w, NamedSharding(mesh, specs[name])) for name, w in WIDE.items()}
            of = clipped_grad(lambda p, x, gather=gather: layers(p, x, gather), **options, method=method)
            placed = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
            told = {"out_shardings": (placed, None)} if kind is AxisType.Auto else {}
            program = jax.jit(of, **told).lower(divided, spread(mesh, x)).compile()
            found = program(divided, spread(mesh, x))
        assert_close(found, expected)
        for name, total in found[0].items():
            assert total.sharding.is_equivalent_to(placed[name], total.ndim), (axes, name)
        if method != "vmap":
            sizes = [
                np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"f32\[([\d,]+)\]", program.as_text())
            ]
            assert max(sizes) <= WIDE["up"].size


def shard_map_of_gathered_parameters(method: str) -> None:
    """Each device holds a part of the parameters, collects them for its examples, and keeps its part of the sum."""
    x = np.cos(np.arange(BATCH * 3 * 48.0)).reshape(BATCH, 3, 48).astype(np.float32)
    of = clipped_grad(layers, l2_clip_norm=0.05, return_grad_norms=True, method=method)

    def of_some(params: Any, x: Any) -> Any:
        whole = jax.tree.map(lambda w: lax.all_gather(w, "data", axis=w.ndim - 1, tiled=True), params)
        sums, aux = of(whole, x)
        parts = jax.tree.map(lambda g: lax.psum_scatter(g, "data", scatter_dimension=g.ndim - 1, tiled=True), sums)
        return parts, tuple(aux)

    mapped = jax.shard_map(of_some, mesh=mesh_of(data=4), in_specs=(COLUMNS, P("data")), out_specs=(COLUMNS, P("data")))
    found = jax.jit(mapped)(WIDE, x)
    assert_close(
        found, jax.jit(clipped_grad(layers, l2_clip_norm=0.05, return_grad_norms=True, method="vmap"))(WIDE, x)
    )
    # A loss that collects its parameters itself would mix the gradients of the examples of all devices.
    inside = lambda p, x: layers(p, x, lambda w: lax.all_gather(w, "data", axis=w.ndim - 1, tiled=True))
    refused = clipped_grad(inside, l2_clip_norm=0.05, method=method)
    mapped = jax.shard_map(refused, mesh=mesh_of(data=4), in_specs=(COLUMNS, P("data")), out_specs=COLUMNS)
    with pytest.raises(ValueError, match=r"the loss of one example has all_gather\w*, which combines devices"):
        jax.jit(mapped)(WIDE, x)


def explicit_step(method: str) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    divided = {name: jax.device_put(x, NamedSharding(mesh, P())) for name, x in PARAMS.items()}
    divided["table"] = jax.device_put(PARAMS["table"], NamedSharding(mesh, P(None, "model")))
    options: dict[str, Any] = {"num_examples": BATCH, "expected_batch_size": BATCH, "num_steps": 2, "target_delta": 0.1}

    def plain(params: Any, x: Any, tokens: Any, labels: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ params["hidden"] + params["bias"]) ** 2) + jnp.mean(params["table"] * x[0, 0])

    dp = DPSGD(plain, optax.adam(0.1), l2_clip_norm=0.1, noise_multiplier=1.0, method=method, **options)

    def after(params: Any, examples: Any) -> Any:
        state = dp.init(params, key=jax.random.key(0))
        for _ in range(2):
            state, metrics = dp.step(state, Batch(tuple(examples), PADDING))
        return state.model, tuple(metrics.values())

    found, expected = after(divided, spread(mesh, EXAMPLES)), after(PARAMS, EXAMPLES)
    assert_close(found, expected)
    assert jax.typeof(found[0]["table"]).sharding.spec == P(None, "model")


WAYS: tuple[Callable[[str], None], ...] = (
    jit,
    jit_in_parts,
    jit_in_parts_that_stay_where_they_are,
    keys,
    shard_map_unchecked,
    shard_map,
    shard_map_in_parts,
    shard_map_of_norms,
    shard_map_of_members,
    shard_map_of_what_is_combined,
    spmd_axis_name,
    explicit,
    explicit_in_parts,
    explicit_parameters,
    explicit_step,
    spread_parameters,
    shard_map_of_gathered_parameters,
)


def each(method: str) -> None:
    options = {"batch_argnums": (1, 2, 3)}
    expected = on_one_device()[1].grad_norms
    args = (PARAMS, *spread(mesh_of(data=4), EXAMPLES))
    gradients = jax.jit(per_sample_grad(loss, **options))(*args)
    assert_close(({}, (jax.vmap(optax.tree.norm)(gradients),)), ({}, (expected,)))
    for method in METHODS:
        norms = jax.jit(per_sample_norm(loss, **options, method=method))(*args)
        assert_close(({}, (norms,)), ({}, (expected,)))


def chunks_of_convolutions(method: str) -> None:
    """One example at a time, the smallest chunk: XLA's mapped derivative is wrong for larger ones."""
    of = per_sample_grad(loss, batch_argnums=(1, 2, 3), chunk_size=2)
    gradients = jax.jit(of)(PARAMS, *spread(mesh_of(data=4), EXAMPLES))
    assert_close(({}, (jax.vmap(optax.tree.norm)(gradients),)), ({}, (on_one_device()[1].grad_norms,)))


def explicit_maps(method: str) -> None:
    """`vmap` of sharded and replicated arguments; each device computes chunks of its own slices."""
    mesh = jax.make_mesh((4,), ("data",))
    shared = jax.device_put(PARAMS["hidden"], NamedSharding(mesh, P()))
    x, number = spread(mesh, EXAMPLES[0]), np.arange(float(BATCH), dtype=np.float32)
    plain = lambda x, number: (jnp.tanh(x @ PARAMS["hidden"]) * number, number)
    expected = jax.jit(jax.vmap(plain, out_axes=(-2, 0)))(EXAMPLES[0], number)
    mapped = lambda x, number: (jnp.tanh(x @ shared) * number, number)
    for wrap in (jax.jit, lambda f: f):
        for chunk_size in (None, 1, 3, 4, 5, 8):
            found = wrap(vmap(mapped, out_axes=(-2, 0), chunk_size=chunk_size))(x, number)
            assert_close(({}, found), ({}, expected))
            assert jax.typeof(found[0]).sharding.spec == P(None, "data", None)


def explicit_kinds(method: str) -> None:
    """Modules, auxiliary outputs, shared arguments, keys, gradient transforms, and closed-over arrays."""
    mesh = jax.make_mesh((4,), ("data",))
    x = spread(mesh, EXAMPLES[0])
    model = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    scale = jax.device_put(np.full(3, 2.0, np.float32), NamedSharding(mesh, P()))

    def noisy(model: Any, x: Any, scale: Any, key: Any) -> Any:
        out = model(x) * scale * jax.random.uniform(key, (3,))
        return jnp.mean(out**2), {"out": out, "name": "noisy"}

    options: dict[str, Any] = {"l2_clip_norm": 0.5, "prng_argnum": 3, "has_aux": True}
    for more in ({}, {"pre_clipping_transform": lambda gradient: jax.tree.map(jnp.sin, gradient)}):
        of = clipped_grad(noisy, **options, **more)
        sums, aux = of(model, x, scale, jax.random.key(0))
        expected, beside = of(model, EXAMPLES[0], np.asarray(scale), jax.random.key(0))
        assert_close((sums, (aux.aux["out"],)), (expected, (beside.aux["out"],)))
        assert aux.aux["name"] == "noisy"
    assert of.explain(model, x, scale, jax.random.key(0)).method == "vmap"
    with pytest.raises(
        ValueError, match=r"clipped_grad: fun closes over an array of a mesh with the explicit axes data"
    ):
        clipped_grad(lambda model, x: jnp.mean(model(x) * scale), l2_clip_norm=1.0)(model, x)


def convolutions_inside(method: str) -> None:
    def branched(params: Any, *example: Any) -> Any:
        return lax.cond(params["bias"][0] > 0, lambda p: loss(p, *example), lambda p: loss(p, *example) / 2, params)

    expected = jax.jit(clipped_grad(lambda *args: loss(*args) / 2, **OPTIONS))(PARAMS, *EXAMPLES)[0]
    args = (PARAMS, *spread(mesh_of(data=4), EXAMPLES))
    for way in METHODS:
        of = clipped_grad(branched, **OPTIONS, method=way)
        assert_close((jax.jit(of)(*args)[0], ()), (expected, ()))
        assert "XLA miscomputes the mapped derivative of a convolution inside cond" in of.explain(*args).why
    of = clipped_grad(branched, **OPTIONS)
    specs = (P(), P("data"), P("data"), P("data"))
    added = lambda *args: lax.psum(of(*args)[0], "data")
    found = jax.jit(jax.shard_map(added, mesh=mesh_of(data=4), in_specs=specs, out_specs=P()))(PARAMS, *EXAMPLES)
    assert_close((found, ()), (expected, ()))


def auto(method: str) -> None:
    """A loop over examples would leave devices idle."""
    assert clipped_grad(loss, **OPTIONS).explain(PARAMS, *EXAMPLES).method == "book_keeping"


def wrong(method: str) -> None:
    """A check that must fail."""
    assert_close(({"w": np.ones(2)}, ()), ({"w": np.full(2, 1.001)}, ()))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Return a traceback from four devices, or an empty string, for each check and method."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_four_devices_give_what_one_gives(way: Any, method: str, outcomes: dict[str, str]) -> None:
    failure = outcomes[f"{way.__name__} {method}"]
    assert not failure, failure


def test_per_sample_gradients_choices_and_failures(outcomes: dict[str, str]) -> None:
    assert not outcomes["each"], outcomes["each"]
    assert not outcomes["chunks_of_convolutions"], outcomes["chunks_of_convolutions"]
    assert not outcomes["explicit_maps"], outcomes["explicit_maps"]
    assert not outcomes["explicit_kinds"], outcomes["explicit_kinds"]
    assert not outcomes["convolutions_inside"], outcomes["convolutions_inside"]
    assert not outcomes["auto"], outcomes["auto"]
    assert "not equal to tolerance" in outcomes["wrong"].lower()


def failure_of(way: Callable[[str], None], method: str) -> str:
    try:
        way(method)
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    assert jax.device_count() == 4
    every = {f"{way.__name__} {method}": failure_of(way, method) for way in WAYS for method in METHODS}
    every |= {
        way.__name__: failure_of(way, "auto")
        for way in (each, chunks_of_convolutions, explicit_maps, explicit_kinds, convolutions_inside, auto, wrong)
    }
    Path("/dev/stdout").write_text(json.dumps(every))
