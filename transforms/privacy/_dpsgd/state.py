"""`DPState`: what private training changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.arguments import describe, leaf_name
from ..._models.equinox import is_array, released
from ..._models.split_model import merge_tree, shared_variable
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
      tree: the model, split into arrays and structure; see `model`.
      opt_state: the optax state; for an ensemble with the members along axis 0 of every array.
      noise_state: the state of the noise, with its key; likewise.
      mask_key: what the random state of modules (dropout) is drawn from, a key; likewise.
      step: how many steps were taken, an int32 scalar.
      seed: what the batches are drawn from, words of uint32. It is as secret as the noise.
      ledger: what each step spends.
      members: how many models there are; None for one that is not an ensemble.

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
        """Return the model, as it was given to `init`: a module, a pytree of parameters, or an ensemble."""
        return merge_tree(released(self.tree))


def check_trainable(tree: Any, trainable: Any, models: Iterable[Any]) -> None:
    """Raise if there are no parameters, or if some are not arrays, cannot train, or are shared by modules."""
    if not jax.tree.leaves(tree):
        raise ValueError("DPSGD.init: there are no parameters, so there is nothing to train.")
    # Complex parameters too are refused: noise would have half of its variance in each part.
    # Where nothing trains, the parameters are meant to be what there is.
    for path, leaf in jax.tree.leaves_with_path(trainable if jax.tree.leaves(trainable) else tree):
        if not is_array(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"DPSGD.init: `{leaf_name('params', path)}` is {describe(leaf)}, but parameters are arrays of real "
                "floating point; let the loss close over what does not train."
            )
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not is_array(leaf):
            raise TypeError(
                f"DPSGD.init: `{leaf_name('params', path)}` is {describe(leaf)}, but parameters are arrays (of which "
                "those of floating point train); let the loss close over what is none."
            )
    shared = shared_variable(list(models))
    if shared:
        variable = shared[0][1]
        raise ValueError(
            f"DPSGD.init: two modules share the variable `{variable}`; put them into one module, such as nnx.Dict."
        )
