"""MindSpore's guide to cells, and how JAX and Flax say it.

    python examples/cells_tour.py

A cell compared with the same cell elsewhere, compiled against step by step, what may not stand in a compiled function,
how often a forward pass runs, and a backward pass of one's own: the steps of the guide "Network construction", with its
sizes and numbers. Everything is checked before it is printed.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from plurax.transforms import grad, value_and_grad

console = Console(width=120, highlight=False)


def show(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    table = Table(*head)
    for row in rows:
        table.add_row(*map(str, row))
    console.print(f"\n{title}", style="bold")
    console.print(table)


def said(call: Callable[[], Any]) -> str:
    """What a call gives: a number, or the name of its error."""
    try:
        return f"{float(call()):g}"
    except Exception as error:
        return type(error).__name__


# A cell, and the same cell elsewhere


class MyCell(nnx.Module):
    """The guide's: a network, and what is not negative of its result."""

    def __init__(self, net: nnx.Module) -> None:
        self.net = net

    def __call__(self, x: jax.Array) -> jax.Array:
        """As `net`, with zeros for what is negative."""
        return nnx.relu(self.net(x))


def cell_by_numpy(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The same in 64-bit NumPy: no padding, the dot product of the filters with all that they see."""
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(float), w.shape[:2], axis=(1, 2))
    return np.maximum(np.einsum("nhwcij,ijco->nhwo", windows, w.astype(float)), 0)


def compare_a_cell() -> dict[str, Any]:
    x = np.random.default_rng(0).uniform(-1, 1, (2, 12, 12, 120)).astype(np.float32)
    found = {}
    for padding, name in (("SAME", '"same", as MindSpore has it'), ("VALID", '"pad" with 0, as PyTorch has it')):
        cell = MyCell(nnx.Conv(120, 240, (4, 4), padding=padding, use_bias=False, rngs=nnx.Rngs(0)))
        # The guide fills both with 0.1; weights that differ would also show filters whose axes are in another order.
        weights = np.asarray(cell.net.kernel[...])
        out, expected = cell(x), cell_by_numpy(weights, x)
        found[name] = out.shape, float(np.abs(out - expected).max()) if out.shape == expected.shape else None
    show(
        f"A cell in two places: Conv 120 to 240, kernel 4; in NumPy its result is {expected.shape}",
        ("padding, if none is given", "result", "largest difference"),
        ((name, shape, "" if apart is None else f"{apart:.1e}") for name, (shape, apart) in found.items()),
    )
    return found


# Compiled, and step by step


RUNS: collections.Counter[str] = collections.Counter()


def descend(model: nnx.Module, x: jax.Array, y: jax.Array) -> jax.Array:
    """A step of training. Its Python runs whenever it is traced: what counts here is a side effect."""
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
        "GRAPH_MODE and PYNATIVE_MODE: one step of training, compiled and operation by operation",
        ("", *(f"loss {i}" for i in range(steps)), "its Python runs"),
        ((name, *(f"{loss:.6f}" for loss in losses), runs) for name, (losses, runs) in found.items()),
    )
    return found


# What may not stand in a compiled function


def in_a_thread(x: jax.Array) -> jax.Array:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(jnp.square, x).result()


def from_a_list(transform: Callable[..., Any]) -> Callable[[float], jax.Array]:
    """Use what a transformed function has put into a list, after it has returned."""

    def use(x: float) -> jax.Array:
        kept: list[jax.Array] = []
        transform(lambda x: kept.append(x * x) or x)(x)
        return kept[0] + 0

    return use


# x², in ways that are fine for an array, and what to write instead.
WRITTEN: dict[str, tuple[Callable[..., Any], str]] = {
    "jnp.square(x)": (jnp.square, ""),
    "np.square(x)": (lambda x: np.square(x), "jnp.square"),
    "x * np.asarray(x)": (lambda x: x * np.asarray(x), "x; or jax.lax.stop_gradient(x), if that was meant"),
    "x * float(x)": (lambda x: x * float(x), "the same"),
    "x * x.item()": (lambda x: x * x.item(), "the same"),
    "x * x if x > 0 else x": (lambda x: x * x if x > 0 else x, "jnp.where, jax.lax.cond"),
    "a thread": (in_a_thread, "jax.vmap; threads around the compiled function"),
}


def what_may_not_be_compiled() -> dict[str, tuple[str, str]]:
    found = {
        name: (said(lambda fun=fun: jax.jit(fun)(3.0)), said(lambda fun=fun: jax.grad(fun)(3.0)))
        for name, (fun, _) in WRITTEN.items()
    }
    found["a list outside"] = said(lambda: from_a_list(jax.jit)(3.0)), said(lambda: from_a_list(jax.grad)(3.0))
    remedies = {name: remedy for name, (_, remedy) in WRITTEN.items()} | {"a list outside": "return it (has_aux=True)"}
    show(
        "x² at 3, which is 9 with slope 6, and what must not be in a function that is traced",
        ("written as", "jax.jit", "jax.grad", "instead"),
        ((name, *outcomes, remedies[name]) for name, outcomes in found.items()),
    )
    if found["x * x.item()"][1] == "3":
        console.print("x.item() under jax.grad alone is like MindSpore's asnumpy(): it cuts the gradient, silently.")
    drawn = jax.jit(lambda x: x + random.random())
    same = float(drawn(0.0)) == float(drawn(0.0))
    console.print(f"random.random() runs while tracing: two calls give {'one number' if same else 'two numbers'}.")
    return found | {"random": ("one" if same else "two", "")}


# Gradients through a host


def draw_positions(x: np.ndarray, seed: np.ndarray, number: int) -> np.ndarray:
    """For each row, positions of values above 0.5, with replacement. On the host; the seed makes it a function."""
    generator = np.random.default_rng(int(seed))
    return np.stack([generator.choice(np.flatnonzero(row > 0.5), number) for row in np.asarray(x)]).astype(np.int32)


def positions(x: jax.Array, seed: jax.Array, number: int) -> jax.Array:
    shape = jax.ShapeDtypeStruct((len(x), number), jnp.int32)
    return jax.pure_callback(lambda x, seed: draw_positions(x, seed, number), shape, x, seed)


def values_on_the_host(x: jax.Array, seed: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """Both the values and their positions, found on the host."""

    def sample(x: np.ndarray, seed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = draw_positions(x, seed, number)
        return np.take_along_axis(np.asarray(x), found, 1), found

    shapes = jax.ShapeDtypeStruct((len(x), number), x.dtype), jax.ShapeDtypeStruct((len(x), number), jnp.int32)
    return jax.pure_callback(sample, shapes, x, seed)


def scatter_add(like: jax.Array, where: jax.Array, cotangent: jax.Array) -> jax.Array:
    """What comes back to each position is the sum over all times that it was drawn."""
    return jnp.zeros_like(like).at[jnp.arange(len(like))[:, None], where].add(cotangent)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def sampler(x: jax.Array, seed: jax.Array, number: int) -> jax.Array:
    """`number` random values above 0.5 of each row: MindSpore's MySampler, with its backward pass."""
    return values_on_the_host(x, seed, number)[0]


def _forward(x: jax.Array, seed: jax.Array, number: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    values, where = values_on_the_host(x, seed, number)
    return values, (x, where)


def _backward(number: int, saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None]:  # noqa: ARG001
    return scatter_add(*saved, cotangent), None


sampler.defvjp(_forward, _backward)


def take_positions(x: jax.Array, seed: jax.Array, number: int) -> jax.Array:
    """Only the positions come from the host; taking the values has a derivative of its own."""
    return jnp.take_along_axis(x, positions(jax.lax.stop_gradient(x), seed, number), 1)


def native(x: jax.Array, seed: jax.Array, number: int) -> jax.Array:
    """Nothing on the host: positions by `jax.random`, and their values."""
    chances = jnp.where(x > 0.5, 0.0, -jnp.inf)[:, None]
    where = jax.random.categorical(jax.random.key(seed), chances, shape=(len(x), number))
    return jnp.take_along_axis(x, where, 1)


def a_backward_pass_of_ones_own() -> dict[str, Any]:
    x = jnp.asarray(np.random.RandomState(1).uniform(0, 3, (2, 5)), jnp.float32)  # the guide's
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
        ("values by a callback, a backward pass of its own", sampler),
        ("positions by a callback", take_positions),
        ("all of it in JAX", native),
    ):
        values, gradient = jax.jit(fun, static_argnums=2)(x, seed, 3), of_the_sum(fun)(x)
        assert bool((values > 0.5).all())
        assert bool((gradient.sum(1) == 3).all())
        found[name] = np.asarray(gradient)
    np.testing.assert_array_equal(
        found["values by a callback, a backward pass of its own"], found["positions by a callback"]
    )
    show(
        "Three random values above 0.5 of each row: how often each was drawn, which is the gradient",
        ("", "row 0", "row 1"),
        ((name, *(" ".join(f"{times:.0f}" for times in row) for row in result)) for name, result in found.items()),
    )
    console.print(f"Values by a callback, without a backward pass: {refused}")
    return found | {"guide": np.asarray(guide), "refused": refused}


# The forward pass runs once


class Normalised(nnx.Module):
    """A dense layer and a batch norm, which counts on the host how often it runs."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense, self.norm = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, momentum=0.9, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalised features (batch, 4)."""
        jax.debug.callback(lambda: RUNS.update(forward=1))
        return self.norm(self.dense(x))


def the_forward_pass_runs_once() -> dict[str, Any]:
    x = jax.random.normal(jax.random.key(1), (6, 3)) + 2
    found = {}
    for name, wrap in (("step by step", lambda fun: fun), ("compiled", nnx.jit)):
        RUNS.clear()
        model = Normalised(nnx.Rngs(0))
        step = wrap(lambda model, x: value_and_grad(lambda model, x: jnp.mean(model(x) ** 3))(model, x))
        jax.block_until_ready(step(model, x))
        jax.effects_barrier()
        moved = model.norm.mean[...] / model.dense(x).mean(0)  # 1 − 0.9 for one run, 1 − 0.9² for two
        found[name] = RUNS["forward"], float(moved.min()), float(moved.max())
    show(
        "value_and_grad of a model with a batch norm: MindSpore needs set_grad for one forward pass",
        ("", "forward passes", "the mean has moved by"),
        ((name, runs, f"{low:.3f} to {high:.3f} of its way") for name, (runs, low, high) in found.items()),
    )
    return found


def main() -> dict[str, Any]:
    return {
        "cell": compare_a_cell(),
        "modes": compiled_and_step_by_step(),
        "forbidden": what_may_not_be_compiled(),
        "sampler": a_backward_pass_of_ones_own(),
        "forward": the_forward_pass_runs_once(),
    }


if __name__ == "__main__":
    main()
