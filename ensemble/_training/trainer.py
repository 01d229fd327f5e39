"""`Trainer`, the public class: check its arguments, create the step and the state, and run them."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ...transforms._core.arguments import check_callable, check_choice, check_count, check_number, describe
from ...transforms._core.axes import Axes, check_in_axes
from ...transforms._core.memory import check_budget
from ...transforms._runs.checkpoint_clock import CHECKPOINT_EVERY
from ...transforms._runs.data import as_arrays
from ...transforms._runs.history import History
from ...transforms._runs.loop import check_options, iterate, total_steps
from ...transforms._runs.processes import Group
from ...transforms._runs.run_directory import Resume, RunDirectory
from .._execution.autotune import Tuning
from .._execution.forms import stacked
from .._execution.stepper import Stepper
from .._members.ensemble import Ensemble, M
from .._members.rows import copied_rows
from .._members.sharding import Layout, constrain
from .._members.strategy import Execution, Strategy, check_execution
from .._step.loss import MemberLoss
from .._step.member_status import MemberStatus
from .._step.member_step import MemberStep
from .._step.optimizer import MemberOptimizer, check_size
from .._step.shared_step import SharedStep
from .._step.state import TrainState, check_state
from ._data.batches import check_source, in_epochs
from .callbacks import Callback
from .early_stopping import EarlyStopping, Restarts, Watch
from .fit import check_watched, intervals, train
from .identity import identify
from .validation import LossOfMembers, Metrics, Validation

Nonfinite = Literal["freeze", "ignore"]


class Trainer:
    """Train all members of an ensemble, on shared batches or on one batch per member.

    `init` creates a `TrainState`, `step` takes one step and `fit` many. `state.ensemble` is the trained ensemble;
    `state.standing.stopped` shows which members have stopped.

    Args:
      loss: `loss(model, *batch)` returns a scalar, or a scalar and a dict of arrays to report. `model` is one member,
        an ordinary module. Changes to its state (BatchNorm statistics, dropout keys) are kept.
      optimizer: an optax factory, such as `optax.adam`, or a ready `GradientTransformation` or `optax.MultiSteps` that
        all members share. `optax.contrib.sam` works in both modes. With `optax.lookahead` the members hold the fast
        parameters, and `state.opt_state.slow` the slow ones, in the structure of `ensemble.trainable`.
      hyperparams: arguments of the factory and keyword-only arguments of the loss, by name. A list or 1-D array gives
        one value per member; any other value is shared. For the factory, a list may contain schedules (functions of the
        step). `init` copies the values per member into the state (`state.opt_state.hyperparams`,
        `state.standing.hyperparams`), where each step reads them. `grid` makes the lists for all combinations.
      in_axes: for the batch: None (all members share it), 0 (member i takes slice i of every array), or a tuple with
        one entry for each element of the batch.
      grad_fn: replaces `plurax.transforms.value_and_grad`: `grad_fn(loss)(model, *batch)` returns `(value, gradients)`,
        where `value` is the output of `loss` and the gradients have the structure that `value_and_grad` returns.
        Changes to the state of the model are kept.
      strategy: how the members are executed; it does not change what they compute. "vmap": batched operations; "map": a
        compiled loop; "unroll": one program with a copy of the operations for each member; "loop": a Python loop over
        the compiled step of one member. "auto" starts with a rule: "vmap", or, for convolutions on a CPU, "vmap" or
        "map" with the convolutions as matrix products. It then tries the others, and "vmap" in chunks, on steps of the
        run, as far as compiling and trying them take at most a tenth of its time, and uses the fastest. `explain`
        prints what was tried, and what was not. An `Execution`, such as `trainer.explain().chosen`, is used as it is.
        Inside a trace, such as `jax.jit`, "loop" is executed as "unroll", and "auto" uses what was found before, or
        the rule.
      chunk_size: the number of members that "vmap" executes at a time; None executes all at once. With it, "auto"
        uses "vmap".
      memory_budget: the maximum size of the temporaries of the compiled step, in bytes or as a string such as "512MiB".
        "auto" drops candidates that do not fit; "vmap" uses the largest chunk that fits.
      mesh: a `jax.sharding.Mesh` with an axis "ensemble", over which the members are distributed; each device holds
        only its own members. With an axis "data", every array of the batch is split too, along its first axis that does
        not index members; losses, gradients and other reported scalars are averaged over the parts. Therefore the loss
        must be a mean over the examples. The first batch is checked for this, unless the loss draws random numbers.
        An axis "model" splits the arrays of each member, and those that members share, but for vectors, along their
        longest axis that it divides; the compiler decides what its devices exchange.
        A mesh may span several processes, each of which passes the same batches. "loop" is executed as "unroll". With a
        `jax.sharding.AbstractMesh`, calls can only be traced, as for `program.compile_for`.
      tune_seconds: how long the steps that "auto" takes with slower candidates may take in total beyond the time of the
        same steps with the best, in seconds. 0 tries nothing.
      tune_cache: a directory in which "auto" stores what it has found, so that the next process starts with the fastest
        execution; None keeps it only in this process.
      nonfinite: how a member is handled whose loss or gradients are not finite (a sum of gradients that overflows
        counts as not finite). "freeze": the member keeps its state from before the step and stops training;
        `state.standing` records it, and `fit` warns. If gradients are finite but the updated parameters are not, as
        with an infinite learning rate, the next loss is almost always not finite; `fit` also checks the parameters at
        the end. "ignore": the member continues, for optimizers that handle this themselves (`optax.apply_if_finite`,
        loss scaling). For shared parameters the gradients of such a member do not count.
      shared_optimizer: an optax transformation for parameters that all members share (`Ensemble.stack(shared=)`), which
        train by the mean of the members' gradients, all of which are in memory together; None for that of the members,
        if it has no hyperparameters per member. "loop" is then executed as "unroll".

    Raises:
      TypeError: `loss`, `grad_fn` or `optimizer` is not callable; `hyperparams` is not a dict, or a value per member is
        not a number (or schedule); `in_axes` is not an int, None, a tuple or a list; `chunk_size` is not an int; `mesh`
        is not a mesh, `tune_seconds` not a number, `tune_cache` not a path, `memory_budget` not a size.
      ValueError: the factory does not take a hyperparameter; the factory or the loss requires one that is not given;
        both take one of the same name; hyperparameters are given for a ready optimizer; `strategy` or `nonfinite` is
        unknown, or an `Execution` does not exist; `chunk_size` is below 1; `chunk_size` or `memory_budget` is given
        with a strategy other than "vmap" or "auto", or both are given; `memory_budget` cannot be parsed or is below 1
        byte; `tune_seconds` is below 0; `tune_cache` is a file; `mesh` has other axes, or has an axis "data" and
        `grad_fn` is given.

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
        strategy: Strategy | Execution = "auto",
        chunk_size: int | None = None,
        memory_budget: int | str | None = None,
        mesh: Any = None,
        tune_seconds: float = 5.0,
        tune_cache: str | os.PathLike[str] | None = None,
        nonfinite: Nonfinite = "freeze",
        shared_optimizer: Any = None,
    ) -> None:
        check_callable("Trainer", loss, "loss")
        if grad_fn is not None:
            check_callable("Trainer", grad_fn, "grad_fn")
        self._in_axes = check_in_axes("Trainer", in_axes)
        if isinstance(strategy, Execution):
            check_execution("Trainer: strategy", strategy)
        else:
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
            raise ValueError('Trainer: grad_fn cannot be used with a mesh axis "data"; leave one of them out.')
        # The loss takes the hyperparameters that it names; the factory gets the others and raises for unknown names.
        member_loss = MemberLoss(loss, hyperparams, optimizer)
        self._optimizer = MemberOptimizer(optimizer, member_loss.others)
        check_choice("Trainer", "nonfinite", nonfinite, get_args(Nonfinite))
        self._step = MemberStep(member_loss, grad_fn, self._optimizer, nonfinite == "freeze")
        cache = None if tune_cache is None else Path(os.path.realpath(tune_cache))
        chunk_size = None if chunk_size is None else int(chunk_size)  # checkpoints hold it as JSON
        asked = strategy if isinstance(strategy, Execution) else Execution(strategy, chunk_size)
        self._latest: Callable[[], Any] = lambda: None  # a weak reference to the state that `step` returned last
        self._losses = LossOfMembers(member_loss, self._layout)
        steps = self._step, SharedStep(shared_optimizer, self._optimizer)
        self._init_shared = steps[1].init
        self._stepper = Stepper(*steps, self._layout, in_axes, asked, budget, tune_seconds, cache)

    def init(self, ensemble: Ensemble[M]) -> TrainState[M]:
        """Return the state before the first step. It is a copy, so the ensemble stays unchanged.

        Args:
          ensemble: the models to train.

        Returns:
          A `TrainState` at step 0.

        Raises:
          TypeError: `ensemble` is not an `Ensemble`.
          ValueError: a list of hyperparameters does not have one value for each member; the members have no trainable
            arrays; `shared_optimizer` is missing, or has nothing to train.
        """
        if not isinstance(ensemble, Ensemble):
            remedy = "make one with Ensemble.stack([...]), or of models that are not of NNX with Ensemble.from_apply"
            if isinstance(ensemble, TrainState):
                remedy = "pass state.ensemble"
            raise TypeError(f"Trainer.init: needs an Ensemble, but got {type(ensemble).__name__}; {remedy}.")
        if not jax.tree.leaves(ensemble.trainable):
            remedy = "give them nnx.Param variables, or a `trainable` rule that matches"
            raise ValueError(f"Trainer.init: the members have no trainable arrays; {remedy}.")
        size, step = len(ensemble), np.zeros((), np.int32)
        schedules = {name: x.which for name, x in self._optimizer.schedules.items()}
        of_loss = {name: check_size(name, x, size) for name, x in self._step.loss.per_member.items()}
        standing = MemberStatus._first(size, of_loss, schedules)
        shared = self._init_shared(ensemble.shared)
        if self._layout is None:
            arrays = ensemble.trainable, ensemble.rest, self._optimizer.init(ensemble.trainable, size), standing
            # A copy: a step that donates the memory of a state must not donate the user's ensemble.
            return copied_rows(TrainState._of_arrays(ensemble.structure, arrays, jnp.asarray(step), shared))
        layout = self._layout
        with layout.context():
            # Placed first, so that arrays computed from them are on the same devices.
            arrays = copied_rows(layout.place((ensemble.trainable, ensemble.rest)))
            # Compiled with its sharding: each device creates the optimizer state of its own members, without
            # communication.
            init = jax.jit(lambda trainable: constrain(self._optimizer.init(trainable, size), layout))
            arrays = *arrays, init(arrays[0]), layout.place(standing)
            step, shared = copied_rows((layout.copy(step), layout.place_shared(shared)))
            return TrainState._of_arrays(ensemble.structure, arrays, step, shared)

    def step(self, state: TrainState[M], batch: Any) -> tuple[TrainState[M], dict[str, jax.Array]]:
        """Take one step of every member.

        Args:
          state: from `init` or an earlier step; it stays usable.
          batch: the arguments of the loss after the model. A tuple or list is unpacked; anything else is one argument.
            Arrays of other libraries, such as tensors of PyTorch on the CPU, are converted by NumPy.

        Returns:
          The new state and the metrics: "loss" of shape (size,), and the values that the loss reports, with the members
          along axis 0. Members that have stopped are still evaluated, but keep their state.

        Raises:
          TypeError: `state` is not a `TrainState`; the batch holds something other than numbers, arrays of numbers or
            None; the loss returns something other than a scalar, or a scalar and a dict; `grad_fn` returns no pair.
          ValueError: `state` is from another optimizer (one whose state has the same structure and shapes cannot be
            distinguished); the batch does not match `in_axes`; the gradients differ from the parameters in structure or
            shape; the loss changes the structure of the model, or the shape or dtype of a variable; the loss reports a
            value under a reserved name, such as "loss" or "step"; with "auto" or `memory_budget`, no execution fits
            into the budget; the mesh has an axis "data", and the batch does not split evenly over it, the loss is not a
            mean over the examples, or the optimizer evaluates the loss again (`optax.lbfgs`).
        """
        state, last = state._going_on() if isinstance(state, TrainState) else state, self._stepper.last
        again = None if last is None else last.again(state, batch)
        if again is None:
            self._check_state("Trainer.step", state)
            new, metrics, _ = self._stepper.advance(state, as_arrays("Trainer.step", "batch", batch))
            again = stacked(new), metrics
        after, metrics = again
        self._latest = weakref.ref(after)
        metrics.pop("stopped", None)  # for `fit`; users read `state.standing`
        return after, metrics

    def fit(
        self,
        state: TrainState[M],
        batches: Iterable[Any],
        *,
        steps: int | None = None,
        epochs: int | None = None,
        steps_per_call: int = 1,
        progress: bool = True,
        checkpoint_dir: Any = None,
        checkpoint_every: int | timedelta | None = CHECKPOINT_EVERY,
        checkpoint_keep: int = 2,
        resume: Resume = "auto",
        history_every: int = 1,
        validation: Any = None,
        validate_every: int | None = None,
        metrics: Metrics | None = None,
        early_stopping: EarlyStopping | None = None,
        restarts: Restarts | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> tuple[TrainState[M], History]:
        """Take one step per batch, with a progress bar, a history, and checkpoints to resume from.

        Args:
          state: the starting state; it stays usable.
          batches: an iterable of batches: `Batches`, a list, or a data loader. It is never rewound, unless `epochs` is
            given, and only the batches that are used are taken from it.
          steps: the number of further steps; None trains until the batches end. A run that ends earlier warns, unless
            `early_stopping` ended it, and so does a run that takes no step.
          epochs: instead of `steps`, the number of passes over `batches`, which must be `Batches` without a number of
            epochs, or iterable several times, as a list or a data loader. Counted from `state`, as `steps`.
          steps_per_call: the number of steps that one program takes, as a loop over as many batches, which saves time
            between short steps. Results agree up to rounding. `checkpoint_every`, `validate_every`, the `every` of
            `early_stopping` and `restarts` and, if a callback takes the state, `history_every` keep their meaning: the
            largest number that divides all of them is used. Steps before a multiple of it after a resumption, the last
            ones, and batches that differ in shape are taken one by one.
          progress: whether to show a bar with the range of the loss over the members and the steps per second.
          checkpoint_dir: a directory for checkpoints (`step_00000100`, ...), created if missing, and locked while the
            run lasts. If it holds a complete checkpoint of this run later than `state`, training resumes from the
            newest one and skips one batch for each step by which it is ahead, or, if their iterator has `get_state` and
            `set_state`, as Grain's, goes on with the next one; `steps` still counts from `state`. Damaged checkpoints
            are skipped with a warning, and unfinished ones of a killed run removed. Other files in the directory are
            left alone. A final checkpoint is always written. One that cannot be written is warned of.
          checkpoint_every: steps (an int) or time (a `datetime.timedelta`) between checkpoints; None writes only the
            final one. By time, one is written between two steps, or calls of `steps_per_call`, unless all of them
            would then have taken more than 5 % of the time of the run, as the last one took. With several processes,
            the clock of the first decides.
          checkpoint_keep: the number of newest checkpoints to keep.
          resume: "auto" raises if the newest checkpoint is of another run: if the run did not start from `state` (to
            the bit), or has another optimizer or other hyperparameters, another program of a step (the loss, `grad_fn`,
            a ready optimizer; not compared after an update of JAX, Flax or optax), or a `Batches` with another key,
            other settings or other data. (Of arrays above 64 MiB evenly spaced examples are compared; of other
            iterables, nothing.) True goes on all the same, with the hyperparameters of this trainer. False renames all
            checkpoints in the directory, and starts from `state`.
          history_every: steps between rows of the history.
          validation: data on which the loss of each member is evaluated, in evaluation mode as by `predict` (members of
            `from_apply` have no modes) and with the member's hyperparameters of the loss; it changes no state. One
            batch: the arguments of the loss after the model, as a tuple, or anything else for one argument. Or several:
            a list of batches, `Batches` with `epochs=1`, or a data loader. All members share the data; where `in_axes`
            maps an array of the batches, an array with as many axes has a slice for each member.
          validate_every: steps between validations, which follow each step divisible by it; with `epochs`, None
            validates after each epoch. The history has the loss in the rows of that step as "validation_loss".
          metrics: `metrics(ensemble, *batch)` returns a dict of further values of a validation, one for each member,
            (size,), or one for the ensemble, (). `ensemble` has all members in evaluation mode, those that have stopped
            too; `batch` is a batch of `validation`. They are in the history as "validation_" and their name. Of several
            batches, as of the loss, the mean is recorded, weighted by their examples, the length of their arrays; so
            pass one batch for a metric such as the AUROC that is no mean over the examples.
          early_stopping: an `EarlyStopping`, which stops each member separately. The run ends when all have stopped.
            It may watch a value of the validation by its name; those of a function are in the history as "validation".
          restarts: a `Restarts`, which restores members that were frozen because a value was not finite.
          callbacks: a list of functions of the step number and its metrics, called for each recorded step; see
            `Callback`. One with a parameter `state` can also get the state after that step.

        Returns:
          The state after the last step, and the history: a list of dicts, one for each recorded step and member, with
          "step", "member", the hyperparameters that differ between members, "loss", and the scalars that the loss
          reports. A member that has stopped has no further rows. After a resumption the history includes the earlier
          steps of the run. Ctrl-C ends training after the current step and returns the same two values; a second Ctrl-C
          interrupts immediately.

        Raises:
          TypeError: as for `step`; `batches` is not iterable, or is a data set (an array, a dict, a tuple of arrays, a
            PyTorch `Dataset`); `validation`, or `batches` with `epochs`, can be iterated only once; a count is not an
            int; `early_stopping` or `restarts` has another type; `metrics` is not a function, or does not return a
            dict; `callbacks` is not a list of functions; the iterator's `get_state` returns no value for JSON.
          Preempted: SIGTERM came, with a `checkpoint_dir` or several processes; the step is done, and its checkpoint
            written. All processes stop before the same step.
          ValueError: as for `step`; `batches` are `Batches` that never end, without `steps`, `epochs` or
            `early_stopping`; `epochs` is given with `steps`, or for `Batches` with a number of epochs; `validation` is
            a list of arrays, has no batches or never ends, or does not match `in_axes`; `validate_every` or `metrics`
            is given without it, or `validate_every` is missing; `metrics` returns another shape, or a name that is in
            use; `early_stopping` watches a name that does not exist; `batches`
            have `members` though `in_axes` is not 0, or the reverse; a count is too small; `checkpoint_every` without
            `checkpoint_dir`; `restarts` without `nonfinite="freeze"`; `early_stopping.evaluate` does not return one
            number for each member; the newest checkpoint is of another run (see `resume`), or is later than the last
            step requested; `batches` has fewer batches than the checkpoint has used; `resume` is unknown, or is given
            without `checkpoint_dir`.
          OSError: `checkpoint_dir` cannot be created or written, another run is writing to it, or its disk has no room
            for a checkpoint; raised before the first step.

        Cost:
          The state is copied once; after that, each step reuses the memory of the previous state. With
          `checkpoint_dir`, a step is traced once more, and about one second for each GiB of `state` identifies the run.
          With `steps_per_call`, as many batches are in memory (twice, unless they come from `Batches`), and up to as
          many are taken before a stop is noticed. A validation evaluates the losses of all members as the last step was
          executed, without gradients. With a callback that takes the state, the device waits for the host after each
          recorded step.
        """
        self._check_state("Trainer.fit", state)
        check_options("Trainer.fit", steps, checkpoint_dir, checkpoint_every, checkpoint_keep, history_every, resume)
        check_count("Trainer.fit", "steps_per_call", steps_per_call)
        ends = any(x is not None for x in (steps, epochs, early_stopping))
        check_source(batches, self._in_axes, state._size, ends)
        passes, steps, per_epoch = in_epochs(batches, epochs, steps)
        source, group, start = iterate("Trainer.fit", passes), Group.of(state), int(state.step)
        checked = Validation.of(validation, validate_every, metrics, self._losses, self._in_axes, per_epoch, start)
        check_watched(self._stepper, early_stopping, restarts, checked, callbacks)
        watch = Watch(early_stopping, restarts, state, checked, progress and group.is_first)
        together = math.gcd(steps_per_call, *intervals(watch, checkpoint_every, history_every, callbacks))
        total, target = total_steps(passes, steps), None if steps is None else start + steps
        directory = RunDirectory.open("Trainer.fit", checkpoint_dir, checkpoint_keep, group, resume, start)
        with directory as store:
            identity = None if store is None else identify(store, state, batches)
            options = checkpoint_every, history_every, callbacks, together
            return train(self._stepper, state, source, total, target, watch, store, identity, *options)

    def _check_state(self, api: str, state: Any) -> None:
        """Raise if `state` is not a training state, or its optimizer state is from another optimizer."""
        check_state(api, state)
        # Comparing hundreds of arrays takes a millisecond, so a state from the previous step is not compared.
        if self._latest() is not state:
            trainable, _, opt_state, _ = state._member()
            self._optimizer.check_state(api, opt_state, trainable)

    def explain(self) -> Tuning | None:
        """Print what "auto" uses, what it has compared, and what it has not tried, with the reasons.

        Returns:
          The same as an object with `candidates`, `chosen`, `where` and `seconds`; None if nothing is tried, for
          example with a fixed strategy. `Trainer(..., strategy=found.chosen)` uses the chosen execution from the first
          step on, and tries no other.
        """
        nothing = (
            'Nothing is tried: strategy="auto" needs a step that is not traced, tune_seconds above 0, and a mesh '
            "within one process."
        )
        search = self._stepper.search
        found = None if search is None else search.known
        print(found or nothing)  # noqa: T201 (printing is the purpose of this method)
        return found
