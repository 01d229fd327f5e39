"""`Batches`: shuffled batches from a random key, shared by all members or different for each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from mmap import mmap
from operator import itemgetter
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ....transforms._core.arguments import check_choice, check_count, check_number, describe
from ....transforms._core.axes import Axes
from ....transforms._core.prng import check_key
from ....transforms._runs.data import examples, is_array_like

Draw = Literal["all", "bootstrap", "subset"]

# At most this many batches, of at most so many bytes, are gathered together; the next order may take as many bytes.
_TOGETHER, _BYTES = 16, 2**20


class Batches:
    """An iterable of batches in shuffled epochs, for `Trainer.fit`.

    Every epoch contains each example once, in a new random order; examples that do not fill a last batch are dropped.
    With `members`, each member has its own order and, with `draw`, its own selection of examples, which is the same in
    every epoch. Only indices differ between members; there is one copy of the data.

    Args:
      data: a pytree of arrays with the examples along axis 0, such as `(x, y)`: arrays of JAX or NumPy, or of a library
        whose arrays NumPy converts, such as tensors of PyTorch on the CPU. Memory-mapped arrays (`np.memmap`) stay on
        the disk, so their file must not change meanwhile; others are copied to the device.
      batch_size: the number of examples in a batch, for each member.
      key: a random key that determines all batches. The batches of a member do not depend on the number of members.
      members: None for batches that all members share, or the number of members. With a number, the arrays of a batch
        have shape (members, batch_size, ...), for a `Trainer` with `in_axes=0`; `Trainer.fit` refuses any other.
      draw: the examples of each member: "all"; "bootstrap": drawn with replacement, as in bagging; "subset": drawn
        without replacement.
      fraction: for "bootstrap" and "subset", the number of examples of a member as a fraction of all; above 0, and at
        most 1 for "subset".
      epochs: the number of epochs; None repeats forever, so `Trainer.fit` needs `steps`.

    Attributes:
      indices: the examples of each member, int32 (members, count); None with `draw="all"`. The other examples can
        serve as validation data of that member.

    Raises:
      TypeError: `data` contains something other than arrays of numbers, such as a scalar or a string; `key` is not a
        key; a count is not an int; `fraction` is not a number.
      ValueError: `data` contains no arrays, or arrays that differ in length; `batch_size` is larger than the number of
        examples of a member; a count is below 1; `draw` is unknown; `fraction` is out of range, or given with
        `draw="all"`; `draw` is "bootstrap" or "subset", but `members` is None.

    Cost:
      Each epoch sorts one random number for each example of each member. A compiled program gathers each batch; from a
      memory-mapped array the batch is read from the disk, and only the batch is in memory.

    Source:
      Breiman 1996, "Bagging Predictors".

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from plurax.ensemble import Batches
      >>> data = jnp.arange(20.0).reshape(10, 2), jnp.arange(10)
      >>> x, y = next(iter(Batches(data, 4, key=jax.random.key(0), members=3, draw="bootstrap")))
      >>> x.shape, y.shape
      ((3, 4, 2), (3, 4))
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        key: jax.Array,
        members: int | None = None,
        draw: Draw = "all",
        fraction: float = 1.0,
        epochs: int | None = None,
    ) -> None:
        data, count = examples("Batches", data)
        for name, value in (("batch_size", batch_size), ("members", members), ("epochs", epochs)):
            check_count("Batches", name, value, optional=name != "batch_size")
        check_key("Batches", key)
        check_choice("Batches", "draw", draw, get_args(Draw))
        fraction = check_number("Batches", "fraction", fraction, lambda x: 0 < x < math.inf, "finite and above 0")
        if fraction > 1 and draw == "subset":
            raise ValueError(f"Batches: a subset has at most all examples, but fraction is {fraction}; pass at most 1.")
        if draw == "all" and fraction != 1:
            raise ValueError(f'Batches: fraction={fraction} needs draw="bootstrap" or "subset".')
        if draw != "all" and members is None:
            raise ValueError(f"Batches: draw={draw!r} is for each member; pass the number of members as members=.")
        each = count if draw == "all" else round(fraction * count)
        if batch_size > each:
            raise ValueError(
                f"Batches: batch_size is {batch_size}, but there are only {each} examples; make it smaller."
            )
        # NumPy arrays are copied, since the caller may change them; JAX arrays are immutable.
        self._data = jax.tree.map(lambda x: x if isinstance(x, jax.Array) or _is_mapped(x) else jnp.array(x), data)
        self._any_mapped = any(map(_is_mapped, jax.tree.leaves(data)))
        self._batch_size, self._epochs, self._members, self._each = batch_size, epochs, members, each
        # Small batches are gathered together, since a dispatch takes longer than gathering one of them.
        size = batch_size * (members or 1) * sum(x.nbytes // max(1, count) for x in jax.tree.leaves(self._data))
        self._order_bytes = 4 * each * (members or 1)
        self._together = 1 if self._any_mapped else max(1, min(_TOGETHER, self.per_epoch, _BYTES // max(1, size)))
        # Two keys, so that the selected examples of a member are independent of their order.
        to_draw, self._to_shuffle = jax.random.split(key)
        self.indices: jax.Array | None = None
        if draw != "all":
            assert members is not None
            self.indices = _drawn(to_draw, members, count, each, draw == "bootstrap")

    @property
    def per_epoch(self) -> int:
        """Return the number of batches in an epoch."""
        return self._each // self._batch_size

    def __len__(self) -> int:
        """Return the number of batches in all epochs.

        Raises:
          TypeError: `epochs` is None, so the batches never end.
        """
        if self._epochs is None:
            raise TypeError("Batches: without epochs= the batches never end; pass epochs= for a length.")
        return self._epochs * self.per_epoch

    def __iter__(self) -> BatchIterator:
        """Return an iterator that starts at the first batch."""
        return BatchIterator(self)

    def order(self, epoch: int) -> jax.Array:
        """Return the indices of the examples in the order of an epoch: int32 (count,), or (members, count)."""
        return _order(self._to_shuffle, np.uint32(epoch), self.indices, self._members, self._each)

    def _gathered(self, orders: tuple[jax.Array, ...], i: int, count: int, stacked: bool) -> Any:
        """Return `count` batches, as a list or stacked: batch `i` in the first of these orders, and those after it."""
        if not self._any_mapped:
            return _gathered(self._data, orders, np.int32(i), self._batch_size, self.per_epoch, count, stacked)
        index = np.asarray(_index(orders, np.int32(i), self._batch_size, self.per_epoch, count))
        if stacked:
            return _read(self._data, index)
        return [_read(self._data, of_batch) for of_batch in index]


class BatchIterator(Iterator[Any]):
    """An iterator over batches. `skip(count)` skips batches without gathering them."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._next = 0
        self._end = math.inf if batches._epochs is None else len(batches)
        self._orders: dict[int, jax.Array] = {}
        self._ready: list[Any] = []  # in reverse

    def __next__(self) -> Any:
        """Return the next batch."""
        if self._next >= self._end:
            raise StopIteration
        if not self._ready:
            # Beyond the last one, others are gathered and never used.
            self._ready = self._gather(self._batches._together, stacked=False)[::-1]
        self._next += 1
        return self._ready.pop()

    def _stacked(self, count: int) -> Any:
        """Return the next `count` batches, stacked along a new axis 0; None if there are fewer."""
        if self._next + count > self._end:
            return None
        found = self._gather(count, stacked=True)
        self._next, self._ready = self._next + count, []
        return found

    def _gather(self, count: int, stacked: bool) -> Any:
        """Return the next `count` batches; draw the orders of their epochs."""
        batches, before = self._batches, self._orders
        epoch, i = divmod(self._next, batches.per_epoch)
        after = (self._next + count - 1) // batches.per_epoch + 1
        # The next order is computed while these are in use, unless it would need much memory.
        ahead = after * batches.per_epoch < self._end and batches._order_bytes <= _BYTES
        epochs = range(epoch, after + ahead)
        self._orders = {e: before[e] if e in before else batches.order(e) for e in epochs}
        return batches._gathered(tuple(self._orders[e] for e in epochs[: after - epoch]), i, count, stacked)

    def skip(self, count: int) -> int:
        """Skip `count` batches, or all that are left if there are fewer, and return the number skipped."""
        skipped = int(min(count, self._end - self._next))
        self._next, self._ready = self._next + skipped, []
        return skipped


def shuffled(key: jax.Array, count: int) -> jax.Array:
    """Return a random permutation, int32 (count,): that of `jax.random.permutation(key, count)`, to the bit.

    On CPU, XLA sorts one array of integers four to eight times as fast as random numbers together with a second array.
    So each number is sorted as the high half of an integer of 64 bits, with its position as the low half.
    """
    order = jnp.arange(count, dtype=jnp.int32)
    # Equal numbers keep their order; several rounds make that improbable to notice.
    for _ in range(math.ceil(3 * math.log(max(1, count)) / math.log(2**32 - 1))):
        key, own = jax.random.split(key)
        bits = jax.random.bits(own, (count,), jnp.uint32)
        with jax.enable_x64(True):
            pairs = bits.astype(jnp.uint64) << 32 | jnp.arange(count, dtype=jnp.uint64)
            places = jax.lax.sort(pairs, is_stable=False).astype(jnp.uint32)
        order = order[places]
    return order


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _drawn(key: jax.Array, members: int, count: int, each: int, replace: bool) -> jax.Array:
    """Return `each` of `count` examples for each member: int32 (members, each)."""

    def of_member(i: jax.Array) -> jax.Array:
        own = jax.random.fold_in(key, i)
        if replace:
            return jax.random.randint(own, (each,), 0, count)
        return shuffled(own, count)[:each]

    # A loop instead of a vmap: under vmap, keys of the `rbg` kind give numbers that depend on the other members.
    return jax.lax.map(of_member, jnp.arange(members))


@partial(jax.jit, static_argnums=(3, 4))
def _order(key: jax.Array, epoch: Any, indices: jax.Array | None, members: int | None, each: int) -> jax.Array:
    """Return the permutation of the examples in an epoch: one for all members, or one for each."""
    key = jax.random.fold_in(key, epoch)
    if members is None:
        return shuffled(key, each)

    def of_member(i: jax.Array) -> jax.Array:
        # The index of the member is folded in, so its order does not depend on the number of members.
        order = shuffled(jax.random.fold_in(key, i), each)
        return order if indices is None else indices[i][order].astype(jnp.int32)

    return jax.lax.map(of_member, jnp.arange(members))


@partial(jax.jit, static_argnums=(2, 3, 4))
def _index(orders: tuple[jax.Array, ...], i: Any, size: int, per_epoch: int, count: int) -> jax.Array:
    """Return the examples of `count` batches: int32 (count, size), or (count, members, size).

    Args:
      orders: the orders of the epochs of these batches.
      i: the index of the first batch in the first order; an array, so that all batches are gathered by one program.
      size: the number of examples in a batch.
      per_epoch: the number of batches in an epoch.
      count: the number of batches.
    """
    # The batches are consecutive in a window of each order: in the first order the window contains the first batch, and
    # in the others it is at the begin.
    window = min(count, per_epoch)
    first = jnp.minimum(i, per_epoch - window)
    windows = [jax.lax.dynamic_slice_in_dim(orders[0], first * size, window * size, axis=-1)]
    windows += [order[..., : window * size] for order in orders[1:]]
    index = jax.lax.dynamic_slice_in_dim(jnp.concatenate(windows, -1), (i - first) * size, count * size, axis=-1)
    return jnp.moveaxis(index.reshape(*index.shape[:-1], count, size), -2, 0)


@partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _gathered(
    data: Any, orders: tuple[jax.Array, ...], i: Any, size: int, per_epoch: int, count: int, stacked: bool
) -> Any:
    """Gather `count` batches, for each member if each has its own order: stacked along a new axis 0, or as a list."""
    index = _index(orders, i, size, per_epoch, count)
    # The indices are in bounds. Without the promise, JAX corrects those below zero or beyond the end, which takes time.
    batches = jax.tree.map(lambda x: x.at[index].get(mode="promise_in_bounds"), data)
    return batches if stacked else [jax.tree.map(itemgetter(j), batches) for j in range(count)]


def _is_torch_dataset(x: Any) -> bool:
    """Return whether `x` is a `torch.utils.data.Dataset` with an index, which Python iterates by its examples."""
    bases = {f"{base.__module__}.{base.__qualname__}" for base in type(x).__mro__}
    return "torch.utils.data.dataset.Dataset" in bases and not hasattr(x, "__iter__")


def _read(data: Any, index: np.ndarray) -> Any:
    """Return selected examples on the device. The dtypes are those of JAX, as for arrays that are copied."""
    return jax.tree.map(lambda x: jnp.asarray(x[index]), data)


def _is_mapped(x: Any) -> bool:
    """Return whether `x` is a memory-mapped array, or a view of one."""
    # Not by the class: a selection of elements of an `np.memmap` is a copy in memory.
    while isinstance(x, np.ndarray):
        x = x.base
    return isinstance(x, mmap)


class Passes:
    """Several passes over batches that can be iterated again. Its length is that of all passes, if it is known."""

    def __init__(self, batches: Any, epochs: int) -> None:
        self._batches, self._epochs = batches, epochs

    def __len__(self) -> int:
        return self._epochs * len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for epoch in range(self._epochs):
            count = 0
            for batch in self._batches:
                count += 1
                yield batch
            if not count and not epoch:
                return
            if not count:
                raise ValueError(
                    f"Trainer.fit: epoch {epoch + 1} has no batches; pass batches that can be iterated {self._epochs} "
                    "times, such as a list or Batches."
                )


def in_epochs(batches: Any, epochs: int | None, steps: int | None) -> tuple[Any, int | None, int | None]:
    """Return the batches of a number of epochs, the number of steps if it limits them, and the batches of an epoch.

    Args:
      batches: the argument of `fit`.
      epochs: the number of epochs; None leaves the batches as they are.
      steps: the number of steps that was passed to `fit`, or None.

    Raises:
      TypeError: the batches can be iterated only once; `epochs` is not an int.
      ValueError: there are `steps` too, the batches are `Batches` with a number of epochs, or `epochs` is below 1.
    """
    check_count("Trainer.fit", "epochs", epochs, optional=True)
    if epochs is None:
        return batches, steps, None
    if steps is not None:
        raise ValueError(f"Trainer.fit: got steps={steps} and epochs={epochs}; pass one of them.")
    if isinstance(batches, Iterator):
        remedy = "pass what it iterates over, such as a list, a data loader or Batches, or pass steps"
        raise TypeError(f"Trainer.fit: epochs={epochs} needs batches that can be iterated again; {remedy}.")
    if not isinstance(batches, Batches):
        if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
            return batches, None, None  # refused where it is iterated
        count = None
        with suppress(TypeError):  # a data loader may have no length
            count = len(batches)
        return Passes(batches, epochs), None, count
    if batches._epochs is not None:
        found = f"the Batches have epochs={batches._epochs} themselves"
        raise ValueError(f"Trainer.fit: epochs={epochs} is given, but {found}; give the number in one place.")
    return batches, epochs * batches.per_epoch, batches.per_epoch


def check_source(batches: Any, in_axes: Axes, size: int, ends: bool) -> None:
    """Raise if `Trainer.fit` cannot take these batches.

    Args:
      batches: the argument of `fit`; only data sets and `Batches` are recognized.
      in_axes: as for `Trainer`.
      size: the number of members.
      ends: whether the run ends without the end of the batches.

    Raises:
      TypeError: the batches are a data set: an array, a dict, a tuple of arrays, or a `Dataset` of PyTorch.
      ValueError: `Batches` never end, though the run needs their end, or are for other members than `in_axes`.
    """
    several = isinstance(batches, tuple) and any(map(is_array_like, batches))
    if several or isinstance(batches, Mapping) or is_array_like(batches):
        found = "a tuple of arrays" if several else describe(batches)
        remedy = "Batches(data, batch_size, key=...), [data] * steps for full batches, or a list of batches"
        raise TypeError(f"Trainer.fit: batches must be an iterable of batches, but got data, {found}; pass {remedy}.")
    if _is_torch_dataset(batches):
        remedy = "a DataLoader(dataset, batch_size=...), or DataLoader(dataset, batch_size=None) if it holds batches"
        kind = type(batches).__name__
        raise TypeError(f"Trainer.fit: got a {kind}, a data set that yields single examples; pass {remedy}.")
    source = batches._batches if isinstance(batches, BatchIterator) else batches
    if not isinstance(source, Batches):
        return
    if source._epochs is None and not ends:
        raise ValueError("Trainer.fit: the Batches never end; pass steps= or epochs= to fit, or epochs= to Batches.")
    axes = jax.tree.leaves(in_axes, is_leaf=lambda x: x is None)
    if source._members is None:
        if 0 in axes:
            found = f"the trainer has in_axes={in_axes}, but the Batches are shared by all members"
            also = " and in_axes=0 to Trainer" if any(axis != 0 for axis in axes) else ""
            remedy = f"pass members={size} to Batches{also}, or in_axes=None to Trainer"
            raise ValueError(f"Trainer.fit: {found}; {remedy}.")
        return
    if source._members != size:
        raise ValueError(f"Trainer.fit: the Batches have members={source._members}, but the ensemble has {size}.")
    if any(axis != 0 for axis in axes):
        found = f"the Batches have members={size}, but the trainer has in_axes={in_axes}"
        why = "so every member would train on the examples of all"
        raise ValueError(f"Trainer.fit: {found}, {why}; pass in_axes=0 to Trainer.")
