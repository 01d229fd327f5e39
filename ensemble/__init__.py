"""Many models of one architecture as one: stacked, evaluated, trained and taken apart again."""

from . import metrics
from ._checkpoint import load, load_member, save
from ._ensemble import Ensemble
from ._prediction import Prediction
from ._state import TrainState
from ._trainer import Trainer

__all__ = ["Ensemble", "Prediction", "TrainState", "Trainer", "load", "load_member", "metrics", "save"]
