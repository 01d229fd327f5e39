"""Look at a program, and rewrite it."""

from ._capture import Capture, capture
from ._depend import depend
from ._donation import assert_donated
from ._layout import count_layout_ops
from ._profile import Operation, Profile, profile
from ._trace_diff import Difference, TraceDiff, trace_diff

__all__ = [
    "Capture",
    "Difference",
    "Operation",
    "Profile",
    "TraceDiff",
    "assert_donated",
    "capture",
    "count_layout_ops",
    "depend",
    "profile",
    "trace_diff",
]
