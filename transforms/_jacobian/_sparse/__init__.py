"""Sparse Jacobians: patterns detected in programs, columns colored, and a few products that give all entries.

A call and `sparsity=` come in; out comes an `Evaluator` that computes the entries as `BCOO`. In this order:

- `pattern.py`: the pattern as rows and columns, given by the caller (and checked) or found: the derivative is traced,
  and dependence is followed through its program.
- `detect.py`: that walk, operation by operation, and constants. Each array becomes index sets: for each of its
  numbers, the inputs it depends on. For each operation it tries, in this order: control flow, a rule, a fallback
  program. If none applies (a callback, `shard_map`), every result depends on every operand, with a warning.
- `index_sets.py`: the sets, rows of a sparse matrix of booleans, their unions and selections; values that are known.
- `primitive_rules.py`: `_RULES`, the table of the operations that a pattern can follow, and most of the rules:
  elementwise operations, rearrangements, sums, matrix products, linear solves. `windows.py` has those for convolutions,
  `indexing.py` those for gathers, scatters, slices and updates, whose indices may be known, partly known or unknown.
- `fallback_rules.py`: for operations without a rule, a program of other operations that does the same.
- `control_flow.py`: branches; short loops iteration by iteration, longer ones by the sets of their bodies.
- `coloring.py`: from the pattern to products in forward and reverse mode that sum many columns, or rows, each.
- `compressed.py`: the products, the entries read from them, and whether a dense Jacobian would be cheaper.
- `verify.py`: `check=True`, which compares the entries with the product of the Jacobian and a random vector.

An entry too many costs time, one too few is a wrong number: whatever is not known counts as dependence.
"""
