"""A clip norm for each part of the parameters, and automatic clipping, against gradients that are materialized."""

from __future__ import annotations

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.transforms import clipped_grad
from plurax.transforms.privacy import DPSGD

METHODS = ("auto", "vmap", "book_keeping", "ghost")
BATCH = 6
GENERATOR = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return jnp.asarray(GENERATOR.normal(size=shape), jnp.float32)


PARAMS = {
    "embed": normal(7, 4),
    "layers": [{"w": normal(4, 4), "b": normal(4)} for _ in range(2)],
    "head": normal(4, 3),
    "halves": [normal(4, 5), normal(4, 6)],
}
TOKENS, TARGETS = jnp.asarray(GENERATOR.integers(0, 7, (BATCH, 5))), normal(BATCH, 3)
PADDING = np.arange(BATCH) == 2
EACH_LEAF: Any = jax.tree.map(lambda x: 0.1 + 0.1 * x.ndim, PARAMS)
NORMS: dict[str, Any] = {
    "four parts": {"embed": 0.5, "layers": 1.5, "head": 0.2, "halves": 0.7},
    "each leaf": EACH_LEAF,
    "some zero": {"embed": 0.0, "layers": [0.1, {"w": 2.0, "b": 0.0}], "head": math.inf, "halves": [0.3, 0.4]},
}


def loss(params: Any, tokens: Any, targets: Any) -> Any:
    """A loss of one example with a tied table, a loop's worth of layers, a fused product and weight decay."""
    h = params["embed"][tokens]
    for layer in params["layers"]:
        h = jnp.tanh(h @ layer["w"] + layer["b"])
    h = h.mean(1)
    fused = h @ jnp.concatenate(params["halves"], axis=1)
    scores = h @ params["embed"].T
    errors = (h @ params["head"] - targets) ** 2
    return errors.sum() + jnp.sin(fused).sum() + 0.1 * (scores**2).sum() + 0.01 * (params["head"] ** 2).sum()


def naive(norms: Any, *, automatic: float | None = None, rescale: bool = False, each: Any = None) -> tuple[Any, Any]:
    """Return the clipped sum and the norms of the parts, from each example's gradient."""
    if each is None:
        of_one = jax.grad(lambda params, x, y: loss(params, x[None], y[None]))
        each = jax.vmap(of_one, (None, 0, 0))(PARAMS, TOKENS, TARGETS)
    each = jax.tree.map(lambda x: np.asarray(x, np.float64), each)

    def sizes(_: Any, part: Any) -> Any:
        return np.sqrt(sum((x.reshape(BATCH, -1) ** 2).sum(1) for x in jax.tree.leaves(part)))

    found = jax.tree.map(sizes, norms, each)
    usable = np.all([np.isfinite(x) for x in jax.tree.leaves(found)], axis=0) & ~PADDING

    def clipped(norm: float, size: Any, part: Any) -> Any:
        scale = np.minimum(1, norm / np.maximum(size, 1e-300)) if automatic is None else norm / (size + automatic)
        scale = np.where(usable, scale / norm if rescale else scale, 0)
        return jax.tree.map(lambda x: np.tensordot(scale, np.where(np.isfinite(x), x, 0), 1), part)

    return jax.tree.map(clipped, norms, found, each), found


def assert_close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, tolerance, tolerance), found, expected)


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("method", METHODS)
def test_each_part_is_clipped_to_its_own_norm(method: Any, norms: str) -> None:
    expected = naive(NORMS[norms])
    for size in (None, 3):
        of = clipped_grad(
            loss,
            l2_clip_norm=NORMS[norms],
            batch_argnums=(1, 2),
            return_grad_norms=True,
            method=method,
            microbatch_size=size,
        )
        found, aux = jax.jit(of)(PARAMS, TOKENS, TARGETS, is_padding_example=PADDING)
        assert_close((found, aux.grad_norms), expected)
        assert jax.tree.structure(aux.grad_norms) == jax.tree.structure(NORMS[norms])


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("norms", [0.7, NORMS["four parts"]], ids=["one norm", "four parts"])
@pytest.mark.parametrize("method", METHODS)
def test_automatic_clipping(method: Any, norms: Any, rescale: bool) -> None:
    options: Any = {"l2_clip_norm": norms, "automatic": 0.05, "rescale_to_unit_norm": rescale, "method": method}
    of = clipped_grad(loss, batch_argnums=(1, 2), normalize_by=2.0, **options)
    expected = naive(norms, automatic=0.05, rescale=rescale)[0]
    found = jax.jit(of)(PARAMS, TOKENS, TARGETS, is_padding_example=PADDING)
    assert_close(found, jax.tree.map(lambda x: x / 2, expected))
    sizes = np.array(jax.tree.leaves(norms))
    assert of.sensitivity() == pytest.approx((len(sizes) ** 0.5 if rescale else np.sqrt((sizes**2).sum())) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"automatic": 0.01}], ids=["clipped", "automatic"])
