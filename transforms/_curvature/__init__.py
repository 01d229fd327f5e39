"""Second derivatives that never form a Hessian: products, diagonals, traces, Laplacians.

A function of one real scalar (for `gnvp` a model and a loss) and its arguments come in as a `Call` (`_calls`); out come
vectors of the arguments' structure, or scalars. In the order of the imports:

- `products.py`: products of the Hessian or the Gauss-Newton matrix with a vector: `hvp`, `value_grad_and_hvp`, `vhp`
  and `gnvp`, in forward over reverse, reverse over reverse, or reverse over forward mode.
- `hessian_trace.py`: `hessian_diagonal` and `hessian_trace`, one second derivative along each unit vector, in chunks
  that may fit into a memory budget; `hutchinson_trace`, an estimate from products with random signs. `of_scalar` is
  the transform that these share with the Laplacian.
- `laplacian.py`: `laplacian`, the exact trace in one forward pass that carries each value with all its first
  derivatives and its Laplacian. Programs that it cannot trace go to `hessian_trace.py`.

Unit vectors and chunks are those of `_jacobian/dense.py`. The Hessian as a matrix is `_jacobian/hessian.py`.
"""
