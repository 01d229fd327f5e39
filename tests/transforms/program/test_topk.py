"""The mean of the largest values, against a sorted list."""

import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plurax.transforms.program import masked_topk_mean
from plurax.transforms.program._topk import _floor_of


def of_list(x: Any, mask: Any, fraction: float) -> float:
    chosen = sorted((float(a) for a, b in zip(np.ravel(x), np.ravel(mask), strict=True) if b), reverse=True)
    count = max(math.floor(Fraction(str(fraction)) * len(chosen)), 1)
    return float(np.mean(chosen[:count])) if chosen else 0.0


@pytest.mark.slow
@pytest.mark.hypothesis
@given(
    st.lists(st.tuples(st.sampled_from([-2.0, -0.5, 0.0, 1.0, 1.5, 3.0]), st.booleans()), max_size=12),
    st.sampled_from([0.1, 0.29, 0.3, 0.5, 0.7, 0.9, 1, 1.0, 0.123456789]),
)
def test_it_equals_a_sorted_list_including_ties(values: Any, fraction: float) -> None:
    x, mask = (np.array([pair[i] for pair in values], (np.float32, bool)[i]) for i in (0, 1))
    np.testing.assert_allclose(masked_topk_mean(x, mask, fraction), of_list(x, mask, fraction), rtol=1e-6, atol=1e-6)


def test_ties_at_the_threshold_count_exactly() -> None:
    x = jnp.array([5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert float(masked_topk_mean(x, jnp.ones(10, bool), 0.2)) == 3.0  # a threshold would include all: 1.4


@pytest.mark.parametrize("shape", [(7,), (2, 5), (), (0,), (3, 1, 2)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_shapes_and_dtypes(shape: tuple[int, ...], dtype: Any) -> None:
    x = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    mask = jax.random.bernoulli(jax.random.key(1), 0.8, shape)
    found = jax.jit(masked_topk_mean, static_argnums=2)(x, mask, 0.5)
    assert (found.shape, found.dtype) == ((), dtype)
    np.testing.assert_allclose(float(found), of_list(x, mask, 0.5), rtol=2 * float(jnp.finfo(dtype).eps))


def test_arrays_of_numpy_are_read_as_jax_reads_them() -> None:
    for x, expected in (np.arange(5.0), 3.5), (np.zeros(0), 0.0):
        found = masked_topk_mean(x, np.ones(x.shape, bool), 0.5)
        assert (float(found), found.dtype) == (expected, jnp.float32)


def test_the_number_is_exact_for_every_count() -> None:
    counts = np.arange(0, 10_001)
    for text in ("0.29", "0.7", "0.1", "1", "0.123456789012"):
        fraction = Fraction(text)
        expected = [math.floor(fraction * int(n)) for n in counts]
        assert _floor_of(fraction, jnp.asarray(counts, jnp.int32), 10_000).tolist() == expected
    # Larger than any array of a test: 0.7 of 2e9 overflows unless the product is split.
    assert int(_floor_of(Fraction("0.7"), jnp.int32(2_000_000_009), 2**31 - 1)) == 1_400_000_006


def test_gradients_go_to_the_selected_values() -> None:
    x, mask = jnp.array([1.0, 5.0, 3.0, 9.0, 3.0]), jnp.array([True, True, True, False, True])
    slope = jax.grad(masked_topk_mean)(x, mask, 0.5)
    assert slope.tolist() == [0.0, 0.5, 0.5, 0.0, 0.0]
    np.testing.assert_allclose(jax.vmap(lambda x: masked_topk_mean(x, mask, 0.5))(jnp.stack([x, -x])), [4.0, -2.0])


def test_unselected_values_may_be_anything() -> None:
    x, mask = jnp.array([jnp.nan, 2.0, jnp.inf, 1.0]), jnp.array([False, True, False, True])
    value, slope = jax.value_and_grad(masked_topk_mean)(x, mask, 0.5)
    assert (float(value), slope.tolist()) == (2.0, [0.0, 1.0, 0.0, 0.0])
    assert jnp.isnan(masked_topk_mean(x, ~mask, 0.5))
    assert jnp.isnan(masked_topk_mean(jnp.array([jnp.nan, 2.0]), jnp.ones(2, bool), 0.5))
    for values in ([jnp.inf, jnp.nan], [jnp.nan, jnp.inf]):
        assert jnp.isnan(masked_topk_mean(jnp.array(values), jnp.ones(2, bool), 0.5))
    assert float(masked_topk_mean(jnp.array([-jnp.inf, 2.0]), jnp.ones(2, bool), 0.5)) == 2.0


def test_nothing_selected_is_zero_with_a_gradient_of_zero() -> None:
    value, slope = jax.value_and_grad(masked_topk_mean)(jnp.ones(3), jnp.zeros(3, bool), 0.7)
    assert (float(value), slope.tolist()) == (0.0, [0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0], jnp.ones(1, bool), 0.5), TypeError, r"x must be an array of real floating point, but got \[1.0\]"),
        ((jnp.ones(3, int), jnp.ones(3, bool), 0.5), TypeError, "x must be an array of real .* dtype int32"),
        ((jnp.ones(3, complex), jnp.ones(3, bool), 0.5), TypeError, "x must be an array of real .* dtype complex64"),
        ((jnp.ones(3), jnp.ones(3), 0.5), TypeError, "mask must be an array of booleans, but got .* float32"),
        ((jnp.ones(3), [True], 0.5), TypeError, "mask must be an array of booleans"),
        ((jnp.ones(3), jnp.ones((3, 1), bool), 0.5), ValueError, r"x has shape \(3,\), but mask has \(3, 1\)"),
        ((jnp.ones(3), jnp.ones(3, bool), "0.5"), TypeError, "fraction must be a number, but got '0.5'"),
        ((jnp.ones(3), jnp.ones(3, bool), True), TypeError, "fraction must be a number, but got True"),
        ((jnp.ones(3), jnp.ones(3, bool), 0.0), ValueError, "fraction must be above 0 and at most 1, but got 0.0"),
        ((jnp.ones(3), jnp.ones(3, bool), 1.1), ValueError, "fraction must be above 0 and at most 1, but got 1.1"),
        ((jnp.ones(3), jnp.ones(3, bool), float("nan")), ValueError, "fraction must be above 0 and at most 1, but got"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^masked_topk_mean: {message}"):
        masked_topk_mean(*arguments)
