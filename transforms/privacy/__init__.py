"""Per-sample gradients, their norms, and the clipped sums that differential privacy asks for."""

from ._clipped import clipped_grad, per_sample_grad, per_sample_norm

__all__ = ["clipped_grad", "per_sample_grad", "per_sample_norm"]
