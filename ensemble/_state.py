"""`TrainState`: what training changes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from ._ensemble import Ensemble


@partial(jax.tree_util.register_dataclass, data_fields=["ensemble", "opt_state", "step"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class TrainState:
    """What training changes, as a pytree; `Trainer.init` makes it.

    Attributes:
      ensemble: the `Ensemble`.
      opt_state: the optax state, with the members along axis 0 of every array.
      step: how many steps were taken, an int32 scalar.

    Example:
      >>> import optax
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, Trainer
      >>> trainer = Trainer(lambda model, x: model(x).sum(), optax.sgd(0.1))
      >>> state = trainer.init(Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 2, seed=0))
      >>> int(state.step), len(state.ensemble)
      (0, 2)
    """

    ensemble: Ensemble
    opt_state: Any
    step: jax.Array
