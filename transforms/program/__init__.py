"""Look at a program, and rewrite it."""

from ._accumulate import accumulate
from ._aot.aot import aot
from ._bucketed import bucketed
from ._compile_cache import CompileCache, enable_compile_cache
from ._depend import depend
from ._donation import assert_donated
from ._fold.fold_bn import fold_bn
from ._fold.report import Candidate, FoldReport
from ._layers import scan_layers, stack_layers
from ._layout import count_layout_ops
from ._profile.capture import Capture, capture
from ._profile.profile import Operation, Profile, profile
from ._profile.trace_diff import Difference, TraceDiff, trace_diff
from ._topk import masked_topk_mean

__all__ = [
    "Candidate",
    "Capture",
    "CompileCache",
    "Difference",
    "FoldReport",
    "Operation",
    "Profile",
    "TraceDiff",
    "accumulate",
    "aot",
    "assert_donated",
    "bucketed",
    "capture",
    "count_layout_ops",
    "depend",
    "enable_compile_cache",
    "fold_bn",
    "masked_topk_mean",
    "profile",
    "scan_layers",
    "stack_layers",
    "trace_diff",
]
