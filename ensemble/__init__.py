"""Many models of one architecture as one: stacked, evaluated, trained and taken apart again."""

from . import calibration, metrics, plots
from ._members.ensemble import Ensemble
from ._members.prediction import Prediction
from ._step.member_status import Standing
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
