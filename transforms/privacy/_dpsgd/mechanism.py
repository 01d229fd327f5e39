"""`Mechanism`: what of a private run does not depend on the model: sampling, noise, and the ε spent."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self, overload

import numpy as np

from ..._core.arguments import describe, is_int
from ..._models.split_model import Members, Model
from ..._runs.checkpoint import read_checkpoint
from ..._runs.processes import Group
from . import settings
from .accounting import Accountant, Ledger
from .sampling import SampledBatches
from .state import DPState, begin_writing, check_state, published, read_state


class Mechanism:
    """The base of `DPSGD`, which documents the attributes.

    Args:
      ledger: the settings of a step.
      target_delta: δ.
      accountant: as for `DPSGD`.
      num_examples: the number of examples in the data.
      num_steps: the number of steps of the run.
      multiple: a divisor of the sizes of batches.
    """

    def __init__(
        self,
        ledger: Ledger,
        target_delta: float,
        accountant: Accountant,
        num_examples: int,
        num_steps: int,
        multiple: int,
    ) -> None:
        self.ledger, self.noise_multiplier = ledger, ledger.noise_multiplier
        self.target_delta: float = target_delta
        self.accountant: Accountant = accountant
        self.num_examples, self.num_steps, self._multiple = num_examples, num_steps, multiple

    @classmethod
    def from_plan(
        cls,
        loss: Callable[..., Any],
        optimizer: Any,
        config: Any,
        *,
        num_examples: int,
        target_delta: float | None = None,
        **options: Any,
    ) -> Self:
        """Return the `DPSGD` that runs an execution plan of jax-privacy.

        Its clip norm, noise, sampling and strategy matrix are the plan's, and its gradients have the plan's scale.
        Noise and batches are drawn from the key of `init`, not from `noise_seed`. Without truncation each example
        draws its group alone, so ε also holds for adding or removing an example.

        Args:
          loss: as for `DPSGD`.
          optimizer: as for `DPSGD`.
          config: a `BandMFExecutionPlanConfig` of jax-privacy 2.0 and 2.1, or a calibrated `BandMFConfig` of 2.2.
          num_examples: as for `DPSGD`.
          target_delta: as for `DPSGD`; None for the δ of the configuration, if it has one.
          **options: the other arguments of `DPSGD`, such as `method` and `keep_batch_dim`.

        Raises:
          TypeError, ValueError: as for `DPSGD`; another configuration, or one without noise; `column_normalize`.

        Examples:
          >>> import jax.numpy as jnp, optax
          >>> from jax_privacy.experimental.execution_plan import BandMFExecutionPlanConfig
          >>> from plurax.transforms.privacy import DPSGD
          >>> config = BandMFExecutionPlanConfig(iterations=10, strategy=[1.0, 0.5], epsilon=None, delta=None,
          ...                                    noise_multiplier=2.0, sampling_prob=0.2)
          >>> dp = DPSGD.from_plan(lambda w, x: jnp.sum(w * x), optax.sgd(0.1), config, num_examples=1000,
          ...                      target_delta=1e-5)
          >>> dp
          DPSGD(num_steps=10, noise_multiplier=2, sampling_probability=0.2, bands=2, target_delta=1e-05)
        """
        import optax

        given, factor = settings.of_plan(config, num_examples)
        delta = getattr(config, "delta", None) if target_delta is None else target_delta
        if taken := (given.keys() | {"adaptive", "automatic", "sampling"}) & options.keys():
            raise TypeError(f"DPSGD.from_plan: {min(taken)} is the plan's; omit it.")
        scaled = optax.chain(optax.scale(factor), settings.checked_optimizer(optimizer))
        make: Any = cls
        return make(loss, scaled, target_delta=delta, **given, **options)

    def __repr__(self) -> str:
        """Return the settings of the mechanism; `epsilon` computes what they spend."""
        settings = f"num_steps={self.num_steps}, {self.ledger.summary()}, target_delta={self.target_delta:g}"
        return f"{type(self).__name__}({settings})"

    def batches(self, data: Any, state: DPState | None = None, *, sizes: Sequence[int] | None = None) -> SampledBatches:
        """Return an iterator over the sampled batches of the remaining steps.

        Each example takes part independently of all others, unless batches are truncated. Batches are padded to a few
        sizes, so that a step is compiled only a few times; padding contributes zero.

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
        return SampledBatches(data, *public, seed, start, sizes, self._multiple)

    @overload
    def epsilon(self, state: DPState[Members], *, together: Literal[False] = False) -> np.ndarray: ...
    @overload
    def epsilon(self, state: DPState[Any] | int, *, together: bool = False) -> float: ...
    def epsilon(self, state: DPState | int, *, together: bool = False) -> float | np.ndarray:
        """Return the ε spent at `target_delta`, for adding or removing one example (zeroing it out, if truncated).

        Args:
          state: a state, also one made with other settings; or a number of steps of these settings.
          together: for an ensemble, whether more than one member is published, or anything that depends on more than
            one. Publishing all members spends more than publishing one.

        Returns:
          A float. For an ensemble, unless `together`: shape (size,), for each member the ε if only it is published.

        Raises:
          TypeError: `state` is neither a `DPState` nor a number of steps, or not a `DPState` with `together`.

        Cost:
          With "pld" up to a second for the first call with new settings, then less; results are cached. The
          discretization is relative to ε if ε is large, which adds at most 1e-4 of it (4e-4 above ten thousand); an
          ε above a million, which "pld" cannot compute, is that of "rdp". With a sampling other than Poisson's, some
          100 / δ samples of as many numbers as there are steps: minutes for 1e-5.
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

        If batches are truncated, the event is for zeroing out an example.

        Args:
          state: as for `epsilon`.
          together: as for `epsilon`.

        Raises:
          TypeError: `state` is not a `DPState`.
          ValueError: `sampling` is not Poisson's, for which dp-accounting has no event.
        """
        if not isinstance(state, DPState):
            raise TypeError(f"DPSGD.event: state must come from DPSGD.init, but got {describe(state)}.")
        return state.ledger.event(int(state.step), published(state, together))

    def save(self, path: str | os.PathLike[str], state: DPState) -> None:
        """Write a state with its ledger to a directory, atomically. Keep it secret: it holds the keys of the noise.

        Only the owner of the files can read them.

        Args:
          path: the directory to create. An existing checkpoint is replaced once the new one is complete.
          state: the state to write, which also holds the seed of the batches.

        Raises:
          TypeError, ValueError: as for `step`.
          FileExistsError: `path` exists and is not a checkpoint, or also holds other files.
        """
        check_state("DPSGD.save", state, self.ledger)
        begin_writing("DPSGD.save", Path(path), state).write()

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
        return read_checkpoint("DPSGD.load", path, lambda found: read_state(found, like), Group.of(like))
