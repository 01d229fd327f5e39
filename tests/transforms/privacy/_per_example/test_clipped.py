"""`clipped_grad`, `per_sample_grad` and `per_sample_norm`: every method against a loop over the samples."""

from __future__ import annotations

import re
import sys
from collections import Counter
from functools import cache
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from plurax.ensemble import Ensemble, Trainer
from plurax.transforms import clipped_grad, per_sample_grad, per_sample_norm, value_and_grad, vmap

pytestmark = pytest.mark.smoke

METHODS = pytest.mark.parametrize("method", ["auto", "vmap", "ghost", "book_keeping"])
X = np.sin(np.arange(24.0)).reshape(6, 4).astype(np.float32)
Y = np.array([0, 2, 1, 1, 0, 2])
PARAMS = {"w": np.cos(np.arange(12.0)).reshape(4, 3).astype(np.float32), "b": np.array([0.1, -0.2, 0.3], np.float32)}


def loss(params: Any, x: Any, y: Any) -> Any:
    """The mean cross-entropy of a batch."""
    logits = x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


value_and_gradient = jax.jit(jax.value_and_grad(loss))


@cache
def one_by_one(clip: float) -> tuple[Any, Any]:
    """Return the sum of the clipped gradients and their norms, computed one gradient at a time."""
    total, norms = jax.tree.map(np.zeros_like, PARAMS), []
    for i in range(len(X)):
        _, gradient = jax.tree.map(np.asarray, value_and_gradient(PARAMS, X[i : i + 1], Y[i : i + 1]))
        norms.append(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradient))))
        total = jax.tree.map(lambda t, g: t + min(1, clip / norms[-1]) * g, total, gradient)
    return total, np.stack(norms)


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_the_helper_detects_differences() -> None:
    with pytest.raises(AssertionError, match="close"):
        assert_close(jnp.ones(2), 1.001 * jnp.ones(2))


@pytest.mark.slow
@METHODS
@pytest.mark.parametrize("microbatch_size", [None, 2, 6])
def test_the_sum_is_that_of_a_loop(method: str, microbatch_size: Any) -> None:
    total, norms = one_by_one(1.37)
    assert (norms > 1.37).any()
    assert (norms < 1.37).any()
    options = {"method": method, "microbatch_size": microbatch_size, "batch_argnums": (1, 2)}
    assert_close(jax.jit(clipped_grad(loss, l2_clip_norm=1.37, **options))(PARAMS, X, Y), total)
    with_aux = lambda p, x, y: (loss(p, x, y), {"x": x, "text": "a string"})
    every = clipped_grad(with_aux, 0, True, l2_clip_norm=1.37, return_values=True, return_grad_norms=True, **options)
    assert every.has_aux
    found, aux = every(PARAMS, X, Y)
    assert_close(found, total)
    assert_close(aux.grad_norms, jnp.asarray(norms))
    assert_close(aux.values, jnp.stack([value_and_gradient(PARAMS, X[i : i + 1], Y[i : i + 1])[0] for i in range(6)]))
    assert aux.aux["text"] == "a string"
    assert_close(aux.aux["x"], jnp.asarray(X))
    scaled = clipped_grad(loss, l2_clip_norm=1.37, rescale_to_unit_norm=True, normalize_by=6.0, **options)
    assert_close(jax.jit(scaled)(PARAMS, X, Y), jax.tree.map(lambda t: t / 1.37 / 6, total))


@METHODS
def test_zero_and_infinite_bounds(method: str) -> None:
    options: Any = {"batch_argnums": (1, 2), "method": method}
    of = lambda clip, **more: jax.jit(clipped_grad(loss, l2_clip_norm=clip, **options, **more))
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    assert_close(of(0.0)(PARAMS, X, Y), zeros)
    assert_close(of(np.inf)(PARAMS, X, Y), jax.tree.map(lambda g: 6 * g, value_and_gradient(PARAMS, X, Y)[1]))
    assert_close(of(np.inf, rescale_to_unit_norm=True)(PARAMS, X, Y), zeros)
    directions = of(0.0, rescale_to_unit_norm=True)(PARAMS, X, Y)
    total, _ = one_by_one(1e-3)
    assert_close(directions, jax.tree.map(lambda t: t / 1e-3, total), 1e-4)
    flat = clipped_grad(lambda p, x: jnp.sum(p["w"]) * jnp.sum(x), l2_clip_norm=1.0, method=method)
    assert_close(jax.jit(flat)(PARAMS, np.zeros((3, 2), np.float32)), zeros)


