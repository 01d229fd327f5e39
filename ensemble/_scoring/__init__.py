"""Scores of predictions against labels or targets, and measures of uncertainty.

Input: predictions, of one model or with the members along axis 0, and their labels or targets. Output: one number for
each model or each example. Each public function checks its arguments and then calls one compiled program.
`plurax.ensemble.metrics` re-exports them.

- `validation.py`: the shared checks (dtype, shape, range, valid labels), the conversion of half precision to float32,
  and NaN for invalid traced values, for which nothing can be raised.
- `classification.py`: probabilities against labels: accuracy, log-likelihood, Brier score, calibration errors.
- `regression.py`: means and variances against targets: log-likelihood of a normal distribution and of a mixture, CRPS,
  coverage of intervals.
- `uncertainty.py`: without labels: entropies, mutual information, epistemic and aleatoric variance, disagreement.
- `selective.py`: how well an uncertainty score separates examples: area under the ROC curve, and risk against coverage.
"""
