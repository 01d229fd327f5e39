"""`method="ghost"`: norms inside the backward pass, compared with materialized gradients, and the memory it takes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from plurax.transforms import clipped_grad, per_sample_norm
from plurax.transforms.privacy._per_example import methods

BATCH, LENGTH, VOCABULARY, WIDTH, LAYERS = 5, 7, 11, 6, 3
Loss = Callable[[Any, Any], jax.Array]


def parameters(dtype: Any = np.float32, layers: int = LAYERS, width: int = WIDTH, words: int = VOCABULARY) -> Any:
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(generator.normal(size=shape) / np.sqrt(shape[-1]), dtype)

    return {
        "table": normal(words, width),
        "head": normal(width, words),
        "up": normal(layers, width, 2 * width),
        "bias": normal(layers, 2 * width),
        "down": normal(layers, 2 * width, width),
        "scale": normal(width),
    }


def tokens(batch: int = BATCH, length: int = LENGTH, words: int = VOCABULARY) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, words, (batch, length + 1)), jnp.int32)


def layer(x: jax.Array, p: Any) -> jax.Array:
    return x + jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]


def layers_of(p: Any) -> Any:
    return {name: p[name] for name in ("up", "bias", "down")}


def in_list(p: Any, x: jax.Array) -> jax.Array:
    """Apply the first two layers."""
    for i in range(2):
        x = jax.checkpoint(layer)(x, jax.tree.map(lambda w, i=i: w[i], layers_of(p)))
    return x


def in_scan(p: Any, x: jax.Array, *, remat: bool = True, **options: Any) -> jax.Array:
    step = jax.checkpoint(layer) if remat else layer
    return lax.scan(lambda x, w: (step(x, w), None), x, layers_of(p), **options)[0]


def same_layer(p: Any, x: jax.Array) -> jax.Array:
    """Apply one layer repeatedly: its gradients of all iterations add up before the norm."""
    first = jax.tree.map(lambda w: w[0], layers_of(p))
    return lax.scan(lambda x, _: (jax.checkpoint(layer)(x, first), None), x, length=3)[0]


def entropy(logits: jax.Array, words: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), words[..., None], -1))


def language_model(
    p: Any, words: jax.Array, *, body: Any = in_scan, head: Any = lambda p, x: x @ p["head"]
) -> jax.Array:
    x = body(p, p["table"][words[:, :-1]]) * p["scale"]
    return entropy(head(p, x), words[:, 1:])


def transposed_lookup(p: Any, words: jax.Array) -> jax.Array:
    return entropy(in_scan(p, p["head"].T[words[:, :-1]]) @ p["head"], words[:, 1:])


def two_lookups(p: Any, words: jax.Array) -> jax.Array:
    x = p["table"][words[:, :-1]] + jnp.sin(p["table"][words[:, 1:] % 3])
    return entropy(in_scan(p, x) @ p["table"].T, words[:, 1:])


def lookup_in_checkpoint(p: Any, words: jax.Array) -> jax.Array:
    x = jax.checkpoint(lambda table, i: jnp.tanh(table[i]))(p["table"], words[:, :-1])
    return jax.checkpoint(lambda p, x: entropy(x @ p["table"].T, words[:, 1:]))(p, in_scan(p, x))


def product_first(p: Any, words: jax.Array) -> jax.Array:
    """Multiply with the table before it is read, so that the rows are not known in time."""
    logits = jnp.ones((*words.shape, WIDTH)) * jnp.sin(words)[..., None] @ p["table"].T
    return entropy(logits, words) + jnp.sum(jnp.cos(p["table"][words]) * logits.mean())


def two_products(p: Any, words: jax.Array) -> jax.Array:
    x = p["table"][words]
    return entropy(x @ p["table"].T + jnp.sin(x) @ p["table"].T, words)


def head_in_parts(p: Any, words: jax.Array) -> jax.Array:
    """Compute the loss over parts of the positions: the product with the table is in a loop."""
    x = in_scan(p, p["table"][words])[0].reshape(2, -1, WIDTH)
    return lax.map(lambda args: entropy(args[0] @ p["table"].T, args[1]), (x, words.reshape(2, -1))).mean()


def part_of_a_table(p: Any, words: jax.Array) -> jax.Array:
    return entropy(p["table"][:4][words % 4] @ p["table"][5:].T, words % 5)


def out_of_range(p: Any, words: jax.Array) -> jax.Array:
    x = p["table"].at[words * 2 - 3].get(mode="fill", fill_value=0.5)
    return entropy(in_scan(p, x) @ p["table"].T, words)


def tied(p: Any, x: jax.Array) -> jax.Array:
    return x @ p["table"].T


@jax.custom_vjp
def limited(x: jax.Array) -> jax.Array:
    return x


limited.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))

LOSSES: dict[str, Loss] = {
    "scan": language_model,
    "scan without remat": partial(language_model, body=partial(in_scan, remat=False)),
    "scan in reverse": partial(language_model, body=partial(in_scan, reverse=True, unroll=2)),
    "list": partial(language_model, body=in_list),
    "scan, tied": partial(language_model, head=tied),
    "list, tied": partial(language_model, body=in_list, head=tied),
    "one layer repeated": partial(language_model, body=same_layer),
    "in half precision": lambda p, x: language_model(jax.tree.map(lambda w: w.astype(jnp.bfloat16), p), x),
    "nonlinear backward pass": partial(language_model, head=lambda p, x: limited(x @ p["head"])),
    "normalized weights": lambda p, x: language_model({**p, "up": p["up"] / jnp.linalg.norm(p["up"])}, x),
    **{
        loss.__name__.replace("_", " "): loss
        for loss in (
            transposed_lookup,
            two_lookups,
            lookup_in_checkpoint,
            product_first,
            two_products,
            head_in_parts,
            part_of_a_table,
            out_of_range,
        )
    },
}


def assert_close(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, tolerance, tolerance * (1 + float(np.abs(b).max())))


def tolerance_of(name: str, others: float) -> float:
    return 2e-2 if name == "in half precision" else others


@pytest.mark.slow
@pytest.mark.parametrize(("name", "jit"), [*((name, True) for name in LOSSES), ("list, tied", False)])
def test_norms_and_sums_are_those_of_materialized_gradients(name: str, jit: bool) -> None:
    loss, p, words = LOSSES[name], parameters(), tokens()
    each = jax.jit(jax.vmap(jax.grad(lambda p, one: loss(p, one[None])), (None, 0)))(p, words)
    norms = np.sqrt(sum(np.square(g).reshape(BATCH, -1).sum(1) for g in jax.tree.leaves(each)))
    clip, padding = float(np.median(norms)), np.arange(BATCH) == 1
    of = clipped_grad(loss, l2_clip_norm=clip, method="ghost", return_grad_norms=True)
    assert of.explain(p, words)[:2] == ("ghost", BATCH)
    found, aux = (jax.jit(of) if jit else of)(p, words, is_padding_example=padding)
    weights = np.where(padding, 0, np.minimum(1, clip / norms))
    expected = jax.tree.map(lambda g: np.tensordot(weights, g, 1).astype(g.dtype), each)
    assert_close((found, aux.grad_norms), (expected, norms), tolerance_of(name, 2e-5))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scan, tied", "two lookups", "in half precision", "normalized weights"])
def test_float64_sums(name: str) -> None:
    of = partial(clipped_grad, LOSSES[name], l2_clip_norm=0.5, dtype=jnp.float64)
    with jax.enable_x64(True):
        both = jax.jit(lambda p, words: [of(method=method)(p, words) for method in ("ghost", "vmap")])
        found, expected = both(parameters(), tokens())
    assert all(x.dtype == np.float64 for x in jax.tree.leaves(found))
    assert_close(found, expected, tolerance_of(name, 1e-6))


MODES = ("jvp", "grad", "vmap over parameters")
QUICK: Any = {"xla_backend_optimization_level": 0}  # optimized, the largest programs take 10 s to compile


def transformed(of: Any, mode: str, p: Any) -> Any:
    """Transform `of` as a function of the parameters."""
    of_parameters = lambda p: jax.tree.leaves(of(p, tokens()))
    if mode == "grad":
        return jax.grad(lambda p: sum(jnp.sin(x).sum() for x in of_parameters(p)))(p)
    if mode == "vmap over parameters":
        return jax.vmap(of_parameters)(jax.tree.map(lambda x: jnp.stack([x, 1.1 * x]), p))
    return jax.jvp(of_parameters, (p,), (jax.tree.map(jnp.cos, p),))[1]


def norms_and_sum(name: str, method: Any) -> Any:
    return clipped_grad(LOSSES[name], l2_clip_norm=0.5, dtype=jnp.float32, method=method, return_grad_norms=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("scan, tied", mode) for mode in MODES),
        *((name, "grad") for name in ("one layer repeated", "in half precision")),
        *((name, "vmap over parameters") for name in ("list", "one layer repeated")),
        ("in half precision", "jvp"),
    ],
)
def test_it_can_be_transformed(name: str, mode: str) -> None:
    """Both passes are differentiable in both modes, as with every other method."""
    of = partial(norms_and_sum, name)
    both = jax.jit(lambda p: [transformed(of(m), mode, p) for m in ("ghost", "vmap")], compiler_options=QUICK)
    assert_close(*both(parameters()), tolerance=5e-2 if name == "in half precision" else 1e-4)


@pytest.mark.slow
def test_its_tangents_outside_jit() -> None:
    expected = jax.jit(partial(transformed, norms_and_sum("list", "vmap"), "jvp"))(parameters())
    assert_close(transformed(norms_and_sum("list", "ghost"), "jvp", parameters()), expected, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_norms_alone_can_be_transformed(mode: str) -> None:
    of = partial(per_sample_norm, LOSSES["scan, tied"])
    both = jax.jit(lambda p: [transformed(of(method=m), mode, p) for m in ("ghost", "vmap")], compiler_options=QUICK)
    assert_close(*both(parameters()), tolerance=1e-4)


@pytest.mark.parametrize("name", ["scan", "scan, tied"])
def test_a_checkpointed_stack_takes_the_memory_of_its_ordinary_gradient(name: str) -> None:
    p, words = parameters(None, 8, 32, 64), tokens(16, 32, 64)

    def temporaries(of: Any) -> int:
        return jax.jit(of).lower(p, words).compile().memory_analysis().temp_size_in_bytes

    ordinary = temporaries(jax.grad(LOSSES[name]))
    ghost, kept = (
        temporaries(clipped_grad(LOSSES[name], l2_clip_norm=0.5, method=m)) for m in ("ghost", "book_keeping")
    )
    assert ghost <= 1.15 * ordinary
    assert kept > 2 * ordinary  # it records activations and cotangents of every layer


def test_the_explanation_says_where_norms_are_computed() -> None:
    of = clipped_grad(LOSSES["one layer repeated"], l2_clip_norm=0.5, method="ghost")
    inside = {use.parameter: "inside the backward pass" in use.why for use in of.explain(parameters(), tokens()).uses}
    expected = {"head": True, "scale": True, "table": True, "up": False, "bias": False, "down": False}
    assert inside == {f"p['{name}']": is_inside for name, is_inside in expected.items()}
    of = clipped_grad(LOSSES["scan, tied"], l2_clip_norm=0.5, method="ghost")
    found = {
        (use.operation, "inside" in use.why)
        for use in of.explain(parameters(), tokens()).uses
        if "table" in use.parameter
    }
    assert found == {("gather", False), ("dot_general", True)}


def test_a_small_gradient_is_materialized_if_that_is_quicker() -> None:
    """Of 100 positions, the inner products of a matrix of 6 by 5 would take 10,000 numbers, its gradient 30."""
    w, x = np.ones((6, 5), np.float32), np.ones((3, 100, 6), np.float32)
    of = clipped_grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)), l2_clip_norm=1.0, method="ghost")
    assert "30 numbers, inside the backward pass" in of.explain(w, x).uses[0].why


def products(of: Any, *platforms: str) -> list[int]:
    """Return the number of products in the program for each platform, which need not be here."""
    traced = jax.jit(of).trace(parameters(), tokens())
    return [traced.lower(lowering_platforms=(name,)).as_text().count("dot_general") for name in platforms]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scan", "list, tied", "one layer repeated"])
def test_auto_follows_the_platform_that_is_compiled_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_NO_MATTER", 0)
    of = partial(clipped_grad, LOSSES[name], l2_clip_norm=0.5)
    explained: Any = of().explain(parameters(), tokens()).method
    assert explained in ("book_keeping", "vmap")
    on_cpu, on_cuda, on_tpu = products(of(), "cpu", "cuda", "tpu")
    assert [on_cpu] == products(of(method=explained), "cpu")
    assert [on_cuda] == [on_tpu] == products(of(method="ghost"), "cuda")
    assert [on_cuda] > products(of(method="book_keeping"), "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["jvp", "grad", "vmap over parameters", "scan"])
def test_auto_with_two_platforms_can_be_transformed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_NO_MATTER", 0)
    p, words = parameters(), tokens()

    def of(method: Any, p: Any) -> Any:
        of_parameters = lambda p, words=words: clipped_grad(LOSSES["scan"], l2_clip_norm=0.5, method=method)(p, words)
        if mode == "jvp":
            return jax.jvp(of_parameters, (p,), (p,))[1]
        if mode == "grad":
            return jax.grad(lambda p: sum(jnp.sin(x).sum() for x in jax.tree.leaves(of_parameters(p))))(p)
        if mode == "scan":
            return lax.scan(lambda c, words: (c, of_parameters(p, words)), 0, jnp.stack([words, words + 1]))[1]
        return jax.vmap(of_parameters)(jax.tree.map(lambda x: jnp.stack([x, 1.1 * x]), p))

    assert_close(*jax.jit(lambda p: [of(method, p) for method in ("auto", "vmap")])(p), tolerance=1e-4)
