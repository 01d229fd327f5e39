"""Programs compiled for accelerators that are not here: memory, operations and collectives, without a measurement.

    make accelerators                          both, in environments of their own: minutes
    python benchmarks/accelerators.py tpu      needs jax[tpu]
    python benchmarks/accelerators.py cuda     needs jax-cuda12-plugin and jax-cuda12-pjrt, both with --no-deps

The figures are the compiler's, so they are exact, and equal each time. No kernel is tuned without a device, and a
program for CUDA includes a workspace of 32 MiB. JAX has no public way to compile for CUDA without a device (issues
23971 and 28376), so this file replaces a private function; `plurax.transforms.program.compile_for` supports TPUs only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H200"
"""
Row = dict[str, Any]
Tables = dict[str, Callable[[], list[Row]]]
METHODS = ("book_keeping", "ghost", "auto")


def h200() -> Any:
    """Return an H200 to compile for; call it before JAX is used."""
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    from jax._src import xla_bridge
    from jax.experimental import topologies

    known = xla_bridge.canonicalize_platform

    def canonicalize(platform: str) -> str:
        try:
            return known(platform)
        except RuntimeError:  # "gpu" has a meaning only where there is one
            return "cuda"

    xla_bridge.canonicalize_platform = canonicalize
    return topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1").devices[0]


def normalized(x: Any, p: Any) -> Any:
    """Return a layer normalization with scale and shift."""
    import jax.numpy as jnp
    from jax import lax

    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-5) * p[0] + p[1]


def block(x: Any, p: Any, causal: bool = True) -> Any:
    """Return the output of a transformer layer of GPT-2, with heads of 64."""
    import jax
    import jax.numpy as jnp

    batch, length, width = x.shape
    qkv = normalized(x, p["norm1"]) @ p["qkv"] + p["qkv_bias"]
    q, k, v = jnp.split(qkv.reshape(batch, length, -1, 64), 3, axis=2)
    scores = jnp.einsum("bqhc,bkhc->bhqk", q, k) / 8
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(scores, -1), v).reshape(batch, length, width)
    x = x + mixed @ p["out"] + p["out_bias"]
    return x + jax.nn.gelu(normalized(x, p["norm2"]) @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]


def layers(number: int, width: int, stacked: bool) -> Any:
    """Return the shapes of the parameters of the layers, stacked or in a list."""
    import jax
    import jax.numpy as jnp

    leading = (number,) if stacked else ()

    def shape(*axes: int) -> Any:
        return jax.ShapeDtypeStruct((*leading, *axes), jnp.float32)

    one = {
        "norm1": (shape(width), shape(width)),
        "qkv": shape(width, 3 * width),
        "qkv_bias": shape(3 * width),
        "out": shape(width, width),
        "out_bias": shape(width),
        "norm2": (shape(width), shape(width)),
        "up": shape(width, 4 * width),
        "up_bias": shape(4 * width),
        "down": shape(4 * width, width),
        "down_bias": shape(width),
    }
    return one if stacked else [one] * number


def gathered(p: Any) -> Any:
    """Collect parameters that are spread over devices, where they are used."""
    import jax
    from jax.sharding import PartitionSpec

    return jax.tree.map(lambda w: jax.lax.with_sharding_constraint(w, PartitionSpec()), p)


def language_model(p: Any, tokens: Any, form: str, gather: Callable[[Any], Any] = lambda p: p) -> Any:
    """Return the loss of GPT-2, with a tied vocabulary; `form` says how its layers are written."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    table, layer = gather(p["table"]), lambda x, w: block(x, gather(w))
    x = table[tokens[:, :-1]] + gather(p["positions"])[: tokens.shape[1] - 1]
    if form == "scan, rematerialised":
        x, _ = lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, p["layers"])
    else:
        one = jax.checkpoint(layer) if "rematerialised" in form else layer
        for w in p["layers"]:
            x = one(x, w)
    logits = jax.nn.log_softmax(normalized(x, p["norm"]) @ table.T)
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))


def stack(p: Any, x: Any, gather: Callable[[Any], Any] = lambda p: p) -> Any:
    """Return a loss of a scanned, rematerialised stack of layers without a vocabulary."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    one = jax.checkpoint(lambda x, w: block(x, gather(w), causal=False))
    y, _ = lax.scan(lambda x, w: (one(x, w), None), x, p)
    return jnp.mean(jnp.square(y - jnp.roll(x, -1, 1)))


