"""Jacobians and Hessians: dense by rows or columns, sparse by compressed products.

Input is a function, its arguments and `argnums`, as a `Call` (`_calls`); results are the output and one block for each
pair of an output array and an input array, nested as in `jax.jacobian`. In this order:

- `jacobian.py`: the public `jacfwd`, `jacrev` and `jacobian`; `jacobian_of`, which all transforms here share, checks
  the options, chooses the mode, fits the chunk into a memory budget and nests the blocks.
- `hessian.py`: `hessian`, the Jacobian of a Jacobian, with a mode for the outer and for the inner one.
- `mode.py`: `choose_mode` decides between forward and reverse mode: first by which of them the function and its dtypes
  allow, then by the numbers of inputs and outputs, then by the operations that XLA counts. The choice is remembered; a
  `ModeChoice` explains it.
- `dense.py`: the computation by columns (`jax.linearize`) or by rows (`jax.vjp`), mapped over unit vectors, in chunks;
  shardings over explicit axes of a mesh.
- `_sparse/`: with `sparsity=`, sparsity patterns, and a few products that give all entries, as `BCOO`.
- `batch.py`: `batch_jacobian`, one Jacobian for each example of a batch: by `vmap`, or by summing over the batch.

All of these map over slices: a slice is a column (forward mode), a row (reverse mode) or a product (sparse), and
`chunk_size` is the number of slices to compute at a time.
"""
