"""Where the time of a program goes, and what differs between two: the mechanism of `profile`, `capture`, `trace_diff`.

A call goes in, as a `TracedProgram` (`_ir/traced_program.py`); a table of operations, scopes and lines comes out.

`timeline.py` runs compiled programs under JAX's profiler, and computes from the trace how long each instruction took.
`profile.py` attributes these times to operations, layers (scopes) and lines of source (`_ir/attribution.py`), with
their flops and bytes (`_ir/cost.py`), and makes the rows of a `Profile`.
`eager.py` is the other mode: the program is evaluated operation by operation, and each is timed.

`operation_counts.py` counts how often each operation of each scope runs, by the jaxpr alone.
`capture.py` joins these counts with times into a `Capture`, and writes or reads it as JSON.
`trace_diff.py` compares two captures, and decides which differences of time are more than noise.

`table.py` and `bar_chart.py` show the rows, as text for a terminal or with matplotlib.
"""
