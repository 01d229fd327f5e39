"""Caching compiled programs, as in MindSpore's tutorials."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.transforms import grad
from plurax.transforms.program import aot, enable_compile_cache

RNG = np.random.default_rng(0)
X, Y = (RNG.normal(scale=0.1, size=(3, 5)).astype(np.float32) for _ in range(2))
IMAGES, LABELS = RNG.normal(size=(4, 10, 10, 1)).astype(np.float32), np.arange(4) % 3


class Traced:
    """Count how often functions are traced."""

    def __init__(self) -> None:
        self.times = 0

    def loop(self, x: Any, y: Any) -> Any:
        """The tutorial's function: a Python loop of two hundred steps, unrolled into one long program."""
        self.times += 1
        out = x
        for _ in range(200):
            out = x + x * y + out
        return out

    def loss(self, model: Any, images: Any, labels: Any) -> Any:
        self.times += 1
        return -jnp.take_along_axis(jax.nn.log_softmax(model(images)), labels[:, None], 1).mean()


def cnn() -> nnx.Module:
    layers = nnx.Conv(1, 4, (3, 3), rngs=nnx.Rngs(0)), nnx.relu, lambda x: x.reshape(len(x), -1)
    return nnx.Sequential(*layers, nnx.Linear(400, 3, rngs=nnx.Rngs(1)))


@pytest.mark.parametrize("key", ["1", None])
def test_a_loop_of_200_steps_is_compiled_once(key, tmp_path):
    first, second = Traced(), Traced()
    results = [aot(traced.loop, tmp_path, key=key)(X, Y) for traced in (first, second)]
    assert (first.times, second.times) == (1, 0 if key else 1)
    np.testing.assert_array_equal(*results)
    np.testing.assert_allclose(results[0], X + 200 * (X + X * Y), rtol=1e-4)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_gradient_of_a_cnn_is_compiled_once_and_follows_the_parameters(tmp_path):
    traced, model = Traced(), cnn()
    loss = traced.loss
    wanted = jax.tree.leaves(nnx.grad(loss)(model, IMAGES, LABELS))
    traces = traced.times
    for _ in range(2):
        got = jax.tree.leaves(aot(grad(loss), tmp_path, key="1")(model, IMAGES, LABELS))
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert traced.times - traces == 1
    jax.tree.map(lambda param: param.set_value(0.0 * param[...]), nnx.variables(model, nnx.Param), is_leaf=is_variable)
    bias = aot(grad(loss), tmp_path, key="1")(model, IMAGES, LABELS)["layers"][3]["bias"]
    np.testing.assert_allclose(bias[...], [1 / 3 - 2 / 4, 1 / 3 - 1 / 4, 1 / 3 - 1 / 4], rtol=1e-5)
    assert traced.times - traces == 2  # the second call of a loaded program checks it


def is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def test_jaxs_cache_is_used_and_its_hits_are_reported(tmp_path):
    with enable_compile_cache(tmp_path) as cache:
        results = [jax.jit(Traced().loop)(X, Y) for _ in range(2)]
    assert (cache.hits, cache.misses) == (1, 1)
    np.testing.assert_array_equal(*results)
