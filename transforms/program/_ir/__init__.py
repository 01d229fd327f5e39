"""Programs as data: a compiled program's instructions, which JAX operation each comes from, and its cost.

A call goes in; the origin and the cost of each instruction of its compiled program come out.

`traced_program.py` traces and compiles a call, with named scopes for the parts of NNX modules (`module_scopes.py`).
`hlo.py` parses the text of the compiled program into computations, instructions and array types.
`provenance.py` splits an instruction's `op_name` into the JAX operation and its scopes, adds the line of source, finds
the nearest named neighbours of an instruction without a name, and divides an instruction, such as a fusion, among the
JAX operations it represents.
`unnamed_dots.py` matches matrix products and convolutions that XLA left without a name with those of the jaxpr.
`cost.py` counts floating point operations and bytes of memory by the shapes of an instruction.

For the jaxpr, before XLA has changed it, there are two files that `_fold` and `unnamed_dots.py` use:
`flat_program.py` inlines calls into one list of nodes whose values know their maker, their users, and whether they
depend on parameters alone; it prunes and evaluates such lists.
`axis_correspondence.py` finds which axes of a transposed, reshaped or broadcast array become which.
"""
