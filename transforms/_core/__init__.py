"""Tools that every transform uses; nothing in this folder knows about models.

Before anything is traced, a transform checks what its user wrote:

- `arguments.py` checks options and `argnums`, names arguments and leaves in errors, and lets a wrapper keep the
  signature of what it wraps;
- `axes.py` checks `in_axes` and `out_axes` against the arguments and finds the one size of all mapped axes;
- `prng.py` recognizes random keys.

How a memory budget becomes a chunk size is in `memory.py`: a chunk is tried by compiling it and asking XLA for the size
of its temporaries.

Programs (jaxprs) are read, not run, in many places:

- `jaxpr.py` is the one interpreter over them: the caller passes in what each operation means;
- `source_lines.py` finds the user's own line of source behind an operation;
- `weak_types.py` keeps JAX's weak types where a transform rebuilds an array.

What depends on versions and machines is in two files: `compat.py` holds the imports from JAX whose place changes
between versions, and `machine.py` finds the processor and its number of cores.
"""
