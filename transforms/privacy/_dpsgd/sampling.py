"""Poisson-sampled batches, as the accountant assumes them, padded to a few sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.arguments import describe, is_int, leaf_name
from ..._core.prng import is_key
from ..._runs.data import examples, is_array_like
from .accounting import Ledger

# The sizes that batches are padded to, in standard deviations above the expected size. The first three hold 98 % of
# the batches and minimize the computation on padding; one large batch in 1e9 exceeds the last.
_STANDARD = (-0.3, 0.7, 2.0, 6.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """The examples of a step, padded to one of a few sizes.

    `DPSGD.batches` yields these. If you sample batches yourself, construct them directly: you are then responsible for
    Poisson sampling, where each example takes part independently with the probability that the accountant assumes.

    Attributes:
      arguments: the arguments of the loss after the model, a tuple; the examples are along axis 0 of every array.
      is_padding_example: whether each example is padding, booleans of shape (size,).
      step: the number of steps before the one that the batch is for; None if it was not counted.
      sampling: `(probability, bands)`: an example may take part in every `bands`-th step and is then drawn with this
        probability. None if the batch was sampled elsewhere.

    Examples:
      >>> import numpy as np
      >>> from plurax.transforms.privacy import Batch
      >>> batch = Batch((np.ones((4, 2)), np.zeros(4)), np.array([False, False, False, True]))
    """

    arguments: tuple[Any, ...]
    is_padding_example: Any
    step: Any = None
    sampling: tuple[float, int] | None = field(default=None, metadata={"static": True})


class SampledBatches:
    """An iterator over the batches of a run, each exactly once.

    Args:
      data: all examples, along axis 0 of every array; a tuple or list is unpacked into the arguments of the loss.
      ledger: holds the sampling probability and the number of bands.
      num_examples: the number of examples in the data.
      steps: the number of batches of the whole run.
      seed: the seed of the sampling, a sequence of integers.
      start: the number of batches that were used before.
      sizes: the sizes to pad to; None for a few sizes around the expected one.
      multiple: a divisor of all sizes.
    """

    def __init__(
        self,
        data: Any,
        ledger: Ledger,
        num_examples: int,
        steps: int,
        seed: Sequence[int],
        start: int,
        sizes: Sequence[int] | None,
        multiple: int = 1,
    ) -> None:
        from jax_privacy.batch_selection import CyclicPoissonSampling, PartitionType

        self._data = _arguments(data, num_examples)
        expected = ledger.expected_batch_size
        self.sizes = padded_sizes(num_examples, expected, multiple) if sizes is None else _checked(sizes, multiple)
        self._step, self._steps = start, steps
        self._sampling = (ledger.sampling_probability, ledger.bands)
        # The accountant's neighboring relation adds or removes an example, so each example draws its group alone.
        sampling = CyclicPoissonSampling(
            ledger.sampling_probability, steps, cycle_length=ledger.bands, partition_type=PartitionType.INDEPENDENT
        )
        # A batch depends on all random numbers drawn before it, so batches before `start` are sampled and discarded.
        self._drawn = islice(sampling.batch_iterator(num_examples, np.random.default_rng(seed)), start, None)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __len__(self) -> int:
        """Return the number of remaining batches."""
        return max(0, self._steps - self._step)

    def __next__(self) -> Batch:
        """Return the padded batch of the next step."""
        drawn = next(self._drawn)
        step = np.int32(self._step)
        self._step += 1
        # A batch larger than all sizes is never truncated: dropping a sampled example would break the accounting.
        largest = self.sizes[-1]
        size = next((s for s in self.sizes if s >= len(drawn)), largest * math.ceil(len(drawn) / largest))
        arguments = jax.tree.map(lambda x: _take(x, drawn, size), self._data)
        return Batch(arguments, np.arange(size) >= len(drawn), step, self._sampling)


def padding_only(data: Any, ledger: Ledger, num_examples: int, multiple: int = 1) -> Batch:
    """Return a batch without examples, of a size that only the settings determine."""
    arguments = _arguments(data, num_examples)
    size = padded_sizes(num_examples, ledger.expected_batch_size, multiple)[0]
    taken = jax.tree.map(lambda x: _take(x, np.arange(0), size), arguments)
    return Batch(taken, np.ones(size, bool), np.int32(0), (ledger.sampling_probability, ledger.bands))


def padded_sizes(num_examples: int, expected_batch_size: float, multiple: int = 1) -> tuple[int, ...]:
    """Return a few sizes that hold nearly every batch, from public numbers only: a size must not reveal any data."""
    probability = expected_batch_size / num_examples
    # The size of a batch is binomial, with variance n q (1 - q).
    deviation = math.sqrt(expected_batch_size * (1 - probability))
    if multiple == 1 and expected_batch_size >= 8:
        # Multiples of a power of two, so that a batch can be divided into groups of equal size.
        multiple = 2 ** min(6, max(2, int(math.log2(expected_batch_size / 16))))
    elif multiple > 1:
        num_examples = multiple * math.ceil(num_examples / multiple)
    wanted = [max(1.0, expected_batch_size + above * deviation) for above in _STANDARD]
    return tuple(sorted({min(num_examples, multiple * math.ceil(size / multiple)) for size in wanted}))


def _take(data: Any, drawn: np.ndarray, size: int) -> Any:
    """Return the sampled examples followed by zeros: padding is not a copy of any example."""
    if isinstance(data, jax.Array):
        # Padding takes an index beyond the end, which `fill` replaces by zeros; a negative one would wrap around.
        places = np.full(size, len(data), np.int32 if len(data) < 2**31 else np.int64)
        places[: len(drawn)] = drawn
        return jnp.take(data, places, axis=0, mode="fill", fill_value=0)
    # NumPy, on the host: `jax.jit` would compile a program for each number of sampled examples.
    taken = np.zeros((size, *data.shape[1:]), data.dtype)
    taken[: len(drawn)] = data[drawn]
    return taken


def _arguments(data: Any, num_examples: int) -> tuple[Any, ...]:
    """Return the data as arguments of the loss; raise unless they are arrays of `num_examples` examples."""
    if jax.tree_util.all_leaves([data]) and not is_array_like(data):
        needed = "all examples, as arrays such as (x, y), since DPSGD samples the batches itself"
        raise TypeError(f"DPSGD.batches: data must be {needed}, but got {describe(data)}.")
    data, count = examples("DPSGD.batches", data)
    for path, leaf in jax.tree.leaves_with_path(data):
        if is_key(leaf):
            raise TypeError(f"DPSGD.batches: `{leaf_name('data', path)}` holds random keys; pass arrays of numbers.")
    if count != num_examples:
        raise ValueError(
            f"DPSGD.batches: data has {count} examples, but {num_examples=}; pass all examples, not batches."
        )
    return tuple(data) if isinstance(data, (tuple, list)) else (data,)


def _checked(sizes: Sequence[int], multiple: int) -> tuple[int, ...]:
    """Return the sizes in increasing order; raise unless all are positive multiples of `multiple`."""
    found = tuple(sizes) if isinstance(sizes, Iterable) else ()
    # A size that `multiple` does not divide would need a last group of examples of another size.
    if not found or not all(is_int(s) and s >= 1 and s % multiple == 0 for s in found):
        of = f", divisible by microbatch_size={multiple}" if multiple > 1 else ""
        raise ValueError(f"DPSGD.batches: sizes must be ints of at least 1{of}, but got {sizes!r}.")
    return tuple(sorted({int(s) for s in found}))


def check_batch(api: str, batch: Any, sampling: tuple[float, int]) -> None:
    """Raise if a batch was not sampled as the accounting assumes: with this probability and number of bands."""
    if not isinstance(batch, Batch):
        raise TypeError(f"{api}: batch must be a Batch, such as from DPSGD.batches, but got {describe(batch)}.")
    padding = batch.is_padding_example
    if getattr(padding, "dtype", None) != np.dtype(bool) or padding.ndim != 1 or not padding.size:
        got = f"but got {describe(padding)}; an empty batch consists of padding only"
        raise ValueError(f"{api}: is_padding_example must be booleans, shape (size,), {got}.")
    if batch.sampling not in (None, sampling):
        drawn = f"with (probability, bands) = {batch.sampling}, but ε is computed for {sampling}"
        raise ValueError(f"{api}: the batch was drawn {drawn}; use batches of this DPSGD.")
