"""Per-sample gradients, clipped gradient sums for differential privacy, and DP-SGD training.

`_per_example/` computes each example's gradient, its norm, and sums of clipped gradients, for any loss.
`_check_loss` tells losses that are means or sums over their examples from those that are not, and for which all of this
would be about another loss. `_clipped_fun` clips and sums the outputs of any function.
`_dpsgd/` samples batches, adds noise to the clipped sums, trains, accounts for the privacy spent, and audits it.
"""

from ._check_loss import LossCheck, check_loss
from ._clipped_fun import clipped_fun
from ._dpsgd.adaptive import AdaptiveClipping
from ._dpsgd.audit import Audit
from ._dpsgd.dpsgd import DPSGD
from ._dpsgd.sampling import Batch
from ._dpsgd.state import DPState
from ._per_example.clipped import clipped_grad
from ._per_example.per_sample import per_sample_grad, per_sample_norm

__all__ = [
    "DPSGD",
    "AdaptiveClipping",
    "Audit",
    "Batch",
    "DPState",
    "LossCheck",
    "check_loss",
    "clipped_fun",
    "clipped_grad",
    "per_sample_grad",
    "per_sample_norm",
]
