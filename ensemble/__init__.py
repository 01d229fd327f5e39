"""Many models of one architecture as one: stacked, evaluated, trained and taken apart again."""

from . import calibration, metrics, plots
from ._batches import Batches
from ._checkpoint import load, load_member, save
from ._ensemble import Ensemble
from ._fit import Callback
from ._grid import grid
from ._population import Selection, exploit, greedy_selection, k_best, select, soup
from ._prediction import Prediction
from ._standing import Standing
from ._state import TrainState
from ._tensorboard import TensorBoard
from ._trainer import Trainer
from ._watch import EarlyStopping, Restarts

__all__ = [
    "Batches",
    "Callback",
    "EarlyStopping",
    "Ensemble",
    "Prediction",
    "Restarts",
    "Selection",
    "Standing",
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
