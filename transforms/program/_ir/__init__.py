"""Programs as data: the instructions of a compiled program, the JAX operations that they come from, and their cost.

The input is a call; the output is the provenance and the cost of each instruction of its compiled program.

`traced_program.py` traces and compiles a call, with named scopes for the parts of NNX modules (`module_scopes.py`).
`hlo.py` parses the text of the compiled program into computations, instructions and array types.
`provenance.py` splits an instruction's `op_name` into the JAX operation and its scopes, and adds the source line. It
finds the nearest named neighbors of an instruction without a name, and divides an instruction, such as a fusion,
among the JAX operations that it represents.
`unnamed_dots.py` matches unnamed matrix products and convolutions with the products of the jaxpr.
`cost.py` counts floating point operations and bytes of memory traffic from the shapes of an instruction.

Two files work on the jaxpr, before XLA transforms it, for `_fold` and `unnamed_dots.py`:
`flat_program.py` inlines calls into one list of nodes. Each value records the node that computes it, its uses, and
whether it depends on parameters alone. It also prunes and evaluates such lists.
`axis_correspondence.py` maps the axes of an array to the axes of its transpose, reshape or broadcast.
"""
