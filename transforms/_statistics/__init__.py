"""Statistics of per-sample gradients, from the activations and cotangents of one backward pass.

The input is the arguments of a call; the output is a matrix, a vector or a pytree computed from the gradient of every
sample. `privacy/_per_example/` finds the parameter uses, runs the backward pass, and defines the gradient forms.

1. `use_gradients.py` returns the gradients of a batch, one form for each group of uses that share parameters; for the
   kernel with an axis of outputs. If JAX cannot map the loss over samples, they are those of one sample at a time.
2. `inner_products.py` multiplies the gradients of all pairs of samples, in the way of fewest operations.
3. `gram.py` and `ntk.py` add up these products: for a loss, and for all outputs of a model. `moments.py` sums squares,
   `noise_scale.py` norms, and `projection.py` products with random directions.
4. `statistic.py` has what they share: the number of samples at a time, pairs of chunks, and `.explain`.
"""
