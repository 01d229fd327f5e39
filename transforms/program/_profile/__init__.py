"""Time of a program by operation, and differences between two programs: the mechanism of `profile` and `trace_diff`.

The input is a call, as a `TracedProgram` (`_ir/traced_program.py`); the output is a table of operations, scopes and
source lines.

`timeline.py` runs compiled programs under JAX's profiler, and computes the time of each instruction from the trace.
`profile.py` attributes these times to operations, layers (scopes) and source lines (`_ir/provenance.py`), with their
flops and bytes (`_ir/cost.py`), as the rows of a `Profile`.
`eager.py` implements the eager mode: it evaluates the program operation by operation, and times each.

`capture.py` counts the runs of each operation of each scope in the jaxpr, combines the counts with times to a
`Capture`, and writes or reads captures as JSON.
`trace_diff.py` compares two captures, and decides which differences in time exceed the noise.

`display.py` formats the rows, as text for a terminal or with matplotlib.
"""
