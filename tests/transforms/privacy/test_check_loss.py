"""`check_loss`: means and sums are told from losses that couple the examples of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.transforms import check_loss

X = jnp.asarray(np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32))
Y = jnp.asarray(np.random.default_rng(1).integers(0, 4, 24))
W = jnp.asarray(np.random.default_rng(2).normal(size=(6, 4)).astype(np.float32))


def cross_entropies(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(x) @ w, y)


def normalized(x: jax.Array) -> jax.Array:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def distances(z: jax.Array) -> jax.Array:
    return jnp.sum((z[:, None] - z[None]) ** 2, -1)


def info_nce(w: Any, x: Any, y: Any) -> Any:
    a, b = normalized(x[:, :3] @ w[:3]), normalized(x[:, 3:] @ w[3:])
    return optax.softmax_cross_entropy_with_integer_labels(a @ b.T / 0.1, jnp.arange(len(x))).mean()


def triplets(w: Any, x: Any, y: Any) -> Any:
    """The hardest negative of each example, and the next example as its positive."""
    d = distances(x @ w)
    same = y[:, None] == y[None]
    return jnp.maximum(0, jnp.roll(d, 1, 1).diagonal() - jnp.where(same, 1e3, d).min(1) + 1).mean()


def batch_hard(w: Any, x: Any, y: Any) -> Any:
    d, same = distances(x @ w), y[:, None] == y[None]
    return jnp.maximum(0, jnp.where(same, d, 0).max(1) - jnp.where(same, 1e3, d).min(1) + 50).mean()


def batch_norm(w: Any, x: Any, y: Any) -> Any:
    return cross_entropies(w, (x - x.mean(0)) / (x.std(0) + 1e-3), y).mean()


def class_weights(w: Any, x: Any, y: Any) -> Any:
    weights = jnp.array([1.0, 2.0, 5.0, 0.3])[y]
    return (weights * cross_entropies(w, x, y)).sum() / weights.sum()


def ranking(w: Any, x: Any, y: Any) -> Any:
    """ListNet over the batch."""
    return -(jax.nn.softmax(y.astype(float)) * jax.nn.log_softmax((x @ w).sum(1))).sum()


def mmd(w: Any, x: Any, y: Any) -> Any:
    z, half = x @ w, len(x) // 2
    k = jnp.exp(-distances(z))
    return k[:half, :half].sum() + k[half:, half:].sum() - 2 * k[:half, half:].sum()


def barlow_twins(w: Any, x: Any, y: Any) -> Any:
    a, b = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in (x @ w, (x + 0.1) @ w))
    return jnp.sum((a.T @ b / len(x) - jnp.eye(4)) ** 2)


def token_mean(w: Any, x: Any, y: Any) -> Any:
    mask = jnp.arange(6) < 1 + (jnp.abs(x[:, :1]) * 4).astype(int)
    return ((x * w.sum(1)) ** 2 * mask).sum() / mask.sum()


def dice(w: Any, x: Any, y: Any) -> Any:
    p, t = jax.nn.sigmoid(x @ w), jax.nn.one_hot(y, 4)
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


def quantile(w: Any, x: Any, y: Any) -> Any:
    return jnp.quantile(cross_entropies(w, x, y), 0.9)


def discrimination(w: Any, x: Any, y: Any) -> Any:
    closeness = jnp.exp(-distances(x @ w)).sum(1, keepdims=True)
    return cross_entropies(w, x * closeness, y).mean()


def cvar(w: Any, x: Any, y: Any) -> Any:
    each = cross_entropies(w, x, y)
    return jnp.sort(each)[len(each) // 2 :].mean()


def variance(w: Any, x: Any, y: Any) -> Any:
    return cross_entropies(w, x, y).mean() + (x @ w).var()


def root_mean_square(w: Any, x: Any, y: Any) -> Any:
    return jnp.sqrt(jnp.mean((x @ w) ** 2))


def log_mean_exp(w: Any, x: Any, y: Any) -> Any:
    return jax.nn.logsumexp(cross_entropies(w, x, y)) - jnp.log(len(x))


COUPLED = [
    info_nce,
    triplets,
    batch_hard,
    batch_norm,
    class_weights,
    ranking,
    mmd,
    barlow_twins,
    token_mean,
    dice,
    quantile,
    discrimination,
    cvar,
    variance,
    root_mean_square,
    log_mean_exp,
]


@pytest.mark.parametrize("loss", COUPLED, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("size", [2, 5, 24])
def test_coupled_losses_are_found(loss: Callable[..., Any], size: int) -> None:
    found = check_loss(loss, W, X[:size], Y[:size], batch_argnums=(1, 2))
    assert (found.kind, found.examples) == ("neither", min(16, size))
    assert found.reason


def decayed(w: Any, x: Any, y: Any) -> Any:
    return cross_entropies(w, x, y).mean() + 0.01 * jnp.sum(w**2)


MEANS: dict[str, Callable[..., Any]] = {
    "cross-entropy": lambda w, x, y: cross_entropies(w, x, y).mean(),
    "with weight decay": decayed,
    "a mean over all numbers": lambda w, x, y: jnp.mean((x @ w) ** 2),
    "a mean for each sequence": lambda w, x, y: (
        (x * w.sum(1) * (x > 0)).sum(1) / jnp.maximum(1, (x > 0).sum(1))
    ).mean(),
    "large": lambda w, x, y: 1e6 * cross_entropies(w, x, y).mean() - 3e6,
    "by a loop": lambda w, x, y: jax.lax.map(lambda row: jnp.sum(jnp.sin(row @ w)), x).mean(),
    "in bfloat16": lambda w, x, y: cross_entropies(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16), y).mean(),
    "in float16": lambda w, x, y: cross_entropies(w.astype(jnp.float16), x.astype(jnp.float16), y).mean(),
    "with signs": lambda w, x, y: (x @ w).mean(),
}


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("size", [2, 3, 24])
def test_means_are_means(name: str, size: int) -> None:
    found = check_loss(MEANS[name], W, X[:size], Y[:size], batch_argnums=(1, 2))
    assert (found.kind, found.reason) == ("mean", "")
    assert found.from_mean < 0.05
    assert found.from_sum > 0.1


def test_sums_are_sums_but_not_with_a_term_of_their_own() -> None:
    total = lambda w, x, y: cross_entropies(w, x, y).sum()
    assert check_loss(total, W, X, Y, batch_argnums=(1, 2)).kind == "sum"
    fixed = check_loss(lambda w, x, y: total(w, x, y) / 7, W, X, Y, batch_argnums=(1, 2))
    assert fixed.kind == "sum"
    found = check_loss(lambda w, x, y: total(w, x, y) + jnp.sum(w**2), W, X, Y, batch_argnums=(1, 2))
    assert found.kind == "neither"
    assert found.reason == "it is a sum over the examples plus a term that does not depend on them"


class Net(nnx.Module):
    """A network with dropout and batch normalization."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.norm = nnx.Linear(6, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.linear(x)))


