"""`DPSGD`: the public class, which combines clipped sums, noise, sampling and accounting."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..._calls.primals import trainable_of
from ..._core.arguments import check_callable, check_count
from ..._core.compat import Tracer
from ..._core.memory import check_budget
from ..._core.prng import check_key
from ..._models.equinox import differentiated, held
from ..._models.split_model import Model, models_of, split_tree
from ..._runs.checkpoint_clock import CHECKPOINT_EVERY
from ..._runs.history import History
from ..._runs.loop import check_options
from ..._runs.processes import Group
from ..._runs.run_directory import Resume, RunDirectory
from .._per_example.methods import Method, check_method
from . import settings
from .accounting import Accountant, Ledger, Sampling
from .adaptive import AdaptiveClipping
from .audit import Audit, audit
from .fit import last_step, report_end, train
from .mechanism import Mechanism
from .model_loss import with_frozen, without_frozen
from .sampling import Batch, check_batch, padding_only
from .state import DPState, check_trainable, published
from .step import SAMPLING, PrivateStep


class DPSGD(Mechanism):
    """Train with differential privacy: clipping, Gaussian noise, random batches and privacy accounting in one class.

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
      expected_batch_size: the mean size of a batch (before truncation): each example takes part with probability
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
      adaptive: lets the clip norms follow a quantile of the gradients' norms; not with `noise_strategy` or `automatic`.
      sampling: "poisson"; or "balls_in_bins", in which each example takes part in every k-th step, k = `num_examples /
        expected_batch_size`, from a random one on; or "b_min_sep", in which after each participation it pauses for
        `bands - 1` steps. The last two are for a `noise_strategy` with many bands; their ε takes minutes.
      truncated_batch_size: the size of the largest batch; larger ones lose random examples. ε is then for zeroing out
        an example, not for adding or removing one.
      check_loss: whether `fit` refuses a loss that couples the examples of a batch, such as one with in-batch
        negatives, since it trains on the losses of single examples. `plurax.transforms.check_loss` compares them before
        the first step, with `keep_batch_dim`; a refusal depends on the data. False: the losses of single examples are
        meant.

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
      one example; if batches are truncated, for zeroing it out. `metrics` are not private. docs/dp-sgd.md states the
      guarantee exactly, and what it does not cover.

    Cost:
      A step is one compiled program: `clipped_grad`, one Gaussian number for each parameter, and the optimizer. With
      `target_epsilon` and "pld", computing the noise takes up to five seconds; beyond one, it shows that it works.

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
        adaptive: AdaptiveClipping | None = None,
        sampling: Sampling = "poisson",
        truncated_batch_size: int | None = None,
        check_loss: bool = True,
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
        sampled = settings.checked_sampling(num_examples, expected_batch_size, strategy, sampling, truncated_batch_size)
        # One cycle through all groups is accounted for as a single Poisson-sampled step: see `Ledger._rounds`.
        rounds = math.ceil(num_steps / len(strategy))
        sigma = settings.checked_noise(noise_multiplier, target_epsilon, sampling, sampled, rounds, delta, accountant)
        ledger = Ledger(
            sigma,
            sampled.probability,
            clipping.l2_norm_bound(),
            sampled.size,
            strategy,
            1 if adaptive is None else len(clipping.norms),
            settings.checked_adaptive(adaptive, clipping, len(strategy), sampled.size, sigma),
            sampling,
            sampled.separation,
            sampled.truncation,
        )
        super().__init__(ledger, delta, accountant, int(num_examples), int(num_steps), microbatch_size or 1)
        self._step = PrivateStep(
            loss,
            optimizer,
            ledger,
            clipping,
            method,
            keep_batch_dim,
            microbatch_size,
            memory_budget,
            has_aux,
            check_loss,
        )
        self._latest: Callable[[], Any] = lambda: None  # a weak reference to the state that `step` returned last
        self._compiled_step = jax.jit(self._step.changing)
        self._donated_step = jax.jit(self._step.changing, donate_argnums=0)  # reuses the memory of the state

    def init(self, model_or_params: Model, *, key: jax.Array, wrt: Any = None) -> DPState[Model]:
        """Return the initial training state. It holds a copy of what trains; the model is not modified.

        Args:
          model_or_params: an NNX or Equinox module, a pytree of arrays or of modules, or an `Ensemble`. Arrays of real
            floating point train. The members of an ensemble see the same batches but draw independent noise: member i
            as a single model with the key `jax.random.fold_in(key, i)` ("rbg" keys draw other noise under `vmap`).
          key: a key such as `jax.random.key(seed)`, from which noise and batches are drawn. The guarantee depends on
            it: to publish a model, use a key that cannot be guessed, as docs/dp-sgd.md shows, and keep it secret.
          wrt: a filter of Flax, such as `nnx.LoRAParam`: only matching variables of NNX modules train. None for
            `nnx.Param`. All others are frozen, and not copied.

        Raises:
          TypeError: `key` is not a key; parameters that are not real floating point; an optimizer that needs the loss.
          ValueError: no parameters; modules, or members of an ensemble, that share a variable; variables of Linen with
            "batch_stats".
        """
        check_key("DPSGD.init", key)
        members = settings.members_of(model_or_params)
        tree = held(split_tree(model_or_params, settings.checked_wrt(wrt, models_of(model_or_params))))
        trainable = differentiated(trainable_of(tree), integers=True)
        check_trainable(tree, trainable, models_of(model_or_params))
        if members is None:
            opt_state, noise_state, mask_key, clip_norms = self._step.init(trainable, key)
        else:
            keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(members))
            opt_state, noise_state, mask_key, clip_norms = jax.vmap(self._step.init)(trainable, keys)
        # NumPy draws the batches on the host; its seed is the words of a key.
        seed = jax.random.key_data(jax.random.fold_in(key, SAMPLING)).astype(jnp.uint32)
        state: DPState[Model] = DPState(
            tree,
            opt_state,
            noise_state,
            clip_norms,
            mask_key,
            jnp.zeros((), jnp.int32),
            seed,
            self.ledger,
            self.target_delta,
            members,
        )
        # Make every array strongly typed, or a second program would be compiled for the second step.
        changing, frozen = without_frozen(tree, self._step.random_state)
        state = jax.tree.map(lambda x: jnp.array(x, jnp.result_type(x)), replace(state, tree=changing))
        frozen = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), frozen)
        return replace(state, tree=with_frozen(state.tree, frozen))

    def step(self, state: DPState[Model], batch: Batch) -> tuple[DPState[Model], dict[str, jax.Array]]:
        """Take one step: sum the clipped gradients of the batch, add noise, and apply the optimizer's update.

        Args:
          state: from `init` or an earlier step; it remains usable.
          batch: from `batches`.

        Returns:
          The new state and the metrics, with the members along axis 0 for an ensemble. "loss" is the mean over the
          batch of the losses of single examples (NaN if it has none), also if the loss of a batch is their sum, and
          "clipped" the fraction of examples with a norm above its clip norm.
          With `adaptive`, "l2_clip_norm" is the clip norm of the step. With `has_aux`, each array in `aux` is averaged
          over the batch too: under its own name if `aux` is a dict, otherwise as "aux". All but "l2_clip_norm" are
          computed from the data without noise: do not publish them.

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
        check_batch("DPSGD.step", batch, self.ledger.sampled)
        # The accountant assumes that each batch is used exactly once. A tracer has no concrete step number to check.
        known = batch.step is not None and not isinstance(batch.step, Tracer) and not isinstance(state.step, Tracer)
        if known and int(batch.step) != int(state.step):
            steps = f"for a state after {int(batch.step)} steps, but this state has taken {int(state.step)}"
            raise ValueError(f"DPSGD.step: the batch was drawn {steps}; use each batch of dp.batches once, in order.")
        changing, frozen = without_frozen(state.tree, self._step.random_state)
        after, metrics = self._compiled_step(replace(state, tree=changing), frozen, batch)
        after = replace(after, tree=with_frozen(after.tree, frozen))
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
        checkpoint_every: int | timedelta | None = CHECKPOINT_EVERY,
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
            Checkpoints hold the keys of noise and batches, and a digest of the data. Only their owner can read them;
            keep them secret, and delete them before the model is published.
          checkpoint_every: steps (an int) or time (a `datetime.timedelta`) between checkpoints, as for `Trainer.fit`;
            None writes only the final one.
          checkpoint_keep: the number of checkpoints to keep; older ones are removed.
          resume: as for `Trainer.fit`: "auto" raises if the newest checkpoint is of another run (another first state,
            loss, optimizer or data), True goes on all the same, and False renames all checkpoints and starts anew. The
            key may differ, so that a program can draw a secret one at each start: the run goes on with that of the
            checkpoint, and says so.
          history_every: steps between rows of the history.

        Returns:
          The state after the last step, and the history: a list of dicts, one for each recorded step (and member of an
          ensemble), with "step" and the metrics of `step`, which are not private. Ctrl-C stops training after the
          current step and still returns both; a second Ctrl-C interrupts at once.

        Raises:
          TypeError, ValueError: as for `step` and `batches`; a loss that couples the examples of a batch, unless
            `check_loss` is False; more steps than `num_steps`; a budget that `state` already
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
                self._step,
                self._donated_step,
                lambda: padding_only(data, self.ledger, self.num_examples, self._step.microbatch_size or 1),
                lambda step, _: self.ledger.progress(step, target, self.target_delta, self.accountant, models),
                target=target,
                checkpoint_every=checkpoint_every,
                history_every=history_every,
                progress=progress,
                limited=target < wanted,
            )
        if not interrupted:
            report_end(start, int(after.step), wanted, target, steps, epsilon_budget, progress)
        return after, history

    def audit(
        self,
        model_or_params: Any,
        data: Any,
        *,
        key: jax.Array,
        canaries: Any = None,
        runs: int = 1000,
        steps: int | None = None,
        confidence: float = 0.95,
        wrt: Any = None,
        chunk_size: int | None = None,
        progress: bool = True,
    ) -> Audit:
        """Bound ε from below: train with canaries put in or left out at random, and tell which were in.

        Each canary is put in with probability 1/2. A canary that is in takes part in steps as any example does.

        Args:
          model_or_params: as for `init`, but not an ensemble. All runs start from it.
          data: as for `batches`.
          key: the key of canaries, noise and batches.
          canaries: the number of canaries in a run, which are gradients of random direction, larger than the clip norm;
            or examples, in the form of `data`. None is one for many runs, and 1,000 for one run.
          runs: the number of runs, which train at the same time; each has one canary. Or 1 for one run with many.
          steps: the number of steps; None for `num_steps`.
          confidence: the confidence of the bound.
          wrt: as for `init`.
          chunk_size: the number of runs to compute at a time; None for all.
          progress: whether to show a progress bar.

        Returns:
          An `Audit` with the bound `lower`, the accountant's ε `upper`, the threat model, and a picture (`plot`).

        Raises:
          TypeError, ValueError: as for `init` and `batches`; canaries in another form than the data, too few, or many
            in many runs; no noise; truncated batches, in which the canaries would depend on each other.

        Cost:
          The memory of `chunk_size` steps, and of `runs` states. At a confidence of 95 %, n runs show a `lower` of
          log(n / 10) at most.

        Source:
          Nasr et al. 2023, "Tight Auditing of Differentially Private Machine Learning" (many runs, gradient canaries);
          Steinke et al. 2023, "Privacy Auditing with One (1) Training Run". jax-privacy computes the bounds.
        """
        count = self.num_steps if steps is None else steps
        settings.check_audit(self.ledger, model_or_params, runs, count, self.num_steps, confidence, chunk_size)
        checked = settings.checked_canaries(canaries, runs, data)
        state = self.init(model_or_params, key=key, wrt=wrt)
        return audit(
            self._step,
            state,
            data,
            checked,
            runs,
            count,
            self.num_examples,
            self.epsilon(count),
            self.target_delta,
            confidence,
            key,
            chunk_size,
            progress,
        )