def apply_layers(p: Any, x: Any) -> Any:
    """Return the output of layers in a list."""
    for w in p:
        x = block(x, w, causal=False)
    return x


def stack_loss(y: Any, x: Any) -> Any:
    """Return the loss of an output that shall be the input of the next position."""
    import jax.numpy as jnp

    return jnp.mean(jnp.square(y - jnp.roll(x, -1, 1)))


def gradients(loss: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Return the ordinary gradient of a loss, and the clipped one by each method."""
    import jax

    from plurax.transforms import clipped_grad

    clipped = {f'"{method}"': clipped_grad(loss, l2_clip_norm=1.0, method=method) for method in METHODS}
    return {"ordinary gradient": jax.grad(loss), **clipped}


def compared(rows: list[Row], keys: tuple[str, ...]) -> list[Row]:
    """Add the ratio to the first row for each of these columns."""
    ratios = [
        {f"{key}, ratio": row[key] / rows[0][key] for key in keys if row.get(key) and rows[0][key]} for row in rows
    ]
    return [row | ratio for row, ratio in zip(rows, ratios, strict=True)]


def reported(fun: Callable[..., Any], target: str, *args: Any, **options: Any) -> Any:
    """Return the report of `compile_for`, and print how long it took."""
    from plurax.transforms.program import compile_for

    start = time.perf_counter()
    report = compile_for(fun, target, *args, **options)
    print(f"{target}: {time.perf_counter() - start:.0f} s", flush=True)
    return report


def described(report: Any) -> Row:
    """Return the columns of a report."""
    row = {"temporaries (GB)": report.temporaries / 1e9, "fits": "no" if report.fits is False else "yes"}
    row |= {"TFLOP": report.flops / 1e12} if report.flops else {}
    sent = {x.kind: x for x in report.collectives}
    return row | {
        "collectives": ", ".join(f"{x.runs} {kind}" for kind, x in sent.items()),
        "collectives (MB)": sum(x.bytes for x in sent.values()) / 1e6,
    }


def on_h200() -> Tables:
    """Return the tables for an H200."""
    device = h200()
    import jax
    import jax.numpy as jnp
    from _compiled import convolutions, curvature, lora, shape, transforms

    from plurax.transforms.program import _compile_for

    texts: list[str] = []
    report_of = _compile_for.report_of

    def kept(target: str, devices: int, program: Any, chip: Any) -> Any:
        texts.append(program.as_text())
        return report_of(target, devices, program, chip)

    _compile_for.report_of, _compile_for._devices_of = kept, lambda _: [device]

    def compiled(fun: Any, *args: Any) -> Any:
        return reported(fun, "h200", *args), texts.pop()

    def gpt2(form: str) -> list[Row]:
        p = {"table": shape(50257, 768), "positions": shape(1024, 768), "norm": (shape(768), shape(768))}
        p["layers"] = layers(12, 768, form.startswith("scan"))
        rows, tokens = [], jax.ShapeDtypeStruct((8, 1025), jnp.int32)
        for name, fun in gradients(partial(language_model, form=form)).items():
            row = described(compiled(fun, p, tokens)[0])
            rows.append({"": name} | {key: row[key] for key in ("temporaries (GB)", "TFLOP")})
        return compared(rows, ("temporaries (GB)", "TFLOP"))

    forms = ("layers in a list", "list, each layer rematerialised", "scan, rematerialised")
    tables: Tables = {f"GPT-2 124M, 8 sequences of 1,024 tokens, {form}": partial(gpt2, form) for form in forms}
    return tables | lora(block, layers, compiled) | curvature(compiled) | convolutions(compiled) | transforms(compiled)


def spread(p: Any, axes: Any, devices: int) -> Any:
    """Shard each parameter over all devices along its last axis that they divide; copy it if there is none."""
    import jax
    from jax.sharding import PartitionSpec

    def one(x: Any) -> Any:
        fitting = [i for i in range(1, len(x.shape)) if x.shape[i] % devices == 0]
        return PartitionSpec(*[None] * fitting[-1], axes) if fitting else PartitionSpec()

    return jax.tree.map(one, p)


def on_tpu() -> Tables:
    """Return the tables for TPU v5e."""
    import jax
    import jax.numpy as jnp
    import optax
    from _compiled import ConvNet, cross_entropy, shape, transforms
    from jax.sharding import AbstractMesh
    from jax.sharding import PartitionSpec as P

    from plurax.ensemble import Ensemble, Trainer
    from plurax.ensemble._members.sharding import Layout

    both, grid = ("data", "model"), {"data": 16, "model": 16}

    def compiled(fun: Any, chips: Any, *args: Any, shardings: Any = None) -> Row:
        """Compile for a square slice of this many chips, a mesh of one axis or a dictionary of axes."""
        mesh = chips if isinstance(chips, dict) else {"data": chips}
        side = math.isqrt(math.prod(mesh.values()))
        return described(reported(fun, f"v5e:{side}x{side}", *args, mesh=mesh, shardings=shardings))

    def methods(loss: Any, chips: Any, *args: Any, shardings: Any) -> list[Row]:
        """Compile the ordinary gradient and the clipped ones, but for "auto", which is one of the others."""
        ways = {name: fun for name, fun in gradients(loss).items() if name != '"auto"'}
        rows = [{"": name} | compiled(fun, chips, *args, shardings=shardings) for name, fun in ways.items()]
        return compared(rows, ("temporaries (GB)", "TFLOP", "collectives (MB)"))

    def deep() -> list[Row]:
        p = layers(8, 1024, True)
        return methods(stack, grid, p, shape(1024, 512, 1024), shardings=(spread(p, both, 256), P("data")))

    def large() -> list[Row]:
        p = {"table": shape(50257, 2048), "positions": shape(1024, 2048), "norm": (shape(2048), shape(2048))}
        spread_over = {name: P(None, both) if name != "norm" else P() for name in p}
        p["layers"] = layers(24, 2048, True)
        spread_over |= {"layers": spread(p["layers"], both, 256)}
        model = partial(language_model, form="scan, rematerialised", gather=gathered)
        tokens = jax.ShapeDtypeStruct((1024, 1025), jnp.int32)
        return methods(model, grid, p, tokens, shardings=(spread_over, P(both)))

    def scaling() -> list[Row]:
        p, rows = layers(4, 512, True), []
        for chips in (4, 16, 64, 256):
            shardings, x = (spread(p, "data", chips), P("data")), shape(4 * chips, 128, 512)
            found = methods(partial(stack, gather=gathered), chips, p, x, shardings=shardings)
            rows += [{"chips": chips} | row for row in found]
        return rows

    def divided() -> list[Row]:
        p, columns, split = layers(4, 512, True), P(None, None, "model"), P(None, "model")
        places = {"qkv": columns, "qkv_bias": split, "up": columns, "up_bias": split, "out": split, "down": split}
        shardings = {name: places.get(name, P()) for name in p}, P("data")
        return methods(stack, {"data": 4, "model": 4}, p, shape(16, 128, 512), shardings=shardings)

    def members() -> list[Row]:
        rows = []
        for chips, parts in ((4, 1), (16, 1), (64, 1), (256, 1), (4, 2), (16, 4), (64, 4), (256, 4)):
            mesh = {"ensemble": chips // parts} | ({"data": parts} if parts > 1 else {})
            trainer = Trainer(cross_entropy, optax.adam(1e-3), mesh=AbstractMesh(tuple(mesh.values()), tuple(mesh)))
            create = partial(Ensemble.create, partial(ConvNet, (16, 32, 64), False), 4 * mesh["ensemble"], seed=0)
            state = jax.eval_shape(lambda trainer=trainer, create=create: trainer.init(create()))
            batch = shape(64 * parts, 32, 32, 3), jax.ShapeDtypeStruct((64 * parts,), jnp.int32)
            places = lambda x: P("ensemble") if x.ndim else None, P("data") if parts > 1 else None
            row = compiled(trainer.step, mesh, state, batch, shardings=places)
            row = {"chips": chips, "members": 4 * mesh["ensemble"], "parts of the batch": parts} | row
            numbers = sum(math.prod(x.shape) for x in jax.tree.leaves(state.ensemble.trainable)) / mesh["ensemble"]
            rows.append(row | {"gradients (MB)": 4 * numbers / 1e6})
        return rows

    def divided_members() -> list[Row]:
        """Compile the step of transformers whose arrays are split too, where `Trainer` puts them."""
        rows = []
        for parts in ((1, 2, 2), (4, 2, 2), (16, 2, 2), (64, 2, 2), (16, 4, 4), (16, 16, 1)):
            mesh = dict(zip(("ensemble", "data", "model"), parts, strict=True))
            members, on = 2 * mesh["ensemble"], AbstractMesh(parts, tuple(mesh))
            trainer = Trainer(lambda model, x: stack_loss(model(x), x), optax.adam(1e-3), mesh=on, strategy="vmap")
            one = layers(4, 512, False)

            def start(trainer: Any = trainer, one: Any = one, members: int = members) -> Any:
                zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), one)
                return trainer.init(Ensemble.from_apply(apply_layers, [zeros] * members))

            state, layout = jax.eval_shape(start), Layout.of("benchmark", on)
            places = lambda x, layout=layout: layout.of_members(x).spec if x.ndim else P(), P("data")
            row = compiled(trainer.step, mesh, state, shape(16 * mesh["data"], 128, 512), shardings=places)
            rows.append({"chips": math.prod(parts), "members × data × model": " × ".join(map(str, parts))} | row)
        return rows

    def alone(fun: Any, *args: Any) -> Any:
        return reported(fun, "v5e:2x2", *args), ""

    tables: Tables = {
        "8 layers of 1,024, 1,024 sequences of 512, on v5e:16x16: parameters over 256 chips, batch over 16": deep,
        "GPT-2 of 1.3B parameters, 1,024 sequences of 1,024 tokens, on v5e:16x16: both over 256 chips": large,
        "4 layers of 512, 4 sequences of 128 for each chip, v5e, all over one axis": scaling,
        "4 layers of 512, 16 sequences of 128, tensor parallel, on v5e:4x4: batch over 4, each layer over 4": divided,
        "`Trainer.step` of convolutional networks, 4 on each chip, 64 images for each part of the batch": members,
        "`Trainer.step` of 4 layers of 512, two members on the chips of each, 16 sequences of 128 for each part of the "
        "batch": divided_members,
    }
    return tables | transforms(alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platform", choices=["cuda", "tpu"])
    parser.add_argument("--only", default="", metavar="TEXT", help="the tables with this in their title; keep others")
    given = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    tables, path = on_h200() if given.platform == "cuda" else on_tpu(), HERE / f"accelerators.{given.platform}.json"
    before = json.loads(path.read_text())["tables"] if given.only else {}
    found = {
        title: {"rows": rows(), "claims": []} if given.only in title else before[title]
        for title, rows in tables.items()
        if given.only in title or title in before
    }
    written = {
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib")},
        "device": {
            "platform": given.platform,
            "kind": {"cuda": "compiled for an NVIDIA H200", "tpu": "compiled for TPU v5e"}[given.platform],
            "cores": os.cpu_count(),
        },
        "tables": found,
    }
    path.write_text(json.dumps(written, indent=1) + "\n")
    print("written; render the page with: python benchmarks/render.py")


if __name__ == "__main__":
    main()
