"""Scores of predictions, and measures of how sure they are; each a few lines with its source.

Every function is pure `jax.numpy`: it works under `jit` and `vmap`, and where it says (..., batch, classes) on
probabilities of one model or of the mean of an ensemble (batch, classes) as on those of all members (members, batch,
classes), for which it gives one score each. Labels are integers (batch,). What tells how members differ takes those of
all, with the members along axis 0. All scores but `accuracy` are better when they are smaller.

Scores are computed and returned in the dtype of what they are of, but in float32 for half precision. An example that
holds a NaN makes the score NaN, of that member alone; so does a batch without examples. Wrong values (a label that is
no class, a logit where a probability should be) are refused where they are known, which waits for them to be computed;
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
