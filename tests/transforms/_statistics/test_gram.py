"""`per_sample_gram`: Gram matrices, other batches, chunks, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from plurax.transforms import per_sample_grad, per_sample_gram

BATCH = 7


def parameters(dtype: Any = jnp.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"in": (5, 7), "bias": (7,), "table": (11, 7), "out": (7, 4)}
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}


def batch(size: int = BATCH, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    rng = np.random.default_rng(size)
    return jnp.asarray(rng.normal(size=(size, 3, 5)), dtype), jnp.asarray(rng.integers(0, 11, (size, 3)))


def loss(p: dict[str, Any], x: Any, rows: Any) -> Any:
    """Use a matrix at several positions, one at one position, and a table that is read and multiplied with."""
    hidden = jnp.tanh(x @ p["in"] + p["bias"]) + p["table"][rows]
    scores = jnp.sin(hidden @ p["table"].T).sum(-1)
    return jnp.mean((hidden.mean(-2) @ p["out"]) ** 2) + scores.mean()


def rows_of(p: Any, *batch: Any) -> Any:
    held = per_sample_grad(loss, batch_argnums=(1, 2))(p, *batch)
    return np.concatenate([np.float64(x).reshape(len(x), -1) for x in jax.tree.leaves(held)], axis=1)


def assert_gram(found: Any, one: Any, two: Any, tolerance: float = 1e-5) -> None:
    scale = np.linalg.norm(one, axis=1)[:, None] * np.linalg.norm(two, axis=1)
    assert found.shape == scale.shape
    np.testing.assert_array_less(np.abs(found - one @ two.T), tolerance * scale)


GRAM = per_sample_gram(loss, batch_argnums=(1, 2))


def test_equal_to_held_gradients() -> None:
    p, xy = parameters(), batch()
    rows = rows_of(p, *xy)
    assert_gram(GRAM(p, *xy), rows, rows)
    assert_gram(jax.jit(GRAM)(p, *xy), rows, rows)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4, 9])
def test_with_another_batch(size: int) -> None:
    p, xy, other = parameters(), batch(), batch(size)
    found = jax.jit(lambda p, xy, other: GRAM(p, *xy, other=other))(p, xy, other)
    assert_gram(found, rows_of(p, *xy), rows_of(p, *other))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"chunk_size": n} for n in (1, 3, 7, 20)] + [{"memory_budget": "60KiB"}])
def test_chunks_change_nothing(options: Any) -> None:
    p, xy, other = parameters(), batch(), batch(4)
    gram = per_sample_gram(loss, batch_argnums=(1, 2), **options)
    assert_gram(gram(p, *xy), rows_of(p, *xy), rows_of(p, *xy))
    assert_gram(gram(p, *xy, other=other), rows_of(p, *xy), rows_of(p, *other))


def test_a_budget_that_nothing_fits_into() -> None:
    with pytest.raises(ValueError, match="per_sample_gram: no chunk fits into memory_budget=1 B"):
        per_sample_gram(loss, batch_argnums=(1, 2), memory_budget=1)(parameters(), *batch())


@pytest.mark.slow
def test_an_empty_batch() -> None:
    p, xy, empty = parameters(), batch(), batch(0)
    assert GRAM(p, *empty).shape == (0, 0)
    assert GRAM(p, *xy, other=empty).shape == (BATCH, 0)
    assert GRAM(p, *empty, other=xy).shape == (0, BATCH)


def test_derivatives_and_maps_of_the_matrix() -> None:
    p, xy = parameters(), batch()

    def by_hand(p: Any) -> Any:
        held = per_sample_grad(loss, batch_argnums=(1, 2))(p, *xy)
        rows = jnp.concatenate([x.reshape(len(x), -1) for x in jax.tree.leaves(held)], axis=1)
        return rows @ rows.T

    weights = jnp.asarray(np.random.default_rng(3).normal(size=(BATCH, BATCH)), jnp.float32)
    of = lambda gram: jax.jit(jax.grad(lambda p: jnp.sum(weights * gram(p))))(p)
    found, expected = of(lambda p: GRAM(p, *xy)), of(by_hand)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-4, 1e-4 * np.abs(y).max()), found, expected)
    members = jax.tree.map(lambda x: jnp.stack([x, 2 * x, -x]), p)
    mapped = jax.jit(jax.vmap(GRAM, (0, None, None)))(members, *xy)
    for i in range(3):
        member = jax.tree.map(lambda x, i=i: x[i], members)
        rows = rows_of(member, *xy)
        assert_gram(mapped[i], rows, rows)


def test_a_module_and_several_arguments() -> None:
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)), jnp.float32)
    of = lambda model, scale, x: jnp.mean(jnp.tanh(model(x) * scale) ** 2)
    found = per_sample_gram(of, (0, 1), batch_argnums=2, per_leaf=True)(model, jnp.ones(3), x)
    held = per_sample_grad(of, (0, 1), batch_argnums=2)(model, jnp.ones(3), x)
    assert jax.tree.structure(found) == jax.tree.structure(held)
    for gram, leaf in zip(jax.tree.leaves(found), jax.tree.leaves(held), strict=True):
        rows = np.float64(leaf).reshape(5, -1)
        assert_gram(gram, rows, rows)


@pytest.mark.slow
def test_parameters_of_other_dtypes() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)), jnp.float32)
    of = lambda p, x: jnp.sum(jnp.abs(x @ p["w"]) ** 2) + jnp.sum(x * p["v"][p["i"]])
    p = {"w": jnp.ones((4, 2), jnp.complex64) * (1 + 2j), "v": jnp.ones(4), "i": jnp.arange(4)}
    held = per_sample_grad(of)(p, x)
    w, v = (np.asarray(held[name]).reshape(5, -1) for name in ("w", "v"))
    found = per_sample_gram(of, per_leaf=True)(p, x)
    np.testing.assert_allclose(found["w"], (w @ w.conj().T).real, 1e-5)
    np.testing.assert_allclose(found["v"], v @ v.T, 1e-5)
    assert found["i"] is None
    np.testing.assert_allclose(per_sample_gram(of)(p, x), found["w"] + found["v"], 1e-5)


def test_a_loss_that_jax_cannot_map() -> None:
    def of(p: Any, x: Any) -> Any:
        return jnp.sum(lax.ragged_dot(jnp.tanh(x), jnp.stack([p, jnp.cos(p)]), jnp.array([1, 2], jnp.int32)) ** 2)

    rng = np.random.default_rng(0)
    p, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 3), (4, 3, 3)))
    rows = np.stack([np.asarray(jax.grad(of)(p, row)).ravel() for row in x])
    gram = per_sample_gram(of, keep_batch_dim=False)
    assert_gram(gram(p, x), rows, rows)
    report = gram.explain(p, x)
    assert report.method == "vmap"
    assert 'method="book_keeping" failed' in str(report)


def test_no_array_of_batch_and_parameters() -> None:
    width = 64
    of = lambda p, x: jnp.mean(jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)
    p = {name: jnp.ones((width, width)) for name in "ab"}
    for shape in ((BATCH, width), (BATCH, 40, width)):  # one position, and too many for both factors to be smaller
        for call in (lambda x: per_sample_gram(of)(p, x), lambda x: per_sample_gram(of)(p, x, other=(x[:3],))):
            text = jax.jit(call).lower(jnp.ones(shape)).compile().as_text()
            assert (f"[{BATCH},{width},{width}]" in text) == (len(shape) > 2)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_on_a_mesh(kind: Any) -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(kind,))
    p, xy = parameters(), batch()
    spread = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for x in xy]
    rows = rows_of(p, *xy)
    found = jax.jit(GRAM)(p, *spread)
    assert_gram(found, rows, rows)
    if kind is AxisType.Explicit:
        assert jax.typeof(found).sharding.spec == PartitionSpec("data", None)


def test_a_loss_without_its_parameters() -> None:
    x = jnp.ones((3, 2))
    for of in (lambda p, x: jnp.sum(x), lambda p, x: jnp.sum(x * lax.stop_gradient(p))):
        np.testing.assert_array_equal(per_sample_gram(of)(jnp.ones(2), x), np.zeros((3, 3)))


def test_strict_settings_of_promotion() -> None:
    p, xy = parameters(), batch()
    p["table"] = p["table"].astype(jnp.bfloat16)

    def of(p: Any, x: Any, rows: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ p["in"]) ** 2) + jnp.mean(p["table"][rows].astype(jnp.float32) ** 2)

    gram = per_sample_gram(of, batch_argnums=(1, 2))
    expected = gram(p, *xy)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        np.testing.assert_array_equal(gram(p, *xy), expected)
        with pytest.raises(Exception, match="promotion"):
            per_sample_gram(lambda p, x, rows: of(p, x, rows) + p["table"].sum() * x.sum(), batch_argnums=(1, 2))(
                p, *xy
            )


def test_the_report() -> None:
    text = str(GRAM.explain(parameters(), *batch()))
    assert "method: book_keeping, 7 examples at a time" in text
    assert "p['out']: outer product, at dot_general" in text
    assert "p['table']: row-sparse, at gather" in text


def test_what_is_refused() -> None:
    p, (x, rows) = parameters(), batch()
    with pytest.raises(
        TypeError, match=r"per_sample_gram: other must be a tuple with 2 arguments, as batch_argnums names"
    ):
        GRAM(p, x, rows, other=x)
    with pytest.raises(
        ValueError, match=r"a sample of the other batch is float32\[2, 5\], int32\[3\], but of the batch"
    ):
        GRAM(p, x, rows, other=(x[:, :2], rows))
    with pytest.raises(ValueError, match="other has no keyword arguments"):
        per_sample_gram(lambda p, x, rows: loss(p, x, rows), batch_argnums=1)(p, x, rows=rows, other=(x,))
    with pytest.raises(ValueError, match="chunk_size and memory_budget both set the chunk"):
        per_sample_gram(loss, chunk_size=2, memory_budget="1MiB")
    with pytest.raises(TypeError, match="per_sample_gram: fun must return"):
        per_sample_gram(lambda p, x: x @ p)(jnp.ones((5, 2)), x)
    with pytest.raises(ValueError, match=r"per_sample_gram: argument 1 is in argnums and in batch_argnums"):
        per_sample_gram(loss, argnums=1)
