"""The noise equals jax-privacy's bit for bit, and has the distribution that the accountant assumes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_privacy.matrix_factorization import toeplitz
from scipy import stats

from plurax.transforms.privacy._dpsgd import noise as _noise
from plurax.transforms.privacy._dpsgd.accounting import Ledger
from plurax.transforms.privacy._dpsgd.noise import add_noise, privatizer

pytestmark = pytest.mark.smoke

SHAPES = {"kernel": (7, 5), "bias": (5,), "scale": (), "none": (0, 3), "one": (1, 1)}


def ledger(noise_multiplier: float = 1.5, clip: float = 2.0, strategy: tuple[float, ...] = (1.0,)) -> Ledger:
    return Ledger(noise_multiplier, 0.1, clip, 10.0, strategy)


def sums(dtype=jnp.float32):
    return {name: jnp.full(shape, 3.0, dtype) for name, shape in SHAPES.items()}


def noises(of: Ledger, like, steps: int, seed: int = 0):
    """Return the noise of each step, stacked."""
    zeros = jax.tree.map(jnp.zeros_like, like)

    def step(state, _):
        noisy, state = add_noise(of, zeros, state)
        return state, noisy

    return jax.lax.scan(step, privatizer(of, jax.random.key(seed)).init(zeros), length=steps)[1]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [(1.0,), (1.0, 0.5, 0.25)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float64])
def test_noise_is_that_of_jax_privacy(strategy, dtype):
    with jax.enable_x64(dtype == jnp.float64):
        of = ledger(strategy=strategy)
        by_hand = privatizer(of, jax.random.key(3))
        step = jax.jit(lambda *s: (add_noise(of, sums(dtype), s[0]), by_hand.update(sums(dtype), s[1])))
        state = expected_state = by_hand.init(sums(dtype))
        for _ in range(3):
            (noisy, state), (expected, expected_state) = step(state, expected_state)
            for name in SHAPES:
                assert noisy[name].dtype == dtype
                found, wanted = (np.asarray(x[name], float) for x in (noisy, expected))
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
        assert state[0].dtype == expected_state[0].dtype
        np.testing.assert_array_equal(*map(jax.random.key_data, (state[0], expected_state[0])))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 1, 4), (1000,)])
@pytest.mark.parametrize("partitionable", [True, False])
def test_bits_are_those_of_jax(shape, partitionable):
    @jax.jit
    def of_each_width(key):
        words = jax.random.key_data(key)
        return [
            (_noise._random_bits(words, width, shape), jax.random.bits(key, shape, f"uint{width}"))
            for width in (8, 16, 32)
        ]

    with jax.threefry_partitionable(partitionable):
        for found, expected in of_each_width(jax.random.key(7)):
            np.testing.assert_array_equal(found, expected)


def test_bits_of_many_keys_are_those_of_each():
    keys = jax.random.split(jax.random.key(7), 4)
    found = jax.vmap(lambda key: _noise._random_bits(key, 32, (5,)))(jax.random.key_data(keys))
    np.testing.assert_array_equal(found, jax.vmap(lambda key: jax.random.bits(key, (5,)))(keys))


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_keys_are_left_as_they_are(impl):
    by_hand = privatizer(ledger(), jax.random.key(3, impl=impl))
    both = jax.jit(lambda state: (add_noise(ledger(), sums(), state), by_hand.update(sums(), state)[0]))
    (noisy, state), expected = both(by_hand.init(sums()))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), noisy, expected)
    assert jax.random.key_impl(state[0]) == impl


def test_noise_is_gaussian_with_the_stated_deviation():
    """The false alarm probability is 2e-6, half for each of the two statistics."""
    of = ledger(noise_multiplier=1.5, clip=2.0)
    drawn = np.asarray(noises(of, jnp.zeros((50, 40)), 100), float).ravel() / 3.0
    assert stats.kstest(drawn, "norm").pvalue > 1e-6
    low, high = stats.chi2(drawn.size).ppf([5e-7, 1 - 5e-7]) / drawn.size
    assert low < np.mean(drawn**2) < high
    # The bounds are within 0.8 % of one, so that a deviation off by 1 % is detected.
    assert not low < np.mean((1.01 * drawn) ** 2) < high


def test_leaves_steps_and_keys_have_independent_noise():
    """Correlations of 2,000 pairs exceed 0.13 with probability 1e-8; there are six."""
    like = {"a": jnp.zeros(2000), "b": jnp.zeros(2000)}
    first, second = (noises(ledger(), like, 2, seed) for seed in (0, 1))
    drawn = [first["a"][0], first["b"][0], first["a"][1], second["a"][0]]
    correlations = np.corrcoef(np.stack(drawn))[np.triu_indices(4, 1)]
    assert np.abs(correlations).max() < 0.13


def test_noise_of_a_strategy_has_the_covariance_of_its_inverse():
    """C times the noise is independent, scaled by the norm of a column of C: a closed form without chance."""
    strategy, steps = (1.0, 0.5, 0.25), 6
    of = ledger(strategy=strategy)
    correlated = np.asarray(noises(of, jnp.zeros(4), steps), float)
    matrix = np.asarray(toeplitz.materialize_lower_triangular(jnp.asarray(strategy), steps), float)
    keys, key = [], jax.random.key(0)
    for _ in range(steps):
        key, sub = jax.random.split(key)
        keys.append(sub)
    scale = of.noise_multiplier * of.l2_clip_norm * np.linalg.norm(strategy)
    independent = [jax.random.normal(jax.random.split(key, 1)[0], (4,)) * scale for key in keys]
    np.testing.assert_allclose(matrix @ correlated, independent, atol=1e-4)


def test_noise_is_added_once_for_every_key():
    """The loop around the noise reads its iteration count from a word of the key, which must make no difference."""

    @jax.jit
    def both(words):
        by_hand = privatizer(ledger(), jax.random.wrap_key_data(words))
        state = by_hand.init(sums())
        return add_noise(ledger(), sums(), state)[0]["kernel"], by_hand.update(sums(), state)[0]["kernel"]

    for word in (0, 1, 2**31 - 1, 2**31, 2**32 - 1):
        noisy, expected = both(np.array([word, 7], np.uint32))
        np.testing.assert_allclose(noisy, expected, rtol=1e-5, atol=1e-5, err_msg=str(word))


def test_no_noise_leaves_the_sums():
    of = ledger(noise_multiplier=0.0)
    state = privatizer(of, jax.random.key(0)).init(sums())
    noisy, after = add_noise(of, sums(), state)
    jax.tree.map(np.testing.assert_array_equal, noisy, sums())
    assert after is state
