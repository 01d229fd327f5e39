"""`DPSGD`: the public class, which joins clipped sums, noise, sampling and accounting."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from ..._calls.primals import trainable_of
from ..._core.arguments import check_callable, check_count, check_number, describe, is_int
from ..._core.compat import Tracer
from ..._core.prng import check_key
from ..._models.equinox import differentiated, held
from ..._models.split_model import Members, Model, is_members, models_of, split_tree
from ..._runs.checkpoint import Checkpoint
from ..._runs.history import History, Recorder
from ..._runs.loop import check_options, run
from ..._runs.processes import Group
from ..._runs.run_directory import RunDirectory
from .._per_example.methods import Method, check_method
from . import settings
from .accounting import Accountant, Ledger
from .sampling import Batch, SampledBatches, check_batch
from .state import DPState, check_state, check_trainable, published, read_state, resumed, save_run, write_state
from .step import SAMPLING, PrivateStep


class DPSGD:
    """Train with differential privacy: this class does the clipping, noise, Poisson sampling and privacy accounting.

    `init` makes a state, `batches` samples, `step` takes one step and `fit` many; `state.model` is the trained model.

    Args:
      loss: `loss(model, *batch)` returns a real scalar. `model` is what `init` gets; the batch is one example, as a
        batch of one, so a loss that takes its mean is right as it is.
      optimizer: an optax `GradientTransformation` that uses only gradients.
      l2_clip_norm: the norm that each example's gradient is scaled down to where it has a larger one.
      noise_multiplier: standard deviation of the noise in units of `l2_clip_norm`. Zero is for a comparison without
        privacy: its ε is infinite.
      target_epsilon: the ε that `num_steps` steps may spend, in place of `noise_multiplier`, which is then found.
      target_delta: the δ that every ε here is for.
      num_examples: how many examples the data have. It is taken to be public.
      expected_batch_size: the mean size of a batch: each example takes part in a step with probability
        `expected_batch_size / num_examples`. The noisy sum is divided by it, never by the size that was drawn.
      num_steps: how many steps the run has.
      method: as for `clipped_grad`: "auto", "vmap", "ghost" or "book_keeping"; they differ in time and memory only.
      accountant: "pld" (privacy loss distributions, tight) or "rdp" (Rényi divergences, quick).
      noise_strategy: None for noise that is independent in each step, or the coefficients of a banded Toeplitz
        strategy matrix, shape (bands,), such as `jax_privacy.matrix_factorization.toeplitz.optimize_banded_toeplitz`
        finds. The noise of `bands` steps in a row then cancels in part; in return the examples are divided into `bands`
        groups, of which each step samples from the next one.
      keep_batch_dim: whether the loss gets an example as a batch of one; with False, without that axis. Use False if
        axis 0 of the data indexes users, each with an axis of examples: then "example" means "user" here.
      microbatch_size: how many examples are computed at a time, to save memory; None for as many as "auto" finds quick.
        Batches are padded to multiples of it.
      has_aux: whether the loss returns `(scalar, aux)`; the metrics of a step then have the means of `aux`. Neither the
        clipping nor the noise covers them.

    Attributes:
      noise_multiplier: as given, or as found.
      ledger: what each step spends.
      target_delta, accountant, num_examples, num_steps: as given.

    Raises:
      TypeError, ValueError: both or none of `noise_multiplier` and `target_epsilon`; a number out of its range; an
        optimizer that is not one.
      ModuleNotFoundError: the extra is missing: `pip install 'plurax[privacy]'`.

    Privacy:
      (ε, δ)-differential privacy of everything that depends on the parameters alone, for adding or removing one
      example. `metrics` are not private. docs/dp-sgd.md states it exactly, and what is not covered.

    Cost:
      A step is one compiled program: `clipped_grad`, one Gaussian number for each parameter, and the optimizer. With
      `target_epsilon` and "pld", some ten seconds to find the noise, more where ε is above ten.

    Source:
      Abadi et al. 2016, "Deep Learning with Differential Privacy" (algorithm 1); Choquette-Choo et al. 2023,
      "(Amplified) Banded Matrix Factorization". Noise and sampling are those of jax-privacy, accounting is
      dp-accounting's.

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
        l2_clip_norm: float,
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
        has_aux: bool = False,
    ) -> None:
        settings.check_extra()
        check_callable("DPSGD", loss, "loss")
        settings.check_optimizer(optimizer)
        check_method("DPSGD", method)
        check_count("DPSGD", "microbatch_size", microbatch_size, optional=True)
        check_count("DPSGD", "num_examples", num_examples)
        check_count("DPSGD", "num_steps", num_steps)
        clip = check_number("DPSGD", "l2_clip_norm", l2_clip_norm, lambda x: 0 < x < math.inf, "positive and finite")
        delta, strategy = settings.checked_delta(target_delta, num_examples), settings.checked_strategy(noise_strategy)
        size, probability = settings.checked_sampling(num_examples, expected_batch_size, len(strategy))
        # One pass through all groups is accounted for as a single Poisson-sampled step: see `Ledger.event`.
        rounds = math.ceil(num_steps / len(strategy))
        sigma = settings.checked_noise(noise_multiplier, target_epsilon, probability, rounds, delta, accountant)
        self.ledger = Ledger(sigma, probability, clip, size, strategy)
        self.noise_multiplier, self.target_delta = sigma, delta
        self.accountant, self.num_examples, self.num_steps = accountant, int(num_examples), int(num_steps)
        self._step = PrivateStep(loss, optimizer, self.ledger, method, keep_batch_dim, microbatch_size, has_aux)
        self._compiled_step = jax.jit(self._step)
        self._donated_step = jax.jit(self._step, donate_argnums=0)  # it takes over the memory of the state

    def init(self, model_or_params: Model, *, key: jax.Array) -> DPState[Model]:
        """Return the state before the first step; a copy, so the model stays as it is.

        Args:
          model_or_params: an NNX or Equinox module, a pytree of arrays (or with modules in it), of which those of real
            floating point train, or an `Ensemble`: all members see the same batches, each with noise of its own: as it
            would be alone with `jax.random.fold_in(key, i)` (a key of "rbg" draws other noise for each under `vmap`).
          key: a key such as `jax.random.key(seed)`, from which noise and batches are drawn. Privacy rests on it: for a
            model that is published take one that cannot be guessed, as docs/dp-sgd.md shows, and keep it secret.

        Raises:
          TypeError: `key` is not a key; parameters that are not of real floating point.
          ValueError: there are no parameters; modules that share a variable.
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
        # Batches are drawn on the host by NumPy, which takes the words of a key as its seed.
        seed = jax.random.key_data(jax.random.fold_in(key, SAMPLING)).astype(jnp.uint32)
        state: DPState[Model] = DPState(
            tree, opt_state, noise_state, mask_key, jnp.zeros((), jnp.int32), seed, self.ledger, members
        )
        # Strongly typed, or a second program would be compiled for the second step.
        return jax.tree.map(lambda x: jnp.array(x, jnp.result_type(x)), state)

    def batches(self, data: Any, state: DPState | None = None, *, sizes: Sequence[int] | None = None) -> SampledBatches:
        """Return an iterator of Poisson-sampled batches of the data, for the steps that are left.

        Each example takes part in each step independently of all others. Batches are padded to a few sizes, so that a
        step is compiled a few times only; padding contributes zero.

        Args:
          data: the examples, along axis 0 of NumPy or JAX arrays. A tuple or list is unpacked into the arguments of
            the loss after the model; anything else is one argument.
          state: the state that the batches are for: its key decides which they are, and its step where they begin. None
            draws all of them anew, from the system's randomness.
          sizes: the sizes to pad to, such as multiples of the number of devices; None for up to four sizes around the
            expected one. A larger batch is padded to a multiple of the largest size.

        Returns:
          An iterator of `Batch`es, with `num_steps` of them for a whole run.

        Raises:
          TypeError: data that are not arrays; a state that is not one.
          ValueError: another number of examples than `num_examples`; a state of other settings; sizes below 1, or that
            `microbatch_size` does not divide.

        Cost:
          The batches before the state's step are drawn again, and not looked up: 60 µs each for 256 of 60,000
          examples, 1 ms for 4,096 of a million.
        """
        if state is None:
            seed, start = np.random.SeedSequence().generate_state(8).tolist(), 0
        else:
            check_state("DPSGD.batches", state, self.ledger)
            seed, start = np.asarray(state.seed).tolist(), int(state.step)
        public = self.ledger, self.num_examples, self.num_steps
        return SampledBatches(data, *public, seed, start, sizes, self._step.microbatch_size or 1)

    def step(self, state: DPState[Model], batch: Batch) -> tuple[DPState[Model], dict[str, jax.Array]]:
        """Take one step: the clipped sum of the batch, noise, and the optimizer's update.

        Args:
          state: from `init` or an earlier step; it stays usable.
          batch: from `batches`.

        Returns:
          The new state, and metrics, for an ensemble with the members along axis 0: "loss", the mean over the batch
          (NaN for one without examples), and "clipped", the fraction of examples whose gradients were scaled down.
          With `has_aux`, also the mean over the batch of each array in `aux`: under its own names where that is a dict,
          else as "aux".
          Metrics are computed from the data without noise: they are for your eyes only.

        Raises:
          TypeError: anything but a `Batch`; a loss that is not a real scalar.
          ValueError: a state of other settings; a batch that was drawn with another probability, or for another step
            (of which a traced step cannot know); a loss that changes the state of a model, its random keys aside.

        Cost:
          Where a batch has the number of its step, this waits for the step before.
        """
        check_state("DPSGD.step", state, self.ledger)
        check_batch("DPSGD.step", batch, (self.ledger.sampling_probability, self.ledger.bands))
        # A batch that is used twice, or left out, is not what the accountant counts with. A tracer has no number yet.
        known = batch.step is not None and not isinstance(batch.step, Tracer) and not isinstance(state.step, Tracer)
        if known and int(batch.step) != int(state.step):
            steps = f"for a state after {int(batch.step)} steps, but this one has taken {int(state.step)}"
            raise ValueError(f"DPSGD.step: the batch was drawn {steps}; take those of dp.batches in order, each once.")
        return self._compiled_step(state, batch)

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
        history_every: int = 1,
    ) -> tuple[DPState[Model], History]:
        """Take steps until they are taken or a budget is spent, with a progress bar that shows ε, and checkpoints.

        Args:
          state: where to start; it stays usable.
          data: as for `batches`.
          steps: how many further steps to take; None for all that are left of `num_steps`.
          epsilon_budget: the ε that no step may pass: training ends before the one that would.
          together: for an ensemble, whether the budget and the bar are for all members published together.
          sizes: as for `batches`.
          progress: whether to show a bar with a bound of the ε that is spent (of each member, unless `together`).
          checkpoint_dir: a directory for checkpoints, `step_00000100` and so on, made where it is missing. If it holds
            a whole checkpoint later than `state`, training goes on from the newest, to the same bits as if it had not
            stopped; the steps count from `state`. A damaged one is passed over with a warning, and what a run that was
            killed had begun to write is removed. What else is in the directory stays as it is. A final checkpoint is
            always written. They hold the keys of noise and batches: keep them as secret as the data.
          checkpoint_every: steps between checkpoints; None writes only the final one.
          checkpoint_keep: how many checkpoints to keep, the newest.
          history_every: steps between rows of the history.

        Returns:
          The state after the last step, and the history: a list of dicts, one for each recorded step (and member of an
          ensemble), with "step" and the metrics of `step`, which are not private. Ctrl-C ends training cleanly after
          the current step with the same results; a second one interrupts it.

        Raises:
          TypeError, ValueError: as for `step` and `batches`; more steps than `num_steps`; a budget that is spent
            already; a checkpoint of other settings, another model, or later than what was asked for.
          OSError: `checkpoint_dir` cannot be made.
        """
        from tqdm import tqdm

        check_options("DPSGD.fit", steps, checkpoint_dir, checkpoint_every, checkpoint_keep, history_every)
        check_state("DPSGD.fit", state, self.ledger)
        start, models = int(state.step), published(state, together)
        wanted = max(start, self.num_steps) if steps is None else start + steps
        if steps is not None and wanted > self.num_steps:
            raise ValueError(f"DPSGD.fit: step {wanted} is beyond num_steps={self.num_steps}; ask for fewer steps.")
        target = wanted
        if epsilon_budget is not None:
            # How many steps a budget allows is known before the first: it depends on public settings alone.
            budget = check_number("DPSGD.fit", "epsilon_budget", epsilon_budget, lambda x: x > 0, "positive")
            target = self.ledger.steps_within(budget, self.target_delta, self.accountant, models, wanted)
        if target < start:
            raise ValueError(f"DPSGD.fit: {start} steps have spent more than {epsilon_budget=} already; give more.")
        store = history = None
        if checkpoint_dir is not None:
            store = RunDirectory.open("DPSGD.fit", checkpoint_dir, checkpoint_keep, Group.of(state))
            state, history = resumed(store, state)
        begin = int(state.step)
        if begin > target:
            newest = f"the newest checkpoint in {checkpoint_dir} is at step {begin}"
            raise ValueError(f"DPSGD.fit: {newest}, after step {target}; ask for more steps or use another directory.")
        recorder, alone = Recorder(history_every, history), state.members is None

        def record(step: int, metrics: dict[str, Any]) -> None:
            # A model alone is recorded as an ensemble of one.
            recorder.add(step, jax.tree.map(lambda x: x[None], metrics) if alone else metrics)

        after, step, interrupted = run(
            jax.tree.map(jnp.copy, state),  # each step takes over the memory of the state before
            self.batches(data, state, sizes=sizes),
            self._donated_step,
            step=begin,
            target=target,
            record=record,
            say=lambda step, _: self.ledger.progress(step, target, self.target_delta, self.accountant, models),
            save=None if store is None else partial(save_run, store, recorder),
            checkpoint_every=checkpoint_every,
            progress=progress,
            done=begin - start,
            total=target - start,
        )
        if progress and not interrupted and target < wanted:
            tqdm.write(f"Stopped after step {step}: one more would pass ε = {epsilon_budget}.")
        rows = recorder.rows()
        return after, [{name: x for name, x in row.items() if name != "member"} for row in rows] if alone else rows

    def save(self, path: str | os.PathLike[str], state: DPState) -> None:
        """Write a state, ledger and all, to a directory, atomically. It holds the keys of noise and batches.

        Args:
          path: the directory to make. A checkpoint that is there already is replaced once the new one is whole.
          state: what to write.

        Raises:
          TypeError, ValueError: as for `step`.
          FileExistsError: `path` exists and is not a checkpoint, or holds other files too.
        """
        check_state("DPSGD.save", state, self.ledger)
        write_state("DPSGD.save", Path(path), state)

    def load(self, path: str | os.PathLike[str], like: DPState[Model]) -> DPState[Model]:
        """Read what `save` or `fit` wrote, to the bit.

        Args:
          path: the directory.
          like: a state of the same model, optimizer and settings, whose values do not matter: `init` with any key.

        Raises:
          FileNotFoundError: there is no such directory.
          TypeError, ValueError: as for `step`; it is not a checkpoint, is damaged, or is of other settings or another
            model; the first difference is named.
        """
        check_state("DPSGD.load", like, self.ledger)
        return read_state(Checkpoint.open("DPSGD.load", path), like)

    @overload
    def epsilon(self, state: DPState[Members], *, together: Literal[False] = False) -> np.ndarray: ...
    @overload
    def epsilon(self, state: DPState[Any] | int, *, together: bool = False) -> float: ...
    def epsilon(self, state: DPState | int, *, together: bool = False) -> float | np.ndarray:
        """Return the ε that was spent, for `target_delta`.

        Args:
          state: a state, which may be that of other settings; or how many steps of these settings.
          together: for an ensemble, whether all members are published, or anything that depends on more than one:
            each alone spends less than all do.

        Returns:
          A float; for an ensemble that of each member if it alone is published, shape (size,), unless `together`.

        Cost:
          With "pld" about a second for the first of some settings, then less; remembered.
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
        """Return what was spent as a `dp_accounting.DpEvent`, to compose with other uses of the same data.

        Args:
          state: as for `epsilon`.
          together: as for `epsilon`.

        Raises:
          TypeError: `state` is not a state.
        """
        if not isinstance(state, DPState):
            raise TypeError(f"DPSGD.event: state must come from DPSGD.init, but got {describe(state)}.")
        return state.ledger.event(int(state.step), published(state, together))
