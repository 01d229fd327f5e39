"""Norms and weighted sums of per-sample gradients against `jax.vmap(jax.grad)`, for programs of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from plurax.transforms.privacy._per_example.loss import ExampleProgram
from plurax.transforms.privacy._per_example.norms import ExampleGradients
from plurax.transforms.privacy._per_example.report import report_uses

pytestmark = pytest.mark.optimized

BATCH = 5
RNG = np.random.default_rng(0)
WEIGHTS = RNG.normal(size=BATCH)


def array(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape)


def total(x: Any) -> Any:
    """Return a weighted sum in which every entry has another weight."""
    return jnp.sum(jnp.sin(x) * (1 + jnp.arange(x.size).reshape(x.shape) / 7))


def convolved(*args: Any, layout: tuple[str, str, str] = ("NHWC", "HWIO", "NHWC"), **options: Any) -> Any:
    def loss(kernel: Any, x: Any) -> Any:
        x = x if x.ndim == len(layout[0]) else x[None]
        return total(lax.conv_general_dilated(x, kernel, *args, dimension_numbers=layout, **options))

    return loss


def recurrent(p: Any, x: Any) -> Any:
    return total(
        lax.scan(lambda h, xt: (jnp.tanh(xt @ p["w"] + h @ p["u"] + p["b"]), None), jnp.zeros(len(p["u"])), x)[0]
    )


def concatenated(p: Any, x: Any) -> Any:
    step = lambda h, xt: (jnp.tanh(jnp.concatenate([xt, h]) @ jnp.concatenate([p["w"], p["u"]])), h)
    return total(lax.scan(step, jnp.zeros(len(p["u"])), x)[0])


def layer(h: Any, p: Any) -> Any:
    return jnp.tanh(h @ p["w"] + p["b"]), None


def nested(p: Any, x: Any) -> Any:
    inner = lambda h, w: lax.scan(lambda g, xt: (jnp.tanh(g @ w + xt @ p["u"]), None), h, x)
    return total(lax.scan(lambda h, w: (inner(h, w)[0], None), jnp.zeros(len(p["u"])), p["w"])[0])


def carried(p: Any, x: Any) -> Any:
    step = lambda c, xt: ((c[0] @ p["u"], c[1] + jnp.tanh(xt @ c[0])), None)
    return total(lax.scan(step, (p["w"], jnp.zeros(3)), x)[0][1])


@jax.custom_jvp
def ruled(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.sin(x @ w))


ruled.defjvp(lambda p, t: (ruled(*p), 3 * jnp.sum(jnp.cos(p[1] @ p[0]) * (p[1] @ t[0]))))


@jax.jit
def jitted(w: Any, x: Any) -> Any:
    return jnp.sin(x @ w)


@jax.jit
def scaled(x: Any, w: Any, factor: Any) -> Any:
    return x @ (factor * w)


@jax.jit
def both_out(w: Any, x: Any) -> Any:
    return jnp.tanh(w), x * w.sum()


def split_up(p: Any, x: Any) -> Any:
    w, h = both_out(p, x)
    return total(h @ w)


def mlp(p: Any, x: Any) -> Any:
    return total(jax.nn.relu(x @ p["w"] + p["b"]) @ p["v"])


def normed(p: Any, x: Any) -> Any:
    return total((x - x.mean(-1, keepdims=True)) / jnp.std(x, -1, keepdims=True) * p["scale"] + p["shift"])


def weight_normed(p: Any, x: Any) -> Any:
    return total(x @ (p["v"] / jnp.linalg.norm(p["v"], axis=0) * p["g"]))


def decay(p: Any) -> Any:
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p))


def looped(p: Any, x: Any) -> Any:
    return total(lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ lax.dynamic_index_in_dim(p, i, 0, False)), x))


ROWS, VECTOR, INDEX = array(BATCH, 7, 3), array(BATCH, 3), RNG.integers(9, size=(BATCH, 7))
IMAGE = array(BATCH, 7, 6, 2)
# Wide enough that both factors of a gradient are smaller than the gradient.
FEW, WIDER = array(BATCH, 3, 16), {"w": array(16, 12), "b": array(12), "u": array(12, 12)}
SQUARE, WIDE = array(3, 3), array(3, 6)
STACK = {"w": array(4, 16, 16), "b": array(4, 16)}

# The loss, the parameters, the examples, and the rules used.
PROGRAMS: dict[str, tuple[Any, Any, Any, str]] = {
    "perceptron": (mlp, {"w": WIDE, "b": array(6), "v": array(6, 4)}, VECTOR, "dense, outer product, outer product"),
    "positions": (mlp, {"w": array(16, 12), "b": array(12), "v": array(12, 9)}, FEW,
                  "dense, outer product, outer product"),
    "many positions": (mlp, {"w": WIDE, "b": array(6), "v": array(6, 4)}, ROWS, "dense, dense, dense"),
    "used twice": (lambda p, x: total(jnp.sin(x @ p) @ p), array(16, 16), FEW, "outer product, outer product"),
    "and transposed": (lambda p, x: total(jnp.sin(x @ p) @ p.T), array(16, 12), FEW, "outer product, outer product"),
    "used twice, at many": (lambda p, x: total(jnp.sin(x @ p) @ p), SQUARE, ROWS, "dense, dense"),
    "and transposed, at many": (lambda p, x: total(jnp.sin(x @ p) @ p.T), WIDE, ROWS, "dense, dense"),
    "in parts": (lambda p, x: total(jnp.sin(x @ p[:, :2]) @ p[:2, 2:4].T), WIDE, VECTOR, "dense, outer product"),
    "twice by a jitted function": (lambda p, x: total(jitted(p["b"], jitted(p["a"], x))), {"a": SQUARE, "b": WIDE},
                                   VECTOR, "outer product, outer product"),
    "out of a jitted function": (split_up, WIDE, VECTOR, "dense, dense"),
    "scaled": (lambda p, x: total(jnp.sin(x @ (p / jnp.sqrt(3.0))) @ (p * -0.5).T), WIDE, VECTOR, "dense, dense"),
    "scaled equally": (lambda p, x: total(jnp.sin(x @ (2 * p)) @ (2 * p)), SQUARE, ROWS, "dense, dense"),
    "scaled once": (lambda p, x: total(x @ (jnp.sqrt(3.0) * p).T), array(12, 16), FEW, "dense"),
    "a number that divides": (lambda p, x: total(x * (jnp.sqrt(3.0) / p)), array(), FEW, "dense"),
    "scaled and decayed": (lambda p, x: total(x @ (p / jnp.sqrt(3.0))) + decay(p), array(16, 12), FEW,
                           "dense, dense"),
    "scaled in two ways": (lambda p, x: total(scaled(scaled(x, p, jnp.sqrt(2.0)), p, jnp.sqrt(3.0))), array(16, 16),
                           FEW, "dense, dense"),
    "not scaled": (lambda p, x: total(x @ (3.0 / p)), array(16, 12), FEW, "dense"),
    "layers of a stack": (lambda p, x: total(jnp.sin(jnp.sin(x @ p[0]) @ p[1]) @ (-p[2, ::2].T)), array(3, 16, 16),
                          FEW, "outer product, outer product, outer product"),
    "parts of a matrix": (lambda p, x: total(jnp.sin(x @ jnp.split(p, 2, 1)[0]) * (x @ jnp.split(p, 2, 1)[1])),
                          array(16, 24), FEW, "outer product, outer product"),
    "parts with numbers in common": (lambda p, x: total((x @ p[:, :14]) * (x @ p[:, 2:])), array(16, 16), FEW,
                                     "dense, dense"),
    "parts and the whole": (lambda p, x: total(x @ p[:, :12] @ p[:12]), array(16, 16), FEW, "dense, dense"),
    "a part of a part": (lambda p, x: total((x @ p[:, :8][:, 2:6]) * (x @ p[:, 8:12])), array(16, 16), FEW,
                         "outer product, outer product"),
    "heads": (lambda p, x: total(jnp.einsum("td,dhk->thk", x, p)), array(16, 2, 6), FEW, "outer product"),
    "one matrix a head": (lambda p, x: total(jnp.einsum("hd,hdk->hk", x, p)), array(7, 3, 4), ROWS, "outer product"),
    "weight decay": (lambda p, x: total(x @ p) + 0.1 * jnp.sum(p**2), WIDE, VECTOR, "dense, dense"),
    "decay of all": (lambda p, x: mlp(p, x) + 0.1 * decay(p), {"w": array(16, 12), "b": array(12), "v": array(12, 9)},
                     FEW, "dense, dense, dense, dense, dense, dense"),
    "decay times data": (lambda p, x: total(x @ p["w"] @ p["v"]) * decay(p["w"]) + x[0] * jnp.sum(p["w"]) ** 3,
                         {"w": WIDE, "v": array(6, 4)}, VECTOR,
                         "dense, dense, dense, outer product"),
    "decay of stacked layers": (lambda p, x: total(lax.scan(layer, x, p)[0]) + decay(p), STACK, FEW,
                                "dense, dense, dense, dense"),
    "decay of an embedding": (lambda p, i: total(p["e"][i] @ p["e"].T) - decay(p), {"e": array(9, 4)}, INDEX[:, :2],
                              "dense, dense, dense"),
    "parameters alone": (lambda p, x: jnp.sum(p**2), WIDE, VECTOR, "dense"),
    "no parameters": (lambda p, x: jnp.sum(x), WIDE, VECTOR, ""),
    "scale and shift": (normed, {"scale": array(3), "shift": array(3)}, ROWS, "dense, dense"),
    "weight normalization": (weight_normed, {"v": array(3, 4), "g": array(4)}, VECTOR, "dense, dense"),
    "embedding": (lambda p, i: total(p[i]), array(9, 4), INDEX, "row-sparse"),
    "embedding out of range": (lambda p, i: total(p.at[i - 3].get(mode="fill", fill_value=0)), array(4, 3), INDEX,
                               "row-sparse"),
    "clipped index": (lambda p, i: total(p.at[i].get(mode="clip")), array(4, 3), INDEX, "row-sparse"),
    "tied embedding": (lambda p, i: total(jnp.sin(p["e"][i] @ p["w"]) @ p["e"].T), {"e": array(9, 4), "w": array(4, 4)},
                       INDEX, "dense, outer product, row-sparse"),
    "gather of parts": (lambda p, i: total(lax.dynamic_slice(p, (i[0], 1), (2, 2))), array(9, 4), INDEX, "dense"),
    "convolution": (convolved((2, 1), "SAME"), array(3, 3, 2, 4), IMAGE, "dense"),
    "dilated": (convolved((2, 1), [(2, 1), (0, 3)], None, (2, 1)), array(3, 2, 2, 4), IMAGE, "dense"),
    "transposed": (convolved((1, 1), [(2, 1), (0, 3)], (2, 3), (1, 1)), array(3, 2, 2, 4), IMAGE, "dense"),
    "negative padding": (convolved((1, 1), [(-1, 1), (0, -1)]), array(3, 2, 2, 4), IMAGE, "dense"),
    "groups": (convolved((1, 1), "SAME", feature_group_count=2), array(3, 2, 1, 4), IMAGE, "dense"),
    "depthwise": (convolved((1, 1), "SAME", feature_group_count=2), array(3, 2, 1, 2), IMAGE, "dense"),
    "groups of the batch": (convolved((1, 1), "SAME", batch_group_count=2), array(3, 2, 2, 4),
                            array(BATCH, 2, 7, 6, 2), "dense"),
    "channels first": (convolved((2, 1), "SAME", layout=("NCHW", "OIHW", "NCHW")), array(16, 7, 3, 3), IMAGE,
                       "outer product"),
    "any order": (convolved((2, 1), "SAME", layout=("HNWC", "IWOH", "CWNH")), array(2, 3, 4, 3),
                  array(BATCH, 7, 3, 6, 2), "dense"),
    "one dimension": (convolved((2,), "SAME", layout=("NWC", "WIO", "NWC")), array(3, 16, 12), FEW, "outer product"),
    "three dimensions": (convolved((2, 1, 1), "SAME", layout=("NDHWC", "DHWIO", "NDHWC")), array(3, 2, 2, 2, 4),
                         array(BATCH, 5, 4, 3, 2), "dense"),
    "few positions": (convolved((4, 4), "SAME", feature_group_count=2), array(3, 3, 4, 16), array(BATCH, 4, 4, 8),
                      "outer product"),
    "kernels from data": (lambda p, x: convolved((1, 1), "SAME")(x, p), array(7, 6, 2), array(BATCH, 3, 3, 2, 4),
                          "dense"),
    "recurrent": (recurrent, WIDER, FEW, "dense, outer product, outer product"),
    "recurrent, concatenated": (concatenated, {"w": array(16, 12), "u": array(12, 12)}, FEW,
                                "outer product, outer product"),
    "backwards": (lambda p, x: recurrent(p, x[::-1]), {"w": array(3, 4), "u": array(4, 4), "b": array(4)}, ROWS,
                  "dense, dense, dense"),
    "stacked layers": (lambda p, x: total(lax.scan(layer, x, p)[0]), STACK, FEW, "dense, outer product"),
    "checkpointed layers": (lambda p, x: total(lax.scan(jax.checkpoint(layer), x, p)[0]), STACK, FEW,
                            "dense, outer product"),
    "loops in a loop": (nested, {"w": array(4, 16, 16), "u": array(16, 16)}, FEW, "dense, outer product"),
    "parameters carried": (carried, {"w": SQUARE, "u": array(3, 3)}, ROWS, "dense, dense"),
    "layers by index": (looped, array(3, 3, 3), VECTOR, "dense"),
    "a branch": (lambda p, x: lax.cond(x[0] > 0, lambda: total(x @ p), lambda: total(2 * x @ p)), WIDE, VECTOR,
                 "dense"),
    "a choice": (lambda p, x: total(jnp.where(x > 0, p["a"], p["b"]) * x), {"a": array(3), "b": array(3)}, VECTOR,
                 "dense, dense"),
    "a custom rule": (ruled, WIDE, VECTOR, "dense"),
    "stopped": (lambda p, x: total(x @ p * lax.stop_gradient(p).sum()), WIDE, VECTOR, "outer product"),
    "compared": (lambda p, x: total(jnp.where(p[0] > x[0], 1.0, 2.0) * (x @ p)), WIDE, VECTOR, "outer product"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def assert_close(actual: Any, expected: Any) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_the_helper_detects_differences() -> None:
    with pytest.raises(AssertionError, match="close"):
        assert_close(jnp.ones(2), jnp.ones(2) + 1e-8)


@pytest.mark.parametrize("name", PROGRAMS)
def test_norms_and_sums_are_those_of_each_gradient(name: str) -> None:
    loss, params, examples, rules = PROGRAMS[name]
    leaves, treedef = jax.tree.flatten(params)
    of_leaves = lambda leaves, example: (loss(jax.tree.unflatten(treedef, leaves), example[0]), None)
    uses: list[Any] = []

    @jax.jit
    def both(leaves: list[Any], examples: Any) -> Any:
        program = ExampleProgram(of_leaves, leaves, [examples])
        found = ExampleGradients(program, [examples])
        uses.extend(report_uses(program, [""] * len(leaves), found.forms_summed()))
        actual = found.values, found.squared_norms, found.weighted_sum(WEIGHTS)
        mapped = jax.vmap(jax.value_and_grad(of_leaves, has_aux=True), (None, 0))
        (values, _), gradients = mapped(leaves, [examples])
        squares = sum(jnp.square(x).sum(tuple(range(1, x.ndim))) for x in gradients)
        return actual, (values, squares, [jnp.tensordot(WEIGHTS, x, 1) for x in gradients])

    actual, expected = both(leaves, examples)
    assert_close(actual, expected)
    assert ", ".join(sorted(use.rule for use in uses)) == rules


def test_large_matrices_are_never_held_for_each_example() -> None:
    params, x = [np.ones((300, 200)), np.ones((200, 300))], np.ones((32, 4, 300))
    loss = lambda p, x: (jnp.sum(jnp.tanh(x[0] @ p[0]) @ p[1]), None)

    def clipped(params: Any, x: Any) -> Any:
        found = ExampleGradients(ExampleProgram(loss, params, [x]), [x])
        return found.weighted_sum(1 / found.squared_norms)

    analysis: Any = jax.jit(clipped).lower(params, x).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 8 * 32 * 300 * 200 / 4