@METHODS
def test_padding_and_non_finite_gradients_contribute_nothing(method: str) -> None:
    of = jax.jit(clipped_grad(loss, l2_clip_norm=1.37, batch_argnums=(1, 2), method=method, return_grad_norms=True))
    expected, _ = of(PARAMS, X[:4], Y[:4])
    broken = X.copy()
    broken[4], broken[5, 1] = np.nan, np.inf
    padding = np.arange(6) >= 4
    assert_close(of(PARAMS, broken, Y, is_padding_example=padding)[0], expected)
    found, aux = of(PARAMS, broken, Y)
    assert_close(found, expected)
    assert np.isfinite(aux.grad_norms).tolist() == [True] * 4 + [False] * 2
    assert_close(of(PARAMS, X, Y, is_padding_example=padding)[0], expected)
    loose = clipped_grad(loss, l2_clip_norm=1.37, batch_argnums=(1, 2), method=method, nan_safe=False)
    assert np.isnan(jax.jit(loose)(PARAMS, broken, Y)["w"]).any()


@METHODS
def test_groups_of_samples_are_clipped_together(method: str) -> None:
    users, labels = X.reshape(3, 2, 4), Y.reshape(3, 2)
    of = clipped_grad(loss, l2_clip_norm=0.5, batch_argnums=(1, 2), keep_batch_dim=False, method=method)
    total = jax.tree.map(jnp.zeros_like, PARAMS)
    for i in range(3):
        _, gradient = value_and_gradient(PARAMS, users[i], labels[i])
        total = jax.tree.map(lambda t, g: t + g * min(1, 0.5 / optax.tree.norm(gradient)), total, gradient)  # noqa: B023 (used at once)
    assert_close(jax.jit(of)(PARAMS, users, labels), total)


@METHODS
def test_each_sample_has_a_key_of_its_own(method: str) -> None:
    noisy = lambda p, x, key: jnp.sum(p["w"] * jax.random.normal(key, (4, 3))) * x[0, 0] + 0 * jnp.sum(p["b"])
    of = clipped_grad(noisy, l2_clip_norm=np.inf, prng_argnum=2, method=method)
    key = jax.random.key(0)
    keys = jax.random.split(key, 6)
    normal = jax.jit(lambda key: jax.random.normal(key, (4, 3)))
    expected = sum(X[i, 0] * normal(keys[i]) for i in range(6))
    assert_close(jax.jit(of)(PARAMS, X, key), {"w": expected, "b": jnp.zeros(3)})


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_a_wider_sum_does_not_overflow(method: str) -> None:
    half = {"w": np.ones((2, 3), np.float16)}
    x = np.full((8, 2), 150.0, np.float16)
    of = clipped_grad(lambda p, x: jnp.sum(x @ p["w"]) * 100, l2_clip_norm=np.inf, dtype=jnp.float32, method=method)
    assert_close(jax.jit(of)(half, x), {"w": jnp.full((2, 3), 8 * 15000.0)})
    bounded = clipped_grad(lambda p, x: jnp.sum(x @ p["w"]) * 100, l2_clip_norm=1.0, method=method)
    assert_close(jax.jit(bounded)(half, x), {"w": jnp.full((2, 3), 8 / 6**0.5, jnp.float16)}, 1e-2)


@METHODS
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.bfloat16])
def test_every_dtype(dtype: Any, method: str) -> None:
    total, norms = one_by_one(1.37)
    with jax.enable_x64(True):
        params, x = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), (PARAMS, X))
        of = clipped_grad(loss, l2_clip_norm=1.37, batch_argnums=(1, 2), return_grad_norms=True, method=method)
        found, aux = jax.jit(of)(params, x, Y)
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(dtype)}
        tolerance = 0.05 if dtype == jnp.bfloat16 else 1e-5
        chex.assert_trees_all_close(jax.tree.map(np.float32, found), total, rtol=tolerance, atol=tolerance)
        chex.assert_trees_all_close(np.float32(aux.grad_norms), norms, rtol=tolerance)