def of_model(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def test_modules_are_in_evaluation_mode_and_unchanged() -> None:
    model = Net(nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.state(model))
    found = check_loss(of_model, model, X, Y, batch_argnums=(1, 2))
    assert found.kind == "mean"
    assert check_loss(lambda x, y: of_model(model, x, y), X, Y, batch_argnums=(0, 1)).kind == "unknown"
    after = nnx.state(model)
    same = jax.tree.map(
        lambda a, b: (
            (jax.random.key_data(a) == jax.random.key_data(b)).all()
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
            else (a == b).all()
        ),
        before,
        after,
    )
    assert all(jax.tree.leaves(same))
    assert not model.dropout.deterministic


def test_batch_statistics_in_the_loss_are_found() -> None:
    def training(model: Any, x: Any, y: Any) -> Any:
        return of_model(nnx.view(model, use_running_average=False), x, y)

    assert check_loss(training, Net(nnx.Rngs(0)), X, Y, batch_argnums=(1, 2)).kind == "neither"


def test_equinox_modules_are_in_evaluation_mode() -> None:
    equinox = pytest.importorskip("equinox")
    model = equinox.nn.Sequential([equinox.nn.Linear(6, 4, key=jax.random.key(0)), equinox.nn.Dropout(0.5)])

    def loss(model: Any, x: Any, y: Any) -> Any:
        logits = jax.vmap(model)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    assert check_loss(loss, model, X, Y, batch_argnums=(1, 2)).kind == "mean"


def test_modules_and_methods_may_be_the_loss() -> None:
    class Loss(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(W)

        def __call__(self, x: Any, y: Any) -> Any:
            return cross_entropies(self.w[...], x, y).mean()

        def coupled(self, x: Any, y: Any) -> Any:
            return info_nce(self.w[...], x, y)

    assert check_loss(Loss(), X, Y, batch_argnums=(0, 1)).kind == "mean"
    assert check_loss(Loss().coupled, X, Y, batch_argnums=(0, 1)).kind == "neither"


def noisy(w: Any, x: Any, y: Any, key: Any) -> Any:
    return cross_entropies(w * jax.random.normal(key, w.shape), x, y).mean()


def fixed_noise(w: Any, x: Any, y: Any) -> Any:
    return cross_entropies(w, x + jax.random.normal(jax.random.key(0), x.shape), y).mean()


def test_random_losses_are_unknown() -> None:
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        found = check_loss(noisy, W, X, Y, key, batch_argnums=(1, 2), prng_argnum=3)
        assert (found.kind, found.reason) == ("unknown", "the loss depends on random numbers")
    found = check_loss(fixed_noise, W, X, Y, batch_argnums=(1, 2))
    assert (found.kind, found.reason) == ("unknown", "the loss draws random numbers")
    unused = check_loss(
        lambda w, x, y, key: decayed(w, x, y), W, X, Y, jax.random.key(0), batch_argnums=(1, 2), prng_argnum=3
    )
    assert unused.kind == "mean"


def test_what_cannot_be_told_is_unknown() -> None:
    options: Any = {"batch_argnums": (1, 2)}
    mean = MEANS["cross-entropy"]
    assert check_loss(mean, W, X[:1], Y[:1], **options).reason == "there are fewer than two examples to compare"
    assert check_loss(mean, W * jnp.nan, X, Y, **options).reason == "the loss of a batch is not finite"
    zero = check_loss(lambda w, x, y: 0 * mean(w, x, y), W, X, Y, **options)
    assert (zero.kind, zero.reason) == ("unknown", "all losses are zero")
    first = check_loss(lambda w, x, y: cross_entropies(w, x, y)[0], W, X, Y, **options)
    assert (first.kind, first.reason) == ("unknown", "the loss uses the first example of its batch alone")
    one = check_loss(lambda w, x, y: cross_entropies(w, x, y).reshape(()), W, X, Y, **options)
    assert (one.kind, one.reason) == ("unknown", "the loss raised TypeError for 16 examples")


def test_an_example_whose_loss_alone_is_not_finite_is_found() -> None:
    def standardized(w: Any, x: Any, y: Any) -> Any:
        return cross_entropies(w, (x - x.mean(0)) / x.std(0), y).mean()

    found = check_loss(standardized, W, X, Y, batch_argnums=(1, 2))
    assert (found.kind, found.reason) == (
        "neither",
        "the loss of an example alone is not finite, but that of a batch is",
    )


def test_padding_is_not_compared() -> None:
    x = X.at[2:].set(jnp.nan)
    padding = np.arange(24) >= 2
    options: Any = {"batch_argnums": (1, 2), "is_padding_example": padding}
    found = check_loss(MEANS["cross-entropy"], W, x, Y, **options)
    assert (found.kind, found.examples) == ("mean", 2)
    assert check_loss(info_nce, W, x, Y, **options).kind == "neither"


def test_batches_may_be_pytrees_keywords_and_numpy() -> None:
    def loss(w: Any, batch: Any, scale: float, *, y: Any) -> Any:
        return scale * cross_entropies(w, batch["x"][0], y).mean(), {"logits": batch["x"][0] @ w}

    batch = {"x": [np.asarray(X)]}
    assert check_loss(loss, np.asarray(W), batch, 2.0, y=np.asarray(Y), has_aux=True).kind == "mean"


def test_float64_is_compared_in_its_precision() -> None:
    with jax.enable_x64(True):
        args = np.asarray(W, np.float64), np.asarray(X, np.float64), np.asarray(Y)
        almost = lambda w, x, y: cross_entropies(w, x, y).mean() + 1e-9 * info_nce(w, x, y)
        assert check_loss(almost, *args, batch_argnums=(1, 2)).kind == "neither"
        assert check_loss(MEANS["cross-entropy"], *args, batch_argnums=(1, 2)).kind == "mean"


@pytest.mark.parametrize(
    ("loss", "args", "options", "error", "message"),
    [
        (3, (W, X), {}, TypeError, "^check_loss: loss must be"),
        (lambda w, x: x @ w, (W, X), {}, TypeError, "^check_loss: the loss must return one real scalar"),
        (lambda w, x: "loss", (W, X), {}, TypeError, "must return one real scalar, but it returned 'loss' of type str"),
        (decayed, (W, X, Y[:3]), {"batch_argnums": (1, 2)}, ValueError, "has 24 examples, but `y` has 3"),
        (decayed, (W, X, Y), {"batch_argnums": 7}, ValueError, "^check_loss: batch_argnums selects argument 7"),
        *(
            (
                decayed,
                (W, X, Y),
                {"batch_argnums": (1, 2), "prng_argnum": wrong},
                ValueError,
                "^check_loss: prng_argnum",
            )
            for wrong in (1, 3, -1, True)
        ),
        (decayed, (W, X, Y), {"is_padding_example": [True]}, ValueError, r"must have shape \(24,\), but got \(1,\)"),
    ],
)
def test_bad_arguments_are_refused(loss: Any, args: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        check_loss(loss, *args, **options)


def test_traced_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^check_loss: `w` is traced; call check_loss outside of jit"):
        jax.jit(lambda w: check_loss(decayed, w, X, Y, batch_argnums=(1, 2)))(W)


def test_a_refusal_has_no_numbers_of_the_data() -> None:
    text = check_loss(info_nce, W, X, Y, batch_argnums=(1, 2)).refusal("DPSGD.fit")
    assert text.startswith("DPSGD.fit: the loss of a batch is neither the mean nor the sum")
    assert not any(x.isdigit() for x in text)
