"""`Validation`: the loss and the metrics of all members on validation data, between the steps of `Trainer.fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ...transforms._core.arguments import check_callable, check_count, describe, leaf_name
from ...transforms._core.axes import Axes, broadcast_axes
from ...transforms._models.hashable import HashablePytree
from ...transforms._runs.data import as_arrays, is_array_like
from .._execution.forms import padded, without_padding
from .._execution.stepper import copied
from .._members.sharding import ENSEMBLE, Layout, everywhere, pad, within
from .._members.shared import with_shared
from .._members.strategy import Execution, over_members
from .._step.loss import MemberLoss
from .._step.member_step import metrics_of
from .._step.state import Arrays, TrainState
from ._data.batches import Batches, BatchIterator

Metrics = Callable[..., Mapping[str, Any]]


class LossOfMembers:
    """The loss of each member on given data, without gradients, as one compiled program.

    Args:
      loss: the loss, with the hyperparameters of the members.
      layout: the layout of the members on a mesh; None without a mesh.
    """

    def __init__(self, loss: MemberLoss, layout: Layout | None) -> None:
        self._loss, self._layout = loss, layout
        self._program = jax.jit(self._of_all, static_argnums=0)

    def __call__(self, state: TrainState, execution: Execution, arguments: Any, axes: Sequence[int | None]) -> Any:
        """Return the losses (size,), in the mode that `state.ensemble` has. The members are executed as in a step.

        Args:
          state: the members; its optimizer state is not used.
          execution: the execution of the run's first step.
          arguments: the arguments of the loss after the model.
          axes: for each array of `arguments` its axis of the members, or None.
        """
        home, static, *inputs = self._inputs(state, execution, arguments, axes)
        with within(home):
            losses = self._program(static, *inputs)
        return without_padding(losses, state._size)

    def check(self, state: TrainState, arguments: Any, axes: Sequence[int | None]) -> None:
        """Raise what the loss raises for arguments of these shapes, without evaluating it."""
        home, static, *inputs = self._inputs(state, Execution("map"), arguments, axes)
        with within(home):
            self._program.eval_shape(static, *inputs)

    def _inputs(self, state: TrainState, execution: Execution, arguments: Any, axes: Sequence[int | None]) -> Any:
        """Return where the members are, the static argument of the program, and the arrays on those devices."""
        arrays, (leaves, treedef) = state._arrays(), jax.tree.flatten(arguments)
        shared = state.ensemble.shared
        # A step on several devices of a CPU leaves the members there, or copies of them if they do not divide evenly.
        layout = self._layout or Layout.around(arrays)
        home = layout or Layout.home(arrays)
        if layout is not None:
            arrays = padded(state, layout).arrays
        if home is not None:
            leaves = jax.tree.map(home.reach if layout is None else home.copy, leaves)
            shared = jax.tree.map(home.reach, shared) if layout is None else home.place_shared(shared)
        # "loop" is no single program, and a validation has no need for one program for each member. In a compiled loop,
        # XLA is slow at convolutions.
        if execution.strategy == "loop":
            execution = execution._replace(strategy="map", products=True)
        of_arguments = HashablePytree.of((axes, treedef))
        static = state._structure, execution._replace(devices=1), state._size, layout, of_arguments
        return home, static, arrays, shared, leaves

    def _of_all(self, static: tuple[Any, ...], arrays: Arrays, shared: Any, leaves: list[Any]) -> jax.Array:
        """Return the losses of all members, with those of the padding; compiled in `__init__`."""
        structure, execution, size, layout, of_arguments = static
        axes, treedef = of_arguments.value

        def of_member(arrays: Arrays, shared: Any, leaves: list[Any]) -> jax.Array:
            """Return the loss of one member; changes that it makes to the model are dropped."""
            trainable, rest, _, standing = arrays
            loss, model = self._loss.of(standing.hyperparams), structure.merge(*with_shared(trainable, rest, shared))
            return metrics_of(loss(model, *jax.tree.unflatten(treedef, leaves)))["loss"]

        if layout is None:
            return over_members(of_member, execution, (0, None, axes), size)(arrays, shared, leaves)
        more = layout.padded(size) - size
        leaves = [x if axis is None else pad(x, axis, more) for x, axis in zip(leaves, axes, strict=True)]
        specs = [P() if axis is None else P(*[None] * axis, ENSEMBLE) for axis in axes]
        of_device = over_members(of_member, execution, (0, None, axes), layout.padded(size) // layout.devices)
        return layout.on_each(of_device, P(ENSEMBLE), P(), specs)(arrays, shared, leaves)


class TrainingBatch(NamedTuple):
    """What is known of the arguments of the loss from a training batch.

    Attributes:
      treedef: their structure.
      ndims: the number of axes of each array.
      axes: the axis of the members of each array, or None.
    """

    treedef: Any
    ndims: list[int]
    axes: list[int | None]

    @classmethod
    def of(cls, arguments: tuple[Any, ...], axes: tuple[Any, ...]) -> TrainingBatch:
        """Return it for the arguments of the loss after the model, and the axes of each."""
        leaves, treedef = jax.tree.flatten(arguments)
        return cls(treedef, [np.ndim(x) for x in leaves], broadcast_axes(axes, arguments))


@dataclass
class Validation:
    """The validation of one run of `Trainer.fit`.

    Attributes:
      data: the arguments of the loss, as one batch; or an iterable of batches.
      several: whether `data` is an iterable of batches.
      metrics: a function of the ensemble and the arguments, or None.
      every: steps between two validations.
      offset: a step with a validation, from which the others are counted.
      losses: computes the losses.
      like: a training batch; None before the first one is known.
    """

    data: Any
    several: bool
    metrics: Metrics | None
    every: int
    offset: int
    losses: LossOfMembers
    like: TrainingBatch | None = None

    @classmethod
    def of(
        cls,
        data: Any,
        every: int | None,
        metrics: Any,
        losses: LossOfMembers,
        in_axes: Axes,
        per_epoch: int | None,
        start: int,
    ) -> Validation | None:
        """Return the validation that the options of `fit` describe, or None without data.

        Args:
          data: the option `validation`.
          every: the option `validate_every`.
          metrics: the option `metrics`.
          losses: computes the losses.
          in_axes: as for `Trainer`.
          per_epoch: the number of batches in an epoch, if `fit` has `epochs` and it is known.
          start: the step of the state that was passed to `fit`.

        Raises:
          TypeError: `data` can be iterated only once, or holds something other than numbers; `metrics` is not callable;
            `every` is not an int.
          ValueError: `every` or `metrics` is given without data; `every` is needed or below 1; `data` are `Batches`
            that never end, an empty list, or a list of arrays.
        """
        check_count("Trainer.fit", "validate_every", every, optional=True)
        if data is None:
            for name, value in (("validate_every", every), ("metrics", metrics)):
                if value is not None:
                    raise ValueError(f"Trainer.fit: {name} needs validation data; pass validation=.")
            return None
        if metrics is not None:
            check_callable("Trainer.fit", metrics, "metrics")
        if every is None and per_epoch is None:
            reason = "without epochs, or for batches without a length"
            raise ValueError(f"Trainer.fit: validate_every is needed {reason}; pass the steps between two validations.")
        offset, every = (start, max(1, per_epoch or 1)) if every is None else (0, every)
        several = _are_batches(data)
        if isinstance(data, Batches) and data._members is not None and not jax.tree.leaves(in_axes):
            found = f"the Batches of validation have members={data._members}, but the trainer has in_axes={in_axes}"
            raise ValueError(f"Trainer.fit: {found}; pass Batches that all members share.")
        if not several:
            data = _on_device(as_arrays("Trainer.fit", "validation", data))
        return cls(data, several, metrics, every, offset, losses)

    def due(self, step: int, every: int | None = None) -> bool:
        """Return whether there is a validation after a step; with `every`, whether one of those that are watched."""
        return (step - self.offset) % (every or self.every) == 0

    def begin(self, state: TrainState, arguments: tuple[Any, ...], axes: tuple[Any, ...]) -> None:
        """Check data that is in memory, given the first training batch, before the first step."""
        self.like = TrainingBatch.of(arguments, axes)
        if not self.several or isinstance(self.data, list):
            first = next(iter(self._batches()))
            self.losses.check(_evaluating(state), first, self._axes(first, state._size))

    def values(self, state: TrainState, execution: Execution) -> dict[str, Any]:
        """Return the loss and the metrics of all members by name: of each member (size,), or of the ensemble ().

        Args:
          state: all members; its optimizer state is not used.
          execution: the execution of the run's first step.
        """
        found, counts, state = [], [], _evaluating(state)
        for arguments in self._batches():
            axes = self._axes(arguments, state._size)
            values = {"loss": self.losses(state, execution, arguments, axes)}
            if self.metrics is not None:
                values |= _checked(self.metrics(state.ensemble, *arguments), state._size)
            found.append({name: everywhere(x) for name, x in values.items()})
            if self.several:
                counts.append(_examples(arguments, axes))
            # One batch is computed while the next is prepared; more would hold their arrays in memory.
            jax.block_until_ready(found[-2:-1])
        return found[0] if len(found) == 1 else _mean(found, counts)

    def watched(self, name: str, values: Mapping[str, Any]) -> np.ndarray:
        """Return the values of a validation under a name as float32; raise if there are none."""
        if name not in values:
            raise ValueError(_unknown(name, values))
        return np.asarray(values[name]).astype(np.float32)

    def _batches(self) -> Iterator[tuple[Any, ...]]:
        """Return the arguments of the loss for each batch."""
        count = 0
        for batch in self.data if self.several else [self.data]:
            count += 1
            # Copied, since a data loader may reuse its memory.
            arrays = copied(as_arrays("Trainer.fit", "validation", batch)) if self.several else batch
            yield tuple(arrays) if isinstance(arrays, (tuple, list)) else (arrays,)
        if not count:
            remedy = "pass batches that can be iterated at each validation, such as a list"
            raise ValueError(f"Trainer.fit: validation has no batches; {remedy}.")

    def _axes(self, arguments: tuple[Any, ...], size: int) -> list[int | None]:
        """Return for each array its axis of the members: that of training batches, or None if it lacks this axis."""
        assert self.like is not None
        if all(axis is None for axis in self.like.axes):
            return [None] * len(jax.tree.leaves(arguments))
        if jax.tree.structure(arguments) != self.like.treedef:
            found, wanted = jax.tree.structure(arguments), self.like.treedef
            remedy = "pass what the loss takes after the model"
            raise ValueError(f"Trainer.fit: validation has structure {found}, but a batch has {wanted}; {remedy}.")

        def axis_of(path: Any, x: Any, ndim: int, axis: int | None) -> int | None:
            shape = np.shape(x)
            if axis is None or len(shape) == ndim - 1:
                return None
            if len(shape) == ndim and shape[axis] == size:
                return axis % ndim
            needs = f"{ndim - 1} axes if all members share it, or {ndim} with {size} slices along axis {axis}"
            name = leaf_name("validation", path)
            raise ValueError(f"Trainer.fit: `{name}` is {describe(x)}, but it needs {needs}, as in a training batch.")

        leaves = jax.tree.leaves_with_path(arguments)
        return [
            axis_of(path, x, ndim, axis)
            for (path, x), ndim, axis in zip(leaves, self.like.ndims, self.like.axes, strict=True)
        ]


def check_name(validation: Validation | None, name: str, every: int | None) -> None:
    """Raise if early stopping watches a value that no validation has, or at steps without a validation.

    Args:
      validation: the validation of the run, or None.
      name: the name of the value.
      every: steps between two looks at it; None for each validation.
    """
    if validation is None:
        raise ValueError(f"Trainer.fit: early stopping watches {name!r} of the validation; pass validation=.")
    if validation.metrics is None and name != "loss":
        raise ValueError(_unknown(name, ["loss"]))
    if every is not None and every % validation.every:
        found = f"early stopping watches {name!r} every {every} steps, but validations are every {validation.every}"
        raise ValueError(f"Trainer.fit: {found}; pass a multiple as every, or None for each validation.")


def _are_batches(data: Any) -> bool:
    """Return whether validation data are several batches; raise if they cannot be iterated at each validation."""
    if isinstance(data, (Iterator, BatchIterator)):
        remedy = "pass a tuple (one batch), a list of batches, or a data loader"
        raise TypeError(f"Trainer.fit: validation can be iterated only once, but is read several times; {remedy}.")
    if isinstance(data, Batches):
        if data._epochs is None:
            raise ValueError("Trainer.fit: the Batches of validation never end; pass epochs=1 to Batches.")
        return True
    if isinstance(data, list):
        if any(is_array_like(x) or isinstance(x, (bool, int, float, complex)) for x in data):
            remedy = "pass a tuple, (x, y), for one batch, or a list of tuples, [(x, y), ...], for several"
            raise ValueError(f"Trainer.fit: validation is a list of arrays, one batch or several; {remedy}.")
        if not data:
            raise ValueError("Trainer.fit: validation is an empty list; pass at least one batch.")
        return True
    is_leaf = jax.tree_util.treedef_is_leaf(jax.tree.structure(data))
    return is_leaf and isinstance(data, Iterable) and not isinstance(data, (str, bytes)) and not is_array_like(data)


def _evaluating(state: TrainState) -> TrainState:
    """Return a state with the ensemble in evaluation mode."""
    return TrainState(state.ensemble._evaluating(), (), state.step, state.standing)


def _on_device(batch: Any) -> Any:
    """Return a batch with its NumPy arrays on the device, transferred once; the caller may change them later."""
    return jax.tree.map(lambda x: jnp.array(x) if isinstance(x, (np.ndarray, np.generic)) else x, batch)


def _checked(found: Any, size: int) -> dict[str, Any]:
    """Return what `metrics` has returned as a dict of arrays; raise if it is something else."""
    if not isinstance(found, Mapping):
        wanted = "a dict from names to arrays"
        raise TypeError(f"Trainer.fit: metrics must return {wanted}, but it returned {describe(found)}.")
    checked = {}
    for name, value in found.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"Trainer.fit: the names that metrics returns must be strings, but one is {name!r}.")
        if name == "loss":
            raise ValueError('Trainer.fit: metrics returns a value named "loss", as the validation loss; rename it.')
        array = value if isinstance(value, jax.Array) else _as_numpy(value)
        real = any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))
        if array.shape not in ((), (size,)) or not real:
            wanted = f"one number for each of the {size} members, or one for the ensemble"
            raise ValueError(f"Trainer.fit: metrics must return {wanted}, but {name!r} is {describe(value)}.")
        checked[name] = array
    return checked


def _as_numpy(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError:  # a ragged list
        return np.asarray(None)


def _examples(arguments: Any, axes: Sequence[int | None]) -> int:
    """Return the number of examples of a batch; raise if its arrays differ in it."""
    of_arrays = zip(map(np.shape, jax.tree.leaves(arguments)), axes, strict=True)
    shapes = [[length for i, length in enumerate(shape) if i != axis] for shape, axis in of_arrays]
    lengths = {shape[0] for shape in shapes if shape}
    if len(lengths) != 1:
        found = f"one has the lengths {sorted(lengths)}" if lengths else "one has no array"
        remedy = "pass arrays with the examples along axis 0, or one batch"
        raise ValueError(f"Trainer.fit: batches of validation count by their examples, but {found}; {remedy}.")
    return lengths.pop()


def _mean(found: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the mean of the values of several batches, weighted by their examples, computed in float64."""
    if other := next((values.keys() for values in found if values.keys() != found[0].keys()), None):
        named = " and ".join(str(sorted(names)) for names in (found[0].keys(), other))
        raise ValueError(f"Trainer.fit: metrics must return the same names for each batch, but got {named}.")
    weights = np.asarray(counts, np.float64) / max(1, sum(counts))

    def mean(name: str) -> np.ndarray:
        values = [np.asarray(values[name]) for values in found]
        of_all = sum(weight * x.astype(np.float64) for weight, x in zip(weights, values, strict=True))
        return np.asarray(of_all, np.float64 if values[0].dtype == np.float64 else np.float32)

    return {name: mean(name) for name in found[0]}


def _unknown(name: str, known: Iterable[str]) -> str:
    named = ", ".join(map(repr, known))
    return f"Trainer.fit: early stopping watches {name!r}, but a validation has only {named}; name one of these."