@pytest.mark.slow
def test_a_transform_before_clipping() -> None:
    doubled = clipped_grad(
        loss, l2_clip_norm=1.37, batch_argnums=(1, 2), pre_clipping_transform=lambda g: {"twice": 2 * g["w"]}
    )
    total = np.zeros((4, 3), np.float32)
    for i in range(6):
        gradient = 2 * np.asarray(value_and_gradient(PARAMS, X[i : i + 1], Y[i : i + 1])[1]["w"])
        total += gradient * min(1, 1.37 / np.linalg.norm(gradient))
    assert_close(doubled(PARAMS, X, Y), {"twice": total})
    report = doubled.explain(PARAMS, X, Y)
    assert report[:3] == ("vmap", 6, "pre_clipping_transform needs each gradient")
    assert {use.rule for use in report.uses} == {"dense"}


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.conv = nnx.Conv(8, 6, (3,), rngs=rngs)
        self.norm = nnx.LayerNorm(6, rngs=rngs)
        self.out = nnx.Linear(6, 8, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        return self.embed.attend(self.out(nnx.relu(self.norm(self.conv(self.embed(tokens))))))


def next_token(model: Any, tokens: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


TOKENS = np.arange(40).reshape(5, 8) * 7 % 11


@pytest.mark.slow
def test_modules_and_their_explanation() -> None:
    model = Net(nnx.Rngs(0))
    of = clipped_grad(next_token, l2_clip_norm=0.5, return_grad_norms=True)
    found, aux = jax.jit(of)(model, TOKENS)
    assert isinstance(found, nnx.State)
    by_vmap = clipped_grad(next_token, l2_clip_norm=0.5, return_grad_norms=True, method="vmap")
    expected, plain = jax.jit(by_vmap)(model, TOKENS)
    assert_close(found, expected)
    assert_close(aux.grad_norms, plain.grad_norms)
    assert_close(jax.jit(per_sample_norm(next_token))(model, TOKENS), plain.grad_norms)
    report = of.explain(model, TOKENS)
    assert report.method == "book_keeping"
    rules = Counter((use.parameter, use.rule, use.operation) for use in report.uses)
    assert rules["model['embed']['embedding']", "row-sparse", "gather"] == 1
    assert rules["model['embed']['embedding']", "outer product", "dot_general"] == 1
    assert rules["model['norm']['scale']", "dense", "mul"] == 1
    assert "test_clipped.py" in str(report)
    assert "unknown" not in str(report)
    by_method = clipped_grad(
        lambda tokens, scale: next_token(model, tokens) * scale, 1, l2_clip_norm=1.0, batch_argnums=0
    )
    assert by_method(TOKENS, 2.0).shape == ()


@pytest.mark.slow
@METHODS
def test_inside_a_shard_map_over_one_device(method: str) -> None:
    of = clipped_grad(loss, batch_argnums=(1, 2), l2_clip_norm=0.5, method=method)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    summed = lambda *args: jax.lax.psum(of(*args), "data")
    found = jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P()))(PARAMS, X, Y)
    assert_close(found, jax.tree.map(jnp.asarray, one_by_one(0.5)[0]))


def test_members_of_an_ensemble_train_with_clipped_gradients() -> None:
    ens = Ensemble.create(Net, 2, seed=0)

    def private(loss: Any) -> Any:
        clipped = clipped_grad(loss, l2_clip_norm=0.1, normalize_by=5.0, return_values=True)

        def value_and_gradient(model: Any, tokens: Any) -> Any:
            gradient, aux = clipped(model, tokens)
            return aux.values.mean(), gradient

        return value_and_gradient

    trainer = Trainer(next_token, optax.sgd(1.0), grad_fn=private, strategy="vmap")
    state, metrics = trainer.step(trainer.init(ens), (TOKENS,))
    alone = jax.jit(clipped_grad(next_token, l2_clip_norm=0.1, normalize_by=5.0, return_values=True))
    for i in range(2):
        gradient, aux = alone(ens[i], TOKENS)
        moved = jax.tree.map(lambda p, g: p - g, nnx.state(ens[i], nnx.Param), gradient)
        assert_close(nnx.state(state.ensemble[i], nnx.Param), moved)
        assert_close(metrics["loss"][i], aux.values.mean())


