"""`Trainer`: one training step of every member, as one program or as a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..transforms import value_and_grad
from ..transforms._arguments import describe
from ..transforms._axes import Axes, axes_per_argument, check_in_axes, mapped_size
from ..transforms._chunk import check_chunk_size
from ..transforms._compat import Tracer
from ..transforms._model import Parts, Structure, named_arrays, split, to_pure
from ._ensemble import Ensemble
from ._fit import History, Settings, fit
from ._optimizer import MemberOptimizer
from ._state import Arrays, TrainState
from ._static import Static
from ._strategy import STRATEGIES, Execution, in_turn, over_members, stack, take_member


class Trainer:
    """Train every member of an ensemble, on its own or on shared batches.

    Args:
      loss: `loss(model, *batch)` returns a scalar, or a scalar and a dict of arrays to report. `model` is one member,
        an ordinary module. What it changes of its own state is carried along.
      optimizer: an optax factory, such as `optax.adam`, or a ready `GradientTransformation` that all members share.
      hyperparams: arguments of the factory: a list or 1-D array holds one value per member, anything else is shared.
        The values per member live in the state (`state.opt_state.hyperparams`), where `init` puts them.
      in_axes: for the batch: None (all members share it), 0 (member i takes slice i of every array), or a tuple with
        one entry for each element of the batch.
      grad_fn: replaces `plurax.transforms.value_and_grad`: `grad_fn(loss)(model, *batch)` returns `(value, gradients)`,
        where value is what `loss` returns and the gradients are like those of `value_and_grad`. What it assigns to
        the model holds.
      strategy: how the members are executed, never what they compute. "vmap": batched operations; "map": a compiled
        loop; "unroll": one program with each member's operations in turn; "loop": a Python loop over the compiled step
        of one member. "auto" takes "loop" on a CPU where the step contains a convolution, else "vmap". Where a step is
        traced, "loop" is executed as "unroll".
      chunk_size: how many members "vmap" executes at a time; None executes all at once.
      memory_budget: not available yet; use `chunk_size`.
      mesh: not available yet.

    Raises:
      TypeError: `loss`, `grad_fn` or `optimizer` cannot be called; hyperparameters that are not numbers.
      ValueError: a hyperparameter that the factory does not take, or lacks; hyperparameters for a ready optimiser; an
        unknown strategy; `chunk_size` below 1 or with a strategy other than "vmap" and "auto".
      NotImplementedError: `memory_budget` or `mesh` is given.

    Source:
      MindSpore's ensemble training with `vmap` over a `CellList`; `torch.func.stack_module_state`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, Trainer
      >>> def loss(model, x, y):
      ...     return jnp.mean((model(x) - y) ** 2)
      >>> trainer = Trainer(loss, optax.sgd, hyperparams={"learning_rate": [0.1, 0.2]})
      >>> state = trainer.init(Ensemble.create(lambda rngs: nnx.Linear(3, 1, rngs=rngs), 2, seed=0))
      >>> state, metrics = trainer.step(state, (jnp.ones((4, 3)), jnp.zeros((4, 1))))
      >>> metrics["loss"].shape
      (2,)
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        optimizer: Any,
        *,
        hyperparams: Mapping[str, Any] | None = None,
        in_axes: Axes = None,
        grad_fn: Callable[..., Any] | None = None,
        strategy: str = "auto",
        chunk_size: int | None = None,
        memory_budget: int | str | None = None,
        mesh: Any = None,
    ) -> None:
        if not callable(loss):
            raise TypeError(f"Trainer: loss must be a function of a model and a batch, but got {describe(loss)}.")
        if grad_fn is not None and not callable(grad_fn):
            raise TypeError(f"Trainer: grad_fn must be a function of the loss, but got {describe(grad_fn)}.")
        check_in_axes("Trainer", in_axes)
        if strategy not in STRATEGIES:
            raise ValueError(f"Trainer: strategy must be one of {', '.join(STRATEGIES)}, but got {strategy!r}.")
        check_chunk_size("Trainer", chunk_size)
        if chunk_size is not None and strategy not in ("auto", "vmap"):
            raise ValueError(f'Trainer: chunk_size needs strategy="vmap", but the strategy is {strategy!r}.')
        if memory_budget is not None:
            raise NotImplementedError("Trainer: memory_budget is not available yet; use chunk_size=k.")
        if mesh is not None:
            raise NotImplementedError("Trainer: mesh is not available yet; members run on one device.")
        self._loss = loss
        self._in_axes = in_axes
        self._strategy = strategy
        self._chunk_size = chunk_size
        self._optimizer = MemberOptimizer(optimizer, hyperparams)
        self._gradients = _value_and_grad(loss) if grad_fn is None else grad_fn(loss)
        self._in_turn: dict[Structure, bool] = {}
        # One program for a step that leaves its state usable, one for a step that takes over its memory.
        self._programs = [
            jax.jit(self._step_of_all, static_argnums=(0, 1, 2), donate_argnums=donated) for donated in ((), (3,))
        ]
        self._member_programs = [
            jax.jit(self._step_of_member, static_argnums=(0, 1), donate_argnums=donated) for donated in ((), (2,))
        ]

    def init(self, ensemble: Ensemble) -> TrainState:
        """The state before the first step; a copy, so the ensemble stays as it is.

        Args:
          ensemble: the models to train.

        Returns:
          A `TrainState` at step 0.

        Raises:
          TypeError: not an `Ensemble`.
          ValueError: a list of hyperparameters does not have one value for each member; nothing trains.
        """
        if not isinstance(ensemble, Ensemble):
            raise TypeError(f"Trainer.init: needs an Ensemble, but got {type(ensemble).__name__}.")
        if not jax.tree.leaves(ensemble.trainable):
            raise ValueError(
                "Trainer.init: the members have no trainable arrays, so there is nothing to train; give them nnx.Param "
                "variables, or a `trainable` rule that matches."
            )
        opt_state = self._optimizer.init(ensemble.trainable, len(ensemble))
        return jax.tree.map(jnp.copy, TrainState(ensemble, opt_state, jnp.zeros((), jnp.int32)))

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step of every member.

        Args:
          state: from `init` or an earlier step; it stays usable.
          batch: a tuple or list is unpacked into the arguments of the loss after the model; anything else is one.

        Returns:
          The new state, and the metrics: "loss" of shape (size,), and what the loss reports, with the members along
          axis 0.

        Raises:
          ValueError: the batch does not fit `in_axes`; gradients of another structure than the parameters; a member
            changes its structure; the loss reports something called "loss".
          TypeError: the loss returns something else than a scalar, or a scalar and a dict.

        Cost:
          Under "loop" the new state is stacked when somebody looks at it, not before.
        """
        _check_state("Trainer.step", state)
        return self.advance(state, batch)[:2]

    def fit(
        self,
        state: TrainState,
        batches: Iterable[Any],
        *,
        steps: int | None = None,
        progress: bool = True,
        checkpoint_dir: Any = None,
        checkpoint_every: int | None = None,
        checkpoint_keep: int = 2,
        history_every: int = 1,
    ) -> tuple[TrainState, History]:
        """Take a step for each batch, with a progress bar, a history, and checkpoints to go on from.

        Args:
          state: where to start; it stays usable.
          batches: an iterable of batches. It is never rewound, and no batch is taken from it that is not used.
          steps: how many further steps to take; None goes on until the batches end. Ending earlier warns.
          progress: whether to show a bar with the range of the loss over the members, and steps per second.
          checkpoint_dir: a directory for checkpoints, `step_00000100` and so on, made where it is missing. If it holds
            a whole checkpoint later than `state`, training goes on from the newest: as many batches as that is later
            are taken and skipped, and the steps count from `state`. A damaged one is passed over with a warning. What
            else is in the directory stays as it is. A final checkpoint is always written.
          checkpoint_every: steps between checkpoints; None writes only the final one.
          checkpoint_keep: how many checkpoints to keep, the newest.
          history_every: steps between rows of the history.

        Returns:
          The state after the last step, and the history: a list of dicts, one for each recorded step and member, with
          "step", "member", "loss" and what else the loss reports. Ctrl-C ends training cleanly after the current step
          with the same results; a second one interrupts it. With `checkpoint_dir` the history has the earlier steps of
          the run too.

        Raises:
          TypeError, ValueError: as for `step`; `steps` or another count is no int or too small; a checkpoint of another
            ensemble, another factory or other hyperparameters, or later than the steps asked for. (Two ready
            optimisers with states of one structure cannot be told apart.)
          OSError: `checkpoint_dir` cannot be made.

        Cost:
          The state is copied once, then each step takes over the memory of the one before.
        """
        return fit(
            self,
            state,
            batches,
            steps=steps,
            progress=progress,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
            checkpoint_keep=checkpoint_keep,
            history_every=history_every,
        )

    def advance(
        self, state: TrainState, batch: Any, execution: Execution | None = None, *, donate: bool = False
    ) -> tuple[TrainState, dict[str, jax.Array], Execution]:
        """`step`, and how it was executed.

        Args:
          state: where to start.
          batch: as for `step`.
          execution: how an earlier step was executed: it stands for what the trainer leaves open.
          donate: whether the step takes over the memory of `state`.
        """
        structure, size = state.structure_and_size()
        arguments = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        axes = axes_per_argument("Trainer.step", self._in_axes, arguments)
        # The model comes first, so that the loss's own names are those of the errors.
        mapped_size(
            "Trainer.step", self._loss, (None, *arguments), {}, (None, *axes), None, size, "the number of members"
        )
        execution = self._choose(state, arguments, axes, execution)
        if donate:
            # A loader may fill the same buffer again, while the step still reads it.
            arguments = jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, arguments)
        if execution.strategy != "loop":
            program = self._programs[donate]
            arrays, step, metrics = program(
                structure, execution, Static.of(axes), state.arrays(), state.step, arguments
            )
            return TrainState.of_arrays(structure, arrays, step), metrics, execution
        # On the device once, not once for each member, and no index where there is nothing to take by it.
        arguments = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), arguments)
        shared = not jax.tree.leaves(axes)
        program, static = self._member_programs[donate], Static.of(axes)
        results = [
            program(structure, static, arrays, None if shared else np.uint32(i), arguments)
            for i, arrays in enumerate(state.members())
        ]
        members, metrics = zip(*results, strict=True)
        step, metrics = _together(state.step, metrics)
        return TrainState.of_members(structure, members, step), metrics, execution

    def settings(self, execution: Execution | None = None) -> Settings:
        """What the steps are computed with."""
        execution = execution or Execution(self._strategy, self._chunk_size)
        return Settings(self._optimizer.name, self._optimizer.numbers, execution.strategy, execution.chunk_size)

    def _choose(
        self, state: TrainState, arguments: tuple[Any, ...], axes: tuple[Axes, ...], earlier: Execution | None
    ) -> Execution:
        """How a step is executed: as the trainer says, else as an earlier one was, else by the rule."""
        strategy, chunk_size = self._strategy, self._chunk_size
        if strategy == "auto" and chunk_size is not None:
            strategy = "vmap"
        elif strategy == "auto":
            strategy = earlier.strategy if earlier else self._by_rule(state, arguments, axes)
        if strategy == "vmap" and chunk_size is None and earlier and earlier.strategy == "vmap":
            chunk_size = earlier.chunk_size
        if strategy == "loop" and (state.is_traced() or any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments))):
            strategy = "unroll"
        return Execution(strategy, chunk_size)

    def _by_rule(self, state: TrainState, arguments: tuple[Any, ...], axes: tuple[Axes, ...]) -> str:
        """The strategy that "auto" stands for, found once for each kind of model."""
        structure, _ = state.structure_and_size()
        if structure not in self._in_turn:
            one = jax.eval_shape(lambda *args: take_member(args, (0, *axes), 0), state.arrays(), *arguments)
            jaxpr = jax.make_jaxpr(partial(self._member_step, structure))(*one)
            self._in_turn[structure] = in_turn(jaxpr.jaxpr, jax.default_backend())
        return "loop" if self._in_turn[structure] else "vmap"

    def _step_of_all(
        self, structure: Structure, execution: Execution, axes: Static, arrays: Arrays, step: jax.Array, batch: Any
    ) -> tuple[Arrays, jax.Array, dict[str, Any]]:
        size = jax.tree.leaves(arrays)[0].shape[0]
        of_member = partial(self._member_step, structure)
        mapped = over_members(of_member, execution, (0, *axes.value), size)
        arrays, metrics = mapped(arrays, *batch)
        return arrays, step + 1, metrics

    def _step_of_member(self, structure: Structure, axes: Static, arrays: Arrays, i: jax.Array, batch: Any) -> Any:
        return self._member_step(structure, arrays, *take_member(batch, axes.value, i))

    def _member_step(self, structure: Structure, arrays: Arrays, *batch: Any) -> tuple[Arrays, dict[str, Any]]:
        """One member's new arrays, and its metrics: what a strategy executes."""
        trainable, rest, opt_state = arrays
        model = structure.merge(trainable, rest)
        value, gradients = _checked_pair(self._gradients(model, *batch))
        metrics = _metrics(value)
        gradients = _checked_gradients(gradients, trainable)
        after = split(model)
        _check_structure(Parts(structure, trainable, rest), after)

        def loss_at(trainable: Any) -> jax.Array:
            return _metrics(self._loss(structure.merge(trainable, rest), *batch))["loss"]

        trainable, opt_state = self._optimizer.update(
            gradients, opt_state, after.trainable, value=metrics["loss"], grad=gradients, value_fn=loss_at
        )
        return (trainable, after.rest, opt_state), metrics


