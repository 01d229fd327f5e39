"""Second derivatives that never form a Hessian: products, diagonals, traces, Laplacians."""