@METHODS
def test_it_composes(method: str) -> None:
    of = clipped_grad(lambda p, x, scale: jnp.sum(jnp.sin(x @ p) * scale), l2_clip_norm=1.0, method=method)
    w, scale = PARAMS["w"], np.float32(1.5)

    def plain(w: Any, x: Any, scale: Any) -> Any:
        each = jax.vmap(lambda x: jax.grad(lambda p: jnp.sum(jnp.sin(x @ p) * scale))(w))(x)
        return jnp.einsum("b,bij->ij", jnp.minimum(1, 1 / jnp.linalg.norm(each.reshape(6, -1), axis=1)), each)

    of_scale = lambda f: jax.grad(lambda scale: jnp.sum(f(w, X, scale) ** 2))
    assert_close(jax.jit(of_scale(of))(scale), jax.jit(of_scale(plain))(scale), 1e-4)
    many = np.stack([w, 2 * w, -w])
    each = jax.jit(plain)
    assert_close(jax.jit(vmap(of, (0, None, None)))(many, X, scale), jnp.stack([each(m, X, scale) for m in many]))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"chunk_size": 4}, {"memory_budget": "1MB"}], ids=["", "chunks", "budget"])
def test_each_gradient(options: Any) -> None:
    each = jax.jit(per_sample_grad(loss, batch_argnums=(1, 2), **options))(PARAMS, X, Y)
    one = lambda i: value_and_gradient(PARAMS, X[i : i + 1], Y[i : i + 1])[1]
    assert_close(each, jax.tree.map(lambda *leaves: jnp.stack(leaves), *[one(i) for i in range(6)]))
    with_aux = per_sample_grad(lambda p, x, y: (loss(p, x, y), "aux"), 0, True, batch_argnums=(1, 2), **options)
    found, aux = with_aux(PARAMS, X, Y)
    assert_close(found, each)
    assert aux == "aux"
    model = Net(nnx.Rngs(0))
    rows = jax.jit(per_sample_grad(next_token, **options))(model, TOKENS)
    _, expected = jax.jit(value_and_grad(next_token))(model, TOKENS[2:3])
    assert_close(jax.tree.map(lambda x: x[2], rows), expected)


class Counting(nnx.Module):
    def __init__(self) -> None:
        self.w, self.count = nnx.Param(jnp.ones(4)), nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        self.count[...] += 1
        return jnp.sum(x @ self.w)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"argnums": ()}, ValueError, r"argnums is empty"),
        ({"batch_argnums": ()}, ValueError, r"batch_argnums is empty"),
        ({"argnums": -1}, ValueError, r"argnums=-1 and batch_argnums=1 must not be negative"),
        (
            {"argnums": (0, 1)},
            ValueError,
            r"argument 1 is in argnums and in batch_argnums, but parameters have no axis",
        ),
        ({"l2_clip_norm": -1.0}, ValueError, r"l2_clip_norm must be at least 0, but got -1\.0"),
        ({"l2_clip_norm": float("nan")}, ValueError, r"l2_clip_norm must be at least 0, but got nan"),
        ({"normalize_by": 0.0}, ValueError, r"normalize_by must be positive, but got 0\.0"),
        ({"l2_clip_norm": "1"}, TypeError, r"l2_clip_norm must be a number, but got '1' of type str"),
        ({"l2_clip_norm": np.ones(2)}, TypeError, r"l2_clip_norm must be a number, but got an array of shape \(2,\)"),
        ({"normalize_by": None}, TypeError, r"normalize_by must be a number, but got None"),
        ({"dtype": jnp.int32}, TypeError, r"dtype must be floating point, such as jnp\.float32, but got .*int32"),
        ({"prng_argnum": (2,)}, TypeError, r"prng_argnum must be an int or None, but got \(2,\) of type tuple"),
        (
            {"method": "hooks"},
            ValueError,
            r"method must be one of 'auto', 'vmap', 'ghost', 'book_keeping', but got 'hooks'",
        ),
        ({"microbatch_size": 0}, ValueError, r"microbatch_size must be at least 1, but got 0"),
        (
            {"method": "ghost", "pre_clipping_transform": len},
            ValueError,
            r'pre_clipping_transform needs each .*"ghost"',
        ),
    ],
)
def test_invalid_options_are_refused_at_once(options: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=f"^clipped_grad: {match}"):
        clipped_grad(loss, **{"l2_clip_norm": 1.0, **options})


