"""`DPSGD`: the public class, which combines clipped sums, noise, sampling and accounting."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from ..._calls.primals import trainable_of
from ..._core.arguments import check_callable, check_count, describe, is_int
from ..._core.compat import Tracer
from ..._core.memory import check_budget
from ..._core.prng import check_key
from ..._models.equinox import differentiated, held
from ..._models.split_model import Members, Model, is_members, models_of, split_tree
from ..._runs.checkpoint import Checkpoint
from ..._runs.history import History
from ..._runs.loop import check_options
from ..._runs.processes import Group
from ..._runs.run_directory import Resume, RunDirectory
from .._per_example.methods import Method, check_method
from . import settings
from .accounting import Accountant, Ledger
from .fit import last_step, report_end, train
from .sampling import Batch, SampledBatches, check_batch, padding_only
from .state import DPState, check_state, check_trainable, published, read_state, write_state
from .step import SAMPLING, PrivateStep


class DPSGD:
    """Train with differential privacy: clipping, Gaussian noise, Poisson sampling and privacy accounting in one class.

    `init` returns a state, `batches` samples, `step` takes one step, and `fit` runs the training loop. `state.model`
    is the trained model.

    Args:
      loss: `loss(model, *batch)` returns a real scalar. `model` is what was passed to `init`; the batch is a single
        example, as a batch of one, so a loss that averages over its batch needs no change.
      optimizer: an optax `GradientTransformation` or `MultiSteps` that uses only gradients and parameters.
      l2_clip_norm: the largest norm of an example's gradient, or a pytree of them, as for `clipped_grad`.
      noise_multiplier: standard deviation of the noise in units of `l2_clip_norm`, or of √ΣC² for several norms C. Zero
        is not private: ε is infinite.
      target_epsilon: the ε that `num_steps` steps may spend, instead of `noise_multiplier`, which is then computed.
      target_delta: the δ for which every ε is computed. A warning is issued if it exceeds `1 / num_examples`.
      num_examples: the number of examples in the data. It is assumed to be public.
      expected_batch_size: the mean size of a batch: each example takes part in a step with probability
        `expected_batch_size / num_examples`. The noisy sum is divided by it, never by the sampled size.
      num_steps: the number of steps of the run.
      method: as for `clipped_grad`: "auto", "vmap", "ghost" or "book_keeping"; they differ in time and memory only.
      accountant: "pld" (privacy loss distributions, tight) or "rdp" (Rényi divergences, fast).
      noise_strategy: None for independent noise in each step, or the coefficients of a banded Toeplitz strategy
        matrix, shape (bands,), such as `jax_privacy.matrix_factorization.toeplitz.optimize_banded_toeplitz` returns.
        The noise of `bands` consecutive steps then partly cancels; in return the examples are divided into `bands`
        groups, and the steps sample from the groups in turn.
      keep_batch_dim: whether the loss receives an example as a batch of one; with False, without that axis. Use False
        if axis 0 of the data indexes users, each with an axis of examples: then "example" means "user" here.
      microbatch_size: the number of examples to compute at a time, to save memory; None lets "auto" choose (any other
        method then computes the whole batch at once). Batches are padded to multiples of it.
      memory_budget: an alternative to `microbatch_size`, as for `clipped_grad`.
      has_aux: whether the loss returns `(scalar, aux)`; the metrics of a step then include the mean of each array in
        `aux`. They are neither clipped nor noised.
      automatic: γ for automatic clipping, as for `clipped_grad`.

    Attributes:
      noise_multiplier: as given, or computed from `target_epsilon`.
      ledger: the settings of a step that the accountant needs.
      target_delta, accountant, num_examples, num_steps: as given.

    Raises:
      TypeError, ValueError: both or neither of `noise_multiplier` and `target_epsilon`; a number out of range; an
        optimizer that is not an optax `GradientTransformation`; an unknown method or accountant.
      ModuleNotFoundError: the extra is missing: `pip install 'plurax[privacy]'`.

    Privacy:
      The parameters, and everything computed from them alone, are (ε, δ)-differentially private for adding or removing
      one example. `metrics` are not private. docs/dp-sgd.md states the guarantee exactly, and what it does not cover.

    Cost:
      A step is one compiled program: `clipped_grad`, one Gaussian number for each parameter, and the optimizer. With
      `target_epsilon` and "pld", computing the noise takes about ten seconds, more if ε is above ten.

    Source:
      Abadi et al. 2016, "Deep Learning with Differential Privacy" (algorithm 1); Choquette-Choo et al. 2023,
      "(Amplified) Banded Matrix Factorization". jax-privacy draws noise and samples; dp-accounting computes ε.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from plurax.transforms.privacy import DPSGD
      >>> def loss(w, x, y):
      ...     return jnp.mean((x @ w - y) ** 2)
      >>> dp = DPSGD(loss, optax.sgd(0.1), l2_clip_norm=1.0, noise_multiplier=2.0, target_delta=1e-5,
      ...            num_examples=1000, expected_batch_size=50, num_steps=100)
      >>> state = dp.init(jnp.zeros(3), key=jax.random.key(0))
      >>> for batch in dp.batches((jnp.ones((1000, 3)), jnp.zeros(1000)), state):
      ...     state, metrics = dp.step(state, batch)
      >>> round(dp.epsilon(state), 2)
      1.1
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        optimizer: Any,
        *,
        l2_clip_norm: Any,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        target_delta: float,
        num_examples: int,
        expected_batch_size: float,
        num_steps: int,
        method: Method = "auto",
        accountant: Accountant = "pld",
        noise_strategy: Any = None,
        keep_batch_dim: bool = True,
        microbatch_size: int | None = None,
        memory_budget: int | str | None = None,
        has_aux: bool = False,
        automatic: float | None = None,
    ) -> None:
        settings.check_extra()
        check_callable("DPSGD", loss, "loss")
        optimizer = settings.checked_optimizer(optimizer)
        check_method("DPSGD", method)
        check_count("DPSGD", "microbatch_size", microbatch_size, optional=True)
        check_budget("DPSGD", memory_budget, microbatch_size, "microbatch_size")
        check_count("DPSGD", "num_examples", num_examples)
        check_count("DPSGD", "num_steps", num_steps)
        clipping = settings.checked_clipping(l2_clip_norm, automatic)
        delta, strategy = settings.checked_delta(target_delta, num_examples), settings.checked_strategy(noise_strategy)
        size, probability = settings.checked_sampling(num_examples, expected_batch_size, len(strategy))
        # One cycle through all groups is accounted for as a single Poisson-sampled step: see `Ledger._rounds`.
        rounds = math.ceil(num_steps / len(strategy))
        sigma = settings.checked_noise(noise_multiplier, target_epsilon, probability, rounds, delta, accountant)
        self.ledger = Ledger(sigma, probability, clipping.l2_norm_bound(), size, strategy)
        self.noise_multiplier, self.target_delta = sigma, delta
        self.accountant, self.num_examples, self.num_steps = accountant, int(num_examples), int(num_steps)
        self._step = PrivateStep(
            loss, optimizer, self.ledger, clipping, method, keep_batch_dim, microbatch_size, memory_budget, has_aux
        )
        self._latest: Callable[[], Any] = lambda: None  # a weak reference to the state that `step` returned last
        self._compiled_step = jax.jit(self._step)
        self._donated_step = jax.jit(self._step, donate_argnums=0)  # reuses the memory of the state

    def init(self, model_or_params: Model, *, key: jax.Array) -> DPState[Model]:
        """Return the initial training state. It holds a copy of the model, which is not modified.

        Args:
          model_or_params: an NNX or Equinox module, a pytree of arrays or of modules, or an `Ensemble`. Arrays of real
            floating point train. The members of an ensemble see the same batches but draw independent noise: member i
            as a single model with the key `jax.random.fold_in(key, i)` ("rbg" keys draw other noise under `vmap`).
          key: a key such as `jax.random.key(seed)`, from which noise and batches are drawn. The guarantee depends on
            it: to publish a model, use a key that cannot be guessed, as docs/dp-sgd.md shows, and keep it secret.

        Raises:
          TypeError: `key` is not a key; parameters that are not real floating point; an optimizer that needs the loss.
          ValueError: no parameters; modules that share a variable; variables of Linen with "batch_stats".
        """
        check_key("DPSGD.init", key)
        members = len(model_or_params) if is_members(model_or_params) else None
        tree = held(split_tree(model_or_params))
        trainable = differentiated(trainable_of(tree), integers=True)
        check_trainable(tree, trainable, models_of(model_or_params))
        if members is None:
            opt_state, noise_state, mask_key = self._step.init(trainable, key)
        else:
            keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(members))
            opt_state, noise_state, mask_key = jax.vmap(self._step.init)(trainable, keys)
        # NumPy draws the batches on the host; its seed is the words of a key.
        seed = jax.random.key_data(jax.random.fold_in(key, SAMPLING)).astype(jnp.uint32)
        state: DPState[Model] = DPState(
            tree, opt_state, noise_state, mask_key, jnp.zeros((), jnp.int32), seed, self.ledger, members
        )
        # Make every array strongly typed, or a second program would be compiled for the second step.
        return jax.tree.map(lambda x: jnp.array(x, jnp.result_type(x)), state)

    def batches(self, data: Any, state: DPState | None = None, *, sizes: Sequence[int] | None = None) -> SampledBatches:
        """Return an iterator over the Poisson-sampled batches of the remaining steps.

        Each example takes part in each step independently of all others. Batches are padded to a few sizes, so that
        a step is compiled only a few times; padding contributes zero.

        Args:
          data: the examples, along axis 0 of arrays that NumPy can convert. A tuple or list is unpacked into the
            arguments of the loss after the model; anything else is one argument.
          state: the state to sample for: its seed, drawn from the key of `init`, determines the batches, and its step
            the first of them. None samples all steps from fresh operating-system entropy.
          sizes: the sizes to pad to, such as multiples of the number of devices; None for up to four sizes around the
            expected one. A larger batch is padded to a multiple of the largest size.

        Returns:
          An iterator over `Batch`es; a whole run has `num_steps` of them.

        Raises:
          TypeError: data that are not arrays; `state` is not a `DPState`.
          ValueError: the number of examples is not `num_examples`; a state made with other settings; sizes below 1, or
            not divisible by `microbatch_size`.

        Cost:
          The batches before the state's step are sampled again and discarded: 60 µs each for 256 of 60,000 examples,
          1 ms for 4,096 of a million.
        """
        if state is None:
            seed, start = np.random.SeedSequence().generate_state(8).tolist(), 0
        else:
            check_state("DPSGD.batches", state, self.ledger)
            seed, start = np.asarray(state.seed).tolist(), int(state.step)
        public = self.ledger, self.num_examples, self.num_steps
        return SampledBatches(data, *public, seed, start, sizes, self._step.microbatch_size or 1)

    def step(self, state: DPState[Model], batch: Batch) -> tuple[DPState[Model], dict[str, jax.Array]]:
        """Take one step: sum the clipped gradients of the batch, add noise, and apply the optimizer's update.

        Args:
          state: from `init` or an earlier step; it remains usable.
          batch: from `batches`.

        Returns:
          The new state and the metrics, with the members along axis 0 for an ensemble. "loss" is the mean over the
          batch (NaN if it has no examples), and "clipped" the fraction of examples with a norm above its clip norm.
          With `has_aux`, each array in `aux` is averaged over the batch too: under its own name if `aux` is a dict,
          otherwise as "aux". Metrics are computed from the data without noise: do not publish them.

        Raises:
          TypeError: `batch` is not a `Batch`; the loss does not return a real scalar.
          ValueError: a state made with other settings, or with an optimizer whose state has another structure or other
            shapes; a batch sampled with another probability, or for another step (not checked while tracing); a loss
            that changes state of a model other than its random keys.

        Cost:
          Checking the step number of a batch waits for the previous step to finish.
        """
        if self._latest() is not state:  # a state from the previous step fits
            self._step.check_state("DPSGD.step", state)
        check_batch("DPSGD.step", batch, (self.ledger.sampling_probability, self.ledger.bands))
        # The accountant assumes that each batch is used exactly once. A tracer has no concrete step number to check.
        known = batch.step is not None and not isinstance(batch.step, Tracer) and not isinstance(state.step, Tracer)
        if known and int(batch.step) != int(state.step):
            steps = f"for a state after {int(batch.step)} steps, but this state has taken {int(state.step)}"
            raise ValueError(f"DPSGD.step: the batch was drawn {steps}; use each batch of dp.batches once, in order.")
        after, metrics = self._compiled_step(state, batch)
        self._latest = weakref.ref(after)
        return after, metrics

    def fit(
        self,
        state: DPState[Model],
        data: Any,
        *,
        steps: int | None = None,
        epsilon_budget: float | None = None,
        together: bool = False,
        sizes: Sequence[int] | None = None,
        progress: bool = True,
        checkpoint_dir: Any = None,
        checkpoint_every: int | None = None,
        checkpoint_keep: int = 2,
        resume: Resume = "auto",
        history_every: int = 1,
    ) -> tuple[DPState[Model], History]:
        """Run the training loop until all steps are taken or an ε budget is reached.

        Args:
          state: the state to start from; it remains usable.
          data: as for `batches`.
          steps: the number of further steps; None for all that remain of `num_steps`.
          epsilon_budget: an upper bound on ε: training stops before the step that would exceed it.
          together: for an ensemble, whether the budget and the progress bar count all members as published together.
          sizes: as for `batches`.
          progress: whether to show a progress bar with an upper bound on the ε spent (per member, unless `together`).
          checkpoint_dir: a directory for checkpoints named `step_00000100` and so on; it is created if missing, and
            locked meanwhile. If it holds a complete checkpoint of this run later than `state`, training resumes from
            the newest, with results equal to an uninterrupted run bit for bit; `steps` counts from `state`. Damaged
            checkpoints are skipped with a warning, the incomplete checkpoint of a killed run is removed, and other
            files are not touched. A final checkpoint is always written; one that cannot be written is warned of.
            Checkpoints hold the keys of noise and batches, and a digest of the data: keep them as secret as the data.
          checkpoint_every: steps between checkpoints; None writes only the final one.
          checkpoint_keep: the number of checkpoints to keep; older ones are removed.
          resume: as for `Trainer.fit`: "auto" raises if the newest checkpoint is of another run (another first state,
            loss, optimizer or data), True goes on all the same, and False renames all checkpoints and starts anew.
          history_every: steps between rows of the history.

        Returns:
          The state after the last step, and the history: a list of dicts, one for each recorded step (and member of an
          ensemble), with "step" and the metrics of `step`, which are not private. Ctrl-C stops training after the
          current step and still returns both; a second Ctrl-C interrupts at once.

        Raises:
          TypeError, ValueError: as for `step` and `batches`; more steps than `num_steps`; a budget that `state` already
            exceeds; a checkpoint of another run, with other settings, or later than the last requested step.
          OSError: `checkpoint_dir` cannot be written, is in use, or has no room; raised before the first step.
        """
        check_options("DPSGD.fit", steps, checkpoint_dir, checkpoint_every, checkpoint_keep, history_every, resume)
        self._step.check_state("DPSGD.fit", state)
        start, models = int(state.step), published(state, together)

        def within(budget: float, most: int) -> int:
            return self.ledger.steps_within(budget, self.target_delta, self.accountant, models, most)

        wanted, target = last_step(start, steps, self.num_steps, epsilon_budget, within)
        directory = RunDirectory.open("DPSGD.fit", checkpoint_dir, checkpoint_keep, Group.of(state), resume, start)
        with directory as store:
            after, history, interrupted = train(
                store,
                state,
                data,
                lambda state: self.batches(data, state, sizes=sizes),
                self._donated_step,
                lambda: padding_only(data, self.ledger, self.num_examples, self._step.microbatch_size or 1),
                lambda step, _: self.ledger.progress(step, target, self.target_delta, self.accountant, models),
                target=target,
                checkpoint_every=checkpoint_every,
                history_every=history_every,
                progress=progress,
            )
        if not interrupted:
            report_end(start, int(after.step), wanted, target, steps, epsilon_budget, progress)
        return after, history

    def save(self, path: str | os.PathLike[str], state: DPState) -> None:
        """Write a state with its ledger to a directory, atomically. Keep it secret: it holds the keys of the noise.

        Args:
          path: the directory to create. An existing checkpoint is replaced once the new one is complete.
          state: the state to write, which also holds the seed of the batches.

        Raises:
          TypeError, ValueError: as for `step`.
          FileExistsError: `path` exists and is not a checkpoint, or also holds other files.
        """
        check_state("DPSGD.save", state, self.ledger)
        write_state("DPSGD.save", Path(path), state)

    def load(self, path: str | os.PathLike[str], like: DPState[Model]) -> DPState[Model]:
        """Read a state that `save` or `fit` wrote, bit for bit.

        Args:
          path: the directory of the checkpoint.
          like: a state of the same model, optimizer and settings, from `init` with any key; its values are not used.

        Raises:
          FileNotFoundError: there is no such directory.
          TypeError, ValueError: as for `step`; the directory is not a checkpoint, or is damaged, or was made with other
            settings or another model; the error names the first difference.
        """
        check_state("DPSGD.load", like, self.ledger)
        return read_state(Checkpoint.open("DPSGD.load", path), like)

    @overload
    def epsilon(self, state: DPState[Members], *, together: Literal[False] = False) -> np.ndarray: ...
    @overload
    def epsilon(self, state: DPState[Any] | int, *, together: bool = False) -> float: ...
    def epsilon(self, state: DPState | int, *, together: bool = False) -> float | np.ndarray:
        """Return the ε spent at `target_delta`, for adding or removing one example.

        Args:
          state: a state, also one made with other settings; or a number of steps of these settings.
          together: for an ensemble, whether more than one member is published, or anything that depends on more than
            one. Publishing all members spends more than publishing one.

        Returns:
          A float. For an ensemble, unless `together`: shape (size,), for each member the ε if only it is published.

        Raises:
          TypeError: `state` is neither a `DPState` nor a number of steps, or not a `DPState` with `together`.

        Cost:
          With "pld" about a second for the first call with new settings, then less; results are cached.
        """
        if isinstance(state, DPState):
            steps, models = int(state.step), published(state, together)
            spent = state.ledger.epsilon(steps, self.target_delta, self.accountant, models)
            return spent if state.members is None or together else np.full(state.members, spent)
        if not is_int(state) or state < 0 or together:
            what = "a state" if together else "a state or a number of steps"
            raise TypeError(f"DPSGD.epsilon: needs {what}, but got {describe(state)}.")
        return self.ledger.epsilon(int(state), self.target_delta, self.accountant)

    def event(self, state: DPState, *, together: bool = False) -> Any:
        """Return the steps taken as a `dp_accounting.DpEvent`, to compose with other uses of the same data.

        Args:
          state: as for `epsilon`.
          together: as for `epsilon`.

        Raises:
          TypeError: `state` is not a `DPState`.
        """
        if not isinstance(state, DPState):
            raise TypeError(f"DPSGD.event: state must come from DPSGD.init, but got {describe(state)}.")
        return state.ledger.event(int(state.step), published(state, together))
