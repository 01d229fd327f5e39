"""Models and fixtures shared by the tests of ensembles."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Ensemble, Trainer
from plurax.transforms._core import axes


class Plain(nnx.Module):
    """Two dense layers, 4 to 3."""

    def __init__(self, rngs, width=5):
        self.first = nnx.Linear(4, width, rngs=rngs)
        self.second = nnx.Linear(width, 3, rngs=rngs)

    def __call__(self, x, scale=1.0, flip=False):
        y = self.second(nnx.tanh(self.first(x))) * scale
        return -y if flip else y


class Stateful(nnx.Module):
    """As `Plain`, with BatchNorm and dropout. (No bias before BatchNorm: its gradient would be rounding noise.)"""

    def __init__(self, rngs, rate=0.3):
        self.first = nnx.Linear(4, 6, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.second = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


class Convolutional(nnx.Module):
    """A convolution and a dense layer, for inputs (batch, 5, 4, 1)."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 2, (3, 2), rngs=rngs)
        self.dense = nnx.Linear(40, 3, rngs=rngs)

    def __call__(self, x):
        x = x.reshape(-1, 5, 4, 1)
        return self.dense(nnx.relu(self.conv(x)).reshape(len(x), -1))


@pytest.fixture(autouse=True)
def auto_goes_by_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off measuring: it would compile each step six times, and most tests check only results."""
    monkeypatch.setitem(Trainer.__init__.__kwdefaults__, "tune_seconds", 0)


@pytest.fixture
def counted_checks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that counts the axis checks which the given modules call, by name."""

    def of(*modules: Any) -> list[str]:
        checks: list[str] = []

        def counted(check: Callable[..., Any], *args: Any) -> Any:
            checks.append(check.__name__)
            return check(*args)

        for check in (axes.axes_per_argument, axes.mapped_size):
            for module in modules:
                monkeypatch.setattr(module, check.__name__, functools.partial(counted, check), raising=False)
        return checks

    return of


@pytest.fixture(scope="session")
def plain() -> type:
    return Plain


@pytest.fixture(scope="session")
def stateful() -> type:
    return Stateful


@pytest.fixture(scope="session")
def convolutional() -> type:
    return Convolutional


@pytest.fixture(scope="session")
def create() -> Callable[..., Ensemble]:
    """Return a cached `Ensemble.create`: ensembles are immutable, so tests can share them."""

    @functools.cache
    def created(make, size, seed=0):
        return Ensemble.create(make, size, seed=seed)

    return created


@pytest.fixture(scope="session")
def cross_entropy() -> Callable[..., Any]:
    def loss(model, x, y):
        logits = model(x)
        value = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return value, {"accuracy": (logits.argmax(axis=-1) == y).mean()}

    return loss


@pytest.fixture(scope="session")
def make_batches() -> Callable[..., list[Any]]:
    def make(count, *lead, features=4, batch=6):
        generator = np.random.default_rng(7)
        return [
            (
                generator.normal(size=(*lead, batch, features)).astype(np.float32),
                generator.integers(0, 3, (*lead, batch)).astype(np.int32),
            )
            for _ in range(count)
        ]

    return make


@pytest.fixture(scope="session")
def leaves() -> Callable[[Any], list[np.ndarray]]:
    """Return the arrays of a tree as NumPy arrays, keys as their data."""

    def of(tree):
        def plain(x):
            return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

        return [plain(x) for x in jax.tree.leaves(tree)]

    return of


@pytest.fixture(scope="session")
def assert_same(leaves) -> Callable[..., None]:
    """Assert equal structure, shapes and dtypes, and equal bits, or values within `tolerance`."""

    def check(a, b, tolerance=0.0):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(leaves(a), leaves(b), strict=True):
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            if tolerance:
                np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
            else:
                np.testing.assert_array_equal(x, y)

    return check


def test_assert_same_notices_a_difference(assert_same) -> None:
    assert_same([np.ones(2)], [np.ones(2)])
    with pytest.raises(AssertionError):
        assert_same([np.ones(2)], [np.nextafter(np.ones(2), 2)])
    with pytest.raises(AssertionError):
        assert_same([np.ones(2)], [np.full(2, 1.1)], tolerance=1e-3)
    with pytest.raises(AssertionError):
        assert_same([np.ones(2)], (np.ones(2),))
