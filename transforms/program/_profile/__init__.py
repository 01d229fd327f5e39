"""Where the time of a program goes, and what differs between two: the mechanism of `profile`, `capture`, `trace_diff`.

A call goes in, as a `TracedProgram` (`_ir/traced_program.py`); a table of operations, scopes and lines comes out.

`timeline.py` runs compiled programs under JAX's profiler, and computes from the trace how long each instruction took.
`profile.py` attributes these times to operations, layers (scopes) and lines of source (`_ir/provenance.py`), with
their flops and bytes (`_ir/cost.py`), and makes the rows of a `Profile`.
`eager.py` is the other mode: the program is evaluated operation by operation, and each is timed.

`capture.py` counts how often each operation of each scope runs, by the jaxpr alone, joins these counts with times into
a `Capture`, and writes or reads it as JSON.
`trace_diff.py` compares two captures, and decides which differences of time are more than noise.

`display.py` shows the rows, as text for a terminal or with matplotlib.
"""
