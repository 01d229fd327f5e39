"""Second derivatives without forming a Hessian: products, diagonals, traces, Laplacians.

Input is a function that returns one real scalar (for `gnvp` a model and a loss) and its arguments, as a `Call`
(`_calls`); output are vectors with the structure of the arguments, or scalars. In the order of the imports:

- `products.py`: products of the Hessian or the Gauss-Newton matrix with a vector: `hvp`, `value_grad_and_hvp`, `vhp`
  and `gnvp`, in forward over reverse, reverse over reverse, or reverse over forward mode.
- `hessian_trace.py`: `hessian_diagonal` and `hessian_trace`, one second derivative along each unit vector, optionally
  in chunks or within a memory budget; `hutchinson_trace`, an estimate from products with random signs. `of_scalar` is
  the transform that these share with the Laplacian.
- `directions.py`: derivatives along all directions, in one array as long as each moves one position of an axis.
- `laplacian.py`: `laplacian`, the exact trace in one forward pass that carries each value with all its first
  derivatives and its Laplacian. For programs that it cannot trace it uses `hessian_trace.py`.

Unit vectors and chunks are as in `_jacobian/dense.py`. For the Hessian as a matrix, see `_jacobian/hessian.py`.
"""
