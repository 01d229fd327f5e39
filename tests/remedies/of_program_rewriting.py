"""Remedies of `accumulate`, `bucketed`, `stack_layers`, `fold_bn` and other rewritings of programs."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from plurax.transforms import grad
from plurax.transforms.program import (
    accumulate,
    assert_donated,
    bucketed,
    convolutions_as_products,
    fold_bn,
    masked_topk_mean,
    scan_layers,
    stack_layers,
)

from ._registry import Fails, remedy
from .of_models import WithRandomCarry

X = np.sin(np.arange(12.0)).reshape(4, 3).astype(np.float32)
W = np.array([1.0, -2.0, 0.5], np.float32)
same = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def linear(seed: int, size: int = 3) -> nnx.Linear:
    return nnx.Linear(3, size, rngs=nnx.Rngs(seed))


def squares(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2)


# `accumulate`.


@remedy(
    "accumulate: weights are for a mean, but got reduction='sum'; sums add up without weights.",
    "accumulate: `{}` is a model; name only arguments with examples in batch_argnums.",
    "accumulate: micro_batches={} does not divide the {} examples; drop some.",
    "accumulate: micro_batches={} is more than the {} examples; pass fewer.",
    'accumulate: {}; return floats, or for reduction="sum" floats or ints.',
)
def micro_batches(fails: Fails) -> None:
    total = lambda w, x: jnp.sum((x @ w) ** 2)
    fails(accumulate, total, 2, reduction="sum", weights=[1.0, 1.0])
    same(accumulate(total, 2, reduction="sum")(W, X), total(W, X))
    of_model = lambda model, x: jnp.mean(model(x) ** 2)
    for positions in (0, (0, 1)):
        fails(accumulate(of_model, 2, batch_argnums=positions), linear(0), X)
    same(accumulate(of_model, 2, batch_argnums=1)(linear(0), X), of_model(linear(0), X))
    fails(accumulate(squares, 3), W, X)
    same(accumulate(squares, 3)(W, X[:3]), squares(W, X[:3]))
    fails(accumulate(squares, 8), W, X)
    same(accumulate(squares, 4)(W, X), squares(W, X))
    right = lambda w, x: jnp.sum(x @ w > 0)
    for wrong in (right, lambda w, x: "name", lambda w, x: linear(0)):
        fails(accumulate(wrong, 2), W, X)
    same(accumulate(lambda w, x: jnp.float32(right(w, x)), 2)(W, X), right(W, X) / 2)
    same(accumulate(right, 2, reduction="sum")(W, X), right(W, X))


# `bucketed`.


def mean_of_rows(x: Any, mask: Any) -> Any:
    return jnp.sum(x.sum(-1) * mask) / jnp.sum(mask)


@remedy(
    "bucketed: mask must not be passed, since bucketed computes it from the lengths; omit it.",
    "bucketed: axis selects no axis of any array in the call; pass one, or use jax.jit.",
    "bucketed: `{}` is {}, which cannot be padded; pass None for it in axis.",
    "bucketed: length {} is above the largest of sizes={}; add one.",
    "bucketed: {} along out_axes={}; pass the axis that has it, or None.",
    "use the same containers and keys, or one int for all",
    'bucketed: sizes must be "pow2" or a list of ints, but got {}.',
    'bucketed: sizes must be "pow2" or a list of ints, at least one, but got {}.',
)
def lengths(fails: Fails) -> None:
    expected, mask = X[:3].sum(-1).mean(), jnp.ones(3, bool)
    fails(bucketed(mean_of_rows), X[:3], mask=mask)
    same(bucketed(mean_of_rows)(X[:3]), expected)
    fails(bucketed(mean_of_rows, axis=(None,)), X[:3])
    same(jax.jit(mean_of_rows)(X[:3], mask), expected)
    of_model = lambda model, x, mask: mean_of_rows(model(x), mask)
    fails(bucketed(of_model), linear(0), X[:3])
    same(bucketed(of_model, axis=(None, 0))(linear(0), X[:3]), linear(0)(X[:3]).sum(-1).mean())
    of_batch = lambda batch, mask: mean_of_rows(batch["x"] + jax.random.uniform(batch["key"][0]), mask)
    batch = {"x": X[:3], "key": jax.random.split(jax.random.key(0), 3)}
    fails(bucketed(of_batch), batch)
    bucketed(of_batch, axis=({"x": 0, "key": None},))(batch)
    fails(bucketed(mean_of_rows, sizes=[1, 2]), X[:3])
    same(bucketed(mean_of_rows, sizes=[1, 2, 4])(X[:3]), expected)
    rows = lambda x, mask: x * mask[:, None]
    axis: Any
    sizes: Any
    for axis in (1, 2):
        fails(bucketed(rows, out_axes=axis), X[:3])
    assert bucketed(rows, out_axes=0)(X[:3]).shape == (3, 3)
    assert bucketed(rows, out_axes=None)(X[:3]).shape == (4, 3)
    several = lambda batch, mask: {"mean": mean_of_rows(batch["x"], mask), "rows": rows(batch["x"], mask)}
    for axis in (({"y": 0},), ([0],), (0, 0)):
        fails(bucketed(several, axis=axis), {"x": X[:3]})
    for axis in (({"x": 0},), 0):
        same(bucketed(several, axis=axis)({"x": X[:3]})["mean"], expected)
    fails(bucketed(several, out_axes={"row": 0}), {"x": X[:3]})
    assert bucketed(several, out_axes={"mean": None, "rows": 0})({"x": X[:3]})["rows"].shape == (3, 3)
    for sizes in (4, None, "pow3", []):
        fails(bucketed, mean_of_rows, sizes=sizes)
    for sizes in ("pow2", [4]):
        same(bucketed(mean_of_rows, sizes=sizes)(X[:3]), expected)


# `stack_layers` and `scan_layers`.


class Block(nnx.Module):
    def __init__(self, seed: int, size: int = 3, scale: float = 1.0, activation: Any = jnp.tanh) -> None:
        self.dense, self.scale, self.activation = linear(seed, size), scale, activation

    def __call__(self, x: Any, scale: Any = 1.0) -> Any:
        return self.activation(self.dense(x)) * self.scale * scale


class Pair(nnx.Module):
    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second

    def __call__(self, x: Any) -> Any:
        return self.second(self.first(x))


def twice(x: Any) -> Any:
    return 2 * jnp.tanh(x)


@remedy(
    "stack_layers: layers must be a list of NNX modules, but got {}.",
    "stack_layers: the list of layers is empty; pass at least one layer.",
    "make it a part of the modules",
    "stack the arrays of all layers for jax.lax.scan",
    "build all layers with one configuration, and pass numbers that differ as xs of scan_layers",
    "define it once, at module level",
)
def layers(fails: Fails) -> None:
    for wrong in (linear(0), "layers", {"a": linear(0)}):
        fails(stack_layers, wrong)
    fails(stack_layers, [])
    assert len(stack_layers([linear(0)])) == 1
    several = [{"w": X[:3] * (i + 1)} for i in range(2)]
    fails(stack_layers, several)
    scanned, _ = jax.lax.scan(lambda x, p: (x @ p["w"], None), X, jax.tree.map(lambda *x: jnp.stack(x), *several))
    same(scanned, X @ several[0]["w"] @ several[1]["w"])
    fails(stack_layers, [linear(0), jnp.tanh, linear(1), jnp.tanh])
    same(scan_layers(stack_layers([Block(0), Block(1)]), X)[0], Block(1)(Block(0)(X)))
    fails(stack_layers, [Block(0), Block(1, size=2)])
    scales = [0.5, 2.0]
    fails(stack_layers, [Block(i, scale=scale) for i, scale in enumerate(scales)])
    found, _ = scan_layers(stack_layers([Block(0), Block(1)]), X, xs=jnp.array(scales))
    same(found, Block(1, scale=2.0)(Block(0, scale=0.5)(X)))
    fails(stack_layers, [Block(i, activation=lambda x: 2 * jnp.tanh(x)) for i in range(2)])
    stack_layers([Block(i, activation=twice) for i in range(2)])


@remedy(
    "scan_layers: stack must be the result of stack_layers, but got {}.",
    "scan_layers: {}, but carry holds arrays; pass models as shared arguments.",
    "scan_layers: {}, but xs holds arrays; make models parts of the layers of the stack.",
    "scan_layers: {}; pass values that all layers share as shared arguments.",
    "scan_layers: {} {}; return a carry of the same shapes and dtypes.",
    "Stack: {}, but axis 0 must be its {} layers; stack the layers again.",
)
def scans(fails: Fails) -> None:
    one, other = linear(0), linear(1)
    expected = other(one(X))
    fails(scan_layers, [one, other], X)
    stack = stack_layers([one, other])
    same(scan_layers(stack, X)[0], expected)
    shared = linear(2)

    class Summed(nnx.Module):
        def __init__(self, seed: int) -> None:
            self.dense = linear(seed)

        def __call__(self, carry: Any, other: Any) -> Any:
            return (carry[0] if isinstance(carry, tuple) else self.dense(carry)) + other(X)

    summed = stack_layers([Summed(0), Summed(1)])
    fails(scan_layers, summed, (X, shared))
    same(scan_layers(summed, X, shared)[0], other(one(X) + shared(X)) + shared(X))
    for extra in ([linear(3), linear(4)], stack_layers([linear(3), linear(4)])):
        fails(scan_layers, summed, X, xs=extra)
    pairs = [Pair(one, linear(3)), Pair(other, linear(4))]
    same(scan_layers(stack_layers(pairs), X)[0], linear(4)(other(linear(3)(one(X)))))
    scaled = stack_layers([Block(0), Block(1)])
    for wrong in (2.0, jnp.ones(3)):
        fails(scan_layers, scaled, X, xs=wrong)
    same(scan_layers(scaled, X, 2.0)[0], Block(1)(Block(0)(X) * 2) * 2)
    fails(scan_layers, stack_layers([linear(0, 2), linear(1, 2)]), X)
    half = stack_layers([Block(0, activation=lambda x: x.astype(jnp.float16))])
    fails(scan_layers, half, X)
    stack.layer.kernel = nnx.Param(stack.layer.kernel[:1])
    fails(scan_layers, stack, X)
    same(scan_layers(stack_layers([one, other]), X)[0], expected)


# Others.


@remedy("masked_topk_mean: x has shape {}, but mask has {}; pass equal shapes.")
def masks(fails: Fails) -> None:
    mask = jnp.array([True, False, True])
    fails(masked_topk_mean, jnp.asarray(X), mask, 1.0)
    same(masked_topk_mean(jnp.asarray(X), jnp.broadcast_to(mask, X.shape), 1.0), X[:, ::2].mean())


@remedy("wrap the derivative instead, as convolutions_as_products(grad(fun))")
def derivative_of_products(fails: Fails) -> None:
    convolved = lambda w: jnp.sum(jnp.convolve(W, w) ** 2)
    fails(grad(convolutions_as_products(convolved)), W)
    same(convolutions_as_products(grad(convolved))(W), grad(convolved)(W))


@remedy(
    "pass jax.jit(fun, donate_argnums=...)",
    "assert_donated: fun donates nothing; name the arguments to donate: {}.",
    "assert_donated: fun does not reuse {}; return such arrays, or donate less.",
)
def donations(fails: Fails) -> None:
    step = lambda w, x: w - jnp.sum(x)
    for plain in (step, partial(jax.jit(step), W)):
        fails(assert_donated, plain, W, X)
    fails(assert_donated, jax.jit(step), W, X)
    assert_donated(jax.jit(step, donate_argnums=0), W, X)
    fails(assert_donated, jax.jit(step, donate_argnums=(0, 1)), W, X)
    assert_donated(jax.jit(lambda w, x: (step(w, x), x), donate_argnums=(0, 1)), W, X)

    def changing(model: Any, x: Any) -> None:
        model.kernel[...] -= jnp.sum(x)

    def returning(model: Any, x: Any) -> Any:
        changing(model, x)
        return model

    for fun in (nnx.jit(changing, donate_argnums=0), jax.jit(changing, donate_argnums=0)):
        fails(assert_donated, fun, linear(0), X)
    assert_donated(jax.jit(returning, donate_argnums=0), linear(0), X)


# `fold_bn`.

EXAMPLE = X[:2]
PARAMS = {"kernel": X[:3], "scale": W}


def scaled(p: Any, x: Any) -> Any:
    return x @ p["kernel"] * p["scale"]


@remedy(
    "fold_bn: fun must take the parameters first, but got {}; {}.",
    "pass fold_bn(lambda model, *args: model(*args), model, *example)",
    "fold_bn: `params.{}` has no value here; call fold_bn {}.",
    "fold_bn: `params.{}` has a shape, but no value; pass arrays.",
    "fold_bn: for these shapes, fun combines other parameters; call fold_bn with such shapes.",
    "fold_bn: `{}` of params is {}, but fold_bn returned {}; pass its params.",
)
def folding(fails: Fails) -> None:
    model = Pair(linear(0), nnx.BatchNorm(3, rngs=nnx.Rngs(0), use_running_average=True))
    fails(fold_bn, model, EXAMPLE)
    folded, params, report = fold_bn(lambda model, *args: model(*args), model, EXAMPLE)
    same(folded(params, X), model(X))
    assert len(report.folded) == 1
    folding = lambda p: fold_bn(scaled, p, EXAMPLE)[1]["kernel"]
    for transformed in (jax.jit(folding), jax.grad(lambda p: folding(p).sum())):
        fails(transformed, PARAMS)
    fails(jax.vmap(folding), jax.tree.map(lambda x: x[None], PARAMS))
    fails(fold_bn, scaled, jax.eval_shape(lambda: PARAMS), EXAMPLE)
    same(folding(PARAMS), PARAMS["kernel"] * W)
    divided = lambda p, x: scaled(p, x) / len(x)
    folded, params, _ = fold_bn(divided, PARAMS, EXAMPLE)
    fails(folded, params, X)
    same(fold_bn(divided, PARAMS, X)[0](fold_bn(divided, PARAMS, X)[1], X), divided(PARAMS, X))
    fails(folded, PARAMS, EXAMPLE)
    same(folded(params, EXAMPLE), divided(PARAMS, EXAMPLE))


class Counted(nnx.Module):
    def __init__(self) -> None:
        self.dense, self.calls = linear(0), nnx.Variable(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        return self.dense(x)


@remedy("fold_bn: {}; call model.eval(), or nnx.clone(model) in fun.")
def folding_of_changed_modules(fails: Fails) -> None:
    call = lambda model, x: model(x)
    model: Any
    for layer in (nnx.BatchNorm(3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))):
        model = Pair(linear(0), layer)
        fails(fold_bn, call, model, EXAMPLE)
        model.eval()
        folded, params, _ = fold_bn(call, model, EXAMPLE)
        same(folded(params, X), model(X))
    recurrent = lambda model, x: model(x[None])
    rnn = nnx.RNN(WithRandomCarry(3, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    for fun, model in ((call, Counted()), (recurrent, rnn)):
        model.eval()
        fails(fold_bn, fun, model, EXAMPLE)
        folded, params, _ = fold_bn(lambda model, x, fun=fun: fun(nnx.clone(model), x), model, EXAMPLE)
        same(folded(params, X), fun(model, X))


class Network(linen.Module):
    train: bool

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.BatchNorm(use_running_average=not self.train)(linen.Dense(3)(x))


@remedy(
    "it scales a gate, or a norm that uses statistics of the data; for batch norm in training mode, use "
    "model.eval() in Flax NNX, use_running_average=True in Linen, inference_mode(model) in Equinox"
)
def report_of_training_mode(fails: Fails) -> None:
    def reported(fun: Any, params: Any) -> None:
        warnings.warn(str(fold_bn(fun, params, EXAMPLE)[2]), stacklevel=1)

    cloned = lambda model, x: nnx.clone(model)(x)
    model = Pair(linear(0), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    fails(reported, cloned, model)
    model.eval()
    assert len(fold_bn(cloned, model, EXAMPLE)[2].folded) == 1
    variables = Network(train=False).init(jax.random.key(0), EXAMPLE)
    fails(reported, lambda p, x: Network(train=True).apply(p, x, mutable=["batch_stats"])[0], variables)
    assert len(fold_bn(Network(train=False).apply, variables, EXAMPLE)[2].folded) == 1
    layers = [eqx.nn.Linear(3, 3, key=jax.random.key(0)), eqx.nn.BatchNorm(3, "batch", mode="batch")]
    both = eqx.nn.make_with_state(eqx.nn.Sequential)(layers)
    axes: dict[str, Any] = {"axis_name": "batch", "in_axes": (0, None), "out_axes": (0, None)}
    of_equinox = lambda both, x: jax.vmap(both[0], **axes)(x, both[1])[0]
    fails(reported, of_equinox, both)
    assert "statistics of the data" not in str(fold_bn(of_equinox, eqx.nn.inference_mode(both), EXAMPLE)[2])
