"""Batches are Poisson-sampled, padded without data of any example, and repeat after a resumption."""

from itertools import combinations, islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from plurax.transforms.privacy import Batch
from plurax.transforms.privacy._dpsgd.accounting import Ledger
from plurax.transforms.privacy._dpsgd.sampling import SampledBatches, padded_sizes

N = 30


def batches(data=None, *, expected=6.0, steps=50, seed=(1, 2), start=0, sizes=None, bands=1, n=N):
    of = Ledger(1.0, expected * bands / n, 1.0, expected, (1.0,) * bands)
    return SampledBatches(np.arange(1, n + 1) if data is None else data, of, n, steps, seed, start, sizes)


def sizes_of(n: int, expected: float, steps: int = 1000) -> tuple[int, ...]:
    return padded_sizes(n, Ledger(1.0, expected / n, 1.0, expected), 1, steps)


def drawn(batch: Batch) -> np.ndarray:
    """Return the indices of the examples; the data hold the indices plus one."""
    return np.asarray(batch.arguments[0])[~batch.is_padding_example] - 1


def test_each_example_is_sampled_independently():
    """The false alarm probability is below 1e-5: 30 rates, 435 pairs and one distribution of sizes at 1e-8 each."""
    steps = 4000
    member = np.zeros((steps, N))
    for row, batch in zip(member, batches(steps=steps), strict=True):
        numbers = drawn(batch)
        assert len(set(numbers)) == len(numbers)
        row[numbers] = 1
    low, high = stats.binom(steps, 0.2).ppf([5e-9, 1 - 5e-9])
    assert ((low < member.sum(0)) & (member.sum(0) < high)).all()
    low, high = stats.binom(steps, 0.04).ppf([5e-9, 1 - 5e-9])
    for i, j in combinations(range(N), 2):
        assert low < (member[:, i] * member[:, j]).sum() < high
    sizes = np.bincount(member.sum(1).astype(int), minlength=N + 1)
    expected = stats.binom(N, 0.2).pmf(np.arange(N + 1)) * steps
    groups = np.clip(np.arange(N + 1), 1, 12)  # so that each group has an expected count
    found, wanted = (np.bincount(groups, weights=x)[1:] for x in (sizes, expected))
    assert stats.chisquare(found, wanted * found.sum() / wanted.sum()).pvalue > 1e-8


def test_with_bands_an_example_is_eligible_once_per_cycle():
    turns: list[set[int]] = [set() for _ in range(N)]
    for i, batch in enumerate(batches(bands=3, expected=4.0, steps=60)):
        for number in drawn(batch):
            turns[number].add(i % 3)
    assert all(len(turn) == 1 for turn in turns)
    assert len({min(turn) for turn in turns}) == 3


def test_batches_from_a_later_step_equal_those_of_the_whole_run():
    whole = list(batches())
    for start in (0, 1, 17, 50):
        rest = list(batches(start=start))
        assert len(rest) == 50 - start
        assert [int(batch.step) for batch in rest] == list(range(start, 50))
        for one, other in zip(rest, whole[start:], strict=True):
            jax.tree.map(np.testing.assert_array_equal, one, other)
    assert [drawn(batch).tolist() for batch in whole] != [drawn(batch).tolist() for batch in batches(seed=(1, 3))]


def test_batches_end_after_the_run():
    found = batches(steps=5)
    assert len(found) == 5
    assert sum(1 for _ in islice(found, 3)) == 3
    assert len(found) == 2
    assert len(list(found)) == 2
    assert list(found) == []
    assert list(batches(steps=5, start=9)) == []


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8, bool, jnp.bfloat16])
def test_padding_contains_no_example(as_array, dtype):
    data = {"x": as_array(np.ones((N, 2, 1)), dtype), "y": as_array(np.arange(1, N + 1))}
    for batch in batches((data, as_array(np.full(N, 7)))):
        (found, more), padding = batch.arguments, batch.is_padding_example
        size = len(padding)
        assert found["x"].shape == (size, 2, 1)
        assert found["x"].dtype == dtype
        assert not np.asarray(found["x"])[padding].any()
        assert np.asarray(found["x"])[~padding].all()
        assert (np.asarray(more) == np.where(padding, 0, 7)).all()
        assert isinstance(found["y"], type(data["y"]))


