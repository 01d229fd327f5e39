"""Programs looked at and rewritten."""

from ._fold import fold_bn

__all__ = ["fold_bn"]
