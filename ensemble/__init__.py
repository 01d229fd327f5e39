"""Many models of one architecture, stored, evaluated and trained as one.

- `Ensemble`: made by `Ensemble.create(make, size, seed=)`, `Ensemble.stack(models)` or `Ensemble.from_apply(...)`.
  `ens(x)` calls all members, `ens.predict(x)` returns their mean and its uncertainty, `ens[i]` is an ordinary model.
- `Trainer`: trains all members as one program, each with its own hyperparameters; `fit` has a progress bar, a history,
  checkpoints, `EarlyStopping` and `Restarts`.
- `Batches`: random batches, the same for all members or different ones; `grid`: combinations of hyperparameters.
- `save`, `load`, `load_member`: an ensemble or a training state on disk, and one member of it.
- `k_best`, `exploit`, `greedy_selection`, `soup`, `select`: choose, copy, combine and average members.
- `metrics`, `calibration`, `plots`: scores, temperatures and conformal sets, figures.

Functions and single models are in `plurax.transforms`, private training in `plurax.transforms.privacy`.

Examples:
  >>> import jax.numpy as jnp, optax
  >>> from flax import nnx
  >>> from plurax.ensemble import Ensemble, Trainer
  >>> rates = {"learning_rate": [0.1, 0.2]}
  >>> trainer = Trainer(lambda model, x: jnp.mean(model(x) ** 2), optax.adam, hyperparams=rates)
  >>> state = trainer.init(Ensemble.create(lambda rngs: nnx.Linear(3, 1, rngs=rngs), 2, seed=0))
  >>> state, history = trainer.fit(state, [jnp.ones((4, 3))] * 10, progress=False)
  >>> len(history), state.ensemble
  (20, Ensemble of 2 × Linear, 4 parameters each)

The source, lowest layer first; each folder's own docstring is its map:

- `_scoring`: scores of predictions; `_members`: `Ensemble`, its evaluation, devices and strategies;
- `_step`: one training step of one member, and the state that it changes; `_execution`: how that step is executed for
  all members, and who chooses it; `_training`: `Trainer`, its loop, checkpoints, early stopping, populations,
  batches;
- `metrics`, `calibration`, `plots`: public.
"""

import warnings
from typing import TYPE_CHECKING, Any

from ..transforms._core.version import __version__ as __version__
from . import calibration, metrics, plots
from ._members.ensemble import Ensemble
from ._members.prediction import Prediction
from ._step.member_status import MemberStatus
from ._step.state import TrainState
from ._training.batches import Batches
from ._training.checkpoint import load, load_member, save
from ._training.early_stopping import EarlyStopping, Restarts
from ._training.fit import Callback
from ._training.grid import grid
from ._training.population import Selection, exploit, greedy_selection, k_best, select, soup
from ._training.tensorboard import TensorBoard
from ._training.trainer import Trainer

__all__ = [
    "Batches",
    "Callback",
    "EarlyStopping",
    "Ensemble",
    "MemberStatus",
    "Prediction",
    "Restarts",
    "Selection",
    "TensorBoard",
    "TrainState",
    "Trainer",
    "calibration",
    "exploit",
    "greedy_selection",
    "grid",
    "k_best",
    "load",
    "load_member",
    "metrics",
    "plots",
    "save",
    "select",
    "soup",
]

# Deprecated names, with those that replace them. They are not in `__all__`, or every star import would warn.
_DEPRECATED = {"Standing": "MemberStatus"}

if TYPE_CHECKING:
    # A type checker would take a module with `__getattr__` to have every name.
    Standing = MemberStatus
else:

    def __getattr__(name: str) -> Any:
        """Return what replaces a deprecated name, with a warning."""
        if name not in _DEPRECATED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        new = _DEPRECATED[name]
        said = f"plurax.ensemble: `{name}` is deprecated and goes with 0.4; write `{new}`."
        warnings.warn(said, DeprecationWarning, stacklevel=2)
        return globals()[new]