def test_invalid_calls_are_refused() -> None:
    refused = lambda error, match: pytest.raises(error, match=f"^clipped_grad: {match}")
    of = clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2))
    with refused(ValueError, r"`x` has 6 examples, but `y` has 5; pass the same number"):
        of(PARAMS, X, Y[:5])
    with refused(ValueError, r"batch_argnums selects argument 2, but the call has 2 positional"):
        of(PARAMS, X)
    with refused(ValueError, r"`y` is 3 of type int, which has no axis of examples"):
        of(PARAMS, X, 3)
    with refused(ValueError, r"the arguments of batch_argnums hold no array, so there are no examples"):
        clipped_grad(loss, l2_clip_norm=1.0)(PARAMS, None, Y)
    with refused(TypeError, r"argument `params\['b'\]` is an array .* int64, but only floating-point arrays"):
        of({"w": np.ones((4, 3), int), "b": np.ones(3, int)}, X, Y)
    with refused(TypeError, r"fun must return one real scalar, but it returned an array of shape \(1, 3\)"):
        clipped_grad(lambda p, x: x @ p["w"], l2_clip_norm=1.0)(PARAMS, X)
    with refused(ValueError, r"prng_argnum selects argument 3, but the call has 3 positional"):
        clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2), prng_argnum=3)(PARAMS, X, Y)
    for number, name in ((0, "params"), (1, "x"), (-1, "y")):
        with refused(ValueError, rf"prng_argnum={number} names `{name}`, which has parameters or examples; pass the"):
            clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2), prng_argnum=number)(PARAMS, X, Y)
    with refused(
        ValueError, r"keyword argument `y` is an array of shape \(5,\) .*, but keyword .* have the 6 examples"
    ):
        clipped_grad(loss, l2_clip_norm=1.0)(PARAMS, X, y=Y[:5])
    with refused(ValueError, r"microbatch_size=4 does not divide the batch of 6; pad the batch"):
        clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2), microbatch_size=4)(PARAMS, X, Y)
    with refused(
        ValueError, r"is_padding_example is an array of shape \(5,\) and dtype bool, but there are 6 examples"
    ):
        of(PARAMS, X, Y, is_padding_example=np.zeros(5, bool))
    model = Counting()
    for method in ("vmap", "ghost", "book_keeping"):
        with refused(ValueError, r"fun changes the state of Counting \(`count`\), which all examples share"):
            clipped_grad(lambda m, x: m(x), l2_clip_norm=1.0, method=method)(model, X)
    assert float(model.count[...]) == 0


def test_the_sensitivity_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    of = clipped_grad(loss, l2_clip_norm=3.0, normalize_by=2.0)
    assert of.l2_norm_bound == 1.5
    for one in (np.float16(1), np.array(1, np.float16), jnp.bfloat16(1), jnp.array(1, jnp.bfloat16)):
        assert float(clipped_grad(loss, l2_clip_norm=one, normalize_by=np.float16(3)).l2_norm_bound) == 1 / 3
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ModuleNotFoundError, match=r"sensitivity needs dp-accounting; install .*plurax\[privacy\]"):
        of.sensitivity()


def test_the_choice_of_auto_depends_on_shapes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = lambda params, x: jnp.sum(jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]))
    params = {name: np.sin(np.arange(256.0**2)).reshape(256, 256).astype(np.float32) / 16 for name in "ab"}
    long, short = (np.cos(np.arange(2.0 * n * 256)).reshape(2, n, 256).astype(np.float32) for n in (120, 3))
    auto = clipped_grad(wide, l2_clip_norm=1.0, return_grad_norms=True)
    report = auto.explain(params, long)
    assert report[:2] == ("vmap", 2)
    assert re.fullmatch(r"estimated memory traffic [\d.]+ MiB; [\d.]+ MiB without stored gradients", report.why)
    assert [(use.parameter, use.rule) for use in report.uses] == [("params['a']", "dense"), ("params['b']", "dense")]
    assert auto.explain(params, short)[:2] == ("book_keeping", 2)
    narrow = {"a": params["a"][:, :4], "b": params["b"][:4]}
    report = auto.explain(narrow, np.repeat(long, 200, 0))
    assert report.method == "book_keeping"
    assert 1 < report.examples < 400
    book_keeping = clipped_grad(wide, l2_clip_norm=1.0, return_grad_norms=True, method="book_keeping")
    for x in (long, short):
        assert_close(jax.jit(auto)(params, x), jax.jit(book_keeping)(params, x), 1e-4)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert auto.explain(params, long)[:2] == ("book_keeping", 2)
