"""Per-sample gradients, the clipped sums that differential privacy asks for, and training with them."""

from ._clipped import clipped_grad
from ._dpsgd import DPSGD
from ._per_sample import per_sample_grad, per_sample_norm
from ._sampling import Batch
from ._state import DPState

__all__ = ["DPSGD", "Batch", "DPState", "clipped_grad", "per_sample_grad", "per_sample_norm"]
