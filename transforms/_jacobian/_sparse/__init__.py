"""Sparse Jacobians: detect the pattern in the program, color it, and read all entries from a few products.

Input is a call and `sparsity=`; the result is an `Evaluator` that computes the entries as `BCOO`. In this order:

- `pattern.py`: the pattern as rows and columns, either given by the caller (and checked) or found by tracing the
  derivative and propagating dependence through its program.
- `detect.py`: this propagation, operation by operation, and the evaluation of constants. Each array is represented by
  index sets: for each element, the inputs that it depends on. For each operation it tries, in this order: control
  flow, a rule, a fallback program. If none applies (a callback, `shard_map`), it warns, and every result depends on
  every operand.
- `index_sets.py`: the index sets, as rows of a sparse boolean matrix, with unions and selections; known values.
- `primitive_rules.py`: `_RULES`, the table of operations with a rule, and most of the rules: elementwise operations,
  rearrangements, sums, matrix products, linear solves. `windows.py` has the rules for convolutions and pooling,
  `indexing.py` for gathers, scatters, slices and updates, whose indices may be known, partly known or unknown.
- `fallback_rules.py`: for operations without a rule, an equivalent program of other operations.
- `control_flow.py`: branches; short loops iteration by iteration, longer loops by the sets of their bodies.
- `coloring.py`: from the pattern to products in forward and reverse mode, each with a sum of many columns or rows.
  `greedy.py` has the colorings of one matrix, of its columns or as a symmetric one.
- `compressed.py`: the products, the entries read from them, and the test whether a dense Jacobian is cheaper.
- `verify.py`: `check=True`, which compares the entries with the product of the Jacobian and a random vector.

A superfluous entry costs time, but a missing one gives wrong results: unknown dependence counts as dependence.
"""