@pytest.mark.parametrize("method", METHODS)
def test_zero_gradients_and_those_that_are_not_finite(method: Any, options: Any) -> None:
    params = {"a": jnp.ones((3, 2)), "b": jnp.ones((3, 2))}
    of = lambda params, x: jnp.sum((x[:, 0] @ params["a"]) ** 2) + jnp.sum(x[:, 1] @ params["b"])
    x = np.array(normal(BATCH, 2, 3))
    x[0], x[1, 0, 1], x[3, 1, 2] = 0, np.nan, np.inf
    each = jax.vmap(jax.grad(lambda params, x: of(params, x[None])), (None, 0))(params, x)
    norms = {"a": 0.4, "b": 0.3}
    found = clipped_grad(of, l2_clip_norm=norms, method=method, **options)(params, x, is_padding_example=PADDING)
    assert_close(found, naive(norms, each=each, **options)[0])  # an example with one part not finite is left out
    only_zero = clipped_grad(of, l2_clip_norm=norms, method=method, **options)(params, 0 * x[4:])
    assert_close(only_zero, jax.tree.map(jnp.zeros_like, params))
    if not options:
        unsafe = clipped_grad(of, l2_clip_norm=norms, method=method, nan_safe=False)(params, x)
        assert jnp.isnan(unsafe["a"]).any()


@pytest.mark.parametrize("method", ["auto", "vmap"])  # the others do not materialize gradients
def test_the_norm_of_a_transformed_gradient(method: Any) -> None:
    halved = lambda grads: {"embed": grads["embed"] / 2, "rest": [grads["layers"], grads["head"], grads["halves"]]}
    with pytest.raises(ValueError, match="not a prefix"):
        clipped_grad(loss, l2_clip_norm=NORMS["four parts"], batch_argnums=(1, 2), pre_clipping_transform=halved)(
            PARAMS, TOKENS, TARGETS
        )
    scaled = lambda grads: jax.tree.map(lambda x: 3 * x, grads)
    options: Any = {"batch_argnums": (1, 2), "method": method, "return_grad_norms": True}
    of = clipped_grad(loss, l2_clip_norm=NORMS["four parts"], pre_clipping_transform=scaled, **options)
    found, aux = of(PARAMS, TOKENS, TARGETS, is_padding_example=PADDING)
    each = jax.vmap(jax.grad(lambda params, x, y: loss(params, x[None], y[None])), (None, 0, 0))(
        PARAMS, TOKENS, TARGETS
    )
    assert_close(found, naive(NORMS["four parts"], each=scaled(each))[0])
    assert_close(aux.grad_norms, naive(NORMS["four parts"])[1])  # before the transform


