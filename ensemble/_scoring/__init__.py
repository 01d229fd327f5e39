"""Scores of predictions against labels or values, and measures of their uncertainty.

In come arrays of predictions, of one model or with the members along axis 0, and their labels or targets; out
comes one number for each model, or for each example. Each public function checks its arguments, and then calls one
compiled program. `plurax.ensemble.metrics` re-exports them.

- `validation.py`: the checks that all of them share (dtype, shape, range, labels that are classes), half precision as
  float32, and NaN for traced values that cannot be refused.
- `classification.py`: probabilities against labels: accuracy, log-likelihood, Brier score, calibration errors.
- `regression.py`: means and variances against targets: log-likelihood of a normal distribution and of a mixture, CRPS,
  coverage of intervals.
- `uncertainty.py`: without labels: entropies, mutual information, epistemic and aleatoric variance, disagreement.
- `selective.py`: how well a score of doubt separates examples: the ROC area, and risk against coverage.
"""