@jax.jit
def _together(step: jax.Array, metrics: list[dict[str, Any]]) -> tuple[jax.Array, dict[str, Any]]:
    """The number of the next step, and the metrics of all members."""
    return step + 1, stack(metrics)


def _value_and_grad(loss: Callable[..., Any]) -> Callable[..., Any]:
    """As `value_and_grad`, of a loss that may return a dict beside its scalar, or not."""

    def with_aux(*args: Any) -> tuple[Any, Any]:
        out = loss(*args)
        metrics = _metrics(out)
        return metrics.pop("loss"), metrics

    return value_and_grad(with_aux, has_aux=True)


def _checked_pair(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise TypeError(
            "Trainer: grad_fn(loss)(model, *batch) must return a pair (value, gradients), but it returned "
            f"{type(result).__name__}."
        )
    return tuple(result)


def _metrics(value: Any) -> dict[str, Any]:
    """The loss and what is reported beside it."""
    loss, aux = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, {})
    if isinstance(loss, (tuple, list, dict)) or jnp.shape(loss) != ():
        raise TypeError(
            "Trainer: loss must return a scalar, or a pair of a scalar and a dict, but it returned "
            f"{jax.tree.map(jnp.shape, loss)} (shapes); reduce it, such as by its mean."
        )
    if not isinstance(aux, Mapping):
        raise TypeError(f"Trainer: beside its scalar, loss must return a dict, but it returned {describe(aux)}.")
    for name in ("loss", "step", "member"):
        if name in aux:
            raise ValueError(
                f'Trainer: loss reports something called "{name}", a name that the history uses; rename it.'
            )
    return {"loss": loss, **aux}