@pytest.mark.slow
def test_modules_and_several_arguments() -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first, self.second = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.second(jnp.tanh(self.first(x)))

    class Both(eqx.Module):
        first: Any
        second: Any

        def __call__(self, x: Any) -> Any:
            return jnp.tanh(x @ self.first["kernel"] + self.first["bias"]) @ self.second["kernel"] + self.second["bias"]

    net, x = Net(nnx.Rngs(0)), normal(5, 3)
    arrays = nnx.to_pure_dict(nnx.state(net))
    norms = {"first": 0.3, "second": {"kernel": 0.2, "bias": 0.1}}
    of = lambda model, x: jnp.sum(model(x) ** 2)
    by_hand = clipped_grad(
        lambda p, x: of(Both(p["first"], p["second"]), x), l2_clip_norm=norms, return_grad_norms=True, method="vmap"
    )(arrays, x)
    found, aux = clipped_grad(of, l2_clip_norm=norms, return_grad_norms=True)(net, x)
    assert_close((nnx.to_pure_dict(found), aux.grad_norms), (by_hand[0], by_hand[1].grad_norms))
    states = nnx.State({"first": 0.3, "second": nnx.State({"kernel": 0.2, "bias": 0.1})})
    assert_close(clipped_grad(of, l2_clip_norm=states)(net, x), found)
    both = Both(arrays["first"], arrays["second"])
    given = clipped_grad(of, l2_clip_norm=Both(0.3, {"kernel": 0.2, "bias": 0.1}))(both, x)
    assert_close((given.first, given.second), (by_hand[0]["first"], by_hand[0]["second"]))

    two = lambda a, b, x: jnp.sum((x @ a["kernel"]) ** 2) + jnp.sum(jnp.sin(x @ b["kernel"]))
    a, b = {"kernel": normal(3, 2)}, {"kernel": normal(3, 4)}
    sums, aux = clipped_grad(two, (0, 1), l2_clip_norm=(0.1, 0.2), batch_argnums=2, return_grad_norms=True)(a, b, x)
    alone = clipped_grad(lambda a, x: two(a, b, x), l2_clip_norm=0.1)(a, x)
    assert_close(sums[0], alone)
    assert aux.grad_norms[1].shape == (5,)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_traced_norms_and_half_precision(method: Any) -> None:
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    of = lambda norms: clipped_grad(
        loss, l2_clip_norm=norms, batch_argnums=(1, 2), dtype=jnp.float32, method=method, keep_batch_dim=True
    )(params, TOKENS, TARGETS.astype(jnp.bfloat16), is_padding_example=PADDING)
    norms = NORMS["four parts"]
    scaled = jax.vmap(lambda scale: of(jax.tree.map(lambda x: scale * x, norms)))(jnp.array([1.0, 0.5]))
    assert_close(jax.tree.map(lambda x: x[0], scaled), of(norms), 2e-2)
    assert_close(jax.tree.map(lambda x: x[1], scaled), of(jax.tree.map(lambda x: x / 2, norms)), 2e-2)
    for part, norm in norms.items():
        size = np.sqrt(sum(np.square(np.asarray(x)).sum() for x in jax.tree.leaves(of(norms)[part])))
        assert 0 < size <= norm * (BATCH - 1) * (1 + 1e-5)


