"""Tools to inspect compiled programs, to rewrite them, and to compile less.

Inspect a compiled function: `profile` (where the time goes), `trace_diff` and `capture` (the differences between two
versions), `count_layout_ops` (transposes and copies), `assert_donated` (whether donated memory is reused),
`compile_for` (the memory, operations and collectives on a device that is not here).
Rewrite it: `convolutions_as_products` (for CPUs), `fold_bn` (batch norms folded into weights), `depend` (an order
between two values), `masked_topk_mean`.
Compile less: `stack_layers` and `scan_layers` (one layer for all layers), `accumulate` (one micro-batch for all
micro-batches), `bucketed` (a few lengths for all lengths), `aot` and `enable_compile_cache` (one compilation for many
processes). `load_exported` reads what `plurax.ensemble.export` wrote.

`_ir/` traces calls, parses compiled programs and attributes their instructions to JAX operations; the inspection tools
build on it. `_profile/` implements `profile`, `trace_diff` and `capture`, `_fold/` folds batch norms, `_aot/` stores
programs in files. `_layers.py` and `_stack.py` define `scan_layers` and its module. Each remaining file has one
function: `_accumulate.py`, `_bucketed.py`, `_compile_cache.py`, `_compile_for.py`, `_convolutions.py`
(`convolutions_as_products`), `_depend.py`, `_donation.py` (`assert_donated`), `_layout.py` (`count_layout_ops`) and
`_topk.py`.
"""

from ._accumulate import accumulate
from ._aot.aot import aot
from ._aot.exported import Exported, load_exported
from ._bucketed import bucketed
from ._compile_cache import CompileCache, enable_compile_cache
from ._compile_for import Collective, CompileReport, OperationCost, compile_for
from ._convolutions import convolutions_as_products
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
    "Collective",
    "CompileCache",
    "CompileReport",
    "Difference",
    "Exported",
    "FoldReport",
    "Operation",
    "OperationCost",
    "Profile",
    "TraceDiff",
    "accumulate",
    "aot",
    "assert_donated",
    "bucketed",
    "capture",
    "compile_for",
    "convolutions_as_products",
    "count_layout_ops",
    "depend",
    "enable_compile_cache",
    "fold_bn",
    "load_exported",
    "masked_topk_mean",
    "profile",
    "scan_layers",
    "stack_layers",
    "trace_diff",
]
