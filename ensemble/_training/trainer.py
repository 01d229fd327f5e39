"""`Trainer`: the public class. Checks its arguments, makes the step and the state, and passes both on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ...transforms._core.arguments import check_callable, check_choice, check_count, check_number, describe
from ...transforms._core.axes import Axes, check_in_axes
from ...transforms._core.memory import check_budget
from ...transforms._runs.history import History, Recorder
from ...transforms._runs.loop import check_options, iterate, run, skip, total_steps
from ...transforms._runs.processes import Group
from ...transforms._runs.run_directory import RunDirectory
from .._execution.autotune import Tuning
from .._execution.forms import State, stacked
from .._execution.stepper import Stepper
from .._members.ensemble import Ensemble, M
from .._members.sharding import Layout
from .._members.strategy import Execution, Strategy
from .._step.loss import MemberLoss
from .._step.member_status import MemberStatus
from .._step.member_step import MemberStep
from .._step.optimizer import MemberOptimizer, check_size
from .._step.state import TrainState, check_state
from .early_stopping import EarlyStopping, Restarts, Watch
from .fit import Callback, Run, check_watched, columns, loss_range, resumed

Nonfinite = Literal["freeze", "ignore"]


class Trainer:
    """Train all members of an ensemble, on batches of their own or on the same ones.

    `init` makes a `TrainState`, `step` takes one step and `fit` many. `state.ensemble` is the trained ensemble,
    `state.standing.stopped` shows which members have stopped.

    Args:
      loss: `loss(model, *batch)` returns a scalar, or a scalar and a dict of arrays to report. `model` is one member,
        an ordinary module. What it changes of its own state is carried along.
      optimizer: an optax factory, such as `optax.adam`, or a ready `GradientTransformation` that all members share.
      hyperparams: arguments of the factory, and keyword-only arguments of the loss: a list or 1-D array holds one value
        per member, anything else is shared. Schedules (functions of the step) may stand in a list for the factory. The
        values per member live in the state (`state.opt_state.hyperparams`, `state.standing.hyperparams`), where `init`
        puts them. `grid` makes lists for all combinations.
      in_axes: for the batch: None (all members share it), 0 (member i takes slice i of every array), or a tuple with
        one entry for each element of the batch.
      grad_fn: replaces `plurax.transforms.value_and_grad`: `grad_fn(loss)(model, *batch)` returns `(value, gradients)`,
        where value is what `loss` returns and the gradients are like those of `value_and_grad`. What it assigns to
        the model is kept.
      strategy: how the members are executed, never what they compute. "vmap": batched operations; "map": a compiled
        loop; "unroll": one program with a copy of the operations for each member; "loop": a Python loop over the
        compiled step of one member. "auto" compiles these, "vmap" also in chunks, each also with convolutions
        rewritten as matrix products, measures them at the first step of a kind, and takes the quickest; `explain`
        tells. Where a step is traced, "loop" is executed as "unroll", and "auto" as what was found before, or else by
        rule.
      chunk_size: how many members "vmap" executes at a time; None executes all at once.
      memory_budget: the most that the temporaries of the compiled step may take: bytes, or a string such as "512MiB".
        "auto" drops what does not fit, "vmap" takes the largest chunk that does.
      mesh: a `jax.sharding.Mesh` with an axis "ensemble", over which the members are spread, and perhaps an axis
        "data", over which every array of the batch is split along its first axis that is not the members'. No device
        sees the members of another. With "data" the loss must be a mean over the examples: the losses and gradients of
        the parts are averaged, and so are other scalars that the loss reports; what the first batch shows to be no
        mean is refused, unless the loss draws random numbers. A mesh may span several processes; then each passes the
        same batches. "loop" is executed as "unroll".
      tune_seconds: how long "auto" may measure, compiling not counted. 0 measures nothing and uses a rule: "loop" on
        a CPU where the step contains a convolution, else "vmap".
      tune_cache: a directory in which "auto" keeps what it has found, for later processes; None keeps it in this one.
      nonfinite: what happens to a member when its loss or its gradients are not finite, or the sums of the latter
        overflow. "freeze": it stays as it was before that step, and no longer trains; `state.standing` tells, and `fit`
        warns. (Where gradients are finite but new parameters are not, as with an infinite learning rate, the next loss
        nearly always tells; of what is left at the end `fit` warns.) "ignore": it goes on, which is for optimisers that
        take care of that (`optax.apply_if_finite`, scaled losses).

    Raises:
      TypeError: `loss`, `grad_fn` or `optimizer` cannot be called; hyperparameters that are not numbers; `mesh` is not
        a mesh, `tune_seconds` not a number, `tune_cache` not a path, `memory_budget` not a size.
      ValueError: a hyperparameter that the factory does not take, or lacks; hyperparameters for a ready optimiser; an
        unknown strategy; `chunk_size` below 1; `chunk_size` or `memory_budget` with a strategy other than "vmap" and
        "auto", or both at once; `tune_seconds` below 0; `mesh` has other axes, or an axis "data" together with a
        `grad_fn`.

    Source:
      MindSpore's ensemble training with `vmap` over a `CellList`; `torch.func.stack_module_state`.

    Examples:
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
        strategy: Strategy = "auto",
        chunk_size: int | None = None,
        memory_budget: int | str | None = None,
        mesh: Any = None,
        tune_seconds: float = 5.0,
        tune_cache: str | os.PathLike[str] | None = None,
        nonfinite: Nonfinite = "freeze",
    ) -> None:
        check_callable("Trainer", loss, "loss")
        if grad_fn is not None:
            check_callable("Trainer", grad_fn, "grad_fn")
        check_in_axes("Trainer", in_axes)
        check_choice("Trainer", "strategy", strategy, get_args(Strategy))
        check_count("Trainer", "chunk_size", chunk_size, optional=True)
        budget = check_budget("Trainer", memory_budget, chunk_size)
        for name, value in (("chunk_size", chunk_size), ("memory_budget", memory_budget)):
            if value is not None and strategy not in ("auto", "vmap"):
                raise ValueError(f'Trainer: {name} needs strategy="vmap" or "auto", but the strategy is {strategy!r}.')
        tune_seconds = check_number("Trainer", "tune_seconds", tune_seconds, lambda x: x >= 0, "at least 0")
        if tune_cache is not None and not isinstance(tune_cache, (str, os.PathLike)):
            raise TypeError(f"Trainer: tune_cache must be the path of a directory, but got {describe(tune_cache)}.")
        if tune_cache is not None and Path(tune_cache).exists() and not Path(tune_cache).is_dir():
            raise ValueError(f"Trainer: tune_cache must be a directory, but {str(tune_cache)!r} is a file.")
        self._layout = None if mesh is None else Layout.of("Trainer", mesh)
        if self._layout is not None and self._layout.shards > 1 and grad_fn is not None:
            raise ValueError('Trainer: grad_fn sees parts of the batch on a mesh with "data"; leave one of them out.')
        # The loss takes its own hyperparameters first; the factory gets the others, and refuses those it does not know.
        member_loss = MemberLoss(loss, hyperparams, optimizer)
        self._optimizer = MemberOptimizer(optimizer, member_loss.others)
        check_choice("Trainer", "nonfinite", nonfinite, get_args(Nonfinite))
        self._step = MemberStep(member_loss, grad_fn, self._optimizer, nonfinite == "freeze")
        cache = None if tune_cache is None else Path(tune_cache).resolve()
        asked = Execution(strategy, None if chunk_size is None else int(chunk_size))  # checkpoints hold it as JSON
        self._stepper = Stepper(self._step, self._layout, in_axes, asked, budget, tune_seconds, cache)

    def init(self, ensemble: Ensemble[M]) -> TrainState[M]:
        """Return the state before the first step; a copy, so the ensemble stays as it is.

        Args:
          ensemble: the models to train.

        Returns:
          A `TrainState` at step 0.

        Raises:
          TypeError: not an `Ensemble`.
          ValueError: a list of hyperparameters does not have one value for each member; nothing trains.
        """
        if not isinstance(ensemble, Ensemble):
            got = type(ensemble).__name__
            raise TypeError(f"Trainer.init: needs an Ensemble, but got {got}; make one with Ensemble.stack([...]).")
        if not jax.tree.leaves(ensemble.trainable):
            remedy = "give them nnx.Param variables, or a `trainable` rule that matches"
            raise ValueError(f"Trainer.init: the members have no trainable arrays; {remedy}.")
        size, step = len(ensemble), np.zeros((), np.int32)
        schedules = {name: x.which for name, x in self._optimizer.schedules.items()}
        of_loss = {name: check_size(name, x, size) for name, x in self._step.loss.per_member.items()}
        standing = MemberStatus._first(size, of_loss, schedules)
        if self._layout is None:
            opt_state = self._optimizer.init(ensemble.trainable, size)
            # A copy: steps that take over the memory of a state must not take that of the user's ensemble.
            return jax.tree.map(jnp.copy, TrainState(ensemble, opt_state, jnp.asarray(step), standing))
        layout = self._layout
        with layout.context():
            # Placed first, so that what is made of them is made where it belongs.
            arrays = jax.tree.map(jnp.copy, layout.place((ensemble.trainable, ensemble.rest)))
            # Compiled with its sharding: each device makes the optimiser's state of its own members, and nothing is
            # sent.
            init = jax.jit(partial(self._optimizer.init, size=size), out_shardings=layout.of_members(size))
            arrays = *arrays, init(arrays[0]), layout.place(standing)
            return TrainState._of_arrays(ensemble.structure, arrays, layout.place_shared(step))

    def step(self, state: TrainState[M], batch: Any) -> tuple[TrainState[M], dict[str, jax.Array]]:
        """Take one step of every member.

        Args:
          state: from `init` or an earlier step; it stays usable.
          batch: a tuple or list is unpacked into the arguments of the loss after the model; anything else is one.

        Returns:
          The new state, and the metrics: "loss" of shape (size,), and what the loss reports, with the members along
          axis 0. Those of members that have stopped too: they are evaluated, but stay as they are.

        Raises:
          ValueError: the batch does not fit `in_axes`; gradients of another structure than the parameters; a member
            changes its structure; the loss reports something called "loss".
          TypeError: the loss returns something other than a scalar, or a scalar and a dict.
        """
        check_state("Trainer.step", state)
        # "stopped" is for `fit`; a user reads `state.standing`.
        after, metrics, _ = self._stepper.advance(state, batch)
        return stacked(after), {name: x for name, x in metrics.items() if name != "stopped"}

    def fit(
        self,
        state: TrainState[M],
        batches: Iterable[Any],
        *,
        steps: int | None = None,
        progress: bool = True,
        checkpoint_dir: Any = None,
        checkpoint_every: int | None = None,
        checkpoint_keep: int = 2,
        history_every: int = 1,
        early_stopping: EarlyStopping | None = None,
        restarts: Restarts | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> tuple[TrainState[M], History]:
        """Take a step for each batch, with a progress bar, a history, and checkpoints to go on from.

        Args:
          state: where to start; it stays usable.
          batches: an iterable of batches. It is never rewound, and no batch is taken from it that is not used.
          steps: how many further steps to take; None goes on until the batches end. Ending earlier warns, unless it is
            because of `early_stopping`.
          progress: whether to show a bar with the range of the loss over the members, and steps per second.
          checkpoint_dir: a directory for checkpoints, `step_00000100` and so on, made where it is missing. If it holds
            a whole checkpoint later than `state`, training goes on from the newest: as many batches as that is later
            are taken and skipped, and the steps count from `state`. A damaged one is passed over with a warning, and
            what a run that was killed had begun to write is removed. What else is in the directory stays as it is. A
            final checkpoint is always written.
          checkpoint_every: steps between checkpoints; None writes only the final one.
          checkpoint_keep: how many checkpoints to keep, the newest.
          history_every: steps between rows of the history.
          early_stopping: when members stop, each on its own; an `EarlyStopping`. The run ends when all have. What was
            evaluated is in the history as "validation".
          restarts: whether, and how often, members are put back that were frozen because something was not finite; a
            `Restarts`.
          callbacks: functions of a step's number and its metrics, called for each step of the history: see `Callback`.

        Returns:
          The state after the last step, and the history: a list of dicts, one for each recorded step and member, with
          "step", "member", the hyperparameters that differ between members, "loss" and what else the loss reports that
          is one number. A member that has stopped has no rows from there on. Ctrl-C ends training cleanly after the
          current step with the same results; a second one interrupts it. With `checkpoint_dir` the history has the
          earlier steps of the run too.

        Raises:
          TypeError, ValueError: as for `step`; `steps` or another count is not an int, or too small; a checkpoint of
            another ensemble, another factory or other hyperparameters, or later than the steps asked for. (Two ready
            optimisers with states of one structure cannot be distinguished.)
          OSError: `checkpoint_dir` cannot be made.

        Cost:
          The state is copied once, then each step takes over the memory of the one before.
        """
        check_state("Trainer.fit", state)
        check_options("Trainer.fit", steps, checkpoint_dir, checkpoint_every, checkpoint_keep, history_every)
        check_watched(self._stepper, early_stopping, restarts, callbacks)
        source = iterate("Trainer.fit", batches)
        start = int(state.step)
        target = None if steps is None else start + steps
        group, store = Group.of(state), None
        if checkpoint_dir is not None:
            store = RunDirectory.open("Trainer.fit", checkpoint_dir, checkpoint_keep, group)
        watch = Watch(early_stopping, restarts, state, progress and group.is_first)
        begin, recorded, execution, watched = resumed(store, state, self._stepper, watch)
        step = int(begin.step)
        if target is not None and step > target:
            newest = f"the newest checkpoint in {checkpoint_dir} is at step {step}"
            raise ValueError(f"Trainer.fit: {newest}, after step {target}; take more steps or use another directory.")
        if step > start:
            skip("Trainer.fit", source, step - start)
        recorder = Recorder(history_every, recorded)
        steps_of_run = Run(self._stepper, watch, recorder, store, callbacks, execution, step)
        first: State = watch.begin(jax.tree.map(jnp.copy, begin), watched)
        ended, _, interrupted = run(
            first,
            source,
            steps_of_run.advance,
            step=step,
            target=target,
            record=steps_of_run.record,
            say=lambda _, reported: loss_range(reported[0]),
            save=None if store is None else steps_of_run.save,
            checkpoint_every=checkpoint_every,
            # One bar for all processes; and Ctrl-C in one of several would leave the others waiting in a collective.
            progress=watch.aloud,
            interruptible=group.is_alone,
            done=step - start,
            total=total_steps(batches, steps),
            finished=lambda: watch.finished,
        )
        last = steps_of_run.finish(state, ended, target, interrupted)
        return last, recorder.rows(columns(self._stepper, begin))

    def explain(self) -> Tuning | None:
        """Print what "auto" has measured last, and what it chose.

        Returns:
          The same as an object; None where nothing was measured, such as under a strategy that was asked for.
        """
        nothing = (
            'Nothing was measured: strategy="auto" measures at the first step, unless that is traced, tune_seconds '
            "is 0, the loss has side effects, or the mesh spans several processes."
        )
        print(self._stepper.tuning or nothing)  # noqa: T201 (to print is what it is for)
        return self._stepper.tuning