def _checked_gradients(gradients: Any, trainable: Any) -> Any:
    """The gradients as a tree like the trainable arrays'; refuses others."""
    gradients = to_pure(gradients)
    expected, found = named_arrays(trainable), named_arrays(gradients)
    for path in [*expected, *found]:
        if path not in found or path not in expected or jnp.shape(found[path]) != jnp.shape(expected[path]):
            say = [describe(tree[path]) if path in tree else "nothing" for tree in (found, expected)]
            raise ValueError(
                f"Trainer: grad_fn gives {say[0]} for the parameter `{path}`, which is {say[1]}; it must return "
                "gradients like those of plurax.transforms.value_and_grad."
            )
    return gradients


def _check_structure(before: Parts, after: Parts) -> None:
    if before.structure != after.structure:
        raise ValueError(
            f"Trainer: loss changes the structure of the model (`{before.changes(after)[0]}`), but only the values of "
            "its variables can be carried along; do not add variables in it (such as by sow), nor change attributes."
        )
    then, now = before.arrays(), after.arrays()
    for path in then:
        if then[path].shape != now[path].shape or then[path].dtype != now[path].dtype:
            raise ValueError(
                f"Trainer: loss turns the variable `{path}` of the model, {describe(then[path])}, into "
                f"{describe(now[path])}; keep its shape and dtype."
            )


def _check_state(api: str, state: Any) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(f"{api}: state must be a TrainState from Trainer.init, but got {type(state).__name__}.")
