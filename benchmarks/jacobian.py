"""Measure derivatives: `jacobian` and the faster mode, memory budgets, products, batches, higher orders.

python benchmarks/jacobian.py            measure, and render the pages
python benchmarks/jacobian.py --smoke    run small cases once; write nothing
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _measure import Report, Tables, arguments, claim, interleaved, peer, quickest, ratio

from plurax.transforms import batch_jacobian, derivative, grad, hvp, jacfwd, jacobian, value_grad_and_hvp

torch = peer("torch")
MIB = 2**20


def dense(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(weights @ x)


def scanned(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, _: (jnp.tanh(weights @ carry), None), x, None, length=8)[0]


def scalar(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(weights @ x).sum()


def perceptron(first: jax.Array, second: jax.Array, x: jax.Array) -> jax.Array:
    return second @ jnp.tanh(first @ x)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / shape[-1] ** 0.5


def modes(small: int, large: int, square: int, rounds: int, seconds: float) -> Tables:
    """Compare `jacobian` with both modes of JAX and of PyTorch."""
    rows, claims = [], []
    cases: dict[str, tuple[Callable[..., Any], int, int]] = {
        f"tanh(Wx), {small} to {large}": (dense, large, small),
        f"tanh(Wx), {large} to {small}": (dense, small, large),
        f"tanh(Wx), {square} to {square}": (dense, square, square),
        f"sum tanh(Wx), {square} to 1": (scalar, square, square),
        f"8 steps of a scan, {square // 2}": (scanned, square // 2, square // 2),
    }
    for title, (fun, outputs, inputs) in cases.items():
        weights, x = normal(0, outputs, inputs), normal(1, inputs)
        chosen = jacobian(fun, 1).explain(weights, x)
        compiled = {
            "jacobian": jax.jit(jacobian(fun, 1)),
            "jax.jacfwd": jax.jit(jax.jacfwd(fun, 1)),
            "jax.jacrev": jax.jit(jax.jacrev(fun, 1)),
        }
        candidates = {name: partial(run, weights, x) for name, run in compiled.items()}
        if torch is not None and fun is not scanned:
            candidates |= torch_candidates(fun is scalar, np.asarray(weights), np.asarray(x))
        times = interleaved(candidates, rounds=rounds, seconds=seconds)
        better = quickest(times, ("jax.jacfwd", "jax.jacrev"))
        rows.append(
            {
                "function": title,
                "mode chosen": chosen.mode,
                "faster in JAX": better,
                "jacobian / faster in JAX": ratio(times, "jacobian", better),
                **{f"{name} (ms)": found["ms"] for name, found in times.items()},
            }
        )
        claims.append(claim(times, "jacobian", list(times)[1:], title))
    return rows, claims


def torch_candidates(summed: bool, weights: np.ndarray, x: np.ndarray) -> dict[str, Callable[[], Any]]:
    matrix, vector = torch.tensor(weights), torch.tensor(x)

    def fun(vector: Any) -> Any:
        out = torch.tanh(matrix @ vector)
        return out.sum() if summed else out

    return {
        "torch.func.jacfwd": lambda: torch.func.jacfwd(fun)(vector),
        "torch.func.jacrev": lambda: torch.func.jacrev(fun)(vector),
    }


def budgets(size: int, hidden: int, limits: tuple[str, ...], chunks: tuple[int, ...], rounds: int) -> Tables:
    """Measure a perceptron's Jacobian: all at once, within budgets, and in chunks by hand."""
    first, second, x = normal(0, hidden, size), normal(1, size, hidden), normal(2, size)

    def by_hand(chunk: int) -> Callable[..., Any]:
        """Return `lax.map` over chunks of columns, transposed at the end."""

        def columns(first: jax.Array, second: jax.Array, x: jax.Array) -> jax.Array:
            _, push = jax.linearize(lambda x: perceptron(first, second, x), x)
            return jax.lax.map(
                lambda i: push((jnp.arange(size) == i).astype(x.dtype)), jnp.arange(size), batch_size=chunk
            ).T

        return columns

    def block(first: jax.Array, second: jax.Array, x: jax.Array, start: jax.Array, chunk: int) -> jax.Array:
        _, push = jax.linearize(lambda x: perceptron(first, second, x), x)
        units = (jnp.arange(size) == start + jnp.arange(chunk)[:, None]).astype(x.dtype)
        return jax.vmap(push, out_axes=-1)(units)

    middle = chunks[len(chunks) // 2]
    functions: dict[str, Callable[..., Any]] = {"dense (jax.jacfwd)": jax.jacfwd(perceptron, 2)}
    own = {f'memory_budget="{limit}"': jacfwd(perceptron, 2, memory_budget=limit) for limit in limits}
    own |= {f"chunk_size={chunk}": jacfwd(perceptron, 2, chunk_size=chunk) for chunk in chunks}
    functions |= own
    functions[f"lax.map by hand, {middle}"] = by_hand(middle)
    compiled = {name: jax.jit(fun).lower(first, second, x).compile() for name, fun in functions.items()}
    temporaries = {name: run.memory_analysis().temp_size_in_bytes for name, run in compiled.items()}
    candidates: dict[str, Callable[[], Any]] = {name: partial(run, first, second, x) for name, run in compiled.items()}
    one = jax.jit(partial(block, chunk=middle)).lower(first, second, x, 0).compile()
    name = f"Python loop by hand, {middle}"
    starts = [jnp.asarray(start) for start in range(0, size, middle)]
    candidates[name] = lambda: jnp.concatenate([one(first, second, x, start) for start in starts], axis=1)
    # All blocks are in memory until they are concatenated.
    temporaries[name] = one.memory_analysis().temp_size_in_bytes + size * size * x.dtype.itemsize
    if torch is not None:
        a, b, point = (torch.tensor(np.asarray(leaf)) for leaf in (first, second, x))

        def fun(x: Any) -> Any:
            return b @ torch.tanh(a @ x)

        candidates["torch.func.jacfwd"] = lambda: torch.func.jacfwd(fun)(point)
        candidates[f"torch.func.jacrev, chunk_size={middle}"] = lambda: torch.func.jacrev(fun, chunk_size=middle)(point)
    times = interleaved(candidates, rounds=rounds, seconds=0.01)
    rows = [
        {
            "": name,
            "temporaries (MiB)": temporaries[name] / MIB if name in temporaries else None,
            "ms": found["ms"],
            "time / dense": ratio(times, name, "dense (jax.jacfwd)"),
        }
        for name, found in times.items()
    ]
    others = [name for name in times if name not in own]
    return rows, [claim(times, name, others) for name in own if name.startswith("memory_budget")]


def products(size: int, batch: int) -> Tables:
    """Count the operations of a Hessian-vector product with XLA."""

    def flops(fun: Callable[..., Any], *args: Any) -> float:
        return jax.jit(fun).lower(*args).compile().cost_analysis()["flops"]

    weights = {"first": normal(0, size, 2 * size), "second": normal(1, 2 * size, size)}
    x = normal(2, batch, size)

    def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return (jnp.tanh(jnp.tanh(x @ weights["first"]) @ weights["second"]) ** 2).sum()

    rows = []
    for title, primal, fun in (
        ("inputs", x, lambda x: loss(weights, x)),
        ("parameters", weights, lambda weights: loss(weights, x)),
    ):
        value, gradient = flops(fun, primal), flops(grad(fun), primal)
        product = flops(lambda p, t, fun=fun: hvp(fun, p, t), primal, primal)
        rows.append(
            {
                "with respect to": title,
                "gradient / function": gradient / value,
                "hvp / function": product / value,
                "hvp / gradient": product / gradient,
            }
        )
    return rows, []


def against(
    other: str, candidates: dict[str, Callable[[], Any]], own: tuple[str, ...], rounds: int, seconds: float
) -> Tables:
    """Return a row for each candidate, with its time relative to `other`, and claims for our `own`."""
    times = interleaved(candidates, rounds=rounds, seconds=seconds)
    rows = [
        {"": name, "ms": found["ms"], f"time / {other}": ratio(times, name, other)} for name, found in times.items()
    ]
    others = [name for name in times if name.startswith(("jax.", "torch."))]
    return rows, [claim(times, name, others) for name in own]


def ready(fun: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return partial(jax.jit(fun).lower(*args).compile(), *args)


def product_times(size: int, rounds: int, seconds: float) -> Tables:
    """Measure a Hessian-vector product of sum(sin x), as in PyTorch's tutorial."""
    x, v = normal(0, size), normal(1, size)

    def fun(x: jax.Array) -> jax.Array:
        return jnp.sin(x).sum()

    candidates = {
        "gradient": ready(jax.grad(fun), x),
        "hvp": ready(lambda x, v: hvp(fun, x, v), x, v),
        "jax.jvp of jax.grad": ready(lambda x, v: jax.jvp(jax.grad(fun), (x,), (v,))[1], x, v),
        "value_grad_and_hvp": ready(lambda x, v: value_grad_and_hvp(fun, x, v), x, v),
        'hvp, mode="rev_rev"': ready(lambda x, v: hvp(fun, x, v, mode="rev_rev"), x, v),
        "jax.vjp of jax.grad": ready(lambda x, v: jax.vjp(jax.grad(fun), x)[1](v), x, v),
    }
    if torch is not None:
        point, vector = (torch.tensor(np.asarray(leaf)) for leaf in (x, v))
        of_torch = torch.func.grad(lambda x: x.sin().sum())
        candidates["torch.func.jvp of grad"] = lambda: torch.func.jvp(of_torch, (point,), (vector,))
    return against("jax.jvp of jax.grad", candidates, ("hvp",), rounds, seconds)


def batches(batch: int, inputs: int, outputs: int, rounds: int, seconds: float) -> Tables:
    """Measure a Jacobian for each sample of a batch, as in PyTorch's tutorial."""
    weights, x = normal(0, outputs, inputs), normal(1, batch, inputs)

    def fun(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ weights.T)

    candidates = {
        "jax.vmap of jax.jacrev": ready(jax.vmap(jax.jacrev(fun)), x),
        'batch_jacobian, rows="vmap"': ready(batch_jacobian(fun), x),
        'batch_jacobian, rows="independent"': ready(batch_jacobian(fun, rows="independent"), x),
    }
    if torch is not None:
        matrix, points = torch.tensor(np.asarray(weights)), torch.tensor(np.asarray(x))
        of_torch = torch.func.vmap(torch.func.jacrev(lambda x: torch.tanh(x @ matrix.T)))
        candidates["torch.func.vmap of jacrev"] = lambda: of_torch(points)
    own = tuple(name for name in candidates if name.startswith("batch_jacobian"))
    return against("jax.vmap of jax.jacrev", candidates, own, rounds, seconds)


def higher_orders(size: int, orders: tuple[int, ...], rounds: int, seconds: float) -> Tables:
    """Compare `derivative`, which uses Taylor mode here, with nested `jax.jvp`, for exp(sin x) and a perceptron."""
    x, weights = normal(0, size), normal(1, size, size)
    rows, claims = [], []
    for title, fun in (
        ("exp(sin x)", lambda x: jnp.exp(jnp.sin(x))),
        ("W sin(W sin x)", lambda x: weights @ jnp.sin(weights @ jnp.sin(x))),
    ):
        for order in orders:
            nested: Callable[..., Any] = fun
            for _ in range(order):
                nested = lambda x, f=nested: jax.jvp(f, (x,), (jnp.ones_like(x),))[1]  # noqa: E731 (redefined at each order)
            candidates = {"derivative": ready(derivative(fun, order), x), "nested jax.jvp": ready(nested, x)}
            times = interleaved(candidates, rounds=rounds, seconds=seconds)
            rows.append(
                {
                    "function": title,
                    "order": order,
                    **{f"{name} (ms)": found["ms"] for name, found in times.items()},
                    "derivative / nested": ratio(times, "derivative", "nested jax.jvp"),
                }
            )
            claims.append(claim(times, "derivative", ["nested jax.jvp"], f"{title}, order {order}"))
    return rows, claims


def main() -> None:
    options = arguments(__doc__).parse_args()
    report, smoke = Report("jacobian", options, "torch"), options.smoke
    rounds, seconds = (2, 0.001) if smoke else (31, 0.05)
    size, hidden = (16, 32) if smoke else (4096, 8192)
    limits, chunks = (("8KiB",), (2, 8)) if smoke else (("64MiB", "8MiB"), (16, 64, 256, 1024))
    length, (batch, inputs, outputs), width = (8, (4, 3, 5), 4) if smoke else (2048, (64, 31, 33), 512)
    whole = f"A perceptron's Jacobian, {size} to {size}, {hidden} hidden: {size * size * 4 / MIB:.0f} MiB of result"
    parts: dict[str, Callable[[], Tables]] = {
        "`jacobian` chooses its mode": lambda: modes(*((4, 16, 8, 2, 0.001) if smoke else (32, 2048, 512, 15, 0.05))),
        whole: lambda: budgets(size, hidden, limits, chunks, 2 if smoke else 3),
        "Operations of `hvp`": lambda: products(*((8, 4) if smoke else (256, 64))),
        f"A Hessian-vector product of sum(sin x), {length} numbers": lambda: product_times(length, rounds, seconds),
        f"A Jacobian for each of {batch} samples, {inputs} to {outputs}": lambda: batches(
            batch, inputs, outputs, rounds, seconds
        ),
        f"`derivative`, {width} numbers": lambda: higher_orders(
            width, (2,) if smoke else (2, 3, 4, 5), rounds, seconds
        ),
    }
    report.measure(parts)


if __name__ == "__main__":
    main()
