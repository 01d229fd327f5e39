"""`DPState`: what private training changes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from ..._models.equinox import released
from ..._models.split_model import merge_tree
from .accounting import Ledger


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tree", "opt_state", "noise_state", "mask_key", "step", "seed"],
    meta_fields=["ledger", "members"],
)
@dataclass(frozen=True, eq=False)
class DPState:
    """What training with `DPSGD` changes, as a pytree; `DPSGD.init` makes it.

    Attributes:
      tree: the model, taken apart; see `model`.
      opt_state: the optax state; for an ensemble with the members along axis 0 of every array.
      noise_state: the state of the noise, with its key; likewise.
      mask_key: what the random state of modules (dropout) is drawn from, a key; likewise.
      step: how many steps were taken, an int32 scalar.
      seed: what the batches are drawn from, words of uint32. It is as secret as the noise.
      ledger: what each step spends.
      members: how many models there are; None for one that is no ensemble.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from plurax.transforms.privacy import DPSGD
      >>> dp = DPSGD(lambda w, x: jnp.sum(w * x), optax.sgd(0.1), l2_clip_norm=1.0, noise_multiplier=2.0,
      ...            target_delta=1e-5, num_examples=1000, expected_batch_size=50, num_steps=100)
      >>> state = dp.init(jnp.zeros(3), key=jax.random.key(0))
      >>> int(state.step), state.model
      (0, Array([0., 0., 0.], dtype=float32))
    """

    tree: Any
    opt_state: Any
    noise_state: Any
    mask_key: jax.Array
    step: jax.Array
    seed: jax.Array
    ledger: Ledger
    members: int | None

    @property
    def model(self) -> Any:
        """The model, as it was given to `init`: a module, a pytree of parameters, or an ensemble."""
        return merge_tree(released(self.tree))
