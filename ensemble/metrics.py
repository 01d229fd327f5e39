"""Scores of predictions, and measures of their uncertainty; each a few lines with its source.

Every function is pure `jax.numpy` and works under `jit` and `vmap`. Where it takes (..., batch, classes), it takes the
probabilities of one model or of the mean of an ensemble (batch, classes) as well as those of all members (members,
batch, classes), and returns one score for each. Labels are integers (batch,). Measures of how members differ take the
probabilities of all of them, with the members along axis 0. All scores but `accuracy` are better when they are smaller.

Scores are computed and returned in the dtype of their argument, but in float32 for half precision. An example that
holds a NaN makes the score NaN, of that member alone; so does a batch without examples. Wrong values (a label that is
not a class, a logit in place of a probability) are refused where they are known, which waits for them to be computed;
where they are traced, as under `jit`, they make the score NaN.
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
