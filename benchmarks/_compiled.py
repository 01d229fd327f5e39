"""What `accelerators.py` compiles besides clipped gradients of whole models: curvature, ensembles, LoRA and others."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from plurax.ensemble import Ensemble, Execution, Trainer
from plurax.ensemble._members.strategy import over_members
from plurax.transforms import clipped_grad, jacrev
from plurax.transforms.program import fold_bn, scan_layers, stack_layers
from plurax.transforms.program._ir.hlo import CONTAINERS, NAMES, HloProgram

Row = dict[str, Any]
Tables = dict[str, Callable[[], list[Row]]]
# From a function and its arguments to the report of `compile_for`, and the text of the program, or "".
Compile = Callable[..., tuple[Any, str]]


def shape(*axes: int) -> Any:
    return jax.ShapeDtypeStruct(axes, jnp.float32)


class ConvNet(nnx.Module):
    """Convolutions of 3x3 with stride 2 from the second on, batch norms on request, and a mean over the image."""

    def __init__(self, widths: tuple[int, ...], norm: bool, rngs: nnx.Rngs) -> None:
        strides = [1, *[2] * (len(widths) - 1)]
        pairs = zip((3, *widths[:-1]), widths, strides, strict=True)
        self.convs = nnx.List([nnx.Conv(i, o, (3, 3), strides=(s, s), rngs=rngs) for i, o, s in pairs])
        self.norms = nnx.List([nnx.BatchNorm(o, rngs=rngs) for o in widths if norm])
        self.out = nnx.Linear(widths[-1], 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for i, conv in enumerate(self.convs):
            x = conv(x)
            x = nnx.relu(self.norms[i](x) if self.norms else x)
        return self.out(x.mean((1, 2)))


class Block(nnx.Module):
    """A residual layer of width 1,024."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(1024, rngs=rngs)
        self.up, self.down = nnx.Linear(1024, 4096, rngs=rngs), nnx.Linear(4096, 1024, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


def cross_entropy(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def figures(report: Any, text: str) -> Row:
    """Return the columns of a program on one device."""
    row = {"temporaries (MB)": report.temporaries / 1e6, "GFLOP": report.flops / 1e9, "GB moved": report.bytes / 1e9}
    if not text:
        return row
    program, skipped = HloProgram(text), {*NAMES, *CONTAINERS, "bitcast"}
    return row | {"kernels": sum(times for x, times in program.runs() if x.opcode not in skipped)}


def transforms(compiled: Compile) -> Tables:
    """Return the tables of `fold_bn`, `scan_layers` and Jacobians within a budget."""

    def norms() -> list[Row]:
        model, x = ConvNet((64, 128, 256), True, nnx.Rngs(0)), shape(64, 64, 64, 3)
        model.eval()

        def call(model: Any, x: Any) -> Any:
            return model(x)

        folded, params, _ = fold_bn(call, model, x)
        rows = [{"": "as it is"} | figures(*compiled(call, model, x))]
        return [*rows, {"": "`fold_bn`"} | figures(*compiled(folded, params, x))]

    def stacks() -> list[Row]:
        layers, x = [Block(nnx.Rngs(i)) for i in range(8)], shape(16, 512, 1024)

        def loop(layers: Any, x: Any) -> Any:
            for layer in layers:
                x = layer(x)
            return jnp.mean(x**2)

        def scanned(stack: Any, x: Any, remat: Any) -> Any:
            return jnp.mean(scan_layers(stack, x, remat=remat)[0] ** 2)

        stack, dots = stack_layers(layers), jax.checkpoint_policies.dots_saveable
        rows = [{"": "a loop in Python"} | figures(*compiled(nnx.grad(loop), layers, x))]
        for name, remat in {"": False, ", remat=dots_saveable": dots, ", remat=True": True}.items():
            row = figures(*compiled(nnx.grad(partial(scanned, remat=remat)), stack, x))
            rows.append({"": "`scan_layers`" + name} | row)
        return rows

    def jacobians() -> list[Row]:
        def products(x: Any, first: Any, second: Any) -> Any:
            hidden = jnp.tanh(jnp.tanh(x @ first) @ second)
            return (hidden[:128, None] * hidden[128:256]).ravel()

        rows, args = [], (shape(2048), shape(2048, 4096), shape(4096, 4096))
        for budget in (None, "256MiB", "128MiB"):
            name = "without a budget" if budget is None else f'memory_budget="{budget}"'
            rows.append({"": name} | figures(*compiled(jacrev(products, memory_budget=budget), *args)))
        return rows

    return {
        "Three convolutions with batch norms, 64 images of 64x64": norms,
        "Gradient of eight layers of width 1,024, 16 sequences of 512": stacks,
        "Jacobian of 16,384 outputs by 2,048 inputs, two layers of 4,096": jacobians,
    }


def lora(block: Callable[..., Any], layers: Callable[..., Any], compiled: Compile) -> Tables:
    """Return the table of clipped gradients of adapters of rank 8, with a frozen base."""
    base, count, width = layers(8, 1024, True), 8, 1024
    sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    adapters = {name: (shape(count, i, 8), shape(count, 8, o)) for name, (i, o) in sizes.items()}

    class Adapted:
        """A weight with an adapter, multiplied one after the other."""

        def __init__(self, weight: Any, adapter: Any) -> None:
            self.weight, self.adapter = weight, adapter

        def __rmatmul__(self, x: Any) -> Any:
            return x @ self.weight + (x @ self.adapter[0]) @ self.adapter[1]

    @jax.checkpoint
    def layer(x: Any, base: Any, adapters: Any) -> Any:
        weights = {name: Adapted(base[name], adapter) for name, adapter in adapters.items()}
        return block(x, base | weights, causal=False)

    def loss(adapters: Any, x: Any, base: Any) -> Any:
        y, _ = jax.lax.scan(lambda x, p: (layer(x, *p), None), x, (base, adapters))
        return jnp.mean(jnp.square(y - jnp.roll(x, -1, 1)))

    def rows() -> list[Row]:
        ways = {"gradient of all weights": jax.grad(loss, (0, 2)), "gradient of the adapters": jax.grad(loss)}
        for method in ("book_keeping", "ghost"):
            clipped = clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=1, method=method)
            ways[f'clipped, "{method}"'] = clipped
        given = adapters, shape(16, 512, width), base
        return [{"": name} | figures(*compiled(way, *given)) for name, way in ways.items()]

    return {"Adapters of rank 8 in eight rematerialised layers of 1,024, 16 sequences of 512": rows}


def convolutions(compiled: Compile) -> Tables:
    """Return the tables of training steps of ensembles with convolutions, by execution."""

    def rows_of(members: int, widths: tuple[int, ...], batch: int) -> list[Row]:
        trainer = Trainer(cross_entropy, optax.sgd(0.1), strategy="vmap")
        create = partial(Ensemble.create, partial(ConvNet, widths, False), members, seed=0)
        state: Any = jax.eval_shape(lambda: trainer.init(create()))
        step = partial(trainer._stepper.executor._step, state._structure)
        # The step of a member takes whether it counts and what it shares, which are none here, before the batch.
        batch_of = shape(batch, 32, 32, 3), jax.ShapeDtypeStruct((batch,), jnp.int32)
        arguments = state._arrays(), None, None, *batch_of
        ways = [Execution(way, products=products) for products in (False, True) for way in ("vmap", "map", "unroll")]
        rows = []
        for way in ways[:-1]:
            report, text = compiled(over_members(step, way, (0, 0, None, None, None), members), *arguments)
            row = {"": str(way)} | figures(report, text)
            calls = [x for x in text.splitlines() if re.search(r'custom_call_target="__cudnn\$conv', x)]
            grouped = sum("feature_group_count" in x for x in calls)
            rows.append(row | ({"grouped convolutions": grouped} if grouped else {}))
        return rows

    return {
        "A step of 8 members, 16-32-64 channels, 64 images of 32x32": partial(rows_of, 8, (16, 32, 64), 64),
        "A step of 4, 64-64-128, 256 images of 32x32": partial(rows_of, 4, (64, 64, 128), 256),
    }


def curvature(compiled: Compile) -> Tables:
    """Return the tables of Kronecker factors, diagonals and Gauss-Newton products."""
    from curvature import functions
    from gradient_statistics import resnet18
    from privacy import gpt

    def rows(job: Any) -> list[Row]:
        found: list[Row] = []
        for name, (fun, args) in functions(job).items():
            row = figures(*compiled(fun, *jax.eval_shape(lambda *args: args, *args)))
            ratios = {f"{key}, ratio": row[key] / (found[0] if found else row)[key] for key in row if key != "kernels"}
            found.append({"": name} | row | ratios)
        return found

    def language_model() -> list[Row]:
        return rows(gpt(8, 1024, 12, 768, 50257))

    def network() -> list[Row]:
        return rows(resnet18(np.random.default_rng(0), 128, 32))

    return {
        "Curvature of a GPT, 12 layers of 768, tied vocabulary 50,257, 8 sequences of 1,024": language_model,
        "Curvature of a ResNet-18 with group norms, 128 images of 32x32": network,
    }
