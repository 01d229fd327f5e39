"""Store, evaluate and train many models of one architecture as one.

- `Ensemble`: create one with `Ensemble.create(make, size, seed=)`, `Ensemble.stack(models)` or
  `Ensemble.from_apply(...)`. `ens(x)` calls all members, `ens.predict(x)` returns their mean prediction and its
  uncertainty, and `ens[i]` is an ordinary model.
- `Trainer`: trains all members as one program, each with its own hyperparameters. `fit` adds a progress bar, a history,
  validation, checkpoints, `EarlyStopping` and `Restarts`.
- `Batches`: shuffled batches, shared by all members or different for each; `ProcessBatches`: those of which each of
  several processes makes its part; `grid`: combinations of hyperparameters.
- `save`, `load`, `load_member`: write and read an ensemble or a training state, or read a single member; `to_orbax`,
  `from_orbax`: as a checkpoint of Orbax.
- `k_best`, `exploit`, `greedy_selection`, `soup`, `select`: choose, copy, combine and average members.
- `Committee`: ensembles and models of different architectures behind one `predict`; `export`, `load_exported`: the
  prediction as one file for a server, which needs JAX and flatbuffers only.
- `metrics`, `calibration`, `plots`: scores and uncertainty measures; temperatures and conformal sets; figures.
- `averages`: means of weights along a run, Gaussians around them (SWAG), and snapshots.
- `distill`: trains one small model to predict as an ensemble does; `distillation` has its loss and targets.
- `plurax.ensemble.fleet`: groups of members on many machines; `plurax.ensemble.sklearn`: ensembles as estimators of
  scikit-learn. Import both by their names.

Transforms of functions and single models are in `plurax.transforms`, private training in `plurax.transforms.privacy`.

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

The source folders, lowest layer first; the docstring of each describes its files:

- `_scoring`: scores of predictions; `_members`: `Ensemble`, its evaluation, devices and strategies.
- `_step`: one training step of one member, and the state that it changes; `_execution`: the choice of a strategy, and
  the execution of that step for all members; `_training`: `Trainer`, its loop, checkpoints, early stopping,
  populations, batches.
- `_sharing`: what is made of trained members: committees, and files for servers.
- `_fleet`: the workers and the driver of `fleet`.
- `metrics`, `calibration`, `plots`, `averages`, `distillation`, `fleet`, `sklearn`: public modules.
"""

import warnings
from typing import TYPE_CHECKING, Any

from ..transforms._core.prediction import Prediction
from ..transforms._core.version import __version__ as __version__
from ..transforms._runs.loop import Preempted
from ..transforms.program._aot.exported import Exported, load_exported
from . import averages, calibration, distillation, metrics, plots
from ._members.ensemble import Ensemble
from ._members.strategy import Execution
from ._sharing.committee import Committee
from ._sharing.export import export
from ._step.member_status import MemberStatus
from ._step.state import TrainState
from ._training._data.batches import Batches
from ._training._data.process_batches import ProcessBatches
from ._training.callbacks import Callback
from ._training.checkpoint import load, load_member, save
from ._training.early_stopping import EarlyStopping, Restarts
from ._training.grid import grid
from ._training.orbax import from_orbax, to_orbax
from ._training.population import Selection, exploit, greedy_selection, k_best, select, soup
from ._training.tensorboard import TensorBoard
from ._training.trainer import Trainer
from .distillation import distill

__all__ = [
    "Batches",
    "Callback",
    "Committee",
    "EarlyStopping",
    "Ensemble",
    "Execution",
    "Exported",
    "MemberStatus",
    "Prediction",
    "Preempted",
    "ProcessBatches",
    "Restarts",
    "Selection",
    "TensorBoard",
    "TrainState",
    "Trainer",
    "averages",
    "calibration",
    "distill",
    "distillation",
    "exploit",
    "export",
    "from_orbax",
    "greedy_selection",
    "grid",
    "k_best",
    "load",
    "load_exported",
    "load_member",
    "metrics",
    "plots",
    "save",
    "select",
    "soup",
    "to_orbax",
]

# Deprecated names and their replacements. They are not in `__all__`, or every star import would warn.
_DEPRECATED = {"Standing": "MemberStatus"}

if TYPE_CHECKING:
    # A type checker assumes that a module with `__getattr__` has every name.
    Standing = MemberStatus
else:

    def __getattr__(name: str) -> Any:
        """Return the replacement of a deprecated name, with a warning."""
        if name not in _DEPRECATED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        new = _DEPRECATED[name]
        said = f"plurax.ensemble: `{name}` is deprecated and will be removed in 0.4; use `{new}`."
        warnings.warn(said, DeprecationWarning, stacklevel=2)
        return globals()[new]
