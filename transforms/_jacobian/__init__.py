"""Jacobians and Hessians: dense by rows or columns, sparse by compressed products.

A function, its arguments and `argnums` come in as a `Call` (`_calls`); out come the output and one block for each pair
of an output array and an input array, nested as in `jax.jacobian`. In this order:

- `jacobian.py`: the public `jacfwd`, `jacrev` and `jacobian`; `jacobian_of`, which they share with all others here,
  checks the options, asks for a mode, fits the chunk into a memory budget and nests the blocks.
- `hessian.py`: `hessian`, the Jacobian of a Jacobian: which mode is the outer one and which the inner one.
- `mode.py`: `choose_mode` decides between forward and reverse mode: first by which of them the function and its dtypes
  allow, then by the numbers of inputs and outputs, then by the operations that XLA counts. The choice is remembered; a
  `ModeChoice` explains it.
- `dense.py`: the computation by columns (`jax.linearize`) or by rows (`jax.vjp`), mapped over unit vectors, in chunks;
  shardings over explicit axes of a mesh.
- `_sparse/`: with `sparsity=`, patterns and the few products that give all entries, as `BCOO`.
- `batch.py`: `batch_jacobian`, one Jacobian for each example of a batch: by `vmap`, or by summing over the batch.

Both directions are maps over slices: a slice is a column (forward mode), a row (reverse mode) or a product (sparse),
and `chunk_size` is how many slices are computed at a time.
"""