def test_parts_that_are_computed_together_are_materialized_and_explained() -> None:
    separate, common = (
        clipped_grad(loss, l2_clip_norm=norms, batch_argnums=(1, 2), method="book_keeping")
        for norms in (NORMS["some zero"], NORMS["four parts"])
    )
    words = "made of parameters with clip norms of their own"
    assert words in str(separate.explain(PARAMS, TOKENS, TARGETS))
    assert words not in str(common.explain(PARAMS, TOKENS, TARGETS))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"l2_clip_norm": {"embed": 1.0}}, ValueError, "which is not a prefix of"),
        ({"l2_clip_norm": {**NORMS["four parts"], "head": None}}, ValueError, "not a prefix|None for some"),
        ({"l2_clip_norm": {**NORMS["four parts"], "head": -1.0}}, ValueError, "must be at least 0, but got -1.0"),
        ({"l2_clip_norm": {**NORMS["four parts"], "head": "1"}}, TypeError, "must be a number, but got"),
        ({"l2_clip_norm": {}}, ValueError, "which has no number"),
        ({"l2_clip_norm": None}, TypeError, "must be a number, but got None"),
        ({"l2_clip_norm": 1.0, "automatic": 0}, ValueError, "automatic must be positive and finite, but got 0"),
        ({"l2_clip_norm": 1.0, "automatic": math.inf}, ValueError, "automatic must be positive and finite"),
        ({"l2_clip_norm": 1.0, "automatic": "AUTO-S"}, TypeError, "automatic must be a number"),
        ({"l2_clip_norm": math.inf, "automatic": 0.1}, ValueError, "must be at least 0 and finite"),
    ],
)
def test_errors(options: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        clipped_grad(loss, batch_argnums=(1, 2), **options)(PARAMS, TOKENS, TARGETS)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"automatic": 0.05}], ids=["clipped", "automatic"])
def test_private_steps(options: Any) -> None:
    norms = NORMS["four parts"]
    settings: Any = {"target_delta": 1e-5, "num_examples": BATCH, "expected_batch_size": BATCH, "num_steps": 3}

    def step(sigma: float) -> Any:
        given = {"l2_clip_norm": norms, "noise_multiplier": sigma, **settings, **options}
        dp = DPSGD(loss, optax.sgd(1.0), **given)
        state = dp.init(PARAMS, key=jax.random.key(0))
        (batch,) = [b for b, _ in zip(dp.batches((TOKENS, TARGETS), state), range(1), strict=False)]
        return dp, dp.step(state, batch)

    dp, (state, metrics) = step(0.0)
    of = clipped_grad(loss, l2_clip_norm=norms, batch_argnums=(1, 2), return_grad_norms=True, **options)
    sums, aux = of(PARAMS, TOKENS, TARGETS)
    assert_close(state.model, jax.tree.map(lambda p, g: p - g / BATCH, PARAMS, sums))
    exceeded = np.any([np.asarray(aux.grad_norms[name]) > norm for name, norm in norms.items()], axis=0)
    assert metrics["clipped"] == pytest.approx(exceeded.mean())
    total = math.sqrt(sum(x**2 for x in norms.values()))
    assert dp.ledger.l2_clip_norm == pytest.approx(total) == pytest.approx(of.sensitivity())
    # The noise of a step is σ times the sensitivity, and ε as for one norm.
    private, (noisy, _) = step(3.0)
    noise = jnp.concatenate(
        [x.ravel() for x in jax.tree.leaves(jax.tree.map(lambda x, y: BATCH * (x - y), noisy.model, state.model))]
    )
    assert float(noise.std()) == pytest.approx(3 * total, rel=0.15)
    one = DPSGD(loss, optax.sgd(1.0), l2_clip_norm=1.0, noise_multiplier=3.0, **settings)
    assert private.epsilon(3) == one.epsilon(3)


def test_private_steps_refuse_norms_of_zero() -> None:
    options: Any = {"noise_multiplier": 1.0, "target_delta": 1e-5, "num_examples": 9, "expected_batch_size": 3}
    with pytest.raises(ValueError, match="l2_clip_norm must be positive and finite, but got 0.0"):
        DPSGD(loss, optax.sgd(1.0), l2_clip_norm={**NORMS["four parts"], "head": 0.0}, num_steps=1, **options)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_users_with_different_numbers_of_records(method: Any) -> None:
    counts, width = np.array([1, 4, 2, 3]), 4
    is_record = np.arange(width) < counts[:, None]
    records, targets = normal(4, width, 5), normal(4, width)
    w = {"w": normal(5), "b": normal()}

    def of_user(w: Any, x: Any, y: Any, is_record: Any) -> Any:
        each = (x @ w["w"] + w["b"] - y) ** 2
        return jnp.where(is_record, each, 0).sum() / is_record.sum()

    of = clipped_grad(of_user, l2_clip_norm=0.5, batch_argnums=(1, 2, 3), keep_batch_dim=False, method=method)
    total: Any = jax.tree.map(jnp.zeros_like, w)
    for x, y, count in zip(records, targets, counts, strict=True):  # without padding
        gradient = jax.grad(lambda w, x, y: jnp.mean((x @ w["w"] + w["b"] - y) ** 2))(w, x[:count], y[:count])
        scale = jnp.minimum(1, 0.5 / optax.tree.norm(gradient))
        total = optax.tree.add_scale(total, scale, gradient)
    assert_close(of(w, records, targets, is_record), total)
    assert_close(of(w, jnp.where(is_record[..., None], records, 1e9), targets, is_record), total)
