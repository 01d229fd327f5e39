"""Batches sampled as the accountant assumes them, by jax-privacy, and padded to a few sizes."""

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
# the batches and minimize the computation on padding; one large batch in 1e9 exceeds the last. In a short run,
# compiling a step for the first two takes longer than they save.
_STANDARD = (-0.3, 0.7, 2.0, 6.0)
_SHORT = 200


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
      sampling: how the batch was sampled, as `Ledger.sampled` of its `DPSGD`; None if it was sampled elsewhere.

    Examples:
      >>> import numpy as np
      >>> from plurax.transforms.privacy import Batch
      >>> batch = Batch((np.ones((4, 2)), np.zeros(4)), np.array([False, False, False, True]))
    """

    arguments: tuple[Any, ...]
    is_padding_example: Any
    step: Any = None
    sampling: tuple[Any, ...] | None = field(default=None, metadata={"static": True})


class SampledBatches:
    """An iterator over the batches of a run, each exactly once.

    Args:
      data: all examples, along axis 0 of every array; a tuple or list is unpacked into the arguments of the loss.
      ledger: holds how batches are sampled.
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
        self._data = _arguments(data, num_examples)
        self.sizes = padded_sizes(num_examples, ledger, multiple, steps) if sizes is None else _checked(sizes, multiple)
        self._step, self._steps = start, steps
        self._sampled = ledger.sampled
        sampling = selection(ledger, steps)
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
        return Batch(arguments, np.arange(size) >= len(drawn), step, self._sampled)


def padding_only(data: Any, ledger: Ledger, num_examples: int, multiple: int = 1) -> Batch:
    """Return a batch without examples, of a size that only the settings determine."""
    arguments = _arguments(data, num_examples)
    size = padded_sizes(num_examples, ledger, multiple)[0]
    taken = jax.tree.map(lambda x: _take(x, np.arange(0), size), arguments)
    return Batch(taken, np.ones(size, bool), np.int32(0), ledger.sampled)


def selection(ledger: Ledger, steps: int) -> Any:
    """Return jax-privacy's batch selection strategy for the batches of a run of `steps` steps."""
    from jax_privacy import batch_selection

    sampling, probability, separation, truncation = ledger.sampled
    if sampling == "balls_in_bins":
        return batch_selection.BallsInBinsSampling(steps, separation)
    if sampling == "b_min_sep":
        return batch_selection.BMinSepSampling(probability, steps, separation)
    # If the neighboring relation adds or removes an example, each example draws its group alone. With truncated batches
    # it zeroes an example out, and the accountant knows the size of a group.
    kind = batch_selection.PartitionType
    return batch_selection.CyclicPoissonSampling(
        probability,
        steps,
        truncated_batch_size=None if truncation is None else truncation[0],
        cycle_length=separation,
        partition_type=kind.INDEPENDENT if truncation is None else kind.EQUAL_SPLIT,
    )


def padded_sizes(num_examples: int, ledger: Ledger, multiple: int = 1, steps: int = _SHORT) -> tuple[int, ...]:
    """Return a few sizes that hold nearly every batch of a run of so many steps.

    They are computed from public numbers only: a size must not reveal any data.
    """
    expected_batch_size = ledger.expected_batch_size
    probability = expected_batch_size / num_examples
    # The size of a batch is binomial, with variance n q (1 - q).
    deviation = math.sqrt(expected_batch_size * (1 - probability))
    if multiple == 1 and expected_batch_size >= 8:
        # Multiples of a power of two, so that a batch can be divided into groups of equal size.
        multiple = 2 ** min(6, max(2, int(math.log2(expected_batch_size / 16))))
    elif multiple > 1:
        num_examples = multiple * math.ceil(num_examples / multiple)
    if ledger.truncation is not None:
        num_examples = multiple * math.ceil(min(num_examples, ledger.truncation[0]) / multiple)
    standard = _STANDARD if steps >= _SHORT else _STANDARD[2:]
    wanted = [max(1.0, expected_batch_size + above * deviation) for above in standard]
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
    what = f"DPSGD.batches: data has {count} examples, but {num_examples=}"
    if count < num_examples:
        raise ValueError(f"{what}; pass all examples, not batches.")
    if count > num_examples:
        raise ValueError(f"{what}; make the DPSGD with num_examples={count}.")
    return tuple(data) if isinstance(data, (tuple, list)) else (data,)


def _checked(sizes: Sequence[int], multiple: int) -> tuple[int, ...]:
    """Return the sizes in increasing order; raise unless all are positive multiples of `multiple`."""
    found = tuple(sizes) if isinstance(sizes, Iterable) else ()
    # A size that `multiple` does not divide would need a last group of examples of another size.
    if not found or not all(is_int(s) and s >= 1 and s % multiple == 0 for s in found):
        of = f", divisible by microbatch_size={multiple}" if multiple > 1 else ""
        raise ValueError(f"DPSGD.batches: sizes must be ints of at least 1{of}, but got {sizes!r}.")
    return tuple(sorted({int(s) for s in found}))


def check_batch(api: str, batch: Any, sampled: tuple[Any, ...]) -> None:
    """Raise if a batch was not sampled as the accounting assumes: as `Ledger.sampled` says."""
    if not isinstance(batch, Batch):
        raise TypeError(f"{api}: batch must be a Batch, such as from DPSGD.batches, but got {describe(batch)}.")
    padding = batch.is_padding_example
    if getattr(padding, "dtype", None) != np.dtype(bool) or padding.ndim != 1 or not padding.size:
        got = f"but got {describe(padding)}; an empty batch consists of padding only"
        raise ValueError(f"{api}: is_padding_example must be booleans, shape (size,), {got}.")
    if batch.sampling not in (None, sampled):
        drawn = f"with {_described(batch.sampling)}, but ε is computed for {_described(sampled)}"
        raise ValueError(f"{api}: the batch was drawn {drawn}; use batches of this DPSGD.")


def _described(sampled: tuple[Any, ...]) -> str:
    """Return how a batch was sampled, for errors."""
    sampling, probability, separation, truncation = sampled
    more = "" if truncation is None else f", truncated to {truncation[0]}"
    return f"{sampling} sampling (probability {probability:g}, every {separation} steps{more})"
