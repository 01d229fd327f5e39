"""Scores of predictions, and measures of their uncertainty.

Every function is pure `jax.numpy` and works under `jit` and `vmap`. A function that takes (..., batch, classes) accepts
the probabilities of one model or the mean of an ensemble, (batch, classes), as well as those of all members, (members,
batch, classes), and returns one score for each. Labels are integers (batch,), or have further axes, such as one label
for each pixel. For yes-or-no labels the classes are no and yes, as `Ensemble.predict(kind="binary")` returns them; from
a probability p of yes make them with `jnp.stack([1 - p, p], axis=-1)`. So multi-label predictions have shape (batch,
labels, 2), and their labels (batch, labels). Measures of disagreement take the
probabilities of all members, with the members along axis 0. For all losses and errors smaller is better; for `accuracy`
and `auroc` larger is better, and `interval_coverage` should equal its level.

Scores have the dtype of the predictions, or float32 for half precision. A NaN in an example makes the score NaN, but
only the score of that member; so does an empty batch. Invalid values (a label out of range, a logit instead of a
probability) raise, which waits until they are computed; if they are traced, as under `jit`, the score is NaN instead.
"""

from ._scoring.classification import accuracy, adaptive_ece, brier, ece, nll
from ._scoring.regression import gaussian_crps, gaussian_nll, interval_coverage, mixture_nll
from ._scoring.selective import RiskCoverage, auroc, risk_coverage
from ._scoring.uncertainty import (
    aleatoric_variance,
    disagreement,
    entropy,
    epistemic_variance,
    mutual_information,
    predictive_entropy,
)

__all__ = [
    "RiskCoverage",
    "accuracy",
    "adaptive_ece",
    "aleatoric_variance",
    "auroc",
    "brier",
    "disagreement",
    "ece",
    "entropy",
    "epistemic_variance",
    "gaussian_crps",
    "gaussian_nll",
    "interval_coverage",
    "mixture_nll",
    "mutual_information",
    "nll",
    "predictive_entropy",
    "risk_coverage",
]
