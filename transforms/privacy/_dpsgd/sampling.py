"""Poisson-sampled batches, which the accountant takes for granted, padded to a few sizes."""

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
from .accounting import Ledger

# The sizes that batches are padded to, in standard deviations above the expected one. The first three hold
# 98 % of the batches, and are where the least is computed in vain; of large batches one in 1e9 is beyond the last.
_STANDARD = (-0.3, 0.7, 2.0, 6.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Examples that take part in a step, padded to one of a few sizes.

    `DPSGD.batches` yields these. Whoever samples elsewhere makes them too, and is responsible for each example taking
    part independently of all others, with the probability that the accountant counts with.

    Attributes:
      arguments: what the loss gets after the model, a tuple; the examples are along axis 0 of every array.
      is_padding_example: which of the examples are padding, booleans of shape (size,).
      step: how many steps were taken before the one that the batch is for; None where it was not counted.
      sampling: the probability with which an example that may take part was drawn, and every how many steps it may;
        None where the batch was sampled elsewhere.

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
    """The batches of a run, once each: an iterator.

    Args:
      data: all examples, along axis 0 of every array; a tuple or list is unpacked into the arguments of the loss.
      ledger: has the probability with which they take part.
      num_examples: how many there are.
      steps: how many batches the whole run has.
      seed: what the sampling is drawn from.
      start: how many of them were used before.
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

        self._data = tuple(data) if isinstance(data, (tuple, list)) else (data,)
        _check_data(self._data, num_examples)
        expected = ledger.expected_batch_size
        self.sizes = padded_sizes(num_examples, expected, multiple) if sizes is None else _checked(sizes, multiple)
        self._step, self._steps = start, steps
        self._sampling = (ledger.sampling_probability, ledger.bands)
        # Examples may come and go under the accountant's relation, so each draws its group by itself.
        sampling = CyclicPoissonSampling(
            ledger.sampling_probability, steps, cycle_length=ledger.bands, partition_type=PartitionType.INDEPENDENT
        )
        # A batch depends on all random numbers before it, so those before `start` are drawn again and dropped.
        self._drawn = islice(sampling.batch_iterator(num_examples, np.random.default_rng(seed)), start, None)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __len__(self) -> int:
        """Return the number of batches that are left."""
        return max(0, self._steps - self._step)

    def __next__(self) -> Batch:
        """Return the batch of the next step, padded."""
        drawn = next(self._drawn)
        step = np.int32(self._step)
        self._step += 1
        # A batch larger than all sizes is never cut: an example that was drawn and left out would break the accounting.
        largest = self.sizes[-1]
        size = next((s for s in self.sizes if s >= len(drawn)), largest * math.ceil(len(drawn) / largest))
        arguments = jax.tree.map(lambda x: _take(x, drawn, size), self._data)
        return Batch(arguments, np.arange(size) >= len(drawn), step, self._sampling)


def padded_sizes(num_examples: int, expected_batch_size: float, multiple: int = 1) -> tuple[int, ...]:
    """Return a few sizes that hold nearly every batch, found from public numbers: a size must not tell of the data."""
    probability = expected_batch_size / num_examples
    # The size of a batch is binomial, with variance n q (1 - q).
    deviation = math.sqrt(expected_batch_size * (1 - probability))
    if multiple == 1 and expected_batch_size >= 8:
        # A power of two, so that a batch can be computed in parts of one size.
        multiple = 2 ** min(6, max(2, int(math.log2(expected_batch_size / 16))))
    elif multiple > 1:
        num_examples = multiple * math.ceil(num_examples / multiple)
    wanted = [max(1.0, expected_batch_size + above * deviation) for above in _STANDARD]
    return tuple(sorted({min(num_examples, multiple * math.ceil(size / multiple)) for size in wanted}))


def _take(data: Any, drawn: np.ndarray, size: int) -> Any:
    """Return the drawn examples, then zeros: padding is not a copy of any example."""
    if isinstance(data, jax.Array):
        # An index beyond the end is filled with zeros; a negative one would count from the end.
        places = np.full(size, len(data), np.int32 if len(data) < 2**31 else np.int64)
        places[: len(drawn)] = drawn
        return jnp.take(data, places, axis=0, mode="fill", fill_value=0)
    # In NumPy, on the host: `jax.jit` would compile a program for each number of drawn examples.
    taken = np.zeros((size, *data.shape[1:]), data.dtype)
    taken[: len(drawn)] = data[drawn]
    return taken


def _check_data(data: Any, num_examples: int) -> None:
    """Raise if the data are not arrays of numbers with `num_examples` examples along axis 0."""
    leaves = jax.tree.leaves_with_path(data)
    if not leaves:
        raise ValueError("DPSGD.batches: data holds no arrays, so there are no examples; pass some.")
    for path, leaf in leaves:
        name = leaf_name("data", path)
        numbers = isinstance(leaf, (jax.Array, np.ndarray)) and not is_key(leaf) and leaf.dtype.kind not in "OSUMm"
        if not numbers or not leaf.ndim:
            raise TypeError(
                f"DPSGD.batches: `{name}` is {describe(leaf)}, not a NumPy or JAX array of examples; convert it."
            )
        if len(leaf) != num_examples:
            raise ValueError(f"DPSGD.batches: `{name}` has {len(leaf)} examples, but {num_examples=}; make both equal.")


def _checked(sizes: Sequence[int], multiple: int) -> tuple[int, ...]:
    """Return the sizes in order; raise if they are not counts that `multiple` divides."""
    found = tuple(sizes) if isinstance(sizes, Iterable) else ()
    # A remainder of a batch would be a program, and a group of examples, of a size of its own.
    if not found or not all(is_int(s) and s >= 1 and s % multiple == 0 for s in found):
        of = f" that microbatch_size={multiple} divides" if multiple > 1 else ""
        raise ValueError(f"DPSGD.batches: sizes must be ints of at least 1{of}, but got {sizes!r}.")
    return tuple(sorted({int(s) for s in found}))


def check_batch(api: str, batch: Any, sampling: tuple[float, int]) -> None:
    """Raise if a batch was not sampled as ε is counted for: with this probability and number of bands."""
    if not isinstance(batch, Batch):
        raise TypeError(f"{api}: a batch must be a Batch, such as from DPSGD.batches, but got {describe(batch)}.")
    padding = batch.is_padding_example
    if getattr(padding, "dtype", None) != np.dtype(bool) or padding.ndim != 1 or not padding.size:
        got = f"but got {describe(padding)}; a batch without examples is all padding"
        raise ValueError(f"{api}: is_padding_example must be booleans, shape (size,), {got}.")
    if batch.sampling not in (None, sampling):
        drawn = f"with (probability, bands) = {batch.sampling}, but ε is counted for {sampling}"
        raise ValueError(f"{api}: the batch was drawn {drawn}; take batches of this DPSGD.")
