"""Every statistic of whole models, against gradients that are held."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plurax.transforms import (
    gradient_noise_scale,
    per_sample_grad,
    per_sample_gram,
    per_sample_jvp,
    per_sample_moments,
    per_sample_projection,
)

from ..privacy._per_example.test_models import BATCH, CASES, QUICK, build

# What is computed from the parts that every model has is tried for some.
DERIVED = CASES[::5]
TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 3e-2}
DIM = 3


def flat(tree: Any) -> Any:
    """Return the gradients of each sample as the rows of a matrix."""
    return jnp.concatenate([x.reshape(len(x), -1) for x in jax.tree.leaves(tree)], axis=1)


def assert_gram(found: Any, gradients: Any, others: Any, tolerance: float) -> None:
    """Assert inner products, relative to the norms of both gradients."""
    one, two = np.float64(gradients), np.float64(others)
    scale = np.linalg.norm(one, axis=1)[:, None] * np.linalg.norm(two, axis=1)
    np.testing.assert_array_less(np.abs(found - one @ two.T) / np.maximum(scale, 1e-30), tolerance)


def test_the_helper_detects_differences() -> None:
    rows = np.array([[3.0, 4.0], [0.0, 1.0]])
    assert_gram(rows @ rows.T + np.array([[0, 0], [0, 0.9e-5]]), rows, rows, 1e-5)
    with pytest.raises(AssertionError, match="ordered"):
        assert_gram(rows @ rows.T + np.array([[0, 0], [0, 1.1e-5]]), rows, rows, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_all_statistics(name: str, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        with_aux, args = build(name, dtype)
        loss = lambda *args: with_aux(*args)[0]
        model, x, y, *frozen = args
        options: Any = {"batch_argnums": (1, 2)}
        key = jax.random.key(0)

        def every(model: Any, x: Any, y: Any, *frozen: Any) -> Any:
            args = (model, x, y, *frozen)
            held = per_sample_grad(loss, **options)(*args)
            tangent = jax.tree.map(lambda x: jnp.cos(jnp.arange(x[0].size)).reshape(x[0].shape).astype(x.dtype), held)
            gram: Any = per_sample_gram(loss, **options)
            results = {
                "held": held,
                "gram": gram(*args),
                "moments": per_sample_moments(loss, **options)(*args),
                "along": per_sample_jvp(loss, **options)(model, tangent, x, y, *frozen),
                "tangent": tangent,
                "projected": per_sample_projection(loss, DIM, **options)(key, *args),
            }
            if (name, dtype) not in DERIVED:
                return results
            return results | {
                "other": gram(*args, other=(x[1:4], y[1:4])),
                "chunks": per_sample_gram(loss, chunk_size=2, **options)(*args),
                "per leaf": per_sample_gram(loss, per_leaf=True, **options)(*args),
                "moments in chunks": per_sample_moments(loss, chunk_size=2, **options)(*args),
                "noise": gradient_noise_scale(loss, **options)(*args),
            }

        found = jax.jit(every, compiler_options=QUICK)(model, x, y, *frozen)
        tolerance = TOLERANCES[dtype]
        rows: Any = np.float64(flat(found["held"]))
        assert_gram(found["gram"], rows, rows, tolerance)
        if dtype != "bfloat16":
            assert np.linalg.eigvalsh(np.float64(found["gram"])).min() > -tolerance * np.trace(found["gram"])
        held = jax.tree.leaves(found["held"])
        for moments in (found[way] for way in ("moments", "moments in chunks") if way in found):
            for mean, second, variance, leaf in zip(*map(jax.tree.leaves, (*moments, held)), strict=True):
                each = np.float64(leaf)
                size = np.square(each).mean(0)
                scale = size + size.max() + 1e-30
                assert (np.abs(mean - each.mean(0)) <= tolerance * np.sqrt(scale)).all()
                assert (np.abs(second - size) <= tolerance * scale).all()
                assert (np.abs(variance - each.var(0, ddof=1)) <= 2 * tolerance * scale).all()
        if (name, dtype) in DERIVED:
            assert_gram(found["other"], rows, rows[1:4], tolerance)
            assert_gram(found["chunks"], rows, rows, tolerance)
            assert jax.tree.structure(found["per leaf"]) == jax.tree.structure(found["held"])
            for gram, leaf in zip(jax.tree.leaves(found["per leaf"]), held, strict=True):
                assert_gram(gram, np.float64(flat(leaf)), np.float64(flat(leaf)), tolerance)
            noise = rows.var(0, ddof=1).sum()
            signal = np.square(rows.mean(0)).sum() - noise / BATCH
            squares = np.square(rows).sum(1).mean()
            assert abs(found["noise"].noise - noise) <= 2 * tolerance * squares
            assert abs(found["noise"].signal - signal) <= 2 * tolerance * squares
            np.testing.assert_allclose(found["noise"].scale, found["noise"].noise / found["noise"].signal, rtol=1e-5)
        tangent = np.concatenate([np.float64(x).ravel() for x in jax.tree.leaves(found["tangent"])])
        assert_gram(found["along"][:, None], rows, tangent[None], tolerance)
        # The same directions, one sample at a time, from the gradient alone.
        linear = lambda p, g: sum(jnp.vdot(a, b) for a, b in zip(p, g, strict=True))
        project = per_sample_projection(linear, DIM, keep_batch_dim=False)
        projected = project(key, [jnp.zeros_like(x[0]) for x in held], held)
        size = np.abs(rows).sum(1).max()
        assert np.abs(found["projected"] - np.float64(projected)).max() <= tolerance * size
