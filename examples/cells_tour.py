"""MindSpore's guide to cells, written in JAX and Flax.

    python examples/cells_tour.py

The sections follow the guide "Network construction", with its sizes and numbers: parameters by name, initialization,
freezing, mixed precision and files; a comparison of a cell in two frameworks; compiled and eager
execution; code that cannot be compiled; the number of forward passes; a custom backward pass; and dynamic shapes. All
results are checked before they are printed.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

from plurax.transforms import grad, value_and_grad
from plurax.transforms.modules import (
    freeze,
    load_params,
    named_parameters,
    reinitialize,
    save_params,
    with_precision,
)
from plurax.transforms.program import bucketed, masked_topk_mean

console = Console(width=100, highlight=False)


def show(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    table = Table(*head)
    for row in rows:
        table.add_row(*map(str, row))
    console.print(f"\n{title}", style="bold")
    console.print(table)


def outcome(call: Callable[[], Any]) -> str:
    """Return the result of a call as text: a number, or the name of the error."""
    try:
        return f"{float(call()):g}"
    except Exception as error:  # of any type, since the tables show the type
        return type(error).__name__


# Parameters: names, initial values, and freezing


class Classifier(nnx.Module):
    """Two convolutions with batch norms, and two dense layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1, self.norm1 = nnx.Conv(1, 6, (3, 3), rngs=rngs), nnx.BatchNorm(6, rngs=rngs)
        self.conv2, self.norm2 = nnx.Conv(6, 8, (3, 3), strides=2, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.hidden, self.out = nnx.Linear(4 * 5 * 8, 16, rngs=rngs), nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits (batch, 10) for images (batch, 8, 10, 1)."""
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return self.out(nnx.relu(self.hidden(x.reshape(len(x), -1))))


def loss_of(model: Classifier, x: jax.Array, labels: jax.Array) -> jax.Array:
    logits = model(x).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def given() -> tuple[jax.Array, jax.Array]:
    return jax.random.normal(jax.random.key(3), (12, 8, 10, 1)), jnp.arange(12) % 10


def parameters_by_name() -> dict[str, Any]:
    named = named_parameters(Classifier(nnx.Rngs(0)))
    show(
        f"parameters_and_names(): {len(named)} arrays, {sum(x.size for x in named.values())} numbers",
        ("name", "shape"),
        ((name, x.shape) for name, x in named.items()),
    )
    return {name: x.shape for name, x in named.items()}


def first_values_by_type() -> dict[str, Any]:
    normal, uniform = nnx.initializers.he_normal(), nnx.initializers.he_uniform()
    zeros, ones = nnx.initializers.zeros, nnx.initializers.ones
    rules = {
        nnx.Conv: {"kernel": normal, "bias": zeros},
        nnx.BatchNorm: {"scale": ones, "bias": zeros},
        nnx.Linear: {"kernel": uniform, "bias": zeros},
    }
    named = named_parameters(reinitialize(Classifier(nnx.Rngs(0)), rules, jax.random.key(0)))
    # Both have variance 2 / inputs; a uniform distribution ends at √3 standard deviations.
    rows = {}
    for name, inputs in (("conv1.kernel", 9), ("conv2.kernel", 54), ("hidden.kernel", 160), ("out.kernel", 16)):
        x, wanted = np.asarray(named[name]), (2 / inputs) ** 0.5
        assert abs(x.std() - wanted) < 4 * wanted / x.size**0.5
        rows[name] = wanted, float(x.std()), float(np.abs(x).max() / wanted)
    assert rows["hidden.kernel"][2] <= 3**0.5 < rows["conv2.kernel"][2]
    assert all((named[f"norm{i}.scale"] == 1).all() for i in (1, 2))
    assert not any(named[f"{layer}.bias"].any() for layer in ("conv1", "norm1", "hidden", "out"))
    show(
        "Initializers by layer type: he_normal for convolutions, he_uniform for dense layers, ones and zeros for norms",
        ("kernel", "expected std", "sample std", "largest / std"),
        ((name, *(f"{x:.3f}" for x in row)) for name, row in rows.items()),
    )
    return rows


def trained(model: Classifier, steps: int) -> Classifier:
    """Train `model` for some steps with weight decay, which changes every parameter that the optimizer receives."""
    x, labels = given()
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, weight_decay=0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model: Classifier, optimizer: nnx.Optimizer, x: jax.Array, labels: jax.Array) -> None:
        optimizer.update(model, grad(loss_of)(model, x, labels))

    for _ in range(steps):
        step(model, optimizer, x, labels)
    return model


def work_of_gradient(model: Classifier) -> float:
    """Return the floating-point operations of the compiled gradient."""
    graphdef, state = nnx.split(model)
    gradient = jax.jit(lambda state, x, labels: nnx.to_pure_dict(grad(loss_of)(nnx.merge(graphdef, state), x, labels)))
    return gradient.lower(state, *given()).compile().cost_analysis()["flops"]


def frozen_parameters(steps: int) -> dict[str, Any]:
    body = ("conv1", "norm1", "conv2", "norm2")

    class Cut(Classifier):
        """The same network, with `stop_gradient` after the convolutional layers."""

        def __call__(self, x: jax.Array) -> jax.Array:
            """Return logits for images."""
            x = nnx.relu(self.norm2(self.conv2(nnx.relu(self.norm1(self.conv1(x))))))
            return self.out(nnx.relu(self.hidden(jax.lax.stop_gradient(x).reshape(len(x), -1))))

    found = {}
    for name, model in (
        ("all parameters trainable", Classifier(nnx.Rngs(0))),
        ('freeze(model, ["conv1", ...])', freeze(Classifier(nnx.Rngs(0)), list(body))),
        ("jax.lax.stop_gradient in the model", Cut(nnx.Rngs(0))),
    ):
        work, before = work_of_gradient(model), named_parameters(model)
        after = named_parameters(trained(model, steps))
        moved = [name for name in before if (before[name] != after[name]).any()]
        found[name] = (
            work,
            sum(name.startswith(body) for name in moved),
            sum(not name.startswith(body) for name in moved),
        )
    show(
        f"requires_grad=False: {steps} steps of AdamW with weight decay",
        ("", "gradient (kFLOP)", "changed features", "changed others"),
        ((name, f"{work / 1e3:.0f}", f"{a} of 8", f"{b} of 4") for name, (work, a, b) in found.items()),
    )
    console.print("stop_gradient sets their gradients to zero, but weight decay still changes them.")
    return found


def mixed_precision() -> dict[str, Any]:
    x, labels = given()
    model = Classifier(nnx.Rngs(0))
    mixed = with_precision(model, jnp.bfloat16)  # keep={nnx.BatchNorm: float32}
    dtypes = {}
    for name, one in (("unchanged", model), ("with_precision(model, bfloat16)", mixed)):
        program = str(jax.make_jaxpr(lambda x, one=one: nnx.view(one, use_running_average=True)(x))(x))
        found = re.findall(r":(\w+)\[[\d,]*\] = (conv_general_dilated|dot_general|rsqrt)", program)
        kinds: dict[str, set[str]] = {}
        for dtype, operation in found:
            kinds.setdefault(operation, set()).add(dtype)
        value, gradient = nnx.jit(value_and_grad(loss_of))(one, x, labels)
        stored = {str(leaf.dtype) for leaf in jax.tree.leaves(gradient)}
        dtypes[name] = {key: "/".join(sorted(x)) for key, x in kinds.items()} | {
            "gradients": "/".join(stored),
            "loss": f"{value.dtype}: {float(value):.4f}",
        }
    show(
        "Mixed precision: bfloat16 except for batch norms and the loss",
        ("", *next(iter(dtypes.values()))),
        ((name, *row.values()) for name, row in dtypes.items()),
    )
    return dtypes


def files_of_parameters() -> dict[str, str]:
    model, found = Classifier(nnx.Rngs(0)), {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_params(path, trained(model, 2))
        again = load_params(path, Classifier(nnx.Rngs(1)))
        view, same = (nnx.view(x, use_running_average=True) for x in (model, again))
        assert bool((view(given()[0]) == same(given()[0])).all())
        found["the same architecture"] = "loaded, outputs bitwise equal"

        class Renamed(Classifier):
            """The same network with its last layer renamed, and an extra layer that is not in the file."""

            def __init__(self, rngs: nnx.Rngs) -> None:
                super().__init__(rngs)
                self.head, self.extra = self.out, nnx.Linear(3, 2, rngs=rngs)
                del self.out

        renames = {"out.kernel": "head.kernel", "out.bias": "head.bias"}
        for name, call in (
            ("a renamed layer and an extra layer", lambda: load_params(path, Renamed(nnx.Rngs(1)))),
            ("rename={...}", lambda: load_params(path, Renamed(nnx.Rngs(1)), rename=renames)),
        ):
            try:
                call()
            except ValueError as error:
                found[name] = str(error).replace(str(path), path.name)
        damaged = bytearray(path.read_bytes())
        damaged[-100] ^= 4
        path.write_bytes(damaged)
        try:
            load_params(path, Classifier(nnx.Rngs(1)))
        except ValueError as error:
            found["one bit of the file flipped"] = str(error).replace(str(path), path.name)
    show("save_checkpoint and load_param_into_net", ("file and model", "result of load_params"), found.items())
    return found


# A cell compared with NumPy


class MyCell(nnx.Module):
    """The cell of the guide: a network followed by ReLU."""

    def __init__(self, net: nnx.Module) -> None:
        self.net = net

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the output of `net`, with negative numbers replaced by zero."""
        return nnx.relu(self.net(x))


def cell_by_numpy(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Compute the cell in float64 NumPy without padding: dot products of the filters with all windows."""
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(float), w.shape[:2], axis=(1, 2))
    return np.maximum(np.tensordot(windows, w.astype(float), ([4, 5, 3], [0, 1, 2])), 0)


def compare_a_cell() -> dict[str, Any]:
    x = np.random.default_rng(0).uniform(-1, 1, (2, 12, 12, 120)).astype(np.float32)
    found = {}
    for padding, name in (("SAME", 'MindSpore: "same"'), ("VALID", 'PyTorch: "pad" with 0')):
        cell = MyCell(nnx.Conv(120, 240, (4, 4), padding=padding, use_bias=False, rngs=nnx.Rngs(0)))
        # The guide fills both with 0.1; random weights also detect a wrong order of the filter axes.
        weights = np.asarray(cell.net.kernel[...])
        out, expected = cell(x), cell_by_numpy(weights, x)
        found[name] = out.shape, float(np.abs(out - expected).max()) if out.shape == expected.shape else None
    show(
        f"A cell in two frameworks: Conv 120 to 240, kernel 4; shape of the NumPy result: {expected.shape}",
        ("default padding", "result", "largest difference"),
        ((name, shape, "" if deviation is None else f"{deviation:.1e}") for name, (shape, deviation) in found.items()),
    )
    return found


# Compiled and eager execution


RUNS: collections.Counter[str] = collections.Counter()


def descend(model: nnx.Module, x: jax.Array, y: jax.Array) -> jax.Array:
    """Take a training step. The counter is a side effect: it runs with the Python code, so only while tracing."""
    RUNS["Python"] += 1
    value, gradient = value_and_grad(lambda model, x, y: jnp.mean((model(x) - y) ** 2))(model, x, y)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradient))
    return value


def compiled_and_step_by_step(steps: int = 4) -> dict[str, Any]:
    x = jax.random.normal(jax.random.key(0), (7, 3))
    y = x.sum(1, keepdims=True)
    found = {}
    for name, context in (("nnx.jit(step)", contextlib.nullcontext()), ("under jax.disable_jit()", jax.disable_jit())):
        RUNS.clear()
        model, step = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), nnx.jit(descend)
        with context:
            found[name] = [float(step(model, x, y)) for _ in range(steps)], RUNS["Python"]
    one, other = (losses for losses, _ in found.values())
    np.testing.assert_allclose(one, other, rtol=1e-5)
    show(
        "GRAPH_MODE and PYNATIVE_MODE: a training step, compiled and operation by operation",
        ("", *(f"loss {i}" for i in range(steps)), "Python runs"),
        ((name, *(f"{loss:.6f}" for loss in losses), runs) for name, (losses, runs) in found.items()),
    )
    return found


# Code that cannot be compiled


def in_a_thread(x: jax.Array) -> jax.Array:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(jnp.square, x).result()


def from_a_list(transform: Callable[..., Any]) -> Callable[[float], jax.Array]:
    """Return a function that uses a value which a transformed function appended to a list."""

    def use(x: float) -> jax.Array:
        kept: list[jax.Array] = []
        transform(lambda x: kept.append(x * x) or x)(x)
        return kept[0] + 0

    return use


# x², written in ways that work for an array, and what to write instead in a traced function.
WRITTEN: dict[str, tuple[Callable[..., Any], str]] = {
    "jnp.square(x)": (jnp.square, ""),
    "np.square(x)": (lambda x: np.square(x), "jnp.square"),
    "x * np.asarray(x)": (lambda x: x * np.asarray(x), "x; or jax.lax.stop_gradient(x), if intended"),
    "x * float(x)": (lambda x: x * float(x), "the same"),
    "x * x.item()": (lambda x: x * x.item(), "the same"),
    "x * x if x > 0 else x": (lambda x: x * x if x > 0 else x, "jnp.where, jax.lax.cond"),
    "a thread": (in_a_thread, "jax.vmap; threads around the compiled function"),
}


def what_may_not_be_compiled() -> dict[str, tuple[str, str]]:
    found = {
        name: (outcome(lambda fun=fun: jax.jit(fun)(3.0)), outcome(lambda fun=fun: jax.grad(fun)(3.0)))
        for name, (fun, _) in WRITTEN.items()
    }
    found["appending to a list"] = (
        outcome(lambda: from_a_list(jax.jit)(3.0)),
        outcome(lambda: from_a_list(jax.grad)(3.0)),
    )
    remedies = {name: remedy for name, (_, remedy) in WRITTEN.items()} | {
        "appending to a list": "return it (has_aux=True)"
    }
    show(
        "x² at 3 (value 9, slope 6): code that fails in a traced function",
        ("code", "jax.jit / jax.grad", "instead"),
        ((name, " / ".join(dict.fromkeys(outcomes)), remedies[name]) for name, outcomes in found.items()),
    )
    if found["x * x.item()"][1] == "3":
        console.print("x.item() under jax.grad alone cuts the gradient without an error, like MindSpore's asnumpy().")
    drawn = jax.jit(lambda x: x + random.random())
    same = float(drawn(0.0)) == float(drawn(0.0))
    console.print(
        f"random.random() runs only while tracing: two calls give {'the same number' if same else 'two numbers'}."
    )
    return found | {"random": ("one" if same else "two", "")}


# Gradients through a host callback


def draw_positions(x: np.ndarray, seed: np.ndarray, number: int) -> np.ndarray:
    """Draw positions of values above 0.5 in each row, with replacement, on the host; pure, since it takes a seed."""
    generator = np.random.default_rng(int(seed))
    return np.stack([generator.choice(np.flatnonzero(row > 0.5), number) for row in np.asarray(x)]).astype(np.int32)


def positions(x: jax.Array, seed: jax.Array, number: int) -> jax.Array:
    shape = jax.ShapeDtypeStruct((len(x), number), jnp.int32)
    return jax.pure_callback(lambda x, seed: draw_positions(x, seed, number), shape, x, seed)


def values_on_the_host(x: jax.Array, seed: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """Return drawn values and their positions, both computed on the host."""

    def sample(x: np.ndarray, seed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = draw_positions(x, seed, number)
        return np.take_along_axis(np.asarray(x), found, 1), found

    shapes = jax.ShapeDtypeStruct((len(x), number), x.dtype), jax.ShapeDtypeStruct((len(x), number), jnp.int32)
    return jax.pure_callback(sample, shapes, x, seed)


def scatter_add(like: jax.Array, where: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Return the gradient: for each position, the sum of the cotangents over all its draws."""
    return jnp.zeros_like(like).at[jnp.arange(len(like))[:, None], where].add(cotangent)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def sampler(x: jax.Array, seed: jax.Array, number: int) -> jax.Array:
    """Draw `number` random values above 0.5 from each row: MindSpore's MySampler, with its backward pass."""
    return values_on_the_host(x, seed, number)[0]


def _forward(x: jax.Array, seed: jax.Array, number: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    values, where = values_on_the_host(x, seed, number)
    return values, (x, where)


def _backward(_: int, saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None]:
    return scatter_add(*saved, cotangent), None


sampler.defvjp(_forward, _backward)


def take_positions(x: jax.Array, seed: jax.Array, number: int) -> jax.Array:
    """Draw only the positions on the host; JAX differentiates the selection of the values."""
    return jnp.take_along_axis(x, positions(jax.lax.stop_gradient(x), seed, number), 1)


def native(x: jax.Array, seed: jax.Array, number: int) -> jax.Array:
    """Draw the positions with `jax.random`, without a callback."""
    chances = jnp.where(x > 0.5, 0.0, -jnp.inf)[:, None]
    where = jax.random.categorical(jax.random.key(seed), chances, shape=(len(x), number))
    return jnp.take_along_axis(x, where, 1)


def a_backward_pass_of_ones_own() -> dict[str, Any]:
    x = jnp.asarray(np.random.RandomState(1).uniform(0, 3, (2, 5)), jnp.float32)  # the numbers of the guide
    guide = scatter_add(x, jnp.array([[3, 1, 3], [1, 4, 1]]), jnp.ones((2, 3)))
    np.testing.assert_array_equal(guide, [[0, 1, 0, 2, 0], [0, 2, 0, 0, 1]])
    seed = 7

    def of_the_sum(fun: Callable[..., Any]) -> Callable[[jax.Array], jax.Array]:
        return jax.jit(grad(lambda x: jnp.sum(fun(x, seed, 3))))

    try:
        of_the_sum(lambda *args: values_on_the_host(*args)[0])(x)
    except ValueError as error:
        refused = str(error)
    found = {}
    for name, fun in (
        ("values by a callback, custom backward pass", sampler),
        ("positions by a callback", take_positions),
        ("JAX only", native),
    ):
        values, gradient = jax.jit(fun, static_argnums=2)(x, seed, 3), of_the_sum(fun)(x)
        assert bool((values > 0.5).all())
        assert bool((gradient.sum(1) == 3).all())
        found[name] = np.asarray(gradient)
    np.testing.assert_array_equal(found["values by a callback, custom backward pass"], found["positions by a callback"])
    show(
        "Three random values above 0.5 from each row: the gradient counts how often each was drawn",
        ("", "row 0", "row 1"),
        ((name, *(" ".join(f"{times:.0f}" for times in row) for row in result)) for name, result in found.items()),
    )
    console.print(f"Values by a callback, without a backward pass: {refused}")
    return found | {"guide": np.asarray(guide), "refused": refused}


# The forward pass runs once


class Normalized(nnx.Module):
    """A dense layer and a batch norm; a callback counts the forward passes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense, self.norm = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, momentum=0.9, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return normalized features (batch, 4)."""
        jax.debug.callback(lambda: RUNS.update(forward=1))
        return self.norm(self.dense(x))


def the_forward_pass_runs_once() -> dict[str, Any]:
    x = jax.random.normal(jax.random.key(1), (6, 3)) + 2
    found = {}
    for name, wrap in (("not compiled", lambda fun: fun), ("compiled", nnx.jit)):
        RUNS.clear()
        model = Normalized(nnx.Rngs(0))
        step = wrap(lambda model, x: value_and_grad(lambda model, x: jnp.mean(model(x) ** 3))(model, x))
        jax.block_until_ready(step(model, x))
        jax.effects_barrier()
        moved = model.norm.mean[...] / model.dense(x).mean(0)  # 1 − 0.9 for one run, 1 − 0.9² for two
        found[name] = RUNS["forward"], float(moved.min()), float(moved.max())
    show(
        "value_and_grad of a model with a batch norm: MindSpore needs set_grad for one forward pass",
        ("", "forward passes", "update of the running mean"),
        ((name, runs, f"{low:.3f} to {high:.3f} of the batch mean") for name, (runs, low, high) in found.items()),
    )
    return found


# Dynamic shapes


PRED = (
    (0.417022005, 0.720324516),
    (1.14374816e-4, 0.302332580),
    (0.146755889, 0.0923385918),
    (0.186260208, 0.345560730),
    (0.396767467, 0.538816750),
)
LABEL = (-1, 0, 1, 1, 0)


def hardest(pred: jax.Array, label: jax.Array) -> jax.Array:
    """Return the loss of the guide: the mean cross entropy of the hardest 70 % of the examples with positive labels."""
    losses = optax.softmax_cross_entropy_with_integer_labels(pred, label * (label > 0))
    return masked_topk_mean(losses, label > 0, 0.7)


def shapes_that_vary() -> dict[str, Any]:
    pred, label = jnp.array(PRED), jnp.array(LABEL)
    loss, slope = jax.jit(value_and_grad(hardest))(pred, label)

    # Selection by a mask: the number of selected rows is unknown at compile time, but its maximum is known.
    positive = jax.jit(lambda pred, label: pred[jnp.nonzero(label > 0, size=3, fill_value=4)[0]])(pred, label)
    np.testing.assert_array_equal(positive[:2], pred[2:4])

    # Branches of a `cond` must return arrays of one shape: pad the shorter one, and return the number of valid rows.
    def first_row_or_two(two: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.cond(two, lambda x: (x[:2], 2), lambda x: (jnp.zeros((2, 2)).at[:1].set(x[:1]), 1), x)

    rows = {two: int(jax.jit(first_row_or_two)(two, pred)[1]) for two in (True, False)}
    try:
        jax.jit(lambda two, x: jax.lax.cond(two, lambda x: x[:2], lambda x: x[:1], x))(True, pred)
    except TypeError as error:
        refused = str(error).partition(",")[0].partition(" but")[0]

    lengths = np.random.default_rng(0).integers(1, 257, 200)
    scores = bucketed(lambda x, mask: jnp.where(mask, jnp.tanh(x), 0).sum() / mask.sum())
    for n in lengths:
        x = np.linspace(-1, 1, n, dtype=np.float32)
        np.testing.assert_allclose(scores(x), np.tanh(x).mean(), atol=1e-6)
    show(
        "Dynamic shapes: a fixed size and a mask",
        ("", "result"),
        (
            ("mean of the hardest 70 % of the positives", f"{float(loss):.7f}"),
            ("rows of pred with a nonzero gradient", int(slope.any(1).sum())),
            ("masked_select, at most 3 rows", positive.shape),
            ("branches of different shapes", f"{refused}; padded: {rows[True]} rows and {rows[False]}"),
            (f"{len(lengths)} arrays of {len(set(lengths.tolist()))} lengths", f"{scores.traces} compilations"),
        ),
    )
    return {"loss": float(loss), "traces": scores.traces, "rows": rows, "refused": refused}


def main() -> dict[str, Any]:
    return {
        "names": parameters_by_name(),
        "first values": first_values_by_type(),
        "frozen": frozen_parameters(steps=4),
        "precision": mixed_precision(),
        "files": files_of_parameters(),
        "cell": compare_a_cell(),
        "modes": compiled_and_step_by_step(),
        "forbidden": what_may_not_be_compiled(),
        "sampler": a_backward_pass_of_ones_own(),
        "forward": the_forward_pass_runs_once(),
        "shapes": shapes_that_vary(),
    }


if __name__ == "__main__":
    main()
