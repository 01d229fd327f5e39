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


def language_model(p: Any, tokens: Any, form: str) -> Any:
    """Return the loss of GPT-2, with a tied vocabulary; `form` says how its layers are written."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    x = p["table"][tokens[:, :-1]] + p["positions"][: tokens.shape[1] - 1]
    if form == "scan, rematerialised":
        x, _ = lax.scan(lambda x, w: (jax.checkpoint(block)(x, w), None), x, p["layers"])
    else:
        one = jax.checkpoint(block) if "rematerialised" in form else block
        for w in p["layers"]:
            x = one(x, w)
    logits = jax.nn.log_softmax(normalized(x, p["norm"]) @ p["table"].T)
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))


def stack(p: Any, x: Any) -> Any:
    """Return a loss of a scanned, rematerialised stack of layers without a vocabulary."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    one = jax.checkpoint(partial(block, causal=False))
    y, _ = lax.scan(lambda x, w: (one(x, w), None), x, p)
    return jnp.mean(jnp.square(y - jnp.roll(x, -1, 1)))


def gradients(loss: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Return the ordinary gradient of a loss, and the clipped one by each method."""
    import jax

    from plurax.transforms import clipped_grad

    clipped = {f'"{method}"': clipped_grad(loss, l2_clip_norm=1.0, method=method) for method in METHODS}
    return {"ordinary gradient": jax.grad(loss), **clipped}


def compared(rows: list[Row], keys: tuple[str, ...]) -> list[Row]:
    """Add the ratio to the first row for each of these columns."""
    ratios = [{f"{key}, ratio": row[key] / rows[0][key] for key in keys if row.get(key)} for row in rows]
    return [row | ratio for row, ratio in zip(rows, ratios, strict=True)]


def described(report: Any) -> Row:
    """Return the columns of a report."""
    row = {"temporaries (GB)": report.temporaries / 1e9, "fits": "no" if report.fits is False else "yes"}
    row |= {"TFLOP": report.flops / 1e12} if report.flops else {}
    sent = {x.kind: x for x in report.collectives}
    return row | {
        "collectives": ", ".join(f"{x.runs} {kind}" for kind, x in sent.items()),
        "collectives (MB)": sum(x.bytes for x in sent.values()) / 1e6,
    }


def on_h200() -> dict[str, list[Row]]:
    """Return the tables for an H200."""
    device = h200()
    import jax
    import jax.numpy as jnp

    from plurax.transforms.program._compile_for import report_of

    here = jax.sharding.SingleDeviceSharding(device)
    tokens = jax.ShapeDtypeStruct((8, 1025), jnp.int32)
    tables = {}

    def shape(*axes: int) -> Any:
        return jax.ShapeDtypeStruct(axes, jnp.float32)

    for form in ("layers in a list", "list, each layer rematerialised", "scan, rematerialised"):
        p = {"table": shape(50257, 768), "positions": shape(1024, 768), "norm": (shape(768), shape(768))}
        p["layers"] = layers(12, 768, form.startswith("scan"))
        rows = []
        for name, fun in gradients(partial(language_model, form=form)).items():
            compiled = jax.jit(fun, in_shardings=here, out_shardings=here).lower(p, tokens).compile()
            row = described(report_of("h200", 1, compiled, None))
            rows.append({"": name} | {key: row[key] for key in ("temporaries (GB)", "TFLOP")})
            print(form, rows[-1], flush=True)
        tables[f"GPT-2 124M, 8 sequences of 1,024 tokens, {form}"] = compared(rows, ("temporaries (GB)", "TFLOP"))
    return tables


def spread(p: Any, axes: Any, devices: int) -> Any:
    """Shard each parameter over all devices along its last axis that they divide; copy it if there is none."""
    import jax
    from jax.sharding import PartitionSpec

    def one(x: Any) -> Any:
        fitting = [i for i in range(1, len(x.shape)) if x.shape[i] % devices == 0]
        return PartitionSpec(*[None] * fitting[-1], axes) if fitting else PartitionSpec()

    return jax.tree.map(one, p)


def on_tpu() -> dict[str, list[Row]]:
    """Return the tables for TPU v5e."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from plurax.transforms.program import compile_for

    tables: dict[str, list[Row]] = {}

    def row_of(fun: Any, chips: dict[str, int], width: int, number: int, batch: int, length: int, over: Any) -> Row:
        """Compile one case: parameters over all chips, the batch over the axes `over` of the mesh."""
        p, x = layers(number, width, True), jax.ShapeDtypeStruct((batch, length, width), jnp.float32)
        count = math.prod(chips.values())
        side = math.isqrt(count)
        shardings = spread(p, tuple(chips), count), PartitionSpec(over)
        return described(compile_for(fun, f"v5e:{side}x{side}", p, x, mesh=chips, shardings=shardings))

    small = "8 layers of 1,024, 1,024 sequences of 512, on v5e:16x16: parameters over 256 chips, batch over 16"
    large = "24 layers of 2,048 (1.2B parameters), 1,024 sequences of 1,024, on v5e:16x16: both over 256 chips"
    grid = {"data": 16, "model": 16}
    cases = {small: (grid, 1024, 8, 1024, 512, "data"), large: (grid, 2048, 24, 1024, 1024, ("data", "model"))}
    for title, case in cases.items():
        rows = []
        for name, fun in gradients(stack).items():
            rows.append({"": name} | row_of(fun, *case))
            print(title, rows[-1], flush=True)
        tables[title] = compared(rows, ("temporaries (GB)", "TFLOP", "collectives (MB)"))
    rows = []
    for name, fun in gradients(stack).items():
        for chips in (4, 16, 64, 256) if name != '"auto"' else ():
            rows.append({"": name, "chips": chips} | row_of(fun, {"data": chips}, 1024, 4, 4 * chips, 512, "data"))
            print(rows[-1], flush=True)
    tables["4 layers of 1,024, 4 sequences of 512 for each chip, v5e, all over one axis"] = rows
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platform", choices=["cuda", "tpu"])
    platform = parser.parse_args().platform
    os.environ["JAX_PLATFORMS"] = "cpu"
    tables = on_h200() if platform == "cuda" else on_tpu()
    kind = {"cuda": "compiled for an NVIDIA H200", "tpu": "compiled for TPU v5e"}[platform]
    found = {
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib")},
        "device": {"platform": platform, "kind": kind, "cores": os.cpu_count()},
        "tables": {title: {"rows": rows, "claims": []} for title, rows in tables.items()},
    }
    (HERE / f"accelerators.{platform}.json").write_text(json.dumps(found, indent=1) + "\n")
    print("written; render the page with: python benchmarks/render.py")


if __name__ == "__main__":
    main()