def test_batches_have_a_few_sizes():
    seen = {len(batch.is_padding_example) for batch in batches(steps=500)}
    assert seen <= set(sizes_of(N, 6.0))
    assert len(sizes_of(60_000, 256)) == 4
    assert sizes_of(60_000, 256, 20) == sizes_of(60_000, 256)[2:]  # a short run compiles less


@pytest.mark.parametrize(("n", "expected"), [(60_000, 256), (1437, 64), (30, 6.0), (10**6, 4096), (7, 7)])
def test_sizes_hold_nearly_every_batch_and_little_else(n, expected):
    sizes = sizes_of(n, expected)
    assert sizes[-1] <= n
    count = stats.binom(n, expected / n)
    assert sizes[-1] == n or count.sf(sizes[-1]) < 1e-6
    support = np.arange(sizes[-1] + 1)
    padded = np.asarray(sizes)[np.searchsorted(sizes, support)]
    waste = ((padded - support) * count.pmf(support)).sum()
    assert waste < max(1.0, 1.5 * count.std() + 4)


def test_a_batch_beyond_the_sizes_is_not_truncated():
    for batch in batches(sizes=(3,), steps=50):
        size = len(batch.is_padding_example)
        assert size % 3 == 0
        assert size - 3 < max(1, len(drawn(batch))) <= size
    assert {len(batch.is_padding_example) for batch in batches(sizes=[30, 8])} <= {8, 30}


def test_a_batch_without_examples_is_all_padding():
    empty = [batch for batch in batches(expected=0.3, steps=20) if batch.is_padding_example.all()]
    assert empty
    assert not any(batch.arguments[0].any() for batch in empty)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ((), ValueError, "data has no arrays, so there are no examples"),
        ((jax.random.split(jax.random.key(0), N),), TypeError, r"`data\[0\]` holds random keys; pass arrays"),
        (([1, 2, 3],), TypeError, r"`data\[0\]\[0\]` is 1 of type int, not an array with the examples along axis 0"),
        ((np.float32(1.0),), TypeError, r"`data\[0\]` is an array of shape \(\) and dtype float32, not an array with"),
        (
            np.array(["a"] * N),
            TypeError,
            r"`data` is an array of shape \(30,\) and dtype <U1, not a number",
        ),
        (
            {"x": np.ones((29, 2))},
            ValueError,
            "data has 29 examples, but num_examples=30; pass all exam",
        ),
        (
            [(np.ones((5, 2)), np.ones(5))] * 6,
            ValueError,
            "data has 5 examples, but num_examples=30; pass all examples",
        ),
        ((np.ones((N, 2)), np.ones(7)), ValueError, r"`data\[0\]` has 30 examples, but `data\[1\]` has 7; make them"),
        (
            iter([np.ones((N, 2))]),
            TypeError,
            r"data must be all examples, as arrays such as \(x, y\), .* type list_",
        ),
        ("rows", TypeError, "data must be all examples, .*, since DPSGD samples the batches itself, but got 'rows'"),
    ],
)
def test_data_that_do_not_fit_are_refused(data, error, message):
    with pytest.raises(error, match=f"^DPSGD.batches: {message}"):
        batches(data)


def test_sizes_can_be_computed_in_microbatches():
    for microbatch in (7, 16):
        of = Ledger(1.0, 0.2, 1.0, 6.0)
        found = SampledBatches(np.arange(N), of, N, 50, (1, 2), 0, None, microbatch)
        assert all(size % microbatch == 0 for size in found.sizes)
        assert all(len(batch.is_padding_example) % microbatch == 0 for batch in found)
    with pytest.raises(
        ValueError, match=r"^DPSGD.batches: sizes must be ints .*, divisible by microbatch_size=7, but got \(7"
    ):
        SampledBatches(np.arange(N), of, N, 50, (1, 2), 0, (7, 15), 7)


@pytest.mark.parametrize("sizes", [(), (0, 3), (True,), (2.0,), 8])
def test_invalid_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match=r"^DPSGD.batches: sizes must be ints of at least 1, but got "):
        batches(sizes=sizes)
