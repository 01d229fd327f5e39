"""Per-example gradients of any loss: their norms and clipped sums, from one backward pass of the batch.

The arguments of a call flow in, and come out as each example's gradient or norm, or as the clipped sum over examples:

1. `clipped.py` and `per_sample.py` hold the public functions, which check their options.
2. `loss.py` splits the arguments into parameters and examples, and traces the loss of one example once; it also takes a
   batch that is divided over a mesh (`_calls/explicit_sharding.py`).
   `parameter_uses.py` finds the operations in which parameters meet data, also inside of calls and loops, and which
   operands are only rearrangements (a layout) of the parameters.
3. `methods.py` decides what "auto" takes, and how many examples at a time, by counting bytes and operations. It also
   runs the method; "vmap" forms every example's gradient in memory. If the program of a batch cannot be traced, it
   falls back to one example at a time.
4. `norms.py` runs steps 5 and 6 on a batch and adds up the norms over all uses of each parameter. For clipping it
   rounds them up. It then pulls the weighted sum of the gradients back to the parameters.
5. `perturbations.py` runs the program with a zero added at each use: one backward pass gives the cotangents there, and
   the forward pass records the activations. It also computes the operands again, as a function of the parameters.
6. `rules.py` turns activations and cotangents into gradient forms: products, convolutions, lookups, biases and scales,
   and any other operation by its own derivative. `gradient_forms.py` defines the forms (outer product, row-sparse,
   dense), with their norms and weighted sums, and merges those of one parameter.
7. `report.py` describes what was done at each use, for `.explain`.

docs/how-per-sample.md derives the method.
"""
