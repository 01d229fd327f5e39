"""Tools that every transform uses; none of them depends on models.

Checks of the user's arguments, before anything is traced:

- `arguments.py` checks options and `argnums`, names arguments and leaves in errors, and gives a wrapper the signature
  of the function that it wraps;
- `axes.py` checks `in_axes` and `out_axes` against the arguments, and that all mapped axes have the same size;
- `prng.py` recognizes random keys.

`memory.py` turns a memory budget into a chunk size: it compiles the program for a few chunk sizes and reads the size of
the temporaries from XLA's memory analysis.

Work on programs (jaxprs):

- `jaxpr.py` has the one interpreter for them; the caller passes a function that evaluates each operation;
- `source_lines.py` finds the line of the user's source that an operation comes from;
- `weak_types.py` keeps JAX's weak types when a transform rebuilds an array.

Dependence on versions and machines: `compat.py` holds the imports from JAX that move between versions, `machine.py`
finds the processor and its number of cores, and `version.py` is the version of the library.
"""
