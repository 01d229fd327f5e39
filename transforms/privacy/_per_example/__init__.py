"""Per-example gradients of any loss: their norms and clipped sums, from one backward pass of the batch.

The input is the arguments of a call; the output is each example's gradient or norm, or the clipped sum over examples:

1. `clipped.py` and `per_sample.py` define the public functions, which check their options. `clip_norms.py` turns norms
   into the weight of each example: for one clip norm, for parts of the parameters, automatic, or before rounding to a
   grid.
2. `loss.py` splits the arguments into parameters and examples, and traces the loss of one example once. It also handles
   a batch that is sharded over a mesh (`_calls/explicit_sharding.py`).
   `parameter_uses.py` finds the operations in which parameters meet data, also inside calls and loops, and which
   operands are only rearrangements (a layout) of the parameters.
3. `methods.py` chooses the method and group size for "auto" from `_estimates/`, and runs a method; `budget.py` compiles
   them until one fits into a memory budget. "vmap" materializes every example's gradient. If the program of a batch
   cannot be traced, it falls back to one example at a time.
4. `norms.py` runs steps 5 and 6 on a batch and adds up the norms over all uses of each parameter. For clipping it
   rounds them up. It then pulls the weighted sum of the gradients back to the parameters.
5. `perturbations.py` runs the program with a zero added at each use: one backward pass computes the cotangents there,
   and the forward pass records the activations. It also recomputes the operands as a function of the parameters.
   For "ghost", `in_backward.py` gives uses a backward rule that computes norms or sums there, so that nothing is kept.
6. `rules.py` converts activations and cotangents to gradient forms, with rules for products, convolutions, lookups,
   biases and scales; any other operation uses its own derivative. `gradient_forms.py` defines the forms (outer product,
   row-sparse, dense) with their norms and weighted sums, and merges the forms of one parameter.
7. `report.py` describes the rule at each use, for `.explain`.

docs/how-per-sample.md derives the method.
"""
